"""The wire between engine and API server: never blocks, counts what it drops."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from lab.trace.model import Step
from lab.vllm_plugin.publisher import Begin, End, Lost, Message, Publisher, Took, decoder

STEP = Step(trace="t", request="r", index=0, phase="decode", started=0, ended=0, draft=(1, 2), sampled=(1, 3), kept=2)


def took(index: int, trace: str = "t") -> list[Message]:
    return [Took(msgspec.structs.replace(STEP, index=index, trace=trace))]


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


class Listener:
    """The API server's side, for one test."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVTIMEO, 60_000)
        self.socket.bind(address)

    def until(self, ends: int) -> list[Message]:
        """Messages until so many `End`s have come."""
        got: list[Message] = []
        while sum(isinstance(message, End) for message in got) < ends:
            got += decoder().decode(self.socket.recv())
        return got

    def close(self) -> None:
        self.socket.close(0)
        self.context.term()


@pytest.fixture
def listen(address: str) -> Iterator[Callable[[], Listener]]:
    """Starts to listen when called."""
    listeners: list[Listener] = []

    def start() -> Listener:
        listeners.append(Listener(address))
        return listeners[-1]

    yield start
    for listener in listeners:
        listener.close()


def test_everything_arrives_in_order(address: str, listen: Callable[[], Listener]) -> None:
    publisher = Publisher(address)
    sent: list[Message] = [Begin("t", "r", [1, 2, 3]), *(took(n)[0] for n in range(500)), End("t", "r", "stop")]
    for message in sent:
        publisher.send([message])
    assert listen().until(1) == sent
    publisher.close()


def test_without_a_reader_nothing_blocks_and_the_hole_is_counted(address: str, listen: Callable[[], Listener]) -> None:
    publisher = Publisher(address, capacity=100)
    publisher.send([Begin("t", "r", [1])])
    started = time.perf_counter()
    for n in range(20_000):
        publisher.send(took(n))
        if n == 10_000:
            publisher.send([Begin("late", "r2", [4])])
    publisher.send(took(0, "late"))
    publisher.send([End("t", "r", "abort")])
    publisher.send([End("late", "r2", "stop")])
    assert time.perf_counter() - started < 30
    got = listen().until(2)
    publisher.close()
    arrived = [m.step.index for m in got if isinstance(m, Took)]
    lost = {m.trace: m.steps for m in got if isinstance(m, Lost)}
    assert arrived == list(range(len(arrived)))
    assert 0 < len(arrived) < 200
    assert lost == {"t": 20_000 - len(arrived), "late": 1}
    kinds = [type(m).__name__ for m in got if not isinstance(m, Took)]
    assert kinds == ["Begin", "Begin", "Lost", "Lost", "End", "End"]


def test_after_an_overflow_steps_flow_again(address: str, listen: Callable[[], Listener]) -> None:
    publisher = Publisher(address, capacity=10)
    for n in range(50):
        publisher.send(took(n))
    publisher.send([End("t", "r", "stop")])
    listener = listen()
    first = listener.until(1)
    for n in range(5):
        publisher.send(took(n, "next"))
    publisher.send([End("next", "r", "stop")])
    second = listener.until(1)
    publisher.close()
    assert any(isinstance(m, Lost) for m in first)
    assert [m.step.index for m in second if isinstance(m, Took)] == list(range(5))


def test_sending_costs_microseconds(address: str) -> None:
    publisher = Publisher(address, capacity=1 << 30)
    batch = took(1)
    best = min(_seconds(publisher, batch) for _ in range(5))
    publisher.close(0.1)
    assert best < 250e-6  # a step takes milliseconds


def _seconds(publisher: Publisher, batch: list[Message]) -> float:
    started = time.perf_counter()
    for _ in range(1000):
        publisher.send(batch)
    return (time.perf_counter() - started) / 1000
