"""Our own CUDA kernels as a launch plan: a source, its compile options and the launches, one after another."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from ...errors import BackendError
from .architectures import ARCHITECTURES, target_of
from .compile import KERNELS, CudaSource, cubin, source_texts
from .plans import plan_kind
from .steps import KernelStep, Launch, Prepared

_SHARED_WITHOUT_ASKING = 48 << 10  # bytes of dynamic shared memory a kernel may have unasked
_EARLY_SINCE = 90  # programmatic dependent launch: compute capability 9.0 (CUDA C++ Programming Guide)


@dataclass(frozen=True)
class KernelPlan:
    """Launches of kernels of one source.

    Attributes:
      source: path of the .cu file, relative to the folder of this module; of a `text`, what to call it.
      options: for NVRTC ("-DFL_VEC=8").
      launches: in order; each sees what those before it wrote. Empty where there is nothing to compute.
      text: the source itself, if it is not part of this package: it is then part of the name, so that any process can compile it.
    """

    kind: ClassVar[str] = "kernels"
    source: str
    options: tuple[str, ...]
    launches: tuple[Launch, ...]
    text: str = ""

    def spec(self) -> dict[str, Any]:
        if self.text:
            return asdict(self)
        # The source's digest is part of the name: an executable that was compiled for another version of it is told so.
        return {k: v for k, v in asdict(self).items() if k != "text"} | {"digest": digest(self.source)}

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> KernelPlan:
        source, text = content["source"], content.get("text", "")
        if not text and content["digest"] != digest(source):
            raise LookupError(f"{source} has another version here")
        return cls(source, content["options"], tuple(Launch(**data) for data in content["launches"]), text)

    def refuses(self, arch: str) -> str | None:
        """Why a block of its launches cannot run on an architecture, with what it takes and the limit, or None where nothing forbids it.
        Static shared memory is not counted."""
        limits = ARCHITECTURES[target] if (target := target_of(arch)) else None
        if limits is None:
            return None
        found = (limits.refuses(one.entry, math.prod(one.block), one.shared) for one in self.launches)
        return next(filter(None, found), None)

    def prepare(self, device: int) -> Prepared:
        cuda: Any = importlib.import_module("cupy.cuda")
        driver = cuda.driver
        if not self.launches:
            return Prepared(lambda stream, operands, results: None, ())
        arch = f"sm_{cuda.Device(device).compute_capability}"
        if unable := self.refuses(arch):
            raise BackendError(f"{self.source}: {unable}")
        arch = target_of(arch) or arch
        source = CudaSource(self.source, tuple(launch.entry for launch in self.launches), text=self.text)
        image = cubin(source, self.options, arch)
        module = cuda.function.Module()
        module.load(image)
        steps = []
        for launch in self.launches:
            entry = module.get_function(launch.entry)
            if launch.shared > _SHARED_WITHOUT_ASKING:
                driver.funcSetAttribute(
                    entry.ptr, driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, launch.shared
                )
            how: dict[str, Any] = {**vars(launch), "early": launch.early and int(arch[3:]) >= _EARLY_SINCE}
            steps.append(KernelStep(**how, function=entry.ptr, image=image))
        ready = [_launcher(_launching(driver, step.cooperative), step) for step in steps]

        def run(stream: int, operands: Sequence[int], results: Sequence[int]) -> None:
            for start in ready:
                start(stream, operands, results)

        return Prepared(run, tuple(steps), module)


plan_kind(KernelPlan.kind, KernelPlan.read)


def digest(source: str) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of the source and of what it includes of ours.

    Raises:
      LookupError: there is no such file in the package.
    """
    if not (KERNELS / source).is_file():
        raise LookupError(f"{source} is not a kernel source of this installation")
    found = hashlib.sha256()
    for path, text in sorted(source_texts(KERNELS / source).items()):
        found.update(f"{path.name}\n{text}".encode())
    return found.hexdigest()[:16]


def _launching(driver: Any, cooperative: bool) -> Callable[..., None]:
    """What launches a kernel; a cooperative launch takes no extra arguments behind the parameters."""
    if not cooperative:
        return driver.launchKernel
    return lambda *given: driver.launchCooperativeKernel(*given[:-1])


def _launcher(
    launch_kernel: Callable[..., None], step: KernelStep
) -> Callable[[int, Sequence[int], Sequence[int]], None]:
    """A parameter takes eight bytes here, of which a kernel reads as many as it has (x86-64 and Arm are little-endian)."""
    count = len(step.params)
    values, pointers = ctypes.c_uint64 * count, ctypes.c_void_p * count
    fixed = [0 if kind in ("operand", "result") else value & 0xFFFF_FFFF_FFFF_FFFF for kind, value in step.params]
    from_operands = [(i, number) for i, (kind, number) in enumerate(step.params) if kind == "operand"]
    from_results = [(i, number) for i, (kind, number) in enumerate(step.params) if kind == "result"]
    geometry = (*step.grid, *step.block, step.shared)

    # Blocks of parameters that no launch uses just now: several threads may be here at once, and XLA's own threads are new to Python each
    # time, so that a block of each thread's own would never be found again.
    free: list[tuple[Any, Any, int]] = []

    def start(stream: int, operands: Sequence[int], results: Sequence[int]) -> None:
        try:
            block = free.pop()
        except IndexError:
            given = values(*fixed)
            base = ctypes.addressof(given)
            held = pointers(*range(base, base + 8 * count, 8))
            block = given, held, ctypes.addressof(held)
        given = block[0]
        for i, number in from_operands:
            given[i] = operands[number]
        for i, number in from_results:
            given[i] = results[number]
        launch_kernel(step.function, *geometry, stream, block[2], 0)
        free.append(block)

    return start
