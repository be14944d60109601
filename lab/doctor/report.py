"""The doctor's findings in words for a terminal, and as JSON for scripts."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lab import provenance
from lab.doctor.expected import why_expected
from lab.doctor.machine import Machine
from lab.doctor.rule import LEVELS, SEEN, Finding, all_rules, examine
from lab.doctor.subject import Subject

#: Version of the JSON form.
FORMAT = "eagle3-lab-doctor"
VERSION = 1
WIDTH = 110


@dataclass(frozen=True)
class Report:
    """What was examined, and what was found, errors first."""

    subject: Subject
    findings: tuple[Finding, ...]

    def count(self, level: str) -> int:
        """How many findings of a level."""
        return sum(one.level == level for one in self.findings)

    def exit_code(self, *, strict: bool = False) -> int:
        """0 where nothing stands against it, 3 with an error (or, when strict, a warning that the recipe does not expect)."""
        worrying = [one for one in self.findings if one.level == "warning" and not why_expected(self.subject.recipe, one.rule)]
        return 3 if self.count("error") or (strict and worrying) else 0

    def _repr_html_(self) -> str:
        """For notebooks: a line for each finding."""
        from lab.trace.html import table

        rows: list[tuple[str, ...]] = [(one.level, one.title, one.evidence, one.fix) for one in self.findings]
        rows = rows or [("fine", "nothing stands against it", "", "")]
        return table(("level", "finding", "seen", "what to do"), rows, caption=self.subject.source)


def report(subject: Subject) -> Report:
    """Examine `subject`."""
    return Report(subject, tuple(examine(subject)))


def describe(machine: Machine) -> list[tuple[str, str]]:
    """The machine as rows for people; what is not known is left out."""
    gib = 1 << 30
    gpu = f"{machine.gpus} x {machine.arch}" if machine.gpus else machine.arch or ("" if machine.assumed else "none")
    rows = [
        ("GPU", gpu + (f", {machine.gpu_memory / gib:.0f} GiB each" if machine.gpu_memory and machine.gpus else "")),
        ("driver", ", ".join(part for part in (machine.driver, f"ROCm {machine.rocm}" if machine.rocm else "") if part)),
        ("AITER", machine.aiter),
        ("vLLM", f"{machine.vllm} ({machine.engine})" if machine.engine and not machine.assumed else machine.vllm or "unknown"),
        ("processor", "" if machine.assumed else f"{machine.cpu}, {machine.cores} cores"),
        ("memory", "" if machine.assumed or not machine.memory else f"{machine.memory / gib:.1f} GiB"),
        ("quota", f"{machine.quota:g} cores' worth of time" if machine.quota else ""),
        ("assumed", machine.assumed),
    ]
    return [(name, value) for name, value in rows if value]


def looked_at(subject: Subject) -> list[tuple[str, str]]:
    """What could be read, as rows for people."""
    rows = [("examined", subject.source)] if subject.source else []
    for role, model in (("target", subject.target), ("draft", subject.draft)):
        if model is None:
            continue
        if model.stand_in:
            kind = "a part" if model.minimal else "a copy"
            said = f"not on this machine; checked against {kind} of its configuration ({model.stand_in})"
        elif model.known:
            said = f"configuration{f' and {len(model.tensors)} tensors' if model.tensors else ''}"
        else:
            said = "see below" if model.problems else "not on this machine: rules about its files were left out"
        rows.append((role, f"{model.name}: {said}"))
    if subject.server is not None:
        server = subject.server
        rows.append(("server", f"{server.url}, {server.model or 'no model'}{f', vLLM {server.version}' if server.version else ''}"))
        told = "tells its configuration" if server.config else "does not tell its configuration (VLLM_SERVER_DEV_MODE=1 would)"
        rows.append(
            (
                "",
                f"{server.drafts} drafts, {server.counters.accepted_tokens} of {server.counters.draft_tokens} draft tokens accepted; "
                f"{told}",
            )
        )
    return rows


def _issue(issue: str) -> str:
    """An issue for people: "seen here" stays, others become addresses."""
    from lab.doctor.rule import address

    return "seen by this project" if issue == SEEN else address(issue)


def text(found: Report, *, verbose: bool = False) -> str:
    """The report for a terminal."""
    signs = {"error": "✗ error", "warning": "! warning", "note": "· note"}
    lines = [f"{name + ':' if name else '':10} {value}" for name, value in (*describe(found.subject.machine), *looked_at(found.subject))]
    for one in found.findings:
        expected = why_expected(found.subject.recipe, one.rule)
        lines += ["", f"{signs[one.level]}: {one.title} [{one.rule}]"]
        rows = [("seen", one.evidence), ("why", one.reason), ("fix", one.fix)]
        if expected:
            rows.append(("expected", expected))
        if verbose and one.reads:
            rows.append(("reads", f"vllm/{one.reads}"))
        if one.issues:
            rows.append(("from", ", ".join(map(_issue, one.issues))))
        for name, value in rows:
            lines += textwrap.wrap(
                value, WIDTH, initial_indent=f"  {name:9} ", subsequent_indent=" " * 12, break_long_words=False, break_on_hyphens=False
            )
    counts = ", ".join(f"{found.count(level)} {level}{'' if found.count(level) == 1 else 's'}" for level in LEVELS)
    return "\n".join([*lines, "", f"{counts}; {len(all_rules())} rules."])


def as_json(found: Report) -> dict[str, Any]:
    """The report for scripts."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "made": provenance.collect(),
        "machine": dict(describe(found.subject.machine)),
        "examined": [list(row) for row in looked_at(found.subject)],
        "counts": {level: found.count(level) for level in LEVELS},
        "findings": findings_json(found.subject.recipe, found.findings),
    }


def findings_json(recipe: str, findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Findings as plain objects, with links, and why a recipe expects them."""
    return [
        {**asdict(one), "issues": list(one.issues), "links": list(one.links), "expected": why_expected(recipe, one.rule)}
        for one in findings
    ]
