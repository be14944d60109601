"""Convert a GGUF file to a BF16 safetensors checkpoint, in a process of its own: `python -P convert.py FOLDER FILE OUTPUT`.

Run as a script, so that torch and its memory never enter the app. Progress goes to standard output, one line a stage. The process ends
when its standard input closes, so it never outlives the app that started it. It imports nothing of the lab.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path


def end_with_parent() -> None:
    """Wait until standard input is closed, and end this process then: for a thread."""
    while os.read(0, 1):
        pass
    os._exit(1)


def convert(folder: Path, filename: str, output: Path) -> None:
    """Dequantise `folder/filename` to BF16 and save weights, configuration, tokenizer and chat template in `output`.

    Tied embeddings are stored once, as the configuration says. About 15 s and 1 GB of memory for 135 million parameters.
    """
    print("loading PyTorch and Transformers", flush=True)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print(f"reading {filename}", flush=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=filename, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    print("writing the BF16 weights", flush=True)
    model.save_pretrained(output)
    print("writing the tokenizer and chat template", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=filename)
    if not tokenizer.chat_template:
        raise ValueError(f"{filename} has no chat template")
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    convert(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
