"""Token ids to bytes, for the kinds of tokenizer there are. Small tokenizers made on the spot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lab.vllm_plugin.pieces import Pieces, byte_alphabet

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

FOX = "🦊"


def fast(model: Any, decoder: Any, special: list[str] = []) -> Any:  # noqa: B006
    backend = tokenizers.Tokenizer(model)
    backend.decoder = decoder
    backend.add_special_tokens(special)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.fixture
def byte_level() -> Any:
    alphabet = {character: index for index, character in enumerate(byte_alphabet())}
    merges = [("ð", "Ł")]  # the fox's first two bytes
    vocabulary = {**alphabet, "ðŁ": 256, "Ġthe": 257}
    return fast(tokenizers.models.BPE(vocabulary, merges), tokenizers.decoders.ByteLevel(), ["<|im_start|>", "Ġnot a space"])


def test_the_alphabet_is_gpt2s() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert (alphabet["Ġ"], alphabet["Ċ"], alphabet["A"], alphabet["ð"]) == (0x20, 0x0A, 0x41, 0xF0)
    assert set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) == set(alphabet)


def test_an_emoji_split_over_tokens_keeps_its_bytes(byte_level: Any) -> None:
    pieces = Pieces(byte_level)
    ids = [256, *(byte_level.convert_tokens_to_ids({v: k for k, v in byte_alphabet().items()}[byte]) for byte in FOX.encode()[2:])]
    parts = [pieces.piece(token) for token in ids]
    assert parts[0] == FOX.encode()[:2]
    assert b"".join(parts).decode() == FOX
    assert pieces.piece(257) == b" the"


def test_special_tokens_are_their_text(byte_level: Any) -> None:
    pieces = Pieces(byte_level)
    assert pieces.piece(byte_level.convert_tokens_to_ids("<|im_start|>")) == b"<|im_start|>"
    assert pieces.piece(byte_level.convert_tokens_to_ids("Ġnot a space")) == "Ġnot a space".encode()


def test_sentencepiece_spaces_and_lone_bytes() -> None:
    vocabulary = {"<unk>": 0, "▁the": 1, "fox": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    pieces = Pieces(fast(tokenizers.models.BPE(vocabulary, [], byte_fallback=True), decoder))
    assert b"".join(pieces.piece(token) for token in (1, 2)) == b" thefox"
    assert b"".join(pieces.piece(3 + byte) for byte in FOX.encode()).decode() == FOX


def test_a_slow_byte_level_tokenizer_carries_its_own_table() -> None:
    slow = SimpleNamespace(byte_decoder=byte_alphabet(), convert_ids_to_tokens=lambda token: ["Ġa", "ð"][token], all_special_ids=[])
    assert [Pieces(slow).piece(token) for token in (0, 1)] == [b" a", b"\xf0"]


def test_an_unknown_kind_is_decoded_alone_and_an_unknown_id_is_empty() -> None:
    other = SimpleNamespace(convert_ids_to_tokens=lambda token: "x" if token == 0 else None, decode=lambda _: "ex")
    assert Pieces(other).piece(0) == b"ex"
    assert Pieces(other).piece(7) == b""


def test_every_token_of_the_default_target_is_what_it_decodes_to() -> None:
    from lab.env import cache_dir

    folder = cache_dir() / "checkpoints" / "smollm2-135m-instruct"
    if not (folder / "tokenizer.json").exists():
        pytest.skip("the default target is not in the cache yet (python -m lab.checkpoints)")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pieces = Pieces(tokenizer)
    for token in range(len(tokenizer)):
        assert pieces.piece(token).decode(errors="replace") == tokenizer.decode([token])
