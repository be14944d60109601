"""Acceptance from traces by hand: pooled over steps, per kind and context, with loops and without, beside the server's counters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lab.bench import acceptance
from lab.bench.prompts import Prompt
from lab.errors import LabError
from lab.serving.endpoint import Endpoint
from lab.serving.metrics import Snapshot
from lab.trace.model import Request, Step


def request(*yields: Sequence[int], finish: str = "length") -> Request:
    """A traced request: the first entry is what prefill sampled, each other one a verify step's tokens, K = 3."""
    steps = []
    for index, ids in enumerate(yields):
        draft = (*ids[:-1], *([9999] * (4 - len(ids)))) if index else ()
        steps.append(
            Step(
                trace="t",
                request="r",
                index=index,
                phase="decode" if index else "prefill",
                started=0.0,
                ended=1.0,
                draft=tuple(draft)[:3],
                sampled=tuple(ids),
                kept=len(ids),
            )
        )
    count = sum(map(len, yields))
    return Request(trace="t", lane="l", prompt="p", steps=steps, usage_prompt=10, usage_completion=count, finish=finish)


def collected(*pairs: tuple[Prompt, Request], counters: tuple[int, int, int] | None = None) -> acceptance.Collected:
    before = Snapshot(time=0, drafts=100, draft_tokens=300, accepted_tokens=50)
    after = None
    if counters:
        after = Snapshot(time=1, drafts=100 + counters[0], draft_tokens=300 + counters[1], accepted_tokens=50 + counters[2])
    return acceptance.Collected(list(pairs), before, after)


CHAT = (Prompt("c", "chat", "?"), request([1], [2, 3, 4, 5], [6]))  # 2 drafts, 3 accepted
CODE = (Prompt("k", "code", "?"), request([1], [2, 3], [4, 5], [6, 7], [8], finish="stop"))  # 4 drafts, 3 accepted
DEEP = (Prompt("l", "long", "?", 1024), request([1], [2, 3, 4]))  # 1 draft, 2 accepted


def test_lengths_are_pooled_over_steps_with_the_bonus() -> None:
    summary = acceptance.summarise(collected(CHAT, CODE, DEEP, counters=(7, 21, 8)))
    assert summary["kinds"]["chat"]["mean_acceptance_length"]["value"] == pytest.approx(1 + 3 / 2)
    assert summary["kinds"]["code"]["mean_acceptance_length"]["value"] == pytest.approx(1 + 3 / 4)
    overall = summary["overall"]
    assert overall["mean_acceptance_length"]["value"] == pytest.approx(1 + 6 / 6), "pooled, and without the long prompts"
    assert overall["mean_acceptance_length"]["low"] == pytest.approx(1.75)
    assert overall["mean_acceptance_length"]["high"] == pytest.approx(2.5)
    assert overall["accepted_by_position"] == pytest.approx([4 / 6, 1 / 6, 1 / 6])
    assert (overall["prompts"], overall["ended_by_themselves"], overall["tokens"]) == (2, 1, 14)
    assert summary["contexts"]["1024"]["mean_acceptance_length"]["value"] == pytest.approx(3.0)


def test_loops_are_left_out_the_second_time() -> None:
    loop = (Prompt("c", "chat", "?"), request([0], *[[10 * n + i for i in range(1, 3)] for n in range(1, 6)], *[[1, 2, 3, 4]] * 8))
    found = acceptance.summarise(collected(loop))["overall"]
    fresh = found["without_repeated_8grams"]
    assert found["drafts"] == 13
    assert found["mean_acceptance_length"]["value"] == pytest.approx(1 + (5 * 1 + 8 * 3) / 13)
    # 1 2 3 4 | 1 2 3 4 | 1: the ninth token of the loop is the first to complete an 8-gram a second time.
    assert fresh["drafts"] == 5 + 3
    assert fresh["mean_acceptance_length"]["value"] == pytest.approx(1 + (5 * 1 + 3 * 3) / 8)


def test_the_servers_counters_are_compared() -> None:
    good = acceptance.summarise(collected(CHAT, CODE, DEEP, counters=(7, 21, 8)))
    assert good["counters"]["agree"]
    assert "agree exactly (7 drafts)" in acceptance.render(good, "Eagle3")
    off = acceptance.summarise(collected(CHAT, CODE, DEEP, counters=(7, 21, 9)))
    assert not off["counters"]["agree"]
    assert "DIFFER" in acceptance.render(off, "Eagle3")
    assert "not compared" in acceptance.render(acceptance.summarise(collected(CHAT)), "Eagle3")


@pytest.mark.parametrize(("late", "agree"), [(0, True), (3, True), (1000, False)])
def test_counters_that_are_behind_the_answers_are_waited_for(late: int, agree: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []

    async def scrape(_endpoint: Endpoint) -> Snapshot:
        reads.append(1)
        drafts, tokens, accepted = (7, 21, 8) if len(reads) > late else (6, 18, 6)
        return Snapshot(time=1, drafts=100 + drafts, draft_tokens=300 + tokens, accepted_tokens=50 + accepted)

    monkeypatch.setattr(acceptance, "scrape", scrape)
    monkeypatch.setattr(acceptance, "LAG", 0.0)
    found, nowhere = collected(CHAT, CODE, DEEP), Endpoint("http://127.0.0.1:9", "m")
    asyncio.run(acceptance.collect(found, nowhere, [], concurrency=1, max_tokens=24, say=lambda _: None))
    assert acceptance.summarise(found)["counters"]["agree"] is agree
    assert len(reads) == (late + 1 if agree else acceptance.LOOKS)


def test_the_table_names_every_group() -> None:
    text = acceptance.render(acceptance.summarise(collected(CHAT, CODE, DEEP, counters=(7, 21, 8))), "Eagle3 BF16, K=3, eager")
    rows = {line.split("  ")[0] for line in text.splitlines()}
    assert {"chat", "code", "overall", "context 1024"} <= rows
    assert "2.000 [1.75, 2.50]" in text
    assert "3.000 [" not in text, "one prompt has no interval"


def test_nothing_and_nothing_traced(serve: Callable[[Any], Endpoint], fake: Any) -> None:
    with pytest.raises(LabError, match="Nothing was measured"):
        acceptance.summarise(acceptance.Collected())
    work = acceptance.collect(
        acceptance.Collected(), serve(fake()), [CHAT[0]], concurrency=4, max_tokens=24, say=lambda _: None
    )  # a server without the plugin
    with pytest.raises(LabError, match=r"'c' cannot be counted.*plugin"):
        asyncio.run(work)
