"""A cell's companion: steps of each request are counted, loops are left out, and what is missing is an error."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lab.bench.loops import Asked, measure
from lab.errors import LabError
from lab.serving.command import STEPS_PATH, TRACE_ARGUMENT
from lab.serving.endpoint import Endpoint
from lab.trace.model import Step

#: Eight tokens in two steps, then the same eight again in two: the second half goes round.
HALF = [(1, 2, 3, 4), (5, 6, 7, 8)]
FAULT = {"lost": False, "refuse": False}


def steps(trace: str) -> list[Step]:
    made = [Step(trace=trace, request="r", index=0, phase="prefill", started=0.0, ended=1.0, sampled=(9,), kept=1)]
    for index, sampled in enumerate([*HALF, *HALF, *HALF], start=1):
        draft = sampled[:3]
        made.append(
            Step(trace=trace, request="r", index=index, phase="decode", started=0.0, ended=1.0, draft=draft, sampled=sampled, kept=4)
        )
    return made


@pytest.fixture
def server() -> Iterator[Endpoint]:
    seen: list[dict[str, Any]] = []

    async def chat(request: Request) -> Response:
        body = await request.json()
        seen.append(body)
        if FAULT["refuse"]:
            return Response("too long", 400)
        usage = {"prompt_tokens": 5, "completion_tokens": 25}
        return JSONResponse({"choices": [{"finish_reason": "length"}], "usage": usage})

    async def stream(request: Request) -> Response:
        trace = request.query_params["trace"]

        async def send() -> AsyncIterator[bytes]:
            yield b": here\n\n"
            while not any(body["vllm_xargs"][TRACE_ARGUMENT] == trace for body in seen):
                await asyncio.sleep(0.005)
            for step in steps(trace)[: -1 if FAULT["lost"] else None]:
                yield b"event: step\ndata: " + msgspec.json.encode(step) + b"\n\n"
            yield b"event: end\ndata: {}\n\n"

        return StreamingResponse(send(), media_type="text/event-stream")

    FAULT.update(lost=False, refuse=False)
    routes = [Route("/v1/chat/completions", chat, methods=["POST"]), Route(STEPS_PATH, stream)]
    running = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_level="error"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not running.started and time.monotonic() < deadline:
        time.sleep(0.01)
    yield Endpoint(f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}", "m")
    running.should_exit = True
    thread.join(10)


def test_loops_are_left_out(server: Endpoint) -> None:
    found = asyncio.run(measure(server, [Asked("a", 25), Asked("b", 25), Asked("c", 25)], 2, ignore_eos=True))
    assert (found["prompts"], found["tokens"], found["drafts"], found["accepted"]) == (3, 75, 18, 54)
    fresh = found["without_repeated_8grams"]
    assert 0 < fresh["drafts"] < 18


@pytest.mark.parametrize(("fault", "words"), [("lost", "does not hold all"), ("refuse", "refused")])
def test_what_is_missing_is_an_error(server: Endpoint, fault: str, words: str) -> None:
    FAULT[fault] = True
    with pytest.raises(LabError, match=words):
        asyncio.run(measure(server, [Asked("a", 25)], 1, ignore_eos=True))
