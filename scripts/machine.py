"""What this machine must have before anything is installed, each failure as a plain sentence."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Bytes to have free before installing the engine (environment, downloads on their way, checkpoints), and before anything smaller.
SPACE_ENGINE, SPACE_OTHER = 6 << 30, 1 << 30


class SetupError(Exception):
    """A sentence or two for the person at the terminal: what is missing and what to do."""


def check_platform() -> None:
    """Refuse, with what works instead, a system for which the engine has no wheel."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        name = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, f"{sys.platform} on {platform.machine()}")
        pip = r".venv\Scripts\pip" if os.name == "nt" else ".venv/bin/pip"
        raise SetupError(
            f"The engine that `make lab` installs runs on Linux (x86-64 or ARM64); this is {name}. Replaying saved traces, "
            f"the charts and attaching to a server elsewhere work here: python3 -m venv .venv, then {pip} install . "
            "and `eagle3-lab --help` in that environment."
        )
    libc, version = platform.libc_ver()
    if libc != "glibc" or tuple(int(part) for part in version.split(".")[:2]) < (2, 28):
        raise SetupError(f"The engine's packages need glibc 2.28 or newer; this system has {libc or 'another C library'} {version}.")
    if platform.machine() == "x86_64" and "avx2" not in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace"):
        raise SetupError("The engine needs a processor with AVX2, which this one does not report.")


def check_library() -> None:
    """vLLM's CPU library links libnuma, which is a system package."""
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        raise SetupError(
            "The engine needs the system library libnuma. Install it and run this again: sudo apt-get install libnuma1 "
            "(Debian, Ubuntu) or sudo dnf install numactl-libs (Fedora, RHEL)."
        ) from None


def check_space(need: int) -> None:
    """Refuse to start filling a disk that is too small."""
    for folder, wanted in ((ROOT, need), (Path(tempfile.gettempdir()), min(need, SPACE_OTHER))):
        free = shutil.disk_usage(folder).free
        if free < wanted:
            raise SetupError(
                f"Not enough disk space: {free / 2**30:.1f} GB free in {folder}, about {wanted / 2**30:.0f} GB needed. "
                + (
                    "Free some and run this again."
                    if folder == ROOT
                    else "Free some, or point TMPDIR at a larger disk, and run this again."
                )
            )
