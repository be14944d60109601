"""Counts against hand-counted steps and brute force."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from lab.trace.model import Step
from lab.trace.stats import Counts, count, fresh, interval, tokens_per_second


def step(index: int, draft: tuple[int, ...], accepted: int, kept: int | None = None, *, own: int = 99, ended: float = 0.0) -> Step:
    """A verify step that accepted the first `accepted` draft tokens, then sampled `own`."""
    sampled = (*draft[:accepted], own)
    return Step(
        trace="t", request="r", index=index, phase="decode", started=0.0, ended=ended, draft=draft, sampled=sampled,
        kept=len(sampled) if kept is None else kept,
    )  # fmt: skip


def prefill(index: int, sampled: tuple[int, ...]) -> Step:
    return Step(trace="t", request="r", index=index, phase="prefill", started=0, ended=0, sampled=sampled, kept=len(sampled))


def test_counts_are_those_of_a_hand_count() -> None:
    steps = [
        prefill(0, ()),
        prefill(1, (5,)),
        step(2, (1, 2, 3), 3),
        step(3, (1, 2, 3), 0),
        step(4, (1, 2, 3), 2, kept=1),
        step(5, (1,), 1),
    ]
    counts = count(steps)
    assert (counts.drafts, counts.draft_tokens, counts.accepted) == (4, 10, 6)
    assert counts.accepted_at == (3, 2, 1)
    assert counts.drafted_at == (4, 3, 3)
    assert counts.histogram == (1, 1, 1, 1)
    assert counts.tokens == 1 + 4 + 1 + 1 + 2
    assert counts.passes == 5
    assert counts.passes_saved == 4
    assert counts.acceptance_rate == 0.6
    assert counts.mean_acceptance_length == 2.5
    assert counts.rate_at == (0.75, 0.5, 0.25)


def test_counts_of_nothing_are_undefined_not_zero() -> None:
    nothing = count([prefill(0, (5,))])
    assert nothing.acceptance_rate is None
    assert nothing.mean_acceptance_length is None
    assert nothing.rate_at == ()
    assert nothing.passes_saved == 0


def test_a_step_thrown_away_is_no_draft() -> None:
    """vLLM counts a draft only where something was sampled."""
    assert count([Step(trace="t", request="r", index=0, phase="decode", started=0, ended=0, draft=(1, 2))]).drafts == 0


def test_counts_add_up_over_any_split() -> None:
    draw = random.Random(1)
    steps = [step(i, tuple(range(draw.randint(1, 5))), 0) for i in range(200)]
    steps = [step(s.index, s.draft, draw.randint(0, len(s.draft))) for s in steps]
    for cut in (0, 1, 77, 200):
        assert count(steps[:cut]) + count(steps[cut:]) == count(steps)
    whole = count(steps)
    assert sum(whole.histogram) == whole.drafts
    assert sum(a * n for a, n in enumerate(whole.histogram)) == whole.accepted == sum(whole.accepted_at)


def test_a_loop_is_left_out_from_its_second_round() -> None:
    """An answer of period 4: 0 1 2 3 0 1 2 3 ...; the 8-gram that ends at token 11 is the first seen before (at token 7)."""
    steps = [step(i, (0, 1, 2), 3, own=3) for i in range(6)]
    kept = [s.index for s in fresh(steps)]
    assert kept == [0, 1, 2]  # step 3 starts with token 12
    assert [s.index for s in fresh(steps, n=4)] == [0, 1]
    assert [s.index for s in fresh(steps[:1])] == [0]


def test_a_cut_token_is_no_part_of_the_answer() -> None:
    looping = [step(i, (0, 1, 2), 3, own=3) for i in range(4)]
    assert len(list(fresh(looping))) == 3
    cut = [step(i, (0, 1, 2), 3, own=3, kept=1) for i in range(9)]  # the answer is 0 0 0 ...
    assert [s.index for s in fresh(cut)] == list(range(8))


def test_speed_is_of_the_tokens_after_the_first() -> None:
    steps = [prefill(0, (1,)), step(1, (1, 2), 2, ended=0.5), step(2, (1, 2), 0, ended=2.0)]
    assert tokens_per_second(steps) == 4 / 2.0
    assert tokens_per_second(steps[:1]) is None


def test_interval_covers_and_narrows() -> None:
    draw = random.Random(3)

    def sample(n: int) -> list[Counts]:
        return [count([step(i, (1, 2, 3), draw.choice((0, 1, 1, 2, 3))) for i in range(20)]) for _ in range(n)]

    few, many = sample(10), sample(160)
    wide, narrow = (interval(x, lambda c: c.mean_acceptance_length) for x in (few, many))
    assert wide is not None
    assert narrow is not None
    assert narrow[0] < 1 + 7 / 5 < narrow[1]
    assert narrow[1] - narrow[0] < (wide[1] - wide[0]) / 2
    assert interval(many, lambda c: c.mean_acceptance_length) == narrow  # repeatable


def test_interval_agrees_with_the_normal_approximation() -> None:
    draw = random.Random(5)
    sample = [count([step(0, (1,), draw.random() < 0.3)]) for _ in range(400)]
    found = interval(sample, lambda c: c.acceptance_rate)
    assert found is not None
    rate = sum(c.accepted for c in sample) / 400
    half = 1.96 * math.sqrt(rate * (1 - rate) / 400)
    assert found == pytest.approx((rate - half, rate + half), abs=0.01)


def test_interval_needs_two_requests_and_some_drafts() -> None:
    assert interval([count([step(0, (1,), 1)])], lambda c: c.acceptance_rate) is None
    assert interval([Counts(), Counts()], lambda c: c.acceptance_rate) is None


@pytest.mark.parametrize("count", [6, 8, 30])
def test_intervals_of_few_requests_hold_the_truth_about_as_often_as_they_say(count: int) -> None:
    """Plain percentile intervals would hold it 166 times in 200 with 6 requests."""
    draw, held = np.random.default_rng(0), 0
    for _ in range(200):
        drafts = draw.integers(30, 70, count)
        accepted = draw.binomial(3 * drafts, np.clip(draw.beta(4, 4, count), 0.02, 0.98))
        sample = [Counts(int(of), 3 * int(of), int(kept)) for of, kept in zip(drafts, accepted, strict=True)]
        found = interval(sample, lambda one: one.mean_acceptance_length, resamples=1000)
        assert found is not None
        held += found[0] <= 1 + 3 * 0.5 <= found[1]
    assert 181 <= held <= 199
