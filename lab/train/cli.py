"""`eagle3-lab train`: write the corpus, train the draft, write its card. Every part resumes where an interruption left it.

`eagle3-lab train all` does it with the defaults below on one GPU; on a CPU the same command runs with `--tiny`, which proves the path and
trains nothing worth using. The shipped draft is older than these corpora: its card says which plan made it. The target is the checkpoint
that `make lab` prepared, or `--target`; with `--mla RECIPE` that target as the recipe converts it, in a working folder of its own.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lab import env, provenance
from lab.errors import LabError, disk_error, require

if TYPE_CHECKING:
    from lab.train.corpus import CorpusPlan
    from lab.train.loop import Trainer, TrainPlan
    from lab.train.target import Target

app = typer.Typer(no_args_is_help=True, help="Train an Eagle3 draft: corpus, draft, model card.")

TargetFolder = Annotated[
    Path | None, typer.Option("--target", help="BF16 Llama checkpoint (default: SmolLM2-135M-Instruct from the cache).")
]
Work = Annotated[Path | None, typer.Option("--work", help="Folder for the corpus and the run's state (default: 'train' in the cache).")]
Device = Annotated[str, typer.Option("--device", help="cuda (also ROCm) or cpu; default: whichever there is.")]
Tiny = Annotated[bool, typer.Option("--tiny", help="A few rows and steps: try the path on a CPU.")]
Only = Annotated[list[str] | None, typer.Option("--only", help="Only this one of the corpora (repeatable).")]
Budget = Annotated[float | None, typer.Option("--budget", help="Stop after so many seconds; run again to go on.", min=1)]
Recipe = Annotated[
    Path | None,
    typer.Option("--mla", help="Recipe of a conversion to MLA: the converted target writes and teaches.", exists=True, dir_okay=False),
]
Levels = Annotated[
    list[str] | None,
    typer.Option("--level", help="What the draft sees: low, middle, high (or last, the same), or a layer's number (default: all three)."),
]
#: What a working folder of another target holds.
OTHERS = "the corpora and the runs"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def corpus_plans(tiny: bool, latent: bool = False) -> tuple[CorpusPlan, ...]:
    """The corpora, or tiny ones: short rows, mostly first turns, of chat and of maths and code; and long conversations.

    `latent`: for a converted target, whose cache takes half as much again for a token; as many rows, fewer at once.
    """
    from lab.train.corpus import CorpusPlan

    chat, work = (0.9, 0.05, 0.05), (0.05, 0.45, 0.5)
    if tiny:
        return (
            CorpusPlan("chat", 1, 12, 160, seed=1, kinds=chat, longest_user=24),
            CorpusPlan("work", 1, 12, 160, seed=2, kinds=work, longest_user=24),
            CorpusPlan("long", 1, 6, 192, seed=3, longest_user=24),
        )
    return (
        CorpusPlan("chat", 40, 4096, 512, seed=1, kinds=chat, longest_user=120),
        CorpusPlan("work", 24, 4096, 512, seed=2, kinds=work, longest_user=160),
        CorpusPlan("long", *((4, 1024) if latent else (2, 2048)), 2048, seed=3),
    )


def layers_of(levels: Sequence[str], default: tuple[int, int, int], most: int) -> tuple[int, ...]:
    """The layers whose inputs are the features, ascending, from levels as people name them; `default` are the low, middle and high one.

    A draft that sees the last level alone is the control for what the others are worth. Raises `LabError` for what is no level or layer.
    """
    names = {"low": default[0], "middle": default[1], "high": default[2], "last": default[2]}
    found = set()
    for level in levels:
        layer = names.get(level, int(level) if level.isdecimal() else -1)
        if not 0 <= layer < most:
            raise LabError(
                f"'{level}' is no level of the target.", todo=f"Choose from {', '.join(names)}, or a layer from 0 to {most - 1}."
            )
        found.add(layer)
    return tuple(sorted(found))


def train_plan(tiny: bool, levels: tuple[int, ...] = ()) -> TrainPlan:
    """The run: some 364 million tokens, 13 minutes of an H200 at the shipped draft's pace; or a tiny one."""
    from lab.train.loop import TrainPlan

    shares = (("chat", 0.56), ("work", 0.34), ("long", 0.1))
    plan = TrainPlan(corpora=shares, steps=7400, vocab=10112, greedy_weight=0.5, evaluate_every=1850, levels=levels)
    if tiny:
        plan = replace(plan, steps=6, tokens=384, vocab=128, held_out=2, warmup=2, evaluate_every=3, record_every=1)
    return plan


def _device(name: str) -> str:
    torch = require("torch", "Training")
    found = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if found == "cuda" and not torch.cuda.is_available():
        raise LabError("PyTorch sees no GPU.", todo="Use --device cpu, or a PyTorch build for this GPU.")
    return found


def _target(folder: Path | None, device: str, mla: Path | None = None) -> tuple[Target, Path]:
    require("torch", "Training")
    from lab.train.converted import MlaTarget
    from lab.train.target import Target

    found = folder or env.cache_dir() / "checkpoints" / "smollm2-135m-instruct"
    if not (found / "model.safetensors").exists():
        raise LabError(
            f"There is no target checkpoint in {found}.", todo="Prepare it with: python -m lab.checkpoints (or name one with --target)"
        )
    return (MlaTarget.read(found, mla, device) if mla else Target.load(found, device)), found


def _chosen(only: list[str] | None, names: list[str]) -> set[str]:
    """The corpora that `--only` leaves of `names`."""
    if unknown := set(only or ()) - set(names):
        raise LabError(f"There is no corpus '{min(unknown)}'.", todo=f"Choose from {', '.join(names)}.")
    return set(only or names)


def _work(work: Path | None, mla: Path | None = None) -> Path:
    """The working folder; for a target converted by the recipe `mla`, one that no other target shares."""
    found = work or env.cache_dir() / "train"
    return found / f"mla-{provenance.sha256(mla)[:12]}" if mla else found


@app.command()
def corpus(
    target: TargetFolder = None,
    work: Work = None,
    device: Device = "",
    tiny: Tiny = False,
    budget: Budget = None,
    only: Only = None,
    mla: Recipe = None,
) -> None:
    """Let the target write the corpora: requests and answers, in shards; finished shards are kept."""
    from lab.train.corpus import write_corpus
    from lab.train.state import DRAFT_TARGET, same_target

    plans = corpus_plans(tiny, latent=mla is not None)
    wanted = _chosen(only, [plan.name for plan in plans])
    model, tokenizer = _target(target, _device(device), mla)
    home = _work(work, mla)
    same_target(home / DRAFT_TARGET, tokenizer, OTHERS)
    place = home / "corpus"
    begin = time.monotonic()
    for plan in plans:
        if plan.name not in wanted:
            continue
        left = None if budget is None else max(budget - (time.monotonic() - begin), 0.0)
        paths = write_corpus(model, place, tokenizer, plan, _say, left)
        _say(f"corpus '{plan.name}': {len(paths)} of {plan.shards} shards in {place}")


@app.command()
def draft(
    output: Annotated[Path, typer.Option("--output", help="Folder for the finished draft; must not exist.")],
    target: TargetFolder = None,
    work: Work = None,
    device: Device = "",
    tiny: Tiny = False,
    budget: Budget = None,
    level: Levels = None,
    only: Only = None,
    steps: Annotated[int, typer.Option("--steps", help="A run of so many steps, to compare settings (default: the plan's).", min=0)] = 0,
    start: Annotated[
        Path | None, typer.Option("--start", help="An earlier draft of the same shape to go on from.", exists=True, file_okay=False)
    ] = None,
    mla: Recipe = None,
    rate: Annotated[float, typer.Option("--rate", help="Factor on the plan's learning rates: below 1 to fine-tune.", min=0)] = 1.0,
) -> None:
    """Train the draft on the corpora, and write checkpoint, log and card when it is finished.

    With `--mla` and `--start` the earlier draft's vocabulary is kept as it is.
    """
    from lab.train.corpus import plan_of
    from lab.train.loop import Trainer
    from lab.train.state import DRAFT_TARGET, same_target

    if output.exists():
        raise LabError(f"{output} exists already.", todo="Choose another folder, or remove it.")
    place = _device(device)
    model, folder = _target(target, place, mla)
    layers = layers_of(level or (), model.shape.default_levels(), model.shape.layers)
    plan = train_plan(tiny, layers)
    wanted = _chosen(only, [name for name, _ in plan.corpora])
    plan = replace(plan, steps=steps or plan.steps, corpora=tuple(one for one in plan.corpora if one[0] in wanted))
    plan = replace(plan, rate_matrix=plan.rate_matrix * rate, rate_rest=plan.rate_rest * rate)
    if mla and start:
        plan = replace(plan, vocab=0)
    home = _work(work, mla)
    written = [plan_of(home / "corpus", name) for name, _ in plan.corpora]
    same_target(home / DRAFT_TARGET, folder, OTHERS)
    chosen = [name for name, _ in plan.corpora] if only else []
    run = home / "-".join(["run", *map(str, layers), *chosen, *([f"{steps}-steps"] if steps else [])])
    trainer = Trainer(plan, model, home / "corpus", run, _say, start)
    if not trainer.run(budget):
        return
    made = provenance.collect(
        plan=asdict(plan),
        target=folder.name,
        device=_device_name(place),
        coverage=trainer.coverage,
        corpus_tokens=int(sum(part.ids.numel() for part in trainer.corpora)),
        corpus=written,
        **({"mla": {"recipe": mla.name, "sha256": provenance.sha256(mla)}} if mla else {}),
        **({} if start is None else {"start": _origin(start, trainer.start)}),
    )
    _finish(trainer, run, output, made)
    _say(f"The draft is in {output}.")


def _finish(trainer: Trainer, run: Path, output: Path, made: dict[str, Any]) -> None:
    """Write the checkpoint beside its final place and move it there whole; raises `LabError` for a full disk."""
    from lab.train.card import write_card

    half = output.with_name(output.name + ".tmp-export")
    shutil.rmtree(half, ignore_errors=True)
    try:
        trainer.draft.export(half)
        shutil.copy(run / "log.jsonl", half / "log.jsonl")
        provenance.write_text(half / "provenance.json", json.dumps(made, indent=1) + "\n")
        write_card(half, f"Eagle3 draft for {made['target']}" + (" in MLA form" if "mla" in made else ""))
        half.rename(output)
    except OSError as error:
        raise disk_error(error, output, instead="name a folder on another disk with --output") from error
    finally:
        shutil.rmtree(half, ignore_errors=True)


def _origin(start: Path, sha256: str) -> dict[str, Any]:
    """What is known of the draft that a run went on from: the sum of its weights, and its own provenance."""
    described = start / "provenance.json"
    return {"sha256": sha256, "provenance": json.loads(described.read_text()) if described.exists() else None}


def _device_name(device: str) -> str:
    if device == "cpu":
        return str(provenance.hardware()["cpu"])
    torch = require("torch", "Training")
    return str(torch.cuda.get_device_name())


@app.command()
def mla(
    output: Annotated[Path, typer.Option("--output", help="File for the conversion's recipe (safetensors).")],
    target: TargetFolder = None,
    work: Work = None,
    device: Device = "",
    tiny: Tiny = False,
    heal: Annotated[bool, typer.Option("--heal/--no-heal", help="Train the low-rank correction, too.")] = True,
    start: Annotated[
        Path | None,
        typer.Option("--start", help="A healed recipe: no layer-wise stage, the whole model goes on from it.", exists=True, dir_okay=False),
    ] = None,
    budget: Budget = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", help="Steps of healing the whole model; 0: layer by layer only (default: 1,600; 0 on a CPU).", min=0),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", help="Time for healing the whole model: its rate falls to zero by then (0: by steps).", min=0)
    ] = 0.0,
    rate: Annotated[float, typer.Option("--rate", help="Factor on the rate of healing the whole model.", min=0)] = 1.0,
) -> None:
    """Convert the target to MLA and heal it, on text that it writes itself; say how far the converted model is from it.

    Healing goes layer by layer, then through the whole model. Some ten minutes on an H200; up to an hour on two CPU cores, with fewer steps
    and less text and layer by layer only, which heals less. Goes on where it stopped; `--budget` stops the healing of the whole model.
    """
    require("torch", "Converting the target")
    from lab.train import mla_run

    place = _device(device)
    model, folder = _target(target, place)
    plan = mla_run.mla_plan(place, tiny)
    whole = replace(plan.whole, steps=plan.whole.steps if steps is None else steps, seconds=seconds, rate=plan.whole.rate * rate)
    plan = replace(plan, whole=whole) if heal else replace(plan, layer_wise=None, whole=replace(whole, steps=0))
    if start and heal and steps is None and not plan.whole.steps:
        raise LabError("On a CPU the whole model is healed for as many steps as are asked for only.", todo="Name them with --steps.")
    run = mla_run.Run(model, folder, _work(work), place, _device_name(place), _say)
    if mla_run.make(run, plan, output, start, budget):
        _say(f"The recipe is in {output}.")


@app.command(name="all")
def everything(
    output: Annotated[Path, typer.Option("--output", help="Folder for the finished draft; must not exist.")],
    target: TargetFolder = None,
    work: Work = None,
    device: Device = "",
    tiny: Tiny = False,
) -> None:
    """Corpora, then draft, then card. Run it again after an interruption."""
    if output.exists():
        raise LabError(f"{output} exists already.", todo="Choose another folder, or remove it.")
    corpus(target, work, device, tiny)
    draft(output, target, work, device, tiny)


@app.command()
def card(
    folder: Annotated[Path, typer.Argument(help="A draft that this command trained, or the recipe file of a conversion to MLA.")],
    title: Annotated[str, typer.Option("--title", help="The card's first line.")] = "",
) -> None:
    """Write a model card anew, for instance after measuring a draft's acceptance (acceptance.json beside it)."""
    from lab.train.card import write_card, write_mla_card

    if folder.is_file():
        _say(f"Wrote {write_mla_card(folder)}.")
        return
    if not (folder / "provenance.json").exists():
        raise LabError(f"{folder} holds no draft that was trained here.", why="It has no provenance.json.")
    _say(f"Wrote {write_card(folder, title or f'Eagle3 draft {folder.name}')}.")
