"""A function with its sites fused, called like the original: under the same jit, with the same state, donation and fixed leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.core import Tracer

from ..device import Device
from ..errors import BackendError
from ..fusers import Candidate, Pass, find_in, is_site
from ..fusers import Findings as PlainFindings
from ..fusers.lints.rules import with_edits
from ..graph.calls.binding import Bound, as_tuple, bind, lost_by
from ..graph.calls.parts import flattened, is_array
from ..graph.calls.state import are_of_another_trace, is_object, may_be_there
from ..graph.calls.wrappers import Jit, jit_of, unwrapped
from ..graph.program.graph import Graph as PlainGraph
from ..graph.program.signature import block_signature
from ..graph.program.trace import bind_users, graph_of, name_of, users_code
from ..graph.settings import as_function, is_jit_disabled
from ..progress import SILENT, Stages
from ..tracebacks import own_lines_hidden
from .filtered import Filtered, MayChange
from .shown import Findings, Graph, fields_of

DISABLE = "FUSIONLAB_DISABLE"
NOTHING_TO_EDIT = (
    "no edit was made: `edits` are for programs that contain their own gradient; this one has nothing to edit"
)


def is_disabled() -> bool:
    """Whether the environment asks for fused functions to run as the originals."""
    return os.environ.get(DISABLE, "") not in ("", "0")


def find_with_notes(
    graph: PlainGraph,
    passes: Sequence[tuple[Pass, Any]],
    device: Device,
    implementation: str | None,
    stages: Stages = SILENT,
) -> Findings:
    """`find_in`, with a note on what a named implementation leaves out."""
    found = find_in(graph, passes, device, implementation, stages=stages)
    notes: list[str] = []
    if implementation is not None:
        lack = [p.name for p, _ in passes if implementation not in p.fused_op.implementations]
        if lack:
            notes.append(f"implementation={implementation!r}: nothing fused for {', '.join(lack)}, which lacks it")
        if not found.candidates:
            notes.append(f"implementation={implementation!r} runs nowhere: no site was found that has it")
    return Findings(**fields_of(found, notes=(*found.notes, *notes)))


class _Objects(Exception):  # noqa: N818 - an answer to the call, which takes another way
    """While a function is traced under `jax.jit`: objects of nnx are among its arguments or in its result."""


# How a call treats what is changed in place: as nnx.jit does; asks for that as soon as there is any; else the name of what drops it.
CARRIES, ASKS = "carries", "asks"
NOTHING, LEAVES, NUMBERS = "", "leaves that are no arrays", "numbers, too"  # what a call holds fixed
# Who calls a function and drops what it changes in objects of nnx: transformations of these libraries, which take them for pytrees.
_DROPPING = {"jax": "a transformation of JAX's own", "equinox": "a transformation of equinox's"}
_WANTS_A_NUMBER = (jax.errors.ConcretizationTypeError, jax.errors.TracerIntegerConversionError)


def _joined(asked: Mapping[str, Any], own: Mapping[str, Any], before: int) -> dict[str, Any]:
    """The fixed arguments of a function with so many arguments before those that its user counts.

    Args:
      asked: what `fuse` was asked to hold fixed, as keyword arguments of `jax.jit`; `own`: what the function's own jit holds fixed.
    """
    nums = tuple(n + before if n >= 0 else n for n in asked["static_argnums"])
    both = {k: (*v, *own.get(k, ())) for k, v in {**asked, "static_argnums": nums}.items()}
    # jit infers the one from the other only where the other is not given at all.
    return {k: v for k, v in both.items() if v}


class Fused:
    """A function with its sites fused: same signature as the original, used like `jax.jit` of it.

    Composes with jit, grad, vmap, scan, remat and the rest. A function that was under `jax.jit`, `nnx.jit` or `eqx.filter_jit` is
    put under the same transformation again, with the same options; in a plain function nnx objects are updated as by `nnx.jit`, and
    leaves that are not arrays are fixed as by `eqx.filter_jit`. `findings(*args)` lists what is fused for those arguments.

    Attributes:
      original: the function that was fused.
      static: which of its arguments are held fixed, including those bound already, as keyword arguments of `jax.jit`.
      asked: those of them that were passed to `fuse`, as its user counts arguments.
    """

    def __init__(self, fn: Callable, options: dict[str, Any]) -> None:
        self.original, self._options = fn, options
        call, self._head, self._named = unwrapped(fn)
        self._jit = jit_of(call)
        if isinstance(call, Fused):  # the jit of its original is around this one
            self._jit = call._jit and call._jit.behind(call, len(call._head))
        self._inside = call if self._jit is None else self._jit.fn
        functools.update_wrapper(self, fn, updated=())
        own = self._jit.static if self._jit is not None else {}
        self.asked: Mapping[str, Any] = {k: as_tuple(options[k]) for k in ("static_argnums", "static_argnames")}
        self.static: Mapping[str, Any] = _joined(self.asked, own, len(self._head))
        self._way = {"nnx.jit": CARRIES}.get(self._jit.kind, self._jit.kind) if self._jit is not None else ASKS
        self._runners: dict[tuple[str, str], Any] = {}
        self._usual = self._first()
        # What calls have had so far, each of which takes another way: objects of nnx, leaves that are no arrays, fixed numbers.
        self._objects = self._leaves = self._numbers = False
        self._is_off: bool | None = None
        self._known: PlainFindings | None = None

    @property
    def named_options(self) -> dict[str, Any]:
        """What decides how another program is fused as this one is, as keyword arguments of `fuse`: those that are given.

        Site ids are of one program: `only` has the passes of those that it names, and `skip` has passes alone. `check` and `dump` change
        nothing of what is fused.
        """
        o = self._options
        options = {
            "passes": o["passes_asked"],
            "skip": [name for name in o["skip"] if not is_site(name)],
            "only": None if o["only"] is None else list(dict.fromkeys(name.partition("@")[0] for name in o["only"])),
            "implementation": o["implementation"],
            "edits": sorted(o["edits"]),
        }
        # No pass at all, and nothing in `only`, are not the same as None.
        return {k: v for k, v in options.items() if v is not None and (v != [] or k in ("passes", "only"))}

    def _first(self) -> Any:
        """The runner until a call needs another one: the jit that the function had, or `jax.jit`."""
        return self._runner(self._way, NOTHING) if self._jit is None else self._jit.again(self._traced(self._way))

    def _traced(self, way: str) -> Callable:
        """`_rewritten` with the original's signature, which jit needs to tell static arguments by position and by name."""

        @functools.wraps(self._inside)
        def rewritten(*args: Any, **kwargs: Any) -> Any:
            return self._rewritten(way, args, kwargs)

        if self._jit is not None and self._jit.kind == "filter_jit":
            # Equinox warns of a function around a module (of a filter_grad, say): it would hold the module's parameters fixed.
            vars(rewritten)["__signature__"] = inspect.signature(self._inside)
            del rewritten.__wrapped__
        return rewritten

    def _runner(self, way: str, fixed: str) -> Any:
        """The function under a jit that treats objects in this way, and holds fixed nothing, non-array leaves, or every number
        too."""
        if (way, fixed) not in self._runners:
            under = sys.modules["flax.nnx"].jit if way == CARRIES else jax.jit
            traced = self._traced(way)
            filtered = (traced, self.static, under, way == CARRIES, fixed == NUMBERS)
            run = Filtered(*filtered) if fixed else under(traced, **self.static)
            self._runners.setdefault((way, fixed), run)
        return self._runners[way, fixed]

    def _rewritten(self, way: str, args: tuple, kwargs: dict) -> Any:
        o = self._options
        if way == ASKS and _holds_objects((args, kwargs)):
            raise _Objects
        bound = bind(self._inside, args, kwargs, **self.static, numbers=False, carries=way == CARRIES)
        if way != CARRIES and bound.lost:
            raise lost_by(way, self._inside, bound.lost[0])
        if self._is_disabled():
            return bound.finish(bound.fn(*bound.args, **bound.kwargs))
        device = Device.current()
        graph = with_edits(graph_of(bound, name_of(self._inside)), device, o["edits"])
        found = self._search(graph, device)
        self._check_implementation(found)
        self._dump(graph, device)
        outs = as_function(self._program(found))(*jax.tree.leaves((bound.args, bound.kwargs)))
        out = bound.finish(jax.tree.unflatten(graph.out_tree, outs))
        if way == ASKS and _holds_objects(out):
            raise _Objects
        return out

    def _search(self, graph: PlainGraph, device: Device) -> PlainFindings:
        known = self._known
        if known is not None and known.where == device and _are_alike(known.graph, graph):
            return known
        return find_in(graph, self._options["passes"], device, self._options["implementation"])

    def program_of(self, graph: PlainGraph) -> Any:
        """A closed jaxpr that computes a program, its sites fused as this one's are."""
        return self._program(self._search(graph, Device.current()))

    def _program(self, found: PlainFindings) -> Any:
        return found.rewritten(self._options["only"], [s for s in self._options["skip"] if _known(found, s)])

    def _dump(self, graph: PlainGraph, device: Device) -> None:
        """Writes what `dump=` asked for, if it did."""
        o = self._options
        if o["dump"] is not None:
            from .dump import write_dump

            write_dump(o["dump"], graph, o["passes"], device, o["implementation"])

    def _check_implementation(self, found: PlainFindings) -> None:
        """Raises BackendError if the named implementation cannot run a site that is to be fused."""
        o = self._options
        for r in found.rejections if o["implementation"] is not None else ():
            skipped = {r.id, r.pass_name} & set(o["skip"])
            wanted = o["only"] is None or {r.id, r.pass_name} & set(o["only"])
            if r.code == "implementation" and wanted and not skipped:
                raise BackendError(r.sentence)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with own_lines_hidden:
            # With jit disabled each primitive of the user's own code runs by itself.
            if self._is_disabled() or is_jit_disabled():
                return self.original(*args, **kwargs)
            if self._head or self._named:
                args, kwargs = (*self._head, *args), {**self._named, **kwargs}
            if self._options["check"] and not _are_traced(args, kwargs):
                self._check(args, kwargs)
            return self._called(sys._getframe(1), args, kwargs)

    def _is_disabled(self) -> bool:
        if self._is_off is None:  # what is traced first decides for all that follows
            self._is_off = is_disabled()
        return self._is_off

    def _called(self, caller: Any, args: tuple, kwargs: dict, stage: str | None = None) -> Any:
        """Runs the call, or lowers it; where the usual way does not take what is in it, by the way that does."""
        while True:
            if self._objects and are_of_another_trace((args, kwargs)):  # nnx's jit would write to all of them
                return self._rewritten(CARRIES, args, kwargs)
            seen = self._objects or self._leaves or self._numbers
            run = self._by(caller, args, kwargs) if seen else self._usual
            try:
                return (run if stage is None else getattr(run, stage))(*args, **kwargs)
            except _Objects:
                self._objects = True
            except MayChange:
                if not _are_traced(args, kwargs):
                    raise
                return self._rewritten(self._way_of(caller), args, kwargs)  # nothing of it is kept
            # jax.jit raises TypeError at a leaf that is no array; of a traced number where Python needs one, the other two.
            except (TypeError, *_WANTS_A_NUMBER) as error:
                self._learn(error, args, kwargs)
                if self._jit is not None or self._by(caller, args, kwargs) is run:
                    raise

    def _way_of(self, caller: Any) -> str:
        """How objects of the arguments are treated in a call from there."""
        library = caller.f_globals.get("__name__", "").partition(".")[0]
        return _DROPPING.get(library, CARRIES) if self._objects else ASKS

    def _by(self, caller: Any, args: tuple, kwargs: dict) -> Any:
        fixed = LEAVES if self._leaves else NOTHING
        if self._numbers and _are_traced(args, kwargs):
            fixed = NUMBERS
        return self._runner(self._way_of(caller), fixed)

    def _learn(self, error: Exception, args: tuple, kwargs: dict) -> None:
        """Notes that leaves must be held fixed: those that are not arrays, and inside a trace a number, which can only be one that
        is fixed outside."""
        if isinstance(error, _WANTS_A_NUMBER):
            self._numbers = self._numbers or _are_traced(args, kwargs)
        else:
            self._leaves = self._leaves or _holds_others(args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    @property
    def __fusionlab_jit__(self) -> Jit:
        """How a comparison traces it: as it is called, but for donation and the compiler's options, which are the program's."""
        static = {k: self.static.get(k, ()) for k in ("static_argnums", "static_argnames")}
        jit = self._jit if self._jit is not None else Jit(self, "jax.jit", lambda fn: fn)
        jit = replace(jit, kind="fused", again=lambda fn: fn, **static).behind(self, len(self._head))
        return jit if self._jit is None else replace(jit, fn=self._without_donation)

    @property
    def _without_donation(self) -> Callable:
        fixed = NUMBERS if self._way == "filter_jit" else NOTHING

        @functools.wraps(self._inside)
        def run(*args: Any, **kwargs: Any) -> Any:
            return self._runner(self._way, fixed)(*self._head, *args, **self._named, **kwargs)

        return run

    def _check(self, args: tuple, kwargs: dict) -> None:
        from ..evidence.check import check_same

        try:
            if self._jit is not None or self._objects or self._leaves:
                raise _Objects  # neither state nor donated arguments may be touched twice
            plain, fused = jax.jit(self._inside, **self.static)(*args, **kwargs), self._usual(*args, **kwargs)
        except (_Objects, TypeError):
            first, second = (bind(fn, args, kwargs, **self.static) for fn in (self._inside, self._traced(CARRIES)))
            plain, fused = (jax.jit(call.fn)(*call.args, **call.kwargs) for call in (first, second))
        check_same(plain, fused, name_of(self._inside))

    @own_lines_hidden
    def findings(self, *args: Any, **kwargs: Any) -> Findings:
        """The findings for these arguments, with the ids of the fused sites in `applied`."""
        found, chosen = self.selected(*args, **kwargs)
        return dataclasses.replace(found, applied=frozenset(c.id for c in chosen))

    def _found(self, bound: Bound) -> Findings:
        o = self._options
        traced, device = graph_of(bound, name_of(self.original), lambda: users_code(self.original)), Device.current()
        graph = with_edits(traced, device, o["edits"])
        found = find_with_notes(Graph(**fields_of(graph)), o["passes"], device, o["implementation"])
        return replace(found, notes=(*found.notes, NOTHING_TO_EDIT)) if o["edits"] and graph is traced else found

    @own_lines_hidden
    def selected(self, *args: Any, **kwargs: Any) -> tuple[Findings, tuple[Candidate, ...]]:
        """The findings for these arguments, and which sites are fused: all except those that `skip` and `only` leave out."""
        return self._selected(bind_users(self.original, args, kwargs, **self.asked))

    def _selected(self, bound: Bound) -> tuple[Findings, tuple[Candidate, ...]]:
        found = self._found(bound)
        return found, found.select(self._options["only"], [s for s in self._options["skip"] if _known(found, s)])

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(fn).lower`."""
        with own_lines_hidden:
            return self._called(sys._getframe(1), (*self._head, *args), {**self._named, **kwargs}, "lower")

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(fn).trace`."""
        with own_lines_hidden:
            return self._called(sys._getframe(1), (*self._head, *args), {**self._named, **kwargs}, "trace")

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(fn).eval_shape`."""
        with own_lines_hidden:
            return self._called(sys._getframe(1), (*self._head, *args), {**self._named, **kwargs}, "eval_shape")

    def clear_cache(self) -> None:
        """As `jax.jit(fn).clear_cache`: the next call searches again."""
        self._runners.clear()
        self._usual = self._first()

    def __repr__(self) -> str:
        names = ", ".join(p.name for p, _ in self._options["passes"])
        off = f", off by {DISABLE}" if self._is_off else ""
        return f"<fused {name_of(self._inside)}, passes: {names}{off}>"


@contextlib.contextmanager
def searched(fused: Fused, args: tuple, kwargs: dict) -> Iterator[tuple[Bound, Findings, tuple[Candidate, ...]]]:
    """The original bound to arguments, its findings, and the sites that are fused.

    Calls of the same program within are not searched again.
    """
    bound = bind_users(fused.original, args, kwargs, **fused.asked)
    found, chosen = fused._selected(bound)
    before, fused._known = fused._known, found
    try:
        yield bound, found, chosen
    finally:
        fused._known = before


def _are_alike(first: PlainGraph, second: PlainGraph) -> bool:
    """Whether two traces are of one program, with the same captured arrays."""
    if first.numbered is not None or second.numbered is not None or first.in_shardings != second.in_shardings:
        return False
    return block_signature(first.top) == block_signature(second.top)


def already_fused(fn: Any) -> tuple[str, ...]:
    """A note where a fused function is searched or compared in place of its original; () for any other."""
    if not isinstance(fn, Fused):
        return ()
    name = name_of(fn)
    return (
        f"{name} is fused already: {name}.findings(...) lists its sites, and {name}.original is the function before",
    )


def _holds_others(args: tuple, kwargs: dict) -> bool:
    """Whether there is a leaf that is neither array, number nor object."""
    return not all(is_array(x) or is_object(x) for x in jax.tree.leaves((args, kwargs), is_leaf=is_object))


def _holds_objects(tree: Any) -> bool:
    return may_be_there() and any(is_object(x) for _, x in flattened(tree, carries=False)[0])


def _known(found: PlainFindings, name: str) -> bool:
    return (
        name in found.passes
        or any(c.id == name for c in found.candidates)
        or any(r.id == name for r in found.rejections)
    )


def _are_traced(args: tuple, kwargs: dict) -> bool:
    return any(isinstance(x, Tracer) for x in jax.tree.leaves((args, kwargs)))
