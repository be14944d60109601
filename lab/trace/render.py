"""A step as people read it: chips of tokens with their marks, as data for the page and as safe HTML for the notebook.

A token is bytes, and bytes need not be a whole character: an emoji may be spread over several tokens. A chip shows what one token is by
itself (`<0xF0>` for a byte that is no character yet, `·` for a space, `↵` for a line end); the answer's text is decoded over all tokens,
so that each character appears with the token that completes it. Signs that the lab puts in for something invisible are kept apart from
the token's own text, so a token `·` and a space differ on screen: a *run* is a tuple that alternates own text (even places) and signs
(odd places). Controls that turn text around (U+202A to U+202E, U+2066 to U+2069) and invisible characters become signs as well.
Limit: which tokens are special is read from their form (`<|...|>`, `<s>`), since a trace does not carry the tokenizer.
"""

from __future__ import annotations

import codecs
import html
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lab.env import assets
from lab.trace.model import Mark, Request, Step

#: Own text and signs in turn, own text first.
Run = tuple[str, ...]

NAMES: dict[Mark, str] = {
    "accepted": "accepted draft token",
    "rejected": "rejected draft token",
    "unreached": "draft token never reached",
    "recovered": "target's own token (recovered)",
    "bonus": "target's own token (bonus)",
    "plain": "target's token",
}

_SPECIAL = re.compile(r"<\|[^<>|]{1,40}\|>|</?s>|<(?:pad|unk|bos|eos|mask)>|\[(?:PAD|UNK|CLS|SEP|MASK)\]")
_SPACES = {" ": "·", "\n": "↵", "\r": "␍", "\t": "⇥"}


@dataclass(frozen=True)
class Chip:
    """One token of a step's row."""

    token: int
    mark: Mark
    step: int
    #: Place in the step, from 1: draft tokens 1 to K, the target's own token right behind the accepted ones.
    position: int
    text: Run
    #: The draft's own probability, where it is known.
    probability: float | None = None
    #: Which token of the answer this is (from 0); None for one that never reached it.
    output: int | None = None
    #: Decided by the target, but cut off by a stop or the length limit.
    cut: bool = False


@dataclass(frozen=True)
class OutputToken:
    """One token of the answer, with the characters that it completes."""

    token: int
    mark: Mark
    step: int
    position: int
    output: int
    text: Run


def _sign(char: str, *, spaces: bool) -> str | None:
    """The visible sign for `char`, or None where the character shows itself."""
    if char in _SPACES:
        return _SPACES[char] if spaces or char == "\r" else None
    category = unicodedata.category(char)
    if category == "Cc":
        code = ord(char)
        return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else f"[U+{code:04X}]"
    # Format, private use, unassigned, separators: bidirectional controls, zero-width characters, tags, odd spaces.
    if category in ("Cf", "Co", "Cn", "Cs", "Zl", "Zp") or (category == "Zs" and spaces):
        return f"[U+{ord(char):04X}]"
    return None


def _run(parts: Iterable[tuple[bool, str]]) -> Run:
    """Join `(is a sign, text)` parts into a run that alternates own text and signs."""
    run = [""]
    for is_sign, text in parts:
        if is_sign == (len(run) % 2 == 0):
            run[-1] += text
        else:
            run.append(text)
    return tuple(run)


def visible(text: str, *, spaces: bool) -> Run:
    """`text` with a sign for everything that would not be seen; `spaces` asks for signs for white space too."""
    return _run((False, char) if (sign := _sign(char, spaces=spaces)) is None else (True, sign) for char in text)


def chip_text(piece: bytes) -> Run:
    """What one token is by itself."""
    parts: list[tuple[bool, str]] = []
    while piece:
        try:
            text, piece, bad = piece.decode("utf-8"), b"", b""
        except UnicodeDecodeError as error:
            text, bad, piece = piece[: error.start].decode("utf-8"), piece[error.start : error.end], piece[error.end :]
        for char in text:
            sign = _sign(char, spaces=True)
            if not parts and "\ufe00" <= char <= "\ufe0f":  # says how to draw what is before it, which here is another token: an empty chip
                sign = f"[U+{ord(char):04X}]"
            parts.append((False, char) if sign is None else (True, sign))
        parts += [(True, f"<0x{byte:02X}>") for byte in bad]
    return _run(parts)


def is_special(piece: bytes) -> bool:
    """Whether a token has the form of a special one (`<|im_end|>`)."""
    return _SPECIAL.fullmatch(piece.decode("utf-8", "replace")) is not None


def piece_of(token: int, pieces: Mapping[int, str]) -> bytes:
    """The bytes of `token`, or its number in brackets where the trace does not have them."""
    piece = pieces.get(token)
    return f"[{token}]".encode() if piece is None else bytes.fromhex(piece)


def chips(step: Step, pieces: Mapping[int, str], *, output: int = 0) -> list[Chip]:
    """The step's row: draft tokens with what became of each, then the target's own token. `output`: answer tokens before this step."""
    row: list[Chip] = []
    for place, (token, mark) in enumerate(zip(step.draft, step.draft_marks(), strict=True)):
        row.append(
            Chip(
                token=token,
                mark=mark,
                step=step.index,
                position=place + 1,
                text=chip_text(piece_of(token, pieces)),
                probability=step.draft_probs[place] if step.draft_probs else None,
                output=output + place if mark == "accepted" and place < step.kept else None,
                cut=mark == "accepted" and place >= step.kept,
            )
        )
    if step.sampled:
        place = len(step.sampled) - 1
        token, kept = step.sampled[-1], place < step.kept
        row.append(
            Chip(
                token=token,
                mark=step.sampled_marks()[-1],
                step=step.index,
                position=place + 1,
                text=chip_text(piece_of(token, pieces)),
                output=output + place if kept else None,
                cut=not kept,
            )
        )
    return row


class Answer:
    """The answer's text, token by token: feed steps in order and get the tokens that each one added."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.length = 0

    def feed(self, step: Step, pieces: Mapping[int, str]) -> list[OutputToken]:
        """The tokens that `step` added to the answer, each with the characters that it completes."""
        added = []
        for place, (token, mark) in enumerate(zip(step.sampled, step.sampled_marks(), strict=True)):
            if place >= step.kept:
                break
            added.append(OutputToken(token, mark, step.index, place + 1, self.length, self.text(token, pieces)))
            self.length += 1
        return added

    def text(self, token: int, pieces: Mapping[int, str]) -> Run:
        """The characters that `token` completes; a special token is a sign."""
        piece = piece_of(token, pieces)
        if is_special(piece):
            return ("", piece.decode("utf-8", "replace"))
        return visible(self._decoder.decode(piece), spaces=False)


def run_html(run: Run) -> str:
    """A run as escaped HTML; signs are in `<i>`."""
    return "".join(f"<i>{html.escape(text)}</i>" if place % 2 else html.escape(text) for place, text in enumerate(run) if text)


def chip_html(chip: Chip) -> str:
    """One chip as escaped HTML, with its mark in words for those who do not see colours."""
    title = f"{NAMES[chip.mark]} {chip.token}, step {chip.step}, position {chip.position}"
    if chip.probability is not None:
        title += f", draft probability {chip.probability:.3f}"
    if chip.cut:
        title += ", cut off by the stop"
    return (
        f'<bdi class="e3-chip e3-{chip.mark}{" e3-cut" if chip.cut else ""}" data-token="{chip.token}" data-mark="{chip.mark}"'
        f' data-step="{chip.step}" data-position="{chip.position}" title="{html.escape(title)}">{run_html(chip.text)}</bdi>'
    )


def steps_html(request: Request, *, first: int = 0, last: int | None = None) -> str:
    """Rows of chips for the steps `first` to `last` (exclusive) of a request, with their style: ready for a notebook's output."""
    rows, output = [], 0
    for place, step in enumerate(request.steps):
        if place >= first and (last is None or place < last):
            row = "".join(chip_html(chip) for chip in chips(step, request.pieces, output=output))
            rows.append(f'<div class="e3-row"><span class="e3-number">{step.index}</span>{row}</div>')
        output += step.kept
    style = (assets() / "ui" / "chips.css").read_text(encoding="utf-8")
    return f'<style>{style}</style><div class="e3-steps">{"".join(rows)}</div>'
