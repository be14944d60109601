"""Command lines as people paste them."""

from __future__ import annotations

import pytest

from lab.doctor.line import parse

KIMI = """export VLLM_ROCM_USE_AITER=1
# the published line
vllm serve amd/Kimi-K2.5-MXFP4 \\
    -tp 4 --no-enable-prefix-caching \\
    --max-model-len=8k --trust_remote_code \\
    --speculative-config '{"method": "eagle3", "model": "d", "num_speculative_tokens": 4}'
"""


def test_the_forms_of_a_line() -> None:
    line = parse(KIMI)
    assert line.launcher == "vllm serve"
    assert line.model == "amd/Kimi-K2.5-MXFP4"
    assert line.environment == {"VLLM_ROCM_USE_AITER": "1"}
    assert line.number("tensor-parallel-size") == 4
    assert line.number("max-model-len") == 8000
    assert line.has("trust-remote-code")
    assert line.has("no-enable-prefix-caching")
    assert line.speculative == {"method": "eagle3", "model": "d", "num_speculative_tokens": 4}
    assert line.problems == ()


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("python3 -m vllm.entrypoints.openai.api_server --model m --port 1", "m"),
        ("/usr/bin/vllm serve m", "m"),
        ("env A=1 vllm serve --port 8000 m", "m"),
        ("docker run --gpus all -e VLLM_ROCM_USE_AITER=1 image vllm serve m --block-size 1", "m"),
        ("m --block-size 1", "m"),
        ("$ vllm serve m", "m"),
        ("vllm serve --enforce-eager m", "m"),
    ],
)
def test_where_the_model_is(text: str, model: str) -> None:
    assert parse(text).model == model


def test_commands_in_one_line_are_told_apart() -> None:
    quoted = """--speculative-config '{"method": "eagle3"}'"""
    for between in (";", " ;", " &&"):
        line = parse(f"cd /x && export VLLM_ROCM_USE_AITER=1{between} vllm serve m {quoted}")
        assert line.environment == {"VLLM_ROCM_USE_AITER": "1"}
        assert line.model == "m"


def test_values_and_negations() -> None:
    line = parse("vllm serve m --enable-prefix-caching --no-enable-prefix-caching --max-model-len 8K --block_size 32")
    assert not line.has("enable-prefix-caching")
    assert line.has("no-enable-prefix-caching")
    assert (line.number("max-model-len"), line.number("block-size")) == (8192, 32)
    assert parse("vllm serve m --port x").number("port") is None


def test_dotted_flags_become_objects() -> None:
    line = parse("vllm serve m --speculative-config.method eagle3 --speculative-config.num_speculative_tokens 3 -cc.custom_ops '[\"all\"]'")
    assert line.speculative == {"method": "eagle3", "num_speculative_tokens": 3}
    assert line.objects["compilation-config"] == {"custom_ops": ["all"]}


def test_what_cannot_be_read_is_said() -> None:
    assert "not JSON" in parse("vllm serve m --speculative-config {method:eagle3}").problems[0]
    assert "quote" in parse("vllm serve 'm").problems[0]
    assert "list" in parse("vllm serve m --speculative-config '[]'").problems[0]
    assert "characters" in parse("vllm serve m " + "x " * 50_000).problems[0]


def test_words_that_a_shell_has_split() -> None:
    assert parse(["vllm", "serve", "m", "--speculative-config", '{"method": "eagle3"}']).speculative == {"method": "eagle3"}
