"""What a recipe is: a target, its drafts, and how vLLM serves them. Data only; `lab/serving/command.py` turns it into a command.

A recipe is made by a function in this package that returns a frozen `Recipe`; a variant edits a base with `dataclasses.replace`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Precision = Literal["bf16", "fp8"]
DraftChoice = Literal["none", "bf16", "fp8"]


@dataclass(frozen=True)
class Hub:
    """Weights on the Hugging Face hub: vLLM fetches them by name."""

    repo: str
    revision: str | None = None


@dataclass(frozen=True)
class Gguf:
    """Weights inside an installed Python package, as GGUF; converted to a BF16 checkpoint on first use."""

    package: str
    filename: str


@dataclass(frozen=True)
class Asset:
    """A checkpoint folder that the lab ships, below `assets/`."""

    path: str


@dataclass(frozen=True)
class QuarkFp8:
    """FP8 made on first use by AMD Quark from another draft."""

    source: Asset | Hub


#: The three of the target's layers that an Eagle3 draft sees, in the order in which `fc` reads them.
Level = Literal["low", "middle", "high"]
LEVELS: tuple[Level, ...] = ("low", "middle", "high")


@dataclass(frozen=True)
class Cut:
    """Another draft with one feature level cut off: the level's columns of `fc` are zero. Made on first use, see `checkpoints/cut.py`."""

    of: Checkpoint
    level: Level


@dataclass(frozen=True)
class Mla:
    """Another Llama target in the form of DeepSeek's multi-head latent attention, converted on first use as the file `recipe` below
    `assets/` says (see `lab/train/mla.py`)."""

    of: Checkpoint
    recipe: str
    #: Size that zeros fill each head's values up to; 0 leaves them.
    values: int = 0


Weights = Hub | Gguf | Asset | QuarkFp8 | Cut | Mla


@dataclass(frozen=True)
class Checkpoint:
    """Named weights: the name is also the folder in the cache."""

    name: str
    weights: Weights


Flags = tuple[tuple[str, str | None], ...]


@dataclass(frozen=True)
class Rule:
    """Flags and environment that a lane gets on top if it meets every condition given here."""

    #: Where this comes from: a URL, or a sentence.
    source: str
    #: Lanes with one of these drafts ("none" is the baseline); () is any.
    drafts: tuple[DraftChoice, ...] = ()
    #: Fewer GPUs than this in `--tensor-parallel-size`; prompts of at least this many tokens (`Lane.isl`).
    tp_below: int | None = None
    isl_from: int | None = None
    flags: Flags = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def holds(self, draft: DraftChoice, tp: int, isl: int) -> bool:
        """Whether a lane with this draft, on `tp` GPUs and for prompts of `isl` tokens, gets what the rule adds."""
        return (
            (not self.drafts or draft in self.drafts)
            and (self.tp_below is None or tp < self.tp_below)
            and (self.isl_from is None or isl >= self.isl_from)
        )


@dataclass(frozen=True)
class Recipe:
    """A target, its Eagle3 drafts and the serving settings that were tried together."""

    #: Short name used on the command line, and a line for people.
    name: str
    title: str
    target: Checkpoint
    #: Eagle3 drafts by precision; empty means that only the baseline exists.
    drafts: Mapping[Precision, Checkpoint]
    #: Default `num_speculative_tokens`, and the largest that the lab offers.
    k: int = 3
    k_max: int = 8
    #: K of the drafts whose default is another one.
    draft_k: Mapping[Precision, int] = field(default_factory=dict)
    #: Flags for every lane, as vLLM spells them; a value of None is a bare flag.
    flags: Flags = ()
    #: What some lanes get on top, in this order.
    rules: tuple[Rule, ...] = ()
    #: Flags for a lane in eager mode (quick to start) and in compiled mode (measured), and which one a lane is when nobody says.
    eager_flags: Flags = (("--enforce-eager", None),)
    compiled_flags: Flags = ()
    compiled: bool = False
    #: Values of `--tensor-parallel-size` that the recipe was made for, its default first; () sets none (one device).
    tp: tuple[int, ...] = ()
    #: Whether `--enable-expert-parallel` is given when nobody says; None for a model without experts.
    expert_parallel: bool | None = None
    #: Environment of the server, on top of the caller's; and what a lane in eager or in compiled mode adds to it.
    environment: Mapping[str, str] = field(default_factory=dict)
    eager_environment: Mapping[str, str] = field(default_factory=dict)
    compiled_environment: Mapping[str, str] = field(default_factory=dict)
    #: Extra keys of `--speculative-config`.
    speculative: Mapping[str, object] = field(default_factory=dict)
    max_model_len: int = 2048
    #: Tokens of prompt and answer that it is measured with (ISL, OSL), and what `--max-model-len` adds to them; 0: the length is fixed.
    isl: int = 0
    osl: int = 0
    headroom: int = 0
    #: vLLM schedules the next step before it knows this one's tokens (async scheduling), which a traced lane must switch off: its speed is
    #: then not the recipe's, and it is labelled as traced wherever a number of it is shown. False where vLLM never does that (CPU).
    async_scheduling: bool = False
    #: Accelerators that the settings were published for; () is plain CPU cores.
    hardware: tuple[str, ...] = ()
    #: Servers that run elsewhere and take a lane's place, by draft: their addresses (`lab/serving/attach.py`). `elsewhere`: all do.
    remotes: Mapping[DraftChoice, str] = field(default_factory=dict)
    elsewhere: bool = False
    #: What depends on the machine and is therefore not in the command: sentences for people.
    notes: tuple[str, ...] = ()
    #: About how much host memory one server takes (PSS, bytes): decides how many lanes stay warm.
    memory_bytes: int = 4 << 30
    #: The part of a GPU's memory that one server takes: decides how many share a GPU. Not used on a CPU.
    gpu_share: float = 1.0
    #: What the drafts of a variant are, for labels ("BF16 without low level"); "" where the precision says it.
    variant: str = ""
    #: Where each setting comes from: a field's, flag's or variable's name to a URL or a sentence (rules carry their own).
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def value_bytes(self) -> int:
        """Bytes of a value that the servers compute with (and cache, unless a flag names another type): 4 in float32, else 2."""
        return 4 if dict(self.flags).get("--dtype") == "float32" else 2

    def draft_choices(self) -> tuple[DraftChoice, ...]:
        """What the draft switch offers: `none`, then the precisions this recipe has."""
        return tuple(self.remotes) if self.elsewhere else ("none", *self.drafts)

    def default_k(self, draft: DraftChoice) -> int:
        """K of a lane with this draft when nobody says; 0 for the baseline."""
        return 0 if draft == "none" else self.draft_k.get(draft, self.k)
