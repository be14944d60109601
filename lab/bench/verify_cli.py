"""`eagle3-lab verify`: is a draft's lane lossless? Prints what was found and keeps a certificate.

Exit codes for scripts: 0 certified, 1 an error (said on stderr), 2 wrong options, 3 not lossless, 4 undecided, 130 interrupted.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from lab.bench.cli import Compiled, Files, Folder, RecipeName, _leave, _run, _say, _Starting
from lab.errors import LabError

if TYPE_CHECKING:
    from lab.recipes.model import DraftChoice

app = typer.Typer(add_completion=False)
CODES = {"lossless": 0, "not lossless": 3, "undecided": 4}


@app.command()
def verify(
    recipe: RecipeName = "smollm2",
    draft: Annotated[list[str] | None, typer.Option("--draft", help="bf16 or fp8; repeat for several (default: bf16).")] = None,
    k: Annotated[int | None, typer.Option("-k", help="Draft tokens a step (default: the recipe's).")] = None,
    draft_folder: Folder = None,
    compiled: Compiled = False,
    traced: Annotated[bool, typer.Option("--traced/--plain", help="The lane as the page runs it, or as the bench does.")] = True,
    dtype: Annotated[
        Literal["float32"] | None, typer.Option("--dtype", help="Compute in float32: greedy answers must then be identical.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many prompts, from the start of the file.")] = 20,
    prompts: Files = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="New tokens for each greedy answer.")] = 128,
    concurrency: Annotated[
        list[int] | None, typer.Option("--concurrency", help="Requests in flight (default: 1 and 4). Repeatable.")
    ] = None,
    temperature: Annotated[list[float] | None, typer.Option("--temperature", help="Above 0, up to 1 (default: 0.7 and 1).")] = None,
    samples: Annotated[int, typer.Option("--samples", min=0, help="Sampled answers to each of the first prompts; 0: greedy only.")] = 512,
    sample_prompts: Annotated[int, typer.Option("--sample-prompts", min=1, help="How many prompts are sampled.")] = 4,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Certificate file, when one draft is verified (default: the cache's, as the page reads it)."),
    ] = None,
) -> None:
    """Prove that a draft changes nothing: the same tokens as the baseline, or near-ties; at a temperature the same distribution."""
    from lab import recipes
    from lab.bench import certificate, lossless, origin, result
    from lab.bench.prompts import gather
    from lab.bench.scoring import Asker
    from lab.serving.command import Lane
    from lab.serving.lanes import Lanes

    files = gather(["chat"], prompts or ())
    plan = lossless.Plan(
        prompts=tuple(prompt for file in files for prompt in file.prompts)[:limit],
        concurrency=tuple(concurrency or (1, 4)),
        max_tokens=max_tokens,
        temperatures=tuple(temperature or (0.7, 1.0)) if samples else (),
        samples=samples,
        sample_prompts=sample_prompts,
    )
    chosen = lossless.with_dtype(origin.with_draft(recipes.get(recipe), draft_folder), dtype)
    drafts = cast("list[DraftChoice]", draft or ["bf16"])
    if "none" in drafts:
        raise LabError("The baseline is what a draft is compared with.", todo="Choose --draft bf16 or --draft fp8.")
    lanes_ = [Lane(chosen, one, chosen.default_k(one) if k is None else k, compiled=compiled, traced=traced) for one in drafts]
    if output is not None and len(lanes_) > 1:
        raise LabError("--output names one file, and several drafts are to be verified.", todo="Leave it out, or verify one at a time.")
    reference = lossless.reference(chosen, compiled=compiled)
    identities = {}
    for lane in lanes_:
        known = certificate.identity(lane, say=_say)
        assert known is not None
        identities[lane.key] = known
        result.check_writable(output or certificate.place(certificate.hashed(known)))
    origin_ = origin.describe([*lanes_, reference], files, say=_say, prompts_used=[prompt.id for prompt in plan.prompts])
    lanes, verdicts = Lanes(), list[str]()

    async def work() -> None:
        async with lanes.use(reference, on_progress=_Starting("Reference")) as there, Asker(there) as baseline:
            base = await lossless.ask_baseline(baseline, plan, _say)
            for lane in lanes_:
                async with lanes.use(lane, on_progress=_Starting(lane.label)) as here, Asker(here) as asker:
                    body = await lossless.check(lane, asker, baseline, base, plan, _say)
                path = certificate.save(lane, identities[lane.key], origin_, body, output)
                verdicts.append(body["verdict"])
                print(
                    f"{lossless.render(body, lane.label)}\n\nCertificate {certificate.hashed(identities[lane.key])[:16]}: {path}\n",
                    flush=True,
                )

    _leave(_run(work(), lanes))
    if code := max(CODES[verdict] for verdict in verdicts):
        raise typer.Exit(code)
