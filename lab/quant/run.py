"""`quantize_draft`: an Eagle3 draft in BF16 to one in FP8, by AMD Quark, whole or not at all.

The work happens in a staging folder beside the output: Quark in one child process, vLLM's opinion of the result in another. Only a result
that passed every check is renamed to the output. An interruption (Ctrl-C, SIGTERM, an exception from `on_progress`) removes the staging
folder; after SIGKILL it stays, unlocked, and the next run with the same output removes it.
"""

from __future__ import annotations

import fcntl
import glob
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from lab import provenance
from lab.errors import LabError, missing_dependency
from lab.quant import child
from lab.quant.draft import INDEX, PICKLE, check_quantisable, read_draft
from lab.quant.report import REPORT, QuantReport, Tensor

#: The one scheme: E4M3 weights with a scale per output channel, activations quantised per token at run time, no calibration.
SCHEME = "ptpc_fp8"
#: Files beside the weights that a draft may need; training state, sources and read-me files stay behind.
SIDE_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.py", "LICENSE*", "NOTICE*")
#: Room for configuration, report and index on top of the weights.
SPARE_BYTES = 16 << 20


@contextmanager
def _staging(output: Path) -> Iterator[Path]:
    """A locked folder beside `output`, removed at the end; unlocked ones that a killed process left are removed first."""
    prefix = f".{output.name}.tmp-"
    for old in output.parent.glob(f"{glob.escape(prefix)}*"):
        with _lock(old) as free:
            if free:
                shutil.rmtree(old, ignore_errors=True)
    stage = Path(tempfile.mkdtemp(dir=output.parent, prefix=prefix))
    try:
        with _lock(stage):
            yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)


@contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Hold the lock of a staging folder; False where its owner is alive."""
    try:
        with (folder / "lock").open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield True
    except (BlockingIOError, FileNotFoundError, NotADirectoryError):
        yield False


def _no_space(folder: Path, why: str) -> LabError:
    return LabError(f"There is no space left for the FP8 draft in {folder}.", why=why, todo="Free some space or choose another --output.")


def _unwritable(output: Path, error: OSError) -> LabError:
    return LabError(f"{output} cannot be written.", why=f"{error.strerror or error}.", todo="Choose another --output.")


def _check_space(folder: Path, need: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < need:
        raise _no_space(folder, f"It may need {need / 1e6:.0f} MB; {free / 1e6:.0f} MB are free.")


def _result(stage: Path, name: str, code: int, tail: str, what: str, output: Path) -> dict[str, Any]:
    """The JSON that a child left, or the error it reported or died of."""
    path = stage / name
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if "No space left on device" in tail or "os error 28" in tail.lower():
            raise _no_space(output.parent, "The disk filled up meanwhile.") from error
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise LabError(f"{what} failed ({ended}).", why=f"Its last words:\n{tail.strip()}\n", todo="Nothing was written.") from error
    if "error" in result:
        what, why, todo = result["error"]
        raise LabError(what, why=why, todo=todo)
    return result


def quantize_draft(source: Path, output: Path, on_progress: Callable[[str], None] | None = None, *, scheme: str = SCHEME) -> QuantReport:
    """Make the FP8 draft `output` from the draft `source` and report what changed.

    `on_progress` gets a line of text now and then; what it raises cancels the work. The output folder must not exist. `fc` and `lm_head`
    keep their precision, and so does everything that is no linear layer. Raises `LabError` for a source that is no unquantised Eagle3
    draft, a scheme other than `SCHEME`, an output that exists or does not fit the disk, a missing Quark, and a result that vLLM would
    misread; then there is no output folder.
    """
    say = on_progress or (lambda _text: None)
    source = Path(os.path.realpath(os.path.expanduser(source)))  # pathlib's own would raise for a loop of links, and for ~nobody
    output = Path(os.path.expanduser(output)).absolute()
    if scheme != SCHEME:
        raise LabError(
            f"The lab does not make drafts in the scheme '{scheme}'.",
            why=f"Of Quark's file-to-file schemes, {SCHEME} is the one that vLLM serves for an Eagle3 draft here and on an AMD GPU alike.",
            todo=f"Use {SCHEME}.",
        )
    for path in (source, output):
        if (name := os.fsencode(path)) != str(path).encode("utf-8", "replace"):
            why = "safetensors opens no such files."
            raise LabError(f"The name of the folder {name!r} is not UTF-8.", why=why, todo="Rename it, or choose another.")
    draft = read_draft(source)
    check_quantisable(draft)
    try:
        taken = output.exists() or output.is_symlink()
    except OSError as error:
        raise _unwritable(output, error) from error
    if taken:
        raise LabError(f"{output} exists already.", todo="Remove it or choose another --output.")
    for package in ("quark", "torch"):
        if importlib.util.find_spec(package) is None:
            raise missing_dependency("Quantising a draft", package)
    weights = draft.files or (source / PICKLE,)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        _check_space(output.parent, sum(path.stat().st_size for path in weights) * (1 if draft.files else 2) + SPARE_BYTES)
        with child.termination_as_exit(), _staging(output) as stage:
            return _make(source, output, stage, weights, scheme, say)
    except OSError as error:
        if error.errno == 28:
            raise _no_space(output.parent, "The disk filled up meanwhile.") from error
        raise _unwritable(output, error) from error


def _make(source: Path, output: Path, stage: Path, weights: tuple[Path, ...], scheme: str, say: Callable[[str], None]) -> QuantReport:
    """Stage the source as links, run the two children, write the report, rename."""
    staged = stage / "source"
    staged.mkdir()
    sides = {path for pattern in SIDE_FILES for path in source.glob(pattern) if path.is_file() and path.name not in provenance.RECORDS}
    if not (source / INDEX).exists():
        sides.discard(source / INDEX)
    for path in {*weights, *sides}:
        (staged / path.name).symlink_to(path.resolve())
    code, tail = child.run("lab.quant.worker", str(stage), scheme, on_progress=say)
    made = _result(stage, "result.json", code, tail, "Quantising with AMD Quark", output)
    checked = "not asked: vLLM is not installed"
    if importlib.util.find_spec("vllm") is not None:
        code, tail = child.run("lab.quant.vllm_check", str(stage / "draft"), str(stage / "check.json"), on_progress=say)
        checked = f"vLLM {_result(stage, 'check.json', code, tail, 'Asking vLLM about the result', output)['version']} reads it as meant"
    report = QuantReport(
        scheme=scheme,
        source=str(source),
        tensors=tuple(msgspec.convert(made["tensors"], list[Tensor])),
        exclude=tuple(made["exclude"]),
        checked=checked,
        provenance=provenance.collect(scheme=scheme),
    )
    (stage / "draft" / REPORT).write_text(report.json() + "\n", encoding="utf-8")
    (stage / "draft").chmod(0o755)
    for path in (stage / "draft").glob("*.safetensors"):
        path.chmod(0o644)
    try:
        (stage / "draft").rename(output)
    except OSError as error:
        if output.exists():
            raise LabError(f"{output} exists already.", why="Another process made it meanwhile.") from error
        raise
    say("done")
    return report
