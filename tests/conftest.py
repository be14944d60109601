"""A stand-in for a vLLM server and for its benchmark client, for tests of sweeps: real HTTP, a real process, counters that add up."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lab.errors import LabError
from lab.serving.command import Lane
from lab.serving.endpoint import Endpoint

#: Runs as a process of its own: the lab's worker with another way to measure, which takes the real client's arguments, tells the server
#: what it "sent", and writes a file of the real form.
CLIENT = """
import json, os, sys, time, urllib.request
from lab.bench import vllm_client
if sys.argv[1] == "prompts":
    open(sys.argv[2], "w").write("".join(json.dumps({"prompt": f"p{n}", "output_tokens": 8}) + "\\n" for n in range(2)))
    raise SystemExit(0)
def measure(words):
    def value(flag, default=None):
        return words[words.index(flag) + 1] if flag in words else default
    conc, count, warm = (int(value(flag)) for flag in ("--max-concurrency", "--num-prompts", "--num-warmups"))
    told = {"requests": count + warm, "tokens": 10 * (count + warm), "concurrency": conc, "words": words, "pid": os.getpid()}
    body = json.dumps(told).encode()
    request = urllib.request.Request(value("--base-url") + "/fake/load", body, {"Content-Type": "application/json"})
    told = json.load(urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request))
    time.sleep(told["pause"])
    if told["fail"] == "killed":
        os._exit(7)
    if told["fail"]:
        sys.exit("ValueError: " + told["fail"])
    speed = told["speed"] * conc ** 0.5
    result = {"duration": 10 * count / speed, "completed": count - told["lost"], "failed": told["lost"], "total_input_tokens": 20 * count,
        "total_output_tokens": 10 * count, "output_throughput": speed, "total_token_throughput": 3 * speed, "request_throughput": 1.0,
        "output_lens": [10] * count, "errors": ["Traceback\\nBoom: <b>lost</b>"] * told["lost"], "max_concurrency": conc}
    for metric, ms in (("ttft", 50.0), ("tpot", 1000 * conc / speed), ("itl", 9.0), ("e2el", 400.0)):
        result |= {f"mean_{metric}_ms": ms, f"median_{metric}_ms": ms, f"std_{metric}_ms": 1.0, f"p99_{metric}_ms": 2 * ms}
    if told["drafts"]:
        result |= {"spec_decode_num_drafts": 100, "spec_decode_draft_tokens": 300, "spec_decode_accepted_tokens": 150,
            "spec_decode_per_position_acceptance_rates": [0.8, 0.5, 0.2]}
    for item in words[words.index("--metadata") + 1:]:
        key, _, text = item.partition("=")
        result[key] = text
    open(value("--result-dir") + "/" + value("--result-filename"), "w").write(json.dumps(result))
vllm_client.measure = measure
vllm_client.worker(sys.argv[2])
"""


@dataclass
class FakeVllm:
    """One server for every lane; `speed` is tokens per second of a lane at concurrency 1, by draft. Faults are for a test to set."""

    url: str = ""
    speed: dict[str, float] = field(default_factory=lambda: {"none": 100.0, "bf16": 150.0, "fp8": 160.0})
    kv_tokens: int = 100_000
    pause: float = 0.0
    #: Concurrency to message: the client ends with it. Concurrency to number: requests that fail.
    fail: dict[int, str] = field(default_factory=dict)
    lost: dict[int, int] = field(default_factory=dict)
    #: Requests and tokens of somebody else during the next cell.
    others: int = 0
    no_start: set[str] = field(default_factory=set)
    loads: list[dict[str, Any]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    used: list[str] = field(default_factory=list)
    restarts: list[str] = field(default_factory=list)
    requests: int = 0
    tokens: int = 0
    lane: Lane | None = None

    @asynccontextmanager
    async def use(self, lane: Lane, *, on_progress: Any = None) -> AsyncIterator[Endpoint]:  # noqa: ARG002
        self.asked.append(lane.key)
        if lane.draft in self.no_start:
            raise LabError(f"The engine for {lane.label} did not start.", why="a reason from its log")
        self.lane = lane
        self.used.append(lane.key)
        yield Endpoint(self.url, lane.recipe.name, lane)

    async def restart(self, lane: Lane, *, on_progress: Any = None) -> Endpoint:  # noqa: ARG002
        self.restarts.append(lane.key)
        if lane.draft in self.no_start:
            raise LabError(f"The engine for {lane.label} did not start.", why="again")
        return Endpoint(self.url, lane.recipe.name, lane)

    def metrics(self) -> str:
        lines = [f"vllm:generation_tokens_total {self.tokens}", f'vllm:request_success_total{{finished_reason="length"}} {self.requests}']
        lines.append(f'vllm:cache_config_info{{kv_cache_size_tokens="{self.kv_tokens}"}} 1.0')
        types = ["vllm:generation_tokens counter", "vllm:request_success counter", "vllm:cache_config_info gauge"]
        return "\n".join([*(f"# TYPE {one}" for one in types), *lines, ""])

    def load(self, told: dict[str, Any]) -> dict[str, Any]:
        assert self.lane is not None
        self.loads.append(told | {"lane": self.lane.key})
        self.requests += told["requests"] + self.others
        self.tokens += told["tokens"] + self.others
        self.others = 0
        conc, draft = told["concurrency"], self.lane.draft
        found = {"speed": self.speed[draft], "drafts": draft != "none", "pause": self.pause}
        return found | {"fail": self.fail.get(conc, ""), "lost": self.lost.get(conc, 0)}


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVllm]:
    """The server on a free port, and the client's command replaced by the stand-in."""
    from lab.bench import client

    fake = FakeVllm()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def _send(self, content: str) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content.encode())

        def do_GET(self) -> None:
            self._send(fake.metrics())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(json.dumps({"count": 31} if self.path == "/tokenize" else fake.load(body)))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    script = tmp_path / "client.py"
    script.write_text(CLIENT)
    command: Callable[[], tuple[str, ...]] = lambda: (sys.executable, str(script))  # noqa: E731
    monkeypatch.setattr(client, "program", command)
    yield fake
    server.shutdown()
    server.server_close()
