"""The command line: what it prints, what it refuses, and that it stays light."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lab import cli
from lab.trace.io import load


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command in this process."""
    monkeypatch.setattr(sys, "argv", ["eagle3-lab", *argv])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    code = ended.value.code
    captured = capsys.readouterr()
    return int(code or 0), captured.out, captured.err


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    monkeypatch.setenv("EAGLE3_LAB_CACHE", str(tmp_path / "cache"))
    return lambda *argv: run(monkeypatch, capsys, *argv)


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fake() -> Iterator[Any]:
    server = _module(Path(__file__).parent / "serving" / "fake_engine.py").Fake()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_dry_run_prints_a_command_for_a_shell(command: Any, tmp_path: Path) -> None:
    code, out, _ = command("serve", "smollm2", "--draft", "bf16", "-k", "2", "--compiled", "--port", "8123", "--dry-run")
    assert code == 0
    words = shlex.split(out.replace("\\\n", " "), comments=True)
    lines = [line for line in out.splitlines() if not line.startswith("#")]  # a note, on a processor without AVX-512
    assert all(line.endswith("\\") for line in lines[:-1])  # one command
    assert words[words.index("serve") + 1] == str(tmp_path / "cache" / "checkpoints" / "smollm2-135m-instruct")
    assert words[words.index("--port") + 1] == "8123"
    assert json.loads(words[words.index("--speculative-config") + 1])["num_speculative_tokens"] == 2
    assert "--enforce-eager" not in words
    assert not (tmp_path / "cache").exists()


def test_dry_run_of_the_baseline(command: Any) -> None:
    code, out, _ = command("serve", "--draft", "none", "--plain", "--dry-run")
    assert code == 0
    assert "--speculative-config" not in out
    assert "VLLM_PLUGINS=''" in out


def test_dry_run_of_a_published_recipe(command: Any) -> None:
    code, out, _ = command("serve", "kimi-k2.5", "--draft", "fp8", "--isl", "8192", "--tp", "8", "--ep", "--dry-run")
    assert code == 0
    assert out.startswith("# Published with vllm/vllm-openai-rocm")
    words = shlex.split(out.replace("\\\n", " "), comments=True)
    start = words.index("vllm")
    assert {"VLLM_ROCM_USE_AITER=1", "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM=1"} <= {*words[:start]}
    assert "VLLM_ROCM_USE_AITER_RMSNORM=0" not in words[:start]
    assert words[start : start + 3] == ["vllm", "serve", "amd/Kimi-K2.5-MXFP4"]
    assert words[words.index("--max-model-len") + 1] == str(8192 + 1024 + 256)
    assert {"--enable-expert-parallel", "--long-prefill-token-threshold"} <= {*words}
    assert json.loads(words[words.index("--speculative-config") + 1])["num_speculative_tokens"] == 6
    assert not {"--scheduler-cls", "--no-async-scheduling", "--block-size", "--enforce-eager"} & {*words}
    _, traced, _ = command("serve", "kimi-k2.5", "--draft", "fp8", "--traced", "--dry-run")
    assert {"--scheduler-cls", "--no-async-scheduling"} <= {*shlex.split(traced.replace("\\\n", " "), comments=True)}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("serve", "kimi-k2.5", "--tp", "3", "--dry-run"), "--tp 4 or 8"),
        (("serve", "nonsense"), "no recipe called 'nonsense'"),
        (("serve", "-k", "0"), "K = 0 draft tokens"),
        (("serve", "-k", "99", "--dry-run"), "K = 99 draft tokens"),
        (("trace", "hello", "-k", "99"), "K = 99"),
        (("trace", "hello", "--url", "127.0.0.1:9"), "no OpenAI-style server at http://127.0.0.1:9"),
    ],
)
def test_refusals_are_sentences(command: Any, argv: tuple[str, ...], words: str) -> None:
    code, out, err = command(*argv)
    assert (code, out) == (1, "")
    assert err.startswith("eagle3-lab: ")
    assert words in err
    assert "Traceback" not in err


def test_a_port_in_use(command: Any) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, _, err = command("serve", "--port", str(port))
    assert code == 1
    assert f"Port {port} is in use" in err


def test_an_engine_that_is_not_installed(command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    code, _, err = command("serve")
    assert code == 1
    assert "pip install 'eagle3-lab[cpu]'" in err
    assert not (tmp_path / "cache").exists()


def test_a_part_that_is_not_there(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lab.train.cli", None)
    code, _, err = command("train", "--steps", "3")
    assert code == 1
    assert "'train' is not part of this version" in err


def test_arguments_reach_the_parts(command: Any) -> None:
    code, out, _ = command("bench", "--help")
    assert code == 0
    assert "eagle3-lab bench" in out


def sse(data: object, name: str = "message") -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


def test_trace_prints_rows_and_saves(command: Any, fake: Any, tmp_path: Path) -> None:
    step = {"trace": "t", "request": "r", "phase": "decode", "started": 0.0, "ended": 1.0}
    fake.steps = [
        sse({"request": "r", "ids": [1]}, "prompt"),
        sse({"5": "4869", "6": "2061", "7": "2062", "8": "0a"}, "pieces"),
        sse({**step, "index": 0, "phase": "prefill", "sampled": [5], "kept": 1}, "step"),
        sse({**step, "index": 1, "draft": [6, 7, 7], "sampled": [6, 8], "kept": 2}, "step"),
        sse({}, "end"),
    ]
    fake.chunks = [
        sse({"choices": [{"index": 0, "delta": {"content": "Hi a\n"}, "token_ids": [5, 6, 8], "finish_reason": "stop"}]}),
        sse({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 3}}),
        b"data: [DONE]\n\n",
    ]
    code, out, err = command("trace", "hello", "--url", fake.url, "--output", str(tmp_path / "t.jsonl"))
    assert (code, err) == (0, "")
    rows = out.splitlines()
    assert rows[0].split() == ["0", "prefill", "=Hi"]
    assert rows[1].split() == ["1", "1", "of", "3", "+·a", "-·b", "?·b", "=↵"]
    assert "1 of 3 draft tokens accepted (33%), mean acceptance length 2.00 (bonus token included)" in out
    saved = load(tmp_path / "t.jsonl")
    assert saved.requests[0].output_ids() == (5, 6, 8)
    assert saved.provenance["settings"]["temperature"] == 0.0
    assert "recipe" not in saved.provenance, "what that server was started with is not known"


def test_an_answer_that_breaks_off_is_printed_and_fails(command: Any, fake: Any) -> None:
    fake.chunks = [sse({"choices": [{"index": 0, "delta": {"content": "half an"}, "token_ids": [5], "finish_reason": None}]}), 0.1, None]
    code, out, err = command("trace", "hello", "--url", fake.url)
    assert code == 1
    assert "half an" in out
    assert "stopped in the middle of the answer" in err


@pytest.mark.parametrize("argv", ["--help", "serve --help", "serve --dry-run"])
def test_help_is_light(argv: str) -> None:
    """None of the heavy packages is imported, so all of this works in the light install, and at once."""
    heavy = ["torch", "vllm", "transformers", "gradio", "plotly", "quark", "numpy"]
    code = f"""
import sys
for name in {heavy!r}:
    sys.modules[name] = None
sys.argv = ["eagle3-lab", *{argv.split()!r}]
from lab import cli
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="serving is for Linux")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, -signal.SIGTERM)], ids=["Ctrl-C", "terminated"])
def test_serve_runs_until_it_is_ended(number: int, code: int, tmp_path: Path) -> None:
    program = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from lab import checkpoints, cli
from lab.serving import process
process.launcher = lambda: (sys.executable, {str(Path(__file__).parent / "serving" / "fake_engine.py")!r})
checkpoints.ensure = lambda checkpoint, say=None: checkpoint.name
sys.argv = ["eagle3-lab", "serve", "--port", str(process.free_port())]
cli.main()
"""
    environment = {**os.environ, "EAGLE3_LAB_CACHE": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, env=environment) as serving:
        assert serving.stderr is not None
        for line in serving.stderr:
            if "is ready" in line:
                break
        (log,) = (tmp_path / "logs").iterdir()
        engine = Path("/proc") / log.read_text().rsplit("pid ", 1)[1].split()[0]
        assert engine.exists()
        serving.send_signal(number)
        assert serving.wait(60) == code
    deadline = time.monotonic() + 60
    while engine.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not engine.exists()
