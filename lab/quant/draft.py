"""Reading an Eagle3 draft directory without torch: configuration, tensor headers, and whether Quark can be let loose on it.

Only safetensors headers and `d2t` are read. Both ways of writing an Eagle3 configuration are understood: vLLM's flat one
(`architectures` names an Eagle3 class) and speculators' (`speculators_model_type: eagle3`, the model's own settings below
`transformer_layer_config`).
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
        return {**(self.config.get("transformer_layer_config") or {}), **self.config}

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
    except (ValueError, RecursionError) as error:
        raise LabError(f"{path} is not readable as JSON.", why=f"{error}.", todo="Fetch the file again.") from error
    except OSError as error:
        raise LabError(f"{path} cannot be read.", why=f"{error.strerror}.") from error
    if not isinstance(found, dict):
        raise LabError(f"{path} does not hold a JSON object.", todo="Fetch the file again.")
    return found


def _not_eagle3(folder: Path, why: str) -> LabError:
    todo = "Give the folder of an Eagle3 draft: config.json beside its weights, its `architectures` naming an Eagle3 model."
    return LabError(f"{folder} is not an Eagle3 draft directory.", why=why, todo=todo)


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor name to file name, as the index lists them; None without an index."""
    index = folder / INDEX
    if not index.exists():
        return None
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
        raise LabError(f"{index} has no weight_map.", why="It should say of each tensor which file holds it.", todo="Fetch the file again.")
    missing = [name for name in sorted(set(listed.values())) if not (folder / name).is_file()]
    if missing:
        raise LabError(f"{folder} lacks {', '.join(missing)}.", why=f"{INDEX} lists it.", todo="Fetch the missing files.")
    return listed


def _config(folder: Path) -> dict[str, Any]:
    """config.json, whose parts that are looked into are what they should be; null stands for a part that is not there."""
    config = read_json(folder / "config.json")
    for name, kind, words in (("architectures", list, "list"), ("transformer_layer_config", dict, "object")):
        if config.get(name) is not None and not isinstance(config[name], kind):
            raise LabError(f"{folder / 'config.json'} is damaged.", why=f"Its {name} is no {words}.", todo="Fetch the file again.")
    return config


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
    try:
        there = folder.is_dir()
    except OSError as error:  # a name that is too long, a folder above it that may not be entered
        raise _not_eagle3(folder, f"{error.strerror}.") from error
    if not there:
        raise _not_eagle3(folder, "There is no such folder.")
    if not (folder / "config.json").exists():
        raise _not_eagle3(folder, "It has no config.json.")
    config = _config(folder)
    names = config.get("architectures") or []
    kind = config.get("speculators_model_type")
    if kind != "eagle3" and not any("eagle3" in str(name).lower() for name in names):
        raise _not_eagle3(folder, f"config.json says {kind or ', '.join(map(str, names)) or 'nothing about its architecture'}.")
    listed = _weight_map(folder)
    files = tuple(sorted(folder.glob("*.safetensors")) if listed is None else (folder / name for name in sorted(set(listed.values()))))
    if not files and not (folder / PICKLE).exists():
        raise _not_eagle3(folder, "It has no weights: neither *.safetensors nor pytorch_model.bin.")
    draft = Draft(folder, config, files, _headers(files))
    if draft.files and not draft.linears:
        raise _not_eagle3(folder, "Its weights hold no linear layer.")
    if gone := sorted(set(listed or ()) - set(draft.tensors)):
        why = f"{INDEX} lists it, and no file holds it."
        raise LabError(f"{folder} lacks {', '.join(gone)}.", why=why, todo="Fetch the weights again.")
    return draft


def check_quantisable(draft: Draft) -> None:
    """Raise the `LabError` for a draft that must not be quantised: quantised already, or useless to vLLM as it is."""
    settings = draft.settings
    strange = sorted({header.dtype for name, header in draft.tensors.items() if name.endswith(".weight")} - set(FLOATS))
    if settings.get("quantization_config") or strange:
        said = settings.get("quantization_config")
        method = (said.get("quant_method") if isinstance(said, Mapping) else said) or ", ".join(strange) or "an unnamed method"
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
    _check_map(draft, whole, own)


def _check_map(draft: Draft, whole: Any, own: Any) -> None:
    """Raise the `LabError` for a d2t that is not what vLLM takes it for: what to add to each draft token's id for the target's."""
    name = next((name for name in draft.tensors if name.split(".")[-1] == "d2t"), None)
    if name is None or not isinstance(whole, int) or not isinstance(own or whole, int):
        return
    header, todo = draft.tensors[name], "Export the draft again with d2t and t2d."
    if header.shape != (own or whole,):
        shape = "x".join(map(str, header.shape)) or "one"
        why = f"It holds {shape} numbers for {own or whole} draft tokens."
        raise LabError(f"The d2t of {draft.folder} does not fit its config.json.", why=why, todo=todo)
    if header.dtype not in ("F64", "F32", "U8") and not header.dtype.startswith("I"):  # of the short floats none tells all tokens apart
        raise LabError(f"The d2t of {draft.folder} holds {header.dtype} numbers, not whole ones.", todo=todo)
    wrong = 0
    for path in draft.files:
        with safe_open(path, framework="numpy") as opened:
            if name in opened.keys():  # noqa: SIM118  (not a mapping)
                wrong = sum(not 0 <= token + further < whole for token, further in enumerate(opened.get_tensor(name).tolist()))
    if wrong:
        why = f"{wrong} of its {own or whole} draft tokens become ids that the target's {whole} do not have."
        raise LabError(f"The d2t of {draft.folder} leads out of the target's vocabulary.", why=why, todo=todo)
