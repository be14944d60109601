"""Every EAGLE3_LAB_* setting, read when it is called (never at import), and where files live.

`SETTINGS` is the table that the documentation and its test are made from.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

SETTINGS = {
    "EAGLE3_LAB_ATTACH": "Servers that run elsewhere: `bf16=URL baseline=URL`, or the path of a TOML or JSON file (docs/attach.md).",
    "EAGLE3_LAB_CACHE": "Folder for checkpoints, logs and saved traces (default: $XDG_CACHE_HOME/eagle3-lab or ~/.cache/eagle3-lab).",
    "EAGLE3_LAB_CPU_MLA": "Set by the recipe of an MLA target on a CPU: 1 loads the attention backend that its Eagle3 draft needs.",
    "EAGLE3_LAB_CPU_SPEED": "0 leaves speculation on a CPU to vLLM's own methods, without the plugin's cheaper equal ones (default: 1).",
    "EAGLE3_LAB_LANES": "Set by `make notebooks` for its kernels: where the process that keeps their engines listens, and its key.",
    "EAGLE3_LAB_PASSWORD": "A password that attendees of `eagle3-lab workshop` must type (default: none; `--password` asks for one).",
    "EAGLE3_LAB_TRACE_SOCKET": "Set by the lab for each server: the ipc:// address on which the plugin's tracer publishes steps.",
}
#: In every temporary folder, locked as long as its process lives: no other name, for a folder with such a file is one to remove.
LOCK = "eagle3-lab-scratch.lock"


def cache_dir() -> Path:
    """The cache folder; it need not exist yet."""
    named = os.environ.get("EAGLE3_LAB_CACHE")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "eagle3-lab"


def listed(folder: Path, pattern: str) -> list[tuple[Path, os.stat_result]]:
    """The files that match, with their state, by name. The cache is shared: what another process takes away meanwhile is left out."""
    found = []
    for path in sorted(folder.glob(pattern)):
        with contextlib.suppress(FileNotFoundError):
            found.append((path, path.stat()))
    return found


def socket_folder() -> str:
    """The folder for temporary sockets, or for folders of them: a socket's path has at most 107 characters."""
    return tempfile.gettempdir() if len(tempfile.gettempdir()) <= 60 else "/tmp"


@contextlib.contextmanager
def scratch(kind: str = "", folder: str | None = None) -> Iterator[Path]:
    """A temporary folder, in `folder`, gone with the block. Those that killed processes left there go first: whoever lives holds its own
    one's lock."""
    try:
        import fcntl
    except ImportError:  # Windows: nothing is locked there, so nothing of others is removed
        fcntl = None  # type: ignore[assignment]
    for old in Path(folder or tempfile.gettempdir()).glob("eagle3-lab-*") if fcntl else ():
        with contextlib.suppress(OSError), (old / LOCK).open("rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(old, ignore_errors=True)
    made = tempfile.TemporaryDirectory(dir=folder, prefix=f"eagle3-lab-{kind}", ignore_cleanup_errors=True)
    with made as name, Path(name, "new").open("wb") as lock:
        if fcntl:
            with contextlib.suppress(OSError):  # a file system without locks: then nobody can take it for left behind, either
                fcntl.flock(lock, fcntl.LOCK_EX)
                Path(name, "new").rename(Path(name, LOCK))  # it has this name only once it is locked
        yield Path(name)


def scratch_until_exit() -> Path:
    """A temporary folder that is gone when this process ends."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(scratch())


def trace_socket() -> str | None:
    """The ipc:// address of this server's tracer, or None where the lab did not start the server."""
    return os.environ.get("EAGLE3_LAB_TRACE_SOCKET") or None


def shared_lanes() -> str | None:
    """Where the process that keeps this kernel's engines listens, or None where the kernel keeps its own."""
    return os.environ.get("EAGLE3_LAB_LANES") or None


def workshop_password() -> str | None:
    """The password that attendees of a workshop must type, or None where there is none."""
    return os.environ.get("EAGLE3_LAB_PASSWORD") or None


def attach() -> str | None:
    """The servers that the operator names for `--attach`, or None."""
    return os.environ.get("EAGLE3_LAB_ATTACH") or None


def cpu_speed() -> bool:
    """Whether the plugin may replace methods of vLLM by cheaper equal ones on a CPU."""
    return os.environ.get("EAGLE3_LAB_CPU_SPEED", "1") != "0"


def cpu_mla() -> bool:
    """Whether the plugin brings its MLA attention backend for CPUs."""
    return os.environ.get("EAGLE3_LAB_CPU_MLA") == "1"


def assets() -> Traversable:
    """The data folder `assets/`: inside the installed wheel, or at the top of a checkout."""
    packaged = resources.files("lab") / "_assets"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parent.parent / "assets"
