"""Asynchronous helpers of the page, without gradio: events in batches at a steady pace, and a meter on a server's counters.

Both end what they started when they are closed or cancelled: a stopped run leaves no task behind, and closing the source of `paced` is what
aborts the request on the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import zip_longest
from types import TracebackType
from typing import TypeVar

from lab.errors import LabError
from lab.serving.metrics import Snapshot
from lab.trace.stats import Counts

T = TypeVar("T")


async def paced(source: AsyncIterator[T], period: float) -> AsyncIterator[list[T]]:
    """Batches of what `source` gave within each `period` (seconds), empty where it gave nothing; errors pass after the last batch."""
    batch: list[T] = []

    async def pump() -> None:
        async for item in source:
            batch.append(item)

    task = asyncio.create_task(pump())
    try:
        while True:
            await asyncio.wait({task}, timeout=period)
            ready, batch[:] = list(batch), []
            if task.done():
                if ready:
                    yield ready
                break
            yield ready
        await task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
        closing = getattr(source, "aclose", None)
        if closing is not None:
            await closing()


class Meter:
    """Output tokens per second of one server, from its own counters, while the `async with` block runs.

    A point is the rate over the last `window` seconds (less at the beginning). `trouble` says why points are missing.
    """

    def __init__(self, scrape: Callable[[], Awaitable[Snapshot]], *, period: float = 0.4, window: float = 1.0) -> None:
        self.points: list[tuple[float, float]] = []
        self.trouble: LabError | None = None
        #: The most requests that were in the server's batch at once.
        self.busiest = 0
        self._scrape, self._period, self._window = scrape, period, window
        self._seen: list[Snapshot] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Meter:
        await self._look()
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        if kind is None and not self.points:
            await self._look()  # an answer shorter than a period still gets its point

    async def counts(self) -> Counts | None:
        """What the server's counters gained since the block was entered, read once more; None where they cannot be read."""
        if not self._seen:
            return None
        first = self._seen[0]
        try:
            now = await self._scrape()
        except LabError as error:
            self.trouble = error
            return None
        if now.generation_tokens < first.generation_tokens or now.drafts < first.drafts:
            return None  # it was restarted meanwhile
        at = tuple(count - before for count, before in zip_longest(now.accepted_per_pos, first.accepted_per_pos, fillvalue=0))
        drafts = now.drafts - first.drafts
        return Counts(
            drafts=drafts,
            draft_tokens=now.draft_tokens - first.draft_tokens,
            accepted=now.accepted_tokens - first.accepted_tokens,
            accepted_at=at,
            drafted_at=(drafts,) * len(at),
            tokens=now.generation_tokens - first.generation_tokens,
        )

    async def _watch(self) -> None:
        due = time.monotonic()
        while True:
            due = max(due + self._period, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            await self._look()

    async def _look(self) -> None:
        try:
            now = await self._scrape()
        except LabError as error:
            self.trouble = error
            return
        if self.points and not now.running and now.generation_tokens == self._seen[-1].generation_tokens:
            return  # the answer is over: an idle server's rate says nothing about it
        self._seen.append(now)
        self.busiest = max(self.busiest, now.running)
        first = self._seen[0]
        then = next((old for old in reversed(self._seen[:-1]) if now.time - old.time >= self._window - 0.01), first)
        if now.time > then.time:
            rate = (now.generation_tokens - then.generation_tokens) / (now.time - then.time)
            self.points.append((round(now.time - first.time, 3), round(rate, 2)))
