"""A compiled lane that starts from its cache: vLLM 0.32 writes one on a CPU and then cannot read it.

After the first compilation vLLM saves the compiled model and loads it at the next start. Its loader ends with a call of
`finalize_loading`, which only its own backend's artefacts have. On a CPU the backend is plain Inductor, whose artefact is torch's: the call
fails ("'function' object has no attribute 'finalize_loading'", a warning) and the model is traced and compiled again. Torch's artefact is
whole once loaded, so it gets a `finalize_loading` that does nothing; vLLM's checks of sources and configuration stay.

Installed by `cpu_speed` only, under its conditions. Servers that load no plugin, as the measured baseline, start slowly as before.
"""

from __future__ import annotations

import functools
from typing import Any


def finished(loaded: Any) -> Any:
    """The loaded AOT function, its artefact fit for vLLM's loader; one that finishes itself is left as it is."""
    artefact = getattr(getattr(loaded, "_artifacts", None), "compiled_fn", None)
    if artefact is not None and not hasattr(artefact, "finalize_loading"):
        artefact.finalize_loading = _nothing
    return loaded


def _nothing(vllm_config: Any) -> None:
    """What is left to do with an artefact of torch's own."""


def install() -> None:
    """Wrap torch's loader in this process, once."""
    import torch

    stock = torch.compiler.load_compiled_function
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def load_compiled_function(*arguments: Any, **named: Any) -> Any:
        return finished(stock(*arguments, **named))

    torch.compiler.load_compiled_function = load_compiled_function
