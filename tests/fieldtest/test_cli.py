"""The command: its plan, what it refuses, and a whole run with stand-ins for the stages: archive, exit codes, going on."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lab.bench import lossless, sweep_run
from lab.bench.scoring import Asker, Completion, Scored
from lab.errors import LabError
from lab.fieldtest import cli, plan, report, scrub, stages
from lab.fieldtest.stages import Replayed
from lab.serving.command import Lane
from tests.fieldtest.made import ORIGIN, small


def invoke(*words: str) -> Any:
    return CliRunner().invoke(cli.app, list(words))


def test_the_plan_is_printed_and_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_LAB_CACHE", str(tmp_path / "cache"))
    result = invoke("kimi-k2.5", "--dry-run", "--budget", "60")
    assert result.exit_code == 0, result.output
    assert "Sweep 1024/1024, concurrency 64: Eagle3 FP8, K=6, compiled" in result.output
    assert "does not fit into the budget" in result.output
    assert "published throughputs" in result.output
    assert "rough guesses" in invoke("smollm2", "--quick", "--dry-run").output
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("nothing",), "no recipe called"),
        (("smollm2", "--draft", "fp4"), "has no draft"),
        (("smollm2", "--lengths", "1K/1K,2K/1K"), "one pair of lengths"),
        (("smollm2", "--lengths", "x"), "not a pair of lengths"),
        (("smollm2", "--concurrency", "0"), "out of range"),
        (("smollm2", "--seeds", "a"), "not a number"),
        (("smollm2", "--tp", "4"), "not made for 4 GPUs"),
        (("smollm2", "--budget", "inf", "--dry-run"), "no number of minutes"),
    ],
)
def test_what_it_refuses(words: tuple[str, ...], what: str) -> None:
    result = invoke(*words)
    assert isinstance(result.exception, LabError), result.output
    assert what in str(result.exception)


def test_a_gpu_recipe_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from lab.doctor import machine
    from lab.serving import process

    monkeypatch.setattr(process, "launcher", lambda: ("vllm", "serve"))
    monkeypatch.setattr(machine, "this_machine", machine.Machine)
    result = invoke("kimi-k2.5", "--output", str(tmp_path / "run"))
    assert "needs a GPU" in str(result.exception)
    assert not (tmp_path / "run").exists()


class StandIn(stages.Stages):
    """Leaves a file a stage, and fails where it is told."""

    fail: str = ""

    async def __call__(self, stage: plan.Stage) -> str:
        if stage.name == StandIn.fail:
            raise LabError("Boom.", why="planted-secret-value-99 was in the log.")
        self._write(f"made/{stage.name}.json", {"key": "planted-secret-value-99", "stage": stage.name})
        return "fine"


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "Stages", StandIn)
    monkeypatch.setattr(cli, "_can_run", lambda _settings: None)
    monkeypatch.setattr(StandIn, "fail", "")
    monkeypatch.setenv("FIELD_API_KEY", "planted-secret-value-99")


@pytest.mark.usefixtures("ready")
def test_a_whole_run_and_one_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "field"
    monkeypatch.setattr(StandIn, "fail", "answers-bf16")
    result = invoke("smollm2", "--quick", "--output", str(folder))
    assert result.exit_code == 3, result.output
    assert "failed: Answers of Eagle3 BF16" in result.output
    assert "skipped: Losslessness of Eagle3 BF16" in result.output
    target = tmp_path / "fieldtest-field.zip"
    with zipfile.ZipFile(target) as made:
        names, held = made.namelist(), {name: made.read(name).decode() for name in made.namelist()}
    assert "fieldtest-field/report.html" in names
    assert "fieldtest-field/fieldtest.json" in names
    assert "fieldtest-field/made/traces-fp8.json" in names
    assert not [name for name, text in held.items() if "planted-secret-value-99" in text]
    assert "planted-secret-value-99" in (folder / "made" / "doctor.json").read_text(), "it was there"
    assert "Boom. [removed] was in the log." in held["fieldtest-field/report.html"]
    assert scrub.of_machine().leaks(held["fieldtest-field/fieldtest.json"]) == 0
    monkeypatch.setattr(StandIn, "fail", "")
    again = invoke("smollm2", "--quick", "--output", str(folder), "--archive", str(tmp_path / "b.zip"))
    assert again.exit_code == 0, again.output
    assert len(json.loads((folder / "fieldtest.json").read_text())["runs"]) == 2
    assert (tmp_path / "b.zip").exists()


@pytest.mark.usefixtures("ready")
def test_a_budget_that_ends_is_said(tmp_path: Path) -> None:
    result = invoke("smollm2", "--quick", "--output", str(tmp_path / "field"), "--budget", "0.5")
    assert result.exit_code == 3
    assert "of the budget left" in result.output
    assert (tmp_path / "fieldtest-field.zip").exists()


@pytest.mark.usefixtures("ready")
def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for words in (
        ("--output", str(tmp_path / "file" / "x")),
        ("--output", str(tmp_path / "y"), "--archive", str(tmp_path / "file" / "a.zip")),
    ):
        result = invoke("smollm2", "--quick", *words)
        assert isinstance(result.exception, LabError), result.output
        assert "Nothing can be written" in str(result.exception)


# --- answers that are judged later ---


class Target(Asker):
    """A target whose best next token is always the last one plus one, by a margin that the test sets."""

    def __init__(self, margin: float = 0.5) -> None:
        self.margin = margin

    async def tokens(self, text: str) -> tuple[int, ...]:
        return (len(text), 0)

    async def complete(self, ids: Any, *, max_tokens: int, **_: Any) -> list[Completion]:
        del ids
        found = tuple(range(1, max_tokens + 1))
        return [Completion(found, tuple({one: -0.1, one + 500: -0.1 - self.margin} for one in found))]

    async def score(self, prompt: Any, answer: Any, *, top: int = 2) -> list[Scored]:
        del prompt, top
        views = []
        for place, token in enumerate(answer, 1):
            view = {place: -0.1, place + 500: -0.1 - self.margin}
            views.append(Scored(view | ({} if token in view else {token: -9.0}), {}))
        return views


@pytest.mark.parametrize(("wrong", "verdict"), [(None, "lossless"), (3, "not lossless")])
def test_saved_answers_are_judged_as_a_server_s_are(wrong: int | None, verdict: str) -> None:
    settings = small()
    made = lossless.Plan(settings.prompts, settings.verify_at, settings.max_tokens, temperatures=(), samples=0)
    answer = [*range(1, settings.max_tokens + 1)]
    if wrong is not None:
        answer[wrong] = 77
    prompts = [[len(prompt.text), 0] for prompt in settings.prompts]
    saved = {"prompts": prompts, "answers": {str(at_once): [answer] * len(prompts) for at_once in settings.verify_at}}

    async def work() -> tuple[str, list[str]]:
        target = Target()
        base = await lossless.ask_baseline(target, made, lambda _text: None)
        replayed: Any = Replayed(saved, settings.verify_at)
        found = await lossless.greedy(replayed, target, base, made, lambda _text: None)
        return lossless.decide(found, [])

    assert asyncio.run(work())[0] == verdict


def test_an_answer_that_is_not_in_the_file_is_said() -> None:
    replayed = Replayed({"prompts": [[1]], "answers": {"1": [[2]]}}, (1,))
    assert asyncio.run(replayed.complete([1], max_tokens=4)) == [Completion((2,))]
    for ids in ([1], [9]):
        with pytest.raises(LabError, match="not in the file"):
            asyncio.run(replayed.complete(ids, max_tokens=4))


def test_one_server_at_a_time_where_one_fills_the_machine(tmp_path: Path) -> None:
    """A lane that was used a moment ago counts as busy, so it is stopped before the next one is asked for."""
    stopped: list[str] = []

    class One:
        def __init__(self, lane: Lane, state: str) -> None:
            self.lane, self.state, self.log = lane, state, None

    class Servers:
        def __init__(self, lanes: list[One]) -> None:
            self.lanes = lanes

        def status(self) -> list[One]:
            return self.lanes

        async def stop(self, lane: Lane) -> None:
            stopped.append(lane.key)

        async def restart(self, lane: Lane, *, on_progress: Any = None) -> None:
            del on_progress
            stopped.append(f"again {lane.key}")

    settings = small("kimi-k2.5")
    none, bf16 = settings.lane("none"), settings.lane("bf16")
    servers: Any = Servers([One(none, "ready"), One(bf16, "dead")])
    work = stages.Stages(settings, tmp_path, servers, lambda _text: None)
    assert work.warm() == [none.key]
    asyncio.run(work._room(bf16))
    assert stopped == [none.key, f"again {bf16.key}"]
    stopped.clear()
    beside = stages.Stages(plan.replace(settings, together=True), tmp_path, servers, lambda _text: None)
    asyncio.run(beside._room(none))
    assert stopped == []
    asyncio.run(beside._room(settings.reference))
    assert stopped == [none.key], "the measured lanes are not needed any more"


def test_cells_that_fail_or_are_refused_fail_their_stage(tmp_path: Path, fake_vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's client is a stand-in that talks to a small server: the cells, their files, and what the stage says of them."""
    described = {**ORIGIN, "weights": {}, "settings": {}, "recipe": {}}
    monkeypatch.setattr(sweep_run.origin, "describe", lambda *_a, **_k: json.loads(json.dumps(described)))
    settings = small(together=True, concurrencies=(1, 2, 64))
    work = stages.Stages(settings, tmp_path, fake_vllm, lambda _text: None)
    one, two, many = (stage for stage in plan.stages(settings) if stage.kind == "sweep")
    with asyncio.Runner() as loop:  # one for all stages, as the command has it: they share a client
        said = loop.run(work(one))
        assert said.startswith("Output tok/s for each machine: ")
        assert "Baseline, eager 100.0" in said
        assert "Eagle3 FP8, K=3, eager 160.0" in said
        assert len(list((tmp_path / "sweep").glob("agg_*.json"))) == 3
        fake_vllm.fail = {2: "boom"}
        with pytest.raises(LabError, match="3 of 3 cells failed") as failed:
            loop.run(work(two))
        assert "boom" in failed.value.why
        with pytest.raises(LabError, match="Nothing could be measured") as refused:
            loop.run(work(many))
        assert "max-num-seqs" in refused.value.why
        loop.run(work.close())
    assert len({load["pid"] for load in fake_vllm.loads}) == 1
    assert len(report.results(tmp_path)[0]) == 3, "what was measured is kept"


HANGUP = """
import asyncio, os, sys
from pathlib import Path
from lab.fieldtest import cli, plan, run
from tests.fieldtest.made import ORIGIN, small
settings = small()
test = run.Test(settings, plan.stages(settings), Path(sys.argv[1]), dict(ORIGIN), {})
async def work(stage):
    if stage.name == "start-none":
        Path(sys.argv[1], "busy").touch()
        await asyncio.sleep(600)
    return "fine"
asyncio.run(run.run(test, work, cli._say))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="engines run on Linux")
def test_a_terminal_that_goes_away_ends_the_test_in_order(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parent.parent.parent
    terminal, end = os.openpty()
    words = ["setsid", "--ctty", "--wait", sys.executable, "-c", HANGUP, str(tmp_path)]
    child = subprocess.Popen(words, cwd=root, stdin=end, stdout=end, stderr=end)
    os.close(end)
    deadline = time.monotonic() + 60
    while not (tmp_path / "busy").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.close(terminal)  # SIGHUP, and whatever is said from now on is an error
    child.wait(60)
    state = json.loads((tmp_path / "fieldtest.json").read_text())
    assert (state["stages"][-1]["state"], state["runs"][-1]["how"]) == ("stopped", "SIGHUP")
