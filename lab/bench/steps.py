"""The engine's steps of requests that are not chat: the plugin's stream, read beside whatever asks.

`follow` opens the stream before the caller sends its request with the same trace id, so that no step is missed, and ends when the server
says that the trace is over. Steps of all requests of the trace (n > 1 makes several) come in the order in which the engine took them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import msgspec

from lab.errors import LabError
from lab.serving.command import STEPS_PATH
from lab.serving.endpoint import Endpoint
from lab.serving.sse import events
from lab.trace.model import Dropped, Step

#: Seconds that the stream may take to end after its request did.
LATE = 10.0


@asynccontextmanager
async def follow(endpoint: Endpoint, trace: str) -> AsyncIterator[list[Step]]:
    """A list that is complete when the block has ended. Raises `LabError` where the server does not trace, or steps were lost."""
    found: list[Step] = []
    timeout = httpx.Timeout(None, connect=10.0)
    async with httpx.AsyncClient(base_url=endpoint.url, headers=endpoint.headers(), timeout=timeout, trust_env=False) as http:
        try:
            async with http.stream("GET", STEPS_PATH, params={"trace": trace}) as response:
                if response.status_code != 200:
                    detail = (await response.aread()).decode(errors="replace")[:200]
                    raise LabError(f"The server at {endpoint.url} does not trace.", why=f"It said {response.status_code}: {detail}")

                async def read() -> None:
                    async for name, data in events(response):
                        if name == "step":
                            found.append(msgspec.json.decode(data, type=Step))
                        elif name == "dropped":
                            lost = msgspec.json.decode(data, type=Dropped).dropped
                            raise LabError(f"{lost} steps got lost on the way.", todo="Try again while the machine is less busy.")

                reader = asyncio.create_task(read())
                try:
                    yield found
                    await asyncio.wait_for(asyncio.shield(reader), LATE)
                except TimeoutError as error:
                    raise LabError("The step stream did not end with its request.") from error
                finally:
                    reader.cancel()
                    await asyncio.gather(reader, return_exceptions=True)
        except httpx.HTTPError as error:
            raise LabError(f"The step stream of {endpoint.url} broke off.", why=str(error) or type(error).__name__) from error
