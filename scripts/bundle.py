"""Everything that a venue without a network needs, in one folder: `make bundle` (or `python scripts/bundle.py FOLDER`).

    wheels/         each package of requirements/lab.lock for this Python and machine, and the lab itself, built from this checkout
    checkpoints/    the default recipe's prepared weights, as they are in the cache (their sources are among the wheels, too)
    lab.lock        the lines that apply to this Python
    SHA256SUMS      of every file
    install.sh      checks the sums, makes `eagle3-lab/` beside itself with pip's --no-index, copies the weights, says how to start

The folder is for the same kind of machine: the same operating system and processor, the same minor version of Python. It can be interrupted
and repeated: wheels that are there are kept. Needs the environment of `make lab` (its pip downloads, its cache holds the weights).
Limits: Linux; Debian's libnuma1 and a Python with venv must be on the machine, as for `make lab`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import stat
import subprocess
import sys
from pathlib import Path

from machine import ROOT, SetupError
from packages import CPU_INDEX, environment, normal, python, read_lock

#: Packages that pip is asked for at once: each call takes seconds to begin with.
BATCH = 30
DEFAULT = ROOT / "dist" / "bundle"
#: Of an install script: the folder's checkpoints go into the cache, beside what is there.
CHECKPOINTS = """cache=${EAGLE3_LAB_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/eagle3-lab}
mkdir -p "$cache/checkpoints"
for one in "$here"/checkpoints/*; do
    [ -d "$one" ] || continue
    [ -e "$cache/checkpoints/$(basename "$one")" ] || cp -R "$one" "$cache/checkpoints/"
done"""
INSTALL = """#!/bin/sh
# Installs Eagle3 Lab from this folder, without a network: sh install.sh [TARGET]. PYTHON=/path/to/python3 names the Python to use.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=${{1:-$here/eagle3-lab}}
python=${{PYTHON:-python{minor}}}
say() {{ printf '%s\\n' "$*"; }}
command -v "$python" >/dev/null 2>&1 || python=python3
ask='import platform, sys; print(sys.version_info[0], sys.version_info[1], platform.machine(), sep=".")'
found=$("$python" -c "$ask" 2>/dev/null || true)
if [ "$found" != "{minor}.{machine}" ]; then
    say "This bundle is for Python {minor} on {machine}; found: ${{found:-no Python}}."
    say "Name another: PYTHON=/path/to/python{minor} sh install.sh"
    exit 1
fi
say "Checking the files"
(cd "$here" && sha256sum --quiet -c SHA256SUMS) || {{ say "A file is damaged or missing: copy the folder again."; exit 1; }}
say "Installing into $target"
[ -x "$target/bin/python" ] || "$python" -m venv "$target" || {{
    say "Python could not make an environment (Debian: python{minor}-venv)."
    exit 1
}}
"$target/bin/python" -m pip --disable-pip-version-check --no-input install --quiet --no-index --no-deps --find-links "$here/wheels" \\
    -r "$here/lab.lock" {lab}
{checkpoints}
say "Done. Start the workshop:  $target/bin/eagle3-lab workshop --check  and then  $target/bin/eagle3-lab workshop --host 0.0.0.0"
say "or the page alone:        $target/bin/eagle3-lab app --open"
"""


def pins(version: tuple[int, ...]) -> list[str]:
    """The lock's lines that apply to Python `version`."""
    return [line for stage in read_lock("lab.lock", version) for line in stage.lines]


def wheel_of(pin: str, folder: Path) -> Path | None:
    """The wheel of `name==version` that is in `folder`."""
    name, _, version = pin.partition("==")
    for path in folder.glob("*.whl"):
        parts = path.name.split("-")
        if normal(parts[0]) == normal(name) and parts[1] == version:
            return path
    return None


def download(lines: list[str], folder: Path) -> None:
    """Wheels of the lock that are not there yet, from wherever pip is configured to look, and then from PyTorch's CPU index; raises."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [line for line in lines if wheel_of(line, folder) is None]
    for begin in range(0, len(wanted), BATCH):
        batch = wanted[begin : begin + BATCH]
        print(f"  … {batch[0]} and {len(batch) - 1} more ({begin + len(batch)} of {len(wanted)})", flush=True)
        command = [python(), "-m", "pip", "--disable-pip-version-check", "--no-input", "wheel", "--no-deps", "--quiet", "-w", str(folder)]
        result = subprocess.run([*command, *batch], capture_output=True, text=True, env=environment())
        if result.returncode and any("+cpu" in line for line in batch):
            command += ["--extra-index-url", CPU_INDEX]
            result = subprocess.run([*command, *batch], capture_output=True, text=True, env=environment())
        if result.returncode:
            errors = [line for line in (result.stderr or result.stdout).splitlines() if line.startswith("ERROR")]
            said = errors[-1] if errors else "pip said nothing."
            raise SetupError(f"Packages could not be fetched: {said} Run it again: it goes on from here.")


def build(folder: Path) -> Path:
    """The lab's own wheel, made from this checkout."""
    for old in folder.glob("eagle3_lab-*.whl"):
        old.unlink()
    command = [python(), "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment())
    if result.returncode:
        raise SetupError(f"The lab's wheel could not be built: {result.stderr.strip()[-400:]}")
    return next(folder.glob("eagle3_lab-*.whl"))


def weights(folder: Path) -> list[str]:
    """Copy the default recipe's prepared checkpoints and give their names; what is not prepared is made from the wheels on first use."""
    code = (
        "import json; from lab import checkpoints, recipes; r = recipes.get(recipes.DEFAULT);"
        "print(json.dumps([str(checkpoints.location(c)) for c in (r.target, *r.drafts.values())]))"
    )
    told = subprocess.run([python(), "-c", code], cwd=ROOT, capture_output=True, text=True, env=environment())
    if told.returncode:
        raise SetupError(f"The checkpoints could not be found: {told.stderr.strip()[-400:]}")
    copied = []
    for path in map(Path, json.loads(told.stdout)):
        target = folder / path.name
        if path.is_dir() and (path / "config.json").is_file() and "checkpoints" in path.parts:
            if target.exists():
                shutil.rmtree(target)
            shutil.copytree(path, target)
            copied.append(path.name)
    return copied


def sums(folder: Path) -> None:
    """Write SHA256SUMS over every other file of the bundle."""
    lines = []
    for path in sorted(one for one in folder.rglob("*") if one.is_file() and one.name != "SHA256SUMS"):
        digest = hashlib.sha256()
        with path.open("rb") as handle:
            while block := handle.read(1 << 20):
                digest.update(block)
        lines.append(f"{digest.hexdigest()}  {path.relative_to(folder).as_posix()}")
    (folder / "SHA256SUMS").write_text("\n".join(lines) + "\n", encoding="utf-8")


def bundle(folder: Path, version: tuple[int, ...]) -> None:
    """Make or mend the bundle in `folder`."""
    lines = pins(version)
    wheels = folder / "wheels"
    download(lines, wheels)
    kept = {wheel_of(line, wheels) for line in lines}
    for path in wheels.glob("*.whl"):
        if path not in kept:
            path.unlink()  # of another lock, or an older lab
    lab = build(wheels)
    copied = weights(folder / "checkpoints")
    (folder / "lab.lock").write_text("\n".join(lines) + "\n", encoding="utf-8")
    minor = f"{version[0]}.{version[1]}"
    script = INSTALL.format(checkpoints=CHECKPOINTS, minor=minor, machine=platform.machine(), lab=f'"$here/wheels/{lab.name}"')
    path = folder / "install.sh"
    path.write_text(script, encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    sums(folder)
    size = sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())
    print(f"  ✓ {len(lines)} packages, the lab, checkpoints: {', '.join(copied) or 'none prepared yet'}: {size / 1e9:.1f} GB in {folder}")
    print("    Copy the folder to the venue and run: sh install.sh")


def main() -> int:
    """Parse the command line. 0, or 1 with a sentence on stderr."""
    parser = argparse.ArgumentParser(description="Collect all that a venue without a network needs.")
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT, help="where to (default: dist/bundle)")
    options = parser.parse_args()
    try:
        probe = subprocess.run([python(), "-c", "import sys; print(*sys.version_info[:3])"], capture_output=True, text=True)
        if probe.returncode:
            raise SetupError("There is no environment yet: run make lab first.")
        options.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(options.folder).free
        if free < 3 << 30:
            raise SetupError(f"Not enough disk space: {free / 1e9:.1f} GB free in {options.folder}, about 3 GB needed.")
        bundle(options.folder.resolve(), tuple(map(int, probe.stdout.split())))
    except SetupError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"\nThe bundle stopped: {error}. Run it again when that is mended: it goes on from here.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. Run it again: it goes on from here.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    os.umask(0o022)
    sys.exit(main())
