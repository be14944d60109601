"""Server processes, with a fake engine: they get ready, fail with reasons, and are never left behind."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from lab.errors import LabError
from lab.recipes.model import Hub, Recipe
from lab.serving import guard, process
from lab.serving.command import Lane
from lab.serving.process import Server, StartCancelled, start_lane

pytestmark = [pytest.mark.usefixtures("fake_launcher"), pytest.mark.skipif(sys.platform != "linux", reason="serving is for Linux")]
Gone = Callable[..., bool]
Make = Callable[..., Recipe]


def start(recipe: Recipe, *, traced: bool = False, **more: object) -> Server:
    return start_lane(Lane(recipe, traced=traced), target="t", draft=None, **more)  # type: ignore[arg-type]


def test_a_server_gets_ready_and_leaves_nothing(local_recipe: Make, gone: Gone, tmp_path: Path) -> None:
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        (tmp_path / "said").touch()  # it answers only once its loading was told, however seldom the log is looked at

    server = start(local_recipe(FAKE_UNTIL=str(tmp_path / "said")), say=say, timeout=60.0)
    with server:
        assert said[0] == "fake engine is loading"
        assert server.exit_code() is None
        assert server.memory() > 1 << 20
        assert server.log is not None
        assert "vllm serve t" in server.log.read_text().splitlines()[0]
    assert gone(server, 0.0)
    server.stop()  # again


def test_closing_the_pipe_is_enough(local_recipe: Make, gone: Gone) -> None:
    server = start(local_recipe())
    assert server._guard is not None
    assert server._guard.stdin is not None
    server._guard.stdin.close()
    assert gone(server, 60.0)


def test_what_ignores_sigterm_is_killed(local_recipe: Make, gone: Gone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "GRACE", 0.5)
    server = start(local_recipe(FAKE_STUBBORN="1", FAKE_CHILD="1"))
    server.stop()
    assert gone(server, 0.0)


@pytest.mark.parametrize("killed", [False, True], ids=["stop", "guard killed"])
def test_the_socket_of_the_tracer_is_removed(local_recipe: Make, gone: Gone, killed: bool) -> None:
    server = start(local_recipe(), traced=True)
    path = Path(server.command.environment["EAGLE3_LAB_TRACE_SOCKET"].removeprefix("ipc://"))
    path.touch()  # as a server that is killed leaves it
    assert server._guard is not None
    if killed:
        os.kill(server._guard.pid, signal.SIGKILL)
    server.stop()
    assert gone(server, 0.0)
    deadline = time.monotonic() + 60
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not path.exists()


def test_a_server_that_fails_to_start_says_why(local_recipe: Make, gone: Gone) -> None:
    seen: list[Server] = []
    with pytest.raises(LabError) as caught:
        start(local_recipe(FAKE_FAIL="ValueError: no such layer", FAKE_CHILD="1"), on_server=seen.append)
    assert "exit code 1" in caught.value.what
    assert caught.value.why.startswith("ValueError: no such layer\n")
    assert "fake engine is loading" in caught.value.why
    assert str(seen[0].log) in caught.value.todo
    assert gone(seen[0], 0.0)


def test_a_server_that_never_answers(local_recipe: Make, gone: Gone) -> None:
    seen: list[Server] = []
    with pytest.raises(LabError, match="did not answer within 1 s"):
        start(local_recipe(FAKE_START="60"), timeout=1.0, on_server=seen.append)
    assert gone(seen[0], 0.0)


@pytest.mark.parametrize(("hub", "limit"), [(False, process.READY_TIMEOUT), (True, process.FETCH_TIMEOUT)])
def test_weights_that_vllm_fetches_itself_have_time(local_recipe: Make, monkeypatch: pytest.MonkeyPatch, hub: bool, limit: float) -> None:
    recipe, seen = local_recipe(), list[Server]()
    if hub:
        recipe = replace(recipe, target=replace(recipe.target, weights=Hub("somebody/something-large")))
    monkeypatch.setattr(Server, "start", lambda _self: None)
    monkeypatch.setattr(Server, "wait_ready", lambda *_: None)
    start(recipe, on_server=seen.append)
    assert seen[0].timeout == limit


def test_a_start_can_be_called_off(local_recipe: Make, gone: Gone) -> None:
    seen: list[Server] = []
    began = time.monotonic()
    with pytest.raises(StartCancelled):
        start(local_recipe(FAKE_START="60"), on_server=seen.append, cancelled=lambda: time.monotonic() > began + 0.5)
    assert gone(seen[0], 0.0)


def test_what_a_dead_server_left_behind_is_ended(local_recipe: Make, gone: Gone) -> None:
    """vLLM's EngineCore can survive its API server."""
    server = start(local_recipe(FAKE_CHILD="1"))
    assert server.log is not None
    pid = int(server.log.read_text().rsplit("pid ", 1)[1].split()[0])
    os.kill(pid, signal.SIGKILL)
    assert gone(server, 60.0)
    assert server.exit_code() == 128 + signal.SIGKILL


def test_the_app_notices_that_the_guard_was_killed(local_recipe: Make, gone: Gone) -> None:
    server = start(local_recipe(FAKE_STUBBORN="1", FAKE_CHILD="1"))
    assert server._guard is not None
    os.kill(server._guard.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while server.exit_code() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.exit_code() is not None
    assert gone(server, 2.0)


APP = """
    import os, sys, time
    from lab.serving.command import Command
    from lab.serving.process import Server, free_port
    port = free_port()
    argv = (sys.executable, {script!r}, "--port", str(port), "--served-model-name", "smollm2")
    server = Server(Command(argv, {environment!r}), port=port, name="x", model="smollm2")
    server.start(); server.wait_ready()
    if {fork!r} and os.fork() == 0:
        os.close(1)
        time.sleep(20)  # this one holds the pipe to the guard as well
        os._exit(0)
    print(server._guard.pid, flush=True)
    time.sleep(600)
"""


def app_code(environment: dict[str, str], *, fork: bool = False) -> str:
    script = str(Path(__file__).with_name("fake_engine.py"))
    return textwrap.dedent(APP.format(script=script, environment=environment, fork=fork))


def test_an_app_that_is_killed_while_a_fork_of_it_lives(gone: Gone) -> None:
    with subprocess.Popen([sys.executable, "-c", app_code({}, fork=True)], stdout=subprocess.PIPE, text=True) as app:
        assert app.stdout is not None
        group = int(app.stdout.readline())
        app.send_signal(signal.SIGKILL)
        assert gone(group, 15.0)


@pytest.mark.parametrize("guard_too", [False, True])
@pytest.mark.parametrize("environment", [{}, {"FAKE_STUBBORN": "1", "FAKE_CHILD": "1"}], ids=["polite", "stubborn"])
def test_nothing_outlives_an_app_that_is_killed(environment: dict[str, str], guard_too: bool, gone: Gone) -> None:
    with subprocess.Popen([sys.executable, "-c", app_code(environment)], stdout=subprocess.PIPE, text=True) as app:
        assert app.stdout is not None
        group = int(app.stdout.readline())
        assert len(guard.members(group)) >= 2
        if guard_too:
            os.kill(group, signal.SIGSTOP)  # so that it cannot act before it is killed
        app.send_signal(signal.SIGKILL)
        if guard_too:
            os.kill(group, signal.SIGKILL)
        assert gone(group, 60.0)


def test_a_port_that_is_lost_in_the_race_is_replaced(local_recipe: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken, free = other.getsockname()[1], process.free_port()
        ports = iter([taken, free])
        monkeypatch.setattr(process, "free_port", lambda _host: next(ports))
        with start(local_recipe()) as server:
            assert server.port == free


def test_a_named_port_in_use_is_said(local_recipe: Make) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(LabError, match=f"Port {port} is in use"):
            start(local_recipe(), port=port)


def test_another_program_on_the_port_is_not_taken_for_the_engine(local_recipe: Make, fake: object) -> None:
    """It answers /health, but does not serve our model."""
    server = Server(process.command(Lane(local_recipe()), target="t", draft=None, port=1), port=1, name="x", model="other")
    import httpx

    with httpx.Client(base_url=fake.url) as client:  # type: ignore[attr-defined]
        assert not server._answers(client)
        server.model = "smollm2"
        assert server._answers(client)


def test_a_cache_that_cannot_be_written(local_recipe: Make, cache: Path) -> None:
    cache.write_text("a file, not a folder")
    with pytest.raises(LabError, match="logs cannot be written"):
        start(local_recipe())


def test_old_logs_are_thrown_away(local_recipe: Make, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "KEEP_LOGS", 3)
    (cache / "logs").mkdir(parents=True)
    for number in range(5):
        (cache / "logs" / f"{number}.log").touch()
        os.utime(cache / "logs" / f"{number}.log", (number, number))
    with start(local_recipe()):
        assert len(list((cache / "logs").iterdir())) == 3
        assert (cache / "logs" / "4.log").exists()


def test_nobody_holds_the_log_but_the_servers_own_group(local_recipe: Make) -> None:
    """Whoever holds it holds its lock: the guard's deputy, which outlives the group for a moment, would keep a log that is over."""

    def holders(log: Path) -> set[int]:
        found = set()
        for path in Path("/proc").glob("[0-9]*/fd/*"):
            with contextlib.suppress(OSError):
                if os.readlink(path) == str(log):
                    found.add(int(path.parts[2]))
        return found

    with start(local_recipe()) as server:
        assert server.log is not None
        assert server._guard is not None
        deadline = time.monotonic() + 60
        while holders(server.log) - set(guard.members(server._guard.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert server._guard.pid in holders(server.log)
        assert holders(server.log) <= set(guard.members(server._guard.pid))


def test_servers_that_start_at_once_tidy_the_same_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each meets logs that another has just thrown away, as two processes with one cache do."""
    monkeypatch.setattr(process, "KEEP_LOGS", 2)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(process._log_file, ["a"] * 200))
    assert len(set(paths)) == 200
    assert len(list((cache / "logs").iterdir())) < 20


def test_an_old_log_that_cannot_be_removed_stops_no_start(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "KEEP_LOGS", 1)
    (cache / "logs" / "a-folder.log").mkdir(parents=True)
    assert process._log_file("new").exists()
    assert (cache / "logs" / "a-folder.log").exists()


@pytest.mark.usefixtures("cache")
def test_the_log_of_a_server_that_lives_is_kept(local_recipe: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "KEEP_LOGS", 1)
    with start(local_recipe()) as server:
        assert server.log is not None
        os.utime(server.log, (0, 0))  # it had nothing to say for long
        newer = process._log_file("newer")
        assert server.log.exists()
        assert newer.exists()
    process._log_file("newest")
    assert not server.log.exists()
    assert not newer.exists()


def test_no_port_is_free_on_a_kernel_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ipv4(socket.socket):
        def __init__(self, family: int) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family)

    monkeypatch.setattr(socket, "socket", Ipv4)
    assert process.port_is_free(0)
    assert not process.port_is_free(0, "::1")


def test_an_engine_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(LabError, match=r"eagle3-lab\[cpu\]"):
        process.launcher()


def test_a_full_disk_is_said(local_recipe: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_log_file", lambda _name: Path("/dev/full"))
    with pytest.raises(LabError, match="could not be started") as caught:
        start(local_recipe())
    assert caught.value.why == "No space left on device."
