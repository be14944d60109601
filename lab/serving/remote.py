"""Servers that the lab did not start: is anybody there, what does it serve, and what can it tell?

`probe` asks the model list (the OpenAI API), and the plugin's `/v1/eagle3/info`; what the server lacks becomes sentences with the flags
that would bring it. Redirects are not followed and no proxy is used, so nothing but the address that the operator named is ever called.
A server that is restarting, or a network that is away, is asked again until `RETRY` seconds have passed.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable

import httpx

from lab.errors import LabError
from lab.serving.attach import Address, address
from lab.serving.command import INFO_PATH, MIDDLEWARE, SCHEDULER, Lane
from lab.serving.endpoint import Endpoint

RETRY = 45.0  # seconds that a page waits for a server which does not answer
PAUSE = 1.5  # seconds between two attempts
PLUGIN_FLAGS = f"--scheduler-cls {SCHEDULER} --middleware {MIDDLEWARE} --no-async-scheduling"


class Unreachable(LabError):
    """Nobody answers at the moment: worth another attempt, unlike a refusal."""


def client(where: Endpoint, *, timeout: float) -> httpx.Client:
    """A blocking client for one endpoint."""
    return httpx.Client(timeout=timeout, headers=where.headers(), trust_env=False, verify=where.verify())


def probe(where: Address, lane: Lane | None = None, *, timeout: float = 10.0) -> Endpoint:
    """The endpoint of the server at `where`: its first model, and what it lacks.

    Raises `Unreachable` if nobody answers, and `LabError` if the server refuses the key, has no model, or is something else.
    """
    found = Endpoint(where.url, "", lane, where.api_key, ca=where.ca)
    try:
        with client(found, timeout=timeout) as http:
            response = http.get(f"{where.url}/v1/models")
            if response.status_code in (401, 403):
                key = "refused the API key" if where.api_key else "wants an API key"
                raise LabError(f"The server at {where.url} {key}.", todo="Set VLLM_API_KEY to the server's key, or name it in the file.")
            if response.status_code in (502, 503, 504):
                raise Unreachable(
                    f"The server at {where.url} is not ready (HTTP {response.status_code}).", todo="Wait, or look at its log."
                )
            if response.is_redirect:
                to = found.clean(response.headers.get("location", "elsewhere"))
                raise LabError(f"{where.url} sends on to {to[:200]}, which is not followed.", todo="Name that address if it is yours.")
            response.raise_for_status()
            models = [(str(entry["id"]), str(entry.get("root") or entry["id"])) for entry in response.json()["data"]]
            missing = _missing(http, found)
            version = _version(http, found)
    except (httpx.TransportError, ssl.SSLError, OSError) as error:
        raise _unreachable(where, error) from error
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LabError(
            f"There is no OpenAI-style server at {where.url}.",
            why=found.clean(str(error) or type(error).__name__),
            todo="Check the address, and its path prefix if it has one.",
        ) from error
    if not models:
        raise LabError(f"The server at {where.url} offers no model.")
    model, root = models[0]
    return Endpoint(where.url, model, lane, where.api_key, ca=where.ca, root=root, missing=missing, version=version)


def _unreachable(where: Address, error: Exception) -> LabError:
    why = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in why:
        return LabError(
            f"The certificate of {where.url} is not trusted.",
            why=why,
            todo='Name the CA\'s certificate as `ca = "file.pem"` in the file of servers, or in SSL_CERT_FILE.',
        )
    return Unreachable(
        f"There is no OpenAI-style server at {where.url}.", why=f"{why}.", todo="Check the address, the tunnel, and that the server runs."
    )


def _missing(http: httpx.Client, found: Endpoint) -> tuple[str, ...]:
    """What the server cannot tell, with what would bring it; () with the plugin at work."""
    answer = http.get(f"{found.url}{INFO_PATH}")
    if answer.status_code == 200:
        try:
            tracing = answer.json()["tracing"]
            on, reason = bool(tracing["on"]), str(tracing["reason"])
        except (ValueError, KeyError, TypeError):
            on, reason = False, "Its plugin's answer is not understood: another version of the lab runs there."
        return () if on else (f"The server has the lab's plugin, but does not trace: {found.clean(reason)}",)
    return (
        "No steps: the server runs without the lab's plugin, so which tokens the draft proposed is not known."
        f" Install the lab's wheel there, set VLLM_USE_V2_MODEL_RUNNER=0 and add: {PLUGIN_FLAGS}",
    )


def _version(http: httpx.Client, found: Endpoint) -> str:
    """vLLM's own version route; "" where a proxy keeps it or the server is something else."""
    try:
        answer = http.get(f"{found.url}/version")
        return str(answer.json()["version"])[:40] if answer.status_code == 200 else ""
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return ""


def wait(
    where: Address,
    lane: Lane | None,
    *,
    say: Callable[[str], None] = lambda _text: None,
    cancelled: Callable[[], bool] = lambda: False,
    retry: float = RETRY,
) -> Endpoint | None:
    """`probe`, again and again while nobody answers, for `retry` seconds; None once `cancelled()` says so."""
    began = time.monotonic()
    while True:
        try:
            return probe(where, lane)
        except Unreachable as error:
            left = retry - (time.monotonic() - began)
            if left <= 0:
                raise
            say(f"{where.url} does not answer ({error.why or error.what}): trying again for {left:.0f} s")
        paused = time.monotonic() + PAUSE
        while time.monotonic() < paused:
            if cancelled():
                return None
            time.sleep(0.1)


async def attach(url: str, *, api_key: str | None = None, timeout: float = 10.0) -> Endpoint:
    """The endpoint of the OpenAI-style server at `url` ("/v1" at its end or not), serving its first model.

    The key is `api_key`, or what VLLM_API_KEY holds. Raises `LabError` if the server does not answer, refuses the key or has no model.
    """
    return await asyncio.to_thread(probe, address(url, api_key=api_key), timeout=timeout)
