"""Aligning: every place against brute force on random steps, the relations by hand, and what cannot be aligned."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.errors import LabError
from lab.trace.align import Decision, align, decisions, first_difference, pairs
from lab.trace.model import Request, Step


def step(index: int, draft: tuple[int, ...], accepted: int, own: int, kept: int | None = None) -> Step:
    sampled = (*draft[:accepted], own)
    return Step(
        trace="t", request="r", index=index, phase="decode", started=0, ended=0, draft=draft, sampled=sampled,
        kept=len(sampled) if kept is None else kept,
    )  # fmt: skip


def first(token: int, index: int = 0) -> Step:
    return Step(trace="t", request="r", index=index, phase="prefill", started=0, ended=0, sampled=(token,), kept=1)


def request(*steps: Step, prompt: str = "p", **more) -> Request:
    return Request(trace="t", lane="l", prompt=prompt, steps=list(steps), **more)


def test_each_place_says_who_decided_it() -> None:
    found = decisions(request(first(7), step(1, (1, 2, 3), 1, 9), step(2, (4, 5), 2, 6), step(3, (8, 8, 8), 0, 4)))
    assert found == (
        Decision(7, None, "alone", 0, 1),
        Decision(1, 1, "accepted", 1, 1),
        Decision(9, 2, "rejected", 1, 2),
        Decision(4, 4, "accepted", 2, 1),
        Decision(5, 5, "accepted", 2, 2),
        Decision(6, None, "alone", 2, 3),
        Decision(4, 8, "rejected", 3, 1),
    )


def test_padding_is_nobodys_proposal() -> None:
    assert decisions(request(step(0, (-1, -1), 0, 5)))[0] == Decision(5, None, "alone", 0, 1)


def test_tokens_past_a_stop_are_no_places() -> None:
    found = decisions(request(first(7), step(1, (1, 2, 3), 3, 9, kept=2)))
    assert [one.token for one in found] == [7, 1, 2]


@st.composite
def answers(draw, answer: tuple[int, ...]) -> Request:
    """Random steps that write `answer`, each with a random draft and as many accepted tokens as match it."""
    steps, done = [first(answer[0])], 1
    while done < len(answer):
        k = draw(st.integers(0, 4))
        draft = tuple(draw(st.sampled_from([token, token + 100])) for token in (*answer[done:], 0, 0, 0, 0)[:k])
        accepted = 0
        while accepted < min(k, len(answer) - done - 1) and draft[accepted] == answer[done + accepted]:
            accepted += 1
        if accepted < k and done + accepted < len(answer) and draft[accepted] == answer[done + accepted]:
            draft = draft[:accepted]  # the target would have accepted it
        steps.append(step(len(steps), draft, accepted, answer[done + accepted]))
        done += accepted + 1
    return request(*steps)


@settings(deadline=None)
@given(st.data(), st.lists(st.integers(1, 50), min_size=2, max_size=30).map(tuple))
def test_places_are_those_of_the_answer_and_of_brute_force(data, answer: tuple[int, ...]) -> None:
    one, other = data.draw(answers(answer)), data.draw(answers(answer))
    found = align(one, other)
    assert found.parted is None
    assert len(found.places) == len(answer)
    for side, asked in (("one", one), ("other", other)):
        for place in found.places:
            decided = getattr(place, side)
            # brute force: the step whose output covers this place, counted from the beginning
            before = 0
            for made in asked.steps:
                if before <= place.index < before + made.kept:
                    break
                before += made.kept
            inside = place.index - before
            proposed = made.draft[inside] if inside < len(made.draft) else None
            assert decided.token == answer[place.index] == made.sampled[inside]
            assert (decided.step, decided.position, decided.proposed) == (made.index, inside + 1, proposed)
            assert (decided.verdict == "accepted") == (inside < made.accepted)
            assert (decided.verdict == "alone") == (proposed is None)
            # what is accepted is what stands in the answer, what is rejected is not: an off-by-one breaks this
            assert (decided.proposed == decided.token) == (decided.verdict == "accepted")
    assert sum(found.count(kind) for kind in ("both", "neither", "one", "other", "apart", "alone")) == len(answer)


def test_the_relation_of_a_place() -> None:
    one = request(first(1), step(1, (2, 9), 1, 3), step(2, (4,), 1, 5), step(3, (7,), 0, 6))
    other = request(first(1), step(1, (8, 3), 0, 2), step(2, (3, 4, 5), 3, 6))
    assert [place.relation for place in align(one, other).places] == ["alone", "one", "other", "both", "apart", "alone"]


def test_both_rejected_is_neither() -> None:
    one, other = request(first(1), step(1, (8,), 0, 2)), request(first(1), step(1, (9,), 0, 2))
    assert [place.relation for place in align(one, other).places] == ["alone", "neither"]


def test_answers_that_part_are_compared_up_to_there() -> None:
    one = request(first(1), step(1, (2,), 1, 3), step(2, (4,), 1, 5))
    other = request(first(1), step(1, (2,), 1, 8), step(2, (4,), 1, 5))
    found = align(one, other)
    assert (found.parted, len(found.places), len(found.one), len(found.other)) == (2, 2, 5, 5)
    shorter = align(one, request(first(1), step(1, (2,), 1, 3)))
    assert (shorter.parted, len(shorter.places)) == (3, 3)
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([], [1]) == 0


def test_lost_steps_cannot_be_aligned() -> None:
    with pytest.raises(LabError, match="2 steps were lost"):
        decisions(request(first(1), dropped=2))
    with pytest.raises(LabError, match="do not add up"):
        decisions(request(first(1), ids=(1, 2)))


def test_requests_of_two_traces_are_paired_by_prompt() -> None:
    a, b, again = (request(first(1), prompt=text) for text in ("a", "b", "a"))
    found, alone, extra = pairs([a, b, again], [again, a])
    assert [(one.prompt, other.prompt) for one, other in found] == [("a", "a"), ("a", "a")]
    assert alone == [b]
    assert extra == []
    other = request(first(1), prompt="a", prompt_ids=(1, 2))
    assert pairs([request(first(1), prompt="a", prompt_ids=(1, 3))], [other]) == (
        [],
        [request(first(1), prompt="a", prompt_ids=(1, 3))],
        [other],
    )
