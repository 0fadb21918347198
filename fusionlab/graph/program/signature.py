"""Signatures: hashable forms of nodes and regions, equal where they compute the same thing the same way; and a memory keyed by them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..jax_compat import rule_functions, varying_axes
from .explicit_axes import sharding_in_type
from .ir import Block, Literal, Node, Value
from .scopes import is_jax_file


@dataclass
class Memo:
    """A cache of answers, keyed by all that they depend on; `hits` and `misses` are visible."""

    hits: int = field(default=0, kw_only=True)
    misses: int = field(default=0, kw_only=True)
    _known: dict[Any, Any] = field(default_factory=dict, repr=False, kw_only=True)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key in self._known:
            self.hits += 1
        else:
            self.misses += 1
            self._known[key] = make()
        return self._known[key]


Size = Callable[[Any], Any]  # what stands for the size of an axis in a signature


def as_it_is(size: Any) -> Any:
    return size


def node_signature(node: Node, number: dict[int, Any], size: Size = as_it_is) -> Any:
    """A hashable form of a node; `number` renames values in order of appearance and is extended."""
    ins = tuple(number.setdefault(a.id, len(number)) if isinstance(a, Value) else _literal_key(a) for a in node.inputs)
    params = params_signature(node, size)
    if "jvp_jaxpr_fun" in node.params:
        params += (_rule_key(node.params["jvp_jaxpr_fun"]),)
    for value in node.outputs:
        number[value.id] = len(number)
    outs = tuple(type_key(v, size) for v in node.outputs)
    return node.primitive, ins, params, outs, tuple(block_signature(b, size) for b in node.blocks)


def type_key(value: Value, size: Size) -> Any:
    """The type of a value, with its explicit sharding, which its replacement must be able to have, and the mesh axes along which it is
    typed as varying."""
    varying = tuple(sorted(map(str, varying_axes(value.aval))))
    return tuple(map(size, value.shape)), _dtype_key(value.dtype), sharding_in_type(value.aval), varying


_dtype_key = functools.cache(str)


def params_signature(node: Node, size: Size = as_it_is) -> tuple[Any, ...]:
    """A hashable form of a node's parameters but jaxprs, rules and shardings."""
    items = [(k, v) for k, v in node.params.items() if k not in _IGNORED and not holds_jaxpr(v)]
    return tuple(sorted((k, _sizes_key(v, size) if k in _SHAPES else _param_key(v)) for k, v in items))


def _sizes_key(value: Any, size: Size) -> Any:
    return tuple(map(size, value)) if isinstance(value, tuple) else _param_key(value)


_SHAPES = frozenset({"shape", "new_sizes"})  # parameters that are the sizes of a result
_IGNORED = frozenset({"jvp_jaxpr_fun", "sharding", "out_sharding"})


def _rule_key(rule: Any) -> Any:
    """The key of a custom_jvp rule: the code of JAX's functions, which are created for each trace, and the user's functions."""
    functions = rule_functions(rule)
    return tuple(f.__code__ if is_jax_file(f.__code__.co_filename) else f for f in functions)


def block_signature(block: Block, size: Size = as_it_is) -> Any:
    number = {v.id: i for i, v in enumerate(block.inputs)}
    for value, const in block.consts:
        number[value.id] = -1 - (id(const) & 0xFFFFFFFFFFFF)  # a captured array is equal only to itself
    body = tuple(node_signature(n, number, size) for n in block.nodes)
    return body, tuple(number[a.id] if isinstance(a, Value) else _literal_key(a) for a in block.outputs)


def _literal_key(literal: Literal) -> Any:
    return "lit", repr(np.asarray(literal.val).tolist()), str(literal.dtype)


def holds_jaxpr(value: Any) -> bool:
    """Whether a parameter is a program, or has programs in it."""
    items = value if isinstance(value, tuple | list) else (value,)
    return any(hasattr(i, "eqns") or hasattr(i, "jaxpr") for i in items)


def _param_key(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_param_key(v) for v in value)
    if isinstance(value, int | float | np.integer | np.floating):
        return _number_key(value)
    if isinstance(value, type):  # a dtype may be named by its class; another class is none, but an "object"
        with contextlib.suppress(TypeError):
            value = value if np.dtype(value).kind == "O" else np.dtype(value)
    array = getattr(value, "val", value)  # an attribute of an `ffi_call` holds its array
    if isinstance(array, np.ndarray):  # printed, it is shortened and rounded
        return array.shape, str(array.dtype), array.tobytes()
    text = str(value)
    return (text, _Itself(value)) if " at 0x" in text or (callable(value) and not isinstance(value, type)) else text


def _number_key(value: Any) -> Any:
    """Equal for equal numbers, also of several types, but not for 0.0 and -0.0."""
    if isinstance(value, int | np.integer):
        return int(value)
    return "-0.0" if repr(float(value)) == "-0.0" else float(value)


class _Itself:
    """A key that is equal only to that of the same object, which it keeps alive: the id of one that is gone may be another's."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)
