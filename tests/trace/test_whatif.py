"""Smaller K, replayed from what a run knows, against a brute force that knows the draft at every place."""

from __future__ import annotations

import random

import pytest

from lab.trace import whatif
from lab.trace.model import Step


def answer_and_draft(seed: int, length: int = 60) -> tuple[list[int], list[list[int]]]:
    """A greedy answer (longer than what is let out), and the draft's proposal of 8 tokens at each place: right for a random while."""
    rng = random.Random(seed)
    answer = [rng.randrange(1000) for _ in range(length + 20)]
    proposals = []
    for place in range(length):
        right = min(rng.choice([0, 0, 1, 2, 3, 5, 8]), 8)
        ahead = answer[place : place + 8]
        proposals.append([*ahead[:right], *(token + 1000 for token in ahead[right:])])
    return answer, proposals


def run(answer: list[int], proposals: list[list[int]], k: int, *, withhold: bool = False) -> list[Step]:
    """The steps of a real run with `k` draft tokens, as vLLM makes them: the acceptance rule, then the limit of new tokens."""
    length, place = len(proposals), 1
    common = {"trace": "t", "request": "r", "started": 0.0, "ended": 1.0}
    steps = [Step(**common, index=0, phase="prefill", sampled=(answer[0],), kept=1)]
    while place < length:
        draft = proposals[place][:k]
        right = next((n for n in range(k) if draft[n] != answer[place + n]), k)
        sampled = answer[place : place + (1 if withhold else right + 1)]
        kept = min(len(sampled), length - place)
        more = {"withheld": tuple(draft)} if withhold else {"draft": tuple(draft)}
        steps.append(Step(**common, index=len(steps), phase="decode", sampled=tuple(sampled), kept=kept, **more))
        place += kept
    return steps


@pytest.mark.parametrize("seed", range(20))
def test_withheld_drafts_give_every_smaller_k_exactly(seed: int) -> None:
    answer, proposals = answer_and_draft(seed)
    known = whatif.answer_of(run(answer, proposals, 5, withhold=True))
    for k in range(1, 6):
        found = whatif.replay(known, k)
        real = run(answer, proposals, k)
        assert found.exact
        assert found.fewest == found.estimate == len(real) - 1
        assert found.tokens == len(proposals) - 1 == sum(step.kept for step in real[1:])


@pytest.mark.parametrize("seed", range(20))
def test_an_ordinary_run_gives_bounds_that_hold(seed: int) -> None:
    answer, proposals = answer_and_draft(seed)
    known = whatif.answer_of(run(answer, proposals, 4))
    for k in range(1, 5):
        found, real = whatif.replay(known, k), len(run(answer, proposals, k)) - 1
        assert found.fewest <= real <= found.most
        assert found.fewest <= found.estimate <= found.most
    assert whatif.replay(known, 4).exact, "its own K needs no guess"


def test_bounds_are_reached() -> None:
    """Both bounds are the truth of some draft that agrees with the run: brute force over all of them."""
    answer = list(range(100, 120))
    at_one = [*answer[1:4], 0]  # three right of three
    tight = []
    for right in (0, 1):
        proposals = [[0, 0, 0, 0]] + [at_one] + [[*answer[p : p + right], *[0] * (4 - right)] for p in range(2, 6)]
        tight.append(len(run(answer, proposals, 1)) - 1)
    known = whatif.answer_of(run(answer, [[0] * 4, at_one] + [[0] * 4 for _ in range(4)], 3))
    found = whatif.replay(known, 1)
    assert not found.exact
    assert (found.fewest, found.most) == (min(tight), max(tight)) == (3, 4)


def test_by_hand() -> None:
    """Accepted 3 of 3, then 0: with one draft token the first step ends after two tokens, inside the first."""
    answer = [1, 2, 3, 4, 5, 6]
    steps = run(answer + [0] * 9, [[9, 9, 9], [2, 3, 4], [9, 9, 9], [9, 9, 9], [9, 9, 9], [9, 9, 9]], 3)
    assert [step.kept for step in steps] == [1, 4, 1]
    one = whatif.replay(whatif.answer_of(steps), 1)
    assert (one.fewest, one.most, one.estimate) == (3, 4, 3)
    assert one.tokens_per_step == pytest.approx(5 / 3)
    assert one.bounds == pytest.approx((5 / 4, 5 / 3))


def test_more_than_the_run_drafted_is_not_claimed() -> None:
    answer, proposals = answer_and_draft(3)
    found = whatif.replay(whatif.answer_of(run(answer, proposals, 2)), 4)
    assert not found.exact
    assert found.fewest <= len(run(answer, proposals, 4)) - 1 <= found.most


def test_several_requests_add_up() -> None:
    runs = [run(*answer_and_draft(seed), 3, withhold=True) for seed in (1, 2)]
    two = whatif.replays(runs, [1, 3])
    assert [one.k for one in two] == [1, 3]
    assert two[0].tokens == 2 * 59
    assert two[0].fewest == sum(whatif.replay(whatif.answer_of(steps), 1).fewest for steps in runs)
    with pytest.raises(ValueError, match="different K"):
        two[0] + two[1]


def test_answers_without_drafts() -> None:
    assert whatif.replay(whatif.answer_of([]), 2).tokens_per_step is None
    alone = [Step(trace="t", request="r", index=0, phase="prefill", started=0, ended=1, sampled=(5,), kept=1)]
    assert whatif.replay(whatif.answer_of(alone), 2).bounds is None
    plain = [*alone, Step(trace="t", request="r", index=1, phase="decode", started=1, ended=2, sampled=(6,), kept=1)]
    assert whatif.replay(whatif.answer_of(plain), 2) == whatif.Replay(2, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="at least one"):
        whatif.replay(whatif.answer_of(plain), 0)


def test_steps_without_a_draft_are_no_depth() -> None:
    """They are the same whatever K: a baseline's answer has nothing to replay, and one such step in a draft's answer is no larger K."""
    answer, proposals = answer_and_draft(1)
    common = {"trace": "t", "request": "r", "started": 0.0, "ended": 1.0}
    plain = [
        Step(**common, index=place, phase="decode" if place else "prefill", sampled=(token,), kept=1) for place, token in enumerate(answer)
    ]
    assert whatif.answer_of(plain).depth == 0
    assert whatif.replay(whatif.answer_of(plain), 3).exact
    drafted = run(answer, proposals, 3)
    last = Step(**common, index=len(drafted), phase="decode", sampled=(7,), kept=1)
    assert whatif.answer_of([*drafted, last]).depth == 3
