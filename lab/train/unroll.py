"""The training-time test: the draft trained on its own outputs, as it will run (Li et al. 2025, EAGLE-3, section 3).

Step 0 sees real features; step j sees, at column t, the token t + 1 and the draft's own hidden output of step j - 1 at column t - 1. Its
query attends to the keys of step 0 at columns up to t - j (real features were known only so far) and to the key of each later step i at
column t - j + i: one more key a step, on a diagonal. Column t predicts token t + 2, so one target distribution serves all steps.

On a GPU this is one flex-attention call over the concatenated keys with a block mask; elsewhere a dense mask with the same rule.

Shape suffixes as in `draft.py`; J unrolled steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.train.draft import Draft
from lab.train.target import rms_norm, rotary_table, rotate


def visible(step: int, length: int, query: Tensor, key: Tensor) -> Tensor:
    """Whether column `query` of `step` may see `key`, an index into the keys of steps 0..step laid end to end (`length` each)."""
    source, column = key // length, key % length
    real = (source == 0) & (column <= query - step)
    own = (source > 0) & (column == query - step + source)
    return real | own


class Attention:
    """Attention of every unrolled step for rows of one `length`."""

    def __init__(self, length: int, steps: int, device: torch.device | str) -> None:
        self.length = length
        self.fused = torch.device(device).type == "cuda"
        self.masks: list = []
        for step in range(steps):
            if self.fused:
                from torch.nn.attention.flex_attention import create_block_mask

                def rule(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor, step: int = step) -> Tensor:
                    return visible(step, length, query, key)

                self.masks.append(create_block_mask(rule, None, None, length, (step + 1) * length, device=device))
            else:
                grid = partial(visible, step, length)
                self.masks.append(grid(torch.arange(length, device=device)[:, None], torch.arange((step + 1) * length, device=device)))

    def __call__(self, step: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [B, N, T, D]; key, value [B, G, (step + 1) T, D]; returns [B, N, T, D]."""
        if self.fused:
            from torch.nn.attention.flex_attention import flex_attention

            return flex_attention(query, key, value, block_mask=self.masks[step], enable_gqa=True)
        # Columns before `step` see no key at all: the mask lets them see their own, and nobody reads them.
        mask = self.masks[step]
        mask = mask | (~mask.any(1, keepdim=True) & (torch.arange(mask.shape[1], device=mask.device) == 0))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def unroll(draft: Draft, embed_BTH: Tensor, features_BTF: Tensor, attend: Callable[..., Tensor], steps: int) -> list[Tensor]:
    """Normed hidden states [B, T, H] of each step. `embed_BTH` at column t is the embedding of token t + 1."""
    target = draft.target_shape
    length = embed_BTH.shape[1]
    cos, sin = rotary_table(length, target.head_dim, target.theta, embed_BTH.device)
    hidden = draft.combine(features_BTF)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    outputs = []
    token = rms_norm(embed_BTH, draft.input_layernorm, target.eps)
    for step in range(steps):
        if step:
            hidden = F.pad(hidden[:, :-1], (0, 0, 1, 0))
        joined = torch.cat((token.to(hidden.dtype), rms_norm(hidden, draft.hidden_norm, target.eps).to(hidden.dtype)), -1)

        def heads(weight: Tensor, joined: Tensor = joined) -> Tensor:
            return F.linear(joined, weight).unflatten(-1, (-1, target.head_dim)).transpose(1, 2)

        query = rotate(heads(draft.q_proj), cos, sin)
        keys.append(rotate(heads(draft.k_proj), cos, sin))
        values.append(heads(draft.v_proj))
        mixed = attend(step, query, torch.cat(keys, 2), torch.cat(values, 2)).transpose(1, 2).flatten(2)
        hidden = hidden + F.linear(mixed, draft.o_proj)
        normed = rms_norm(hidden, draft.post_attention_layernorm, target.eps).to(hidden.dtype)
        hidden = hidden + F.linear(F.silu(F.linear(normed, draft.gate_proj)) * F.linear(normed, draft.up_proj), draft.down_proj)
        outputs.append(draft.head_input(hidden).to(hidden.dtype))
    return outputs
