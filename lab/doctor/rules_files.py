"""Rules about files that are broken, and about what kind of model they hold."""

from __future__ import annotations

from collections.abc import Iterator

from lab.doctor.rule import SEEN, Found, rule
from lab.doctor.subject import Subject, number

#: Architectures of Eagle3 drafts that vLLM 0.32 knows; `EAGLEConfig` puts "Eagle3" before other names.
LLAMA = ("Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3MiniMaxM2ForCausalLM", "Eagle3Qwen2_5vlForCausalLM",
         "Eagle3Qwen3vlForCausalLM", "PEagleDraftModel", "PeagleLlamaForCausalLM")  # fmt: skip
OTHERS = ("Eagle3Qwen3ForCausalLM", "PeagleQwen3ForCausalLM", "Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM")
#: Whole numbers that vLLM reads from a draft's configuration, and those without which it cannot build the draft.
NUMBERS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
           "draft_vocab_size", "target_hidden_size", "max_position_embeddings", "num_aux_hidden_states")  # fmt: skip
NEEDED = ("hidden_size", "num_attention_heads", "vocab_size")
CONFIG = "transformers_utils/configs/eagle.py:EAGLEConfig.__init__"


@rule(
    "config-unreadable", "error", "A configuration cannot be read", reads="transformers_utils/configs/eagle.py:EAGLEConfig.from_pretrained"
)
def config_unreadable(s: Subject) -> Iterator[Found]:
    """vLLM reads config.json first and stops at one that is missing, cut short, empty or of the wrong kind."""
    for model in (s.target, s.draft):
        for problem in model.problems if model else ():
            if problem.kind == "config":
                yield Found(f"{problem.file}: {problem.what}", problem.todo)


@rule(
    "weights-unreadable",
    "error",
    "Weights are missing or damaged",
    reads="model_executor/model_loader/weight_utils.py:safetensors_weights_iterator",
)
def weights_unreadable(s: Subject) -> Iterator[Found]:
    """A weight file that is cut short, or that an index names and the folder lacks, ends the start after minutes of loading."""
    for model in (s.target, s.draft):
        for problem in model.problems if model else ():
            if problem.kind == "weights":
                yield Found(f"{problem.file}: {problem.what}", problem.todo)


@rule(
    "command-unreadable",
    "error",
    "The command line cannot be read",
    reads="engine/arg_utils.py:EngineArgs.add_cli_args",
    fields=("--speculative-config",),
)
def command_unreadable(s: Subject) -> Iterator[Found]:
    """Flags that hold JSON are parsed before anything else; a shell that ate the quotes is the usual cause."""
    for problem in s.line.problems:
        yield Found(
            problem, """Write it like this: --speculative-config '{"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": 3}'"""
        )


@rule(
    "field-types",
    "error",
    "A field has the wrong type",
    reads="model_executor/models/llama_eagle3.py:LlamaModel.__init__",
    fields=("eagle_config", "num_aux_hidden_states", "target_hidden_size"),
)
def field_types(s: Subject) -> Iterator[Found]:
    """vLLM uses these fields as whole numbers (and `eagle_config` as an object) without checking; text or null ends in a traceback."""
    view = s.draft_view
    for name in NUMBERS:
        value = view.get(name)
        if value is not None and (number(value) is None or value <= 0):
            yield Found(f"draft: {name} is {value!r:.60}", f"Make {name} a positive whole number in the draft's config.json.")
        elif view and name in NEEDED and value is None:
            yield Found(f"draft: {name} is missing", f"Add {name} to the draft's config.json, from the training configuration.")
    if view.get("eagle_config") is not None and not isinstance(view["eagle_config"], dict):
        yield Found(
            f"draft: eagle_config is {view['eagle_config']!r:.60}",
            'Make it an object: "eagle_config": {"eagle_aux_hidden_state_layer_ids": [...]}.',
        )
    ids = view.get("eagle_aux_hidden_state_layer_ids")
    if ids is not None and not isinstance(ids, list):
        yield Found(f"draft: eagle_aux_hidden_state_layer_ids is {ids!r:.60}", "Make it a list of layer numbers.")
    for name in ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings", "num_attention_heads"):
        value = s.target_text.get(name)
        if value is not None and number(value) is None:
            yield Found(f"target: {name} is {value!r:.60}", f"Make {name} a whole number in the target's config.json.")


@rule("draft-architecture", "error", "vLLM does not know the draft's architecture", reads=CONFIG, fields=("architectures", "Eagle3"))
def draft_architecture(s: Subject) -> Iterator[Found]:
    """With method eagle3 vLLM looks the architecture up after putting "Eagle3" before its name; one that it does not list ends the
    start.
    """
    if s.draft is None or not s.draft.known or s.line.speculative.get("method", "eagle3") != "eagle3":
        return
    kind = s.draft.config.get("speculators_model_type")
    if kind is not None:
        model = s.draft_view.get("model_type", "llama")
        if kind not in ("eagle3", "peagle"):
            yield Found(f"speculators_model_type is {kind!r}", "Give an Eagle3 draft, or the method that this draft was trained for.")
        elif model not in ("llama", "qwen3"):
            yield Found(f"a speculators draft with model_type {model!r}", "vLLM reads llama and qwen3 layers only: convert the draft.")
        return
    names = s.draft.config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        yield Found(f"architectures is {names!r:.60}", 'Add "architectures": ["LlamaForCausalLMEagle3"] to the draft\'s config.json.')
        return
    for name in names:
        seen = name if name.startswith("Eagle3") or name.endswith("Eagle3") else f"Eagle3{name}"
        if seen not in (*LLAMA, *OTHERS) and name not in (*LLAMA, *OTHERS):
            yield Found(
                f"architectures names {name}, which vLLM 0.32 looks up as {seen}",
                "For a one-layer Llama-type draft write LlamaForCausalLMEagle3.",
            )


@rule(
    "draft-pickled",
    "warning",
    "The draft's weights are pickled",
    reads="model_executor/model_loader/default_loader.py:DefaultModelLoader._prepare_weights",
    fields=("*.bin",),
)
def draft_pickled(s: Subject) -> Iterator[Found]:
    """The doctor opens no pickles, because that runs their code: tensor names, shapes and the vocabulary map stay unchecked."""
    if s.draft is not None and s.draft.pickled:
        yield Found(f"{s.draft.name} holds *.bin files and no safetensors", "Convert it to safetensors, then let the doctor look again.")


@rule(
    "target-no-chat-template", "warning", "The target has no chat template", reads="renderers/hf.py:resolve_chat_template", issues=(SEEN,)
)
def target_no_chat_template(s: Subject) -> Iterator[Found]:
    """Without a template the chat endpoint refuses, and raw prompts look unlike what the draft was trained on: acceptance measured on
    them is not that of chats.
    """
    target = s.target
    if target is None or target.folder is None or not target.known or s.line.has("chat-template"):
        return
    if "tokenizer_config.json" not in target.files or {"chat_template.jinja", "chat_template.json"} & target.files:
        return
    try:
        text = (target.folder / "tokenizer_config.json").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    if '"chat_template"' not in text:
        yield Found(
            f"neither {target.name}/chat_template.jinja nor tokenizer_config.json has one",
            "Add --chat-template FILE, or fetch the instruct model's chat_template.jinja.",
        )


@rule("remote-code", "warning", "The model brings its own code", reads="config/model.py:ModelConfig", fields=("trust_remote_code",))
def remote_code(s: Subject) -> Iterator[Found]:
    """`auto_map` names Python files in the repository. vLLM knows many such models itself, but a tokenizer of its own kind needs them."""
    for role, model in (("target", s.target), ("draft", s.draft)):
        if model is not None and isinstance(model.config.get("auto_map"), dict) and not s.line.has("trust-remote-code"):
            yield Found(
                f"the {role}'s config.json has auto_map, and the line has no --trust-remote-code",
                "Read the code, then add --trust-remote-code.",
            )


@rule(
    "target-has-no-eagle3",
    "error",
    "The target gives no auxiliary states",
    reads="v1/worker/gpu_model_runner.py:GPUModelRunner._setup_eagle3_aux_hidden_state_outputs",
    fields=("supports_eagle3",),
)
def target_has_no_eagle3(s: Subject) -> Iterator[Found]:
    """An Eagle3 draft reads three inner layers of the target; vLLM refuses targets whose class does not hand them out."""
    names = s.target.config.get("architectures") if s.target is not None else None
    #: Text models of 0.32 without the interface, of those that people try; others are left to vLLM.
    without = (
        "GPT2LMHeadModel",
        "OPTForCausalLM",
        "BloomForCausalLM",
        "MambaForCausalLM",
        "Mamba2ForCausalLM",
        "T5ForConditionalGeneration",
    )
    if s.speculative and isinstance(names, list):
        for name in names:
            if name in without:
                yield Found(f"the target is a {name}", "Use a target with Eagle3 support, or no draft.")
