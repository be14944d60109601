"""A command line as people paste it: `VAR=value ... vllm serve MODEL --flag value`, read with patience and without vLLM.

Understood are environment assignments (with `export` or `env` in front too), line continuations, `#` comments, quotes, `--flag=value`,
flags with dashes or underscores, `python -m vllm.entrypoints.openai.api_server --model M`, the short `-tp 8`, dotted forms such as
`--speculative-config.method eagle3`, and a leading `docker run ... IMAGE`, of which `-e VAR=value` is kept. What cannot be read (an
unclosed quote, JSON that is none) becomes a problem in words. vLLM's own parser is the judge of flags; this one only finds values.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: Other spellings of flags, by the long form without dashes.
SHORT = {
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "ep": "enable-expert-parallel",
    "q": "quantization",
    "sc": "speculative-config",
    "cc": "compilation-config",
    "ac": "attention-config",
}
#: Flags that hold JSON objects.
OBJECTS = (
    "speculative-config",
    "compilation-config",
    "attention-config",
    "override-generation-config",
    "hf-overrides",
    "kv-transfer-config",
)
#: Flags that stand alone, so that a word after them is not their value. Others decide by what follows.
BARE = frozenset(
    [
        "enable-prefix-caching",
        "trust-remote-code",
        "enforce-eager",
        "enable-expert-parallel",
        "async-scheduling",
        "enable-chunked-prefill",
        "disable-log-stats",
        "disable-log-requests",
        "enable-auto-tool-choice",
        "enable-lora",
        "skip-tokenizer-init",
    ]
)
ASSIGNMENT = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*=")
LONGEST = 64 << 10


@dataclass(frozen=True)
class Line:
    """`model` is the target as written ("" where none is named); `flags` maps a flag's long name to its value, None for a bare flag."""

    words: tuple[str, ...] = ()
    model: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str | None] = field(default_factory=dict)
    objects: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: "vllm serve", "python -m ..." or "" where the line names neither.
    launcher: str = ""
    problems: tuple[str, ...] = ()

    @property
    def speculative(self) -> Mapping[str, Any]:
        """`--speculative-config` as an object; empty without speculation."""
        return self.objects.get("speculative-config", {})

    def has(self, flag: str) -> bool:
        """Whether `--flag` is there (and not taken back by `--no-flag`)."""
        return flag in self.flags

    def number(self, flag: str, default: int | None = None) -> int | None:
        """A flag's whole number; "8k" counts as 8,000 and "8K" as 8,192, as in vLLM; `default` where it is absent or no number."""
        return whole(self.flags.get(flag), default)

    def text(self, flag: str, default: str = "") -> str:
        """A flag's value."""
        return self.flags.get(flag) or default


def whole(value: object, default: int | None = None) -> int | None:
    """A whole number written as one, or as vLLM's short forms."""
    if isinstance(value, bool):
        return default
    if isinstance(value, int):
        return value
    if isinstance(value, str) and (found := re.fullmatch(r"(-?\d+)([kKmMgG]?)", value.strip())):
        step = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[found[2]]
        return int(found[1]) * step
    return default


def _split(text: str) -> tuple[list[str], list[str]]:
    joined = re.sub(r"\\\s*\n", " ", text)
    lines = [re.sub(r"(^|\s)#.*$", "", line) for line in joined.splitlines()]
    text = "\n".join(line.removeprefix("$ ") for line in lines)
    problems: list[str] = []
    try:
        return shlex.split(text.replace("&&", " ").replace(";", " ") if "'" not in text and '"' not in text else text), problems
    except ValueError as error:
        problems.append(f"A quote is not closed ({error}): the rest was read word by word.")
        return text.replace("'", " ").replace('"', " ").split(), problems


def _prefix(words: list[str]) -> tuple[dict[str, str], str, list[str]]:
    """Environment, launcher, and the words after it."""
    environment: dict[str, str] = {}
    for place, word in enumerate(words):
        name = word.rsplit("/", 1)[-1]
        if name == "vllm" and words[place + 1 : place + 2] == ["serve"]:
            return environment, "vllm serve", words[place + 2 :]
        if word.startswith("vllm.entrypoints"):
            return environment, "python -m", words[place + 1 :]
        if ASSIGNMENT.match(word):
            key, _, value = word.partition("=")
            environment[key] = value.removesuffix(";")  # `export A=1; vllm serve ...`
        elif match := re.match(r"^(?:-e|--env=?)([A-Za-z_]\w*)=(.*)$", word):
            environment[match[1]] = match[2]
    first = next(
        (place for place, word in enumerate(words) if not ASSIGNMENT.match(word) and word not in ("export", "env", "exec", "nohup")), 0
    )
    return environment, "", words[first:]


def _objects(name: str, value: str | None, problems: list[str]) -> dict[str, Any]:
    try:
        found = json.loads(value or "")
    except (ValueError, RecursionError) as error:
        problems.append(f"--{name} is not JSON ({error}): {(value or '')[:80]!r}. In a shell, put it in single quotes.")
        return {}
    if not isinstance(found, dict):
        problems.append(f"--{name} holds a {type(found).__name__}, not a JSON object.")
        return {}
    return found


def parse(text: str | Sequence[str]) -> Line:
    """Read a command line, given as one text or as words already split by a shell."""
    problems: list[str] = []
    if isinstance(text, str):
        if len(text) > LONGEST:
            text, problems = text[:LONGEST], [f"The line has {len(text):,} characters: only the first {LONGEST:,} were read."]
        words, more = _split(text)
        problems += more
    else:
        words = list(text)
    environment, launcher, rest = _prefix(words)
    flags: dict[str, str | None] = {}
    objects: dict[str, dict[str, Any]] = {}
    model = ""
    place = 0
    while place < len(rest):
        word = rest[place]
        place += 1
        if not word.startswith("-") or word == "-":
            model = model or word
            continue
        name, equals, value = word.lstrip("-").partition("=")
        dotted, _, inner = name.partition(".")
        dotted = dotted.replace("_", "-")
        dotted = SHORT.get(dotted, dotted)
        if not equals:
            following = rest[place] if place < len(rest) else None
            takes = following is not None and (not following.startswith("--")) and not re.match(r"^-[a-zA-Z]", following)
            if takes and dotted not in BARE and not (dotted.startswith("no-") and dotted != "no-value"):
                value, place = str(following), place + 1
            else:
                value = None  # type: ignore[assignment]
        if inner:
            keys, spot = inner.split("."), objects.setdefault(dotted, {})
            for key in keys[:-1]:
                spot = spot.setdefault(key, {}) if isinstance(spot.get(key, {}), dict) else {}
            spot[keys[-1]] = _plain(value)
            continue
        if dotted.startswith("no-"):
            flags.pop(dotted.removeprefix("no-"), None)
        else:
            flags.pop(f"no-{dotted}", None)
        flags[dotted] = value
        if dotted in OBJECTS:
            objects[dotted] = {**objects.get(dotted, {}), **_objects(dotted, value, problems)}
    return Line(tuple(words), flags.get("model") or model, environment, flags, objects, launcher, tuple(problems))


def _plain(value: str | None) -> Any:
    """A dotted flag's value: JSON where it is some, else text."""
    if value is None:
        return True
    try:
        return json.loads(value)
    except ValueError:
        return value
