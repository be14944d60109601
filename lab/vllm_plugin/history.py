"""Recent traces in the API server: a ring buffer of frames that any number of readers follow, early or late, fast or slow.

Frames of all traces share one budget in bytes; the oldest frame goes first, whichever trace it belongs to. A reader keeps only its
position in the shared log, so a slow one costs no memory, and one that fell behind the ring is told how many steps it missed. Everything
runs on one event loop; nothing here imports vLLM.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple


class Frame(NamedTuple):
    """One event of a trace: its name, its JSON, and the token ids that it mentions."""

    event: str
    data: bytes
    ids: tuple[int, ...] = ()


#: Bytes that a frame costs beside its data, roughly: tuples, the ids, the entries in both queues.
_OVERHEAD = 400
#: Frames handed to a reader at a time.
_BATCH = 64


@dataclass
class _Log:
    """Frames of one trace. `first` counts the frames trimmed from its head, `trimmed` the steps among them."""

    frames: deque[Frame] = field(default_factory=deque)
    first: int = 0
    trimmed: int = 0
    open: set[str] = field(default_factory=set)
    ended: float | None = None
    readers: set[asyncio.Event] = field(default_factory=set)

    @property
    def unused(self) -> bool:
        return not (self.frames or self.open or self.readers)


class History:
    """Frames by trace. `limit` bytes in all; a finished trace is closed to its readers `linger` seconds after its last request ended
    (with n > 1, or several prompts, another request of the same trace may still begin)."""

    def __init__(self, limit: int = 64 << 20, linger: float = 0.5) -> None:
        self.limit = limit
        self.linger = linger
        self.size = 0
        self._logs: dict[str, _Log] = {}
        self._order: deque[tuple[str, _Log]] = deque()

    def __len__(self) -> int:
        return len(self._logs)

    def begin(self, trace: str, request: str, frame: Frame) -> None:
        """A request of the trace entered the engine."""
        log = self._log(trace)
        log.open.add(request)
        log.ended = None
        self._append(trace, log, frame)

    def add(self, trace: str, frame: Frame) -> None:
        """Something happened in the trace."""
        self._append(trace, self._log(trace), frame)

    def end(self, trace: str, request: str, frame: Frame) -> None:
        """A request of the trace left the engine."""
        log = self._log(trace)
        log.open.discard(request)
        if not log.open:
            log.ended = time.monotonic()
        self._append(trace, log, frame)

    async def follow(
        self, trace: str, *, keep_alive: float = 15.0, stop: Callable[[], bool] = lambda: False
    ) -> AsyncIterator[list[Frame] | int | None]:
        """All frames of a trace, oldest first, until it has ended: lists of frames, the number of steps missed where this reader fell
        behind, or None when `keep_alive` seconds passed without any. Ends early when `stop()` says so (asked every second)."""
        log = self._log(trace)
        changed = asyncio.Event()
        log.readers.add(changed)
        position = steps = 0
        spoke = time.monotonic()
        try:
            while not stop():
                changed.clear()
                if position < log.first:
                    if log.trimmed > steps:
                        yield log.trimmed - steps
                    position, steps = log.first, max(steps, log.trimmed)
                    continue
                offset = position - log.first
                if frames := list(islice(log.frames, offset, offset + _BATCH)):
                    position += len(frames)
                    steps += sum(frame.event == "step" for frame in frames)
                    yield frames
                    spoke = time.monotonic()
                    continue
                now = time.monotonic()
                wait = 1.0
                if log.ended is not None and not log.open:
                    wait = min(wait, log.ended + self.linger - now)
                    if wait <= 0:
                        return
                if now - spoke >= keep_alive:
                    yield None
                    spoke = now
                try:
                    await asyncio.wait_for(changed.wait(), min(wait, keep_alive))
                except TimeoutError:
                    continue
        finally:
            log.readers.discard(changed)
            self._forget(trace, log)

    def _log(self, trace: str) -> _Log:
        return self._logs.setdefault(trace, _Log())

    def _forget(self, trace: str, log: _Log) -> None:
        if log.unused and self._logs.get(trace) is log:
            del self._logs[trace]

    def _append(self, trace: str, log: _Log, frame: Frame) -> None:
        log.frames.append(frame)
        self._order.append((trace, log))
        self.size += len(frame.data) + _OVERHEAD
        while self.size > self.limit and len(self._order) > 1:
            name, oldest = self._order.popleft()
            gone = oldest.frames.popleft()
            oldest.first += 1
            oldest.trimmed += gone.event == "step"
            self.size -= len(gone.data) + _OVERHEAD
            self._forget(name, oldest)
        for changed in log.readers:
            changed.set()
