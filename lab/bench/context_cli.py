"""`eagle3-lab bench context`: verification's share of a step against context length, on the engine that is here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from lab.recipes.model import DraftChoice


def context(
    recipe: Annotated[str, typer.Option("--recipe", help="Which target and drafts.")] = "smollm2",
    draft: Annotated[str, typer.Option("--draft", help="bf16 or fp8.")] = "bf16",
    k: Annotated[int | None, typer.Option("-k", help="Draft tokens a step (default: the recipe's).")] = None,
    compiled: Annotated[bool, typer.Option("--compiled/--eager", help="vLLM's torch.compile, or eager mode.")] = False,
    length: Annotated[
        list[int] | None, typer.Option("--context", help="Prompt tokens (default: 256, 1024, 2048, 3584 as far as they fit). Repeatable.")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Prompts at each length.")] = 3,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="New tokens for each.")] = 48,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Requests in flight.")] = 1,
    baseline: Annotated[bool, typer.Option(help="Whether the lane without speculation is measured too.")] = True,
    output: Annotated[
        Path | None, typer.Option("--output", help="Result file (default: a new one in the cache's folder 'results').")
    ] = None,
) -> None:
    """Verification's share of a step at growing context lengths, beside the published one."""
    from lab import recipes
    from lab.bench import context as bench
    from lab.bench import origin, result
    from lab.bench.cli import _leave, _place, _run, _say, _Starting
    from lab.bench.prompts import LONG, shipped
    from lab.bench.scoring import Asker
    from lab.errors import LabError
    from lab.serving.command import Lane
    from lab.serving.lanes import Lanes

    path = _place(output, "context")
    chosen = recipes.get(recipe)
    if draft == "none":
        raise LabError("Without a draft nothing is verified.", todo="Choose --draft bf16 or --draft fp8.")
    lane = Lane(chosen, cast("DraftChoice", draft), chosen.default_k(cast("DraftChoice", draft)) if k is None else k, compiled=compiled)
    fits = tuple(one for one in (256, 1024, 2048, 3584) if one + max_tokens <= chosen.max_model_len)
    plan = bench.Plan(tuple(length or fits), chosen.max_model_len, repeats, max_tokens, concurrency)
    plain = Lane(chosen, compiled=compiled)
    file = shipped(LONG)
    origin_ = origin.describe([lane, *([plain] if baseline else [])], [file], say=_say, concurrency=concurrency, max_tokens=max_tokens)
    lanes, rows = Lanes(), []

    async def work() -> None:
        base = None
        if baseline:
            async with lanes.use(plain, on_progress=_Starting(plain.label)) as endpoint, Asker(endpoint) as asker:
                base = await bench.measure(asker, plan, file.prompts, _say)
        async with lanes.use(lane, on_progress=_Starting(lane.label)) as endpoint, Asker(endpoint) as asker:
            found = await bench.measure(asker, plan, file.prompts, _say)
        rows.extend(bench.summarise(found, base))

    whole = _run(work(), lanes)
    if whole:
        body = {
            "lane": lane.key,
            "label": lane.label,
            "k": lane.k,
            "concurrency": concurrency,
            "rows": rows,
            "explanation": bench.explain(rows),
        }
        result.save(path, "context", origin_, body)
        print(f"{lane.label}, concurrency {concurrency}\n\n{bench.render(rows)}\n\nSaved to {path}")
    _leave(whole)
