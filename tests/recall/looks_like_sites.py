"""What in a program looks like a site, told by its primitives alone.

`spots(graph)` walks the raw graph and names, for each place that has the look of something that a pass is for, the one node that has to
be spoken of: a candidate, a rejection or a structure has it among its nodes (`silent`). No code is shared with the passes, and
nothing is asked but what the primitives are:

  softmax     an exponential over a sum of itself along an axis (also times one over it, also after a product), or exp(x - log(sum(exp(x))))
  norm        x, or x less its mean, over a root of a sum of squares of the same x along an axis
  bias        a product, and what is broadcast along its output features added to it
  activation  tanh, logistic, erf, exp, a maximum with a number, a choice by sign and the like, first of its kind behind a product
  gated       two products with an operand in common, or two parts of one product, multiplied, one of them by way of an activation

A product is a `dot_general`, or a convolution whose window is one point. Views, casts, factors, biases and calls may stand between. Nodes
that JAX derived for a backward pass are no sites: they do a forward site over again (a checkpoint), or differentiate one that is counted
where it stands. Integers are not looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fusionlab.fusers.report.findings import Findings
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import Node, Value

from .raw import PLAIN, Raw, is_elementwise, is_float, is_plain

KINDS = ("softmax", "norm", "bias", "activation", "gated")
_NONLINEAR = frozenset("tanh logistic erf erfc exp exp2 expm1 log1p clamp".split())
_COMPARISONS = frozenset("gt ge lt le".split())
_PARTS = frozenset("slice split dynamic_slice gather squeeze".split())


@dataclass(frozen=True)
class Spot:
    """A place that looks like a site: what kind of, and the node that has to be spoken of, or the rule of its own that it stands in."""

    kind: str
    node: Node
    rule: Node | None = None

    def __str__(self) -> str:
        return f"{self.kind}: n{self.node.id} {self.node!r} ({self.node.source})"


def spots(graph: Graph) -> list[Spot]:
    """Everything in a program that looks like a site, each once."""
    raw = Raw(graph)
    found: dict[tuple[str, int], Spot] = {}
    for node in graph.nodes():
        for kind, spot in _at(raw, node):
            if not raw.is_backward(spot):
                found.setdefault((kind, spot.id), Spot(kind, spot, raw.rules.get(spot.id)))
    return list(found.values())


def told(found: Findings) -> frozenset[int]:
    """The nodes that a candidate, a rejection or a structure is about."""
    nodes: set[int] = set()
    for c in found.candidates:
        nodes |= c.all_node_ids
    for r in found.rejections:
        nodes |= r.site_ids | set(r.node_ids)
    for s in found.structures:
        nodes |= s.node_ids
    return frozenset(nodes)


def silent(found: Findings) -> list[Spot]:
    """What looks like a site and nothing is said of."""
    nodes = told(found)
    return [s for s in spots(found.graph) if s.node.id not in nodes and (s.rule is None or s.rule.id not in nodes)]


def _at(raw: Raw, node: Node) -> Iterator[tuple[str, Node]]:
    if not node.outputs or not hasattr(node.outputs[0].aval, "dtype") or not is_float(node.outputs[0]):
        return
    if node.primitive in ("div", "mul") and _is_softmax(raw, node):
        yield "softmax", node
    if node.primitive in ("exp", "exp2") and _is_exp_of_log(raw, node):
        yield "softmax", node
    if node.primitive in ("sqrt", "rsqrt", "pow"):
        quotient = _quotient(raw, node)
        if quotient is not None:
            yield "norm", quotient
    if node.primitive == "add" and _is_biased(raw, node):
        yield "bias", node
    if _is_nonlinear(raw, node) and _is_behind_a_product(raw, node):
        yield "activation", node
    if node.primitive == "mul" and _is_gated(raw, node):
        yield "gated", node


# -- softmax ------------------------------------------------------------------------------------------------------------------


def _exponentials(raw: Raw, atom: Any, product: bool = False) -> set[int]:
    """The exponentials that a value is, with factors, masks and casts on it; behind a product where that may be."""

    def through(node: Node) -> bool:
        return node.primitive in PLAIN | {"mul", "select_n", "neg"} or (product and node.primitive == "dot_general")

    return {n.id for _, n in raw.back(atom, through) if n is not None and n.primitive in ("exp", "exp2")}


def _sums(raw: Raw, atom: Any) -> list[Node]:
    """The sums along an axis that a value is made of by elementwise steps."""
    made = (n for _, n in raw.back(atom, is_elementwise) if n is not None)
    return [n for n in made if n.primitive == "reduce_sum"]


def _denominator(raw: Raw, node: Node, side: int) -> Any:
    """What the other operand is divided by: that of a division, or of a product with one over it."""
    if node.primitive == "div":
        return node.inputs[1] if side == 0 else None
    made = raw.made_by(raw.bare(node.inputs[1 - side]))
    if made is None:
        return None
    if made.primitive == "div" and raw.number(made.inputs[0]) is not None:
        return made.inputs[1]
    return made.inputs[0] if made.primitive == "integer_pow" and made.params["y"] == -1 else None


def _is_softmax(raw: Raw, node: Node) -> bool:
    for side in (0, 1):
        below = _denominator(raw, node, side)
        if below is None:
            continue
        above = _exponentials(raw, node.inputs[side], product=True)
        if above and any(above & _exponentials(raw, s.inputs[0]) for s in _sums(raw, below)):
            return True
    return False


def _is_exp_of_log(raw: Raw, node: Node) -> bool:
    """exp(x - log(sum(exp(x)))), whatever is subtracted from both first."""

    def linear(n: Node) -> bool:
        return n.primitive in PLAIN | {"sub", "add", "mul", "div", "neg"}

    mine = list(raw.back(node.inputs[0], linear))
    values = {a.id for a, _ in mine}
    for _, made in mine:
        if made is None or made.primitive != "log":
            continue
        for total in _sums(raw, made.inputs[0]):
            for exp in _exponentials(raw, total.inputs[0]):
                of = raw.graph.node_by_id[exp].inputs[0]
                if exp != node.id and values & {a.id for a, _ in raw.back(of, linear)}:
                    return True
    return False


# -- norms --------------------------------------------------------------------------------------------------------------------


def _less_its_mean(raw: Raw, atom: Any) -> set[int]:
    """A value, and what it is less a statistic that sums it up along an axis."""
    found: set[int] = set()
    for _ in range(4):
        atom = raw.bare(atom)
        if not isinstance(atom, Value):
            break
        found.add(atom.id)
        node = raw.made_by(atom)
        if node is None or node.primitive not in ("sub", "abs", "add") or not isinstance(node.inputs[0], Value):
            break
        if node.primitive != "abs" and not _sums(raw, node.inputs[1]):
            break
        atom = node.inputs[0]
    return found


def _squared(raw: Raw, atom: Any) -> Any:
    """What a value is the square of; None where it is none."""
    node = raw.made_by(raw.bare(atom))
    if node is None:
        return None
    if node.primitive == "square" or (node.primitive == "integer_pow" and node.params["y"] == 2):
        return node.inputs[0]
    if node.primitive == "pow" and raw.number(node.inputs[1]) == 2:
        return node.inputs[0]
    if node.primitive == "mul" and raw.bare(node.inputs[0]) is raw.bare(node.inputs[1]):
        return node.inputs[0]
    return None


def _summed_squares(raw: Raw, root: Node) -> list[set[int]]:
    """For each sum of squares under a root, the values that its squares are of."""
    found = []
    for _, node in raw.back(root.inputs[0], is_elementwise):
        if node is None:
            continue
        of = None
        if node.primitive == "reduce_sum":
            of = _squared(raw, node.inputs[0])
        elif node.primitive == "dot_general" and raw.bare(node.inputs[0]) is raw.bare(node.inputs[1]):
            of = node.inputs[0] if node.params["dimension_numbers"][0][0] else None
        if of is not None:
            found.append(_less_its_mean(raw, of))
    return found


def _quotient(raw: Raw, root: Node) -> Node | None:
    """Where x, or x less its mean, meets one root of its own sum of squares, in the order of the program."""
    if root.primitive == "pow" and abs(raw.number(root.inputs[1]) or 0.0) != 0.5:
        return None
    squares = _summed_squares(raw, root)
    if not squares or not set.intersection(*squares):
        return None
    values = set.union(*squares)
    stack, seen, found = [root], set(), []
    while stack and len(seen) < 40:
        node = stack.pop()
        if node.id in seen:
            continue
        seen.add(node.id)
        for user in raw.read_by(node.outputs[0]):
            others = [a for a in user.inputs if raw.resolved(a) is not node.outputs[0]]
            if user.primitive in ("mul", "div") and any(_less_its_mean(raw, a) & values for a in others):
                found.append(user)
            elif is_plain(user) or user.primitive in ("mul", "div", "add", "max", "integer_pow", "neg"):
                stack.append(user)
    return min(found, key=lambda n: n.id, default=None)


# -- products -----------------------------------------------------------------------------------------------------------------


def _is_product(node: Node | None) -> bool:
    if node is None or node.primitive not in ("dot_general", "conv_general_dilated"):
        return False
    if node.primitive == "dot_general":
        return is_float(node.outputs[0])
    kernel = node.params["dimension_numbers"].rhs_spec
    return all(node.inputs[1].shape[i] == 1 for i in kernel[2:])


def _labels(node: Node) -> list[str]:
    """For each axis of a product: "b" of the batch, "l" of its left operand alone, "r" of its right one."""
    if node.primitive == "dot_general":
        (left, _), (batch, _) = node.params["dimension_numbers"]
        n, free = len(batch), len(node.inputs[0].shape) - len(batch) - len(left)
        return ["b"] * n + ["l"] * free + ["r"] * (len(node.outputs[0].shape) - n - free)
    out = node.params["dimension_numbers"].out_spec
    return ["r" if i == out[1] else "l" for i in range(len(node.outputs[0].shape))]


def _reshaped(labels: list[str], before: tuple[int, ...], after: tuple[int, ...]) -> list[str]:
    """The labels of axes that are split or merged: each axis has those of all it is made of."""
    out, i, j = [""] * len(after), 0, 0
    while i < len(before) or j < len(after):
        group, into = [i] if i < len(before) else [], [j] if j < len(after) else []
        size, wide = math.prod(before[k] for k in group), math.prod(after[k] for k in into)
        i, j = i + len(group), j + len(into)
        while size != wide:
            if size < wide:
                group, size, i = [*group, i], size * before[i], i + 1
            else:
                into, wide, j = [*into, j], wide * after[j], j + 1
        for k in into:
            out[k] = "".join(sorted({c for m in group for c in labels[m] if before[m] > 1 or len(group) == 1}))
    return out


def _labelled(raw: Raw, atom: Any) -> tuple[Node, list[str]] | None:
    """The product that a value is, by views, casts and factors, with the labels of its axes as they stand in the value."""
    atom, node = raw.resolved(atom), raw.made_by(atom)
    if node is None:
        return None
    if _is_product(node):
        return node, _labels(node)
    if node.primitive in ("mul", "div", "neg"):
        inputs = [a for a in node.inputs if isinstance(a, Value) and raw.number(a) is None]
        return _labelled(raw, inputs[0]) if len(inputs) == 1 else None
    below = _labelled(raw, node.inputs[0]) if node.primitive in PLAIN and node.inputs else None
    if below is None:
        return None
    (product, labels), shape = below, node.outputs[0].shape
    if node.primitive == "transpose":
        return product, [labels[i] for i in node.params["permutation"]]
    if node.primitive == "broadcast_in_dim":
        places = dict(zip(node.params["broadcast_dimensions"], labels, strict=True))
        return product, [places.get(i, "") for i in range(len(shape))]
    if shape != node.inputs[0].shape:
        return product, _reshaped(labels, tuple(node.inputs[0].shape), tuple(shape))
    return product, labels


def _real_axes(raw: Raw, atom: Any) -> frozenset[int] | None:
    """The axes along which an operand differs, as its views say: those that it was broadcast along are left out; None without a
    broadcast."""
    atom, node = raw.resolved(atom), raw.made_by(atom)
    if node is None or node.primitive not in PLAIN:
        return None
    shape = node.outputs[0].shape
    if node.primitive == "broadcast_in_dim":
        own = node.inputs[0].shape
        dims = node.params["broadcast_dimensions"]
        if math.prod(own) == math.prod(shape) and (inner := _real_axes(raw, node.inputs[0])) is not None:
            return frozenset(d for i, d in enumerate(dims) if i in inner)
        return frozenset(d for i, d in enumerate(dims) if own[i] == shape[d] and own[i] > 1)
    inner = _real_axes(raw, node.inputs[0])
    if inner is None:
        return None
    if node.primitive == "transpose":
        return frozenset(i for i, p in enumerate(node.params["permutation"]) if p in inner)
    if shape != node.inputs[0].shape:
        marks = ["x" if i in inner else "" for i in range(len(node.inputs[0].shape))]
        return frozenset(i for i, m in enumerate(_reshaped(marks, tuple(node.inputs[0].shape), tuple(shape))) if m)
    return inner


def _is_biased(raw: Raw, node: Node) -> bool:
    """Whether one operand is a product and the other a vector along its output features, or a constant that is given with no rows."""
    for product, other in (node.inputs, node.inputs[::-1]):
        found = _labelled(raw, product)
        if found is None or not isinstance(other, Value) or raw.number(other) is not None:
            continue
        _, labels = found
        axes = _real_axes(raw, other)
        if axes is None:  # as large as the product: a bias where that is a vector, and the other given
            rows = {c for label, n in zip(labels, node.outputs[0].shape, strict=True) for c in label if n > 1}
            if rows in ({"l"}, {"r"}) and len(labels) == 1 and raw.made_by(raw.bare(other)) is None:
                return True
            continue
        along = {c for i in axes for c in labels[i]}
        if "l" in along and "r" in along:
            continue
        rest = {c for i, label in enumerate(labels) for c in label if i not in axes and node.outputs[0].shape[i] > 1}
        if along & {"l", "r"} and ("b" not in along or rest & {"l", "r"}):
            return True
    return False


# -- activations and gates ----------------------------------------------------------------------------------------------------


def _is_nonlinear(raw: Raw, node: Node) -> bool:
    """Whether a node is what makes an activation one."""
    if node.primitive in ("max", "min"):
        return any(raw.number(a) is not None for a in node.inputs)
    if node.primitive == "select_n":
        made = raw.made_by(raw.bare(node.inputs[0]))
        compared = made is not None and made.primitive in _COMPARISONS
        return compared and any(raw.number(a) is not None for a in made.inputs) and not _is_one_of_numbers(raw, node)
    if node.primitive in ("exp", "exp2"):
        return not any(n.primitive == "reduce_sum" for n in _behind(raw, node)) and not _is_exp_of_log(raw, node)
    return node.primitive in _NONLINEAR


def _is_one_of_numbers(raw: Raw, node: Node) -> bool:
    """Whether a choice is between numbers alone, as the slope of a maximum is."""
    makers = ((a, raw.made_by(raw.bare(a))) for a in node.inputs[1:])
    return all(
        raw.number(a) is not None or (n is not None and n.primitive == "select_n" and _is_one_of_numbers(raw, n))
        for a, n in makers
    )


def _behind(raw: Raw, node: Node) -> Iterator[Node]:
    """The nodes that read a value, also by way of views, factors and choices."""
    stack, seen = [node], {node.id}
    while stack:
        for user in raw.read_by(stack.pop().outputs[0]):
            yield user
            if user.id not in seen and user.primitive in PLAIN | {"mul", "select_n"}:
                seen.add(user.id)
                stack.append(user)


def _is_given(raw: Raw, atom: Any) -> bool:
    """Whether an operand was not computed here, but for views and casts, as a bias is."""
    return raw.made_by(raw.bare(atom)) is None


def _origins(raw: Raw, atom: Any, parts: bool, nonlinear: bool) -> list[tuple[Node, int]] | None:
    """The products that a value is made of by elementwise steps and given operands alone, each with the id of the value that is it, or
    the part of it that is read; None where it is made of something else as well."""
    found: dict[int, Node] = {}
    stack: list[tuple[Any, int | None]] = [(atom, None)]
    seen: set[int] = set()
    while stack:
        atom, part = stack.pop()
        atom = raw.resolved(atom)
        if not isinstance(atom, Value) or atom.id in seen or len(seen) > 60:
            continue
        seen.add(atom.id)
        node = raw.made_by(atom)
        if node is None:
            continue
        if _is_product(node):
            found[atom.id if part is None else part] = node
        elif is_elementwise(node) and (nonlinear or not _is_nonlinear(raw, node)):
            stack += [(a, part) for a in node.inputs]
        elif parts and node.primitive in _PARTS:
            stack.append((node.inputs[0], atom.id if part is None else part))
        elif not _is_given(raw, atom):
            return None
    return [(node, i) for i, node in found.items()]


def _is_behind_a_product(raw: Raw, node: Node) -> bool:
    """Whether a node is made of products and of what is given, and no other node that makes an activation stands between."""
    operands = [a for a in node.inputs if isinstance(a, Value) and raw.number(a) is None]
    origins = [_origins(raw, a, parts=True, nonlinear=False) for a in operands]
    return bool(origins) and all(o is not None for o in origins) and any(origins)


def _is_gated(raw: Raw, node: Node) -> bool:
    one, two = node.inputs
    for activated, bare in ((one, two), (two, one)):
        if not isinstance(activated, Value) or not isinstance(bare, Value):
            continue
        up, gate = _origins(raw, bare, True, False), _origins(raw, activated, True, True)
        straight = _origins(raw, activated, True, False)
        if not up or not gate or len(up) != 1 or len(gate) != 1 or straight == gate:
            continue
        ((above, i),), ((below, j),) = up, gate
        shared = {id(raw.bare(a)) for a in above.inputs} & {id(raw.bare(a)) for a in below.inputs}
        if i != j and (above is below or shared):
            return True
    return False
