"""The verb `tune`: measures the fastest implementation of each fused call, and writes it to the plan file that `fuse` reads."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import float0
from jax.extend import core as jex_core

from ..device import Device
from ..errors import ArgumentError
from ..fusers.strategy import select
from ..graph.calls.binding import as_tuple
from ..kernels.choose.choices import CHOICES, Measured, merge, plan_file, write
from ..kernels.choose.plan_files import read_sets
from ..kernels.op.chooser import all_to_measure
from ..output import check_file
from ..progress import Progress, Stages, watched
from ..tracebacks import own_lines_hidden
from . import lab
from .fused import find_with_notes

if TYPE_CHECKING:
    from ..evidence.tuning import TunedCall, Tuning
    from ..kernels.choose.tuned import Tuned


@own_lines_hidden
def tune(
    fn: Callable,
    *args: Any,
    passes: lab.Passes = None,
    grad: bool = True,
    path: Any = None,
    budget_s: float | None = None,
    again: bool = False,
    progress: Progress = False,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    **kwargs: Any,
) -> Tuned:
    """Measures the rivals of every fused op in `fn` on this process's CUDA device, and adds the result to a plan file.

    Nothing else measures: `fuse` looks calls up in the plan file, then in the table shipped for the architecture. Programs that are
    already compiled keep their implementations. The calls with the most time at stake come first: their time by the roofline, as often as
    they occur in a step. Each is written to the file as soon as it is measured, so that an interrupt loses one call at most, and calls
    that the file has for this card, driver and libraries are not measured again. In a program of several processes, all must call it:
    process 0 measures, and all use its plan file from then on, as after `share_plan`.

    Args:
      fn: the function, or one that `fuse` returned.
      *args, **kwargs: arrays or `jax.ShapeDtypeStruct`s; only shapes and dtypes matter, as each call is timed on random data.
      passes: as for `fuse`; None takes all, those that run whole layers included.
      grad: also the backward calls of `fn`'s gradient; a train step, already differentiated, contains its own.
      path: the plan file; None takes `$FUSIONLAB_PLAN_FILE` or `~/.cache/fusionlab/plans.json`, where `fuse` looks.
      budget_s: seconds for all of it, search and compilation included; no call is begun that may not end in time. None: no limit; 0
        measures nothing and lists what there is to measure.
      again: also measure what the file has for this card, driver and libraries.
      progress: False, True (a line with the time that it may yet take) or a function of (task, done, total).
      static_argnums, static_argnames: as in `jax.jit`.

    Returns:
      The measurements, and what the budget left; they print as a table. Without a CUDA device nothing is measured and nothing written.

    Raises:
      TraceError: `fn` does not trace. ArgumentError: `path` exists and is not a plan file (if it is None, such a file is moved
        aside with a warning), or `budget_s` is negative. OutputError: it cannot be written. OutOfMemoryError: the device has too little
        memory for each of the calls; those for which it has too little are else in `.too_large`.
    """
    if budget_s is not None and not budget_s >= 0:
        raise ArgumentError(f"budget_s: got {budget_s!r}, needed None or seconds, 0 or more")
    began = time.perf_counter()
    until = math.inf if budget_s is None else began + budget_s
    static = {"static_argnums": static_argnums, "static_argnames": static_argnames}
    target = plan_file() if path is None else Path(path)
    forms = functools.partial(_calls, fn, args, kwargs, passes, grad, static)
    with watched(progress) as told:
        tuning = _tuned(forms, target, path is None, until, again, told)
        return _result(tuning, target, time.perf_counter() - began)


def _tuned(
    calls_of: Callable[[Stages], Iterator[list[TunedCall]]],
    target: Path,
    rebuild: bool,
    until: float,
    again: bool,
    progress: Progress,
) -> Tuning:
    """The measurements of the calls, those of whole layers if there is time."""
    from ..evidence.tuning import Tuning

    device, tuning = Device.current(), Tuning(until=until)
    measures = device.platform == "cuda"
    try:
        groups = calls_of(Stages(progress))
        tuning.calls = next(groups)
        measures = measures and bool(tuning.calls)
        if measures and jax.process_index() == 0:
            tuning.known = _known(target, rebuild, device) if not again else Measured()
            check_file(target, None, folders=True)
            tuning.keep = functools.partial(write, target, device.arch, rebuild=rebuild)
            tuning.run(tuning.calls, progress)
            if time.perf_counter() < until:
                for calls in groups:
                    tuning.run(tuning.added(calls), progress)
    finally:  # whatever became of it, an interrupt too: the other processes wait here
        if measures:
            CHOICES.forget()
            CHOICES.share()
    return tuning


def _known(target: Path, rebuild: bool, device: Device) -> Measured:
    """What the file has for this card and these versions. A file of the user's that is wrong raises here, before minutes of measuring."""
    try:
        sets = read_sets(target, f"plan file {target}")
    except ArgumentError:
        if not rebuild:
            raise
        return Measured()
    here = Measured.here(device, {}, {}).origin
    return next((one for one in sets.get(device.arch, ()) if one.origin == here), Measured())


def _result(tuning: Tuning, target: Path, took_s: float) -> Tuned:
    from ..kernels.choose.tuned import Tuned, Untried

    device, found = Device.current(), tuning.measured
    left = tuple(Untried(call.case() or "", call.at_stake_s(device)) for call in tuning.left)
    large = tuple(Untried(call.case() or "", call.at_stake_s(device), str(why)) for call, why in tuning.too_large)
    left_s = tuning.left_s if left else None
    written = target if found.cases else None
    return Tuned(found, written, len(tuning.calls), device, tuning.before, left, took_s, left_s, large)


@own_lines_hidden
def merge_plans(paths: Iterable[Any], into: Any) -> Path:
    """Adds plan files to the plan file `into`, which may be new: those of several programs, or of several machines.

    Measurements of one card, driver and library versions become one set, in which the shorter time of each implementation counts, as
    interference only makes a measurement longer; the choices are made again by those times. Sets of other cards and versions are kept
    side by side. The order of the files makes no difference.

    Returns:
      The path of `into`.

    Raises:
      ArgumentError: one of the files does not exist, or is not a plan file; then nothing is written. OutputError: `into` cannot be written.
    """
    if isinstance(paths, str | Path):
        raise ArgumentError(f"paths: got {str(paths)!r}, needed several plan files: [{str(paths)!r}, ...]")
    return merge([Path(path) for path in paths], Path(into))


@own_lines_hidden
def share_plan() -> None:
    """Makes all processes of a program use process 0's plan file, as it is now, from here on; with one process it does nothing.

    All of them must compile the same code, so without this call, or `tune`, only the shipped tables decide there, and no plan file
    does. Call it in every process, before the first fused function is compiled and outside of `jax.jit`.

    Raises:
      ArgumentError: process 0's file exists and is not a plan file; raised in all processes. ProcessError: another process has
        ended, or makes different calls.
    """
    CHOICES.share()


def _calls(
    fn: Callable, args: tuple, kwargs: dict, passes: lab.Passes, grad: bool, static: dict[str, Any], stages: Stages
) -> Iterator[list[TunedCall]]:
    """The fused calls of a program and, unless it is differentiated already, of its gradient with respect to every float: first as all
    passes make them, and each pass alone that yielded sites to others; then those of the passes that have to be named, for whole layers.
    """
    plain, chosen = fn, select(lab._registry(), passes)
    if isinstance(fn, lab.Fused):
        static = {k: (*fn.asked[k], *as_tuple(v)) for k, v in static.items()}
        plain, chosen = fn.original, fn._options["passes"] if passes is None else chosen
    stages("tracing")
    graph = lab.trace(plain, *args, **static, **kwargs)
    stages("searching")
    found = _found(graph, chosen)
    lost = {r.pass_name for r in found.rejections if r.code == "overlap"}
    yield _calls_in([found, *(_found(graph, [one]) for one in chosen if one[0].name in lost)], grad)
    if passes is None and plain is fn:
        stages("searching whole layers")
        whole = [(p, {}) for p in lab._registry().values() if p.named_only]
        yield _calls_in([_found(graph, whole)], grad)


def _found(graph: Any, passes: list) -> Any:
    with all_to_measure():
        return find_with_notes(graph, passes, Device.current(), None)


def _calls_in(searches: Iterable[Any], grad: bool) -> list[TunedCall]:
    """The calls of several searches of one program, and those of which a search asks."""
    from ..evidence.tuning import asked_by_sites, together

    with all_to_measure():
        called = [_calls_of(found, grad) for found in searches]
        return together([*called, *map(asked_by_sites, called)])


def _calls_of(found: Any, grad: bool) -> list[TunedCall]:
    """The calls of a program with its sites fused, and of its gradient."""
    from ..evidence.tuning import calls_in, together

    closed = found.rewritten()
    forward = calls_in(closed.jaxpr)
    if not grad or not forward or any(call.primitive.role == "cotangent" for call in forward):
        return forward
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in closed.in_avals]
    backward = functools.partial(_pulled_back, jex_core.jaxpr_as_fun(closed))
    return together([forward, calls_in(jax.make_jaxpr(backward)(*shapes).jaxpr)])


def _pulled_back(fn: Callable, *values: Any) -> Any:
    out, back = jax.vjp(fn, *values)
    return out, back(jax.tree.map(_cotangent, out))


def _cotangent(out: Any) -> Any:
    return jnp.ones_like(out) if jnp.issubdtype(out.dtype, jnp.inexact) else np.zeros(out.shape, float0)
