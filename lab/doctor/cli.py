"""`eagle3-lab doctor`: examine a recipe, a command line or a running server before anybody waits for it.

Exit codes: 0 no error was found, 3 at least one (with --strict a warning counts too, unless the recipe expects it), 1 the doctor could not
look (a server that does not answer, say), 2 the doctor itself was called wrongly.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated, cast

import typer

from lab import recipes
from lab.errors import LabError
from lab.recipes.model import DraftChoice

app = typer.Typer(add_completion=False, help="Say what will fail, what will be silently wrong, and what needs care.")


@app.command(
    epilog="Exit codes: 0 no error, 3 errors (with --strict warnings too), 1 it could not look, 2 wrong usage. "
    "A command line is given in quotes, or after --."
)
def doctor(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE | COMMAND LINE | URL]", help="What to examine (default: the recipe smollm2, every lane)."),
    ] = None,
    draft: Annotated[str | None, typer.Option("--draft", help="Of a recipe: none, bf16 or fp8 (default: every lane).")] = None,
    k: Annotated[int | None, typer.Option("-k", "--k", help="Draft tokens a step (default: the recipe's).")] = None,
    tp: Annotated[int, typer.Option("--tp", min=0, help="GPUs (--tensor-parallel-size) of a recipe.", show_default="the recipe's")] = 0,
    gpu: Annotated[str | None, typer.Option("--gpu", help="Ask about another machine: MI355X, MI300X, gfx942, 9.0 (CUDA), cpu.")] = None,
    vllm: Annotated[str | None, typer.Option("--vllm", help="Ask about another vLLM, for example 0.24.")] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0, help="Of a server: count only what happens in so many seconds.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as errors, except those that the recipe expects.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also name the place in vLLM that each finding is about.")] = False,
    rules: Annotated[bool, typer.Option("--rules", help="List the rules instead.")] = False,
) -> None:
    """Examine a recipe, a vllm serve line or a running server."""
    from lab.doctor import gather, report
    from lab.doctor.machine import Machine
    from lab.doctor.rule import all_rules
    from lab.doctor.subject import Subject

    if rules:
        for one in all_rules().values():
            print(f"{one.level:8} {one.name:26} {one.title}")
        return
    words = what or [recipes.DEFAULT]
    subjects: list[Subject]
    if len(words) == 1 and words[0].startswith(("http://", "https://")):
        from lab.doctor.server import ask

        running = asyncio.run(ask(words[0], seconds=seconds))
        elsewhere = Machine(vllm=vllm or running.version, assumed="a server's machine is not examined: run the doctor there for that")
        subjects = [Subject(elsewhere, server=running, source=f"the server at {running.url}")]
    elif len(words) == 1 and words[0] in recipes.RECIPES:
        recipe = recipes.get(words[0])
        choices = recipe.draft_choices() if draft is None else (cast(DraftChoice, draft),)
        machine = gather.machine_of(recipe, gpu, vllm)
        subjects = [gather.from_recipe(recipe, one, k=k, tp=tp, machine=machine) for one in choices]
    elif draft is not None or k is not None or tp:
        raise LabError(f"There is no recipe called '{words[0]}'.", todo=f"Known recipes: {', '.join(sorted(recipes.RECIPES))}.")
    else:
        subjects = [gather.from_line(words[0] if len(words) == 1 else words, gpu=gpu, vllm=vllm)]
    found = [report.report(subject) for subject in subjects]
    if as_json:
        print(json.dumps({"reports": [report.as_json(one) for one in found]}, indent=1, ensure_ascii=False))
    else:
        print("\n\n".join(report.text(one, verbose=verbose) for one in found))
    sys.stdout.flush()
    raise typer.Exit(max(one.exit_code(strict=strict) for one in found))
