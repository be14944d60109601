"""The engine as a room uses it: the same lanes, but its counters are read once a second, however many answers are under way."""

from __future__ import annotations

import time
from typing import Any, cast

from lab.serving.endpoint import Endpoint
from lab.serving.metrics import Snapshot
from lab.ui.engine import Engine

FRESH = 1.0


class _Quiet:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen: dict[str, tuple[float, Snapshot]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def scrape(self, endpoint: Endpoint) -> Snapshot:
        seen = self._seen.get(endpoint.url)
        if seen is None or time.monotonic() - seen[0] > FRESH:
            seen = self._seen[endpoint.url] = time.monotonic(), await self._engine.scrape(endpoint)
        return seen[1]


def quiet(engine: Engine) -> Engine:
    """`engine`, whose `scrape` gives the counters of at most a second ago."""
    return cast(Engine, _Quiet(engine))
