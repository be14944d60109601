"""Results in InferenceX's `agg_*.json` field names: ours written so that others can read them, others' opened to stand beside ours.

Fields as InferenceX's `process_result.py` makes them from a benchmark client's file: throughputs are tokens per second over the number
of GPUs, `{mean,median,p99,std}_{ttft,tpot,itl,e2el}` are seconds, `*_intvty` is 1000 / TPOT in ms (so `p99_intvty` is the slow end, and
`std_intvty` is the reciprocal that InferenceX computes, not a deviation). On a CPU the whole machine counts as one "GPU".

There is no field for acceptance, nor for provenance, so the lab adds its own under `eagle3_lab_*`; readers of the format ignore them.
A file that is opened may hold one object or a list of them; unknown fields are ignored, numbers may come as text.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from lab.bench.sweep import Cell
from lab.errors import LabError
from lab.serving.command import Lane

PREFIX = "eagle3_lab_"
SOURCE = f"{PREFIX}provenance"
#: Format of a cell that was not measured.
FAILED = "eagle3-lab-failed-cell"
STATS = ("mean", "median", "p99", "std")
METRICS = ("ttft", "tpot", "itl", "e2el")
#: Nothing that is opened may be larger, in bytes: a result is a few kilobytes.
LARGEST = 64 << 20
#: The most requests in flight that are believed.
MOST_CONC = 1 << 31


class Length(msgspec.Struct, frozen=True):
    """A mean acceptance length with its interval; nothing but the value is read here."""

    value: float


class Steps(msgspec.Struct, frozen=True):
    """What a traced companion counted."""

    mean_acceptance_length: Length | None = None


class Companion(msgspec.Struct, frozen=True):
    """Acceptance of a cell that was measured once more on a traced lane, or why it was not."""

    without_repeated_8grams: Steps = Steps()


class Tokens(msgspec.Struct, frozen=True):
    """The client's token count beside the server's."""

    agree: bool
    said: str


class Origin(msgspec.Struct, frozen=True):
    """The parts of a provenance that are read."""

    versions: dict[str, str] = {}
    hardware: dict[str, Any] = {}
    recipe: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    weights: dict[str, dict[str, Any]] = {}
    made: str | None = None
    revision: str | None = None


class Own(msgspec.Struct, frozen=True):
    """The lab's own fields, as far as a table or chart reads them: a file from elsewhere may use the names for anything."""

    key: str | None = None
    lane: str | None = None
    label: str | None = None
    draft: str | None = None
    draft_checkpoint: str | None = None
    k: int | None = None
    mode: str | None = None
    workload: str | None = None
    source: str | None = None
    on: str | None = None
    began: str | None = None
    seed: int | None = None
    gpus: int | None = None
    duration_s: float | None = None
    total_output_tokens: float | None = None
    mean_acceptance_length: float | None = None
    temperature: float | None = None
    range_low: float | None = None
    ignore_eos: bool | None = None
    tokens: Tokens | None = None
    without_loops: Companion | None = None
    provenance: Origin | None = None

    def __post_init__(self) -> None:
        numbers = (self.duration_s, self.total_output_tokens, self.mean_acceptance_length, self.gpus)
        if any(one is not None and not 0 <= one < 1e15 for one in numbers):
            raise ValueError("the lab's own durations, tokens and lengths must be numbers of 0 or more")


class Agg(msgspec.Struct, kw_only=True, frozen=True):
    """The fields of one result that the lab reads. Throughputs are tokens per second and GPU."""

    conc: int
    output_tput_per_gpu: float
    model: str = "unknown"
    hw: str = "unknown"
    framework: str = "unknown"
    precision: str = "unknown"
    spec_decoding: str = "none"
    image: str | None = None
    infmax_model_prefix: str | None = None
    isl: int | None = None
    osl: int | None = None
    tp: int = 1
    ep: int = 1
    dp_attention: bool | str | None = None
    disagg: bool | str | None = None
    is_multinode: bool | str | None = None
    tput_per_gpu: float | None = None
    input_tput_per_gpu: float | None = None
    mean_ttft: float | None = None
    median_ttft: float | None = None
    p99_ttft: float | None = None
    mean_tpot: float | None = None
    median_tpot: float | None = None
    p99_tpot: float | None = None
    median_intvty: float | None = None
    mean_intvty: float | None = None
    eagle3_lab: Own = Own()

    def __post_init__(self) -> None:
        if not 1 <= self.conc <= MOST_CONC or not 0 <= self.output_tput_per_gpu < 1e12:
            raise ValueError("conc and output_tput_per_gpu must be a positive whole number and a throughput")
        times = (getattr(self, f"{stat}_{metric}") for stat in ("mean", "median", "p99") for metric in ("ttft", "tpot"))
        if not all(one is None or (math.isfinite(one) and one >= 0) for one in times):
            raise ValueError("times must be numbers of seconds")


def gpus(lane: Lane) -> int:
    """How many GPUs the lane's server takes; 1 on a CPU, where the machine counts as one."""
    return lane.tp


def convert(cell: Cell, bench: Mapping[str, Any], *, hw: str, vllm: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """One cell's result from the client's own file; `extra` is what the lab adds (without the prefix)."""
    recipe, count = cell.lane.recipe, gpus(cell.lane)
    spec = {"none": "none", "bf16": "eagle3", "fp8": "eagle3_fp8"}[cell.lane.draft]
    duration = float(bench["duration"])
    found: dict[str, Any] = {
        "hw": hw,
        "conc": cell.concurrency,
        "image": f"vllm {vllm}",
        "model": recipe.target.name,
        "infmax_model_prefix": recipe.name,
        "framework": "vllm",
        "precision": dict(recipe.flags).get("--dtype") or "auto",
        "spec_decoding": spec,
        "disagg": False,
        "isl": cell.workload.isl or round(bench["total_input_tokens"] / max(1, bench["completed"])),
        "osl": cell.workload.osl,
        "is_multinode": False,
        "tp": count,
        "ep": count if cell.lane.expert_parallel else 1,
        "dp_attention": "false",
        "tput_per_gpu": float(bench["total_token_throughput"]) / count,
        "output_tput_per_gpu": float(bench["output_throughput"]) / count,
        "input_tput_per_gpu": float(bench["total_input_tokens"]) / duration / count,
    }
    for key, value in bench.items():
        stat, _, rest = key.partition("_")
        if rest.removesuffix("_ms") in METRICS and rest.endswith("_ms"):
            found[f"{stat}_{rest.removesuffix('_ms')}"] = float(value) / 1000
            if rest == "tpot_ms" and value:
                found[f"{stat}_intvty"] = 1000 / float(value)
    return found | {f"{PREFIX}{key}": value for key, value in extra.items()}


def parse(row: Any, name: str) -> Agg:
    """One decoded object, checked; `name` is what the error calls it."""
    try:
        if not isinstance(row, Mapping):
            raise ValueError("it is not a JSON object")
        own = {key.removeprefix(PREFIX): value for key, value in row.items() if key.startswith(PREFIX)}
        return msgspec.convert({**row, "eagle3_lab": own}, type=Agg, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        raise LabError(
            f"{name} is not a result in InferenceX's form.",
            why=f"{error}.",
            todo="It should be an agg_*.json: an object (or a list of them) with conc, output_tput_per_gpu, model, hw and so on.",
        ) from error


def loads(data: bytes, name: str) -> list[dict[str, Any]]:
    """The rows of one file as they are, each checked; failed cells of our own sweeps are left out."""
    if len(data) > LARGEST:
        raise LabError(f"{name} is too large to be a result (more than {LARGEST >> 20} MiB).")
    try:
        content = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise LabError(f"{name} is not JSON.", why=f"{error}.") from error
    rows = content if isinstance(content, list) else [content]
    if not rows:
        raise LabError(f"{name} holds no result.")
    kept, shared = [], None
    for number, row in enumerate(rows):
        if isinstance(row, Mapping) and row.get("format") == FAILED:
            continue
        parse(row, name if len(rows) == 1 else f"{name}, result {number + 1},")
        kept.append(dict(row))
        if f"{PREFIX}key" in row:  # what a field test keeps has it in the first row of those where it is the same (`fieldtest/keep.py`)
            if row.get(SOURCE):
                shared = row[SOURCE]
            elif shared:
                kept[-1][SOURCE] = shared
    return kept


def load(paths: Sequence[Path]) -> tuple[list[dict[str, Any]], list[LabError]]:
    """The rows of files, and of the `agg_*.json` in folders; and an error for each file that is not a result.

    Raises the error itself where there is nothing but errors.
    """
    rows: list[dict[str, Any]] = []
    errors: list[LabError] = []
    for path in paths:
        files = sorted(path.rglob("agg_*.json")) if path.is_dir() else [path]
        if not files:
            errors.append(LabError(f"{path} holds no agg_*.json.", todo="Name the files, or the folder of a sweep."))
        for file in files:
            try:
                with file.open("rb") as handle:
                    rows += loads(handle.read(LARGEST + 1), file.name)
            except OSError as error:
                errors.append(LabError(f"{file} cannot be read.", why=f"{error.strerror or error}."))
            except LabError as error:
                errors.append(error)
    if errors and not rows:
        raise errors[0]
    if not rows:
        raise LabError("There is no result in these files.", why="Their cells failed or were refused.")
    return rows, errors


def _cell(value: Any) -> Any:
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else value
    # A spreadsheet runs what begins like a formula.
    return f"'{text}" if isinstance(text, str) and text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def to_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """All rows as one table with a header; nested values (provenance, positions) are JSON in their column."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    handle = io.StringIO()
    writer = csv.writer(handle, lineterminator="\n")
    writer.writerow([_cell(key) for key in columns])
    writer.writerows([[_cell(row.get(key, "")) for key in columns] for row in rows])
    return handle.getvalue()
