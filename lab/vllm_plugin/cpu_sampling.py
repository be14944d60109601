"""Greedy choices on a CPU without the detours that a GPU needs: the target's acceptance test, and the draft's next token.

vLLM's rejection sampler copies the target's logits four times (bonus rows, target rows, to float32, clone) and takes two argmaxes; when
every request is greedy and nothing edits logits, one float32 copy and one argmax say the same. Its Eagle3 model scatters a draft
vocabulary of some thousand logits into a row of minus infinities as wide as the target's vocabulary before the argmax; taking the argmax
first and translating the one index says the same. Both use vLLM's own `greedy_argmax` (the first of equals, as `Tensor.argmax`).

Limits: only what can be proved equal takes the short way, everything else goes to vLLM's code (`plain_greedy` is the test).

Shapes: B requests, T = sum of draft tokens, V target vocabulary, D draft vocabulary, H hidden size, K draft tokens a request.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def plain_greedy(sampling: Any) -> bool:
    """Whether vLLM's `SamplingMetadata` asks for the argmax of the untouched logits, and for nothing besides."""
    if not sampling.all_greedy or not sampling.no_penalties or sampling.max_num_logprobs is not None:
        return False
    if sampling.logprob_token_ids or sampling.bad_words_token_ids or sampling.allowed_token_ids_mask is not None:
        return False
    holder = sampling.thinking_budget_state_holder
    if holder is not None and holder.has_tracked_requests():
        return False
    return all(_idle(processor) for processor in sampling.logitsprocs.non_argmax_invariant)


def _idle(processor: Any) -> bool:
    """A built-in logits processor with no request to act on; a foreign one is never taken to be idle."""
    from vllm.v1.sample.logits_processor import LogitBiasLogitsProcessor, MinTokensLogitsProcessor

    if type(processor) is MinTokensLogitsProcessor:
        return not processor.min_toks
    return type(processor) is LogitBiasLogitsProcessor and not processor.biases


def accept_greedily(metadata: Any, logits_tv: torch.Tensor) -> torch.Tensor:
    """The rejection sampler's output for a greedy batch: int32 [B, K+1], -1 after the target's own token.

    `metadata` is vLLM's `SpecDecodeMetadata`; `logits_tv` [T+B, V] holds the target's logits in its row order. A draft token stands
    while it equals the target's argmax; the first that does not is replaced by it and ends the row; the bonus token follows a full row.
    """
    best = torch.ops._C.greedy_argmax(logits_tv.to(torch.float32))
    target = best[metadata.target_logits_indices].tolist()
    bonus = best[metadata.bonus_logits_indices].tolist()
    draft = metadata.draft_token_ids.tolist()
    width = metadata.max_spec_len + 1
    rows, start = [], 0
    for request, count in enumerate(metadata.num_draft_tokens):
        row: list[int] = []
        for position in range(start, start + count):
            row.append(target[position])
            if draft[position] != target[position]:
                break
        else:
            row.append(bonus[request])
        rows.append(row + [-1] * (width - len(row)))
        start += count
    return torch.tensor(rows, dtype=torch.int32)


def draft_tokens(model: Any, hidden_bh: torch.Tensor, notes: list[Any] | None = None) -> torch.Tensor:
    """The draft's best token of each row of `hidden_bh` [B, H], in the target's vocabulary: int64 [B].

    With a list of `notes`, the draft's probabilities of those tokens are appended to it ([B], over the draft vocabulary).
    """
    logits_bd = model.logits_processor(model.lm_head, hidden_bh).to(torch.float32)
    best = torch.ops._C.greedy_argmax(logits_bd)
    if notes is not None:
        notes.append((logits_bd.gather(-1, best[:, None])[:, 0] - logits_bd.logsumexp(-1)).exp())
    return best if model.draft_id_to_target_id is None else best + model.draft_id_to_target_id[best]


def install_rejection() -> None:
    """Give vLLM's `RejectionSampler` the short way for greedy batches."""
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    stock = RejectionSampler.forward

    @functools.wraps(stock)
    def forward(self: Any, metadata: Any, draft_probs: Any, logits: Any, sampling_metadata: Any) -> Any:
        if self.synthetic_mode or not plain_greedy(sampling_metadata):
            return stock(self, metadata, draft_probs, logits, sampling_metadata)
        return SamplerOutput(sampled_token_ids=accept_greedily(metadata, logits), logprobs_tensors=None)

    RejectionSampler.forward = forward


def install_draft_choice() -> None:
    """Give vLLM's proposer the short way from an Eagle3 Llama draft's hidden state to its token."""
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    stock = SpecDecodeBaseProposer._greedy_sample

    @functools.wraps(stock)
    def _greedy_sample(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        if type(self.model) is not Eagle3LlamaForCausalLM or self.use_local_argmax_reduction or self.use_heterogeneous_vocab:
            return stock(self, hidden_states)
        return draft_tokens(self.model, hidden_states, getattr(self, "eagle3_notes", None))

    SpecDecodeBaseProposer._greedy_sample = _greedy_sample
