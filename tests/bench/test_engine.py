"""Both commands on a real engine with the shipped draft, as short as they can be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab import env, recipes
from lab.bench.cli import app
from lab.recipes.smollm2 import DRAFT
from lab.trace import io

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]


@pytest.fixture(autouse=True)
def _engine() -> None:
    pytest.importorskip("vllm", reason="the engine is not installed")
    if not (Path(str(env.assets())) / DRAFT.path / "config.json").exists():
        pytest.skip("this checkout holds no trained draft")


def test_acceptance_agrees_with_the_servers_counters(tmp_path: Path) -> None:
    output, trace = tmp_path / "a.json", tmp_path / "a.jsonl"
    arguments = ["acceptance", "--limit", "2", "--max-tokens", "24", "--output", str(output), "--trace", str(trace)]
    ran = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert ran.exit_code == 0
    found = json.loads(output.read_text())
    assert found["counters"]["agree"], found["counters"]
    assert found["counters"]["server"]["drafts"] > 20
    assert set(found["kinds"]) == {"chat", "maths", "code"}
    assert found["overall"]["mean_acceptance_length"]["value"] > 1.2, "a trained draft is accepted sometimes"
    assert found["contexts"]["1024"]["prompts"] == 2
    rows = {row["id"]: row for row in map(json.loads, (env.assets() / "prompts" / "long.jsonl").read_text().splitlines())}
    for answer in found["answers"]:
        if answer["context"]:
            assert answer["prompt_tokens"] == rows[answer["prompt"]]["tokens"]
    assert found["provenance"]["prompts"]["chat.jsonl"]["sha256"]
    assert len(io.load(trace).requests) == 8


def test_speedup_measures_both_lanes(tmp_path: Path) -> None:
    output = tmp_path / "s.json"
    arguments = ["speedup", "--pairs", "2", "--max-tokens", "24", "--output", str(output)]
    ran = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert ran.exit_code == 0
    found = json.loads(output.read_text())
    assert [lane["draft"] for lane in found["lanes"]] == ["none", "bf16"]
    assert found["lanes"][0]["mean_acceptance_length"] is None
    assert found["lanes"][1]["mean_acceptance_length"] > 1
    (ratio,) = found["ratios"]
    assert 0.1 < ratio["pooled"]["value"] < 2 * recipes.get("smollm2").k
    assert ratio["token_ids"]["answers"] == 2
    assert found["mode"] == "eager"
    assert found["mode"] in ran.output
