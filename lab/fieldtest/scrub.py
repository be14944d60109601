"""Nothing secret leaves the machine: names, places, keys and tokens are replaced in every text that goes into the archive.

Two nets. *Literals* are what this machine knows to be its own: values of environment variables whose name or form looks secret, the home
folder, the user's and the machine's name; each is looked for as it is and as JSON, HTML and a URL write it. *Patterns* are what keys look
like anywhere: tokens of known services, authorisation headers, words behind `--api-key` or `"password":`, passwords in URLs, private keys,
home folders of other people. Afterwards `leaks` looks for every literal again.

Limits: a secret that is in no environment variable and looks like an ordinary word cannot be known. Numeric token ids are left alone.
"""

from __future__ import annotations

import getpass
import html
import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

HIDDEN = "[removed]"
#: Names in front of a secret. "token" alone is what this lab is about: it counts only with a word that says whose.
_WHOSE = r"(?:access|auth|api|hf|hub|bearer|refresh|session|secret|bot|git(?:hub|lab)|wandb|huggingface)"
_NAME = (
    r"(?:(?:api|access|private)[_-]?key|secret|passw(?:or)?d|passphrase|credentials?|auth(?:orization)?|cookie|" + _WHOSE + r"[_-]?token)"
)
#: Such a name with what stands between it and its value, in JSON, Python, shell or prose. (Bounded, or one long word takes for ever.)
_FIELD = rf"(?<![A-Za-z0-9_])[A-Za-z0-9_]{{0,40}}?{_NAME}\b\\?[\"']?\s*[:=]\s*\[?\s*"
#: Environment variables whose value is a secret by their name.
SECRET_NAME = re.compile(
    r"KEY(?!BOARD|MAP)|TOKEN(?!IZER)|SECRET|PASSW|PASSPHRASE|(?:^|_)PASS(?:$|_)|CREDENTIAL|AUTH|COOKIE|SIGNATURE|(?:^|_)DSN|WEBHOOK", re.I
)
#: Values that look secret whatever the variable is called: long, without spaces or path, letters and digits mixed.
SECRET_VALUE = re.compile(r"(?=[^/\s]*\d)(?=[^/\s]*[A-Za-z])[A-Za-z0-9_\-+=.~]{24,}")
#: What such a value is not: versions, host names, addresses, lists of flags.
_ORDINARY = re.compile(r"[a-z.\-]+|[\d.:+a-z-]{0,23}|.*\.(?:so|py|json|toml|cfg|conf|local|internal|sock)(?:\.\d+)*|[A-Z_]+=\S*")
#: User names that are also ordinary words of every log: only their home folder is replaced.
GENERIC = {
    "root",
    "user",
    "ubuntu",
    "admin",
    "vllm",
    "rocm",
    "amd",
    "docker",
    "nobody",
    "runner",
    "test",
    "lab",
    "app",
    "jovyan",
    "localhost",
}
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.S), HIDDEN),
    (re.compile(r"\b(?:hf_(?=[A-Za-z0-9]{20})|sk-|ghp_|gho_|ghs_|github_pat_|glpat-|xox[abprs]-|nvapi-|pypi-)[A-Za-z0-9_\-]{10,}"), HIDDEN),
    (re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"), HIDDEN),
    (re.compile(r"\beyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{8,}(?:\.[A-Za-z0-9_\-]*)?"), HIDDEN),
    (re.compile(r"\b(Bearer|Basic)\s+(?!\[removed\])[A-Za-z0-9._~+/=\-]{6,}", re.I), rf"\1 {HIDDEN}"),
    (re.compile(r"(?<=://)[^/\s:@\"'<>]{1,256}:[^/\s@\"'<>]{1,256}(?=@)"), HIDDEN),
    (re.compile(rf"(--{_NAME}(?:s|-file)?(?:\s+|=|\",\s*\"|',\s*'))(?!--)[^\s\"',\]]+", re.I), rf"\1{HIDDEN}"),
    (re.compile(rf"({_FIELD})(\\?[\"'])(?!\[removed\]|<\|)[^\"'\\\n]{{4,512}}(?=\\?[\"'])", re.I), rf"\1\2{HIDDEN}"),
    (re.compile(rf"({_FIELD})(?!\[removed\]|None\b|null\b|true\b|false\b|\d+\b)[^\s\"',;}}\])\\<>\[]{{6,}}", re.I), rf"\1{HIDDEN}"),
    (re.compile(r"(?:/home|/Users|/users|/export/home)/(?!USER\b)[^/\s\"'\\:,;<>)\]]+"), "/home/USER"),
)  # fmt: skip


def _secret(name: str, value: str) -> bool:
    if len(value) < 4 or (value.isdigit() and len(value) < 8) or value.lower() in ("true", "false", "none", "auto"):
        return False
    if SECRET_NAME.search(name) and not name.startswith(("XDG_", "DBUS_")):
        return not (value.startswith("/") and len(value) < 256 and Path(value).exists())
    return bool(SECRET_VALUE.fullmatch(value)) and not _ORDINARY.fullmatch(value)


def _forms(value: str) -> list[str]:
    """A value as it is, and as JSON, HTML and URLs write it."""
    inner = (json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1])
    doubled = [json.dumps(one)[1:-1] for one in inner]
    return list(dict.fromkeys([value, *inner, *doubled, html.escape(value), quote(value, safe=""), quote(value)]))


@dataclass(frozen=True)
class Scrubber:
    """Replaces what must not leave. `literals` maps each text to what stands in its place; `words` only where it is a word of its own."""

    literals: Mapping[str, str] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)

    def text(self, content: str) -> str:
        """`content` without secrets; what is removed is marked."""
        for value in sorted(self.literals, key=len, reverse=True):
            for form in _forms(value):
                content = content.replace(form, self.literals[value])
        for pattern, instead in _PATTERNS:
            content = pattern.sub(instead, content)
        for word, instead in self.words.items():
            content = _word(word).sub(instead, content)
        return content

    def leaks(self, content: str) -> int:
        """How many of the known literals and words are still in `content`."""
        found = sum(any(form in content for form in _forms(value)) for value in self.literals)
        return found + sum(bool(_word(word).search(content)) for word in self.words)


def _word(word: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])")


def of_machine(environment: Mapping[str, str] | None = None, *, home: Path | None = None, user: str = "", host: str = "") -> Scrubber:
    """The scrubber for this machine and user (tests name others)."""
    values = dict(os.environ if environment is None else environment)
    try:
        user = user or getpass.getuser()
    except (OSError, KeyError):
        user = ""
    host = host or socket.gethostname()
    found = {value for name, value in values.items() if _secret(name, value)}
    short = {value for value in found if len(value) < 8 and value.isalnum()}  # as words only, or half a log would go
    literals = dict.fromkeys(found - short, HIDDEN)
    literals |= {line: HIDDEN for value in [*literals] for line in value.splitlines() if len(line) >= 8}
    home = home or Path.home()
    places = {str(home), str(home.resolve()), values.get("HOME", "")}
    literals |= {place: "~" for place in places if len(place) > 4}
    words = {
        name: instead
        for name, instead in ((user, "USER"), (values.get("SUDO_USER", ""), "USER"), (host, "HOST"), (host.partition(".")[0], "HOST"))
        if len(name) >= 3 and name.lower() not in GENERIC
    }
    return Scrubber(literals, words | dict.fromkeys(short, HIDDEN))
