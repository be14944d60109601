"""Folders in the cache that are either whole or not there: built beside their place, marked, then renamed.

A finished folder holds `eagle3-lab.json`: what it was made from, provenance, and the size of every file. A folder without that marker, or
with a file of another size, was interrupted or damaged, and is made again. A lock file keeps two processes (or threads) from building the
same folder at once; the second one waits and then finds it finished.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.errors import disk_error, disk_full
from lab.provenance import collect

MARKER = "eagle3-lab.json"
FORMAT = "eagle3-lab-checkpoint"
VERSION = 1

Say = Callable[[str], None]


class Cancelled(Exception):
    """The person who asked for a checkpoint no longer wants it."""


def check_cancelled(cancelled: Callable[[], bool] | None) -> None:
    """Raise `Cancelled` if it is."""
    if cancelled is not None and cancelled():
        raise Cancelled


def is_whole(folder: Path, source: Mapping[str, Any]) -> bool:
    """Whether `folder` was finished, was made from `source`, and still holds every file at its size (contents are not read)."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    if (
        not isinstance(marker, dict)
        or marker.get("format") != FORMAT
        or marker.get("version") != VERSION
        or marker.get("source") != dict(source)
    ):
        return False
    files = marker.get("files")
    if not isinstance(files, dict) or not files:
        return False
    try:
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except OSError:
        return False


def _sizes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}


@contextmanager
def lock(path: Path, say: Say, cancelled: Callable[[], bool] | None = None) -> Iterator[None]:
    """Hold the lock file `path`; waits for another holder, and says so. The kernel frees it when its holder dies."""
    import fcntl  # not on Windows, where nothing is made, but recordings are opened

    with path.open("w") as handle:
        told = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    say(f"waiting for another process that is making {path.stem.lstrip('.')}")
                    told = True
                check_cancelled(cancelled)
                time.sleep(0.2)
        yield


def _replace(folder: Path, finished: Path) -> None:
    """Put `finished` in the place of `folder`, which may exist."""
    if folder.exists() or folder.is_symlink():
        old = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.old-"))
        os.rename(folder, old / "old")
        os.rename(finished, folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        os.rename(finished, folder)


def build(
    folder: Path,
    source: Mapping[str, Any],
    make: Callable[[Path], None],
    *,
    need: int,
    say: Say,
    cancelled: Callable[[], bool] | None = None,
) -> Path:
    """`folder`, made by `make(temporary folder)` unless it is whole already.

    `source` identifies what it is made from; `need` is the space in bytes that must be free. Raises `LabError` where the cache cannot be
    written or is full, and whatever `make` raises; the temporary folder is removed in every case, leftovers of killed processes too.
    """
    if is_whole(folder, source):
        return folder
    parent = folder.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with lock(parent / f".{folder.name}.lock", say, cancelled):
            if is_whole(folder, source):
                return folder
            for leftover in (*parent.glob(f".{folder.name}.tmp-*"), *parent.glob(f".{folder.name}.old-*")):
                shutil.rmtree(leftover, ignore_errors=True)
            free = shutil.disk_usage(parent).free
            if free < need:
                raise disk_full(folder, need, free)
            temporary = Path(tempfile.mkdtemp(dir=parent, prefix=f".{folder.name}.tmp-"))
            try:
                temporary.chmod(0o755)
                make(temporary)
                files = _sizes(temporary)
                marker = {"format": FORMAT, "version": VERSION, "source": dict(source), "files": files, "provenance": collect()}
                (temporary / MARKER).write_text(json.dumps(marker, indent=1), encoding="utf-8")
                _replace(folder, temporary)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise disk_error(error, folder) from error
    return folder
