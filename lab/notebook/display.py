"""How things look in a notebook: charts, tables, and a line that says what an engine is doing.

A chart is sent as plotly's own message (`application/vnd.plotly.v1+json`), which JupyterLab draws with the script that plotly's package
brings, offline; its summary in words goes along as plain text. Nothing here knows what the numbers mean.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from lab.bench import duel_page
from lab.errors import require
from lab.plots import FONT, PALETTES, Chart
from lab.serving.endpoint import Progress

PLOTLY = "application/vnd.plotly.v1+json"
FEATURE = "Showing things in a notebook"


def show(chart: Chart, *, title: str = "", height: int = 280, width: int = 620) -> None:
    """Draw a chart of `lab.plots` below the cell; sizes in pixels."""
    layout = {**chart["layout"], "height": height, "width": width, "paper_bgcolor": PALETTES["light"]["panel"]}
    layout["margin"] = {**layout.get("margin", {}), "t": 56 if layout.get("showlegend") else 40}
    layout["title"] = {"text": title, "x": 0.02, "y": 0.97, "font": {"size": 14, "family": FONT}}
    summary = str(layout.get("meta", {}).get("summary", title))
    config = {"displaylogo": False, "modeBarButtonsToRemove": ["sendChartToCloud"], "displayModeBar": False}
    bundle = {PLOTLY: {"data": chart["data"], "layout": layout, "config": config}, "text/plain": summary}
    require("IPython", FEATURE).display.display(bundle, raw=True)


class Frame:
    """A whole page that the lab makes (a duel's report) in a frame of its own, without scripts."""

    def __init__(self, page: str, height: int) -> None:
        self.page, self.height = page, height

    def _repr_html_(self) -> str:
        source = html.escape(self.page, quote=True)
        return f'<iframe sandbox srcdoc="{source}" width="100%" height="{self.height}" style="border:0" title="report"></iframe>'


def duel(report: dict[str, Any], origin: Mapping[str, Any], *, height: int = 560) -> Frame:
    """The report of a duel as the page that `eagle3-lab duel` writes; `origin` is its provenance."""
    return Frame(duel_page.html(report, origin), height)


class Line:
    """One line of output that is written over: what an engine is doing, and when it was ready."""

    def __init__(self, what: str) -> None:
        self.what, self._handle, self._last = what, None, ""

    def __call__(self, progress: Progress) -> None:
        """Show a lane's progress."""
        text = f"{self.what}: {progress.detail[:100]} ({progress.elapsed:.0f} s)"
        if text != self._last:
            self._last = text
            self._write(text)

    def _write(self, text: str) -> None:
        bundle: dict[str, Any] = {"text/plain": text}
        if self._handle is None:
            self._handle = require("IPython", FEATURE).display.display(bundle, raw=True, display_id=True)
        elif self._handle is not None:
            self._handle.update(bundle, raw=True)
