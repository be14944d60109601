"""A server's own counters, read from `/metrics` by the Prometheus client library's parser.

vLLM's counters only ever grow, so a rate is the difference of two snapshots over the difference of their times.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from lab.errors import LabError
from lab.serving.endpoint import Endpoint

#: Field of a snapshot, by the name of vLLM's sample.
SAMPLES = {
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:request_success_total": "finished",
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_draft_tokens_total": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted_tokens",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
}
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(frozen=True)
class Snapshot:
    """Counters at one moment. `time` is seconds of `time.time()`; the rest are counts since the server started, or gauges."""

    time: float
    generation_tokens: int = 0
    prompt_tokens: int = 0
    #: Requests that ended, in whatever way.
    finished: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    #: Accepted draft tokens by position in the draft; empty without speculation.
    accepted_per_pos: tuple[int, ...] = ()
    #: Gauges: requests in the batch now, and waiting for it.
    running: int = 0
    waiting: int = 0


def parse(text: str, at: float) -> Snapshot:
    """A snapshot from the text of `/metrics`, summed over engines."""
    totals = dict.fromkeys(SAMPLES.values(), 0)
    positions: dict[int, int] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in SAMPLES:
                totals[SAMPLES[sample.name]] += int(sample.value)
            elif sample.name == PER_POSITION:
                position = int(sample.labels["position"])
                positions[position] = positions.get(position, 0) + int(sample.value)
    per_position = tuple(positions.get(index, 0) for index in range(max(positions, default=-1) + 1))
    return Snapshot(time=at, accepted_per_pos=per_position, **totals)


def cache_tokens(text: str) -> int | None:
    """How many tokens the KV cache of all engines together holds, from the text of `/metrics`; None where the server does not say."""
    total = 0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "vllm:cache_config_info":
                size, blocks, block = (sample.labels.get(key, "") for key in ("kv_cache_size_tokens", "num_gpu_blocks", "block_size"))
                if size.isdigit():
                    total += int(size)
                elif blocks.isdigit() and block.isdigit():
                    total += int(blocks) * int(block)
    return total or None


async def scrape(endpoint: Endpoint, *, client: httpx.AsyncClient | None = None, timeout: float = 5.0) -> Snapshot:
    """Read the counters of `endpoint` now; `client` saves connecting anew at every call. Raises `LabError` if it does not answer, or with
    something else than counters."""
    return understood(await read(endpoint, client=client, timeout=timeout), endpoint)


def understood(text: str, endpoint: Endpoint) -> Snapshot:
    """What `read` gave, as counters of now; raises `LabError` where it is something else."""
    try:
        return parse(text, time.time())
    except (ValueError, KeyError, OverflowError) as error:  # a page of whatever stands before a server elsewhere
        raise LabError(f"The counters of {endpoint.url} cannot be read.", why="Its /metrics are not in the form of Prometheus.") from error


async def read(endpoint: Endpoint, *, client: httpx.AsyncClient | None = None, timeout: float = 5.0) -> str:
    """The text of `/metrics` now. Raises `LabError` if the server does not answer."""
    try:
        if client is None:
            async with endpoint.client(timeout) as own:
                response = await own.get(f"{endpoint.url}/metrics")
        else:
            response = await client.get(f"{endpoint.url}/metrics", headers=endpoint.headers(), timeout=timeout)
        response.raise_for_status()
    except httpx.HTTPError as error:
        raise LabError(f"The counters of {endpoint.url} cannot be read.", why=str(error) or type(error).__name__) from error
    return response.text
