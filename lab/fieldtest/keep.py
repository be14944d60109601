"""What of a field test is worth keeping, in `measured/` under names that say machine and recipe: ready for `assets/measured` and
`assets/traces`.

* `NAME-sweep.json`: every measured cell in InferenceX's field names, as the page and `eagle3-lab bench sweep` open it. Provenance is in
  the first row and where it changes; the client's arguments stay in the test's own files.
* `NAME-lossless-DRAFT.json`: the certificates.
* `RECORDING-NAME.jsonl`: the recordings of the traced lanes, which play without an engine.

Texts are scrubbed as in the archive. The folder is made anew by each run, from what there is.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab import provenance
from lab.fieldtest.run import Test
from lab.fieldtest.scrub import Scrubber

FOLDER = "measured"
#: Fields of a row that are long, and the same in every row or told elsewhere.
LONG = ("eagle3_lab_provenance", "eagle3_lab_client_argv")


def slug(*words: str) -> str:
    """A part of a file name from words for people: "1 x NVIDIA H200" and "smollm2-gpu" become "nvidia-h200-smollm2-gpu"."""
    text = "-".join(word for word in words if word).lower()
    return re.sub(r"[^a-z0-9.]+", "-", re.sub(r"\b1 x ", "", text)).strip("-")


def rows_to_keep(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows without what is long; with provenance where it is another than the row's before, but for the time and the command."""
    short, before = [], None
    for number, row in enumerate(rows):
        short.append({key: value for key, value in row.items() if key not in LONG})
        told = row.get(LONG[0])
        what = {key: value for key, value in told.items() if key not in ("made", "argv")} if isinstance(told, dict) else told
        if not number or what != before:
            short[-1][LONG[0]] = told
        before = what
    return short


def keep(test: Test, rows: Sequence[Mapping[str, Any]], scrubber: Scrubber) -> list[Path]:
    """Write the folder, and give its files."""
    folder = test.folder / FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    name = slug(test.settings.hw or "unnamed", test.settings.recipe.name)
    made: dict[str, str] = {}
    if rows:
        made[f"{name}-sweep.json"] = json.dumps(rows_to_keep(rows), indent=1, ensure_ascii=False) + "\n"
    for path in sorted(test.folder.glob("lossless-*.json")):
        made[f"{name}-{path.name}"] = path.read_text(encoding="utf-8")
    for path in sorted(test.folder.glob("recordings/*")):
        made[f"{path.stem}-{name}{path.suffix}"] = path.read_text(encoding="utf-8")
    for file, text in made.items():
        provenance.write_text(folder / file, scrubber.text(text))
    return [folder / file for file in made]
