"""Arrays captured by a program: which of them can be read during tracing, are known numbers, or are equal."""

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
    """Whether the values of a captured array can be read here and now: it is not a tracer of an enclosing transformation, not sharded over
    devices, not donated, and not random keys.
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
    """The values of a readable array. A user's transfer guard is meant for the program, of which this transfer is not part."""
    with jax.transfer_guard("allow"):
        return np.asarray(const)


def number(const: Any) -> np.ndarray | None:
    """The number in a captured array with one entry, of any rank; None for any other array."""
    if math.prod(getattr(const, "shape", (0,))) != 1 or not readable(const):
        return None
    return read(const).reshape(())


class Captured:
    """The arrays of one program, with equal arrays identified: a table that numpy computes in every call is one table.

    Bytes are compared if arrays agree in type, weakness and placement. Arrays with equal entries stay separate: zeros and ones
    are initial parameters, each of its own layer.
    """

    def __init__(self) -> None:
        self._chosen: dict[int, Any] = {}  # id of an array -> the one that stands for it; both are held
        self._held: list[Any] = []
        self._kinds: dict[Any, list[Any]] = {}

    def representative(self, const: Any, aval: Any) -> Any:
        """The representative of an array: the first that equals it."""
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
    """Whether two readable arrays of one type have the same bytes; False if the comparison is too expensive."""
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
