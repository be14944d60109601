"""A duel on real engines, as short as it can be: FP8 is accepted like BF16, a draft without its low feature level is accepted less."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab import env
from lab.bench.duel_cli import app
from lab.recipes.smollm2 import DRAFT
from lab.trace import align, io, stats

pytestmark = pytest.mark.engine


@pytest.mark.timeout(1800)
def test_bf16_meets_fp8_and_itself_without_a_level(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="the engine is not installed")
    pytest.importorskip("quark", reason="AMD Quark is not installed")
    if not (Path(str(env.assets())) / DRAFT.path / "config.json").exists():
        pytest.skip("this checkout holds no trained draft")
    output, folder = tmp_path / "d.json", tmp_path / "traces"
    arguments = ["bf16", "fp8", "bf16-low", "--limit", "2", "--max-tokens", "24", "--output", str(output), "--traces", str(folder)]
    ran = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert ran.exit_code == 0
    report = json.loads(output.read_text())
    fp8, cut = report["comparisons"]
    assert report["setting"]["prompts"] == 6
    assert abs(fp8["mean_acceptance_length"]["difference"]) < 0.4
    assert cut["outcome"] == "worse"
    assert "BF16 without low level is worse than BF16" in ran.output
    assert all("Not comparable" not in warning for each in (fp8, cut) for warning in each["warnings"])
    assert cut["places"]["one"] > cut["places"]["other"]

    # the report's numbers are those of the traces, and every place is a token of the answer
    traces = {path.stem: io.load(path).requests for path in folder.glob("*.jsonl")}
    assert set(traces) == {"bf16", "fp8", "bf16-without-low-level"}
    total = stats.count(step for request in traces["bf16"] for step in request.steps)
    assert fp8["mean_acceptance_length"]["one"] == total.mean_acceptance_length
    for request in (each for one in traces.values() for each in one):
        assert tuple(each.token for each in align.decisions(request)) == request.output_ids()
    matched, alone, extra = align.pairs(traces["bf16"], traces["fp8"])
    assert (len(matched), alone, extra) == (6, [], [])
    assert "<script" not in output.with_suffix(".html").read_text()
