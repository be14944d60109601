"""The load of one cell by vLLM's own benchmark client: its arguments (pure), and its process, which never outlives the lab.

Importing the client takes as long as a short cell, so one process (`Worker`) measures one cell after another, as `vllm bench serve` with
the cell's arguments would: the same function, each time with its own seed, event loop and connections.

Endpoint: OpenAI chat, so the server applies the chat template to every prompt, exactly once: prompts of files go through the client's
`custom` dataset with `--skip-chat-template`, because it would otherwise apply the template itself before the server does it again. Files
of Spec-Bench's form go the same way, not through the client's `spec_bench` dataset, which in vLLM 0.32 neither passes that flag nor the
seed on (read in its source).

Counting: for chat the client takes the output tokens of a request from the usage record, and TPOT is (time after the first token) /
(tokens - 1), so both are right when a chunk carries several tokens. Its ITL is the time between *chunks*, and its "peak output token
throughput" counts chunks: under speculation neither is what its name says, and the lab shows neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from lab.bench.sweep import Cell
from lab.bench.workload import client_lengths
from lab.env import scratch, socket_folder
from lab.errors import LabError
from lab.serving import guard, log
from lab.serving.endpoint import Endpoint

#: Percentiles in the client's file; 99 is InferenceX's.
PERCENTILES = "90,95,99"
GRACE = 1.0  # seconds between SIGTERM and SIGKILL
LAST = 10.0  # seconds in which a client that hung up may end by itself, with an exit code of its own


def program() -> tuple[str, ...]:
    """How to start the client here, with a process for itself."""
    return (sys.executable, "-m", "lab.bench.vllm_client")


def arguments(cell: Cell, endpoint: Endpoint, *, tokenizer: str, result: Path, prompts: Path | None, template: int = 0) -> list[str]:
    """The client's arguments for `cell` on `endpoint`; it saves its file as `result`.

    `tokenizer` is the target's folder or hub name. `prompts` is a file of the client's own form, for a workload from files. `template` is
    how many tokens the chat template adds to a random prompt: it counts as part of ISL, as published.
    """
    workload = cell.workload
    words = ["--backend", "openai-chat", "--base-url", endpoint.url, "--endpoint", "/v1/chat/completions"]
    words += ["--model", endpoint.model, "--tokenizer", tokenizer]
    if ("--trust-remote-code", None) in cell.lane.recipe.flags:
        words.append("--trust-remote-code")
    if workload.isl is not None:
        isl, isl_ratio = client_lengths(workload.isl - template, cell.low)
        osl, osl_ratio = client_lengths(workload.osl, cell.low)
        words += ["--dataset-name", "random", "--random-input-len", str(isl), "--random-output-len", str(osl)]
        words += ["--random-range-ratio", json.dumps({"input": round(isl_ratio, 9), "output": round(osl_ratio, 9)})]
    else:
        if prompts is None:
            raise ValueError("a workload from files needs its file")
        words += ["--dataset-name", "custom", "--dataset-path", str(prompts), "--custom-output-len", str(workload.osl)]
        words.append("--skip-chat-template")
    if workload.ignore_eos:
        words.append("--ignore-eos")
    words += ["--num-prompts", str(cell.prompts), "--num-warmups", str(cell.warm_ups), "--max-concurrency", str(cell.concurrency)]
    words += ["--request-rate", "inf", "--seed", str(cell.seed), "--temperature", f"{cell.temperature:g}", "--disable-tqdm"]
    words += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", PERCENTILES, "--ready-check-timeout-sec", "0"]
    words += ["--save-result", "--save-detailed", "--result-dir", str(result.parent), "--result-filename", result.name]
    return words


def environment(endpoint: Endpoint, tokenizer: str, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The client's environment: one thread, no plugin, nothing from the hub for a local tokenizer, and no proxy to the server."""
    found = dict(os.environ if base is None else base)
    found |= {"VLLM_PLUGINS": "", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if Path(tokenizer).is_dir():
        found |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    host = urlsplit(endpoint.url).hostname or ""
    for name in ("NO_PROXY", "no_proxy"):
        found[name] = ",".join(part for part in (found.get(name), host) if part)
    if endpoint.ca:
        found["SSL_CERT_FILE"] = endpoint.ca
    if endpoint.api_key:
        found["OPENAI_API_KEY"] = endpoint.api_key
    return found


class Bench(msgspec.Struct, frozen=True):
    """The fields of the client's file that the lab reckons with."""

    failed: int
    completed: int
    duration: float
    total_input_tokens: int
    total_output_tokens: int
    total_token_throughput: float
    output_throughput: float
    output_lens: list[int]
    errors: list[str] = []

    def __post_init__(self) -> None:
        if self.duration <= 0 or (self.completed and not self.output_lens):
            raise ValueError("it has no time or no answers")


def read(file: Path) -> dict[str, Any]:
    """The client's file, checked. Raises `msgspec.MsgspecError` for one that is not whole, and `OSError`."""
    found = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    msgspec.convert(found, type=Bench)
    msgspec.convert({key: value for key, value in found.items() if key.endswith("_ms")}, type=dict[str, float])
    return found


async def run(argv: Sequence[str], environ: Mapping[str, str], output: Path, *, what: str = "vLLM's benchmark client") -> None:
    """Run `argv` behind a guard with its output in `output`; raises `LabError` when it fails. Cancelling ends it and its children."""
    child = await _guarded(argv, environ, output)
    try:
        code = await child.wait()
    finally:
        await _ended(child)
    if code:
        raise _failure(code, output, what)


async def _guarded(argv: Sequence[str], environ: Mapping[str, str], output: Path) -> asyncio.subprocess.Process:
    command = [sys.executable, "-I", "-S", guard.__file__, str(GRACE), "-", "--", *argv]
    with output.open("wb") as handle:
        return await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=handle, stderr=handle, env=dict(environ), start_new_session=True
        )


async def _ended(child: asyncio.subprocess.Process) -> None:
    """End it where it still runs, and wait for that."""
    if child.returncode is None:
        assert child.stdin is not None
        child.stdin.close()
        await asyncio.shield(child.wait())


def _failure(code: int, output: Path, what: str = "vLLM's benchmark client") -> LabError:
    tail = "\n".join([log.cause(output), *log.tail(output, 8)]).strip()
    return LabError(f"{what} failed (exit code {code}).", why=tail, todo=f"Its output is {output.name}.")


class Worker:
    """vLLM's client as one process behind a guard, told over a socket what to measure; an async context manager.

    It starts with the first cell, and anew where the environment is another (a key, a tokenizer from the hub) or where it has died.
    """

    def __init__(self) -> None:
        self._child: asyncio.subprocess.Process | None = None
        self._environ: dict[str, str] = {}
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Worker:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the process."""
        self._child = None
        await self._stack.aclose()

    async def run(self, words: Sequence[str], environ: Mapping[str, str], output: Path) -> None:
        """Run the client with the arguments `words`, its output in `output`. Raises `LabError` when it fails; cancelling ends it."""
        try:
            if self._child is None or self._child.returncode is not None or self._environ != environ:
                await self._start(environ, output)
            try:
                self._writer.write(json.dumps({"argv": list(words), "output": str(output)}).encode() + b"\n")
                answer = await self._reader.readline()
            except ConnectionError:
                answer = b""
            if not answer.endswith(b"\n"):
                raise await self._broken(output)
        except BaseException:
            await self.close()
            raise
        if code := json.loads(answer)["code"]:
            raise _failure(code, output)

    async def _broken(self, output: Path) -> LabError:
        """What became of a client that answers no more. It may still be about to end, or hang there: it has `LAST` seconds."""
        assert self._child is not None
        child = self._child
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(child.wait(), LAST)
        await self.close()
        return _failure(await child.wait(), output)

    async def _start(self, environ: Mapping[str, str], output: Path) -> None:
        await self.close()
        folder = self._stack.enter_context(scratch("client-", socket_folder()))
        came: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.get_running_loop().create_future()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            came.set_result((reader, writer))

        server = await asyncio.start_unix_server(connected, f"{folder}/socket")
        self._stack.callback(server.close)
        child = await _guarded([*program(), "worker", f"{folder}/socket"], environ, output)
        self._stack.push_async_callback(_ended, child)
        ended = asyncio.create_task(child.wait())
        try:
            await asyncio.wait((came, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if not came.done():
            raise _failure(child.returncode or 0, output)
        self._reader, self._writer = came.result()
        self._stack.callback(self._writer.close)
        self._child, self._environ = child, dict(environ)
