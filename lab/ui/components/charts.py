"""Panels of charts, each one persistent plotly drawing that `Plotly.react` updates; the server makes the figures.

The value is a list of `[title, chart]`; a chart whose JSON did not change is not drawn again. Send at most `HERTZ` a second: the charts
share the machine with the engine that they measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

import gradio as gr

from lab.plots import Chart, Series, acceptance_by_position, accepted_per_step, confidence, speed_ups, throughput
from lab.recipes.model import DraftChoice
from lab.ui.components import live
from lab.ui.feed import dump
from lab.ui.numbers import Numbers
from lab.ui.state import Run

HERTZ = 2.0
Panels = Sequence[tuple[str, Chart]]


def plotly_script() -> str:
    """Path of the plotly.js that belongs to the installed plotly.py."""
    return str(resources.files("plotly") / "package_data" / "plotly.min.js")


def value_of(panels: Panels) -> str:
    """Panels as the element's value."""
    return dump([[title, chart] for title, chart in panels])


def charts(panels: Panels, *, elem_id: str) -> gr.HTML:
    """The element, with its first panels."""
    return live("charts", value_of(panels), elem_id=elem_id)


def series_of(run: Run, label: str = "") -> Series:
    """A run's speed over time."""
    points = [point for point in run.speed if point[0] > 0]
    name = label or {"none": "baseline", "bf16": "Eagle3 BF16", "fp8": "Eagle3 FP8"}[run.kind]
    if not label and run.kind != "none" and (k := run.request.settings.get("k")):
        name = f"{name}, K={k}"
    return Series(name, run.kind, tuple(point[0] for point in points), tuple(point[1] for point in points))


def microscope_panels(numbers: Numbers, kind: DraftChoice, lines: Sequence[Series]) -> Panels:
    """The microscope's four panels: speed of the latest run of each lane, and three views of the run on screen."""
    counts = numbers.counts
    why = "the draft's probabilities are not available here" if numbers.unread else ""
    if kind == "none":
        why = "no draft in this run"
    return (
        ("Output tok/s, latest run of each lane", throughput(lines, theme="page")),
        ("Acceptance by draft position", acceptance_by_position(counts.accepted_at, counts.drafts, kind=kind, theme="page")),
        ("Accepted per step", accepted_per_step(counts.histogram, kind=kind, theme="page")),
        ("Does the draft know? Accepted by its confidence", confidence(numbers.confidence, kind=kind, theme="page", note=why)),
    )


def beside_panels(baseline: Run | None, other: Run | None, pairs: Sequence[tuple[float, float]], kind: DraftChoice) -> Panels:
    """The comparison's two panels."""
    lines = [series_of(run) for run in (baseline, other) if run is not None]
    return (
        ("Output tok/s while each lane answers", throughput(lines, theme="page")),
        ("Pairs of runs with these settings", speed_ups(pairs, kind=kind, theme="page")),
    )
