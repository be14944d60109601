"""The batched target against transformers, and lockstep decoding against the whole-row forward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lab.errors import LabError
from lab.train.target import Decoder, LlamaShape, Target


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return Target.load(tiny_target, dtype=torch.float32)


def test_logits_and_features_are_those_of_transformers(tiny_target: Path, target: Target) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    ids = torch.randint(3, target.shape.vocab, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(ids, output_hidden_states=True)
    features, hidden = target.features(ids, (2, 3, 5))
    torch.testing.assert_close(target.logits(hidden), expected.logits, rtol=1e-4, atol=1e-4)
    # vLLM's layer id n is the input of layer n: entry n of transformers' hidden states.
    wanted = torch.cat([expected.hidden_states[level] for level in (2, 3, 5)], -1)
    torch.testing.assert_close(features, wanted, rtol=1e-4, atol=1e-4)


def test_lockstep_decoding_equals_the_whole_row(target: Target) -> None:
    ids = torch.randint(3, target.shape.vocab, (5, 17), generator=torch.Generator().manual_seed(2))
    _, expected = target.features(ids, (0,))
    decoder = Decoder(target, 5, 17)
    for position in range(17):
        torch.testing.assert_close(decoder.step(ids[:, position], position), expected[:, position], rtol=1e-4, atol=1e-4)


def test_default_levels_are_vllms() -> None:
    shape = LlamaShape(576, 30, 9, 3, 64, 1536, 49152, 1e-5, 1e5, 8192)
    assert shape.default_levels() == (2, 15, 27)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(LabError, match="no Llama checkpoint"):
        LlamaShape.read(tmp_path)
