"""A trace, a request and a step as HTML for a notebook: what `_repr_html_` shows, in the page's colours and from the same chips.

The style is the page's own file `assets/ui/chips.css`, sent with each piece, so that a notebook needs nothing else and no script runs. It
follows JupyterLab's theme. Everything that a model or a person wrote is escaped by `render.py`. A step alone does not know the text of its
tokens (its request does): it then shows their ids in brackets. Limit: at most `MOST_ROWS` rows; the file holds all of them.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

from lab.env import assets
from lab.trace import stats
from lab.trace.model import Mark, Request, Step, Trace
from lab.trace.render import NAMES, Answer, chip_html, chips, run_html, visible

#: Rows of steps that one request shows, and requests of a trace that are listed.
MOST_ROWS = 400
MOST_REQUESTS = 200
#: Rows that are open at first.
OPEN_ROWS = 12
#: Characters from which a table's cell counts as words rather than a number.
WORDS = 24
LEGEND: tuple[Mark, ...] = ("accepted", "rejected", "unreached", "recovered", "bonus")


class Html(str):
    """HTML that a notebook draws; everywhere else it is its own text."""

    def _repr_html_(self) -> str:
        return str(self)


def framed(body: str) -> Html:
    """`body` with the style that it needs."""
    style = (assets() / "ui" / "chips.css").read_text(encoding="utf-8")
    return Html(f'<style>{style}</style><div class="e3-notebook">{body}</div>')


def legend() -> Html:
    """The marks of tokens with their names."""
    return framed(_legend())


def said(text: str) -> str:
    """Somebody's text as HTML: escaped, and with signs for what would not be seen or would turn the line around."""
    return run_html(visible(text, spaces=False))


def table(header: Sequence[object], rows: Iterable[Sequence[object]], *, caption: str = "") -> Html:
    """A small table; every cell is escaped."""
    head = "".join(f"<th>{said(str(name))}</th>" for name in header)
    body = "".join(f"<tr>{''.join(_cell(str(cell)) for cell in row)}</tr>" for row in rows)
    title = f"<caption>{said(caption)}</caption>" if caption else ""
    return framed(f'<table class="e3-table">{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>')


def _cell(text: str) -> str:
    """A cell: numbers stand to the right, sentences to the left."""
    return f'<td class="{"e3-words" if len(text) > WORDS else "e3-value"}">{said(text)}</td>'


def _legend() -> str:
    marks = "".join(f'<bdi class="e3-chip e3-{mark}">{html.escape(NAMES[mark])}</bdi>' for mark in LEGEND)
    return f'<div class="e3-row e3-legend">{marks}</div>'


def _row(step: Step, pieces: Mapping[int, str], output: int = 0) -> str:
    row = "".join(chip_html(chip) for chip in chips(step, pieces, output=output))
    what = row or f'<span class="e3-quiet">part of the prompt: {step.scheduled} tokens read</span>'
    return f'<div class="e3-row"><span class="e3-number">{step.index}</span>{what}</div>'


def rows(request: Request, first: int = 0, last: int | None = None) -> Html:
    """The steps at places `first` to `last` (exclusive) of a request as rows of chips, with the legend."""
    return framed(_legend() + f'<div class="e3-rows">{"".join(_rows(request)[first:last])}</div>')


def _rows(request: Request) -> list[str]:
    found, output = [], 0
    for step in request.steps:
        found.append(_row(step, request.pieces, output))
        output += step.kept
    return found


def answer(request: Request) -> str:
    """The answer's text, each token in the colour of who wrote it; plain text where there are no steps."""
    if not request.steps:
        return said(request.text)
    reader, words = Answer(), []
    for step in request.steps:
        for token in reader.feed(step, request.pieces):
            title = html.escape(f"{NAMES[token.mark]}, step {token.step}, position {token.position}")
            words.append(f'<span class="e3-word e3-word-{token.mark}" title="{title}">{run_html(token.text)}</span>')
    return "".join(words)


def numbers(request: Request) -> list[tuple[str, str]]:
    """`(name, value)` of what a request says about speculation; lengths include the bonus token."""
    counts = stats.count(request.steps)
    told = [("tokens", str(len(request.output_ids()))), ("target passes", str(counts.passes) if request.steps else "not traced")]
    if counts.drafts:
        length, rate = counts.mean_acceptance_length, counts.acceptance_rate
        assert length is not None
        assert rate is not None
        told.append(("mean acceptance length, bonus included", f"{length:.2f}"))
        told.append(("draft tokens accepted", f"{counts.accepted} of {counts.draft_tokens} ({rate:.0%})"))
    if request.dropped:
        told.append(("steps lost on the way", str(request.dropped)))
    if request.error:
        told.append(("broke off", request.error))
    return told


def request_html(request: Request) -> Html:
    """A request: who answered, the numbers, the coloured answer, and the rows of its steps."""
    told = " · ".join(f"{said(name)} <b>{said(value)}</b>" for name, value in numbers(request))
    lines = _rows(request)
    parts = [
        f'<div class="e3-quiet">{said(request.lane)} · {said(request.prompt[:160])}</div><div>{told}</div>',
        f'<div class="e3-answer">{answer(request)}</div>',
    ]
    if lines:
        more = f", the first {MOST_ROWS} of them" if len(lines) > MOST_ROWS else ""
        body = f'{_legend()}<div class="e3-rows">{"".join(lines[:MOST_ROWS])}</div>'
        is_open = " open" if len(lines) <= OPEN_ROWS else ""
        parts.append(f"<details{is_open}><summary>{len(lines)} steps{more}</summary>{body}</details>")
    return framed("".join(parts))


def step_html(step: Step, pieces: Mapping[int, str] | None = None) -> Html:
    """One step as a row of chips; without `pieces` its tokens are ids."""
    return framed(f'<div class="e3-rows">{_row(step, pieces or {})}</div>')


def trace_html(trace: Trace) -> Html:
    """A saved trace: where it comes from, and its requests one below the other."""
    made, revision = trace.provenance.get("made", "unknown time"), trace.provenance.get("revision", "unknown revision")
    head = f"{len(trace.requests)} request{'s' if len(trace.requests) != 1 else ''}, made {made}, revision {revision}"
    lines = []
    for request in trace.requests[:MOST_REQUESTS]:
        told = " · ".join(f"{said(name)} <b>{said(value)}</b>" for name, value in numbers(request))
        text = f'<summary>{said(request.lane)}: {said(request.prompt[:100])}</summary><div class="e3-quiet">{told}</div>'
        lines.append(f'<details>{text}<div class="e3-answer">{answer(request)}</div></details>')
    return framed(f'<div class="e3-quiet">{said(head)}</div>{"".join(lines)}')
