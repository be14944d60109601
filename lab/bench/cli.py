"""`eagle3-lab bench`: measure acceptance and speed on a real engine, print a table, and keep a JSON file with provenance.

Errors are `LabError`s for the command line's boundary to render. Engines that were started are stopped at the end, also after Ctrl-C.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from lab import env
from lab.bench import context_cli, cost_cli, sweep_cli
from lab.errors import LabError

if TYPE_CHECKING:
    from lab.recipes.model import DraftChoice
    from lab.serving.endpoint import Progress
    from lab.serving.lanes import Lanes

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Measure acceptance and speed on a real engine.")
app.command("context")(context_cli.context)
app.command("cost")(cost_cli.cost)
app.command("whatif")(cost_cli.whatif)
app.command("sweep")(sweep_cli.sweep)
app.command("open")(sweep_cli.open_files)

RecipeName = Annotated[str, typer.Option("--recipe", help="Which target and drafts.")]
Folder = Annotated[Path | None, typer.Option("--draft-folder", help="Another Eagle3 draft for the recipe's target, as vLLM loads it.")]
Compiled = Annotated[bool, typer.Option("--compiled/--eager", help="vLLM's torch.compile, or eager mode (quicker to start).")]
Tokens = Annotated[int, typer.Option("--max-tokens", min=1, help="New tokens for each prompt; the end-of-sequence token is respected.")]
Files = Annotated[
    list[Path] | None,
    typer.Option("--prompts", metavar="FILE", help="Prompts of your own instead: JSON lines, the lab's form or Spec-Bench's."),
]
Output = Annotated[Path | None, typer.Option("--output", help="Result file (default: a new one in the cache's folder 'results').")]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _place(output: Path | None, kind: str) -> Path:
    from lab.bench import result

    path = output or env.cache_dir() / "results" / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    result.check_writable(path)
    return path


class _Starting:
    """Prints a lane's progress, each stage once and then every few seconds."""

    def __init__(self, label: str) -> None:
        self.label, self.stage, self.last = label, "", 0.0

    def __call__(self, progress: Progress) -> None:
        if progress.stage != self.stage or progress.elapsed - self.last >= 5:
            self.stage, self.last = progress.stage, progress.elapsed
            _say(f"{self.label}: {progress.stage}, {progress.elapsed:.0f} s: {progress.detail[:120]}")


def _run(work: Coroutine[Any, Any, None], lanes: Lanes) -> bool:
    """Run `work`, then stop the engines; whether it came to its end (False after Ctrl-C)."""
    try:
        asyncio.run(work)
    except KeyboardInterrupt:
        _say("Interrupted.")
        return False
    finally:
        lanes.shutdown()
    return True


def _leave(whole: bool) -> None:
    """End with the exit status of an interrupted program, when this one was."""
    if not whole:
        raise typer.Exit(130)


@app.command()
def acceptance(
    recipe: RecipeName = "smollm2",
    draft: Annotated[str, typer.Option("--draft", help="bf16 or fp8.")] = "bf16",
    k: Annotated[int | None, typer.Option("-k", help="Draft tokens a step (default: the recipe's).")] = None,
    draft_folder: Folder = None,
    compiled: Compiled = False,
    kind: Annotated[list[str] | None, typer.Option("--kind", help="chat, maths, code or long (default: all). Repeatable.")] = None,
    prompts: Files = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first prompts of each file: a quick look.")] = None,
    max_tokens: Tokens = 128,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight; at most 2 of the long ones.")] = 4,
    trace: Annotated[Path | None, typer.Option(help="Also save every step of every answer as a trace.")] = None,
    output: Output = None,
) -> None:
    """Mean acceptance length by kind of prompt, by position and by context length, with loops and without."""
    from lab import recipes
    from lab.bench import acceptance as bench
    from lab.bench import origin, result
    from lab.bench.prompts import KINDS, LONG, gather
    from lab.serving.command import Lane
    from lab.serving.lanes import Lanes
    from lab.trace import io
    from lab.trace.model import Trace

    path = _place(output, "acceptance")
    chosen = origin.with_draft(recipes.get(recipe), draft_folder)
    lane = Lane(chosen, cast("DraftChoice", draft), chosen.default_k(cast("DraftChoice", draft)) if k is None else k, compiled=compiled)
    if lane.draft == "none":
        raise LabError("Acceptance needs a draft.", todo="Choose --draft bf16 or --draft fp8.")
    files = gather(kind or [*KINDS, LONG], prompts or ())
    asked = [prompt for file in files for prompt in file.prompts[:limit]]
    origin_ = origin.describe([lane], files, say=_say, max_tokens=max_tokens, concurrency=concurrency, limit=limit)
    collected = bench.Collected()
    lanes = Lanes()

    async def work() -> None:
        async with lanes.use(lane, on_progress=_Starting(lane.label)) as endpoint:
            for long in (False, True):
                part = [prompt for prompt in asked if (prompt.context is not None) == long]
                at_once = min(concurrency, 2) if long else concurrency
                if part:
                    await bench.collect(collected, endpoint, part, concurrency=at_once, max_tokens=max_tokens, say=_say)

    whole = _run(work(), lanes)
    if not whole:
        collected.after = None
    summary = bench.summarise(collected)
    result.save(path, "acceptance", origin_, {"complete": whole, **summary})
    print(bench.render(summary, lane.label))
    print(f"\nSaved to {path}")
    if trace is not None:
        print(f"Trace saved to {io.save(Trace(provenance=origin_, requests=[request for _, request in collected.answers]), trace)}")
    _leave(whole)


@app.command()
def speedup(
    recipe: RecipeName = "smollm2",
    draft: Annotated[list[str] | None, typer.Option("--draft", help="bf16 or fp8; repeat to compare several (default: bf16).")] = None,
    k: Annotated[list[int] | None, typer.Option("-k", help="Draft tokens a step; repeat for several (default: the recipe's).")] = None,
    baseline: Annotated[bool, typer.Option(help="Whether the lane without speculation takes part.")] = True,
    draft_folder: Folder = None,
    traced: Annotated[bool, typer.Option("--traced", help="Also run each draft with tracing on and read: what tracing costs.")] = False,
    compiled: Compiled = False,
    pairs: Annotated[int, typer.Option(min=2, help="How many turns each lane has.")] = 20,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 1,
    per_turn: Annotated[
        int | None, typer.Option("--per-turn", min=1, help="Prompts a turn (default: 1 at concurrency 1, else 4 x concurrency).")
    ] = None,
    max_tokens: Tokens = 128,
    kind: Annotated[list[str] | None, typer.Option("--kind", help="chat, maths or code (default: chat). Repeatable.")] = None,
    prompts: Files = None,
    seed: Annotated[int, typer.Option(help="For the order of prompts and lanes.")] = 0,
    output: Output = None,
) -> None:
    """Speed of Eagle3 over the baseline (and of drafts over each other): lanes in turns, pairs, intervals."""
    from contextlib import AsyncExitStack

    from lab import provenance, recipes
    from lab.bench import origin, result
    from lab.bench import speedup as bench
    from lab.bench.prompts import gather
    from lab.serving.command import Lane
    from lab.serving.lanes import Lanes

    path = _place(output, "speedup")
    chosen = origin.with_draft(recipes.get(recipe), draft_folder)
    drafts = cast("list[DraftChoice]", draft or ["bf16"])
    described = [Lane(chosen, "none", compiled=compiled, traced=False)] if baseline else []
    described += [
        Lane(chosen, one, depth, compiled=compiled, traced=with_trace)
        for one in drafts
        for depth in k or [chosen.default_k(one)]
        for with_trace in ([False, True] if traced else [False])
    ]
    files = gather(kind or ["chat"], prompts or ())
    plan = bench.Plan(
        lanes=tuple(described),
        prompts=tuple(prompt for file in files for prompt in file.prompts),
        pairs=pairs,
        concurrency=concurrency,
        per_turn=per_turn or (1 if concurrency == 1 else 4 * concurrency),
        max_tokens=max_tokens,
        seed=seed,
    )
    origin_ = origin.describe(plan.lanes, files, say=_say, seed=seed, rest_s=bench.REST)
    measured = bench.Measured(plan)
    lanes = Lanes()

    async def work() -> None:
        async with AsyncExitStack() as stack:
            endpoints = [
                await stack.enter_async_context(lanes.use(lane, on_progress=_Starting(lane.label))) for lane in plan.lanes
            ]  # held, so that starting one never stops another
            await bench.measure(measured, endpoints, _say)

    whole = _run(work(), lanes)
    summary = bench.summarise(measured)
    result.save(path, "speedup", origin_, {"complete": whole, **summary})
    print(bench.render(summary, provenance.hardware()["cores"]))
    print(f"\nSaved to {path}")
    _leave(whole)
