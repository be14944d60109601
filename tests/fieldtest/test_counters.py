"""Traces against the server's own counters: equal ones pass, others are shown."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.fieldtest import stages
from lab.serving.metrics import Snapshot
from tests.fieldtest.made import small


@pytest.mark.parametrize(("late", "wrong"), [(0, 0), (3, 0), (0, 1)])
def test_traces_are_held_against_the_counters(late: int, wrong: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []

    async def scrape(_endpoint: Any, **_: Any) -> Snapshot:
        reads.append(1)
        counted = (2, 6, 3 + wrong) if len(reads) > late else (1, 3, 1)
        return Snapshot(0.0, drafts=10 + counted[0], draft_tokens=20 + counted[1], accepted_tokens=30 + counted[2])

    monkeypatch.setattr(stages, "scrape", scrape)
    monkeypatch.setattr(stages, "LAG", 0.0)
    steps = [SimpleNamespace(draft=(), accepted=0), *(SimpleNamespace(draft=(1, 2, 3), accepted=one) for one in (1, 2))]
    work = stages.Stages(small(), tmp_path, SimpleNamespace(), lambda _text: None)  # type: ignore[arg-type]
    before = Snapshot(0.0, drafts=10, draft_tokens=20, accepted_tokens=30)
    found = asyncio.run(work._against_counters(SimpleNamespace(), before, [SimpleNamespace(steps=steps)]))  # type: ignore[arg-type, list-item]
    assert found == {"traced": [2, 6, 3], "counters": [2, 6, 3 + wrong]}
    assert len(reads) == (late + 1 if not wrong else stages.LOOKS)
