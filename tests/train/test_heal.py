"""Healing: the error falls, the shipped form is what was trained, and a run goes on where it stopped."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from lab.errors import LabError
from lab.train import deepseek, heal, mla
from lab.train.target import Target

PLAN = heal.HealPlan(rank=8, steps=120, rows=6, rate=4e-3, held_out=2)


@pytest.fixture(scope="module")
def target(grouped_target: Path) -> Target:
    return Target.load(grouped_target, dtype=torch.float32)


@pytest.fixture(scope="module")
def ids(target: Target) -> torch.Tensor:
    return torch.randint(3, target.shape.vocab, (24, 48), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def layers(target: Target, ids: torch.Tensor) -> list[mla.LayerRecipe]:
    return mla.calibrate(target, ids[:4], lambda _line: None)


@pytest.fixture(scope="module")
def converted(target: Target, layers: list[mla.LayerRecipe]) -> list[mla.MlaWeights]:
    return [mla.convert(target.shape, layer, made) for layer, made in zip(target.layers, layers, strict=True)]


@pytest.fixture(scope="module")
def healed(
    target: Target, converted: list[mla.MlaWeights], ids: torch.Tensor, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, torch.Tensor]], list[tuple[float, float]], Path]:
    folder = tmp_path_factory.mktemp("heal")
    return *heal.heal(target, converted, ids, PLAN, folder, lambda _line: None), folder


@pytest.fixture(scope="module")
def recipes(layers: list[mla.LayerRecipe], healed: tuple[list[dict[str, torch.Tensor]], object, object]) -> list[mla.LayerRecipe]:
    return [dataclasses.replace(made, correction=found) for made, found in zip(layers, healed[0], strict=True)]


def test_a_fresh_correction_changes_nothing(converted: list[mla.MlaWeights]) -> None:
    now = mla.corrected(converted[0], heal.correction(converted[0], 4, seed=1))
    for name in mla.MlaWeights.__dataclass_fields__:
        torch.testing.assert_close(getattr(now, name), getattr(converted[0], name), rtol=0, atol=0)


def test_the_model_comes_nearer_to_the_original(
    target: Target, layers: list[mla.LayerRecipe], recipes: list[mla.LayerRecipe], healed: tuple
) -> None:
    """On each layer's held-out rows, and as a whole on text that healing did not see."""
    for before, after in healed[1]:
        assert after < before
    unseen = torch.randint(3, target.shape.vocab, (4, 48), generator=torch.Generator().manual_seed(6))
    was, now = (mla.measure(target, mla.MlaTarget(target, made), unseen) for made in (layers, recipes))
    assert now["kl_nats"] < 0.9 * was["kl_nats"]


def test_the_error_of_the_first_token_does_not_drown_the_rest() -> None:
    """Tokens count by their own size: a token a thousand times larger with the same relative error adds the same."""
    wanted = torch.ones(1, 2, 4)
    wanted[0, 0] *= 1000
    both = heal.error(wanted * 1.1, wanted)
    torch.testing.assert_close(both, torch.tensor(0.1), rtol=1e-4, atol=0)
    few = wanted.repeat(1, 50, 1)
    lost = few.clone()
    lost[0, 3] *= 11  # ten times its size off: a twentieth of what squares would make of it
    assert float(heal.error(lost, few)) == pytest.approx(0.1, rel=0.01)


def test_the_checkpoint_is_the_healed_model(
    grouped_target: Path, target: Target, ids: torch.Tensor, recipes: list[mla.LayerRecipe], tmp_path: Path
) -> None:
    """Saved, read, merged and loaded by transformers' DeepSeek-V3: the logits are the ones that were measured here."""
    from transformers import AutoModelForCausalLM

    mla.save(tmp_path / "r.safetensors", recipes, {})
    read = mla.load(tmp_path / "r.safetensors")
    tensors = deepseek.checkpoint(load_file(grouped_target / "model.safetensors"), target.shape, target.layers, read)
    save_file({name: tensor.float() for name, tensor in tensors.items()}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(deepseek.config(json.loads((grouped_target / "config.json").read_text()))))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)

    def rounded(made: list[mla.LayerRecipe]) -> torch.Tensor:
        student = mla.MlaTarget(target, made)
        for key, weights in student.mla.items():  # as the checkpoint rounds
            named = {name: getattr(weights, name).to(torch.bfloat16).float() for name in mla.MlaWeights.__dataclass_fields__}
            student.mla[key] = mla.MlaWeights(**named)
        return student.logits(student.features(ids, (0,))[1])

    with torch.no_grad():
        expected = reference(ids).logits
        torch.testing.assert_close(rounded(recipes), expected, rtol=1e-3, atol=1e-3)
        unhealed = rounded([dataclasses.replace(made, correction={}) for made in recipes])
    assert float((unhealed - expected).abs().max()) > 0.01, "this would not have noticed a correction that was left out"


def test_an_interrupted_run_goes_on_with_the_next_layer(
    target: Target, converted: list[mla.MlaWeights], ids: torch.Tensor, healed: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []
    one: Callable = heal.heal_layer

    def spy(target: Target, layer: object, *rest: object) -> object:
        if len(trained) == 2 and not (tmp_path / "again").exists():
            raise KeyboardInterrupt
        trained.append(layer)
        return one(target, layer, *rest)

    monkeypatch.setattr(heal, "heal_layer", spy)
    with pytest.raises(KeyboardInterrupt):
        heal.heal(target, converted, ids, PLAN, tmp_path, lambda _line: None)
    assert len(list(tmp_path.glob("layer-*"))) == 2
    with pytest.raises(LabError, match="other settings"):
        heal.heal(target, converted, ids, dataclasses.replace(PLAN, steps=1), tmp_path, lambda _line: None)
    (tmp_path / "again").touch()
    found, errors = heal.heal(target, converted, ids, PLAN, tmp_path, lambda _line: None)
    assert trained == list(target.layers)
    for again, straight in zip(found, healed[0], strict=True):
        for name, tensor in straight.items():
            torch.testing.assert_close(again[name], tensor)
    assert errors == healed[1]
    assert F.cosine_similarity(found[0]["norm"].float(), found[1]["norm"].float(), 0) < 0.99, "one layer's correction for all"
