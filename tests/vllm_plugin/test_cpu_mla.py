"""The MLA backend for CPUs: its index arithmetic against brute force, the block sizes by vLLM's own selection, and real engines in FP32,
where speculation may not change a token.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from lab import recipes  # noqa: E402
from lab.errors import LabError  # noqa: E402
from lab.recipes.model import Recipe  # noqa: E402
from lab.recipes.smollm2 import smollm2_mla_before  # noqa: E402
from lab.vllm_plugin import cpu_mla, cpu_mla_backend  # noqa: E402

KERNEL = cpu_mla.KERNEL_BLOCK


@pytest.mark.parametrize("block", [16, 32, 48, 128])
def test_the_expanded_table_names_the_same_tokens(block: int) -> None:
    """Gathering token by token through either table reads the same memory."""
    table = torch.tensor([[3, 0, 5], [1, 4, 2]])
    memory = torch.arange(6 * block).view(6, block)
    small = memory.view(-1, KERNEL)
    expanded = cpu_mla_backend.expand(table, block)
    assert expanded.dtype == torch.int32
    for request in range(2):
        for token in range(3 * block):
            wanted = memory[table[request, token // block], token % block]
            assert small[expanded[request, token // KERNEL], token % KERNEL] == wanted


def test_a_block_that_the_kernel_cannot_split_is_refused() -> None:
    with pytest.raises(ValueError, match="40 tokens"):
        cpu_mla_backend.expand(torch.zeros(1, 1), 40)


def test_each_token_sees_the_sequence_up_to_itself() -> None:
    """Queries of 1, 4 and 2 tokens at the ends of sequences of 7, 20 and 33."""
    table = torch.tensor([[0], [1], [2]])
    found, lengths = cpu_mla_backend.rows(table, torch.tensor([7, 20, 33]), torch.tensor([0, 1, 5, 7]))
    assert found.flatten().tolist() == [0, 1, 1, 1, 1, 2, 2]
    assert lengths.tolist() == [7, 17, 18, 19, 20, 32, 33]


@pytest.mark.parametrize("block", [16, 32, 48])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_the_kernel_over_expanded_blocks_is_plain_attention(block: int, k: int) -> None:
    """vLLM's kernel on what the backend gives it: verifications of k + 1 tokens beside a single token and a rest of a draft, at the ends of
    sequences that stop before, at and behind a block's border. Without the rows' own lengths it would see the tokens behind."""
    from vllm import _custom_ops as ops

    drawn = torch.Generator().manual_seed(block + k)
    lengths = torch.tensor([k + 1, 15, 16, 17, block, block + 1, 2 * block, 2 * block + 7])
    counts = torch.tensor([k + 1, 1, k + 1, k + 1, min(2, k + 1), k + 1, 1, k + 1])
    starts = torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()))
    width = -(-int(lengths.max()) // block)
    table = torch.randperm(len(lengths) * width, generator=drawn).view(len(lengths), width).int()
    cache = torch.randn(table.numel(), block, 576, generator=drawn)
    query = torch.randn(int(starts[-1]), 9, 576, generator=drawn)

    def kernel(seen: Any) -> Any:
        found, _ = cpu_mla_backend.rows(cpu_mla_backend.expand(table, block), lengths, starts)
        output = torch.zeros(len(query), 9, 512)
        ops.mla_decode_kvcache_cpu(output, query, cache.view(-1, KERNEL, 576), 128**-0.5, found, seen)
        return output

    wanted = []
    for request, length in enumerate(lengths.tolist()):
        keys = cache[table[request].long()].flatten(0, 1)[:length]
        for place in range(int(counts[request])):
            seen = keys[: length - int(counts[request]) + 1 + place]
            weights = (query[int(starts[request]) + place] @ seen.T * 128**-0.5).softmax(-1)
            wanted.append(weights @ seen[:, :512])
    _, own = cpu_mla_backend.rows(table, lengths, starts)
    torch.testing.assert_close(kernel(own), torch.stack(wanted), rtol=1e-4, atol=1e-4)
    whole = torch.repeat_interleave(lengths, counts).int()
    assert (kernel(whole) - torch.stack(wanted)).abs().max() > 0.1


def test_vllms_selection_finds_a_common_size_with_this_backend_only() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
    from vllm.v1.worker.utils import select_common_block_size

    with pytest.raises(ValueError, match="No common block size for 16"):
        select_common_block_size(16, [CPUMLABackend, CPUAttentionBackend])
    assert select_common_block_size(32, [cpu_mla_backend.SharedBlocksMLABackend, CPUAttentionBackend]) == 32


@pytest.mark.parametrize(("asked", "mla", "forced", "expected"), [(None, True, 16, 32), (64, True, 16, 64), (None, False, 128, 128)])
def test_the_block_size_that_was_asked_for_is_given_back(asked: int | None, mla: bool, forced: int, expected: int) -> None:
    class Platform:
        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            vllm_config.cache_config.block_size = forced

    cpu_mla.free_block_size(Platform)
    cpu_mla.free_block_size(Platform)  # once, however often it is called
    cache = SimpleNamespace(block_size=asked or 128, user_specified_block_size=asked is not None)
    Platform.check_and_update_config(SimpleNamespace(cache_config=cache, model_config=SimpleNamespace(use_mla=mla)))
    assert cache.block_size == expected


@pytest.mark.parametrize(("first", "expected"), [(16, 32), (128, 128)])
def test_with_amx_the_draft_does_not_change_the_size(first: int, expected: int, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM updates the configuration once more for the draft, and then takes AMX's own MLA for granted: 128, where nobody chose a size."""
    caplog.set_level("INFO", "vllm.eagle3_lab")
    forced = iter((first, 128))

    class Platform:
        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            vllm_config.cache_config.block_size = next(forced)

    cpu_mla.free_block_size(Platform)
    cache = SimpleNamespace(block_size=16, user_specified_block_size=False)
    for _ in ("target", "draft"):
        Platform.check_and_update_config(SimpleNamespace(cache_config=cache, model_config=SimpleNamespace(use_mla=True)))
    assert cache.block_size == expected
    assert ("stands down: on a CPU with AMX" in caplog.text) == (expected == 128)


def test_a_size_that_the_kernel_cannot_read_is_refused() -> None:
    class Platform:
        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            vllm_config.cache_config.block_size = 16

    cpu_mla.free_block_size(Platform)
    cache = SimpleNamespace(block_size=40, user_specified_block_size=True)
    with pytest.raises(ValueError, match="40 is no multiple of 16"):
        Platform.check_and_update_config(SimpleNamespace(cache_config=cache, model_config=SimpleNamespace(use_mla=True)))


# --- real engines ---

#: Shorter than a block, across a block's border while answering, several blocks long.
PROMPTS = ("Hi", "List three birds. " * 3, "Tell me about the moon and the tides. " * 20)


#: Tokens of the prompts that engines in one process get: around the borders of the kernel's blocks of 16 and the cache's of 32.
LENGTHS = (3, 15, 16, 17, 31, 32, 33, 64, 95, 128)
MOST = 48
#: The requests of `LENGTHS` do not fit into so many tokens of KV cache together, so some are preempted and begin anew.
SMALL = 352


def job(k: int, **settings: Any) -> dict[str, Any]:
    return {"k": k, "dtype": "float32", "tokens": 4096, "seqs": 8, "logprobs": 0, "fault": "", **settings}


#: By name: each K once, two of them in a small cache, and the planted fault last, since it stays in the process.
JOBS = {
    "k1": job(1, tokens=SMALL, seqs=6),
    "k2": job(2),
    "k3": job(3, logprobs=1),
    "k4": job(4, tokens=SMALL, seqs=6),
    "k5": job(5),
    "bfloat16": job(3, dtype="bfloat16", logprobs=1),
    "whole lengths": job(3, fault="whole lengths"),
}


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """What each of `JOBS` and the stock baseline (one request at a time) answered, and the prompts; two processes for all engines."""
    from transformers import AutoTokenizer

    from lab import checkpoints
    from lab.bench.prompts import LONG, shipped
    from lab.vllm_plugin.cpu_mla import support

    ok, reason = support()
    if not ok:
        pytest.skip(reason)
    root, recipe = Path(__file__).parents[2], recipes.get("smollm2-mla")
    target = checkpoints.ensure(recipe.target)
    checkpoints.ensure(recipe.drafts["bf16"])
    words = AutoTokenizer.from_pretrained(target)(max((one.text for one in shipped(LONG).prompts), key=len))["input_ids"]
    prompts = [words[100 * place : 100 * place + length] for place, length in enumerate(LENGTHS)]
    assert [len(prompt) for prompt in prompts] == list(LENGTHS)

    def run(jobs: dict[str, Any], own: dict[str, str]) -> dict[str, Any]:
        environment = {**os.environ, **recipe.environment, **recipe.eager_environment, **own}
        asked = json.dumps({"jobs": list(jobs.values()), "prompts": prompts, "most": MOST})
        argv = [sys.executable, "-m", "tests.vllm_plugin.mla_engines"]
        done = subprocess.run(argv, input=asked, env=environment, cwd=root, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return dict(zip(jobs, json.loads(done.stdout.splitlines()[-1]), strict=True))

    baseline = run({"baseline": job(0, seqs=1, logprobs=1)}, {"VLLM_PLUGINS": ""})
    return {"prompts": prompts, **baseline, **run(JOBS, {"EAGLE3_LAB_CPU_MLA": "1"})}


@pytest.mark.engine
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_greedy_answers_in_fp32_are_the_baselines(answers: dict[str, Any], k: int) -> None:
    """Prompts around block borders, of mixed lengths in one batch; for K of 1 and 4 in a cache so small that requests are preempted."""
    found = answers[f"k{k}"]
    assert found["ids"] == answers["baseline"]["ids"]
    assert found["accepted"] > len(LENGTHS)
    assert (found["preemptions"] > 0) == (k in (1, 4))


@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_without_the_rows_own_lengths_answers_are_others(answers: dict[str, Any]) -> None:
    """The comparison above can fail: the same engine, but every row of a verification sees the whole sequence."""
    same = [one == other for one, other in zip(answers["whole lengths"]["ids"], answers["baseline"]["ids"], strict=True)]
    assert sum(same) < len(same) / 2


@pytest.fixture(scope="module")
def reference() -> Any:
    """The served weights in plain PyTorch, FP32, with the formulas of `lab.train.mla`."""
    from safetensors.torch import load_file

    from lab import checkpoints
    from lab.recipes.model import Mla
    from lab.train.converted import MlaTarget
    from lab.train.mla import MlaWeights
    from lab.train.target import Target

    target = recipes.get("smollm2-mla").target
    assert isinstance(target.weights, Mla)
    served = load_file(Path(checkpoints.ensure(target)) / "model.safetensors")
    original = Target.load(Path(checkpoints.ensure(target.weights.of)), "cpu", torch.float32)
    weights = [
        MlaWeights(*(served[f"model.layers.{index}.self_attn.{part}.weight"].float() for part in MlaWeights._fields))
        for index in range(original.shape.layers)
    ]
    return MlaTarget(original, weights)


@pytest.mark.engine
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "most"), [("baseline", 1e-3), ("k3", 1e-3), ("bfloat16", 0.25)])
def test_logprobs_are_those_of_plain_pytorch(answers: dict[str, Any], reference: Any, name: str, most: float) -> None:
    """The logprob of every token of every answer, each within what its type can do."""
    worst = 0.0
    for prompt, ids, logprobs in zip(answers["prompts"], answers[name]["ids"], answers[name]["logprobs"], strict=True):
        with torch.no_grad():
            scores = reference.logits(reference.features(torch.tensor([[*prompt, *ids]]), (0,))[1])[0, len(prompt) - 1 : -1]
        wanted = scores.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        worst = max(worst, float((wanted - torch.tensor(logprobs)).abs().max()))
    print(f"{name}: largest difference {worst:.2g} nats")
    assert worst < most, worst


def in_fp32(recipe: Recipe) -> Recipe:
    flags = tuple((name, "float32" if name == "--dtype" else value) for name, value in recipe.flags)
    return replace(recipe, name=f"{recipe.name}-fp32", flags=flags)


@pytest.fixture
def lanes() -> Iterator[Any]:
    from lab.serving.lanes import Lanes
    from lab.vllm_plugin.cpu_mla import support

    ok, reason = support()
    if not ok:
        pytest.skip(reason)
    found = Lanes()
    yield found
    found.shutdown()


@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_speculation_changes_no_token_of_an_mla_target(lanes: Any) -> None:
    """The baseline is vLLM's own kernel, one prompt at a time; the draft's lane answers all at once, so lengths are mixed in a step."""
    from lab.serving.client import Done, generate
    from lab.serving.command import Lane
    from lab.trace.stats import count

    recipe = in_fp32(recipes.get("smollm2-mla"))

    async def answer(endpoint: Any, prompt: str) -> Any:
        requests = [event.request async for event in generate(endpoint, prompt, max_tokens=40) if isinstance(event, Done)]
        return requests[0]

    async def work() -> tuple[list[Any], list[Any]]:
        baseline = await lanes.endpoint(Lane(recipe, "none"))
        alone = [await answer(baseline, prompt) for prompt in PROMPTS]
        drafted = await lanes.endpoint(Lane(recipe, "bf16", 3))
        return alone, await asyncio.gather(*(answer(drafted, prompt) for prompt in PROMPTS))

    alone, together = asyncio.run(work())
    assert [request.output_ids() for request in together] == [request.output_ids() for request in alone]
    assert max(step.batch_requests for request in together for step in request.steps) > 1
    assert (count(step for request in together for step in request.steps).mean_acceptance_length or 0) > 1.5


@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_before_the_fix_the_engine_says_why_it_cannot_start(lanes: Any) -> None:
    from lab.serving.command import Lane

    with pytest.raises(LabError) as caught:
        asyncio.run(lanes.endpoint(Lane(smollm2_mla_before(), "bf16", 3)))
    assert "No common block size" in f"{caught.value.why}"
