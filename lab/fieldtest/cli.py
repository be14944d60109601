"""`eagle3-lab fieldtest`: doctor, every lane, losslessness, traces and a sweep on this machine, and one archive to send back.

Exit codes for scripts: 0 every stage is done, 3 some failed, were skipped or did not fit into the budget (the archive says which), 1 it
could not begin or write its archive, 2 wrong options, 130 stopped by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP. The same command goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

import typer

from lab import env, recipes
from lab.errors import LabError, disk_error
from lab.recipes.model import DraftChoice, Recipe

if TYPE_CHECKING:
    from lab.bench.published import Published
    from lab.bench.workload import Workload
    from lab.fieldtest.plan import Settings
    from lab.fieldtest.run import Test

app = typer.Typer(add_completion=False)
#: Lengths, concurrencies, requests and warm-ups for each one in flight, prompts, new tokens: on GPUs as published, on a CPU less.
GPU = ("1K/1K", "4,8,16,32,64", 10, 2, 12, 128)
CPU = ("128/128", "1,2,4", 4, 1, 8, 64)
QUICK = ("64/16", "1,2", 1, 0, 2, 16)


def _say(line: str, stream: TextIO | None = None) -> None:
    with contextlib.suppress(OSError):  # a terminal or a pipe that is gone must not end the test
        print(line, file=stream or sys.stderr, flush=True)


@app.command(epilog="Exit codes: 0 whole, 3 stages are missing, 1 it could not begin, 130, 143 or 129 stopped. The same command goes on.")
def fieldtest(
    recipe: Annotated[str, typer.Argument(help=f"Which recipe: {', '.join(sorted(recipes.RECIPES))}.", metavar="RECIPE")],
    draft: Annotated[
        list[str] | None, typer.Option("--draft", help="Lanes: none, bf16 or fp8. Repeatable.", show_default="all that the recipe has")
    ] = None,
    tp: Annotated[int, typer.Option("--tp", min=0, help="GPUs of each server.", show_default="the recipe's")] = 0,
    budget: Annotated[float, typer.Option("--budget", min=0.0, help="Minutes that this run may take; 0: no limit.")] = 0.0,
    concurrency: Annotated[
        str, typer.Option("--concurrency", help="Requests in flight, with commas.", show_default=f"{GPU[1]}; {CPU[1]} on a CPU")
    ] = "",
    lengths: Annotated[
        str, typer.Option("--lengths", help="Input/output tokens.", show_default=f"the recipe's, else {GPU[0]}; {CPU[0]} on a CPU")
    ] = "",
    seeds: Annotated[str, typer.Option("--seeds", help="One measurement of each cell a seed, with commas; intervals need two.")] = "0",
    prompts_per: Annotated[
        int, typer.Option("--prompts-per", min=0, help="Requests for each one in flight.", show_default=f"{GPU[2]}; {CPU[2]} on a CPU")
    ] = 0,
    least: Annotated[int, typer.Option("--least", min=1, help="Requests of a cell at least.")] = 1,
    warm_ups: Annotated[
        int | None,
        typer.Option("--warm-ups-per", min=0, help="Warm-ups for each one in flight.", show_default=f"{GPU[3]}; {CPU[3]} on a CPU"),
    ] = None,
    chat: Annotated[int, typer.Option("--chat", min=0, help="Sweep the shipped chat prompts too, with this many new tokens; 0: no.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="The smallest of everything: to see that it works, not to measure.")] = False,
    hardware: Annotated[str, typer.Option("--hw", help="Name of the machine for the files, for example MI355X.")] = "",
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FOLDER", help="Folder of the test: what is done in it is kept.", show_default="cache"),
    ] = None,
    archive: Annotated[
        Path | None, typer.Option("--archive", metavar="FILE.zip", help="The archive.", show_default="beside the folder")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the stages with estimated times, run nothing.")] = False,
) -> None:
    """Test a recipe on this machine, unattended: doctor, lanes, losslessness, sweep, traces; one archive with a report."""
    from lab.bench.workload import numbers
    from lab.fieldtest import compare, plan
    from lab.serving.lanes import Lanes

    chosen = recipes.get(recipe)
    length, at, each, usual_warm_ups, asked, tokens = _sizes(chosen, quick)
    servers = Lanes()
    if not math.isfinite(budget):
        raise LabError(f"{budget} is no number of minutes.", todo="Leave --budget out, or 0, for no limit.")
    settings = plan.Settings(
        recipe=chosen,
        drafts=tuple(cast(DraftChoice, one) for one in draft or chosen.draft_choices()),
        workload=_workload(lengths or length),
        concurrencies=tuple(numbers(concurrency or at, "concurrency")),
        prompts=_prompts(asked),
        tp=tp,
        seeds=tuple(numbers(seeds, "seeds", least=0, most=1 << 31)),
        prompts_per=prompts_per or each,
        least=least,
        warm_ups_per=usual_warm_ups if warm_ups is None else warm_ups,
        max_tokens=tokens,
        verify_at=(1, 2) if quick else (1, 4),
        hw=hardware or _hardware(),
        texts=_texts(chat),
    )
    plain = [settings.lane(one) for one in settings.drafts]
    fits = len(plain) * chosen.gpu_share <= 1.0 if chosen.hardware else servers.fit_together(plain)
    settings = plan.replace(settings, together=fits)
    table = compare.table_for(chosen)
    stages = plan.stages(settings, table)
    if dry_run:
        _show(settings, stages, table, budget)
        return
    _can_run(settings)
    folder = (output or env.cache_dir() / "fieldtests" / f"{chosen.name}{'-quick' if quick else ''}").absolute()
    target = (archive or folder.with_name(f"fieldtest-{folder.name}.zip")).absolute()
    how, missing = _run(settings, stages, folder, target, table, servers, budget)
    if how not in ("whole", "budget"):
        raise typer.Exit(128 + signal.Signals[how].value)
    if missing:
        raise typer.Exit(3)


def _sizes(recipe: Recipe, quick: bool) -> tuple[str, str, int, int, int, int]:
    if quick:
        return QUICK
    sizes = GPU if recipe.hardware else CPU
    return (f"{recipe.isl}/{recipe.osl}", *sizes[1:]) if recipe.isl and recipe.osl else sizes


def _workload(text: str) -> Workload:
    from lab.bench.workload import lengths

    found = lengths(text)
    if len(found) != 1:
        raise LabError("A field test measures one pair of lengths.", todo="Name one, for example --lengths 1K/1K.")
    return found[0]


def _texts(chat: int) -> tuple[Workload, ...]:
    from lab.bench.prompts import shipped
    from lab.bench.workload import Workload

    return (Workload("chat", None, chat, shipped("chat")),) if chat else ()


def _prompts(most: int) -> Any:
    from lab.bench.prompts import KINDS, shipped

    files = [shipped(kind).prompts for kind in KINDS]
    return tuple(files[place % len(files)][place // len(files)] for place in range(most))


def _hardware() -> str:
    from lab import provenance
    from lab.doctor.machine import this_machine

    machine = this_machine()
    name = next(iter(provenance.gpus()), machine.arch)
    return f"{machine.gpus} x {name}" if machine.gpus and name else ""


def _can_run(settings: Settings) -> None:
    """Refuse what cannot work before hours are spent on it."""
    from lab.doctor.machine import this_machine
    from lab.serving.process import launcher

    launcher()
    if settings.recipe.hardware and this_machine().platform == "cpu":
        raise LabError(
            f"Recipe '{settings.recipe.name}' needs a GPU, and none is seen here.",
            why=f"It was made for {', '.join(settings.recipe.hardware)}.",
            todo=f"Run it there; here, --dry-run shows the plan, and eagle3-lab doctor {settings.recipe.name} what can be checked without.",
        )


def _show(settings: Settings, stages: Any, table: Published | None, budget: float) -> None:
    from lab.fieldtest import plan
    from lab.fieldtest.run import _span

    rows, total = plan.schedule(settings, stages), 0.0
    print(f"Field test of {settings.recipe.title}: {len(rows)} stages, times estimated")
    for stage, seconds in rows:
        total += seconds
        late = "  does not fit into the budget" if budget and total > 60 * budget else ""
        print(f"  {_span(seconds):>7}  {stage.name:26} {stage.title}{late}")
    base = "published throughputs of the target" if table else "rough guesses"
    print(f"  {_span(total):>7}  together; starts and throughputs are {base}, and what a run measures corrects them.")


def _run(
    settings: Settings, stages: Any, folder: Path, target: Path, table: Published | None, servers: Any, budget: float
) -> tuple[str, int]:
    """Run, stop the engines, write the archive; how it ended, and how many stages are not done."""
    from lab import provenance
    from lab.bench import result
    from lab.fieldtest import run
    from lab.fieldtest.stages import Stages

    with run.locked(folder):
        result.check_writable(target)
        origin = provenance.collect(recipe=settings.recipe.name, budget_minutes=budget)
        test = run.Test(settings, stages, folder, origin, provenance.surroundings(origin))
        run.load(test, _say)
        _say(f"Folder: {folder}")
        work = Stages(settings, folder, servers, _say)

        async def all_of_it() -> str:
            try:
                return await run.run(
                    test, work, _say, budget=60 * budget if budget else None, warm=work.warm, after=lambda _stage: work.keep_logs()
                )
            finally:
                await work.close()
                await servers.close()

        try:
            how = asyncio.run(all_of_it())
        except KeyboardInterrupt:
            how = "SIGINT"
        finally:
            servers.shutdown()
        _finish(test, target, table)
    missing = [stage for stage in stages if not test.is_done(stage)]
    for stage in missing:
        record = test.records.get(stage.name, {"state": "not begun", "reason": ""})
        _say(f"{record['state']}: {stage.title}{': ' if record['reason'] else ''}{record['reason']}", sys.stdout)
    if missing:
        _say("The same command goes on from here.", sys.stdout)
    _say(
        f"{len(stages) - len(missing)} of {len(stages)} stages are done.\nReport: {folder / 'report.html'}\nTo send back: {target}",
        sys.stdout,
    )
    return how, len(missing)


def _finish(test: Test, target: Path, table: Published | None) -> None:
    """The report in the folder, `sweep.csv` of all lanes, what is worth keeping under its names, and the archive."""
    from lab import provenance
    from lab.bench import agg
    from lab.fieldtest import archive, keep, report, scrub

    rows, _ = report.results(test.folder)
    try:
        if rows:
            provenance.write_text(test.folder / "sweep" / "sweep.csv", agg.to_csv(rows))
        keep.keep(test, rows, scrub.of_machine())
        page = report.build(test, table)
        provenance.write_text(test.folder / "report.html", archive.with_script(page))
    except OSError as error:
        raise disk_error(error, test.folder, instead="run it again with another --output") from error
    archive.pack(test.folder, target, scrub.of_machine(), page)
