"""The tabs' handlers, called as gradio calls them: stopped at any moment, with an engine that has ended, on a disk that is full."""

from __future__ import annotations

import asyncio
import errno
import json
import re
import threading
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from lab import recipes
from lab.errors import LabError
from lab.serving import client
from lab.serving.command import Lane
from lab.serving.endpoint import Endpoint, LaneStatus, Progress
from lab.serving.metrics import Snapshot
from lab.trace.io import load
from lab.trace.model import Request
from lab.ui import app, build, quantise, race, sweep, verify, why
from lab.ui.engine import Serving
from lab.ui.microscope import recordings
from lab.ui.runner import answer
from lab.ui.state import Run, Runs, Session, Settings
from lab.ui.sweep_state import SweepState

from .fakes import ANSWER, FakeEngine, steps_of

RECIPE = recipes.get("smollm2")
BAR = ("hello", "bf16", 3, 0, 40, False)
RACE = (["none", "bf16"], "3", "eager", 1, "chat", 8, 1)
SWEEP = (["none"], "3", False, "1", "128/128", [], 1, 1, False)


@dataclass
class Engine(FakeEngine):
    """Lanes whose key has `dead` in it have ended by themselves."""

    dead: str = "-"
    #: What is said of a lane that is there, and how lanes were begun again.
    in_use: int = 0
    state: Any = "ready"
    restarted: list[str] = field(default_factory=list)

    async def endpoint(self, lane: Lane, **more: Any) -> Endpoint:
        self.lanes[lane.key] = lane
        if self.dead in lane.key:
            raise LabError(f"The engine for {lane.label} ended by itself (exit code -9).")
        return await super().endpoint(lane, **more)

    async def restart(self, lane: Lane, **more: Any) -> Endpoint:
        self.restarted.append(lane.key)
        return await super().restart(lane, **more)

    def status(self) -> list[LaneStatus]:
        found = [replace(one, state=self.state, in_use=self.in_use) for one in super().status()]
        dead = [lane for key, lane in self.lanes.items() if self.dead in key]
        return found + [LaneStatus(lane, "dead", Progress("failed", "", 0.0)) for lane in dead]


class Handlers:
    """The handlers of one page by their qualified names."""

    def __init__(self, engine: FakeEngine, folder: Path, recipe: Any = RECIPE) -> None:
        self.demo = build.page(recipe, engine, folder=folder, warm=False)
        self.found = {str(getattr(one.fn, "__qualname__", "")): one for one in self.demo.fns.values()}

    def __getitem__(self, name: str) -> Callable[..., Any]:
        tab, _, handler = name.partition(".")
        return self.found[f"{tab}.<locals>.{handler}"].fn  # type: ignore[return-value]

    def all(self, name: str, *values: Any) -> list[Any]:
        """Everything that the handler shows."""

        async def work() -> list[Any]:
            return [one async for one in self[name](*values)]

        return asyncio.run(work())

    async def stop(self, name: str, *values: Any, shown: int = 1, said: str = "") -> Any:
        """Stop the handler once it has shown something so many times, and `said` in it, and give what is shown after that."""
        seen: list[Any] = []

        async def work() -> None:
            async for one in self[name](*values):
                seen.append(one)

        task = asyncio.create_task(work())
        while len(seen) < shown or not re.search(said, str(seen[-1][0])):
            await asyncio.sleep(0.01)
            assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await self[f"{name.partition('.')[0]}.after_stop"](*values[:1], *([[]] if name.startswith("sweep") else []))


def said(shown: Any) -> str:
    """The sentence of the status line; "" where it is left as it was."""
    line = shown[0]
    return str(json.loads(line)["text"]) if isinstance(line, str) else ""


def level(shown: Any) -> str:
    return str(json.loads(shown[0])["level"])


def offered(shown: Any) -> bool:
    """Whether the restart button is on the page."""
    return any(isinstance(one, gr.Button) and bool(one.visible) for one in shown)


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_LAB_CACHE", str(tmp_path / "cache"))
    for module in (race, why):
        monkeypatch.setattr(module, "room", lambda *_: None)  # this machine's memory decides nothing here
    monkeypatch.setattr(why.origin, "describe", lambda *_a, **_k: {})


def runs_of(page: Handlers) -> Runs:
    """The page's registry."""
    known = page["microscope.after_stop"].__wrapped__.__closure__  # type: ignore[attr-defined]
    return next(cell.cell_contents.runs for cell in known if hasattr(cell.cell_contents, "runs"))  # type: ignore[no-any-return]


def session_with_run(page: Handlers, run: Run) -> Session:
    """A session whose microscope shows `run`."""
    runs_of(page).add(run)
    return Session(run=run.id)


def traced(**changes: Any) -> Run:
    steps = steps_of("t", ANSWER, k=3, begin=0.0, pace=0.01, limit=20)
    request = Request(trace="t", lane="l", prompt="p", steps=steps, settings={"k": 3, "temperature": 0.0, "max_tokens": 20})
    return Run("r", request, "bf16", "Eagle3 BF16", {}, **{"state": "done", **changes})


# --- Stop


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("microscope.run_prompt", BAR),
        ("beside.run_both", BAR),
        ("duel.run_duel", ("bf16", "fp8", "Chat: 8 prompts", *BAR)),
        ("race_tab.run_race", RACE),
        ("why_tab.run_measure", ("bf16", "1, 3", "1")),
        ("why_tab.every_k", ()),
    ],
)
def test_stop_speaks_while_an_engine_starts(name: str, values: tuple[Any, ...], tmp_path: Path) -> None:
    """Else the line says for ever that it is starting, or, of an earlier run, that it is done."""
    page = Handlers(Engine(RECIPE, start=60), tmp_path)
    assert said(asyncio.run(page.stop(name, session_with_run(page, traced()), *values))).startswith("Stopped")


def test_stop_speaks_while_a_sweep_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def prepare(*_a: Any, **_k: Any) -> None:
        go.wait(60)

    monkeypatch.setattr(sweep.sweep_run, "prepare", prepare)
    page = Handlers(Engine(RECIPE), tmp_path)

    async def work() -> str:
        try:
            return said(await page.stop("sweep.run", SweepState(), [], *SWEEP))
        finally:
            go.set()

    assert asyncio.run(work()) == "Stopped before the sweep began."


def test_stop_speaks_once_a_quantisation_has_ended_and_the_next_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, running, most, unread = threading.Event(), [0], [0], list[Any]()

    def make(_recipe: Any, _precision: str, told: Callable[[str], None]) -> Any:
        running[0] += 1
        most[0] = max(most[0], running[0])
        try:
            release.wait(60)  # Quark is not asked in the middle of a stage
            told("next stage")
            raise LabError("It came to its end.")
        finally:
            running[0] -= 1

    monkeypatch.setattr(quantise, "make", make)
    page = Handlers(Engine(RECIPE), tmp_path)

    async def work() -> tuple[Any, list[Any]]:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unread.append(context))
        stopping = asyncio.create_task(page.stop("quantise.run", Session(), "bf16"))
        await asyncio.sleep(0.3)
        assert not stopping.done(), "it still runs"
        another = [one async for one in _some(page["quantise.run"](Session(), "bf16"), release)]
        return await stopping, another

    shown, another = asyncio.run(work())
    assert said(shown) == "Stopped quantising: nothing half-made is left."
    assert said(another[-1]) == "It came to its end."
    assert most == [1]
    assert unread == []


async def _some(source: Any, release: threading.Event) -> Any:
    """What `source` shows; from its second picture on, the stage in which the first hangs comes to its end."""
    count = 0
    async for one in source:
        count += 1
        if count == 2:
            release.set()
        yield one


@pytest.mark.parametrize(("name", "which"), [("microscope.run_prompt", "run"), ("beside.run_both", "other")])
def test_a_run_that_was_closed_before_it_was_sent_is_over(name: str, which: str, tmp_path: Path) -> None:
    page = Handlers(Engine(RECIPE), tmp_path)
    state = Session()

    async def work() -> None:
        shown = page[name](state, *BAR)
        while not isinstance((await anext(shown))[1], str):
            pass
        await shown.aclose()

    asyncio.run(work())
    run = runs_of(page).get(getattr(state, which))
    assert run is not None
    assert run.state == "stopped"


@pytest.mark.parametrize("name", ["microscope.run_prompt", "beside.run_both"])
def test_stop_between_two_pictures_aborts_the_answer_before_it_speaks(name: str, tmp_path: Path) -> None:
    """Gradio closes the handler where it last showed something; what is open within must not be left to the garbage collector."""
    engine = Engine(RECIPE, pace=0.1)
    page = Handlers(engine, tmp_path)
    state = Session()

    async def work() -> None:
        shown = page[name](state, *BAR)
        while not engine.requests or engine.requests[-1].settings["max_tokens"] != BAR[4] or not engine.requests[-1].steps:
            await anext(shown)
        await shown.aclose()
        assert engine.closed == 1
        assert state.at_work == set()

    asyncio.run(work())


# --- an engine that has ended


@pytest.mark.parametrize(
    ("name", "values", "dead"),
    [
        ("duel.run_duel", ("bf16", "fp8", "Chat: 8 prompts", *BAR), "/fp8/"),
        ("race_tab.run_race", RACE, "/none/"),
        ("why_tab.run_measure", ("bf16", "1, 3", "1"), "/none/"),
        ("why_tab.every_k", (), "/bf16/"),
        ("verify_tab.run_verify", ("bf16", 3, 1, 8, 0), "/none/"),
        ("verify_tab.run_context", ("bf16", 3), "/none/"),
    ],
)
def test_an_engine_that_has_ended_can_be_started_anew(
    name: str, values: tuple[Any, ...], dead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the button, every further press shows the same failure."""
    monkeypatch.setattr(verify.certificate, "identity", lambda *_a, **_k: {})
    engine = Engine(RECIPE, dead=dead)
    page = Handlers(engine, tmp_path)
    state = session_with_run(page, traced())
    last = page.all(name, state, *values)[-1]
    assert "ended by itself" in said(last)
    assert offered(last)
    assert state.failed is not None
    assert dead in state.failed.key
    engine.dead = "-"
    page.all("microscope.start_again", state)
    assert len(engine.restarted) == 1


@pytest.mark.parametrize(("state", "in_use", "restarts"), [("ready", 0, 1), ("starting", 0, 0), ("ready", 1, 0)])
def test_a_second_restart_does_not_end_what_the_first_began(state: str, in_use: int, restarts: int, tmp_path: Path) -> None:
    """Two pages see the same engine die, and both have the button."""
    engine = Engine(RECIPE, state=state, in_use=in_use)
    lane = Lane(RECIPE, "bf16", 3)
    engine.lanes[lane.key] = lane
    engine.ready.add(lane.key)
    last = Handlers(engine, tmp_path).all("microscope.start_again", Session(failed=lane))[-1]
    assert said(last).startswith("Ready: ")
    assert len(engine.restarted) == restarts


@pytest.mark.parametrize("compiled", [False, True])
def test_every_k_asks_the_lane_of_the_run(compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(*_: Any) -> Any:
        return traced().request

    monkeypatch.setattr(why.grid, "ask", ask)
    engine = Engine(RECIPE)
    page = Handlers(engine, tmp_path, replace(RECIPE, compiled=compiled))
    last = page.all("why_tab.every_k", session_with_run(page, traced()))[-1]
    assert said(last).startswith("Every K for")
    assert list(engine.lanes) == [f"smollm2/bf16/k3/{'compiled' if compiled else 'eager'}/traced"]


def test_a_lane_that_was_stopped_in_between_is_asked_where_it_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = Lane(RECIPE, "bf16", 3)
    asked: list[Endpoint] = []

    async def generate(endpoint: Endpoint, *_a: Any, **_k: Any) -> Any:
        asked.append(endpoint)
        yield None

    class Lanes:
        @asynccontextmanager
        async def use(self, lane: Lane) -> Any:
            yield Endpoint("http://127.0.0.1:2", "smollm2", lane)

    monkeypatch.setattr(client, "generate", generate)

    async def work() -> None:
        serving: Any = Serving(Lanes())  # type: ignore[arg-type]
        async for _ in serving.generate(Endpoint("http://127.0.0.1:1", "smollm2", lane, measured=True), "hi"):
            pass

    asyncio.run(work())
    assert [(one.url, one.measured) for one in asked] == [("http://127.0.0.1:2", True)]


def test_the_meter_reads_the_server_that_answers() -> None:
    """The lane was started anew, on another port, after its endpoint was handed out."""
    lane = Lane(RECIPE, "bf16", 3)
    read: set[str] = set()

    @dataclass
    class Moved(Engine):
        @asynccontextmanager
        async def use(self, lane: Lane, **_more: Any) -> Any:
            yield Endpoint("http://127.0.0.1:2", "smollm2", lane)

        async def scrape(self, endpoint: Endpoint) -> Snapshot:
            read.add(endpoint.url)
            return await super().scrape(endpoint)

    async def work() -> Run:
        settings = Settings("hello", "bf16", 3, 0.0, 40)
        run = Run.of(lane, settings)
        async for _ in answer(Moved(RECIPE), Endpoint("http://127.0.0.1:1", "smollm2", lane), settings, run):
            pass
        return run

    run = asyncio.run(work())
    assert run.state == "done"
    assert read == {"http://127.0.0.1:2"}
    assert run.speed
    assert run.speed[-1][1] > 0


# --- what a page shows is one run's


@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize("asked", [True, False], ids=["answering", "starting"])
def test_a_recording_takes_the_place_of_what_runs(good: bool, asked: bool, tmp_path: Path) -> None:
    """One that can be opened; a file that cannot leaves what runs alone."""
    engine = Engine(RECIPE, pace=0.05, start=0.0 if asked else 0.5)
    page, state = Handlers(engine, tmp_path), Session()
    (tmp_path / "odd.jsonl").write_text("{}")

    async def work() -> None:
        opened = None
        async for _shown in page["microscope.run_prompt"](state, *BAR):
            if opened is None and (not asked or (engine.requests and engine.requests[-1].steps)):
                name = next(iter(recordings()))
                opened = page["microscope.choose"](state, name) if good else page["microscope.open_file"](state, tmp_path / "odd.jsonl")
                shown = state.run
            elif opened is not None and good:
                pytest.fail("the run was drawn over the recording")
        assert opened is not None
        run = runs_of(page).get(state.run)
        assert run is not None
        assert run.state == ("opened" if good else "done")
        assert state.run == shown or not (good or asked)
        assert not state.waiting

    asyncio.run(work())
    assert engine.closed == (1 if good and asked else 0)


@pytest.mark.parametrize(("name", "values"), [("microscope.run_prompt", BAR), ("beside.run_both", BAR)])
def test_its_tab_comes_to_the_front_at_first(name: str, values: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Handlers(Engine(RECIPE, start=0.5), tmp_path)
    for seconds, every in ((0.0, False), (600.0, True)):
        monkeypatch.setattr(app, "FRONT", seconds)
        shown = [[value.selected for value in one if isinstance(value, gr.Tabs)] for one in page.all(name, Session(), *values)]
        assert shown[0]
        assert shown[1:] == [shown[0] if every else []] * (len(shown) - 1)


# --- Stop, and what was pressed since


def test_stop_waits_for_what_it_stopped_and_leaves_what_is_newer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    state, old, new, said = Session(), object(), object(), list[int]()
    show = app.stopped(lambda _state: said.append(1), 3)

    async def work() -> None:
        state.at_work |= {old}
        waiting = asyncio.create_task(app.ending(state, SweepState()))
        await asyncio.sleep(0.05)
        state.at_work |= {new}  # somebody pressed Race
        assert not waiting.done()
        state.at_work -= {old}
        await waiting
        assert await show(state) == (gr.skip(),) * 3
        assert not said
        state.at_work.clear()
        await show(state)
        assert said == [1]
        # what does not end is waited for so long, and then spoken over
        monkeypatch.setattr(app, "ENDING", 0.05)
        state.at_work |= {old}
        await app.ending(state)
        await show(state)
        assert said == [1, 1]

    asyncio.run(work())


# --- a disk that is full


def full(*_a: Any, **_k: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


async def nothing(*_a: Any, **_k: Any) -> Any:
    return None


def test_what_cannot_be_saved_is_shown_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from .test_why import planted

    summary = planted()
    monkeypatch.setattr(why.result.provenance, "write_text", full)
    monkeypatch.setattr(why.grid, "measure", nothing)
    monkeypatch.setattr(why.cost_report, "summarise", lambda *_a, **_k: summary)
    last = Handlers(Engine(RECIPE), tmp_path).all("why_tab.run_measure", Session(), "bf16", "1, 3", "1")[-1]
    assert "could not be saved" in said(last)
    assert level(last) == "error"
    assert json.loads(last[1])["tables"]


def test_contexts_that_cannot_be_saved_are_shown_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"context": 256.0, "share": 0.5, "share_interval": None, "verify_s": 0.02, "draft_s": 0.02, "tokens_per_step": 2.0}]
    monkeypatch.setattr(why.result.provenance, "write_text", full)
    monkeypatch.setattr(verify.context, "measure", nothing)
    monkeypatch.setattr(verify.context, "summarise", lambda *_: rows)
    monkeypatch.setattr(verify.context, "explain", lambda _rows: "It shrinks. Because.")
    monkeypatch.setattr(verify.certificate, "find", lambda _lane: (None, None))
    last = Handlers(Engine(RECIPE), tmp_path).all("verify_tab.run_context", Session(), "bf16", 3)[-1]
    assert "could not be saved" in said(last)
    assert level(last) == "error"
    assert "It shrinks." in last[1]
    assert isinstance(last[2], str), "the charts"


def test_a_certificate_that_cannot_be_copied_is_shown_without_the_button(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    page = Handlers(Engine(RECIPE), tmp_path / "file" / "traces")
    monkeypatch.setattr(verify.certificate, "find", lambda _lane: ("h", SimpleNamespace(path=tmp_path / "file", hash="h")))
    monkeypatch.setattr(verify.proof, "value", lambda *_: "shown")
    shown = page["verify_tab.look"]("bf16", 3)
    assert shown[0] == "shown"
    assert shown[1].interactive is False


def test_a_sweep_that_cannot_write_ends_in_a_sentence_and_can_be_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = sweep.plan_of(RECIPE, *SWEEP)
    made = sweep.sweep_run.Sweep(plan, tmp_path, {}, [sweep.sweep_run.Row(plan.cells()[0], "k" * 8)], "here")

    async def run(one: Any, _servers: Any) -> None:
        one.now = SimpleNamespace(cell=SimpleNamespace(label="a cell"), state="running")
        sweep.sweep_run.save_csv(one)

    monkeypatch.setattr(sweep.sweep_run.provenance, "write_text", full)
    monkeypatch.setattr(sweep.sweep_run, "prepare", lambda *_a, **_k: made)
    monkeypatch.setattr(sweep.sweep_run, "run", run)
    page, state = Handlers(Engine(RECIPE), tmp_path), SweepState()
    last = page.all("sweep.run", state, [], *SWEEP)[-1]
    assert said(last).startswith(f"There is no space left on the disk for {tmp_path / 'sweep.csv'}")
    page["sweep.cleared"](state, [])
    assert state.sweep is None


def test_a_cache_that_cannot_be_written_is_said_when_quantising(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EAGLE3_LAB_CACHE", str(tmp_path / "file" / "cache"))
    alone = replace(RECIPE, drafts={"bf16": RECIPE.drafts["bf16"]})
    with pytest.raises(LabError, match="cannot be written"):
        quantise.make(alone, "bf16", lambda _text: None)


def saves(shown: Any) -> Any:
    """What a handler says of its save button (the fourth of what it shows): its file, None where it is off, "left" where it stays."""
    button = shown[3]
    if isinstance(button, dict):
        return "left"
    assert isinstance(button, gr.DownloadButton)
    return button.value["path"] if button.interactive and isinstance(button.value, dict) else button.value if button.interactive else None


def test_the_save_buttons_are_for_what_is_on_screen(tmp_path: Path) -> None:
    engine = Engine(RECIPE)
    page, state = Handlers(engine, tmp_path), Session()
    every = [saves(one) for one in page.all("microscope.run_prompt", state, *BAR)]
    first = Path(every[-1])
    assert [one for one in every[:-1] if one != "left"] == [None], "off while it runs, or it would save the run before"
    every = [saves(one) for one in page.all("beside.run_both", state, *BAR)]
    pair = Path(every[-1])
    assert [one for one in every[:-1] if one != "left"] == [None]
    engine.pace, some = 0.3, r"[1-9]\d* of at most"  # stopped with some tokens there, and more to come
    stopped = saves(asyncio.run(page.stop("microscope.run_prompt", state, *BAR, said=some)))
    assert Path(stopped) != first
    assert load(Path(stopped)).requests[0].steps
    stopped = saves(asyncio.run(page.stop("beside.run_both", state, *BAR, said=some)))
    assert Path(stopped) != pair
    assert len(load(Path(stopped)).requests) == 1, "the other had not begun"
