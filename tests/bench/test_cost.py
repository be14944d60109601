"""The cost model against planted costs, brute force and vLLM's own reading of a schedule."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lab.bench import cost

PLANTED = {
    "t0": 8e-3,
    "t_row": 4e-4,
    "t_bend": 5e-4,
    "t_context": 3e-7,
    "a0": 5e-4,
    "a_row": 5e-5,
    "d0": 9e-4,
    "d_row": 4e-5,
    "d_context": 2e-8,
    "r0": 1e-3,
    "r_request": 1e-4,
    "r_draft": 6e-4,
}


def points(noise: float = 0.0, *, timed: bool = True, ks: tuple[int, ...] = (0, 1, 2, 3, 5), seed: int = 0) -> list[cost.Point]:
    random = np.random.default_rng(seed)
    truth = cost.Model(PLANTED, True, bend=8)
    found = []
    for k, requests, context in itertools.product(ks, (1, 2, 4), (100.0, 800.0, 2500.0)):
        parts = {part: value * (1 + noise * random.normal()) for part, value in truth.parts(k, requests, context).items()}
        more = {part: parts[part] for part in ("target", "accept", "draft")} if timed else {}
        found.append(cost.Point(k, requests, context, sum(parts.values()), 50, **more))
    return found


def test_planted_costs_are_found() -> None:
    model = cost.fit(points())
    assert model.timed
    assert model.bend == 8
    for name, value in PLANTED.items():
        assert model.coefficients[name] == pytest.approx(value, rel=1e-6), name


def test_planted_costs_are_found_in_noise() -> None:
    model = cost.fit(points(0.02, seed=1))
    for name in ("t0", "t_row", "t_context", "d0"):
        assert model.coefficients[name] == pytest.approx(PLANTED[name], rel=0.25), name
    assert all(value >= 0 for value in model.coefficients.values())


def test_whole_steps_alone_predict_whole_steps() -> None:
    model = cost.fit(points(timed=False))
    assert not model.timed
    truth = cost.Model(PLANTED, True, bend=8)
    for k, requests, context in itertools.product((0, 1, 4), (1, 3, 4), (100.0, 2000.0)):
        assert model.step(k, requests, context) == pytest.approx(truth.step(k, requests, context), rel=0.02)


def test_cells_that_were_held_out_are_predicted_and_a_wrong_model_is_seen() -> None:
    everything = points(0.01, seed=2)
    held = [one for one in everything if one.k == 2 or one.requests == 2]
    model = cost.fit([one for one in everything if one not in held])
    good = cost.errors(model, held)
    assert good is not None
    assert good["points"] == len(held)
    assert good["median"] < 0.02
    assert good["worst"] < 0.06
    planted = [cost.Point(one.k, one.requests, one.context, one.seconds * (1.5 if one.k == 2 else 1.0)) for one in held]
    bad = cost.errors(model, planted)
    assert bad is not None
    assert bad["worst"] > 0.3
    assert cost.errors(model, []) is None


def test_nnls_is_least_squares_where_that_is_positive_and_never_below_zero() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        matrix, target = random.normal(size=(12, 4)), random.normal(size=12)
        x = cost.nnls(matrix, target)
        assert (x >= 0).all()
        best = min(  # brute force over the sets of free variables
            float(np.sum((matrix @ trial - target) ** 2))
            for size in range(5)
            for free in itertools.combinations(range(4), size)
            for trial in [_solved(matrix, target, free)]
            if (trial >= 0).all()
        )
        assert float(np.sum((matrix @ x - target) ** 2)) == pytest.approx(best, rel=1e-9)


def _solved(matrix: np.ndarray, target: np.ndarray, free: tuple[int, ...]) -> np.ndarray:
    x = np.zeros(matrix.shape[1])
    if free:
        x[list(free)] = np.linalg.lstsq(matrix[:, list(free)], target, rcond=None)[0]
    return x


def test_a_speed_up_is_never_above_the_mean_acceptance_length() -> None:
    absurd = cost.Model({"t0": 1.0, "d0": 0.0}, False)  # a draft that costs nothing
    assert absurd.speedup(3, 1, 100, 2.5) == 2.5
    model = cost.fit(points())
    for k, requests, tau in itertools.product((1, 3, 5), (1, 4, 16), (1.0, 2.2, 3.1)):
        assert model.speedup(k, requests, 100, tau) <= tau
    assert model.speedup(0, 4, 100, 1.0) == 1.0


def test_break_even_is_where_the_speed_up_is_one() -> None:
    model = cost.fit(points())
    even = model.break_even(3, 2, 500)
    assert model.speedup(3, 2, 500, even) == pytest.approx(1.0)
    alpha = cost.acceptance_for(even, 3)
    assert alpha is not None
    assert cost.expected_tokens(alpha, 3) == pytest.approx(even)


def test_what_a_fit_cannot_know_of_the_baseline_is_unknown() -> None:
    """A baseline measured in one large batch alone: its cost is explained by the bend, and nothing is left for a smaller batch."""
    model = cost.fit([cost.Point(0, 64, 100.0, 1.0), cost.Point(1, 1, 100.0, 1e-3), cost.Point(3, 1, 100.0, 3e-3)])
    assert model.step(0, 1, 100.0) == 0
    assert model.break_even(3, 1, 100.0) is None
    assert model.speedup(3, 1, 100.0, 2.0) is None
    assert model.break_even(3, 64, 100.0) is not None
    assert [one.requests for one in cost.choose(model, {1: 1.7, 3: 2.4}, [1, 64], 100.0)] == [64]
    assert cost.choose(model, {}, [1], 100.0, least=0) == []


def test_expected_tokens_is_the_sum_of_the_chances() -> None:
    for alpha, k in itertools.product((0.0, 0.3, 0.9, 1.0), (1, 3, 6)):
        assert cost.expected_tokens(alpha, k) == pytest.approx(sum(alpha**n for n in range(k + 1)))
    assert cost.acceptance_for(4.5, 3) is None, "three draft tokens never give 4.5"
    assert cost.acceptance_for(0.9, 3) is None


def test_choices_are_the_best_and_follow_the_batch() -> None:
    model, tau = cost.fit(points()), {1: 1.7, 2: 2.1, 3: 2.4, 5: 2.6}
    found = cost.choose(model, tau, [1, 4, 16], 200)
    for one in found:
        assert one.speedup == max(one.by_k.values()) == one.by_k[one.k]
        assert set(one.by_k) == set(tau)
    assert found[0].k > found[-1].k, "rows are dear in a large batch"
    never = cost.choose(model, {1: 1.0}, [16], 200, least=0)[0]
    assert never.k == 0
    assert never.speedup < 1, "no draft is not a baseline step: one draft pass remains"
    with pytest.raises(ValueError, match="no K"):
        cost.choose(model, {1: 1.7}, [1], 200, least=2)


def test_a_schedule_is_what_vllm_takes() -> None:
    made = [cost.Choice(1, 3, 1.0, {}), cost.Choice(2, 3, 1.0, {}), cost.Choice(4, 2, 1.0, {}), cost.Choice(8, 1, 1.0, {})]
    ranges = cost.schedule(made, 32)
    assert ranges == [[1, 3, 3], [4, 7, 2], [8, 32, 1]]
    utils = pytest.importorskip("vllm.v1.spec_decode.dynamic.utils", reason="the engine is not installed")
    dense = utils.build_dynamic_sd_schedule_lookup(ranges, 32, 3)
    assert [dense[size] for size in (1, 3, 4, 7, 8, 32)] == [3, 3, 2, 2, 1, 1]


def test_a_fit_needs_both_kinds_of_steps() -> None:
    with pytest.raises(ValueError, match="baseline"):
        cost.fit([one for one in points() if one.k])
    with pytest.raises(ValueError, match="draft"):
        cost.fit([one for one in points() if not one.k])
