"""What a rule is, and the registry of all rules.

A rule is a generator function over a `Subject` that yields one `Finding` for each thing it found. Its docstring is the reason, for people.
The decorator names the rule, its level, where vLLM reads what the rule looks at (`reads`: "file.py:Class.function", checked against the
installed vLLM by a test), which words of that source it depends on (`fields`), and the public issues it comes from.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from lab.doctor.subject import Subject

#: error: it will fail or be silently wrong. warning: it may be slow, or is right only under a condition. note: worth knowing.
Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")
GITHUB = {
    "v": "vllm-project/vllm",
    "a": "ROCm/aiter",
    "sg": "sgl-project/sglang",
    "g": "gradio-app/gradio",
    "sp": "vllm-project/speculators",
}
#: An "issue" of faults that this project met itself.
SEEN = "seen here"


@dataclass(frozen=True)
class Found:
    """What a rule yields: the `evidence` seen, and the `fix` to copy. `level` replaces the rule's own where a case is milder."""

    evidence: str
    fix: str
    level: Level | None = None


@dataclass(frozen=True)
class Finding:
    """One finding for people and scripts."""

    rule: str
    level: Level
    title: str
    evidence: str
    reason: str
    fix: str
    reads: str = ""
    issues: tuple[str, ...] = ()

    @property
    def links(self) -> tuple[str, ...]:
        """Addresses of the issues on GitHub, in order."""
        return tuple(address(issue) for issue in self.issues if issue != SEEN)


Check = Callable[["Subject"], Iterator[Found]]


@dataclass(frozen=True)
class Rule:
    """A registered rule; `reason` is the function's docstring on one line."""

    name: str
    level: Level
    title: str
    check: Check
    reason: str
    reads: str
    fields: tuple[str, ...]
    issues: tuple[str, ...]

    def apply(self, subject: Subject) -> list[Finding]:
        """Run it."""
        return [
            Finding(self.name, found.level or self.level, self.title, found.evidence, self.reason, found.fix, self.reads, self.issues)
            for found in self.check(subject)
        ]


RULES: dict[str, Rule] = {}


def rule(
    name: str, level: Level, title: str, *, reads: str = "", fields: tuple[str, ...] = (), issues: tuple[str, ...] = ()
) -> Callable[[Check], Check]:
    """Register a rule under `name`. `title` says in a few words what is wrong where it fires."""

    def register(check: Check) -> Check:
        assert name not in RULES, f"two rules are called {name}"
        RULES[name] = Rule(name, level, title, check, " ".join((inspect.getdoc(check) or "").split()), reads, fields, issues)
        return check

    return register


def address(issue: str) -> str:
    """The address of an issue written as in the tables: v#39616 is vllm-project/vllm's."""
    short, _, number = issue.partition("#")
    return f"https://github.com/{GITHUB[short]}/issues/{number}"


def all_rules() -> dict[str, Rule]:
    """Every rule by name."""
    for name in ("files", "aux", "vocabulary", "shapes", "positions", "quant", "kv", "gpu", "command", "cpu", "server"):
        importlib.import_module(f"lab.doctor.rules_{name}")
    return RULES


def examine(subject: Subject) -> list[Finding]:
    """Every finding about `subject`, errors first, in the order of the rules otherwise.

    A rule meets files of any content; should one stumble over some, that is said as a finding and the others go on.
    """
    found: list[Finding] = []
    for one in all_rules().values():
        try:
            found += one.apply(subject)
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, IndexError) as error:
            evidence = f"Rule {one.name} stumbled over what it read: {type(error).__name__}: {error}."
            fix = "Please report this with the configuration files; the other rules were applied."
            found.append(
                Finding(
                    "doctor-stumbled", "warning", "A check could not be made", evidence, "The files hold values of an unexpected kind.", fix
                )
            )
    return sorted(found, key=lambda one: LEVELS.index(one.level))
