"""What a call of `multi_transformer` has to be: names, shapes, dtypes and numbers, each with an error that names the argument."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ....errors import ArgumentError, unknown_name
from ..gemm_epilogue.activations import ACTIVATIONS
from ..layer_norm.op import KINDS

DTYPES = ("float32", "bfloat16", "float16", "float64")
LAYOUTS = ("separate", "concatenated", "interleaved", "packed")
CACHES = ("append", "write", "prefill")
CACHE_LAYOUTS = ("BSHD", "BHSD")
PARTS = ("attention", "feed_forward")
SHARED = ("x", "mask", "step", "lengths", "cos", "sin")
PER_LAYER = (
    *("norm1_scale", "norm1_bias", "q", "k", "v", "q_bias", "k_bias", "v_bias", "qkv", "qkv_bias", "out", "out_bias"),
    *("norm2_scale", "norm2_bias", "up", "up_bias", "gate", "gate_bias", "down", "down_bias", "cache_k", "cache_v"),
)

OF_ATTENTION = (*SHARED[1:], *PER_LAYER[:12], "cache_k", "cache_v")


def refused(what: str) -> ArgumentError:
    return ArgumentError(f"multi_transformer: {what}")


@dataclass(frozen=True)
class Sizes:
    """The lengths of the axes of a call, by the letters of layer.py; `past` is what the caches hold along the sequence."""

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
      ArgumentError: names the operand or attribute, what it is and what was needed.
      UnknownNameError: there is no operand, layout, norm or activation of that name.
    """
    full = _checked_names(full)
    _check_present(given, full)
    given = {name: _by_letters(name, a, full) for name, a in given.items()}
    sizes = _sizes(given, full)
    full |= {"heads": sizes.h, "kv_heads": sizes.g, "scale": _scale(full["scale"], sizes.d), "head_size": sizes.d}
    _check_shared(given, full, sizes)
    for i in range(full["layers"]):
        _check_layer(given, full, sizes, i)
    _check_dtypes(given)
    return full


# Attributes.


def _check_choices(full: Mapping[str, Any]) -> None:
    for name, valid in (
        ("qkv", LAYOUTS),
        ("norm", KINDS),
        ("activation", ACTIVATIONS),
        ("cache_layout", CACHE_LAYOUTS),
    ):
        if not isinstance(full[name], str) or full[name] not in valid:
            raise unknown_name(f"multi_transformer {name}", full[name], valid)


def _turned(slots: Any) -> tuple[str, ...]:
    """The slots whose weights are [out, in], always in the same order."""
    if not isinstance(slots, tuple | list) or not set(slots) <= set(TURNED):
        raise refused(f"turned is {slots!r}, needed a tuple of {', '.join(TURNED)}: weights that are [out, in]")
    return tuple(slot for slot in TURNED if slot in slots)


def _checked_names(full: dict[str, Any]) -> dict[str, Any]:
    _check_choices(full)
    if full["cache"] is not None and full["cache"] not in CACHES:
        raise unknown_name("multi_transformer cache", full["cache"], CACHES)
    _check_part(full)
    for name in ("pre_norm", "gated", "is_causal", "gives_keys"):
        if not isinstance(full[name], bool):
            raise refused(f"{name} is {full[name]!r}, needed True or False")
    full["turned"] = _turned(full["turned"])
    full["layers"] = _count("layers", full["layers"])
    for name in ("heads", "kv_heads"):
        full[name] = None if full[name] is None else _count(name, full[name])
    if full["rotary"] not in (None, 1, 2) or isinstance(full["rotary"], bool):
        raise refused(f"rotary is {full['rotary']!r}, needed None, 1 or 2: how many position tables turn a head")
    return full | {"epsilons": _epsilons(full["epsilons"]), "mask_value": _mask_value(full["mask_value"])}


def _check_part(full: Mapping[str, Any]) -> None:
    part = full["part"]
    if part is None:
        return
    if part not in PARTS:
        raise unknown_name("multi_transformer part", part, PARTS)
    if full["layers"] != 1:
        raise refused(
            f"part is {part!r} of {full['layers']!r} layers, needed one: what comes between parts is not theirs"
        )
    if part == "feed_forward":
        for name, none in (("cache", None), ("gives_keys", False), ("rotary", None)):
            if full[name] != none:
                raise refused(
                    f"part is 'feed_forward', and {name} is {full[name]!r}; needed {none!r}: it is of the attention"
                )


def _count(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError as e:
        raise refused(f"{name} is {value!r}, needed a whole number from 1 on") from e
    if number < 1:
        raise refused(f"{name} is {number}, needed a whole number from 1 on")
    return number


def _number(name: str, value: Any, needed: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as e:  # a traced value, or no number at all
        raise refused(f"{name} is {value!r}, needed {needed}, known when tracing") from e


def _epsilons(epsilons: Any) -> tuple[float | None, float | None]:
    if not isinstance(epsilons, tuple | list) or len(epsilons) != 2:
        raise refused(f"epsilons is {epsilons!r}, needed a pair: of the attention's norm and of the feed-forward's")
    found = tuple(None if e is None else _number("epsilon", e, "a number, 0 or more") for e in epsilons)
    for e in found:
        if e is not None and not (math.isfinite(e) and e >= 0):
            raise refused(f"epsilon is {e}, needed a finite number, 0 or more, or None for no norm")
    return found[0], found[1]


def _mask_value(value: Any) -> float:
    number = _number("mask_value", value, "a finite number or -inf")
    if not math.isfinite(number) and number != -math.inf:
        raise refused(f"mask_value is {number}, needed a finite number or -inf")
    return number


def _scale(scale: Any, size: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(size)
    number = _number("scale", scale, "a finite number")
    if not math.isfinite(number):
        raise refused(f"scale is {number}, needed a finite number")
    return number


# How weights lie.

TURNED = ("q", "k", "v", "qkv", "out", "up", "gate", "down")
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
    if len(shape) != (1 if bias else 2) or (fused and qkv not in ("interleaved", "packed")):
        return shape
    merged = shape[0] if bias or slot == "out" else shape[1]
    parts = heads * (3 if fused else 1)
    if fused and qkv == "packed":
        rows = shape[0]
        return (3, heads, rows // parts, *shape[1:]) if rows % parts == 0 else shape
    if merged % parts:
        return shape
    apart = (heads, 3, merged // parts) if fused else (heads, merged // heads)
    return (*apart, *shape[1:]) if bias or slot == "out" else (shape[0], *apart)


# Which operands there are.


def _check_present(given: Mapping[str, Any], full: Mapping[str, Any]) -> None:
    valid = {*SHARED, *(f"{slot}.{i}" for slot in PER_LAYER for i in range(full["layers"]))}
    for name in given:
        if name not in valid:
            raise unknown_name("multi_transformer operand", name, valid)
    for name in _needed(full):
        if name not in given:
            raise refused(f"{name} is missing, needed an array{_why(name, full)}")
    for name in given:
        if why := _unread(name.partition(".")[0], full):
            raise refused(f"{name} is given, and {why}; leave it out")
    if full["mask_value"] != -math.inf and (
        "lengths" in given or (full["is_causal"] and full["cache"] in ("append", "write"))
    ):
        raise refused(
            f"mask_value is {full['mask_value']:g}, which hides less than lengths and is_causal do; "
            f"needed -inf, or all that is hidden in mask"
        )


def _needed(full: Mapping[str, Any]) -> list[str]:
    shared = ["x", *(["step"] if full["cache"] == "write" else []), *(["cos", "sin"] if full["rotary"] else [])]
    attention = [*(["q", "k", "v"] if full["qkv"] == "separate" else ["qkv"]), "out"]
    attention += ["cache_k", "cache_v"] if full["cache"] else []
    forward = ["up", "down", *(["gate"] if full["gated"] else [])]
    own = {"attention": attention, "feed_forward": forward}.get(full["part"] or "", attention + forward)
    return [*shared, *(f"{slot}.{i}" for i in range(full["layers"]) for slot in own)]


def _why(name: str, full: Mapping[str, Any]) -> str:
    slot = name.partition(".")[0]
    if slot in ("step", "cache_k", "cache_v"):
        return f" for cache={full['cache']!r}"
    if slot in ("q", "k", "v", "qkv"):
        return f" for qkv={full['qkv']!r}"
    return " for rotary" if slot in ("cos", "sin") else " for gated=True" if slot == "gate" else ""


def _unread(slot: str, full: Mapping[str, Any]) -> str | None:
    """Why nothing reads a slot in such a call; None where it is read."""
    part = full["part"]
    if part is not None and slot in PER_LAYER + SHARED[1:]:
        of_attention = slot in OF_ATTENTION
        if of_attention != (part == "attention") or slot in ("out_bias", "down_bias"):
            return f"part is {part!r}" + ": its result is yet to be summed" * (slot in ("out_bias", "down_bias"))
    separate = ("q", "k", "v", "q_bias", "k_bias", "v_bias")
    if slot in (("qkv", "qkv_bias") if full["qkv"] == "separate" else separate):
        return f"qkv is {full['qkv']!r}"
    if slot == "step" and full["cache"] != "write":
        return f"cache is {full['cache']!r}: only cache='write' has a step"
    if slot in ("cache_k", "cache_v") and full["cache"] is None:
        return "cache is None"
    if slot in ("cos", "sin") and full["rotary"] is None:
        return "rotary is None"
    if slot in ("gate", "gate_bias") and not full["gated"]:
        return "gated is False"
    for number in (1, 2):
        if slot in (f"norm{number}_scale", f"norm{number}_bias") and full["epsilons"][number - 1] is None:
            return f"epsilons[{number - 1}] is None: there is no such norm"
    return None


# Shapes.


def _sizes(given: Mapping[str, Any], full: Mapping[str, Any]) -> Sizes:
    x = tuple(given["x"].shape)
    if len(x) != 3:
        raise refused(f"x has shape {x}, rank {len(x)}; needed rank 3, [B, S, E]")
    if full["part"] == "feed_forward":
        if min(x[1:]) < 1:
            raise refused(f"x has shape {x}; needed at least one token and feature")
        return Sizes(*x, 1, 1, 1, 0)
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
    past = 0
    if full["cache"] is not None:
        cache = tuple(given["cache_k.0"].shape)
        if len(cache) != 4:
            raise refused(f"cache_k.0 has shape {cache}, rank {len(cache)}; needed rank 4, {full['cache_layout']}")
        past = cache[full["cache_layout"].index("S")]
    sizes = Sizes(*x, h, g, d, past)
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


def _check_shared(given: Mapping[str, Any], full: Mapping[str, Any], sizes: Sizes) -> None:
    b, s, h, t = sizes.b, sizes.s, sizes.h, sizes.seen(full["cache"])
    if "mask" in given:
        shape, full_shape = tuple(given["mask"].shape), (b, h, s, t)
        if not (len(shape) == 4 and shape[3] == t and all(n in (1, m) for n, m in zip(shape, full_shape, strict=True))):
            raise refused(
                f"mask has shape {shape}, needed [1 or {b}, 1 or {h}, 1 or {s}, {t}]: batch, heads, queries, keys"
            )
    if "step" in given and tuple(given["step"].shape) not in ((), (b,)):
        raise refused(
            f"step has shape {tuple(given['step'].shape)}, needed a scalar, or ({b},): one for each of the batch"
        )
    if "lengths" in given and tuple(given["lengths"].shape) != (b,):
        raise refused(f"lengths has shape {tuple(given['lengths'].shape)}, needed ({b},): one for each of the batch")
    for name in ("cos", "sin"):
        if name in given:
            _check_rotary(name, given, 2 * full["rotary"], sizes)


def _check_rotary(name: str, given: Mapping[str, Any], pieces: int, sizes: Sizes) -> None:
    """Of a table for the turns of so many pieces of a head."""
    b, s, shape = sizes.b, sizes.s, tuple(given[name].shape)
    fits = len(shape) in (2, 3) and shape[-2] == s and 0 < shape[-1] <= sizes.d and shape[-1] % pieces == 0
    if not fits or shape != tuple(given["cos"].shape) or (len(shape) == 3 and shape[0] not in (1, b)):
        raise refused(
            f"{name} has shape {shape}, needed [{s}, W] or [1 or {b}, {s}, W], alike for cos and sin, with W a multiple "
            f"of {pieces} up to the {sizes.d} of a head"
        )


def _check_layer(given: Mapping[str, Any], full: Mapping[str, Any], sizes: Sizes, i: int) -> None:
    up = given[f"up.{i}"].shape if full["part"] != "attention" else ()
    f = up[-1] if len(up) == 2 else 0
    for slot, needed in _needed_shapes(full, sizes, f).items():
        a = given.get(f"{slot}.{i}")
        if a is not None and tuple(a.shape) != needed:
            raise refused(f"{slot}.{i} has shape {tuple(a.shape)}, needed {needed}{_letters(slot, full)}")


def _needed_shapes(full: Mapping[str, Any], z: Sizes, f: int) -> dict[str, tuple[int, ...]]:
    e, h, g, d = z.e, z.h, z.g, z.d
    projections = {
        "separate": ((), ()),
        "concatenated": ((e, z.wide), (z.wide,)),
        "interleaved": ((e, h, 3, d), (h, 3, d)),
        "packed": ((3, h, d, e), (3, h, d)),
    }
    qkv, qkv_bias = projections[full["qkv"]]
    cache = (z.b, z.past, g, d) if full["cache_layout"] == "BSHD" else (z.b, g, z.past, d)
    vectors = dict.fromkeys(("norm1_scale", "norm1_bias", "norm2_scale", "norm2_bias", "out_bias", "down_bias"), (e,))
    return {
        **vectors,
        "q": (e, h, d),
        "k": (e, g, d),
        "v": (e, g, d),
        "q_bias": (h, d),
        "k_bias": (g, d),
        "v_bias": (g, d),
        "qkv": qkv,
        "qkv_bias": qkv_bias,
        "out": (h, d, e),
        "up": (e, f),
        "up_bias": (f,),
        "gate": (e, f),
        "gate_bias": (f,),
        "down": (f, e),
        "cache_k": cache,
        "cache_v": cache,
    }


_LETTERS = {
    "q": "[E, H, D]",
    "k": "[E, G, D]",
    "v": "[E, G, D]",
    "q_bias": "[H, D]",
    "k_bias": "[G, D]",
    "v_bias": "[G, D]",
    "out": "[H, D, E]",
    "up": "[E, F]",
    "gate": "[E, F]",
    "down": "[F, E]",
}
_QKV_LETTERS = {
    "concatenated": ("[E, (H + 2 G) D]", "[(H + 2 G) D]"),
    "interleaved": ("[E, H, 3, D]", "[H, 3, D]"),
    "packed": ("[3, H, D, E]", "[3, H, D]"),
}


def _letters(slot: str, full: Mapping[str, Any]) -> str:
    if slot in ("qkv", "qkv_bias"):
        return f", {_QKV_LETTERS[full['qkv']][slot == 'qkv_bias']}"
    if slot in ("cache_k", "cache_v"):
        return f", {full['cache_layout']} with the tokens along S"
    return f", {_LETTERS[slot]}" if slot in _LETTERS else ""


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
        elif dtype.name not in DTYPES:
            needed = f"{'bool or ' if name == 'mask' else ''}one of {', '.join(DTYPES)}"
            raise refused(f"{name} has dtype {dtype.name}, needed {needed}")
        elif name == "mask" and dtype.itemsize > wide:
            raise refused(
                f"mask has dtype {dtype.name}, wider than the scores of {x.name} tokens; cast it with .astype"
            )
