"""`fusionlab.ops.multi_transformer`: the op as a function of a user's own weights and caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from ....tracebacks import own_lines_hidden
from ...op.arrays import check_name
from .attributes import CACHE_LAYOUTS, refused
from .op import MULTI_TRANSFORMER
from .weights import TransformerLayer

Array = Any
Caches = Sequence[tuple[Array, Array]]

_PASSED_ON = (
    *("heads", "kv_heads", "pre_norm", "norm", "activation", "scale", "precision", "cache_layout", "implementation"),
)


@own_lines_hidden
def multi_transformer(
    x: Array,
    layers: TransformerLayer | Sequence[TransformerLayer],
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    mask: Array | None = None,
    lengths: Array | None = None,
    cache: Caches | None = None,
    step: Any = None,
    prefix: Caches | None = None,
    rotary: tuple[Array, Array] | None = None,
    rotary_dims: int = 1,
    is_causal: bool | None = None,
    pre_norm: bool = True,
    norm: str = "layer",
    epsilon: float | tuple[float | None, float | None] = 1e-5,
    activation: str = "gelu_tanh",
    scale: float | None = None,
    precision: Any = None,
    cache_layout: str = "BSHD",
    implementation: str | None = None,
) -> Any:
    """A row of transformer layers as one op: one named node, made of fused attention, products and norms.

        pre_norm:  a = x + attend(norm1(x)) @ out + out_bias;  y = a + mlp(norm2(a))
        post-norm: a = norm1(x + attend(x) @ out + out_bias);  y = norm2(a + mlp(a))

    Letters: B batch, S tokens of this call, E model width, H query heads, G key/value heads, D head size, Smax the size of a cache.

    Args:
      x: [B, S, E], of float32, bfloat16, float16 or float64, as the weights are.
      layers: one `TransformerLayer`, or several of the same form, in order. They are read in place.
      heads, kv_heads: H and G; None reads them from the weights; given values must agree with them.
      mask: [1|B, 1|H, 1|S, T], bool or an integer (a key is seen where it is not 0), or a float that is added to the scores. T is
        the number of keys attended to: S; with a prefix of P tokens P + S; with a cache and a step Smax.
      lengths: [B], the number of real tokens among the S in each row; the keys of the others are hidden, and their entries in y
        mean nothing.
      cache: for each layer its keys and values (k, v), each [B, Smax, G, D]. Without a step they are filled from the start with
        those of x ("prefill"); with a step those of x are written from there on, and the call attends to everything up to them. If
        donated to a `jax.jit` around the call, they are updated in place.
      step: how many tokens the caches hold, an integer or one for each row, [B]. Where it is known when tracing, it is checked.
      prefix: for each layer keys and values (k, v) that come before those of x, each [B, P, G, D]; filled into the caches as well.
      rotary: (cos, sin), each [S, W] or [1|B, S, W], of the positions of the S tokens (`rotary_tables`): queries and keys are turned.
      rotary_dims: 1, one turn over W features of a head, or 2, one over each half of them.
      is_causal: token i sees no key after its own; None is True with a cache, else False.
      pre_norm, norm ("layer" or "rms"), epsilon: one for both norms or a pair; None in the pair leaves that norm out.
      activation: as of `gemm_epilogue`; with a `gate` in the layers the feed-forward is act(h @ gate) * (h @ up).
      scale: multiplies the scores; None is 1/sqrt(D).
      precision: as for `jax.lax.dot_general`.
      cache_layout: "BSHD", or "BHSD" for caches and prefix with heads before tokens.
      implementation: None or "composed" runs FusionLab's own ops, "xla" plain jnp code; "cuda" runs one token per text, for up to
        16 texts, by FusionLab's own CUDA kernels, in bfloat16 or float16 on a GPU of sm_90 or sm_100, if it takes the call.

    Returns:
      y [B, S, E] in x's dtype; with a cache (y, caches), the caches in the given form. When differentiated, it dissolves into its
      pieces.

    Raises:
      ArgumentError: a wrong shape, dtype or number, a step of 0 or one that leaves no room; names the argument.
      UnknownNameError: no activation, norm or implementation has that name.
      BackendError: the implementation that is named cannot run this call here; gives the reason.

    >>> import jax.numpy as jnp
    >>> layer = TransformerLayer(qkv=jnp.ones((4, 2, 3, 2)), out=jnp.ones((2, 2, 4)), up=jnp.ones((4, 8)), down=jnp.ones((8, 4)))
    >>> cache = [(jnp.zeros((1, 6, 2, 2)),) * 2]
    >>> y, cache = multi_transformer(jnp.ones((1, 3, 4)), layer, cache=cache)
    >>> y, cache = multi_transformer(y[:, -1:], layer, cache=cache, step=3)
    >>> y.shape, cache[0][0].shape
    ((1, 1, 4), (1, 6, 2, 2))
    """
    attrs = locals()
    row = [layers] if isinstance(layers, TransformerLayer) else list(layers)
    attrs = {name: attrs[name] for name in _PASSED_ON} | _attributes_of(row)
    given = _slots(row) | {"x": x, "mask": _as_mask(mask), "lengths": lengths}
    if rotary is not None:
        given |= dict(zip(("cos", "sin"), _pair("rotary", rotary), strict=True))
        attrs["rotary"] = rotary_dims
    check_name("multi_transformer cache_layout", cache_layout, CACHE_LAYOUTS)
    kept = None if cache is None else _caches("cache", cache, len(row))
    own = _with_caches(x, kept, step, prefix, len(row), cache_layout)
    given |= own.pop("operands")
    attrs |= own | {
        "is_causal": cache is not None if is_causal is None else is_causal,
        "epsilons": epsilon if isinstance(epsilon, tuple | list) else (epsilon, epsilon),
    }
    y, *caches = MULTI_TRANSFORMER.call(*given.values(), present=tuple(given), **attrs)
    if kept is None:
        return y
    if prefix is not None:
        caches = _filled(kept, caches)
    return y, tuple(zip(caches[::2], caches[1::2], strict=True))


def _attributes_of(row: list[TransformerLayer]) -> dict[str, Any]:
    """The attributes implied by the form of the layers."""
    if not row or not all(isinstance(layer, TransformerLayer) for layer in row):
        raise refused("layers has to be a TransformerLayer, or one or more of them in a sequence")
    forms = [(layer.layout, layer.gate is not None) for layer in row]
    if len(set(forms)) > 1:
        i = next(i for i, form in enumerate(forms) if form != forms[0])
        raise refused(
            f"layers[{i}] differs from layers[0] in the form of q, k and v or in having a gate; needed alike: make two calls"
        )
    return {"layers": len(row), "qkv": forms[0][0], "gated": forms[0][1]}


def _as_mask(mask: Any) -> Any:
    """An integer mask as the bool one it means."""
    if mask is None:
        return None
    mask = jnp.asarray(mask)
    return mask != 0 if jnp.issubdtype(mask.dtype, jnp.integer) else mask


def _pair(name: str, value: Any) -> tuple[Any, Any]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise refused(f"{name} is {type(value).__name__}, needed a pair of arrays")
    return value[0], value[1]


def _caches(name: str, caches: Any, count: int) -> list[tuple[Array, Array]]:
    if not isinstance(caches, tuple | list) or len(caches) != count:
        got = f"{len(caches)} entries" if isinstance(caches, tuple | list) else type(caches).__name__
        raise refused(f"{name} has {got}, needed a pair (k, v) for each of {count} layers")
    return [tuple(jnp.asarray(a) for a in _pair(f"{name}[{i}]", pair)) for i, pair in enumerate(caches)]  # pyright: ignore[reportReturnType]


def _with_caches(
    x: Any, caches: list[tuple[Array, Array]] | None, step: Any, prefix: Any, count: int, layout: str
) -> dict[str, Any]:
    """The attributes `cache` and `gives_keys`, and as "operands" what goes with them."""
    if step is not None and (caches is None or prefix is not None):
        why = (
            "there is no cache" if caches is None else "a prefix is given, which the caches hold since they were filled"
        )
        raise refused(f"step is given, and {why}; leave one out")
    if prefix is not None:
        before = _caches("prefix", prefix, count)
        _check_prefix(x, before, caches, layout)
        return {"cache": "append", "operands": _named(before)}
    if caches is None:
        return {"cache": None, "operands": {}}
    if step is None:
        return {"cache": "prefill", "operands": _named(caches)}
    _check_step(step, x, caches[0][0], layout)
    return {"cache": "write", "operands": _named(caches) | {"step": jnp.asarray(step)}}


def _named(caches: list[tuple[Array, Array]]) -> dict[str, Array]:
    return {f"cache_{slot}.{i}": a for i, pair in enumerate(caches) for slot, a in zip("kv", pair, strict=True)}


def _slots(row: Sequence[TransformerLayer]) -> dict[str, Any]:
    """The arrays of all layers: "out.0", say."""
    return {f"{slot}.{i}": a for i, layer in enumerate(row) for slot, a in layer.slots().items()}


def _filled(caches: Caches, arrays: Sequence[Array]) -> list[Array]:
    """The caches, with the prefix' and their own keys and values, as they were attended to, from the start on."""
    flat = [c for pair in caches for c in pair]
    starts = (0, 0, 0, 0)
    return [lax.dynamic_update_slice(c, a.astype(c.dtype), starts) for c, a in zip(flat, arrays, strict=True)]


def _check_prefix(
    x: Any, prefix: list[tuple[Array, Array]], caches: list[tuple[Array, Array]] | None, layout: str
) -> None:
    for i, pair in enumerate(prefix):
        for name, a in zip("kv", pair, strict=True):
            if a.ndim != 4 or a.shape[0] != x.shape[0]:
                raise refused(f"prefix[{i}] has {name} of shape {a.shape}, needed {layout} with B = {x.shape[0]}")
    if caches is None:
        return
    for pair, before in zip(caches, prefix, strict=True):
        for a, p in zip(pair, before, strict=True):
            _check_room(a, p, x.shape[1], layout)


def _check_room(cache: Any, prefix: Any, tokens: int, layout: str) -> None:
    """A cache has room for a prefix and so many tokens behind it."""
    axis = layout.index("S")
    if (
        cache.ndim != 4
        or cache.shape[:axis] + cache.shape[axis + 1 :] != prefix.shape[:axis] + prefix.shape[axis + 1 :]
    ):
        raise refused(
            f"a cache has shape {cache.shape}, its prefix {prefix.shape}; needed alike but for the tokens, {layout}"
        )
    if prefix.shape[axis] + tokens > cache.shape[axis]:
        raise refused(
            f"prefix has {prefix.shape[axis]} tokens and x {tokens}, and the caches hold {cache.shape[axis]}; needed longer caches"
        )


def _check_step(step: Any, x: Any, cache: Any, layout: str) -> None:
    """A step that is known, against the caches; one that is traced is the caller's."""
    if isinstance(step, Tracer):
        return
    steps = np.asarray(step)
    if steps.dtype.kind not in "iu" or steps.size == 0 or cache.ndim != 4:
        return  # the op names it
    first, last, tokens, room = int(steps.min()), int(steps.max()), x.shape[1], cache.shape[layout.index("S")]
    if first <= 0:
        raise refused(
            f"step is {first}: nothing is cached yet; fill the caches first, by a call with cache and without step"
        )
    if last + tokens > room:
        full = "the caches are full" if last >= room else f"there is room for {room - last}"
        many = f"{tokens} token{'s' * (tokens > 1)}"
        raise refused(
            f"step is {last} and x has {many}, and the caches hold {room}: {full}; make them longer than the text is to become"
        )
