"""Where two greedy answers part, and whether the target itself was undecided there.

In BF16 the same target rounds differently in another batch shape, so where its two best candidates are as good as equal, a step that
verifies K+1 rows may take the other one, as a batch of four requests may in a server without any draft. What tells such a *near-tie* from
a *real difference* is how far below the target's best candidate the chosen token lies, in nats, when the target scores the common prefix
with that token behind it (`regret`), against how far the target's own margins move between batch shapes (`Noise`).

The threshold is measured, not chosen: the largest change of the margin between the same two close candidates at the same position, over
all positions of the *baseline's* answers, between reading it while decoding alone, while decoding in a batch, and while scoring the whole
text in one pass. With n positions looked at, a larger change has a probability below 3/n at a position (95%, the rule of three). A
baseline whose own margins move by more than `MOST` decides nothing: that is a fault of its own, and no threshold is derived from it.
Every token of a draft lane's answer is judged, not only the first that differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lab.bench.scoring import FAR, Completion, Scored
from lab.trace.align import first_difference

#: Nats by which margins may move between batch shapes before the target itself is called unreliable: one makes a token 2.7 times as likely.
MOST = 1.0
#: Margins that are looked at, in nats: rounding can only turn a choice between candidates this close, and far ones move otherwise.
CLOSE = 2.0
#: What counts as a near-tie where nothing was measured on this machine: one step of BF16 for logits between 16 and 32; and in float32,
#: whose step there is 2e-6, a bound that leaves room for the rounding of all layers.
UNMEASURED = 0.125
UNMEASURED_SINGLE = 0.001
#: What the reading itself cannot tell apart, in nats: log-probabilities come in float32, whose steps between 32 and 64 are 4e-6.
#: In float32 the margins of a few answers may not have moved at all.
FINEST = 1e-5

Verdict = Literal["identical", "near-tie", "real difference"]


def nats(value: float) -> str:
    """Nats for people: three decimals, and small ones, as thresholds in float32 are, with their two first digits."""
    return f"{value:.3f}" if value >= 0.01 or not value else f"{value:.2g}"


@dataclass(frozen=True)
class Noise:
    """How far the target's own margins moved between batch shapes: over so many positions, at most and in the 99th percentile, in nats."""

    positions: int
    largest: float
    p99: float

    @property
    def threshold(self) -> float:
        """Regret up to which a token counts as a near-tie, in nats."""
        return max(self.largest, FINEST)


def _moved(one: Mapping[int, float], other: Mapping[int, float]) -> float | None:
    """Change of the margin between the two best candidates of `one`; None where that is over `CLOSE`, or `other` does not hold both."""
    best = sorted(one, key=lambda token: (-one[token], token))[:2]
    if len(best) < 2 or not all(token in other for token in best):
        return None
    margin = one[best[0]] - one[best[1]]
    return abs(margin - (other[best[0]] - other[best[1]])) if margin <= CLOSE else None


def noise(readings: Sequence[tuple[Sequence[Mapping[int, float]], Sequence[Mapping[int, float]]]], regrets: Sequence[float] = ()) -> Noise:
    """From pairs of readings of the same positions (equally long, the prefix the same), and from regrets of the baseline's own answers:
    a token that decoding preferred moved by its regret at least. Raises `ValueError` where nothing compares."""
    moved = [value for pair in readings for one, other in zip(*pair, strict=True) if (value := _moved(one, other)) is not None]
    moved = sorted([*moved, *(value for value in regrets if value > 0)])
    if not moved:
        raise ValueError("no position was read twice")
    return Noise(len(moved), moved[-1], moved[min(int(0.99 * len(moved)), len(moved) - 1)])


@dataclass(frozen=True)
class Judged:
    """One answer of a draft lane beside the baseline's: token counts from 0, logprobs in nats by the target's own scoring."""

    prompt: str
    verdict: Verdict
    tokens: int
    #: First difference, and there: the baseline's token and this one's (text, id, logprob), and the target's best two.
    at: int | None = None
    theirs: tuple[str, int, float] | None = None
    ours: tuple[str, int, float] | None = None
    margin: float | None = None
    #: Over every token of the answer: how many are not the scoring pass's best, and the largest regret, and where.
    off_best: int = 0
    worst: float = 0.0
    worst_at: int | None = None


def _told(view: Scored | None, token: int) -> tuple[str, int, float]:
    if view is None:
        return ("", token, -FAR)
    return (view.texts.get(token, ""), token, view.logprobs.get(token, -FAR))


def judge(
    prompt: str, base: Sequence[int], base_scored: Sequence[Scored], answer: Sequence[int], scored: Sequence[Scored], threshold: float
) -> Judged:
    """Compare `answer` with the baseline's `base`, both scored by the target, and judge every token of it."""
    regrets = [view.regret(token) for view, token in zip(scored, answer, strict=True)]
    worst = max(range(len(regrets)), key=regrets.__getitem__, default=None)
    largest = 0.0 if worst is None else regrets[worst]
    at = first_difference(base, answer)
    real = largest > threshold
    ended = at is not None and (at >= len(base) or at >= len(answer))
    # One answer goes on where the other ended: an end is a token too, so that only a wrong length reads like this.
    verdict: Verdict = "real difference" if real or ended else "identical" if at is None else "near-tie"
    place = at if at is not None and not ended else None
    return Judged(
        prompt=prompt,
        verdict=verdict,
        tokens=len(answer),
        at=at,
        theirs=None if place is None else _told(base_scored[place], base[place]),
        ours=None if place is None else _told(scored[place], answer[place]),
        margin=None if place is None else regrets[place],
        off_best=sum(view.best != token and view.regret(token) > 0 for view, token in zip(scored, answer, strict=True)),
        worst=largest,
        worst_at=worst if largest > 0 else None,
    )


def readings(
    answers: Sequence[Completion], others: Sequence[Completion]
) -> list[tuple[list[Mapping[int, float]], list[Mapping[int, float]]]]:
    """Candidates of two decoded sets of answers to the same prompts, up to and with the place where they part."""
    found = []
    for one, other in zip(answers, others, strict=True):
        at = first_difference(one.ids, other.ids)
        length = min(len(one.ids), len(other.ids)) if at is None else min(at + 1, len(one.ids), len(other.ids))
        found.append((list(one.top[:length]), list(other.top[:length])))
    return found
