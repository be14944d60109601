"""A Llama with grouped-query attention in the form of DeepSeek-V3's multi-head latent attention (MLA): the deterministic conversion.

MLA (DeepSeek-V2, arXiv 2405.04434) caches one latent a token, from which every head's key and value are linear maps, and one small key
that carries all of the rotary position. A grouped-query model has one rotary key a group. Following RoRoPE (TransMLA, arXiv 2502.07864),
a key pair (k_f, k_{f + D/2}) is read as a complex number, which rotary turns by e^{i theta_f n}; a complex unitary over the groups at one
frequency commutes with that turn. So at each frequency the groups' keys are rotated onto their principal components (of the keys weighted
by how strongly each group's queries look at that frequency): the first becomes the rotary key, the others go into the latent without
their turn. What the turn would have done to them is kept in the mean: queries of the latent part are multiplied by gamma, the mean of
e^{i theta (m - n)} over the distances at which this head's attention can still be moved (weight A (1 - A), the first token left out).

DeepSeek norms the latent. Keys and values in it are brought to unit RMS, and its spare rows hold a large, nearly constant number (a ridge
regression of 1 on the layer's input), so that the norm divides by nearly a constant, which its weight gives back. `scores` are scaled by
(2 D)^-1/2 there instead of D^-1/2: queries grow by sqrt 2.

What is exact: with the other components turned as well and the norm left out, scores and values are the original's (tested). What is not:
dropping that turn, and the norm's few per cent. That costs a model of 135 million parameters about one token in seven (`converted.measure`
says how many); a low-rank correction of each layer, trained by distillation (`heal.py`, `heal_whole.py`), takes most of it back.

Shape suffixes: H hidden, N query heads, G key/value groups, D head size, F = D / 2 frequencies, C = G components, R latent rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as in_bytes
from torch import Tensor

from lab.errors import LabError
from lab.train.target import Layer, LlamaShape, Target, rms_norm, rotate

LATENT = 512  # DeepSeek-V3's latent rank, which attention kernels are built for
SINK = 0.05  # weight that the first position gets among the keys
RIDGE = 1e-4  # of the regression's mean diagonal
LEVELS = (2.0, 4.0, 8.0, 16.0, 32.0)  # tried for the constant: large drowns the rest of the latent, small leaves the norm unsteady

Say = Callable[[str], None]


@dataclass(frozen=True)
class LayerRecipe:
    """What the conversion of one layer needs beside its weights; all float32."""

    unitary_FGC2: Tensor
    scale_GF: Tensor
    gamma_NF2: Tensor
    #: RMS of each used row of the latent: components 2 to C (frequency by frequency, real and imaginary part), then values.
    unit_U: Tensor
    #: The spare rows, all alike: their dot product with the layer's normed input is nearly `level`.
    constant_H: Tensor
    #: RMS that the latent has on average.
    rms: Tensor
    #: What healing learned for this layer: `norm` [R], `<projection>.up` [O, K], `<projection>.down` [K, I]. Empty: not healed.
    correction: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def unitary_FGC(self) -> Tensor:
        """Columns are components, strongest first."""
        return torch.view_as_complex(self.unitary_FGC2)

    @property
    def gamma_NF(self) -> Tensor:
        """Mean turn of the latent part, by head and frequency."""
        return torch.view_as_complex(self.gamma_NF2)


FIELDS = tuple(name for name in LayerRecipe.__dataclass_fields__ if name != "correction")
HEALED = "healed."  # before a correction's names in the file


SCALE = ".scale"  # after a factor's name, where it is stored in 8 bits


def packed(correction: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As a file holds it: float32 factors in 8 bits, with a scale for each of the K components (beside `<factor>.scale` [K]).

    The rounding error is below that of the whole matrix in BF16, since a correction is small beside its matrix.
    """
    found = {}
    for name, tensor in correction.items():
        if name.endswith((".up", ".down")) and tensor.dtype == torch.float32:
            along = 0 if name.endswith(".up") else 1
            scale = tensor.abs().amax(along).clamp(min=1e-12) / 127
            found[name + SCALE] = scale
            tensor = (tensor / scale.unsqueeze(along)).round().to(torch.int8)
        found[name] = tensor
    return found


def unpacked(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `packed` stored: 8 bits as float32 again, all else as it is."""
    found = {}
    for name, tensor in stored.items():
        if tensor.dtype == torch.int8:
            tensor = tensor.float() * stored[name + SCALE].unsqueeze(0 if name.endswith(".up") else 1)
        if not name.endswith(SCALE):
            found[name] = tensor
    return found


def save(path: Path, layers: list[LayerRecipe], about: Mapping[str, str]) -> None:
    """Write the recipe of a whole model: one safetensors file, `about` as its metadata."""
    tensors: dict[str, Tensor] = {}
    for index, layer in enumerate(layers):
        tensors |= {f"{index}.{name}": getattr(layer, name).contiguous() for name in FIELDS}
        tensors |= {f"{index}.{HEALED}{name}": tensor.contiguous() for name, tensor in packed(layer.correction).items()}
    path.write_bytes(in_bytes(tensors, metadata=dict(about)))  # not `save_file`, whose word for a full disk is no `OSError`


def load(path: Path, of: LlamaShape | None = None) -> list[LayerRecipe]:
    """Read what `save` wrote; raises `LabError` for a file that holds something else, or converts a model of other sizes than `of`."""
    try:
        tensors = load_file(path)
        count = 1 + max(int(name.partition(".")[0]) for name in tensors)
        layers = []
        for index in range(count):
            before = f"{index}.{HEALED}"
            healed = {name.removeprefix(before): tensor for name, tensor in tensors.items() if name.startswith(before)}
            layers.append(LayerRecipe(**{name: tensors[f"{index}.{name}"] for name in FIELDS}, correction=unpacked(healed)))
    except (KeyError, ValueError, RuntimeError, SafetensorError) as error:
        raise LabError(f"{path.name} is no conversion recipe.", why=f"{type(error).__name__}: {error}.") from error
    if of is not None and count != of.layers:
        raise LabError(f"{path.name} converts a model of {count} layers; the target has {of.layers}.")
    for index, made in enumerate(layers):
        if of is not None and (wrong := misfits(made, of)):
            raise LabError(f"{path.name} does not fit the target: it converts a model of other sizes.", why=f"Layer {index}: {wrong}.")
    return layers


def misfits(made: LayerRecipe, of: LlamaShape) -> str:
    """What in the recipe of a layer has other sizes than a model of shape `of` needs; "" if nothing."""
    n, g, d, f, h = of.heads, of.kv_heads, of.head_dim, of.head_dim // 2, of.hidden
    fields: dict[str, tuple[int, ...]] = {"unitary_FGC2": (f, g, g, 2), "scale_GF": (g, f), "gamma_NF2": (n, f, 2)}
    fields |= {"unit_U": (used_size(of),), "constant_H": (h,), "rms": ()}
    found: list[tuple[str, tuple[int, ...] | None, tuple[int, ...]]] = []
    found += [(name, tuple(getattr(made, name).shape), size) for name, size in fields.items()]
    if made.correction:
        norm = made.correction.get("norm")
        found.append(("norm", None if norm is None else tuple(norm.shape), (LATENT,)))
        factors = {"q_proj": (2 * n * d, h), "kv_a_proj_with_mqa": (LATENT + d, h), "kv_b_proj": (2 * n * d, LATENT), "o_proj": (h, n * d)}
        for name, size in factors.items():
            up, down = (made.correction.get(f"{name}.{side}", torch.empty(0)) for side in ("up", "down"))
            whole = up.ndim == down.ndim == 2 and up.shape[1] == down.shape[0]
            if up.numel() or down.numel():  # a projection may have no correction
                found.append((name, (up.shape[0], down.shape[1]) if whole else None, size))
    return "; ".join(
        f"{name} is {list(has) if has is not None else 'missing'}, not {list(needs)}" for name, has, needs in found if has != needs
    )


def used_size(shape: LlamaShape) -> int:
    """Rows of the latent that hold something: all components but one, and the values."""
    return (2 * shape.kv_heads - 1) * shape.head_dim


def check_room(shape: LlamaShape) -> None:
    """Raises `LabError` for a model whose keys and values do not fit into the latent."""
    if used_size(shape) > LATENT:
        raise LabError(
            f"{shape.kv_heads} KV heads of {shape.head_dim} do not fit into a latent of {LATENT}.",
            why=f"Their keys, but for the rotary one, and values are {used_size(shape)} numbers, and nothing is left out.",
            todo="Choose a target with fewer or smaller KV heads.",
        )


def split(shape: LlamaShape, qkv_XH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A layer's stacked projection as query [N, D, H], key [G, D, H] and value [G D, H], float32."""
    n, g, d = shape.heads, shape.kv_heads, shape.head_dim
    query, key, value = qkv_XH.float().split((n * d, g * d, g * d))
    return query.view(n, d, -1), key.view(g, d, -1), value


def pairs(rows: Tensor) -> Tensor:
    """Rows [..., D, H] as complex rows [..., F, H]: row f and row f + D/2 turn together (half-split rotary layout)."""
    first, second = rows.chunk(2, -2)
    return torch.complex(first, second)


def interleaved(rows: Tensor) -> Tensor:
    """Complex rows [..., F, H] as real rows [..., 2 F, H], real and imaginary part in turn (DeepSeek's rotary layout)."""
    return torch.stack((rows.real, rows.imag), -2).flatten(-3, -2)


# --- what the recipe is made of ---


def attention(shape: LlamaShape, query_NTD: Tensor, key_GTD: Tensor) -> Tensor:
    """Causal attention weights [N, T, T] of rotated queries and keys."""
    length = query_NTD.shape[1]
    repeated = key_GTD.repeat_interleave(shape.heads // shape.kv_heads, 0)
    scores = query_NTD @ repeated.transpose(1, 2) * shape.head_dim**-0.5
    return scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)


class Statistics:
    """Sums over calibration rows, for one layer."""

    def __init__(self, shape: LlamaShape, length: int) -> None:
        n, g, f = shape.heads, shape.kv_heads, shape.head_dim // 2
        self.shape = shape
        self.query_NF = torch.zeros(n, f)
        self.keys_FGG = torch.zeros(f, g, g, dtype=torch.complex64)
        self.first_FGG = torch.zeros_like(self.keys_FGG)
        self.distance_NT = torch.zeros(n, length)
        self.inputs: list[Tensor] = []
        self.tokens = 0
        self.rows = 0

    def add(self, layer: Layer, normed_BTH: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Take in the layer's normed input of some rows."""
        s = self.shape
        batch, length, _ = normed_BTH.shape
        qkv = F.linear(normed_BTH, layer.qkv.float()).view(batch, length, s.heads + 2 * s.kv_heads, s.head_dim).transpose(1, 2)
        query, key, _ = qkv.split((s.heads, s.kv_heads, s.kv_heads), 1)
        turning = pairs(key.transpose(2, 3))  # [B, G, F, T]
        self.query_NF += pairs(query.transpose(2, 3)).abs().pow(2).sum((0, 3))
        self.keys_FGG += torch.einsum("bgft,bhft->fgh", turning, turning.conj())
        self.first_FGG += torch.einsum("bgf,bhf->fgh", turning[..., 0], turning[..., 0].conj())
        lags = (torch.arange(length)[:, None] - torch.arange(length)).clamp(min=0).flatten()
        for row in range(batch):
            weights = attention(s, rotate(query[row], cos, sin), rotate(key[row], cos, sin))
            movable = weights * (1 - weights)
            movable[:, :, 0] = 0
            self.distance_NT.index_add_(1, lags, movable.flatten(1))
        self.inputs.append(normed_BTH.flatten(0, 1))
        self.tokens += batch * length
        self.rows += batch


def recipe(shape: LlamaShape, layer: Layer, found: Statistics, theta_F: Tensor) -> LayerRecipe:
    """The conversion of one layer, from what its calibration rows showed."""
    g, per = shape.kv_heads, shape.heads // shape.kv_heads
    strength_GF = found.query_NF.view(g, per, -1).sum(1)
    scale_GF = (strength_GF / strength_GF.mean(0)).sqrt()
    share = found.rows / found.tokens
    weight = max(SINK / share - 1, 0.0) if share < SINK else 0.0
    keys = found.keys_FGG + weight * found.first_FGG
    scales_FG = scale_GF.T.to(torch.complex64)
    _, vectors = torch.linalg.eigh(scales_FG[:, :, None] * keys * scales_FG[:, None, :])
    unitary = vectors.flip(-1)  # strongest first
    largest = unitary.abs().argmax(1, keepdim=True)
    unitary = unitary * (unitary.gather(1, largest).conj() / unitary.gather(1, largest).abs())  # one phase, so that results repeat
    turn = torch.polar(torch.ones(()), torch.arange(found.distance_NT.shape[1])[:, None] * theta_F)
    gamma = found.distance_NT.to(torch.complex64) @ turn / found.distance_NT.sum(1, keepdim=True)

    inputs = torch.cat(found.inputs)
    rows = used_rows(shape, layer, unitary, scale_GF)
    values = F.linear(inputs, rows)
    unit = values.pow(2).mean(0).sqrt().clamp(min=1e-6)
    gram = inputs.T @ inputs
    ridge = RIDGE * gram.diagonal().mean() * torch.eye(len(gram))
    constant = torch.linalg.solve(gram + ridge, inputs.sum(0))
    own = (values / unit).pow(2).sum(1)
    spare = F.linear(inputs, constant).pow(2) * (LATENT - len(rows))
    best = min(LEVELS, key=lambda level: _unsteady(own + level**2 * spare))
    rms = ((own + best**2 * spare) / LATENT).sqrt().mean()
    return LayerRecipe(
        torch.view_as_real(unitary).contiguous(), scale_GF, torch.view_as_real(gamma).contiguous(), unit, best * constant, rms
    )


def _unsteady(squares: Tensor) -> float:
    """Relative spread of the latent's RMS over tokens."""
    rms = squares.sqrt()
    return float(rms.std() / rms.mean())


def components(shape: LlamaShape, layer: Layer, unitary_FGC: Tensor, scale_GF: Tensor) -> Tensor:
    """The weighted keys' components as complex rows [C, F, H] of the layer's input."""
    _, key, _ = split(shape, layer.qkv)
    weighted = scale_GF[..., None] * pairs(key)  # [G, F, H]
    return torch.einsum("fgc,gfh->cfh", unitary_FGC.conj(), weighted)


def used_rows(shape: LlamaShape, layer: Layer, unitary_FGC: Tensor, scale_GF: Tensor) -> Tensor:
    """Rows [U, H] of the latent that hold something: components 2 to C, then values."""
    _, _, value = split(shape, layer.qkv)
    return torch.cat((interleaved(components(shape, layer, unitary_FGC, scale_GF)[1:]).flatten(0, 1), value))


# --- the converted layer ---


class MlaWeights(NamedTuple):
    """One MLA layer's attention, as `DeepseekV3ForCausalLM` names it (q_lora_rank None), float32 as converted."""

    q_proj: Tensor  # [N 2D, H]: for each head the latent part, then the rotary part
    kv_a_proj_with_mqa: Tensor  # [R + D, H]
    kv_a_layernorm: Tensor  # [R]
    kv_b_proj: Tensor  # [N 2D, R]: for each head the key, then the value
    o_proj: Tensor  # [H, N D]

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> MlaWeights:
        """The same weights on `device`, as `dtype`."""
        return MlaWeights(*(tensor.to(device, dtype) for tensor in self))


def corrected(weights: MlaWeights, correction: Mapping[str, Tensor]) -> MlaWeights:
    """`weights` with what healing learned: W + rms(W) up down, and the latent's norm times 1 + `norm`. Differentiable in `correction`."""
    if not correction:
        return weights
    found = {"kv_a_layernorm": weights.kv_a_layernorm * (1 + correction["norm"].float())}
    for name in MlaWeights._fields:
        if f"{name}.up" in correction:
            matrix = getattr(weights, name)
            change = correction[f"{name}.up"].float() @ correction[f"{name}.down"].float()
            found[name] = matrix + matrix.pow(2).mean().sqrt() * change
    return weights._replace(**found)


def convert(shape: LlamaShape, layer: Layer, made: LayerRecipe) -> MlaWeights:
    """One layer's attention in MLA form, healed if the recipe has a correction."""
    n, g, d, f = shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim // 2
    query, _, value = split(shape, layer.qkv)
    unitary, scale = made.unitary_FGC, made.scale_GF
    group = torch.arange(n) // (n // g)
    seen = pairs(query) * 2**0.5  # [N, F, H]
    turned = unitary[:, :, 0].T.conj()[group] / scale[group]  # [N, F]
    rotary = interleaved(turned[..., None] * seen)
    latent = interleaved(made.gamma_NF[..., None] * seen)
    q_proj = torch.cat((latent, rotary), 1).flatten(0, 1)

    parts = components(shape, layer, unitary, scale)
    used = used_rows(shape, layer, unitary, scale) / made.unit_U[:, None]
    spare = made.constant_H.expand(LATENT - len(used), -1)
    kv_a = torch.cat((used, spare, interleaved(parts[0])))

    back = torch.zeros(n, d, LATENT)
    mixing = unitary[:, :, 1:] / scale.T[:, :, None]  # [F, G, C - 1]: the groups' keys from components
    for component in range(g - 1):
        for frequency in range(f):
            at = (component * f + frequency) * 2
            factor = mixing[frequency, :, component][group]  # [N]
            real, imag = made.unit_U[at], made.unit_U[at + 1]
            back[:, 2 * frequency, at], back[:, 2 * frequency, at + 1] = factor.real * real, -factor.imag * imag
            back[:, 2 * frequency + 1, at], back[:, 2 * frequency + 1, at + 1] = factor.imag * real, factor.real * imag
    held = 2 * f * (g - 1)
    place = torch.arange(d)
    values = torch.zeros(n, d, LATENT)
    for head in range(n):
        columns = held + group[head] * d + place
        values[head, place, columns] = made.unit_U[columns]
    assert value.shape[0] == g * d
    norm, kv_b = made.rms.expand(LATENT).clone(), torch.cat((back, values), 1).flatten(0, 1)
    return corrected(MlaWeights(q_proj, kv_a, norm, kv_b, layer.out.float()), made.correction)


def mla_attention(shape: LlamaShape, weights: MlaWeights, normed_BTH: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """The heads' outputs [B, T, N D], before the output projection: DeepSeek-V3's formulas in plain PyTorch."""
    n, d = shape.heads, shape.head_dim
    batch, length, _ = normed_BTH.shape
    query = F.linear(normed_BTH, weights.q_proj.to(normed_BTH.dtype)).view(batch, length, n, 2 * d).transpose(1, 2)
    latent, rotary = F.linear(normed_BTH, weights.kv_a_proj_with_mqa.to(normed_BTH.dtype)).split((LATENT, d), -1)
    latent = rms_norm(latent, weights.kv_a_layernorm.to(normed_BTH.dtype), eps)
    both = F.linear(latent, weights.kv_b_proj.to(normed_BTH.dtype)).view(batch, length, n, 2 * d).transpose(1, 2)
    key, value = both.split(d, -1)
    turned = rotate_interleaved(rotary, cos, sin)[:, None].expand(-1, n, -1, -1)
    turned_query = rotate_interleaved(query[..., d:], cos, sin)
    asked, offered = torch.cat((query[..., :d], turned_query), -1), torch.cat((key, turned), -1)
    # values as wide as keys: only then torch takes its fused kernel, which is twice as fast on a CPU
    mixed = F.scaled_dot_product_attention(asked, offered, F.pad(value, (0, d)), is_causal=True)[..., :d]
    return mixed.transpose(1, 2).flatten(2)


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [..., T, D] whose pairs are neighbours; `cos`, `sin` [T, D / 2]."""
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)


# --- the whole model (see also `converted.py`) ---


@torch.no_grad()
def calibrate(target: Target, ids_BT: Tensor, say: Say) -> list[LayerRecipe]:
    """The recipe of every layer of `target` (float32), from rows of text that the model wrote itself; raises as `check_room` does."""
    shape = target.shape
    check_room(shape)
    length = ids_BT.shape[1]
    cos, sin = target.cos[:length], target.sin[:length]
    theta = shape.theta ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim)
    found = []
    x = F.embedding(ids_BT, target.embed_VH)
    for index, layer in enumerate(target.layers):
        statistics = Statistics(shape, length)
        statistics.add(layer, rms_norm(x, layer.norm_attn, shape.eps), cos, sin)
        found.append(recipe(shape, layer, statistics, theta))
        x = target.layer_forward(x, layer)
        say(f"layer {index + 1} of {shape.layers}")
    return found
