"""The page in a browser over a small engine: what is on screen is what the engine did, and nothing that a token says is ever run."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lab import recipes
from lab.serving.client import Delta, StepEvent
from lab.trace.io import load, save
from lab.trace.model import Request, Trace
from lab.trace.render import Answer, chips

from .conftest import Watched, sync_api
from .fakes import ANSWER, PIECES, FakeEngine, steps_of

pytestmark = pytest.mark.browser
Serve = Callable[..., str]
Visit = Callable[..., Watched]


#: Contrast of each element's text on the ground it stands on (WCAG 2.2).
CONTRAST = """all => all.map(one => {
    const linear = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
    const light = colour => {
        const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(v => linear(v / 255));
        return .2126 * r + .7152 * g + .0722 * b;
    };
    const ground = e => {
        for (; e; e = e.parentElement) {
            const colour = getComputedStyle(e).backgroundColor;
            if (!/rgba\\(.*, 0\\)|transparent/.test(colour)) return colour;
        }
        return 'rgb(255, 255, 255)';
    };
    const [a, b] = [light(getComputedStyle(one).color), light(ground(one))];
    return [one.className + ' ' + one.textContent.slice(0, 20), (Math.max(a, b) + .05) / (Math.min(a, b) + .05)];
})"""


def engine(**changes: Any) -> FakeEngine:
    return FakeEngine(recipes.get("smollm2"), **changes)


def expected_chips(request: Request) -> list[tuple[str, str, str, str, str]]:
    """Token id, mark, step, position and text of every chip, made from the trace."""
    found, output = [], 0
    for step in request.steps:
        for chip in chips(step, request.pieces, output=output):
            found.append((str(chip.token), chip.mark, str(chip.step), str(chip.position), "".join(chip.text)))
        output += step.kept
    return found


def seen_chips(watched: Watched) -> list[tuple[str, str, str, str, str]]:
    return [(one["token"], one["mark"], one["step"], one["position"], one["text"]) for one in watched.chips()]


def test_the_page_shows_the_trace_of_that_very_run(serve: Serve, visit: Visit, tmp_path: Path) -> None:
    fake = engine()
    watched = visit(serve(fake))
    watched.run()
    (request,) = fake.requests
    assert len(request.steps) > 20
    assert seen_chips(watched) == expected_chips(request)
    answer = Answer()
    words = [("".join(token.text), token.mark) for step in request.steps for token in answer.feed(step, request.pieces)]
    assert [(one["text"], one["mark"]) for one in watched.words()] == words
    assert [int(one["token"]) for one in watched.words()] == list(request.output_ids()) == ANSWER
    text = watched.page.locator("#e3-steps .e3-answer").inner_text()
    assert "🦅" in text
    assert "<script>alert(1)</script>" in text
    assert "${alert(1)}{{x}}" in text
    # numbers that a person reads
    accepted, drafts = sum(step.accepted for step in request.steps), sum(bool(step.draft) for step in request.steps)
    tiles = watched.page.locator("#e3-tiles [data-tile]").evaluate_all(
        "all => Object.fromEntries(all.map(t => [t.dataset.tile, t.querySelector('b').textContent]))"
    )
    assert tiles["mean acceptance length"] == f"{1 + accepted / drafts:.2f}"
    assert tiles["acceptance rate"] == f"{accepted / (3 * drafts):.0%}"
    assert tiles["tokens / steps"] == f"{len(ANSWER)} / {len(request.steps)}"
    # saved, it is the same trace
    with watched.page.expect_download() as download:
        watched.page.get_by_role("button", name="Save trace").click()
    path = tmp_path / "saved.jsonl"
    download.value.save_as(path)
    saved = load(path)
    assert saved.requests[0].steps == request.steps
    assert saved.provenance["lane"] == "smollm2/bf16/k3/eager/traced"
    assert saved.provenance["mode"] == "eager"


def test_hostile_tokens_stay_text(serve: Serve, visit: Visit) -> None:
    watched = visit(serve(engine()))
    watched.run()
    for selector in (".e3-list", "#e3-steps .e3-answer"):
        tags = watched.page.locator(selector).evaluate(
            "e => [...new Set([...e.querySelectorAll('*')].map(one => one.tagName.toLowerCase()))].sort()"
        )
        assert set(tags) <= {"div", "span", "bdi", "i"}
        shown = watched.page.locator(selector).evaluate("e => e.textContent")
        assert not re.search("[\u202a-\u202e\u2066-\u2069]", shown)
        assert "[U+202E]" in shown
    by_token = {one["token"]: one["text"] for one in watched.chips()}
    assert by_token["7"] == "↵"
    assert by_token["9"] == "<0xF0><0x9F>"
    # a sign for a space is marked as a sign, a token that is such a character is not
    signs = watched.page.locator('.e3-chip[data-token="13"] i, .e3-chip[data-token="14"] i').evaluate_all(
        "all => all.map(i => i.parentElement.dataset.token)"
    )
    assert set(signs) == {"13"}
    # the card, too, is text
    watched.page.locator('.e3-chip[data-token="1"]').first.click()
    card = watched.page.locator(".e3-card")
    assert PIECES[1].decode() in card.inner_text()
    assert card.locator("script").count() == 0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_fits_and_can_be_read(serve: Serve, visit: Visit, theme: str) -> None:
    watched = visit(serve(engine()), theme=theme)
    watched.run()
    watched.fits()
    watched.page.get_by_role("tab", name="Beside the baseline").click()
    sync_api.expect(watched.page.locator("#e3-beside")).to_be_visible()
    watched.fits()
    watched.page.get_by_role("tab", name="Microscope").click()
    chosen = ".e3-chip, .e3-word, .e3-tile b, .e3-tile span:not(.e3-hidden), .e3-panel-title, .e3-status-text, .e3-status-detail"
    chosen += ", .e3-about-line, summary, #e3-run, #e3-stop"
    ratios = watched.page.locator(chosen).evaluate_all(CONTRAST)
    weak = [(name, round(ratio, 2)) for name, ratio in ratios if ratio < 4.5 and name.strip()]
    assert weak == []
    dark = watched.page.evaluate("document.body.classList.contains('dark')")
    assert dark == (theme == "dark")


@pytest.mark.parametrize("width", [1024, 853])
def test_every_tab_can_be_opened_in_a_narrow_window(serve: Serve, visit: Visit, width: int) -> None:
    """1280 pixels at a zoom of 125% and 150%: what does not fit is behind a menu, and nothing lies upon it."""
    watched = visit(serve(engine()))
    page = watched.page
    page.set_viewport_size({"width": width, "height": 640})
    menu = page.locator("#e3-tabs > .tab-wrapper .overflow-menu > button")
    sync_api.expect(menu).to_be_visible()
    menu.click(timeout=10_000)
    page.get_by_role("button", name="The barrier", exact=True).click(timeout=10_000)
    sync_api.expect(page.locator("#e3-barrier")).to_be_visible()


@pytest.mark.parametrize("width", [1190, 1066, 1024, 853])
def test_every_number_is_whole_in_a_narrow_window(serve: Serve, visit: Visit, width: int) -> None:
    watched = visit(serve(engine()))
    page = watched.page
    page.set_viewport_size({"width": width, "height": 640})
    watched.run()
    cut = page.locator("#e3-tiles .e3-tile > :not(.e3-hidden)").evaluate_all(
        """all => all.filter(words => {
            const tile = words.parentElement.getBoundingClientRect(), range = document.createRange();
            range.selectNodeContents(words);
            const drawn = range.getBoundingClientRect();
            return drawn.left < tile.left || drawn.right > tile.right || drawn.top < tile.top || drawn.bottom > tile.bottom;
        }).map(words => words.innerText)"""
    )
    assert cut == []
    last = page.locator("#e3-stop, #e3-open").evaluate_all("all => Math.max(...all.map(one => one.getBoundingClientRect().right))")
    assert last <= width
    page.mouse.move(width / 2, 240)
    page.mouse.wheel(0, 600)
    page.wait_for_function("document.querySelector('.e3-play').getBoundingClientRect().bottom <= innerHeight", timeout=10_000)


def test_the_keyboard_reaches_everything(serve: Serve, visit: Visit) -> None:
    watched = visit(serve(engine()))
    watched.run()
    page = watched.page
    assert page.locator('.e3-list .e3-chip[tabindex="0"]').count() == 1
    page.locator('.e3-list .e3-chip[tabindex="0"]').focus()

    def selected() -> tuple[str, str, str]:
        data = page.locator(".e3-selected").evaluate("e => e.dataset")
        return data["step"], data["position"], data["mark"]

    page.keyboard.press("ArrowDown")
    assert selected() == ("1", "1", "rejected")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert selected() == ("1", "3", "unreached")
    page.keyboard.press("ArrowRight")
    assert selected() == ("1", "1", "recovered")
    page.keyboard.press("ArrowRight")
    assert selected()[0] == "2"
    page.keyboard.press("ArrowLeft")
    assert selected()[0] == "1"
    sync_api.expect(page.locator(".e3-card")).to_be_visible()
    page.keyboard.press("Escape")
    sync_api.expect(page.locator(".e3-card")).to_be_hidden()
    assert page.locator('.e3-list .e3-chip[tabindex="0"]').count() == 1
    page.keyboard.press("End")
    assert selected()[0] == str(len({one["step"] for one in watched.chips()}) - 1)
    # scrubbing by keyboard: Home shows nothing, one step more shows the first
    page.get_by_role("slider", name="Step", exact=True).focus()
    page.keyboard.press("Home")
    assert page.locator(".e3-list .e3-row:visible").count() == 0
    page.keyboard.press("ArrowRight")
    assert page.locator(".e3-list .e3-row:visible").count() == 1
    assert page.locator("#e3-steps .e3-answer .e3-word:visible").count() == 1


def test_the_card_says_confidence_and_alternatives(serve: Serve, visit: Visit) -> None:
    watched = visit(serve(engine()))
    watched.page.get_by_label("Target's alternatives").check()
    watched.run()
    watched.page.locator('.e3-chip[data-step="1"][data-mark="rejected"]').click()
    card = watched.page.locator(".e3-card").inner_text()
    assert "step 1 · position 1 · token id 22" in card
    assert "draft confidence 90.0%" in card
    assert "what the target wanted here" in card
    assert "90.5%" in card  # exp(-0.1)
    assert "<b>other</b>" in card.replace("·", " ")
    watched.page.locator('.e3-chip[data-step="1"][data-mark="unreached"]').first.click()
    assert "the target never looked here" in watched.page.locator(".e3-card").inner_text()


def test_the_card_stays_with_its_token(serve: Serve, visit: Visit) -> None:
    watched = visit(serve(engine()))
    watched.run()
    steps, card, chip = (
        watched.page.locator(".e3-list"),
        watched.page.locator(".e3-card"),
        watched.page.locator('.e3-chip[data-step="1"]').first,
    )
    steps.evaluate("e => { e.style.flex = 'none'; e.style.height = '60px'; }")  # room for one or two steps
    chip.click()
    sync_api.expect(card).to_be_visible()
    said = card.inner_text()
    steps.evaluate("e => e.scrollTop = e.scrollHeight")
    sync_api.expect(card).to_be_hidden()
    steps.evaluate("e => e.scrollTop = 0")
    chip.scroll_into_view_if_needed()
    sync_api.expect(card).to_be_visible()
    assert card.inner_text() == said


def test_play_and_slow_motion(serve: Serve, visit: Visit) -> None:
    watched = visit(serve(engine(pace=0.05)))  # 1.6 s a step in slow motion: long enough to be seen, and stopped, on a busy machine
    watched.run()
    page = watched.page
    total = len({one["step"] for one in watched.chips()})
    page.get_by_role("slider", name="Speed of play").fill("-5")
    assert page.locator(".e3-factor").inner_text() == "1/32×"
    page.get_by_role("button", name="Play the steps").click()
    page.locator(".e3-proposed").first.wait_for()  # the draft before its verdict
    page.get_by_role("button", name="Pause").click()
    assert 0 < page.locator(".e3-list .e3-row:visible").count() < total
    assert page.locator(".e3-proposed, .e3-waiting").count() == 0
    page.get_by_role("button", name="Play the steps").click()
    page.locator(".e3-proposed").first.wait_for()
    page.get_by_role("slider", name="Step", exact=True).fill(str(total))  # the answer is whole, whatever waited for its verdict
    assert [one["token"] for one in watched.words()] == [str(token) for token in ANSWER]
    assert page.locator("#e3-steps .e3-answer .e3-word[hidden]").count() == 0
    page.get_by_role("slider", name="Speed of play").fill("4")
    page.get_by_role("button", name="Play the steps").click()
    sync_api.expect(page.locator(".e3-count")).to_have_text(f"step {total} of {total}", timeout=60_000)


def tiles_of(watched: Watched) -> dict[str, str]:
    read = "all => Object.fromEntries(all.map(t => [t.dataset.tile, t.querySelector('b').textContent]))"
    return dict(watched.page.locator("#e3-tiles [data-tile]").evaluate_all(read))


def test_what_is_looked_at_while_it_runs_stays(serve: Serve, visit: Visit) -> None:
    """New steps come many times a second: they must not take the slider, or a place in the text, out of somebody's hands."""
    fake = engine(pace=0.4)
    watched = visit(serve(fake))
    page, rows = watched.page, watched.page.locator(".e3-list .e3-row:visible")
    text = page.locator("#e3-steps .e3-answer")
    text.evaluate("e => { e.style.flex = 'none'; e.style.height = '30px'; e.style.width = '80px'; }")
    page.get_by_role("button", name="Run", exact=True).click()
    page.locator('.e3-list .e3-row[data-step="5"]').wait_for()
    slider, count = page.get_by_role("slider", name="Step", exact=True), page.locator(".e3-count")
    slider.fill("2")
    before = int(str(slider.get_attribute("max")))
    page.wait_for_function(f"Number(document.querySelector('#e3-steps .e3-slider').max) > {before + 1}")
    assert count.inner_text().startswith("step 2 of")
    assert rows.count() == 2
    assert tiles_of(watched)["tokens / steps"].endswith(" / 2")
    slider.fill(str(slider.get_attribute("max")))  # back at the end, it follows again
    now = int(str(slider.get_attribute("max")))
    sync_api.expect(count).to_have_text(re.compile(r"step (\d+) of \1$"))
    page.wait_for_function(f"document.querySelectorAll('.e3-list .e3-row').length > {now}")
    assert text.evaluate("e => e.scrollHeight - e.scrollTop - e.clientHeight") < 40
    text.evaluate("e => new Promise(done => { e.onscroll = done; e.scrollTop = 0; })")
    page.wait_for_function(f"document.querySelectorAll('.e3-list .e3-row').length > {now + 2}")
    assert text.evaluate("e => e.scrollTop") == 0
    # paused while it runs: what is over, too, is shown only as far
    page.get_by_role("button", name="Play the steps").click()
    page.get_by_role("button", name="Pause").click()
    fake.pace = 0.01
    watched.wait_status("Done:")
    sync_api.expect(page.locator(".e3-steps-root")).to_have_attribute("data-state", "done")
    paused, total = re.fullmatch(r"step (\d+) of (\d+)", count.inner_text()).groups()  # type: ignore[union-attr]
    assert 0 < int(paused) == rows.count() < int(total) == len(fake.requests[0].steps)


def test_numbers_are_of_the_run_and_the_step_on_screen(serve: Serve, visit: Visit) -> None:
    fake = engine()
    watched = visit(serve(fake))
    watched.run()
    slider = watched.page.get_by_role("slider", name="Step", exact=True)
    whole = tiles_of(watched)
    assert "–" not in whole.values()
    slider.focus()
    watched.page.keyboard.press("Home")
    assert set(tiles_of(watched).values()) == {"–"}
    watched.page.keyboard.press("End")
    assert tiles_of(watched) == whole
    fake.pace = 30  # the next answer does not begin while this test looks
    watched.press("Run")
    watched.wait_status("Answering on")
    sync_api.expect(watched.page.locator(".e3-count")).to_have_text("no steps yet")
    assert set(tiles_of(watched).values()) == {"–"}
    watched.page.get_by_role("button", name="Stop").click()
    watched.wait_status("Stopped:")


def test_a_piece_that_comes_before_its_step_is_shown_once(serve: Serve, visit: Visit) -> None:
    """The text and the steps are two streams: the first piece of the text may be here while its step is on the way."""

    class Late(FakeEngine):
        async def generate(self, *arguments: Any, **settings: Any) -> Any:
            held: list[Any] = []
            async for event in super().generate(*arguments, **settings):
                if isinstance(event, StepEvent) and event.step.index == 0:
                    held.append(event)
                    continue
                yield event
                if isinstance(event, Delta) and held:
                    await asyncio.sleep(1.0)  # longer than the page's period
                    yield held.pop()

    fake = Late(recipes.get("smollm2"))
    watched = visit(serve(fake))
    watched.run()
    assert [int(one["token"]) for one in watched.words()] == ANSWER
    beside(watched)
    ids = watched.page.locator('[data-lane="1"] .e3-word').evaluate_all("all => all.map(w => [Number(w.dataset.output), w.dataset.token])")
    assert ids == [[place, str(token)] for place, token in enumerate(ANSWER)]


def long_trace(path: Path, count: int) -> Path:
    """A trace of a prompt that took three steps to read and of `count` further steps."""
    request = Request(trace="long", lane="elsewhere/bf16", prompt="x " * 20000, settings={"draft": "bf16", "k": 3})
    answer = [5, 6, 19, 20, 22] * count
    last = steps_of("long", answer, k=3, begin=1.0, pace=0.01, limit=len(answer))[: count + 1]
    first = [msgspec.structs.replace(last[0], index=index, sampled=(), kept=0, scheduled=2048, batch_tokens=2048) for index in range(3)]
    request.steps = [*first, *(msgspec.structs.replace(step, index=step.index + 3) for step in last)]
    request.pieces = {token: piece.hex() for token, piece in PIECES.items()}
    return save(Trace(provenance={}, requests=[request]), path)


def test_a_long_prompt_leaves_the_steps_to_the_keyboard(serve: Serve, visit: Visit, tmp_path: Path) -> None:
    watched = visit(serve(engine(fail_start=True)))
    page = watched.page
    watched.open(long_trace(tmp_path / "long.jsonl", 12))
    watched.wait_status("Opened:")
    sync_api.expect(page.locator(".e3-count")).to_have_text("step 16 of 16")
    assert page.locator(".e3-list .e3-row").first.inner_text().endswith("2048 tokens of the prompt")
    reached = page.locator('.e3-list .e3-chip[tabindex="0"]:visible')
    assert reached.count() == 1
    reached.focus()
    page.keyboard.press("End")
    page.keyboard.press("Escape")
    page.get_by_role("slider", name="Step", exact=True).fill("6")  # what was selected is no longer shown
    assert reached.count() == 1


def test_thousands_of_steps_are_laid_out_once(serve: Serve, visit: Visit, tmp_path: Path) -> None:
    watched = visit(serve(engine(fail_start=True)))
    page = watched.page
    page.evaluate(
        """() => {
            const height = Object.getOwnPropertyDescriptor(Element.prototype, 'scrollHeight');
            window.looks = 0;
            Object.defineProperty(Element.prototype, 'scrollHeight', {
                get() { window.looks += this.closest('#e3-steps') ? 1 : 0; return height.get.call(this); },
            });
        }"""
    )
    watched.open(long_trace(tmp_path / "long.jsonl", 3000))
    sync_api.expect(page.locator(".e3-count")).to_have_text("step 3004 of 3004", timeout=120_000)
    assert page.evaluate("window.looks") < 20
    watched.fits()
    wide = watched.page.locator("#e3-tiles .e3-tile").evaluate_all(
        "all => all.filter(t => t.scrollWidth > t.clientWidth).map(t => t.innerText)"
    )
    assert wide == []


def test_the_charts_follow_the_slider(serve: Serve, visit: Visit) -> None:
    watched = visit(serve(engine()))
    watched.run()
    chart = watched.page.locator("#e3-charts .e3-plot").nth(2)
    whole = chart.get_attribute("aria-label")
    watched.page.get_by_role("slider", name="Step", exact=True).fill("3")
    sync_api.expect(chart).to_have_attribute("aria-label", "Steps by accepted draft tokens. 0: 1, 1: 0, 2: 1, 3: 0")
    assert whole != chart.get_attribute("aria-label")
    sync_api.expect(watched.page.locator("#e3-charts .js-plotly-plot")).to_have_count(4)


def test_stop_keeps_what_arrived_and_aborts_the_request(serve: Serve, visit: Visit) -> None:
    fake = engine(pace=0.5)
    watched = visit(serve(fake))
    # What Stop cancels and what it shows are sent at once: the first to be heard is the second here.
    watched.page.route("**/cancel", lambda route: (time.sleep(0.5), route.continue_()))
    watched.page.get_by_role("button", name="Run", exact=True).click()
    watched.page.locator('.e3-list .e3-row[data-step="3"]').wait_for()
    watched.page.get_by_role("button", name="Stop").click()
    watched.wait_status("Stopped: Eagle3 BF16, K=3, eager")
    assert fake.closed == 1
    assert 4 <= watched.page.locator(".e3-list .e3-row").count() < 31
    sync_api.expect(watched.page.get_by_role("button", name="Save trace")).to_be_enabled()
    fake.pace = 0.01
    watched.run()


def test_a_reload_brings_the_run_back(serve: Serve, visit: Visit) -> None:
    fake = engine()
    watched = visit(serve(fake))
    watched.run()
    before = seen_chips(watched)
    watched.settle()  # what a reload breaks off would be told as a fault
    watched.page.reload()
    watched.wait_status("Done:")
    watched.page.locator(f'.e3-list .e3-row[data-step="{fake.requests[0].steps[-1].index}"]').wait_for()
    assert seen_chips(watched) == before
    assert len(fake.requests) == 1


def test_a_saved_trace_plays_without_an_engine(serve: Serve, visit: Visit, tmp_path: Path) -> None:
    fake = engine()
    url = serve(fake)
    watched = visit(url)
    watched.run()
    request = fake.requests[0]
    other = Request(trace="z", lane="elsewhere/none", prompt="second", steps=request.steps[:3], pieces=request.pieces)
    path = save(Trace(provenance={"recipe": "elsewhere", "versions": {"vllm": "9.9"}}, requests=[request, other]), tmp_path / "two.jsonl")

    silent = engine(fail_start=True)
    fresh = visit(serve(silent))
    fresh.open(path)
    fresh.wait_status("Opened:")
    sync_api.expect(fresh.page.locator(".e3-steps-root")).to_have_attribute("data-state", "opened")
    assert seen_chips(fresh) == expected_chips(request)
    sync_api.expect(fresh.page.locator(".e3-about-line")).to_contain_text("vLLM 9.9")
    assert "recording" in fresh.page.locator(".e3-about-line").inner_text()
    fresh.page.locator("#e3-pick input").click()
    fresh.page.get_by_role("option", name=re.compile("second")).click()
    sync_api.expect(fresh.page.locator(".e3-count")).to_have_text("step 3 of 3")
    assert silent.requests == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"not a trace", "is not a trace of Eagle3 Lab. Line 1 is not JSON"),
        (b'{"format": "eagle3-lab-trace", "version": 99}\n', "written by a newer Eagle3 Lab"),
        (
            b'{"format":"eagle3-lab-trace","version":1,"provenance":{},"requests":1}\n{"trace":"<script>alert(1)</script>',
            "is cut off in line 2",
        ),
        (b"", "is empty"),
    ],
)
def test_a_malformed_trace_is_refused_and_nothing_is_lost(serve: Serve, visit: Visit, tmp_path: Path, content: bytes, words: str) -> None:
    watched = visit(serve(engine()))
    watched.run()
    before = seen_chips(watched)
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    watched.open(path)
    watched.wait_status(words)
    assert "Traceback" not in watched.page.locator("body").inner_text()
    assert seen_chips(watched) == before


def test_bad_input_is_answered_in_sentences(serve: Serve, visit: Visit) -> None:
    fake = engine()
    watched = visit(serve(fake))
    page = watched.page
    for value in ("0", "99"):
        page.locator("#e3-k input").fill(value)
        watched.wait_status(f"K = {value} draft tokens a step is out of range.")  # the field's own answer, before anything is pressed
        page.get_by_label("Prompt").fill("  ")
        watched.press("Run")
        watched.wait_status("The prompt is empty.")
        page.get_by_label("Prompt").fill("hello")
        watched.press("Run")
        watched.wait_status(f"K = {value} draft tokens a step is out of range.")
    page.locator("#e3-k input").fill("3")
    watched.wait_status("The next run uses Eagle3 BF16, K=3")
    page.locator("#e3-max-tokens input").fill("99999")
    watched.press("Run")
    watched.wait_status("99999 new tokens do not fit.")
    assert fake.requests == []
    assert page.get_by_label("Prompt").input_value() == "hello"


def test_changing_k_or_draft_says_that_another_engine_starts(serve: Serve, visit: Visit) -> None:
    watched = visit(serve(engine()))
    watched.run()
    watched.page.locator("#e3-k input").fill("4")
    watched.wait_status("The next run uses Eagle3 BF16, K=4, eager: another engine starts when you press Run.")
    watched.page.locator("#e3-k input").fill("3")
    watched.wait_status("The next run uses Eagle3 BF16, K=3, eager: its engine is ready.")
    watched.page.get_by_label("none").check()
    watched.wait_status("The next run uses Baseline, eager: another engine starts when you press Run.")
    assert watched.page.locator(".e3-list .e3-row").count() > 20  # earlier results stay


def test_a_start_is_visible_and_a_failed_one_is_restarted_by_a_click(serve: Serve, visit: Visit) -> None:
    fake = engine(start=120, fail_start=True)  # it starts until this test has seen it start
    watched = visit(serve(fake, warm=True))
    watched.wait_status("Starting Eagle3 BF16, K=3, eager")
    sync_api.expect(watched.page.locator(".e3-status-detail")).to_contain_text("loading weights <b>")
    sync_api.expect(watched.page.locator(".e3-status-clock")).to_have_text(re.compile(r"^\d.* s$"))
    watched.page.get_by_label("Prompt").fill("typed while it loads")
    fake.start = 0
    watched.wait_status("did not start")
    fake.start = 120
    watched.press("Run")
    watched.wait_status("Starting Eagle3 BF16")
    fake.fail_start, fake.start = True, 0
    watched.wait_status("did not start")
    watched.page.get_by_text("Details", exact=True).click()
    assert "<script>alert(9)</script>" in watched.page.locator(".e3-status-more .e3-popover").inner_text()
    watched.page.get_by_role("button", name="Restart the engine").click()
    watched.wait_status("Ready: Eagle3 BF16, K=3, eager")
    watched.run()
    assert fake.requests[-1].prompt == "typed while it loads"


def test_a_server_that_dies_in_the_middle(serve: Serve, visit: Visit) -> None:
    fake = engine(fail_after=6)
    watched = visit(serve(fake))
    watched.page.get_by_role("button", name="Run", exact=True).click()
    watched.wait_status("broke off. the engine process ended with exit code -9")
    sync_api.expect(watched.page.locator(".e3-list .e3-row")).to_have_count(6)
    watched.page.get_by_role("button", name="Restart the engine").click()
    watched.wait_status("Ready:")
    watched.run()


def beside(watched: Watched) -> dict[str, str]:
    watched.press("Run beside the baseline")
    watched.wait_status("Done: Baseline, eager beside Eagle3 BF16, K=3, eager", timeout=300)
    watched.page.locator(".e3-said").wait_for()  # the verdict's last part: two tiles are there from the beginning
    read = "all => Object.fromEntries(all.map(t => [t.dataset.tile, t.querySelector('b').textContent]))"
    return dict(watched.page.locator(".e3-verdict [data-tile]").evaluate_all(read))


def test_beside_the_baseline(serve: Serve, visit: Visit) -> None:
    fake = engine(pace=0.03)
    watched = visit(serve(fake))
    tiles = beside(watched)
    assert tiles["token ids"] == "✓ identical"
    measured = [request for request in fake.requests if request.settings["max_tokens"] == 128]
    lanes = [request.lane for request in measured]
    assert lanes == ["smollm2/none/eager/plain", "smollm2/bf16/k3/eager/traced"]
    warmed = [request.lane for request in fake.requests[: -len(measured)]]
    assert {lane: warmed.count(lane) >= 2 for lane in lanes} == dict.fromkeys(lanes, True)
    before = len(fake.requests)
    speeds = [request.usage_completion / request.elapsed for request in measured if request.usage_completion and request.elapsed]
    assert float(tiles["baseline tok/s"]) == pytest.approx(speeds[0], abs=0.06)
    assert float(tiles["speed-up"].rstrip("×")) == pytest.approx(speeds[1] / speeds[0], abs=0.01)
    ids = [
        watched.page.locator(f'[data-lane="{lane}"] .e3-word').evaluate_all(
            "all => all.flatMap(w => w.dataset.token.split(' ').map(Number))"
        )
        for lane in (0, 1)
    ]
    assert ids[0] == ids[1] == ANSWER
    assert "Both lanes eager" in watched.page.locator(".e3-said").inner_text()
    lines = watched.page.locator("#e3-beside-charts .e3-plot").first.get_attribute("aria-label")
    assert "baseline" in lines
    assert "Eagle3 BF16" in lines
    watched.press("Run beside the baseline")  # another pair, in the other order
    sync_api.expect(watched.page.locator(".e3-said")).to_contain_text("median of 2 pairs", timeout=300_000)
    assert [request.lane for request in fake.requests[before:]] == lanes[::-1]


def test_a_difference_is_placed_and_measured(serve: Serve, visit: Visit) -> None:
    other = [*ANSWER]
    other[17] = 20
    watched = visit(serve(engine(other=other)))
    tiles = beside(watched)
    assert tiles["first at token 18"] == "≠ differ"
    said = watched.page.locator(".e3-said").inner_text()
    assert "Token ids differ first at token 18." in said
    assert "margin there is 2.4000 nats" in said
    marked = watched.page.locator(".e3-differs").evaluate_all("all => all.map(w => w.dataset.token)")
    assert marked == [str(ANSWER[17]), "20"]


def test_what_starts_ends_what_runs_and_nothing_newer(serve: Serve, visit: Visit) -> None:
    fake = engine(pace=0.05)
    watched = visit(serve(fake))
    page = watched.page
    page.get_by_role("tab", name="Duel").click()
    page.get_by_role("button", name="Run the duel").click()
    watched.wait_status("Warming up Eagle3 BF16")
    while not fake.requests:
        page.wait_for_timeout(20)
    fake.pace = 0.5  # what answers now takes much longer than it takes to end it

    def newer(button: str, count: int) -> None:
        """Press, and see what answered until then broken off: while it answers, not when it is over."""
        older = fake.requests[-1]
        page.get_by_role("button", name=button, exact=True).click()
        while fake.closed < count and not older.finish:
            page.wait_for_timeout(20)
        assert (fake.closed, older.finish) == (count, None)

    newer("Run", 1)
    page.locator('.e3-list .e3-row[data-step="1"]').wait_for()
    begun = len(fake.requests)
    newer("Run beside the baseline", 2)
    fake.pace = 0.01
    watched.wait_status("Done: Baseline, eager beside Eagle3 BF16, K=3, eager")  # the end of the run before did not end it
    assert fake.closed == 2
    assert {request.settings["max_tokens"] for request in fake.requests[begun:]} == {32, 128}
    assert len([one for one in fake.requests[begun:] if one.settings["max_tokens"] == 128]) == 2, "and no duel went on beside it"


def test_each_session_has_its_own_run(serve: Serve, visit: Visit) -> None:
    fake = engine(pace=0.03)
    url = serve(fake)
    one, two = visit(url), visit(url)
    one.page.get_by_label("Prompt").fill("first")
    two.page.get_by_label("Prompt").fill("second")
    one.page.locator("#e3-k input").fill("2")
    one.wait_status("The next run uses Eagle3 BF16, K=2")
    for watched in (one, two):
        watched.page.get_by_role("button", name="Run", exact=True).click()
    for watched in (one, two):
        watched.wait_status("Done:")
        sync_api.expect(watched.page.locator(".e3-steps-root")).to_have_attribute("data-state", "done")
    by_prompt = {request.prompt: request for request in fake.requests}
    assert seen_chips(one) == expected_chips(by_prompt["first"])
    assert seen_chips(two) == expected_chips(by_prompt["second"])
    assert json.loads(json.dumps(by_prompt["first"].settings))["k"] == 2
