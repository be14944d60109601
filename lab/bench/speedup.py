"""Speed of lanes beside each other: the same greedy prompts on every lane in turn, and the ratios with their spread.

All lanes run at once, but only one is busy at a time, so that they share the machine's cores without disturbing each other. Lanes take
turns as `pairs.turns` says; before each turn the machine rests for a moment, because idle OpenMP threads keep spinning for a while. The
baseline is vLLM without the plugin; drafts run untraced too, unless the cost of tracing is what is measured. Every lane answers the same
prompts greedily, so the token ids should be the same on all; how many are is part of the result, since a speed-up with other tokens
would be a ratio of different work. They need not all be: where two tokens have equal or neighbouring BF16 logits, a step of K+1 rows may
round the other way than a step of one, just as a batch of four requests does in a server without any draft.

Limits: one client beside the engine on the same cores is part of what is measured, on every lane alike. Prefill is inside the time.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from lab.bench import pairs, result
from lab.bench.load import Answer, Client, Round
from lab.bench.prompts import Prompt
from lab.errors import LabError
from lab.serving.command import Lane
from lab.serving.endpoint import Endpoint
from lab.serving.metrics import Snapshot, scrape
from lab.trace.align import first_difference

#: Seconds of rest before each turn.
REST = 0.25
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What to measure: `pairs` turns of every lane, each of `per_turn` prompts, `concurrency` at a time."""

    lanes: tuple[Lane, ...]
    prompts: tuple[Prompt, ...]
    pairs: int = 20
    concurrency: int = 1
    per_turn: int = 1
    max_tokens: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.lanes) < 2 or len({lane.key for lane in self.lanes}) < len(self.lanes):
            raise LabError("A comparison needs at least two different lanes.", todo="Name drafts with --draft, for example --draft bf16.")
        if len({lane.compiled for lane in self.lanes}) > 1:
            raise LabError(
                "Eager and compiled lanes are not compared with each other.",
                why="Eager mode has a fixed cost a step that speculation saves, so a ratio across modes would flatter it.",
            )
        if min(self.pairs, self.concurrency, self.per_turn, self.max_tokens) < 1 or self.per_turn < self.concurrency:
            raise LabError(
                "Pairs, concurrency and tokens must be at least 1, and a turn needs at least as many prompts as its concurrency.",
            )
        if not self.prompts:
            raise ValueError("no prompts")

    def schedule(self) -> list[tuple[tuple[int, ...], tuple[Prompt, ...]]]:
        """For each pair the order of the lanes and the prompts that each of them answers; prompts are shuffled once, then used in order."""
        deck = random.Random(self.seed).sample(self.prompts, len(self.prompts))
        supply = itertools.cycle(deck)
        orders = pairs.turns(len(self.lanes), self.pairs, self.seed)
        return [(order, tuple(itertools.islice(supply, self.per_turn))) for order in orders]


@dataclass
class Measured:
    """What was measured so far: `rounds[pair][lane]`, whole pairs only, and each lane's counters before and after."""

    plan: Plan
    rounds: list[tuple[Round, ...]] = field(default_factory=list)
    before: list[Snapshot] = field(default_factory=list)
    after: list[Snapshot] = field(default_factory=list)


async def measure(measured: Measured, endpoints: Sequence[Endpoint], say: Say, *, rest: float = REST) -> None:
    """Warm every lane up, then fill `measured`; if this is cancelled, what is in it is still good."""
    plan = measured.plan
    schedule = plan.schedule()
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(Client(endpoint, max_tokens=plan.max_tokens)) for endpoint in endpoints]
        for lane, client in zip(plan.lanes, clients, strict=True):
            say(f"Warming up: {_label(lane)}")
            warm = list(itertools.islice(itertools.cycle(schedule[-1][1]), 2 * plan.concurrency))
            await client.round(warm, plan.concurrency)
        measured.before = [await scrape(endpoint) for endpoint in endpoints]
        for number, (order, prompts) in enumerate(schedule, 1):
            turn: dict[int, Round] = {}
            for lane_index in order:
                await asyncio.sleep(rest)
                turn[lane_index] = await clients[lane_index].round(prompts, plan.concurrency)
            measured.rounds.append(tuple(turn[index] for index in range(len(plan.lanes))))
            measured.after = [await scrape(endpoint) for endpoint in endpoints]
            speeds = [one.tokens / one.seconds for one in measured.rounds[-1]]
            ratios = ", ".join(f"{speed / speeds[0]:.2f}x" for speed in speeds[1:])
            say(f"Pair {number}/{plan.pairs}: {' / '.join(f'{speed:.1f}' for speed in speeds)} tok/s ({ratios})")


def _identity(rounds: Sequence[tuple[Round, ...]], one: int, base: int) -> dict[str, Any]:
    """How many answers of two lanes are the same token ids, and where the others part."""
    same, answers, differences = 0, 0, []
    for turn in rounds:
        other = {answer.prompt: answer.ids for answer in turn[base].answers}
        for answer in turn[one].answers:
            answers += 1
            where = first_difference(answer.ids, other[answer.prompt])
            same += where is None
            if where is not None:
                differences.append({"prompt": answer.prompt, "position": where})
    return {"answers": answers, "identical": same, "differences": differences}


def _answer(answer: Answer) -> dict[str, Any]:
    return {
        "prompt": answer.prompt,
        "tokens": len(answer.ids),
        "seconds": answer.seconds,
        "ttft": answer.ttft,
        "finish": answer.finish,
    }


def _label(lane: Lane) -> str:
    return f"{lane.label}, traced" if lane.traced else lane.label


def _lane(measured: Measured, index: int) -> dict[str, Any]:
    lane = measured.plan.lanes[index]
    turns = [turn[index] for turn in measured.rounds]
    before, after = measured.before[index], measured.after[index]
    drafts = after.drafts - before.drafts
    return {
        "key": lane.key,
        "label": _label(lane),
        "draft": lane.draft,
        "k": lane.k,
        "tokens_per_second": asdict(pairs.rate([one.tokens for one in turns], [one.seconds for one in turns])),
        "tokens_per_second_with_tail": sum(one.all_tokens for one in turns) / sum(one.all_seconds for one in turns),
        "median_ttft_s": float(np.median([answer.ttft for one in turns for answer in one.answers])),
        "mean_acceptance_length": 1 + (after.accepted_tokens - before.accepted_tokens) / drafts if drafts else None,
        "turns": [{"tokens": one.tokens, "seconds": one.seconds, "answers": [_answer(answer) for answer in one.answers]} for one in turns],
    }


def summarise(measured: Measured) -> dict[str, Any]:
    """Every number of the result as plain data: lanes, and for every two lanes the later over the earlier."""
    plan = measured.plan
    if not measured.rounds:
        raise LabError("Nothing was measured.", why="The first pair had not ended.")
    ratios = []
    for base, one in itertools.combinations(range(len(plan.lanes)), 2):
        found = pairs.ratio(
            [turn[one].tokens for turn in measured.rounds],
            [turn[one].seconds for turn in measured.rounds],
            [turn[base].tokens for turn in measured.rounds],
            [turn[base].seconds for turn in measured.rounds],
        )
        identity = _identity(measured.rounds, one, base)
        ratios.append({"lane": plan.lanes[one].key, "over": plan.lanes[base].key, **asdict(found), "token_ids": identity})
    return {
        "mode": "compiled" if plan.lanes[0].compiled else "eager",
        "concurrency": plan.concurrency,
        "max_tokens": plan.max_tokens,
        "pairs_planned": plan.pairs,
        "pairs": len(measured.rounds),
        "prompts_per_turn": plan.per_turn,
        "lanes": [_lane(measured, index) for index in range(len(plan.lanes))],
        "ratios": ratios,
    }


def render(summary: dict[str, Any], cores: int) -> str:
    """The result as text for a terminal."""

    def span(estimate: dict[str, float], digits: int) -> str:
        return f"{estimate['value']:.{digits}f} [{estimate['low']:.{digits}f}, {estimate['high']:.{digits}f}]"

    lanes = {lane["key"]: lane["label"] for lane in summary["lanes"]}
    rows = []
    for lane in summary["lanes"]:
        length = lane["mean_acceptance_length"]
        rows.append(
            [
                lane["label"],
                span(lane["tokens_per_second"], 1),
                f"{lane['median_ttft_s'] * 1000:.0f}",
                f"{length:.2f}" if length else "-",
            ]
        )
    text = [
        f"{summary['pairs']} pairs, {summary['mode']}, concurrency {summary['concurrency']}, greedy, "
        f"up to {summary['max_tokens']} new tokens, {cores} cores; [95% bootstrap interval over pairs]",
        "",
        result.table(["lane", "output tok/s", "median TTFT, ms", "mean acceptance length (with bonus)"], rows),
        "",
    ]
    rows = []
    for one in summary["ratios"]:
        ids = one["token_ids"]
        rows.append(
            [
                f"{lanes[one['lane']]} over {lanes[one['over']]}",
                span(one["pooled"], 3),
                span(one["median"], 3),
                span(one["mean"], 3),
                f"{one['least']:.2f} to {one['most']:.2f}",
                f"{ids['identical']} of {ids['answers']}",
            ]
        )
    header = ["speed-up", "total tokens / time", "median of pairs", "mean of pairs", "single pairs", "identical token ids"]
    text.append(result.table(header, rows))
    for one in summary["ratios"]:
        if parted := one["token_ids"]["differences"]:
            places = ", ".join(f"{each['prompt']} at token {each['position']}" for each in parted[:4])
            more = f" and {len(parted) - 4} more" if len(parted) > 4 else ""
            text += ["", f"{lanes[one['lane']]} parts from {lanes[one['over']]} in {places}{more}."]
    if summary["pairs"] < summary["pairs_planned"]:
        spread = "" if summary["pairs"] > 1 else " One pair has no spread: the intervals mean nothing."
        text += ["", f"Stopped after {summary['pairs']} of {summary['pairs_planned']} pairs.{spread}"]
    return "\n".join(text)
