"""`eagle3-lab bench cost`: why this speed? Measures a grid of K and concurrency, fits the cost model, and says which K to choose."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from lab.errors import LabError

if TYPE_CHECKING:
    from lab.recipes.model import DraftChoice, Recipe
    from lab.serving.command import Lane
    from lab.serving.endpoint import Endpoint


def _most(recipe: Recipe) -> int:
    """The largest batch that a recipe's server takes: its `--max-num-seqs`, else a size beyond all others."""
    flags = dict(recipe.flags)
    return int(flags.get("--max-num-seqs") or 1024)


def cost(
    recipe: Annotated[str, typer.Option("--recipe", help="Which target and drafts.")] = "smollm2",
    draft: Annotated[str, typer.Option("--draft", help="bf16 or fp8.")] = "bf16",
    k: Annotated[list[int] | None, typer.Option("-k", help="Draft tokens a step; repeat (default: 1, 2, 3 and 5).")] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option("--concurrency", help="Requests in flight; repeat (default: 1, 2 and 4).")
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option("--context", help="Long prompts, by tokens; repeat (default: 1024, 2048, 4096; 0 for none).")
    ] = None,
    hold_k: Annotated[list[int] | None, typer.Option("--hold-k", help="K kept out of the fit (default: the middle one).")] = None,
    hold_concurrency: Annotated[
        list[int] | None, typer.Option("--hold-concurrency", help="Concurrencies kept out of the fit (default: the middle one).")
    ] = None,
    draft_folder: Annotated[Path | None, typer.Option("--draft-folder", help="Another Eagle3 draft for the recipe's target.")] = None,
    compiled: Annotated[bool, typer.Option("--compiled/--eager", help="vLLM's torch.compile, or eager mode.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="How often each cell is measured, in turns with the others.")] = 3,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=8, help="New tokens for each prompt.")] = 64,
    kind: Annotated[list[str] | None, typer.Option("--kind", help="chat, maths or code (default: all). Repeatable.")] = None,
    seed: Annotated[int, typer.Option(help="For the order of prompts and lanes.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", help="Result file (default: a new one in the cache's folder 'results').")
    ] = None,
) -> None:
    """Why this speed: what a step costs by K, batch and context, the break-even acceptance, and the best K for each batch size."""
    from lab import recipes
    from lab.bench import cli, cost_report, grid, origin, result
    from lab.bench.prompts import KINDS, LONG, gather
    from lab.serving import memory
    from lab.serving.command import Lane
    from lab.serving.lanes import Lanes

    path = cli._place(output, "cost")
    chosen = origin.with_draft(recipes.get(recipe), draft_folder)
    ks, concurrencies = tuple(k or (1, 2, 3, 5)), tuple(concurrency or (1, 2, 4))
    contexts = [one for one in (context if context is not None else (1024, 2048, 4096)) if one]
    if draft == "none":
        raise LabError("A cost model needs a draft.", todo="Choose --draft bf16 or --draft fp8.")
    lanes_of = (
        Lane(chosen, "none", compiled=compiled, traced=True),
        Lane(chosen, cast("DraftChoice", draft), max(ks), compiled=compiled, traced=True),
    )
    files, long = gather(kind or KINDS), gather([LONG]) if contexts else []
    plan = grid.Plan(
        *lanes_of,
        ks=ks,
        concurrencies=concurrencies,
        prompts=tuple(prompt for file in files for prompt in file.prompts),
        long=tuple(prompt for file in long for prompt in file.prompts if prompt.context in contexts),
        rounds=rounds,
        max_tokens=max_tokens,
        seed=seed,
    )
    if missing := [one for one in contexts if one not in {prompt.context for prompt in plan.long}]:
        there = sorted({prompt.context for file in long for prompt in file.prompts if prompt.context})
        raise LabError(f"There are no prompts for a context of {missing[0]} tokens.", todo=f"Choose from {', '.join(map(str, there))}.")
    held = cost_report.Held(
        tuple(hold_k) if hold_k is not None else cost_report.middle(ks),
        tuple(hold_concurrency) if hold_concurrency is not None else cost_report.middle(concurrencies),
        cost_report.middle(contexts),
    )
    origin_ = origin.describe(lanes_of, [*files, *long], say=cli._say, seed=seed, rounds=rounds, max_tokens=max_tokens)
    measured, lanes = grid.Measured(plan), Lanes()

    @asynccontextmanager
    async def use(lane: Lane) -> AsyncIterator[Endpoint]:
        async with lanes.use(lane, on_progress=cli._Starting(lane.label)) as endpoint:
            yield endpoint
        if not alternate:
            await lanes.stop(lane)

    most = memory.most_engines(chosen.gpu_share)
    alternate = most is None or most >= len(lanes_of)
    whole = cli._run(grid.measure(measured, use, cli._say, alternate=alternate), lanes)
    summary = cost_report.summarise(measured, held, max_batch=_most(chosen))
    result.save(path, "cost", origin_, {"complete": whole, "alternating": alternate, **summary})
    print(cost_report.render(summary))
    if not alternate:
        print("\nThe lanes ran one after the other, not in turns: a drift of the machine is in the speed-ups.")
    print(f"\nSaved to {path}")
    cli._leave(whole)


def whatif(
    trace: Annotated[Path, typer.Argument(help="A saved trace of greedy requests with a draft.")],
) -> None:
    """Would another K have been better? Steps of the trace's answers with every smaller K: exact, or between which bounds."""
    from lab.bench import result
    from lab.trace import io
    from lab.trace import whatif as replaying

    found = [request for request in io.load(trace).requests if not request.settings.get("temperature")]
    answers = [replaying.answer_of(request.steps) for request in found]
    depth = max((answer.depth for answer in answers), default=0)
    if not depth:
        raise LabError(
            f"{trace.name} holds no greedy request with a draft.",
            why="Above temperature 0 another K draws another answer; without a draft there is nothing to replay.",
            todo="Trace one: eagle3-lab trace PROMPT --output FILE.",
        )
    rows = []
    for one in replaying.replays([request.steps for request in found], range(1, depth + 1)):
        low, high = one.bounds or (0.0, 0.0)
        steps = str(one.fewest) if one.exact else f"{one.fewest} to {one.most}"
        span = "exact" if one.exact else f"{low:.2f} to {high:.2f}"
        rows.append([f"K={one.k}", steps, f"{one.tokens_per_step or 0:.2f}", span])
    print(f"{len(found)} greedy answer{'s' if len(found) > 1 else ''}, tokens a step as in the answer (the target's own included)\n")
    print(result.table(["", "decode steps", "tokens a step", "certain"], rows))
    if any(row[3] != "exact" for row in rows):
        print("\nWhere a range stands, the run does not know what the draft would have proposed inside its accepted drafts;")
        print("`eagle3-lab bench cost` asks with drafts withheld, which tells exactly.")
