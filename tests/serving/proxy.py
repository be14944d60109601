"""A reverse proxy for tests: it stands between the lab and a server as an ingress does, under a path prefix, and fails as networks do."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class Proxy(ThreadingHTTPServer):
    """Forwards `prefix`/... to `target`. `cut()` breaks every connection; `silent` makes it accept and say nothing."""

    daemon_threads = True

    def __init__(self, target: str, prefix: str = "", context: ssl.SSLContext | None = None) -> None:
        self.target, self.prefix, self.silent = urlsplit(target), prefix, False
        self.paths: list[str] = []
        self.open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), Handler)
        self.scheme = "http"
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_side=True)
            self.scheme = "https"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_address[1]}{self.prefix}"

    def handle_error(self, request: object, client_address: object) -> None:
        pass

    def cut(self) -> None:
        for one in list(self.open):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


class Handler(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        self.server.open.add(self.connection)

    def finish(self) -> None:
        self.server.open.discard(self.connection)
        super().finish()

    def _forward(self) -> None:
        server = self.server
        server.paths.append(self.path)
        if server.silent:
            threading.Event().wait(30)
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not self.path.startswith(f"{server.prefix}/"):
            self.send_error(404)
            return
        link = http.client.HTTPConnection(server.target.hostname or "", server.target.port, timeout=60)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection", "accept-encoding")}
            link.request(self.command, self.path.removeprefix(server.prefix), body or None, headers)
            answer = link.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() in ("content-type", "location"):
                    self.send_header(name, value)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while block := answer.read1(65536):
                if server.silent:
                    threading.Event().wait(30)
                self.wfile.write(f"{len(block):x}\r\n".encode() + block + b"\r\n")
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        except (OSError, http.client.HTTPException):
            self.close_connection = True
        finally:
            link.close()

    do_GET = do_POST = _forward


@contextmanager
def serving(proxy: ThreadingHTTPServer) -> Iterator[ThreadingHTTPServer]:
    """Serve in a thread while the block runs."""
    thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()
