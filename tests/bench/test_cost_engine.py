"""Smaller K on a real engine: what the withheld drafts promise, and what runs with that K then do."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from lab import env, recipes
from lab.bench import cost, grid
from lab.bench.prompts import shipped
from lab.recipes.smollm2 import DRAFT
from lab.serving.client import DEPTH_ARGUMENT, WITHHOLD_ARGUMENT
from lab.serving.command import Lane
from lab.serving.lanes import Lanes
from lab.trace import whatif
from lab.trace.model import Request

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]
TOKENS = 40


@pytest.fixture(autouse=True)
def _engine() -> None:
    pytest.importorskip("vllm", reason="the engine is not installed")
    if not (Path(str(env.assets())) / DRAFT.path / "config.json").exists():
        pytest.skip("this checkout holds no trained draft")


def decode_steps(request: Request) -> int:
    return sum(step.phase == "decode" and bool(step.sampled) for step in request.steps)


def test_withheld_drafts_predict_real_runs_with_every_smaller_k() -> None:
    """A server with K=3, asked for 1, 2 and 3 draft tokens: where the answer is the same, the steps are those that were promised."""
    prompts = [shipped(kind).prompts[0] for kind in ("chat", "code", "maths")]
    recipe = recipes.get("smollm2")  # in FP32: in BF16 a processor's kernels round near-ties by the shape of the batch
    flags = tuple((name, "float32" if name == "--dtype" else value) for name, value in recipe.flags)
    lane = Lane(replace(recipe, name="smollm2-fp32", flags=flags), "bf16", 3)

    async def measure() -> tuple[list[Request], dict[int, list[Request]], list[Request]]:
        lanes = Lanes()
        try:
            async with lanes.use(lane) as endpoint:
                withheld = [await grid.ask(endpoint, one, TOKENS, {WITHHOLD_ARGUMENT: 1}) for one in prompts]
                real = {
                    k: [await grid.ask(endpoint, one, TOKENS, {DEPTH_ARGUMENT: k} if k < 3 else {}) for one in prompts] for k in (1, 2, 3)
                }
                together = await grid.ask_all(endpoint, prompts[:2], 2, TOKENS, {DEPTH_ARGUMENT: 2})
                return withheld, real, together
        finally:
            await lanes.close()

    withheld, real, together = asyncio.run(measure())
    for request in withheld:
        steps = [step for step in request.steps if step.phase == "decode"]
        assert all(step.withheld and not step.draft and step.kept == 1 for step in steps), "every place has its proposal"
        assert all(len(step.withheld) == 3 for step in steps)
    same = 0
    for k, requests in real.items():
        for request, known in zip(requests, withheld, strict=True):
            drafted = [step for step in request.steps if step.phase == "decode"]
            assert {len(step.draft) for step in drafted} == {k}
            promised = whatif.replay(whatif.answer_of(known.steps), k)
            assert promised.exact
            if request.output_ids() != known.output_ids():
                continue  # a near-tie in a batch of another shape: it is another answer
            same += 1
            assert abs(decode_steps(request) - promised.fewest) <= 1, f"K={k}: a draft's near-tie may move one step"
            own = whatif.replay(whatif.answer_of(real[3][requests.index(request)].steps), k)
            if real[3][requests.index(request)].output_ids() == request.output_ids():
                assert own.fewest <= decode_steps(request) + 1
                assert decode_steps(request) <= own.most + 1
    assert same >= 6, "most answers are the same, or nothing was tested"
    exact = sum(
        decode_steps(request) == whatif.replay(whatif.answer_of(known.steps), k).fewest
        for k, requests in real.items()
        for request, known in zip(requests, withheld, strict=True)
        if request.output_ids() == known.output_ids()
    )
    assert exact >= same - 1
    assert sum(one.fewest for one in whatif.replays([request.steps for request in withheld], [1])) > sum(
        one.fewest for one in whatif.replays([request.steps for request in withheld], [3])
    ), "a trained draft has some second token right"
    # steps of two requests at once, timed in parts
    taken = grid.engine_steps(together, 2, 2)
    assert taken
    assert all(one.target and one.draft is not None and one.seconds >= one.target for one in taken)
    found = grid.Measured(
        grid.Plan(Lane(lane.recipe), lane, (3,), (2,), tuple(prompts)),
        {grid.Cell(3, 2): {0: taken}},
    )
    point = found.point(grid.Cell(3, 2))
    assert isinstance(point, cost.Point)
    assert point.rest is not None
