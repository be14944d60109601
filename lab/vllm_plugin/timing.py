"""Where a step's time goes, measured inside vLLM's worker: the target's pass, the acceptance of its tokens, and the draft's passes.

vLLM runs a step as `execute_model` (the target over every scheduled token, logits included), then `sample_tokens` (the acceptance rule,
bookkeeping), and in the middle of that `propose_draft_token_ids` (the draft's K passes, for the *next* step). The three methods of the
model runner are wrapped with a clock; what they compute and return is left as it is. The times leave the worker as an attribute of the
`ModelRunnerOutput`, which survives pickling to the scheduler. The rest of a step (scheduling, messages) is its length less these.

Only where the host's clock means something: on a CPU a call returns when its arithmetic is done, on a GPU kernels still run then, so there
nothing is reported (`support` says why). vLLM does not promise these methods: releases and signatures are checked before.
"""

from __future__ import annotations

import functools
import inspect
import time
from typing import Any, NamedTuple

#: Attribute of vLLM's `ModelRunnerOutput`.
_ATTRIBUTE = "eagle3_times"
#: Releases whose methods were read.
VERSIONS = ((0, 32),)
_SIGNATURES = {
    "execute_model": ["self", "scheduler_output"],
    "sample_tokens": ["self", "grammar_output"],
    "propose_draft_token_ids": ["self", "scheduler_output"],
}


class Times(NamedTuple):
    """Seconds of one engine step, all requests in it together."""

    #: The target's pass; sampling and acceptance, bookkeeping included; the draft's passes (0 without any).
    verify: float
    accept: float
    draft: float


def taken(output: Any) -> Times | None:
    """The times that travel with a `ModelRunnerOutput`; None without any."""
    return getattr(output, _ATTRIBUTE, None)


def support() -> tuple[bool, str]:
    """Whether steps can be timed in parts here, and every reason why not."""
    from vllm import __version__
    from vllm.platforms import current_platform

    reasons = []
    if not current_platform.is_cpu():
        reasons.append("On a GPU the host's clock does not see when a kernel ends.")
    release = tuple(int(part) for part in __version__.split(".")[:2] if part.isdigit())
    if release not in VERSIONS:
        reasons.append(f"vLLM {__version__} was not checked for it.")
        return False, " ".join(reasons)
    try:
        runner = _runner()
    except ImportError as error:
        return False, f"vLLM {__version__} has another model runner ({error})."
    for name, expected in _SIGNATURES.items():
        method = getattr(runner, name, None)
        if method is None or list(inspect.signature(method).parameters)[: len(expected)] != expected:
            reasons.append(f"vLLM {__version__} has another {runner.__name__}.{name}.")
    return not reasons, " ".join(reasons)


def _runner() -> Any:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return GPUModelRunner


def install() -> bool:
    """Wrap the methods in this process, once; whether steps are timed from now on."""
    if not support()[0]:
        return False
    wrap(_runner())
    return True


def wrap(runner: Any) -> None:
    """Put the clocks around the methods of a model runner class, once."""
    if vars(runner).get("_eagle3_lab_timed"):
        return
    runner._eagle3_lab_timed = True
    execute, sample, propose = runner.execute_model, runner.sample_tokens, runner.propose_draft_token_ids

    @functools.wraps(execute)
    def execute_model(self: Any, *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        result = execute(self, *arguments, **named)
        self._eagle3_verify, self._eagle3_draft = time.perf_counter() - began, 0.0
        return result

    @functools.wraps(sample)
    def sample_tokens(self: Any, *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        result = sample(self, *arguments, **named)
        took = time.perf_counter() - began
        verify, draft = getattr(self, "_eagle3_verify", None), getattr(self, "_eagle3_draft", 0.0)
        if verify is not None and hasattr(result, "sampled_token_ids") and hasattr(result, "__dict__"):
            setattr(result, _ATTRIBUTE, Times(round(verify, 6), round(max(took - draft, 0.0), 6), round(draft, 6)))
        self._eagle3_verify = None
        return result

    @functools.wraps(propose)
    def propose_draft_token_ids(self: Any, *arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        try:
            return propose(self, *arguments, **named)
        finally:
            self._eagle3_draft = time.perf_counter() - began

    runner.execute_model, runner.sample_tokens, runner.propose_draft_token_ids = execute_model, sample_tokens, propose_draft_token_ids
