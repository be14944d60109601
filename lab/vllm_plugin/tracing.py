"""The tracing scheduler: vLLM's own, watched. Every engine step of a request that asked for it becomes a `lab.trace.model.Step`.

`--scheduler-cls lab.vllm_plugin.tracing.TracingScheduler`. A request asks by `vllm_xargs={"eagle3_trace": ID}`, which vLLM carries to the
scheduler in `SamplingParams.extra_args`. What is read, and when:

* after `schedule()`: the draft ids that the target will verify, and how much of the request was computed before;
* before `update_from_output()`: the sampled ids, because stop handling trims that very list in place, and whether the request still
  lives, because a step of an aborted request can come back late: vLLM drops and does not count it, and neither does the trace;
* after it: what the engine let out (`EngineCoreOutput`), and why it finished.

A stop *string* is found by the API server while it decodes text, and reaches the engine as an abort: such a trace ends with "abort" while
the client reads "stop", and its last step can hold tokens past the stop string that the client never sees.

A request that joins a running batch with a single token to compute (a prompt of one token, or one in the prefix cache) is padded by vLLM
to the batch's shape with draft ids of -1. They are never accepted; vLLM counts them as draft tokens, so the trace keeps them. A second
such step in a row means that real ids are kept from the scheduler.

vLLM does not promise this interface. Whatever goes wrong here switches tracing off with a reason and lets the engine run on. Async
scheduling and model runner V2 keep draft ids in the worker (the scheduler sees -1 for each): then vLLM's own scheduler is used, untraced;
so it is where a method is not as this module knows it. docs/versions.md says which versions were tried.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from vllm import __version__ as vllm_version
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from lab import env
from lab.trace.model import Phase, Step
from lab.vllm_plugin import confidence, timing
from lab.vllm_plugin.asked import NOTHING, Asked, asked, depth
from lab.vllm_plugin.publisher import Begin, End, Hello, Message, Publisher, Took

logger = logging.getLogger(__name__)

ARGUMENT = "eagle3_trace"
_LONGEST_ID = 128

HIDDEN = "This engine does not show its draft ids to the scheduler."
RUNNER_V2 = (
    "Model runner V2 keeps the draft ids in the worker and shows the scheduler -1 for each:"
    " start the server with VLLM_USE_V2_MODEL_RUNNER=0."
)
#: Methods of vLLM's scheduler that are overridden, and the parameters that they begin with from 0.24 to 0.33.
HOOKS = {
    "add_request": ["self", "request"],
    "schedule": ["self"],
    "update_draft_token_ids": ["self", "draft_token_ids"],
    "update_from_output": ["self", "scheduler_output", "model_runner_output"],
    "finish_requests": ["self", "request_ids", "finished_status"],
    "shutdown": ["self"],
}
ASYNC = "Async scheduling hides the draft ids from the scheduler: start the server with --no-async-scheduling."


@dataclass(slots=True)
class _Traced:
    """A traced request in the engine; `steps` counts those taken, `padded` says that the last one scheduled had no real draft."""

    trace: str
    steps: int = 0
    padded: bool = False
    asked: Asked = NOTHING
    withheld: tuple[int, ...] = ()


@dataclass(slots=True)
class _Scheduled:
    """What is known of a request's step between scheduling and its output."""

    started: float
    phase: Phase
    draft: tuple[int, ...]
    probs: tuple[float, ...] | None
    context: int
    scheduled: int
    withheld: tuple[int, ...] = ()
    sampled: tuple[int, ...] | None = None


@dataclass(slots=True)
class _Running:
    """A step on its way: vLLM's `SchedulerOutput`, the traced requests in it, and how long its parts took once it is back."""

    output: Any
    found: dict[str, _Scheduled]
    times: timing.Times | None = None


class Tracer:
    """Makes steps out of what the scheduler sees. Holds nothing for a request that did not ask."""

    def __init__(self, publisher: Publisher, requests: dict[str, Any], draft_probs: tuple[bool, str]) -> None:
        self.publisher = publisher
        self.requests = requests
        self.draft_probs = draft_probs
        self.reason: str | None = None
        self.live: dict[str, _Traced] = {}
        self._probs: dict[str, tuple[float, ...]] = {}
        # By identity of vLLM's SchedulerOutput, which is kept so that its identity stays its own: with pipeline parallelism several are
        # on their way at once.
        self._running: dict[int, _Running] = {}
        self.hello()

    def hello(self) -> None:
        """Tell the API server what this engine can do."""
        on = self.reason is None
        probs = self.draft_probs if on else (False, self.reason or "")
        self.publisher.send([Hello(vllm=vllm_version, tracing=(on, self.reason or ""), draft_probs=probs)])

    def off(self, reason: str) -> None:
        """Stop tracing for good, and say why; open traces end."""
        logger.error("Eagle3 Lab: tracing is off. %s", reason)
        self.reason = reason
        self.publisher.send([End(traced.trace, request, "untraced") for request, traced in self.live.items()])
        self.live.clear()
        self._running.clear()
        self._probs.clear()
        self.hello()

    def added(self, request: Any) -> None:
        """A request entered the engine: trace it if it asks."""
        arguments = getattr(request.sampling_params, "extra_args", None)
        trace = str(arguments[ARGUMENT]) if arguments and ARGUMENT in arguments else ""
        if not trace or request.request_id in self.live:
            return
        if len(trace) > _LONGEST_ID:
            logger.warning("Eagle3 Lab: a request is not traced, its trace id is longer than %d characters", _LONGEST_ID)
            return
        try:
            wish = asked(arguments or {})
        except (TypeError, ValueError) as error:
            logger.warning("Eagle3 Lab: a request's wish is not heeded: %s", error)
            wish = NOTHING
        self.live[request.request_id] = _Traced(trace, asked=wish)
        self.publisher.send([Begin(trace, request.request_id, list(request.prompt_token_ids or ()))])

    def drafted(self, drafts: Any) -> None:
        """The draft's proposals arrived: remember how sure it was."""
        probs = confidence.taken(drafts)
        if probs:
            self._probs.update((request, values) for request, values in probs.items() if request in self.live)

    def proposed(self, drafts: Any) -> None:
        """vLLM took the proposals: cut or withhold what requests asked for."""
        for name in drafts.req_ids:
            traced, request = self.live.get(name), self.requests.get(name)
            if traced is not None and traced.asked != NOTHING and request is not None:
                traced.withheld = traced.asked.trim(request)

    def scheduled(self, output: Any) -> None:
        """A step was scheduled. vLLM has added its tokens to `num_computed_tokens` already."""
        tokens, drafts = output.num_scheduled_tokens, output.scheduled_spec_decode_tokens
        started = time.time()
        found: dict[str, _Scheduled] = {}
        if any(traced.asked.k is not None for traced in self.live.values()):
            wishes = [traced.asked if (traced := self.live.get(name)) else None for name in tokens]
            output.num_spec_tokens_to_schedule = depth(wishes, output.num_spec_tokens_to_schedule)
        for name, traced in self.live.items():
            scheduled = tokens.get(name)
            if scheduled is None:
                continue
            request = self.requests[name]
            draft = tuple(drafts.get(name, ()))
            padded = bool(draft) and min(draft) < 0
            if padded and traced.padded:
                self.off(HIDDEN)
                return
            traced.padded = padded
            context = request.num_computed_tokens - scheduled
            # One new token besides the draft, and it is the last one known, sampled by an earlier step. A request that was preempted
            # computes its answer again as if it were prompt.
            decodes = request.num_output_tokens > 0 and scheduled - len(draft) == 1 and context + 1 == request.num_tokens
            probs = self._probs.pop(name, None)
            if probs is not None:
                probs = probs[: len(draft)] if draft and len(draft) <= len(probs) else None
            phase: Phase = "decode" if decodes else "prefill"
            found[name] = _Scheduled(started, phase, draft, probs, context, scheduled, traced.withheld)
            traced.withheld = ()
        if found:
            self._running[id(output)] = _Running(output, found)

    def sampled(self, output: Any, results: Any) -> None:
        """The step's results are there; vLLM has not looked at them yet."""
        entry = self._running.get(id(output))
        if entry is None:
            return
        entry.times = timing.taken(results)
        for name, scheduled in entry.found.items():
            request = self.requests.get(name)
            if request is None or request.is_finished():
                continue
            ids = results.sampled_token_ids
            scheduled.sampled = tuple(ids[results.req_id_to_index[name]]) if ids else ()

    def updated(self, output: Any, outputs: dict[int, Any]) -> None:
        """vLLM took the results: say what became of them."""
        entry = self._running.pop(id(output), None)
        if entry is None:
            return
        ended = time.time()
        found, times = entry.found, entry.times
        results = {result.request_id: result for batch in outputs.values() for result in batch.outputs if result.request_id in found}
        messages: list[Message] = []
        for name, scheduled in found.items():
            traced = self.live.get(name)
            if traced is None or scheduled.sampled is None:
                continue
            result = results.get(name)
            if scheduled.sampled and result is None:
                continue  # vLLM threw the tokens away (a failed KV transfer) and counted nothing
            finish = str(result.finish_reason) if result is not None and result.finish_reason is not None else None
            step = Step(
                trace=traced.trace,
                request=name,
                index=traced.steps,
                phase=scheduled.phase,
                started=scheduled.started,
                ended=ended,
                draft=scheduled.draft,
                draft_probs=scheduled.probs,
                withheld=scheduled.withheld,
                sampled=scheduled.sampled,
                kept=len(result.new_token_ids) if result is not None else 0,
                context=scheduled.context,
                scheduled=scheduled.scheduled,
                batch_requests=len(output.num_scheduled_tokens),
                batch_tokens=output.total_num_scheduled_tokens,
                verify_s=times and times.verify,
                accept_s=times and times.accept,
                draft_s=times and times.draft,
                finish=finish,
            )
            traced.steps += 1
            messages.append(Took(step))
            if finish is not None and self._gone(name):
                messages.append(self._end(name, finish))
        if messages:
            self.publisher.send(messages)

    def finished(self, reason: str) -> None:
        """vLLM ended requests from outside (an abort, an error): end their traces."""
        gone = [name for name in self.live if self._gone(name)]
        if gone:
            self.publisher.send([self._end(name, reason) for name in gone])

    def _gone(self, name: str) -> bool:
        request = self.requests.get(name)
        return request is None or request.is_finished()

    def _end(self, name: str, reason: str) -> End:
        self._probs.pop(name, None)
        return End(self.live.pop(name).trace, name, reason)


class TracingScheduler(Scheduler):
    """vLLM's scheduler, watched by a `Tracer`."""

    def __new__(cls, vllm_config: Any, *arguments: Any, **named: Any) -> Any:
        """Where steps cannot be read, the scheduler that vLLM itself would take: tracing is refused, serving is not."""
        reason = refusal(vllm_config)
        if not reason:
            return super().__new__(cls)
        _refuse(reason)
        if not vllm_config.scheduler_config.async_scheduling:
            return Scheduler(vllm_config, *arguments, **named)
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler

        return AsyncScheduler(vllm_config, *arguments, **named)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._tracer: Tracer | None = None
        address = env.trace_socket()
        if address is None:
            logger.warning("Eagle3 Lab: tracing is off, EAGLE3_LAB_TRACE_SOCKET is not set")
            return
        try:
            draft_probs = confidence.support(self.vllm_config)
            if draft_probs[0]:
                confidence.install()
        except Exception as error:  # (private parts of vLLM)
            logger.exception("Eagle3 Lab: draft probabilities are off")
            draft_probs = (False, f"Looking for them failed with vLLM {vllm_version}: {type(error).__name__}: {error}")
        try:
            timing.install()
        except Exception:  # (private parts of vLLM)
            logger.exception("Eagle3 Lab: the parts of a step are not timed with vLLM %s", vllm_version)
        self._tracer = Tracer(Publisher(address), self.requests, draft_probs)

    def _watch(self, hook: str, *arguments: Any) -> None:
        """Call the tracer; an error in it must not reach the engine."""
        tracer = self._tracer
        if tracer is None or tracer.reason is not None:
            return
        try:
            getattr(tracer, hook)(*arguments)
        except Exception as error:
            logger.exception("Eagle3 Lab: tracing failed in %s", hook)
            tracer.off(f"Tracing failed with vLLM {vllm_version}: {type(error).__name__}: {error}")

    def add_request(self, request: Any) -> None:
        """As vLLM's."""
        super().add_request(request)
        self._watch("added", request)

    def schedule(self, *arguments: Any, **named: Any) -> Any:
        """As vLLM's."""
        output = super().schedule(*arguments, **named)
        if self._tracer is not None and self._tracer.live:
            self._watch("scheduled", output)
        return output

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """As vLLM's."""
        if self._tracer is not None and self._tracer.live:
            self._watch("drafted", draft_token_ids)
        super().update_draft_token_ids(draft_token_ids)
        if self._tracer is not None and self._tracer.live:
            self._watch("proposed", draft_token_ids)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """As vLLM's."""
        if self._tracer is None or not self._tracer.live:
            return super().update_from_output(scheduler_output, model_runner_output)
        self._watch("sampled", scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._watch("updated", scheduler_output, outputs)
        return outputs

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> Any:
        """As vLLM's."""
        finished = super().finish_requests(request_ids, finished_status)
        if self._tracer is not None and self._tracer.live:
            self._watch("finished", str(RequestStatus.get_finished_reason(finished_status)))
        return finished

    def shutdown(self) -> None:
        """As vLLM's."""
        super().shutdown()
        if self._tracer is not None:
            self._tracer.publisher.close()


def refusal(vllm_config: Any) -> str:
    """Why the steps of an engine of this configuration, and of this vLLM, cannot be read; "" where they can."""
    if vllm_config.scheduler_config.async_scheduling:
        return ASYNC
    if vllm_config.speculative_config is not None and getattr(vllm_config, "use_v2_model_runner", False):
        return RUNNER_V2
    changed = [name for name, expected in HOOKS.items() if _parameters(name)[: len(expected)] != expected]
    if changed:
        return f"vLLM {vllm_version} has another Scheduler.{' and '.join(changed)} than the plugin knows (0.24 to 0.33)."
    return ""


def _parameters(method: str) -> list[str]:
    found = getattr(Scheduler, method, None)
    return list(inspect.signature(found).parameters) if found is not None else []


def _refuse(reason: str) -> None:
    """Tell the API server that this engine does not trace."""
    logger.warning("Eagle3 Lab: tracing is off. %s", reason)
    if address := env.trace_socket():
        Publisher(address).send([Hello(vllm=vllm_version, tracing=(False, reason), draft_probs=(False, reason))])
