"""The test of a distribution: its law where the sample is right, its power where it is not, and rules of acceptance that are wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("scipy", reason="the test's laws come from scipy")

from lab.bench import goodness, sampled

TARGET = np.array([0.35, 0.25, 0.15, 0.1, 0.06, 0.04, 0.03, 0.02])
Rule = Callable[[np.random.Generator, int], int]


def right(random: np.random.Generator, draft: int) -> int:
    """Leviathan et al. 2023 for a draft that is sure: accept with the target's probability, else sample from what is left."""
    if random.random() < TARGET[draft]:
        return draft
    left = TARGET.copy()
    left[draft] = 0
    return int(random.choice(len(left), p=left / left.sum()))


def always(random: np.random.Generator, draft: int) -> int:  # noqa: ARG001
    """Accepts whatever the draft says."""
    return draft


def unmasked(random: np.random.Generator, draft: int) -> int:
    """Recovers from the whole target distribution, the rejected token included: the mistake that is easiest to make."""
    return draft if random.random() < TARGET[draft] else int(random.choice(len(TARGET), p=TARGET))


def typical(random: np.random.Generator, draft: int) -> int:
    """Accepts every token that the target finds likely enough."""
    return draft if TARGET[draft] > 0.2 else right(random, draft)


def outcome(rule: Rule, *, seed: int, n: int = 600, draft: int = 1, slack: bool = False) -> goodness.Outcome:
    random = np.random.default_rng(seed)
    counts = Counter(rule(random, draft) for _ in range(n))
    reference = dict(enumerate(TARGET.tolist()))
    binned = goodness.pool(counts, reference, [{**reference, 0: 0.36, 1: 0.24}] if slack else [])
    assert binned is not None
    return goodness.test([binned])


def test_the_right_rule_fails_as_often_as_stated() -> None:
    p = [outcome(right, seed=seed, n=400).p for seed in range(400)]
    for alpha in (0.01, 0.05, 0.2):
        # Three standard errors of a binomial count: a law that is off is seen, chance is not.
        assert abs(np.mean(np.array(p) <= alpha) - alpha) < 3 * math.sqrt(alpha * (1 - alpha) / len(p))


@pytest.mark.parametrize("rule", [always, unmasked, typical])
def test_a_wrong_rule_is_found(rule: Rule) -> None:
    assert outcome(rule, seed=1).p < 1e-4
    assert outcome(right, seed=1).p > 0.01


def test_power_is_what_was_promised() -> None:
    """Against the shape that is hardest to find for its distance: at least as often as stated, and not far more."""
    n, alpha, distance = 800, 0.05, goodness.detectable(800, len(TARGET) - 1, 0.05, 0.8)
    assert distance is not None
    assert 0.02 < distance < 0.1
    shift = TARGET * np.where(np.arange(len(TARGET)) % 2, 1.0, -1.0)  # proportional to the target: chi-squared distance is 4 d^2
    shift[0] -= shift.sum()
    wrong = TARGET + shift * (distance / (abs(shift).sum() / 2))
    random, found = np.random.default_rng(0), 0
    for _ in range(400):
        counts = dict(enumerate(random.multinomial(n, wrong).tolist()))
        binned = goodness.pool(counts, dict(enumerate(TARGET.tolist())))
        assert binned is not None
        found += goodness.test([binned]).p <= alpha
    assert found / 400 > 0.8 - 3 * 0.02
    assert goodness.power(distance, n, len(TARGET) - 1, alpha) == pytest.approx(0.8, abs=0.01)
    assert goodness.power(0.0, n, 7, alpha) == pytest.approx(alpha)
    assert goodness.detectable(5, 40, 1e-12, 0.95) is None


def test_contexts_add_up() -> None:
    one, other = goodness.Binned((50, 50), (0.5, 0.5)), goodness.Binned((70, 30), (0.5, 0.5))
    together = goodness.test([one, other])
    assert together.statistic == pytest.approx(goodness.test([one]).statistic + goodness.test([other]).statistic)
    assert (together.freedom, together.tokens) == (2, 200)
    assert together.distance == pytest.approx(0.1)
    with pytest.raises(ValueError, match="no contexts"):
        goodness.test([])


def test_bins_hold_at_least_five() -> None:
    reference = {1: 0.6, 2: 0.3, 3: 0.05, 4: 0.03, 5: 0.01}  # 0.01 of all is not listed
    binned = goodness.pool({1: 60, 2: 30, 3: 4, 4: 3, 9: 3}, reference)
    assert binned is not None
    assert all(100 * share >= 5 for share in binned.shares)
    assert binned.counts == (60, 30, 4, 6)
    assert sum(binned.shares) == pytest.approx(1)
    assert goodness.pool({1: 100}, {1: 1.0}) is None  # one bin says nothing
    assert goodness.pool({1: 3}, {1: 0.5, 2: 0.5}) is None
    tight = goodness.pool({1: 97, 2: 3}, {1: 0.96, 2: 0.03})
    assert tight is None  # what is left after the likeliest is under five


def test_rounding_of_the_reference_is_allowed_for() -> None:
    plain, allowed = outcome(right, seed=3), outcome(right, seed=3, slack=True)
    assert plain.noncentrality == 0
    assert allowed.noncentrality == pytest.approx(600 * (0.01**2 / 0.35 + 0.01**2 / 0.25))
    assert allowed.p > allowed.p_exact == plain.p
    assert outcome(always, seed=3, slack=True).p < 1e-4  # and nothing more is


def test_holm() -> None:
    assert goodness.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert goodness.holm([0.9, 0.8]) == [1.0, 1.0]
    assert goodness.holm([]) == []


def test_contexts_are_what_many_answers_share() -> None:
    answers = [(1, 2, 3), (1, 2, 4), (1, 5, 6), (7, 8, 9)]
    found = sampled.contexts(answers, 2, least=2)
    assert found == {(1,): Counter({2: 2, 5: 1}), (1, 2): Counter({3: 1, 4: 1})}
    assert sampled.contexts(answers, 1, least=2).keys() == {(1,)}
    assert () not in sampled.contexts(answers, 3, least=1)  # prefill's token is never tested
    assert len(sampled.contexts(answers, 3, least=1, most=2)) == 2


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0])
def test_probabilities_at_a_temperature(temperature: float) -> None:
    logits = np.random.default_rng(0).normal(0, 3, 500)
    exact = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    logprobs = logits - np.log(np.exp(logits).sum())
    best = np.argsort(-logprobs)[:200]
    found, missing = sampled.at_temperature({int(token): float(logprobs[token]) for token in best}, temperature)
    assert missing < 0.01
    for token in best[:20]:
        assert found[int(token)] == pytest.approx(exact[token], rel=1.0001 * missing + 1e-9)
        assert found[int(token)] <= exact[token] * (1 + 1e-9)  # the bound takes from the listed ones, never gives
    with pytest.raises(ValueError, match="temperature"):
        sampled.at_temperature({1: -0.1}, 1.5)


def summary_of(rule: Rule) -> dict[str, object]:
    ask = sampled.Ask({str(n): () for n in range(4)}, 1.0, 600, 4)
    found = [sampled.Tested(str(n), 1, outcome(rule, seed=100 + n), 0.0) for n in range(4)]
    return sampled.summarise(found, ask)


def test_a_summary_tells_right_from_wrong_and_what_it_could_have_found() -> None:
    good, bad = summary_of(right), summary_of(always)
    assert (good["verdict"], bad["verdict"]) == ("consistent", "not the target's")
    assert good["detectable"] == bad["detectable"]
    assert 0 < good["detectable"]["80%"] < good["detectable"]["95%"] < 0.2  # type: ignore[index]
    none = sampled.summarise([], sampled.Ask({}, 1.0, 600, 4))
    assert (none["verdict"], none["detectable"]) == ("not tested", {"80%": None, "95%": None})
