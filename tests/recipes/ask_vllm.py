"""Run as a process of its own: what vLLM's parser, configuration classes and block-size selection make of commands.

Reads from stdin a list of `[name, argv]`, writes a JSON object a line. Each model and draft is a folder with a `config.json`; nothing
is loaded. The platform here is the CPU, so what ROCm decides by itself (backends, its default block size) is asked of the real backend
classes instead, and is in `blocks`: for each attention backend that the draft may get, what vLLM's own selection finds.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from vllm.config.cache import CacheConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.worker.utils import select_common_block_size

BACKENDS = "vllm.v1.attention.backends"
AITER_MLA = f"{BACKENDS}.mla.rocm_aiter_mla.AiterMLABackend"
AITER_FA = f"{BACKENDS}.rocm_aiter_fa.AiterFlashAttentionBackend"
#: What a Llama-type draft can get on ROCm.
STANDARD = (
    f"{BACKENDS}.rocm_attn.RocmAttentionBackend",
    f"{BACKENDS}.rocm_aiter_unified_attn.RocmAiterUnifiedAttentionBackend",
    f"{BACKENDS}.triton_attn.TritonAttentionBackend",
)


def found(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def blocks(arguments: Any, config: Any) -> dict[str, int | str]:
    """For each pair of backends that the lane may get on ROCm: the common block size, or vLLM's sentence that there is none."""
    size = arguments.block_size or CacheConfig.DEFAULT_BLOCK_SIZE
    if str(getattr(arguments.attention_backend, "name", arguments.attention_backend)) == "ROCM_AITER_FA":
        standard: tuple[str, ...] = (AITER_FA,)
    else:
        standard = STANDARD
    targets = (AITER_MLA,) if config.model_config.use_mla else standard
    speculative = config.speculative_config
    drafts: tuple[str | None, ...] = (None,)
    if speculative is not None:
        drafts = (AITER_MLA,) if speculative.draft_model_config.use_mla else standard
    answers: dict[str, int | str] = {}
    for target in targets:
        for draft in drafts:
            chosen = [found(one) for one in (target, draft) if one]
            try:
                answer: int | str = select_common_block_size(size, chosen)
            except ValueError as error:
                answer = str(error)
            answers[" + ".join(one.get_name() for one in chosen)] = answer
    return answers


def ask(argv: list[str]) -> dict[str, Any]:
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    arguments.model = arguments.model_tag  # as `vllm serve` does
    config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config()
    speculative = config.speculative_config
    return {
        "port": arguments.port,
        "served": arguments.served_model_name,
        "eager": config.model_config.enforce_eager,
        "tp": config.parallel_config.tensor_parallel_size,
        "ep": config.parallel_config.enable_expert_parallel,
        "length": config.model_config.max_model_len,
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "batched": arguments.max_num_batched_tokens,
        "mla": config.model_config.use_mla,
        "k": speculative and speculative.num_speculative_tokens,
        "method": speculative and speculative.method,
        "draft_tp": speculative and speculative.draft_parallel_config.tensor_parallel_size,
        "draft_mla": speculative and speculative.draft_model_config.use_mla,
        "blocks": blocks(arguments, config),
    }


def main() -> None:
    for name, argv in json.load(sys.stdin):
        try:
            answer = ask(argv)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the test fails with it
            answer = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
        print(json.dumps({"name": name, **answer}), flush=True)


if __name__ == "__main__":
    main()
