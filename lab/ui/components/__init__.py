"""The page's own elements: `gr.HTML` whose script (in `assets/ui`) builds the content once and follows the value from then on.

A value is data (JSON), never HTML: the template holds no placeholder, so nothing that a model wrote is ever parsed as markup or as a
script. `core.js` keeps the list of elements; `mount` names one.
"""

from __future__ import annotations

import json

import gradio as gr


def live(name: str, value: object = "", *, elem_id: str, events: tuple[str, ...] = ()) -> gr.HTML:
    """An element that `assets/ui/<name>.js` draws; `events` are what its script may trigger."""
    if not name.isidentifier() or not all(event.isidentifier() for event in events):
        raise ValueError(f"element {name!r} with events {events!r} is not plain names")
    listed = ", ".join(f"'{event}'" for event in events)
    return gr.HTML(
        value=value if isinstance(value, str) else json.dumps(value).replace("<", "\\u003c"),
        html_template='<div class="e3-root"></div>',
        # The page's scripts may arrive after the element. `listed` is there for gradio, which looks for events' names in this text.
        js_on_load=f"(function go() {{ if (window.eagle3) window.eagle3.mount('{name}', element, props, watch, trigger, [{listed}]);"
        " else setTimeout(go, 20); })();",
        elem_id=elem_id,
        elem_classes=["e3-live"],
        apply_default_css=False,
        container=False,
        padding=False,
    )
