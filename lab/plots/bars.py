"""Bars side by side, where a step's time goes, and predictions against measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lab.plots.base import ABOVE, PALETTES, SHARE, STYLE, Chart, Kind, Theme, new_chart, note_on

#: Colours of bars that are no lanes: by who says it.
Role = Literal["accepted", "rejected", "own", "muted", "baseline", "bf16", "fp8"]


def grouped(
    names: Sequence[str],
    groups: Sequence[tuple[str, Role, Sequence[float]]],
    *,
    x: str,
    y: str,
    share: bool = False,
    digits: int = 2,
    theme: Theme = "light",
) -> Chart:
    """Bars side by side for each of `names`: groups of `(label, colour, values)`. `share`: an axis from 0 to 100%."""
    shape = ".0%" if share else f".{digits}f"
    said = "; ".join(
        f"{label}: " + ", ".join(f"{name} {value:{shape}}" for name, value in zip(names, values, strict=True))
        for label, _, values in groups
    )
    chart = new_chart(theme, x=x, y=y, summary=f"{y} by {x}. {said}", legend=len(groups) > 1)
    layout = chart["layout"]
    layout |= {"barmode": "group", "bargroupgap": 0.05}
    layout["xaxis"] |= {"type": "category", "categoryorder": "array", "categoryarray": list(names)}
    if share:
        layout["yaxis"] |= SHARE
    for place, (label, role, values) in enumerate(groups):
        colour = PALETTES[theme][role]
        marker: dict[str, Any] = {"color": colour, "line": {"color": colour, "width": 1}}
        if place % 2:  # told apart without colours, too
            marker["pattern"] = {"shape": "/", "fgcolor": colour, "bgcolor": PALETTES[theme]["panel"], "size": 6, "solidity": 0.3}
        chart["data"].append(
            {
                "type": "bar",
                "name": label,
                "x": list(names),
                "y": [float(value) for value in values],
                "marker": marker,
                "text": [f"{value:{shape}}" for value in values],
                "hovertemplate": f"%{{x}}: %{{y:{shape}}}<extra>%{{fullData.name}}</extra>",
                **ABOVE,
            }
        )
    return chart


#: Parts of a step, in the order in which they are stacked: colour role and hatch.
_PARTS = {
    "target": ("own", ""),
    "attention": ("own", "/"),
    "accept": ("muted", "."),
    "draft": ("bf16", ""),
    "rest": ("baseline", "x"),
}


def step_parts(names: Sequence[str], parts: Mapping[str, Sequence[float]], *, theme: Theme = "light", note: str = "") -> Chart:
    """Where a step's time goes: one bar a row, `parts[part][row]` in milliseconds; parts are those of `_PARTS`, missing ones are zero."""
    totals = [sum(values[row] for values in parts.values()) for row in range(len(names))]
    said = "; ".join(
        f"{name}: {total:.1f} ms, of it " + ", ".join(f"{part} {values[row]:.1f}" for part, values in parts.items() if values[row])
        for row, (name, total) in enumerate(zip(names, totals, strict=True))
    )
    chart = new_chart(theme, x="milliseconds a step", y="", summary=f"Parts of a step. {said}", legend=True)
    if not names:
        return note_on(chart, theme, note or "appears with a result")
    chart["layout"] |= {"barmode": "stack", "bargap": 0.35}
    chart["layout"]["yaxis"] |= {"range": [len(names) - 0.5, -0.5], "rangemode": "normal", "showgrid": False, "dtick": 1}
    chart["layout"]["yaxis"]["tickfont"] = {"size": 10, "color": PALETTES[theme]["muted"]}
    chart["layout"]["xaxis"]["rangemode"] = "tozero"
    chart["layout"]["legend"]["traceorder"] = "normal"
    colours = PALETTES[theme]
    for part, (role, hatch) in _PARTS.items():
        if part not in parts:
            continue
        marker: dict[str, Any] = {"color": colours[role], "line": {"color": colours["panel"], "width": 1}}
        if hatch:
            marker["pattern"] = {"shape": hatch, "fgcolor": colours[role], "bgcolor": colours["panel"], "size": 6, "solidity": 0.35}
        chart["data"].append(
            {
                "type": "bar",
                "orientation": "h",
                "name": part,
                "y": list(names),
                "x": list(parts[part]),
                "marker": marker,
                "hovertemplate": "%{x:.2f} ms<extra>%{y}, %{fullData.name}</extra>",
            }
        )
    return chart


def predictions(
    rows: Sequence[tuple[str, float, float, bool]], *, unit: str, kind: Kind = "bf16", theme: Theme = "light", note: str = ""
) -> Chart:
    """Predicted over measured: `(name, measured, predicted, held out)` each; on the dotted line both are equal. Open markers were not used
    for the fit."""
    said = "; ".join(f"{name}: {measured:.2f} measured, {predicted:.2f} predicted" for name, measured, predicted, _ in rows)
    chart = new_chart(theme, x=f"measured, {unit}", y="predicted", summary=f"Predicted beside measured. {said}", legend=True)
    if not rows:
        return note_on(chart, theme, note or "appears with a result")
    colours = PALETTES[theme]
    role, _, symbol, _ = STYLE[kind]
    least, most = (edge(value for row in rows for value in row[1:3]) for edge in (min, max))
    margin = max((most - least) * 0.08, most * 0.02)
    for axis in ("xaxis", "yaxis"):
        chart["layout"][axis] |= {"range": [least - margin, most + margin], "rangemode": "normal"}
    chart["data"].append(
        {
            "type": "scatter",
            "mode": "lines",
            "x": [least - margin, most + margin],
            "y": [least - margin, most + margin],
            "line": {"color": colours["muted"], "dash": "dot", "width": 1},
            "showlegend": False,
            "hoverinfo": "skip",
        }
    )
    for held, name in ((False, "fitted"), (True, "held out")):
        those = [row for row in rows if row[3] == held]
        if those:
            chart["data"].append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": name,
                    "x": [row[1] for row in those],
                    "y": [row[2] for row in those],
                    "customdata": [row[0] for row in those],
                    "marker": {"symbol": f"{symbol}-open" if held else symbol, "size": 9, "color": colours[role], "line": {"width": 2}},
                    "hovertemplate": "%{customdata}: %{x:.2f} measured, %{y:.2f} predicted<extra>%{fullData.name}</extra>",
                }
            )
    return chart
