"""Verification's share from steps: what counts, what is refused, and what the words and charts say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab.bench import context, result
from lab.errors import LabError
from lab.trace.model import Step


def step(index: int, *, verify: float = 0.02, draft: float = 0.005, drafted: int = 3, accepted: int = 1, **changes: Any) -> Step:
    given: dict[str, Any] = {
        "trace": "t",
        "request": "r",
        "index": index,
        "phase": "decode",
        "started": float(index),
        "ended": index + verify + draft + 0.003,
        "draft": (7,) * drafted,
        "sampled": (7,) * (accepted + 1 if drafted else 1),
        "kept": accepted + 1,
        "verify_s": verify,
        "accept_s": 0.001,
        "draft_s": draft,
    }
    return Step(**{**given, **changes})


def answer(verify: float, draft: float = 0.005, *, count: int = 6, drafted: int = 3) -> list[Step]:
    prefill = step(0, verify=5.0, draft=draft, drafted=0, phase="prefill")
    slow = step(1, verify=9.0, draft=draft, drafted=drafted)  # the first step after prefill is left out
    rest = [step(2 + number, verify=verify, draft=draft, drafted=drafted) for number in range(count)]
    return [prefill, slow, *rest, step(99, verify=7.0, draft=0.0, drafted=drafted, finish="length")]


def test_the_share_is_that_of_whole_decode_steps() -> None:
    rows = context.summarise({256: [answer(0.02), answer(0.02)], 3584: [answer(0.045), answer(0.055)]}, None)
    assert [row["context"] for row in rows] == [256, 3584]
    assert rows[0]["share"] == pytest.approx(0.02 / 0.025)
    assert rows[0]["steps"] == 12
    assert rows[0]["mean_acceptance_length"] == 2
    assert rows[0]["verify_s_per_token"] == pytest.approx(0.01)
    assert rows[1]["share"] == pytest.approx(0.05 / 0.055)
    low, high = rows[1]["share_interval"]
    assert low < rows[1]["share"] < high
    assert "gain" not in rows[0]


def test_the_baseline_gives_the_gain() -> None:
    base = {256: [answer(0.018, 0.0, drafted=0)], 3584: [answer(0.04, 0.0, drafted=0)]}
    rows = context.summarise({256: [answer(0.02)], 3584: [answer(0.06)]}, base)
    assert rows[0]["baseline_step_s"] == pytest.approx(0.021)
    assert rows[0]["gain"] == pytest.approx(2 * 0.021 / 0.028)
    assert rows[1]["gain"] < rows[0]["gain"]
    assert rows[0]["share_interval"] is None  # one prompt has no spread
    said = context.render(rows)
    assert "1.50x" in said
    assert f"{context.PUBLISHED_LABEL}: 14% at 1,024" in said
    assert "Not measured here" in said
    assert "compare the direction" in context.explain(rows)


def test_nothing_to_count_is_said() -> None:
    with pytest.raises(LabError, match="No step with a draft"):
        context.summarise({256: [[step(0, drafted=0)]]}, None)
    with pytest.raises(LabError, match="No step of the baseline"):
        context.summarise({256: [answer(0.02)]}, {256: [answer(0.02)]})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"contexts": ()}, "different numbers"),
        ({"contexts": (256, 256)}, "different numbers"),
        ({"contexts": (8,)}, "different numbers"),
        ({"contexts": (256, 4090)}, "do not fit"),
        ({"max_tokens": 4}, "at least 8"),
    ],
)
def test_plans_that_cannot_be_measured(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(LabError, match=words):
        context.Plan(**{"contexts": (256,), "most": 4096, **changes})


def test_prompts_have_the_length_asked_for() -> None:
    texts = [[1, 2, 3], [4, 5]]
    assert context.cut(texts, 4, 0) == [1, 2, 3, 4]
    assert context.cut(texts, 7, 1) == [4, 5, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="empty"):
        context.cut([[]], 3, 0)


def test_the_newest_whole_result_of_the_lane_is_found(tmp_path: Path) -> None:
    rows = context.summarise({256: [answer(0.02)], 3584: [answer(0.06)]}, None)
    for day, lane in (("01", "a"), ("03", "a"), ("04", "b")):
        body = {"lane": lane, "rows": rows, "day": day}
        result.save(tmp_path / f"context-{day}.json", "context", {"made": f"2026-11-{day}T00:00:00Z"}, body)
    (tmp_path / "context-05.json").write_text('{"format": "eagle3-lab-context", "version": 1, "lane": "a", "rows": [{}]}')
    (tmp_path / "context-06.json").write_text("{")
    found = context.latest("a", [tmp_path, tmp_path / "not there"])
    assert found is not None
    assert found["day"] == "03"
    assert context.latest("c", [tmp_path]) is None
