"""The logits under a logarithm or a sum: of a softmax, or of a sum of exponentials, in the rows that `where=` keeps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from ....graph.canonical.view import CanonicalView
from ....graph.matching.region import CASTS, VIEWS
from ....graph.matching.walks import maker_of, source_of, upstream
from ....graph.primitives import SUMS_OVER_DEVICES, having
from ....graph.program.ir import Atom, Node, Value

# From a softmax, or a sum of exponentials, to the logarithm of the label's probability; what clips it is declined later, with the reason.
_OF_SOFTMAX = (
    VIEWS
    | CASTS
    | SUMS_OVER_DEVICES
    | having("part", "extreme", "choice")
    | frozenset("abs mul div add reduce_sum".split())
)
_STEPS = 16


def exponentiated(view: CanonicalView, log: Node) -> tuple[Value, Node] | None:
    """(logits, sum) of a logarithm of a sum of their exponentials along one axis, or of what is made of their softmax; None for any other
    logarithm."""
    sums = (n for n in _above(view, log.inputs) if n.primitive == "reduce_sum")
    return next((found for n in sums if (found := exponentials(view, n)) is not None), None)


def sum_over_devices(view: CanonicalView, log: Node, total: Node) -> Node | None:
    """The sum over devices between a logarithm and a sum of exponentials, as where the program itself splits the classes; None without
    one."""
    sums = (n for n in _above(view, log.inputs) if n.primitive in SUMS_OVER_DEVICES)
    return next((n for n in sums if total in _above(view, n.inputs)), None)


def _above(view: CanonicalView, atoms: Sequence[Atom]) -> Iterator[Node]:
    """What the operand of a logarithm is computed from, as far as a softmax may be."""
    above = upstream(view.block, atoms, lambda n: n.inputs if _continues(n) else ())
    return (n for _, n in itertools.islice(above, _STEPS))


def _continues(node: Node) -> bool:
    """Whether a node may lead from a softmax to the label's probability: a product of each row with its own targets does."""
    if node.primitive == "dot_general":
        return len(node.outputs[0].shape) == len(node.params["dimension_numbers"][1][0])
    return node.primitive in _OF_SOFTMAX


def of_softmax(view: CanonicalView, log: Node) -> bool:
    """Whether a logarithm is of what is made of a softmax, and not of the sum of exponentials itself."""
    maker = maker_of(view.block, source_of(view.block, log.inputs[0], VIEWS | CASTS | {"abs"}))
    return maker is None or maker.primitive != "reduce_sum" or exponentials(view, maker) is None


def exponentials(view: CanonicalView, total: Node) -> tuple[Value, Node] | None:
    """(logits, the node itself) of a sum of their exponentials along one axis; None for any other sum."""
    if len(total.params["axes"]) != 1:
        return None
    choice = _choice(view, total.inputs[0])
    exp = maker_of(view.block, source_of(view.block, total.inputs[0] if choice is None else choice[1], CASTS))
    if exp is None or exp.primitive != "exp":
        return None
    value = _exponent(view, exp)
    masked = None if choice is None or classes_left_out(view, total) else _choice(view, value)
    value = value if masked is None else masked[1]
    return (value, total) if isinstance(value, Value) and len(value.shape) > int(total.params["axes"][0]) else None


def _exponent(view: CanonicalView, exp: Node) -> Atom:
    """What an exponential is of, without the number of each row that is subtracted."""
    value = source_of(view.block, exp.inputs[0], CASTS)
    below = maker_of(view.block, value)
    return below.inputs[0] if below is not None and below.primitive == "sub" and _is_of_rows(below) else value


def classes_left_out(view: CanonicalView, total: Node) -> Node | None:
    """The choice that leaves entries of rows out of a sum, as `where=` of a softmax may; None if whole rows are left out, or nothing is."""
    choice = _choice(view, total.inputs[0])
    mask = None if choice is None else maker_of(view.block, choice[0].inputs[0])
    by_row = mask is not None and mask.primitive == "broadcast_in_dim" and _spreads_along_last(mask)
    return None if choice is None or by_row else choice[0]


def _choice(view: CanonicalView, atom: Atom) -> tuple[Node, Atom] | None:
    """(the node, what it has besides the number) of a choice between a value and a number; None if a value is no such choice."""
    node = maker_of(view.block, source_of(view.block, atom, CASTS))
    if node is None or node.primitive != "select_n" or len(node.inputs) != 3:
        return None
    whole = [a for a in node.inputs[1:] if not view.is_literal(view.read(a))]
    return (node, whole[0]) if len(whole) == 1 else None


def _spreads_along_last(node: Node) -> bool:
    """Whether a broadcast gives all entries along the last axis one value."""
    last, (given,) = len(node.outputs[0].shape) - 1, node.inputs
    named = list(map(int, node.params["broadcast_dimensions"]))
    return last not in named or given.shape[named.index(last)] == 1


def _is_of_rows(node: Node) -> bool:
    """Whether the second operand of a difference may have one entry for each row."""
    return isinstance(node.inputs[0], Value) and node.inputs[0].shape == node.outputs[0].shape
