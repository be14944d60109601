"""Rules about a server that runs: what its counters and its own description give away."""

from __future__ import annotations

from collections.abc import Iterator

from lab.doctor.rule import SEEN, Found, rule
from lab.doctor.subject import TRUE, Subject

COUNTERS = "v1/spec_decode/metrics.py:SpecDecodingProm"
#: Steps with a draft below which acceptance is not judged: at 200 the standard error of a rate of 3% is 1.2 points.
ENOUGH = 200
NEAR_ZERO, TOO_GOOD, COLLAPSE = 0.03, 0.98, 0.10


def _rates(s: Subject) -> list[float]:
    """Acceptance by draft position; empty where too little was drafted."""
    server = s.server
    if server is None or server.drafts < ENOUGH:
        return []
    return [count / server.drafts for count in server.counters.accepted_per_pos]


@rule(
    "acceptance-near-zero",
    "error",
    "Next to nothing is accepted",
    reads=COUNTERS,
    fields=("spec_decode_num_accepted_tokens",),
    issues=("v#50170", "v#27732", "sg#27908", "v#47854"),
)
def acceptance_near_zero(s: Subject) -> Iterator[Found]:
    """A healthy server with a draft that is never right: its vocabulary map or head is missing, it reads other layers than it was
    trained on, its projection is read as FP8, or its attention kernel is broken. It is then slower than no draft.
    """
    server = s.server
    if server is not None and server.drafts >= ENOUGH and server.counters.draft_tokens:
        rate = server.counters.accepted_tokens / server.counters.draft_tokens
        if rate < NEAR_ZERO:
            yield Found(
                f"{server.counters.accepted_tokens} of {server.counters.draft_tokens} draft tokens accepted ({rate:.1%})",
                "eagle3-lab doctor with the server's command line, on its machine: it looks at the draft's files",
            )


@rule(
    "first-position",
    "error",
    "The first draft token is rejected",
    reads=COUNTERS,
    fields=("accepted_tokens_per_pos",),
    issues=("v#43671", "v#38111"),
)
def first_position(s: Subject) -> Iterator[Found]:
    """The first token depends on the target's states alone. If it is rarely right while later ones are not much worse, states are
    wrong: layer ids off by one, norms not applied, no chat template.
    """
    rates = _rates(s)
    if rates and NEAR_ZERO / 3 < rates[0] < 0.25 and sum(rates) / len(rates) >= NEAR_ZERO:
        yield Found(
            f"position 1: {rates[0]:.0%} of {s.server.drafts if s.server else 0} drafts",
            "Check the layer ids and norms of the draft, and that prompts use the chat template.",
            "warning" if rates[0] >= COLLAPSE else None,
        )


@rule(
    "later-positions",
    "error",
    "Acceptance collapses after the first draft token",
    reads=COUNTERS,
    fields=("accepted_tokens_per_pos",),
    issues=("v#38111", "v#47854"),
)
def later_positions(s: Subject) -> Iterator[Found]:
    """From the second token on the draft feeds on its own output. If the first is often right and the second almost never, that way is
    broken: `norm_output` not set, positions or the draft's KV cache wrong.
    """
    rates = _rates(s)
    if len(rates) > 1 and rates[0] >= 0.3 and rates[1] < COLLAPSE * rates[0]:
        yield Found(
            f"position 1: {rates[0]:.0%}, position 2: {rates[1]:.1%}",
            "Check norm_output and norm_before_residual, and try another attention_backend for the draft.",
        )


@rule("too-good", "error", "Acceptance is too good to be true", reads=COUNTERS, fields=("accepted_tokens_per_pos",), issues=("a#2720",))
def too_good(s: Subject) -> Iterator[Found]:
    """Each position is accepted only if all before it were, so the rates fall. All near one means that the target agrees with whatever
    it is asked: a verification kernel that gives every row the first one's answer, synthetic acceptance, or text that repeats itself.
    """
    rates = _rates(s)
    if len(rates) > 1 and rates[-1] > TOO_GOOD:
        yield Found(
            f"position {len(rates)}: {rates[-1]:.1%}",
            "Compare the text with the baseline's at temperature 0; with AITER MLA use K = 1 or 3.",
        )


@rule(
    "server-prefix-caching",
    "warning",
    "The prefix cache is on during a measurement",
    reads="config/cache.py:CacheConfig.metrics_info",
    fields=("key",),
    issues=("v#52884", "v#41838"),
)
def server_prefix_caching(s: Subject) -> Iterator[Found]:
    """Prompts that were seen before cost next to nothing then: speeds of repeated runs are not comparable."""
    server = s.server
    if server is not None and (server.cache.get("enable_prefix_caching", "").lower() == "true" or server.prefix_hits > 0):
        share = f", {server.prefix_hits} of {server.prefix_queries} prompt tokens came from it" if server.prefix_queries else ""
        yield Found(
            f"enable_prefix_caching is {server.cache.get('enable_prefix_caching', 'not told')}{share}",
            "Start it with --no-enable-prefix-caching.",
        )


@rule(
    "server-aiter-off",
    "warning",
    "The server runs without AITER",
    reads="entrypoints/serve/dev/server_info/api_router.py:show_server_info",
    fields=("vllm_env",),
    issues=("v#56945",),
)
def server_aiter_off(s: Subject) -> Iterator[Found]:
    """`VLLM_ROCM_USE_AITER` is off unless set, also in public images; the server says so in its development mode."""
    server = s.server
    if server is not None and server.rocm and server.environment.get("VLLM_ROCM_USE_AITER", "").lower() not in TRUE:
        yield Found(
            f"VLLM_ROCM_USE_AITER is {server.environment.get('VLLM_ROCM_USE_AITER') or 'not set'}",
            "export VLLM_ROCM_USE_AITER=1, then start it again.",
        )


@rule(
    "server-draft-backend",
    "error",
    "The draft's attention runs on a backend of another platform",
    reads="entrypoints/serve/dev/server_info/api_router.py:show_server_info",
    fields=("vllm_config",),
    issues=("v#47854",),
)
def server_draft_backend(s: Subject) -> Iterator[Found]:
    """The server's own configuration names the draft's attention backend where one was asked for; on ROCm only some of them are right."""
    server = s.server
    speculative = server.config.get("speculative_config") if server is not None else None
    backend = str(speculative.get("attention_backend") or "").upper().rpartition(".")[2] if isinstance(speculative, dict) else ""
    if server is not None and server.rocm and backend:
        if backend in ("FLASH_ATTN", "FLASHINFER"):
            yield Found(f"attention_backend of the draft is {backend}", '"attention_backend": "TRITON_ATTN" in --speculative-config')
        elif backend == "ROCM_ATTN":
            yield Found(
                "attention_backend of the draft is ROCM_ATTN", 'If acceptance is low: "attention_backend": "TRITON_ATTN"', "warning"
            )


@rule("server-no-speculation", "note", "The server has drafted nothing", reads=COUNTERS, fields=("num_drafts",))
def server_no_speculation(s: Subject) -> Iterator[Found]:
    """Without drafts there is no acceptance to judge: it serves without speculation, or nobody asked it anything yet."""
    server = s.server
    if server is not None and server.drafts < ENOUGH:
        yield Found(f"{server.drafts} steps with a draft so far", f"Send it some prompts (about {ENOUGH} steps), then ask again.")


@rule(
    "server-crowded",
    "warning",
    "The KV cache is full",
    reads="v1/metrics/loggers.py:PrometheusStatLogger",
    fields=("num_preemptions", "kv_cache_usage_perc"),
    issues=(SEEN,),
)
def server_crowded(s: Subject) -> Iterator[Found]:
    """Requests that do not fit are stopped and computed again later: speed then measures the size of the cache, and speculation, which
    reserves K slots for each sequence, makes it worse.
    """
    server = s.server
    if server is not None and (server.preemptions or server.kv_usage > 0.95):
        yield Found(
            f"{server.preemptions} preemptions, {server.kv_usage:.0%} of the cache in use",
            "Fewer sequences at once (--max-num-seqs), or more memory for the cache.",
        )
