"""The page's parts that need no browser: settings, the registry, the feed, the runner, the meter and the comparison."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lab import recipes
from lab.errors import LabError
from lab.serving.command import Lane
from lab.serving.metrics import Snapshot
from lab.trace.model import Alternative, Request, Step
from lab.ui import app, compare, runner
from lab.ui.feed import Feed, dump, whole
from lab.ui.live import Meter, paced
from lab.ui.numbers import Numbers, tiles
from lab.ui.state import Run, Runs, Settings

from .fakes import ANSWER, FakeEngine, steps_of

RECIPE = recipes.get("smollm2")
SETTINGS = Settings("hello", "bf16", 3, 0.0, 40)
LANE = SETTINGS.lane(RECIPE)


def run_of(engine: FakeEngine, settings: Settings = SETTINGS, *, stop_after: int | None = None) -> tuple[Run, list[runner.Status]]:
    """Follow one answer and give the run with every status on the way."""

    async def follow() -> tuple[Run, list[runner.Status]]:
        run, said = Runs().new(settings.lane(RECIPE), settings), []
        answer = runner.answer(engine, await engine.endpoint(settings.lane(RECIPE)), settings, run)
        async for status in answer:
            said.append(status)
            if stop_after is not None and len(run.request.steps) >= stop_after:
                break
        await answer.aclose()  # type: ignore[attr-defined]
        return run, said

    return asyncio.run(follow())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (("", "bf16", 3, 0, 9, False), "prompt is empty"),
        (("x", "int4", 3, 0, 9, False), "no draft 'int4'"),
        (("x", "bf16", None, 0, 9, False), "not a whole number"),
        (("x", "bf16", 2.5, 0, 9, False), "not a whole number"),
        (("x", "bf16", 0, 0, 9, False), "K = 0"),
        (("x", "bf16", 99, 0, 9, False), "K = 99"),
        (("x", "bf16", 3, -1, 9, False), "Temperature -1"),
        (("x", "bf16", 3, 0, 0, False), "0 new tokens"),
        (("x", "bf16", 3, None, 9, False), "Temperature is empty"),
        (("x", "bf16", 3, 0, None, False), "number of new tokens is empty"),
        (("x", "bf16", 3, float("nan"), 9, False), "Temperature nan"),
    ],
)
def test_settings_are_checked_in_words(values: tuple[Any, ...], words: str) -> None:
    with pytest.raises(LabError, match=words):
        Settings.of(RECIPE, *values)


def test_settings_without_a_draft_have_no_k() -> None:
    settings = Settings.of(RECIPE, "x", "none", 99, 0, 9, False)
    assert settings.k == 0
    assert settings.lane(RECIPE) == Lane(RECIPE, "none", 0, compiled=False, traced=True)


def test_the_registry_is_bounded_and_names_are_unguessable() -> None:
    runs = Runs(limit=3)
    names = [runs.new(LANE, SETTINGS).id for _ in range(5)]
    assert [runs.get(name) is not None for name in names] == [False, False, True, True, True]
    assert len(set(names)) == 5
    assert min(map(len, names)) >= 16
    with pytest.raises(LabError, match="nothing to save"):
        runs.trace(names[-1], None)


def records(value: str) -> list[dict[str, Any]]:
    assert value.endswith("\n")
    return [json.loads(line) for line in value.splitlines()]


def test_the_feed_only_grows_and_is_numbered() -> None:
    run = Run("id", Request(trace="t", lane="l", prompt="p"), "bf16", "label", {})
    feed = Feed(run)
    steps = steps_of("t", ANSWER, k=3, begin=0.0, pace=0.1, limit=30)
    before = feed.value
    for count in range(0, len(steps) + 1, 3):
        run.request.steps = steps[:count]
        value = feed.update()
        assert value.startswith(before)
        before = value
    run.request.steps, run.state = steps, "done"
    final = feed.update(final=True)
    found = records(final)
    assert [record["n"] for record in found] == list(range(len(found)))
    assert [record["i"] for record in found if record["t"] == "step"] == [step.index for step in steps]
    assert records(final)[1:] == records(whole(run))[1:]


def test_no_token_is_an_empty_chip() -> None:
    """SmolLM2 writes "❤️" as several tokens, the last of which only says that the heart is drawn as an emoji."""
    pieces = {1: "❤".encode().hex(), 2: "\ufe0f".encode().hex(), 3: "❤\ufe0f".encode().hex()}
    request = Request(trace="t", lane="l", prompt="p", pieces=pieces)
    request.steps = [Step(trace="t", request="r", index=0, phase="decode", started=0.0, ended=1.0, draft=(1, 2), sampled=(1, 2, 3), kept=3)]
    (step,) = [one for one in records(whole(Run("id", request, "bf16", "label", {}))) if one["t"] == "step"]
    assert [chip[3] for chip in step["chips"]] == [["❤"], ["", "[U+FE0F]"], ["❤\ufe0f"]]
    assert ["".join(word[4]) for word in step["out"]] == ["❤", "\ufe0f", "❤\ufe0f"], "the answer's text stays what it is"


def test_a_piece_that_comes_before_its_step_is_compared_once() -> None:
    runs = [Run(name, Request(trace=name, lane="l", prompt="p"), "bf16", "l", {}) for name in "ab"]
    feed = compare.BesideFeed(*runs)
    runs[1].chunks.append((" the", (5,)))
    feed.update()
    runs[1].request.steps = steps_of("t", ANSWER, k=3, begin=0.0, pace=0.1, limit=10)[:2]
    feed.update()
    runs[1].request.steps = steps_of("t", ANSWER, k=3, begin=0.0, pace=0.1, limit=10)
    found = [(record["anew"], len(record["list"])) for record in records(feed.update()) if record["t"] == "tokens"]
    assert [anew for anew, _ in found] == [False, True, False]
    assert sum(count for _, count in found[1:]) == 10


def test_the_feed_is_inert_inside_markup() -> None:
    line = dump({"text": "</script><script>alert(1)</script>\u2028"})
    assert "<" not in line
    assert "\u2028" not in line
    assert json.loads(line)["text"].startswith("</script>")


def test_numbers_are_those_of_the_trace() -> None:
    steps = steps_of("t", ANSWER, k=3, begin=5.0, pace=0.1, limit=60)
    numbers = Numbers()
    for step in steps:
        numbers.add(step)
    decode = [step for step in steps if step.draft]
    assert numbers.passes == len(decode) == len(steps) - 1
    assert numbers.decoded == 59
    assert len(numbers.confidence) == sum(min(step.accepted + 1, 3) for step in decode)
    assert numbers.speed == pytest.approx(60 / (0.1 * len(steps)))
    shown = {name: value for name, value, _ in tiles(numbers, Request(trace="t", lane="l", prompt="p", steps=steps, dropped=2))}
    assert shown["target passes saved"] == f"{(59 - len(decode)) / 59:.0%}"
    why = tiles(numbers, Request(trace="t", lane="l", prompt="p", steps=steps, dropped=2))[0][2]
    assert "Incomplete: 2 steps were lost" in why


def test_a_run_ends_done_with_everything() -> None:
    engine = FakeEngine(RECIPE, pace=0.005)
    run, said = run_of(engine)
    assert run.state == "done"
    assert list(run.output_ids()) == run.ids == ANSWER[:40]
    assert run.output_speed() == pytest.approx(40 / run.request.elapsed)  # type: ignore[operator]
    assert run.request.settings["k"] == 3
    assert said[0].level == "busy"
    assert runner.summary(run).text.startswith("Done: Eagle3 BF16, K=3, eager: 40 tokens")


def test_a_closed_run_aborts_the_request_and_keeps_its_steps() -> None:
    engine = FakeEngine(RECIPE, pace=0.05)
    run, _ = run_of(engine, stop_after=3)
    assert (run.state, engine.closed) == ("stopped", 1)
    assert 3 <= len(run.request.steps) < 15


def test_a_server_that_dies_is_a_sentence_and_the_steps_stay() -> None:
    engine = FakeEngine(RECIPE, pace=0.005, fail_after=4)

    async def follow() -> Run:
        run = Runs().new(LANE, SETTINGS)
        with pytest.raises(LabError, match=r"broke off\. the engine process ended"):
            async for _ in runner.answer(engine, await engine.endpoint(LANE), SETTINGS, run):
                pass
        return run

    run = asyncio.run(follow())
    assert (run.state, len(run.request.steps)) == ("failed", 4)


def test_waiting_says_what_happens_and_a_cancelled_wait_ends() -> None:
    engine = FakeEngine(RECIPE, start=60)

    async def follow() -> list[runner.Status]:
        box: list[Any] = []
        said = []
        async for status in runner.wait_ready(engine, LANE, box):
            said.append(status)
            if status.detail and (status.elapsed or 0.0) > 0.3:
                engine.start = 0.0  # it has been seen to start, however late a busy machine showed it
        assert box[0].lane == LANE
        waiting = runner.wait_ready(FakeEngine(RECIPE, start=60), LANE, [])
        await anext(waiting)
        await waiting.aclose()  # type: ignore[attr-defined]
        assert len(asyncio.all_tasks()) == 1
        return said

    said = asyncio.run(follow())
    assert all(status.text == "Starting Eagle3 BF16, K=3, eager" for status in said)
    assert said[-1].detail.startswith("loading weights")
    assert said[-1].elapsed is not None
    assert said[-1].elapsed > 0.3


def test_an_error_keeps_the_log_for_whoever_wants_it() -> None:
    status = runner.Status.error(LabError("It failed.", why="line 1\nline 2", todo="Press Restart."))
    assert (status.text, status.detail, status.more) == ("It failed.", "Press Restart.", ["line 1\nline 2", "Press Restart."])
    assert runner.Status.error(LabError("It failed.", why="Because.")).text == "It failed. Because."


def test_batches_come_at_a_pace_and_errors_after_the_last() -> None:
    closed = []

    async def source() -> AsyncIterator[int]:
        try:
            for number in range(6):
                yield number
                await asyncio.sleep(0.03)
            raise LabError("end")
        finally:
            closed.append(True)

    async def follow() -> list[list[int]]:
        found = []

        async def take() -> None:
            async for batch in paced(source(), 0.3):
                found.append(batch)

        with pytest.raises(LabError, match="end"):
            await take()
        early = paced(source(), 0.01)
        await anext(early)
        await early.aclose()  # type: ignore[attr-defined]
        assert len(asyncio.all_tasks()) == 1
        return found

    found = asyncio.run(follow())
    assert [number for batch in found for number in batch] == list(range(6))
    assert len(found) < 6
    assert closed == [True, True]


def test_the_meter_reads_the_rate_and_survives_trouble() -> None:
    began = time.time()
    calls = 0

    async def scrape() -> Snapshot:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise LabError("busy")
        now = time.time()
        return Snapshot(time=now, generation_tokens=round((now - began) * 1000))

    async def follow() -> Meter:
        async with Meter(scrape, period=0.05, window=0.2) as meter:
            while len(meter.points) < 10 and time.time() < began + 60:
                await asyncio.sleep(0.05)
        return meter

    meter = asyncio.run(follow())
    assert meter.trouble is not None
    assert len(meter.points) >= 5
    assert [rate for _, rate in meter.points] == pytest.approx([1000] * len(meter.points), rel=0.1)


def test_what_a_margin_means() -> None:
    runs = [Run(name, Request(trace=name, lane="l", prompt="p"), "none", "l", {}, ids=ids) for name, ids in (("a", [1, 2]), ("b", [1, 3]))]
    runs[1].request.pieces = {3: b" cat".hex()}

    def tie(gap: float, other: str, threshold: float | None, single: bool = False) -> str:
        best = [Alternative(text=" dog", logprob=-0.5), Alternative(text=other, logprob=-0.5 - gap)]
        said = compare.BesideFeed(*runs).verdict([], sampled=False, found=(gap, best), threshold=threshold, single=single)
        return str(records(said)[-1]["tie"])

    assert "a near-tie (up to 0.125 nats, one step of BF16" in tie(0.1, " cat", None)
    assert "more than a near-tie" in tie(0.2, " cat", None)
    assert "a near-tie (up to 0.250 nats, measured" in tie(0.2, " cat", 0.25)
    assert "took neither" in tie(0.0, " cow", 0.25)
    assert "more than a near-tie (up to 0.001 nats, a bound for float32" in tie(0.1, " cat", None, single=True)
    assert "a near-tie (up to 1e-05 nats, measured" in tie(0.0, " cat", 1e-5, single=True)


def test_how_much_faster() -> None:
    assert compare.speed_up([(10, 20), (10, 30), (20, 20)]) == (2, 1, 3)
    assert compare.speed_up([]) is None
    best = [Alternative(text="b", logprob=-0.5), Alternative(text="c", logprob=-3), Alternative(text="a", logprob=-0.25)]
    gap, two = compare.margin([[], best], 1) or (None, [])
    assert gap == 0.25
    assert [one.text for one in two] == ["a", "b"]
    assert compare.margin([best[:1]], 0) is None


def test_a_busy_machine_is_said() -> None:
    assert compare.busy(4.5, 2) == ""
    assert "load 11 on 2 cores" in compare.busy(11.4, 2)


def test_a_comparison_without_ids_says_so() -> None:
    runs = [Run(name, Request(trace=name, lane="l", prompt="p"), "none", "l", {}) for name in "ab"]
    (verdict,) = [record for record in records(compare.BesideFeed(*runs).verdict([], sampled=False)) if record["t"] == "verdict"]
    assert (verdict["kind"], verdict["speedup"]) == ("unknown", None)


def test_sampled_answers_may_differ() -> None:
    runs = [Run(name, Request(trace=name, lane="l", prompt="p"), "none", "l", {}, ids=ids) for name, ids in (("a", [1, 2]), ("b", [1, 3]))]
    verdict = records(compare.BesideFeed(*runs).verdict([(1.0, 2.0)], sampled=True))[-1]
    assert (verdict["kind"], verdict["at"]) == ("different", 1)
    assert "temperature is above 0" in verdict["words"]


def test_a_taken_port_is_passed_by() -> None:
    import socket

    from lab.ui.build import HOST, free_port

    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert port < free_port(port) <= port + 100
        with pytest.raises(LabError, match="No free port"):
            free_port(port, tries=1)


def test_a_port_that_is_lost_at_the_last_moment_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs that start at once may find the same port free."""
    import socket

    import gradio as gr

    from lab.ui import build

    real = build.free_port
    with socket.socket() as taken:
        taken.bind((build.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(build, "free_port", lambda first, host: port if first == port else real(first, host=host))
        with gr.Blocks() as demo:
            gr.Markdown("here")
        try:
            url = build.launch(demo, port=port, block=False)
        finally:
            demo.close()
    assert port < int(url.rstrip("/").rpartition(":")[2]) <= port + 100


@pytest.mark.parametrize("host", ["::", "::1"])
def test_a_page_is_open_at_ipv6(host: str) -> None:
    import gradio as gr
    import httpx

    from lab.serving.process import port_is_free
    from lab.ui import build

    if not port_is_free(0, "::1"):  # a container without IPv6 may still let "::" be bound
        pytest.skip("this machine has no IPv6")
    with gr.Blocks() as demo:
        gr.Markdown("here")
    try:
        url = build.launch(demo, port=build.free_port(19_400, host=host), block=False, around=build.Around(host=host))
        assert url.startswith("http://[::1]:")
        assert httpx.get(url, trust_env=False).status_code == 200
    finally:
        demo.close()


def test_a_run_in_float32_says_so() -> None:
    """Its label says BF16, which is how the draft is stored. What a server elsewhere computes in is not known."""

    def line(dtype: str, **remotes: str) -> str:
        recipe = replace(RECIPE, flags=(("--dtype", dtype),), remotes=remotes)
        lane = Lane(recipe, "bf16", 3)
        assert lane.in_float32 == (dtype == "float32" and not remotes)
        value = app.about(SimpleNamespace(recipe=recipe), Run.of(lane, SETTINGS))  # type: ignore[arg-type]
        return str(json.loads(value)["line"])

    assert " · FP32" in line("float32")
    assert "FP32" not in line("bfloat16")
    assert "FP32" not in line("float32", bf16="http://127.0.0.1:9")
