"""What a traced request may ask of its drafts: fewer tokens than the server's K, or drafts that are recorded and not verified.

`vllm_xargs={"eagle3_trace": ID, "eagle3_k": 2}`: the request's drafts are cut to 2 tokens after they were proposed, and while every request
of a step asks so, no more are made: `SchedulerOutput.num_spec_tokens_to_schedule`, vLLM's own switch for a K that follows the batch size.
So one server measures every K up to its own, in turns, without a restart.

`"eagle3_withhold": 1`: the draft proposes at every place of the answer, the proposal goes into the trace (`Step.withheld`), and the target
goes on alone, one token a step. That shows what would be accepted at *every* place, from which `lab.trace.whatif` has the steps of any K.

Limits: withheld answers take as long as the baseline's. Where GPUs replay graphs that were captured for the server's K, steps with fewer
tokens may take another path than a server with that K would: times for smaller K are then not that server's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

DEPTH = "eagle3_k"
WITHHOLD = "eagle3_withhold"


@dataclass(frozen=True, slots=True)
class Asked:
    """One request's wish: at most `k` draft tokens a step (None: the server's K), none of them verified with `withhold`."""

    k: int | None = None
    withhold: bool = False

    def trim(self, request: Any) -> tuple[int, ...]:
        """Make vLLM's request, whose new draft ids have just arrived, as asked; gives the ids that are withheld."""
        ids = request.spec_token_ids[: self.k]
        request.spec_token_ids = [] if self.withhold else ids
        return tuple(ids) if self.withhold else ()


NOTHING = Asked()


def asked(arguments: Mapping[str, Any]) -> Asked:
    """The wish in a request's `extra_args`; raises `ValueError` for one that makes no sense."""
    k = arguments.get(DEPTH)
    if k is not None and (isinstance(k, bool) or not float(k).is_integer() or k < 1):
        raise ValueError(f"{DEPTH} must be a whole number of at least 1, and is {k!r}")
    return Asked(None if k is None else int(k), bool(arguments.get(WITHHOLD)))


def depth(wishes: Iterable[Asked | None], most: int) -> int:
    """How many tokens to draft next for a batch of requests (None: not traced) whose server drafts `most`."""
    return min(most, max((most if one is None or one.k is None else one.k for one in wishes), default=most))
