"""Lines: throughput over time, and measured or published curves with their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lab.plots.base import PALETTES, STYLE, Chart, Kind, Theme, new_chart, note_on


@dataclass(frozen=True)
class Series:
    """One lane's line: `x` and `y` of equal length; `kind` is its draft, which decides its colour."""

    label: str
    kind: Kind
    x: tuple[float, ...]
    y: tuple[float, ...]


def throughput(series: Sequence[Series], *, theme: Theme = "light", x: str = "seconds since the request", window: float = 1.0) -> Chart:
    """Output tokens per second of each lane over time. `window`: seconds over which each point is averaged, said on the axis."""
    said = "; ".join(f"{one.label}: {one.y[-1]:.0f} tokens per second last, {max(one.y):.0f} at most" for one in series if one.y)
    chart = new_chart(theme, x=x, y=f"tok/s ({window:g} s average)", summary=f"Output tokens per second over time. {said}", legend=True)
    if not any(one.y for one in series):
        return note_on(chart, theme, "appears while an engine answers")
    chart["layout"]["xaxis"]["rangemode"] = "tozero"
    for one in series:
        role, dash, symbol, _ = STYLE[one.kind]
        colour = PALETTES[theme][role]
        chart["data"].append(
            {
                "type": "scatter",
                "x": list(one.x),
                "y": list(one.y),
                "name": one.label,
                "mode": "lines+markers",
                "line": {"color": colour, "dash": dash, "width": 2.5},
                "marker": {"symbol": symbol, "size": 6, "color": colour},
                "hovertemplate": "%{y:.1f} tok/s at %{x:.1f} s<extra>%{fullData.name}</extra>",
            }
        )
    return chart


@dataclass(frozen=True)
class Curve:
    """A line with uncertainty: `x` and `y` of equal length; `low` and `high` bound a point (None: no interval); `notes` are for the hover.

    A published curve is drawn with open markers and a thin line, so that nobody takes it for a measured one.
    """

    label: str
    kind: Kind
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    notes: tuple[str, ...] = ()
    published: bool = False
    #: Plotly's name of its marker; "" takes the draft's. `markers` gives several curves markers of their own.
    symbol: str = ""


#: Markers of further curves with the same draft (other K, other machines), and how text shows a marker: filled, open.
_MORE = ("triangle-up", "cross", "x", "star", "hexagon", "triangle-down")
_SIGNS = {
    "circle": "●○", "square": "■□", "diamond": "◆◇", "triangle-up": "▲△", "cross": "✚✛", "x": "✖✕", "star": "★☆", "hexagon": "⬢⬡",
    "triangle-down": "▼▽",
}  # fmt: skip


def markers(curves: Sequence[tuple[Kind, bool]]) -> list[tuple[str, str]]:
    """Marker and sign of each curve, by its draft and whether it was published: alike curves get different ones."""
    seen: dict[tuple[Kind, bool], int] = {}
    found = []
    for kind, published in curves:
        place = seen[kind, published] = seen.get((kind, published), -1) + 1
        symbol = _MORE[(place - 1) % len(_MORE)] if place else STYLE[kind][2]
        found.append((f"{symbol}-open" if published else symbol, _SIGNS[symbol][published]))
    return found


def curves(
    lines: Sequence[Curve],
    *,
    x: str,
    y: str,
    theme: Theme = "light",
    ticks: Sequence[int] = (),
    one: bool = False,
    legend: bool = True,
    digits: int = 2,
    empty: str = "appears with the first result",
) -> Chart:
    """Curves over one axis. `ticks`: values of a logarithmic x axis (concurrencies); `one`: a rule at y = 1 (no gain)."""
    said = "; ".join(
        f"{line.label}: " + ", ".join(f"{b:.{digits}f} at {a:g}" for a, b in zip(line.x, line.y, strict=True)) for line in lines
    )
    chart = new_chart(theme, x=x, y=y, summary=f"{y} over {x}. {said}", legend=legend)
    shown = [line for line in lines if line.x]
    if not shown:
        return note_on(chart, theme, empty)
    if ticks:
        chart["layout"]["xaxis"] |= {"type": "log", "tickmode": "array", "tickvals": list(ticks), "ticktext": [str(tick) for tick in ticks]}
    else:
        chart["layout"]["xaxis"]["rangemode"] = "tozero"
    if one:
        rule = {"color": PALETTES[theme]["muted"], "dash": "dot", "width": 1}
        chart["layout"]["shapes"] = [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1, "line": rule}]
    for line, (symbol, _) in zip(shown, markers([(line.kind, line.published) for line in shown]), strict=True):
        role, dash, _, _ = STYLE[line.kind]
        colour = PALETTES[theme][role]
        trace: dict[str, Any] = {
            "type": "scatter",
            "x": list(line.x),
            "y": list(line.y),
            "name": line.label,
            "mode": "lines+markers",
            "line": {"color": colour, "dash": "longdashdot" if line.published else dash, "width": 1 if line.published else 2.5},
            "marker": {"symbol": line.symbol or symbol, "size": 8, "color": colour},
            "customdata": list(line.notes or [""] * len(line.x)),
            "hovertemplate": f"%{{y:.{digits}f}} at %{{x:g}}%{{customdata}}<extra>%{{fullData.name}}</extra>",
        }
        if any(high is not None for high in line.high):
            above = [0 if high is None else high - b for high, b in zip(line.high, line.y, strict=True)]
            below = [0 if low is None else b - low for low, b in zip(line.low, line.y, strict=True)]
            trace["error_y"] = {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "color": colour, "thickness": 1.2}
        chart["data"].append(trace)
    return chart
