"""Target and draft side by side on a given text: the two distributions at every position, and what each part of the draft contributes.

vLLM reports the draft's probability of the tokens it proposes and the target's of a few candidates; here both models are run once over the
whole text (the same checkpoints, on the CPU), so every number of both distributions can be looked at. Position i is the token at index i of
the text: the target predicts it from the tokens before, the draft from its embedding of token i - 1 and the target's features at i - 2.
`skip` leaves feature levels out, as if they were zero. Later steps of the draft read its own output instead of features, as when it runs.

Limits: BF16 weights in float32 arithmetic on one row, so the last digits differ from the engine's; memory grows with the text's square.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from lab.trace.model import Request
from lab.trace.render import chip_text
from lab.train.draft import Draft
from lab.train.target import Target
from lab.train.unroll import Attention, unroll

#: Texts of which a `Pair` keeps what the target said: 20 MB for a hundred tokens of a vocabulary of 49,152.
KEPT = 16


@dataclass(frozen=True)
class Seen:
    """One text as both models see it. T tokens, V target vocabulary, W draft vocabulary, J steps of the draft."""

    ids: np.ndarray
    #: The target's probabilities of the token at each index, float32 [T, V]; row 0 is unused (nothing stands before it).
    target: np.ndarray
    #: The draft's probabilities [J, T, W] when the token is the 1st, 2nd, ... of a step; rows 0 to j + 1 of step j are unused.
    draft: np.ndarray
    #: Target ids that the draft can say, sorted [W].
    vocabulary: np.ndarray

    def q(self, index: int, step: int = 0) -> np.ndarray:
        """The draft's distribution at `index` over the target's vocabulary, float64 [V]."""
        wide = np.zeros(self.target.shape[1])
        wide[self.vocabulary] = self.draft[step, index]
        return wide / wide.sum()

    def p(self, index: int) -> np.ndarray:
        """The target's distribution at `index`, float64 [V]."""
        row = self.target[index].astype(np.float64)
        return row / row.sum()

    def hits(self, indices: Sequence[int], step: int = 0) -> float:
        """Share of `indices` where the draft's first choice is the target's first choice."""
        best = self.vocabulary[self.draft[step, list(indices)].argmax(-1)]
        return float((best == self.target[list(indices)].argmax(-1)).mean())

    def overlap(self, indices: Sequence[int], step: int = 0) -> float:
        """Mean over `indices` of the sum of min(p, q): what the rejection rule would accept of draft tokens drawn from q."""
        target = self.target[list(indices)][:, self.vocabulary]
        return float(np.minimum(target, self.draft[step, list(indices)]).sum(-1).mean())


class Pair:
    """A target and its draft, loaded once."""

    def __init__(self, target: Path | str, draft: Path | str) -> None:
        """Folders of the two checkpoints, as `lab.checkpoints.ensure` gives them."""
        self.target = Target.load(Path(target), dtype=torch.float32)
        self.draft = Draft.load(Path(draft), self.target.shape)
        self._texts: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self.tokenizer = Tokenizer.from_file(str(Path(target) / "tokenizer.json"))

    @property
    def levels(self) -> tuple[int, ...]:
        """Layers of the target whose inputs are the low, middle and high features."""
        return self.draft.shape.levels

    def parts(self) -> list[tuple[str, tuple[int, ...], int]]:
        """`(name, shape, numbers)` of each tensor of the draft's checkpoint, the largest first."""
        tensors = self.draft.weights()
        return sorted(((name, tuple(one.shape), one.numel()) for name, one in tensors.items()), key=lambda part: -part[2])

    def covered(self, ids: Sequence[int]) -> float:
        """Share of `ids` that the draft can say at all."""
        return float(self.draft.t2d[list(ids)].float().mean())

    def words(self, ids: Sequence[int]) -> list[str]:
        """What each token is by itself, with signs for what would not be seen, as the page's chips show it."""
        return ["".join(chip_text(self.tokenizer.decode([token], skip_special_tokens=False).encode())) for token in ids]

    def _read(self, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's features and distributions of a text; the last `KEPT` texts are kept, since reading them is most of the work."""
        name = tuple(row[0].tolist())
        if name not in self._texts:
            features, hidden = self.target.features(row, self.levels)
            self._texts[name] = features, F.softmax(self.target.logits(hidden[0]), -1)
            while len(self._texts) > KEPT:
                del self._texts[next(iter(self._texts))]
        return self._texts[name]

    @torch.no_grad()
    def look(self, ids: Sequence[int], *, steps: int = 1, skip: Collection[int] = ()) -> Seen:
        """Both distributions over the text `ids`; `skip` holds places of levels to leave out (0 low, 1 middle, 2 high)."""
        row = torch.tensor([list(ids)])
        features, target = self._read(row)
        if skip:
            features, wide = features.clone(), self.target.shape.hidden
            for place in skip:
                features[..., place * wide : (place + 1) * wide] = 0
        embedded = F.embedding(row[:, 1:], self.target.embed_VH)
        length = embedded.shape[1]
        outputs = unroll(self.draft, embedded, features[:, :-1], Attention(length, steps, "cpu"), steps)
        scores = [F.softmax(F.linear(output[0], self.draft.lm_head), -1) for output in outputs]
        # Column t of the draft and row t + 1 of the target's output predict the token at index t + 2.
        drafted = torch.stack([F.pad(score[:-1], (0, 0, 2, 0)) for score in scores])
        return Seen(np.asarray(ids), F.pad(target[:-1], (0, 0, 1, 0)).numpy(), drafted.numpy(), self.draft.kept.numpy())

    def hits(self, requests: Sequence[Request], *, steps: int = 1, skip: Collection[int] = ()) -> list[float]:
        """Over all places of the answers: how often the draft's first choice, as the 1st, 2nd, ... token of a step, is the target's."""
        hits, places = np.zeros(steps), np.zeros(steps)
        for request in requests:
            ids = [*request.prompt_ids, *request.output_ids()]
            seen = self.look(ids, steps=steps, skip=skip)
            for step in range(steps):
                where = range(len(request.prompt_ids) + 1 + step, len(ids))
                if len(where):
                    hits[step] += seen.hits(where, step) * len(where)
                    places[step] += len(where)
        return [float(share) for share in hits / np.maximum(places, 1)]


def first_proposals(seen: Seen, request: Request) -> tuple[np.ndarray, np.ndarray]:
    """The draft's probability of the first proposal of each step: as the engine reported it, and as `seen` (of the same text) has it."""
    reported, computed, place = [], [], len(request.prompt_ids)
    for step in request.steps:
        if step.draft and step.draft_probs and place < len(seen.ids):
            reported.append(step.draft_probs[0])
            computed.append(seen.q(place)[step.draft[0]])
        place += step.kept
    return np.array(reported), np.array(computed)
