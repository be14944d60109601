"""Where an artefact came from, on machines that lack something."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lab import provenance


def test_a_checkout_without_git_says_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that only mounts it: the page asks for the revision at every run."""
    monkeypatch.setenv("PATH", "")
    assert provenance.revision.__wrapped__() == provenance.versions().get("eagle3-lab", "unknown")


@pytest.mark.parametrize("program", ["/opt/venv/bin/eagle3-lab", "/opt/venv/lib/python3.11/site-packages/lab/cli.py"])
def test_a_command_is_known_by_its_name_however_it_was_started(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr("sys.argv", [program, "record", "x"])
    assert provenance.collect()["argv"] == ["eagle3-lab", "record", "x"]


def test_a_file_name_that_is_not_utf_8_can_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["eagle3-lab", os.fsdecode(b"caf\xe9.jsonl")])
    provenance.write_text(tmp_path / "a.json", json.dumps(provenance.collect(), ensure_ascii=False))
    assert json.loads((tmp_path / "a.json").read_text())["argv"][1] == "caf\\udce9.jsonl"


@pytest.mark.parametrize(
    ("machine", "said"),
    [({"cores": 2, "cpu": "X"}, "2 cores of X"), ({"cores": 1, "cpu": "X"}, "1 core of X"), ({}, "? cores of an unknown processor")],
)
def test_a_processor_in_words(machine: dict[str, object], said: str) -> None:
    assert provenance.processor(machine) == said
