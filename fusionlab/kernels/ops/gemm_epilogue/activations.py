"""The activations of `gemm_epilogue`, by name. A new activation is one more entry in `ACTIVATIONS`.

Each names what the forward must save so that the backward can multiply by its derivative: nothing, a mask, or the
pre-activation h = x @ w + b. Spellings of one function that differ at ties, infinities or NaN are several entries: users' code holds
them all, and each is fused as itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ....errors import ArgumentError
from ...op.op import Op

Array = Any


@dataclass(frozen=True, eq=False)
class Activation:
    """An elementwise function and its derivative.

    Attributes:
      name: the value for `activation=`.
      formula: for a reader, in h.
      looks: its values at -2.7, -0.5, 0.9 and 2.7 to three digits, by which a search passes over what is unlike it.
      fn: the plain jnp meaning.
      residual: the value that backward needs: "none", "mask" or "preactivation".
      save: h -> the residual, or None where `residual` is "none".
      scale: (residual, t) -> derivative * t, elementwise.
      source: the origin of formula and derivative.
    """

    name: str
    formula: str
    looks: tuple[float, float, float, float]
    fn: Callable[[Array], Array]
    residual: str
    save: Callable[[Array], Array] | None
    scale: Callable[[Any, Array], Array]
    source: str

    @property
    def kind(self) -> str:
        """The function it spells: "relu" for `relu_where`."""
        return SPELLINGS.get(self.name, self.name)


# Spellings that differ from the function of that name where it has ties, infinities or NaN, and are therefore fused as themselves.
SPELLINGS = {
    "relu_tie": "relu",
    "relu_where": "relu",
    "relu_unless": "relu",
    "relu_times": "relu",
    "relu_abs": "relu",
    "silu_exp": "silu",
    "sigmoid_exp": "sigmoid",
}


def _from_preactivation(
    name: str,
    formula: str,
    looks: tuple[float, float, float, float],
    fn: Callable[[Array], Array],
    source: str,
    derived: Callable[[Array], Array] | None = None,
) -> Activation:
    """The derivative is JAX's own of `fn`, in 16 bits maybe of another spelling of it (`derived`), at the saved pre-activation."""

    # Traced once for an op's tangent, its cotangent and whoever asks for part of them.
    @functools.partial(jax.jit, inline=True)
    def scale(h: Array, t: Array) -> Array:
        return jax.vjp(derived if derived and h.dtype.itemsize == 2 else fn, h)[1](t)[0]

    return Activation(name, formula, looks, fn, "preactivation", lambda h: h, scale, source)


def _in_float32(fn: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """`fn` without rounding inside: of a tanh rounded to 16 bits 1 - tanh(h)^2 has nothing left in a tail, and a silu's terms cancel.
    For functions without numbers of their own, which a program rounds to its dtype.
    """
    return lambda h: fn(h.astype(jnp.float32)).astype(h.dtype)


def _gelu_by_sigmoid(h: Array) -> Array:
    """gelu_tanh: (1 + tanh(u)) / 2 is sigmoid(2 u). In a tail 1 + tanh(u) cancels, and bfloat16 has nothing left of it."""
    root = np.sqrt(2 / np.pi).astype(h.dtype)
    return h * jax.nn.sigmoid(2 * root * (h + 0.044715 * h**3))


def _positive(mask: Array, t: Array) -> Array:
    return jnp.where(mask, t, jnp.zeros_like(t))


def _half_at_ties(twice: Array, t: Array) -> Array:
    return t * (twice.astype(t.dtype) * 0.5)


_RELU = (0.0, 0.0, 0.9, 2.7)
_GELU = (-0.009, -0.154, 0.734, 2.691)
_SILU = (-0.17, -0.189, 0.64, 2.53)
_SIGMOID = (0.063, 0.378, 0.711, 0.937)
ACTIVATIONS: dict[str, Activation] = {
    a.name: a
    for a in (
        Activation("none", "h", (-2.7, -0.5, 0.9, 2.7), lambda h: h, "none", None, lambda _, t: t, "identity"),
        Activation(
            "relu",
            "max(h, 0), derivative 0 at 0",
            _RELU,
            jax.nn.relu,
            "mask",
            lambda h: h > 0,
            _positive,
            "jax.nn.relu; NaN stays NaN",
        ),
        Activation(
            "relu_tie",
            "max(h, 0), derivative 1/2 at 0",
            _RELU,
            lambda h: jnp.maximum(h, 0),
            "mask",
            # Twice the derivative, in one byte: 0, 1 at a tie, 2. NaN compares false with everything and gives 0.
            lambda h: (h > 0).astype(jnp.int8) * 2 + (h == 0).astype(jnp.int8),
            _half_at_ties,
            "jnp.maximum(h, 0); NaN stays NaN",
        ),
        Activation(
            "relu_where",
            "h where h > 0 else 0, derivative 0 at 0",
            _RELU,
            lambda h: jnp.where(h > 0, h, jnp.zeros_like(h)),
            "mask",
            lambda h: h > 0,
            _positive,
            "jnp.where(h > 0, h, 0); NaN becomes 0",
        ),
        _from_preactivation(
            "relu_unless",
            "0 where h <= 0 else h, derivative 0 at 0",
            _RELU,
            lambda h: jnp.where(h <= 0, jnp.zeros_like(h), h),
            "jnp.where(h <= 0, 0, h); NaN stays NaN, and has derivative 1",
        ),
        _from_preactivation(
            "relu_times",
            "h * (h > 0), derivative 0 at 0",
            _RELU,
            lambda h: h * (h > 0),
            "h * (h > 0); -inf becomes NaN",
        ),
        _from_preactivation(
            "relu_abs",
            "(h + |h|) / 2, derivative 1 at 0",
            _RELU,
            lambda h: 0.5 * (h + jnp.abs(h)),
            "0.5 * (h + jnp.abs(h)); -inf becomes NaN",
        ),
        _from_preactivation(
            "gelu_tanh",
            "h/2 (1 + tanh(sqrt(2/pi) (h + 0.044715 h^3)))",
            _GELU,
            lambda h: jax.nn.gelu(h, approximate=True),
            "jax.nn.gelu(approximate=True); Hendrycks and Gimpel 2016, arXiv:1606.08415",
            _gelu_by_sigmoid,
        ),
        _from_preactivation(
            "gelu_erf",
            "h/2 (1 + erf(h / sqrt(2)))",
            _GELU,
            lambda h: jax.nn.gelu(h, approximate=False),
            "jax.nn.gelu(approximate=False); Hendrycks and Gimpel 2016, arXiv:1606.08415",
        ),
        _from_preactivation(
            "quick_gelu",
            "h / (1 + exp(-1.702 h))",
            (-0.027, -0.15, 0.74, 2.673),
            lambda h: h * jax.nn.sigmoid(1.702 * h),
            "h * jax.nn.sigmoid(1.702 * h), as CLIP has it; Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2",
        ),
        _from_preactivation("silu", "h / (1 + exp(-h))", _SILU, jax.nn.silu, "jax.nn.silu", _in_float32(jax.nn.silu)),
        _from_preactivation(
            "sigmoid", "1 / (1 + exp(-h))", _SIGMOID, jax.nn.sigmoid, "jax.nn.sigmoid", _in_float32(jax.nn.sigmoid)
        ),
        _from_preactivation(
            "silu_exp",
            "h / (1 + exp(-h)), derivative NaN where exp(-h) overflows",
            _SILU,
            lambda h: h / (1 + jnp.exp(-h)),
            "h / (1 + jnp.exp(-h))",
        ),
        _from_preactivation(
            "sigmoid_exp",
            "1 / (1 + exp(-h)), derivative NaN where exp(-h) overflows",
            _SIGMOID,
            lambda h: 1 / (1 + jnp.exp(-h)),
            "1 / (1 + jnp.exp(-h))",
        ),
        _from_preactivation(
            "tanh", "tanh(h)", (-0.991, -0.462, 0.716, 0.991), jnp.tanh, "jnp.tanh", _in_float32(jnp.tanh)
        ),
    )
}


def call_of_activation(op: Op, /, *, return_residual: bool, **arguments: Any) -> Any:
    """A call of an op with an activation, with the arguments of its public function; where it is asked for, also what backward saves.

    Raises:
      ArgumentError: it is asked for, and the activation saves nothing.
    """
    if not return_residual:
        return op.call_by_name(**arguments)
    operands = [arguments.pop(slot, None) for slot in op.slots]
    if arguments["activation"] == "none":
        raise ArgumentError(
            f"{op.name}: return_residual=True with activation 'none', which saves nothing; needed another activation, or "
            f"return_residual=False"
        )
    return op.call_with_residuals(*operands, **arguments)
