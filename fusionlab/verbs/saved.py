"""Saved explorers, comparisons and loss curves, read back. They are plain data: opening one runs no code from the file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from ..evidence.instruments.record import load_json
from ..evidence.training.curve import FORMAT as CURVE
from ..tracebacks import errors_for_users
from ..viz.explorer.state_file import FORMAT, Saved
from .comparison import Comparison
from .explorer import explore
from .lab import Fused, fuse
from .training import LossCurve

_MOST_BYTES = 256 << 20


@errors_for_users
class SavedLab(Saved):
    """An explorer's state, read from a file: `explore` opens it again over the function, `fuse` makes the fused function."""

    def explore(self, fn: Callable, *args: Any, **kwargs: Any) -> Any:
        """Opens an explorer over `fn` with the saved sites switched on, the ledger and the measurements.

        If the program has changed, saved choices for removed parts are dropped, and the explorer reports that.

        Args: as for `fusionlab.explore`; `passes` is the saved one.
        """
        if "passes" in kwargs:
            raise ArgumentError("explore: got passes, and the saved state has its own; set options in the explorer")
        lab = explore(fn, *args, passes=self.setting.strategy, **kwargs)
        lab.restore(self)
        return lab

    def fuse(self, fn: Callable, **options: Any) -> Fused:
        """`fusionlab.fuse` with the sites and passes that were on; ids that do not occur in `fn` fuse nothing."""
        return fuse(fn, passes=self.setting.strategy, only=sorted(self.setting.enabled), **options)


def read(path: str | os.PathLike[str]) -> SavedLab | Comparison | LossCurve:
    """See `fusionlab.load`."""
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(f"path: got {path!r:.80}, needed the path of a file")
    file = Path(path)
    if file.suffix.lower() == ".npz":
        return LossCurve.load(file)
    if file.is_file() and file.stat().st_size > _MOST_BYTES:
        raise ArgumentError(f"path: {path} has {file.stat().st_size:,} bytes, needed at most {_MOST_BYTES:,}")
    data = load_json(file)
    if isinstance(data, dict) and data.get("format") == CURVE:
        return LossCurve.load(file)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        return Comparison.load(file)
    try:
        saved = SavedLab.from_dict(data, Comparison)
    except ArgumentError as error:
        raise ArgumentError(f"path: {path}: {error}") from error
    assert isinstance(saved, SavedLab)
    return saved
