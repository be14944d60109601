"""Temporary folders: gone with their process, or with the next one where it was killed; those of the living stay."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lab import env

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what the killed left is found by its lock, which is POSIX's")
WAITING = "from lab import env; print(env.scratch_until_exit(), flush=True); input()"


def started(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    """Another process of the lab, and its temporary folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(folder)}
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_temporary_folders_go_with_their_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "eagle3-lab-0-1.sock").touch()
    (tmp_path / "eagle3-lab-somebody").mkdir()
    (tmp_path / "eagle3-lab-somebody" / "lock").touch()  # it has a lock, but not the lab's
    living, own = started(tmp_path)
    killed, left = started(tmp_path)
    killed.kill()
    killed.communicate()
    assert own.is_dir()
    assert left.is_dir()
    with env.scratch("client-") as mine:
        (mine / "file").touch()
        assert not left.exists()
        assert own.is_dir()
        with env.scratch() as other:
            assert mine.is_dir()
            assert other != mine
    assert not mine.exists()
    living.communicate("\n")
    assert not own.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eagle3-lab-0-1.sock", "eagle3-lab-somebody"]


def test_a_page_leaves_no_temporary_folder(tmp_path: Path) -> None:
    pytest.importorskip("gradio")
    made = "from lab import recipes; from lab.serving.lanes import Lanes; from lab.ui import build, engine;"
    made += "build.page(recipes.get('smollm2'), engine.Serving(Lanes()), warm=False)"
    subprocess.run([sys.executable, "-c", made], check=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert list(tmp_path.glob("eagle3-lab-*")) == []
