"""The page over a real vLLM server with the shipped draft: what is on screen is the server's own trace of that very run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lab import recipes
from lab.checkpoints import ensure
from lab.errors import LabError
from lab.trace.io import load
from lab.trace.stats import count

from .conftest import Watched, sync_api
from .test_page import expected_chips, seen_chips

pytestmark = [pytest.mark.engine, pytest.mark.browser]
PROMPT = "Write a short poem about an eagle 🦅, then name three large birds."


@pytest.mark.timeout(2400)
def test_a_real_run_on_screen_is_the_servers_trace(serve: Callable[..., str], visit: Callable[..., Watched], tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="the engine is not installed")
    from lab.serving.lanes import Lanes
    from lab.ui.engine import Serving

    try:
        ensure(recipes.get("smollm2").drafts["bf16"])
    except LabError as error:
        pytest.skip(str(error))
    lanes = Lanes()
    try:
        watched = visit(serve(Serving(lanes), warm=True))
        page = watched.page
        watched.wait_status("Starting Eagle3 BF16, K=3, eager")
        watched.wait_status("Ready: Eagle3 BF16, K=3, eager", timeout=900)
        page.get_by_label("Prompt").fill(PROMPT)
        page.locator("#e3-max-tokens input").fill("64")
        page.get_by_label("Target's alternatives").check()
        watched.run(timeout=600)
        with page.expect_download() as download:
            page.get_by_role("button", name="Save trace").click()
        download.value.save_as(tmp_path / "run.jsonl")
        (request,) = load(tmp_path / "run.jsonl").requests
        assert request.prompt == PROMPT
        assert request.usage_completion == len(request.output_ids()) == len(watched.words())
        assert seen_chips(watched) == expected_chips(request)
        assert [int(word["token"]) for word in watched.words()] == list(request.output_ids())
        counts = count(request.steps)
        length = page.locator("[data-tile='mean acceptance length'] b").inner_text()
        assert length == f"{counts.mean_acceptance_length:.2f}"
        assert counts.accepted > 0
        watched.page.locator('.e3-chip[data-mark="rejected"]').first.click()
        card = page.locator(".e3-card").inner_text()
        assert "draft confidence" in card
        assert "what the target wanted here" in card

        page.keyboard.press("Escape")
        page.get_by_label("Target's alternatives").uncheck()
        page.get_by_role("button", name="Run beside the baseline").click()
        sync_api.expect(page.locator(".e3-said")).to_be_visible(timeout=1_200_000)
        baseline, other = (
            page.locator(f'[data-lane="{lane}"] .e3-word').evaluate_all("all => all.flatMap(w => w.dataset.token.split(' ').map(Number))")
            for lane in (0, 1)
        )
        verdict = page.locator(".e3-said").get_attribute("data-verdict")
        assert (verdict == "same") == (baseline == other)
        assert other == list(request.output_ids())
        assert float(page.locator("[data-tile='speed-up'] b").inner_text().rstrip("×")) > 0.1  # how fast is the processor's matter
    finally:
        lanes.shutdown()
