"""The clocks around a model runner's methods: which part of a step gets which seconds."""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from lab.vllm_plugin import timing


@dataclass
class Output:
    """vLLM's `ModelRunnerOutput`, as far as the clocks look."""

    sampled_token_ids: list[list[int]] = field(default_factory=list)


def runner(verify: float, accept: float, draft: float | None) -> Any:
    class Runner:
        def execute_model(self, _: Any) -> None:
            time.sleep(verify)

        def sample_tokens(self, _: Any) -> Output:
            time.sleep(accept)
            if draft is not None:
                self.propose_draft_token_ids("scheduled", "sampled")
            return Output([[1, 2]])

        def propose_draft_token_ids(self, scheduler_output: Any, *rest: Any) -> tuple[Any, ...]:
            time.sleep(draft or 0)
            return (scheduler_output, *rest)

    timing.wrap(Runner)
    timing.wrap(Runner)  # a second time changes nothing
    return Runner()


def test_each_part_gets_its_own_seconds() -> None:
    made = runner(0.05, 0.02, 0.6)
    made.execute_model(None)
    output = pickle.loads(pickle.dumps(made.sample_tokens(None)))  # as from a worker process
    times = timing.taken(output)
    assert times is not None
    # A sleep is never shorter than asked, and nothing is counted twice: drafting is not part of acceptance.
    assert times.verify >= 0.05
    assert times.draft >= 0.6
    assert 0.02 <= times.accept < 0.6
    assert output == Output([[1, 2]])


def test_without_a_draft_drafting_took_no_time() -> None:
    made = runner(0.01, 0.0, 0.02)
    made.execute_model(None)
    made.sample_tokens(None)
    made.propose_draft_token_ids = lambda *_: None
    made.execute_model(None)
    times = timing.taken(made.sample_tokens(None))
    assert times is not None
    assert times.draft == 0.0  # and not the last step's


def test_what_the_methods_return_is_left_alone() -> None:
    made = runner(0.0, 0.0, None)
    assert made.propose_draft_token_ids("a", "b", "c") == ("a", "b", "c")
    assert timing.taken(made.sample_tokens(None)) is None  # no target pass came before: nothing is better than something wrong


def test_this_vllm_is_one_that_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = pytest.importorskip("vllm")
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("vLLM runs on another platform here")
    assert timing.support() == (True, "")
    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    assert timing.support() == (False, "vLLM 0.99.0 was not checked for it.")
