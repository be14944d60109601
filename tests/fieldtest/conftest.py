"""A field test in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab import provenance
from lab.fieldtest import plan, run
from tests.fieldtest.made import ORIGIN, small


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., run.Test]:
    """A test in a folder, with what an earlier one there did."""

    def made(settings: plan.Settings | None = None, folder: Path | None = None, **around: Any) -> run.Test:
        settings = settings or small()
        where = folder or tmp_path / "run"
        where.mkdir(exist_ok=True)
        found = run.Test(settings, plan.stages(settings), where, dict(ORIGIN), provenance.surroundings(ORIGIN) | around)
        run.load(found, lambda _text: None)
        return found

    return made
