"""What quantising did to each tensor: sizes, errors, and why some were left alone. Data, JSON, a table, and series for a plot.

The relative error of a weight W kept as Q is ||Q - W|| / ||W|| (Frobenius), of an output channel the same over its row; a row of zeros that
stayed zeros has error 0. Sizes are of the tensors alone, without file headers; a quantised weight's size includes its scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from lab.errors import LabError

#: The report's file inside an FP8 draft made by the lab.
REPORT = "quant-report.json"
FORMAT = 1

#: Why a tensor is left as it is, by the last part of its module's name or by its kind.
REASONS = {
    "fc": "excluded: fuses three of the target's hidden states, whose ranges differ; the published recipe keeps it",
    "lm_head": "excluded: its errors change the ranking of draft tokens directly; the published recipe keeps it",
    "embed": "an embedding is looked up, not multiplied",
    "norm": "a norm's weights are a vector",
    "map": "maps draft tokens to the target's",
    "": "not a linear layer's weight",
}


@dataclass(frozen=True)
class Channel:
    """An output channel (row of a weight) and its relative error."""

    index: int
    error: float


@dataclass(frozen=True)
class Tensor:
    """One tensor of the source, before and after."""

    name: str
    shape: tuple[int, ...]
    dtype_before: str
    dtype_after: str
    bytes_before: int
    bytes_after: int
    #: Relative error; None where the tensor was left as it is.
    error: float | None = None
    #: Norm of the original, which weighs `error` in the total.
    norm: float = 0.0
    #: The output channels with the largest error, worst first.
    worst: tuple[Channel, ...] = ()
    #: Why it was left as it is; empty for a quantised weight.
    kept: str = ""


@dataclass(frozen=True)
class QuantReport:
    """A draft quantised: every tensor, the patterns that vLLM excludes by, what vLLM said, and where it all comes from."""

    scheme: str
    source: str
    tensors: tuple[Tensor, ...]
    exclude: tuple[str, ...]
    #: vLLM's verdict on the configuration: its version, or why it was not asked.
    checked: str
    provenance: Mapping[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def bytes_before(self) -> int:
        """Size of all tensors before."""
        return sum(tensor.bytes_before for tensor in self.tensors)

    @property
    def bytes_after(self) -> int:
        """Size of all tensors after, scales included."""
        return sum(tensor.bytes_after for tensor in self.tensors)

    @property
    def saved(self) -> int:
        """Bytes saved."""
        return self.bytes_before - self.bytes_after

    @property
    def error(self) -> float:
        """Relative error over all quantised weights together."""
        some = [tensor for tensor in self.tensors if tensor.error is not None]
        whole = sum(tensor.norm**2 for tensor in some)
        return (sum((tensor.error or 0.0) ** 2 * tensor.norm**2 for tensor in some) / whole) ** 0.5 if whole else 0.0

    def json(self) -> str:
        """As written into the draft's folder."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    def series(self) -> dict[str, list[Any]]:
        """Columns for a plot, largest tensor first: name, before, after (bytes), error, worst_index, worst_error, kept."""
        ordered = sorted(self.tensors, key=lambda tensor: -tensor.bytes_before)
        return {
            "name": [tensor.name for tensor in ordered],
            "before": [tensor.bytes_before for tensor in ordered],
            "after": [tensor.bytes_after for tensor in ordered],
            "error": [tensor.error for tensor in ordered],
            "worst_index": [tensor.worst[0].index if tensor.worst else None for tensor in ordered],
            "worst_error": [tensor.worst[0].error if tensor.worst else None for tensor in ordered],
            "kept": [tensor.kept for tensor in ordered],
        }


def why_kept(name: str) -> str:
    """The reason from `REASONS` for a tensor that is left as it is."""
    module = name.removesuffix(".weight").removesuffix(".bias")
    last = module.split(".")[-1]
    if last in ("d2t", "t2d"):
        return REASONS["map"]
    if last in ("fc", "lm_head"):
        return REASONS[last]
    if "embed" in module:
        return REASONS["embed"]
    return REASONS["norm"] if "norm" in module else REASONS[""]


def load_report(draft: Path) -> QuantReport:
    """The report inside an FP8 draft that the lab made; a `LabError` where there is none or it is of another version."""
    path = draft / REPORT
    try:
        report = msgspec.json.decode(path.read_bytes(), type=QuantReport)
    except OSError as error:
        raise LabError(f"{draft} holds no report of its quantisation.", why="The lab did not make it.") from error
    except msgspec.DecodeError as error:
        raise LabError(f"{path} cannot be read.", why=f"{error}.", todo="Quantise the draft again.") from error
    if report.format != FORMAT:
        raise LabError(f"{path} is of format {report.format}, not {FORMAT}.", todo="Quantise the draft again.")
    return report


def table(report: QuantReport) -> str:
    """The report as text: a line a tensor, the total, and what was left alone with the reasons."""
    width = max(len(tensor.name) for tensor in report.tensors)
    lines = [f"{'tensor':{width}}  {'shape':>13}  {'before':>9}  {'after':>9}  {'error':>7}  worst channel"]
    for tensor in sorted(report.tensors, key=lambda tensor: -tensor.bytes_before):
        shape = "x".join(map(str, tensor.shape))
        error = "kept" if tensor.error is None else f"{tensor.error:.2%}"
        worst = f"{tensor.worst[0].index} ({tensor.worst[0].error:.2%})" if tensor.worst else ""
        lines.append(f"{tensor.name:{width}}  {shape:>13}  {tensor.bytes_before:9d}  {tensor.bytes_after:9d}  {error:>7}  {worst}".rstrip())
    ratio = report.bytes_after / report.bytes_before if report.bytes_before else 1.0
    lines.append(
        f"{'total':{width}}  {'':>13}  {report.bytes_before:9d}  {report.bytes_after:9d}  {report.error:7.2%}  {ratio:.0%} of before"
    )
    kept: dict[str, list[str]] = {}
    for tensor in report.tensors:
        if tensor.kept:
            kept.setdefault(tensor.kept, []).append(tensor.name)
    lines += ["", "Left as they are:"]
    lines += [f"  {', '.join(names)}: {reason}" for reason, names in kept.items()]
    lines.append(f"Excluded for vLLM by: {', '.join(report.exclude)}. Configuration check: {report.checked}")
    return "\n".join(lines)
