"""vLLM's own rejection sampler under the certificate's test: the rule as it runs here passes, wrong ones do not."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("scipy", reason="the test's laws come from scipy")

from lab.bench import goodness  # noqa: E402
from lab.vllm_plugin import cpu_fixes  # noqa: E402

LOGITS = [0.0, 1.0, 2.0, 0.5, -1.0, 1.5, 0.2, -0.5]
TEMPERATURE, N = 0.7, 16_000


def drawn(repaired: bool, monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """First tokens of `N` one-token verifications of the draft token 2, through vLLM's `rejection_sample`."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("vLLM runs on another platform here")
    from vllm.v1.sample import rejection_sampler

    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    if repaired:
        monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", cpu_fixes.expand)
    torch.manual_seed(5)
    cumulative = torch.arange(1, N + 1, dtype=torch.int32)
    sampling = SimpleNamespace(
        all_greedy=False, all_random=True, temperature=torch.full((N,), TEMPERATURE), top_k=None, top_p=None, generators={}
    )
    logits = rejection_sampler.apply_sampling_constraints(torch.tensor(LOGITS).repeat(N, 1), cumulative, sampling)
    draft = torch.full((N,), 2, dtype=torch.int32)
    bonus = torch.zeros((N, 1), dtype=torch.int32)
    found = rejection_sampler.rejection_sample(draft, [1] * N, 1, cumulative, None, logits, bonus, sampling)
    return Counter(int(token) for token in found[:, 0])


def p(counts: Counter[int]) -> float:
    shares = (torch.tensor(LOGITS) / TEMPERATURE).softmax(0)
    binned = goodness.pool(counts, {token: float(share) for token, share in enumerate(shares)})
    assert binned is not None
    return goodness.test([binned]).p


def test_the_rule_as_it_runs_here_has_the_targets_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    assert p(drawn(True, monkeypatch)) > 0.001


def test_another_temperature_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = drawn(True, monkeypatch)
    shares = torch.tensor(LOGITS).softmax(0)
    binned = goodness.pool(counts, {token: float(share) for token, share in enumerate(shares)})
    assert binned is not None
    assert goodness.test([binned]).p < 1e-6


def test_a_draft_that_is_always_taken_is_found() -> None:
    assert p(Counter({2: N})) < 1e-6


@pytest.mark.parametrize("taken", [0.05, 0.1])
def test_a_draft_that_is_taken_a_little_too_often_is_found(monkeypatch: pytest.MonkeyPatch, taken: float) -> None:
    """A twentieth of all answers moved to the draft token: a total variation of about 0.04, within what the sample can tell."""
    counts = drawn(True, monkeypatch)
    moved = Counter({token: round(count * (1 - taken)) for token, count in counts.items()})
    moved[2] += N - moved.total()
    shares = (torch.tensor(LOGITS) / TEMPERATURE).softmax(0)
    reach = goodness.detectable(N, len(LOGITS) - 1, 0.01, 0.8)
    assert reach is not None
    assert taken * (1 - float(shares[2])) > 0.6 * reach
    assert p(moved) < 0.01
