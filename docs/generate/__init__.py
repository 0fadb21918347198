"""Pages of the documentation that are generated from the package and its records: passes, rejections, performance, GPUs.

`docs/conf.py` calls `write` before Sphinx looks for pages. `passes.py`, `rejections.py`, `performance.py` and `gpus.py` write a
kind of page each; `tables.py` says how a record becomes a table, `on_h200.py`, `models_on_h200.py` and `on_others.py` which tables
there are; `programs.py` makes programs that can be copied of the examples that the passes and the tests have, and runs them.
"""

from __future__ import annotations

from pathlib import Path

from .gpus import write_gpus
from .passes import write_passes
from .performance import write_performance
from .rejections import write_rejections


def write(folder: Path) -> None:
    """Writes `passes.md` and `passes/`, `rejections.md`, `performance/` and `gpus.md` into a folder, as Markdown (MyST)."""
    folder.mkdir(parents=True, exist_ok=True)
    write_performance(folder)
    write_passes(folder)
    write_rejections(folder)
    write_gpus(folder)
