"""A run as lines of JSON for the page's script: one string that only ever grows, so that gradio sends what was added.

Each line carries its number `n`; the script applies lines in order and reads the whole string again if one is missing. Text travels as
runs (own text and signs in turn, see `lab/trace/render.py`), never as HTML, and `<` is written `\\u003c`. Records, by `t`:
`run` (what is shown), `step` (a row of chips, the answer's tokens that it added, the numbers so far), `text` (a piece of an answer
without steps), `alternatives` (of the target, by place in the answer), `numbers` (the tiles at the end) and `state`.
"""

from __future__ import annotations

import json
from typing import Any

from lab.trace import counted
from lab.trace.model import Request, Step
from lab.trace.render import Answer, Chip, OutputToken, chips, visible
from lab.ui.numbers import Numbers, tiles
from lab.ui.state import Run


def dump(record: object) -> str:
    """JSON on one line that is inert inside HTML."""
    return (
        json.dumps(record, ensure_ascii=False, separators=(",", ":"))
        .replace("<", "\\u003c")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029")
    )


def _chip(chip: Chip) -> list[Any]:
    probability = None if chip.probability is None else round(chip.probability, 4)
    return [chip.token, chip.mark, chip.position, list(chip.text), probability, chip.output, int(chip.cut)]


def _output(token: OutputToken) -> list[Any]:
    return [token.token, token.mark, token.position, token.output, list(token.text)]


#: Rows that a page still scrolls well; a run of the lab stays below (its context is shorter), a file may hold more.
MOST_STEPS = 5000


class Feed:
    """The growing string of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lines: list[str] = []
        self._answer = Answer()
        self._numbers = Numbers()
        self._start: float | None = None
        self._steps = 0
        self._chunks = 0
        self._alternatives = 0
        self._add(
            {"t": "run", "id": run.id, "label": run.label, "kind": run.kind, "k": run.request.settings.get("k", 0), "state": run.state}
        )

    @property
    def value(self) -> str:
        """Every line so far."""
        return "".join(self._lines)

    def since(self, count: int) -> str:
        """The lines after the first `count`."""
        return "".join(self._lines[max(count, 0) :])

    def update(self, *, final: bool = False) -> str:
        """Append what the run has gained since the last call and give the whole string; `final` adds the state and the last numbers."""
        request = self._run.request
        for step in request.steps[self._steps : MOST_STEPS]:
            self._step(step, request)
        self._steps = min(len(request.steps), MOST_STEPS)
        if not request.steps:
            for text, ids in self._run.chunks[self._chunks :]:
                self._add({"t": "text", "run": list(visible(text, spaces=False)), "ids": list(ids)})
            self._chunks = len(self._run.chunks)
        if len(request.alternatives) > self._alternatives:
            shown = [[[list(visible(one.text, spaces=True)), round(one.logprob, 4)] for one in place] for place in request.alternatives]
            self._add({"t": "alternatives", "from": self._alternatives, "list": shown[self._alternatives :]})
            self._alternatives = len(request.alternatives)
        if final and not request.steps and self._run.counters is not None:
            self._numbers.counts = self._run.counters
        if final:
            self._add({"t": "numbers", "tiles": tiles(self._numbers, request, final=True)})
            self._add({"t": "state", "state": self._run.state})
        return self.value

    def _step(self, step: Step, request: Request) -> None:
        if self._start is None:
            self._start = step.started
        row = [_chip(chip) for chip in chips(step, request.pieces, output=self._answer.length)]
        added = [_output(token) for token in self._answer.feed(step, request.pieces)]
        self._numbers.add(step)
        self._add(
            {
                "t": "step",
                "i": step.index,
                "phase": step.phase,
                "at": round(step.started - self._start, 4),
                "took": round(step.ended - step.started, 4),
                "context": step.context,
                "scheduled": step.scheduled,
                "batch": step.batch_requests,
                "finish": step.finish,
                "counted": step.request == counted.NAME,
                "chips": row,
                "out": added,
                "tiles": [value for _, value, _ in tiles(self._numbers, request)],
            }
        )

    def _add(self, record: dict[str, Any]) -> None:
        self._lines.append(dump({"n": len(self._lines), **record}) + "\n")


def whole(run: Run) -> str:
    """The string of a run that is over."""
    return Feed(run.view()).update(final=True)
