"""The page over servers that run elsewhere: a small HTTP server stands for a vLLM without the plugin; client, lanes and page are real."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lab.recipes.model import DraftChoice
from lab.serving.attach import Address, recipe_of
from lab.serving.lanes import Lanes
from lab.trace.model import Request
from lab.ui.compare import strangers
from lab.ui.state import Run

from .conftest import PORT, Watched, sync_api

KEY = "sk-page-0123"
IDS = [[10], [11, 12, 13], [14], [15, 16]]
WORDS = {10: "Light", 11: " of", 12: " short", 13: " waves", 14: " is", 15: " scattered", 16: " more"}


def _engine() -> Any:
    spec = importlib.util.spec_from_file_location("fake_engine", Path(__file__).parent.parent / "serving" / "fake_engine.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sse(data: object) -> bytes:
    return f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()


def chunk(ids: list[int]) -> bytes:
    content = [{"token": "", "logprob": 0.0, "bytes": [*WORDS[one].encode()], "top_logprobs": []} for one in ids]
    delta = {"content": "".join(WORDS[one] for one in ids)}
    finish = "stop" if ids is IDS[-1] else None
    return sse({"choices": [{"index": 0, "delta": delta, "token_ids": ids, "finish_reason": finish, "logprobs": {"content": content}}]})


def answer(*, counted: bool) -> list[bytes]:
    last: dict[str, Any] = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 7}}
    if counted:
        last["metrics"] = {"speculative_decoding": {"per_step_accepted": [2, 0, 1], "per_step_drafted": [3, 3, 3]}}
    return [*(chunk(ids) for ids in IDS), sse(last), sse("[DONE]")]


@pytest.fixture
def fake() -> Iterator[Any]:
    server = _engine().Fake(model="their-model")
    server.key = KEY
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def attach(tmp_path: Path) -> Iterator[Callable[[Any], str]]:
    from lab.ui.build import launch, page
    from lab.ui.engine import Serving

    served = []

    def start(fake: Any) -> str:
        found: dict[DraftChoice, Address] = {"bf16": Address(fake.url, KEY)}
        lanes = Lanes(addresses={one.url: one for one in found.values()})
        served.append((page(recipe_of(found), Serving(lanes), folder=tmp_path / "traces", warm=False), lanes))
        return launch(served[-1][0], port=PORT, block=False)

    yield start
    for demo, lanes in served:
        demo.close()
        lanes.shutdown()


@pytest.mark.browser
def test_counts_colour_the_answer_and_the_page_says_what_is_missing(
    fake: Any, attach: Callable[[Any], str], visit: Callable[..., Watched], tmp_path: Path
) -> None:
    fake.chunks = answer(counted=True)
    watched = visit(attach(fake))
    assert watched.page.locator("#e3-k").count() == 0 or not watched.page.locator("#e3-k").is_visible()  # the server has its own K
    watched.run()
    assert [(one["token"], one["mark"]) for one in watched.chips()] == [
        ("10", "plain"),
        ("11", "accepted"),
        ("12", "accepted"),
        ("-2", "rejected"),
        ("13", "recovered"),
        ("-2", "rejected"),
        ("-2", "unreached"),
        ("-2", "unreached"),
        ("14", "recovered"),
        ("15", "accepted"),
        ("-2", "rejected"),
        ("-2", "unreached"),
        ("16", "recovered"),
    ]
    assert "".join(one["text"] for one in watched.words()) == "".join(WORDS.values())
    sync_api.expect(watched.page.locator(".e3-about-line")).to_contain_text("their-model")
    content = watched.page.content()
    assert "--scheduler-cls" in content  # what would bring the rest
    assert "their-model" in content
    assert KEY not in content
    watched.fits()
    saved = list((tmp_path / "traces").glob("*.jsonl"))
    assert saved
    assert all(KEY not in file.read_text(encoding="utf-8") for file in saved)


GAINED = (
    "vllm:spec_decode_num_drafts_total 3\nvllm:spec_decode_num_draft_tokens_total 9\nvllm:spec_decode_num_accepted_tokens_total 3\n"
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 2\n'
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 1\nvllm:generation_tokens_total 7\n'
)


def test_counters_are_what_is_left_without_plugin_and_counts(fake: Any) -> None:
    from lab.serving.command import Lane
    from lab.ui.engine import Serving
    from lab.ui.feed import whole
    from lab.ui.runner import answer as follow
    from lab.ui.state import Settings

    fake.chunks = answer(counted=False)
    fake.counters = itertools.chain([""], itertools.repeat(GAINED))

    async def check() -> Run:
        where = Address(fake.url, KEY)
        recipe = recipe_of({"bf16": where})
        lane, engine = Lane(recipe, "bf16"), Serving(Lanes(addresses={where.url: where}))
        settings = Settings("hello", "bf16", 1, 0.0, 16)
        run = Run.of(lane, settings)
        async for _ in follow(engine, await engine.endpoint(lane), settings, run):
            pass
        return run

    with ThreadPoolExecutor(1) as pool:  # the browser of the test before holds this thread's event loop
        run = pool.submit(asyncio.run, check()).result()
    assert run.state == "done"
    assert run.counters is not None
    assert (run.counters.drafts, run.counters.accepted, run.counters.accepted_at) == (3, 3, (2, 1))
    assert any("counters gained" in note for note in run.notes)
    assert any("--per-request-spec-decode-metrics" in note for note in run.notes)
    assert run.provenance["server"] == {"address": fake.url, "model": "their-model", "root": "their-model", "vllm": ""}
    assert '"2.00"' in whole(run)  # 1 + 3 accepted / 3 drafts
    assert KEY not in f"{run!r}{whole(run)}"


def _run(model: str, root: str = "") -> Run:
    return Run("r", Request(trace="t", lane="l", prompt="p"), "none", "label", {"server": {"model": model, "root": root or model}})


def test_different_models_are_not_compared() -> None:
    assert strangers(_run("one"), _run("one")) == ""
    assert strangers(_run("served-a", "org/model"), _run("served-b", "org/model")) == ""
    assert "different models (one and two)" in strangers(_run("one"), _run("two"))
    local = Run("r", Request(trace="t", lane="l", prompt="p"), "none", "label", {"target": "smollm2"})
    assert "different models (smollm2 and two)" in strangers(local, _run("two"))
    assert strangers(local, local) == ""
