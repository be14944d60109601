"""The page in Debian's Chromium: a page served in this process, and a browser that notes everything that must not happen."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from lab import recipes

sync_api = pytest.importorskip("playwright.sync_api", reason="the page's tests need the Python package playwright")
sync_api.expect.set_options(timeout=60_000)  # a busy machine may take long to show something; a test that passes never waits for it
#: Where this test process serves pages, apart from the other processes (pytest-xdist names them gw0, gw1, ...) and from the engines.
PORT = 18_000 + 500 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")  # not longer: while Playwright runs, no other test on this thread can use asyncio.run
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=flags, timeout=180_000)
        yield opened
        opened.close()


@dataclass
class Watched:
    """A page, and what went wrong in it."""

    page: Any
    faults: list[str] = field(default_factory=list)
    #: What gradio has asked its server for and not heard the end of.
    asked: set[Any] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.page.on("request", lambda request: self.asked.add(request))
        for end in ("requestfinished", "requestfailed"):
            self.page.on(end, lambda request: self.asked.discard(request))

    def settle(self, timeout: float = 120) -> None:
        """Until nothing that was pressed is under way: gradio drops a click on a button whose last event is not over, and what it showed
        last comes a moment before its end."""
        until, idle = time.monotonic() + timeout, 0
        while idle < 3:  # one request may follow from another's end
            busy = [one.url for one in self.asked if re.search(r"/gradio_api/(queue|run|cancel|reset|upload)", one.url)]
            idle = 0 if busy else idle + 1
            assert time.monotonic() < until, f"the page is still busy: {busy}"
            self.page.wait_for_timeout(40)

    def press(self, name: str) -> None:
        """Click the button of this name once the page is not busy."""
        self.settle()
        self.page.get_by_role("button", name=name, exact=True).click()

    def fits(self) -> None:
        """The page is as large as the window, once it has been drawn."""
        size = "[document.documentElement.scrollHeight, document.documentElement.scrollWidth]"
        self.page.wait_for_function(f"String({size}) === '720,1280'", timeout=60_000)

    def status(self) -> str:
        return str(self.page.locator("#e3-status .e3-status-text").inner_text())

    def wait_status(self, text: str, timeout: float = 120) -> None:
        sync_api.expect(self.page.locator("#e3-status .e3-status-text")).to_contain_text(text, timeout=timeout * 1000)

    def run(self, until: str = "Done:", timeout: float = 120) -> None:
        self.press("Run")
        self.wait_status(until, timeout)
        sync_api.expect(self.page.locator(".e3-steps-root")).to_have_attribute("data-state", "done")

    def open(self, path: Path) -> None:
        """Choose a file behind the button, as a person does."""
        with self.page.expect_file_chooser() as chooser:
            self.page.get_by_role("button", name="Open trace").click()
        chooser.value.set_files(path)

    def chips(self) -> list[dict[str, str]]:
        """What a person sees as chips: the elements' own attributes, in order."""
        read = "all => all.map(one => ({...one.dataset, text: one.textContent}))"
        return list(self.page.locator(".e3-list .e3-chip").evaluate_all(read))

    def words(self) -> list[dict[str, str]]:
        read = "all => all.map(one => ({...one.dataset, text: one.textContent}))"
        return list(self.page.locator("#e3-steps .e3-answer .e3-word").evaluate_all(read))


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Watched]]:
    """Open an address at 1280 x 720; at the end nothing may have gone wrong, and nothing may have been asked of another machine."""
    contexts, visited = [], []

    def open_page(url: str, *, theme: str = "light", expected: tuple[str, ...] = ()) -> Watched:
        context = browser.new_context(viewport={"width": 1280, "height": 720}, accept_downloads=True)
        context.set_default_timeout(120_000)
        contexts.append(context)
        page = context.new_page()
        watched = Watched(page)
        visited.append((watched, expected))
        page.on("dialog", lambda dialog: (watched.faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("pageerror", lambda error: watched.faults.append(f"page error: {error}"))
        page.on("console", lambda message: message.type == "error" and watched.faults.append(f"console: {message.text}"))

        def asked(request: Any) -> None:
            parts = urlsplit(request.url)
            if parts.scheme not in ("data", "blob") and parts.hostname not in ("127.0.0.1", "localhost"):
                watched.faults.append(f"outside request: {request.url}")

        page.on("request", asked)
        page.goto(f"{url}?__theme={theme}")
        page.locator(".e3-steps-root").wait_for()
        return watched

    yield open_page
    faults = [fault for watched, expected in visited for fault in watched.faults if not any(word in fault for word in expected)]
    for context in contexts:
        context.close()
    assert faults == []


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Serve the page over an engine and give its address."""
    from lab.ui.build import launch, page

    served = []

    def start(engine: Any, *, warm: bool = False) -> str:
        demo = page(recipes.get("smollm2"), engine, folder=tmp_path / "traces", warm=warm)
        served.append(demo)
        return launch(demo, port=PORT, block=False)

    yield start
    for demo in served:
        demo.close()
