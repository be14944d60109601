"""Who may come in, and as what: the presenter's link, signed seats, an optional password, and rate limits. Standard library only.

The presenter's role is a secret in a link, exchanged at once for an HttpOnly cookie, so that it does not stay in the address bar on the
projector. A seat is a number signed with the room's key: an attendee cannot make one up or take another's. Every comparison of secrets is
`hmac.compare_digest`. Key and presenter's secret are kept in a file (mode 0600), so links and seats survive a restart of the app.
Limits: without TLS, whoever can listen on the network sees cookies and password; who throws the cookie away gets a new seat.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from pathlib import Path

from lab.env import cache_dir
from lab.errors import LabError


@dataclass
class Bucket:
    """A token bucket: `burst` at once, `rate` a second after that (clock in seconds)."""

    rate: float
    burst: float
    left: float = -1.0
    at: float = 0.0

    def take(self, now: float | None = None) -> bool:
        """Whether one more is within the limit."""
        now = time.monotonic() if now is None else now
        self.left = self.burst if self.left < 0 else min(self.burst, self.left + (now - self.at) * self.rate)
        self.at = now
        if self.left < 1:
            return False
        self.left -= 1
        return True


def cookies(header: str) -> dict[str, str]:
    """The cookies of a request's header; a header that is none gives none."""
    try:
        return {name: morsel.value for name, morsel in SimpleCookie(header).items()}
    except CookieError:
        return {}


@dataclass
class Door:
    """The secrets of one room. `port` keeps apart the cookies of two rooms on one host."""

    key: bytes
    #: The secret of the presenter's link.
    token: str
    password: str | None = None
    port: int = 0
    #: Passwords tried, by the address they came from: nobody guesses quickly, and nobody keeps the others out.
    tries: OrderedDict[str, Bucket] = field(default_factory=OrderedDict)

    def may_try(self, address: str) -> bool:
        """Whether one more password from this address is looked at."""
        bucket = self.tries.setdefault(address, Bucket(rate=0.5, burst=10))
        while len(self.tries) > 1000:
            self.tries.popitem(last=False)
        return bucket.take()

    def name(self, kind: str) -> str:
        """The cookie's name for `kind`: seat, guest or presenter."""
        return f"eagle3-{kind}-{self.port}"

    def sign(self, kind: str, value: str) -> str:
        """`value` with a signature that only this room can make."""
        made = hmac.new(self.key, f"{kind}:{value}".encode(), hashlib.sha256).hexdigest()
        return f"{value}.{made}"

    def read(self, kind: str, signed: str | None) -> str | None:
        """The value of a signed cookie, or None where it is not ours."""
        value, _, _ = (signed or "").rpartition(".")
        return value if signed and hmac.compare_digest(signed.encode(), self.sign(kind, value).encode()) else None

    def is_presenter(self, found: dict[str, str]) -> bool:
        """Whether the cookies are the presenter's."""
        return self.read("presenter", found.get(self.name("presenter"))) == self._digest(self.token)

    def presenter_cookie(self) -> str:
        """The presenter's cookie: it ends when the token does."""
        return self.sign("presenter", self._digest(self.token))

    def opens(self, token: str) -> bool:
        """Whether `token` is the presenter's."""
        return hmac.compare_digest(token.encode(), self.token.encode())

    def is_guest(self, found: dict[str, str]) -> bool:
        """Whether the cookies may enter: always without a password."""
        if self.password is None or self.is_presenter(found):
            return True
        return self.read("guest", found.get(self.name("guest"))) == self._digest(self.password)

    def guest_cookie(self, password: str) -> str | None:
        """The cookie for the right password, else None."""
        if self.password is None or not hmac.compare_digest(password.encode(), self.password.encode()):
            return None
        return self.sign("guest", self._digest(self.password))

    def seat(self, found: dict[str, str]) -> int | None:
        """The seat in the cookies, or None where there is none that this room gave away."""
        value = self.read("seat", found.get(self.name("seat")))
        return int(value) if value and value.isdecimal() and len(value) < 8 else None

    def _digest(self, secret: str) -> str:
        return hmac.new(self.key, secret.encode(), hashlib.sha256).hexdigest()[:32]


def keys_file() -> Path:
    """Where the room's secrets are kept."""
    return cache_dir() / "workshop" / "keys.json"


def open_door(*, password: str | None, port: int, renew: bool = False) -> Door:
    """The door with the secrets of last time, or with new ones (`renew`, or where there are none)."""
    path = keys_file()
    try:
        saved = {} if renew else json.loads(path.read_text(encoding="utf-8"))
        key, token = bytes.fromhex(saved["key"]), str(saved["token"])
        if len(key) == 32 and len(token) >= 20:
            return Door(key, token, password, port)
    except (OSError, ValueError, KeyError, TypeError):
        pass  # none yet, or not readable: new ones
    key, token = secrets.token_bytes(32), secrets.token_urlsafe(18)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as handle:
            json.dump({"key": key.hex(), "token": token}, handle)
    except OSError as error:
        raise LabError(
            f"The workshop's secrets cannot be kept in {path}.", why=f"{error.strerror or error}.", todo="Set EAGLE3_LAB_CACHE."
        ) from error
    return Door(key, token, password, port)
