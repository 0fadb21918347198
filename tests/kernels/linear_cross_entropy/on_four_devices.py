"""`linear_cross_entropy` with its rows, its vocabulary and both split among four devices. Trials for test_linear_cross_entropy.py."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fusionlab.ops import linear_cross_entropy

from .originals import operands, original

# How x, w and the bias are split, and how many sums over devices there are: with a result by row, and with all of a sum's.
SPLITS = {
    "rows": (P("d"), P(), P()),
    "positions": (P(None, "t"), P(), P()),
    "all rows": (P("d", "t"), P(), P()),
    "vocabulary": (P(), P(None, "t"), P("t")),
    "rows and vocabulary": (P("d"), P(None, "t"), P("t")),
    "vocabulary over all": (P(), P(None, ("d", "t")), P(("d", "t"))),
}


def step(f: Callable[..., Any], by_row: bool, **options: Any) -> Callable[..., Any]:
    """Loss and gradients of all results of a call."""

    def run(x: Any, w: Any, bias: Any, labels: Any, weights: Any) -> Any:
        more = {"out_of_range": "zero", "z_loss": 0.01, "label_smoothing": 0.1, **options}
        if by_row:
            loss, lse, best = f(x, w, labels, bias, None, also=("lse", "argmax"), **more)
            return (loss * jnp.cos(jnp.arange(loss.shape[-1]))).mean() + (lse**2).mean(), best
        total, lse, best, loss = f(x, w, labels, bias, weights, also=("lse", "argmax", "loss"), **more)
        return 0.7 * total + 0.1 * (lse**2).mean() + jnp.sin(loss).mean(), best

    return jax.value_and_grad(run, (0, 1, 2), has_aux=True)


def given() -> tuple[Any, ...]:
    x, w, labels, bias, weights = operands((4, 24), 16, 48)
    w = w.at[:, 40].set(w[:, 3])  # equal logits on different devices
    return x, w, bias.astype("float32"), labels, weights.astype("float32") / 96


def close(got: Any, want: Any) -> None:
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=2e-5, atol=2e-5)


def sharded(kind: AxisType) -> None:
    mesh = jax.make_mesh((2, 2), ("d", "t"), axis_types=(kind,) * 2, devices=jax.devices()[:4])
    args = given()
    for by_row in (True, False):
        want = jax.jit(step(original, by_row))(*args)
        fused = step(linear_cross_entropy, by_row, implementation="xla_chunked", chunk=4)
        for split, specs in SPLITS.items():
            rows = P(*specs[0][:2])
            placed = [
                jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, (*specs, rows, rows), strict=True)
            ]
            with jax.set_mesh(mesh):
                compiled = jax.jit(fused).lower(*placed).compile()
                got = compiled(*placed)
            close(got, want)
            assert [g.sharding.is_equivalent_to(a.sharding, a.ndim) for g, a in zip(got[1], placed, strict=False)] == [
                True
            ] * 3, split
            if (
                "vocabulary" not in split
            ):  # chunks are of the rows of a device: nothing is gathered, nothing summed chunk by chunk
                found = Counter(re.findall(r" (all-\w+|reduce-scatter|collective-permute)\(", compiled.as_text()))
                assert set(found) == {"all-reduce"}, (split, found)
                assert found["all-reduce"] <= 5, (split, found)


def mapped(check_vma: bool) -> None:
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    x, w, bias, labels, weights = given()

    def loss(f: Callable[..., Any], sums: Callable[[Any], Any], **options: Any) -> Callable[..., Any]:
        def run(x: Any, w: Any, bias: Any, labels: Any, weights: Any) -> Any:
            total, lse = f(x, w, labels, bias, weights, also=("lse",), out_of_range="zero", **options)
            rows = f(x, w, labels, bias, out_of_range="zero", **options)
            return sums(total + jnp.sum(jnp.sin(lse)) + jnp.sum(jnp.cos(rows)))

        return run

    fused = loss(linear_cross_entropy, lambda a: jax.lax.psum(a, "d"), implementation="xla_chunked", chunk=4)
    specs = (P("d"), P(), P(), P("d"), P("d"))
    run = jax.shard_map(fused, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    got, want = (
        jax.jit(jax.value_and_grad(f, (0, 1, 2)))(x, w, bias, labels, weights)
        for f in (run, loss(original, lambda a: a))
    )
    close(got, want)


TRIALS: dict[str, Callable[[], None]] = {
    "automatic": partial(sharded, AxisType.Auto),
    "explicit": partial(sharded, AxisType.Explicit),
    "shard_map": partial(mapped, True),
    "shard_map unchecked": partial(mapped, False),
}
