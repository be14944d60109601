"""Corpus and training: they resume, they learn, and what they count is what a brute-force reading counts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lab.bench.prompts import KINDS, shipped
from lab.errors import LabError
from lab.train import openings
from lab.train.corpus import Conversation, CorpusPlan, Opening, Rows, Template, looping, write_corpus
from lab.train.loop import Trainer, TrainPlan, replay
from lab.train.target import Target


def quiet(_line: str) -> None:
    """Progress that nobody reads."""


PLAN = CorpusPlan("main", 2, 10, 120, longest_user=8, longest_answer=12)


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return Target.load(tiny_target, dtype=torch.float32)


@pytest.fixture(scope="module")
def corpus(target: Target, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(target, folder, tiny_target, PLAN, quiet)
    return folder


def test_answers_are_marked_by_a_reading_of_the_template(corpus: Path, tiny_target: Path) -> None:
    rows, template = Rows.read(corpus, "main"), Template.build(tiny_target)
    assert rows.ids.shape == (20, 120)
    header = list(template.to_answer)
    for ids, answer in zip(rows.ids.tolist(), rows.answer, strict=True):
        inside, expected, turn = False, [], 0
        for place, token in enumerate(ids):
            forced_close = inside and token == template.end and turn >= PLAN.longest_answer
            expected.append(inside and not forced_close)
            turn += 1
            if inside and token == template.end:
                inside = False
            elif ids[place - len(header) + 1 : place + 1] == header:
                inside, turn = True, 0
        # A turn closed because it looped is not counted either; the tiny target's rows are too short for that.
        assert answer.tolist() == expected


def test_a_corpus_resumes_and_repeats(corpus: Path, target: Target, tiny_target: Path, tmp_path: Path) -> None:
    write_corpus(target, tmp_path, tiny_target, PLAN, quiet, budget=0.0)
    first = sorted(path.name for path in tmp_path.glob("*.npz"))
    assert first == []
    write_corpus(target, tmp_path, tiny_target, PLAN, quiet)
    (tmp_path / "main-000.npz").unlink()
    kept = (tmp_path / "main-001.npz").stat().st_mtime_ns
    write_corpus(target, tmp_path, tiny_target, PLAN, quiet)
    assert (tmp_path / "main-001.npz").stat().st_mtime_ns == kept
    assert np.array_equal(Rows.read(tmp_path, "main").ids, Rows.read(corpus, "main").ids)
    with pytest.raises(LabError, match="other settings"):
        write_corpus(target, tmp_path, tiny_target, replace(PLAN, seed=9), quiet)


def test_loops_are_seen() -> None:
    straight = torch.arange(100)[None]
    loop = torch.arange(100)[None] % 5
    assert looping(torch.cat((straight, loop))).tolist() == [False, True]


def test_control_tokens_end_turns_and_nothing_else(tiny_target: Path) -> None:
    template = Template.build(tiny_target)
    state = Conversation(replace(PLAN, rows=2, longest_user=99), template, [Opening(template.first), Opening((*template.first, 9))], "cpu")
    none = torch.zeros(2, dtype=torch.bool)
    for wanted in template.first:
        ids, counted = state.advance(torch.tensor([5, 5]), none)
        assert ids.tolist() == [wanted, wanted]
        assert not counted.any()
    ids, _ = state.advance(torch.tensor([template.end, 7]), none)
    assert ids.tolist() == [template.end, 9]
    for wanted in template.to_answer:
        ids, _ = state.advance(torch.tensor([5, 6]), none)
        assert ids.tolist() == [wanted, 6]
    ids, counted = state.advance(torch.tensor([5, 6]), none)
    assert counted.tolist() == [True, False]


def test_an_answer_follows_a_whole_request(tiny_target: Path) -> None:
    template = Template.build(tiny_target)
    asked = Opening((*template.first, 9, template.end, *template.to_answer), asked=True)
    state = Conversation(replace(PLAN, rows=2, longest_user=99, greedy=(1.0, 0.0, 0.0)), template, [asked, Opening(template.first)], "cpu")
    none = torch.zeros(2, dtype=torch.bool)
    for wanted in asked.ids:
        ids, counted = state.advance(torch.tensor([5, 5]), none)
        assert (ids[0], counted[0]) == (wanted, False)
    assert state.temperature().tolist() == [0.0, pytest.approx(PLAN.user_temperature)]
    ids, counted = state.advance(torch.tensor([5, 5]), none)
    assert (ids[0], counted[0]) == (5, True)


def test_openings_hold_no_evaluation_prompt() -> None:
    """No whole request is one of the held-out prompts or shares eight words in a row with one."""

    def words(text: str) -> list[str]:
        return re.findall(r"[a-z0-9]+", text.lower())

    def runs(text: str) -> set[tuple[str, ...]]:
        found = words(text)
        return {tuple(found[at : at + 8]) for at in range(len(found) - 7)} | {tuple(found)}

    held_out = set().union(*(runs(prompt.text) for kind in KINDS for prompt in shipped(kind).prompts))
    random = np.random.default_rng(3)
    for kind in range(3):
        requests = {openings.request(random, kind) for _ in range(3000)}
        assert len(requests) > 500
        assert not {text for text in requests if runs(text) & held_out}
    assert not {frame for frame in openings.all_frames() if runs(frame) & held_out}


def test_training_goes_on_from_an_earlier_draft(corpus: Path, target: Target, tmp_path: Path) -> None:
    first = Trainer(plan(), target, corpus, tmp_path / "first", quiet)
    first.run()
    first.draft.export(tmp_path / "draft")
    wider = Trainer(plan(vocab=80), target, corpus, tmp_path / "wider", quiet, tmp_path / "draft")
    before, after = first.draft.weights(), wider.draft.weights()
    for name, tensor in before.items():
        if name.startswith(("midlayer", "fc", "norm")):
            torch.testing.assert_close(after[name], tensor, rtol=0.02, atol=1e-3)
    new = {int(token): place for place, token in enumerate(wider.draft.kept)}
    rows = [new[int(token)] for token in first.draft.kept]
    torch.testing.assert_close(after["lm_head.weight"][rows], before["lm_head.weight"])
    other = plan(levels=(2,))
    with pytest.raises(LabError, match="another shape"):
        Trainer(other, target, corpus, tmp_path / "other", quiet, tmp_path / "draft")
    with pytest.raises(LabError, match="other settings"):  # the finished run did not start there
        Trainer(plan(), target, corpus, tmp_path / "first", quiet, tmp_path / "draft")


def plan(**changes: object) -> TrainPlan:
    base = TrainPlan(steps=6, tokens=480, unroll=3, vocab=64, intermediate=96, held_out=4, warmup=1, evaluate_every=3, record_every=2)
    return replace(base, **changes)  # type: ignore[arg-type]


def test_training_resumes_to_the_same_weights(corpus: Path, target: Target, tmp_path: Path) -> None:
    whole = Trainer(plan(), target, corpus, tmp_path / "whole", quiet)
    assert whole.run()
    part = Trainer(plan(), target, corpus, tmp_path / "part", quiet)
    assert not part.run(budget=1e-9)
    again = Trainer(plan(), target, corpus, tmp_path / "part", quiet)
    assert again.step == part.step == 1
    assert again.run()
    for name, tensor in whole.draft.weights().items():
        torch.testing.assert_close(again.draft.weights()[name], tensor)
    with pytest.raises(LabError, match="other settings"):
        Trainer(plan(seed=5), target, corpus, tmp_path / "part", quiet)
    records = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [2, 3, 4, 6]
    assert "main" in records[1]
    assert "main" not in records[0]


@pytest.mark.parametrize("saved", [True, False])
def test_steps_that_a_killed_run_lost_are_not_in_the_log_twice(corpus: Path, target: Target, tmp_path: Path, saved: bool) -> None:
    killed = Trainer(plan(), target, corpus, tmp_path, quiet)
    if saved:
        killed.save()
    killed.step = 2
    killed.record(None, evaluate=False)  # and then it was killed
    assert Trainer(plan(), target, corpus, tmp_path, quiet).run()
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [2, 3, 4, 6]


def test_training_learns(corpus: Path, target: Target, tmp_path: Path) -> None:
    trainer = Trainer(plan(steps=40, record_every=1, evaluate_every=100), target, corpus, tmp_path, quiet)
    trainer.run()
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    for step in range(3):
        assert records[-1]["loss"][step] < records[0]["loss"][step] - 0.2


def brute(hit: np.ndarray, counted: np.ndarray, k: int) -> tuple[int, int]:
    """Greedy verification read token by token."""
    drafts = accepted = 0
    places = [int(place) for place in np.flatnonzero(counted)]
    while places:
        start = places[0]
        good = 0
        for step in range(k):
            if start + step not in places or not hit[step, start + step]:
                break
            good += 1
        drafts, accepted = drafts + 1, accepted + good
        places = [place for place in places if place > start + good]
    return drafts, accepted


def test_replay_counts_as_verification_does() -> None:
    random = np.random.default_rng(0)
    for _ in range(30):
        hit, counted = random.random((4, 60)) < 0.6, random.random(60) < 0.8
        assert replay(hit, counted, 3) == brute(hit, counted, 3)
    assert replay(np.ones((3, 8), bool), np.ones(8, bool), 3) == (2, 6)


def test_too_few_rows_are_refused(corpus: Path, target: Target, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="held out"):
        Trainer(plan(held_out=20), target, corpus, tmp_path, quiet)
    with pytest.raises(LabError, match="no corpus"):
        Trainer(plan(corpora=(("other", 1.0),)), target, corpus, tmp_path, quiet)


def test_a_control_draft_sees_the_last_level_alone(target: Target, corpus: Path, tmp_path: Path) -> None:
    from lab.train.cli import layers_of

    low, middle, high = target.shape.default_levels()
    assert layers_of(["last"], (low, middle, high), target.shape.layers) == layers_of(["high"], (low, middle, high), 6) == (high,)
    assert layers_of([], (low, middle, high), 6) == ()
    assert layers_of(["high", "low", "4"], (low, middle, high), 6) == tuple(sorted({low, high, 4}))
    for wrong in ("lowest", "6", "-1", ""):
        with pytest.raises(LabError, match="is no level"):
            layers_of([wrong], (low, middle, high), 6)
    plan = TrainPlan(corpora=(("main", 1.0),), steps=1, tokens=240, vocab=64, held_out=2, levels=(high,))
    trainer = Trainer(plan, target, corpus, tmp_path / "run", quiet)
    trainer.draft.export(tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert (config["num_aux_hidden_states"], config["eagle_aux_hidden_state_layer_ids"]) == (1, [high])
    assert trainer.draft.weights()["fc.weight"].shape == (target.shape.hidden, target.shape.hidden)
