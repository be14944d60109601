"""How a server computes on CPU cores: settings for the cores that this process may use, whatever machine that is.

- One engine process instead of two (`VLLM_ENABLE_V1_MULTIPROCESSING=0`): half a gigabyte less, and one import of torch and vLLM less to
  wait for. The API server stays a process of its own.
- Every core computes: vLLM's own binding keeps one core back, which on two cores is half of the machine. It is switched off together with
  the split (`nobind`), so the number of threads is given here.
- Waiting threads spin for a millisecond, then sleep, where LLVM's OpenMP is found (Debian's `libomp5`, or Intel's build of it from the
  pip package `intel-openmp`): a model this small enters a parallel region every 50 microseconds, and waking a sleeping thread costs 30.
  Measured on two quiet cores, eager, 20 requests each: 66 tok/s against 40 of sleeping waiters without a draft, 109 against 70 with one;
  on overloaded cores 0.9 times as many.
- Without it they sleep at once (`OMP_WAIT_POLICY=PASSIVE`). GNU's OpenMP spins too long by default, and as soon as anything else wants a
  core (a browser, the second lane, the server's own start) each parallel region waits for a thread that is not running: two threads then
  made 1 token a second where passive ones made 36, on a machine with eight times more work than cores.
- In float32 where an x86 processor has no AVX-512 (`dtype`): oneDNN has no BF16 product for it, and vLLM's way around is so much slower
  with more than one row that speculation costs more than it saves. Measured on two cores of an AMD EPYC with AVX2, eager, tok/s in BF16 and
  in float32: baseline 12.8 and 11.8 for one request, 15.4 and 55.8 for eight; with the draft (K=3) 11.8 and 16.8, 11.8 and 35.3.
- An eager lane compiles nothing, the sampler's helpers included (`TORCHDYNAMO_DISABLE`): otherwise the first request with alternatives
  waits ten seconds for a compiler, which then must also be installed.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Sequence
from pathlib import Path

#: More threads than this were not tried; small models gain nothing from many.
MOST_THREADS = 8
EAGER = {"TORCHDYNAMO_DISABLE": "1"}


def physical_cores(allowed: set[int], topology: Path = Path("/sys/devices/system/cpu")) -> int:
    """How many physical cores the logical processors `allowed` belong to: a core's siblings share its arithmetic units."""
    cores = set()
    for processor in allowed:
        try:
            cores.add((topology / f"cpu{processor}/topology/thread_siblings_list").read_text().strip())
        except OSError:
            cores.add(str(processor))
    return len(cores)


def quota(cgroup: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Processors' worth of time that the control group (v2 or v1) gives; None for no limit."""
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            limit = (cgroup / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    return None if limit in ("max", "-1") else int(limit) / int(period)


def threads() -> int:
    """How many threads a server should compute with, on the processors that this process may use."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    limit = quota()
    cores = physical_cores(allowed)
    return max(1, min(cores, MOST_THREADS, cores if limit is None else int(limit)))


def openmp(places: Sequence[str] = (f"{sys.prefix}/lib/libiomp5.so", "/usr/lib/*/libomp.so.5", "/usr/lib*/libomp.so")) -> dict[str, str]:
    """How threads wait for each other: LLVM's OpenMP from the first of `places` (file patterns) that is there, else GNU's, asleep."""
    for place in places:
        for library in sorted(glob.glob(place)):
            preload = ":".join(part for part in (library, os.environ.get("LD_PRELOAD")) if part)
            return {"LD_PRELOAD": preload, "KMP_BLOCKTIME": "1"}
    return {"OMP_WAIT_POLICY": "PASSIVE"}


def dtype(information: Path = Path("/proc/cpuinfo")) -> str:
    """The type to compute in on this processor: bfloat16, or float32 on an x86 one that has no AVX-512."""
    try:
        with information.open(encoding="utf-8", errors="replace") as lines:  # the first processor's: the kernel makes the others on demand
            flags = next((line.split() for line in lines if line.startswith("flags")), None)
    except OSError:
        return "bfloat16"
    return "float32" if flags and "avx512f" not in flags else "bfloat16"


def environment() -> dict[str, str]:
    """The environment of every lane of a CPU recipe."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads()),
        **openmp(),
    }
