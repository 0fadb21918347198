"""`python -m benchmarks NAME [options]`: runs one benchmark."""

from __future__ import annotations

import importlib
import os
import sys

FOLDERS = {
    "method": "timing_method",
    "ops": "attention attention_cpu dispatch gemm_epilogue group_norms kernel_resources lerp matmul_schedule norms norms_cpu sanitizer",
    "programs": "decoding multi_transformer pair_memory pairs parts tensor_parallel widened",
    "search": "decisions first_find mutants random_programs recall xla_mapping",
}
HOMES = {name: f"benchmarks.{folder}.{name}" for folder, names in FOLDERS.items() for name in names.split()}


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
