"""The wire from the engine process to the API server: msgpack messages over a ZeroMQ PUSH/PULL pair on an ipc:// address.

The engine only puts a message into a bounded queue; a thread encodes and sends it. When the API server reads too slowly the queue fills,
and from then on steps are dropped and counted until it is empty again; then the counts are sent (`Lost`), followed by the beginnings and
ends of requests that happened meanwhile, which are never dropped. So the engine never waits, and a reader always learns that a trace has
a hole and that it ended.

PUSH connects and PULL binds: several engines (data parallelism) can feed one API server, but only one API server can listen.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
import zmq

from lab.trace.model import Step

logger = logging.getLogger(__name__)


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """What an engine can do, sent when it starts and again when that changes: `(on, reason)` for each ability."""

    vllm: str
    tracing: tuple[bool, str]
    draft_probs: tuple[bool, str]


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """A traced request entered the engine with these prompt ids."""

    trace: str
    request: str
    ids: list[int]


class Took(msgspec.Struct, frozen=True, tag="took"):
    """A step was taken."""

    step: Step


class End(msgspec.Struct, frozen=True, tag="end"):
    """A traced request left the engine; no step of it follows."""

    trace: str
    request: str
    finish: str


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """So many steps of a trace were dropped before they reached the API server."""

    trace: str
    steps: int


Message = Hello | Begin | Took | End | Lost

_SEND_TIMEOUT_MS = 200


def decoder() -> msgspec.msgpack.Decoder[list[Message]]:
    """Decodes what `Publisher` sends."""
    return msgspec.msgpack.Decoder(list[Message])


class Publisher:
    """Sends messages to `address` from a thread of its own; `send` never blocks and never raises. `capacity` is in calls of `send`."""

    def __init__(self, address: str, capacity: int = 4096) -> None:
        self._address = address
        self._capacity = capacity
        self._queue: queue.SimpleQueue[Sequence[Message]] = queue.SimpleQueue()
        self._overflow = threading.Lock()
        self._full = False
        self._lost: Counter[str] = Counter()
        self._owed: list[Message] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eagle3-lab-publisher", daemon=True)
        self._thread.start()

    def send(self, messages: Sequence[Message]) -> None:
        """Queue `messages` (they belong to one engine step, or to none)."""
        if not self._full and self._queue.qsize() < self._capacity:
            self._queue.put(messages)
            return
        with self._overflow:
            if self._queue.qsize() < self._capacity and not self._full:  # it became empty meanwhile
                self._queue.put(messages)
                return
            if not self._full:
                self._full = True
                self._queue.put(())  # wakes the thread once more, should it have emptied the queue already
            for message in messages:
                if isinstance(message, Took):
                    self._lost[message.step.trace] += 1
                else:
                    self._owed.append(message)

    def close(self, timeout: float = 1.0) -> None:
        """Send what is queued, for at most `timeout` seconds, and end the thread."""
        self._stop.set()
        self._queue.put(())
        self._thread.join(timeout)

    def _owing(self) -> list[Message]:
        """What to say after an overflow, once the queue is empty: beginnings, then holes, then ends."""
        if not self._full or self._queue.qsize():
            return []
        with self._overflow:
            holes = [Lost(trace, steps) for trace, steps in self._lost.items()]
            begun = [message for message in self._owed if isinstance(message, Begin)]
            owed = [*begun, *holes, *(message for message in self._owed if not isinstance(message, Begin))]
            self._lost.clear()
            self._owed.clear()
            self._full = False
        return owed

    def _batches(self) -> Iterator[Sequence[Message]]:
        while True:
            messages = self._queue.get()
            if messages:
                yield messages
            if owed := self._owing():
                yield owed
            if self._stop.is_set() and not self._queue.qsize():
                return

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # hold messages here, where they are counted, until somebody listens
        socket.setsockopt(zmq.SNDHWM, 16)
        socket.setsockopt(zmq.SNDTIMEO, _SEND_TIMEOUT_MS)
        encoder = msgspec.msgpack.Encoder()
        try:
            socket.connect(self._address)
            for messages in self._batches():
                data = encoder.encode(messages)
                while True:
                    try:
                        socket.send(data)
                        break
                    except zmq.Again:
                        if self._stop.is_set():
                            return
        except zmq.ZMQError:
            logger.exception("Eagle3 Lab: no steps can be published to %s from now on", self._address)
        finally:
            socket.close()
            context.term()
