"""The model card and `eagle3-lab train`: what is written is what the files say, and nothing half made stays."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lab.env import assets
from lab.errors import LabError
from lab.train import card, cli
from lab.train.draft import Draft
from lab.train.target import LlamaShape

SHIPPED = Path(str(assets() / "drafts" / "smollm2-135m-eagle3"))
MLA = SHIPPED.with_name("smollm2-135m-mla-eagle3")


@pytest.mark.parametrize("draft", [SHIPPED, MLA], ids=lambda path: path.name)
def test_the_shipped_card_is_made_from_the_files_beside_it(tmp_path: Path, draft: Path) -> None:
    copy = tmp_path / "draft"
    shutil.copytree(draft, copy)
    card.write_card(copy, (draft / "README.md").read_text().splitlines()[0].removeprefix("# "))
    for name in ("README.md", "training.svg"):
        assert (copy / name).read_text() == (draft / name).read_text()
    result = json.loads((draft / "acceptance.json").read_text())
    assert f"{result['overall']['mean_acceptance_length']['value']:.2f}" in (copy / "README.md").read_text()


def test_the_shipped_mla_card_is_made_from_the_recipe_beside_it(tmp_path: Path) -> None:
    folder = Path(str(assets() / "mla"))
    shutil.copytree(folder, tmp_path / "mla")
    (recipe,) = (tmp_path / "mla").glob("*.safetensors")
    assert recipe.stat().st_size <= 12_000_000
    (tmp_path / "mla" / "README.md").unlink()
    assert card.write_mla_card(recipe).read_text() == (folder / "README.md").read_text()


@pytest.mark.parametrize("draft", [SHIPPED, MLA], ids=lambda path: path.name)
def test_the_shipped_draft_is_small_enough_and_measured_as_it_is(draft: Path) -> None:
    weights = draft / "model.safetensors"
    assert weights.stat().st_size <= 22_000_000
    measured = json.loads((draft / "acceptance.json").read_text())["provenance"]["weights"]["bf16"]["sha256"]["model.safetensors"]
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == measured


def test_the_mla_targets_draft_was_trained_from_the_other_on_the_shipped_conversion() -> None:
    made = json.loads((MLA / "provenance.json").read_text())
    (recipe,) = Path(str(assets() / "mla")).glob("*.safetensors")
    assert made["mla"]["sha256"] == hashlib.sha256(recipe.read_bytes()).hexdigest()
    assert made["start"]["sha256"] == hashlib.sha256((SHIPPED / "model.safetensors").read_bytes()).hexdigest()


def test_curves_hold_every_series_and_point() -> None:
    log = [{"step": n, "tokens": n * 1000, "loss": [3.0 - n / 9, 3.5], "a&b": {"length_k3": 2.0 + n / 9}} for n in range(1, 4)]
    drawn = ElementTree.fromstring(card.curves(log))
    lines = [line for line in drawn.iter() if line.tag.endswith("polyline")]
    assert [len(line.attrib["points"].split()) for line in lines] == [3, 3, 3]
    assert "a&b" in [text.text for text in drawn.iter() if text.tag.endswith("text")]
    # A falling loss is drawn falling: SVG's y grows downwards.
    heights = [float(point.split(",")[1]) for point in lines[0].attrib["points"].split()]
    assert heights == sorted(heights)


def test_a_resumed_log_keeps_the_later_record(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 2, "loss": [1]}\n{"step": 1, "loss": [2]}\n{"step": 2, "loss": [3]}\n')
    assert [record["loss"] for record in card.read_log(path)] == [[2], [3]]
    path.write_text('{"step"')
    with pytest.raises(LabError, match="cannot be read"):
        card.read_log(path)


def test_the_whole_command_on_a_tiny_target(tiny_target: Path, tmp_path: Path) -> None:
    output = tmp_path / "draft"
    cli.everything(output, tiny_target, tmp_path / "work", "cpu", tiny=True)
    assert {"README.md", "config.json", "log.jsonl", "model.safetensors", "provenance.json", "training.svg"} == {
        path.name for path in output.iterdir()
    }
    Draft.load(output, LlamaShape.read(tiny_target))
    made = json.loads((output / "provenance.json").read_text())
    assert made["plan"]["steps"] == 6
    assert f"of {made['corpus_tokens'] / 1e6:,.0f} million in the corpus" in (output / "README.md").read_text()
    with pytest.raises(LabError, match="exists already"):
        cli.everything(output, tiny_target, tmp_path / "work", "cpu", tiny=True)


@pytest.fixture(scope="module")
def healed(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of the tiny target after both stages of healing."""
    work = tmp_path_factory.mktemp("mla")
    cli.mla(work / "whole.safetensors", tiny_target, work / "work", "cpu", tiny=True)
    return work / "whole.safetensors"


def test_an_mla_card_tells_both_stages(healed: Path) -> None:
    told = card.write_mla_card(healed).read_text()
    assert "4 steps of 2 rows each" in told
    assert "3 steps of\n192 tokens" in told
    assert "on 4 rows of 96 tokens and 4 rows of 96 tokens" in told
    assert [line.split(" | ")[:2] for line in told.splitlines() if line.startswith("| converted")] == [
        ["| converted, not healed", "96"],
        ["| converted, healed layer by layer", "96"],
        ["| converted and healed as a whole", "96"],
        ["| converted and healed as a whole", "96"],
    ]


def test_a_damaged_recipe_has_no_card(healed: Path, tmp_path: Path) -> None:
    (tmp_path / "r.safetensors").write_bytes(healed.read_bytes()[:1000])
    with pytest.raises(LabError, match="is no conversion recipe"):
        card.write_mla_card(tmp_path / "r.safetensors")


def test_another_target_needs_another_folder(tiny_target: Path, healed: Path, tmp_path: Path) -> None:
    """The texts, and the layers that are healed, are one target's: another of the same shape must not get them."""
    other = tmp_path / "other"
    shutil.copytree(tiny_target, other)
    weights = {name: tensor * 1.5 for name, tensor in load_file(other / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LabError, match="the texts and the healing of another target"):
        cli.mla(tmp_path / "r.safetensors", other, healed.parent / "work", "cpu", tiny=True)
    assert not (tmp_path / "r.safetensors").exists()


@pytest.mark.parametrize(
    "name",
    ["mla-target.json", "corpus/mla-heal-000.npz", "heal/plan.json", "heal/layer-01.safetensors", "heal-whole-3-steps-0.0002/whole.pt"],
)
@pytest.mark.parametrize("length", [0, 60])
def test_a_damaged_file_of_a_run_is_a_sentence(tiny_target: Path, healed: Path, tmp_path: Path, name: str, length: int) -> None:
    """Named, so that it can be deleted; then the run goes on."""
    work, output = tmp_path / "work", tmp_path / "r.safetensors"
    shutil.copytree(healed.parent / "work", work)
    (work / name).write_bytes((work / name).read_bytes()[:length])
    with pytest.raises(LabError, match=r"is damaged\. .*Delete it") as failed:
        cli.mla(output, tiny_target, work, "cpu", tiny=True)
    assert "weights_only" not in str(failed.value)
    (work / name).unlink()
    cli.mla(output, tiny_target, work, "cpu", tiny=True)
    with safe_open(output, "pt") as file, safe_open(healed, "pt") as first:
        for one in file.keys():  # noqa: SIM118 - a file is no mapping
            torch.testing.assert_close(file.get_tensor(one), first.get_tensor(one))


def test_a_healed_recipe_is_a_start(tiny_target: Path, healed: Path, tmp_path: Path) -> None:
    """Without the layer-wise stage, with a budget that is over, and then on to the end; a recipe without correction is refused."""
    output = tmp_path / "further.safetensors"
    arguments = {"start": healed, "steps": 2, "tiny": True}
    cli.mla(output, tiny_target, tmp_path / "work", "cpu", budget=1e-9, **arguments)
    assert not output.exists()
    cli.mla(output, tiny_target, tmp_path / "work", "cpu", **arguments)
    assert not (tmp_path / "work" / "heal").exists()
    with safe_open(output, "pt") as file:
        told = json.loads(file.metadata()["eagle3_lab"])
    assert told["start"]["sha256"] == hashlib.sha256(healed.read_bytes()).hexdigest()
    assert told["whole"]["steps"] == 2
    assert told["heal"]["rank"] == 4, "what the start says of its own healing"
    text = card.write_mla_card(output).read_text()
    assert text.index("3 steps of\n192 tokens") < text.index("2 steps of\n192 tokens"), "both, for the start was healed as a whole, too"
    assert "layer by layer |" not in text
    assert "\n| the recipe that it began with |" in text
    with pytest.raises(LabError, match="as many steps as are asked for"):
        cli.mla(tmp_path / "same.safetensors", tiny_target, tmp_path / "work", "cpu", start=healed)
    cli.mla(tmp_path / "plain.safetensors", tiny_target, tmp_path / "plain", "cpu", tiny=True, heal=False)
    with pytest.raises(LabError, match="no correction"):
        cli.mla(tmp_path / "no.safetensors", tiny_target, tmp_path / "plain", "cpu", tiny=True, start=tmp_path / "plain.safetensors")


def test_a_converted_target_writes_and_teaches(tiny_target: Path, healed: Path, tmp_path: Path) -> None:
    """The original's draft goes on, on what the converted target wrote: same vocabulary, a folder of its own, and its card says so."""
    work, first, second = tmp_path / "work", tmp_path / "first", tmp_path / "second"
    cli.everything(first, tiny_target, work, "cpu", tiny=True)
    cli.corpus(tiny_target, work, "cpu", tiny=True, only=["chat"], mla=healed)
    cli.draft(second, tiny_target, work, "cpu", tiny=True, only=["chat"], start=first, mla=healed, rate=0.3)
    shape, recipe = LlamaShape.read(tiny_target), hashlib.sha256(healed.read_bytes()).hexdigest()
    assert Draft.load(second, shape).kept.tolist() == Draft.load(first, shape).kept.tolist()
    made = json.loads((second / "provenance.json").read_text())
    assert card.read_log(second / "log.jsonl")[0]["step"] == 0, "the earlier draft's own record"
    assert made["mla"] == {"recipe": healed.name, "sha256": recipe}
    assert made["plan"]["rate_rest"] == pytest.approx(0.3 * json.loads((first / "provenance.json").read_text())["plan"]["rate_rest"])
    told = " ".join((second / "README.md").read_text().split())
    assert f"converted to MLA by `whole.safetensors` (SHA-256 {recipe[:16]}…)" in told
    assert "in MLA form" in told
    shards = [folder / "corpus" / "chat-000.npz" for folder in (work, work / f"mla-{recipe[:12]}")]
    texts = []
    for path in shards:
        with np.load(path) as shard:
            texts.append(shard["ids"])
    assert texts[0].shape == texts[1].shape
    assert (texts[0] != texts[1]).any(), "the original wrote this"


def test_no_target_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no target checkpoint"):
        cli.corpus(tmp_path, tmp_path / "work", "cpu", tiny=True)
    assert not (tmp_path / "work").exists()
