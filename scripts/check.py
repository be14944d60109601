"""Run every check of the project, whatever the others say, and report them all: what `make test` does after the set-up.

pytest comes last, so that its summary is what one sees; the exit status is 0 only when every check passed. Tests that start no engine wait
more than they compute, so two processes share them; an engine takes every core, so those tests run one by one. Arguments go to pytest,
which then runs once.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

CHECKS = (
    ("ruff check", ["ruff", "check", "."]),
    ("ruff format", ["ruff", "format", "--check", "."]),
    ("mypy", ["mypy"]),
    ("mypy, scripts", ["mypy", "app.py", "scripts/setup.py", "scripts/lock.py", "scripts/check.py", "scripts/notebooks.py"]),
    ("import rules", ["lint-imports"]),
)
SLOWEST = ("--durations=15", "--durations-min=10")
TESTS = (
    ("pytest, no engine", ["pytest", "-m", "not engine", "-n", "2", "--dist", "loadfile", "--timeout", "600", *SLOWEST]),
    ("pytest, engines", ["pytest", "-m", "engine", *SLOWEST]),
)


def main(arguments: list[str]) -> int:
    """Run the checks in order. 0 when all passed, 1 otherwise, 130 when interrupted."""
    results: list[tuple[str, int, float]] = []
    tests = (("pytest", ["pytest", *arguments]),) if arguments else TESTS
    for name, command in (*CHECKS, *tests):
        print(f"\n── {name} ".ljust(80, "─"), flush=True)
        started = time.monotonic()
        program, *rest = command
        try:
            status = subprocess.run([str(BIN / program), *rest], cwd=ROOT).returncode
        except KeyboardInterrupt:
            print(f"\nInterrupted in {name}.", file=sys.stderr)
            return 130
        results.append((name, status, time.monotonic() - started))
    print()
    for name, status, seconds in results:
        print(f"{'passed' if status == 0 else f'FAILED ({status})'}: {name} ({seconds:.0f} s)")
    return int(any(status for _, status, _ in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
