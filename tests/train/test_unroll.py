"""The training-time test against the draft run one token at a time, as an engine runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lab.train.draft import Draft, DraftShape, draft_vocabulary
from lab.train.target import Target, rms_norm, rotary_table, rotate
from lab.train.unroll import Attention, unroll, visible

LENGTH, STEPS = 12, 4


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return Target.load(tiny_target, dtype=torch.float32)


@pytest.fixture
def draft(target: Target) -> Draft:
    torch.manual_seed(3)
    made = Draft(target.shape, DraftShape((2, 3, 5), vocab=40, intermediate=64), torch.arange(0, 80, 2))
    made.scale_F.uniform_(0.5, 2.0)
    return made


def one_by_one(draft: Draft, embed_TH: Tensor, features_TF: Tensor, start: int, steps: int) -> list[Tensor]:
    """Normed outputs of drafting `steps` tokens when real features are known for columns 0..start: a plain loop with a key list."""
    shape = draft.target_shape
    cos, sin = rotary_table(LENGTH, shape.head_dim, shape.theta, "cpu")
    keys: list[Tensor] = []
    values: list[Tensor] = []
    outputs = []
    feature = draft.combine(features_TF)
    hidden = torch.zeros(shape.hidden)
    for column in range(start + steps):
        h = feature[column] if column <= start else hidden
        joined = torch.cat((rms_norm(embed_TH[column], draft.input_layernorm, shape.eps), rms_norm(h, draft.hidden_norm, shape.eps)))
        query = rotate((draft.q_proj @ joined).view(-1, shape.head_dim), cos[column], sin[column])
        keys.append(rotate((draft.k_proj @ joined).view(-1, shape.head_dim), cos[column], sin[column]))
        values.append((draft.v_proj @ joined).view(-1, shape.head_dim))
        repeat = shape.heads // shape.kv_heads
        key, value = (torch.stack(part).repeat_interleave(repeat, 1) for part in (keys, values))
        weights = (torch.einsum("nd,tnd->nt", query, key) * shape.head_dim**-0.5).softmax(-1)
        hidden = h + draft.o_proj @ torch.einsum("nt,tnd->nd", weights, value).flatten()
        normed = rms_norm(hidden, draft.post_attention_layernorm, shape.eps)
        hidden = hidden + draft.down_proj @ (F.silu(draft.gate_proj @ normed) * (draft.up_proj @ normed))
        if column >= start:
            outputs.append(draft.head_input(hidden))
    return outputs


def test_every_column_of_every_step_is_what_drafting_would_compute(draft: Draft) -> None:
    embed = torch.randn(1, LENGTH, draft.target_shape.hidden, generator=torch.Generator().manual_seed(4))
    features = torch.randn(1, LENGTH, 3 * draft.target_shape.hidden, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        outputs = unroll(draft, embed, features, Attention(LENGTH, STEPS, "cpu"), STEPS)
        for start in range(LENGTH - STEPS + 1):
            expected = one_by_one(draft, embed[0], features[0], start, STEPS)
            for step in range(STEPS):
                torch.testing.assert_close(outputs[step][0, start + step], expected[step], rtol=1e-4, atol=1e-5)


def test_a_query_sees_one_key_more_each_step() -> None:
    grid = visible(2, 8, torch.arange(8)[:, None], torch.arange(24))
    seen = [torch.nonzero(grid[5])[:, 0].tolist()]
    assert seen == [[0, 1, 2, 3, 8 + 4, 16 + 5]]


def test_checkpoint_round_trip_folds_the_feature_scale(draft: Draft, target: Target, tmp_path: Path) -> None:
    draft.export(tmp_path)
    loaded = Draft.load(tmp_path, target.shape)
    features = torch.randn(7, 3 * target.shape.hidden)
    torch.testing.assert_close(loaded.combine(features), draft.combine(features), rtol=2e-2, atol=2e-2)
    assert torch.equal(loaded.kept, draft.kept)
    assert torch.equal(loaded.t2d, draft.t2d)
    assert loaded.scale_F.eq(1).all()


def test_draft_vocabulary_keeps_the_frequent_and_the_named() -> None:
    counts = torch.tensor([0, 9, 1, 7, 0, 8, 2])
    kept = draft_vocabulary(counts, 4, always=(4,))
    assert kept.tolist() == [1, 3, 4, 5]
    assert ((kept - torch.arange(4)) >= 0).all()
