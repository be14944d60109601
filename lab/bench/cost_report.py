"""What a measured grid says: the fitted model, where a step's time goes, predictions beside measurements, and which K to choose.

Cells are held out of the fit by K, concurrency and context; the error that is published is the one on those. Predicted speed-ups use the
tokens a step that the withheld drafts give for each K (exact for those answers), never the measured tokens of the cell itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lab.bench import cost, pairs, result
from lab.bench.grid import Cell, Measured
from lab.errors import LabError
from lab.trace import whatif

#: vLLM's key in `--speculative-config`, and the file of its installation that reads it.
SCHEDULE_KEY = "num_speculative_tokens_per_batch_size"
SCHEDULE_FILE = "v1/spec_decode/dynamic/utils.py"
CONTEXT = 200.0  # tokens: a short chat in its middle, for which K is chosen


@dataclass(frozen=True)
class Held:
    """What is kept out of the fit."""

    ks: tuple[int, ...] = ()
    concurrencies: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()

    def has(self, cell: Cell) -> bool:
        """Whether a cell is held out."""
        if cell.context is not None:
            return cell.context in self.contexts
        return cell.k in self.ks or cell.requests in self.concurrencies


def middle(values: Sequence[int]) -> tuple[int, ...]:
    """The middle one of three or more values, to be held out; none of fewer."""
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2],) if len(ordered) > 2 else ()


def takes_schedule() -> bool | None:
    """Whether the vLLM that is installed takes K by batch size; None where none is installed. vLLM is not imported."""
    found = find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return None
    return any((Path(place) / SCHEDULE_FILE).exists() for place in found.submodule_search_locations)


def _measured_speedup(measured: Measured, cell: Cell) -> dict[str, float] | None:
    """Decode speed of a cell over the baseline's of the same setting, over the rounds that have both."""
    own, base = measured.steps.get(cell, {}), measured.steps.get(Cell(0, cell.requests, cell.context), {})
    rounds = sorted(set(own) & set(base))
    if not cell.k or not rounds:
        return None

    def sums(steps: Mapping[int, Sequence[Any]]) -> tuple[list[int], list[float]]:
        return [sum(one.tokens for one in steps[n]) for n in rounds], [sum(one.seconds for one in steps[n]) for n in rounds]

    return asdict(pairs.ratio(*sums(own), *sums(base)).pooled)


def _cell(measured: Measured, cell: Cell, point: cost.Point, model: cost.Model, tau: Mapping[int, float], held: bool) -> dict[str, Any]:
    steps = measured.taken(cell)
    seconds, tokens = sum(one.seconds for one in steps), sum(one.tokens for one in steps)
    predicted = model.step(cell.k, cell.requests, point.context)
    parts = {name: getattr(point, name) for name in ("target", "accept", "draft", "rest")}
    found: dict[str, Any] = {
        "k": cell.k,
        "concurrency": cell.requests,
        "context": point.context,
        "long": cell.context is not None,
        "held_out": held,
        "steps": len(steps),
        "tokens_per_step": tokens / sum(one.requests for one in steps),
        "tokens_per_second": tokens / seconds,
        "step_s": point.seconds,
        "predicted_step_s": predicted,
        "error": predicted / point.seconds - 1,
        "parts_s": parts if parts["rest"] is not None else None,
        "between_s": statistics.median(one.between for one in steps),
        "predicted_parts_s": model.parts(cell.k, cell.requests, point.context) if model.timed else None,
        "attention_s": model.attention(cell.k, cell.requests, point.context),
    }
    if cell.k:
        even = model.break_even(cell.k, cell.requests, point.context)
        expected = tau.get(cell.k)
        found |= {
            "break_even": even,
            "break_even_acceptance": None if even is None else cost.acceptance_for(even, cell.k),
            "measured_speedup": _measured_speedup(measured, cell),
            "predicted_speedup": model.speedup(cell.k, cell.requests, point.context, expected) if expected and not found["long"] else None,
            "bound": found["tokens_per_step"],
        }
    return found


def summarise(measured: Measured, held: Held, *, max_batch: int) -> dict[str, Any]:
    """Every number of the result as plain data. `max_batch`: the server's `--max-num-seqs`, where the schedule ends."""
    plan = measured.plan
    points = {cell: point for cell in plan.cells() if (point := measured.point(cell)) is not None}
    fitted = [point for cell, point in points.items() if not held.has(cell)]
    try:
        model = cost.fit(fitted)
    except ValueError as error:
        raise LabError("There is too little to fit a cost model to.", why=f"{len(fitted)} cells were measured; {error}.") from error
    ks = list(range(1, max(plan.ks) + 1))
    found = whatif.replays([request.steps for request in measured.probes], ks)
    tau = {one.k: one.tokens_per_step for one in found if one.tokens_per_step is not None}
    cells = [_cell(measured, cell, point, model, tau, held.has(cell)) for cell, point in points.items()]
    speedups = [
        one["predicted_speedup"] / one["measured_speedup"]["value"] - 1
        for one in cells
        if one["held_out"] and one["k"] and one["predicted_speedup"] and one["measured_speedup"]
    ]
    choices = cost.choose(model, tau, plan.concurrencies, CONTEXT) if tau else []
    ranges = cost.schedule(choices, max_batch) if choices else []
    return {
        "mode": "compiled" if plan.draft.compiled else "eager",
        "draft": plan.draft.draft,
        "rounds": plan.rounds,
        "max_tokens": plan.max_tokens,
        "parts_timed": model.timed,
        "bend_rows": model.bend,
        "coefficients": {
            name: {"seconds": value, "part": cost.COEFFICIENTS[name][0], "of": cost.COEFFICIENTS[name][1]}
            for name, value in model.coefficients.items()
        },
        "held_out": asdict(held),
        "error": {
            "fitted": cost.errors(model, fitted),
            "held_out": cost.errors(model, [point for cell, point in points.items() if held.has(cell)]),
            "speedup_held_out": {"cells": len(speedups), "median": statistics.median(map(abs, speedups)), "worst": max(map(abs, speedups))}
            if speedups
            else None,
        },
        "cells": cells,
        "by_k": [
            {"k": one.k, "tokens_per_step": one.tokens_per_step, "exact": one.exact, "steps": one.estimate, "tokens": one.tokens}
            for one in found
            if one.tokens
        ],
        "answers_withheld": len(measured.probes),
        "choices": [
            {"concurrency": one.requests, "k": one.k, "speedup": one.speedup, "by_k": {str(k): value for k, value in one.by_k.items()}}
            for one in choices
        ],
        "choices_context": CONTEXT,
        "schedule": {"num_speculative_tokens": max(entry[2] for entry in ranges), SCHEDULE_KEY: ranges} if ranges else None,
        "schedule_taken": takes_schedule(),
    }


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.2f}"


def _interval(found: Mapping[str, float], rounds: int) -> str:
    return f" [{found['low']:.2f}, {found['high']:.2f}]" if rounds > 1 else ""  # one round has no spread


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def render(summary: dict[str, Any]) -> str:
    """The result as text for a terminal."""
    text = [f"Steps of {summary['draft'].upper()} drafts and the baseline, {summary['mode']}, medians, milliseconds", ""]
    rows = []
    for one in summary["cells"]:
        parts = one["parts_s"] or {}
        where = f"{'baseline' if not one['k'] else 'K=' + str(one['k'])}, {one['concurrency']} x {one['context']:.0f}"
        rows.append(
            [
                where + (" (held out)" if one["held_out"] else ""),
                str(one["steps"]),
                _ms(one["step_s"]),
                _ms(one["predicted_step_s"]),
                f"{one['error']:+.0%}",
                *(_ms(parts.get(name)) for name in ("target", "accept", "draft", "rest")),
                _ms(one["between_s"]),
            ]
        )
    header = ["requests x context", "steps", "step", "model", "error", "target", "accept", "draft", "rest", "of it between"]
    text += [result.table(header, rows), ""]
    rows = []
    for one in summary["cells"]:
        if not one["k"]:
            continue
        measured, rate = one["measured_speedup"], one["break_even_acceptance"]
        rows.append(
            [
                f"K={one['k']}, {one['concurrency']} x {one['context']:.0f}" + (" (held out)" if one["held_out"] else ""),
                _times(None) if not measured else _times(measured["value"]) + _interval(measured, summary["rounds"]),
                _times(one["predicted_speedup"]),
                f"{one['bound']:.2f}x",
                "-" if one["break_even"] is None else f"{one['break_even']:.2f}",
                "-" if one["break_even"] is None else "none" if rate is None else f"{rate:.0%}",
            ]
        )
    header = ["draft lane over baseline", "measured speed-up", "predicted", "bound", "break-even length", "break-even acceptance"]
    text += [result.table(header, rows), ""]
    text.append("Decode steps only. Predicted: model's step times, and the tokens a step below. Bound: mean acceptance length of the cell.")
    terms = ", ".join(_coefficient(one) for one in summary["coefficients"].values() if one["seconds"])
    text += ["", f"The model, milliseconds: {terms} (the bend is at {summary['bend_rows']} rows)"]
    for name, words in (("fitted", "cells that it was fitted to"), ("held_out", "cells held out")):
        if error := summary["error"][name]:
            text.append(f"Error on {error['points']} {words}: median {error['median']:.1%}, largest {error['worst']:.1%} of a step's time.")
    if error := summary["error"]["speedup_held_out"]:
        spread = f"median {error['median']:.1%}, largest {error['worst']:.1%}"
        text.append(f"Error of the predicted speed-up on {error['cells']} cells held out: {spread}.")
    if not summary["parts_timed"]:
        text.append("The engine did not time the parts of a step: only sums of coefficients mean something.")
    return "\n".join([*text, "", _choice(summary)])


def _coefficient(one: dict[str, Any]) -> str:
    value = one["seconds"] * 1000
    return f"{one['part']}: {value:.3g} {one['of']}"


def _choice(summary: dict[str, Any]) -> str:
    """Would another K have been better?"""
    if not summary["by_k"]:
        return "No answer was asked with its drafts withheld: nothing is known of other K."
    exact = all(one["exact"] for one in summary["by_k"])
    rows = [[f"K={one['k']}", f"{one['tokens_per_step']:.3f}"] for one in summary["by_k"]]
    for choice in summary["choices"]:
        for row, one in zip(rows, summary["by_k"], strict=True):
            value = choice["by_k"].get(str(one["k"]))
            row.append(f"{_times(value)}{' best' if one['k'] == choice['k'] else ''}")
    header = ["", "tokens a step", *(f"at {choice['concurrency']}" for choice in summary["choices"])]
    text = [
        f"Would another K be better? {summary['answers_withheld']} answers, {'exact' if exact else 'partly estimated'} for each K; "
        f"predicted speed-up by requests in flight, context {summary['choices_context']:.0f}",
        "",
        result.table(header, rows),
        "",
    ]
    if summary["schedule"]:
        import json

        text.append(f"K by batch size, for --speculative-config: {json.dumps(summary['schedule'])}")
        text.append("Batch sizes beyond those measured, on either side, take the nearest one's K." + _taken(summary["schedule_taken"]))
    return "\n".join(text)


def _taken(takes: bool | None) -> str:
    if takes is None:
        return " Whether your vLLM takes it, its own --speculative-config says (0.32 does)."
    return " The installed vLLM takes it." if takes else " The installed vLLM does NOT take K by batch size: choose one K."
