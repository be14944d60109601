"""The target as training sees it: a plain batched Llama forward that also hands out the features an Eagle3 draft reads.

vLLM serves the target; training needs what serving does not give: hidden states of every position, whole batches of long rows in one
pass, and a decode loop over thousands of rows in lockstep. This module is that and nothing else: Llama with grouped-query attention,
BF16 weights, no padding, checked in the tests against `transformers`. Feature levels are the *inputs* of three decoder layers, as vLLM
collects them (`vllm/model_executor/models/llama.py`, `aux_hidden_state_layers`; default `(2, n // 2, n - 3)`).

Shape suffixes: B rows, T positions, H hidden, N query heads, G key/value heads, D head size, V vocabulary, L feature levels.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from lab.errors import LabError

if TYPE_CHECKING:
    from lab.train.mla import MlaWeights


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama model, read from its `config.json`."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    eps: float
    theta: float
    max_positions: int

    @classmethod
    def read(cls, folder: Path) -> LlamaShape:
        """Read `folder/config.json`; raises `LabError` for another architecture."""
        config = json.loads((folder / "config.json").read_text())
        if "LlamaForCausalLM" not in config.get("architectures", []):
            raise LabError(
                f"{folder} is no Llama checkpoint.",
                why=f"Its architectures are {config.get('architectures')}.",
                todo="Training needs a Llama-type target such as SmolLM2-135M-Instruct.",
            )
        rope = config.get("rope_parameters") or {}
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
            eps=config["rms_norm_eps"],
            theta=rope.get("rope_theta") or config.get("rope_theta", 10000.0),
            max_positions=config["max_position_embeddings"],
        )

    def default_levels(self) -> tuple[int, int, int]:
        """Layers whose inputs are the low, middle and high features (vLLM's default for Eagle3)."""
        return (2, self.layers // 2, self.layers - 3)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, computed in float32 (Zhang and Sennrich 2019)."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotary_table(positions: int, head_dim: int, theta: float, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [positions, head_dim / 2] in float32 (Su et al. 2021)."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angles = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * inverse
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [..., D] in the half-split layout; `cos`, `sin` broadcast to [..., D / 2]."""
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Layer(NamedTuple):
    """Weights of one decoder layer, with the projections that share an input stacked (a tuple, which torch.compile sees through)."""

    norm_attn: Tensor
    qkv: Tensor
    out: Tensor
    norm_mlp: Tensor
    gate_up: Tensor
    down: Tensor
    #: Of a converted model: the attention that runs in place of `qkv` and `out`.
    mla: MlaWeights | None = None


class Target:
    """A frozen Llama with tied embeddings."""

    def __init__(self, shape: LlamaShape, layers: list[Layer], embed_VH: Tensor, norm_H: Tensor) -> None:
        self.shape = shape
        self.layers = layers
        self.embed_VH = embed_VH
        self.norm_H = norm_H
        self.cos, self.sin = rotary_table(shape.max_positions, shape.head_dim, shape.theta, embed_VH.device)

    @classmethod
    def load(cls, folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Target:
        """Load a BF16 safetensors checkpoint of a Llama with tied embeddings."""
        shape = LlamaShape.read(folder)
        weights = {name: tensor.to(device, dtype) for name, tensor in load_file(folder / "model.safetensors").items()}

        def layer(index: int) -> Layer:
            prefix = f"model.layers.{index}."

            def stack(*names: str) -> Tensor:
                return torch.cat([weights[f"{prefix}{name}.weight"] for name in names])

            return Layer(
                norm_attn=weights[prefix + "input_layernorm.weight"],
                qkv=stack("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                out=weights[prefix + "self_attn.o_proj.weight"],
                norm_mlp=weights[prefix + "post_attention_layernorm.weight"],
                gate_up=stack("mlp.gate_proj", "mlp.up_proj"),
                down=weights[prefix + "mlp.down_proj.weight"],
            )

        layers = [layer(index) for index in range(shape.layers)]
        return cls(shape, layers, weights["model.embed_tokens.weight"], weights["model.norm.weight"])

    def split_heads(self, qkv_BTX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, (N + 2 G) D] to query [B, N, T, D], key and value [B, G, T, D]."""
        s = self.shape
        batch, length, _ = qkv_BTX.shape
        heads = qkv_BTX.view(batch, length, s.heads + 2 * s.kv_heads, s.head_dim).transpose(1, 2)
        query, key, value = heads.split((s.heads, s.kv_heads, s.kv_heads), 1)
        return query, key, value

    def layer_forward(self, x_BTH: Tensor, layer: Layer) -> Tensor:
        """One decoder layer over whole rows from position 0, causal."""
        return self.mlp_forward(self.attention_forward(x_BTH, layer), layer)

    def attention_forward(self, x_BTH: Tensor, layer: Layer) -> Tensor:
        """The residual stream after the layer's attention."""
        eps, length = self.shape.eps, x_BTH.shape[1]
        query, key, value = self.split_heads(F.linear(rms_norm(x_BTH, layer.norm_attn, eps), layer.qkv))
        cos, sin = self.cos[:length], self.sin[:length]
        mixed = F.scaled_dot_product_attention(rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=True, enable_gqa=True)
        return x_BTH + F.linear(mixed.transpose(1, 2).flatten(2), layer.out)

    def mlp_forward(self, x_BTH: Tensor, layer: Layer) -> Tensor:
        """The residual stream after the layer's feed-forward part."""
        gate, up = F.linear(rms_norm(x_BTH, layer.norm_mlp, self.shape.eps), layer.gate_up).chunk(2, -1)
        return x_BTH + F.linear(F.silu(gate) * up, layer.down)

    @torch.no_grad()
    def features(self, ids_BT: Tensor, levels: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Features [B, T, L H] (inputs of `levels`, concatenated) and the final normed hidden state [B, T, H]."""
        x = F.embedding(ids_BT, self.embed_VH)
        found = {}
        for index, layer in enumerate(self.layers):
            if index in levels:
                found[index] = x
            x = self.layer_forward(x, layer)
        return torch.cat([found[level] for level in levels], -1), rms_norm(x, self.norm_H, self.shape.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary from the final normed hidden state (tied embeddings)."""
        return F.linear(hidden, self.embed_VH)

    def decoder(self, rows: int, length: int) -> Decoder:
        """Lockstep decoding of `rows` rows of up to `length` tokens by this target."""
        return Decoder(self, rows, length)


class Decoder:
    """Lockstep decoding: every row is at the same position, so that keys need no mask and memory no paging.

    Grouped queries are folded into the query axis (the N / G heads that share a key/value head become N / G query rows), which reads
    every key once. The cache is [layers][B, G, length, D] for keys and for values. Few and large operations, not compiled: with
    thousands of rows the GPU is busier than the launches (torch.compile's guards alone took longer than the arithmetic).
    """

    def __init__(self, target: Target, rows: int, length: int) -> None:
        self.target = target
        self.allocate(rows, length)

    def allocate(self, rows: int, length: int) -> None:
        """Make the cache."""
        s, like, target = self.target.shape, self.target.embed_VH, self.target
        self.keys = [like.new_empty(rows, s.kv_heads, length, s.head_dim) for _ in target.layers]
        self.values = [like.new_empty(rows, s.kv_heads, length, s.head_dim) for _ in target.layers]

    @torch.no_grad()
    def step(self, ids_B: Tensor, position: int) -> Tensor:
        """Feed one token per row at `position`; returns the final normed hidden state [B, H]."""
        target, s = self.target, self.target.shape
        x = F.embedding(ids_B, target.embed_VH)
        for index, layer in enumerate(target.layers):
            x = x + self.attend(F.rms_norm(x, (s.hidden,), layer.norm_attn, s.eps), index, position)
            gate, up = F.linear(F.rms_norm(x, (s.hidden,), layer.norm_mlp, s.eps), layer.gate_up).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return F.rms_norm(x, (s.hidden,), target.norm_H, s.eps)

    def attend(self, normed_BH: Tensor, index: int, position: int) -> Tensor:
        """What the attention of layer `index` adds to the residual stream [B, H]; the token's key and value go into the cache."""
        s, layer, keys, values = self.target.shape, self.target.layers[index], self.keys[index], self.values[index]
        rows, turned = len(normed_BH), s.heads + s.kv_heads
        heads = F.linear(normed_BH, layer.qkv).view(rows, -1, s.head_dim)
        query_key = rotate(heads[:, :turned], self.target.cos[position], self.target.sin[position])
        keys[:, :, position] = query_key[:, s.heads :]
        values[:, :, position] = heads[:, turned:]
        folded = query_key[:, : s.heads].reshape(rows, s.kv_heads, s.heads // s.kv_heads, s.head_dim)
        mixed = F.scaled_dot_product_attention(folded, keys[:, :, : position + 1], values[:, :, : position + 1])
        return F.linear(mixed.reshape(rows, -1), layer.out)
