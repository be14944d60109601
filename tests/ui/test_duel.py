"""The duel's tab in a browser over a small engine, its export opened by the same browser, and the parts of both draft tabs without one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab import recipes
from lab.bench import reports
from lab.checkpoints import Cancelled
from lab.errors import LabError
from lab.quant import QuantReport, Tensor
from lab.quant.report import Channel
from lab.recipes.model import Asset, Checkpoint, Hub, QuarkFp8
from lab.serving.command import Lane
from lab.serving.endpoint import LaneStatus, Progress
from lab.trace.io import save
from lab.trace.model import Trace
from lab.ui import quantise
from lab.ui.bar import memory_words
from lab.ui.duel import EACH, TYPED, chosen_prompts, prompt_choices
from lab.ui.runner import start_words

from .conftest import Watched, sync_api
from .fakes import FakeEngine

BIDI = "[\u202a-\u202e\u2066-\u2069]"


@pytest.mark.browser
def test_a_duel_on_the_page(serve: Callable[..., str], visit: Callable[..., Watched], tmp_path: Path) -> None:
    fake = FakeEngine(recipes.get("smollm2"), weak="fp8", pace=0.002)
    watched = visit(serve(fake))
    page = watched.page
    page.get_by_role("tab", name="Duel").click()
    root = page.locator(".e3-duel-root")

    # bad input is a sentence, and nothing is asked
    page.get_by_label("Second draft").click()
    page.get_by_role("option", name="BF16", exact=True).click()
    page.get_by_role("button", name="Run the duel").click()
    watched.wait_status("BF16 was named twice.")
    assert fake.requests == []

    page.get_by_label("Second draft").click()
    page.get_by_role("option", name="FP8", exact=True).click()
    watched.press("Run the duel")
    sync_api.expect(root).to_have_attribute("data-state", "done", timeout=300_000)
    watched.wait_status("Done: duel of BF16 against FP8")
    assert (
        page.locator(".e3-duel-head .e3-sentence")
        .inner_text()
        .startswith("▼ FP8 is worse than BF16: mean acceptance length 1.50 against 2.00")
    )
    measured = [request for request in fake.requests if request.settings["max_tokens"] == 128]
    assert len(measured) == 16
    assert len({request.prompt for request in measured}) == 8
    assert set(fake.lanes) == {"smollm2/bf16/k3/eager/traced", "smollm2/fp8/k3/eager/traced"}
    watched.fits()

    # places are marked, clickable, and reached by keyboard; hostile tokens stay text
    marked = page.locator(".e3-places .e3-place-one, .e3-places .e3-place-other")
    assert marked.count() > 20
    assert page.locator(".e3-duel-prompt").count() == 8
    tags = page.locator(".e3-duel-list").evaluate("e => [...new Set([...e.querySelectorAll('*')].map(one => one.tagName.toLowerCase()))]")
    assert set(tags) <= {"section", "h3", "bdi", "div", "p", "span", "i", "b"}
    shown = page.locator(".e3-duel-list").evaluate("e => e.textContent")
    assert "<script>alert(1)</script>" in shown
    assert not [char for char in "\u202e\u2066\u2069" if char in shown]
    marked.first.click()
    card = page.locator(".e3-duel-root .e3-card")
    assert "BF16: accepted" in card.inner_text()
    assert "FP8: rejected" in card.inner_text()
    page.keyboard.press("ArrowRight")
    assert "place 2 of" in page.locator(".e3-duel-count").inner_text()
    page.keyboard.press("Escape")
    sync_api.expect(card).to_be_hidden()
    step = page.get_by_role("button", name="Next place where the drafts differ")
    for number in range(3, marked.count() + 1):  # on from the one that was named; most are out of view, and the list scrolls to them
        step.click()
        page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert page.locator(".e3-duel-count").inner_text().startswith(f"place {number} of")
        sync_api.expect(card).to_be_visible()
    page.locator(".e3-duel-list").evaluate("e => e.scrollTop = 0")
    sync_api.expect(card).to_be_hidden()  # its place is out of view

    # both exports; the page opens without a request, a script or a dialog
    with page.expect_download() as download:
        page.locator("#e3-duel-json").click()
    download.value.save_as(tmp_path / "duel.json")
    report, _ = reports.load(tmp_path / "duel.json")
    assert report["comparisons"][0]["places"]["one"] == page.locator(".e3-places .e3-place-one").count()
    with page.expect_download() as download:
        page.locator("#e3-duel-html").click()
    download.value.save_as(tmp_path / "duel.html")
    asked: list[str] = []
    fresh = page.context.new_page()
    fresh.on("request", lambda request: asked.append(request.url))
    fresh.on("dialog", lambda dialog: (watched.faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    fresh.goto(f"file://{tmp_path / 'duel.html'}")
    assert asked == [f"file://{tmp_path / 'duel.html'}"]
    assert fresh.locator("script, img, svg, iframe, link").count() == 0
    first = fresh.locator("details.e3-place").first
    first.locator("summary").focus()
    fresh.keyboard.press("Enter")
    sync_api.expect(first.locator(".e3-why")).to_be_visible()

    # two saved traces of other K: shown, and warned of
    for name, lane in (("one", "bf16"), ("two", "fp8")):
        some = [request for request in measured if f"/{lane}/" in request.lane]
        for request in some:
            request.settings["k"] = 3 if lane == "bf16" else 5
        save(Trace(provenance={"versions": {"vllm": "1", "torch": "2"}}, requests=some), tmp_path / f"{name}.jsonl")
    page.locator(".e3-duel-list").evaluate("e => e.scrollTop = 200")
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Open two traces").click()
    chooser.value.set_files([tmp_path / "one.jsonl", tmp_path / "two.jsonl"])
    watched.wait_status("Opened two traces of the same prompts.")
    sync_api.expect(page.locator(".e3-duel-side")).to_contain_text("Not comparable: K differs: 3 and 5.")
    assert page.locator(".e3-duel-list").evaluate("e => e.scrollTop") == 0, "another report is read from its beginning"
    assert page.get_by_label("Prompt", exact=True).input_value(), "the prompt stays"


@pytest.mark.browser
def test_a_running_duel_leaves_its_reader_in_peace(serve: Callable[..., str], visit: Callable[..., Watched]) -> None:
    """A report comes with every prompt that is done; what was there before it is neither closed nor built anew."""
    fake = FakeEngine(recipes.get("smollm2"), pace=0.01)
    watched = visit(serve(fake))
    page = watched.page
    page.get_by_role("tab", name="Duel").click()
    page.get_by_label("Second draft").click()
    page.get_by_role("option", name=EACH).click()
    watched.press("Run the duel")
    card, prompts, count = page.locator(".e3-duel-root .e3-card"), page.locator(".e3-duel-prompt"), page.locator(".e3-duel-count")
    sync_api.expect(prompts).to_have_count(1)
    page.locator(".e3-duel-tab").nth(1).focus()
    page.keyboard.press("Enter")  # the comparison changes, the keyboard stays where it is
    assert page.locator(".e3-duel-tab").nth(1).evaluate("e => e === document.activeElement && e.ariaPressed === 'true'")
    page.get_by_role("button", name="Next place where the drafts differ").click()
    page.evaluate("document.activeElement.mine = true")
    sync_api.expect(prompts).to_have_count(3)
    sync_api.expect(card).to_be_visible()
    assert page.evaluate("document.activeElement.mine === true")
    assert count.inner_text().startswith("place 1 of")
    sync_api.expect(page.locator(".e3-duel-root")).to_have_attribute("data-state", "done", timeout=300_000)
    sync_api.expect(card).to_be_visible()
    # stepping goes on from the place that is named, also when its card was closed
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Next place where the drafts differ").click()
    assert count.inner_text().startswith("place 2 of")
    page.locator(".e3-places .e3-place-one, .e3-places .e3-place-other").nth(6).focus()
    page.keyboard.press("ArrowRight")
    assert count.inner_text().startswith("place 8 of")


@pytest.mark.browser
def test_stop_keeps_the_whole_prompts_of_a_duel(serve: Callable[..., str], visit: Callable[..., Watched]) -> None:
    fake = FakeEngine(recipes.get("smollm2"), weak="low", pace=0.02, together=1)
    watched = visit(serve(fake))
    page = watched.page
    page.get_by_role("tab", name="Duel").click()
    page.get_by_label("Second draft").click()
    page.get_by_role("option", name="BF16 without low level").click()
    page.get_by_role("button", name="Run the duel").click()
    sync_api.expect(page.locator(".e3-duel-root")).to_have_attribute("data-state", "running", timeout=300_000)
    fake.pace = 2.0  # so that it is not over before it is stopped
    page.get_by_role("button", name="Stop", exact=True).click()
    watched.wait_status("what was measured is kept.")
    sync_api.expect(page.locator(".e3-duel-side")).to_contain_text("Stopped early")
    side = page.locator(".e3-duel-side").inner_text()
    assert "did not fit into memory together" in side
    assert reports.control() in side


# --- without a browser ---


def test_the_prompts_of_a_duel() -> None:
    for choice in prompt_choices():
        found = chosen_prompts(choice, "typed")
        assert len(found) == (1 if choice == TYPED else 24 if choice.startswith("Mixed") else 8)
        assert len({prompt.id for prompt in found}) == len(found)
    with pytest.raises(LabError, match="empty"):
        chosen_prompts(TYPED, "  ")
    with pytest.raises(LabError, match="not known"):
        chosen_prompts("/etc/passwd", "typed")


def quantised(**changes: Any) -> QuantReport:
    tensors = (
        Tensor("fc.weight", (4, 12), "BF16", "BF16", 96, 96, kept="excluded: <b>why</b>"),
        Tensor("midlayer.mlp.up_proj.weight", (100, 100), "BF16", "F8_E4M3", 20000, 10400, 0.02, 1.0, (Channel(7, 0.05), Channel(1, 0.04))),
    )
    return QuantReport("ptpc_fp8", "x", tensors, ("re:fc$",), "vLLM 0 reads it as meant", **changes)


def test_the_report_of_a_quantisation_as_data() -> None:
    recipe = recipes.get("smollm2")
    value = quantise.view(recipe, quantised(), "said <script>")
    assert "<" not in value
    shown = json.loads(value)
    assert shown["rows"][0][0] == "midlayer.mlp.up_proj.weight"
    assert shown["rows"][0][2:] == ["20,000", "10,400", "2.00%", "7 (5.0%), 1 (4.0%)"]
    assert shown["rows"][-1][:4] == ["total", "", "20,096", "10,496"]
    assert shown["kept"] == ["fc.weight: excluded: <b>why</b>"]
    assert any("bytes" in line or "KV-cache tokens more on this machine" in line for line in shown["buys"])
    sizes, errors = quantise.panels(quantised())
    assert sizes[1]["data"][1]["x"] == [0.0104]
    assert errors[1]["data"][1]["customdata"] == [7]
    assert json.loads(quantise.view(recipe, None, "nothing yet"))["rows"] == []


def test_only_the_recipes_own_drafts_are_quantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    monkeypatch.setenv("EAGLE3_LAB_CACHE", str(tmp_path))
    recipe = recipes.get("smollm2")
    for precision in ("/etc", "../x", "fp8", "", "none"):
        with pytest.raises(LabError, match="no such draft to quantise"):
            quantise.make(recipe, precision, lambda _text: None)
    hub = dataclasses.replace(recipe, drafts={"bf16": Checkpoint("d", Hub("a/b"))})
    with pytest.raises(LabError, match="on the Hugging Face hub"):
        quantise.make(hub, "bf16", lambda _text: None)
    assert list(tmp_path.iterdir()) == []
    assert quantise.earlier(recipe)[0] is None
    assert quantise.earlier(hub)[1].startswith("The lab did not make")


def test_called_off_it_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("quark", reason="AMD Quark is not installed")
    monkeypatch.setenv("EAGLE3_LAB_CACHE", str(tmp_path))
    gone = threading.Event()

    def told(_text: str) -> None:
        if gone.is_set():
            raise Cancelled
        gone.set()  # the second line of progress ends it

    with pytest.raises(Cancelled):
        quantise.make(recipes.get("smollm2"), "bf16", told)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_the_switch_says_sizes_and_how_long_a_start_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    monkeypatch.setenv("EAGLE3_LAB_CACHE", str(tmp_path))
    (tmp_path / "bf16").mkdir()
    (tmp_path / "bf16" / "model.safetensors").write_bytes(b"0" * 1_250_000)
    whole = Asset(str(tmp_path / "bf16"))
    drafts = {"bf16": Checkpoint("b", whole), "fp8": Checkpoint("f", QuarkFp8(whole))}
    recipe = dataclasses.replace(recipes.get("smollm2"), drafts=drafts)
    assert memory_words(recipe) == "Draft (BF16 1.2 MB, FP8 not made yet)"
    assert memory_words(recipes.get("kimi-k2.5")) == "Draft (BF16 on the hub, FP8 on the hub)"
    lanes = [Lane(recipe, draft, 3) for draft in ("bf16", "fp8")]
    assert "usually half a minute" in start_words([], recipe, lanes[0])
    assert "AMD Quark makes its draft first" in start_words([], recipe, lanes[1])
    known = [LaneStatus(lanes[0], "ready", Progress("ready", "", 34.2))]
    assert "the last one here took 34 s" in start_words(known, recipe, lanes[0])


def test_the_chart_over_time_shows_the_latest_run_of_a_draft_whatever_its_k(tmp_path: Path) -> None:
    from lab.trace.model import Request
    from lab.ui.app import Lab
    from lab.ui.microscope import _lines
    from lab.ui.state import Run, Runs, Session

    lab = Lab(recipes.get("smollm2"), FakeEngine(recipes.get("smollm2")), Runs(), tmp_path)
    session = Session()
    for k, speed in ((3, 10.0), (4, 20.0), (3, 30.0)):
        request = Request(trace=str(speed), lane=f"l{k}", prompt="p", settings={"k": k})
        run = lab.runs.add(Run(str(speed), request, "bf16", f"K={k}", {}, speed=[(1.0, speed)]))
        session.latest.pop(request.lane, None)
        session.latest[request.lane] = run.id
    (line,) = _lines(lab, session)
    assert (line.label, line.y) == ("Eagle3 BF16, K=3", (30.0,))
