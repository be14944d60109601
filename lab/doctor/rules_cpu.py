"""Rules about vLLM on processors: faults of the 0.32 wheel that this project found, and how threads and memory are set."""

from __future__ import annotations

import os.path
from collections.abc import Iterator

from lab.doctor.rule import SEEN, Found, rule
from lab.doctor.subject import Subject

CPU = "platforms/cpu.py:CpuPlatform.check_and_update_config"
GIB = 1 << 30


def _fp8(s: Subject) -> str:
    """Which of target and draft is quantised to FP8; "" if none."""
    for role, config in (("draft", s.draft_view), ("target", s.target.config if s.target else {})):
        found = config.get("quantization_config")
        method = found.get("quant_method") if isinstance(found, dict) else None
        if method in ("quark", "fp8", "compressed-tensors"):
            return role
    return ""


@rule(
    "cpu-temperature",
    "warning",
    "Sampling with a draft gives noise on a CPU",
    reads="v1/sample/rejection_sampler.py:expand_batch_to_tokens",
    issues=(SEEN,),
)
def cpu_temperature(s: Subject) -> Iterator[Found]:
    """vLLM 0.32 spreads temperatures over draft tokens into a copy that it throws away on a CPU: every answer at a temperature above 0
    is noise, and so are greedy ones in the same batch. The lab's plugin repairs it.
    """
    if s.cpu and s.speculative and not s.plugin_loaded:
        yield Found(
            "a draft on a CPU, without the lab's plugin",
            "Use temperature 0 only, or let vLLM load the plugin (VLLM_PLUGINS unset, or with eagle3_lab in it).",
        )


@rule(
    "cpu-seed",
    "warning",
    "A seed in a request can end the engine on a CPU",
    reads="v1/worker/gpu_model_runner.py:GPUModelRunner",
    fields=("set_offset",),
    issues=(SEEN,),
)
def cpu_seed(s: Subject) -> Iterator[Found]:
    """A request with its own seed whose prompt is computed in chunks rewinds its generator; CPU generators cannot, and the engine dies.
    The plugin repairs it.
    """
    if s.cpu and not s.plugin_loaded and (s.line.words or s.recipe) and not s.line.has("no-enable-chunked-prefill"):
        yield Found(
            "chunked prefill on a CPU, without the lab's plugin", "--no-enable-chunked-prefill, or no seeds in requests, or the plugin"
        )


@rule(
    "cpu-compiled-cache",
    "warning",
    "A compiled engine cannot read its cache on a CPU",
    reads="compilation/decorators.py:",
    fields=("finalize_loading",),
    issues=(SEEN,),
)
def cpu_compiled_cache(s: Subject) -> Iterator[Found]:
    """vLLM 0.32 writes its compiled model on a CPU and fails to read it back ("no attribute 'finalize_loading'"), so each start
    compiles anew, a minute or more. The plugin repairs it.
    """
    if s.cpu and (s.line.words or s.recipe) and not s.line.has("enforce-eager") and not s.plugin_loaded:
        yield Found("compiled mode on a CPU, without the lab's plugin", "--enforce-eager for quick starts, or the plugin")


@rule(
    "cpu-fp8-slow",
    "warning",
    "FP8 is slow on a CPU without the lab's kernel",
    reads="model_executor/kernels/linear/scaled_mm/pytorch.py:ChannelWiseTorchFP8ScaledMMLinearKernel",
    fields=("_scaled_mm",),
    issues=(SEEN,),
)
def cpu_fp8_slow(s: Subject) -> Iterator[Found]:
    """vLLM 0.32 multiplies FP8 layers through torch._scaled_mm on a CPU: 6.4 ms where BF16 takes 0.16 (3072 x 576, one row), 18 tokens
    a second instead of 54. The plugin's kernel takes its place. In float32 vLLM by itself refuses to start a Quark checkpoint.
    """
    if s.cpu and (role := _fp8(s)) and not s.plugin_loaded:
        single = ", in float32, which vLLM refuses" if s.line.text("dtype") in ("float32", "float") else ""
        yield Found(f"the {role} is FP8, the lab's plugin is not loaded{single}", "Use the BF16 draft, or the plugin.")


@rule(
    "cpu-fp8-op",
    "warning",
    "FP8 on a CPU in half precision",
    reads="model_executor/kernels/linear/scaled_mm/cpu.py:",
    fields=("fp8_scaled_mm_cpu",),
    issues=(SEEN,),
)
def cpu_fp8_op(s: Subject) -> Iterator[Found]:
    """vLLM's fp8_scaled_mm_cpu reads E4M3's subnormal codes wrongly (code 0 as 1/128) and ends the process on float16 and on empty
    batches. The plugin's kernel avoids all three, in BF16 only.
    """
    half = s.line.text("dtype") in ("half", "float16")
    if s.cpu and (role := _fp8(s)) and (half or (s.on("VLLM_CPU_SGL_KERNEL") and not s.plugin_loaded)):
        yield Found(
            f"the {role} is FP8, --dtype {s.line.text('dtype', 'auto')}, "
            f"VLLM_CPU_SGL_KERNEL={s.environment.get('VLLM_CPU_SGL_KERNEL', 'not set')}",
            "--dtype bfloat16, and VLLM_CPU_SGL_KERNEL unset",
        )


@rule(
    "cpu-latent-rotary",
    "error",
    "Latent attention is computed wrongly on a CPU",
    reads="model_executor/layers/rotary_embedding/base.py:RotaryEmbedding",
    issues=(SEEN,),
)
def cpu_latent_rotary(s: Subject) -> Iterator[Found]:
    """vLLM 0.32's own rotary operator mis-strides MLA's queries and keys on a CPU and overwrites the latent; answers are wrong without
    an error. Eager mode selects it. Without it results equal Hugging Face's to three decimals.
    """
    operators = s.line.objects.get("compilation-config", {}).get("custom_ops")
    listed = operators if isinstance(operators, list) else []
    uses = s.line.has("enforce-eager") or "all" in listed or "+rotary_embedding" in listed
    if s.cpu and s.mla and uses and "-rotary_embedding" not in listed:
        yield Found(
            f"an MLA target on a CPU, custom_ops {listed or 'all (eager mode)'}",
            """--compilation-config '{"custom_ops": ["all", "-rotary_embedding"]}'""",
        )


@rule("cpu-threads", "warning", "Threads do not fit the cores", reads="utils/ompmultiprocessing.py:", issues=(SEEN, "v#27369"))
def cpu_threads(s: Subject) -> Iterator[Found]:
    """vLLM's automatic binding keeps one core back, which is half of two; more threads than cores (or than the container's share) make
    each parallel region wait for a thread that is not running.
    """
    if not s.cpu or s.machine.assumed or not (s.line.words or s.recipe):
        return
    room = min(s.machine.cores or 1, int(s.machine.quota) or 1) if s.machine.quota else s.machine.cores or 1
    threads, bind = s.environment.get("OMP_NUM_THREADS", ""), s.environment.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    if threads.isdigit() and int(threads) > room:
        yield Found(f"OMP_NUM_THREADS={threads}, {room} cores' worth of time", f"OMP_NUM_THREADS={room}")
    if bind == "auto" and room <= 4:
        yield Found(
            f"VLLM_CPU_OMP_THREADS_BIND is {'auto' if 'VLLM_CPU_OMP_THREADS_BIND' in s.environment else 'not set'} on {room} cores",
            f"VLLM_CPU_OMP_THREADS_BIND=0-{room - 1}, or nobind with OMP_NUM_THREADS={room}",
        )


@rule("cpu-two-openmp", "warning", "Two OpenMP runtimes", reads="", issues=("v#27369",))
def cpu_two_openmp(s: Subject) -> Iterator[Found]:
    """Two OpenMP libraries in one process keep two sets of threads, and one core is busy with waiting."""
    loaded = {os.path.basename(part).split(".so")[0] for part in s.environment.get("LD_PRELOAD", "").split(":") if part}
    both = sorted(loaded & {"libiomp5", "libomp", "libgomp"})
    if s.cpu and len(both) > 1:
        yield Found(f"LD_PRELOAD holds {' and '.join(both)}", "Keep one of them.")


@rule(
    "cpu-instructions",
    "warning",
    "The processor lacks what BF16 needs",
    reads="platforms/cpu.py:CpuPlatform.import_kernels",
    fields=("avx512",),
)
def cpu_instructions(s: Subject) -> Iterator[Found]:
    """vLLM's CPU library needs AVX2. Without AVX512-BF16 (or AMX) BF16 is widened in software: slower, and the lab's FP8 kernel then
    widens weights at loading. Without AVX-512 float32 is several times faster at more than one row, and a lane in float32 lacks nothing.
    """
    flags = s.machine.cpu_flags
    if not s.cpu or not flags or s.machine.assumed or "asimd" in flags:
        return
    if "avx2" not in flags:
        yield Found(f"{s.machine.cpu} has no AVX2", "Use another machine: vLLM's CPU wheel does not run here.", "error")
    elif not flags & {"avx512_bf16", "amx_bf16"} and s.line.text("dtype", "auto") not in ("float32", "float"):
        fix = "Expect lower speed; compare lanes on this machine only."
        yield Found(f"{s.machine.cpu} has neither AVX512-BF16 nor AMX", fix if "avx512f" in flags else f"--dtype float32. {fix}")


@rule("cpu-memory", "error", "The KV cache does not fit into memory", reads=CPU, fields=("VLLM_CPU_KVCACHE_SPACE",))
def cpu_memory(s: Subject) -> Iterator[Found]:
    """On a CPU the KV cache takes what `VLLM_CPU_KVCACHE_SPACE` (GiB) or `--kv-cache-memory-bytes` says, beside the weights and about
    1.5 GiB of libraries.
    """
    space = s.environment.get("VLLM_CPU_KVCACHE_SPACE", "")
    cache = s.line.number("kv-cache-memory-bytes") or (int(space) * GIB if space.isdigit() else 0)
    weights = (s.target.weight_bytes if s.target else 0) + (s.draft.weight_bytes if s.draft else 0)
    if s.cpu and not s.machine.assumed and s.machine.memory and cache + weights + 3 * GIB // 2 > s.machine.memory:
        yield Found(
            f"{cache / GIB:.1f} GiB of cache and {weights / GIB:.1f} GiB of weights in {s.machine.memory / GIB:.1f} GiB",
            "--kv-cache-memory-bytes 268435456",
        )


@rule("cpu-block-size", "warning", "A block size that the CPU changes", reads=CPU, fields=("block_size", "multiples of 32"))
def cpu_block_size(s: Subject) -> Iterator[Found]:
    """On a CPU vLLM overrides the block size of MLA models with 16, and is slower with other sizes than multiples of 32 elsewhere. With AMX
    it keeps what was asked for, and the lab's MLA backend gives it back.
    """
    asked = s.line.number("block-size")
    if s.cpu and asked and ((s.mla and asked != s.block_size) or (not s.mla and asked % 32 == 0 and asked > 1024)):
        yield Found(f"--block-size {asked}", "Leave --block-size out on a CPU.")
