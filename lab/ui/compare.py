"""Two runs of one prompt, without gradio: are the token ids the same, where not first, and what the speeds say.

The speed-up is the ratio of output tokens per second, each over the time from sending the request to its last token, so it includes the
prompt. Several pairs with the same settings give a median and a range. Whether a difference is a near-tie shows in the target's margin:
the gap, in nats, between its two best candidates at that place, if both answers took one of them. The threshold is the certificate's,
measured for that lane, or without one `divergence.UNMEASURED`, in float32 `UNMEASURED_SINGLE` (`lab.bench.divergence` says how they are
derived).
"""

from __future__ import annotations

import os
import statistics
from collections.abc import AsyncIterator, Sequence
from typing import Any

from lab.bench import divergence
from lab.errors import LabError
from lab.serving.client import Done, Event
from lab.trace.align import first_difference
from lab.trace.model import Alternative
from lab.trace.render import Answer, visible
from lab.ui.feed import dump
from lab.ui.state import Run


def speed_up(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float] | None:
    """Median, least and largest ratio of `(baseline, other)` speeds; None without pairs."""
    ratios = [other / baseline for baseline, other in pairs if baseline > 0]
    return (statistics.median(ratios), min(ratios), max(ratios)) if ratios else None


def busy(load: float, cores: int) -> str:
    """A warning where the machine's load (mean number of runnable threads) is far more than the engine's own; "" where it is not."""
    if load <= 2 * cores + 1:
        return ""
    return f"This machine is busy with other work (load {load:.0f} on {cores} cores): do not rely on these speeds."


def strangers(one: Run, other: Run) -> str:
    """Why the token ids of two runs cannot be compared: servers elsewhere that do not serve the same model; "" where they do."""
    names = [_model(run) for run in (one, other)]
    if names[0] == names[1]:
        return ""
    first, second = (name[:80] or "the recipe's target" for name in names)
    return (
        f"The two lanes serve different models ({first} and {second}), so their answers are not compared,"
        " and the ratio of their speeds says nothing about speculation."
    )


def _model(run: Run) -> str:
    server = run.provenance.get("server")
    return str(server.get("root") or server.get("model", "")) if isinstance(server, dict) else str(run.provenance.get("target", ""))


def margin(alternatives: Sequence[Sequence[Alternative]], place: int) -> tuple[float, list[Alternative]] | None:
    """Gap in nats between the target's two best candidates at `place`, and those two; None where the server gave fewer."""
    if not 0 <= place < len(alternatives) or len(alternatives[place]) < 2:
        return None
    best = sorted(alternatives[place], key=lambda one: -one.logprob)[:2]
    return best[0].logprob - best[1].logprob, best


async def last_request(events: AsyncIterator[Event]) -> Any:
    """The request of the last event, for a run whose course nobody watches."""
    found = None
    async for event in events:
        if isinstance(event, Done):
            found = event.request
    if found is None or found.error:
        raise LabError("The margin could not be read.", why=(found.error or "") if found else "The answer broke off.")
    return found


class BesideFeed:
    """The comparison as a growing string of JSON lines (see `feed.py`); lane 0 is the baseline."""

    def __init__(self, baseline: Run, other: Run) -> None:
        self._runs = (baseline, other)
        self._lines: list[str] = []
        self._answers = (Answer(), Answer())
        self._steps = [0, 0]
        self._chunks = [0, 0]
        self._add({"t": "start", "id": other.id, "lanes": [{"label": run.label, "kind": run.kind} for run in self._runs]})

    @property
    def value(self) -> str:
        return "".join(self._lines)

    def update(self) -> str:
        """Append what both runs have gained: `[ids, mark, text]` for each token or chunk; `anew`: steps come, in place of the chunks."""
        for lane, run in enumerate(self._runs):
            tokens: list[list[Any]] = []
            anew = bool(self._chunks[lane] and run.request.steps and not self._steps[lane])
            for step in run.request.steps[self._steps[lane] :]:
                added = self._answers[lane].feed(step, run.request.pieces)
                tokens += [[[token.token], token.mark, list(token.text)] for token in added]
            self._steps[lane] = len(run.request.steps)
            if not run.request.steps:
                for text, ids in run.chunks[self._chunks[lane] :]:
                    tokens.append([list(ids), "plain", list(visible(text, spaces=False))])
                self._chunks[lane] = len(run.chunks)
            if tokens:
                self._add({"t": "tokens", "lane": lane, "list": tokens, "anew": anew})
        return self.value

    def lane(self, lane: int) -> str:
        """Append the figures of a lane that is done."""
        run = self._runs[lane]
        speed = run.output_speed()
        self._add(
            {
                "t": "lane",
                "lane": lane,
                "state": run.state,
                "speed": None if speed is None else round(speed, 2),
                "tokens": len(run.output_ids()),
                "seconds": run.request.elapsed,
                "ttft": run.request.ttft,
            }
        )
        return self.value

    def verdict(
        self,
        pairs: Sequence[tuple[float, float]],
        *,
        sampled: bool,
        found: tuple[float, list[Alternative]] | None = None,
        threshold: float | None = None,
        single: bool = False,
    ) -> str:
        """Append the speed-up and whether the answers are the same, in words and with the place of the first difference. `threshold` is
        the certificate's, in nats, if there is one; `single` says that the engines compute in float32."""
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        baseline, other = self._runs
        ids = (baseline.output_ids(), other.output_ids())
        place = first_difference(*ids)
        ratio = speed_up(pairs)
        if words := strangers(baseline, other):
            kind = "unknown"
        elif not (ids[0] and ids[1]):
            words, kind = "Token ids cannot be compared: this server does not give them.", "unknown"
        elif place is None:
            words, kind = f"All {len(ids[0])} token ids are identical.", "same"
        else:
            words, kind = f"Token ids differ first at token {place + 1}.", "different"
            if sampled:
                words += " Expected: the temperature is above 0, so both answers are drawn at random."
        self._add(
            {
                "t": "verdict",
                "kind": kind,
                "words": words,
                "at": place if kind == "different" else None,
                "speedup": None if ratio is None else [round(part, 3) for part in ratio],
                "pairs": len(pairs),
                "busy": busy(load, os.cpu_count() or 1),
                "margin": None if found is None else round(found[0], 6),
                "tie": "" if found is None or place is None else self._tie(found, place, threshold, single),
                "best": [] if found is None else [[list(visible(one.text, spaces=True)), round(one.logprob, 4)] for one in found[1]],
            }
        )
        return self.value

    def _tie(self, found: tuple[float, list[Alternative]], place: int, threshold: float | None, single: bool) -> str:
        """What the margin means, in words."""
        margin_, best = found
        ids = self._runs[1].output_ids()
        piece = self._runs[1].request.pieces.get(ids[place]) if place < len(ids) else None
        if piece is not None and bytes.fromhex(piece).decode("utf-8", errors="backslashreplace") not in [one.text for one in best]:
            return ": the draft's lane took neither, so this is more than a near-tie"
        if threshold is not None:
            limit, source = threshold, "measured for this lane's certificate"
        elif single:
            limit, source = divergence.UNMEASURED_SINGLE, "a bound for float32; nothing was measured here"
        else:
            limit, source = divergence.UNMEASURED, "one step of BF16; nothing was measured here"
        if margin_ > limit:
            return f": more than a near-tie (up to {divergence.nats(limit)} nats, {source})"
        return f": a near-tie (up to {divergence.nats(limit)} nats, {source}), which rounding in another batch shape can turn"

    def _add(self, record: dict[str, Any]) -> None:
        self._lines.append(dump({"n": len(self._lines), **record}) + "\n")
