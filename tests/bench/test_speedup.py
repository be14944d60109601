"""The measuring client counts ids, never chunks; the comparison runs lanes in turns and reports what they did."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lab import recipes
from lab.bench import load, result, speedup
from lab.bench.prompts import Prompt
from lab.errors import LabError
from lab.serving.command import Lane
from lab.serving.endpoint import Endpoint

PROMPTS = tuple(Prompt(f"p{number}", "chat", f"Question {number}?") for number in range(12))
Serve = Callable[[Any], Endpoint]


def plan(*drafts: str, **changes: Any) -> speedup.Plan:
    recipe = recipes.get("smollm2")
    lanes = tuple(Lane(recipe, draft=draft, k=3, traced=False) for draft in drafts or ("none", "bf16"))  # type: ignore[arg-type]
    return speedup.Plan(lanes, PROMPTS, **{"pairs": 4, "max_tokens": 24, **changes})


def run(plan_: speedup.Plan, endpoints: list[Endpoint]) -> dict[str, Any]:
    measured = speedup.Measured(plan_)
    asyncio.run(speedup.measure(measured, endpoints, lambda _: None, rest=0))
    return speedup.summarise(measured)


def test_tokens_are_ids_and_not_chunks(serve: Serve, fake: Any) -> None:
    """Two servers that say the same at the same pace, one of them four tokens a chunk: as many tokens, in less time."""
    slow, fast = fake(chunk=1, pause=0.03), fake(chunk=4, pause=0.03)
    summary = run(plan(), [serve(slow), serve(fast)])
    (ratio,) = summary["ratios"]
    one, other = (sum(turn["seconds"] for turn in lane["turns"]) for lane in summary["lanes"])
    assert ratio["pooled"]["value"] == pytest.approx(one / other), "as many tokens, so it is the times alone"
    assert one >= 4 * 24 * 0.029, "a pause is never shorter than asked"
    assert [turn["tokens"] for lane in summary["lanes"] for turn in lane["turns"]] == [24] * 8
    assert ratio["token_ids"] == {"answers": 4, "identical": 4, "differences": []}
    assert all(answer["tokens"] == 24 for lane in summary["lanes"] for turn in lane["turns"] for answer in turn["answers"])
    assert summary["lanes"][1]["mean_acceptance_length"] == pytest.approx(4.0)
    body = slow.seen[0]
    assert body["temperature"] == 0
    assert body["return_token_ids"]
    assert [one["messages"] for one in slow.seen[2:]] == [one["messages"] for one in fast.seen[2:]], "both answer the same prompts"


def test_different_tokens_are_said(serve: Serve, fake: Any) -> None:
    usual = fake()
    other = fake(ids=(*usual.ids[:7], 9, *usual.ids[8:]))
    summary = run(plan(), [serve(usual), serve(other)])
    (ratio,) = summary["ratios"]
    assert ratio["token_ids"]["identical"] == 0
    assert {one["position"] for one in ratio["token_ids"]["differences"]} == {7}
    assert " at token 7" in speedup.render(summary, cores=2)


def test_concurrency_is_kept_and_never_exceeded(serve: Serve, fake: Any) -> None:
    engines = [fake(), fake()]
    summary = run(plan(concurrency=3, per_turn=9, pairs=2), [serve(engine) for engine in engines])
    assert [engine.most_in_flight for engine in engines] == [3, 3]
    assert [len(turn["answers"]) for lane in summary["lanes"] for turn in lane["turns"]] == [9] * 4


def test_full_queue_by_hand() -> None:
    def answer(sent: float, ended: float) -> load.Answer:
        middle = (sent + ended) / 2
        return load.Answer("p", (1, 2, 3), 5, "stop", sent, ended, ((middle, 1), (ended, 2)))

    answers = [answer(10, 12), answer(10, 14), answer(12, 16)]  # two at a time; from 14 on only one is left
    found = load.full_queue(answers, 2)
    assert (found.seconds, found.tokens) == (4, 3 + 3 + 1)
    assert (found.all_seconds, found.all_tokens) == (6, 9)
    alone = load.full_queue(answers[:1], 1)
    assert (alone.seconds, alone.tokens) == (alone.all_seconds, alone.all_tokens) == (2, 3)


@pytest.mark.parametrize(
    ("fault", "said"),
    [("refuse", "404: no such model"), ("break", "did not answer prompt"), ("miscount", "24 arrived, the usage record says 25")],
)
def test_a_server_that_cannot_be_counted_on(serve: Serve, fake: Any, fault: str, said: str) -> None:
    with pytest.raises(LabError, match=said):
        run(plan(), [serve(fake(fault=fault)), serve(fake())])


def test_three_lanes_give_every_ratio(serve: Serve, fake: Any) -> None:
    summary = run(plan("none", "bf16", "fp8", pairs=2), [serve(fake(pause=0.001)) for _ in range(3)])
    assert [(one["lane"], one["over"]) for one in summary["ratios"]] == [
        ("smollm2/bf16/k3/eager/plain", "smollm2/none/eager/plain"),
        ("smollm2/fp8/k3/eager/plain", "smollm2/none/eager/plain"),
        ("smollm2/fp8/k3/eager/plain", "smollm2/bf16/k3/eager/plain"),
    ]
    text = speedup.render(summary, cores=2)
    assert "eager" in text
    assert "2 cores" in text
    assert "Eagle3 FP8, K=3, eager over Eagle3 BF16, K=3, eager" in text
    assert "2 of 2" in text


def test_what_was_measured_before_an_interruption_is_kept(serve: Serve, fake: Any) -> None:
    measured = speedup.Measured(plan(pairs=50))

    def say(line: str) -> None:
        if line.startswith("Pair 3/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(speedup.measure(measured, [serve(fake()), serve(fake())], say, rest=0))
    summary = speedup.summarise(measured)
    assert summary["pairs"] == 3
    assert "Stopped after 3 of 50 pairs." in speedup.render(summary, cores=2)


def test_modes_are_never_mixed_and_lanes_never_doubled() -> None:
    one, other = plan().lanes
    with pytest.raises(LabError, match="Eager and compiled"):
        speedup.Plan((one, replace(other, compiled=True)), PROMPTS)
    with pytest.raises(LabError, match="two different lanes"):
        speedup.Plan((one, one), PROMPTS)
    with pytest.raises(LabError, match="at least as many prompts"):
        plan(concurrency=4)


def test_results_are_whole_files(tmp_path: Path) -> None:
    path = result.save(tmp_path / "deep" / "result.json", "speedup", {"made": "now"}, {"pairs": 3})
    assert json.loads(path.read_text()) == {"format": "eagle3-lab-speedup", "version": 1, "provenance": {"made": "now"}, "pairs": 3}
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match="could not be saved"):
        result.save(tmp_path / "file" / "result.json", "speedup", {}, {})
    with pytest.raises(LabError, match="Nothing can be written"):
        result.check_writable(tmp_path / "file" / "result.json")
    result.check_writable(tmp_path / "other.json")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["deep", "file"]
