"""What was measured before: reading a duel's file, and the duels and sweeps that the lab ships in `assets/measured`.

A shipped result is shown with its name and provenance, never as if it had been measured here.
"""

from __future__ import annotations

import functools
import json
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from lab.bench import agg, overlay
from lab.bench.duel import REPORT
from lab.bench.result import VERSION
from lab.env import assets
from lab.errors import LabError

#: The duel of a control draft, trained on the last level alone, with one trained alike on all three.
CONTROL = "duel-last-level-only.json"


def load(path: Path | Traversable) -> tuple[dict[str, Any], dict[str, Any]]:
    """A report and its provenance from a file, or the `LabError` that says what is wrong with it."""
    todo = "Choose a result of: eagle3-lab duel"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LabError(f"{path.name} cannot be read.", why=f"{error.strerror or error}.", todo=todo) from error
    except ValueError as error:
        raise LabError(f"{path.name} is no duel's result.", why=f"It is not JSON ({error}).", todo=todo) from error
    if not isinstance(found, dict) or found.get("format") != f"eagle3-lab-{REPORT}":
        raise LabError(f"{path.name} is no duel's result.", why=f'It does not say "format": "eagle3-lab-{REPORT}".', todo=todo)
    if found.get("version") != VERSION:
        raise LabError(f"{path.name} has version {found.get('version')}, and this lab reads {VERSION}.", todo="Update the lab.")
    return found, found.get("provenance") or {}


def shipped() -> dict[str, Traversable]:
    """Duels that the lab ships, by the name that people see."""
    folder = assets() / "measured"
    if not folder.is_dir():
        return {}
    files = sorted(
        (path for path in folder.iterdir() if path.name.startswith("duel-") and path.name.endswith(".json")), key=lambda path: path.name
    )
    return {_name(path): path for path in files}


def _name(path: Traversable) -> str:
    return f"Measured: {path.name.removeprefix('duel-').removesuffix('.json').replace('-', ' ')}"


def sweeps() -> dict[str, list[dict[str, Any]]]:
    """Rows of the sweeps that the lab ships, by model, machine and workload: "smollm2-135m-instruct on NVIDIA H200, 1024/1024"."""
    folder, found = assets() / "measured", dict[str, list[dict[str, Any]]]()
    files = [path for path in folder.iterdir() if path.name.endswith("-sweep.json")] if folder.is_dir() else []
    for path in sorted(files, key=lambda path: path.name):
        for row in agg.loads(path.read_bytes(), path.name):
            found.setdefault(f"{row['model']} on {row['hw']}, {overlay.workload(row)}", []).append(row)
    return found


@functools.cache
def control() -> str:
    """What the control draft showed, in a sentence; "" where its duel is not shipped. Read once: a running duel asks at every picture."""
    path = assets() / "measured" / CONTROL
    if not path.is_file():
        return ""
    report, origin = load(path)
    (comparison,) = report["comparisons"]
    return (
        "Cutting a level shows what this draft depends on, not what the level is worth. For that, two drafts were trained alike, one on all"
        f" three levels and one on the last alone ({origin['made'][:10]}, “{_name(path)}”): {comparison['sentence']}"
    )
