"""Reading a server's log: its tail, the last line that tells a person something, and the line that names the cause of a failure."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path

#: "(EngineCore pid=12) INFO 01-31 12:00:00 [core.py:1] message", each part optional, colours included.
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PROCESS = re.compile(r"^\((?P<process>[A-Za-z_0-9]+) pid=\d+\) ?")
_LEVEL = re.compile(r"^(?P<level>DEBUG|INFO|WARNING|ERROR) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?")
_EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit)\b(?:: ?.*)?$")
_NOISE = (
    "Route:",
    "Available routes",
    "non-default args",
    "vLLM API server version",
    "Initializing a V1 LLM engine",
    "Auto-prefetch is disabled",
    "DP group leader",
    "world_size=",
    "Scale-out endpoints",
    "OpenMP thread binding",
    "reserved_cpus",
    "local_",
)
#: Errors that only say that some other process failed.
_SECOND_HAND = ("Engine core initialization failed", "initialization failed due to an exception", "Executor failed", "EngineDeadError")


def split(line: str) -> tuple[str, str]:
    """(level, message) of a log line without colours, process, date and place; the level is "" where the line has none."""
    line = _PROCESS.sub("", _COLOUR.sub("", line.rstrip("\n")))
    found = _LEVEL.match(line)
    return (found["level"], line[found.end() :].strip()) if found else ("", line.strip())


def tail(path: Path, lines: int = 20, size: int = 1 << 16) -> list[str]:
    """The last `lines` non-empty lines, as written but for colours; [] where there is no log yet."""
    try:
        with path.open("rb") as handle:
            handle.seek(0, 2)
            start = max(0, handle.tell() - size)
            handle.seek(start)
            text = handle.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    found = [_COLOUR.sub("", line).rstrip() for line in text.split("\n")[1 if start else 0 :]]
    return list(deque((line for line in found if line), lines))


def headline(path: Path) -> str:
    """The message of the last informative line, shortened; "" where there is none."""
    for line in reversed(tail(path, lines=60)):
        level, message = split(line)
        if level == "INFO" and message and not message.startswith(_NOISE) and not set(message) & set("█▄▀"):  # vLLM's logo
            return message if len(message) <= 120 else message[:119] + "…"
    return ""


def cause(path: Path) -> str:
    """The last exception in the log that is not a mere report about another process; "" where there is none."""
    second_hand = ""
    for line in reversed(tail(path, lines=400, size=1 << 18)):
        message = split(line)[1]
        if _EXCEPTION.match(message):
            if not any(phrase in message for phrase in _SECOND_HAND):
                return message
            second_hand = second_hand or message
    return second_hand
