"""The self-written corpus: the target invents the requests and writes the answers (the Magpie idea, Xu et al. 2024).

Thousands of conversations are decoded in lockstep. Each row is fed the chat template up to the user turn, for most rows with a beginning
or a whole request (`openings.py`); the target goes on with the user turn at temperature 0.9; when it closes the turn the assistant header
is forced, and the answer is written at this row's own temperature (mostly 0, since greedy text is what a greedy benchmark asks the draft to
predict). Then the next user turn is forced, until the row is full. Small models loop when greedy: a row that repeats itself is closed
and goes on to its next turn.

A shard is one file, `<name>-<index>.npz`: `ids` uint16 [rows, length]; `answer` bool [rows, length], true where the target chose the token
inside an answer, which is where the loss looks; and `warmth` [rows], the temperature of the row's answers. A shard depends only on the
seed and its index, existing shards are skipped, and files appear whole or not at all, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab import provenance
from lab.errors import LabError
from lab.train import openings
from lab.train.state import another, keep, reading
from lab.train.target import Decoder, Target

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@dataclass(frozen=True)
class CorpusPlan:
    """What to write. `rows` per shard are decoded at once: memory is rows x length x the target's KV bytes per token."""

    name: str
    shards: int
    rows: int
    length: int
    seed: int = 1
    #: Share of rows without an opening, then of the rest: chat, maths and code; and how many of those get a whole request.
    bare: float = 0.25
    kinds: tuple[float, float, float] = (0.4, 0.3, 0.3)
    asked: float = 0.4
    #: Share of rows that answer at temperature 0, 0.7 and 1.0.
    greedy: tuple[float, float, float] = (0.7, 0.18, 0.12)
    user_temperature: float = 0.9
    #: Longest user turn and answer before the turn is closed by force.
    longest_user: int = 220
    longest_answer: int = 400


@dataclass(frozen=True)
class Template:
    """Token ids of the ChatML template, and what turns text into ids."""

    start: int
    end: int
    text: int
    first: tuple[int, ...]
    to_answer: tuple[int, ...]
    to_user: tuple[int, ...]
    encode: Callable[[str], tuple[int, ...]]

    @classmethod
    def build(cls, folder: Path) -> Template:
        """Tokenise the template with the target's own tokenizer."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

        def ids(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

        def one(text: str) -> int:
            found = tokenizer.token_to_id(text)
            if found is None:
                raise LabError(f"The tokenizer in {folder} has no token {text}.", why="The corpus is written in the ChatML template.")
            return int(found)

        return cls(
            start=one("<|im_start|>"),
            end=one("<|im_end|>"),
            text=one("<|endoftext|>"),
            first=ids(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"),
            to_answer=ids("\n<|im_start|>assistant\n"),
            to_user=ids("\n<|im_start|>user\n"),
            encode=ids,
        )


@dataclass(frozen=True)
class Opening:
    """The forced first tokens of a row, and whether an answer follows them (else the user's turn goes on)."""

    ids: tuple[int, ...]
    asked: bool = False


def pick_openings(plan: CorpusPlan, template: Template, index: int) -> list[Opening]:
    """How each row of a shard begins."""
    random = np.random.default_rng((plan.seed, index, 7))
    rows = []
    for _ in range(plan.rows):
        if random.random() < plan.bare:
            rows.append(Opening(template.first))
            continue
        kind = int(random.choice(3, p=plan.kinds))
        if random.random() < plan.asked:
            asked = template.encode(openings.request(random, kind))
            rows.append(Opening((*template.first, *asked, template.end, *template.to_answer), asked=True))
        else:
            rows.append(Opening(template.first + template.encode(openings.beginning(random, kind))))
    return rows


class Conversation:
    """The state of all rows of a shard: whose turn it is, what is forced next, when a turn must close. All tensors are [B] or [B, F]."""

    def __init__(self, plan: CorpusPlan, template: Template, firsts: list[Opening], device: torch.device | str) -> None:
        rows = len(firsts)
        self.plan, self.template = plan, template
        width = max(max(len(first.ids) for first in firsts), len(template.to_answer), len(template.to_user)) + 1
        self.forced = torch.full((rows, width), -1, dtype=torch.long)
        for row, first in enumerate(firsts):
            self.forced[row, : len(first.ids)] = torch.tensor(first.ids)
        self.forced = self.forced.to(device)
        self.headers = torch.full((2, width), -1, dtype=torch.long)
        self.headers[0, : len(template.to_answer)] = torch.tensor(template.to_answer)
        self.headers[1, : len(template.to_user)] = torch.tensor(template.to_user)
        self.headers = self.headers.to(device)
        self.answering = torch.tensor([first.asked for first in firsts], device=device)
        self.turn = torch.zeros(rows, dtype=torch.long, device=device)
        share = torch.tensor(plan.greedy).cumsum(0)
        spread = (torch.arange(rows) + 0.5) / rows
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(plan.seed))
        warmth = torch.where(spread < share[0], 0.0, torch.where(spread < share[1], 0.7, 1.0))
        self.warmth = warmth[order].to(device)

    def temperature(self) -> Tensor:
        """Sampling temperature of each row's next token [B]."""
        return torch.where(self.answering, self.warmth, self.plan.user_temperature)

    def advance(self, chosen_B: Tensor, looping_B: Tensor) -> tuple[Tensor, Tensor]:
        """Take each row's choice, or what is forced instead; returns the next ids and whether each was chosen within an answer."""
        template, plan = self.template, self.plan
        forced = self.forced[:, 0]
        free = forced < 0
        longest = torch.where(self.answering, plan.longest_answer, plan.longest_user)
        close = free & ((self.turn >= longest) | (looping_B & self.answering))
        chosen_B = torch.where(close, template.end, chosen_B)
        ids = torch.where(free, chosen_B, forced)
        counted = free & ~close & self.answering
        self.turn = torch.where(free, self.turn + 1, 0)
        ended = free & (ids == template.end)
        shifted = torch.cat((self.forced[:, 1:], torch.full_like(self.forced[:, :1], -1)), 1)
        self.forced = torch.where(ended[:, None], self.headers[self.answering.long()], shifted)
        self.answering = self.answering ^ ended
        return ids, counted


def choose(logits_BV: Tensor, temperature_B: Tensor, early_B: Tensor, template: Template) -> Tensor:
    """Sample at each row's own temperature by the Gumbel maximum (0 is greedy). Control tokens are never chosen, nor an empty turn."""
    scores = logits_BV.float()
    noise = -torch.log(-torch.log(torch.rand_like(scores).clamp_(1e-20, 1 - 1e-7)))
    scores = scores + temperature_B[:, None] * noise
    scores[:, template.start] = -torch.inf
    scores[:, template.text] = -torch.inf
    scores[:, template.end] = torch.where(early_B, -torch.inf, scores[:, template.end])
    return scores.argmax(-1)


def looping(history_BT: Tensor, window: int = 48, periods: int = 32) -> Tensor:
    """Which rows [B] have repeated themselves with some period up to `periods` for `window` tokens."""
    length = history_BT.shape[1]
    if length < window + periods:
        return torch.zeros(len(history_BT), dtype=torch.bool, device=history_BT.device)
    recent = history_BT[:, length - window :]
    found = torch.zeros(len(history_BT), dtype=torch.bool, device=history_BT.device)
    for period in range(1, periods + 1):
        found |= (recent == history_BT[:, length - window - period : length - period]).all(1)
    return found


def write_rows(
    decoder: Decoder, pick: Callable[..., Tensor], plan: CorpusPlan, template: Template, index: int, tick: Callable[[int], None]
) -> tuple[Tensor, Tensor, Tensor]:
    """Decode one shard: ids and answer mask, both [rows, length], and the rows' answer temperature. `tick` is told each position."""
    target = decoder.target
    device = target.embed_VH.device
    torch.manual_seed(plan.seed * 1_000_003 + index)
    state = Conversation(plan, template, pick_openings(plan, template, index), device)
    ids_BT = torch.zeros(plan.rows, plan.length, dtype=torch.long, device=device)
    answer_BT = torch.zeros(plan.rows, plan.length, dtype=torch.bool, device=device)
    none_B = torch.zeros(plan.rows, dtype=torch.bool, device=device)
    chosen = torch.zeros(plan.rows, dtype=torch.long, device=device)
    for position in range(plan.length):
        stuck = looping(ids_BT[:, :position]) if position % 16 == 0 else none_B
        ids, counted = state.advance(chosen, stuck)
        ids_BT[:, position], answer_BT[:, position] = ids, counted
        if position + 1 < plan.length:
            logits = target.logits(decoder.step(ids, position))
            chosen = pick(logits, state.temperature(), state.turn < 3, template)
        tick(position)
    return ids_BT, answer_BT, state.warmth


def write_corpus(
    target: Target, folder: Path, tokenizer: Path, plan: CorpusPlan, say: Callable[[str], None], budget: float | None = None
) -> list[Path]:
    """Write the shards of `plan` that are missing in `folder`; returns all that exist. Stops early after `budget` seconds.

    Raises `LabError` for a corpus with other settings, a damaged description, and a full disk. Whose text it is, the caller makes sure of.
    """
    template = Template.build(tokenizer)
    described = folder / f"{plan.name}.json"
    if described.exists() and plan_of(folder, plan.name) != json.loads(json.dumps(asdict(plan))):
        raise another(folder, f"a corpus '{plan.name}' that was written with other settings")
    keep(described, json.dumps(provenance.collect(plan=asdict(plan)), indent=1).encode())
    begin, paths = time.monotonic(), []
    decoder: Decoder | None = None
    pick: Callable[..., Tensor] = choose
    for index in range(plan.shards):
        path = folder / f"{plan.name}-{index:03d}.npz"
        if not path.exists():
            if budget is not None and time.monotonic() - begin > budget:
                say(f"corpus {plan.name}: stopped after {index} of {plan.shards} shards (time budget)")
                break
            if decoder is None:
                decoder = target.decoder(plan.rows, plan.length)
                if target.embed_VH.is_cuda:
                    pick = torch.compile(choose)
            start = time.monotonic()

            def tick(position: int, start: float = start, index: int = index) -> None:
                if position % 128 == 127:
                    rate = (position + 1) * plan.rows / (time.monotonic() - start)
                    say(f"corpus {plan.name} {index + 1}/{plan.shards}: position {position + 1}/{plan.length}, {rate:,.0f} tok/s")

            ids, answer, warmth = write_rows(decoder, pick, plan, template, index, tick)
            content = io.BytesIO()
            np.savez_compressed(content, ids=ids.cpu().numpy().astype(np.uint16), answer=answer.cpu().numpy(), warmth=warmth.cpu().numpy())
            keep(path, content.getbuffer())
        paths.append(path)
    return paths


def plan_of(folder: Path, name: str) -> dict[str, Any]:
    """The settings that the corpus `name` in `folder` was written with; raises `LabError` for a corpus that is not there or damaged."""
    described = folder / f"{name}.json"
    if not described.exists():
        raise _no_corpus(folder, name)
    with reading(described):
        return dict(json.loads(described.read_text())["plan"])


def _no_corpus(folder: Path, name: str) -> LabError:
    return LabError(f"There is no corpus '{name}' in {folder}.", todo="Write it first: eagle3-lab train corpus")


@dataclass(frozen=True)
class Rows:
    """Conversations of one length: `ids` [rows, length] uint16, `answer` [rows, length] bool, `warmth` [rows] float."""

    ids: np.ndarray
    answer: np.ndarray
    warmth: np.ndarray

    @classmethod
    def read(cls, folder: Path, name: str) -> Rows:
        """All shards of the corpus `name` in `folder`, in order."""
        paths = sorted(folder.glob(f"{name}-[0-9][0-9][0-9].npz"))
        if not paths:
            raise _no_corpus(folder, name)
        shards = []
        for path in paths:
            with reading(path), np.load(path) as shard:
                shards.append((shard["ids"], shard["answer"], shard["warmth"]))
        return cls(*(np.concatenate(parts) for parts in zip(*shards, strict=True)))

    def take(self, rows: slice) -> Rows:
        """A part of the rows."""
        return Rows(self.ids[rows], self.answer[rows], self.warmth[rows])
