"""Every shipped recipe resolves, and vLLM's own parser takes its flags."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

from lab import recipes
from lab.errors import LabError
from lab.recipes import cpu
from lab.recipes.model import QuarkFp8, Recipe
from lab.serving.command import Lane, command

ALL = [recipes.get(name) for name in recipes.RECIPES]


def lanes(recipe: Recipe) -> list[Lane]:
    return [
        Lane(recipe, draft, recipe.k, compiled, traced)
        for draft in recipe.draft_choices()
        for compiled in (False, True)
        for traced in (False, True)
    ]


def test_a_cpu_without_avx512_computes_in_float32(tmp_path: Path) -> None:
    told = tmp_path / "cpuinfo"
    told.write_text("processor\t: 0\nflags\t\t: fpu sse4_2 avx2 fma\n")
    assert cpu.dtype(told) == "float32"
    told.write_text("processor\t: 0\nflags\t\t: fpu avx2 fma avx512f avx512_bf16\n")
    assert cpu.dtype(told) == "bfloat16"
    told.write_text("processor\t: 0\nFeatures\t: fp asimd bf16\n")
    assert cpu.dtype(told) == "bfloat16", "an Arm processor"
    assert cpu.dtype(tmp_path / "none") == "bfloat16"


def test_an_unknown_recipe_lists_the_known() -> None:
    with pytest.raises(LabError, match="smollm2"):
        recipes.get("nonsense")


@pytest.mark.parametrize("recipe", ALL, ids=lambda recipe: recipe.name)
def test_recipes_are_consistent(recipe: Recipe) -> None:
    assert recipes.RECIPES[recipe.name]().name == recipe.name
    assert 1 <= recipe.k <= recipe.k_max
    names = [recipe.target.name, *(draft.name for draft in recipe.drafts.values())]
    assert len({*names}) == len(names)
    assert {name for name, draft in recipe.drafts.items() if isinstance(draft.weights, QuarkFp8)} <= {"fp8"}
    assert len({lane.key for lane in lanes(recipe)}) == 4 * len(recipe.draft_choices())


@pytest.mark.engine
@pytest.mark.skipif(util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_parses_every_lane() -> None:
    commands = [
        command(lane, target="t", draft=None if lane.draft == "none" else "d", port=8000).argv[2:]
        for recipe in ALL
        for lane in lanes(recipe)
    ]
    code = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
for argv in json.load(sys.stdin):
    arguments = parser.parse_args(argv)
    spec = arguments.speculative_config
    print(arguments.model_tag, arguments.port, arguments.enforce_eager, spec and spec["num_speculative_tokens"], sep="|")
"""
    done = subprocess.run([sys.executable, "-c", code], input=json.dumps(commands), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    parsed = [line for line in done.stdout.splitlines() if line.count("|") == 3]
    expected = [f"t|8000|{not lane.compiled}|{None if lane.draft == 'none' else lane.k}" for recipe in ALL for lane in lanes(recipe)]
    assert parsed == expected


def test_threads_follow_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for processor in range(4):  # two cores of two threads
        folder = tmp_path / f"cpu{processor}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{processor % 2},{processor % 2 + 2}\n")
    assert cpu.physical_cores({0, 1, 2, 3}, tmp_path) == 2
    assert cpu.physical_cores({0, 2}, tmp_path) == 1
    assert cpu.physical_cores({0, 1, 9}, tmp_path) == 3  # nothing is known about the last one
    monkeypatch.setattr(cpu, "physical_cores", len)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {1, 3, 5}, raising=False)
    monkeypatch.setattr(cpu, "quota", lambda: None)
    assert (cpu.threads(), cpu.environment()["OMP_NUM_THREADS"]) == (3, "3")
    monkeypatch.setattr(cpu, "quota", lambda: 1.5)
    assert cpu.threads() == 1
    monkeypatch.setattr(cpu, "quota", lambda: 0.5)
    assert cpu.threads() == 1


def test_threads_wait_as_the_openmp_at_hand_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    places = (str(tmp_path / "lib/libiomp5.so"), str(tmp_path / "*/libomp.so.5"))
    assert cpu.openmp(places) == {"OMP_WAIT_POLICY": "PASSIVE"}
    for name in ("x86/libomp.so.5", "lib/libiomp5.so"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
        assert cpu.openmp(places) == {"LD_PRELOAD": str(tmp_path / name), "KMP_BLOCKTIME": "1"}
    monkeypatch.setenv("LD_PRELOAD", "mine.so")
    assert cpu.openmp(places)["LD_PRELOAD"] == f"{tmp_path}/lib/libiomp5.so:mine.so"


def test_quota(tmp_path: Path) -> None:
    assert cpu.quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu.quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert cpu.quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu.quota(tmp_path) is None


def said(recipe: Recipe) -> set[str]:
    """What a recipe sets and must have a source for."""
    names = {"target", "hardware", "max_model_len", *(f"drafts.{name}" for name in recipe.drafts)}
    names |= {"k"} if recipe.drafts else set()
    names |= {f"draft_k.{name}" for name in recipe.draft_k}
    names |= {"tp"} if recipe.tp else set()
    names |= {"expert_parallel"} if recipe.expert_parallel is not None else set()
    return names | {flag for flag, _ in recipe.flags} | {*recipe.environment} | {*recipe.speculative}


@pytest.mark.parametrize("recipe", [one for one in ALL if one.hardware], ids=lambda recipe: recipe.name)
def test_every_setting_of_a_published_recipe_has_its_source(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "0,1")
    recipe = recipes.get(recipe.name)
    assert said(recipe) - {*recipe.sources} == set()
    assert all(text.strip() for text in recipe.sources.values())
    assert all(rule.source and (rule.flags or rule.environment) for rule in recipe.rules)
    if recipe.headroom:
        assert recipe.max_model_len == recipe.isl + recipe.osl + recipe.headroom


def shown(draft: str, **sizes: int) -> tuple[list[str], dict[str, str]]:
    recipe = recipes.get("kimi-k2.5")
    lane = Lane(recipe, draft, recipe.default_k(draft), recipe.compiled, False, **sizes)  # type: ignore[arg-type]
    made = command(lane, target="t", draft=None if draft == "none" else "d", port=8000)
    return list(made.argv), made.environment


def test_kimi_as_published() -> None:
    argv, environment = shown("bf16")
    assert "--block-size" not in argv
    assert json.loads(argv[argv.index("--speculative-config") + 1]) == {
        "method": "eagle3",
        "model": "d",
        "num_speculative_tokens": 4,
        "draft_tensor_parallel_size": 1,
    }
    assert environment["VLLM_ROCM_USE_AITER_RMSNORM"] == "0"
    assert "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM" not in environment
    assert "--enforce-eager" not in argv
    argv, environment = shown("fp8", tp=8)
    assert json.loads(argv[argv.index("--speculative-config") + 1])["num_speculative_tokens"] == 6
    assert environment["VLLM_ROCM_USE_AITER_FP4_ASM_GEMM"] == "1"
    assert "VLLM_ROCM_USE_AITER_RMSNORM" not in environment
    argv, _ = shown("none")
    assert argv[argv.index("--block-size") + 1] == "1"
    assert argv[argv.index("--max-model-len") + 1] == "2304"
    assert "--long-prefill-token-threshold" not in argv
    argv, _ = shown("bf16", isl=8192)
    assert argv[argv.index("--long-prefill-token-threshold") + 1] == "8192"
    assert argv[argv.index("--max-model-len") + 1] == str(8192 + 1024 + 256)


def test_what_a_recipe_was_not_made_for_is_said() -> None:
    kimi, smollm2 = recipes.get("kimi-k2.5"), recipes.get("smollm2")
    with pytest.raises(LabError, match="--tp 4 or 8"):
        Lane(kimi, tp=2)
    with pytest.raises(LabError, match="4096 tokens"):
        Lane(smollm2, isl=1024)
    with pytest.raises(LabError, match="no experts"):
        Lane(smollm2, expert_parallel=True)
    with pytest.raises(LabError, match="negative"):
        Lane(kimi, isl=-1)


def test_old_firmware_and_a_scheduler_s_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lab.recipes import rocm

    monkeypatch.delenv("ROCR_VISIBLE_DEVICES", raising=False)
    assert rocm.environment(tmp_path) == {"VLLM_ROCM_USE_AITER": "1"}
    for card, version in (("card0", "0x000000b1\n"), ("card1", "0x000000b0\n"), ("card2", "what\n")):
        file = tmp_path / card / "device/fw_version/mec_fw_version"
        file.parent.mkdir(parents=True)
        file.write_text(version)
    assert rocm.mec_firmware(tmp_path) == 176
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "2,3")
    assert rocm.environment(tmp_path) == {"VLLM_ROCM_USE_AITER": "1", "HIP_VISIBLE_DEVICES": "2,3", "HSA_NO_SCRATCH_RECLAIM": "1"}
