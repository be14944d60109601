"""The folder for a GPU machine without a network: what is left out of a wheel, and parts that become the folder again."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.test_bundle import SCRIPTS, wheel


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module("gpu_wheels")
    for name in ("gpu_wheels", "bundle", "machine", "packages"):
        sys.modules.pop(name, None)


def test_what_is_there_is_read_from_freeze_and_from_lists(script: ModuleType) -> None:
    assert script.names("torch==2.11.0+cu130\nhuggingface_hub @ file:///x\n# no\nPyYAML==6\n") == {"torch", "huggingface-hub", "pyyaml"}
    assert script.names("numpy, py-cpuinfo") == {"numpy", "py-cpuinfo"}


def test_a_thinned_wheel_still_installs(script: ModuleType, tmp_path: Path) -> None:
    made = wheel(tmp_path, "engine", "1.0")
    with zipfile.ZipFile(made, "a") as archive:
        archive.writestr("engine_extra/big.so", b"x" * 4096)
    assert script.thin(made, ["engine_extra/*"]) > 0
    with zipfile.ZipFile(made) as archive:
        assert "engine_extra/big.so" not in archive.namelist()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(tmp_path / "site"), str(made)]
    subprocess.run(pip, check=True, capture_output=True)
    assert (tmp_path / "site" / "engine.py").read_text() == "value = 7\n"


def test_parts_become_the_folder_again(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[tuple[str, ...]] = []

    def pip(*words: str) -> None:
        fetched.append(words)
        wheel(Path(words[words.index("-d") + 1]), "vllm", "0.26.0")

    monkeypatch.setattr(script, "resolve", lambda *_: {"vllm": "0.26.0", "torch": "2.11.0", "torchvision": "0.26.0", "pydantic": "2.0"})
    monkeypatch.setattr(script, "pip", pip)
    monkeypatch.setattr(script, "build", lambda target: wheel(target, "eagle3_lab", "9.9"))
    monkeypatch.setenv("EAGLE3_LAB_CACHE", str(tmp_path / "cache"))
    draft = tmp_path / "cache" / "checkpoints" / script.DRAFT
    draft.mkdir(parents=True)
    (draft / "config.json").write_text("{}")
    have = tmp_path / "there.txt"
    have.write_text("torch==2.11.0\n")
    options: dict[str, Any] = {
        "engine": "vllm==0.26.0",
        "python": "3.12",
        "without": ["pydantic"],
        "also": [],
        "drop": [],
        "all": False,
        "parts": 0,
    }
    folder = tmp_path / "gpu"
    script.collect(argparse.Namespace(folder=folder, have=have, **options))
    lines = [word for word in fetched[0] if "==" in word]
    assert lines == ["vllm==0.26.0", script.TARGET], "what is there, is left out, or is never imported is not fetched"
    parts = script.split(folder, 2000)
    assert len(parts) > 1
    assert max(part.stat().st_size for part in parts) <= 2000
    again = tmp_path / "again"
    subprocess.run(["sh", str(folder / "parts" / "join.sh"), str(again)], check=True, capture_output=True)
    installed = {"PYTHON": sys.executable, "EAGLE3_LAB_CACHE": str(tmp_path / "there"), "PATH": "/usr/bin:/bin"}
    subprocess.run(["sh", str(again / "install.sh")], check=True, capture_output=True, env=installed)
    assert (again / "site" / "vllm.py").exists()
    assert (tmp_path / "there" / "checkpoints" / script.DRAFT / "config.json").exists()
    parts[0].write_bytes(b"broken")
    assert subprocess.run(["sh", str(folder / "parts" / "join.sh"), str(tmp_path / "no")], capture_output=True, check=False).returncode == 1
