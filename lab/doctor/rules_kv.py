"""Rules about attention: block sizes, kernels that lack a shape, and backends of another platform."""

from __future__ import annotations

from collections.abc import Iterator

from lab.doctor.blocks import select
from lab.doctor.rule import SEEN, Found, Level, rule
from lab.doctor.subject import Subject
from lab.errors import LabError

AITER_MLA = "v1/attention/backends/mla/rocm_aiter_mla.py"
CHOOSE = "platforms/rocm.py:_get_backend_priorities"
SPECULATIVE = "config/speculative.py:SpeculativeConfig"
#: Attention backends by platform, of names that people put on command lines.
ROCM_ONLY = ("ROCM_ATTN", "ROCM_AITER_FA", "ROCM_AITER_UNIFIED_ATTN", "ROCM_AITER_MLA", "ROCM_AITER_TRITON_MLA", "ROCM_AITER_MLA_SPARSE")
CUDA_ONLY = ("FLASHINFER", "FLASHINFER_MLA", "FLASHMLA", "CUTLASS_MLA", "FLASH_ATTN_MLA", "XFORMERS")
CPU_ONLY = ("CPU_ATTN", "CPU_MLA", "AMX_MLA", "TORCH_SDPA")


@rule(
    "block-size",
    "error",
    "Target and draft have no block size in common",
    reads="v1/worker/utils.py:select_common_block_size",
    fields=("No common block size",),
    issues=("v#39616", SEEN),
)
def block_size(s: Subject) -> Iterator[Found]:
    """Layers of one KV-cache group share a block size, and each kernel runs on certain sizes only; without a common one the engine does
    not start. AITER's MLA took single-token blocks only until pull request 39616.
    """
    target, draft = s.target_backend, s.draft_backend
    backends = [one for one in (target, draft) if one is not None]
    if not backends or (s.speculative and draft is None and not s.draft_mla and not s.target_text):
        return
    try:
        select(s.block_size, backends)
    except LabError as error:
        yield Found(error.what.rstrip("."), error.todo)


@rule(
    "mla-heads",
    "error",
    "The MLA kernel lacks this number of heads",
    reads=f"{AITER_MLA}:_gluon_mla_decode_supported",
    fields=("gfx942", "mla_gluon requires gfx950"),
    issues=("v#35641", "v#51964", "v#50578"),
)
def mla_heads(s: Subject) -> Iterator[Found]:
    """AITER's MLA decodes 16 heads or more for each GPU. With fewer, older vLLM stops ("only supports 16 or 128 number of heads"), 0.27
    asks gfx942 for a kernel that exists on gfx950 only, and from 0.28 heads are padded.
    """
    heads = s.target_int("num_attention_heads")
    if not (s.rocm and s.mla and heads and s.target_backend is not None and s.target_backend.name.startswith("ROCM_AITER_MLA")):
        return
    each = heads // s.tp
    if each >= 16 or s.machine.older_than(0, 28) is False:
        return
    unknown = s.machine.version is None or (s.machine.arch == "gfx950" and s.machine.older_than(0, 24) is False)
    yield Found(
        f"{heads} heads over {s.tp} GPUs are {each} for each; {s.machine.arch or 'ROCm'}, vLLM {s.machine.vllm or 'of unknown version'}",
        f"vLLM 0.28 or newer, or --tensor-parallel-size {max(1, heads // 16)}, or --attention-backend TRITON_MLA",
        "warning" if unknown else None,
    )


@rule(
    "verify-length",
    "warning",
    "The MLA kernel was wrong for this number of draft tokens",
    reads=f"{AITER_MLA}:AiterMLAMetadataBuilder._build_decode",
    fields=("max_qo_len",),
    issues=("a#2720", "a#2760", "v#45227", "v#57642"),
)
def verify_length(s: Subject) -> Iterator[Found]:
    """A verification asks K + 1 queries at once. AITER's assembler kernel gave all of them the first one's answer where K + 1 is no
    power of two (acceptance then reads 99%, and the text is wrong), and refuses more than 4 with an FP8 cache; vLLM's pull request
    45227 splits them.
    """
    if not (s.rocm and s.speculative and s.k and s.target_backend is not None and s.target_backend.name.startswith("ROCM_AITER_MLA")):
        return
    rows, fixed = s.k + 1, s.machine.older_than(0, 25) is False
    if rows > 4 and s.kv_dtype.startswith("fp8"):
        level: Level | None = None if fixed or s.machine.version is None else "error"
        yield Found(
            f"K = {s.k}: {rows} queries with an FP8 KV cache", "K = 3 or less, or --kv-cache-dtype auto; see pull request 45227", level
        )
    elif rows not in (2, 4) and not (fixed and s.machine.arch == "gfx950"):
        yield Found(
            f"K = {s.k}: {rows} queries at once",
            "Compare texts with the baseline at temperature 0 (eagle3-lab bench); K = 1 or 3 was always right.",
        )


@rule(
    "backend-platform",
    "error",
    "An attention backend of another platform",
    reads=SPECULATIVE,
    fields=("attention_backend",),
    issues=("v#47854",),
)
def backend_platform(s: Subject) -> Iterator[Found]:
    """The draft's `attention_backend` (and the target's) must exist on this platform: on ROCm FLASH_ATTN ends with "FlashAttention
    version not detected".
    """
    foreign = {
        "rocm": (*CUDA_ONLY, *CPU_ONLY, "FLASH_ATTN"),
        "cuda": (*ROCM_ONLY, *CPU_ONLY),
        "cpu": (*ROCM_ONLY, *CUDA_ONLY, "FLASH_ATTN", "TRITON_ATTN", "TRITON_MLA"),
    }
    good = {"rocm": "TRITON_ATTN", "cuda": "FLASH_ATTN", "cpu": "auto"}[s.machine.platform]
    for role, name in (("target", s.named_backend), ("draft", s.named_draft_backend if s.speculative else "")):
        if name in foreign[s.machine.platform]:
            yield Found(
                f"the {role}'s attention backend is {name}, the platform is {s.machine.platform}",
                f'"attention_backend": "{good}" in --speculative-config'
                if role == "draft"
                else "Leave --attention-backend out: vLLM chooses.",
            )


@rule(
    "draft-backend-open", "warning", "vLLM chooses the draft's attention itself", reads=CHOOSE, fields=("ROCM_ATTN",), issues=("v#47854",)
)
def draft_backend_open(s: Subject) -> Iterator[Found]:
    """On ROCm a Llama-type draft gets ROCM_ATTN first. Acceptance is reported to have collapsed on it where TRITON_ATTN and
    ROCM_AITER_UNIFIED_ATTN were fine.
    """
    if (
        s.rocm
        and s.speculative
        and not s.named_draft_backend
        and not s.draft_mla
        and s.draft_backend is not None
        and s.draft_backend.name == "ROCM_ATTN"
    ):
        yield Found(
            "no attention_backend in --speculative-config: ROCM_ATTN for the draft",
            'If acceptance is low: "attention_backend": "TRITON_ATTN" in --speculative-config',
        )


@rule(
    "aiter-fa-eagle3",
    "warning",
    "AITER's flash attention with Eagle3",
    reads="v1/attention/backends/rocm_aiter_fa.py:AiterFlashAttentionBackend",
    issues=("v#31625",),
)
def aiter_fa_eagle3(s: Subject) -> Iterator[Found]:
    """Wrong text was reported with ROCM_AITER_FA and Eagle3 (GSM8K fell to 0.048, with another model): speed says nothing before the
    texts agree.
    """
    if s.rocm and s.speculative and "ROCM_AITER_FA" in (s.named_backend, s.named_draft_backend):
        yield Found("ROCM_AITER_FA with a draft", "Compare texts with the baseline at temperature 0 before measuring.")


@rule(
    "latent-cache-of-one",
    "warning",
    "Single-token blocks",
    reads=f"{AITER_MLA}:AiterMLABackend.get_supported_kernel_block_sizes",
    fields=("MultipleOf(1)",),
    issues=("v#39616",),
)
def latent_cache_of_one(s: Subject) -> Iterator[Found]:
    """Blocks of one token make a block table as long as the context; published baselines of Kimi-K2.5 use them, lanes with a Llama-type
    draft cannot.
    """
    if s.line.number("block-size") == 1 and s.speculative:
        yield Found("--block-size 1 with a draft", "Leave --block-size out beside a draft: vLLM takes 16.")
