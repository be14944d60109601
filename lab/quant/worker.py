"""The child process that runs AMD Quark and measures the result: `python -m lab.quant.worker STAGE`.

STAGE/source holds the draft to quantise; STAGE/draft is written, and STAGE/result.json: either `{"tensors": [...], "exclude": [...]}` or
`{"error": [what, why, todo]}`. Quark works file to file and needs no calibration data: ptpc_fp8 scales weights by their own largest value a
row and leaves activations to run time.
"""

from __future__ import annotations

import json
import re
import sys
import types
import zipfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.errors import LabError, require
from lab.quant.child import end_with_parent, say
from lab.quant.draft import INDEX, PICKLE, Draft, check_quantisable, is_linear, read_draft, read_json
from lab.quant.report import Channel, Tensor, why_kept

#: Left in the draft's own precision.
EXCLUDED = ("fc", "lm_head")
WORST = 5


def vllm_patterns(exclude: Iterable[str]) -> list[str]:
    """Quark's names of excluded modules as patterns that vLLM matches.

    vLLM compares names as they are in its own model (`model.fc`, `model.layers.30.…`), exactly or by a `re:` pattern anchored at the start;
    so a name is cut down to what follows the layer and matched at the end.
    """
    ends = {re.sub(r"^(model\.)?(midlayer\.|layers\.\d+\.)?", "", name) for name in exclude}
    return [rf"re:(?:.*\.)?{re.escape(end)}$" for end in sorted(ends)]


def without_kernels() -> None:
    """Keep Quark from compiling emulation kernels when it is imported: ptpc_fp8 runs none of them.

    That compilation takes a minute and a C++ compiler, and where it was interrupted (a page's Stop, Ctrl-C) it leaves a lock in
    `~/.cache/torch_extensions` for which every later import of Quark waits without end (`torch/utils/file_baton.py`).
    """

    class Missing:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"Quark's kernel {name} is not compiled here.")

    stand_in: Any = types.ModuleType("quark.torch.kernel.hw_emulation.extensions")
    stand_in.kernel_ext = Missing()
    sys.modules.setdefault(stand_in.__name__, stand_in)


def _unpickle(folder: Path) -> None:
    """Rewrite a pickled draft in the staging folder as safetensors, which is all that Quark's file-to-file mode reads."""
    import torch
    from safetensors.torch import save_file

    path = folder / PICKLE
    todo = "Fetch the file again, or save the draft's weights as safetensors."
    try:  # before torch 1.6 files were no ZIP archives, which cannot be mapped
        weights = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # whatever bytes make torch's reader and unpickler raise
        why = f"{' '.join(str(error).split())[:200] or type(error).__name__}."
        raise LabError(f"{path.resolve()} is damaged, or holds more than weights.", why=why, todo=todo) from error
    if not isinstance(weights, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in weights.values()):
        raise LabError(f"{path.resolve()} does not map names to tensors alone.", why="It may be a training checkpoint.", todo=todo)
    save_file({name: tensor.contiguous().clone() for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / PICKLE).unlink()


def _quantise(source: Path, output: Path, scheme: str) -> None:
    say("starting AMD Quark")
    quark = require("quark.torch", "Quantising a draft")
    say("quantising")
    config = quark.LLMTemplate.get("llama").get_config(scheme=scheme, exclude_layers=list(EXCLUDED))
    quark.ModelQuantizer(config).direct_quantize_checkpoint(pretrained_model_path=str(source), save_path=str(output), device="cpu")


def fix_config(config: dict[str, Any]) -> dict[str, Any]:
    """Quark's config.json as vLLM needs it: `exclude` as patterns, and beside the layer settings in a speculators draft."""
    quantisation = {**config["quantization_config"]}
    quantisation["exclude"] = vllm_patterns(quantisation["exclude"])
    fixed = {**config, "quantization_config": quantisation}
    if "transformer_layer_config" in config:
        fixed["transformer_layer_config"] = {**config["transformer_layer_config"], "quantization_config": quantisation}
    return fixed


def _measure(before: Draft, after: Draft) -> list[Tensor]:
    """Compare the two drafts tensor by tensor; a `LabError` where one is not what the scheme promises."""
    from safetensors.torch import load_file

    old = {name: tensor for path in before.files for name, tensor in load_file(path).items()}
    new = {name: tensor for path in after.files for name, tensor in load_file(path).items()}
    scales = {name for name in new if name.endswith("weight_scale")}
    if missing := set(old) ^ (set(new) - scales):
        raise LabError("Quark's output does not hold the draft's tensors.", why=f"Differing: {', '.join(sorted(missing))}.")
    rows = []
    for name, was in old.items():
        header, written, now = before.tensors[name], after.tensors[name], new[name]
        row = Tensor(name, header.shape, header.dtype, written.dtype, header.bytes, header.bytes)
        scale = new.get(f"{name}_scale")
        wanted = is_linear(name, header) and name.split(".")[-2] not in EXCLUDED
        if was.is_floating_point() and not bool(was.isfinite().all()):
            raise LabError(f"{name} holds numbers that are not finite (NaN or infinity).", todo="Export the draft again.")
        if not wanted:
            if scale is not None or was.dtype != now.dtype or not was.equal(now):
                raise LabError(f"Quark changed {name}, which was to stay as it is.")
            rows.append(replace(row, kept=why_kept(name)))
            continue
        if written.dtype != "F8_E4M3" or scale is None or str(scale.dtype) != "torch.float32" or scale.numel() != header.shape[0]:
            raise LabError(f"Quark did not write {name} as E4M3 with one float32 scale per output channel.")
        reference = was.double()
        wrong = (now.double() * scale.double().reshape(-1, 1) - reference).norm(dim=1)
        if not bool(wrong.isfinite().all()):
            why = "The numbers of some channel may be too small for a scale."
            raise LabError(f"{name} holds numbers that are not finite after quantising.", why=why)
        size = reference.norm(dim=1)
        errors = wrong / size.clamp(min=1e-300)
        top = errors.topk(min(WORST, errors.numel()))
        worst = tuple(Channel(int(i), float(e)) for e, i in zip(top.values, top.indices, strict=True))
        norm = float(reference.norm())
        error = float(wrong.norm()) / norm if norm else 0.0
        after_bytes = written.bytes + scale.numel() * scale.element_size()
        rows.append(replace(row, bytes_after=after_bytes, error=error, norm=norm, worst=worst))
    return rows


def work(stage: Path, scheme: str) -> dict[str, Any]:
    """Quantise STAGE/source into STAGE/draft; what goes into result.json."""
    import msgspec

    source, output = stage / "source", stage / "draft"
    if (source / PICKLE).exists() and not list(source.glob("*.safetensors")):
        say("rewriting pytorch_model.bin as safetensors")
        _unpickle(source)
    before = read_draft(source)
    check_quantisable(before)
    without_kernels()
    _quantise(source, output, scheme)
    config = fix_config(read_json(output / "config.json"))
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if len(before.files) == 1:
        (output / INDEX).unlink(missing_ok=True)
    say("measuring")
    tensors = _measure(before, read_draft(output))
    return {"tensors": msgspec.to_builtins(tensors), "exclude": config["quantization_config"]["exclude"]}


def main() -> int:
    """Entry point of the child."""
    end_with_parent()
    stage, scheme = Path(sys.argv[1]), sys.argv[2]
    try:
        result = work(stage, scheme)
    except LabError as error:
        result = {"error": [error.what, error.why, error.todo]}
    (stage / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
