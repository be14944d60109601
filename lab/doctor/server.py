"""Asking a running server what it is willing to tell: `/metrics`, `/v1/models`, `/version`, and in vLLM's development mode `/server_info`.

`Running` holds the answers; nothing is sent to the server but these four GET requests. Counters are totals since it started, so a warm-up
or another person's requests are in them; `window` reads them twice and keeps the difference.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from lab.errors import LabError
from lab.serving import metrics
from lab.serving.endpoint import Endpoint
from lab.serving.metrics import Snapshot
from lab.serving.remote import attach

#: Answers longer than this are not read: `/metrics` of a busy server has some hundred kilobytes.
MOST = 16 << 20


@dataclass(frozen=True)
class Running:
    """A server as it describes itself. `cache` are the labels of `vllm:cache_config_info`, `info` is `/server_info` where it is open."""

    url: str
    model: str = ""
    version: str = ""
    counters: Snapshot = field(default_factory=lambda: Snapshot(time=0.0))
    cache: Mapping[str, str] = field(default_factory=dict)
    prefix_hits: int = 0
    prefix_queries: int = 0
    preemptions: int = 0
    kv_usage: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    system: Mapping[str, Any] = field(default_factory=dict)

    @property
    def drafts(self) -> int:
        """Steps with a draft."""
        return self.counters.drafts

    @property
    def rocm(self) -> bool:
        """Whether the server says that it runs on ROCm."""
        return bool(
            self.system.get("hip_compiled_version") not in (None, "N/A", "") or self.environment.get("VLLM_TARGET_DEVICE") == "rocm"
        )


NAMES = {
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:num_preemptions_total": "preemptions",
}


def from_metrics(url: str, text: str, *, at: float = 0.0) -> Running:
    """What `/metrics` says; raises `LabError` for a text that is not Prometheus'."""
    found: dict[str, Any] = dict.fromkeys(NAMES.values(), 0)
    try:
        counters = metrics.parse(text, at)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in NAMES:
                    found[NAMES[sample.name]] += int(sample.value)
                elif sample.name == "vllm:cache_config_info":
                    found["cache"] = dict(sample.labels)
                elif sample.name == "vllm:kv_cache_usage_perc":
                    found["kv_usage"] = max(found.get("kv_usage", 0.0), float(sample.value))
    except (ValueError, KeyError, OverflowError) as error:
        raise LabError(
            f"{url}/metrics is not in Prometheus' form.", why=f"{error}.", todo="Is it a vLLM server, and is nothing in between?"
        ) from error
    return Running(url, counters=counters, **found)


def difference(before: Running, after: Running) -> Running:
    """`after` with the counters of the time between the two only; counters that went back (a restart) are taken as they are."""
    old, new = before.counters, after.counters
    if new.generation_tokens < old.generation_tokens or new.drafts < old.drafts:
        return after
    positions = list(new.accepted_per_pos)
    for place, count in enumerate(old.accepted_per_pos[: len(positions)]):
        positions[place] -= count
    counters = replace(
        new,
        generation_tokens=new.generation_tokens - old.generation_tokens,
        prompt_tokens=new.prompt_tokens - old.prompt_tokens,
        drafts=new.drafts - old.drafts,
        draft_tokens=new.draft_tokens - old.draft_tokens,
        accepted_tokens=new.accepted_tokens - old.accepted_tokens,
        accepted_per_pos=tuple(positions),
    )
    return replace(
        after,
        counters=counters,
        prefix_hits=after.prefix_hits - before.prefix_hits,
        prefix_queries=after.prefix_queries - before.prefix_queries,
        preemptions=after.preemptions - before.preemptions,
    )


async def _get(client: httpx.AsyncClient, endpoint: Endpoint, path: str, **query: str) -> str:
    """The text of a path, "" where it is refused or not there. Raises `LabError` where the server is gone."""
    try:
        async with client.stream("GET", f"{endpoint.url}{path}", params=query, headers=endpoint.headers()) as response:
            if response.status_code != 200:
                return ""
            held = bytearray()
            async for part in response.aiter_bytes():
                held += part
                if len(held) > MOST:
                    raise LabError(f"{endpoint.url}{path} answers with more than {MOST >> 20} MiB.", todo="Is it a vLLM server?")
            return held.decode("utf-8", "replace")
    except httpx.HTTPError as error:
        raise LabError(f"{endpoint.url}{path} does not answer.", why=str(error) or type(error).__name__) from error


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


async def ask(url: str, *, seconds: float = 0.0, timeout: float = 10.0) -> Running:
    """The server at `url`; with `seconds`, counters are those of that time from now on. Raises `LabError` where there is no such server."""
    endpoint = await attach(url, timeout=timeout)
    async with httpx.AsyncClient(timeout=timeout, follow_redirects=False) as client:
        text = await _get(client, endpoint, "/metrics")
        if not text:
            raise LabError(
                f"{endpoint.url} shows no /metrics.",
                why="The doctor reads acceptance and settings from there.",
                todo="Start the server without --disable-log-stats, and let /metrics through whatever stands in front of it.",
            )
        running = from_metrics(endpoint.url, text)
        if seconds:
            await asyncio.sleep(seconds)
            running = difference(running, from_metrics(endpoint.url, await _get(client, endpoint, "/metrics")))
        version = _object(await _get(client, endpoint, "/version")).get("version", "")
        info = _object(await _get(client, endpoint, "/server_info", config_format="json"))

    def part(name: str) -> dict[str, Any]:
        found = info.get(name)
        return found if isinstance(found, dict) else {}

    environment = {str(key): str(value) for key, value in part("vllm_env").items()}
    return replace(
        running, model=endpoint.model, version=str(version), environment=environment, config=part("vllm_config"), system=part("system_env")
    )
