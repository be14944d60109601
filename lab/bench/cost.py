"""A cost model that explains a speed-up: what a step is made of, fitted to measured steps with coefficients that mean something.

A decode step of B requests, each with c tokens in its KV cache and K draft tokens to verify (K = 0: the baseline), schedules R = B (K + 1)
rows. The model is a sum of non-negative terms, in seconds:

    target    t0 + t_row R + t_bend max(R - bend, 0) + t_context R c
                                                  the target's pass: weights read once, arithmetic a row, attention over the context;
                                                  beyond `bend` rows arithmetic no longer hides behind reading the weights
    accept    a0 + a_row R                        sampling and the acceptance rule
    draft     K d0 + d_row 2 K B + d_context K B c   K passes, the first over all R rows, the others over B: 2 K B rows together
    rest      r0 + r_request B + r_draft [K > 0]  scheduler, input preparation, messages, and the time between two steps

The coefficients come from non-negative least squares on relative errors (Lawson & Hanson 1974, chapter 23; here numpy only), each point a
median over like steps, so that single stalls of the machine do not count; of the `BENDS` the one that fits best is taken. Where the trace
timed the parts, each part is fitted to its own times; elsewhere (a GPU) only to the whole step, and only the terms that a whole step can
tell apart are used.

What follows from it, with tau the tokens a step yields a request (mean acceptance length, bonus included):

    speed-up   = tau * step(0, B, c) / step(K, B, c)         both lanes decode with B requests; prompts are outside
    break-even = step(K, B, c) / step(0, B, c)               the tau at which speculation gains nothing
    bound      = tau                                         a step with a draft holds a baseline step, so it cannot be shorter

Drafts accepted independently with probability alpha give tau = (1 - alpha^(K+1)) / (1 - alpha) (Leviathan et al. 2023, equation 1): used
only to say the break-even as a rate. Tau for other K comes from `lab.trace.whatif`, which needs no such assumption.

Limits: one bend, while a real pass has steps of its own (tiles, graphs); prefill steps and a queue that runs dry are outside; held-out
cells say how far to trust it between the measured ones, nothing says so beyond them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PARTS = ("target", "accept", "draft", "rest")
#: Every coefficient's part, and what it is a cost of.
COEFFICIENTS: Mapping[str, tuple[str, str]] = {
    "t0": ("target", "a pass"),
    "t_row": ("target", "a row"),
    "t_bend": ("target", "a row beyond the bend"),
    "t_context": ("target", "a row and token of context"),
    "a0": ("accept", "a step"),
    "a_row": ("accept", "a row"),
    "d0": ("draft", "a draft pass"),
    "d_row": ("draft", "a row of the draft"),
    "d_context": ("draft", "a draft token and token of context"),
    "r0": ("rest", "a step"),
    "r_request": ("rest", "a request"),
    "r_draft": ("rest", "a step with a draft"),
}
#: What whole steps can tell apart.
WHOLE = ("t0", "t_row", "t_bend", "t_context", "d0", "d_row", "d_context", "r_draft")

#: Rows of a step at which the cost of a row may change.
BENDS = (4, 8, 16, 32)


@dataclass(frozen=True)
class Point:
    """The median of `steps` like steps: all with `k` draft tokens for each of `requests`, `context` tokens in the KV cache on average."""

    k: int
    requests: int
    context: float
    #: From the end of the step before to its own end.
    seconds: float
    steps: int = 1
    #: Seconds of the parts that the engine timed; `None` where it did not.
    target: float | None = None
    accept: float | None = None
    draft: float | None = None

    @property
    def rest(self) -> float | None:
        """What the timed parts leave."""
        if self.target is None or self.accept is None or self.draft is None:
            return None
        return max(self.seconds - self.target - self.accept - self.draft, 0.0)


def features(k: int, requests: float, context: float, bend: float) -> dict[str, float]:
    """What each coefficient is multiplied by in a step."""
    rows, speculates = requests * (k + 1), float(k > 0)
    return {
        "t0": 1.0,
        "t_row": rows,
        "t_bend": max(rows - bend, 0.0),
        "t_context": rows * context,
        "a0": 1.0,
        "a_row": rows,
        "d0": float(k),
        "d_row": 2.0 * k * requests,
        "d_context": k * requests * context,
        "r0": 1.0,
        "r_request": requests,
        "r_draft": speculates,
    }


def nnls(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """x >= 0 [n] that minimises |matrix x - target|, matrix [m, n]: the active-set method of Lawson & Hanson (1974), algorithm NNLS."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    a = matrix / scale
    n = a.shape[1]
    x, free = np.zeros(n), np.zeros(n, bool)
    tolerance = 1e-10 * max(float(np.abs(a.T @ target).max(initial=0.0)), 1e-300)
    for _ in range(30 * n):
        gradient = a.T @ (target - a @ x)
        gradient[free] = -np.inf
        if free.all() or gradient.max() <= tolerance:
            break
        free[int(gradient.argmax())] = True
        while free.any():
            trial = np.zeros(n)
            trial[free] = np.linalg.lstsq(a[:, free], target, rcond=None)[0]
            low = free & (trial <= 0)
            if not low.any():
                x = trial
                break
            step = np.min(x[low] / (x[low] - trial[low] + 1e-300))
            x = x + step * (trial - x)
            free &= x > 1e-15
            x[~free] = 0.0
    return x / scale


@dataclass(frozen=True)
class Model:
    """Fitted coefficients, seconds each (see `COEFFICIENTS`)."""

    coefficients: Mapping[str, float]
    #: Whether each part was fitted to its own times; else only sums mean something.
    timed: bool
    #: Points that it was fitted to, and the largest batch, K and context among them.
    points: int = 0
    most: tuple[int, int, float] = field(default=(0, 0, 0.0))
    #: Rows beyond which `t_bend` counts.
    bend: int = BENDS[0]

    def parts(self, k: int, requests: float, context: float) -> dict[str, float]:
        """Seconds of each part of a step."""
        found = dict.fromkeys(PARTS, 0.0)
        for name, value in features(k, requests, context, self.bend).items():
            found[COEFFICIENTS[name][0]] += self.coefficients.get(name, 0.0) * value
        return found

    def step(self, k: int, requests: float, context: float) -> float:
        """Seconds of a step: `k` draft tokens for each of `requests` requests with `context` tokens each."""
        return sum(self.parts(k, requests, context).values())

    def attention(self, k: int, requests: float, context: float) -> float:
        """Seconds of the target's pass that grow with the context."""
        return self.coefficients.get("t_context", 0.0) * features(k, requests, context, self.bend)["t_context"]

    def break_even(self, k: int, requests: float, context: float) -> float | None:
        """The mean acceptance length (bonus included) at which a step with a draft is as fast, a token, as a baseline step. None where too
        few baselines were measured to tell: the fit then may leave a baseline step of another batch without any cost."""
        base = self.step(0, requests, context)
        return self.step(k, requests, context) / base if base > 0 else None

    def speedup(self, k: int, requests: float, context: float, tau: float) -> float | None:
        """Speed with `k` draft tokens over the baseline's, decode only, at `tau` tokens a step and request; never above `tau`. None where
        the break-even is unknown."""
        if not k:
            return 1.0
        even = self.break_even(k, requests, context)
        return None if even is None else tau / max(even, 1.0)


def fit(points: Sequence[Point]) -> Model:
    """The model of `points`; needs a baseline and at least one K among them. Raises `ValueError` for fewer."""
    if not any(point.k == 0 for point in points) or not any(point.k for point in points):
        raise ValueError("a fit needs steps of the baseline and steps with a draft")
    timed = all(point.rest is not None for point in points)
    names = tuple(COEFFICIENTS) if timed else WHOLE
    solved = min((_solve(points, names, timed, bend) for bend in BENDS), key=lambda one: one[0])
    most = (max(p.requests for p in points), max(p.k for p in points), max(p.context for p in points))
    return Model(dict(zip(names, map(float, solved[1]), strict=True)), timed, len(points), most, solved[2])


def _solve(points: Sequence[Point], names: Sequence[str], timed: bool, bend: int) -> tuple[float, np.ndarray, int]:
    """The sum of squared relative errors, the coefficients in the order of `names`, and the bend."""
    rows, values = [], []
    for point in points:
        found = features(point.k, point.requests, point.context, bend)
        wanted: Iterable[tuple[str | None, float | None]] = ((part, getattr(point, part)) for part in PARTS)
        for part, seconds in wanted if timed else [(None, point.seconds)]:
            assert seconds is not None
            rows.append([found[name] / point.seconds if part in (None, COEFFICIENTS[name][0]) else 0.0 for name in names])
            values.append(seconds / point.seconds)
    matrix, wanted_values = np.array(rows), np.array(values)
    solved = nnls(matrix, wanted_values)
    return float(np.sum((matrix @ solved - wanted_values) ** 2)), solved, bend


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens a step yields when each draft token is accepted with probability `alpha`: Leviathan et al. 2023, equation 1."""
    return float(k + 1) if alpha >= 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def acceptance_for(tau: float, k: int) -> float | None:
    """The probability at which `expected_tokens` is `tau`; None where no probability gives so many (or so few)."""
    if not 1 <= tau <= k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, k) < tau else (low, middle)
    return (low + high) / 2


def errors(model: Model, points: Sequence[Point]) -> dict[str, Any] | None:
    """How far the model is from `points` in the time of a step: median and largest relative error, and the mean one with its sign."""
    if not points:
        return None
    off = np.array([model.step(p.k, p.requests, p.context) / p.seconds - 1 for p in points])
    return {"points": len(points), "median": float(np.median(np.abs(off))), "worst": float(np.abs(off).max()), "bias": float(off.mean())}


@dataclass(frozen=True)
class Choice:
    """The K that the model likes best for a batch size, its speed-up over the baseline, and that of every other K."""

    requests: int
    k: int
    speedup: float
    by_k: Mapping[int, float]


def choose(model: Model, tau: Mapping[int, float], batches: Sequence[int], context: float, *, least: int = 1) -> list[Choice]:
    """The best K of at least `least` for each batch size; `tau[k]` is the tokens a step with k draft tokens. A batch size whose baseline
    the model does not know is left out.

    With `least` 0 a batch may also go without a draft. That is no baseline step: vLLM then still runs one draft pass a step, which keeps
    the draft's KV cache in step with the target's.
    """
    offered = {k: value for k, value in sorted(tau.items()) if k >= max(least, 1)}
    if not offered and least:
        raise ValueError("no K to choose from")
    found = []
    for requests in batches:
        base = model.step(0, requests, context)
        if base <= 0:
            continue
        by_k = {k: speedup for k, value in offered.items() if (speedup := model.speedup(k, requests, context, value)) is not None}
        if least == 0:
            by_k = {0: base / (base + model.parts(1, requests, context)["draft"]), **by_k}
        k = max(by_k, key=lambda one: by_k[one])
        found.append(Choice(requests, k, by_k[k], by_k))
    return found


def schedule(choices: Sequence[Choice], largest: int) -> list[list[int]]:
    """The choices as vLLM's `num_speculative_tokens_per_batch_size`: `[first, last, K]`, from batch size 1 to `largest` without a gap.

    A batch size between two of the choices takes the smaller one's K; those below the first and beyond the
    last take the nearest one's.
    """
    ordered = sorted(choices, key=lambda one: one.requests)
    ranges: list[list[int]] = []
    for place, one in enumerate(ordered):
        first = 1 if place == 0 else one.requests
        last = ordered[place + 1].requests - 1 if place + 1 < len(ordered) else max(largest, one.requests)
        if ranges and ranges[-1][2] == one.k:
            ranges[-1][1] = last
        else:
            ranges.append([first, last, one.k])
    return ranges
