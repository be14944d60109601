"""The published tables: the numbers as printed, ratios that agree with them, labels and caveats wherever they are shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.bench import charts, overlay, published, sweep_table
from lab.errors import LabError

KIMI = {4: (82.7, 157.0, 165.2), 16: (220.5, 399.6, 412.7), 64: (533.3, 901.6, 936.6)}
MINIMAX = {4: (90.4, 161.7), 64: (822.0, 1137.3)}


@pytest.mark.parametrize(("name", "cells"), [("kimi-k2.5", KIMI), ("minimax-m2.5", MINIMAX)])
def test_cells_are_as_printed(name: str, cells: dict[int, tuple[float, ...]]) -> None:
    table = published.table(name)
    for concurrency, values in cells.items():
        found = [point.output_tput_per_gpu for series in table.series for point in series.points if point.concurrency == concurrency]
        assert tuple(found) == values
    assert table.label == "published by AMD, MI355X"
    assert table.caveats
    assert all(source.url.startswith("https://") for source in table.sources)


def test_printed_speed_ups_are_the_ratios() -> None:
    checked = 0
    for table in published.tables().values():
        base = {point.concurrency: point.output_tput_per_gpu for point in table.series[0].points}
        assert table.series[0].draft == "none"
        for series in table.series[1:]:
            for point in series.points:
                assert point.speedup == round(point.output_tput_per_gpu / base[point.concurrency], 2)
                checked += 1
    assert checked == 15
    assert published.table("kimi-k2.5").series[2].points[0].speedup == 2.00  # 165.2 / 82.7


def test_they_are_labelled_wherever_they_are_drawn() -> None:
    tables = list(published.tables().values())
    for table in tables:
        for group in overlay.published_groups(table):
            assert "published by AMD, MI355X" in group.label
    for _, chart in charts.panels([], tables):
        for trace in chart["data"]:
            assert "published by AMD, MI355X" in trace["name"]
            assert trace["marker"]["symbol"].endswith("-open")
    text = sweep_table.render([], tables)
    assert "not a controlled comparison" in text
    assert "2.00x" in text
    assert any("measured or published" in one for one in overlay.differences([{"conc": 1, "output_tput_per_gpu": 1}], tables))


def test_a_file_that_is_none(tmp_path: Path) -> None:
    good = json.loads((Path(__file__).parents[2] / "assets/published/kimi-k2.5-mi355x.json").read_text())
    for broken in ("{", "[]", json.dumps(good | {"extra": 1}), json.dumps(good | {"isl": "long"})):
        path = tmp_path / "table.json"
        path.write_text(broken)
        with pytest.raises(LabError, match=r"table\.json is not a table"):
            published.read(path)
    with pytest.raises(LabError, match=r"kimi-k2\.5"):
        published.table("gpt")
