"""Rules about the draft's tensors: whether the weights are what the configuration says."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lab.doctor.rule import SEEN, Found, rule
from lab.doctor.subject import Subject

LOAD = "model_executor/models/llama_eagle3.py:Eagle3LlamaForCausalLM.load_weights"
MODEL = "model_executor/models/llama_eagle3.py:LlamaModel.__init__"
LAYER = "model_executor/models/llama_eagle3.py:LlamaDecoderLayer.__init__"


def _has(s: Subject, ending: str) -> bool:
    return s.shape(ending) is not None


@rule("draft-fc", "error", "The projection of the target's states is missing or misshapen", reads=MODEL, fields=("self.fc", "output_size"))
def draft_fc(s: Subject) -> Iterator[Found]:
    """`fc` turns the target's states into the draft's width. Without it the draft runs on what memory held; with another output width
    loading fails.
    """
    wide, shape = s.draft_int("hidden_size"), s.shape("fc.weight")
    inner = s.draft_view.get("eagle_config")
    unused = isinstance(inner, dict) and inner.get("use_aux_hidden_state") is False
    if s.weights_known and s.draft_view and not unused and shape is None:
        yield Found("no tensor is called fc.weight", "Is this an Eagle 1 draft (method eagle)? Else export fc.weight.")
    if shape is not None and wide and shape[0] != wide:
        yield Found(
            f"fc.weight is {list(shape)}, its output should be {wide}", f'Set "hidden_size": {shape[0]} if the other weights agree.'
        )


@rule("draft-layers", "error", "Number of the draft's layers and its weights disagree", reads=MODEL, fields=("num_hidden_layers",))
def draft_layers(s: Subject) -> Iterator[Found]:
    """vLLM builds `num_hidden_layers` layers and loads what is there: a layer without weights stays random, a layer too many in the
    file ends loading.
    """
    layers = s.draft_int("num_hidden_layers")
    if not s.weights_known or s.draft is None or not layers:
        return
    there = set()
    for name in s.draft.tensors or ():
        if name.startswith("midlayer."):
            there.add(0)
        elif found := re.match(r"(?:model\.)?layers\.(\d+)\.", name):
            there.add(int(found[1]))
    if there and there != set(range(layers)):
        yield Found(
            f"num_hidden_layers is {layers}, the weights hold layers {sorted(there)}",
            f'Set "num_hidden_layers": {len(there)}, or fetch all weights.',
        )


@rule(
    "draft-layer-shapes",
    "error",
    "A layer's weights do not have the configured shape",
    reads=LAYER,
    fields=("2 * self.hidden_size", "head_dim", "total_num_kv_heads"),
)
def draft_layer_shapes(s: Subject) -> Iterator[Found]:
    """The first layer reads embedding and feature side by side, 2 x `hidden_size`; heads are `head_dim` wide (by default width / heads,
    which is wrong for many models). Other shapes are refused while loading.
    """
    wide, heads, middle = s.draft_int("hidden_size"), s.draft_int("num_attention_heads"), s.draft_int("intermediate_size")
    if not s.weights_known or s.draft is None or not wide or not heads or s.draft_mla:
        return
    kv, head = s.draft_int("num_key_value_heads") or heads, s.draft_int("head_dim") or wide // heads
    said = "" if s.draft_int("head_dim") else f" (head_dim is not given: {wide} / {heads} = {head})"
    first = "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"
    expected = {
        first[0]: (heads * head, 2 * wide),
        first[1]: (kv * head, 2 * wide),
        first[2]: (kv * head, 2 * wide),
        "self_attn.o_proj.weight": (wide, heads * head),
    }
    if middle:
        expected |= {"mlp.gate_proj.weight": (middle, wide), "mlp.up_proj.weight": (middle, wide), "mlp.down_proj.weight": (wide, middle)}
    for name, header in (s.draft.tensors or {}).items():
        inside = re.match(r"(?:model\.)?(?:midlayer|layers\.0)\.(.+)$", name)
        want = expected.get(inside[1]) if inside else None
        if want and header.dtype not in ("U8", "I32", "F4") and header.shape != want:
            fix = (
                "Add head_dim to the draft's config.json."
                if said and "attn" in name
                else "Correct the draft's config.json: it belongs to other weights."
            )
            yield Found(f"{name} is {list(header.shape)}, vLLM builds {list(want)}{said}", fix)


@rule("draft-prefix", "error", "The weights' names have a prefix that vLLM adds itself", reads=LOAD, fields=('"model." + name',))
def draft_prefix(s: Subject) -> Iterator[Found]:
    """vLLM puts "model." before every name but `lm_head` and the maps; names that begin with it already are not found in the model."""
    names = [name for name in (s.draft.tensors or {}) if name.startswith("model.")] if s.draft and not s.draft_mla else []
    if names:
        yield Found(f"{len(names)} names begin with 'model.', {names[0]} for one", "Strip 'model.' from the names and save the file again.")


@rule(
    "norm-before-fc",
    "error",
    "A norm before fc is in the weights or the configuration, not in both",
    reads=LOAD,
    fields=("norm_before_fc", "input_norm."),
    issues=("v#38111",),
)
def norm_before_fc(s: Subject) -> Iterator[Found]:
    """`norm_before_fc` decides whether `input_norm` is applied. If it is off vLLM drops such weights without a word; if it is on
    without weights the norm does nothing it was trained for.
    """
    view, inner = s.draft_view, s.draft_view.get("eagle_config")
    wanted = bool(
        inner.get("norm_before_fc", view.get("norm_before_fc", False)) if isinstance(inner, dict) else view.get("norm_before_fc", False)
    )
    if s.weights_known and wanted != _has(s, "input_norm.weight"):
        yield Found(
            f"norm_before_fc is {str(wanted).lower()}, input_norm.weight is {'there' if not wanted else 'missing'}",
            f'Set "norm_before_fc": {str(not wanted).lower()}, or export again.',
        )


@rule(
    "fc-norm",
    "error",
    "Norms of the single states are in the weights or the configuration, not in both",
    reads=MODEL,
    fields=("fc_norm",),
    issues=("v#38111",),
)
def fc_norm(s: Subject) -> Iterator[Found]:
    """`fc_norm` builds one norm for each auxiliary state. Weights without the switch end loading; the switch without weights leaves
    norms that were never trained.
    """
    there = any(name.startswith(("fc_norm.", "model.fc_norm.")) for name in (s.draft.tensors or {})) if s.draft else False
    wanted = bool(s.draft_view.get("fc_norm", False))
    if s.weights_known and wanted != there:
        yield Found(
            f"fc_norm is {str(wanted).lower()}, its weights are {'there' if there else 'missing'}", f'Set "fc_norm": {str(there).lower()}.'
        )


@rule(
    "norm-before-residual",
    "warning",
    "A speculators draft leaves norm_before_residual open",
    reads="transformers_utils/configs/speculators/algos.py:update_eagle3",
    fields=("norm_before_residual", "True"),
    issues=("v#38111",),
)
def norm_before_residual(s: Subject) -> Iterator[Found]:
    """In the speculators form a missing `norm_before_residual` counts as true, in the flat form as false: a draft that was converted
    from one to the other changes its meaning.
    """
    if s.draft is not None and s.draft.config.get("speculators_model_type") == "eagle3" and "norm_before_residual" not in s.draft.config:
        yield Found(
            "a speculators configuration without norm_before_residual: vLLM takes true",
            'Write it out: "norm_before_residual": true or false, as trained.',
        )


@rule(
    "draft-bias", "error", "Attention biases are in the weights or the configuration, not in both", reads=LAYER, fields=("attention_bias",)
)
def draft_bias(s: Subject) -> Iterator[Found]:
    """Biases of q, k and v are built if `attention_bias` is true: otherwise weights that have them end loading; without weights they
    stay as memory was.
    """
    wanted, there = bool(s.draft_view.get("attention_bias", False)), _has(s, "q_proj.bias")
    if s.weights_known and s.draft_view and wanted != there and not s.draft_mla:
        yield Found(
            f"attention_bias is {str(wanted).lower()}, q_proj.bias is {'there' if there else 'missing'}",
            f'Set "attention_bias": {str(there).lower()}.',
        )


@rule(
    "latent-head-tied",
    "error",
    "The target's head is tied, which vLLM does not do here",
    reads="model_executor/models/deepseek_v2.py:DeepseekV2ForCausalLM.__init__",
    fields=("lm_head",),
    issues=(SEEN,),
)
def latent_head_tied(s: Subject) -> Iterator[Found]:
    """vLLM never ties embeddings of DeepSeek-type models: without `lm_head.weight` in the file all logits are equal, only token 0 comes
    out, and every comparison of two lanes passes for nothing.
    """
    names = s.target.names if s.target is not None else frozenset()
    if s.mla and names and not any(name.endswith("lm_head.weight") for name in names):
        yield Found(
            "kv_lora_rank is set and no tensor is called lm_head.weight",
            'Write lm_head.weight (a copy of embed_tokens.weight) and "tie_word_embeddings": false.',
        )
