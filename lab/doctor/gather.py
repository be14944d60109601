"""From what a person names (a recipe, a command line, a server's URL) to the `Subject` that the rules look at.

Models are looked for as folders, and under hub names in the local Hugging Face cache; nothing is downloaded. With `within`, folders
elsewhere are not opened: the page uses that, since its visitors may be strangers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lab import checkpoints, recipes
from lab.doctor import machine as machines
from lab.doctor.files import Model, Problem, read_model
from lab.doctor.line import Line, parse
from lab.doctor.machine import Machine
from lab.doctor.subject import Subject
from lab.env import assets, cache_dir
from lab.errors import LabError
from lab.recipes.model import DraftChoice, Hub, Recipe
from lab.serving.command import Lane, command

#: The machine that is assumed for a recipe or a line made for AMD, where the doctor runs on a machine without a GPU.
USUAL = "MI355X"


def hub_cache(environment: Mapping[str, str] | None = None) -> Path:
    """The folder of the Hugging Face cache, as its own library finds it."""
    values = os.environ if environment is None else environment
    if values.get("HF_HUB_CACHE"):
        return Path(values["HF_HUB_CACHE"]).expanduser()
    home = values.get("HF_HOME") or f"{values.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return Path(home).expanduser() / "hub"


def in_cache(name: str, revision: str | None = None, *, cache: Path | None = None) -> Path | None:
    """The newest (or named) snapshot of a hub repository in the cache; None where it is not there."""
    folder = (cache or hub_cache()) / f"models--{name.replace('/', '--')}"
    try:
        wanted = revision or "main"
        reference = folder / "refs" / wanted
        commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else wanted
        named = folder / "snapshots" / commit
        if named.is_dir():
            return named
        return max((one for one in (folder / "snapshots").iterdir() if one.is_dir()), key=lambda one: one.stat().st_mtime, default=None)
    except (OSError, UnicodeDecodeError, ValueError):
        return None


def trusted() -> list[Path]:
    """Where a page may open folders on behalf of a visitor: the lab's cache, its assets and the hub's cache."""
    return [cache_dir(), Path(str(assets())), hub_cache()]


def _inside(folder: Path, within: Sequence[Path] | None) -> bool:
    if within is None:
        return True
    try:
        real = folder.resolve(strict=False)
        return any(real.is_relative_to(place.resolve(strict=False)) for place in within)
    except (OSError, RuntimeError):
        return False


def find_model(name: str, *, draft: bool, revision: str | None = None, within: Sequence[Path] | None = None) -> Model:
    """The model called `name`: a folder, or a hub repository in the cache. One that is not here has nothing but its name."""
    if not name or len(name) > 1000 or "\0" in name:
        return Model(name[:80])
    folder = Path(name).expanduser()
    looks_local = name.startswith(("/", ".", "~")) or name.count("/") > 1
    try:
        there = folder.exists() or folder.is_symlink()
    except OSError:
        there = True
    if there or looks_local:
        if not _inside(folder, within):
            return Model(name)
        if not there:
            what = "There is no such folder" + (" here, and it is no hub name." if looks_local else ".")
            return Model(name, problems=(Problem("config", name, what, "Check the path, or fetch the checkpoint first."),))
        return read_model(folder, name=name, headers=draft)
    cached = in_cache(name, revision)
    if cached is None or not _inside(cached, within):
        return standing_in(name)
    return read_model(cached, name=name, headers=draft)


def standing_in(name: str) -> Model:
    """A hub model that is not on this machine: by the shipped copy of its configuration where there is one, else its name alone."""
    shipped = json.loads((assets() / "doctor" / "configs.json").read_text(encoding="utf-8"))["models"].get(name)
    return Model(name) if shipped is None else Model(name, config=shipped["config"], stand_in=shipped["source"], minimal=shipped["minimal"])


def _subject(line: Line, machine: Machine, *, source: str, recipe: str = "", within: Sequence[Path] | None = None) -> Subject:
    target = find_model(line.model, draft=False, revision=line.flags.get("revision"), within=within) if line.model else None
    named = line.speculative.get("model")
    revision = line.speculative.get("revision")
    draft = None
    if isinstance(named, str) and named:
        draft = find_model(named, draft=True, revision=revision if isinstance(revision, str) else None, within=within)
    return Subject(machine, line, target, draft, source=source, recipe=recipe)


def machine_for(gpu: str | None, vllm: str | None, *, wanted: str = "", base: Machine | None = None) -> Machine:
    """This machine, or the one named by `gpu`. Where a GPU is `wanted` and this machine has none, that one is assumed, and said."""
    here = base or machines.this_machine()
    try:
        if gpu:
            return machines.assumed(gpu, base=here, why=f"asked about {gpu}, not about this machine", vllm=vllm or "")
        if wanted and here.platform == "cpu":
            return machines.assumed(wanted, base=here, why=f"this machine has no GPU: checked as for {wanted}", vllm=vllm or "")
    except ValueError as error:
        raise LabError(f"{gpu} is no processor that the doctor knows.", todo=str(error)) from error
    return replace(here, vllm=vllm) if vllm else here


def from_recipe(
    recipe: Recipe,
    draft: DraftChoice,
    *,
    k: int | None = None,
    compiled: bool | None = None,
    traced: bool | None = None,
    tp: int = 0,
    machine: Machine | None = None,
    within: Sequence[Path] | None = None,
) -> Subject:
    """What `eagle3-lab serve` would start for a recipe's lane."""
    mode = recipe.compiled if compiled is None else compiled
    plain = recipe.async_scheduling if traced is None else not traced
    lane = Lane(recipe, draft, recipe.default_k(draft) if k is None else k, mode, not plain, tp=tp)
    weights = None if draft == "none" else recipe.drafts[draft]
    made = command(
        lane, target=checkpoints.location(recipe.target), draft=None if weights is None else checkpoints.location(weights), port=8000
    )
    words = [*(f"{name}={value}" for name, value in made.environment.items()), *made.display]
    found = _subject(
        parse(words), machine or machine_of(recipe), source=f"recipe {recipe.name}, {lane.label}", recipe=recipe.name, within=within
    )
    # Weights that the lab makes on first use are not missing.
    made_later = [one for one in (recipe.target, weights) if one is not None and not isinstance(one.weights, Hub)]
    for one in made_later:
        if not Path(checkpoints.location(one)).exists():
            empty = Model(one.name)
            found = replace(found, target=empty) if one is recipe.target else replace(found, draft=empty)
    return found


def machine_of(recipe: Recipe, gpu: str | None = None, vllm: str | None = None, *, base: Machine | None = None) -> Machine:
    """The machine to check a recipe for: this one, or the recipe's own hardware where this one has no GPU and the recipe needs one."""
    known = [name for name in recipe.hardware if name.lower() in machines.ARCHITECTURES]
    wanted = (known[0] if known else "MI300X") if recipe.hardware else ""
    return machine_for(gpu, vllm, wanted=wanted, base=base)


def from_line(
    text: str | Sequence[str], *, gpu: str | None = None, vllm: str | None = None, within: Sequence[Path] | None = None
) -> Subject:
    """What a command line would start."""
    line = parse(text)
    if not line.launcher and not line.flags:
        raise LabError(
            "This is neither a recipe nor a command line.",
            why=f"Known recipes: {', '.join(sorted(recipes.RECIPES))}.",
            todo="Name one, or paste a line such as: vllm serve MODEL --speculative-config '{...}'",
        )
    amd = any(name.startswith("VLLM_ROCM_") for name in line.environment) or "ROCM_" in line.text("attention-backend").upper()
    machine = machine_for(gpu, vllm, wanted=USUAL if amd else "")
    return _subject(line, machine, source="the command line", within=within)
