"""Which engine steps count, and what a grid of planted costs says in the end."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from lab import recipes
from lab.bench import cost, cost_report, grid
from lab.bench.grid import Cell, Measured, Plan, Taken
from lab.bench.prompts import Prompt
from lab.errors import LabError
from lab.serving.command import Lane
from lab.trace.model import Request, Step

RECIPE = recipes.get("smollm2")
PROMPTS = tuple(Prompt(f"p{number}", "chat", "hello") for number in range(30))
LONG = tuple(Prompt(f"long-{context}-{n}", "long", "long", context) for context in (1024, 2048) for n in range(3))
TRUTH = cost.Model({"t0": 8e-3, "t_row": 4e-4, "t_context": 3e-7, "d0": 9e-4, "d_row": 4e-5, "r0": 1e-3, "r_draft": 6e-4}, True)
TAU = {1: 1.6, 2: 2.0, 3: 2.2, 5: 2.4}


def plan(**changes: Any) -> Plan:
    given: dict[str, Any] = {
        "baseline": Lane(RECIPE),
        "draft": Lane(RECIPE, "bf16", 5),
        "ks": (1, 2, 3, 5),
        "concurrencies": (1, 2, 4),
        "prompts": PROMPTS,
        "long": LONG,
        "rounds": 2,
    }
    return Plan(**{**given, **changes})


def step(request: str, started: float, *, k: int = 2, batch: int = 2, **more: Any) -> Step:
    given: dict[str, Any] = {
        "trace": request,
        "request": request,
        "index": 0,
        "phase": "decode",
        "started": started,
        "ended": started + 0.8,
        "draft": tuple(range(k)),
        "sampled": (0, 9)[: 2 if k else 1],
        "kept": 2 if k else 1,
        "context": 10,
        "batch_requests": batch,
        "verify_s": 0.5,
        "accept_s": 0.1,
        "draft_s": 0.15,
    }
    return Step(**{**given, **more})


def requests(*steps: Step) -> list[Request]:
    names = dict.fromkeys(one.request for one in steps)
    return [Request(trace=name, lane="l", prompt="p", steps=[one for one in steps if one.request == name]) for name in names]


def test_a_step_is_timed_from_the_end_of_the_one_before() -> None:
    found = grid.engine_steps(requests(*(step(name, at) for at in (0.0, 1.0) for name in "ab")), 2, 2)
    (one,) = found
    assert one.seconds == pytest.approx(1.0)
    assert one.between == pytest.approx(0.2)
    assert (one.tokens, one.requests, one.context, one.target) == (4, 2, 10, 0.5)


@pytest.mark.parametrize(
    "spoilt",
    [
        [step("a", 0.0), step("a", 1.0), step("b", 1.0)],  # a request joined
        [step("a", 0.0), step("b", 0.0), step("a", 1.0)],  # one has left: the batch is smaller
        [step("a", 0.0), step("b", 0.0), step("a", 1.0, batch=3), step("b", 1.0, batch=3)],  # somebody untraced is in the batch
        [step("a", 0.0), step("b", 0.0), step("a", 1.0, k=1), step("b", 1.0)],  # another K
        [step("a", 0.0), step("b", 0.0), step("a", 1.0, draft=(-1, -1)), step("b", 1.0)],  # padding
        [step("a", 0.0), step("b", 0.0), step("a", 1.0, phase="prefill"), step("b", 1.0)],
        [step("a", 0.0, phase="prefill"), step("b", 0.0), step("a", 1.0), step("b", 1.0)],  # its time began in a prefill
    ],
)
def test_steps_that_are_not_of_the_cell_do_not_count(spoilt: list[Step]) -> None:
    assert grid.engine_steps(requests(*spoilt), 2, 2) == []


def test_every_cell_is_measured_in_every_round_on_the_same_prompts() -> None:
    made = plan()
    work = made.schedule()
    assert len(made.cells()) == 3 * 5 + 2 * 3
    for number in range(2):
        cells = [cell for n, cell, _ in work if n == number]
        assert sorted(cells, key=str) == sorted(made.cells(), key=str)
        for setting in made.settings():
            those = {prompts for n, cell, prompts in work if n == number and (cell.requests, cell.context) == setting}
            assert len(those) == 1
    first, second = ([cell.k for n, cell, _ in work if n == number and cell.requests == 4] for number in range(2))
    assert second == first[::-1], "the second round runs backwards"


@pytest.mark.parametrize(
    "bad", [{"ks": ()}, {"ks": (1, 1, 5)}, {"ks": (1, 2)}, {"concurrencies": ()}, {"concurrencies": (0,)}, {"rounds": 0}]
)
def test_a_senseless_grid_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(LabError):
        plan(**bad)


def measured(*, spoil: float = 1.0) -> Measured:
    """A grid whose steps cost exactly what `TRUTH` says (K = 2 times `spoil`), and answers whose drafts were withheld."""
    found = Measured(plan())
    for cell in found.plan.cells():
        context = float(cell.context or 100)
        parts = TRUTH.parts(cell.k, cell.requests, context)
        seconds = sum(parts.values()) * (spoil if cell.k == 2 else 1.0)
        tokens = TAU.get(cell.k, 1.0) * cell.requests
        steps = [
            Taken(seconds, round(tokens * 100) // 100, cell.requests, context, parts["target"], parts["accept"], parts["draft"], 1e-4)
            for _ in range(20)
        ]
        found.steps[cell] = {0: steps[:10], 1: steps[10:]}
    answer = list(range(100, 140))
    withheld = [Step(trace="t", request="r", index=0, phase="prefill", started=0, ended=1, sampled=(100,), kept=1)]
    for place in range(1, 40):
        ahead = answer[place : place + 2] + [0] * 5
        more = {"withheld": tuple(ahead[:5]), "sampled": (answer[place],), "kept": 1}
        withheld.append(Step(trace="t", request="r", index=place, phase="decode", started=place, ended=place + 1, **more))
    found.probes = [Request(trace="t", lane="l", prompt="p", steps=withheld)]
    return found


HELD = cost_report.Held((2,), (2,), (2048,))


def test_a_grid_of_planted_costs_is_explained() -> None:
    summary = json.loads(json.dumps(cost_report.summarise(measured(), HELD, max_batch=32)))
    assert summary["error"]["held_out"]["worst"] < 1e-6
    assert summary["error"]["held_out"]["points"] == sum(HELD.has(cell) for cell in plan().cells()) == 10
    assert summary["coefficients"]["t0"]["seconds"] == pytest.approx(8e-3)
    assert [one["k"] for one in summary["by_k"]] == [1, 2, 3, 4, 5]
    assert all(one["exact"] for one in summary["by_k"])
    assert summary["by_k"][0]["steps"] == 20, "two tokens a step"
    assert summary["by_k"][1]["tokens_per_step"] == summary["by_k"][4]["tokens_per_step"] == 3.0, "the draft is right twice, then never"
    assert {choice["k"] for choice in summary["choices"]} == {2}
    assert summary["schedule"] == {"num_speculative_tokens": 2, "num_speculative_tokens_per_batch_size": [[1, 32, 2]]}
    for cell in summary["cells"]:
        assert cell["predicted_step_s"] == pytest.approx(cell["step_s"])
        if cell["k"]:
            assert cell["measured_speedup"]["value"] <= cell["bound"] + 1e-9
            assert cell["break_even"] > 1
    text = cost_report.render(summary)
    assert "held out" in text
    assert '"num_speculative_tokens_per_batch_size": [[1, 32, 2]]' in text
    assert "exact for each K" in text


def test_one_round_has_no_interval() -> None:
    summary = cost_report.summarise(measured(), HELD, max_batch=32)
    several = cost_report.render(summary)
    once = cost_report.render(summary | {"rounds": 1})
    assert re.search(r"\d\.\d\dx \[\d", several)
    assert not re.search(r"\d\.\d\dx \[\d", once)


def test_an_error_on_cells_held_out_is_published() -> None:
    summary = cost_report.summarise(measured(spoil=1.4), HELD, max_batch=32)
    assert summary["error"]["held_out"]["worst"] == pytest.approx(1 - 1 / 1.4, rel=1e-3)
    assert "largest 28.6%" in cost_report.render(summary)


def test_an_interrupted_grid_says_so_or_is_explained() -> None:
    found = measured()
    found.probes = []
    summary = cost_report.summarise(found, HELD, max_batch=32)
    assert summary["schedule"] is None
    assert "nothing is known of other K" in cost_report.render(summary)
    found.steps = {cell: steps for cell, steps in found.steps.items() if cell.k}
    with pytest.raises(LabError, match="too little"):
        cost_report.summarise(found, HELD, max_batch=32)


def test_cells_kept_out() -> None:
    assert cost_report.middle([1, 2, 3, 5]) == (2,)
    assert cost_report.middle([4, 1, 2]) == (2,)
    assert cost_report.middle([1, 4]) == ()
    assert HELD.has(Cell(2, 1))
    assert not HELD.has(Cell(2, 1, 1024)), "long prompts are held out by their context"
    assert HELD.has(Cell(0, 1, 2048))
