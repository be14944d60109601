"""Running a field test: stage after stage in one folder, with its state in `fieldtest.json` after each of them.

What was measured with other versions or on another machine is no part of the test: it is moved to `earlier-N` in the folder, so that no
report, certificate or recording passes for this machine's.

A stage that is done, with the same key, is not done again; one that failed, was skipped or stopped is tried anew by the next run. A failure
is written down and the next stage follows; a stage whose need is not there is skipped with that reason. With a budget, a stage that by its
estimate no longer fits is skipped, and one that is still running when the budget ends is stopped. Ctrl-C, SIGTERM and SIGHUP stop the stage
and end the run; whoever calls `run` stops the engines. After SIGKILL the engines' guards do that (`lab/serving/guard.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from lab import provenance
from lab.errors import LabError, disk_error
from lab.fieldtest.plan import Settings, Stage, estimate

FORMAT, VERSION = "eagle3-lab-fieldtest", 1
STATE = "fieldtest.json"
#: Begins the names of folders with tests of other surroundings.
EARLIER = "earlier-"
#: What a test writes into its folder (`stages.py`, `keep.py`, `cli.py`), its state last. A person may keep other things there.
OWN = (
    "answers-*.json", "doctor.json", "doctor.txt", "doctor-running-*.json", "lanes", "logs", "lossless-*", "measured", "recordings",
    "report.html", "sweep", "traces", STATE,
)  # fmt: skip
#: Does one stage and says in a sentence what came of it; raises `LabError` where it failed.
Work = Callable[[Stage], Awaitable[str]]
Say = Callable[[str], None]


@dataclass
class Test:
    """A field test in its folder. `records` holds one plain object a stage, in running order."""

    settings: Settings
    stages: Sequence[Stage]
    folder: Path
    origin: dict[str, Any]
    surroundings: dict[str, Any]
    records: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def done(self) -> list[dict[str, Any]]:
        return [one for one in self.records.values() if one["state"] == "done"]

    def key(self, stage: Stage) -> str:
        return stage.key(self.settings, self.surroundings)

    def is_done(self, stage: Stage) -> bool:
        """Whether it was done before, with everything that decides its result as it is now."""
        record = self.records.get(stage.name)
        return record is not None and record["state"] == "done" and record["key"] == self.key(stage)

    def content(self) -> dict[str, Any]:
        """The state as it is written."""
        listed = [self.records[stage.name] for stage in self.stages if stage.name in self.records]
        return {
            "format": FORMAT, "version": VERSION, "recipe": self.settings.recipe.name, "settings": self.settings.definition(),
            "concurrencies": list(self.settings.concurrencies), "drafts": list(self.settings.drafts), "hw": self.settings.hw,
            "provenance": self.origin, "surroundings": self.surroundings, "stages": listed, "runs": self.runs,
        }  # fmt: skip

    def save(self) -> None:
        try:
            provenance.write_text(self.folder / STATE, json.dumps(self.content(), indent=1, ensure_ascii=False) + "\n")
        except OSError as error:
            raise LabError(
                f"Nothing can be written to {self.folder}.", why=f"{error.strerror or error}.", todo="Name another folder with --output."
            ) from error


def load(test: Test, say: Say) -> None:
    """Take over what an earlier run in the folder did. A state that is not whole, or of other surroundings, is put aside, and said."""
    path = test.folder / STATE
    try:
        found = msgspec.json.decode(path.read_bytes())
        if found["format"] != FORMAT or found["version"] != VERSION:
            raise ValueError("another form")
        records = {
            str(one["name"]): {"reason": "", **one, "state": str(one["state"]), "seconds": float(one["seconds"]), "key": str(one["key"])}
            for one in found["stages"]
        }
        runs = list(found["runs"])
        around = found["surroundings"] if "surroundings" in found else provenance.surroundings(found["provenance"])
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
        broken = path.with_suffix(".broken.json")
        with contextlib.suppress(OSError):
            path.replace(broken)
        say(f"The state of the earlier run cannot be read ({type(error).__name__}); it is kept as {broken.name}, and the test starts anew.")
        return
    if around == json.loads(json.dumps(test.surroundings)):
        test.records, test.runs = records, runs
        return
    where = _set_aside(test.folder)
    say(f"What is in the folder was measured with other versions or on another machine; it is kept in {where.name}: the test starts anew.")


def _set_aside(folder: Path) -> Path:
    """Move what an earlier test wrote into a new folder beside it: all of it or nothing, for a state is no good without its results."""
    where = next(one for number in itertools.count(1) if not (one := folder / f"{EARLIER}{number}").exists())
    try:
        where.mkdir()
        for one in [path for pattern in OWN for path in folder.glob(pattern)]:
            one.replace(where / one.name)
    except OSError as error:
        with contextlib.suppress(OSError):
            for one in list(where.iterdir()):
                one.replace(folder / one.name)
            where.rmdir()
        raise disk_error(error, folder, instead="name another folder with --output") from error
    return where


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """The folder for this process alone; raises `LabError` where another field test uses it or it cannot be written."""
    import fcntl  # POSIX only, as engines are; the module itself imports everywhere

    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / ".lock").open("a")
    except OSError as error:
        raise LabError(
            f"Nothing can be written to {folder}.", why=f"{error.strerror or error}.", todo="Name another folder with --output."
        ) from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LabError(f"A field test runs in {folder} already.", todo="Wait for it, or name another folder with --output.") from error
        yield


def _missing(test: Test, stage: Stage) -> str:
    """Why a stage makes no sense now; "" where nothing stands against it."""
    by_name = {one.name: one for one in test.stages}
    for need in stage.needs:
        if not test.is_done(by_name[need]):
            record = test.records.get(need, {})
            return f"It needs “{by_name[need].title}”, which {record.get('state', 'was not done')}{'' if record else ' yet'}."
    return ""


async def run(
    test: Test,
    work: Work,
    say: Say,
    *,
    budget: float | None = None,
    warm: Callable[[], Iterable[str]] = tuple,
    after: Callable[[Stage], None] = lambda _stage: None,
) -> str:
    """Do what is not done. `budget` is in seconds from now; `warm` gives the keys of lanes that run; `after` is called after each stage.

    Gives how the run ended: "whole", "budget" or the name of the signal that stopped it. Errors of stages stay in their records.
    """
    began = time.monotonic()
    this: dict[str, Any] = {"began": _now(), "budget_s": budget, "ended": None, "how": "not ended"}
    test.runs.append(this)
    how = "whole"
    with _signals() as stopped:
        for number, stage in enumerate(test.stages, 1):
            place = f"[{number}/{len(test.stages)}]"
            if test.is_done(stage):
                say(f"{place} done before: {stage.title}")
                continue
            expected = estimate(stage, test.settings, warm(), [*test.records.values()])
            cold = any(lane.key not in set(warm()) for lane in stage.lanes)
            record: dict[str, Any] = {
                "name": stage.name, "title": stage.title, "kind": stage.kind, "key": test.key(stage), "state": "running", "reason": "",
                "lanes": [lane.key for lane in stage.lanes], "concurrency": stage.concurrency, "began": _now(), "seconds": 0.0,
                "estimate": expected, "cold": cold,
            }  # fmt: skip
            test.records[stage.name] = record
            left = None if budget is None else budget - (time.monotonic() - began)
            if why := _missing(test, stage):
                record |= {"state": "skipped", "reason": why}
            elif left is not None and expected > left:
                how = "budget" if how == "whole" else how
                record |= {
                    "state": "skipped",
                    "reason": f"About {_span(expected)} were needed and {_span(max(left, 0))} of the budget left.",
                }
            else:
                say(f"{place} {stage.title} (about {_span(expected)})")
                test.save()
                how = await _one(stage, record, work, left, stopped) or how
            say(f"{place} {record['state']}{': ' if record['reason'] else ''}{record['reason'][:400]}")
            after(stage)
            test.save()
            if stopped:
                how = stopped[0]
                break
    this |= {"ended": _now(), "how": how}
    test.save()
    return how


async def _one(stage: Stage, record: dict[str, Any], work: Work, left: float | None, stopped: list[str]) -> str:
    """Do one stage into its record; "budget" where the budget ended it, else ""."""
    began = time.monotonic()
    ended = ""
    limit = asyncio.timeout(left)
    try:
        async with limit:
            record |= {"reason": await work(stage), "state": "done"}
    except asyncio.CancelledError:
        if not stopped:
            stopped.append("SIGINT")
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        record |= {"state": "stopped", "reason": f"Stopped by {stopped[0]}; what was measured is kept."}
    except LabError as error:
        record |= {"state": "failed", "reason": str(error)}
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, msgspec.MsgspecError) as error:  # one stage must not end the test
        if isinstance(error, TimeoutError) and limit.expired():  # not the system's own, of a disk or a server
            record |= {"state": "stopped", "reason": "The budget ended while it ran; what was measured is kept."}
            ended = "budget"
        else:
            record |= {"state": "failed", "reason": f"{type(error).__name__}: {error}"}
    record["seconds"] = round(time.monotonic() - began, 1)
    return ended


@contextmanager
def _signals() -> Iterator[list[str]]:
    """While the block runs, SIGINT, SIGTERM and SIGHUP cancel the running task once; their names are in the list."""
    stopped: list[str] = []
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def stop(name: str) -> None:
        if not stopped:
            stopped.append(name)
            task.cancel()

    added = []
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):  # not in the main thread
            loop.add_signal_handler(one, stop, one.name)
            added.append(one)
    try:
        yield stopped
    finally:
        for one in added:
            loop.remove_signal_handler(one)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
