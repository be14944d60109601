"""Trace files: what is saved is loaded, and every broken file is refused in words."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.errors import LabError
from lab.trace import io
from lab.trace.model import Alternative, Request, Step, Trace


def step(index: int, **changes: object) -> Step:
    """A verify step that accepts one of two draft tokens."""
    given = {"trace": "t", "request": "r", "index": index, "phase": "decode", "started": 1.0, "ended": 1.5}
    given |= {"draft": (5, 6), "draft_probs": (0.5, 0.25), "sampled": (5, 9), "kept": 2}
    return Step(**{**given, **changes})  # type: ignore[arg-type]


def trace() -> Trace:
    request = Request(
        trace="t",
        lane="smollm2/bf16/k2/eager/traced",
        prompt="héllo\u2028\n<script>",
        steps=[step(0), step(1, finish="stop")],
        pieces={5: b"a".hex(), 6: "\u202e".encode().hex(), 9: b"\xf0\x9f".hex()},
        alternatives=[[Alternative(text="a", logprob=-0.1, id=5)]],
        text="x",
        settings={"k": 2, "temperature": 0.0},
    )
    return Trace(
        provenance={"recipe": "smollm2", "versions": {"vllm": "0.32.0"}}, requests=[request, Request(trace="u", lane="none", prompt="p")]
    )


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = io.save(trace(), tmp_path / "folder" / "a.jsonl")
    assert io.load(path) == trace()
    lines = path.read_bytes().splitlines()
    assert len(lines) == 3
    assert json.loads(lines[0])["provenance"]["recipe"] == "smollm2"
    assert list(path.parent.iterdir()) == [path]


def test_vllms_padding_of_a_draft_is_loaded() -> None:
    padded = step(0, draft=(-1, -1), draft_probs=None, sampled=(9,), kept=1)
    one = Trace(provenance={}, requests=[Request(trace="t", lane="l", prompt="p", steps=[padded, step(1)])])
    assert io.loads(io.dumps(one)) == one


def test_saving_where_one_may_not_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(LabError, match="could not be saved"):
        io.save(trace(), tmp_path / "file" / "a.jsonl")


def content(change: object = None, line: int = 1) -> bytes:
    """The sample with `change(record)` applied to one of its lines."""
    lines = io.dumps(trace()).splitlines()
    if callable(change):
        record = json.loads(lines[line])
        change(record)
        lines[line] = json.dumps(record).encode()
    return b"\n".join(lines) + b"\n"


CASES = {
    "empty": (b"", "is empty"),
    "white space": (b" \n\n", "is empty"),
    "text": (b"hello\n", "Line 1 is not JSON"),
    "elf": (b"\x7fELF\x02\x01\x01" + bytes(64), "Line 1 is not JSON"),
    "gzip": (b"\x1f\x8b\x08\x00abc\n", "Line 1 is not JSON"),
    "csv": (b"a,b\n1,2\n", "is not a trace"),
    "a list": (b"[1]\n", 'Line 1 does not say "format"'),
    "foreign": (b'{"format": "other", "version": 1}\n', 'Line 1 does not say "format"'),
    "openai log": (b'{"messages": []}\n{"messages": []}\n', 'Line 1 does not say "format"'),
    "newer": (content(lambda r: r.update(version=2), 0), "newer Eagle3 Lab: format version 2"),
    "version as text": (content(lambda r: r.update(version="1"), 0), "no format version"),
    "version true": (content(lambda r: r.update(version=True), 0), "no format version|damaged first line"),
    "no provenance": (content(lambda r: r.pop("provenance"), 0), "damaged first line"),
    "requests lost at a line's end": (b"\n".join(content().split(b"\n")[:2]) + b"\n", "cut off: its first line announces 2"),
    "too many": (content() + content().split(b"\n")[1] + b"\n", "longer than it says"),
    "cut in a line": (content()[:-30], "cut off in line 3"),
    "damaged line": (content().replace(b'"steps":[', b'"steps":[,', 1), "damaged in line 2"),
    "not UTF-8": (content().replace(b"smollm2/bf16", b"\xff\xfe", 1), "in line 2"),
    "blank line": (content().replace(b"\n", b"\n\n", 1), "in line 2"),
    "wrong type": (content(lambda r: r.update(steps=3)), "contradicts the trace format in line 2.*steps"),
    "unknown phase": (content(lambda r: r["steps"][0].update(phase="dream")), "contradicts.*line 2"),
    "probabilities": (content(lambda r: r["steps"][1].update(draft_probs=[0.5])), "step 1 has 2 draft tokens and 1 probabilities"),
    "negative id": (content(lambda r: r["steps"][0].update(draft=[-1, 6], sampled=[-1, 9])), "negative token id"),
    "another negative id": (content(lambda r: r["steps"][0].update(draft=[-2, 6], sampled=[9], kept=1)), "negative token id"),
    "several without a draft": (
        content(lambda r: r["steps"][0].update(draft=[], draft_probs=None, sampled=[7, 9])),
        "samples 2 tokens from 0",
    ),
    "accepts what was not proposed": (content(lambda r: r["steps"][0].update(sampled=[7, 9])), "accepts tokens that its draft did not"),
    "too many sampled": (content(lambda r: r["steps"][0].update(sampled=[5, 6, 7, 8])), "samples 4 tokens from 2"),
    "kept": (content(lambda r: r["steps"][0].update(kept=3)), "keeps 3 of 2"),
    "order": (content(lambda r: r["steps"].reverse()), "step 0 comes after step 1"),
    "bytes": (content(lambda r: r["pieces"].update({"5": "zz"})), "token 5 are not hexadecimal"),
    "odd bytes": (content(lambda r: r["pieces"].update({"5": "abc"})), "not hexadecimal"),
    "deep": (b"[" * 100_000 + b"\n", "not JSON|not a trace"),
    "deep request": (content().split(b"\n")[0] + b"\n" + b'{"trace":' + b"[" * 100_000 + b"\n", "line 2"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_broken_file_is_refused_in_words(name: str) -> None:
    data, words = CASES[name]
    with pytest.raises(LabError, match=words) as caught:
        io.loads(data, name="a.jsonl")
    assert caught.value.what.startswith("a.jsonl")
    assert len(str(caught.value)) < 600


def test_missing_folder_and_huge_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LabError, match="not a file"):
        io.load(tmp_path / "absent.jsonl")
    with pytest.raises(LabError, match="not a file"):
        io.load(tmp_path)
    path = io.save(trace(), tmp_path / "a.jsonl")
    monkeypatch.setattr(io, "MAX_BYTES", 100)
    with pytest.raises(LabError, match="too large"):
        io.load(path)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 12))
def test_damage_is_noticed_or_harmless(seed: int, count: int) -> None:
    """Whatever happens to the bytes: a trace that holds, or a `LabError`; nothing else."""
    chance = random.Random(seed)
    data = bytearray(io.dumps(trace()))
    for _ in range(count):
        place = chance.randrange(len(data) or 1)
        kind = chance.randrange(4)
        if kind == 0:
            data[place : place + 1] = bytes([chance.randrange(256)])
        elif kind == 1:
            del data[place : place + chance.randrange(1, 40)]
        elif kind == 2:
            data[place:place] = chance.choice(
                [b'"', b"{", b"]", b"\n", b"-1", b"1e999", b"null", b"\x00", b"\\u0000", b"99999999999999999999"]
            )
        else:
            data = data[: max(place, 1)]
    try:
        found = io.loads(bytes(data))
    except LabError:
        return
    assert io.loads(io.dumps(found)) == found


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    with pytest.raises(LabError):
        io.loads(data)
