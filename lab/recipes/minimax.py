"""MiniMax-M2.5 with its Eagle3 draft, as published for AMD Instinct: MI355X and MI350X, and the baseline on MI300X and MI325X.

Target and draft both have ordinary (GQA) attention, so one `--block-size` serves both. Its FP8 weights come in blocks of 128, and one
eighth of its experts' width is not a multiple of that: eight GPUs need expert parallelism.
"""

from __future__ import annotations

from lab.recipes import rocm
from lab.recipes.model import Checkpoint, Hub, Recipe, Rule

_TARGET = Checkpoint("minimax-m2.5", Hub("MiniMaxAI/MiniMax-M2.5"))
_MI355X = f"{rocm.SCRIPTS}/minimaxm2.5_fp8_mi355x.sh"
_MI325X = f"{rocm.SCRIPTS}/minimaxm2.5_fp8_mi325x.sh"
_GUIDE = f"{rocm.VLLM_RECIPES}/MiniMaxAI/MiniMax-M2.5.yaml"
_EAGLE3 = f"{rocm.EAGLE3_SWEEPS}; {rocm.BLOG}"


def minimax_m25() -> Recipe:
    """MiniMaxAI/MiniMax-M2.5 on MI355X or MI350X: no draft, or the BF16 draft (K=3)."""
    return rocm.at_1k(
        Recipe(
            name="minimax-m2.5",
            title="MiniMax-M2.5 (FP8) on AMD Instinct MI355X",
            target=_TARGET,
            drafts={"bf16": Checkpoint("minimax-m2.5-eagle3", Hub("thoughtworks/MiniMax-M2.5-Eagle3"))},
            k=3,
            tp=(4, 8),
            expert_parallel=True,
            hardware=("MI355X", "MI350X"),
            flags=(
                ("--gpu-memory-utilization", "0.95"),
                ("--kv-cache-dtype", "fp8"),
                ("--block-size", "32"),
                ("--no-enable-prefix-caching", None),
                ("--attention-backend", "ROCM_AITER_FA"),
                ("--trust-remote-code", None),
            ),
            rules=(
                Rule(_MI355X, drafts=("none",), environment={"VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": "1"}),
                Rule(_EAGLE3, drafts=("bf16",), flags=(("--reasoning-parser", "minimax_m2"),)),
            ),
            environment={**rocm.environment(), "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "INT4"},
            speculative={"draft_tensor_parallel_size": 1},
            notes=(
                "Published with a nightly of vllm/vllm-openai-rocm of commit 4eafc729.",
                "vLLM issue 31625 reports wrong output of another model with ROCM_AITER_FA and Eagle3: check that answers are the same.",
                rocm.FIRMWARE_NOTE,
            ),
            sources={
                **rocm.SOURCES,
                "VLLM_ROCM_USE_AITER": _MI355X,
                "target": "https://huggingface.co/MiniMaxAI/MiniMax-M2.5",
                "drafts.bf16": "https://huggingface.co/thoughtworks/MiniMax-M2.5-Eagle3",
                "k": _EAGLE3,
                "tp": f"{rocm.BLOG}: TP 4 with expert parallelism published; {_MI355X}: TP 8 with EP 8",
                "expert_parallel": f"{rocm.BLOG}; without it, eight GPUs cannot split the FP8 blocks ({_GUIDE})",
                "hardware": rocm.BLOG,
                "max_model_len": f"{_MI355X}: set by the sweep; ISL + OSL + 256 as for Kimi-K2.5",
                "--gpu-memory-utilization": _MI355X,
                "--kv-cache-dtype": _MI355X,
                "--block-size": f"{_EAGLE3}; the newer {_MI355X} takes 16 for some baseline cells",
                "--no-enable-prefix-caching": _MI355X,
                "--attention-backend": _MI355X,
                "--trust-remote-code": _MI355X,
                "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": _MI355X,
                "draft_tensor_parallel_size": _EAGLE3,
            },
        )
    )


def minimax_m25_mi300x() -> Recipe:
    """MiniMaxAI/MiniMax-M2.5 on MI300X or MI325X: the baseline only, since no public recipe with a draft was found."""
    return rocm.at_1k(
        Recipe(
            name="minimax-m2.5-mi300x",
            title="MiniMax-M2.5 (FP8) on AMD Instinct MI300X or MI325X",
            target=_TARGET,
            drafts={},
            tp=(4,),
            expert_parallel=False,
            hardware=("MI300X", "MI325X"),
            flags=(
                ("--gpu-memory-utilization", "0.95"),
                ("--block-size", "32"),
                ("--no-enable-prefix-caching", None),
                ("--trust-remote-code", None),
            ),
            environment=rocm.environment(),
            notes=("No public recipe with a draft was found for this hardware (30 November 2026).", rocm.FIRMWARE_NOTE),
            sources={
                **rocm.SOURCES,
                "VLLM_ROCM_USE_AITER": _MI325X,
                "target": "https://huggingface.co/MiniMaxAI/MiniMax-M2.5",
                "tp": f"{_GUIDE}, AMD ROCm",
                "expert_parallel": f"{_MI325X}: --enable-expert-parallel where EP is above 1",
                "hardware": f"{_MI325X} and {rocm.INFERENCEX}/blob/19c735aa276950db82f6a8b658c6cd45c13d0255/benchmarks/single_node/"
                "minimaxm2.5_fp8_mi300x.sh",
                "max_model_len": f"{_MI325X}: set by the sweep; ISL + OSL + 256 as for Kimi-K2.5",
                "--gpu-memory-utilization": _MI325X,
                "--block-size": _MI325X,
                "--no-enable-prefix-caching": _MI325X,
                "--trust-remote-code": _MI325X,
            },
        )
    )
