"""What the parts of serving tell each other: progress, endpoints, and the state of a lane."""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from lab.errors import LabError
from lab.serving.command import Lane

Stage = Literal["checkpoint", "starting", "ready", "failed", "evicted"]
State = Literal["starting", "ready", "dead", "failed", "stopped"]


@dataclass(frozen=True)
class Progress:
    """What a lane is doing: `detail` is the last log line or what is being made, `elapsed` is seconds since the start was asked for."""

    stage: Stage
    detail: str
    elapsed: float


@dataclass(frozen=True)
class Endpoint:
    """Where to send requests: `url` has no path ("http://127.0.0.1:8000") unless a proxy adds a prefix. `lane` is None for a server that
    the lab did not start. The key is in no text that this makes."""

    url: str
    model: str
    lane: Lane | None = None
    api_key: str | None = field(default=None, repr=False)
    #: Certificates to trust beside the system's (a PEM file), for https.
    ca: str | None = None
    #: What the model is called where it was loaded from: two servers may serve one model under two names.
    root: str = ""
    #: vLLM's version where the server tells it ("" elsewhere).
    version: str = ""
    #: Requests whose speed is compared: nothing is asked that costs the server time.
    measured: bool = False
    #: What a server elsewhere cannot tell, and what would bring it.
    missing: tuple[str, ...] = ()

    def headers(self) -> dict[str, str]:
        """The header that carries the API key, if there is one."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def verify(self) -> ssl.SSLContext | bool:
        """Whom to trust: the system's certificates (or SSL_CERT_FILE's), and `ca` beside them."""
        if not self.url.startswith("https"):
            return True
        context = ssl.create_default_context()
        if self.ca:
            context.load_verify_locations(cafile=self.ca)
        return context

    def client(self, timeout: httpx.Timeout | float) -> httpx.AsyncClient:
        """A client for this server: no proxy, no redirects, and a dead peer is noticed by the system after about a minute."""
        options: list[Any] = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
        for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):
                options.append((socket.IPPROTO_TCP, getattr(socket, name), value))
        transport = httpx.AsyncHTTPTransport(verify=self.verify(), socket_options=options, trust_env=False)
        return httpx.AsyncClient(timeout=timeout, headers=self.headers(), transport=transport, trust_env=False)

    def clean(self, text: str) -> str:
        """`text` from a server without the key, should the server have repeated it."""
        return text.replace(self.api_key, "***") if self.api_key else text


@dataclass(frozen=True)
class LaneStatus:
    """One lane for the page: `dead` is a server that ended by itself (`error` holds its log's tail), `failed` one that never got ready."""

    lane: Lane
    state: State
    progress: Progress
    endpoint: Endpoint | None = None
    #: Proportional set size of the lane's processes in bytes; None when it is not running.
    memory: int | None = None
    in_use: int = 0
    error: LabError | None = None
    log: str | None = None
