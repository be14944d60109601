"""Write a Llama checkpoint in MLA form, in a process of its own: `python -m lab.checkpoints.mla ORIGINAL RECIPE OUTPUT [HEADS [VALUES]]`.

ORIGINAL and OUTPUT are folders, RECIPE is a file of `lab.train.mla.save`. HEADS adds zero heads up to that number, VALUES zeros to each
head's values up to that size (0: as they are). Neither changes the logits: for kernels that take 16 heads and not 9, or only certain sizes.

The arithmetic is `lab.train.mla`'s, the names are `lab.train.deepseek`'s; this is the script around them, so that torch and its memory
never enter the app. Progress goes to standard output, one line a stage, an error to standard error, in one line. Where standard input is a
pipe, as the app gives it, the process ends when that closes, so it never outlives the app.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
import threading
from pathlib import Path

from lab.checkpoints.convert import end_with_parent
from lab.errors import LabError


def convert(original: Path, recipe: Path, output: Path, heads: int = 0, values: int = 0) -> None:
    """Convert the BF16 Llama checkpoint in `original` as `recipe` (a file of `lab.train.mla.save`) says, into the folder `output`.

    With `heads` and `values`, zeros fill up the model's own. Raises `LabError` for a file that is no recipe or another model's, and for
    less than there is.
    About 10 s and 2 GB of memory for 135 million parameters.
    """
    print("loading PyTorch", flush=True)
    import torch
    from safetensors.torch import load_file, save_file

    from lab.train import deepseek, mla
    from lab.train.target import Target

    print("reading the original's weights", flush=True)
    target = Target.load(original, "cpu", torch.float32)
    layers = mla.load(recipe, target.shape)
    print("writing the MLA weights", flush=True)
    tensors = deepseek.checkpoint(load_file(original / "model.safetensors"), target.shape, target.layers, layers)
    config = deepseek.config(json.loads((original / "config.json").read_text(encoding="utf-8")))
    if heads:
        tensors, config = deepseek.with_heads(tensors, config, heads)
    if values:
        tensors, config = deepseek.with_values(tensors, config, values)
    output.mkdir(parents=True, exist_ok=True)
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for path in original.iterdir():
        if path.name.startswith(("tokenizer", "special_tokens", "chat_template", "generation_config")):
            shutil.copyfile(path, output / path.name)


if __name__ == "__main__":
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:]))
    except LabError as error:
        sys.exit(str(error))
