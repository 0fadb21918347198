"""The `multi_transformer` op that replaces a layer: its attributes, its operands from the site's inputs, and the site's values from
its results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ....errors import ArgumentError, UnknownNameError
from ....graph.canonical.nodes import tidy
from ....graph.canonical.view import CanonicalView
from ....graph.matching.region import Region, region_signature
from ....graph.program.in_shard_map import make_jaxpr
from ....graph.program.ir import Value
from ....kernels import OPS
from ....kernels.ops.multi_transformer.attributes import TURNED
from ...engine.base import Search, Substitution
from ...engine.layout import input_positions
from .axes import Atoms, Side, Unread, all_letters, arranged, raw_axes, restored
from .factors import FACTOR, factors_of
from .rotary import NEIGHBOURS
from .rotary_tables import RotaryTable
from .site import Groups, LayerSite

_PLAIN = {"softcap": None, "factors_scale": 1.0, "keep": 1.0, "dropout_shape": None}
_OF_HEADS = ("q", "k", "v", "out")


def layer_attributes(site: LayerSite) -> dict[str, Any]:
    """The op's attributes.

    Raises:
      Unread: the op does not support the attention.
    """
    layer, attention = site.layer, site.attention
    _check_attention(site)
    if layer.norm1.kind != layer.norm2.kind:
        raise Unread(f"its norms differ: {layer.norm1.kind}_norm and {layer.norm2.kind}_norm", layer.norm2.nid)
    _check_rotary(site)
    is_causal = _is_causal(site)
    _check_masks(site, is_causal)
    active = layer.gate or layer.up
    return {
        "layers": 1,
        "heads": layer.sizes.get("h", 1),
        "kv_heads": layer.key_heads,
        "qkv": layer.columns,
        "pre_norm": layer.pre_norm,
        "norm": layer.norm1.kind,
        "epsilons": (layer.norm1.epsilon, layer.norm2.epsilon),
        "activation": active.activation,
        "gated": layer.gate is not None,
        "scale": float(tidy(float(attention.attrs["scale"]) * site.factor)),
        "is_causal": is_causal,
        "mask_value": float(attention.attrs.get("mask_value", -jnp.inf)),
        "cache": layer.key_cache.kind if layer.key_cache else None,
        "cache_layout": "BHSD" if site.heads_before_length else "BSHD",
        "rotary": None if layer.rotary is None else 1,
        "gives_keys": bool(site.others) and layer.key_cache is None,
        "precision": site.precisions[0],
        "attention_precision": site.precisions[1],
    }


def _is_causal(site: LayerSite) -> bool:
    """Whether the op's attention is causal; a local window is a mask of its own there."""
    attrs = site.attention.attrs
    return bool(attrs.get("is_causal", False)) and attrs.get("window") is None


def _check_attention(site: LayerSite) -> None:
    """Raises Unread for an attention that changes its weights, or its scores by more than a scale and masks."""
    layer, attention = site.layer, site.attention
    if {"factors", "dropout_key"} & attention.leaves.keys():
        raise Unread("its attention has dropout or other factors on its weights", layer.attention, "dropout")
    for name, plain in _PLAIN.items():
        if attention.attrs.get(name, plain) != plain:
            raise Unread(f"its attention has {name} = {attention.attrs[name]}", layer.attention)


def _check_rotary(site: LayerSite) -> None:
    """Raises Unread for pairs of neighbours where the columns of queries and keys cannot be put in the order of halves."""
    layer = site.layer
    if layer.rotary is not None and layer.rotary.neighbours and (layer.fused or layer.key_cache or site.others):
        reason = "one product makes queries, keys and values" if layer.fused else "its keys are read outside the layer"
        raise Unread(
            f"{NEIGHBOURS}, and {reason}", layer.attention, "rotary", "pair the two halves instead of neighbours"
        )


def _check_masks(site: LayerSite, is_causal: bool) -> None:
    """Raises Unread for masks that the op cannot apply together, or not to a cache."""
    layer, window = site.layer, site.attention.attrs.get("window")
    if window is not None and site.masks:
        raise Unread(f"its attention has window = {window} and a mask or bias", layer.attention, "mask")
    if (is_causal or window is not None) and layer.key_cache is not None:
        raise Unread(
            "its attention masks keys by their position in the cache regardless of the step",
            layer.attention,
            "mask",
        )


Maker = Callable[[Sequence[Any]], Any]


def plan_by(
    attrs: Mapping[str, Any], makers: Mapping[str, Maker], results: Sequence[Maker], implementation: str | None
) -> Substitution:
    """The plan of a call with these operands, by slot."""
    op = OPS["multi_transformer"]
    full = {**attrs, "present": tuple(makers), "implementation": implementation}

    def operands(*inputs: Any) -> tuple[Any, ...]:
        return tuple(make(inputs) for make in makers.values())

    def finish(outs: Any) -> Any:
        roots = [result(outs) for result in results]
        return tuple(roots) if len(roots) > 1 else roots[0]

    return Substitution(op, full, operands, finish, op.formula(**full))


class Planned:
    """The translation of a layer into a call.

    Attributes: `site`, `attrs` (of the op), `makers` (slot -> the operand, of the region's inputs), `results` (each root of the region, of
    the op's results), `takes` and `gives` (the layout of x and of the root in the program: the op's batch axes, and each raw axis as
    letters with their lengths).
    """

    def __init__(self, view: CanonicalView, site: LayerSite) -> None:
        """Raises Unread if the op does not support a part of the layer."""
        self.view, self.site = view, site
        self.layer, self.region, self.sizes = site.layer, site.region, site.layer.sizes
        self.where = input_positions(site.region)
        self.axes = {
            slot: raw_axes(view, self.region.leaves[slot], leaf.side.shown) for slot, leaf in site.leaves.items()
        }
        turned = tuple(slot for slot in TURNED if slot in site.leaves and self.lies(slot) == "turned")
        self.attrs: Mapping[str, Any] = layer_attributes(site) | {"turned": turned}
        self.gives = self.sized(raw_axes(view, self.region.root, self.layer.root.shown))
        self.takes = self.sized(self.axes["x"])
        self.makers, self.results = dict(self.operands()), tuple(self.roots())

    def sized(self, axes: Sequence[Atoms]) -> Any:
        return self.layer.batch, tuple(tuple((a, self.sizes[a]) for a in axis) for axis in axes)

    def operands(self) -> Iterator[tuple[str, Maker]]:
        """Slot -> the operand, of the region's inputs."""
        yield "x", self.arranged("x")
        yield from ((slot, self.table(table)) for slot, table in self.site.tables.items())
        yield from self.masked() if self.site.masks else self.windowed()
        if "step" in self.site.leaves:
            yield "step", self.step
        for slot in self.site.leaves:
            if slot not in ("x", "step") and not slot.endswith(FACTOR):
                yield f"{slot}.0", self.operand(slot)

    def operand(self, slot: str) -> Maker:
        """A weight, bias, scale or cache: unchanged if the op takes its layout, else rearranged, and modified for the op."""
        change = self.change(slot)
        is_vector = slot.endswith("_bias") and len(self.region.leaves[slot].shape) == 1
        if change is not None:
            arranged = self.arranged(slot)
            return lambda inputs: change(arranged(inputs), inputs)
        return self.given(slot) if is_vector or self.lies(slot) is not None else self.arranged(slot)

    def given(self, slot: str) -> Maker:
        at = self.where[slot]
        return lambda inputs: inputs[at]

    def arranged(self, slot: str) -> Maker:
        leaf, at = self.site.leaves[slot], self.where[slot]
        groups = leaf.groups
        if slot in ("cache_k", "cache_v"):
            of = self.layer.key_cache
            groups = self.site.stored("s" if of and of.kind == "write" else "p", "d" if slot == "cache_v" else "c")
        make = arranged(self.axes[slot], groups, self.sizes, leaf.side.nid)
        return lambda inputs: make(inputs[at])

    def change(self, slot: str) -> Callable[[Any, Sequence[Any]], Any] | None:
        """The modification of a product's weight or bias for the op, from it and the region's inputs: its columns reordered or selected, or
        multiplied by the program's factor on the product. None if it is used unchanged.
        """
        product, rotary = self.site.leaves[slot].product, self.layer.rotary
        if product is None:
            return None
        if rotary is not None and rotary.neighbours and slot.removesuffix("_bias") in ("q", "k"):
            return lambda x, _: in_halves(x)
        if product.part is not None:
            columns = slice(product.part[0], sum(product.part))
            return lambda x, _: x[..., columns]
        number, vector = factors_of(product, slot, self.region.leaves)
        if vector is not None:
            along = self.arranged(vector)
            return lambda x, inputs: x * (along(inputs) * number)
        return None if number == 1.0 else lambda x, _: x * number

    def lies(self, slot: str) -> str | None:
        """The layout of a weight in the program: the op's own, "turned" (transposed), or another one (None)."""
        if slot not in TURNED or not self.is_of_its_rank(slot) or self.change(slot) is not None:
            return None
        groups, have = self.site.leaves[slot].groups, all_letters(self.axes[slot])
        wanted = tuple(a for a in all_letters(groups) if a in have)
        return "plain" if have == wanted else "turned" if have == _turned(slot, groups, wanted) else None

    def is_of_its_rank(self, slot: str) -> bool:
        """Whether a weight has a number of axes, without unit axes, that the op takes unchanged."""
        shape = self.region.leaves[slot].shape
        ranks = {"qkv": (2, 4) if self.layer.columns == "interleaved" else (2,), **dict.fromkeys(_OF_HEADS, (2, 3))}
        return 1 not in shape and len(shape) in ranks.get(slot, (2,))

    def table(self, table: RotaryTable) -> Maker:
        """Cosines or sines as wide as a head, of each position: of the whole batch, or of each of it."""
        axes, rotary = raw_axes(self.view, table.value, table.side.shown), self.layer.rotary
        batch = {a for axis in axes for a in axis if a.startswith("b")}
        if batch and batch != set(self.layer.batch):
            why = "the tables of its rotary embedding vary along only some of its batch axes"
            raise Unread(why, self.layer.attention, "rotary")
        at = [self.where[f"table:{v.id}"] for v in table.inputs]
        program = table.program(self.region.block, self.region.known)
        width = rotary.width if rotary else "c"
        arrange = arranged(axes, (self.layer.batch, ("t",), (width,)), self.sizes, table.side.nid)

        def make(inputs: Sequence[Any]) -> Any:
            whole = arrange(program(*(inputs[i] for i in at)))
            whole = in_halves(whole) if rotary is not None and rotary.neighbours else whole
            return jnp.concatenate([whole] * (2 if width == "w" else 1), axis=-1)

        return make

    def step(self, inputs: Sequence[Any]) -> Any:
        """The position at which the program writes its cache, clamped like a slice update."""
        step, length = inputs[self.where["step"]], self.sizes["s"]
        step = step.astype(jnp.int32) if step.dtype.itemsize < 4 else step  # of 8 bits, it may not count to the length
        if self.layer.key_cache is not None and self.layer.key_cache.from_the_end:
            step = jnp.where(step < 0, step + length, step)
        return jnp.clip(step, 0, length - self.sizes.get("t", 1)).astype(jnp.int32)

    def masked(self) -> Iterator[tuple[str, Maker]]:
        """The mask or bias, computed as in the attention's own site."""
        attention, own, keys = self.site.attention, self.site.attention.region, self.sizes.get("s", 1)
        assert own is not None
        of_mask = {own.leaves[theirs].id: self.where[mine] for mine, theirs in self.site.masks.items()}

        def both(*inputs: Any) -> tuple[Any, ...]:
            given = [inputs[of_mask[v.id]] if v.id in of_mask else jnp.zeros(v.shape, v.dtype) for v in own.inputs]
            return attention.plan.operands(*given)

        shapes = jax.eval_shape(both, *(v.aval for v in self.region.inputs))
        found = [number for number in (3, 4) if shapes[number] is not None]
        if len(found) > 1:
            raise Unread("its attention has a mask and a bias", self.layer.attention, "mask")
        if any(len(shapes[number].shape) > 4 for number in found):
            raise Unread("its mask has several batch axes", self.layer.attention, "axes")
        if found:
            yield "mask", lambda inputs: _over_keys(both(*inputs)[found[0]], keys)

    def windowed(self) -> Iterator[tuple[str, Maker]]:
        """The mask of a local window."""
        attrs = self.site.attention.attrs
        if (window := attrs.get("window")) is not None:
            is_causal = bool(attrs.get("is_causal", False))
            yield "mask", lambda _: _in_window(self.sizes.get("t", 1), self.sizes.get("s", 1), window, is_causal)

    def roots(self) -> Iterator[Maker]:
        """The region's roots, of the op's results."""
        layer, length = self.layer, "t" if self.layer.key_cache is None else "s"
        yield self.result(0, self.region.root, layer.root, (layer.batch, ("t",), ("e",)))
        for other in self.site.others:
            groups = self.site.stored(length, "d" if other.of_values else "c")
            yield self.result(2 if other.of_values else 1, other.value, other.side, groups)

    def result(self, number: int, value: Value, side: Side, groups: Groups) -> Maker:
        """The raw value that corresponds to the op's result of this number, which has an axis per group."""
        restore = restored(groups, raw_axes(self.view, value, side.shown), value.shape, self.sizes, side.nid)
        return lambda outs: restore(outs[number])


def _turned(slot: str, groups: Sequence[Sequence[str]], letters: Sequence[str]) -> tuple[str, ...]:
    """The letters of a weight in the layout [out, in], for the op's groups."""
    # Heads and features are two groups: of `in` where the weight is the output projection's, else of `out`.
    end = groups[-1 if slot == "out" else 0]
    rest = tuple(a for a in letters if a not in end)
    return (*end, *rest) if slot == "out" else (*rest, *end)


def _in_window(queries: int, keys: int, window: tuple[int, int], is_causal: bool) -> Any:
    """The keys visible to a query, [1, 1, queries, keys]: so many before its own position and so many after it."""
    ahead = jnp.arange(keys) - jnp.arange(queries)[:, None]
    seen = (ahead >= -window[0]) & (ahead <= (0 if is_causal else window[1]))
    return seen[None, None]


def in_halves(x: Any) -> Any:
    """The entries along the last axis with even numbers, and then those with odd ones."""
    pairs = jnp.reshape(x, (*x.shape[:-1], x.shape[-1] // 2, 2))
    return jnp.reshape(jnp.swapaxes(pairs, -1, -2), x.shape)


def _over_keys(x: Any, keys: int) -> Any:
    """A mask as [batch, heads, queries, keys], with every key."""
    x = jnp.reshape(x, (*(1,) * (4 - x.ndim), *x.shape))
    return jnp.broadcast_to(x, (*x.shape[:3], keys))


def check_fits(search: Search, planned: Planned, plan: Substitution) -> None:
    """Checks that the op takes the operands and returns results of the program's dtypes.

    Raises:
      Unread: it does not; the program is left as it is.
    """
    region = planned.site.region
    key = ("layer fits", region_signature(region), tuple(sorted(planned.attrs.items())))
    problem = search.certifier.once(key, lambda: _misfit(region, plan))
    if problem is not None:
        raise Unread(problem[1], planned.site.layer.attention, problem[0])


def _misfit(region: Region, plan: Substitution) -> tuple[str, str] | None:
    """(code, reason) why the op cannot replace a region; None if it can."""
    try:
        avals = make_jaxpr(plan.call, [v.aval for v in region.inputs], sums=region.sums).out_avals
    except (ArgumentError, UnknownNameError) as error:
        return "structure", f"the op does not accept it: {error}"
    for root, aval in zip(region.roots, avals, strict=True):
        if (root.shape, root.dtype) != (aval.shape, aval.dtype):
            return "dtype", f"the op would return {aval.dtype}{list(aval.shape)} for {root!r}"
    return None
