"""Variants of a recipe that differ from it in the draft alone: another folder, or a draft that cannot see one of the target's levels.

A variant has a name and a label of its own, so that its lanes, traces and files are never taken for the recipe's.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from lab.errors import LabError
from lab.recipes.model import LEVELS, Asset, Checkpoint, Cut, Level, Precision, Recipe


def without_level(recipe: Recipe, precision: Precision, level: Level) -> Recipe:
    """The recipe with one draft, which cannot see the target's `level`; raises `LabError` where the recipe has no such draft."""
    if precision not in recipe.drafts:
        raise LabError(f"Recipe '{recipe.name}' has no draft '{precision}'.", todo=f"It offers: {', '.join(recipe.drafts)}.")
    whole = recipe.drafts[precision]
    cut = Checkpoint(f"{whole.name}-without-{level}", Cut(whole, level))
    label = f"{recipe.variant or precision.upper()} without {level} level"
    return replace(recipe, name=f"{recipe.name}-{precision}-without-{level}", drafts={precision: cut}, variant=label)


def with_folder(recipe: Recipe, folder: Path, precision: Precision) -> Recipe:
    """The recipe with the draft checkpoint in `folder` as its only one, served as it lies there."""
    place = folder.resolve()
    digest = hashlib.sha256(str(place).encode()).hexdigest()[:6]  # two folders may have the same last name
    name = f"{place.name}-{digest}"
    draft = Checkpoint(name, Asset(str(place)))
    return replace(recipe, name=f"{recipe.name}-with-{name}", drafts={precision: draft}, variant=place.name)


def level_of(text: str) -> Level:
    """`text` as one of the three levels; raises `LabError` for anything else."""
    for level in LEVELS:
        if text == level:
            return level
    raise LabError(f"'{text}' is no feature level.", todo=f"Choose from {', '.join(LEVELS)}.")
