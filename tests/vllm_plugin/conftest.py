"""One real vLLM server with the plugin, set up to be awkward: prompts are computed in chunks, and the KV cache is too small for all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import msgspec
import pytest

from lab.env import assets
from lab.trace.model import Step

KEY = "sesame"


@dataclass
class Trace:
    """What one step stream said."""

    prompts: dict[str, list[int]] = field(default_factory=dict)
    pieces: dict[int, bytes] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    ends: dict[str, str] = field(default_factory=dict)
    dropped: int = 0
    #: Ids that a step used before their bytes were told.
    early: set[int] = field(default_factory=set)

    def take(self, name: str, data: Any) -> None:
        if name == "prompt":
            self.prompts[data["request"]] = data["ids"]
        elif name == "pieces":
            self.pieces.update((int(token), bytes.fromhex(value)) for token, value in data.items())
        elif name == "step":
            step = msgspec.convert(data, Step)
            self.early |= {*step.draft, *step.sampled} - self.pieces.keys() - {-1}
            self.steps.append(step)
        elif name == "dropped":
            self.dropped += data["dropped"]
        elif name == "end":
            self.ends[data["request"]] = data["finish"]
        else:
            raise AssertionError(f"unknown event {name}")

    def output(self, request: str) -> list[int]:
        return [token for step in self.steps if step.request == request for token in step.sampled[: step.kept]]


class Client:
    """A test's view of the server."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model
        self.headers = {"Authorization": f"Bearer {KEY}"}

    @asynccontextmanager
    async def http(self, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self.url, timeout=900, verify=False, limits=limits, **{"headers": self.headers, **options}
        ) as client:
            yield client

    def body(self, prompt: str | list[int], trace: str | None, **settings: Any) -> dict[str, Any]:
        """A completion request."""
        body = {"model": self.model, "prompt": prompt, "temperature": 0, "return_token_ids": True, **settings}
        return body if trace is None else {**body, "vllm_xargs": {"eagle3_trace": trace}}

    async def steps(self, http: httpx.AsyncClient, trace: str) -> Trace:
        """Follow a trace to its end."""
        found, name = Trace(), ""
        async with http.stream("GET", "/v1/eagle3/steps", params={"trace": trace}) as response:
            assert response.status_code == 200, await response.aread()
            assert response.headers["content-type"].startswith("text/event-stream")
            async for line in response.aiter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    found.take(name, json.loads(line.removeprefix("data: ")))
        return found

    async def traced(self, http: httpx.AsyncClient, prompt: str | list[int], trace: str, **settings: Any) -> tuple[Trace, dict[str, Any]]:
        """Run a completion and follow its trace at the same time."""
        following = asyncio.create_task(self.steps(http, trace))
        response = await http.post("/v1/completions", json=self.body(prompt, trace, **settings))
        assert response.status_code == 200, response.text
        return await asyncio.wait_for(following, 300), response.json()


@pytest.fixture(scope="session")
def client() -> Iterator[Client]:
    """A server of the default recipe with K = 3, its KV cache cut to some 1,400 tokens, prefill to chunks of 160 tokens."""
    pytest.importorskip("vllm")
    from lab import checkpoints
    from lab.recipes import cpu
    from lab.recipes.smollm2 import DRAFT, smollm2
    from lab.serving.command import Lane, command
    from lab.serving.process import Server, free_port, launcher, trace_socket

    lane = Lane(smollm2(), draft="bf16", k=3)
    draft = assets() / DRAFT.path
    if not draft.is_dir():
        pytest.skip(f"{draft} is not there: the trained draft is what this test drives")
    port = free_port()
    made = command(
        lane,
        target=checkpoints.ensure(lane.recipe.target),
        draft=str(draft),
        port=port,
        launcher=launcher(),
        trace_socket=trace_socket(port),
    )
    room = str(33_000_000 * (2 if cpu.dtype() == "float32" else 1))  # as many tokens in either type
    awkward = ["--max-model-len", "1024", "--kv-cache-memory-bytes", room, "--max-num-batched-tokens", "160", "--max-num-seqs", "12"]
    made = replace(made, argv=(*made.argv, *awkward), environment={**made.environment, "VLLM_API_KEY": KEY})
    with Server(made, port=port, name="test-plugin", model=lane.recipe.name) as server:
        yield Client(server.url, lane.recipe.name)
