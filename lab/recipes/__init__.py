"""Recipes by name."""

from __future__ import annotations

from collections.abc import Callable

from lab.errors import LabError
from lab.recipes import kimi, minimax, single_gpu
from lab.recipes.model import Recipe
from lab.recipes.smollm2 import smollm2, smollm2_gpu, smollm2_mla, smollm2_mla_gpu

RECIPES: dict[str, Callable[[], Recipe]] = {
    "smollm2": smollm2,
    "smollm2-gpu": smollm2_gpu,
    "smollm2-mla-gpu": smollm2_mla_gpu,
    "smollm2-mla": smollm2_mla,
    "kimi-k2.5": kimi.kimi_k25,
    "kimi-k2.5-mi300x": kimi.kimi_k25_mi300x,
    "minimax-m2.5": minimax.minimax_m25,
    "minimax-m2.5-mi300x": minimax.minimax_m25_mi300x,
    "llama-3.1-8b": single_gpu.llama31_8b,
    "llama-3.1-8b-speculators": single_gpu.llama31_8b_speculators,
    "qwen3-8b": single_gpu.qwen3_8b,
    "qwen3-8b-speculators": single_gpu.qwen3_8b_speculators,
    "qwen3-32b-speculators": single_gpu.qwen3_32b_speculators,
    "gpt-oss-20b": single_gpu.gpt_oss_20b,
}
DEFAULT = "smollm2"


def get(name: str) -> Recipe:
    """The recipe called `name`, or a `LabError` that lists the names there are."""
    if name not in RECIPES:
        raise LabError(f"There is no recipe called '{name}'.", todo=f"Known recipes: {', '.join(sorted(RECIPES))}.")
    return RECIPES[name]()
