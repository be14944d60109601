"""The walkthroughs in `notebooks/`: open them in JupyterLab, or run them and write what came out as HTML.

`open` (what `make notebooks` does) starts JupyterLab and keeps one set of engines for all its kernels. `run` (what `make notebooks-html`
does, and the tests by importing `execute`) runs notebooks from top to bottom in fresh kernels over one set of engines, and writes a page
for each that shows the outputs of that run and says which run it was. The notebooks are never changed: they are kept without outputs.

Limits: charts in the pages are drawn by plotly's own script, which is copied beside them, so the folder is complete and needs no network.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from lab import provenance
from lab.notebook.broker import kernel_environment, shared
from lab.serving.lanes import Lanes

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
PLOTLY = "application/vnd.plotly.v1+json"
SCRIPT = "plotly.min.js"
#: Seconds that one cell may take on a busy machine; the first one starts an engine.
CELL_TIMEOUT = 900


def found(names: Sequence[str] = ()) -> list[Path]:
    """All notebooks in order, or those whose names begin with one of `names` ("02", "03-reading")."""
    every = sorted(NOTEBOOKS.glob("[0-9]*.ipynb"))
    chosen = [path for path in every if not names or path.name.startswith(tuple(names))]
    if not chosen:
        sys.exit(f"No notebook begins with {' or '.join(names)}. There are: {', '.join(path.stem for path in every)}.")
    return chosen


def execute(path: Path, environment: Mapping[str, str]) -> nbformat.NotebookNode:
    """Run a notebook from top to bottom in a fresh kernel; raises `CellExecutionError` with the cell and its error where one fails."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=CELL_TIMEOUT, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}})
    client.execute(env=dict(environment))
    return notebook


def page(notebook: nbformat.NotebookNode, name: str, origin: Mapping[str, Any]) -> str:
    """A run notebook as one HTML page; `origin` is the run's provenance."""
    from nbconvert import HTMLExporter

    charts = 0
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if chart := output.get("data", {}).get(PLOTLY):
                charts += 1
                drawn = json.dumps(chart).replace("<", "\\u003c")
                draw = f"const chart = {drawn}; Plotly.newPlot('chart-{charts}', chart.data, chart.layout, chart.config);"
                output.data["text/html"] = f'<div id="chart-{charts}"></div><script>{{ {draw} }}</script>'
                del output.data[PLOTLY]
    body, _ = HTMLExporter(embed_images=True, exclude_input_prompt=True, exclude_output_prompt=True).from_notebook_node(
        notebook, {"metadata": {"name": name}}
    )
    machine = origin["hardware"]
    run = f"Outputs of a run on {origin['made']}, revision {origin['revision']}, {provenance.processor(machine)}."
    said = f'<p style="max-width: 1100px; margin: 12px auto; color: #5a6472">{html.escape(run)}</p>'
    # Nothing is fetched from elsewhere: the exporter's own script tags (formulas, loaders of modules) point at other machines.
    body = "\n".join(line for line in body.splitlines() if not ('src="http' in line and "<script" in line))
    return str(body.replace("</head>", f'<script src="{SCRIPT}"></script></head>', 1).replace("<main>", f"{said}<main>", 1))


def run(paths: Sequence[Path], output: Path, say: Callable[[str], None] = print) -> bool:
    """Run the notebooks over one set of engines, write their pages into `output`, and say how long each took. Whether all passed."""
    output.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(str(resources.files("plotly") / "package_data" / SCRIPT), output / SCRIPT)
    lanes, whole, began = Lanes(), True, time.monotonic()
    try:
        with shared(lanes) as given:
            for path in paths:
                started = time.monotonic()
                origin = provenance.collect(notebook=path.name)
                try:
                    notebook = execute(path, kernel_environment(given))
                except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
                    whole = False
                    say(f"FAILED: {path.name} after {time.monotonic() - started:.0f} s\n{str(error)[-3000:]}")
                    continue
                provenance.write_text(output / f"{path.stem}.html", page(notebook, path.stem, origin))
                say(f"{path.stem}: {time.monotonic() - started:.0f} s, {output / path.stem}.html")
    finally:
        lanes.shutdown()
    say(f"{len(paths)} notebook{'s' if len(paths) != 1 else ''} in {time.monotonic() - began:.0f} s")
    return whole


def open_all(arguments: Sequence[str]) -> int:
    """JupyterLab on the notebooks until it ends, with engines that its kernels share. `arguments` go to JupyterLab."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    lanes = Lanes()
    try:
        with shared(lanes) as given:
            command = [sys.executable, "-m", "jupyterlab", str(NOTEBOOKS), "--ServerApp.ip=127.0.0.1", *arguments]
            with subprocess.Popen(command, cwd=ROOT, env=kernel_environment(given)) as jupyter:
                try:
                    while True:
                        try:
                            return jupyter.wait()
                        except KeyboardInterrupt:  # the terminal sent it to JupyterLab too, which asks whether it is meant
                            continue
                finally:
                    jupyter.terminate()
    finally:
        lanes.shutdown()


def main() -> int:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="The walkthroughs in notebooks/.")
    parts = parser.add_subparsers(dest="part", required=True)
    opening = parts.add_parser("open", help="open JupyterLab; flags of `jupyter lab` are passed on")
    opening.add_argument("--no-browser", action="store_true", help="do not open a browser")
    running = parts.add_parser("run", help="run notebooks and write what came out as HTML")
    running.add_argument("names", nargs="*", help="beginnings of names, such as 02 (default: all)")
    running.add_argument("--output", type=Path, default=ROOT / "build" / "notebooks", help="folder of the pages (default: build/notebooks)")
    options, rest = parser.parse_known_args()
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # a warning of the debugger that kernels bring
    if options.part == "open":
        return open_all([*(["--no-browser"] if options.no_browser else []), *rest])
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return 0 if run(found(options.names), options.output) else 1


if __name__ == "__main__":
    sys.exit(main())
