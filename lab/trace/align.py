"""Two traces of the same prompt, place by place: which draft's token was accepted where, and where the two drafts differ.

A *place* is a position of the answer, counted from 0. Exactly one engine step decides each place, and the trace says how: the target
`accepted` the draft token proposed for it, `rejected` it and put its own there, or decided alone because no draft token stood there (a
*bonus* token after a draft that was accepted whole, the first token after the prompt, a lane without a draft). Draft tokens that were
never reached decide nothing: their place is decided by a later step.

Places of two traces correspond as long as the answers' token ids are equal. From the first token that differs on, the two drafts answer
different texts, and nothing there is compared. A trace that lost steps on the way cannot be placed at all: `LabError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lab.errors import LabError
from lab.trace.model import Request

Verdict = Literal["accepted", "rejected", "alone"]
#: What a place says about two drafts. `one` and `other`: only that draft's token was accepted, and the other's was rejected there.
#: `apart`: accepted on one side, while the other had no draft token there. `both` and `neither`: the drafts fared alike. `alone`: nobody's
#: was accepted, and at least one had none there.
Relation = Literal["both", "neither", "one", "other", "apart", "alone"]


@dataclass(frozen=True)
class Decision:
    """How one place of an answer was decided."""

    #: The token of the answer, and the token that the draft had proposed there (None where it had none).
    token: int
    proposed: int | None
    verdict: Verdict
    #: Step index, and position in the draft from 1 (one more than the draft's length for a bonus token; 1 without a draft).
    step: int
    position: int
    #: The draft's own probability of `proposed`, where it is known.
    probability: float | None = None


@dataclass(frozen=True)
class Place:
    """One place of both answers, which hold the same token there."""

    index: int
    one: Decision
    other: Decision

    @property
    def relation(self) -> Relation:
        """What this place says about the two drafts."""
        verdicts = (self.one.verdict, self.other.verdict)
        if verdicts == ("accepted", "accepted"):
            return "both"
        if verdicts == ("accepted", "rejected"):
            return "one"
        if verdicts == ("rejected", "accepted"):
            return "other"
        if verdicts == ("rejected", "rejected"):
            return "neither"
        return "apart" if "accepted" in verdicts else "alone"


@dataclass(frozen=True)
class Alignment:
    """Two answers to one prompt: the common places, and where the answers part (None where they are identical)."""

    places: tuple[Place, ...]
    parted: int | None
    #: Every place of each answer, those after the parting too.
    one: tuple[Decision, ...]
    other: tuple[Decision, ...]

    def count(self, relation: Relation) -> int:
        """How many common places have this relation."""
        return sum(place.relation == relation for place in self.places)


def decisions(request: Request) -> tuple[Decision, ...]:
    """Every place of the answer with the step that decided it.

    Raises `LabError` where the steps do not account for the answer: some were lost, or the server reported other ids.
    """
    found: list[Decision] = []
    for step in request.steps:
        for position, token in enumerate(step.sampled[: step.kept], start=1):
            drafted = step.draft[position - 1] if position <= len(step.draft) else None
            drafted = None if drafted == -1 else drafted  # vLLM's padding, which nothing proposed
            verdict: Verdict = "alone" if drafted is None else "accepted" if position <= step.accepted else "rejected"
            known = step.draft_probs is not None and drafted is not None
            probability = step.draft_probs[position - 1] if known and step.draft_probs is not None else None
            found.append(Decision(token, drafted, verdict, step.index, position, probability))
    if request.dropped or (request.ids and request.ids != tuple(one.token for one in found)):
        lost = f"{request.dropped} steps were lost on the way" if request.dropped else "its steps do not add up to its token ids"
        raise LabError(f"The trace of '{request.prompt[:40]}' on {request.lane} cannot be aligned.", why=f"In it, {lost}.")
    return tuple(found)


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs (the end of the shorter one counts); None where both are the same."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


def align(one: Request, other: Request) -> Alignment:
    """Put two answers to one prompt side by side. Raises `LabError` for a trace with lost steps (see `decisions`)."""
    first, second = decisions(one), decisions(other)
    parted = first_difference([each.token for each in first], [each.token for each in second])
    common = len(first) if parted is None else parted
    places = tuple(Place(index, first[index], second[index]) for index in range(common))
    return Alignment(places, parted, first, second)


def pairs(one: Sequence[Request], other: Sequence[Request]) -> tuple[list[tuple[Request, Request]], list[Request], list[Request]]:
    """Requests of two traces that ask the same: `(pairs, only in one, only in the other)`, in the order of `one`.

    Prompts are the same where their text is, and their token ids too where both traces have them; a prompt that was asked several times
    is paired in order.
    """
    waiting: dict[str, list[Request]] = {}
    for request in other:
        waiting.setdefault(request.prompt, []).append(request)
    found, alone = [], []
    for request in one:
        candidates = waiting.get(request.prompt, [])
        partner = next(
            (each for each in candidates if not (each.prompt_ids and request.prompt_ids) or each.prompt_ids == request.prompt_ids), None
        )
        if partner is None:
            alone.append(request)
        else:
            candidates.remove(partner)
            found.append((request, partner))
    return found, alone, [request for rest in waiting.values() for request in rest]
