"""The doctor's tab: a recipe or a pasted command line, examined for this machine or another, with each finding's evidence, reason and fix.

The page's visitors may be strangers, so it reads less than the command line does: no server is called (the operator names those), and
folders are opened only inside the lab's cache, its assets and the Hugging Face cache.
"""

from __future__ import annotations

import asyncio
from typing import Any

import gradio as gr

from lab import recipes
from lab.doctor import gather, report
from lab.errors import LabError
from lab.ui.app import Frame, Lab
from lab.ui.components import live
from lab.ui.feed import dump

HERE = "this machine, or the recipe's own"
MACHINES = (HERE, "MI355X", "MI350X", "MI325X", "MI300X", "CUDA 9.0", "CUDA 8.0", "cpu")
LONGEST = 20_000


def shown(found: report.Report) -> dict[str, Any]:
    """A report as the element draws it."""
    subject = found.subject
    return {
        "rows": [list(row) for row in (*report.looked_at(subject), *report.describe(subject.machine))],
        "counts": {level: found.count(level) for level in ("error", "warning", "note")},
        "rules": len(report.all_rules()),
        "findings": report.findings_json(subject.recipe, found.findings),
    }


def examine(recipe: str, draft: str, line: str, machine: str) -> report.Report:
    """What the tab's settings ask for; raises `LabError` for what it does not do."""
    gpu = None if machine == HERE else machine.removeprefix("CUDA ")
    text = line.strip()
    if len(text) > LONGEST:
        raise LabError(f"The line has {len(text):,} characters.", todo=f"Paste at most {LONGEST:,}.")
    if text.lower().startswith(("http://", "https://")):
        raise LabError(
            "The page calls no address that a visitor names.",
            why="Whoever opens the page could otherwise make this machine call any other.",
            todo="On the command line: eagle3-lab doctor URL",
        )
    within = gather.trusted()
    if text:
        return report.report(gather.from_line(text, gpu=gpu, within=within))
    chosen = recipes.get(recipe)
    if draft not in chosen.draft_choices():
        raise LabError(f"Recipe '{recipe}' has no draft '{draft}'.", todo=f"It offers: {', '.join(chosen.draft_choices())}.")
    at = gather.machine_of(chosen, gpu)
    return report.report(gather.from_recipe(chosen, draft, machine=at, within=within))


def doctor_tab(lab: Lab, frame: Frame) -> None:  # noqa: ARG001  (every tab is drawn with the page's frame)
    """Draw the tab and wire its handlers."""
    first = "bf16" if "bf16" in lab.recipe.drafts else "none"
    known = lab.recipe.name if lab.recipe.name in recipes.RECIPES else recipes.DEFAULT
    with gr.Tab("Doctor", id="doctor", elem_id="e3-tab-doctor"):
        with gr.Row(elem_classes=["e3-stage"]):
            with gr.Column(elem_id="e3-doctor-side", min_width=260):
                recipe = gr.Dropdown(sorted(recipes.RECIPES), value=known, label="Recipe", elem_id="e3-doctor-recipe")
                draft = gr.Dropdown(["none", "bf16", "fp8"], value=first, label="Draft", elem_id="e3-doctor-draft")
                line = gr.Textbox(
                    label="or a command line of your own",
                    placeholder="VLLM_ROCM_USE_AITER=1 vllm serve MODEL --speculative-config '{...}'",
                    lines=7,
                    max_lines=7,
                    elem_id="e3-doctor-line",
                )
                machine = gr.Dropdown(list(MACHINES), value=HERE, label="Checked for", elem_id="e3-doctor-machine")
                go = gr.Button("Examine", variant="primary", elem_id="e3-doctor-go")
            result = live("doctor", elem_id="e3-doctor")

    async def run(*values: str) -> str:
        try:
            found = await asyncio.to_thread(examine, *(value or "" for value in values))
        except LabError as error:
            return dump({"error": [error.what, error.why, error.todo]})
        return dump(shown(found))

    quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "concurrency_limit": 8, "trigger_mode": "always_last"}
    go.click(run, [recipe, draft, line, machine], result, **quiet)
    line.submit(run, [recipe, draft, line, machine], result, **quiet)
    for moment in (recipe.input, draft.input, machine.input):
        moment(run, [recipe, draft, line, machine], result, **quiet)
