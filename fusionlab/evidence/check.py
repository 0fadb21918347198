"""`fuse(check=True)`: old and new outputs of one call, side by side."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import RewriteError
from ..graph.calls.parts import fixed_difference
from ..testing.tolerances import tolerance
from .errors.arrays import Error, compare_arrays


def check_same(before: Any, after: Any, name: str) -> None:
    """Raises RewriteError if a leaf of `after` differs from `before` beyond its dtype's tolerance.

    The tolerance is that of a long reduction (2**16 terms), relative to the leaf's largest entry: both versions round.
    """
    difference = fixed_difference(before, after)
    if difference is not None:
        raise RewriteError(f"{name}: {difference}; this is a bug")
    old, tree = jax.tree_util.tree_flatten_with_path(before)
    new = jax.tree.leaves(after)
    if jax.tree.structure(after) != tree or len(new) != len(old):
        raise RewriteError(f"{name}: the fused version returns another structure than the original; this is a bug")
    for (path, b), a in zip(old, new, strict=True):
        b, a = np.asarray(b), np.asarray(a)
        error = error_of(b, a)
        if error.over_tolerance or a.dtype != b.dtype:
            raise RewriteError(
                f"{name}: output {jax.tree_util.keystr(path) or 'out'} of the fused version differs from the original's in "
                f"{error.over_tolerance} of {b.size} entries, at most by {error.max_abs:.3g}; "
                f"skip sites (skip=[...]) to find the guilty one, and report it"
            )


def error_of(before: np.ndarray, after: np.ndarray) -> Error:
    """The distance of two versions of a result, with the tolerance of `check_same`."""
    rtol, atol = _allowed(before)
    return compare_arrays(after, before, before.dtype, rtol, atol)


def _allowed(want: np.ndarray) -> tuple[float, float]:
    if not jnp.issubdtype(want.dtype, np.floating):
        return 0.0, 0.0
    row = tolerance(want.dtype, 1 << 16)
    values = want.astype(np.float64)
    return row.rtol, row.atol * float(np.max(np.abs(values[np.isfinite(values)]), initial=0.0))
