"""The workshop's routes: who may do what, whatever is sent, and that text stays data. Spoken to without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from lab import recipes
from lab.ui.workshop import web
from lab.ui.workshop.desk import Desk
from lab.ui.workshop.door import Door
from lab.ui.workshop.room import Room
from lab.ui.workshop.scenario import scenarios

from .echo import Echo

ACTS = ("lane", "restart", "check", "run", "push", "freeze", "reveal", "clear", "replay", "look", "allow", "refuse", "scene", "reset")


class Behind:
    """What stands behind the presenter's door."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    async def __call__(self, scope: Any, _receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"the page"})


class House:
    """A room with its door, and browsers at it."""

    def __init__(self, password: str | None) -> None:
        self.engine = Echo(recipes.get("smollm2"), pace=0.002)
        self.room = Room(self.engine.recipe, self.engine)
        self.desk = Desk(self.room, scenarios(), join={"url": "http://x/", "qr": {"size": 1, "path": ""}, "note": ""})
        self.door = Door(b"k" * 32, "t" * 24, password, 7)
        self.behind = Behind()
        self.app = web.Workshop(self.behind, room=self.room, desk=self.desk, door=self.door)

    def browser(self, **changes: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url="http://room", **changes)


def run(test: Callable[[House], Awaitable[None]], password: str | None = None) -> None:
    async def go() -> None:
        house = House(password)
        await house.room.get_ready()
        try:
            await asyncio.wait_for(test(house), 120)
        finally:
            await house.room.close()

    asyncio.run(go())


async def finished(browser: httpx.AsyncClient) -> dict[str, Any]:
    known: dict[str, Any] = {}
    while True:
        # As the page does, it waits for news: a seat that only looked again and again would be told that it asks too often.
        record: dict[str, Any] = (await browser.get("/room/state", params={**known, "wait": 10})).json()
        if record["me"]["state"] == "over":
            return record
        known = {"v": record["v"], "boot": record["boot"]}


def test_an_attendee_can_do_nothing_of_the_presenters() -> None:
    async def test(house: House) -> None:
        async with house.browser() as browser:
            before = house.room.lane, house.room.stage.id
            cookies: list[dict[str, str]] = [
                {},
                {house.door.name("presenter"): "1"},
                {house.door.name("presenter"): house.door.sign("seat", "1")},
                {house.door.name("presenter"): house.door.sign("presenter", "x" * 32)},
            ]
            for cookie in cookies:
                header = {"cookie": "; ".join(f"{name}={value}" for name, value in cookie.items())}
                for act in ACTS:
                    values = {"act": act, "draft": "none", "k": 1, "token": house.door.token, "presenter": True, "seat": 0}
                    assert (await browser.post("/present/room/act", json=values, headers=header)).status_code == 403
                for path in ("/present", "/present/", "/present/config", "/present/gradio_api/queue/join", "/present/room/state"):
                    assert (await browser.get(path, headers=header)).status_code == 403
                    assert (await browser.post(path, json={"fn_index": 0, "data": []}, headers=header)).status_code == 403
            for path in (
                "/config",
                "/gradio_api/queue/join",
                "/gradio_api/file=/etc/passwd",
                "/room/act",
                "/room/assets/../room.py",
                "/PRESENT/",
            ):
                assert (await browser.get(path)).status_code == 404
            assert (await browser.get("/present", params={"token": "t" * 23})).status_code == 403
            for extra in (
                {"k": 5},
                {"draft": "none"},
                {"lane": "x"},
                {"max_tokens": 4096},
                {"temperature": 2},
                {"restart": True},
                {"seat": 0},
            ):
                refused = await browser.post("/room/ask", json={"prompt": "x", **extra})
                assert refused.status_code == 403
                assert "Only the presenter" in refused.json()["error"]["what"]
            assert (house.room.lane, house.room.stage.id) == before
            assert house.behind.paths == []
            assert house.engine.requests == []

    run(test)


def test_the_presenters_link_becomes_a_cookie_and_stays_one() -> None:
    async def test(house: House) -> None:
        async with house.browser() as browser:
            answer = await browser.get("/present", params={"token": house.door.token, "scenario": "first-look", "scene": "2"})
            assert (answer.status_code, answer.headers["location"]) == (303, "/present/?scenario=first-look&scene=2")
            assert house.door.token not in answer.headers["set-cookie"]
            assert "HttpOnly" in answer.headers["set-cookie"]
            assert "SameSite=Lax" in answer.headers["set-cookie"]
            for _ in range(2):
                assert (await browser.get("/present/")).text == "the page"
            await browser.get("/present/gradio_api/queue/data")
            assert house.behind.paths == ["/", "/", "/gradio_api/queue/data"]
            said = await browser.post("/present/room/act", json={"act": "lane", "draft": "fp8", "k": 2})
            assert said.json() == {"said": "The room uses Eagle3 FP8, K=2, eager."}
            wrong = await browser.post("/present/room/act", json={"act": "lane", "draft": "x"})
            assert (wrong.status_code, wrong.json()["error"]["what"]) == (409, "There is no such draft.")
            evil = await browser.get("/present", params={"token": house.door.token, "scenario": "x\r\nset-cookie: a=b"})
            assert evil.headers["location"] == "/present/"

    run(test)


def test_seats_are_kept_apart() -> None:
    async def test(house: House) -> None:
        async with house.browser() as one, house.browser() as two, house.browser() as thief:
            for browser, prompt in ((one, "first's question"), (two, "second's question")):
                assert (await browser.post("/room/ask", json={"prompt": prompt})).status_code == 200
            for browser, prompt, other in ((one, "first's", "second's"), (two, "second's", "first's")):
                record = await finished(browser)
                assert "".join(record["mine"]["prompt"]).startswith(prompt)
                assert other not in json.dumps(record)
            name = house.door.name("seat")
            stolen = one.cookies[name].replace("1.", "2.", 1)
            answer = await thief.get("/room/state", headers={"cookie": f"{name}={stolen}"})
            assert answer.json()["me"]["seat"] == 3
            assert "mine" not in answer.json()

    run(test)


def test_a_restarted_app_takes_its_attendees_back() -> None:
    async def test(house: House) -> None:
        async with house.browser() as browser:
            old = (await browser.get("/room/state")).json()
            house.app.room = Room(house.engine.recipe, house.engine)
            new = (await browser.get("/room/state", params={"v": old["v"], "boot": old["boot"], "wait": 10})).json()
            assert new["boot"] != old["boot"], "and it did not wait"
            assert new["me"]["seat"] == old["me"]["seat"]
            async with house.browser(headers={"cookie": f"{house.door.name('seat')}=1.stale"}) as stale:
                assert (await stale.get("/room/state")).json()["me"]["seat"] == 2

    run(test)


def test_a_flood_is_told_to_wait() -> None:
    async def test(house: House) -> None:
        async with house.browser() as browser:
            await browser.get("/room/state")
            seat = house.room.seats[1]
            seat.limit.rate = seat.looks.rate = 0  # however slow this machine is
            codes = [(await browser.post("/room/stop", json={})).status_code for _ in range(40)]
            assert codes.count(200) == seat.limit.burst
            last = await browser.post("/room/ask", json={"prompt": "x"})
            assert last.status_code == 429
            assert "too fast" in last.json()["error"]["what"]
            codes = [(await browser.get("/room/state")).status_code for _ in range(70)]
            assert codes.count(200) == seat.looks.burst
        async with house.browser() as other:
            assert (await other.post("/room/ask", json={"prompt": "x"})).status_code == 200

    run(test)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b"{", 400),
        (b"[" * 20000, 400),
        (b"\xff\xfe", 400),
        (b'{"prompt": 5}', 400),
        (b'{"prompt": null}', 400),
        (b'{"prompt": "' + b"x" * 40000 + b'"}', 413),
        (b'{"prompt": "' + b"x" * 3000 + b'"}', 409),
        (b'{"prompt": "  "}', 409),
    ],
)
def test_bad_bodies_are_refused_in_words(body: bytes, status: int) -> None:
    async def test(house: House) -> None:
        async with house.browser() as browser:
            answer = await browser.post("/room/ask", content=body)
            assert answer.status_code == status
            assert answer.json()["error"]["what"].endswith(".")
            assert "Traceback" not in answer.text

    run(test)


def test_odd_prompts_and_queries_do_no_harm() -> None:
    async def test(house: House) -> None:
        async with house.browser() as browser:
            for prompt in ("\ud800 half", "\x00\x1b[2J", "\u202egnp", "<script>alert(1)</script>${alert(1)}{{x}}"):
                answer = await browser.post("/room/ask", content=json.dumps({"prompt": prompt}).encode())
                assert answer.status_code == 200
                await finished(browser)
            for query in ("v=x&n=-5&s=1e99&wait=nan", "v=inf&run=%00&stage=<b>", "n=999999999999", "%ff=%ff"):
                assert (await browser.get(f"/room/state?{query}")).status_code == 200
            page = await browser.get("/")
            assert "default-src 'self'" in page.headers["content-security-policy"]
            assert "unsafe-eval" not in page.headers["content-security-policy"]

    run(test)


def test_another_sites_page_cannot_act() -> None:
    async def test(house: House) -> None:
        async with house.browser() as browser:
            answer = await browser.post("/room/ask", json={"prompt": "x"}, headers={"origin": "http://evil.example"})
            assert answer.status_code == 403
            answer = await browser.post("/room/ask", json={"prompt": "x"}, headers={"origin": "http://room"})
            assert answer.status_code == 200

    run(test)


def test_the_password_stands_before_everything() -> None:
    async def test(house: House) -> None:
        async with house.browser() as browser:
            assert 'id="password"' in (await browser.get("/")).text
            for path in ("/room/state", "/room/state?screen=1", "/room/scene?scenario=first-look&scene=1"):
                assert (await browser.get(path)).status_code == 401
            for path in ("/room/ask", "/room/guess", "/room/offer", "/room/stop"):
                assert (await browser.post(path, json={"prompt": "x"})).status_code == 401
            assert (await browser.post("/room/login", json={"password": "wrong"})).status_code == 401
            assert (await browser.post("/room/login", json={"password": "right"})).status_code == 200
            assert (await browser.get("/room/state")).status_code == 200
            assert 'id="prompt"' in (await browser.get("/")).text
        async with house.browser() as guesser:
            codes = [(await guesser.post("/room/login", json={"password": str(n)})).status_code for n in range(40)]
            assert 429 in codes

    run(test, password="right")


def test_the_long_poll_answers_at_once_when_something_is_pushed() -> None:
    async def test(house: House) -> None:
        async with house.browser() as browser, house.browser() as screen:
            record = (await browser.get("/room/state")).json()
            loop = asyncio.get_running_loop()
            query = {"v": record["v"], "boot": record["boot"], "wait": 15}
            waits = [asyncio.create_task(browser.get("/room/state", params=query))]
            first = (await screen.get("/room/state", params={"screen": 1})).json()
            assert set(first) == {"boot", "v", "engine", "stage", "join"}, "the screen shows nobody's own answer"
            waits.append(asyncio.create_task(screen.get("/room/state", params={**query, "v": first["v"], "screen": 1})))
            await asyncio.sleep(0.05)
            assert not any(wait.done() for wait in waits)
            began = loop.time()
            await house.desk.act("clear", {})
            for wait in waits:
                assert (await wait).json()["stage"]["id"] == house.room.stage.id
            assert loop.time() - began < 10

    run(test)


def test_a_scene_for_an_attendees_deep_link() -> None:
    async def test(house: House) -> None:
        async with house.browser() as browser:
            scene = (await browser.get("/room/scene", params={"scenario": "first-look", "scene": 2})).json()
            assert scene["prompt"] == scenarios()["first-look"].scenes[1].prompt
            assert (await browser.get("/room/scene", params={"scenario": "no", "scene": 2})).status_code == 409

    run(test)


def test_every_file_of_the_pages_is_served_and_nothing_is_fetched_elsewhere() -> None:
    async def test(house: House) -> None:
        async with house.browser() as browser:
            for page in ("/", "/stage"):
                text = (await browser.get(page)).text
                assert "http" not in text
                for part in text.split("room/assets/")[1:]:
                    assert (await browser.get(f"/room/assets/{part.partition(chr(34))[0]}")).status_code == 200
            total = sum([len((await browser.get(f"/room/assets/{name}")).content) for name in web.FILES])
            assert total < 150_000

    run(test)
