"""`eagle3-lab quantize`: a function for the command line to mount. A `LabError` is the caller's to show."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from lab import provenance
from lab.errors import disk_error
from lab.quant.draft import read_draft, read_json
from lab.quant.kv import MI355X, kv_gain, this_machine
from lab.quant.report import table
from lab.quant.run import SCHEME, quantize_draft
from lab.recipes import cpu

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def quantize(
    draft_dir: Annotated[Path, typer.Argument(help="Folder of an Eagle3 draft in BF16.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to make; must not exist.", show_default=False)],
    scheme: Annotated[str, typer.Option(help="Quark's quantisation scheme.")] = SCHEME,
    target: Annotated[Path | None, typer.Option(help="Target folder: also say how many KV-cache tokens the saved memory buys.")] = None,
    report_file: Annotated[Path | None, typer.Option("--json", help="Also write the report here.")] = None,
) -> None:
    """Quantise an Eagle3 draft to FP8 with AMD Quark; fc and lm_head keep their precision."""
    draft_dir, output = (Path(os.path.expanduser(path)) for path in (draft_dir, output))  # no shell does it in --output=~/fp8
    config = read_json(Path(os.path.expanduser(target)) / "config.json") if target else None
    if config is not None:
        kv_gain(0, config, MI355X, draft=read_draft(draft_dir).config)  # what cannot be counted is said before anything is made
    report = quantize_draft(draft_dir, output, lambda text: typer.echo(f"  {text}", err=True), scheme=scheme)
    typer.echo(table(report))
    if config is not None:
        own = read_json(output / "config.json")
        here = 4 if cpu.dtype() == "float32" else 2  # what the lab serves in; vLLM's own choice is 16 bits, for float32 weights, too
        for machine, width in ((this_machine(), here), (MI355X, 2)):
            gain = kv_gain(report.saved, config, machine, draft=own, bytes_per_value=width)
            typer.echo(f"KV cache on {machine.name}: {gain.tokens} tokens more, {gain.share:.4%} of its memory ({gain.formula}).")
    if report_file:
        try:
            provenance.write_text(report_file, report.json() + "\n")
        except OSError as error:
            raise disk_error(error, report_file, instead="choose another file with --json") from error
    typer.echo(f"Written to {output}.")
