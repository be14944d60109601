"""The address that attendees open, and its QR code as one SVG path (drawn inline by the page's script; segno makes the modules)."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

import segno

from lab.errors import LabError


def lan_address(family: socket.AddressFamily = socket.AF_INET) -> str | None:
    """This machine's address on the network that leads outside, or None. Nothing is sent: a UDP socket is only pointed somewhere."""
    there = "2001:db8::1" if family == socket.AF_INET6 else "192.0.2.1"  # addresses kept for documentation (RFC 3849 and 5737)
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((there, 9))
            found = str(probe.getsockname()[0])
    except OSError:
        return None
    return None if found.startswith(("0.", "::")) else found


def is_open(host: str) -> bool:
    """Whether a server bound to `host` can be reached from other machines; raises `LabError` for what is no address."""
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError as error:
        raise LabError(
            f"'{host[:60]}' is not an address to listen on.",
            todo="Use 127.0.0.1 (this machine only), 0.0.0.0 (all networks) or one address.",
        ) from error


def join_url(host: str, port: int) -> str:
    """What an attendee types for a server bound to `host`; one bound to `::` hears no IPv4."""
    name = host
    if host == "0.0.0.0":
        name = lan_address() or "127.0.0.1"
    elif host == "::":
        name = lan_address(socket.AF_INET6) or "::1"
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/"


def qr(text: str) -> dict[str, Any]:
    """The QR code of `text` as `{"size": modules a side with the quiet zone, "path": SVG path data of the dark ones}`."""
    rows = list(segno.make(text, micro=False, error="m").matrix_iter(border=4))
    path = []
    for y, row in enumerate(rows):
        start = None
        for x, dark in enumerate([*row, 0]):
            if dark and start is None:
                start = x
            elif not dark and start is not None:
                path.append(f"M{start} {y}h{x - start}v1h-{x - start}z")
                start = None
    return {"size": len(rows), "path": "".join(path)}


def exposes(host: str, port: int, password: bool) -> str:
    """What binding to `host` means, in a sentence for the terminal."""
    if not is_open(host):
        return "Only this machine can open it. Attendees join over the network with --host 0.0.0.0 (or one address of this machine)."
    where = f"{f'[{host}]' if ':' in host else host}:{port}"
    who = "whoever knows the password" if password else "everybody on the networks of this machine"
    return (
        f"Listening on {where}: {who} can open the attendee page, ask this engine and see what is pushed. Traffic is not encrypted."
        " Only the presenter's link opens the presenter's page."
    )
