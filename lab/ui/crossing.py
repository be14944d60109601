"""The barrier in a running engine: a small MLA target with a Llama-type draft, as before the fix and with it.

*As before the fix* starts the engine of recipe `smollm2-mla` as stock vLLM would, and shows the error with which that very process ends.
*With the fix* starts it with the plugin's attention backend and lets it answer the prompt of the bar. One demonstration runs at a time, for
all visitors. Stop ends the engine that it began; an engine that has answered stays warm as every lane does, until Stop or until another
lane needs its memory. Limits: it needs a vLLM that the plugin's backend was checked with, on a CPU; elsewhere the real error says so.
"""

from __future__ import annotations

import asyncio
import functools
import re
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lab.doctor import kv, server
from lab.errors import LabError
from lab.recipes import get
from lab.recipes.model import Recipe
from lab.recipes.smollm2 import smollm2_mla_before
from lab.serving.command import Lane
from lab.serving.endpoint import Endpoint
from lab.trace.model import Request
from lab.trace.render import Answer, chips, visible
from lab.trace.stats import count
from lab.ui.engine import Engine
from lab.ui.feed import dump
from lab.ui.runner import Status, answer, summary, wait_ready
from lab.ui.state import Run, Runs, Session, Settings

#: New tokens of the demonstration, and seconds between its pictures.
TOKENS = 48
PERIOD = 0.4
_MESSAGE = re.compile(r"No common block size for \d+ \([^)]*\)")

INTENT = (
    "The recipe smollm2-mla is the default target with its attention in DeepSeek's form (MLA), which Kimi-K2.5 has too. On a CPU, vLLM"
    " meets the same barrier with it that AITER MLA met with Eagle3. The two buttons start its engine, which takes a minute or so."
)
REFUSED = (
    "Target and draft share the KV cache, so its blocks must suit both kernels. The message above names what each takes: vLLM's MLA kernel"
    " for CPUs reads blocks of exactly 16 tokens, the Llama-type draft's attention multiples of 32. No size is both, so the engine ends"
    " before its first token. AITER MLA had this conflict with blocks of 1 and multiples of 16."
)
NEXT = "“With the fix” starts the same target, draft and K with the plugin's attention backend."
CROSSED = (
    "The plugin's backend accepts any multiple of 16: it writes each entry of the block table out into the blocks of 16 that the kernel"
    " reads, as pull request 39616 does for AITER, and gives each of the K+1 tokens of a verification a row with its own length."
)


def lane(recipe: Recipe) -> Lane:
    """The lane of the demonstration: the BF16 draft at the recipe's K."""
    return Lane(recipe, "bf16", recipe.default_k("bf16"), compiled=recipe.compiled)


@functools.cache
def cache_words() -> str:
    """KV cache a token: this target, the same model with grouped queries, and Kimi-K2.5; from their configurations."""
    models = {one.name: one for one in kv.MODELS}
    rows = {name: kv.row(models[name]) for name in ("smollm2-mla", "SmolLM2-135M", "Kimi-K2.5")}
    latent, grouped, kimi = (rows[name].bytes_per_token for name in rows)
    ours, theirs = models["smollm2-mla"].config, models["SmolLM2-135M"].config
    layers, rank, rope = ours["num_hidden_layers"], ours["kv_lora_rank"], ours["qk_rope_head_dim"]
    groups, size, heads = theirs["num_key_value_heads"], theirs["head_dim"], models["Kimi-K2.5"].config["num_attention_heads"]
    wide = get("smollm2-mla").value_bytes == 4
    here = f" On this processor the engine computes in float32 and keeps twice as much: {2 * latent:,} B." if wide else ""
    return (
        f"KV cache a token, BF16: {latent:,} B for this target ({layers} layers × ({rank} latent + {rope} rotary) × 2 B), {grouped:,} B for"
        f" the same model with grouped queries ({layers} × 2 × {groups} heads × {size} × 2 B). MLA's is {latent / grouped:.1f} times larger"
        f" here: the latent is as wide as Kimi-K2.5's, and SmolLM2 has {groups} KV heads to replace. Kimi has {heads} heads: {kimi:,} B"
        f" instead of {rows['Kimi-K2.5'].mha:,} B with a key and value for each ({rows['Kimi-K2.5'].source}).{here}"
    )


@dataclass(frozen=True)
class Shown:
    """What the element draws. `state` is idle, starting, refused, answering, answered, stopped or failed."""

    state: str = "idle"
    title: str = "The barrier in a running engine"
    #: The engine's own words, sentences about them, the tail of its log and where the whole log is.
    message: str = ""
    words: tuple[str, ...] = (INTENT,)
    log: tuple[str, ...] = ()
    log_at: str = ""
    #: The answer: rows of `[step, [[mark, text], ...]]`, its tokens as `[mark, text]`, and what was counted.
    rows: list[Any] = field(default_factory=list)
    answer: list[Any] = field(default_factory=list)
    facts: str = ""

    def value(self) -> str:
        """The element's value. Text of the engine travels as runs or plain strings, never as HTML."""
        plain = {"message": list(visible(self.message, spaces=False)), "log": [list(visible(one, spaces=False)) for one in self.log]}
        return dump({**asdict(self), **plain, "cache": cache_words()})


def starting(title: str) -> Shown:
    """While the engine starts."""
    return Shown("starting", title, words=("A real vLLM process is starting; the line above the tabs says what it is doing.",))


def refused(error: LabError, seconds: float) -> Shown:
    """How the engine without the fix ended: at the barrier, or, said as such, at something else."""
    first, *rest = error.why.strip().splitlines() or [""]
    log = tuple(line for line in rest if line.strip())
    if not _MESSAGE.search(error.why):
        return Shown("failed", error.what, first, ("This is not the barrier: the engine failed at something else.", error.todo), log)
    title = f"As before the fix, vLLM gave up after {seconds:.0f} s"
    return Shown("refused", title, first, (REFUSED, NEXT), log, error.todo)


def failed(error: LabError) -> Shown:
    """How the engine with the fix failed."""
    first, *rest = error.why.strip().splitlines() or [""]
    at_barrier = "The plugin's backend was not used: the engine's log says why it stood down." if _MESSAGE.search(error.why) else ""
    words = tuple(part for part in (at_barrier, error.todo) if part)
    return Shown("failed", error.what, first, words, tuple(line for line in rest if line.strip()))


def answered(state: str, of: Lane, request: Request, blocks: str = "") -> Shown:
    """The answer so far, step by step. `blocks` says how large the engine's blocks are."""
    rows, said, text = [], [], Answer()
    for step in request.steps:
        rows.append([step.index, [[chip.mark, list(chip.text)] for chip in chips(step, request.pieces, output=text.length)]])
        said += [[token.mark, list(token.text)] for token in text.feed(step, request.pieces)]
    found = count(request.steps)
    length = found.mean_acceptance_length
    facts = f"K = {of.k}: {len(said)} tokens in {len(rows)} steps"
    if length is not None:
        facts += f"; {found.accepted} of {found.draft_tokens} draft tokens accepted; mean acceptance length {length:.2f}, bonus included"
    title = {"answering": "With the fix, the engine runs", "answered": "With the fix, the engine runs", "stopped": "Stopped"}[state]
    return Shown(state, title, words=(f"{blocks} {CROSSED}".strip(),), rows=rows, answer=said, facts=f"{facts}.")


async def blocks_of(endpoint: Endpoint) -> str:
    """How large the blocks of the running engine are, in a sentence; "" where it does not tell."""
    try:
        size = (await server.ask(endpoint.url)).cache.get("block_size", "")
    except LabError:
        return ""
    return f"Target and draft share blocks of {size} tokens." if size.isdecimal() else ""


class Demonstration:
    """Both engines over one page's serving; `own` is the page's recipe, whose lanes are not stopped from here."""

    def __init__(self, engine: Engine, runs: Runs, own: Recipe) -> None:
        self._engine, self._runs, self._own = engine, runs, own
        self._ending: set[asyncio.Task[LabError | None]] = set()
        #: Whose demonstration is under way, and with which lane.
        self._whose: tuple[Session, Lane] | None = None

    def _over(self, state: Session) -> None:
        if self._whose is not None and self._whose[0] is state:
            self._whose = None

    def let_go(self, state: Session) -> None:
        """Begin to stop the engine that this session's demonstration began, or to call its start off; one that somebody uses stays.

        It takes seconds, and whoever cancels a demonstration waits for it, so that happens apart: `ended` waits for it.
        """
        begun, state.barrier = state.barrier, None
        known = self._engine.status()
        if self._whose is not None and self._whose[0] is not state and self._whose[1] == begun:
            return  # somebody else's start or answer by now
        if begun is None or begun.recipe.name == self._own.name or any(one.lane.key == begun.key and one.in_use for one in known):
            return
        task = asyncio.create_task(self._stop(begun))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _stop(self, begun: Lane) -> LabError | None:
        try:
            await self._engine.stop(begun)
        except LabError as error:
            return error
        return None

    async def ended(self) -> LabError | None:
        """Wait for what was let go; what went wrong with it, if anything did."""
        found = await asyncio.gather(*(asyncio.shield(task) for task in self._ending))
        return next((one for one in found if one), None)

    async def before(self, state: Session) -> AsyncGenerator[tuple[Status, Shown], None]:
        """Start the engine without the fix and show how it ends; whatever happens, it does not stay."""
        await self.ended()
        state.barrier = one = lane(smollm2_mla_before())
        self._whose = (state, one)
        began = time.monotonic()
        try:
            async for line in wait_ready(self._engine, one, []):
                yield replace(line, text=f"As before the fix: {line.text}"), starting("As before the fix")
            words = ("The conflict that this button is there to show is not in this vLLM: its engine started, and is stopped again.",)
            yield Status("done", "This vLLM starts the engine without the fix."), Shown("failed", "There is no barrier here", words=words)
        except LabError as error:
            shown = refused(error, time.monotonic() - began)
            yield (Status("done", f"{shown.title}: {shown.message}") if shown.state == "refused" else Status.error(error)), shown
        finally:
            self._over(state)
            self.let_go(state)

    async def after(self, state: Session, prompt: str) -> AsyncGenerator[tuple[Status, Shown, Run | None], None]:
        """Start the engine with the fix and let it answer `prompt`, greedily; one that has answered stays warm.

        Raises `LabError` for a prompt that cannot be sent.
        """
        recipe = get("smollm2-mla")
        one = lane(recipe)
        settings = Settings.of(recipe, prompt, one.draft, one.k, 0.0, TOKENS, False)
        await self.ended()
        state.barrier = one
        self._whose = (state, one)
        box: list[Endpoint] = []
        whole = False
        try:
            async for line in wait_ready(self._engine, one, box):
                yield replace(line, text=f"With the fix: {line.text}"), starting("With the fix"), None
            run = self._runs.new(one, settings)
            blocks = await blocks_of(box[0])
            async for line in answer(self._engine, box[0], settings, run, period=PERIOD):
                yield line, answered("answering", one, run.request, blocks), run
            whole = True
            stays = replace(summary(run), detail="the engine stays warm; Stop ends it")
            yield stays, answered("answered", one, run.request, blocks), run
        except LabError as error:
            yield Status.error(error), failed(error), None
        finally:
            self._over(state)
            if not whole:
                self.let_go(state)
