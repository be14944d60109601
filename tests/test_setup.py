"""The set-up scripts: what they repair, and the sentence for each thing that is missing."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The modules of `scripts/`, imported as the scripts import each other, and forgotten afterwards."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    names = ("machine", "packages", "setup")
    modules: dict[str, ModuleType] = {name: importlib.import_module(name) for name in names}
    yield SimpleNamespace(**modules)
    for name in names:
        sys.modules.pop(name, None)


def install(site: Path, name: str, version: str) -> Path:
    """A package as pip leaves it: two files and the list of them."""
    info = site / f"{name}-{version}.dist-info"
    (site / name).mkdir(parents=True, exist_ok=True)
    info.mkdir()
    (site / name / "__init__.py").write_text("value = 1\n", encoding="utf-8")
    (info / "METADATA").write_text(f"Name: {name}\n", encoding="utf-8")
    record = [f"{name}/__init__.py,sha256=x,10", f"{info.name}/METADATA,sha256=x,{len(name) + 7}", f"{info.name}/RECORD,,"]
    (info / "RECORD").write_text("\n".join(record), encoding="utf-8")
    return info


def test_only_what_is_absent_or_of_another_version_is_installed(scripts: SimpleNamespace, tmp_path: Path) -> None:
    install(tmp_path, "one", "1.0")
    install(tmp_path, "two_words", "1.0")
    stage = scripts.packages.Stage("some", ["one==1.0", "Two.Words==2.0", "three==1.0"])
    assert scripts.packages.missing(stage, tmp_path) == ["Two.Words==2.0", "three==1.0"]


def test_damaged_packages_are_installed_again(scripts: SimpleNamespace, tmp_path: Path) -> None:
    """Cut short before the list was written; a file gone; a file truncated; two versions at once; pip's half-removed leftovers."""
    for name in ("unlisted", "gone", "short", "double"):
        install(tmp_path, name, "1.0")
    install(tmp_path, "double", "0.9")
    (tmp_path / "unlisted-1.0.dist-info" / "RECORD").unlink()
    (tmp_path / "gone" / "__init__.py").unlink()
    (tmp_path / "short" / "__init__.py").write_text("v", encoding="utf-8")
    (tmp_path / "~ld").mkdir()
    stage = scripts.packages.Stage("some", ["unlisted==1.0", "gone==1.0", "short==1.0", "double==1.0"])
    assert scripts.packages.missing(stage, tmp_path) == stage.lines
    assert not list(tmp_path.glob("*.dist-info")), "pip would take them for installed"
    assert not (tmp_path / "~ld").exists()


def test_lock_lines_for_another_python_are_left_out(scripts: SimpleNamespace) -> None:
    old, new = (
        {line for stage in scripts.packages.read_lock("lab.lock", version) for line in stage.lines} for version in ((3, 11, 7), (3, 13, 0))
    )
    assert {line.partition("==")[0] for line in new - old} == {"audioop-lts"}
    assert not any(";" in line for line in new)


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "The disk filled up"),
        (
            "NewConnectionError('...: Failed to establish a new connection')\nERROR: No matching distribution found for torch",
            "could not reach",
        ),
        ("ERROR: No matching distribution found for torch==2.13.0+cpu", "No package index that pip knows has torch==2.13.0+cpu"),
        ("noise\nERROR: something else\nhint: more", "ERROR: something else"),
    ],
)
def test_a_failure_of_pip_is_a_sentence(scripts: SimpleNamespace, output: str, sentence: str) -> None:
    assert sentence in str(scripts.packages.explain(output.splitlines(), "the page"))


def test_no_disk_space(scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=2 << 30))
    with pytest.raises(scripts.machine.SetupError, match=r"Not enough disk space: 2\.0 GB free in .*, about 6 GB needed"):
        scripts.machine.check_space(scripts.machine.SPACE_ENGINE)


@pytest.mark.parametrize(("system", "name"), [("darwin", "macOS"), ("win32", "Windows")])
def test_other_systems_hear_what_works(scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, system: str, name: str) -> None:
    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(scripts.machine.SetupError, match=rf"this is {name}\. Replaying saved traces"):
        scripts.machine.check_platform()


def test_missing_system_library(scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(scripts.machine.ctypes, "CDLL", refuse)
    with pytest.raises(scripts.machine.SetupError, match="apt-get install libnuma1"):
        scripts.machine.check_library()


def fake_python(folder: Path, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "python3").write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    (folder / "python3").chmod(0o755)


def find(path: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = ["/bin/sh", str(SCRIPTS / "python.sh"), "-c", "print('ran')"]
    return subprocess.run(command, env={"PATH": path, **more}, capture_output=True, text=True, timeout=300)


def test_no_python_at_all(tmp_path: Path) -> None:
    result = find(str(tmp_path))
    assert result.returncode == 1
    assert "needs Python 3.11, 3.12 or 3.13; found: no Python" in result.stderr
    assert "make lab PYTHON=" in result.stderr


def test_only_an_old_python(tmp_path: Path) -> None:
    fake_python(tmp_path / "bin", 'case "$2" in *sys.exit*) exit 1;; *) echo 3.9.2;; esac')
    result = find(str(tmp_path / "bin"))
    assert result.returncode == 1
    assert "found: python3 (3.9.2)" in result.stderr


def test_a_python_without_venv(tmp_path: Path) -> None:
    fake_python(tmp_path / "bin", 'case "$2" in *ensurepip*) exit 1;; *sys.exit*) exit 0;; *) echo 3.11;; esac')
    result = find(str(tmp_path / "bin"))
    assert result.returncode == 1
    assert "apt-get install python3.11-venv" in result.stderr


def test_a_named_python_is_used() -> None:
    result = find(os.environ["PATH"], PYTHON=sys.executable)
    assert (result.returncode, result.stdout) == (0, "ran\n"), result.stderr


def test_broken_environment_is_made_again(scripts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    venv = tmp_path / ".venv"
    for module in (scripts.packages, scripts.setup):
        monkeypatch.setattr(module, "VENV", venv)
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(tmp_path / "nowhere")
    (venv / "leftover").touch()
    version = scripts.setup.ensure_venv(scripts.packages.Display())
    assert version == sys.version_info[:3]
    assert not (venv / "leftover").exists()
    before = (venv / "bin" / "python").lstat().st_mtime_ns
    assert scripts.setup.ensure_venv(scripts.packages.Display()) == version
    assert (venv / "bin" / "python").lstat().st_mtime_ns == before, "a working environment is kept"
