"""Programs that are nearly a LayerNorm or an RMSNorm, and what is wrong with each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .near_miss import NearMiss, normal

# Rows, then as many columns as there are features: sizes do not tell the axes apart.
X, Y, G, B = normal((3, 8, 8), (3, 8, 8), (8,), (8,), seed=4)
EPS = 1e-5


def mean(x: Any, axis: Any = -1) -> Any:
    return x.mean(axis, keepdims=True)


def variance(x: Any, **rest: Any) -> Any:
    return x.var(-1, keepdims=True, **rest)


def centred(x: Any) -> Any:
    return x - mean(x)


def normed(
    numerator: Callable[[Any], Any] = centred, spread: Callable[[Any], Any] = variance, epsilon: Any = EPS
) -> Callable[[Any, Any, Any], Any]:
    """A LayerNorm of which a part may be another one."""
    return lambda x, g, b: numerator(x) * lax.rsqrt(spread(x) + epsilon) * g + b


def rms(squares: Callable[[Any], Any] = lambda x: mean(x * x), root: Callable[[Any], Any] = lax.rsqrt) -> Any:
    return lambda x, g, b: x * root(squares(x) + EPS) * g


@jax.custom_jvp
def other_square(x: Any) -> Any:
    return x * x


other_square.defjvp(lambda x, t: (x[0] * x[0], 3 * x[0] * t[0]))


def share(x: Any, total: Callable[[Any], Any], count: int) -> Any:
    return total(x).sum(-1, keepdims=True) / count


def mean_returned(x: Any, g: Any, b: Any) -> Any:
    m = mean(x)
    return (x - m) * lax.rsqrt(mean((x - m) ** 2) + EPS) * g + b, m


def mean_made_again(x: Any, g: Any, b: Any) -> Any:
    return normed()(x, g, b), jnp.sum(x, -1) / 8


def variance_returned(x: Any, g: Any, b: Any) -> Any:
    v = variance(x)
    return centred(x) * lax.rsqrt(v + EPS) * g + b, v


def root_read_again(x: Any, g: Any, b: Any) -> Any:
    r = lax.rsqrt(variance(x) + EPS)
    return centred(x) * r * g + r


def centred_returned(x: Any, g: Any, b: Any) -> Any:
    c = centred(x)
    return c * lax.rsqrt(mean(c**2) + EPS) * g + b, c


def rounded(x: Any) -> Any:
    return variance(x).astype(jnp.bfloat16).astype(np.float32)


def near(name: str, code: str | None, fn: Any, args: tuple[Any, ...] = (X, G, B), **rest: Any) -> NearMiss:
    return NearMiss(name, "layer_norm", code, fn, args, **rest)


def spread_out(
    shift: Callable[..., Any] = lambda x, inv, g: -mean(x) * inv * g, scale: Callable[..., Any] = lambda inv, g: inv * g
) -> Callable[[Any, Any, Any], Any]:
    """A LayerNorm as a scale and a shift of x, of which either may be another one."""

    def norm(x: Any, g: Any, b: Any) -> Any:
        inv = lax.rsqrt(variance(x) + EPS)
        return x * scale(inv, g) + (b + shift(x, inv, g))

    return norm


OUTSIDE, DDOF = "divide by jnp.sqrt(variance + epsilon)", "divide the sums by the number of entries (ddof=0)"

EPSILON = (
    near("epsilon outside the root", "structure", lambda x, g, b: centred(x) / (jnp.sqrt(variance(x)) + EPS) * g + b,
         says="epsilon added outside the root", edit=OUTSIDE,
         repaired=lambda x, g, b: centred(x) / jnp.sqrt(variance(x) + EPS) * g + b),
    near("epsilon outside the root of squares", "structure", lambda x, g, b: x / (jnp.sqrt(mean(x * x)) + EPS) * g,
         says="epsilon added outside the root", edit=OUTSIDE,
         repaired=lambda x, g, b: x / jnp.sqrt(mean(x * x) + EPS) * g),
    near("epsilon outside, by std", "structure", lambda x, g, b: centred(x) / (x.std(-1, keepdims=True) + EPS),
         says="epsilon added outside the root"),
    near("no epsilon", "structure", lambda x, g, b: centred(x) / jnp.sqrt(variance(x)) * g + b, says="has no epsilon",
         edit="add a small epsilon to the variance", repaired=lambda x, g, b: centred(x) / jnp.sqrt(variance(x) + EPS) * g + b),
    near("a large epsilon", "scalar", normed(epsilon=0.5), says="has epsilon 0.5", edit="below 0.01",
         repaired=normed(epsilon=5e-3)),
    near("a negative epsilon", "scalar", normed(epsilon=-1e-5), says="has epsilon -1e-05", edit="above 0",
         repaired=normed(epsilon=1e-5)),
    near("an epsilon of its own for each row", "structure", lambda x, e: normed(epsilon=e)(x, 1.0, 0.0),
         (X, X[..., :1] ** 2), mapped=(0, 1)),
    near("a floor under the variance", "scalar", normed(spread=lambda x: jnp.maximum(1e-3, variance(x)))),
)  # fmt: skip

SCALARS = (
    near("the sample variance, ddof=1", "scalar", normed(spread=lambda x: variance(x, ddof=1)), says="where 1/N = 0.125 is needed",
         edit=DDOF, repaired=normed(spread=variance)),
    near("sums over 7 of 8 entries", "scalar",
         normed(lambda x: x - share(x, lambda x: x, 7), lambda x: share(x - share(x, lambda x: x, 7), jnp.square, 7)),
         says="which is not their mean", edit=DDOF, repaired=normed()),
    near("squares over 9 of 8 entries", "scalar", rms(lambda x: share(x, jnp.square, 9)), says="which is not their mean",
         edit=DDOF, repaired=rms()),
    near("the sum of squares", "scalar", rms(lambda x: 1.0 * (x * x).sum(-1, keepdims=True))),
    near("twice the variance", "scalar", normed(spread=lambda x: 2 * variance(x))),
    near("twice x less its mean", "scalar", normed(lambda x: 2 * x - mean(x))),
    near("half the mean", "structure", normed(lambda x: x - 0.5 * mean(x))),
    near("the mean added", "structure", normed(lambda x: x + mean(x))),
)  # fmt: skip

AXES = (
    near("mean over another axis", "axes", normed(lambda x: x - mean(x, 1)), edit="over the same axes", repaired=normed()),
    near("variance over another axis", "axes", normed(spread=lambda x: x.var(1, keepdims=True)),
         edit="over the same axes", repaired=normed()),
    near("mean over rows too", "axes", normed(lambda x: x - mean(x, (1, 2)))),
    near("axes that are not the last", "axes",
         lambda x, g, b: (x - mean(x, (0, 2))) * lax.rsqrt(x.var((0, 2), keepdims=True) + EPS),
         says="several axes must be the last ones", edit="move the normalised axes to the end", mapped=(1,), forms=("plain", "remat"),
         repaired=lambda x, g, b: (lambda x: (x - mean(x, (1, 2))) * lax.rsqrt(x.var((1, 2), keepdims=True) + EPS))(
             jnp.moveaxis(x, 1, 0))),
    near("a scale along the rows", None, lambda x, g, b: normed(epsilon=EPS)(x, 1.0, 0.0) * g[:, None], also=("layer_norm(x)",)),
)  # fmt: skip

PARTS = (
    near("variance of another tensor", None, lambda x, y: centred(x) * lax.rsqrt(variance(y) + EPS), (X, Y), mapped=(0, 1)),
    near("mean of another tensor", "structure", lambda x, y: (x - mean(y)) * lax.rsqrt(variance(x) + EPS), (X, Y), mapped=(0, 1)),
    near("mean of the absolute", "structure", rms(lambda x: mean(jnp.abs(x)))),
    near("mean of the cubes", "structure", rms(lambda x: mean(x**3))),
    near("square of the mean added", "scalar", normed(spread=lambda x: mean(x * x) + mean(x) ** 2)),
    near("mean of squares less the mean", "structure", normed(spread=lambda x: mean(x * x) - mean(x))),
    near("the fourth root", "structure", normed(spread=lambda x: jnp.sqrt(variance(x) + EPS))),
    near("the square of x over the root", "structure", normed(lambda x: centred(x) ** 2)),
    near("a root of the absolute", "structure", lambda x, g, b: jnp.abs(centred(x)) * lax.rsqrt(variance(x) + EPS)),
)  # fmt: skip

GRADIENT = (
    near("gradient stopped at the variance", "stop_gradient", normed(spread=lambda x: lax.stop_gradient(variance(x))),
         says="stops a gradient inside the norm", edit="remove the stop_gradient", repaired=normed()),
    near("gradient stopped at the mean", "stop_gradient", normed(lambda x: x - lax.stop_gradient(mean(x))),
         says="stops a gradient inside the norm", edit="remove the stop_gradient", repaired=normed()),
    near("gradient stopped at the root", "stop_gradient", rms(root=lambda v: lax.stop_gradient(lax.rsqrt(v))),
         says="stops a gradient inside the norm"),
    near("a named variance", "named_residual", normed(spread=lambda x: checkpoint_name(variance(x), "variance")),
         edit="name x or the norm's result", repaired=lambda x, g, b: checkpoint_name(normed()(x, g, b), "norm")),
    near("a square with a derivative of the user's own", "custom_rule", rms(lambda x: mean(other_square(x)))),
)  # fmt: skip

ESCAPES_AND_DTYPES = (
    near("the mean returned", "escapes", mean_returned, says="is also returned", edit="compute the outside use from x again",
         repaired=mean_made_again),
    near("the variance returned", "escapes", variance_returned, says="is also returned"),
    near("the root read again", "escapes", root_read_again, says="is also read by"),
    near("the centred returned", "escapes", centred_returned, says="is also returned"),
    near("a variance rounded to bf16", "dtype", normed(spread=rounded), says="rounds to bfloat16",
         edit="keep the statistics in the dtype of x", repaired=normed()),
)  # fmt: skip

NO_SHIFT, BY_MEAN = "adds two multiples of the root", "shift x * inv by -mean(x) * inv"
SHIFTS = (
    near("a shift of the mean, added", "structure", spread_out(lambda x, inv, g: mean(x) * inv * g), says=NO_SHIFT, edit=BY_MEAN,
         repaired=spread_out()),
    near("a shift of half the mean", "structure", spread_out(lambda x, inv, g: -0.5 * mean(x) * inv * g), says=NO_SHIFT),
    near("a shift of another mean", "structure", spread_out(lambda x, inv, g: -mean(jnp.sin(x)) * inv * g), says=NO_SHIFT),
    near("a shift without the scale", "structure", spread_out(lambda x, inv, g: -mean(x) * inv), says=NO_SHIFT, edit=BY_MEAN,
         repaired=spread_out()),
    near("a shift with the scale twice", "structure", spread_out(lambda x, inv, g: -mean(x) * inv * g * g), says=NO_SHIFT),
    near("a scale without the vector", "structure", spread_out(scale=lambda inv, g: inv), says=NO_SHIFT),
    near("a shift of another epsilon", "structure",
         spread_out(lambda x, inv, g: -mean(x) * lax.rsqrt(variance(x) + 2e-5) * g)),
    near("a shift by the mean of squares", "structure", spread_out(lambda x, inv, g: -mean(x * x) * inv * g), says=NO_SHIFT),
    near("a shift whose gradient is stopped", "stop_gradient",
         spread_out(lambda x, inv, g: -lax.stop_gradient(mean(x)) * inv * g)),
    near("a product of x with another value", None,
         lambda x, y: x * lax.rsqrt(jnp.einsum("btd,btd->bt", x, y)[..., None] ** 2 / 8 + EPS), (X, Y), mapped=(0, 1)),
    near("squares by a product over 7", "scalar", rms(lambda x: jnp.einsum("btd,btd->bt", x, x)[..., None] / 7),
         says="which is not their mean", edit=DDOF, repaired=rms()),
)  # fmt: skip

CORPUS = (*EPSILON, *SCALARS, *AXES, *PARTS, *GRADIENT, *ESCAPES_AND_DTYPES, *SHIFTS)
