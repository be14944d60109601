"""Block sizes and index arithmetic: against a brute-force gather, and against vLLM's own functions where they are installed."""

from __future__ import annotations

import re
from importlib import util

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.doctor.blocks import BACKENDS, expand, picture, select, working
from lab.doctor.kv import MODELS, row, rows
from lab.doctor.vllm_blocks import ask
from lab.errors import LabError

PAIRS = [(one,) for one in BACKENDS] + [(one, other) for one in BACKENDS for other in BACKENDS]


def test_the_barrier_of_before_and_after() -> None:
    before, after, draft = BACKENDS["ROCM_AITER_MLA before #39616"], BACKENDS["ROCM_AITER_MLA"], BACKENDS["ROCM_ATTN"]
    assert working([before, draft]) == []
    assert working([after, draft]) == list(range(16, 257, 16))
    assert select(1, [before]) == 1
    assert select(64, [after, draft]) == 64
    with pytest.raises(
        LabError, match=r"No common block size for 1 \(ROCM_AITER_MLA: \[MultipleOf\(1\)\]; ROCM_ATTN: \[MultipleOf\(16\)\]\)"
    ):
        select(1, [after, draft])
    with pytest.raises(LabError, match=r"No common block size for 16 \(CPU_MLA: \[16\]; CPU_ATTN: \[MultipleOf\(32\)\]\)"):
        select(16, [BACKENDS["CPU_MLA"], BACKENDS["CPU_ATTN"]])
    assert select(64, [BACKENDS["ROCM_AITER_FA"]]) == 32  # the largest explicit size that divides
    with pytest.raises(LabError, match="does not exist"):
        select(0, [after])


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.lists(st.integers(0, 90), min_size=0, max_size=6))
def test_expanded_indices_gather_what_the_blocks_hold(seed: int, size: int, lengths: list[int]) -> None:
    """A cache filled token by token through the block table, read back at once through the expanded indices."""
    random = np.random.default_rng(seed)
    needed = [-(-length // size) for length in lengths]
    blocks = random.permutation(sum(needed) + 3)
    table = np.full((len(lengths), max([1, *needed])), 10**6, dtype=np.int64)  # entries beyond a sequence must not be read
    cache = np.full((len(blocks), size), -1)
    at = 0
    for request, (length, many) in enumerate(zip(lengths, needed, strict=True)):
        table[request, :many] = blocks[at : at + many]
        at += many
        for token in range(length):
            cache[table[request, token // size], token % size] = request * 1000 + token
    indices, starts = expand(table, lengths, size)
    assert starts.tolist() == [sum(lengths[:place]) for place in range(len(lengths) + 1)]
    expected = [request * 1000 + token for request, length in enumerate(lengths) for token in range(length)]
    assert cache.reshape(-1)[indices].tolist() == expected


def test_a_block_size_of_one_is_a_plain_copy() -> None:
    table = np.array([[7, 3, 9], [1, 0, 0]])
    indices, _ = expand(table, [3, 1], 1)
    assert indices.tolist() == [7, 3, 9, 1]
    indices, _ = expand(np.array([[5]]), [16], 16)
    assert indices.tolist() == list(range(80, 96))
    for bad in ((np.array([[1]]), [17], 16), (np.array([[1]]), [1], 0), (np.array([[1]]), [-1], 16)):
        with pytest.raises(ValueError, match="block"):
            expand(*bad)


def test_the_drawn_cache_is_consistent() -> None:
    for size in (1, 2, 4, 8, 16, 32):
        made = picture(size, [13, 6])
        assert sum(owner is not None for owner in made.owners) == 19
        for request, indices in enumerate(made.indices):
            assert [made.owners[index] for index in indices] == [(request, token) for token in range(len(indices))]
            assert [index // size for index in indices] == [made.tables[request][token // size] for token in range(len(indices))]
    with pytest.raises(LabError, match="do not hold"):
        picture(64, [13, 6])
    with pytest.raises(LabError, match="cannot be cut"):
        picture(5, [1])


@pytest.mark.slow
@pytest.mark.skipif(util.find_spec("vllm") is None, reason="vLLM is not installed here")
def test_vllm_itself_agrees_on_every_size_and_pair() -> None:
    sizes = (1, 2, 8, 16, 24, 32, 48, 64, 128, 544)
    answer = ask(sizes, PAIRS)
    assert answer.missing == {}
    assert answer.sizes == {name: one.said() for name, one in BACKENDS.items()}
    assert len(answer.selected) == len(sizes) * len(PAIRS)
    for (size, names), theirs in answer.selected.items():
        try:
            ours: int | str = select(size, [BACKENDS[name] for name in names])
        except LabError as error:
            ours = error.what
        # AITER's flash attention calls itself FLASH_ATTN: names are left out of the comparison
        told = [re.sub(r"[A-Z_]+: ", "", one) if isinstance(one, str) else one for one in (ours, theirs)]
        assert told[0] == told[1], (size, names)


def test_bytes_of_cache_a_token() -> None:
    found = {one.name: one for one in rows()}
    # by hand: layers * (latent + rotary) * 2 B, and 2 * layers * KV heads * head width * 2 B
    assert found["Kimi-K2.5"].bytes_per_token == 61 * (512 + 64) * 2
    assert found["MiniMax-M2.5"].bytes_per_token == 2 * 62 * 8 * 128 * 2
    assert found["Llama-3.1-8B"].bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert found["Qwen3-8B"].bytes_per_token == 2 * 36 * 8 * 128 * 2
    assert found["SmolLM2-135M"].bytes_per_token == 2 * 30 * 3 * 64 * 2
    assert found["Kimi-K2.5"].mha == 61 * 64 * (128 + 64 + 128) * 2
    assert found["Kimi-K2.5"].gqa8 == 61 * 8 * (128 + 64 + 128) * 2
    assert found["Kimi-K2.5"].bytes_per_token * 30 < found["Kimi-K2.5"].mha
    assert row(MODELS[0], bytes_per_value=1).bytes_per_token == 61 * 576
    assert all(one.source for one in found.values())
