"""How sure the draft was: its own probability of each token it proposed, read inside vLLM's worker.

vLLM takes the argmax of the draft's logits and forgets them. Three methods that it does not promise are wrapped: the model runner's
`propose_draft_token_ids` (is anybody in this batch traced?), the proposer's `_greedy_sample` (the logits at hand give
p = exp(logit - logsumexp), about the price of the argmax), and the runner's `take_draft_token_ids` (the probabilities leave the worker
as an attribute of its result, which survives pickling to the scheduler). What vLLM computes and returns is left as it is. Whoever
replaces `_greedy_sample` keeps this going by appending a [B] tensor of probabilities to `self.eagle3_notes` where that is a list.

Only for model runner V1 with greedy drafting and a full row of logits in this process; `support` says why not elsewhere. p is over the
draft's own vocabulary at temperature 1, as the draft sees it.
"""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

logger = logging.getLogger(__name__)

#: Attribute of vLLM's `DraftTokenIds`: request id to its probabilities, in draft order.
_ATTRIBUTE = "eagle3_probs"
_ARGUMENT = "eagle3_trace"
#: Versions whose methods were read: first, and first no more.
_VERSIONS = ((0, 24), (0, 33))
_SIGNATURES = {
    "propose_draft_token_ids": ["self", "scheduler_output"],
    "take_draft_token_ids": ["self"],
    "_greedy_sample": ["self", "hidden_states"],
}


def taken(drafts: Any) -> dict[str, tuple[float, ...]] | None:
    """The probabilities that travel with a `DraftTokenIds`, by request id; None without any."""
    return getattr(drafts, _ATTRIBUTE, None)


def support(vllm_config: Any) -> tuple[bool, str]:
    """Whether an engine of this configuration can tell draft probabilities, and the reasons why not."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return False, "The server runs without a draft."
    reasons = []
    if not speculative.use_eagle():
        reasons.append(f"It drafts by {speculative.method}, not by EAGLE.")
    if vllm_config.use_v2_model_runner:
        reasons.append("Model runner V2 drafts inside a captured graph.")
    if getattr(speculative, "draft_sample_method", "greedy") != "greedy":
        reasons.append("The draft samples instead of taking its best token.")
    if getattr(speculative, "use_local_argmax_reduction", False):
        reasons.append("No process sees a whole row of draft logits (use_local_argmax_reduction).")
    if getattr(speculative, "use_heterogeneous_vocab", False):
        reasons.append("Draft and target use different tokenizers.")
    if getattr(speculative, "parallel_drafting", False):
        reasons.append("The draft proposes all tokens in one pass.")
    reasons += _misfits()
    return not reasons, " ".join(reasons)


def _misfits() -> list[str]:
    """What of this vLLM is not as this module knows it."""
    from vllm import __version__

    try:
        version = tuple(int(part) for part in __version__.split(".")[:2])
    except ValueError:
        return [f"vLLM {__version__} is no release."]
    first, after = _VERSIONS
    if not first <= version < after:
        return [f"vLLM {__version__} was not checked for it."]
    try:
        runner, proposer = _classes()
    except ImportError as error:
        return [f"vLLM {__version__} has another draft proposer ({error})."]
    misfits = []
    for owner, name in ((runner, "propose_draft_token_ids"), (runner, "take_draft_token_ids"), (proposer, "_greedy_sample")):
        method = getattr(owner, name, None)
        expected = _SIGNATURES[name]
        if method is None or list(inspect.signature(method).parameters)[: len(expected)] != expected:
            misfits.append(f"vLLM {__version__} has another {owner.__name__}.{name}.")
    return misfits


def _classes() -> tuple[Any, Any]:
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return GPUModelRunner, SpecDecodeBaseProposer


def install() -> None:
    """Wrap the three methods in this process, once; nothing happens where vLLM is not as expected."""
    if _misfits():
        return
    runner, proposer = _classes()
    if vars(runner).get("_eagle3_lab_confidence"):
        return
    runner._eagle3_lab_confidence = True
    _wrap(runner, "propose_draft_token_ids", _propose)
    _wrap(runner, "take_draft_token_ids", _take)
    _wrap(proposer, "_greedy_sample", _greedy)


def _wrap(owner: Any, name: str, wrapper: Any) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self: Any, *arguments: Any, **named: Any) -> Any:
        return wrapper(original, self, *arguments, **named)

    setattr(owner, name, wrapped)


def _traced(runner: Any) -> list[tuple[int, str]]:
    """Rows and ids of the traced requests in the runner's batch."""
    found = []
    for row, request in enumerate(runner.input_batch.req_ids):
        parameters = getattr(runner.requests.get(request), "sampling_params", None)
        extra = parameters.extra_args if parameters is not None else None
        if extra and _ARGUMENT in extra:
            found.append((row, request))
    return found


def _propose(original: Any, runner: Any, *arguments: Any, **named: Any) -> Any:
    """Ask the proposer to note probabilities while it drafts for a batch with a traced request."""
    runner.eagle3_noted = None
    rows = _traced(runner)
    if not rows:
        return original(runner, *arguments, **named)
    notes: list[Any] = []
    runner.drafter.eagle3_notes = notes
    try:
        drafts = original(runner, *arguments, **named)
    finally:
        runner.drafter.eagle3_notes = None
    runner.eagle3_noted = (rows, notes)
    return drafts


def _greedy(original: Any, proposer: Any, hidden_states: Any) -> Any:
    """Let vLLM choose, and look at the logits it chose from."""
    notes = getattr(proposer, "eagle3_notes", None)
    if notes is None:
        return original(proposer, hidden_states)
    seen: list[Any] = []
    model = proposer.model
    compute = model.compute_logits

    def computed(*arguments: Any, **named: Any) -> Any:
        logits = compute(*arguments, **named)
        seen.append(logits)
        return logits

    model.compute_logits = computed  # on the instance, for this one call
    try:
        chosen = original(proposer, hidden_states)
    finally:
        del model.compute_logits
    if len(seen) == 1 and seen[0] is not None:
        logits = seen[0]
        notes.append((logits.gather(-1, chosen[:, None])[:, 0].float() - logits.float().logsumexp(-1)).exp())
    return chosen


def _take(original: Any, runner: Any) -> Any:
    """Attach the probabilities to the draft tokens on their way to the scheduler."""
    drafts = original(runner)
    noted, runner.eagle3_noted = getattr(runner, "eagle3_noted", None), None
    if drafts is None or noted is None:
        return drafts
    rows, notes = noted
    lengths = {len(ids) for ids in drafts.draft_token_ids}
    if lengths != {len(notes)}:
        return drafts  # not one note a position: nothing is better than something wrong
    import torch

    probs = torch.stack(notes, dim=1).tolist()
    setattr(drafts, _ATTRIBUTE, {name: tuple(probs[row]) for row, name in rows if row < len(probs) and drafts.req_ids[row] == name})
    return drafts
