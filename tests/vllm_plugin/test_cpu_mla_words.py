"""What the MLA backend for CPUs says where it stands down; no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lab.vllm_plugin import cpu_mla


@pytest.mark.parametrize(("kind", "forced", "reason"), [("deepseek_v4", 256, "DeepSeek-V4"), ("deepseek_v3", 128, "a CPU with AMX")])
def test_the_reason_to_stand_down_is_the_models_own(kind: str, forced: int, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vllm.eagle3_lab")

    class Platform:
        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            vllm_config.cache_config.block_size = forced

    cpu_mla.free_block_size(Platform)
    cache = SimpleNamespace(block_size=16, user_specified_block_size=False)
    model = SimpleNamespace(use_mla=True, hf_config=SimpleNamespace(model_type=kind))
    Platform.check_and_update_config(SimpleNamespace(cache_config=cache, model_config=model))
    assert cache.block_size == forced
    (said,) = caplog.messages
    assert reason in said
    assert ("AMX" in said) == (kind != "deepseek_v4")
