"""The presenter's desk: what only the presenter may do, as named acts, and what only the presenter sees. No gradio, no HTTP.

`Desk.act` takes a name and the values that came with it; whether it was the presenter who sent them was decided at the door. Every act that
cannot be done raises the `LabError` that says why, and changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from lab.errors import LabError
from lab.serving.command import Lane
from lab.trace.render import visible
from lab.ui.state import Run
from lab.ui.workshop.guess import Game
from lab.ui.workshop.line import ordinal
from lab.ui.workshop.preflight import Check, preflight, verdict
from lab.ui.workshop.room import Room
from lab.ui.workshop.scenario import Scenario, Scene
from lab.ui.workshop.seats import Ask, Offer
from lab.ui.workshop.stage import Stage

#: Characters of an attendee's prompt and answer that a look shows.
LOOK = 600


class Desk:
    """The presenter's side of one room. `join`: the address for attendees, and its QR code as `{"size", "path"}`."""

    def __init__(self, room: Room, scenarios: Mapping[str, Scenario], *, join: Mapping[str, Any] | None = None) -> None:
        self.room, self.scenarios, self.join = room, dict(scenarios), dict(join or {})
        self.checks: list[Check] = []
        self.scenario: Scenario | None = None
        self.at = 0
        self._checking = False

    async def act(self, name: str, values: Mapping[str, Any]) -> str:
        """Do what the presenter asked for, and say what was done."""
        acts = {
            "lane": self.switch,
            "restart": self.restart,
            "check": self.check,
            "run": self.run,
            "push": self.push,
            "freeze": self.freeze,
            "reveal": self.reveal,
            "clear": self.clear,
            "replay": self.replay,
            "look": self.look,
            "allow": self.allow,
            "refuse": self.refuse,
            "scene": self.scene,
            "reset": self.reset,
        }
        if name not in acts:
            raise LabError(f"The desk knows no '{name[:40]}'.")
        said = acts[name](values)
        self.room.ring()
        return said

    # --- the engine

    def switch(self, values: Mapping[str, Any]) -> str:
        """The room's lane: {draft, k}."""
        room, draft, k = self.room, values.get("draft"), values.get("k", 0)
        if not isinstance(draft, str) or draft not in room.recipe.draft_choices():
            raise LabError("There is no such draft.", todo=f"Choose one of: {', '.join(room.recipe.draft_choices())}.")
        if isinstance(k, bool) or not isinstance(k, int):
            raise LabError("K is not a whole number.", todo=f"Choose 1 to {room.recipe.k_max}.")
        lane = Lane(room.recipe, draft, k, compiled=False, traced=True)
        if lane.key != room.lane.key or room.health != "ready":
            room.lane = lane
            room.spawn(room.get_ready())
        return f"The room uses {lane.label}."

    def restart(self, _: Mapping[str, Any]) -> str:
        """Start the room's lane anew."""
        self.room.spawn(self.room.get_ready(restart=True))
        return f"Restarting {self.room.lane.label}."

    def check(self, _: Mapping[str, Any]) -> str:
        """The preflight again."""
        if self._checking:
            return "The preflight is running."
        self.room.spawn(self.preflight())
        return "Preflight started."

    async def preflight(self) -> None:
        """Warm every lane; attendees are answered as soon as the room's own lane is good."""
        room = self.room
        self._checking, self.checks = True, []
        if room.health == "cold":
            room.health, room.warming = "warming", "preflight"
        try:
            async for check in preflight(room.engine, room.recipe, self.checks):
                own = check.lane is not None and check.lane.key == room.lane.key
                if own and check.state == "busy" and room.health == "warming":
                    room.warming = f"Starting {check.name}: {check.text}"
                if check.state == "good" and check.run is not None and room.last_good is None:
                    room.last_good = check.run, f"made at {time.strftime('%H:%M')}"
                if own and check.state == "good" and room.health in ("warming", "down"):
                    room.health, room.trouble = "ready", None
                if own and check.state == "bad":
                    room.health, room.trouble = "down", LabError(check.text)
                room.ring()
                room.pump()
        finally:
            self._checking = False
        room.ring()

    # --- the stage

    def _run(self, values: Mapping[str, Any]) -> Run:
        name = values.get("run")
        run = self.room.runs.get(name if isinstance(name, str) else None)
        if run is None:
            raise LabError("There is no run on your microscope.", todo="Run a prompt or open a recording there first.")
        return run

    def run(self, values: Mapping[str, Any]) -> str:
        """Run {prompt} for all: its trace is shown while it grows."""
        prompt = values.get("prompt")
        if not isinstance(prompt, str):
            raise LabError("The prompt is empty.", todo="Type a prompt above.")
        self.room.ask(self.room.presenter, Ask(prompt, "show"))
        return "Running for all."

    def push(self, values: Mapping[str, Any]) -> str:
        """Show {run} to all, or with {step} that step of it."""
        run, step = self._run(values), values.get("step")
        if step is not None and (
            isinstance(step, bool) or not isinstance(step, int) or all(one.index != step for one in run.request.steps)
        ):
            raise LabError("This run has no such step.", todo="Select a token in the microscope first.")
        opened = f"Recording of {run.label}" if run.state == "opened" else ""
        self.room.show(Stage("trace", run=run, focus=step, recording=opened))
        return "Shown to all."

    def freeze(self, values: Mapping[str, Any]) -> str:
        """Freeze {step} of {run}; the room guesses about its draft token {position}."""
        run, step, position = self._run(values), values.get("step"), values.get("position", 1)
        if any(isinstance(one, bool) or not isinstance(one, int) for one in (step, position)):
            raise LabError("No step is selected.", todo="Select a draft token in the microscope, then press Freeze.")
        assert isinstance(step, int)
        game = Game.freeze(run.request, step, position)
        self.room.show(Stage("guess", run=run, game=game))
        return f"Frozen: will the target accept the {ordinal(position)} draft token of step {game.step.index}?"

    def reveal(self, _: Mapping[str, Any]) -> str:
        """Show what happened, and count who was right."""
        game = self.room.stage.game
        if game is None or game.revealed:
            raise LabError("There is nothing to reveal.", todo="Freeze a step first.")
        game.revealed = True
        for number, vote in game.votes.items():
            if (seat := self.room.seats.get(number)) is not None:
                seat.played += 1
                seat.right += vote == game.truth
        tally = game.tally()
        right = tally["accept" if game.truth else "reject"]
        return f"{'Accepted' if game.truth else 'Rejected'}: {right} of {len(game.votes)} were right."

    def clear(self, _: Mapping[str, Any]) -> str:
        """Take everything off the stage."""
        self.room.show(Stage())
        return "The stage is empty."

    def replay(self, _: Mapping[str, Any]) -> str:
        """Play the last good recording."""
        self.room.replay()
        return "Playing the last good recording."

    # --- what attendees offer

    def _offer(self, values: Mapping[str, Any]) -> Offer:
        offer = self.room.offers.get(str(values.get("offer")))
        if offer is None:
            raise LabError("This offer is gone.")
        return offer

    def look(self, values: Mapping[str, Any]) -> str:
        """Look at an offer: only then can it be shown."""
        self._offer(values).looked = True
        return "You have looked at it."

    def allow(self, values: Mapping[str, Any]) -> str:
        """Show an offer to all."""
        offer = self._offer(values)
        if not offer.looked:
            raise LabError("Look at it first.", why="An attendee's text is shown to the room only after you have seen it.")
        self.room.runs.add(offer.run)
        self.room.show(Stage("trace", f"From seat {offer.seat}", run=offer.run))
        return f"Shown: from seat {offer.seat}."

    def refuse(self, values: Mapping[str, Any]) -> str:
        """Take an offer off the list."""
        offer = self._offer(values)
        del self.room.offers[offer.id]
        return "Taken off the list."

    # --- scenarios

    def scene(self, values: Mapping[str, Any]) -> str:
        """Go to {scenario, at} (at counts from 1) and do what it says."""
        scenario, at = self.scenarios.get(str(values.get("scenario"))), values.get("at", 1)
        if scenario is None:
            raise LabError("There is no such scenario.", todo=f"There are: {', '.join(self.scenarios) or 'none'}.")
        if isinstance(at, bool) or not isinstance(at, int) or not 1 <= at <= len(scenario.scenes):
            raise LabError(f"'{scenario.title}' has the scenes 1 to {len(scenario.scenes)}.")
        scene = scenario.scenes[at - 1]
        if scene.draft is not None:
            self.switch({"draft": scene.draft, "k": scene.k or self.room.lane.k or self.room.recipe.k})
        self._play(scene)
        self.scenario, self.at = scenario, at
        return f"{scenario.title}, scene {at} of {len(scenario.scenes)}: {scene.title}"

    def scene_of(self, name: str, at: int) -> dict[str, str]:
        """A scene as an attendee's deep link gets it."""
        scenario = self.scenarios.get(name)
        if scenario is None or not 1 <= at <= len(scenario.scenes):
            raise LabError("This link names a scene that the workshop does not have.", todo="Type a prompt of your own.")
        scene = scenario.scenes[at - 1]
        return {"title": scene.title, "say": scene.say, "prompt": scene.prompt}

    def _play(self, scene: Scene) -> None:
        room = self.room
        room.stop(room.presenter)  # the scene before: it would come on the stage later than this one
        if scene.show != "text":
            room.ask(room.presenter, Ask(scene.prompt, "show" if scene.show == "run" else "guess", scene.step))
        room.show(Stage("say", scene.title, scene.say))

    def reset(self, _: Mapping[str, Any]) -> str:
        """As at the beginning: empty stage, first lane, no offers, no scores. Attendees keep their seats and answers."""
        room = self.room
        room.stop(room.presenter)
        room.offers.clear()
        for seat in room.seats.values():
            seat.right, seat.played, seat.offered = 0, 0, False
        self.scenario, self.at = None, 0
        room.show(Stage())
        first = room.first_lane()
        self.switch({"draft": first.draft, "k": first.k})
        return "The room is as at the beginning."

    # --- what the presenter sees

    def view(self, stage: str = "", stage_lines: int = 0) -> dict[str, Any]:
        """The desk: the stage as the room sees it, votes as they come, offers (their text only after a look), scenarios, the preflight."""
        room, good = self.room, verdict(self.checks)
        record = room.view(room.presenter, stage=stage, stage_lines=stage_lines)
        game = room.stage.game
        return {
            **record,
            "join": self.join,
            "tally": None if game is None else game.tally(),
            "draft": room.lane.draft,
            "k": room.lane.k or room.recipe.k,
            "drafts": list(room.recipe.draft_choices()),
            "trouble": None if room.trouble is None else str(room.trouble)[:2000],
            "scores": self._scores(),
            "offers": [self._offered(offer) for offer in reversed(room.offers.values())],
            "scenarios": [one.public() for one in self.scenarios.values()],
            "scenario": {"name": self.scenario.name, "at": self.at} if self.scenario else None,
            "checks": [{"name": one.name, "state": one.state, "text": one.text} for one in self.checks],
            "verdict": {"good": good[0], "text": good[1]},
        }

    def _scores(self) -> dict[str, Any]:
        played = [seat for seat in self.room.seats.values() if seat.played]
        return {
            "players": len(played),
            "right": sum(seat.right for seat in played),
            "guesses": sum(seat.played for seat in played),
            "best": max((seat.right for seat in played), default=0),
        }

    def _offered(self, offer: Offer) -> dict[str, Any]:
        run = offer.run
        record: dict[str, Any] = {
            "id": offer.id,
            "seat": offer.seat,
            "looked": offer.looked,
            "tokens": len(run.output_ids()),
            "label": run.label,
        }
        if offer.looked:
            record["prompt"] = list(visible(run.request.prompt[:LOOK], spaces=False))
            record["answer"] = list(visible(run.request.text[:LOOK], spaces=False))
        return record
