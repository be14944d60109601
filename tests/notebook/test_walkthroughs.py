"""The notebooks: kept without outputs, and each runs from top to bottom over engines that all of them share."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """`scripts/notebooks.py`, which is what `make notebooks-html` runs."""
    pytest.importorskip("nbclient", reason="notebooks need it: make setup-dev")
    spec = importlib.util.spec_from_file_location("notebooks_script", ROOT / "scripts" / "notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_they_are_numbered_without_gaps() -> None:
    assert [path.name[:3] for path in NOTEBOOKS] == [f"{number:02}-" for number in range(1, len(NOTEBOOKS) + 1)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_are_stored_without_outputs(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert not [cell for cell in code if cell["outputs"] or cell["execution_count"] is not None]
    stripped = subprocess.run([str(Path(sys.executable).parent / "nbstripout"), "--verify", str(path)], capture_output=True, text=True)
    assert stripped.returncode == 0, stripped.stdout


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_teach_and_assert_and_hold_no_logic(path: Path) -> None:
    """Text in every second cell or so, a claim that is asserted, and no functions or classes: those belong into the package."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    text = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    assert text[0].startswith(f"# {int(path.name[:2])}. ")
    assert len(text) >= len(code) / 2
    assert sum(source.count("\nassert ") + source.startswith("assert ") for source in code) >= 3
    assert not [source for source in code if "\ndef " in source or "\nclass " in source]


@pytest.fixture(scope="module")
def environment(script: ModuleType) -> Iterator[dict[str, str]]:
    """What kernels need to share this module's engines, which end with it."""
    pytest.importorskip("vllm", reason="the engine is not installed")
    lanes = script.Lanes()
    try:
        with script.shared(lanes) as given:
            yield script.kernel_environment(given)
    finally:
        lanes.shutdown()


@pytest.mark.engine
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_run(path: Path, script: ModuleType, environment: dict[str, str], tmp_path: Path) -> None:
    notebook = script.execute(path, environment)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.output_type == "error"]
    assert any(script.PLOTLY in output.get("data", {}) or "text/html" in output.get("data", {}) for output in outputs)
    page = script.page(notebook, path.stem, script.provenance.collect())
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    assert "Outputs of a run on" in page
    assert 'src="http' not in page
