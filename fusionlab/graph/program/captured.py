"""Arrays that a program has captured: which can be read while it is traced, which are known numbers, and which are equal."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

_READ_FROM_DEVICE = 1 << 20  # bytes; what is larger and not in the host's memory is not fetched to be compared
_SAMPLES = 64  # entries that are compared first


def readable(const: Any) -> bool:
    """Whether a captured array has values that can be read now and here: no tracer of an enclosing transformation, not spread over
    devices, not donated, no random keys.
    """
    if isinstance(const, np.ndarray | np.generic):
        return True
    if (
        not isinstance(const, jax.Array)
        or isinstance(const, Tracer)
        or jnp.issubdtype(const.dtype, jax.dtypes.extended)
    ):
        return False  # of a variable of flax's, which is traced where it is read, among others
    return not const.is_deleted() and len(const.sharding.device_set) == 1 and const.is_fully_addressable


def read(const: Any) -> np.ndarray:
    """The values of a readable array. Whoever forbids transfers means those of the program, which this one is not part of."""
    with jax.transfer_guard("allow"):
        return np.asarray(const)


def number(const: Any) -> np.ndarray | None:
    """The one number that a captured array is, whatever its rank; None for any other."""
    if math.prod(getattr(const, "shape", (0,))) != 1 or not readable(const):
        return None
    return read(const).reshape(())


class Captured:
    """The arrays of one program, equal ones of which are one: a table that is made of numpy in each call is one table.

    Bytes are compared, of arrays that agree in all else: type, weakness and where they lie. Arrays of one number everywhere stay apart:
    zeros and ones are what parameters begin as, each of its own layer.
    """

    def __init__(self) -> None:
        self._chosen: dict[int, Any] = {}  # id of an array -> the one that stands for it; both are held
        self._held: list[Any] = []
        self._kinds: dict[Any, list[Any]] = {}

    def representative(self, const: Any, aval: Any) -> Any:
        """The array that stands for this one: the first that equals it."""
        if id(const) not in self._chosen:
            self._held.append(const)
            self._chosen[id(const)] = self._first(const, aval)
        return self._chosen[id(const)]

    def _first(self, const: Any, aval: Any) -> Any:
        if not readable(const):
            return const
        placed = (const.sharding, const.committed) if isinstance(const, jax.Array) else (type(const),)
        alike = self._kinds.setdefault((aval, *placed), [])
        equal = next((other for other in alike if _equal(const, other)), None)
        if equal is None:
            alike.append(const)
        return const if equal is None else equal


def _equal(first: Any, second: Any) -> bool:
    """Whether two readable arrays of one type have the same bytes; False where that is not worth its price."""
    if not (_cheap(first) and _cheap(second)):
        return False
    mine, other = read(first).reshape(-1), read(second).reshape(-1)
    step = max(1, mine.size // _SAMPLES)
    if mine[::step].tobytes() != other[::step].tobytes() or (mine == mine[:1]).all():
        return False
    return mine.tobytes() == other.tobytes()


def _cheap(const: Any) -> bool:
    there = isinstance(const, jax.Array) and any(d.platform != "cpu" for d in const.sharding.device_set)
    return not there or const.nbytes <= _READ_FROM_DEVICE
