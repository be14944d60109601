"""What the proof's tab shows, without gradio: a certificate as a verdict, a table and the places where answers part; and the badge.

The badge exists only where a whole certificate lies in the cache for exactly the lane that the prompt bar would run now
(`lab.bench.certificate.find`); everywhere else its place says, in plain words and without a mark, that nothing was verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lab.bench import context
from lab.bench.certificate import Certificate, find
from lab.bench.divergence import nats
from lab.env import cache_dir
from lab.plots import Curve, curves
from lab.serving.command import Lane
from lab.trace.render import visible
from lab.ui.components.charts import Panels
from lab.ui.feed import dump

#: Differences that are listed; the certificate holds all of them.
SHOWN = 40
HEADER = ["greedy", "at a time", "identical", "near-ties", "real differences", "tokens judged", "largest regret, nats"]


def badge(lane: Lane) -> str:
    """Value of the badge for the lane that the next run would use. Reads and hashes weights: call it in a thread."""
    if lane.draft == "none":
        return dump({"kind": "none", "words": "", "detail": ""})
    hash_, found = find(lane)
    if found is not None:
        return dump({**found.badge(), "label": lane.label})
    absent = "a server elsewhere, whose configuration is not known here" if lane.at is not None else "its weights are not here yet"
    why = absent if hash_ is None else "no certificate for exactly this recipe, these weights and versions"
    return dump({"kind": "absent", "words": "not verified", "detail": f"{lane.label}: {why}", "label": lane.label})


def _row(name: str, run: Mapping[str, Any], at_once: str) -> list[str]:
    counts = [str(run[key]) for key in ("identical", "near_ties", "real_differences", "tokens")]
    return [name, at_once, *counts, f"{run['worst_regret']:.4f}"]


def _differences(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    shown = []
    for run in found["runs"]:
        for one in run["answers"]:
            if one["verdict"] == "identical":
                continue
            entry = {
                "prompt": one["prompt"],
                "at_once": run["concurrency"],
                "verdict": one["verdict"],
                "said": one["verdict"],
                "where": "",
                "ours": [],
                "theirs": [],
            }
            if one["ours"] is not None:
                entry |= {
                    "where": f"token {one['at'] + 1}",
                    "theirs": list(visible(one["theirs"][0], spaces=True)),
                    "ours": list(visible(one["ours"][0], spaces=True)),
                    "margin": f"{one['margin']:.4f}",
                }
            if one["verdict"] == "real difference" and one["worst_at"] is not None:
                entry["said"] += f": {nats(one['worst'])} nats at token {one['worst_at'] + 1}"
            shown.append(entry)
    return sorted(shown, key=lambda one: one["verdict"] != "real difference")[:SHOWN]


def _sampling(one: Mapping[str, Any]) -> list[str]:
    """A name, a value and an explanation: one tile for a temperature."""
    reach = one["detectable"]["80%"], one["detectable"]["95%"]
    power = (
        f"A distribution off by a total variation of {reach[0]:.3f} would have been found with 80%, of {reach[1]:.3f} with 95%."
        if reach[0] and reach[1]
        else "The sample is too small to state what would have been found."
    )
    p = one["least_p_adjusted"]
    why = (
        f"{one['tokens']:,} tokens behind the first of each answer, {len(one['prompts'])} prompts, sorted by what came before; chi-squared"
        f" against the target's own probabilities, {one['correction']}-corrected, fails below p = {one['alpha']:g}. {power}"
    )
    return [f"p, temperature {one['temperature']:g}", "–" if p is None else f"{p:.2g}", why, _kind(one["verdict"] == "consistent")]


def _kind(good: bool) -> str:
    return "same" if good else "different"


def measured(lane: Lane) -> list[dict[str, Any]]:
    """The newest rows that were measured for `lane` at growing contexts on this machine; none where there are none."""
    found = context.latest(lane.key, [cache_dir() / "results"])
    return list(found["rows"]) if found else []


def value(certificate: Certificate | None, lane: Lane | None = None, rows: Sequence[Mapping[str, Any]] = ()) -> str:
    """Value of the proof's element; without a certificate it says how to get one. `rows`: what was measured at growing contexts."""
    why = f"Why the gain shrinks with the context: {context.explain(rows) if rows else context.WHY}"
    if certificate is None:
        label = lane.label if lane is not None and lane.draft != "none" else "a draft's lane"
        return dump(
            {"empty": f"Nothing was verified for {label}. “Verify this lane” asks it and the baseline the same prompts.", "why": why}
        )
    body, found = certificate.body, certificate.body["greedy"]
    first = found["runs"][0]["concurrency"]
    table = [_row("baseline against itself", run, f"{run['concurrency']} / {first}") for run in found["baseline_itself"]]
    table += [_row(str(body["label"]), run, str(run["concurrency"])) for run in found["runs"]]
    identical, judged = sum(run["identical"] for run in found["runs"]), found["prompts"] * len(found["runs"])
    tiles = [
        [
            "verdict",
            certificate.badge()["words"],
            f"Certificate {certificate.hash[:16]}, made {certificate.made} UTC",
            certificate.badge()["kind"],
        ],
        [
            "greedy answers identical",
            f"{identical} of {judged}",
            "The others part at a near-tie, or are listed as real differences below.",
            "",
        ],
        [
            "threshold, nats",
            nats(found["threshold_nats"]),
            f"How far the baseline's own margins move between batch shapes at the most: {found['noise']['positions']:,} readings of its"
            f" answers, decoding alone, decoding in a batch, scoring in one pass; 99% of them by less than {nats(found['noise']['p99'])}.",
            "",
        ],
        *(_sampling(one) for one in body["sampling"]),
    ]
    drafting = body["drafting"]
    seen = drafting.get("seen")
    notes = [
        *body["reasons"],
        "A regret is how far below the best candidate a token lies when the target scores it. Every token of every answer is judged.",
        f"Draft tokens are {drafting['way']}"
        + (f": the same one in {seen['equal']} of {seen['compared']} sampled answers with the same beginning." if seen else "."),
    ]
    return dump(
        {
            "label": body["label"],
            "tiles": tiles,
            "header": HEADER,
            "rows": table,
            "notes": notes,
            "differences": _differences(found),
            "why": why,
        }
    )


def context_panels(rows: Sequence[Mapping[str, Any]]) -> Panels:
    """Verification's share against the context beside the published one, and the milliseconds behind it."""
    lengths = tuple(float(row["context"]) for row in rows)
    spans = [row["share_interval"] or (None, None) for row in rows]
    published = context.PUBLISHED
    lines = [
        Curve(
            "measured here",
            "bf16",
            lengths,
            tuple(100 * row["share"] for row in rows),
            low=tuple(None if low is None else 100 * low for low, _ in spans),
            high=tuple(None if high is None else 100 * high for _, high in spans),
        ),
        Curve(
            context.PUBLISHED_LABEL,
            "other",
            tuple(float(one.context) for one in published),
            tuple(100 * one.share for one in published),
            published=True,
        ),
    ]
    times = [
        Curve("verify", "bf16", lengths, tuple(1000 * row["verify_s"] for row in rows)),
        Curve("draft", "other", lengths, tuple(1000 * row["draft_s"] for row in rows)),
    ]
    if rows and all("baseline_step_s" in row for row in rows):
        times.append(Curve("a baseline step", "none", lengths, tuple(1000 * row["baseline_step_s"] for row in rows)))
    share = curves(
        lines if rows else lines[1:], x="tokens of context", y="verify / (verify + draft), %", theme="page", digits=0, empty="not measured"
    )
    share["layout"]["yaxis"]["range"] = [0, 105]
    return (
        ("Verification's share of draft-plus-verify time", share),
        (
            "What a step spends, ms (measured here)",
            curves(times if rows else [], x="tokens of context", y="ms", theme="page", digits=1, empty="appears when it is measured"),
        ),
    )
