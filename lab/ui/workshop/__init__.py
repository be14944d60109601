"""Workshop mode: one engine, a presenter and a room of attendees. State without gradio; `tab.py` alone draws the presenter's tab."""
