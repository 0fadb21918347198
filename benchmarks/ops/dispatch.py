"""What a call of a fused function costs the host beyond the jit that it is under: a step of 300 arrays, under three jits.

    python -m benchmarks dispatch [--quick] [-o FILE]

Calls of the original and of the fused function take turns, each timed from the call to its return and waited for before the next one, so
that the program itself is no part of it as long as a device runs it after the call has returned; on a CPU small programs run in the call.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from ..measuring import compared, finish, new_record, parser_of

ARRAYS, CALLS, QUICK = 300, 2000, 100
MOST = 1.1  # times what the original takes


def arrays() -> list[Any]:
    import jax.numpy as jnp

    return [jnp.full((8,), i / ARRAYS) for i in range(ARRAYS - 1)] + [jnp.eye(8)]


def updated(held: list[Any], x: Any) -> tuple[list[Any], Any]:
    """One site, and a new value for every array."""
    import jax

    y = jax.nn.relu(x @ held[-1] + held[0])
    return [a * 0.999 for a in held], y


def under_jit() -> tuple[Callable, dict[str, Callable], Callable[[], tuple]]:
    """(the original, the fused ones by name, the arguments of a call)."""
    import jax

    import fusionlab as fl

    original, x = jax.jit(updated), arrays()[-1]
    return original, {"fuse(f)": fl.fuse(updated), "fuse(jax.jit(f))": fl.fuse(original)}, lambda: (arrays(), x)


def under_nnx() -> tuple[Callable, dict[str, Callable], Callable[[], tuple]]:
    import jax
    from flax import nnx

    import fusionlab as fl

    class Held(nnx.Module):
        def __init__(self) -> None:
            self.held = nnx.List([nnx.Param(a) for a in arrays()])

    def step(model: Any, x: Any) -> Any:
        y = jax.nn.relu(x @ model.held[-1] + model.held[0])
        for one in model.held:
            one[...] = one[...] * 0.999
        return y

    original, x = nnx.jit(step), arrays()[-1]
    return original, {"fuse(f)": fl.fuse(step), "fuse(nnx.jit(f))": fl.fuse(original)}, lambda: (Held(), x)


def under_equinox() -> tuple[Callable, dict[str, Callable], Callable[[], tuple]]:
    import equinox as eqx
    import jax

    import fusionlab as fl

    def step(held: list[Any], x: Any, act: Callable) -> tuple[list[Any], Any]:
        new, _ = updated(held, x)
        return new, act(x @ held[-1] + held[0])

    original, x = eqx.filter_jit(step), arrays()[-1]
    fused = {"fuse(f)": fl.fuse(step), "fuse(filter_jit(f))": fl.fuse(original)}
    return original, fused, lambda: (arrays(), x, jax.nn.relu)


KINDS = {"jax.jit": under_jit, "nnx.jit": under_nnx, "filter_jit": under_equinox}


def samples_of(calls: dict[str, Callable], make: Callable[[], tuple], count: int) -> dict[str, list[float]]:
    """Seconds from call to return, in turns."""
    import jax

    args = {name: make() for name in calls}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(count + 10):
        for name, call in calls.items():
            start = time.perf_counter()
            out = call(*args[name])
            seconds = time.perf_counter() - start
            jax.block_until_ready(out)
            if i >= 10:
                taken[name].append(seconds)
    return taken


def main(argv: list[str]) -> int:
    """Prints a line for each fused function; the exit status is 1 where one costs more than it may."""
    options = parser_of("dispatch", __doc__).parse_args(argv)

    import jax

    record, worst = new_record("dispatch", options) | {"arrays": ARRAYS, "kinds": {}}, 0.0
    for kind, made in KINDS.items():
        original, fused, make = made()
        times = samples_of({kind: original} | fused, make, QUICK if options.quick else CALLS)
        record["kinds"][kind] = compared(times, kind, 1)
        for name in fused:
            one = record["kinds"][kind][name]
            worst = max(worst, 1 / one["ratio"])
            base = record["kinds"][kind][kind]["median_s"]
            print(f"{kind}: {base * 1e6:.0f} us; {name}: {one['median_s'] * 1e6:.0f} us, {1 / one['ratio']:.3f} x")
    finish(record, options, jax.default_backend() != "cpu")
    return int(worst > MOST)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
