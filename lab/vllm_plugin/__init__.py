"""What runs inside vLLM's processes. vLLM finds `register` by entry point and the other hooks by the names in `HOOKS`.

Nothing else in the lab imports this package. `register` runs in every process of a server (API server, engine, workers), possibly more
than once, so it stays light: it imports neither torch nor vLLM by itself, except on a CPU, whose FP8 kernel must come before any model.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import secrets
import sys

#: What a server is told on its command line to load, and by which mechanism.
HOOKS = {
    "--scheduler-cls": "lab.vllm_plugin.tracing.TracingScheduler",
    "--middleware": "lab.vllm_plugin.stream.StepStream",
}


def register() -> None:
    """Entry point `eagle3_lab` in the group `vllm.general_plugins`."""
    # The first process of a server gets here before it starts the others, which inherit the address.
    if sys.platform == "linux":  # an abstract socket: no file to leave behind
        os.environ.setdefault("EAGLE3_LAB_TRACE_SOCKET", f"ipc://@eagle3-lab-{os.getpid()}-{secrets.token_hex(8)}")
    # With several worker processes the draft runs there; with one it runs beside the scheduler, which then does this itself.
    if multiprocessing.current_process().name.startswith("VllmWorker"):
        from lab.vllm_plugin import confidence, timing

        confidence.install()
        timing.install()
    _fp8_on_cpu()
    _mla_on_cpu()
    _fixes_on_cpu()
    _speed_on_cpu()


def _speed_on_cpu() -> None:
    """Cheaper draft and acceptance steps in the process that runs the model, where `cpu_speed` knows this vLLM."""
    from lab.vllm_plugin import cpu_speed

    cpu_speed.register()


def _fixes_on_cpu() -> None:
    """Repairs of vLLM's CPU path in the process that runs the model; `cpu_fixes` says which."""
    from lab.vllm_plugin import cpu_fixes

    cpu_fixes.register()


def _mla_on_cpu() -> None:
    """An MLA backend that shares its cache blocks with a draft's attention, where the recipe asks for it."""
    from lab.vllm_plugin import cpu_mla

    cpu_mla.register()


def _fp8_on_cpu() -> None:
    """Register the CPU's FP8 linear kernel; other platforms keep vLLM's."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    try:
        from lab.vllm_plugin import fp8_cpu
    except ImportError as error:
        logging.getLogger("vllm.eagle3_lab").warning(
            "This vLLM's linear kernels are not where the lab knows them; FP8 drafts may be slow (%s).", error
        )
        return
    fp8_cpu.register()
