"""Folders in the cache are whole or not there, whoever dies when."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest

from lab.checkpoints import store
from lab.checkpoints.store import MARKER, Cancelled, build, is_whole
from lab.errors import LabError

SOURCE = {"kind": "test", "size": 1}


def fill(output: Path) -> None:
    (output / "sub").mkdir()
    (output / "config.json").write_text("{}")
    (output / "sub" / "model.safetensors").write_bytes(b"weights")


def make(folder: Path, how: object = fill, **more: object) -> Path:
    return build(folder, SOURCE, how, **{"need": 0, "say": lambda _text: None, **more})  # type: ignore[arg-type]


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.parent.iterdir() if path.name not in (folder.name, f".{folder.name}.lock"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "checkpoints" / "model"


def test_made_once(folder: Path) -> None:
    calls = []
    for _ in range(2):
        make(folder, lambda output: (calls.append(1), fill(output)))
    assert len(calls) == 1
    marker = json.loads((folder / MARKER).read_text())
    assert marker["source"] == SOURCE
    assert marker["files"] == {"config.json": 2, "sub/model.safetensors": 7}
    assert marker["provenance"]["versions"]["python"]
    assert leftovers(folder) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / MARKER).unlink(),
        lambda folder: (folder / MARKER).write_text("{"),
        lambda folder: (folder / MARKER).write_text("[]"),
        lambda folder: (folder / "sub" / "model.safetensors").write_bytes(b"weight"),
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / MARKER).write_text((folder / MARKER).read_text().replace('"size": 1', '"size": 2')),
        lambda folder: (folder / MARKER).write_text((folder / MARKER).read_text().replace('"version": 1', '"version": 2')),
    ],
    ids=["no marker", "half a marker", "no object", "short file", "lost file", "other source", "other version"],
)
def test_a_damaged_folder_is_made_again(folder: Path, damage: object) -> None:
    make(folder)
    damage(folder)  # type: ignore[operator]
    assert not is_whole(folder, SOURCE)
    make(folder)
    assert is_whole(folder, SOURCE)
    assert leftovers(folder) == []


def fail(error: BaseException) -> object:
    def how(output: Path) -> None:
        fill(output)
        raise error

    return how


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), LabError, "no space left"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), LabError, "no space left"),
        (PermissionError(errno.EACCES, "Permission denied"), LabError, "EACCES|Permission denied"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (Cancelled(), Cancelled, None),
    ],
)
def test_what_goes_wrong_leaves_nothing(folder: Path, error: BaseException, expected: type[BaseException], words: str | None) -> None:
    with pytest.raises(expected, match=words):
        make(folder, fail(error))
    assert not folder.exists()
    assert leftovers(folder) == []


def test_a_failed_remake_keeps_the_old_folder(folder: Path) -> None:
    make(folder)
    with pytest.raises(LabError):
        build(folder, {"kind": "newer"}, fail(OSError(errno.ENOSPC, "x")), need=0, say=print)  # type: ignore[arg-type]
    assert is_whole(folder, SOURCE)


def test_space_is_looked_at_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _path: usage(10, 5, 5_000_000))
    calls: list[Path] = []
    with pytest.raises(LabError, match=r"about 400 MB and 5 MB are free") as caught:
        make(folder, calls.append, need=400_000_000)
    assert not calls
    assert "EAGLE3_LAB_CACHE" in caught.value.todo


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(LabError, match="cannot be written"):
        make(tmp_path / "cache" / "checkpoints" / "model")


def test_two_threads_make_it_once(folder: Path) -> None:
    calls, said = [], []

    def slow(output: Path) -> None:
        calls.append(1)
        deadline = time.monotonic() + 60
        while len(said) < 2 and time.monotonic() < deadline:  # until both others have come and found it locked
            time.sleep(0.01)
        fill(output)

    threads = [threading.Thread(target=make, args=(folder, slow), kwargs={"say": said.append}) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert said == ["waiting for another process that is making model"] * 2


def test_waiting_can_be_called_off(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    with store.lock(folder.parent / ".model.lock", print):
        with pytest.raises(Cancelled):
            make(folder, cancelled=lambda: True)


def test_a_killed_process_does_not_block_or_litter(folder: Path) -> None:
    code = f"""
        import time
        from pathlib import Path
        from lab.checkpoints.store import build
        def make(output):
            (output / "half").write_text("x")
            print("half", flush=True)
            time.sleep(600)
        build(Path({str(folder)!r}), {SOURCE!r}, make, need=0, say=print)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        assert len(leftovers(folder)) == 1
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    make(folder)
    assert is_whole(folder, SOURCE)
    assert leftovers(folder) == []
