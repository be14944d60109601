"""A small engine for tests of the page: it decides nothing, but yields real `Step`s in the order and at the pace that it is told.

Its tokens are chosen to be nasty: markup, template syntax, an emoji split over byte-level tokens, bidirectional controls, white space and
special tokens. It is reachable from tests only.
"""

from __future__ import annotations

import asyncio
import codecs
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from lab.errors import LabError
from lab.recipes.model import Recipe
from lab.serving.client import Delta, Done, Event, StepEvent
from lab.serving.command import Lane
from lab.serving.endpoint import Endpoint, LaneStatus, Progress
from lab.serving.metrics import Snapshot
from lab.trace.model import Alternative, Request, Step

PIECES: dict[int, bytes] = {
    1: b"<script>alert(1)</script>",
    2: b"${alert(1)}",
    3: b"{{x}}",
    4: b"<img src=x onerror=alert(1)>",
    5: b" the",
    6: b" target",
    7: b"\n",
    8: b"\t",
    9: "🦅".encode()[:2],
    10: "🦅".encode()[2:],
    11: "\u202eevil".encode(),
    12: "\u2066x\u2069".encode(),
    13: b" ",
    14: "·".encode(),
    15: " שלום".encode(),
    16: b"\\u003c`+alert(3)+`",
    17: b"<|im_end|>",
    18: b"{{constructor}}",
    19: b" draft",
    20: b" accepts",
    21: b"'\"--></style></script><svg onload=alert(4)>",
    22: b" tokens",
}
#: The answer, which baseline and draft lane give alike.
ANSWER = [5, 6, 20, 22, 1, 2, 3, 7, 4, 5, 19, 9, 10, 13, 14, 11, 6, 12, 15, 8, 16, 18, 5, 22, 21, 5, 6, 5, 19, 20] * 2
END = 17


def steps_of(
    trace: str, answer: list[int], *, k: int, begin: float, pace: float, limit: int, probs: bool = True, weak: bool = False
) -> list[Step]:
    """Steps that write `answer` with drafts of `k` tokens (0: no draft), accepting 0, 1, ... k in turn; `weak`: none in every fourth."""
    answer = answer[:limit]
    steps = [
        Step(
            trace=trace,
            request="r",
            index=0,
            phase="prefill",
            started=begin,
            ended=begin + pace,
            sampled=(answer[0],),
            kept=1,
            scheduled=9,
            batch_tokens=9,
        )
    ]
    done, turn = 1, 0
    while done < len(answer):
        index, start = len(steps), begin + len(steps) * pace
        draft: tuple[int, ...] = ()
        if k:
            good = 0 if weak and turn % 4 == 1 else (turn * 2) % (k + 1)
            ahead = [*answer[done:], *([END] * (k + 1))]
            draft = tuple(ahead[place] if place < good else 22 if ahead[place] != 22 else 5 for place in range(k))
            sampled = tuple(ahead[: good + 1])
        else:
            sampled = (answer[done],)
        kept = min(len(sampled), len(answer) - done)
        done += kept
        turn += 1
        steps.append(
            Step(
                trace=trace,
                request="r",
                index=index,
                phase="decode",
                started=start,
                ended=start + pace,
                draft=draft,
                draft_probs=tuple(0.9 - 0.2 * place for place in range(len(draft))) if draft and probs else None,
                sampled=sampled,
                kept=kept,
                context=9 + done,
                scheduled=1 + len(draft),
                batch_tokens=1 + len(draft),
                finish="length" if done == len(answer) else None,
            )
        )
    return steps


@dataclass
class FakeEngine:
    """Lanes that are ready after `start` seconds and take a step every `pace` seconds."""

    recipe: Recipe
    start: float = 0.0
    pace: float = 0.01
    probs: bool = True
    #: The draft lane's answer, where it shall differ from the baseline's.
    other: list[int] | None = None
    #: Fail the next start, or the next answer after so many steps.
    fail_start: bool = False
    fail_after: int | None = None
    #: Lanes whose key has this in it end as vLLM ends at the barrier; lanes that are stopped are listed.
    refuses: str = "-before/"
    stopped: list[str] = field(default_factory=list)
    #: Seconds that stopping a lane takes.
    stopping: float = 0.0
    #: Lanes whose key has this in it have a weak draft.
    weak: str = "-"
    #: How many lanes fit into memory at once.
    together: int = 8
    requests: list[Request] = field(default_factory=list)
    closed: int = 0
    ready: set[str] = field(default_factory=set)
    written: dict[str, int] = field(default_factory=dict)
    lanes: dict[str, Lane] = field(default_factory=dict)

    async def endpoint(self, lane: Lane, *, on_progress: Callable[[Progress], None] | None = None) -> Endpoint:
        self.lanes[lane.key] = lane
        if lane.key not in self.ready:
            began = time.monotonic()
            while (elapsed := time.monotonic() - began) < self.start:
                if on_progress:
                    on_progress(Progress("starting", f"loading weights <b>{elapsed:.1f}</b>", elapsed))
                await asyncio.sleep(0.05)
            if self.fail_start:
                self.fail_start = False
                raise LabError(
                    f"The engine for {lane.label} did not start.",
                    why="last line of the log\n<script>alert(9)</script>",
                    todo="Press Restart.",
                )
            if self.refuses in lane.key:
                raise LabError(
                    f"The engine for {lane.label} did not start.",
                    why="ValueError: No common block size for 16 (CPU_MLA: [16]; CPU_ATTN: [MultipleOf(32)]).\n"
                    "The last lines of its log:\n<img src=x onerror=alert(1)>\n",
                    todo="The whole log is here.",
                )
            self.ready.add(lane.key)
        return Endpoint(f"http://127.0.0.1:1/{lane.key}", lane.recipe.name, lane)

    async def restart(self, lane: Lane, *, on_progress: Callable[[Progress], None] | None = None) -> Endpoint:
        self.ready.discard(lane.key)
        return await self.endpoint(lane, on_progress=on_progress)

    async def stop(self, lane: Lane) -> None:
        await asyncio.sleep(self.stopping)
        self.stopped.append(lane.key)
        self.ready.discard(lane.key)

    @asynccontextmanager
    async def use(self, lane: Lane, *, on_progress: Callable[[Progress], None] | None = None) -> AsyncIterator[Endpoint]:
        yield await self.endpoint(lane, on_progress=on_progress)

    async def generate(
        self, endpoint: Endpoint, prompt: str, *, temperature: float = 0.0, max_tokens: int = 128, alternatives: int = 0
    ) -> AsyncIterator[Event]:
        lane = endpoint.lane
        assert lane is not None
        answer = self.other if self.other is not None and lane.draft != "none" else ANSWER
        request = Request(
            trace=f"t{len(self.requests)}", lane=lane.key, prompt=prompt, settings={"temperature": temperature, "max_tokens": max_tokens}
        )
        self.requests.append(request)
        began = time.monotonic()
        steps = steps_of(
            request.trace,
            answer,
            k=lane.k,
            begin=time.time(),
            pace=self.pace,
            limit=max_tokens,
            probs=self.probs,
            weak=self.weak in lane.key,
        )
        seen: set[int] = set()
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        ended = False
        try:
            for number, step in enumerate(steps):
                await asyncio.sleep(self.pace)
                if self.fail_after is not None and number >= self.fail_after:
                    self.fail_after = None
                    self.ready.discard(lane.key)
                    request.error = "the engine process ended with exit code -9"
                    break
                ids = step.sampled[: step.kept]
                request.ttft = request.ttft or time.monotonic() - began
                self.written[endpoint.url] = self.written.get(endpoint.url, 0) + len(ids)
                if lane.traced:
                    pieces = {token: PIECES[token].hex() for token in (*step.draft, *step.sampled) if token not in seen}
                    seen.update(pieces)
                    request.pieces.update(pieces)
                    request.steps.append(step)
                    yield StepEvent(step, pieces)
                text = decoder.decode(b"".join(PIECES[token] for token in ids))
                request.text += text
                yield Delta(text, tuple(ids))
            request.elapsed = time.monotonic() - began
            request.usage_completion = sum(step.kept for step in request.steps) if lane.traced else min(len(answer), max_tokens)
            request.finish = "length"
            if alternatives:
                request.alternatives = [
                    [
                        Alternative(text=PIECES[token].decode("utf-8", "replace"), logprob=-0.1),
                        Alternative(text="<b>other</b>", logprob=-2.5),
                    ]
                    for token in answer[:max_tokens]
                ]
            ended = True
            yield Done(request)
        finally:
            self.closed += not ended

    async def scrape(self, endpoint: Endpoint) -> Snapshot:
        return Snapshot(time=time.time(), generation_tokens=self.written.get(endpoint.url, 0))

    def fit_together(self, lanes: Sequence[Lane]) -> bool:
        return len(lanes) <= self.together

    def status(self) -> list[LaneStatus]:
        return [LaneStatus(self.lanes[key], "ready", Progress("ready", "", 0.0)) for key in self.ready]
