"""The one file to send back: a zip of a field test's texts, each scrubbed, checked again after writing.

Only texts go in (`SUFFIXES`); anything else, links included, is left out and named in `LEFT-OUT.txt`; a test of other surroundings
(`EARLIER`) is no part of it. A log longer than `MOST_LOG` keeps its beginning and its end. plotly's script, which is public and 5 MB, is
added to the report after scrubbing, so that no pattern cuts into it. A zip holds no user's name.
"""

from __future__ import annotations

import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from lab import plots, provenance
from lab.errors import LabError
from lab.fieldtest.run import EARLIER
from lab.fieldtest.scrub import Scrubber

SUFFIXES = {".json", ".jsonl", ".csv", ".log", ".html", ".txt", ".md"}
MOST_LOG = 4 << 20
MOST_FILE = 256 << 20
#: Where the report's HTML wants plotly's script.
SCRIPT = "<!--plotly-->"


def with_script(page: str) -> str:
    """The report as it is opened: with plotly's script inside, where it has charts."""
    return page.replace(SCRIPT, f"<script>{plots.script()}</script>", 1)


def _texts(folder: Path, left_out: list[str]) -> Iterator[tuple[Path, str]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if name.parts[0].startswith(EARLIER):  # this machine's scrubber does not know what another machine's texts must not tell
            continue
        if path.is_symlink() or not path.is_file():
            if path.is_symlink():
                left_out.append(f"{name}: a link")
            continue
        if path.name.startswith(".") or ".tmp-" in path.name or path.suffix == ".zip":
            continue
        if path.suffix not in SUFFIXES or path.stat().st_size > MOST_FILE:
            left_out.append(f"{name}: {'not a text' if path.suffix not in SUFFIXES else 'too large'}")
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.suffix == ".log" and len(text) > MOST_LOG:
            half = MOST_LOG // 2
            text = f"{text[:half]}\n... {len(text) - MOST_LOG} characters left out ...\n{text[-half:]}"
        yield name, text


def pack(folder: Path, target: Path, scrubber: Scrubber, page: str) -> Path:
    """Write `target`: every text in `folder`, scrubbed, and `page` (with `SCRIPT` in place of plotly's) as `report.html`.

    Raises `LabError` where it cannot be written, and where something secret would still be in it: then nothing is left behind.
    """
    left_out: list[str] = []
    root = target.name.removesuffix(".zip")
    try:
        with provenance.atomic_path(target) as temporary:
            with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as made:

                def add(name: str, text: str, *, script: bool = False) -> None:
                    clean = scrubber.text(text)
                    if scrubber.leaks(clean):
                        raise LabError(
                            f"{scrubber.text(name)} still holds something secret after it was removed, so no archive was made.",
                            todo="Look at the file, take it out of the folder, and run the same command again.",
                        )
                    entry = zipfile.ZipInfo(scrubber.text(f"{root}/{name}"), time.gmtime()[:6])
                    entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                    made.writestr(entry, with_script(clean) if script else clean)

                add("report.html", page, script=True)
                for name, text in _texts(folder, left_out):
                    if name.name != "report.html":
                        add(name.as_posix(), text)
                if left_out:
                    add("LEFT-OUT.txt", "\n".join(left_out) + "\n")
    except OSError as error:
        raise LabError(
            f"The archive {target} could not be written.", why=f"{error.strerror or error}.", todo="Name another place with --archive."
        ) from error
    return target
