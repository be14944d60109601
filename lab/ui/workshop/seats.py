"""What a room is made of: a prompt in line, a seat with its latest answer and its bell, and an answer that is offered to everybody."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Literal

from lab.ui.feed import Feed
from lab.ui.runner import Status
from lab.ui.state import Run
from lab.ui.workshop.door import Bucket


@dataclass(frozen=True)
class Ask:
    """A prompt in line, and what happens with its trace: nothing, shown while it grows, or frozen at a step for guessing."""

    prompt: str
    then: Literal["keep", "show", "guess"] = "keep"
    step: int = 1


@dataclass(eq=False)
class Seat:
    """One attendee."""

    number: int
    version: int = 1
    bell: asyncio.Event = field(default_factory=asyncio.Event)
    seen: float = field(default_factory=time.monotonic)
    #: The latest answer, its lines for the page, and the sentence about it.
    run: Run | None = None
    feed: Feed | None = None
    said: Status | None = None
    offered: bool = False
    right: int = 0
    played: int = 0
    task: asyncio.Task[None] | None = None
    limit: Bucket = field(default_factory=lambda: Bucket(rate=2.0, burst=15))
    looks: Bucket = field(default_factory=lambda: Bucket(rate=8.0, burst=60))

    def ring(self) -> None:
        """Tell every page of this seat that something changed."""
        self.version += 1
        bell, self.bell = self.bell, asyncio.Event()
        bell.set()


@dataclass(eq=False)
class Offer:
    """An answer that its author offers to the room; nobody but the presenter sees it before the presenter has looked at it."""

    id: str
    seat: int
    run: Run
    looked: bool = False
