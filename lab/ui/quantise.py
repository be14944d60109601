"""The tab that quantises: AMD Quark makes an FP8 draft from the recipe's BF16 one, and the report says what it did to each tensor.

Only the recipe's own drafts are offered, and the output goes into the lab's cache: nobody who visits the page names a path. The first time,
the result is the draft that the FP8 lane will use; later, it is made anew beside it, compared with it byte for byte, and thrown away. One
quantisation runs at a time; Stop, or a closed page, ends it and leaves nothing. Needs AMD Quark and a POSIX system; without, it says so.
"""

from __future__ import annotations

import asyncio
import filecmp
import json
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr

from lab import checkpoints
from lab.checkpoints import Cancelled
from lab.env import cache_dir
from lab.errors import LabError, disk_error
from lab.plots import tensor_errors, tensor_sizes
from lab.recipes.model import Hub, QuarkFp8, Recipe
from lab.ui.app import Frame, Lab, failed, say, working
from lab.ui.bar import DRAFT_NAMES
from lab.ui.components import live
from lab.ui.components.charts import Panels, charts, value_of
from lab.ui.feed import dump
from lab.ui.runner import HEARTBEAT, Status
from lab.ui.state import Session

if TYPE_CHECKING:
    from lab.quant.report import QuantReport

#: Of a recipe for CPUs (`lab/vllm_plugin/fp8_cpu.py` decides it for each layer).
WIDENED = "On a CPU the bytes are saved in memory only with AVX512-BF16: other processors widen FP8 weights at load."


@dataclass(frozen=True)
class Quantise:
    """What the page needs of the tab."""

    events: list[Any]
    #: What tells that an FP8 draft may be there now.
    made: list[Any]
    outputs: list[Any]
    after_stop: Callable[[Session], Any]


def sources(recipe: Recipe) -> dict[str, str]:
    """The recipe's drafts that can be quantised: name for people to precision. FP8 ones are what comes out."""
    return {f"{DRAFT_NAMES.get(name, name)} draft: {draft.name}": name for name, draft in recipe.drafts.items() if name != "fp8"}


def stored(recipe: Recipe) -> Path | None:
    """Where the recipe's FP8 draft is or will be, if the lab makes it."""
    draft = recipe.drafts.get("fp8")
    return Path(checkpoints.location(draft)) if draft is not None and isinstance(draft.weights, QuarkFp8) else None


def earlier(recipe: Recipe) -> tuple[QuantReport | None, str]:
    """The report of the FP8 draft that is in the cache, and a sentence about it."""
    place = stored(recipe)
    if place is None:
        return None, "The lab did not make this recipe's FP8 draft: quantise its BF16 one to see what happens to it."
    try:
        from lab.quant import load_report

        report = load_report(place)
    except ImportError:
        return None, "Quantising needs Linux: it runs where the engine runs."
    except LabError:
        return None, "The FP8 draft is made on first use, or by the button; then its report is here."
    return report, f"The FP8 draft in the cache, made {report.provenance.get('made', 'some time ago')}."


def kv_lines(recipe: Recipe, report: QuantReport) -> list[str]:
    """What the saved memory buys: tokens of KV cache on this machine and on the accelerator of the published runs, with the sum."""
    from lab.quant import kv_gain, this_machine
    from lab.quant.kv import MI355X

    target, draft = Path(checkpoints.location(recipe.target)) / "config.json", stored(recipe)
    try:
        config = json.loads(target.read_text(encoding="utf-8"))
        source = recipe.drafts["bf16"]
        own = json.loads((Path(checkpoints.location(source)) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError):
        return [
            f"{report.saved:,} bytes are saved; what they buy is known once the target's configuration is here ({draft and draft.name})."
        ]
    places = ((this_machine(), recipe.value_bytes), (MI355X, 2))
    gains = [kv_gain(report.saved, config, machine, draft=own, bytes_per_value=width) for machine, width in places]
    lines = [f"{gain.tokens:,} KV-cache tokens more on {gain.machine.name}: {gain.share:.4%} of its memory." for gain in gains]
    sums = dict.fromkeys(gain.formula for gain in gains)
    return [*lines, f"The sum: {'; '.join(sums)}.", *(() if recipe.hardware else (WIDENED,))]


def view(recipe: Recipe, report: QuantReport | None, said: str) -> str:
    """The report as the element's value."""
    if report is None:
        return dump({"said": said, "rows": []})
    rows = []
    for tensor in sorted(report.tensors, key=lambda each: -each.bytes_before):
        worst = ", ".join(f"{channel.index} ({channel.error:.1%})" for channel in tensor.worst[:3])
        rows.append(
            [
                tensor.name,
                " × ".join(map(str, tensor.shape)),
                f"{tensor.bytes_before:,}",
                f"{tensor.bytes_after:,}",
                "kept" if tensor.error is None else f"{tensor.error:.2%}",
                worst,
            ]
        )
    kept: dict[str, list[str]] = {}
    for tensor in report.tensors:
        if tensor.kept:
            kept.setdefault(tensor.kept, []).append(tensor.name)
    share = report.bytes_after / report.bytes_before if report.bytes_before else 1.0
    total = ["total", "", f"{report.bytes_before:,}", f"{report.bytes_after:,}", f"{report.error:.2%}", f"{share:.0%} of before"]
    return dump(
        {
            "said": said,
            "header": ["tensor", "shape", "bytes before", "bytes after", "error", "worst channels"],
            "rows": [*rows, total],
            "kept": [f"{', '.join(names)}: {reason}" for reason, names in kept.items()],
            "buys": kv_lines(recipe, report),
            "notes": [
                f"Scheme {report.scheme}; excluded for vLLM by {', '.join(report.exclude)}. {report.checked}.",
                "Error: the norm of what quantising changed, over the norm of the weight; of a channel, over its row.",
            ],
        }
    )


def panels(report: QuantReport | None) -> Panels:
    """Sizes before and after, and errors."""
    if report is None:
        return (
            ("Size of each tensor", tensor_sizes([], [], [], theme="page")),
            ("Relative error", tensor_errors([], [], [], theme="page")),
        )
    large = [each for each in sorted(report.tensors, key=lambda each: -each.bytes_before) if each.bytes_before > 10_000]
    some = [each for each in large if each.error is not None]
    short = [each.name.removesuffix(".weight").removeprefix("model.") for each in large]
    names = [each.name.removesuffix(".weight").removeprefix("model.") for each in some]
    worst = [(each.worst[0].index, each.worst[0].error) if each.worst else (0, each.error or 0.0) for each in some]
    sizes = tensor_sizes(short, [each.bytes_before for each in large], [each.bytes_after for each in large], theme="page")
    return (
        ("Size of each tensor, MB", sizes),
        ("Relative error of each quantised tensor", tensor_errors(names, [each.error or 0.0 for each in some], worst, theme="page")),
    )


def make(recipe: Recipe, precision: str, told: Callable[[str], None]) -> tuple[QuantReport, str]:
    """Quantise one of the recipe's drafts: its report, and a sentence about what became of the result. `told` may raise to cancel."""
    if precision not in sources(recipe).values():
        raise LabError("There is no such draft to quantise.", todo=f"Choose from: {', '.join(sources(recipe))}.")
    try:
        from lab.quant import load_report, quantize_draft
    except ImportError as error:
        raise LabError("Quantising needs Linux.", why=f"{error}.", todo="Run the lab where the engine runs.") from error
    source = recipe.drafts["bf16" if precision == "bf16" else "fp8"]
    if isinstance(source.weights, Hub):
        raise LabError(
            f"{source.name} is on the Hugging Face hub.",
            todo=f"Fetch it, then: eagle3-lab quantize FOLDER --output {source.name}-fp8",
        )
    place = stored(recipe)
    fp8 = recipe.drafts.get("fp8")
    if place is not None and fp8 is not None and not (place / "quant-report.json").is_file():
        checkpoints.ensure(fp8, told)
        return load_report(place), "Made now, and kept: the FP8 lane uses it."
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir(), prefix=".quantise-") as folder:
            output = Path(folder) / "draft"
            report = quantize_draft(Path(checkpoints.ensure(source, told)), output, told)
            if place is None:
                return report, "Made now and thrown away: this recipe has an FP8 draft of its own."
            made, kept = ({path.name for path in each.glob("*.safetensors")} for each in (output, place))
            same = made == kept and all(filecmp.cmp(output / name, place / name, shallow=False) for name in made)
    except OSError as error:
        raise disk_error(error, cache_dir()) from error
    return report, f"Made anew and thrown away: {'byte for byte' if same else 'NOT'} the FP8 draft that the FP8 lane uses."


def quantise(lab: Lab, frame: Frame) -> Quantise:
    """Draw the tab and wire its handlers."""
    offered = sources(lab.recipe)
    report, said = earlier(lab.recipe)
    with gr.Tab("Quantise", id="quantise", elem_id="e3-tab-quantise"):
        with gr.Row(elem_classes=["e3-strip", "e3-duel-strip"]):
            choice = gr.Dropdown(
                list(offered.items()),
                value=next(iter(offered.values()), None),
                label="Draft to quantise",
                show_label=False,
                container=False,
                elem_id="e3-quantise-draft",
            )
            start = gr.Button("Quantise to FP8 with AMD Quark", variant="primary", elem_id="e3-quantise-run", min_width=0, size="sm")
        with gr.Row(elem_classes=["e3-stage"]):
            shown = live("quantise", view(lab.recipe, report, said), elem_id="e3-quantise")
            drawn = charts(panels(report), elem_id="e3-quantise-charts")
    outputs = [frame.status, shown, drawn]
    keep = gr.skip()
    #: What was called off and has not ended: it notices with its next line of progress.
    ending: set[asyncio.Task[Any]] = set()

    def over(task: asyncio.Task[Any]) -> None:
        ending.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, or asyncio reports it: that it was called off is no news

    @working
    async def run(state: Session, precision: str) -> AsyncIterator[tuple[Any, ...]]:
        state.active = "quantise"
        while ending:
            yield say(Status("busy", "Waiting for a quantisation that was called off to end")), keep, keep
            await asyncio.wait(ending, timeout=HEARTBEAT)
        gone, latest, began = threading.Event(), ["starting"], time.monotonic()

        def told(text: str) -> None:
            if gone.is_set():
                raise Cancelled
            latest[0] = text

        task = asyncio.create_task(asyncio.to_thread(make, lab.recipe, precision, told))
        try:
            while not task.done():
                yield say(Status("busy", "Quantising the draft to FP8", latest[0], None, time.monotonic() - began)), keep, keep
                await asyncio.wait({task}, timeout=HEARTBEAT)
            found, what = await task
        except LabError as error:
            yield failed(error), keep, keep
            return
        finally:
            gone.set()
            if not task.done():  # whoever cancels this does not wait for it; Stop does
                ending.add(task)
                task.add_done_callback(over)
        ratio = f"{found.bytes_before / 1e6:.1f} MB became {found.bytes_after / 1e6:.1f} MB, relative error {found.error:.2%}"
        yield say(Status("done", f"Quantised: {ratio}.", what)), view(lab.recipe, found, what), value_of(panels(found))

    async def after_stop(state: Session) -> tuple[Any, ...]:
        if state.active != "quantise":
            return (keep,) * len(outputs)
        if ending:
            await asyncio.wait(ending)
        return say(Status("info", "Stopped quantising: nothing half-made is left.")), keep, keep

    running = start.click(
        run,
        [frame.session, choice],
        outputs,
        show_progress="hidden",
        api_visibility="private",
        concurrency_limit=1,
        concurrency_id="quantise",
    )
    return Quantise([running], [running.then], outputs, after_stop)
