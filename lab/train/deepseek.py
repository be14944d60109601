"""A converted model under DeepSeek-V3's names: its tensors and its `config.json`, as `DeepseekV3ForCausalLM` of vLLM and transformers reads
them. The arithmetic is `mla.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.errors import LabError
from lab.train.mla import LATENT, LayerRecipe, MlaWeights, convert
from lab.train.target import Layer, LlamaShape


def config(original: Mapping[str, Any]) -> dict[str, Any]:
    """`config.json` of the converted model from the original's."""
    size = original.get("head_dim") or original["hidden_size"] // original["num_attention_heads"]
    rope = original.get("rope_parameters") or {}
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **{key: original[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "rms_norm_eps")},
        **{key: original.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id", "hidden_act", "max_position_embeddings")},
        "num_attention_heads": original["num_attention_heads"],
        "num_key_value_heads": original["num_attention_heads"],
        "q_lora_rank": None,
        "kv_lora_rank": LATENT,
        "qk_rope_head_dim": size,
        "qk_nope_head_dim": size,
        "v_head_dim": size,
        "rope_theta": rope.get("rope_theta") or original.get("rope_theta", 10000.0),
        "rope_interleave": True,
        "attention_bias": False,
        "first_k_dense_replace": original["num_hidden_layers"],
        "moe_intermediate_size": original["intermediate_size"],
        "n_routed_experts": 1,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "tie_word_embeddings": False,  # vLLM never ties DeepSeek's: without weights of its own the head would give zeros
        "dtype": "bfloat16",
    }


def checkpoint(weights: Mapping[str, Tensor], shape: LlamaShape, layers: list[Layer], recipes: list[LayerRecipe]) -> dict[str, Tensor]:
    """The converted model's tensors under DeepSeek's names, in BF16, from the original's `weights`."""
    kept = {name: tensor for name, tensor in weights.items() if not any(part in name for part in ("q_proj", "k_proj", "v_proj", "o_proj"))}
    kept["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    for index, (layer, made) in enumerate(zip(layers, recipes, strict=True)):
        found = convert(shape, layer, made)
        for name in MlaWeights._fields:
            kept[f"model.layers.{index}.self_attn.{name}.weight"] = getattr(found, name).to(torch.bfloat16).contiguous()
    return kept


def with_heads(tensors: Mapping[str, Tensor], config: Mapping[str, Any], heads: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `checkpoint` and `config` made, with zero heads behind the model's own, `heads` in all (AITER's decode takes multiples of 16).

    A zero head attends evenly to zero values and its columns of the output projection are zero, so the logits stay as they are. The cache
    does too: its latent has no heads. Raises `LabError` for fewer heads than there are.
    """
    more = heads - config["num_attention_heads"]
    if more < 0:
        raise LabError(f"The model has {config['num_attention_heads']} heads, more than {heads}.", todo="Ask for at least as many.")
    value = config["v_head_dim"]
    rows = {"q_proj": config["qk_nope_head_dim"] + config["qk_rope_head_dim"], "kv_b_proj": config["qk_nope_head_dim"] + value}
    wider = dict(tensors)
    for name, tensor in tensors.items():
        part = name.rpartition(".self_attn.")[2].removesuffix(".weight")
        if part in rows:
            wider[name] = F.pad(tensor, (0, 0, 0, more * rows[part]))
        elif part == "o_proj":
            wider[name] = F.pad(tensor, (0, more * value))
    return wider, {**config, "num_attention_heads": heads, "num_key_value_heads": heads}


def with_values(tensors: Mapping[str, Tensor], config: Mapping[str, Any], size: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `checkpoint` and `config` made, with each head's values filled up with zeros to `size`, and zero columns that read them.

    The logits and the cache stay as they are. For prefill kernels of vLLM that take only certain sizes
    (`vllm/v1/attention/backends/mla/prefill`: keys of 64 + 64 go with values of 128). Raises `LabError` for a smaller size than there is.
    """
    before, heads = config["v_head_dim"], config["num_attention_heads"]
    if size < before:
        raise LabError(f"The model's values have {before} numbers a head, more than {size}.", todo="Ask for at least as many.")
    wider = dict(tensors)
    for name, tensor in tensors.items():
        part = name.rpartition(".self_attn.")[2].removesuffix(".weight")
        if part == "kv_b_proj":  # for each head the key, then the value
            wider[name] = F.pad(tensor.unflatten(0, (heads, -1)), (0, 0, 0, size - before)).flatten(0, 1)
        elif part == "o_proj":
            wider[name] = F.pad(tensor.unflatten(1, (heads, before)), (0, size - before)).flatten(1)
    return wider, {**config, "v_head_dim": size}
