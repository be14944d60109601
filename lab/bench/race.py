"""A race of lanes that can be watched: rounds of the same prompts on every lane, live counters, and the speed-up measured so far.

Who shares a machine takes turns in short rounds (`pairs.turns`: balanced order, so that a drift of the machine hits all alike); lanes on
machines of their own run side by side. The endpoint decides: servers that the lab started, or that listen on this host, share this one,
and other servers share theirs by host name. Every lane answers the same prompts in a round, greedily.

Two sources, kept apart. Lines come from the servers' own `/metrics`, `HERTZ` times a second while a lane has its turn, over the lane's own
time (its clock stands still while others run), averaged over the last `WINDOW` seconds of it. The speed-up comes from the token ids that
arrived (`load.Client`), pooled over whole rounds, with a bootstrap interval over rounds (`pairs.ratio`). Where a server counted more tokens
in a turn than were asked of it here, somebody else uses it, and that is said.

Whatever ends a race (Stop, the last round, a lane that died), everything measured until then is kept; a round that was cut off does not
count. A lane that fails leaves the race with its reason, and the others go on while there are two.

Limits: a lane elsewhere is asked over the network, which is in its times; whether it is eager or compiled, it does not say.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

from lab.bench import pairs
from lab.bench.load import Client, Round
from lab.bench.prompts import Prompt
from lab.errors import LabError
from lab.recipes.model import DraftChoice
from lab.serving import memory, metrics
from lab.serving.command import Lane
from lab.serving.endpoint import Endpoint, LaneStatus
from lab.serving.metrics import Snapshot

HERTZ = 3.0  # readings of /metrics a second
WINDOW = 2.0  # seconds of a lane's own time over which a point of its speed is averaged
LENGTH_WINDOW = 5.0  # the same for the mean acceptance length
REST = 0.25  # seconds before each turn, in which idle OpenMP threads fall asleep
RESERVE = 512 << 20  # bytes of memory left to everything else
HERE = ("127.0.0.1", "localhost", "::1", "0.0.0.0")
MOST_LANES = 6


@dataclass(frozen=True)
class Racer:
    """One lane in a race. `kind` is its draft, as far as known: it decides colours."""

    label: str
    kind: DraftChoice
    endpoint: Endpoint

    @property
    def machine(self) -> str:
        """Racers of one machine take turns."""
        lane, host = self.endpoint.lane, urlsplit(self.endpoint.url).hostname or ""
        return "" if (lane is not None and lane.at is None) or host in HERE else host

    @property
    def mode(self) -> str | None:
        """Eager or compiled; None where the server was started by others."""
        lane = self.endpoint.lane
        return None if lane is None or lane.at is not None else "compiled" if lane.compiled else "eager"


@dataclass(frozen=True)
class Plan:
    """What every lane does: `rounds` turns of `per_turn` prompts, `concurrency` at a time, up to `max_tokens` new tokens each."""

    prompts: tuple[Prompt, ...]
    concurrency: int = 1
    max_tokens: int = 96
    rounds: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, most in (
            ("Concurrency", self.concurrency, 256),
            ("The number of new tokens", self.max_tokens, 1 << 20),
            ("The number of rounds", self.rounds, 1000),
        ):
            if not 1 <= value <= most:
                raise LabError(f"{name} is out of range: {value}.", todo=f"Choose 1 to {most}.")
        if not self.prompts:
            raise LabError("There are no prompts to race with.", todo="Choose at least one kind of prompt.")

    @property
    def per_turn(self) -> int:
        """Prompts a turn: enough to keep the queue full for a while, few enough for short turns."""
        return 1 if self.concurrency == 1 else 2 * self.concurrency


def check(lanes: Sequence[Lane], elsewhere: int = 0) -> None:
    """Refuse what cannot be compared, before any engine starts. What a server elsewhere runs is not known here; `elsewhere` counts those
    that take no lane's place.
    """
    if len(lanes) + elsewhere < 2:
        raise LabError("A race needs at least two lanes.", todo="Choose the baseline and a draft, or two K.")
    if len(lanes) + elsewhere > MOST_LANES:
        raise LabError(f"{len(lanes) + elsewhere} lanes are too many to tell apart.", todo=f"Choose at most {MOST_LANES}.")
    if len({lane.key for lane in lanes}) < len(lanes):
        raise LabError("Two lanes are the same.", todo="Name each K once.")
    own = [lane for lane in lanes if lane.at is None]
    if len({lane.compiled for lane in own}) > 1:
        raise LabError(
            "Eager and compiled lanes are not raced against each other.",
            why="Eager mode has a fixed cost a step that speculation saves, so a ratio across modes would flatter it.",
        )
    if len({lane.traced for lane in own}) > 1:
        raise LabError("Traced and untraced lanes are not raced against each other.", why="Tracing takes time of its own in each step.")


def room(lanes: Sequence[Lane], running: Sequence[LaneStatus], *, available: int | None = None, most: int | None = None) -> None:
    """Refuse lanes that do not fit into memory together. `running`: the engines that there are; those that do not race make room.

    `available` (bytes) and `most` (engines) are this machine's unless given. A race holds all its lanes: restarting them in turns would
    take longer than the rounds.
    """
    lanes = [lane for lane in lanes if lane.at is None]
    most = memory.most_engines(max((lane.recipe.gpu_share for lane in lanes), default=1.0)) if most is None else most
    if most is not None and len(lanes) > most:
        how = "which one engine takes whole" if most == 1 else f"which {most} engines share"
        raise LabError(
            f"{len(lanes)} engines do not fit on this machine's accelerator, {how}.",
            todo="Start the others on machines of their own and name them with --attach, or use `eagle3-lab bench speedup`.",
        )
    racing = {lane.key for lane in lanes}
    here = {one.lane.key for one in running if one.state == "ready"} & racing
    freed = sum(one.memory or 0 for one in running if one.lane.key not in racing and not one.in_use)
    free = (memory.available() if available is None else available) - RESERVE + freed
    need = sum(lane.recipe.memory_bytes for lane in lanes if lane.key not in here)
    if need > free:
        raise LabError(
            f"{len(lanes)} lanes do not fit into memory at once.",
            why=f"{len(lanes) - len(here)} engines must start and need about {need / 1e9:.1f} GB; {max(free, 0) / 1e9:.1f} GB are free.",
            todo="Choose fewer lanes.",
        )


@dataclass(frozen=True)
class Sample:
    """A point of a lane's lines: its own seconds so far, tok/s, mean acceptance length (None without drafts), requests in the batch (None
    where the turn had just ended)."""

    at: float
    rate: float
    length: float | None
    running: int | None


@dataclass
class Line:
    """A lane's lines, from its server's counters while it has its turn."""

    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    drafts: int = 0
    accepted: int = 0
    _last: Snapshot | None = None
    _marks: deque[tuple[float, int, int, int]] = field(default_factory=lambda: deque([(0.0, 0, 0, 0)]))

    def begin(self, now: Snapshot) -> None:
        """A turn begins."""
        self._last = now

    def add(self, now: Snapshot, *, ended: bool = False) -> None:
        """A reading in the middle of a turn, or at its end. Readings without time between them, or of a restarted server, are left out."""
        last, self._last = self._last, now
        if last is None or now.time <= last.time or now.generation_tokens < last.generation_tokens:
            return
        self.seconds += now.time - last.time
        self.tokens += now.generation_tokens - last.generation_tokens
        self.drafts += now.drafts - last.drafts
        self.accepted += now.accepted_tokens - last.accepted_tokens
        self._marks.append((self.seconds, self.tokens, self.drafts, self.accepted))
        while len(self._marks) > 2 and self.seconds - self._marks[1][0] >= LENGTH_WINDOW:
            self._marks.popleft()
        then = next((mark for mark in reversed(self._marks) if self.seconds - mark[0] >= WINDOW), self._marks[0])
        rate = (self.tokens - then[1]) / (self.seconds - then[0])
        drafts, accepted = self.drafts - self._marks[0][2], self.accepted - self._marks[0][3]
        self.samples.append(Sample(self.seconds, rate, 1 + accepted / drafts if drafts else None, None if ended else now.running))

    @property
    def length(self) -> float | None:
        """Mean acceptance length, bonus included, over the whole race."""
        return 1 + self.accepted / self.drafts if self.drafts else None


class Race:
    """A race under way or over. `run()` may be cancelled at any time; everything here then stays as it is."""

    def __init__(self, racers: Sequence[Racer], plan: Plan, *, rest: float = REST) -> None:
        check([racer.endpoint.lane for racer in racers if racer.endpoint.lane], sum(racer.endpoint.lane is None for racer in racers))
        self.racers, self.plan = tuple(racers), plan
        self.lines = [Line() for _ in racers]
        #: Whole rounds: what each lane (by its place) did; a lane that left is missing.
        self.rounds: list[dict[int, Round]] = []
        #: Why lanes left, by place.
        self.out: dict[int, LabError] = {}
        #: Lanes whose server answered others too.
        self.shared: set[int] = set()
        #: Lanes that have their turn now, and what is being done.
        self.now: set[int] = set()
        self.stage = "waiting"
        self.over = False
        self._rest = rest
        self._rates: dict[tuple[int, int], pairs.Estimate | None] = {}  # by lane and number of rounds: a bootstrap is not for every look
        self._ratios: dict[tuple[int, int], pairs.Ratio | None] = {}

    @property
    def base(self) -> int:
        """The lane that the others are compared with: the first without a draft, else the first."""
        return next((place for place, racer in enumerate(self.racers) if racer.kind == "none"), 0)

    @property
    def active(self) -> list[int]:
        """Lanes still in the race."""
        return [place for place in range(len(self.racers)) if place not in self.out]

    async def run(self) -> None:
        """Warm every lane up, then race to the end."""
        plan = self.plan
        deck = itertools.cycle(random.Random(plan.seed).sample(plan.prompts, len(plan.prompts)))
        machines: dict[str, list[int]] = {}
        for place, racer in enumerate(self.racers):
            machines.setdefault(racer.machine, []).append(place)
        orders = {name: pairs.turns(len(places), plan.rounds, plan.seed) for name, places in machines.items()}
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
            clients = [await stack.enter_async_context(Client(one.endpoint, max_tokens=plan.max_tokens)) for one in self.racers]
            for number in range(-1, plan.rounds):
                if len(self.active) < 2:
                    break
                self.stage = "warming up" if number < 0 else f"round {number + 1} of {plan.rounds}"
                prompts = [next(deck) for _ in range(2 * plan.concurrency if number < 0 else plan.per_turn)]
                done: dict[int, Round] = {}

                async def machine(name: str, number: int = number, prompts: list[Prompt] = prompts, done: dict[int, Round] = done) -> None:
                    for turn in orders[name][max(number, 0)]:
                        place = machines[name][turn]
                        if place not in self.out:
                            await self._turn(place, clients[place], http, prompts, done, warm=number < 0)

                await _together([machine(name) for name in machines])
                if number >= 0 and done:
                    self.rounds.append(done)
        self.over = True
        self.stage = "over" if len(self.active) > 1 else "ended: fewer than two lanes are left"

    async def _turn(
        self, place: int, client: Client, http: httpx.AsyncClient, prompts: Sequence[Prompt], done: dict[int, Round], *, warm: bool
    ) -> None:
        """One turn of one lane; its failure puts it out of the race."""
        endpoint, line = self.racers[place].endpoint, self.lines[place]
        await asyncio.sleep(self._rest)
        self.now.add(place)
        try:
            if warm:
                await client.round(prompts, self.plan.concurrency)
                return
            before = await metrics.scrape(endpoint, client=http)
            line.begin(before)
            watching = asyncio.create_task(self._watch(place, http))
            try:
                found = await client.round(prompts, self.plan.concurrency)
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
            after = await metrics.scrape(endpoint, client=http)
            line.add(after, ended=True)
            if after.generation_tokens - before.generation_tokens > found.all_tokens:
                self.shared.add(place)
            done[place] = found
        except LabError as error:
            self.out[place] = error
        finally:
            self.now.discard(place)

    async def _watch(self, place: int, http: httpx.AsyncClient) -> None:
        due = time.monotonic()
        while True:
            due = max(due + 1 / HERTZ, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            try:
                self.lines[place].add(await metrics.scrape(self.racers[place].endpoint, client=http))
            except LabError:
                continue  # the turn itself will say what is wrong with the server; a reading that came too late is only a gap

    # --- what is known so far ---

    def rate(self, place: int) -> pairs.Estimate | None:
        """Output tokens a second of a lane's turns, with its interval over rounds."""
        key = (place, len(self.rounds))
        if key not in self._rates:
            rounds = [one[place] for one in self.rounds if place in one]
            self._rates[key] = pairs.rate([one.tokens for one in rounds], [one.seconds for one in rounds]) if rounds else None
        return self._rates[key]

    def speedup(self, place: int) -> pairs.Ratio | None:
        """A lane's speed over the base lane's, over the rounds in which both took part."""
        key = (place, len(self.rounds))
        if key not in self._ratios:
            both = [(one[place], one[self.base]) for one in self.rounds if place in one and self.base in one]
            known = place != self.base and both
            columns = zip(*((own.tokens, own.seconds, base.tokens, base.seconds) for own, base in both), strict=True)
            self._ratios[key] = pairs.ratio(*columns) if known else None
        return self._ratios[key]

    def identical(self, place: int) -> tuple[int, int]:
        """How many answers of a lane have the base lane's token ids, of how many."""
        same = answers = 0
        for one in self.rounds:
            if place not in one or self.base not in one:
                continue
            other = [answer.ids for answer in sorted(one[self.base].answers, key=lambda answer: answer.prompt)]
            own = [answer.ids for answer in sorted(one[place].answers, key=lambda answer: answer.prompt)]
            answers += len(own)
            same += sum(a == b for a, b in zip(own, other, strict=False))
        return same, answers

    def summary(self) -> dict[str, Any]:
        """Everything measured as plain data, for a file."""
        lanes = []
        for place, racer in enumerate(self.racers):
            rate, ratio = self.rate(place), self.speedup(place)
            lanes.append(
                {
                    "label": racer.label,
                    "lane": racer.endpoint.lane.key if racer.endpoint.lane else racer.endpoint.url,
                    "mode": racer.mode,
                    "machine": racer.machine or "this one",
                    "rounds": sum(place in one for one in self.rounds),
                    "tokens_per_second": asdict(rate) if rate else None,
                    "speedup": asdict(ratio) if ratio else None,
                    "mean_acceptance_length": self.lines[place].length,
                    "identical_answers": self.identical(place),
                    "shared_with_others": place in self.shared,
                    "out": str(self.out[place]) if place in self.out else None,
                    "turns": [{"tokens": one[place].tokens, "seconds": one[place].seconds} for one in self.rounds if place in one],
                    "line": [asdict(sample) for sample in self.lines[place].samples],
                }
            )
        plan = self.plan
        return {
            "over": self.racers[self.base].label,
            "concurrency": plan.concurrency,
            "max_tokens": plan.max_tokens,
            "prompts_per_turn": plan.per_turn,
            "rounds_planned": plan.rounds,
            "rounds": len(self.rounds),
            "window_s": WINDOW,
            "length_window_s": LENGTH_WINDOW,
            "lanes": lanes,
        }


async def _together(work: Sequence[Any]) -> None:
    """Await all; if one fails or this is cancelled, the others are cancelled and waited for."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
