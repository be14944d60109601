"""Public pairs for people with one GPU, AMD or NVIDIA: targets that many use, with Eagle3 drafts whose use with vLLM is documented.

vLLM chooses kernels and block sizes by itself here, so the same command serves on ROCm and CUDA. K is the one of the place that documents
the pair. The context is set to what such a pair is mostly used with; the targets can do more.
"""

from __future__ import annotations

from lab.recipes.model import Checkpoint, Hub, Recipe

_VLLM = "https://github.com/vllm-project/vllm/blob"
_EXAMPLE = f"{_VLLM}/v0.24.0/examples/offline_inference/spec_decode.py"
_EAGLE_DOCS = "https://docs.vllm.ai/en/latest/features/speculative_decoding/eagle/"
_SPECULATORS_TEST = f"{_VLLM}/main/tests/v1/spec_decode (RedHatAI speculators of Llama-3.1-8B and Qwen3-8B)"
_EAGLE_TEST = f"{_VLLM}/main/tests/v1/e2e (AngelSlim/Qwen3-8B_eagle3 with Qwen/Qwen3-8B)"


def _pair(name: str, title: str, target: str, draft: str, *, k: int, k_source: str, draft_source: str, memory: str) -> Recipe:
    return Recipe(
        name=name,
        title=title,
        target=Checkpoint(target.rpartition("/")[2].lower(), Hub(target)),
        drafts={"bf16": Checkpoint(draft.rpartition("/")[2].lower(), Hub(draft))},
        k=k,
        hardware=("one GPU, AMD or NVIDIA",),
        max_model_len=8192,
        compiled=True,
        async_scheduling=True,
        flags=(("--gpu-memory-utilization", "0.90"), ("--no-enable-prefix-caching", None)),
        notes=(memory,),
        sources={
            "target": f"https://huggingface.co/{target}",
            "drafts.bf16": f"https://huggingface.co/{draft}; {draft_source}",
            "k": k_source,
            "hardware": "The weights in BF16 and 8K of context fit into the memory that the note names.",
            "max_model_len": "The lab's choice: the drafts were trained on shorter text than the targets' context.",
            "--gpu-memory-utilization": "vLLM's usual value, written out so that a baseline and a draft lane get the same memory.",
            "--no-enable-prefix-caching": "The lab's choice, as in InferenceX: a second run of a prompt must not look faster.",
        },
    )


def llama31_8b() -> Recipe:
    """Llama-3.1-8B-Instruct with the draft of EAGLE-3's authors."""
    return _pair(
        "llama-3.1-8b",
        "Llama-3.1-8B-Instruct with EAGLE-3's own draft",
        "meta-llama/Llama-3.1-8B-Instruct",
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        k=2,
        k_source=f"{_EXAMPLE}: its default for this draft",
        draft_source=f"named by {_EXAMPLE}",
        memory="About 24 GB of GPU memory. The target is gated: accept its licence on Hugging Face and set HF_TOKEN.",
    )


def llama31_8b_speculators() -> Recipe:
    """Llama-3.1-8B-Instruct with Red Hat's speculators draft."""
    return _pair(
        "llama-3.1-8b-speculators",
        "Llama-3.1-8B-Instruct with Red Hat's speculators draft",
        "meta-llama/Llama-3.1-8B-Instruct",
        "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
        k=2,
        k_source=_EAGLE_DOCS,
        draft_source=f"{_EAGLE_DOCS} and {_SPECULATORS_TEST}",
        memory="About 24 GB of GPU memory. The target is gated: accept its licence on Hugging Face and set HF_TOKEN.",
    )


def qwen3_8b() -> Recipe:
    """Qwen3-8B with AngelSlim's draft."""
    return _pair(
        "qwen3-8b",
        "Qwen3-8B with AngelSlim's draft",
        "Qwen/Qwen3-8B",
        "AngelSlim/Qwen3-8B_eagle3",
        k=2,
        k_source=f"{_EXAMPLE}: its default; AngelSlim does not state one for vLLM",
        draft_source=f"tested by {_EAGLE_TEST}",
        memory="About 24 GB of GPU memory.",
    )


def qwen3_8b_speculators() -> Recipe:
    """Qwen3-8B with Red Hat's speculators draft."""
    return _pair(
        "qwen3-8b-speculators",
        "Qwen3-8B with Red Hat's speculators draft",
        "Qwen/Qwen3-8B",
        "RedHatAI/Qwen3-8B-speculator.eagle3",
        k=3,
        k_source="https://huggingface.co/RedHatAI/Qwen3-8B-speculator.eagle3",
        draft_source=f"tested by {_SPECULATORS_TEST}",
        memory="About 24 GB of GPU memory.",
    )


def qwen3_32b_speculators() -> Recipe:
    """Qwen3-32B with Red Hat's speculators draft, for one GPU with 80 GB or more."""
    return _pair(
        "qwen3-32b-speculators",
        "Qwen3-32B with Red Hat's speculators draft",
        "Qwen/Qwen3-32B",
        "RedHatAI/Qwen3-32B-speculator.eagle3",
        k=3,
        k_source="https://huggingface.co/RedHatAI/Qwen3-32B-speculator.eagle3",
        draft_source="one of the speculators released by Red Hat for vLLM",
        memory="About 80 GB of GPU memory.",
    )


def gpt_oss_20b() -> Recipe:
    """gpt-oss-20b with Red Hat's speculators draft."""
    return _pair(
        "gpt-oss-20b",
        "gpt-oss-20b with Red Hat's speculators draft",
        "openai/gpt-oss-20b",
        "RedHatAI/gpt-oss-20b-speculator.eagle3",
        k=3,
        k_source="https://huggingface.co/RedHatAI/gpt-oss-20b-speculator.eagle3",
        draft_source="one of the speculators released by Red Hat for vLLM",
        memory="About 24 GB of GPU memory.",
    )
