"""Held-out prompts: the fixed files that the lab ships, and other files of the same or of Spec-Bench's form.

A file is JSON lines. Ours: `{"id", "kind", "prompt"}`, and `"context"` (tokens) where the prompt is long. Spec-Bench's:
`{"question_id", "category", "turns": [...]}`, of which the first turn is asked. The draft's training never sees these files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from lab import env
from lab.bench.result import told_apart
from lab.errors import LabError

#: The kinds of short prompts that the lab ships, one file each, and the file of long ones.
KINDS = ("chat", "maths", "code")
LONG = "long"


@dataclass(frozen=True)
class Prompt:
    """One prompt. `context` is the context length in tokens that a long prompt was made for (prompt and 128 new tokens); else None."""

    id: str
    kind: str
    text: str
    context: int | None = None


@dataclass(frozen=True)
class PromptFile:
    """A file's name, its SHA-256 (hex) and its prompts in order."""

    name: str
    sha256: str
    prompts: tuple[Prompt, ...]


def _parse(row: Any) -> Prompt:
    """A prompt from one decoded line; raises `ValueError` saying what is missing."""
    if not isinstance(row, dict):
        raise ValueError("is not a JSON object")
    if "prompt" in row:
        text, kind, name = row["prompt"], row.get("kind", "prompts"), row.get("id")
    elif "turns" in row:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns:
            raise ValueError('has no text in "turns"')
        text, kind, name = turns[0], row.get("category", "prompts"), row.get("question_id")
    else:
        raise ValueError('has neither "prompt" nor "turns"')
    if not isinstance(text, str) or not text.strip():
        raise ValueError("has an empty prompt")
    context = row.get("context")
    if context is not None and (type(context) is not int or context < 1):
        raise ValueError('has a "context" that is not a number of tokens')
    return Prompt("" if name is None else str(name), str(kind), text, context)


def loads(data: bytes, name: str) -> PromptFile:
    """Parse a file's content; `name` is what errors call it. Raises `LabError` with the line that is wrong."""
    found: list[Prompt] = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            prompt = _parse(json.loads(line))
        except ValueError as error:  # JSON's and UnicodeDecodeError are kinds of ValueError
            foreign = isinstance(error, (json.JSONDecodeError, UnicodeDecodeError))
            raise LabError(
                f"{name} is not a file of prompts.",
                why=f"Line {number}: {error}." if foreign else f"Line {number} {error}.",
                todo='Each line must be JSON such as {"id": "a", "kind": "chat", "prompt": "..."} or {"question_id": 1, "turns": ["..."]}.',
            ) from error
        found.append(prompt if prompt.id else Prompt(f"line-{number}", prompt.kind, prompt.text, prompt.context))
    if not found:
        raise LabError(f"{name} holds no prompts.", todo="Choose another file.")
    names = [prompt.id for prompt in found]
    if len({*names}) < len(names):
        again = next(one for one in names if names.count(one) > 1)
        raise LabError(f"{name} uses the id '{again}' twice.", todo="Give every prompt an id of its own.")
    return PromptFile(name, hashlib.sha256(data).hexdigest(), tuple(found))


def load(path: Path | Traversable) -> PromptFile:
    """Read a file of prompts, or raise the `LabError` that says what is wrong with it."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LabError(f"The prompts in {path.name} cannot be read.", why=f"{error.strerror or error}.") from error
    return loads(data, path.name)


def shipped(kind: str) -> PromptFile:
    """One of the lab's own files: `chat`, `maths`, `code` or `long`."""
    if kind not in (*KINDS, LONG):
        raise LabError(f"There are no prompts of the kind '{kind}'.", todo=f"Choose from {', '.join((*KINDS, LONG))}.")
    return load(env.assets() / "prompts" / f"{kind}.jsonl")


def gather(kinds: Sequence[str], files: Sequence[Path] = ()) -> list[PromptFile]:
    """The shipped files of `kinds`, or `files` instead where any are given. Ids are made unique over files by the file's name."""
    if not files:
        return [shipped(kind) for kind in kinds]
    loaded = [load(path) for path in files]
    if len(loaded) == 1:
        return loaded
    renamed = []
    for one, name in zip(loaded, told_apart([Path(one.name).stem for one in loaded]), strict=True):
        prompts = tuple(Prompt(f"{name}/{p.id}", p.kind, p.text, p.context) for p in one.prompts)
        renamed.append(PromptFile(one.name, one.sha256, prompts))
    return renamed
