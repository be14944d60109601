"""Every rule fires where it should and nowhere near; what it names in vLLM is there; and the real pair is found healthy."""

from __future__ import annotations

import ast
import re
from importlib import util
from pathlib import Path

import pytest

from lab.doctor.rule import GITHUB, LEVELS, RULES, SEEN, Rule, all_rules, examine

from .cases import CASES, Make
from .made import config, kimi, minimax, smol, smol_draft

ALL = all_rules()


def fires(make: Make, name: str) -> bool:
    return any(one.rule == name for one in examine(make()))


@pytest.mark.parametrize(("name", "make"), [(name, make) for name, (bad, _) in CASES.items() for make in bad])
def test_a_rule_fires(name: str, make: Make) -> None:
    found = ALL[name].apply(make())
    assert found
    for one in found:
        assert one.evidence
        assert one.fix


@pytest.mark.parametrize(("name", "make"), [(name, make) for name, (_, good) in CASES.items() for make in good])
def test_a_rule_keeps_quiet(name: str, make: Make) -> None:
    assert [one.evidence for one in ALL[name].apply(make())] == []


def test_every_rule_has_both_kinds_of_cases() -> None:
    assert set(CASES) == set(ALL)
    # target-no-chat-template reads a real folder: see below
    assert {name for name, (bad, good) in CASES.items() if not bad or not good} == {"target-no-chat-template"}


def test_a_target_without_a_chat_template(tmp_path: Path) -> None:
    from dataclasses import replace

    from .made import smol_target

    (tmp_path / "tokenizer_config.json").write_text("{}")
    target = replace(smol_target(), folder=tmp_path, files=frozenset({"tokenizer_config.json"}))
    assert fires(lambda: smol(target=target), "target-no-chat-template")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert not fires(lambda: smol(target=target), "target-no-chat-template")


def test_the_real_pair_is_healthy() -> None:
    assert [(one.rule, one.evidence) for one in examine(smol())] == []


def test_healthy_neighbours_raise_no_error() -> None:
    for subject in (
        kimi(),
        kimi(tp=8),
        minimax(),
        minimax(
            "--block-size 32 --attention-backend ROCM_AITER_FA --enable-expert-parallel",
        ),
        smol(method="eagle3"),
    ):
        assert [(one.rule, one.evidence) for one in examine(subject) if one.level == "error"] == []


@pytest.mark.parametrize("one", ALL.values(), ids=ALL)
def test_a_rule_is_documented(one: Rule) -> None:
    assert one.level in LEVELS
    assert len(one.reason) > 40
    assert one.reason.endswith(".")
    assert re.fullmatch(r"[a-z0-9-]+", one.name)
    for issue in one.issues:
        assert issue == SEEN or re.fullmatch(rf"({'|'.join(GITHUB)})#\d+", issue), issue


def _segment(text: str, name: str) -> str | None:
    node: ast.AST | None = ast.parse(text)
    for part in name.split(".") if name else ():
        assert node is not None
        inside = (
            one for one in ast.walk(node) if isinstance(one, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and one.name == part
        )
        node = next(inside, None)
        if node is None:
            return None
    return text if not name else ast.get_source_segment(text, node)


@pytest.mark.parametrize("one", [one for one in ALL.values() if one.reads], ids=lambda one: one.name)
def test_the_place_in_vllm_is_there_and_reads_the_field(one: Rule) -> None:
    spec = util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed here")
    file, _, name = one.reads.partition(":")
    segment = _segment((Path(spec.submodule_search_locations[0]) / file).read_text(encoding="utf-8"), name)
    assert segment is not None, one.reads
    assert [field for field in one.fields if field not in segment] == []


def test_a_rule_that_stumbles_does_not_end_the_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(_subject: object):
        raise TypeError("planted")
        yield

    monkeypatch.setitem(RULES, "planted", Rule("planted", "error", "t", stumble, "r", "", (), ()))
    found = examine(smol(draft=smol_draft(hidden_size="x")))
    assert "doctor-stumbled" in [one.rule for one in found]
    assert "field-types" in [one.rule for one in found]


def test_a_public_drafts_real_configuration() -> None:
    """A published Kimi draft's own file against Kimi's shapes: its rotary base differs from the target's, which the rule says."""
    assert config("Kimi-K25-eagle3.json")["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]
    assert {one.rule for one in examine(kimi()) if one.level != "note"} <= {"draft-rope"}
