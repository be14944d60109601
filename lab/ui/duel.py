"""The duel's tab: two drafts on the same prompts, what each had accepted where, and one plain sentence about it.

The first draft is the one that the others are compared with; "each level in turn" lets it meet itself without its low, middle and high
feature level. `lab.bench.duel` measures and counts, this file asks the engine and shows. K, temperature and new tokens come from the bar,
the typed prompt too where it is chosen. Saved traces and shipped results are shown by the same element, named as what they are.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import gradio as gr

from lab import provenance
from lab.bench import duel as core
from lab.bench import reports, result
from lab.bench.contestants import contestant, draft_names, label, one_setting
from lab.bench.duel_page import html
from lab.bench.duel_text import overview, places, rows
from lab.bench.prompts import KINDS, Prompt, shipped
from lab.errors import LabError
from lab.plots import intervals, positions
from lab.recipes.model import LEVELS
from lab.serving.client import Event
from lab.trace.io import load
from lab.trace.render import visible
from lab.ui.app import CONCURRENCY, Frame, Lab, failed, restart_offer, say, working
from lab.ui.components import live
from lab.ui.components.charts import Panels, charts, value_of
from lab.ui.feed import dump
from lab.ui.runner import Status, wait_ready
from lab.ui.state import Session, Settings

TYPED = "The typed prompt"
EACH = "each level cut off in turn"
#: How many prompts of a kind a duel on the page asks.
OFFERED = (8, 24)
#: Answers that one file may bring, so that a large one does not hold the page up.
MOST_ANSWERS = 200


@dataclass(frozen=True)
class Duel:
    """What the page needs of the tab."""

    events: list[Any]
    start: Any
    outputs: list[Any]
    after_stop: Callable[[Session], tuple[Any, ...]]


def prompt_choices() -> list[str]:
    """What can be asked: the typed prompt, some of each shipped kind, and a mixture."""
    few, many = OFFERED
    return [f"Mixed: {many} prompts", *(f"{kind.capitalize()}: {few} prompts" for kind in KINDS), TYPED]


def chosen_prompts(choice: str, typed: str) -> tuple[Prompt, ...]:
    """The prompts behind a choice; raises `LabError` for none."""
    few, many = OFFERED
    if choice == TYPED:
        if not typed.strip():
            raise LabError("The prompt is empty.", todo="Type a prompt or choose prompts of the lab.")
        return (Prompt("typed", "typed", typed),)
    if choice not in prompt_choices():
        raise LabError("These prompts are not known.", todo=f"Choose from: {', '.join(prompt_choices())}.")
    kinds = [kind for kind in KINDS if choice.lower().startswith(kind)] or KINDS
    each = many // len(KINDS) if len(kinds) > 1 else few
    return tuple(prompt for kind in kinds for prompt in shipped(kind).prompts[:each])


def view(report: dict[str, Any], *, title: str, state: str) -> str:
    """The report as the element's value: text as runs, numbers as words. `state`: running, done, stopped or opened."""
    comparisons = []
    for comparison in report["comparisons"]:
        entries = [
            {
                "name": entry["prompt"],
                "text": list(visible(entry["text"][:300], spaces=False)),
                "accepted": [f"{a} of {d}" for a, d in zip(entry["accepted"], entry["draft_tokens"], strict=True)],
                "places": entry["places"],
                "parted": entry["parted"],
                "rest": [[text for text, _ in side] for side in entry["rest"]],
            }
            for entry in comparison["prompts"]
        ]
        comparisons.append(
            {
                "one": comparison["one"],
                "other": comparison["other"],
                "kinds": comparison["kinds"],
                "outcome": comparison["outcome"],
                "sentence": comparison["sentence"],
                "warnings": comparison["warnings"],
                "rows": rows(comparison),
                "places": places(comparison),
                "counts": comparison["places"],
                "prompts": entries,
            }
        )
    table = overview(report) if len(comparisons) > 1 else None
    cut = any(contestant["kind"] == "cut" for contestant in report["contestants"])
    notes = [*report["notes"], *([control] if cut and (control := reports.control()) else [])]
    setting = [f"{each}." for each in report["setting"]["changed"]]
    return dump({"title": title, "state": state, "notes": [*setting, *notes], "overview": table, "comparisons": comparisons})


def panels(report: dict[str, Any] | None) -> Panels:
    """Acceptance by position of every draft, and the differences of the mean acceptance length."""
    if report is None:
        return (("Acceptance by draft position", positions([], theme="page")), ("Difference in length", intervals([], x="", theme="page")))
    comparisons = report["comparisons"]
    first = comparisons[0]
    drafts = [(first["one"], first["kinds"][0], [found["one"] for found in first["accepted_by_position"]])]
    drafts += [(each["other"], each["kinds"][1], [found["other"] for found in each["accepted_by_position"]]) for each in comparisons]
    lengths = [
        (each["other"], each["kinds"][1], found["difference"], found["low"], found["high"])
        for each in comparisons
        if (found := each["mean_acceptance_length"]) is not None
    ]
    title = f"Mean acceptance length less {first['one']}'s, with its 95% interval"
    return (
        ("Acceptance by draft position", positions(drafts, theme="page")),
        (title, intervals(lengths, x="tokens a verify step", theme="page")),
    )


def export(lab: Lab, report: dict[str, Any], origin: dict[str, Any]) -> tuple[str | None, str | None]:
    """Write the report as JSON and as a page for the download buttons; None where there is no room."""
    base = lab.folder / f"duel-{secrets.token_hex(6)}"
    try:
        found = result.save(base.with_suffix(".json"), core.REPORT, origin, report, indent=None)
        provenance.write_text(base.with_suffix(".html"), html(report, origin))
    except (LabError, OSError):
        return None, None
    return str(found), str(base.with_suffix(".html"))


def duel(lab: Lab, frame: Frame) -> Duel:
    """Draw the tab and wire its handlers."""
    names = draft_names(lab.recipe)
    drafts = [(label(name), name) for name in names]
    cuts = any("-" in name for name in names)
    others = [*drafts, *([(EACH, EACH)] if cuts else [])]
    stored = reports.shipped()
    first_other = "fp8" if "fp8" in lab.recipe.drafts else others[-1][1] if others else None
    with gr.Tab("Duel", id="duel", elem_id="e3-tab-duel"):
        with gr.Row(elem_classes=["e3-strip", "e3-duel-strip"]):
            bare: dict[str, Any] = {"show_label": False, "container": False, "min_width": 90}
            one = gr.Dropdown(drafts, value=names[0] if names else None, label="First draft", elem_id="e3-duel-one", **bare)
            gr.HTML("against", elem_classes=["e3-duel-word"])
            other = gr.Dropdown(others, value=first_other, label="Second draft", elem_id="e3-duel-other", **bare)
            asked = gr.Dropdown(prompt_choices(), value=prompt_choices()[1], label="Prompts", elem_id="e3-duel-prompts", **bare)
            run = gr.Button("Run the duel", variant="primary", elem_id="e3-duel-run", min_width=0, size="sm")
            with gr.Row(elem_classes=["e3-files"]):
                pick = gr.Dropdown(
                    [("Shipped results", ""), *((name, name) for name in stored)],
                    value="",
                    label="Shipped results",
                    elem_id="e3-duel-pick",
                    visible=bool(stored),
                    **bare,
                )
                opened = gr.UploadButton(
                    "Open two traces", file_types=[".jsonl"], file_count="multiple", size="sm", min_width=0, elem_id="e3-duel-open"
                )
                data = gr.DownloadButton("JSON", interactive=False, size="sm", min_width=0, elem_id="e3-duel-json")
                page = gr.DownloadButton("Page", interactive=False, size="sm", min_width=0, elem_id="e3-duel-html")
        with gr.Row(elem_classes=["e3-stage"]):
            shown = live("duel", elem_id="e3-duel")
            drawn = charts(panels(None), elem_id="e3-duel-charts")

    session, status = frame.session, frame.status
    outputs = [status, shown, drawn, data, page, frame.tabs, frame.restart]
    keep = gr.skip()

    def finish(report: dict[str, Any], origin: dict[str, Any], line: Status, *, title: str, state: str) -> tuple[Any, ...]:
        """Everything that shows a report which is whole, or as whole as it gets."""
        found = export(lab, report, origin)
        buttons = [gr.DownloadButton(value=path, interactive=path is not None) for path in found]
        return say(line), view(report, title=title, state=state), value_of(panels(report)), *buttons, keep, keep

    def plan_of(first: str, second: str, choice: str, settings: Settings) -> core.Plan:
        against = [f"{first}-{level}" for level in LEVELS] if second == EACH else [second]
        known = [name for _, name in drafts]
        if unknown := next((name for name in (first, *against) if name not in known and name.rpartition("-")[0] not in known), None):
            raise LabError(f"There is no draft '{unknown}' here.", todo=f"Choose from: {', '.join(known)}.")
        contestants, changed = one_setting([contestant(name, lab.recipe, settings.k, compiled=False) for name in (first, *against)])
        together = lab.engine.fit_together([each.lane for each in contestants])
        return core.Plan(
            tuple(contestants),
            chosen_prompts(choice, settings.prompt),
            settings.max_tokens,
            settings.temperature,
            alternate=together,
            changed=tuple(changed),
        )

    def origin_of(plan: core.Plan) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        shared = provenance.collect(
            recipe=lab.recipe.name,
            contestants=[{"name": each.name, "lane": each.lane.key} for each in plan.contestants],
            settings={"max_tokens": plan.max_tokens, "temperature": plan.temperature, "rest_s": core.REST},
        )
        return shared, core.about(plan.contestants, shared)

    async def measure(plan: core.Plan, measured: core.Measured) -> AsyncIterator[Status | core.Turn]:
        """Statuses while engines start, then every turn."""

        async def ask(index: int, prompt: Prompt, max_tokens: int) -> AsyncIterator[Event]:
            endpoint = await lab.engine.endpoint(plan.contestants[index].lane)
            source = lab.engine.generate(endpoint, prompt.text, temperature=plan.temperature, max_tokens=max_tokens)
            async with aclosing(cast(Any, source)) as events:
                async for event in events:
                    yield event

        async def ready(index: int) -> AsyncIterator[Status]:
            lane = plan.contestants[index].lane
            async for line in wait_ready(lab.engine, lane, []):
                yield line
            yield Status("busy", f"Warming up {lane.label}", detail="two short answers, not measured")
            await core.warm_up(plan, index, ask)

        async def turns(only: int | None) -> AsyncIterator[core.Turn]:
            async with aclosing(cast(Any, core.measure(measured, ask, only=only))) as running:
                async for turn in running:
                    yield turn

        several = range(len(plan.contestants))
        for group in [list(several)] if plan.alternate else [[index] for index in several]:
            for index in group:
                async for line in ready(index):
                    yield line
            async for turn in turns(None if plan.alternate else group[0]):
                yield turn

    @working
    async def run_duel(state: Session, first: str, second: str, choice: str, *values: Any) -> AsyncIterator[tuple[Any, ...]]:
        state.active = "duel"
        try:
            settings = replace(Settings.of(lab.recipe, *values), alternatives=False)
            if settings.k == 0:  # the bar says "none": K is what a duel still needs
                settings = replace(settings, k=lab.recipe.k)
            plan = plan_of(first, second, choice, settings)
        except LabError as error:
            yield failed(error), *(keep,) * 6
            return
        measured = core.Measured(plan)
        title = " against ".join([plan.contestants[0].name, ", ".join(each.name for each in plan.contestants[1:])])
        shared, about = origin_of(plan)
        state.duel = (measured, shared, about, title)
        whole = 0
        try:
            async for news in measure(plan, measured):
                if isinstance(news, Status):
                    yield say(news), keep, keep, keep, keep, gr.Tabs(selected="duel"), keep
                    continue
                name = plan.contestants[news.contestant].name
                line = Status("busy", f"Duel: {title}", f"{news.done} of {news.turns} answers, the last by {name}", news.done / news.turns)
                if len(measured.whole()) > whole:
                    whole = len(measured.whole())
                    report = await asyncio.to_thread(core.summarise, measured, about)
                    yield say(line), view(report, title=title, state="running"), value_of(panels(report)), keep, keep, keep, keep
                else:
                    yield say(line), *(keep,) * 6
        except LabError as error:
            again = restart_offer(lab, state, *(each.lane for each in plan.contestants))
            if not measured.whole():
                yield failed(error), *(keep,) * 5, again
            else:
                report = core.summarise(measured, about)
                yield failed(error), *finish(report, shared, Status("done", ""), title=title, state="stopped")[1:-1], again
            return
        report = await asyncio.to_thread(core.summarise, measured, about)
        line = Status("done", f"Done: duel of {title}", f"{len(plan.prompts)} prompts, one setting, only the draft changed")
        yield finish(report, shared, line, title=title, state="done")

    def after_stop(state: Session) -> tuple[Any, ...]:
        if state.active != "duel" or state.duel is None:
            return (keep,) * len(outputs)
        measured, shared, about, title = state.duel
        if not measured.whole():
            return say(Status("info", "Stopped before a prompt was answered by both drafts.")), *(keep,) * 6
        report = core.summarise(measured, about)
        line = Status("done", f"Stopped after {len(measured.whole())} of {len(measured.plan.prompts)} prompts: what was measured is kept.")
        return finish(report, shared, line, title=title, state="stopped")

    def open_traces(files: list[str] | None) -> tuple[Any, ...]:
        try:
            if not files or len(files) != 2:
                raise LabError("A duel of recordings needs two of them.", todo="Choose two traces of the same prompts (.jsonl) at once.")
            traces = [(Path(file).stem, load(file)) for file in files]
            for name, trace in traces:
                if len(trace.requests) > MOST_ANSWERS:
                    raise LabError(f"{name} holds {len(trace.requests)} answers; the page compares up to {MOST_ANSWERS}.")
                if not trace.requests:
                    raise LabError(f"{name} holds no request.", todo="Choose another trace.")
            report = core.from_traces(traces)
        except LabError as error:
            return failed(error), *(keep,) * 6
        called = [each["name"] for each in report["contestants"]]
        recordings = [{"name": name, "provenance": trace.provenance} for name, (_, trace) in zip(called, traces, strict=True)]
        origin = provenance.collect(recordings=recordings)
        line = Status("done", "Opened two traces of the same prompts.", f"{report['setting']['prompts']} prompts are in both")
        return finish(report, origin, line, title="two saved traces", state="opened")

    def show_stored(name: str) -> tuple[Any, ...]:
        try:
            if not name:
                return (keep,) * len(outputs)
            if name not in stored:
                raise LabError("There is no such result.")
            report, origin = reports.load(stored[name])
        except LabError as error:
            return failed(error), *(keep,) * 6
        machine = origin.get("hardware", {})
        where = f"{provenance.processor(machine)}, {origin.get('made', 'no date')}"
        line = Status("done", f"A shipped result, not measured now: {name.removeprefix('Measured: ')}", detail=where)
        return finish(report, origin, line, title=f"{name}, {where}", state="opened")

    quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
    running = run.click(run_duel, [session, one, other, asked, *frame.bar.inputs], outputs, **quiet, **CONCURRENCY)
    opened.upload(open_traces, [opened], outputs, **quiet)
    pick.input(show_stored, [pick], outputs, queue=False, **quiet)
    return Duel([running], run.click, outputs, after_stop)
