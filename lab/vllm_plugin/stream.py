"""Steps over HTTP: an ASGI middleware that gives vLLM's own server two more routes, `GET /v1/eagle3/steps` and `GET /v1/eagle3/info`.

`--middleware` is the one way to extend the API server that vLLM 0.24 to 0.33 have in common. The middleware lets every request pass; it
only uses the server's start to add the routes to vLLM's application and to listen to the engine. As ordinary routes under /v1 they stand
behind vLLM's own API-key check, CORS settings and metrics, whatever these are.

`/v1/eagle3/steps?trace=ID` is a stream of server-sent events (WHATWG HTML, "Server-sent events"), and may be opened before, during or
after the request: `prompt`, `pieces` (hex bytes of every id before its first use), `step`, `dropped`, `end`; comments keep it alive. One
`end` a request: with n > 1 or several prompts a trace has several, and the stream closes shortly after the last.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lab import __version__, env
from lab.trace.model import Dropped
from lab.vllm_plugin.history import Frame, History
from lab.vllm_plugin.pieces import Pieces
from lab.vllm_plugin.publisher import Begin, End, Hello, Lost, Message, Took, decoder

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]

_NO_ENGINE = "The engine has not reported: it does not run the lab's scheduler, or has not started yet."
_json = msgspec.json.encode


def event(name: str, data: bytes) -> bytes:
    """One server-sent event; `data` is JSON, so it has no line breaks."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


class StepStream:
    """The middleware, made by vLLM from its name."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.history = History()
        self._hello: Hello | None = None
        self._off: str | None = None
        self._pieces: Pieces | None = None

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Pass everything on; the `lifespan` scope lasts as long as the server does."""
        if scope["type"] != "lifespan":
            await self.app(scope, receive, send)
            return
        async with self._attached(scope["app"]):
            await self.app(scope, receive, send)

    @asynccontextmanager
    async def _attached(self, application: Any) -> AsyncIterator[None]:
        application.router.routes[:0] = [
            Route("/v1/eagle3/steps", self._steps, methods=["GET"]),
            Route("/v1/eagle3/info", self._info, methods=["GET"]),
        ]
        address = env.trace_socket()
        arguments = getattr(application.state, "args", None)
        servers = getattr(arguments, "api_server_count", None) or 1
        if servers > 1:
            self._off = f"Steps reach one API server process only, and this server runs {servers} (--api-server-count)."
        elif address is None:
            self._off = "EAGLE3_LAB_TRACE_SOCKET is not set."
        if self._off:
            yield
            return
        listener = asyncio.create_task(self._listen(str(address)))
        try:
            yield
        finally:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)

    async def _listen(self, address: str) -> None:
        """Take messages from the engine until cancelled."""
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.PULL)
        decode = decoder().decode
        try:
            socket.bind(address)
            while True:
                try:
                    messages = decode(await socket.recv())
                except msgspec.MsgspecError:
                    logger.exception("Eagle3 Lab: a message from the engine is not understood")
                    continue
                for message in messages:
                    self._take(message)
        except zmq.ZMQError as error:
            self._off = f"The API server cannot listen on {address}: {error}."
            logger.exception("Eagle3 Lab: tracing is off")
        finally:
            socket.close(linger=0)
            context.term()

    def _take(self, message: Message) -> None:
        match message:
            case Took(step):
                self.history.add(step.trace, Frame("step", _json(step), (*step.draft, *step.sampled)))
            case Begin(trace, request, ids):
                self.history.begin(trace, request, Frame("prompt", _json({"request": request, "ids": ids}), tuple(ids)))
            case End(trace, request, finish):
                self.history.end(trace, request, Frame("end", _json({"request": request, "finish": finish})))
            case Lost(trace, steps):
                self.history.add(trace, Frame("dropped", _json(Dropped(dropped=steps))))
            case Hello():
                self._hello = message

    def tracing(self) -> tuple[bool, str]:
        """Whether steps can be had, and the reason why not."""
        if self._off:
            return False, self._off
        return self._hello.tracing if self._hello else (False, _NO_ENGINE)

    async def _info(self, request: Request) -> Response:  # noqa: ARG002  (Starlette's signature)
        from vllm import __version__ as vllm_version

        on, reason = self.tracing()
        probs_on, probs_reason = self._hello.draft_probs if self._hello and on else (False, reason)
        return JSONResponse(
            {
                "plugin": __version__,
                "vllm": vllm_version,
                "tracing": {"on": on, "reason": reason},
                "draft_probs": {"on": probs_on, "reason": probs_reason},
            }
        )

    async def _steps(self, request: Request) -> Response:
        trace = request.query_params.get("trace")
        if not trace:
            return JSONResponse({"error": {"message": "Say which trace: /v1/eagle3/steps?trace=ID", "code": 400}}, 400)
        on, reason = self.tracing()
        if not on and (self._hello or self._off):
            return JSONResponse({"error": {"message": f"This server does not trace. {reason}", "code": 409}}, 409)
        pieces = await self._tokens(request.app)
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._events(trace, pieces, request.app), media_type="text/event-stream", headers=headers)

    async def _events(self, trace: str, pieces: Pieces | None, application: Any) -> AsyncIterator[bytes]:
        def stopping() -> bool:
            return bool(getattr(getattr(application.state, "server", None), "should_exit", False))

        told: set[int] = set()
        yield b": eagle3-lab\n\n"
        async for found in self.history.follow(trace, stop=stopping):
            if found is None:
                yield b": keep-alive\n\n"
            elif isinstance(found, int):
                yield event("dropped", _json(Dropped(dropped=found)))
            else:
                chunk: list[bytes] = []
                for frame in found:
                    if pieces and (new := sorted({token for token in frame.ids if token >= 0} - told)):
                        told.update(new)
                        chunk.append(event("pieces", _json({str(token): pieces.piece(token).hex() for token in new})))
                    chunk.append(event(frame.event, frame.data))
                yield b"".join(chunk)

    async def _tokens(self, application: Any) -> Pieces | None:
        """The target's tokenizer as bytes; None where the server has none (--skip-tokenizer-init)."""
        if self._pieces is None:
            try:
                tokenizer = application.state.engine_client.get_tokenizer()
                if inspect.isawaitable(tokenizer):
                    tokenizer = await tokenizer
                self._pieces = Pieces(tokenizer)
            except (AttributeError, ValueError, RuntimeError):
                logger.warning("Eagle3 Lab: the server gives no tokenizer, so steps come without the bytes of their tokens", exc_info=True)
        return self._pieces
