"""From a button to a finished run, without gradio: starts the lane, follows the answer, and folds every event into the run.

`answer()` is an async generator of `Status`: after each one the run has grown. Closing it aborts the request on the server, and the run
keeps what was received. The lab's own failures are raised as `LabError` after the run has been marked as failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from lab import checkpoints
from lab.errors import LabError
from lab.recipes.model import QuarkFp8, Recipe
from lab.serving.client import Delta, Done, Event, Notice, StepEvent
from lab.serving.command import Lane
from lab.serving.endpoint import Endpoint, LaneStatus, Progress
from lab.trace import counted
from lab.ui.engine import Engine
from lab.ui.feed import MOST_STEPS
from lab.ui.live import Meter, paced
from lab.ui.state import ALTERNATIVES, Run, Settings

#: Seconds between updates of the page while an answer is written, while one is written whose speed is compared (the browser shares the
#: processor with the engine, so it is kept quiet), and while an engine starts.
PERIOD = 0.1
MEASURED_PERIOD = 0.5
HEARTBEAT = 0.4


Level = Literal["info", "busy", "done", "error"]


@dataclass(frozen=True)
class Status:
    """The status line: a sentence, what is happening in detail, and how far it is (None: nobody can know)."""

    level: Level
    text: str
    detail: str = ""
    fraction: float | None = None
    elapsed: float | None = None
    #: More for whoever opens it: the reason, the log's tail, what to do.
    more: list[str] = field(default_factory=list)

    @classmethod
    def error(cls, error: LabError) -> Status:
        """An error as a status line: what happened is the sentence, why and what to do are one click away."""
        why = error.why.strip()
        short = why if why and len(why) <= 160 and "\n" not in why else ""
        more = [part for part in (why if not short else "", error.todo) if part]
        return cls("error", f"{error.what} {short}".strip(), detail=error.todo if len(error.todo) <= 160 else "", more=more)


STAGES = {
    "checkpoint": "Preparing the checkpoint for",
    "starting": "Starting",
    "ready": "Ready:",
    "failed": "Could not start",
    "evicted": "Making room for",
}


async def wait_ready(engine: Engine, lane: Lane, box: list[Endpoint], *, restart: bool = False) -> AsyncIterator[Status]:
    """Ask for the lane (started anew with `restart`) and say what it is doing until it is ready; the endpoint is put into `box`."""
    latest: list[Progress] = []
    started = time.monotonic()
    task = asyncio.create_task((engine.restart if restart else engine.endpoint)(lane, on_progress=latest.append))
    try:
        await asyncio.wait({task}, timeout=0.05)
        while not task.done():
            last = latest[-1] if latest else Progress("starting", "", time.monotonic() - started)
            yield Status(
                "busy",
                f"{STAGES.get(last.stage, 'Starting')} {lane.label}",
                detail=last.detail,
                elapsed=max(last.elapsed, time.monotonic() - started),
            )
            latest[:] = latest[-1:]
            await asyncio.wait({task}, timeout=HEARTBEAT)
        box.append(await task)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, LabError):
            await task


def start_words(known: Sequence[LaneStatus], recipe: Recipe, lane: Lane) -> str:
    """How long the lane will take to start, from starts on this machine where there were any, and what has to be made first."""
    took = [one.progress.elapsed for one in known if one.progress.stage == "ready" and one.progress.elapsed > 0]
    usual = f"the last one here took {took[-1]:.0f} s" if took else "usually half a minute to a minute"
    first = ""
    if lane.draft != "none":
        draft = recipe.drafts[lane.draft]
        if isinstance(draft.weights, QuarkFp8) and not Path(checkpoints.location(draft)).is_dir():
            first = "; AMD Quark makes its draft first, once, about a minute"
    return f"K and the draft are fixed when an engine starts: {usual}{first}"


def fold(run: Run, event: Event) -> None:
    """Put one event into the run."""
    if isinstance(event, StepEvent):
        run.request.pieces.update(event.pieces)
        run.request.steps.append(event.step)
    elif isinstance(event, Delta):
        run.chunks.append((event.text, event.ids))
        run.ids += event.ids
        run.request.text += event.text
    elif isinstance(event, Notice):
        run.notes.append(event.text)
    elif isinstance(event, Done):
        event.request.settings = {**run.request.settings, **event.request.settings}
        run.request = event.request


async def answer(engine: Engine, endpoint: Endpoint, settings: Settings, run: Run, *, period: float = PERIOD) -> AsyncIterator[Status]:
    """Send the prompt and follow the answer; `run` grows with every status, which comes every `period` seconds."""
    began = time.monotonic()
    asked = run.request.settings["alternatives"] = ALTERNATIVES if settings.alternatives else 0
    if endpoint.lane is not None and endpoint.lane.at is not None:
        run.provenance["server"] = {"address": endpoint.url, "model": endpoint.model, "root": endpoint.root, "vllm": endpoint.version}
    finished = False
    try:
        yield Status("busy", f"Answering on {run.label}", detail="sending the prompt", elapsed=0.0)
        async with contextlib.AsyncExitStack() as stack:
            if endpoint.lane is not None and endpoint.lane.at is None:  # it may have been started anew since, and be somewhere else now
                held = await stack.enter_async_context(engine.use(endpoint.lane))
                endpoint = replace(held, measured=endpoint.measured)
            source = engine.generate(
                endpoint, settings.prompt, temperature=settings.temperature, max_tokens=settings.max_tokens, alternatives=asked
            )
            meter = await stack.enter_async_context(Meter(lambda: engine.scrape(endpoint)))
            began = time.monotonic()
            batches = paced(source, period)
            try:
                async for batch in batches:
                    for event in batch:
                        if run.request.ttft is None and isinstance(event, (Delta, StepEvent)):
                            run.request.ttft = time.monotonic() - began
                        fold(run, event)
                        finished = finished or isinstance(event, Done)
                    run.speed = list(meter.points)
                    count = len(run.output_ids())
                    yield Status(
                        "busy",
                        f"Answering on {run.label}",
                        detail=f"{count} of at most {settings.max_tokens} tokens" if count else "reading the prompt",
                        fraction=min(count / settings.max_tokens, 1.0),
                        elapsed=time.monotonic() - began,
                    )
            finally:
                await batches.aclose()  # type: ignore[attr-defined]
            if endpoint.lane is not None and endpoint.lane.at is not None and not run.request.steps:
                await _counted(run, meter)
        run.speed = list(meter.points)
        run.busiest = max([run.busiest, meter.busiest, *(step.batch_requests for step in run.request.steps)])
        if meter.trouble is not None:
            run.notes.append(f"Some points of the speed over time are missing: {meter.trouble}")
        if run.request.error:
            raise LabError(
                f"The answer of {run.label} broke off.",
                why=run.request.error,
                todo="What had arrived is kept. Restart the engine to go on.",
            )
        if not finished:
            raise LabError(
                f"The answer of {run.label} ended without its last record.", todo="What had arrived is kept. Run the prompt again."
            )
        run.state = "done"
    except LabError:
        run.state = "failed"
        raise
    finally:
        if run.state == "running":
            run.state = "stopped"
            run.request.elapsed = run.request.elapsed or time.monotonic() - began


async def _counted(run: Run, meter: Meter) -> None:
    """What is known of an answer without steps: the server's counts of this request, else what its counters gained meanwhile."""
    if run.request.counted:
        run.notes.append(counted.UNFIT if counted.rebuilt(run.request) is None else counted.SAID)
        return
    run.counters = await meter.counts()
    if run.counters is not None and run.counters.drafts:
        shared = "other people's requests in that time are in it" if meter.busiest <= 1 else f"up to {meter.busiest} requests are in it"
        run.notes.append(f"Acceptance is what the server's counters gained while this answer was written: {shared}.")


def summary(run: Run) -> Status:
    """The status line of a run that is over."""
    count, steps = len(run.output_ids()), len(run.request.steps)
    request = run.request
    parts = [f"{count} tokens"]
    if steps:
        parts.append(f"{steps} steps")
    if request.elapsed:
        parts.append(f"{request.elapsed:.1f} s")
    ends = {"stop": "the model ended its answer", "length": "the limit of new tokens was reached", "abort": "aborted"}
    detail = ends.get(request.finish or "", "")
    words = {"done": "Done", "stopped": "Stopped", "failed": "Broke off", "opened": "Opened", "running": "Running"}
    if run.busiest > 1:
        detail += f"{'; ' if detail else ''}up to {run.busiest} requests shared the engine: its speed is shared, too"
    more = list(run.notes)
    if steps > MOST_STEPS:
        more.append(f"Only the first {MOST_STEPS} of {steps} steps are shown.")
    if request.dropped:
        more.append(f"{request.dropped} steps were lost on the way; the counts are incomplete.")
    return Status("done", f"{words[run.state]}: {run.label}: {', '.join(parts)}", detail=detail, more=more)
