"""A program in float64, operation by operation in NumPy: a program of thousands of small operations is done before XLA has compiled it.

What NumPy has no rule for, or another meaning at the edges, JAX runs, one operation at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.core import Tracer

from ..jax_compat import child_jaxprs, scan_counts, split_closed
from ..primitives import having
from .evaluate import ReducedSizes, _Run
from .limits import CannotEvaluate
from .numpy_indexing import PLACED
from .numpy_rules import PLAIN, SHAPED
from .pieces import Piece, Program
from .widen import Interpreter, Val, draws, is_inexact, plain, wide_dtype, widen

_RULES = having("rule")
# Of integers beyond their range and by zero, XLA and NumPy give other results; of bits too.
_BY_JAX = frozenset(
    "rem shift_left shift_right_logical shift_right_arithmetic bitcast_convert_type nextafter conv_general_dilated".split()
)
# Of integers: NumPy multiplies and adds in the operands' dtype, has no bitwise "all", and takes no exponent that the dtype does not hold.
_OF_FLOATS = frozenset("dot_general integer_pow reduce_and reduce_or".split())
_KNOWN = (frozenset(PLAIN) | frozenset(SHAPED) | frozenset(PLACED)) - _BY_JAX
_EQUATION_S, _BYTE_S, _FLOP_S = 6e-5, 1e-9, 2e-10  # of NumPy, on one core
_COMPILED_S = 0.05  # for an operation that JAX runs, once for each of its types
_TURNS = 10  # of a while loop, which nobody knows
_MOST_TURNS = 100  # of one that is not compiled; JAX runs the others


class ByOperation(Interpreter):
    """Evaluates jaxprs with floats widened, on NumPy arrays. Values are not differentiated, and nothing is drawn at random."""

    def __init__(self, inline: Callable[[Any], Callable | None] | None = None) -> None:
        super().__init__(inline)
        self._numpy = _Run(ReducedSizes(), lambda eqn: None)

    def literal(self, value: np.ndarray) -> Val:
        return plain(np.asarray(value, wide_dtype(value.dtype)))

    def constant(self, const: Any, aval: Any) -> Val:
        return plain(widen(np.asarray(const)))

    def equation(self, eqn: Any, vals: list[Val]) -> list[Val]:
        rule = _REGIONS.get(eqn.primitive.name)
        is_ours = self.inline is not None and self.inline(eqn) is not None
        if rule is None or is_ours or any(_is_traced(v.high) for v in vals):
            return super().equation(eqn, vals)
        return rule(self, eqn, vals)

    def _body(self, eqn: Any, vals: list[Val]) -> list[Val]:
        """Of a function with a rule for its derivative, which is not needed."""
        return self.run(eqn.params.get("call_jaxpr", eqn.params.get("jaxpr")), vals)

    def _branch(self, eqn: Any, vals: list[Val]) -> list[Val]:
        branches = eqn.params["branches"]
        return self.run(branches[int(np.clip(vals[0].wide, 0, len(branches) - 1))], vals[1:])

    def _steps(self, eqn: Any, vals: list[Val]) -> list[Val]:
        """Of a scan."""
        p = eqn.params
        if not p["length"]:
            return super().equation(eqn, vals)
        n_consts, n_carry = scan_counts(p)
        consts, carry, xs = vals[:n_consts], vals[n_consts : n_consts + n_carry], vals[n_consts + n_carry :]
        times = range(p["length"])
        made: dict[int, list[Val]] = {}
        for t in reversed(times) if p["reverse"] else times:
            outs = self.run(p["jaxpr"], [*consts, *carry, *(jax.tree.map(lambda x, t=t: x[t], x) for x in xs)])
            carry, made[t] = outs[:n_carry], outs[n_carry:]
        return [*carry, *(plain(np.stack([v.wide for v in ys])) for ys in zip(*map(made.get, times), strict=True))]

    def _turns(self, eqn: Any, vals: list[Val]) -> list[Val]:
        """Of a while loop; under vmap each element stops by itself."""
        p = eqn.params
        if split_closed(p["cond_jaxpr"])[0].outvars[0].aval.shape:
            return super().equation(eqn, vals)
        n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        carry = vals[m:]
        for _ in range(_MOST_TURNS):
            if not self.run(p["cond_jaxpr"], [*vals[:n], *carry])[0].wide:
                return carry
            carry = self.run(p["body_jaxpr"], [*vals[n:m], *carry])
        return super().equation(eqn, [*vals[:m], *carry])

    def bind(self, eqn: Any, args: Sequence[Any], params: dict[str, Any]) -> list[Any]:
        if not _is_known(eqn) or not all(map(_is_plain, args)):
            return super().bind(eqn, args, params)
        arrays = [np.asarray(x) for x in args]
        try:
            with np.errstate(all="ignore"):
                found = (
                    [_product(eqn, *arrays)] if eqn.primitive.name == "dot_general" else self._numpy.eqn(eqn, arrays)
                )
        except CannotEvaluate:
            return super().bind(eqn, args, params)
        return [np.asarray(x, wide_dtype(v.aval.dtype)) for x, v in zip(found, eqn.outvars, strict=True)]


_REGIONS: dict[str, Callable[[ByOperation, Any, list[Val]], list[Val]]] = {
    **dict.fromkeys(_RULES, ByOperation._body),
    "scan": ByOperation._steps,
    "while": ByOperation._turns,
    "cond": ByOperation._branch,
}


def _is_traced(x: Any) -> bool:
    return isinstance(x, Tracer)


def _is_plain(x: Any) -> bool:
    """Whether it is an array of numbers that are there, floats in float64."""
    if _is_traced(x) or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return False
    return not is_inexact(x.dtype) or x.dtype == np.float64


def _is_known(eqn: Any) -> bool:
    """Whether NumPy's rule for an equation has XLA's meaning: not always of integers, of complex numbers, or of arrays without entries."""
    name = eqn.primitive.name
    if name not in _KNOWN or any(0 in v.aval.shape for v in eqn.invars):
        return False
    # A cast to complex numbers is to the program's own dtype.
    if any(jnp.issubdtype(v.aval.dtype, np.complexfloating) for v in eqn.outvars):
        return False
    kinds = [jnp.issubdtype(v.aval.dtype, np.integer) for v in (*eqn.invars, *eqn.outvars)]
    if name in _OF_FLOATS:
        return not any(kinds)
    # Integers from floats may be none, or beyond their range.
    return not (kinds[-1] and (name == "div" or (name == "convert_element_type" and not kinds[0])))


def _product(eqn: Any, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """A product by BLAS: axes in the order batch, free, contracted, each kind as one."""
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    lf = [i for i in range(left.ndim) if i not in (*lc, *lb)]
    rf = [i for i in range(right.ndim) if i not in (*rc, *rb)]
    batch, rows, columns = ([x.shape[i] for i in of] for x, of in ((left, lb), (left, lf), (right, rf)))
    terms = math.prod(left.shape[i] for i in lc)
    a = left.transpose(*lb, *lf, *lc).reshape(*batch, math.prod(rows), terms)
    b = right.transpose(*rb, *rc, *rf).reshape(*batch, terms, math.prod(columns))
    return np.matmul(a, b).reshape(*batch, *rows, *columns)


def seconds_by_operation(program: Program) -> float:
    """An estimate of what the outputs of a program take operation by operation; infinite where it cannot run so."""
    if not all(isinstance(item, Piece) for item in program.items):
        return math.inf
    steps = [step for item in program.items if isinstance(item, Piece) for step in item.steps]
    if any(draws(step.eqn) for step in steps):
        return math.inf
    forms: set[tuple[str, ...]] = set()
    return sum(_BYTE_S * step.bytes + _FLOP_S * step.flop + _seconds(step.eqn, forms) for step in steps)


def _seconds(eqn: Any, forms: set[tuple[str, ...]]) -> float:
    """Of an equation and all that it holds, without its arrays; what JAX has to compile counts once for each form."""
    name = eqn.primitive.name
    inner = [e for _, _, child in child_jaxprs(eqn) for e in split_closed(child)[0].eqns]
    if name in _REGIONS:
        times = eqn.params["length"] if name == "scan" else _TURNS if name == "while" else 1
        return _EQUATION_S + times * sum(_seconds(e, forms) for e in inner)
    if _is_known(eqn) or (form := (name, str(eqn.params), *(str(v.aval) for v in eqn.invars))) in forms:
        return _EQUATION_S
    forms.add(form)
    return _COMPILED_S * (1 + len(inner))
