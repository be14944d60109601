"""Measured data to charts: pure functions without state, shared by the page, the notebooks and the README.

A chart is a figure in plotly's JSON form, as a dictionary. The page sends it as it is: building plotly's objects takes 20 ms a chart, which
a machine that runs the engine too would feel. `figure()` makes the plotly object for a notebook. Every chart comes in three palettes:
`light` and `dark` with colours written out, and `page`, whose colours are names of CSS variables (`var(--e3-bf16)`) that the page's own
script fills in from the theme it is shown in. A lane has the same colour, dash, marker and hatch everywhere.
`["layout"]["meta"]["summary"]` says in words what the chart shows, for people who do not see it.
"""

from __future__ import annotations

from lab.plots.answer import acceptance_by_position, accepted_per_step, confidence, speed_ups
from lab.plots.bars import Role, grouped, predictions, step_parts
from lab.plots.base import FONT, PALETTES, Chart, Kind, Theme, figure, script
from lab.plots.cache import CacheRow, cache_at_context, cache_per_token
from lab.plots.drafts import intervals, positions, tensor_errors, tensor_sizes
from lab.plots.lines import Curve, Series, curves, markers, throughput

__all__ = [
    "FONT",
    "PALETTES",
    "CacheRow",
    "Chart",
    "Curve",
    "Kind",
    "Role",
    "Series",
    "Theme",
    "acceptance_by_position",
    "accepted_per_step",
    "cache_at_context",
    "cache_per_token",
    "confidence",
    "curves",
    "figure",
    "grouped",
    "intervals",
    "markers",
    "positions",
    "predictions",
    "script",
    "speed_ups",
    "step_parts",
    "tensor_errors",
    "tensor_sizes",
    "throughput",
]
