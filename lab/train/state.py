"""What a run keeps in its working folder: whole files only, of one run and one target, and one sentence where that cannot be.

`keep` writes and `reading` reads; `same_run` and `same_target` refuse a folder that holds something else. A file is made in memory first:
the libraries that write to a path themselves (torch, safetensors) tell of a full disk by errors of their own, which are no `OSError`.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile

import torch
from safetensors import SafetensorError

from lab import provenance
from lab.errors import LabError, disk_error

#: What a person can do beside freeing space, where the disk of a run's folder is full.
ELSEWHERE = "name a folder on another disk with --work"
#: Files that say which target a working folder belongs to: for the draft's corpora and runs, and for the conversion's texts and healing.
DRAFT_TARGET, MLA_TARGET = "draft-target.json", "mla-target.json"
#: What json, numpy, zipfile, torch and safetensors raise for a file that is cut off or holds something else, and what its use then raises.
DAMAGE = (EOFError, LookupError, RuntimeError, TypeError, ValueError, UnpicklingError, BadZipFile, zlib.error, SafetensorError)


def keep(path: Path, content: bytes | memoryview) -> None:
    """Write a file whole or not at all; raises `LabError` for a disk that does not take it."""
    try:
        with provenance.atomic_path(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise disk_error(error, path, instead=ELSEWHERE) from error


def keep_state(path: Path, state: dict[str, Any]) -> None:
    """Save what a run goes on from; raises as `keep`."""
    content = io.BytesIO()
    torch.save(state, content)
    keep(path, content.getbuffer())


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Read a run's file, and take over what it holds: an error that a damaged file makes becomes the `LabError` that names it."""
    try:
        yield
    except torch.OutOfMemoryError:  # a `RuntimeError`, but not the file's fault
        raise
    except DAMAGE as error:
        first = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")  # torch goes on with advice that does not fit
        why = f"{type(error).__name__}: {first}." if first else f"{type(error).__name__}."
        todo = "Delete it and run the command that wrote it again: only what it held is made anew."
        raise LabError(f"{path} is damaged.", why=why, todo=todo) from error


def another(folder: Path, holds: str, todo: str = "Choose another folder") -> LabError:
    """The sentence for a folder that is another run's."""
    return LabError(f"{folder} holds {holds}.", todo=f"{todo}, or delete this one to start again.")


def same_run(path: Path, run: dict[str, Any], other: str, todo: str = "Choose another folder") -> None:
    """Keep what identifies a run in `path`; raises `LabError`, which says that its folder holds `other`, if another is there."""
    if not path.exists():
        return keep(path, json.dumps(run).encode())
    with reading(path):
        found = json.loads(path.read_text())
    if found != run:
        raise another(path.parent, other, todo)
    return None


def same_target(path: Path, target: Path, other: str) -> None:
    """As `same_run`, for the checkpoint in the folder `target`. A folder that says nothing yet becomes this target's."""
    same_run(path, {"sha256": provenance.sha256(target / "model.safetensors")}, f"{other} of another target", "Name another with --work")
