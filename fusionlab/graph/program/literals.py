"""Arithmetic on literals, in the program's dtypes.

`sqrt(bfloat16(8))` is 2.828125 when the program runs, and 0.7 * 10 >= 7 holds in float32: folding in real numbers would give
a different program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np


def _where(which: Any, *cases: Any) -> Any:
    return cases[int(which)]


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative,
    "max": np.maximum, "min": np.minimum, "sqrt": np.sqrt, "exp": np.exp, "log": np.log, "rsqrt": lambda a: 1 / np.sqrt(a),
    "pow": np.power, "square": np.square, "abs": np.abs, "gt": np.greater, "ge": np.greater_equal, "lt": np.less,
    "le": np.less_equal, "eq": np.equal, "ne": np.not_equal, "and": np.bitwise_and, "or": np.bitwise_or,
    "not": np.invert, "select_n": _where,
}  # fmt: skip


def scalar_result(primitive: str, params: Any, operands: Sequence[tuple[Any, Any]], dtype: Any) -> np.ndarray | None:
    """The scalar result of a primitive on scalars, rounded as in the program; None where it is not known here.

    Args:
      primitive, params: of the equation.
      operands: (number, dtype) of each operand.
      dtype: of the result.
    """
    if any(np.dtype(d).kind == "c" for d in (dtype, *(d for _, d in operands))):
        return None  # whoever reads a literal reads a real number
    values = [np.asarray(number).astype(d) for number, d in operands]
    with np.errstate(all="ignore"):
        result = _computed(primitive, params, values, dtype)
    if result is None:
        return None
    result = np.asarray(result).astype(dtype)
    # An overflow or a division by zero is left where it happens; -1e9 as a float16 is minus infinity, and fills scores as that.
    if _became_infinite(result, values) and primitive != "convert_element_type":
        return None
    return result


def _computed(primitive: str, params: Any, values: Sequence[np.ndarray], dtype: Any) -> Any:
    """Numpy's result for the operands, in its own dtype; None if the program's result may differ."""
    integers = any(v.dtype.kind in "iu" for v in values)
    if primitive == "convert_element_type":
        return _convert(values[0], np.dtype(dtype))
    if primitive == "integer_pow":
        return None if integers else np.power(values[0], values[0].dtype.type(params["y"]))
    if primitive in ("broadcast_in_dim", "copy", "pvary", "reshape", "reshard", "squeeze", "stop_gradient"):
        return values[0]
    if primitive not in _OPERATIONS or (integers and primitive in ("div", "pow", "rsqrt")):
        return None
    return _OPERATIONS[primitive](*values)


def _became_infinite(result: np.ndarray, values: Sequence[np.ndarray]) -> bool:
    """Whether a float computed from numbers is infinite or NaN."""
    floats = jnp.issubdtype(result.dtype, jnp.floating)
    return floats and not np.isfinite(result) and all(np.isfinite(v.astype(np.float64)) for v in values)


def _convert(value: np.ndarray, dtype: np.dtype) -> np.ndarray | None:
    if dtype.kind in "iu" and value.dtype.kind not in "iub" and float(value) != int(value):
        return None
    return value.astype(dtype)
