"""Training an Eagle3 draft on the self-written corpus.

Each step reads whole rows, computes the target's features and its distribution over the draft vocabulary on the fly (storing them would
take hundreds of gigabytes; the target's forward is cheap), unrolls the draft (`unroll.py`) and minimises, at every answer token that the
draft can say, the cross-entropy to the target's distribution. Towards the end part of the weight moves to the target's first choice,
since greedy verification asks only for that. Matrices of the layer are trained by Muon (Jordan et al. 2024), head and norms by AdamW.

The rate is constant after a warm-up and falls linearly to zero over the last part. State is saved at intervals, on Ctrl-C and at the end
of a time budget; a run with the same plan goes on from there. `log.jsonl` in the run's folder has the losses every few steps and, at each
evaluation, hit rates on held-out rows. One record a line: step, tokens, seconds, loss [J], and for an evaluation one object a corpus.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lab import provenance
from lab.errors import LabError
from lab.train.corpus import Rows
from lab.train.draft import Draft, DraftShape, draft_vocabulary
from lab.train.state import another, keep, keep_state, reading
from lab.train.target import Target
from lab.train.unroll import Attention, unroll


@dataclass(frozen=True)
class TrainPlan:
    """Settings of a run; two runs with equal plans, corpora and starts are the same run."""

    #: Corpora by name, and the share of steps that each gets.
    corpora: tuple[tuple[str, float], ...] = (("main", 1.0),)
    steps: int = 6000
    #: Tokens of one step, over all rows.
    tokens: int = 49152
    unroll: int = 4
    decay: float = 0.9
    levels: tuple[int, ...] = ()
    #: Draft tokens; 0: exactly those of the earlier draft that the run goes on from.
    vocab: int = 8192
    intermediate: int = 1536
    rate_matrix: float = 3e-3
    rate_rest: float = 1.5e-3
    weight_decay: float = 0.01
    warmup: int = 100
    #: Share of the steps over which the rate falls to zero and the first choice gains weight, up to `greedy_weight`.
    cooldown: float = 0.4
    greedy_weight: float = 0.3
    #: Rows of each corpus kept for evaluation.
    held_out: int = 192
    evaluate_every: int = 1000
    record_every: int = 50
    seed: int = 1


@dataclass
class Batch:
    """What one step needs, all on the device: `embed` of the next token, `features`, target `logits` over the draft vocabulary, `mask`."""

    embed_BTH: Tensor
    features_BTF: Tensor
    logits_BTW: Tensor
    mask_BT: Tensor
    next_ids_BT: Tensor


def make_batch(target: Target, draft: Draft, ids_BT: Tensor, answer_BT: Tensor) -> Batch:
    """Columns 0..T-2 of the rows: column t reads feature t and token t + 1, and predicts token t + 2 (the last column has none)."""
    features, final = target.features(ids_BT, draft.shape.levels)
    following = F.pad(ids_BT[:, 1:], (0, 1))
    wanted = F.pad(ids_BT[:, 2:], (0, 2))
    counted = F.pad(answer_BT[:, 2:], (0, 2)) & draft.t2d[wanted]
    # The target's distribution for token t + 2 is made from its hidden state at t + 1.
    ahead = F.pad(final[:, 1:], (0, 0, 0, 1))
    with torch.no_grad():
        logits = F.linear(ahead, target.embed_VH[draft.kept])
    return Batch(F.embedding(following, target.embed_VH), features, logits, counted, wanted)


def losses(draft: Draft, batch: Batch, attend: Callable[..., Tensor], steps: int, greedy: Tensor) -> Tensor:
    """Mean cross-entropy [J] of each unrolled step over the counted columns; `greedy` (scalar) is the weight of the first choice."""
    wanted = batch.logits_BTW.float().softmax(-1).to(batch.logits_BTW.dtype)
    first = batch.logits_BTW.argmax(-1, keepdim=True)
    found = []
    for step, output in enumerate(unroll(draft, batch.embed_BTH, batch.features_BTF, attend, steps)):
        scores = F.linear(output, draft.lm_head).float()
        soft = (wanted.float() * scores).sum(-1)
        hard = scores.gather(-1, first).squeeze(-1)
        loss = scores.logsumexp(-1) - (1 - greedy) * soft - greedy * hard
        mask = batch.mask_BT & (torch.arange(loss.shape[1], device=loss.device) >= step)
        found.append((loss * mask).sum() / mask.sum().clamp_min(1))
    return torch.stack(found)


@torch.no_grad()
def hits(draft: Draft, batch: Batch, attend: Callable[..., Tensor], steps: int) -> Tensor:
    """Whether step j's first choice at column t is the row's token t + 2: bool [J, B, T]."""
    found = []
    for output in unroll(draft, batch.embed_BTH, batch.features_BTF, attend, steps):
        choice = draft.kept[F.linear(output, draft.lm_head).argmax(-1)]
        found.append(choice == batch.next_ids_BT)
    return torch.stack(found)


def replay(hit_JT: np.ndarray, counted_T: np.ndarray, k: int) -> tuple[int, int]:
    """Drafts and accepted tokens if greedy verification ran over one row: after a accepted tokens the next draft starts a + 1 columns on.

    Step j of a draft that starts at column t predicts from column t + j. Assumes that the row is the target's greedy text.
    """
    drafts = accepted = column = 0
    while column < len(counted_T):
        if not counted_T[column]:
            column += 1
            continue
        taken = 0
        while taken < k and column + taken < len(counted_T) and counted_T[column + taken] and hit_JT[taken, column + taken]:
            taken += 1
        drafts, accepted, column = drafts + 1, accepted + taken, column + taken + 1
    return drafts, accepted


def turn_of(point: float, shares: Sequence[float]) -> int:
    """Whose turn a step is: `shares` spread evenly over successive points (a golden-ratio sequence)."""
    left = point * 0.6180339887498949 % 1.0 * sum(shares)
    for index, share in enumerate(shares):
        left -= share
        if left < 0:
            return index
    return len(shares) - 1  # what rounding leaves


@dataclass
class Corpus:
    """Rows on the device, and how they are drawn."""

    name: str
    share: float
    rows: Rows
    held_out: Rows
    device: torch.device | str
    ids: Tensor = field(init=False)
    answer: Tensor = field(init=False)
    order: tuple[tuple[int, int], Tensor] | None = None

    def __post_init__(self) -> None:
        self.ids = torch.from_numpy(self.rows.ids.astype(np.int32)).to(self.device)
        self.answer = torch.from_numpy(self.rows.answer).to(self.device)

    def draw(self, seed: int, turn: int, batch: int) -> tuple[Tensor, Tensor]:
        """The `turn`-th batch of rows: ids and answers. Every epoch is a permutation of its own."""
        epoch, place = divmod(turn, len(self.ids) // batch)
        if self.order is None or self.order[0] != (seed, epoch):
            mixed = np.random.default_rng((seed, epoch)).permutation(len(self.ids))
            self.order = ((seed, epoch), torch.from_numpy(mixed).to(self.ids.device))
        rows = self.order[1][place * batch : (place + 1) * batch]
        return self.ids[rows].long(), self.answer[rows]


class Trainer:
    """One run: its data, model, optimisers and state file in `folder`."""

    def __init__(
        self, plan: TrainPlan, target: Target, corpus_folder: Path, folder: Path, say: Callable[[str], None], start: Path | None = None
    ) -> None:
        """`start`: checkpoint of an earlier draft of this shape to go on from (its optimiser's state is not part of it).

        Raises `LabError` for a folder of another run, a damaged file of the run or the corpora, and a corpus of too few rows.
        """
        self.plan, self.target, self.folder, self.say = plan, target, folder, say
        #: SHA-256 of the earlier draft's weights, "" for none: part of what makes two runs the same.
        self.start = "" if start is None else provenance.sha256(start / "model.safetensors")
        self.device = target.embed_VH.device
        self.corpora = []
        for name, share in plan.corpora:
            rows = Rows.read(corpus_folder, name)
            if len(rows.ids) <= plan.held_out:
                raise LabError(f"The corpus '{name}' has only {len(rows.ids)} rows, and {plan.held_out} are held out.")
            kept, rest = rows.take(slice(0, plan.held_out)), rows.take(slice(plan.held_out, None))
            self.corpora.append(Corpus(name, share, rest, kept, self.device))
        torch.manual_seed(plan.seed)
        earlier = None if start is None else Draft.load(start, target.shape)
        vocabulary = self.vocabulary(earlier)
        shape = DraftShape(plan.levels or target.shape.default_levels(), len(vocabulary), plan.intermediate)
        self.draft = Draft(target.shape, shape, vocabulary).to(self.device)
        sample = self.corpora[0].ids[:32].long()
        self.draft.start_from(target, target.features(sample, shape.levels)[0].flatten(0, 1))
        if earlier is not None:
            self.draft.go_on_from(earlier)
        matrices: list[Tensor] = []
        others: list[Tensor] = []
        for name, parameter in self.draft.named_parameters():
            (matrices if parameter.ndim == 2 and name != "lm_head" else others).append(parameter)
        self.optimisers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=plan.rate_matrix, weight_decay=plan.weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=plan.rate_rest, betas=(0.9, 0.98), weight_decay=0.0, fused=self.device.type == "cuda"),
        ]
        self.attend = {corpus.ids.shape[1]: Attention(corpus.ids.shape[1], plan.unroll, self.device) for corpus in self.corpora}
        self.losses: Callable[..., Tensor] = losses
        self.hits: Callable[..., Tensor] = hits
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
            self.losses = torch.compile(losses, dynamic=False)
            self.hits = torch.compile(hits, dynamic=False)
            target.layer_forward = torch.compile(target.layer_forward, dynamic=False)  # type: ignore[method-assign]
        self.step = 0
        self.seconds = 0.0
        #: The records of `log.jsonl`.
        self.log: list[dict[str, Any]] = []
        self.restore()

    def vocabulary(self, earlier: Draft | None) -> Tensor:
        """The draft vocabulary: the most frequent answer tokens of the corpora, or the earlier draft's if the plan names no size."""
        counts = np.zeros(self.target.shape.vocab, np.int64)
        for corpus in self.corpora:
            counts += np.bincount(corpus.rows.ids[corpus.rows.answer], minlength=len(counts))
        if self.plan.vocab:
            kept = draft_vocabulary(torch.from_numpy(counts), self.plan.vocab, always=(0, 2))
        elif earlier is not None:
            kept = earlier.kept
        else:
            raise ValueError("a plan without a draft vocabulary needs an earlier draft")
        self.coverage = float(counts[kept.numpy()].sum() / max(counts.sum(), 1))
        return kept

    @property
    def state_path(self) -> Path:
        """Where the run's state is saved."""
        return self.folder / "state.pt"

    @property
    def log_path(self) -> Path:
        """Where the run's records are."""
        return self.folder / "log.jsonl"

    def save(self) -> None:
        """Save the run's state, atomically; raises `LabError` for a full disk."""
        state = {
            "plan": asdict(self.plan),
            "start": self.start,
            "draft": self.draft.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "step": self.step,
            "seconds": self.seconds,
        }
        keep_state(self.state_path, state)

    def restore(self) -> None:
        """Go on from a saved state, if there is one made by the same plan from the same start, and from the log up to that state."""
        if not self.state_path.exists():
            return
        with reading(self.state_path):
            state = torch.load(self.state_path, map_location=self.device, weights_only=True)
            if (state["plan"], state.get("start", "")) != (asdict(self.plan), self.start):
                raise another(self.folder, "a run with other settings")
            self.draft.load_state_dict(state["draft"])
            for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
                optimiser.load_state_dict(saved)
            self.step, self.seconds = state["step"], state["seconds"]
        if self.log_path.exists():
            with reading(self.log_path):
                records = [json.loads(line) for line in self.log_path.read_text().splitlines() if line.strip()]
                self.log = [record for record in records if record["step"] <= self.step]  # a killed run has logged steps that are lost
        self.say(f"resumed at step {self.step} of {self.plan.steps}")

    def schedule(self) -> tuple[float, float]:
        """The rate's factor and the first choice's weight at this step."""
        plan = self.plan
        left = (plan.steps - self.step) / max(plan.steps * plan.cooldown, 1)
        cooling = min(1.0, left)
        return min(1.0, (self.step + 1) / plan.warmup) * cooling, (1 - cooling) * plan.greedy_weight

    def pick_corpus(self, step: int) -> Corpus:
        """Which corpus a step reads."""
        return self.corpora[turn_of(step, [corpus.share for corpus in self.corpora])]

    def train_step(self) -> Tensor:
        """One optimiser step; returns the losses [J] (on the device, detached)."""
        plan = self.plan
        rate, greedy = self.schedule()
        corpus = self.pick_corpus(self.step)
        length = corpus.ids.shape[1]
        ids, answer = corpus.draw(plan.seed, self.step, max(plan.tokens // length, 1))
        with torch.autocast(self.device.type, torch.bfloat16):
            batch = make_batch(self.target, self.draft, ids, answer)
            found = self.losses(self.draft, batch, self.attend[length], plan.unroll, torch.tensor(greedy, device=self.device))
        weights = plan.decay ** torch.arange(plan.unroll, device=self.device)
        ((found * weights).sum() / weights.sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        for optimiser, base in zip(self.optimisers, (plan.rate_matrix, plan.rate_rest), strict=True):
            for group in optimiser.param_groups:
                group["lr"] = base * rate
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step += 1
        return found.detach()

    def held_out(self) -> Iterator[tuple[str, dict[str, float]]]:
        """For each corpus: first-choice hit rate of each step on held-out greedy rows, and the mean acceptance length a replay gives."""
        plan = self.plan
        for corpus in self.corpora:
            greedy = corpus.held_out.warmth == 0
            ids_all, answer_all = corpus.held_out.ids[greedy], corpus.held_out.answer[greedy]
            length = ids_all.shape[1]
            batch = min(max(plan.tokens // length, 1), len(ids_all))
            hit_parts, counted_parts = [], []
            for start in range(0, len(ids_all) - batch + 1, batch):
                ids = torch.from_numpy(ids_all[start : start + batch].astype(np.int64)).to(self.device)
                answer = torch.from_numpy(answer_all[start : start + batch]).to(self.device)
                with torch.autocast(self.device.type, torch.bfloat16):
                    hit = self.hits(self.draft, make_batch(self.target, self.draft, ids, answer), self.attend[length], plan.unroll)
                hit_parts.append(hit.cpu().numpy())
                counted_parts.append(F.pad(answer[:, 2:], (0, 2)).cpu().numpy())
            hit_all, counted_all = np.concatenate(hit_parts, 1), np.concatenate(counted_parts)
            if not counted_all.any():  # too few rows to say anything
                continue
            record = {f"hit_{step + 1}": float(hit_all[step][counted_all].mean()) for step in range(plan.unroll)}
            for k in (3, plan.unroll):
                drafts, accepted = np.sum([replay(hit_all[:k, row], counted_all[row], k) for row in range(len(counted_all))], 0)
                record[f"length_k{k}"] = 1 + accepted / max(drafts, 1)
            yield corpus.name, record

    def record(self, losses_J: Tensor | None, evaluate: bool) -> None:
        """Add a record to `log.jsonl`, which is written whole, since half a line could not be read again; and say it."""
        found: dict[str, Any] = {"step": self.step, "tokens": self.step * self.plan.tokens, "seconds": round(self.seconds, 1)}
        if losses_J is not None:
            found["loss"] = [round(value, 4) for value in losses_J.tolist()]
        if evaluate:
            found.update({name: {key: round(float(value), 4) for key, value in values.items()} for name, values in self.held_out()})
        keep(self.log_path, "".join(json.dumps(record) + "\n" for record in [*self.log, found]).encode())
        self.log.append(found)
        rate = found["tokens"] / self.seconds if self.seconds else 0.0
        self.say(f"step {self.step}/{self.plan.steps}, {rate:,.0f} tok/s, {json.dumps(found)}")

    def clock(self, begin: float, before: float) -> None:
        """Count the seconds of this run, the device's queue included."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds = before + time.monotonic() - begin

    def run(self, budget: float | None = None) -> bool:
        """Train until done (True) or until `budget` seconds are over (False); either way, and on Ctrl-C, the state is saved."""
        plan, begin, before = self.plan, time.monotonic(), self.seconds
        recent: list[Tensor] = []
        try:
            if self.start and not self.step:  # what the earlier draft does here
                self.record(None, evaluate=True)
            while self.step < plan.steps:
                recent.append(self.train_step())
                last = self.step == plan.steps
                evaluate = last or self.step % plan.evaluate_every == 0
                if evaluate or self.step % plan.record_every == 0:
                    self.clock(begin, before)
                    self.record(torch.stack(recent).mean(0), evaluate)
                    recent.clear()
                if not last and budget is not None and time.monotonic() - begin > budget:
                    self.say(f"stopped at step {self.step} of {plan.steps} (time budget); run again to go on")
                    return False
                if evaluate and not last:
                    self.save()
            if not self.log or self.log[-1]["step"] != self.step:  # stopped while the last step was being recorded
                self.record(None, evaluate=True)
        finally:
            self.clock(begin, before)
            self.save()
        return True
