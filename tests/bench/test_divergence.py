"""Near-tie or real difference: the verdict, the threshold it hangs on, and that both can go either way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lab.bench import divergence, lossless
from lab.bench.divergence import Noise
from lab.bench.prompts import Prompt
from lab.bench.scoring import FAR, Completion, Scored
from lab.errors import LabError


def view(**logprobs: float) -> Scored:
    """A position with tokens named t1, t2, ..."""
    return Scored({int(name[1:]): value for name, value in logprobs.items()}, {int(name[1:]): name for name in logprobs})


SURE = view(t1=-0.1, t2=-3.0)


def scored(*views: Scored) -> list[Scored]:
    return list(views)


def test_the_same_tokens_are_identical() -> None:
    found = divergence.judge("p", (1, 1), scored(SURE, SURE), (1, 1), scored(SURE, SURE), 0.1)
    assert (found.verdict, found.at, found.off_best, found.worst) == ("identical", None, 0, 0.0)


def test_a_small_margin_is_a_near_tie_and_a_large_one_is_not() -> None:
    tie = view(t1=-0.70, t2=-0.75)
    for threshold, verdict in ((0.06, "near-tie"), (0.04, "real difference")):
        found = divergence.judge("p", (1, 1), scored(SURE, tie), (1, 2), scored(SURE, tie), threshold)
        assert found.verdict == verdict
        assert found.at == 1
        assert found.margin == pytest.approx(0.05)
        assert (found.theirs, found.ours) == (("t1", 1, -0.70), ("t2", 2, -0.75))
        assert found.off_best == 1


def test_a_wrong_token_behind_the_first_difference_is_found_too() -> None:
    """After a near-tie the texts are different, and the rest must still be the target's."""
    tie = view(t1=-0.70, t2=-0.71)
    found = divergence.judge("p", (1, 1, 1), scored(tie, SURE, SURE), (2, 1, 2), scored(tie, SURE, SURE), 0.1)
    assert found.verdict == "real difference"
    assert (found.at, found.worst_at) == (0, 2)
    assert found.margin == pytest.approx(0.01)
    assert found.worst == pytest.approx(2.9)


def test_a_token_that_the_target_does_not_even_list_is_a_real_difference() -> None:
    found = divergence.judge("p", (1,), scored(SURE), (9,), scored(SURE), 0.5)
    assert found.verdict == "real difference"
    assert found.worst == FAR


@pytest.mark.parametrize("answer", [(1,), (1, 1, 1)])
def test_an_answer_of_another_length_is_a_real_difference(answer: tuple[int, ...]) -> None:
    found = divergence.judge("p", (1, 1), [SURE] * 2, answer, [SURE] * len(answer), 0.1)
    assert found.verdict == "real difference"
    assert found.margin is None


def test_noise_is_the_largest_change_of_a_margin() -> None:
    one = [{1: -0.1, 2: -2.0}, {1: -0.5, 3: -0.6}, {1: -0.1, 2: -0.9}]
    other = [{1: -0.1, 2: -2.05}, {1: -0.52, 3: -0.55}, {1: -0.1, 4: -0.9}]
    found = divergence.noise([(one, other)])
    assert found.positions == 2  # the third has another second candidate
    assert found.largest == pytest.approx(0.07)
    assert found.threshold == found.largest
    assert divergence.noise([([*one, {1: 0.0, 2: -9.0}], [*other, {1: 0.0, 2: -6.0}])]) == found  # too far apart ever to turn
    assert divergence.noise([(one, other)], [0.0, 0.2]).largest == pytest.approx(0.2)  # a choice that scoring would not have made
    with pytest.raises(ValueError, match="read twice"):
        divergence.noise([(one[2:], other[2:])])


def test_readings_end_where_the_texts_part() -> None:
    a = Completion((1, 2, 3), ({1: 0.0}, {2: 0.0}, {3: 0.0}))
    b = Completion((1, 5, 6), ({1: 0.0}, {5: 0.0}, {6: 0.0}))
    assert [len(side) for side in divergence.readings([a], [b])[0]] == [2, 2]  # the place itself still has a common prefix
    assert [len(side) for side in divergence.readings([a], [a])[0]] == [3, 3]


def greedy(real: int, worst: float = 0.0, noise: float = 0.1) -> dict[str, object]:
    run = {"concurrency": 1, "real_differences": real, "worst_regret": worst}
    return {"prompts": 20, "runs": [run], "threshold_nats": noise, "noise": {"largest": noise}}


def sampling(verdict: str) -> dict[str, object]:
    return {"verdict": verdict, "temperature": 0.7, "least_p_adjusted": 1e-9}


@pytest.mark.parametrize(
    ("found", "tests", "verdict", "reasons"),
    [
        (greedy(0), ["consistent"], "lossless", 0),
        (greedy(0), ["not tested"], "lossless", 0),
        (greedy(1, 2.0), ["consistent"], "not lossless", 1),
        (greedy(0), ["consistent", "not the target's"], "not lossless", 1),
        (greedy(1, 2.0), ["not the target's"], "not lossless", 2),
        (greedy(0, noise=2.0), ["consistent"], "undecided", 1),
    ],
)
def test_the_verdict(found: dict[str, object], tests: Sequence[str], verdict: str, reasons: int) -> None:
    said, why = lossless.decide(found, [sampling(one) for one in tests])
    assert said == verdict
    assert len(why) == reasons


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompts": ()}, "no prompts"),
        ({"concurrency": ()}, "different numbers"),
        ({"concurrency": (1, 1)}, "different numbers"),
        ({"concurrency": (0,)}, "different numbers"),
        ({"max_tokens": 1}, "at least 2 tokens"),
        ({"temperatures": (0.0,)}, "temperature 0"),
        ({"temperatures": (1.5,)}, "temperature 1.5"),
        ({"samples": 10}, "too few"),
    ],
)
def test_a_plan_that_proves_nothing_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(LabError, match=words):
        lossless.Plan(**{"prompts": (Prompt("a", "chat", "Hi"),), **changes})  # type: ignore[arg-type]


def test_float32_is_a_recipe_of_its_own() -> None:
    from lab import recipes

    base = recipes.get("smollm2")
    single = lossless.with_dtype(base, "float32")
    assert lossless.with_dtype(base, None) is base
    assert single.name != base.name
    assert dict(single.flags)["--dtype"] == "float32"
    assert [flag for flag, _ in single.flags].count("--dtype") == 1
    assert single.value_bytes == 4
    assert lossless.with_dtype(single, "float32").memory_bytes == single.memory_bytes, "it computes so already"
    judge = lossless.reference(base)
    assert dict(judge.recipe.flags)["--max-logprobs"] == "2000"
    assert (judge.draft, judge.traced) == ("none", False)


def test_noise_threshold_is_stated() -> None:
    assert Noise(300, 0.125, 0.06).threshold == 0.125
    assert Noise(300, 0.0, 0.0).threshold == 1e-5  # margins that never moved still arrive in float32
    assert [divergence.nats(value) for value in (3.25, 0.125, 0.0021, 1e-5, 0.0)] == ["3.250", "0.125", "0.0021", "1e-05", "0.000"]
