"""Reading an Eagle3 draft directory without torch: configuration, tensor headers, and whether Quark can be let loose on it.

Only safetensors headers are read. Both ways of writing an Eagle3 configuration are understood: vLLM's flat one (`architectures` names an
Eagle3 class) and speculators' (`speculators_model_type: eagle3`, the model's own settings below `transformer_layer_config`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from lab.errors import LabError

#: Bytes of one element of the safetensors types that drafts use.
SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1}
FLOATS = ("F64", "F32", "BF16", "F16")
#: The format of Eagle3 checkpoints from before safetensors.
PICKLE = "pytorch_model.bin"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Header:
    """One tensor as its file's header describes it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * SIZES.get(self.dtype, 4)


@dataclass(frozen=True)
class Draft:
    """A draft directory: config.json as written, its weight files, and tensor name to header (empty for a pickled draft)."""

    folder: Path
    config: Mapping[str, Any]
    files: tuple[Path, ...]
    tensors: Mapping[str, Header]

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration with a speculators draft's layer settings beside the others."""
        return {**self.config.get("transformer_layer_config", {}), **self.config}

    @property
    def linears(self) -> list[str]:
        """Names of the weights that Quark takes for a linear layer's, excluded ones included."""
        return [name for name, header in self.tensors.items() if is_linear(name, header)]


def is_linear(name: str, header: Header) -> bool:
    """Whether a tensor is the weight of a linear layer: two-dimensional, and no embedding."""
    return name.endswith(".weight") and len(header.shape) == 2 and "embed" not in name and not name.removesuffix(".weight").endswith("norm")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or the `LabError` that names the file and the place."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise LabError(f"{path} is not readable as JSON.", why=f"{error}.", todo="Fetch the file again.") from error
    except OSError as error:
        raise LabError(f"{path} cannot be read.", why=f"{error.strerror}.") from error
    if not isinstance(found, dict):
        raise LabError(f"{path} does not hold a JSON object.", todo="Fetch the file again.")
    return found


def _not_eagle3(folder: Path, why: str) -> LabError:
    todo = "Give the folder of an Eagle3 draft: config.json beside its weights, its `architectures` naming an Eagle3 model."
    return LabError(f"{folder} is not an Eagle3 draft directory.", why=why, todo=todo)


def _weight_files(folder: Path) -> tuple[Path, ...]:
    index = folder / INDEX
    if not index.exists():
        return tuple(sorted(folder.glob("*.safetensors")))
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict):
        raise LabError(f"{index} has no weight_map.", todo="Fetch the file again.")
    files = tuple(folder / str(name) for name in sorted(set(listed.values())))
    missing = [path.name for path in files if not path.exists()]
    if missing:
        raise LabError(f"{folder} lacks {', '.join(missing)}.", why=f"{INDEX} lists it.", todo="Fetch the missing files.")
    return files


def _headers(files: tuple[Path, ...]) -> dict[str, Header]:
    found = {}
    for path in files:
        try:
            with safe_open(path, framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118  (not a mapping)
                    part = opened.get_slice(name)
                    found[name] = Header(part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise LabError(f"{path} is damaged or cut short.", why=f"{error}.", todo="Fetch the file again.") from error
    return found


def read_draft(folder: Path) -> Draft:
    """The Eagle3 draft in `folder`; a `LabError` where it is none, or where a file is missing or broken. Quantised ones are read too."""
    if not folder.is_dir():
        raise _not_eagle3(folder, "There is no such folder.")
    if not (folder / "config.json").exists():
        raise _not_eagle3(folder, "It has no config.json.")
    config = read_json(folder / "config.json")
    names = config.get("architectures") or []
    kind = config.get("speculators_model_type")
    if kind != "eagle3" and not any("eagle3" in str(name).lower() for name in names):
        raise _not_eagle3(folder, f"config.json says {kind or ', '.join(map(str, names)) or 'nothing about its architecture'}.")
    files = _weight_files(folder)
    if not files and not (folder / PICKLE).exists():
        raise _not_eagle3(folder, "It has no weights: neither *.safetensors nor pytorch_model.bin.")
    draft = Draft(folder, config, files, _headers(files))
    if draft.files and not draft.linears:
        raise _not_eagle3(folder, "Its weights hold no linear layer.")
    return draft


def check_quantisable(draft: Draft) -> None:
    """Raise the `LabError` for a draft that must not be quantised: quantised already, or useless to vLLM as it is."""
    settings = draft.settings
    strange = sorted({header.dtype for name, header in draft.tensors.items() if name.endswith(".weight")} - set(FLOATS))
    if settings.get("quantization_config") or strange:
        method = (settings.get("quantization_config") or {}).get("quant_method") or ", ".join(strange) or "an unnamed method"
        raise LabError(
            f"{draft.folder} is already quantised ({method}).",
            why="Quantising twice adds the errors of both.",
            todo="Start from the draft in BF16.",
        )
    whole, own = settings.get("vocab_size"), settings.get("draft_vocab_size")
    if draft.tensors and whole and own and own != whole and not any(name.split(".")[-1] == "d2t" for name in draft.tensors):
        raise LabError(
            f"{draft.folder} has no d2t, the map from its {own} draft tokens to the target's {whole}.",
            why="vLLM would serve it without a word and accept next to nothing.",
            todo="Export the draft again with d2t and t2d.",
        )
