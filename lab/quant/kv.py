"""What memory saved on the draft is worth: tokens of KV cache.

Bytes of KV cache a token, from the attention's definition: 2 (key and value) * layers * kv_heads * head_dim * bytes a value; with
multi-head latent attention layers * (kv_lora_rank + qk_rope_head_dim) * bytes a value (DeepSeek-V2, arXiv 2405.04434, section 2.1).
Paged blocks round up, so an engine may show a few tokens less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lab import provenance
from lab.errors import LabError


@dataclass(frozen=True)
class Machine:
    """Where the KV cache lives: a name for people, its memory in bytes, and where that number is from."""

    name: str
    memory_bytes: int
    source: str


#: The accelerator of the published runs.
MI355X = Machine("one AMD Instinct MI355X", 288 * 10**9, "AMD Instinct MI355X data sheet: 288 GB HBM3E")


def this_machine() -> Machine:
    """The computer that this runs on, as a CPU engine sees it."""
    found = provenance.hardware()
    return Machine(f"this machine ({found['cpu']}, {found['cores']} cores)", found["memory_bytes"], "the operating system")


@dataclass(frozen=True)
class KvGain:
    """Tokens of KV cache that `saved_bytes` hold on `machine`, and the sum written out."""

    machine: Machine
    saved_bytes: int
    bytes_per_token: int
    tokens: int
    formula: str

    @property
    def share(self) -> float:
        """What part of the machine's memory was saved (0 where its size is unknown)."""
        return self.saved_bytes / self.machine.memory_bytes if self.machine.memory_bytes else 0.0


def _layers(config: Mapping[str, Any], bytes_per_value: int, *, unsaid: int = 0) -> tuple[int, str]:
    """Bytes a token over all layers of one model (`unsaid` of them where it does not say), and the sum."""
    text = config.get("text_config") or config.get("transformer_layer_config") or config
    text = text if isinstance(text, Mapping) else {}
    layers = text.get("num_hidden_layers") or config.get("num_hidden_layers") or unsaid
    if not layers or not (text.get("kv_lora_rank") or text.get("num_attention_heads")):
        raise LabError(
            "The size of a KV-cache token cannot be told from this config.json.",
            why="It does not say num_hidden_layers and num_attention_heads (or kv_lora_rank), or calls them otherwise.",
            todo="Leave --target out, or give the target's folder.",
        )
    if text.get("kv_lora_rank"):
        rank, rope = text["kv_lora_rank"], text.get("qk_rope_head_dim", 0)
        return layers * (rank + rope) * bytes_per_value, f"{layers} layers * ({rank} latent + {rope} rotary) * {bytes_per_value} B"
    heads = text.get("num_key_value_heads") or text["num_attention_heads"]
    head = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    return 2 * layers * heads * head * bytes_per_value, f"2 * {layers} layers * {heads} KV heads * {head} * {bytes_per_value} B"


def kv_bytes_per_token(config: Mapping[str, Any], *, bytes_per_value: int = 2) -> int:
    """Bytes of KV cache a token for a model's config.json, undivided by tensor parallelism; `bytes_per_value` is 2 for BF16, 1 for FP8."""
    return _layers(config, bytes_per_value)[0]


def kv_gain(
    saved_bytes: int, target: Mapping[str, Any], machine: Machine, *, draft: Mapping[str, Any] | None = None, bytes_per_value: int = 2
) -> KvGain:
    """Tokens that fit into `saved_bytes`; with `draft` its own layer's cache is counted too, since it holds the same tokens."""
    per_token, formula = _layers(target, bytes_per_value)
    if draft is not None:
        more, words = _layers(draft, bytes_per_value, unsaid=1)
        per_token, formula = per_token + more, f"{formula} + draft: {words}"
    return KvGain(
        machine, saved_bytes, per_token, max(0, saved_bytes) // per_token, f"{saved_bytes} B / ({formula} = {per_token} B a token)"
    )
