"""Why this speed: a result in a browser as its file says it, files that are none, and every K of a run."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab import recipes
from lab.bench import cost_report, result
from lab.errors import LabError
from lab.trace.model import Request
from lab.ui import why
from lab.ui.state import Run

from .conftest import Watched, sync_api
from .fakes import ANSWER, FakeEngine, steps_of


def planted() -> dict[str, Any]:
    """The result of a grid whose costs are planted, as the bench's own test makes it."""
    spec = importlib.util.spec_from_file_location("bench_grid", Path(__file__).parents[1] / "bench" / "test_grid.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_grid"] = module
    spec.loader.exec_module(module)
    return cost_report.summarise(module.measured(), module.HELD, max_batch=32)


def saved(folder: Path, **changes: Any) -> Path:
    hardware = {"cores": 2, "cpu": "<img src=x onerror=alert(1)>"}
    return result.save(folder / "cost.json", "cost", {"hardware": hardware}, {"complete": True, **planted(), **changes})


@pytest.mark.browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_result_on_screen(serve: Callable[..., str], visit: Callable[..., Watched], tmp_path: Path, theme: str) -> None:
    path = saved(tmp_path)
    summary = json.loads(path.read_text())
    watched = visit(serve(FakeEngine(recipes.get("smollm2"))), theme=theme)
    page = watched.page
    page.get_by_role("tab", name="Why this speed").click()
    with page.expect_file_chooser() as chooser:
        page.locator("#e3-why-open").click()
    chooser.value.set_files(path)
    watched.wait_status("cost.json")
    sync_api.expect(page.locator(".e3-why-code")).to_have_text(json.dumps(summary["schedule"]))
    text = page.locator("#e3-why").inner_text()
    assert "<img src=x onerror=alert(1)>" in text
    assert page.locator("#e3-why img").count() == 0
    cells = [cell for cell in summary["cells"] if cell["k"]]
    shown = (
        page.locator(".e3-why-table").first.locator("tbody tr").evaluate_all("all => all.map(r => [...r.children].map(c => c.textContent))")
    )
    assert len(shown) == len(cells)
    for row, cell in zip(shown, cells, strict=True):
        assert row[1].startswith(f"{cell['measured_speedup']['value']:.2f}×")
        assert row[3] == f"{cell['bound']:.2f}×"
    assert "held out" in text
    sync_api.expect(page.locator("#e3-why-charts .main-svg").first).to_be_visible()
    watched.fits()


def test_files_that_are_no_result_are_refused_in_sentences(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    for content, words in (
        (b"", "cannot be read"),
        (b"[1]", "is not a result"),
        (b'{"format": "eagle3-lab-speedup"}', "is not a result"),
        (b'{"format": "eagle3-lab-cost", "version": 9}', "another version"),
        (b'{"format": "eagle3-lab-cost", "version": 1}', "it lacks"),
        (b"\xff\xfe", "cannot be read"),
    ):
        bad.write_bytes(content)
        with pytest.raises(LabError, match=words):
            why.load(bad)
    with pytest.raises(LabError, match="cannot be read"):
        why.load(tmp_path / "none.json")


def run_of(k: int, *, withheld: bool = False) -> Any:
    steps = steps_of("t", ANSWER, k=k, begin=0.0, pace=0.01, limit=len(ANSWER))
    request = Request(trace="t", lane="l", prompt="p", steps=steps, settings={"k": k})
    return request if withheld else Run("r", request, "bf16", "Eagle3 BF16", {})


def test_every_k_of_a_run_says_what_is_certain() -> None:
    found = json.loads(why.run_table(run_of(3), None))
    (table,) = found["tables"]
    assert [row[0] for row in table["rows"]] == ["1", "2", "3"]
    steps = sum(bool(step.draft) for step in run_of(3).request.steps)
    assert table["rows"][2][3] == str(steps), "its own K is exact"
    assert " to " in table["rows"][0][3]
    assert table["rows"][0][1] == "–"


def test_results_without_timed_parts_or_speed_ups_are_drawn() -> None:
    summary = planted()
    for cell in summary["cells"]:
        cell |= {"parts_s": None, "measured_speedup": None, "predicted_speedup": None} if cell["k"] else {"parts_s": None}
    (_, parts), (_, steps), (_, speeds) = why.panels(summary)
    assert "does not time" in parts["layout"]["annotations"][0]["text"]
    assert len(steps["data"]) == 3
    assert speeds["data"] == []
    assert json.loads(why.explain(summary, "x"))["tables"][0]["rows"][0][1] == "–"


def test_an_unknown_break_even_is_shown_as_unknown() -> None:
    summary = planted()
    for cell in summary["cells"]:
        cell |= {"break_even": None, "break_even_acceptance": None, "predicted_speedup": None} if cell["k"] else {}
    shown = json.loads(why.explain(summary, "x"))
    assert shown["sentence"] == ""
    assert {row[4] for row in shown["tables"][0]["rows"]} == {"–"}
    assert "break-even length" in cost_report.render(summary)
