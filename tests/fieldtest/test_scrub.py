"""Nothing secret leaves: planted in every form and place, looked for in every byte of the archive."""

from __future__ import annotations

import json
import shlex
import zipfile
from pathlib import Path

import pytest

from lab.errors import LabError
from lab.fieldtest import archive, scrub

ENVIRONMENT = {
    "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwx",
    "VLLM_API_KEY": 'a "quoted"/key & more',
    "MY_PASSWORD": "hunter2",
    "SOMETHING": "Zx9Kq2Lm8Np4Rt6Vw1Yb3Cd5Ef",
    "HOME": "/data/people/mabel",
    "USER": "mabel",
    "PATH": "/usr/bin:/bin",
    "LD_LIBRARY_PATH": "/opt/rocm/lib",
    "VLLM_ROCM_USE_AITER": "1",
    "XDG_SESSION_TYPE": "wayland",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTORCH_HIP_ALLOC_CONF": "expandable_segments:True",
}


@pytest.fixture
def scrubber() -> scrub.Scrubber:
    return scrub.of_machine(ENVIRONMENT, home=Path("/data/people/mabel"), user="mabel", host="node17.cluster.example")


@pytest.mark.parametrize(
    "planted",
    [
        "hf_abcdefghijklmnopqrstuvwx",
        json.dumps({"key": 'a "quoted"/key & more'}),
        json.dumps(json.dumps({"key": 'a "quoted"/key & more'})),
        "a &quot;quoted&quot;/key &amp; more",
        "?q=a%20%22quoted%22%2Fkey%20%26%20more",
        "the value Zx9Kq2Lm8Np4Rt6Vw1Yb3Cd5Ef in a line",
        "login hunter2 ok",
        "/data/people/mabel/.cache/eagle3-lab/logs/a.log",
        "user mabel on node17.cluster.example (node17)",
    ],
)
def test_what_the_machine_knows_is_removed(scrubber: scrub.Scrubber, planted: str) -> None:
    assert scrubber.leaks(planted) > 0, "planted, and seen"
    clean = scrubber.text(f"before {planted} after")
    assert scrubber.leaks(clean) == 0
    assert clean.startswith("before ")
    assert clean.endswith(" after")
    for secret in ("hunter2", "quoted", "mabel", "node17", "abcdefghij", "Zx9Kq"):
        assert secret not in clean


@pytest.mark.parametrize(
    ("planted", "secret"),
    [
        ("Authorization: Bearer abc.def-123", "abc.def-123"),
        ("{'authorization': 'Basic dXNlcjpwYXNz'}", "dXNlcjpwYXNz"),
        ("vllm serve m --api-key s3cret-value --port 1", "s3cret-value"),
        ("'--api-key', 's3cret-value'", "s3cret-value"),
        ('["--api-key", "s3cret-value"]', "s3cret-value"),
        ("api_key=['s3cret-value'], port=1", "s3cret-value"),
        ('{"password": "two words"}', "two words"),
        ('{\\"password\\": \\"two words\\"}', "two words"),
        ('{"access_token": "s3cret-value"} HF_TOKEN=s3cret-value', "s3cret"),
        ("WANDB_API_KEY=0123456789abcdef0123", "0123456789abcdef"),
        ("http://alice:pass1@proxy:3128/", "alice"),
        ("/home/alice/models and /Users/bob/x", "alice"),
        ("/home/alice/models and /Users/bob/x", "bob"),
        ("ghp_0123456789abcdefghij", "0123456789"),
        ("AKIAIOSFODNN7EXAMPLE", "IOSFODNN"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.sflKxwRJ", "sflKxwRJ"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----", "MIIE"),
        ("-----BEGIN PRIVATE KEY-----\nMIIE cut off", "MIIE"),
    ],
)
def test_what_looks_like_a_secret_anywhere_is_removed(planted: str, secret: str) -> None:
    clean = scrub.Scrubber().text(f"a {planted} b")
    assert secret not in clean
    assert clean.startswith("a ")


@pytest.mark.parametrize(
    "text",
    [
        '{"token_ids": [1, 2, 3], "prompt_tokens": 5, "eos_token": "<|im_end|>", "tokenizer": "HuggingFaceTB/SmolLM2-135M-Instruct"}',
        "vllm serve amd/Kimi-K2.5-MXFP4 --tensor-parallel-size 4 --scheduler-cls lab.vllm_plugin.tracing.TracingScheduler",
        '{"sha256": {"model.safetensors": "0a1b2c3d4e5f60718293a4b5c6d7e8f90a1b2c3d4e5f60718293a4b5c6d7e8f9"}, "key": "0123456789abcdef"}',
        "VLLM_ROCM_USE_AITER=1 PYTORCH_HIP_ALLOC_CONF=expandable_segments:True on wayland, false, /opt/rocm/lib",
        '<b data-token="Hello there">Time per output token: median, bar to p99</b> {"token": "something"} bonus_token=recovered',
        "hf_split=None, hf_output_len=None, sk-1, task-based-schedulers-are-fine",
        "INFO 11-30 02:00:00 [core.py:97] root user, max_tokens: 128, Draft tokens are greedy.",
        "<td>Eagle3 BF16, K=4</td><a href='https://github.com/vllm-project/vllm/pull/39616'>x</a>",
    ],
)
def test_the_rest_stays_as_it_is(scrubber: scrub.Scrubber, text: str) -> None:
    assert scrubber.text(text) == text


def test_the_archive_holds_no_secret_and_everything_else(tmp_path: Path, scrubber: scrub.Scrubber) -> None:
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    secrets = [value for name, value in ENVIRONMENT.items() if name in ("HF_TOKEN", "VLLM_API_KEY", "MY_PASSWORD", "SOMETHING")]
    (folder / "a.json").write_text(json.dumps({"environment": ENVIRONMENT, "speed": 12.5}))
    (folder / "logs" / "mabel-node17.log").write_text(f"{shlex.join(secrets)}\nready\n" + "x" * archive.MOST_LOG)
    (folder / "b.csv").write_text("hw,tok/s\nMI355X,1.5\n")
    (folder / "weights.safetensors").write_bytes(b"\0hf_abcdefghijklmnopqrstuvwx")
    (folder / "link.json").symlink_to("/etc/passwd")
    (folder / ".lock").write_text("")
    (folder / "earlier-1").mkdir()
    (folder / "earlier-1" / "doctor.txt").write_text("another machine's name, which nobody knows here")
    page = f"<p>{ENVIRONMENT['HF_TOKEN']}</p>{archive.SCRIPT}"
    target = archive.pack(folder, tmp_path / "out" / "back.zip", scrubber, page)
    with zipfile.ZipFile(target) as made:
        names = made.namelist()
        held = {name: made.read(name).decode() for name in names}
    assert names == [f"back/{one}" for one in ("report.html", "a.json", "b.csv", "logs/USER-HOST.log", "LEFT-OUT.txt")]
    for name, text in held.items():
        assert scrubber.leaks(text.replace(archive.plots.script(), "")) == 0, name
    raw = target.read_bytes()
    assert b"mabel" not in raw
    assert str(tmp_path).encode() not in raw
    assert json.loads(held["back/a.json"])["speed"] == 12.5, "still JSON"
    assert "characters left out" in held["back/logs/USER-HOST.log"]
    assert "weights.safetensors: not a text" in held["back/LEFT-OUT.txt"]
    assert "link.json: a link" in held["back/LEFT-OUT.txt"]
    assert "root:x:0" not in "".join(held.values())
    assert archive.plots.script() in held["back/report.html"], "the charts' script is whole"


def test_a_secret_that_stays_means_no_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scrubber: scrub.Scrubber) -> None:
    """The second look is a real one: a scrubber that misses something is caught."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a.txt").write_text("hf_abcdefghijklmnopqrstuvwx")
    monkeypatch.setattr(scrub.Scrubber, "text", lambda _self, text: text)
    with pytest.raises(LabError, match="still holds something secret"):
        archive.pack(tmp_path / "run", tmp_path / "back.zip", scrubber, "")
    assert list(tmp_path.glob("*")) == [tmp_path / "run"]


def test_generic_names_stay_words() -> None:
    found = scrub.of_machine({"HOME": "/root"}, home=Path("/root"), user="root", host="localhost")
    assert found.text("root and localhost in /root/models") == "root and localhost in ~/models"
