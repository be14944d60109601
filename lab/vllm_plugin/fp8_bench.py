"""`python -m lab.vllm_plugin.fp8_bench`: FP8 against BF16 for a draft's linears on this CPU, one layer at a time.

Both sides run as a vLLM server runs them, in inference mode: BF16 through `dispatch_cpu_unquantized_gemm`, FP8 through the kernel that vLLM
selects. Copies of a layer are visited in turn. *Cold*: together they exceed the processor's caches, as when a whole target forward lies
between two draft steps. *Warm*: together they are as large as a small draft and stay in the last-level cache, as between the draft steps of
one round. The two sides take turns in short rounds, so that a busy moment hits both; times are medians over rounds, a ratio is the median
of the rounds' ratios with its middle 90%. With one thread a time is the thread's CPU time, which leaves out what other processes take; with
more it is wall-clock time.
Nothing but the linears is measured.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels.linear import init_fp8_linear_kernel
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym, kFp8StaticChannelSym
from vllm.platforms import current_platform

from lab import provenance
from lab.errors import LabError
from lab.vllm_plugin import fp8_cpu

#: Name to (K inputs, N outputs): the default recipe's draft.
SHAPES = {"qkv": (1152, 960), "o": (576, 576), "gate_up": (576, 3072), "down": (1536, 576)}
#: Bytes of BF16 weights to visit in turn: several times the last-level cache that a few cores share, and a small draft's.
COLD_BYTES, WARM_BYTES = 256 << 20, 12 << 20


@dataclass(frozen=True)
class Row:
    """One layer at one number of rows: microseconds a call, and BF16's time over FP8's with its middle 90% over rounds."""

    layer: str
    rows: int
    cold: bool
    bf16_us: float
    fp8_us: float
    ratio: float
    low: float
    high: float


def shapes_of(draft: Path) -> dict[str, tuple[int, int]]:
    """The four linears of a one-layer Llama-type Eagle3 draft, as vLLM fuses them, from its config.json."""
    config = json.loads((draft / "config.json").read_text())
    hidden, wide, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    kv = config.get("num_key_value_heads") or heads
    return {
        "qkv": (2 * hidden, (heads + 2 * kv) * head),
        "o": (heads * head, hidden),
        "gate_up": (hidden, 2 * wide),
        "down": (wide, hidden),
    }


def _layers(k: int, n: int, copies: int) -> tuple[list[Callable], list[Callable]]:
    """`copies` BF16 and FP8 layers of one shape, ready to be called with x[rows, K]; their weights differ from copy to copy."""
    plain, quantised = [], []
    base = torch.randn(n, k) * 0.05
    for copy in range(copies):
        weight = base.roll(copy, 0)
        scale = weight.abs().amax(1) / 448
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(weight.bfloat16(), requires_grad=False)
        fp8_cpu.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        plain.append(lambda x, layer=layer: layer.cpu_linear(x, layer.weight, None))
        with set_current_vllm_config(VllmConfig()):
            kernel = init_fp8_linear_kernel(kFp8DynamicTokenSym, kFp8StaticChannelSym, torch.bfloat16, torch.bfloat16, (n, k))
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter((weight / scale[:, None]).to(torch.float8_e4m3fn).t(), requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(scale.view(-1, 1), requires_grad=False)
        kernel.process_weights_after_loading(layer)
        quantised.append(lambda x, kernel=kernel, layer=layer: kernel.apply_weights(layer, x))
    return plain, quantised


def _time(layers: list[Callable], x: torch.Tensor, start: int, calls: int) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    begin = clock()
    for index in range(start, start + calls):
        layers[index % len(layers)](x)
    return (clock() - begin) / calls * 1e6


@torch.inference_mode()
def measure(name: str, k: int, n: int, rows: list[int], *, cold: bool, rounds: int = 40, calls: int = 16) -> list[Row]:
    """Rows of the table for one layer."""
    copies = max(2, (COLD_BYTES if cold else WARM_BYTES) // (2 * k * n))
    plain, quantised = _layers(k, n, copies)
    table = []
    for count in rows:
        x = torch.randn(count, k).bfloat16()
        for sides in (plain, quantised):
            _time(sides, x, 0, 2 * calls)
        pairs = [(_time(plain, x, r * calls, calls), _time(quantised, x, r * calls, calls)) for r in range(rounds)]
        ratios = sorted(bf16 / fp8 for bf16, fp8 in pairs)
        cut = round(0.05 * rounds)
        bf16, fp8 = (statistics.median(side) for side in zip(*pairs, strict=True))
        table.append(Row(name, count, cold, bf16, fp8, statistics.median(ratios), ratios[cut], ratios[-1 - cut]))
    return table


def totals(table: list[Row]) -> list[Row]:
    """All layers together: sums of times for each number of rows; the interval is that of no round and left at the sum's ratio."""
    sums = []
    for cold in (True, False):
        for count in sorted({row.rows for row in table}):
            some = [row for row in table if row.rows == count and row.cold == cold]
            if some:
                bf16, fp8 = sum(row.bf16_us for row in some), sum(row.fp8_us for row in some)
                sums.append(Row("all", count, cold, bf16, fp8, bf16 / fp8, bf16 / fp8, bf16 / fp8))
    return sums


def main(
    draft: Annotated[Path | None, typer.Option(help="Take the sizes from this draft's config.json.")] = None,
    rows: Annotated[str, typer.Option(help="Numbers of rows, comma-separated.")] = "1,2,3,4",
    threads: Annotated[int, typer.Option(help="OpenMP threads; 0: as vLLM's auto binding, all cores but one.")] = 0,
    output: Annotated[Path | None, typer.Option("--json", help="Also write the table here.")] = None,
) -> None:
    """Print how much faster FP8 linears are than BF16 ones on this CPU."""
    if not current_platform.is_cpu():
        raise LabError("This benchmark is for vLLM's CPU build.", why=f"The installed vLLM is for {current_platform.device_type}.")
    current_platform.import_kernels()
    fp8_cpu.register()
    ok, reason = fp8_cpu.packed_gemm(32, 32, torch.bfloat16)
    if not ok:
        raise LabError("FP8 linears are widened on this machine, so there is nothing to compare.", why=reason.capitalize() + ".")
    hardware = provenance.hardware()
    torch.set_num_threads(threads or max(1, hardware["cores"] - 1))
    counts = [int(part) for part in rows.split(",")]
    shapes = shapes_of(draft) if draft else SHAPES
    typer.echo(
        f"{hardware['cpu']}, {torch.get_num_threads()} threads. BF16 as vLLM runs it (us), FP8 (us), BF16/FP8 [middle 90% of rounds]."
    )
    table = []
    for cold in (True, False):
        for name, (k, n) in shapes.items():
            table += measure(name, k, n, counts, cold=cold)
    everything = table + totals(table)
    for row in everything:
        spread = "" if row.layer == "all" else f" [{row.low:.2f}, {row.high:.2f}]"
        state = "cold" if row.cold else "warm"
        typer.echo(f"{state} {row.layer:8} {row.rows:3} rows {row.bf16_us:8.1f} {row.fp8_us:8.1f}  {row.ratio:5.2f}x{spread}")
    if output:
        made = provenance.collect(threads=torch.get_num_threads())
        provenance.write_text(output, json.dumps({"provenance": made, "rows": [asdict(row) for row in everything]}, indent=1))


if __name__ == "__main__":
    try:
        typer.run(main)
    except LabError as error:
        raise SystemExit(str(error)) from None
