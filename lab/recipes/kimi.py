"""Kimi-K2.5 with its Eagle3 drafts, as published for AMD Instinct: MXFP4 on MI355X and MI350X, the INT4 original on MI300X and MI325X.

The target's attention is MLA, the drafts of the MXFP4 recipe are Llama-like. Both share a KV-cache group, so `--block-size` is left out
beside such a draft (vLLM then takes a size that both kernels accept), while the baseline uses 1. The INT4 recipe's draft is MLA itself.
"""

from __future__ import annotations

from lab.recipes import rocm
from lab.recipes.model import Checkpoint, Hub, Recipe, Rule

_MI355X = f"{rocm.SCRIPTS}/kimik2.5_fp4_mi355x.sh"
_MI325X = f"{rocm.SCRIPTS}/kimik2.5_int4_mi325x.sh"
_GUIDE = f"{rocm.VLLM_RECIPES}/moonshotai/Kimi-K2.5.yaml"


def kimi_k25() -> Recipe:
    """amd/Kimi-K2.5-MXFP4 on MI355X or MI350X: no draft, the BF16 draft (K=4), or AMD Quark's FP8 of it (K=6)."""
    return rocm.at_1k(
        Recipe(
            name="kimi-k2.5",
            title="Kimi-K2.5 (MXFP4) on AMD Instinct MI355X",
            target=Checkpoint("kimi-k2.5-mxfp4", Hub("amd/Kimi-K2.5-MXFP4")),
            drafts={
                "bf16": Checkpoint("kimi-k2.5-eagle3", Hub("lightseekorg/kimi-k2.5-eagle3")),
                "fp8": Checkpoint("kimi-k2.5-eagle3-fp8", Hub("amd/kimi-k2.5-eagle3-fp8")),
            },
            k=4,
            draft_k={"fp8": 6},
            tp=(4, 8),
            expert_parallel=False,
            hardware=("MI355X", "MI350X"),
            flags=(
                ("--gpu-memory-utilization", "0.90"),
                ("--no-enable-prefix-caching", None),
                ("--trust-remote-code", None),
                ("--mm-encoder-tp-mode", "data"),
            ),
            rules=(
                Rule(_MI355X, drafts=("none",), flags=(("--block-size", "1"),)),
                Rule(
                    f"{rocm.KIMI_BF16} and {rocm.EAGLE3_SWEEPS}",
                    isl_from=8192,
                    flags=(("--long-prefill-token-threshold", "8192"), ("--max-num-batched-tokens", "16384")),
                ),
                Rule(
                    f"{_MI355X}: accuracy. The later {_GUIDE} measured none lost (GSM8K) and leaves it on.",
                    tp_below=8,
                    environment={"VLLM_ROCM_USE_AITER_RMSNORM": "0"},
                ),
                Rule(f"{rocm.KIMI_FP8}", drafts=("fp8",), environment={"VLLM_ROCM_USE_AITER_FP4_ASM_GEMM": "1"}),
            ),
            environment={**rocm.environment(), "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "INT4"},
            speculative={"draft_tensor_parallel_size": 1},
            notes=(
                "Published with vllm/vllm-openai-rocm:v0.24.0 (BF16 draft) and a nightly of commit fb1ac806 (FP8 draft).",
                rocm.MXFP4_NOTE,
                rocm.FIRMWARE_NOTE,
            ),
            sources={
                **rocm.SOURCES,
                "target": "https://huggingface.co/amd/Kimi-K2.5-MXFP4",
                "drafts.bf16": "https://huggingface.co/lightseekorg/kimi-k2.5-eagle3",
                "drafts.fp8": "https://huggingface.co/amd/kimi-k2.5-eagle3-fp8 (ptpc_fp8; fc and lm_head not quantised)",
                "k": f"{rocm.KIMI_BF16}; the K of the published sweeps is not stated",
                "draft_k.fp8": f"{rocm.KIMI_FP8} and {rocm.EAGLE3_SWEEPS}; the K of the published sweeps is not stated",
                "tp": f"{rocm.BLOG}: TP 4 published; {_GUIDE}: TP 8",
                "expert_parallel": f"{_MI355X}: --enable-expert-parallel where EP is above 1",
                "hardware": rocm.BLOG,
                "max_model_len": f"{rocm.BLOG}: ISL + OSL + 256 at 1K/1K",
                "--gpu-memory-utilization": _MI355X,
                "--no-enable-prefix-caching": _MI355X,
                "--trust-remote-code": _MI355X,
                "--mm-encoder-tp-mode": _MI355X,
                "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": _MI355X,
                "draft_tensor_parallel_size": rocm.KIMI_BF16,
            },
        )
    )


def kimi_k25_mi300x() -> Recipe:
    """moonshotai/Kimi-K2.5 (INT4) on eight MI300X or MI325X: no draft, or the MLA draft that vLLM's recipe names."""
    return rocm.at_1k(
        Recipe(
            name="kimi-k2.5-mi300x",
            title="Kimi-K2.5 (INT4) on AMD Instinct MI300X or MI325X",
            target=Checkpoint("kimi-k2.5-int4", Hub("moonshotai/Kimi-K2.5")),
            drafts={"bf16": Checkpoint("kimi-k2.5-eagle3-mla", Hub("lightseekorg/kimi-k2.5-eagle3-mla"))},
            k=3,
            tp=(8,),
            hardware=("MI300X", "MI325X"),
            flags=(
                ("--gpu-memory-utilization", "0.95"),
                ("--block-size", "64"),
                ("--trust-remote-code", None),
                ("--no-enable-prefix-caching", None),
                ("--max-num-seqs", "256"),
                ("--mm-encoder-tp-mode", "data"),
            ),
            environment=rocm.environment(),
            notes=(
                "The baseline is published for this hardware; with the draft no public run on MI300X or MI325X was found.",
                rocm.FIRMWARE_NOTE,
            ),
            sources={
                **rocm.SOURCES,
                "VLLM_ROCM_USE_AITER": _MI325X,
                "target": "https://huggingface.co/moonshotai/Kimi-K2.5",
                "drafts.bf16": f"{_GUIDE}, spec_decoding; listed for the model, not tried there on this hardware",
                "k": f"{_GUIDE}, spec_decoding",
                "tp": f"{_GUIDE}, AMD MI300X/MI325X",
                "hardware": f"{_MI325X} (MI325X) and {_GUIDE} (MI300X)",
                "max_model_len": f"{_MI325X}: set by the sweep; ISL + OSL + 256 as for MI355X",
                "--gpu-memory-utilization": _MI325X,
                "--block-size": f"{_MI325X}; fits the MLA draft too, since both kernels are AITER's",
                "--trust-remote-code": _MI325X,
                "--no-enable-prefix-caching": _MI325X,
                "--max-num-seqs": _MI325X,
                "--mm-encoder-tp-mode": _MI325X,
            },
        )
    )
