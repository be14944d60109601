"""Reading a model folder that may be broken in any way: its configuration and the headers of its weights, never the weights themselves.

Nothing here raises for bad content. What could be read is in a `Model`, what could not is in its `problems`, in words. Limits: a JSON file
of more than `MOST_JSON` bytes is not read (real ones have kilobytes), nor is a safetensors header of more than `MOST_HEADER` bytes, the
format's own limit. The one exception to "no weights" are `d2t` and `t2d`, maps of some hundred kilobytes, because a wrong map is silent.
"""

from __future__ import annotations

import contextlib
import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError, safe_open

from lab.quant.draft import INDEX, PICKLE, Header

MOST_JSON = 8 << 20
MOST_HEADER = 100_000_000
#: Bytes of a map (`d2t`, `t2d`) that are still read: twice the largest vocabulary in use, as int64.
MOST_MAP = 8 << 20
#: Nesting beyond this is an attack or a mistake; Python's own reader would give up with a RecursionError at about a thousand.
DEEPEST = 200

Kind = Literal["config", "weights"]


@dataclass(frozen=True)
class Problem:
    """One file that could not be read as what it should be: `what` is wrong, and what to do about it."""

    kind: Kind
    file: str
    what: str
    todo: str = "Fetch the file again."


@dataclass(frozen=True)
class Model:
    """A target or a draft as its files describe it. `config` is empty and `tensors` None where they are not here (or could not be read)."""

    name: str
    folder: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    #: Name to header of every tensor; None where no weights were looked at.
    tensors: Mapping[str, Header] | None = None
    #: Names of all tensors, where an index lists them (a large target's headers are not opened one by one).
    names: frozenset[str] = frozenset()
    maps: Mapping[str, np.ndarray] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    files: frozenset[str] = frozenset()
    weight_bytes: int = 0
    pickled: bool = False
    problems: tuple[Problem, ...] = ()
    #: Where a configuration comes from that stands in for files which are not here; `minimal` if it lacks keys on purpose.
    stand_in: str = ""
    minimal: bool = False

    @property
    def known(self) -> bool:
        """Whether there is a configuration to look at."""
        return bool(self.config)

    @property
    def text(self) -> Mapping[str, Any]:
        """The configuration of the language model: a multimodal one keeps it below `text_config`."""
        inner = self.config.get("text_config")
        return inner if isinstance(inner, dict) else self.config


def _depth(text: str) -> int:
    """How deep brackets nest in JSON text, strings left out."""
    deepest = now = 0
    inside = escaped = False
    for letter in text:
        if escaped:
            escaped = False
        elif letter == "\\":
            escaped = inside
        elif letter == '"':
            inside = not inside
        elif not inside and letter in "{[":
            now += 1
            deepest = max(deepest, now)
        elif not inside and letter in "}]":
            now -= 1
    return deepest


def read_json(path: Path, kind: Kind = "config") -> tuple[dict[str, Any], Problem | None]:
    """The JSON object in `path`, and what is wrong with the file if it holds none."""

    def wrong(what: str, todo: str = "Fetch the file again.") -> tuple[dict[str, Any], Problem]:
        return {}, Problem(kind, str(path), what, todo)

    try:
        state = path.stat()
        if not stat.S_ISREG(state.st_mode):
            return wrong("It is not a regular file.", "Give the folder that holds the real file.")
        if state.st_size > MOST_JSON:
            return wrong(f"It has {state.st_size / 1e6:.0f} MB; a configuration has kilobytes.", "Look at what was saved under that name.")
        raw = path.read_bytes()
    except FileNotFoundError:
        gone = path.is_symlink()
        return wrong("It is a link to a file that is gone." if gone else "It is missing.")
    except RuntimeError:  # Python 3.11 and 3.12 tell of link loops in this way
        return wrong("It is a loop of symbolic links.", "Remove the links and fetch the file again.")
    except OSError as error:
        loop = getattr(error, "errno", None) == 40
        return wrong("It is a loop of symbolic links." if loop else f"It cannot be read: {error.strerror or error}.")
    if not raw.strip(b"\0 \r\n\t"):
        return wrong(
            "It is empty." if not raw else "It holds nothing but white space or zeros: the disk was full, or a copy was cut short."
        )
    if raw.startswith(b"version https://git-lfs"):
        return wrong("It is a pointer of Git LFS, not the file.", "Run `git lfs pull`, or fetch the file from the hub.")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return wrong(f"It is not text: byte {error.start} is not UTF-8.")
    if text.lstrip()[:1] == "<":
        return wrong("It is a web page, not JSON: the download brought an error page.", "Check the address and your permission to it.")
    if _depth(text) > DEEPEST:
        return wrong(f"Its brackets nest more than {DEEPEST} deep.")
    try:
        found = json.loads(text)
    except ValueError as error:
        cut = getattr(error, "pos", 0) >= len(text.rstrip()) - 1
        return wrong(f"{'It ends too early' if cut else 'It is not JSON'}: {error}.")
    if not isinstance(found, dict):
        return wrong(f"It holds a {type(found).__name__}, not a JSON object.")
    return found, None


def _why_unreadable(path: Path, error: Exception) -> str:
    """What is wrong with a safetensors file that the library refused."""
    try:
        size = path.stat().st_size
        with path.open("rb") as handle:
            start = handle.read(512)
    except OSError as failure:
        return f"It cannot be read: {failure.strerror or failure}."
    if size < 8:
        return f"It has {size} bytes; even an empty safetensors file has more."
    if start.startswith(b"version https://git-lfs"):
        return "It is a pointer of Git LFS, not the weights: run `git lfs pull`."
    length = int.from_bytes(start[:8], "little")
    if length > MOST_HEADER or length > size - 8:
        head = "a zip archive (a pickled checkpoint?)" if start[:2] == b"PK" else "something else"
        return f"Its first 8 bytes promise a header of {length:,} bytes, but it has {size:,} in all: it is cut short, or {head}."
    if start[8:9] != b"{":
        return "Where its header should start there is no JSON: it is not a safetensors file."
    return f"Its header does not fit its content ({error}): it is cut short or was changed."


def _open(path: Path) -> tuple[dict[str, Header], dict[str, np.ndarray], Problem | None]:
    found: dict[str, Header] = {}
    maps: dict[str, np.ndarray] = {}
    try:
        if not path.is_file():
            return {}, {}, Problem("weights", str(path), "It is missing or a link that leads nowhere.")
        with safe_open(path, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118  (not a mapping)
                part = opened.get_slice(name)
                header = Header(part.get_dtype(), tuple(part.get_shape()))
                found[name] = header
                if (
                    name.split(".")[-1] in ("d2t", "t2d")
                    and header.bytes <= MOST_MAP
                    and header.dtype in ("I64", "I32", "BOOL", "U8", "F32")
                ):
                    maps[name.split(".")[-1]] = opened.get_tensor(name)
    except (SafetensorError, OSError, RuntimeError, ValueError, OverflowError, MemoryError) as error:
        return {}, {}, Problem("weights", str(path), _why_unreadable(path, error))
    return found, maps, None


def read_model(folder: Path, *, name: str = "", headers: bool = True) -> Model:
    """The model in `folder`. `headers` False leaves the weight files closed and only counts them (a large target)."""
    problems: list[Problem] = []
    label = name or str(folder)
    try:
        listed = {entry.name: entry for entry in folder.iterdir()}
    except OSError as error:
        what = "The folder is a loop of symbolic links." if error.errno == 40 else f"The folder cannot be read: {error.strerror or error}."
        return Model(label, folder, problems=(Problem("config", str(folder), what, "Check the path."),))
    config, problem = read_json(folder / "config.json")
    problems += [problem] if problem else []
    generation: dict[str, Any] = {}
    if "generation_config.json" in listed:
        generation, problem = read_json(folder / "generation_config.json")
        problems += [problem] if problem else []
    weights, names = sorted(entry for entry in listed if entry.endswith(".safetensors")), frozenset[str]()
    if INDEX in listed:
        index, problem = read_json(folder / INDEX, "weights")
        placed = index.get("weight_map")
        if problem:
            problems.append(problem)
        elif not isinstance(placed, dict) or not all(isinstance(value, str) and "/" not in value for value in placed.values()):
            problems.append(Problem("weights", str(folder / INDEX), "It has no weight_map from tensor names to file names."))
        else:
            names = frozenset(map(str, placed))
            weights = sorted(set(placed.values()))
            gone = [file for file in weights if file not in listed]
            if gone:
                said = f"{len(gone)} of {len(weights)} files that {INDEX} lists are missing, {gone[0]} for one."
                problems.append(Problem("weights", str(folder / gone[0]), said, "Fetch the missing files."))
                weights = [file for file in weights if file in listed]
    tensors: dict[str, Header] | None = None
    maps: dict[str, np.ndarray] = {}
    size = 0
    for file in weights:
        with contextlib.suppress(OSError):  # said by `_open`
            size += (folder / file).stat().st_size
        if headers:
            found, more, problem = _open(folder / file)
            tensors = {**(tensors or {}), **found} if not problem else tensors
            maps.update(more)
            problems += [problem] if problem else []
    # Headers of a part of the files say nothing about what is missing.
    if any(one.kind == "weights" for one in problems):
        tensors = None
    pickled = not weights and any(entry.endswith((".bin", ".pt", ".pth")) for entry in listed)
    if not weights and not pickled and config:
        problems.append(Problem("weights", str(folder), f"It has no weights: neither *.safetensors nor {PICKLE}.", "Fetch the weights."))
    return Model(
        label,
        folder,
        config,
        tensors,
        names or frozenset(tensors or ()),
        maps,
        generation,
        frozenset(listed),
        size,
        pickled,
        tuple(problems),
    )
