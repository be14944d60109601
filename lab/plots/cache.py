"""The KV cache of models with different attention: bytes a token, and of one sequence by its length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lab.plots.base import PALETTES, Chart, Theme, new_chart

#: Colour role, dash and marker of each model in charts of KV cache, in the order in which they are given.
_MODELS = (
    ("own", "solid", "square"),
    ("bf16", "dash", "diamond"),
    ("fp8", "dot", "circle"),
    ("accepted", "dashdot", "triangle-up"),
    ("baseline", "longdash", "x"),
    ("rejected", "longdashdot", "star"),
)


class CacheRow(Protocol):
    """Bytes of KV cache a token of one model: as it is, and with a key and value for every query head (`mha`)."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def bytes_per_token(self) -> int: ...

    @property
    def mha(self) -> int: ...

    @property
    def gqa8(self) -> int | None: ...

    @property
    def source(self) -> str: ...


def cache_per_token(rows: Sequence[CacheRow], *, theme: Theme = "light") -> Chart:
    """Bytes of KV cache a token: each model as it is, and as it would be with 8 KV heads or with one for every query head."""
    said = "; ".join(f"{one.name} ({one.kind}) {one.bytes_per_token / 1024:.0f} KiB, as MHA {one.mha / 1024:.0f} KiB" for one in rows)
    chart = new_chart(theme, x="KiB a token, logarithmic", y="", summary=f"KV cache a token. {said}", legend=True)
    colours, labels = PALETTES[theme], [f"{one.name} ({one.kind})" for one in rows]
    chart["layout"]["xaxis"] |= {"type": "log", "dtick": 1, "range": [1, 3.9]}
    chart["layout"]["yaxis"] |= {"type": "category", "autorange": "reversed", "rangemode": "normal"}
    series: tuple[tuple[str, list[int | None], str, str], ...] = (
        ("as it is", [one.bytes_per_token for one in rows], "own", "square"),
        ("8 KV heads", [one.gqa8 for one in rows], "bf16", "diamond-open"),
        ("every head (MHA)", [one.mha for one in rows], "baseline", "circle-open"),
    )
    for name, values, role, symbol in series:
        there = [(label, value, one.source) for label, value, one in zip(labels, values, rows, strict=True) if value is not None]
        chart["data"].append(
            {
                "type": "scatter",
                "mode": "markers+text",
                "name": name,
                "x": [value / 1024 for _, value, _ in there],
                "y": [label for label, _, _ in there],
                "marker": {"color": colours[role], "symbol": symbol, "size": 10, "line": {"color": colours[role], "width": 2}},
                "text": [f"{value / 1024:.0f}" for _, value, _ in there],
                "textposition": "middle right",
                "textfont": {"size": 10, "color": colours["ink"]},
                "customdata": [source for _, _, source in there],
                "hovertemplate": "%{y}: %{x:.1f} KiB a token<br>%{customdata}<extra>%{fullData.name}</extra>",
                "cliponaxis": False,
            }
        )
    return chart


def cache_at_context(
    rows: Sequence[CacheRow], *, theme: Theme = "light", tokens: Sequence[int] = (1024, 8192, 32768, 131072, 262144)
) -> Chart:
    """GiB of KV cache that one sequence takes, by its length in tokens; both axes are logarithmic."""
    last = tokens[-1]
    said = "; ".join(f"{one.name}: {one.bytes_per_token * last / (1 << 30):.1f} GiB at {last // 1024}K" for one in rows)
    chart = new_chart(theme, x="tokens in one sequence", y="GiB", summary=f"KV cache of one sequence. {said}", legend=True)
    chart["layout"]["xaxis"] |= {"type": "log", "tickvals": list(tokens), "ticktext": [f"{one // 1024}K" for one in tokens]}
    chart["layout"]["yaxis"] |= {"type": "log", "dtick": 1, "rangemode": "normal"}
    for one, (role, dash, symbol) in zip(rows, _MODELS, strict=False):
        colour = PALETTES[theme][role]
        chart["data"].append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": one.name,
                "x": list(tokens),
                "y": [one.bytes_per_token * count / (1 << 30) for count in tokens],
                "line": {"color": colour, "dash": dash, "width": 2},
                "marker": {"symbol": symbol, "size": 7, "color": colour},
                "hovertemplate": "%{y:.2f} GiB at %{x} tokens<extra>%{fullData.name}</extra>",
            }
        )
    return chart
