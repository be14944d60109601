"""The wire format: marks, and what survives JSON and msgpack."""

from __future__ import annotations

import msgspec
import pytest

from lab.trace.model import Request, Step

BASE = Step(trace="t", request="r", index=3, phase="decode", started=1.0, ended=1.5, draft=(7, 8, 9), sampled=(7, 8, 4), kept=3)


@pytest.mark.parametrize(
    ("draft", "sampled", "draft_marks", "sampled_marks", "accepted"),
    [
        ((7, 8, 9), (4,), ("rejected", "unreached", "unreached"), ("recovered",), 0),
        ((7, 8, 9), (7, 4), ("accepted", "rejected", "unreached"), ("accepted", "recovered"), 1),
        ((7, 8, 9), (7, 8, 9, 4), ("accepted",) * 3, ("accepted",) * 3 + ("bonus",), 3),
        ((), (4,), (), ("plain",), 0),
        ((), (), (), (), 0),
    ],
)
def test_marks(draft: tuple, sampled: tuple, draft_marks: tuple, sampled_marks: tuple, accepted: int) -> None:
    step = msgspec.structs.replace(BASE, draft=draft, sampled=sampled)
    assert step.draft_marks() == draft_marks
    assert step.sampled_marks() == sampled_marks
    assert step.accepted == accepted


def test_a_step_survives_both_encodings() -> None:
    step = msgspec.structs.replace(BASE, draft_probs=(0.5, 0.25, 0.125), finish="stop")
    for codec in (msgspec.json, msgspec.msgpack):
        assert codec.decode(codec.encode(step), type=Step) == step


def test_an_older_reader_ignores_new_fields() -> None:
    data = msgspec.json.decode(msgspec.json.encode(BASE))
    assert msgspec.convert({**data, "newer": 1}, Step) == BASE


def test_a_step_of_an_older_file_was_not_timed_in_parts() -> None:
    timed = msgspec.structs.replace(BASE, verify_s=0.02, accept_s=0.001, draft_s=0.0)
    data = msgspec.json.decode(msgspec.json.encode(timed))
    assert msgspec.convert(data, Step) == timed
    older = {key: value for key, value in data.items() if key not in ("verify_s", "accept_s", "draft_s")}
    assert msgspec.convert(older, Step).draft_s is None


def test_output_ids_leave_out_what_a_stop_cut() -> None:
    request = Request(trace="t", lane="l", prompt="p", steps=[BASE, msgspec.structs.replace(BASE, kept=1)])
    assert request.output_ids() == (7, 8, 4, 7)
