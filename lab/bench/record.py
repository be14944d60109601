"""`eagle3-lab record`: the named recordings that play where no engine is installed, made anew from real runs.

A recording is an ordinary trace file of one request with its provenance. `RECORDINGS` says which there are and why; the shipped ones in
`assets/traces` were made by this command, and a test holds their names, prompts and lanes against it; one that names a machine (`-h200`)
was made there by a field test. The prompts that are good and bad for speculation were chosen by measuring (the files say what came out);
nothing in a recording is edited.

Limits: one greedy answer each, on the machine that its provenance names: its speed is that machine's.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from lab import env, provenance, recipes
from lab.errors import LabError
from lab.recipes.model import DraftChoice
from lab.serving.command import Lane
from lab.serving.endpoint import Endpoint
from lab.serving.lanes import Lanes
from lab.trace import stats
from lab.trace.io import SUFFIX, save
from lab.trace.model import Request, Trace

app = typer.Typer(add_completion=False, help="Record the named runs that play without an engine.")

GOOD = "Write a Python function that returns the second largest number in a list."
BAD = "Write a short story about a clockmaker who finds a clock that runs backwards."
ALTERNATIVES = 5
MAX_TOKENS = 128


@dataclass(frozen=True)
class Recording:
    """One named run. `why` says what it shows."""

    draft: DraftChoice
    prompt: str
    why: str
    recipe: str = recipes.DEFAULT


RECORDINGS = {
    "eagle3-bf16-good-prompt": Recording("bf16", GOOD, "code: the draft sees much of it coming"),
    "eagle3-bf16-bad-prompt": Recording("bf16", BAD, "a story: many next words are as good as another, and the draft guesses another"),
    "eagle3-fp8-good-prompt": Recording("fp8", GOOD, "the same as the good prompt in BF16, with the draft that AMD Quark made of it"),
    "eagle3-mla-good-prompt": Recording("bf16", GOOD, "the same, by the target in MLA form over the lab's MLA backend", "smollm2-mla"),
    "baseline-good-prompt": Recording("none", GOOD, "the same prompt without speculation: a target pass for each token"),
}


def origin(name: str, recording: Recording, lane: Lane) -> dict[str, object]:
    """Provenance of a recording made now."""
    return provenance.collect(
        recording=name,
        why=recording.why,
        recipe=lane.recipe.name,
        lane=lane.key,
        mode="compiled" if lane.compiled else "eager",
        traced=lane.traced,
        draft=lane.draft,
        k=lane.k,
        target=lane.recipe.target.name,
        flags=[" ".join(part for part in flag if part) for flag in lane.recipe.flags],
    )


async def answer(endpoint: Endpoint, prompt: str) -> Request:
    """The recorded answer of a running lane; raises `LabError` where it is not whole."""
    from lab.serving.client import Done, Notice, generate

    async for event in generate(endpoint, prompt, max_tokens=MAX_TOKENS, alternatives=ALTERNATIVES):
        if isinstance(event, Notice):
            raise LabError("The recording is not whole.", why=event.text, todo="Make it again.")
        if isinstance(event, Done):
            if event.request.error:
                raise LabError("The recording broke off.", why=event.request.error, todo="Make it again.")
            return event.request
    raise LabError("The recording ended without its last record.", todo="Make it again.")


def of(lane: Lane) -> list[str]:
    """Names of the recordings that a lane of any recipe with this draft can make: its recipe's own, else the default recipe's."""
    mine = {name: one for name, one in RECORDINGS.items() if one.recipe == lane.recipe.name}
    usual = {name: one for name, one in RECORDINGS.items() if one.recipe == recipes.DEFAULT}
    return [name for name, one in (mine or usual).items() if one.draft == lane.draft]


async def on(endpoint: Endpoint, lane: Lane, name: str, folder: Path) -> tuple[Path, Request]:
    """Make the recording `name` on the running server of `lane`, as a file in `folder`."""
    request = await answer(endpoint, RECORDINGS[name].prompt)
    return save(Trace(provenance=origin(name, RECORDINGS[name], lane), requests=[request]), folder / f"{name}{SUFFIX}"), request


async def _started(lanes: Lanes, lane: Lane) -> Endpoint:
    told: list[str] = []

    def say(text: str) -> None:
        if text not in told:
            told.append(text)
            print(f"{lane.label}: {text}", file=sys.stderr, flush=True)

    return await lanes.endpoint(lane, on_progress=lambda progress: say(progress.detail))


async def record(names: Sequence[str], folder: Path) -> list[Path]:
    """Make the named recordings one after the other, each as a file in `folder`, and give their paths."""
    lanes, made = Lanes(), []
    try:
        for name in names:
            recording = RECORDINGS[name]
            found = recipes.get(recording.recipe)
            lane = Lane(found, recording.draft, found.default_k(recording.draft), found.compiled)
            path, request = await on(await _started(lanes, lane), lane, name, folder)
            length = stats.count(request.steps).mean_acceptance_length
            said = "no draft" if length is None else f"mean acceptance length {length:.2f}, bonus included"
            print(f"{path}: {len(request.output_ids())} tokens, {len(request.steps)} steps, {said}")
            made.append(path)
    finally:
        await lanes.close()
    return made


@app.command()
def main(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help=f"Which: {', '.join(RECORDINGS)} (default: all).")] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Folder for the files (default: 'recordings' in the cache).")] = None,
) -> None:
    """Record named runs from a real engine: each becomes a trace file that opens anywhere."""
    wanted = names or list(RECORDINGS)
    if unknown := [name for name in wanted if name not in RECORDINGS]:
        raise LabError(f"There is no recording called '{unknown[0]}'.", todo=f"Known: {', '.join(RECORDINGS)}.")
    asyncio.run(record(wanted, output or env.cache_dir() / "recordings"))
