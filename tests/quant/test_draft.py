"""Which directories are Eagle3 drafts that can be quantised, and what is said about the others."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from lab.errors import LabError
from lab.quant import SCHEME, QuantReport, Tensor, cli, quantize_draft, read_draft
from lab.quant import run as runner
from lab.quant.draft import check_quantisable

from .conftest import config, tensors, write


def damage(folder, kind):
    """Make `folder` bad in the way called `kind`."""
    weights = folder / "model.safetensors"
    path = folder / "config.json"
    if kind == "no folder":
        return folder / "nothing"
    if kind == "no config":
        path.unlink()
    elif kind == "broken config":
        path.write_text('{"architectures": [')
    elif kind == "config is a list":
        path.write_text("[]")
    elif kind == "another model":
        path.write_text(json.dumps(config(architectures=["LlamaForCausalLM"])))
    elif kind == "no weights":
        weights.unlink()
    elif kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif kind == "truncated header":
        weights.write_bytes(weights.read_bytes()[:20])
    elif kind == "empty file":
        weights.write_bytes(b"")
    elif kind == "missing shard":
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": "model-00002.safetensors"}}))
    elif kind == "quantised by its config":
        path.write_text(json.dumps(config(quantization_config={"quant_method": "quark"})))
    elif kind == "no d2t":
        weights.unlink()
        from safetensors.torch import save_file

        save_file(tensors(config(), maps=False), weights)
    elif kind == "no linear layer":
        from safetensors.torch import save_file

        save_file({name: tensor for name, tensor in tensors(config()).items() if "norm" in name}, weights)
    elif kind == "quantised by its weights":
        import torch
        from safetensors.torch import save_file

        quantised = tensors(config())
        quantised["midlayer.mlp.up_proj.weight"] = quantised["midlayer.mlp.up_proj.weight"].to(torch.float8_e4m3fn)
        save_file(quantised, weights)
    return folder


BAD = {
    "no folder": "no such folder",
    "no config": "no config.json",
    "broken config": "not readable as JSON",
    "config is a list": "does not hold a JSON object",
    "another model": "says LlamaForCausalLM",
    "no weights": "no weights",
    "truncated": "damaged or cut short",
    "truncated header": "damaged or cut short",
    "empty file": "damaged or cut short",
    "missing shard": "lacks model-00002.safetensors",
    "quantised by its config": "already quantised (quark)",
    "quantised by its weights": "already quantised (F8_E4M3)",
    "no d2t": "no d2t",
    "no linear layer": "no linear layer",
}


def test_a_null_where_a_quantised_draft_has_its_configuration(draft):
    """Some exporters write out every field: null means that it is not quantised."""
    (draft / "config.json").write_text(json.dumps(config(quantization_config=None)))
    check_quantisable(read_draft(draft))


def test_a_report_that_cannot_be_written_is_said(draft, tmp_path, monkeypatch):
    made = QuantReport("ptpc_fp8", str(draft), (Tensor("fc.weight", (1, 1), "BF16", "BF16", 2, 2, kept="so"),), (), "not asked")
    monkeypatch.setattr(cli, "quantize_draft", lambda *_args, **_more: made)
    (tmp_path / "file").write_text("in the way")
    ran = CliRunner().invoke(cli.app, [str(draft), "--output", str(tmp_path / "fp8"), "--json", str(tmp_path / "file" / "report.json")])
    assert isinstance(ran.exception, LabError)
    assert "cannot be written" in str(ran.exception)
    assert "--json" in ran.exception.todo


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_the_kv_cache_is_counted_in_the_type_that_is_served(draft, monkeypatch, dtype, width):
    made = QuantReport("ptpc_fp8", str(draft), (Tensor("fc.weight", (1, 1), "BF16", "BF16", 2, 2, kept="so"),), (), "not asked")
    monkeypatch.setattr(cli, "quantize_draft", lambda *_args, **_more: made)
    monkeypatch.setattr(cli.cpu, "dtype", lambda: dtype)
    ran = CliRunner().invoke(cli.app, [str(draft), "--output", str(draft), "--target", str(draft)])
    here, there = [line for line in ran.output.splitlines() if line.startswith("KV cache on")]
    assert f" * {width} B" in here
    assert " * 2 B" in there


def nothing_left(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("kind", BAD)
def test_bad_source(draft, tmp_path, kind):
    source = damage(draft, kind)
    with pytest.raises(LabError) as caught:
        quantize_draft(source, tmp_path / "out" / "fp8")
    assert BAD[kind] in str(caught.value)
    assert nothing_left(tmp_path) == ["draft"]


def test_other_scheme(draft, tmp_path):
    with pytest.raises(LabError, match="scheme 'mx9'"):
        quantize_draft(draft, tmp_path / "fp8", scheme="mx9")


def test_output_exists(draft, tmp_path):
    (tmp_path / "fp8").mkdir()
    with pytest.raises(LabError, match="exists already"):
        quantize_draft(draft, tmp_path / "fp8")
    assert nothing_left(tmp_path / "fp8") == []


def test_no_space(draft, tmp_path, monkeypatch):
    monkeypatch.setattr(runner.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(LabError, match="no space left"):
        quantize_draft(draft, tmp_path / "fp8")
    assert nothing_left(tmp_path) == ["draft"]


@pytest.mark.parametrize("package", ["quark", "torch"])
def test_missing_package(draft, tmp_path, monkeypatch, package):
    real = runner.importlib.util.find_spec
    monkeypatch.setattr(runner.importlib.util, "find_spec", lambda name: None if name == package else real(name))
    with pytest.raises(LabError, match=f"package '{package}'") as caught:
        quantize_draft(draft, tmp_path / "fp8")
    assert "pip install" in caught.value.todo
    assert nothing_left(tmp_path) == ["draft"]


def test_output_that_cannot_be_written(draft, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match="cannot be written"):
        quantize_draft(draft, tmp_path / "file" / "fp8")


def test_child_that_dies_leaves_nothing(draft, tmp_path, monkeypatch):
    monkeypatch.setattr(runner.child, "run", lambda *_args, **_kwargs: (-9, "last words of Quark\n"))
    with pytest.raises(LabError, match="signal 9") as caught:
        quantize_draft(draft, tmp_path / "fp8")
    assert "last words of Quark" in caught.value.why
    assert nothing_left(tmp_path) == ["draft"]


def test_disk_that_fills_up_meanwhile(draft, tmp_path, monkeypatch):
    monkeypatch.setattr(
        runner.child, "run", lambda *_args, **_kwargs: (1, "SafetensorError: I/O error: No space left on device (os error 28)")
    )
    with pytest.raises(LabError, match="no space left"):
        quantize_draft(draft, tmp_path / "fp8")


def test_reading_needs_neither_torch_nor_quark(draft, monkeypatch):
    for name in ("torch", "quark", "vllm"):
        monkeypatch.setitem(sys.modules, name, None)
    assert read_draft(draft).tensors["fc.weight"].shape == (64, 192)
    assert SCHEME == "ptpc_fp8"


def test_speculators_draft_without_d2t(tmp_path):
    inner = config()
    settings = {"speculators_model_type": "eagle3", "draft_vocab_size": 128, "transformer_layer_config": inner}
    folder = write(tmp_path / "s", settings, tensors(inner, layer="layers.0.", maps=False))
    with pytest.raises(LabError, match="no d2t"):
        quantize_draft(folder, tmp_path / "fp8")
