"""Published throughput tables, as data: what AMD printed for the MI355X, with its sources and what to be careful about.

The files are `assets/published/*.json`, one a model. Nothing here was measured by the lab, so whatever shows a number of these says so:
`Published.label`. Speed-ups are kept as they were printed, and a test divides the throughputs again to see that they agree.
"""

from __future__ import annotations

from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal

import msgspec

from lab import env
from lab.errors import LabError


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One cell of a table: output tokens per second and GPU at a concurrency, and the printed speed-up (None for the baseline)."""

    concurrency: int
    output_tput_per_gpu: float
    speedup: float | None = None


class Series(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One column of a table. `k` and `vllm` are None where they were not stated."""

    draft: Literal["none", "bf16", "fp8"]
    label: str
    checkpoint: str | None
    k: int | None
    vllm: str | None
    points: tuple[Point, ...]


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a number or a setting comes from."""

    title: str
    url: str
    what: str


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the client was told. `range_ratio` 0.8 means lengths from 0.8 to 1.0 of ISL and OSL."""

    dataset: str
    range_ratio: float
    request_rate: str
    ignore_eos: bool
    chat_template: bool
    prompts_per_concurrency: int
    warmups_per_concurrency: int


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One published table."""

    format: Literal["eagle3-lab-published"]
    version: Literal[1]
    name: str
    title: str
    publisher: str
    hardware: str
    unit: str
    target: str
    isl: int
    osl: int
    tensor_parallel: int
    expert_parallel: bool
    seeds: int
    load: Load
    series: tuple[Series, ...]
    caveats: tuple[str, ...]
    sources: tuple[Source, ...]

    @property
    def label(self) -> str:
        """How every number of this table is called wherever it is shown."""
        return f"published by {self.publisher}, {self.hardware}"


def read(path: Path | Traversable) -> Published:
    """One file of the form above, or the `LabError` that says what is wrong with it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Published)
    except (OSError, msgspec.MsgspecError) as error:
        raise LabError(f"{path.name} is not a table of published results.", why=f"{error}.") from error


def tables() -> dict[str, Published]:
    """Every table that the lab ships, by name."""
    folder = env.assets() / "published"
    found = [read(path) for path in folder.iterdir() if path.name.endswith(".json")]
    return {one.name: one for one in sorted(found, key=lambda one: one.name)}


def table(name: str) -> Published:
    """The table called `name`, or a `LabError` that lists the names there are."""
    known = tables()
    if name not in known:
        raise LabError(f"There is no published table called '{name}'.", todo=f"Choose from {', '.join(known)}.")
    return known[name]
