"""FP8 linears on a CPU: a vLLM kernel for weights in E4M3 with one scale per output channel (AMD Quark's ptpc_fp8).

vLLM 0.32 runs such a layer on a CPU through `torch._scaled_mm`, which takes some forty times as long as the BF16 layer. This kernel
registers itself through vLLM's `register_linear_kernel` and works in one of two ways, decided per layer by `packed_gemm`:

- *packed*: the weight stays FP8 and `torch.ops._C.fp8_scaled_mm_cpu` widens it to BF16 in registers, so half as many bytes are read.
  The op knows block scales only, so its block scales are one and the channel scale multiplies the output.
- *widened*: where that op is missing (vLLM's AVX2 and plain AVX-512 libraries, other processors) or does not take the layer, the weight is
  multiplied out once at load and then runs exactly as vLLM runs an unquantised layer. No memory is saved; nothing is slower than BF16.

Numerics. Activations are **not** quantised, although the scheme allows it: y = bf16(x . w_fp8) * bf16(scale) (+ bias), products summed in
float32. Against float64 on the same FP8 weight the relative error is about 0.003: BF16's rounding of the sum and of the product (0.0017
each) and the scale's rounding to BF16 (at most 0.002). Quantising the weight itself costs about 0.026; rounding activations to FP8 per
token would add as much again and another pass over x. A zero row of x gives zeros, and so does a channel of zeros. The unscaled sum is held
in BF16, whose exponents are float32's, so no scale that is a normal float32 overflows or vanishes before the product itself does.
Effect on acceptance, measured with the default recipe's draft (K=3, greedy, 240 chat, maths and code prompts of 96 tokens, paired against
the BF16 draft, 95% intervals by bootstrap over prompts): 0.493 in BF16; this kernel -0.005 [-0.008, -0.001]; with activations rounded to
FP8 per token as well -0.006 [-0.009, -0.002]. Rounding them buys nothing and costs a pass, so they are left alone.
The op misreads E4M3's subnormal codes (code 0 as 2^-7, m * 2^-9 as 2^-7 + m * 2^-10). `readable` replaces each by the code that is read
nearest, which leaves at most 2^-7 * scale per weight, 1/57344 of the largest weight its channel can hold.

Float32. A CPU without AVX-512 computes in float32 (`lab/recipes/cpu.py`), where layers are widened. vLLM's Quark configuration names
float16 and bfloat16 only, since its GPU kernels know no other type; `register` adds float32.

Limits: bfloat16 for the packed way, K and N multiples of 32 (vLLM's op aborts the process on some other sizes and types, and on no rows).
Speed over BF16's layer on a CPU with AMX (`fp8_bench`, the default draft's sizes; 1, 4 and 16 rows): 1.8, 1.2 and 1.0 times where the
weights come from memory; 1.4, 0.8 and 0.6 times where they stay in a cache.
ROCm and CUDA never see this kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from vllm.logger import init_logger
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear import FP8ScaledMMLinearKernel, FP8ScaledMMLinearLayerConfig, register_linear_kernel
from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym, kFp8StaticChannelSym
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.platforms import PlatformEnum, current_platform
from vllm.utils.torch_utils import direct_register_custom_op

# Below vLLM's logger, or nobody would see it.
logger = init_logger("vllm.eagle3_lab.fp8_cpu")

#: Name under `torch.ops.vllm` of the layer as one opaque operation, which is what torch.compile needs.
OP = "eagle3_lab_fp8_linear"
#: Rows of the op's scale table and columns of x that share a scale: fixed in vLLM's source.
_BLOCK_N, _BLOCK_K = 32, 128


def packed_gemm(
    n: int, k: int, dtype: torch.dtype, *, capabilities: Mapping[str, object] | None = None, op: bool | None = None
) -> tuple[bool, str]:
    """Whether a layer of `n` outputs and `k` inputs can stay FP8 on this CPU, and every reason why not.

    `capabilities` and `op` default to this machine's (`torch.cpu.get_capabilities()`; is vLLM's operation there).
    """
    found = torch.cpu.get_capabilities() if capabilities is None else capabilities
    reasons = []
    if not (hasattr(torch.ops._C, "fp8_scaled_mm_cpu") if op is None else op):
        reasons.append("vLLM's library for this CPU has no fp8_scaled_mm_cpu")
    if not found.get("avx512_bf16", False):
        reasons.append("the CPU has no AVX512-BF16")
    if dtype != torch.bfloat16:
        reasons.append(f"activations are {str(dtype).removeprefix('torch.')}, not bfloat16")
    if k % 32 or n % 32:
        reasons.append(f"its {k} inputs and {n} outputs must be multiples of 32")
    return not reasons, "; ".join(reasons)


def fp8_linear(x: torch.Tensor, packed: torch.Tensor, unit: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y[..., N] = (x[..., K] @ w.T) * scale + bias.

    x: bfloat16. packed: E4M3 [N, K] in the layout of `convert_weight_packed`. unit: ones, [ceil(N/32), ceil(K/128)] float32.
    scale: bfloat16 [N]. bias: bfloat16 [N] or None.
    """
    # At one row of a small layer every Python-side view costs some per cent, so the usual case, a matrix with rows, makes none.
    if x.dim() != 2 or x.size(0) == 0:  # the op divides by the number of rows
        if x.numel() == 0:
            return x.new_empty((*x.shape[:-1], packed.size(0)))
        return fp8_linear(x.reshape(-1, x.size(-1)), packed, unit, scale, bias).view(*x.shape[:-1], packed.size(0))
    out = torch.ops._C.fp8_scaled_mm_cpu(x, packed, unit, [_BLOCK_N, _BLOCK_K], None, torch.bfloat16, True).mul_(scale)
    return out if bias is None else out.add_(bias)


def readable(weight: torch.Tensor) -> torch.Tensor:
    """E4M3 [N, K] whose codes `fp8_scaled_mm_cpu` reads as near to `weight` as it can.

    The op reads code m < 8 as (8 + m) / 1024, not m / 512: so m of 4 to 7 become 2m - 8, smaller ones 0, which is read as 1/128. A zero
    has no code; it becomes 1/128 and -1/128 in turn along K, so that a pruned channel is not shifted as a whole.
    """
    codes = weight.contiguous().view(torch.uint8)
    sign, size = codes & 0x80, codes & 0x7F
    nearest = torch.where(size < 8, (2 * size.to(torch.int16) - 8).clamp(min=0).to(torch.uint8), size)
    turn = (torch.arange(weight.shape[1]) % 2 * 0x80).to(torch.uint8)
    return (torch.where(size == 0, turn.expand_as(sign), sign) | nearest).view(torch.float8_e4m3fn)


def _fp8_linear_shape(x: torch.Tensor, packed: torch.Tensor, *_: object) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


class ChannelFp8CpuLinearKernel(FP8ScaledMMLinearKernel):
    """Per-channel FP8 weights on a CPU; see the module's text for how and how exactly."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:  # noqa: ARG003
        """Any CPU will do: without the fast op the weights are widened."""
        return (True, None) if current_platform.is_cpu() else (False, "is for CPUs")

    @classmethod
    def can_implement(cls, c: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        """Only ptpc: one scale per output channel, activations per token; the rest stays with vLLM's own kernels."""
        reasons = []
        if c.weight_quant_key != kFp8StaticChannelSym:
            reasons.append("needs symmetric FP8 weights with one scale per output channel")
        if c.activation_quant_key != kFp8DynamicTokenSym:
            reasons.append("needs activations quantised per token at run time")
        return not reasons, "; ".join(reasons) or None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Bring `layer.weight` (E4M3, [K, N] as vLLM hands it over) and its scale ([N] or [N, 1]) into the form that will be used."""
        weight_name, scale_name, *_ = self.layer_param_names
        weight = getattr(layer, weight_name).t()
        scale = getattr(layer, scale_name).reshape(-1).float()
        n, k = weight.shape
        if scale.numel() != n:
            raise ValueError(f"{n} output channels need {n} scales, not {scale.numel()}.")
        dtype = self.config.out_dtype or self.config.input_dtype
        self.packed, reason = packed_gemm(n, k, dtype)
        if self.packed:
            layer.fp8_unit = torch.ones((-(-n // _BLOCK_N), -(-k // _BLOCK_K)), dtype=torch.float32)
            scale = torch.where((weight.float() == 0).all(dim=1), 0.0, scale).to(dtype)
            weight = torch.ops._C.convert_weight_packed(readable(weight))
            logger.info_once("FP8 linears stay FP8 in memory and compute in BF16 (fp8_scaled_mm_cpu).")
        else:
            weight = (weight.float() * scale[:, None]).to(dtype)
            logger.warning_once(
                "FP8 linears are widened to %s at load, so they save no memory: %s.", str(dtype).removeprefix("torch."), reason
            )
        setattr(layer, weight_name, torch.nn.Parameter(weight, requires_grad=False))
        setattr(layer, scale_name, torch.nn.Parameter(scale, requires_grad=False))
        if not self.packed:
            dispatch_cpu_unquantized_gemm(layer, remove_weight=True)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """y[..., N] for x[..., K], in x's type."""
        # Not `_get_layer_params`, which looks for activation scales that are never there: an eighth of a small layer's time.
        weight_name, scale_name, *_ = self.layer_param_names
        if not self.packed:
            # The bias apart: on CPUs with AMX vLLM's packed product takes one in float32 only.
            out = layer.cpu_linear(x, getattr(layer, weight_name), None)
            return out if bias is None else out + bias.to(out.dtype)
        run = getattr(torch.ops.vllm, OP) if torch.compiler.is_compiling() else fp8_linear
        return run(x, getattr(layer, weight_name), layer.fp8_unit, getattr(layer, scale_name), bias)

    def apply_scaled_mm(self, **_: object) -> torch.Tensor:
        """Never called: this kernel quantises no activations."""
        raise NotImplementedError


def _types(_: type[QuarkConfig]) -> list[torch.dtype]:
    """Types that a Quark checkpoint computes in on a CPU; vLLM refuses to start with others."""
    return [torch.float16, torch.bfloat16, torch.float32]


def register() -> None:
    """Put the kernel before vLLM's slow one on a CPU; do nothing elsewhere, or when called again.

    vLLM takes the first kernel that fits and `register_linear_kernel` appends, so the kernel is moved forward in vLLM's table.
    VLLM_DISABLED_KERNELS could remove the slow one instead, but for every layer and against `--linear-backend torch`.
    """
    if not current_platform.is_cpu():
        return
    if not hasattr(torch.ops.vllm, OP):
        direct_register_custom_op(OP, fp8_linear, fake_impl=_fp8_linear_shape, dispatch_key="CPU")
    QuarkConfig.get_supported_act_dtypes = classmethod(_types)
    table = getattr(linear, "_POSSIBLE_FP8_KERNELS", {}).get(PlatformEnum.CPU, [])
    if ChannelFp8CpuLinearKernel not in table:
        register_linear_kernel(ChannelFp8CpuLinearKernel, PlatformEnum.CPU, "fp8")
    slow = linear.ChannelWiseTorchFP8ScaledMMLinearKernel
    if slow not in table:
        logger.warning_once("This vLLM orders its FP8 kernels in another way: an FP8 draft may be slow.")
    elif table.index(slow) < table.index(ChannelFp8CpuLinearKernel):
        table.remove(ChannelFp8CpuLinearKernel)
        table.insert(table.index(slow), ChannelFp8CpuLinearKernel)
