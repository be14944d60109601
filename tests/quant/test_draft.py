"""Which directories are Eagle3 drafts that can be quantised, and what is said about the others."""

from __future__ import annotations

import json
import os
import sys

import pytest
from typer.testing import CliRunner

from lab import provenance
from lab.errors import LabError
from lab.quant import SCHEME, QuantReport, Tensor, cli, quantize_draft, read_draft
from lab.quant import run as runner
from lab.quant.draft import check_quantisable

from .conftest import config, tensors, write

#: Parts of config.json that are not what they should be.
DAMAGED = {
    "architecture is a number": {"architectures": 5},
    "layer settings are a list": {"transformer_layer_config": [1]},
    "quantisation is a word": {"quantization_config": "fp8"},
}
INDEX = {
    "index of numbers": {"fc.weight": 1, "norm.weight": "model.safetensors"},
    "index of lists": {"fc.weight": ["model.safetensors"]},
    "index of a tensor that is nowhere": {"fc.weight": "model.safetensors", "gone.weight": "model.safetensors"},
}
MAPS = {"short d2t": [0, 1, 2], "d2t beyond the vocabulary": [1000] * 128, "d2t before the vocabulary": [-1] + [0] * 127}
MAPS |= {"d2t without numbers": [float("nan")] * 128}


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
    elif kind in DAMAGED:
        path.write_text(json.dumps(config(**DAMAGED[kind])))
    elif kind == "nested without end":
        path.write_text("[" * 200_000)
    elif kind == "a name too long":
        return folder / ("x" * 300)
    elif kind == "links in a circle":
        (folder / "loop").symlink_to("loop")
        return folder / "loop"
    elif kind in INDEX:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": INDEX[kind]}))
    elif kind in MAPS:
        import torch
        from safetensors.torch import save_file

        save_file({**tensors(config()), "d2t": torch.tensor(MAPS[kind])}, weights)
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
    "architecture is a number": "architectures is no list",
    "layer settings are a list": "transformer_layer_config is no object",
    "quantisation is a word": "already quantised (fp8)",
    "nested without end": "not readable as JSON",
    "a name too long": "File name too long",
    "links in a circle": "no such folder",
    "index of numbers": "has no weight_map",
    "index of lists": "has no weight_map",
    "index of a tensor that is nowhere": "lacks gone.weight",
    "short d2t": "3 numbers for 128 draft tokens",
    "d2t beyond the vocabulary": "128 of its 128 draft tokens become ids",
    "d2t before the vocabulary": "1 of its 128 draft tokens become ids",
    "d2t without numbers": "128 of its 128 draft tokens become ids",
}


@pytest.mark.parametrize("part", ["quantization_config", "transformer_layer_config"])
def test_a_null_where_others_have_a_configuration(draft, part):
    """Some exporters write out every field: null means that it is not there."""
    (draft / "config.json").write_text(json.dumps(config(**{part: None})))
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


def test_a_target_whose_cache_cannot_be_counted_is_said_before_anything_is_made(draft, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "quantize_draft", lambda *_args, **_more: pytest.fail("it was quantised"))
    for number, content in enumerate(
        ({}, {"n_layer": 12, "n_head": 12}, {"num_attention_heads": 4, "hidden_size": 64}, {"text_config": "x"})
    ):
        target = tmp_path / f"target{number}"
        target.mkdir()
        (target / "config.json").write_text(json.dumps(content))
        ran = CliRunner().invoke(cli.app, [str(draft), "--output", str(tmp_path / "fp8"), "--target", str(target)])
        assert isinstance(ran.exception, LabError)
        assert "cannot be told from this config.json" in str(ran.exception)


def test_a_tilde_is_the_home_folder(draft, tmp_path, monkeypatch):
    """No shell expands it in --output=~/fp8."""
    asked = []
    made = QuantReport("ptpc_fp8", str(draft), (Tensor("fc.weight", (1, 1), "BF16", "BF16", 2, 2, kept="so"),), (), "not asked")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(cli, "quantize_draft", lambda source, output, *_args, **_more: asked.append((source, output)) or made)
    ran = CliRunner().invoke(cli.app, ["~/draft", "--output=~/fp8"], catch_exceptions=False)
    assert ran.exit_code == 0
    assert asked == [(tmp_path / "draft", tmp_path / "fp8")]
    monkeypatch.setattr(runner, "_make", lambda source, output, *_args: asked.append((source, output)))
    runner.quantize_draft("~/draft", "~/fp8")
    assert asked[1] == asked[0]


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


def test_an_output_whose_name_is_too_long(draft, tmp_path):
    with pytest.raises(LabError, match=r"cannot be written\. File name too long"):
        quantize_draft(draft, tmp_path / ("x" * 300))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no file can have such a name")
def test_names_that_are_not_utf8_are_refused(draft, tmp_path):
    latin = runner.Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    with pytest.raises(LabError, match="not UTF-8"):
        quantize_draft(draft, latin)
    draft.rename(latin)
    with pytest.raises(LabError, match="not UTF-8"):
        quantize_draft(latin, tmp_path / "fp8")


def test_an_output_called_as_a_pattern_clears_up_its_own_only(tmp_path):
    others = tmp_path / ".b.tmp-left"
    others.mkdir()
    for name in ("[ab]", "*", "a**b"):
        (tmp_path / f".{name}.tmp-left").mkdir()
        with runner._staging(tmp_path / name):
            assert not (tmp_path / f".{name}.tmp-left").exists()
    assert others.exists()


def test_the_labs_own_records_of_the_source_stay_behind(draft, tmp_path, monkeypatch):
    staged = []

    def run(_module, stage, *_more, **_settings):
        staged.extend(path.name for path in (runner.Path(stage) / "source").iterdir())
        return 1, ""

    for name in ("tokenizer.json", *provenance.RECORDS):
        (draft / name).write_text("{}")
    monkeypatch.setattr(runner.child, "run", run)
    with pytest.raises(LabError):
        quantize_draft(draft, tmp_path / "fp8")
    assert sorted(staged) == ["config.json", "model.safetensors", "tokenizer.json"]


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
