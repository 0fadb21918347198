"""Programs that are nearly act(x @ w + b), and what is wrong with each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .near_miss import NearMiss, normal

X, W, B, FULL, COLUMN = normal((6, 4), (4, 10), (10,), (6, 10), (6,))
ARGS = (X, W, B)
SQUARE = normal((7, 7), (7, 7), (7,), seed=1)
BATCH = normal((2, 3, 4), (2, 4, 5), (5,), seed=2)
relu = jax.nn.relu
LINEAR = ("x @ w + b",)


def cast(*dtypes: Any) -> tuple[np.ndarray, ...]:
    """x, w and b in these dtypes."""
    return tuple((a * 4).astype(d) for a, d in zip(ARGS, dtypes, strict=True))


# -- derivatives of the user's own ------------------------------------------------------------------------------------


@jax.custom_vjp
def reversed_gradient(h: Any) -> Any:
    return h


reversed_gradient.defvjp(lambda h: (h, None), lambda _, ct: (-ct,))


@jax.custom_vjp
def clipped_gradient(h: Any) -> Any:
    return h


clipped_gradient.defvjp(lambda h: (h, None), lambda _, ct: (jnp.clip(ct, -0.1, 0.1),))


@jax.custom_jvp
def leaky_backward(h: Any) -> Any:
    return relu(h)


leaky_backward.defjvp(lambda p, t: (relu(p[0]), t[0] * jnp.where(p[0] > 0, 1.0, 0.2)))


def straight_through(h: Any) -> Any:
    """The values of relu, the gradient of the identity."""
    return h + lax.stop_gradient(relu(h) - h)


# -- what is read elsewhere -------------------------------------------------------------------------------------------


def also_returned(x: Any, w: Any, b: Any) -> Any:
    h = x @ w + b
    return relu(h), h


def also_summed(x: Any, w: Any, b: Any) -> Any:
    h = x @ w + b
    return relu(h) * jnp.sum(h)


def product_read_elsewhere(x: Any, w: Any, b: Any) -> Any:
    y = x @ w
    return relu(y + b) * jnp.sum(y)


def product_made_again(x: Any, w: Any, b: Any) -> Any:
    return relu(x @ w + b) * jnp.sum(x @ w)


def inner_value_returned(x: Any, w: Any, b: Any) -> Any:
    h = x @ w + b
    t = jnp.tanh(0.7978845608 * (h + 0.044715 * h**3))
    return 0.5 * h * (1 + t), t


def gelu_like(inner: float, cubic: float) -> Any:
    return lambda h: 0.5 * h * (1 + jnp.tanh(inner * (h + cubic * h**3)))


def near(name: str, code: str | None, fn: Any, args: tuple[Any, ...] = ARGS, **rest: Any) -> NearMiss:
    return NearMiss(name, "gemm_epilogue", code, fn, args, **rest)


def ends_in(act: Any) -> Any:
    return lambda x, w, b: act(x @ w + b)


def unknown(name: str, act: Any, says: str = "ends a function of the linear result", **rest: Any) -> NearMiss:
    """A function of the linear result that the op does not have: the linear part is fused alone."""
    return near(name, "activation", ends_in(act), says=says, also=LINEAR, **rest)


ACTIVATION_EDIT = "use relu, gelu, silu, sigmoid or tanh of jax.nn"

BIAS = (
    near(
        "full-tensor bias", "bias", lambda x, w, y: relu(x @ w + y), (X, W, FULL), says="adds a full tensor", mapped=(0, 2),
        edit="(x @ w + b) + y", repaired=lambda x, w, y: relu((x @ w + y[0]) + y),
    ),
    near(
        "bias along the rows", "bias", lambda x, w, c: relu(x @ w + c[:, None]), (X, W, COLUMN), says="adds",
        edit="(x @ w).T + b", repaired=lambda x, w, c: relu((x @ w).T + c).T,
    ),
    near(
        "bias along the rows of a square", "bias", lambda x, w, b: x @ w + b[:, None], SQUARE, says="adds",
        edit="(x @ w).T + b", repaired=lambda x, w, b: ((x @ w).T + b).T,
    ),
    near("the input added", "bias", lambda x, w: relu(x @ w + x), SQUARE[:2], says="adds a full tensor"),
    near("a scalar added", "bias", lambda x, w: relu(x @ w + 0.5), (X, W), says="adds a scalar"),
    near("a bias of one entry", "bias", ends_in(relu), (X, W, B[:1]), says="adds"),
    near(
        "a bias of rows and features", "bias", lambda x, w, b: relu(x @ w + b), normal((2, 3, 4), (4, 5), (3, 5)),
        says="not a bias along the output features",
    ),
    near(
        "a bias of each batch entry", "bias", lambda x, w, b: relu(x @ w + b), normal((2, 3, 4), (4, 5), (2, 1, 5)),
        says="not a bias along the output features",
    ),
    near(
        "bias subtracted", "bias", lambda x, w, b: relu(x @ w - b), says="subtracts",
        edit="add the negated bias", repaired=lambda x, w, b: relu(x @ w + (-b)),
    ),
    near("product subtracted", "bias", lambda x, w, b: relu(b - x @ w), says="subtracts",
         edit="add the negated bias", repaired=lambda x, w, b: relu(x @ (-w) + b)),
    near("relu before the bias", None, lambda x, w, b: relu(x @ w) + b, also=("relu(x @ w)",)),
)  # fmt: skip

RESHAPED = (
    near("a bias of the rows behind a reshape", "bias", lambda x, w, b: relu((x @ w).reshape(2, 3, 10) + b[:, None]),
         (X, W, normal((3,))[0]), says="after", edit="add the bias to the product itself", mapped=(0,)),
    near("a reshape that mixes rows and features", "bias", lambda x, w, b: relu((x @ w).reshape(10, 6) + b),
         (X, W, normal((6,))[0]), says="after", edit="add the bias to the product itself", mapped=(0,)),
    near("a bias of a part of the features behind a reshape", "bias", lambda x, w, b: relu((x @ w).reshape(6, 2, 5) + b),
         (X, W, normal((5,))[0]), says="after", edit="add the bias to the product itself", mapped=(0,)),
    near("a name before a reshape", "named_residual", lambda x, w, b: relu(checkpoint_name(x @ w + b, "h").reshape(-1)), also=LINEAR),
)  # fmt: skip

SCALARS = (
    near("a factor before the bias", "scalar", lambda x, w, b: relu(2.5 * (x @ w) + b), says="multiplied by 2.5",
         edit="fold the factor into x or w", repaired=lambda x, w, b: relu((2.5 * x) @ w + b)),
    near("the product negated", "scalar", lambda x, w, b: relu(-(x @ w) + b), says="multiplied by -1",
         edit="fold the factor into x or w", repaired=lambda x, w, b: relu(x @ (-w) + b)),
    near("a divisor before the bias", "scalar", lambda x, w, b: jnp.tanh(x @ w / 3 + b), says="multiplied by 0.333",
         edit="fold the factor into x or w", repaired=lambda x, w, b: jnp.tanh(x @ (w / 3) + b)),
    unknown("a factor after the bias", lambda h: relu(2.5 * h)),
)  # fmt: skip

ACTIVATION = (
    unknown("leaky relu", jax.nn.leaky_relu, edit=ACTIVATION_EDIT, repaired=ends_in(relu)),
    unknown("relu6", jax.nn.relu6),
    unknown("softplus", jax.nn.softplus, edit=ACTIVATION_EDIT, repaired=ends_in(jax.nn.silu)),
    unknown("elu", jax.nn.elu),
    unknown("hard tanh", jax.nn.hard_tanh),
    unknown("mish", jax.nn.mish),
    unknown("silu of twice the slope", lambda h: h * jax.nn.sigmoid(2 * h)),
    unknown("gelu with 0.8 for 0.7979", gelu_like(0.8, 0.044715), says="nearest known function is gelu", edit=ACTIVATION_EDIT,
            repaired=ends_in(jax.nn.gelu)),
    unknown("gelu with 0.05 for 0.0447", gelu_like(0.7978845608, 0.05), says="gelu_tanh"),
    unknown("gelu by 1.6 sigmoid", lambda h: h * jax.nn.sigmoid(1.6 * h)),
    unknown("maximum with 0.1", lambda h: jnp.maximum(h, 0.1)),
    unknown("maximum with -0.0001", lambda h: jnp.maximum(h, -1e-4)),
    unknown("clipped at 2 first", lambda h: jnp.maximum(jnp.minimum(h, 2.0), 0)),
    unknown("the negative part", lambda h: jnp.minimum(h, 0)),
    unknown("squared, no relu", jnp.square),
    near("without a bias, softplus", "activation", lambda x, w: jax.nn.softplus(x @ w), (X, W), says="ends a function"),
    near("relu, squared", None, ends_in(lambda h: jnp.square(relu(h))), also=("relu(x @ w + b)",)),
)  # fmt: skip

GRADIENT = (
    near("where(h < 0, 0, h)", "gradient", ends_in(lambda h: jnp.where(h < 0, 0, h)), says="gradient is not",
         also=LINEAR, edit="use jax.nn.relu", repaired=ends_in(relu)),
    unknown("half of h + 0.99 |h|", lambda h: 0.5 * (h + 0.99 * jnp.abs(h))),
    near("straight-through relu", "activation", ends_in(straight_through), also=LINEAR),
    near("gradient reversal", "custom_rule", ends_in(lambda h: relu(reversed_gradient(h))), also=LINEAR,
         says="a derivative of the user's own"),
    near("gradient clip", "custom_rule", ends_in(lambda h: jnp.tanh(clipped_gradient(h))), also=LINEAR,
         says="a derivative of the user's own"),
    near("a leaky gradient behind relu", "custom_rule", ends_in(leaky_backward), also=LINEAR,
         says="a derivative of the user's own"),
    near("a derivative of the user's own on the product", "custom_rule",
         lambda x, w, b: relu(reversed_gradient(x @ w) + b)),
    near("gradient stopped at the linear result", "stop_gradient", ends_in(lambda h: relu(lax.stop_gradient(h))),
         says="stops the gradient of the linear result", also=LINEAR),
    near("gradient stopped at the product", "stop_gradient", lambda x, w, b: relu(lax.stop_gradient(x @ w) + b)),
    near("a name on the linear result", "named_residual", ends_in(lambda h: relu(checkpoint_name(h, "pre"))),
         says="names a value inside the site", also=LINEAR, edit="name x or the activated value instead",
         repaired=ends_in(lambda h: checkpoint_name(relu(h), "post"))),
    near("a name on the product", "named_residual", lambda x, w, b: relu(checkpoint_name(x @ w, "pre") + b),
         says="names a value inside the site", edit="name x", repaired=lambda x, w, b: relu(checkpoint_name(x, "x") @ w + b)),
)  # fmt: skip

ESCAPES = (
    near("the linear result returned", "escapes", also_returned, says="is also returned", also=LINEAR,
         edit="recompute the linear result", repaired=lambda x, w, b: (relu(x @ w + b), w.T @ x.T)),
    near("the linear result summed", "escapes", also_summed, says="is also read by", also=LINEAR),
    near("the product read elsewhere", "escapes", product_read_elsewhere, says="is also read by",
         edit="compute the outside use from x, w and b again", repaired=product_made_again),
    near("an inner value of gelu returned", "escapes", inner_value_returned, says="is also returned", also=LINEAR),
)  # fmt: skip

DTYPE_AND_RANK = (
    near("float8", "dtype", ends_in(relu), cast(*[jnp.float8_e4m3fn] * 3), says="computes in float8_e4m3fn",
         edit="cast x, w and b", repaired=lambda *args: ends_in(relu)(*(a.astype(jnp.bfloat16) for a in args))),
    near("integers", "dtype", ends_in(relu), cast(*[np.int8] * 3), says="computes in int8",
         edit="cast x, w and b", repaired=lambda *args: ends_in(relu)(*(a.astype(np.float32) for a in args))),
    near("f32 bias on a bf16 product", "dtype", ends_in(relu), cast(jnp.bfloat16, jnp.bfloat16, np.float32),
         says="mixes bfloat16, float32", edit="cast x, w and b to one dtype",
         repaired=lambda x, w, b: relu(x @ w + b.astype(x.dtype))),
    near("half in, float out", "dtype", lambda x, w, b: relu(jnp.matmul(x, w, preferred_element_type=np.float32) + b),
         cast(jnp.bfloat16, jnp.bfloat16, np.float32), says="mixes bfloat16, float32",
         edit="cast x, w and b to one dtype",
         repaired=lambda x, w, b: relu(x.astype(np.float32) @ w.astype(np.float32) + b)),
    near("rounded before the bias", "dtype", lambda x, w, b: relu((x @ w).astype(jnp.bfloat16).astype(np.float32) + b)),
    near("activation in another dtype", "dtype", ends_in(lambda h: relu(h.astype(np.float16))), cast(*[jnp.bfloat16] * 3),
         says="casts the linear result", also=LINEAR, edit="apply the activation before the cast",
         repaired=ends_in(lambda h: relu(h).astype(np.float16))),
    near("f32 bias on a widened bf16 product", "dtype", lambda x, w, b: jnp.tanh((x @ w).astype(np.float32) + b),
         cast(jnp.bfloat16, jnp.bfloat16, np.float32), says="mixes bfloat16, float32", edit="cast x, w and b to one dtype",
         repaired=lambda x, w, b: jnp.tanh((x @ w + b.astype(x.dtype)).astype(np.float32))),
    near("f16 sums that are kept", "dtype", lambda x, w: jnp.tanh(jnp.matmul(x, w, preferred_element_type=np.float32)),
         cast(*[np.float16] * 3)[:2], says="keeps its sum in float32", edit="use bfloat16",
         repaired=lambda x, w: jnp.tanh(x @ w)),
    near("a batch of weights", "rank", ends_in(relu), BATCH, says="a weight of rank 3"),
    near("a batch of weights, no bias", "rank", lambda x, w: relu(x @ w), BATCH[:2], says="a weight of rank 3"),
    # a map over vectors makes rows of them, and that is the edit
    near("a vector", "rank", ends_in(relu), (X[0], W, B), says="multiplies a vector", forms=("plain", "scan", "remat"),
         edit="give x a leading axis", repaired=lambda x, w, b: relu(x[None] @ w + b)[0]),
    near("no rows", "axes", ends_in(relu), (X[:0], W, B), says="is empty"),
)  # fmt: skip

OVERLAP = (
    near("the product of an attention", "overlap", lambda q, k, v: relu(jax.nn.softmax(q @ k.T * 0.5) @ v),
         normal((5, 4), (5, 4), (5, 4), seed=5), mapped=(0, 1, 2), says="which is larger",
         forms=("plain", "scan", "remat"),  # over a batch, the product with v is no linear layer
         also=("softmax(0.5 * q @ k.T) @ v",)),
)  # fmt: skip

CORPUS = (*BIAS, *RESHAPED, *SCALARS, *ACTIVATION, *GRADIENT, *ESCAPES, *DTYPE_AND_RANK, *OVERLAP)
