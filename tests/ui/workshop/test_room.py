"""A room over the small engine: whose turn it is, who sees what, and what happens when the engine dies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from lab import recipes
from lab.errors import LabError
from lab.ui.workshop.desk import Desk
from lab.ui.workshop.preflight import Check, preflight, verdict
from lab.ui.workshop.room import Room
from lab.ui.workshop.scenario import parse
from lab.ui.workshop.seats import Ask, Seat
from lab.ui.workshop.stage import Stage

from .echo import Echo

TALK = parse(
    """
title = "Talk"
[[scene]]
title = "Hello"
say = "welcome"
[[scene]]
title = "Guess"
show = "guess"
prompt = "guess this"
step = 3
[[scene]]
title = "Plain"
show = "run"
prompt = "run this"
draft = "none"
""",
    "talk",
)


def engine(**changes: Any) -> Echo:
    return Echo(recipes.get("smollm2"), **{"pace": 0.002, **changes})


def run(test: Callable[[Room, Desk], Awaitable[None]], fake: Echo | None = None, **changes: Any) -> Echo:
    """Run `test` with a room that is ready."""
    fake = fake or engine()

    async def go() -> None:
        room = Room(fake.recipe, fake, **changes)
        desk = Desk(room, {"talk": TALK})
        await room.get_ready()
        try:
            await asyncio.wait_for(test(room, desk), 120)
        finally:
            await room.close()

    asyncio.run(go())
    return fake


async def over(room: Room, *seats: Seat) -> None:
    """Wait until nothing of these seats is in line or under way."""
    while any(room.me(seat)["state"] in ("line", "running") for seat in seats):
        await asyncio.sleep(0.01)


def test_everybody_gets_the_own_answer_in_turn() -> None:
    async def test(room: Room, _: Desk) -> None:
        seats = [room.sit(None) for _ in range(8)]
        for seat in seats:
            room.ask(seat, Ask(f"question {seat.number}"))
        assert [room.me(seat)["place"] for seat in seats] == [None, None, 1, 2, 3, 4, 5, 6]
        assert room.me(seats[4])["text"] == "You are 3rd in line"
        await over(room, *seats)
        for seat in seats:
            view = room.view(seat)
            assert "".join(view["mine"]["prompt"]) == f"question {seat.number}"
            texts = {
                "".join(chip[3])
                for line in view["mine"]["lines"].splitlines()
                for record in [json.loads(line)]
                if record["t"] == "step"
                for chip in record["chips"]
            }
            assert texts == {f"question·{seat.number}"}
            others = json.dumps([room.view(other) for other in seats if other is not seat])
            assert f"question·{seat.number}" not in others

    fake = run(test, at_once=2)
    assert len(fake.requests) == 8


def test_never_more_at_once_than_allowed() -> None:
    most = 0

    class Counting(Echo):
        now = 0

        async def generate(self, *arguments: Any, **settings: Any) -> Any:
            nonlocal most
            self.now += 1
            most = max(most, self.now)
            try:
                async for event in super().generate(*arguments, **settings):
                    yield event
            finally:
                self.now -= 1

    async def test(room: Room, _: Desk) -> None:
        seats = [room.sit(None) for _ in range(9)]
        for seat in seats:
            room.ask(seat, Ask("x"))
        await over(room, *seats)

    run(test, Counting(recipes.get("smollm2"), pace=0.002), at_once=3)
    assert most == 3


def test_a_page_gets_only_what_it_lacks() -> None:
    async def test(room: Room, _: Desk) -> None:
        seat = room.sit(None)
        room.ask(seat, Ask("x"))
        await over(room, seat)
        whole = room.view(seat)["mine"]
        count = whole["lines"].count("\n")
        part = room.view(seat, run=whole["id"], lines=count - 2)["mine"]
        assert part["lines"] == "".join(line + "\n" for line in whole["lines"].splitlines()[-2:])
        assert room.view(seat, run="another", lines=5)["mine"]["from"] == 0

    run(test)


def test_stop_leaves_the_line_and_ends_the_answer() -> None:
    async def test(room: Room, _: Desk) -> None:
        first, second = room.sit(None), room.sit(None)
        room.ask(first, Ask("a"))
        room.ask(second, Ask("b"))
        while first.run is None or not first.run.request.text:
            await asyncio.sleep(0.01)
        room.stop(second)
        assert room.me(second)["state"] == "idle"
        room.stop(first)
        await over(room, first)
        assert room.view(first)["mine"]["state"] == "stopped"
        room.ask(second, Ask("c"))
        await over(room, second)
        assert room.view(second)["mine"]["state"] == "done"

    fake = run(test, engine(pace=0.05), at_once=1)
    assert fake.closed == 1


def test_bad_prompts_are_refused_in_words() -> None:
    async def test(room: Room, _: Desk) -> None:
        seat = room.sit(None)
        for prompt, said in (("", "empty"), (" \n", "empty"), ("x" * 2001, "2001 characters")):
            with pytest.raises(LabError, match=said):
                room.ask(seat, Ask(prompt))
        assert room.me(seat)["state"] == "idle"

    run(test)


def test_seats_are_bounded_and_busy_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.ui.workshop.room.MOST_SEATS", 5)

    async def test(room: Room, _: Desk) -> None:
        busy = room.sit(None)
        room.ask(busy, Ask("x"))
        for _ in range(20):
            room.sit(None)
        assert len(room.seats) == 5
        assert busy.number in room.seats
        assert room.sit(3).number == 3, "a seat that was forgotten comes back under its number"
        assert room.sit(None).number == 22
        await over(room, busy)

    run(test)


def test_the_engines_end_keeps_everything_and_plays_a_recording() -> None:
    async def test(room: Room, desk: Desk) -> None:
        assert await desk.act("run", {"prompt": "before"}) == "Running for all."
        await over(room, room.presenter)
        assert room.last_good is not None
        fake.fail_after = 4
        seats = [room.sit(None) for _ in range(3)]
        for seat in seats:
            room.ask(seat, Ask(f"q{seat.number}"))
        while room.health == "ready" or seats[0].task is not None:
            await asyncio.sleep(0.01)
        shown = room.view(seats[0])["stage"]
        assert shown["recording"].startswith("Recording of Eagle3 BF16, K=3, eager, made at ")
        assert shown["play"] is True
        assert [room.me(seat)["place"] for seat in seats] == [1, 2, 3]
        assert "while it answered you" in room.me(seats[0])["detail"]
        assert "the engine has stopped" in room.me(seats[1])["detail"]
        assert desk.view()["trouble"]
        await desk.act("restart", {})
        await over(room, *seats)
        assert [room.view(seat)["mine"]["state"] for seat in seats] == ["done"] * 3

    fake = engine()
    run(test, fake, at_once=1)


def test_without_any_recording_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.ui.workshop.room.shipped", lambda _: None)

    async def test(room: Room, _: Desk) -> None:
        room.fall_back(room.lane)
        stage = room.view(room.screen)["stage"]
        assert "no recording" in "".join(stage["say"])

    run(test)


def test_a_dead_lane_is_noticed_while_nobody_asks() -> None:
    async def test(room: Room, _: Desk) -> None:
        room.spawn(room.watch())
        monkey.setattr(room, "lane_state", lambda _: "dead")
        for _ in range(400):
            if room.health == "down":
                return
            await asyncio.sleep(0.05)
        raise AssertionError("not noticed")

    with pytest.MonkeyPatch.context() as monkey:
        run(test)


def test_attendees_text_is_shown_only_after_a_look() -> None:
    secret = "the secret <b>words</b>"

    async def test(room: Room, desk: Desk) -> None:
        seat, other = room.sit(None), room.sit(None)
        with pytest.raises(LabError, match="no finished answer"):
            room.offer(seat)
        room.ask(seat, Ask(secret))
        await over(room, seat)
        assert desk.view()["offers"] == [], "nothing is offered by itself"
        room.offer(seat)
        room.offer(seat)
        (offer,) = desk.view()["offers"]
        assert secret not in json.dumps(desk.view())
        with pytest.raises(LabError, match="Look at it first"):
            await desk.act("allow", {"offer": offer["id"]})
        assert room.stage.kind == "empty"
        await desk.act("look", {"offer": offer["id"]})
        assert "".join(desk.view()["offers"][0]["prompt"]) == secret
        assert secret not in json.dumps(room.view(other))
        await desk.act("allow", {"offer": offer["id"]})
        assert "".join(room.view(other)["stage"]["prompt"]) == secret
        await desk.act("refuse", {"offer": offer["id"]})
        assert desk.view()["offers"] == []

    run(test)


def test_a_talk_from_beginning_to_reset() -> None:
    async def test(room: Room, desk: Desk) -> None:
        seats = [room.sit(None) for _ in range(3)]
        assert "scene 1 of 3" in await desk.act("scene", {"scenario": "talk", "at": 1})
        assert "".join(room.view(seats[0])["stage"]["say"]) == "welcome"
        await desk.act("scene", {"scenario": "talk", "at": 2})
        while room.stage.game is None:
            assert "lines" not in room.view(seats[0])["stage"], "the run that is guessed about is not shown"
            await asyncio.sleep(0.01)
        game = room.stage.game
        for seat, accept in zip(seats, (True, True, False), strict=True):
            room.guess(seat, game.id, accept)
        assert desk.view()["tally"] == {"accept": 2, "reject": 1}
        assert room.view(seats[0])["stage"]["game"]["votes"] == 3
        with pytest.raises(LabError, match="no longer on the stage"):
            room.guess(seats[0], "old", True)
        said = await desk.act("reveal", {})
        assert said.endswith(f"{2 if game.truth else 1} of 3 were right.")
        assert [room.me(seat)["right"] for seat in seats] == [int(game.truth), int(game.truth), int(not game.truth)]
        with pytest.raises(LabError, match="nothing to reveal"):
            await desk.act("reveal", {})
        await desk.act("scene", {"scenario": "talk", "at": 3})
        assert room.lane.draft == "none"
        while room.stage.run is None or room.stage.run.state != "done":
            await asyncio.sleep(0.01)
        await desk.act("reset", {})
        assert (room.stage.kind, room.lane.draft, desk.view()["scenario"]) == ("empty", "bf16", None)
        assert room.me(seats[0])["played"] == 0

    run(test)


def test_pushing_a_trace_and_one_step_of_it() -> None:
    async def test(room: Room, desk: Desk) -> None:
        seat = room.sit(None)
        await desk.act("run", {"prompt": "p"})
        await over(room, room.presenter)
        run_id = room.presenter.run.id if room.presenter.run else ""
        version = seat.version
        waiting = asyncio.create_task(room.changed(seat, version, 20))
        await asyncio.sleep(0)
        await desk.act("push", {"run": run_id, "step": 4})
        await asyncio.wait_for(waiting, 10)
        stage = room.view(seat)["stage"]
        assert (stage["kind"], stage["focus"], stage["recording"]) == ("trace", 4, "")
        assert '"t":"state"' in stage["lines"]
        assert room.view(seat, stage=stage["id"], stage_lines=stage["lines"].count("\n"))["stage"]["lines"] == ""
        for bad in ({"run": run_id, "step": 999}, {"run": "none"}, {"run": 5}, {"run": run_id, "step": True}):
            with pytest.raises(LabError):
                await desk.act("push", bad)
        for bad in ({"run": run_id}, {"run": run_id, "step": 0}, {"run": run_id, "step": "1"}, {"run": run_id, "step": 3, "position": 9}):
            with pytest.raises(LabError):
                await desk.act("freeze", bad)
        assert room.stage.id == stage["id"], "a refused act changes nothing"

    run(test)


@pytest.mark.parametrize(
    ("act", "values"),
    [
        ("lane", {"draft": "int4", "k": 3}),
        ("lane", {"draft": "bf16", "k": 99}),
        ("lane", {"draft": "bf16", "k": "3"}),
        ("lane", {}),
        ("scene", {"scenario": "nope"}),
        ("scene", {"scenario": "talk", "at": 9}),
        ("scene", {"scenario": "talk", "at": True}),
        ("look", {"offer": {}}),
        ("run", {"prompt": ["x"]}),
        ("__init__", {}),
        ("view", {}),
    ],
)
def test_the_desk_refuses_nonsense_in_words(act: str, values: dict[str, Any]) -> None:
    async def test(room: Room, desk: Desk) -> None:
        before = room.lane, room.stage.id
        with pytest.raises(LabError):
            await desk.act(act, values)
        assert (room.lane, room.stage.id) == before

    run(test)


def test_another_lane_is_used_from_the_next_prompt_on() -> None:
    async def test(room: Room, desk: Desk) -> None:
        seat = room.sit(None)
        assert await desk.act("lane", {"draft": "fp8", "k": 5}) == "The room uses Eagle3 FP8, K=5, eager."
        room.ask(seat, Ask("x"))
        await over(room, seat)
        assert seat.run is not None
        assert seat.run.label == "Eagle3 FP8, K=5, eager"

    run(test)


def test_the_preflight_names_what_is_missing() -> None:
    async def go(fake: Echo) -> list[Check]:
        checks: list[Check] = []
        async for _ in preflight(fake, fake.recipe, checks):
            pass
        return checks

    good = asyncio.run(go(engine()))
    assert [check.state for check in good] == ["good"] * 4
    assert verdict(good) == (True, "Ready: every lane answered.")
    bad = asyncio.run(go(engine(fail_start=True)))
    assert [check.state for check in bad] == ["bad", "good", "good"]
    assert "did not start" in bad[0].text
    assert verdict(bad) == (False, "Not ready: Eagle3 BF16, K=3, eager.")
    assert not verdict([])[0]


def test_the_preflight_opens_the_room_and_leaves_a_recording() -> None:
    async def test(room: Room, desk: Desk) -> None:
        room.health = "cold"
        await desk.preflight()
        assert room.health == "ready"
        assert room.last_good is not None
        assert [check["state"] for check in desk.view()["checks"]] == ["good"] * 4
        room.show(Stage())

    run(test)


def test_what_is_stopped_before_its_first_step_keeps_no_place() -> None:
    """A task that is cancelled then runs nothing, so nothing in it can give back the seat and the place at the engine."""

    async def test(room: Room, _: Desk) -> None:
        seat = room.sit(None)
        room.ask(seat, Ask("never begun"))
        room.stop(seat)
        await over(room, seat)
        assert (room.line.running, seat.task) == ([], None)
        room.ask(seat, Ask("begun"))
        await over(room, seat)
        assert seat.run is not None
        assert seat.run.state == "done"

    assert len(run(test, at_once=1).requests) == 1


@pytest.mark.parametrize("fails", [False, True], ids=["stopped", "failed"])
def test_what_ends_while_its_engine_starts_is_over(fails: bool) -> None:
    """Else every page would wait for more of it, four times a second."""

    async def test(room: Room, desk: Desk) -> None:
        fake.start, fake.fail_start = 60.0, fails
        fake.ready.clear()
        desk.run({"prompt": "for all"})
        while room.presenter.said is None or not room.presenter.said.text.startswith("Starting"):
            await asyncio.sleep(0.01)
        assert room.stage.kind == "trace"
        shown = room.stage.run
        assert shown is not None
        if fails:
            fake.start = 0.0
        else:
            room.stop(room.presenter)
        while room.presenter.task is not None:
            await asyncio.sleep(0.01)
        assert shown.state == ("failed" if fails else "stopped")
        if not fails:
            assert room.presenter.said.text.startswith("Stopped")
            assert not room.stage.update()

    fake = engine()
    run(test, fake)


def test_a_scene_that_comes_late_does_not_take_the_stage() -> None:
    async def test(room: Room, desk: Desk) -> None:
        await desk.act("scene", {"scenario": "talk", "at": 2})
        while not room.line.running:
            await asyncio.sleep(0.01)
        await desk.act("scene", {"scenario": "talk", "at": 1})
        await over(room, room.presenter)
        assert (room.stage.kind, room.stage.title) == ("say", "Hello")

    run(test, engine(pace=0.01))
