"""The bytes that a token id stands for, from the target's own tokenizer.

Byte-level BPE writes each byte as one printable character (the table of Radford et al. 2019, GPT-2 `bytes_to_unicode`), so a token's
real bytes can be had even where they are half a character: an emoji split over three tokens stays three faithful parts. SentencePiece
writes spaces as U+2581 and lone bytes as `<0xE2>`. Special and added tokens are their own text. What fits none of these is decoded alone,
which is right for whole characters only.
"""

from __future__ import annotations

import json
import re
from typing import Any

_LONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Character to byte of byte-level BPE: printable Latin-1 characters stand for themselves, the other bytes for U+0100 onwards."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): byte for byte in printable}, **{chr(256 + index): byte for index, byte in enumerate(others)}}


def _decoders(state: Any) -> set[str]:
    """The kinds of decoder in the state of a `tokenizers` decoder, nested ones included."""
    if not isinstance(state, dict):
        return set()
    nested = [kind for child in state.get("decoders") or () for kind in _decoders(child)]
    return {str(state.get("type")), *nested}


class Pieces:
    """Token id to bytes, remembered. `tokenizer` is a Hugging Face tokenizer, fast or slow."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self._special = set(getattr(tokenizer, "added_tokens_decoder", None) or ()) | set(getattr(tokenizer, "all_special_ids", None) or ())
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        kinds = _decoders(json.loads(decoder.__getstate__())) if decoder is not None else set()
        # Slow byte-level tokenizers (GPT-2's, and those on tiktoken that imitate it) carry the table themselves.
        self._bytes: dict[str, int] | None = byte_alphabet() if "ByteLevel" in kinds else getattr(tokenizer, "byte_decoder", None)
        self._sentencepiece = bool({"ByteFallback", "Metaspace"} & kinds) or hasattr(tokenizer, "sp_model")

    def piece(self, token: int) -> bytes:
        """The bytes of one token; empty for an id that the tokenizer does not have."""
        if token not in self._known:
            self._known[token] = self._find(token)
        return self._known[token]

    def _find(self, token: int) -> bytes:
        text = self._tokenizer.convert_ids_to_tokens(token)
        if text is None:
            return b""
        if isinstance(text, bytes):
            return text
        if token in self._special:
            return text.encode()
        if self._bytes is not None and all(character in self._bytes for character in text):
            return bytes(self._bytes[character] for character in text)
        if self._sentencepiece:
            lone = _LONE_BYTE.fullmatch(text)
            return bytes([int(lone[1], 16)]) if lone else text.replace("▁", " ").encode()
        return self._tokenizer.decode([token]).encode()
