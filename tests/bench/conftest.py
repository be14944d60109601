"""A small real HTTP server that speaks as much of vLLM's API as the client needs, at a speed and with faults that a test chooses."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from lab.serving.endpoint import Endpoint


@dataclass
class FakeEngine:
    """Answers every prompt with the same `ids`, `chunk` of them every `pause` seconds; `fault` changes what is sent."""

    ids: tuple[int, ...] = tuple(range(100, 124))
    chunk: int = 1
    pause: float = 0.002
    fault: str = ""
    seen: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    drafts: int = 0
    generated: int = 0
    #: Another fake, which must have begun as many answers as this one before this one ends an answer (or 20 seconds pass).
    beside: FakeEngine | None = None
    begun: int = 0
    #: When each request came and ended, seconds of `time.monotonic()`.
    spans: list[tuple[float, float]] = field(default_factory=list)

    async def chat(self, request: Request) -> Response:
        """The chat endpoint."""
        body = await request.json()
        self.seen.append(body)
        if self.fault == "refuse":
            return PlainTextResponse("no such model", status_code=404)
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[str]:
        came = time.monotonic()
        self.begun += 1
        number = self.begun
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        for start in range(0, len(self.ids), self.chunk):
            await asyncio.sleep(self.pause)
            self.drafts += 1
            if self.fault == "break" and start:
                self.in_flight -= 1
                return
            self.generated += len(self.ids[start : start + self.chunk])
            last = start + self.chunk >= len(self.ids)
            choice = {"index": 0, "delta": {"content": "x"}, "token_ids": self.ids[start : start + self.chunk]}
            yield f"data: {json.dumps({'choices': [choice | {'finish_reason': 'stop' if last else None}]})}\n\n"
        while self.beside is not None and self.beside.begun < number and time.monotonic() < came + 20:
            await asyncio.sleep(0.001)
        self.spans.append((came, time.monotonic()))
        count = len(self.ids) + (self.fault == "miscount")
        self.in_flight -= 1
        yield f"data: {json.dumps({'choices': [], 'usage': {'prompt_tokens': 5, 'completion_tokens': count}})}\n\n"
        yield "data: [DONE]\n\n"

    async def metrics(self, _request: Request) -> Response:
        """The Prometheus counters: each chunk is one draft with `chunk - 1` accepted tokens."""
        accepted = self.drafts * (self.chunk - 1)
        text = f"vllm:spec_decode_num_drafts_total {self.drafts}\nvllm:spec_decode_num_accepted_tokens_total {accepted}\n"
        text += f"vllm:generation_tokens_total {self.generated}\nvllm:num_requests_running {self.in_flight}\n"
        types = "# TYPE vllm:spec_decode_num_drafts counter\n# TYPE vllm:spec_decode_num_accepted_tokens counter\n"
        types += "# TYPE vllm:generation_tokens counter\n# TYPE vllm:num_requests_running gauge\n"
        return PlainTextResponse(types + text)


@pytest.fixture
def serve() -> Iterator[Callable[[FakeEngine], Endpoint]]:
    """Starts fakes on free ports and stops them at the end."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(engine: FakeEngine) -> Endpoint:
        routes = [Route("/v1/chat/completions", engine.chat, methods=["POST"]), Route("/metrics", engine.metrics)]
        server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_level="error"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        running.append((server, thread))
        deadline = time.monotonic() + 60
        while not server.started:
            assert time.monotonic() < deadline, "the fake did not start"
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        return Endpoint(f"http://127.0.0.1:{port}", "fake")

    yield start
    for server, _ in running:
        server.should_exit = True
    for _, thread in running:
        thread.join(10)


@pytest.fixture
def fake() -> type[FakeEngine]:
    """The class of the fake, for tests that need one of their own."""
    return FakeEngine
