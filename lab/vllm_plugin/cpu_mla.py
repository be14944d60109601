"""MLA and Eagle3 in one engine on a CPU: an attention backend that shares its KV-cache blocks with the draft's, and verifies K+1 tokens.

Stock vLLM cannot: its CPU MLA kernel reads blocks of exactly 16 tokens, the Llama-type draft's attention blocks of a multiple of 32, both
share a KV-cache group, and `select_common_block_size` (`vllm/v1/worker/utils.py`) finds none. AITER MLA had the same conflict with 1 and
multiples of 16, and vLLM's pull request 39616 resolved it by an expansion that this backend does for the CPU:

* It accepts any multiple of 16. A cache block of K tokens is read as K / 16 blocks of the kernel's size: block b becomes the blocks
  b K/16 ... b K/16 + K/16 - 1, and the same memory is viewed that way (`expand`).
* The kernel computes one token a row, up to that row's length. The K+1 tokens of a verification are as many rows, and row j of a request
  whose query has q tokens sees its sequence less the q - 1 - j tokens behind it (`rows`). Without that, every draft token would see the
  ones after it.
* The platform sets the block size of MLA models to 16 whatever was asked for (`vllm/platforms/cpu.py`, `check_and_update_config`). The
  one patch here gives the size back: what the user named, or 32.

Registered through vLLM's public registry, in every process of a server whose environment has EAGLE3_LAB_CPU_MLA=1, which the MLA recipe's
lanes set: other servers keep vLLM's own. `support` says where it stands down: another platform, or a vLLM that was not read. On a CPU with
AMX vLLM prefers another backend, which takes multiples of 32 and has no conflict; this one is used there when the server is told
`--attention-backend CPU_MLA`, as the recipe does, and else stands down and says so in the log.
"""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

from lab import env

logger = logging.getLogger("vllm.eagle3_lab")

KERNEL_BLOCK = 16  # tokens; csrc/cpu/mla_decode.cpp is compiled for it
USUAL_BLOCK = 32  # the smallest that the CPU's ordinary attention prefers
VERSIONS = ((0, 32),)  # releases whose platform and builder were read
BACKEND = "lab.vllm_plugin.cpu_mla_backend.SharedBlocksMLABackend"


def support() -> tuple[bool, str]:
    """Whether the backend can be used here, and every reason why not."""
    from vllm import __version__
    from vllm.platforms import current_platform

    reasons = []
    if not current_platform.is_cpu():
        return False, "It is for CPUs; this platform has MLA backends of its own."
    release = tuple(int(part) for part in __version__.split(".")[:2] if part.isdigit())
    if release not in VERSIONS:
        reasons.append(f"vLLM {__version__} was not checked for it.")
        return False, " ".join(reasons)
    update = inspect.unwrap(current_platform.check_and_update_config)
    if list(inspect.signature(update).parameters)[-1:] != ["vllm_config"]:
        reasons.append(f"vLLM {__version__} has another {type(current_platform).__name__}.check_and_update_config.")
    return not reasons, " ".join(reasons)


def register() -> None:
    """Called by the plugin's entry point in every process, any number of times."""
    if not env.cpu_mla():
        return
    ok, reason = support()
    if not ok:
        logger.warning("Eagle3 Lab's MLA backend stands down. %s", reason)
        return
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_MLA, BACKEND)
    free_block_size(type(current_platform))


def free_block_size(platform: Any) -> None:
    """Let an MLA model on `platform` (vLLM's CPU platform class) have the block size that was asked for, or `USUAL_BLOCK`; once."""
    if vars(platform).get("_eagle3_lab_mla"):
        return
    platform._eagle3_lab_mla = True
    original = platform.check_and_update_config.__func__

    @functools.wraps(original)
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        cache = vllm_config.cache_config
        asked = cache.block_size if getattr(cache, "user_specified_block_size", False) else None
        original(cls, vllm_config)
        model = vllm_config.model_config
        # 16 is what vLLM sets for the kernel that this backend wraps, and for no other. For a draft it comes here again with the same cache
        # and no backend named, and with AMX takes that for a wish to have its own, of 128.
        if model is not None and model.use_mla and (cache.block_size == KERNEL_BLOCK or vars(cache).get("_eagle3_lab_mla")):
            if asked is not None and asked % KERNEL_BLOCK:
                raise ValueError(f"--block-size {asked} is no multiple of {KERNEL_BLOCK}, which the CPU's MLA kernel reads.")
            cache.block_size = asked or USUAL_BLOCK
            vars(cache)["_eagle3_lab_mla"] = True
        elif model is not None and getattr(getattr(model, "hf_config", None), "model_type", None) == "deepseek_v4":
            logger.info(
                "Eagle3 Lab's MLA backend stands down: vLLM gives DeepSeek-V4 backends of its own, for blocks of %s tokens.",
                cache.block_size,
            )
        elif model is not None and model.use_mla:
            logger.info(
                "Eagle3 Lab's MLA backend stands down: on a CPU with AMX vLLM takes its own, whose blocks of %s tokens a draft can share."
                " --attention-backend CPU_MLA asks for the lab's.",
                cache.block_size,
            )

    platform.check_and_update_config = classmethod(check_and_update_config)
