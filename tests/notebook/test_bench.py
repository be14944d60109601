"""What notebooks call: shared engines over a socket, a workbench over a small fake server, and HTML in which nothing can run."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest

from lab import env, notebook, recipes
from lab.errors import LabError
from lab.notebook import display, session
from lab.notebook.broker import SETTING, SharedLanes, lanes, shared
from lab.plots import grouped
from lab.serving.command import Lane
from lab.serving.endpoint import Endpoint, LaneStatus, Progress
from lab.serving.lanes import Lanes
from lab.trace import html
from lab.trace.model import Request, Step, Trace

LANE = Lane(recipes.get("smollm2"), "bf16", 3)


class Kept:
    """Stands for `Lanes` in the process that keeps them: tells progress, answers, or fails as lanes do."""

    def __init__(self, error: LabError | None = None) -> None:
        self.error, self.asked, self.stopped = error, 0, 0

    async def endpoint(self, lane: Lane, *, on_progress: Callable[[Progress], None] | None = None) -> Endpoint:
        self.asked += 1
        assert on_progress is not None
        on_progress(Progress("starting", "loading", 1.0))
        await asyncio.sleep(0.05)
        if self.error:
            raise self.error
        return Endpoint("http://127.0.0.1:1", lane.recipe.name, lane)

    async def stop(self, lane: Lane) -> None:
        assert lane == LANE
        self.stopped += 1

    def status(self) -> list[LaneStatus]:
        return [LaneStatus(LANE, "ready", Progress("ready", "", 2.0))]


def test_kernels_share_the_lanes_of_the_process_that_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, told = Kept(), []
    with shared(kept) as given:  # type: ignore[arg-type]
        monkeypatch.setenv(SETTING, given[SETTING])
        found = lanes()
        assert isinstance(found, SharedLanes)

        async def ask() -> list[Endpoint]:
            return await asyncio.gather(*(found.endpoint(LANE, on_progress=told.append) for _ in range(5)))

        endpoints = asyncio.run(ask())
        assert [one.lane for one in endpoints] == [LANE] * 5
        assert kept.asked == len(told) == 5
        assert [one.state for one in found.status()] == ["ready"]
        asyncio.run(found.stop(LANE))
        assert kept.stopped == 1
    with pytest.raises(LabError, match="shared engines are gone"):
        asyncio.run(found.endpoint(LANE))


def test_an_engines_failure_reaches_the_kernel_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    with shared(Kept(LabError("It did not start.", why="No memory.", todo="Stop one."))) as given:  # type: ignore[arg-type]
        monkeypatch.setenv(SETTING, given[SETTING])
        with pytest.raises(LabError) as caught:
            asyncio.run(lanes().endpoint(LANE))
    assert (caught.value.what, caught.value.why, caught.value.todo) == ("It did not start.", "No memory.", "Stop one.")


def test_only_this_user_with_the_key_gets_in() -> None:
    kept = Kept()
    with shared(kept) as given:  # type: ignore[arg-type]
        path, _, key = given[SETTING].rpartition(":")
        assert os.stat(os.path.dirname(path)).st_mode & 0o077 == 0
        with pytest.raises(Exception, match="digest"):
            Client(path, "AF_UNIX", authkey=b"wrong")
        assert asyncio.run(SharedLanes(f"{path}:{key}").endpoint(LANE)).lane == LANE  # it still serves those who have it
    assert kept.asked == 1


def test_without_the_setting_a_kernel_has_lanes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SETTING, raising=False)
    own = lanes()
    assert isinstance(own, Lanes)
    own.shutdown()


def test_a_bench_says_what_a_recipe_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SETTING, raising=False)
    bench = notebook.start()
    assert bench.lane() == Lane(bench.recipe, "bf16", bench.recipe.default_k("bf16"), compiled=False)
    with pytest.raises(LabError, match="out of range"):
        bench.lane(k=99)
    with pytest.raises(LabError, match="no recipe called"):
        notebook.start("nope")
    bench.close()


HOSTILE = "<script>alert(1)</script>${alert(2)}\u202e"


def request() -> Request:
    pieces = {1: HOSTILE.encode().hex(), 2: b" b".hex(), 3: b" c".hex()}
    step = Step(
        trace="t",
        request="r",
        index=1,
        phase="decode",
        started=0.0,
        ended=1.0,
        draft=(1, 2),
        draft_probs=(0.9, 0.2),
        sampled=(1, 3),
        kept=2,
    )
    return Request(trace="t", lane=HOSTILE, prompt=HOSTILE, steps=[step], pieces=pieces, text=HOSTILE, settings={"k": 2})


def test_a_sweeps_files_go_with_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is one of the lab's temporary ones, which test_env.py follows to their end."""

    def prepare(_plan: object, folder: Path, **_more: object) -> None:
        assert folder.parent == tmp_path
        assert (folder / env.LOCK).exists()
        raise LabError("seen")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(session, "prepare", prepare)
    with pytest.raises(LabError, match="seen"):
        asyncio.run(notebook.start().sweep([LANE], "8/8", [1]))


def test_things_draw_themselves_and_nothing_in_them_runs() -> None:
    one = request()
    trace = Trace(provenance={"made": HOSTILE, "revision": HOSTILE}, requests=[one, Request(trace="u", lane="l", prompt="p", text=HOSTILE)])
    drawn = [one, one.steps[0], trace, html.rows(one), notebook.table(("a", HOSTILE), [(1, HOSTILE)], caption=HOSTILE)]
    for thing in drawn:
        text: str = thing._repr_html_()  # type: ignore[attr-defined]
        assert "<script" not in text.lower()
        assert "\u202e" not in text
        assert "e3-notebook" in text
    shown = one._repr_html_()
    for mark in ("accepted", "rejected", "recovered"):
        assert f'data-mark="{mark}"' in shown
    assert "mean acceptance length, bonus included <b>2.00</b>" in shown
    assert 'data-token="1"' in one.steps[0]._repr_html_()


def test_the_same_chips_as_the_page() -> None:
    """One code: the rows of a notebook are made of `render.chip_html` and styled by the page's own file."""
    from lab.env import assets
    from lab.trace.render import chip_html, chips

    one = request()
    assert all(chip_html(chip) in one._repr_html_() for chip in chips(one.steps[0], one.pieces))
    assert (assets() / "ui" / "chips.css").read_text(encoding="utf-8") in one._repr_html_()


def test_a_chart_is_sent_as_plotlys_message(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []
    pytest.importorskip("IPython", reason="notebooks need it")
    monkeypatch.setattr("IPython.display.display", lambda bundle, **_: sent.append(bundle))
    chart = grouped(["a", "b"], [("one", "own", [0.1, 0.2]), ("two", "bf16", [0.3, 0.4])], x="x", y="y", share=True)
    notebook.show(chart, title="title")
    assert sent[0][display.PLOTLY]["layout"]["title"]["text"] == "title"
    assert "20%" in sent[0]["text/plain"]
    assert "title" not in chart["layout"]  # the chart itself is left alone


def test_findings_comparisons_and_reports_draw_themselves() -> None:
    from lab.bench.versus import versus
    from lab.doctor import gather
    from lab.doctor.report import report
    from lab.trace.stats import Counts

    one = [Counts(10, 30, 12, (6, 4, 2), (10, 10, 10), (4, 2, 2, 2), 22, 10)] * 6
    other = [Counts(10, 30, 15, (7, 5, 3), (10, 10, 10), (3, 2, 2, 3), 25, 10)] * 6
    shown = versus(one, other)._repr_html_()
    assert "2.200" in shown
    assert "2.500" in shown
    assert "accepted at position 3" in shown
    sick = report(
        gather.from_line('vllm serve m --speculative-config \'{"method": "eagle3", "model": "<b>"\' --block-size 1', gpu="MI355X")
    )
    assert "<b>" not in sick._repr_html_()
    frame = display.Frame('<p title="a">text</p><script>alert(1)</script>', 100)._repr_html_()
    assert "sandbox" in frame  # no script runs in it
    assert "<script" not in frame
    assert "&lt;p title=&quot;a&quot;&gt;" in frame
