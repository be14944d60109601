"""The app's servers: started on demand, shared by concurrent callers, kept warm as memory allows.

Each lane that was asked for has an entry with a state; one thread at a time starts it (checkpoints, room, process, readiness), and every
caller waits for that one start. Before a start, the least recently used lanes that nobody uses are stopped until the new one fits into
memory. "In use" is what `use()` holds, what was handed out a moment ago, or what the server's own metrics say is running or waiting, so a
lane that an outside client is using is never taken away. A lane whose process ended by itself is `dead`: it is reported with the tail of
its log and started again only by `restart()`. Nothing here belongs to one event loop, so a page and a notebook may share it.

A lane whose recipe names a server elsewhere has an endpoint and no process. It takes no memory and is never stopped from here; it is asked
anew before each use, since it may have been restarted with another model.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import httpx

from lab import checkpoints
from lab.checkpoints import Cancelled
from lab.errors import LabError
from lab.serving import memory, remote
from lab.serving.attach import Address, address
from lab.serving.command import Lane
from lab.serving.endpoint import Endpoint, LaneStatus, Progress, Stage, State
from lab.serving.metrics import parse
from lab.serving.process import Server, StartCancelled, start_lane

RESERVE = 512 << 20  # bytes that stay free for everything else
JUST_USED = 3.0  # seconds during which an endpoint that was handed out counts as in use
SILENT = 120.0  # seconds after a question that it had no time for, in which a server without an answer still counts as busy
BUSY_TIMEOUT = 5.0  # seconds that a server may take to say whether it is busy
STOP_TIMEOUT = 30.0  # seconds that a start may take to notice that it was called off
TICK = 0.2
FRESH = 5.0  # seconds for which a server elsewhere is taken to be as it was


def _ends(future: Future[Endpoint]) -> bool:
    """Whether a start ends, in whatever way, in time."""
    return bool(wait([future], STOP_TIMEOUT).done)


@dataclass(eq=False)
class _Entry:
    """What `Lanes` knows about one lane; guarded by `Lanes._lock` but for `news`, which only grows."""

    lane: Lane
    state: State = "stopped"
    news: list[Progress] = field(default_factory=list)
    began: float = 0.0  # time.monotonic() of the last start
    used: float = 0.0  # time.monotonic() of the last use
    handed: float = float("-inf")  # time.monotonic() of the last time that its endpoint was given to somebody who does not hold it
    asked: float = 0.0  # time.monotonic() of the last answer of a server elsewhere
    holders: int = 0
    cancel: threading.Event = field(default_factory=threading.Event)
    ready: Future[Endpoint] | None = None
    server: Server | None = None
    placed: bool = False  # it has its place in memory, or is about to take it
    endpoint: Endpoint | None = None
    silent: float = 0.0  # when it had no time to say whether it is busy (time.monotonic()); 0 where it answered last
    known: str = ""  # the model that a server elsewhere served last
    error: LabError | None = None

    def tell(self, stage: Stage, detail: str) -> None:
        self.news.append(Progress(stage, detail, time.monotonic() - self.began))


class Lanes:
    """The lanes of one app. `memory_budget` limits what all of them take together (bytes; None: what the machine has), `most` how many
    are warm at once (None: as many as fit; on a GPU that is by the share of its memory that each recipe's servers take, which for most is
    all of it). `addresses` are the servers elsewhere that recipes may name, by address: their keys and certificates are known here only."""

    def __init__(
        self, *, memory_budget: int | None = None, most: int | None = None, addresses: Mapping[str, Address] | None = None
    ) -> None:
        self._budget, self._most, self._shared = memory_budget, most, memory.on_gpu()
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.RLock()
        self._making_room = threading.Lock()
        self._closed = False
        self._addresses = dict(addresses or {})

    # --- asking for a lane ---

    async def endpoint(self, lane: Lane, *, on_progress: Callable[[Progress], None] | None = None) -> Endpoint:
        """The endpoint of `lane`, ready to use, starting it first if need be; concurrent callers share one start.

        `on_progress` is called on the caller's loop. Cancelling a caller leaves the start going for the others and for later: `stop()`
        calls a start off. Raises `LabError` if the start fails, if it is called off, or if the lane's server died since its last use.
        """
        found = await self._endpoint(lane, on_progress)
        with self._lock:
            self._look(lane).handed = time.monotonic()
        return found

    async def _endpoint(self, lane: Lane, on_progress: Callable[[Progress], None] | None) -> Endpoint:
        with self._lock:
            if self._closed:
                raise LabError("The engines were shut down.")
            entry = self._look(lane)
            entry.used = time.monotonic()
            if entry.state == "dead":
                assert entry.error is not None
                raise entry.error
            stale = lane.at is not None and entry.state == "ready" and time.monotonic() - entry.asked > FRESH
            if entry.state in ("stopped", "failed") or stale:
                self._begin(entry)
            future, seen = entry.ready, 0
        assert future is not None
        while True:
            done = future.done()
            fresh = entry.news[seen:]
            seen += len(fresh)
            if on_progress is not None:
                for progress in fresh:
                    on_progress(progress)
                if not fresh and not done and entry.news:  # nothing new, but time goes on
                    on_progress(replace(entry.news[-1], elapsed=time.monotonic() - entry.began))
            if done:
                entry.used = time.monotonic()
                return future.result()
            await asyncio.sleep(TICK)

    @asynccontextmanager
    async def use(self, lane: Lane, *, on_progress: Callable[[Progress], None] | None = None) -> AsyncIterator[Endpoint]:
        """Like `endpoint()`, and the lane is not taken away while the block runs."""
        with self._lock:
            entry = self._look(lane)
            entry.holders += 1
        try:
            yield await self._endpoint(lane, on_progress)
        finally:
            with self._lock:
                entry.holders -= 1
                entry.used = time.monotonic()

    def _look(self, lane: Lane) -> _Entry:
        entry = self._entries.setdefault(lane.key, _Entry(lane))
        if entry.lane != lane:
            raise ValueError(f"two different recipes share the lane key {lane.key}: give a variant a name of its own")
        self._check(entry)
        return entry

    def _check(self, entry: _Entry) -> None:
        """Notice a server that ended by itself."""
        if entry.state == "ready" and entry.server is not None and (code := entry.server.exit_code()) is not None:
            entry.error = entry.server.death(f"The engine for {entry.lane.label} ended by itself (exit code {code}).")
            entry.state, entry.endpoint, entry.placed = "dead", None, False
            entry.tell("failed", entry.error.what)

    # --- starting ---

    def _begin(self, entry: _Entry) -> None:
        entry.state, entry.error, entry.endpoint, entry.server = "starting", None, None, None
        entry.began, entry.news, entry.cancel, entry.ready, entry.silent = time.monotonic(), [], threading.Event(), Future(), 0.0
        entry.tell("starting", "waiting to start")
        threading.Thread(target=self._start, args=(entry, entry.cancel, entry.ready), name=f"start {entry.lane.key}", daemon=True).start()

    def _start(self, entry: _Entry, cancel: threading.Event, ready: Future[Endpoint]) -> None:
        lane = entry.lane
        try:
            if lane.at is not None:
                self._attach(entry, cancel, ready)
                return
            target = checkpoints.ensure(lane.recipe.target, lambda text: entry.tell("checkpoint", text), cancelled=cancel.is_set)
            draft = None
            if lane.draft != "none":
                weights = lane.recipe.drafts[lane.draft]
                draft = checkpoints.ensure(weights, lambda text: entry.tell("checkpoint", text), cancelled=cancel.is_set)
            with self._making_room:
                self._make_room(entry)
                entry.placed = True
            entry.tell("starting", "starting vLLM: loading its libraries")

            def started(server: Server) -> None:
                entry.server = server

            server = start_lane(
                lane,
                target=target,
                draft=draft,
                say=lambda line: entry.tell("starting", line),
                cancelled=cancel.is_set,
                on_server=started,
            )
            endpoint = Endpoint(server.url, server.model, lane, server.api_key)
            with self._lock:
                if cancel.is_set():
                    raise StartCancelled
                entry.endpoint, entry.state, entry.used = endpoint, "ready", time.monotonic()
                if not entry.holders:
                    entry.handed = entry.used  # somebody is about to be given it
                entry.tell("ready", f"ready on {server.url}")
            ready.set_result(endpoint)
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            self._failed(entry, error, cancel, ready)

    def _attach(self, entry: _Entry, cancel: threading.Event, ready: Future[Endpoint]) -> None:
        lane, before = entry.lane, entry.known
        assert lane.at is not None
        where = self._addresses.get(lane.at) or address(lane.at)
        entry.tell("starting", f"asking {lane.at}")
        endpoint = remote.wait(where, lane, say=lambda line: entry.tell("starting", line), cancelled=cancel.is_set)
        with self._lock:
            if endpoint is None or cancel.is_set():
                raise StartCancelled
            entry.endpoint, entry.state, entry.known = endpoint, "ready", endpoint.model
            entry.used = entry.asked = time.monotonic()
            if before and before != endpoint.model:
                entry.tell("ready", f"{lane.at} serves another model now: {endpoint.model}")
            entry.tell("ready", f"{endpoint.model} at {lane.at}")
        ready.set_result(endpoint)

    def _failed(self, entry: _Entry, error: BaseException, cancel: threading.Event, ready: Future[Endpoint]) -> None:
        if entry.server is not None:
            entry.server.stop()
        failure = error if isinstance(error, LabError) else None
        with self._lock:
            entry.placed = False
            if cancel.is_set() or isinstance(error, Cancelled | StartCancelled):
                failure = LabError(f"The start of {entry.lane.label} was called off.")
                entry.state = "stopped"
            else:
                failure = failure or LabError(f"{entry.lane.label} could not be started.", why=f"{type(error).__name__}: {error}")
                entry.state, entry.error = "failed", failure
            entry.tell("failed", failure.what)
        if failure is not error:
            failure.__cause__ = error
        ready.set_exception(failure)

    # --- room ---

    def _make_room(self, entry: _Entry) -> None:
        """Stop idle lanes, least recently used first, until `entry`'s lane fits."""
        while True:
            with self._lock:
                warm = [other for other in self._entries.values() if other is not entry and other.placed]
            reason = self._lacking(entry.lane, warm)
            if not reason:
                return
            idle = sorted((other for other in warm if other.state == "ready" and not self._busy(other)), key=lambda other: other.used)
            if not idle:
                if not warm:
                    entry.tell("starting", f"{reason}; starting all the same")
                    return
                others = ", ".join(other.lane.label for other in warm)
                raise LabError(
                    f"There is no room to start {entry.lane.label}.",
                    why=f"{reason[0].upper()}{reason[1:]}, and the other engines are in use: {others}.",
                    todo="Wait until they are idle, or stop one.",
                )
            victim = idle[0]
            entry.tell("evicted", f"stopping {victim.lane.label} to make room ({reason})")
            self._halt(victim, "evicted", f"stopped to make room for {entry.lane.label}", idle=True)

    def _crowded(self, warm: Sequence[Lane], lane: Lane) -> str:
        """Why `lane` may not run beside `warm` by their number, or by the GPU that they share; "" if it may."""
        if self._most is not None:
            return f"at most {self._most} engine{'s' if self._most > 1 else ''} may run at once" if len(warm) >= self._most else ""
        if not self._shared or not warm or sum(one.recipe.gpu_share for one in (*warm, lane)) <= 1.0:
            return ""
        return f"it takes {lane.recipe.gpu_share:.0%} of the GPU's memory, and the others are promised too much of it"

    def _lacking(self, lane: Lane, warm: list[_Entry]) -> str:
        """Why one more lane does not fit beside the warm ones; "" if it does."""
        need = lane.recipe.memory_bytes
        if why := self._crowded([other.lane for other in warm], lane):
            return why
        taken = {other.lane.key: other.server.memory() if other.server else 0 for other in warm}
        # A lane that is still loading has not taken its memory yet.
        coming = sum(max(0, other.lane.recipe.memory_bytes - taken[other.lane.key]) for other in warm if other.state == "starting")
        free = memory.available() - RESERVE - coming
        if self._budget is not None:
            free = min(free, self._budget - sum(taken.values()) - coming)
        return "" if free >= need else f"it needs about {need / 1e9:.1f} GB and {max(free, 0) / 1e9:.1f} GB are free"

    def fit_together(self, lanes: Sequence[Lane]) -> bool:
        """Whether all `lanes` can be warm at once, if every other idle lane were stopped. An estimate: others' use is not foreseen."""
        if lanes and self._crowded(lanes[:-1], lanes[-1]):
            return False
        with self._lock:
            warm = {other.lane.key: other.server.memory() for other in self._entries.values() if other.placed and other.server is not None}
        free = memory.available() - RESERVE + sum(warm.values())
        if self._budget is not None:
            free = min(free, self._budget)
        return free >= sum(lane.recipe.memory_bytes for lane in lanes)

    def _held(self, entry: _Entry) -> bool:
        return bool(entry.holders) or time.monotonic() - entry.handed < JUST_USED

    def _busy(self, entry: _Entry) -> bool:
        if self._held(entry):
            return True
        assert entry.endpoint is not None
        try:
            answer = httpx.get(f"{entry.endpoint.url}/metrics", headers=entry.endpoint.headers(), timeout=BUSY_TIMEOUT, trust_env=False)
            now = parse(answer.text, time.time())
        except httpx.TimeoutException:  # it is there and finds no time to answer; for long, nobody is served by it
            entry.silent = entry.silent or time.monotonic()
            return time.monotonic() - entry.silent < SILENT
        except httpx.HTTPError:
            return False  # it does not answer, so it serves nobody
        entry.silent = 0.0
        return bool(now.running or now.waiting)

    # --- stopping ---

    def _halt(self, entry: _Entry, stage: Stage, why: str, *, idle: bool = False) -> None:
        """End the lane's server or start; with `idle`, unless somebody took the lane meanwhile."""
        with self._lock:
            if idle and self._held(entry):
                return
            entry.cancel.set()
            server, future = entry.server, entry.ready
            starting = entry.state == "starting"
            if not starting:
                entry.state, entry.endpoint, entry.placed = "stopped", None, False
                entry.tell(stage, why)
        if server is not None and not starting:  # a start that was called off stops its own server
            server.stop()
        if future is not None and not _ends(future):
            raise LabError(
                f"{entry.lane.label} did not stop within {STOP_TIMEOUT:.0f} s.", why="It is preparing a checkpoint; it stops after that."
            )

    async def stop(self, lane: Lane) -> None:
        """Stop the lane, or call its start off; returns when its processes are gone."""
        with self._lock:
            entry = self._entries.get(lane.key)
        if entry is not None:
            await asyncio.to_thread(self._halt, entry, "evicted", "stopped")

    async def restart(self, lane: Lane, *, on_progress: Callable[[Progress], None] | None = None) -> Endpoint:
        """Stop the lane if it runs, forget how it ended, start it anew and wait until it is ready."""
        await self.stop(lane)
        with self._lock:
            entry = self._entries.get(lane.key)
            if entry is not None and entry.state == "dead":
                entry.state = "stopped"
        return await self.endpoint(lane, on_progress=on_progress)

    async def close(self) -> None:
        """Stop every lane; none can be started afterwards."""
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """`close()` for callers without an event loop (exit handlers, notebooks)."""
        with self._lock:
            self._closed = True
            entries = list(self._entries.values())
        with ThreadPoolExecutor(max_workers=max(1, len(entries))) as pool:
            ends = [pool.submit(self._halt, entry, "evicted", "the lab is closing") for entry in entries]
        for end in ends:
            end.result()

    def status(self) -> list[LaneStatus]:
        """Every lane that was asked for, with what it is doing now. Cheap enough for once a second."""
        with self._lock:
            for entry in self._entries.values():
                self._check(entry)
            return [
                LaneStatus(
                    lane=entry.lane,
                    state=entry.state,
                    progress=entry.news[-1] if entry.news else Progress("starting", "", 0.0),
                    endpoint=entry.endpoint,
                    memory=entry.server.memory() if entry.server is not None and entry.state in ("starting", "ready") else None,
                    in_use=entry.holders,
                    error=entry.error,
                    log=str(entry.server.log) if entry.server is not None else None,
                )
                for entry in self._entries.values()
            ]
