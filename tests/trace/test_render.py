"""Chips and text of steps: marks, faithful bytes, and nothing that a browser would run."""

from __future__ import annotations

import html
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.trace import render
from lab.trace.model import Request, Step


def step(**changes: object) -> Step:
    given = {"trace": "t", "request": "r", "index": 4, "phase": "decode", "started": 0.0, "ended": 1.0}
    return Step(**{**given, **changes})  # type: ignore[arg-type]


PIECES = {1: b" a".hex(), 2: b"b".hex(), 3: b"c".hex(), 4: b"d".hex()}


def test_a_row_has_the_draft_then_the_targets_own_token() -> None:
    row = render.chips(step(draft=(1, 2, 3), draft_probs=(0.9, 0.5, 0.1), sampled=(1, 4), kept=2), PIECES, output=10)
    assert [(chip.token, chip.mark, chip.position, chip.output, chip.probability) for chip in row] == [
        (1, "accepted", 1, 10, 0.9),
        (2, "rejected", 2, None, 0.5),
        (3, "unreached", 3, None, 0.1),
        (4, "recovered", 2, 11, None),
    ]
    assert row[0].text == ("", "·", "a")


def test_bonus_plain_and_prefill() -> None:
    assert [chip.mark for chip in render.chips(step(draft=(1,), sampled=(1, 2), kept=2), PIECES)] == ["accepted", "bonus"]
    assert [chip.mark for chip in render.chips(step(sampled=(2,), kept=1), PIECES)] == ["plain"]
    assert render.chips(step(phase="prefill", scheduled=8), PIECES) == []


def test_tokens_past_a_stop_are_cut() -> None:
    row = render.chips(step(draft=(1, 2), sampled=(1, 2, 3), kept=1, finish="stop"), PIECES, output=5)
    assert [(chip.mark, chip.output, chip.cut) for chip in row] == [("accepted", 5, False), ("accepted", None, True), ("bonus", None, True)]


@pytest.mark.parametrize(
    ("piece", "run"),
    [
        (b" the", ("", "·", "the")),
        ("·".encode(), ("·",)),
        (b"\n\n", ("", "↵↵")),
        (b"\t", ("", "⇥")),
        (b"\r", ("", "␍")),
        (b"\x00\x1b\x7f", ("", "␀␛␡")),
        ("\x85".encode(), ("", "[U+0085]")),
        ("é".encode(), ("é",)),
        ("🦅".encode()[:2], ("", "<0xF0><0x9F>")),
        ("🦅".encode()[2:], ("", "<0xA6><0x85>")),
        (b"a\xffb", ("a", "<0xFF>", "b")),
        ("\u202e\u2066x\u2069".encode(), ("", "[U+202E][U+2066]", "x", "[U+2069]")),
        ("\u200b\u00a0\ufeff".encode(), ("", "[U+200B][U+00A0][U+FEFF]")),
        ("\u2028".encode(), ("", "[U+2028]")),
        (b"", ("",)),
    ],
)
def test_what_one_token_is(piece: bytes, run: tuple[str, ...]) -> None:
    assert render.chip_text(piece) == run


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_a_chip_never_hides_a_byte_or_turns_text_around(piece: bytes) -> None:
    run = render.chip_text(piece)
    shown = "".join(run)
    assert not re.search("[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]", shown)
    assert bool(shown) == bool(piece)
    assert all(run[1:]), "signs and text alternate without gaps"


def test_a_character_appears_with_the_token_that_completes_it() -> None:
    eagle = "🦅".encode()
    pieces = {1: eagle[:1].hex(), 2: eagle[1:3].hex(), 3: eagle[3:].hex(), 4: b"<|im_end|>".hex()}
    answer = render.Answer()
    first = answer.feed(step(draft=(1, 2), sampled=(1, 2, 3), kept=3), pieces)
    assert [token.text for token in first] == [("",), ("",), ("🦅",)]
    (last,) = answer.feed(step(index=5, sampled=(4,), kept=1), pieces)
    assert last.text == ("", "<|im_end|>")
    assert last.output == 3


def test_an_unknown_token_shows_its_number() -> None:
    assert render.chips(step(sampled=(77,), kept=1), {})[0].text == ("[77]",)


HOSTILE = [
    b"<script>alert(1)</script>",
    b'"><img src=x onerror=alert(1)>',
    b"${alert(1)}",
    b"{{x}}",
    b"&lt;b&gt;",
    "\u202e".encode(),
    b"</style>",
]


@pytest.mark.parametrize("piece", HOSTILE)
def test_html_is_inert(piece: bytes) -> None:
    request = Request(trace="t", lane="l", prompt="p", steps=[step(draft=(1,), sampled=(1, 1), kept=2)], pieces={1: piece.hex()})
    made = render.steps_html(request)
    body = made.split("</style>", 1)[1]
    tags = set(re.findall(r"</?([a-zA-Z]+)", body))
    assert tags <= {"div", "span", "bdi", "i"}
    assert "\u202e" not in made
    text = html.unescape(re.sub(r"<[^>]*>", "", body))
    assert "".join(render.chip_text(piece)) in text
    assert 'data-token="1"' in body
    assert 'data-mark="bonus"' in body


def test_html_of_some_steps_only() -> None:
    steps = [step(index=n, sampled=(2,), kept=1) for n in range(4)]
    made = render.steps_html(Request(trace="t", lane="l", prompt="p", steps=steps, pieces=PIECES), first=1, last=3)
    assert re.findall(r'data-step="(\d)"', made) == ["1", "2"]
