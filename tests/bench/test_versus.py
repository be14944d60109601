"""Paired differences against brute force, and the one sentence at its edges."""

from __future__ import annotations

import numpy as np
import pytest

from lab.bench.versus import FEWEST, Difference, Versus, difference, sentence, speed_ratio, versus
from lab.trace.stats import Counts


def counts(drafts: int, accepted: int, k: int = 3) -> Counts:
    return Counts(drafts, k * drafts, accepted, (accepted,), (drafts,), (), drafts + accepted, drafts)


def test_a_difference_is_of_pooled_ratios() -> None:
    found = difference([(1, 2), (3, 4)], [(2, 2), (3, 3)], offset=1.0)
    assert found is not None
    assert (found.one, found.other) == (1 + 4 / 6, 2.0)
    assert found.value == pytest.approx(1 / 3)


def test_the_bootstrap_is_paired_and_agrees_with_brute_force() -> None:
    random = np.random.default_rng(1)
    one = [(float(a), 10.0) for a in random.integers(0, 30, 20)]
    other = [(a + 1, b) for a, b in one]  # each request gains the same, however much requests differ
    found = difference(one, other)
    assert found is not None
    assert found.low == pytest.approx(0.1)  # unpaired, the spread of the requests would swallow it
    assert found.high == pytest.approx(0.1)
    noisy = [(a + float(random.normal()), b) for a, b in one]
    found = difference(one, noisy)
    assert found is not None
    means = []
    for _ in range(4000):
        drawn = random.integers(len(one), size=len(one))
        means.append(np.mean([(noisy[i][0] - one[i][0]) / 10 for i in drawn]))
    low, high = np.quantile(means, [0.025, 0.975])
    assert found.low == pytest.approx(low, abs=0.01)
    assert found.high == pytest.approx(high, abs=0.01)


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    random, hits, trials = np.random.default_rng(2), 0, 200
    for _ in range(trials):
        drafts = random.integers(20, 60, 24)
        one, other = (random.binomial(3 * drafts, rate) for rate in (0.5, 0.55))
        found = difference(list(zip(one, 3 * drafts, strict=True)), list(zip(other, 3 * drafts, strict=True)))
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 0.05 <= found.high
    assert 0.88 < hits / trials < 0.99


@pytest.mark.parametrize("prompts", [FEWEST, 8, 24])
def test_two_drafts_that_are_alike_seldom_show_a_difference_however_few_the_prompts(prompts: int) -> None:
    random, shown, trials = np.random.default_rng(3), 0, 400
    for _ in range(trials):
        drafts = random.integers(30, 70, prompts)
        rates = np.clip(random.beta(4, 4, prompts) + random.normal(0, 0.05, (2, prompts)), 0.02, 0.98)
        one, other = (list(zip(random.binomial(3 * drafts, rate), drafts, strict=True)) for rate in rates)
        found = difference(one, other, offset=1.0)
        assert found is not None
        shown += found.shown()
    assert shown / trials < 0.08  # a plain percentile interval: 0.13 of 6 prompts, 0.10 of 8


def test_what_is_undefined_is_none() -> None:
    assert difference([], []) is None
    assert difference([(0, 0)], [(1, 1)]) is None
    assert speed_ratio([(1, 0)], [(1, 1)]) is None
    one = difference([(1, 2)], [(2, 2)])
    assert one is not None
    assert one.low is None
    assert not one.shown()
    with pytest.raises(ValueError, match="same requests"):
        difference([(1, 1)], [])


def test_a_speed_is_a_ratio_of_pooled_rates() -> None:
    found = speed_ratio([(10, 1), (30, 3)], [(20, 1), (60, 3)])
    assert found is not None
    assert found.other == 2.0
    assert (found.low, found.high) == (1.0, 1.0)


def test_every_measure_is_of_the_counts() -> None:
    one, other = [counts(10, 5)] * 8, [counts(10, 10)] * 8
    found = versus(one, other, [(10, 1)] * 8, [(10, 2)] * 8)
    assert found.mean_acceptance_length is not None
    assert found.acceptance_rate is not None
    assert found.ratio is not None
    assert (found.mean_acceptance_length.one, found.mean_acceptance_length.other) == (1.5, 2.0)
    assert (found.acceptance_rate.one, found.acceptance_rate.other) == (5 / 30, 10 / 30)
    assert [each.value for each in found.by_position] == [0.5]
    assert found.ratio.other == 0.5
    assert found.outcome == "better"
    assert versus(one, other).ratio is None
    assert versus(other, one).outcome == "worse"
    assert versus(one, one).outcome == "no difference shown"
    assert versus([Counts()] * 8, other).mean_acceptance_length is None


def made(value: float, low: float | None, high: float | None, requests: int = 24, speed: Difference | None = None) -> Versus:
    return Versus(requests, None, Difference(2.0, 2.0 + value, low, high), (), None, speed)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            made(0.1, 0.01, 0.2),
            "FP8 is better than BF16: mean acceptance length 2.10 against 2.00, difference +0.10 [+0.01, +0.20] over 24",
        ),
        (made(-0.1, -0.2, -0.01), "FP8 is worse than BF16: mean acceptance length 1.90 against 2.00, difference -0.10 [-0.20, -0.01]"),
        (made(0.1, -0.01, 0.2), "FP8 is neither better nor worse than BF16 as far as 24 prompts can show:"),
        (made(0.1, 0.0, 0.2), "FP8 is neither better nor worse than BF16 as far as 24 prompts can show:"),
        (made(-0.1, -0.2, 0.0), "FP8 is neither better nor worse"),
        (made(0.1, 0.05, 0.2, FEWEST), f"over {FEWEST} prompts."),
        (made(0.1, 0.05, 0.2, FEWEST - 1), f"{FEWEST - 1} prompts are too few to say"),
        (made(0.1, None, None, 1), "1 prompt is too few to say"),
        (Versus(3, None, None, (), None, None), "cannot be compared: there are no draft tokens on both sides"),
        (made(0.1, 0.05, 0.2, speed=Difference(1.0, 1.05, 0.02, 0.09)), "; it answered 1.05 times as fast [1.02, 1.09]."),
    ],
)
def test_the_sentence(found: Versus, words: str) -> None:
    said = sentence(found, "BF16", "FP8")
    assert words in said
    assert said.endswith(".")
    assert said.count(". ") == 0, "one sentence"
