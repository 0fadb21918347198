"""A function with its sites fused, called as the original is: under the jit that it had, with its state, its donation, its fixed leaves."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import core as jex_core

from .device import Device
from .fusers import Candidate, Pass, find_in, op_of
from .fusers import Findings as PlainFindings
from .graph import ir
from .graph.binding import as_tuple, bind, lost_by, unhashable
from .graph.parts import is_array, with_fixed, without_fixed
from .graph.settings import is_jit_disabled
from .graph.state import is_object
from .graph.trace import graph_of, name_of, trace
from .graph.wrappers import Jit, jit_of
from .shown import Findings, Graph, fields_of

DISABLE = "FUSIONLAB_DISABLE"


def is_disabled() -> bool:
    """Whether the environment says that fused functions run as the originals."""
    return os.environ.get(DISABLE, "") not in ("", "0")


def search(graph: ir.Graph, passes: Sequence[tuple[Pass, Any]], device: Device, implementation: str | None) -> Findings:
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


class _StateChanged(Exception):  # noqa: N818 - an answer to the call, which takes another way
    """While a function is traced under `jax.jit`: it changes an argument in place, which only nnx's jit carries."""


class Fused:
    """A function with its sites fused: same signature as the original, used like `jax.jit` of it.

    Composes with jit, grad, vmap, scan, remat and the rest. What the function is under already (`jax.jit`, `nnx.jit`, `eqx.filter_jit`) it
    is under again, with the same options; of a plain function, objects of nnx are updated as `nnx.jit` does, and leaves that are no arrays
    are fixed, as `eqx.filter_jit` has it. `findings(*args)` says what is fused for those arguments.

    Attributes:
      original: the function as it was given.
      static: what is held fixed, as keyword arguments of `jax.jit`.
    """

    def __init__(self, fn: Callable, options: dict[str, Any]) -> None:
        self.original, self._options = fn, options
        self._jit = jit_of(fn)
        self._inside = fn if self._jit is None else self._jit.fn
        functools.update_wrapper(self, fn, updated=())
        own = self._jit.static if self._jit is not None else {}
        asked = {k: (*as_tuple(options[k]), *own.get(k, ())) for k in ("static_argnums", "static_argnames")}
        # jit infers the one from the other only where the other is not given at all.
        self.static: Mapping[str, Any] = {k: v for k, v in asked.items() if v}
        self._traced = self._with_signature()
        self._nested = _under(self._jit.kind if self._jit is not None else "jax.jit", self._traced, self.static)
        self._run = self._jit.again(self._traced) if self._jit is not None else self._nested
        self._carries = self._jit is not None and self._jit.kind == "nnx.jit"
        self._keeps_identity = self._jit is None  # an argument that is returned is the same object, as under nnx.jit
        self._is_off: bool | None = None
        self._plain = jax.jit(self._inside, **self.static)

    def _with_signature(self) -> Callable:
        """`_rewritten` with the original's signature, which jit needs to tell static arguments by position and by name."""

        @functools.wraps(self._inside)
        def rewritten(*args: Any, **kwargs: Any) -> Any:
            return self._rewritten(*args, **kwargs)

        return rewritten

    def _rewritten(self, *args: Any, **kwargs: Any) -> Any:
        o = self._options
        bound = bind(self._inside, args, kwargs, **self.static, numbers=False)
        if not self._carries and (bound.changed or (bound.returns_objects and self._keeps_identity)):
            raise _StateChanged(*bound.changed)
        if self._is_off is None:
            self._is_off = is_disabled()
        if self._is_off:
            return bound.finish(bound.fn(*bound.args, **bound.kwargs))
        graph = graph_of(bound, name_of(self._inside))
        device = Device.current()
        found = find_in(graph, o["passes"], device, o["implementation"])
        if o["dump"] is not None:
            from .dump import write_dump

            write_dump(o["dump"], graph, o["passes"], device, o["implementation"])
        closed = found.rewritten(o["only"], [s for s in o["skip"] if _known(found, s)])
        outs = jex_core.jaxpr_as_fun(closed)(*jax.tree.leaves((bound.args, bound.kwargs)))
        return bound.finish(jax.tree.unflatten(graph.out_tree, outs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_jit_disabled():  # as under any jit then: each primitive of the user's own code runs by itself
            return self.original(*args, **kwargs)
        if self._options["check"] and not _are_traced(args, kwargs):
            self._check(args, kwargs)
        try:
            return self._run(*args, **kwargs)
        except (_StateChanged, TypeError) as error:
            told = self._refusal(error, args, kwargs, sys._getframe(1))
        if told is not None:
            raise told
        return self._run(*args, **kwargs)

    def _refusal(self, error: Exception, args: tuple, kwargs: dict, caller: Any) -> Exception | None:
        """Takes another way of calling where the first has met what it does not carry; the error where there is no other."""
        library = caller.f_globals.get("__name__", "").partition(".")[0] if caller is not None else ""
        if isinstance(error, _StateChanged):
            if not error.args and library in _DROPPING:
                self._keeps_identity = False
                return None
            if self._jit is not None or library in _DROPPING:
                return lost_by(_DROPPING.get(library, self._jit_name), self._inside, error.args[0])
            self._carries = True
            self._run = self._nested = _under("nnx.jit", self._traced, self.static)
            return None
        leaves = jax.tree.leaves((args, kwargs), is_leaf=is_object)
        numbers = library != "equinox"  # whose filter_jit holds them fixed
        taken = all(is_array(x, numbers) or is_object(x) for x in leaves)
        if self._jit is not None or isinstance(self._run, Filtered) or taken:
            return error
        self._run = self._nested = Filtered(self._traced, self.static)
        return None

    @property
    def _jit_name(self) -> str:
        return self._jit.kind if self._jit is not None else "jax.jit"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    @property
    def __fusionlab_jit__(self) -> Jit:
        """How a comparison traces it: as it is called, but for donation and the compiler's options, which are the program's."""
        static = {k: self.static.get(k, ()) for k in ("static_argnums", "static_argnames")}
        if self._jit is None:
            return Jit(self, "fused", lambda fn: fn, **static)
        return replace(self._jit, fn=self._nested, kind="fused", again=lambda fn: fn, **static)

    def _check(self, args: tuple, kwargs: dict) -> None:
        from .evidence.check import check_same

        if self._run is self._nested and not self._carries and not isinstance(self._run, Filtered):
            plain, fused = (fn(*args, **kwargs) for fn in (self._plain, self._nested))
        else:  # neither state nor donated arguments may be touched twice
            calls = [bind(fn, args, kwargs) for fn in (self.original, self)]
            plain, fused = (jax.jit(call.fn)(*call.args, **call.kwargs) for call in calls)
        check_same(plain, fused, name_of(self._inside))

    def findings(self, *args: Any, **kwargs: Any) -> Findings:
        """What is found, and fused unless skipped, for these arguments."""
        o = self._options
        graph = trace(self.original, *args, **self.static, **kwargs)
        return search(Graph(**fields_of(graph)), o["passes"], Device.current(), o["implementation"])

    def selected(self, *args: Any, **kwargs: Any) -> tuple[Findings, tuple[Candidate, ...]]:
        """What is found for these arguments, and which of it is fused: all but what `skip` and `only` leave out."""
        found = self.findings(*args, **kwargs)
        return found, found.select(self._options["only"], [s for s in self._options["skip"] if _known(found, s)])

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(fn).lower`."""
        return self._staged("lower", args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(fn).trace`."""
        return self._staged("trace", args, kwargs)

    def _staged(self, stage: str, args: tuple, kwargs: dict) -> Any:
        try:
            return getattr(self._run, stage)(*args, **kwargs)
        except (_StateChanged, TypeError) as error:
            told = self._refusal(error, args, kwargs, None)
        if told is not None:
            raise told
        return getattr(self._run, stage)(*args, **kwargs)

    def __repr__(self) -> str:
        names = ", ".join(p.name for p, _ in self._options["passes"])
        off = f", off by {DISABLE}" if self._is_off else ""
        return f"<fused {name_of(self._inside)}: {names}{off}>"


def _under(kind: str, fn: Callable, static: Mapping[str, Any]) -> Any:
    """A function under a jit of that kind without donation or options of the compiler."""
    if kind == "nnx.jit":
        return sys.modules["flax.nnx"].jit(fn, **static)
    return Filtered(fn, static) if kind == "filter_jit" else jax.jit(fn, **static)


# Who calls a function and drops what it changes in objects of nnx: transformations of these libraries, which take them for pytrees.
_DROPPING = {"jax": "a transformation of JAX's own", "equinox": "a transformation of equinox's"}


class Filtered:
    """A function under a jit that holds fixed what is no array in its arguments, as `equinox.filter_jit` does."""

    def __init__(self, fn: Callable, static: Mapping[str, Any]) -> None:
        self._fn, self._static = fn, static
        self._jitted = jax.jit(self._with_fixed, static_argnums=0)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return with_fixed(self._jitted(*self._split(args, kwargs)))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        return self._jitted.lower(*self._split(args, kwargs))

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        return self._jitted.trace(*self._split(args, kwargs))

    def _split(self, args: tuple, kwargs: dict) -> tuple[_Fixed, list[Any]]:
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = [is_array(x, numbers=False) for x in leaves]
        # By its type as well: 1, 1.0 and True are equal, and make other programs.
        fixed = _Fixed(tree, tuple(_ARRAY if a else (type(x), x) for a, x in zip(arrays, leaves, strict=True)))
        try:
            hash(fixed)
        except TypeError:
            raise unhashable(self._fn, args, kwargs) from None
        return fixed, [x for a, x in zip(arrays, leaves, strict=True) if a]

    def _with_fixed(self, fixed: _Fixed, arrays: list[Any]) -> Any:
        given = iter(arrays)
        leaves = [next(given) if leaf is _ARRAY else leaf[1] for leaf in fixed.leaves]
        args, kwargs = jax.tree.unflatten(fixed.tree, leaves)
        return without_fixed(self._fn(*args, **kwargs))


@dataclass(frozen=True)
class _Fixed:
    """What is no array in the arguments of a call, as a key.

    Attributes:
      tree: their structure; leaves: (type, value) of each, or `_ARRAY` where an array is.
    """

    tree: Any
    leaves: tuple[Any, ...]


_ARRAY = "array"


def _known(found: PlainFindings, name: str) -> bool:
    return (
        name in found.passes
        or any(c.id == name for c in found.candidates)
        or any(r.id == name for r in found.rejections)
    )


def _are_traced(args: tuple, kwargs: dict) -> bool:
    return any(isinstance(x, Tracer) for x in jax.tree.leaves((args, kwargs)))
