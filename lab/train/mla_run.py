"""`eagle3-lab train mla`, from text to recipe: write the texts, convert, heal layer by layer, heal as a whole, measure, save.

Every part is kept in the working folder and taken from there when the command runs again. A recipe that is healed already can be the start:
then only the healing of the whole model runs, with its own text. All measurements are on the same text, which no stage saw.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from lab import provenance
from lab.errors import LabError, disk_error
from lab.train import mla as conversion
from lab.train.converted import MlaTarget, measure
from lab.train.corpus import CorpusPlan, Rows, write_corpus
from lab.train.heal import HealPlan, heal
from lab.train.heal_whole import WholeHealing, WholePlan
from lab.train.mla import LayerRecipe
from lab.train.state import MLA_TARGET, same_target
from lab.train.target import Target


@dataclass(frozen=True)
class Text:
    """What to write: `shards` of `rows` rows of `length` tokens."""

    rows: int
    length: int
    seed: int
    shards: int = 1


#: Texts to fit the conversion on, to measure on (short and long contexts), and to heal on; a GPU writes more.
SMALL = {
    "mla-fit": Text(16, 512, 77),
    "mla-test": Text(16, 512, 4242),
    "mla-long": Text(3, 2048, 4243),
    "mla-heal": Text(64, 768, 91),
    "mla-whole": Text(128, 768, 92),
}
LARGE = {
    **SMALL,
    "mla-test": Text(64, 512, 4242),
    "mla-long": Text(8, 2048, 4243),
    "mla-heal": Text(2048, 768, 91),
    "mla-whole": Text(2048, 768, 92, shards=3),
    "mla-whole-long": Text(512, 2048, 93),
}
SHARES = {"mla-whole": 0.85, "mla-whole-long": 0.15}  # of the steps that heal the whole model


@dataclass(frozen=True)
class MlaPlan:
    """Texts and stages; no `layer_wise`: not healed (or, from a start, as it is), and `whole.steps` 0: no second stage."""

    texts: Mapping[str, Text]
    layer_wise: HealPlan | None
    whole: WholePlan
    longest_user: int = 220


def mla_plan(place: str, tiny: bool) -> MlaPlan:
    """What the device `place` can do in minutes; or a tiny plan."""
    if tiny:
        texts = {name: Text(4, 96, text.seed) for name, text in LARGE.items()}
        stage = HealPlan(rank=4, steps=4, rows=2, held_out=1)
        return MlaPlan(texts, stage, WholePlan(steps=3, tokens=192, warmup=1, rank=6, chunk=128, record_every=1), longest_user=32)
    if place.startswith("cuda"):
        return MlaPlan(LARGE, HealPlan(), WholePlan())
    return MlaPlan(SMALL, HealPlan(steps=150, rows=2), WholePlan(steps=0, tokens=1536))


@dataclass
class Run:
    """One call of the command: the original (BF16) on its device, where its files are, and what has been found out so far."""

    model: Target
    folder: Path
    work: Path
    place: str
    device_name: str
    say: Callable[[str], None]
    about: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        #: In float32: where fitting runs, and on the device.
        self.exact = Target.load(self.folder, "cpu", torch.float32)
        self.learner = self.exact if self.place == "cpu" else Target.load(self.folder, self.place, torch.float32)

    def text(self, plan: MlaPlan, name: str) -> Tensor:
        """Rows of ids [B, T], written when they are wanted, so that a run that stops early has healed before it measures."""
        text = plan.texts[name]
        written = CorpusPlan(name, text.shards, text.rows, text.length, seed=text.seed, longest_user=plan.longest_user)
        corpus = self.work / "corpus"
        write_corpus(self.model, corpus, self.folder, written, self.say)
        return torch.from_numpy(Rows.read(corpus, name).ids.astype(np.int64))

    def converted(self, layers: list[LayerRecipe]) -> MlaTarget:
        """The learner as `layers` convert it, on its device, float32."""
        pairs = zip(self.exact.layers, layers, strict=True)
        return MlaTarget(self.learner, [conversion.convert(self.exact.shape, layer, made).to(self.place) for layer, made in pairs])


def make(run: Run, plan: MlaPlan, output: Path, start: Path | None, budget: float | None) -> bool:
    """Write the recipe to `output`; False if `budget` seconds of healing the whole model were over first.

    Raises `LabError` for a working folder of another target, a target that has no room in the latent, and a full disk.
    """
    conversion.check_room(run.exact.shape)
    same_target(run.work / MLA_TARGET, run.folder, "the texts and the healing")
    layers = first_stage(run, plan) if start is None else from_recipe(run, start)
    before = layers
    if plan.whole.steps:
        found = second_stage(run, plan, layers, budget)
        if found is None:
            return False
        layers = found
    test = run.text(plan, "mla-test")
    run.about["conversion"] = measure(run.learner, run.converted([_plain(made) for made in layers]), test)
    if plan.whole.steps:
        run.about["whole"]["before"] = measure(run.learner, run.converted(before), test)
    for name in ("mla-test", "mla-long"):
        ids = run.text(plan, name)
        found_here = run.about[name] = measure(run.learner, run.converted(layers), ids)
        run.say(
            f"{name}, contexts to {ids.shape[1]}: top-1 agreement {found_here['top1_agreement']:.1%}, "
            f"KL {found_here['kl_nats']:.4f} nats on {found_here['tokens']:.0f} held-out tokens."
        )
    made = provenance.collect(target=run.folder.name, texts={name: asdict(text) for name, text in plan.texts.items()}, **run.about)
    try:
        with provenance.atomic_path(output) as temporary:
            conversion.save(temporary, layers, {"eagle3_lab": json.dumps(made)})
    except OSError as error:
        raise disk_error(error, output, instead="name a file on another disk with --output") from error
    return True


def first_stage(run: Run, plan: MlaPlan) -> list[LayerRecipe]:
    """The conversion, healed layer by layer if the plan says so."""
    layers = conversion.calibrate(run.exact, run.text(plan, "mla-fit"), run.say)
    stage = plan.layer_wise
    if stage is None:
        return layers
    run.say(f"healing: {stage.steps} steps of {stage.rows} rows for each of {len(layers)} layers")
    weights = [conversion.convert(run.exact.shape, *pair).to(run.place) for pair in zip(run.exact.layers, layers, strict=True)]
    ids = run.text(plan, "mla-heal")
    corrections, errors = heal(run.learner, weights, ids.to(run.place), stage, run.work / "heal", run.say)
    run.about |= {"heal": asdict(stage), "rows": list(ids.shape), "device": run.device_name, "layer_errors": errors}
    return _with(layers, [{name: tensor.cpu() for name, tensor in found.items()} for found in corrections])


def from_recipe(run: Run, start: Path) -> list[LayerRecipe]:
    """The layers of a recipe that is there already, and what it says of its healing. Raises `LabError` for one of another model."""
    layers = conversion.load(start, run.exact.shape)
    with safe_open(start, "pt") as file:
        told = json.loads((file.metadata() or {}).get("eagle3_lab", "{}"))
    run.about |= {key: told[key] for key in ("heal", "rows", "device", "layer_errors") if key in told}
    wholes = [*told.get("start", {}).get("whole", ()), *([told["whole"]] if "whole" in told else ())]
    origin = {"sha256": provenance.sha256(start), "made": told.get("made"), "runs": told.get("runs")}
    run.about["start"] = origin | ({"whole": wholes} if wholes else {})
    return layers


def second_stage(run: Run, plan: MlaPlan, layers: list[LayerRecipe], budget: float | None) -> list[LayerRecipe] | None:
    """`layers` healed as a whole; None if the budget was over first. Raises `LabError` where there is no correction to go on from."""
    if not all(made.correction for made in layers):
        raise LabError("This recipe has no correction.", todo="Heal it layer by layer first: leave --start out.")
    names = [name for name in SHARES if name in plan.texts]
    texts = [(run.text(plan, name), SHARES[name]) for name in names]
    weights = [conversion.convert(run.exact.shape, layer, _plain(made)) for layer, made in zip(run.exact.layers, layers, strict=True)]
    healing = WholeHealing(
        run.learner,
        [one.to(run.place) for one in weights],
        [made.correction for made in layers],
        texts,
        plan.whole,
        run.work / f"heal-whole-{plan.whole.steps}-steps-{plan.whole.rate:g}",
        run.say,
    )
    if not healing.run(budget):
        return None
    run.about["whole"] = {
        "plan": asdict(plan.whole),
        "steps": healing.step,
        "seconds": round(healing.seconds, 1),
        "rows": [list(ids.shape) for ids, _ in texts],
        "device": run.device_name,
        "curve": healing.curve,
    }
    return _with(layers, healing.found())


def _plain(made: LayerRecipe) -> LayerRecipe:
    return replace(made, correction={})


def _with(layers: list[LayerRecipe], corrections: list[dict[str, Tensor]]) -> list[LayerRecipe]:
    return [replace(made, correction=found) for made, found in zip(layers, corrections, strict=True)]
