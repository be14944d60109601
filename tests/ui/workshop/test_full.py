"""A room that is being served: many clients by the load driver, and real pages of a presenter and two attendees."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lab import recipes
from lab.ui.workshop.scenario import scenarios
from lab.ui.workshop.seats import Ask

from ..conftest import PORT, Watched, sync_api
from .echo import Echo

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Serve a workshop over the small engine."""
    from lab.ui.workshop.tab import serve

    monkeypatch.setenv("EAGLE3_LAB_CACHE", str(tmp_path / "cache"))
    rooms = []

    def start(engine: Any, **changes: Any) -> Any:
        rooms.append(serve(engine.recipe, engine, scenarios(), port=PORT, folder=tmp_path / "traces", **changes))
        return rooms[-1]

    yield start
    for room in rooms:
        room.close()


@pytest.fixture
def driver() -> Iterator[ModuleType]:
    """`scripts/room.py`."""
    spec = importlib.util.spec_from_file_location("room_driver", ROOT / "scripts" / "room.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["room_driver"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["room_driver"]


def engine(**changes: Any) -> Echo:
    return Echo(recipes.get("smollm2"), **{"pace": 0.01, **changes})


def ready(room: Any) -> None:
    """Until every lane has answered: what is driven for a number of seconds shall have them all."""
    until = time.monotonic() + 120
    while not room.desk.view()["verdict"]["good"]:
        assert time.monotonic() < until, room.desk.view()["verdict"]
        time.sleep(0.1)


@pytest.mark.slow
def test_a_room_of_twelve(opened: Callable[..., Any], driver: ModuleType) -> None:
    room = opened(engine(), at_once=1)  # so that somebody has to wait, however fast the machine is
    ready(room)
    summary = asyncio.run(driver.drive(room.url, room.presenter, clients=12, seconds=30, think=0.5, every=5, echo=True))
    assert summary["errors"] == []
    assert summary["wrong_session"] == []
    assert summary["answers"] > 0
    assert summary["push_s"]["pushes"] >= 1
    assert summary["push_s"]["missed"] == []
    assert summary["place_in_line"]["worst"] > 1, "nobody ever stood in line: this measured nothing"


@pytest.mark.slow
def test_the_driver_sees_a_trace_in_the_wrong_session(opened: Callable[..., Any], driver: ModuleType) -> None:
    room = opened(engine())
    ready(room)
    view = room.room.view
    room.room.view = lambda seat, **known: view(next(iter(room.room.seats.values()), seat) if seat.number > 0 else seat, **known)
    summary = asyncio.run(driver.drive(room.url, room.presenter, clients=3, seconds=8, think=0.2, echo=True))
    assert summary["wrong_session"]
    assert not summary["bars"]["no trace in the wrong session"]


@pytest.mark.browser
def test_a_presenter_and_two_attendees(opened: Callable[..., Any], browser: Any) -> None:
    fake = engine()
    room = opened(fake)
    faults: list[str] = []
    contexts = []

    def visit(url: str, width: int = 390, height: int = 844) -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": height}))
        contexts[-1].set_default_timeout(120_000)
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: faults.append(f"page error: {error}"))
        page.on("dialog", lambda dialog: faults.append(f"dialog: {dialog.message}"))
        page.on("console", lambda message: message.type == "error" and faults.append(f"console: {message.text} {message.location}"))
        page.on("request", lambda request: "//127.0.0.1" not in request.url[:20] and faults.append(f"outside: {request.url[:80]}"))
        page.goto(url)
        return page

    expect = sync_api.expect
    presenter = visit(room.presenter, 1280, 720)
    presenter.locator("#e3-steps .e3-steps-root").wait_for(timeout=60_000)
    assert room.door.token not in presenter.url, "the secret does not stay in the address bar"
    expect(presenter.get_by_role("tab", name="Workshop")).to_be_visible()  # the last of them
    names = presenter.get_by_role("tab").all_inner_texts()
    presenter.get_by_role("tab", name="Workshop").click()
    expect(presenter.locator(".e3-desk-verdict")).to_have_text("Ready: every lane answered.", timeout=60_000)
    assert presenter.get_by_role("tab").all_inner_texts() == names
    Watched(presenter).fits()
    assert presenter.locator(".e3-desk-qr svg path").get_attribute("d") == room.desk.join["qr"]["path"]

    first = visit(room.url)
    expect(first.locator("#seat")).to_have_text("Seat 1")  # before anybody else sits down
    second, screen = visit(f"{room.url}?scenario=first-look&scene=2"), visit(f"{room.url}stage", 1280, 720)
    expect(screen.locator(".e3-join-url")).to_have_text(room.url)
    expect(second.locator("#prompt")).to_have_value(scenarios()["first-look"].scenes[1].prompt)
    # the attendee's page has no control over the engine, and its browser cannot use the presenter's routes
    assert first.locator("select, input[type=number], input[type=radio]").count() == 0
    assert first.evaluate("fetch('present/room/act', {method: 'POST', body: '{\"act\": \"restart\"}'}).then(r => r.status)") == 403

    # an attendee's own prompt and trace, which is text whatever it says
    evil = "<img src=x onerror=alert(1)>${alert(2)}\u202e"
    first.locator("#prompt").fill(evil)
    first.get_by_role("button", name="Run").click()
    expect(first.locator("#said")).to_contain_text("Done:", timeout=60_000)
    expect(first.locator("#mine .e3-list .e3-chip").first).to_be_visible()
    assert first.locator("main img, main script").count() == 0
    assert "[U+202E]" in first.locator("#asked").inner_text()
    expect(second.locator("#mine .e3-list .e3-chip")).to_have_count(0)
    first.reload()
    expect(first.locator("#mine .e3-list .e3-chip").first).to_be_visible(timeout=60_000)
    expect(first.locator("#seat")).to_have_text("Seat 1")

    # offered, looked at, shown
    first.get_by_role("button", name="Offer to the room").click()
    presenter.get_by_role("button", name="Look").click()
    expect(presenter.locator(".e3-desk-offer")).to_contain_text("onerror=alert(1)")
    presenter.get_by_role("button", name="Show to all").click()
    for page in (first, second, screen):
        expect(page.locator("#stage .e3-stage-prompt")).to_contain_text("<img src=x", timeout=60_000)
        assert page.locator("#stage img").count() == 0

    # a run for all, then one step of it, chosen in the microscope
    presenter.get_by_role("button", name="Run the prompt for all").click()
    # the trace shown before is done, too: the new one is on the stage once its prompt is
    expect(second.locator("#stage .e3-stage-prompt")).not_to_contain_text("<img src=x", timeout=60_000)
    expect(second.locator('#stage .e3-steps-root[data-state="done"]')).to_be_visible(timeout=60_000)
    assert second.locator("#stage .e3-row").count() == len(fake.requests[-1].steps)

    # a step is frozen, guessed about, revealed
    presenter.get_by_label("Scenario", exact=True).select_option("first-look")
    presenter.get_by_role("button", name="Your turn: accept or reject?").click()
    for page, name in ((first, "Accept"), (second, "Reject")):
        page.locator(f".e3-vote-{name.lower()}").click(timeout=60_000)
        expect(page.locator(f".e3-vote-{name.lower()}")).to_have_attribute("aria-pressed", "true")
    expect(presenter.locator(".e3-desk-tally")).to_contain_text("Accept 1 · Reject 1")
    expect(screen.locator("#stage .e3-votes-count")).to_have_text("2 guesses so far")
    assert screen.locator("#stage [data-mark]").count() == 0
    presenter.get_by_role("button", name="Reveal").click()
    game = room.room.stage.game
    for page, accept in ((first, True), (second, False)):
        expect(page.locator(".e3-verdict-mine")).to_have_text(" You were right." if accept == game.truth else " You guessed otherwise.")
    expect(screen.locator(".e3-tally-true")).to_contain_text("Accept" if game.truth else "Reject")

    # the presenter's reload keeps the role; the microscope's selection is what Push is about
    presenter.reload()
    presenter.locator("#e3-steps .e3-steps-root").wait_for(timeout=60_000)
    presenter.get_by_role("button", name="Run", exact=True).click()
    expect(presenter.locator("#e3-steps .e3-steps-root")).to_have_attribute("data-state", "done", timeout=60_000)
    presenter.locator('#e3-steps .e3-row[data-step="4"] .e3-chip').first.click()
    presenter.get_by_role("tab", name="Workshop").click()
    expect(presenter.locator(".e3-desk-selection")).to_contain_text("step 4, token 1")
    presenter.get_by_role("button", name="Push the step").click()
    expect(second.locator("#stage .e3-focus-row")).to_have_attribute("data-step", "4", timeout=60_000)

    # the engine dies: a recording plays, and says so on every page
    fake.ready.clear()
    room.room.loop.call_soon_threadsafe(room.room.fall_back, room.room.lane)  # the room belongs to the server's loop, not to this thread
    for page in (first, screen):
        expect(page.locator(".e3-badge")).to_contain_text("Recording of Eagle3 BF16", timeout=60_000)
        expect(page.locator("#engine")).to_have_attribute("data-health", "down")
    sizes = first.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert sizes[0] <= sizes[1]
    for context in contexts:
        context.close()
    provoked = [fault for fault in faults if "403" in fault and "present/room/act" in fault]  # above, whenever the browser told it
    assert [fault for fault in faults if fault not in provoked] == []


@pytest.mark.browser
def test_what_the_room_does_leaves_a_page_in_peace(opened: Callable[..., Any], browser: Any) -> None:
    """Everything that anybody does rings every page: what a page shows already is not built anew for it."""
    fake = engine()
    room = opened(fake, at_once=1, warm=False)
    until = time.monotonic() + 120
    contexts: list[Any] = []
    faults: list[str] = []

    held: list[Any] = []

    def visit(url: str, width: int, height: int, late: str = "") -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": height}))
        contexts[-1].set_default_timeout(120_000)
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: faults.append(f"page error: {error}"))
        if late:
            page.route(late, lambda route: held.append(route))  # Playwright marks what it calls: no method of a list
        page.goto(url)
        return page

    def act(name: str, **values: Any) -> None:
        asyncio.run_coroutine_threadsafe(room.desk.act(name, values), room.room.loop).result(60)

    def do(call: Callable[[], Any]) -> None:
        async def there() -> None:
            call()

        asyncio.run_coroutine_threadsafe(there(), room.room.loop).result(60)

    expect = sync_api.expect
    screen = visit(f"{room.url}stage", 1280, 720)
    expect(screen.locator(".e3-join-url")).to_have_text(room.url)
    while room.room.health != "ready":
        assert time.monotonic() < until
        time.sleep(0.05)

    # a revealed step: its text stays where its reader has scrolled it, and keeps the focus
    act("scene", scenario="first-look", at=4)
    before = screen.locator(".e3-before")
    expect(before).to_be_visible()
    act("reveal")
    expect(screen.locator(".e3-tally-true")).to_be_visible()
    before.focus()
    before.evaluate("e => { e.mine = true; }")
    do(lambda: room.room.ask(room.room.sit(7), Ask("from another seat")))
    expect(screen.locator("#foot")).to_contain_text("1 here")
    assert screen.evaluate("document.activeElement.mine === true")

    # the card stands at its token, also in large type
    assert screen.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--e3-zoom')") == "1.6"
    act("run", prompt="shown to all")
    chip = screen.locator('#stage .e3-row[data-step="3"] .e3-chip').nth(1)
    expect(screen.locator('#stage .e3-steps-root[data-state="done"]')).to_be_visible()
    chip.click()
    card = screen.locator("#stage .e3-card")
    expect(card).to_be_visible()
    at, stands = chip.bounding_box(), card.bounding_box()
    assert stands["x"] == pytest.approx(at["x"], abs=4)
    assert min(abs(stands["y"] - at["y"] - at["height"]), abs(at["y"] - stands["y"] - stands["height"])) < 12

    # the browser's own zoom is not the page's
    screen.keyboard.press("Control+=")
    screen.keyboard.press("Control+-")
    screen.keyboard.press("Control+-")
    assert screen.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--e3-zoom')") == "1.6"

    # a deep link's prompt comes too late for somebody who types already
    typing = visit(f"{room.url}?scenario=first-look&scene=2", 1280, 720, "**/room/scene?*")
    typing.locator("#prompt").fill("my own")
    while not held:
        typing.wait_for_timeout(20)
    with typing.expect_response("**/room/scene?*"):
        held[0].continue_()
    typing.wait_for_timeout(300)
    assert typing.locator("#prompt").input_value() == "my own"

    # the desk: who waits is counted, and the keyboard stays on what it pressed
    desk = visit(room.presenter, 1280, 720)
    desk.locator("#e3-steps .e3-steps-root").wait_for(timeout=60_000)
    desk.get_by_role("tab", name="Workshop").click()
    desk.get_by_label("Scenario", exact=True).select_option("first-look")
    scene = desk.locator(".e3-desk-scenes button").first
    scene.focus()
    desk.keyboard.press("Enter")
    expect(desk.locator(".e3-desk-scenes li").first).to_have_attribute("aria-current", "step")
    expect(scene).to_be_focused()
    fake.pace = 30
    do(lambda: [room.room.sit(number) for number in (7, 8, 9)] and room.room.ring())
    expect(desk.locator(".e3-desk-address")).to_contain_text(
        "3 here · 0 in line"
    )  # the page that types has seat 8; who is here does not change any more
    for number in (7, 8, 9):
        do(lambda number=number: room.room.ask(room.room.sit(number), Ask("x")))  # type: ignore[misc]
    expect(desk.locator(".e3-desk-address")).to_contain_text("2 in line")
    for context in contexts:
        context.close()
    assert faults == []
