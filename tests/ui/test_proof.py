"""The proof's tab and the badge: shown for exactly the lane that was verified, and for no other."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lab import provenance, recipes
from lab.bench import certificate, context
from lab.env import assets
from lab.errors import LabError
from lab.recipes.model import Asset, Checkpoint
from lab.recipes.smollm2 import DRAFT
from lab.serving.command import Lane
from lab.serving.endpoint import Endpoint
from lab.ui import proof
from lab.ui.verify import plan_of

HOSTILE = "<img src=x onerror=alert(1)>${alert(2)}"


def run(concurrency: int, verdicts: list[str]) -> dict[str, Any]:
    answers = [
        {
            "prompt": f"chat-{number:02}",
            "verdict": verdict,
            "tokens": 48,
            "at": None if verdict == "identical" else 7,
            "theirs": None if verdict == "identical" else [" the", 260, -0.69],
            "ours": None if verdict == "identical" else [HOSTILE, 18, -0.75],
            "margin": None if verdict == "identical" else 0.0625,
            "off_best": 0 if verdict == "identical" else 1,
            "worst": 0.0 if verdict == "identical" else 0.0625 if verdict == "near-tie" else 3.25,
            "worst_at": None if verdict == "identical" else 9,
        }
        for number, verdict in enumerate(verdicts)
    ]
    return {
        "concurrency": concurrency,
        "identical": verdicts.count("identical"),
        "near_ties": verdicts.count("near-tie"),
        "real_differences": verdicts.count("real difference"),
        "tokens": 48 * len(verdicts),
        "off_best": sum(one["off_best"] for one in answers),
        "worst_regret": max(one["worst"] for one in answers),
        "answers": answers,
    }


def body(verdict: str = "lossless") -> dict[str, Any]:
    third = "near-tie" if verdict == "lossless" else "real difference"
    sampling = {
        "temperature": 0.7,
        "samples": 384,
        "depth": 4,
        "alpha": 0.01,
        "correction": "Holm",
        "tokens": 2816,
        "prompts": [{}, {}],
        "least_p_adjusted": 0.41,
        "detectable": {"80%": 0.061, "95%": 0.071},
        "verdict": "consistent",
    }
    return {
        "verdict": verdict,
        "reasons": [] if verdict == "lossless" else ["1 of 3 greedy answers differs by more than rounding."],
        "greedy": {
            "prompts": 3,
            "max_tokens": 48,
            "threshold_nats": 0.125,
            "noise": {"positions": 431, "largest": 0.125, "p99": 0.07},
            "baseline_itself": [run(4, ["identical", "near-tie", "identical"])],
            "runs": [run(1, ["identical", "identical", third]), run(4, ["identical", "near-tie", "identical"])],
        },
        "sampling": [sampling],
        "drafting": {"way": "greedy", "seen": {"equal": 30, "compared": 30}},
    }


@pytest.fixture
def lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lane:
    """The page's first lane, in a cache of its own, over a target that is a stand-in: only its hash is looked at."""
    if not (Path(str(assets())) / DRAFT.path / "model.safetensors").is_file():
        pytest.skip("this checkout holds no trained draft")
    monkeypatch.setenv("EAGLE3_LAB_CACHE", str(tmp_path / "cache"))
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text("{}")
    (target / "model.safetensors").write_bytes(b"not really weights")
    recipe = replace(recipes.get("smollm2"), target=Checkpoint("stand-in", Asset(str(target))))
    monkeypatch.setitem(recipes.RECIPES, "smollm2", lambda: recipe)
    return Lane(recipe, "bf16", recipe.k)


def keep(lane: Lane, verdict: str = "lossless") -> certificate.Certificate:
    known = certificate.identity(lane, make=False)
    assert known is not None
    path = certificate.save(lane, known, provenance.collect(), body(verdict))
    found = certificate.read(path, certificate.hashed(known))
    assert found is not None
    return found


def said(lane: Lane) -> dict[str, str]:
    return dict(json.loads(proof.badge(lane)))


def test_no_badge_without_a_certificate(lane: Lane) -> None:
    assert said(lane)["kind"] == "absent"
    assert "not verified" in said(lane)["words"]
    kept = keep(lane)
    assert (said(lane)["kind"], said(lane)["hash"]) == ("same", kept.hash)
    assert "3 prompts greedy at concurrency 1 and 4; 2,816 sampled tokens at temperature 0.7" in said(lane)["detail"]
    assert kept.made in said(lane)["detail"]


@pytest.mark.parametrize("change", ["k", "draft", "traced", "weights", "environment", "plugin", "version"])
def test_whatever_decides_the_output_takes_the_badge_away(lane: Lane, change: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keep(lane)
    other = lane
    if change == "k":
        other = Lane(lane.recipe, lane.draft, lane.k + 1)
    elif change == "draft":
        other = Lane(lane.recipe, "fp8", lane.k)
    elif change == "traced":
        other = Lane(lane.recipe, lane.draft, lane.k, traced=False)
    elif change == "weights":
        (tmp_path / "target" / "model.safetensors").write_bytes(b"other weights, of the same name")
    elif change == "environment":
        monkeypatch.setenv("VLLM_CPU_SGL_KERNEL", "1")
    elif change == "plugin":
        monkeypatch.setattr(certificate, "_plugin", lambda: "0" * 64)
    else:
        monkeypatch.setattr(provenance, "versions", lambda: {"vllm-cpu": "0.99.0"})
    assert said(other)["kind"] == "absent"


def test_names_ports_and_keys_do_not(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = keep(lane)
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    assert said(lane)["hash"] == kept.hash
    assert "sesame" not in kept.path.read_text()


@pytest.mark.parametrize("damage", ["empty", "cut", "another hash", "edited identity", "no greedy", "newer"])
def test_a_damaged_certificate_counts_for_nothing(lane: Lane, damage: str) -> None:
    kept = keep(lane)
    text = kept.path.read_text()
    content = json.loads(text)
    if damage == "another hash":
        content["hash"] = "0" * 64
    elif damage == "edited identity":
        content["identity"]["k"] = 5
    elif damage == "no greedy":
        del content["greedy"]
    elif damage == "newer":
        content["version"] = 99
    kept.path.write_text({"empty": "", "cut": text[: len(text) // 2]}.get(damage, json.dumps(content)))
    assert said(lane)["kind"] == "absent"


def test_a_server_elsewhere_is_never_certified(lane: Lane) -> None:
    keep(lane)
    away = Lane(replace(lane.recipe, remotes={"bf16": "http://node:8000"}), "bf16", 3)
    assert said(away)["kind"] == "absent"
    assert "elsewhere" in said(away)["detail"]
    with pytest.raises(LabError, match="elsewhere"):
        certificate.identity(away)


def test_a_lane_that_is_not_lossless_says_so(lane: Lane) -> None:
    keep(lane, "not lossless")
    assert said(lane)["kind"] == "different"
    assert "not lossless" in said(lane)["words"]


def test_bad_fields_are_said_in_words() -> None:
    for fields in ((None, 64, 384), (2.5, 64, 384), (0, 64, 384), (1000, 64, 384), (8, 1, 384), (8, 64, 5), (8, 64, -1)):
        with pytest.raises(LabError):
            plan_of(*fields)
    assert plan_of(8, 64, 0).temperatures == ()


ROWS = [
    {
        "context": length,
        "share": share,
        "share_interval": (share - 0.02, share + 0.02),
        "verify_s": 0.02,
        "draft_s": 0.004,
        "baseline_step_s": 0.018,
    }
    for length, share in ((256, 0.82), (3584, 0.9))
]


def test_the_published_share_is_drawn_as_published() -> None:
    for rows in ([], ROWS):
        (_, share), (_, times) = proof.context_panels(rows)
        names = [one["name"] for one in share["data"]]
        assert names == (["measured here"] if rows else []) + [context.PUBLISHED_LABEL]
        assert share["data"][-1]["y"] == pytest.approx([14, 59])
        assert share["data"][-1]["line"]["dash"] == "longdashdot"
        assert bool(times["data"]) == bool(rows)


@pytest.mark.browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_badge_and_tab_in_the_browser(lane: Lane, serve: Callable[..., str], visit: Callable[..., Any], theme: str) -> None:
    from tests.ui.fakes import FakeEngine

    kept = keep(lane, "not lossless" if theme == "dark" else "lossless")
    watched = visit(serve(FakeEngine(lane.recipe)), theme=theme)
    badge = watched.page.locator(".e3-badge-root")
    badge.get_by_text("lossless").wait_for(timeout=90_000)
    assert badge.get_attribute("data-hash") == kept.hash
    assert "3 prompts, 2,816 sampled tokens" in badge.inner_text()
    assert watched.page.get_by_role("tab", name="Proof").count() == 1
    watched.page.get_by_role("tab", name="Proof").click()
    table = watched.page.locator("#e3-proof .e3-sweep-table").first
    table.get_by_text("baseline against itself").wait_for()
    places = watched.page.locator(".e3-proof-places tr[data-verdict]")
    assert places.count() == 2
    assert places.first.get_attribute("data-verdict") == ("real difference" if theme == "dark" else "near-tie")
    assert HOSTILE.replace(" ", "·") in places.first.inner_text() or HOSTILE in places.first.inner_text()
    watched.page.locator("#e3-proof-charts .e3-panel .main-svg").first.wait_for()
    watched.fits()
    # Another K is another lane: its badge goes at once, and comes back with the lane.
    if folder := os.environ.get("SHOTS"):
        watched.page.screenshot(path=f"{folder}/proof-{theme}.png")
    watched.page.get_by_label("K", exact=True).fill("2")
    badge.get_by_text("not verified").wait_for(timeout=90_000)
    assert badge.get_attribute("data-hash") == ""
    watched.page.get_by_text("Nothing was verified for Eagle3 BF16, K=2").wait_for()
    watched.page.get_by_label("K", exact=True).fill("3")
    watched.page.locator(f".e3-badge-root[data-hash='{kept.hash}']").wait_for(timeout=90_000)
    # Nothing to verify: a sentence, no engine.
    watched.page.get_by_label("none", exact=True).check()
    watched.wait_status("The next run uses Baseline")  # else this could come after what the button says
    watched.press("Verify this lane")
    watched.wait_status("baseline is what a draft is compared with")


@pytest.fixture
def target() -> Iterator[str]:
    """A server that says what a target with two tokens would: every lane on it writes the same."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            found: dict[str, Any] = {"tokens": [1, 2, 3]}
            if self.path != "/tokenize":
                choice: dict[str, Any] = {"token_ids": [5, 6][: asked["max_tokens"]]}
                choice["logprobs"] = {"top_logprobs": [{"token_id:5": -0.1, "token_id:9": -0.5}, {"token_id:6": -0.2, "token_id:9": -1.0}]}
                other = {"9": {"logprob": -0.6, "decoded_token": "b"}}
                scored = [{str(token): {"logprob": -0.2, "decoded_token": "a"}} | other for token in asked.get("prompt", [1])[1:]]
                choice["prompt_logprobs"] = [None, *scored]
                found = {"choices": [choice]}
            data = json.dumps(found).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_address[1]}"
    made.shutdown()
    made.server_close()


@pytest.mark.browser
def test_the_button_verifies_and_the_badge_follows(lane: Lane, target: str, serve: Callable[..., str], visit: Callable[..., Any]) -> None:
    from tests.ui.fakes import FakeEngine

    class Served(FakeEngine):
        @asynccontextmanager
        async def use(self, lane: Lane, **_: Any) -> AsyncIterator[Endpoint]:
            yield Endpoint(target, lane.recipe.name, lane)

    watched = visit(serve(Served(lane.recipe)))
    badge = watched.page.locator(".e3-badge-root")
    badge.get_by_text("not verified").wait_for(timeout=90_000)
    watched.page.get_by_role("tab", name="Proof").click()
    watched.page.get_by_text("Nothing was verified for Eagle3 BF16, K=3").wait_for(timeout=90_000)
    watched.page.get_by_text("Why the gain shrinks with the context").wait_for()
    watched.page.get_by_label("Prompts", exact=True).last.fill("2")
    watched.page.get_by_label("Sampled answers").fill("0")
    watched.page.get_by_role("button", name="Verify this lane").click()
    watched.wait_status("lossless.", timeout=300)
    badge.get_by_text("✓ lossless").wait_for()
    assert "2 prompts;" in badge.inner_text()
    found = certificate.find(lane)[1]
    assert found is not None
    assert found.hash == badge.get_attribute("data-hash")
    with watched.page.expect_download() as saving:
        watched.page.get_by_role("button", name="Save the certificate").click()
    assert json.loads(Path(saving.value.path()).read_text())["hash"] == found.hash
