"""The barrier's demonstration: what its two buttons show, and that Stop leaves no engine behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from lab import recipes
from lab.errors import LabError
from lab.recipes.smollm2 import smollm2_mla_before
from lab.trace.stats import count
from lab.ui import crossing
from lab.ui.state import Runs, Session

from .conftest import Watched, sync_api
from .fakes import FakeEngine

Serve = Callable[..., str]
Visit = Callable[..., Watched]

OWN = recipes.get("smollm2")
BEFORE = crossing.lane(smollm2_mla_before()).key
AFTER = crossing.lane(recipes.get("smollm2-mla")).key


def engine(**settings: Any) -> FakeEngine:
    return FakeEngine(OWN, **settings)


def test_the_cache_in_float32_is_said_to_be_twice_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, said in (("float32", True), ("bfloat16", False)):
        recipe = replace(recipes.get("smollm2-mla"), flags=(("--dtype", dtype),))
        monkeypatch.setattr(crossing, "get", lambda _, recipe=recipe: recipe)
        assert (f"float32 and keeps twice as much: {30 * (512 + 64) * 4:,} B" in crossing.cache_words.__wrapped__()) == said


def test_the_cache_is_computed_and_larger_here() -> None:
    words = crossing.cache_words()
    assert f"{30 * (512 + 64) * 2:,} B for this target" in words
    assert f"{30 * 2 * 3 * 64 * 2:,} B for the same model" in words
    assert "1.5 times larger here" in words
    assert f"{61 * (512 + 64) * 2:,} B instead of {61 * 64 * (192 + 128) * 2:,} B" in words


def test_the_numbers_are_those_of_the_checkpoint() -> None:
    """`kv.MODELS` quotes what the conversion writes."""
    deepseek = pytest.importorskip("lab.train.deepseek")
    from pathlib import Path

    from lab.doctor import kv

    original = json.loads((Path(__file__).parents[1] / "doctor/configs/SmolLM2-135M-Instruct.json").read_text())
    made = deepseek.config({"hidden_act": "silu", **original})
    quoted = next(one for one in kv.MODELS if one.name == "smollm2-mla")
    assert {name: made[name] for name in quoted.config} == dict(quoted.config)
    assert quoted.key == made["qk_nope_head_dim"] + made["qk_rope_head_dim"]
    assert quoted.value == made["v_head_dim"]


def watch(fake: FakeEngine, session: Session, which: str) -> Any:
    """The last picture of one of the demonstrations, after what it let go has ended."""
    demonstration = crossing.Demonstration(fake, Runs(), OWN)

    async def work() -> Any:
        pictures = demonstration.before(session) if which == "before" else demonstration.after(session, "hi")
        found = [one async for one in pictures]
        await demonstration.ended()
        return found[-1]

    return asyncio.run(work())


def test_before_the_fix_shows_the_engines_own_words_and_stops_it() -> None:
    fake, session = engine(), Session()
    status, shown = watch(fake, session, "before")
    assert shown.state == "refused"
    assert shown.message == "ValueError: No common block size for 16 (CPU_MLA: [16]; CPU_ATTN: [MultipleOf(32)])."
    assert shown.message in status.text
    assert "exactly 16 tokens" in shown.words[0]
    assert fake.stopped == [BEFORE]
    assert session.barrier is None


def test_another_failure_is_not_called_the_barrier() -> None:
    shown = crossing.refused(LabError("The engine did not start.", why="MemoryError\nlog", todo="Close something."), 3.0)
    assert shown.state == "failed"
    assert "not the barrier" in shown.words[0]
    assert crossing.failed(LabError("It did not start.", why="No common block size for 16 (x: [16])")).words[0].startswith("The plugin's")


def test_a_vllm_without_the_conflict_is_said_to_have_none() -> None:
    fake = engine(refuses="nothing")
    assert watch(fake, Session(), "before")[1].title == "There is no barrier here"
    assert fake.stopped == [BEFORE]


def test_with_the_fix_steps_k_and_acceptance_are_the_runs_own_and_the_engine_stays() -> None:
    fake, session = engine(), Session()
    status, shown, run = watch(fake, session, "after")
    found = count(run.request.steps)
    assert shown.state == "answered"
    assert len(shown.rows) == len(run.request.steps)
    assert len(shown.answer) == crossing.TOKENS
    assert shown.facts.startswith("K = 3: 48 tokens in")
    assert f"{found.accepted} of {found.draft_tokens} draft tokens accepted" in shown.facts
    assert f"{found.mean_acceptance_length:.2f}, bonus included" in shown.facts
    assert "Stop ends it" in status.detail
    assert fake.stopped == []
    assert session.barrier is not None
    assert session.barrier.key == AFTER


@pytest.mark.parametrize("pictures", [1, 6], ids=["while it starts", "while it answers"])
def test_closing_ends_the_engine(pictures: int) -> None:
    fake, session = engine(start=0.5, pace=0.2), Session()

    async def work() -> None:
        seen = 0
        demonstration = crossing.Demonstration(fake, Runs(), OWN)
        async with aclosing(demonstration.after(session, "hi")) as found:
            async for _ in found:
                seen += 1
                if seen == pictures:
                    break
        await demonstration.ended()

    asyncio.run(work())
    assert fake.stopped == [AFTER]


def test_the_pages_own_lane_is_not_stopped() -> None:
    fake, session = engine(), Session(barrier=crossing.lane(recipes.get("smollm2-mla")))
    demonstration = crossing.Demonstration(fake, Runs(), recipes.get("smollm2-mla"))

    async def work() -> None:
        demonstration.let_go(session)
        await demonstration.ended()

    asyncio.run(work())
    assert fake.stopped == []


def test_a_new_demonstration_waits_for_the_one_that_ends() -> None:
    """Else it would join a start that is being called off."""
    fake, session = engine(start=0.2, stopping=0.3), Session(barrier=crossing.lane(recipes.get("smollm2-mla")))
    demonstration = crossing.Demonstration(fake, Runs(), OWN)

    async def work() -> None:
        demonstration.let_go(session)
        async for _ in demonstration.after(session, "hi"):
            assert fake.stopped == [AFTER]
            break

    asyncio.run(work())


def test_stop_on_another_page_does_not_call_off_this_ones_start() -> None:
    fake = engine(start=0.3)
    earlier, now = Session(barrier=crossing.lane(recipes.get("smollm2-mla"))), Session()
    demonstration = crossing.Demonstration(fake, Runs(), OWN)

    async def work() -> str:
        states = []
        async for _, shown, _ in demonstration.after(now, "hi"):
            states.append(shown.state)
            demonstration.let_go(earlier)
        await demonstration.ended()
        return states[-1]

    assert asyncio.run(work()) == "answered"
    assert fake.stopped == []


def test_stop_ends_its_own_engine_while_another_page_starts_another() -> None:
    fake = engine(start=0.3)
    mine = crossing.lane(recipes.get("smollm2-mla"))
    earlier, now = Session(barrier=mine), Session()
    demonstration = crossing.Demonstration(fake, Runs(), OWN)

    async def work() -> None:
        await fake.endpoint(mine)
        async for _ in demonstration.before(now):
            demonstration.let_go(earlier)
        await demonstration.ended()

    asyncio.run(work())
    assert mine.key in fake.stopped


@pytest.mark.browser
def test_both_buttons_and_stop_in_a_browser(serve: Serve, visit: Visit) -> None:
    fake = engine(start=2.0, pace=0.05, stopping=1.0)
    watched = visit(serve(fake))
    page = watched.page
    page.get_by_role("tab", name="The barrier").click()
    shown = page.locator(".e3-crossing-root")
    sync_api.expect(shown).to_contain_text("34,560 B for this target")
    page.get_by_role("button", name="Start it as before the fix").click()
    sync_api.expect(shown).to_have_attribute("data-state", "refused", timeout=120_000)
    sync_api.expect(page.locator(".e3-crossing-message")).to_contain_text("No common block size for 16 (CPU_MLA: [16]; CPU_ATTN:")
    sync_api.expect(page.locator("#e3-barrier .e3-verdict-line")).to_contain_text("No common block size for 16 (CPU_MLA: [16]")
    shown.locator("summary").click()
    assert "<img src=x onerror=alert(1)>" in shown.locator("pre").inner_text()
    page.get_by_role("button", name="Start it with the fix").click()
    sync_api.expect(shown).to_have_attribute("data-state", "answered", timeout=120_000)
    assert shown.locator(".e3-chip").count() > 20
    sync_api.expect(page.locator(".e3-crossing-facts")).to_contain_text("draft tokens accepted; mean acceptance length")
    sync_api.expect(page.locator("#e3-barrier .e3-verdict-line")).to_contain_text("Block size 32 for the kernels")
    assert shown.locator("img, script, svg").count() == 0
    page.get_by_role("button", name="Stop").click()
    watched.wait_status("the demonstration's engine has ended")
    assert fake.stopped == [BEFORE, AFTER]
    fake.start = 120  # it starts until this test has stopped it
    watched.press("Start it with the fix")
    watched.wait_status("Starting Eagle3 BF16")
    page.get_by_role("button", name="Stop").click()
    watched.wait_status("the demonstration's engine has ended")
    assert fake.stopped[2:] == [AFTER]  # it is said when it is so
    fake.start = 0
    watched.press("Start it with the fix")
    sync_api.expect(shown).to_have_attribute("data-state", "answered", timeout=120_000)
    watched.fits()
