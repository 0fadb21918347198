"""Near misses: programs that look like a transformer layer and must not become one. Not a test module.

Each changes one thing of the layer in `layer_parts.py`, and says with which code and words the pass has to decline it.
The smaller passes may still take parts of it, and whatever is rewritten keeps its values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from . import layer_cache_misses, layer_rotary
from . import layer_parts as parts
from .layer_parts import ENCODER, FUSED, D, H, Heads, Miss, Params, Parts, Program, params

Array = jax.Array


PRE = Parts()


def layer(how: Parts) -> Program:
    return partial(parts.encode, how), (params(), parts.inputs())


# -- norms ------------------------------------------------------------------------------------------------------------


def coarse(epsilon: float, only: str | None = None) -> Callable[[], Program]:
    def norm(p: Params, name: str, x: Array) -> Array:
        return parts.layer_norm(p, name, x, epsilon if only in (None, name) else 1e-5)

    return lambda: layer(replace(PRE, norm=norm))


def coarse_rms() -> Program:
    return layer(replace(PRE, norm=partial(parts.rms_norm, epsilon=1e-2)))


def coarse_post() -> Program:
    return layer(replace(PRE, pre=False, norm=partial(parts.layer_norm, epsilon=1e-2)))


def mixed_norms() -> Program:
    """A layer norm and an RMS norm: the op has one kind."""
    kinds = {"norm1": parts.layer_norm, "norm2": parts.rms_norm}
    return layer(replace(PRE, norm=lambda p, name, x: kinds[name](p, name, x)))


def norm_returned(which: str) -> Callable[[], Program]:
    """The output of one norm is a result of the program."""

    def fn(p: Params, x: Array) -> tuple[Array, list[Array]]:
        seen: list[Array] = []

        def norm(p: Params, name: str, x: Array) -> Array:
            h = parts.layer_norm(p, name, x)
            if name == which:
                seen.append(h)
            return h

        return parts.encode(replace(PRE, norm=norm), p, x), seen

    return lambda: (fn, (params(), parts.inputs()))


def sandwich() -> Program:
    """A norm between the output projection and the residual."""
    return layer(replace(PRE, out=lambda p, mixed: parts.layer_norm(p, "norm1", parts.out(p, mixed))))


# -- attention --------------------------------------------------------------------------------------------------------


def attends(scores_of: Callable[..., Array], axis: int = -1) -> Parts:
    """Attention whose scores are changed before their softmax, which runs over another axis if asked to."""

    def attend(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
        scores = scores_of(jnp.einsum("bshd,bthd->bhst", q, k))
        return jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores, axis=axis), v)

    return replace(PRE, attend=attend)


def traced_scale() -> Program:
    fn = lambda p, x, scale: parts.encode(attends(lambda s: s * scale), p, x)  # noqa: E731
    return fn, (params(), parts.inputs(), jnp.float32(0.3))


def scale_of_heads() -> Program:
    fn = lambda p, x, scale: parts.encode(attends(lambda s: s * scale[:, None, None]), p, x)  # noqa: E731
    return fn, (params(), parts.inputs(), jnp.linspace(0.1, 0.5, H))


def softmax_over(axis: int) -> Callable[[], Program]:
    return lambda: layer(attends(lambda s: s / math.sqrt(D), axis))


def weights_returned() -> Program:
    """The attention's weights are a result of the program."""

    def fn(p: Params, x: Array) -> tuple[Array, Array]:
        def mix(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            weights = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k) / math.sqrt(D))
            return jnp.einsum("bhst,bthd->bshd", weights, v), weights

        return parts.run(PRE, p, x, mix)

    return fn, (params(), parts.inputs())


def sink() -> Program:
    """One more logit for each head, whose weight is dropped."""

    def fn(p: Params, x: Array, logits: Array) -> Array:
        def attend(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
            scores = jnp.einsum("bshd,bthd->bhst", q, k) / math.sqrt(D)
            more = jnp.broadcast_to(logits[:, None, None], (*scores.shape[:-1], 1))
            weights = jax.nn.softmax(jnp.concatenate([scores, more], -1))[..., :-1]
            return jnp.einsum("bhst,bthd->bshd", weights, v)

        return parts.encode(replace(PRE, attend=attend), p, x)

    return fn, (params(), parts.inputs(), jnp.linspace(-1.0, 1.0, H))


def dropout() -> Program:
    """Attention weights are dropped at random, as in training."""

    def fn(p: Params, x: Array, key: Array) -> Array:
        def attend(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
            weights = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k) / math.sqrt(D))
            keep = jax.random.bernoulli(key, 0.9, weights.shape)
            return jnp.einsum("bhst,bthd->bshd", jnp.where(keep, weights / 0.9, 0), v)

        return parts.encode(replace(PRE, attend=attend), p, x)

    return fn, (params(), parts.inputs(), jax.random.key(0))


def mlp_dropout() -> Program:
    """What the layer adds last is dropped at random."""

    def fn(p: Params, x: Array, key: Array) -> Array:
        def mlp(p: Params, h: Array) -> Array:
            y = parts.mlp(p, h)
            return jnp.where(jax.random.bernoulli(key, 0.9, y.shape), y / 0.9, 0)

        return parts.encode(replace(PRE, mlp=mlp), p, x)

    return fn, (params(), parts.inputs(), jax.random.key(0))


def crosses() -> Program:
    """Keys and values are of another sequence than the queries."""

    def fn(p: Params, x: Array, source: Array) -> Array:
        def project(p: Params, h: Array) -> Heads:
            return parts.separate(p, h)[0], *parts.separate(p, source)[1:]

        return parts.encode(replace(PRE, project=project), p, x)

    return fn, (params(), parts.inputs(), parts.inputs(seed=8))


def unnormed_values() -> Program:
    """Values are projected from x itself, queries and keys from its norm."""

    def fn(p: Params, x: Array) -> Array:
        def project(p: Params, h: Array) -> Heads:
            return *parts.separate(p, h)[:2], parts.separate(p, x)[2]

        return parts.encode(replace(PRE, project=project), p, x)

    return fn, (params(), parts.inputs())


def keys_are_values() -> Program:
    """One projection serves as keys and as values."""

    def project(p: Params, h: Array) -> Heads:
        q, k, _ = parts.separate(p, h)
        return q, k, k

    return layer(replace(PRE, project=project))


def queries_normed() -> Program:
    """Queries and keys pass a norm of their own, which the op does not have."""

    def project(p: Params, h: Array) -> Heads:
        q, k, v = parts.separate(p, h)
        unit = lambda a: a * jax.lax.rsqrt(jnp.mean(jnp.square(a), -1, keepdims=True) + 1e-6)  # noqa: E731
        return unit(q), unit(k), v

    return layer(replace(PRE, project=project))


def queries_returned() -> Program:
    """The queries are a result of the program; keys and values may be, queries are not handed back by the op."""

    def fn(p: Params, x: Array) -> tuple[Array, Array]:
        return parts.run(PRE, p, x, lambda q, k, v: (parts.attend(q, k, v), q))

    return fn, (params(), parts.inputs())


def heads_not_turned_back() -> Program:
    """`[B, H, S, D]` read as `[B, S, H * D]`: the shapes fit, the values are in another order."""

    def attend(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
        mixed = parts.attend(q, k, v, mask)
        return mixed.swapaxes(1, 2).reshape(mixed.shape)

    return layer(replace(PRE, attend=attend))


def keys_first(p: Params, h: Array) -> Heads:
    """One product whose columns are keys, then queries, then values: not the order of any layout."""
    k, q, v = jnp.split(parts.linear(p, "qkv", h), 3, -1)
    return parts.split(q), parts.split(k), parts.split(v)


def innermost(p: Params, h: Array) -> Heads:
    """One product whose columns are query, key and value of one feature after another."""
    qkv = parts.linear(p, "qkv", h).reshape(*h.shape[:-1], -1, D, 3)
    return qkv[..., 0], qkv[..., 1], qkv[..., 2]


# -- residuals and the MLP --------------------------------------------------------------------------------------------


def residual_of_norm() -> Program:
    """The first residual is taken behind the norm, the second as usual."""

    def fn(p: Params, x: Array) -> Array:
        h = parts.layer_norm(p, "norm1", x)
        x = h + parts.out(p, parts.attend(*parts.separate(p, h)))
        return x + parts.mlp(p, parts.layer_norm(p, "norm2", x))

    return fn, (params(), parts.inputs())


def no_residual(which: str) -> Callable[[], Program]:
    def fn(p: Params, x: Array) -> Array:
        y = parts.out(p, parts.attend(*parts.separate(p, parts.layer_norm(p, "norm1", x))))
        x = y if which == "first" else x + y
        y = parts.mlp(p, parts.layer_norm(p, "norm2", x))
        return y if which == "second" else x + y

    return lambda: (fn, (params(), parts.inputs()))


def residual_of_another() -> Program:
    """The last residual is of the layer's input, not of what the attention made of it."""

    def fn(p: Params, x: Array) -> Array:
        middle = x + parts.out(p, parts.attend(*parts.separate(p, parts.layer_norm(p, "norm1", x))))
        return x + parts.mlp(p, parts.layer_norm(p, "norm2", middle))

    return fn, (params(), parts.inputs())


def second_norm_of_x() -> Program:
    """The MLP reads the layer's input; what the attention made of it is added to, not read."""

    def fn(p: Params, x: Array) -> Array:
        middle = x + parts.out(p, parts.attend(*parts.separate(p, parts.layer_norm(p, "norm1", x))))
        return middle + parts.mlp(p, parts.layer_norm(p, "norm2", x))

    return fn, (params(), parts.inputs())


def parallel() -> Program:
    """Attention and MLP both read the same norm and are added at once."""

    def fn(p: Params, x: Array) -> Array:
        h = parts.layer_norm(p, "norm1", x)
        return x + parts.out(p, parts.attend(*parts.separate(p, h))) + parts.mlp(p, h)

    return fn, (params(), parts.inputs())


def scaled_residual() -> Program:
    return layer(replace(PRE, join=lambda x, h, y: x + 0.5 * y))


def middle_returned() -> Program:
    """What the attention made of x is read outside too."""

    def fn(p: Params, x: Array) -> tuple[Array, Array]:
        middle = x + parts.out(p, parts.attend(*parts.separate(p, parts.layer_norm(p, "norm1", x))))
        return middle + parts.mlp(p, parts.layer_norm(p, "norm2", middle)), middle

    return fn, (params(), parts.inputs())


def mlp_of(function: Callable[[Array], Array]) -> Callable[[], Program]:
    return lambda: layer(replace(PRE, mlp=lambda p, h: parts.linear(p, "down", function(parts.linear(p, "up", h)))))


def named() -> Program:
    """A `checkpoint_name`, whose value a remat policy around the program may ask for."""

    def mlp(p: Params, h: Array) -> Array:
        return parts.linear(p, "down", jax.nn.gelu(checkpoint_name(parts.linear(p, "up", h), "up")))

    return layer(replace(PRE, mlp=mlp))


def misses() -> Iterator[Miss]:
    def encoder(name: str, build: Callable[[], Program], code: str, says: str) -> Miss:
        return Miss(name, build, ENCODER, code, says)

    yield encoder("epsilon", coarse(1e-2), "scalar", "epsilon")
    yield encoder("epsilon_of_a_norm_alone", coarse(5e-3), "scalar", "epsilon")  # layer_norm takes it
    yield encoder("epsilon_of_the_second", coarse(1e-2, "norm2"), "scalar", "epsilon")
    yield encoder("epsilon_rms", coarse_rms, "scalar", "epsilon")
    yield encoder("epsilon_post", coarse_post, "scalar", "epsilon")
    yield encoder("mixed_norms", mixed_norms, "structure", "norm")
    yield encoder("norm1_returned", norm_returned("norm1"), "escapes", "returned")
    yield encoder("norm2_returned", norm_returned("norm2"), "escapes", "returned")
    yield encoder("sandwich", sandwich, "structure", "residual")
    yield encoder("scale_traced", traced_scale, "scalar", "unknown at trace time")
    yield encoder("scale_of_heads", scale_of_heads, "scalar", "unknown at trace time")
    yield encoder("softmax_over_queries", softmax_over(2), "axes", "softmax")
    yield encoder("softmax_over_heads", softmax_over(1), "axes", "softmax")
    yield encoder("weights_returned", weights_returned, "escapes", "attention")
    yield encoder("queries_returned", queries_returned, "escapes", "returned")
    yield encoder("sink", sink, "structure", "its attention has a sink")
    yield encoder("dropout", dropout, "dropout", "its attention has dropout")
    yield encoder("dropout_of_the_mlp", mlp_dropout, "dropout", "feed-forward")
    yield encoder("cross_attention", crosses, "structure", "different values")
    yield encoder("values_without_norm", unnormed_values, "structure", "different values")
    yield encoder("keys_are_values", keys_are_values, "structure", "one product")
    yield encoder("queries_normed", queries_normed, "structure", "projection")
    yield encoder("heads_not_turned_back", heads_not_turned_back, "axes", "across the axes of heads")
    for project, code, says in ((keys_first, "axes", "order"), (innermost, "axes", "order")):
        build = partial(layer, replace(PRE, project=project))
        yield Miss(f"fused_{project.__name__}", build, ENCODER + FUSED, code, says)
    yield encoder("residual_of_norm", residual_of_norm, "structure", "norm's result")
    yield encoder("residual_of_another", residual_of_another, "structure", "other than its own input")
    yield encoder("residual_missing", no_residual("first"), "structure", "not the norm's input")
    yield encoder("last_residual_missing", no_residual("second"), "structure", "residual sum")
    yield encoder("residual_scaled", scaled_residual, "scalar", "factor")
    yield encoder("second_norm_of_x", second_norm_of_x, "structure", "norms read")
    yield encoder("parallel", parallel, "structure", "norms read")
    yield encoder("middle_returned", middle_returned, "escapes", "returned")
    yield encoder("no_activation", mlp_of(lambda h: h), "activation", "activation")
    yield encoder("unknown_activation", mlp_of(lambda h: jnp.sin(h)), "activation", "activation")
    yield encoder("checkpoint_name", named, "named_residual", "names a value")
    yield from layer_cache_misses.misses()


MISSES: Mapping[str, Miss] = {miss.name: miss for miss in (*misses(), *layer_rotary.misses())}
