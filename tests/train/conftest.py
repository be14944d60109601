"""A tiny Llama with a byte-level tokenizer: real files, made here in a second."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="training needs PyTorch (extra cpu or cuda)")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small only wait for a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random_llama(folder: Path, *, layers: int, heads: int, groups: int, vocab: int) -> Path:
    """Write a random Llama of hidden size 48 with heads of 16 into `folder`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=16,
        vocab_size=vocab,
        max_position_embeddings=512,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random 4-layer Llama (hidden 48, 3 heads, 1 KV head of 16, about 300 tokens) as safetensors, with tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny-target")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    symbols = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    return random_llama(folder, layers=6, heads=3, groups=1, vocab=len(symbols))


@pytest.fixture(scope="session")
def grouped_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with groups, which `tiny_target` has none of: hidden 48, 4 query heads on 2 KV heads of 16."""
    return random_llama(tmp_path_factory.mktemp("grouped-target"), layers=3, heads=4, groups=2, vocab=300)
