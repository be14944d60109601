"""Why this speed: the cost model's tab. Results of `eagle3-lab bench cost`, shipped, saved or measured here, and every K for the last run.

A result is drawn as it is in its file: where a step's time goes, predictions beside measurements, the break-even, and the best K. "Every K
for my run" asks the prompt of the latest greedy run once more with its drafts withheld, on the same lane, so that the steps of each smaller
K are exact (`lab.trace.whatif`). Measuring here takes minutes and both engines; Stop keeps whole cells.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from lab import env, provenance
from lab.bench import cost_report, grid, origin, result
from lab.bench.prompts import KINDS, Prompt, gather
from lab.bench.race import room
from lab.errors import LabError
from lab.plots import predictions, step_parts
from lab.recipes.model import DraftChoice
from lab.serving.client import WITHHOLD_ARGUMENT
from lab.serving.command import Lane
from lab.serving.endpoint import Endpoint
from lab.trace import whatif
from lab.ui.app import CONCURRENCY, Frame, Lab, failed, restart_offer, say, working
from lab.ui.components import live
from lab.ui.components.charts import Panels, charts, value_of
from lab.ui.feed import dump
from lab.ui.race import numbers
from lab.ui.runner import Status, wait_ready
from lab.ui.state import Run, Session

FORMAT = "eagle3-lab-cost"
LARGEST = 4 << 20  # bytes of a result file that the page opens
FULL = ("cells", "coefficients", "error", "by_k", "choices", "mode", "draft", "schedule", "schedule_taken", "parts_timed", "held_out")


@dataclass(frozen=True)
class Why:
    """What the page needs of the tab."""

    events: list[Any]
    starts: list[Any]
    outputs: list[Any]
    after_stop: Callable[[Session], tuple[Any, ...]]


def stored() -> dict[str, Path]:
    """Results by a name for people: shipped ones, then those in the cache, the newest first."""
    shipped = sorted(Path(str(env.assets() / "measured")).glob("*cost*.json"))
    own = sorted(env.listed(env.cache_dir() / "results", "cost-*.json"), key=lambda one: -one[1].st_mtime)[:20]
    return {**{f"shipped: {path.stem}": path for path in shipped}, **{f"yours: {path.stem}": path for path, _ in own}}


def load(path: Path) -> dict[str, Any]:
    """A result of `bench cost`; raises `LabError` for anything else."""
    todo = "Choose a file that `eagle3-lab bench cost` wrote."
    try:
        if path.stat().st_size > LARGEST:
            raise LabError(f"{path.name} is too large for a result.", todo=todo)
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LabError(f"{path.name} cannot be read.", why=str(error)[:200], todo=todo) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise LabError(f"{path.name} is not a result of the cost model.", todo=todo)
    if found.get("version") != result.VERSION:
        raise LabError(f"{path.name} was written by another version of Eagle3 Lab.", why=f"Its format is {found.get('version')}.")
    if missing := [key for key in FULL if key not in found]:
        raise LabError(f"{path.name} is not whole: it lacks {missing[0]}.", todo=todo)
    return found


def _name(cell: Mapping[str, Any]) -> str:
    where = f"{cell['concurrency']} × {cell['context']:.0f} tokens"
    return f"{'baseline' if not cell['k'] else 'K=' + str(cell['k'])}, {where}"


def _few(cells: list[Any]) -> list[Any]:
    """Cells whose parts are drawn: the smallest and the largest concurrency, and the longest context; the tables have them all."""
    batches = {cell["concurrency"] for cell in cells if not cell["long"]}
    longest = max((cell["context"] for cell in cells if cell["long"]), default=0.0)
    wanted = {min(batches), max(batches)} if batches else set()
    return [cell for cell in cells if (cell["context"] > 0.9 * longest if cell["long"] else cell["concurrency"] in wanted)]


def panels(summary: Mapping[str, Any] | None) -> Panels:
    """Parts of a step, and predicted over measured: step times and speed-ups."""
    cells = summary["cells"] if summary else []
    kind: DraftChoice = "fp8" if summary and summary["draft"] == "fp8" else "bf16"
    timed = _few([cell for cell in cells if cell["parts_s"]])
    parts: dict[str, list[float]] = {}
    if timed:
        attention = [min(cell["attention_s"], cell["parts_s"]["target"]) for cell in timed]
        parts = {
            "target": [1000 * (cell["parts_s"]["target"] - one) for cell, one in zip(timed, attention, strict=True)],
            "attention": [1000 * one for one in attention],
            **{name: [1000 * cell["parts_s"][name] for cell in timed] for name in ("accept", "draft", "rest")},
        }
    note = "this engine does not time the parts of a step" if cells and not timed else ""
    steps = [(_name(cell), 1000 * cell["step_s"], 1000 * cell["predicted_step_s"], cell["held_out"]) for cell in cells]
    speeds = [
        (_name(cell), cell["measured_speedup"]["value"], cell["predicted_speedup"], cell["held_out"])
        for cell in cells
        if cell["k"] and cell["measured_speedup"] and cell["predicted_speedup"]
    ]
    return (
        ("Where a step's time goes (attention: by the model)", step_parts([_name(cell) for cell in timed], parts, theme="page", note=note)),
        ("Time of a step: model against measurement", predictions(steps, unit="ms", kind=kind, theme="page")),
        ("Speed-up: model against measurement", predictions(speeds, unit="times", kind=kind, theme="page")),
    )


def _table(caption: str, header: list[str], rows: list[list[str]]) -> dict[str, Any]:
    return {"caption": caption, "header": header, "rows": rows}


def _cells(summary: Mapping[str, Any]) -> dict[str, Any]:
    rows = []
    for cell in summary["cells"]:
        if not cell["k"]:
            continue
        measured, rate = cell["measured_speedup"], cell["break_even_acceptance"]
        rows.append(
            [
                _name(cell) + (" (held out)" if cell["held_out"] else ""),
                f"{measured['value']:.2f}× [{measured['low']:.2f}, {measured['high']:.2f}]" if measured else "–",
                f"{cell['predicted_speedup']:.2f}×" if cell["predicted_speedup"] else "–",
                f"{cell['bound']:.2f}×",
                "–" if cell["break_even"] is None else f"{cell['break_even']:.2f}" + (f" ({rate:.0%})" if rate is not None else " (never)"),
            ]
        )
    header = ["requests × context", "measured [95%]", "predicted", "bound", "break-even"]
    return _table("Speed-up of decode steps over the baseline; break-even: mean acceptance length (acceptance rate)", header, rows)


def _every_k(summary: Mapping[str, Any]) -> dict[str, Any]:
    header = ["K", "tokens a step", *(f"at {choice['concurrency']}" for choice in summary["choices"])]
    rows = []
    for one in summary["by_k"]:
        row = [str(one["k"]), f"{one['tokens_per_step']:.2f}"]
        for choice in summary["choices"]:
            value = choice["by_k"].get(str(one["k"]))
            row.append("–" if value is None else f"{value:.2f}×{' ★' if one['k'] == choice['k'] else ''}")
        rows.append(row)
    return _table("Would another K be better? Predicted speed-up by requests in flight; ★ is best", header, rows)


def explain(summary: Mapping[str, Any] | None, where: str) -> str:
    """Value of the text: one sentence, tables, notes and the schedule."""
    if summary is None:
        words = "Choose a result, measure one here, or ask for every K of your latest run."
        return dump({"sentence": words, "tables": [], "notes": [], "code": ""})
    drafted = [cell for cell in summary["cells"] if cell["k"] and cell["break_even"] is not None]
    first = next((cell for cell in drafted if cell["concurrency"] == 1 and cell["k"] == 3), drafted[0] if drafted else None)
    sentence = ""
    if first is not None:
        sentence = (
            f"A step with K={first['k']} takes {first['break_even']:.2f} baseline steps at concurrency {first['concurrency']} and yields"
            f" {first['tokens_per_step']:.2f} tokens: more than {first['break_even']:.2f} gains, {first['bound']:.2f}× is the most."
        )
    notes = [f"{where}; {summary['mode']}, {str(summary['draft']).upper()} draft, greedy; both lanes traced."]
    for key, words in (("fitted", "cells of the fit"), ("held_out", "cells held out")):
        if error := summary["error"].get(key):
            notes.append(
                f"Error on {error['points']} {words}: median {error['median']:.1%}, largest {error['worst']:.1%} of a step's time."
            )
    if error := summary["error"].get("speedup_held_out"):
        notes.append(
            f"Error of the speed-up on {error['cells']} cells held out: median {error['median']:.1%}, largest {error['worst']:.1%}."
        )
    terms = [f"{one['part']} {1000 * one['seconds']:.3g} ms {one['of']}" for one in summary["coefficients"].values() if one["seconds"]]
    notes.append("The model: " + ", ".join(terms) + ".")
    schedule, code = summary["schedule"], ""
    if schedule:
        code = json.dumps(schedule)
        taken = {True: "The installed vLLM takes it.", False: "The installed vLLM does NOT take it.", None: "vLLM 0.32 takes it."}
        notes.append(
            f"K by batch size, for --speculative-config, below. {taken[summary['schedule_taken']]} "
            "Beyond what was measured, on either side: the nearest K."
        )
    tables = [_cells(summary), *([_every_k(summary)] if summary["by_k"] else [])]
    return dump({"sentence": sentence, "tables": tables, "notes": notes, "code": code})


def run_table(run: Run, probe: Any | None) -> str:
    """Value of the text for one run: each smaller K, exact by the withheld drafts if there are any, and the bounds that the run gives."""
    own = whatif.answer_of(run.request.steps)
    exact = whatif.answer_of(probe.steps) if probe is not None else None
    depth = own.depth if exact is None else max(own.depth, exact.depth)
    rows, best = [], 0.0
    for k in range(1, depth + 1):
        bound, sure = whatif.replay(own, k), whatif.replay(exact, k) if exact is not None else None
        low, high = bound.bounds or (0.0, 0.0)
        best = sure.tokens_per_step or 0.0 if sure else best
        rows.append(
            [
                str(k),
                f"{sure.fewest}" if sure else "–",
                f"{sure.tokens_per_step:.2f}" if sure and sure.tokens_per_step else "–",
                f"{bound.fewest}" if bound.exact else f"{bound.fewest} to {bound.most}",
                f"{low:.2f}" if bound.exact else f"{low:.2f} to {high:.2f}",
            ]
        )
    header = ["K", "steps, exact", "tokens a step, exact", "steps by this run", "tokens a step by this run"]
    notes = [
        "Exact: the prompt was asked once more with drafts withheld, so that the draft proposed at every place. A run itself knows only the"
        " places where its own steps began; elsewhere a range stands."
        if probe is not None
        else "Without an engine only the run itself is known: where a smaller K ends a step inside an accepted draft, a range stands."
    ]
    if probe is not None and probe.output_ids() != run.output_ids():
        notes.append("⚠ The second answer's tokens differ (a near-tie in another batch shape): the exact columns are of that answer.")
    notes.append("Tokens a step decide the speed-up together with a step's cost, which grows with K: choose or measure a result for that.")
    sentence = f"{run.label}: the same {len(run.output_ids())} tokens with every K up to {depth}."
    return dump({"sentence": sentence, "tables": [_table("This answer with fewer draft tokens", header, rows)], "notes": notes, "code": ""})


def why_tab(lab: Lab, frame: Frame) -> Why:
    """Draw the tab and wire its handlers."""
    offered = stored()
    drafts = [(name.upper(), name) for name in lab.recipe.drafts]
    with gr.Tab("Why this speed", id="why", elem_id="e3-tab-why"):
        with gr.Row(elem_classes=["e3-strip", "e3-race-strip"]):
            pick = gr.Dropdown(list(offered), value=None, label="Results", elem_id="e3-why-pick", min_width=0)
            draft = gr.Dropdown(drafts, value=drafts[0][1] if drafts else None, label="Draft", elem_id="e3-why-draft", min_width=0)
            ks = gr.Textbox("1, 2, 3", label="K", elem_id="e3-why-k", min_width=0, max_lines=1)
            batches = gr.Textbox("1, 2, 4", label="Concurrency", elem_id="e3-why-concurrency", min_width=0, max_lines=1)
            measure = gr.Button("Measure (minutes)", variant="primary", size="sm", min_width=0, elem_id="e3-why-measure")
            mine = gr.Button("Every K for my run", size="sm", min_width=0, elem_id="e3-why-run")
            opened = gr.UploadButton("Open", file_types=[".json"], size="sm", min_width=0, elem_id="e3-why-open")
        with gr.Row(elem_classes=["e3-stage"]):
            drawn = charts(panels(None), elem_id="e3-why-charts")
            text = live("why", explain(None, ""), elem_id="e3-why")

    session, status = frame.session, frame.status
    outputs = [status, text, drawn, pick, frame.tabs, frame.restart]
    keep = gr.skip()
    measuring: dict[str, tuple[grid.Measured, cost_report.Held, dict[str, Any]]] = {}

    def show(path: Path, name: str) -> tuple[Any, ...]:
        try:
            found = load(path)
            machine = found.get("provenance", {}).get("hardware", {})
            where = f"{name}: {provenance.processor(machine)}"
            values = explain(found, where), value_of(panels(found))
        except LabError as error:
            return failed(error), *(keep,) * 5
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return failed(LabError(f"{path.name} is damaged.", why=f"{type(error).__name__}: {error}")), *(keep,) * 5
        return say(Status("done", f"{name}.", detail="measured earlier, not now")), *values, keep, keep, keep

    def show_stored(name: str) -> tuple[Any, ...]:
        path = {**offered, **stored()}.get(name)
        if path is None:
            return failed(LabError("There is no such result.")), *(keep,) * 5
        return show(path, name)

    def finish(found: tuple[grid.Measured, cost_report.Held, dict[str, Any]], *, complete: bool) -> tuple[Any, ...]:
        """Fit, save and show what was measured."""
        measured, held, about = found
        try:
            summary = cost_report.summarise(measured, held, max_batch=64)
        except LabError as error:
            return failed(error), *(keep,) * 5
        path = env.cache_dir() / "results" / f"cost-{secrets.token_hex(4)}.json"
        line = Status("done", "Measured." if complete else "Stopped: fitted to what was measured.", detail=f"saved as {path.stem}")
        try:
            result.save(path, "cost", about, {"complete": complete, "alternating": True, **summary})
        except LabError as error:  # minutes of measuring are shown all the same
            line = Status.error(error)
        shown = explain(summary, "Measured here"), value_of(panels(summary))
        return say(line), *shown, gr.Dropdown(choices=list(stored())), keep, keep

    @working
    async def run_measure(state: Session, kind: str, typed_ks: str, typed_batches: str) -> AsyncIterator[tuple[Any, ...]]:
        state.active, name = "why", secrets.token_hex(8)
        state.why = None
        lanes: tuple[Lane, ...] = ()
        try:
            wanted, at_once = numbers(typed_ks or "", lab.recipe.k_max), numbers(typed_batches or "", 64)
            if kind not in lab.recipe.drafts:
                raise LabError("A cost model needs a draft.", todo="Choose one.")
            chosen: DraftChoice = "fp8" if kind == "fp8" else "bf16"
            lanes = Lane(lab.recipe, "none"), Lane(lab.recipe, chosen, max(wanted))
            room(lanes, lab.engine.status())
            files = gather(KINDS)
            prompts = tuple(prompt for file in files for prompt in file.prompts)
            plan = grid.Plan(*lanes, ks=tuple(wanted), concurrencies=tuple(at_once), prompts=prompts, rounds=2, max_tokens=48, probes=8)
            held = cost_report.Held(cost_report.middle(wanted), cost_report.middle(at_once))
            for lane in lanes:
                async for line in wait_ready(lab.engine, lane, []):
                    yield say(line), keep, keep, keep, gr.Tabs(selected="why"), keep
            about = await asyncio.to_thread(origin.describe, lanes, files, max_tokens=48, rounds=2)
        except LabError as error:
            yield failed(error), keep, keep, keep, keep, restart_offer(lab, state, *lanes)
            return
        measured = grid.Measured(plan)
        measuring[name] = (measured, held, about)
        state.why = name
        said: list[str] = []

        @asynccontextmanager
        async def use(lane: Lane) -> AsyncIterator[Endpoint]:
            async with lab.engine.use(lane) as endpoint:
                yield endpoint

        running = asyncio.create_task(grid.measure(measured, use, said.append))
        try:
            while not running.done():
                await asyncio.wait({running}, timeout=0.5)
                line = Status("busy", "Measuring K and concurrency in turns", detail=said[-1] if said else "warming up")
                yield say(line), *(keep,) * 5
            await running
        except LabError as error:
            yield failed(error), *finish(measuring.pop(name), complete=False)[1:-1], restart_offer(lab, state, *lanes)
            return
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError, LabError):
                await running
        yield finish(measuring.pop(name), complete=True)

    @working
    async def every_k(state: Session) -> AsyncIterator[tuple[Any, ...]]:
        state.active, state.why = "why", None
        run = lab.runs.get(state.run)
        lanes: tuple[Lane, ...] = ()
        try:
            if run is None or not whatif.answer_of(run.request.steps).depth:
                raise LabError("There is no run with a draft yet.", todo="Run a prompt in the microscope first.")
            if run.request.settings.get("temperature"):
                raise LabError(
                    "Only a greedy answer can be replayed.",
                    why="Above temperature 0 another K draws another answer.",
                    todo="Run the prompt at temperature 0.",
                )
            if run.state == "opened":
                yield say(Status("done", "From the recording alone.")), run_table(run, None), keep, keep, gr.Tabs(selected="why"), keep
                return
            lane = Lane(lab.recipe, run.kind, int(run.request.settings.get("k") or 1), compiled=lab.recipe.compiled)
            lanes = (lane,)
            async for line in wait_ready(lab.engine, lane, []):
                yield say(line), keep, keep, keep, gr.Tabs(selected="why"), keep
            line = Status("busy", "Asking once more with drafts withheld")
            yield say(line), run_table(run, None), keep, keep, gr.Tabs(selected="why"), keep
            async with lab.engine.use(lane) as endpoint:
                most = int(run.request.settings.get("max_tokens") or 128)
                probe = await grid.ask(endpoint, Prompt("run", "run", run.request.prompt), most, {WITHHOLD_ARGUMENT: 1})
        except LabError as error:
            yield failed(error), keep, keep, keep, keep, restart_offer(lab, state, *lanes)
            return
        yield say(Status("done", f"Every K for {run.label}.")), run_table(run, probe), keep, keep, keep, keep

    def after_stop(state: Session) -> tuple[Any, ...]:
        if state.active != "why":
            return (keep,) * len(outputs)
        found = measuring.pop(state.why, None) if state.why else None
        if found is None:  # an engine was starting, or one answer was asked for
            return say(Status("info", "Stopped.")), *(keep,) * 5
        return finish(found, complete=False)

    quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
    events = [
        measure.click(run_measure, [session, draft, ks, batches], outputs, **quiet, **CONCURRENCY),
        mine.click(every_k, [session], outputs, **quiet, **CONCURRENCY),
    ]
    pick.input(show_stored, [pick], outputs, queue=False, **quiet)
    opened.upload(lambda file: show(Path(file), Path(file).name), [opened], outputs, queue=False, **quiet)
    return Why(events, [measure.click, mine.click], outputs, after_stop)
