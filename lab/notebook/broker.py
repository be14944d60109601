"""One set of engines for several notebooks: a process that keeps lanes, and what a kernel sees of them.

Each notebook runs in a kernel of its own, and an engine takes half a minute to start and two gigabytes to keep. So `make notebooks` (and
the tests) keep one `Lanes` and hand it to the kernels by the setting EAGLE3_LAB_LANES: the path of a socket in a folder that only this user
can enter, and its key. A kernel without the setting keeps lanes of its own, which end with it. The engines always end with the process
that keeps them.

Mechanism: `multiprocessing.connection`, one connection a call. A call is `(method, arguments)`; answers are `("told", Progress)` any number
of times, then `("value", ...)` or `("error", LabError)`. Limit: messages are pickled, which is safe only because nobody else can connect.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from lab import env
from lab.errors import LabError
from lab.serving.command import Lane
from lab.serving.endpoint import Endpoint, LaneStatus, Progress
from lab.serving.lanes import Lanes

Told = Callable[[Progress], None]
#: What a kernel may ask for.
METHODS = ("endpoint", "restart", "stop", "status", "fit_together")
SETTING = "EAGLE3_LAB_LANES"


def _answer(lanes: Lanes, connection: Connection) -> None:
    """Serve the one call of a connection; a caller that went away is no error."""
    with connection, suppress(OSError, EOFError):
        method, arguments = connection.recv()
        try:
            if method not in METHODS:
                raise ValueError(f"there is no call {method!r}")
            if method in ("status", "fit_together"):
                value: Any = getattr(lanes, method)(*arguments)
            elif method == "stop":
                value = asyncio.run(lanes.stop(*arguments))
            else:
                value = asyncio.run(getattr(lanes, method)(*arguments, on_progress=lambda progress: connection.send(("told", progress))))
        except LabError as error:
            connection.send(("error", error))
        else:
            connection.send(("value", value))


@contextmanager
def shared(lanes: Lanes) -> Iterator[dict[str, str]]:
    """Offer `lanes` to kernels while the block runs; gives the environment that they need. The lanes stay the caller's to shut down."""
    key = secrets.token_bytes(32)
    with tempfile.TemporaryDirectory(prefix="eagle3-lanes-", dir=env.socket_folder()) as folder:  # made with mode 0700
        path = str(Path(folder) / "lanes")
        listener = Listener(path, "AF_UNIX", authkey=key)
        closing = threading.Event()

        def serve() -> None:
            while not closing.is_set():
                try:
                    connection = listener.accept()
                except Exception:  # noqa: BLE001 - somebody without the key, or a caller that left: the next one is served
                    continue
                threading.Thread(target=_answer, args=(lanes, connection), daemon=True).start()

        thread = threading.Thread(target=serve, daemon=True, name="shared lanes")
        thread.start()
        try:
            yield {SETTING: f"{path}:{key.hex()}"}
        finally:
            closing.set()
            with suppress(OSError, EOFError):
                Client(path, "AF_UNIX", authkey=key).close()  # wakes the accept
            thread.join(5)
            listener.close()


class SharedLanes:
    """The lanes of another process, with the calls of `Lanes` that notebooks and the page need."""

    def __init__(self, place: str) -> None:
        """`place` is the value of EAGLE3_LAB_LANES."""
        path, _, key = place.rpartition(":")
        self._path, self._key = path, bytes.fromhex(key)

    def _call(self, method: str, *arguments: Any, on_progress: Told | None = None) -> Any:
        try:
            with Client(self._path, "AF_UNIX", authkey=self._key) as connection:
                connection.send((method, arguments))
                while True:
                    kind, value = connection.recv()
                    if kind == "error":
                        raise value
                    if kind == "value":
                        return value
                    if on_progress is not None:
                        on_progress(value)
        except (OSError, EOFError) as error:
            why = "The process that keeps the notebooks' engines ended."
            raise LabError("The shared engines are gone.", why=why, todo="Start `make notebooks` again and restart the kernel.") from error

    async def endpoint(self, lane: Lane, *, on_progress: Told | None = None) -> Endpoint:
        """As `Lanes.endpoint`; `on_progress` is called on the caller's loop."""
        return await self._waited("endpoint", lane, on_progress)

    async def restart(self, lane: Lane, *, on_progress: Told | None = None) -> Endpoint:
        """As `Lanes.restart`."""
        return await self._waited("restart", lane, on_progress)

    async def _waited(self, method: str, lane: Lane, on_progress: Told | None) -> Endpoint:
        loop = asyncio.get_running_loop()

        def told(progress: Progress) -> None:
            if on_progress is not None:
                loop.call_soon_threadsafe(on_progress, progress)

        found: Endpoint = await asyncio.to_thread(self._call, method, lane, on_progress=told)
        return found

    @asynccontextmanager
    async def use(self, lane: Lane, *, on_progress: Told | None = None) -> AsyncIterator[Endpoint]:
        """As `Lanes.use`, except that only the running request keeps the lane from being taken away."""
        yield await self.endpoint(lane, on_progress=on_progress)

    async def stop(self, lane: Lane) -> None:
        """As `Lanes.stop`."""
        await asyncio.to_thread(self._call, "stop", lane)

    def status(self) -> list[LaneStatus]:
        """As `Lanes.status`."""
        found: list[LaneStatus] = self._call("status")
        return found

    def fit_together(self, lanes: Sequence[Lane]) -> bool:
        """As `Lanes.fit_together`."""
        return bool(self._call("fit_together", list(lanes)))

    def shutdown(self) -> None:
        """Nothing: the lanes belong to the process that keeps them."""


def lanes() -> Lanes | SharedLanes:
    """The shared lanes where this process was given some, else lanes of its own."""
    place = env.shared_lanes()
    return SharedLanes(place) if place else Lanes()


def kernel_environment(given: dict[str, str]) -> dict[str, str]:
    """This process's environment with what `shared` gave, for kernels."""
    return {**os.environ, **given}
