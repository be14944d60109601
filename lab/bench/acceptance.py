"""How much of what the draft proposes the target accepts: held-out prompts through a traced lane, counted step by step.

Counts come from the trace (`lab.trace.stats`) and are compared with the server's own counters over the same run, which know nothing of
the trace: the two must agree. The mean acceptance length includes the bonus token, 1 + accepted / drafts, pooled over all steps of a
group; intervals are a bootstrap over prompts. Everything is given a second time without loops (`stats.fresh`): a step is left out
when the first token it yields completes an 8-gram that stood earlier in the same answer.

Concurrency makes this quicker and does not change acceptance, but for near-ties that other batch shapes decide otherwise.
Limit: the lane must serve nobody else meanwhile, or the counters cannot be compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

from lab.bench import result
from lab.bench.prompts import Prompt
from lab.errors import LabError
from lab.serving.client import Done, Event, Notice, generate
from lab.serving.endpoint import Endpoint
from lab.serving.metrics import Snapshot, scrape
from lab.trace import stats
from lab.trace.model import Request

Say = Callable[[str], None]
LOOKS, LAG = 20, 0.1  # how often, and how many seconds apart, counters that are behind the answers are read


@dataclass
class Collected:
    """Answers so far, in the order in which they ended, and the server's counters before and after them."""

    answers: list[tuple[Prompt, Request]] = field(default_factory=list)
    before: Snapshot | None = None
    after: Snapshot | None = None


async def _answer(endpoint: Endpoint, prompt: Prompt, max_tokens: int) -> Request:
    notices = []
    stream = cast("AsyncGenerator[Event, None]", generate(endpoint, prompt.text, temperature=0.0, max_tokens=max_tokens))
    async with aclosing(stream) as events:
        async for event in events:
            if isinstance(event, Notice):
                notices.append(event.text)
            elif isinstance(event, Done):
                request = event.request
                request.settings["prompt"] = prompt.id
                why = request.error or " ".join(notices)
                if why or not request.steps:
                    raise LabError(f"Prompt '{prompt.id}' cannot be counted.", why=why or "No step of it was traced.")
                return request
    raise LabError(f"Prompt '{prompt.id}' cannot be counted.", why="Its answer never ended.")


async def collect(
    collected: Collected, endpoint: Endpoint, prompts: Sequence[Prompt], *, concurrency: int, max_tokens: int, say: Say, every: float = 10.0
) -> None:
    """Ask all `prompts`, greedily, `concurrency` at a time, into `collected`; `say` is told about every `every` seconds."""
    queue = deque(prompts)
    said = time.monotonic()
    if collected.before is None:
        collected.before = await scrape(endpoint)

    async def worker() -> None:
        nonlocal said
        while queue:
            prompt = queue.popleft()
            collected.answers.append((prompt, await _answer(endpoint, prompt, max_tokens)))
            if time.monotonic() - said >= every:
                said = time.monotonic()
                length = stats.count(step for _, request in collected.answers for step in request.steps).mean_acceptance_length
                so_far = f", mean acceptance length {length:.2f} so far" if length else ""
                say(f"{len(collected.answers)} answers, {len(queue)} prompts wait{so_far}")

    tasks = [asyncio.create_task(worker()) for _ in range(min(concurrency, len(prompts)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    collected.after = await _after(endpoint, collected)


async def _after(endpoint: Endpoint, collected: Collected) -> Snapshot:
    """The server's counters once they hold every draft of the answers, behind which they may lag; as they stand in the end otherwise."""
    assert collected.before is not None
    drafts = stats.count(step for _, request in collected.answers for step in request.steps).drafts
    after = await scrape(endpoint)
    for _ in range(LOOKS - 1):
        if after.drafts - collected.before.drafts >= drafts:
            break
        await asyncio.sleep(LAG)
        with contextlib.suppress(LabError):  # what was read stays read
            after = await scrape(endpoint)
    return after


def _length(counts: Sequence[stats.Counts]) -> dict[str, float] | None:
    """Pooled mean acceptance length with its interval over requests."""
    value = sum(counts, stats.Counts()).mean_acceptance_length
    if value is None:
        return None
    low, high = stats.interval(counts, lambda one: one.mean_acceptance_length) or (value, value)
    return {"value": value, "low": low, "high": high}


def _counted(counts: Sequence[stats.Counts]) -> dict[str, Any]:
    total = sum(counts, stats.Counts())
    return {
        "mean_acceptance_length": _length(counts),
        "acceptance_rate": total.acceptance_rate,
        "accepted_by_position": list(total.rate_at) if total.drafts else [],
        "histogram": list(total.histogram),
        "drafts": total.drafts,
        "draft_tokens": total.draft_tokens,
        "accepted": total.accepted,
    }


def group(requests: Sequence[Request]) -> dict[str, Any]:
    """Every count of some requests as plain data, with loops and without."""
    every = [stats.count(request.steps) for request in requests]
    fresh = [stats.count(stats.fresh(request.steps)) for request in requests]
    return {
        "prompts": len(requests),
        "prompt_tokens": sum(request.usage_prompt or 0 for request in requests),
        "tokens": sum(one.tokens for one in every),
        "ended_by_themselves": sum(request.finish == "stop" for request in requests),
        **_counted(every),
        "without_repeated_8grams": _counted(fresh),
    }


def _counters(collected: Collected) -> dict[str, Any] | None:
    """The server's own counters over the run beside the trace's, and whether they agree."""
    before, after = collected.before, collected.after
    if before is None or after is None:
        return None
    total = stats.count(step for _, request in collected.answers for step in request.steps)
    server = {
        "drafts": after.drafts - before.drafts,
        "draft_tokens": after.draft_tokens - before.draft_tokens,
        "accepted": after.accepted_tokens - before.accepted_tokens,
    }
    trace = {"drafts": total.drafts, "draft_tokens": total.draft_tokens, "accepted": total.accepted}
    return {"server": server, "trace": trace, "agree": server == trace}


def summarise(collected: Collected) -> dict[str, Any]:
    """The result as plain data: each kind, all kinds together, and each context length of the long prompts."""
    if not collected.answers:
        raise LabError("Nothing was measured.", why="The first answer had not ended.")
    kinds: dict[str, list[Request]] = {}
    contexts: dict[int, list[Request]] = {}
    for prompt, request in collected.answers:
        if prompt.context is None:
            kinds.setdefault(prompt.kind, []).append(request)
        else:
            contexts.setdefault(prompt.context, []).append(request)
    short = [request for requests in kinds.values() for request in requests]
    answers = [
        {
            "prompt": prompt.id,
            "kind": prompt.kind,
            "context": prompt.context,
            "prompt_tokens": request.usage_prompt,
            "tokens": request.usage_completion,
            "finish": request.finish,
            "mean_acceptance_length": stats.count(request.steps).mean_acceptance_length,
        }
        for prompt, request in sorted(collected.answers, key=lambda pair: pair[0].id)
    ]
    return {
        "overall": group(short) if short else None,
        "kinds": {kind: group(requests) for kind, requests in kinds.items()},
        "contexts": {str(length): group(requests) for length, requests in sorted(contexts.items())},
        "counters": _counters(collected),
        "answers": answers,
    }


def render(summary: dict[str, Any], label: str) -> str:
    """The result as text for a terminal."""

    def span(estimate: dict[str, float] | None, prompts: int) -> str:
        if estimate is None or prompts < 2:  # one prompt has no spread
            return f"{estimate['value']:.3f}" if estimate else "-"
        return f"{estimate['value']:.3f} [{estimate['low']:.2f}, {estimate['high']:.2f}]"

    rows = []
    named = [*summary["kinds"].items()]
    named += [("overall", summary["overall"])] if summary["overall"] and len(named) > 1 else []
    named += [(f"context {length}", one) for length, one in summary["contexts"].items()]
    for name, one in named:
        fresh = one["without_repeated_8grams"]
        rows.append(
            [
                name,
                str(one["prompts"]),
                str(one["tokens"]),
                span(one["mean_acceptance_length"], one["prompts"]),
                span(fresh["mean_acceptance_length"], one["prompts"]),
                f"{100 * (1 - fresh['drafts'] / one['drafts']):.0f}%" if one["drafts"] else "-",
                " ".join(f"{rate:.2f}" for rate in one["accepted_by_position"]),
            ]
        )
    header = ["prompts", "number", "tokens", "mean acceptance length", "without loops", "steps in loops", "accepted at position"]
    text = [
        f"{label}, greedy: mean acceptance length with the bonus token, 1 + accepted / drafts [95% bootstrap interval over prompts]",
        "",
        result.table(header, rows),
        "",
        "Without loops: without steps whose first token completes an 8-gram that stood earlier in the same answer.",
    ]
    counters = summary["counters"]
    if counters is None:
        text.append("Interrupted: the server's own counters were not compared.")
    elif counters["agree"]:
        text.append(f"The server's own counters agree exactly ({counters['server']['drafts']} drafts).")
    else:
        text.append(f"The server's own counters DIFFER: {counters['server']} against {counters['trace']} in the trace.")
    return "\n".join(text)
