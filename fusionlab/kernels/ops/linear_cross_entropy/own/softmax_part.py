"""The softmax of `linear_cross_entropy` by FusionLab's own kernel: statistics, losses and the cotangent from one read of the logits.

What it computes is what rows.py does of logits that exist: `statistics`, `losses` and `through` with a cotangent of the losses alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .....device import Device
from .....graph.program.in_shard_map import same_varying_axes
from ....launch.ffi_call import launch
from ....launch.kernel_plan import KernelPlan
from ...geometry import ITEM_BYTES
from ..settings import Settings
from .part_plan import DTYPES, MAX_COLUMNS, SOURCE, PartTile, part_plan, results_of

Array = Any


def refuses(form: Settings, dtype: Any, size: int) -> str | None:
    """Why the kernel cannot take logits of this dtype over a vocabulary of `size`, or None."""
    name = jnp.dtype(dtype).name
    if name not in DTYPES:
        return f"logits are {name}, the kernel takes {', '.join(DTYPES)}"
    if not 0 < size <= MAX_COLUMNS:
        return f"the vocabulary has {size} entries, the kernel takes 1 to {MAX_COLUMNS}"
    others = {
        "a bias of another dtype than x": "bias" in form.present and form.dtype_of("bias") != form.dtype_of("x"),
        "a vocabulary that devices share": bool(form.mesh_axes("v")),
    }
    if there := next((what for what, given in others.items() if given), None):
        return f"there is {there}, which the kernel does not compute"
    return None


def takes(form: Settings, dtype: Any, size: int, device: Device | None) -> bool:
    """Whether the kernel takes them, and the device the kernel."""
    return device is not None and SOURCE.refuses(device) is None and refuses(form, dtype, size) is None


def softmax_part(
    h: Array,
    labels: Array,
    of_loss: Array | None,
    form: Settings,
    wanted: Any = None,
    *,
    size: int | None = None,
    bias: Array | None = None,
    in_place: bool = True,
    tile: PartTile | None = None,
) -> dict[str, Array]:
    """All that is needed of the logits of some rows between the products; call it while a program is lowered for a CUDA device.

    Args:
      h: *R V, the result of the product, before `form.scale`: a dtype and a V that the kernel takes.
      labels: *R, integers.
      of_loss: *R, the cotangent of the loss of each row; None where the logits' is not wanted.
      form: of the call.
      wanted: the dtype of the logits' cotangent: float32, bfloat16 or float16.
      size: the entries of the vocabulary, the first of V; None: V. The cotangent of the others is 0.
      bias: V, still to be added, in one of the dtypes of the cotangent; None without one.
      in_place: whether a cotangent of as many bytes takes the memory of h, which XLA copies first if it is needed later.
      tile: how the kernel is laid over rows; None chooses.

    Returns:
      "top", "mass", "loss" and "lse" as rows.py has them, float32 *R; "argmax", int32 *R, if it is in `form.also`; and, with of_loss, "dh",
      *R V: the cotangent of the product.
    """
    out = None if of_loss is None else jnp.dtype(wanted).name
    if not h.size:
        return _of_none(h, form, out)
    columns, dtype, aliases = int(h.shape[-1]), h.dtype.name, {}
    size = columns if size is None else size
    plan = part_plan(
        math.prod(h.shape[:-1]), columns, dtype, out, form, tile, size, None if bias is None else bias.dtype.name
    )
    operands = [h, _in_32_bits(labels, size)]
    names = results_of(form, out)
    results = [jax.ShapeDtypeStruct(h.shape[:-1], _dtype_of(name)) for name in names if name != "cotangent"]
    if of_loss is not None and out is not None:
        operands.append(of_loss.astype(jnp.float32))
        results = [jax.ShapeDtypeStruct(h.shape, out), *results]
        if in_place and ITEM_BYTES[out] == ITEM_BYTES[dtype]:
            operands[0] = h if out == dtype else lax.bitcast_convert_type(h, out)  # the kernel reads it as it was
            aliases = {0: 0}
    operands += [] if bias is None else [bias]
    found = dict(zip(names, launch(plan, operands, results, aliases), strict=True))
    return found if out is None else found | {"dh": found.pop("cotangent")}


def _dtype_of(name: str) -> Any:
    return jnp.int32 if name == "argmax" else jnp.float32


def unwritten(shape: tuple[int, ...], dtype: Any, like: Sequence[Array]) -> Array:
    """Memory as it is, for a loop that writes all of it; call it while a program is lowered for a CUDA device. Inside a `shard_map` it
    varies as the arrays `like` do.
    """
    found = launch(KernelPlan(SOURCE.path, (), ()), [], [jax.ShapeDtypeStruct(shape, dtype)])
    return same_varying_axes([*found, *like])[0]


def _of_none(h: Array, form: Settings, out: str | None) -> dict[str, Array]:
    """The results of no logits."""
    found = {name: jnp.zeros(h.shape[:-1], _dtype_of(name)) for name in results_of(form, None)}
    return found if out is None else found | {"dh": jnp.zeros(h.shape, out)}


def _in_32_bits(labels: Array, size: int) -> Array:
    """Of 64 bits a label may be far out of range; no narrower one is, unless it has no sign, and then it wraps to a number below zero."""
    if labels.dtype.itemsize == 8:
        labels = jnp.clip(labels.astype(jnp.int64), -1, size)
    return labels.astype(jnp.int32)
