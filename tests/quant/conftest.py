"""Small Eagle3 drafts in the forms that people have them in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def config(**changes) -> dict:
    """A one-layer Llama-type Eagle3 configuration of two KV heads."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "draft_vocab_size": 128,
        "torch_dtype": "bfloat16",
        **changes,
    }


def tensors(settings: dict, *, layer: str = "midlayer.", embed: bool = False, head: bool = True, maps: bool = True) -> dict:
    """Random weights for `settings`; one output channel of `o_proj` is zero."""
    torch = pytest.importorskip("torch")
    made = torch.Generator().manual_seed(1)
    hidden, wide, size = settings["hidden_size"], settings["intermediate_size"], settings["head_dim"]
    query, kv = settings["num_attention_heads"] * size, settings["num_key_value_heads"] * size
    shapes = {
        "fc": (hidden, 3 * hidden),
        f"{layer}self_attn.q_proj": (query, 2 * hidden),
        f"{layer}self_attn.k_proj": (kv, 2 * hidden),
        f"{layer}self_attn.v_proj": (kv, 2 * hidden),
        f"{layer}self_attn.o_proj": (hidden, query),
        f"{layer}mlp.gate_proj": (wide, hidden),
        f"{layer}mlp.up_proj": (wide, hidden),
        f"{layer}mlp.down_proj": (hidden, wide),
        f"{layer}hidden_norm": (hidden,),
        f"{layer}input_layernorm": (hidden,),
        f"{layer}post_attention_layernorm": (hidden,),
        "norm": (hidden,),
    }
    if head:
        shapes["lm_head"] = (settings["draft_vocab_size"], hidden)
    if embed:
        shapes["embed_tokens"] = (settings["vocab_size"], hidden)
    weights = {f"{name}.weight": (torch.randn(shape, generator=made) * 0.1).bfloat16() for name, shape in shapes.items()}
    weights[f"{layer}self_attn.o_proj.weight"][3] = 0
    if maps:
        weights["d2t"] = torch.arange(settings["draft_vocab_size"]) * 2
        weights["t2d"] = torch.arange(settings["vocab_size"]) % 3 == 0
    return weights


def write(folder: Path, settings: dict, weights: dict, *, shards: int = 1, pickled: bool = False) -> Path:
    """A draft directory on disk."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings))
    if pickled:
        torch.save(weights, folder / "pytorch_model.bin")
    elif shards == 1:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    else:
        placed = {name: f"model-{index % shards + 1:05}-of-{shards:05}.safetensors" for index, name in enumerate(weights)}
        for file in set(placed.values()):
            save_file({name: weights[name] for name in weights if placed[name] == file}, folder / file, {"format": "pt"})
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return folder


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    """An ordinary draft."""
    return write(tmp_path / "draft", config(), tensors(config()))
