"""The middleware in a real HTTP server, with this test as the engine. vLLM's own application and key check stand around it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from lab.trace.model import Step
from lab.vllm_plugin.history import History
from lab.vllm_plugin.publisher import Begin, End, Hello, Lost, Publisher, Took
from lab.vllm_plugin.stream import StepStream

uvicorn = pytest.importorskip("uvicorn")
fastapi = pytest.importorskip("fastapi")

STEP = Step(trace="t", request="r", index=0, phase="decode", started=0, ended=0, draft=(1, 2), sampled=(1, 3), kept=2)
ON = Hello(vllm="0", tracing=(True, ""), draft_probs=(True, ""))
KEY = {"Authorization": "Bearer sesame"}


@dataclass
class Site:
    url: str
    port: int
    engine: Publisher
    plugin: StepStream
    server: Any

    def play(self, trace: str, steps: int, *, end: bool = True) -> None:
        """A whole request, as fast as the wire takes it."""
        self.engine.send([Begin(trace, trace, [5, 6])])
        for index in range(steps):
            self.engine.send([Took(msgspec.structs.replace(STEP, trace=trace, request=trace, index=index, draft=(index % 900, 2)))])
        if end:
            self.engine.send([End(trace, trace, "stop")])


def tokenizer() -> Any:
    return SimpleNamespace(convert_ids_to_tokens=lambda token: f"<{token}>", decode=lambda ids: f"<{ids[0]}>")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Starts a site inside the test's event loop."""

    @asynccontextmanager
    async def start(history: History | None = None, hello: Hello | None = ON, **arguments: Any) -> AsyncIterator[Site]:
        authenticate = pytest.importorskip("vllm.entrypoints.serve.middleware.authenticate")
        monkeypatch.setenv("EAGLE3_LAB_TRACE_SOCKET", f"ipc://{tmp_path}/s")
        application = fastapi.FastAPI()
        application.state.args = SimpleNamespace(**arguments)
        application.state.engine_client = SimpleNamespace(get_tokenizer=tokenizer)
        plugins: list[StepStream] = []

        class Kept(StepStream):
            def __init__(self, app: Any) -> None:
                super().__init__(app)
                if history is not None:
                    self.history = history
                plugins.append(self)

        application.add_middleware(authenticate.AuthenticationMiddleware, tokens=["sesame"])
        application.add_middleware(Kept)
        server = uvicorn.Server(uvicorn.Config(application, port=0, log_level="warning"))
        application.state.server = server
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        engine = Publisher(f"ipc://{tmp_path}/s")
        try:
            if hello:
                engine.send([hello])
                while plugins[0]._hello is None and not plugins[0]._off:
                    await asyncio.sleep(0.01)
            yield Site(f"http://127.0.0.1:{port}", port, engine, plugins[0], server)
        finally:
            engine.close()
            server.should_exit = True
            await asyncio.wait_for(serving, 60)

    return start


async def follow(site: Site, trace: str, headers: dict[str, str] = KEY) -> list[tuple[str, Any]]:
    events, name = [], ""
    async with httpx.AsyncClient(base_url=site.url, timeout=120, verify=False) as http:
        async with http.stream("GET", "/v1/eagle3/steps", params={"trace": trace}, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    events.append((name, json.loads(line.removeprefix("data: "))))
    return events


def numbers(events: list[tuple[str, Any]]) -> list[int]:
    return [data["index"] for name, data in events if name == "step"]


def test_many_streams_at_once_each_with_its_own(site: Any) -> None:
    async def scene() -> None:
        async with site() as s:
            early = [asyncio.create_task(follow(s, f"t{n % 20}")) for n in range(60)]
            await traces(s, 20)
            for n in range(20):
                s.play(f"t{n}", 50 + n)
            for n, events in enumerate(await asyncio.gather(*early)):
                assert numbers(events) == list(range(50 + n % 20))
                assert {data.get("trace", f"t{n % 20}") for _, data in events} == {f"t{n % 20}"}
                assert [name for name, _ in events if name in ("prompt", "end")] == ["prompt", "end"]
                assert events[-1] == ("end", {"request": f"t{n % 20}", "finish": "stop"})

    asyncio.run(scene())


def test_a_reader_that_does_not_read_is_told_what_it_missed_and_holds_nobody_up(site: Any) -> None:
    async def scene() -> None:
        async with site(History(limit=400_000)) as s:
            narrow = socket.socket()
            narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            narrow.connect(("127.0.0.1", s.port))
            reader, writer = await asyncio.open_connection(sock=narrow, limit=1024)
            writer.write(b"GET /v1/eagle3/steps?trace=t HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sesame\r\nConnection: close\r\n\r\n")
            await traces(s, 1)  # it listens, and reads nothing
            for _ in range(20):
                s.play("t", 2000, end=False)
                await drained(s)
            s.engine.send([End("t", "t", "stop")])
            s.play("other", 300)
            assert numbers(await follow(s, "other")) == list(range(300))
            assert s.plugin.history.size <= 400_000
            received = (await asyncio.wait_for(_all(reader), 120)).decode()
            writer.close()
        dropped = sum(int(line.split(":")[-1].strip("}")) for line in received.splitlines() if line.startswith('data: {"dropped"'))
        got = received.count("event: step")
        assert got + dropped == 40_000
        assert dropped > 5_000

    asyncio.run(scene())


async def _all(reader: asyncio.StreamReader) -> bytes:
    data = b""
    while chunk := await reader.read(65536):
        data += chunk
    return data


async def drained(site: Site) -> None:
    """Wait until the wire has taken everything, however slow the machine: what is lost after that, the history has let go."""
    async with asyncio.timeout(120):
        while site.engine._full or site.engine._queue.qsize():
            await asyncio.sleep(0.01)


async def traces(site: Site, count: int) -> None:
    """Wait until the server holds so many traces."""
    async with asyncio.timeout(120):
        while len(site.plugin.history) != count:
            await asyncio.sleep(0.05)


def test_a_client_that_leaves_is_cleaned_up(site: Any) -> None:
    async def scene() -> None:
        async with site() as s:
            tasks = [asyncio.create_task(follow(s, f"never-{n}")) for n in range(20)]
            await traces(s, 20)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await traces(s, 0)

    asyncio.run(scene())


def test_a_hole_on_the_wire_is_said(site: Any) -> None:
    async def scene() -> None:
        async with site() as s:
            s.engine.send([Begin("t", "r", [1]), Lost("t", 7), End("t", "r", "stop")])
            events = await follow(s, "t")
            assert ("dropped", {"dropped": 7}) in events

    asyncio.run(scene())


def test_an_open_stream_does_not_keep_the_server_from_stopping(site: Any) -> None:
    async def scene() -> None:
        async with site() as s:
            reading = asyncio.create_task(follow(s, "never"))
            await traces(s, 1)
        await asyncio.wait_for(asyncio.gather(reading, return_exceptions=True), 60)

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("arguments", "hello", "said"),
    [
        ({"api_server_count": 4}, None, "--api-server-count"),
        ({}, Hello(vllm="0", tracing=(False, "No luck."), draft_probs=(False, "No luck.")), "No luck."),
    ],
)
def test_a_server_that_cannot_trace_says_why(site: Any, arguments: dict[str, Any], hello: Hello | None, said: str) -> None:
    async def scene() -> None:
        async with site(hello=hello, **arguments) as s, httpx.AsyncClient(base_url=s.url, headers=KEY, verify=False) as http:
            info = (await http.get("/v1/eagle3/info")).json()
            assert info["tracing"]["on"] is info["draft_probs"]["on"] is False
            assert said in info["tracing"]["reason"]
            assert said in info["draft_probs"]["reason"]
            steps = await http.get("/v1/eagle3/steps?trace=t")
            assert steps.status_code == 409
            assert said in steps.json()["error"]["message"]

    asyncio.run(scene())


def test_an_engine_that_never_reported_is_said(site: Any) -> None:
    async def scene() -> None:
        async with site(hello=None) as s, httpx.AsyncClient(base_url=s.url, headers=KEY, verify=False) as http:
            assert "has not reported" in (await http.get("/v1/eagle3/info")).json()["tracing"]["reason"]

    asyncio.run(scene())


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer sesam"}, {"Authorization": "sesame"}])
def test_without_the_key_nothing_is_told(site: Any, headers: dict[str, str]) -> None:
    async def scene() -> None:
        async with site() as s, httpx.AsyncClient(base_url=s.url, headers=headers, verify=False) as http:
            s.play("t", 5)
            for path in ("/v1/eagle3/info", "/v1/eagle3/steps?trace=t"):
                assert (await http.get(path)).status_code == 401

    asyncio.run(scene())
