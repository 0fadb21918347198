"""`python -m benchmarks NAME [options]`: runs one benchmark."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

# A benchmark is a module of a folder here with a `main` of its own.
HOMES = {
    path.stem: f"benchmarks.{path.parent.name}.{path.stem}"
    for path in Path(__file__).parent.glob("*/*.py")
    if "\ndef main(" in path.read_text(encoding="utf-8")
}


def main(argv: list[str]) -> int:
    """Runs the benchmark named first; the rest are its own options. Returns the exit status."""
    if not argv or argv[0] not in HOMES:
        print(f"usage: python -m benchmarks {{{','.join(sorted(HOMES))}}} [options]", file=sys.stderr)
        return 2
    # A fault of a search ends the benchmark: as a declined site it would hide.
    os.environ.setdefault("FUSIONLAB_RAISE", "1")
    return importlib.import_module(HOMES[argv[0]]).main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
