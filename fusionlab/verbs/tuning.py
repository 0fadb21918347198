"""The verb `tune`: measures the fastest implementation of each fused call, and writes it to the plan file that `fuse` reads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import float0

from ..device import Device
from ..fusers.strategy import select
from ..graph.program.trace import bind_users
from ..kernels.choose.choices import CHOICES, Measured, plan_file, read_plan_file, write
from ..output import check_file
from ..progress import Progress, Stages, watched
from ..tracebacks import own_lines_hidden
from . import lab

if TYPE_CHECKING:
    from ..evidence.tuning import Tuned, TunedCall


@own_lines_hidden
def tune(
    fn: Callable,
    *args: Any,
    passes: lab.Passes = None,
    grad: bool = True,
    path: Any = None,
    progress: Progress = False,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    **kwargs: Any,
) -> Tuned:
    """Measures the rivals of every fused op in `fn` on this process's CUDA device, and adds the result to a plan file.

    Nothing else measures: `fuse` looks calls up in the plan file, then in the table shipped for the architecture. Programs that are
    already compiled keep their implementations. In a program of several processes, all must call it: process 0 measures, and all
    use its plan file from then on, as after `share_plan`.

    Args:
      fn: the function, or one that `fuse` returned.
      *args, **kwargs: arrays or `jax.ShapeDtypeStruct`s; only shapes and dtypes matter, as each call is timed on random data.
      passes: as for `fuse`.
      grad: also the backward calls of `fn`'s gradient; a train step, already differentiated, contains its own.
      path: the plan file; None takes `$FUSIONLAB_PLAN_FILE` or `~/.cache/fusionlab/plans.json`, where `fuse` looks.
      progress: False, True (a line) or a function of (task, done, total).
      static_argnums, static_argnames: as in `jax.jit`.

    Returns:
      The measurements; they print as a table. Without a CUDA device nothing is measured and nothing written.

    Raises:
      TraceError: `fn` does not trace. ArgumentError: `path` exists and is not a plan file (if it is None, such a file is moved
        aside with a warning). OutputError: it cannot be written. OutOfMemoryError: the device has too little memory for a call.
    """
    fused = (
        fn
        if isinstance(fn, lab.Fused)
        else lab.fuse(fn, passes=_named(passes), static_argnums=static_argnums, static_argnames=static_argnames)
    )
    with watched(progress) as told:
        return _tuned(fused, args, kwargs, grad, path, told, static_argnums, static_argnames)


def _tuned(
    fused: lab.Fused,
    args: tuple,
    kwargs: dict,
    grad: bool,
    path: Any,
    progress: Progress,
    static_argnums: Any,
    static_argnames: Any,
) -> Tuned:
    from ..evidence.tuning import Tuned, tune_calls

    device, found = Device.current(), Measured()
    target = plan_file() if path is None else Path(path)
    measures = device.platform == "cuda"
    try:
        # Traced alone first: an error of the function's own is told as one.
        Stages(progress)("tracing")
        lab.trace(fused.original, *args, static_argnums=static_argnums, static_argnames=static_argnames, **kwargs)
        Stages(progress)("searching")
        calls = _calls(fused, args, kwargs, grad, static_argnums, static_argnames)
        measures = measures and bool(calls)
        if measures and jax.process_index() == 0:
            if path is not None:
                # What is wrong with a file of the user's is said before minutes of measuring.
                read_plan_file(target, "")
            check_file(target, None, folders=True)
            found = tune_calls(calls, progress)
            if found.cases:
                write(target, device.arch, found, rebuild=path is None)
    finally:  # whatever became of it, an interrupt too: the other processes wait here
        if measures:
            CHOICES.forget()
            CHOICES.share()
    return Tuned(found, target if found.cases else None, len(calls), device)


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


def _named(passes: lab.Passes) -> lab.Passes:
    """All by name where none are: what is left as it is because nothing was measured for it is measured, too."""
    return [p.name for p, _ in select(lab._registry(), None)] if passes is None else passes


def _calls(
    fused: Callable, args: tuple, kwargs: dict, grad: bool, static_argnums: Any, static_argnames: Any
) -> list[TunedCall]:
    """The fused calls of a program and, unless it is differentiated already, of its gradient with respect to every float."""
    from ..evidence.tuning import calls_in

    bound = bind_users(fused, args, kwargs, static_argnums, static_argnames)
    leaves, tree = jax.tree.flatten((bound.args, bound.kwargs))
    shapes = [jax.ShapeDtypeStruct(np.shape(a), jnp.result_type(a)) for a in leaves]

    def flat(*values: Any) -> Any:
        given, named = jax.tree.unflatten(tree, values)
        return bound.fn(*given, **named)

    forward = calls_in(jax.make_jaxpr(flat)(*shapes).jaxpr)
    if not grad or any(call.primitive.role == "cotangent" for call in forward):
        return forward
    return forward + calls_in(jax.make_jaxpr(functools.partial(_pulled_back, flat))(*shapes).jaxpr)


def _pulled_back(fn: Callable, *values: Any) -> Any:
    out, back = jax.vjp(fn, *values)
    return out, back(jax.tree.map(_cotangent, out))


def _cotangent(out: Any) -> Any:
    return jnp.ones_like(out) if jnp.issubdtype(out.dtype, jnp.inexact) else np.zeros(out.shape, float0)
