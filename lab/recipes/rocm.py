"""What recipes for AMD Instinct share: where the settings come from, and the two that depend on the machine at hand.

* `HIP_VISIBLE_DEVICES` follows `ROCR_VISIBLE_DEVICES` where a scheduler (Slurm) sets only the latter: vLLM looks at the former.
* `HSA_NO_SCRATCH_RECLAIM=1` where the GPU's MEC firmware is older than 177: RCCL cannot reclaim its scratch memory there, and vLLM crashes.
  The amdgpu driver tells the version in sysfs; where it does not (a container without /sys/class/drm), a note says what to look at.

Both are published by InferenceX in its MI355X scripts. Nothing here starts a program or needs ROCm.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from lab.recipes.model import Recipe

INFERENCEX = "https://github.com/SemiAnalysisAI/InferenceX"
#: Scripts by a commit that holds them.
SCRIPTS = f"{INFERENCEX}/blob/8eec0d4ed58b1a7ab659bc8b4038ffddf3452ea2/benchmarks/single_node/fixed_seq_len"
KIMI_BF16 = f"{INFERENCEX}/pull/1116"
KIMI_FP8 = f"{INFERENCEX}/pull/1439"
EAGLE3_SWEEPS = f"{INFERENCEX}/pull/1234 and {INFERENCEX}/pull/1515"
BLOG = (
    "AMD ROCm blog, 3 July 2026: Accelerating Large-Scale LLM Inference on AMD Instinct MI350X/MI355X with Eagle3 and AMD Quark"
    " (https://rocm.blogs.amd.com)"
)
VLLM_RECIPES = "https://github.com/vllm-project/recipes/blob/main/models"

#: MEC firmware from which on RCCL's scratch memory is reclaimed.
MEC_FIXED = 177
FIRMWARE_NOTE = (
    "If `rocm-smi --showfw` reports MEC firmware older than 177, add HSA_NO_SCRATCH_RECLAIM=1 (serve does so where the driver tells the"
    " version): RCCL cannot reclaim its memory there."
)
MXFP4_NOTE = "An image without AMD Quark needs `pip install amd-quark` for MXFP4 weights (vLLM issue 35633)."


def mec_firmware(drm: Path = Path("/sys/class/drm")) -> int | None:
    """The oldest MEC firmware version among this machine's AMD GPUs; None where the driver tells none."""
    found = []
    for file in drm.glob("card*/device/fw_version/mec_fw_version"):
        try:
            found.append(int(file.read_text().strip(), 0))
        except (OSError, ValueError):
            continue
    return min(found, default=None)


def environment(drm: Path = Path("/sys/class/drm")) -> dict[str, str]:
    """The environment of every lane of an AMD Instinct recipe, on this machine."""
    found = {"VLLM_ROCM_USE_AITER": "1"}
    visible = os.environ.get("ROCR_VISIBLE_DEVICES")
    if visible:
        found["HIP_VISIBLE_DEVICES"] = visible
    firmware = mec_firmware(drm)
    if firmware is not None and firmware < MEC_FIXED:
        found["HSA_NO_SCRATCH_RECLAIM"] = "1"
    return found


def at_1k(recipe: Recipe) -> Recipe:
    """The recipe with the shape in which all of these were measured: 1,024 tokens in and out, 256 to spare, compiled, async scheduling."""
    return replace(recipe, isl=1024, osl=1024, headroom=256, max_model_len=2304, compiled=True, async_scheduling=True)


SOURCES = {
    "VLLM_ROCM_USE_AITER": f"{SCRIPTS}/kimik2.5_fp4_mi355x.sh",
    "HIP_VISIBLE_DEVICES": f"{SCRIPTS}/kimik2.5_fp4_mi355x.sh, where ROCR_VISIBLE_DEVICES is set",
    "HSA_NO_SCRATCH_RECLAIM": f"{SCRIPTS}/kimik2.5_fp4_mi355x.sh, on MEC firmware older than {MEC_FIXED}",
}
