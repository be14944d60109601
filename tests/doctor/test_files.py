"""Broken files of every kind are explained: nothing raises, and the explanation names what is wrong."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from lab.doctor import files
from lab.doctor.files import read_json, read_model
from lab.doctor.line import parse
from lab.doctor.report import report, text
from lab.doctor.rule import examine
from lab.doctor.subject import Subject

from .made import CPU, DRAFT_FOLDER, SAFE, smol, smol_draft, smol_target, speculative

REAL = (DRAFT_FOLDER / "config.json").read_bytes()


def header(values: object, *, length: int | None = None, body: bytes = b"") -> bytes:
    """A safetensors file with this header, its length told truly or not."""
    raw = json.dumps(values).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + body


def draft(folder: Path, config: bytes = REAL, weights: bytes | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(config)
    if weights is not None:
        (folder / "model.safetensors").write_bytes(weights)
    return folder


BROKEN_CONFIGS = {
    "truncated": (REAL[:200], "ends too early"),
    "empty": (b"", "It is empty."),
    "zeros": (b"\0" * 4096, "white space or zeros"),
    "list": (b"[1, 2]", "holds a list"),
    "null": (b"null", "NoneType"),
    "text": (b"hello", "not JSON"),
    "latin-1": ('{"a": "é"}'.encode("latin-1"), "not UTF-8"),
    "binary": (bytes(range(256)) * 10, "not UTF-8"),
    "html": (b"<!doctype html><title>404</title>", "web page"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "Git LFS"),
    "deep": (b'{"a":' * 5000 + b"1" + b"}" * 5000, "nest more than"),
    "bomb": (b"[" * 200_000, "nest more than"),
}


@pytest.mark.parametrize("name", BROKEN_CONFIGS)
def test_a_broken_configuration_is_explained(name: str, tmp_path: Path) -> None:
    raw, expected = BROKEN_CONFIGS[name]
    model = read_model(draft(tmp_path / "d", raw))
    found = [one for one in examine(smol(draft=model)) if one.rule == "config-unreadable"]
    assert len(found) == 1
    assert expected in found[0].evidence
    assert str(tmp_path) in found[0].evidence
    assert found[0].fix


def test_a_gigantic_configuration_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as handle:
        handle.truncate(3 << 30)  # sparse: takes no space
    found, problem = read_json(path)
    assert found == {}
    assert problem is not None
    assert "3221 MB" in problem.what


def fault(path: Path) -> str:
    problem = read_json(path)[1]
    assert problem is not None
    return problem.what


def test_links_in_a_circle_and_odd_files(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    os.symlink("b", folder / "a")
    os.symlink("a", folder / "b")
    os.symlink("a", folder / "config.json")
    assert "loop" in fault(folder / "config.json")
    os.symlink(tmp_path / "loop2", tmp_path / "loop1")
    os.symlink(tmp_path / "loop1", tmp_path / "loop2")
    assert "loop" in read_model(tmp_path / "loop1").problems[0].what
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in fault(tmp_path / "pipe")
    (tmp_path / "dir").mkdir()
    assert read_json(tmp_path / "dir")[1] is not None
    os.symlink("gone", tmp_path / "dangling")
    assert "gone" in fault(tmp_path / "dangling")


BROKEN_WEIGHTS = {
    "empty": (b"", "0 bytes"),
    "five bytes": (b"12345", "5 bytes"),
    "lying length": (header({}, length=1 << 60), "promise a header of 1,152,921,504,606,846,976 bytes"),
    "length beyond the file": (header({}, length=500), "promise a header of 500 bytes"),
    "pickle": (b"PK\x03\x04" + b"\0" * 60, "zip archive"),
    "rubbish": (struct.pack("<Q", 10) + b"x" * 200, "no JSON"),
    "header is a list": (header([1, 2]), "no JSON"),
    "offsets beyond the file": (header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, body=b"\0" * 4), "does not fit"),
    "shape and offsets disagree": (
        header({"a": {"dtype": "F32", "shape": [99], "data_offsets": [0, 16]}}, body=b"\0" * 16),
        "does not fit",
    ),
    "negative shape": (header({"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}, body=b"\0" * 16), "does not fit"),
    "unknown type": (header({"a": {"dtype": "X99", "shape": [4], "data_offsets": [0, 16]}}, body=b"\0" * 16), "does not fit"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n", "Git LFS"),
}


@pytest.mark.parametrize("name", BROKEN_WEIGHTS)
def test_broken_weights_are_explained(name: str, tmp_path: Path) -> None:
    raw, expected = BROKEN_WEIGHTS[name]
    model = read_model(draft(tmp_path / "d", REAL, raw))
    found = [one for one in examine(smol(draft=model)) if one.rule == "weights-unreadable"]
    assert [expected in one.evidence for one in found] == [True], [one.evidence for one in found]
    # what is unknown is not accused: no rule says that a tensor is missing
    assert {one.rule for one in examine(smol(draft=model)) if one.level == "error"} == {"weights-unreadable"}


def test_a_truncated_real_draft(tmp_path: Path) -> None:
    whole = (DRAFT_FOLDER / "model.safetensors").read_bytes()
    model = read_model(draft(tmp_path / "d", REAL, whole[: len(whole) // 2]))
    assert "cut short" in model.problems[0].what


def test_an_index_that_names_missing_or_strange_files(tmp_path: Path) -> None:
    folder = draft(tmp_path / "d")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    save_file({"a": np.zeros(2, np.float32)}, folder / "one.safetensors")
    assert "1 of 2 files" in read_model(folder).problems[0].what
    for strange in ({"weight_map": [1]}, {"weight_map": {"a": "../../etc/passwd"}}, {"weight_map": {"a": 3}}, {}):
        index.write_text(json.dumps(strange))
        assert "no weight_map" in read_model(folder).problems[0].what
    index.write_text("{")
    assert read_model(folder).problems[0].kind == "weights"


def test_a_folder_without_weights_or_with_pickles(tmp_path: Path) -> None:
    folder = draft(tmp_path / "d")
    assert "no weights" in read_model(folder).problems[0].what
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    model = read_model(folder)
    assert model.pickled
    assert model.problems == ()
    assert read_model(tmp_path / "nowhere").problems


def test_the_real_draft_is_read_whole() -> None:
    model = read_model(DRAFT_FOLDER)
    assert model.problems == ()
    assert model.tensors is not None
    assert model.tensors["fc.weight"].shape == (576, 1728)
    assert model.maps["d2t"].shape == (9728,)
    assert int(model.maps["t2d"].sum()) == 9728


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)
OTHERS = (
    "eagle_config", "quantization_config", "text_config", "rope_scaling", "model", "transformer_layer_config", "speculators_model_type",
    "target_hidden_size", "fc_norm", "kv_lora_rank", "auto_map", "norm_before_fc",
)  # fmt: skip
FIELDS = st.sampled_from([*smol_draft().config, *OTHERS])


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(FIELDS, VALUES, max_size=4), st.dictionaries(FIELDS, VALUES, max_size=3))
def test_any_value_in_any_field_is_survived(own: dict, theirs: dict) -> None:
    """Real configurations with fields of any type: a report comes out, whatever they hold."""
    subject = smol(draft=smol_draft(**own), target=smol_target(**theirs))
    found = report(subject)
    assert text(found)
    assert [one.evidence for one in found.findings if one.rule == "doctor-stumbled"] == []


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_survived_as_a_command_line(words: str) -> None:
    for line in (words, f"vllm serve m {words}", f"{SAFE} {speculative()} {words}"):
        examine(Subject(CPU, parse(line), smol_target(), None))


def test_limits_are_the_formats() -> None:
    assert files.MOST_HEADER == 100_000_000  # what safetensors itself refuses beyond
