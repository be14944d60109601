"""Shipped recipes: no error on their own hardware, with their files and without; every warning is expected, and every expected one
comes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lab import recipes
from lab.doctor import gather
from lab.doctor.expected import EXPECTED
from lab.doctor.files import Model
from lab.doctor.machine import Machine, assumed
from lab.doctor.rule import examine
from lab.doctor.subject import Subject
from lab.recipes.model import Recipe

from .made import CPU

CONFIGS = Path(__file__).parent.parent / "recipes" / "configs"
ALL = [recipes.get(name) for name in sorted(recipes.RECIPES)]


def machines(recipe: Recipe) -> list[Machine]:
    """Every machine that the recipe is for; one GPU of either vendor for the general ones."""
    if not recipe.hardware:
        return [CPU]
    named = [name for name in recipe.hardware if name.upper().startswith("MI")] or ["MI300X", "MI355X", "9.0"]
    return [assumed(name, base=CPU, why="a test") for name in named]


def lanes(recipe: Recipe) -> list[Subject]:
    return [
        gather.from_recipe(recipe, draft, tp=tp, machine=machine)
        for machine in machines(recipe)
        for draft in recipe.draft_choices()
        for tp in recipe.tp or (0,)
    ]


def with_files(subject: Subject) -> Subject:
    """The same lane with the minimal configurations that the recipes' own tests use, in the place of files that are not here."""

    def found(model: Model | None) -> Model | None:
        path = CONFIGS / f"{model.name.rpartition('/')[2]}.json" if model is not None else None
        if model is None or path is None or not path.exists():
            return model
        return replace(model, config=json.loads(path.read_text()), stand_in="tests", minimal=True)

    return replace(subject, target=found(subject.target), draft=found(subject.draft))


@pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: recipe.name)
def test_a_recipe_raises_no_error_and_only_expected_warnings(recipe: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))  # what somebody has downloaded must not decide
    raised: set[str] = set()
    for subject in lanes(recipe):
        for one in (subject, with_files(subject)):
            found = examine(one)
            assert [(each.rule, each.evidence) for each in found if each.level == "error"] == []
            raised |= {each.rule for each in found if each.level == "warning"}
    assert raised == set(EXPECTED[recipe.name])


def test_every_recipe_is_listed() -> None:
    assert set(EXPECTED) == set(recipes.RECIPES)
    assert all(reason for table in EXPECTED.values() for reason in table.values())


def test_the_default_recipe_on_this_machine() -> None:
    """Whatever this machine is: no error."""
    recipe = recipes.get("smollm2")
    for draft in recipe.draft_choices():
        found = examine(gather.from_recipe(recipe, draft, machine=gather.machine_for("cpu", None)))
        assert [(one.rule, one.evidence) for one in found if one.level == "error"] == []


def test_recipes_that_are_broken_on_purpose_are_found() -> None:
    """The same machinery must be able to fail: the published Kimi line with a block size of one, and MiniMax on eight GPUs without EP."""
    kimi = gather.from_recipe(recipes.get("kimi-k2.5"), "bf16", machine=assumed("MI355X", base=CPU, why="a test"))
    line = replace(kimi.line, flags={**kimi.line.flags, "block-size": "1"})
    assert "block-size" in {one.rule for one in examine(replace(kimi, line=line)) if one.level == "error"}
    minimax = gather.from_recipe(recipes.get("minimax-m2.5"), "none", tp=8, machine=assumed("MI355X", base=CPU, why="a test"))
    flags = {name: value for name, value in minimax.line.flags.items() if name != "enable-expert-parallel"}
    found = examine(replace(minimax, line=replace(minimax.line, flags=flags)))
    assert "fp8-block-split" in {one.rule for one in found if one.level == "error"}
