"""The conversion to MLA: exact where it is exact, transformers' DeepSeek-V3 as the reference, and a planted fault that shows."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from lab.errors import LabError
from lab.train import deepseek, mla
from lab.train.converted import MlaTarget, measure
from lab.train.target import Target, rms_norm, rotate


@pytest.fixture(scope="module")
def target(grouped_target: Path) -> Target:
    return Target.load(grouped_target, dtype=torch.float32)


@pytest.fixture(scope="module")
def ids(target: Target) -> torch.Tensor:
    return torch.randint(3, target.shape.vocab, (4, 64), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def layers(target: Target, ids: torch.Tensor) -> list[mla.LayerRecipe]:
    return mla.calibrate(target, ids, lambda _line: None)


@pytest.mark.parametrize("fault", [False, True], ids=["as it is", "conjugate forgotten"])
def test_with_everything_turned_scores_are_the_originals(
    target: Target, ids: torch.Tensor, layers: list[mla.LayerRecipe], fault: bool
) -> None:
    """The split into a rotary and a latent part loses nothing: with the latent part turned too, and no norm, scores are the same."""
    shape, layer, length, size = target.shape, target.layers[0], ids.shape[1], target.shape.head_dim
    still = torch.zeros_like(layers[0].gamma_NF2)
    still[..., 0] = 1
    weights = mla.convert(shape, layer, dataclasses.replace(layers[0], gamma_NF2=still))
    x = rms_norm(F.embedding(ids[0], target.embed_VH), layer.norm_attn, shape.eps)
    cos, sin = target.cos[:length], target.sin[:length]
    query, key, _ = mla.split(shape, layer.qkv)
    repeated = key.repeat_interleave(shape.heads // shape.kv_heads, 0)
    asked, offered = (rotate(torch.einsum("ndh,th->ntd", rows, x), cos, sin) for rows in (query, repeated))
    wanted = asked @ offered.transpose(1, 2) * size**-0.5

    def turned(rows: torch.Tensor) -> torch.Tensor:
        return mla.rotate_interleaved(rows, cos, sin)

    queries = F.linear(x, weights.q_proj).unflatten(-1, (shape.heads, -1)).transpose(0, 1)
    latent, rotary = F.linear(x, weights.kv_a_proj_with_mqa).split((mla.LATENT, size), -1)
    keys = F.linear(latent, weights.kv_b_proj).unflatten(-1, (shape.heads, -1))[..., :size].transpose(0, 1)
    if fault:
        queries[..., size + 1 :: 2] *= -1
    parts = turned(queries[..., :size]) @ turned(keys).transpose(1, 2), turned(queries[..., size:]) @ turned(rotary).T
    found = sum(parts) * (2 * size) ** -0.5
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4) is not fault


def test_values_come_back_through_the_latent(target: Target, ids: torch.Tensor, layers: list[mla.LayerRecipe]) -> None:
    """Without the norm, the latent gives every head its group's value; the norm divides all of a token by one number, 1 on average."""
    shape, layer, made = target.shape, target.layers[1], layers[1]
    weights = mla.convert(shape, layer, made)
    x = F.embedding(ids, target.embed_VH)
    for before in target.layers[:1]:
        x = target.layer_forward(x, before)
    x = rms_norm(x, layer.norm_attn, shape.eps)
    latent = F.linear(x, weights.kv_a_proj_with_mqa)[..., : mla.LATENT]
    _, _, value = mla.split(shape, layer.qkv)
    group = torch.arange(shape.heads) // (shape.heads // shape.kv_heads)
    wanted = F.linear(x, value).unflatten(-1, (shape.kv_heads, -1))[..., group, :]

    def values(of: torch.Tensor) -> torch.Tensor:
        return F.linear(of, weights.kv_b_proj).unflatten(-1, (shape.heads, -1))[..., shape.head_dim :]

    torch.testing.assert_close(values(latent), wanted, rtol=1e-4, atol=1e-5)
    normed = values(rms_norm(latent, weights.kv_a_layernorm, shape.eps))
    steadiness = latent.pow(2).mean(-1).sqrt() / made.rms
    torch.testing.assert_close(normed * steadiness[..., None, None], wanted, rtol=1e-3, atol=1e-4)
    assert steadiness.mean() == pytest.approx(1, abs=0.05)


def test_the_checkpoint_is_the_model_that_was_measured(
    grouped_target: Path, target: Target, ids: torch.Tensor, layers: list[mla.LayerRecipe], tmp_path: Path
) -> None:
    """transformers' DeepSeek-V3 over the written checkpoint gives the logits of the plain PyTorch form."""
    from transformers import AutoModelForCausalLM

    tensors = deepseek.checkpoint(load_file(grouped_target / "model.safetensors"), target.shape, target.layers, layers)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(deepseek.config(json.loads((grouped_target / "config.json").read_text()))))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    exact = [mla.convert(target.shape, layer, made) for layer, made in zip(target.layers, layers, strict=True)]
    converted = MlaTarget(target, [one.to("cpu", torch.bfloat16).to("cpu") for one in exact])  # the checkpoint's are BF16
    with torch.no_grad():
        expected = reference(ids).logits
        found = converted.logits(converted.features(ids, (0,))[1])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert tensors["lm_head.weight"].abs().sum() > 0


def test_zero_heads_and_values_change_nothing(
    grouped_target: Path, layers: list[mla.LayerRecipe], ids: torch.Tensor, tmp_path: Path
) -> None:
    """The script's optional arguments: transformers' DeepSeek-V3 gives the same logits with 16 heads as with the model's 4, and with values
    of 48 numbers."""
    from transformers import AutoModelForCausalLM

    from lab.checkpoints.mla import convert

    mla.save(tmp_path / "r.safetensors", layers, {})
    logits = []
    for name, heads, values in (("own", 0, 0), ("wider", 16, 0), ("longer", 0, 48), ("both", 16, 48)):
        (tmp_path / name).mkdir()
        convert(grouped_target, tmp_path / "r.safetensors", tmp_path / name, heads, values)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        assert model.config.num_attention_heads == (heads or 4)
        assert not values or model.config.v_head_dim == values
        with torch.no_grad():
            logits.append(model(ids).logits)
    for found in logits[1:]:
        torch.testing.assert_close(found, logits[0], rtol=1e-5, atol=1e-5)
    with pytest.raises(LabError, match="4 heads, more than 2"):
        convert(grouped_target, tmp_path / "r.safetensors", tmp_path / "own", 2)
    with pytest.raises(LabError, match="numbers a head, more than 2"):
        convert(grouped_target, tmp_path / "r.safetensors", tmp_path / "own", 0, 2)


def test_the_script_runs_by_hand(grouped_target: Path, layers: list[mla.LayerRecipe], tmp_path: Path) -> None:
    """Without a pipe to its standard input, and into a folder that is not there yet; twice the same bytes; an error is one line."""
    mla.save(tmp_path / "r.safetensors", layers, {})

    def run(recipe: Path, output: Path) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "lab.checkpoints.mla", str(grouped_target), str(recipe), str(output)]
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=Path(__file__).parents[2])

    for name in ("one", "two"):
        done = run(tmp_path / "r.safetensors", tmp_path / "new" / name)
        assert (done.returncode, done.stderr) == (0, "")
    one, two = ((tmp_path / "new" / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two
    done = run(grouped_target / "config.json", tmp_path / "three")
    assert done.returncode == 1
    assert done.stderr.startswith("config.json is no conversion recipe.")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "three").exists()


def test_a_model_without_room_in_the_latent_is_a_sentence(target: Target, ids: torch.Tensor) -> None:
    wide = Target(dataclasses.replace(target.shape, heads=17, kv_heads=17), target.layers, target.embed_VH, target.norm_H)
    with pytest.raises(LabError, match=r"17 KV heads of 16 do not fit into a latent of 512.*528 numbers"):
        mla.calibrate(wide, ids, lambda _line: None)


def test_a_model_is_like_itself(target: Target, ids: torch.Tensor) -> None:
    same = measure(target, target, ids)
    assert same["kl_nats"] == pytest.approx(0, abs=1e-6)
    assert same["top1_agreement"] == 1
    assert same["loss_original"] == same["loss_converted"]


def test_recipes_are_read_as_written(layers: list[mla.LayerRecipe], tmp_path: Path) -> None:
    mla.save(tmp_path / "r.safetensors", layers, {"a": "b"})
    for written, read in zip(layers, mla.load(tmp_path / "r.safetensors"), strict=True):
        for name in mla.FIELDS:
            np.testing.assert_array_equal(getattr(written, name).numpy(), getattr(read, name).numpy())
    save_file({"something": torch.zeros(2)}, tmp_path / "other.safetensors")
    (tmp_path / "README.md").write_text("# no tensors at all\n")
    for name in ("other.safetensors", "README.md"):
        with pytest.raises(LabError, match="no conversion recipe"):
            mla.load(tmp_path / name)
