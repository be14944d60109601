"""A sweep as a plan: lanes x workloads x concurrencies x seeds, each combination a cell with a key made from everything that defines it.

Order: workload by workload, so that a sweep that is stopped leaves whole ones; of each, one round a seed, in which every concurrency is
measured on all lanes, one lane after the other, in an order that is random in even rounds and reversed in odd ones (`pairs.turns`), so
that drift hits all alike. Where the lanes do not fit into memory together (one GPU), a round takes all workloads lane by lane,
since a start takes longer than many cells.

A cell's key is the SHA-256 of its definition: lane and recipe, weights, workload (with the prompts' own sum), load, versions of vLLM and
the lab, and the machine. The git revision is recorded but not part of it, or every commit would measure everything anew.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lab.bench import pairs
from lab.bench.workload import LOW, Workload, refusal, served
from lab.errors import LabError
from lab.serving.command import Lane

#: Requests and warm-ups of a cell for each request in flight, as published.
PROMPTS = 10
WARM_UPS = 2


def requests(concurrency: int, prompts_per: int, least: int) -> int:
    """How many requests a cell measures."""
    return max(prompts_per * concurrency, least)


@dataclass(frozen=True)
class Cell:
    """One measurement: `prompts` requests after `warm_ups` unmeasured ones, `concurrency` at a time. `low` see `lab.bench.workload`."""

    lane: Lane
    workload: Workload
    concurrency: int
    seed: int
    prompts: int
    warm_ups: int
    low: float = LOW
    temperature: float = 0.0

    @property
    def label(self) -> str:
        """For people: "Eagle3 BF16, K=3, eager · 128/128 · concurrency 4 · seed 0"."""
        return f"{self.lane.label} · {self.workload.name} · concurrency {self.concurrency} · seed {self.seed}"

    @property
    def slug(self) -> str:
        """A file name without its ending."""
        parts = [self.lane.key, self.workload.name, f"conc{self.concurrency}", f"seed{self.seed}"]
        return "_".join("".join(c if c.isalnum() or c in ".-" else "-" for c in part) for part in parts)

    def definition(self, surroundings: Mapping[str, Any]) -> dict[str, Any]:
        """Everything that defines it, as plain data. `surroundings`: weights, versions and machine."""
        recipe = json.loads(json.dumps(asdict(self.lane.recipe), default=str))
        recipe.pop("sources", None)
        return {
            "lane": {key: value for key, value in vars(self.lane).items() if key != "recipe"},
            "recipe": recipe,
            "workload": self.workload.definition(),
            "concurrency": self.concurrency,
            "seed": self.seed,
            "prompts": self.prompts,
            "warm_ups": self.warm_ups,
            "low": self.low,
            "temperature": self.temperature,
            "surroundings": dict(surroundings),
        }

    def key(self, surroundings: Mapping[str, Any]) -> str:
        """16 hexadecimal digits."""
        text = json.dumps(self.definition(surroundings), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Plan:
    """What to measure. `loops`: whether acceptance is measured a second time on a traced lane, to tell it without repeated 8-grams;
    `least`: requests of a cell where `prompts_per` for each one in flight are fewer."""

    lanes: tuple[Lane, ...]
    workloads: tuple[Workload, ...]
    concurrencies: tuple[int, ...]
    seeds: tuple[int, ...] = (0,)
    prompts_per: int = PROMPTS
    warm_ups_per: int = WARM_UPS
    low: float = LOW
    temperature: float = 0.0
    loops: bool = True
    least: int = 1

    def __post_init__(self) -> None:
        if not self.lanes or len({lane.key for lane in self.lanes}) < len(self.lanes):
            raise LabError("A sweep needs lanes, each once.", todo="Keep the baseline, or name drafts.")
        if any(lane.at is not None for lane in self.lanes):
            raise LabError(
                "A sweep measures servers that this lab starts.",
                why="What a server elsewhere runs with (weights, flags, K, machine) cannot be written down, and others may use it.",
                todo="Run eagle3-lab bench sweep on that machine.",
            )
        if not self.workloads or len({one.name for one in self.workloads}) < len(self.workloads):
            raise LabError("A sweep needs lengths or files of prompts, each once.", todo="For example 128/128.")
        if len({lane.compiled for lane in self.lanes}) > 1:
            raise LabError("Eager and compiled lanes are not compared with each other.")
        if not self.concurrencies or not self.seeds or min(*self.concurrencies, self.prompts_per, self.least) < 1 or self.warm_ups_per < 0:
            raise LabError("Concurrency, seeds and prompts must be at least 1.")
        if not 0 < self.low <= 1:
            raise LabError(f"{self.low} is not a share of the lengths.", todo="Choose a number above 0, up to 1: published is 0.8.")

    def cells(self, *, together: bool = True) -> list[Cell]:
        """Every cell in running order, workload by workload and in each seed by seed; `together`: whether all lanes' servers may be warm
        at once."""
        found = []
        first = self.seeds[0] + self.concurrencies[0] + self.workloads[0].osl  # a field test makes a plan of each place: not all alike
        rounds = [*zip(self.seeds, pairs.turns(len(self.lanes), len(self.seeds), first), strict=True)]
        loads = [(one,) for one in self.workloads] if together else [self.workloads]
        for workloads, (seed, order) in itertools.product(loads, rounds):
            places = [(workload, concurrency) for workload in workloads for concurrency in self.concurrencies]
            if together:
                # The next place takes the lanes backwards, so that none is always the one after a rest.
                steps = [(lane, *place) for number, place in enumerate(places) for lane in (order if number % 2 == 0 else order[::-1])]
            else:
                steps = [(lane, *place) for lane in order for place in places]
            found += [self._cell(self.lanes[lane], which, concurrency, seed) for lane, which, concurrency in steps]
        return found

    def _cell(self, lane: Lane, workload: Workload, concurrency: int, seed: int) -> Cell:
        return Cell(
            served(lane, workload),
            workload,
            concurrency,
            seed,
            requests(concurrency, self.prompts_per, self.least),
            self.warm_ups_per * concurrency,
            self.low,
            self.temperature,
        )

    def refusals(self) -> list[tuple[str, int, str]]:
        """What can be told before anything starts: workload, concurrency and the reason why it will not be measured."""
        found = []
        for workload in self.workloads:
            for concurrency in self.concurrencies:
                if why := refusal(served(self.lanes[0], workload), workload, concurrency):
                    found.append((workload.name, concurrency, why))
        return found

    @property
    def tokens(self) -> int:
        """Output tokens of the whole sweep at most, warm-ups included: for an estimate of how long it takes."""
        asked = sum(requests(c, self.prompts_per, self.least) + self.warm_ups_per * c for c in self.concurrencies)
        return asked * sum(workload.osl for workload in self.workloads) * len(self.lanes) * len(self.seeds)


def folder_name(plan: Plan, keys: Sequence[str]) -> str:
    """A folder's name for a plan: the same plan in the same surroundings finds its own results again."""
    return f"sweep-{plan.lanes[0].recipe.name}-{hashlib.sha256(' '.join(sorted(keys)).encode()).hexdigest()[:8]}"
