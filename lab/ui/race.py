"""The race's tab: lanes of one's choice against each other, live. `lab.bench.race` measures, this file starts engines and shows.

Lanes of a race are never traced, and all eager or all compiled; servers elsewhere race as the lanes whose place
the operator gave them. Every lane is held until the race is over,
so none is stopped to make room for another; lanes that do not fit together are refused before any engine starts. Stop ends the race and
keeps what was measured, and so does closing the page: the race then ends by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, cast

import gradio as gr

from lab import provenance
from lab.bench import pairs, result
from lab.bench.prompts import KINDS, shipped
from lab.bench.race import HERTZ, LENGTH_WINDOW, WINDOW, Plan, Race, Racer, check, room
from lab.errors import LabError
from lab.plots import Curve, curves
from lab.recipes.model import DraftChoice
from lab.serving.command import Lane
from lab.ui.app import CONCURRENCY, Frame, Lab, failed, say, working
from lab.ui.bar import DRAFT_NAMES
from lab.ui.compare import busy
from lab.ui.components import live
from lab.ui.components.charts import Panels, charts, value_of
from lab.ui.feed import dump
from lab.ui.runner import Status, wait_ready
from lab.ui.state import Session

#: Seconds between updates of the page: the browser shares the processor with the engines.
PERIOD = 0.45
#: The charts below the first are drawn anew every so many updates.
SLOW = 4
#: Points of a line that are drawn: the latest.
SHOWN = 240
EVERY = "all kinds"
MODES = ("eager", "compiled")


@dataclass(frozen=True)
class RaceTab:
    """What the page needs of the tab."""

    events: list[Any]
    start: Any
    outputs: list[Any]
    after_stop: Callable[[Session], tuple[Any, ...]]


def numbers(text: str, most: int) -> list[int]:
    """K as typed: "3", "1, 3"; raises `LabError` for anything else."""
    parts = [part.strip() for part in text.replace(";", ",").split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and 1 <= int(part) <= most for part in parts):
        raise LabError(f"K = '{text.strip()[:40]}' is not a list of whole numbers.", todo=f"Type K from 1 to {most}, for example: 1, 3.")
    return list(dict.fromkeys(int(part) for part in parts))


def whole(value: float | None, name: str) -> int:
    """A number field as a whole number."""
    if value is None or not float(value).is_integer():
        raise LabError(f"{name} is not a whole number.")
    return int(value)


def lanes_of(lab: Lab, drafts: Sequence[str], ks: str, mode: str) -> list[Lane]:
    """The lanes that were chosen, the baseline first, untraced."""
    if mode not in MODES:
        raise LabError(f"There is no mode '{mode}'.", todo="Choose eager or compiled.")
    lanes = [Lane(lab.recipe, "none", 0, compiled=mode == "compiled", traced=False)] if "none" in drafts else []
    with_draft = [draft for draft in drafts if draft != "none"]
    for k in numbers(ks, lab.recipe.k_max) if with_draft else []:
        lanes += [Lane(lab.recipe, cast(DraftChoice, draft), k, compiled=mode == "compiled", traced=False) for draft in with_draft]
    return list({lane.key: lane for lane in lanes}.values())  # a server elsewhere has its own K, whichever was typed


def panels(race: Race | None, before: Panels = ()) -> Panels:
    """Speed over each lane's own time, and under it acceptance and requests; these two are taken from `before` where it is given, because
    the browser that draws them shares the processor with the engines."""

    def panel(y: str, read: Callable[[Any], float | None], digits: int, *, legend: bool = False) -> Any:
        lines = []
        for place, racer in enumerate(race.racers if race else ()):
            points = [(one.at, read(one)) for one in race.lines[place].samples[-SHOWN:]] if race else []
            points = [point for point in points if point[1] is not None]
            if points:
                x, values = zip(*points, strict=True)
                lines.append(Curve(racer.label, racer.kind, tuple(round(at, 2) for at in x), tuple(round(value, 2) for value in values)))
        own = "seconds of the lane's own turns"
        chart = curves(lines, x=own, y=y, theme="page", digits=digits, legend=legend, empty="appears with the first turn")
        last = "; ".join(f"{line.label}: {line.y[-1]:.{digits}f} last, over {len(line.x)} points" for line in lines)
        chart["layout"]["meta"]["summary"] = f"{y} over {own}. {last}"  # not every point: there are hundreds
        for trace in chart["data"]:
            trace["marker"]["size"] = 4
        return chart

    first = ("Output tok/s, from the servers' /metrics", panel(f"tok/s ({WINDOW:g} s average)", lambda one: one.rate, 1, legend=True))
    if before:
        return (first, *before[1:])
    return (
        first,
        (f"Mean acceptance length (with bonus, {LENGTH_WINDOW:g} s average)", panel("tokens a step", lambda one: one.length, 2)),
        ("Requests in the batch", panel("requests", lambda one: one.running, 0)),
    )


def _span(one: pairs.Estimate, digits: int, unit: str = "") -> list[str]:
    return [f"{one.value:.{digits}f}{unit}", f"{one.low:.{digits}f} to {one.high:.{digits}f}"]


def standing(race: Race | None) -> str:
    """Value of the table: per lane its speed, its speed-up so far with the spread, its acceptance, and what it is doing."""
    if race is None:
        return dump({"rows": [], "notes": ["Choose lanes and press “Start the race”. Prompts are asked greedily, on every lane the same."]})
    rows = []
    over = race.racers[race.base].label
    for place, racer in enumerate(race.racers):
        rate, ratio, length = race.rate(place), race.speedup(place), race.lines[place].length
        same, answers = race.identical(place)
        gone = race.out.get(place)
        state = "out" if gone else "running" if place in race.now else "over" if race.over else "waits for its turn"
        rows.append(
            {
                "label": racer.label,
                "kind": racer.kind,
                "rate": _span(rate, 1) if rate else None,
                "ratio": _span(ratio.pooled, 2, "×") if ratio else None,
                "single": f"single rounds from {ratio.least:.2f}× to {ratio.most:.2f}×" if ratio else "",
                "base": place == race.base,
                "length": f"{length:.2f}" if length else "–",
                "rounds": sum(place in one for one in race.rounds),
                "same": f"{same} of {answers}" if answers and place != race.base else "–",
                "state": state,
                "why": str(gone) if gone else "",
            }
        )
    plan = race.plan
    modes = sorted({racer.mode or "not known here" for racer in race.racers})
    machines = {racer.machine for racer in race.racers}
    count = len(race.rounds)
    notes = [
        f"Speed-up over {over}: tokens over seconds of whole rounds, both lanes' rounds together; 95% bootstrap interval over"
        f" {count} round{'' if count == 1 else 's'}{' (one round has no spread)' if count == 1 else ''}.",
        f"Mode: {', '.join(modes)}; none is traced. Concurrency {plan.concurrency}, {plan.per_turn} to a turn, up to {plan.max_tokens}"
        " new tokens, greedy.",
        "The lanes take turns on this machine, in balanced order." if len(machines) == 1 else "Lanes on other machines run side by side.",
    ]
    if race.shared:
        who = ", ".join(race.racers[place].label for place in sorted(race.shared))
        notes.append(f"⚠ Somebody else uses {who}: its speed is shared.")
    if warning := busy(os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, os.cpu_count() or 1):
        notes.append(f"⚠ {warning}")
    return dump({"rows": rows, "notes": notes})


def race_file(lab: Lab, race: Race) -> str | None:
    """Write the race for the save button; None where nothing was measured or there is no room."""
    if not race.rounds:
        return None
    origin = provenance.collect(
        recipe=lab.recipe.name,
        lanes=[racer.endpoint.lane.key if racer.endpoint.lane else racer.endpoint.url for racer in race.racers],
        prompts=[prompt.id for prompt in race.plan.prompts],
        settings={"concurrency": race.plan.concurrency, "max_tokens": race.plan.max_tokens, "seed": race.plan.seed},
    )
    try:
        return str(result.save(lab.folder / f"race-{secrets.token_hex(6)}.json", "race", origin, race.summary()))
    except LabError:
        return None


def race_tab(lab: Lab, frame: Frame) -> RaceTab:
    """Draw the tab and wire its handlers."""
    choices = [("Baseline" if one == "none" else DRAFT_NAMES[one], one) for one in lab.recipe.draft_choices()]
    with gr.Tab("Race", id="race", elem_id="e3-tab-race"):
        with gr.Row(elem_classes=["e3-strip", "e3-race-strip"]):
            drafts = gr.CheckboxGroup(
                choices, value=["none", *list(lab.recipe.drafts)[:1]], label="Lanes", elem_id="e3-race-lanes", min_width=0
            )
            ks = gr.Textbox(str(lab.recipe.k), label="K (one or more)", elem_id="e3-race-k", min_width=0, max_lines=1)
            mode = gr.Dropdown(list(MODES), value="eager", label="Mode", elem_id="e3-race-mode", min_width=0)
            concurrency = gr.Number(1, label="Concurrency", step=1, elem_id="e3-race-concurrency", min_width=0)
            kind = gr.Dropdown([EVERY, *KINDS], value="chat", label="Prompts", elem_id="e3-race-prompts", min_width=0)
            tokens = gr.Number(96, label="New tokens", step=16, elem_id="e3-race-tokens", min_width=0)
            rounds = gr.Number(20, label="Rounds", step=1, elem_id="e3-race-rounds", min_width=0)
            start = gr.Button("Start the race", variant="primary", elem_id="e3-race-start", min_width=0, size="sm")
            save = gr.DownloadButton("Save", interactive=False, size="sm", min_width=0, elem_id="e3-race-save")
        with gr.Row(elem_classes=["e3-stage"]):
            drawn = charts(panels(None), elem_id="e3-race-charts")
            table = live("race", standing(None), elem_id="e3-race")

    session, status = frame.session, frame.status
    outputs = [status, table, drawn, save, frame.restart, frame.tabs]
    keep = gr.skip()

    def finish(race: Race, line: Status) -> tuple[Any, ...]:
        path = race_file(lab, race)
        button = gr.DownloadButton(value=path, interactive=path is not None)
        return say(line), standing(race), value_of(panels(race)), button, keep, keep

    def end_of(race: Race) -> Status:
        count, reasons = len(race.rounds), [str(error) for error in race.out.values()]
        if reasons:
            what = f"{len(reasons)} of {len(race.racers)} lanes left the race; {count} whole rounds are kept."
            return Status("error", what, detail=reasons[0][:160], more=reasons)
        best = [(ratio.pooled, place) for place in range(len(race.racers)) if (ratio := race.speedup(place))]
        said = ", ".join(f"{race.racers[place].label} {one}×" for one, place in best)
        return Status("done", f"Done: {count} rounds: {said}" if said else f"Done: {count} rounds.")

    @working
    async def run_race(state: Session, *values: Any) -> AsyncIterator[tuple[Any, ...]]:
        state.active, state.race = "race", None
        chosen, typed, how, at_once, kinds, most, count = values
        lanes: list[Lane] = []
        current: Lane | None = None
        try:
            lanes = lanes_of(lab, chosen or [], typed or "", how)
            if kinds not in (EVERY, *KINDS):
                raise LabError(f"There are no prompts '{kinds}'.")
            prompts = tuple(prompt for one in (KINDS if kinds == EVERY else [kinds]) for prompt in shipped(one).prompts)
            plan = Plan(prompts, whole(at_once, "Concurrency"), whole(most, "New tokens"), whole(count, "Rounds"))
            check(lanes)
            room(lanes, lab.engine.status())
        except LabError as error:
            yield failed(error), *(keep,) * 5
            return
        async with AsyncExitStack() as stack:
            try:
                racers = []
                for lane in lanes:
                    current = lane
                    async for line in wait_ready(lab.engine, lane, []):
                        yield say(line), keep, keep, keep, gr.Button(visible=False), gr.Tabs(selected="race")
                    endpoint = await stack.enter_async_context(lab.engine.use(lane))
                    racers.append(Racer(lane.label, lane.draft, endpoint))
                current = None
            except LabError as error:
                state.failed = current
                yield failed(error), keep, keep, keep, gr.Button(visible=True), keep
                return
            race = state.race = Race(racers, plan)
            running = asyncio.create_task(race.run())
            try:
                shown = panels(race)
                yield keep, standing(race), value_of(shown), gr.DownloadButton(interactive=False), keep, gr.Tabs(selected="race")
                for tick in itertools.count():
                    if running.done():
                        break
                    await asyncio.wait({running}, timeout=PERIOD)
                    shown = panels(race, shown if tick % SLOW else ())
                    now = ", ".join(race.racers[place].label for place in sorted(race.now))
                    fraction = len(race.rounds) / plan.rounds
                    line = Status(
                        "busy", f"Race: {race.stage}", detail=f"{now}; {HERTZ:g} readings a second" if now else "", fraction=fraction
                    )
                    yield say(line), standing(race), value_of(shown), keep, keep, keep
                await running
            finally:
                running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await running
            for place in race.out:  # the lab knows more than the connection: the log of an engine that ended
                lane_ = race.racers[place].endpoint.lane
                known = next((one.error for one in lab.engine.status() if lane_ and one.lane.key == lane_.key and one.error), None)
                if known is not None:
                    race.out[place], state.failed = known, lane_
            yield *finish(race, end_of(race))[:4], gr.Button(visible=bool(race.out) and state.failed is not None), keep

    def after_stop(state: Session) -> tuple[Any, ...]:
        race = state.race
        if state.active != "race":
            return (keep,) * len(outputs)
        if race is None:
            return say(Status("info", "Stopped before the race began.")), *(keep,) * 5
        count = len(race.rounds)
        line = Status("done", f"Stopped after {count} whole round{'' if count == 1 else 's'}: what was measured is kept.")
        return finish(race, line)

    given = [session, drafts, ks, mode, concurrency, kind, tokens, rounds]
    running = start.click(run_race, given, outputs, show_progress="hidden", api_visibility="private", **CONCURRENCY)
    return RaceTab([running], start.click, outputs, after_stop)
