"""The page's numbers, step by step: `lab.trace.stats` adds them up, this module words them as tiles.

The speed uses the engine's clock, from the start of prefill to the last step's end. Passes saved leave prefill's token out on both sides.
"""

from __future__ import annotations

from lab.trace.model import Request, Step
from lab.trace.stats import Counts, confidences, count, fresh


class Numbers:
    """Counts over the steps added so far; `add` them in order."""

    def __init__(self) -> None:
        self.counts = Counts()
        #: Engine steps, prefill included; tokens and target passes of decode steps.
        self.steps = 0
        self.decoded = 0
        self.passes = 0
        #: `(draft's probability, accepted)` of every draft token that the target decided, and steps whose probabilities are unknown.
        self.confidence: list[tuple[float, bool]] = []
        self.unread = 0
        self._first: float | None = None
        self._last = 0.0

    def add(self, step: Step) -> None:
        """Count one step."""
        self.counts += count([step])
        self.steps += 1
        self._first = step.started if self._first is None else self._first
        self._last = step.ended
        if step.phase == "decode" and step.sampled:
            self.passes += 1
            self.decoded += step.kept
        if step.draft and step.sampled:
            self.unread += step.draft_probs is None
            self.confidence += confidences([step])

    @property
    def speed(self) -> float | None:
        """Output tokens per second on the engine's clock."""
        seconds = self._last - (self._first or 0.0)
        return self.counts.tokens / seconds if self.counts.tokens and seconds > 0 else None


def tiles(numbers: Numbers, request: Request, *, final: bool = False) -> list[list[str]]:
    """`[name, value, explanation]` of each tile; `final` adds what only a whole answer can say."""
    counts = numbers.counts
    length, rate, speed = counts.mean_acceptance_length, counts.acceptance_rate, numbers.speed
    lost = f" Incomplete: {request.dropped} steps were lost on the way." if request.dropped else ""
    loops = ""
    if final and length is not None:
        without = count(fresh(request.steps))
        if without.mean_acceptance_length is not None and without.drafts < counts.drafts:
            loops = f" Without steps that repeat an earlier 8-gram: {without.mean_acceptance_length:.2f} over {without.drafts} drafts."
    saved = max(numbers.decoded - numbers.passes, 0)
    share = saved / numbers.decoded if numbers.decoded else None
    return [
        [
            "mean acceptance length",
            "–" if length is None else f"{length:.2f}",
            "Tokens per verify step, the target's own (bonus) token included, as vLLM counts:"
            f" 1 + {counts.accepted} accepted / {counts.drafts} drafts.{loops}{lost}",
        ],
        [
            "acceptance rate",
            "–" if rate is None else f"{rate:.0%}",
            f"{counts.accepted} of {counts.draft_tokens} draft tokens were accepted.{lost}",
        ],
        [
            "output tok/s",
            "–" if speed is None else f"{speed:.1f}",
            f"{counts.tokens} tokens, from the start of prefill to the last step's end on the engine's clock."
            " Drawing every step costs speed where the browser shares the engine's processor; the comparison draws less.",
        ],
        [
            "target passes saved",
            "–" if share is None else f"{share:.0%}",
            f"{numbers.decoded} tokens after the first took {numbers.passes} target passes; without a draft each takes one,"
            f" so {saved} were saved.{lost}",
        ],
        [
            "time to first token",
            "–" if request.ttft is None else f"{request.ttft * 1000:.0f} ms",
            "From sending the request to its first token, on the client's clock.",
        ],
        [
            "tokens / steps",
            f"{counts.tokens} / {numbers.steps}" if numbers.steps else "–",
            "Tokens of the answer, and engine steps with prefill.",
        ],
    ]
