"""A server asked in token ids: greedy answers, samples, and the target's probabilities of a text that is already there.

Everything goes through vLLM's `/v1/completions` with ids as the prompt, so that no lane templates or tokenizes differently; the chat
template is applied once, by the server itself (`/tokenize`). Probabilities are natural logarithms at temperature 1 before any sampling
setting (vLLM's `raw_logprobs`), keyed by token id. `score` reads the target's view of every position of a text in one pass, which is how a
token that another lane wrote is judged by the target.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from lab.errors import LabError
from lab.serving.command import TRACE_ARGUMENT
from lab.serving.endpoint import Endpoint

#: Seconds without any byte before a request is given up: one scoring of a long text on slow cores takes a few.
SILENCE = 300.0
#: Nats that stand for "much too far to list", a number because results are JSON.
FAR = 99.0
_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True)
class Completion:
    """One answer's ids, and for each of them the target's best candidates (empty where not asked for)."""

    ids: tuple[int, ...]
    top: tuple[Mapping[int, float], ...] = ()


@dataclass(frozen=True)
class Scored:
    """The target's view of one position: log-probabilities of its best candidates and of the token that stands there."""

    logprobs: Mapping[int, float]
    #: The candidates' texts, for people.
    texts: Mapping[int, str]

    @property
    def best(self) -> int:
        """The most probable token (the lowest id among equals)."""
        return max(self.logprobs, key=lambda token: (self.logprobs[token], -token))

    def regret(self, token: int) -> float:
        """How many nats below the best candidate `token` is; `FAR` where the server did not tell."""
        return self.logprobs[self.best] - self.logprobs[token] if token in self.logprobs else FAR


class Asker:
    """Asks one endpoint; an async context manager that keeps its connections open. Every failure is a `LabError`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        timeout, limits = httpx.Timeout(SILENCE, connect=10.0), httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(base_url=endpoint.url, headers=endpoint.headers(), timeout=timeout, limits=limits, trust_env=False)

    async def __aenter__(self) -> Asker:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        what = f"The server at {self.endpoint.url} did not answer."
        try:
            response = await self._http.post(path, json={"model": self.endpoint.model, **body})
            if response.status_code != 200:
                raise LabError(what, why=f"It said {response.status_code} to {path}: {response.text[:300]}")
            found = response.json()
        except httpx.HTTPError as error:
            raise LabError(what, why=str(error) or type(error).__name__, todo="It may have ended; its log says why.") from error
        except ValueError as error:
            raise LabError(what, why=f"Its answer to {path} is not JSON.") from error
        if not isinstance(found, dict) or "error" in found:
            raise LabError(what, why=str(found)[:300])
        return found

    async def tokens(self, text: str) -> tuple[int, ...]:
        """Ids of one user message under the server's chat template, up to where the answer begins."""
        found = await self._post("/tokenize", {"messages": [{"role": "user", "content": text}], "add_generation_prompt": True})
        return tuple(self._field(found, "tokens"))

    async def complete(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 0.0,
        n: int = 1,
        top: int | None = None,
        ignore_eos: bool = False,
        trace: str | None = None,
    ) -> list[Completion]:
        """`n` answers of at most `max_tokens` tokens to the prompt `ids`; `top` asks for so many of the target's candidates each."""
        body: dict[str, Any] = {"prompt": list(ids), "max_tokens": max_tokens, "temperature": temperature, "n": n, "return_token_ids": True}
        if ignore_eos:
            body["ignore_eos"] = True
        if top is not None:
            body |= {"logprobs": top, "return_tokens_as_token_ids": True}
        if trace is not None:
            body["vllm_xargs"] = {TRACE_ARGUMENT: trace}
        answers = self._parsed(self._answers, await self._post("/v1/completions", body), top is not None)
        if len(answers) != n:
            raise LabError(f"The server at {self.endpoint.url} gave {len(answers)} answers where {n} were asked for.")
        return answers

    def _answers(self, found: dict[str, Any], with_top: bool) -> list[Completion]:
        answers = []
        for choice in self._field(found, "choices"):
            tops: tuple[Mapping[int, float], ...] = ()
            if with_top:
                listed = self._field(self._field(choice, "logprobs"), "top_logprobs")
                tops = tuple({int(name.removeprefix("token_id:")): float(value) for name, value in one.items()} for one in listed)
            answers.append(Completion(tuple(self._field(choice, "token_ids")), tops))
        return answers

    async def score(self, prompt: Sequence[int], answer: Sequence[int], *, top: int = 2) -> list[Scored]:
        """The target's view of each token of `answer` after `prompt` and the tokens before it, all in one pass."""
        if not answer:
            return []
        body = {"prompt": [*prompt, *answer], "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top}
        scored = self._parsed(self._views, await self._post("/v1/completions", body), len(prompt))
        if len(scored) != len(answer):
            raise LabError(f"The server at {self.endpoint.url} scored {len(scored)} of {len(answer)} tokens.")
        return scored

    def _views(self, found: dict[str, Any], skip: int) -> list[Scored]:
        listed = self._field(self._field(found, "choices")[0], "prompt_logprobs")[skip:]
        scored = []
        for entry in listed:
            logprobs = {int(token): float(value["logprob"]) for token, value in entry.items()}
            scored.append(Scored(logprobs, {int(token): str(value.get("decoded_token") or "") for token, value in entry.items()}))
        return scored

    def _parsed(self, parse: Callable[[dict[str, Any], Any], list[_R]], found: dict[str, Any], how: Any) -> list[_R]:
        try:
            return parse(found, how)
        except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            what = f"The answer of the server at {self.endpoint.url} is not as vLLM's."
            raise LabError(what, why=f"{type(error).__name__}: {error}"[:200]) from error

    def _field(self, found: Any, name: str) -> Any:
        value = found.get(name) if isinstance(found, dict) else None
        if value is None:
            raise LabError(
                f"The server at {self.endpoint.url} gives no '{name}'.",
                why="The check needs token ids and probabilities, as vLLM gives them.",
                todo="Check that the server is vLLM 0.24 or newer.",
            )
        return value


async def in_flight(ask: Callable[[_T], Awaitable[_R]], items: Sequence[_T], concurrency: int) -> list[_R]:
    """`ask` of every item, at most `concurrency` at a time, results in order. The first failure ends the others."""
    gate = asyncio.Semaphore(concurrency)

    async def one(item: _T) -> _R:
        async with gate:
            return await ask(item)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in items]
    except BaseExceptionGroup as failed:
        first: BaseException = failed
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from failed
    return [task.result() for task in tasks]
