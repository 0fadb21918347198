"""Numbers with units that read well."""

from __future__ import annotations


def binary_bytes(n: float) -> str:
    """Bytes with a binary unit: "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024 or unit == "GiB":
            return f"{n:.4g} {unit}"
        n /= 1024
    raise AssertionError("unreachable")
