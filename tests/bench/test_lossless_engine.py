"""The certificate on real engines: the shipped draft passes it, and the same server with a wrong acceptance rule does not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab import env, recipes
from lab.bench import context, lossless, sampled
from lab.bench.prompts import shipped
from lab.bench.scoring import Asker
from lab.recipes.smollm2 import DRAFT
from lab.serving.command import Lane
from lab.serving.lanes import Lanes

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two servers, one start each for everything here: the judge, and a traced draft's lane whose rule can be broken by a file."""
    pytest.importorskip("vllm", reason="the engine is not installed")
    pytest.importorskip("scipy", reason="the test's laws come from scipy")
    if not (Path(str(env.assets())) / DRAFT.path / "config.json").exists():
        pytest.skip("this checkout holds no trained draft")
    recipe, switch = recipes.get("smollm2"), tmp_path_factory.mktemp("rule") / "wrong"
    environment = {**recipe.environment, "PYTHONPATH": str(Path(__file__).parent), "WRONG_RULE": str(switch)}
    flags = (*recipe.flags, ("--worker-extension-cls", "wrong_rule.Extension"))
    breakable = replace(recipe, name="smollm2-breakable", flags=flags, environment=environment)
    lane = Lane(breakable, "bf16", 3)
    plan = lossless.Plan(shipped("chat").prompts[:3], (1, 3), 24, (1.0,), 192, 1)
    rows: dict[str, Any] = {}

    async def work(lanes: Lanes) -> None:
        async with lanes.use(lossless.reference(recipe)) as there, lanes.use(lane) as here:
            async with Asker(there) as judge, Asker(here) as draft:
                base = await lossless.ask_baseline(judge, plan, print)
                rows["base"] = base
                rows["right"] = await lossless.check(lane, draft, judge, base, plan, print)
                if rows["right"]["verdict"] != "lossless":  # by its own level the test fails one right server in a hundred: not twice
                    rows["right"] = await lossless.check(lane, draft, judge, base, plan, print)
                for rule in ("always", "likely"):
                    switch.write_text(rule)
                    rows[rule] = await lossless.check(lane, draft, judge, base, plan, print)
                switch.unlink()
                lengths = context.Plan((64, 256), recipe.max_model_len, 2, 12)
                rows["context"] = context.summarise(await context.measure(draft, lengths, shipped("long").prompts, print), None)

    lanes = Lanes()
    try:
        asyncio.run(work(lanes))
    finally:
        lanes.shutdown()
    return rows


def test_the_shipped_draft_is_lossless(found: dict[str, Any]) -> None:
    right = found["right"]
    assert right["verdict"] == "lossless", right["reasons"]
    greedy = right["greedy"]
    assert [run["concurrency"] for run in greedy["runs"]] == [1, 3]
    assert all(run["identical"] + run["near_ties"] == 3 for run in greedy["runs"])
    assert all(run["tokens"] == 72 for run in greedy["runs"])
    assert 0 < greedy["threshold_nats"] < 1
    assert greedy["noise"]["positions"] > 20


def test_tokens_behind_the_first_were_tested_at_a_temperature(found: dict[str, Any]) -> None:
    (one,) = found["right"]["sampling"]
    assert one["verdict"] == "consistent"
    assert one["tokens"] >= sampled.LEAST  # one context at least; how many answers begin alike is chance
    assert one["prompts"][0]["missing"] < 1e-3
    assert 0 < one["detectable"]["80%"] < one["detectable"]["95%"] < 0.5


def test_draft_tokens_are_greedy_on_this_engine(found: dict[str, Any]) -> None:
    drafting = found["right"]["drafting"]
    assert drafting["way"] == "greedy"
    assert drafting["seen"]["compared"] > 10
    assert drafting["seen"]["equal"] >= 0.9 * drafting["seen"]["compared"]


@pytest.mark.parametrize("rule", ["always", "likely"])
def test_a_wrong_rule_is_found(found: dict[str, Any], rule: str) -> None:
    wrong = found[rule]
    assert wrong["verdict"] == "not lossless"
    assert wrong["reasons"]
    if rule == "always":  # the other one errs only where the draft proposes a token that is likely, but not the likeliest
        assert sum(run["real_differences"] for run in wrong["greedy"]["runs"]) >= 3
        assert wrong["sampling"][0]["verdict"] == "not the target's"
        assert wrong["sampling"][0]["least_p_adjusted"] < 1e-6


def test_the_report_says_it_in_words(found: dict[str, Any]) -> None:
    right, wrong = (lossless.render(found[name], "Eagle3 BF16") for name in ("right", "always"))
    assert "Eagle3 BF16: LOSSLESS" in right
    assert "Eagle3 BF16: NOT LOSSLESS" in wrong
    assert "real difference" in wrong
    assert "would have been found with 80%" in right
    assert "Draft tokens are greedy (seen:" in right


def test_a_step_is_split_into_verifying_and_drafting(found: dict[str, Any]) -> None:
    rows = found["context"]
    assert [row["context"] for row in rows] == [64, 256]
    for row in rows:
        assert 0 < row["share"] < 1
        assert row["verify_s"] + row["draft_s"] < row["step_s"]
        assert row["steps"] > 4
    assert "64 to 256" in context.explain(rows)
    assert context.PUBLISHED_LABEL in context.render(rows)


def test_sampling_needs_answers_that_share_a_beginning() -> None:
    assert sampled.contexts([(n, n) for n in range(1000)], 4) == {}
