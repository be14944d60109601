"""Block sizes of the KV cache: what each attention backend accepts, which size all of them accept, and how a block table becomes indices.

Target and draft layers of one KV-cache group share a block size. A backend accepts explicit sizes or all multiples of a base; vLLM takes
the manager's size where all accept it, else the largest explicit size that divides it and that all accept, else it gives up with "No common
block size" (`vllm/v1/worker/utils.py`, `select_common_block_size`). `select` is the same rule in the light installation. `vllm_blocks.py`
asks vLLM's own function and backends, and a test demands that the two agree on every size and pair.

AITER's MLA kernel reads a cache of single-token pages. Up to vLLM pull request 39616 its backend therefore accepted the size 1 only, which
no Llama-type draft accepts. Since then it accepts any size K, because `expand` turns entry b of the block table into the K token indices
b*K, b*K+1, ..., b*K+K-1 of the flattened cache: the pages stay single tokens, only the table is written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lab.errors import LabError

#: The pull request that changed what AITER's MLA accepts.
PULL_REQUEST = "https://github.com/vllm-project/vllm/pull/39616"


@dataclass(frozen=True)
class Multiple:
    """All multiples of `base`, which vLLM writes MultipleOf(base)."""

    base: int

    def __str__(self) -> str:
        return f"MultipleOf({self.base})"


Sizes = tuple[int | Multiple, ...]


@dataclass(frozen=True)
class Backend:
    """An attention backend as far as block sizes go. `path` is the class, in vLLM 0.32 or in the lab's plugin; empty where
    neither has it."""

    name: str
    sizes: Sizes
    mla: bool = False
    path: str = ""
    note: str = ""

    def accepts(self, size: int) -> bool:
        """Whether a kernel of this backend runs on blocks of `size` tokens."""
        return any(size % one.base == 0 if isinstance(one, Multiple) else size == one for one in self.sizes)

    def said(self) -> str:
        """The sizes as vLLM prints them: [1], or [MultipleOf(16)]."""
        return f"[{', '.join(map(str, self.sizes))}]"


_HERE = "vllm.v1.attention.backends"
#: The backends of the recipes and of their neighbours, as vLLM 0.32 declares them (checked against it by a test), and one from before.
BACKENDS = {
    one.name: one
    for one in (
        Backend(
            "ROCM_AITER_MLA", (Multiple(1),), True, f"{_HERE}.mla.rocm_aiter_mla.AiterMLABackend", "since pull request 39616: the block "
            "table is expanded"
        ),
        Backend("ROCM_AITER_MLA before #39616", (1,), True, "", "vLLM up to 0.19: single-token pages only"),
        Backend("TRITON_MLA", (Multiple(16),), True, f"{_HERE}.mla.triton_mla.TritonMLABackend"),
        Backend("CPU_MLA", (16,), True, f"{_HERE}.mla.cpu_mla.CPUMLABackend", "the CPU's reference kernel"),
        Backend("AMX_MLA", (Multiple(32),), True, f"{_HERE}.mla.amx_mla.AMXMLABackend", "vLLM's choice on a CPU with AMX"),
        Backend(
            "CPU_MLA with the lab's plugin", (Multiple(16),), True, "lab.vllm_plugin.cpu_mla_backend.SharedBlocksMLABackend",
            "the block table is expanded: EAGLE3_LAB_CPU_MLA=1"
        ),
        Backend("ROCM_ATTN", (Multiple(16),), False, f"{_HERE}.rocm_attn.RocmAttentionBackend"),
        Backend("ROCM_AITER_FA", (16, 32), False, f"{_HERE}.rocm_aiter_fa.AiterFlashAttentionBackend"),
        Backend("ROCM_AITER_UNIFIED_ATTN", (Multiple(16),), False, f"{_HERE}.rocm_aiter_unified_attn.RocmAiterUnifiedAttentionBackend"),
        Backend("TRITON_ATTN", (Multiple(16),), False, f"{_HERE}.triton_attn.TritonAttentionBackend"),
        Backend("CPU_ATTN", (Multiple(32),), False, f"{_HERE}.cpu_attn.CPUAttentionBackend"),
    )
}  # fmt: skip


def select(size: int, backends: Sequence[Backend]) -> int:
    """The kernel's block size for a KV cache managed in blocks of `size` tokens; raises `LabError` where the backends have none in
    common.
    """
    if size < 1:
        raise LabError(f"A block of {size} tokens does not exist.", todo="Choose 1 or more.")
    common = _common(size, backends)
    if common is not None:
        return common
    listed = "; ".join(f"{backend.name.partition(' ')[0]}: {backend.said()}" for backend in backends)
    raise LabError(
        f"No common block size for {size} ({listed}).",
        why="Target and draft share the KV cache's blocks, and each kernel runs on certain sizes only.",
        todo=advice(backends),
    )


def _common(size: int, backends: Sequence[Backend]) -> int | None:
    """`size` where every backend accepts it, else the largest explicit size that divides it and that every backend accepts."""
    explicit = {one for backend in backends for one in backend.sizes if isinstance(one, int) and size % one == 0}
    for candidate in (size, *sorted(explicit, reverse=True)):
        if all(backend.accepts(candidate) for backend in backends):
            return candidate
    return None


def working(backends: Sequence[Backend], up_to: int = 256) -> list[int]:
    """Every size up to `up_to` for which the backends have a kernel size in common."""
    return [size for size in range(1, up_to + 1) if _common(size, backends) is not None]


def advice(backends: Sequence[Backend]) -> str:
    """What to do about backends without a common size: the smallest size that works, or that none does."""
    works = working(backends)
    if works:
        return f"Use a block size of {works[0]}{f' or {works[1]}' if len(works) > 1 else ''} (--block-size {works[0]})."
    return "No size from 1 to 256 works: choose another attention backend for the target or the draft."


def expand(block_table: np.ndarray, lengths: Sequence[int], block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """A block table written out as token indices of the flattened cache.

    `block_table` [requests, most blocks] holds block numbers, `lengths` [requests] tokens. Returns `indices` [sum of lengths], request
    after request, and `starts` [requests + 1], where each begins: token t of request r lies at `indices[starts[r] + t]`, which is
    `block_table[r, t // K] * K + t % K`. With K = 1 it is a copy of the table. Raises `ValueError` for a table that is too short.
    """
    if block_size < 1:
        raise ValueError(f"block size {block_size}")
    count = np.asarray(lengths, dtype=np.int64)
    if count.size and (count.min() < 0 or -(-int(count.max()) // block_size) > block_table.shape[1]):
        raise ValueError("the block table is shorter than a sequence")
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(count)])
    rows = np.repeat(np.arange(len(count)), count)
    tokens = np.arange(starts[-1]) - np.repeat(starts[:-1], count)
    return block_table[rows, tokens // block_size].astype(np.int64) * block_size + tokens % block_size, starts


@dataclass(frozen=True)
class Picture:
    """A small cache for drawing: who owns each slot, each request's block table, and its expanded indices."""

    block_size: int
    blocks: int
    #: Request that owns each of the `blocks * block_size` token slots, and which of its tokens is there; None for an empty slot.
    owners: tuple[tuple[int, int] | None, ...]
    tables: tuple[tuple[int, ...], ...]
    indices: tuple[tuple[int, ...], ...]


def picture(block_size: int, lengths: Sequence[int], *, slots: int = 64, seed: int = 3) -> Picture:
    """A cache of `slots` token slots with one request for each of `lengths`, its blocks scattered as an allocator leaves them (by
    `seed`).
    """
    if not 1 <= block_size <= slots or slots % block_size:
        raise LabError(f"{slots} slots cannot be cut into blocks of {block_size}.", todo="Choose a divisor.")
    blocks = slots // block_size
    needed = [-(-length // block_size) for length in lengths]
    if sum(needed) > blocks:
        raise LabError(
            f"{blocks} blocks of {block_size} tokens do not hold {' and '.join(map(str, lengths))} tokens.",
            why=f"They need {sum(needed)} blocks: a block belongs to one sequence, and its last one is rarely full.",
            todo="Choose a shorter sequence or a smaller block.",
        )
    order = np.random.default_rng(seed).permutation(blocks)
    table = np.zeros((len(lengths), max([1, *needed])), dtype=np.int64)
    taken = 0
    for row, many in enumerate(needed):
        table[row, :many] = order[taken : taken + many]
        taken += many
    indices, starts = expand(table, lengths, block_size)
    owners: list[tuple[int, int] | None] = [None] * slots
    for row in range(len(lengths)):
        for token, index in enumerate(indices[starts[row] : starts[row + 1]]):
            owners[int(index)] = (row, token)
    return Picture(
        block_size,
        blocks,
        tuple(owners),
        tuple(tuple(int(block) for block in table[row, :many]) for row, many in enumerate(needed)),
        tuple(tuple(int(index) for index in indices[starts[row] : starts[row + 1]]) for row in range(len(lengths))),
    )
