"""The backend that `cpu_mla` registers; that module says what it is for. Apart, because importing it imports vLLM's attention layers."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from lab.vllm_plugin.cpu_mla import KERNEL_BLOCK


def expand(table_RB: torch.Tensor, block_size: int) -> torch.Tensor:
    """Block table [rows, blocks] of blocks of `block_size` tokens as one of `KERNEL_BLOCK` tokens, [rows, blocks * ratio], int32."""
    ratio = block_size // KERNEL_BLOCK
    if block_size % KERNEL_BLOCK:
        raise ValueError(f"a block of {block_size} tokens is not made of blocks of {KERNEL_BLOCK}")
    inner = torch.arange(ratio, dtype=torch.int32)
    return (table_RB.to(torch.int32)[:, :, None] * ratio + inner).flatten(1).contiguous()


def rows(table_RB: torch.Tensor, lengths_R: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One row a query token: table [tokens, blocks] and lengths [tokens], int32.

    `lengths_R` are whole sequences, the query included; `starts` [R + 1] are the requests' places among the tokens. Token j of a query of
    q tokens sees the sequence without the q - 1 - j tokens behind it.
    """
    counts = torch.diff(starts).to(torch.int64)
    request = torch.repeat_interleave(torch.arange(len(counts)), counts)
    behind = starts[1:].to(torch.int64)[request] - 1 - torch.arange(len(request))
    return table_RB[request], (lengths_R.to(torch.int64)[request] - behind).to(torch.int32)


class SharedBlocksMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Metadata of verification steps: queries of up to K+1 tokens, of mixed lengths, go down the decode path."""

    query_len_support = QueryLenSupport.VARLEN

    def _build_decode(
        self, block_table_tensor: torch.Tensor, seq_lens_device: torch.Tensor, *, query_start_loc_cpu: torch.Tensor, **_: Any
    ) -> MLACommonDecodeMetadata:
        table = expand(block_table_tensor, self.kv_cache_spec.block_size)
        table, lengths = rows(table, seq_lens_device, query_start_loc_cpu)
        return MLACommonDecodeMetadata(block_table=table, seq_lens=lengths, dcp_tot_seq_lens=None)


class SharedBlocksMLAImpl(CPUMLAImpl):
    """vLLM's CPU MLA over a cache of larger blocks, seen as blocks of the kernel's size."""

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any) -> Any:
        """As vLLM's; the cache [blocks, block size, latent] is contiguous, so that this is a view."""
        cache = kv_c_and_k_pe_cache.view(-1, KERNEL_BLOCK, kv_c_and_k_pe_cache.shape[-1])
        return super().forward_mqa(q, cache, attn_metadata, layer)


class SharedBlocksMLABackend(CPUMLABackend):
    """vLLM's CPU MLA for any multiple of 16, and for queries of several tokens."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:  # noqa: ARG004 - vLLM's signature
        """Any multiple of the kernel's own."""
        return [MultipleOf(KERNEL_BLOCK)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Any multiple of the kernel's own."""
        return block_size is None or block_size % KERNEL_BLOCK == 0

    @staticmethod
    def get_builder_cls() -> type[SharedBlocksMLAMetadataBuilder]:
        """The builder of one row a token."""
        return SharedBlocksMLAMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[SharedBlocksMLAImpl]:
        """The kernel over a view of the cache."""
        return SharedBlocksMLAImpl
