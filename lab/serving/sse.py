"""Server-sent events from an HTTP response (WHATWG HTML, "Server-sent events"), split at the bytes that the standard names.

httpx's own line iterator also splits at U+2028 and its like, which JSON may hold unescaped; hence this.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx


async def events(response: httpx.Response) -> AsyncIterator[tuple[str, bytes]]:
    """(event name, data) of each event; the name is "message" where the server gives none. Comments are left out."""
    data: list[bytes] = []
    name, rest = "message", b""
    async for block in response.aiter_bytes():
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line:
                if data:
                    yield name, b"\n".join(data)
                name, data = "message", []
                continue
            key, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if key == b"data":
                data.append(value)
            elif key == b"event":
                name = value.decode("utf-8", errors="replace")
