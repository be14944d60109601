"""Rules about quantised weights: AMD Quark's configuration as vLLM reads it, and number formats that a processor lacks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from lab.doctor.files import Model
from lab.doctor.rule import SEEN, Found, rule
from lab.doctor.subject import Subject
from lab.quant.draft import is_linear
from lab.quant.vllm_check import vllm_name

QUARK = "model_executor/layers/quantization/quark/quark.py"
IGNORE = "model_executor/layers/quantization/quark/utils.py:should_ignore_layer"
MATCH = "model_executor/layers/quantization/utils/config_utils.py:is_equal_or_regex_match"
FP8 = "model_executor/layers/quantization/quark/schemes/quark_w8a8_fp8.py:QuarkW8A8Fp8"
F8 = ("F8_E4M3", "F8_E5M2")


def _quantisation(config: object) -> dict[str, Any]:
    found = config.get("quantization_config") if isinstance(config, dict) else None
    return found if isinstance(found, dict) else {}


def _quark(s: Subject) -> list[tuple[str, Model, dict[str, Any]]]:
    """Target and draft whose configuration says quark, with it."""
    found = []
    for role, model, config in (("target", s.target, s.target.config if s.target else {}), ("draft", s.draft, s.draft_view)):
        quantisation = _quantisation(dict(config)) or (_quantisation(dict(s.target_text)) if role == "target" else {})
        if model is not None and quantisation.get("quant_method") == "quark":
            found.append((role, model, quantisation))
    return found


def _patterns(quantisation: dict[str, Any]) -> list[str]:
    listed = quantisation.get("exclude")
    return [one for one in listed if isinstance(one, str)] if isinstance(listed, list) else []


def _matches(pattern: str, name: str) -> bool:
    """As vLLM does: a regular expression from the start of the name after "re:", else equality."""
    if not pattern.startswith("re:"):
        return pattern == name
    try:
        return re.match(pattern[3:], name) is not None
    except re.error:
        return False


def _unfused(weight: str, layers: int) -> str:
    """A weight's module in vLLM's model before projections are fused: layers are counted on from the target's."""
    name = weight.removesuffix(".weight").removeprefix("model.")
    name = re.sub(r"^midlayer\.", "layers.0.", name)
    return "model." + re.sub(r"^layers\.(\d+)\.", lambda found: f"layers.{layers + int(found[1])}.", name)


def _as_pattern(name: str) -> str:
    """An exclude entry that people write, as the pattern that vLLM matches."""
    return f"re:.*{re.escape(name.removeprefix('model.')).replace(chr(92) + '*', '.*')}$"


@rule(
    "quark-exclude",
    "error",
    "vLLM's idea of what is quantised differs from the weights",
    reads=IGNORE,
    fields=("find_matching_patterns", "ignore"),
    issues=(SEEN,),
)
def quark_exclude(s: Subject) -> Iterator[Found]:
    """vLLM compares `exclude` with its own module names (`model.fc`), by equality or as a regular expression after "re:". An entry such
    as "fc" matches nothing: the BF16 weights are then read as FP8, which loads, serves, and gets 6 of 8,247 draft tokens accepted
    instead of 1,465 of 3,933.
    """
    for role, model, quantisation in _quark(s):
        if role != "draft" or not model.tensors:
            continue
        patterns, wrong = _patterns(quantisation), []
        layers = s.target_int("num_hidden_layers") or 0
        for weight, header in model.tensors.items():
            if not is_linear(weight, header) or weight.split(".")[-2:-1] == ["lm_head"]:
                continue  # a ParallelLMHead is no LinearBase: Quark's class never quantises it
            plain = _unfused(weight, layers)
            names = {vllm_name(weight, layers), plain}
            excluded = any(_matches(pattern, name) for pattern in patterns for name in names)
            quantised = header.dtype in (*F8, "I8", "U8", "I32", "F4")
            if excluded == quantised:
                wrong.append(f"{weight} is {header.dtype}, but {'excluded' if excluded else 'not excluded'}")
        if wrong:
            more = f" (and {len(wrong) - 2} more)" if len(wrong) > 2 else ""
            listed = (
                ", ".join(f'"{one if one.startswith("re:") else _as_pattern(one)}"' for one in patterns) or '"re:.*fc$", "re:.*lm_head$"'
            )
            yield Found(
                f"{'; '.join(wrong[:2])}{more}; exclude is {patterns!r:.120}",
                f'In the {role}\'s quantization_config: "exclude": [{listed}]',
            )


@rule("quark-pattern", "error", "An exclude entry can match nothing", reads=MATCH, fields=("re:", "use_fnmatch"), issues=(SEEN,))
def quark_pattern(s: Subject) -> Iterator[Found]:
    """Entries are regular expressions after "re:" and whole module names otherwise; shell patterns with `*` and bare last names are
    neither, and an expression that is not anchored by `.*` must match from the name's start.
    """
    for role, _, quantisation in _quark(s):
        for pattern in _patterns(quantisation):
            if pattern.startswith("re:"):
                try:
                    re.compile(pattern[3:])
                except re.error as error:
                    yield Found(f"{role}: {pattern!r} is no regular expression ({error})", f'"{_as_pattern(pattern[3:])}"')
            elif "*" in pattern or (role == "draft" and "." not in pattern and pattern != "lm_head"):
                yield Found(f"{role}: exclude has {pattern!r}", f'Write "{_as_pattern(pattern)}" instead.')


@rule(
    "quark-incomplete",
    "error",
    "Quark's configuration lacks a part that vLLM needs",
    reads=f"{QUARK}:QuarkConfig.from_config",
    fields=("export", "kv_cache_group", "layer_quant_config"),
)
def quark_incomplete(s: Subject) -> Iterator[Found]:
    """vLLM reads `export.kv_cache_group` and `export.pack_method`, and the schemes in `global_quant_config`, `layer_quant_config` and
    `layer_type_quant_config`; it stops at a missing one.
    """
    for role, _, quantisation in _quark(s):
        export = quantisation.get("export")
        if not isinstance(export, dict):
            yield Found(f"{role}: quantization_config has no export", "Export the checkpoint again with Quark's Hugging Face format.")
        elif not isinstance(export.get("kv_cache_group"), list):
            yield Found(f"{role}: export.kv_cache_group is {export.get('kv_cache_group')!r:.40}", 'Set "kv_cache_group": [] in export.')
        for name, kind in (("global_quant_config", dict), ("layer_type_quant_config", dict)):
            if not isinstance(quantisation.get(name), kind):
                yield Found(
                    f"{role}: {name} is {quantisation.get(name)!r:.40}", f"Export the checkpoint again; {name} should be an object."
                )
        if quantisation.get("exclude") is not None and not isinstance(quantisation["exclude"], list):
            yield Found(f"{role}: exclude is {quantisation['exclude']!r:.60}", 'Make it a list: "exclude": ["re:.*fc$", "re:.*lm_head$"].')


@rule(
    "quark-scheme",
    "error",
    "vLLM has no kernel for this FP8 scheme",
    reads=f"{QUARK}:QuarkConfig._is_fp8_w8a8",
    fields=("fp8_e4m3", "per_tensor", "per_channel", "is_dynamic", "qscheme"),
)
def quark_scheme(s: Subject) -> Iterator[Found]:
    """FP8 weights must be static E4M3 per tensor, per output channel or in blocks of 128 x 128, with E4M3 activations that are dynamic,
    or static per tensor; anything else ends with "No quark compatible scheme was found".
    """
    for role, _, quantisation in _quark(s):
        scheme = quantisation.get("global_quant_config")
        weight, activation = (scheme.get("weight"), scheme.get("input_tensors")) if isinstance(scheme, dict) else (None, None)
        weight = weight[0] if isinstance(weight, list) and len(weight) == 1 else weight
        activation = activation[0] if isinstance(activation, list) and len(activation) == 1 else activation
        if not isinstance(weight, dict) or not str(weight.get("dtype", "")).startswith("fp8"):
            continue
        why = ""
        if weight["dtype"] != "fp8_e4m3":
            why = f"weights are {weight['dtype']}"
        elif weight.get("is_dynamic"):
            why = "weights are dynamic"
        elif weight.get("qscheme") not in ("per_tensor", "per_channel", "per_block"):
            why = f"weights are {weight.get('qscheme')}"
        elif weight.get("qscheme") == "per_channel" and weight.get("ch_axis") not in (None, 0):
            why = f"weights are per channel along axis {weight.get('ch_axis')}, not the outputs"
        elif isinstance(activation, dict) and activation.get("dtype") != "fp8_e4m3":
            why = f"activations are {activation.get('dtype')}"
        elif isinstance(activation, dict) and not activation.get("is_dynamic") and activation.get("qscheme") != "per_tensor":
            why = f"activations are static and {activation.get('qscheme')}"
        elif activation is None:
            why = "activations are not quantised (weight-only FP8)"
        if why:
            yield Found(f"{role}: {why}", "Quantise again with scheme ptpc_fp8: eagle3-lab quantize")


@rule(
    "quark-scales",
    "error",
    "FP8 weights and their scales do not belong together",
    reads=f"{FP8}.create_weights",
    fields=("weight_scale", "per_channel", "per_tensor", "input_scale"),
)
def quark_scales(s: Subject) -> Iterator[Found]:
    """Per channel there is one scale for each output, per tensor a single one; a scale that is missing stays at the smallest float32,
    and the layer answers with zeros or infinities.
    """
    for role, model, quantisation in _quark(s):
        scheme = quantisation.get("global_quant_config")
        weight = scheme.get("weight") if isinstance(scheme, dict) else None
        weight = weight[0] if isinstance(weight, list) and weight else weight
        kind = weight.get("qscheme") if isinstance(weight, dict) else None
        for name, header in (model.tensors or {}).items():
            if header.dtype not in F8 or not name.endswith(".weight") or kind not in ("per_tensor", "per_channel"):
                continue
            scale = (model.tensors or {}).get(f"{name}_scale")
            if scale is None:
                yield Found(f"{role}: {name} has no {name.split('.')[-1]}_scale", "Export the checkpoint again: scales are part of it.")
                break
            rows = 1
            for size in scale.shape:
                rows *= size
            if rows != (header.shape[0] if kind == "per_channel" else 1):
                yield Found(
                    f"{role}: {name}_scale has {rows} values for {header.shape[0]} outputs, the scheme says {kind}",
                    "Correct qscheme, or export again.",
                )
                break


@rule(
    "speculators-quantised",
    "error",
    "vLLM would not see that the draft is quantised",
    reads="transformers_utils/configs/speculators/base.py:SpeculatorsConfig.extract_transformers_pre_trained_config",
    fields=("transformer_layer_config",),
    issues=(SEEN,),
)
def speculators_quantised(s: Subject) -> Iterator[Found]:
    """Of a speculators configuration vLLM keeps `transformer_layer_config` and a few fields. A `quantization_config` beside it is
    dropped, and FP8 bytes are read as plain weights.
    """
    draft = s.draft
    if draft is not None and draft.config.get("speculators_model_type") and _quantisation(dict(draft.config)) and not s.draft_quantised:
        yield Found(
            "quantization_config stands at the top of a speculators configuration",
            "Move it into transformer_layer_config (eagle3-lab quantize writes it so).",
        )


@rule(
    "quantised-without-config",
    "error",
    "The draft is in FP8, but says nothing of it",
    reads="model_executor/models/utils.py:get_draft_quant_config",
    fields=("draft_model_config",),
)
def quantised_without_config(s: Subject) -> Iterator[Found]:
    """The draft's own `quantization_config` decides how its weights are read, never the target's. Without one FP8 bytes are copied into
    BF16 without their scales.
    """
    if s.draft is None or s.draft_quantised or s.draft.config.get("speculators_model_type"):
        return
    names = [name for name, header in (s.draft.tensors or {}).items() if header.dtype in F8]
    if names and not s.line.speculative.get("quantization"):
        yield Found(
            f"{len(names)} tensors are FP8, {names[0]} for one, and config.json has no quantization_config",
            "Restore the quantization_config that the exporter wrote.",
        )


@rule("fp8-hardware", "error", "This processor has no FP8", reads=f"{FP8}.get_min_capability", fields=("89",), issues=("sg#35111",))
def fp8_hardware(s: Subject) -> Iterator[Found]:
    """FP8 kernels need gfx942 or newer, or CUDA capability 8.9. gfx942 has a variant of E4M3 of its own (fnuz): vLLM converts Quark's
    weights while loading, other ways of loading end with HIPBLAS_STATUS_NOT_SUPPORTED.
    """
    formats = {
        role: _quantisation(dict(config)).get("quant_method")
        for role, config in (("target", s.target.config if s.target else {}), ("draft", s.draft_view))
    }
    fp8 = [role for role, method in formats.items() if method in ("fp8", "quark", "compressed-tensors", "fbgemm_fp8")]
    if not fp8:
        return
    said = " and ".join(f"the {role} is quantised ({formats[role]})" for role in fp8)
    if s.machine.platform == "cuda" and re.fullmatch(r"\d+\.\d+", s.machine.arch) and tuple(map(int, s.machine.arch.split("."))) < (8, 9):
        yield Found(f"{said}; the GPU has capability {s.machine.arch}", "Use the BF16 checkpoint, or a newer GPU.")
    elif s.rocm and s.machine.arch in ("gfx90a", "gfx908", "gfx906"):
        yield Found(f"{said}; the GPU is {s.machine.arch}", "Use the BF16 checkpoint, or gfx942 and newer.")
    elif s.rocm and s.machine.arch == "gfx942" and any(formats[role] not in ("quark", "fp8") for role in fp8):
        yield Found(f"{said}; gfx942 computes in E4M3 fnuz", "Compare acceptance with the BF16 draft before you trust it.", "warning")


@rule(
    "mxfp4-hardware",
    "warning",
    "MXFP4 is emulated here",
    reads="model_executor/layers/quantization/quark/schemes/quark_ocp_mx.py:QuarkOCP_MX.__init__",
    fields=("emulate",),
)
def mxfp4_hardware(s: Subject) -> Iterator[Found]:
    """Only gfx950 multiplies MXFP4 itself; elsewhere vLLM widens the weights at every step, which is right but slow."""
    for role, _, quantisation in _quark(s):
        scheme = quantisation.get("global_quant_config")
        weight = scheme.get("weight") if isinstance(scheme, dict) else None
        weight = weight[0] if isinstance(weight, list) and weight else weight
        if isinstance(weight, dict) and weight.get("dtype") == "fp4" and s.rocm and s.machine.arch != "gfx950":
            yield Found(f"the {role} is MXFP4, the GPU is {s.machine.arch}", "Use an FP8 or INT4 checkpoint on this GPU.")


@rule(
    "fp8-block-split",
    "error",
    "FP8 blocks cannot be split over so many GPUs",
    reads="model_executor/layers/quantization/utils/fp8_utils.py:validate_fp8_block_shape",
    fields=("block",),
    issues=("v#43605",),
)
def fp8_block_split(s: Subject) -> Iterator[Found]:
    """Weights in blocks of 128 x 128 must be cut at block borders. An expert's width that is not a multiple of 128 after the split is
    refused; expert parallelism keeps experts whole.
    """
    blocks = _quantisation(dict(s.target.config)).get("weight_block_size") if s.target is not None else None
    block = blocks[0] if isinstance(blocks, list) and blocks and isinstance(blocks[0], int) else 0
    wide = s.target_int("moe_intermediate_size") or s.target_int("intermediate_size")
    experts = any(s.target_int(key) for key in ("num_local_experts", "n_routed_experts", "num_experts"))
    if block > 0 and wide and experts and not s.line.has("enable-expert-parallel") and (wide % s.tp or wide // s.tp % block):
        yield Found(
            f"expert width {wide} over {s.tp} GPUs is {wide / s.tp:g}, no multiple of {block}",
            "Add --enable-expert-parallel, or lower --tensor-parallel-size.",
        )


@rule(
    "draft-inherits-fp8-cache",
    "warning",
    "The draft's KV cache is FP8 too",
    reads="config/speculative.py:SpeculativeConfig",
    fields=("kv_cache_dtype",),
)
def draft_inherits_fp8_cache(s: Subject) -> Iterator[Found]:
    """The draft inherits `--kv-cache-dtype`. Its one layer gains little memory and loses accuracy, so that acceptance may fall a little."""
    if s.speculative and s.kv_dtype.startswith("fp8") and not s.line.speculative.get("kv_cache_dtype"):
        yield Found(
            f"--kv-cache-dtype {s.kv_dtype}, and no kv_cache_dtype in --speculative-config",
            'Compare with "kv_cache_dtype": "auto" in --speculative-config (vLLM 0.28 or newer).',
        )
