"""The room: seats, the line at the engine, who is answered, and what everybody looks at. No gradio, no HTTP; one event loop.

An answer belongs to the room and not to a connection: a phone that sleeps or reloads finds it again, and everything that changed is told
by ringing a seat's bell and counting its version up. A request that the engine's end cut off goes back to the front of the line, once. The
room watches the lane that it uses; when that lane is gone, nobody is answered, nothing that waits is lost, and the last good recording
plays, marked as one. What the presenter may do beyond this is in `desk.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import time
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any, Literal

from lab.errors import LabError
from lab.recipes.model import Recipe
from lab.serving.command import Lane
from lab.serving.endpoint import Endpoint
from lab.trace.render import visible
from lab.ui.engine import Engine
from lab.ui.feed import Feed
from lab.ui.runner import Status, answer, summary, wait_ready
from lab.ui.state import Run, Runs, Settings
from lab.ui.workshop.guess import Game
from lab.ui.workshop.line import PRESENTER, Job, Line, ordinal
from lab.ui.workshop.quiet import quiet
from lab.ui.workshop.seats import Ask, Offer, Seat
from lab.ui.workshop.stage import Stage, recording_of, shipped

#: Characters of a prompt, seats and offers that are remembered, seconds after which a silent seat no longer counts as present.
MOST_PROMPT = 2000
MOST_SEATS = 400
MOST_OFFERS = 60
PRESENT = 30.0
#: Seconds between updates of a growing answer, and between looks at the engine.
PERIOD = 0.25
WATCH = 1.0

Health = Literal["cold", "warming", "ready", "down"]


class Room:
    """One workshop over one engine."""

    def __init__(self, recipe: Recipe, engine: Engine, *, at_once: int = 4, tokens: int = 64, runs: Runs | None = None) -> None:
        self.recipe, self.engine = recipe, quiet(engine)
        self.runs = runs or Runs()
        self.tokens = tokens
        self.boot = secrets.token_hex(6)
        self.line: Line[Ask] = Line(at_once=at_once)
        self.seats: OrderedDict[int, Seat] = OrderedDict()
        self.presenter, self.screen = Seat(PRESENTER), Seat(-1)
        self.stage = Stage()
        self.lane = self.first_lane()
        self.health: Health = "cold"
        self.trouble: LabError | None = None
        self.warming = ""
        self.offers: OrderedDict[str, Offer] = OrderedDict()
        self.last_good: tuple[Run, str] | None = None
        self.closed = False
        #: The event loop that all of this belongs to, once something has begun.
        self.loop: asyncio.AbstractEventLoop | None = None
        self._next = 1
        self._tasks: set[asyncio.Task[None]] = set()

    def first_lane(self) -> Lane:
        """The lane of a room that has just opened: the recipe's first draft."""
        draft = "bf16" if "bf16" in self.recipe.drafts else self.recipe.draft_choices()[-1]
        return Lane(self.recipe, draft, self.recipe.k, compiled=False, traced=True)

    # --- seats

    def sit(self, number: int | None) -> Seat:
        """The seat with this number, or a new one; the seats silent for longest are forgotten, unless they have something going on."""
        seat = self.seats.get(number) if number else None
        if seat is None:
            number = number or self._next  # a number that is not here comes from before a restart of the app
            seat = self.seats.setdefault(number, Seat(number))
            self._next = max(self._next, number + 1)
            for other in list(self.seats.values()):
                if len(self.seats) <= MOST_SEATS:
                    break
                if other is not seat and other.task is None and not self.line.jobs(other.number):
                    del self.seats[other.number]
        seat.seen = time.monotonic()
        self.seats.move_to_end(seat.number)
        return seat

    def present(self) -> int:
        """Seats whose pages were heard of lately."""
        now = time.monotonic()
        return sum(now - seat.seen < PRESENT for seat in self.seats.values())

    def ring(self) -> None:
        """Tell every page."""
        for seat in (self.presenter, self.screen, *self.seats.values()):
            seat.ring()

    # --- asking

    def ask(self, seat: Seat, what: Ask) -> None:
        """Put a prompt in line; raises `LabError` for one that cannot be."""
        if len(what.prompt) > MOST_PROMPT:
            raise LabError(f"The prompt has {len(what.prompt)} characters.", todo=f"Shorten it to {MOST_PROMPT}.")
        self.settings(what.prompt)
        self.line.put(seat.number, what)
        seat.said = None
        self.ring()
        self.pump()

    def settings(self, prompt: str) -> Settings:
        """The settings of every request of this room: greedy, the room's lane and length."""
        return Settings.of(self.recipe, prompt, self.lane.draft, self.lane.k, 0.0, self.tokens, False)

    def stop(self, seat: Seat) -> None:
        """Leave the line, and end what is being answered."""
        self.line.leave(seat.number)
        if seat.task is not None:
            seat.task.cancel()
        elif seat.run is None:
            seat.said = Status("info", "You left the line.")
        self.ring()

    def pump(self) -> None:
        """Begin whatever may begin now."""
        if self.health != "ready" or self.closed:
            return
        while (job := self.line.take()) is not None:
            seat = self.presenter if job.seat == PRESENTER else self.sit(job.seat)
            seat.task = self.spawn(self._serve(seat, job))
            seat.task.add_done_callback(functools.partial(self._never_began, seat, job))

    def _never_began(self, seat: Seat, job: Job[Ask], task: asyncio.Task[None]) -> None:
        """What was stopped before its first step has run nothing of `_serve`, not even its end: else the seat would be answered forever."""
        if seat.task is task:
            seat.task, seat.said = None, Status("info", "Stopped.")
            self.line.done(job)
            self.ring()
            self.pump()

    async def _serve(self, seat: Seat, job: Job[Ask]) -> None:
        lane, run, feed, ask = self.lane, None, None, job.what
        try:
            settings = self.settings(ask.prompt)
            run = Run.of(lane, settings)
            if seat is self.presenter:
                self.runs.add(run)
            seat.run, seat.feed, seat.offered = run, (feed := Feed(run)), False
            seat.said = Status("busy", "Your turn")
            if ask.then == "show":
                self.show(Stage("trace", self.stage.title, self.stage.say, run=run))
            self.ring()  # the others moved up
            box: list[Endpoint] = []
            async for seat.said in wait_ready(self.engine, lane, box):
                seat.ring()
            async for seat.said in answer(self.engine, box[0], settings, run, period=PERIOD):
                if ask.then != "guess":
                    feed.update()
                seat.ring()
            seat.said = summary(run)
            if seat is self.presenter and run.request.steps:
                self.last_good = run, f"made at {time.strftime('%H:%M')}"
            if ask.then == "guess":
                self.freeze(run, ask.step)
        except LabError as error:
            seat.said = Status.error(error)
            if run is not None and run.state == "running":
                run.state = "failed"  # before it was sent: what shows it waits for its end
            if await self._gone(lane) and job.tries < 2:
                self.line.put_back(job)
                seat.said = Status("info", "The engine stopped while it answered you", detail="your prompt is kept and goes first")
        except asyncio.CancelledError:
            if run is not None and run.state == "running":
                run.state = "stopped"
            seat.said = summary(run) if run is not None else Status("info", "Stopped.")
        finally:
            seat.task = None
            if run is not None and feed is not None:
                feed.update(final=run.state != "running")
            if self.stage.run is run:
                self.stage.update()
            self.line.done(job)
            self.ring()
            self.pump()

    def freeze(self, run: Run, index: int) -> None:
        """Freeze a step of `run`, the first with a draft from `index` on, at its first draft token."""
        drafted = [step.index for step in run.request.steps if step.draft]
        chosen = next((one for one in drafted if one >= index), drafted[-1] if drafted else index)
        game = Game.freeze(run.request, chosen)
        self.show(Stage("guess", self.stage.title, self.stage.say, run=run, game=game))

    def offer(self, seat: Seat) -> None:
        """Offer the seat's answer to the room: the presenter decides, after a look."""
        if seat.run is None or seat.run.state != "done":
            raise LabError("There is no finished answer to offer.", todo="Ask something first.")
        if not seat.offered:
            seat.offered = True
            offer = Offer(secrets.token_hex(6), seat.number, seat.run)
            self.offers[offer.id] = offer
            while len(self.offers) > MOST_OFFERS:
                self.offers.popitem(last=False)
        self.presenter.ring()
        seat.ring()

    def guess(self, seat: Seat, game: str, accept: bool) -> None:
        """The seat's guess about the frozen step; raises `LabError` where it comes too late."""
        now = self.stage.game
        if now is None or now.id != game:
            raise LabError("That step is no longer on the stage.", todo="Look at the stage for the present one.")
        now.vote(seat.number, accept)
        self.ring()

    # --- the stage

    def show(self, stage: Stage) -> None:
        """Put `stage` before everybody."""
        self.stage = stage
        if stage.update():
            self.spawn(self._follow(stage))
        self.ring()

    async def _follow(self, stage: Stage) -> None:
        while self.stage is stage and stage.update():
            self.ring()
            await asyncio.sleep(PERIOD)
        self.ring()

    # --- the engine's health

    def lane_state(self, lane: Lane) -> str:
        """What the engine says of a lane: its state, or "stopped" where it was never asked for."""
        return next((one.state for one in self.engine.status() if one.lane.key == lane.key), "stopped")

    async def _gone(self, lane: Lane) -> bool:
        """Whether a failure was the engine's end; the process may take a moment to be gone."""
        for _ in range(6):
            if self.lane_state(lane) != "ready":
                self.fall_back(lane)
                return True
            await asyncio.sleep(0.25)
        return False

    def fall_back(self, lane: Lane) -> None:
        """The engine is gone: hold the line and play the last good recording, marked as one."""
        if self.health == "down" or lane.key != self.lane.key:
            return
        found = next((one.error for one in self.engine.status() if one.lane.key == lane.key), None)
        self.health, self.trouble = "down", found or LabError(f"The engine for {lane.label} stopped.")
        if self.stage.game is None or self.stage.game.revealed:
            self.replay()
        self.ring()

    def replay(self) -> None:
        """Play the last good recording; where there is none, say so."""
        good = self.last_good or shipped(self.runs)
        if good is None:
            self.show(Stage("say", "The engine has stopped", "There is no recording to play yet. Your prompts are kept."))
        else:
            self.show(recording_of(*good))

    async def watch(self) -> None:
        """Notice, once a second, that the room's lane has died or is back; runs until the room is closed."""
        while not self.closed:
            state = self.lane_state(self.lane)
            if self.health == "ready" and state in ("dead", "failed"):
                self.fall_back(self.lane)
            elif self.health == "down" and state == "ready":  # started anew from elsewhere, such as the microscope's button
                self.health, self.trouble = "ready", None
                self.ring()
                self.pump()
            await asyncio.sleep(WATCH)

    async def get_ready(self, *, restart: bool = False) -> None:
        """Start the room's lane (anew with `restart`) and go on with the line."""
        lane = self.lane
        self.health, self.trouble, self.warming = "warming", None, f"Starting {lane.label}"
        self.ring()
        try:
            async for status in wait_ready(self.engine, lane, [], restart=restart):
                self.warming = f"{status.text}: {status.detail}" if status.detail else status.text
                self.ring()
        except LabError as error:
            if lane.key == self.lane.key:
                self.health, self.trouble = "down", error
        else:
            if lane.key == self.lane.key:
                self.health, self.trouble = "ready", None
        self.ring()
        self.pump()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task of the room's own, ended with it."""
        self.loop = asyncio.get_running_loop()
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def leave(self) -> None:
        """From any thread: nothing new begins, and every page that waits is let go."""
        self.closed = True
        if self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.ring)

    async def close(self) -> None:
        """End everything that is under way, and let every page that waits go."""
        self.closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.ring()

    # --- what a page sees

    async def changed(self, seat: Seat, version: int, wait: float) -> None:
        """Return when the seat's version differs from `version`, or after `wait` seconds."""
        if seat.version == version and wait > 0 and not self.closed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(seat.bell.wait(), wait)

    def engine_view(self) -> dict[str, Any]:
        """The engine in a sentence."""
        said = {
            "cold": "the engine has not been started",
            "warming": self.warming,
            "ready": "ready",
            "down": "the engine has stopped; your prompts are kept",
        }[self.health]
        return {"health": self.health, "said": said, "label": self.lane.label, "waiting": self.line.waiting, "present": self.present()}

    def view(self, seat: Seat, *, run: str = "", lines: int = 0, stage: str = "", stage_lines: int = 0) -> dict[str, Any]:
        """Everything that the pages of one seat show: its own run from line `lines` on, and the stage from line `stage_lines` on."""
        record: dict[str, Any] = {"boot": self.boot, "v": seat.version, "engine": self.engine_view()}
        record["stage"] = self.stage.shown(seat.number, stage, stage_lines)
        if seat is self.screen:
            return record
        record["me"] = self.me(seat)
        if seat.run is not None and seat.feed is not None:
            begin = lines if run == seat.run.id else 0
            text = list(visible(seat.run.request.prompt, spaces=False))
            record["mine"] = {"id": seat.run.id, "prompt": text, "state": seat.run.state, "from": begin, "lines": seat.feed.since(begin)}
        return record

    def me(self, seat: Seat) -> dict[str, Any]:
        """The seat's place in line and its sentence."""
        place, jobs = self.line.place(seat.number), self.line.jobs(seat.number)
        state = "running" if seat.task is not None else "line" if place else "over" if seat.run else "idle"
        said = seat.said
        if place and seat.task is None:
            kept = seat.said.text if seat.said is not None and self.health != "ready" else ""
            detail = kept or f"{self.line.waiting} waiting, up to {self.line.at_once} are answered at once"
            if self.health != "ready":
                detail = f"{kept}; {self.engine_view()['said']}" if kept else str(self.engine_view()["said"])
            said = Status("busy", f"You are {ordinal(place)} in line", detail=detail)
        return {
            "seat": seat.number,
            "state": state,
            "place": place,
            "text": said.text if said else "",
            "detail": said.detail if said else "",
            "level": said.level if said else "info",
            "queued": [list(visible(job.what.prompt, spaces=False)) for job in jobs],
            "right": seat.right,
            "played": seat.played,
            "offered": seat.offered,
        }
