"""A converted model token by token is the one that runs over whole rows, and it survives being read from its files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lab.errors import LabError
from lab.train import heal, mla
from lab.train.converted import BLOCK, MlaTarget
from lab.train.target import Target

from .conftest import random_llama


@pytest.fixture(scope="module")
def recipe(grouped_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversion with a correction that does something."""
    target = Target.load(grouped_target, dtype=torch.float32)
    ids = torch.randint(3, target.shape.vocab, (4, 48), generator=torch.Generator().manual_seed(5))
    layers = mla.calibrate(target, ids, lambda _line: None)
    fresh = [heal.correction(mla.convert(target.shape, layer, made), 4, seed=1) for layer, made in zip(target.layers, layers, strict=True)]
    moved = [{name: (tensor.detach() + 0.02).to(torch.bfloat16) for name, tensor in found.items()} for found in fresh]
    layers = [dataclasses.replace(made, correction=found) for made, found in zip(layers, moved, strict=True)]
    path = tmp_path_factory.mktemp("recipe") / "r.safetensors"
    mla.save(path, layers, {})
    return path


def test_token_by_token_is_as_whole_rows(grouped_target: Path, recipe: Path) -> None:
    """Over the edge of a block of positions, where the attended part of the cache grows."""
    model = MlaTarget.read(grouped_target, recipe, dtype=torch.float32)
    ids = torch.randint(3, model.shape.vocab, (3, BLOCK + 6), generator=torch.Generator().manual_seed(6))
    _, whole = model.features(ids, (0,))
    decoder = model.decoder(*ids.shape)
    stepped = torch.stack([decoder.step(ids[:, position], position) for position in range(ids.shape[1])], 1)
    torch.testing.assert_close(model.logits(stepped), model.logits(whole), rtol=1e-3, atol=1e-3)
    original = Target.load(grouped_target, dtype=torch.float32)
    assert float((original.logits(original.features(ids, (0,))[1]) - model.logits(whole)).abs().max()) > 0.1, "it is another model"


def test_in_bf16_it_writes_what_it_scores(grouped_target: Path, recipe: Path) -> None:
    model = MlaTarget.read(grouped_target, recipe)
    ids = torch.randint(3, model.shape.vocab, (4, 24), generator=torch.Generator().manual_seed(7))
    exact = MlaTarget.read(grouped_target, recipe, dtype=torch.float32)
    decoder = model.decoder(*ids.shape)
    stepped = torch.stack([decoder.step(ids[:, position], position) for position in range(ids.shape[1])], 1)
    whole, wanted = model.logits(model.features(ids, (0,))[1]), exact.logits(exact.features(ids, (0,))[1])
    worst = float((whole - wanted).abs().mean())
    assert float((model.logits(stepped) - wanted).abs().mean()) < 1.5 * worst, "no worse than whole rows in BF16"


def test_a_layer_compiles_once_for_all(grouped_target: Path, recipe: Path) -> None:
    """Training compiles `layer_forward`: a second layer must not make a second graph."""
    from torch._dynamo.testing import CompileCounter

    model = MlaTarget.read(grouped_target, recipe, dtype=torch.float32)
    counter = CompileCounter()
    compiled = torch.compile(model.layer_forward, backend=counter, dynamic=False)
    x = torch.randn(2, 8, model.shape.hidden)
    with torch.no_grad():
        for layer in model.layers:
            torch.testing.assert_close(compiled(x, layer), model.layer_forward(x, layer))
    assert counter.frame_count == 1


def test_a_recipe_of_another_model_is_a_sentence(tiny_target: Path, recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="converts a model of 3 layers; the target has 6"):
        MlaTarget.read(tiny_target, recipe)
    with pytest.raises(LabError, match=r"does not fit the target.*Layer 0: gamma_NF2 is \[4, 8, 2\], not \[2, 8, 2\]"):
        MlaTarget.read(random_llama(tmp_path, layers=3, heads=2, groups=2, vocab=300), recipe)


@pytest.mark.parametrize(
    ("name", "changed", "told"),
    [
        ("0.healed.norm", None, "norm is missing"),
        ("1.healed.q_proj.up", None, "q_proj is missing"),
        ("2.healed.o_proj.down", torch.zeros(5, 64), "o_proj is missing"),
        ("0.healed.q_proj.up", torch.zeros(3, dtype=torch.int8), "RuntimeError"),
        ("1.constant_H", torch.zeros(2), r"constant_H is \[2\], not \[48\]"),
    ],
)
def test_a_correction_that_lacks_something_is_a_sentence(
    grouped_target: Path, recipe: Path, tmp_path: Path, name: str, changed: torch.Tensor | None, told: str
) -> None:
    tensors = load_file(recipe)
    tensors |= {"0.healed.q_proj.up.scale": torch.ones(4)}
    del tensors[name]
    save_file({**tensors, **({} if changed is None else {name: changed})}, tmp_path / "r.safetensors")
    with pytest.raises(LabError, match=told):
        MlaTarget.read(grouped_target, tmp_path / "r.safetensors")
