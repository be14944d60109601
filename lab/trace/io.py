"""Traces as files: versioned JSON lines with provenance, written atomically, read with suspicion.

The first line is a header (`format`, `version`, `provenance`, and how many requests follow, so that a file cut at a line's end is noticed
too); every further line is one `Request`. A file that is not such a trace, is newer than this reader, or contradicts itself is refused
with a `LabError` that says which line is wrong and how. Limit: a trace is read whole, so its size is bounded by `MAX_BYTES`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from lab.errors import LabError
from lab.provenance import atomic_path
from lab.trace.model import FORMAT, VERSION, Request, Step, Trace

#: The largest file that is read, in bytes: a step is about 400 bytes, so this is well over 100,000 steps.
MAX_BYTES = 64 << 20
SUFFIX = ".jsonl"

_HEX = re.compile(r"(?:[0-9a-fA-F]{2})*")


class _Header(msgspec.Struct, kw_only=True):
    format: str
    version: int
    provenance: dict[str, Any]
    requests: int


def dumps(trace: Trace) -> bytes:
    """The file's content: one header line, then one line a request, each ended by a newline."""
    header = _Header(format=trace.format, version=trace.version, provenance=trace.provenance, requests=len(trace.requests))
    lines = [msgspec.json.encode(header), *(msgspec.json.encode(request) for request in trace.requests)]
    return b"\n".join(lines) + b"\n"


def save(trace: Trace, path: Path | str) -> Path:
    """Write `trace` to `path` (folders are made, an old file is replaced in one move) and give the path back.

    Raises `LabError` where the disk is full or the folder may not be written.
    """
    path = Path(path)
    try:
        with atomic_path(path) as temporary:
            temporary.write_bytes(dumps(trace))
    except OSError as error:
        raise LabError(
            f"The trace could not be saved to {path}.",
            why=f"{error.strerror or error}.",
            todo="Free some space or choose another folder; nothing was written.",
        ) from error
    return path


def load(path: Path | str) -> Trace:
    """Read a trace file, or raise the `LabError` that says what is wrong with it and on which line."""
    path = Path(path)
    try:
        if not path.is_file():
            raise LabError(f"{path.name} is not a file that can be opened.", todo="Choose a trace saved by Eagle3 Lab (.jsonl).")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise LabError(
                f"{path.name} is too large to open: {size / (1 << 20):.0f} MiB, and the limit is {MAX_BYTES >> 20} MiB.",
                todo="Save fewer requests in one trace.",
            )
        data = path.read_bytes()
    except OSError as error:
        raise LabError(f"{path.name} could not be read.", why=f"{error.strerror or error}.") from error
    return loads(data, name=path.name)


def loads(data: bytes, *, name: str = "The trace") -> Trace:
    """Parse the content of a trace file; `name` is what error messages call it."""
    if not data.strip():
        raise LabError(f"{name} is empty.", todo="Choose a trace saved by Eagle3 Lab (.jsonl).")
    lines = data.split(b"\n")
    whole = lines[-1] == b""
    if whole:
        lines.pop()
    header = _header(lines[0], name)
    requests: list[Request] = []
    for number, line in enumerate(lines[1:], start=2):
        cut = not whole and number == len(lines)
        requests.append(_request(line, number, name, cut=cut))
    if len(requests) != header.requests:
        kind = "cut off" if len(requests) < header.requests else "longer than it says"
        raise LabError(
            f"{name} is {kind}: its first line announces {header.requests} request(s), and {len(requests)} follow.",
            todo="Save or copy the trace again.",
        )
    return Trace(provenance=header.provenance, requests=requests, format=header.format, version=header.version)


def _header(line: bytes, name: str) -> _Header:
    todo = "Choose a trace saved by Eagle3 Lab (.jsonl)."
    try:
        raw = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise LabError(f"{name} is not a trace of Eagle3 Lab.", why=f"Line 1 is not JSON ({_short(error)}).", todo=todo) from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise LabError(f"{name} is not a trace of Eagle3 Lab.", why=f'Line 1 does not say "format": "{FORMAT}".', todo=todo)
    version = raw.get("version")
    if type(version) is int and version > VERSION:
        raise LabError(
            f"{name} was written by a newer Eagle3 Lab: format version {version}, and this one reads up to {VERSION}.",
            todo="Update Eagle3 Lab and open it again.",
        )
    if version != VERSION:
        raise LabError(f"{name} has no format version that this Eagle3 Lab knows.", why=f'Line 1 says "version": {str(version)[:40]}.')
    try:
        return msgspec.convert(raw, _Header)
    except msgspec.ValidationError as error:
        raise LabError(f"{name} has a damaged first line.", why=f"{_short(error)}.", todo="Save or copy the trace again.") from error


def _request(line: bytes, number: int, name: str, *, cut: bool) -> Request:
    try:
        request = msgspec.json.decode(line, type=Request)
        _check(request)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, ValueError) as error:
        if cut:
            what = f"{name} is cut off in line {number}."
        elif isinstance(error, msgspec.ValidationError) or not isinstance(error, msgspec.DecodeError):
            what = f"{name} contradicts the trace format in line {number}."
        else:
            what = f"{name} is damaged in line {number}."
        raise LabError(what, why=f"{_short(error)}.", todo="Save or copy the trace again.") from error
    return request


def _check(request: Request) -> None:
    """Raise `ValueError` where a request contradicts itself, so that nobody downstream has to wonder."""
    for token, piece in request.pieces.items():
        if not _HEX.fullmatch(piece):
            raise ValueError(f"the bytes of token {token} are not hexadecimal")
    last = -1
    for step in request.steps:
        if step.index <= last:
            raise ValueError(f"step {step.index} comes after step {last}")
        last = step.index
        _check_step(step)


def _check_step(step: Step) -> None:
    where = f"step {step.index}"
    if min((*(token for token in step.draft if token != -1), *step.sampled), default=0) < 0:  # -1 in a draft is vLLM's padding
        raise ValueError(f"{where} has a negative token id")
    if step.draft_probs is not None and len(step.draft_probs) != len(step.draft):
        raise ValueError(f"{where} has {len(step.draft)} draft tokens and {len(step.draft_probs)} probabilities")
    if len(step.sampled) > len(step.draft) + 1:
        raise ValueError(f"{where} samples {len(step.sampled)} tokens from {len(step.draft)} draft tokens")
    if step.draft and step.sampled[: step.accepted] != step.draft[: step.accepted]:
        raise ValueError(f"{where} accepts tokens that its draft did not propose")
    if min(step.verify_s or 0, step.accept_s or 0, step.draft_s or 0) < 0:
        raise ValueError(f"{where} has a part that took less than no time")
    if step.withheld and step.draft:
        raise ValueError(f"{where} both withholds and verifies its draft")
    if not 0 <= step.kept <= len(step.sampled):
        raise ValueError(f"{where} keeps {step.kept} of {len(step.sampled)} tokens")


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"
