"""Whether what a search calls the cotangent of a site's result is the loss's derivative by it: by differences, in float64.

The program is evaluated once in numpy's float64 (fusionlab.graph.interpret.evaluate), all values kept. Then for each site the loss is
evaluated as a function of the site's result alone: of the nodes that hang on the result, everything else held. The result is moved by a
random array d either way, and the central difference of the loss is compared with <cotangent, d>.
Nothing of the matcher or rewriter takes part.

Only sites at the top of the program, with their cotangents there, can be checked so: inside a scan a result is many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fusionlab.graph.interpret.evaluate import evaluate
from fusionlab.graph.interpret.limits import CannotEvaluate
from fusionlab.graph.program.equations import slice_jaxpr
from fusionlab.graph.program.ir import Block, Node, Value

# The loss is smooth but for kinks (relu), which the smaller step seldom meets; its float64 is good to 1e-16.
STEPS = (1e-5, 1e-7)
TOLERANCE = 1e-4  # of |difference - <cotangent, d>| / |cotangent|


@dataclass(frozen=True)
class Check:
    """One site: `error` relative to the cotangent's norm; None where it was not checked, for the reason `left_out`."""

    site: str
    error: float | None
    left_out: str = ""

    @property
    def wrong(self) -> bool:
        return self.error is not None and not self.error <= TOLERANCE


def check_cotangents(found: Any, args: Any, seed: int = 0) -> list[Check]:
    """Checks every site of a train step that was found with its backward pass, fused or not.

    Args:
      found: findings of a step whose first result is the loss, a scalar.
      args: arrays to call the step with.
    """
    pairs = [c for c in (*found.candidates, *found.rejections) if c.backward is not None]
    top: Block = found.graph.top
    loss = top.outputs[0]
    if not isinstance(loss, Value) or loss.shape or not jnp.issubdtype(loss.dtype, jnp.floating):
        return [Check(c.id, None, "the first result is no scalar loss") for c in pairs]
    try:
        values = _evaluated(top, args)
    except CannotEvaluate as problem:
        return [Check(c.id, None, f"not evaluated in numpy: {problem}") for c in pairs]
    generator = np.random.default_rng(seed)
    return [_check(c, top, loss, values, generator) for c in pairs]


def _evaluated(top: Block, args: Any) -> dict[int, np.ndarray]:
    """Every value of the program, by id, floats in float64."""
    leaves = jax.tree.leaves(args)
    given = [wide(leaf) for leaf in leaves]
    made = [v for n in top.nodes for v in n.outputs]
    results = evaluate(slice_jaxpr(top, top.nodes, top.inputs, made), given)
    return dict(zip((v.id for v in (*top.inputs, *made)), (*given, *results), strict=True))


def wide(leaf: Any) -> np.ndarray:
    """An array, floats in float64. Raises CannotEvaluate for a random key."""
    if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
        raise CannotEvaluate("a random key")
    return np.asarray(leaf, np.float64) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) else np.asarray(leaf)


def _check(c: Any, top: Block, loss: Value, values: dict[int, np.ndarray], generator: np.random.Generator) -> Check:
    if c.region is None or c.region.block.path or c.backward.cotangent.id not in values:
        return Check(c.id, None, "it, or its cotangent, stands inside a scan, a checkpoint or the like")
    root: Value = c.region.root
    cotangent = values[c.backward.cotangent.id]
    tail, inputs = loss_of(top, root, loss)
    d = generator.normal(size=root.shape)
    others = [values[v.id] for v in inputs]

    def error(step: float) -> float:
        size = step * max(1e-3, float(np.abs(values[root.id]).max(initial=0)))
        either = (
            [evaluate(tail, [values[root.id] + side * size * d, *others])[0] for side in (1, -1)] if tail else (0, 0)
        )
        difference = float(either[0] - either[1]) / (2 * size)
        return abs(difference - float(np.sum(cotangent * d))) / max(float(np.linalg.norm(cotangent)), 1e-12)

    errors = []
    for step in STEPS:
        try:
            errors.append(error(step))
        except CannotEvaluate as problem:
            return Check(c.id, None, f"not evaluated in numpy: {problem}")
        if errors[-1] <= TOLERANCE:
            break
    return Check(c.id, min(errors))


def loss_of(top: Block, root: Value, loss: Value) -> tuple[Any, list[Value]]:
    """The loss as a function of one value and of others that do not hang on it: (closed jaxpr, the others).

    Args:
      top: the program.
      root: the value.
      loss: what the program returns first; the jaxpr is None where it does not hang on the value.
    """
    moved = {root.id}
    after: list[Node] = []
    for node in top.nodes:
        if any(v.id == root.id for v in node.outputs):
            continue
        if any(isinstance(a, Value) and a.id in moved for a in node.inputs):
            moved.update(v.id for v in node.outputs)
            after.append(node)
    needed, tail = {loss.id}, []
    for node in reversed(after):
        if any(v.id in needed for v in node.outputs):
            tail.append(node)
            needed.update(a.id for a in node.inputs if isinstance(a, Value))
    if loss.id not in moved:
        return None, []
    tail.reverse()
    return slice_jaxpr(top, tail, (root, *(others := _others(top, root, tail))), [loss]), others


def _others(top: Block, root: Value, tail: Sequence[Node]) -> list[Value]:
    own = {v.id for n in tail for v in n.outputs} | {v.id for v, _ in top.consts} | {root.id}
    read: Iterator[Value] = (a for n in tail for a in n.inputs if isinstance(a, Value) and a.id not in own)
    return list({v.id: v for v in read}.values())
