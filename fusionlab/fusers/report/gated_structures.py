"""Structures with a gate, read off the canonical view: an attention whose result is gated, and the product of two gated
projections of pairs (Jumper et al., "Highly accurate protein structure prediction with AlphaFold", 2021, supplement, algorithms 7 and 11).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from ...graph.canonical.fused_nodes import Labelled, node_labels
from ...graph.canonical.nodes import CNode, Operand
from ...graph.canonical.view import CanonicalView
from ..passes.attention.scores import clip_of
from ..passes.attention.weights import exponentials

_PASSED = frozenset("reshape split slice squeeze transpose cast".split())
PRODUCTS = ("dot", "gemm_epilogue")
_STEPS = 8


@dataclass(frozen=True)
class GatedStructure:
    """A kind of structure, its description, and its canonical nodes."""

    kind: str
    text: str
    nodes: tuple[int, ...]


def gated_attentions(view: CanonicalView) -> Iterator[GatedStructure]:
    """`sigmoid(g) * attention(q, k, v)`, whether the attention is a site or was declined."""
    for nid in view.by_op.get("prod", ()):
        below = [_source(view, o.nid) for o in view.nodes[nid].operands]
        gates = [n for n in below if _is_sigmoid(view.nodes[n])]
        attentions = [n for n in below if is_attention(view, n)]
        if len(gates) == len(attentions) == 1:
            text = (
                f"sigmoid(x @ w) * attention(q, k, v){_biased(view, attentions[0])}: an attention whose result is gated"
            )
            yield GatedStructure("gated_attention", text, (gates[0], attentions[0], nid))


def triangles(view: CanonicalView) -> Iterator[GatedStructure]:
    """The product over one axis of pairs of two gated projections of them, channel by channel."""
    for nid in view.by_op.get("dot", ()):
        rows = _axes_of_pairs(view.nodes[nid])
        if rows is None:
            continue
        operands = view.nodes[nid].operands
        first, second = (_gated(view, o.nid) for o in operands)
        if first is None or second is None or first[1] != second[1]:
            continue
        x = first[1]
        pairs = (_are_pairs(view, o, r, x) for o, r in zip(operands, rows, strict=True))
        if len(view.nodes[x].shape) > 2 and all(pairs):
            text = "sum over k of a[i, k] * b[j, k], a and b gated projections of one value: a triangle multiplication"
            yield GatedStructure("triangle_multiplication", text, tuple(sorted({*first[0], *second[0], nid})))


def _axes_of_pairs(dot: CNode) -> tuple[set[int], set[int]] | None:
    """The two axes of pairs that each operand of a product has, one summed over; None for a product of anything but pairs with channels."""
    left, right = dot.operands
    kept, shared = set(dot.params), set(left.axes) & set(right.axes)
    channels, over = shared & kept, shared - kept
    i, j = ([x for x in o.axes if x in kept and x not in channels] for o in (left, right))
    return ({*over, *i}, {*over, *j}) if channels and len(over) == len(i) == len(j) == 1 else None


def is_attention(view: CanonicalView, nid: int) -> bool:
    """Whether a canonical node is an attention's result, folded or as the program has it."""
    node = view.nodes[nid]
    return (
        isinstance(node.params, Labelled)
        if node.op == "dot_product_attention"
        else exponentials(view, node) is not None
    )


def _biased(view: CanonicalView, attention: int) -> str:
    """The words for an attention's scores: a bias computed by a product, as from pairs, and clipping."""
    node = view.nodes[attention]
    words = ""
    if isinstance(node.params, Labelled):
        named = dict(zip(node.params.slots, node.operands, strict=True))
        bias = named.get("bias")
        words = ", a product among its biases" if bias is not None and products_below(view, bias.nid) else ""
    elif clip_of(view, attention) is not None:
        words = ", its scores clipped"
    return words


def _is_sigmoid(node: CNode) -> bool:
    folded = isinstance(node.params, Labelled) and dict(node.params.traits).get("activation") == "sigmoid"
    return node.op == "logistic" or folded


def _source(view: CanonicalView, nid: int) -> int:
    """The value of which another is a view, a part or a cast."""
    while view.nodes[nid].op in _PASSED and view.nodes[nid].operands:
        nid = view.nodes[nid].operands[0].nid
    return nid


def products_below(view: CanonicalView, start: int, ops: Collection[str] = PRODUCTS) -> set[int]:
    """The products, or other nodes of some `ops`, from which a value is computed, up to the first on each path."""
    found, seen, stack = set[int](), {start}, [start]
    while stack:
        node = view.nodes[stack.pop()]
        if node.op in ops:
            found.add(node.id)
            continue
        fresh = [o.nid for o in node.operands if o.nid not in seen]
        seen.update(fresh)
        stack += fresh
    return found


def _gated(view: CanonicalView, nid: int) -> tuple[set[int], int] | None:
    """The nodes of a gated projection, and the value it projects: a multiple of a sigmoid whose products all read one value."""
    factors = _factors(view, nid)
    gates = any(_is_sigmoid(view.nodes[n]) for n in factors - {nid})
    products = products_below(view, nid)
    read = [{o.nid for o in view.nodes[p].operands[:2]} for p in products]
    shared = set.intersection(*read) if read else set()
    if not gates or len(products) < 2 or len(shared) != 1:
        return None
    return {*products, *(n for n in factors if view.nodes[n].op in ("prod", "logistic"))}, shared.pop()


def _factors(view: CanonicalView, nid: int) -> set[int]:
    """A node and its factors within a few steps, through views, parts and casts."""
    seen, level = {nid}, [nid]
    for _ in range(_STEPS):
        below = [o.nid for n in level for o in view.nodes[n].operands if view.nodes[n].op in (*_PASSED, "prod")]
        level = [n for n in dict.fromkeys(below) if n not in seen]
        seen.update(level)
    return seen


def _are_pairs(view: CanonicalView, edge: Operand, labels: Iterable[int], x: int) -> bool:
    """Whether the axes of a projection, which its reader has under these labels, are axes of the projected value rather than of a weight,
    as far as is known.
    """
    node, axes = view.nodes[edge.nid], list(map(edge.axes.index, labels))
    if node.op in PRODUCTS:
        own = node_labels(node) or ()
        mine = [o for o in node.operands[:2] if o.nid == x]
        return all(own[a] in o.axes for o in mine[:1] for a in axes)
    return node.op != "prod" or all(_are_pairs(view, o, axes, x) for o in node.operands if set(axes) <= set(o.axes))
