"""Every value of a block of the raw graph, in float64: what the canonical view is measured against.

The values come from one equation after the other, with every float widened: by `fusionlab.graph.interpret.evaluate` where it knows the
primitive, else (or everywhere, where a test asks for it) bound by JAX. What is made of literals alone is computed by JAX in the
program's own dtype, and so is what is drawn at random where JAX computes it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from fusionlab.graph.interpret.evaluate import evaluate, floats_to_float64
from fusionlab.graph.interpret.limits import CannotEvaluate
from fusionlab.graph.interpret.widen import CONSTANT, PLAIN, RANDOM, Interpreter, Val, plain
from fusionlab.graph.jax_compat import enable_x64, split_closed
from fusionlab.graph.program.ir import Atom, Block, Literal, Node, Value

# These mean something only inside a program that runs on every device of a mesh.
OF_MANY_DEVICES = frozenset("psum psum_invariant pmax pmin all_gather all_to_all ppermute axis_index shard_map".split())


class Unknown(Exception):  # noqa: N818 - it is an answer: this value is not computed here
    """A value that cannot be computed outside the program it stands in, as a sum over the devices of a mesh."""


class RawBlock:
    """Every value of a block. `values` has a `Val` for each value id, but for those that are out of reach.

    `drawn` holds the ids of values that depend on floats drawn at random, which are computed in the program's own dtype.

    Args:
      block: a block of a graph.
      inputs: one array an input, floats of the block's own dtypes or float64.
      by_jax: let JAX run every equation, which compiles each; otherwise `evaluate` runs those it knows, in numpy.
    """

    def __init__(self, block: Block, inputs: Sequence[Any], by_jax: bool = False) -> None:
        self._interpreter, self._by_jax = Interpreter(), by_jax
        self.values: dict[int, Val] = {}
        self.drawn: set[int] = set()
        with enable_x64():
            for value, array in zip(block.inputs, inputs, strict=True):
                self.values[value.id] = plain(_wide(array))
            for value, const in block.consts:
                self.values[value.id] = _constant(const, value) if not value.shape else plain(_wide(const))
            for node in block.nodes:
                self._run(node)

    def _run(self, node: Node) -> None:
        try:
            operands = [self.read(a) for a in node.inputs]
            results = self.equation(node, operands)
        except Unknown:
            return
        self.values.update(zip((v.id for v in node.outputs), results, strict=True))
        if any(v.kind == RANDOM for v in operands) or any(
            a.id in self.drawn for a in node.inputs if isinstance(a, Value)
        ):
            self.drawn.update(v.id for v in node.outputs)

    def read(self, atom: Atom) -> Val:
        if isinstance(atom, Literal):
            return _constant(atom.val, atom)
        if atom.id not in self.values:
            raise Unknown(atom.name)
        return self.values[atom.id]

    def equation(self, node: Node, operands: Sequence[Val]) -> list[Val]:
        """The results of one equation on these operands.

        Raises:
          Unknown: it speaks to other devices.
        """
        constant = bool(operands) and all(v.kind == CONSTANT for v in operands)
        known = not self._by_jax and all(v.kind == PLAIN for v in operands)
        if known or (constant and node.primitive in ("broadcast_in_dim", "pvary")):
            try:
                outs = evaluate(_alone(node), [np.asarray(v.high) for v in operands])
                return [_constant(o, v) if constant else plain(o) for o, v in zip(outs, node.outputs, strict=True)]
            except (CannotEvaluate, TypeError):  # unknown to it; keys are no arrays
                pass
        if node.primitive in OF_MANY_DEVICES:
            raise Unknown(node.primitive)
        return [_rounded(v) for v in self._interpreter.equation(node.eqn, list(operands))]


def _alone(node: Node) -> Any:
    """The jaxpr of one equation, its literals inputs like the rest."""
    eqn = node.eqn
    invars = [jex_core.Var(a.aval) for a in eqn.invars]
    body = jex_core.Jaxpr([], invars, eqn.outvars, [eqn.replace(invars=invars)], eqn.effects, _debug_info())
    return jex_core.ClosedJaxpr(body, ())


@functools.cache
def _debug_info() -> Any:
    """Some debug info, which a jaxpr has to have."""
    return split_closed(jax.make_jaxpr(lambda: None)())[0].debug_info


def _constant(number: Any, like: Any) -> Val:
    low = np.asarray(number).astype(like.dtype) if not is_key(like) else number
    return Val(_wide(low), low, CONSTANT)


def _wide(array: Any) -> Any:
    """numpy, floats in float64; a key stays a key."""
    return array if is_key(array) else floats_to_float64(np.asarray(array))


def _rounded(value: Val) -> Val:
    """A number made of literals alone, rounded as the program rounds it; other values as they are."""
    low = None if value.low is None or is_key(value.low) else np.asarray(value.low)
    if value.kind == RANDOM:
        return value
    uniform = value.kind == CONSTANT and low is not None and low.size and not (low != low.ravel()[0]).any()
    return Val(_wide(low), low, CONSTANT) if uniform else plain(_wide(value.high))


def to_numpy(value: Val) -> Any:
    """A numpy array, floats in float64; a key stays a key."""
    return _wide(value.low if value.kind == RANDOM else value.high)


def is_key(x: Any) -> bool:
    """Whether something with a dtype is a random key or an array of these."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.extended)
