"""Is a sample drawn from a known distribution? Pearson's test on pooled bins, with what it would have detected.

Bins are the tokens whose expected count is at least 5; all others, and whatever the reference does not list, share one more bin (Cochran's
rule, under which the chi-squared law of the statistic is good). Several contexts are tested together: given how often each was reached,
their statistics are independent, so statistics and degrees of freedom add up.

The reference itself is known only up to the arithmetic's rounding: the same target gives slightly different probabilities in another batch
shape. `Binned.slack` is that difference, as the chi-squared distance between two such readings; a sample of n then follows a noncentral
law with noncentrality n x slack at most, and `Outcome.p` allows for it. With a slack of 0 this is the plain test.

Power: for any deviation whose total-variation distance over the bins is d in every context, the chi-squared distance is at least 4 d^2
(Cauchy-Schwarz), so the noncentrality is at least 4 n d^2: `detectable` gives the least d that a test at level alpha finds with a given
probability. What moves between tokens of the pooled bin is not seen.
Several tests: Holm (1979).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.errors import require

#: The least expected count of a bin.
EXPECTED = 5.0


@dataclass(frozen=True)
class Binned:
    """One context: counts and expected shares of its bins (equally many, at least 2), and the reference's own uncertainty."""

    counts: tuple[int, ...]
    shares: tuple[float, ...]
    slack: float = 0.0

    @property
    def n(self) -> int:
        """Tokens drawn in this context."""
        return sum(self.counts)


@dataclass(frozen=True)
class Outcome:
    """A test's result. `tokens` drawn, `p` the probability of so large a statistic if the sample is the target's, rounding allowed for;
    `p_exact` the same for a reference without any rounding; `distance` the total-variation distance between sample and reference."""

    statistic: float
    freedom: int
    tokens: int
    noncentrality: float
    p: float
    p_exact: float
    distance: float


def _stats() -> Any:
    return require("scipy.stats", "The test of the output distribution")


def pool(
    counts: Mapping[int, int], reference: Mapping[int, float], others: Sequence[Mapping[int, float]] = (), *, expected: float = EXPECTED
) -> Binned | None:
    """Counts of tokens against their probabilities (which may sum to less than 1: the rest is every other token); `others` are further
    readings of the same probabilities, from which the slack comes (the largest distance). None where fewer than two bins remain."""
    n = sum(counts.values())
    own = [token for token, p in sorted(reference.items(), key=lambda item: (-item[1], item[0])) if n * p >= expected]
    shares = [reference[token] for token in own]
    rest = 1.0 - sum(shares)
    while own and n * rest < expected:  # the rest is too small a bin of its own: let the least likely token join it
        rest += shares.pop()
        own.pop()
    if not own:
        return None
    found = [counts.get(token, 0) for token in own]
    bins, table = [*shares, rest], [*found, n - sum(found)]
    slack = 0.0
    for other in others:
        again = [other.get(token, 0.0) for token in own]
        again.append(1.0 - sum(again))
        slack = max(slack, sum((a - b) ** 2 / b for a, b in zip(again, bins, strict=True)))
    return Binned(tuple(table), tuple(bins), slack)


def test(contexts: Sequence[Binned]) -> Outcome:
    """Pearson's statistic over all `contexts` together; raises `ValueError` without any."""
    if not contexts:
        raise ValueError("no contexts to test")
    statistic = noncentrality = 0.0
    freedom, tokens, moved = 0, 0, 0.0
    for one in contexts:
        n = one.n
        statistic += sum((count - n * share) ** 2 / (n * share) for count, share in zip(one.counts, one.shares, strict=True))
        noncentrality += n * one.slack
        freedom += len(one.counts) - 1
        tokens += n
        moved += sum(abs(count - n * share) for count, share in zip(one.counts, one.shares, strict=True)) / 2
    stats = _stats()
    exact = float(stats.chi2.sf(statistic, freedom))
    p = float(stats.ncx2.sf(statistic, freedom, noncentrality)) if noncentrality > 0 else exact
    return Outcome(statistic, freedom, tokens, noncentrality, min(max(p, 0.0), 1.0), exact, moved / tokens)


def holm(p: Sequence[float]) -> list[float]:
    """Adjusted p-values: rejecting those at most alpha keeps the chance of any false rejection at alpha, however the tests depend."""
    order = sorted(range(len(p)), key=lambda index: p[index])
    adjusted, most = [0.0] * len(p), 0.0
    for rank, index in enumerate(order):
        most = max(most, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = most
    return adjusted


def power(distance: float, tokens: int, freedom: int, alpha: float, noncentrality: float = 0.0) -> float:
    """Least probability that a test of `tokens` draws at level `alpha` rejects, where every context is off by a total variation of
    `distance`; `noncentrality` is what the test allows for rounding."""
    stats = _stats()
    critical = stats.ncx2.isf(alpha, freedom, noncentrality) if noncentrality > 0 else stats.chi2.isf(alpha, freedom)
    true = 4 * tokens * distance**2
    return float(stats.ncx2.sf(critical, freedom, true) if true > 0 else stats.chi2.sf(critical, freedom))


def detectable(tokens: int, freedom: int, alpha: float, wanted: float, noncentrality: float = 0.0) -> float | None:
    """Least total-variation distance that is found with probability `wanted`; None where even 1 is not."""
    if power(1.0, tokens, freedom, alpha, noncentrality) < wanted:
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle, tokens, freedom, alpha, noncentrality) >= wanted else (middle, high)
    return high
