"""`eagle3-lab workshop`: serve a room, or (`--check`) only see whether everything is ready for one."""

from __future__ import annotations

import asyncio
import getpass
import sys
from typing import Annotated

import typer

from lab import env, recipes
from lab.errors import LabError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _check(recipe: str) -> int:
    """The preflight alone, on the terminal."""
    from lab.serving.lanes import Lanes
    from lab.ui.engine import Serving
    from lab.ui.workshop.preflight import Check, preflight, verdict

    lanes = Lanes()
    checks: list[Check] = []

    async def go() -> None:
        said: dict[str, str] = {}
        async for check in preflight(Serving(lanes), recipes.get(recipe), checks):
            if check.state in ("good", "bad") and said.get(check.name) != check.text:
                said[check.name] = check.text
                print(f"{'ok' if check.state == 'good' else 'NO'}  {check.name}: {check.text}", flush=True)
            elif check.state == "busy" and check.name not in said:
                said[check.name] = ""
                print(f"..  {check.name}: starting", flush=True)

    try:
        asyncio.run(go())
    finally:
        lanes.shutdown()
    good, text = verdict(checks)
    print(text)
    return 0 if good else 1


@app.command()
def workshop(
    recipe: Annotated[str, typer.Option("--recipe", help="Which recipe.")] = recipes.DEFAULT,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 lets the whole network in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port (the next free one if it is taken).")] = 7860,
    address: Annotated[str | None, typer.Option("--address", help="What attendees open, where a proxy or a name stands before it.")] = None,
    ask_password: Annotated[bool, typer.Option("--password", help="Ask here for a password that attendees must type.")] = False,
    at_once: Annotated[int, typer.Option("--at-once", min=1, max=32, help="Prompts that the engine answers at once.")] = 4,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="New tokens of every answer.")] = 64,
    new_link: Annotated[bool, typer.Option("--new-link", help="Make a new presenter's link; the old one and all seats end.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Start every lane, run a prompt on each, say what is missing, and stop.")] = False,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the presenter's page in a browser.")] = False,
) -> None:
    """One engine, a presenter and a room of attendees: their browsers share its queue. EAGLE3_LAB_PASSWORD sets a password, too."""
    if check:
        raise typer.Exit(_check(recipe))
    from lab.serving.lanes import Lanes
    from lab.ui.engine import Serving
    from lab.ui.workshop import join
    from lab.ui.workshop.scenario import scenarios
    from lab.ui.workshop.tab import serve

    found = recipes.get(recipe)
    if tokens > found.max_model_len:
        raise LabError(f"{tokens} new tokens do not fit.", todo=f"Choose at most {found.max_model_len}.")
    password = getpass.getpass("Password for attendees: ") if ask_password else env.workshop_password()
    if ask_password and not password:
        raise LabError("The password is empty.", todo="Type one, or leave --password away.")
    print(join.exposes(host, port, bool(password)), flush=True)
    lanes = Lanes()
    room = None
    try:
        room = serve(
            found,
            Serving(lanes),
            scenarios(),
            host=host,
            port=port,
            password=password,
            address=address,
            at_once=at_once,
            tokens=tokens,
            renew=new_link,
        )
        print(f"Presenter (keep this link to yourself): {room.presenter}", flush=True)
        if open_browser:
            import webbrowser

            webbrowser.open(room.presenter)
        room.demo.block_thread()
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
    finally:
        if room is not None:
            room.close()
        lanes.shutdown()
