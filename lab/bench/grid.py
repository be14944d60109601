"""Engine steps of every K and concurrency, in turns on two servers: what the cost model is fitted to, and what it is tested on.

Two traced lanes: the baseline, and a draft with the largest K, of which each request asks for as many tokens as its cell drafts
(`lab/vllm_plugin/asked.py`). So no engine is restarted between cells, and in every round each concurrency runs all K and the baseline in
turns on the same prompts (`pairs.turns`): a drift of the machine hits them alike. Prompts are asked greedily. After the grid, the prompts
are asked once more with drafts withheld, from which `lab.trace.whatif` has the tokens a step of every K.

A step counts where the whole batch decodes: as many requests as the cell's concurrency, all traced, each with the cell's K, and the step
before was of the same requests. Its time runs from the end of that step to its own end, so that what happens between steps is in it.

Limits: tracing is on in all lanes alike (about 0.1 ms a step). On a GPU, which holds one engine, the lanes come one after the other, and
steps of K below the server's may take other graphs than a server of that K would.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

import numpy as np

from lab.bench import pairs
from lab.bench.cost import Point
from lab.bench.prompts import Prompt
from lab.errors import LabError
from lab.serving.client import DEPTH_ARGUMENT, WITHHOLD_ARGUMENT, Done, Event, Notice, generate
from lab.serving.command import Lane
from lab.serving.endpoint import Endpoint
from lab.trace.model import Request, Step

Say = Callable[[str], None]
#: A lane's endpoint while the block runs.
Use = Callable[[Lane], AbstractAsyncContextManager[Endpoint]]


@dataclass(frozen=True)
class Cell:
    """One place of the grid: K (0: the baseline), requests in flight, and the context length of long prompts (None: short ones)."""

    k: int
    requests: int
    context: int | None = None

    @property
    def label(self) -> str:
        where = f"concurrency {self.requests}" if self.context is None else f"context {self.context}"
        return f"{'baseline' if not self.k else f'K={self.k}'}, {where}"


@dataclass(frozen=True)
class Plan:
    """What to measure. `long` prompts are asked one at a time, by the baseline, the smallest and the largest K."""

    baseline: Lane
    draft: Lane
    ks: tuple[int, ...]
    concurrencies: tuple[int, ...]
    prompts: tuple[Prompt, ...]
    long: tuple[Prompt, ...] = ()
    rounds: int = 3
    per_request: int = 2
    max_tokens: int = 64
    probes: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.ks or min(self.ks) < 1 or len(set(self.ks)) < len(self.ks) or max(self.ks) != self.draft.k:
            raise LabError("A cost model needs different K of 1 or more.", todo="Name them, for example -k 1 -k 2 -k 3.")
        if not self.concurrencies or min(self.concurrencies) < 1 or len(set(self.concurrencies)) < len(self.concurrencies):
            raise LabError("A cost model needs different concurrencies of 1 or more.", todo="Name them, for example --concurrency 1.")
        if min(self.rounds, self.per_request, self.max_tokens) < 1:
            raise LabError("Rounds, prompts and tokens must be at least 1.")
        if not self.prompts:
            raise ValueError("no prompts")

    def settings(self) -> list[tuple[int, int | None]]:
        """Every concurrency of short prompts, then every context length of long ones."""
        contexts = sorted({prompt.context for prompt in self.long if prompt.context is not None})
        return [(requests, None) for requests in self.concurrencies] + [(1, context) for context in contexts]

    def cells(self) -> list[Cell]:
        """The whole grid."""
        return [Cell(k, requests, context) for requests, context in self.settings() for k in self._ks(context)]

    def _ks(self, context: int | None) -> list[int]:
        return [0, *self.ks] if context is None else [0, *sorted({min(self.ks), max(self.ks)})]

    def schedule(self) -> list[tuple[int, Cell, tuple[Prompt, ...]]]:
        """`(round, cell, prompts)` in the order of measuring: in a round the cells of one setting follow each other on the same prompts."""
        deck = itertools.cycle(random.Random(self.seed).sample(self.prompts, len(self.prompts)))
        found = []
        for number, (requests, context) in itertools.product(range(self.rounds), self.settings()):
            if context is None:
                prompts = tuple(itertools.islice(deck, self.per_request * requests))
            else:
                those = [prompt for prompt in self.long if prompt.context == context]
                prompts = (those[number % len(those)],)
            ks = self._ks(context)
            order = pairs.turns(len(ks), self.rounds, self.seed + requests)[number]
            found += [(number, Cell(ks[place], requests, context), prompts) for place in order]
        return found


@dataclass(frozen=True)
class Taken:
    """One engine step: its time, tokens let out, mean context a request, and the parts that were timed (seconds, or None)."""

    seconds: float
    tokens: int
    requests: int
    context: float
    target: float | None
    accept: float | None
    draft: float | None
    #: Seconds of `seconds` before the step was scheduled: messages and the engine's loop.
    between: float


def engine_steps(requests: Sequence[Request], k: int, concurrency: int) -> list[Taken]:
    """The steps of one turn that count (see the module), in order."""
    by_start: dict[float, list[tuple[str, Step]]] = {}
    for request in requests:
        for step in request.steps:
            by_start.setdefault(step.started, []).append((step.request, step))
    found = []
    for before, now in pairwise(sorted(by_start)):
        last, group = by_start[before], by_start[now]
        steps = [step for _, step in group]
        first = steps[0]
        if {name for name, _ in last} != {name for name, _ in group} or not len(group) == first.batch_requests == concurrency:
            continue
        if any(step.phase != "decode" or not step.sampled or len(step.draft) != k or min(step.draft, default=0) < 0 for step in steps):
            continue
        if any(step.phase != "decode" for _, step in last):
            continue
        ended = max(step.ended for _, step in last)
        seconds = first.ended - ended
        if seconds <= 0:
            continue
        found.append(
            Taken(
                seconds,
                sum(step.kept for step in steps),
                len(steps),
                sum(step.context for step in steps) / len(steps),
                first.verify_s,
                first.accept_s,
                first.draft_s,
                max(now - ended, 0.0),
            )
        )
    return found


@dataclass
class Measured:
    """What was measured so far: the steps of each cell by round, and the answers whose drafts were withheld."""

    plan: Plan
    steps: dict[Cell, dict[int, list[Taken]]] = field(default_factory=dict)
    probes: list[Request] = field(default_factory=list)

    def taken(self, cell: Cell) -> list[Taken]:
        """The steps of a cell, all rounds together."""
        return [step for steps in self.steps.get(cell, {}).values() for step in steps]

    def point(self, cell: Cell) -> Point | None:
        """The cell's median step; None where nothing was measured."""
        steps = self.taken(cell)
        if not steps:
            return None

        def median(name: str) -> float | None:
            values = [getattr(step, name) for step in steps]
            return None if any(value is None for value in values) else float(np.median(values))

        context = sum(step.context for step in steps) / len(steps)
        seconds = median("seconds")
        assert seconds is not None
        parts = {name: median(name) for name in ("target", "accept", "draft")}
        return Point(cell.k, cell.requests, context, seconds, len(steps), **parts)


async def ask(endpoint: Endpoint, prompt: Prompt, max_tokens: int, asked: dict[str, int]) -> Request:
    """The traced greedy answer to `prompt`; raises `LabError` where it broke off or has no steps."""
    notices = []
    stream = cast("AsyncGenerator[Event, None]", generate(endpoint, prompt.text, temperature=0.0, max_tokens=max_tokens, asked=asked))
    async with aclosing(stream) as events:
        async for event in events:
            if isinstance(event, Notice):
                notices.append(event.text)
            elif isinstance(event, Done):
                request = event.request
                if request.error or notices or not request.steps:
                    raise LabError(
                        f"Prompt '{prompt.id}' cannot be measured.", why=request.error or " ".join(notices) or "It has no steps."
                    )
                return request
    raise LabError(f"Prompt '{prompt.id}' cannot be measured.", why="Its answer never ended.")


async def ask_all(endpoint: Endpoint, prompts: Sequence[Prompt], concurrency: int, max_tokens: int, asked: dict[str, int]) -> list[Request]:
    """The answers to all `prompts`, `concurrency` at a time."""
    queue, answers = deque(prompts), list[Request]()

    async def worker() -> None:
        while queue:
            answers.append(await ask(endpoint, queue.popleft(), max_tokens, asked))

    tasks = [asyncio.create_task(worker()) for _ in range(min(concurrency, len(prompts)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return answers


async def measure(measured: Measured, use: Use, say: Say, *, alternate: bool = True, rest: float = 0.25) -> None:
    """Fill `measured`; what is in it is good at any time. `alternate`: both engines at once, else one after the other."""
    plan = measured.plan
    work = plan.schedule()
    if alternate:
        async with use(plan.baseline) as baseline, use(plan.draft) as draft:
            await _turns(measured, {True: baseline, False: draft}, work, say, rest)
            await _withheld(measured, draft, say)
        return
    async with use(plan.baseline) as baseline:
        await _turns(measured, {True: baseline}, [one for one in work if not one[1].k], say, rest)
    async with use(plan.draft) as draft:
        await _turns(measured, {False: draft}, [one for one in work if one[1].k], say, rest)
        await _withheld(measured, draft, say)


async def _turns(
    measured: Measured, endpoints: dict[bool, Endpoint], work: Sequence[tuple[int, Cell, tuple[Prompt, ...]]], say: Say, rest: float
) -> None:
    plan = measured.plan
    warm = list(itertools.islice(itertools.cycle(plan.prompts), 2 * max(plan.concurrencies)))
    for endpoint in endpoints.values():
        await ask_all(endpoint, warm, max(plan.concurrencies), 32, {})
    for place, (number, cell, prompts) in enumerate(work, 1):
        await asyncio.sleep(rest)
        asked = {DEPTH_ARGUMENT: cell.k} if cell.k else {}
        answers = await ask_all(endpoints[not cell.k], prompts, cell.requests, plan.max_tokens, asked)
        steps = engine_steps(answers, cell.k, cell.requests)
        if steps:
            measured.steps.setdefault(cell, {})[number] = steps
        speed = f"{sum(s.tokens for s in steps) / sum(s.seconds for s in steps):.1f} tok/s" if steps else "no whole step"
        say(f"{place}/{len(work)}: {cell.label}, round {number + 1}: {len(steps)} steps, {speed}")


async def _withheld(measured: Measured, draft: Endpoint, say: Say) -> None:
    plan = measured.plan
    used = list(dict.fromkeys(prompt for _, cell, prompts in plan.schedule() if cell.context is None for prompt in prompts))
    used = used[: plan.probes]
    for prompt in used:  # one at a time: other batch shapes round differently
        measured.probes += await ask_all(draft, [prompt], 1, plan.max_tokens, {WITHHOLD_ARGUMENT: 1})
        say(f"Drafts withheld, to know what every K accepts: {len(measured.probes)} of {len(used)} answers")
