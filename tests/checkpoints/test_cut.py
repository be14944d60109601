"""Cutting a feature level: exactly its columns become zero, nothing else changes, and what cannot be cut is said."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lab import checkpoints, recipes
from lab.checkpoints.cut import Fc, cut, find_fc, levels
from lab.errors import LabError
from lab.recipes.model import LEVELS, Asset, Checkpoint, Level
from lab.recipes.variants import level_of, with_folder, without_level

H = 8


def draft(folder: Path, *, columns: int = 3 * H, name: str = "fc.weight", dtype: str = "float16", **config) -> Path:
    folder.mkdir()
    random = np.random.default_rng(0)
    tensors = {name: random.normal(size=(H, columns)).astype(dtype), "norm.weight": np.ones(H, dtype), "d2t": np.arange(5)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": H, **config}))
    (folder / "eagle3-lab.json").write_text("{}")
    return folder


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["fc.weight", "model.fc.weight"])
def test_a_levels_columns_are_zero_and_nothing_else_changes(tmp_path: Path, level: Level, name: str) -> None:
    source, output = draft(tmp_path / "draft", name=name), tmp_path / "cut"
    output.mkdir()
    cut(source, output, level, lambda _text: None)
    before, after = load_file(source / "model.safetensors"), load_file(output / "model.safetensors")
    first = LEVELS.index(level) * H
    expected = before[name].copy()
    expected[:, first : first + H] = 0
    assert np.array_equal(after[name], expected)
    assert np.count_nonzero(after[name]) == 2 * H * H
    assert all(np.array_equal(before[other], after[other]) for other in before if other != name)
    assert sorted(path.name for path in output.iterdir()) == ["config.json", "model.safetensors"], "the lab's own marker stays behind"


def test_it_is_made_once_in_the_cache_and_anew_when_the_draft_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_LAB_CACHE", str(tmp_path / "cache"))
    source = draft(tmp_path / "draft")
    whole = Checkpoint("mine", Asset(str(source)))
    recipe = without_level(dataclasses.replace(recipes.get("smollm2"), drafts={"bf16": whole}), "bf16", "middle")
    said: list[str] = []
    folder = Path(checkpoints.ensure(recipe.drafts["bf16"], said.append))
    assert folder == tmp_path / "cache/checkpoints/mine-without-middle"
    checkpoints.ensure(recipe.drafts["bf16"], said.append)
    assert len(said) == 1
    weights = load_file(source / "model.safetensors")
    weights["fc.weight"] = weights["fc.weight"] * 2
    save_file(weights, source / "model.safetensors")
    checkpoints.ensure(recipe.drafts["bf16"], said.append)
    assert len(said) == 2
    assert np.array_equal(load_file(folder / "model.safetensors")["fc.weight"][:, :H], weights["fc.weight"][:, :H])


def test_variants_have_names_and_labels_of_their_own(tmp_path: Path) -> None:
    from lab.serving.command import Lane

    recipe = recipes.get("smollm2")
    keys = {Lane(without_level(recipe, "bf16", level), "bf16", 3).key for level in LEVELS} | {Lane(recipe, "bf16", 3).key}
    assert len(keys) == 4
    assert Lane(without_level(recipe, "bf16", "low"), "bf16", 3).label == "Eagle3 BF16 without low level, K=3, eager"
    folders = [with_folder(recipe, tmp_path / parent / "draft", "bf16") for parent in ("a", "b")]
    assert folders[0].name != folders[1].name
    assert folders[0].variant == "draft"
    with pytest.raises(LabError, match="no draft 'fp8'"):
        without_level(dataclasses.replace(recipe, drafts={}), "fp8", "low")
    with pytest.raises(LabError, match="no feature level"):
        level_of("lowest")


def test_what_cannot_be_cut_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_LAB_CACHE", str(tmp_path / "cache"))

    def attempt(folder: Path) -> None:
        recipe = dataclasses.replace(recipes.get("smollm2"), drafts={"bf16": Checkpoint("mine", Asset(str(folder)))})
        checkpoints.ensure(without_level(recipe, "bf16", "low").drafts["bf16"])

    with pytest.raises(LabError, match=r"does not join three feature levels.*8 columns for 1 level"):
        attempt(draft(tmp_path / "one", columns=H))
    with pytest.raises(LabError, match="no feature levels that could be cut off"):
        attempt(draft(tmp_path / "none", name="other.weight"))
    short = draft(tmp_path / "short")
    (short / "model.safetensors").write_bytes((short / "model.safetensors").read_bytes()[:-400])
    with pytest.raises(LabError, match="damaged or cut short"):
        attempt(short)
    (short / "model.safetensors").write_bytes(b"PK\x03\x04 not a tensor file")
    with pytest.raises(LabError, match="damaged or no safetensors file"):
        attempt(short)
    assert not [path for path in (tmp_path / "cache/checkpoints").iterdir() if not path.name.endswith(".lock")]
    (short / "config.json").write_text('{"transformer_layer_config": null}')  # as some exporters write what is not there
    assert levels(short, Fc(short / "model.safetensors", 0, H, 3 * H, 2)) == 3
    with pytest.raises(LabError, match=r"no \.safetensors"):
        find_fc(tmp_path)
