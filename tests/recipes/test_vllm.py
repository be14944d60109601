"""Every recipe's command, as vLLM itself reads it: its parser, its configuration classes, and its selection of KV block sizes.

Weights and GPUs are not needed: `configs/` holds a stand-in for each config file that the classes read (each says that it is minimal).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from lab import recipes
from lab.recipes.model import Checkpoint, Hub, Recipe
from lab.serving.command import Lane, command

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
HERE = Path(__file__).parent
HUB = [name for name in recipes.RECIPES if isinstance(recipes.get(name).target.weights, Hub)]
LLAMA_TYPE = ("kimi-k2.5/bf16", "kimi-k2.5/fp8")


def lanes(recipe: Recipe) -> list[Lane]:
    """Every draft with every number of GPUs, untraced as it is measured, and each draft's traced variant."""
    found = [
        Lane(recipe, draft, recipe.default_k(draft), recipe.compiled, False, tp=tp)
        for draft in recipe.draft_choices()
        for tp in recipe.tp or (1,)
    ]
    return [*found, *(replace(lane, traced=True) for lane in found if lane.draft != "none" and lane.tp == (recipe.tp or (1,))[0])]


@pytest.fixture(scope="module")
def argv(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Lane], list[str]]:
    """The command of a lane on the stand-ins."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    root = tmp_path_factory.mktemp("models")
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"<think>": 0, "</think>": 1, "[UNK]": 2}, unk_token="[UNK]")))
    for file in (HERE / "configs").glob("*.json"):
        folder = root / file.name.removesuffix(".json")
        folder.mkdir()
        words.save_pretrained(folder)
        (folder / "config.json").write_text(file.read_text(encoding="utf-8"))

    def place(checkpoint: Checkpoint) -> str:
        assert isinstance(checkpoint.weights, Hub)
        folder = root / checkpoint.weights.repo.rpartition("/")[2]
        assert folder.is_dir(), f"tests/recipes/configs has no stand-in for {checkpoint.weights.repo}"
        return str(folder)

    def made(lane: Lane) -> list[str]:
        draft = None if lane.draft == "none" else place(lane.recipe.drafts[lane.draft])
        return list(command(lane, target=place(lane.recipe.target), draft=draft, port=8000).argv[2:])

    return made


def ask(commands: Mapping[str, list[str]]) -> dict[str, dict[str, Any]]:
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    import os

    done = subprocess.run(
        [sys.executable, str(HERE / "ask_vllm.py")],
        input=json.dumps(list(commands.items())),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    return {line.pop("name"): line for line in lines}


@pytest.fixture(scope="module")
def answers(argv: Callable[[Lane], list[str]]) -> dict[str, dict[str, Any]]:
    commands = {lane.key: argv(lane) for name in HUB for lane in lanes(recipes.get(name))}
    kimi = recipes.get("kimi-k2.5")
    commands["long prompts"] = argv(Lane(kimi, "bf16", 4, True, False, isl=8192))
    commands["block size 1"] = [*commands["kimi-k2.5/bf16/k4/tp4/compiled/plain"], "--block-size", "1"]
    commands["a flag that vLLM lacks"] = [*commands["qwen3-8b/none/compiled/plain"], "--no-such-flag"]
    found = ask(commands)
    assert list(found) == list(commands)
    return found


@pytest.mark.parametrize("lane", [lane for name in HUB for lane in lanes(recipes.get(name))], ids=lambda lane: lane.key)
def test_vllm_takes_the_command(lane: Lane, answers: dict[str, dict[str, Any]]) -> None:
    found = answers[lane.key]
    assert "error" not in found, found["error"]
    assert (found["port"], found["served"]) == (8000, [lane.recipe.name])
    assert (found["tp"], found["eager"], found["length"]) == (lane.tp, not lane.compiled, lane.max_model_len)
    assert found["ep"] == bool(lane.expert_parallel)
    assert found["prefix_caching"] is False
    assert (found["k"] or 0, found["method"]) == (lane.k, None if lane.draft == "none" else "eagle3")
    if "draft_tensor_parallel_size" in lane.recipe.speculative and lane.k:
        assert found["draft_tp"] == 1
    assert found["mla"] == ("kimi" in lane.recipe.name)
    assert found["blocks"]
    assert all(isinstance(size, int) for size in found["blocks"].values()), found["blocks"]
    if lane.key.startswith(LLAMA_TYPE):  # the pair that pull request 39616 is about
        assert not found["draft_mla"]
        assert all(name.startswith("ROCM_AITER_MLA + ") for name in found["blocks"])


def test_prompts_of_8k_get_their_flags(answers: dict[str, dict[str, Any]]) -> None:
    assert (answers["long prompts"]["length"], answers["long prompts"]["batched"]) == (8192 + 1024 + 256, 16384)


def test_the_test_can_fail(answers: dict[str, dict[str, Any]]) -> None:
    assert all("No common block size for 1" in str(said) for said in answers["block size 1"]["blocks"].values())
    assert "SystemExit" in answers["a flag that vLLM lacks"]["error"]
