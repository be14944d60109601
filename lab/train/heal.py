"""Healing the conversion to MLA: low-rank corrections of every layer's attention, found layer by layer against the original.

What the conversion (`mla.py`) loses it loses inside the attention of each layer, so each can be mended by itself: the original model and
the healed one run over the same rows side by side, and layer after layer the healed attention learns to bring the healed residual stream
to where the original's is after that layer. It thereby also takes back what the layers before it left over. The error of a token counts
relative to the size of its residual, since the next layer norms it, and so that the first token's huge one does not drown the rest.

The correction is W + rms(W) up down with up at zero (LoRA, arXiv 2106.09685), for the four projections, and a factor on the latent's
norm. A finished layer is a file in the run's folder: an interrupted run goes on with the next layer. `heal_whole.py` goes on
from there with all layers together.

Shapes as in `mla.py`; B rows, T positions, I and O a projection's inputs and outputs, K the correction's rank.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from safetensors.torch import save as in_bytes
from torch import Tensor

from lab.train.mla import MlaWeights, corrected, mla_attention
from lab.train.state import keep, reading, same_run
from lab.train.target import Layer, Target, rms_norm

PROJECTIONS = ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


@dataclass(frozen=True)
class HealPlan:
    """Settings of a run."""

    #: Of the correction. 32 is 11 MB for SmolLM2-135M in BF16.
    rank: int = 32
    #: Optimiser steps for each layer, and rows in each.
    steps: int = 900
    rows: int = 32
    rate: float = 2e-3
    warmup: int = 10
    #: Rows kept to say each layer's error on.
    held_out: int = 4
    seed: int = 1


def correction(weights: MlaWeights, rank: int, seed: int) -> dict[str, Tensor]:
    """A correction that changes nothing yet: `<projection>.down` [K, I], `<projection>.up` [O, K] and `norm` [R], all trainable."""
    random = torch.Generator().manual_seed(seed)
    found = {"norm": torch.zeros_like(weights.kv_a_layernorm)}
    for name in PROJECTIONS:
        matrix = getattr(weights, name)
        found[f"{name}.down"] = torch.randn(rank, matrix.shape[1], generator=random).to(matrix.device)
        found[f"{name}.up"] = matrix.new_zeros(matrix.shape[0], rank)
    return {name: tensor.requires_grad_() for name, tensor in found.items()}


def attended(target: Target, weights: MlaWeights, layer: Layer, x_BTH: Tensor) -> Tensor:
    """What the MLA attention of `layer` adds to the residual stream x [B, T, H], float32; its matrices run in BF16."""
    length, eps = x_BTH.shape[1], target.shape.eps
    normed = rms_norm(x_BTH, layer.norm_attn, eps)
    with torch.autocast(x_BTH.device.type, torch.bfloat16):
        mixed = mla_attention(target.shape, weights, normed, target.cos[:length], target.sin[:length], eps)
        return F.linear(mixed, weights.o_proj).float()


def error(found_BTH: Tensor, wanted_BTH: Tensor) -> Tensor:
    """Mean over tokens of the error's size relative to the wanted residual's. Not its square: a few lost tokens would outweigh the rest."""
    squared = (found_BTH - wanted_BTH).pow(2).sum(-1) / wanted_BTH.pow(2).sum(-1)
    return (squared + 1e-8).sqrt().mean()  # the root of zero has no gradient


def heal_layer(
    target: Target, layer: Layer, weights: MlaWeights, x_BTH: Tensor, wanted_BTH: Tensor, plan: HealPlan
) -> tuple[dict[str, Tensor], tuple[float, float]]:
    """The correction of one layer, and its error on the held-out rows before and after.

    `x` is the healed stream before the layer, `wanted` the original's stream after its attention.
    """
    kept = len(x_BTH) - plan.held_out
    found = correction(weights, plan.rank, plan.seed)
    optimiser = torch.optim.AdamW(list(found.values()), lr=plan.rate, betas=(0.9, 0.98), weight_decay=0.0)
    random = torch.Generator().manual_seed(plan.seed)

    @torch.no_grad()
    def left_over() -> float:
        now = corrected(weights, found)
        rows = list(zip(x_BTH[kept:].split(1), wanted_BTH[kept:].split(1), strict=True))
        return sum(float(error(x + attended(target, now, layer, x), wanted)) for x, wanted in rows) / len(rows)

    before = left_over()
    for step in range(plan.steps):
        cooling = min(1.0, (plan.steps - step) / (0.7 * plan.steps))
        optimiser.param_groups[0]["lr"] = plan.rate * min(1.0, (step + 1) / plan.warmup) * cooling
        rows = torch.randperm(kept, generator=random)[: plan.rows]
        x = x_BTH[rows]
        error(x + attended(target, corrected(weights, found), layer, x), wanted_BTH[rows]).backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    return {name: tensor.detach() for name, tensor in found.items()}, (before, left_over())


def heal(
    target: Target, converted: list[MlaWeights], ids_BT: Tensor, plan: HealPlan, folder: Path, say: Callable[[str], None]
) -> tuple[list[dict[str, Tensor]], list[tuple[float, float]]]:
    """Each layer's correction (BF16), and its error before and after. Finished layers in `folder` are taken as they are.

    `target` is float32, `converted` what `mla.convert` made of its layers, `ids` rows of text that it wrote; all on one device.
    Raises `LabError` for a folder of another run, a damaged file in it, and a full disk.
    """
    run = {"plan": asdict(plan), "text": hashlib.sha256(ids_BT.cpu().numpy().tobytes()).hexdigest()}
    same_run(folder / "plan.json", run, "a healing with other settings or text")
    original = F.embedding(ids_BT, target.embed_VH)
    healed, corrections, errors = original.clone(), [], []
    for index, (layer, weights) in enumerate(zip(target.layers, converted, strict=True)):
        path = folder / f"layer-{index:02d}.safetensors"
        with torch.no_grad():
            wanted = _by_rows(partial(target.attention_forward, layer=layer), original)
        start = time.monotonic()
        if not path.exists():
            found, both = heal_layer(target, layer, weights, healed, wanted, plan)
            held = {name: tensor.to(torch.bfloat16) for name, tensor in found.items()}
            keep(path, in_bytes({**held, "errors": torch.tensor(both)}))
        with reading(path):
            held = load_file(path, device=str(healed.device))
            before, after = held.pop("errors").tolist()
        say(f"layer {index + 1} of {len(converted)}: error {before:.2e} -> {after:.2e} ({time.monotonic() - start:.0f} s)")
        corrections.append(held)
        errors.append((before, after))
        now = corrected(weights, held)
        with torch.no_grad():
            original = _by_rows(partial(target.mlp_forward, layer=layer), wanted)
            healed = healed + _by_rows(partial(attended, target, now, layer), healed)
            healed = _by_rows(partial(target.mlp_forward, layer=layer), healed)
    return corrections, errors


def _by_rows(forward: Callable[[Tensor], Tensor], x_BTH: Tensor, rows: int = 4) -> Tensor:
    return torch.cat([forward(part) for part in x_BTH.split(rows)])
