"""Lanes, with a fake engine: shared starts, room, crashes, and an end that leaves nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab.errors import LabError
from lab.recipes.model import Recipe
from lab.serving import lanes as module
from lab.serving import memory
from lab.serving.command import Lane
from lab.serving.endpoint import Progress
from lab.serving.lanes import Lanes
from lab.serving.memory import available

pytestmark = [pytest.mark.usefixtures("fake_launcher"), pytest.mark.skipif(sys.platform != "linux", reason="serving is for Linux")]
Gone = Callable[..., bool]
Make = Callable[..., Recipe]


@pytest.fixture(autouse=True)
def _quickly_idle_with_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """What else runs on this machine, and how much memory it takes, decides nothing here."""
    monkeypatch.setattr(module, "JUST_USED", 0.0)
    monkeypatch.setattr(memory, "available", lambda: 64 << 30)


@asynccontextmanager
async def opened(gone: Gone, **more: Any) -> AsyncIterator[Lanes]:
    lanes = Lanes(**more)
    try:
        yield lanes
    finally:
        await lanes.close()
        assert all(gone(entry.server, 0.0) for entry in lanes._entries.values() if entry.server)


def state(lanes: Lanes, lane: Lane) -> str:
    return next(status.state for status in lanes.status() if status.lane.key == lane.key)


def engine_pid(lanes: Lanes, lane: Lane) -> int:
    log = next(status.log for status in lanes.status() if status.lane.key == lane.key)
    assert log is not None
    return int(Path(log).read_text().rsplit("pid ", 1)[1].split()[0])


def run(what: Coroutine[Any, Any, None]) -> None:
    asyncio.run(what)


def test_concurrent_callers_share_one_start(local_recipe: Make, gone: Gone, cache: Path, tmp_path: Path) -> None:
    async def check() -> None:
        lane, seen = Lane(local_recipe(FAKE_UNTIL=str(tmp_path / "seen")), "bf16", 3), list[Progress]()

        def see(progress: Progress) -> None:
            seen.append(progress)
            if progress.detail == "fake engine is loading":
                (tmp_path / "seen").touch()  # it answers only once this was seen, however seldom its log is looked at

        async with opened(gone) as lanes, asyncio.timeout(60):
            first, *others = await asyncio.gather(lanes.endpoint(lane, on_progress=see), *(lanes.endpoint(lane) for _ in range(4)))
            assert all(other == first for other in others)
            assert first.lane == lane
            assert len(list((cache / "logs").iterdir())) == 1
            assert seen[-1].stage == "ready"
            assert any(progress.detail == "fake engine is loading" for progress in seen)
            assert [progress.elapsed for progress in seen] == sorted(progress.elapsed for progress in seen)
            (status,) = lanes.status()
            assert (status.state, status.endpoint) == ("ready", first)
            assert status.memory is not None
            assert status.memory > 1 << 20

    run(check())


def test_a_lane_that_was_let_go_makes_room_at_once_and_one_that_was_handed_out_does_not(
    local_recipe: Make, gone: Gone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "JUST_USED", 60.0)

    async def check() -> None:
        first, second, third = (Lane(local_recipe(name)) for name in ("a", "b", "c"))
        async with opened(gone, most=1) as lanes:
            async with lanes.use(first):
                pass
            await lanes.endpoint(second)
            assert state(lanes, first) == "stopped"
            with pytest.raises(LabError):
                await lanes.endpoint(third)

    run(check())


def test_two_event_loops_may_share_lanes(local_recipe: Make, gone: Gone) -> None:
    lanes, lane = Lanes(), Lane(local_recipe())
    first = asyncio.run(lanes.endpoint(lane))
    assert asyncio.run(lanes.endpoint(lane)) == first
    lanes.shutdown()
    assert gone(lanes._entries[lane.key].server, 0.0)
    with pytest.raises(LabError, match="shut down"):
        asyncio.run(lanes.endpoint(lane))


def test_the_least_recently_used_idle_lane_makes_room(local_recipe: Make, gone: Gone) -> None:
    async def check() -> None:
        recipe = local_recipe()
        old, new, third, fourth = Lane(recipe, "bf16", 1), Lane(recipe, "bf16", 2), Lane(recipe, "bf16", 3), Lane(recipe, "bf16", 4)
        async with opened(gone, most=2) as lanes:
            await lanes.endpoint(old)
            await lanes.endpoint(new)
            await lanes.endpoint(old)  # so that `new` is the one that was used least recently
            seen: list[Progress] = []
            await lanes.endpoint(third, on_progress=seen.append)
            assert [state(lanes, lane) for lane in (old, new, third)] == ["ready", "stopped", "ready"]
            assert gone(lanes._entries[new.key].server, 0.0)
            said = [progress.detail for progress in seen if progress.stage == "evicted"]
            assert said == ["stopping Eagle3 BF16, K=2, eager to make room (at most 2 engines may run at once)"]
            async with lanes.use(old), lanes.use(third):
                with pytest.raises(LabError, match="in use: Eagle3 BF16, K=1, eager, Eagle3 BF16, K=3, eager"):
                    await lanes.endpoint(fourth)
            await lanes.endpoint(fourth)
            assert [state(lanes, lane) for lane in (old, third)] == ["ready", "stopped"]  # `old` was let go last

    run(check())


def test_servers_share_a_gpu_as_far_as_their_shares_go(local_recipe: Make, gone: Gone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.memory, "on_gpu", lambda: True)

    async def check() -> None:
        small, whole = replace(local_recipe("small"), gpu_share=0.4), local_recipe("whole")
        first, second, third = (Lane(small, "bf16", k) for k in (1, 2, 3))
        async with opened(gone) as lanes:
            assert lanes.fit_together([first, second])
            assert not lanes.fit_together([first, second, third])
            assert not lanes.fit_together([first, Lane(whole)])
            assert lanes.fit_together([Lane(whole)])
            for lane in (first, second, third):
                await lanes.endpoint(lane)
            assert [state(lanes, lane) for lane in (first, second, third)] == ["stopped", "ready", "ready"]
            seen: list[Progress] = []
            await lanes.endpoint(Lane(whole), on_progress=seen.append)
            assert [state(lanes, lane) for lane in (second, third)] == ["stopped", "stopped"]
            assert any("100% of the GPU's memory" in one.detail for one in seen if one.stage == "evicted")

    run(check())


def test_a_lane_that_an_outside_client_uses_is_kept(local_recipe: Make, gone: Gone) -> None:
    async def check() -> None:
        busy, other = Lane(local_recipe("busy", FAKE_RUNNING="1")), Lane(local_recipe("other"))
        async with opened(gone, most=1) as lanes:
            await lanes.endpoint(busy)
            with pytest.raises(LabError, match="no room"):
                await lanes.endpoint(other)
            assert state(lanes, busy) == "ready"

    # `local_recipe` makes its folders once; two names are two recipes
    run(check())


def test_a_lane_that_is_taken_at_the_last_moment_is_kept(local_recipe: Make, gone: Gone, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = Lanes._busy

    def taken_meanwhile(self: Lanes, entry: Any) -> bool:
        found = looked(self, entry)
        entry.holders += 1  # somebody who comes between the look and the stop
        return found

    monkeypatch.setattr(Lanes, "_busy", taken_meanwhile)

    async def check() -> None:
        taken, other = Lane(local_recipe("taken")), Lane(local_recipe("other"))
        async with opened(gone, most=1) as lanes:
            await lanes.endpoint(taken)
            with pytest.raises(LabError, match="no room"):
                await lanes.endpoint(other)
            assert state(lanes, taken) == "ready"

    run(check())


@pytest.mark.parametrize("hung", [False, True])
def test_a_server_too_busy_to_say_what_runs_is_kept(local_recipe: Make, gone: Gone, monkeypatch: pytest.MonkeyPatch, hung: bool) -> None:
    monkeypatch.setattr(module, "BUSY_TIMEOUT", 0.5)

    async def check() -> None:
        stopped, other = Lane(local_recipe("stopped")), Lane(local_recipe("other"))
        async with opened(gone, most=1) as lanes:
            await lanes.endpoint(stopped)
            engine = engine_pid(lanes, stopped)
            os.kill(engine, signal.SIGSTOP)  # it takes connections and answers none, as on a machine that is overloaded
            with pytest.raises(LabError, match="no room"):
                await lanes.endpoint(other)
            if hung:  # it has been asked before, and is not waited for any longer
                monkeypatch.setattr(module, "SILENT", 0.0)
            else:
                os.kill(engine, signal.SIGCONT)
            await lanes.endpoint(other)
            assert state(lanes, stopped) == "stopped"

    run(check())


def test_memory_decides(local_recipe: Make, gone: Gone, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        one, other = Lane(local_recipe(), "bf16", 1), Lane(local_recipe(), "bf16", 2)
        async with opened(gone) as lanes:
            await lanes.endpoint(one)
            used = lanes._entries[one.key].server
            free = {True: module.RESERVE + (50 << 20), False: module.RESERVE + (150 << 20)}
            monkeypatch.setattr(memory, "available", lambda: free[used is not None and used.exit_code() is None])
            await lanes.endpoint(other)
            assert [state(lanes, lane) for lane in (one, other)] == ["stopped", "ready"]
            assert "needs about 0.1 GB" in lanes._entries[other.key].news[1].detail

    run(check())


def test_two_starts_at_once_do_not_count_the_same_memory(
    local_recipe: Make, gone: Gone, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def check() -> None:
        monkeypatch.setattr(memory, "available", lambda: module.RESERVE + (150 << 20))
        recipe = local_recipe(FAKE_UNTIL=str(tmp_path / "refused"))
        async with opened(gone) as lanes:
            starts = [asyncio.create_task(lanes.endpoint(Lane(recipe, "bf16", k))) for k in (1, 2)]
            await asyncio.wait(starts, timeout=60, return_when=asyncio.FIRST_COMPLETED)  # one is refused while the other still loads
            (tmp_path / "refused").touch()
            results = await asyncio.gather(*starts, return_exceptions=True)
            assert sorted(isinstance(result, LabError) for result in results) == [False, True]

    run(check())


def test_a_crash_is_told_with_the_log_and_repaired_by_restart(local_recipe: Make, gone: Gone) -> None:
    async def check() -> None:
        lane = Lane(local_recipe())
        async with opened(gone) as lanes:
            await lanes.endpoint(lane)
            server = lanes._entries[lane.key].server
            os.kill(engine_pid(lanes, lane), signal.SIGKILL)
            deadline = time.monotonic() + 60
            while state(lanes, lane) != "dead" and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            (status,) = lanes.status()
            assert status.state == "dead"
            assert status.error is not None
            assert "ended by itself (exit code 137)" in status.error.what
            assert "fake engine is loading" in status.error.why
            assert status.endpoint is None
            with pytest.raises(LabError, match="ended by itself"):
                await lanes.endpoint(lane)
            await lanes.restart(lane)
            assert lanes._entries[lane.key].server is not server
            assert lanes.status()[0].error is None

    run(check())


def test_a_failed_start_may_be_tried_again(local_recipe: Make, gone: Gone) -> None:
    async def check() -> None:
        lane = Lane(local_recipe(FAKE_FAIL="OSError: nope"))
        async with opened(gone) as lanes:
            for _ in range(2):
                with pytest.raises(LabError, match="OSError: nope"):
                    await lanes.endpoint(lane)
                assert state(lanes, lane) == "failed"

    run(check())


def test_stop_calls_a_start_off(local_recipe: Make, gone: Gone) -> None:
    async def check() -> None:
        lane = Lane(local_recipe(FAKE_START="60"))
        async with opened(gone) as lanes:
            waiting = asyncio.create_task(lanes.endpoint(lane))
            while lanes.status() == [] or lanes._entries[lane.key].server is None:
                await asyncio.sleep(0.02)
            await lanes.stop(lane)
            assert state(lanes, lane) == "stopped"
            assert gone(lanes._entries[lane.key].server, 0.0)
            with pytest.raises(LabError, match="called off"):
                await waiting

    run(check())


def test_a_caller_that_gives_up_leaves_the_start_going(local_recipe: Make, gone: Gone) -> None:
    async def check() -> None:
        lane = Lane(local_recipe(FAKE_START="0.5"))
        async with opened(gone) as lanes:
            waiting = asyncio.create_task(lanes.endpoint(lane))
            await asyncio.sleep(0.1)
            waiting.cancel()
            await lanes.endpoint(lane)
            assert len(lanes.status()) == 1

    run(check())


def test_one_key_is_one_recipe(local_recipe: Make, gone: Gone) -> None:
    async def check() -> None:
        recipe, changed = local_recipe(), None
        async with opened(gone) as lanes:
            await lanes.endpoint(Lane(recipe))
            import dataclasses

            changed = dataclasses.replace(recipe, max_model_len=99)
            with pytest.raises(ValueError, match="share the lane key"):
                await lanes.endpoint(Lane(changed))

    run(check())


def test_a_missing_checkpoint_fails_the_start(local_recipe: Make, gone: Gone, tmp_path: Path) -> None:
    async def check() -> None:
        lane = Lane(local_recipe(), "bf16", 3)
        (tmp_path / "draft" / "config.json").unlink()
        async with opened(gone) as lanes:
            with pytest.raises(LabError, match="draft weights"):
                await lanes.endpoint(lane)

    run(check())


def test_available_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    1000 kB\n")
    assert available(meminfo, tmp_path) == 1_024_000
    (tmp_path / "memory.max").write_text("600000\n")
    (tmp_path / "memory.current").write_text("500000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 100000\n")
    assert available(meminfo, tmp_path) == 200_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available(meminfo, tmp_path) == 1_024_000
