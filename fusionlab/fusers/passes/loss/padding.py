"""Padding of the vocabulary: which classes a program leaves, and the number that it gives to the others, by `where` or by writing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ....graph.canonical.view import CanonicalView
from ....graph.certify.inputs import Reduction, inputs_of
from ....graph.interpret.evaluate import evaluate
from ....graph.interpret.limits import CannotEvaluate
from ....graph.matching.constants import is_constant
from ....graph.matching.walks import makers_of
from ....graph.program.equations import slice_jaxpr
from ....graph.program.ir import Atom, Node, Value

# The derivative of a scatter whose indices may repeat is a choice and a sum.
OVERWRITES = frozenset({"select_n", "scatter", "scatter-add", "scatter-mul", "dynamic_update_slice"})


def padding(view: CanonicalView, nodes: Sequence[Node], logits: Atom | None, classes: int) -> tuple[int, float] | None:
    """(the number of classes that nodes leave as they are, the number that the ones after them get); None if the nodes do anything else to
    the logits, or depend on more than constants."""
    closed = _overwriting(view, nodes, logits) if isinstance(logits, Value) else None
    found = None if closed is None or not isinstance(logits, Value) else _by_class(closed, logits, classes)
    if found is None:
        return None
    kept, entries = found
    count = int(kept.sum())
    if not 0 < count < classes or not kept[:count].all() or len(set(entries[count:])) > 1:
        return None
    return (count, float(entries[-1])) if entries[-1] < math.inf else None


def given_to(view: CanonicalView, nodes: Sequence[Node], logits: Atom | None) -> list[Value]:
    """What nodes read besides the logits that the program does not compute from numbers: inputs and captured arrays."""
    return [a for a in _others(nodes, logits) if not is_constant(view, a)]


def _others(nodes: Sequence[Node], logits: Atom | None) -> list[Value]:
    made = {v.id for n in nodes for v in n.outputs} | ({logits.id} if isinstance(logits, Value) else set())
    return [a for n in nodes for a in n.values if a.id not in made]


def _overwriting(view: CanonicalView, nodes: Sequence[Node], logits: Value) -> Any:
    """A jaxpr of the logits for nodes that read constants besides them; None if they read more."""
    others = _others(nodes, logits)
    if not all(is_constant(view, a) for a in others):
        return None
    wanted = {n.id: n for n in (*nodes, *(m for a in others for m in makers_of(view, a)))}
    return slice_jaxpr(
        view.block, [wanted[i] for i in sorted(wanted)], (logits,), nodes[-1].outputs[0], view.known_inputs
    )


def _by_class(closed: Any, logits: Value, classes: int) -> tuple[np.ndarray, np.ndarray] | None:
    """(whether an entry stays as it is, what it becomes) by class; None if rows differ in that."""
    sizes, (drawn, _) = inputs_of([logits.aval], logits.aval, Reduction({classes: classes}))
    try:
        (found,) = evaluate(closed, [drawn], sizes)
    except CannotEvaluate:
        return None
    found, drawn = (np.asarray(a, np.float64).reshape(-1, classes) for a in (found, drawn))
    kept = found == drawn
    rows = np.where(kept, 0.0, found)
    same = (kept == kept[0]).all() and (rows == rows[0]).all()
    return (kept[0], rows[0]) if same else None
