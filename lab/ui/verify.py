"""The proof's tab: verify the lane of the prompt bar and keep a certificate; measure verification's share against the context.

Both hold the engines that they use and run in the background while the status line follows. Stop, or closing the page, ends them; a
certificate is written only by a verification that came to its end. The check itself is `lab.bench.lossless`, as in `eagle3-lab verify`,
with fewer prompts unless asked for more.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any

import gradio as gr

from lab.bench import certificate, context, lossless, origin, result
from lab.bench.prompts import LONG, shipped
from lab.bench.scoring import Asker
from lab.env import cache_dir
from lab.errors import LabError
from lab.serving.command import Lane
from lab.serving.endpoint import Endpoint
from lab.ui import proof
from lab.ui.app import CONCURRENCY, Frame, Lab, failed, restart_offer, say, working
from lab.ui.components import live
from lab.ui.components.charts import charts, value_of
from lab.ui.runner import Status, wait_ready
from lab.ui.state import Session, whole_k

PERIOD = 0.4
#: Contexts that are measured, as far as the recipe's reaches, and new tokens at each.
CONTEXTS = (256, 1024, 2048, 3584)
NEW_TOKENS = 32


@dataclass(frozen=True)
class Proof:
    """What the page needs of the tab."""

    events: list[Any]
    starts: list[Any]
    outputs: list[Any]
    after_stop: Callable[[Session], tuple[Any, ...]]
    #: The badge for the lane that the bar names: to be asked at the page's start and at each change of the draft or K.
    badge: Callable[[str, float | None], str]


def lane_of(lab: Lab, draft: str, k: float | None) -> Lane:
    """The lane that the bar names, as the page runs it; a `LabError` where there is nothing to verify."""
    if draft == "none":
        raise LabError("The baseline is what a draft is compared with.", todo="Choose BF16 or another draft above, then press again.")
    kind: Any = draft
    return Lane(lab.recipe, kind, whole_k(lab.recipe, draft, k), compiled=lab.recipe.compiled, traced=True)


def plan_of(prompts: float | None, tokens: float | None, samples: float | None) -> lossless.Plan:
    """The fields of the tab as a plan; a `LabError` for what proves nothing."""
    found = []
    for name, value in (("Prompts", prompts), ("New tokens", tokens), ("Sampled answers", samples)):
        if value is None or not float(value).is_integer() or value < 0:
            raise LabError(f"{name} is not a whole number.")
        found.append(int(value))
    shown = shipped("chat").prompts
    if not 1 <= found[0] <= len(shown):
        raise LabError(f"{found[0]} prompts cannot be asked.", todo=f"Choose 1 to {len(shown)}: so many chat prompts are shipped.")
    return lossless.Plan(shown[: found[0]], (1, 4), found[1], (1.0,) if found[2] else (), found[2], 2)


def verify_tab(lab: Lab, frame: Frame, badge: gr.HTML) -> Proof:
    """Draw the tab; `badge` is the element above the tabs that says what was verified for the lane of the prompt bar."""
    with gr.Tab("Proof", id="proof", elem_id="e3-tab-proof") as tab:
        with gr.Row(elem_classes=["e3-strip", "e3-proof-strip"]):
            prompts = gr.Number(8, label="Prompts", step=1, elem_id="e3-proof-prompts", min_width=0)
            tokens = gr.Number(64, label="New tokens", step=16, elem_id="e3-proof-tokens", min_width=0)
            samples = gr.Number(384, label="Sampled answers", step=64, elem_id="e3-proof-samples", min_width=0)
            start = gr.Button("Verify this lane", variant="primary", elem_id="e3-proof-verify", min_width=0, size="sm")
            measure = gr.Button("Measure the context", elem_id="e3-proof-context", min_width=0, size="sm")
            save = gr.DownloadButton("Save the certificate", interactive=False, size="sm", min_width=0, elem_id="e3-proof-save")
        with gr.Row(elem_classes=["e3-stage"]):
            shown = live("proof", proof.value(None), elem_id="e3-proof")
            drawn = charts(proof.context_panels([]), elem_id="e3-proof-charts")

    session, status, draft, k = frame.session, frame.status, frame.bar.draft, frame.bar.k
    outputs = [status, shown, drawn, save, badge, frame.restart, frame.tabs]
    keep = gr.skip()

    async def followed(work: Coroutine[Any, Any, Any], told: list[str], what: str) -> AsyncGenerator[Status, None]:
        """Run `work` and say what it says; its failure is raised here, and cancelling this cancels it."""
        began, task = time.monotonic(), asyncio.create_task(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=PERIOD)
                yield Status("busy", what, detail=told[-1] if told else "", elapsed=time.monotonic() - began)
            task.result()
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, LabError):
                await task

    async def hold(stack: AsyncExitStack, lane: Lane, box: list[Endpoint]) -> AsyncIterator[Status]:
        """Start `lane`, then keep it until `stack` ends; the endpoint is put into `box`."""
        async for line in wait_ready(lab.engine, lane, []):
            yield line
        box.append(await stack.enter_async_context(lab.engine.use(lane)))

    @working
    async def run_verify(state: Session, kind: str, depth: float | None, *fields: float | None) -> AsyncIterator[tuple[Any, ...]]:
        state.active = "proof"
        used: list[Lane] = []
        try:
            lane, plan = lane_of(lab, kind, depth), plan_of(*fields)
            yield say(Status("busy", f"Verifying {lane.label}")), *(keep,) * 5, gr.Tabs(selected="proof")
            told: list[str] = []
            known = await asyncio.to_thread(certificate.identity, lane, say=told.append)
            assert known is not None
            result.check_writable(certificate.place(certificate.hashed(known)))
            judge = lossless.reference(lab.recipe, compiled=lane.compiled)
            used += [judge, lane]
            bodies: list[dict[str, Any]] = []
            async with AsyncExitStack() as stack:
                box: list[Endpoint] = []
                for needed in used:
                    async for line in hold(stack, needed, box):
                        yield say(line), *(keep,) * 6
                there, here = [await stack.enter_async_context(Asker(endpoint)) for endpoint in box]

                async def work() -> None:
                    base = await lossless.ask_baseline(there, plan, told.append)
                    bodies.append(await lossless.check(lane, here, there, base, plan, told.append))

                async with aclosing(followed(work(), told, f"Verifying {lane.label}")) as lines:
                    async for line in lines:
                        yield say(line), *(keep,) * 6
            made = await asyncio.to_thread(
                origin.describe, [lane, judge], [shipped("chat")], prompts_used=[prompt.id for prompt in plan.prompts]
            )
            path = certificate.save(lane, known, made, bodies[0])
        except LabError as error:
            yield failed(error), keep, keep, keep, keep, restart_offer(lab, state, *used), keep
            return
        found = certificate.read(path, certificate.hashed(known))
        level: Any = "done" if bodies[0]["verdict"] == "lossless" else "error"
        line = Status(level, f"{lane.label}: {bodies[0]['verdict']}.", detail=f"certificate saved to {path}", more=bodies[0]["reasons"])
        yield (
            say(line),
            proof.value(found, lane, proof.measured(lane)),
            keep,
            to_save(found),
            await asyncio.to_thread(proof.badge, lane),
            keep,
            keep,
        )

    @working
    async def run_context(state: Session, kind: str, depth: float | None) -> AsyncIterator[tuple[Any, ...]]:
        state.active = "proof"
        used: list[Lane] = []
        try:
            lane = lane_of(lab, kind, depth)
            plain = Lane(lab.recipe, compiled=lane.compiled)
            used += [plain, lane]
            most = lab.recipe.max_model_len
            plan = context.Plan(tuple(one for one in CONTEXTS if one + NEW_TOKENS <= most), most, 2, NEW_TOKENS)
            yield say(Status("busy", f"Measuring {lane.label} at growing contexts")), *(keep,) * 5, gr.Tabs(selected="proof")
            told: list[str] = []
            seen: dict[str, Any] = {}
            for needed in used:
                async with AsyncExitStack() as stack:
                    box: list[Endpoint] = []
                    async for line in hold(stack, needed, box):
                        yield say(line), *(keep,) * 6
                    asker = await stack.enter_async_context(Asker(box[0]))

                    async def work(asker: Asker = asker, key: str = needed.draft) -> None:
                        seen[key] = await context.measure(asker, plan, shipped(LONG).prompts, told.append)

                    async with aclosing(followed(work(), told, f"Measuring {needed.label}")) as lines:
                        async for line in lines:
                            yield say(line), *(keep,) * 6
            rows = context.summarise(seen[lane.draft], seen["none"])
            made = await asyncio.to_thread(origin.describe, [lane, plain], [shipped(LONG)], max_tokens=NEW_TOKENS)
        except LabError as error:
            yield failed(error), keep, keep, keep, keep, restart_offer(lab, state, *used), keep
            return
        path = cache_dir() / "results" / f"context-{time.strftime('%Y%m%d-%H%M%S')}.json"
        done = Status("done", context.explain(rows).split(". ")[0] + ".", detail=f"saved to {path}", more=[context.explain(rows)])
        try:
            result.save(path, "context", made, {"lane": lane.key, "label": lane.label, "rows": rows, "explanation": context.explain(rows)})
        except LabError as error:  # minutes of measuring are shown all the same
            done = Status.error(error)
        _, verified = await asyncio.to_thread(certificate.find, lane)
        yield say(done), proof.value(verified, lane, rows), value_of(proof.context_panels(rows)), keep, keep, keep, keep

    def to_save(found: certificate.Certificate | None) -> Any:
        """The save button for a certificate; the file is copied to where the page may serve files from."""
        if found is None:
            return gr.DownloadButton(interactive=False)
        try:
            lab.folder.mkdir(parents=True, exist_ok=True)
            path = shutil.copy(found.path, lab.folder / f"certificate-{found.hash[:16]}.json")
        except OSError:  # no room there: the certificate itself is kept, and the status line says where
            return gr.DownloadButton(interactive=False)
        return gr.DownloadButton(value=str(path), interactive=True)

    def badge_of(kind: str, depth: float | None) -> str:
        """The badge for what the bar says now."""
        try:
            return proof.badge(lane_of(lab, kind, depth))
        except LabError:
            return ""

    def look(kind: str, depth: float | None) -> tuple[Any, ...]:
        """The tab's content for what the bar says now."""
        try:
            lane = lane_of(lab, kind, depth)
        except LabError:
            return proof.value(None), gr.DownloadButton(interactive=False), value_of(proof.context_panels([])), True
        _, found = certificate.find(lane)
        rows = proof.measured(lane)
        return proof.value(found, lane, rows), to_save(found), value_of(proof.context_panels(rows)), True

    def look_again(seen: bool, kind: str, depth: float | None) -> tuple[Any, ...]:
        return look(kind, depth) if seen else (keep,) * 4

    def after_stop(state: Session) -> tuple[Any, ...]:
        if state.active != "proof":
            return (keep,) * len(outputs)
        line = Status("done", "Stopped.", detail="a certificate needs the whole verification; an earlier one stays as it was")
        return say(line), *(keep,) * (len(outputs) - 1)

    quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
    running = [
        start.click(run_verify, [session, draft, k, prompts, tokens, samples], outputs, **quiet, **CONCURRENCY),
        measure.click(run_context, [session, draft, k], outputs, **quiet, **CONCURRENCY),
    ]
    # gradio draws a tab when it is first shown; what reaches it earlier makes its name appear twice, so the content waits until then.
    with tab:  # not between tabs, where gradio counts it as one and the tabs behind it change places
        seen = gr.State(False)
    tab.select(look, [draft, k], [shown, save, drawn, seen], **quiet, **CONCURRENCY)
    gr.on(
        [draft.input, k.input], look_again, [seen, draft, k], [shown, save, drawn, seen], trigger_mode="always_last", **quiet, **CONCURRENCY
    )
    return Proof(running, [start.click, measure.click], outputs, after_stop, badge_of)
