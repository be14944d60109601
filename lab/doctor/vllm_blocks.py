"""The child process that asks vLLM itself about block sizes: `python -m lab.doctor.vllm_blocks`, JSON on the last line of stdout.

For each backend of `blocks.BACKENDS` that vLLM has, its own `get_supported_kernel_block_sizes()`; and for each pair and size asked for on
stdin (`{"sizes": [...], "pairs": [[name, name], ...]}`) what `select_common_block_size` finds, or the message with which it gives up. The
backend of before pull request 39616 is asked about too: as a class that declares what vLLM declared then, put before vLLM's own selection.
Only this module imports vLLM here; it loads no model and needs no GPU.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.doctor.blocks import BACKENDS
from lab.errors import LabError, missing_dependency

TIMEOUT = 600.0


@dataclass(frozen=True)
class Answer:
    """vLLM's answers: `sizes` as it prints them, `selected` by (size, backends): the common size, or its message."""

    version: str
    sizes: dict[str, str] = field(default_factory=dict)
    selected: dict[tuple[int, tuple[str, ...]], int | str] = field(default_factory=dict)
    #: Backends that this vLLM could not give, with the reason.
    missing: dict[str, str] = field(default_factory=dict)


def ask(sizes: Sequence[int], pairs: Sequence[Sequence[str]], *, timeout: float = TIMEOUT) -> Answer:
    """Start the child (ten seconds or more: it imports torch and vLLM) and read its answer; raises `LabError` where there is no vLLM."""
    asked = json.dumps({"sizes": list(sizes), "pairs": [list(pair) for pair in pairs]})
    command = [sys.executable, "-m", "lab.doctor.vllm_blocks"]
    try:
        done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise LabError("vLLM's own selection could not be asked.", why=f"{type(error).__name__}: {error}.") from error
    if done.returncode == 4:
        raise missing_dependency("Asking vLLM's own block-size selection", "vllm")
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise LabError("vLLM's own selection could not be asked.", why=lines[-1] if lines else f"exit code {done.returncode}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    selected = {(size, tuple(names)): result for size, names, result in found["selected"]}
    return Answer(found["version"], found["sizes"], selected, found["missing"])


def _before_39616() -> Any:
    """A backend that declares what AITER's MLA declared before the pull request."""
    from vllm.v1.attention.backends.mla.rocm_aiter_mla import AiterMLABackend

    class Before(AiterMLABackend):
        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:  # noqa: ARG004
            return [1]

    return Before


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Ask vLLM, in this process."""
    import vllm
    from vllm.v1.worker.utils import select_common_block_size

    classes: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name, backend in BACKENDS.items():
        try:
            module, _, attribute = backend.path.rpartition(".")
            classes[name] = getattr(importlib.import_module(module), attribute) if backend.path else _before_39616()
        except (ImportError, AttributeError, RuntimeError, OSError) as error:
            missing[name] = f"{type(error).__name__}: {error}"
    selected: list[list[Any]] = []
    for names in asked["pairs"]:
        if not all(name in classes for name in names):
            continue
        for size in asked["sizes"]:
            try:
                result: int | str = int(select_common_block_size(size, [classes[name] for name in names]))
            except ValueError as error:
                result = str(error)
            selected.append([size, names, result])
    sizes = {name: str(one.get_supported_kernel_block_sizes()) for name, one in classes.items()}
    return {"version": str(vllm.__version__), "sizes": sizes, "selected": selected, "missing": missing}


def main() -> int:
    """Entry point of the child: 4 where vLLM is not installed."""
    try:
        found = answer(json.load(sys.stdin))
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("vllm", "torch"):
            return 4
        raise
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
