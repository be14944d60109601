"""`eagle3-lab`: the command line. Each command imports what it needs when it runs, so that `--help` is quick and works in a light install.

`serve` and `trace` live here; `train`, `bench`, `quantize` and the like are typer apps of their own packages, found by name when called.
A `LabError` becomes sentences on stderr and exit code 1; nothing here prints a traceback for something that a person can act on.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lab import recipes
from lab.errors import LabError

if TYPE_CHECKING:
    from lab.serving.command import Lane
    from lab.serving.endpoint import Endpoint, Progress
    from lab.trace.model import Request, Step

app = typer.Typer(
    name="eagle3-lab",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="See, switch and measure Eagle3 speculative decoding on a real vLLM engine.",
)

Choice = Literal["none", "bf16", "fp8"]
RecipeName = Annotated[str, typer.Argument(help=f"Which recipe: {', '.join(sorted(recipes.RECIPES))}.", metavar="RECIPE")]
Draft = Annotated[Choice, typer.Option("--draft", help="The Eagle3 draft, or none for the baseline.")]
K = Annotated[int | None, typer.Option("-k", "--k", help="Draft tokens a step (default: the recipe's).")]
Compiled = Annotated[
    bool | None,
    typer.Option("--compiled/--eager", help="vLLM's torch.compile, or eager mode (quicker to start).", show_default="the recipe's"),
]

#: Commands that are typer apps of their own: name to module (its `app`) and help.
PARTS = {
    "doctor": ("lab.doctor.cli", "Say what will fail, what will be silently wrong, and what needs care."),
    "bench": ("lab.bench.cli", "Measure acceptance and speed on a real engine."),
    "duel": ("lab.bench.duel_cli", "Compare drafts on the same prompts, token by token."),
    "train": ("lab.train.cli", "Train an Eagle3 draft for a recipe's target."),
    "quantize": ("lab.quant.cli", "Make an FP8 draft with AMD Quark."),
    "record": ("lab.bench.record", "Record the named runs that play without an engine."),
    "workshop": ("lab.ui.workshop.cli", "Serve a room: a presenter, attendees in their browsers, one engine."),
    "fieldtest": ("lab.fieldtest.cli", "Everything about a recipe on this machine, into one archive to send back."),
    "verify": ("lab.bench.verify_cli", "Prove that a draft changes nothing, and keep a certificate."),
}


def _lane(recipe: str, draft: Choice, k: int | None, compiled: bool | None, traced: bool, **sizes: Any) -> Lane:
    from lab.serving.command import Lane

    found = recipes.get(recipe)
    mode = found.compiled if compiled is None else compiled
    return Lane(found, draft, found.default_k(draft) if k is None else k, mode, traced, **sizes)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Ticker:
    """Progress on stderr: one line that is rewritten on a terminal, and a line for each change elsewhere."""

    def __init__(self, what: str) -> None:
        self.what, self.last, self.began, self.live = what, "", time.monotonic(), sys.stderr.isatty()

    def __call__(self, detail: str) -> None:
        if self.live:
            print(f"\r\x1b[K{self.what}, {time.monotonic() - self.began:.0f} s: {detail[:90]}", end="", file=sys.stderr, flush=True)
        elif detail != self.last:
            _say(f"{self.what}, {time.monotonic() - self.began:.0f} s: {detail}")
        self.last = detail

    def progress(self, progress: Progress) -> None:
        self(progress.detail)

    def done(self) -> None:
        if self.live and self.last:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@app.command()
def serve(
    recipe: RecipeName = recipes.DEFAULT,
    draft: Draft = "bf16",
    k: K = None,
    compiled: Compiled = None,
    traced: Annotated[
        bool | None,
        typer.Option(
            "--traced/--plain",
            help="With the lab's tracing plugin, or vLLM alone.",
            show_default="traced, but plain where tracing changes the recipe's scheduling",
        ),
    ] = None,
    tp: Annotated[int, typer.Option("--tp", min=0, help="GPUs (--tensor-parallel-size).", show_default="the recipe's")] = 0,
    ep: Annotated[bool | None, typer.Option("--ep/--no-ep", help="Expert parallelism.", show_default="the recipe's")] = None,
    isl: Annotated[int, typer.Option("--isl", min=0, help="Tokens of a prompt.", show_default="the recipe's")] = 0,
    osl: Annotated[int, typer.Option("--osl", min=0, help="Tokens of an answer.", show_default="the recipe's")] = 0,
    max_model_len: Annotated[
        int, typer.Option("--max-model-len", min=0, help="Context in tokens.", show_default="the recipe's, for --isl and --osl")
    ] = 0,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port of the OpenAI API.")] = 8000,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command, run nothing.")] = False,
) -> None:
    """Serve a recipe: an OpenAI-compatible vLLM server with its Eagle3 draft, until Ctrl-C."""
    from lab import checkpoints
    from lab.serving import command, process

    if traced is None:
        traced = not recipes.get(recipe).async_scheduling
    lane = _lane(recipe, draft, k, compiled, traced, tp=tp, expert_parallel=ep, isl=isl, osl=osl, max_model_len=max_model_len)
    weights = None if lane.draft == "none" else lane.recipe.drafts[lane.draft]
    if dry_run:
        shown = command.command(
            lane,
            target=checkpoints.location(lane.recipe.target),
            draft=None if weights is None else checkpoints.location(weights),
            port=port,
            host=host,
            trace_socket=process.trace_socket(port),
        )
        print(shown.script())
        return
    process.launcher()  # says what is missing before anything is prepared
    if not process.port_is_free(port, host):
        raise process.port_in_use(port)
    tick = _Ticker(f"Starting {lane.label}")
    target = checkpoints.ensure(lane.recipe.target, tick)
    server = process.start_lane(
        lane, target=target, draft=None if weights is None else checkpoints.ensure(weights, tick), port=port, host=host, say=tick
    )
    with server:
        try:
            tick.done()
            ready = f"{lane.label} is ready after {server.ready_after:.0f} s: {server.url}/v1 (model {server.model})."
            _say(f"{ready} Log: {server.log}. Ctrl-C ends it.")
            while (code := server.exit_code()) is None:
                time.sleep(0.5)
        except KeyboardInterrupt:
            _say("Stopping.")
            return
        raise server.death(f"The engine ended by itself (exit code {code}).")


@app.command()
def trace(
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    recipe: Annotated[str, typer.Option("--recipe", help="Which recipe.")] = recipes.DEFAULT,
    draft: Draft = "bf16",
    k: K = None,
    compiled: Compiled = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Most new tokens.")] = 128,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed for temperatures above 0.")] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="A server that runs already (eagle3-lab serve), instead of starting one.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Save the trace as JSON lines.")] = None,
) -> None:
    """Send one prompt and print each engine step: what the draft proposed, and what the target made of it."""
    lane = None if url else _lane(recipe, draft, k, compiled, True)
    request = asyncio.run(_trace(lane, url, prompt, temperature=temperature, max_tokens=max_tokens, seed=seed))
    print(f"\n{request.text}\n")
    print(_summary(request))
    if output:
        from lab import provenance
        from lab.trace.io import save
        from lab.trace.model import Trace

        known = {} if url else {"recipe": recipe}  # what a server that runs already was started with is not known here
        origin = provenance.collect(**known, lane=request.lane, settings=request.settings)
        print(f"Saved to {save(Trace(provenance=origin, requests=[request]), output)}.")
    if request.error:
        raise LabError(request.error)


async def _trace(lane: Lane | None, url: str | None, prompt: str, *, temperature: float, max_tokens: int, seed: int | None) -> Request:
    from lab.serving.client import Done, Notice, StepEvent, generate
    from lab.serving.lanes import Lanes

    lanes, request = Lanes(), None
    pieces: dict[int, str] = {}
    try:
        if lane is None:
            assert url is not None
            endpoint = await _attach(url)
        else:
            tick = _Ticker(f"Starting {lane.label}")
            endpoint = await lanes.endpoint(lane, on_progress=tick.progress)
            tick.done()
        async for event in generate(endpoint, prompt, temperature=temperature, max_tokens=max_tokens, seed=seed):
            if isinstance(event, StepEvent):
                pieces.update(event.pieces)
                print(_row(event.step, pieces), flush=True)
            elif isinstance(event, Notice):
                _say(event.text)
            elif isinstance(event, Done):
                request = event.request
    finally:
        await lanes.close()
    assert request is not None
    return request


async def _attach(url: str) -> Endpoint:
    """The endpoint of a server that runs already: its first model, and the key in VLLM_API_KEY if there is one."""
    from lab.serving.remote import attach

    return await attach(url)


def _row(step: Step, pieces: dict[int, str]) -> str:
    """One step as a line: accepted +, rejected -, never reached ?, the target's own token =. Tokens are shown with visible white space."""
    from lab.trace.render import chips

    signs = {"accepted": "+", "rejected": "-", "unreached": "?"}
    colours = {"accepted": typer.colors.GREEN, "rejected": typer.colors.RED, "unreached": typer.colors.BRIGHT_BLACK}
    words = []
    for chip in chips(step, pieces):
        word = signs.get(chip.mark, "=") + "".join(chip.text) + ("✂" if chip.cut else "")
        colour = colours.get(chip.mark, typer.colors.BLUE)
        words.append(typer.style(word, fg=colour) if sys.stdout.isatty() else word)
    what = "prefill" if step.phase == "prefill" else f"{step.accepted} of {len(step.draft)}"
    return f"{step.index:4}  {what:8}  {'  '.join(words)}"


def _summary(request: Request) -> str:
    from lab.trace.stats import tokens_per_second

    drafted = [step for step in request.steps if step.draft]
    tokens = len(request.output_ids())
    speed = f"{tokens} tokens"
    if request.ttft is not None:
        speed += f", the first after {request.ttft:.2f} s"
    if rate := tokens_per_second(request.steps):
        speed += f", then {rate:.1f} tok/s (engine's clock)"
    if not drafted:
        return f"{speed}; no draft tokens."
    accepted, proposed = sum(step.accepted for step in drafted), sum(len(step.draft) for step in drafted)
    return (
        f"{speed}; {accepted} of {proposed} draft tokens accepted ({accepted / proposed:.0%}), "
        f"mean acceptance length {1 + accepted / len(drafted):.2f} (bonus token included)."
    )


@app.command(name="app")
def page(
    recipe: Annotated[str | None, typer.Option("--recipe", help="Which recipe.", show_default=recipes.DEFAULT)] = None,
    attach: Annotated[
        list[str] | None,
        typer.Option("--attach", metavar="LANE=URL", help="A server that runs elsewhere, or a file (docs/attach.md); may be repeated."),
    ] = None,
    port: Annotated[int, typer.Option("--port", help="Port on 127.0.0.1 (the next free one if it is taken).")] = 7860,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Open the lab's page in a browser: the same as python app.py."""
    from lab.serving.attach import chosen
    from lab.ui import build

    found, servers = chosen(recipe, attach or [])
    build.run(found, port=port, open_browser=open_browser, addresses=servers)


def _register(name: str, module: str, text: str) -> None:
    """A command that hands its arguments (`--help` too) to the typer app of another module, imported only then."""
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

    @app.command(name=name, help=text, context_settings=settings, add_help_option=False)
    def forward(context: typer.Context) -> None:
        try:
            part = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
            raise LabError(f"The command '{name}' is not part of this version of the lab.") from error
        part.app(args=context.args, prog_name=f"eagle3-lab {name}")


for _name, (_module, _text) in PARTS.items():
    _register(_name, _module, _text)


def main() -> None:
    """The entry point: run the command, and turn a `LabError` into sentences and exit code 1."""
    try:
        app()
    except LabError as error:
        lines = [f"eagle3-lab: {error.what}", error.why, error.todo]
        print("\n".join(line for line in lines if line), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
