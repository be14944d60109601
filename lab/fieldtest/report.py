"""The report of a field test: one HTML page that needs nothing from elsewhere, made from the files in the folder and nothing else.

It can be made at any time, also of a test that stopped half-way: what is missing is said in its place. Numbers of measured lanes and of
traced variants never share a table; published numbers carry their label. Text from files is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lab.bench import agg, overlay, sweep_table
from lab.bench.published import Published
from lab.env import assets
from lab.errors import LabError
from lab.fieldtest import compare
from lab.fieldtest.archive import SCRIPT
from lab.fieldtest.run import EARLIER, Test
from lab.trace import io
from lab.trace.html import request_html, said

STYLE = """
body { font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; max-width: 1120px; margin: 1.5em auto; padding: 0 1em; color: #1b2430; }
body { background: #fff; } h1 { line-height: 1.2; } h2 { margin-top: 1.8em; border-bottom: 1px solid #d9dee5; }
pre { overflow: auto; max-height: 30em; background: #f6f7f9; padding: .7em; font-size: 13px; }
table { border-collapse: collapse; margin: .7em 0; display: block; overflow-x: auto; }
th, td { padding: .25em .8em .25em 0; border-bottom: 1px solid #d9dee5; text-align: left; vertical-align: top; }
th { color: #5a6472; font-weight: 600; } td.n { text-align: right; font-variant-numeric: tabular-nums; } .quiet { color: #5a6472; }
.bad, .good { white-space: nowrap; }
.bad { color: #9e3d00; font-weight: 600; } .good { color: #00694b; font-weight: 600; } .published { background: #f6f7f9; }
"""
SIGNS = {"done": "✓ done", "failed": "✕ failed", "skipped": "– skipped", "stopped": "■ stopped", "running": "… ended while it ran"}


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = (), published: Sequence[int] = ()) -> str:
    """A table; cells are HTML already. `numbers` are columns to the right, `published` those that others measured."""

    def cell(place: int, text: str, tag: str = "td") -> str:
        names = " ".join(name for name, places in (("n", numbers), ("published", published)) if place in places)
        return f'<{tag} class="{names}">{text}</{tag}>' if names else f"<{tag}>{text}</{tag}>"

    head = "".join(cell(place, html.escape(name), "th") for place, name in enumerate(header))
    body = "".join(f"<tr>{''.join(cell(place, text) for place, text in enumerate(row))}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _listed(lines: Iterable[str]) -> str:
    found = "".join(f"<li>{said(line)}</li>" for line in lines)
    return f"<ul>{found}</ul>" if found else ""


def _quiet(text: str) -> str:
    return f'<p class="quiet">{said(text)}</p>'


def _json(path: Path) -> dict[str, Any]:
    """A file of the test, {} where it is not there or not whole."""
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.MsgspecError):
        return {}
    return found if isinstance(found, dict) else {}


def _span(low: float | None, high: float | None, digits: int = 2) -> str:
    return "" if low is None or high is None else f" [{low:.{digits}f}, {high:.{digits}f}]"


def results(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The measured cells, each once, and a sentence for each file that cannot be read, and on cells that were measured anew."""
    if not any(folder.glob("sweep/agg_*.json")):
        return [], []
    try:
        rows, errors = agg.load([folder / "sweep"])
    except LabError as error:
        return [], [str(error)]
    newest = dict[Any, dict[str, Any]]()
    for row in sorted(rows, key=lambda row: str(overlay.own(row, "began") or "")):
        newest[overlay.own(row, "lane"), overlay.own(row, "draft"), overlay.workload(row), row["conc"], overlay.own(row, "seed")] = row
    last = {id(row) for row in newest.values()}
    kept = [row for row in rows if id(row) in last]
    anew = [f"{len(rows) - len(kept)} earlier measurements of cells that were measured anew are left out."] if len(kept) < len(rows) else []
    return kept, [*(str(error) for error in errors), *anew]


def build(test: Test, table: Published | None) -> str:
    """The page, with `archive.SCRIPT` where plotly's script belongs."""
    rows, broken = results(test.folder)
    parts = [
        _head(test),
        f"<h2>Stages</h2>{_stages(test)}",
        f"<h2>Doctor</h2>{_doctor(test)}",
        f"<h2>Lanes</h2>{_lanes(test)}",
        f"<h2>Losslessness</h2>{_lossless(test)}",
        f"<h2>Sweep</h2>{_sweep(rows, broken)}",
        f"<h2>FP8 against BF16</h2>{_drafts(test, rows)}" if {"bf16", "fp8"} <= {*test.settings.drafts} else "",
        f"<h2>Against what was published</h2>{_published(test, rows, table)}",
        f"{SCRIPT}<h2>Charts</h2>{sweep_table.drawn(rows, [table] if table else [], script=False)}" if rows else "",
        f"<h2>Traces</h2>{_traces(test)}",
        f"<h2>Files</h2>{_files(test.folder)}",
    ]
    style = STYLE + (assets() / "ui" / "chips.css").read_text(encoding="utf-8")
    title = f"Eagle3 Lab: field test of {test.settings.recipe.name}"
    head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title><style>{style}</style></head>'
    return f"{head}<body>{''.join(parts)}</body></html>"


def _head(test: Test) -> str:
    one, made = test.settings, test.origin
    doctor = (_json(test.folder / "doctor.json").get("reports") or [{}])[0].get("machine", {})
    versions, hardware = made.get("versions", {}), made.get("hardware", {})
    machine = doctor or {"processor": f"{hardware.get('cpu')}, {hardware.get('cores')} cores"}
    facts = [(name, value) for name, value in machine.items()]
    facts += [("versions", ", ".join(f"{name} {value}" for name, value in versions.items()))]
    facts += [("the lab's revision", made.get("revision", "")), ("began", (test.runs or [{}])[0].get("began", ""))]
    facts += [("ended", f"{(test.runs or [{}])[-1].get('ended') or 'not ended'} ({(test.runs or [{}])[-1].get('how', '')})")]
    most = f" (at least {one.least} in all)" if one.least > 1 else ""
    load = (
        f"{one.prompts_per} requests{most} and {one.warm_ups_per} warm-ups for each one in flight, seeds {', '.join(map(str, one.seeds))}"
    )
    facts += [("load", f"random prompts, ISL/OSL {one.workload.name}, {load}")]
    listed = _table(("", ""), [(html.escape(str(name)), said(str(value))) for name, value in facts])
    done = sum(test.is_done(stage) for stage in test.stages)
    rest = len(test.stages) - done
    kind = "good" if not rest else "bad"
    words = f"{done} of {len(test.stages)} stages are done{'.' if not rest else f'; {rest} are not: see below why.'}"
    return f'<h1>Field test: {html.escape(one.recipe.title)}</h1><p class="{kind}">{words}</p>{listed}'


def _stages(test: Test) -> str:
    rows = []
    for stage in test.stages:
        record = test.records.get(stage.name, {"state": "not begun", "reason": "", "seconds": 0.0, "estimate": 0.0})
        state = str(record["state"])
        word = f'<span class="{"good" if state == "done" else "bad"}">{html.escape(SIGNS.get(state, f"– {state}"))}</span>'
        took = f"{record['seconds']:.0f} s" if record["seconds"] else ""
        rows.append((said(stage.title), word, took, said(str(record["reason"]))))
    return _table(("stage", "state", "took", "what came of it"), rows, numbers=(2,))


def _doctor(test: Test) -> str:
    found = _json(test.folder / "doctor.json").get("reports", [])
    running = [_json(path) for path in sorted(test.folder.glob("doctor-running-*.json"))]
    rows = []
    for report in [*found, *running]:
        source = (report.get("examined") or [["", ""]])[0][1]
        for one in report.get("findings", []):
            kind = {"error": "bad"}.get(one["level"], "quiet")
            expected = f" Expected: {one['expected']}." if one.get("expected") else ""
            why = f"{one['reason']}{expected}"
            level = f'<span class="{kind}">{html.escape(one["level"])}</span>'
            rows.append((level, said(source), said(one["title"]), said(one["evidence"]), said(why), said(one["fix"])))
    if not found:
        return _quiet("The doctor did not run.")
    shown = _table(("level", "where", "finding", "seen", "why", "fix"), rows) if rows else "<p>Nothing stands against these lanes.</p>"
    return f"{shown}{_quiet('The whole text is in doctor.txt.')}"


def _lanes(test: Test) -> str:
    rows, commands = [], []
    for path in sorted(test.folder.glob("lanes/*.json")):
        one = _json(path)
        if not one:
            continue
        kind = "measured: as the recipe says, untraced"
        if one["traced"]:
            kind = "traced variant: its speed is not the recipe's" if one["rescheduled"] else "traced variant: for steps, not for speed"
        rows.append((said(one["label"]), kind, str(one["k"] or "–"), f"{one['seconds']:.0f} s", str(one["kv_cache_tokens"] or "not told")))
        commands.append(f"<details><summary>Command: {said(path.stem)}</summary><pre>{html.escape(one['command'])}</pre></details>")
    header = ("lane", "what it is for", "K", "ready after", "tokens in the KV cache")
    return _table(header, rows, numbers=(2, 3, 4)) + "".join(commands) if rows else _quiet("No lane started.")


def _lossless(test: Test) -> str:
    found = []
    for draft in test.settings.drafts:
        path = test.folder / f"lossless-{draft}.txt"
        if draft != "none" and path.is_file():
            found.append(f"<pre>{html.escape(path.read_text(encoding='utf-8', errors='replace'))}</pre>")
        elif draft != "none":
            found.append(_quiet(f"{draft.upper()}: not judged; the stages say why."))
    note = "Greedy answers of the measured lanes. Sampled distributions need two servers at once: eagle3-lab verify checks them."
    return "".join(found) + _quiet(note)


def _sweep(rows: list[dict[str, Any]], broken: Sequence[str]) -> str:
    if not rows:
        return _quiet("Nothing was measured.") + _listed(broken)
    cells = [tuple(said(word) for word in line) for line in sweep_table.lines(rows)]
    shown = _table(sweep_table.HEADER, cells, numbers=range(2, len(sweep_table.HEADER)))
    return shown + _listed([*sweep_table.notes(rows), *broken])


def _drafts(test: Test, rows: list[dict[str, Any]]) -> str:
    lines, notes = list[tuple[str, ...]](), dict[str, None]()
    for load in dict.fromkeys(map(overlay.workload, rows)):
        spots, why = compare.drafts([row for row in rows if overlay.workload(row) == load])
        notes |= dict.fromkeys(why)
        lines += [(said(load), str(spot.concurrency), f"{spot.y:.3f}x{_span(spot.low, spot.high, 3)}", str(spot.seeds)) for spot in spots]
    header = ("lengths", "concurrency", "output tok/s, FP8 over BF16 [over seeds]", "seeds")
    shown = _table(header, lines, numbers=(1, 2, 3)) if lines else ""
    _, sentence = compare.acceptance(test.folder, test.settings.common_k)
    text = "Acceptance on the traced prompts, paired: "
    return (shown or _quiet("Not measured at any concurrency in common.")) + _listed(notes) + f"<p>{said(text + sentence)}</p>"


def reasons(test: Test) -> dict[tuple[str, int], str]:
    """Why a cell (draft, concurrency) of the test's own lengths was not measured, from its stage."""
    found: dict[tuple[str, int], str] = {}
    for stage in test.stages:
        record = test.records.get(stage.name)
        main = stage.workload in (None, test.settings.workload)  # prompts from files were published nowhere
        if stage.kind == "sweep" and main and record is not None and (record["state"] != "done" or "Refused" in record["reason"]):
            for lane in stage.lanes:
                found[lane.draft, stage.concurrency] = f"{record['state']}: {record['reason']}"
    return found


def _published(test: Test, rows: list[dict[str, Any]], table: Published | None) -> str:
    if table is None:
        return _quiet("Nothing was published for this recipe's target that the lab knows of, so there is nothing to compare with.")
    lines = []
    for cell in compare.cells(rows, table, reasons(test)):
        mine = said(cell.why) if cell.measured is None else f"{cell.measured.y:.1f}{_span(cell.measured.low, cell.measured.high, 1)}"
        gain = "–" if cell.speed_up is None else f"{cell.speed_up.y:.2f}x{_span(cell.speed_up.low, cell.speed_up.high)}"
        ratio = "–" if cell.ratio is None else f"{cell.ratio:.3f}"
        printed = "–" if cell.printed is None else f"{cell.printed:.2f}x"
        lines.append((said(cell.label), str(cell.concurrency), f"{cell.published:.1f}", mine, ratio, printed, gain))
    header = (
        "lane",
        "conc.",
        f"tok/s/GPU, {table.label}",
        "measured here",
        "measured / published",
        f"speed-up, {table.label}",
        "speed-up here",
    )
    shown = _table(header, lines, numbers=range(1, 7), published=(2, 5))
    note = f"The shaded columns are {table.label}; the lab did not measure them. A ratio is given only where ISL and OSL are the same."
    sources = [f"{table.label}: {one.title}, {one.url} ({one.what})" for one in table.sources]
    apart = compare.differs(rows, table)
    return (
        f"{_quiet(note)}{shown}<h3>What differs</h3>{_listed(apart) or _quiet('Nothing was measured, so nothing can be said.')}"
        f"<h3>Caveats of the published table</h3>{_listed(table.caveats)}{_listed(sources)}"
    )


def _traces(test: Test) -> str:
    found = []
    for path in sorted(test.folder.glob(f"traces/*{io.SUFFIX}")):
        try:
            trace = io.load(path)
        except LabError as error:
            found.append(_quiet(str(error)))
            continue
        if trace.requests:
            title = f"traces/{path.name}: {len(trace.requests)} answers; the first one"
            found.append(f"<details><summary>{html.escape(title)}</summary>{request_html(trace.requests[0])}</details>")
    note = "Made on traced variants of the lanes, one request at a time: look at their steps, not at their speed."
    return "".join(found) + _quiet(note) if found else _quiet("There are no traces.")


def _files(folder: Path) -> str:
    hidden = (".zip", ".html")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix not in hidden and not path.name.startswith(".")]
    names = [(path.relative_to(folder), path) for path in files]
    rows = [(said(str(name)), f"{path.stat().st_size:,}") for name, path in names if not name.parts[0].startswith(EARLIER)]
    return f"<details><summary>{len(rows)} files beside this one</summary>{_table(('file', 'bytes'), rows, numbers=(1,))}</details>"
