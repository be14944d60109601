"""The draft's K passes on a CPU, with the bookkeeping that a CPU needs and no more.

vLLM's `propose` serves every drafting method on every device: between two passes it dispatches CUDA graphs, launches emulated Triton
kernels, opens a new forward context and copies through buffers that only graphs need. For an Eagle3 Llama draft on a CPU, `propose` here
does the same arithmetic in the same order on the same model: same positions, KV slots, sequence lengths and inputs, hence the same draft
tokens bit for bit. `next_tokens` and `padded_inputs` replace two emulated kernels by loops over a handful of numbers. After the target's
weights went through the caches every operator is cold, so one operator less counts more than its arithmetic.

Limits: `fits` says for which proposers; every other one keeps vLLM's methods. Vision inputs, M-RoPE, parallel drafting, sampled drafts,
data parallelism and expert balancing are left to vLLM.

Shapes: B requests, N scheduled tokens, H hidden size, K draft tokens a request.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import torch

#: vLLM's slot of a token that is not stored.
_PADDING_SLOT = -1


def fits(proposer: Any) -> tuple[bool, str]:
    """Whether a `SpecDecodeBaseProposer` with its model loaded is one that this module drives, and why not."""
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
    from vllm.v1.spec_decode.eagle import EagleProposer

    reasons = {
        "the proposer is another": type(proposer) is not EagleProposer or proposer.method != "eagle3",
        "the draft is another model": type(proposer.model) is not Eagle3LlamaForCausalLM,
        "it takes images": proposer.supports_mm_inputs or proposer.uses_mrope,
        "it drafts in parallel": proposer.parallel_drafting or proposer.needs_extra_input_slots or proposer.constant_draft_positions,
        "it samples its drafts": proposer._enable_probabilistic_draft_probs,
        "its vocabulary is mapped": proposer.use_heterogeneous_vocab or proposer.use_local_argmax_reduction,
        "experts or data are distributed": proposer.eplb_state is not None or proposer.vllm_config.parallel_config.data_parallel_size > 1,
        "its attention is not the CPU's": len(proposer.draft_attn_groups) != 1
        or proposer.draft_attn_groups[0].kernel_block_size is not None
        or type(proposer.draft_attn_groups[0].get_metadata_builder()) is not CPUAttentionMetadataBuilder,
    }
    said = [reason for reason, true in reasons.items() if true]
    return not said, "; ".join(said)


def propose(
    self: Any,
    num_speculative_tokens: int,
    target_token_ids: torch.Tensor,
    target_positions: torch.Tensor,
    target_hidden_states: torch.Tensor,
    next_token_ids: torch.Tensor,
    token_indices_to_sample: torch.Tensor | None,
    common_attn_metadata: Any,
    num_rejected_tokens_gpu: torch.Tensor | None,
) -> torch.Tensor:
    """Draft tokens int64 [B, K]: vLLM's `SpecDecodeBaseProposer.propose` for a proposer that `fits`.

    Arguments are vLLM's: ids and positions [N] and auxiliary hidden states [N, 3H] of the tokens just verified (rejected ones included
    as padding), the next token [B] of each request and the row [B] that predicts what follows it.
    """
    from vllm.forward_context import get_forward_context, set_forward_context

    self.num_speculative_tokens = num_speculative_tokens
    self._last_draft_probs = None
    model, metadata = self.model, common_attn_metadata
    batch, tokens = metadata.num_reqs, len(target_token_ids)
    builder = self.draft_attn_groups[0].get_metadata_builder()
    layers = self.draft_attn_groups[0].layer_names

    # The pair at a position is the feature there and the token after it: the ids move up by one, the new token ends each request.
    rows = metadata.query_start_loc[1:] - 1 if token_indices_to_sample is None else token_indices_to_sample
    ids = self.input_ids.numpy()
    ids[: tokens - 1] = target_token_ids.numpy()[1:]
    ids[rows.numpy()] = next_token_ids.numpy()
    self.positions.numpy()[:tokens] = target_positions.numpy()
    features = model.combine_hidden_states(target_hidden_states)
    slots = self._get_slot_mapping(tokens, metadata.slot_mapping)
    built = builder.build(0, metadata, True)
    with set_forward_context(dict.fromkeys(layers, built), self.vllm_config, num_tokens=tokens, slot_mapping=slots):
        context = get_forward_context()
        last, hidden = model(self.input_ids[:tokens], self.positions[:tokens], features, None)
        if num_speculative_tokens == 0:  # the pass above kept the draft's KV cache in step
            return torch.empty(batch, 0, dtype=torch.int64)
        drafted = [self._greedy_sample(last[rows])]
        if num_speculative_tokens == 1:
            return drafted[0].view(-1, 1)

        positions, hidden = self.positions[rows], hidden[rows]
        metadata.num_actual_tokens = batch
        metadata.max_query_len = 1
        metadata.query_start_loc = self.arange[: batch + 1]
        metadata.query_start_loc_cpu = metadata.query_start_loc.clone()
        if num_rejected_tokens_gpu is not None:
            metadata.seq_lens -= num_rejected_tokens_gpu
        own_ids, own_positions = self.input_ids[:batch], self.positions[:batch]
        metadata.slot_mapping = own_slots = self._slot_mapping_buffer[:batch]
        context.slot_mapping = dict.fromkeys(layers, own_slots)
        for _ in range(num_speculative_tokens - 1):
            torch.ops._C.eagle_step_slot_mapping_metadata_kernel_impl(
                positions,
                metadata.block_table_tensor,
                metadata.seq_lens,
                own_positions,
                own_slots,
                self.block_size,
                self.max_model_len,
                _PADDING_SLOT,
            )
            positions = own_positions
            metadata.max_seq_len = min(metadata.max_seq_len + 1, self.max_model_len)
            if metadata.seq_lens_cpu_upper_bound is not None:
                metadata.seq_lens_cpu_upper_bound += 1
            context.attn_metadata = dict.fromkeys(layers, builder.build(0, metadata, True))
            own_ids.copy_(drafted[-1])
            last, hidden = model(own_ids, own_positions, hidden, None)
            drafted.append(self._greedy_sample(last))
    return torch.stack(drafted, dim=1)


def next_tokens(sampled_bk: torch.Tensor, requests: Any, batch: Any, discard: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The token after which to draft and the count of valid samples, int32 [B] each: vLLM's `prepare_next_token_ids_padded`.

    A row of `sampled_bk` holds -1 from the first token that was not sampled on. A discarded row (its prompt is not finished) has no valid
    sample and goes on with the prompt's next token.
    """
    chosen, valid = [], []
    for row, (ids, discarded) in enumerate(zip(sampled_bk.tolist(), discard.tolist(), strict=False)):
        count = 0 if discarded else sum(0 <= token < batch.vocab_size for token in ids)
        valid.append(count)
        chosen.append(ids[count - 1] if count else requests[batch.req_ids[row]].get_token_id(batch.num_tokens_no_spec[row] - 1))
    return torch.tensor(chosen, dtype=torch.int32), torch.tensor(valid, dtype=torch.int32)


def padded_inputs(metadata: Any, verified: Any, valid: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """What to draft from after a verification: vLLM's `prepare_inputs_padded`.

    `metadata` is the batch's `CommonAttentionMetadata`, `verified` its `SpecDecodeMetadata`, `valid` [B] the counts of `next_tokens`.
    Returns the metadata for the draft, the row [B] of the last token that stands, and the count [B] of rejected ones after it, int32.
    """
    starts = metadata.query_start_loc_cpu.tolist()
    rejected = [drafts + 1 - count if drafts else 0 for drafts, count in zip(verified.num_draft_tokens, valid.tolist(), strict=True)]
    rows = [end - 1 - count for end, count in zip(starts[1:], rejected, strict=True)]
    draft = type(metadata)(
        query_start_loc=metadata.query_start_loc,
        seq_lens=metadata.seq_lens,
        query_start_loc_cpu=metadata.query_start_loc_cpu,
        seq_lens_cpu_upper_bound=metadata.seq_lens_cpu_upper_bound,
        num_reqs=metadata.num_reqs,
        num_actual_tokens=starts[-1],
        max_query_len=max(end - start for start, end in pairwise(starts)),
        max_seq_len=metadata.max_seq_len,
        block_table_tensor=metadata.block_table_tensor,
        slot_mapping=metadata.slot_mapping[: starts[-1]],
        causal=True,
        dcp_local_seq_lens=metadata.dcp_local_seq_lens,
    )
    return draft, torch.tensor(rows, dtype=torch.int32), torch.tensor(rejected, dtype=torch.int32)


def install() -> None:
    """Give vLLM's proposer these three methods where `fits` allows; the answer is asked for once a proposer."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    stock_propose = SpecDecodeBaseProposer.propose
    stock_next = SpecDecodeBaseProposer.prepare_next_token_ids_padded
    stock_inputs = SpecDecodeBaseProposer.prepare_inputs_padded

    def mine(self: Any) -> bool:
        if not hasattr(self, "_eagle3_lab_fits"):
            self._eagle3_lab_fits, _ = fits(self)
        return bool(self._eagle3_lab_fits)

    @functools.wraps(stock_propose)
    def lean_propose(
        self: Any,
        num_speculative_tokens: int,
        target_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        common_attn_metadata: Any,
        sampling_metadata: Any,
        mm_embed_inputs: Any = None,
        num_rejected_tokens_gpu: torch.Tensor | None = None,
        slot_mappings: Any = None,
    ) -> torch.Tensor:
        common = (target_token_ids, target_positions, target_hidden_states, next_token_ids, token_indices_to_sample, common_attn_metadata)
        if mine(self):
            return propose(self, num_speculative_tokens, *common, num_rejected_tokens_gpu)
        return stock_propose(
            self,
            num_speculative_tokens,
            *common,
            sampling_metadata,
            mm_embed_inputs=mm_embed_inputs,
            num_rejected_tokens_gpu=num_rejected_tokens_gpu,
            slot_mappings=slot_mappings,
        )

    @functools.wraps(stock_next)
    def lean_next(self: Any, sampled_token_ids: Any, requests: Any, gpu_input_batch: Any, discard_request_mask: Any) -> Any:
        arguments = (sampled_token_ids, requests, gpu_input_batch, discard_request_mask)
        return next_tokens(*arguments) if mine(self) else stock_next(self, *arguments)

    @functools.wraps(stock_inputs)
    def lean_inputs(self: Any, common_attn_metadata: Any, spec_decode_metadata: Any, valid_sampled_tokens_count: Any) -> Any:
        arguments = (common_attn_metadata, spec_decode_metadata, valid_sampled_tokens_count)
        return padded_inputs(*arguments) if mine(self) else stock_inputs(self, *arguments)

    SpecDecodeBaseProposer.propose = lean_propose
    SpecDecodeBaseProposer.prepare_inputs_padded = lean_inputs
    SpecDecodeBaseProposer.prepare_next_token_ids_padded = lean_next
