"""Query rows that see no key. A program whose mask is -inf has NaN there, and the fused op has 0 (see `kernels/dot_product_attention`):
a site is not rewritten if its program goes on to test for NaN, since the test would have a different result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...graph.canonical.nodes import ONE, CNode
from ...graph.canonical.view import CanonicalView
from ...graph.dtypes import is_float
from ...graph.matching.constants import constant_array, distinct
from ...graph.matching.region import VIEWS
from ...graph.program.ir import Block, Node, Value
from ...graph.program.signature import Memo

NOTE = "a fully masked query row gives 0 in the fused op and NaN in the program"
_MAKERS = 8  # steps from a bias back to what it is made of
_ADD_UP = 32  # numbers above this share of the largest may be -inf together, or in float16 with a score
_CHOOSES = frozenset({"select", "sum", "cast"})
_LOOPS = frozenset({"scan", "while"})


def may_be_infinite(
    view: CanonicalView, leaves: Mapping[str, Value], names: Sequence[str], alone: bool, memo: Memo
) -> bool:
    """Whether the sum of these biases may be -inf at an entry. Only finite constants and choices between finite numbers are known not to
    be; unless the biases are `alone` in hiding keys, numbers that may add up to -inf count as -inf.
    """
    several = not alone or len(names) > 1
    return any(_may_be_infinite(view, leaves[n], several, memo) for n in names)


def _may_be_infinite(view: CanonicalView, bias: Value, several: bool, memo: Memo) -> bool:
    most = _most_finite(bias.dtype, several)
    array = constant_array(view, bias, memo, True)
    if array is not None:
        return not bool((np.abs(distinct(array).astype(np.float64)) <= most).all())
    level, inside = [view.ref[bias.id].nid], [view.ref[bias.id].coef]
    for _ in range(_MAKERS):
        if any(_is_any_number(view, nid) for nid in level):
            return True
        inside += [o.coef for nid in level for o in view.nodes[nid].operands]
        if any(abs(float(c)) > most for c in inside):
            return True
        level = _chosen_from(view, level)
        if not level:
            return False
    return True


def _most_finite(dtype: Any, several: bool) -> float:
    """The largest magnitude of a bias that makes no score infinite."""
    largest = float(jnp.finfo(dtype).max)
    # A larger literal is infinite once it is cast; the view has 12 digits of one.
    return largest / _ADD_UP if several or dtype == np.float16 else largest * (1 + 1e-9)


def _chosen_from(view: CanonicalView, level: list[int]) -> list[int]:
    """The operands of canonical nodes that choose, add or cast, each once."""
    below = (o.nid for nid in level if view.nodes[nid].op in _CHOOSES for o in view.nodes[nid].operands)
    return list(dict.fromkeys(below))


def _is_any_number(view: CanonicalView, nid: int) -> bool:
    """Whether a canonical node is of floats, and neither a constant nor chosen, added up or cast from others."""
    shown = view.values_of.get(nid)
    return view.nodes[nid].op not in _CHOOSES and nid != ONE and (shown is None or is_float(shown[0].dtype))


def nan_test(view: CanonicalView, root: Value, sums: bool = False) -> Node | None:
    """The first node that tests for NaN a value computed from `root` elementwise or by products, and by `sums` if asked for; None if there
    is no such test.

    Values are also followed out of the block, to all results of the node that contains it; a test anywhere in a loop's body or a branch
    counts. Values are not followed through other reductions, because a logsumexp starts by testing whether a maximum is finite.
    """
    starts = [view.ref[root.id].nid]
    here: CanonicalView | None = view
    while here is not None:
        found = _among_users(here, starts, sums=sums)
        if found is not None:
            return found
        if here.outer is None:
            return None
        here, holder = here.outer
        if holder.primitive in _LOOPS:  # what a turn makes the next one may ask
            found = next(_questions(holder), None)
            if found is not None:
                return found
        starts = [here.ref[v.id].nid for v in holder.outputs if v.id in here.ref]
    return None


def nan_test_between(view: CanonicalView, start: int, end: Node) -> Node | None:
    """The first node before `end` that tests for NaN values computed from a canonical node."""
    return _among_users(view, [start], end.id)


def _among_users(view: CanonicalView, starts: list[int], before: float = math.inf, sums: bool = False) -> Node | None:
    seen, stack = set(starts), list(starts)
    while stack:
        for user in view.users.get(stack.pop(), ()):
            node = view.nodes[user]
            if user in seen or _reduces(node, sums):
                continue
            seen.add(user)
            raw = view.maker(user)
            if raw is not None and raw.id >= before:
                continue
            stack.append(user)
            if raw is None:
                continue
            if _asks_of_itself(node):
                return raw
            inside = next(_questions(raw), None)
            if inside is not None:
                return inside
    return None


def _reduces(node: CNode, sums: bool) -> bool:
    """Whether a canonical node reduces, other than by a sum where `sums` are followed."""
    return node.op.startswith("reduce_") and not (sums and node.op == "reduce_sum")


def _asks_of_itself(node: CNode) -> bool:
    """Whether a canonical node tests for NaN, which alone is not equal to itself, or for infinity."""
    if node.op not in ("ne", "eq"):
        return node.op == "is_finite"
    return len({o[:2] for o in node.operands}) == 1 or any(o.nid == ONE and math.isinf(o.coef) for o in node.operands)


def _questions(holder: Node) -> Iterator[Node]:
    """The nodes of a node's blocks that test for NaN, except those that test a maximum."""
    for block in holder.blocks:
        for node in block.nodes:
            yield from _questions(node)
            if not _asks(node):
                continue
            maker = _maker(block, node)
            while maker is not None and maker.primitive in VIEWS | {"max"}:  # of -inf and the maximum, in a logsumexp
                maker = _maker(block, maker)
            if maker is None or not maker.primitive.startswith("reduce_"):
                yield node


def _maker(block: Block, node: Node) -> Node | None:
    """The node of the block that computes the first operand that is not a literal."""
    return block.producer.get(node.values[0].id) if node.values else None


def _asks(node: Node) -> bool:
    if node.primitive == "is_finite":
        return True
    pair = node.inputs[:2]
    return node.primitive in ("ne", "eq") and all(isinstance(a, Value) for a in pair) and pair[0] == pair[1]
