"""Write a Llama checkpoint in MLA form, in a process of its own: `python -m lab.checkpoints.mla ORIGINAL RECIPE OUTPUT [HEADS]`.

ORIGINAL and OUTPUT are folders, RECIPE is a file of `lab.train.mla.save`. HEADS, if given, adds zero heads up to that number, which changes
no logits: for kernels that take 16 heads and not 9.

The arithmetic is `lab.train.mla`'s, the names are `lab.train.deepseek`'s; this is the script around them, so that torch and its memory
never enter the app. Progress goes to standard output, one line a stage. The process ends when its standard input closes, so it never
outlives the app that started it.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
from pathlib import Path

from lab.checkpoints.convert import end_with_parent


def convert(original: Path, recipe: Path, output: Path, heads: int | None = None) -> None:
    """Convert the BF16 Llama checkpoint in `original` as `recipe` (a file of `lab.train.mla.save`) says, into the folder `output`.

    With `heads`, zero heads fill up the model's own. Raises `LabError` for a file that is no recipe, and for fewer heads than there are.
    About 10 s and 2 GB of memory for 135 million parameters.
    """
    print("loading PyTorch", flush=True)
    import torch
    from safetensors.torch import load_file, save_file

    from lab.train import deepseek, mla
    from lab.train.target import Target

    print("reading the original's weights", flush=True)
    target = Target.load(original, "cpu", torch.float32)
    layers = mla.load(recipe)
    print("writing the MLA weights", flush=True)
    tensors = deepseek.checkpoint(load_file(original / "model.safetensors"), target.shape, target.layers, layers)
    config = deepseek.config(json.loads((original / "config.json").read_text(encoding="utf-8")))
    if heads is not None:
        tensors, config = deepseek.with_heads(tensors, config, heads)
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for path in original.iterdir():
        if path.name.startswith(("tokenizer", "special_tokens", "chat_template", "generation_config")):
            shutil.copyfile(path, output / path.name)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    convert(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else None)
