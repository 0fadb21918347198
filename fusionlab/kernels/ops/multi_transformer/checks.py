"""Checks of the operands of a call of `multi_transformer`: names, shapes and dtypes, each with an error that names the argument."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ...op.arrays import FLOATS, check_name
from .attributes import checked_attributes, refused, scale_of

SHARED = ("x", "mask", "step", "lengths", "cos", "sin")
PER_LAYER = (
    *("norm1_scale", "norm1_bias", "q", "k", "v", "q_bias", "k_bias", "v_bias", "qkv", "qkv_bias", "out", "out_bias"),
    *("norm2_scale", "norm2_bias", "up", "up_bias", "gate", "gate_bias", "down", "down_bias", "cache_k", "cache_v"),
)

OF_ATTENTION = (*SHARED[1:], *PER_LAYER[:12], "cache_k", "cache_v")


@dataclass(frozen=True)
class LayerSizes:
    """The lengths of the axes of a call, by the letters of layer.py; `past` is the length of the caches along the sequence."""

    b: int
    s: int
    e: int
    h: int
    g: int
    d: int
    past: int

    @property
    def wide(self) -> int:
        """Columns of queries, keys and values together."""
        return (self.h + 2 * self.g) * self.d

    def seen(self, cache: str | None) -> int:
        """T."""
        return {"append": self.past + self.s, "write": self.past}.get(cache or "", self.s)


def checked(given: Mapping[str, Any], full: dict[str, Any]) -> dict[str, Any]:
    """The attributes in canonical form, and the size of a head with them.

    Raises:
      ArgumentError: names the operand or attribute, its value and the allowed ones.
      UnknownNameError: there is no operand, layout, norm or activation of that name.
    """
    full = checked_attributes(full)
    _check_present(given, full)
    given = {name: _by_letters(name, a, full) for name, a in given.items()}
    sizes = _sizes(given, full)
    full |= {"heads": sizes.h, "kv_heads": sizes.g, "scale": scale_of(full["scale"], sizes.d), "head_size": sizes.d}
    _check_shared(given, full, sizes)
    for i in range(full["layers"]):
        _check_layer(given, full, sizes, i)
    _check_dtypes(given)
    return full


# How weights lie.

_BY_HEADS = ("q", "k", "v", "q_bias", "k_bias", "v_bias", "qkv", "qkv_bias", "out")


def _by_letters(name: str, a: Any, full: Mapping[str, Any]) -> Any:
    """A weight with an axis for each of its letters, whichever way it lies: `turned`, and with heads merged with their entries."""
    slot = name.partition(".")[0]
    shape = tuple(a.shape)
    if slot in full["turned"] and len(shape) > 1:
        shape = (*shape[1:], shape[0]) if slot == "out" else (shape[-1], *shape[:-1])
    heads = full["kv_heads"] or full["heads"] if slot[0] in "kv" else full["heads"]
    if slot in _BY_HEADS and heads is not None:
        shape = _apart(slot, shape, heads, full["qkv"])
    return jax.ShapeDtypeStruct(shape, a.dtype)


def _apart(slot: str, shape: tuple[int, ...], heads: int, qkv: str) -> tuple[int, ...]:
    """A shape in which heads and their entries have an axis each, where they are merged."""
    bias, fused = slot.endswith("_bias"), slot.startswith("qkv")
    # Packed weights are [3 H D, E], and interleaved ones [E, H 3 D]: the three of a head are side by side.
    parts = {"packed": (3, heads), "interleaved": (heads, 3)}.get(qkv) if fused else (heads,)
    if parts is None or len(shape) != (1 if bias else 2):
        return shape
    at = 0 if bias or slot == "out" or (fused and qkv == "packed") else 1
    entries, left = divmod(shape[at], math.prod(parts))
    return shape if left else (*shape[:at], *parts, entries, *shape[at + 1 :])


# Which operands there are.


@dataclass(frozen=True)
class _Group:
    """Slots that are read together: `needed` ones, what an array is needed for, `optional` ones, and why nothing reads them where
    nothing does."""

    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    are_read: bool = True
    why_not: str = ""
    what_for: str = ""


def _groups(full: Mapping[str, Any]) -> tuple[_Group, ...]:
    cache, separate, qkv = full["cache"], full["qkv"] == "separate", f"qkv is {full['qkv']!r}"
    for_qkv, for_cache = f" for qkv={full['qkv']!r}", f" for cache={cache!r}"
    step = f"cache is {cache!r}: only cache='write' has a step"
    norms = (
        _Group(
            (),
            (f"norm{i + 1}_scale", f"norm{i + 1}_bias"),
            e is not None,
            f"epsilons[{i}] is None: there is no such norm",
        )
        for i, e in enumerate(full["epsilons"])
    )
    return (
        _Group(("x",)),
        _Group(("step",), (), cache == "write", step, for_cache),
        _Group(("cos", "sin"), (), full["rotary"] is not None, "rotary is None", " for rotary"),
        _Group(("q", "k", "v"), ("q_bias", "k_bias", "v_bias"), separate, qkv, for_qkv),
        _Group(("qkv",), ("qkv_bias",), not separate, qkv, for_qkv),
        _Group(("out",)),
        _Group(("cache_k", "cache_v"), (), cache is not None, "cache is None", for_cache),
        _Group(("up", "down")),
        _Group(("gate",), ("gate_bias",), full["gated"], "gated is False", " for gated=True"),
        *norms,
    )


def _check_present(given: Mapping[str, Any], full: Mapping[str, Any]) -> None:
    valid = {*SHARED, *(f"{slot}.{i}" for slot in PER_LAYER for i in range(full["layers"]))}
    for name in given:
        check_name("multi_transformer operand", name, valid)
    groups, part = _groups(full), full["part"]
    for name, what_for in _needed(groups, part, full["layers"]).items():
        if name not in given:
            raise refused(f"{name} is missing, needed an array{what_for}")
    for name in given:
        if why := _unread(name.partition(".")[0], groups, part):
            raise refused(f"{name} is given, and {why}; leave it out")
    _check_hidden(given, full)


def _check_hidden(given: Mapping[str, Any], full: Mapping[str, Any]) -> None:
    """A finite mask value is for what mask hides alone."""
    if full["mask_value"] != -math.inf and (
        "lengths" in given or (full["is_causal"] and full["cache"] in ("append", "write"))
    ):
        raise refused(
            f"mask_value is {full['mask_value']:g}, which hides less than lengths and is_causal do; "
            f"needed -inf, or a mask that hides all of it"
        )


def _unread_in_part(slot: str, part: str | None) -> str | None:
    """Why a part of a layer does not read a slot; None where it does, or where whole layers are asked for."""
    if part is None or slot not in PER_LAYER + SHARED[1:]:
        return None
    if slot in ("out_bias", "down_bias"):
        return f"part is {part!r}: its result is yet to be summed"
    return f"part is {part!r}" if (slot in OF_ATTENTION) != (part == "attention") else None


def _needed(groups: Sequence[_Group], part: str | None, layers: int) -> dict[str, str]:
    """The names of the operands that have to be there, shared ones first, and what each is needed for."""
    read = [(s, g.what_for) for g in groups if g.are_read for s in g.needed if not _unread_in_part(s, part)]
    # A shared one has its own name, and no number of a layer.
    return {slot: what_for for slot, what_for in read if slot in SHARED} | {
        f"{slot}.{i}": what_for for i in range(layers) for slot, what_for in read if slot not in SHARED
    }


def _unread(slot: str, groups: Sequence[_Group], part: str | None) -> str | None:
    """Why nothing reads a slot in such a call; None where it is read."""
    unread = (g.why_not for g in groups if not g.are_read and slot in (*g.needed, *g.optional))
    return _unread_in_part(slot, part) or next(unread, None)


# Shapes.


def _sizes_without_heads(x: tuple[int, ...]) -> LayerSizes:
    """Of a feed-forward alone."""
    b, s, e = x
    if min(s, e) < 1:
        raise refused(f"x has shape {x}; needed at least one token and feature")
    return LayerSizes(b, s, e, 1, 1, 1, 0)


def _past(given: Mapping[str, Any], full: Mapping[str, Any]) -> int:
    """How many tokens a cache has room for; 0 without one."""
    if full["cache"] is None:
        return 0
    cache = tuple(given["cache_k.0"].shape)
    if len(cache) != 4:
        raise refused(f"cache_k.0 has shape {cache}, rank {len(cache)}; needed rank 4, {full['cache_layout']}")
    return cache[full["cache_layout"].index("S")]


def _sizes(given: Mapping[str, Any], full: Mapping[str, Any]) -> LayerSizes:
    x = tuple(given["x"].shape)
    if len(x) != 3:
        raise refused(f"x has shape {x}, rank {len(x)}; needed rank 3, [B, S, E]")
    if full["part"] == "feed_forward":
        return _sizes_without_heads(x)
    out = tuple(given["out.0"].shape)
    if len(out) != 3:
        raise refused(f"out.0 has shape {out}, rank {len(out)}; needed [H, D, E], or [H D, E] and heads")
    h, d, _ = out
    if min(*x[1:], h, d) < 1:
        raise refused(f"x has shape {x} and out.0 {out}; needed at least one token, feature, head and entry of a head")
    if full["heads"] not in (None, h):
        raise refused(f"heads is {full['heads']}, and out.0 {out} has {h} heads; needed the same")
    g = _kv_heads(given, full, x[2], h, d)
    if full["kv_heads"] not in (None, g):
        raise refused(f"kv_heads is {full['kv_heads']}, and the weights have {g} key heads; needed the same")
    if h % g:
        raise refused(f"{g} key heads and {h} heads; needed a number of key heads that divides the heads")
    past = _past(given, full)
    sizes = LayerSizes(*x, h, g, d, past)
    if full["cache"] in ("write", "prefill") and sizes.s > past:
        raise refused(
            f"x has {sizes.s} tokens, and the caches hold {past}; needed caches that hold them: make them longer"
        )
    return sizes


def _kv_heads(given: Mapping[str, Any], full: Mapping[str, Any], e: int, h: int, d: int) -> int:
    if full["qkv"] == "separate":
        k = tuple(given["k.0"].shape)
        if len(k) != 3 or k[1] < 1:
            raise refused(f"k.0 has shape {k}; needed [E, G, D], or [E, G D] and kv_heads")
        return k[1]
    if full["qkv"] in ("interleaved", "packed"):
        return h
    width = tuple(given["qkv.0"].shape)[-1:]
    columns = width[0] if width else 0
    g, left = divmod(columns - h * d, 2 * d)
    if left or g < 1:
        raise refused(
            f"qkv.0 has {columns} columns; needed (H + 2 G) D with H = {h} and D = {d}, as out.0 has them: all of the queries, then keys, "
            f"then values"
        )
    return g


def _check_mask(shape: tuple[int, ...], scores: tuple[int, int, int, int]) -> None:
    b, h, s, t = scores
    if not (len(shape) == 4 and shape[3] == t and all(n in (1, m) for n, m in zip(shape, scores, strict=True))):
        raise refused(
            f"mask has shape {shape}, needed [1 or {b}, 1 or {h}, 1 or {s}, {t}]: batch, heads, queries, keys"
        )


def _check_shared(given: Mapping[str, Any], full: Mapping[str, Any], sizes: LayerSizes) -> None:
    b, s, h, t = sizes.b, sizes.s, sizes.h, sizes.seen(full["cache"])
    if "mask" in given:
        _check_mask(tuple(given["mask"].shape), (b, h, s, t))
    if "step" in given and tuple(given["step"].shape) not in ((), (b,)):
        raise refused(
            f"step has shape {tuple(given['step'].shape)}, needed a scalar, or ({b},): one for each of the batch"
        )
    if "lengths" in given and tuple(given["lengths"].shape) != (b,):
        raise refused(f"lengths has shape {tuple(given['lengths'].shape)}, needed ({b},): one for each of the batch")
    for name in ("cos", "sin"):
        if name in given:
            _check_rotary(name, given, 2 * full["rotary"], sizes)


def _check_rotary(name: str, given: Mapping[str, Any], pieces: int, sizes: LayerSizes) -> None:
    """Of a table for the turns of so many pieces of a head."""
    b, s, shape = sizes.b, sizes.s, tuple(given[name].shape)
    fits = len(shape) in (2, 3) and shape[-2] == s and 0 < shape[-1] <= sizes.d and shape[-1] % pieces == 0
    if not fits or shape != tuple(given["cos"].shape) or (len(shape) == 3 and shape[0] not in (1, b)):
        raise refused(
            f"{name} has shape {shape}, needed [{s}, W] or [1 or {b}, {s}, W], alike for cos and sin, with W a multiple "
            f"of {pieces} up to the {sizes.d} of a head"
        )


# The axes of each slot, by the letters of layer.py; W: the columns of queries, keys and values together, P: the tokens of a cache.
_AXES = (
    dict.fromkeys(("norm1_scale", "norm1_bias", "norm2_scale", "norm2_bias", "out_bias", "down_bias"), "E")
    | {"q": "EHD", "k": "EGD", "v": "EGD", "q_bias": "HD", "k_bias": "GD", "v_bias": "GD", "out": "HDE"}
    | {"up": "EF", "up_bias": "F", "gate": "EF", "gate_bias": "F", "down": "FE"}
)
_QKV_AXES = {"separate": (), "concatenated": ("EW", "W"), "interleaved": ("EH3D", "H3D"), "packed": ("3HDE", "3HD")}
_CACHE_AXES = {"BSHD": "BPGD", "BHSD": "BGPD"}


def _check_layer(given: Mapping[str, Any], full: Mapping[str, Any], sizes: LayerSizes, i: int) -> None:
    up = tuple(getattr(given.get(f"up.{i}"), "shape", ()))
    lengths = {"B": sizes.b, "E": sizes.e, "H": sizes.h, "G": sizes.g, "D": sizes.d, "W": sizes.wide, "3": 3}
    lengths |= {"P": sizes.past, "F": up[-1] if len(up) == 2 else 0}
    cache = dict.fromkeys(("cache_k", "cache_v"), _CACHE_AXES[full["cache_layout"]])
    qkv = zip(("qkv", "qkv_bias"), _QKV_AXES[full["qkv"]], strict=False)
    for slot, axes in (_AXES | dict(qkv) | cache).items():
        a, needed = given.get(f"{slot}.{i}"), tuple(lengths[x] for x in axes)
        if a is None or tuple(a.shape) == needed:
            continue
        letters = f", [{', '.join(axes).replace('W', '(H + 2 G) D')}]" if axes not in ("E", "F") else ""
        if slot in cache:
            letters = f", {full['cache_layout']} with the tokens along S"
        raise refused(f"{slot}.{i} has shape {tuple(a.shape)}, needed {needed}{letters}")


# Dtypes.


def _check_dtypes(given: Mapping[str, Any]) -> None:
    x = np.dtype(given["x"].dtype)
    wide = max(4, x.itemsize)
    for name, a in given.items():
        dtype = np.dtype(a.dtype)
        if name in ("step", "lengths"):
            if dtype.kind not in "iu":
                raise refused(f"{name} has dtype {dtype.name}, needed an integer dtype")
        elif name == "mask" and dtype == np.bool_:
            continue
        elif dtype.name not in FLOATS:
            needed = f"{'bool or ' if name == 'mask' else ''}one of {', '.join(FLOATS)}"
            raise refused(f"{name} has dtype {dtype.name}, needed {needed}")
        elif name == "mask" and dtype.itemsize > wide:
            raise refused(
                f"mask has dtype {dtype.name}, wider than the scores of {x.name} tokens; cast it with .astype"
            )
