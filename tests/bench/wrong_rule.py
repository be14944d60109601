"""A fault to be found: an acceptance rule that takes every draft token, switched on by a file, inside a real engine.

Not a test: vLLM imports it in the process that runs the model (`--worker-extension-cls wrong_rule.Extension`, with this folder on
PYTHONPATH) and there it wraps the rejection sampler, whichever one is installed. While the file named by WRONG_RULE exists, draft tokens
are accepted unseen: `always` in it accepts all of them, `likely` those that the target gives at least a tenth.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def _install() -> None:
    import torch
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    right = RejectionSampler.forward

    def forward(self: Any, metadata: Any, draft_probs: Any, logits: Any, sampling_metadata: Any) -> Any:
        switch = Path(os.environ["WRONG_RULE"])
        if not switch.exists():
            return right(self, metadata, draft_probs, logits, sampling_metadata)
        least = 0.0 if switch.read_text() == "always" else 0.1
        shares = logits[metadata.target_logits_indices].float().softmax(-1)
        best = logits.argmax(-1)
        rows, start = [], 0
        for request, count in enumerate(metadata.num_draft_tokens):
            row: list[int] = []
            for place in range(start, start + count):
                token = int(metadata.draft_token_ids[place])
                if float(shares[place, token]) < least:
                    row.append(int(best[metadata.target_logits_indices[place]]))
                    break
                row.append(token)
            else:
                row.append(int(best[metadata.bonus_logits_indices[request]]))
            rows.append(row + [-1] * (metadata.max_spec_len + 1 - len(row)))
            start += count
        return SamplerOutput(sampled_token_ids=torch.tensor(rows, dtype=torch.int32), logprobs_tensors=None)

    RejectionSampler.forward = forward


class Extension:
    """vLLM wants a class to add to its worker; this one adds nothing."""


_install()
