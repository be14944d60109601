"""The status line: one sentence, a progress bar, the last log line, elapsed time, and more on demand."""

from __future__ import annotations

import gradio as gr
import msgspec

from lab.ui.components import live
from lab.ui.feed import dump
from lab.ui.runner import Status


def status_value(status: Status) -> str:
    """A status as the element's value."""
    return dump(msgspec.to_builtins(status))


def status_line(status: Status, *, elem_id: str) -> gr.HTML:
    """The element, with its first sentence."""
    return live("status", status_value(status), elem_id=elem_id)
