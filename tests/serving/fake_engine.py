"""A stand-in for the vLLM server, with nothing of vLLM in it: run as a script with vLLM's flags, or served from a test's own process.

As a script it is steered by the environment: FAKE_START (seconds before it answers), FAKE_UNTIL (a file that must be there before it
answers), FAKE_FAIL (a line to die with), FAKE_CHILD (leave a child behind that ignores SIGTERM), FAKE_STUBBORN (ignore SIGTERM itself),
FAKE_RUNNING (requests that /metrics reports as running).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0"}} 0.0
"""


class Fake(ThreadingHTTPServer):
    """`chunks` and `steps` are what the two streams send: bytes as they are, floats as pauses in seconds, None as a broken connection."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int = 0, model: str = "smollm2") -> None:
        self.model = model
        self.chunks: list[bytes | float | None] = []
        self.steps: list[bytes | float | None] | int = 404
        self.status, self.refusal = 200, {}
        self.running = 0
        #: More lines for each reading of /metrics, one after the other.
        self.counters: Iterator[str] = itertools.repeat("")
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.key: str | None = None
        #: Set when a client left while its answer was being written.
        self.hung_up = threading.Event()
        super().__init__(("127.0.0.1", port), Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients hang up on purpose here."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Fake
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, items: list[bytes | float | None]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        for item in items:
            if item is None:
                self.close_connection = True
                self.connection.close()
                return
            if isinstance(item, float):
                time.sleep(item)
                continue
            self.wfile.write(f"{len(item):x}\r\n".encode() + item + b"\r\n")
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def _allowed(self) -> bool:
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self._send(401, b'{"error": "Unauthorized"}')
            return False
        return True

    def do_GET(self) -> None:
        path = urlsplit(self.path)
        self.server.paths.append(path.path)
        if path.path == "/health":
            self._send(200, b"")
        elif path.path == "/metrics":
            self._send(200, (METRICS.format(running=float(self.server.running)) + next(self.server.counters)).encode(), "text/plain")
        elif path.path.startswith("/v1/") and not self._allowed():
            pass
        elif path.path == "/v1/models":
            self._send(200, json.dumps({"data": [{"id": self.server.model}]}).encode())
        elif path.path == "/v1/eagle3/steps" and isinstance(self.server.steps, list):
            assert parse_qs(path.query)["trace"]
            self._stream(self.server.steps)
        elif path.path == "/v1/eagle3/steps":
            status = self.server.steps if isinstance(self.server.steps, int) else 404
            self._send(status, b'{"error": {"message": "no steps here"}}')
        else:
            self._send(404, b'{"detail": "Not Found"}')

    def do_POST(self) -> None:
        self.server.paths.append(self.path)
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if not self._allowed():
            return
        if self.server.status != 200:
            self._send(self.server.status, json.dumps(self.server.refusal).encode())
        else:
            try:
                self._stream(self.server.chunks)
            except OSError:
                self.server.hung_up.set()
                raise


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    arguments, _ = parser.parse_known_args()
    print("INFO 01-01 00:00:00 [fake.py:1] fake engine is loading", flush=True)
    if os.environ.get("FAKE_STUBBORN"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.environ.get("FAKE_CHILD"):
        deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()  # from here on it is deaf
    if os.environ.get("FAKE_FAIL"):
        sys.exit(os.environ["FAKE_FAIL"])
    time.sleep(float(os.environ.get("FAKE_START", "0")))
    while "FAKE_UNTIL" in os.environ and not os.path.exists(os.environ["FAKE_UNTIL"]):
        time.sleep(0.02)
    server = Fake(arguments.port, arguments.served_model_name)
    server.running = int(os.environ.get("FAKE_RUNNING", "0"))
    print(f"INFO 01-01 00:00:01 [fake.py:2] pid {os.getpid()}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
