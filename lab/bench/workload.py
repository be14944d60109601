"""What a sweep asks of a server: random prompts of given lengths, or prompts from files; and whether a server can take it at all.

Random prompts follow the published load: each prompt's length is drawn evenly from `low` to 1.0 of ISL, chat template included, each
answer's from `low` to 1.0 of OSL, and the end-of-sequence token is ignored. The clients spell this differently: InferenceX's
`--random-range-ratio 0.8` draws from [0.8 L, L], vLLM's draws from [L (1 - r), L (1 + r)], so the same 0.8 would there mean lengths from
0.2 L to 1.8 L, and a server made for ISL + OSL would refuse half of them. `client_lengths` translates the one into the other.

Prompts of files respect the end-of-sequence token; OSL is then the most new tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from lab.bench.prompts import PromptFile
from lab.errors import LabError
from lab.serving.command import Lane

#: Shortest length as a share of ISL and OSL, as published.
LOW = 0.8
#: Tokens of context that decoding and encoding random tokens again may add to a prompt.
DRIFT = 32


@dataclass(frozen=True)
class Workload:
    """Prompts of one kind. `isl` (tokens) is None for prompts from a file; `osl` is then the most new tokens."""

    name: str
    isl: int | None
    osl: int
    file: PromptFile | None = None

    @property
    def ignore_eos(self) -> bool:
        """Whether answers go on to their full length."""
        return self.file is None

    def definition(self) -> dict[str, object]:
        """What defines it, as plain data."""
        sha = self.file.sha256 if self.file else None
        return {"name": self.name, "isl": self.isl, "osl": self.osl, "prompts_sha256": sha, "ignore_eos": self.ignore_eos}


def _tokens(text: str) -> int:
    found = re.fullmatch(r"\s*(\d+)\s*([kK]?)\s*", text)
    if found is None or not int(found[1]):
        raise ValueError(text)
    return int(found[1]) * (1024 if found[2] else 1)


def lengths(text: str) -> list[Workload]:
    """Workloads from text such as "128/128, 1K/1K" (ISL/OSL; K is 1,024)."""
    found: dict[str, Workload] = {}
    for part in text.replace(";", ",").split(","):
        if not part.strip():
            continue
        try:
            isl, osl = (_tokens(side) for side in part.split("/"))
        except ValueError as error:
            raise LabError(
                f"'{part.strip()[:40]}' is not a pair of lengths.", todo="Write input/output tokens, for example 128/128 or 1K/1K."
            ) from error
        found[f"{isl}/{osl}"] = Workload(f"{isl}/{osl}", isl, osl)
    return list(found.values())


def numbers(text: str, what: str, *, least: int = 1, most: int = 1024) -> list[int]:
    """Whole numbers from text such as "1, 2, 4": each once, in the order given."""
    found: list[int] = []
    for part in text.replace(";", ",").split(","):
        if not part.strip():
            continue
        try:
            value = int(part)
        except ValueError as error:
            raise LabError(f"'{part.strip()[:40]}' is not a number for {what}.", todo="Write whole numbers with commas: 1,2,4.") from error
        if not least <= value <= most:
            raise LabError(f"{value} is out of range for {what}.", todo=f"Choose {least} to {most}.")
        if value not in found:
            found.append(value)
    if not found:
        raise LabError(f"No number was given for {what}.", todo="Write whole numbers with commas: 1,2,4.")
    return found


def client_lengths(length: int, low: float) -> tuple[int, float]:
    """vLLM's mean length and range ratio for lengths from floor(low * length) to `length`; its own rounding gives exactly that range,
    or one that starts one token higher or lower."""
    least = max(1, int(length * low))
    middle = (least + length) // 2
    half = length - middle
    # vLLM rounds the ends outwards (floor and ceil): a hair less keeps floating point from adding a token.
    return middle, max(0.0, (half - 1e-6) / middle) if half else 0.0


def served(lane: Lane, workload: Workload) -> Lane:
    """The lane that serves `workload`: a recipe whose context follows ISL and OSL gets a server made for them, as published."""
    if workload.isl is None or not lane.recipe.headroom:
        return lane
    return replace(lane, isl=workload.isl, osl=workload.osl, max_model_len=0)


def most_requests(lane: Lane) -> int | None:
    """How many requests the lane's server takes at once (`--max-num-seqs`); None where it is vLLM's default."""
    for flag, value in lane.recipe.flags:
        if flag == "--max-num-seqs" and value and value.isdigit():
            return int(value)
    return None


def refusal(lane: Lane, workload: Workload, concurrency: int, *, kv_tokens: int | None = None, template: int = 0) -> str | None:
    """Why this cell cannot be measured as asked on the lane's server, or None.

    `kv_tokens` is how many tokens the running server's KV cache holds, where it is known; `template` the tokens of the chat template.
    """
    most = most_requests(lane)
    if most is not None and concurrency > most:
        return f"The server takes at most {most} requests at once (--max-num-seqs), so {concurrency} would wait for each other."
    if workload.isl is None:
        if workload.osl >= lane.max_model_len:
            return f"{workload.osl} new tokens do not fit: the context is {lane.max_model_len} tokens."
        return None
    if template >= int(workload.isl * LOW):
        return f"Prompts of {workload.isl} tokens have no room for the chat template, which takes {template}."
    need = workload.isl + workload.osl
    if need + (0 if lane.recipe.headroom else DRIFT) > lane.max_model_len:
        return (
            f"A request needs up to {need} tokens of context ({workload.isl} in, {workload.osl} out, and {DRIFT} to spare); "
            f"the server's is {lane.max_model_len} (--max-model-len)."
        )
    if kv_tokens is not None and concurrency * need > kv_tokens:
        return (
            f"{concurrency} requests of up to {need} tokens need {concurrency * need} tokens of KV cache; this server's holds {kv_tokens}, "
            "so requests would wait or be preempted and the concurrency would not be the one asked for."
        )
    return None
