"""What every chart shares: palettes, each lane's colour, dash, marker and hatch, axes, and plotly itself, imported when it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import plotly.graph_objects as go

Chart = dict[str, Any]
Theme = Literal["light", "dark", "page"]
#: `cut` is a draft without one of its feature levels, `other` a second draft of the same kind.
Kind = Literal["none", "bf16", "fp8", "cut", "other"]
_ROLES = ("ink", "muted", "grid", "panel", "baseline", "bf16", "fp8", "accepted", "rejected", "own")
PALETTES: dict[str, dict[str, str]] = {
    "light": {
        "ink": "#1b2430", "muted": "#5a6472", "grid": "#e3e7ec", "panel": "#ffffff", "baseline": "#5f6670", "bf16": "#b35900",
        "fp8": "#0072b2", "accepted": "#00694b", "rejected": "#9e3d00", "own": "#00558c",
    },
    "dark": {
        "ink": "#e8ecf2", "muted": "#a3acb9", "grid": "#243042", "panel": "#111926", "baseline": "#a3a9b3", "bf16": "#e69f00",
        "fp8": "#56b4e9", "accepted": "#5fd3ab", "rejected": "#ffa36b", "own": "#7cc4f5",
    },
    "page": {role: f"var(--e3-{role})" for role in _ROLES},
}  # fmt: skip
#: Colour role, dash, marker and bar hatch of a lane, by its draft.
STYLE: dict[Kind, tuple[str, str, str, str]] = {
    "none": ("baseline", "dot", "circle", "."),
    "bf16": ("bf16", "solid", "square", ""),
    "fp8": ("fp8", "dash", "diamond", "/"),
    "cut": ("baseline", "dashdot", "triangle-up", "x"),
    "other": ("baseline", "longdash", "x", "\\"),
}
FONT = "'IBM Plex Sans', ui-sans-serif, system-ui, 'DejaVu Sans', sans-serif"
SHARE = {"range": [0, 1.08], "tickformat": ".0%", "tickvals": [0, 0.25, 0.5, 0.75, 1]}
ABOVE = {"textposition": "outside", "cliponaxis": False, "textfont": {"size": 11}}


def figure(chart: Chart) -> go.Figure:
    """The chart as a plotly figure, for notebooks and image files."""
    import plotly.graph_objects as go

    return go.Figure(chart)


def script() -> str:
    """plotly's own script, for a page that is one file and needs nothing from elsewhere."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def new_chart(theme: Theme, *, x: str, y: str, summary: str, legend: bool = False) -> Chart:
    colours = PALETTES[theme]

    def axis(title: str) -> dict[str, Any]:
        return {
            "gridcolor": colours["grid"],
            "linecolor": colours["grid"],
            "zeroline": False,
            "ticks": "",
            "tickfont": {"color": colours["muted"]},
            "title": {"text": title, "font": {"color": colours["muted"]}, "standoff": 4},
            "automargin": True,
            "fixedrange": True,
        }

    layout = {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 11, "color": colours["ink"]},
        "margin": {"l": 8, "r": 8, "t": 18 if legend else 6, "b": 8, "autoexpand": True},
        "showlegend": legend,
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 1.0,
            "yanchor": "bottom",
            "font": {"size": 11},
            "itemclick": False,
            "itemdoubleclick": False,
        },
        "hoverlabel": {
            "bgcolor": colours["panel"],
            "bordercolor": colours["muted"],
            "font": {"color": colours["ink"], "family": FONT, "size": 12},
        },
        "bargap": 0.25,
        "meta": {"summary": summary},
        "uirevision": "keep",
        "xaxis": axis(x),
        "yaxis": {**axis(y), "rangemode": "tozero"},
    }
    return {"data": [], "layout": layout}


def note_on(chart: Chart, theme: Theme, text: str) -> Chart:
    """An empty chart that says why it is empty."""
    layout, font = chart["layout"], {"color": PALETTES[theme]["muted"], "size": 12}
    layout["annotations"] = [{"text": text, "x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper", "showarrow": False, "font": font}]
    for axis in ("xaxis", "yaxis"):
        layout[axis] |= {"showticklabels": False, "showgrid": False}
    return chart


def bar_marker(theme: Theme, kind: Kind) -> dict[str, Any]:
    role, _, _, hatch = STYLE[kind]
    colour = PALETTES[theme][role]
    marker: dict[str, Any] = {"color": colour, "line": {"color": colour, "width": 1}}
    if hatch:
        marker["pattern"] = {"shape": hatch, "fgcolor": colour, "bgcolor": PALETTES[theme]["panel"], "size": 6, "solidity": 0.3}
    return marker
