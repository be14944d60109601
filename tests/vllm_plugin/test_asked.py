"""What a request may ask of its drafts, beside a scheduler that behaves as vLLM's does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from lab.serving import client
from lab.vllm_plugin import asked, tracing
from lab.vllm_plugin.publisher import Took


def request(name: str, **arguments: Any) -> Any:
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=[1, 2],
        sampling_params=SimpleNamespace(extra_args={"eagle3_trace": name, **arguments}),
        num_output_tokens=1,
        num_computed_tokens=2,
        num_tokens=3,
        spec_token_ids=[7, 8, 9],
        is_finished=lambda: False,
    )


def test_names_are_those_that_the_client_sends() -> None:
    assert (asked.DEPTH, asked.WITHHOLD) == (client.DEPTH_ARGUMENT, client.WITHHOLD_ARGUMENT)


@pytest.mark.parametrize("k", [0, -1, 1.5, True, "x", [1]])
def test_a_senseless_depth_is_refused(k: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        asked.asked({asked.DEPTH: k})


def test_the_next_step_drafts_what_the_deepest_request_wants() -> None:
    two, one = asked.Asked(k=2), asked.Asked(k=1)
    assert asked.depth([two, one], 5) == 2
    assert asked.depth([two, None], 5) == 5, "an untraced request gets the server's K"
    assert asked.depth([two, asked.NOTHING], 5) == 5
    assert asked.depth([asked.Asked(k=9)], 5) == 5
    assert asked.depth([], 5) == 5


def run(drafted: Any, **more: Any) -> tuple[Any, Any]:
    """One step of a request beside `more`: the step that was traced, and vLLM's output."""
    sent: list[Any] = []
    requests = {"a": drafted, **more}
    tracer = tracing.Tracer(SimpleNamespace(send=sent.extend), requests, (True, ""))  # type: ignore[arg-type]
    for one in requests.values():
        tracer.added(one)
    tracer.proposed(SimpleNamespace(req_ids=list(requests)))
    left = list(drafted.spec_token_ids)
    for one in requests.values():
        one.num_computed_tokens += 1 + len(one.spec_token_ids)
    output = SimpleNamespace(
        num_scheduled_tokens={name: 1 + len(one.spec_token_ids) for name, one in requests.items()},
        scheduled_spec_decode_tokens={name: one.spec_token_ids for name, one in requests.items() if one.spec_token_ids},
        total_num_scheduled_tokens=sum(1 + len(one.spec_token_ids) for one in requests.values()),
        num_spec_tokens_to_schedule=3,
    )
    tracer.scheduled(output)
    results = SimpleNamespace(sampled_token_ids=[[7] for _ in requests], req_id_to_index={name: n for n, name in enumerate(requests)})
    tracer.sampled(output, results)
    outputs = [SimpleNamespace(request_id=name, new_token_ids=[7], finish_reason=None) for name in requests]
    tracer.updated(output, {0: SimpleNamespace(outputs=outputs)})
    assert tracer.reason is None
    (step,) = [message.step for message in sent if isinstance(message, Took) and message.step.request == "a"]
    assert list(step.draft) == left
    return step, output


def test_drafts_are_cut_and_no_more_are_made() -> None:
    step, output = run(request("a", eagle3_k=2))
    assert (step.draft, step.withheld, step.phase) == ((7, 8), (), "decode")
    assert output.num_spec_tokens_to_schedule == 2


def test_withheld_drafts_are_recorded_and_not_verified() -> None:
    step, output = run(request("a", eagle3_withhold=1))
    assert (step.draft, step.withheld, step.sampled) == ((), (7, 8, 9), (7,))
    assert output.num_spec_tokens_to_schedule == 3


def test_who_asks_nothing_is_left_alone() -> None:
    step, output = run(request("a"), b=request("b", eagle3_k=1))
    assert step.draft == (7, 8, 9)
    assert output.num_spec_tokens_to_schedule == 3


def test_a_wish_that_makes_no_sense_is_not_heeded_and_the_request_is_traced() -> None:
    step, _ = run(request("a", eagle3_k="many"))
    assert step.draft == (7, 8, 9)
