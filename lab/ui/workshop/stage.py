"""What the whole room looks at: nothing, a sentence, a trace (growing, whole, or one step of it), or a frozen step to guess about.

A stage is replaced as a whole and has an id; its trace travels as lines that a page has not got yet, so a push costs each page its text
once. A recording says on every page that it is one.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lab.env import assets
from lab.errors import LabError
from lab.trace.io import SUFFIX, load
from lab.trace.render import visible
from lab.ui.feed import Feed
from lab.ui.state import Run, Runs
from lab.ui.workshop.guess import Game


@dataclass
class Stage:
    """One thing to look at. `focus` is the step that a pushed step points at, `recording` what a recording is one of."""

    kind: Literal["empty", "say", "trace", "guess"] = "empty"
    title: str = ""
    say: str = ""
    run: Run | None = None
    focus: int | None = None
    recording: str = ""
    #: Whether pages play the trace from its beginning at the speed of the run.
    play: bool = False
    game: Game | None = None
    id: str = field(default_factory=lambda: secrets.token_hex(6))
    _feed: Feed | None = None
    _whole: bool = False

    def update(self) -> bool:
        """Take over what the run has gained; whether it may gain more."""
        if self.kind != "trace" or self.run is None or self._whole:
            return False
        self._feed = self._feed or Feed(self.run)
        self._whole = self.run.state != "running"
        self._feed.update(final=self._whole)
        return not self._whole

    def shown(self, seat: int | None, known: str, lines: int) -> dict[str, Any]:
        """The stage for one page that knows `lines` lines of the stage called `known`."""
        record: dict[str, Any] = {
            "id": self.id,
            "kind": self.kind,
            "title": list(visible(self.title, spaces=False)),
            "say": list(visible(self.say, spaces=False)),
        }
        if self.kind == "trace" and self.run is not None:
            if self._feed is None:
                self.update()
            assert self._feed is not None
            begin = lines if known == self.id else 0
            prompt = list(visible(self.run.request.prompt[:400], spaces=False))
            record |= {"label": self.run.label, "prompt": prompt, "focus": self.focus, "recording": self.recording, "play": self.play}
            record |= {"from": begin, "lines": self._feed.since(begin)}
        if self.game is not None:
            record["game"] = self.game.shown(seat)
        return record


def recording_of(run: Run, when: str) -> Stage:
    """A finished run, played again and marked as a recording."""
    return Stage("trace", "The engine has stopped", run=run, recording=f"Recording of {run.label}, {when}", play=True)


def shipped(runs: Runs) -> tuple[Run, str] | None:
    """The first recording that the lab ships and that has steps: what is played where this room has no good run yet."""
    folder = Path(str(assets() / "traces"))
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            trace = load(path)
        except LabError:
            continue  # another may be whole; the microscope says what is wrong with this one when it is opened
        for request in trace.requests:
            if any(step.draft for step in request.steps):
                return runs.opened(request, trace.provenance, str(request.lane)[:80]), f"shipped as {path.name}"
    return None
