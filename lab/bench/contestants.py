"""From what a person names to the lanes of a duel: `bf16`, `fp8`, `bf16-low`, another recipe's `kimi:fp8`, or the folder of a draft.

A duel changes the draft and nothing else. Contestants may come from recipes that serve their drafts differently (another K, another flag,
another environment variable): all of them then get the first one's settings, and every setting that was changed for that is said. Drafts
of different targets cannot be compared at all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lab import recipes
from lab.bench.result import told_apart
from lab.errors import LabError
from lab.recipes.model import LEVELS, Cut, Precision, Recipe
from lab.recipes.variants import level_of, with_folder, without_level
from lab.serving.command import Lane


@dataclass(frozen=True)
class Contestant:
    """A draft as it takes part: what people call it, and the lane that serves it."""

    name: str
    lane: Lane

    @property
    def kind(self) -> str:
        """What decides its colour: bf16, fp8, or cut."""
        weights = self.lane.recipe.drafts[self.lane.draft].weights if self.lane.draft != "none" else None
        return "cut" if isinstance(weights, Cut) else self.lane.draft


def _precision(text: str) -> Precision | None:
    return "bf16" if text == "bf16" else "fp8" if text == "fp8" else None


def draft_names(recipe: Recipe, *, cuts: bool = True) -> list[str]:
    """The names of a recipe's drafts in a duel: its precisions, then each BF16 level that can be cut off."""
    names: list[str] = [*recipe.drafts]
    if cuts and names:
        first = "bf16" if "bf16" in recipe.drafts else names[0]
        names += [f"{first}-{level}" for level in LEVELS]
    return names


def label(name: str) -> str:
    """How the page and the report call a draft: "BF16", "BF16 without low level"."""
    precision, _, level = name.partition("-")
    return f"{precision.upper()} without {level} level" if level else precision.upper()


def _folder(recipe: Recipe, text: str) -> tuple[Recipe, Precision, str]:
    """A variant of the recipe whose draft lies in a folder; raises `LabError` where that is no Eagle3 draft."""
    from lab.quant.draft import check_quantisable, read_draft  # checks the folder as quantising does; needs POSIX, as engines do

    draft = read_draft(Path(text))
    quantised = bool(draft.settings.get("quantization_config"))
    if not quantised:
        check_quantisable(draft)  # a draft without d2t would be served without a word, and lose every duel
    variant = with_folder(recipe, Path(text), "fp8" if quantised else "bf16")
    return variant, "fp8" if quantised else "bf16", variant.variant


def contestant(text: str, recipe: Recipe, k: int | None = None, *, compiled: bool | None = None) -> Contestant:
    """The contestant that `text` names: `[RECIPE:]bf16`, or the folder of an Eagle3 draft for the recipe's target; with `-low`, `-middle`
    or `-high` behind it, that feature level is cut off. A folder that is called as one of the recipe's drafts is named `./bf16`.

    Raises `LabError` for a name that means nothing here, and for a folder that holds no Eagle3 draft.
    """
    path = Path(os.path.expanduser(text))  # os.path throughout: it says no where pathlib raises, as for a name that is too long
    whole, _, level = str(path).rpartition("-")
    cut = level in LEVELS and not os.path.isdir(path)
    folder = whole if cut else str(path)
    own, _, rest = text.partition("-")
    known = own in recipe.drafts and rest in ("", *LEVELS)
    if not known and (os.path.isdir(folder) or "/" in text or text.startswith((".", "~"))):
        chosen, precision, name = _folder(recipe, folder)
        if cut:
            chosen = without_level(chosen, precision, level_of(level))
            name = chosen.variant
        return Contestant(name, _lane(chosen, precision, k, compiled))
    prefix, _, rest = text.rpartition(":")
    chosen = recipes.get(prefix) if prefix else recipe
    first, _, level = rest.partition("-")
    found = _precision(first)
    if found is None or found not in chosen.drafts:
        raise LabError(
            f"There is no draft '{text}'.",
            todo=f"Recipe '{chosen.name}' offers {', '.join(draft_names(chosen))}; or give the folder of an Eagle3 draft.",
        )
    name = f"{prefix}:{label(rest)}" if prefix else label(rest)
    if level:
        chosen = without_level(chosen, found, level_of(level))
    return Contestant(name, _lane(chosen, found, k, compiled))


def _lane(recipe: Recipe, precision: Precision, k: int | None, compiled: bool | None) -> Lane:
    mode = recipe.compiled if compiled is None else compiled
    return Lane(recipe, precision, recipe.default_k(precision) if k is None else k, compiled=mode)


def one_setting(contestants: Sequence[Contestant]) -> tuple[list[Contestant], list[str]]:
    """The contestants with the settings of the first one, and a sentence for every setting that was changed for that.

    Raises `LabError` for fewer than two, for the same draft twice, and for drafts of different targets.
    """
    if len(contestants) < 2:
        raise LabError("A duel needs at least two drafts.", todo="Name two, for example: eagle3-lab duel bf16 fp8")
    first = _fixed(contestants[0].lane)
    names = told_apart([each.name for each in contestants])
    made, said = [Contestant(names[0], first)], []
    for name, each in zip(names[1:], contestants[1:], strict=True):
        own = _fixed(each.lane)
        if own.recipe.target != first.recipe.target:
            raise LabError(
                f"{each.name} cannot be compared with {contestants[0].name}.",
                why=f"Their targets differ: {own.recipe.target.name} and {first.recipe.target.name}.",
                todo="Choose drafts of one target.",
            )
        said += [f"{name}: {change}" for change in _changes(first, own)]
        recipe = replace(first.recipe, name=own.recipe.name, drafts=own.recipe.drafts, variant=own.recipe.variant)
        made.append(Contestant(name, replace(first, recipe=recipe, draft=own.draft)))
    keys = [each.lane.key for each in made]
    if twice := next((each.name for each, key in zip(contestants, keys, strict=True) if keys.count(key) > 1), None):
        raise LabError(f"{twice} was named twice.", why="A draft is no opponent of itself.", todo="Name two different drafts.")
    return made, said


def _fixed(lane: Lane) -> Lane:
    """The lane with what its recipe's rules add written into the recipe, so that another draft gets it too; K as it is for every draft."""
    recipe = lane.recipe
    rules = [rule for rule in recipe.rules if rule.holds(lane.draft, lane.tp, lane.isl)]
    if not rules and not recipe.draft_k:
        return lane
    environment = dict(recipe.environment)
    for rule in rules:
        environment |= rule.environment
    flags = (*recipe.flags, *(flag for rule in rules for flag in rule.flags))
    fixed = replace(recipe, name=f"{recipe.name}-duel", flags=flags, environment=environment, rules=(), draft_k={}, k=lane.k)
    return replace(lane, recipe=fixed)


def _changes(first: Lane, lane: Lane) -> list[str]:
    """What a lane's own recipe sets differently from the first lane's."""
    changes = [f"K is {first.k} instead of {lane.k}"] if lane.k != first.k else []
    a, b = first.recipe, lane.recipe
    for field in ("flags", "compiled_flags" if first.compiled else "eager_flags"):
        ours, theirs = dict(getattr(a, field)), dict(getattr(b, field))
        for flag in sorted({*ours, *theirs}):
            if flag not in theirs:
                changes.append(f"{_word(flag, ours[flag])} was added")
            elif flag not in ours:
                changes.append(f"{_word(flag, theirs[flag])} was left out")
            elif ours[flag] != theirs[flag]:
                changes.append(f"{_word(flag, ours[flag])} instead of {theirs[flag]}")
    for field in ("environment", "compiled_environment" if first.compiled else "eager_environment", "speculative"):
        mine, other = dict(getattr(a, field)), dict(getattr(b, field))
        for name in sorted({*mine, *other}):
            if mine.get(name) != other.get(name):
                changes.append(f"{name} is {mine.get(name, 'not set')} instead of {other.get(name, 'not set')}")
    for name, field in (("GPUs", "tp"), ("context", "max_model_len"), ("expert parallelism", "expert_parallel"), ("compiled", "compiled")):
        if getattr(first, field) != getattr(lane, field):
            changes.append(f"{name} is {getattr(first, field)} instead of {getattr(lane, field)}")
    return changes


def _word(flag: str, value: str | None) -> str:
    return flag if value is None else f"{flag} {value}"
