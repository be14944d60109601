"""The child process that asks vLLM's own code about a quantised draft: `python -m lab.quant.vllm_check DRAFT RESULT.json`.

vLLM's Quark configuration class parses the draft's `quantization_config`; then each linear layer, under the name it will have in vLLM's
model, is looked up in it: excluded ones must come out unquantised, the others as FP8 with per-channel weights and per-token activations.
The one module of this package that imports vLLM. RESULT.json: `{"version": ...}` or `{"error": [what, why, todo]}`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from lab.errors import LabError
from lab.quant.child import end_with_parent, say
from lab.quant.draft import read_draft

#: How vLLM fuses a Llama-type draft's projections; other names stay as they are.
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
#: vLLM numbers a draft's layers after the target's.
FIRST_LAYER = 30


def vllm_name(weight: str, first: int = FIRST_LAYER) -> str:
    """The module of a draft's `weight` as vLLM's model names it, fused; `first` is the number of the draft's first layer."""
    name = weight.removesuffix(".weight").removeprefix("model.")
    if name.split(".")[-1] == "lm_head":
        return "lm_head"
    name = re.sub(r"^midlayer\.", "layers.0.", name)
    name = re.sub(r"^layers\.(\d+)\.", lambda match: f"layers.{int(match[1]) + first}.", name)
    head, _, last = name.rpartition(".")
    last = next((fused for fused, parts in FUSED.items() if last in parts), last)
    return f"model.{head}.{last}" if head else f"model.{last}"


def _quantisation(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """`quantization_config` as vLLM comes to see it."""
    if "speculators_model_type" not in config:
        return config["quantization_config"]
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    found = getattr(SpeculatorsConfig.from_pretrained(str(folder)), "quantization_config", None)
    if not found:
        raise LabError("vLLM would not see that this speculators draft is quantised.", why="It drops quantization_config while reading it.")
    return found


def reading(parsed: Any, name: str) -> str | None:
    """How vLLM reads the linear layer `name`: None for "as it is", "ptpc_fp8", or its own words for anything else.

    `parsed` is vLLM's QuarkConfig; raises what it raises for a scheme that it has no kernels for.
    """
    import torch
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.quark.schemes import QuarkW8A8Fp8
    from vllm.model_executor.layers.quantization.quark.utils import should_ignore_layer

    if hasattr(parsed, "get_quant_method_target"):
        from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym, kFp8StaticChannelSym

        weights, activations, method = parsed.get_quant_method_target(name, LinearBase)
        if method is UnquantizedLinearMethod:
            return None
        scheme = parsed.get_scheme_cls(LinearBase, name)[-1]
        right = scheme is QuarkW8A8Fp8 and (weights, activations) == (kFp8StaticChannelSym, kFp8DynamicTokenSym)
        return "ptpc_fp8" if right else f"{scheme.__name__} with {weights}, {activations}"
    # vLLM 0.26 and its like: the same decisions, made in `get_quant_method` and `get_scheme` from these parts
    if should_ignore_layer(name, ignore=parsed.quant_config["exclude"], fused_mapping=parsed.packed_modules_mapping):
        return None
    found = parsed._find_matched_config(name, torch.nn.Module())
    weights, activations = found.get("weight"), found.get("input_tensors")
    if not parsed._is_fp8_w8a8(weights, activations):
        return type(parsed._get_scheme_from_config(found)).__name__
    schemes = (weights["qscheme"], activations["qscheme"], bool(activations.get("is_dynamic")))
    return "ptpc_fp8" if schemes == ("per_channel", "per_channel", True) else f"FP8 with {', '.join(map(str, schemes))}"


def check(folder: Path) -> str:
    """vLLM's version, or the `LabError` that says what vLLM would not accept or would misread."""
    import vllm
    from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig

    draft = read_draft(folder)
    todo = "Please report this with the versions of amd-quark and vllm."
    try:
        parsed = QuarkConfig.from_config(_quantisation(folder, dict(draft.config)))
        parsed.packed_modules_mapping = dict(FUSED)
        for weight in draft.linears:
            name, quantised = vllm_name(weight), draft.tensors[weight].dtype == "F8_E4M3"
            found = reading(parsed, name)
            if not quantised and found is not None:
                why = f"Its exclude patterns do not match {name}."
                raise LabError(f"vLLM would load {weight} as FP8, which it is not.", why=why, todo=todo)
            if quantised and found is None:
                raise LabError(
                    f"vLLM would load {weight} unquantised, although it is FP8.", why=f"An exclude pattern matches {name}.", todo=todo
                )
            if quantised and found != "ptpc_fp8":
                raise LabError(f"vLLM reads {weight} as {found}, not as ptpc_fp8.", todo=todo)
    except (ValueError, NotImplementedError, KeyError, TypeError, AttributeError) as error:
        raise LabError("vLLM cannot serve this quantisation scheme.", why=f"{type(error).__name__}: {error}.", todo=todo) from error
    return str(vllm.__version__)


def main() -> int:
    """Entry point of the child."""
    end_with_parent()
    say("asking vLLM about the result")
    try:
        result: dict[str, Any] = {"version": check(Path(sys.argv[1]))}
    except LabError as error:
        result = {"error": [error.what, error.why, error.todo]}
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
