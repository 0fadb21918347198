"""Ways to call a fused function: jits, states, partials, settings; each a cell of a table (`cells.py`) that is run in a process of its
own.
"""
