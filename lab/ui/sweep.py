"""The tab "Sweep": lanes over concurrencies and lengths by vLLM's own client, with charts that fill, beside what was published.

Thin handlers over `lab.bench.sweep_run`: the sweep is one task of the handler, which looks twice a second at what changed and sends that.
Stop, a reload or a closed tab cancels it; finished cells are in files, and Start goes on from there. Results of files, ours and
InferenceX's, are drawn in the same charts, and whatever differs between them is said above the table.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from lab import env, provenance
from lab.bench import agg, charts, published, reports, sweep_run
from lab.errors import LabError
from lab.ui.app import CONCURRENCY, Frame, Lab, ending, failed, say, stopped, working
from lab.ui.bar import DRAFT_NAMES
from lab.ui.components import live
from lab.ui.components.charts import charts as drawing
from lab.ui.components.charts import value_of
from lab.ui.feed import dump
from lab.ui.runner import Status
from lab.ui.sweep_state import SweepState, plan_of, progress, table_value

PERIOD = 0.5  # seconds between looks at the sweep
JUST_NOW = 5.0  # seconds after a cancellation in which Stop speaks of it


@dataclass(frozen=True)
class SweepTab:
    """What the page needs of the tab."""

    events: list[Any]
    start: Callable[..., Any]
    outputs: list[Any]
    #: Says that the sweep was stopped, if it was just now; `remembered` is what it takes.
    after_stop: Callable[[SweepState, Sequence[str]], tuple[Any, ...]]
    remembered: list[Any]


def sweep(lab: Lab, frame: Frame) -> SweepTab:
    """Draw the tab and wire its handlers."""
    recipe, tables, earlier = lab.recipe, published.tables(), reports.sweeps()
    with gr.Tab("Sweep", id="sweep", elem_id="e3-tab-sweep"):
        state = gr.State(SweepState())  # inside: gradio counts what is between tabs as a tab, and the ones behind it would change places
        with gr.Row(elem_classes=["e3-stage"]):
            with gr.Column(elem_id="e3-sweep-form", min_width=240):
                with gr.Row():
                    begin = gr.Button("Start", variant="primary", elem_id="e3-sweep-start", min_width=0)
                    end = gr.Button("Stop", elem_id="e3-sweep-stop", min_width=0)
                names = [("baseline", "none"), *((DRAFT_NAMES[one], one) for one in recipe.drafts)]
                lanes = gr.CheckboxGroup(names, value=["none", *list(recipe.drafts)[:1]], label="Lanes", elem_id="e3-sweep-lanes")
                with gr.Row():
                    ks = gr.Textbox(str(recipe.k), label="K", max_lines=1, min_width=0, elem_id="e3-sweep-k")
                    conc = gr.Textbox("1, 2, 4", label="Concurrency", max_lines=1, min_width=0, elem_id="e3-sweep-concurrency")
                lengths = gr.Textbox("128/128", label="Random prompts: input/output tokens", max_lines=1, elem_id="e3-sweep-lengths")
                kinds = gr.CheckboxGroup(
                    ["chat", "maths", "code"], label="Or the lab's own prompts, up to 128 tokens", elem_id="e3-sweep-kinds"
                )
                with gr.Row():
                    seeds = gr.Number(1, label="Rounds (seeds)", step=1, min_width=0, elem_id="e3-sweep-seeds")
                    each = gr.Number(10, label="Requests each", step=1, min_width=0, elem_id="e3-sweep-each")
                compiled = gr.Checkbox(
                    recipe.compiled, label="Compiled (slow to start)", elem_id="e3-sweep-compiled", elem_classes=["e3-check"]
                )
                loops = gr.Checkbox(True, label="Acceptance without loops too", elem_id="e3-sweep-loops", elem_classes=["e3-check"])
                overlay = gr.CheckboxGroup(
                    [
                        *((f"{one.title.split(' ')[0]}: {one.label}", name) for name, one in tables.items()),
                        *((f"measured by us: {name}", name) for name in earlier),
                    ],
                    label="Beside it, of another day",
                    elem_id="e3-sweep-published",
                )
                with gr.Row():
                    upload = gr.UploadButton(
                        "Open results", file_count="multiple", file_types=[".json"], min_width=0, elem_id="e3-sweep-open"
                    )
                    clear = gr.Button("Clear", min_width=0, elem_id="e3-sweep-clear")
                with gr.Row():
                    as_json = gr.DownloadButton("JSON", interactive=False, min_width=0, elem_id="e3-sweep-json")
                    as_csv = gr.DownloadButton("CSV", interactive=False, min_width=0, elem_id="e3-sweep-csv")
            with gr.Column(elem_id="e3-sweep-side", min_width=400):
                drawn = drawing(charts.panels([], theme="page", legend=False), elem_id="e3-sweep-charts")
                table = live("sweep", dump(table_value(SweepState(), ())), elem_id="e3-sweep-table")

    form = [lanes, ks, compiled, conc, lengths, kinds, seeds, each, loops]
    outputs = [frame.status, drawn, table, as_json, as_csv]
    keep = gr.skip()

    def chosen(names: Sequence[str]) -> list[published.Published]:
        return [tables[name] for name in names if name in tables]

    def shown(now: SweepState, beside: Sequence[str]) -> tuple[str, str]:
        found, older = chosen(beside), [row for name in beside for row in earlier.get(name, ())]
        drawn = charts.panels([*now.rows, *older], found, theme="page", legend=False)
        return value_of(drawn), dump(table_value(now, found, older))

    def files(now: SweepState) -> tuple[Any, Any]:
        """The two downloads; not offered where there is nothing to write, or no room."""
        if not now.rows:
            return gr.DownloadButton(interactive=False), gr.DownloadButton(interactive=False)
        stem = Path(lab.folder) / (now.sweep.folder.name if now.sweep else "sweep")
        try:
            one = sweep_run.combined(now.rows, stem.with_suffix(".json"))
            provenance.write_text(stem.with_suffix(".csv"), agg.to_csv(now.rows))
        except OSError:
            return gr.DownloadButton(interactive=False), gr.DownloadButton(interactive=False)
        return gr.DownloadButton(value=str(one), interactive=True), gr.DownloadButton(value=str(stem.with_suffix(".csv")), interactive=True)

    @working
    async def run(now: SweepState, beside: Sequence[str], *values: Any) -> AsyncIterator[tuple[Any, ...]]:
        try:
            plan = plan_of(recipe, *values)
            now.early = True
            yield say(Status("busy", "Preparing the sweep", detail="checkpoints and their sums")), keep, keep, keep, keep
            together = lab.engine.fit_together(plan.lanes)
            found = await asyncio.to_thread(sweep_run.prepare, plan, None, results=env.cache_dir() / "results", together=together)
        except LabError as error:
            yield failed(error), keep, keep, keep, keep
            return
        except (asyncio.CancelledError, GeneratorExit):
            now.stopped = time.monotonic()
            raise
        now.sweep, now.early = found, False
        yield keep, *shown(now, beside), keep, keep
        task = asyncio.create_task(sweep_run.run(found, lab.engine))
        seen = found.changed
        began = time.monotonic()
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=PERIOD)
                done, every = progress(found)
                label = found.now.cell.label if found.now else ""
                what = f"Cell {min(done + 1, every)} of {every}: {label}" if done < every else "Writing the last files"
                if found.now and found.now.state == "tracing":
                    what = f"Acceptance without loops: {label}"
                detail = found.detail or ("vLLM's benchmark client runs" if found.now and found.now.state == "running" else "")
                line = Status("busy", what, detail=detail, fraction=done / every, elapsed=time.monotonic() - began)
                new: tuple[Any, Any] = (keep, keep)
                if found.changed != seen:
                    seen, new = found.changed, await asyncio.to_thread(shown, now, beside)
                yield say(line), *new, keep, keep
            await task
        except LabError as error:
            yield failed(error), *shown(now, beside), *files(now)
            return
        finally:
            cut = not task.done()
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, LabError):
                await task
            found.now = None  # whatever ended it: else Clear takes it for one that runs
            if cut:
                now.stopped = time.monotonic()  # after the client has ended, which takes a while
        bad = found.count("failed"), found.count("refused")
        said = f"Sweep done: {found.count('done', 'earlier')} of {len(found.rows)} cells"
        detail = ", ".join(f"{count} {word}" for count, word in zip(bad, ("failed", "refused"), strict=True) if count)
        where = f"files: {found.folder}"
        yield say(Status("done", said, detail=f"{detail}; {where}" if detail else where)), *shown(now, beside), *files(now)

    def after_stop(now: SweepState, beside: Sequence[str]) -> tuple[Any, ...]:
        if time.monotonic() - now.stopped > JUST_NOW:
            return (keep,) * len(outputs)
        if now.early or now.sweep is None:
            return say(Status("info", "Stopped before the sweep began.")), keep, keep, keep, keep
        done, every = progress(now.sweep)
        line = Status("done", f"Stopped after {done} of {every} cells: what was measured is kept.", detail="Start goes on from there")
        return say(line), *shown(now, beside), *files(now)

    def opened(paths: Sequence[str] | None, now: SweepState, beside: Sequence[str]) -> tuple[Any, ...]:
        try:
            rows, errors = agg.load([Path(path) for path in paths or ()])
        except LabError as error:
            return (failed(error), *(keep,) * 4)
        now.opened += rows
        now.troubles += [str(error) for error in errors]
        trouble = f"{len(errors)} files could not be opened, see the list above the table" if errors else ""
        line = Status("done", f"Opened {len(rows)} results.", detail=trouble)
        return say(line), *shown(now, beside), *files(now)

    def cleared(now: SweepState, beside: Sequence[str]) -> tuple[Any, ...]:
        if now.sweep is not None and now.sweep.now is None:
            now.sweep = None
        now.opened, now.troubles = [], []
        line = Status("info", "The charts are empty again.", detail="files of a sweep stay on disk")
        return say(line), *shown(now, beside), *files(now)

    quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
    running = begin.click(run, [state, overlay, *form], outputs, **quiet, **CONCURRENCY)
    end.click(None, None, None, cancels=[running], queue=False, api_visibility="private").then(
        ending, [state], None, queue=False, **quiet
    ).then(stopped(after_stop, len(outputs)), [state, overlay], outputs, queue=False, **quiet)
    upload.upload(opened, [upload, state, overlay], outputs, queue=False, **quiet)
    clear.click(cleared, [state, overlay], outputs, queue=False, **quiet)
    overlay.input(lambda now, beside: shown(now, beside), [state, overlay], [drawn, table], queue=False, **quiet)
    return SweepTab([running], begin.click, outputs, after_stop, [state, overlay])
