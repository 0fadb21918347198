"""Marks on XLA's own stream: CUDA events recorded between jitted programs, and a wait that lets the host run ahead."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import jax
import numpy as np

from ...launch.compile import CudaSource
from ...launch.ffi_call import launch
from ...launch.kernel_plan import KernelPlan, Launch
from ...launch.plans import plan_kind
from ...launch.steps import Prepared

SPIN = CudaSource("clock/spin.cu", ("spin",))
STEP = CudaSource("clock/step.cu", ("step",))

_EVENTS: dict[
    tuple[int, int], Any
] = {}  # (slot, device) -> the event a mark records; marks name slots, as an event is no data


@dataclass(frozen=True)
class EventPlan:
    """Records the CUDA event of a slot. Its program is compiled without command buffers, so that it is recorded each time it runs."""

    kind: ClassVar[str] = "event"
    slot: int

    def spec(self) -> dict[str, Any]:
        return asdict(self)

    def prepare(self, device: int) -> Prepared:
        cuda: Any = importlib.import_module("cupy.cuda")
        event = _EVENTS.setdefault((self.slot, device), cuda.Event())

        def run(stream: int, operands: Sequence[int], results: Sequence[int]) -> None:
            cuda.runtime.eventRecord(event.ptr, stream)

        return Prepared(run)


plan_kind(EventPlan.kind, lambda content: EventPlan(**content))


def device() -> Any:
    """The JAX device whose stream is marked."""
    return jax.local_devices(backend="cuda")[0]


@functools.cache
def mark(slot: int) -> Any:
    """A compiled program that records the event of a slot on the stream of the default CUDA device; call it between others, and
    wait for its result: an error would surface there."""
    return _alone(EventPlan(slot))


@functools.cache
def wait(nanoseconds: int) -> Any:
    """A compiled program that keeps that stream busy so long."""
    return _alone(_spin_plan(nanoseconds))


def step(x: Any) -> Any:
    """x + 1 (float32, a multiple of 4 elements) by one launch that does nothing else; for timing a launch."""
    return launch(_step_plan(x.size), [x], [jax.ShapeDtypeStruct(x.shape, x.dtype)])[0]


def _spin_plan(nanoseconds: int) -> KernelPlan:
    return KernelPlan(SPIN.path, (), (Launch("spin", (1, 1, 1), (1, 1, 1), 0, (("i64", nanoseconds),)),))


def _step_plan(size: int) -> KernelPlan:
    params = (("operand", 0), ("result", 0), ("i64", size))
    return KernelPlan(STEP.path, (), (Launch("step", (-(-size // 512), 1, 1), (128, 1, 1), 0, params, early=True),))


def variants() -> Iterator[tuple[str, KernelPlan]]:
    """Name and plan of each kernel, as `Card.variants` has them of an op."""
    yield "clock: spin", _spin_plan(1000)
    yield "clock: step", _step_plan(1024)


def elapsed_s(first: int, second: int) -> float:
    """Seconds on the device between the last marks of two slots; waits for the second."""
    cuda: Any = importlib.import_module("cupy.cuda")
    ordinal = device().local_hardware_id
    start, end = _EVENTS[first, ordinal], _EVENTS[second, ordinal]
    end.synchronize()
    return cuda.get_elapsed_time(start, end) * 1e-3


def _alone(plan: Any) -> Any:
    def program(token: Any) -> Any:
        return launch(plan, [token], [jax.ShapeDtypeStruct(token.shape, token.dtype)])[0]

    token = jax.device_put(np.zeros(1, np.float32), device())
    compiled = jax.jit(program).lower(token).compile(compiler_options={"xla_gpu_enable_command_buffer": ""})
    return functools.partial(compiled, token)
