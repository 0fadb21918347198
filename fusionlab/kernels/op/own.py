"""Ops of users' own: a plain JAX function that is the meaning, and other ways to compute the same, among them one CUDA kernel.

The op takes one axis per letter, as the example of its pattern has them. Differentiated, it keeps its operands and nothing else; its
derivative is JAX's own of the meaning, computed from them, unless a backward is given.
"""

from __future__ import annotations

import contextlib
import functools
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...device import Device
from ...errors import ArgumentError, BackendError, CompileError, MissingDependencyError
from ...graph.certify.verdict import relative_error
from ...graph.interpret.evaluate import evaluate
from ...graph.interpret.limits import CannotEvaluate
from ...graph.settings import matmul_precision, on_one_device
from ...showing import Shown
from ...tracebacks import errors_for_users
from ..launch.ffi_call import launch
from ..launch.kernel_plan import KernelPlan, Launch
from .arrays import check_dtypes, check_given
from .implementation import Call, ChoiceKind, Implementation, ImplementationChoice
from .op import Op

Array = Any

# The attribute with what was set by `jax.default_matmul_precision` around the program, or the call: an op of the user's has no other word
# for it, and is lowered under whatever is set then.
PRECISION = "matmul_precision"
# What a user's function may raise to refuse its arguments.
REFUSALS = (TypeError, ValueError, IndexError, KeyError, ArithmeticError, AssertionError, NotImplementedError)
_STORAGE = {"float32": "float", "bfloat16": "__nv_bfloat16", "float16": "__half", "float64": "double"}
_TOLERANCE = {"float64": 1e-9, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
_HEADERS = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\nusing T = {};\n#line 1\n"
_BLOCKS = (1 << 31) - 1  # along x
_TRIED = 1 << 20  # elements that a kernel is tried on, at most
# of the numbers that it is tried on; exp overflows at the last, and the first are what padding is made of
_MAGNITUDES, _WORSE = (1.0, 0.0, 1 / 32, 4.0, 30.0, 1e4), 16


@errors_for_users
@dataclass(frozen=True, repr=False)
class CudaKernel(Shown):
    """One CUDA kernel that computes a whole op.

    Its parameters are the addresses of the operands in order, that of the result, the length of each axis as `long long` in the order in
    which the letters first appear in the operands, and each scalar, as `double` for float64 and `float` else. Arrays are row-major; `T` is
    their type in CUDA. Before it runs for the first time at some shapes it is tried there on random numbers of several sizes (at smaller
    shapes where there are more than a million elements) against the op's meaning in float64, and refused if it is wrong. That detects
    no race that does not show, no reads or writes beyond the arrays, and no errors at lengths or numbers that were not tried.

    Attributes:
      source: CUDA C++, with an `extern "C" __global__` function `entry`; `cuda_bf16.h` and `cuda_fp16.h` are included already.
      entry: None is the pass's name.
      threads: of a block.
      blocks: axis lengths by letter -> how many blocks there are; None for one thread per element of the result.
      dtypes: those it is written for, out of float32, bfloat16, float16 and float64.
      shared: dynamic shared memory of a block, bytes.
    """

    _says = "CUDA kernel {0.entry}, {0.threads} threads a block"

    source: str
    entry: str | None = None
    threads: int = 256
    blocks: Callable[..., int] | None = None
    dtypes: tuple[str, ...] = ("float32",)
    shared: int = 0


class PatternOp(Op):
    """The op of a `pattern_pass`.

    Args:
      name: of the op and its primitive.
      axes: operand -> its axis letters; `result`: those of the result.
      scalars: names of the numbers that follow the operands.
      reference: the meaning, `(*operands, *scalars) -> array`, in plain JAX.
      others: the other implementations by name, in the order of preference: functions like `reference`, and kernels.
      backward: `(ct, *operands, *scalars) -> gradients of the operands`; None for JAX's own of the reference.
      formula: its computation.
      same_code: whether programs contain the reference itself.
    """

    is_users = True

    def __init__(
        self,
        name: str,
        axes: Mapping[str, str],
        result: str,
        scalars: tuple[str, ...],
        reference: Callable[..., Any],
        others: Mapping[str, Callable[..., Any] | CudaKernel],
        backward: Callable[..., Any] | None,
        formula: str,
        same_code: bool,
    ) -> None:
        self.name, self.slots = name, tuple(axes)  # pyright: ignore[reportAttributeAccessIssue]
        self.letters, self.result, self.scalars = dict(axes), result, scalars
        self._formula, self.same_code, self._backward = formula, same_code, backward
        self.defaults = dict.fromkeys((*scalars, PRECISION))  # pyright: ignore[reportAttributeAccessIssue]
        self.meaning_fn = reference
        self.functions = {key: fn for key, fn in others.items() if not isinstance(fn, CudaKernel)}
        plain = "the meaning, as plain JAX code"
        xla = Implementation("xla", plain, self._forward(reference), self._tangent, self._cotangent)
        implementations = {"xla": xla}
        for key, run in others.items():
            is_kernel = isinstance(run, CudaKernel)
            implementations[key] = self._kernel(xla, key, run) if is_kernel else self._function(xla, key, run)
        self.implementations = implementations  # pyright: ignore[reportAttributeAccessIssue]
        super().__init__()

    def _function(self, xla: Implementation, name: str, fn: Callable[..., Any]) -> Implementation:
        summary = "the user's plain JAX code"

        def unable(shapes: Mapping[str, Any], device: Device, **attrs: Any) -> str | None:
            return self.unfit(fn, shapes, attrs)

        return replace(xla, name=name, summary=summary, forward=self._forward(fn), unable=unable, roles=("call",))

    def unfit(self, fn: Callable[..., Any], shapes: Mapping[str, Any], attrs: Mapping[str, Any]) -> str | None:
        """Why a function of the user's cannot run with these operands; None where it can."""
        given = [jax.ShapeDtypeStruct(shapes[slot].shape, shapes[slot].dtype) for slot in self.slots]
        sizes = self.sizes({slot: a.shape for slot, a in zip(self.slots, given, strict=True)})
        shape, dtype = tuple(sizes[x] for x in self.result), given[0].dtype
        try:
            out = jax.eval_shape(lambda *leaves: fn(*leaves, *self.numbers(attrs)), *given)
        except REFUSALS as error:
            return f"it does not take these operands: {type(error).__name__} {error}".rstrip()
        if getattr(out, "shape", None) != shape or out.dtype != dtype:
            return f"it gives {out}, needed {jnp.dtype(dtype).name}{list(shape)}, the operands' dtype"
        return None

    def _kernel(self, xla: Implementation, name: str, kernel: CudaKernel) -> Implementation:
        runner, summary = _Kernel(self, kernel), "the user's CUDA kernel"
        return xla.by_kernels(name, summary, runner, roles=("call",))

    @property
    def has_backward(self) -> bool:
        """Whether the gradient is the user's own."""
        return self._backward is not None

    # -- the meaning ----------------------------------------------------------------------------------------------

    def numbers(self, attrs: Mapping[str, Any]) -> list[float]:
        """The scalars of a call, in order."""
        return [attrs[s] for s in self.scalars]

    def _apply(self, fn: Callable[..., Array], known: Mapping[str, Array], attrs: Mapping[str, Any]) -> Array:
        """A function of all operands, which are known by slot, and of the numbers."""
        with _products_in(attrs):
            return fn(*(known[slot] for slot in self.slots), *self.numbers(attrs))

    def _forward(self, fn: Callable[..., Any]) -> Callable[..., list[Array]]:
        return lambda *, residuals, **given: [self._apply(fn, given, given)]

    def _of(self, slots: Sequence[str], saved: Mapping[str, Array], attrs: Mapping[str, Any]) -> Callable[..., Array]:
        """The meaning as a function of some operands."""
        return lambda *moving: self._apply(self.meaning_fn, {**saved, **dict(zip(slots, moving, strict=True))}, attrs)

    def _tangent(
        self, saved: Mapping[str, Array], tangents: Mapping[str, Array], shape: Any, shardings: Any, **attrs: Any
    ) -> Array:
        start = [saved[slot] for slot in tangents]
        return jax.jvp(self._of(tuple(tangents), saved, attrs), start, list(tangents.values()))[1]

    def _cotangent(
        self, saved: Mapping[str, Array], ct: Array, wanted: tuple[str, ...], shardings: Any, **attrs: Any
    ) -> list[Array]:
        if self._backward is None:
            return list(jax.vjp(self._of(wanted, saved, attrs), *(saved[slot] for slot in wanted))[1](ct))
        found = self._apply(functools.partial(self._backward, ct), saved, attrs)
        gradients = list(found) if isinstance(found, tuple | list) else [found]
        shapes = [getattr(g, "shape", None) for g in gradients]
        needed = [saved[slot].shape for slot in self.slots]
        if shapes != needed:
            raise ArgumentError(f"{self.name}: backward gives arrays of shapes {shapes}, needed {needed}")
        by_slot = dict(zip(self.slots, gradients, strict=True))
        return [by_slot[slot].astype(saved[slot].dtype) for slot in wanted]

    # -- what an op says of itself --------------------------------------------------------------------------------

    def prepare(self, given: Mapping[str, Any], attrs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        full = self.with_defaults(attrs)
        check_given(self.name, given, self.slots)
        check_dtypes(self.name, given)
        self.sizes({slot: given[slot].shape for slot in self.slots})
        for scalar in self.scalars:
            if not isinstance(full[scalar], int | float) or isinstance(full[scalar], bool):
                raise ArgumentError(f"{self.name}: {scalar}={full[scalar]!r}, needed a number")
            full[scalar] = float(full[scalar])
        full[PRECISION] = full[PRECISION] or matmul_precision()
        return {slot: given[slot] for slot in self.slots}, full

    def at_precision_set(self, params: dict[str, Any]) -> dict[str, Any]:
        return params | {PRECISION: params[PRECISION] or matmul_precision()}

    def sizes(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """Axis letter -> its length.

        Raises:
          ArgumentError: a shape that does not have the letters of its operand.
        """
        sizes: dict[str, int] = {}
        for slot, letters in self.letters.items():
            fits = len(shapes[slot]) == len(letters)
            if not fits or any(sizes.setdefault(x, int(n)) != n for x, n in zip(letters, shapes[slot], strict=True)):
                got = ", ".join(f"{s} {list(shapes[s])}" for s in self.slots)
                needed = ", ".join(f"{s} [{', '.join(axes)}]" for s, axes in self.letters.items())
                raise ArgumentError(f"{self.name}: got {got}; needed {needed}, equal letters being equal lengths")
        return sizes

    def shortened(self, sizes: Mapping[str, int], most: int) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
        """Axis lengths, the longest halved until operands and result have `most` elements together; and the operands' shapes then."""
        sizes = dict(sizes)
        while sum(math.prod(sizes[x] for x in axes) for axes in (*self.letters.values(), self.result)) > most:
            longest = max(sizes, key=sizes.__getitem__)
            sizes[longest] = -(-sizes[longest] // 2)
        return sizes, {slot: tuple(sizes[x] for x in axes) for slot, axes in self.letters.items()}

    def rule(self, call: Call, unable: str) -> ImplementationChoice:
        for name, impl in self.implementations.items() if call.role == "call" else ():
            if name != "xla" and impl.refuses(call.shapes, call.device, **call.attrs) is None:
                return ImplementationChoice(name, ChoiceKind.CHOSEN, "the first of the pass's own that can run here")
        return ImplementationChoice("xla", ChoiceKind.SAME_CODE, "XLA's code for the op's meaning")

    def is_what_xla_runs(self, name: str, /, **attrs: Any) -> bool:
        return name == "xla" and self.same_code

    def formula(self, **attrs: Any) -> str:
        numbers = ", ".join(f"{s} = {attrs[s]:.6g}" for s in self.scalars if attrs.get(s) is not None)
        return f"{self._formula}, {numbers}" if numbers else self._formula

    def in_float64(self, operands: Mapping[str, np.ndarray], attrs: Mapping[str, Any]) -> np.ndarray:
        """The meaning of these operands, in float64."""
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands.values()]
        closed = jax.make_jaxpr(self._of(self.slots, {}, attrs))(*shapes)
        return evaluate(closed, [np.asarray(a, np.float64) for a in operands.values()])[0]


def _products_in(attrs: Mapping[str, Any]) -> Any:
    """Around a function of the user's: its products that ask for no precision are computed in that of the call."""
    asked = attrs.get(PRECISION)
    return contextlib.nullcontext() if asked is None else jax.default_matmul_precision(asked)


class _Kernel:
    """How an op runs by a kernel: its launch, and what it cannot or must not run."""

    def __init__(self, op: PatternOp, kernel: CudaKernel) -> None:
        self.op, self.kernel = op, kernel
        self._tried: dict[Any, str | None] = {}

    def plan(self, shapes: Mapping[str, Sequence[int]], dtype: str, attrs: Mapping[str, Any]) -> KernelPlan:
        kernel, op, sizes = self.kernel, self.op, self.op.sizes(shapes)
        count = len(op.slots)
        params = [*(("operand", i) for i in range(count)), ("result", 0), *(("i64", n) for n in sizes.values())]
        params += [_scalar(x, dtype) for x in op.numbers(attrs)]
        entry = kernel.entry or op.name
        blocks = (self.blocks(sizes), 1, 1)
        start = Launch(entry, blocks, (kernel.threads, 1, 1), kernel.shared, tuple(params))
        return KernelPlan(f"{op.name}.cu", (), (start,), _HEADERS.format(_STORAGE[dtype]) + kernel.source)

    def blocks(self, sizes: Mapping[str, int]) -> int:
        if self.kernel.blocks is not None:
            return int(self.kernel.blocks(**sizes))
        return -(-math.prod(sizes[x] for x in self.op.result) // self.kernel.threads)

    def forward(self, *, residuals: bool, **given: Any) -> list[Array]:
        operands = {slot: given[slot] for slot in self.op.slots}
        shapes = {slot: a.shape for slot, a in operands.items()}
        sizes, dtype = self.op.sizes(shapes), next(iter(operands.values())).dtype
        out = jax.ShapeDtypeStruct(tuple(sizes[x] for x in self.op.result), dtype)
        if not math.prod(out.shape):
            return [jnp.zeros(out.shape, dtype)]
        return launch(self.plan(shapes, jnp.dtype(dtype).name, given), list(operands.values()), [out])

    def refuses(self, shapes: Mapping[str, Any], device: Device, **attrs: Any) -> str | None:
        dtype = jnp.dtype(next(iter(shapes.values())).dtype).name
        if dtype not in self.kernel.dtypes:
            return f"the operands are {dtype}, the kernel is written for {', '.join(self.kernel.dtypes)}"
        known = {slot: shapes[slot].shape for slot in self.op.slots}
        sizes = self.op.sizes(known)
        if not 0 < (blocks := self.blocks(sizes)) <= _BLOCKS:
            return f"it would take {blocks} blocks, at most {_BLOCKS} can be launched"
        if device.arch and (unable := self.plan(known, dtype, attrs).refuses(device.arch)):
            return unable
        if device.simulated or device.platform != Device.current().platform:
            return None
        key = tuple(sizes.items()), dtype, tuple(self.op.numbers(attrs)), device.arch
        if key not in self._tried:
            self._tried[key] = self._wrong(sizes, dtype, attrs)
        return self._tried[key]

    def _wrong(self, sizes: Mapping[str, int], dtype: str, attrs: Mapping[str, Any]) -> str | None:
        """The error in the kernel's values at these axis lengths, on random numbers of several sizes; None if they are right."""
        lengths, shapes = self.op.shortened(sizes, _TRIED)
        at = ", ".join(f"{x} = {n}" for x, n in lengths.items())
        try:
            # It is asked while a program is traced, where JAX would otherwise record the calls instead of running them.
            wrong = on_one_device(lambda: self._wrong_at(shapes, dtype, attrs))
        # An error of the FFI call, as of a launch that CUDA refuses, reaches Python as a JaxRuntimeError.
        except (jax.errors.JaxRuntimeError, BackendError, CompileError, MissingDependencyError) as error:
            return f"the kernel does not run: {error}"
        except CannotEvaluate as error:
            return f"what it computes cannot be checked here: {error}"
        return f"{wrong} at {at}" if wrong else None

    def _wrong_at(self, shapes: Mapping[str, tuple[int, ...]], dtype: str, attrs: Mapping[str, Any]) -> str | None:
        op, numbers = self.op, dict(zip(self.op.scalars, self.op.numbers(attrs), strict=True))
        rng = np.random.default_rng(0)
        run = jax.jit(lambda given: self.forward(residuals=False, **given, **numbers)[0])
        plain = jax.jit(lambda given: op.reference(*given.values(), **numbers))
        for size in _MAGNITUDES:
            # float16 holds numbers up to 65504.
            operands = {
                slot: jnp.asarray(np.clip(size * rng.normal(size=shape), -3e4, 3e4), dtype)
                for slot, shape in shapes.items()
            }
            known = {slot: np.array(a) for slot, a in operands.items()}
            got = np.asarray(run(operands), np.float64)
            # The kernel is given the operands' own buffers, which XLA takes to stay as they are.
            if any(np.asarray(a).tobytes() != known[slot].tobytes() for slot, a in operands.items()):
                return "it writes to its operands"
            true, now = op.in_float64(known, numbers), np.asarray(plain(operands), np.float64)
            if wrong := _differs(true, now, got, dtype, size):
                return f"{wrong},"
        return None


def _differs(true: np.ndarray, now: np.ndarray, got: np.ndarray, dtype: str, size: float) -> str | None:
    """The error in a kernel's values, where the meaning makes numbers: `true` in float64, `now` in the kernel's dtype."""
    scale, held = f"of numbers as large as {size:g}", np.isfinite(now) & np.isfinite(true)
    if (bad := held & ~np.isfinite(got)).any():
        return f"it gives {got[bad][0]} {scale}, where the op's meaning gives a number"
    true, now, got = (np.where(held, a, 0.0) for a in (true, now, got))
    # What the meaning itself loses in this dtype a kernel may lose as well.
    allowed = _TOLERANCE[dtype] + (0.0 if size == 1 else _WORSE * relative_error(true, now))
    error = relative_error(true, got)
    if error <= allowed:
        return None
    return f"its values differ from the op's meaning by {error:.2g} relative {scale} (allowed {allowed:.0e})"


def _scalar(value: float, dtype: str) -> tuple[str, int]:
    """A number as the eight or four bytes that a kernel reads it from."""
    if dtype == "float64":
        return "i64", struct.unpack("=q", struct.pack("=d", value))[0]
    return "i32", struct.unpack("=i", struct.pack("=f", value))[0]
