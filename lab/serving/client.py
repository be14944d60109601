"""One prompt through one endpoint: the OpenAI chat stream and the plugin's step stream, joined in one iterator of events.

The step stream is opened before the request is sent, so no step is missed; both then feed one queue, and events come out in the order in
which they arrived. Closing the iterator closes both connections, on which vLLM aborts the request. Token ids and counts come from the
server (`return_token_ids`, usage), never from counting chunks. A server without the plugin works too: then there are no steps.

What goes wrong before the answer begins raises a `LabError`; once something was received, the last event is a `Done` whose request has
`error` set and holds everything up to there.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from lab.errors import LabError
from lab.serving.command import COUNTS_FLAG, STEPS_PATH, TRACE_ARGUMENT
from lab.serving.endpoint import Endpoint
from lab.serving.sse import events
from lab.trace.model import Alternative, Dropped, Request, Step

CONNECT_TIMEOUT = 10.0  # seconds; reading has no limit, because a long prompt or a queue may take minutes without a byte
QUIET = 15.0  # seconds without a byte after which a server elsewhere is asked whether it is still there
UNANSWERED = 3  # such questions without an answer, after which the answer counts as broken off
#: What a traced request may ask of its drafts (`lab/vllm_plugin/asked.py`): fewer tokens than the server's K, or none verified (1).
DEPTH_ARGUMENT = "eagle3_k"
WITHHOLD_ARGUMENT = "eagle3_withhold"

STEPS_LATE = 5.0  # seconds that the step stream may take to end after the answer did


@dataclass(frozen=True)
class Delta:
    """A piece of the answer as the server sent it, with its token ids where the server gives them."""

    text: str
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepEvent:
    """One engine step, and the bytes (hex) of token ids that occur in it for the first time."""

    step: Step
    pieces: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Notice:
    """A sentence for the person at the screen: something was lost, or is not available on this server."""

    text: str


@dataclass(frozen=True)
class Done:
    """The last event. `request.error` is set when the answer broke off; what was received until then is in it."""

    request: Request


Event = Delta | StepEvent | Notice | Done


class _Broken(Exception):
    """The answer ended before its end; the message says how."""


@dataclass(frozen=True)
class _End:
    """A reader's last word in the queue: which stream ended, and how."""

    stream: str
    error: BaseException | None = None


class _Answer:
    """One request under way: what was sent, what has arrived, and the queue between the readers and the iterator."""

    def __init__(self, client: httpx.AsyncClient, endpoint: Endpoint, body: dict[str, Any], request: Request) -> None:
        self.client, self.endpoint, self.body, self.request = client, endpoint, body, request
        self.queue: asyncio.Queue[Delta | StepEvent | Notice | _End] = asyncio.Queue()
        self.sent = time.monotonic()
        self.ended = False  # the trace said that the request ended
        self._text: list[str] = []
        self._ids: list[int] = []
        self._new: dict[int, str] = {}

    def received(self) -> bool:
        return bool(self._ids or self.request.steps or any(self._text))

    async def read(self, stream: str, reader: AsyncIterator[Delta | StepEvent | Notice]) -> None:
        """Pass everything of one stream into the queue, its end or failure last."""
        try:
            async for item in reader:
                self.queue.put_nowait(item)
            self.queue.put_nowait(_End(stream))
        except (LabError, _Broken, httpx.HTTPError, msgspec.MsgspecError) as error:
            self.queue.put_nowait(_End(stream, error))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            # JSON of another shape than vLLM's. Without its end, this stream would be waited for forever.
            why = self.endpoint.clean(f"{type(error).__name__}: {error}")  # it may repeat what the server sent
            self.queue.put_nowait(_End(stream, _Broken(f"something that vLLM does not send: {why}")))

    async def chat(self) -> AsyncIterator[Delta | StepEvent | Notice]:
        """Send the request and read the answer."""
        url = f"{self.endpoint.url}/v1/chat/completions"
        self.sent = time.monotonic()
        async with self.client.stream("POST", url, json=self.body) as response:
            if response.status_code != 200:
                raise _refusal(self.endpoint, response.status_code, await response.aread(), self.body)
            async for _, data in events(response):
                if data == b"[DONE]":
                    return
                if delta := self._take(msgspec.json.decode(data)):
                    yield delta
        raise _Broken("the connection was closed before the answer's end")

    def _take(self, chunk: dict[str, Any]) -> Delta | None:
        request = self.request
        if error := chunk.get("error"):
            raise _Broken(self.endpoint.clean(str(error.get("message", error) if isinstance(error, dict) else error)))
        if usage := chunk.get("usage"):
            request.usage_prompt, request.usage_completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if isinstance(metrics := chunk.get("metrics"), dict):
            request.counted = _counted(metrics.get("speculative_decoding"))
        if ids := chunk.get("prompt_token_ids"):
            request.prompt_ids = tuple(ids)
        for choice in chunk.get("choices") or ():
            text, ids = (choice.get("delta") or {}).get("content") or "", tuple(choice.get("token_ids") or ())
            request.finish = choice.get("finish_reason") or request.finish
            content = ((choice.get("logprobs") or {}).get("content")) or ()
            if self.body.get("top_logprobs"):
                request.alternatives += [[_alternative(top) for top in entry.get("top_logprobs") or ()] for entry in content]
            if len(content) == len(ids):  # the bytes of each token, where no step stream tells them
                for token, entry in zip(ids, content, strict=True):
                    if entry.get("bytes") is not None:
                        request.pieces.setdefault(token, bytes(entry["bytes"]).hex())
            if text or ids:
                now = time.monotonic() - self.sent
                request.ttft = now if request.ttft is None else request.ttft
                request.elapsed = now
                self._text.append(text)
                self._ids.extend(ids)
                return Delta(text, ids)
        return None

    async def steps(self, response: httpx.Response) -> AsyncIterator[Delta | StepEvent | Notice]:
        """Read the step stream until it says that the request ended."""
        request = self.request
        async for name, data in events(response):
            if name == "step":
                step = msgspec.json.decode(data, type=Step)
                request.steps.append(step)
                new, self._new = self._new, {}
                yield StepEvent(step, new)
            elif name == "pieces":
                pieces = msgspec.json.decode(data, type=dict[int, str])
                request.pieces.update(pieces)
                self._new.update(pieces)
            elif name == "prompt":
                request.prompt_ids = tuple(msgspec.json.decode(data)["ids"])
            elif name == "dropped":
                lost = msgspec.json.decode(data, type=Dropped).dropped
                request.dropped += lost
                yield Notice(f"{lost} step{'s' if lost != 1 else ''} of this answer got lost on the way; counts are incomplete.")
            elif name == "end":
                self.ended = True
                return
        raise _Broken("the step stream was closed early")

    def close(self) -> Request:
        """The request with everything that has arrived."""
        self.request.text, self.request.ids = "".join(self._text), tuple(self._ids)
        return self.request


def _counted(stats: Any) -> tuple[tuple[int, int], ...]:
    """`(drafted, accepted)` of each verify step from the server's own record; () where it gives none, or none for each step."""
    if not isinstance(stats, dict):
        return ()
    drafted, accepted = stats.get("per_step_drafted") or (), stats.get("per_step_accepted") or ()
    if len(drafted) != len(accepted) or not all(type(one) is int and one >= 0 for one in (*drafted, *accepted)):
        return ()
    return tuple(zip(drafted, accepted, strict=True))


def _alternative(top: Mapping[str, Any]) -> Alternative:
    raw = top.get("bytes")
    text = bytes(raw).decode("utf-8", errors="backslashreplace") if raw else str(top.get("token", ""))
    return Alternative(text=text, logprob=float(top["logprob"]))


def _message(content: bytes) -> str:
    """The message in an error answer of an OpenAI-style server, or the start of its text."""
    try:
        found = msgspec.json.decode(content)
        error = found.get("error", found)
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.MsgspecError, AttributeError, KeyError):
        return content[:200].decode("utf-8", errors="replace")


def _refusal(endpoint: Endpoint, status: int, content: bytes, body: Mapping[str, Any]) -> LabError:
    message = endpoint.clean(_message(content))
    if status == 400 and "context length" in message:
        todo = f"Shorten the prompt or the conversation, or ask for fewer new tokens than {body['max_tokens']}."
        return LabError("The prompt and the answer do not fit into the model's context.", why=message, todo=todo)
    if status in (401, 403):
        return LabError("The server refused the API key.", why=message, todo="Check the key that was given for this server.")
    if status == 404:
        return LabError(f"The server does not offer the model '{body['model']}'.", why=message)
    return LabError(f"The server refused the request (HTTP {status}).", why=message)


def _unreachable(endpoint: Endpoint, error: BaseException) -> LabError:
    return LabError(
        f"The engine at {endpoint.url} does not answer.",
        why=str(error) or type(error).__name__,
        todo="It may have ended: look at the lane's state, and restart it.",
    )


async def _open_steps(stack: AsyncExitStack, client: httpx.AsyncClient, endpoint: Endpoint, trace: str) -> httpx.Response | str | None:
    """The open step stream; a sentence where this server has none although one was to be expected; None for a lane without the plugin."""
    if endpoint.lane is not None and not endpoint.lane.traced:
        return None
    try:
        response = await stack.enter_async_context(client.stream("GET", f"{endpoint.url}{STEPS_PATH}", params={"trace": trace}))
    except httpx.HTTPError as error:
        raise _unreachable(endpoint, error) from error
    if response.status_code == 200:
        return response
    content = await response.aread()
    if response.status_code in (401, 403):
        raise _refusal(endpoint, response.status_code, content, {})
    why = _message(content)
    if response.status_code == 404:
        return "This server does not run the lab's plugin, so there are no steps to show." + "".join(f" {one}" for one in endpoint.missing)
    return f"There are no steps to show: {endpoint.clean(why)}"


async def generate(
    endpoint: Endpoint,
    prompt: str,
    *,
    temperature: float = 0.0,
    max_tokens: int = 128,
    seed: int | None = None,
    alternatives: int = 0,
    history: Sequence[Mapping[str, str]] = (),
    asked: Mapping[str, int] | None = None,
) -> AsyncIterator[Event]:
    """Send `prompt` (after `history`, chat messages) and yield what happens; the last event is a `Done`.

    `alternatives` asks for that many of the target's top candidates for each token. Closing or cancelling the iterator aborts the request
    on the server. `asked` are further arguments for the plugin of a traced lane (`DEPTH_ARGUMENT`, `WITHHOLD_ARGUMENT`). Raises `LabError`
    for an empty prompt, a server that does not answer, and a request that it refuses.
    """
    if not prompt.strip():
        raise LabError("The prompt is empty.", todo="Type something, or take one of the examples.")
    if max_tokens < 1 or temperature < 0:
        raise ValueError(f"max_tokens={max_tokens}, temperature={temperature}")
    trace, lane = uuid.uuid4().hex, endpoint.lane
    settings: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed, "alternatives": alternatives}
    elsewhere = lane is None or lane.at is not None
    if elsewhere:
        settings |= {"model": endpoint.model}
    if lane is not None:
        settings |= {"recipe": lane.recipe.name, "draft": lane.draft, "k": lane.k, "compiled": lane.compiled, "traced": lane.traced}
    request = Request(trace=trace, lane=lane.key if lane else endpoint.url, prompt=prompt, settings=settings)
    body: dict[str, Any] = {
        "model": endpoint.model,
        "messages": [*history, {"role": "user", "content": prompt}],
        "temperature": temperature,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if seed is not None:
        body["seed"] = seed
    if alternatives:
        body |= {"logprobs": True, "top_logprobs": alternatives}
    async with AsyncExitStack() as stack:
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT)
        client = await stack.enter_async_context(endpoint.client(timeout))
        steps = await _open_steps(stack, client, endpoint, trace)
        if isinstance(steps, str):
            yield Notice(steps)
        answer = _Answer(client, endpoint, body, request)
        readers = [asyncio.create_task(answer.read("chat", answer.chat()))]
        if isinstance(steps, httpx.Response):
            body["vllm_xargs"] = {TRACE_ARGUMENT: trace, **(asked or {})}
            readers.append(asyncio.create_task(answer.read("steps", answer.steps(steps))))
        elif elsewhere and not endpoint.measured:  # the bytes of each token, to colour them by the server's counts
            body |= {"logprobs": True, "top_logprobs": alternatives}
        watch = _Watch(endpoint) if elsewhere else None

        async def stop() -> None:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

        stack.push_async_callback(stop)
        waiting, deadline = {"chat", "steps"} if len(readers) > 1 else {"chat"}, None
        while waiting:
            try:
                async with asyncio.timeout_at(deadline if deadline or not watch else asyncio.get_running_loop().time() + QUIET):
                    item = await answer.queue.get()
            except TimeoutError:
                if deadline or not watch:
                    break
                if await watch.there():
                    continue
                if not answer.received():
                    raise _unreachable(endpoint, watch.gone()) from None
                request.error = _broken(endpoint, watch.gone())
                break
            if watch:
                watch.unanswered = 0
            if not isinstance(item, _End):
                yield item
                continue
            waiting.discard(item.stream)
            if item.stream == "chat":
                deadline = asyncio.get_running_loop().time() + STEPS_LATE
                if item.error is not None:
                    if isinstance(item.error, LabError):
                        raise item.error
                    if not answer.received():
                        raise _unreachable(endpoint, item.error)
                    request.error = _broken(endpoint, item.error)
        answer.close()
        if isinstance(steps, httpx.Response) and not request.error and not _complete(answer):
            yield Notice("The trace of this answer is incomplete: some of its steps did not arrive.")
        if not isinstance(steps, httpx.Response) and lane is not None and lane.at and not request.error and not request.counted:
            yield Notice(f"This server does not count each request's drafts either: {COUNTS_FLAG} (vLLM 0.30 or newer) brings that.")
        yield Done(request)


class _Watch:
    """While a server elsewhere is silent: is it still there? A long prompt or a queue is silence, and so is a network that went away."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.unanswered = 0

    async def there(self) -> bool:
        """Ask once on a connection of its own; False after `UNANSWERED` questions in a row without an answer of any kind."""
        try:
            async with self.endpoint.client(CONNECT_TIMEOUT) as client:
                await client.get(f"{self.endpoint.url}/v1/models")
            self.unanswered = 0
        except httpx.HTTPError:
            self.unanswered += 1
        return self.unanswered < UNANSWERED

    def gone(self) -> BaseException:
        """Why the answer is given up."""
        return _Broken(f"silence, and {self.unanswered} questions whether it is there without an answer")


def _complete(answer: _Answer) -> bool:
    """Whether the steps account for every token of the answer (or say themselves how many were lost)."""
    kept = sum(step.kept for step in answer.request.steps)
    return bool(answer.request.dropped) or (answer.ended and kept == (answer.request.usage_completion or kept))


def _broken(endpoint: Endpoint, error: BaseException) -> str:
    why = str(error) or type(error).__name__
    return f"The engine at {endpoint.url} stopped in the middle of the answer ({why}). What had arrived is kept."
