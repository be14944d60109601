"""The first tab: one answer, step by step, with what the draft proposed and what the target decided.

Handlers are thin: `runner` follows the engine, `feed` turns the run into the page's data. They are async generators, so Stop, a reload
and a closed tab cancel them, and closing them aborts the request on the server.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import gradio as gr

from lab.env import assets
from lab.errors import LabError
from lab.plots import Series
from lab.serving.endpoint import Endpoint
from lab.trace.io import SUFFIX, load
from lab.ui.app import CONCURRENCY, Frame, Lab, about, failed, say, trace_file, working
from lab.ui.components import live
from lab.ui.components.charts import HERTZ, charts, microscope_panels, series_of, value_of
from lab.ui.feed import Feed, whole
from lab.ui.numbers import Numbers
from lab.ui.runner import Status, answer, summary, wait_ready
from lab.ui.state import Run, Session, Settings

#: Requests of one file that are offered, so that a large file does not push everybody's runs out of the registry.
MOST_REQUESTS = 50
#: What the list of recordings shows before one is chosen.
HEADING = "Recordings"


@dataclass(frozen=True)
class Microscope:
    """What the page needs of the tab: events that Stop cancels, what to show then, and how a reload brings the last run back."""

    events: list[Any]
    outputs: list[Any]
    after_stop: Callable[[Session], tuple[Any, ...]]
    restore: Callable[[Session, str | None], tuple[Any, ...]]


def _lines(lab: Lab, session: Session) -> list[Series]:
    """The latest run without a draft and with each draft, baseline first; its name says which K it had."""
    found: dict[str, Run] = {}
    for name in session.latest.values():
        run = lab.runs.get(name)
        if run is not None and run.speed:
            found[run.kind] = run
    return [series_of(found[kind]) for kind in ("none", "bf16", "fp8") if kind in found]


def _charts(lab: Lab, session: Session, run: Run, *, steps: int | None = None) -> str:
    """The panels for the first `steps` steps of a run (all of them by default)."""
    numbers = Numbers()
    for step in run.view().request.steps[:steps]:
        numbers.add(step)
    if run.counters is not None:
        numbers.counts = run.counters
    return value_of(microscope_panels(numbers, run.kind, _lines(lab, session)))


def recordings() -> dict[str, Path]:
    """Recordings of real runs that the lab ships, by the name that the page gives them."""
    folder = Path(str(assets() / "traces"))
    return {path.stem.replace("-", " "): path for path in sorted(folder.glob(f"*{SUFFIX}"))}


def microscope(lab: Lab, frame: Frame) -> Microscope:
    """Draw the tab and wire its handlers."""
    shipped = recordings()
    with gr.Tab("Microscope", id="microscope", elem_id="e3-tab-microscope"):
        with gr.Row(elem_classes=["e3-strip"]):
            live("tiles", elem_id="e3-tiles")
            with gr.Row(elem_classes=["e3-files"]):
                pick = gr.Dropdown(
                    [HEADING, *shipped],
                    value=HEADING,
                    label="Recordings",
                    show_label=False,
                    container=False,
                    visible=bool(shipped),
                    elem_id="e3-pick",
                    min_width=0,
                )
                save = gr.DownloadButton("Save trace", interactive=False, size="sm", min_width=0, elem_id="e3-save")
                opened = gr.UploadButton("Open trace", file_types=[".jsonl"], size="sm", min_width=0, elem_id="e3-open")
        with gr.Row(elem_classes=["e3-stage"]):
            steps = live("steps", elem_id="e3-steps", events=("scrub",))
            drawn = charts(microscope_panels(Numbers(), "none", []), elem_id="e3-charts")

    session, status, restart, remembered = frame.session, frame.status, frame.restart, frame.remembered
    outputs = [status, steps, drawn, save, restart, frame.about, frame.tabs, remembered]
    keep = gr.skip()

    def finish(state: Session, run: Run, line: Status | LabError, feed: Feed | None = None) -> tuple[Any, ...]:
        """Everything that shows a run which is over."""
        text = failed(line) if isinstance(line, LabError) else say(line)
        path = trace_file(lab, run.id)
        return (
            text,
            feed.update(final=True) if feed and not run.request.counted else whole(run),
            _charts(lab, state, run),
            gr.DownloadButton(value=path, interactive=path is not None),
            gr.Button(visible=isinstance(line, LabError) and state.failed is not None),
            about(lab, run),
            keep,
            run.id,
        )

    @working
    async def run_prompt(state: Session, *values: Any) -> AsyncIterator[tuple[Any, ...]]:
        state.active = "microscope"
        try:
            settings = Settings.of(lab.recipe, *values)
            lane = settings.lane(lab.recipe)
        except LabError as error:
            yield failed(error), keep, keep, keep, keep, keep, keep, keep
            return
        box: list[Endpoint] = []
        run: Run | None = None
        feed: Feed | None = None
        before, state.waiting = state.run, True
        try:
            async for line in wait_ready(lab.engine, lane, box):
                if state.run != before:  # a recording was opened meanwhile: it stays
                    state.waiting = False
                    return
                yield say(line), keep, keep, keep, gr.Button(visible=False), keep, gr.Tabs(selected="microscope"), keep
            state.waiting = False
            run = lab.runs.new(lane, settings)
            feed = Feed(run)
            state.latest.pop(lane.key, None)  # so that the order of keys is the order of runs
            state.run, state.latest[lane.key], state.failed = run.id, run.id, None
            yield (
                keep,
                feed.value,
                _charts(lab, state, run),
                gr.DownloadButton(interactive=False),  # it would save the run before
                gr.Button(visible=False),
                about(lab, run),
                gr.Tabs(selected="microscope"),
                run.id,
            )
            due = 0.0
            async with aclosing(cast(Any, answer(lab.engine, box[0], settings, run))) as lines:  # its end comes before this one's
                async for line in lines:
                    if state.run != run.id:  # the same: what is on screen is not drawn over
                        return
                    picture: Any = keep
                    if time.monotonic() >= due:
                        picture, due = _charts(lab, state, run), time.monotonic() + 1 / HERTZ
                    yield say(line), feed.update(), picture, keep, keep, keep, keep, keep
        except LabError as error:
            state.failed, state.waiting = lane, False
            if run is None:
                yield failed(error), keep, keep, keep, gr.Button(visible=True), keep, keep, keep
            else:
                yield finish(state, run, error, feed)
            return
        finally:
            if run is not None and run.state == "running":
                run.state = "stopped"  # before it was sent
        yield finish(state, run, summary(run), feed)

    def scrub(state: Session, event: gr.EventData) -> Any:
        """The charts of the first steps of the run on screen, while someone scrubs or plays."""
        run, count = lab.runs.get(state.run), event._data.get("steps") if isinstance(event._data, dict) else None
        if run is None or not isinstance(count, int):
            return keep
        return _charts(lab, state, run, steps=max(count, 0))

    def after_stop(state: Session) -> tuple[Any, ...]:
        run, waited, state.waiting = lab.runs.get(state.run), state.waiting, False
        if state.active != "microscope":
            return (keep,) * len(outputs)
        if waited or run is None or run.state not in ("stopped", "done", "failed"):
            return say(Status("info", "Stopped.")), keep, keep, keep, keep, keep, keep, keep
        return finish(state, run, summary(run))

    def open_file(state: Session, path: str) -> tuple[Any, ...]:
        try:
            trace = load(path)
            if not trace.requests:
                raise LabError(f"{Path(path).name} holds no request.", todo="Choose another trace.")
        except LabError as error:
            return (failed(error), *(keep,) * len(outputs))
        state.opened.clear()
        several = trace.provenance.get("runs")
        for number, request in enumerate(trace.requests[:MOST_REQUESTS]):
            made = (
                several[number]
                if isinstance(several, list) and number < len(several) and isinstance(several[number], dict)
                else trace.provenance
            )
            run = lab.runs.opened(request, made, str(request.lane)[:80])
            state.opened[f"{number + 1}. {request.lane[:60]}: {request.prompt[:40]}"] = run.id
        names = list(state.opened)
        state.run = state.opened[names[0]]
        first = lab.runs.get(state.run)
        assert first is not None
        if len(trace.requests) > MOST_REQUESTS:
            first.notes.append(f"Only the first {MOST_REQUESTS} of {len(trace.requests)} requests are offered.")
        choices = [*names, *shipped] if len(names) > 1 else list(shipped)
        value = names[0] if len(names) > 1 else next((name for name, one in shipped.items() if str(one) == path), None)
        return (*finish(state, first, summary(first)), gr.Dropdown(choices, value=value, visible=bool(choices)))

    def choose(state: Session, name: str) -> tuple[Any, ...]:
        if name in shipped:
            return open_file(state, str(shipped[name]))
        run = lab.runs.get(state.opened.get(name))
        if run is None:
            return (keep,) * (len(outputs) + 1)
        state.run = run.id
        return (*finish(state, run, summary(run)), keep)

    def restore(state: Session, name: str | None) -> tuple[Any, ...]:
        run = lab.runs.get(name)
        if run is None:
            return (keep,) * len(outputs)
        state.run = run.id
        state.latest[run.request.lane] = run.id
        return finish(state, run, summary(run))

    @working
    async def start_again(state: Session) -> AsyncIterator[tuple[Any, ...]]:
        lane = state.failed
        if lane is None:
            yield keep, gr.Button(visible=False)
            return
        # Somebody else may have pressed first: what starts by now, or answers, is not ended again.
        known = [one for one in lab.engine.status() if one.lane.key == lane.key]
        ours = not any(one.state == "starting" or (one.state == "ready" and one.in_use) for one in known)
        try:
            async for line in wait_ready(lab.engine, lane, [], restart=ours):
                yield say(line), gr.Button(visible=False)
        except LabError as error:
            yield failed(error), gr.Button(visible=True)
            return
        state.failed = None
        yield say(Status("done", f"Ready: {lane.label}. Press Run to go on.")), gr.Button(visible=False)

    quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
    start = [frame.bar.run.click, frame.bar.prompt.submit]
    running = gr.on(start, run_prompt, [session, *frame.bar.inputs], outputs, **quiet, **CONCURRENCY)
    again = restart.click(start_again, session, [status, restart], **quiet, **CONCURRENCY)
    opened.upload(open_file, [session, opened], [*outputs, pick], **quiet)
    pick.input(choose, [session, pick], [*outputs, pick], queue=False, **quiet)
    steps.scrub(scrub, session, drawn, **quiet, trigger_mode="always_last")
    return Microscope([running, again], outputs, after_stop, restore)
