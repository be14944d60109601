"""Bring a recipe's weights to where vLLM can load them: `ensure()` gives a folder, or a hub name that vLLM fetches by itself.

GGUF inside an installed package becomes a BF16 checkpoint in the cache (about 15 s, once), and from that its MLA form; a shipped draft is
used where it lies; an FP8 draft is made by AMD Quark through `lab.quant`, one without a feature level by `cut.py`. All of it is made
atomically, see `store.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path
from typing import Any

from lab.checkpoints.cut import cut
from lab.checkpoints.store import Cancelled, Say, build, check_cancelled
from lab.env import assets, cache_dir
from lab.errors import LabError, disk_full, missing_dependency, require
from lab.recipes.model import Asset, Checkpoint, Cut, Gguf, Hub, Mla, QuarkFp8

__all__ = ["Cancelled", "ensure", "location", "provenance"]

#: BF16 takes 16 bits where the smallest GGUF types take 4 to 5: the space to ask for, as a multiple of the GGUF file.
GGUF_GROWTH = 4


def ensure(checkpoint: Checkpoint, on_progress: Say | None = None, *, cancelled: Callable[[], bool] | None = None) -> str:
    """The local folder of `checkpoint`, made on first use below `cache_dir()/checkpoints`; for weights on the hub, their name.

    `on_progress` gets a short text at each stage. `cancelled` is asked a few times a second; when it says yes, `Cancelled` is raised and
    nothing is left behind. Raises `LabError` for a missing package or asset, a full disk, or a cache that cannot be written.
    """
    say = on_progress or (lambda _text: None)
    weights = checkpoint.weights
    if isinstance(weights, Hub):
        return weights.repo
    if isinstance(weights, Asset):
        return str(_asset(weights))
    folder = cache_dir() / "checkpoints" / checkpoint.name
    if isinstance(weights, Gguf):
        return str(_from_gguf(folder, weights, say, cancelled))
    if isinstance(weights, Mla):
        return str(_as_mla(folder, weights, say, cancelled))
    if isinstance(weights, Cut):
        return str(_without_level(folder, weights, say, cancelled))
    return str(_quantized(folder, weights, say, cancelled))


def location(checkpoint: Checkpoint) -> str:
    """Where `ensure` would put or find it, without making or checking anything."""
    weights = checkpoint.weights
    if isinstance(weights, Hub):
        return weights.repo
    if isinstance(weights, Asset):
        return str(Path(str(assets())) / weights.path)
    return str(cache_dir() / "checkpoints" / checkpoint.name)


def _asset(asset: Asset) -> Path:
    folder = Path(str(assets())) / asset.path
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise LabError(
            f"The draft weights {asset.path} are not in this copy of the lab.",
            why=f"{folder} should hold config.json and a .safetensors file.",
            todo="Take a complete checkout or wheel, or make them with: eagle3-lab train",
        )
    return folder


def _from_gguf(folder: Path, weights: Gguf, say: Say, cancelled: Callable[[], bool] | None) -> Path:
    spec = util.find_spec(weights.package)  # found, not imported: its own dependencies are not needed
    where = spec.submodule_search_locations if spec else None
    if not where:
        raise missing_dependency("The target model", weights.package)
    package = Path(next(iter(where)))
    file = package / weights.filename
    if not file.is_file():
        raise LabError(
            f"The package {weights.package} does not hold {weights.filename}.", todo="Install the version that the lock file names."
        )
    size = file.stat().st_size
    source: dict[str, Any] = {"kind": "gguf", "package": weights.package, "filename": weights.filename, "size": size}
    try:
        source["version"] = metadata.version(weights.package.replace("_", "-"))
    except metadata.PackageNotFoundError:
        source["version"] = "unknown"

    def make(output: Path) -> None:
        for needed in ("torch", "transformers", "gguf", "accelerate"):
            if util.find_spec(needed) is None:
                raise missing_dependency("Preparing the target model", needed)
        say(f"converting {weights.filename} to BF16 (once, about 15 s)")
        script = Path(__file__).with_name("convert.py")
        argv = [sys.executable, "-P", str(script), str(package), weights.filename, str(output)]
        _child(argv, f"{weights.filename} could not be converted to BF16.", output, say, cancelled)

    return build(folder, source, make, need=GGUF_GROWTH * size, say=say, cancelled=cancelled)


def _as_mla(folder: Path, weights: Mla, say: Say, cancelled: Callable[[], bool] | None) -> Path:
    """The target `weights.of` in the form of multi-head latent attention."""
    original = Path(ensure(weights.of, say, cancelled=cancelled))
    recipe = Path(str(assets())) / weights.recipe
    if not recipe.is_file():
        raise LabError(f"The conversion recipe {weights.recipe} is not in this copy of the lab.", todo="Take a complete checkout or wheel.")
    source = {"kind": "mla", "sha256": hashlib.sha256(recipe.read_bytes()).hexdigest(), "of": provenance(str(original)).get("source")}
    source |= {"values": weights.values} if weights.values else {}
    need = 2 * sum(path.stat().st_size for path in original.iterdir() if path.is_file())

    def make(output: Path) -> None:
        say("converting the target to MLA (once, about 10 s)")
        argv = [sys.executable, "-m", "lab.checkpoints.mla", str(original), str(recipe), str(output), "0", str(weights.values)]
        _child(argv, "The target could not be converted to MLA.", output, say, cancelled)

    return build(folder, source, make, need=need, say=say, cancelled=cancelled)


def _child(argv: list[str], failed: str, output: Path, say: Say, cancelled: Callable[[], bool] | None) -> None:
    """Run a script that needs torch in a process of its own and pass its progress on; raises `LabError` (`failed`) if it fails."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)

        def relay() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                say(line.strip())

        reader = threading.Thread(target=relay, daemon=True)
        reader.start()
        try:
            while process.poll() is None:
                check_cancelled(cancelled)
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
            reader.join(timeout=5)
            for stream in (process.stdin, process.stdout):
                if stream:
                    stream.close()
        if process.returncode == 0:
            return
        errors.seek(0)
        text = errors.read()
    if "No space left on device" in text or "os error 28" in text:
        raise disk_full(output.parent)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    why = lines[-1] if lines else f"The conversion ended with exit code {process.returncode}."
    if process.returncode == -9:
        why = "The system ended it, most likely because memory ran out (it needs about 1.5 GB)."
    raise LabError(failed, why=why, todo="Check the installed versions with: pip check")


def _fingerprint(folder: Path) -> str:
    """SHA-256 over names and contents of the files of a small checkpoint."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in (".json", ".safetensors"):
            digest.update(path.name.encode() + b"\0")
            with path.open("rb") as handle:
                while block := handle.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()


def _without_level(folder: Path, weights: Cut, say: Say, cancelled: Callable[[], bool] | None) -> Path:
    """The draft `weights.of`, brought here first if need be, with one level cut off."""
    whole = weights.of.weights
    if isinstance(whole, Hub):
        origin = _download(whole, "Cutting off a feature level of a draft from the hub")
    else:
        origin = Path(ensure(weights.of, say, cancelled=cancelled))
    source = {"kind": "cut", "level": weights.level, "sha256": _fingerprint(origin)}
    need = sum(path.stat().st_size for path in origin.iterdir() if path.is_file())
    return build(folder, source, lambda output: cut(origin, output, weights.level, say), need=need, say=say, cancelled=cancelled)


def _download(weights: Hub, feature: str) -> Path:
    hub = require("huggingface_hub", feature)
    return Path(hub.snapshot_download(weights.repo, revision=weights.revision))


def _quantized(folder: Path, weights: QuarkFp8, say: Say, cancelled: Callable[[], bool] | None) -> Path:
    made_from = weights.source
    origin = _download(made_from, "Quantising a draft from the hub") if isinstance(made_from, Hub) else _asset(made_from)
    source = {"kind": "quark-fp8", "sha256": _fingerprint(origin)}
    need = 2 * sum(path.stat().st_size for path in origin.iterdir() if path.is_file())

    def told(text: str) -> None:
        check_cancelled(cancelled)
        say(text)

    def make(output: Path) -> None:
        told("quantising the draft to FP8 with AMD Quark (once, about a minute)")
        quant = require("lab.quant", "The FP8 draft")
        quant.quantize_draft(origin, output / "draft", on_progress=told)
        for path in list((output / "draft").iterdir()):
            path.rename(output / path.name)
        (output / "draft").rmdir()

    return build(folder, source, make, need=need, say=say, cancelled=cancelled)


def provenance(folder: str) -> dict[str, Any]:
    """What the marker of a folder made by `ensure` says about its origin; empty for any other folder."""
    marker = Path(folder) / "eagle3-lab.json"
    return json.loads(marker.read_text(encoding="utf-8")) if marker.is_file() else {}
