"""The second tab: the same prompt on the baseline and on a draft's lane, one after the other, so that neither starves the other.

Both lanes are eager or both compiled, as the recipe says; the baseline runs without the plugin, the draft's lane with tracing on where that
leaves its scheduling as it is (else untraced, and its tokens are not coloured). Pairs that are repeated with the same settings
alternate which lane goes first. The margin at a difference comes from a request of its own on the baseline, after the clocks have stopped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast

import gradio as gr

from lab.bench import certificate
from lab.errors import LabError
from lab.serving.command import Lane
from lab.serving.endpoint import Endpoint
from lab.trace.align import first_difference
from lab.ui.app import CONCURRENCY, Frame, Lab, about, failed, say, trace_file, working
from lab.ui.compare import BesideFeed, last_request, margin, strangers
from lab.ui.components import live
from lab.ui.components.charts import HERTZ, beside_panels, charts, value_of
from lab.ui.runner import MEASURED_PERIOD, Status, answer, summary, wait_ready
from lab.ui.state import Run, Session, Settings

#: New tokens of the unmeasured answers that warm up a server, and how many there are at least and at most: an engine that has just
#: started may take some seconds to get to its speed.
WARM_UP = 32
WARM_UPS = (2, 8)


@dataclass(frozen=True)
class Beside:
    """What the page needs of the tab."""

    events: list[Any]
    outputs: list[Any]
    after_stop: Callable[[Session], tuple[Any, ...]]


def beside(lab: Lab, frame: Frame) -> Beside:
    """Draw the tab and wire its handlers."""
    with gr.Tab("Beside the baseline", id="beside", elem_id="e3-tab-beside"):
        with gr.Row(elem_classes=["e3-stage"]):
            texts = live("beside", elem_id="e3-beside")
            with gr.Column(elem_id="e3-beside-side", min_width=300):
                drawn = charts(beside_panels(None, None, [], "bf16"), elem_id="e3-beside-charts")
                save = gr.DownloadButton("Save both traces", interactive=False, size="sm", elem_id="e3-save-both")

    session, status, restart = frame.session, frame.status, frame.restart
    outputs = [status, texts, drawn, save, restart, frame.about, frame.tabs]
    keep = gr.skip()
    warmed: set[str] = set()

    def pictures(state: Session) -> str:
        baseline, other = lab.runs.get(state.baseline), lab.runs.get(state.other)
        return value_of(beside_panels(baseline, other, state.pairs, other.kind if other else "bf16"))

    async def warm_up(endpoint: Endpoint, lane: Lane, settings: Settings) -> AsyncIterator[Status]:
        """Unmeasured answers of a server that has just started, until they get no faster."""
        if endpoint.url in warmed:
            return
        short, best = replace(settings, max_tokens=WARM_UP, alternatives=False), 0.0
        for number in range(1, WARM_UPS[1] + 1):
            run = Run.of(lane, short)
            said = f"answer {number}, not measured{f'; the last had {best:.0f} tok/s' if best else ''}"
            yield Status("busy", f"Warming up {lane.label}", detail=said)
            async for _ in answer(lab.engine, replace(endpoint, measured=True), short, run, period=MEASURED_PERIOD):
                pass
            speed = run.output_speed() or 0.0
            if number >= WARM_UPS[0] and speed < 1.1 * best:
                break
            best = max(best, speed)
        warmed.add(endpoint.url)

    def saved(state: Session) -> Any:
        """The button that saves both traces of the latest pair, stopped and failed ones included."""
        path = trace_file(lab, state.baseline, state.other)
        return gr.DownloadButton(value=path, interactive=path is not None)

    @working
    async def run_both(state: Session, *values: Any) -> AsyncIterator[tuple[Any, ...]]:
        state.active = "beside"
        try:
            settings = replace(Settings.of(lab.recipe, *values), alternatives=False)
            if settings.draft == "none":
                raise LabError("There is no draft to compare with the baseline.", todo="Choose BF16 or another draft, then press again.")
            # Where tracing changes how the engine schedules, speed is measured untraced: a traced lane's is not the recipe's.
            draft_lane = settings.lane(lab.recipe, traced=not lab.recipe.async_scheduling)
            lanes = (Lane(lab.recipe, "none", 0, compiled=lab.recipe.compiled, traced=False), draft_lane)
        except LabError as error:
            yield failed(error), keep, keep, keep, keep, keep, keep
            return
        if state.pairs_of != (settings, lanes[1].key):
            state.pairs, state.pairs_of = [], (settings, lanes[1].key)
        order = (0, 1) if len(state.pairs) % 2 == 0 else (1, 0)
        feed: BesideFeed | None = None
        runs: list[Run] = []
        current = lanes[0]
        try:
            for lane in lanes:  # both engines first, so that the two runs follow each other closely
                current, box = lane, list[Endpoint]()
                async for line in wait_ready(lab.engine, lane, box):
                    yield say(line), keep, keep, keep, gr.Button(visible=False), keep, gr.Tabs(selected="beside")
                async for line in warm_up(box[0], lane, settings):
                    yield say(line), *(keep,) * 6
            runs = [lab.runs.new(lane, settings) for lane in lanes]
            state.baseline, state.other, state.failed = runs[0].id, runs[1].id, None
            feed = BesideFeed(runs[0], runs[1])
            unsaved = gr.DownloadButton(interactive=False)  # else it would save the pair before
            yield keep, feed.value, pictures(state), unsaved, gr.Button(visible=False), about(lab, runs[1]), gr.Tabs(selected="beside")
            for index in order:
                current, box = lanes[index], []
                async for line in wait_ready(lab.engine, current, box):
                    yield say(line), *(keep,) * 6
                due = 0.0
                source = answer(lab.engine, replace(box[0], measured=True), settings, runs[index], period=MEASURED_PERIOD)
                async with aclosing(cast(Any, source)) as lines:  # its end comes before this one's
                    async for line in lines:
                        picture: Any = keep
                        if time.monotonic() >= due:
                            picture, due = pictures(state), time.monotonic() + 1 / HERTZ
                        yield say(line), feed.update(), picture, keep, keep, keep, keep
                feed.update()
                yield say(summary(runs[index])), feed.lane(index), pictures(state), keep, keep, keep, keep
            speeds = runs[0].output_speed(), runs[1].output_speed()
            if speeds[0] and speeds[1]:
                state.pairs.append((speeds[0], speeds[1]))
            sampled = settings.temperature > 0
            place = first_difference(runs[0].output_ids(), runs[1].output_ids())
            found = threshold = None
            if place is not None and not sampled and not strangers(*runs):
                current, box = lanes[0], []
                async for line in wait_ready(lab.engine, current, box):
                    yield say(line), *(keep,) * 6
                yield (
                    say(Status("busy", "Reading the target's margin at the first difference", detail="a request of its own")),
                    *(keep,) * 6,
                )
                again = lab.engine.generate(box[0], settings.prompt, temperature=0.0, max_tokens=place + 1, alternatives=2)
                found = margin((await last_request(again)).alternatives, place)
                _, verified = await asyncio.to_thread(certificate.find, lanes[1])
                threshold = verified.body["greedy"]["threshold_nats"] if verified else None
            value = feed.verdict(state.pairs, sampled=sampled, found=found, threshold=threshold, single=lanes[1].in_float32)
        except LabError as error:
            state.failed = current
            restart = gr.Button(visible=True)
            yield failed(error), feed.update() if feed else keep, pictures(state), saved(state), restart, keep, keep
            return
        finally:
            for run in runs:
                if run.state == "running":
                    run.state = "stopped"  # before it was sent
        done = Status(
            "done", f"Done: {lanes[0].label} beside {lanes[1].label}", detail="press again for another pair; the order alternates"
        )
        yield (
            say(done),
            value,
            pictures(state),
            saved(state),
            keep,
            about(lab, runs[1]),
            keep,
        )

    def after_stop(state: Session) -> tuple[Any, ...]:
        if state.active != "beside":
            return (keep,) * len(outputs)
        line = Status("done", "Stopped: what was measured is kept.", detail="a stopped pair does not count for the speed-up")
        return say(line), keep, pictures(state), saved(state), keep, keep, keep

    running = frame.bar.beside.click(
        run_both, [session, *frame.bar.inputs], outputs, show_progress="hidden", api_visibility="private", **CONCURRENCY
    )
    return Beside([running], outputs, after_stop)
