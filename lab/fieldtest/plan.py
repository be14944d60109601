"""What a field test does, in order, and about how long each stage takes: pure data, so that `--dry-run` and the run agree.

Where one server fills the machine (a GPU) the stages go lane by lane, so that each lane is started once: its answers for the losslessness
check, then its cells; then the reference, which judges, and last the traced variants, each a lane of its own (tracing switches off async
scheduling, so their speed is not the recipe's). Where all lanes fit together, the traced ones, which show in minutes whether steps are
right, come first, and every load at every concurrency is one stage of all lanes in turns; a reference that fits beside them judges before
the sweep.

Estimates: a start takes what starts took so far in this test, else a round number; a cell's tokens come at the published rate of the same
target where there is one, else at a guess; and once stages of a kind are done, by what they really took. They are labelled as estimates.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

from lab.bench import lossless, origin, sweep
from lab.bench.prompts import Prompt
from lab.bench.published import Published
from lab.bench.workload import Workload, served
from lab.errors import LabError
from lab.recipes.model import DraftChoice, Recipe
from lab.serving.command import Lane

Kind = Literal["doctor", "start", "answers", "sweep", "traces", "judge"]
#: Seconds for a start before any was seen: on a GPU (weights of hundreds of gigabytes, or a model so small that servers share the GPU),
#: compiled and eager on a CPU.
START_GPU, START_SMALL, START_COMPILED, START_EAGER = 900.0, 90.0, 120.0, 60.0
#: Output tokens a second and server that are guessed for one request in flight, growing with concurrency to the power 0.8.
GUESS_GPU, GUESS_SMALL, GUESS_CPU = 60.0, 500.0, 25.0


@dataclass(frozen=True)
class Settings:
    """A field test: which lanes, and how much of everything."""

    recipe: Recipe
    drafts: tuple[DraftChoice, ...]
    workload: Workload
    concurrencies: tuple[int, ...]
    prompts: tuple[Prompt, ...]
    tp: int = 0
    seeds: tuple[int, ...] = (0,)
    prompts_per: int = sweep.PROMPTS
    #: Requests of a cell at least, where `prompts_per` for each one in flight are fewer.
    least: int = 1
    warm_ups_per: int = sweep.WARM_UPS
    verify_at: tuple[int, ...] = (1, 4)
    max_tokens: int = 128
    together: bool = False
    hw: str = ""
    #: Prompts from files that are swept as well, on the same servers.
    texts: tuple[Workload, ...] = ()

    def __post_init__(self) -> None:
        if not self.drafts or len(set(self.drafts)) < len(self.drafts):
            raise LabError("A field test needs lanes, each once.", todo="Leave --draft out for all of the recipe's.")
        if self.recipe.elsewhere:
            raise LabError("A field test starts its own servers.", todo="Run it on the machine itself.")

    def lane(self, draft: DraftChoice, *, traced: bool = False) -> Lane:
        """The measured lane of a draft, as the recipe says (untraced), or its traced variant."""
        recipe = self.recipe
        lane = Lane(recipe, draft, recipe.default_k(draft), recipe.compiled, traced, tp=self.tp)
        return served(lane, self.workload)

    @property
    def reference(self) -> Lane:
        """The baseline that judges answers: it may tell probabilities."""
        lane = lossless.reference(self.recipe, compiled=self.recipe.compiled)
        return served(replace(lane, tp=self.tp or lane.tp), self.workload)

    @property
    def common_k(self) -> int | None:
        """The K at which drafts are compared where their own differ; None where it is the same."""
        ks = {self.recipe.default_k(draft) for draft in self.drafts if draft != "none"}
        return min(ks) if len(ks) > 1 else None

    @property
    def room(self) -> bool:
        """Whether the reference fits beside all measured lanes: they share a GPU, and it is judged before the sweep."""
        one = self.recipe
        return self.together and bool(one.hardware) and (len(self.drafts) + 1) * one.gpu_share <= 1.0

    def definition(self) -> dict[str, Any]:
        """Everything that defines the results, as plain data."""
        return {
            "recipe": origin.plain(self.recipe), "tp": self.tp, "workload": self.workload.definition(), "seeds": list(self.seeds),
            "prompts_per_concurrency": self.prompts_per, "least_prompts": self.least, "warmups_per_concurrency": self.warm_ups_per,
            "texts": [one.definition() for one in self.texts],
            "prompts": [prompt.id for prompt in self.prompts], "verify_at": list(self.verify_at), "max_tokens": self.max_tokens,
        }  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """One stage. `seconds` is the estimate without starting its lanes; `needs` are stages without which it makes no sense."""

    name: str
    title: str
    kind: Kind
    lanes: tuple[Lane, ...] = ()
    seconds: float = 5.0
    needs: tuple[str, ...] = ()
    concurrency: int = 0
    workload: Workload | None = None

    def key(self, settings: Settings, surroundings: Mapping[str, Any]) -> str:
        """16 hexadecimal digits that change with whatever decides its result (`surroundings`: versions and machine)."""
        lanes = [lane.key for lane in self.lanes] or list(settings.drafts)  # the doctor looks at all of them
        text = json.dumps([self.name, lanes, settings.definition(), dict(surroundings)], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def rate(settings: Settings, draft: DraftChoice, concurrency: int, table: Published | None) -> float:
    """Output tokens a second of a whole server, for estimates only."""
    lane = settings.lane(draft)
    for series in table.series if table else ():
        near = [point for point in series.points if point.concurrency <= concurrency]
        if series.draft == draft and near:
            return near[-1].output_tput_per_gpu * lane.tp
    return _of(settings, GUESS_GPU, GUESS_SMALL, GUESS_CPU) * concurrency**0.8


def _of(settings: Settings, gpu: float, small: float, cpu: float) -> float:
    """A guess for the recipe's kind of machine."""
    return cpu if not settings.recipe.hardware else small if settings.recipe.gpu_share < 1.0 else gpu


def _start(lane: Lane) -> Stage:
    variant = "traced variant, its speed is not the recipe's" if lane.rescheduled else "traced variant" if lane.traced else "measured"
    return Stage(f"start-{lane.draft}{'-traced' if lane.traced else ''}", f"Start {lane.label} ({variant})", "start", (lane,), 0.0)


def _asked(settings: Settings, table: Published | None, draft: DraftChoice, at: Iterable[int]) -> float:
    tokens = len(settings.prompts) * settings.max_tokens
    return sum(tokens / rate(settings, draft, concurrency, table) for concurrency in at)


def _sweep(settings: Settings, drafts: Sequence[DraftChoice], workload: Workload, concurrency: int, table: Published | None) -> Stage:
    lanes = tuple(settings.lane(draft) for draft in drafts)
    asked = sweep.requests(concurrency, settings.prompts_per, settings.least) + settings.warm_ups_per * concurrency
    tokens = workload.osl * asked * len(settings.seeds)
    seconds = sum(tokens / rate(settings, draft, concurrency, table) + 3 * len(settings.seeds) for draft in drafts)
    whose = "all lanes in turns" if len(drafts) > 1 else lanes[0].label
    which = "" if workload == settings.workload else f"{workload.name}-"
    name = f"sweep-{'all' if len(drafts) > 1 else drafts[0]}-{which}conc{concurrency}"
    needs = () if len(drafts) > 1 else (f"start-{drafts[0]}",)
    return Stage(name, f"Sweep {workload.name}, concurrency {concurrency}: {whose}", "sweep", lanes, seconds, needs, concurrency, workload)


def stages(settings: Settings, table: Published | None = None) -> list[Stage]:
    """Every stage in running order."""
    found = [Stage("doctor", "Doctor: machine, files and command of every lane", "doctor")]
    own = [draft for draft in settings.drafts if draft != "none"]

    def answers(draft: DraftChoice) -> Stage:
        seconds = _asked(settings, table, draft, settings.verify_at)
        lane = settings.lane(draft)
        title = f"Answers of {lane.label} for the losslessness check"
        return Stage(f"answers-{draft}", title, "answers", (lane,), seconds, (f"start-{draft}",))

    def sweeps(drafts: Sequence[DraftChoice]) -> list[Stage]:
        loads = (settings.workload, *settings.texts)  # side by side, so that a budget that ends early leaves both
        return [_sweep(settings, drafts, load, at, table) for at in settings.concurrencies for load in loads]

    def judged(draft: DraftChoice) -> Stage:
        scoring = len(settings.prompts) * len(settings.verify_at) * (0.2 if settings.recipe.hardware else 2.0)
        seconds = scoring + (_asked(settings, table, "none", settings.verify_at) if draft == own[0] else 0.0)
        title = f"Losslessness of {settings.lane(draft).label}: every token judged by the target"
        return Stage(f"lossless-{draft}", title, "judge", (settings.reference,), seconds, (f"answers-{draft}",))

    if settings.together:
        found += _traces(settings, table)
        found += [_start(settings.lane(draft)) for draft in settings.drafts]
        found += [answers(draft) for draft in own]
        found += [judged(draft) for draft in own] if settings.room else []
        found += sweeps(settings.drafts)
    else:
        for draft in settings.drafts:
            found.append(_start(settings.lane(draft)))
            found += [answers(draft)] if draft in own else []
            found += sweeps((draft,))
    found += [judged(draft) for draft in own] if not settings.room else []
    return found if settings.together else [*found, *_traces(settings, table)]


def _traces(settings: Settings, table: Published | None) -> list[Stage]:
    """The traced variants: each is started, asked, and recorded."""
    found = []
    for draft in settings.drafts:
        lane = settings.lane(draft, traced=True)
        start = _start(lane)
        seconds = _asked(settings, table, draft, (1,)) * (2 if settings.common_k and lane.k > settings.common_k else 1)
        found += [start, Stage(f"traces-{draft}", f"Traces of {lane.label}", "traces", (lane,), seconds, (start.name,))]
    return found


def start_seconds(settings: Settings, records: Iterable[Mapping[str, Any]] = ()) -> float:
    """About how long one more start takes: the slowest one seen in this test, or a round number."""
    seen = [one["seconds"] for one in records if one.get("kind") == "start" and one.get("state") == "done"]
    usual = _of(settings, START_GPU, START_SMALL, START_COMPILED if settings.recipe.compiled else START_EAGER)
    return max(seen, default=usual)


def estimate(
    stage: Stage, settings: Settings, warm: Iterable[str] = (), records: Sequence[Mapping[str, Any]] = (), *, starts: bool = True
) -> float:
    """Seconds that `stage` takes: starts of lanes not in `warm` (keys), and the work, corrected by what such work took so far."""
    alike = [
        one["seconds"] / one["estimate"]
        for one in records
        if one.get("kind") == stage.kind != "start" and one.get("state") == "done" and one.get("estimate", 0) > 1 and not one.get("cold")
    ]
    cold = [lane for lane in stage.lanes if lane.key not in set(warm)] if starts else []
    return stage.seconds * (median(alike) if alike else 1.0) + len(cold) * start_seconds(settings, records)


def schedule(settings: Settings, found: Sequence[Stage]) -> list[tuple[Stage, float]]:
    """Each stage with its estimate, as if all went well: a lane stays warm until another one needs its place."""
    warm, rows = set[str](), []
    for stage in found:
        rows.append((stage, estimate(stage, settings, warm)))
        keys = {lane.key for lane in stage.lanes}
        shared = settings.together and not any(lane.traced for lane in stage.lanes)
        warm = warm | keys if shared or not keys else keys
    return rows
