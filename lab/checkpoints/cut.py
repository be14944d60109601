"""A draft that cannot see one of the target's three levels: the level's columns of `fc` are set to zero, everything else stays.

An Eagle3 draft joins the hidden states of a low, a middle and a high layer of the target by one matrix, `fc`, whose columns are the three
levels side by side (Li et al. 2025, EAGLE-3, section 3.1; vLLM concatenates the auxiliary hidden states in the order of their layers). A
zero column removes its input exactly, so what the draft loses is what it *depends* on. That is not what the level is *worth*: a draft that
was trained without it might have found the same elsewhere.

The file is copied, and the zeros are written into its bytes (all of safetensors' number types write zero as zero bytes), so nothing but
numpy is needed and no other tensor can change. Limits: safetensors only, and `fc` must join exactly three levels.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab import provenance
from lab.errors import LabError
from lab.recipes.model import LEVELS, Level

FC = "fc.weight"
#: Files of a draft beside its weights that a server may need; the lab's own records stay behind.
BESIDE = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")
#: A header longer than this is no safetensors file (the format's own limit).
MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class Fc:
    """Where `fc` lies: its file, the first byte of its data, rows and columns, and bytes of one number."""

    file: Path
    start: int
    rows: int
    columns: int
    size: int


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where its data begin (bytes)."""
    try:
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if not 0 < length <= MAX_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(handle.read(length))
            if not isinstance(header, dict):
                raise ValueError("its header is no JSON object")
    except (OSError, ValueError) as error:
        raise LabError(f"{file} is damaged or no safetensors file.", why=f"{error}.", todo="Fetch the file again.") from error
    return header, 8 + length


def find_fc(folder: Path) -> Fc:
    """The `fc` of the draft in `folder`; raises `LabError` where there is none that joins three levels."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise LabError(f"{folder} holds no .safetensors file, so no feature level can be cut off.")
    for file in files:
        header, begin = _header(file)
        for name, entry in header.items():
            if name != FC and not name.endswith(f".{FC}"):
                continue
            try:
                (rows, columns), (first, last) = entry["shape"], entry["data_offsets"]
            except (KeyError, TypeError, ValueError) as error:
                raise LabError(
                    f"{file} is damaged.", why=f"Its header does not say where {name} is.", todo="Fetch the file again."
                ) from error
            size, rest = divmod(last - first, max(rows * columns, 1))
            if rest or not size or file.stat().st_size < begin + last:
                raise LabError(f"{file} is damaged or cut short.", why=f"{name} has no room for {rows} x {columns} numbers.")
            return Fc(file, begin + first, rows, columns, size)
    why = f"None of its tensors is called {FC}: Eagle3 drafts join the target's levels there."
    raise LabError(f"{folder} has no feature levels that could be cut off.", why=why, todo="Give the folder of an Eagle3 draft.")


def levels(folder: Path, fc: Fc) -> int:
    """How many levels the draft's `fc` joins: as config.json says, else as many as the target's width goes into its columns."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LabError(f"{folder / 'config.json'} cannot be read.", why=f"{error}.", todo="Fetch the file again.") from error
    config = config if isinstance(config, dict) else {}
    config = {**(config.get("transformer_layer_config") or {}), **config}
    ids = config.get("eagle_aux_hidden_state_layer_ids") or (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    wide = config.get("target_hidden_size") or config.get("hidden_size")
    if isinstance(wide, int) and wide > 0 and fc.columns % wide == 0:
        return fc.columns // wide
    return int(config.get("num_aux_hidden_states") or (len(ids) if ids else 0) or 3)


def cut_columns(fc: Fc, file: Path, level: Level, count: int = len(LEVELS)) -> tuple[int, int]:
    """Set the columns of `level` to zero in `file`, a copy of `fc.file`; the columns, from and to (exclusive)."""
    wide = fc.columns // count
    first = LEVELS.index(level) * wide
    import numpy as np  # late: a dry run and --help do not need it

    matrix = np.memmap(file, np.uint8, "r+", fc.start, (fc.rows, fc.columns * fc.size))
    matrix[:, first * fc.size : (first + wide) * fc.size] = 0
    matrix.flush()
    return first, first + wide


def cut(source: Path, output: Path, level: Level, say: Callable[[str], None]) -> None:
    """Write the draft of `source` without `level` into the existing folder `output`. Raises `LabError` for a draft without three levels."""
    fc = find_fc(source)
    count = levels(source, fc)
    if count != len(LEVELS) or fc.columns % count or not math.prod((fc.rows, fc.columns)):
        raise LabError(
            f"The draft in {source} does not join three feature levels.",
            why=f"Its fc has {fc.columns} columns for {count} level{'s' if count != 1 else ''}.",
            todo="Only a draft with a low, a middle and a high level can have one of them cut off.",
        )
    say(f"cutting off the {level} feature level")
    beside = {path for pattern in BESIDE for path in source.glob(pattern) if path.is_file() and path.name not in provenance.RECORDS}
    for path in {*beside, *source.glob("*.safetensors")}:
        shutil.copyfile(path, output / path.name)
    cut_columns(fc, output / fc.file.name, level, count)
