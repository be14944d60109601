"""The workshop on the wire: one ASGI middleware before the presenter's Gradio page, with no framework of its own.

Attendees get a small page of the lab's own elements (about 60 kB, no plotly, no Gradio) and a handful of routes below `/room`; everything
under `/present` (the whole Gradio page: config, queue, files) and every act of the desk asks for the presenter's cookie, whatever the
client sends. A page hears what is new by a long poll that carries the version it knows, so a push reaches everybody at once and an idle
room costs nothing; hidden pages do not wait. Bodies are small JSON, text is data, and every refusal is a sentence.

    GET  /  /stage            the attendee's page, the large-type view
    GET  /room/state          ?v= &run= &n= &stage= &s= &wait=    what changed (attendee, or &screen=1)
    GET  /room/scene          ?scenario= &scene=                  a scene's prompt, for an attendee's deep link
    POST /room/ask | stop | offer | guess | login
    GET  /present?token=      exchanges the presenter's secret for a cookie
    GET  /present/room/state, POST /present/room/act              the desk
    ANY  /present/...         the Gradio page, with the prefix taken off

Limits: HTTP without TLS; a proxy before it must keep `Host` and pass long responses through.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from lab.env import assets
from lab.errors import LabError
from lab.ui.workshop.desk import Desk
from lab.ui.workshop.door import Door, cookies
from lab.ui.workshop.room import Room
from lab.ui.workshop.seats import Ask, Seat

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MOST_BODY = 32 << 10
LONGEST_WAIT = 15.0
FILES = {
    "core.js": "text/javascript",
    "steps.js": "text/javascript",
    "stage.js": "text/javascript",
    "room.js": "text/javascript",
    "login.js": "text/javascript",
    "chips.css": "text/css",
    "page.css": "text/css",
    "room.css": "text/css",
}
SAFE = {
    "content-security-policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; frame-ancestors 'self'; form-action 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


class Refused(Exception):
    """A request that gets `status` and a sentence."""

    def __init__(self, status: int, error: LabError) -> None:
        super().__init__(str(error))
        self.status, self.error = status, error


@dataclass
class Request:
    """What the routes need of an ASGI request."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    cookies: dict[str, str]
    receive: Receive
    #: Where it came from, as far as the server knows.
    address: str = ""
    set_cookies: list[str] = field(default_factory=list)

    async def body(self) -> dict[str, Any]:
        """The JSON object in the body; raises `Refused`."""
        data, more = b"", True
        while more:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise Refused(400, LabError("The request broke off."))
            data += message.get("body", b"")
            more = bool(message.get("more_body"))
            if len(data) > MOST_BODY:
                raise Refused(413, LabError(f"The request is larger than {MOST_BODY >> 10} kB.", todo="Shorten the prompt."))
        try:
            values = json.loads(data)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise Refused(400, LabError("The request is not a JSON object."))
        return values

    def number(self, name: str, most: float = 1e6) -> float:
        """A number of the query, 0 where it is none."""
        try:
            value = float(self.query.get(name, "0"))
        except ValueError:
            return 0.0
        return min(max(value, 0.0), most) if value == value else 0.0


def read(scope: Mapping[str, Any], receive: Receive) -> Request:
    """The request of an ASGI scope."""
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    query = {name: values[-1] for name, values in parse_qs(scope.get("query_string", b"").decode("latin-1")).items()}
    address = str((scope.get("client") or ("",))[0])
    return Request(scope["method"], scope["path"], query, headers, cookies(headers.get("cookie", "")), receive, address)


class Workshop:
    """The middleware: `Workshop(app, room=..., desk=..., door=...)`."""

    def __init__(self, app: Any, *, room: Room, desk: Desk, door: Door) -> None:
        self.app, self.room, self.desk, self.door = app, room, desk, door
        self._started = False

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            elif scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        if scope["path"] == "/gradio_api/startup-events" and not self._started:
            self._started = True  # gradio's own call to itself, right after the start
            await self.app(scope, receive, send)
            return
        request = read(scope, receive)
        try:
            self._origin(request)
            if request.path == "/present" or request.path.startswith("/present/"):
                await self._present(request, scope, send)
            else:
                await self._room(request, send)
        except Refused as refused:
            await self._refuse(request, send, refused.status, refused.error)
        except LabError as error:
            await self._refuse(request, send, 409, error)

    def _origin(self, request: Request) -> None:
        """Another site's page may not act in the name of whoever looks at it."""
        origin = request.headers.get("origin")
        if origin and request.method not in ("GET", "HEAD") and urlsplit(origin).netloc != request.headers.get("host"):
            raise Refused(403, LabError("This request comes from another site."))

    # --- attendees

    async def _room(self, request: Request, send: Send) -> None:
        path = request.path.rstrip("/") or "/"
        if path == "/favicon.ico":
            await self._send(None, send, 204, b"", "image/x-icon")
            return
        if path.startswith("/room/assets/"):
            await self._file(path.removeprefix("/room/assets/"), send)
            return
        if path == "/room/login" and request.method == "POST":
            await self._login(request, send)
            return
        if not self.door.is_guest(request.cookies):
            if path in ("/", "/stage"):
                await self._page("login.html", request, send)
                return
            raise Refused(401, LabError("This workshop asks for a password.", todo="Reload the page and type it."))
        if path in ("/", "/stage") and request.method in ("GET", "HEAD"):
            await self._page("room.html" if path == "/" else "stage.html", request, send)
        elif path == "/room/state" and request.method == "GET":
            await self._state(request, send)
        elif path == "/room/scene" and request.method == "GET":
            await self._json(request, send, self.desk.scene_of(request.query.get("scenario", ""), int(request.number("scene"))))
        elif path in ("/room/ask", "/room/stop", "/room/offer", "/room/guess") and request.method == "POST":
            await self._do(path.removeprefix("/room/"), request, send)
        else:
            raise Refused(404, LabError("There is nothing here.", todo="The workshop's page is at /."))

    def _seat(self, request: Request) -> Seat:
        number = self.door.seat(request.cookies)
        seat = self.room.sit(number)
        if number is None:
            request.set_cookies.append(self._cookie("seat", self.door.sign("seat", str(seat.number))))
        return seat

    async def _state(self, request: Request, send: Send) -> None:
        if request.query.get("screen"):
            seat = self.room.screen
        else:
            fresh = self.door.seat(request.cookies) is None
            seat = self._seat(request)
            if not fresh and not seat.looks.take():
                raise Refused(429, LabError("This page asks too often.", todo="Wait a few seconds."))
        version = int(request.number("v")) if request.query.get("boot") == self.room.boot else 0
        await self.room.changed(seat, version, request.number("wait", LONGEST_WAIT))
        record = self.room.view(
            seat,
            run=request.query.get("run", ""),
            lines=int(request.number("n")),
            stage=request.query.get("stage", ""),
            stage_lines=int(request.number("s")),
        )
        if seat is self.room.screen:
            record["join"] = self.desk.join
        await self._json(request, send, record)

    async def _do(self, what: str, request: Request, send: Send) -> None:
        seat = self._seat(request)
        if not seat.limit.take():
            raise Refused(429, LabError("That is too fast: you asked many times within a few seconds.", todo="Wait ten seconds."))
        values = await request.body()
        forbidden = sorted({"k", "draft", "lane", "restart", "temperature", "max_tokens", "seat"} & set(values))
        if forbidden:
            raise Refused(403, LabError(f"Only the presenter sets: {', '.join(forbidden)}."))
        if what == "ask":
            prompt = values.get("prompt")
            if not isinstance(prompt, str):
                raise Refused(400, LabError("The prompt is not text."))
            self.room.ask(seat, Ask(prompt.encode("utf-8", "replace").decode()))
        elif what == "stop":
            self.room.stop(seat)
        elif what == "offer":
            self.room.offer(seat)
        else:
            game, accept = values.get("game"), values.get("accept")
            if not isinstance(game, str) or not isinstance(accept, bool):
                raise Refused(400, LabError("A guess is accept or reject."))
            self.room.guess(seat, game, accept)
        await self._json(request, send, {"me": self.room.me(seat)})

    async def _login(self, request: Request, send: Send) -> None:
        values = await request.body()
        if not self.door.may_try(request.address):
            raise Refused(429, LabError("Too many passwords were tried.", todo="Wait a few seconds."))
        cookie = self.door.guest_cookie(str(values.get("password", "")))
        if cookie is None:
            raise Refused(401, LabError("That is not the password.", todo="Ask the presenter."))
        request.set_cookies.append(self._cookie("guest", cookie))
        await self._json(request, send, {"in": True})

    # --- the presenter

    async def _present(self, request: Request, scope: MutableMapping[str, Any], send: Send) -> None:
        token = request.query.get("token")
        if request.path in ("/present", "/present/") and token is not None:
            if not self.door.opens(token):
                raise Refused(403, LabError("This is not the presenter's link.", todo="Open the link that the terminal printed."))
            scenario = {name: request.query[name] for name in ("scenario", "scene") if name in request.query}
            query = "&".join(f"{name}={value}" for name, value in scenario.items() if value.replace("-", "").replace("_", "").isalnum())
            request.set_cookies.append(self._cookie("presenter", self.door.presenter_cookie(), path="/present"))
            await self._send(request, send, 303, b"", "text/plain", {"location": f"/present/{'?' if query else ''}{query}"})
            return
        if not self.door.is_presenter(request.cookies):
            raise Refused(403, LabError("This page is the presenter's.", todo="Open the presenter's link, which the terminal printed."))
        if request.path == "/present":
            await self._send(request, send, 307, b"", "text/plain", {"location": "/present/"})
        elif request.path == "/present/room/state":
            version = int(request.number("v")) if request.query.get("boot") == self.room.boot else 0
            await self.room.changed(self.room.presenter, version, request.number("wait", LONGEST_WAIT))
            await self._json(request, send, self.desk.view(request.query.get("stage", ""), int(request.number("s"))))
        elif request.path == "/present/room/act" and request.method == "POST":
            values = await request.body()
            said = await self.desk.act(str(values.pop("act", "")), values)
            await self._json(request, send, {"said": said})
        else:
            inner = {**scope, "path": scope["path"].removeprefix("/present") or "/"}
            if scope.get("raw_path"):
                inner["raw_path"] = scope["raw_path"].removeprefix(b"/present") or b"/"
            await self.app(inner, request.receive, send)

    # --- answers

    def _cookie(self, kind: str, value: str, path: str = "/") -> str:
        made: SimpleCookie = SimpleCookie()
        name = self.door.name(kind)
        made[name] = value
        for key, said in {"path": path, "httponly": True, "samesite": "Lax", "max-age": str(7 * 86400)}.items():
            made[name][key] = said
        return made[name].OutputString()

    async def _file(self, name: str, send: Send) -> None:
        if name not in FILES:
            raise Refused(404, LabError("There is no such file."))
        data = (Path(str(assets())) / "ui" / name).read_bytes()
        await self._send(None, send, 200, data, f"{FILES[name]}; charset=utf-8", {"cache-control": "max-age=60"})

    async def _page(self, name: str, request: Request, send: Send) -> None:
        data = (Path(str(assets())) / "ui" / name).read_bytes()
        await self._send(request, send, 200, data, "text/html; charset=utf-8")

    async def _json(self, request: Request, send: Send, record: Mapping[str, Any], status: int = 200) -> None:
        await self._send(request, send, status, json.dumps(record, ensure_ascii=False).encode("utf-8", "replace"), "application/json")

    async def _refuse(self, request: Request, send: Send, status: int, error: LabError) -> None:
        record = {"what": error.what, "why": error.why, "todo": error.todo}
        if request.headers.get("accept", "").startswith("text/html"):
            await self._send(request, send, status, f"{error}\n".encode(), "text/plain; charset=utf-8")
        else:
            await self._json(request, send, {"error": record}, status)

    async def _send(
        self, request: Request | None, send: Send, status: int, data: bytes, kind: str, extra: Mapping[str, str] | None = None
    ) -> None:
        headers = {**SAFE, "content-type": kind, "content-length": str(len(data)), **(extra or {})}
        listed = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
        listed += [(b"set-cookie", cookie.encode()) for cookie in (request.set_cookies if request else [])]
        await send({"type": "http.response.start", "status": status, "headers": listed})
        await send({"type": "http.response.body", "body": data if request is None or request.method != "HEAD" else b""})
