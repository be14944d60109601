"""A real vLLM server behind the lab's serving layer: started, asked, killed, and gone."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from lab import recipes
from lab.bench import divergence
from lab.env import assets
from lab.errors import LabError
from lab.recipes.model import Asset, Checkpoint, Recipe
from lab.serving import guard
from lab.serving.client import Delta, Done, Event, Notice, StepEvent, generate
from lab.serving.command import Lane
from lab.serving.endpoint import Endpoint
from lab.serving.lanes import Lanes
from lab.serving.metrics import Snapshot, scrape
from lab.trace.align import first_difference
from lab.trace.model import Request, Step

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]
pytest.importorskip("torch", reason="the engine needs it")
Gone = Callable[..., bool]
CHAT = "Explain in a few sentences why the sky is blue."


def random_draft(folder: Path) -> Path:
    """An Eagle3 draft for the default target with random weights: it proposes, and is nearly always wrong."""
    import json

    import torch
    from safetensors.torch import save_file

    hidden, inner, vocabulary, kv, drafted = 576, 1536, 49152, 192, 8192
    shapes = {
        "fc": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj": (hidden, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, hidden),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "lm_head": (drafted, hidden),
    }
    torch.manual_seed(0)
    tensors = {f"{name}.weight": (torch.randn(shape) * 0.02).bfloat16() for name, shape in shapes.items()}
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    tensors["d2t"] = torch.zeros(drafted, dtype=torch.long)
    tensors["t2d"] = torch.arange(vocabulary) < drafted
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": vocabulary,
        "draft_vocab_size": drafted,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [2, 15, 27],
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """The default recipe; with a random draft where the real one is not in this checkout."""
    found = recipes.get("smollm2")
    shipped = found.drafts["bf16"].weights
    assert isinstance(shipped, Asset)
    if (Path(str(assets())) / shipped.path / "config.json").is_file():
        return found
    folder = random_draft(tmp_path_factory.mktemp("draft") / "random")
    return dataclasses.replace(found, drafts={"bf16": Checkpoint("random", Asset(str(folder)))})


@asynccontextmanager
async def opened() -> AsyncIterator[Lanes]:
    lanes = Lanes()
    try:
        yield lanes
    finally:
        await lanes.close()


async def collect(endpoint: Endpoint, prompt: str = CHAT, **more: int) -> tuple[list[Event], Request]:
    events = [event async for event in generate(endpoint, prompt, **more)]
    last = events[-1]
    assert isinstance(last, Done)
    return events, last.request


async def quiet(endpoint: Endpoint, seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while (await scrape(endpoint, timeout=30.0)).running:
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True


async def counted(endpoint: Endpoint, before: Snapshot, steps: list[Step], seconds: float = 60.0) -> Snapshot:
    """The server's counters once they hold these steps; what they hold after some seconds, where they never do."""
    deadline = time.monotonic() + seconds
    while (after := await scrape(endpoint, timeout=30.0)).drafts - before.drafts < len(steps) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    return after


async def check_answer(endpoint: Endpoint, k: int) -> Request:
    before = await scrape(endpoint, timeout=30.0)
    events, request = await collect(endpoint, max_tokens=40, alternatives=3)
    assert [event.text for event in events if isinstance(event, Notice)] == []
    steps = [event.step for event in events if isinstance(event, StepEvent)]
    assert steps == request.steps
    assert [step.index for step in steps] == list(range(len(steps)))
    assert tuple(token for step in steps for token in step.sampled[: step.kept]) == request.ids
    assert "".join(event.text for event in events if isinstance(event, Delta)) == request.text
    assert len(request.ids) == request.usage_completion == 40
    assert len(request.prompt_ids) == request.usage_prompt
    assert len(request.alternatives) == 40
    assert all(len(top) == 3 for top in request.alternatives)
    answer = b"".join(bytes.fromhex(request.pieces[token]) for token in request.ids)
    assert answer.decode("utf-8", errors="replace").startswith(request.text[:60])
    verified = [step for step in steps if step.draft]
    after = await counted(endpoint, before, verified)
    assert all(len(step.draft) <= k for step in verified)
    assert after.drafts - before.drafts == len(verified)
    assert after.draft_tokens - before.draft_tokens == sum(len(step.draft) for step in verified)
    assert after.accepted_tokens - before.accepted_tokens == sum(step.accepted for step in verified)
    # Steps come while the answer is being written, not after it.
    kinds = [type(event) for event in events]
    assert kinds.index(StepEvent) < len(kinds) - 1 - kinds[::-1].index(Delta)
    return request


async def check_abort(endpoint: Endpoint) -> None:
    source = generate(endpoint, "Write a very long story.", max_tokens=3000)
    async for event in source:
        if isinstance(event, Delta) and event.ids:
            break
    deadline = time.monotonic() + 60
    while (running := (await scrape(endpoint, timeout=30.0)).running) != 1 and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert running == 1
    await source.aclose()  # type: ignore[attr-defined]
    assert await quiet(endpoint)


async def check_death(lanes: Lanes, lane: Lane, gone: Gone) -> None:
    """The engine is killed in the middle of an answer."""
    endpoint = await lanes.endpoint(lane)
    server = lanes._entries[lane.key].server
    assert server is not None
    assert server._guard is not None
    request, killed = None, False
    missing = {Delta, StepEvent}  # the answer and its trace come by two connections: either may be ahead when the engine dies
    async for event in generate(endpoint, "Write a very long story.", max_tokens=3000):
        if isinstance(event, StepEvent) or (isinstance(event, Delta) and event.ids):
            missing.discard(type(event))
        if not missing and not killed:
            killed = True
            for pid in guard.members(server._guard.pid):
                if pid != server._guard.pid:
                    os.kill(pid, signal.SIGKILL)
        if isinstance(event, Done):
            request = event.request
    assert request is not None
    assert request.error is not None
    assert "stopped in the middle" in request.error
    assert request.text
    assert request.ids
    assert request.steps
    assert gone(server, 120.0)
    (status,) = [status for status in lanes.status() if status.lane == lane]
    assert status.state == "dead"
    assert status.error is not None
    assert "last lines of its log" in status.error.why
    with pytest.raises(LabError, match="ended by itself"):
        await lanes.endpoint(lane)


def test_two_lanes(recipe: Recipe, gone: Gone) -> None:
    """One start of each lane for everything that needs one: it is the slow part."""

    async def check() -> None:
        traced, plain = Lane(recipe, "bf16", 3), Lane(recipe, traced=False)
        async with opened() as lanes:
            endpoint = await lanes.endpoint(traced)
            with_draft = await check_answer(endpoint, 3)
            with pytest.raises(LabError, match="do not fit"):
                await collect(endpoint, "word " * 5000)
            await check_abort(endpoint)

            baseline = await lanes.endpoint(plain)
            events, without = await collect(baseline, max_tokens=40)
            assert not [event for event in events if isinstance(event, StepEvent | Notice)]
            at = first_difference(with_draft.output_ids(), without.output_ids())
            if at is not None:  # a step that verifies several rows may round otherwise: at a near-tie of the target, and nowhere else
                best, second, *_ = sorted((one.logprob for one in with_draft.alternatives[at]), reverse=True)
                assert best - second <= 2 * divergence.UNMEASURED, (at, with_draft.alternatives[at])
            async for event in generate(dataclasses.replace(baseline, lane=None), CHAT, max_tokens=2):
                if isinstance(event, Notice):
                    assert "does not run the lab's plugin" in event.text
                    break
            else:
                pytest.fail("a server without the plugin was not said to be one")
            servers = [entry.server for entry in lanes._entries.values() if entry.server]
            memory = sum(server.memory(0) for server in servers)
            assert memory < 2 * recipe.memory_bytes, f"both lanes take {memory / 1e9:.2f} GB"

            await check_death(lanes, traced, gone)
        assert all(gone(server, 0.0) for server in servers)

    asyncio.run(check())


APP = """
    import asyncio, sys, time
    from lab import recipes
    from lab.serving.command import Lane
    from lab.serving.lanes import Lanes
    lanes = Lanes()
    lane = Lane(recipes.get("smollm2"))
    def say(progress):
        server = lanes._entries[lane.key].server
        if server:
            print(server._guard.pid, progress.stage, progress.detail, flush=True)
    asyncio.run(lanes.endpoint(lane, on_progress=say))
    time.sleep(600)
"""


@pytest.mark.parametrize("when", ["loading", "ready"])
def test_no_engine_outlives_an_app_that_is_killed(when: str, gone: Gone) -> None:
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(APP)], stdout=subprocess.PIPE, text=True) as app:
        assert app.stdout is not None
        for line in app.stdout:
            group, stage, _detail = line.split(maxsplit=2)
            if stage == "ready" or (when == "loading" and len(guard.members(int(group))) >= 4):
                break
        assert len(guard.members(int(group))) >= 3
        app.send_signal(signal.SIGKILL)
        assert gone(int(group), 120.0)
