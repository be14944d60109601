"""The client's process when it misbehaves: whatever it does, its measurement ends with a reason, and the next one has a whole client."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.bench import client
from lab.errors import LabError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the guard is for Linux")

#: The first client of a folder does what it is told there; every other one answers.
SCRIPT = """
import os, pathlib, select, socket, sys, time
told = pathlib.Path(__file__).with_name("told")
what = told.read_text() if told.exists() else "answer"
with told.with_name("keys").open("a") as file:
    print(os.environ.get("OPENAI_API_KEY"), file=file)
told.unlink(missing_ok=True)
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[2])
if what == "answer":
    while connection.recv(65536):
        connection.sendall(b'{"code": 0}\\n')
elif what == "half":
    connection.recv(65536)
    connection.sendall(b'{"co')
    os._exit(7)
elif what == "hang up":
    connection.recv(65536)
    connection.close()
    time.sleep(600)
elif what == "reset":
    select.select([connection], [], [])
    connection.close()  # with something unread, so that the other side has an error, not an end
    time.sleep(600)
"""
Asked = Callable[..., list[str]]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What becomes of two measurements by one worker, whose first client does as told: "" or the reason."""
    script = tmp_path / "client.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(client, "program", lambda: (sys.executable, str(script)))
    monkeypatch.setattr(client, "LAST", 0.5)

    async def measure(worker: client.Worker) -> str:
        try:
            await worker.run(["--word"], os.environ, tmp_path / "log")
        except LabError as error:
            return str(error)
        return ""

    async def both() -> list[str]:
        async with client.Worker() as worker:
            return [await measure(worker) for _ in range(2)]

    def ask(what: str) -> list[str]:
        (tmp_path / "told").write_text(what)
        return asyncio.run(asyncio.wait_for(both(), 120))

    return ask


@pytest.mark.parametrize("what", ["half", "hang up", "reset"])
def test_a_client_that_breaks_off_is_replaced(asked: Asked, what: str) -> None:
    first, second = asked(what)
    assert "vLLM's benchmark client failed (exit code " in first
    assert second == ""


@pytest.mark.usefixtures("asked")
def test_another_environment_is_another_client(tmp_path: Path) -> None:
    """A key, for instance: a client that is there keeps the one that it was started with."""

    async def three() -> None:
        async with client.Worker() as worker:
            for key in ("one", "one", "two"):
                await worker.run(["--word"], {**os.environ, "OPENAI_API_KEY": key}, tmp_path / "log")

    asyncio.run(asyncio.wait_for(three(), 120))
    assert (tmp_path / "keys").read_text().split() == ["one", "two"]


def test_a_long_name_of_the_temporary_folder_is_no_obstacle(asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket's path has at most 107 characters."""
    long = tmp_path / ("long" * 30)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert asked("answer") == ["", ""]
