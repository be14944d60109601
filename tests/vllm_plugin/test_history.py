"""The ring buffer of traces and its readers; no engine."""

from __future__ import annotations

import asyncio
from typing import Any

from lab.vllm_plugin.history import Frame, History


def frame(n: int, event: str = "step") -> Frame:
    return Frame(event, b"%d" % n, (n,))


async def read(history: History, trace: str, **options: Any) -> list[Any]:
    """Everything a reader gets: frames as numbers, dropped counts as strings."""
    got: list[Any] = []
    async for found in history.follow(trace, **options):
        if isinstance(found, int):
            got.append(f"dropped {found}")
        elif found is not None:
            got += [int(f.data) for f in found]
    return got


def play(history: History, trace: str, numbers: range, *, begin: bool = True, end: bool = True) -> None:
    if begin:
        history.begin(trace, trace, frame(-1, "prompt"))
    for n in numbers:
        history.add(trace, frame(n))
    if end:
        history.end(trace, trace, frame(-2, "end"))


def test_early_and_late_readers_get_the_same_and_only_their_trace() -> None:
    async def scene() -> None:
        history = History(linger=0.05)
        early = [asyncio.create_task(read(history, name)) for name in "aabb"]
        await asyncio.sleep(0)
        for n in range(200):  # two traces, interleaved
            for offset, name in ((0, "a"), (1000, "b")):
                if n == 0:
                    history.begin(name, name, frame(-1, "prompt"))
                history.add(name, frame(offset + n))
            if n % 7 == 0:
                await asyncio.sleep(0)
        for name in "ab":
            history.end(name, name, frame(-2, "end"))
        late = [await read(history, name) for name in "ab"]
        a1, a2, b1, b2 = await asyncio.gather(*early)
        assert a1 == a2 == late[0] == [-1, *range(200), -2]
        assert b1 == b2 == late[1] == [-1, *range(1000, 1200), -2]

    asyncio.run(scene())


def test_memory_is_bounded_and_a_reader_is_told_what_it_missed() -> None:
    async def scene() -> None:
        history = History(limit=50 * 410, linger=0.05)
        play(history, "old", range(10))
        play(history, "big", range(1000))
        assert history.size <= history.limit
        assert len(history) == 1  # the old trace is gone altogether
        got = await read(history, "big")
        missed = int(got[0].removeprefix("dropped "))
        assert got[1:] == [*range(missed, 1000), -2]
        assert 900 < missed < 1000

    asyncio.run(scene())


def test_a_slow_reader_loses_steps_and_hears_how_many_while_a_fast_one_loses_none() -> None:
    async def scene() -> None:
        history = History(limit=100 * 410, linger=0.05)
        fast = asyncio.create_task(read(history, "t"))
        slow = history.follow("t")
        history.begin("t", "t", frame(-1, "prompt"))
        got: list[Any] = [*(await anext(slow))]
        for n in range(1000):
            history.add("t", frame(n))
            if n % 10 == 0:
                await asyncio.sleep(0)
        history.end("t", "t", frame(-2, "end"))
        dropped = 0
        async for found in slow:
            if isinstance(found, int):
                dropped += found
            elif found:
                got += found
        steps = [int(f.data) for f in got if f.event == "step"]
        assert len(steps) + dropped == 1000
        assert dropped > 800
        assert steps == sorted(steps)
        assert await fast == [-1, *range(1000), -2]

    asyncio.run(scene())


def test_a_reader_that_leaves_is_forgotten() -> None:
    async def scene() -> None:
        history = History()
        tasks = [asyncio.create_task(read(history, f"never-{n}")) for n in range(50)]
        await asyncio.sleep(0.01)
        assert len(history) == 50
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(history) == 0

    asyncio.run(scene())


def test_a_trace_of_several_requests_ends_with_the_last() -> None:
    async def scene() -> None:
        history = History(linger=0.05)
        reader = asyncio.create_task(read(history, "t"))
        await asyncio.sleep(0)
        history.begin("t", "0", frame(1, "prompt"))
        history.begin("t", "1", frame(2, "prompt"))
        history.end("t", "0", frame(3, "end"))
        await asyncio.sleep(0.2)
        assert not reader.done()
        history.end("t", "1", frame(4, "end"))
        assert await asyncio.wait_for(reader, 30) == [1, 2, 3, 4]

    asyncio.run(scene())


def test_silence_is_broken_by_keep_alives_and_by_the_server_stopping() -> None:
    async def scene() -> None:
        history = History()
        kept: list[None] = []
        async for found in history.follow("t", keep_alive=0.02, stop=lambda: len(kept) == 3):
            assert found is None
            kept.append(found)
        assert len(kept) == 3

    asyncio.run(scene())
