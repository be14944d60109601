"""Above temperature 0: do tokens that went through the acceptance rule have the target's distribution?

Many answers to the same prompt are drawn from the draft's lane. The first token of an answer comes from prefill and proves nothing; the
others were drafted and verified. So the answers are sorted by what they begin with: all that share the same first d tokens (d at least 1)
are one *context*, in which the next token must follow the target's own probabilities, whatever the draft proposed (Leviathan et al. 2023,
appendix A.1). Contexts of a prompt with at least `LEAST` answers are tested together (`goodness.py`), the largest first.

The reference is the baseline's own reading of the context: its log-probabilities at temperature 1, turned to the temperature asked for,
p_T = p^(1/T) / sum p^(1/T) over the `TOP` best tokens; what is left out is stated (`missing`). It is read alone and in batches of two
sizes, since rounding moves it a little; the test allows for the largest of these differences.

Limits: temperatures of at most 1, for which a bound on what is left out is known; no top-k, top-p or penalties; contexts near the start
of an answer, which is where many answers share them.
"""

from __future__ import annotations

import math
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lab.bench import goodness
from lab.bench.scoring import Asker, in_flight
from lab.bench.steps import follow

#: Answers that a context needs, and how many contexts of one prompt are tested at the most.
LEAST = 60
CONTEXTS = 8
#: The target's candidates that are read.
TOP = 2000
#: Answers asked for in one request, and requests at a time.
BATCH = 32
#: The chance that the whole test, all prompts together, fails a server that is right.
ALPHA = 0.01
Say = Callable[[str], None]


@dataclass(frozen=True)
class Ask:
    """What to draw: answers to each prompt (ids by name) at one temperature, `depth` tokens behind the first."""

    prompts: Mapping[str, Sequence[int]]
    temperature: float
    samples: int
    depth: int


@dataclass
class Drawn:
    """Answers per prompt."""

    answers: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)


def contexts(
    answers: Sequence[tuple[int, ...]], depth: int, *, least: int = LEAST, most: int = CONTEXTS
) -> dict[tuple[int, ...], Counter[int]]:
    """What followed each beginning of 1 to `depth` tokens that at least `least` answers share; the most frequent `most` of them."""
    found: dict[tuple[int, ...], Counter[int]] = {}
    for ids in answers:
        for place in range(1, min(depth, len(ids) - 1) + 1):
            found.setdefault(ids[:place], Counter())[ids[place]] += 1
    common = sorted(found.items(), key=lambda item: (-item[1].total(), item[0]))
    return {start: following for start, following in common[:most] if following.total() >= least}


def at_temperature(logprobs: Mapping[int, float], temperature: float) -> tuple[dict[int, float], float]:
    """Probabilities at `temperature` from log-probabilities at 1 of the best candidates, and at most how much of 1 is not among them.

    Tokens that are not listed have at most the least listed probability each and what is left of 1 together, so for 0 < T <= 1 their
    weights p^(1/T) sum to at most `rest * least^(1/T - 1)`, which is exact at T = 1. Raises `ValueError` for other temperatures.
    """
    if not 0 < temperature <= 1:
        raise ValueError(f"temperature {temperature}")
    least = math.exp(min(logprobs.values()))
    rest = max(1.0 - sum(math.exp(value) for value in logprobs.values()), 0.0)
    weights = {token: math.exp(value / temperature) for token, value in logprobs.items()}
    tail = rest * least ** (1 / temperature - 1)
    total = sum(weights.values()) + tail
    return {token: weight / total for token, weight in weights.items()}, 0.0 if temperature == 1 else tail / total


async def draw(asker: Asker, ask: Ask, drawn: Drawn, say: Say) -> None:
    """Fill `drawn`; what is in it stays good if this is cancelled."""
    for name, ids in ask.prompts.items():
        kept = drawn.answers.setdefault(name, [])
        while len(kept) < ask.samples:
            many = min(BATCH, ask.samples - len(kept))
            batch = await asker.complete(ids, max_tokens=ask.depth + 1, temperature=ask.temperature, n=many, ignore_eos=True)
            kept += [one.ids for one in batch]
            say(f"Temperature {ask.temperature:g}: {len(kept)} of {ask.samples} answers to {name}")


async def reference(asker: Asker, prompt: Sequence[int], starts: Sequence[tuple[int, ...]]) -> list[list[dict[int, float]]]:
    """The target's log-probabilities after each beginning: read alone, then with all others at a time, then with all of them twice."""

    async def one(start: tuple[int, ...]) -> dict[int, float]:
        (found,) = await asker.complete([*prompt, *start], max_tokens=1, top=TOP)
        return dict(found.top[0])

    alone = [await one(start) for start in starts]
    together = await in_flight(one, starts, max(len(starts), 1))
    crowded = await in_flight(one, [*starts, *starts], max(2 * len(starts), 1))
    return [list(three) for three in zip(alone, together, crowded, strict=False)]


@dataclass(frozen=True)
class Tested:
    """One prompt's result, with the most that the reference leaves out."""

    prompt: str
    contexts: int
    outcome: goodness.Outcome
    missing: float


async def check(baseline: Asker, ask: Ask, drawn: Drawn, say: Say) -> list[Tested]:
    """Test what was drawn against the baseline's probabilities; prompts whose answers share too little are left out."""
    tested = []
    for name, prompt in ask.prompts.items():
        found = contexts(drawn.answers.get(name, []), ask.depth)
        say(f"Temperature {ask.temperature:g}: the target's own probabilities in {len(found)} contexts of {name}")
        read = await reference(baseline, prompt, list(found))
        bins, missing = [], 0.0
        for counts, (alone, *others) in zip(found.values(), read, strict=True):
            shares, left = at_temperature(alone, ask.temperature)
            binned = goodness.pool(counts, shares, [at_temperature(other, ask.temperature)[0] for other in others])
            if binned is not None:
                bins.append(binned)
                missing = max(missing, left)
        if bins:
            tested.append(Tested(name, len(bins), goodness.test(bins), missing))
    return tested


def summarise(tested: Sequence[Tested], ask: Ask, *, alpha: float = ALPHA) -> dict[str, Any]:
    """The test as plain data: each prompt, adjusted p-values, the verdict, and what would have been found."""
    adjusted = goodness.holm([one.outcome.p for one in tested])
    rows = []
    for one, p in zip(tested, adjusted, strict=True):
        found, level = one.outcome, alpha / len(tested)
        reach = {
            f"{wanted:.0%}": goodness.detectable(found.tokens, found.freedom, level, wanted, found.noncentrality) for wanted in (0.8, 0.95)
        }
        rows.append(
            {"prompt": one.prompt, "contexts": one.contexts, **asdict(found), "p_adjusted": p, "detectable": reach, "missing": one.missing}
        )
    verdict = "not tested" if not rows else "not the target's" if min(adjusted) <= alpha else "consistent"
    worst: dict[str, float | None] = {}
    for wanted in ("80%", "95%"):
        each = [row["detectable"][wanted] for row in rows]
        worst[wanted] = max(each) if rows and all(value is not None for value in each) else None
    return {
        "temperature": ask.temperature,
        "samples": ask.samples,
        "depth": ask.depth,
        "alpha": alpha,
        "correction": "Holm",
        "tokens": sum(row["tokens"] for row in rows),
        "prompts": rows,
        "least_p_adjusted": min(adjusted, default=None),
        "detectable": worst,
        "verdict": verdict,
    }


async def drafting(asker: Asker, prompt: Sequence[int], temperature: float, *, answers: int = BATCH) -> dict[str, Any]:
    """Whether the draft takes its best token or samples: in a traced lane, do equal beginnings get equal drafts?

    A sampling draft would propose different tokens after the same text; a greedy one proposes the same ones, but for its own near-ties.
    """
    trace = uuid.uuid4().hex
    async with follow(asker.endpoint, trace) as steps:
        await asker.complete(prompt, max_tokens=2, temperature=temperature, n=answers, ignore_eos=True, trace=trace)
    by_first: dict[int, Counter[int]] = {}
    first: dict[str, int] = {}
    for step in steps:
        if step.sampled and not step.draft and step.request not in first:
            first[step.request] = step.sampled[-1]
        elif step.draft and step.draft[0] >= 0 and step.request in first:
            by_first.setdefault(first.pop(step.request), Counter())[step.draft[0]] += 1
    repeated = [found for found in by_first.values() if found.total() > 1]
    seen, equal = sum(found.total() for found in repeated), sum(max(found.values()) for found in repeated)
    return {"compared": seen, "equal": equal, "way": "unknown" if not seen else "greedy" if equal >= 0.9 * seen else "sampled"}
