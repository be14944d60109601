"""`eagle3-lab duel`: two drafts on the same prompts, what each had accepted where, and one plain sentence about it.

    eagle3-lab duel                        the recipe's BF16 draft against its FP8 one
    eagle3-lab duel bf16 ./my-draft        against a draft of your own for the same target
    eagle3-lab duel bf16 bf16-low          against itself without the low feature level
    eagle3-lab duel --levels               against itself without each level in turn
    eagle3-lab duel one.jsonl other.jsonl  two saved traces of the same prompts; no engine is started

The first draft is the one that all others are compared with. Results are JSON, and one HTML page to send to a colleague.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lab import env, recipes
from lab.errors import LabError

if TYPE_CHECKING:
    from lab.bench.contestants import Contestant
    from lab.bench.duel import Measured
    from lab.bench.prompts import Prompt
    from lab.serving.client import Event
    from lab.serving.endpoint import Endpoint
    from lab.serving.lanes import Lanes

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def duel(
    drafts: Annotated[
        list[str] | None,
        typer.Argument(
            help="Two drafts or more: bf16, fp8, bf16-low, a draft's folder; or saved traces (default: bf16 fp8).", metavar="DRAFT"
        ),
    ] = None,
    recipe: Annotated[str, typer.Option("--recipe", help="Which target and drafts.")] = recipes.DEFAULT,
    levels: Annotated[
        bool, typer.Option("--levels", help="Against the first draft without its low, middle and high feature level.")
    ] = False,
    k: Annotated[int | None, typer.Option("-k", help="Draft tokens a step (default: the first draft's recipe's).")] = None,
    compiled: Annotated[
        bool | None, typer.Option("--compiled/--eager", help="vLLM's torch.compile, or eager mode (default: the recipe's).")
    ] = None,
    kind: Annotated[list[str] | None, typer.Option("--kind", help="chat, maths, code or long (default: the first three).")] = None,
    prompts: Annotated[
        list[Path] | None, typer.Option("--prompts", metavar="FILE", help="Prompts of your own instead (JSON lines).")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many prompts of each file.")] = 8,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="New tokens for each prompt.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy, so that both drafts answer the same text.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="For the order of the drafts, and for sampling.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests in flight; more than one only with --no-speed.")] = 1,
    speed: Annotated[bool, typer.Option("--speed/--no-speed", help="Compare speeds too, or not: the machine has other work.")] = True,
    output: Annotated[
        Path | None, typer.Option("--output", help="Result file (default: a new one in the cache's folder 'results').")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Page to write (default: beside the result file).")] = None,
    traces: Annotated[Path | None, typer.Option("--traces", metavar="FOLDER", help="Also save each draft's trace here.")] = None,
) -> None:
    """Compare drafts on the same prompts, token by token: better, worse, or no difference that this sample can show."""
    from lab.bench import duel as core
    from lab.bench import result
    from lab.bench.duel_text import render

    names = drafts or ["bf16"]
    path = output or env.cache_dir() / "results" / f"duel-{time.strftime('%Y%m%d-%H%M%S')}.json"
    page = html or path.with_suffix(".html")
    if page.absolute() == path.absolute():
        raise LabError(f"The result and its page cannot both be {path}.", todo="Give --output a name that ends in .json.")
    result.check_writable(path)
    result.check_writable(page)
    recordings = [name.endswith(".jsonl") for name in names]
    if any(recordings):
        if not all(recordings):
            raise LabError("A saved trace and a draft cannot be compared.", todo="Give two traces, or two drafts.")
        from lab import provenance
        from lab.trace import io

        loaded = [(Path(name).stem, io.load(name)) for name in names]
        report = core.from_traces(loaded)
        called = [each["name"] for each in report["contestants"]]
        sources = [{"name": name, "provenance": trace.provenance} for name, (_, trace) in zip(called, loaded, strict=True)]
        origin = provenance.collect(recordings=sources)
        whole = True
    else:
        if levels:
            from lab.recipes.model import LEVELS

            names = [*names, *(f"{names[0]}-{level}" for level in LEVELS)]
        elif not drafts:
            names = ["bf16", "fp8"]
        if traces is not None:
            result.check_writable(traces / "traces")
        report, origin, whole = _measure(
            names, recipe, k=k, compiled=compiled, kinds=kind, files=prompts, limit=limit, max_tokens=max_tokens,
            temperature=temperature, seed=seed, speed=speed, concurrency=concurrency, traces=traces,
        )  # fmt: skip
    _save(report, origin, path, page)
    print(render(report))
    print(f"\nSaved to {path}\nPage: {page}")
    if not whole:
        raise typer.Exit(130)


def _save(report: dict[str, Any], origin: dict[str, Any], path: Path, page: Path) -> None:
    from lab import provenance
    from lab.bench import result
    from lab.bench.duel import REPORT
    from lab.bench.duel_page import html

    result.save(path, REPORT, origin, report, indent=None)
    try:
        provenance.write_text(page, html(report, origin))
    except OSError as error:
        raise LabError(
            f"The page could not be saved to {page}.", why=f"{error.strerror or error}.", todo="The JSON file is whole."
        ) from error


def _measure(
    names: list[str], recipe: str, *, k: int | None, compiled: bool | None, kinds: list[str] | None, files: list[Path] | None, limit: int,
    max_tokens: int, temperature: float, seed: int, speed: bool, concurrency: int, traces: Path | None,
) -> tuple[dict[str, Any], dict[str, Any], bool]:  # fmt: skip
    """Start the engines, measure, stop them: the report, its provenance, and whether it came to its end."""
    from lab import provenance
    from lab.bench import duel as core
    from lab.bench import origin
    from lab.bench.cli import _say
    from lab.bench.contestants import contestant, one_setting
    from lab.bench.prompts import KINDS, gather
    from lab.serving.lanes import Lanes

    contestants, changed = one_setting([contestant(name, recipes.get(recipe), k, compiled=compiled) for name in names])
    for change in changed:
        _say(f"One setting for all: {change}.")
    gathered = gather(kinds or KINDS, files or ())
    asked = tuple(prompt for file in gathered for prompt in file.prompts[:limit])
    # Checkpoints are made before any engine starts, so that one which cannot be had is found out at once.
    weights = {each.name: origin.weights(each.lane.recipe.drafts[each.lane.draft], _say) for each in contestants}  # type: ignore[index]
    lanes = Lanes()
    # Lanes that take no turns need not be there at once.
    together = concurrency == 1 and lanes.fit_together([each.lane for each in contestants])
    plan = core.Plan(tuple(contestants), asked, max_tokens, temperature, seed, together, speed, concurrency, tuple(changed))
    measured = core.Measured(plan)
    whole = True
    try:
        asyncio.run(_run(measured, lanes, temperature, seed))
    except (KeyboardInterrupt, asyncio.CancelledError):
        _say("Interrupted: what was measured is kept.")
        whole = False
    finally:
        lanes.shutdown()
    shared = provenance.collect(
        recipe=origin.plain(contestants[0].lane.recipe),
        target=origin.weights(contestants[0].lane.recipe.target),
        contestants=[{"name": each.name, "lane": each.lane.key, "weights": weights[each.name]} for each in contestants],
        prompts={one.name: {"sha256": one.sha256, "count": min(limit, len(one.prompts))} for one in gathered},
        settings={"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "concurrency": concurrency},
    )
    about = core.about(contestants, shared)
    if traces is not None:
        _save_traces(measured, contestants, about, traces)
    return core.summarise(measured, about), shared, whole


async def _run(measured: Measured, lanes: Lanes, temperature: float, seed: int) -> None:
    from lab.bench import duel as core
    from lab.bench.cli import _say, _Starting
    from lab.serving.client import generate

    plan = measured.plan
    endpoints: dict[int, Endpoint] = {}
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):  # minutes of measuring are not lost to a closed terminal
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)

    def ask(index: int, prompt: Prompt, max_tokens: int) -> AsyncIterator[Event]:
        return generate(
            endpoints[index], prompt.text, temperature=temperature, max_tokens=max_tokens, seed=seed if temperature > 0 else None
        )

    async def turns(only: int | None) -> None:
        async for turn in core.measure(measured, ask, only=only):
            length = f"{turn.request.usage_completion or 0} tokens in {turn.request.elapsed or 0:.1f} s"
            _say(f"{turn.done}/{turn.turns} {plan.contestants[turn.contestant].name}, '{turn.prompt.id}': {length}")

    async def ready(stack: AsyncExitStack, index: int) -> None:
        lane = plan.contestants[index].lane
        endpoints[index] = await stack.enter_async_context(lanes.use(lane, on_progress=_Starting(lane.label)))
        await core.warm_up(plan, index, ask)

    several = range(len(plan.contestants))
    if plan.alternate:
        async with AsyncExitStack() as stack:
            for index in several:
                await ready(stack, index)
            await turns(None)
        return
    for index in several:  # one after the other
        async with AsyncExitStack() as stack:
            await ready(stack, index)
            await turns(index)


def _save_traces(measured: Measured, contestants: list[Contestant], about: list[dict[str, Any]], folder: Path) -> None:
    """A trace of each draft; one that cannot be saved is said, since the report is still to come."""
    from lab.bench.cli import _say
    from lab.bench.result import told_apart
    from lab.trace.io import SUFFIX, save
    from lab.trace.model import Trace

    names = told_apart([each.name.lower().replace(" ", "-").replace("/", "-") for each in contestants])
    for name, answers, known in zip(names, measured.answers, about, strict=True):
        if answers:
            try:
                _say(f"Trace saved to {save(Trace(provenance=known, requests=list(answers.values())), folder / f'{name}{SUFFIX}')}")
            except LabError as error:
                _say(str(error))
