"""Order of turns, and ratios with their intervals, against what can be worked out by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from lab.bench import pairs


def test_lanes_take_turns_forwards_and_backwards() -> None:
    orders = pairs.turns(2, 20, seed=1)
    assert all(sorted(order) == [0, 1] for order in orders)
    assert all(second == first[::-1] for first, second in zip(orders[::2], orders[1::2], strict=True))
    assert Counter(order[0] for order in orders) == {0: 10, 1: 10}
    assert len({orders[pair] for pair in range(0, 20, 2)}) == 2, "the order in which a pair of pairs begins is random"
    assert orders == pairs.turns(2, 20, seed=1)
    assert orders != pairs.turns(2, 20, seed=2)


def test_three_lanes_all_run_in_every_pair() -> None:
    assert all(sorted(order) == [0, 1, 2] for order in pairs.turns(3, 7, seed=0))


def test_pooled_rate_is_total_over_total() -> None:
    found = pairs.rate([100, 10], [1.0, 9.0])
    assert found.value == pytest.approx(11.0)  # and not the mean of 100 and 1.1


def test_ratio_by_hand() -> None:
    found = pairs.ratio([10, 20], [1, 1], [10, 20], [2, 4])
    assert found.pooled.value == pytest.approx(30 / 2 / (30 / 6))
    assert found.median.value == found.mean.value == pytest.approx(3.0)
    assert (found.least, found.most, found.pairs) == (2.0, 4.0, 2)
    assert found.pooled.low == pytest.approx(2.0)
    assert found.pooled.high == pytest.approx(4.0)


def test_long_turns_weigh_more_in_the_pooled_ratio() -> None:
    found = pairs.ratio([10, 90], [1, 9], [10, 90], [2, 12])
    assert found.pooled.value == pytest.approx((100 / 10) / (100 / 14))
    assert found.mean.value == pytest.approx((2 + 4 / 3) / 2)


def test_what_a_pair_shares_cancels() -> None:
    """Pairs that differ tenfold in speed still give a certain ratio when both lanes of a pair share the difference."""
    slow = np.linspace(1, 10, 20)
    found = pairs.ratio([100] * 20, list(slow), [100] * 20, list(2 * slow))
    assert found.pooled.low == found.pooled.high == pytest.approx(2.0)
    shuffled = pairs.ratio([100] * 20, list(slow), [100] * 20, list(2 * slow[::-1]))
    assert shuffled.pooled.high - shuffled.pooled.low > 0.5


@pytest.mark.parametrize("count", [6, 8, 30])
def test_intervals_hold_the_truth_about_as_often_as_they_say(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Plain percentile intervals would hold it 173 times in 200 with 6 pairs, 176 times with 8."""
    monkeypatch.setattr(pairs, "RESAMPLES", 1000)
    random = np.random.default_rng(3)
    held = 0
    for trial in range(200):
        base, fast = random.normal(2.0, 0.2, count), random.normal(1.0, 0.1, count)
        found = pairs.ratio([128] * count, list(fast), [128] * count, list(base), seed=trial).pooled
        held += found.low <= 2.0 <= found.high
    assert 181 <= held <= 199


@pytest.mark.parametrize(
    "bad",
    [
        ([], [], [], []),
        ([1], [0.0], [1], [1]),
        ([0], [1], [1], [1]),
        ([1, 1], [1], [1, 1], [1, 1]),
        ([1, 1], [1, 1], [1], [1]),
    ],
)
def test_impossible_turns_are_the_callers_mistake(bad: tuple[list[float], ...]) -> None:
    with pytest.raises(ValueError, match=r"tokens|pairs|turn"):
        pairs.ratio(*bad)
