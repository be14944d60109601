"""Drafts beside each other: acceptance by position, differences with their intervals, and what quantising did to each tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lab.plots.base import ABOVE, PALETTES, SHARE, STYLE, Chart, Kind, Theme, bar_marker, new_chart, note_on


def positions(drafts: Sequence[tuple[str, Kind, Sequence[float]]], *, theme: Theme = "light") -> Chart:
    """Acceptance by draft position of several drafts side by side: `(name, kind, share at position 1, 2, ...)` each."""
    said = "; ".join(f"{name}: {', '.join(f'{share:.0%}' for share in shares)}" for name, _, shares in drafts)
    chart = new_chart(theme, x="draft position", y="accepted", summary=f"Acceptance by draft position. {said}", legend=len(drafts) < 4)
    chart["layout"]["yaxis"] |= SHARE
    if not any(shares for _, _, shares in drafts):
        return note_on(chart, theme, "appears with the first prompt")
    chart["layout"]["xaxis"]["dtick"] = 1
    chart["layout"] |= {"barmode": "group", "bargap": 0.25}
    for name, kind, shares in drafts:
        chart["data"].append(
            {
                "type": "bar",
                "name": name,
                "x": list(range(1, len(shares) + 1)),
                "y": list(shares),
                "marker": bar_marker(theme, kind),
                "text": [f"{share:.0%}" for share in shares],
                "hovertemplate": "position %{x}: %{y:.1%}<extra>%{fullData.name}</extra>",
                **ABOVE,
            }
        )
    return chart


def intervals(
    rows: Sequence[tuple[str, Kind, float, float | None, float | None]], *, x: str, theme: Theme = "light", note: str = ""
) -> Chart:
    """Differences with their intervals, one a row: `(name, kind, value, low, high)`; zero is a line. `x` names the unit."""
    said = "; ".join(
        f"{name}: {value:+.3f}" + (f" from {low:+.3f} to {high:+.3f}" if low is not None else "") for name, _, value, low, high in rows
    )
    chart = new_chart(theme, x=x, y="", summary=f"Differences. {said}")
    if not rows:
        return note_on(chart, theme, note or "appears with the first prompt")
    colours = PALETTES[theme]
    chart["layout"]["yaxis"] |= {"autorange": "reversed", "rangemode": "normal", "showgrid": False}
    chart["layout"]["shapes"] = [
        {
            "type": "line",
            "x0": 0,
            "x1": 0,
            "y0": 0,
            "y1": 1,
            "yref": "paper",
            "line": {"color": colours["muted"], "dash": "dot", "width": 1},
        }
    ]
    chart["layout"]["xaxis"]["rangemode"] = "tozero"
    for name, kind, value, low, high in rows:
        role, _, symbol, _ = STYLE[kind]
        colour = colours[role]
        point: dict[str, Any] = {
            "type": "scatter",
            "mode": "markers",
            "x": [value],
            "y": [name],
            "name": name,
            "marker": {"symbol": symbol, "size": 10, "color": colour},
            "hovertemplate": "%{x:+.3f}<extra>%{y}</extra>",
        }
        if low is not None and high is not None:
            point["error_x"] = {
                "type": "data",
                "symmetric": False,
                "array": [high - value],
                "arrayminus": [value - low],
                "color": colour,
                "width": 6,
            }
        chart["data"].append(point)
    return chart


def tensor_sizes(names: Sequence[str], before: Sequence[int], after: Sequence[int], *, theme: Theme = "light") -> Chart:
    """Bytes of each tensor before and after quantising, largest first."""
    said = f"{sum(before)} bytes before, {sum(after)} after" if before else "nothing yet"
    chart = new_chart(theme, x="MB", y="", summary=f"Size of each tensor: {said}", legend=True)
    if not names:
        return note_on(chart, theme, "appears with a report")
    chart["layout"]["yaxis"] |= {"autorange": "reversed", "rangemode": "normal", "showgrid": False, "tickfont": {"size": 10}}
    chart["layout"] |= {"barmode": "group", "bargap": 0.3}
    for label, kind, sizes in (("BF16", "bf16", before), ("FP8", "fp8", after)):
        one: Kind = "fp8" if kind == "fp8" else "bf16"
        chart["data"].append(
            {
                "type": "bar",
                "orientation": "h",
                "name": label,
                "x": [size / 1e6 for size in sizes],
                "y": list(names),
                "marker": bar_marker(theme, one),
                "hovertemplate": "%{x:.3f} MB<extra>%{y}, %{fullData.name}</extra>",
            }
        )
    return chart


def tensor_errors(names: Sequence[str], errors: Sequence[float], worst: Sequence[tuple[int, float]], *, theme: Theme = "light") -> Chart:
    """Relative error of each quantised tensor, and of its worst output channel: `(channel, error)` each."""
    said = ", ".join(f"{name} {error:.2%}" for name, error in zip(names, errors, strict=True))
    chart = new_chart(theme, x="relative error", y="", summary=f"Relative error of each quantised tensor. {said}", legend=True)
    if not names:
        return note_on(chart, theme, "appears with a report")
    chart["layout"]["yaxis"] |= {"autorange": "reversed", "rangemode": "normal", "showgrid": False, "tickfont": {"size": 10}}
    chart["layout"]["xaxis"] |= {"tickformat": ".1%", "rangemode": "tozero"}
    colours = PALETTES[theme]
    chart["data"] += [
        {
            "type": "bar",
            "orientation": "h",
            "name": "whole tensor",
            "x": list(errors),
            "y": list(names),
            "marker": bar_marker(theme, "fp8"),
            "hovertemplate": "%{x:.2%}<extra>%{y}</extra>",
        },
        {
            "type": "scatter",
            "mode": "markers",
            "name": "worst channel",
            "x": [error for _, error in worst],
            "y": list(names),
            "customdata": [channel for channel, _ in worst],
            "marker": {"symbol": "diamond", "size": 8, "color": colours["rejected"]},
            "hovertemplate": "channel %{customdata}: %{x:.2%}<extra>%{y}</extra>",
        },
    ]
    return chart
