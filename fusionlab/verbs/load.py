"""The verb `load`. What it reads with is loaded when it is called: `import fusionlab` loads nothing of the view."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..tracebacks import own_lines_hidden

if TYPE_CHECKING:
    from .comparison import Comparison
    from .saved import SavedLab


@own_lines_hidden
def load(path: str | os.PathLike[str]) -> SavedLab | Comparison:
    """Reads what `lab.save("x.json")` or `comparison.save("x.json")` wrote: plain data, of which nothing is run.

    Returns:
      A `fusionlab.verbs.saved.SavedLab` (`.explore(fn, *args)` opens it again, `.fuse(fn)` fuses as it was set), or a `Comparison`.

    Raises:
      ArgumentError: there is no such file, it is larger than 256 MB, or it is neither.
    """
    from .saved import read

    return read(path)
