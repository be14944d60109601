"""The CPU's FP8 linear kernel against a float64 reference, its selection, and what it does where the fast op is missing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.model_executor.kernels import linear  # noqa: E402
from vllm.model_executor.kernels.linear import FP8ScaledMMLinearLayerConfig  # noqa: E402
from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig  # noqa: E402
from vllm.model_executor.layers.quantization.utils import quant_utils as keys  # noqa: E402
from vllm.platforms import PlatformEnum, current_platform  # noqa: E402

from lab.vllm_plugin import fp8_cpu  # noqa: E402

if not current_platform.is_cpu():
    pytest.skip("this vLLM is not the CPU build", allow_module_level=True)
current_platform.import_kernels()

FAST, WHY_NOT = fp8_cpu.packed_gemm(32, 32, torch.bfloat16)
needs_op = pytest.mark.skipif(not FAST, reason=WHY_NOT)


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Every run draws the same inputs: with small layers, one in some hundred draws cancels to less than BF16 can tell."""
    torch.manual_seed(0)


ROWS = (1, 2, 3, 4, 5, 16, 17, 64)
#: K, N: the draft's four linears, then sizes off every tile (32, 128) the op works in.
PACKABLE = ((1152, 960), (576, 576), (576, 3072), (1536, 576), (32, 32), (96, 64), (160, 96), (416, 1056))
ODD = ((64, 48), (33, 32), (130, 64), (64, 33), (100, 96), (7, 5), (2, 1))


def config(dtype: torch.dtype, k: int, n: int, *, weight=keys.kFp8StaticChannelSym, activation=keys.kFp8DynamicTokenSym):
    return FP8ScaledMMLinearLayerConfig(
        weight_quant_key=weight, activation_quant_key=activation, weight_shape=(n, k), input_dtype=dtype, out_dtype=dtype
    )


def quantised(k: int, n: int, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 [N, K] and its float32 scales [N], with one channel of zeros."""
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05
    weight[n // 2] = 0
    scale = weight.abs().amax(1).clamp(min=1e-12) / 448
    return (weight / scale[:, None]).to(torch.float8_e4m3fn), scale


def layer_of(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype):
    """A loaded layer as vLLM's Quark scheme leaves it for a kernel, and the kernel."""
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight.t(), requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scale.view(-1, 1), requires_grad=False)
    n, k = weight.shape
    # The base class's constructor makes an activation quantiser, which needs a running engine's configuration.
    kernel = fp8_cpu.ChannelFp8CpuLinearKernel.__new__(fp8_cpu.ChannelFp8CpuLinearKernel)
    kernel.config = config(dtype, k, n)
    kernel.layer_param_names = ["weight", "weight_scale", "input_scale", "input_scale_ub"]
    kernel.process_weights_after_loading(layer)
    return layer, kernel


def reference(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = x.double() @ (weight.double() * scale.double()[:, None]).t()
    return out if bias is None else out + bias.double()


def check(got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    assert torch.isfinite(got).all()
    for row, expected in zip(got.double().reshape(-1, got.shape[-1]), want.reshape(-1, got.shape[-1]), strict=True):
        assert (row - expected).norm() <= bound * expected.norm()


@needs_op
@pytest.mark.parametrize(("k", "n"), PACKABLE)
def test_packed_matches_float64(k, n):
    weight, scale = quantised(k, n)
    layer, kernel = layer_of(weight, scale, torch.bfloat16)
    assert kernel.packed
    assert layer.weight.dtype == torch.float8_e4m3fn
    bias = torch.randn(n).bfloat16()
    for rows in ROWS:
        x = torch.randn(rows, k).bfloat16()
        check(kernel.apply_weights(layer, x), reference(x, weight, scale), 0.006)
        check(kernel.apply_weights(layer, x, bias), reference(x, weight, scale, bias), 0.008)
        assert not kernel.apply_weights(layer, x)[:, n // 2].any()  # the channel of zeros


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("k", "n"), ODD)
def test_sizes_the_op_refuses_are_widened(k, n, dtype):
    weight, scale = quantised(k, n)
    layer, kernel = layer_of(weight, scale, dtype)
    assert not kernel.packed
    bound = {torch.bfloat16: 0.02, torch.float16: 0.003, torch.float32: 1e-5}[dtype]
    bias = torch.randn(n).to(dtype)
    for rows in ROWS:
        x = torch.randn(rows, k).to(dtype)
        got = kernel.apply_weights(layer, x)
        assert got.dtype == dtype
        check(got, reference(x, weight, scale), bound)
        check(kernel.apply_weights(layer, x, bias), reference(x, weight, scale, bias), bound)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_input_types_are_widened(dtype):
    weight, scale = quantised(576, 960)
    layer, kernel = layer_of(weight, scale, dtype)
    assert not kernel.packed
    x = torch.randn(4, 576).to(dtype)
    check(kernel.apply_weights(layer, x), reference(x, weight, scale), 0.003)


@needs_op
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_extreme_scales(size):
    weight, scale = quantised(576, 96)
    scale = scale * torch.logspace(-3, 3, 96) * size
    layer, kernel = layer_of(weight, scale, torch.bfloat16)
    x = torch.randn(4, 576).bfloat16()
    got, want = kernel.apply_weights(layer, x), reference(x, weight, scale)
    used = scale.isfinite()
    error = (got.double() - want).norm(dim=0) / want.norm(dim=0).clamp(min=1e-300)
    assert (error[used & (want.abs().amax(0) > 0)] < 0.012).all()


@needs_op
def test_zero_rows_and_no_rows():
    weight, scale = quantised(576, 576)
    layer, kernel = layer_of(weight, scale, torch.bfloat16)
    x = torch.randn(4, 576).bfloat16()
    x[2] = 0
    assert not kernel.apply_weights(layer, x)[2].any()
    assert kernel.apply_weights(layer, x[:0]).shape == (0, 576)
    assert kernel.apply_weights(layer, x.view(2, 2, 576)).shape == (2, 2, 576)
    # a view with gaps between its rows
    wide = torch.randn(4, 1152).bfloat16()
    check(kernel.apply_weights(layer, wide[:, 576:]), reference(wide[:, 576:], weight, scale), 0.006)


@needs_op
def test_every_weight_code_is_read_right():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = torch.where(codes.isnan(), torch.zeros(()), codes)
    weight = codes.to(torch.float8_e4m3fn).repeat(32, 1)  # N = 32, K = 256
    layer, kernel = layer_of(weight, torch.ones(32), torch.bfloat16)
    every = kernel.apply_weights(layer, torch.eye(256).bfloat16())
    for rows in (1, 4, 16):  # the op reads weights in another way from some number of rows on
        assert torch.equal(torch.cat([kernel.apply_weights(layer, part) for part in torch.eye(256).bfloat16().split(rows)]), every)
    got = every[:, 0].float()
    exact = codes.abs() >= 2**-7
    assert torch.equal(got[exact], codes[exact])
    assert (got - codes).abs().max() <= 2**-7
    assert got[codes == 0].unique().tolist() == [-(2**-7), 2**-7]


@needs_op
def test_pruned_weights():
    weight, scale = quantised(576, 576)
    weight = torch.where(torch.rand(576, 576) < 0.9, torch.zeros(()), weight.float()).to(torch.float8_e4m3fn)
    layer, kernel = layer_of(weight, scale, torch.bfloat16)
    x = torch.randn(4, 576).bfloat16() + 3  # not centred: a shift of every zero would add up
    check(kernel.apply_weights(layer, x), reference(x, weight, scale), 0.006)


@needs_op
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e6])
def test_channel_of_zeros_whatever_its_scale(size):
    weight, scale = quantised(576, 96)
    scale[48] = size
    layer, kernel = layer_of(weight, scale, torch.bfloat16)
    assert not kernel.apply_weights(layer, torch.randn(4, 576).bfloat16())[:, 48].any()


def test_widened_way_is_vllms_own(monkeypatch):
    """Where the op is missing, the layer runs through the same function as an unquantised one, on the weight multiplied out."""
    monkeypatch.setattr(fp8_cpu, "packed_gemm", lambda *_args, **_kwargs: (False, "no op here"))
    weight, scale = quantised(576, 576)
    layer, kernel = layer_of(weight, scale, torch.bfloat16)
    plain = torch.nn.Module()
    plain.weight = torch.nn.Parameter((weight.float() * scale[:, None]).bfloat16(), requires_grad=False)
    fp8_cpu.dispatch_cpu_unquantized_gemm(plain, remove_weight=False)
    x = torch.randn(4, 576).bfloat16()
    assert torch.equal(kernel.apply_weights(layer, x), plain.cpu_linear(x, plain.weight, None))


def test_wrong_number_of_scales():
    weight, scale = quantised(64, 32)
    with pytest.raises(ValueError, match="32 scales, not 31"):
        layer_of(weight, scale[:31], torch.bfloat16)


@needs_op
def test_compiles():
    fp8_cpu.register()
    weight, scale = quantised(576, 96)
    layer, kernel = layer_of(weight, scale, torch.bfloat16)
    x = torch.randn(3, 576).bfloat16()
    arguments = (x, layer.weight, layer.fp8_unit, layer.weight_scale, None)
    torch.library.opcheck(getattr(torch.ops.vllm, fp8_cpu.OP), arguments, test_utils="test_faketensor")
    compiled = torch.compile(lambda rows: kernel.apply_weights(layer, rows), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), kernel.apply_weights(layer, x))


AVX512 = {"avx512_bf16": True, "amx_tile": False}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, ""),
        ({"op": False}, "no fp8_scaled_mm_cpu"),
        ({"capabilities": {"avx512_bf16": False}}, "no AVX512-BF16"),
        ({"capabilities": {**AVX512, "amx_tile": True}}, ""),
        ({"dtype": torch.float16}, "float16"),
        ({"n": 33}, "multiple"),
        ({"k": 130}, "multiple"),
    ],
)
def test_selector(arguments, words):
    given = {"n": 576, "k": 576, "dtype": torch.bfloat16, "capabilities": AVX512, "op": True} | arguments
    ok, reason = fp8_cpu.packed_gemm(given.pop("n"), given.pop("k"), given.pop("dtype"), **given)
    assert ok == (not words)
    assert words in reason


def test_selector_gives_every_reason():
    _, reason = fp8_cpu.packed_gemm(33, 130, torch.float32, capabilities={}, op=False)
    assert reason.count(";") == 3


def choose(**changes):
    return linear.choose_scaled_mm_linear_kernel(
        config(torch.bfloat16, 576, 576, **changes), linear._POSSIBLE_FP8_KERNELS, quantization="fp8_w8a8"
    )


def test_vllm_chooses_it_for_ptpc_only(monkeypatch):
    fp8_cpu.register()
    fp8_cpu.register()  # vLLM may load a plugin twice
    assert linear._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU].count(fp8_cpu.ChannelFp8CpuLinearKernel) == 1
    assert choose() is fp8_cpu.ChannelFp8CpuLinearKernel
    assert choose(activation=keys.kFp8StaticTensorSym) is linear.ChannelWiseTorchFP8ScaledMMLinearKernel
    assert choose(weight=keys.kFp8StaticTensorSym) is linear.ChannelWiseTorchFP8ScaledMMLinearKernel
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "ChannelFp8CpuLinearKernel")
    assert choose() is linear.ChannelWiseTorchFP8ScaledMMLinearKernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vllm_starts_a_quark_draft_in_the_types_of_cpu_recipes(dtype):
    """A processor without AVX-512 computes in float32, which vLLM's Quark class by itself refuses before anything is loaded."""
    fp8_cpu.register()
    assert dtype in QuarkConfig({}).get_supported_act_dtypes()


def test_stays_out_of_the_way_elsewhere(monkeypatch):
    before = {platform: list(kernels) for platform, kernels in linear._POSSIBLE_FP8_KERNELS.items()}
    monkeypatch.setattr(fp8_cpu, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    fp8_cpu.register()
    assert before == linear._POSSIBLE_FP8_KERNELS
    assert fp8_cpu.ChannelFp8CpuLinearKernel.is_supported()[0] is False
