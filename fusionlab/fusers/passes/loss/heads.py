"""The logits of a loss: the product that makes them, with its bias, its cap, and the rows that are selected from it.

They are read off the raw graph, because roundings and the dtype of the product matter here.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ....graph.canonical.nodes import nonunit
from ....graph.canonical.view import CanonicalView
from ....graph.declined import Declined
from ....graph.dtypes import is_float, narrows
from ....graph.matching.match import close
from ....graph.matching.region import CASTS, VIEWS
from ....graph.matching.walks import given, maker_of, source_of
from ....graph.primitives import having
from ....graph.program.ir import Atom, Node, Value
from ....kernels.op.arrays import FLOATS
from ...engine.wording import anchor_text
from .padding import OVERWRITES, given_to, padding
from .softmaxes import classes_left_out

_MOST = 1 << 20  # entries of an array that has the vocabulary twice
_EDITS = {
    "scalar": "use a number that is known when the program is traced, or divide x by it in place of the logits",
    "mask": "mask the classes from some class on by jnp.where(jnp.arange(V) < classes, logits, -jnp.inf), or take those of w alone",
    "last": "keep the classes on the last axis of the logits: axis=-1",
    "merge": "merge the axes first, as a layer with one matrix does: x.reshape(..., H * E) @ w.reshape(H * E, V)",
    "heads": "take the loss of each head by itself, x @ w[:, i] with labels[..., i], and add them",
    "axes": "take the loss of each part by itself, or a part of w in place of the logits: x @ w[:, :V]",
    "structure": "cap the logits by cap * jnp.tanh(logits / cap), after the bias",
}
_ROWS = VIEWS | {"slice"}  # may select and reorder rows
_SAME = having("copy", "variance") | CASTS
_SCALES = frozenset({"mul", "div"})
_JOINS = frozenset({"concatenate", "pad"})
_AS_LOGITS = _ROWS | _SAME | _SCALES | OVERWRITES | _JOINS | {"add", "tanh"}


@dataclass(frozen=True, eq=False)
class Head:
    """Logits, from their product on.

    Attributes:
      product: the node of the product; `chain`: the nodes from there to the logits, in order.
      x, w: the raw values that are multiplied; `transposed`: w is [V, E].
      logits: the logits that the loss reads, [*rows, V].
      bias: the vector that is added, or None, and `sum_dtype` the dtype of the sum; `softcap`: the cap on the logits, or None; `scale`:
        the factor of x @ w + bias.
      counted: the number of classes that count, the first ones, where the logits of the others are `fill`; None if all count.
      taken: the slice that takes some rows of what a softmax makes of the logits, as of log-probabilities; () if the loss has all rows.
    """

    product: Node
    chain: tuple[Node, ...]
    x: Value
    w: Value
    transposed: bool
    logits: Value
    bias: Value | None = None
    sum_dtype: Any = None
    softcap: float | None = None
    scale: float = 1.0
    counted: int | None = None
    fill: float = -math.inf
    taken: tuple[Node, ...] = ()

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape of the rows that the loss has."""
        return (self.taken[-1].outputs[0] if self.taken else self.logits).shape[:-1]

    @property
    def classes(self) -> int:
        """The size of the vocabulary."""
        return int(self.logits.shape[-1])

    @property
    def dtype(self) -> str:
        """The dtype to which the product is rounded."""
        dtype = self.product.outputs[0].dtype
        for node in itertools.takewhile(lambda n: n.primitive in _ROWS | _SAME, self.chain):
            dtype = node.outputs[0].dtype if narrows(node.outputs[0].dtype, dtype) else dtype
        return np.dtype(dtype).name

    @property
    def inner(self) -> list[Value]:
        """The values from the product to the logits."""
        return [n.outputs[0] for n in (self.product, *self.chain)]

    @property
    def alike(self) -> list[Value]:
        """The logits that the loss reads, and what is only cast to them."""
        casts = itertools.takewhile(lambda n: n.primitive in _SAME, reversed(self.chain))
        return [self.logits, *(a for n in casts for a in n.values)]

    @property
    def leaves(self) -> dict[str, Value]:
        """The operands by name."""
        return {"x": self.x, "w": self.w} | ({} if self.bias is None else {"bias": self.bias})

    def of_rows(self, x: Any) -> Any:
        """The rows of x whose logits these are, [*rows, E]."""
        last = x.shape[-1]
        for node in (*self.chain, *self.taken):
            if node.primitive not in _ROWS or node.outputs[0].shape == node.inputs[0].shape:
                continue
            if node.primitive == "slice":
                x = _sliced(node, x)
            elif node.primitive == "transpose" and _moves_rows(node):
                x = jnp.transpose(x, node.params["permutation"])
            elif node.primitive != "transpose":
                x = jnp.reshape(x, (*node.outputs[0].shape[:-1], last))
        return x

    def of_taken(self, logits: Any) -> Any:
        """The rows of logits that the loss has."""
        return functools.reduce(lambda z, node: _sliced(node, z), self.taken, logits)


def _sliced(node: Node, x: Any) -> Any:
    """The rows of x that a slice of logits takes."""
    limits, p = list(node.params["limit_indices"]), node.params
    return jax.lax.slice(x, list(p["start_indices"]), [*limits[:-1], x.shape[-1]], p["strides"])


def head_of(view: CanonicalView, logits: Value) -> Head | None:
    """The head that logits are of; None if no product with a matrix makes them.

    Raises:
      Declined: they are made of one in a way that the op does not have.
    """
    chain = _chain(view, logits)
    if chain is None:
        return None
    product, *rest = chain
    head = _product(view, product, rest)
    found = replace(head, logits=logits, chain=tuple(rest))
    return _capped(view, found, [n for n in rest if n.primitive not in _ROWS | _SAME])


def check_head(view: CanonicalView, head: Head, total: Node | None) -> None:
    """Raises Declined for a head that the op does not take; `total` sums the exponentials, if a rule of the user's does not."""
    if total is not None and int(total.params["axes"][0]) != len(head.logits.shape) - 1:
        what = f"{anchor_text(total)} does not sum over the last axis of the logits"
        raise Declined(what, "axes", [total], _EDITS["last"])
    if total is not None and (choice := classes_left_out(view, total)) is not None:
        raise Declined(f"{anchor_text(choice)} leaves classes out of the sum alone", "mask", [choice], _EDITS["mask"])
    alike = head.classes ** (1 + sum(n == head.classes for n in head.x.shape))
    if head.classes in head.x.shape and alike > _MOST:
        sentence = (
            f"{head.x!r} has an axis as long as the vocabulary, {head.classes}: there is no proof at reduced sizes"
        )
        edit = "keep the axes of the rows apart in place of one for all, or pad the vocabulary"
        raise Declined(sentence, "uncertified", [head.product], edit)
    _check_operands(head)


def _check_operands(head: Head) -> None:
    if 0 in head.logits.shape:
        raise Declined(f"{head.logits!r} are empty", "axes", [head.product])
    given = {np.dtype(v.dtype).name for v in (head.x, head.w)}
    if len(given) > 1 or not given <= set(FLOATS):
        sentence = f"{anchor_text(head.product)} multiplies {' by '.join(sorted(given))}"
        raise Declined(f"{sentence}; the fused op takes one of {', '.join(FLOATS)}", "dtype", [head.product])


def product_of(view: CanonicalView, logits: Value) -> Node | None:
    """The product with a matrix that makes logits, whether the op has what comes after it or not; None if no product does."""
    chain = _chain(view, logits)
    return None if chain is None else chain[0]


def _chain(view: CanonicalView, logits: Value) -> list[Node] | None:
    """The nodes from a product with a matrix to logits, in order; None if there is no such product."""
    found: list[Node] = []
    value: Atom | None = logits
    while isinstance(value, Value) and (node := view.block.producer.get(value.id)) is not None:
        found.append(node)
        if node.primitive == "dot_general":
            return found[::-1] if _may_be_head(node) else None
        if node.primitive not in _AS_LOGITS:
            return None
        value = _continued(view, node)
    return None


def _may_be_head(node: Node) -> bool:
    """Whether a product may be of rows and a matrix, or several: the scores of an attention are not."""
    _, (batch, _) = node.params["dimension_numbers"]
    ranks = sorted(len(a.shape) for a in node.inputs)
    several = len(batch) == 1 and ranks[0] == 3 < ranks[1] if batch else ranks[0] > 2
    return len(node.values) == 2 and (several or (not batch and 2 in ranks))


def _continued(view: CanonicalView, node: Node) -> Atom | None:
    """The operand of a node that logits come from: the only one, or the one that is neither a number nor a vector, nor
    a parameter."""
    if node.primitive not in _SCALES | {"add", "select_n"}:  # a write has what it writes into first
        return node.inputs[0]
    whole = [a for a in node.values if is_float(a.dtype) and not _is_thin(view, a)]
    if len(whole) > 1:
        whole = [a for a in whole if not given(view.block, a)]
    return whole[0] if len(whole) == 1 else None


def _is_thin(view: CanonicalView, value: Value) -> bool:
    """Whether a value is a number, or one vector for all rows."""
    source = source_of(view.block, value, VIEWS | CASTS)
    return view.is_literal(view.ref[value.id]) or not isinstance(source, Value) or len(nonunit(source.shape)) <= 1


def _product(view: CanonicalView, node: Node, chain: Sequence[Node]) -> Head:
    """The product as a head, without what follows it."""
    (left, right), (batch, _) = node.params["dimension_numbers"]
    if len(left) != 1:
        raise Declined(f"{anchor_text(node)} sums over {len(left)} axes", "axes", [node], _EDITS["merge"])
    (first, second), sides = node.values, (int(left[0]), int(right[0]))
    if batch or 2 not in map(len, (first.shape, second.shape)):
        what = f"{anchor_text(node)} multiplies by several matrices, each of which has a softmax of its own"
        raise Declined(what, "axes", [node], _EDITS["heads"])
    return _oriented(view, node, chain, sides)


def _oriented(view: CanonicalView, node: Node, chain: Sequence[Node], sides: tuple[int, int]) -> Head:
    """The product of rows and a matrix, in this order or the other, as a head; `sides` are the axes over which it sums."""
    first, second = node.values
    turned = _moves_first_last(next((n for n in chain if n.primitive in VIEWS), None)) and len(first.shape) == 2
    x, w, (contracted, last) = (second, first, sides) if turned else (first, second, sides[::-1])
    rows = _with_last(view, x, last)
    if rows is None or len(w.shape) != 2:
        why = (
            "is turned and does not sum over the last axis of rows"
            if turned
            else "is no product of rows and one matrix"
        )
        raise Declined(f"{anchor_text(node)} {why}", "axes", [node], _EDITS["last" if turned else "heads"])
    own = _untransposed(view, w)
    return Head(node, (), rows, own, contracted == (1 if own is w else 0), node.outputs[0])


def _with_last(view: CanonicalView, x: Value, axis: int) -> Value | None:
    """The rows of which an axis is the last: a value, or the one of which it is the transpose; None for any other."""
    if axis == len(x.shape) - 1:
        return x
    own = _untransposed(view, x)
    return own if own is not x and len(x.shape) == 2 else None


def _untransposed(view: CanonicalView, w: Value) -> Value:
    """The matrix of which a value is the transpose; the value itself if it is not one."""
    maker = maker_of(view.block, w)
    own = maker.inputs[0] if maker is not None and maker.primitive == "transpose" else w
    return own if isinstance(own, Value) else w


def _moves_first_last(node: Node | None) -> bool:
    """Whether a node moves the first axis to the end."""
    if node is None or node.primitive != "transpose":
        return False
    n = len(node.outputs[0].shape)
    return tuple(map(int, node.params["permutation"])) == (*range(1, n), 0)


def _moves_rows(node: Node) -> bool:
    """Whether a transposition leaves the last axis where it is."""
    return int(node.params["permutation"][-1]) == len(node.outputs[0].shape) - 1


def _capped(view: CanonicalView, head: Head, steps: Sequence[Node]) -> Head:
    """A head with its bias and cap, of the nodes that are neither views nor casts."""
    if not _has_whole_rows(head):
        sentence = f"{head.logits!r} are not the whole rows of the product"
        raise Declined(sentence, "axes", [head.product], _EDITS[_parted(head)])
    rest = list(steps)
    head = _masked(view, head, rest)
    if rest and rest[0].primitive == "add":
        add = rest.pop(0)
        head = replace(head, bias=_bias(view, head, add), sum_dtype=add.outputs[0].dtype)
    if [n.primitive for n in rest[-2:]] in (["tanh", "mul"], ["tanh", "div"]):
        cap = _factor(view, rest.pop())
        rest.pop()
        if cap is None or cap <= 0:
            raise Declined("the logits are capped by another function than cap * tanh(logits / cap)", "scalar", steps)
        head = replace(head, softcap=cap, scale=cap)
    return _scaled(view, head, rest)


def _scaled(view: CanonicalView, head: Head, steps: Sequence[Node]) -> Head:
    """A head whose logits are multiplied by numbers."""
    for node in steps:
        factor = _factor(view, node) if node.primitive in _SCALES else None
        if factor is None:
            what = f"{anchor_text(node)} changes the logits, and the fused op takes a bias, a factor that is a number, and a soft cap"
            kinds = {"scalar": _SCALES, "mask": OVERWRITES, "axes": _JOINS}
            code = next((code for code, names in kinds.items() if node.primitive in names), "structure")
            raise Declined(what, code, [node], _EDITS[code])
        head = replace(head, scale=head.scale * factor)
    return replace(head, scale=1.0) if close(head.scale, 1.0) else head


def _masked(view: CanonicalView, head: Head, steps: list[Node]) -> Head:
    """A head whose last steps give one number to the classes from some class on, if any do; they are taken from `steps`."""
    count = len(list(itertools.takewhile(lambda n: n.primitive in OVERWRITES, reversed(steps))))
    fills = steps[len(steps) - count :]
    if not fills:
        return head
    del steps[-count:]
    between = [n for n in head.chain if fills[0].id <= n.id <= fills[-1].id]
    logits = _continued(view, fills[0])
    counted = padding(view, between, logits, head.classes)
    if counted is None:
        given = [source_of(view.block, value, VIEWS) for value in given_to(view, between, logits)]
        by = f" by {given[0]!r}, an input or a captured array" if given else ""
        needed = "masks of the classes from some class on, computed by the program"
        what = f"{anchor_text(fills[-1])} masks logits{by}; the fused op has only {needed}"
        raise Declined(what, "mask", fills, _EDITS["mask"])
    return replace(head, counted=counted[0], fill=counted[1])


def _has_whole_rows(head: Head) -> bool:
    """Whether all classes are the last axis of the logits, from the product on or from the transposition that comes after it on."""
    wide = [v for v in head.inner if v.shape[-1:] != (head.classes,)]
    return not wide or (len(wide) == 1 and _moves_first_last(head.chain[0]))


def _parted(head: Head) -> str:
    """The edit for logits that are not the whole rows of the product: they are moved, split, or a part of them."""
    names = {n.primitive for n in head.chain if n.primitive != "transpose" or not _moves_rows(n)}
    moved = "transpose" in names or head.product.outputs[0].shape[-1:] == (head.classes,)
    return "mask" if names & _JOINS else "last" if moved else "heads" if "reshape" in names else "axes"


def _bias(view: CanonicalView, head: Head, node: Node) -> Value:
    """The vector that a node adds to each row."""
    added = next(a for a in node.inputs if a is not _continued(view, node))
    source = source_of(view.block, added, VIEWS | CASTS)
    last = isinstance(added, Value) and added.shape[-1:] == (head.classes,)
    if not isinstance(source, Value) or source.shape != (head.classes,) or not last or not is_float(source.dtype):
        raise Declined(f"{anchor_text(node)} adds {added!r}, which is no bias of the classes", "bias", [node])
    return source


def _factor(view: CanonicalView, node: Node) -> float | None:
    """The number by which a node multiplies; None if it is no number."""
    ref = next((view.read(a) for a in node.inputs if view.is_literal(view.read(a))), None)
    if ref is None or not math.isfinite(ref.coef) or not ref.coef:
        return None
    if node.primitive == "div":
        return 1 / float(ref.coef) if view.is_literal(view.read(node.inputs[1])) else None
    return float(ref.coef)
