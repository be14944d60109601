"""Rules about the draft's vocabulary: the map from its words to the target's, its head and its embedding."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lab.doctor.rule import SEEN, Found, rule
from lab.doctor.subject import Subject

LOAD = "model_executor/models/llama_eagle3.py:Eagle3LlamaForCausalLM.load_weights"
INIT = "model_executor/models/llama_eagle3.py:Eagle3LlamaForCausalLM.__init__"
LOGITS = "model_executor/models/llama_eagle3.py:Eagle3LlamaForCausalLM.compute_logits"
EMBEDDING = "v1/spec_decode/llm_base_proposer.py:SpecDecodeBaseProposer._maybe_share_embeddings"
HEAD = "v1/spec_decode/llm_base_proposer.py:SpecDecodeBaseProposer._maybe_share_lm_head"


def _draft_vocabulary(s: Subject) -> int | None:
    return s.draft_int("draft_vocab_size") or s.draft_int("vocab_size")


def _has(s: Subject, ending: str) -> bool:
    return s.shape(ending) is not None


@rule(
    "draft-vocabulary-map",
    "error",
    "The draft's vocabulary has no map",
    reads=INIT,
    fields=("draft_vocab_size", "draft_id_to_target_id", "zeros"),
    issues=(SEEN, "v#27732"),
)
def draft_vocabulary_map(s: Subject) -> Iterator[Found]:
    """A draft with fewer words than its target needs `d2t`. Without it vLLM keeps a map of zeros: draft token i stands for target token
    i, next to nothing is accepted, and nothing is said.
    """
    own, whole = _draft_vocabulary(s), s.target_int("vocab_size")
    if s.weights_known and own and whole and own != whole and not _has(s, "d2t"):
        yield Found(
            f"draft_vocab_size {own}, the target has {whole}, and no tensor is called d2t",
            "Export the draft again with d2t (and t2d); the trainer has them.",
        )


@rule("d2t-shape", "error", "The vocabulary map has the wrong size", reads=INIT, fields=("draft_id_to_target_id", "draft_vocab_size"))
def d2t_shape(s: Subject) -> Iterator[Found]:
    """`d2t` is loaded into a vector of `draft_vocab_size` numbers, and the head has as many rows."""
    shape, own = s.shape("d2t"), _draft_vocabulary(s)
    if shape is not None and own and shape != (own,):
        yield Found(
            f"d2t is {list(shape)}, draft_vocab_size is {own}",
            f'Set "draft_vocab_size": {shape[0] if shape else 0} if lm_head has as many rows, or export again.',
        )


@rule("d2t-type", "error", "The vocabulary map is not made of whole numbers", reads=INIT, fields=("torch.long",))
def d2t_type(s: Subject) -> Iterator[Found]:
    """The map is copied into 64-bit integers. Half precision holds whole numbers up to 256 (BF16) or 2,048 (FP16): larger offsets
    arrive rounded, silently.
    """
    for name, header in (s.draft.tensors or {}).items() if s.draft else ():
        if name.split(".")[-1] == "d2t" and header.dtype not in ("I64", "I32"):
            exact = header.dtype in ("F32", "F64", "I16", "U16")
            yield Found(f"{name} is {header.dtype}", "Save d2t as int64.", "warning" if exact and header.dtype[0] == "F" else None)


@rule(
    "d2t-range",
    "error",
    "The vocabulary map leads outside the target's vocabulary",
    reads=LOGITS,
    fields=("draft_id_to_target_id", "arange", "vocab_size"),
)
def d2t_range(s: Subject) -> Iterator[Found]:
    """vLLM adds `d2t[i]` to i: the map holds offsets. Absolute ids saved by mistake, or the map of another tokenizer, point beyond the
    vocabulary or twice at one token.
    """
    offsets, whole = s.draft.maps.get("d2t") if s.draft else None, s.target_int("vocab_size")
    if offsets is None or offsets.ndim != 1 or not whole or not offsets.size:
        return
    values = offsets.astype(np.int64)
    ids = np.arange(len(values)) + values
    bad = int(((ids < 0) | (ids >= whole)).sum())
    twice = len(ids) - len(np.unique(ids))
    absolute = bool(values.min() >= 0 and values.max() < whole and len(np.unique(values)) == len(values) and (np.diff(values) > 0).all())
    hint = (
        "They look like absolute ids: save d2t[i] - i."
        if absolute and (bad or twice)
        else "Export d2t again, from this target's tokenizer."
    )
    if bad:
        yield Found(
            f"{bad} of {len(ids)} draft tokens stand for ids outside 0 to {whole - 1} (for one {int(ids[(ids < 0) | (ids >= whole)][0])})",
            hint,
        )
    if twice:
        yield Found(f"{twice} draft tokens stand for a target token that another one stands for already", hint)


@rule("t2d-disagrees", "error", "The two vocabulary maps disagree", reads=LOAD, fields=("t2d", "d2t"))
def t2d_disagrees(s: Subject) -> Iterator[Found]:
    """vLLM skips `t2d`, the mask of target tokens that the draft knows, and believes `d2t`. Where the two disagree the draft was
    trained with other tokens than are read: absolute ids in `d2t` are the usual reason.
    """
    maps = s.draft.maps if s.draft else {}
    offsets, mask = maps.get("d2t"), maps.get("t2d")
    if offsets is None or mask is None or offsets.ndim != 1 or mask.ndim != 1:
        return
    ids = np.arange(len(offsets)) + offsets.astype(np.int64)
    known = mask.astype(bool)
    inside = ids[(ids >= 0) & (ids < len(known))]
    missed = len(ids) - int(known[inside].sum())
    if missed or int(known.sum()) != len(ids):
        yield Found(
            f"{missed} of {len(ids)} tokens of d2t are not in t2d, which has {int(known.sum())}",
            "Export both from the same mapping; d2t[i] is the target id minus i.",
        )


@rule("draft-vocabulary-size", "error", "Draft and target have different vocabularies", reads=LOGITS, fields=("vocab_size",))
def draft_vocabulary_size(s: Subject) -> Iterator[Found]:
    """The draft's `vocab_size` is the target's: it sizes the embedding and the row of logits that is handed back. Another number means
    another tokenizer (or padding).
    """
    own, whole, drafted = s.draft_int("vocab_size"), s.target_int("vocab_size"), s.draft_int("draft_vocab_size")
    if own and whole and own != whole:
        padded = own > whole and own - whole < 1024
        yield Found(
            f"vocab_size: draft {own}, target {whole}", "Use the draft that was trained for this target.", "warning" if padded else None
        )
    if drafted and own and drafted > own:
        yield Found(
            f"draft_vocab_size {drafted} is larger than vocab_size {own}", f'Set "draft_vocab_size" to the rows of lm_head, at most {own}.'
        )


@rule(
    "draft-head",
    "error",
    "The draft has no head of its own",
    reads=HEAD,
    fields=("has_own_lm_head", "lm_head"),
    issues=("sg#27908", "v#27732"),
)
def draft_head(s: Subject) -> Iterator[Found]:
    """Without `lm_head` in the weights vLLM gives the draft the target's. That fits only where both have the same words and the same
    width; otherwise the shapes clash or the ids are nonsense.
    """
    if not s.weights_known or _has(s, "lm_head.weight"):
        return
    own, whole, wide, target = _draft_vocabulary(s), s.target_int("vocab_size"), s.draft_int("hidden_size"), s.target_int("hidden_size")
    tied = " (tie_word_embeddings is true, which vLLM ignores here)" if s.draft_view.get("tie_word_embeddings") is True else ""
    if (own and whole and own != whole) or (wide and target and wide != target):
        yield Found(
            f"no lm_head.weight{tied}; draft {own} words of width {wide}, target {whole} of {target}",
            "Export the draft with its lm_head.weight.",
        )
    elif whole:
        yield Found(
            f"no lm_head.weight{tied}: the target's will be shared",
            "Right if the draft was trained so; else export lm_head.weight.",
            "warning",
        )


@rule("head-shape", "error", "The draft's head has another number of words", reads=INIT, fields=("ParallelLMHead", "draft_vocab_size"))
def head_shape(s: Subject) -> Iterator[Found]:
    """The head is built with `draft_vocab_size` rows of `hidden_size`; weights of another shape are refused while loading."""
    shape, own, wide = s.shape("lm_head.weight"), _draft_vocabulary(s), s.draft_int("hidden_size")
    if shape is not None and own and wide and shape != (own, wide):
        yield Found(
            f"lm_head.weight is {list(shape)}, vLLM builds [{own}, {wide}]",
            f'Set "draft_vocab_size": {shape[0]}.' if len(shape) == 2 and shape[1] == wide else "Export again.",
        )


@rule(
    "draft-embedding",
    "error",
    "The draft would run on random embeddings",
    reads=EMBEDDING,
    fields=("has_own_embed_tokens", "target_dim != draft_dim"),
)
def draft_embedding(s: Subject) -> Iterator[Found]:
    """A draft without `embed_tokens` shares the target's, if both are equally wide. Otherwise vLLM keeps the draft's own, which nothing
    has filled: healthy server, no acceptance.
    """
    wide, target = s.draft_int("hidden_size"), s.target_int("hidden_size")
    if s.weights_known and wide and target and wide != target and not _has(s, "embed_tokens.weight"):
        yield Found(f"no embed_tokens.weight, draft width {wide}, target width {target}", "Export the draft with its embed_tokens.weight.")
    shape, vocabulary = s.shape("embed_tokens.weight"), s.draft_int("vocab_size")
    if shape is not None and vocabulary and wide and shape != (vocabulary, wide):
        yield Found(
            f"embed_tokens.weight is {list(shape)}, vLLM builds [{vocabulary}, {wide}]",
            "Correct vocab_size and hidden_size, or export again.",
        )
