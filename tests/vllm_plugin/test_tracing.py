"""The tracer beside a scheduler that behaves as vLLM's does, without an engine: what a real run shows rarely or never."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from lab.trace.model import Step
from lab.vllm_plugin.publisher import Begin, End, Hello, Message, Took

pytest.importorskip("vllm")

from lab.vllm_plugin import tracing


@dataclass
class Asked:
    """A vLLM request, as far as the tracer looks."""

    request_id: str
    trace: str | None = "t"
    prompt_token_ids: list[int] = field(default_factory=lambda: [1, 2, 3, 4])
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    done: bool = False

    @property
    def sampling_params(self) -> Any:
        return SimpleNamespace(extra_args=None if self.trace is None else {"eagle3_trace": self.trace})

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + self.num_output_tokens

    def is_finished(self) -> bool:
        return self.done


class Engine:
    """Schedules and answers what a test says, calling the tracer where the scheduler would."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.requests: dict[str, Asked] = {}
        self.tracer = tracing.Tracer(SimpleNamespace(send=self.sent.extend), self.requests, (True, ""))  # type: ignore[arg-type]

    def add(self, *requests: Asked) -> None:
        for request in requests:
            self.requests[request.request_id] = request
            self.tracer.added(request)

    def schedule(self, drafts: dict[str, list[int]] | None = None, **tokens: int) -> Any:
        drafts = drafts or {}
        for name, count in tokens.items():
            self.requests[name].num_computed_tokens += count
        output = SimpleNamespace(
            num_scheduled_tokens=tokens, scheduled_spec_decode_tokens=drafts, total_num_scheduled_tokens=sum(tokens.values())
        )
        self.tracer.scheduled(output)
        return output

    def answer(self, output: Any, sampled: dict[str, list[int]], keep: dict[str, int] | None = None, **finish: str) -> None:
        names = list(output.num_scheduled_tokens)
        results = SimpleNamespace(
            sampled_token_ids=[sampled.get(name, []) for name in names], req_id_to_index={name: row for row, name in enumerate(names)}
        )
        self.tracer.sampled(output, results)
        outputs = []
        for row, name in enumerate(names):
            request, ids = self.requests.get(name), results.sampled_token_ids[row]
            if request is None or request.done or not ids:
                continue
            rejected = len(output.scheduled_spec_decode_tokens.get(name, ())) - (len(ids) - 1)
            request.num_computed_tokens -= rejected if name in output.scheduled_spec_decode_tokens else 0
            del ids[(keep or {}).get(name, len(ids)) :]  # in place, as vLLM does
            request.num_output_tokens += len(ids)
            request.done = name in finish
            outputs.append(SimpleNamespace(request_id=name, new_token_ids=ids, finish_reason=finish.get(name)))
            if request.done:
                del self.requests[name]
        self.tracer.updated(output, {0: SimpleNamespace(outputs=outputs)})

    def steps(self) -> list[Step]:
        return [message.step for message in self.sent if isinstance(message, Took)]

    def ends(self) -> list[End]:
        return [message for message in self.sent if isinstance(message, End)]


def test_a_request_from_prompt_to_stop() -> None:
    engine = Engine()
    engine.add(Asked("r", prompt_token_ids=[5, 6, 7]))
    engine.answer(engine.schedule(r=2), {})  # a chunk
    engine.answer(engine.schedule(r=1), {"r": [10]})
    engine.answer(engine.schedule({"r": [11, 12, 13]}, r=4), {"r": [11, 12, 40]})
    engine.answer(engine.schedule({"r": [41, 2, 43]}, r=4), {"r": [41, 2, 43, 44]}, keep={"r": 2}, r="stop")
    a, b, c, d = engine.steps()
    assert [s.phase for s in (a, b, c, d)] == ["prefill", "prefill", "decode", "decode"]
    assert [s.index for s in (a, b, c, d)] == [0, 1, 2, 3]
    assert [s.context for s in (a, b, c, d)] == [0, 2, 3, 6]
    assert (a.sampled, b.sampled, c.sampled, d.sampled) == ((), (10,), (11, 12, 40), (41, 2, 43, 44))
    assert (d.kept, d.accepted, d.finish) == (2, 3, "stop")
    assert c.finish is None
    assert engine.ends() == [End("t", "r", "stop")]
    assert engine.sent[1] == Begin("t", "r", [5, 6, 7])
    assert not engine.tracer.live


def test_a_stale_step_of_an_aborted_request_is_dropped() -> None:
    engine = Engine()
    engine.add(Asked("r"), Asked("other", trace="u"))
    engine.answer(engine.schedule(r=4, other=4), {"r": [9], "other": [9]})
    output = engine.schedule({"r": [1, 2], "other": [1, 2]}, r=3, other=3)
    engine.requests.pop("r").done = True  # the abort arrives while the model runs
    engine.tracer.finished("abort")
    engine.answer(output, {"r": [1, 2, 3], "other": [1, 5]})
    assert [(s.request, s.index) for s in engine.steps()] == [("r", 0), ("other", 0), ("other", 1)]
    assert engine.ends() == [End("t", "r", "abort")]


def test_an_abort_before_the_first_step_ends_the_trace() -> None:
    engine = Engine()
    engine.add(Asked("r"))
    engine.requests.pop("r")
    engine.tracer.finished("abort")
    assert engine.ends() == [End("t", "r", "abort")]


def test_a_preempted_request_computes_its_answer_again_as_prefill() -> None:
    engine = Engine()
    engine.add(Asked("r"))
    engine.answer(engine.schedule(r=4), {"r": [9]})
    engine.answer(engine.schedule({"r": [1, 2]}, r=3), {"r": [1, 2, 3]})
    engine.requests["r"].num_computed_tokens = 0
    engine.answer(engine.schedule(r=8), {"r": [4]})
    again = engine.steps()[-1]
    assert (again.phase, again.context, again.scheduled, again.draft, again.index) == ("prefill", 0, 8, (), 2)


def test_tokens_that_vllm_throws_away_are_no_step() -> None:
    engine = Engine()
    engine.add(Asked("r"))
    engine.answer(engine.schedule(r=4), {"r": [9]})
    output = engine.schedule({"r": [1, 2]}, r=3)
    engine.tracer.sampled(output, SimpleNamespace(sampled_token_ids=[[1, 2, 3]], req_id_to_index={"r": 0}))
    engine.tracer.updated(output, {})
    assert len(engine.steps()) == 1


def test_steps_on_their_way_at_once_are_told_apart() -> None:
    """Pipeline parallelism schedules the next batch before the last one is back."""
    engine = Engine()
    engine.add(Asked("a", trace="A"), Asked("b", trace="B"))
    one, two = engine.schedule(a=4), engine.schedule(b=4)
    engine.answer(one, {"a": [7]})
    engine.answer(two, {"b": [8]})
    assert [(s.trace, s.sampled) for s in engine.steps()] == [("A", (7,)), ("B", (8,))]


def test_who_does_not_ask_costs_and_says_nothing() -> None:
    engine = Engine()
    engine.add(Asked("r", trace=None), Asked("long", trace="x" * 200), Asked("empty", trace=""))
    engine.answer(engine.schedule(r=4, long=4, empty=4), {"r": [1], "long": [1], "empty": [1]}, r="stop")
    assert not engine.tracer.live
    assert [type(message) for message in engine.sent] == [Hello]


def test_padding_is_kept_once_and_a_second_time_means_hidden_ids() -> None:
    engine = Engine()
    engine.add(Asked("r", prompt_token_ids=[5]))
    engine.answer(engine.schedule({"r": [-1, -1]}, r=3), {"r": [10]})
    assert engine.steps()[0].draft == (-1, -1)
    assert engine.steps()[0].accepted == 0
    assert engine.tracer.reason is None
    engine.schedule({"r": [-1, -1]}, r=3)
    assert engine.tracer.reason == tracing.HIDDEN
    assert engine.ends() == [End("t", "r", "untraced")]
    assert engine.sent[-1] == Hello(vllm=tracing.vllm_version, tracing=(False, tracing.HIDDEN), draft_probs=(False, tracing.HIDDEN))


@pytest.mark.parametrize(
    ("drafts", "probs", "shown"), [([1, 2, 3], (0.5, 0.4, 0.3), (0.5, 0.4, 0.3)), ([1], (0.5, 0.4), (0.5,)), ([], (0.5,), None)]
)
def test_probabilities_belong_to_the_step_that_verifies_them(drafts: list[int], probs: tuple[float, ...], shown: Any) -> None:
    engine = Engine()
    engine.add(Asked("r"), Asked("quiet", trace=None))
    engine.answer(engine.schedule(r=4, quiet=4), {"r": [9], "quiet": [9]})
    engine.tracer.drafted(SimpleNamespace(eagle3_probs={"r": probs, "quiet": (0.1,)}))
    scheduled = {"r": drafts} if drafts else {}
    engine.answer(engine.schedule(scheduled, r=1 + len(drafts)), {"r": [30]})
    assert engine.steps()[-1].draft_probs == shown
    engine.answer(engine.schedule({"r": [7]}, r=2), {"r": [31]})
    assert engine.steps()[-1].draft_probs is None  # never those of an earlier step


class Broken(tracing.TracingScheduler):
    """The scheduler without an engine, to see that an error in the tracer stays there."""

    def __new__(cls, *_: Any) -> Any:
        return object.__new__(cls)

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer


def test_an_error_in_the_tracer_switches_it_off_and_nothing_else() -> None:
    engine = Engine()
    engine.add(Asked("r"))
    scheduler = Broken(engine.tracer)
    scheduler._watch("scheduled", object())  # no vLLM output at all
    assert engine.tracer.reason is not None
    assert "AttributeError" in engine.tracer.reason
    assert engine.ends() == [End("t", "r", "untraced")]
    scheduler._watch("scheduled", object())
    assert len([m for m in engine.sent if isinstance(m, Hello)]) == 2


def test_async_scheduling_gets_vllms_own_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched import async_scheduler

    made: dict[str, Any] = {}
    monkeypatch.setattr(async_scheduler, "AsyncScheduler", lambda *args, **named: made.update(args=args, named=named) or "async")
    monkeypatch.setattr(tracing, "_refuse", lambda reason: made.update(reason=reason))
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=True))
    assert tracing.TracingScheduler(vllm_config=config, block_size=16) == "async"  # type: ignore[comparison-overlap]
    assert made["named"] == {"block_size": 16}
    assert made["args"] == (config,)
    assert "--no-async-scheduling" in made["reason"]


def test_servers_are_told_the_names_that_exist() -> None:
    from importlib import import_module

    from lab.serving.command import MIDDLEWARE, SCHEDULER
    from lab.vllm_plugin import HOOKS

    assert HOOKS == {"--scheduler-cls": SCHEDULER, "--middleware": MIDDLEWARE}
    for path in HOOKS.values():
        module, name = path.rsplit(".", 1)
        assert isinstance(getattr(import_module(module), name), type)


def configured(**more: Any) -> Any:
    values = {"asynchronous": False, "speculative": object(), "v2": False, **more}
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=values["asynchronous"]),
        speculative_config=values["speculative"],
        use_v2_model_runner=values["v2"],
    )


def test_an_engine_whose_steps_cannot_be_read_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracing.refusal(configured()) == ""
    assert tracing.refusal(configured(asynchronous=True)) == tracing.ASYNC
    assert tracing.refusal(configured(v2=True)) == tracing.RUNNER_V2
    assert tracing.refusal(configured(v2=True, speculative=None)) == ""  # without a draft nothing is hidden
    monkeypatch.setattr(tracing.Scheduler, "update_from_output", lambda _self, _everything: None)
    assert "another Scheduler.update_from_output" in tracing.refusal(configured())
    monkeypatch.setattr(tracing.Scheduler, "update_draft_token_ids", lambda _self: None)
    assert "Scheduler.update_draft_token_ids and update_from_output" in tracing.refusal(configured())


def test_where_steps_cannot_be_read_the_server_gets_vllms_own_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched import async_scheduler

    class Stock:
        def __init__(self, vllm_config: Any) -> None:
            self.vllm_config = vllm_config

    class StockAsync(Stock):
        pass

    refused: list[str] = []
    monkeypatch.setattr(tracing, "Scheduler", Stock)
    monkeypatch.setattr(tracing, "refusal", lambda _config: "because")
    monkeypatch.setattr(async_scheduler, "AsyncScheduler", StockAsync)
    monkeypatch.setattr(tracing, "_refuse", refused.append)
    assert type(tracing.TracingScheduler(configured(v2=True))) is Stock
    assert type(tracing.TracingScheduler(configured(asynchronous=True))) is StockAsync
    assert refused == ["because", "because"]
