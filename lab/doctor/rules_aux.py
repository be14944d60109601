"""Rules about the auxiliary layers: which of the target's inner states the draft reads, and how they are joined."""

from __future__ import annotations

from collections.abc import Iterator

from lab.doctor.rule import Found, rule
from lab.doctor.subject import Subject, number

FROM_CONFIG = "v1/worker/gpu_model_runner.py:GPUModelRunner._get_eagle3_aux_layers_from_config"
MODEL = "model_executor/models/llama_eagle3.py:LlamaModel.__init__"
SORTED = "model_executor/models/interfaces.py:EagleModelMixin._set_aux_hidden_state_layers"
DEFAULT = "model_executor/models/interfaces.py:SupportsEagle3.get_eagle3_default_aux_hidden_state_layers"


def _uses_aux(s: Subject) -> bool:
    inner = s.draft_view.get("eagle_config")
    return bool(s.draft_view) and not (isinstance(inner, dict) and inner.get("use_aux_hidden_state") is False)


def default_layers(layers: int) -> list[int]:
    """vLLM's choice for a target of so many layers: (2, n/2, n-3)."""
    return [2, layers // 2, layers - 3]


@rule(
    "aux-layers-missing",
    "warning",
    "The draft does not say which layers it reads",
    reads=DEFAULT,
    fields=("num_layers",),
    issues=("v#50170",),
)
def aux_layers_missing(s: Subject) -> Iterator[Found]:
    """vLLM then takes layers 2, n/2 and n-3. A draft that was trained on others gets strange features and is accepted at 1%, without a
    word.
    """
    if not _uses_aux(s) or s.aux_ids is not None or (s.draft is not None and s.draft.minimal):
        return
    layers = s.target_int("num_hidden_layers")
    used = f"layers {default_layers(layers)} of {layers}" if layers else "its default layers"
    ids = default_layers(layers) if layers else "[...]"
    yield Found(
        f"no eagle_aux_hidden_state_layer_ids: vLLM would use {used}",
        f'Pin what the draft was trained on, in its config.json: "eagle_aux_hidden_state_layer_ids": {ids}',
    )


@rule(
    "aux-layers-two-places",
    "error",
    "Two lists of auxiliary layers disagree",
    reads=FROM_CONFIG,
    fields=("eagle_aux_hidden_state_layer_ids", "eagle_config"),
)
def aux_layers_two_places(s: Subject) -> Iterator[Found]:
    """The list at the top decides which layers are read, the one in `eagle_config` how wide `fc` is built: they must be the same."""
    inner = s.draft_view.get("eagle_config")
    top, nested = (
        s.draft_view.get("eagle_aux_hidden_state_layer_ids"),
        inner.get("eagle_aux_hidden_state_layer_ids") if isinstance(inner, dict) else None,
    )
    if isinstance(top, list) and isinstance(nested, list) and top and nested and top != nested:
        yield Found(f"{top} at the top, {nested} in eagle_config", "Delete one of them: keep the layers that the draft was trained on.")


@rule(
    "aux-count",
    "error",
    "Number of auxiliary layers and the draft's input disagree",
    reads=MODEL,
    fields=("num_aux_hidden_states", "eagle_config"),
    issues=("v#48259", "v#54526"),
)
def aux_count(s: Subject) -> Iterator[Found]:
    """vLLM counts `num_aux_hidden_states`, else the list in `eagle_config`, else 3; a list at the top of the file is not counted. The
    states it then joins do not fit `fc`.
    """
    if not _uses_aux(s) or s.aux_count is None:
        return
    ids, count = s.aux_ids, s.aux_count
    if ids is not None and len(ids) != count:
        yield Found(
            f"{len(ids)} layer ids {ids}, but vLLM counts {count}", f'Add "num_aux_hidden_states": {len(ids)} to the draft\'s config.json.'
        )
    shape, wide = s.shape("fc.weight"), s.target_hidden
    if shape is not None and len(shape) == 2 and wide and shape[1] != wide * count:
        fits = f'; it fits {shape[1] // wide} layers: "num_aux_hidden_states": {shape[1] // wide}' if shape[1] % wide == 0 else ""
        yield Found(
            f"fc.weight is {list(shape)}, vLLM builds an input of {count} x {wide} = {count * wide}",
            f"Set the count that the draft was trained with{fits}.",
        )


@rule("aux-range", "error", "An auxiliary layer does not exist", reads=SORTED, fields=("aux_hidden_state_layers",), issues=("v#43671",))
def aux_range(s: Subject) -> Iterator[Found]:
    """Ids count the target's layers from 0; n is the state after the last. An id outside, or no number, is never met, and a state is
    missing at run time.
    """
    layers = s.target_int("num_hidden_layers")
    for one in s.aux_ids or ():
        if number(one) is None or one < 0:
            yield Found(f"layer id {one!r}", "Use whole numbers from 0.")
        elif layers is not None and one > layers:
            yield Found(
                f"layer id {one}, but the target has {layers} layers",
                "Is this draft made for another target? Choose the pair that belongs together.",
            )


@rule("aux-order", "error", "Auxiliary layers are out of order or repeated", reads=SORTED, fields=("sorted(set(layers))",))
def aux_order(s: Subject) -> Iterator[Found]:
    """vLLM sorts the ids and drops repeated ones, so features reach `fc` in rising order whatever the list says: a draft trained in
    another order gets them swapped, silently.
    """
    ids = s.aux_ids
    if ids and all(number(one) is not None for one in ids) and ids != sorted(set(ids)):
        yield Found(f"{ids} becomes {sorted(set(ids))}", "List them in rising order, and permute the columns of fc.weight to match.")


@rule("aux-off-by-one", "warning", "The layer ids look one too low", reads=SORTED, fields=("layers",), issues=("v#43671",))
def aux_off_by_one(s: Subject) -> Iterator[Found]:
    """vLLM's id i is the state that enters layer i. Some trainers number the layer whose output it is, which is i - 1: 1, n/2-1, n-4
    where vLLM means 2, n/2, n-3.
    """
    layers = s.target_int("num_hidden_layers")
    if layers and s.aux_ids == [one - 1 for one in default_layers(layers)]:
        yield Found(f"{s.aux_ids} of {layers} layers", f"If acceptance is low, try {default_layers(layers)}.")


@rule("aux-unused", "error", "The auxiliary states are switched off", reads=MODEL, fields=("use_aux_hidden_state",))
def aux_unused(s: Subject) -> Iterator[Found]:
    """With `use_aux_hidden_state` false vLLM leaves out `fc` and feeds the last layer alone: right for an Eagle 1 head, silent nonsense
    for a draft that has `fc`.
    """
    if s.draft_view and not _uses_aux(s) and s.shape("fc.weight") is not None:
        yield Found(
            "eagle_config.use_aux_hidden_state is false, and the weights have fc.weight", "Remove use_aux_hidden_state, or set it to true."
        )


@rule("target-width", "error", "The draft expects a target of another width", reads=MODEL, fields=("target_hidden_size",))
def target_width(s: Subject) -> Iterator[Found]:
    """`fc` reads the target's states, `target_hidden_size` wide (by default as wide as the draft). Another width fails at the first
    step, after loading.
    """
    have, want = s.target_int("hidden_size"), s.target_hidden
    if _uses_aux(s) and have and want and have != want:
        yield Found(
            f"the draft reads states of {want}, the target's have {have}",
            f'If it was trained for this target: "target_hidden_size": {have}. Otherwise this draft belongs to another target.',
        )


@rule(
    "pipeline-parallel",
    "warning",
    "Auxiliary states across pipeline stages",
    reads="model_executor/models/interfaces.py:EagleModelMixin",
    fields=("supports_aux_hidden_states_over_pp",),
)
def pipeline_parallel(s: Subject) -> Iterator[Found]:
    """With pipeline parallelism the states of early layers travel to the last stage, which few target classes support; embeddings are
    then not shared either.
    """
    stages = s.line.number("pipeline-parallel-size", 1) or 1
    if s.speculative and stages > 1:
        yield Found(
            f"--pipeline-parallel-size {stages} with Eagle3", "Prefer --tensor-parallel-size, or check acceptance against one stage."
        )
