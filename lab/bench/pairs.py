"""Comparing lanes on one machine: the order in which they take turns, and ratios of their speeds with an uncertainty.

A machine's speed drifts, so the lanes take turns request by request, and each pair (one turn of every lane on the same work) is short.
Within a pair the order is random, and the next pair runs in the opposite order: a drift that is linear over two pairs cancels.

The speed-up is the ratio of two rates, tokens over seconds, each pooled over all pairs. Its interval is a percentile bootstrap over pairs
(Efron 1979): pairs are drawn with replacement, both lanes of a pair together, so that what a pair shares does not widen the interval.
A plain percentile interval of few pairs is too narrow: of 8 it leaves out the truth one time in ten. So it is *expanded* (Hesterberg 2015,
The American Statistician 69(4)): its quantiles are taken further out, by as much as Student's t asks for.
Limits: below about five pairs no quantile lies far enough out, and the interval is their range; it says nothing about other prompts or
other machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

#: Resamples of a bootstrap, and the share of them that an interval holds.
RESAMPLES = 10_000
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A value and its bootstrap interval at `LEVEL`."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Ratio:
    """How much faster one lane is than another: pooled rates, and the ratios of single pairs."""

    pairs: int
    #: (tokens / seconds) of the one over (tokens / seconds) of the other, all pairs together: the headline.
    pooled: Estimate
    median: Estimate
    mean: Estimate
    #: Smallest and largest ratio of a single pair.
    least: float
    most: float


def turns(lanes: int, pairs: int, seed: int) -> list[tuple[int, ...]]:
    """For each pair the order of the lanes' indices: random in even pairs, the previous order backwards in odd ones."""
    random = np.random.default_rng(seed)
    orders: list[tuple[int, ...]] = []
    for pair in range(pairs):
        orders.append(orders[-1][::-1] if pair % 2 else tuple(int(lane) for lane in random.permutation(lanes)))
    return orders


def expanded(samples: np.ndarray, units: int) -> tuple[float, float]:
    """The expanded percentile interval at `LEVEL` of a bootstrap's `samples`, which were drawn from `units` (two or more) at a time."""
    normal, free = NormalDist(), max(1, units - 1)
    z = normal.inv_cdf((1 + LEVEL) / 2)
    # Student's t from the normal quantile (Abramowitz & Stegun 26.7.5): within 0.01 from 5 degrees of freedom on.
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * free**3)
    tail = normal.cdf(-t * (units / free) ** 0.5)
    low, high = np.quantile(samples, [tail, 1 - tail])
    return float(low), float(high)


def _estimate(value: float, samples: np.ndarray, units: int) -> Estimate:
    return Estimate(float(value), *expanded(samples, units))


def _check(tokens: np.ndarray, seconds: np.ndarray) -> None:
    if tokens.shape != seconds.shape or tokens.ndim != 1 or not len(tokens):
        raise ValueError("tokens and seconds must be equally long and not empty")
    if (tokens <= 0).any() or (seconds <= 0).any():
        raise ValueError("every turn needs at least one token and a positive time")


def rate(tokens: Sequence[float], seconds: Sequence[float], *, seed: int = 0) -> Estimate:
    """Tokens per second, pooled over turns, with an interval over turns."""
    made, took = np.asarray(tokens, float), np.asarray(seconds, float)
    _check(made, took)
    drawn = np.random.default_rng(seed).integers(len(made), size=(RESAMPLES, len(made)))
    return _estimate(made.sum() / took.sum(), made[drawn].sum(1) / took[drawn].sum(1), len(made))


def ratio(
    tokens: Sequence[float], seconds: Sequence[float], base_tokens: Sequence[float], base_seconds: Sequence[float], *, seed: int = 0
) -> Ratio:
    """Speed of a lane over the speed of a base lane; entry i of each sequence belongs to pair i."""
    made, took = np.asarray(tokens, float), np.asarray(seconds, float)
    base_made, base_took = np.asarray(base_tokens, float), np.asarray(base_seconds, float)
    _check(made, took)
    _check(base_made, base_took)
    if len(made) != len(base_made):
        raise ValueError("both lanes need the same pairs")
    single = (made / took) / (base_made / base_took)
    drawn = np.random.default_rng(seed).integers(len(made), size=(RESAMPLES, len(made)))
    rates = made[drawn].sum(1) / took[drawn].sum(1)
    base_rates = base_made[drawn].sum(1) / base_took[drawn].sum(1)
    pooled = (made.sum() / took.sum()) / (base_made.sum() / base_took.sum())
    return Ratio(
        pairs=len(made),
        pooled=_estimate(pooled, rates / base_rates, len(made)),
        median=_estimate(float(np.median(single)), np.median(single[drawn], axis=1), len(made)),
        mean=_estimate(single.mean(), single[drawn].mean(1), len(made)),
        least=float(single.min()),
        most=float(single.max()),
    )
