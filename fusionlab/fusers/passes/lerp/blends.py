"""lerp as programs write it: x + w * (y - x) and its variants, w an array or a number.

A number w is read off the program's own multiplications. In the canonical view it would be lost among the factors that x and y
carry themselves: the gradient that Adam blends into its moments contains the loss's 1/N.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ....graph.canonical.view import CanonicalView
from ....graph.dtypes import is_float
from ....graph.matching.match import Match, match
from ....graph.matching.pattern import pattern_of
from ....graph.matching.region import CASTS, VIEWS
from ....graph.matching.walks import maker_of
from ....graph.program.ir import Node
from ....graph.program.scopes import is_backward
from ...engine.grouping import Form
from .examples import LERP

_TRANSPARENT = VIEWS | CASTS
_SUMS = frozenset({"add", "sub", "add_any"})


@dataclass(frozen=True)
class Blend:
    """One blend of a block.

    Attributes:
      form: its spelling.
      nodes: its nodes; the last computes the result.
      view: the view of those nodes alone: a leaf is a value that they read, under views and casts, and carries no factor.
      match: the match of the spelling in that view.
    """

    form: Form
    nodes: tuple[Node, ...]
    view: CanonicalView
    match: Match


def blends(view: CanonicalView, weighted_sums: bool = True) -> Iterator[Blend]:
    """Every blend of a block outside folded sites; those that multiply both x and y by numbers only with `weighted_sums`."""
    for node in view.block.nodes:
        wanted = node.primitive in _SUMS and node.id not in view.covered and is_float(node.outputs[0].dtype)
        if wanted and not is_backward(node.eqn):
            found = _blend(view, node, weighted_sums)
            if found is not None:
                yield found


def _blend(view: CanonicalView, root: Node, weighted_sums: bool) -> Blend | None:
    near = _expanded(view, [root], {"mul": {"sub"}})
    if all(n.primitive != "mul" for n in near):
        return None
    wide = _expanded(view, [root], {"mul": set(), "sub": {"mul"}, "add": {"mul"}})
    if not _may_be_blend(view, root, near, wide, weighted_sums):
        return None
    return _matched(view, root, near) or _matched(view, root, wide)


def _may_be_blend(
    view: CanonicalView, root: Node, near: tuple[Node, ...], wide: tuple[Node, ...], weighted_sums: bool
) -> bool:
    """Whether x and y, or their difference, are multiplied: an optimizer has thousands of sums, and a view for each is expensive."""
    inner = [n for n in near if n.primitive == "sub" and n is not root]
    if inner:
        return _moves_to(view, root, inner)
    if sum(n.primitive == "mul" for n in wide) < 2:
        return False
    return weighted_sums or not _weighted(view, root)


def _matched(view: CanonicalView, root: Node, nodes: tuple[Node, ...]) -> Blend | None:
    """The first spelling that some nodes match."""
    part = view.over((), nodes)
    ref = part.ref[root.outputs[0].id]
    target = part.nodes[ref.nid]
    for form in LERP if ref.coef == 1 else ():
        pattern = pattern_of(form.example)
        if pattern.nodes[pattern.root].op == target.op:
            found = match(pattern, part, ref.nid)
            if isinstance(found, Match) and _adds_up(view, root, found):
                return Blend(form, _used(part, found, nodes), part, found)
    return None


def _moves_to(view: CanonicalView, root: Node, differences: Sequence[Node]) -> bool:
    """Whether a sum may also read an operand of one of the differences under it: in a norm, (x - mean) * scale + bias, it does not."""
    if sum(maker is not None and maker.primitive in ("mul", "add", "sub") for maker, _ in _makers(view, root)) != 1:
        return True
    own, others = _sources(view, [root]), _sources(view, differences)
    return None in own or None in others or not own.isdisjoint(others)


def _sources(view: CanonicalView, nodes: Sequence[Node]) -> set[int | None]:
    """The operands of some nodes under views and casts; None represents a number."""
    return {getattr(_under(view, a)[0], "id", None) for n in nodes for a in n.inputs}


def _under(view: CanonicalView, atom: Any) -> tuple[Any, tuple[Node, ...]]:
    """The value under the views and casts of an operand, and these nodes."""
    crossed: list[Node] = []
    while (maker := _maker(view, atom)) is not None and maker.primitive in _TRANSPARENT:
        crossed.append(maker)
        (atom,) = maker.inputs
    return atom, tuple(crossed)


def _maker(view: CanonicalView, atom: Any) -> Node | None:
    """The node that computes an operand; None if that is elsewhere or in a folded site."""
    maker = maker_of(view.block, atom)
    return None if maker is None or maker.id in view.covered else maker


def _expanded(view: CanonicalView, roots: list[Node], into: dict[str, set[str]]) -> tuple[Node, ...]:
    """The root, the nodes of the kinds in `into` that it reads, and their operands of the kinds that `into` gives for them.

    The views and casts of their operands are included, so that a leaf is the value underneath.
    """
    nodes = {n.id: n for n in roots}
    level = [(root, set(into)) for root in roots]
    while level:
        node, wanted = level.pop()
        for maker, crossed in _makers(view, node):
            nodes.update((n.id, n) for n in crossed)
            if maker is not None and maker.primitive in wanted:
                nodes[maker.id] = maker
                level.append((maker, into[maker.primitive] if node in roots else set()))
    return tuple(nodes[i] for i in sorted(nodes))


def _makers(view: CanonicalView, node: Node) -> Iterator[tuple[Node | None, tuple[Node, ...]]]:
    """The node that computes each operand of a node, as in `_maker`, and the views and casts between."""
    for value in node.values:
        source, crossed = _under(view, value)
        yield _maker(view, source), crossed


def _used(part: CanonicalView, found: Match, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """The nodes that compute a value of the match."""
    inner = {t for p, t in found.nodes.items() if p not in found.pattern.leaf_of}
    return tuple(n for n in nodes if part.ref[n.outputs[0].id].nid in inner or n is nodes[-1] or n.primitive == "mul")


def _adds_up(view: CanonicalView, root: Node, found: Match) -> bool:
    """Whether the two numbers of a blend are w and 1 - w within the dtype's precision: 0.999 is 1 in bfloat16.

    Both must occur in the program: x + 0.001 * y is not a blend.
    """
    if "w" not in found.scalars:
        return True
    w = found.scalars["w"]
    if "1 - w" not in found.scalars:
        return 0 < w < 1
    pair = w, found.scalars["1 - w"]
    multiplied = all(_multiplies(view, maker) for maker, _ in _makers(view, root))
    rounding = float(jnp.finfo(root.outputs[0].dtype).eps)
    return multiplied and min(pair) > 0 and max(pair) <= 1 and abs(sum(pair) - 1) <= rounding


def _weighted(view: CanonicalView, root: Node) -> bool:
    """Whether both operands are products. If neither reads a difference, they can only be a blend by two numbers: 0.9 * x + 0.1 * y."""
    return all(maker is not None and maker.primitive == "mul" for maker, _ in _makers(view, root))


def _multiplies(view: CanonicalView, node: Node | None) -> bool:
    """Whether a node is a multiplication, or subtracts one: x - w * x."""
    if node is None or node.primitive == "mul":
        return node is not None
    return node.primitive == "sub" and any(m is not None and m.primitive == "mul" for m, _ in _makers(view, node))
