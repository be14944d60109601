"""A lean client for measuring: prompts through one server's OpenAI chat endpoint, timed here, counted in token ids.

On a machine where client and engine share the cores, a heavy client would slow down what it measures, and the lane with more chunks more.
So this one reads the stream by itself and asks vLLM for the token ids in it (`return_token_ids`); under speculation one chunk carries
several tokens, which is why chunks are never counted. The totals are checked against the server's usage record.

At concurrency N a round keeps N requests in flight from a queue of prompts. Its rate is taken while the queue is full: from the start to
the moment when fewer than N requests are left (for N = 1 that is the whole round), tokens of unfinished answers included.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from lab.bench.prompts import Prompt
from lab.errors import LabError
from lab.serving.command import STEPS_PATH, TRACE_ARGUMENT
from lab.serving.endpoint import Endpoint
from lab.serving.sse import events

#: Seconds without any byte from the server before a request is given up.
SILENCE = 300.0


@dataclass(frozen=True)
class Answer:
    """One answer. Times are seconds of `time.perf_counter()`."""

    prompt: str
    ids: tuple[int, ...]
    prompt_tokens: int
    finish: str | None
    sent: float
    ended: float
    #: When tokens arrived, and how many.
    arrivals: tuple[tuple[float, int], ...]

    @property
    def seconds(self) -> float:
        """From sending the request to the end of its stream."""
        return self.ended - self.sent

    @property
    def ttft(self) -> float:
        """Seconds until the first token arrived."""
        return self.arrivals[0][0] - self.sent


@dataclass(frozen=True)
class Round:
    """One turn of one lane: tokens and seconds while the queue was full, then for the whole round."""

    answers: tuple[Answer, ...]
    tokens: int
    seconds: float
    all_tokens: int
    all_seconds: float


def full_queue(answers: Sequence[Answer], concurrency: int) -> Round:
    """What a round made while `concurrency` requests were in flight: up to the end of the first answer that nothing could follow."""
    start = min(answer.sent for answer in answers)
    ends = sorted(answer.ended for answer in answers)
    until = ends[max(len(answers) - concurrency, 0)]
    tokens = sum(count for answer in answers for at, count in answer.arrivals if at <= until)
    return Round(tuple(answers), tokens, until - start, sum(len(answer.ids) for answer in answers), ends[-1] - start)


class Client:
    """Asks one endpoint; an async context manager that keeps its connections open between requests."""

    def __init__(self, endpoint: Endpoint, *, max_tokens: int) -> None:
        self.endpoint = endpoint
        self.max_tokens = max_tokens
        timeout, limits = httpx.Timeout(SILENCE, connect=10.0), httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(base_url=endpoint.url, headers=endpoint.headers(), timeout=timeout, limits=limits, trust_env=False)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def ask(self, prompt: Prompt) -> Answer:
        """One greedy answer, the end-of-sequence token respected; on a traced lane its steps are read too.

        Raises `LabError` when the server refuses, breaks off or miscounts.
        """
        body: dict[str, Any] = {
            "model": self.endpoint.model,
            "messages": [{"role": "user", "content": prompt.text}],
            "temperature": 0.0,
            "max_tokens": self.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if self.endpoint.lane is not None and self.endpoint.lane.traced:
            trace = uuid.uuid4().hex
            body["vllm_xargs"] = {TRACE_ARGUMENT: trace}
            async with self._following(trace):
                return await self._answer(prompt, body)
        return await self._answer(prompt, body)

    @asynccontextmanager
    async def _following(self, trace: str) -> AsyncIterator[None]:
        """Read the steps of a traced request while the block runs, as a page would."""
        async with self._http.stream("GET", STEPS_PATH, params={"trace": trace}) as response:
            if response.status_code != 200:
                raise LabError(f"The server at {self.endpoint.url} does not trace.", why=f"It said {response.status_code}.")

            async def read() -> None:
                async for _ in events(response):
                    pass

            reader = asyncio.create_task(read())
            try:
                yield
                await asyncio.wait([reader], timeout=5)
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)

    async def _answer(self, prompt: Prompt, body: dict[str, Any]) -> Answer:
        failed = f"The server at {self.endpoint.url} did not answer prompt '{prompt.id}'."
        ids: list[int] = []
        arrivals: list[tuple[float, int]] = []
        finish: str | None = None
        usage: dict[str, int] | None = None
        sent = time.perf_counter()
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    detail = (await response.aread()).decode(errors="replace")[:300]
                    raise LabError(failed, why=f"It said {response.status_code}: {detail}")
                async for _, data in events(response):
                    if data == b"[DONE]":
                        break
                    chunk = msgspec.json.decode(data)
                    if "error" in chunk:
                        raise LabError(failed, why=str(chunk["error"])[:300])
                    usage = chunk.get("usage") or usage
                    for choice in chunk["choices"]:
                        finish = choice.get("finish_reason") or finish
                        if new := choice.get("token_ids"):
                            ids += new
                            arrivals.append((time.perf_counter(), len(new)))
        except httpx.HTTPError as error:
            raise LabError(failed, why=str(error) or type(error).__name__, todo="Look at the lane's log.") from error
        ended = time.perf_counter()
        if usage is None or finish is None:
            raise LabError(failed, why="The stream ended early.", todo="Look at the lane's log.")
        if not ids or len(ids) != usage["completion_tokens"]:
            raise LabError(
                f"The token ids of prompt '{prompt.id}' cannot be counted on: {len(ids)} arrived, the usage record says "
                f"{usage['completion_tokens']}.",
                todo="The server must be vLLM 0.24 or newer, which sends token ids when asked.",
            )
        return Answer(prompt.id, tuple(ids), usage["prompt_tokens"], finish, sent, ended, tuple(arrivals))

    async def round(self, prompts: Sequence[Prompt], concurrency: int) -> Round:
        """All `prompts` in order, `concurrency` at a time."""
        queue = deque(prompts)
        answers: list[Answer] = []

        async def worker() -> None:
            while queue:
                answers.append(await self.ask(queue.popleft()))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(prompts))):
                    group.create_task(worker())
        except* LabError as failed:
            first: BaseException = failed
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            raise first from failed
        return full_queue(answers, concurrency)
