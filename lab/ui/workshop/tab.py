"""The presenter's tab, and a workshop's page as one server: the lab's page below `/present`, the room's pages and routes before it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from lab.recipes.model import Recipe
from lab.ui.app import Frame, Lab
from lab.ui.build import Around, free_port, launch, page
from lab.ui.components import live
from lab.ui.engine import Engine
from lab.ui.workshop import join
from lab.ui.workshop.desk import Desk
from lab.ui.workshop.door import Door, open_door
from lab.ui.workshop.room import Room
from lab.ui.workshop.scenario import Scenario
from lab.ui.workshop.web import Workshop


@dataclass(frozen=True)
class Open:
    """A workshop that is being served. `close()` ends the server; the engine is the caller's."""

    demo: gr.Blocks
    room: Room
    desk: Desk
    door: Door
    #: For attendees, and with the presenter's secret.
    url: str
    presenter: str

    def close(self) -> None:
        """Let waiting pages go, then stop serving."""
        self.room.leave()
        self.demo.close()


class _Begin:
    """Starts the room's own tasks with the first request: they belong to the server's event loop."""

    def __init__(self, app: Any, *, room: Room, desk: Desk, door: Door, warm: bool) -> None:
        self._inner = Workshop(app, room=room, desk=desk, door=door)
        self._room, self._desk, self._warm, self._begun = room, desk, warm, False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and not self._begun:
            self._begun = True
            self._room.spawn(self._room.watch())
            self._room.spawn(self._desk.preflight() if self._warm else self._room.get_ready())
        if scope["type"] == "lifespan":
            receive = _closing(receive, self._room)
        await self._inner(scope, receive, send)


def _closing(receive: Any, room: Room) -> Any:
    """The server's messages; before it shuts down, the room ends what it has under way."""

    async def inner() -> Any:
        message = await receive()
        if message["type"] == "lifespan.shutdown":
            with contextlib.suppress(asyncio.CancelledError):
                await room.close()
        return message

    return inner


def serve(
    recipe: Recipe,
    engine: Engine,
    scenarios: Mapping[str, Scenario],
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    password: str | None = None,
    address: str | None = None,
    at_once: int = 4,
    tokens: int = 64,
    renew: bool = False,
    warm: bool = True,
    folder: Path | None = None,
) -> Open:
    """Serve a workshop and come back. `address`: what attendees type, where that is not `host` (a proxy); `warm`: preflight at once."""
    chosen = free_port(port, host=host)
    door = open_door(password=password, port=chosen, renew=renew)
    url = address or join.join_url(host, chosen)
    note = "only this machine can open it" if not join.is_open(host) and address is None else "asks for a password" if password else ""
    room = Room(recipe, engine, at_once=at_once, tokens=tokens)
    desk = Desk(room, scenarios, join={"url": url, "qr": join.qr(url), "note": note})

    def more(lab: Lab, _: Frame) -> None:
        room.runs = lab.runs
        with gr.Tab("Workshop", id="workshop", elem_id="e3-tab-workshop"):
            with gr.Row(elem_classes=["e3-stage"]):
                live("desk", elem_id="e3-desk")

    demo = page(recipe, engine, folder=folder, warm=False, more=more)
    # Starlette takes (class, positional, named) for a middleware. The page behind it thinks that it sits behind a prefix.
    middleware = (_Begin, (), {"room": room, "desk": desk, "door": door, "warm": warm})
    around = Around(
        host=host,
        scripts=("stage.js", "desk.js"),
        styles=("room.css",),
        options={"root_path": "/present", "app_kwargs": {"middleware": [middleware]}},
        said=f"Attendees join at {url}",
    )
    local = launch(demo, port=chosen, block=False, around=around)
    return Open(demo, room, desk, door, url, f"{local.rstrip('/')}/present?token={door.token}")
