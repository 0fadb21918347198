"""`multi_transformer` for one token per text over caches, by FusionLab's own kernels (decode.cu): all layers of a call in one launch
plan.

The caches are updated in place. Texts of several tokens are for `composed`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .....device import Device
from ....launch.ffi_call import launch
from ....launch.steps import Param
from ....op.arrays import names_algorithm, refuses_shardings
from ...gemm_epilogue.elementwise import KERNEL_ACTIVATIONS
from ..layer import LayerForm
from .persistent.plan import pays, persistent_plan, scratch_bytes, takes
from .phased.plan import (
    CODES,
    MOST_ROWS,
    NOTHING,
    SOURCE,
    STRIP,
    WORD,
    AttentionPhase,
    Places,
    ProductPhase,
    Row,
    decode_plan,
    fuses_norm,
)

Array = Any

MOST_FEATURES = 256  # of a head
# A finite mask value from which on the weight of a hidden key is 0 in float32, whatever the others' scores.
HIDDEN = -1e9
OTHERS = "implementation='composed' takes it"
_NORM_SLOTS = ("norm1_scale", "norm1_bias", "norm2_scale", "norm2_bias")
_WEIGHTS = ("q", "k", "v", "qkv", "out", "up", "gate", "down")
_CACHES = ("cache_k", "cache_v")


def refuses_device(device: Device) -> str | None:
    """Why the kernels cannot run on a device, or None."""
    return SOURCE.refuses(device)


def refuses(shapes: Mapping[str, Any], device: Device, **attrs: Any) -> str | None:
    """Why the kernels cannot run a call, or None."""
    return refuses_device(device) or _refuses_call(shapes, attrs) or _refuses_sizes(shapes, LayerForm.of(attrs))


def _refuses_call(shapes: Mapping[str, Any], attrs: Mapping[str, Any]) -> str | None:
    form = LayerForm.of(attrs)
    if form.cache != "write" or form.part is not None or shapes["x"].shape[1] != 1:
        return f"its kernels decode: one token per text, cache='write', whole layers; {OTHERS}"
    if reason := refuses_shardings(shapes) or _refuses_dtypes(shapes):
        return reason
    if form.activation not in KERNEL_ACTIVATIONS:
        return f"no kernel for the activation {form.activation}, only for {', '.join(KERNEL_ACTIVATIONS)}; {OTHERS}"
    # An algorithm says what a product is accumulated in; the kernels accumulate in float32 alone.
    if names_algorithm(form.precision) or names_algorithm(form.attention_precision):
        return f"a precision names an algorithm; {OTHERS}"
    return _refuses_turned(shapes, form.turned) or _refuses_mask(shapes.get("mask"), form)


def _refuses_turned(shapes: Mapping[str, Any], turned: tuple[str, ...]) -> str | None:
    # A product takes matrices side by side that all lie one way (`Shape::kTurned` of project.cuh).
    for some in (("q", "k", "v"), ("gate", "up")):
        if len({slot in turned for slot in some if f"{slot}.0" in shapes}) > 1:
            return f"some of {', '.join(some)} are [in, out] and some [out, in]; {OTHERS}"
    return None


def _refuses_mask(mask: Any, form: LayerForm) -> str | None:
    if mask is None:
        return None
    if mask.dtype != jnp.bool_ or mask.shape[1] != 1:
        return f"a mask of {np.dtype(mask.dtype).name}{list(mask.shape)}, it takes bool[1 or R, 1, 1, T]; {OTHERS}"
    if form.mask_value > HIDDEN:
        return f"mask_value is {form.mask_value:g}, above {HIDDEN:g}: a hidden key might have a weight; {OTHERS}"
    return None


def _refuses_sizes(shapes: Mapping[str, Any], form: LayerForm) -> str | None:
    rows, _, width = shapes["x"].shape
    if not 0 < rows <= MOST_ROWS:
        return f"{rows} texts, it takes 1 to {MOST_ROWS}; {OTHERS}"
    if form.head_size > MOST_FEATURES:
        return f"heads of {form.head_size} features, it takes up to {MOST_FEATURES}; {OTHERS}"
    if math.prod(shapes["cache_k.0"].shape) == 0:
        return f"the caches hold nothing; {OTHERS}"
    for i in range(form.layers):
        inner = _feed_forward_width(shapes, form, i)
        if inner != _feed_forward_width(shapes, form, 0):
            return f"layers of different feed-forward widths; {OTHERS}"
        for part, n in (("tokens", width), ("heads", form.head_size), ("the feed-forward", inner)):
            if n % WORD or n == 0:
                return f"{part} of {n} features, it takes multiples of {WORD}; {OTHERS}"
    return _refuses_uneven_layers(shapes, form.layers)


def _refuses_dtypes(shapes: Mapping[str, Any]) -> str | None:
    dtype = np.dtype(shapes["x"].dtype).name
    # Products are mma.sync of 16-bit operands (project.cuh).
    if dtype not in CODES:
        return f"tokens of {dtype}: its products are of 16-bit numbers ({', '.join(CODES)}); {OTHERS}"
    for name, a in shapes.items():
        if name.partition(".")[0] in (*_WEIGHTS, *_CACHES) and np.dtype(a.dtype).name != dtype:
            return f"{name} is {np.dtype(a.dtype).name}, tokens are {dtype}: it reads weights and caches without conversion; {OTHERS}"
    return None


def _refuses_uneven_layers(shapes: Mapping[str, Any], layers: int) -> str | None:
    for name in {n.partition(".")[0] for n in shapes} - {"x", "mask", "step", "lengths", "cos", "sin"}:
        if any(f"{name}.{i}" not in shapes for i in range(layers)):
            return f"{name} is given for some layers, not for all; {OTHERS}"
    return None


def _feed_forward_width(shapes: Mapping[str, Any], form: LayerForm, layer: int) -> int:
    return shapes[f"down.{layer}"].shape[1 if "down" in form.turned else 0]


def is_persistent(row: Row) -> bool:
    """Whether one kernel runs all layers, on the device of this process."""
    return takes(row) and pays(row, Device.current())


def forward(*, present: tuple[str, ...], **everything: Any) -> list[Array]:
    """[y, k_0, v_0, ...]: one launch plan."""
    given, form = {name: everything[name] for name in present}, LayerForm.of(everything)
    dtype, (rows, _, width) = given["x"].dtype, given["x"].shape
    parameters = {a.dtype for name, a in given.items() if name.partition(".")[0] in _NORM_SLOTS} <= {dtype}
    row, caches = row_of(given, form, parameters), [f"{slot}.{i}" for i in range(form.layers) for slot in _CACHES]
    given = {name: _as_read(name.partition(".")[0], a, dtype, parameters) for name, a in given.items()}
    whole = is_persistent(row)
    own = _made(row, form.layers, dtype, whole)
    made = {"y": own.pop("y")} | {name: jax.ShapeDtypeStruct(given[name].shape, dtype) for name in caches} | own
    operands, results = _numbered("operand", given), _numbered("result", made)
    places = _places(operands, results, form.layers)
    arch = getattr(everything["device"], "arch", "")  # of code that is to run anywhere none is known
    plan = persistent_plan(row, places, results) if whole else decode_plan(row, places, arch)
    # XLA gives a result the memory of its operand, and copies the operand first where it is read later.
    aliases = {operands[name][1]: results[name][1] for name in caches}
    outs = launch(plan, list(given.values()), list(made.values()), aliases)
    return [outs[0].reshape(rows, 1, width), *outs[1 : 1 + len(caches)]]


def _numbered(kind: str, names: Iterable[str]) -> dict[str, Param]:
    return {name: (kind, i) for i, name in enumerate(names)}


def _as_read(slot: str, a: Array, dtype: Any, parameters: bool) -> Array:
    """An operand as the kernels read it."""
    if slot == "x":
        return a.reshape(a.shape[0], -1)
    if slot in ("step", "lengths"):
        return a.astype(jnp.int32)
    if slot in ("cos", "sin"):
        return a.astype(jnp.float32)
    if slot == "mask":
        return a.reshape(a.shape[0], -1).astype(jnp.uint8)
    if slot in _NORM_SLOTS:
        return a if parameters else a.astype(jnp.float32)
    return a.reshape(-1).astype(dtype) if slot.endswith("_bias") else a


def _made(row: Row, layers: int, dtype: Any, whole: bool) -> dict[str, jax.ShapeDtypeStruct]:
    """What is returned as "y", and what kernels, or the blocks of the one kernel of all layers, make for each other."""
    width, strips = row.qkv.inner, {"attended": row.out.inner, "hidden": row.down.inner, "normed": row.qkv.inner}
    # Strips are whole: each has `STRIP` entries of every row (project.cuh).
    whole_strips = {name: -(-n // STRIP) * STRIP for name, n in strips.items()}
    # What one layer gives and the next reads, `x`, lies in a result of the custom call that is not returned.
    between = {"x": width} if layers > 1 else {}
    widths = {"y": width, "qkv": sum(row.qkv.columns), "between": width} | whole_strips | between
    shapes = {name: jax.ShapeDtypeStruct((row.qkv.rows, n), dtype) for name, n in widths.items()}
    if not whole:
        return shapes
    del shapes["normed"]
    # XLA allocates results by dtype: scratch is counted in words of four bytes.
    sizes = scratch_bytes(row, layers)
    return shapes | {name: jax.ShapeDtypeStruct((size // 4,), jnp.int32) for name, size in sizes.items()}


def _places(operands: Mapping[str, Param], results: Mapping[str, Param], layers: int) -> list[Places]:
    """Of each layer; the first reads the operand x, the last writes y."""
    found, steps = [], {name: results.get(name, NOTHING) for name in ("normed", "qkv", "attended", "between", "hidden")}
    shared = {name: place for name, place in operands.items() if "." not in name}
    for i in range(layers):
        own = {name.partition(".")[0]: place for name, place in operands.items() if name.endswith(f".{i}")}
        own |= {slot: results[f"{slot}.{i}"] for slot in _CACHES}
        x = results["x"] if i else shared["x"]
        y = results["y"] if i == layers - 1 else results["x"]
        found.append(Places(shared | own, x=x, y=y, **steps))
    return found


def row_of(shapes: Mapping[str, Any], form: LayerForm, parameters: bool) -> Row:
    """The compile-time settings of the kernels, from the operands' shapes; `parameters`: whether the norms' are of the tokens'
    dtype."""
    (rows, _, width), heads, size = shapes["x"].shape, form.heads, form.head_size
    between, hidden = heads * size, _feed_forward_width(shapes, form, 0)
    if form.qkv == "separate":
        columns, turned = (between, form.kv_heads * size, form.kv_heads * size), "q" in form.turned
    else:
        # Packed weights, [3, H, D, E], are [out, in] as they lie.
        columns, turned = (between + 2 * form.kv_heads * size,), form.qkv == "packed" or "qkv" in form.turned
    first, second = (None if e is None else form.norm for e in form.epsilons)
    ahead, none = (first, second) if form.pre_norm else (None, None), (None, None)
    # A norm kernel of its own leaves x in strips, for the product that reads it (project.cuh).
    fused, own = (ahead, none) if fuses_norm(rows, width) else (none, ahead)
    return Row(
        dtype=np.dtype(shapes["x"].dtype).name,
        parameters=parameters,
        pre_norm=form.pre_norm,
        norms=(first, second),
        epsilons=form.epsilons,
        activation=form.activation,
        qkv=ProductPhase(rows, width, columns, turned, norm=fused[0], strips=own[0] is not None),
        attention=_attention_of(shapes, form),
        out=ProductPhase(rows, between, (width,), "out" in form.turned, strips=True),
        up=ProductPhase(rows, width, (hidden,), "up" in form.turned, form.gated, fused[1], own[1] is not None),
        down=ProductPhase(rows, hidden, (width,), "down" in form.turned, strips=True),
    )


def _attention_of(shapes: Mapping[str, Any], form: LayerForm) -> AttentionPhase:
    cos, mask = shapes.get("cos"), shapes.get("mask")
    return AttentionPhase(
        rows=shapes["x"].shape[0],
        heads=form.heads,
        kv_heads=form.kv_heads,
        size=form.head_size,
        past=shapes["cache_k.0"].shape[form.axis],
        layout=form.cache_layout,
        interleaved=form.qkv == "interleaved",
        causal=form.is_causal,
        scale=form.scale,
        mask_is_finite=mask is not None and math.isfinite(form.mask_value),
        step_of_each=len(shapes["step"].shape) == 1,
        mask_of_each=mask is not None and mask.shape[0] > 1,
        turn_of_each=cos is not None and len(cos.shape) == 3 and cos.shape[0] > 1,
        rotary=form.rotary,
        rotary_width=0 if cos is None else cos.shape[-1],
    )
