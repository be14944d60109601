"""The small engine of the page's tests, whose every token reads like the prompt that it answers: a trace in the wrong place is seen."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from lab.serving.client import Done, Event, StepEvent
from lab.serving.endpoint import Endpoint

from ..fakes import FakeEngine


class Echo(FakeEngine):
    async def generate(self, endpoint: Endpoint, prompt: str, **settings: Any) -> AsyncIterator[Event]:
        piece = prompt.encode().hex()
        async for event in super().generate(endpoint, prompt, **settings):
            if isinstance(event, StepEvent):
                yield StepEvent(event.step, dict.fromkeys(event.pieces, piece))
                continue
            if isinstance(event, Done):
                event.request.pieces = dict.fromkeys(event.request.pieces, piece)
            yield event
