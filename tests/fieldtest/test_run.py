"""The runner: stages in order, resuming, failures, the budget, signals, and a folder that two cannot use at once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.errors import LabError
from lab.fieldtest import plan, run
from lab.fieldtest.plan import Stage
from tests.fieldtest.made import small

Make = Callable[..., run.Test]


class Work:
    """Remembers which stages it was asked for; some fail, some take their time."""

    def __init__(self, fail: dict[str, BaseException] | None = None, slow: dict[str, float] | None = None) -> None:
        self.fail, self.slow, self.did = fail or {}, slow or {}, list[str]()

    async def __call__(self, stage: Stage) -> str:
        self.did.append(stage.name)
        await asyncio.sleep(self.slow.get(stage.name, 0.0))
        if stage.name in self.fail:
            raise self.fail[stage.name]
        return "fine"


def go(test: run.Test, work: Work, **how: Any) -> str:
    return asyncio.run(run.run(test, work, lambda _text: None, **how))


def states(test: run.Test) -> dict[str, str]:
    return {name: one["state"] for name, one in test.records.items()}


# --- the plan ---


def test_a_gpu_takes_lane_by_lane_and_a_lane_starts_once() -> None:
    settings = small("kimi-k2.5", concurrencies=(4, 64))
    found = plan.stages(settings)
    names = [stage.name for stage in found]
    assert names == [
        "doctor", "start-none", "sweep-none-conc4", "sweep-none-conc64",
        "start-bf16", "answers-bf16", "sweep-bf16-conc4", "sweep-bf16-conc64",
        "start-fp8", "answers-fp8", "sweep-fp8-conc4", "sweep-fp8-conc64", "lossless-bf16", "lossless-fp8",
        "start-none-traced", "traces-none", "start-bf16-traced", "traces-bf16", "start-fp8-traced", "traces-fp8",
    ]  # fmt: skip
    measured = [lane for stage in found if stage.kind in ("answers", "sweep") for lane in stage.lanes]
    assert not any(lane.traced for lane in measured), "a measured lane is untraced"
    assert all("its speed is not the recipe's" in stage.title for stage in found if stage.name.endswith("-traced"))
    assert settings.common_k == 4, "K is 4 and 6, so acceptance is compared at 4"
    assert {lane.max_model_len for lane in measured} == {64 + 32 + 256}
    rows = plan.schedule(settings, found)
    starts = sum(seconds >= plan.START_GPU for _, seconds in rows)
    assert starts == 7, "three measured lanes, the reference once, three traced ones"


def test_where_all_fit_they_take_turns() -> None:
    found = plan.stages(small(together=True))
    sweeps = [stage for stage in found if stage.kind == "sweep"]
    assert [len(stage.lanes) for stage in sweeps] == [3, 3]
    assert not any(stage.needs for stage in sweeps), "a lane that does not start is a failed cell, and the others are measured"


def test_estimates_come_from_what_was_published_and_then_from_what_was_seen() -> None:
    from lab.fieldtest.compare import table_for

    settings = small("kimi-k2.5")
    table = table_for(settings.recipe)
    assert plan.rate(settings, "fp8", 64, table) == pytest.approx(936.6 * 4)
    assert plan.rate(settings, "fp8", 64, None) != plan.rate(settings, "fp8", 64, table)
    stage = next(one for one in plan.stages(settings, table) if one.name == "sweep-fp8-conc2")
    bare = plan.estimate(stage, settings, [lane.key for lane in stage.lanes])
    assert bare == stage.seconds
    assert plan.estimate(stage, settings) == bare + plan.START_GPU
    seen = [
        {"kind": "start", "state": "done", "seconds": 100.0},
        {"kind": "sweep", "state": "done", "seconds": 30.0, "estimate": 10.0},
        {"kind": "sweep", "state": "failed", "seconds": 900.0, "estimate": 10.0},
    ]
    assert plan.estimate(stage, settings, records=seen) == pytest.approx(3 * bare + 100)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(LabError, match="each once"):
        small(drafts=("bf16", "bf16"))
    with pytest.raises(LabError, match="has no draft"):
        small("minimax-m2.5", drafts=("fp8",)).lane("fp8")


# --- resuming ---


def test_finished_stages_are_skipped_and_failed_ones_tried_again(make: Make) -> None:
    first, work = make(), Work({"answers-bf16": LabError("Boom.", why="Because.")})
    assert go(first, work) == "whole"
    assert states(first)["answers-bf16"] == "failed"
    assert first.records["answers-bf16"]["reason"] == "Boom. Because."
    assert states(first)["lossless-bf16"] == "skipped"
    assert "which failed" in first.records["lossless-bf16"]["reason"]
    assert "lossless-bf16" not in work.did
    assert states(first)["traces-fp8"] == "done", "a failure does not end the test"
    again = Work()
    second = make()
    go(second, again)
    assert again.did == ["answers-bf16", "lossless-bf16"]
    assert set(states(second).values()) == {"done"}
    assert len(second.runs) == 2
    third = Work()
    go(make(), third)
    assert third.did == []


def test_other_settings_or_another_machine_are_another_result(make: Make) -> None:
    go(make(), Work())
    work = Work()
    go(make(small(max_tokens=9)), work)
    assert len(work.did) == len(plan.stages(small()))
    work = Work()
    go(make(small(max_tokens=9), versions={"vllm": "0.33"}), work)
    assert len(work.did) == len(plan.stages(small()))
    work = Work()
    go(make(small(max_tokens=9, concurrencies=(1, 2, 3)), versions={"vllm": "0.33"}), work)
    assert work.did == [f"sweep-{draft}-conc3" for draft in ("none", "bf16", "fp8")], "one more concurrency adds stages"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "eagle3-lab-fieldtest"}', '{"format": "x", "version": 1}', "\xff"])
def test_a_state_that_is_not_whole_is_put_aside(make: Make, tmp_path: Path, content: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / run.STATE).write_text(content, encoding="latin-1")
    work = Work()
    assert go(make(), work) == "whole"
    assert len(work.did) == len(plan.stages(small()))
    assert (tmp_path / "run" / "fieldtest.broken.json").read_text(encoding="latin-1") == content


def test_any_error_of_a_stage_stays_in_the_stage(make: Make) -> None:
    errors: list[BaseException] = [OSError(28, "No space left"), KeyError("x"), ValueError("y"), ZeroDivisionError()]
    test = make()
    names = [stage.name for stage in test.stages if stage.kind == "sweep"]
    go(test, Work(dict(zip(names, errors, strict=False))))
    assert [states(test)[name] for name in names] == ["failed"] * len(errors) + ["done"] * (len(names) - len(errors))
    assert "No space left" in test.records[names[0]]["reason"]
    with pytest.raises(AssertionError):  # a broken invariant is no result
        go(make(small(max_tokens=3)), Work({"doctor": AssertionError()}))


def test_what_another_machine_measured_is_moved_aside(make: Make) -> None:
    test = make()
    go(test, Work())
    for name in ("sweep/agg_a.json", "lossless-bf16.json", "recordings/a.jsonl"):
        (test.folder / name).parent.mkdir(exist_ok=True)
        (test.folder / name).write_text("theirs")
    (test.folder / "notes.txt").write_text("a person's own")
    other = make(small(), hardware={"cpu": "another processor"})
    assert other.records == {}
    assert sorted(one.name for one in test.folder.iterdir()) == ["earlier-1", "notes.txt"]
    assert (test.folder / "earlier-1" / "sweep" / "agg_a.json").read_text() == "theirs"
    go(other, Work())
    assert len(make(small(), hardware={"cpu": "another processor"}).done) == len(other.stages), "its own is taken over"
    make()
    assert (test.folder / "earlier-2" / run.STATE).is_file()


def test_what_cannot_be_moved_aside_stays_whole(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    test = make()
    go(test, Work())
    (test.folder / "lossless-bf16.json").write_text("theirs")
    move = Path.replace
    monkeypatch.setattr(Path, "replace", lambda one, to: move(one, test.folder / "no" / "where" if one.name == run.STATE else to))
    with pytest.raises(LabError, match="cannot be written"):
        make(small(), hardware={"cpu": "another processor"})
    assert sorted(one.name for one in test.folder.iterdir()) == [run.STATE, "lossless-bf16.json"]


@pytest.mark.parametrize("spoilt", [{"runs": None}, {"stages": [{"name": "doctor", "seconds": 1, "key": "x"}]}])
def test_of_a_broken_state_nothing_is_taken_over(make: Make, spoilt: dict[str, Any]) -> None:
    go(make(), Work())
    path = make().folder / run.STATE
    path.write_text(json.dumps(json.loads(path.read_text()) | spoilt))
    assert make().records == {}


def test_one_more_draft_is_examined(make: Make) -> None:
    go(make(small(drafts=("none", "bf16"))), Work())
    work = Work()
    go(make(), work)
    assert work.did[0] == "doctor"


# --- the budget ---


def test_a_timeout_of_the_system_is_a_failure_and_no_budget(make: Make) -> None:
    test = make()
    assert go(test, Work({"doctor": TimeoutError(110, "Connection timed out")}), budget=1e9) == "whole"
    assert (test.records["doctor"]["state"], test.runs[-1]["how"]) == ("failed", "whole")
    assert "Connection timed out" in test.records["doctor"]["reason"]


def test_what_no_longer_fits_is_skipped_and_said(make: Make) -> None:
    test, work = make(), Work()
    assert go(test, work, budget=30.0) == "budget"
    assert work.did == ["doctor"]
    assert test.records["start-none"]["state"] == "skipped"
    assert "of the budget left" in test.records["start-none"]["reason"]
    more = Work()
    assert go(make(), more) == "whole"
    assert "doctor" not in more.did
    assert len(more.did) == len(test.stages) - 1


def test_a_stage_that_outlasts_the_budget_is_stopped(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "estimate", lambda *_: 0.0)  # so that it is begun, however long a busy machine takes to come to it
    test, work = make(), Work(slow={"doctor": 60.0})
    began = time.monotonic()
    assert go(test, work, budget=3.0) == "budget"
    assert time.monotonic() - began < 30
    assert test.records["doctor"]["state"] == "stopped"
    assert json.loads((test.folder / run.STATE).read_text())["runs"][-1]["how"] == "budget"


# --- being stopped ---

CHILD = """
import asyncio, os, sys
from pathlib import Path
from lab.bench import client
from lab.fieldtest import plan, run
from tests.fieldtest.made import ORIGIN, small
settings = small()
test = run.Test(settings, plan.stages(settings), Path(sys.argv[1]), dict(ORIGIN), {})
async def work(stage):
    if stage.name == "start-none":
        code = "import os, time, sys; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
        await client.run([sys.executable, "-c", code, sys.argv[2]], os.environ, Path(sys.argv[1]) / "client.log")
    return "fine"
how = asyncio.run(run.run(test, work, lambda text: None))
print(how)
"""


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:  # no such file, or no such process: it may end between opening and reading
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="engines run on Linux")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_is_left_running(tmp_path: Path, number: signal.Signals) -> None:
    folder, told = tmp_path / "run", tmp_path / "pid"
    folder.mkdir()
    root = Path(__file__).resolve().parent.parent.parent
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), str(told)], cwd=root, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not (told.exists() and told.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    busy = int(told.read_text())
    assert _alive(busy)
    os.kill(child.pid, number)
    out, _ = child.communicate(timeout=60)
    deadline = time.monotonic() + 60
    while _alive(busy) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(busy)
    state = json.loads((folder / run.STATE).read_text())
    stage = next(one for one in state["stages"] if one["name"] == "start-none")
    if number == signal.SIGKILL:
        assert stage["state"] == "running", "the next run does it again"
        return
    assert out.strip() == number.name
    assert (stage["state"], state["runs"][-1]["how"]) == ("stopped", number.name)
    assert len(state["stages"]) == 2, "no stage after it was begun"


def test_two_tests_do_not_share_a_folder(tmp_path: Path) -> None:
    with run.locked(tmp_path / "run"), pytest.raises(LabError, match="already"), run.locked(tmp_path / "run"):
        pass
    with run.locked(tmp_path / "run"):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match="Nothing can be written"), run.locked(tmp_path / "file"):
        pass
