"""What the notebooks in `notebooks/` call: `start()` gives a `Bench` over the engines, `show()` draws a chart, `app()` opens the page.

All logic lives in the rest of the package; this is the boundary to a notebook, as `lab.ui` is to the page. Importing it needs no engine.
"""

from lab.notebook.display import duel, show
from lab.notebook.session import Bench, start
from lab.trace.html import table

__all__ = ["Bench", "duel", "show", "start", "table"]
