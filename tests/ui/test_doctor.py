"""The doctor's and the barrier's tabs in a browser: what they say is what the code found, and nothing that was typed is ever run."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from lab import recipes
from lab.doctor.blocks import BACKENDS, picture
from lab.errors import LabError
from lab.ui import barrier, doctor

from .conftest import Watched, sync_api
from .fakes import FakeEngine

Serve = Callable[..., str]
Visit = Callable[..., Watched]

LINE = """VLLM_ROCM_USE_AITER=1 vllm serve '<img src=x onerror=alert(1)>/${alert(2)}' --block-size 1 --attention-backend ROCM_AITER_MLA
--speculative-config '{"method": "eagle3", "model": "a/{{x}}", "num_speculative_tokens": 4, "attention_backend": "TRITON_ATTN"}'"""


@pytest.mark.browser
def test_the_doctor_examines_a_recipe_and_a_hostile_line(serve: Serve, visit: Visit) -> None:
    watched = visit(serve(FakeEngine(recipes.get("smollm2"))))
    page = watched.page
    page.get_by_role("tab", name="Doctor").click()
    summary = page.locator(".e3-doctor-sum")
    page.get_by_role("button", name="Examine").click()
    sync_api.expect(summary).to_contain_text("0 errors", timeout=120_000)
    page.locator("#e3-doctor-line textarea").fill(LINE)
    page.get_by_role("button", name="Examine").click()
    sync_api.expect(summary).to_contain_text(re.compile(r"✗ [1-9] error"), timeout=120_000)
    found = doctor.examine("smollm2", "bf16", LINE, doctor.HERE)
    assert [one.get_attribute("data-rule") for one in page.locator(".e3-finding").all()] == [one.rule for one in found.findings]
    first = page.locator(".e3-finding[data-rule=block-size]")
    sync_api.expect(first).to_have_attribute("open", "")
    assert "No common block size for 1" in first.inner_text()
    assert first.get_by_role("link", name="v#39616").get_attribute("href") == "https://github.com/vllm-project/vllm/issues/39616"
    assert "<img src=x onerror=alert(1)>" in page.locator(".e3-doctor-rows").inner_text()
    assert page.locator(".e3-doctor-rows img").count() == 0
    page.locator("#e3-doctor-line textarea").fill("http://127.0.0.1:1/metrics")
    page.get_by_role("button", name="Examine").click()
    sync_api.expect(summary).to_contain_text("calls no address", timeout=120_000)
    watched.fits()


@pytest.mark.browser
def test_the_barrier_is_drawn_as_computed(serve: Serve, visit: Visit) -> None:
    watched = visit(serve(FakeEngine(recipes.get("smollm2"))))
    page = watched.page
    page.get_by_role("tab", name="The barrier").click()
    verdict = page.locator(".e3-verdict-line")
    sync_api.expect(verdict).to_contain_text("No common block size for 1 (ROCM_AITER_MLA: [1]; ROCM_ATTN: [MultipleOf(16)])")
    page.locator("#e3-barrier-size input").click()
    page.get_by_role("option", name="16", exact=True).click()
    sync_api.expect(verdict).to_contain_text("No common block size for 16")
    page.locator("#e3-barrier-pair input").click()
    page.get_by_role("option", name="AITER MLA since #39616 + draft").click()
    sync_api.expect(verdict).to_contain_text("✓ Block size 16 for the kernels.")
    made = picture(16, [13, 6], slots=barrier.SLOTS)
    shown = [one.inner_text() for one in page.locator(".e3-indices").all()]
    assert shown == [" ".join(map(str, indices)) for indices in made.indices]
    assert page.locator(".e3-slot[data-owner='0']").count() == 13
    block = page.get_by_role("button", name=f"Block {made.tables[0][0]} of sequence A")
    block.focus()
    page.keyboard.press("Enter")
    sync_api.expect(block).to_have_attribute("aria-pressed", "true")
    assert page.locator(".e3-slot[data-lit=true]").count() == 16
    page.locator("#e3-barrier-kv .js-plotly-plot").nth(1).wait_for()
    watched.fits()


def test_what_a_visitor_may_not_ask() -> None:
    with pytest.raises(LabError, match="calls no address"):
        doctor.examine("smollm2", "bf16", " HTTPS://example.org", doctor.HERE)
    with pytest.raises(LabError, match="characters"):
        doctor.examine("smollm2", "bf16", "x" * 30_000, doctor.HERE)
    with pytest.raises(LabError, match="no draft"):
        doctor.examine("minimax-m2.5", "fp8", "", doctor.HERE)
    quiet = doctor.examine("smollm2", "bf16", "vllm serve /etc", "MI355X")
    assert quiet.subject.target is not None
    assert quiet.subject.target.problems == ()


def test_every_pair_and_size_is_told() -> None:
    for pair, names in barrier.PAIRS.items():
        assert all(name in BACKENDS for name in names)
        for size in barrier.SIZES:
            view = barrier.view(pair, size, 13, 6)
            assert view["ok"] == view["starts"][barrier.SIZES.index(size)]
            assert view["verdict"]
            assert view["asked"]
