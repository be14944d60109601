"""Cheaper speculation on a CPU: which of vLLM's methods are replaced, where, and when the lab stands down.

A baseline step of a small model takes 15 to 25 ms on two cores, so the milliseconds around K draft passes decide the speed-up. Five
methods of vLLM are replaced by equal ones without the detours made for GPUs (`cpu_sampling`, `cpu_drafting`); each keeps vLLM's method
and calls it whenever a request or a model is not the plain case. What the target computes is never touched, and tests compare every
replacement with the method it replaces.

They are not vLLM's public interface. So they are installed only on a CPU, in the process that runs the model, for releases whose methods
were read, with the expected signatures and operators; anything else leaves vLLM as it is and says why in the log. Servers without a draft
never call these methods. `EAGLE3_LAB_CPU_SPEED=0` switches it off.
"""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import os
from typing import Any

from lab.env import cpu_speed

logger = logging.getLogger("vllm.eagle3_lab")

#: Releases whose methods were read and are tested.
VERSIONS = ((0, 32),)
#: Operators of vLLM's CPU library that the replacements call.
OPERATORS = ("greedy_argmax", "eagle_step_slot_mapping_metadata_kernel_impl")
#: The methods replaced, with the parameters that the replacements know.
METHODS = {
    "vllm.v1.sample.rejection_sampler.RejectionSampler.forward": ["self", "metadata", "draft_probs", "logits", "sampling_metadata"],
    "vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer._greedy_sample": ["self", "hidden_states"],
    "vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer.prepare_next_token_ids_padded": [
        "self",
        "sampled_token_ids",
        "requests",
        "gpu_input_batch",
        "discard_request_mask",
    ],
    "vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer.prepare_inputs_padded": [
        "self",
        "common_attn_metadata",
        "spec_decode_metadata",
        "valid_sampled_tokens_count",
    ],
    "vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer.propose": [
        "self",
        "num_speculative_tokens",
        "target_token_ids",
        "target_positions",
        "target_hidden_states",
        "next_token_ids",
        "token_indices_to_sample",
        "common_attn_metadata",
        "sampling_metadata",
        "mm_embed_inputs",
        "num_rejected_tokens_gpu",
        "slot_mappings",
    ],
}


def runs_the_model() -> bool:
    """Whether this process is where vLLM runs the model: its worker, or the engine where they are one process."""
    name = multiprocessing.current_process().name
    alone = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") == "0"
    return name.startswith("VllmWorker") or (alone and name.startswith("EngineCore"))


def support() -> tuple[bool, str]:
    """Whether the replacements may be installed in this process, and every reason why not."""
    from vllm import __version__
    from vllm.platforms import current_platform

    reasons = []
    if not cpu_speed():
        reasons.append("EAGLE3_LAB_CPU_SPEED=0.")
    if not current_platform.is_cpu():
        reasons.append(f"The platform is {current_platform.device_name}, not a CPU.")
    release = tuple(int(part) for part in __version__.split(".")[:2] if part.isdigit())
    if release not in VERSIONS:
        reasons.append(f"vLLM {__version__} was not checked for it.")
    return not reasons, " ".join(reasons)


def misfits() -> list[str]:
    """What of this vLLM is not as the replacements know it (imports the model runner's modules)."""
    import torch

    found = []
    for path, expected in METHODS.items():
        module, owner, name = path.rsplit(".", 2)
        try:
            method: Any = getattr(getattr(__import__(module, fromlist=[owner]), owner), name)
        except (ImportError, AttributeError) as error:
            found.append(f"There is no {path} ({error}).")
            continue
        if list(inspect.signature(method).parameters) != expected:
            found.append(f"{path} takes other arguments.")
    # Only now: importing those modules is what loads vLLM's library of operators.
    return found + [f"vLLM's library has no {name}." for name in OPERATORS if not hasattr(torch.ops._C, name)]


def register() -> None:
    """Install where it belongs; called by the plugin's entry point in every process, any number of times."""
    if not runs_the_model():
        return
    ok, reason = support()
    if ok:
        reason = " ".join(misfits())
        if not reason:
            install()
            return
    logger.info("Eagle3 Lab leaves speculation on this CPU to vLLM: %s", reason)


def install() -> None:
    """Replace the methods in this process, once."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    from lab.vllm_plugin import cpu_compile, cpu_drafting, cpu_sampling

    if getattr(SpecDecodeBaseProposer, "_eagle3_lab_cpu_speed", False):
        return
    SpecDecodeBaseProposer._eagle3_lab_cpu_speed = True
    cpu_sampling.install_rejection()
    cpu_sampling.install_draft_choice()
    cpu_drafting.install()
    cpu_compile.install()
    logger.info("Eagle3 Lab: speculation on this CPU takes the short ways (EAGLE3_LAB_CPU_SPEED=0 switches them off).")
