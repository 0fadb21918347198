"""What the kernel for the softmax of `linear_cross_entropy` is held to: rows.py, on the same logits, in float64. Not a test module."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fusionlab.kernels.ops.linear_cross_entropy import rows
from fusionlab.kernels.ops.linear_cross_entropy.own.part_plan import PartTile
from fusionlab.kernels.ops.linear_cross_entropy.own.softmax_part import softmax_part
from fusionlab.kernels.ops.linear_cross_entropy.settings import Settings

EVERYTHING = {"label_smoothing": 0.1, "z_loss": 0.01, "scale": -0.7}


@dataclass(frozen=True)
class Case:
    """A call of `softmax_part`: sizes, dtypes, settings and, where it is not chosen, the tile; entries of a row beyond the vocabulary; the
    dtype of a bias, if the kernel is to add one.
    """

    count: int
    size: int
    dtype: str = "float32"
    out: str | None = "float32"
    options: dict[str, Any] = field(default_factory=dict)
    tile: PartTile | None = None
    beyond: int = 0
    bias: str | None = None

    def form(self, device: Any) -> Settings:
        return Settings(**self.options, logits_dtype=self.dtype, device=device)


def operands(case: Case, seed: int = 0, spread: float = 3.0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits, labels and cotangents of the losses; two labels are out of range and one row's cotangent is 0, if there are so many."""
    rng = np.random.default_rng(seed)
    h = rng.normal(2.0, spread, size=(case.count, case.size))
    labels, of_loss = rng.integers(0, case.size, size=case.count), rng.normal(size=case.count)
    if case.count > 3:
        labels[1], labels[2], of_loss[3] = -100, case.size + 2, 0
    return jnp.asarray(h, case.dtype), jnp.asarray(labels, jnp.int32), jnp.asarray(of_loss, jnp.float32)


def bias_of(case: Case) -> jax.Array | None:
    bias = np.random.default_rng(1).normal(size=case.size + case.beyond)
    return None if case.bias is None else jnp.asarray(bias, case.bias)


def by_rows(h: Any, labels: Any, of_loss: Any, bias: Any, form: Settings, out: str | None) -> dict[str, Any]:
    """What rows.py makes of logits in float32 or float64."""
    of = rows.of_product(h, labels, None if bias is None else bias[: h.shape[-1]], form)
    top, mass = rows.statistics(of, form)
    found = {"top": top, "mass": mass, **rows.losses(of, top, mass, form)}
    if "argmax" in form.also:
        found["argmax"] = rows.best(of, form)
    if out is not None:
        dh = rows.through(of, top, mass, of_loss.astype(top.dtype), None, form)
        found["dh"] = dh if dh.dtype == jnp.float64 else dh.astype(out)
    return found


def exact(case: Case, given: tuple[Any, ...], form: Settings) -> dict[str, np.ndarray]:
    """In float64."""
    with jax.enable_x64(True):
        h, labels, of_loss = (np.asarray(a) for a in given)
        wide = jnp.asarray(h.astype(np.float64)), jnp.asarray(labels), jnp.asarray(of_loss.astype(np.float64))
        bias = None if case.bias is None else jnp.asarray(np.asarray(bias_of(case), np.float64))
        return jax.device_get(jax.jit(partial(by_rows, form=form, out=case.out))(*wide, bias))


def by_kernel(case: Case, given: tuple[Any, ...], form: Settings) -> dict[str, Any]:
    def run(h: Any, labels: Any, of_loss: Any) -> dict[str, Any]:
        h = jnp.pad(h, ((0, 0), (0, case.beyond)), constant_values=jnp.nan)
        of_loss = None if case.out is None else of_loss
        more = {"tile": case.tile, "size": case.size, "bias": bias_of(case)}
        return softmax_part(h, labels, of_loss, form, case.out, **more)

    found = jax.jit(run)(*given)
    if case.beyond and case.out is not None:
        assert not np.asarray(found["dh"][:, case.size :]).astype(np.float32).any()
        found["dh"] = found["dh"][:, : case.size]
    return found


def ulps(got: Any, want: np.ndarray, dtype: Any, least: float = 0.0) -> float:
    """The largest error in units of the last place of the result's dtype, or of `least` where the result is smaller, or of the least
    normal number."""
    found = np.asarray(got).astype(np.float64)
    assert (np.isnan(found) == np.isnan(want)).all()
    there = np.isfinite(want)
    assert (found[~there & ~np.isnan(want)] == want[~there & ~np.isnan(want)]).all()
    info = jnp.finfo(dtype)
    unit = 2.0 ** np.floor(np.log2(np.maximum(np.abs(want[there]), max(least, float(info.tiny))))) * float(info.eps)
    return float(np.max(np.abs(found[there] - want[there]) / unit, initial=0.0))


def error(got: Any, want: np.ndarray) -> float:
    """The norm of the difference over that of what is right, of rows that are finite."""
    there = np.isfinite(want).all(-1)
    found = np.asarray(got).astype(np.float64)[there] - want[there]
    return float(np.linalg.norm(found) / max(np.linalg.norm(want[there]), np.finfo(np.float32).tiny))


def check(case: Case, given: tuple[Any, ...], device: Any) -> dict[str, Any]:
    """Errors of at most twice those of rows.py in float32, and an ulp; of a cotangent in 16 bits, about what rounding makes of that."""
    form = case.form(device)
    want, got = exact(case, given, form), by_kernel(case, given, form)
    plain = jax.jit(partial(by_rows, form=form, out=case.out))(*given, bias_of(case))
    assert got.keys() == want.keys()
    for found in (want, got, plain):  # XLA's maximum on a CPU may pass over a NaN, which is in all other results
        found["top"] = np.where(np.isnan(found["mass"]), 0, found["top"])
    for name, a in want.items():
        assert (got[name].dtype, got[name].shape) == (plain[name].dtype, plain[name].shape)
        if name == "argmax":
            np.testing.assert_array_equal(got[name], a)
            continue
        least = 1.0 if name in ("loss", "lse") else 0.0  # of the logarithm of a sum near 1
        mine, theirs = (ulps(found[name], a, found[name].dtype, least) for found in (got, plain))
        is_narrow = got[name].dtype != jnp.float32
        print(f"{name}: {mine:.2f} ulp, {theirs:.2f} of rows.py", end="; ")
        # What smoothing takes off an entry may leave next to nothing of it, with an error of any size.
        if name != "dh" or not form.label_smoothing:
            assert mine <= (theirs + 0.05 if is_narrow else 2 * theirs + 1), (name, mine, theirs)
    if case.out is not None:
        mine, theirs = (error(found["dh"], want["dh"]) for found in (got, plain))
        print(f"dh: {mine:.3g}, {theirs:.3g} of rows.py")
        assert mine <= (2 if case.out == "float32" else 1.01) * theirs + float(jnp.finfo("float32").eps) / 4
    return got
