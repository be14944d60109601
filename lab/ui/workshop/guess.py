"""The guessing game: a step is frozen, the room guesses whether the target accepts one draft token, then the step is revealed.

Until then nothing that is sent to the room says what happened: only the text before the step and the draft's proposals. A seat has one
vote, which it may change until the reveal; the room sees how many voted, and what they said only afterwards.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from lab.errors import LabError
from lab.trace.model import Request, Step
from lab.trace.render import Answer, chips, visible

#: Tokens of the answer before the frozen step that are shown.
CONTEXT = 80


@dataclass
class Game:
    """One frozen step of `request`; `position` counts the draft's tokens from 1."""

    request: Request
    step: Step
    position: int
    id: str = field(default_factory=lambda: secrets.token_hex(6))
    votes: dict[int, bool] = field(default_factory=dict)
    revealed: bool = False

    @classmethod
    def freeze(cls, request: Request, index: int, position: int = 1) -> Game:
        """Freeze the step with number `index`; raises `LabError` for a step or a token that nobody can guess about."""
        step = next((one for one in request.steps if one.index == index), None)
        if step is None:
            raise LabError(f"This run has no step {index}.", todo="Select a token in the microscope, then press Freeze.")
        if not step.draft:
            raise LabError(f"Step {index} has no draft to guess about.", todo="Choose a later step, or a run with a draft.")
        reached = min(step.accepted + 1, len(step.draft))
        if not 1 <= position <= reached:
            raise LabError(
                f"The target never looked at draft token {position} of step {index}.", todo=f"Choose a draft token from 1 to {reached}."
            )
        return cls(request, step, position)

    @property
    def truth(self) -> bool:
        """Whether the target accepted the token."""
        return self.position <= self.step.accepted

    def vote(self, seat: int, accept: bool) -> None:
        """Count a vote, in place of an earlier one; raises `LabError` after the reveal."""
        if self.revealed:
            raise LabError("This step has been revealed.", todo="Wait for the next one.")
        self.votes[seat] = accept

    def tally(self) -> dict[str, int]:
        """Votes by what they say."""
        accept = sum(self.votes.values())
        return {"accept": accept, "reject": len(self.votes) - accept}

    def shown(self, seat: int | None = None) -> dict[str, Any]:
        """What the room may see now: as data, text as runs of own text and signs (see `lab/trace/render.py`)."""
        pieces, answer, before = self.request.pieces, Answer(), []
        for step in self.request.steps:
            if step.index >= self.step.index:
                break
            before += [list(token.text) for token in answer.feed(step, pieces)]
        drafts = chips(self.step, pieces)[: len(self.step.draft)]
        record: dict[str, Any] = {
            "id": self.id,
            "step": self.step.index,
            "position": self.position,
            "prompt": list(visible(self.request.prompt[:400], spaces=False)),
            "before": before[-CONTEXT:],
            "draft": [list(chip.text) for chip in drafts],
            "votes": len(self.votes),
            "mine": self.votes.get(seat) if seat is not None else None,
            "revealed": self.revealed,
        }
        if self.revealed:
            row = chips(self.step, pieces)
            record |= {"truth": self.truth, "tally": self.tally(), "row": [[list(chip.text), chip.mark] for chip in row]}
        return record
