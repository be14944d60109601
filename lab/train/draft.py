"""The Eagle3 draft as PyTorch sees it, and its checkpoint as vLLM reads it.

One Llama layer whose attention reads the concatenation of the next token's embedding and a feature of the target (Li et al. 2025,
EAGLE-3), laid out as `LlamaForCausalLMEagle3` (`vllm/model_executor/models/llama_eagle3.py`): `fc` joins the low, middle and high
features, `midlayer.*` is the layer, `norm` and `lm_head` score a reduced *draft vocabulary*, `d2t` holds `target id - draft id`, `t2d`
marks the target ids that have a draft id. Token embeddings are the target's own and are not stored.

For training, each feature dimension is divided by its root mean square so that the levels start out equal; `export` folds that scale into
`fc`, and vLLM never sees it.

Shape suffixes as in `target.py`; W draft vocabulary, F = L H concatenated features.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from safetensors.torch import save as in_bytes
from torch import Tensor, nn

from lab.errors import LabError
from lab.train.target import LlamaShape, Target, rms_norm

ARCHITECTURE = "LlamaForCausalLMEagle3"


@dataclass(frozen=True)
class DraftShape:
    """Sizes of a draft; what is not here is the target's."""

    levels: tuple[int, ...]
    vocab: int = 8192
    intermediate: int = 1536


class Draft(nn.Module):
    """A trainable Eagle3 draft. Parameters are float32; run it under autocast for BF16 arithmetic."""

    scale_F: Tensor
    t2d: Tensor
    kept: Tensor

    def __init__(self, target: LlamaShape, shape: DraftShape, kept: Tensor) -> None:
        """`kept` [W]: the sorted target ids that the draft can say."""
        super().__init__()
        self.target_shape, self.shape = target, shape
        hidden, inner = target.hidden, shape.intermediate
        wide = len(shape.levels) * hidden

        def matrix(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns) * columns**-0.5)

        def ones() -> nn.Parameter:
            return nn.Parameter(torch.ones(hidden))

        self.fc = matrix(hidden, wide)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm, self.norm = ones(), ones(), ones(), ones()
        self.q_proj = matrix(target.heads * target.head_dim, 2 * hidden)
        self.k_proj = matrix(target.kv_heads * target.head_dim, 2 * hidden)
        self.v_proj = matrix(target.kv_heads * target.head_dim, 2 * hidden)
        self.o_proj = matrix(hidden, target.heads * target.head_dim)
        self.gate_proj, self.up_proj, self.down_proj = matrix(inner, hidden), matrix(inner, hidden), matrix(hidden, inner)
        self.lm_head = matrix(shape.vocab, hidden)
        self.register_buffer("scale_F", torch.ones(wide))
        self.register_buffer("kept", kept.clone())
        self.register_buffer("t2d", torch.zeros(target.vocab, dtype=torch.bool).index_fill_(0, kept, True))

    @torch.no_grad()
    def start_from(self, target: Target, features_NF: Tensor) -> None:
        """Begin near the target: its last layer's feed-forward and norms, its embeddings as head, features standardised on a sample."""
        layer, hidden = target.layers[-1], target.shape.hidden
        self.scale_F.copy_(features_NF.float().pow(2).mean(0).sqrt().clamp_min(1e-6))
        if self.shape.intermediate == target.shape.intermediate:
            gate, up = layer.gate_up.float().chunk(2)
            self.gate_proj.copy_(gate)
            self.up_proj.copy_(up)
            self.down_proj.copy_(layer.down.float())
        self.post_attention_layernorm.copy_(layer.norm_mlp.float())
        self.norm.copy_(target.norm_H.float())
        self.lm_head.copy_(target.embed_VH[self.kept].float())
        # The highest level passes through with its own profile at size one (the norms that follow ignore the size, the optimiser
        # does not); the others begin as a small perturbation.
        self.fc.mul_(0.1)
        self.fc[:, -hidden:] += torch.diag(self.scale_F[-hidden:] / self.scale_F[-hidden:].median())

    @torch.no_grad()
    def go_on_from(self, earlier: Draft) -> None:
        """Take over an earlier draft of the same shape: its layer, and its head's rows for the tokens that both can say.

        Call after `start_from`, which sets the scale of the features and the rows of tokens that are new.
        """
        if (earlier.shape.levels, earlier.shape.intermediate) != (self.shape.levels, self.shape.intermediate):
            raise LabError(
                "The draft to start from has another shape.",
                why=f"Levels {earlier.shape.levels} and width {earlier.shape.intermediate}; this run has {self.shape.levels} and "
                f"{self.shape.intermediate}.",
            )
        for name, parameter in self.named_parameters():
            if name != "lm_head":
                parameter.copy_(getattr(earlier, name))
        self.fc.copy_((earlier.fc / earlier.scale_F).to(self.fc.device) * self.scale_F)
        places = {int(token): place for place, token in enumerate(earlier.kept)}
        both = [(here, places[int(token)]) for here, token in enumerate(self.kept) if int(token) in places]
        here, there = (torch.tensor(side) for side in zip(*both, strict=True))
        self.lm_head[here.to(self.kept.device)] = earlier.lm_head[there].to(self.kept.device)

    def combine(self, features_BTF: Tensor) -> Tensor:
        """Join the levels into one feature [B, T, H]."""
        return F.linear(features_BTF / self.scale_F.to(features_BTF.dtype), self.fc)

    def head_input(self, hidden_BTH: Tensor) -> Tensor:
        """The normed hidden state that the head scores."""
        return rms_norm(hidden_BTH, self.norm, self.target_shape.eps)

    def weights(self) -> dict[str, Tensor]:
        """The checkpoint's tensors by vLLM's names, in BF16, with the feature scale folded into `fc`."""
        named = {
            "fc.weight": self.fc / self.scale_F,
            "norm.weight": self.norm,
            "lm_head.weight": self.lm_head,
            **{f"midlayer.{name}.weight": getattr(self, name) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
            **{f"midlayer.self_attn.{name}.weight": getattr(self, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
            **{f"midlayer.mlp.{name}.weight": getattr(self, name) for name in ("gate_proj", "up_proj", "down_proj")},
        }
        tensors = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in named.items()}
        tensors["d2t"] = (self.kept - torch.arange(len(self.kept), device=self.kept.device)).cpu()
        tensors["t2d"] = self.t2d.cpu()
        return tensors

    def config(self) -> dict[str, Any]:
        """`config.json` of the checkpoint."""
        target = self.target_shape
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "hidden_size": target.hidden,
            "intermediate_size": self.shape.intermediate,
            "num_hidden_layers": 1,
            "num_attention_heads": target.heads,
            "num_key_value_heads": target.kv_heads,
            "head_dim": target.head_dim,
            "hidden_act": "silu",
            "vocab_size": target.vocab,
            "draft_vocab_size": self.shape.vocab,
            "max_position_embeddings": target.max_positions,
            "rms_norm_eps": target.eps,
            "rope_theta": target.theta,
            "rope_parameters": {"rope_theta": target.theta, "rope_type": "default"},
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_aux_hidden_states": len(self.shape.levels),
            "eagle_aux_hidden_state_layer_ids": list(self.shape.levels),
        }

    def export(self, folder: Path) -> None:
        """Write `config.json` and `model.safetensors` into `folder` (made if missing)."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = in_bytes(self.weights(), metadata={"format": "pt"})  # not `save_file`, whose word for a full disk is no `OSError`
        (folder / "model.safetensors").write_bytes(weights)
        (folder / "config.json").write_text(json.dumps(self.config(), indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path, target: LlamaShape) -> Draft:
        """Read a checkpoint written by `export`, for evaluation or further training."""
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        kept = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        shape = DraftShape(tuple(config["eagle_aux_hidden_state_layer_ids"]), config["draft_vocab_size"], config["intermediate_size"])
        draft = cls(target, shape, kept)
        with torch.no_grad():
            for name, tensor in tensors.items():
                if name not in ("d2t", "t2d"):
                    getattr(draft, name.removesuffix(".weight").split(".")[-1]).copy_(tensor.float())
        return draft


def draft_vocabulary(counts_V: Tensor, size: int, always: tuple[int, ...]) -> Tensor:
    """The `size` most frequent ids by `counts_V`, `always` included, sorted ascending (so that d2t offsets are never negative)."""
    counts = counts_V.clone()
    counts[list(always)] = counts.max() + 1
    return counts.topk(size).indices.sort().values
