"""What latent attention (MLA) is for: bytes of KV cache a token, of the recipes' models as they are and as they would be otherwise.

The bytes come from `lab.quant.kv` (the attention's definition); this module adds the models' numbers with their sources and the question
"what if": the same model with grouped queries (a key and value a KV head) or with a head's key and value for every query head (MHA). The
comparison is arithmetic on shapes, not a claim about quality: Kimi-K2.5 was never trained in another form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lab.quant.kv import kv_bytes_per_token


@dataclass(frozen=True)
class KvModel:
    """A model's attention by numbers: `config` holds the keys of its config.json that the cache depends on, `source` says whence."""

    name: str
    kind: str
    config: Mapping[str, Any]
    source: str
    #: Width of a query head's key, where it is not `head_dim` (MLA: no-rope and rope part), and of its value.
    key: int = 0
    value: int = 0


MODELS = (
    KvModel(
        "Kimi-K2.5",
        "MLA",
        {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 64},
        "config.json of moonshotai/Kimi-K2 as quoted in ROCm/aiter issue 726; latent and rotary width in ROCm/aiter issue 2720",
        key=192,
        value=128,
    ),
    KvModel(
        "MiniMax-M2.5",
        "GQA",
        {"num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128},
        "config.json of the M2 family (amd/MiniMax-M2.7-BF16, QuixiAI/MiniMax-M2.1-bf16)",
    ),
    KvModel(
        "Llama-3.1-8B",
        "GQA",
        {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
        "config.json of a fine-tune that keeps its shapes (NbAiLab/nb-llama-3.1-8B)",
    ),
    KvModel(
        "Qwen3-8B",
        "GQA",
        {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
        "config.json of Qwen/Qwen3-8B",
    ),
    KvModel(
        "SmolLM2-135M",
        "GQA",
        {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64},
        "config.json of the lab's own checkpoint",
    ),
    KvModel(
        "smollm2-mla",
        "MLA",
        {"num_hidden_layers": 30, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 9},
        "config.json of the lab's own conversion of SmolLM2-135M (lab/train/mla.py)",
        key=128,
        value=64,
    ),
)


@dataclass(frozen=True)
class KvRow:
    """Bytes of KV cache a token: as the model is, and if it kept key and value of every query head (MHA)."""

    name: str
    kind: str
    bytes_per_token: int
    mha: int
    #: The same with 8 KV heads, for a model of latents; None where the model is grouped already, or its heads make no 8 groups.
    gqa8: int | None
    source: str

    def at(self, tokens: int) -> int:
        """Bytes of one sequence of `tokens`."""
        return self.bytes_per_token * tokens


def row(model: KvModel, *, bytes_per_value: int = 2) -> KvRow:
    """One model's numbers; `bytes_per_value` is 2 for BF16, 1 for FP8."""
    config = model.config
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    width = (model.key + model.value) or 2 * config["head_dim"]
    grouped = layers * 8 * width * bytes_per_value if model.kind == "MLA" and heads % 8 == 0 else None
    own = kv_bytes_per_token(config, bytes_per_value=bytes_per_value)
    return KvRow(model.name, model.kind, own, layers * heads * width * bytes_per_value, grouped, model.source)


def rows(*, bytes_per_value: int = 2) -> list[KvRow]:
    """Every model's numbers."""
    return [row(model, bytes_per_value=bytes_per_value) for model in MODELS]
