"""A cell's acceptance without loops: the same prompts once more on a traced lane, counted step by step.

Where the end-of-sequence token is ignored, a small model soon repeats itself, and any draft predicts a loop, so the acceptance that the
counters show is too good. The measured lane is not traced; this companion is, runs the cell's own prompts (written down by the client's
own sampler, `vllm_client prompts`) greedily at the same concurrency, and gives acceptance with every step and without those that repeat an
8-gram (`lab.trace.stats.fresh`). Its timings mean nothing and are not kept.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from lab.bench import acceptance
from lab.bench.client import run
from lab.errors import LabError
from lab.serving.command import STEPS_PATH, TRACE_ARGUMENT
from lab.serving.endpoint import Endpoint
from lab.serving.sse import events
from lab.trace.model import Request, Step

SILENCE = 300.0  # seconds without a byte before a request is given up
LATE = 5.0  # seconds that the steps may take to end after the answer did


class Asked(msgspec.Struct, frozen=True):
    """One request of the client: the text that goes into the user's message, and how many tokens it asks for."""

    prompt: str
    output_tokens: int


async def prompts(argv: Sequence[str], environ: dict[str, str], where: Path) -> list[Asked]:
    """What the client would send: `argv` ends with its own arguments; `where` is a file to write them to."""
    await run(argv, environ, where.with_suffix(".log"), what="Writing down the prompts")
    return [msgspec.json.decode(line, type=Asked) for line in where.read_bytes().splitlines()]


async def _ask(client: httpx.AsyncClient, endpoint: Endpoint, asked: Asked, *, ignore_eos: bool) -> Request:
    trace = uuid.uuid4().hex
    request = Request(trace=trace, lane=endpoint.lane.key if endpoint.lane else endpoint.url, prompt="")
    body = {
        "model": endpoint.model,
        "messages": [{"role": "user", "content": asked.prompt}],
        "temperature": 0.0,
        "max_completion_tokens": asked.output_tokens,
        "ignore_eos": ignore_eos,
        "vllm_xargs": {TRACE_ARGUMENT: trace},
    }
    async with client.stream("GET", f"{endpoint.url}{STEPS_PATH}", params={"trace": trace}) as stream:
        if stream.status_code != 200:
            raise LabError(f"The server at {endpoint.url} does not trace.", why=f"It said {stream.status_code}.")

        async def read() -> None:
            async for name, data in events(stream):
                if name == "step":
                    request.steps.append(msgspec.json.decode(data, type=Step))
                elif name == "end":
                    return

        reader = asyncio.create_task(read())
        try:
            answer = await client.post(f"{endpoint.url}/v1/chat/completions", json=body)
            if answer.status_code != 200:
                raise LabError("A traced request was refused.", why=answer.text[:300])
            content = answer.json()
            await asyncio.wait({reader}, timeout=LATE)
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
    request.usage_prompt, request.usage_completion = content["usage"]["prompt_tokens"], content["usage"]["completion_tokens"]
    request.finish = content["choices"][0]["finish_reason"]
    if sum(step.kept for step in request.steps) != request.usage_completion:
        raise LabError("The trace of a request does not hold all of its tokens.", why="Steps were lost on the way.")
    return request


async def measure(endpoint: Endpoint, asked: Sequence[Asked], concurrency: int, *, ignore_eos: bool) -> dict[str, Any]:
    """Counts over all of `asked`, with loops and without, as `acceptance.group` gives them."""
    queue, answers = deque(asked), list[Request]()
    timeout = httpx.Timeout(SILENCE, connect=10.0)
    async with endpoint.client(timeout) as client:

        async def worker() -> None:
            while queue:
                answers.append(await _ask(client, endpoint, queue.popleft(), ignore_eos=ignore_eos))

        tasks = [asyncio.create_task(worker()) for _ in range(concurrency)]
        try:
            await asyncio.gather(*tasks)
        except httpx.HTTPError as error:
            raise LabError(f"The server at {endpoint.url} broke off.", why=str(error) or type(error).__name__) from error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return acceptance.group(answers)
