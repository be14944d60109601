"""A sweep of two cells on a real vLLM server with vLLM's own client: token counts against the server's counters, and acceptance twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab import env
from lab.bench import agg
from lab.bench.cli import app
from lab.recipes.smollm2 import DRAFT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]


def test_two_cells(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="the engine is not installed")
    if not (Path(str(env.assets())) / DRAFT.path / "config.json").exists():
        pytest.skip("this checkout holds no trained draft")
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"question_id": 1, "category": "x", "turns": ["a"]}\n{"question_id": 2, "category": "x", "turns": ["a"]}\n')
    folder = tmp_path / "sweep"
    arguments = ["sweep", "--no-baseline", "--concurrency", "2", "--lengths", "64/48", "--prompts", str(prompts), "--max-tokens", "16"]
    arguments += ["--prompts-per", "2", "--warmups-per", "1", "--seeds", "3", "--output", str(folder)]
    ran = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    rows, errors = agg.load([folder])
    assert errors == []
    random, mine = sorted(rows, key=lambda row: row["eagle3_lab_workload"])
    for row in (random, mine):
        own = json.loads((folder / row["eagle3_lab_bench_file"]).read_text())
        counted = row["eagle3_lab_tokens"]
        assert counted["client"] == own["total_output_tokens"] == sum(own["output_lens"])
        warm = counted["server"] - counted["client"]
        if row["eagle3_lab_ignore_eos"]:
            assert counted["agree"], counted
            assert warm == 2 * own["output_lens"][0]
        else:  # a warm-up may end elsewhere by a near-tie: then it is said
            assert 2 <= warm <= 2 * 16
            assert counted["agree"] == (warm == 2 * own["output_lens"][0])
        # under speculation a chunk carries several tokens: counting chunks would have been wrong
        assert sum(len(gaps) for gaps in own["itls"]) < own["total_output_tokens"]
        assert row["eagle3_lab_mean_acceptance_length"] == pytest.approx(own["spec_decode_acceptance_length"])
        assert len(row["eagle3_lab_accepted_by_position"]) == 3
        assert json.loads(own["eagle3_lab_provenance"])["weights"]["target"]["sha256"]
    own = json.loads((folder / random["eagle3_lab_bench_file"]).read_text())
    assert all(38 <= count <= 48 for count in own["output_lens"]), "0.8 to 1.0 of OSL, to the end"
    assert all(45 <= count <= 68 for count in own["input_lens"]), "the chat template is part of ISL"
    own = json.loads((folder / mine["eagle3_lab_bench_file"]).read_text())
    assert set(own["input_lens"]) == {mine["eagle3_lab_template_tokens"] + 1}, "the chat template is applied once"
    # once more, traced: the same prompts, so about the same acceptance (near-ties part some answers), and the share without loops
    found = random["eagle3_lab_without_loops"]
    assert found["all_steps"]["drafts"] == pytest.approx(random["eagle3_lab_drafts"], rel=0.4)
    # tokens of all drafts: as many whatever near-ties do, since the lengths are given; warm-ups would add half as many again
    traced = found["all_steps"]["drafts"] * found["all_steps"]["mean_acceptance_length"]["value"]
    assert traced == pytest.approx(random["eagle3_lab_drafts"] * random["eagle3_lab_mean_acceptance_length"], rel=0.15)
    assert found["all_steps"]["mean_acceptance_length"]["value"] == pytest.approx(random["eagle3_lab_mean_acceptance_length"], abs=0.6)
    assert 0 < found["without_repeated_8grams"]["drafts"] <= found["all_steps"]["drafts"]
    assert "eagle3_lab_without_loops" not in mine
