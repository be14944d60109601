"""The child of the MLA tests: several engines of recipe smollm2-mla, one after another in one process.

It reads JSON: `{"jobs": [{"k", "dtype", "tokens", "seqs", "logprobs", "fault"}, ...], "prompts": [[ids], ...], "most": 48}`. K 0 is
the baseline, `tokens` the size of the KV cache, `seqs` how many requests run at once, `most` the tokens of each answer. The last line of
stdout is a list with `{"ids", "logprobs", "preemptions", "accepted"}` for each job. Engines are built from the lane's own command, and give
their requests to vLLM's own loop. Loading vLLM takes longer than everything else here, which is why one process does it once.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lab import checkpoints, recipes
from lab.serving.command import Lane, command

#: Bytes of KV cache a value takes.
BYTES = {"float32": 4, "bfloat16": 2}
MOST_POSITIONS = 256


def engine(k: int, dtype: str, tokens: int, seqs: int) -> Any:
    """vLLM's own loop over the lane with these settings."""
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    recipe = recipes.get("smollm2-mla")
    own = {"--dtype": dtype, "--kv-cache-memory-bytes": str(tokens * (30 * 576 + 2 * 3 * 64) * BYTES[dtype]), "--max-num-seqs": str(seqs)}
    flags = tuple((name, own.get(name, value)) for name, value in recipe.flags)
    lane = Lane(replace(recipe, flags=flags, max_model_len=MOST_POSITIONS), "bf16" if k else "none", k, traced=False)
    target = checkpoints.ensure(recipe.target)
    draft = checkpoints.ensure(recipe.drafts["bf16"]) if k else None
    made = command(lane, target=target, draft=draft, port=1)
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments, _server = parser.parse_known_args(made.argv[made.argv.index(target) + 1 :])
    arguments.model = target
    settings = {name: getattr(arguments, name) for name in EngineArgs.__dataclass_fields__ if hasattr(arguments, name)}
    return LLM(**{**settings, "disable_log_stats": False})


def run(job: dict[str, Any], prompts: Sequence[Sequence[int]], most: int) -> dict[str, Any]:
    """One engine, all prompts at once (or as many as `seqs` lets in)."""
    from vllm import SamplingParams

    loop = engine(job["k"], job["dtype"], job["tokens"], job["seqs"])
    wanted = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, logprobs=job["logprobs"] or None)
    done = loop.generate([{"prompt_token_ids": list(ids)} for ids in prompts], wanted, use_tqdm=False)
    outputs = [one.outputs[0] for one in done]
    counted = {one.name: getattr(one, "value", 0) for one in loop.get_metrics()}
    logprobs = [[place[token].logprob for token, place in zip(one.token_ids, one.logprobs, strict=True)] for one in outputs if one.logprobs]
    loop.llm_engine.engine_core.shutdown()
    del loop
    gc.collect()
    return {
        "ids": [list(one.token_ids) for one in outputs],
        "logprobs": logprobs,
        "preemptions": counted.get("vllm:num_preemptions", 0),
        "accepted": counted.get("vllm:spec_decode_num_accepted_tokens", 0),
    }


def plant(fault: str) -> None:
    """Break the backend on purpose: every row of a verification sees the whole sequence."""
    from lab.vllm_plugin import cpu_mla_backend

    whole = cpu_mla_backend.rows

    def rows(table: Any, lengths: Any, starts: Any) -> Any:
        found, _ = whole(table, lengths, starts)
        counts = starts[1:] - starts[:-1]
        return found, lengths.repeat_interleave(counts.to(lengths.device)).int()

    if fault == "whole lengths":
        cpu_mla_backend.rows = rows
    elif fault:
        raise ValueError(fault)


if __name__ == "__main__":
    asked = json.loads(sys.stdin.read())
    results = []
    for one in asked["jobs"]:
        plant(one["fault"])
        results.append(run(one, asked["prompts"], asked["most"]))
    print()
    print(json.dumps(results))
