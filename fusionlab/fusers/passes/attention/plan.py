"""The `dot_product_attention` op that replaces a site: its attributes, and its operands from the site's inputs.

The op takes query [*B, T, heads, H], key [*B, S, key heads, H] and value [*B, S, key heads, Hv], or each with heads before length:
whichever layout is nearer to the site's own arrays. Operands on the scores are [*B, heads, T, S] in both.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from ....graph.canonical.view import CanonicalView
from ....graph.declined import Declined
from ....graph.matching.match import Match, close
from ....graph.matching.region import Region
from ....kernels import OPS
from ....kernels.ops.dot_product_attention.layouts import LAYOUTS
from ...engine.base import Search, Substitution
from ...engine.layout import (
    BROADCAST,
    AxisClasses,
    Groups,
    arrange,
    arrange_thin,
    axes_beside,
    axes_of,
    input_positions,
    ordered_classes,
    permutes,
    regrouped_as,
    restore,
)
from .dropout import DrawnFactors, keyed
from .forms import Reading, WeightChange
from .masks import Masking, bias_factor
from .repeated_heads import Repeated
from .sinks import factor_of


def attention_attributes(read: Reading, region: Region, scale: float, masks: Masking, factor: float) -> dict[str, Any]:
    """The op's attributes; those of operands that are absent keep their defaults."""
    attrs: dict[str, Any] = {"scale": scale, "is_causal": masks.is_causal}
    if masks.window is not None:
        attrs["window"] = masks.window
    if "cap" in read.match.scalars:
        attrs["softcap"] = read.match.scalars["cap"]
    if _of_some_keys(read, region):  # no key of a row that sees none is -inf, so that the factors make its weights 0
        attrs["mask_value"] = float(jnp.finfo(jnp.float32).min)
    elif masks.masks and masks.mask_value != -math.inf:
        attrs["mask_value"] = masks.mask_value
    if present_changes(read, region) and not close(factor, 1.0):
        attrs["factors_scale"] = factor
    return attrs


def keyed_plan(
    search: Search,
    read: Reading,
    region: Region,
    masks: Masking,
    attrs: dict[str, Any],
    drawn: tuple[str, DrawnFactors],
    layout: Layout,
) -> tuple[Region, Substitution]:
    """The region as a function of the key from which its factors are drawn (name and draw), and the plan that gives the op that key.

    Raises:
      Declined: the op would draw another mask.
    """
    name, draw = drawn
    axes = None if name in layout.regrouped else draw.axes(layout.axes[name])
    shape = layout.drawn(axes) if axes is not None else None
    if shape is None:
        raise Declined("its axes are not in the order of the op's scores")
    attrs = attrs | {
        "factors_scale": attrs.get("factors_scale", 1.0) * draw.factor,
        "keep": draw.keep,
        "dropout_shape": None if shape == layout.scores else shape,
    }
    whole = keyed(region, name, draw)
    return whole, attention_plan(search, read, whole, masks, attrs, replace(layout, where=input_positions(whole)))


def attention_plan(
    search: Search, read: Reading, region: Region, masks: Masking, attrs: dict[str, Any], layout: Layout
) -> Substitution:
    """The op's operands from the region's inputs, and the region's root from its result."""
    found, is_keyed = read.match, "dropout_key" in region.leaves
    signs = {n: bias_factor(search.view, found, n, region.leaves[n]) for n in masks.biases}
    sink_factor = factor_of(search.view, found, region) if "sink" in region.leaves else 1.0
    sink_number, changes = read.tail.spelling.number(found), present_changes(read, region)
    where = [read.tail.changes[0].leaf] if _of_some_keys(read, region) else []

    def operands(*inputs: Any) -> tuple[Any, ...]:
        q, k, v = (layout.operand(n, inputs) for n in "qkv")
        q = _scaled(q, read, layout, inputs)
        biases = [_times(layout.on_scores(n, inputs), signs[n]) for n in masks.biases]
        seen = [layout.on_scores(n, inputs) ^ hidden for n, hidden in masks.masks.items()]
        seen += [layout.on_scores(n, inputs) for n in where]
        factors = [_factor(c, layout.on_scores(c.leaf, inputs)) for c in changes]
        key = jax.random.key_data(inputs[layout.where["dropout_key"]]) if is_keyed else None
        sink = _times(layout.on_scores("sink", inputs), sink_factor) if "sink" in region.leaves else None
        if sink_number is not None:
            sink = jnp.full((1,) * q.ndim, sink_number, jnp.promote_types(q.dtype, jnp.float32))
        return q, k, v, _joined(operator.add, biases), _joined(operator.and_, seen), _joined(_both, factors), key, sink

    def finish(out: Any) -> Any:
        return restore(out, layout.result, layout.root, region.root.shape, found.sizes)

    op, attrs = OPS["dot_product_attention"], attrs | {"layout": layout.name}
    shown = {"bias": bool(masks.biases), "mask": bool(masks.masks or where), "group": layout.group}
    shown |= {"factors": bool(changes), "dropout_key": is_keyed, "sink": read.tail.sink is not None}
    formula = op.formula(**attrs, **shown)
    return Substitution(op, attrs | {"implementation": search.implementation}, operands, finish, formula)


def _scaled(q: Any, read: Reading, layout: Layout, inputs: Any) -> Any:
    """The queries times, or divided by, the data by which the scores are."""
    for step in read.steps:
        if step.kind in ("times", "over"):
            q = step(q, layout.by_row(step.leaf, inputs).astype(q.dtype), None)
    return q


def _of_some_keys(read: Reading, region: Region) -> bool:
    """Whether the softmax excludes keys by `where=`: its factors are its mask."""
    return read.tail.of_some_keys and read.tail.changes[0].leaf in region.leaves


def present_changes(read: Reading, region: Region) -> list[WeightChange]:
    """The changes of the weights whose operands the region has."""
    return [c for c in read.tail.changes if c.leaf in region.leaves]


def _factor(change: WeightChange, x: Any) -> Any:
    """The factor of a change on the weights: a float, or a bool."""
    if change.kind == "hidden":
        return ~x
    return x if x.dtype == bool or jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)


def _both(a: Any, b: Any) -> Any:
    """The product of two factors, floats or bools."""
    return a & b if a.dtype == b.dtype == bool else a * b


def _joined(join: Callable[[Any, Any], Any], arrays: list[Any]) -> Any:
    """The product of some arrays; None for no arrays."""
    return functools.reduce(join, arrays) if arrays else None


def _times(x: Any, factor: float) -> Any:
    return x if factor == 1 else -x if factor == -1 else x * jnp.asarray(factor, x.dtype)


@dataclass(frozen=True)
class Layout:
    """The op's axes as groups of the site's axis classes, and the positions of the region's inputs.

    Query heads that share keys are heads, of which the keys have fewer; or further rows, if that permutes less data and neither the row
    number matters (a causal mask) nor the scores of different rows are treated differently.

    Attributes:
      key_heads: the classes of `heads` that key and value have, the first of them.
      root: the axes of the result.
      repeated: of k and v, those whose heads the site repeats before it reads them.
      regrouped: for operands on the scores, how each is made from the region's input if it is not that input itself.
    """

    axes: Mapping[str, AxisClasses]
    root: AxisClasses
    where: Mapping[str, int]
    sizes: Mapping[int, int]
    batch: tuple[tuple[int, ...], ...]
    heads: tuple[int, ...]
    key_heads: tuple[int, ...]
    order: Mapping[str, tuple[int, ...]]
    repeated: Mapping[str, Repeated] = field(default_factory=dict)
    regrouped: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    name: str = LAYOUTS[0]

    @classmethod
    def nearest(
        cls, view: CanonicalView, found: Match, region: Region, masks: Masking, repeated: Mapping[str, Repeated]
    ) -> Layout:
        """The possible layout that permutes the fewest of q, k, v and the result; on a tie the first.

        The gradients are laid out as their operands are, and the cotangent as the result: they need the same permutations.
        """
        layouts = itertools.product(cls._possible(view, found, region, masks, repeated), LAYOUTS)
        return min((replace(layout, name=name) for layout, name in layouts), key=lambda layout: layout.permutations)

    @classmethod
    def _possible(
        cls, view: CanonicalView, found: Match, region: Region, masks: Masking, repeated: Mapping[str, Repeated]
    ) -> Iterator[Layout]:
        """The layouts with each axis of rows as the rows and the others as heads, longest first, after the one with all of them as rows."""
        root, where = axes_of(found, view, found.pattern.root, region.root), input_positions(region)
        axes, how = _axes_of_leaves(view, found, region, repeated), _regrouped(view, found, region)
        order = {x: ordered_classes(axes[n], found.letters[x]) for x, n in zip("btscd", "qqkkv", strict=True)}
        rows, shared = order["t"], next((source.head for source in repeated.values()), None)
        for row in _rows_to_try(axes, rows, found.sizes, masks):
            length = rows if row is None else (row,)
            more = tuple(c for c in rows if c not in length)
            for own in _key_heads(order["b"], shared, bool(more)):
                batch, lengths = tuple((c,) for c in order["b"] if c not in own), {**order, "t": length}
                yield cls(axes, root, where, found.sizes, batch, (*own, *more), own, lengths, repeated, how)

    @property
    def permutations(self) -> int:
        """How many of q, k, v and the result the op needs permuted."""
        operands = sum(permutes(self.axes[n], self._of_operand(n)) for n in "qkv")
        return operands + permutes(self.root, self.result)

    def _laid_out(self, length: tuple[int, ...], features: tuple[int, ...], heads: tuple[int, ...]) -> Groups:
        middle = (length, heads) if self.name == "BTNH" else (heads, length)
        return [*self.batch, *middle, features]

    def _of_operand(self, name: str) -> Groups:
        length, features = {"q": "tc", "k": "sc", "v": "sd"}[name]
        return self._laid_out(self.order[length], self.order[features], self.heads if name == "q" else self.key_heads)

    def operand(self, name: str, inputs: Any) -> Any:
        """q, k or v as [*B, length, heads, features], or with heads before length."""
        few = self.repeated.get(name)
        sizes = self.sizes if few is None else {**self.sizes, few.head: few.count}
        return arrange(inputs[self.where[name]], self.axes[name], self._of_operand(name), sizes)

    @property
    def group(self) -> int:
        """How many query heads read one head of the keys."""
        (heads,) = self._merged([tuple(c for c in self.heads if c not in self.key_heads)])
        few = self.repeated.get("k")
        return heads if few is None else heads * self.sizes[few.head] // few.count

    def by_row(self, name: str, inputs: Any) -> Any:
        """A factor on the scores in q's layout, with one feature, and with axes of 1 where it is broadcast."""
        groups = self._laid_out(self.order["t"], (), self.heads)
        return arrange_thin(self._own(name, inputs), self.axes[name], groups, self.sizes)

    def on_scores(self, name: str, inputs: Any) -> Any:
        """An operand on the scores as [*B, heads, T, S], with axes of 1 where it is broadcast."""
        return arrange_thin(self._own(name, inputs), self.axes[name], self._beside(), self.sizes)

    def _own(self, name: str, inputs: Any) -> Any:
        x = inputs[self.where[name]]
        return self.regrouped[name](x) if name in self.regrouped else x

    def drawn(self, axes: AxisClasses) -> tuple[int, ...] | None:
        """The shape on the scores, [*B, heads, T, S], of an array with these axes whose entries keep their order there, with 1 where it
        is broadcast. None if an axis moves, or is part of an axis of the op.
        """
        kept = [c for c in axes if c is not None]
        shown = [group if any(c in kept for c in group) else () for group in self._beside()]
        if kept != [c for group in shown for c in group]:
            return None
        return self._merged(shown)

    @property
    def scores(self) -> tuple[int, ...]:
        return self._merged(self._beside())

    def _beside(self) -> Groups:
        return [*self.batch, self.heads, self.order["t"], self.order["s"]]

    def _merged(self, groups: Groups) -> tuple[int, ...]:
        return tuple(math.prod(self.sizes[c] for c in group) for group in groups)

    @property
    def result(self) -> Groups:
        return self._laid_out(self.order["t"], self.order["d"], self.heads)


def _axes_of_leaves(
    view: CanonicalView, found: Match, region: Region, repeated: Mapping[str, Repeated]
) -> dict[str, AxisClasses]:
    """The axis classes of each leaf of the region; of a leaf whose heads are repeated, those before the repetition."""
    axes = {
        n: axes_of(found, view, found.leaf_id(n), v) if n in "qkv" else axes_beside(found, view, region, n)
        for n, v in region.leaves.items()
        if n not in repeated
    }
    return axes | {n: source.axes for n, source in repeated.items()}


def _regrouped(view: CanonicalView, found: Match, region: Region) -> dict[str, Callable[[Any], Any]]:
    """How each operand on the scores that is not itself an input of the region is made from that input."""
    regrouped = ((n, regrouped_as(found, view, n, v)) for n, v in region.leaves.items() if n not in "qkv")
    return {n: how for n, how in regrouped if how is not None}


def _key_heads(batch: tuple[int, ...], shared: int | None, with_more: bool) -> Iterator[tuple[int, ...]]:
    """The classes, among those shared with the queries, that may be heads of key and value."""
    if shared is not None:
        yield (shared,)
        return
    yield batch[-1:]
    if with_more and len(batch) == 1:  # one head for all queries, of each entry of a batch
        yield ()


def _rows_to_try(
    axes: Mapping[str, AxisClasses], rows: tuple[int, ...], sizes: Mapping[int, int], masks: Masking
) -> Sequence[int | None]:
    """The axis classes of rows that may be the op's rows, the others being heads; None for all of them.

    Args:
      axes: of each leaf of the region.
      rows: the classes.
      sizes: of each class.
      masks: of the site; the rows of a band that the op applies itself are its rows.
    """
    if masks.row is not None:
        return [masks.row]
    if len(rows) < 2:
        return [None]
    if axes.keys() <= set("qkv"):
        return [None, *sorted(rows, key=sizes.__getitem__, reverse=True)]
    return [_row_beside(axes, rows, sizes)]


def _row_beside(axes: Mapping[str, AxisClasses], rows: tuple[int, ...], sizes: Mapping[int, int]) -> int:
    """The class of rows of a mask or bias; the longest class if none has rows."""
    extra = {c for n, a in axes.items() if n not in (*"qkv", "sink") for c in a} - {None, BROADCAST}
    longest = rows[0]
    if "sink" in axes:
        others = [c for c in rows if c not in axes["sink"]]  # what has a sink of its own is a head
        longest = max(others or rows, key=lambda c: sizes[c])
    return next((c for c in rows if c in extra), longest)
