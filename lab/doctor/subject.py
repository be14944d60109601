"""What the rules look at: one machine, one command line, one target, perhaps one draft, perhaps one running server.

`Subject` answers the questions that several rules have, as vLLM would: what the draft's configuration becomes once vLLM has converted it,
which attention backends target and draft get on this platform, how many heads a rank has. Values from files are of any type; `number`
gives whole numbers only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lab.doctor.blocks import BACKENDS, Backend
from lab.doctor.files import Model
from lab.doctor.line import Line, whole
from lab.doctor.machine import Machine
from lab.doctor.server import Running

#: vLLM's own CPU-free truths about booleans in the environment.
TRUE = ("1", "true", "yes", "on")


def number(value: object) -> int | None:
    """`value` if it is a whole number and no boolean."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def vllm_view(config: Mapping[str, Any]) -> dict[str, Any]:
    """A draft's configuration as vLLM's Eagle3 models see it, after `update_eagle3` (speculators) or `EAGLEConfig` (nested `model`)."""
    if "speculators_model_type" in config:
        layer = config.get("transformer_layer_config")
        seen = dict(layer) if isinstance(layer, dict) else {}
        seen["draft_vocab_size"] = config.get("draft_vocab_size")
        if config.get("target_hidden_size") is not None:
            seen["target_hidden_size"] = config["target_hidden_size"]
        seen["norm_before_residual"] = config.get("norm_before_residual", True)
        for name in ("norm_before_fc", "fc_norm", "norm_output"):
            seen[name] = config.get(name, False)
        if config.get("eagle_aux_hidden_state_layer_ids"):
            seen["eagle_aux_hidden_state_layer_ids"] = config["eagle_aux_hidden_state_layer_ids"]
        return seen
    inner = config.get("model")
    return {**inner, **config} if isinstance(inner, dict) else dict(config)


@dataclass(frozen=True)
class Subject:
    """What is examined. `draft` is None without speculation; `source` says in words where the command came from."""

    machine: Machine = field(default_factory=Machine)
    line: Line = field(default_factory=Line)
    target: Model | None = None
    draft: Model | None = None
    server: Running | None = None
    source: str = ""
    #: Whether the line is a recipe's (the lab's own flags and launcher) rather than one that a person wrote.
    recipe: str = ""

    @property
    def speculative(self) -> bool:
        """Whether the command line asks for speculation."""
        return bool(self.line.speculative) or self.draft is not None

    @property
    def k(self) -> int | None:
        """Draft tokens a step."""
        return number(self.line.speculative.get("num_speculative_tokens"))

    @property
    def tp(self) -> int:
        """Tensor parallelism of the target."""
        return max(1, self.line.number("tensor-parallel-size", 1) or 1)

    @cached_property
    def environment(self) -> dict[str, str]:
        """What the server would see: this machine's environment (unless it is another machine) and the line's on top."""
        return {**({} if self.machine.assumed else self.machine.environment), **self.line.environment}

    def on(self, name: str, default: bool = False) -> bool:
        """Whether an environment variable is true."""
        return self.environment.get(name, "1" if default else "0").lower() in TRUE

    @cached_property
    def target_text(self) -> Mapping[str, Any]:
        """The target's language model configuration; empty where unknown."""
        return self.target.text if self.target is not None else {}

    @cached_property
    def draft_view(self) -> dict[str, Any]:
        """The draft's configuration as vLLM sees it; empty where unknown."""
        return vllm_view(self.draft.config) if self.draft is not None and self.draft.known else {}

    def target_int(self, name: str) -> int | None:
        """A whole number of the target's configuration."""
        return number(self.target_text.get(name))

    def draft_int(self, name: str) -> int | None:
        """A whole number of the draft's configuration as vLLM sees it."""
        return number(self.draft_view.get(name))

    @property
    def target_hidden(self) -> int | None:
        """The target's width that the draft expects: `target_hidden_size`, else the draft's own width."""
        return self.draft_int("target_hidden_size") or self.draft_int("hidden_size")

    @cached_property
    def aux_ids(self) -> list[Any] | None:
        """Auxiliary layer ids as `_get_eagle3_aux_layers_from_config` finds them; None where there are none."""
        ids = self.draft_view.get("eagle_aux_hidden_state_layer_ids")
        if not ids:
            inner = self.draft_view.get("eagle_config")
            ids = inner.get("eagle_aux_hidden_state_layer_ids") if isinstance(inner, dict) else None
        return list(ids) if ids and isinstance(ids, list | tuple) else None

    @property
    def aux_count(self) -> int | None:
        """How many auxiliary states the draft's model is built for: `num_aux_hidden_states`, else those of `eagle_config`, else 3."""
        view = self.draft_view
        if not view:
            return None
        if view.get("num_aux_hidden_states") is not None:
            return number(view["num_aux_hidden_states"])
        inner = view.get("eagle_config")
        ids = inner.get("eagle_aux_hidden_state_layer_ids") if isinstance(inner, dict) else None
        return len(ids) if isinstance(ids, list) and ids else 3

    def shape(self, *endings: str) -> tuple[int, ...] | None:
        """The shape of the draft's tensor whose name ends in one of `endings`; None where there is none or weights are unknown."""
        for name, header in (self.draft.tensors or {}).items() if self.draft is not None else ():
            if any(name == ending or name.endswith(f".{ending}") for ending in endings):
                return header.shape
        return None

    @property
    def weights_known(self) -> bool:
        """Whether the draft's tensor headers were read."""
        return self.draft is not None and bool(self.draft.tensors)

    @property
    def draft_quantised(self) -> bool:
        """Whether the draft's configuration as vLLM sees it says that it is quantised."""
        return isinstance(self.draft_view.get("quantization_config"), dict)

    @property
    def mla(self) -> bool:
        """Whether the target has multi-head latent attention."""
        return bool(self.target_int("kv_lora_rank"))

    @property
    def draft_mla(self) -> bool:
        """Whether the draft has."""
        return bool(self.draft_int("kv_lora_rank"))

    @property
    def rocm(self) -> bool:
        """Whether the machine is an AMD one."""
        return self.machine.platform == "rocm"

    @property
    def cpu(self) -> bool:
        """Whether the engine would compute on the processor."""
        return self.machine.platform == "cpu"

    @property
    def aiter(self) -> bool:
        """Whether AITER is switched on."""
        return self.on("VLLM_ROCM_USE_AITER")

    @property
    def plugin_loaded(self) -> bool:
        """Whether vLLM would load the lab's plugin: installed, and not left out by VLLM_PLUGINS."""
        named = self.environment.get("VLLM_PLUGINS")
        return self.machine.plugin and (named is None or "eagle3_lab" in named.split(","))

    @property
    def shared_blocks(self) -> bool:
        """Whether the plugin's MLA backend for CPUs would be used (`lab/vllm_plugin/cpu_mla.py`)."""
        named = self.environment.get("VLLM_PLUGINS")
        return self.environment.get("EAGLE3_LAB_CPU_MLA") == "1" and (named is None or "eagle3_lab" in named.split(","))

    @property
    def amx_mla(self) -> bool:
        """Whether vLLM takes its MLA backend for AMX on this processor: whatever was named, but for CPU_MLA."""
        return self.cpu and self.mla and "amx_tile" in self.machine.cpu_flags and self.named_backend != "CPU_MLA"

    @property
    def kv_dtype(self) -> str:
        """The KV cache's type as asked for."""
        return self.line.text("kv-cache-dtype", "auto")

    @property
    def named_backend(self) -> str:
        """The target's attention backend as the line names it, "" where vLLM chooses."""
        inner = self.line.objects.get("attention-config", {}).get("backend")
        return (
            self.line.text("attention-backend")
            or (inner if isinstance(inner, str) else "")
            or self.environment.get("VLLM_ATTENTION_BACKEND", "")
        ).upper()

    @property
    def named_draft_backend(self) -> str:
        """The draft's attention backend as the line names it."""
        value = self.line.speculative.get("attention_backend")
        return value.upper() if isinstance(value, str) and value.lower() != "auto" else ""

    @property
    def target_backend(self) -> Backend | None:
        """The target's backend: the one named, else what vLLM 0.32's platform code chooses; None where that is not known."""
        if self.cpu and self.mla:
            return self._known("AMX_MLA" if self.amx_mla else "CPU_MLA")
        if self.named_backend:
            return self._known(self.named_backend)
        if not self.target_text:
            return None
        if self.cpu:
            return self._known("CPU_ATTN")
        if self.rocm:
            if self.mla:
                return self._known("ROCM_AITER_MLA") if self.aiter and self.on("VLLM_ROCM_USE_AITER_MLA", True) else BACKENDS["TRITON_MLA"]
            return BACKENDS["ROCM_ATTN"]
        return None

    @property
    def draft_backend(self) -> Backend | None:
        """The draft's backend: the one named, else its platform's default for its kind of attention."""
        if not self.speculative or (self.draft is not None and self.draft.known and self.draft_mla):
            return None
        if self.named_draft_backend:
            return self._known(self.named_draft_backend)
        if self.cpu:
            return BACKENDS["CPU_ATTN"]
        if self.rocm:
            # A backend that is named for the target holds for the draft too, unless it cannot run a draft without latents.
            own = self._known(self.named_backend) if self.named_backend else None
            return own if own is not None and not own.mla else BACKENDS["ROCM_ATTN"]
        return None

    def _known(self, name: str) -> Backend | None:
        old = self.machine.older_than(0, 20)
        if name == "ROCM_AITER_MLA" and old:
            return BACKENDS["ROCM_AITER_MLA before #39616"]
        if name == "CPU_MLA" and self.shared_blocks:
            return BACKENDS["CPU_MLA with the lab's plugin"]
        return BACKENDS.get(name)

    @property
    def block_size(self) -> int:
        """Tokens a block of the KV cache: as asked for, else vLLM's default (16; on a CPU 128, with latents 16 but for AMX)."""
        asked = self.line.number("block-size")
        if self.cpu:
            if self.mla and not self.amx_mla:
                return asked or 32 if self.shared_blocks else 16
            return asked or 128
        return asked or 16

    @property
    def context(self) -> int | None:
        """The engine's longest context: `--max-model-len`, else the target's own."""
        asked = whole(self.line.flags.get("max-model-len"), 0) or 0
        return asked if asked > 0 else self.target_int("max_position_embeddings")  # -1: vLLM takes what fits, at most the target's
