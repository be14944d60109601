"""A sweep's results as a table of text, and as one HTML file with the charts.

What differs between the rows is said below the table; published numbers carry their label and caveats wherever they appear.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from lab.bench import charts, overlay, result
from lab.bench.published import Published
from lab.plots import figure

HEADER = [
    "lane",
    "lengths",
    "conc.",
    "seeds",
    "tok/s",
    "speed-up [seeds]",
    "TPOT ms p50 / p99",
    "TTFT ms p50 / p99",
    "acceptance",
    "no loops",
]
NOTE = (
    "tok/s: output tokens per second and GPU (a machine without one counts as one GPU). Speed-up: over the baseline, with several "
    "seeds with the 95% bootstrap interval over them; few make it too narrow, and two give just their two values. TPOT and TTFT: median "
    "and 99th percentile. Acceptance: mean acceptance length with the bonus token; no loops: without steps that repeat an 8-gram (the same "
    "prompts, traced)."
)


def _pair(spots: Sequence[overlay.Spot], conc: int) -> str:
    spot = next((one for one in spots if one.concurrency == conc), None)
    if spot is None:
        return "-"
    return f"{spot.y:.1f} / {spot.high:.1f}" if spot.high is not None else f"{spot.y:.1f}"


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{sum(known) / len(known):.2f}" if known else "-"


def fresh_length(row: overlay.Row) -> float | None:
    """Mean acceptance length without repeated 8-grams, where a traced companion measured it."""
    found = (overlay.own(row, "without_loops") or {}).get("without_repeated_8grams", {}).get("mean_acceptance_length")
    return float(found["value"]) if found else None


def lines(rows: Sequence[overlay.Row], published: Sequence[Published] = ()) -> list[list[str]]:
    """A line of text a group and concurrency, as `HEADER` names the columns."""
    return [words for _, _, words in marked(rows, published)]


def marked(rows: Sequence[overlay.Row], published: Sequence[Published] = ()) -> list[tuple[str, str, list[str]]]:
    """The same with each line's draft and the sign that stands for its marker in the charts."""
    every = [*overlay.groups(rows), *(group for table in published for group in overlay.published_groups(table))]
    found: list[tuple[str, str, list[str]]] = []
    for group, (_, sign) in zip(every, charts.signs(every), strict=True):
        base = overlay.baseline_of(group, every)
        faster = {} if base is None or group.kind == "none" else {one.concurrency: one for one in overlay.speed_up(group, base)}
        speeds = {one.concurrency: one for one in overlay.throughput(group)}
        tpot, ttft = overlay.latency(group, "tpot"), overlay.latency(group, "ttft")
        for conc, cells in group.rows.items():
            gain = faster.get(conc)
            span = f" [{gain.low:.2f}, {gain.high:.2f}]" if gain and gain.low is not None and gain.high is not None else ""
            words = [
                group.label,
                overlay.workload(cells[0]),
                str(conc),
                str(len(cells)) if group.printed is None else "-",
                f"{speeds[conc].y:.1f}" if conc in speeds else "-",
                f"{gain.y:.2f}x{span}" if gain else "-",
                _pair(tpot, conc),
                _pair(ttft, conc),
                _mean([overlay.number(row, "eagle3_lab_mean_acceptance_length") for row in cells]),
                _mean([fresh_length(row) for row in cells]),
            ]
            found.append((group.kind, sign, words))
    return found


def warnings(rows: Sequence[overlay.Row], published: Sequence[Published] = ()) -> list[str]:
    """What a reader must know before comparing: differences, token counts that disagree, caveats of what was published."""
    found = [f"Not alike: {one}." for one in overlay.differences(rows, published)]
    for row in rows:
        tokens = overlay.own(row, "tokens") or {}
        if tokens and not tokens.get("agree", True):
            found.append(f"Tokens of {overlay.own(row, 'label')}, concurrency {row['conc']}: {tokens['said']}")
    for table in published:
        found += [f"{table.title}, {table.label}: {caveat}" for caveat in table.caveats]
    return found


def render(rows: Sequence[overlay.Row], published: Sequence[Published] = ()) -> str:
    """Everything as text for a terminal."""
    if not rows and not published:
        return "Nothing was measured."
    return "\n".join([result.table(HEADER, lines(rows, published)), "", *notes(rows, published)])


def notes(rows: Sequence[overlay.Row], published: Sequence[Published] = ()) -> list[str]:
    """What stands below the table: what its columns mean, what differs between the rows, and where published numbers come from."""
    sources = [f"{table.label}: {source.title}, {source.url}" for table in published for source in table.sources[:1]]
    return [NOTE, *warnings(rows, published), *sources]


def drawn(rows: Sequence[dict[str, Any]], published: Sequence[Published] = (), *, script: bool = True) -> str:
    """The charts as HTML; without `script` the page has to bring plotly's (`lab.plots.script`)."""
    config = {"displaylogo": False, "modeBarButtonsToRemove": ["sendChartToCloud"]}
    parts: list[str] = []
    for title, chart in charts.panels(rows, published):
        plot = figure(chart).to_html(full_html=False, include_plotlyjs=script and not parts, config=config, default_height="420px")
        parts.append(f"<h2>{html.escape(title)}</h2>{plot}")
    return "".join(parts)


def page(rows: Sequence[dict[str, Any]], published: Sequence[Published] = ()) -> str:
    """The charts and the table as one HTML file that needs nothing from elsewhere, and sends nothing there."""
    table = html.escape(result.table(HEADER, lines(rows, published)))
    listed = "".join(f"<li>{html.escape(one)}</li>" for one in notes(rows, published))
    style = "body { font-family: sans-serif; max-width: 1100px; margin: 1em auto; } pre { overflow-x: auto; }"
    head = f'<!doctype html><meta charset="utf-8"><title>Eagle3 Lab: sweep</title><style>{style}</style>'
    return f"{head}<pre>{table}</pre><ul>{listed}</ul>{drawn(rows, published)}"
