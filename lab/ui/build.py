"""The page: the prompt bar and the status line above one tab a file, and the launch with everything that goes outside switched off.

Nothing is fetched from anywhere but this server: the page's scripts are in `assets/ui`, plotly's own script comes from the installed
package. The page listens on 127.0.0.1 only; where the port is taken it takes the next free one and says so.
"""

from __future__ import annotations

import functools
import os
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # gradio reads it when it is imported
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import gradio as gr
from gradio.themes.utils.fonts import LocalFont

from lab.env import assets, scratch_until_exit
from lab.errors import LabError
from lab.recipes.model import Recipe
from lab.serving.attach import Address
from lab.serving.command import Lane
from lab.serving.lanes import Lanes
from lab.serving.process import launcher, port_is_free
from lab.ui.app import CONCURRENCY, Frame, Lab, about, ending, failed, say, stopped
from lab.ui.bar import memory_words, prompt_bar
from lab.ui.barrier import barrier_tab
from lab.ui.beside import beside
from lab.ui.components import live
from lab.ui.components.charts import plotly_script
from lab.ui.components.status import status_line
from lab.ui.doctor import doctor_tab
from lab.ui.duel import duel
from lab.ui.engine import Engine, Serving
from lab.ui.microscope import microscope
from lab.ui.quantise import quantise
from lab.ui.race import race_tab
from lab.ui.runner import Status, start_words, wait_ready
from lab.ui.state import Runs, Session, whole_k
from lab.ui.sweep import sweep
from lab.ui.verify import verify_tab
from lab.ui.why import why_tab

HOST = "127.0.0.1"
PORT = 7860
SCRIPTS = (
    "core.js",
    "status.js",
    "steps.js",
    "charts.js",
    "beside.js",
    "duel.js",
    "race.js",
    "why.js",
    "sweep.js",
    "quantise.js",
    "proof.js",
    "doctor.js",
    "barrier.js",
    "crossing.js",
)
STYLES = ("chips.css", "page.css", "duel.css", "race.css", "sweep.css", "proof.css", "doctor.css")


def page(
    recipe: Recipe,
    engine: Engine,
    *,
    folder: Path | None = None,
    warm: bool = True,
    more: Callable[[Lab, Frame], None] | None = None,
    missing: LabError | None = None,
) -> gr.Blocks:
    """The page of one recipe over one engine. `folder`: where traces to download are written; `warm`: start the first lane at once;
    `more` draws further tabs; `missing` says why no engine can be started here, and then nothing is offered that needs one."""
    lab = Lab(recipe, engine, Runs(), folder or scratch_until_exit())
    with gr.Blocks(title="Eagle3 Lab", analytics_enabled=False, fill_width=True) as demo:
        session = gr.State(Session())
        remembered = gr.BrowserState(None, storage_key="eagle3-lab-run")
        bar = prompt_bar(recipe)
        with gr.Row(elem_id="e3-status-row"):
            status = status_line(without_engine(missing) or Status("info", "Choose a draft and press Run."), elem_id="e3-status")
            badge = live("badge", elem_id="e3-badge")
            restart = gr.Button("Restart the engine", visible=False, size="sm", elem_id="e3-restart", min_width=160, scale=0)

        def lane_now(draft: str, k: float | None) -> Lane:
            kind: Any = draft
            return Lane(recipe, kind, whole_k(recipe, draft, k), compiled=recipe.compiled, traced=True)

        def changed(draft: str, k: float | None) -> str:
            """Say which lane the next run needs, and whether it has to be started."""
            try:
                lane = lane_now(draft, k)
            except LabError as error:
                return failed(error)
            ready = any(one.lane.key == lane.key and one.state == "ready" for one in engine.status())
            if ready:
                return say(Status("info", f"The next run uses {lane.label}: its engine is ready.", detail="earlier results stay"))
            if lane.at is not None:
                return say(Status("info", f"The next run asks {lane.label}.", detail="a server that runs elsewhere; earlier results stay"))
            why = start_words(engine.status(), recipe, lane)
            return say(
                Status(
                    "info",
                    f"The next run uses {lane.label}: another engine starts when you press Run.",
                    detail=f"{why}; earlier results stay",
                )
            )

        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        # Before the tabs' own listeners: the browser hears what one event starts in turn, each when the one before is over, and a sentence
        # that came late would stand in place of what was pressed meanwhile.
        gr.on([bar.draft.input, bar.k.input], changed, [bar.draft, bar.k], status, queue=False, trigger_mode="always_last", **quiet)

        with gr.Column(elem_id="e3-main"):
            provenance = live("about", about(lab), elem_id="e3-about")
            with gr.Tabs(elem_id="e3-tabs") as tabs:
                frame = Frame(bar, tabs, status, provenance, restart, session, remembered)
                first = microscope(lab, frame)
                second = beside(lab, frame)
                third = duel(lab, frame)
                racing = race_tab(lab, frame)
                explaining = why_tab(lab, frame)
                fourth = sweep(lab, frame)
                fifth = quantise(lab, frame)
                proving = verify_tab(lab, frame, badge)
                doctor_tab(lab, frame)
                crossing = barrier_tab(lab, frame)
                if more is not None:
                    more(lab, frame)

        async def warm_up(draft: str, k: float | None) -> AsyncIterator[str]:
            """Start the lane that the bar shows, so that the first run need not wait."""
            try:
                lane = lane_now(draft, k)
                async for line in wait_ready(engine, lane, []):
                    yield say(line)
            except LabError as error:
                yield failed(error)
                return
            words = "its weights are stored in BF16 or FP8 and computed in float32 on this processor" if lane.in_float32 else ""
            yield say(Status("done", f"Ready: {lane.label}. Press Run.", detail=words))

        warming = []
        if missing is not None:
            needing = [bar.run.click, bar.beside.click, bar.prompt.submit, third.start, racing.start, fourth.start]
            for event in (*needing, *explaining.starts, *proving.starts, *crossing.starts):
                event.__self__.interactive = False
        elif warm:
            warming.append(demo.load(warm_up, [bar.draft, bar.k], status, **quiet, **CONCURRENCY))
        demo.load(first.restore, [session, remembered], first.outputs, queue=False, **quiet)
        for moment in (demo.load, bar.draft.input, *fifth.made):
            moment(lambda: gr.Radio(label=memory_words(recipe)), None, bar.draft, queue=False, **quiet)
        # One thing at a time on one page: what starts ends the other, so that neither disturbs the other's speed.
        for starts, ended in (
            ([bar.run.click, bar.prompt.submit], [*second.events, *third.events, *fourth.events]),
            ([bar.beside.click], [*first.events, *third.events, *fourth.events]),
            ([third.start], [*first.events, *second.events, *fourth.events]),
            ([fourth.start], [*first.events, *second.events, *third.events]),
        ):
            gr.on(starts, None, None, None, cancels=[*warming, *ended], queue=False, api_visibility="private")
        every = [*first.events, *second.events, *third.events, *fourth.events, *fifth.events]
        mine = [*racing.events, *explaining.events]
        gr.on([racing.start], None, None, None, cancels=[*warming, *every, *explaining.events], queue=False, api_visibility="private")
        gr.on(explaining.starts, None, None, None, cancels=[*warming, *every, *racing.events], queue=False, api_visibility="private")
        starts = [bar.run.click, bar.prompt.submit, bar.beside.click, third.start]
        gr.on([*starts, fourth.start], None, None, None, cancels=mine, queue=False, api_visibility="private")
        begun = [*starts, racing.start, fourth.start, *explaining.starts]
        gr.on(begun, None, None, None, cancels=proving.events, queue=False, api_visibility="private")
        gr.on(proving.starts, None, None, None, cancels=[*warming, *every, *mine], queue=False, api_visibility="private")
        gr.on([*begun, *proving.starts], None, None, None, cancels=crossing.events, queue=False, api_visibility="private")
        others = [*warming, *every, *mine, *proving.events]
        gr.on(crossing.starts, None, None, None, cancels=others, queue=False, api_visibility="private")
        # One chain, so that one answer at a time is waited for: the browser keeps six connections, and the cancellation needs one of them.
        everything = [*every, *mine, *proving.events, *crossing.events]
        after = bar.stop.click(None, None, None, cancels=everything, queue=False, api_visibility="private")
        after = after.then(ending, [session, fourth.remembered[0]], None, queue=False, **quiet)
        shown: list[Any] = [first, second, third, fourth, fifth, racing, explaining, proving, crossing]
        for one in shown:
            show = stopped(one.after_stop, len(one.outputs))
            after = after.then(show, fourth.remembered if one is fourth else session, one.outputs, queue=False, **quiet)
        for moments in ([demo.load], [bar.draft.input, bar.k.input]):
            gr.on(moments, proving.badge, [bar.draft, bar.k], badge, trigger_mode="always_last", **quiet, **CONCURRENCY)
    # What a start cancels comes before it, for the same reason: else it would be cancelled when the start is over, with whatever is newer.
    listeners = sorted(demo.fns.items(), key=lambda one: not one[1].is_cancel_function)
    demo.fns.clear()
    demo.fns.update(listeners)
    return demo.queue(max_size=64)


def without_engine(missing: LabError | None) -> Status | None:
    """What the page says where no engine can be started: what works, and one click away why and what to do. None where one can."""
    if missing is None:
        return None
    what = "No engine can be started here. Recordings, saved traces and results, published tables and the doctor work."
    return Status("info", what, detail="play a recording: the list at the right", more=[missing.what, missing.why, missing.todo])


def engine_missing(recipe: Recipe) -> LabError | None:
    """Why this machine cannot start the recipe's engines; None where it can, or where all of its lanes are servers elsewhere."""
    if recipe.elsewhere:
        return None
    try:
        launcher()
    except LabError as error:
        return error
    return None


def free_port(first: int = PORT, *, tries: int = 100, host: str = HOST) -> int:
    """`first`, or the next port above it that nobody listens on; raises `LabError` where none is free."""
    for port in range(first, min(first + tries, 65536)):
        if port_is_free(port, host):
            return port
    raise LabError(f"No free port from {first} to {first + tries - 1}.", todo="Choose another with --port.")


@dataclass(frozen=True)
class Around:
    """What a workshop changes about serving the page: the address to listen on, more scripts and styles, options of gradio's own."""

    host: str = HOST
    scripts: tuple[str, ...] = ()
    styles: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    #: What is said once the page is open, with `{url}`.
    said: str = "Eagle3 Lab is open at {url}"


def launch(
    demo: gr.Blocks,
    *,
    port: int = PORT,
    open_browser: bool = False,
    block: bool = True,
    inline: bool | None = None,
    around: Around = Around(),
) -> str:
    """Serve the page and give its address; with `block` this returns when the server is stopped (Ctrl-C).

    `inline`: whether gradio shows the page below a notebook's cell by itself (None: where it is in a notebook)."""
    host = around.host
    folder = Path(str(assets() / "ui"))
    gr.set_static_paths([plotly_script()])
    # gradio asks its own server whether it is up: that must not go through somebody's proxy.
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(part for part in (os.environ.get(name), HOST, host, "localhost") if part)
    # One inline script, so that its parts run in order; plotly is large and may come later (relative: the page may sit behind a prefix).
    own = "\n".join((folder / name).read_text(encoding="utf-8") for name in (*SCRIPTS, *around.scripts))
    head = f'<script>{own}</script><script src="gradio_api/file={plotly_script()}"></script>'
    serve = functools.partial(
        demo.launch,
        server_name=f"[{host}]" if ":" in host else host,
        inbrowser=open_browser,
        inline=inline,
        prevent_thread_lock=True,
        quiet=True,
        share=False,
        ssr_mode=False,
        enable_monitoring=False,
        run_history=False,
        footer_links=[],
        max_threads=80,
        max_file_size="64mb",
        _frontend=False,  # skips a check that gives a busy machine 3 s to answer and then asks for a public link
        theme=gr.themes.Default(
            primary_hue="blue",
            radius_size="sm",
            spacing_size="sm",
            text_size="sm",
            font=[LocalFont("IBM Plex Sans", weights=(400, 700)), "system-ui", "sans-serif"],
            font_mono=[LocalFont("IBM Plex Mono", weights=(400, 700)), "ui-monospace", "monospace"],
        ),
        css_paths=[folder / name for name in (*STYLES, *around.styles)],
        head=head,
        **around.options,
    )
    chosen = free_port(port, host=host)
    try:
        _, url, _ = serve(server_port=chosen)
    except OSError:  # another program took it just now
        chosen = free_port(chosen + 1, host=host)
        _, url, _ = serve(server_port=chosen)
    if chosen != port:
        print(f"Port {port} is taken: using {chosen}.", flush=True)
    print(around.said.format(url=url), flush=True)
    if block:
        demo.block_thread()
    return str(url).replace("//[::]:", "//[::1]:")  # every address is none to open


def run(recipe: Recipe, *, port: int = PORT, open_browser: bool = False, addresses: Mapping[str, Address] | None = None) -> None:
    """The lab of one recipe until Ctrl-C: the page, and the engines behind it, which end with it. `addresses`: servers elsewhere."""
    lanes = Lanes(addresses=addresses)
    try:
        launch(page(recipe, Serving(lanes), missing=engine_missing(recipe)), port=port, open_browser=open_browser)
    finally:
        lanes.shutdown()
