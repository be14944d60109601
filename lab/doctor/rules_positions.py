"""Rules about positions: how far the draft's and the target's contexts reach, and how they turn positions."""

from __future__ import annotations

from collections.abc import Iterator

from lab.doctor.rule import SEEN, Found, rule
from lab.doctor.subject import Subject

#: The rotary base of a configuration that gives none.
BASE = 10_000.0


@rule(
    "draft-context",
    "error",
    "The draft's positions end before the engine's",
    reads="config/speculative.py:SpeculativeConfig._maybe_override_draft_max_position_embeddings",
    fields=("max_position_embeddings",),
    issues=("v#48894", "v#49343"),
)
def draft_context(s: Subject) -> Iterator[Found]:
    """The draft is asked for positions up to the engine's context. Up to vLLM 0.24 its rotary table ends at its own
    `max_position_embeddings`: a crash when compiled, silent garbage in eager mode. Later versions (pull request 49343) stretch the
    table, but the draft was never trained out there.
    """
    own, context = s.draft_int("max_position_embeddings"), s.context
    if not own or not context or own >= context:
        return
    limit = s.line.speculative.get("max_model_len")
    if isinstance(limit, int) and limit <= own:
        return
    old = s.machine.older_than(0, 25)
    yield Found(
        f"draft {own} positions, engine {context}{'' if s.machine.vllm else ' (vLLM version unknown)'}",
        f"--max-model-len {own}, or a draft trained for longer contexts",
        None if old else "warning",
    )


@rule(
    "draft-rope",
    "warning",
    "Draft and target turn positions differently",
    reads="model_executor/models/llama.py:LlamaAttention._init_rotary_emb",
    fields=("rope_parameters",),
    issues=(SEEN,),
)
def draft_rope(s: Subject) -> Iterator[Found]:
    """The draft's rotary base and scaling are read from its own file. They may differ from the target's if it was trained so; a base
    that was merely forgotten (10,000 by default) lowers acceptance with every position.
    """

    def rope(config: object) -> tuple[float | None, str]:
        if not isinstance(config, dict) and not hasattr(config, "get"):
            return None, ""
        inner = config.get("rope_parameters") or {}
        scaling = config.get("rope_scaling") or {}
        inner = inner if isinstance(inner, dict) else {}
        scaling = scaling if isinstance(scaling, dict) else {}
        theta = inner.get("rope_theta", config.get("rope_theta"))
        kind = inner.get("rope_type", scaling.get("rope_type", scaling.get("type", "default")))
        return (float(theta) if isinstance(theta, int | float) else None), str(kind)

    if not s.draft_view or not s.target_text or (s.draft_mla != s.mla and not s.target_text.get("rope_theta")):
        return
    (own, kind), (theirs, their_kind) = rope(s.draft_view), rope(s.target_text)
    if s.draft is not None and s.draft.minimal:
        return
    if theirs is not None and (BASE if own is None else own) != theirs:
        yield Found(
            f"rope_theta: draft {own if own is not None else f'not given ({BASE:.0f})'}, target {theirs:g}",
            f"If it was trained with the target's: \"rope_theta\": {theirs:g} in the draft's config.json.",
        )
    elif own is not None and kind != their_kind:
        yield Found(
            f"rotary scaling: draft {kind}, target {their_kind}", "Right if the draft was trained so; at long contexts check acceptance."
        )


@rule(
    "target-context",
    "error",
    "The engine's context is longer than the target's",
    reads="config/model.py:_get_and_verify_max_len",
    fields=("VLLM_ALLOW_LONG_MAX_MODEL_LEN",),
)
def target_context(s: Subject) -> Iterator[Found]:
    """vLLM refuses `--max-model-len` beyond what the target's configuration allows, scaling included."""
    own, asked = s.target_int("max_position_embeddings"), s.line.number("max-model-len")
    scaled = any(
        isinstance(s.target_text.get(name), dict) and s.target_text[name].get("factor") for name in ("rope_scaling", "rope_parameters")
    )
    if own and asked and asked > own and not scaled and not s.on("VLLM_ALLOW_LONG_MAX_MODEL_LEN"):
        yield Found(f"--max-model-len {asked}, the target has {own} positions", f"--max-model-len {own}")
