"""The notebooks' workbench: a recipe, its lanes, and questions put to them.

`start()` finds the engines that `make notebooks` keeps for all kernels, or makes lanes of its own, whose guards end them with the kernel.
Questions are coroutines, which a notebook awaits at the top of a cell. Everything a `Bench` returns is what the rest of the lab works with:
requests with their steps, to which `lab.trace` and `lab.plots` apply.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from lab import checkpoints, env, recipes
from lab.bench.sweep import Plan
from lab.bench.sweep_run import Sweep, prepare, run
from lab.bench.workload import lengths
from lab.errors import LabError
from lab.notebook.broker import SharedLanes, lanes
from lab.notebook.display import FEATURE, Line
from lab.recipes.model import DraftChoice, Recipe
from lab.serving.client import Done, Event, Notice, generate
from lab.serving.command import Lane, command
from lab.serving.endpoint import Endpoint
from lab.serving.lanes import Lanes
from lab.trace.model import Request

#: Requests that `many` keeps under way at once; the recipes' servers take 32.
AT_ONCE = 16


class Bench:
    """A recipe and its engines."""

    def __init__(self, recipe: Recipe, engines: Lanes | SharedLanes) -> None:
        self.recipe, self.engines = recipe, engines

    def lane(self, draft: DraftChoice = "bf16", *, k: int | None = None, recipe: Recipe | None = None, traced: bool = True) -> Lane:
        """A lane of the recipe (or of a variant of it), eager because those start quickly. `LabError` for what it cannot do."""
        found = recipe or self.recipe
        return Lane(found, draft, found.default_k(draft) if k is None else k, compiled=False, traced=traced)

    async def ready(self, lane: Lane) -> Endpoint:
        """The lane's server, started first if need be; the cell shows what it is doing."""
        warm = any(one.lane.key == lane.key and one.state == "ready" for one in self.engines.status())
        return await self.engines.endpoint(lane, on_progress=None if warm else Line(lane.label))

    async def ask(
        self, prompt: str, lane: Lane | None = None, *, max_tokens: int = 96, temperature: float = 0.0, alternatives: int = 0, **more: Any
    ) -> Request:
        """One prompt to `lane` (default: the recipe's BF16 draft) and its whole answer with every step.

        Raises `LabError` where the engine cannot be started, refuses, or breaks off, and where steps of the answer are missing.
        """
        endpoint = await self.ready(lane or self.lane())
        return await self.ask_at(endpoint, prompt, max_tokens=max_tokens, temperature=temperature, alternatives=alternatives, **more)

    async def many(self, prompts: Sequence[str], lane: Lane | None = None, *, at_once: int = AT_ONCE, **settings: Any) -> list[Request]:
        """Several prompts to one lane, `at_once` of them under way; answers in their order. `seed=n` seeds prompt i by n + i."""
        endpoint = await self.ready(lane or self.lane())
        turn, first = asyncio.Semaphore(at_once), settings.pop("seed", None)

        async def one(number: int, prompt: str) -> Request:
            async with turn:
                seed = None if first is None else first + number
                return await self.ask_at(endpoint, prompt, seed=seed, **settings)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(number, prompt)) for number, prompt in enumerate(prompts)]
        return [task.result() for task in tasks]

    async def ask_at(self, endpoint: Endpoint, prompt: str, **settings: Any) -> Request:
        """The same to any server, such as one that runs elsewhere."""
        notes = []
        source = cast(AsyncGenerator[Event, None], generate(endpoint, prompt, **settings))
        async with aclosing(source) as events:
            async for event in events:
                if isinstance(event, Notice):
                    notes.append(event.text)
                elif isinstance(event, Done):
                    if event.request.error or notes:
                        raise LabError(event.request.error or notes[0], todo="Run the cell again; if it stays, restart the kernel.")
                    return event.request
        raise LabError("The answer ended without its last record.", todo="Run the cell again.")

    def checkpoint(self, which: str = "target") -> str:
        """The folder of the target's weights, or of the draft of that precision, made now if need be."""
        weights = self.recipe.target if which == "target" else self.recipe.drafts[which]  # type: ignore[index]
        return checkpoints.ensure(weights)

    def config(self, which: str = "target") -> dict[str, Any]:
        """`config.json` of the target, or of the draft of that precision."""
        found: dict[str, Any] = json.loads((Path(self.checkpoint(which)) / "config.json").read_text(encoding="utf-8"))
        return found

    def command(self, lane: Lane) -> str:
        """The command that serves a lane, as a person would type it; nothing is started or made."""
        draft = None if lane.draft == "none" else checkpoints.location(lane.recipe.drafts[lane.draft])
        return command(lane, target=checkpoints.location(lane.recipe.target), draft=draft, port=8000).shell()

    async def sweep(
        self, lanes: Sequence[Lane], sizes: str, concurrencies: Sequence[int], *, prompts_per: int = 2, warm_ups_per: int = 1
    ) -> Sweep:
        """A small sweep by vLLM's own client: `sizes` such as "64/48" (input/output tokens), `prompts_per` requests for each of the
        `concurrencies`. Raises `LabError` where a cell was not measured. What an earlier run of the same sweep measured is not used; its
        files go with the kernel."""
        plan = Plan(tuple(lanes), tuple(lengths(sizes)), tuple(concurrencies), (0,), prompts_per, warm_ups_per, loops=False)
        found = prepare(plan, env.scratch_until_exit(), results=env.cache_dir() / "results")
        await run(found, self.engines)
        if failed := [row for row in found.rows if row.state != "done"]:
            raise LabError(f"{failed[0].cell.label} was not measured.", why=failed[0].reason, todo="Run the cell again.")
        return found

    def app(self, *, height: int = 740, port: int = 7861) -> Any:
        """The lab's page inside the notebook, over the same engines; `height` in pixels. `closed` of what it returns ends the page."""
        from lab.ui import build
        from lab.ui.engine import Serving

        require_display()
        demo = build.page(self.recipe, Serving(cast(Lanes, self.engines)), warm=False)
        url = build.launch(demo, port=port, block=False, inline=False)
        return App(demo, url, height)

    def close(self) -> None:
        """Stop the engines, where they are this kernel's own."""
        self.engines.shutdown()


def require_display() -> None:
    """Raise the `LabError` that says what is missing where nothing can be shown."""
    from lab.errors import require

    require("IPython", FEATURE)


class App:
    """The page, open in a frame until `close()`."""

    def __init__(self, demo: Any, url: str, height: int) -> None:
        self._demo, self.url, self.height = demo, url, height

    def _repr_html_(self) -> str:
        return f'<iframe src="{self.url}" width="100%" height="{self.height}" style="border:0" title="Eagle3 Lab"></iframe>'

    def close(self) -> None:
        """End the page; the engines stay."""
        self._demo.close()


def start(name: str = recipes.DEFAULT, **changes: Any) -> Bench:
    """The workbench of a recipe; `changes` replace fields of it. Its own engines, if any, end with the kernel."""
    recipe = replace(recipes.get(name), **changes) if changes else recipes.get(name)
    return Bench(recipe, lanes())
