"""The barrier's tab: why AITER MLA and a Llama-type draft had no block size in common, what pull request 39616 did, and what MLA is for.

The sizes and the choice come from `lab.doctor.blocks` at once, and from vLLM's own backends and selection where vLLM is installed: a button
asks it in a process of its own, and every choice on screen is then compared with its answer. The drawing is a cache of 64 token slots with
one or two sequences; a click on an entry of the block table lights up the token indices that it becomes. The charts show bytes of KV cache.
Two further buttons start a small MLA target with a draft, as before the fix and with it (`crossing.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import gradio as gr

from lab.doctor import kv
from lab.doctor.blocks import BACKENDS, PULL_REQUEST, Backend, picture, select
from lab.doctor.vllm_blocks import Answer, ask
from lab.errors import LabError
from lab.plots import cache_at_context, cache_per_token
from lab.ui import crossing
from lab.ui.app import Frame, Lab, about, failed, say, working
from lab.ui.components import live
from lab.ui.components.charts import Panels, charts
from lab.ui.feed import dump
from lab.ui.runner import Status
from lab.ui.state import Session

#: Pairs of target and draft attention that the tab compares, by what they show.
PAIRS = {
    "AITER MLA before #39616 + draft": ("ROCM_AITER_MLA before #39616", "ROCM_ATTN"),
    "AITER MLA since #39616 + draft": ("ROCM_AITER_MLA", "ROCM_ATTN"),
    "AITER MLA since #39616, no draft": ("ROCM_AITER_MLA",),
    "Triton MLA + draft": ("TRITON_MLA", "TRITON_ATTN"),
    "AITER flash attention for both": ("ROCM_AITER_FA", "ROCM_AITER_FA"),
    "CPU MLA + draft, stock vLLM": ("CPU_MLA", "CPU_ATTN"),
    "CPU MLA + draft, with the plugin": ("CPU_MLA with the lab's plugin", "CPU_ATTN"),
}
#: What the drawing shows beside a demonstration: the pair, and the block size that vLLM takes.
BEFORE, AFTER = ("CPU MLA + draft, stock vLLM", "16"), ("CPU MLA + draft, with the plugin", "32")
SIZES = (1, 2, 4, 8, 16, 32, 64)
FIRST = "AITER MLA before #39616 + draft"
SLOTS = 64


def verdict(size: int, backends: list[Backend]) -> tuple[bool, int | None, str]:
    """Whether the engine would start, with which kernel block size, and the sentence for it."""
    try:
        chosen = select(size, backends)
    except LabError as error:
        return False, None, f"{error.what} {error.todo}"
    same = "" if chosen == size else f": each block of {size} is split into {size // chosen}"
    return True, chosen, f"Block size {chosen} for the kernels{same}."


def compared(answer: Answer | None, size: int, names: tuple[str, ...], chosen: int | None, why: str = "") -> str:
    """What vLLM's own selection said of the same question, in a sentence."""
    if answer is None:
        return why or "By the lab's own selection, which tests compare with vLLM's for every pair and size; the button asks vLLM itself."
    theirs = answer.selected.get((size, names))
    if theirs is None:
        return f"vLLM {answer.version} has not all of these backends: shown by the lab's own selection."
    said = f"takes {theirs}" if isinstance(theirs, int) else f"says: {theirs}"
    agrees = (theirs if isinstance(theirs, int) else None) == chosen
    return f"vLLM {answer.version}'s own select_common_block_size {said}{'' if agrees else ' (THE LAB DISAGREES: please report this)'}"


def view(pair: str, size: int, first: int, second: int, answer: Answer | None = None, why: str = "") -> dict[str, Any]:
    """Everything that the element draws."""
    names = PAIRS[pair]
    backends = [BACKENDS[name] for name in names]
    ok, chosen, sentence = verdict(size, backends)
    lengths = [length for length in (first, second) if length > 0]
    drawn: dict[str, Any] = {}
    try:
        made = picture(size, lengths, slots=SLOTS)
        drawn = {
            "blockSize": made.block_size,
            "owners": [list(owner) if owner else None for owner in made.owners],
            "tables": [list(table) for table in made.tables],
            "indices": [list(indices) for indices in made.indices],
        }
    except LabError as error:
        drawn = {"error": str(error)}
    return {
        "ok": ok,
        "size": size,
        "sizes": list(SIZES),
        "verdict": sentence,
        "asked": compared(answer, size, names, chosen, why),
        "backends": [
            {"name": one.name, "says": one.said(), "note": one.note, "accepts": [one.accepts(each) for each in SIZES]} for one in backends
        ],
        "starts": [verdict(each, backends)[0] for each in SIZES],
        "link": PULL_REQUEST,
        "cache": drawn,
    }


def kv_panels() -> Panels:
    """Bytes of KV cache a token, and of one sequence by its length."""
    rows = kv.rows()
    return (
        ("KV cache a token, BF16 (from configurations)", cache_per_token(rows, theme="page")),
        ("KV cache of one sequence", cache_at_context(rows, theme="page")),
    )


@dataclass(frozen=True)
class Barrier:
    """What the page needs of the tab."""

    events: list[Any]
    starts: list[Any]
    outputs: list[Any]
    after_stop: Callable[[Session], Any]


def barrier_tab(lab: Lab, frame: Frame) -> Barrier:
    """Draw the tab and wire its handlers."""
    asked: list[Answer] = []
    running = asyncio.Lock()
    with gr.Tab("The barrier", id="barrier", elem_id="e3-tab-barrier"):
        with gr.Row(elem_classes=["e3-stage"]):
            with gr.Column(elem_id="e3-barrier-side", min_width=220):
                pair = gr.Dropdown(list(PAIRS), value=FIRST, label="Attention of target and draft", elem_id="e3-barrier-pair")
                size = gr.Dropdown([str(one) for one in SIZES], value="1", label="Block size, tokens", elem_id="e3-barrier-size")
                first = gr.Slider(1, 32, value=13, step=1, label="Tokens of sequence A", elem_id="e3-barrier-first")
                second = gr.Slider(0, 24, value=6, step=1, label="Tokens of sequence B", elem_id="e3-barrier-second")
                go = gr.Button("Ask vLLM's own selection", size="sm", elem_id="e3-barrier-ask")
                before = gr.Button("Start it as before the fix", size="sm", elem_id="e3-barrier-before")
                after = gr.Button("Start it with the fix", size="sm", variant="primary", elem_id="e3-barrier-after")
            with gr.Column(elem_id="e3-barrier-middle"):
                drawing = live("barrier", dump(view(FIRST, 1, 13, 6)), elem_id="e3-barrier")
                shown = live("crossing", crossing.Shown().value(), elem_id="e3-crossing")
            charts(kv_panels(), elem_id="e3-barrier-kv")

    def show(*values: Any, why: str = "") -> str:
        name, chosen, one, other = values
        known = name if name in PAIRS else FIRST
        asked_size = int(chosen) if str(chosen) in map(str, SIZES) else 1
        a, b = (max(0, min(32, int(value or 0))) for value in (one, other))
        return dump(view(known, asked_size, a, b, asked[0] if asked else None, why))

    async def question(*values: Any) -> str:
        """Ask once for all visitors; the answer stays."""
        async with running:
            if not asked:
                try:
                    asked.append(await asyncio.to_thread(ask, SIZES, list(PAIRS.values())))
                except LabError as error:
                    return show(*values, why=str(error))
        return show(*values)

    inputs = [pair, size, first, second]
    session, status = frame.session, frame.status
    outputs = [status, shown, pair, size, drawing, frame.about, frame.tabs]
    keep = gr.skip()
    demonstration = crossing.Demonstration(lab.engine, lab.runs, lab.recipe)

    def opening(state: Session, what: tuple[str, str], *lengths: Any) -> tuple[Any, ...]:
        """The drawing follows the demonstration."""
        state.active = "barrier"
        return keep, keep, *what, show(*what, *lengths), keep, gr.Tabs(selected="barrier")

    @working
    async def start_before(state: Session, *lengths: Any) -> AsyncIterator[tuple[Any, ...]]:
        yield opening(state, BEFORE, *lengths)
        async with aclosing(demonstration.before(state)) as pictures:
            async for line, picture in pictures:
                yield say(line), picture.value(), *(keep,) * 5

    @working
    async def start_after(state: Session, prompt: str, *lengths: Any) -> AsyncIterator[tuple[Any, ...]]:
        yield opening(state, AFTER, *lengths)
        try:
            async with aclosing(demonstration.after(state, prompt)) as pictures:
                async for line, picture, run in pictures:
                    yield say(line), picture.value(), keep, keep, keep, about(lab, run) if run else keep, keep
        except LabError as error:  # the prompt
            yield failed(error), *(keep,) * 6

    async def after_stop(state: Session) -> tuple[Any, ...]:
        if state.active != "barrier":
            return (keep,) * len(outputs)
        demonstration.let_go(state)
        error = await demonstration.ended()
        if error is not None:
            return failed(error), *(keep,) * 6
        return say(Status("done", "Stopped: the demonstration's engine has ended.")), crossing.Shown().value(), *(keep,) * 5

    quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
    gr.on([pair.input, size.input, first.input, second.input], show, inputs, drawing, queue=False, trigger_mode="always_last", **quiet)
    go.click(lambda: gr.Button("vLLM is asked: half a minute …", interactive=False), None, go, queue=False, **quiet).then(
        question, inputs, drawing, concurrency_limit=8, **quiet
    ).then(lambda: gr.Button("Ask vLLM's own selection", interactive=True), None, go, queue=False, **quiet)
    one_at_a_time: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "crossing"}
    events = [
        before.click(start_before, [session, first, second], outputs, **quiet, **one_at_a_time),
        after.click(start_after, [session, frame.bar.prompt, first, second], outputs, **quiet, **one_at_a_time),
    ]
    return Barrier(events, [before.click, after.click], outputs, after_stop)
