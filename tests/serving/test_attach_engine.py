"""Attached lanes over real vLLM servers: one with the plugin and one without, behind a proxy with a prefix and an API key."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from lab import recipes
from lab.errors import LabError
from lab.serving.attach import Address, recipe_of
from lab.serving.client import Delta, Done, Notice, generate
from lab.serving.command import Lane
from lab.serving.lanes import Lanes
from lab.serving.metrics import scrape
from lab.trace.counted import rebuilt
from lab.trace.io import save
from lab.trace.model import Trace
from lab.ui.state import provenance_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]
pytest.importorskip("torch", reason="the engine needs it")
KEY = "sk-attach-0123"
PROMPT = "Explain in a few sentences why the sky is blue."


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Any]]:
    """Proxies by lane: `bf16` runs with the plugin, `fp8` stands for a lane without it (the same draft, counted by the server)."""
    spec = importlib.util.spec_from_file_location("proxy", Path(__file__).with_name("proxy.py"))
    assert spec is not None
    assert spec.loader is not None
    proxies = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(proxies)
    plugin = recipes.get("smollm2")
    counting = dataclasses.replace(plugin, name="counting", flags=(*plugin.flags, ("--per-request-spec-decode-metrics", "detailed")))
    patch, lanes = pytest.MonkeyPatch(), Lanes()
    patch.setenv("VLLM_API_KEY", KEY)

    async def start() -> list[Any]:
        wanted = (Lane(plugin, "bf16", 3), Lane(counting, "bf16", 3, traced=False))
        return await asyncio.gather(*(lanes.endpoint(lane) for lane in wanted))

    with ExitStack() as stack:
        stack.callback(lanes.shutdown)
        stack.callback(patch.undo)
        found = asyncio.run(start())
        patch.delenv("VLLM_API_KEY")
        made = [stack.enter_context(proxies.serving(proxies.Proxy(endpoint.url, f"/team/{place}"))) for place, endpoint in enumerate(found)]
        yield dict(zip(("bf16", "fp8"), made, strict=True))


def attached(servers: dict[str, Any], key: str | None = KEY) -> tuple[Lanes, Any]:
    where = {draft: Address(proxy.url, key) for draft, proxy in servers.items()}
    recipe = recipe_of(where)  # type: ignore[arg-type]
    return Lanes(addresses={one.url: one for one in where.values()}), recipe


async def ask(lanes: Lanes, lane: Lane, **more: Any) -> tuple[list[Any], Any, Any]:
    endpoint = await lanes.endpoint(lane)
    before = await scrape(endpoint, timeout=30.0)
    events = [event async for event in generate(endpoint, PROMPT, **more)]
    after = await scrape(endpoint, timeout=30.0)
    request, deadline = events[-1].request, time.monotonic() + 60
    known = len([step for step in request.steps if step.draft]) or len(request.counted)
    while True:  # until the counters have come as far as the answer (a minute at most), and have stopped moving
        await asyncio.sleep(0.3)
        last, after = after, await scrape(endpoint, timeout=30.0)
        if last.drafts == after.drafts and (after.drafts - before.drafts >= known or time.monotonic() > deadline):
            return events, request, (before, after)


def test_with_the_plugin_every_step_is_seen(servers: dict[str, Any], tmp_path: Path) -> None:
    lanes, recipe = attached(servers)
    lane = Lane(recipe, "bf16")
    events, request, (before, after) = asyncio.run(ask(lanes, lane, max_tokens=24))
    assert [event.text for event in events if isinstance(event, Notice)] == []
    drafted = [step for step in request.steps if step.draft]
    assert tuple(token for step in request.steps for token in step.sampled[: step.kept]) == request.ids
    assert len(request.ids) == 24
    assert after.drafts - before.drafts == len(drafted) > 0
    assert after.accepted_tokens - before.accepted_tokens == sum(step.accepted for step in drafted)
    saved = save(Trace(provenance=provenance_of(lane), requests=[request]), tmp_path / "t.jsonl").read_text(encoding="utf-8")
    assert KEY not in saved
    assert servers["bf16"].url.partition("://")[2] in saved


def test_without_the_plugin_the_server_s_counts_colour_the_answer(servers: dict[str, Any]) -> None:
    lanes, recipe = attached(servers)
    events, request, (before, after) = asyncio.run(ask(lanes, Lane(recipe, "fp8"), max_tokens=24))
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert len(notices) == 1
    assert "--scheduler-cls" in notices[0]
    assert not request.steps
    assert after.drafts - before.drafts == len(request.counted) > 0
    assert after.accepted_tokens - before.accepted_tokens == sum(accepted for _, accepted in request.counted)
    shown = rebuilt(request)
    assert shown is not None
    assert tuple(token for step in shown.steps for token in step.sampled[: step.kept]) == request.ids
    text = b"".join(bytes.fromhex(request.pieces[token]) for token in request.ids).decode("utf-8", errors="replace")
    assert text.startswith(request.text[:40])


def test_both_servers_say_the_same_of_one_answer(servers: dict[str, Any]) -> None:
    """Real steps of one server against the steps rebuilt from the other's counts: the same draft, greedy."""
    lanes, recipe = attached(servers)

    async def both() -> list[Any]:
        return [(await ask(lanes, Lane(recipe, draft), max_tokens=16))[1] for draft in ("bf16", "fp8")]

    traced, counted = asyncio.run(both())
    if traced.ids != counted.ids:
        pytest.skip("the two servers differ at a near-tie of the target")
    shown = rebuilt(counted)
    assert shown is not None
    real = [step for step in traced.steps if step.draft]
    assert [(len(step.draft), step.accepted, step.kept) for step in real] == [
        (len(step.draft), step.accepted, step.kept) for step in shown.steps if step.draft
    ]


def test_a_wrong_key_and_a_broken_connection(servers: dict[str, Any]) -> None:
    lanes, recipe = attached(servers, "wrong")
    with pytest.raises(LabError, match="refused the API key"):
        asyncio.run(lanes.endpoint(Lane(recipe, "bf16")))
    lanes, recipe = attached(servers)

    async def cut() -> Any:
        endpoint = await lanes.endpoint(Lane(recipe, "bf16"))
        async for event in generate(endpoint, PROMPT, max_tokens=400):
            if isinstance(event, Delta):
                servers["bf16"].cut()
            if isinstance(event, Done):
                return event.request
        return None

    request = asyncio.run(cut())
    assert "stopped in the middle of the answer" in request.error
    assert request.text
    _, again, _ = asyncio.run(ask(lanes, Lane(recipe, "bf16"), max_tokens=8))
    assert not again.error
    assert len(again.ids) == 8
