"""The report's sums, its JSON, its table, and KV-cache tokens against hand-made numbers."""

from __future__ import annotations

import pytest

from lab.errors import LabError
from lab.quant import QuantReport, Tensor, kv_bytes_per_token, kv_gain, load_report, table
from lab.quant.kv import MI355X, this_machine
from lab.quant.report import REPORT, Channel, why_kept


@pytest.fixture
def report() -> QuantReport:
    return QuantReport(
        scheme="ptpc_fp8",
        source="draft",
        tensors=(
            Tensor("o.weight", (4, 8), "BF16", "F8_E4M3", 64, 48, error=0.03, norm=4.0, worst=(Channel(2, 0.05), Channel(0, 0.04))),
            Tensor("up.weight", (4, 8), "BF16", "F8_E4M3", 64, 48, error=0.01, norm=3.0),
            Tensor("fc.weight", (8, 8), "BF16", "BF16", 128, 128, kept=why_kept("fc.weight")),
        ),
        exclude=("re:fc$",),
        checked="vLLM 0 reads it as meant",
    )


def test_sums(report):
    assert (report.bytes_before, report.bytes_after, report.saved) == (256, 224, 32)
    assert report.error == pytest.approx(((0.03 * 4) ** 2 + (0.01 * 3) ** 2) ** 0.5 / 5)


def test_json_round_trip(report, tmp_path):
    (tmp_path / REPORT).write_text(report.json())
    assert load_report(tmp_path) == report


@pytest.mark.parametrize(("text", "words"), [(None, "no report"), ("{", "cannot be read"), ("[]", "cannot be read")])
def test_unreadable_report(tmp_path, text, words):
    if text is not None:
        (tmp_path / REPORT).write_text(text)
    with pytest.raises(LabError, match=words):
        load_report(tmp_path)


def test_report_of_another_version(report, tmp_path):
    (tmp_path / REPORT).write_text(report.json().replace('"format": 1', '"format": 2'))
    with pytest.raises(LabError, match="format 2"):
        load_report(tmp_path)


def test_table_and_series(report):
    text = table(report)
    assert "2 (5.00%)" in text
    assert "published recipe" in text
    assert "88% of before" in text
    series = report.series()
    assert series["name"][0] == "fc.weight"
    assert series["worst_index"] == [None, 2, None]
    assert {len(column) for column in series.values()} == {3}


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("model.fc.weight", "fuses"),
        ("lm_head.weight", "ranking"),
        ("d2t", "maps"),
        ("embed_tokens.weight", "looked up"),
        ("norm.weight", "vector"),
    ],
)
def test_reasons(name, word):
    assert word in why_kept(name)


def test_kv_bytes():
    llama = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    assert kv_bytes_per_token(llama) == 2 * 30 * 3 * 64 * 2
    assert kv_bytes_per_token({**llama, "num_key_value_heads": None}) == 2 * 30 * 9 * 64 * 2
    kimi = {
        "text_config": {
            "num_hidden_layers": 61,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "num_attention_heads": 64,
            "hidden_size": 7168,
        }
    }
    assert kv_bytes_per_token(kimi) == 61 * 576 * 2
    assert kv_bytes_per_token(kimi, bytes_per_value=1) == 61 * 576


def test_kv_gain():
    llama = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64}
    gain = kv_gain(1000, llama, MI355X, draft={**llama, "num_hidden_layers": 1})
    assert gain.bytes_per_token == 2 * 3 * 2 * 16 * 2
    assert gain.tokens == 1000 // 384
    assert "288" in gain.machine.source
    assert kv_gain(-5, llama, this_machine()).tokens == 0
