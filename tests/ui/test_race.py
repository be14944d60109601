"""The race's tab in a browser, over small real HTTP servers: lines move, the table says what was measured, Stop keeps it."""

from __future__ import annotations

import importlib.util
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lab import recipes
from lab.errors import LabError
from lab.recipes.model import Recipe
from lab.serving.command import Lane
from lab.serving.endpoint import Endpoint, LaneStatus, Progress
from lab.ui import race as tab

from .conftest import Watched, sync_api
from .fakes import FakeEngine

RECIPE = recipes.get("smollm2")


def _servers() -> Any:
    """The fake server of the bench's tests."""
    spec = importlib.util.spec_from_file_location("bench_fakes", Path(__file__).parents[1] / "bench" / "conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["bench_fakes"] = module
    spec.loader.exec_module(module)
    return module


@dataclass
class Servers(FakeEngine):
    """Lanes whose endpoints are real HTTP servers; `servers` are started by a test, by lane key."""

    servers: dict[str, tuple[Any, Endpoint]] = field(default_factory=dict)
    dead: dict[str, LabError] = field(default_factory=dict)

    async def endpoint(self, lane: Lane, *, on_progress: Callable[[Progress], None] | None = None) -> Endpoint:
        await super().endpoint(lane, on_progress=on_progress)
        if lane.key not in self.servers:
            raise LabError(f"The engine for {lane.label} did not start.", todo="Press Restart.")
        return Endpoint(self.servers[lane.key][1].url, "fake", lane)

    async def scrape(self, endpoint: Endpoint) -> Any:
        from lab.serving.metrics import scrape

        return await scrape(endpoint)

    def status(self) -> list[LaneStatus]:
        found = super().status()
        return found + [LaneStatus(self.lanes[key], "dead", Progress("failed", "", 0.0), error=why) for key, why in self.dead.items()]


@pytest.fixture
def http() -> Iterator[Callable[..., tuple[Any, Endpoint]]]:
    """Starts fake servers on free ports."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    module, running = _servers(), []

    def start(**changes: Any) -> tuple[Any, Endpoint]:
        engine = module.FakeEngine(**changes)

        async def models(_request: Any) -> Any:
            return JSONResponse({"data": [{"id": "fake"}]})

        routes = [
            Route("/v1/chat/completions", engine.chat, methods=["POST"]),
            Route("/metrics", engine.metrics),
            Route("/v1/models", models),
        ]
        server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_level="error"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        running.append((server, thread))
        until = time.monotonic() + 120
        while not server.started:
            assert thread.is_alive(), "the server ended before it had started"
            assert time.monotonic() < until, "the server did not start"
            time.sleep(0.01)
        return engine, Endpoint(f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", "fake")

    yield start
    for server, _ in running:
        server.should_exit = True
    for _, thread in running:
        thread.join(10)


def lane(draft: str = "none", k: int = 0) -> Lane:
    return Lane(RECIPE, draft, k, compiled=False, traced=False)  # type: ignore[arg-type]


def open_tab(watched: Watched) -> Any:
    watched.page.get_by_role("tab", name="Race").click()
    watched.page.locator("#e3-race-start").wait_for()
    return watched.page


def rows(page: Any) -> list[list[str]]:
    return list(page.locator(".e3-race-table tbody tr").evaluate_all("all => all.map(r => [...r.children].map(c => c.textContent))"))


#: Milliseconds that a busy machine may take to show something.
LATE = 120_000


def wait_rounds(page: Any, count: int) -> None:
    """Until the table says that the first lane has `count` rounds: a status line may pass between two looks."""
    cell = "document.querySelector('.e3-race-table tbody tr:first-child td:nth-child(5)')"
    read = f"least => {cell} !== null && Number({cell}.textContent) >= least"
    page.wait_for_function(read, arg=count, timeout=LATE)


@pytest.mark.browser
@pytest.mark.timeout(900)
def test_a_race_on_screen(serve: Callable[..., str], visit: Callable[..., Watched], http: Any, tmp_path: Path) -> None:
    ids = tuple(range(60))
    slow, fast = http(ids=ids, pause=0.02), http(ids=ids, pause=0.02, chunk=2)
    engine = Servers(RECIPE, servers={lane().key: slow, lane("bf16", 3).key: fast})
    watched = visit(serve(engine))
    page = open_tab(watched)
    watched.fits()
    page.locator("#e3-race-rounds input").fill("200")
    page.locator("#e3-race-start").click()
    wait_rounds(page, 2)
    before = page.locator("#e3-race-charts .e3-plot").first.get_attribute("aria-label")
    moved = "old => document.querySelector('#e3-race-charts .e3-plot').getAttribute('aria-label') !== old"
    page.wait_for_function(moved, arg=before, timeout=LATE)
    for title in ("Output tok/s", "Mean acceptance length", "Requests in the batch"):
        sync_api.expect(page.locator("#e3-race-charts .e3-panel-title", has_text=title)).to_be_visible()
    assert "2 s average" in before
    page.get_by_role("button", name="Stop", exact=True).click()
    watched.wait_status("what was measured is kept", timeout=120)
    count = int(re.search(r"after (\d+) whole", watched.status()).group(1))  # type: ignore[union-attr]
    assert count >= 2
    for line in page.locator(".e3-race-table tbody tr").all():
        sync_api.expect(line.locator("td").nth(3)).to_have_text(str(count))  # the table, too, is of the stopped race
    base, draft = rows(page)
    assert base[0] == "Baseline, eager"
    assert draft[0] == "Eagle3 BF16, K=3, eager"
    assert int(base[4]) == int(draft[4]) == count
    assert base[2].startswith("1 (base)")
    assert draft[5] == f"{count} of {count}"
    assert draft[3] == "2.00", "each chunk of two is a draft with one accepted token"
    with page.expect_download() as download:
        page.locator("#e3-race-save").click()
    download.value.save_as(tmp_path / "race.json")
    saved = json.loads((tmp_path / "race.json").read_text())
    assert saved["rounds"] == count
    value = saved["lanes"][1]["speedup"]["pooled"]["value"]
    assert draft[2].startswith(f"{value:.2f}×")
    assert saved["lanes"][0]["mode"] == "eager"
    assert saved["provenance"]["versions"]
    asked = len(slow[0].seen)
    page.wait_for_timeout(1500)
    assert len(slow[0].seen) == asked, "a stopped race asks nothing any more"
    # a lane that dies is named, with what the lab knows, and what was measured stays
    page.locator("#e3-race-rounds input").fill("200")
    watched.press("Start the race")
    watched.wait_status("Race: ", timeout=120)
    wait_rounds(page, 1)
    engine.dead[lane("bf16", 3).key] = LabError("The engine <b>ended</b> by itself (exit code -9).", why="last lines of its log")
    fast[0].fault = "break"
    watched.wait_status("1 of 2 lanes left the race", timeout=120)
    sync_api.expect(page.locator(".e3-race-notes")).to_contain_text("The engine <b>ended</b> by itself")
    assert rows(page)[1][6] == "✕ out"
    assert int(rows(page)[0][4]) >= 1


def test_k_is_read_as_a_list() -> None:
    assert tab.numbers("3", 8) == [3]
    assert tab.numbers(" 1, 3 ;1", 8) == [1, 3]
    for bad in ("", "0", "9", "x", "1.5", "-1", "²"):
        with pytest.raises(LabError, match="not a list of whole numbers"):
            tab.numbers(bad, 8)


def test_lanes_are_untraced_and_of_one_mode() -> None:
    class One:
        recipe: Recipe = RECIPE

    found = tab.lanes_of(One(), ["fp8", "none", "bf16"], "1, 3", "compiled")  # type: ignore[arg-type]
    assert [(one.draft, one.k) for one in found] == [("none", 0), ("fp8", 1), ("bf16", 1), ("fp8", 3), ("bf16", 3)]
    assert all(one.compiled and not one.traced for one in found)
    assert tab.lanes_of(One(), ["none"], "", "eager")[0].k == 0  # type: ignore[arg-type]
    with pytest.raises(LabError, match="no mode"):
        tab.lanes_of(One(), ["none"], "", "traced")  # type: ignore[arg-type]
