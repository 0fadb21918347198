"""One test base for gradients of a softmax near one key, with values to 1e3: in every implementation beside the original's, each against
float64. Not a test module.

What a row of scores gives there is a difference, dp - rowsum(p * dp), of numbers of which next to nothing is left.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab.device import Device
from fusionlab.kernels.ops.dot_product_attention.op import DOT_PRODUCT_ATTENTION as OP
from fusionlab.ops import dot_product_attention
from fusionlab.testing.tolerances import tolerance
from tests.kernels.attention.attention_suite import exact

MASKS: dict[str, dict[str, Any]] = {"none": {}, "causal": {"is_causal": True}, "window": {"window": (3, 3)}}
DTYPES = ("float32", "bfloat16")
SPREADS = (1.0, 30.0, 1000.0)  # of the scores
VALUES = 1e3
ROUNDOFF = {"float32": 2.0**-11, "bfloat16": 2.0**-8, "float16": 2.0**-11}  # float32: of its products, by TF32
GRADIENTS = ("dquery", "dkey", "dvalue")

Arrays = dict[str, np.ndarray]


def spread_out(dtype: str, sizes: tuple[int, ...], spread: float) -> Arrays:
    """Scores of so much spread, of queries and keys that every kind of product takes as they are: what a score of 1e3 is rounded by in
    TF32 is not the gradient's affair."""
    rng = np.random.default_rng(0)
    times = {"query": spread, "key": 1.0, "value": VALUES, "ct": 1.0}
    made = {n: rng.standard_normal(sizes) * m for n, m in times.items()}
    made |= {n: made[n].astype(jnp.bfloat16) for n in ("query", "key")}
    return {n: a.astype(jnp.dtype(dtype)) for n, a in made.items()}


def one_key_each(dtype: str, sizes: tuple[int, ...]) -> Arrays:
    """Each row sees its own key and nothing of any other: the gradients of query and key are 0."""
    made = spread_out(dtype, sizes, 1.0)
    made["query"] = (30 * made["key"].astype(np.float32)).astype(made["key"].dtype)
    return made


def far_from_zero(dtype: str, sizes: tuple[int, ...]) -> Arrays:
    """A softmax that is all but flat, of keys and values that differ by far less than they share."""
    rng = np.random.default_rng(0)
    shares = {"query": 0.0, "key": 3.0, "value": 30.0, "ct": 0.0}
    return {n: (rng.standard_normal(sizes) + m).astype(jnp.dtype(dtype)) for n, m in shares.items()}


def gradients(attend: Any, made: Arrays) -> list[np.ndarray]:
    run = jax.jit(lambda q, k, v, ct: jax.vjp(attend, q, k, v)[1](ct))
    return [np.asarray(g, np.float64) for g in run(*(jnp.asarray(made[n]) for n in ("query", "key", "value", "ct")))]


def of_original(made: Arrays, attrs: dict[str, Any]) -> list[np.ndarray]:
    given = {"local_window_size" if n == "window" else n: a for n, a in attrs.items()}
    return gradients(functools.partial(jax.nn.dot_product_attention, implementation="xla", **given), made)


def of_float64(made: Arrays, attrs: dict[str, Any]) -> list[np.ndarray]:
    return exact({n: a.astype(np.float64) for n, a in made.items()}, attrs)[1:]


def rounding_of(made: Arrays) -> dict[str, float]:
    """What a rounding of ct . out makes of each gradient, at most, where a key is seen by one row."""
    q, k, v, ct = (np.abs(made[n].astype(np.float64)) for n in ("query", "key", "value", "ct"))
    each = ROUNDOFF[made["value"].dtype.name] * (v * ct).sum(-1).max() / np.sqrt(q.shape[-1])
    return {"dquery": each * k.max(), "dkey": each * q.max(), "dvalue": 0.0}


class SaturatedSuite:
    """Gradients of one implementation."""

    implementation: str
    sizes: tuple[int, ...] = (1, 40, 2, 32)
    tf32 = True  # whether its products of float32 may be of TF32
    reads_it_rounded = False  # its backward takes row sums of the result as it was rounded, and has no input for more

    def refusal(self, dtype: str, attrs: dict[str, Any]) -> str | None:
        a = jax.ShapeDtypeStruct(self.sizes, dtype)
        given = OP._prepared([a, a, a], {**attrs, "implementation": self.implementation}, Device.current())
        one = OP.implementations[self.implementation]
        return one.refuses(given[0], Device.current(), role="call", residuals=True, **given[1])

    def of_it(self, made: Arrays, attrs: dict[str, Any]) -> list[np.ndarray]:
        if reason := self.refusal(made["query"].dtype.name, attrs):
            pytest.skip(reason)
        return gradients(functools.partial(dot_product_attention, implementation=self.implementation, **attrs), made)

    @pytest.mark.parametrize("spread", SPREADS)
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("mask", MASKS)
    def test_at_most_twice_the_originals_error_or_what_the_dtype_leaves(self, mask, dtype, spread):
        made, attrs = spread_out(dtype, self.sizes, spread), MASKS[mask]
        row = tolerance(dtype, self.sizes[1], tf32=self.tf32)
        found = zip(GRADIENTS, self.of_it(made, attrs), of_original(made, attrs), of_float64(made, attrs), strict=True)
        rounding = rounding_of(made)
        for what, got, original, want in found:
            error, allowed = np.abs(got - want), row.rtol * np.abs(want) + row.atol * np.abs(want).max()
            allowed += rounding[what] if self.reads_it_rounded else 0.0
            most = 2 * np.abs(original - want).max()
            print(what, f"error {error.max():.2g}, the original's {most / 2:.2g}, largest {np.abs(want).max():.2g}")
            assert error.max() <= most or (error <= allowed).all(), (what, error.max(), most, (error / allowed).max())

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("mask", MASKS)
    def test_what_is_left_of_a_difference_that_is_zero(self, mask, dtype):
        """Far less than what out is rounded by would make of it; with the result as it was rounded alone, just that.

        Of float32 by TF32 not even XLA's own code leaves so little.
        """
        if dtype == "float32" and Device.current().platform == "cuda":
            pytest.skip("products of float32 are TF32 here: what is left is what those are rounded by")
        made, attrs = one_key_each(dtype, self.sizes), MASKS[mask]
        rounding = rounding_of(made)
        for what, got in zip(GRADIENTS[:2], self.of_it(made, attrs), strict=False):
            print(what, f"{np.abs(got).max() / rounding[what]:.2g} of a rounding")
            assert np.abs(got).max() <= rounding[what] * (1.0 if self.reads_it_rounded else 0.02), what

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_keys_and_values_far_from_zero(self, dtype):
        made = far_from_zero(dtype, self.sizes)
        got, original, want = self.of_it(made, {})[0], of_original(made, {})[0], of_float64(made, {})[0]
        error, of_original_ = (np.abs(a - want).max() / np.abs(want).max() for a in (got, original))
        print(f"error {error:.2g}, the original's {of_original_:.2g} of the largest")
        row = tolerance(dtype, self.sizes[1], tf32=self.tf32)
        if not self.reads_it_rounded:
            assert error <= max(2 * of_original_, row.rtol + row.atol)
