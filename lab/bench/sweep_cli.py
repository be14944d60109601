"""`eagle3-lab bench sweep` and `bench open`: run a sweep with vLLM's own client, and show results, ours or InferenceX's."""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lab import env
from lab.errors import LabError

if TYPE_CHECKING:
    from lab.bench.published import Published
    from lab.bench.sweep import Plan
    from lab.bench.sweep_run import Sweep

Table = Annotated[
    list[str] | None,
    typer.Option("--published", metavar="NAME", help="Show published MI355X numbers beside: kimi-k2.5, minimax-m2.5. Repeatable."),
]
Csv = Annotated[Path | None, typer.Option("--csv", help="Also write all results as one CSV file.")]
Html = Annotated[Path | None, typer.Option("--html", help="Also write the charts as one HTML file (plotly's script included, 5 MB).")]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def sweep(
    recipe: Annotated[str, typer.Option("--recipe", help="Which target and drafts.")] = "smollm2",
    draft: Annotated[list[str] | None, typer.Option("--draft", help="bf16 or fp8; repeat for several (default: bf16).")] = None,
    k: Annotated[list[int] | None, typer.Option("-k", help="Draft tokens a step; repeat for several (default: the recipe's).")] = None,
    baseline: Annotated[bool, typer.Option(help="Whether the lane without speculation takes part.")] = True,
    draft_folder: Annotated[Path | None, typer.Option("--draft-folder", help="Another Eagle3 draft for the recipe's target.")] = None,
    tp: Annotated[int, typer.Option("--tp", min=0, help="GPUs of each server (0: the recipe's).")] = 0,
    compiled: Annotated[bool | None, typer.Option("--compiled/--eager", help="Mode of all lanes (default: the recipe's).")] = None,
    concurrency: Annotated[str, typer.Option("--concurrency", help="Requests in flight, 1 to 1024, with commas.")] = "1,2,4",
    lengths: Annotated[
        str, typer.Option("--lengths", help='Input/output tokens of random prompts: "128/128,1K/1K"; "" for none.')
    ] = "128/128",
    kind: Annotated[list[str] | None, typer.Option("--kind", help="Also the lab's own prompts: chat, maths, code, long.")] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option("--prompts", metavar="FILE", help="Also prompts of your own: JSON lines, the lab's form or Spec-Bench's."),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="New tokens for prompts from files, which may end earlier.")] = 128,
    seeds: Annotated[str, typer.Option("--seeds", help="One round of all cells each, with commas; intervals need two.")] = "0",
    prompts_per: Annotated[int, typer.Option("--prompts-per", min=1, help="Requests for each one in flight (published: 10).")] = 10,
    least: Annotated[int, typer.Option("--least", min=1, help="Requests of a cell at least: --prompts-per gives few at 1 in flight.")] = 1,
    warmups_per: Annotated[
        int, typer.Option("--warmups-per", min=0, help="Unmeasured requests for each one in flight (published: 2).")
    ] = 2,
    low: Annotated[float, typer.Option("--low", help="Shortest length as a share of --lengths (published: 0.8).")] = 0.8,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.0,
    loops: Annotated[bool, typer.Option(help="Acceptance also without repeated 8-grams: drafts' cells once more on a traced lane.")] = True,
    hardware: Annotated[str, typer.Option("--hw", help="Name of the machine for the files (default: the processor's).")] = "",
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FOLDER", help="Folder of the sweep: finished cells in it are kept.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the cells and the client's command, measure nothing.")] = False,
    published: Table = None,
    html: Html = None,
) -> None:
    """Measure lanes over concurrencies and lengths with vLLM's own benchmark client; goes on where it stopped."""
    from lab import recipes
    from lab.bench import origin, sweep_run
    from lab.bench.sweep import Plan
    from lab.bench.workload import lengths as lengths_of
    from lab.bench.workload import numbers
    from lab.serving.command import Lane
    from lab.serving.lanes import Lanes

    chosen = origin.with_draft(recipes.get(recipe), draft_folder)
    mode = chosen.compiled if compiled is None else compiled
    drafts: list[Any] = draft or [*chosen.drafts][:1]
    lanes = [Lane(chosen, "none", compiled=mode, traced=False, tp=tp)] if baseline else []
    lanes += [Lane(chosen, one, depth, mode, False, tp) for one in drafts for depth in k or [chosen.default_k(one)]]
    plan = Plan(
        lanes=tuple(lanes),
        workloads=(*lengths_of(lengths), *_files(kind or [], prompts or [], max_tokens)),
        concurrencies=tuple(numbers(concurrency, "concurrency")),
        seeds=tuple(numbers(seeds, "seeds", least=0, most=1 << 31)),
        prompts_per=prompts_per,
        warm_ups_per=warmups_per,
        low=low,
        temperature=temperature,
        loops=loops,
        least=least,
    )
    tables = _tables(published)
    servers = Lanes()
    together = servers.fit_together(plan.lanes)
    if dry_run:
        _describe(plan, together)
        return
    found = sweep_run.prepare(plan, output, results=env.cache_dir() / "results", say=_say, together=together, hw=hardware)
    _say(f"{len(found.rows)} cells, {found.count('earlier')} of them measured before, in {found.folder}")
    whole = True
    try:
        asyncio.run(_watched(found, servers))
    except KeyboardInterrupt:
        whole = False
        _say("Interrupted: what was measured is kept, and the same command goes on from here.")
    finally:
        servers.shutdown()
    _show(found.results, tables)
    for row in found.rows:
        if row.state in ("failed", "refused"):
            print(f"{row.state}: {row.cell.label}: {row.reason}")
    print(f"\nFiles (vLLM's, InferenceX's agg_*.json, sweep.csv): {found.folder}")
    _charts(found.results, tables, html)
    if not whole:
        raise typer.Exit(130)
    if found.count("failed"):
        raise typer.Exit(1)


async def _watched(found: Sweep, servers: Any) -> None:
    """Run the sweep and say what each cell came to."""
    from lab.bench import sweep_run

    said: dict[int, str] = {}

    async def watch() -> None:
        while True:
            for place, row in enumerate(found.rows):
                if said.get(place) != row.state and row.state not in ("waiting", "earlier"):
                    said[place] = row.state
                    speed = f": {row.result['output_tput_per_gpu']:.1f} tok/s" if row.state == "done" and row.result else ""
                    _say(f"[{place + 1}/{len(found.rows)}] {row.state}{speed} {row.cell.label} {row.reason}".rstrip())
            await asyncio.sleep(0.5)

    watcher = asyncio.create_task(watch())
    try:
        await sweep_run.run(found, servers)
        await asyncio.sleep(0.6)
    finally:
        watcher.cancel()


def _files(kinds: list[str], paths: list[Path], max_tokens: int) -> list[Any]:
    from lab.bench.prompts import load, shipped
    from lab.bench.workload import Workload

    return [Workload(Path(file.name).stem, None, max_tokens, file) for file in [*map(shipped, kinds), *map(load, paths)]]


def _tables(names: list[str] | None) -> list[Published]:
    from lab.bench import published

    return [published.table(name) for name in names or []]


def _describe(plan: Plan, together: bool) -> None:
    from lab import checkpoints
    from lab.bench import client
    from lab.serving.endpoint import Endpoint

    cells = plan.cells(together=together)
    print(f"{len(cells)} cells, at most {plan.tokens} output tokens:")
    for cell in cells:
        print(f"  {cell.label}: {cell.prompts} requests after {cell.warm_ups}")
    for name, many, why in plan.refusals():
        print(f"refused: {name} at concurrency {many}: {why}")
    cell = cells[0]
    there = Endpoint("http://127.0.0.1:8000", cell.lane.recipe.name, cell.lane)
    where = checkpoints.location(cell.lane.recipe.target)
    words = client.arguments(cell, there, tokenizer=where, result=Path("result.json"), prompts=Path("prompts.jsonl"))
    print("The first cell's client, but for the server's address and the chat template's tokens:")
    print(shlex.join(["vllm", "bench", "serve", *words]))


def open_files(
    files: Annotated[list[Path], typer.Argument(help="agg_*.json files of the lab or of InferenceX, or folders with them.")],
    published: Table = None,
    csv: Csv = None,
    html: Html = None,
) -> None:
    """Show results from files, ours and others', beside each other, and say what differs between them."""
    from lab.bench import agg

    rows, errors = agg.load(files)
    tables = _tables(published)
    _show(rows, tables)
    for error in errors:
        _say(f"eagle3-lab: {error}")
    if csv is not None:
        _write(csv, agg.to_csv(rows))
        print(f"Written to {csv}")
    _charts(rows, tables, html)
    if errors:
        raise typer.Exit(1)


def _write(path: Path, text: str) -> None:
    from lab import provenance

    try:
        provenance.write_text(path, text)
    except OSError as error:
        raise LabError(f"{path} cannot be written.", why=f"{error.strerror or error}.") from error


def _show(rows: list[dict[str, Any]], tables: list[Published]) -> None:
    from lab.bench.sweep_table import render

    print(render(rows, tables))


def _charts(rows: list[dict[str, Any]], tables: list[Published], path: Path | None) -> None:
    if path is None:
        return
    from lab.bench.sweep_table import page

    _write(path, page(rows, tables))
    print(f"Charts written to {path}")
