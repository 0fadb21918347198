"""`python -m benchmarks NAME [options]`: runs one benchmark."""

from __future__ import annotations

import importlib
import os
import sys

NAMES = (
    "attention",
    "attention_cpu",
    "decoding",
    "dispatch",
    "first_find",
    "gemm_epilogue",
    "group_norms",
    "kernel_resources",
    "lerp",
    "matmul_schedule",
    "multi_transformer",
    "mutants",
    "norms",
    "norms_cpu",
    "pair_memory",
    "pairs",
    "parts",
    "random_programs",
    "recall",
    "sanitizer",
    "tensor_parallel",
    "timing_method",
    "widened",
    "xla_mapping",
)


def main(argv: list[str]) -> int:
    """Runs the benchmark named first; the rest are its own options. Returns the exit status."""
    if not argv or argv[0] not in NAMES:
        print(f"usage: python -m benchmarks {{{','.join(NAMES)}}} [options]", file=sys.stderr)
        return 2
    os.environ.setdefault(
        "FUSIONLAB_RAISE", "1"
    )  # a fault of a search ends the benchmark: as a declined site it would hide
    return importlib.import_module(f"benchmarks.{argv[0]}").main(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
