"""The short ways on a CPU: each against the method of vLLM that it replaces, and a whole engine against itself."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.platforms import current_platform  # noqa: E402

if not current_platform.is_cpu():
    pytest.skip("vLLM here is not its CPU build", allow_module_level=True)

from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402
from vllm.v1.sample.logits_processor import LogitsProcessors, MinTokensLogitsProcessor  # noqa: E402
from vllm.v1.sample.metadata import SamplingMetadata  # noqa: E402
from vllm.v1.sample.rejection_sampler import RejectionSampler  # noqa: E402
from vllm.v1.sample.sampler import Sampler  # noqa: E402
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer  # noqa: E402
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata  # noqa: E402

from lab.env import assets, cache_dir  # noqa: E402
from lab.recipes import cpu  # noqa: E402
from lab.vllm_plugin import cpu_compile, cpu_drafting, cpu_sampling, cpu_speed  # noqa: E402

VOCABULARY = 640


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    """vLLM's CPU operators, and its C++ forms of the Triton kernels that the methods under comparison launch."""
    from vllm.v1.worker import block_table  # noqa: F401  (holds one of them)

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()


def greedy(batch: int, **changes: Any) -> SamplingMetadata:
    """vLLM's sampling metadata of a batch at temperature 0."""
    empty = torch.empty(0)
    fields: dict[str, Any] = {
        "temperature": None,
        "all_greedy": True,
        "all_random": False,
        "top_p": None,
        "top_k": None,
        "generators": {},
        "max_num_logprobs": None,
        "no_penalties": True,
        "prompt_token_ids": None,
        "frequency_penalties": empty,
        "presence_penalties": empty,
        "repetition_penalties": empty,
        "output_token_ids": [[] for _ in range(batch)],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
        "spec_token_ids": [[] for _ in range(batch)],
    }
    return SamplingMetadata(**{**fields, **changes})


def verification(seed: int) -> tuple[SpecDecodeMetadata, torch.Tensor]:
    """Random drafts of uneven length, some right, some wrong, some missing, and the target's logits with ties among the best."""
    generator = torch.Generator().manual_seed(seed)
    batch = int(torch.randint(1, 9, (1,), generator=generator))
    counts = torch.randint(0, 6, (batch,), generator=generator).tolist()
    counts[0] = max(counts[0], 1)  # vLLM only comes here when something was drafted
    logits = torch.randint(-8, 8, (sum(counts) + batch, VOCABULARY), generator=generator).to(torch.bfloat16)
    best, drafts, row = logits.float().argmax(-1).tolist(), [], 0
    for count in counts:
        right = int(torch.randint(0, count + 1, (1,), generator=generator))
        ids = [best[row + i] if i < right else int(torch.randint(-1, VOCABULARY, (1,), generator=generator)) for i in range(count)]
        drafts.append(ids)
        row += count + 1
    return SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu")), logits


def stock_rejection() -> RejectionSampler:
    return RejectionSampler(Sampler())


def indices(metadata: SpecDecodeMetadata) -> SpecDecodeMetadata:
    """`make_dummy` leaves the row numbers at zero; these are the ones that the model runner would give."""
    target, bonus, row = [], [], 0
    for count in metadata.num_draft_tokens:
        target += range(row, row + count)
        bonus.append(row + count)
        row += count + 1
    metadata.target_logits_indices = torch.tensor(target, dtype=torch.int32)
    metadata.bonus_logits_indices = torch.tensor(bonus, dtype=torch.int32)
    return metadata


@pytest.mark.parametrize("seed", range(40))
def test_acceptance_is_vllms(seed: int) -> None:
    metadata, logits = verification(seed)
    indices(metadata)
    stock = getattr(RejectionSampler.forward, "__wrapped__", RejectionSampler.forward)
    expected = stock(stock_rejection(), metadata, None, logits.clone(), greedy(len(metadata.num_draft_tokens)))
    before = logits.clone()
    mine = cpu_sampling.accept_greedily(metadata, logits)
    assert mine.dtype == expected.sampled_token_ids.dtype
    assert torch.equal(mine, expected.sampled_token_ids)
    assert torch.equal(logits, before)


def test_only_plain_greedy_batches_take_the_short_way() -> None:
    assert cpu_sampling.plain_greedy(greedy(2))
    vllm_config = SimpleNamespace()
    idle = MinTokensLogitsProcessor(vllm_config, torch.device("cpu"), False)
    busy = MinTokensLogitsProcessor(vllm_config, torch.device("cpu"), False)
    busy.min_toks = {0: (5, [], {2}, False)}

    class Foreign(MinTokensLogitsProcessor):
        pass

    assert cpu_sampling.plain_greedy(greedy(1, logitsprocs=LogitsProcessors([idle])))
    for change in (
        {"all_greedy": False},
        {"no_penalties": False},
        {"max_num_logprobs": 0},
        {"logprob_token_ids": {0: [1]}},
        {"bad_words_token_ids": {0: [[3]]}},
        {"allowed_token_ids_mask": torch.zeros(1, VOCABULARY, dtype=torch.bool)},
        {"thinking_budget_state_holder": SimpleNamespace(has_tracked_requests=lambda: True)},
        {"logitsprocs": LogitsProcessors([busy])},
        {"logitsprocs": LogitsProcessors([Foreign(vllm_config, torch.device("cpu"), False)])},
    ):
        assert not cpu_sampling.plain_greedy(greedy(1, **change)), change


class Draft:
    """The parts of vLLM's Eagle3 model that choose a token, with its own `compute_logits`."""

    def __init__(self, seed: int, mapped: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.size = 96 if mapped else VOCABULARY
        self.lm_head = torch.randint(-3, 4, (self.size, 16), generator=generator).to(torch.bfloat16)
        chosen = torch.randperm(VOCABULARY, generator=generator)[: self.size].sort()[0]
        self.draft_id_to_target_id = chosen - torch.arange(self.size) if mapped else None
        self.config = SimpleNamespace(draft_vocab_size=self.size, vocab_size=VOCABULARY)

    def logits_processor(self, head: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ head.T

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

        return Eagle3LlamaForCausalLM.compute_logits(self, hidden)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_draft_choice_is_vllms(seed: int, mapped: bool) -> None:
    draft = Draft(seed, mapped)
    hidden = torch.randint(-2, 3, (5, 16), generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    logits = draft.compute_logits(hidden)
    notes: list[torch.Tensor] = []
    chosen = cpu_sampling.draft_tokens(draft, hidden, notes)
    assert torch.equal(chosen, logits.argmax(-1))
    probability = logits.float().softmax(-1).gather(-1, chosen[:, None])[:, 0]
    torch.testing.assert_close(notes[0], probability)


@pytest.mark.parametrize("seed", range(20))
def test_next_tokens_are_vllms(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    size, width = int(torch.randint(1, 9, (1,), generator=generator)), 4
    sampled = torch.full((size, width), -1, dtype=torch.int32)
    for row, count in enumerate(torch.randint(0, width + 1, (size,), generator=generator).tolist()):
        sampled[row, :count] = torch.randint(0, VOCABULARY, (count,), generator=generator).to(torch.int32)
    discard = torch.rand(size + 3, generator=generator) < 0.3
    names = [f"r{row}" for row in range(size)]
    requests = {name: SimpleNamespace(get_token_id=lambda index, row=row: 100 * row + index) for row, name in enumerate(names)}
    batch = SimpleNamespace(num_reqs=size, req_ids=names, num_tokens_no_spec=torch.arange(3, 3 + size).numpy(), vocab_size=VOCABULARY)
    buffer = torch.zeros(size, dtype=torch.int32)
    proposer = SimpleNamespace(backup_next_token_ids=SimpleNamespace(np=buffer.numpy(), gpu=buffer, copy_to_gpu=print))
    stock = SpecDecodeBaseProposer.prepare_next_token_ids_padded
    stock = getattr(stock, "__wrapped__", stock)
    for expected, mine in zip(
        stock(proposer, sampled.clone(), requests, batch, discard), cpu_drafting.next_tokens(sampled, requests, batch, discard), strict=True
    ):
        assert mine.dtype == expected.dtype
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("seed", range(20))
def test_padded_inputs_are_vllms(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    metadata, _ = verification(seed)
    counts = metadata.num_draft_tokens
    valid = torch.tensor([int(torch.randint(0, count + 2, (1,), generator=generator)) for count in counts], dtype=torch.int32)
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32) + torch.arange(len(counts) + 1, dtype=torch.int32)
    batch = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.arange(10, 10 + len(counts), dtype=torch.int32),
        num_reqs=len(counts),
        num_actual_tokens=int(starts[-1]),
        max_query_len=99,
        max_seq_len=50,
        block_table_tensor=torch.zeros(len(counts), 2, dtype=torch.int32),
        slot_mapping=torch.arange(200),
        seq_lens_cpu_upper_bound=torch.arange(10, 10 + len(counts), dtype=torch.int32),
    )
    stock = SpecDecodeBaseProposer.prepare_inputs_padded
    expected = getattr(stock, "__wrapped__", stock)(None, batch, metadata, valid)
    mine = cpu_drafting.padded_inputs(batch, metadata, valid)
    for one, other in zip(expected[1:], mine[1:], strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    for name, value in vars(expected[0]).items():
        other = getattr(mine[0], name)
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, name


def test_stands_down_and_says_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert cpu_speed.support() == (True, "")
    monkeypatch.setenv("EAGLE3_LAB_CPU_SPEED", "0")
    assert cpu_speed.support() == (False, "EAGLE3_LAB_CPU_SPEED=0.")
    monkeypatch.delenv("EAGLE3_LAB_CPU_SPEED")
    monkeypatch.setattr("vllm.__version__", "0.33.1")
    assert cpu_speed.support() == (False, "vLLM 0.33.1 was not checked for it.")
    monkeypatch.setattr(multiprocessing.current_process(), "name", "VllmWorker-0")
    installed: list[bool] = []
    monkeypatch.setattr(cpu_speed, "install", lambda: installed.append(True))
    with caplog.at_level("INFO", "vllm.eagle3_lab"):
        cpu_speed.register()
    assert not installed
    monkeypatch.undo()


def test_installed_only_where_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, alone, expected in (
        ("MainProcess", "0", False),
        ("VllmWorker-0", "1", True),
        ("EngineCore", "0", True),
        ("EngineCore", "1", False),
    ):
        monkeypatch.setattr(multiprocessing, "current_process", lambda name=name: SimpleNamespace(name=name))
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", alone)
        assert cpu_speed.runs_the_model() is expected, (name, alone)


def test_another_signature_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu_speed.misfits() == []
    monkeypatch.setattr(SpecDecodeBaseProposer, "_greedy_sample", SpecDecodeBaseProposer.propose)
    monkeypatch.setattr(cpu_speed, "OPERATORS", ("greedy_argmax", "no_such_operator"))
    assert len(cpu_speed.misfits()) == 2


ENGINE = """
import json, os, sys
from lab.vllm_plugin import cpu_drafting, cpu_speed
from vllm import LLM, SamplingParams
target, draft, lean = sys.argv[1], sys.argv[2], sys.argv[3] == "lean"
if lean:
    assert not cpu_speed.misfits(), cpu_speed.misfits()
    cpu_speed.install()
llm = LLM(model=target, dtype="bfloat16", enforce_eager=True, enable_prefix_caching=False, kv_cache_memory_bytes=64 << 20, max_num_seqs=4,
          max_model_len=512, max_num_batched_tokens=64, disable_log_stats=False,
          speculative_config={"method": "eagle3", "model": draft, "num_speculative_tokens": 3})
runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
assert cpu_drafting.fits(runner.drafter) == (True, "")
prompts = ["The sky is", "def add(a, b):", "1 2 3 4 5 6 7 8 " * 8, "Rome, Paris and", "Once upon a time " * 3, "x"]
drafted = []
take = runner.take_draft_token_ids
def taken():
    drafts = take()
    drafted.append([list(ids) for ids in drafts.draft_token_ids])
    return drafts
runner.take_draft_token_ids = taken
lengths = [20, 9, 40, 3, 30, 1]
sampling = [
    SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, min_tokens=2 if n == 9 else 0, logprobs=1 if n == 3 else None)
    for n in lengths
]
out = llm.generate(prompts, sampling, use_tqdm=False)
print("RESULT " + json.dumps({"texts": [o.outputs[0].token_ids for o in out], "drafted": drafted}))
"""


@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_an_engine_drafts_and_answers_the_same() -> None:
    target = cache_dir() / "checkpoints" / "smollm2-135m-instruct"
    draft = assets() / "drafts" / "smollm2-135m-eagle3"
    if not target.is_dir() or not draft.is_dir():
        pytest.skip("the default recipe's checkpoints are not prepared")
    environment = {
        **os.environ,
        **cpu.environment(),
        "VLLM_PLUGINS": "",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    results = []
    for way in ("stock", "lean"):
        run = subprocess.run(
            [sys.executable, "-c", ENGINE, str(target), str(draft), way], env=environment, capture_output=True, text=True, timeout=800
        )
        assert run.returncode == 0, run.stderr[-2000:]
        results.append(json.loads(next(line for line in run.stdout.splitlines() if line.startswith("RESULT "))[7:]))
    stock, lean = results
    assert lean["texts"] == stock["texts"]
    assert lean["drafted"] == stock["drafted"]
    assert sum(len(rows) for rows in stock["drafted"]) > 20


def test_an_artefact_of_torch_passes_vllms_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable

    def graph(numbers: list[int]) -> int:
        return len(numbers)

    graph.serialize = None  # type: ignore[attr-defined]
    compiled = BundledAOTAutogradSerializableCallable(graph)
    artefact = SimpleNamespace(finalize_loading="its own")
    loaded = iter([SimpleNamespace(_artifacts=SimpleNamespace(compiled_fn=value)) for value in (compiled, artefact)])
    monkeypatch.setattr(torch.compiler, "load_compiled_function", lambda *_, **__: next(loaded))
    cpu_compile.install()
    cpu_compile.install()  # once is enough
    function = torch.compiler.load_compiled_function("file", f_globals={})._artifacts.compiled_fn
    assert function is compiled
    assert function([1, 2]) == 2
    assert function.finalize_loading("config") is None
    assert torch.compiler.load_compiled_function("file")._artifacts.compiled_fn.finalize_loading == "its own"
