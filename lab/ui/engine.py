"""What the page needs of the serving layer, and the real one: the app's lanes, the client and the metrics reader behind one name."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import replace
from typing import Protocol, cast

import httpx

from lab.serving import client, metrics
from lab.serving.client import Event
from lab.serving.command import Lane
from lab.serving.endpoint import Endpoint, LaneStatus, Progress
from lab.serving.lanes import Lanes
from lab.serving.metrics import Snapshot

Told = Callable[[Progress], None]


class Engine(Protocol):
    """The page's view of serving; `Serving` documents each part."""

    async def endpoint(self, lane: Lane, *, on_progress: Told | None = None) -> Endpoint: ...

    async def restart(self, lane: Lane, *, on_progress: Told | None = None) -> Endpoint: ...

    async def stop(self, lane: Lane) -> None: ...

    def use(self, lane: Lane, *, on_progress: Told | None = None) -> AbstractAsyncContextManager[Endpoint]: ...

    def generate(
        self, endpoint: Endpoint, prompt: str, *, temperature: float = 0.0, max_tokens: int = 128, alternatives: int = 0
    ) -> AsyncIterator[Event]: ...

    async def scrape(self, endpoint: Endpoint) -> Snapshot: ...

    def status(self) -> list[LaneStatus]: ...

    def fit_together(self, lanes: Sequence[Lane]) -> bool: ...


class Serving:
    """The engine of one app: `lanes` are started on demand and kept from being taken away while they answer."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._http: dict[str, httpx.AsyncClient] = {}

    async def endpoint(self, lane: Lane, *, on_progress: Told | None = None) -> Endpoint:
        """The lane's server, started first if need be."""
        return await self._lanes.endpoint(lane, on_progress=on_progress)

    async def restart(self, lane: Lane, *, on_progress: Told | None = None) -> Endpoint:
        """Start the lane anew, however it ended."""
        return await self._lanes.restart(lane, on_progress=on_progress)

    async def stop(self, lane: Lane) -> None:
        """Stop the lane, or call its start off: for what was started to be looked at only."""
        await self._lanes.stop(lane)

    def use(self, lane: Lane, *, on_progress: Told | None = None) -> AbstractAsyncContextManager[Endpoint]:
        """The lane's server for a block, during which it is not taken away: for load that others send."""
        return self._lanes.use(lane, on_progress=on_progress)

    async def generate(
        self, endpoint: Endpoint, prompt: str, *, temperature: float = 0.0, max_tokens: int = 128, alternatives: int = 0
    ) -> AsyncIterator[Event]:
        """One prompt's events; the lane stays while they are read. Closing the iterator aborts the request."""
        async with AsyncExitStack() as stack:
            if endpoint.lane is not None:
                held = await stack.enter_async_context(self._lanes.use(endpoint.lane))
                if endpoint.lane.at is None:  # it may have been stopped since it was asked for, and be somewhere else now
                    endpoint = replace(held, measured=endpoint.measured)
            events = client.generate(endpoint, prompt, temperature=temperature, max_tokens=max_tokens, alternatives=alternatives)
            async for event in await stack.enter_async_context(aclosing(cast(AsyncGenerator[Event, None], events))):
                yield event

    async def scrape(self, endpoint: Endpoint) -> Snapshot:
        """The server's own counters now. One connection pool a server is kept: making a client costs more than three readings."""
        if endpoint.url not in self._http:
            self._http[endpoint.url] = endpoint.client(5.0)
        return await metrics.scrape(endpoint, client=self._http[endpoint.url])

    def status(self) -> list[LaneStatus]:
        """Every lane that was asked for."""
        return self._lanes.status()

    def fit_together(self, lanes: Sequence[Lane]) -> bool:
        """Whether these lanes can be warm at once."""
        return self._lanes.fit_together(lanes)
