"""Two drafts over the same prompts, in numbers: the difference of each measure with its interval, and one plain sentence.

Every measure is a ratio of sums over all requests (pooled), and a difference is the second draft's less the first's. Its interval is a
percentile bootstrap over requests (Efron & Tibshirani 1993, chapter 13), expanded for few of them (`expanded`), and *paired*: a
request is drawn with both drafts' answers together, so that what a prompt does to both does not widen the interval. Steps of one answer
are not independent, and are never drawn singly.

A difference counts as shown where the interval leaves out zero and there are at least `FEWEST` requests: with five, even five that all
point the same way happen by chance once in sixteen times. Limits: an interval speaks for prompts like these on this machine only; and of
twenty comparisons without any difference, one will show one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lab.bench.pairs import LEVEL, RESAMPLES
from lab.trace.html import table
from lab.trace.stats import Counts, expanded

FEWEST = 6

Outcome = Literal["better", "worse", "no difference shown", "too few prompts"]


@dataclass(frozen=True)
class Difference:
    """A measure of two drafts over the same requests: both values, and the interval of the second less the first (None for one request)."""

    one: float
    other: float
    low: float | None
    high: float | None

    @property
    def value(self) -> float:
        """The second draft's less the first's."""
        return self.other - self.one

    def shown(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


@dataclass(frozen=True)
class Versus:
    """Everything that is compared between two drafts. None where it is undefined (no drafts, no times)."""

    requests: int
    acceptance_rate: Difference | None
    mean_acceptance_length: Difference | None
    #: At index i: accepted at draft position i + 1, over all drafts (vLLM's definition, see `Counts.rate_at`).
    by_position: tuple[Difference, ...]
    #: Output tokens per second: pooled over requests; `ratio` is the second over the first.
    speed: Difference | None
    ratio: Difference | None

    @property
    def outcome(self) -> Outcome:
        """What the mean acceptance length says of the second draft."""
        found = self.mean_acceptance_length
        if found is None or self.requests < FEWEST:
            return "too few prompts"
        if not found.shown():
            return "no difference shown"
        return "better" if found.value > 0 else "worse"

    def _repr_html_(self) -> str:
        """For notebooks: each measure of both drafts, and the interval of their difference."""
        measures = [
            ("acceptance rate", self.acceptance_rate),
            ("mean acceptance length, bonus included", self.mean_acceptance_length),
            *((f"accepted at position {place}", each) for place, each in enumerate(self.by_position, start=1)),
            ("output tok/s", self.speed),
        ]
        rows = [(name, f"{each.one:.3f}", f"{each.other:.3f}", _span(each, 3)) for name, each in measures if each is not None]
        header = ("measure", "first", "second", f"difference [{LEVEL:.0%}]")
        return table(header, rows, caption=f"{self.requests} prompts: {self.outcome}")


def difference(
    one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]], *, offset: float = 0.0, seed: int = 0
) -> Difference | None:
    """The difference of two ratios of sums, `offset + sum(a) / sum(b)` over requests' `(a, b)`; entry i of both is the same request.

    None where a ratio is undefined in the whole sample. Resamples in which one is undefined are left out.
    """
    if len(one) != len(other):
        raise ValueError("both drafts need the same requests")
    first, second = np.asarray(one, float).reshape(-1, 2), np.asarray(other, float).reshape(-1, 2)
    if not len(first) or first[:, 1].sum() <= 0 or second[:, 1].sum() <= 0:
        return None
    values = [offset + table[:, 0].sum() / table[:, 1].sum() for table in (first, second)]
    if len(first) < 2:
        return Difference(float(values[0]), float(values[1]), None, None)
    drawn = np.random.default_rng(seed).multinomial(len(first), [1 / len(first)] * len(first), size=RESAMPLES)
    a, b = drawn @ first, drawn @ second
    known = (a[:, 1] > 0) & (b[:, 1] > 0)
    found = b[known, 0] / b[known, 1] - a[known, 0] / a[known, 1]
    return Difference(float(values[0]), float(values[1]), *expanded(found, len(first), LEVEL))


def speed_ratio(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]], *, seed: int = 0) -> Difference | None:
    """The second draft's tokens per second over the first's, from `(tokens, seconds)`; `one` is 1: an interval of the ratio less 1."""
    first, second = np.asarray(one, float).reshape(-1, 2), np.asarray(other, float).reshape(-1, 2)
    if not len(first) or (first <= 0).any() or (second <= 0).any():
        return None
    ratio = float(second[:, 0].sum() / second[:, 1].sum() / (first[:, 0].sum() / first[:, 1].sum()))
    if len(first) < 2:
        return Difference(1.0, ratio, None, None)
    drawn = np.random.default_rng(seed).multinomial(len(first), [1 / len(first)] * len(first), size=RESAMPLES)
    a, b = drawn @ first, drawn @ second
    return Difference(1.0, ratio, *expanded(b[:, 0] / b[:, 1] / (a[:, 0] / a[:, 1]) - 1, len(first), LEVEL))


def versus(
    one: Sequence[Counts],
    other: Sequence[Counts],
    speed_one: Sequence[tuple[float, float]] = (),
    speed_other: Sequence[tuple[float, float]] = (),
) -> Versus:
    """Compare two drafts: counts of each request, and its `(tokens, seconds)` where times are known; entry i of all is the same request."""
    wide = max((len(each.drafted_at) for each in (*one, *other)), default=0)

    def at(counts: Counts, position: int) -> float:
        return counts.accepted_at[position] if position < len(counts.accepted_at) else 0

    def pick(top: str, bottom: str, offset: float = 0.0) -> Difference | None:
        tables = [[(getattr(each, top), getattr(each, bottom)) for each in side] for side in (one, other)]
        return difference(tables[0], tables[1], offset=offset)

    positions = [
        difference([(at(each, place), each.drafts) for each in one], [(at(each, place), each.drafts) for each in other])
        for place in range(wide)
    ]
    timed = bool(speed_one) and len(speed_one) == len(speed_other)
    return Versus(
        requests=len(one),
        acceptance_rate=pick("accepted", "draft_tokens"),
        mean_acceptance_length=pick("accepted", "drafts", 1.0),
        by_position=tuple(each for each in positions if each is not None),
        speed=difference(speed_one, speed_other) if timed else None,
        ratio=speed_ratio(speed_one, speed_other) if timed else None,
    )


def _span(found: Difference, digits: int) -> str:
    if found.low is None or found.high is None:
        return f"{found.value:+.{digits}f}"
    return f"{found.value:+.{digits}f} [{found.low:+.{digits}f}, {found.high:+.{digits}f}]"


def sentence(found: Versus, one: str, other: str) -> str:
    """The one plain sentence: is `other` better than `one`, worse, or is there no difference that this sample can show?"""
    length = found.mean_acceptance_length
    prompts = f"{found.requests} prompt{'s' if found.requests != 1 else ''}"
    if length is None:
        return f"{other} and {one} cannot be compared: there are no draft tokens on both sides."
    numbers = f"mean acceptance length {length.other:.2f} against {length.one:.2f}, difference {_span(length, 2)}"
    speed = ""
    if found.ratio is not None and found.ratio.low is not None and found.ratio.high is not None:
        low, high = 1 + found.ratio.low, 1 + found.ratio.high
        speed = f"; it answered {found.ratio.other:.2f} times as fast [{low:.2f}, {high:.2f}]"
    if found.outcome == "too few prompts":
        verb = "is" if found.requests == 1 else "are"
        return f"{prompts} {verb} too few to say whether {other} is accepted more or less than {one} (at least {FEWEST}): {numbers}{speed}."
    if found.outcome == "no difference shown":
        return f"{other} is neither better nor worse than {one} as far as {prompts} can show: {numbers}{speed}."
    return f"{other} is {found.outcome} than {one}: {numbers} over {prompts}{speed}."
