"""The explorer and saved pages in Chromium. `server.py` starts Jupyter, `explorer.py` and `notebooks.py` drive it."""
