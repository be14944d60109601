"""The command: exit codes, JSON, machines that are not this one, servers, and the machine's own description."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lab.doctor import gather, machine
from lab.doctor.cli import app
from lab.doctor.server import difference, from_metrics
from lab.errors import LabError

ROOT = Path(__file__).parent.parent.parent
GOOD = "vllm serve meta-llama/Llama-3.1-8B-Instruct --no-enable-prefix-caching --max-model-len 8192"
BAD = """vllm serve x/y --speculative-config '{"method": "eagle3", "num_speculative_tokens": 0}'"""


def run(*argv: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(argv))
    if isinstance(result.exception, LabError):
        raise result.exception
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture(autouse=True)
def empty_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def test_exit_codes() -> None:
    assert run(GOOD, "--gpu", "9.0", "--vllm", "0.32")[0] == 0
    code, said = run(BAD, "--gpu", "9.0")
    assert code == 3
    assert "[k-range]" in said
    assert run("vllm serve x/y", "--gpu", "9.0", "--vllm", "0.32")[0] == 0
    assert run("vllm serve x/y", "--gpu", "9.0", "--vllm", "0.32", "--strict")[0] == 3  # the prefix cache
    assert run("--no-such-flag")[0] == 2
    with pytest.raises(LabError, match="neither a recipe nor a command line"):
        run("kimi")[0]
    with pytest.raises(LabError, match="no processor"):
        run(GOOD, "--gpu", "abacus")


def test_expected_warnings_do_not_count_as_strict() -> None:
    assert run("kimi-k2.5", "--gpu", "MI355X", "--strict")[0] == 0
    with pytest.raises(LabError, match="There is no recipe called"):
        run("vllm serve m", "--draft", "bf16")


def test_json_is_for_scripts() -> None:
    code, said = run("kimi-k2.5", "--draft", "bf16", "--gpu", "MI355X", "--json")
    assert code == 0
    (report,) = json.loads(said)["reports"]
    assert report["format"] == "eagle3-lab-doctor"
    assert report["counts"]["error"] == 0
    open_backend = next(one for one in report["findings"] if one["rule"] == "draft-backend-open")
    assert open_backend["links"] == ["https://github.com/vllm-project/vllm/issues/47854"]
    assert open_backend["expected"]
    assert open_backend["reads"].startswith("platforms/rocm.py")


def test_a_folder_on_the_command_line_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text("{")
    config = json.dumps({"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3})
    code, said = run(f"vllm serve x/y --no-enable-prefix-caching --speculative-config '{config}'")
    assert code == 3
    assert "[config-unreadable]" in said
    assert "Traceback" not in said


def test_words_after_two_dashes() -> None:
    assert (
        "[k-range]" in run("--gpu", "9.0", "--", "vllm", "serve", "m/n", "--speculative-config", '{"method": "eagle3", "model": "a/b"}')[1]
    )


def test_every_rule_is_listed() -> None:
    assert "block-size" in run("--rules")[1]


def test_it_runs_in_the_light_installation() -> None:
    """No torch, no vLLM, no transformers: the command still examines."""
    code = (
        "import sys\n"
        "for name in ('torch', 'vllm', 'transformers', 'quark', 'gguf', 'accelerate', 'huggingface_hub'): sys.modules[name] = None\n"
        "sys.argv = ['eagle3-lab', 'doctor', 'smollm2', '--draft', 'bf16']\n"
        "from lab.cli import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "0 errors" in done.stdout


def test_the_hub_cache_is_found(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"vocab_size": 7}')
    assert gather.find_model("a/b", draft=False).config == {"vocab_size": 7}
    assert gather.find_model("a/c", draft=False).config == {}
    refs = tmp_path / "hub" / "models--a--b" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    assert gather.in_cache("a/b") == snapshot
    assert gather.find_model("a/b", draft=False, within=[tmp_path / "elsewhere"]).config == {}


def test_a_page_opens_no_folder_of_a_visitors_choosing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"secret": 1}')
    os.symlink(tmp_path, tmp_path / "link")
    for name in (str(tmp_path), f"{tmp_path}/link", f"{tmp_path}/../{tmp_path.name}", "/etc", "~", "../..", "\0"):
        assert gather.find_model(name, draft=True, within=[tmp_path / "inside"]).config == {}
        assert gather.find_model(name, draft=True, within=[tmp_path / "inside"]).problems == ()


METRICS = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}
# TYPE vllm:spec_decode_num_draft_tokens counter
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {tokens}
# TYPE vllm:spec_decode_num_accepted_tokens counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {accepted}
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="16",enable_prefix_caching="{prefix}",engine="0"}} 1.0
"""


@pytest.fixture
def server() -> Iterator[Callable[..., str]]:
    """A small HTTP server with the four paths that the doctor asks."""
    started = []

    def start(answers: dict[str, Any]) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = answers.get(self.path.partition("?")[0])
                raw = (body if isinstance(body, str) else json.dumps(body)).encode() if body is not None else b"no"
                self.send_response(200 if body is not None else 404)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: object) -> None: ...

        made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        started.append(made)
        return f"http://127.0.0.1:{made.server_port}"

    yield start
    for one in started:
        one.shutdown()
        one.server_close()


def answers(**values: Any) -> dict[str, Any]:
    numbers = {"drafts": 1000, "tokens": 3000, "accepted": 900, "prefix": "False", **values}
    return {"/v1/models": {"data": [{"id": "m"}]}, "/version": {"version": "0.32.0"}, "/metrics": METRICS.format(**numbers)}


def test_a_running_server(server: Callable[..., str]) -> None:
    code, said = run(server(answers()))
    assert code == 0, said
    assert "900 of 3000 draft tokens accepted" in said
    code, said = run(server(answers(accepted=5, prefix="True")))
    assert code == 3
    assert "[acceptance-near-zero]" in said
    assert "[server-prefix-caching]" in said
    rocm = {
        **answers(),
        "/server_info": {
            "vllm_config": {"speculative_config": {"attention_backend": "FLASH_ATTN"}},
            "vllm_env": {"VLLM_ROCM_USE_AITER": False},
            "system_env": {"hip_compiled_version": "7.2"},
        },
    }
    code, said = run(server(rocm))
    assert code == 3
    assert "[server-aiter-off]" in said
    assert "[server-draft-backend]" in said


def test_a_server_that_is_none(server: Callable[..., str]) -> None:
    with pytest.raises(LabError, match=r"no OpenAI-style server|does not answer"):
        run("http://127.0.0.1:9")
    with pytest.raises(LabError, match=r"shows no /metrics"):
        run(server({"/v1/models": {"data": [{"id": "m"}]}}))
    with pytest.raises(LabError, match="Prometheus"):
        run(server({**answers(), "/metrics": "vllm:spec_decode_num_drafts_total{ broken"}))
    assert run(server({**answers(), "/server_info": "[1]", "/version": "x"}))[0] == 0


def test_counters_of_a_time() -> None:
    before, after = (
        from_metrics("u", METRICS.format(drafts=d, tokens=3 * d, accepted=a, prefix="False")) for d, a in ((100, 90), (600, 91))
    )
    between = difference(before, after).counters
    assert (between.drafts, between.accepted_tokens, between.accepted_per_pos) == (500, 1, (1,))
    assert difference(after, before) is before  # it was started anew in between


def test_processors_are_read_from_the_kernel(tmp_path: Path) -> None:
    nodes = tmp_path / "class/kfd/kfd/topology/nodes"
    for place, version in enumerate((0, 90500, 90500)):
        (nodes / str(place) / "mem_banks/0").mkdir(parents=True)
        (nodes / str(place) / "properties").write_text(
            f"cpu_cores_count 0\nsimd_count {64 * (version > 0)}\ngfx_target_version {version}\n"
        )
        (nodes / str(place) / "mem_banks/0/properties").write_text("heap_type 1\nsize_in_bytes 309220868096\n")
    firmware = tmp_path / "class/drm/card0/device/fw_version"
    firmware.mkdir(parents=True)
    (firmware / "mec_fw_version").write_text("0x000000a4\n")
    (tmp_path / "module/amdgpu").mkdir(parents=True)
    (tmp_path / "module/amdgpu/version").write_text("6.16.6\n")
    assert machine.amd(tmp_path) == {"gpus": 2, "arch": "gfx950", "gpu_memory": 309220868096, "driver": "6.16.6", "mec": 164}
    assert machine.amd(tmp_path / "none")["gpus"] == 0
    assert [machine.gfx(one) for one in (90402, 90010, 120001)] == ["gfx942", "gfx90a", "gfx1201"]


def test_nvidia_smi_is_read() -> None:
    assert machine.nvidia("9.0, 143771, 570.1\n9.0, 143771, 570.1\n") == {
        "gpus": 2,
        "arch": "9.0",
        "gpu_memory": 143771 << 20,
        "driver": "570.1",
    }
    assert machine.nvidia("No devices were found\n") == {"gpus": 0}
    assert machine.nvidia("[N/A], [N/A], [N/A]\n") == {"gpus": 0}


def test_secrets_are_not_looked_at() -> None:
    found = machine.relevant({"VLLM_API_KEY": "s3cret", "HF_TOKEN": "s3cret", "VLLM_ROCM_USE_AITER": "1", "PATH": "x"})
    assert found == {"VLLM_ROCM_USE_AITER": "1"}
    assert machine.this_machine().platform in ("cpu", "rocm", "cuda")
