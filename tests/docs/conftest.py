"""The generators of the documentation are imported as docs/conf.py imports them: as the package `generate`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "docs"))
