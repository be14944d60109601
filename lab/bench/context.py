"""Why the gain shrinks with the context: verification's share of a step, measured at growing context lengths.

A step of a drafting engine is the target's pass over K + 1 tokens a request (verify), acceptance, and the draft's K passes (draft). The
context enters through attention: the target reads the whole KV cache of each of its layers, the draft that of its one. So with a longer
context verification grows by more than drafting does, while the tokens that a step yields stay about the same: each accepted token pays
for a dearer verification. The share is verify / (verify + draft), the sum over all steps of both, as the published figures mean it. How
large it is at short contexts depends on what else the two do: a target with many small layers spends most of a step on them.

Measured from the plugin's clocks in a traced lane (`lab.vllm_plugin.timing`, CPU only), with prompts of exactly the length asked for, made
of the lab's long prompts; the interval is a bootstrap over prompts. The baseline's own decode step is measured in the same way and gives
the most that the draft could gain there: tokens a step yields x baseline step / drafting step.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab.bench import result
from lab.bench.prompts import Prompt
from lab.bench.scoring import Asker, in_flight
from lab.bench.steps import follow
from lab.errors import LabError
from lab.trace.model import Step
from lab.trace.stats import expanded

Say = Callable[[str], None]
RESAMPLES = 4000


@dataclass(frozen=True)
class PublishedShare:
    """One published figure: input tokens, verification's share of draft-plus-verify time, and milliseconds of it per accepted token."""

    context: int
    share: float
    verify_ms: float


#: As AMD published them for Kimi-K2.5 with Eagle3 on the MI355X (ROCm blog, 3 July 2026; sources in `assets/published`). Not measured here.
PUBLISHED = (PublishedShare(1024, 0.14, 0.30), PublishedShare(8192, 0.59, 2.56))
PUBLISHED_LABEL = "published by AMD, MI355X"


@dataclass(frozen=True)
class Plan:
    """Context lengths in prompt tokens, prompts at each, and new tokens; `most` is the engine's context."""

    contexts: tuple[int, ...]
    most: int
    repeats: int = 3
    max_tokens: int = 48
    concurrency: int = 1

    def __post_init__(self) -> None:
        if not self.contexts or min(self.contexts) < 16 or len(set(self.contexts)) < len(self.contexts):
            raise LabError("Context lengths must be different numbers of at least 16 tokens.")
        if self.max_tokens < 8:
            raise LabError("An answer needs at least 8 tokens.", why="The first steps of each are left out.")
        if (longest := max(self.contexts) + self.max_tokens) > self.most:
            raise LabError(
                f"A context of {max(self.contexts)} tokens and {self.max_tokens} new ones do not fit.",
                why=f"Together they are {longest}, and this engine's context is {self.most}.",
                todo=f"Choose at most {self.most - self.max_tokens}.",
            )


def cut(texts: Sequence[Sequence[int]], length: int, number: int) -> list[int]:
    """Prompt ids of exactly `length` tokens: the texts one after another from text `number` on, as often as needed."""
    found: list[int] = []
    place = number
    while len(found) < length:
        if not texts[place % len(texts)]:
            raise ValueError("an empty text")
        found += texts[place % len(texts)]
        place += 1
    return found[:length]


async def measure(asker: Asker, plan: Plan, prompts: Sequence[Prompt], say: Say) -> dict[int, list[list[Step]]]:
    """Steps of each prompt, by context length. Raises `LabError` where the engine does not say where a step's time goes."""
    texts = [await asker.tokens(prompt.text) for prompt in prompts]
    found: dict[int, list[list[Step]]] = {}

    async def one(ids: list[int]) -> list[Step]:
        trace = uuid.uuid4().hex
        async with follow(asker.endpoint, trace) as steps:
            await asker.complete(ids, max_tokens=plan.max_tokens, ignore_eos=True, trace=trace)
        return steps

    say("Warming up")
    await one(cut(texts, min(plan.contexts), 0))
    for length in sorted(plan.contexts):
        say(f"Context of {length} tokens: {plan.repeats} prompts")
        asked = [cut(texts, length, number) for number in range(plan.repeats)]
        found[length] = await in_flight(one, asked, plan.concurrency)
        if any(step.verify_s is None for steps in found[length] for step in steps):
            raise LabError(
                "This engine does not say where a step's time goes.",
                why="The plugin times the parts of a step on CPUs, with the releases of vLLM that it knows; see the server's log.",
            )
    return found


def _decode(steps: Sequence[Step], drafting: bool) -> list[Step]:
    """The steps that count: whole decode steps with a draft (or without one in the baseline), but for the first and the last."""
    kept = [step for step in steps if step.phase == "decode" and step.sampled and bool(step.draft) == drafting and step.finish is None]
    return kept[1:]


def summarise(
    found: Mapping[int, Sequence[Sequence[Step]]], base: Mapping[int, Sequence[Sequence[Step]]] | None, *, seed: int = 0
) -> list[dict[str, Any]]:
    """A row for each context length; times are medians over steps, in seconds."""
    rows = []
    for length, answers in sorted(found.items()):
        kept = [steps for answer in answers if (steps := _decode(answer, True))]
        if not kept:
            raise LabError(f"No step with a draft was seen at a context of {length} tokens.")
        sums = np.array([[sum(step.verify_s or 0.0 for step in steps), sum(step.draft_s or 0.0 for step in steps)] for steps in kept])
        steps = [step for one in kept for step in one]
        tokens = sum(step.accepted + 1 for step in steps)
        row: dict[str, Any] = {
            "context": length,
            "prompts": len(kept),
            "steps": len(steps),
            "share": float(sums[:, 0].sum() / sums.sum()),
            "share_interval": _interval(sums, seed),
            "verify_s": float(np.median([step.verify_s for step in steps])),
            "draft_s": float(np.median([step.draft_s for step in steps])),
            "accept_s": float(np.median([step.accept_s for step in steps])),
            "step_s": float(np.median([step.ended - step.started for step in steps])),
            "mean_acceptance_length": tokens / len(steps),
            "verify_s_per_token": float(sums[:, 0].sum() / tokens),
        }
        if base is not None:
            plain = [step for answer in base[length] for step in _decode(answer, False)]
            if not plain:
                raise LabError(f"No step of the baseline was seen at a context of {length} tokens.")
            row["baseline_step_s"] = float(np.median([step.ended - step.started for step in plain]))
            row["baseline_target_s"] = float(np.median([step.verify_s for step in plain]))
            row["gain"] = row["mean_acceptance_length"] * row["baseline_step_s"] / row["step_s"]
        rows.append(row)
    return rows


def _interval(sums: np.ndarray, seed: int) -> tuple[float, float] | None:
    """95% bootstrap over prompts of the pooled share; `sums` [prompts, 2] holds seconds of verification and of drafting."""
    if len(sums) < 2:
        return None
    drawn = sums[np.random.default_rng(seed).integers(len(sums), size=(RESAMPLES, len(sums)))].sum(1)
    return expanded(drawn[:, 0] / drawn.sum(1), len(sums))


#: Why the gain shrinks, without numbers of one's own.
WHY = (
    "The target reads the KV cache of all its layers for every verification, the draft that of its one layer, so what grows with the "
    "context is mostly verification, and an accepted token pays for it. The published figures belong to another target, draft and machine: "
    "compare the direction with them, not the level."
)


def explain(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the rows say, in sentences: growth of both parts, the share, the gain, and how this differs from the published machine."""
    first, last = rows[0], rows[-1]
    text = (
        f"From {first['context']:,} to {last['context']:,} tokens of context a verification takes {1000 * first['verify_s']:.1f} to "
        f"{1000 * last['verify_s']:.1f} ms and the drafting for it {1000 * first['draft_s']:.1f} to {1000 * last['draft_s']:.1f} ms, so "
        f"verification's share goes from {first['share']:.0%} to {last['share']:.0%}."
    )
    if "gain" in first:
        text += (
            f" A step yields {first['mean_acceptance_length']:.2f} tokens there and {last['mean_acceptance_length']:.2f} here; over the "
            f"baseline's own step that is {first['gain']:.2f}x and {last['gain']:.2f}x."
        )
    return f"{text} {WHY}"


def latest(lane: str, folders: Sequence[Path]) -> dict[str, Any] | None:
    """The newest result file of `lane` (its key) in `folders`, as it was saved; files that are not whole count for nothing."""
    found: list[tuple[str, dict[str, Any]]] = []
    for path in (path for folder in folders if folder.is_dir() for path in folder.glob("*context*.json")):
        try:
            body = json.loads(path.read_bytes())
            if body["format"] == "eagle3-lab-context" and body["version"] == result.VERSION and body["lane"] == lane and body["rows"]:
                explain(body["rows"])
                found.append((str(body["provenance"]["made"]), body))
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            continue
    return max(found, key=lambda one: one[0], default=("", None))[1]


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a table for a terminal, the published figures under it."""
    cells = []
    for row in rows:
        low, high = row["share_interval"] or (None, None)
        span = f" [{low:.1%}, {high:.1%}]" if low is not None else ""
        times = [f"{1000 * row[key]:.1f}" for key in ("verify_s", "draft_s", "accept_s", "step_s")]
        base = [f"{1000 * row['baseline_step_s']:.1f}", f"{row['gain']:.2f}x"] if "gain" in row else ["-", "-"]
        cells.append([f"{row['context']:,}", f"{row['share']:.1%}{span}", *times, f"{row['mean_acceptance_length']:.2f}", *base])
    header = [
        "context",
        "verify / (verify + draft) [95%]",
        "verify ms",
        "draft ms",
        "accept ms",
        "step ms",
        "tokens a step",
        "base step",
        "gain",
    ]
    said = "; ".join(f"{one.share:.0%} at {one.context:,} ({one.verify_ms:.2f} ms per accepted token)" for one in PUBLISHED)
    return f"{result.table(header, cells)}\n\nFor comparison, {PUBLISHED_LABEL}: {said}. Not measured here.\n\n{explain(rows)}"
