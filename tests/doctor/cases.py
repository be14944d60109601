"""For each rule: subjects on which it must fire, and near misses on which it must not. Most are mutations of real files (see `made.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from lab.doctor.files import Model, Problem
from lab.doctor.server import Running
from lab.doctor.subject import Subject
from lab.serving.metrics import Snapshot

from .made import (
    CPU,
    DRAFT_FOLDER,
    DROP,
    H100,
    MI300X,
    MI355X,
    SAFE,
    bare,
    fp8_draft,
    kimi,
    minimax,
    quark,
    smol,
    smol_draft,
    smol_target,
)

Make = Callable[[], Subject]
WIDE = ("BF16", (576, 1728))


def broken(kind: str = "config") -> Model:
    return Model("draft", problems=(Problem(kind, "draft/config.json", "It is empty."),))  # type: ignore[arg-type]


def serving(accepted: Sequence[int], drafts: int = 1000, **more: object) -> Subject:
    """A server that accepted so many draft tokens by position."""
    counters = Snapshot(
        time=0.0, drafts=drafts, draft_tokens=drafts * len(accepted), accepted_tokens=sum(accepted), accepted_per_pos=tuple(accepted)
    )
    return Subject(
        CPU, server=Running("http://127.0.0.1:1", "m", "0.32.0", counters, **{"cache": {"enable_prefix_caching": "False"}, **more})
    )  # type: ignore[arg-type]


HEALTHY = (650, 400, 250)
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
AMX = replace(CPU, cpu_flags=CPU.cpu_flags | {"amx_bf16", "amx_tile"})


def offsets(change: Callable[[np.ndarray], np.ndarray]) -> dict[str, np.ndarray]:
    real = smol_draft().maps["d2t"]
    return {"d2t": change(real.copy())}


def absolute(real: np.ndarray) -> np.ndarray:
    return real + np.arange(len(real))


def speculators(**changes: object) -> Model:
    """The shipped draft's settings in the form of the speculators library (minimal)."""
    layer = {key: value for key, value in smol_draft().config.items() if key not in ("architectures", "draft_vocab_size")}
    layer.pop("eagle_aux_hidden_state_layer_ids")
    whole = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 9728,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [2, 15, 27],
        "transformer_layer_config": layer,
    }
    real = smol_draft()
    return replace(real, config={key: value for key, value in {**whole, **changes}.items() if value is not DROP})


CASES: dict[str, tuple[list[Make], list[Make]]] = {
    # files
    "config-unreadable": ([lambda: smol(draft=broken())], [lambda: smol(), lambda: smol(draft=broken("weights"))]),
    "weights-unreadable": ([lambda: smol(draft=broken("weights"))], [lambda: smol()]),
    "command-unreadable": (
        [
            lambda: smol(line="vllm serve smollm2 --speculative-config {method: eagle3}"),
            lambda: smol(line="vllm serve smollm2 --speculative-config '[1]'"),
            lambda: smol(line="vllm serve 'smollm2"),
        ],
        [lambda: smol(), lambda: smol(line="vllm serve smollm2 --speculative-config.method eagle3 --speculative-config.model d")],
    ),
    "field-types": (
        [
            lambda: smol(draft=smol_draft(hidden_size="576")),
            lambda: smol(draft=smol_draft(hidden_size=DROP)),
            lambda: smol(draft=smol_draft(draft_vocab_size=-1)),
            lambda: smol(draft=smol_draft(num_aux_hidden_states=True)),
            lambda: smol(draft=smol_draft(eagle_config=[1])),
            lambda: smol(draft=smol_draft(eagle_aux_hidden_state_layer_ids="2,15,27")),
            lambda: smol(target=smol_target(num_hidden_layers="30")),
        ],
        [lambda: smol(), lambda: smol(draft=smol_draft(draft_vocab_size=None, eagle_config=None))],
    ),
    "draft-architecture": (
        [
            lambda: smol(draft=smol_draft(architectures=["MistralForCausalLM"])),
            lambda: smol(draft=smol_draft(architectures="LlamaForCausalLMEagle3")),
            lambda: smol(draft=smol_draft(architectures=DROP)),
            lambda: smol(draft=speculators(speculators_model_type="medusa")),
        ],
        [lambda: smol(), lambda: smol(draft=smol_draft(architectures=["LlamaForCausalLM"])), lambda: smol(draft=speculators())],
    ),
    "draft-pickled": ([lambda: smol(draft=replace(smol_draft(), pickled=True))], [lambda: smol()]),
    "target-no-chat-template": (
        [
            lambda: smol(
                target=replace(smol_target(), folder=DRAFT_FOLDER.parent.parent / "nowhere", files=frozenset({"tokenizer_config.json"}))
            )
        ][:0],
        [
            lambda: smol(),
            lambda: smol(
                target=replace(smol_target(), folder=DRAFT_FOLDER, files=frozenset({"chat_template.jinja", "tokenizer_config.json"}))
            ),
        ],
    ),
    "remote-code": (
        [lambda: smol(target=smol_target(auto_map={"AutoConfig": "x.Y"}))],
        [lambda: smol(), lambda: smol("--trust-remote-code", target=smol_target(auto_map={"AutoConfig": "x.Y"}))],
    ),
    "target-has-no-eagle3": ([lambda: smol(target=smol_target(architectures=["GPT2LMHeadModel"]))], [lambda: smol(), lambda: kimi()]),
    # auxiliary layers
    "aux-layers-missing": (
        [
            lambda: smol(draft=smol_draft(eagle_aux_hidden_state_layer_ids=DROP)),
            lambda: smol(draft=smol_draft(eagle_aux_hidden_state_layer_ids=[])),
        ],
        [lambda: smol(), lambda: kimi(), lambda: smol(draft=speculators())],
    ),
    "aux-layers-two-places": (
        [lambda: smol(draft=smol_draft(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 14, 26]}))],
        [lambda: smol(), lambda: smol(draft=smol_draft(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 15, 27]}))],
    ),
    "aux-count": (
        [
            lambda: smol(draft=smol_draft(num_aux_hidden_states=DROP, eagle_aux_hidden_state_layer_ids=[2, 8, 15, 27])),
            lambda: smol(draft=smol_draft(num_aux_hidden_states=4)),
            lambda: smol(draft=smol_draft({"fc.weight": ("BF16", (576, 1152))})),
        ],
        [
            lambda: smol(),
            lambda: smol(draft=smol_draft(num_aux_hidden_states=DROP)),
            lambda: kimi(),
            lambda: smol(
                draft=smol_draft(
                    {"fc.weight": ("BF16", (576, 4 * 576))}, num_aux_hidden_states=4, eagle_aux_hidden_state_layer_ids=[2, 8, 15, 27]
                )
            ),
        ],
    ),
    "aux-range": (
        [
            lambda: smol(draft=smol_draft(eagle_aux_hidden_state_layer_ids=[2, 15, 31])),
            lambda: smol(draft=smol_draft(eagle_aux_hidden_state_layer_ids=[2, 15, -1])),
            lambda: smol(draft=smol_draft(eagle_aux_hidden_state_layer_ids=[2, "15", 27])),
        ],
        [lambda: smol(), lambda: smol(draft=smol_draft(eagle_aux_hidden_state_layer_ids=[0, 15, 30])), lambda: kimi()],
    ),
    "aux-order": (
        [
            lambda: smol(draft=smol_draft(eagle_aux_hidden_state_layer_ids=[27, 15, 2])),
            lambda: smol(draft=smol_draft(eagle_aux_hidden_state_layer_ids=[2, 2, 27])),
        ],
        [lambda: smol(), lambda: kimi()],
    ),
    "aux-off-by-one": (
        [lambda: smol(draft=smol_draft(eagle_aux_hidden_state_layer_ids=[1, 14, 26]))],
        [lambda: smol(), lambda: smol(draft=smol_draft(eagle_aux_hidden_state_layer_ids=[1, 15, 26]))],
    ),
    "aux-unused": (
        [lambda: smol(draft=smol_draft(eagle_config={"use_aux_hidden_state": False}))],
        [lambda: smol(), lambda: kimi(), lambda: smol(draft=smol_draft({"fc.weight": DROP}, eagle_config={"use_aux_hidden_state": False}))],
    ),
    "target-width": (
        [lambda: smol(target=smol_target(hidden_size=960)), lambda: smol(draft=smol_draft(target_hidden_size=960))],
        [lambda: smol(), lambda: kimi()],
    ),
    "pipeline-parallel": ([lambda: kimi("--pipeline-parallel-size 2")], [lambda: kimi(), lambda: minimax("--pipeline-parallel-size 2")]),
    # vocabulary
    "draft-vocabulary-map": (
        [lambda: smol(draft=smol_draft({"d2t": DROP}))],
        [
            lambda: smol(),
            lambda: smol(draft=smol_draft({"d2t": DROP, "lm_head.weight": ("BF16", (49152, 576))}, draft_vocab_size=DROP)),
            lambda: kimi(),
        ],
    ),
    "d2t-shape": ([lambda: smol(draft=smol_draft({"d2t": ("I64", (8192,))}))], [lambda: smol()]),
    "d2t-type": (
        [lambda: smol(draft=smol_draft({"d2t": ("BF16", (9728,))})), lambda: smol(draft=smol_draft({"d2t": ("F32", (9728,))}))],
        [lambda: smol(), lambda: smol(draft=smol_draft({"d2t": ("I32", (9728,))}))],
    ),
    "d2t-range": (
        [
            lambda: smol(draft=smol_draft(maps=offsets(lambda real: real + 49152))),
            lambda: smol(draft=smol_draft(maps=offsets(lambda real: -np.arange(len(real))))),
            lambda: smol(draft=smol_draft(maps=offsets(absolute))),
        ],
        [lambda: smol(), lambda: smol(draft=smol_draft(maps={"d2t": DROP, "t2d": DROP}))],
    ),
    "t2d-disagrees": (
        [
            lambda: smol(draft=smol_draft(maps=offsets(absolute))),
            lambda: smol(draft=smol_draft(maps={"t2d": ~smol_draft().maps["t2d"].astype(bool)})),
        ],
        [lambda: smol(), lambda: smol(draft=smol_draft(maps={"t2d": DROP}))],
    ),
    "draft-vocabulary-size": (
        [
            lambda: smol(target=smol_target(vocab_size=32000)),
            lambda: smol(target=smol_target(vocab_size=49000)),
            lambda: smol(draft=smol_draft(draft_vocab_size=60000)),
        ],
        [lambda: smol(), lambda: kimi()],
    ),
    "draft-head": (
        [
            lambda: smol(draft=smol_draft({"lm_head.weight": DROP})),
            lambda: smol(draft=smol_draft({"lm_head.weight": DROP, "d2t": DROP}, draft_vocab_size=49152)),
        ],
        [lambda: smol(), lambda: kimi()],
    ),
    "head-shape": ([lambda: smol(draft=smol_draft(draft_vocab_size=8192))], [lambda: smol()]),
    "draft-embedding": (
        [
            lambda: smol(target=smol_target(hidden_size=960), draft=smol_draft(target_hidden_size=960)),
            lambda: smol(draft=smol_draft({"embed_tokens.weight": ("BF16", (32000, 576))})),
        ],
        [lambda: smol(), lambda: smol(draft=smol_draft({"embed_tokens.weight": ("BF16", (49152, 576))}))],
    ),
    # shapes
    "draft-fc": (
        [lambda: smol(draft=smol_draft({"fc.weight": DROP})), lambda: smol(draft=smol_draft({"fc.weight": ("BF16", (512, 1728))}))],
        [lambda: smol(), lambda: kimi()],
    ),
    "draft-layers": (
        [
            lambda: smol(draft=smol_draft(num_hidden_layers=2)),
            lambda: smol(draft=smol_draft({"layers.1.mlp.up_proj.weight": ("BF16", (1536, 576))})),
        ],
        [lambda: smol()],
    ),
    "draft-layer-shapes": (
        [
            lambda: smol(draft=smol_draft(head_dim=128)),
            lambda: smol(draft=smol_draft(intermediate_size=2048)),
            lambda: smol(draft=smol_draft({"midlayer.self_attn.q_proj.weight": ("BF16", (576, 576))})),
        ],
        [lambda: smol(), lambda: smol(draft=smol_draft(head_dim=DROP)), lambda: smol(draft=fp8_draft())],
    ),
    "draft-prefix": ([lambda: smol(draft=smol_draft({"model.fc.weight": WIDE, "fc.weight": DROP}))], [lambda: smol()]),
    "norm-before-fc": (
        [lambda: smol(draft=smol_draft(norm_before_fc=True)), lambda: smol(draft=smol_draft({"input_norm.weight": ("BF16", (1728,))}))],
        [lambda: smol(), lambda: smol(draft=smol_draft({"input_norm.weight": ("BF16", (1728,))}, eagle_config={"norm_before_fc": True}))],
    ),
    "fc-norm": (
        [lambda: smol(draft=smol_draft(fc_norm=True)), lambda: smol(draft=smol_draft({"fc_norm.0.weight": ("BF16", (576,))}))],
        [lambda: smol(), lambda: smol(draft=smol_draft({"fc_norm.0.weight": ("BF16", (576,))}, fc_norm=True))],
    ),
    "norm-before-residual": (
        [lambda: smol(draft=speculators(norm_before_residual=DROP))],
        [lambda: smol(), lambda: smol(draft=speculators())],
    ),
    "draft-bias": (
        [
            lambda: smol(draft=smol_draft(attention_bias=True)),
            lambda: smol(draft=smol_draft({"midlayer.self_attn.q_proj.bias": ("BF16", (576,))})),
        ],
        [lambda: smol(), lambda: smol(draft=smol_draft({"midlayer.self_attn.q_proj.bias": ("BF16", (576,))}, attention_bias=True))],
    ),
    # positions
    "draft-context": (
        [
            lambda: smol(draft=smol_draft(max_position_embeddings=2048)),
            lambda: smol(draft=smol_draft(max_position_embeddings=2048), machine=replace(CPU, vllm="0.24.0")),
            lambda: smol("--max-model-len -1", draft=smol_draft(max_position_embeddings=2048)),
        ],
        [
            lambda: smol(),
            lambda: smol(draft=smol_draft(max_position_embeddings=4096)),
            lambda: smol(max_model_len=2048, draft=smol_draft(max_position_embeddings=2048)),
        ],
    ),
    "draft-rope": (
        [
            lambda: smol(draft=smol_draft(rope_theta=10000.0, rope_parameters=DROP)),
            lambda: smol(draft=smol_draft(rope_theta=DROP, rope_parameters=DROP)),
            lambda: smol(draft=smol_draft(rope_parameters={"rope_theta": 100000.0, "rope_type": "yarn"})),
        ],
        [
            lambda: smol(),
            lambda: smol(draft=smol_draft(rope_parameters=DROP)),
            lambda: smol(
                target=smol_target(rope_theta=10000.0, rope_parameters=DROP), draft=smol_draft(rope_theta=DROP, rope_parameters=DROP)
            ),
        ],
    ),
    "target-context": (
        [lambda: bare("vllm serve m --max-model-len 32768")],
        [
            lambda: smol(),
            lambda: bare("VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve m --max-model-len 32768"),
            lambda: bare("vllm serve m --max-model-len 8k"),
        ],
    ),
    "latent-head-tied": (
        [lambda: smol(target=smol_target(**LATENT))],
        [lambda: smol(), lambda: smol(target=replace(smol_target(**LATENT), names=frozenset({"lm_head.weight"})))],
    ),
    # quantisation
    "quark-exclude": (
        [
            lambda: smol(draft=fp8_draft(quark(exclude=["fc", "lm_head"]))),
            lambda: smol(draft=fp8_draft(quark(exclude=["re:.*fc$", "re:.*proj$"]))),
        ],
        [
            lambda: smol(draft=fp8_draft()),
            lambda: smol(draft=fp8_draft(quark(exclude=["model.fc", "lm_head"]))),
            lambda: smol(draft=fp8_draft(quark(exclude=[r"re:(?:.*\.)?fc$", r"re:(?:.*\.)?lm_head$"]))),
        ],
    ),
    "quark-pattern": (
        [
            lambda: smol(draft=fp8_draft(quark(exclude=["fc", "lm_head"]))),
            lambda: smol(draft=fp8_draft(quark(exclude=["*fc*"]))),
            lambda: smol(draft=fp8_draft(quark(exclude=["re:*fc"]))),
        ],
        [lambda: smol(draft=fp8_draft()), lambda: smol(draft=fp8_draft(quark(exclude=["model.fc", "lm_head"])))],
    ),
    "quark-incomplete": (
        [
            lambda: smol(draft=fp8_draft(quark(export=DROP))),
            lambda: smol(draft=fp8_draft(quark(export={"kv_cache_group": None}))),
            lambda: smol(draft=fp8_draft(quark(layer_type_quant_config=DROP))),
            lambda: smol(draft=fp8_draft(quark(exclude="fc"))),
        ],
        [lambda: smol(draft=fp8_draft())],
    ),
    "quark-scheme": (
        [
            lambda: smol(draft=fp8_draft(quark(weight={"dtype": "fp8_e5m2"}))),
            lambda: smol(draft=fp8_draft(quark(weight={"qscheme": "per_group"}))),
            lambda: smol(draft=fp8_draft(quark(weight={"is_dynamic": True}))),
            lambda: smol(draft=fp8_draft(quark(weight={"ch_axis": 1}))),
            lambda: smol(draft=fp8_draft(quark(activation={"is_dynamic": False}))),
        ],
        [lambda: smol(draft=fp8_draft()), lambda: smol(draft=fp8_draft(quark(activation={"is_dynamic": False, "qscheme": "per_tensor"})))],
    ),
    "quark-scales": (
        [
            lambda: smol(draft=fp8_draft(tensors={"midlayer.mlp.up_proj.weight_scale": DROP})),
            lambda: smol(draft=fp8_draft(tensors={"midlayer.mlp.up_proj.weight_scale": ("F32", (1,))})),
        ],
        [lambda: smol(draft=fp8_draft()), lambda: smol(draft=fp8_draft(tensors={"midlayer.mlp.up_proj.weight_scale": ("F32", (1536, 1))}))],
    ),
    "speculators-quantised": (
        [lambda: smol(draft=speculators(quantization_config=quark()))],
        [lambda: smol(draft=speculators()), lambda: smol(draft=fp8_draft())],
    ),
    "quantised-without-config": (
        [lambda: smol(draft=smol_draft({"fc.weight": ("F8_E4M3", (576, 1728))}))],
        [lambda: smol(), lambda: smol(draft=fp8_draft())],
    ),
    "fp8-hardware": (
        [
            lambda: smol(draft=fp8_draft(), machine=replace(H100, arch="8.0")),
            lambda: minimax(machine=replace(MI300X, arch="gfx90a")),
            lambda: smol(draft=fp8_draft(quark(quant_method="compressed-tensors")), machine=MI300X),
        ],
        [lambda: smol(draft=fp8_draft(), machine=H100), lambda: minimax(), lambda: smol(machine=replace(H100, arch="8.0"))],
    ),
    "mxfp4-hardware": (
        [lambda: kimi(machine=MI300X, draft=fp8_draft(quark(weight={"dtype": "fp4", "qscheme": "per_group"})))],
        [lambda: kimi(draft=fp8_draft(quark(weight={"dtype": "fp4", "qscheme": "per_group"}))), lambda: kimi(machine=MI300X)],
    ),
    "fp8-block-split": (
        [lambda: minimax(tp=8)],
        [lambda: minimax(tp=4), lambda: minimax("--enable-expert-parallel", tp=8), lambda: kimi(tp=8)],
    ),
    "draft-inherits-fp8-cache": (
        [lambda: kimi("--kv-cache-dtype fp8")],
        [lambda: kimi(), lambda: kimi("--kv-cache-dtype fp8", kv_cache_dtype="auto"), lambda: minimax("--kv-cache-dtype fp8")],
    ),
    # attention
    "block-size": (
        [
            lambda: kimi("--block-size 1"),
            lambda: kimi(machine=replace(MI355X, vllm="0.19.0"), env="VLLM_ROCM_USE_AITER=1"),
            lambda: smol(target=replace(smol_target(**LATENT), names=frozenset({"lm_head.weight"})), machine=replace(CPU, plugin=False)),
            lambda: smol("--block-size 24"),
            lambda: smol("--attention-backend CPU_MLA", target=smol_target(**LATENT), machine=AMX),
            lambda: smol("--block-size 48", target=smol_target(**LATENT), machine=AMX),
        ],
        [
            lambda: smol(target=smol_target(**LATENT), machine=AMX),
            lambda: kimi(),
            lambda: kimi("--block-size 32"),
            lambda: smol(),
            lambda: minimax("--block-size 32 --attention-backend ROCM_AITER_FA"),
        ],
    ),
    "mla-heads": (
        [
            lambda: kimi(tp=8, machine=replace(MI300X, vllm="0.27.1")),
            lambda: kimi(tp=8, machine=replace(MI355X, vllm="0.16.0")),
            lambda: kimi(tp=8, machine=replace(MI300X, vllm="")),
        ],
        [
            lambda: kimi(tp=4, machine=replace(MI300X, vllm="0.27.1")),
            lambda: kimi(tp=8),
            lambda: kimi("--attention-backend TRITON_MLA", tp=8, machine=replace(MI300X, vllm="0.27.1")),
            lambda: kimi(tp=8, env="A=1", machine=replace(MI300X, vllm="0.27.1")),
        ],
    ),
    "verify-length": (
        [
            lambda: kimi(num_speculative_tokens=5, machine=replace(MI355X, vllm="0.19.0")),
            lambda: kimi("--kv-cache-dtype fp8", num_speculative_tokens=4),
            lambda: kimi(num_speculative_tokens=4, machine=MI300X),
        ],
        [
            lambda: kimi(num_speculative_tokens=3, machine=replace(MI355X, vllm="0.19.0")),
            lambda: kimi(num_speculative_tokens=5),
            lambda: smol(num_speculative_tokens=5),
        ],
    ),
    "backend-platform": (
        [
            lambda: kimi(attention_backend="FLASH_ATTN"),
            lambda: kimi("--attention-backend FLASHINFER_MLA"),
            lambda: smol("--attention-backend ROCM_AITER_FA", machine=H100),
        ],
        [lambda: kimi(), lambda: smol(attention_backend="FLASH_ATTN", machine=H100), lambda: smol()],
    ),
    "draft-backend-open": ([lambda: kimi(attention_backend=DROP)], [lambda: kimi(), lambda: smol(), lambda: minimax()]),
    "aiter-fa-eagle3": (
        [lambda: kimi(attention_backend="ROCM_AITER_FA")],
        [lambda: kimi(), lambda: minimax("--attention-backend ROCM_AITER_FA")],
    ),
    "latent-cache-of-one": ([lambda: kimi("--block-size 1")], [lambda: kimi(), lambda: minimax("--block-size 1")]),
    # graphics processors and environment
    "aiter-off": (
        [lambda: kimi(env="A=1"), lambda: kimi(env="VLLM_ROCM_USE_AITER=0")],
        [lambda: kimi(), lambda: kimi(env="VLLM_ROCM_USE_AITER=True"), lambda: smol(machine=H100)],
    ),
    "aiter-missing": (
        [lambda: kimi(machine=replace(MI355X, aiter=""))],
        [lambda: kimi(), lambda: kimi(machine=replace(MI355X, aiter="", assumed="x"))],
    ),
    "fp4-bmm": (
        [lambda: kimi(machine=replace(MI300X, vllm="0.16.0"))],
        [
            lambda: kimi(),
            lambda: kimi(machine=MI300X),
            lambda: kimi(machine=replace(MI300X, vllm="0.16.0"), env="VLLM_ROCM_USE_AITER=1 VLLM_ROCM_USE_AITER_FP4BMM=0"),
        ],
    ),
    "firmware": (
        [lambda: kimi(machine=replace(MI355X, mec=164))],
        [
            lambda: kimi(machine=replace(MI355X, mec=177)),
            lambda: kimi(machine=replace(MI355X, mec=164), env="HSA_NO_SCRATCH_RECLAIM=1 VLLM_ROCM_USE_AITER=1"),
        ],
    ),
    "visible-devices": (
        [lambda: kimi(env="ROCR_VISIBLE_DEVICES=0,1,2,3"), lambda: kimi(env="HIP_VISIBLE_DEVICES=0,1,2,3 CUDA_VISIBLE_DEVICES=4,5,6,7")],
        [lambda: kimi(), lambda: kimi(env="ROCR_VISIBLE_DEVICES=0,1,2,3 HIP_VISIBLE_DEVICES=0,1,2,3")],
    ),
    "gpu-count": (
        [
            lambda: kimi(tp=8, machine=replace(MI355X, gpus=4)),
            lambda: kimi(env="HIP_VISIBLE_DEVICES=0,1"),
            lambda: kimi(machine=CPU, attention_backend=DROP),
        ],
        [lambda: kimi(), lambda: kimi(machine=replace(MI355X, gpus=0)), lambda: smol()],
    ),
    "gpu-memory": (
        [
            lambda: smol(target=replace(smol_target(), weight_bytes=150 * 10**9), machine=H100),
            lambda: smol(target=replace(smol_target(), weight_bytes=70 * 10**9), machine=H100),
        ],
        [
            lambda: smol(machine=H100),
            lambda: smol("--tensor-parallel-size 4", target=replace(smol_target(), weight_bytes=150 * 10**9), machine=H100),
        ],
    ),
    "rmsnorm-accuracy": (
        [lambda: kimi(env="VLLM_ROCM_USE_AITER=1")],
        [lambda: kimi(), lambda: kimi(env="VLLM_ROCM_USE_AITER=1", tp=8), lambda: minimax()],
    ),
    "piecewise-graphs": (
        [lambda: kimi("--enforce-eager"), lambda: kimi("""--compilation-config '{"cudagraph_mode": "PIECEWISE"}'""")],
        [lambda: kimi(), lambda: smol("--enforce-eager"), lambda: minimax("--enforce-eager")],
    ),
    "mixed-wheels": (
        [lambda: smol(machine=replace(CPU, packages={"torch": "2.13.0+cpu", "torchvision": "0.28.0"}))],
        [lambda: smol(machine=replace(CPU, packages={"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"})), lambda: smol()],
    ),
    "gradio-plotly": (
        [lambda: smol(machine=replace(CPU, packages={"gradio": "6.31.0", "plotly": "7.1.0"}))],
        [lambda: smol(machine=replace(CPU, packages={"gradio": "6.31.0", "plotly": "6.5.2"})), lambda: smol()],
    ),
    "no-vllm": ([lambda: smol(machine=replace(CPU, vllm="", engine=""))], [lambda: smol()]),
    # command line
    "speculative-keys": ([lambda: smol(numSpeculativeTokens=3), lambda: smol(ngram=1)], [lambda: smol(), lambda: kimi()]),
    "draft-tp": (
        [lambda: kimi(draft_tensor_parallel_size=2), lambda: kimi(draft_tensor_parallel_size="1"), lambda: kimi(tensor_parallel_size=1)],
        [lambda: kimi(), lambda: kimi(draft_tensor_parallel_size=4), lambda: smol()],
    ),
    "k-range": (
        [lambda: smol(num_speculative_tokens=DROP), lambda: smol(num_speculative_tokens=0), lambda: smol(num_speculative_tokens="3")],
        [lambda: smol(), lambda: smol(num_speculative_tokens=1)],
    ),
    "k-many": ([lambda: smol(num_speculative_tokens=12)], [lambda: smol(), lambda: smol(num_speculative_tokens=8)]),
    "method": (
        [lambda: smol(method=DROP), lambda: smol(method=DROP, model="x/eagle3-y"), lambda: smol(method="eagle")],
        [lambda: smol(), lambda: kimi()],
    ),
    "no-draft-named": ([lambda: smol(model=DROP)], [lambda: smol(), lambda: smol(method="ngram", model=DROP)]),
    "heads-split": (
        [lambda: smol("--tensor-parallel-size 2", machine=H100), lambda: kimi(tp=3, draft_tensor_parallel_size=1)],
        [lambda: kimi(), lambda: smol("--tensor-parallel-size 3", machine=H100)],
    ),
    "prefix-caching": ([lambda: bare("vllm serve m")], [lambda: smol(), lambda: kimi()]),
    "logits-processors": ([lambda: smol("--logits-processors a.B")], [lambda: smol(), lambda: bare(f"{SAFE} --logits-processors a.B")]),
    "min-p": (
        [
            lambda: smol(target=replace(smol_target(), generation={"min_p": 0.1})),
            lambda: smol("""--override-generation-config '{"min_p": 0.05}'"""),
        ],
        [lambda: smol(), lambda: smol("--generation-config vllm", target=replace(smol_target(), generation={"min_p": 0.1}))],
    ),
    "traced-async": (
        [lambda: kimi("--scheduler-cls lab.vllm_plugin.tracing.TracingScheduler")],
        [
            lambda: kimi("--scheduler-cls lab.vllm_plugin.tracing.TracingScheduler --no-async-scheduling"),
            lambda: smol("--scheduler-cls x.TracingScheduler"),
        ],
    ),
    "batched-tokens": (
        [
            lambda: smol("--max-num-seqs 32 --max-num-batched-tokens 64"),
            lambda: smol("--max-num-seqs 32 --max-num-batched-tokens 16"),
            lambda: smol("--max-num-seqs 32 --max-num-batched-tokens 2048 --no-enable-chunked-prefill"),
        ],
        [lambda: smol(), lambda: smol("--max-num-seqs 32 --max-num-batched-tokens 128")],
    ),
    "synthetic-acceptance": (
        [lambda: smol(rejection_sample_method="synthetic"), lambda: kimi(rejection_sample_method="synthetic")],
        [lambda: smol()],
    ),
    "padded-drafter": (
        [lambda: smol(disable_padded_drafter_batch=True)],
        [lambda: smol(), lambda: smol(disable_padded_drafter_batch=False)],
    ),
    "vllm-command": (
        [lambda: bare("vllm serve m --no-enable-prefix-caching")],
        [
            lambda: smol(),
            lambda: bare("python -m vllm.entrypoints.openai.api_server --model m"),
            lambda: bare("vllm serve m", machine=H100),
        ],
    ),
    "expert-parallel-dense": ([lambda: smol("--enable-expert-parallel")], [lambda: minimax("--enable-expert-parallel"), lambda: smol()]),
    # CPU
    "cpu-temperature": (
        [lambda: smol(machine=replace(CPU, plugin=False))],
        [
            lambda: smol(),
            lambda: smol(machine=replace(H100, plugin=False)),
            lambda: bare("vllm serve m", machine=replace(CPU, plugin=False)),
        ],
    ),
    "cpu-seed": (
        [lambda: bare("VLLM_PLUGINS= vllm serve m")],
        [lambda: smol(), lambda: bare("VLLM_PLUGINS= vllm serve m --no-enable-chunked-prefill")],
    ),
    "cpu-compiled-cache": (
        [lambda: bare("VLLM_PLUGINS= vllm serve m")],
        [lambda: smol(), lambda: bare("VLLM_PLUGINS= vllm serve m --enforce-eager")],
    ),
    "cpu-fp8-slow": (
        [lambda: smol(draft=fp8_draft(), machine=replace(CPU, plugin=False))],
        [lambda: smol(draft=fp8_draft()), lambda: smol(machine=replace(CPU, plugin=False))],
    ),
    "cpu-fp8-op": (
        [lambda: smol("--dtype half", draft=fp8_draft())],
        [lambda: smol("--dtype bfloat16", draft=fp8_draft()), lambda: smol("--dtype half")],
    ),
    "cpu-latent-rotary": (
        [lambda: smol("--enforce-eager", target=smol_target(**LATENT))],
        [
            lambda: smol(
                """--enforce-eager --compilation-config '{"custom_ops": ["all", "-rotary_embedding"]}'""", target=smol_target(**LATENT)
            ),
            lambda: smol("--enforce-eager"),
            lambda: kimi("--enforce-eager"),
        ],
    ),
    "cpu-threads": (
        [
            lambda: smol(line="OMP_NUM_THREADS=16 VLLM_CPU_OMP_THREADS_BIND=nobind vllm serve m"),
            lambda: smol(line="vllm serve m", machine=replace(CPU, cores=2)),
            lambda: smol(line="OMP_NUM_THREADS=2 VLLM_CPU_OMP_THREADS_BIND=nobind vllm serve m", machine=replace(CPU, quota=1.5)),
        ],
        [lambda: smol(), lambda: smol(line="vllm serve m"), lambda: smol(line="OMP_NUM_THREADS=16 vllm serve m", machine=H100)],
    ),
    "cpu-two-openmp": (
        [lambda: smol(line="LD_PRELOAD=/a/libiomp5.so:/b/libgomp.so.1 vllm serve m")],
        [lambda: smol(), lambda: smol(line="LD_PRELOAD=/a/libiomp5.so:/b/libtcmalloc.so vllm serve m")],
    ),
    "cpu-instructions": (
        [
            lambda: smol(machine=replace(CPU, cpu_flags=frozenset({"avx2"}))),
            lambda: smol(machine=replace(CPU, cpu_flags=frozenset({"avx2", "avx512f"}))),
            lambda: smol(machine=replace(CPU, cpu_flags=frozenset({"sse2"}))),
        ],
        [
            lambda: smol(),
            lambda: smol("--dtype float32", machine=replace(CPU, cpu_flags=frozenset({"avx2"}))),
            lambda: smol(machine=replace(CPU, cpu_flags=frozenset({"asimd"}))),
            lambda: smol(machine=replace(CPU, cpu_flags=frozenset())),
        ],
    ),
    "cpu-memory": (
        [lambda: smol(line="VLLM_CPU_KVCACHE_SPACE=64 vllm serve m"), lambda: smol("--kv-cache-memory-bytes 40G")],
        [lambda: smol(), lambda: smol("--kv-cache-memory-bytes 268435456"), lambda: smol(line="VLLM_CPU_KVCACHE_SPACE=4 vllm serve m")],
    ),
    "cpu-block-size": (
        [lambda: smol("--block-size 64", target=smol_target(**LATENT))],
        [
            lambda: smol("--block-size 64"),
            lambda: kimi("--block-size 64"),
            lambda: smol(line=f"EAGLE3_LAB_CPU_MLA=1 {SAFE} --block-size 64", target=smol_target(**LATENT)),
            lambda: smol("--block-size 64", target=smol_target(**LATENT), machine=AMX),
        ],
    ),
    # a running server
    "acceptance-near-zero": ([lambda: serving((8, 2, 0))], [lambda: serving(HEALTHY), lambda: serving((0, 0, 0), drafts=50)]),
    "first-position": (
        [lambda: serving((90, 50, 20)), lambda: serving((200, 120, 80))],
        [lambda: serving(HEALTHY), lambda: serving((8, 2, 0))],
    ),
    "later-positions": ([lambda: serving((650, 12, 0))], [lambda: serving(HEALTHY), lambda: serving((650,))]),
    "too-good": ([lambda: serving((998, 996, 995))], [lambda: serving(HEALTHY), lambda: serving((995,))]),
    "server-prefix-caching": (
        [lambda: serving(HEALTHY, cache={"enable_prefix_caching": "True"}), lambda: serving(HEALTHY, prefix_hits=64, prefix_queries=100)],
        [lambda: serving(HEALTHY)],
    ),
    "server-aiter-off": (
        [lambda: serving(HEALTHY, system={"hip_compiled_version": "7.2"}, environment={"VLLM_ROCM_USE_AITER": "False"})],
        [
            lambda: serving(HEALTHY),
            lambda: serving(HEALTHY, system={"hip_compiled_version": "7.2"}, environment={"VLLM_ROCM_USE_AITER": "True"}),
        ],
    ),
    "server-draft-backend": (
        [
            lambda: serving(
                HEALTHY, system={"hip_compiled_version": "7.2"}, config={"speculative_config": {"attention_backend": "FLASH_ATTN"}}
            )
        ],
        [
            lambda: serving(HEALTHY, config={"speculative_config": {"attention_backend": "FLASH_ATTN"}}),
            lambda: serving(
                HEALTHY, system={"hip_compiled_version": "7.2"}, config={"speculative_config": {"attention_backend": "TRITON_ATTN"}}
            ),
        ],
    ),
    "server-no-speculation": ([lambda: serving((), drafts=0)], [lambda: serving(HEALTHY), lambda: smol()]),
    "server-crowded": ([lambda: serving(HEALTHY, preemptions=3), lambda: serving(HEALTHY, kv_usage=0.99)], [lambda: serving(HEALTHY)]),
}
