"""A small process between the app and a server, so that no engine outlives the app: `python -I -S guard.py GRACE SOCKET -- COMMAND...`.

It leads a process group that the server and the server's own children belong to. When the app closes the pipe on the guard's standard
input, or dies in whatever way (the kernel then closes the pipe, and the guard gets another parent), the guard asks the group to end
(SIGTERM), and kills what is left after GRACE seconds. When the server ends by itself, what it left behind (vLLM's EngineCore can survive
its API server) is ended too, and the guard exits with the server's exit code. When the guard itself is killed, the kernel sends SIGTERM to
the server (parent-death signal: reliable here, because the guard has one thread); the app, if alive, kills the group; and a deputy that the
guard forked kills it after GRACE seconds, because a server that is still loading may not heed SIGTERM. SOCKET is a file to remove at the
end, or "-".

Standard library only and no site packages: about 10 MB, four wake-ups a second. Limit: a child that makes a session of its own is not in
the group; vLLM's do not.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

POLL = 0.25  # seconds between looks at the server and the parent
LEFTOVERS = 1.0  # seconds that children get once the server is gone
PR_SET_PDEATHSIG = 1


def _die_with_guard() -> None:
    """In the child, before it becomes the server: ask the kernel for SIGTERM when the guard dies."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def members(group: int) -> list[int]:
    """Ids of the living processes of a process group (zombies left out)."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as handle:
                    state, _parent, its_group = handle.read().rpartition(")")[2].split()[:3]
            except OSError:
                continue  # it ended meanwhile
            if int(its_group) == group and state not in "ZX":
                found.append(int(name))
    return found


def _finish(group: int, socket: str) -> None:
    """Kill every other process of the group, and remove the socket that a killed server leaves behind."""
    while others := [pid for pid in members(group) if pid != os.getpid()]:
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    if socket != "-":
        with contextlib.suppress(FileNotFoundError):
            os.unlink(socket)


def _deputy(group: int, grace: float, socket: str) -> None:
    """Fork a process that waits for the guard's end, and does then what the guard can no longer do."""
    end, alive = os.pipe()  # `alive` is closed by the guard's end alone: it is not inherited by the server
    if os.fork() > 0:
        os.close(end)
        return
    os.setsid()
    os.close(alive)
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):  # neither the app's pipe nor the server's log, whose lock says that somebody still writes it
        os.dup2(nothing, standard)
    os.read(end, 1)
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and members(group):
        time.sleep(0.1)
    _finish(group, socket)
    os._exit(0)


def main(argv: list[str]) -> int:
    """Run the command after `--`, guard it, and give its exit code (128 + signal where a signal ended it)."""
    grace, socket, command = float(argv[1]), argv[2], argv[4:]
    if os.getpgrp() != os.getpid():
        os.setsid()
    parent, group = os.getppid(), os.getpgrp()
    _deputy(group, grace, socket)
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: asked.append(received))
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_guard)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    while server.poll() is None and not asked and os.getppid() == parent:
        if select.select([0], [], [], POLL)[0] and not os.read(0, 64):
            break
    deadline = time.monotonic() + (grace if server.poll() is None else LEFTOVERS)
    os.killpg(group, signal.SIGTERM)
    while time.monotonic() < deadline and (server.poll() is None or len(members(group)) > 1):
        time.sleep(0.05)
    _finish(group, socket)
    code = server.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv))
