"""Launch plans on four devices. Trials for test_launch.py, whose cases have their names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .launching import LAUNCHED, doubled, numpy_call

Array = Any


def four_devices(check: bool) -> None:
    """Shards of a call inside shard_map: one launch a device, of the local shape; a second operand that every device has."""
    mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4])
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    shared = np.arange(3, dtype=np.float32)
    varying: list[list[str]] = []

    def local(a: Array, b: Array) -> tuple[Array, Array]:
        assert a.shape == (2, 4)
        (out,) = numpy_call("first_minus_mean_of_second", a, b)
        both = (out, doubled(b))
        varying.append([name for v in both for name in sorted(jax.typeof(v).manual_axis_type.varying)])
        return out, jax.lax.psum(doubled(out), "d")

    f = jax.shard_map(local, mesh=mesh, in_specs=(P("d"), P()), out_specs=(P("d"), P()), check_vma=check)
    placed = jax.device_put(x, NamedSharding(mesh, P("d"))), jax.device_put(shared, NamedSharding(mesh, P()))
    LAUNCHED.clear()
    for _ in range(3):
        out, total = jax.block_until_ready(jax.jit(f)(*placed))
    wanted = x - 1
    shards = {s.device.id: bool((np.asarray(s.data) == wanted[s.index]).all()) for s in out.addressable_shards}
    assert shards == dict.fromkeys(range(4), True)
    assert {s.data.shape for s in out.addressable_shards} == {(2, 4)}
    assert varying[0] == (["d"] if check else [])
    assert (np.asarray(total) == 2 * wanted.reshape(4, 2, 4).sum(0)).all()
    assert sum(name == "double" for name, *_ in LAUNCHED) == 12
    assert "all-gather" not in jax.jit(f).lower(*placed).compile().as_text()


TRIALS: dict[str, Callable[[], None]] = {
    "checked": partial(four_devices, True),
    "unchecked": partial(four_devices, False),
}
