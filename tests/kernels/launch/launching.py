"""Launch plans that compute with numpy on the CPU, and programs that test processes run. Not a test module.

In the folder tests, `python -m kernels.launching PROGRAM [FOLDER]` prints a line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import pickle
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from fusionlab.kernels.launch import plans
from fusionlab.kernels.launch.ffi_call import BOOK, launch

Array = Any
Shape = tuple[str, tuple[int, ...]]  # dtype and shape
PREPARED: list[str] = []  # functions, in the order in which plans of them were prepared
LAUNCHED: list[
    tuple[str, list[int], list[int], str]
] = []  # function, addresses of operands and results, name of the thread


def view(address: int, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """The memory at an address as an array; an empty array has none."""
    found = np.dtype(getattr(jnp, dtype))
    nbytes = int(np.prod(shape, dtype=np.int64)) * found.itemsize
    if not nbytes:
        return np.empty(shape, found)
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), np.uint8).view(found).reshape(shape)


@dataclass(frozen=True)
class NumpyPlan:
    """A function of `FUNCTIONS` over arrays."""

    kind: ClassVar[str] = "test numpy"
    function: str
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]

    def spec(self) -> dict[str, Any]:
        return {"function": self.function, "operands": self.operands, "results": self.results}

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> NumpyPlan:
        sides = (tuple((d, tuple(s)) for d, s in content[side]) for side in ("operands", "results"))
        return cls(content["function"], *sides)

    def prepare(self, device: int) -> plans.Prepared:
        PREPARED.append(self.function)
        function = FUNCTIONS[self.function]
        if self.function == "fails_to_prepare":
            raise OSError("no such thing on this device")

        def run(stream: int, operands: Sequence[int], results: Sequence[int]) -> None:
            assert stream == device == 0
            LAUNCHED.append((self.function, list(operands), list(results), threading.current_thread().name))
            given = [view(a, *s) for a, s in zip(operands, self.operands, strict=True)]
            function(given, [view(a, *s) for a, s in zip(results, self.results, strict=True)])

        return plans.Prepared(run)


def several(operands: list[np.ndarray], results: list[np.ndarray]) -> None:
    """[a + b, [the sum of a, the sum of b], the bytes of a]."""
    a, b = operands
    total, sums, raw = results
    total[...] = a + b
    sums[...] = a.sum(), b.sum()
    raw[...] = np.frombuffer(a.tobytes(), np.uint8)


def reversed_flat(operands: list[np.ndarray], results: list[np.ndarray]) -> None:
    results[0].reshape(-1)[...] = operands[0].reshape(-1)[::-1]


def double(operands: list[np.ndarray], results: list[np.ndarray]) -> None:
    results[0][...] = operands[0] * 2


def first_minus_mean_of_second(operands: list[np.ndarray], results: list[np.ndarray]) -> None:
    results[0][...] = operands[0] - operands[1].mean()


def double_by_way_of_scratch(operands: list[np.ndarray], results: list[np.ndarray]) -> None:
    results[1][...] = np.frombuffer(operands[0].tobytes(), np.uint8)
    results[0][...] = 2 * results[1].view(operands[0].dtype).reshape(operands[0].shape)


def fill_with_seven(operands: list[np.ndarray], results: list[np.ndarray]) -> None:
    for one in results:
        one[...] = 7


def fails_to_run(operands: list[np.ndarray], results: list[np.ndarray]) -> None:
    raise ZeroDivisionError("went wrong while it ran")


FUNCTIONS: dict[str, Callable[[list[np.ndarray], list[np.ndarray]], None]] = (
    {
        f.__name__: f
        for f in (
            several,
            reversed_flat,
            double,
            first_minus_mean_of_second,
            double_by_way_of_scratch,
            fill_with_seven,
            fails_to_run,
        )
    }
    | {f"double_{i}": double for i in range(8)}
    | {"fails_to_prepare": double}
)
plans.plan_kind(NumpyPlan.kind, NumpyPlan.read)


def plan_for(function: str, operands: Sequence[Any], *results: Any) -> NumpyPlan:
    sides = ([(np.dtype(a.dtype).name, tuple(a.shape)) for a in side] for side in (operands, results))
    return NumpyPlan(function, *map(tuple, sides))


def numpy_call(
    function: str, *operands: Any, results: Sequence[Any] = (), aliases: dict[int, int] | None = None
) -> list:
    """Launches a function; without `results` there is one, like the first operand."""
    shapes = [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in results or operands[:1]]
    return launch(plan_for(function, operands, *shapes), operands, shapes, aliases)


def doubled(x: Array) -> Array:
    return numpy_call("double", x)[0]


# Programs of processes.


def cached(folder: str) -> dict[str, Any]:
    """Compiles with JAX's persistent cache in a folder, and loads what an earlier process serialised there, or serialises it."""
    serialised = Path(folder, "executable")
    before = loaded(serialised) if serialised.exists() else None
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    jax.config.update("jax_compilation_cache_dir", str(Path(folder, "cache")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    x = jnp.arange(6.0)
    compiled = jax.jit(lambda x: doubled(x) + 1).lower(x).compile()
    prepared = len(PREPARED)
    if before is None:
        from jax.experimental import serialize_executable

        serialised.write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))
    return {
        "hits": events.count("/jax/compilation_cache/cache_hits"),
        "files": sorted(p.name for p in Path(folder, "cache").iterdir() if not p.name.endswith("-atime")),
        "prepared when compiled": prepared,
        "values": compiled(x).tolist(),
        "loaded": before,
    }


def loaded(serialised: Path) -> dict[str, Any]:
    """What an executable of another process gives, in one that has traced nothing yet."""
    from jax.experimental import serialize_executable

    run = serialize_executable.deserialize_and_load(*pickle.loads(serialised.read_bytes()))
    prepared = list(PREPARED)
    return {"prepared": prepared, "values": run(jnp.arange(6.0)).tolist(), "counters": BOOK.counters()}


def unregistered(folder: str) -> dict[str, Any]:
    """The same where nobody knows plans of that kind any more."""
    del plans._KINDS[NumpyPlan.kind]
    try:
        loaded(Path(folder, "executable"))
    except jax.errors.JaxRuntimeError as error:
        after = plans.launch_plan_of(plans.plan_name(plans.launch_plan_of(MATMUL)))  # the process goes on
        return {"error": str(error), "after": plans.plan_name(after) == MATMUL}
    return {"error": None}


MATMUL = (
    '{"algorithm":"","aux_pitch":0,"compute":"f32","dtype":"float32","epilogue":"BIAS","k":4,"kind":"cublaslt","library":0,"m":2,"n":3,'
    '"transposed":[false,true],"workspace":4194304}'
)
PROGRAMS = {f.__name__: f for f in (cached, unregistered)}


if __name__ == "__main__":
    print(json.dumps(PROGRAMS[sys.argv[1]](*sys.argv[2:])))
