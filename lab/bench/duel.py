"""The duel: the same prompts on two drafts (or on one and several others), with nothing changed but the draft.

Lanes take turns prompt by prompt, in an order that alternates (`pairs.turns`), so that a machine whose speed drifts favours nobody; where
they do not all fit into memory at once, each answers all prompts before the next starts, and that is said, because speeds are then not
comparable. Every lane is traced, which costs each the same. `measure` knows no server: it is given a function that asks one. `summarise`
is pure: it takes what was measured just now, or two saved traces, and gives the whole report as plain data (see `REPORT`).

Acceptance is counted by `lab.trace.stats`, differences by `versus`, the drafts' tokens are put side by side by `lab.trace.align`. Limits:
times are the client's, of one request at a time, from sending a request to its last token, on the cores that the engine uses too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from lab.bench import comparable, pairs
from lab.bench.contestants import Contestant
from lab.bench.prompts import Prompt
from lab.bench.result import told_apart
from lab.bench.versus import Difference, Versus, sentence, versus
from lab.errors import LabError
from lab.serving.client import Done, Event, Notice
from lab.trace import align, stats
from lab.trace.model import Request
from lab.trace.render import Answer, chip_text, piece_of

#: Seconds of rest before each turn, and new tokens of the two unmeasured answers that warm a lane up.
REST = 0.25
WARM_UP = (2, 32)
#: Format name of the report in files ("eagle3-lab-duel").
REPORT = "duel"

#: Asks a contestant (by index) one prompt and gives the events of its answer; `max_tokens` is given for the warm-up.
Ask = Callable[[int, Prompt, int], AsyncIterator[Event]]


@dataclass(frozen=True)
class Plan:
    """What to measure. Every contestant answers every prompt once."""

    contestants: tuple[Contestant, ...]
    prompts: tuple[Prompt, ...]
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    #: Whether all lanes are there at once and take turns.
    alternate: bool = True
    #: Whether speeds are compared at all: False where the machine has other work to do.
    timed: bool = True
    #: Requests in flight, where speeds are left out: quicker, and acceptance stays the same but for near-ties in other batch shapes.
    concurrency: int = 1
    #: What was changed so that all contestants have one setting.
    changed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompts:
            raise LabError("A duel needs prompts.", todo="Choose a kind of prompts, or a file.")
        if self.concurrency > 1 and self.timed:
            raise LabError("Speeds are compared one request at a time.", todo="Leave --concurrency out, or add --no-speed.")

    def schedule(self) -> list[tuple[int, Prompt]]:
        """Contestant and prompt of each turn."""
        several = len(self.contestants)
        if not self.alternate or self.concurrency > 1:
            return [(index, prompt) for index in range(several) for prompt in self.prompts]
        orders = pairs.turns(several, len(self.prompts), self.seed)
        return [(index, prompt) for order, prompt in zip(orders, self.prompts, strict=True) for index in order]


@dataclass
class Measured:
    """Answers so far: `answers[contestant]` maps a prompt's id to its request."""

    plan: Plan
    answers: list[dict[str, Request]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.answers = self.answers or [{} for _ in self.plan.contestants]

    def whole(self) -> list[Prompt]:
        """Prompts that every contestant has answered, in the plan's order."""
        return [prompt for prompt in self.plan.prompts if all(prompt.id in answers for answers in self.answers)]


@dataclass(frozen=True)
class Turn:
    """Told after each turn: whose it was, on which prompt, and how many of all turns are done."""

    contestant: int
    prompt: Prompt
    request: Request
    done: int
    turns: int


async def _answer(events: AsyncIterator[Event], prompt: Prompt, name: str, notes: list[str]) -> Request:
    told: list[str] = []
    async with aclosing(cast(Any, events)) as stream:
        async for event in stream:
            if isinstance(event, Notice):
                told.append(event.text)
            elif isinstance(event, Done):
                request: Request = event.request
                if request.error or not request.steps:
                    why = request.error or " ".join(told) or "No step of it was traced."
                    raise LabError(f"{name} did not answer prompt '{prompt.id}' to its end.", why=why)
                notes += [f"{name}, prompt '{prompt.id}': {text}" for text in told]
                request.settings["prompt"] = prompt.id
                return request
    raise LabError(f"{name} did not answer prompt '{prompt.id}' to its end.", why="Its last record never came.")


async def warm_up(plan: Plan, index: int, ask: Ask) -> None:
    """Two short answers that nobody measures."""
    for _ in range(WARM_UP[0]):
        await _answer(ask(index, plan.prompts[-1], min(WARM_UP[1], plan.max_tokens)), plan.prompts[-1], plan.contestants[index].name, [])


async def measure(measured: Measured, ask: Ask, *, only: int | None = None, rest: float = REST) -> AsyncIterator[Turn]:
    """Fill `measured` turn by turn; what is in it stays good when this is closed or fails. `only`: the turns of one contestant."""
    plan = measured.plan
    schedule = [turn for turn in plan.schedule() if only is None or turn[0] == only]
    limit = asyncio.Semaphore(plan.concurrency)

    async def turn(index: int, prompt: Prompt) -> tuple[int, Prompt, Request]:
        async with limit:
            await asyncio.sleep(rest if plan.concurrency == 1 else 0)
            request = await _answer(ask(index, prompt, plan.max_tokens), prompt, plan.contestants[index].name, measured.notes)
        measured.answers[index][prompt.id] = request
        return index, prompt, request

    if plan.concurrency == 1:
        for number, (index, prompt) in enumerate(schedule, start=1):
            yield Turn(*await turn(index, prompt), number, len(schedule))
        return
    tasks = [asyncio.create_task(turn(index, prompt)) for index, prompt in schedule]
    try:
        for number, done in enumerate(asyncio.as_completed(tasks), start=1):
            yield Turn(*await done, number, len(schedule))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# --- the report ---


@dataclass(frozen=True)
class Side:
    """One draft's half of a comparison: its name, its requests (the same prompts in the same order) and what it says of its settings."""

    name: str
    kind: str
    requests: Sequence[Request]
    about: Mapping[str, Any] = field(default_factory=dict)


def _words(request: Request, token: int) -> list[str]:
    return list(chip_text(piece_of(token, request.pieces)))


def _decision(request: Request, found: align.Decision) -> list[Any]:
    """`[verdict, step, position, proposed token's text or None, probability or None]`."""
    proposed = None if found.proposed is None else _words(request, found.proposed)
    probability = None if found.probability is None else round(found.probability, 4)
    return [found.verdict, found.step, found.position, proposed, probability]


def aligned(one: Request, other: Request) -> dict[str, Any]:
    """Two answers side by side as plain data. `places`: `[text, relation]` of every place that both answers share, followed by both
    decisions where only one draft's token was accepted. `parted`: the first place where the answers differ. `rest`: `[text, verdict]` of
    every later place, of each answer.

    Text is runs of own text and signs in turn (`lab.trace.render`), never HTML.
    """
    found = align.align(one, other)
    answers = Answer(), Answer()
    texts = [
        [list(answer.text(each.token, request.pieces)) for each in decided]
        for answer, request, decided in zip(answers, (one, other), (found.one, found.other), strict=True)
    ]
    places: list[list[Any]] = []
    for place in found.places:
        told = [_decision(one, place.one), _decision(other, place.other)] if place.relation in ("one", "other") else []
        places.append([texts[0][place.index], place.relation, *told])
    common = len(places)
    rest = [
        [[text, each.verdict] for text, each in zip(side[common:], decided[common:], strict=True)]
        for side, decided in zip(texts, (found.one, found.other), strict=True)
    ]
    return {"places": places, "parted": found.parted, "rest": rest}


def _speed(request: Request) -> tuple[float, float] | None:
    tokens = request.usage_completion or len(request.output_ids())
    return (float(tokens), request.elapsed) if tokens and request.elapsed else None


def _difference(found: Difference | None) -> dict[str, Any] | None:
    return None if found is None else {**asdict(found), "difference": found.value, "shown": found.shown()}


def _numbers(found: Versus) -> dict[str, Any]:
    return {
        "outcome": found.outcome,
        "requests": found.requests,
        "mean_acceptance_length": _difference(found.mean_acceptance_length),
        "acceptance_rate": _difference(found.acceptance_rate),
        "accepted_by_position": [_difference(each) for each in found.by_position],
        "output_tokens_per_second": _difference(found.speed),
        "speed_ratio": _difference(found.ratio),
    }


def compare(one: Side, other: Side, *, timed: bool = True) -> dict[str, Any]:
    """Everything about two drafts over the same prompts as plain data: numbers, sentence, warnings, and the aligned answers."""
    if not one.requests or len(one.requests) != len(other.requests):
        raise LabError("There is no prompt that both drafts have answered.", todo="Let both answer the same prompts.")
    warnings = comparable.differences(one.about, other.about)
    prompts, parted = [], []
    totals = dict.fromkeys(("both", "one", "other", "neither", "apart", "alone"), 0)
    counts: tuple[list[stats.Counts], list[stats.Counts]] = ([], [])
    speeds: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
    for a, b in zip(one.requests, other.requests, strict=True):
        counts[0].append(stats.count(a.steps))
        counts[1].append(stats.count(b.steps))
        if (fast := _speed(a)) and (slow := _speed(b)):
            speeds[0].append(fast)
            speeds[1].append(slow)
        name = str(a.settings.get("prompt") or a.prompt[:40])
        entry: dict[str, Any] = {
            "prompt": name,
            "text": a.prompt,
            "drafts": [counts[0][-1].drafts, counts[1][-1].drafts],
            "draft_tokens": [counts[0][-1].draft_tokens, counts[1][-1].draft_tokens],
            "accepted": [counts[0][-1].accepted, counts[1][-1].accepted],
            "tokens": [counts[0][-1].tokens, counts[1][-1].tokens],
            "seconds": [a.elapsed, b.elapsed],
        }
        try:
            entry |= aligned(a, b)
        except LabError as error:
            warnings.append(str(error))
            entry |= {"places": [], "parted": None, "rest": [[], []]}
        for place in entry["places"]:
            totals[place[1]] += 1
        if entry["parted"] is not None:
            parted.append(entry)
        prompts.append(entry)
    warnings += _shared(one, other, timed)
    if parted:
        where = ", ".join(f"'{entry['prompt']}' at token {entry['parted'] + 1}" for entry in parted[:4])
        more = f" and {len(parted) - 4} more" if len(parted) > 4 else ""
        warnings.append(
            f"{len(parted)} of {len(prompts)} answers have other tokens from some place on ({where}{more}):"
            " put side by side up to there, but counted whole."
        )
    timed = timed and len(speeds[0]) == len(one.requests)
    found = versus(counts[0], counts[1], speeds[0] if timed else (), speeds[1] if timed else ())
    return {
        "one": one.name,
        "other": other.name,
        "kinds": [one.kind, other.kind if other.kind != one.kind else "other"],
        "sentence": sentence(found, one.name, other.name),
        **_numbers(found),
        "warnings": warnings,
        "places": totals,
        "prompts": prompts,
    }


def _shared(one: Side, other: Side, timed: bool) -> list[str]:
    """A warning for each side whose requests shared the engine with others, or lost steps."""
    found = []
    for side in (one, other):
        busiest = max((step.batch_requests for request in side.requests for step in request.steps), default=1)
        if busiest > 1 and timed:
            found.append(f"Up to {busiest} requests shared {side.name}'s engine: its speed was shared, too.")
        if lost := sum(request.dropped for request in side.requests):
            found.append(f"{lost} steps of {side.name} were lost on the way: its counts are incomplete.")
    return found


def summarise(measured: Measured, about: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The report of what was measured; `about` is each contestant's provenance. Raises `LabError` where no prompt was answered by all."""
    plan = measured.plan
    prompts = measured.whole()
    if not prompts:
        raise LabError("Nothing can be compared yet.", why="No prompt was answered by every draft.", todo="Let the duel run longer.")
    sides = []
    for contestant, answers, known in zip(plan.contestants, measured.answers, about, strict=True):
        requests = [answers[prompt.id] for prompt in prompts]
        sides.append(Side(contestant.name, contestant.kind, requests, comparable.side(known, requests)))
    comparisons = [compare(sides[0], side, timed=plan.alternate and plan.timed) for side in sides[1:]]
    notes = list(measured.notes)
    if not plan.timed:
        notes.append("Speeds were left out, as asked.")
    elif not plan.alternate:
        notes.append("The drafts did not fit into memory together, so they answered one after the other: speeds are not compared.")
    if any(each.kind == "cut" for each in plan.contestants):
        notes.append(
            "A level that is cut off shows what this draft depends on, not what the level is worth:"
            " a draft trained without it might do better."
        )
    if len(prompts) < len(plan.prompts):
        notes.append(f"Stopped early: {len(prompts)} of {len(plan.prompts)} prompts were answered by every draft.")
    return {
        "complete": len(prompts) == len(plan.prompts),
        "contestants": [
            {"name": each.name, "lane": each.lane.key, "label": each.lane.label, "kind": each.kind} for each in plan.contestants
        ],
        "setting": {
            "k": plan.contestants[0].lane.k,
            "mode": "compiled" if plan.contestants[0].lane.compiled else "eager",
            "temperature": plan.temperature,
            "max_tokens": plan.max_tokens,
            "prompts": len(prompts),
            "alternating": plan.alternate,
            "changed": list(plan.changed),
        },
        "notes": notes,
        "comparisons": comparisons,
    }


def about(contestants: Sequence[Contestant], origin: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each contestant's provenance: `origin`, which all share (versions, machine, revision), and its own lane."""
    return [
        {
            **origin,
            "lane": each.lane.key,
            "k": each.lane.k,
            "draft": each.lane.draft,
            "mode": "compiled" if each.lane.compiled else "eager",
            "traced": each.lane.traced,
            "target": each.lane.recipe.target.name,
            "flags": [list(flag) for flag in each.lane.recipe.flags],
            "environment": dict(each.lane.recipe.environment),
        }
        for each in contestants
    ]


def from_traces(traces: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The report of saved traces, the first against each other one: `(name, Trace)` each; names that are the same are numbered."""
    if len(traces) < 2:
        raise LabError("A duel of recordings needs two of them.", todo="Give two traces of the same prompts (.jsonl).")
    traces = list(zip(told_apart([name for name, _ in traces]), (trace for _, trace in traces), strict=True))
    name, first = traces[0]
    comparisons, notes = [], []
    for other_name, other in traces[1:]:
        matched, alone, extra = align.pairs(first.requests, other.requests)
        if not matched:
            raise LabError(f"{name} and {other_name} have no prompt in common.", todo="Give two traces of the same prompts.")
        if alone or extra:
            notes.append(f"Left out: {len(alone)} prompts that only {name} has and {len(extra)} that only {other_name} has.")
        sides = [
            Side(label, _kind(trace.provenance, requests), requests, comparable.side(trace.provenance, requests))
            for label, trace, requests in ((name, first, [a for a, _ in matched]), (other_name, other, [b for _, b in matched]))
        ]
        comparisons.append(compare(sides[0], sides[1]))
        notes.append("Speeds come from two recordings that did not take turns: the machine may have been busier in one of them.")
    requests = first.requests
    return {
        "complete": True,
        "contestants": [
            {"name": label, "lane": str(trace.requests[0].lane), "label": label, "kind": _kind(trace.provenance, trace.requests)}
            for label, trace in traces
        ],
        "setting": {
            "k": comparable.side(first.provenance, requests).get("k"),
            "mode": comparable.side(first.provenance, requests).get("mode"),
            "temperature": comparable.side(first.provenance, requests).get("temperature"),
            "max_tokens": comparable.side(first.provenance, requests).get("max_tokens"),
            "prompts": comparisons[0]["requests"],
            "alternating": False,
            "changed": [],
        },
        "notes": list(dict.fromkeys(notes)),
        "comparisons": comparisons,
    }


def _kind(provenance: Mapping[str, Any], requests: Sequence[Request]) -> str:
    """bf16 or fp8, for the colour."""
    said = requests[0].settings.get("draft") or provenance.get("draft") if requests else None
    return "fp8" if said == "fp8" else "bf16"
