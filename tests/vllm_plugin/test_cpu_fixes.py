"""The repairs of vLLM's CPU path, against the Triton kernel's definition and against the laws of rejection sampling."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from lab.vllm_plugin import cpu_fixes  # noqa: E402


def reference(x: list[float], cumulative: list[int], replace_from: float, replace_to: float) -> list[float]:
    starts = [0, *cumulative[:-1]]
    return [replace_to if v == replace_from else v for v, a, b in zip(x, starts, cumulative, strict=True) for _ in range(b - a)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
@pytest.mark.parametrize("cumulative", [[3, 6, 6, 8], [0, 0, 1, 1], [1, 2, 3, 4], [0, 5, 5, 5]])
def test_expand_is_the_kernels_definition(cumulative: list[int], dtype: Any) -> None:
    x = [0, 2, 5, 1]
    found = cpu_fixes.expand(torch.tensor(x, dtype=dtype), torch.tensor(cumulative, dtype=torch.int32), cumulative[-1], 0, 7)
    assert found.dtype == dtype
    assert found.tolist() == reference(x, cumulative, 0, 7)


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's rejection sampler as its CPU worker runs it, repaired."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("vLLM runs on another platform here")
    from vllm.v1.sample import rejection_sampler

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", cpu_fixes.expand)
    return rejection_sampler


def sample(sampler: Any, logits: Any, draft: list[int], counts: list[int], temperature: list[float], bonus: list[int]) -> list[list[int]]:
    cumulative = torch.tensor(counts).cumsum(0).to(torch.int32)
    metadata = SimpleNamespace(
        all_greedy=not any(temperature),
        all_random=all(temperature),
        temperature=torch.tensor(temperature),
        top_k=None,
        top_p=None,
        generators={},
    )
    constrained = sampler.apply_sampling_constraints(logits.clone(), cumulative, metadata)
    ids = torch.tensor(draft, dtype=torch.int32)
    found = sampler.rejection_sample(
        ids, counts, max(counts), cumulative, None, constrained, torch.tensor(bonus, dtype=torch.int32)[:, None], metadata
    )
    return [[token for token in row if token >= 0] for row in found.tolist()]


def test_greedy_requests_are_untouched_by_a_neighbour_with_a_temperature(sampler: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        logits = torch.randn(9, 40, generator=generator) * 3
        best = logits.argmax(-1).tolist()
        draft = [best[0], best[1], (best[2] + 1) % 40, *best[3:6], *best[6:9]]
        alone = sample(sampler, logits[:3], draft[:3], [3], [0.0], [39])
        rows = sample(sampler, logits, draft, [3, 3, 3], [0.0, 0.7, 0.0], [39, 38, 37])
        assert rows[0] == alone[0] == best[:3]
        assert rows[2] == [*best[6:9], 37]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_first_token_follows_the_targets_distribution(sampler: Any, temperature: float) -> None:
    """Rejection sampling is lossless (Leviathan et al. 2023): whatever the draft says, token 1 has the target's probabilities."""
    torch.manual_seed(2)
    vocabulary, requests = 6, 20_000
    logits = torch.tensor([0.0, 1.0, 2.0, 0.5, -1.0, 1.5])
    rows = sample(sampler, logits.repeat(requests, 1), [2] * requests, [1] * requests, [temperature] * requests, [0] * requests)
    found = torch.bincount(torch.tensor([row[0] for row in rows]), minlength=vocabulary) / requests
    wanted = (logits / temperature).softmax(0)
    assert torch.allclose(found, wanted, atol=4 * (0.25 / requests) ** 0.5)


def test_a_seeded_generator_draws_the_same_and_can_be_rewound() -> None:
    plain = torch.Generator().manual_seed(7)
    mine = cpu_fixes.Generator()
    mine.set_state(torch.Generator().manual_seed(7).get_state())
    mine.set_offset(mine.get_offset() - 4)
    assert torch.equal(torch.rand(5, generator=plain), torch.rand(5, generator=mine))
    with pytest.raises(RuntimeError):
        plain.get_offset()  # the fault itself
