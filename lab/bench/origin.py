"""Where a measurement came from: what `lab.provenance` knows, and the recipe, lanes, weights and prompts behind the numbers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lab import checkpoints, provenance
from lab.bench.prompts import PromptFile
from lab.errors import LabError
from lab.recipes.model import Asset, Checkpoint, QuarkFp8, Recipe
from lab.serving.command import Lane


def with_draft(recipe: Recipe, folder: Path | None) -> Recipe:
    """The recipe with the Eagle3 draft in `folder` in place of its own (in BF16, and in FP8 made from it); the recipe itself for None."""
    if folder is None:
        return recipe
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise LabError(f"{folder} holds no draft.", why="It should hold config.json and a .safetensors file.")
    where = Asset(str(folder.resolve()))
    name = folder.resolve().name
    drafts = {"bf16": Checkpoint(name, where), "fp8": Checkpoint(f"{name}-fp8", QuarkFp8(where))}
    return replace(recipe, name=f"{recipe.name}-with-{name}", drafts={key: drafts[key] for key in recipe.drafts})


def weights(checkpoint: Checkpoint, say: Callable[[str], None] | None = None) -> dict[str, Any]:
    """A checkpoint's name and the SHA-256 of its weight files (made now if need be); on the hub, the repository and revision instead."""
    where = Path(checkpoints.ensure(checkpoint, say))
    files = sorted(where.glob("*.safetensors")) if where.is_dir() else []
    source = {"kind": type(checkpoint.weights).__name__, **asdict(checkpoint.weights)}
    found: dict[str, Any] = {"name": checkpoint.name, "source": source}
    for path in files:
        found.setdefault("sha256", {})[path.name] = provenance.sha256(path)
    return found


def plain(recipe: Recipe) -> dict[str, Any]:
    """A recipe as plain data, without where its settings come from."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(recipe), default=str).replace(sys.prefix, "$VIRTUAL_ENV"))
    found.pop("sources", None)
    return found


def describe(
    lanes: Sequence[Lane], files: Sequence[PromptFile], *, say: Callable[[str], None] | None = None, **settings: Any
) -> dict[str, Any]:
    """Provenance for a result measured on `lanes` with the prompts of `files`. Makes checkpoints that are missing, and tells `say`, so
    that a draft which cannot be had is found out before any engine starts."""
    recipe = lanes[0].recipe
    drafts = {lane.draft: weights(recipe.drafts[lane.draft], say) for lane in lanes if lane.draft != "none"}
    return provenance.collect(
        recipe=plain(recipe),
        lanes=[lane.key for lane in lanes],
        weights={"target": weights(recipe.target, say), **drafts},
        prompts={one.name: {"sha256": one.sha256, "count": len(one.prompts)} for one in files},
        settings=settings,
    )
