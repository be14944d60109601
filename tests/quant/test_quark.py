"""Real AMD Quark on drafts in every form, and vLLM's own reading of what it made."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from lab.errors import LabError
from lab.quant import child, load_report, quantize_draft, read_draft
from lab.quant.run import SCHEME
from lab.quant.worker import fix_config, vllm_patterns, work

from .conftest import config, tensors, write

torch = pytest.importorskip("torch")
pytest.importorskip("quark", reason="AMD Quark is not installed")
from safetensors.torch import load_file, save_file  # noqa: E402


def load(folder):
    return {name: tensor for path in read_draft(folder).files for name, tensor in load_file(path).items()}


def speculators(inner):
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": inner["draft_vocab_size"],
        "transformer_layer_config": {key: value for key, value in inner.items() if key not in ("architectures", "draft_vocab_size")},
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}], "verifier": {"name_or_path": "x"}},
    }


#: name: configuration changes, arguments of `tensors`, arguments of `write`, configuration in speculators' format
FORMS = {
    "ordinary": ({}, {}, {}, False),
    "other heads": ({"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32}, {}, {}, False),
    "own embeddings": ({}, {"embed": True}, {}, False),
    "layers.0 names": ({}, {"layer": "layers.0."}, {}, False),
    "three shards": ({}, {"embed": True}, {"shards": 3}, False),
    "no head of its own, whole vocabulary": ({"draft_vocab_size": 512}, {"head": False, "maps": False}, {}, False),
    "pickled": ({}, {}, {"pickled": True}, False),
    "speculators": ({}, {"layer": "layers.0."}, {}, True),
    "sizes off every tile": ({"hidden_size": 50, "intermediate_size": 77, "head_dim": 10}, {}, {}, False),
}


@pytest.fixture(params=FORMS)
def made(request, tmp_path):
    """A staging folder that Quark worked in."""
    changes, weights, files, special = FORMS[request.param]
    settings = config(**changes)
    write(tmp_path / "stage" / "source", speculators(settings) if special else settings, tensors(settings, **weights), **files)
    result = work(tmp_path / "stage", SCHEME)
    return tmp_path / "stage", result, tensors(settings, **weights)


def test_every_form(made):
    stage, result, before = made
    after = load(stage / "draft")
    scales = {name for name in after if name.endswith("weight_scale")}
    assert set(after) - scales == set(before)
    quantised = {name for name in before if name.endswith("_proj.weight")}
    assert {name.removesuffix("_scale") for name in scales} == quantised
    for name, was in before.items():
        if name not in quantised:
            assert after[name].dtype == was.dtype
            assert after[name].equal(was)
            continue
        scale = after[f"{name}_scale"]
        assert after[name].dtype == torch.float8_e4m3fn
        assert scale.dtype == torch.float32
        assert scale.numel() == was.shape[0]
        back = after[name].double() * scale.double().reshape(-1, 1)
        error = float((back - was.double()).norm() / was.double().norm())
        assert 0.01 < error < 0.04
        row = next(row for row in result["tensors"] if row["name"] == name)
        assert row["error"] == pytest.approx(error)
        assert row["bytes_after"] == was.numel() + 4 * was.shape[0]
        assert row["worst"][0]["error"] >= row["worst"][-1]["error"] > 0
        if "o_proj" in name:  # a channel of zeros stays one
            assert not back[3].any()


OLDER = "as vLLM 0.26 answers"


def without_the_question(monkeypatch, asked):
    """Take the method away that vLLM got after 0.26, so that the check asks the parts that were there before."""
    from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig

    if asked == OLDER:
        monkeypatch.delattr(QuarkConfig, "get_quant_method_target")


@pytest.mark.parametrize("asked", ["by its own method", OLDER])
def test_vllm_reads_every_form(made, asked, monkeypatch):
    pytest.importorskip("vllm")
    from lab.quant.vllm_check import check

    without_the_question(monkeypatch, asked)
    stage, _, _ = made
    assert check(stage / "draft")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("names instead of patterns", "would load fc.weight as FP8"),
        ("pattern too wide", "unquantised"),
        ("static activations", "not as ptpc_fp8"),
        ("unknown type", "cannot serve this quantisation scheme"),
        ("no export key", "cannot serve this quantisation scheme"),
    ],
)
@pytest.mark.parametrize("asked", ["by its own method", OLDER])
def test_vllm_check_finds_faults(draft, tmp_path, fault, words, asked, monkeypatch):
    pytest.importorskip("vllm")
    from lab.quant.vllm_check import check

    without_the_question(monkeypatch, asked)
    stage = tmp_path / "stage"
    stage.mkdir()
    draft.rename(stage / "source")
    work(stage, SCHEME)
    path = stage / "draft" / "config.json"
    settings = json.loads(path.read_text())
    quantisation = settings["quantization_config"]
    if fault == "names instead of patterns":
        quantisation["exclude"] = ["fc", "lm_head"]
    elif fault == "pattern too wide":
        quantisation["exclude"].append("re:.*proj$")
    elif fault == "static activations":
        quantisation["global_quant_config"]["input_tensors"] |= {"is_dynamic": False, "qscheme": "per_tensor"}
    elif fault == "unknown type":
        quantisation["global_quant_config"]["weight"]["dtype"] = "fp3"
    else:
        del quantisation["export"]
    path.write_text(json.dumps(settings))
    with pytest.raises(LabError, match=words):
        check(stage / "draft")


def test_changed_tensor_is_found(draft, tmp_path, monkeypatch):
    from lab.quant import worker

    real = worker._quantise

    def spoil(source, output, scheme):
        real(source, output, scheme)
        weights = load_file(output / "model.safetensors")
        weights["fc.weight"][0, 0] += 1
        save_file(weights, output / "model.safetensors")

    monkeypatch.setattr(worker, "_quantise", spoil)
    (tmp_path / "stage").mkdir()
    draft.rename(tmp_path / "stage" / "source")
    with pytest.raises(LabError, match=r"changed fc\.weight"):
        work(tmp_path / "stage", SCHEME)


@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "midlayer.mlp.up_proj.weight"])
def test_numbers_that_are_not_finite_are_the_sources_fault(draft, tmp_path, name):
    weights = load_file(draft / "model.safetensors")
    weights[name].view(-1)[0] = float("nan")
    save_file(weights, draft / "model.safetensors")
    (tmp_path / "stage").mkdir()
    draft.rename(tmp_path / "stage" / "source")
    with pytest.raises(LabError, match=rf"{name} holds numbers that are not finite"):
        work(tmp_path / "stage", SCHEME)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("before ZIP archives", ""),
        ("cut short", "is damaged, or holds more than weights"),
        ("no pickle", "is damaged, or holds more than weights"),
        ("code", "is damaged, or holds more than weights"),
        ("training checkpoint", "does not map names to tensors alone"),
        ("a list", "does not map names to tensors alone"),
    ],
)
def test_pickled_drafts_that_are_not_as_they_should_be(tmp_path, kind, words):
    source = write(tmp_path / "stage" / "source", config(), tensors(config()), pickled=True)
    path = source / "pytorch_model.bin"
    if kind == "before ZIP archives":
        torch.save(tensors(config()), path, _use_new_zipfile_serialization=False)
        assert work(tmp_path / "stage", SCHEME)["tensors"]
        return
    if kind in ("cut short", "no pickle"):
        path.write_bytes(path.read_bytes()[:5000] if kind == "cut short" else b"hello")
    elif kind == "code":
        torch.save({"fc.weight": os.getcwd}, path)
    else:
        torch.save({"state_dict": tensors(config()), "epoch": 3} if kind == "training checkpoint" else [1], path)
    with pytest.raises(LabError, match=words):
        work(tmp_path / "stage", SCHEME)


def test_patterns():
    names = ["fc", "lm_head", "midlayer.self_attn.o_proj", "model.layers.0.mlp.up_proj"]
    assert vllm_patterns(names) == [r"re:(?:.*\.)?" + end + "$" for end in ("fc", "lm_head", r"mlp\.up_proj", r"self_attn\.o_proj")]


def test_speculators_config_carries_it_twice():
    fixed = fix_config({"quantization_config": {"exclude": ["fc"]}, "transformer_layer_config": {"hidden_size": 1}})
    assert fixed["transformer_layer_config"]["quantization_config"] == fixed["quantization_config"]


def test_whole_way(draft, tmp_path, capfd):
    said: list[str] = []
    report = quantize_draft(draft, tmp_path / "out" / "fp8", said.append)
    assert "starting AMD Quark" in said
    assert said[-1] == "done"
    assert capfd.readouterr() == ("", "")  # Quark keeps its noise to itself
    assert load_report(tmp_path / "out" / "fp8") == report
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["fp8"]
    assert sorted(path.name for path in (tmp_path / "out" / "fp8").iterdir()) == ["config.json", "model.safetensors", "quant-report.json"]
    assert report.provenance["versions"]["amd-quark"]
    with pytest.raises(LabError, match="already quantised"):
        quantize_draft(tmp_path / "out" / "fp8", tmp_path / "again")


def test_a_lock_of_an_interrupted_compilation_holds_nobody(draft, tmp_path, monkeypatch):
    """Quark would compile kernels at import, and wait for ever for a compilation that was killed; nothing is compiled at all."""
    version = f"py{sys.version_info.major}{sys.version_info.minor}_cpu"
    for folder in (tmp_path / "extensions", tmp_path / "extensions" / version):
        build = folder / "quark_hw_emulation_stable_abi"
        build.mkdir(parents=True)
        (build / "lock").touch()
    (tmp_path / "stage").mkdir()
    (tmp_path / "stage" / "source").symlink_to(draft)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    code, tail = child.run("lab.quant.worker", str(tmp_path / "stage"), SCHEME, on_progress=lambda _text: None)
    assert code == 0, tail
    assert (tmp_path / "stage" / "draft" / "model.safetensors").exists()
    assert {path.name for path in (tmp_path / "extensions").rglob("*") if path.is_file()} == {"lock"}


def test_a_folder_here_that_is_called_as_a_package_is_not_imported(tmp_path, monkeypatch):
    """An engineer in a checkout of vLLM has a folder `vllm` there."""
    for name in ("lab", "vllm", "quark", "torch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    code, tail = child.run("lab.quant.worker", str(tmp_path / "none"), SCHEME, on_progress=lambda _text: None)
    assert "the wrong one" not in tail
    assert "No module named" not in tail
    assert code == 1  # there is no stage to write the answer to


CLI = "import typer; from lab.quant.cli import quantize; typer.run(quantize)"


def alive(stage_name: str) -> list[int]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as handle:
                words = handle.read()
        except OSError:
            continue
        if b"lab.quant.worker" in words and stage_name.encode() in words:
            found.append(int(pid))
    return found


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for child processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interruption(draft, tmp_path, number):
    output = tmp_path / "out" / "fp8"
    process = subprocess.Popen([sys.executable, "-c", CLI, str(draft), "--output", str(output)], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "starting AMD Quark" in line:
            break
    assert alive(str(tmp_path))
    process.send_signal(number)
    assert process.wait(120) != 0
    process.stderr.close()
    deadline = time.monotonic() + 120
    while alive(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(str(tmp_path))
    left = [path.name for path in output.parent.iterdir()]
    if number != signal.SIGKILL:
        assert left == []
        return
    assert output.name not in left
    assert len(left) == 1
    from lab.quant.run import _staging

    with _staging(output) as stage:  # the next run clears up
        assert [path.name for path in output.parent.iterdir()] == [stage.name]
