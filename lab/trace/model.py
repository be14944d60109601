"""The wire format of a trace: what one engine step proposed and what the target decided.

A `Step` is one engine iteration of one request, made by the plugin inside the engine and streamed as JSON. A `Request` is a prompt,
its steps and what the client saw. A `Trace` is a saved file of requests with provenance (see `io.py`). Token ids are the target's
vocabulary ids; times are seconds. The format carries a version: readers refuse a newer one and say so. A new field with a default needs no
new version: older readers pass over it, and in older files it has its default.

How a verify step is read (Leviathan et al. 2023, algorithm 1; vLLM `v1/sample/rejection_sampler.py`): the target scores all K draft
tokens in one pass and samples up to K + 1 tokens: the longest accepted prefix of the draft, then one token of its own. That last one is
the *recovered* token where a draft token was rejected, or the *bonus* token where all were accepted.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

FORMAT = "eagle3-lab-trace"
VERSION = 1

Phase = Literal["prefill", "decode"]
Mark = Literal["accepted", "rejected", "unreached", "recovered", "bonus", "plain"]


class Step(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One engine step of one request, exactly as the scheduler saw it."""

    #: The trace that this step belongs to: the value the client sent as `vllm_xargs={"eagle3_trace": ...}`.
    trace: str
    #: Engine-internal request id (n > 1 makes several per trace).
    request: str
    #: Steps of this request, counted from 0, chunks of prefill included.
    index: int
    phase: Phase
    #: Wall-clock seconds (`time.time()`) when the step was scheduled and when its output was taken.
    started: float
    ended: float
    #: Draft token ids that the target verified in this step, in order; empty without speculation and in prefill. An id of -1 is vLLM's
    #: padding of a request that joins a running batch with one token to compute: nothing proposed it, vLLM counts it as drafted.
    draft: tuple[int, ...] = ()
    #: The draft's own probability of each of `draft`; None where the plugin could not read it.
    draft_probs: tuple[float, ...] | None = None
    #: Draft token ids that were proposed for this place and, because the request asked for it, not verified: the target went on alone.
    withheld: tuple[int, ...] = ()
    #: Ids that the target sampled, before stop handling: accepted draft tokens, then one of its own. Empty in a partial prefill.
    sampled: tuple[int, ...] = ()
    #: How many of `sampled` reached the output; fewer than `len(sampled)` where a stop cut the rest.
    kept: int = 0
    #: Tokens whose KV was computed before this step, and tokens of this request scheduled in it (drafts included).
    context: int = 0
    scheduled: int = 0
    #: Requests and tokens in the whole step (all requests, traced or not).
    batch_requests: int = 1
    batch_tokens: int = 0
    #: Seconds of the whole step (all requests) in the target's pass over the scheduled tokens, in sampling and acceptance, and in the
    #: draft's passes for the *next* step (0 without a draft); None where the engine was not timed in parts. What is left of
    #: `ended - started` is scheduling and messages.
    verify_s: float | None = None
    accept_s: float | None = None
    draft_s: float | None = None
    #: "stop", "length", "abort", ... on the request's last step.
    finish: str | None = None

    @property
    def accepted(self) -> int:
        """Accepted draft tokens as vLLM counts them (`num_accepted_tokens`): those past a stop are counted too."""
        return max(len(self.sampled) - 1, 0) if self.draft else 0

    def draft_marks(self) -> tuple[Mark, ...]:
        """A mark for each draft token: `accepted`, the first `rejected`, and those after it `unreached`."""
        accepted: list[Mark] = ["accepted"] * self.accepted
        others: list[Mark] = ["unreached"] * (len(self.draft) - len(accepted))
        if others:
            others[0] = "rejected"
        return (*accepted, *others)

    def sampled_marks(self) -> tuple[Mark, ...]:
        """A mark for each sampled token: `accepted` ones, then the target's own (`recovered`, `bonus`, or `plain` without a draft)."""
        if not self.sampled:
            return ()
        own: Mark = "plain" if not self.draft else "bonus" if self.accepted == len(self.draft) else "recovered"
        marks: list[Mark] = ["accepted"] * self.accepted
        return (*marks, own)

    def _repr_html_(self) -> str:
        """For notebooks: the row of chips, with ids, since only the step's request knows their text."""
        from lab.trace.html import step_html  # late: the plugin needs none of it

        return step_html(self)


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """Said in a stream when steps were lost on the way, rather than ever holding the engine up."""

    dropped: int


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """One of the target's top candidates at a position. `id` is -1 where the server gives text only."""

    text: str
    logprob: float
    id: int = -1


class Request(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A prompt, its steps, and what the client saw of the answer."""

    trace: str
    lane: str
    #: What the person typed, and the ids the target was given (chat template applied).
    prompt: str
    prompt_ids: tuple[int, ...] = ()
    steps: list[Step] = msgspec.field(default_factory=list)
    #: Bytes of every token id that occurs, as hex: byte-level tokens need not be whole UTF-8 characters.
    pieces: dict[int, str] = msgspec.field(default_factory=dict)
    #: Top alternatives of the target for each emitted token, when asked for.
    alternatives: list[list[Alternative]] = msgspec.field(default_factory=list)
    text: str = ""
    #: Ids of the answer as the server reported them (`return_token_ids`), end-of-sequence included; () where it did not.
    ids: tuple[int, ...] = ()
    #: Sampling settings and K as sent: temperature, max_tokens, seed, k, ...
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    #: Client's clock, seconds since it sent the request: first token, last token.
    ttft: float | None = None
    elapsed: float | None = None
    #: Token counts from the server's usage record; None if it never came.
    usage_prompt: int | None = None
    usage_completion: int | None = None
    finish: str | None = None
    #: Drafted and accepted tokens of each verify step, in order, as the *server* counted them (vLLM's `--per-request-spec-decode-metrics
    #: detailed`): all that is known of the steps where the plugin does not run. See `counted.py`.
    counted: tuple[tuple[int, int], ...] = ()
    #: Steps lost on the way; counts made from this request are then incomplete, and are shown as such.
    dropped: int = 0
    error: str | None = None

    def output_ids(self) -> tuple[int, ...]:
        """Ids of the answer: as the server reported them, else what each step kept."""
        return self.ids or tuple(token for step in self.steps for token in step.sampled[: step.kept])

    def _repr_html_(self) -> str:
        """For notebooks: the coloured answer and its steps."""
        from lab.trace.html import request_html

        return request_html(self)


class Trace(msgspec.Struct, kw_only=True):
    """A saved set of requests with provenance."""

    provenance: dict[str, Any]
    requests: list[Request] = msgspec.field(default_factory=list)
    format: str = FORMAT
    version: int = VERSION

    def _repr_html_(self) -> str:
        """For notebooks: where the trace comes from, and its requests."""
        from lab.trace.html import trace_html

        return trace_html(self)
