"""The weights of a layer as the model holds them, and functions that lay them out: pure functions, which do not change their
arguments.

Letters: E model width, H query heads, G key/value heads, D head size, F feed-forward width; B batch, Smax the size of a cache.

Projections of queries, keys and values:

    separate       three of [E, H, D], [E, G, D], [E, G, D]
    concatenated   [E, (H + 2 G) D]: all columns of the queries, then of the keys, then of the values
    interleaved    [E, H, 3, D]: query, key and value of each head side by side
    packed         [3, H, D, E]: rows of output features, as Paddle's fused_multi_transformer reads them
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp

from ....showing import Shown
from ....tracebacks import own_lines_hidden
from ...op.arrays import check_name
from .attributes import LAYOUTS, refused

Array = Any

ONE_ARRAY = LAYOUTS[1:]  # the layouts in which the three projections are one


@dataclass(frozen=True, kw_only=True, repr=False)
class TransformerLayer(Shown):
    """One layer's parameters, a pytree. Either q, k and v are given or qkv; biases and norms' parameters may be None.

    Letters: E model width, H query heads, G key/value heads, D head size, F inner width of the feed-forward.

    Attributes:
      norm1_scale, norm1_bias: [E], of the attention's norm.
      q: [E, H, D].
      k, v: [E, G, D].
      q_bias: [H, D].
      k_bias, v_bias: [G, D].
      qkv: the three in one: [E, (H + 2 G) D], [E, H, 3, D] or [3, H, D, E].
      qkv_bias: likewise [(H + 2 G) D], [H, 3, D] or [3, H, D].
      out: [H, D, E].
      norm2_scale, norm2_bias: [E], of the feed-forward's norm.
      up, gate: [E, F]; with a gate the feed-forward is act(h @ gate) * (h @ up).
      up_bias, gate_bias: [F].
      down: [F, E].
      out_bias, down_bias: [E].
    """

    out: Array
    up: Array
    down: Array
    norm1_scale: Array | None = None
    norm1_bias: Array | None = None
    q: Array | None = None
    k: Array | None = None
    v: Array | None = None
    q_bias: Array | None = None
    k_bias: Array | None = None
    v_bias: Array | None = None
    qkv: Array | None = None
    qkv_bias: Array | None = None
    out_bias: Array | None = None
    norm2_scale: Array | None = None
    norm2_bias: Array | None = None
    up_bias: Array | None = None
    gate: Array | None = None
    gate_bias: Array | None = None
    down_bias: Array | None = None

    def slots(self) -> dict[str, Array]:
        """Slot -> array, of those there are."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: a for name, a in found.items() if a is not None}

    @property
    def layout(self) -> str:
        """How q, k and v are laid out.

        Raises:
          ArgumentError: both or neither of q and qkv are given, or qkv is in none of the forms.
        """
        if (self.q is None) == (self.qkv is None):
            raise refused(f"q and qkv are {'both' if self.q is not None else 'neither'} given, needed one of them")
        if self.qkv is None:
            return "separate"
        shape, width = tuple(self.qkv.shape), self.out.shape[-1]
        if len(shape) == 2:
            return "concatenated"
        if len(shape) == 4 and (shape[0], shape[2]) == (width, 3):
            return "interleaved"
        if len(shape) == 4 and (shape[0], shape[3]) == (3, width):
            return "packed"
        raise refused(f"qkv has shape {shape}, needed [E, (H + 2 G) D], [E, H, 3, D] or [3, H, D, E] with E = {width}")

    def __str__(self) -> str:
        return f"weights of a transformer layer: {', '.join(f'{k} {v}' for k, v in self._row().items())}"

    def _row(self) -> dict[str, Any]:
        return {f.name: str(jnp.shape(a)) for f in fields(self) if (a := getattr(self, f.name)) is not None}


jax.tree_util.register_dataclass(
    TransformerLayer, data_fields=[f.name for f in fields(TransformerLayer)], meta_fields=[]
)


@own_lines_hidden
def pack_qkv(q: Array, k: Array, v: Array, *, heads: int | None = None, layout: str = "packed") -> Array:
    """Three projections as one array, by default [3, H, D, E].

    Args:
      q, k, v: [E, H, D], or [E, H D] with `heads`; for "concatenated" k and v may have fewer heads.
      heads: H.
      layout: "packed", "interleaved" or "concatenated".

    Returns:
      [3, H, D, E] for "packed", [E, H, 3, D] for "interleaved", [E, (H + 2 G) D] for "concatenated", in the dtype of q, k and v.

    Raises:
      ArgumentError: a shape that does not fit; names the argument. UnknownNameError: no layout has that name.

    >>> import jax.numpy as jnp
    >>> pack_qkv(*[jnp.ones((8, 8))] * 3, heads=2).shape
    (3, 2, 4, 8)
    """
    return _packed(_by_head(q, k, v, heads, 2), layout)


@own_lines_hidden
def unpack_qkv(
    qkv: Array, *, layout: str = "packed", heads: int | None = None, kv_heads: int | None = None
) -> tuple[Array, Array, Array]:
    """The three projections [E, H, D] (k and v [E, G, D]) of an array in one of the layouts; "concatenated" needs `heads`.

    Args:
      qkv: as `pack_qkv` returns it.
      layout: "packed", "interleaved" or "concatenated".
      heads, kv_heads: H and G, for "concatenated"; None for G is H.

    Returns:
      (q, k, v), in the dtype of `qkv`.

    Raises:
      ArgumentError: a shape that does not fit, or no heads where they are needed. UnknownNameError: no layout has that name.
    """
    return _unpacked(qkv, layout, heads, kv_heads, 1)


@own_lines_hidden
def pack_qkv_bias(q: Array, k: Array, v: Array, *, heads: int | None = None, layout: str = "packed") -> Array:
    """As `pack_qkv`, of the biases [H, D] or [H D]: [3, H, D], [H, 3, D] or [(H + 2 G) D].

    Raises:
      ArgumentError, UnknownNameError: as `pack_qkv`.
    """
    return _packed(_by_head(q, k, v, heads, 1), layout)


@own_lines_hidden
def unpack_qkv_bias(
    bias: Array, *, layout: str = "packed", heads: int | None = None, kv_heads: int | None = None
) -> tuple[Array, Array, Array]:
    """As `unpack_qkv`, of a bias: three of [H, D] (k and v [G, D]).

    Raises:
      ArgumentError, UnknownNameError: as `unpack_qkv`.
    """
    return _unpacked(bias, layout, heads, kv_heads, 0)


def _head_size(q: Array, heads: int | None, rank: int) -> int:
    """D, of q that is split into heads or, at this rank, is not."""
    if q.ndim == rank + 1:
        return q.shape[-1]
    if q.ndim != rank or heads is None or heads < 1 or q.shape[-1] % heads:
        raise refused(
            f"q has shape {q.shape} and heads is {heads}, needed heads on an axis, or heads that divide the columns"
        )
    return q.shape[-1] // heads


def _by_head(q: Array, k: Array, v: Array, heads: int | None, rank: int) -> tuple[Array, Array, Array]:
    """Each [*E, heads, D]; `rank` is that of one that is not split into heads."""
    named = dict(zip("qkv", map(jnp.asarray, (q, k, v)), strict=True))
    first = named["q"]
    size = _head_size(first, heads, rank)
    for name, a in named.items():
        fits = a.ndim in (rank, rank + 1) and a.shape[: rank - 1] == first.shape[: rank - 1]
        if not fits or a.shape[-1] % size or (a.ndim > rank and a.shape[-1] != size):
            raise refused(f"{name} has shape {a.shape}, needed heads of {size} as q {first.shape} has")
    q, k, v = (a.reshape(*a.shape[: rank - 1], -1, size) for a in named.values())
    return q, k, v


def _packed(by_head: tuple[Array, Array, Array], layout: str) -> Array:
    check_name("multi_transformer qkv", layout, ONE_ARRAY)
    q, k, v = by_head
    if layout == "concatenated":
        return jnp.concatenate([a.reshape(*a.shape[:-2], -1) for a in by_head], axis=-1)
    if not q.shape == k.shape == v.shape:
        raise refused(f"q, k and v have shapes {q.shape}, {k.shape}, {v.shape}; needed alike for layout={layout!r}")
    if layout == "interleaved":
        return jnp.stack(by_head, axis=-2)
    return jnp.stack([jnp.moveaxis(a, 0, -1) if a.ndim == 3 else a for a in by_head])


def _unpacked(
    qkv: Array, layout: str, heads: int | None, kv_heads: int | None, lead: int
) -> tuple[Array, Array, Array]:
    """`lead`: how many axes there are apart from heads, the three and D."""
    check_name("multi_transformer qkv", layout, ONE_ARRAY)
    qkv = jnp.asarray(qkv)
    three = {"concatenated": None, "interleaved": lead + 1, "packed": 0}[layout]
    if three is None:
        return _split(qkv, heads, kv_heads, lead)
    if qkv.ndim != lead + 3 or qkv.shape[three] != 3:
        raise refused(f"qkv has shape {qkv.shape}, needed rank {lead + 3} with 3 at axis {three} for layout={layout!r}")
    q, k, v = (jnp.take(qkv, i, axis=three) for i in range(3))
    return (q, k, v) if layout == "interleaved" or not lead else tuple(jnp.moveaxis(a, -1, 0) for a in (q, k, v))  # pyright: ignore[reportReturnType]


def _split(qkv: Array, heads: int | None, kv_heads: int | None, lead: int) -> tuple[Array, Array, Array]:
    columns = qkv.shape[-1] if qkv.ndim == lead + 1 else 0
    if heads is None or heads < 1:
        raise refused(f"heads is {heads}, needed the number of query heads for layout='concatenated'")
    groups = heads if kv_heads is None else kv_heads
    size, left = divmod(columns, heads + 2 * groups)
    if left or not columns:
        raise refused(f"qkv has shape {qkv.shape}, needed rank {lead + 1} and {heads} + 2 * {groups} heads of columns")
    q, k, v = jnp.split(qkv, [heads * size, (heads + groups) * size], axis=-1)
    return tuple(a.reshape(*a.shape[:-1], -1, size) for a in (q, k, v))  # pyright: ignore[reportReturnType]


@own_lines_hidden
def pack_keys(keys: Array) -> Array:
    """Cached keys [B, Smax, H, D] as [B, H, D / x, Smax, x], with x the entries in 16 bytes (4 of float32, 8 of float16 and bfloat16).

    Args:
      keys: [B, Smax, H, D], of any dtype; the result has the same.

    Raises:
      ArgumentError: another rank, or a D that x does not divide.
    """
    keys = jnp.asarray(keys)
    x = _per_16_bytes(keys)
    if keys.ndim != 4 or keys.shape[3] % x:
        raise refused(f"keys have shape {keys.shape}, needed [B, Smax, H, D] with D a multiple of {x}")
    b, s, h, d = keys.shape
    return keys.reshape(b, s, h, d // x, x).transpose(0, 2, 3, 1, 4)


@own_lines_hidden
def unpack_keys(packed: Array) -> Array:
    """The other way: [B, H, D / x, Smax, x] as [B, Smax, H, D].

    Args:
      packed: as `pack_keys` returns it; the result has its dtype.

    Raises:
      ArgumentError: another rank, or a last axis that is not x.
    """
    packed = jnp.asarray(packed)
    if packed.ndim != 5 or packed.shape[4] != _per_16_bytes(packed):
        raise refused(
            f"packed keys have shape {packed.shape}, needed [B, H, D / x, Smax, x] with x = {_per_16_bytes(packed)}"
        )
    b, h, pieces, s, x = packed.shape
    return packed.transpose(0, 3, 1, 2, 4).reshape(b, s, h, pieces * x)


def _per_16_bytes(a: Array) -> int:
    return 16 // a.dtype.itemsize


@own_lines_hidden
def rotary_tables(*positions: Array, size: int, base: float = 10000.0) -> tuple[Array, Array]:
    """(cos, sin) of the angles that turn heads of `size` features, float32 [*S, size], for `multi_transformer`'s `rotary`.

    Args:
      positions: [S] or [B, S]: one, for one turn of the whole head, or two, which turn each one half of it (rotary_dims=2).
      size: D.
      base: of the wave lengths, as in Su et al. 2021, arXiv:2104.09864.

    Raises:
      ArgumentError: no positions or more than two, or a size that does not have so many pairs.
    """
    parts = len(positions)
    if parts not in (1, 2) or size < 1 or size % (2 * parts):
        raise refused(
            f"{parts} position tables and heads of {size}, needed 1 or 2 and a size that is a multiple of twice that"
        )
    half = size // (2 * parts)
    speeds = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = [jnp.asarray(p, jnp.float32)[..., None] * speeds for p in positions]
    both = jnp.concatenate([a for angle in angles for a in (angle, angle)], axis=-1)
    return jnp.cos(both), jnp.sin(both)
