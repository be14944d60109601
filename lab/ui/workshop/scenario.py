"""Scripted talks: TOML files in `assets/workshop`, one scene after the other, that the presenter steps through.

    title = "..."
    [[scene]]
    title = "..."
    say = "what the room reads"
    show = "text" | "run" | "guess"     # nothing runs | the prompt runs for all | it runs unseen, then a step is frozen
    prompt = "..."                      # for run and guess
    draft = "none" | "bf16" | "fp8"     # optional: the lane of the room from this scene on
    k = 3
    step = 4                            # guess: the step to freeze (the next one with a draft, if that has none)

A file that says something else is refused with the sentence that names the file and the scene.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lab.env import assets
from lab.errors import LabError

Show = Literal["text", "run", "guess"]
FIELDS: dict[str, type] = {"title": str, "say": str, "show": str, "prompt": str, "draft": str, "k": int, "step": int}


@dataclass(frozen=True)
class Scene:
    """One step of a talk."""

    title: str
    say: str = ""
    show: Show = "text"
    prompt: str = ""
    #: The room's lane from here on; None leaves it as it is.
    draft: str | None = None
    k: int | None = None
    step: int = 1


@dataclass(frozen=True)
class Scenario:
    """A talk. `name` is what a deep link says."""

    name: str
    title: str
    scenes: tuple[Scene, ...]

    def public(self) -> dict[str, Any]:
        """Titles for the presenter's list."""
        return {"name": self.name, "title": self.title, "scenes": [scene.title for scene in self.scenes]}


def parse(text: str, name: str) -> Scenario:
    """A scenario from the text of a TOML file called `name`; raises `LabError`."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise LabError(f"The scenario {name} is not TOML.", why=f"{error}.") from error
    scenes = raw.get("scene")
    if not isinstance(raw.get("title"), str) or not isinstance(scenes, list) or not scenes:
        raise LabError(f"The scenario {name} has no title or no [[scene]].")
    return Scenario(name, raw["title"], tuple(_scene(one, f"scene {number} of scenario {name}") for number, one in enumerate(scenes, 1)))


def _scene(raw: dict[str, Any], where: str) -> Scene:
    for key, value in raw.items():
        if key not in FIELDS:
            raise LabError(f"'{key}' in {where} is not known.", todo=f"Known: {', '.join(FIELDS)}.")
        if not isinstance(value, FIELDS[key]) or isinstance(value, bool):
            raise LabError(f"'{key}' in {where} is not of type {FIELDS[key].__name__}.")
    if not raw.get("title"):
        raise LabError(f"There is no title in {where}.")
    if raw.get("show", "text") not in ("text", "run", "guess"):
        raise LabError(f"'show' in {where} is not text, run or guess.")
    if raw.get("show", "text") != "text" and not raw.get("prompt", "").strip():
        raise LabError(f"There is no prompt in {where}.")
    return Scene(**raw)


def scenarios() -> dict[str, Scenario]:
    """The scenarios that the lab ships, by name."""
    folder = Path(str(assets() / "workshop"))
    return {path.stem: parse(path.read_text(encoding="utf-8"), path.stem) for path in sorted(folder.glob("*.toml"))}
