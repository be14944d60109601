"""A converted model whole: as training sees it, token by token as the corpus writes it, and how far it is from the original.

Token by token it runs in the absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1.2): a query is taken into the latent by the key half
of `kv_b_proj`, attention reads the cached latent itself, and the value half comes after. So the cache of a token and layer is one row of
R + D numbers for all heads, which is also what a server's MLA kernel keeps.

Shape suffixes as in `mla.py`; B rows, T positions, S = R + D.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.train.mla import LATENT, LayerRecipe, MlaWeights, convert, load, mla_attention, rotate_interleaved
from lab.train.target import Decoder, Layer, Target, rms_norm

BLOCK = 64  # positions by which the attended part of the cache grows: matrix kernels are slow at odd sizes


class MlaTarget(Target):
    """A converted model as training sees it: the same interface as `Target`."""

    def __init__(self, target: Target, weights: list[MlaWeights]) -> None:
        """`target` with the attention of `weights`, one a layer, on its device and of its type."""
        layers = [layer._replace(mla=found) for layer, found in zip(target.layers, weights, strict=True)]
        super().__init__(target.shape, layers, target.embed_VH, target.norm_H)

    @classmethod
    def of(cls, target: Target, recipes: list[LayerRecipe]) -> MlaTarget:
        """`target` (float32, on the CPU) as `recipes` convert it."""
        return cls(target, [convert(target.shape, layer, made) for layer, made in zip(target.layers, recipes, strict=True)])

    @classmethod
    def read(cls, folder: Path, recipe: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16) -> MlaTarget:
        """The checkpoint in `folder` as the file `recipe` converts it: computed in float32, then rounded, as a server's checkpoint is.

        Raises `LabError` for a recipe of another model.
        """
        exact = Target.load(folder, "cpu", torch.float32)
        made = load(recipe, exact.shape)
        weights = [convert(exact.shape, layer, one).to(device, dtype) for layer, one in zip(exact.layers, made, strict=True)]
        return cls(Target.load(folder, device, dtype), weights)

    def attention_forward(self, x_BTH: Tensor, layer: Layer) -> Tensor:
        """The residual stream after the layer's latent attention, over whole rows from position 0."""
        assert layer.mla is not None
        eps, length = self.shape.eps, x_BTH.shape[1]
        normed = rms_norm(x_BTH, layer.norm_attn, eps)
        mixed = mla_attention(self.shape, layer.mla, normed, self.cos[:length], self.sin[:length], eps)
        return x_BTH + F.linear(mixed, layer.mla.o_proj)

    def decoder(self, rows: int, length: int) -> Decoder:
        """Lockstep decoding by the converted model."""
        return MlaDecoder(self, rows, length)


class MlaDecoder(Decoder):
    """`Decoder` of a converted model. The cache is [layers][B, length, S]: 73 GB for 4,096 rows of 512 tokens of SmolLM2-135M in BF16."""

    def allocate(self, rows: int, length: int) -> None:
        """Make the cache, of whole blocks; zeros, since what is masked must still be a number."""
        s, like = self.target.shape, self.target.embed_VH
        length = (length + BLOCK - 1) // BLOCK * BLOCK
        self.latents = [like.new_zeros(rows, length, LATENT + s.head_dim) for _ in self.target.layers]
        #: Of each layer the halves of `kv_b_proj`: keys [N, D, R] and, turned over, values [N, R, D].
        self.absorbed: list[tuple[Tensor, Tensor]] = []
        for layer in self.target.layers:
            assert layer.mla is not None
            key, value = layer.mla.kv_b_proj.view(s.heads, 2, s.head_dim, LATENT).unbind(1)
            self.absorbed.append((key.contiguous(), value.transpose(1, 2).contiguous()))

    def attend(self, normed_BH: Tensor, index: int, position: int) -> Tensor:
        """What the latent attention of layer `index` adds to the residual stream [B, H]; the token's latent goes into the cache."""
        s, weights, (key_NDR, value_NRD) = self.target.shape, self.target.layers[index].mla, self.absorbed[index]
        assert weights is not None
        rows, d = len(normed_BH), s.head_dim
        cos, sin = self.target.cos[position], self.target.sin[position]
        latent, rotary = F.linear(normed_BH, weights.kv_a_proj_with_mqa).split((LATENT, d), -1)
        latent = F.rms_norm(latent, (LATENT,), weights.kv_a_layernorm, s.eps)
        self.latents[index][:, position] = torch.cat((latent, rotate_interleaved(rotary, cos, sin)), -1)
        query = F.linear(normed_BH, weights.q_proj).view(rows, s.heads, 2 * d)
        taken = torch.bmm(query[..., :d].transpose(0, 1), key_NDR).transpose(0, 1)
        asked_BNS = torch.cat((taken, rotate_interleaved(query[..., d:], cos, sin)), -1)
        seen_BTS = self.latents[index][:, : (position // BLOCK + 1) * BLOCK]
        scores_BNT = _products(asked_BNS, seen_BTS.transpose(1, 2)) * (2 * d) ** -0.5
        scores_BNT[..., position + 1 :] = -torch.inf
        mixed_BNR = torch.bmm(scores_BNT.softmax(-1).to(seen_BTS.dtype), seen_BTS[..., :LATENT])
        mixed_NBD = torch.bmm(mixed_BNR.transpose(0, 1), value_NRD)
        return F.linear(mixed_NBD.transpose(0, 1).reshape(rows, -1), weights.o_proj)


def _products(first: Tensor, second: Tensor) -> Tensor:
    """Batched matrix product as float32: a large score in BF16 would be off by several per cent of its probability."""
    if first.is_cuda and first.dtype == torch.bfloat16 and torch.version.hip is None:
        return torch.bmm(first, second, out_dtype=torch.float32)
    return torch.bmm(first, second).float()


@torch.no_grad()
def measure(original: Target, converted: Target, ids_BT: Tensor, rows: int = 4) -> dict[str, float]:
    """How far `converted` is from `original` on text: top-1 agreement, KL(original || converted) in nats, and the loss of both.

    Runs on the device of the two, `rows` rows at a time.
    """
    sums = torch.zeros(4, dtype=torch.float64)
    for part in ids_BT.to(original.embed_VH.device).split(rows):
        first, second = (model.logits(model.features(part, (0,))[1]).float().log_softmax(-1) for model in (original, converted))
        kl = (first.exp() * (first - second)).sum()
        agreed = (first.argmax(-1) == second.argmax(-1)).sum()
        truth = part[:, 1:, None]
        losses = [-scores[:, :-1].gather(-1, truth).sum() for scores in (first, second)]
        sums += torch.stack((kl, agreed.float(), *losses)).double().cpu()
    count, predicted = ids_BT.numel(), ids_BT[:, 1:].numel()
    return {
        "tokens": float(count),
        "top1_agreement": float(sums[1] / count),
        "kl_nats": float(sums[0] / count),
        "loss_original": float(sums[2] / predicted),
        "loss_converted": float(sums[3] / predicted),
    }
