"""The charts of a sweep: which numbers of which results go on which axis. `lab.plots` draws them.

Each can have published points beside it; those are drawn with open markers, and their label says who published them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lab.bench import overlay
from lab.bench.overlay import Group, Row, Spot
from lab.bench.published import Published
from lab.plots import Chart, Curve, Theme, curves, markers


def signs(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Marker and sign of each group's line, the same in every chart and in the table."""
    return markers([(group.kind, group.printed is not None) for group in groups])


def _curve(group: Group, spots: Sequence[Spot], symbol: str, unit: str = "") -> Curve:
    notes = []
    for spot in spots:
        seeds = "" if group.printed is not None else f", {spot.seeds} seed{'s' if spot.seeds > 1 else ''}"
        span = f" [{spot.low:.2f}, {spot.high:.2f}]" if spot.low is not None and spot.high is not None and not unit else ""
        tail = f", p99 {spot.high:.0f} {unit}" if unit and spot.high is not None else ""
        notes.append(f"{span}{tail}, concurrency {spot.concurrency}{seeds}")
    return Curve(
        group.label,
        group.kind,
        tuple(spot.x for spot in spots),
        tuple(spot.y for spot in spots),
        tuple(spot.low for spot in spots),
        tuple(spot.high for spot in spots),
        tuple(notes),
        group.printed is not None,
        symbol,
    )


def panels(
    rows: Iterable[Row], published: Sequence[Published] = (), *, theme: Theme = "light", legend: bool = True
) -> list[tuple[str, Chart]]:
    """Title and chart: speed-up, throughput, TPOT, TTFT, and interactivity against throughput."""
    rows = list(rows)
    measured = overlay.groups(rows)
    every = [*measured, *(group for table in published for group in overlay.published_groups(table))]
    symbols = {id(group): symbol for group, (symbol, _) in zip(every, signs(every), strict=True)}
    ticks = sorted({conc for group in every for conc in group.rows})
    machines = any(overlay.own(row, "on") == "machine" for row in rows)
    gpus = bool(published) or any(overlay.own(row, "on") != "machine" for row in rows)
    per = "GPU (machine)" if machines == gpus else "machine" if machines else "GPU"

    def over(y: str, points: Callable[[Group], list[Spot]], lines: Sequence[Group], **how: object) -> Chart:
        unit = "ms" if "ms" in y else ""
        drawn = [_curve(group, found, symbols[id(group)], unit) for group in lines if (found := points(group))]
        return curves(drawn, x="concurrency", y=y, theme=theme, ticks=ticks, legend=legend, **how)  # type: ignore[arg-type]

    faster = [(group, base) for group in every if group.kind != "none" and (base := overlay.baseline_of(group, every))]
    bases = {id(group): base for group, base in faster}
    two = [_curve(group, found, symbols[id(group)]) for group in every if (found := overlay.interactivity(group))]
    why = "appears with a draft and its baseline"
    return [
        (
            "Speed-up over no speculation",
            over("speed-up", lambda g: overlay.speed_up(g, bases[id(g)]), [g for g, _ in faster], one=True, empty=why),
        ),
        (f"Output tok/s per {per}", over("output tok/s", overlay.throughput, every, digits=1)),
        (
            "Time per output token: median, bar to p99",
            over("TPOT, ms", lambda g: overlay.latency(g, "tpot"), every, digits=1),
        ),
        (
            "Time to first token: median, bar to p99",
            over("TTFT, ms", lambda g: overlay.latency(g, "ttft"), every, digits=0),
        ),
        (
            f"Interactivity against tok/s per {per}",
            curves(two, x="tok/s per user (1000 / TPOT in ms)", y="output tok/s", theme=theme, legend=legend, digits=1),
        ),
    ]
