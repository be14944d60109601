"""Running a module of this package in a process of its own, which ends with this one however this one ends.

The child's output, Quark's log above all, is read line by line and kept out of the terminal. Lines that begin with `MARK` are progress.
The child holds the other end of a pipe; when this process dies, even by SIGKILL, the pipe closes and the child ends itself.
"""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

#: Begins a line of progress; a character that logs do not use.
MARK = "\x1e"
TAIL_LINES = 25


def say(text: str) -> None:
    """In the child: report progress to the parent."""
    print(f"{MARK}{text}", flush=True)


def end_with_parent() -> None:
    """In the child: end this process and what it started as soon as the parent is gone."""

    def watch() -> None:
        while os.read(0, 1):  # not sys.stdin, whose lock would be held when the interpreter shuts down
            pass
        if os.getpgid(0) == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def termination_as_exit() -> Iterator[None]:
    """In the main thread: let SIGTERM and SIGHUP unwind the stack, so that temporary folders are removed, as Ctrl-C does already."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(module: str, *arguments: str, on_progress: Callable[[str], None]) -> tuple[int, str]:
    """Run `python -m module arguments`: its exit code and the last lines of its output. Whatever is raised meanwhile ends the child."""
    root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],  # -P: a folder `lab` or `vllm` where the person happens to be is not meant
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false"},
        start_new_session=True,
    )
    tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith(MARK):
                on_progress(line[1:].rstrip())
            else:
                tail.append(line)
        return process.wait(), "".join(tail)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
