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


def check(folder: Path) -> str:
    """vLLM's version, or the `LabError` that says what vLLM would not accept or would misread."""
    import vllm
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.quark.quark import QuarkConfig
    from vllm.model_executor.layers.quantization.quark.schemes import QuarkW8A8Fp8
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym, kFp8StaticChannelSym

    draft = read_draft(folder)
    todo = "Please report this with the versions of amd-quark and vllm."
    try:
        parsed = QuarkConfig.from_config(_quantisation(folder, dict(draft.config)))
        parsed.packed_modules_mapping = dict(FUSED)
        for weight in draft.linears:
            name, quantised = vllm_name(weight), draft.tensors[weight].dtype == "F8_E4M3"
            weights, activations, method = parsed.get_quant_method_target(name, LinearBase)
            if not quantised and method is not UnquantizedLinearMethod:
                why = f"Its exclude patterns do not match {name}."
                raise LabError(f"vLLM would load {weight} as FP8, which it is not.", why=why, todo=todo)
            if quantised and method is UnquantizedLinearMethod:
                raise LabError(
                    f"vLLM would load {weight} unquantised, although it is FP8.", why=f"An exclude pattern matches {name}.", todo=todo
                )
            if quantised:
                scheme = parsed.get_scheme_cls(LinearBase, name)[-1]
                if scheme is not QuarkW8A8Fp8 or (weights, activations) != (kFp8StaticChannelSym, kFp8DynamicTokenSym):
                    raise LabError(f"vLLM reads {weight} as {scheme.__name__} with {weights}, {activations}, not as ptpc_fp8.", todo=todo)
    except (ValueError, NotImplementedError, KeyError, TypeError) as error:
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
