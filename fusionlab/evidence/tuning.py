"""Measures the rivals: the fastest implementation of each fused call of a program on this device.

Each call is measured alone, on random operands of its shapes. A call that keeps residuals and the backward call that reads them are decided
together where they share a setting (a mask kept in bits pays forward and gains backward).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

from fusionlab.device import Device
from fusionlab.kernels.choose.choices import CHOICES, Choice, Measured
from fusionlab.kernels.launch import cublaslt, plans
from fusionlab.kernels.launch import ffi_call as launch
from fusionlab.kernels.op.composite import CompositePrimitive
from fusionlab.kernels.op.primitive import FusedPrimitive
from fusionlab.progress import Progress, Stages, watched
from fusionlab.showing import Shown, Table, table_of

from .instruments.device_clock import time_on_device
from .instruments.out_of_memory import out_of_memory
from .instruments.record import environment

SAMPLES = 10
_SHARED = ("activation", "columns", "compute", "dtype", "inner", "op", "rows", "w", "x")
MIN_GAIN = 0.01  # of the time: less is no reason to leave XLA's own code


@dataclass(frozen=True)
class TunedCall:
    """One call of a fused primitive: `params` as sorted items, `shapes` by operand name."""

    primitive: FusedPrimitive
    params: tuple[tuple[str, Any], ...]
    shapes: tuple[tuple[str, jax.ShapeDtypeStruct], ...]

    def case(self, **changes: Any) -> str | None:
        """The text that identifies it in tables, with these settings changed."""
        attrs = dict(self.params) | changes
        return self.primitive.op.case(self.primitive.role, dict(self.shapes), **attrs)


@dataclass(frozen=True, repr=False)
class Tuned(Shown):
    """The result of `fusionlab.tune`; prints as a table.

    Attributes:
      measured: the cases with their choices, and cuBLASLt's algorithms.
      path: the plan file it was written to; None if there was nothing to measure.
      calls: how many calls of fused ops the program has.
      device: the measured device.
    """

    measured: Measured
    path: Path | None
    calls: int
    device: Device

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able; the cases as in the plan file."""
        path = None if self.path is None else str(self.path)
        return self.measured.to_dict() | {"device": str(self.device), "path": path, "calls": self.calls}

    def _table(self) -> Table:
        cases = self.measured.cases.items()
        return table_of({"call": _case_text(text), **choice._row()} for text, choice in cases)

    def __str__(self) -> str:
        if self.path is None:
            why = "each has only one implementation there" if self.calls else "there is nothing to choose"
            return f"tune: {self.calls} calls of fused ops on {self.device}; {why}, nothing measured, nothing written"
        lines = [f"tune: {len(self.measured.cases)} cases on {self.device}, written to {self.path}"]
        lines += [f"  {_case_text(text)}: {_with_times(choice)}" for text, choice in self.measured.cases.items()]
        return "\n".join(lines)

    __repr__ = __str__


def _case_text(text: str) -> str:
    """A case for a reader: the op, its sizes, its options."""
    c = json.loads(text)
    op, role = c.pop("op"), {"call": "forward", "cotangent": "backward"}[c.pop("role")]
    role += ", keeping residuals" if c.pop("residuals", False) else ""
    if op == "gemm_epilogue":
        shape = "x".join(str(c[k]) for k in ("rows", "inner", "columns"))
        return f"{op} {c['activation']} {shape} {c['dtype']} {role}" + (", mask in bits" if c["packed"] else "")
    settings = (f"{k} {_value_text(v)}" for k, v in c.items() if v is not False)
    return f"{op} {', '.join(settings)}, {role}"


def _value_text(value: Any) -> str:
    """A setting for a reader: a list of numbers as sizes."""
    if not isinstance(value, list):
        return str(value)
    return (" " if all(isinstance(item, str) for item in value) else "x").join(map(str, value))


def _with_times(choice: Choice) -> str:
    times = ", ".join(f"{n} {t:.4g} µs" for n, t in sorted(choice.times_us.items(), key=lambda i: i[1]))
    return f"{choice.implementation} ({times})"


@dataclass(frozen=True)
class Rivals:
    """Device microseconds (medians) of each implementation of one call, for each variant of its settings."""

    call: TunedCall
    times_us: tuple[tuple[dict[str, Any], dict[str, float]], ...]


def calls_in(jaxpr: Any) -> list[TunedCall]:
    """The calls of fused primitives in a jaxpr and its inner ones whose implementation is left open, each once."""
    found: dict[Any, TunedCall] = {}
    for eqn in _equations(jaxpr):
        primitive = eqn.primitive
        if not isinstance(primitive, FusedPrimitive) or eqn.params.get("implementation") is not None:
            continue
        names = primitive.operand_names(eqn.params)
        shapes = tuple(
            (n, jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)) for n, v in zip(names, eqn.invars, strict=True)
        )
        call = TunedCall(primitive, tuple(sorted(eqn.params.items())), shapes)
        if (text := call.case()) is not None:
            found.setdefault(text, call)
    return list(found.values())


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        if isinstance(eqn.primitive, CompositePrimitive):  # what it will run
            yield from _inner(eqn.primitive.pieces(eqn.params, [v.aval for v in eqn.invars]))
        elif not isinstance(eqn.primitive, FusedPrimitive):
            for value in eqn.params.values():
                yield from _inner(value)


def _inner(value: Any) -> Iterator[Any]:
    if isinstance(value, jex_core.ClosedJaxpr):
        yield from _equations(value.jaxpr)
    elif isinstance(value, jex_core.Jaxpr):
        yield from _equations(value)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _inner(item)


def tune_calls(calls: Sequence[TunedCall], progress: Progress = False, samples: int = SAMPLES) -> Measured:
    """Measures the rivals of each call on the current CUDA device; calls with one implementation are left out."""
    device = Device.current()
    measured = []
    try:
        with watched(progress) as told:
            tuning = Stages(told)("tuning", len(calls))
            for call in calls:
                with out_of_memory(f"tuning {call.primitive.op.name} {call.primitive.role}"):
                    rivals = _rivals(call, device, samples)
                if rivals is not None:
                    measured.append(rivals)
                tuning.step()
        algorithms = dict(CHOICES.trial)
    finally:
        CHOICES.trial.clear()  # cancelled or not, what was on trial decides nothing from here on
    here = environment()
    return Measured(dict(_decided(measured)), algorithms, here.hardware, here.versions)


def _rivals(call: TunedCall, device: Device, samples: int) -> Rivals | None:
    variants = list(_variants(call, device))
    if all(names == ["xla"] for *_, names in variants):
        return None
    times = []
    for change, params, shapes, names in variants:
        operands = _operands(shapes.values())
        functions = {n: functools.partial(call.primitive.function, params, n, device) for n in names}
        if "cublaslt" in functions:
            _try_algorithms(functions["cublaslt"](), operands, samples)
        programs = {n: _program(f(), operands) for n, f in functions.items()}
        timed = time_on_device(programs, samples=samples)
        times.append((change, {n: t.median_s * 1e6 for n, t in timed.items()}))
    return Rivals(call, tuple(times))


def _variants(
    call: TunedCall, device: Device
) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[str]]]:
    """Each change of a call's settings: the change, the parameters, the operands' shapes, and the implementations that can run it."""
    op, role = call.primitive.op, call.primitive.role
    for change in op.variants(role, **dict(call.params)):
        params = dict(call.params) | change
        shapes = op.operand_shapes(dict(call.shapes), **params)
        names = [n for n, impl in op.implementations.items() if not impl.refuses(shapes, device, role=role, **params)]
        yield change, params, shapes, names


def _program(function: Any, operands: Sequence[Any]) -> Any:
    compiled = jax.jit(function).lower(*operands).compile()
    return functools.partial(compiled, *operands)


def _operands(shapes: Iterable[Any]) -> list[Any]:
    key = jax.random.key(0)
    arrays = []
    for i, s in enumerate(shapes):
        draw_key = jax.random.fold_in(key, i)
        if jnp.issubdtype(s.dtype, jnp.floating):
            arrays.append(jax.random.normal(draw_key, s.shape, jnp.float32).astype(s.dtype))
        elif s.dtype == jnp.bool_:
            arrays.append(jax.random.bernoulli(draw_key, 0.5, s.shape))
        else:
            arrays.append(jax.random.randint(draw_key, s.shape, 0, 2 if s.dtype == jnp.int8 else 127).astype(s.dtype))
    return jax.block_until_ready(arrays)


def _try_algorithms(function: Any, operands: Sequence[Any], samples: int) -> None:
    """The quickest of the algorithms that cuBLASLt's heuristic proposes for each product of a call, kept in `CHOICES.trial`."""
    traced = jax.make_jaxpr(function)(*operands)
    for eqn in _equations(traced.jaxpr):
        plan = _cublaslt_plan(eqn)
        if plan is None or (name := plans.plan_name(plan.with_algorithm("", 0))) in CHOICES.trial:
            continue
        plan = plan.with_algorithm("", 0)
        given = _operands([v.aval for v in eqn.invars])
        results = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
        version = cublaslt.version()
        programs = {
            algorithm: _program(functools.partial(_launch, plan.with_algorithm(algorithm, version), results), given)
            for algorithm in cublaslt.algorithms(plan, jax.local_devices(backend="cuda")[0].local_hardware_id)
        }
        timed = time_on_device(programs, samples=max(4, samples // 2))
        CHOICES.trial[name] = (min(timed, key=lambda a: timed[a].median_s), version)


def _launch(plan: Any, results: Sequence[Any], *operands: Any) -> list[Any]:
    return launch.launch(plan, operands, results)


def _cublaslt_plan(eqn: Any) -> Any:
    """The cuBLASLt plan that an equation launches, if it does."""
    targets = launch.TARGET, launch.RECORDING_TARGET
    if eqn.primitive.name != "ffi_call" or eqn.params.get("target_name") not in targets:
        return None
    attributes = dict(eqn.params["attributes"])
    plan = plans.launch_plan_of(str(attributes["plan"]))
    return plan if isinstance(plan, cublaslt.MatmulPlan) else None


def _decided(measured: Sequence[Rivals]) -> Iterator[tuple[str, Choice]]:
    """The best implementation for each call and variant, and the variant that is best for all calls that share it."""
    groups: dict[str, list[Rivals]] = {}
    for rivals in measured:
        content = json.loads(rivals.call.case() or "{}")
        alone = content["role"] == "call" and not content.get("residuals")
        key = json.dumps([content[k] for k in _SHARED if k in content] + [alone])
        groups.setdefault(key, []).append(rivals)
    for group in groups.values():
        best = _best_variant(group)
        for rivals in group:
            for change, times in rivals.times_us:
                text = rivals.call.case(**change)
                if text is not None:
                    yield text, Choice(_quickest(times), times, best)


def _best_variant(group: Sequence[Rivals]) -> dict[str, Any]:
    """The settings with the least total time of a group's calls."""
    variants = [change for change, _ in group[0].times_us]
    totals = [
        sum(times[_quickest(times)] for rivals in group for change, times in rivals.times_us if change == v)
        for v in variants
    ]
    return variants[totals.index(min(totals))]


def _quickest(times: Mapping[str, float]) -> str:
    name = min(times, key=lambda n: times[n])
    return "xla" if times["xla"] <= times[name] * (1 + MIN_GAIN) else name
