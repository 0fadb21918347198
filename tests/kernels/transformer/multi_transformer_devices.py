"""multi_transformer on four devices. Trials for test_multi_transformer.py, whose cases have their names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fusionlab.kernels.op.implementation import ChoiceKind, ImplementationChoice
from fusionlab.kernels.ops.gemm_epilogue.op import GEMM_EPILOGUE
from fusionlab.ops import TransformerLayer, multi_transformer

from ..op.partitioned import SEEN, in_float64, registered

B, S, E, H, D, F, ROOM = 8, 6, 16, 4, 4, 32, 9
SHAPES = {
    "norm1_scale": (E,),
    "norm1_bias": (E,),
    "q": (E, H, D),
    "k": (E, H, D),
    "v": (E, H, D),
    "q_bias": (H, D),
    "out": (H, D, E),
    "out_bias": (E,),
    "norm2_scale": (E,),
    "up": (E, F),
    "up_bias": (F,),
    "down": (F, E),
    "down_bias": (E,),
}


surroundings = in_float64


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return 0.4 * np.random.default_rng([seed, *shape]).standard_normal(shape)


LAYERS = [
    TransformerLayer(**{s: draw(*n, seed=20 * i + j) for j, (s, n) in enumerate(SHAPES.items())}) for i in range(2)
]
X, ONE = draw(B, S, E), draw(B, 1, E, seed=3)
CACHES = tuple((draw(B, ROOM, H, D, seed=i), draw(B, ROOM, H, D, seed=i + 7)) for i in range(2))
STEPS = np.arange(1, 9, dtype=np.int32)


def encode(x: Any, layers: Any, implementation: str | None = None) -> Any:
    return multi_transformer(x, layers, is_causal=True, implementation=implementation)


def decode(x: Any, layers: Any, caches: Any, step: Any, implementation: str | None = None) -> Any:
    return multi_transformer(x, layers, cache=caches, step=step, implementation=implementation)


def loss(run: Any, x: Any, layers: Any) -> Any:
    return jnp.sum(jnp.sin(run(x, layers)))


def close(got: Any, want: Any) -> None:
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-9, atol=1e-9)


def mesh_of(kind: AxisType) -> Any:
    return jax.make_mesh((4,), ("d",), axis_types=(kind,), devices=jax.devices()[:4])


def mapped(check: bool) -> None:
    """Inside shard_map, by rows: values, gradients of rows and of weights that every device has."""
    shard = partial(jax.shard_map, mesh=mesh_of(AxisType.Auto), check_vma=check)
    run = shard(encode, in_specs=(P("d"), P()), out_specs=P("d"))
    close(jax.jit(run)(X, LAYERS), encode(X, LAYERS, "xla"))

    def local(x: Any, layers: Any) -> Any:
        return jax.lax.psum(loss(encode, x, layers), "d")

    total = shard(local, in_specs=(P("d"), P()), out_specs=P())
    want = jax.grad(partial(loss, partial(encode, implementation="xla")), (0, 1))(X, LAYERS)
    close(jax.jit(jax.grad(total, (0, 1)))(X, LAYERS), want)
    for step, spec in ((jnp.int32(4), P()), (STEPS, P("d"))):
        whole = shard(decode, in_specs=(P("d"), P(), P("d"), spec), out_specs=P("d"))
        close(jax.jit(whole)(ONE, LAYERS, CACHES, step), decode(ONE, LAYERS, CACHES, step, "xla"))


def placed() -> None:
    """A jit whose arrays are sharded: by rows; by heads and features, which XLA then sums over."""
    mesh = mesh_of(AxisType.Auto)
    want = jax.value_and_grad(partial(loss, partial(encode, implementation="xla")), (0, 1))(X, LAYERS)
    by_head = {"q": P(None, "d"), "k": P(None, "d"), "v": P(None, "d"), "q_bias": P("d"), "out": P("d")}
    by_feature = {"up": P(None, "d"), "up_bias": P("d"), "down": P("d")}
    for rows, specs in ((P("d"), {}), (P(), by_head | by_feature)):
        put = [
            TransformerLayer(
                **{s: jax.device_put(a, NamedSharding(mesh, specs.get(s, P()))) for s, a in w.slots().items()}
            )
            for w in LAYERS
        ]
        x = jax.device_put(X, NamedSharding(mesh, rows))
        close(jax.jit(encode)(x, put), encode(X, LAYERS, "xla"))
        close(jax.jit(jax.value_and_grad(partial(loss, encode), (0, 1)))(x, put), want)
        held = NamedSharding(mesh, rows if rows == P("d") else P(None, None, "d"))
        caches = jax.device_put(CACHES, held)
        step = jax.device_put(STEPS, NamedSharding(mesh, P()))
        got = jax.jit(decode, donate_argnums=2)(jax.device_put(ONE, NamedSharding(mesh, rows)), put, caches, step)
        close(got, decode(ONE, LAYERS, CACHES, STEPS, "xla"))
        assert all(c.sharding.is_equivalent_to(held, 4) for c in jax.tree.leaves(got[1]))


def explicit() -> None:
    """On a mesh with explicit axes, by rows: the results say how they are sharded."""
    encoded, decoded = encode(X, LAYERS, "xla"), decode(ONE, LAYERS, CACHES, jnp.int32(4), "xla")
    gradients = jax.grad(partial(loss, partial(encode, implementation="xla")), (0, 1))(X, LAYERS)
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        x, one, caches = (jax.device_put(a, NamedSharding(mesh, P("d"))) for a in (X, ONE, CACHES))
        layers, both = (jax.device_put(a, NamedSharding(mesh, P())) for a in (LAYERS, jnp.stack([X, X])))
        got = jax.jit(encode)(x, layers)
        assert got.sharding.spec[0] == "d"
        close(got, encoded)
        close(jax.jit(jax.grad(partial(loss, encode), (0, 1)))(x, layers), gradients)
        close(jax.jit(decode)(one, layers, caches, jnp.int32(4)), decoded)
        close(jax.jit(jax.vmap(encode, (0, None)))(both, layers)[1], encoded)


def opaque() -> None:
    """Pieces that XLA cannot look into are told how to split: each device computes with its own rows alone."""
    x = jax.device_put(X, NamedSharding(mesh_of(AxisType.Auto), P("d")))
    want = encode(X, LAYERS, "xla")
    decision = ImplementationChoice("opaque", ChoiceKind.CHOSEN, "for the trial")
    with registered() as patch:
        patch.setattr(type(GEMM_EPILOGUE), "decide", lambda self, *_, **__: decision)
        jax.clear_caches()  # no piece is what it was, nor will be what it is
        SEEN.clear()
        try:
            close(jax.jit(lambda x: encode(x, LAYERS))(x), want)
        finally:
            jax.clear_caches()
    rows = {shapes["x"][0] for role, shapes in SEEN if role == "call" and len(shapes["x"]) == 3}
    assert B // 4 in rows, rows


TRIALS: dict[str, Callable[[], None]] = {
    "mapped": partial(mapped, True),
    "mapped unchecked": partial(mapped, False),
    "placed": placed,
    "explicit": explicit,
    "opaque": opaque,
}
