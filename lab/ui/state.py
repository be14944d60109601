"""What the page remembers, without gradio: a session's settings, and the server's registry of runs.

A reload of the page is a new session to gradio, so runs live in one registry per app, under random names that only the browser which made
them knows. The registry is bounded: the oldest runs go first. Times are seconds, speeds are tokens per second.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lab.errors import LabError
from lab.provenance import collect
from lab.recipes.model import DraftChoice, Recipe
from lab.serving.command import Lane
from lab.trace.counted import rebuilt
from lab.trace.model import Request, Trace
from lab.trace.stats import Counts

RunState = Literal["running", "done", "stopped", "failed", "opened"]

#: Alternatives of the target that are asked for when the person wants to see them.
ALTERNATIVES = 5


def whole_k(recipe: Recipe, draft: str, k: float | None) -> int:
    """K as the bar's number field gives it, checked for `draft`; raises a `LabError` for what the recipe cannot do."""
    if k is None or not float(k).is_integer():
        raise LabError("K is not a whole number.", todo=f"Choose 1 to {recipe.k_max}.")
    if draft != "none" and not 1 <= k <= recipe.k_max:
        raise LabError(f"K = {k:g} draft tokens a step is out of range.", todo=f"Choose 1 to {recipe.k_max}.")
    return int(k)


@dataclass(frozen=True)
class Settings:
    """What the prompt bar says when a button is pressed."""

    prompt: str
    draft: DraftChoice
    k: int
    temperature: float
    max_tokens: int
    alternatives: bool = False

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        prompt: str,
        draft: str,
        k: float | None,
        temperature: float | None,
        max_tokens: float | None,
        alternatives: bool,
    ) -> Settings:
        """The bar's values, checked; raises a `LabError` for what the recipe cannot do."""
        if not prompt.strip():
            raise LabError("The prompt is empty.", todo="Type a prompt or choose an example.")
        choices = recipe.draft_choices()
        if draft not in choices:
            raise LabError(f"Recipe '{recipe.name}' has no draft '{draft}'.", todo=f"It offers: {', '.join(choices)}.")
        number = whole_k(recipe, draft, k)
        if temperature is None:
            raise LabError("Temperature is empty.", todo="Choose 0 (greedy) to 2.")
        if max_tokens is None:
            raise LabError("The number of new tokens is empty.", todo=f"Choose 1 to {recipe.max_model_len}.")
        if not 0 <= temperature <= 2:
            raise LabError(f"Temperature {temperature:g} is out of range.", todo="Choose 0 (greedy) to 2.")
        if not 1 <= max_tokens <= recipe.max_model_len:
            raise LabError(f"{max_tokens:g} new tokens do not fit.", todo=f"Choose 1 to {recipe.max_model_len}, this recipe's context.")
        kind: DraftChoice = "bf16" if draft == "bf16" else "fp8" if draft == "fp8" else "none"
        return cls(prompt, kind, 0 if kind == "none" else number, float(temperature), int(max_tokens), bool(alternatives))

    def lane(self, recipe: Recipe, *, traced: bool = True) -> Lane:
        """The lane that these settings run on, eager where the recipe is: those start quickly."""
        return Lane(recipe, self.draft, self.k, compiled=recipe.compiled, traced=traced)


@dataclass
class Run:
    """One request on one lane, growing while it runs."""

    id: str
    request: Request
    kind: DraftChoice
    #: For people: "Eagle3 BF16, K=3, eager".
    label: str
    provenance: dict[str, Any]
    state: RunState = "running"
    #: Ids of the answer from the server's own stream, where it gives them (lanes without tracing have no steps).
    ids: list[int] = field(default_factory=list)
    #: Text of the answer by chunks of the stream: `(text, ids)`.
    chunks: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    #: Seconds since the request, output tokens per second, from the server's counters.
    speed: list[tuple[float, float]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: The most requests that shared the engine with this one, itself included, as far as seen.
    busiest: int = 1
    #: Of an answer without steps: what the server's counters gained while it was written, other people's requests included.
    counters: Counts | None = None

    @classmethod
    def of(cls, lane: Lane, settings: Settings) -> Run:
        """A run about to start, known to nobody yet."""
        name = secrets.token_hex(8)
        sent = {"temperature": settings.temperature, "max_tokens": settings.max_tokens, "k": lane.k, "draft": lane.draft}
        return cls(
            name, Request(trace=name, lane=lane.key, prompt=settings.prompt, settings=sent), lane.draft, lane.label, provenance_of(lane)
        )

    def view(self) -> Run:
        """The run as the page shows it: itself, or with steps rebuilt from the server's counts where those are all there is."""
        request = rebuilt(self.request)
        return self if request is None else replace(self, request=request)

    def output_ids(self) -> tuple[int, ...]:
        """Ids of the answer: from the steps, or from the server's stream where there are none."""
        return self.request.output_ids() or tuple(self.ids)

    def output_speed(self) -> float | None:
        """Output tokens per second on the client's clock: tokens of the usage record over seconds from sending to the last token."""
        count, seconds = self.request.usage_completion or len(self.output_ids()), self.request.elapsed
        return count / seconds if count and seconds else None


def provenance_of(lane: Lane, **extra: Any) -> dict[str, Any]:
    """Where a run's numbers come from: recipe, lane, mode, and this machine's versions."""
    if lane.at is not None:
        note = "versions and hardware are of the machine with the page, not of the server"
        return collect(recipe=lane.recipe.name, lane=lane.key, draft=lane.draft, server={"address": lane.at}, note=note, **extra)
    return collect(
        recipe=lane.recipe.name,
        lane=lane.key,
        mode="compiled" if lane.compiled else "eager",
        scheduling="synchronous, for tracing" if lane.rescheduled else "the recipe's",
        traced=lane.traced,
        draft=lane.draft,
        k=lane.k,
        target=lane.recipe.target.name,
        flags=[" ".join(part for part in flag if part) for flag in lane.recipe.flags],
        **extra,
    )


class Runs:
    """The app's runs by id, the oldest leaving first."""

    def __init__(self, limit: int = 400) -> None:
        self.limit = limit
        self._runs: OrderedDict[str, Run] = OrderedDict()

    def new(self, lane: Lane, settings: Settings) -> Run:
        """A run about to start."""
        return self.add(Run.of(lane, settings))

    def opened(self, request: Request, provenance: Mapping[str, Any], label: str) -> Run:
        """A run that comes from a file."""
        name = secrets.token_hex(8)
        said = request.settings.get("draft") or provenance.get("draft")
        drafted = any(step.draft for step in request.steps)
        kind: DraftChoice = "fp8" if drafted and said == "fp8" else "bf16" if drafted else "none"
        return self.add(Run(name, request, kind, label, dict(provenance), state="opened"))

    def add(self, run: Run) -> Run:
        """Keep a run; the oldest make room."""
        self._runs[run.id] = run
        while len(self._runs) > self.limit:
            self._runs.popitem(last=False)
        return run

    def get(self, name: str | None) -> Run | None:
        """The run called `name`, if it is still here."""
        return self._runs.get(name) if name else None

    def trace(self, *names: str | None) -> Trace:
        """The named runs as a trace to save; raises a `LabError` where there is nothing."""
        runs = [run for name in names if (run := self.get(name)) is not None and (run.request.steps or run.request.text)]
        if not runs:
            raise LabError("There is nothing to save yet.", todo="Run a prompt first.")
        provenance = dict(runs[0].provenance)
        if len(runs) > 1:
            provenance["runs"] = [run.provenance for run in runs]
        return Trace(provenance=provenance, requests=[run.request for run in runs])


@dataclass
class Session:
    """One open page. It holds names of runs, never their content."""

    run: str | None = None
    #: The tab whose run Stop ended.
    active: Literal["microscope", "beside", "duel", "race", "why", "quantise", "proof", "barrier"] = "microscope"
    #: Requests of an opened file, by label.
    opened: dict[str, str] = field(default_factory=dict)
    #: The latest run of each lane (by lane key), for the chart over time.
    latest: dict[str, str] = field(default_factory=dict)
    #: The comparison on screen: run ids of baseline and draft lane, and the pairs measured with the same settings.
    baseline: str | None = None
    other: str | None = None
    pairs: list[tuple[float, float]] = field(default_factory=list)
    pairs_of: tuple[Settings, str] | None = None
    #: The duel that runs or ran last: what was measured, its provenance, each draft's, and its title.
    duel: tuple[Any, dict[str, Any], list[dict[str, Any]], str] | None = None
    #: The race that runs or ran last (`lab.bench.race.Race`).
    race: Any = None
    #: The measurement of the cost model that runs, by a name that its tab knows.
    why: str | None = None
    #: The lane that the barrier's demonstration began, as long as Stop should end it.
    barrier: Lane | None = None
    #: Whether the microscope's prompt still waits for its engine: `run` is then an earlier one.
    waiting: bool = False
    #: The lane that failed last, which the restart button starts again.
    failed: Lane | None = None
    #: Handlers that Stop would cancel and that have not ended (`lab.ui.app.working`).
    at_work: set[object] = field(default_factory=set)
