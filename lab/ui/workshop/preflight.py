"""The preflight: every lane of the recipe is started and answers one prompt, and what is missing is said, before anybody sits down.

A lane is good when its answer ended, and when a traced answer has steps. It is warm when its engine is still up at the end: where memory
does not hold all lanes at once, the last ones push the first ones out, and that is said, since a switch then takes half a minute.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal

from lab.errors import LabError
from lab.recipes.model import Recipe
from lab.serving.command import Lane
from lab.serving.endpoint import Endpoint
from lab.ui.engine import Engine
from lab.ui.runner import Status, answer, wait_ready
from lab.ui.state import Run, Settings

PROMPT = "Name three fruits."
TOKENS = 16


@dataclass
class Check:
    """One line of the preflight: what is checked, and how it went (`text` is a sentence; `run` the answer, where there is one)."""

    name: str
    state: Literal["wait", "busy", "good", "bad"] = "wait"
    text: str = ""
    lane: Lane | None = None
    run: Run | None = None


def lanes_of(recipe: Recipe, k: int | None = None) -> list[Lane]:
    """The lanes that a workshop may switch to, the first draft first and the baseline last."""
    choices = [*[choice for choice in recipe.draft_choices() if choice != "none"], "none"]
    return [Lane(recipe, choice, recipe.default_k(choice) if k is None else k, compiled=False, traced=True) for choice in choices]  # type: ignore[arg-type]


async def preflight(engine: Engine, recipe: Recipe, checks: list[Check]) -> AsyncIterator[Check]:
    """Check every lane in turn; `checks` (empty) is filled at once, and each change of one is told."""
    checks += [Check(lane.label, lane=lane) for lane in lanes_of(recipe)]
    for check in list(checks):
        async for _ in _lane(engine, recipe, check):
            yield check
    warm = Check("All lanes warm at once", "good", "a switch takes no time")
    cold = [one.name for one in checks if one.state == "good" and not _is_ready(engine, one.lane)]
    if cold:
        text = f"memory does not hold all lanes: {', '.join(cold)} starts again when it is chosen, which takes half a minute or more"
        warm = Check(warm.name, "good", text)
    if all(one.state == "good" for one in checks):
        checks.append(warm)
        yield warm


def _is_ready(engine: Engine, lane: Lane | None) -> bool:
    return lane is not None and any(one.lane.key == lane.key and one.state == "ready" for one in engine.status())


async def _lane(engine: Engine, recipe: Recipe, check: Check) -> AsyncIterator[None]:
    lane = check.lane
    assert lane is not None
    check.state = "busy"
    yield
    try:
        box: list[Endpoint] = []
        async for line in wait_ready(engine, lane, box):
            check.text = line.detail
            yield
        settings = Settings.of(recipe, PROMPT, lane.draft, lane.k or recipe.k, 0.0, TOKENS, False)
        run = Run.of(lane, settings)
        async for _ in answer(engine, box[0], settings, run):
            pass
        if not run.request.steps:
            raise LabError("It answered, but its steps were not traced.", todo="Is the lab's plugin installed beside vLLM?")
    except LabError as error:
        check.state, check.text = "bad", Status.error(error).text + (f" {error.todo}" if error.todo else "")
        yield
        return
    check.state, check.run = "good", run
    check.text = f"ready: {len(run.output_ids())} tokens in {len(run.request.steps)} steps, {run.request.elapsed or 0:.1f} s"
    yield


def verdict(checks: list[Check]) -> tuple[bool, str]:
    """Whether the room is ready, in a sentence."""
    bad = [check.name for check in checks if check.state == "bad"]
    if bad:
        return False, f"Not ready: {', '.join(bad)}."
    if any(check.state in ("wait", "busy") for check in checks) or not checks:
        return False, "The preflight is still running."
    return True, "Ready: every lane answered."
