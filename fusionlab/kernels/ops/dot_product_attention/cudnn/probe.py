"""The meaning of a mask passed as data: its lengths, and whether it is a mask of lengths at all.

A mask of keys, the same for every row of queries, that is a prefix is a padding mask, for which there are faster kernels; with a hole in
it, it is not. Only its values tell, so this is asked on the device, once for each mask.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .....errors import ArgumentError
from ....launch.compile import CudaSource
from ....launch.ffi_call import launch
from ....launch.kernel_plan import KernelPlan, Launch

Array = Any

PROBE = CudaSource("dot_product_attention/cudnn/probe.cu", ("mask_probe",))
_THREADS = 256
_MOST_ROWS = 2**31 - 1


def lengths_of(mask: Array) -> tuple[Array, Array]:
    """The meaning, in plain jnp.

    Args:
      mask: bool, * x S: True where a key is seen.

    Returns:
      (lengths, is_prefix): int32 * the number of keys seen, and bool * whether they are the first ones (none is a prefix too).

    Raises:
      ArgumentError: the mask is not boolean.
    """
    _check(mask)
    keys = mask.shape[-1]
    lengths = jnp.sum(mask, axis=-1, dtype=np.int32)
    last = jnp.max(jnp.where(mask, lax.iota(np.int32, keys), -1), axis=-1, initial=-1)
    return lengths, last + 1 == lengths


def lengths_on_cuda(mask: Array) -> tuple[Array, Array]:
    """The same by one launch of FusionLab's kernel; call it while a program is traced for a CUDA device."""
    _check(mask)
    *batch, keys = mask.shape
    rows = math.prod(batch)
    if not rows:
        return lengths_of(mask)
    (found,) = launch(probe_plan(rows, keys), [mask], [jax.ShapeDtypeStruct((*batch, 2), np.int32)])
    return found[..., 0], found[..., 1] == 1


def probe_plan(rows: int, keys: int) -> KernelPlan:
    """Operand: mask, bytes, rows x keys. Result: rows x 2, int32."""
    if rows > _MOST_ROWS or keys > _MOST_ROWS:
        raise ArgumentError(f"mask: got {rows} rows of {keys} keys, needed fewer than 2^31 of each")
    params = (("operand", 0), ("result", 0), ("i64", keys))
    return KernelPlan(PROBE.path, (), (Launch("mask_probe", (rows, 1, 1), (_THREADS, 1, 1), 0, params),))


def _check(mask: Array) -> None:
    if mask.dtype != np.bool_:
        raise ArgumentError(f"mask: got dtype {mask.dtype}, needed bool")
