"""The line at the engine: a fair queue over seats, without tasks or clocks.

Each attendee (a *seat*) has its own short queue; the seats take turns, and a seat that is being answered is passed over until that answer
is over. So a person who asks ten times waits behind everybody who asked once. The presenter's seat goes first. A place in line is found by
playing the turns ahead; it can only get better than said when somebody leaves, or by one where a seat is passed over.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from lab.errors import LabError

T = TypeVar("T")

#: The presenter's seat: before everybody else.
PRESENTER = 0


@dataclass(eq=False)
class Job(Generic[T]):
    """Something to do for a seat. `tries` counts how often it was begun."""

    seat: int
    what: T
    tries: int = 0


@dataclass
class Line(Generic[T]):
    """Who is next. `most_each` jobs may wait for one seat, `most` for all seats together, and `at_once` may be under way."""

    at_once: int = 4
    most_each: int = 2
    most: int = 200
    _waiting: OrderedDict[int, deque[Job[T]]] = field(default_factory=OrderedDict)
    _running: list[Job[T]] = field(default_factory=list)
    _places: dict[int, list[int]] | None = None

    def put(self, seat: int, what: T) -> Job[T]:
        """Join the line at the end; raises `LabError` where the seat, or the line, is full."""
        if len(self._waiting.get(seat, ())) >= self.most_each:
            raise LabError(
                f"You already have {self.most_each} prompts in line.", todo="Wait for the first answer, or press Stop to leave the line."
            )
        if self.waiting >= self.most:
            raise LabError(f"The line is full: {self.most} prompts are waiting.", todo="Try again in a minute.")
        job = Job(seat, what)
        self._waiting.setdefault(seat, deque()).append(job)
        if seat == PRESENTER:
            self._waiting.move_to_end(seat, last=False)
        self._places = None
        return job

    def put_back(self, job: Job[T]) -> None:
        """A job that was begun and could not be finished goes to the very front."""
        self.done(job)
        self._waiting.setdefault(job.seat, deque()).appendleft(job)
        self._waiting.move_to_end(job.seat, last=False)
        self._places = None

    def take(self) -> Job[T] | None:
        """The next job to begin, or None: nobody waits, or enough is under way."""
        if len(self._running) >= self.at_once:
            return None
        busy = {job.seat for job in self._running}
        for seat, jobs in self._waiting.items():
            if seat not in busy:
                job = jobs.popleft()
                job.tries += 1
                if jobs and seat != PRESENTER:
                    self._waiting.move_to_end(seat)
                elif not jobs:
                    del self._waiting[seat]
                self._running.append(job)
                self._places = None
                return job
        return None

    def done(self, job: Job[T]) -> None:
        """A job that was taken is over, in whatever way."""
        if job in self._running:
            self._running.remove(job)
            self._places = None

    def leave(self, seat: int) -> list[Job[T]]:
        """Take everything that waits for `seat` out of the line."""
        self._places = None
        return list(self._waiting.pop(seat, ()))

    def place(self, seat: int) -> int | None:
        """How many turns until the seat's first waiting job is taken (1: next); None where it has none."""
        if self._places is None:
            self._places = {}
            left = {one: len(jobs) for one, jobs in self._waiting.items()}
            turn = 0
            while left:
                for one in list(left):
                    turn += 1
                    self._places.setdefault(one, []).append(turn)
                    left[one] -= 1
                    if not left[one]:
                        del left[one]
        places = self._places.get(seat)
        return places[0] if places else None

    def jobs(self, seat: int) -> list[Job[T]]:
        """What waits for `seat`, in order."""
        return list(self._waiting.get(seat, ()))

    @property
    def running(self) -> list[Job[T]]:
        """What is under way."""
        return list(self._running)

    @property
    def waiting(self) -> int:
        """How many jobs wait."""
        return sum(map(len, self._waiting.values()))


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, ... 11th, ..."""
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
