"""Warnings that a shipped recipe is expected to raise, each with the reason why the recipe stays as it is.

Keys are recipes. A test examines each lane of each recipe on the recipe's hardware: no error may be found, every warning must stand here,
and a line here that no lane raises fails the test too.
"""

from __future__ import annotations

_OPEN = {"draft-backend-open": "the published command leaves the draft's attention to vLLM, and was measured so"}
_BLOCKS = {"verify-length": "published with K = 4 and K = 6; on an image without pull request 45227 compare the texts first"}
_PAIR = {
    "aiter-off": "the pair is for AMD and NVIDIA alike; on AMD set VLLM_ROCM_USE_AITER=1 and measure again",
    "draft-backend-open": "the documented command leaves the draft's attention to vLLM",
}
EXPECTED: dict[str, dict[str, str]] = {
    "smollm2": {},
    "smollm2-gpu": _PAIR,
    "smollm2-mla-gpu": _PAIR,
    "smollm2-mla": {},
    "kimi-k2.5": {
        **_OPEN,
        **_BLOCKS,
        "mla-heads": "with --tp 8: eight heads for each GPU, which old AITER refused (vLLM issue 35641)",
    },
    "kimi-k2.5-mi300x": {
        "fp4-bmm": "the published command leaves it on; vLLM 0.32 looks at the hardware itself, and 0 is safe with any version",
        "mla-heads": "eight heads for each GPU: vLLM 0.28 or newer pads them, which the doctor cannot see without vLLM",
    },
    "minimax-m2.5": {
        "aiter-fa-eagle3": "the published command uses ROCM_AITER_FA; the recipe's note asks for a check of the texts",
        "draft-inherits-fp8-cache": "the published command sets an FP8 cache for both",
    },
    "minimax-m2.5-mi300x": {},
    "llama-3.1-8b": {
        **_PAIR,
        "draft-context": "the draft's own file says 2,048; vLLM after 0.24 stretches it, with earlier ones use --max-model-len 2048",
    },
    "llama-3.1-8b-speculators": _PAIR,
    "qwen3-8b": _PAIR,
    "qwen3-8b-speculators": _PAIR,
    "qwen3-32b-speculators": _PAIR,
    "gpt-oss-20b": _PAIR,
}


def why_expected(recipe: str, rule: str) -> str:
    """Why a recipe raises a warning on purpose; "" where it is not expected."""
    return EXPECTED.get(recipe, {}).get(rule, "")
