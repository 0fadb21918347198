"""The verb `load`. What it reads with is loaded when it is called: `import fusionlab` loads nothing of the view."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..tracebacks import own_lines_hidden

if TYPE_CHECKING:
    from .comparison import Comparison
    from .saved import SavedLab
    from .training import LossCurve


@own_lines_hidden
def load(path: str | os.PathLike[str]) -> SavedLab | Comparison | LossCurve:
    """Reads what `lab.save("x.json")`, `comparison.save("x.json")` or `curve.save("x.npz")` wrote: plain data, of which nothing is run.

    Returns:
      A `fusionlab.verbs.saved.SavedLab` (`.explore(fn, *args)` opens it again, `.fuse(fn)` fuses as it was set), a `Comparison`, or a
      `fusionlab.LossCurve`.

    Raises:
      ArgumentError: there is no such file, it is larger than 256 MB (other than .npz), or it is another kind of file.
    """
    from .saved import read

    return read(path)
