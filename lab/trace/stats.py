"""Pure counts over steps: what was drafted, what was accepted, and how sure one may be of it.

All counts are vLLM's own (`vllm/v1/spec_decode/metrics.py`): a *draft* is one verify step with at least one draft token, accepted tokens
are counted even where a stop cut them off, and the *mean acceptance length includes the bonus token*: 1 + accepted / drafts. Others quote
it without, one less. Under greedy sampling it is how many tokens a target pass yields.

Steps that never arrived (`Request.dropped`) are not guessed: counts are then a lower bound, and the caller says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import NormalDist

import numpy as np

from lab.trace.model import Step

#: Length of the n-gram whose second appearance in an answer counts as a loop.
LOOP = 8


def _sum(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))


@dataclass(frozen=True)
class Counts:
    """Counts of any number of steps; they add up."""

    #: Verify steps, the draft tokens in them, and those that the target accepted.
    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    #: At index i: how often the draft token at position i + 1 was accepted, and how often there was one.
    accepted_at: tuple[int, ...] = ()
    drafted_at: tuple[int, ...] = ()
    #: At index a: verify steps that accepted exactly `a` draft tokens.
    histogram: tuple[int, ...] = ()
    #: Tokens that reached the output, and target passes that sampled any (prefill's last chunk included).
    tokens: int = 0
    passes: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.drafts + other.drafts,
            self.draft_tokens + other.draft_tokens,
            self.accepted + other.accepted,
            _sum(self.accepted_at, other.accepted_at),
            _sum(self.drafted_at, other.drafted_at),
            _sum(self.histogram, other.histogram),
            self.tokens + other.tokens,
            self.passes + other.passes,
        )

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted draft tokens over all draft tokens; None without any."""
        return self.accepted / self.draft_tokens if self.draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens a verify step yields on average, bonus token included: 1 + accepted / drafts. None without drafts."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def rate_at(self) -> tuple[float, ...]:
        """Acceptance by position, as vLLM's metrics mean it: accepted there over *all* drafts, so it never rises with the position."""
        return tuple(accepted / self.drafts for accepted in self.accepted_at)

    @property
    def passes_saved(self) -> int:
        """Target passes that the same output would have taken one by one, less those it took. Below 0 is impossible."""
        return self.tokens - self.passes


def count(steps: Iterable[Step]) -> Counts:
    """Counts of `steps`, of one request or of many."""
    drafts = tokens = passes = 0
    accepted_at: list[int] = []
    drafted_at: list[int] = []
    histogram: list[int] = []
    for step in steps:
        tokens += step.kept
        passes += bool(step.sampled)
        if not step.draft or not step.sampled:
            continue
        drafts += 1
        length, accepted = len(step.draft), step.accepted
        if length > len(drafted_at):
            more = length - len(drafted_at)
            drafted_at += [0] * more
            accepted_at += [0] * more
            histogram += [0] * (length + 1 - len(histogram))
        for position in range(length):
            drafted_at[position] += 1
        for position in range(accepted):
            accepted_at[position] += 1
        histogram[accepted] += 1
    return Counts(drafts, sum(drafted_at), sum(accepted_at), tuple(accepted_at), tuple(drafted_at), tuple(histogram), tokens, passes)


def fresh(steps: Sequence[Step], n: int = LOOP) -> Iterator[Step]:
    """The steps of *one* request that do not go round in a loop.

    A small model repeats itself, and any draft predicts a loop. A token of the answer *repeats* when the `n` tokens that end with it
    appeared earlier in the same answer (the prompt is not searched; the first n - 1 tokens never repeat). A step is left out when the
    first token that it yields repeats. That token is the target's choice under greedy sampling whatever the draft says, so the choice of
    steps does not favour a draft; a step that runs into a loop stays in whole.
    """
    answer: list[int] = []
    seen: set[tuple[int, ...]] = set()
    for step in steps:
        repeats = False
        for place, token in enumerate(step.sampled[: step.kept]):
            answer.append(token)
            if len(answer) < n:
                continue
            gram = tuple(answer[-n:])
            repeats |= place == 0 and gram in seen
            seen.add(gram)
        if not repeats:
            yield step


def confidences(steps: Iterable[Step]) -> list[tuple[float, bool]]:
    """`(draft's own probability, accepted)` of every draft token that the target decided: the accepted ones and the first rejected one of a
    step. Steps whose probabilities are unknown are left out."""
    return [
        (step.draft_probs[place], place < step.accepted)
        for step in steps
        if step.draft and step.sampled and step.draft_probs is not None
        for place in range(min(step.accepted + 1, len(step.draft)))
    ]


def tokens_per_second(steps: Sequence[Step]) -> float | None:
    """Output tokens a second while one request was decoded, by the engine's clock: the tokens after the step that sampled the first, over
    the time after it. None for fewer than two sampling steps."""
    sampling = [step for step in steps if step.sampled]
    if len(sampling) < 2:
        return None
    elapsed = sampling[-1].ended - sampling[0].ended
    return sum(step.kept for step in sampling[1:]) / elapsed if elapsed > 0 else None


def expanded(samples: Sequence[float] | np.ndarray, units: int, confidence: float = 0.95) -> tuple[float, float]:
    """The expanded percentile interval of a bootstrap's `samples`, which were drawn from `units` (two or more) at a time.

    A plain percentile interval of few units is too narrow: of 8 it leaves out the truth one time in ten. So its quantiles are taken further
    out, by as much as Student's t asks for (Hesterberg 2015, The American Statistician 69(4)). Below about five units no quantile lies far
    enough out, and the interval is the samples' range.
    """
    normal, free = NormalDist(), max(1, units - 1)
    z = normal.inv_cdf((1 + confidence) / 2)
    # Student's t from the normal quantile (Abramowitz & Stegun 26.7.5), within 0.01 from 5 degrees of freedom on: the light install, which
    # draws traces and results, has no scipy.
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * free**3)
    tail = normal.cdf(-t * (units / free) ** 0.5)
    low, high = np.quantile(samples, [tail, 1 - tail])
    return float(low), float(high)


def interval(
    requests: Sequence[Counts],
    statistic: Callable[[Counts], float | None],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Bootstrap interval (Efron & Tibshirani 1993, chapter 13; `expanded`) of a ratio such as `Counts.mean_acceptance_length`.

    `requests` holds the counts of each request: requests are drawn with replacement, since the steps of one answer are not independent.
    None for fewer than two requests, or where the statistic is undefined in the whole sample. Resamples in which it is undefined are left
    out.
    """
    if len(requests) < 2:
        return None
    wide = max(len(one.drafted_at) for one in requests)
    table = np.array(
        [
            [
                one.drafts,
                one.draft_tokens,
                one.accepted,
                one.tokens,
                one.passes,
                *_padded(one.accepted_at, wide),
                *_padded(one.drafted_at, wide),
                *_padded(one.histogram, wide + 1),
            ]
            for one in requests
        ]
    )
    drawn = np.random.default_rng(seed).multinomial(len(requests), [1 / len(requests)] * len(requests), size=resamples)
    values = []
    for drafts, draft_tokens, accepted, tokens, passes, *lists in (drawn @ table).tolist():
        at, by, histogram = lists[:wide], lists[wide : 2 * wide], lists[2 * wide :]
        value = statistic(Counts(drafts, draft_tokens, accepted, tuple(at), tuple(by), tuple(histogram), tokens, passes))
        if value is not None:
            values.append(value)
    if not values:
        return None
    return expanded(values, len(requests), confidence)


def _padded(values: Sequence[int], length: int) -> list[int]:
    return [*values, *([0] * (length - len(values)))]
