"""The race over small real HTTP servers: whose turn it is, what Stop leaves, who dies, and what the lines say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lab import recipes
from lab.bench import race
from lab.bench.prompts import Prompt
from lab.bench.race import Line, Plan, Race, Racer
from lab.errors import LabError
from lab.serving.command import Lane
from lab.serving.endpoint import Endpoint, LaneStatus, Progress
from lab.serving.metrics import Snapshot

Serve = Callable[[Any], Endpoint]
PROMPTS = tuple(Prompt(f"p{number}", "chat", "hello") for number in range(5))


def racers(serve: Serve, *engines: Any) -> list[Racer]:
    kinds = ["none", "bf16", "fp8"]
    return [Racer(f"lane {n}", kinds[n], serve(engine)) for n, engine in enumerate(engines)]  # type: ignore[arg-type]


def overlaps(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> int:
    return sum(a[0] < b[1] and b[0] < a[1] for a in one for b in other)


def test_lanes_of_one_machine_take_turns_in_balanced_order(serve: Serve, fake: Any) -> None:
    engines = fake(), fake(chunk=3)
    found = Race(racers(serve, *engines), Plan(PROMPTS, rounds=4, max_tokens=24), rest=0)
    asyncio.run(found.run())
    assert found.over
    assert [sorted(one) for one in found.rounds] == [[0, 1]] * 4
    assert overlaps(engines[0].spans, engines[1].spans) == 0
    measured = sorted([(span[0], lane) for lane, engine in enumerate(engines) for span in engine.spans[2:]])
    order = [lane for _, lane in measured]
    pairs = [tuple(order[n : n + 2]) for n in range(0, 8, 2)]
    assert all(second == first[::-1] for first, second in zip(pairs[::2], pairs[1::2], strict=True))
    ratio = found.speedup(1)
    assert ratio is not None
    assert ratio.pairs == 4
    assert 0 < ratio.pooled.low <= ratio.pooled.value <= ratio.pooled.high
    assert found.speedup(0) is None
    assert found.identical(1) == (4, 4)
    asked = [[body["messages"][0]["content"] for body in engine.seen] for engine in engines]
    assert asked[0] == asked[1]


def test_lanes_on_machines_of_their_own_run_side_by_side(serve: Serve, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "HERE", ())
    engines = fake(), fake()
    engines[0].beside, engines[1].beside = engines[1], engines[0]  # side by side they are, however late a request comes on a busy machine
    one, two = racers(serve, *engines)
    two = replace(two, endpoint=replace(two.endpoint, url=two.endpoint.url.replace("127.0.0.1", "localhost")))
    found = Race([one, two], Plan(PROMPTS, rounds=3), rest=0)
    asyncio.run(found.run())
    assert len(found.rounds) == 3
    assert overlaps(engines[0].spans[2:], engines[1].spans[2:]) >= 3


def test_stop_keeps_whole_rounds_and_nothing_else(serve: Serve, fake: Any) -> None:
    engines = fake(pause=0.004), fake(pause=0.004)
    found = Race(racers(serve, *engines), Plan(PROMPTS, rounds=200), rest=0)

    async def stopped() -> None:
        task = asyncio.create_task(found.run())
        while len(found.rounds) < 2 or found.now != {1}:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(stopped())
    assert len(found.rounds) >= 2
    assert all(sorted(one) == [0, 1] for one in found.rounds)
    assert found.speedup(1) is not None
    assert found.now == set()
    assert not found.over
    summary = found.summary()
    assert summary["rounds"] == len(found.rounds)
    assert summary["lanes"][1]["turns"]


def test_a_lane_that_dies_leaves_with_its_reason_and_the_others_go_on(serve: Serve, fake: Any) -> None:
    engines = fake(), fake(), fake(chunk=2)
    found = Race(racers(serve, *engines), Plan(PROMPTS, rounds=6), rest=0)

    async def kill() -> None:
        task = asyncio.create_task(found.run())
        while len(found.rounds) < 2:
            await asyncio.sleep(0.002)
        engines[1].fault = "break"
        await task

    asyncio.run(kill())
    assert found.active == [0, 2]
    assert "stream ended early" in str(found.out[1])
    assert len(found.rounds) == 6
    dead, alive = found.speedup(1), found.speedup(2)
    assert dead is not None
    assert alive is not None
    assert (dead.pairs < 6, alive.pairs) == (True, 6)
    assert found.summary()["lanes"][1]["out"]


def test_a_race_of_one_ends(serve: Serve, fake: Any) -> None:
    found = Race(racers(serve, fake(), fake(fault="refuse")), Plan(PROMPTS, rounds=5), rest=0)
    asyncio.run(found.run())
    assert found.over
    assert found.rounds == []
    assert "fewer than two" in found.stage
    assert "404" in str(found.out[1])
    assert found.rate(0) is None
    assert found.speedup(1) is None


def test_a_server_that_others_use_is_said_to_be_shared(serve: Serve, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = fake(), fake()
    found = Race(racers(serve, *engines), Plan(PROMPTS, rounds=2), rest=0)
    asyncio.run(found.run())
    assert found.shared == set()
    stock = race.Client.round

    async def with_company(self: Any, prompts: Any, concurrency: int) -> Any:
        engines[1].generated += 5
        return await stock(self, prompts, concurrency)

    monkeypatch.setattr(race.Client, "round", with_company)
    again = Race(found.racers, Plan(PROMPTS, rounds=2), rest=0)
    asyncio.run(again.run())
    assert 1 in again.shared


def test_lines_come_from_the_counters_over_the_lanes_own_time(serve: Serve, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "HERTZ", 50.0)
    engines = fake(pause=0.01), fake(pause=0.01, chunk=2)
    found = Race(racers(serve, *engines), Plan(PROMPTS, rounds=3, concurrency=2), rest=0)
    asyncio.run(found.run())
    for place, line in enumerate(found.lines):
        asked = sum(one[place].all_tokens for one in found.rounds)
        assert line.tokens == asked == len(engines[place].ids) * 4 * 3
        assert [sample.at for sample in line.samples] == sorted(sample.at for sample in line.samples)
        assert line.samples[-1].at == pytest.approx(line.seconds)
        assert max(sample.running for sample in line.samples if sample.running is not None) == 2
    assert found.lines[1].length == 2.0, "each chunk of two is a draft with one accepted token"
    assert found.lines[1].samples[-1].length == 2.0


def shot(at: float, tokens: int, drafts: int = 0, accepted: int = 0) -> Snapshot:
    return Snapshot(at, generation_tokens=tokens, drafts=drafts, accepted_tokens=accepted, running=1)


def test_a_point_is_averaged_over_the_window_across_turns() -> None:
    line = Line()
    line.begin(shot(0, 0))
    for second in range(1, 5):
        line.add(shot(second, 10 * second))
    line.begin(shot(100, 1040))  # the turn of another lane, in which somebody else had a thousand tokens
    line.add(shot(101, 1070))
    assert [sample.at for sample in line.samples] == [1, 2, 3, 4, 5]
    assert [sample.rate for sample in line.samples] == [10, 10, 10, 10, 20]
    assert line.samples[0].length is None
    line.add(shot(100.5, 1080))  # an old reading
    line.add(shot(102, 3))  # another server
    assert len(line.samples) == 5


def test_what_cannot_be_compared_is_refused() -> None:
    recipe = recipes.get("smollm2")
    eager = Lane(recipe, "none", traced=False)
    for lanes, words in (
        ([eager], "at least two"),
        ([eager, eager], "are the same"),
        ([eager, Lane(recipe, "bf16", 3, compiled=True, traced=False)], "Eager and compiled"),
        ([eager, Lane(recipe, "bf16", 3, traced=True)], "Traced and untraced"),
        ([Lane(recipe, "bf16", k, traced=False) for k in range(1, 8)], "too many"),
    ):
        with pytest.raises(LabError, match=words):
            race.check(lanes)
    race.check([eager], elsewhere=1)
    remote = replace(recipe, remotes={"bf16": "http://gpu:8000"})
    race.check([eager, Lane(remote, "bf16", traced=True)])  # what a server elsewhere runs is not known here
    for bad in ({"concurrency": 0}, {"max_tokens": 0}, {"rounds": 0}, {"prompts": ()}):
        with pytest.raises(LabError):
            Plan(**{"prompts": PROMPTS, **bad})  # type: ignore[arg-type]


def test_lanes_that_do_not_fit_are_refused_before_any_starts() -> None:
    recipe = recipes.get("smollm2")
    lanes = [Lane(recipe, "none", traced=False), Lane(recipe, "bf16", 3, traced=False), Lane(recipe, "fp8", 3, traced=False)]
    two, three = 2 * recipe.memory_bytes + (600 << 20), 3 * recipe.memory_bytes + (600 << 20)
    race.room(lanes, [], available=three)
    with pytest.raises(LabError, match="3 lanes do not fit into memory") as refused:
        race.room(lanes, [], available=two)
    assert "GB are free" in refused.value.why
    ready = LaneStatus(lanes[0], "ready", Progress("ready", "", 0.0), memory=recipe.memory_bytes)
    race.room(lanes, [ready], available=two)
    idle = LaneStatus(Lane(recipe, "bf16", 5), "ready", Progress("ready", "", 0.0), memory=recipe.memory_bytes)
    race.room(lanes, [idle], available=two)
    with pytest.raises(LabError, match="do not fit"):
        race.room(lanes, [replace(idle, in_use=1)], available=two)
    with pytest.raises(LabError, match="accelerator"):
        race.room(lanes[:2], [], available=three, most=1)
