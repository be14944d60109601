"""Against what was published: the arithmetic of the comparison, and the page that is made of whatever files there are."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab import recipes
from lab.bench import published
from lab.fieldtest import compare, report, run
from lab.fieldtest.archive import SCRIPT
from tests.fieldtest.made import ORIGIN, small

Make = Callable[..., run.Test]
TABLE = published.table("kimi-k2.5")


def row(
    draft: str, conc: int, speed: float, *, seed: int = 0, isl: int = 1024, osl: int = 1024, k: int = 0, **changes: Any
) -> dict[str, Any]:
    """A result as the sweep writes it: `speed` is output tokens per second and GPU, on 4 GPUs."""
    made = {
        "hw": "8 x gfx950", "conc": conc, "image": "vllm 0.24.0", "model": "kimi", "framework": "vllm", "precision": "auto",
        "spec_decoding": {"none": "none", "bf16": "eagle3", "fp8": "eagle3_fp8"}[draft], "isl": isl, "osl": osl, "tp": 4, "ep": 1,
        "output_tput_per_gpu": speed, "eagle3_lab_status": "done", "eagle3_lab_key": f"{draft}{conc}{seed}", "eagle3_lab_draft": draft,
        "eagle3_lab_k": k, "eagle3_lab_label": draft.upper(), "eagle3_lab_seed": seed, "eagle3_lab_gpus": 4,
        "eagle3_lab_workload": f"{isl}/{osl}", "eagle3_lab_total_output_tokens": 4 * speed * 10, "eagle3_lab_duration_s": 10.0,
        "eagle3_lab_range_low": 0.8, "eagle3_lab_provenance": {
            **ORIGIN, "versions": {"vllm": "0.24.0"}, "settings": {"prompts_per_concurrency": 10, "warmups_per_concurrency": 2},
        },
    }  # fmt: skip
    return made | changes


def test_each_published_cell_meets_its_measurement() -> None:
    rows = [row("none", 4, 80.0), row("bf16", 4, 150.0, k=4), row("none", 64, 533.3), row("bf16", 64, 800.0, k=4)]
    found = {(cell.draft, cell.concurrency): cell for cell in compare.cells(rows, TABLE, {("fp8", 4): "failed: no GPU"})}
    assert len(found) == 15
    four = found["bf16", 4]
    assert (four.published, four.printed) == (157.0, 1.9)
    assert four.measured is not None
    assert four.measured.y == pytest.approx(150.0)
    assert four.ratio == pytest.approx(150 / 157)
    assert four.speed_up is not None
    assert four.speed_up.y == pytest.approx(150 / 80)
    assert found["none", 64].ratio == pytest.approx(1.0)
    assert found["none", 64].speed_up is None
    assert (found["fp8", 4].measured, found["fp8", 4].why) == (None, "failed: no GPU")
    assert found["bf16", 8].why == "not measured"


def test_seeds_pool_and_give_an_interval() -> None:
    rows = [row("none", 8, 100.0 + seed, seed=seed) for seed in range(3)] + [
        row("fp8", 8, 200.0 + seed, seed=seed, k=6) for seed in range(3)
    ]
    cell = next(one for one in compare.cells(rows, TABLE) if (one.draft, one.concurrency) == ("fp8", 8))
    assert cell.measured is not None
    assert cell.speed_up is not None
    assert cell.measured.y == pytest.approx(201.0)
    assert cell.speed_up.y == pytest.approx(603 / 303)
    assert cell.speed_up.low is not None
    assert cell.speed_up.seeds == 3


def test_other_lengths_are_not_compared() -> None:
    found = compare.cells([row("bf16", 4, 150.0, isl=128, osl=128)], TABLE)
    assert all(cell.ratio is None for cell in found)
    assert found[5].why == "measured with 128/128 only, published 1024/1024"


def test_what_differs_is_said() -> None:
    said = " ".join(compare.differs([row("none", 4, 80.0), row("fp8", 4, 150.0, k=6)], TABLE))
    for words in (
        "K = 6 here; published: not stated",
        "Hardware: 8 x gfx950 here; published: MI355X",
        "Seeds for each cell: 1 here; published: 10",
        "vLLM 0.24.0 here; published: nightly fb1ac806",
    ):
        assert words in said
    assert "GPUs (TP)" not in said
    assert "Requests for each one" not in said
    other = " ".join(compare.differs([row("none", 4, 80.0, isl=128, osl=64, tp=8)], TABLE))
    assert "Lengths (ISL/OSL): 128/64 here; published: 1024/1024" in other
    assert "GPUs (TP): 8 here; published: 4" in other
    assert compare.differs([], TABLE) == []


def test_fp8_against_bf16_says_when_k_differs() -> None:
    spots, notes = compare.drafts([row("bf16", 4, 100.0, k=4), row("fp8", 4, 110.0, k=6)])
    assert [(spot.concurrency, round(spot.y, 6)) for spot in spots] == [(4, 1.1)]
    assert "K is 4 (BF16) and 6 (FP8)" in notes[0]
    assert compare.drafts([row("bf16", 4, 100.0, k=4), row("fp8", 4, 110.0, k=4)])[1] == []
    assert compare.drafts([row("bf16", 4, 100.0)]) == ([], [])


def test_only_published_targets_have_a_table() -> None:
    tables = {name: compare.table_for(recipes.get(name)) for name in recipes.RECIPES}
    assert {name for name, table in tables.items() if table} >= {"kimi-k2.5", "minimax-m2.5"}
    assert tables["smollm2"] is tables["kimi-k2.5-mi300x"] is tables["llama-3.1-8b"] is None


# --- the page ---


def test_a_test_that_never_began_has_a_page(make: Make) -> None:
    page = report.build(make(), None)
    assert "0 of" in page
    for words in (
        "not begun",
        "The doctor did not run",
        "No lane started",
        "Nothing was measured",
        "There are no traces",
        "nothing to compare",
    ):
        assert words in page
    assert SCRIPT not in page


def test_the_page_compares_and_labels(make: Make) -> None:
    test = make(small("kimi-k2.5"))
    (test.folder / "sweep").mkdir()
    for one in [row("none", 4, 80.0), row("bf16", 4, 150.0, k=4), row("fp8", 4, 165.0, k=6)]:
        (test.folder / "sweep" / f"agg_{one['eagle3_lab_key']}.json").write_text(json.dumps(one))
    page = report.build(test, TABLE)
    assert page.count(SCRIPT) == 1
    assert "published by AMD, MI355X" in page
    assert re.search(r'<td class="n published">157\.0</td><td class="n">150\.0</td><td class="n">0\.955</td>', page)
    assert "1.100x" in page, "FP8 over BF16"
    assert "What differs" in page
    assert all(f"<li>{html.escape(caveat)[:40]}" in page for caveat in TABLE.caveats)
    # nothing from elsewhere: no address is loaded, only written
    assert not re.search(r'(?:src|href)="https?:', page)


def test_fp8_is_compared_with_bf16_on_the_same_load(make: Make) -> None:
    test = make(small("kimi-k2.5"))
    (test.folder / "sweep").mkdir()
    chat = {"isl": 30, "osl": 64, "eagle3_lab_workload": "chat"}
    measured = [row("bf16", 4, 100.0, k=4), row("fp8", 4, 120.0, k=4), row("bf16", 4, 50.0, k=4, **chat), row("fp8", 4, 55.0, k=4, **chat)]
    for number, one in enumerate([*measured, row("fp8", 8, 70.0, k=4, **chat), row("bf16", 8, 200.0, k=4)]):
        (test.folder / "sweep" / f"agg_{number}.json").write_text(json.dumps(one))
    shown = report.build(test, TABLE).partition("FP8 against BF16</h2>")[2].partition("</table>")[0]
    found = re.findall(r"<td>([^<]*)</td><td class=\"n\">(\d+)</td><td class=\"n\">([\d.]+)x", shown)
    assert found == [("1024/1024", "4", "1.200"), ("chat", "4", "1.100")]


def test_hostile_and_broken_files_stay_text(make: Make) -> None:
    test = make()
    evil = "<script>alert(1)</script>"
    (test.folder / "sweep").mkdir()
    (test.folder / "sweep" / "agg_a.json").write_text('{"conc": 1')
    (test.folder / "lanes").mkdir()
    (test.folder / "lanes" / "none.json").write_text("[]")
    (test.folder / "traces").mkdir()
    (test.folder / "traces" / "bf16.jsonl").write_text("nonsense")
    (test.folder / "doctor.json").write_bytes(b"\xff")
    (test.folder / "lossless-bf16.txt").write_text(evil)
    (test.folder / f"{evil.replace('/', '-')}.txt").write_text("")
    test.records["doctor"] = {"name": "doctor", "state": "failed", "reason": evil, "seconds": 1.0, "estimate": 1.0, "key": ""}
    page = report.build(test, None)
    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert "agg_a.json" in page
    assert "bf16.jsonl" in page


def test_why_a_cell_is_missing_comes_from_its_stage(make: Make) -> None:
    test = make(small("kimi-k2.5", concurrencies=(4, 8)))
    test.records["sweep-fp8-conc8"] = {"state": "skipped", "reason": "No time.", "key": "", "seconds": 0.0}
    test.records["sweep-fp8-conc4"] = {"state": "done", "reason": "fine", "key": "", "seconds": 1.0}
    assert report.reasons(test) == {("fp8", 8): "skipped: No time."}
    assert "skipped: No time." in report.build(test, TABLE)


def test_why_a_cell_is_missing_does_not_come_from_other_prompts(make: Make) -> None:
    from lab.fieldtest.cli import _texts

    test = make(small("kimi-k2.5", concurrencies=(4,), texts=_texts(64)))
    test.records["sweep-bf16-conc4"] = {"state": "failed", "reason": "No memory.", "key": "", "seconds": 1.0}
    test.records["sweep-bf16-chat-conc4"] = {"state": "skipped", "reason": "No time.", "key": "", "seconds": 0.0}
    assert report.reasons(test) == {("bf16", 4): "failed: No memory."}


def test_of_a_cell_that_was_measured_anew_the_last_one_counts(make: Make) -> None:
    folder = make().folder
    (folder / "sweep").mkdir()
    old, new = (
        row("bf16", 4, 100.0, eagle3_lab_began="2026-11-30T00:00:00Z"),
        row("bf16", 4, 150.0, eagle3_lab_began="2026-12-01T00:00:00Z"),
    )
    for name, one in {"z": old, "a": new, "b": row("bf16", 4, 151.0, seed=1)}.items():
        (folder / "sweep" / f"agg_{name}.json").write_text(json.dumps(one))
    rows, said = report.results(folder)
    assert sorted(one["output_tput_per_gpu"] for one in rows) == [150.0, 151.0]
    assert "1 earlier" in said[0]


def test_a_file_that_vanishes_is_no_crash(make: Make, tmp_path: Path) -> None:
    assert report.results(tmp_path / "nowhere") == ([], [])
    assert compare.acceptance(make().folder, None)[1] == "There are no traces of both drafts."
