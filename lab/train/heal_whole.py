"""Healing the conversion to MLA, second stage: the corrections of all layers together, until the whole model says what the original says.

The layer-wise stage (`heal.py`) makes each residual stream alike in size, which is not what counts: an error that no later layer reads is
harmless. Here the converted model runs whole and minimises KL(original || converted) over the full vocabulary at every token (distillation,
Hinton et al. 2015). It begins with corrections that are there already: the layer-wise stage's, or those of a shipped recipe.

Only the corrections are trained (AdamW). They get more components than the start has, and are stored in 8 bits instead of 16, which makes
the file no larger (`mla.packed`). Their factors are first brought to equal size by an SVD of their product, which changes nothing in
the model: as LoRA leaves them, one is thirty times the other and would stand still at a rate that the other can bear. Matrices run in BF16,
the residual streams and the scores in float32 (TF32 on a GPU): the last digits of a score in BF16 are as large as what is left to heal.

State is saved at intervals, on Ctrl-C and at the end of a time budget, and a run with the same plan, start and text goes on from there.
The rate warms up, holds and falls to zero with the steps, or with the seconds if the plan has a time and that is over first.

Shapes as in `mla.py`; B rows, T positions, M = B T tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.errors import LabError
from lab.train.heal import PROJECTIONS, attended
from lab.train.loop import turn_of
from lab.train.mla import MlaWeights, corrected, packed, unpacked
from lab.train.state import another, keep_state, reading
from lab.train.target import Layer, Target, rms_norm

Correction = Mapping[str, Tensor]


@dataclass(frozen=True)
class WholePlan:
    """Settings of a run; two runs with equal plans, starts and texts are the same run."""

    #: 0: no such stage (`mla_run` leaves it out).
    steps: int = 1600
    #: The rate has fallen to zero after so many seconds, compiling included, even if steps are left; 0: however long they take.
    seconds: float = 0.0
    #: Tokens of one step, over all rows.
    tokens: int = 24576
    rate: float = 2e-4
    warmup: int = 100
    #: KL in nats from which a token counts by its logarithm; 0: every token by its KL. One token in a thousand has a sixth of all KL,
    #: and a small batch that learns from it forgets the rest.
    soft: float = 0.1
    #: Components of every correction; those that the start lacks begin at nothing. 64 in 8 bits are 11 MB for SmolLM2-135M.
    rank: int = 64
    #: Share of the run over which the rate falls to zero.
    cooldown: float = 0.7
    #: Tokens whose scores are held at once: each takes 4 V bytes several times.
    chunk: int = 4096
    record_every: int = 50
    save_every: int = 400
    seed: int = 1


@torch.no_grad()
def balanced(correction: Correction, rank: int = 0, seed: int = 0) -> dict[str, Tensor]:
    """The same correction, float32, with the factors of each projection of equal size: U S^1/2 and S^1/2 V of their product U S V.

    Up to `rank` further components are added: random `down`, as large as the others, and zero `up`.
    """
    random = torch.Generator().manual_seed(seed)
    found = {name: tensor.float().clone() for name, tensor in correction.items()}
    for name in PROJECTIONS:
        up, down = found[f"{name}.up"], found[f"{name}.down"]
        left, upper = torch.linalg.qr(up)
        right, lower = torch.linalg.qr(down.T)
        u, s, v = torch.linalg.svd(upper @ lower.T)
        up, down = (left @ u) * s.sqrt(), s.sqrt()[:, None] * (v @ right.T)
        more = max(rank - len(down), 0)
        fresh = torch.randn(more, down.shape[1], generator=random).to(down.device) * down.pow(2).mean().sqrt()
        found[f"{name}.up"], found[f"{name}.down"] = F.pad(up, (0, more)).contiguous(), torch.cat((down, fresh))
    return found


def divergence(hidden_MH: Tensor, wanted_MH: Tensor, embed_VH: Tensor, soft: float) -> tuple[Tensor, Tensor]:
    """Loss (KL softened, see `WholePlan.soft`) and KL(original || converted) in nats, each summed over tokens.

    From the final normed hidden states of the converted model and of the original.
    """
    found, wanted = (F.linear(hidden, embed_VH).log_softmax(-1) for hidden in (hidden_MH, wanted_MH))
    kl_M = (wanted.exp() * (wanted - found)).sum(-1).clamp(min=0)
    loss_M = soft * (kl_M / soft).log1p() if soft else kl_M
    return loss_M.sum(), kl_M.detach().sum()


class WholeHealing:
    """One run: the two models, the corrections under training, their optimiser and the state file in `folder`."""

    def __init__(
        self,
        target: Target,
        converted: Sequence[MlaWeights],
        start: Sequence[Correction],
        texts: Sequence[tuple[Tensor, float]],
        plan: WholePlan,
        folder: Path,
        say: Callable[[str], None],
    ) -> None:
        """`target`: the original, float32, on the device that trains. `converted`: what `mla.convert` makes of its layers without a
        correction, `start` the corrections. `texts`: rows of ids [B, T] and the share of steps that each gets. Raises `LabError` for a
        folder of another run or with a damaged state, and for a text of too few rows.
        """
        self.target, self.plan, self.folder, self.say = target, plan, folder, say
        self.device = target.embed_VH.device
        self.layers = [_in_bf16(layer)._replace(mla=weights) for layer, weights in zip(target.layers, converted, strict=True)]
        self.corrections = [
            balanced({name: tensor.to(self.device) for name, tensor in found.items()}, plan.rank, index)
            for index, found in enumerate(start)
        ]
        for tensor in self.parameters():
            tensor.requires_grad_()
        for ids, _ in texts:
            if len(ids) < 2 * self.rows(ids):
                raise LabError(
                    f"The text to heal on has {len(ids)} rows of {ids.shape[1]} tokens.",
                    why=f"A step takes {self.rows(ids)}, and as many are held out.",
                )
        #: Rows to train on, rows held out (as many as a step takes: a compiled graph knows no other number), share.
        self.texts = [(ids[self.rows(ids) :].to(self.device), ids[: self.rows(ids)], share) for ids, share in texts]
        fused = self.device.type == "cuda"
        self.optimiser = torch.optim.AdamW(self.parameters(), lr=plan.rate, betas=(0.9, 0.98), weight_decay=0.0, fused=fused)
        compiled: Callable[..., Any] = (lambda one: torch.compile(one, dynamic=False)) if fused else (lambda one: one)
        self.original_layer, self.healed_layer, self.divergence = map(compiled, (self._original_layer, self._healed_layer, divergence))
        self.step, self.seconds = 0, 0.0
        #: (step, KL on held-out rows of each text), as said.
        self.curve: list[tuple[int, list[float]]] = []
        self.same = {"plan": asdict(plan), "start": _digest(start), "text": hashlib.sha256(b"".join(map(_bytes, texts))).hexdigest()}
        self.restore()

    def parameters(self) -> list[Tensor]:
        """All that is trained."""
        return [tensor for correction in self.corrections for tensor in correction.values()]

    def rows(self, ids_BT: Tensor) -> int:
        """Rows of a step on this text."""
        return max(self.plan.tokens // ids_BT.shape[1], 1)

    # --- the two models ---

    def _original_layer(self, x_BTH: Tensor, layer: Layer) -> Tensor:
        with torch.autocast(x_BTH.device.type, torch.bfloat16):
            return self.target.layer_forward(x_BTH, layer)

    def _healed_layer(self, x_BTH: Tensor, layer: Layer, correction: Correction) -> Tensor:
        assert layer.mla is not None
        x_BTH = x_BTH + attended(self.target, corrected(layer.mla, correction), layer, x_BTH)
        with torch.autocast(x_BTH.device.type, torch.bfloat16):
            return self.target.mlp_forward(x_BTH, layer)

    def both(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Final normed hidden states [M, H] of the converted model, with gradient, and of the original."""
        embedded = F.embedding(ids_BT.to(self.device), self.target.embed_VH)
        with torch.no_grad():
            wanted = embedded
            for layer in self.layers:
                wanted = self.original_layer(wanted, layer)
        found = embedded.requires_grad_()  # as every later layer's input, so that one compiled graph serves all
        for layer, correction in zip(self.layers, self.corrections, strict=True):
            found = self.healed_layer(found, layer, correction)
        found, wanted = (rms_norm(x, self.target.norm_H, self.target.shape.eps).flatten(0, 1) for x in (found, wanted))
        return found, wanted

    def loss(self, ids_BT: Tensor, learn: bool) -> Tensor:
        """Mean KL in nats, detached; with `learn` the loss's gradient is added to the corrections'. Scores are made a chunk at a time."""
        found, wanted = self.both(ids_BT)
        leaf = found.detach().requires_grad_()
        total = torch.zeros((), device=self.device)
        for part, other in zip(leaf.split(self.plan.chunk), wanted.split(self.plan.chunk), strict=True):
            loss, kl = self.divergence(part, other, self.target.embed_VH, self.plan.soft)
            if learn:
                (loss / len(leaf)).backward()
            total += kl / len(leaf)
        if learn:
            found.backward(leaf.grad)
        return total

    # --- a run ---

    def progress(self) -> float:
        """How much of the run is over, 0 to 1: of its steps or of its time, whichever is more."""
        timed = self.seconds / self.plan.seconds if self.plan.seconds else 0.0
        return max(self.step / self.plan.steps, timed)

    def draw(self) -> Tensor:
        """The rows of this step: texts take turns by their shares, every pass over one is a permutation of its own."""
        index = turn_of(self.step + 0.5, [share for _, _, share in self.texts])
        ids = self.texts[index][0]
        count = self.rows(ids)
        turn, place = divmod(self.step, len(ids) // count)
        order = torch.randperm(len(ids), generator=torch.Generator().manual_seed((self.plan.seed * 1000 + index) * 100_003 + turn))
        return ids[order[place * count : (place + 1) * count].to(ids.device)]

    def train_step(self) -> Tensor:
        """One optimiser step; returns the mean KL of its rows before it."""
        rate = min(1.0, (self.step + 1) / self.plan.warmup, (1 - self.progress()) / self.plan.cooldown)
        loss = self.loss(self.draw(), learn=True)
        self.optimiser.param_groups[0]["lr"] = self.plan.rate * max(rate, 0.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.step += 1
        return loss

    def held_out(self) -> list[float]:
        """Mean KL in nats on the kept rows of each text, as this stage sees the model (BF16)."""
        return [float(self.loss(kept, learn=False)) for _, kept, _ in self.texts]

    def run(self, budget: float | None = None) -> bool:
        """Train until done (True) or until `budget` seconds are over (False); either way, and on Ctrl-C, the state is saved."""
        plan, begin, before = self.plan, time.monotonic(), self.seconds
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        recent: list[Tensor] = []
        try:
            if not self.curve:
                self.record([])
            while self.progress() < 1:
                recent.append(self.train_step())
                if self.step % 10 == 0 and self.device.type == "cuda":
                    torch.cuda.synchronize()  # the clock below must not run ahead of the work
                self.seconds = before + time.monotonic() - begin
                last = self.progress() >= 1
                if last or self.step % plan.record_every == 0:
                    self.record(recent, whole=last or self.step % plan.save_every == 0)
                    recent.clear()
                if not last and self.step % plan.save_every == 0:
                    self.save()
                if not last and budget is not None and time.monotonic() - begin > budget:
                    self.say(f"stopped at step {self.step} of {plan.steps} (time budget); run again to go on")
                    return False
            if self.curve[-1][0] != self.step:  # stopped while the last step was being recorded
                self.record([])
        finally:
            torch.set_float32_matmul_precision(precision)
            self.save()
        return True

    def record(self, recent: Sequence[Tensor], whole: bool = True) -> None:
        """Say how far it is; `whole`: and what the kept rows say."""
        line = f"step {self.step}/{self.plan.steps}, {self.seconds:.0f} s"
        if recent:
            line += (
                f", {self.step * self.plan.tokens / max(self.seconds, 1e-9):,.0f} tok/s, KL {float(torch.stack(list(recent)).mean()):.5f}"
            )
        if whole:
            self.curve.append((self.step, self.held_out()))
            line += ", on held-out rows " + ", ".join(f"{value:.5f}" for value in self.curve[-1][1])
        self.say(line)

    @property
    def state_path(self) -> Path:
        """Where the run's state is saved."""
        return self.folder / "whole.pt"

    def save(self) -> None:
        """Save the run's state, atomically; raises `LabError` for a full disk."""
        state = {
            "same": json.dumps(self.same),
            "corrections": self.corrections,
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "curve": self.curve,
        }
        keep_state(self.state_path, state)

    def restore(self) -> None:
        """Go on from a saved state, if there is one of the same run."""
        if not self.state_path.exists():
            return
        with reading(self.state_path), torch.no_grad():
            state = torch.load(self.state_path, map_location=self.device, weights_only=True)
            if state["same"] != json.dumps(self.same):
                raise another(self.folder, "a healing with other settings, start or text")
            for mine, saved in zip(self.corrections, state["corrections"], strict=True):
                for name, tensor in mine.items():
                    tensor.copy_(saved[name])
            self.optimiser.load_state_dict(state["optimiser"])
            self.step, self.seconds, self.curve = state["step"], state["seconds"], state["curve"]
        self.say(f"resumed at step {self.step} of {self.plan.steps}")

    def found(self) -> list[dict[str, Tensor]]:
        """The corrections as a file holds them, on the CPU: factors rounded to 8 bits and the norm to BF16."""
        held = [{name: tensor.detach().cpu() for name, tensor in correction.items()} for correction in self.corrections]
        return [unpacked(packed({**correction, "norm": correction["norm"].to(torch.bfloat16)})) for correction in held]


def _in_bf16(layer: Layer) -> Layer:
    """A frozen layer whose matrices need no cast under autocast. They were BF16 in the checkpoint, so this loses nothing."""
    return layer._replace(**{name: getattr(layer, name).to(torch.bfloat16) for name in ("qkv", "out", "gate_up", "down")})


def _bytes(text: tuple[Tensor, float]) -> bytes:
    return text[0].cpu().numpy().tobytes()


def _digest(start: Sequence[Correction]) -> str:
    together = hashlib.sha256()
    for correction in start:
        for name in sorted(correction):
            together.update(correction[name].detach().cpu().float().numpy().tobytes())
    return together.hexdigest()
