"""Fakes of the engine for the fast tests, and one real recipe for those marked `engine`."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from lab import recipes
from lab.recipes.model import Asset, Checkpoint, Recipe
from lab.serving import guard, process
from lab.serving.process import Server

SCRIPT = Path(__file__).with_name("fake_engine.py")


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fake_engine", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EAGLE3_LAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def fake_launcher(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001 - logs go to the test's own cache
    """Every server that the lab starts is the fake engine."""
    monkeypatch.setattr(process, "launcher", lambda: (sys.executable, str(SCRIPT)))


@pytest.fixture
def fake() -> Iterator[object]:
    """The fake engine inside the test's process, serving."""
    server = _load().Fake()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def local_recipe(tmp_path: Path) -> Callable[..., Recipe]:
    """A recipe whose checkpoints are folders that exist, with the given environment for the fake engine."""
    for name in ("target", "draft"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"")

    def make(name: str = "smollm2", **environment: str) -> Recipe:
        return dataclasses.replace(
            recipes.get("smollm2"),
            name=name,
            target=Checkpoint("target", Asset(str(tmp_path / "target"))),
            drafts={"bf16": Checkpoint("draft", Asset(str(tmp_path / "draft")))},
            environment=environment,
            memory_bytes=100 << 20,
        )

    return make


@pytest.fixture
def gone() -> Callable[..., bool]:
    """Whether every process of a group (or of a server's group) ends within some seconds."""

    def check(group: int | Server, seconds: float = 10.0) -> bool:
        if isinstance(group, Server):
            assert group._guard is not None
            group = group._guard.pid
        deadline = time.monotonic() + seconds
        while guard.members(group):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    return check
