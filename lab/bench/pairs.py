"""Comparing lanes on one machine: the order in which they take turns, and ratios of their speeds with an uncertainty.

A machine's speed drifts, so the lanes take turns request by request, and each pair (one turn of every lane on the same work) is short.
Within a pair the order is random, and the next pair runs in the opposite order: a drift that is linear over two pairs cancels.

The speed-up is the ratio of two rates, tokens over seconds, each pooled over all pairs. Its interval is a percentile bootstrap over pairs
(Efron 1979): pairs are drawn with replacement, both lanes of a pair together, so that what a pair shares does not widen the interval.
A plain one of few pairs is too narrow, so it is *expanded* (`trace.stats.expanded`).
Limits: below about five pairs the interval is no more than their range; it says nothing about other prompts or other machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lab.trace.stats import expanded

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


def _estimate(value: float, samples: np.ndarray, units: int) -> Estimate:
    return Estimate(float(value), *expanded(samples, units, LEVEL))


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
