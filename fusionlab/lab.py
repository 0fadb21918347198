"""The verbs: trace, find, fuse, compare, explore. Each ties rooms together in a few lines."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import core as jex_core

from .device import Device
from .errors import ArgumentError, unknown_name
from .evidence.comparison import measure
from .fusers import Candidate, Pass, Strategy, find_in, implementations, op_of, select, site_names
from .fusers import Findings as PlainFindings
from .fusers import registry as _registry
from .graph import ir
from .graph.trace import bind_static, trace_raw
from .graph.trace import trace as _trace
from .shown import Comparison as Comparison
from .shown import Findings as Findings
from .shown import Graph as Graph
from .shown import fields_of

Passes = Strategy | Iterable[str] | str | None


def _search(
    graph: ir.Graph, passes: Sequence[tuple[Pass, Any]], device: Device, implementation: str | None
) -> Findings:
    """`find_in`, with a note on what a named implementation leaves out."""
    found = find_in(graph, passes, device, implementation)
    notes: list[str] = []
    if implementation is not None:
        lack = [p.name for p, _ in passes if implementation not in op_of(p).implementations]
        if lack:
            notes.append(f"implementation={implementation!r}: nothing fused for {', '.join(lack)}, which lacks it")
        if not found.candidates:
            notes.append(f"implementation={implementation!r} runs nowhere: no site was found that has it")
    return Findings(**fields_of(found, notes=tuple(notes)))


def _not_swallowed(verb: str, fn: Any, options: Mapping[str, Any]) -> None:
    """Raises ArgumentError where an option given by keyword may have been meant for the user's function."""
    try:
        parameters = signature(fn).parameters if callable(fn) else {}
    except (TypeError, ValueError):
        return
    for name in (n for n, value in options.items() if value is not None and n in parameters):
        raise ArgumentError(
            f"{name}: got it by keyword, and it is an option of {verb} as well as a parameter of {_name(fn)}; needed one meaning: "
            f"give the parameter by position, or in a function of your own, lambda *args: {_name(fn)}(*args, {name}=...)"
        )


def trace(
    fn: Callable,
    *args: Any,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    **kwargs: Any,
) -> Graph:
    """Traces `fn` at these arguments (arrays or `jax.ShapeDtypeStruct`s, in any pytrees) without running it.

    Raises:
      TraceError: the function does not trace. ArgumentError: it is no function, or a static argument does not exist.
    """
    graph = _trace(fn, *args, static_argnums=static_argnums, static_argnames=static_argnames, **kwargs)
    return Graph(**fields_of(graph))


def find(
    fn: Callable | ir.Graph,
    *args: Any,
    passes: Passes = None,
    device: Device | str | None = None,
    implementation: str | None = None,
    dump: Any = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    **kwargs: Any,
) -> Findings:
    """Finds what could run fused, and says why the rest cannot.

    Args:
      fn: the function, or a Graph traced before (then no arguments).
      *args, **kwargs: example arguments, as for `trace`.
      passes: names, a Strategy, or None for all.
      device: what backends are judged for: None (this one), "cpu", "sm_90", or a Device.
      implementation: as in `fuse`.
      dump: a folder for the graph before and after each pass (see `fuse`).
      static_argnums, static_argnames: as in `jax.jit`.

    Raises:
      UnknownNameError: a pass, option or implementation that does not exist. TraceError, ArgumentError: as for `trace`, and where
        an option has the name of a parameter of `fn`.
    """
    _not_swallowed("find", fn, {"passes": passes, "device": device, "implementation": implementation, "dump": dump})
    chosen = select(_registry(), passes)
    check_implementation(implementation)
    where = Device.of(device)
    if isinstance(fn, ir.Graph):
        if args or kwargs:
            raise ArgumentError("find: got a Graph and arguments; a Graph is traced already, give it alone")
        graph = fn
    else:
        graph = trace(fn, *args, static_argnums=static_argnums, static_argnames=static_argnames, **kwargs)
    found = _search(graph, chosen, where, implementation)
    if dump is not None:
        from .dump import write_dump

        write_dump(dump, graph, chosen, where, implementation)
    return found


class Fused:
    """A function with its sites fused: same signature as the original, used like `jax.jit` of it.

    Composes with jit, grad, vmap, scan, remat and the rest. `findings(*args)` says what is fused for those arguments.
    """

    def __init__(self, fn: Callable, options: dict[str, Any]) -> None:
        functools.update_wrapper(self, fn, updated=())
        self._fn = fn
        self._options = options
        # jit infers the one from the other only where the other is not given at all.
        static = {k: options[k] for k in ("static_argnums", "static_argnames") if options[k] != ()}
        # Not inline: inlining a jit re-binds its equations without their source lines (jax 0.10 to 0.12).
        self._jitted = jax.jit(self._with_signature(), **static)
        self._plain = jax.jit(fn, **static)
        self._checked = False

    def _with_signature(self) -> Callable:
        """`_rewritten` with the original's signature, which jit needs to tell static arguments by position and by name."""

        @functools.wraps(self._fn)
        def rewritten(*args: Any, **kwargs: Any) -> Any:
            return self._rewritten(*args, **kwargs)

        return rewritten

    def _rewritten(self, *args: Any, **kwargs: Any) -> Any:
        o = self._options
        graph = trace_raw(self._fn, args, kwargs, o["static_argnums"], o["static_argnames"])
        device = Device.current()
        found = find_in(graph, o["passes"], device, o["implementation"])
        if o["dump"] is not None:
            from .dump import write_dump

            write_dump(o["dump"], graph, o["passes"], device, o["implementation"])
        _, dyn_args, dyn_kwargs = bind_static(self._fn, args, kwargs, o["static_argnums"], o["static_argnames"])
        flat = jax.tree.leaves((dyn_args, dyn_kwargs))
        closed = found.rewritten(o["only"], [s for s in o["skip"] if _known(found, s)])
        return jax.tree.unflatten(graph.out_tree, jex_core.jaxpr_as_fun(closed)(*flat))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._options["check"] and not _traced(args, kwargs):
            self._check(args, kwargs)
        return self._jitted(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def _check(self, args: tuple, kwargs: dict) -> None:
        from .evidence.check import check_same

        check_same(self._plain(*args, **kwargs), self._jitted(*args, **kwargs), _name(self._fn))

    def findings(self, *args: Any, **kwargs: Any) -> Findings:
        """What is found, and fused unless skipped, for these arguments."""
        o = self._options
        graph = trace(
            self._fn, *args, static_argnums=o["static_argnums"], static_argnames=o["static_argnames"], **kwargs
        )
        return _search(graph, o["passes"], Device.current(), o["implementation"])

    def selected(self, *args: Any, **kwargs: Any) -> tuple[Findings, tuple[Candidate, ...]]:
        """What is found for these arguments, and which of it is fused: all but what `skip` and `only` leave out."""
        found = self.findings(*args, **kwargs)
        return found, found.select(self._options["only"], [s for s in self._options["skip"] if _known(found, s)])

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(fn).lower`."""
        return self._jitted.lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(fn).trace`."""
        return self._jitted.trace(*args, **kwargs)

    def __repr__(self) -> str:
        names = ", ".join(p.name for p, _ in self._options["passes"])
        return f"<fused {_name(self._fn)}: {names}>"


def _name(fn: Callable) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _known(found: PlainFindings, name: str) -> bool:
    return (
        name in found.passes
        or any(c.id == name for c in found.candidates)
        or any(r.id == name for r in found.rejections)
    )


def _traced(args: tuple, kwargs: dict) -> bool:
    return any(isinstance(x, Tracer) for x in jax.tree.leaves((args, kwargs)))


def fuse(
    fn: Callable | None = None,
    *,
    passes: Passes = None,
    skip: Iterable[str] | str = (),
    only: Iterable[str] | str | None = None,
    implementation: str | None = None,
    check: bool = False,
    dump: Any = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
) -> Any:
    """`fn` with every found site replaced by its fused op; also a decorator.

    Args:
      fn: the function, as for `jax.jit`.
      passes: names, a Strategy, or None for all.
      skip: a site id or pass name, or several, to leave as they are; ids that do not occur for some arguments are ignored there.
      only: a site id or pass name, or several, to fuse, and nothing else.
      implementation: None lets each op choose; a name ("xla", "xla_blockwise") runs that one or raises.
      check: on concrete calls, run the original too and raise RewriteError where results differ beyond tolerance.
      dump: a folder that receives `NN_<pass>.before/after.txt/.dot/.svg` and `report.json` per pass, when traced.
      static_argnums, static_argnames: as in `jax.jit`.

    Raises:
      UnknownNameError: a pass, option or implementation that does not exist, or a name in `skip` or `only` that is neither a pass
        nor the id of a site. Errors of `fn` itself come through unchanged.
    """
    if fn is None:
        given = {k: v for k, v in locals().items() if k != "fn"}
        return functools.partial(fuse, **given)
    if not callable(fn):
        raise ArgumentError(f"fuse: got {type(fn).__name__}, needed a function that takes and returns arrays")
    chosen = select(_registry(), passes)
    check_implementation(implementation)
    options = {
        "passes": chosen,
        "skip": site_names(skip, _registry(), "skip"),
        "only": None if only is None else site_names(only, _registry(), "only"),
        "implementation": implementation,
        "check": check,
        "dump": dump,
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
    }
    return Fused(fn, options)


def check_implementation(name: str | None) -> None:
    """Raises UnknownNameError for a name that no fused op has."""
    valid = {i for names in implementations().values() for i in names}
    if name is not None and name not in valid:
        raise unknown_name("implementation", name, valid)


def compare(fn: Callable, fused: Callable, *args: Any, grad: bool = True, **options: Any) -> Comparison:
    """Timing, memory and errors of `fn` (jitted) against `fused`, forward and (with `grad`) gradient.

    Where every site runs what XLA runs anyway and both versions compile to the same instructions, nothing is timed.
    On a GPU times are device time, elsewhere (and on several devices, or without CuPy) wall time; each timing's `clock` says which.

    Args:
      fn, fused: the original and the version to judge.
      *args: arrays to run on.
      grad: also compare gradients, and time value-and-gradient.
      **options: argnums, samples, budget_s, donate_argnums, static_argnums, static_argnames, timing, numerics, memory, progress and
        cancel, as for `fusionlab.evidence.comparison.measure`; the rest are keyword arguments of the functions. Static arguments
        that are not named here are those that `fused` was made with.

    Raises:
      ArgumentError: shapes where arrays are needed, an option with the name of a parameter of `fn`, or an argument that is no array
        and was not named as static. SideEffectError: the function has callbacks or prints. TraceError: it does not trace.
    """
    own = signature(measure).parameters
    kwargs = {k: v for k, v in options.items() if k not in own}
    _not_swallowed("compare", fn, {k: v for k, v in options.items() if k in own})
    if not isinstance(fused, Fused):
        return Comparison(**fields_of(measure(fn, fused, *args, grad=grad, **options)))
    options = {k: fused._options[k] for k in ("static_argnums", "static_argnames")} | options
    found, fusing = fused.selected(*args, **kwargs)
    options.setdefault("same_code", all(c.same_code for c in fusing))
    evidence = measure(fn, fused, *args, grad=grad, **options)
    return Comparison(**fields_of(evidence, notes=(*evidence.notes, *found.notes)))


def passes() -> Any:
    """Every pass: formula, needs, options; in a notebook with a before/after picture each."""
    from .catalogue import Catalogue

    return Catalogue(tuple(_registry().values()))


def register(pass_: Pass) -> None:
    """Adds a pass of your own (as `pattern_pass` makes one) to those `passes=None` asks.

    Raises:
      ArgumentError: a pass of that name exists, or it lacks what a pass needs.
    """
    from .fusers import add_pass

    add_pass(pass_)


def unregister(pass_: Pass | str) -> None:
    """Takes a pass of your own away again, by itself or by its name. Functions that were fused with it stay as they are.

    Raises:
      ArgumentError: it is built in. UnknownNameError: no pass has that name.
    """
    from .fusers import remove_pass

    remove_pass(pass_ if isinstance(pass_, str) else pass_.name)


def explore(
    fn: Callable,
    *args: Any,
    passes: Passes = None,
    device: Device | str | None = None,
    implementation: str | None = None,
    measure: bool = False,
    budget_s: float = 20.0,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    **kwargs: Any,
) -> Any:
    """The widget: tick passes, options and sites, see graph, time and error. Measures nothing until asked.

    Args:
      fn: the function, as for `find`.
      *args, **kwargs: its arguments; arrays where anything is to be measured.
      passes, device, implementation: as for `find`.
      measure: start measuring at once, in the background, as a press of Measure does.
      budget_s: seconds of timing in one measurement; compiling, and errors against float64, come on top.
      static_argnums, static_argnames: as in `jax.jit`.

    Returns:
      A `fusionlab.viz.widget.Explorer`. Everything that can be clicked can be called: `lab.toggles["gemm_epilogue"] = False`,
      `lab.select("%143")`, `lab.measure()`, `lab.undo()`, `lab.code()`, `lab.save("x.html")`.

    Raises:
      As `find`; ArgumentError also for a budget that is no number of seconds above 0.
    """
    from .explorer import make_explorer

    options = {"passes": passes, "device": device, "implementation": implementation}
    _not_swallowed("explore", fn, options | {"measure": measure or None})
    options |= {"static_argnums": static_argnums, "static_argnames": static_argnames}
    return make_explorer(fn, args, kwargs, measure=measure, budget_s=budget_s, **options)


def load(path: str | os.PathLike[str]) -> Any:
    """Reads what `lab.save("x.json")` or `comparison.save("x.json")` wrote: plain data, of which nothing is run.

    Returns:
      A `fusionlab.saved.SavedLab` (`.explore(fn, *args)` opens it again, `.fuse(fn)` fuses as it was set), or a `Comparison`.

    Raises:
      ArgumentError: there is no such file, it is larger than 256 MB, or it is neither.
    """
    from .saved import read

    return read(path)
