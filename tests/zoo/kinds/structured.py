"""Models in structured programs: scans, remat, shard_map, caches, branches, loops, nested calls and mapped models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ..config import Attention, Composite, Config, Mlp, Sizes, Transformer
from ..model import Built, Model, Shape, activations, assemble, struct, structs

Array = jax.Array
Params = dict[str, Array]


def layer_shapes(sizes: Sizes) -> dict[str, Shape]:
    """The parameters of one transformer layer: four attention products, two feed-forward ones, two norms."""
    square = dict.fromkeys(("query", "key", "value", "output"), (sizes.model, sizes.model))
    weights = square | {"up": (sizes.model, sizes.hidden), "down": (sizes.hidden, sizes.model)}
    vectors = {f"{name}_bias": shape[-1:] for name, shape in weights.items()}
    norms = {f"{name}_{part}": (sizes.model,) for name in ("first", "second") for part in ("scale", "shift")}
    return weights | vectors | norms


def norm(p: Params, name: str, x: Array) -> Array:
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.square(wide - mean).mean(-1, keepdims=True)
    return ((wide - mean) * lax.rsqrt(variance + 1e-6)).astype(x.dtype) * p[f"{name}_scale"] + p[f"{name}_shift"]


def product(p: Params, name: str, x: Array) -> Array:
    return checkpoint_name(x @ p[name] + p[f"{name}_bias"], name)


def attention(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
    s = jnp.einsum("...thd,...shd->...hts", q, k) / q.shape[-1] ** 0.5
    if mask is not None:
        s = jnp.where(mask, s, jnp.finfo(s.dtype).min)
    return jnp.einsum("...hts,...shd->...thd", jax.nn.softmax(s), v)


def layer(config: Config, p: Params, x: Array) -> Array:
    """A transformer layer with its norms first and a causal mask; `x` is `[..., length, model]`."""
    h = norm(p, "first", x)
    q, k, v = (product(p, name, h).reshape(*h.shape[:-1], -1, config.sizes.head) for name in ("query", "key", "value"))
    mask = jnp.tril(jnp.ones((x.shape[-2], x.shape[-2]), bool))
    x = x + product(p, "output", attention(q, k, v, mask).reshape(x.shape))
    return x + product(p, "down", jax.nn.gelu(product(p, "up", norm(p, "second", x))))


Run = Callable[[Callable[[Params, Array], Array], Any, Array], Array]
DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
NAMES = jax.checkpoint_policies.save_only_these_names("up", "output")


def in_turn(body: Callable[[Params, Array], Array], params: Any, x: Array) -> Array:
    for p in params:
        x = body(p, x)
    return x


def scanned(body: Callable[[Params, Array], Array], params: Any, x: Array) -> Array:
    return lax.scan(lambda carry, p: (body(p, carry), None), x, params)[0]


def scanned_pairs(body: Callable[[Params, Array], Array], params: Any, x: Array) -> Array:
    """Each step of the scan is two layers of their own."""
    return lax.scan(lambda carry, pair: (in_turn(body, pair, carry), None), x, params)[0]


def row_by_row(body: Callable[[Params, Array], Array], params: Any, x: Array) -> Array:
    return lax.map(lambda row: in_turn(body, params, row), x)


def mapped_rows(body: Callable[[Params, Array], Array], params: Any, x: Array) -> Array:
    return jax.vmap(lambda row: in_turn(body, params, row))(x)


def ensemble(body: Callable[[Params, Array], Array], params: Any, x: Array) -> Array:
    """Several models, their parameters stacked, on the same input."""
    return jax.vmap(lambda members: in_turn(body, members, x))(params)


def shared(body: Callable[[Params, Array], Array], params: Any, x: Array) -> Array:
    """One layer's parameters, applied twice."""
    return body(params[0], body(params[0], x))


def looped(body: Callable[[Params, Array], Array], params: Any, x: Array) -> Array:
    return lax.fori_loop(0, 3, lambda _, value: body(params[0], value), x)


# How the layer is wrapped, how the layers are run, and the leading axes that their parameters have (None: one layer).
ENCODERS: dict[str, tuple[Callable[..., Any], Run, tuple[int, ...], int]] = {
    "unrolled": (lambda f: f, in_turn, (), 2),
    "remat": (jax.checkpoint, in_turn, (), 2),
    "remat_policy": (partial(jax.checkpoint, policy=DOTS), in_turn, (), 2),
    "remat_names": (partial(jax.checkpoint, policy=NAMES), in_turn, (), 2),
    "nested_jit": (jax.jit, in_turn, (), 2),
    "jit_of_remat": (lambda f: jax.jit(jax.checkpoint(jax.jit(f))), in_turn, (), 2),
    "scan": (lambda f: f, scanned, (6,), 0),
    "scan_remat": (partial(jax.checkpoint, prevent_cse=False), scanned, (6,), 0),
    "scan_remat_policy": (partial(jax.checkpoint, policy=DOTS, prevent_cse=False), scanned, (6,), 0),
    "scan_jit": (jax.jit, scanned, (6,), 0),
    "scan_pairs": (lambda f: f, scanned_pairs, (6,), 2),
    "row_by_row": (lambda f: f, row_by_row, (), 2),
    "mapped_rows": (lambda f: f, mapped_rows, (), 2),
    "ensemble": (lambda f: f, ensemble, (5,), 2),
    "shared": (lambda f: f, shared, (), 1),
    "looped": (lambda f: f, looped, (), 1),
}


def build_encoder(name: str, config: Transformer, dtype: Any) -> Built:
    """`sets` is the number of layers with parameters of their own: 0 where the only ones are stacked for a scan."""
    wrap, run, leading, sets = ENCODERS[name]
    shapes = {name: (*leading, *shape) for name, shape in layer_shapes(config.sizes).items()}
    one = structs(shapes, dtype)
    params = [dict(one) for _ in range(sets)] if sets else one

    def forward(params: Any, x: Array) -> Array:
        return run(wrap(partial(layer, config)), params, x)

    return assemble(forward, params, [activations(config, dtype)], config)


def decode_concatenated(sizes: Sizes, p: Params, x: Array, keys: Array, values: Array) -> tuple[Array, Array, Array]:
    """One token: its key and value are appended to the cache, whose entries are all valid. `x` is `[batch, 1, model]`."""
    q, k, v = (product(p, name, x).reshape(x.shape[0], 1, -1, sizes.head) for name in ("query", "key", "value"))
    keys, values = jnp.concatenate([keys, k], 1), jnp.concatenate([values, v], 1)
    return product(p, "output", attention(q, keys, values).reshape(x.shape)), keys, values


def decode_updated(
    sizes: Sizes, p: Params, x: Array, keys: Array, values: Array, index: Array
) -> tuple[Array, Array, Array]:
    """One token: its key and value are written into the cache at `index`, and later entries are masked."""
    q, k, v = (product(p, name, x).reshape(x.shape[0], 1, -1, sizes.head) for name in ("query", "key", "value"))
    keys = lax.dynamic_update_slice_in_dim(keys, k, index, axis=1)
    values = lax.dynamic_update_slice_in_dim(values, v, index, axis=1)
    mask = jnp.arange(keys.shape[1]) <= index
    return product(p, "output", attention(q, keys, values, mask).reshape(x.shape)), keys, values


def decode_scanned(sizes: Sizes, p: Params, x: Array, keys: Array, values: Array) -> Array:
    """Token after token, as a scan that carries the cache. `x` is `[batch, length, model]`."""

    def step(cache: tuple[Array, Array], now: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
        token, index = now
        out, keys, values = decode_updated(sizes, p, token[:, None], *cache, index)
        return (keys, values), out[:, 0]

    return lax.scan(step, (keys, values), (x.swapaxes(0, 1), jnp.arange(x.shape[1])))[1]


def build_decode(function: Callable[..., Any], length: int, indexed: bool, config: Attention, dtype: Any) -> Built:
    sizes = config.sizes
    shapes = {name: shape for name, shape in layer_shapes(sizes).items() if name.split("_")[0] in DECODES}
    cache = struct((sizes.batch, sizes.keys, sizes.heads, sizes.head), dtype)
    inputs = [struct((sizes.batch, length, sizes.model), dtype), cache, cache]
    if indexed:
        inputs.append(struct((), jnp.int32))
    return assemble(partial(function, sizes), structs(shapes, dtype), inputs, config)


DECODES = ("query", "key", "value", "output")


def dense(p: Params, index: int, x: Array) -> Array:
    return x @ p[f"w{index}"] + p[f"b{index}"]


def jit_twice(p: Params, x: Array) -> Array:
    """One jitted function, called at two places."""
    layer = jax.jit(lambda x, w, b: jax.nn.relu(x @ w + b))
    return dense(p, 2, layer(layer(x, p["w0"], p["b0"]), p["w1"], p["b1"]))


def own_jvp(p: Params, x: Array) -> Array:
    """A relu with a derivative of its own."""
    relu = jax.custom_jvp(lambda h: jnp.maximum(h, 0))
    relu.defjvps(lambda t, answer, h: jnp.where(h > 0, t, 0))
    return dense(p, 1, relu(dense(p, 0, x)))


def own_vjp(p: Params, x: Array) -> Array:
    """A gelu whose gradient is given by two functions of its own."""
    gelu = jax.custom_vjp(lambda h: jax.nn.gelu(h))
    gelu.defvjp(lambda h: (jax.nn.gelu(h), h), lambda h, ct: jax.vjp(jax.nn.gelu, h)[1](ct))
    return dense(p, 1, gelu(dense(p, 0, x)))


def while_loop(p: Params, x: Array, steps: Array) -> Array:
    """A loop of a length known only at run time; what it uses is not differentiated."""
    w, b = lax.stop_gradient((p["w0"], p["b0"]))
    x = lax.fori_loop(0, steps, lambda _, h: jnp.tanh(h @ w + b), x)
    return dense(p, 1, x)


def fori_loop(p: Params, x: Array) -> Array:
    return dense(p, 1, lax.fori_loop(0, 3, lambda _, h: jax.nn.relu(dense(p, 0, h)), x))


def branches(p: Params, x: Array) -> Array:
    """Two models, of which a condition chooses one."""
    first = lambda x: dense(p, 1, jax.nn.relu(dense(p, 0, x)))  # noqa: E731
    second = lambda x: dense(p, 3, jax.nn.gelu(dense(p, 2, x)))  # noqa: E731
    return lax.cond(jnp.sum(x) > 0, first, second, x)


def build_mlp(function: Callable[..., Array], widths: Any, integer: bool, config: Config, dtype: Any) -> Built:
    shapes: dict[str, Shape] = {}
    for index, (rows, columns) in enumerate(widths(config.sizes)):
        shapes |= {f"w{index}": (rows, columns), f"b{index}": (columns,)}
    inputs = [activations(config, dtype), *([struct((), jnp.int32)] if integer else [])]
    return assemble(function, structs(shapes, dtype), inputs, config)


def _encoder(name: str, **fields: Any) -> Model:
    config = Transformer(norms_outside=0, mask="causal", **fields)
    return Model(f"encoder_{name}", "structured", config, partial(build_encoder, name, config))


def _mlp(function: Callable[..., Array], widths: Any, integer: bool = False, config: Config | None = None) -> Model:
    config = Mlp() if config is None else config
    return Model(function.__name__, "structured", config, partial(build_mlp, function, widths, integer, config))


def _decode(function: Callable[..., Any], length: int, indexed: bool, **fields: Any) -> Model:
    config = Attention(**fields)
    return Model(function.__name__, "structured", config, partial(build_decode, function, length, indexed, config))


def two(sizes: Sizes) -> list[tuple[int, int]]:
    return [(sizes.model, sizes.hidden), (sizes.hidden, sizes.out)]


def same_first(sizes: Sizes) -> list[tuple[int, int]]:
    """The first product keeps the width, so that it can be repeated."""
    return [(sizes.model, sizes.model), (sizes.model, sizes.out)]


ONCE: dict[str, Any] = {"places": "once"}
SWITCHED = Composite(parts=((1, Mlp(products=2)), (1, Mlp(products=2, activation="gelu_tanh"))))
MODELS: tuple[Model, ...] = (
    *(_encoder(name) for name in ("unrolled", "remat", "remat_policy", "remat_names", "nested_jit", "jit_of_remat")),
    *(_encoder(name, **ONCE) for name in ("scan", "scan_remat", "scan_remat_policy", "scan_jit", "looped")),
    *(_encoder(name, optimizer="sgd") for name in ("scan_pairs", "row_by_row", "mapped_rows")),
    _encoder("ensemble", optimizer="sgd", stacked=True),
    _encoder("shared", places="shared"),
    _decode(decode_concatenated, 1, False),
    _decode(decode_updated, 1, True, mask="masked"),
    _decode(decode_scanned, Sizes().length, False, mask="masked", optimizer="sgd"),
    _mlp(
        jit_twice,
        lambda sizes: [(sizes.model, sizes.model), (sizes.model, sizes.model), (sizes.model, sizes.out)],
        config=Mlp(products=3),
    ),
    _mlp(own_jvp, two),
    _mlp(own_vjp, two, config=Mlp(activation="gelu_tanh")),
    _mlp(while_loop, same_first, True, Mlp(activation="tanh", optimizer="sgd")),
    _mlp(fori_loop, same_first),
    _mlp(
        branches,
        lambda sizes: [*two(sizes), (sizes.model, sizes.hidden + 8), (sizes.hidden + 8, sizes.out)],
        config=SWITCHED,
    ),
)
