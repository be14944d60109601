"""Results as files: JSON with a format name, a version and provenance, written whole or not at all."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab import provenance
from lab.errors import LabError

VERSION = 1


def told_apart(names: Sequence[str]) -> list[str]:
    """The names, numbered where several are the same but for capitals: "draft (1)", "draft (2)"; no number makes a name that is taken."""
    often = Counter(name.casefold() for name in names)
    taken, made = set(often), []
    for name in names:
        if often[name.casefold()] > 1:
            name = next(one for number in itertools.count(1) if (one := f"{name} ({number})").casefold() not in taken)
            taken.add(name.casefold())
        made.append(name)
    return made


def save(path: Path, kind: str, provenance_: dict[str, Any], body: dict[str, Any], *, indent: int | None = 1) -> Path:
    """Write a result of `kind` ("acceptance", "speedup", ...) to `path` and give the path back; raises `LabError` if that fails.

    `indent` None writes one line, for results that hold token by token what happened.
    """
    content = {"format": f"eagle3-lab-{kind}", "version": VERSION, "provenance": provenance_, **body}
    try:
        provenance.write_text(path, json.dumps(content, indent=indent, ensure_ascii=False) + "\n")
    except OSError as error:
        raise LabError(
            f"The result could not be saved to {path}.",
            why=f"{error.strerror or error}.",
            todo="Free some space or choose another file with --output.",
        ) from error
    return path


def check_writable(path: Path) -> None:
    """Refuse a file that cannot be written before minutes of measuring, not after them."""
    try:
        with provenance.atomic_path(path.with_name(f".{path.name}.check")) as temporary:
            temporary.write_bytes(b"")
        path.with_name(f".{path.name}.check").unlink(missing_ok=True)
    except OSError as error:
        raise LabError(
            f"Nothing can be written to {path.parent}.", why=f"{error.strerror or error}.", todo="Choose another file."
        ) from error


def table(header: list[str], rows: list[list[str]]) -> str:
    """Plain aligned text: the first column to the left, numbers to the right."""
    every = [header, *rows]
    widths = [max(len(row[column]) for row in every) for column in range(len(header))]
    lines = []
    for row in every:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
