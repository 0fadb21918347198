"""The verbs trace, find, fuse, passes, register. Each ties rooms together in a few lines."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from ..device import Device
from ..errors import ArgumentError, UnknownNameError, did_you_mean, unknown_name
from ..fusers import Pass, Strategy, implementations, select, site_names
from ..fusers import registry as _registry
from ..fusers.lints.rules import rule_names
from ..graph.program.graph import Graph as PlainGraph
from ..graph.program.trace import trace as _trace
from ..progress import Progress, Stages, watched
from ..tracebacks import own_lines_hidden
from .fused import Fused as Fused
from .fused import already_fused, find_with_notes
from .shown import Findings as Findings
from .shown import Graph as Graph
from .shown import fields_of

if TYPE_CHECKING:
    from .catalogue import Catalogue

_OPTIONS = ("passes", "device", "implementation", "dump", "progress", "static_argnums", "static_argnames")
Passes = Strategy | Iterable[str] | str | None


def not_swallowed(verb: str, fn: Any, options: Mapping[str, Any]) -> None:
    """Raises ArgumentError if an option given by keyword may have been meant for the user's function."""
    try:
        parameters = signature(fn).parameters if callable(fn) else {}
    except (TypeError, ValueError):
        return
    for name in (n for n, value in options.items() if value is not None and n in parameters):
        raise ArgumentError(
            f"{name}: got it by keyword, and it is an option of {verb} as well as a parameter of {_name(fn)}; needed one meaning: "
            f"give the parameter by position, or in a function of your own, lambda *args: {_name(fn)}(*args, {name}=...)"
        )


def check_names(verb: str, fn: Any, named: Iterable[str], options: Iterable[str]) -> None:
    """Raises UnknownNameError for a keyword that is not a parameter of the user's function but close to an option of the verb."""
    try:
        parameters = signature(fn).parameters if callable(fn) else {}
    except (TypeError, ValueError):
        return
    if any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    for name in (n for n in named if n not in parameters):
        if near := did_you_mean(name, options):
            raise UnknownNameError(f"{name}: neither an option of {verb} nor a parameter of {_name(fn)}.{near}")


@own_lines_hidden
def trace(
    fn: Callable,
    *args: Any,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    **kwargs: Any,
) -> Graph:
    """Traces `fn` at these arguments (arrays or `jax.ShapeDtypeStruct`s, in any pytrees) without running it.

    Args:
      fn: the function, as for `jax.jit`.
      *args, **kwargs: example arguments; only their shapes and dtypes are read.
      static_argnums, static_argnames: as in `jax.jit`.

    Returns:
      The graph, for `find`; it shows, prints and saves itself.

    Raises:
      TraceError: the function does not trace. ArgumentError: `fn` is not a function, or a static argument does not exist.
    """
    graph = _trace(fn, *args, static_argnums=static_argnums, static_argnames=static_argnames, **kwargs)
    return Graph(**fields_of(graph))


@own_lines_hidden
def find(
    fn: Callable | PlainGraph,
    *args: Any,
    passes: Passes = None,
    device: Device | str | None = None,
    implementation: str | None = None,
    dump: Any = None,
    progress: Progress = False,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    **kwargs: Any,
) -> Findings:
    """Finds what could run fused, and explains why the rest cannot.

    Args:
      fn: the function, or a Graph traced before (then no arguments).
      *args, **kwargs: example arguments, as for `trace`.
      passes: names, a Strategy, or None for all.
      device: the device to decide for: None (this one), "cpu", "sm_90", a card ("a100", "l4", "h100", "h200", "b200", "rtx4090", "rtx5090",
        "t4"; in any case), or a Device. The device need not be present.
      implementation: as in `fuse`, decided for that device; a site that it cannot run there is declined (`implementation`).
      dump: a folder for the graph before and after each pass (see `fuse`).
      progress: False, True (a line, where it takes more than a second) or a function of (task, done, total).
      static_argnums, static_argnames: as in `jax.jit`.

    Returns:
      The candidates and the rejections with their reasons; it prints as a line for each pass and each rejection.

    Raises:
      UnknownNameError: a pass, option or implementation that does not exist. TraceError, ArgumentError: as for `trace`, and where
        an option has the name of a parameter of `fn`.
    """
    options = {"passes": passes, "device": device, "implementation": implementation, "dump": dump}
    not_swallowed("find", fn, options | {"progress": progress or None})
    check_names("find", fn, kwargs, _OPTIONS)
    chosen = select(_registry(), passes)
    check_implementation(implementation)
    where = Device.of(device)
    if isinstance(fn, PlainGraph) and (args or kwargs):
        raise ArgumentError("find: got a Graph and arguments; a Graph is already traced, so pass it alone")
    with watched(progress) as told:
        stages = Stages(told)
        if isinstance(fn, PlainGraph):
            graph = fn
        else:
            stages("tracing")
            graph = trace(fn, *args, static_argnums=static_argnums, static_argnames=static_argnames, **kwargs)
        found = find_with_notes(graph, chosen, where, implementation, stages)
        found = Findings(**fields_of(found, notes=(*found.notes, *already_fused(fn))))
    if dump is not None:
        from .dump import write_dump

        write_dump(dump, graph, chosen, where, implementation)
    return found


def _name(fn: Callable) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


@own_lines_hidden
def fuse(
    fn: Callable | None = None,
    *,
    passes: Passes = None,
    skip: Iterable[str] | str = (),
    only: Iterable[str] | str | None = None,
    implementation: str | None = None,
    edits: Iterable[str] | str = (),
    check: bool = False,
    dump: Any = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
) -> Any:
    """`fn` with every found site replaced by its fused op; also a decorator.

    JAX's settings apply to `fn` as under `jax.jit`; the replacement of a site is traced and lowered at JAX's defaults. Under
    `jax.disable_jit()` `fn` itself runs.

    Args:
      fn: the function, as for `jax.jit`.
      passes: names, a Strategy, or None for all.
      skip: a site id or pass name, or several, to leave as they are; ids that do not occur for some arguments are ignored there.
      only: a site id or pass name, or several, to fuse, and nothing else.
      implementation: None lets each op choose; a name ("xla", "xla_blockwise") runs that one or raises.
      edits: a rule of the lints, or several ("stacked_scan", "recomputed_products"), whose edits are made before anything is fused, in
        place of editing the source: the results are the same, and the program may take longer to compile or more memory.
        `fusionlab.advise` measures what an edit gains.
        What describes the original by its nodes (`time_by_scope`, say) describes the program with the edits made.
      check: on concrete calls, run the original too and raise RewriteError if results differ beyond tolerance.
      dump: a folder that receives `NN_<pass>.before/after.txt/.dot/.svg` and `report.json` per pass, when traced.
      static_argnums, static_argnames: as in `jax.jit`.

    Returns:
      A `Fused` function with the signature of `fn`; without `fn`, a decorator.

    Raises:
      UnknownNameError: a pass, option, implementation or edit that does not exist, or a name in `skip` or `only` that is neither a pass
        nor the id of a site. Errors of `fn` itself come through unchanged.
    """
    if fn is None:
        given = {k: v for k, v in locals().items() if k != "fn"}
        return functools.partial(fuse, **given)
    if not callable(fn):
        raise ArgumentError(f"fuse: got {type(fn).__name__}, needed a function that takes and returns arrays")
    if not (passes is None or isinstance(passes, Mapping)):
        passes = [passes] if isinstance(passes, str) else list(passes)
    chosen = select(_registry(), passes)
    check_implementation(implementation)
    options = {
        "passes": chosen,
        "passes_asked": passes,
        "skip": site_names(skip, _registry(), "skip"),
        "only": None if only is None else site_names(only, _registry(), "only"),
        "implementation": implementation,
        "edits": rule_names(edits),
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


@own_lines_hidden
def passes() -> Catalogue:
    """Lists every pass with its formula, needs and options; in a notebook, with a before/after picture of each."""
    from .catalogue import Catalogue

    return Catalogue(tuple(_registry().values()))


@own_lines_hidden
def register(pass_: Pass) -> None:
    """Adds a pass of your own (made by `pattern_pass`) to the passes that `passes=None` runs.

    Raises:
      ArgumentError: a pass of that name exists, or an attribute of a pass is missing.
    """
    from ..fusers import add_pass

    add_pass(pass_)


@own_lines_hidden
def unregister(pass_: Pass | str) -> None:
    """Removes a pass of your own, given itself or its name. Functions that were fused with it stay as they are.

    Raises:
      ArgumentError: the pass is built in. UnknownNameError: no pass has that name.
    """
    from ..fusers import remove_pass

    remove_pass(pass_ if isinstance(pass_, str) else pass_.name)
