"""The prompt bar above the tabs: one prompt and one set of settings for every tab, so that switching tabs or drafts loses nothing.

The number fields have no limits of their own: `Settings.of` answers a value out of range with a sentence in the status line.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from lab import checkpoints
from lab.env import listed
from lab.recipes.model import Hub, Recipe

#: Prompts by kind, tried on the smallest target: it answers the first three well, and does what it can in French.
EXAMPLES = (
    ("Chat", "What are the benefits of regular exercise?"),
    ("Code", "Write a Python function that reverses a string."),
    ("Maths", "John has 3 boxes with 4 pencils each. How many pencils does he have?"),
    ("Translation", "Translate to French: Good morning, my friend."),
)
DRAFT_NAMES = {"none": "none", "bf16": "BF16", "fp8": "FP8"}


def memory_words(recipe: Recipe) -> str:
    """The draft switch's label, with the size of each draft's weights as they lie on the disk; the embeddings are the target's."""
    parts = []
    for name, draft in recipe.drafts.items():
        size = sum(state.st_size for _, state in listed(Path(checkpoints.location(draft)), "*.safetensors"))
        absent = "on the hub" if isinstance(draft.weights, Hub) else "not made yet"
        parts.append(f"{DRAFT_NAMES.get(name, name)} {f'{size / 1e6:.1f} MB' if size else absent}")
    return f"Draft ({', '.join(parts)})" if parts else "Draft"


@dataclass(frozen=True)
class Bar:
    """The bar's components; `inputs` is the order in which handlers get their values (see `Settings.of`)."""

    prompt: gr.Textbox
    draft: gr.Radio
    k: gr.Number
    temperature: gr.Number
    max_tokens: gr.Number
    alternatives: gr.Checkbox
    run: gr.Button
    beside: gr.Button
    stop: gr.Button

    @property
    def inputs(self) -> list[Any]:
        return [self.prompt, self.draft, self.k, self.temperature, self.max_tokens, self.alternatives]


def prompt_bar(recipe: Recipe) -> Bar:
    """Draw the bar for `recipe`."""
    choices = [(DRAFT_NAMES[choice], choice) for choice in recipe.draft_choices()]
    first = "bf16" if "bf16" in recipe.drafts else choices[-1][1]
    with gr.Row(elem_id="e3-bar"):
        with gr.Column(elem_id="e3-bar-prompt", scale=1, min_width=300):
            prompt = gr.Textbox(EXAMPLES[0][1], label="Prompt", lines=2, max_lines=2, elem_id="e3-prompt", container=False, autofocus=True)
            with gr.Row(elem_id="e3-examples"):
                for name, text in EXAMPLES:
                    button = gr.Button(name, size="sm", min_width=0, elem_classes=["e3-example"])
                    button.click(lambda text=text: text, None, prompt, queue=False, api_visibility="private")
        with gr.Column(elem_id="e3-bar-settings", scale=0, min_width=470):
            with gr.Row(elem_id="e3-bar-draft"):
                draft = gr.Radio(choices, value=first, label=memory_words(recipe), elem_id="e3-draft", min_width=200)
                alternatives = gr.Checkbox(False, label="Target's alternatives", elem_id="e3-alternatives", min_width=150)
            with gr.Row(elem_id="e3-bar-numbers"):
                # A server elsewhere has its own K.
                usual = recipe.default_k(first) or recipe.k
                k = gr.Number(usual, label="K", step=1, elem_id="e3-k", min_width=60, visible=not recipe.elsewhere)
                temperature = gr.Number(0, label="Temperature", step=0.1, elem_id="e3-temperature", min_width=80)
                max_tokens = gr.Number(128, label="New tokens", step=16, elem_id="e3-max-tokens", min_width=80)
        with gr.Column(elem_id="e3-bar-buttons", scale=0, min_width=220):
            with gr.Row():
                run = gr.Button("Run", variant="primary", elem_id="e3-run", min_width=0, size="md")
                stop = gr.Button("Stop", elem_id="e3-stop", min_width=0, size="md")
            beside = gr.Button("Run beside the baseline", elem_id="e3-run-both", min_width=0, size="md")
    return Bar(prompt, draft, k, temperature, max_tokens, alternatives, run, beside, stop)
