"""Figures: the right numbers in the right place, alike in every palette, and readable by those who do not see them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from lab import plots
from lab.env import assets

SERIES = [plots.Series("baseline", "none", (0.5, 1.0), (10.0, 20.0)), plots.Series("Eagle3 FP8", "fp8", (0.5, 1.0), (30.0, 41.0))]
CURVES = [
    plots.Curve("Eagle3 FP8", "fp8", (1.0, 4.0), (2.0, 1.5), (1.9, None), (2.2, None)),
    plots.Curve("published by AMD, MI355X", "fp8", (4.0,), (2.0,), published=True),
]
FIGURES: dict[str, Callable[[plots.Theme], plots.Chart]] = {
    "throughput": lambda theme: plots.throughput(SERIES, theme=theme),
    "position": lambda theme: plots.acceptance_by_position([6, 3, 0], 8, kind="fp8", theme=theme),
    "histogram": lambda theme: plots.accepted_per_step([2, 3, 3, 0], theme=theme),
    "confidence": lambda theme: plots.confidence([(0.1, False), (0.95, True), (1.0, True), (0.9, False)], theme=theme),
    "pairs": lambda theme: plots.speed_ups([(30.0, 60.0), (20.0, 50.0)], theme=theme),
    "curves": lambda theme: plots.curves(CURVES, x="concurrency", y="speed-up", theme=theme, ticks=[1, 4], one=True),
    "nothing": lambda theme: plots.throughput([], theme=theme),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_palette_draws_the_same(name: str) -> None:
    light, dark, page = (json.loads(json.dumps(FIGURES[name](theme))) for theme in ("light", "dark", "page"))

    def bare(node: object) -> object:
        if isinstance(node, dict):
            return {key: bare(value) for key, value in node.items()}
        if isinstance(node, list):
            return [bare(value) for value in node]
        return "colour" if isinstance(node, str) and re.fullmatch(r"#[0-9a-f]{6}|var\(--e3-[a-z0-9]+\)", node) else node

    assert bare(light) == bare(dark) == bare(page)
    assert not re.search("#[0-9a-f]{6}", json.dumps(page)), "a colour that would not follow the page's theme"
    assert light["layout"]["meta"]["summary"]


def test_palettes_are_the_colours_of_the_page() -> None:
    css = (assets() / "ui" / "chips.css").read_text(encoding="utf-8")
    light, dark = css.split(".dark {", 1)
    for theme, text in (("light", light), ("dark", dark.split("}", 1)[0])):
        for role, colour in plots.PALETTES[theme].items():
            assert re.search(rf"--e3-{role}: {colour};", text), (theme, role)


@pytest.mark.parametrize("name", FIGURES)
def test_plotly_takes_every_chart(name: str) -> None:
    """Plotly's own validation, and nothing is lost on the way."""
    chart = FIGURES[name]("light")
    figure = plots.figure(chart)
    assert len(figure.data) == len(chart["data"])
    assert figure.layout.meta == chart["layout"]["meta"]


def test_throughput_keeps_each_lane_apart() -> None:
    chart = plots.throughput(SERIES)
    one, other = chart["data"]
    assert (one["y"], other["y"]) == ([10.0, 20.0], [30.0, 41.0])
    assert one["line"]["color"] != other["line"]["color"]
    assert one["line"]["dash"] != other["line"]["dash"]
    assert one["marker"]["symbol"] != other["marker"]["symbol"]
    assert "Eagle3 FP8: 41 tokens per second last" in chart["layout"]["meta"]["summary"]
    assert "1 s average" in chart["layout"]["yaxis"]["title"]["text"]


def test_position_and_histogram() -> None:
    chart = plots.acceptance_by_position([6, 3, 0], 8)
    assert chart["data"][0]["y"] == [0.75, 0.375, 0]
    assert chart["layout"]["meta"]["summary"] == "Acceptance by draft position. 1: 75%, 2: 38%, 3: 0%"
    assert plots.accepted_per_step([2, 3])["data"][0]["x"] == [0, 1]
    assert plots.acceptance_by_position([], 0)["data"] == []
    assert plots.accepted_per_step([0, 0])["data"] == []


def test_confidence_bins_hold_their_edges() -> None:
    bar = plots.confidence([(0.0, False), (0.1, True), (0.2, True), (1.0, True)])["data"][0]
    assert bar["customdata"] == [[1, 2], [1, 1], [0, 0], [0, 0], [1, 1]]
    assert bar["y"] == [0.5, 1.0, 0, 0, 1.0]


def test_confidence_says_why_it_is_empty() -> None:
    assert plots.confidence([], note="not here")["layout"]["annotations"][0]["text"] == "not here"


def test_pairs_show_their_ratio() -> None:
    assert plots.speed_ups([(30.0, 60.0), (20.0, 50.0)])["data"][1]["text"] == ["2.00×", "2.50×"]
