"""A layer cut out of its block: its operands, its region, and its further values that are read outside."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from ....graph.canonical.view import CanonicalView
from ....graph.declined import Declined
from ....graph.dtypes import narrows
from ....graph.matching.region import Region, cut, escapes, look_through
from ....graph.primitives import SUMS_OVER_DEVICES
from ....graph.program.ir import Value, all_nodes
from ...engine.base import Search
from ...engine.declining import attempted
from ...engine.outcomes import Candidate
from ...engine.wording import escape_text
from .axes import Side, Unread, all_letters
from .factors import BOTH, FACTOR
from .projections import Projection
from .reading import LayerRead
from .rotary_tables import RotaryTable, tables_of

_HEADS = {"h", "g"}
_STRUCTURAL = ("query", "key", "value", "q", "k", "v")


Groups = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class LayerOperand:
    """An operand of the op: its place in the view, the op's axes as groups of letters, and the product of which it is a weight or a
    bias (None: of none).
    """

    side: Side
    groups: Groups
    product: Projection | None = None


@dataclass(frozen=True)
class FurtherResult:
    """A further value of the site: the keys or values of all positions, or of this call."""

    value: Value
    side: Side
    of_values: bool


@dataclass(frozen=True)
class LayerSite:
    """A layer cut out of its block.

    Attributes: `layer`, `region`, `leaves` (slot -> operand), `others` (further values it makes), `attention` (the attention's site),
    `masks` (leaf of the region -> leaf of the attention's), `tables` (of its rotary embedding),
    `factor` (of its scores, besides the attention's scale),
    `precisions` (of its products, and of the attention's), `sums` (the dtypes in which devices sum its two parts, if they do).
    """

    layer: LayerRead
    region: Region
    leaves: Mapping[str, LayerOperand]
    others: tuple[FurtherResult, ...]
    attention: Candidate
    masks: Mapping[str, str]
    tables: Mapping[str, RotaryTable]
    factor: float
    precisions: tuple[Any, Any]
    sums: tuple[Any, ...]

    @property
    def heads_before_length(self) -> bool:
        """Whether the caches, or the given keys, have heads before positions."""
        cache = self.layer.key_cache
        sides = [m.side for m in self.others] if cache is None else [cache.before]
        order = all_letters(sides[0].shown) if sides else ()
        heads = [i for i, a in enumerate(order) if a in _HEADS]
        length = [i for i, a in enumerate(order) if a in ("s", "t", "p")]
        return bool(heads and length) and heads[0] < length[0]

    def stored(self, length: str, feature: str) -> Groups:
        """The op's axes of a cache, or of given keys or values, with this letter for their positions."""
        middle = ((length,), (self.layer.key_letter,))
        return (self.layer.batch, *(middle[::-1] if self.heads_before_length else middle), (feature,))


def operands_of(layer: LayerRead) -> dict[str, LayerOperand]:
    """Slot -> operand, of one layer."""
    found = {"x": LayerOperand(layer.x, (layer.batch, ("t",), ("e",)))}
    several = layer.halves | {"n": tuple(f"n{i}" for i in range(8))}

    def parted(axes: Iterable[Any]) -> Groups:
        return tuple(several.get(a, (a,)) for a in axes)

    def add(slot: str, side: Side | None, axes: str, product: Projection | None = None) -> None:
        if side is not None:
            shown = tuple(all_letters(parted(axis)) for axis in side.shown)
            found[slot] = LayerOperand(Side(side.nid, shown), parted(axes), product)

    for name, norm in (("norm1", layer.norm1), ("norm2", layer.norm2)):
        add(f"{name}_scale", norm.scale, "e")
        add(f"{name}_bias", norm.bias, "e")
    for slot, product, rows, columns in _products(layer):
        add(slot, product.w, rows + columns, product)
        add(f"{slot}_bias", product.bias, columns, product)
        add(f"{slot}{FACTOR}", product.factor, "e")
    for slot, cache in (("cache_k", layer.key_cache), ("cache_v", layer.value_cache)):
        if cache is not None:
            found[slot] = LayerOperand(cache.before, ())  # grouped as they are stored
    if layer.key_cache is not None and layer.key_cache.step is not None:
        found["step"] = LayerOperand(Side(layer.key_cache.step, ()), ())
    return found


def _products(layer: LayerRead) -> Iterator[tuple[str, Projection, str, str]]:
    """(slot, product, the letters of its weight's rows, of its columns)."""
    if layer.fused:
        numbers = itertools.count()  # a bias may have its columns on other axes than the weight
        w, bias = (side and _as_columns(side, layer.sizes, numbers) for side in (layer.q.w, layer.q.bias))
        yield "qkv", replace(layer.q, w=w, bias=bias), "e", "n"
    else:
        yield "q", layer.q, "e", "hc"
        yield "k", layer.k, "e", f"{layer.key_letter}c"
        yield "v", layer.v, "e", f"{layer.key_letter}d"
    yield "out", layer.out, "hd", "e"
    for slot, product in (("up", layer.up), ("gate", layer.gate)):
        if product is not None:
            yield slot, product, "e", "f" if product.part is None else BOTH
    yield "down", layer.down, "f", "e"


def _as_columns(side: Side, sizes: dict[str, int], numbers: Iterator[int]) -> Side:
    """The single weight of queries, keys and values, or its bias, with new letters for its columns, which join the `sizes`."""
    shown = []
    for axis in side.shown:
        own = axis if axis == ("e",) else (f"n{next(numbers)}",)
        sizes.setdefault(own[0], math.prod(sizes[a] if isinstance(a, str) else a.total for a in axis))
        shown.append(own)
    return Side(side.nid, tuple(shown))


# -- the region -------------------------------------------------------------------------------------------------------


def site_of(search: Search, view: CanonicalView, layer: LayerRead, attention: Candidate) -> LayerSite:
    """The layer cut out of its block.

    Args:
      view: the block's view with its small sites folded, in which the layer was read.
      attention: the attention's own site.

    Raises:
      Declined: it cannot be.
    """
    assert attention.region is not None
    leaves = operands_of(layer)
    masks = _mask_leaves(attention.region)
    base = search.view
    tables = {} if layer.rotary is None else tables_of(view, base, layer.rotary)
    read = _read_by_tables(tables)
    given = {slot: _base_id(view, base, leaf.side.nid) for slot, leaf in leaves.items()}
    given |= {name: base.ref[value.id].nid for name, value in (masks | read).items()}
    root = _raw(view, layer.root.nid)
    wide = frozenset({"x", *read, *(n for n in leaves if n.startswith("norm"))})
    region = _cut(base, root, given, wide, masks, ())
    others = _others(view, layer, region)
    if others:
        region = _cut(base, root, given, wide, masks, tuple(m.value for m in others))
    _check_tables(region, read)
    _check_rounds(base, region, _base_id(view, base, layer.q.x.nid), layer.q.nid)
    sums = _sums(view, region)
    names = {name: name.partition(":")[2] for name in masks}
    precisions = _precisions(region, attention.region)
    factor = _factor(base, region, layer)
    return LayerSite(layer, region, leaves, others, attention, names, tables, factor, precisions, sums)


def _mask_leaves(attention: Region) -> dict[str, Value]:
    return {f"mask:{n}": v for n, v in attention.leaves.items() if n not in _STRUCTURAL}


def _read_by_tables(tables: Mapping[str, RotaryTable]) -> dict[str, Value]:
    """Leaf -> an input of the tables."""
    return {f"table:{v.id}": v for table in tables.values() for v in table.inputs}


def _check_tables(region: Region, read: Mapping[str, Value]) -> None:
    """Raises Declined if the region reads the inputs of its tables in another form than the tables do."""
    for name, value in read.items():
        if region.leaves[name].id != value.id:
            raise Declined(f"{value!r}, from which its rotary tables are computed, is also read in another form")


def _check_rounds(view: CanonicalView, region: Region, source: int, nid: int) -> None:
    """Checks that the program's queries and keys, like the op's, are computed from values in the dtype of x. A softmax amplifies small
    differences, so a program that uses a wider dtype does so on purpose.

    Raises:
      Unread: it uses a wider dtype.
    """
    x = region.leaves["x"].dtype
    for node in region.nodes:
        read = [a for a in node.inputs if isinstance(a, Value) and view.ref[a.id].nid == source]
        if node.primitive != "dot_general" or not read:
            continue
        wide = look_through(view, read[0], through_casts=True)[0].dtype
        if narrows(x, wide):
            raise Unread(
                f"{node!r} reads {wide}, where the op reads {x}, the dtype of the layer's input", nid, "rounding"
            )


def _factor(base: CanonicalView, region: Region, layer: LayerRead) -> float:
    """The factor on the op's scores besides the attention's scale: the layer's factor, divided by those of its weights.

    Raises:
      Unread: queries or keys have a factor, and so does their common weight.
    """
    weights = [base.ref[region.leaves[slot].id].coef for slot in ("qkv", "q", "k") if slot in region.leaves]
    if layer.factor == 1 and layer.fused:
        return 1.0
    if layer.fused and weights != [1]:
        why = f"queries and keys have the factor {layer.factor:g}, and their weight has one too"
        raise Unread(why, layer.q.nid, "scalar")
    return layer.factor / math.prod(weights)


def _sums(view: CanonicalView, region: Region) -> tuple[Any, ...]:
    """The dtypes of the sums over devices, of the attention and of the feed-forward.

    Raises:
      Unread: the summed values have more bits than the op's parts, which have the dtype of x.
    """
    x = region.leaves["x"].dtype
    found: dict[int, Any] = {}
    for node in region.nodes:
        if node.primitive not in SUMS_OVER_DEVICES:
            continue
        total = node.outputs[0]
        nid = view.ref[total.id].nid
        parts = [look_through(view, a, through_casts=True)[0].dtype for a in node.inputs if isinstance(a, Value)]
        wide = [dtype for dtype in parts if narrows(x, dtype)]
        if wide:
            why = f"devices sum products in {wide[0]}, where the op sums in {x}, the dtype of the layer's input"
            raise Unread(why, nid, "rounding")
        if found.setdefault(nid, total.dtype) != total.dtype:
            raise Unread(f"devices sum one value as {found[nid]} and as {total.dtype}", nid, "rounding")
    return tuple(found.values())


def _cut(
    base: CanonicalView,
    root: Value,
    given: Mapping[str, int],
    wide: frozenset[str],
    masks: Mapping[str, Value],
    others: tuple[Value, ...],
) -> Region:
    """The region, with masks bound to the same values as in the attention's own site: as they are read, or without views.

    x is taken in the form of the layer's result if it is read in that form throughout, as by later layers: the computation of the
    embeddings is not part of the layer.
    """
    for as_read in (frozenset[str](), frozenset(masks)):
        region = cut(base, root, given, through_casts=wide, as_read=as_read, others=others)
        if any(region.leaves[name].id != value.id for name, value in masks.items()):
            continue
        if region.leaves["x"].shape == root.shape:
            return region
        shaped = functools.partial(cut, base, root, given, frozenset(), as_read, wide, others, {"x": root.shape})
        alike = attempted(shaped, lambda why, region=region: region)
        x = alike.leaves["x"]
        return alike if (x.shape, x.dtype) == (root.shape, root.dtype) else region
    raise Declined(f"its mask {next(iter(masks.values()))!r} is read in a different form from its attention's")


def _raw(view: CanonicalView, nid: int) -> Value:
    """The first raw value of a node in the block."""
    for value in view.values_of.get(nid, ()):
        return value
    raise Declined("one of its operands is not a value of the program")


def _base_id(view: CanonicalView, base: CanonicalView, nid: int) -> int:
    return base.ref[_raw(view, nid).id].nid


def _others(view: CanonicalView, layer: LayerRead, region: Region) -> tuple[FurtherResult, ...]:
    """The keys and values that are read outside the layer.

    Raises:
      Unread: another of its values is read outside.
    """
    known: dict[int, tuple[Side, bool]] = {}
    for of_values, cache, own in ((False, layer.key_cache, layer.keys), (True, layer.value_cache, layer.values)):
        side = own if cache is None else Side(cache.node, cache.shown)
        known[side.nid] = side, of_values
    found: dict[int, FurtherResult] = {}
    for leak in escapes(region):
        ref = view.ref.get(leak.value.id)
        if ref is None or ref.nid not in known or ref.coef != 1:
            raise Unread(escape_text(leak), ref.nid if ref is not None else layer.attention, "escapes")
        side, of_values = known[ref.nid]
        found[leak.value.id] = FurtherResult(leak.value, side, of_values)
    return tuple(found.values())


def _precisions(region: Region, attention: Region) -> tuple[Any, Any]:
    """The precision of its products, and of the attention's if that differs.

    Raises:
      Declined: the precisions differ in any other way.
    """
    if region.root.dtype not in (jnp.float32, jnp.float64):
        return None, None  # 16-bit products are summed in float32 whatever is asked
    own = attention.node_ids
    found: list[dict[str, Any]] = [{}, {}]
    for top in region.nodes:
        for node in all_nodes([top]):
            if node.primitive == "dot_general":
                asked = node.params.get("precision")
                found[top.id in own][str(asked)] = asked
    products, inner = found
    if len(products) > 1 or len(inner) > 1:
        raise Declined(f"its products request different precisions: {', '.join(sorted({**products, **inner}))}")
    of_products, of_attention = (next(iter(f.values()), None) for f in found)
    if str(of_products) == str(of_attention):
        return of_products, None
    if of_attention is None:
        raise Declined(f"its products request precision {of_products}, and those of the attention request none")
    return of_products, of_attention
