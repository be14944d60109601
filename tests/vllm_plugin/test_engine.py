"""The plugin in a real server: what it says is what the engine did, by the engine's own counters.

Expected counts come only from `/metrics`; the traces never see those. Needs the CPU engine.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections import Counter
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lab.trace.model import Step
from lab.trace.stats import count

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

#: Some 370 tokens: three chunks of prefill, three blocks of KV cache.
LONG = "The fox and the hound went to the market, and there they met a baker. " * 22
LOOP = "ha ha ha ha ha ha ha ha"


async def metrics(http: httpx.AsyncClient) -> Counter[str]:
    """vLLM's counters of speculation, and preemptions, once they have stopped moving."""
    before: Counter[str] = Counter({"unread": 1})
    while True:
        found: Counter[str] = Counter()
        for family in text_string_to_metric_families((await http.get("/metrics")).text):
            for sample in family.samples:
                name = sample.name.removeprefix("vllm:").removesuffix("_total")
                if sample.name.endswith("_total") and name.startswith(("spec_decode_num", "num_preemptions")):
                    found[name.removeprefix("spec_decode_num_") + sample.labels.get("position", "")] += int(sample.value)
        if found == before:
            return found
        before = found
        await asyncio.sleep(0.3)


def assert_same(expected: Counter[str], steps: list[Step], k: int = 3) -> None:
    """The check: counts of the traces equal the engine's own, position by position."""
    counts = count(steps)
    assert counts.drafts == expected["drafts"]
    assert counts.draft_tokens == expected["draft_tokens"]
    assert counts.accepted == expected["accepted_tokens"]
    assert list(counts.accepted_at) == [expected[f"accepted_tokens_per_pos{position}"] for position in range(k)]


async def abort(client: Any, http: httpx.AsyncClient, trace: str) -> Any:
    """Leave in the middle of an answer."""
    following = asyncio.create_task(client.steps(http, trace))
    body = client.body("Once upon a time", trace, max_tokens=600, ignore_eos=True, stream=True)
    async with http.stream("POST", "/v1/completions", json=body) as response:
        chunks = 0
        async for line in response.aiter_lines():
            chunks += line.startswith("data: ")
            if chunks == 5:
                break
    return await asyncio.wait_for(following, 300)


@pytest.fixture(scope="module")
def run(client: Any) -> dict[str, Any]:
    """One busy minute: concurrent requests of all kinds, their traces, and the counters before and after."""
    one = uuid.uuid4().hex
    plans: dict[str, tuple[str, dict[str, Any]]] = {
        "plain": ("Q: What is the capital of France?\nA:", {"max_tokens": 48}),
        "loop": (LOOP, {"max_tokens": 200, "ignore_eos": True}),
        **{f"cut-{n}": (LOOP, {"max_tokens": n, "ignore_eos": True}) for n in (5, 6, 7, 8)},
        "long": (LONG, {"max_tokens": 60, "ignore_eos": True}),
        "long-too": ("Read this. " + LONG, {"max_tokens": 60, "ignore_eos": True}),
        "long-again": ("And this. " + LONG, {"max_tokens": 100, "ignore_eos": True}),
        "sampled": ("Write a story about rain.", {"max_tokens": 60, "temperature": 0.8, "seed": 1, "ignore_eos": True}),
        "two": ("Dogs and cats", {"max_tokens": 40, "n": 2, "temperature": 1.0, "seed": 3, "ignore_eos": True}),
        "emoji": ("Repeat: 🦊🦊🦊🦊🦊🦊🦊🦊🦊🦊", {"max_tokens": 40, "ignore_eos": True}),
        "single": ("a", {"max_tokens": 3, "ignore_eos": True}),  # one token: vLLM pads its first step with draft ids of -1
        "code": ("def fibonacci(n):\n", {"max_tokens": 60, "ignore_eos": True}),
        "stop-string": ("1 2 3 4 5 6 7 8 9 10 11 12 13 14 15", {"max_tokens": 100, "stop": ["24"], "ignore_eos": True}),
    }

    async def scene() -> dict[str, Any]:
        async with client.http() as http:
            before = await metrics(http)
            pairs = [client.traced(http, prompt, f"{name}-{one}", **settings) for name, (prompt, settings) in plans.items()]
            *found, aborted = await asyncio.gather(*pairs, abort(client, http, f"abort-{one}"))
            after = await metrics(http)
        traces = {name: trace for name, (trace, _) in zip(plans, found, strict=True)}
        return {
            "id": one,
            "traces": {**traces, "abort": aborted},
            "answers": {name: answer for name, (_, answer) in zip(plans, found, strict=True)},
            "expected": after - before,
            "steps": [step for trace in (*traces.values(), aborted) for step in trace.steps],
        }

    return asyncio.run(scene())


def test_counts_equal_the_engines_own(run: dict[str, Any]) -> None:
    assert run["expected"]["drafts"] > 200
    assert run["expected"]["accepted_tokens"] > 50
    assert_same(run["expected"], run["steps"])
    assert all(trace.dropped == 0 for trace in run["traces"].values())


def test_every_step_says_where_its_time_went(run: dict[str, Any]) -> None:
    for step in run["steps"]:
        assert step.verify_s is not None
        parts = (step.verify_s, step.accept_s, step.draft_s)
        assert min(parts) >= 0
        assert step.verify_s > 0
        # Parts of one step, by another clock: together they cannot be longer than it.
        assert sum(parts) <= step.ended - step.started + 0.002
    assert all(step.draft_s > 0 for step in run["steps"] if step.draft and step.finish is None)


@pytest.mark.parametrize("fault", ["one accepted too many", "one too few", "a step lost", "a step twice", "another position"])
def test_the_check_can_fail(run: dict[str, Any], fault: str) -> None:
    steps = list(run["steps"])
    at, other = [i for i, step in enumerate(steps) if step.draft and step.accepted == 1][:2]
    step = steps[at]
    more = msgspec.structs.replace(step, sampled=(*step.sampled, 0))
    fewer = msgspec.structs.replace(step, sampled=step.sampled[1:])
    if fault == "one accepted too many":
        steps[at] = more
    elif fault == "one too few":
        steps[at] = fewer
    elif fault == "a step lost":
        del steps[at]
    elif fault == "a step twice":
        steps.append(step)
    else:  # the totals stay, the positions do not
        steps[at], steps[other] = more, msgspec.structs.replace(steps[other], sampled=steps[other].sampled[1:])
    with pytest.raises(AssertionError):
        assert_same(run["expected"], steps)


def test_the_run_was_hard(run: dict[str, Any]) -> None:
    """Chunked prefill, mixed batches, preemption and its second prefill, cuts: all happened."""
    steps = run["steps"]
    assert any(step.phase == "prefill" and not step.sampled and step.scheduled > 1 for step in steps)
    assert any(step.phase == "decode" and step.batch_tokens > 4 * step.batch_requests for step in steps)
    assert any(step.batch_requests >= 6 for step in steps)
    assert run["expected"]["num_preemptions"] > 0
    assert any(step.phase == "prefill" and step.index > 5 and step.context == 0 for step in steps)
    assert any(step.kept < len(step.sampled) for step in steps)


def test_each_trace_is_its_own_request(run: dict[str, Any]) -> None:
    for name, trace in run["traces"].items():
        assert {step.trace for step in trace.steps} == {f"{name}-{run['id']}"}
        assert set(trace.prompts) == set(trace.ends) == {step.request for step in trace.steps}
        assert len(trace.prompts) == (2 if name == "two" else 1)
    requests = [request for trace in run["traces"].values() for request in trace.prompts]
    assert len(requests) == len(set(requests))


def test_the_answer_is_what_the_steps_kept(run: dict[str, Any]) -> None:
    for name, answer in run["answers"].items():
        trace = run["traces"][name]
        if name == "stop-string":
            continue
        wanted = sorted(choice["token_ids"] for choice in answer["choices"])
        assert sorted(trace.output(request) for request in trace.prompts) == wanted, name
        assert all(ids == choice["prompt_token_ids"] for ids in trace.prompts.values() for choice in answer["choices"][:1])
        assert sorted(trace.ends.values()) == sorted(choice["finish_reason"] for choice in answer["choices"])


def test_steps_fit_together(run: dict[str, Any]) -> None:
    """Each step starts where the one before left the KV cache, and says true things about itself."""
    for trace in run["traces"].values():
        for request, prompt in trace.prompts.items():
            steps = [step for step in trace.steps if step.request == request]
            assert [step.index for step in steps] == list(range(len(steps)))
            computed = known = 0
            known = len(prompt)
            for step in steps:
                if step.context != computed:
                    assert step.context == 0  # preempted: its cache was given away
                computed = step.context + step.scheduled
                if step.draft and step.sampled:
                    computed -= len(step.draft) - step.accepted
                    assert step.sampled[: step.accepted] == step.draft[: step.accepted]
                known += step.kept
                assert bool(step.sampled) == (step.context + step.scheduled - len(step.draft) >= known - step.kept)
                assert step.started <= step.ended
                assert 1 <= step.batch_requests <= 12
                assert step.scheduled <= step.batch_tokens <= 160
                assert step.phase == "decode" or not step.draft or step.draft[0] == -1
            assert all(min(step.draft) >= 0 for step in steps[1:] if step.draft)
            assert all(one.ended <= two.started for one, two in itertools.pairwise(steps))
            assert all(step.finish is None for step in steps[:-1])


def test_probabilities_come_with_every_draft_token(run: dict[str, Any]) -> None:
    drafted = [step for step in run["steps"] if step.draft]
    drafted = [step for step in drafted if step.draft[0] >= 0]
    assert all(step.draft_probs is not None and len(step.draft_probs) == len(step.draft) for step in drafted)
    assert all(0 < p <= 1.0001 for step in drafted for p in step.draft_probs or ())
    sure = [p for s in drafted for p, mark in zip(s.draft_probs or (), s.draft_marks(), strict=True) if mark == "accepted"]
    unsure = [p for s in drafted for p, mark in zip(s.draft_probs or (), s.draft_marks(), strict=True) if mark == "rejected"]
    assert sum(sure) / len(sure) > sum(unsure) / len(unsure) + 0.05


def test_pieces_are_real_bytes_and_come_first(run: dict[str, Any]) -> None:
    for name, trace in run["traces"].items():
        assert not trace.early
        if name in run["answers"] and name != "stop-string":
            for request in trace.prompts:
                shown = [trace.pieces[token] for token in trace.output(request)]
                text = b"".join(piece for piece in shown if not piece.startswith(b"<|")).decode(errors="replace")
                texts = [choice["text"] for choice in run["answers"][name]["choices"]]
                assert any(text.rstrip("\ufffd").startswith(t.rstrip("\ufffd")) for t in texts), (name, text, texts)
    emoji = run["traces"]["emoji"]
    fox = "🦊".encode()
    (prompt,) = emoji.prompts.values()
    assert fox in b"".join(emoji.pieces[token] for token in prompt)
    assert any(0 < len(emoji.pieces[token]) < len(fox) and emoji.pieces[token] in fox for token in prompt)


def test_a_cut_is_counted_and_shown(run: dict[str, Any]) -> None:
    lasts = []
    for length in (5, 6, 7, 8):
        steps = run["traces"][f"cut-{length}"].steps
        assert sum(step.kept for step in steps) == length
        lasts.append(steps[-1])
    assert all(last.finish == "length" for last in lasts)
    assert any(last.kept < len(last.sampled) for last in lasts)


def test_greedy_answers_do_not_depend_on_their_neighbours(run: dict[str, Any]) -> None:
    """Some of them have a temperature: vLLM's CPU path mixes that up unless `cpu_fixes` mends it."""
    assert run["answers"]["stop-string"]["choices"][0]["text"].strip().startswith("16 17 18 19 20 21 22 23")
    assert "Paris" in run["answers"]["plain"]["choices"][0]["text"]


def test_an_abort_ends_its_stream(run: dict[str, Any]) -> None:
    trace = run["traces"]["abort"]
    assert list(trace.ends.values()) == ["abort"]
    assert 1 < len(trace.steps) < 590
    assert trace.steps[-1].finish is None


def test_a_stop_string_is_an_abort_to_the_engine(run: dict[str, Any]) -> None:
    """The API server finds it in the text and aborts: the client reads "stop", the last kept tokens may lie past it."""
    trace, (choice,) = run["traces"]["stop-string"], run["answers"]["stop-string"]["choices"]
    assert choice["finish_reason"] == "stop", choice["text"]
    assert list(trace.ends.values()) == ["abort"]
    (request,) = trace.prompts
    text = b"".join(trace.pieces[token] for token in trace.output(request)).decode(errors="replace")
    assert text.startswith(choice["text"])
    assert "24" in text
    assert "24" not in choice["text"]


def test_a_request_that_does_not_ask_leaves_nothing(client: Any, run: dict[str, Any]) -> None:
    async def scene() -> None:
        async with client.http() as http:
            before = await metrics(http)
            body = client.body(LOOP, None, max_tokens=60, ignore_eos=True)
            other = client.traced(http, "Another", f"beside-{run['id']}", max_tokens=20, ignore_eos=True)
            answer, (trace, _) = await asyncio.gather(http.post("/v1/completions", json=body, headers={"X-Request-Id": "quiet"}), other)
            assert answer.status_code == 200
            expected = (await metrics(http)) - before
            assert len(trace.prompts) == 1
            assert "quiet" not in json.dumps(sorted(trace.prompts))
            assert expected["drafts"] > count(trace.steps).drafts > 0  # it did speculate
            with pytest.raises(TimeoutError):  # nothing to end, nothing to tell
                await asyncio.wait_for(client.steps(http, "quiet"), 1.5)

    asyncio.run(scene())


def test_late_and_repeated_readers_get_everything(client: Any, run: dict[str, Any]) -> None:
    async def scene() -> None:
        async with client.http() as http:
            late = await asyncio.gather(*(client.steps(http, f"code-{run['id']}") for _ in range(20)))
        assert all(trace == run["traces"]["code"] for trace in late)

    asyncio.run(scene())


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer", "sesame", "Basic sesame"])
def test_without_the_key_there_is_nothing(client: Any, run: dict[str, Any], header: str | None) -> None:
    async def scene() -> None:
        async with client.http(headers={"Authorization": header} if header else {}) as http:
            for path in (f"/v1/eagle3/steps?trace=code-{run['id']}", "/v1/eagle3/info", "//v1/eagle3/info"):
                response = await http.get(path)
                assert response.status_code in (401, 404)
                assert "trace" not in response.text

    asyncio.run(scene())


def test_info_and_bad_questions(client: Any) -> None:
    async def scene() -> None:
        async with client.http() as http:
            info = (await http.get("/v1/eagle3/info")).json()
            assert info["tracing"] == {"on": True, "reason": ""}
            assert info["draft_probs"] == {"on": True, "reason": ""}
            assert set(info) == {"plugin", "vllm", "tracing", "draft_probs"}
            assert (await http.get("/v1/eagle3/steps")).status_code == 400
            assert (await http.post("/v1/eagle3/steps?trace=x")).status_code == 405

    asyncio.run(scene())
