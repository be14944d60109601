"""Healing: the error falls, the shipped form is what was trained, and a run goes on where it stopped."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from lab.errors import LabError
from lab.train import deepseek, heal, heal_whole, mla
from lab.train.converted import MlaTarget, measure
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
    for name in mla.MlaWeights._fields:
        torch.testing.assert_close(getattr(now, name), getattr(converted[0], name), rtol=0, atol=0)


def test_the_model_comes_nearer_to_the_original(
    target: Target, layers: list[mla.LayerRecipe], recipes: list[mla.LayerRecipe], healed: tuple
) -> None:
    """On each layer's held-out rows, and as a whole on text that healing did not see."""
    for before, after in healed[1]:
        assert after < before
    unseen = torch.randint(3, target.shape.vocab, (4, 48), generator=torch.Generator().manual_seed(6))
    was, now = (measure(target, MlaTarget.of(target, made), unseen) for made in (layers, recipes))
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
        exact = [mla.convert(target.shape, layer, one) for layer, one in zip(target.layers, made, strict=True)]
        student = MlaTarget(target, [one.to("cpu", torch.bfloat16).to("cpu") for one in exact])  # as the checkpoint rounds
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


@pytest.fixture(scope="module")
def texts(target: Target) -> list[tuple[torch.Tensor, float]]:
    """Two texts of different length."""
    random = torch.Generator().manual_seed(8)
    return [(torch.randint(3, target.shape.vocab, size, generator=random), share) for size, share in (((28, 48), 0.8), ((12, 96), 0.2))]


WHOLE = heal_whole.WholePlan(steps=60, tokens=288, rate=1e-2, warmup=4, rank=10, chunk=100, record_every=10, save_every=20)


def whole(
    target: Target, converted: list[mla.MlaWeights], healed: tuple, texts: list, folder: Path, plan: heal_whole.WholePlan = WHOLE
) -> heal_whole.WholeHealing:
    return heal_whole.WholeHealing(target, converted, healed[0], texts, plan, folder, lambda _line: None)


def interrupted() -> torch.Tensor:
    """The first step compiles for a minute, and somebody presses Ctrl-C."""
    raise KeyboardInterrupt


def test_balancing_changes_no_model(converted: list[mla.MlaWeights], healed: tuple) -> None:
    was, now = healed[0][1], heal_whole.balanced(healed[0][1])
    for before, after in zip(mla.corrected(converted[1], was), mla.corrected(converted[1], now), strict=True):
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    wider = heal_whole.balanced(was, 12)
    assert wider["kv_b_proj.down"].shape[0] == 12
    for before, after in zip(mla.corrected(converted[1], now), mla.corrected(converted[1], wider), strict=True):
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
    up, down = now["q_proj.up"], now["q_proj.down"]
    torch.testing.assert_close(up.norm(), down.norm(), rtol=1e-4, atol=0)


def test_the_whole_model_heals_further_than_layer_by_layer(
    target: Target, converted: list, layers: list, recipes: list, healed: tuple, texts: list, tmp_path: Path
) -> None:
    """On text that neither stage saw, with the factors as they are shipped."""
    run = whole(target, converted, healed, texts, tmp_path)
    assert run.run()
    (_, first), *_, (last, end) = run.curve
    assert last == 60
    assert all(now < was for was, now in zip(first, end, strict=True))
    unseen = torch.randint(3, target.shape.vocab, (4, 48), generator=torch.Generator().manual_seed(6))
    better = [dataclasses.replace(made, correction=found) for made, found in zip(layers, run.found(), strict=True)]
    was, now = (measure(target, MlaTarget.of(target, made), unseen) for made in (recipes, better))
    assert now["kl_nats"] < 0.95 * was["kl_nats"]


def test_eight_bits_hold_a_correction(converted: list, layers: list, healed: tuple, tmp_path: Path) -> None:
    """A file has what was measured, again and again, at half the size; what is lost is as little as BF16 loses of the whole matrix."""
    exact = heal_whole.balanced(healed[0][0])
    held = mla.unpacked(mla.packed(exact))
    for name in ("one", "two"):
        mla.save(tmp_path / name, [dataclasses.replace(layers[0], correction=held)], {})
        held = mla.load(tmp_path / name)[0].correction
        assert {"norm", "q_proj.up", "q_proj.down"} < set(held)
    stored = load_file(tmp_path / "two")
    assert stored["0.healed.q_proj.up"].dtype == torch.int8
    for wanted, found in zip(mla.corrected(converted[0], exact), mla.corrected(converted[0], held), strict=True):
        lost = (found - wanted).norm()
        assert lost <= 2 * (wanted.to(torch.bfloat16).float() - wanted).norm()


def test_chunks_of_scores_add_up(target: Target, converted: list, healed: tuple, texts: list, tmp_path: Path) -> None:
    """Loss and gradient are those of one pass, and a fresh run says what `measure` says of its start, but for BF16."""
    found = []
    for place, chunk in (("a", 100), ("b", 4096)):
        run = whole(target, converted, healed, texts, tmp_path / place, dataclasses.replace(WHOLE, chunk=chunk))
        found.append((run.loss(texts[0][0][:6], learn=True), run.corrections[0]["q_proj.up"].grad))
    for parts, at_once in zip(*found, strict=True):
        torch.testing.assert_close(parts, at_once, rtol=1e-3, atol=1e-6)


def test_an_interrupted_whole_run_ends_as_a_straight_one(
    target: Target, converted: list, healed: tuple, texts: list, tmp_path: Path
) -> None:
    plan = dataclasses.replace(WHOLE, steps=6)
    straight = whole(target, converted, healed, texts, tmp_path / "straight", plan)
    assert straight.run()
    stopped = whole(target, converted, healed, texts, tmp_path / "stopped", plan)
    stopped.train_step = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    stopped = whole(target, converted, healed, texts, tmp_path / "stopped", plan)
    assert not stopped.run(budget=0)
    assert stopped.step == 1
    again = whole(target, converted, healed, texts, tmp_path / "stopped", plan)
    assert (again.step, again.run()) == (1, True)
    assert [step for step, _ in again.curve] == [step for step, _ in straight.curve]
    for one, other in zip(again.parameters(), straight.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    with pytest.raises(LabError, match="other settings, start or text"):
        whole(target, converted, healed, texts[:1], tmp_path / "stopped", plan)
    with pytest.raises(LabError, match="rows of 48 tokens"):
        whole(target, converted, healed, [(texts[0][0][:6], 1.0)], tmp_path / "few", plan)


def test_stopped_while_the_last_step_is_recorded_the_curve_still_ends_there(
    target: Target, converted: list, healed: tuple, texts: list, tmp_path: Path
) -> None:
    """The card takes what the run achieved from the curve's end."""
    plan = dataclasses.replace(WHOLE, steps=3)
    stopped = whole(target, converted, healed, texts, tmp_path, plan)
    stopped.record([])
    stopped.held_out = interrupted  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        stopped.run()
    again = whole(target, converted, healed, texts, tmp_path, plan)
    assert (again.step, again.run()) == (3, True)
    assert [step for step, _ in again.curve] == [0, 3]


def test_a_full_disk_is_a_sentence(target: Target, converted: list, healed: tuple, texts: list, tmp_path: Path, monkeypatch: Any) -> None:
    """Wherever a run keeps something."""

    def full(self: Path, content: object) -> int:  # noqa: ARG001
        raise OSError(errno.ENOSPC, "No space left on device")

    run = whole(target, converted, healed, texts, tmp_path / "whole")
    layers = tmp_path / "layers"
    layers.mkdir()
    (layers / "plan.json").write_text((healed[2] / "plan.json").read_text())
    monkeypatch.setattr(Path, "write_bytes", full)
    ids = torch.randint(3, target.shape.vocab, (24, 48), generator=torch.Generator().manual_seed(5))
    for keeps in (run.save, lambda: heal.heal(target, converted, ids, PLAN, layers, lambda _line: None)):
        with pytest.raises(LabError, match=r"no space left on the disk.*--work"):
            keeps()
    assert not list((tmp_path / "whole").iterdir())
    assert [path.name for path in layers.iterdir()] == ["plan.json"]


def test_time_ends_a_run_with_its_rate_at_zero(
    target: Target, converted: list, healed: tuple, texts: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which a step takes a second; and a run that goes on has the time that is left, not all of it again."""
    monkeypatch.setattr(heal_whole, "time", SimpleNamespace(monotonic=map(float, itertools.count()).__next__))
    plan = dataclasses.replace(WHOLE, steps=100_000, seconds=20)
    first = whole(target, converted, healed, texts, tmp_path, plan)
    assert not first.run(budget=7)
    rest = whole(target, converted, healed, texts, tmp_path, plan)
    assert rest.seconds == first.seconds > 0
    assert rest.run()
    assert rest.seconds == 20
    assert first.step < rest.step <= 20
    assert rest.optimiser.param_groups[0]["lr"] == pytest.approx(WHOLE.rate / 20 / WHOLE.cooldown)
