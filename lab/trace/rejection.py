"""The rule that decides a draft token, as arithmetic on two distributions: what vLLM's sampler does with random numbers, done with sums.

With the target's distribution p and the draft's q over the same vocabulary, a draft token x drawn from q is accepted with probability
min(1, p(x) / q(x)); where it is rejected, a token is drawn from the *residual*, max(p - q, 0) brought to sum one. The token that comes out
is distributed as p, whatever q is (Leviathan et al. 2023, algorithm 1 and appendix A.1; Chen et al. 2023, theorem 1). A draft that always
proposes its first choice, as vLLM's Eagle3 does, is the case of a q with all its mass on one token: it is accepted with probability p(x).

Arrays are float64 [V] and sum to one; `ValueError` otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lab.trace.model import Request, Step


def _check(*distributions: np.ndarray) -> None:
    for one in distributions:
        if one.ndim != 1 or one.shape != distributions[0].shape:
            raise ValueError("distributions must be arrays of one equal length")
        if (one < 0).any() or abs(float(one.sum()) - 1) > 1e-6:
            raise ValueError("a distribution has no negative entries and sums to one")


def one_hot(token: int, size: int) -> np.ndarray:
    """The distribution of a draft that always proposes `token`."""
    q = np.zeros(size)
    q[token] = 1.0
    return q


def chance(p: np.ndarray, q: np.ndarray) -> float:
    """The probability that a token drawn from the draft is accepted: the sum of min(p, q), what the two have in common."""
    _check(p, q)
    return float(np.minimum(p, q).sum())


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """What a rejected token is replaced from: what the target has and the draft lacks, brought to sum one. Equal p and q give p."""
    _check(p, q)
    left = np.maximum(p - q, 0.0)
    total = left.sum()
    return left / total if total > 0 else p.copy()


def emitted(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The distribution of the token that comes out of one position: accepted mass, and the rest through the residual. It is p."""
    return np.minimum(p, q) + (1.0 - chance(p, q)) * residual(p, q)


@dataclass(frozen=True)
class Drawn:
    """What came out of playing the rule many times: how often each token was emitted, and how many draft tokens were accepted."""

    emitted: np.ndarray
    accepted: int
    times: int


def play(p: np.ndarray, q: np.ndarray, times: int, seed: int = 0) -> Drawn:
    """Propose from q, accept or recover, `times` times."""
    rest, random = residual(p, q), np.random.default_rng(seed)
    proposed = random.choice(len(q), size=times, p=q / q.sum())
    accepted = random.random(times) < p[proposed] / q[proposed]
    recovered = random.choice(len(p), size=times, p=rest / rest.sum())
    tokens = np.where(accepted, proposed, recovered)
    return Drawn(np.bincount(tokens, minlength=len(p)), int(accepted.sum()), times)


def spread(probability: float, times: int) -> float:
    """Standard deviation of a frequency over `times` independent draws."""
    return float(np.sqrt(probability * (1 - probability) / times))


def greedy(draft: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
    """What a step yields without randomness: the draft tokens that are the target's own choices, then the target's next choice.

    `wanted[i]` is the target's first choice after the first i draft tokens: one more than `draft`, or fewer at the end of an answer.
    """
    agreed = 0
    while agreed < min(len(draft), len(wanted)) and draft[agreed] == wanted[agreed]:
        agreed += 1
    return (*draft[:agreed], *wanted[agreed : agreed + 1])


@dataclass(frozen=True)
class Tally:
    """Many answers to one prompt whose first token and first proposal were the same: what became of that proposal."""

    #: The answer's first token, the token that the draft proposed behind it, and how often that was.
    first: int
    proposed: int
    times: int
    accepted: int
    #: How often each token came out at that place.
    emitted: dict[int, int]


def tally(requests: Sequence[Request]) -> Tally:
    """Count the first verify step of each answer, over the answers that share the most frequent first token and proposal."""
    seen: list[tuple[int, Step]] = []
    for request in requests:
        ids, verified = request.output_ids(), next((step for step in request.steps if step.draft), None)
        if ids and verified is not None and verified.sampled:
            seen.append((ids[0], verified))
    if not seen:
        raise ValueError("none of the requests has a verify step")
    ((first, proposed), times) = Counter((token, step.draft[0]) for token, step in seen).most_common(1)[0]
    same = [step for token, step in seen if (token, step.draft[0]) == (first, proposed)]
    return Tally(first, proposed, times, sum(step.accepted > 0 for step in same), dict(Counter(step.sampled[0] for step in same)))


def replay(request: Request) -> tuple[int, list[int]]:
    """Play a greedy answer again: how many verify steps were replayed, and the indices of those that the engine decided otherwise.

    The answer itself says what the target wanted at each place. Steps at the end, which lack places to compare with, are left out.
    """
    answer, place, replayed, different = request.output_ids(), 0, 0, []
    for step in request.steps:
        wanted = answer[place : place + len(step.draft) + 1]
        if step.draft and len(wanted) == len(step.draft) + 1:
            replayed += 1
            if greedy(step.draft, wanted) != step.sampled:
                different.append(step.index)
        place += step.kept
    return replayed, different
