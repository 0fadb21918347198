"""Measures the rivals: the fastest implementation of each fused call of a program on this device.

Each call is measured alone, on random operands of its shapes, the one with the most time at stake first: its time by the roofline, as
often as it occurs. A call that keeps residuals and the backward call that reads them are decided together where they share a setting (a
mask kept in bits pays forward and gains backward).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend import core as jex_core

from fusionlab.device import Device
from fusionlab.errors import OutOfMemoryError
from fusionlab.kernels.choose.choices import CHOICES, Choice, Measured
from fusionlab.kernels.choose.plan_files import quickest
from fusionlab.kernels.launch import cublaslt, plans
from fusionlab.kernels.launch import ffi_call as launch
from fusionlab.kernels.op.composite import CompositePrimitive
from fusionlab.kernels.op.primitive import FusedPrimitive
from fusionlab.progress import Progress, Stages, watched

from .instruments.device_clock import time_on_device
from .instruments.out_of_memory import out_of_memory

SAMPLES = 10
PROGRAM_S = 0.46  # to compile and time one, before any was; the median case of four in the record matmul_schedule of an H200 took 1.84 s
_SHARED = ("activation", "columns", "compute", "dtype", "inner", "op", "rows", "w", "x")
_A_GPU = (1e12, 1e14)  # bytes and operations per second of a card that is not known: they only order the calls


@dataclass(frozen=True)
class TunedCall:
    """One call of a fused primitive: `params` as sorted items, `shapes` by operand name, and how often it occurs in a step."""

    primitive: FusedPrimitive
    params: tuple[tuple[str, Any], ...]
    shapes: tuple[tuple[str, jax.ShapeDtypeStruct], ...]
    times: int = 1

    def case(self, **changes: Any) -> str | None:
        """The text that identifies it in tables, with these settings changed."""
        attrs = dict(self.params) | changes
        return self.primitive.op.case(self.primitive.role, dict(self.shapes), **attrs)

    def at_stake_s(self, device: Device) -> float:
        """Seconds by the roofline in all its occurrences: of its operands and results moved once, or of its operations."""
        avals, params = [s for _, s in self.shapes], dict(self.params)
        results = self.primitive.types(list(map(_aval, avals)), params)
        moved = sum(math.prod(a.shape) * getattr(a.dtype, "itemsize", 4) for a in (*avals, *results))
        bytes_per_s, flop_per_s = device.at_most or _A_GPU
        operations = self.primitive.arithmetic(params, avals)[0]
        return self.times * max(moved / bytes_per_s, operations / flop_per_s)


def _aval(shape: jax.ShapeDtypeStruct) -> Any:
    return ShapedArray(shape.shape, shape.dtype)


@dataclass(frozen=True)
class Rivals:
    """Device microseconds (medians) of each implementation of one call, for each variant of its settings; `samples_us`: those that
    the medians are of, for each variant likewise."""

    call: TunedCall
    times_us: tuple[tuple[dict[str, Any], dict[str, float]], ...]
    samples_us: tuple[Mapping[str, tuple[float, ...]], ...]


# The calls of a program ----------------------------------------------------------------------------------------------


def calls_in(jaxpr: Any) -> list[TunedCall]:
    """The calls of fused primitives in a jaxpr and its inner ones whose implementation is left open, each once, with how often each
    occurs: in each trip of a scan, once in a while loop and in each branch.
    """
    found: dict[Any, TunedCall] = {}
    for eqn, trips in _equations(jaxpr):
        primitive = eqn.primitive
        if not isinstance(primitive, FusedPrimitive) or eqn.params.get("implementation") is not None:
            continue
        if primitive.role == "tangent":  # forward mode has one implementation
            continue
        names = primitive.operand_names(eqn.params)
        shapes = tuple(
            (n, jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)) for n, v in zip(names, eqn.invars, strict=True)
        )
        call = TunedCall(primitive, tuple(sorted(eqn.params.items())), shapes, trips)
        if (text := call.case()) is not None:
            same = found.setdefault(text, dataclasses.replace(call, times=0))
            found[text] = dataclasses.replace(same, times=same.times + trips)
    return list(found.values())


def together(programs: Iterable[Sequence[TunedCall]]) -> list[TunedCall]:
    """The calls of several forms of one program, each once, as often as it occurs at most in one of them."""
    found: dict[str | None, TunedCall] = {}
    for call in (call for calls in programs for call in calls):
        same = found.setdefault(call.case(), call)
        if call.times > same.times:
            found[call.case()] = call
    return list(found.values())


def asked_by_sites(calls: Sequence[TunedCall]) -> list[TunedCall]:
    """The calls of which a search asks for the sites that have these, whatever the program has: the forward call alone and, where the op
    has a say in whether a site is fused, the one that keeps residuals with every gradient. They occur in no step.
    """
    found = []
    for call in calls:
        if call.primitive.role != "call" or isinstance(call.primitive, CompositePrimitive):
            continue
        params = dict(call.params) | {"residuals": False}
        found.append(dataclasses.replace(call, params=tuple(sorted(params.items())), times=0))
        if call.primitive.op.at_site:
            traced = jax.make_jaxpr(functools.partial(_every_gradient, call.primitive, params))(
                *dict(call.shapes).values()
            )
            found += [dataclasses.replace(one, times=0) for one in calls_in(traced.jaxpr)]
    return found


def _every_gradient(primitive: FusedPrimitive, params: Mapping[str, Any], *operands: Any) -> Any:
    moving = {i: a for i, a in enumerate(operands) if jnp.issubdtype(a.dtype, jnp.floating)}

    def of(moved: Mapping[int, Any]) -> list[Any]:
        given = [moved.get(i, a) for i, a in enumerate(operands)]
        return [out for out in primitive.bind(*given, **params) if jnp.issubdtype(out.dtype, jnp.floating)]

    outs, back = jax.vjp(of, moving)
    return back(list(map(jnp.ones_like, outs)))


def _equations(jaxpr: Any, trips: int = 1) -> Iterator[tuple[Any, int]]:
    for eqn in jaxpr.eqns:
        yield eqn, trips
        if isinstance(eqn.primitive, CompositePrimitive):  # what it will run
            yield from _inner(eqn.primitive.pieces(eqn.params, [v.aval for v in eqn.invars]), trips)
        elif not isinstance(eqn.primitive, FusedPrimitive):
            inside = trips * int(eqn.params["length"]) if eqn.primitive.name == "scan" else trips
            for value in eqn.params.values():
                yield from _inner(value, inside)


def _inner(value: Any, trips: int) -> Iterator[tuple[Any, int]]:
    if isinstance(value, jex_core.ClosedJaxpr):
        yield from _equations(value.jaxpr, trips)
    elif isinstance(value, jex_core.Jaxpr):
        yield from _equations(value, trips)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _inner(item, trips)


# Measuring them ------------------------------------------------------------------------------------------------------


@dataclass
class Tuning:
    """The measurements of the calls of a program, as far as they got.

    Attributes:
      calls: all of them.
      samples: of each implementation.
      until: by `time.perf_counter`, when no further call is begun.
      known: what was measured before on this card with these versions: such calls are not measured again.
      keep: called with all measurements after each call.
      rivals: of the calls that were measured, now or before.
      left: the calls that were not measured as there was no time, the most time at stake first.
      too_large: the calls for which the device has too little memory, with the errors.
      before: how many of `rivals` were measured before.
      programs, spent_s: how many were compiled and timed, and the seconds that took.
    """

    calls: Sequence[TunedCall] = ()
    samples: int = SAMPLES
    until: float = math.inf
    known: Measured = field(default_factory=Measured)
    keep: Callable[[Measured], Any] = lambda measured: None
    rivals: list[Rivals] = field(default_factory=list)
    left: list[TunedCall] = field(default_factory=list)
    too_large: list[tuple[TunedCall, OutOfMemoryError]] = field(default_factory=list)
    before: int = 0
    programs: int = 0
    spent_s: float = 0.0

    @property
    def measured(self) -> Measured:
        """The choices by all measurements, those made before included."""
        algorithms = {**self.known.algorithms, **CHOICES.trial, **self._algorithms}
        return Measured.here(Device.current(), dict(_decided(self.rivals)), algorithms)

    _algorithms: dict[str, tuple[str, int]] = field(default_factory=dict)

    def added(self, calls: Sequence[TunedCall]) -> list[TunedCall]:
        """Takes further calls in; those of them that are new."""
        known = {call.case() for call in self.calls}
        new = [call for call in calls if call.case() not in known]
        self.calls = [*self.calls, *new]
        return new

    def run(self, calls: Sequence[TunedCall], progress: Progress = False) -> None:
        """Measures calls until all are measured or the time is over; interrupted, what was measured until then is kept."""
        if not calls:
            return
        device = Device.current()
        try:
            with watched(progress) as told:
                budget_s = max(0.0, self.until - time.perf_counter())
                todo = [call for call in _ordered(calls, device) if not self._is_known(call, device)]
                tuning = Stages(told)("tuning", len(todo), budget_s, self._estimate_s(todo, device))
                for call in todo:
                    self._measure_if_it_fits(call, device)
                    tuning.step()
            if self.too_large and not self.rivals:
                raise self.too_large[0][1]
        finally:
            self._algorithms |= CHOICES.trial
            CHOICES.trial.clear()  # cancelled or not, what was on trial decides nothing from here on

    def _is_known(self, call: TunedCall, device: Device) -> bool:
        """Whether there is nothing to measure of a call: no choice, or it was measured before, which is taken over."""
        if (known := _known_rivals(call, device, self.known)) is not None:
            self.rivals.append(known)
            self.before += 1
        return known is not None or not _programs(call, device)

    def _measure_if_it_fits(self, call: TunedCall, device: Device) -> None:
        """Measures a call; one for which the device has too little memory does not end the tuning of the others."""
        try:
            with out_of_memory(f"tuning {call.primitive.op.name} {call.primitive.role}"):
                self._measure(call, device)
        except OutOfMemoryError as error:
            self.too_large.append((call, error))

    def _measure(self, call: TunedCall, device: Device) -> None:
        began = time.perf_counter()
        if began >= self.until or began + self._expected_s(call, device) > self.until:
            self.left.append(call)
            return
        rivals = _rivals(call, device, self.samples)
        if rivals is not None:
            self.rivals.append(rivals)
            self.programs += sum(len(times) for _, times in rivals.times_us)
            self.spent_s += time.perf_counter() - began
            self.keep(self.measured)

    def _expected_s(self, call: TunedCall, device: Device) -> float:
        """Seconds that a call may take, by those before; 0 where there was none."""
        return self.spent_s / self.programs * _programs(call, device) if self.programs else 0.0

    def _estimate_s(self, calls: Sequence[TunedCall], device: Device) -> float:
        """Seconds that calls may take: by those before, or before the first by `PROGRAM_S`."""
        each_s = self.spent_s / self.programs if self.programs else PROGRAM_S
        return each_s * sum(_programs(call, device) for call in calls)

    @property
    def left_s(self) -> float:
        """Seconds that the rest may take."""
        return self._estimate_s(self.left, Device.current())


def _ordered(calls: Sequence[TunedCall], device: Device) -> Sequence[TunedCall]:
    """The most time at stake first; ops made of others last, as their pieces are to be decided by then."""
    if len(calls) < 2:
        return calls
    return sorted(calls, key=lambda c: (isinstance(c.primitive, CompositePrimitive), -c.at_stake_s(device)))


def _known_rivals(call: TunedCall, device: Device, known: Measured) -> Rivals | None:
    """A call's rivals as they were measured before; None where one of them was not."""
    if not known.cases:
        return None
    times, samples = [], []
    for change, _, _, names in _variants(call, device):
        choice = known.cases.get(call.case(**change) or "")
        if choice is None or not set(names) <= choice.times_us.keys():
            return None
        times.append((change, dict(choice.times_us)))
        samples.append(choice.samples_us)
    return Rivals(call, tuple(times), tuple(samples))


def _programs(call: TunedCall, device: Device) -> int:
    """How many programs measuring a call compiles; 0 where there is nothing to choose."""
    variants = [names for *_, names in _variants(call, device)]
    return sum(map(len, variants)) if any(_to_choose(call, names) for names in variants) else 0


def _to_choose(call: TunedCall, names: Sequence[str]) -> bool:
    """Whether there is more than XLA's code: of an op made of others more than its pieces, which are calls of their own."""
    pieces = {call.primitive.op.composed} if isinstance(call.primitive, CompositePrimitive) else set()
    return bool(set(names) - {"xla"} - pieces)


def _rivals(call: TunedCall, device: Device, samples: int) -> Rivals | None:
    variants = list(_variants(call, device))
    if not any(_to_choose(call, names) for *_, names in variants):
        return None
    times, taken = [], []
    for change, params, shapes, names in variants:
        given = dict(zip(shapes, _operands(shapes.values()), strict=True))
        operands = list(call.primitive.op.to_time(given, **params).values())
        functions = {n: functools.partial(call.primitive.function, params, n, device) for n in names}
        if "cublaslt" in functions:
            _try_algorithms(functions["cublaslt"](), operands, samples)
        programs = {n: _program(f(), operands) for n, f in functions.items()}
        timed = time_on_device(programs, samples=samples)
        times.append((change, {n: t.median_s * 1e6 for n, t in timed.items()}))
        taken.append({n: tuple(s * 1e6 for s in t.samples_s) for n, t in timed.items()})
    return Rivals(call, tuple(times), tuple(taken))


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
    for eqn, _ in _equations(traced.jaxpr):
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


# The choices ---------------------------------------------------------------------------------------------------------


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
            for (change, times), samples in zip(rivals.times_us, rivals.samples_us, strict=True):
                text = rivals.call.case(**change)
                if text is not None:
                    yield text, Choice(quickest(times), times, best, samples_us=samples)


def _best_variant(group: Sequence[Rivals]) -> dict[str, Any]:
    """The settings with the least total time of a group's calls."""
    variants = [change for change, _ in group[0].times_us]
    totals = [
        sum(times[quickest(times)] for rivals in group for change, times in rivals.times_us if change == v)
        for v in variants
    ]
    return variants[totals.index(min(totals))]
