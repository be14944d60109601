"""Counters from the text of /metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lab.errors import LabError
from lab.serving.endpoint import Endpoint
from lab.serving.metrics import cache_tokens, parse, scrape

TEXT = """\
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 120.0
vllm:generation_tokens_total{engine="1",model_name="m"} 3.0
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 40.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e9
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 20.0
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
"""


def test_parse() -> None:
    found = parse(TEXT, 5.0)
    assert (found.time, found.generation_tokens, found.drafts, found.running, found.waiting) == (5.0, 123, 40, 2, 0)
    assert found.accepted_per_pos == (30, 20, 5)
    assert parse("", 0.0).accepted_per_pos == ()


def test_finished_requests_and_the_cache() -> None:
    ended = "# TYPE vllm:request_success_total counter\n"
    ended += 'vllm:request_success_total{finished_reason="stop"} 2.0\nvllm:request_success_total{finished_reason="length"} 3.0\n'
    assert parse(ended, 0.0).finished == 5
    info = "# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{%s} 1.0\n"
    assert cache_tokens(info % 'kv_cache_size_tokens="11264",num_gpu_blocks="88",block_size="128"') == 11264
    assert cache_tokens(info % 'kv_cache_size_tokens="None",num_gpu_blocks="88",block_size="16"') == 1408
    assert cache_tokens(info % 'num_gpu_blocks="None",block_size="16"') is None
    assert cache_tokens(TEXT) is None


def test_scrape(fake: Any) -> None:
    fake.running = 7
    assert asyncio.run(scrape(Endpoint(fake.url, "smollm2"))).running == 7


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(LabError, match="cannot be read"):
        asyncio.run(scrape(Endpoint("http://127.0.0.1:9", "m")))


@pytest.mark.parametrize(
    "text", ["<html><body>Sign in</body></html>", 'vllm:num_requests_running{engine="0"} NaN', "vllm:num_requests_running +Inf"]
)
def test_something_else_than_counters(fake: Any, text: str) -> None:
    """As a proxy answers that knows the API's paths only."""
    fake.counters = iter([text + "\n"])
    with pytest.raises(LabError, match="cannot be read"):
        asyncio.run(scrape(Endpoint(fake.url, "smollm2")))
