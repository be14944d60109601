"""The client against a fake server: joining two streams, and every way in which they can break."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from lab import recipes
from lab.errors import LabError
from lab.serving import client as module
from lab.serving.client import Delta, Done, Event, Notice, StepEvent, generate
from lab.serving.command import Lane
from lab.serving.endpoint import Endpoint
from lab.serving.remote import attach
from lab.trace.model import Step


def sse(data: object, name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    body = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"{head}data: {body}\n\n".encode()


def chunk(text: str, ids: list[int], finish: str | None = None, **more: Any) -> bytes:
    return sse({"choices": [{"index": 0, "delta": {"content": text}, "token_ids": ids, "finish_reason": finish, **more}]})


FIRST = sse({"prompt_token_ids": [1, 2], "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
USAGE = sse({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 3}})
END = sse("[DONE]")
ANSWER = [FIRST, chunk("Hi", [5]), chunk("\u2028 there", [6, 7], "stop"), USAGE, END]


def step(index: int, **fields: Any) -> bytes:
    made = Step(trace="t", request="r", index=index, phase="decode", started=0.0, ended=1.0, **fields)
    return sse(msgspec.json.encode(made).decode(), "step")


STEPS = [
    sse({"request": "r", "ids": [1, 2]}, "prompt"),
    sse({"5": "4869"}, "pieces"),
    step(0, sampled=(5,), kept=1),
    b": keep-alive\n\n",
    sse({"6": "e280a8", "7": "20", "8": "21"}, "pieces") + step(1, draft=(6, 8), sampled=(6, 7), kept=2),
    sse({}, "end"),
]


def collect(endpoint: Endpoint, prompt: str = "hello", **more: Any) -> list[Event]:
    async def run() -> list[Event]:
        return [event async for event in generate(endpoint, prompt, **more)]

    return asyncio.run(run())


def done(events: list[Event]) -> Any:
    last = events[-1]
    assert isinstance(last, Done)
    return last.request


@pytest.fixture
def endpoint(fake: Any) -> Endpoint:
    fake.chunks, fake.steps = list(ANSWER), list(STEPS)
    return Endpoint(fake.url, "smollm2", Lane(recipes.get("smollm2"), "bf16", 2))


def test_both_streams_are_joined(fake: Any, endpoint: Endpoint) -> None:
    events = collect(endpoint, history=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], seed=7)
    request = done(events)
    assert [event for event in events if isinstance(event, Delta)] == [Delta("Hi", (5,)), Delta("\u2028 there", (6, 7))]
    assert [(event.step.index, dict(event.pieces)) for event in events if isinstance(event, StepEvent)] == [
        (0, {5: "4869"}),
        (1, {6: "e280a8", 7: "20", 8: "21"}),
    ]
    assert not [event for event in events if isinstance(event, Notice)]
    assert (request.text, request.ids, request.output_ids(), request.prompt_ids) == ("Hi\u2028 there", (5, 6, 7), (5, 6, 7), (1, 2))
    assert (request.usage_prompt, request.usage_completion, request.finish, request.error) == (2, 3, "stop", None)
    assert 0 <= request.ttft <= request.elapsed
    assert request.lane == "smollm2/bf16/k2/eager/traced"
    assert request.settings["k"] == 2
    body = fake.bodies[0]
    assert [message["content"] for message in body["messages"]] == ["a", "b", "hello"]
    assert body["vllm_xargs"] == {"eagle3_trace": request.trace}
    assert (body["seed"], body["return_token_ids"]) == (7, True)
    assert fake.paths.index("/v1/eagle3/steps") < fake.paths.index("/v1/chat/completions")


def test_alternatives(fake: Any, endpoint: Endpoint) -> None:
    top = [{"token": "Hi", "bytes": [72, 105], "logprob": -0.5}, {"token": "x", "bytes": None, "logprob": -2.0}]
    logprobs = {"content": [{"token": "Hi", "logprob": -0.5, "top_logprobs": top}]}
    fake.chunks[1] = chunk("Hi", [5], logprobs=logprobs)
    request = done(collect(endpoint, alternatives=2))
    assert [(found.text, found.logprob) for found in request.alternatives[0]] == [("Hi", -0.5), ("x", -2.0)]
    assert (fake.bodies[0]["logprobs"], fake.bodies[0]["top_logprobs"]) == (True, 2)


def test_a_lane_without_the_plugin(fake: Any) -> None:
    fake.chunks = list(ANSWER)
    events = collect(Endpoint(fake.url, "smollm2", Lane(recipes.get("smollm2"), traced=False)))
    assert not [event for event in events if isinstance(event, Notice | StepEvent)]
    assert done(events).output_ids() == (5, 6, 7)
    assert "/v1/eagle3/steps" not in fake.paths
    assert "vllm_xargs" not in fake.bodies[0]


@pytest.mark.parametrize(("status", "words"), [(404, "does not run the lab's plugin"), (409, "no steps here")])
def test_a_server_that_gives_no_steps_says_so(fake: Any, status: int, words: str) -> None:
    fake.chunks, fake.steps = list(ANSWER), status
    events = collect(Endpoint(fake.url, "smollm2"))
    assert [words in event.text for event in events if isinstance(event, Notice)] == [True]
    assert done(events).text == "Hi\u2028 there"


def test_a_server_that_dies_in_the_middle_loses_nothing(fake: Any, endpoint: Endpoint) -> None:
    fake.chunks, fake.steps = [FIRST, chunk("Hi", [5]), 0.2, None], [*STEPS[:3], 0.1, None]
    request = done(collect(endpoint))
    assert (request.text, request.ids, len(request.steps)) == ("Hi", (5,), 1)
    assert "stopped in the middle" in request.error


def test_an_answer_without_its_end_is_broken(fake: Any, endpoint: Endpoint) -> None:
    fake.chunks = [FIRST, chunk("Hi", [5])]
    assert "before the answer's end" in done(collect(endpoint)).error


def test_an_error_inside_the_stream(fake: Any, endpoint: Endpoint) -> None:
    fake.chunks = [FIRST, chunk("Hi", [5]), sse({"error": {"message": "EngineCore encountered an issue", "code": 500}})]
    assert "EngineCore encountered" in done(collect(endpoint)).error


def test_a_server_that_dies_before_it_answers(fake: Any, endpoint: Endpoint) -> None:
    fake.chunks, fake.steps = [None], []
    with pytest.raises(LabError, match="does not answer"):
        collect(endpoint)


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(LabError, match="does not answer"):
        collect(Endpoint("http://127.0.0.1:9", "m"))


def test_refusals(fake: Any, endpoint: Endpoint) -> None:
    fake.status, fake.refusal = 400, {"error": {"message": "This model's maximum context length is 4096 tokens. However, ..."}}
    with pytest.raises(LabError, match="do not fit") as caught:
        collect(endpoint, max_tokens=64)
    assert "64" in caught.value.todo
    fake.status, fake.refusal = 400, {"error": {"message": "min_p is not supported"}}
    with pytest.raises(LabError, match="min_p is not supported"):
        collect(endpoint)


def test_the_api_key(fake: Any, endpoint: Endpoint) -> None:
    fake.key = "sesame"
    assert done(collect(Endpoint(fake.url, "smollm2", endpoint.lane, "sesame"))).text == "Hi\u2028 there"
    with pytest.raises(LabError, match="API key"):
        collect(endpoint)
    with pytest.raises(LabError, match="API key"):
        asyncio.run(attach(fake.url))
    assert asyncio.run(attach(f"{fake.url}/v1/", api_key="sesame")).model == "smollm2"


def test_an_empty_prompt(endpoint: Endpoint) -> None:
    with pytest.raises(LabError, match="empty"):
        collect(endpoint, " \n")


def test_lost_steps_are_said(fake: Any, endpoint: Endpoint) -> None:
    fake.steps = [*STEPS[:3], sse({"dropped": 1}, "dropped"), STEPS[-1]]
    events = collect(endpoint)
    assert done(events).dropped == 1
    assert ["1 step of" in event.text for event in events if isinstance(event, Notice)] == [True]


@pytest.mark.parametrize("steps", [[*STEPS[:3], STEPS[-1]], STEPS[:-1], [*STEPS[:-1], 30.0]], ids=["missing", "no end", "late"])
def test_an_incomplete_trace_is_said(fake: Any, endpoint: Endpoint, steps: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS_LATE", 0.5)
    fake.steps = steps
    events = collect(endpoint)
    assert ["incomplete" in event.text for event in events if isinstance(event, Notice)] == [True]
    assert done(events).text == "Hi\u2028 there"


def test_closing_the_iterator_hangs_up(fake: Any, endpoint: Endpoint) -> None:
    fake.chunks = [FIRST, *[chunk("x", [5]), 0.05] * 200]

    async def run() -> bool:
        source = generate(endpoint, "hello")
        async for event in source:
            if isinstance(event, Delta):
                break
        assert not fake.hung_up.is_set()
        await source.aclose()  # type: ignore[attr-defined]
        return await asyncio.to_thread(fake.hung_up.wait, 30.0)  # inside the loop, whose end would close connections by itself

    assert asyncio.run(run())


def test_no_server_at_an_address() -> None:
    for url in ("http://127.0.0.1:9", "nonsense with spaces", "127.0.0.1:9/v1"):
        with pytest.raises(LabError, match="no OpenAI-style server"):
            asyncio.run(attach(url))


@pytest.mark.parametrize(
    "strange",
    [
        [1, 2],
        {"choices": [{"delta": {"content": "x"}, "token_ids": [7], "logprobs": {"content": [{"top_logprobs": [{"token": "x"}]}]}}]},
        {"choices": [None]},
    ],
    ids=["no object", "a candidate without its probability", "no choice"],
)
def test_json_of_another_shape_breaks_the_answer_off(fake: Any, endpoint: Endpoint, strange: Any) -> None:
    """Nobody else ends the wait for a stream whose reader is gone."""
    fake.chunks[2] = sse(strange)

    async def run() -> list[Event]:
        async with asyncio.timeout(20):
            return [event async for event in generate(endpoint, "hello", alternatives=2)]

    request = done(asyncio.run(run()))
    assert "something that vLLM does not send" in request.error
    assert request.text == "Hi"
