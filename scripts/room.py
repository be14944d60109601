"""A full room at a workshop, measured: many clients at once, a presenter who pushes, and real browsers whose reaction is timed.

    python scripts/room.py --clients 30 --browsers 2 --seconds 600 --out room.json

It starts `eagle3-lab workshop` on this machine (or takes a running one: --url, --presenter, --pid), fills it with clients that speak the
page's own protocol (long poll and JSON, at the page's pace), and prints what the room is measured by: errors, answers that were not the
asker's own, how long a push takes to reach everybody, the app's memory and processor time (without the engine's), and how fast the pages
react in Chromium meanwhile. Every client asks, waits for its whole answer, thinks for a moment, asks again.

How the numbers are made: a push is timed from before the presenter's request until a client has read what carries it; they share
this process's clock. Memory is the app's resident set (VmRSS) as a median over the first and the last tenth of the time after
`--settle` seconds. A tab change is timed in the page, from the click until two frames later, when the part must be visible; hovering from
the pointer event until two frames later. Exit status 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

ROOT = Path(__file__).resolve().parent.parent
#: As the page does (assets/ui/stage.js): seconds between two polls, and how long a poll may wait.
PACE, WAIT = 0.35, 15.0
QUESTIONS = ("Name three fruits.", "What is a river?", "Count to five.", "What do bees make?", "Write one line of Python.")


@dataclass
class Measured:
    """What happened in the room."""

    errors: list[str] = field(default_factory=list)
    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    polls: int = 0
    #: When each stage was pushed, and when each client saw it, by the stage's id.
    pushed: dict[str, float] = field(default_factory=dict)
    seen: dict[str, list[float]] = field(default_factory=dict)
    memory: list[tuple[float, int]] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    reactions: dict[str, list[float]] = field(default_factory=dict)

    def summary(self, clients: int, seconds: float, settle: float) -> dict[str, Any]:
        """Numbers and bars."""
        worst = [max(self.seen[one]) - at for one, at in self.pushed.items() if len(self.seen.get(one, ())) >= clients]
        late = [f"push {one}: {len(self.seen.get(one, ()))} of {clients}" for one in self.pushed if len(self.seen.get(one, ())) < clients]
        begin, end = _tenth(self.memory, settle, last=False), _tenth(self.memory, settle, last=True)
        growth = (end - begin) / begin if begin and end else None
        reactions = {name: {"median_ms": statistics.median(all_), "n": len(all_)} for name, all_ in self.reactions.items() if all_}
        bars = {
            "no errors": not self.errors,
            "no trace in the wrong session": not self.wrong and self.answers > 0,
            "push within a second": bool(worst) and max(worst) < 1.0 and not late,
        }
        if growth is not None:
            bars["memory grows by under 10%"] = growth < 0.10
        if reactions:
            bars["reaction under 200 ms at the median"] = all(one["median_ms"] < 200 for one in reactions.values())
        return {
            "clients": clients,
            "seconds": seconds,
            "answers": self.answers,
            "polls": self.polls,
            "errors": self.errors[:20],
            "wrong_session": self.wrong[:20],
            "push_s": {
                "pushes": len(self.pushed),
                "worst": max(worst, default=None),
                "median_of_worst": _median(worst),
                "missed": late[:5],
            },
            "place_in_line": {"worst": max(self.places, default=None), "n": len(self.places)},
            "ask_to_answer_s": {"median": _median(self.waits), "worst": max(self.waits, default=None)},
            "app_memory_bytes": {"begin": begin, "end": end, "growth": growth},
            "app_cpu_cores": _median(self.cpu),
            "reactions": reactions,
            "bars": bars,
        }


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _tenth(memory: list[tuple[float, int]], settle: float, *, last: bool) -> float | None:
    after = [size for at, size in memory if at >= settle]
    if len(after) < 20:
        return None
    count = max(5, len(after) // 10)
    return statistics.median(after[-count:] if last else after[:count])


class Client:
    """One attendee, speaking as the page does. `echo`: the engine's tokens all read like the prompt (the tests' small engine)."""

    def __init__(self, number: int, url: str, measured: Measured, *, think: float, echo: bool) -> None:
        self.number, self.measured, self.think, self.echo = number, measured, think, echo
        self.http = httpx.AsyncClient(base_url=url, timeout=60, trust_env=False)
        self.run, self.lines, self.text = "", 0, ""
        self.stage, self.stage_lines = "", 0
        self.version, self.boot = 0, ""
        self.asked, self.at, self.count = "", 0.0, 0
        self.mine: set[str] = set()

    async def post(self, what: str, values: dict[str, Any]) -> bool:
        response = await self.http.post(f"/room/{what}", json=values)
        if response.status_code != 200:
            self.measured.errors.append(f"client {self.number}: {what}: {response.status_code} {response.text[:200]}")
        return response.status_code == 200

    async def poll(self, wait: float) -> dict[str, Any] | None:
        query = {"run": self.run, "n": self.lines, "stage": self.stage, "s": self.stage_lines}
        response = await self.http.get("/room/state", params={**query, "v": self.version, "boot": self.boot, "wait": wait})
        self.measured.polls += 1
        if response.status_code != 200:
            self.measured.errors.append(f"client {self.number}: state: {response.status_code} {response.text[:200]}")
            return None
        record: dict[str, Any] = response.json()
        self.version, self.boot = record["v"], record["boot"]
        stage = record["stage"]
        if stage["id"] != self.stage:
            self.stage, self.stage_lines = stage["id"], 0
            self.measured.seen.setdefault(stage["id"], []).append(time.monotonic())
        if "lines" in stage:
            self.stage_lines = stage["from"] + stage["lines"].count("\n")
        self._mine(record)
        return record

    def _mine(self, record: dict[str, Any]) -> None:
        """Check that what is shown as mine is mine, and keep its lines."""
        mine = record.get("mine")
        if mine is None:
            return
        if mine["id"] != self.run:
            self.run, self.lines, self.text = mine["id"], 0, ""
        if mine["from"] != self.lines:
            self.lines, self.text = 0, ""
            return
        self.text += mine["lines"]
        self.lines += mine["lines"].count("\n")
        prompt = "".join(mine["prompt"])
        if prompt not in self.mine:
            self.measured.wrong.append(f"client {self.number} never asked {prompt!r}")
        for line in mine["lines"].splitlines():
            read = json.loads(line)
            if read["t"] == "run" and read["id"] != self.run:
                self.measured.wrong.append(f"client {self.number}: lines of run {read['id']} in {self.run}")
            if self.echo and read["t"] == "step":
                texts = {"".join(chip[3]).replace("·", " ") for chip in read["chips"]}
                if texts - {prompt}:
                    self.measured.wrong.append(f"client {self.number}: a step of {prompt!r} says {sorted(texts)}")

    async def live(self, until: float) -> None:
        """Ask, follow the answer, think, ask again."""
        rest = time.monotonic() + self.think * (self.number % 7) / 7
        while time.monotonic() < until:
            try:
                record = await self.poll(min(WAIT, max(0.2, min(until, rest if not self.asked else until) - time.monotonic())))
                if record is None:
                    await asyncio.sleep(1)
                    continue
                me = record["me"]
                if me["place"]:
                    self.measured.places.append(me["place"])
                mine = record.get("mine")
                if self.asked and me["state"] == "over" and mine and "".join(mine["prompt"]) == self.asked and mine["state"] != "running":
                    if mine["state"] != "done":
                        self.measured.errors.append(f"client {self.number}: answer {mine['state']}: {me['text']}")
                    elif '"t":"state"' in self.text:
                        self.measured.answers += 1
                        self.measured.waits.append(time.monotonic() - self.at)
                        self.asked, rest = "", time.monotonic() + self.think
                if not self.asked and time.monotonic() >= rest:
                    self.count += 1
                    self.asked = f"{QUESTIONS[self.count % len(QUESTIONS)]} ({self.number}.{self.count})"
                    self.at = time.monotonic()
                    self.mine.add(self.asked)
                    if not await self.post("ask", {"prompt": self.asked}):
                        self.asked, rest = "", time.monotonic() + 2
                await asyncio.sleep(PACE)
            except httpx.HTTPError as error:
                self.measured.errors.append(f"client {self.number}: {type(error).__name__}: {error}")
                await asyncio.sleep(1)
        await self.http.aclose()


async def present(link: str, measured: Measured, until: float, every: float) -> None:
    """The presenter: one run for all, then pushes of it, timed."""
    parts = urlsplit(link)
    async with httpx.AsyncClient(base_url=f"{parts.scheme}://{parts.netloc}", timeout=60, trust_env=False, follow_redirects=True) as http:
        (await http.get(f"{parts.path}?{parts.query}")).raise_for_status()

        async def act(name: str, **values: Any) -> None:
            response = await http.post("/present/room/act", json={"act": name, **values})
            if response.status_code != 200:
                measured.errors.append(f"presenter: {name}: {response.status_code} {response.text[:200]}")

        async def state() -> dict[str, Any]:
            record: dict[str, Any] = (await http.get("/present/room/state")).json()
            return record

        while (await state())["engine"]["health"] != "ready":
            if time.monotonic() > until:
                measured.errors.append("the engine was never ready")
                return
            await asyncio.sleep(0.5)
        await act("run", prompt="What are the benefits of regular exercise?")
        run = ""
        while not run and time.monotonic() < until:
            await asyncio.sleep(0.5)
            record = await state()
            if record.get("mine", {}).get("state") == "done":
                run = record["mine"]["id"]
        while time.monotonic() < until - 3:
            began = time.monotonic()
            await act("push", run=run)
            measured.pushed[(await state())["stage"]["id"]] = began
            await asyncio.sleep(min(every, max(0.0, until - time.monotonic())))


async def watch(pid: int, measured: Measured, until: float) -> None:
    """The app's memory and processor time."""
    began, ticks = time.monotonic(), os.sysconf("SC_CLK_TCK")
    last: tuple[float, int] | None = None
    while time.monotonic() < until:
        try:
            status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        except OSError:
            measured.errors.append("the app is gone")
            return
        size = re.search(r"VmRSS:\s+(\d+) kB", status)
        now, used = time.monotonic(), int(stat[11]) + int(stat[12])
        measured.memory.append((now - began, int(size[1]) * 1024 if size else 0))
        if last is not None:
            measured.cpu.append((used - last[1]) / ticks / (now - last[0]))
        last = now, used
        await asyncio.sleep(1)


#: Click a tab and wait until two frames later; the part must be visible then. Gives milliseconds.
SWITCH = """async ([tab, part]) => {
    const began = performance.now();
    document.querySelector(tab).click();
    const frame = () => new Promise(requestAnimationFrame);
    for (let tries = 0; tries < 200; tries++) {
        await frame();
        const shown = document.querySelector(part);
        if (shown && shown.offsetParent !== null) break;
    }
    await frame();
    return performance.now() - began;
}"""

#: From the moment that the pointer came over an element until two frames later, in milliseconds.
HOVER = """selector => {
    const frame = () => new Promise(requestAnimationFrame);
    window.hovered = new Promise(done => document.querySelector(selector).addEventListener("pointerover", async event => {
        await frame();
        await frame();
        done(performance.now() - event.timeStamp);
    }, {once: true}));
}"""


async def browse(url: str, link: str, browsers: int, measured: Measured, until: float) -> None:
    """Real pages: the presenter's first, then attendees'; each switches tabs and hovers again and again."""
    from playwright.async_api import Error, async_playwright

    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        measured.errors.append("no Chromium on this machine: apt-get install chromium, or --browsers 0")
        return
    pairs = {
        "presenter": [("#e3-tab-workshop-button", ".e3-desk-root"), ("#e3-tab-microscope-button", "#e3-steps .e3-steps-root")],
        "attendee": [("#tab-room", "#part-room"), ("#tab-you", "#part-you")],
    }
    hovered = {"presenter": "#e3-run", "attendee": "#larger"}
    async with async_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
        browser = await playwright.chromium.launch(executable_path=chromium, args=flags)

        async def one(kind: str) -> None:
            size = {"width": 1280, "height": 720} if kind == "presenter" else {"width": 390, "height": 844}
            page = await (await browser.new_context(viewport=size)).new_page()  # type: ignore[arg-type]
            page.on("pageerror", lambda error: measured.errors.append(f"{kind} page: {error}"))
            page.on("dialog", lambda dialog: measured.errors.append(f"{kind} page: dialog {dialog.message}"))
            await page.goto(link if kind == "presenter" else url)
            await page.locator(pairs[kind][-1][1]).wait_for(state="attached", timeout=60_000)
            turn = 0
            while time.monotonic() < until - 2:
                took = await page.evaluate(SWITCH, list(pairs[kind][turn % 2]))
                measured.reactions.setdefault(f"{kind} tab change", []).append(took)
                await page.mouse.move(2, 2)
                await page.evaluate(HOVER, hovered[kind])
                await page.locator(hovered[kind]).hover()
                measured.reactions.setdefault(f"{kind} hover", []).append(await page.evaluate("() => window.hovered"))
                turn += 1
                await asyncio.sleep(2)

        kinds = ["presenter", *["attendee"] * (browsers - 1)]
        for kind, ended in zip(kinds, await asyncio.gather(*map(one, kinds), return_exceptions=True), strict=True):
            if isinstance(ended, Error):
                measured.errors.append(f"{kind} page: {ended.message[:300]}")
            elif isinstance(ended, BaseException):
                raise ended
        await browser.close()


async def drive(
    url: str,
    link: str,
    *,
    clients: int,
    seconds: float,
    browsers: int = 0,
    pid: int | None = None,
    think: float = 3.0,
    every: float = 10.0,
    settle: float = 60.0,
    echo: bool = False,
) -> dict[str, Any]:
    """Fill the room at `url` for `seconds` and give the summary."""
    measured = Measured()
    until = time.monotonic() + seconds
    room = [Client(number, url, measured, think=think, echo=echo) for number in range(clients)]
    work = [present(link, measured, until, every), *(client.live(until) for client in room)]
    if pid is not None:
        work.append(watch(pid, measured, until))
    if browsers:
        work.append(browse(url, link, browsers, measured, until))
    await asyncio.gather(*work)
    # a push of the last moment need not have reached those that were about to leave
    for one in [one for one, at in measured.pushed.items() if at > until - 4]:
        del measured.pushed[one]
    return measured.summary(clients, seconds, settle)


def start(port: int, more: list[str], log: Path) -> tuple[subprocess.Popen[bytes], str, str]:
    """Start the workshop and give its process, address and presenter's link."""
    handle = log.open("wb")
    process = subprocess.Popen(
        [sys.executable, "-c", "from lab.cli import main; main()", "workshop", "--port", str(port), *more],
        cwd=ROOT,
        stdout=handle,
        stderr=subprocess.STDOUT,
    )
    for _ in range(600):
        text = log.read_text(encoding="utf-8", errors="replace")
        url, link = re.search(r"join at (\S+)", text), re.search(r"yourself\): (\S+)", text)
        if url and link:
            return process, url[1], link[1]
        if process.poll() is not None:
            raise SystemExit(f"The workshop ended: {text[-2000:]}")
        time.sleep(0.2)
    process.terminate()
    raise SystemExit(f"The workshop did not start within two minutes: {log.read_text(errors='replace')[-2000:]}")


def main() -> int:
    """Parse the command line, run, print the summary. 0 where every bar is met."""
    parser = argparse.ArgumentParser(description="Measure a full workshop room.")
    parser.add_argument("--clients", type=int, default=30, help="attendees in all, browsers not counted")
    parser.add_argument("--browsers", type=int, default=2, help="real pages: the presenter's, then attendees'")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--settle", type=float, default=60, help="seconds before memory counts")
    parser.add_argument("--think", type=float, default=3, help="seconds between an answer and the next question")
    parser.add_argument("--port", type=int, default=7880)
    parser.add_argument("--url", help="a workshop that runs already (then --presenter, and --pid for its memory)")
    parser.add_argument("--presenter", help="its presenter's link")
    parser.add_argument("--pid", type=int, help="its process")
    parser.add_argument("--out", type=Path, help="write the summary as JSON, too")
    options, more = parser.parse_known_args()
    process = None
    url, link, pid = options.url, options.presenter, options.pid
    try:
        if url is None:
            log = Path(tempfile.mkdtemp(prefix="eagle3-room-")) / "app.log"
            print(f"Starting the workshop (log: {log})", flush=True)
            process, url, link = start(options.port, more, log)
            pid = process.pid
            asyncio.run(_ready(link))
        summary = asyncio.run(
            drive(
                url,
                link,
                clients=options.clients,
                seconds=options.seconds,
                browsers=options.browsers,
                pid=pid,
                think=options.think,
                settle=options.settle,
            )
        )
    finally:
        if process is not None:
            process.send_signal(2)
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
    print(json.dumps(summary, indent=1))
    if options.out:
        sys.path.insert(0, str(ROOT))
        from lab.provenance import collect, write_text

        write_text(options.out, json.dumps({"provenance": collect(), **summary}, indent=1) + "\n")
    for name, good in summary["bars"].items():
        print(f"{'ok' if good else 'MISSED'}  {name}")
    return 0 if all(summary["bars"].values()) else 1


async def _ready(link: str) -> None:
    """Wait until the preflight is over, so that starting engines is not measured."""
    parts = urlsplit(link)
    async with httpx.AsyncClient(base_url=f"{parts.scheme}://{parts.netloc}", timeout=60, trust_env=False) as http:
        await http.get(f"{parts.path}?{parts.query}")
        began, said = time.monotonic(), ""
        while time.monotonic() - began < 900:
            record = (await http.get("/present/room/state")).json()
            states = [check["state"] for check in record["checks"]]
            text = record["verdict"]["text"]
            if text != said:
                print(text, flush=True)
                said = text
            if states and not {"wait", "busy"} & set(states):
                return
            await asyncio.sleep(2)


if __name__ == "__main__":
    sys.exit(main())
