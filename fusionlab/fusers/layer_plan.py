"""The `multi_transformer` op that stands in for a layer that was read: its attributes, its operands out of the site's inputs, and what
of its results the site makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..errors import ArgumentError, UnknownNameError
from ..graph.canonical import View
from ..graph.evaluate import narrows
from ..graph.ir import Value
from ..graph.manual import make_jaxpr
from ..graph.region import NotARegion, Region, cut, escapes, look_through
from ..graph.signature import region_signature
from ..kernels import OPS
from ..kernels.multi_transformer.checks import TURNED
from .base import Plan, Search, all_nodes, escape_text
from .layer_axes import Atoms, Side, Unread, arranged, raw_axes, restored
from .layer_reading import Layer
from .outcomes import Candidate

_HEADS = {"h", "g"}
_PLAIN = {"window": None, "softcap": None, "factors_scale": 1.0, "keep": 1.0, "dropout_shape": None}
_STRUCTURAL = ("query", "key", "value", "q", "k", "v")


@dataclass(frozen=True)
class Leaf:
    """An operand of the op: what it is in the view, and the op's axes, a group of letters for each."""

    side: Side
    groups: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Made:
    """A further value of the site's: the keys or values of all positions, or of this call."""

    value: Value
    side: Side
    of_values: bool


@dataclass(frozen=True)
class Site:
    """A layer cut out of its block.

    Attributes: `layer`, `region`, `leaves` (slot -> Leaf), `others` (further values it makes), `attention` (the attention's site),
    `masks` (leaf of the region -> leaf of the attention's), `precisions` (of its products, and of the attention's).
    """

    layer: Layer
    region: Region
    leaves: Mapping[str, Leaf]
    others: tuple[Made, ...]
    attention: Candidate
    masks: Mapping[str, str]
    precisions: tuple[Any, Any]

    def letters(self, kind: str) -> tuple[str, ...]:
        return tuple(a for a in self.layer.sizes if a.startswith(kind))

    @property
    def heads_before_length(self) -> bool:
        """Whether the caches, or the keys that are given, have heads before positions."""
        sides = [c.before.shown for c in (self.layer.key_cache,) if c is not None] or [
            m.side.shown for m in self.others
        ]
        order = [a for axis in (sides[0] if sides else ()) for a in axis]
        heads = [i for i, a in enumerate(order) if a in _HEADS]
        length = [i for i, a in enumerate(order) if a in ("s", "t", "p")]
        return bool(heads and length) and heads[0] < length[0]


def operands_of(layer: Layer) -> dict[str, Leaf]:
    """Slot -> leaf, of one layer."""
    batch = tuple(a for a in layer.sizes if a.startswith("b"))
    key = "g" if "g" in layer.sizes else "h"
    found: dict[str, Leaf | None] = {"x": Leaf(layer.x, (batch, ("t",), ("e",)))}
    for name, norm in (("norm1", layer.norm1), ("norm2", layer.norm2)):
        found[f"{name}_scale"] = norm.scale and Leaf(norm.scale, (("e",),))
        found[f"{name}_bias"] = norm.bias and Leaf(norm.bias, (("e",),))
    if layer.fused:
        columns = tuple(f"n{i}" for i in range(8))
        found["qkv"] = Leaf(_as_columns(layer.q.w, layer), (("e",), columns))
        found["qkv_bias"] = layer.q.bias and Leaf(_as_columns(layer.q.bias, layer), (columns,))
    else:
        for slot, product, axes in (("q", layer.q, "hc"), ("k", layer.k, key + "c"), ("v", layer.v, key + "d")):
            found[slot] = Leaf(product.w, (("e",), *((a,) for a in axes)))
            found[f"{slot}_bias"] = product.bias and Leaf(product.bias, tuple((a,) for a in axes))
    found["out"] = Leaf(layer.out.w, (("h",), ("d",), ("e",)))
    found["out_bias"] = layer.out.bias and Leaf(layer.out.bias, (("e",),))
    for slot, product in (("up", layer.up), ("gate", layer.gate), ("down", layer.down)):
        if product is not None:
            ends = ("f", "e") if slot == "down" else ("e", "f")
            found[slot] = Leaf(product.w, tuple((a,) for a in ends))
            found[f"{slot}_bias"] = product.bias and Leaf(product.bias, ((ends[1],),))
    if layer.key_cache is not None and layer.value_cache is not None:
        length = "s" if layer.key_cache.kind == "write" else "p"
        found["cache_k"] = Leaf(layer.key_cache.before, (batch, (length,), (key,), ("c",)))
        found["cache_v"] = Leaf(layer.value_cache.before, (batch, (length,), (key,), ("d",)))
        if layer.key_cache.step is not None:
            found["step"] = Leaf(Side(layer.key_cache.step, ()), ())
    return {slot: leaf for slot, leaf in found.items() if leaf is not None}


def _as_columns(side: Side, layer: Layer) -> Side:
    """The one weight of queries, keys and values, with letters of its own for its columns."""
    shown, count = [], 0
    for axis in side.shown:
        if axis == ("e",):
            shown.append(axis)
            continue
        name = f"n{count}"
        count += 1
        layer.sizes.setdefault(name, _length(axis, layer.sizes))
        shown.append((name,))
    return Side(side.nid, tuple(shown))


def _length(atoms: Atoms, sizes: Mapping[str, int]) -> int:
    length = 1
    for a in atoms:
        length *= sizes[a] if isinstance(a, str) else a.total
    return length


# -- the region -------------------------------------------------------------------------------------------------------


def site_of(search: Search, view: View, layer: Layer, attention: Candidate) -> Site:
    """The layer cut out of its block.

    Args:
      view: the block's view with its small sites folded, in which the layer was read.
      attention: the attention's own site.

    Raises:
      NotARegion, Unread: it cannot be.
    """
    assert attention.region is not None
    leaves = operands_of(layer)
    masks = _mask_leaves(attention)
    base = search.view
    given = {slot: _base_id(view, base, leaf.side.nid) for slot, leaf in leaves.items()}
    given |= {name: base.ref[value.id].nid for name, value in masks.items()}
    root = _raw(view, layer.root.nid, None)
    wide = frozenset({"x", *(n for n in leaves if n.startswith("norm"))})
    region = _cut(base, root, given, wide, masks, ())
    others = _others(view, layer, region)
    if others:
        region = _cut(base, root, given, wide, masks, tuple(m.value for m in others))
    _check_rounds(base, region, _base_id(view, base, layer.q.x.nid), layer.q.nid)
    names = {name: name.partition(":")[2] for name in masks}
    return Site(layer, region, leaves, others, attention, names, _precisions(region, attention.region))


def _cut(
    base: View,
    root: Value,
    given: Mapping[str, int],
    wide: frozenset[str],
    masks: Mapping[str, Value],
    others: tuple[Value, ...],
) -> Region:
    """The region, with masks bound to the values that the attention's own site has them bound to: as they are read, or without views."""
    for as_read in (frozenset[str](), frozenset(masks)):
        region = cut(base, root, given, through_casts=wide, as_read=as_read, others=others)
        if all(region.leaves[name].id == value.id for name, value in masks.items()):
            return region
    raise NotARegion(f"its mask {next(iter(masks.values()))!r} is read in another form than its attention's")


def _check_rounds(view: View, region: Region, source: int, nid: int) -> None:
    """The op's queries and keys are made of what has the dtype of x. A softmax makes much of little: where the program makes them of
    something wider, it means to.

    Raises:
      Unread: it does.
    """
    x = region.leaves["x"].dtype
    for node in region.nodes:
        read = [a for a in node.inputs if isinstance(a, Value) and view.ref[a.id].nid == source]
        if node.primitive != "dot_general" or not read:
            continue
        wide = look_through(view, read[0], through_casts=True)[0].dtype
        if narrows(x, wide):
            raise Unread(f"{node!r} reads {wide}, where the op has the {x} of the layer's input", nid, "rounding")


def _mask_leaves(attention: Candidate) -> dict[str, Value]:
    assert attention.region is not None
    return {f"mask:{n}": v for n, v in attention.region.leaves.items() if n not in _STRUCTURAL}


def _raw(view: View, nid: int, dtype: Any) -> Value:
    """The raw value in the block that first shows a node."""
    for value in view.values_of.get(nid, ()):
        if dtype is None or value.dtype == dtype:
            return value
    raise NotARegion("one of its operands is no value of the program's own")


def _base_id(view: View, base: View, nid: int) -> int:
    return base.ref[_raw(view, nid, None).id].nid


def _others(view: View, layer: Layer, region: Region) -> tuple[Made, ...]:
    """The keys and values that something beside the layer reads.

    Raises:
      Unread: anything else of it is read there.
    """
    known: dict[int, tuple[Side, bool]] = {}
    for of_values, cache, own in ((False, layer.key_cache, layer.keys), (True, layer.value_cache, layer.values)):
        sides = [own] if cache is None else [Side(cache.node, cache.shown)]
        known.update({side.nid: (side, of_values) for side in sides})
    found: dict[int, Made] = {}
    for leak in escapes(region):
        ref = view.ref.get(leak.value.id)
        if ref is None or ref.nid not in known or ref.coef != 1:
            raise Unread(escape_text(leak), ref.nid if ref is not None else layer.attention, "escapes")
        side, of_values = known[ref.nid]
        found[leak.value.id] = Made(leak.value, side, of_values)
    return tuple(found.values())


def _precisions(region: Region, attention: Region) -> tuple[Any, Any]:
    """The precision of its products, and of the attention's where that is another.

    Raises:
      NotARegion: they differ otherwise.
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
        raise NotARegion(f"its products ask for different precisions: {', '.join(sorted({**products, **inner}))}")
    one, two = (next(iter(f.values()), None) for f in found)
    if str(one) == str(two):
        return one, None
    if two is None:
        raise NotARegion(f"its products ask for precision {one}, and those of the attention for none")
    return one, two


# -- the plan ---------------------------------------------------------------------------------------------------------


def attributes_of(site: Site) -> dict[str, Any]:
    """The op's attributes.

    Raises:
      Unread: the attention is one that the op has no room for.
    """
    layer, attention = site.layer, site.attention
    if {"factors", "dropout_key"} & attention.leaves.keys():
        raise Unread("its attention drops weights, or has factors on them", layer.attention, "dropout")
    for name, plain in _PLAIN.items():
        if attention.attrs.get(name, plain) != plain:
            raise Unread(f"its attention has {name} = {attention.attrs[name]}", layer.attention)
    if layer.norm1.kind != layer.norm2.kind:
        raise Unread(f"its norms differ: {layer.norm1.kind}_norm and {layer.norm2.kind}_norm", layer.norm2.nid)
    is_causal = bool(attention.attrs.get("is_causal", False))
    if is_causal and layer.key_cache is not None:
        raise Unread(
            "its attention hides keys by their place in the cache from its first position on, whatever the step",
            layer.attention,
            "mask",
        )
    active = layer.gate or layer.up
    return {
        "layers": 1,
        "heads": layer.sizes.get("h", 1),
        "kv_heads": layer.sizes.get("g", layer.sizes.get("h", 1)),
        "qkv": layer.columns,
        "pre_norm": layer.pre_norm,
        "norm": layer.norm1.kind,
        "epsilons": (layer.norm1.epsilon, layer.norm2.epsilon),
        "activation": active.activation,
        "gated": layer.gate is not None,
        "scale": float(attention.attrs["scale"]),
        "is_causal": is_causal,
        "mask_value": float(attention.attrs.get("mask_value", -jnp.inf)),
        "cache": layer.key_cache.kind if layer.key_cache else None,
        "cache_layout": "BHSD" if site.heads_before_length else "BSHD",
        "gives_keys": bool(site.others) and layer.key_cache is None,
        "precision": site.precisions[0],
        "attention_precision": site.precisions[1],
    }


Maker = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Planned:
    """How a layer becomes a call: the op's attributes, each operand of the region's inputs, each root of the region of the results.

    `takes` and `gives` are how x and the root lie in the program: the op's batch axes, and each raw axis as letters with their lengths.
    """

    site: Site
    attrs: Mapping[str, Any]
    makers: Mapping[str, Maker]
    results: tuple[Maker, ...]
    takes: Any
    gives: Any

    def plan(self, implementation: str | None) -> Plan:
        return plan_by(self.attrs, self.makers, self.results, implementation)


def plan_by(
    attrs: Mapping[str, Any], makers: Mapping[str, Maker], results: Sequence[Maker], implementation: str | None
) -> Plan:
    """The plan of a call with these operands, by slot."""
    op = OPS["multi_transformer"]
    full = {**attrs, "present": tuple(makers), "implementation": implementation}

    def operands(*inputs: Any) -> tuple[Any, ...]:
        return tuple(make(inputs) for make in makers.values())

    def finish(outs: Any) -> Any:
        made = [result(outs) for result in results]
        return tuple(made) if len(made) > 1 else made[0]

    return Plan(op, full, operands, finish, op.formula(**full))


def planned(view: View, site: Site) -> Planned:
    """The call that stands for a layer.

    Raises:
      Unread: the op has no room for something in it.
    """
    planner = _Planner(view, site)
    attrs = attributes_of(site) | {"turned": planner.turned}
    root = raw_axes(view, site.region.root, site.layer.root.shown)
    made = dict(planner.makers(attrs)), tuple(planner.results(attrs))
    return Planned(site, attrs, *made, planner.sized(planner.axes["x"]), planner.sized(root))


class _Planner:
    def __init__(self, view: View, site: Site) -> None:
        self.view, self.site = view, site
        self.layer, self.region, self.sizes = site.layer, site.region, site.layer.sizes
        self.where = {v.id: i for i, v in enumerate(site.region.inputs)}
        self.axes = {slot: self.raw(slot, leaf) for slot, leaf in site.leaves.items()}

    def sized(self, axes: Sequence[Atoms]) -> Any:
        return self.site.letters("b"), tuple(tuple((a, self.sizes[a]) for a in axis) for axis in axes)

    def raw(self, slot: str, leaf: Leaf) -> tuple[Atoms, ...]:
        return raw_axes(self.view, self.region.leaves[slot], leaf.side.shown)

    def makers(self, attrs: Mapping[str, Any]) -> Iterator[tuple[str, Maker]]:
        """Slot -> the operand, of the region's inputs."""
        shared = ("x", "step")
        yield "x", self.arranged("x")
        if self.site.masks:
            yield from self.masked()
        if "step" in self.site.leaves:
            yield "step", self.step
        for slot in self.site.leaves:
            if slot in shared:
                continue
            made = self.as_it_lies(slot) or self.arranged(slot)
            if slot.startswith("cache") and attrs["cache_layout"] == "BHSD":
                batch, length, heads, features = self.site.leaves[slot].groups
                made = self.arranged(slot, (batch, heads, length, features))
            yield f"{slot}.0", made

    def arranged(self, slot: str, groups: Any = None) -> Maker:
        have, at = self.axes[slot], self.where[self.region.leaves[slot].id]
        groups = groups or self.site.leaves[slot].groups
        return lambda inputs: arranged(inputs[at], have, groups, self.sizes)

    @property
    def turned(self) -> tuple[str, ...]:
        """The weights that lie [out, in], as the op has them named."""
        return tuple(slot for slot in TURNED if slot in self.site.leaves and self.lies(slot) == "turned")

    def lies(self, slot: str) -> str | None:
        """How a weight's letters stand in the program's array: as the op has them, "turned", or otherwise (None)."""
        value, leaf = self.region.leaves[slot], self.site.leaves[slot]
        have = [a for axis in self.axes[slot] for a in axis]
        wanted = [a for group in leaf.groups for a in group if a in have]
        ends = [a for group in leaf.groups[-1:] if slot == "out" for a in group] or list(leaf.groups[0])
        turned = (
            [*ends, *(a for a in wanted if a not in ends)]
            if slot == "out"
            else [*(a for a in wanted if a not in ends), *ends]
        )
        matrix = len(value.shape) in ({2, 4} if slot == "qkv" and self.layer.columns == "interleaved" else {2})
        fits = 1 not in value.shape and (matrix or (slot in ("q", "k", "v", "out") and len(value.shape) == 3))
        if not fits:
            return None
        return "plain" if have == wanted else "turned" if have == turned else None

    def as_it_lies(self, slot: str) -> Maker | None:
        """The weight or bias itself, where the op takes it as it lies."""
        at = self.where[self.region.leaves[slot].id]
        if slot in TURNED and self.lies(slot) is not None:
            return lambda inputs: inputs[at]
        value = self.region.leaves[slot]
        return (lambda inputs: inputs[at]) if slot.endswith("_bias") and len(value.shape) == 1 else None

    def step(self, inputs: Sequence[Any]) -> Any:
        """Where the program writes its cache: clamped, as an update of a slice is."""
        step, length = inputs[self.where[self.region.leaves["step"].id]], self.sizes["s"]
        step = step.astype(jnp.int32) if step.dtype.itemsize < 4 else step  # of 8 bits, it may not count to the length
        if self.layer.key_cache is not None and self.layer.key_cache.from_the_end:
            step = jnp.where(step < 0, step + length, step)
        return jnp.clip(step, 0, length - self.sizes.get("t", 1)).astype(jnp.int32)

    def masked(self) -> Iterator[tuple[str, Maker]]:
        """The mask or bias, made as the attention's own site makes it."""
        attention, own = self.site.attention, self.site.attention.region
        assert own is not None
        of_mask = {
            own.leaves[theirs].id: self.where[self.region.leaves[mine].id] for mine, theirs in self.site.masks.items()
        }

        def both(inputs: Sequence[Any]) -> tuple[Any, ...]:
            given = [inputs[of_mask[v.id]] if v.id in of_mask else jnp.zeros(v.shape, v.dtype) for v in own.inputs]
            return attention.plan.operands(*given)

        shapes = jax.eval_shape(lambda *xs: both(xs), *(v.aval for v in self.region.inputs))
        found = [number for number in (3, 4) if shapes[number] is not None]
        if len(found) > 1:
            raise Unread("its attention has a mask and a bias", self.layer.attention, "mask")
        if any(len(shapes[number].shape) > 4 for number in found):
            raise Unread("its mask has several batch axes", self.layer.attention, "axes")
        if found:
            keys = self.sizes.get("s", 1)
            yield "mask", lambda inputs: _over_keys(both(inputs)[found[0]], keys)

    def results(self, attrs: Mapping[str, Any]) -> list[Maker]:
        """The region's roots, of the op's results."""
        batch, sizes = self.site.letters("b"), self.sizes
        root = self.region.root
        want = raw_axes(self.view, root, self.layer.root.shown)
        made = [lambda outs: restored(outs[0], (batch, ("t",), ("e",)), want, root.shape, sizes)]
        key = "g" if "g" in sizes else "h"
        for other in self.site.others:
            length = "t" if self.layer.key_cache is None else "s"
            middle = ((key,), (length,)) if attrs["cache_layout"] == "BHSD" else ((length,), (key,))
            groups = (batch, *middle, ("d" if other.of_values else "c",))
            axes = raw_axes(self.view, other.value, other.side.shown)
            made.append(
                lambda outs, g=groups, w=axes, o=other: restored(
                    outs[2 if o.of_values else 1], g, w, o.value.shape, sizes
                )
            )
        return made


def _over_keys(x: Any, keys: int) -> Any:
    """A mask as [batch, heads, queries, keys], with every key."""
    x = jnp.reshape(x, (*(1,) * (4 - x.ndim), *x.shape))
    return jnp.broadcast_to(x, (*x.shape[:3], keys))


def check_fits(search: Search, planned: Planned) -> None:
    """Whether the op takes the operands, and gives results of the dtypes that the program has.

    Raises:
      Unread: it does not; the program is left as it is.
    """
    region, plan = planned.site.region, planned.plan(search.implementation)
    key = ("layer fits", region_signature(region), tuple(sorted(planned.attrs.items())), search.implementation)
    problem = search.certifier.once(key, lambda: _misfit(region, plan))
    if problem is not None:
        raise Unread(problem[1], planned.site.layer.attention, problem[0])


def _misfit(region: Region, plan: Plan) -> tuple[str, str] | None:
    """(code, why) the op cannot stand for a region."""
    try:
        made = make_jaxpr(plan.call, [v.aval for v in region.inputs]).out_avals
    except (ArgumentError, UnknownNameError) as error:
        return "structure", f"the op does not take it: {error}"
    for root, aval in zip(region.roots, made, strict=True):
        if (root.shape, root.dtype) != (aval.shape, aval.dtype):
            return "dtype", f"the op would give {aval.dtype}{list(aval.shape)} for {root!r}"
    return None
