"""The workshop's parts without a server: the line, the game, scenarios, the door, the address."""

from __future__ import annotations

import ipaddress
import json
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.errors import LabError
from lab.trace.model import Request
from lab.ui.workshop import join
from lab.ui.workshop.door import Bucket, Door, cookies, keys_file, open_door
from lab.ui.workshop.guess import Game
from lab.ui.workshop.line import PRESENTER, Line, ordinal
from lab.ui.workshop.scenario import parse, scenarios

from ..fakes import ANSWER, PIECES, steps_of

# --- the line


def order(line: Line[str]) -> list[str]:
    """Everything in the order in which it is taken, each done before the next."""
    taken = []
    while (job := line.take()) is not None:
        taken.append(job.what)
        line.done(job)
    return taken


def test_seats_take_turns() -> None:
    line: Line[str] = Line(at_once=1, most_each=9)
    for seat, what in ((1, "a1"), (1, "a2"), (1, "a3"), (2, "b1"), (3, "c1"), (2, "b2")):
        line.put(seat, what)
    assert [line.place(seat) for seat in (1, 2, 3, 4)] == [1, 2, 3, None]
    assert order(line) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_one_at_a_time_each_and_so_many_at_once() -> None:
    line: Line[str] = Line(at_once=2, most_each=9)
    for what in ("a1", "a2", "b1", "c1"):
        line.put(ord(what[0]), what)
    first, second = line.take(), line.take()
    assert first is not None
    assert second is not None
    assert (first.what, second.what, line.take()) == ("a1", "b1", None)
    line.done(second)
    third = line.take()
    assert third is not None
    assert third.what == "c1", "a's second prompt waits while its first is answered"


def test_the_presenter_goes_first_and_a_broken_off_prompt_before_all() -> None:
    line: Line[str] = Line(at_once=1)
    line.put(1, "a")
    line.put(2, "b")
    line.put(PRESENTER, "p")
    assert line.place(PRESENTER) == 1
    job = line.take()
    assert job is not None
    assert job.what == "p"
    line.done(job)
    job = line.take()
    assert job is not None
    line.put_back(job)
    line.put(PRESENTER, "p2")
    assert line.place(1) == 2
    assert order(line) == ["p2", "a", "b"]


def test_a_full_line_says_so() -> None:
    line: Line[str] = Line(most_each=2, most=3)
    line.put(1, "a")
    line.put(1, "b")
    with pytest.raises(LabError, match="already have 2 prompts"):
        line.put(1, "c")
    line.put(2, "a")
    with pytest.raises(LabError, match="line is full"):
        line.put(3, "a")
    assert [job.what for job in line.leave(1)] == ["a", "b"]
    assert line.place(1) is None
    assert line.waiting == 1


@settings(deadline=None)
@given(st.lists(st.integers(1, 6), max_size=40))
def test_places_are_kept(seats: list[int]) -> None:
    """The n-th to be taken was told that it was n-th, and nobody is passed over for long: with s seats, every s turns."""
    line: Line[int] = Line(at_once=1, most_each=99)
    for seat in seats:
        line.put(seat, seat)
    places = {seat: line.place(seat) for seat in set(seats)}
    taken = []
    while (job := line.take()) is not None:
        taken.append(job.seat)
        line.done(job)
    assert sorted(taken) == sorted(seats)
    assert {seat: taken.index(seat) + 1 for seat in set(seats)} == places
    assert all(place is not None and place <= len(places) for place in places.values())


def test_ordinals() -> None:
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 22, 101, 111)] == (
        ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "22nd", "101st", "111th"]
    )


# --- the game


@pytest.fixture
def request_of() -> Callable[[], Request]:
    def make() -> Request:
        pieces = {token: piece.hex() for token, piece in PIECES.items()}
        steps = steps_of("t", ANSWER, k=3, begin=0.0, pace=0.01, limit=20)
        return Request(trace="t", lane="x", prompt="<b>${alert(1)}</b>", steps=steps, pieces=pieces)

    return make


def test_nothing_is_given_away_before_the_reveal(request_of: Callable[[], Request]) -> None:
    request = request_of()
    step = next(one for one in request.steps if one.draft and one.accepted == 2)
    game = Game.freeze(request, step.index, 3)
    game.vote(4, True)
    game.vote(4, False)
    game.vote(5, True)
    shown = game.shown(4)
    assert (shown["votes"], shown["mine"], game.shown(9)["mine"]) == (2, False, None)
    assert not {"truth", "tally", "row"} & set(shown)
    assert not any(word in json.dumps(shown) for word in ("accepted", "rejected", "recovered"))
    assert len(shown["before"]) == sum(one.kept for one in request.steps if one.index < step.index)
    game.revealed = True
    shown = game.shown(4)
    assert shown["truth"] is False
    assert shown["tally"] == {"accept": 1, "reject": 1}
    assert [mark for _, mark in shown["row"]] == ["accepted", "accepted", "rejected", "recovered"]
    with pytest.raises(LabError, match="has been revealed"):
        game.vote(6, True)


def test_only_what_was_decided_can_be_guessed(request_of: Callable[[], Request]) -> None:
    request = request_of()
    step = next(one for one in request.steps if one.draft and one.accepted == 0)
    with pytest.raises(LabError, match="never looked at draft token 2"):
        Game.freeze(request, step.index, 2)
    with pytest.raises(LabError, match="no draft"):
        Game.freeze(request, 0)
    with pytest.raises(LabError, match="no step 999"):
        Game.freeze(request, 999)


# --- scenarios


def test_the_shipped_scenarios_are_whole() -> None:
    found = scenarios()
    assert {"first-look", "what-a-draft-knows"} <= set(found)
    for one in found.values():
        assert any(scene.show == "guess" for scene in one.scenes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("title = ", "not TOML"),
        ("title = 'x'", "no title or no"),
        ("title = 'x'\n[[scene]]\ntitle = 'a'\nshow = 'dance'", "not text, run or guess"),
        ("title = 'x'\n[[scene]]\ntitle = 'a'\nshow = 'run'", "no prompt in scene 1 of scenario mine"),
        ("title = 'x'\n[[scene]]\ntitle = 'a'\nk = true", "'k' in scene 1 of scenario mine is not of type int"),
        ("title = 'x'\n[[scene]]\ntitle = 'a'\ncolour = 1", "'colour' in scene 1 of scenario mine is not known"),
        ("title = 'x'\n[[scene]]\nsay = 'a'", "no title in scene 1"),
    ],
)
def test_a_scenario_that_is_wrong_says_where(text: str, said: str) -> None:
    with pytest.raises(LabError, match=said):
        parse(text, "mine")


# --- the door


def door(**changes: Any) -> Door:
    return Door(**{"key": b"k" * 32, "token": "t" * 24, "port": 1, **changes})


def test_only_the_token_makes_a_presenter() -> None:
    one = door()
    good = {one.name("presenter"): one.presenter_cookie()}
    assert one.opens("t" * 24)
    assert not one.opens("")
    assert one.is_presenter(good)
    assert not one.is_presenter({})
    assert not one.is_presenter({one.name("presenter"): one.sign("seat", one.presenter_cookie().rpartition(".")[0])}), "another kind"
    assert not door(key=b"x" * 32).is_presenter(good)
    assert not door(token="u" * 24).is_presenter(good), "a new link ends the old one"
    assert not one.is_presenter({one.name("presenter"): "ü.ü"})


def test_seats_cannot_be_made_up() -> None:
    one = door()
    signed = one.sign("seat", "7")
    assert one.seat({one.name("seat"): signed}) == 7
    assert one.seat({one.name("seat"): signed.replace("7.", "8.", 1)}) is None
    for bad in ("", "7", "7.", ".", "7.0", one.sign("seat", "x"), one.sign("seat", "99999999"), one.sign("guest", "7")):
        assert one.seat({one.name("seat"): bad}) is None
    assert cookies("a=b; eagle3-seat-1=x") == {"a": "b", "eagle3-seat-1": "x"}
    assert cookies("\x00;;==") == {}


def test_the_password() -> None:
    one = door(password="geheim-ü")
    assert not one.is_guest({})
    assert one.guest_cookie("geheim") is None
    cookie = one.guest_cookie("geheim-ü")
    assert cookie is not None
    assert one.is_guest({one.name("guest"): cookie})
    assert not door(password="other").is_guest({one.name("guest"): cookie})
    assert one.is_guest({one.name("presenter"): one.presenter_cookie()})
    assert door().is_guest({})


def test_secrets_survive_a_restart_and_can_be_renewed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EAGLE3_LAB_CACHE", str(tmp_path))
    first = open_door(password=None, port=1)
    assert open_door(password=None, port=1) == first
    assert stat.S_IMODE(keys_file().stat().st_mode) == 0o600
    assert open_door(password=None, port=1, renew=True).token != first.token
    keys_file().write_text("{broken", encoding="utf-8")
    assert len(open_door(password=None, port=1).token) >= 20


def test_a_bucket_refills() -> None:
    bucket = Bucket(rate=1.0, burst=2)
    assert [bucket.take(now) for now in (0.0, 0.0, 0.0, 0.5, 1.6, 1.7)] == [True, True, False, False, True, False]


# --- the address


def test_what_is_exposed_is_said() -> None:
    assert "Only this machine" in join.exposes("127.0.0.1", 1, False)
    assert "everybody on the networks" in join.exposes("0.0.0.0", 1, False)
    assert "on [::]:1:" in join.exposes("::", 1, False)
    assert "whoever knows the password" in join.exposes("0.0.0.0", 1, True)
    with pytest.raises(LabError, match="not an address"):
        join.is_open("example.org; rm")
    assert join.join_url("127.0.0.1", 7860) == "http://127.0.0.1:7860/"
    assert join.join_url("::1", 7860) == "http://[::1]:7860/"
    assert "0.0.0.0" not in join.join_url("0.0.0.0", 7860)


def test_a_room_on_every_ipv6_address_is_joined_at_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def found(family: socket.AddressFamily = socket.AF_INET) -> str | None:
        asked.append(family)
        return "fd00::2" if len(asked) == 1 else None

    monkeypatch.setattr(join, "lan_address", found)
    assert join.join_url("::", 7860) == "http://[fd00::2]:7860/"
    assert join.join_url("::", 7860) == "http://[::1]:7860/"
    assert asked == [socket.AF_INET6, socket.AF_INET6]
    monkeypatch.undo()
    name = join.lan_address(socket.AF_INET6)
    assert name is None or not ipaddress.IPv6Address(name).is_unspecified


def test_the_qr_code_is_its_modules() -> None:
    import segno

    text = "http://192.168.1.20:7860/"
    code = join.qr(text)
    rows = [bytearray(row) for row in segno.make(text, micro=False, error="m").matrix_iter(border=4)]
    drawn = [[0] * code["size"] for _ in range(code["size"])]
    for part in code["path"].split("z")[:-1]:
        x, y = map(int, part[1:].partition("h")[0].split())
        for step in range(int(part.partition("h")[2].partition("v")[0])):
            drawn[y][x + step] = 1
    assert drawn == [[int(bool(one)) for one in row] for row in rows]
