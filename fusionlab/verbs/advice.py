"""The verb `advise`: edits of a program that no fusion makes, and options of the compiler, each tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..device import Device
from ..evidence.advice.tried import Advice, try_lints
from ..evidence.instruments.timing import check_effort
from ..fusers.lints.lint import Lint
from ..fusers.lints.rules import every_lint, lints_of_fused
from ..graph.program.graph import Graph
from ..graph.program.trace import bind_users
from ..progress import Cancel, Progress, Stages, watched
from ..tracebacks import own_lines_hidden
from . import lab
from .fused import Fused


@own_lines_hidden
def advise(
    fn: Callable,
    *args: Any,
    samples: int = 40,
    budget_s: float = 60.0,
    progress: Progress = False,
    cancel: Cancel | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    **kwargs: Any,
) -> Advice:
    """Tries the edit of every lint of a program (`find(...).lints`), and advises those that save more of its time than their rule asks
    for, a tenth or 3 %; on a CUDA device also some options of XLA's compiler, of which those are advised that save more than a hundredth.

    The edit is made in the traced program, so no source is changed. Original and edited program run in turns, each edit by itself;
    options that are advised are tried together as well.

    Args:
      fn: the function, such as a train step; one that `fuse` returned is advised as it is fused, with edits of the source made before.
      *args, **kwargs: arrays to run on.
      samples: of each program, per lint.
      budget_s: seconds for all timings together; compiling comes on top.
      progress: False, True (a line) or a function of (task, done, total).
      cancel: called between stages; once it returns True, the lints tried so far are returned.
      static_argnums, static_argnames: as in `jax.jit`.

    Returns:
      Each lint with the interval of what its edit saves, and what it costs in compile time and memory: `.given` has those that are
      advised, `.tried` all of them. Without a lint nothing is compiled.

    Raises:
      ArgumentError: shapes where arrays are needed. TraceError: `fn` does not trace. SideEffectError: it prints or calls back into Python.
      OutOfMemoryError: the device has too little memory for one of the programs.
    """
    check_effort(samples, budget_s)
    static = {"static_argnums": static_argnums, "static_argnames": static_argnames}
    with watched(progress) as told:
        stages = Stages(told, cancel)
        stages("tracing")
        graph = lab.trace(fn, *args, **static, **kwargs)
        call = bind_users(fn, args, kwargs, **static)
        return try_lints(graph, call, _lints(fn, graph, args, kwargs), samples, budget_s, stages)


def _lints(fn: Callable, graph: Graph, args: tuple, kwargs: dict[str, Any]) -> tuple[Lint, ...]:
    """The lints of a program; of a fused one also those that an edit before fusing is for."""
    before = fn.findings(*args, **kwargs).graph if isinstance(fn, Fused) else None
    if before is None or (before.in_tree, before.out_tree) != (graph.in_tree, graph.out_tree):
        return every_lint(graph, Device.current())
    return lints_of_fused(graph, before, fn.program_of, Device.current())
