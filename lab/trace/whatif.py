"""Would another K have been better? Replays a greedy answer with fewer draft tokens a step, and says what of that is exact.

A draft of K tokens begins with the draft of k < K tokens from the same place: each token depends only on those before it and on the
target's features of the answer so far, not on how many will follow. So a step that begins at place `p` of the answer, where K draft tokens
were proposed and `a` accepted, accepts exactly min(a, k) of k. Then, where a > k, the next step begins at a place at which the run with K
began none, and what would have been proposed *there*, with the target's features up to there, the run does not know. Hence:

* Steps that withheld their drafts (`Step.withheld`: the draft proposes at every place, and the target goes on one token at a time) tell
  what is accepted at every place. From them the number of steps is exact for every k up to their depth: `Replay.exact`.
* From an ordinary run it lies between two bounds (every unknown place accepts as few, or as many, as makes the most, or the fewest, steps);
  between them stands an estimate, which takes it that the run's own draft tokens would be proposed again from the inner places.

Exact means: for this answer, token by token. Under BF16 rounding a batch of other shape may turn a near-tie of target or draft, so that a
real run with k differs; `tests/bench/test_cost_engine.py` compares. Above temperature 0 the answer itself would be another: nothing here
applies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lab.trace.model import Step

#: `Known.depth` of a place where nothing was proposed: nothing would be, whatever K.
ANY = 1 << 30


@dataclass(frozen=True)
class Known:
    """What is known of the draft at a place: `right` leading tokens of it are the answer's, and it was compared over `depth` tokens."""

    right: int
    depth: int

    def accepted(self, k: int) -> int | None:
        """How many of k draft tokens would be accepted; None where the draft was right as far as it is known, and k goes further."""
        return min(self.right, k) if self.right < self.depth or k <= self.depth else None


@dataclass(frozen=True)
class Answer:
    """One greedy answer: its number of tokens (the first, which prefill gives, at place 0), and the drafts known, by place."""

    length: int
    known: dict[int, Known]
    #: The estimate of `known` at places inside accepted drafts.
    inner: dict[int, Known]

    @property
    def depth(self) -> int:
        """The largest k that was looked at."""
        return max((one.depth for one in self.known.values() if one.depth < ANY), default=0)


@dataclass(frozen=True)
class Replay:
    """Decode steps with k draft tokens each; they yield `tokens` tokens (the answer's without its first). Replays add up."""

    k: int
    tokens: int
    fewest: int
    most: int
    estimate: int

    @property
    def exact(self) -> bool:
        """Whether nothing had to be guessed."""
        return self.fewest == self.most

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens a step, the target's own included, of those that reached the answer (`estimate`; exact where `exact` says so)."""
        return self.tokens / self.estimate if self.estimate else None

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The least and the most tokens a step that the run allows."""
        return (self.tokens / self.most, self.tokens / self.fewest) if self.fewest else None

    def __add__(self, other: Replay) -> Replay:
        if self.k != other.k:
            raise ValueError("replays with different K do not add up")
        return Replay(
            self.k, self.tokens + other.tokens, self.fewest + other.fewest, self.most + other.most, self.estimate + other.estimate
        )


def answer_of(steps: Sequence[Step]) -> Answer:
    """What the steps of *one* greedy request tell about its drafts."""
    answer = [token for step in steps for token in step.sampled[: step.kept]]
    known: dict[int, Known] = {}
    inner: dict[int, Known] = {}
    place = 0
    for step in steps:
        if step.withheld:
            rest = answer[place : place + len(step.withheld)]
            right = next((n for n, pair in enumerate(zip(step.withheld, rest, strict=False)) if pair[0] != pair[1]), len(rest))
            known[place] = Known(right, len(step.withheld) if right < len(rest) else len(rest))
        elif step.draft and step.sampled:
            known[place] = Known(step.accepted, len(step.draft))
            for ahead in range(1, step.accepted + 1):
                inner[place + ahead] = Known(step.accepted - ahead, len(step.draft) - ahead)
        elif step.phase == "decode" and step.sampled:
            known[place] = Known(0, ANY)
        place += step.kept
    return Answer(len(answer), known, inner)


def replay(answer: Answer, k: int) -> Replay:
    """The answer with `k` draft tokens a step."""
    if k < 1:
        raise ValueError("a replay needs at least one draft token a step")
    end = answer.length
    fewest, most, estimate = ([0] * (end + 1) for _ in range(3))

    for place in range(end - 1, 0, -1):
        one = answer.known.get(place)
        accepted = one.accepted(k) if one is not None else None
        if accepted is None and one is not None and place + one.right >= end:
            accepted = one.right  # right up to the answer's end: no step follows
        if accepted is not None:
            following = min(place + accepted + 1, end)
            fewest[place], most[place], estimate[place] = 1 + fewest[following], 1 + most[following], 1 + estimate[following]
            continue
        least = one.right if one is not None else 0
        reached = [min(place + count + 1, end) for count in range(least, k + 1)]
        fewest[place] = 1 + min(fewest[next_] for next_ in reached)
        most[place] = 1 + max(most[next_] for next_ in reached)
        guess = one or answer.inner.get(place) or Known(0, k)
        estimate[place] = 1 + estimate[min(place + min(guess.right, k) + 1, end)]
    return Replay(k, max(end - 1, 0), *((one[1] if end > 1 else 0) for one in (fewest, most, estimate)))


def replays(requests: Iterable[Sequence[Step]], ks: Sequence[int]) -> list[Replay]:
    """The steps of several greedy requests, together, with each of `ks`."""
    answers = [answer_of(steps) for steps in requests]
    return [sum((replay(answer, k) for answer in answers), Replay(k, 0, 0, 0, 0)) for k in ks]
