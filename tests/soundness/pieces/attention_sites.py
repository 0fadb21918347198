"""Attention in many layouts, spellings and masks, right ones and ones with something wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .piece import Array, Draft, Piece, wider

LOW = float(np.finfo(np.float32).min)


# -- softmaxes: (scores, axis) -> weights -----------------------------------------------------------------------------


def _by_max(s: Array, a: int) -> Array:
    e = jnp.exp(s - s.max(a, keepdims=True))
    return e / e.sum(a, keepdims=True)


def _by_frozen_max(s: Array, a: int) -> Array:
    e = jnp.exp(s - lax.stop_gradient(s.max(a, keepdims=True)))
    return e * (1 / e.sum(a, keepdims=True))


def _less_max(f: Callable[[Array, int], Array]) -> Callable[[Array, int], Array]:
    def softmax(s: Array, a: int) -> Array:
        e = jnp.exp(s - f(s, a))
        return e / e.sum(a, keepdims=True)

    return softmax


def _over(f: Callable[[Array, int], Array]) -> Callable[[Array, int], Array]:
    def softmax(s: Array, a: int) -> Array:
        e = jnp.exp(s - s.max(a, keepdims=True))
        return e / f(e, a)

    return softmax


RIGHT = {
    "softmax": jax.nn.softmax,
    "by max": _by_max,
    "by frozen max": _by_frozen_max,
    "by logsumexp": lambda s, a: jnp.exp(s - jax.nn.logsumexp(s, a, keepdims=True)),
    "by log_softmax": lambda s, a: jnp.exp(jax.nn.log_softmax(s, a)),
    "in f32": lambda s, a: jax.nn.softmax(s.astype(wider()), a).astype(s.dtype),
}
PLAIN = {"without max": lambda s, a: jnp.exp(s) / jnp.exp(s).sum(a, keepdims=True)}
WRONG = {
    "another axis": lambda s, a: jax.nn.softmax(s, (a + 1) % s.ndim),
    "all axes": lambda s, a: jax.nn.softmax(s.reshape(-1)).reshape(s.shape),
    "less twice the max": _less_max(lambda s, a: 2 * s.max(a, keepdims=True)),
    "less the minimum": _less_max(lambda s, a: s.min(a, keepdims=True)),
    "less the mean": _less_max(lambda s, a: s.mean(a, keepdims=True)),
    "less another max": _less_max(lambda s, a: s.max((a + 1) % s.ndim, keepdims=True)),
    "less max of all": _less_max(lambda s, a: s.max()),
    "over the sum and 1": _over(lambda e, a: e.sum(a, keepdims=True) + 1),
    "over the sum and 1e-6": _over(lambda e, a: e.sum(a, keepdims=True) + 1e-6),
    "over another sum": _over(lambda e, a: e.sum((a + 1) % e.ndim, keepdims=True)),
    "over the mean": _over(lambda e, a: e.mean(a, keepdims=True)),
    "over the frozen sum": _over(lambda e, a: lax.stop_gradient(e.sum(a, keepdims=True))),
    "not divided": _over(lambda e, a: 1.0),
    "powers of two": lambda s, a: jnp.exp2(s) / jnp.exp2(s).sum(a, keepdims=True),
    "squared": lambda s, a: jnp.square(jax.nn.softmax(s, a)),
    "twice": lambda s, a: jax.nn.softmax(jax.nn.softmax(s, a), a),
    "sigmoid": lambda s, a: jax.nn.sigmoid(s),
    "relu": lambda s, a: jax.nn.relu(s),
    "frozen weights": lambda s, a: lax.stop_gradient(jax.nn.softmax(s, a)),
    "frozen scores": lambda s, a: jax.nn.softmax(lax.stop_gradient(s), a),
    "rounded weights": lambda s, a: jax.nn.softmax(s, a).astype(jnp.bfloat16).astype(s.dtype),
    "rounded scores": lambda s, a: jax.nn.softmax(s.astype(jnp.bfloat16).astype(s.dtype), a),
    "less 0.1": lambda s, a: jax.nn.softmax(s, a) - 0.1,
    "negated": lambda s, a: jax.nn.softmax(-s, a),
    "tempered": lambda s, a: jax.nn.softmax(s / 0.7, a),
    "mixed": lambda s, a: 0.9 * jax.nn.softmax(s, a) + 0.1,
    "where it is large": lambda s, a: jax.nn.softmax(jnp.where(s > 0, s, -jnp.inf), a),
    "softcap": lambda s, a: jax.nn.softmax(2.0 * jnp.tanh(s / 2.0), a),
}


# -- softmaxes with one logit more, whose weight is dropped: (scores, sink, axis) -> weights ---------------------------


def _with_sink(s: Array, sink: Array, a: int, first: bool = False) -> Array:
    one = jnp.broadcast_to(sink, [1 if i == a % s.ndim else n for i, n in enumerate(s.shape)])
    return jnp.concatenate([one, s] if first else [s, one], a)


def _part(w: Array, a: int, start: int, size: int) -> Array:
    return lax.slice_in_dim(w, start, start + size, axis=a % w.ndim)


def _in_the_sum(s: Array, sink: Array, a: int, top: Callable[..., Array] = jnp.maximum) -> Array:
    m = top(s.max(a, keepdims=True), sink)
    e = jnp.exp(s - m)
    return e / (e.sum(a, keepdims=True) + jnp.exp(sink - m))


def _lse(s: Array, a: int) -> Array:
    return jax.nn.logsumexp(s, a, keepdims=True)


SINKS = {
    "sink beside": lambda s, z, a: _part(jax.nn.softmax(_with_sink(s, z, a), a), a, 0, s.shape[a]),
    "sink first": lambda s, z, a: _part(jax.nn.softmax(_with_sink(s, z, a, True), a), a, 1, s.shape[a]),
    "sink by max twice": lambda s, z, a: _part(
        jax.nn.softmax((c := _with_sink(s, z, a)) - c.max(a, keepdims=True), a), a, 0, s.shape[a]
    ),
    "sink in the sum": _in_the_sum,
    "sink below the scores' max": lambda s, z, a: _in_the_sum(s, z, a, lambda m, _: m),
    "sink by logaddexp": lambda s, z, a: jnp.exp(s - jnp.logaddexp(_lse(s, a), z)),
    "sink by sigmoid": lambda s, z, a: jax.nn.softmax(s, a) * jax.nn.sigmoid(_lse(s, a) - z),
    "sink of 0": lambda s, z, a: _in_the_sum(s, jnp.zeros((), s.dtype), a),
    "sink in f32": lambda s, z, a: _in_the_sum(s.astype(wider()), z.astype(wider()), a).astype(s.dtype),
}
NO_SINKS = {
    "no sink: its weight kept": lambda s, z, a: (
        (w := jax.nn.softmax(_with_sink(s, z, a), a)),
        _part(w, a, 0, s.shape[a]) + _part(w, a, s.shape[a], 1),
    )[1],
    "no sink: a key dropped": lambda s, z, a: _part(jax.nn.softmax(_with_sink(s, z, a), a), a, 1, s.shape[a]),
    "no sink: two logits": lambda s, z, a: _part(
        jax.nn.softmax(_with_sink(_with_sink(s, z, a), 0.5 * z, a), a), a, 0, s.shape[a]
    ),
    "no sink: twice in the sum": lambda s, z, a: _in_the_sum(s, z, a) / (1 + jnp.exp(z)),
    "no sink: not below the max": lambda s, z, a: _over(lambda e, a: e.sum(a, keepdims=True) + jnp.exp(z))(s, a),
    "no sink: two factors": lambda s, z, a: jax.nn.softmax(s, a) * jax.nn.sigmoid(2.0 * _lse(s, a) - z),
    "no sink: frozen": lambda s, z, a: lax.stop_gradient(_in_the_sum(s, z, a)),
    "no sink: another axis": lambda s, z, a: _in_the_sum(s, z, (a + 1) % s.ndim),
    "no sink: of each key": lambda s, z, a: (
        (e := jnp.exp(s - s.max(a, keepdims=True)))
        / (e.sum(a, keepdims=True) + jnp.exp(z * jnp.cos(s) - s.max(a, keepdims=True)))
    ),
}


def _sink(d: Draft, heads: int) -> Callable[[Sequence[Array], Array, int], Array]:
    """(params, scores [b, h, t, s] or with the last two turned, axis) -> weights."""
    softmax = d.pick(SINKS if d.chance(0.6) else NO_SINKS)
    logit = d.param(*d.rng.choice([(heads, 1, 1), (heads, 1, 1), ()]), role="bias")
    return lambda p, s, a: softmax(s, logit(p).astype(s.dtype), a)


# -- masks: (draft, rows, keys) -> (params, scores [..., t, s]) -> scores ---------------------------------------------


def _grid(fn: Callable[[Array, Array], Array]) -> Callable[[int, int], Array]:
    return lambda t, s: fn(jnp.arange(t)[:, None], jnp.arange(s)[None, :])


GRIDS = {
    "causal": _grid(lambda i, j: i >= j),
    "causal by tril": lambda t, s: jnp.tril(jnp.ones((t, s), bool)),
    "causal, not above": _grid(lambda i, j: ~(j > i)),
    "causal to the end": lambda t, s: jnp.tril(jnp.ones((t, s), bool), s - t),
    "strictly causal": _grid(lambda i, j: i > j),
    "causal and one": _grid(lambda i, j: i + 1 >= j),
    "anti-causal": _grid(lambda i, j: i <= j),
    "window": _grid(lambda i, j: (i >= j) & (i - j < 2)),
    "all": lambda t, s: jnp.ones((t, s), bool),
    "none": lambda t, s: jnp.zeros((t, s), bool),
    "first key": _grid(lambda i, j: (j == 0) & (i >= 0)),
    "all but the last row": lambda t, s: jnp.tril(jnp.ones((t, s), bool)) | (jnp.arange(t)[:, None] == t - 1),
}
FILLS = {
    "-inf": -jnp.inf,
    "-1e30": -1e30,
    "lowest": LOW,
    "-1e9": -1e9,
    "0.5": 0.5,
    "-100": -100.0,
    "0": 0.0,
    "1e9": 1e9,
}


def _kept(d: Draft, t: int, s: int) -> Callable[[Sequence[Array]], Array]:
    """A mask of booleans [t, s]: made in the program, captured, or given."""
    if d.chance(0.3):
        d.words.append("given mask")
        shape = d.rng.choice([(t, s), (t, s), (1, s), (t, 1)])
        return d.param(*shape, role="mask", dtype="bool")
    grid = d.pick(GRIDS)
    if d.chance(0.2):
        d.words.append("captured")
        array = np.asarray(grid(t, s))
        return lambda p: jnp.asarray(array)
    return lambda p: grid(t, s)


def _fill(d: Draft) -> float:
    name = d.rng.choice([*FILLS, "-inf", "-1e9", "lowest"])
    d.words.append(f"fill {name}")
    if name != "-inf":
        d.largest = min(d.largest, 4.0)
    return FILLS[name]


def _nothing(d: Draft, t: int, s: int) -> Callable[..., Array]:
    shape = d.rng.choice([(t, s), (1, s), ()])
    return lambda p, z: z + (1 - jnp.ones(shape, z.dtype)) * -1e4


def _nearly_nothing(d: Draft, t: int, s: int) -> Callable[..., Array]:
    return lambda p, z: z + (1 - jnp.cos(0.1 * jnp.arange(s))).astype(z.dtype) * -10.0


def _selected(d: Draft, t: int, s: int) -> Callable[..., Array]:
    kept, fill, turned = _kept(d, t, s), _fill(d), d.chance(0.2)
    if d.chance(0.2):
        d.words.append("an array fills")
        # LOW is infinite in 16 bits, but not in the float64 that judges.
        fill = jnp.asarray(-1e38 if fill == LOW else fill, np.float32)
    if turned:
        return lambda p, z: jnp.where(~kept(p), jnp.asarray(fill, z.dtype), z)
    return lambda p, z: jnp.where(kept(p), z, jnp.asarray(fill, z.dtype))


def _added(d: Draft, t: int, s: int) -> Callable[..., Array]:
    if d.chance(0.25):
        return d.pick({"zeros": _nothing, "nearly zeros": _nearly_nothing})(d, t, s)
    kept, fill = _kept(d, t, s), _fill(d)
    fill = fill if np.isfinite(fill) else -1e30
    d.largest = min(d.largest, 4.0)
    if d.chance(0.5):
        return lambda p, z: z + jnp.where(kept(p), 0.0, fill).astype(z.dtype)
    return lambda p, z: z + ((1.0 - kept(p).astype(wider())) * fill).astype(z.dtype)


def _bias(d: Draft, t: int, s: int) -> Callable[..., Array]:
    shape = d.rng.choice([(t, s), (1, s), (t, 1), ()])
    b = d.param(*shape, role="bias")
    return lambda p, z: z + b(p).astype(z.dtype)


def _slope(d: Draft, t: int, s: int) -> Callable[..., Array]:
    return lambda p, z: z - 0.5 * jnp.abs(jnp.arange(t)[:, None] - jnp.arange(s)[None]).astype(z.dtype)


def _both(d: Draft, t: int, s: int) -> Callable[..., Array]:
    one, other = _selected(d, t, s), _selected(d, t, s)
    return lambda p, z: other(p, one(p, z))


def _zeroed(d: Draft, t: int, s: int) -> Callable[..., Array]:
    kept = _kept(d, t, s)
    return lambda p, z: z * kept(p).astype(z.dtype)


MASKS = {
    "": lambda d, t, s: lambda p, z: z,
    "where": _selected,
    "added": _added,
    "added bias": _bias,
    "slope": _slope,
    "two masks": _both,
    "times mask": _zeroed,
}

# -- what else may be wrong: (weights, v, q, k) -> (weights, v), and what becomes of the result ------------------------

SPOILS: dict[str, Callable[..., tuple[Array, Array]]] = {
    "values turned": lambda w, v: (w, jnp.flip(v, -2)),
    "weights turned": lambda w, v: (jnp.flip(w, -1), v),
    "weights dropped": lambda w, v: (w * (jnp.cos(17.0 * jnp.arange(w.shape[-1])) > 0).astype(w.dtype) / 0.5, v),
    "one weight cut": lambda w, v: (w.at[..., 0].set(0), v),
    "weights masked after": lambda w, v: (jnp.where(jnp.arange(w.shape[-1]) > 0, w, 0), v),
    "values frozen": lambda w, v: (w, lax.stop_gradient(v)),
    "weights of the first head": lambda w, v: (w[:, :1] + 0 * w, v),
    "weights thresholded": lambda w, v: (jnp.where(w > 0.2, w, 0), v),
    "weights scaled": lambda w, v: (3.0 * w, v),
    "values scaled": lambda w, v: (w, 3.0 * v),
    "weights random": lambda w, v: (
        jnp.where(jax.random.bernoulli(jax.random.key(3), 0.5, w.shape), w / 0.5, 0).astype(w.dtype),
        v,
    ),
}
SCALES = ("", "on q", "on k", "on scores", "on both", "over scores", "traced", "by head", "root in the program")


def _scaling(d: Draft, heads: int, c: int) -> Callable[[Sequence[Array], Array, Array], tuple[Array, Array, Callable]]:
    """(params, q, k) -> (q, k, what is done to the scores)."""
    how, number = d.rng.choice(SCALES), d.rng.choice([c**-0.5, 0.25, 1.0, -0.5, 2.0])
    d.words.append(f"scale {number:.3g} {how}" if how else "no scale")
    given = (
        d.param(role="scale") if how == "traced" else d.param(heads, 1, 1, role="scale") if how == "by head" else None
    )

    def same(s: Array) -> Array:
        return s

    def scale(p: Sequence[Array], q: Array, k: Array) -> tuple[Array, Array, Callable[[Array], Array]]:
        if how == "on q":
            return q * number, k, same
        if how == "on k":
            return q, k * number, same
        if how == "on both":
            return q * number, k / 2, same
        if how == "on scores":
            return q, k, lambda s: s * number
        if how == "over scores":
            return q, k, lambda s: s / number
        if how == "root in the program":
            return q / jnp.sqrt(jnp.asarray(c, q.dtype)), k, same
        if given is not None:
            factor = given(p)
            return q, k, lambda s: s * factor.astype(s.dtype)
        return q, k, same

    return scale


def _projections(d: Draft, heads: int, groups: int, c: int, e: int) -> Callable[[Sequence[Array], Array], tuple]:
    """(params, x [b, t, f]) -> q [b, t, h, c], k [b, s, g, c], v [b, s, g, e]."""
    b, t, f = d.shape
    how = d.rng.choice(["projected", "projected", "shared", "given", "one product", "x itself", "cross"])
    d.words.append(how)
    if how == "x itself" and f == heads * c and groups == heads and c == e:
        split = lambda x: x.reshape(b, t, heads, c)  # noqa: E731
        return lambda p, x: (split(x),) * 3
    if how == "given":
        s = d.rng.choice([t, t, 5])
        q = d.param(b, t, heads, c, role="data")
        k, v = d.param(b, s, groups, c, role="data"), d.param(b, s, groups, e, role="data")
        return lambda p, x: tuple(a(p).astype(x.dtype) for a in (q, k, v))
    if how == "one product" and c == e and groups == heads:
        w = d.param(f, 3 * heads * c)
        return lambda p, x: tuple(a.reshape(b, t, heads, c) for a in jnp.split(x @ w(p).astype(x.dtype), 3, axis=-1))
    wq, wk, wv = d.param(f, heads, c), d.param(f, groups, c), d.param(f, groups, e)
    if how == "shared" and groups == heads:
        wk = wq
    other = d.param(b, d.rng.choice([t, 3]), f, role="data") if how == "cross" else None

    def project(p: Sequence[Array], x: Array) -> tuple:
        y = x if other is None else other(p).astype(x.dtype)
        each = ((x, wq), (y, wk), (y, wv))
        return tuple(jnp.einsum("btf,fhc->bthc", a, w(p).astype(x.dtype)) for a, w in each)

    return project


def _letters(d: Draft, letters: str) -> str:
    return "".join(d.rng.sample(letters, len(letters))) if d.chance(0.5) else letters


def _spelt(d: Draft) -> tuple[Callable[..., Array], Callable[..., Array]]:
    """Both products: (q, k) -> scores [b, h, t, s], (weights, v) -> [b, t, h, e]."""
    how = d.rng.choice(["einsum", "matmul", "merged", "vmapped", "letters", "dot_general"])
    d.words.append(how)
    turn = lambda a: jnp.swapaxes(a, 1, 2)  # noqa: E731
    if how == "matmul":
        return (lambda q, k: turn(q) @ jnp.swapaxes(turn(k), -1, -2)), (lambda w, v: turn(w @ turn(v)))
    if how == "merged":
        flat = lambda a: a.reshape(-1, *a.shape[2:])  # noqa: E731
        return (
            lambda q, k: jnp.einsum("mtc,msc->mts", flat(turn(q)), flat(turn(k))).reshape(
                q.shape[0], q.shape[2], q.shape[1], k.shape[1]
            ),
            lambda w, v: turn((flat(w) @ flat(turn(v))).reshape(*w.shape[:3], v.shape[-1])),
        )
    if how == "vmapped":
        twice = lambda f, i, o: jax.vmap(jax.vmap(f, i, o))  # noqa: E731
        return twice(lambda q, k: q @ k.T, (1, 1), 0), twice(lambda w, v: w @ v, (0, 1), 1)
    if how == "dot_general":
        return (
            lambda q, k: lax.dot_general(q, k, (((3,), (3,)), ((0, 2), (0, 2)))),
            lambda w, v: jnp.einsum("bhts,bshe->bthe", w, v),
        )
    if how == "letters":
        ql, kl, sl, vl, ol = (_letters(d, x) for x in ("bthc", "bshc", "bhts", "bshe", "bthe"))
        into = lambda a, have, want: jnp.einsum(f"{have}->{want}", a)  # noqa: E731
        return (
            lambda q, k: into(jnp.einsum(f"{ql},{kl}->{sl}", into(q, "bthc", ql), into(k, "bshc", kl)), sl, "bhts"),
            lambda w, v: into(jnp.einsum(f"{sl},{vl}->{ol}", into(w, "bhts", sl), into(v, "bshe", vl)), ol, "bthe"),
        )
    return (lambda q, k: jnp.einsum("bthc,bshc->bhts", q, k)), (lambda w, v: jnp.einsum("bhts,bshe->bthe", w, v))


def _library(d: Draft, project: Any, heads: int, e: int) -> Piece:
    """jax.nn.dot_product_attention with some of its arguments."""
    b, t, _ = d.shape
    causal, scale = d.chance(0.5), d.rng.choice([None, 0.3])
    d.words += ["library", "causal" if causal else "all"]

    def fn(p: Sequence[Array], x: Array) -> tuple[Array, tuple[Array, ...]]:
        out = jax.nn.dot_product_attention(*project(p, x), is_causal=causal, scale=scale)
        return out.reshape(b, t, heads * e), ()

    d.largest = min(d.largest, 4.0)
    return d.done(fn, (b, t, heads * e), "attention")


def attention(d: Draft) -> Piece:
    """softmax(scale q k^T) v over x [b, t, f], at times with one thing wrong: -> [b, t, h e]."""
    b, t, _ = d.shape
    heads = d.rng.choice([1, 2, 2, 3, 4])
    groups = d.rng.choice([g for g in (1, 2, heads, heads) if heads % g == 0])
    c = d.rng.choice([1, 2, 3, 4, 8])
    e = d.rng.choice([c, c, 2])
    project = _projections(d, heads, groups, c, e)
    if c == e and d.chance(0.1):
        return _library(d, project, heads, e)
    scale = _scaling(d, heads, c)
    products = _spelt(d)
    softmax = d.pick(PLAIN if d.chance(0.1) else RIGHT if d.chance(0.65) else WRONG)
    sunk = _sink(d, heads) if d.chance(0.12) else None
    if "without max" in d.words or "sink below the scores' max" in d.words or "powers of two" in d.words:
        d.largest = min(d.largest, 3.0)
    keys = d.params[1].shape[1] if "given" in d.words else t
    if "cross" in d.words:
        keys = d.params[3].shape[1]
    mask = d.pick(MASKS)(d, t, keys) if d.chance(0.6) else MASKS[""](d, t, keys)
    spoil = d.pick(SPOILS) if d.chance(0.15) else None
    late, turned = d.chance(0.1), d.chance(0.15)
    escape = d.chance(0.1)
    d.words += ["divided late"] * late + ["keys first"] * turned + ["weights escape"] * escape
    shared = heads // groups

    def fn(p: Sequence[Array], x: Array) -> tuple[Array, tuple[Array, ...]]:
        q, k, v = project(p, x)
        q, k, on_scores = scale(p, q, k)
        if shared > 1:
            k, v = (jnp.repeat(a, shared, axis=2) for a in (k, v))
        z = mask(p, on_scores(products[0](q, k)))
        if late:
            unnormalised = jnp.exp(z - z.max(-1, keepdims=True))
            total = jnp.swapaxes(unnormalised.sum(-1), 1, 2)[..., None]
            return (products[1](unnormalised, v) / total).astype(x.dtype).reshape(b, t, heads * e), ()
        weights = softmax if sunk is None else lambda s, a: sunk(p, s, a)
        w = (jnp.swapaxes(weights(jnp.swapaxes(z, -1, -2), -2), -1, -2) if turned else weights(z, -1)).astype(x.dtype)
        escaped = (w,) if escape else ()
        if spoil is not None:
            w, v = spoil(w, v)
        return products[1](w, v).astype(x.dtype).reshape(b, t, heads * e), escaped

    return d.done(fn, (b, t, heads * e), "attention")
