"""Two faults of vLLM on a CPU that make a speculating server wrong or dead, and their repairs.

* **Temperature.** The rejection sampler spreads each request's temperature, top-k and top-p over its draft tokens with a kernel whose CPU
  version converts the output tensor to int64, fills the copy and throws it away. Logits are then divided by uninitialised memory: every
  answer with a temperature above 0 is noise, and so is any greedy one in the same batch. `expand` does what the Triton kernel does.
* **Seeds.** A request with its own seed has a random generator, which vLLM rewinds for tokens sampled from an unfinished prompt by moving
  its offset. A CPU generator has no offset: the engine dies as soon as such a prompt is computed in chunks. `Generator` takes the call;
  draws for an unfinished prompt are then not taken back, so a seed repeats an answer only while the prompt is cut into the same chunks.

Installed only on a CPU, in the process that runs the model. Both replacements are equal to what a mended vLLM would do, so they need no
version; where vLLM's function takes other arguments it is left alone, and the log says so.
"""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

import torch

from lab.vllm_plugin.cpu_speed import runs_the_model

logger = logging.getLogger("vllm.eagle3_lab")


def expand(x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0) -> torch.Tensor:
    """vLLM's `expand_batch_to_tokens`: `x` [B] repeated to [num_tokens], request i as often as it has draft tokens.

    `cu_num_tokens` [B] holds cumulative counts; values equal to `replace_from` become `replace_to` (a greedy temperature of 0 to 1).
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(values, counts.to(torch.int64), output_size=num_tokens)


class Generator(torch.Generator):
    """A CPU generator that accepts being rewound, and stays where it is."""

    def get_offset(self) -> int:
        """CPU generators have no offset; vLLM only does arithmetic with it."""
        return 0

    def set_offset(self, offset: int) -> None:
        """Nothing to move."""


def register() -> None:
    """Called by the plugin's entry point in every process, any number of times."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and runs_the_model():
        install()


def install() -> None:
    """Repair this process, once."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.worker.gpu_input_batch import InputBatch

    stock = getattr(rejection_sampler, "expand_batch_to_tokens", None)
    if stock is None or list(inspect.signature(stock).parameters) != list(inspect.signature(expand).parameters):
        logger.warning("Eagle3 Lab does not know how this vLLM spreads temperatures over draft tokens; on a CPU they may be wrong.")
    else:
        rejection_sampler.expand_batch_to_tokens = expand

    original = InputBatch.add_request
    if vars(original).get("eagle3_lab"):
        return

    @functools.wraps(original)
    def add_request(self: Any, request: Any) -> Any:
        generator = getattr(request, "generator", None)
        if generator is not None and not isinstance(generator, Generator):
            request.generator = Generator(device=generator.device)
            request.generator.set_state(generator.get_state())
        return original(self, request)

    vars(add_request)["eagle3_lab"] = True
    InputBatch.add_request = add_request
