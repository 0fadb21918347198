"""The jit around a function: `jax.jit`, flax's `nnx.jit` and equinox's `filter_jit`, each with its options.

Functions passed to `fuse` or `compare` are often jitted. The search needs the function inside; the fused function must be under the same
jit again, with the same donations, static arguments and shardings. flax and equinox are not imported here: a function of theirs can only
exist once its user has imported them.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from ..jax_compat import jit_options
from .state import is_object


@dataclass(frozen=True, eq=False)
class Jit:
    """A function and the jit around it.

    Attributes:
      fn: the function inside.
      kind: "jax.jit", "nnx.jit" or "filter_jit".
      again: puts the same jit around another function of the same signature.
      static_argnums, static_argnames: the static arguments.
      donate_argnums, donate_argnames: the donated arguments.
      donates_rest, keeps_first: whether it donates all arguments, and whether all but the first.
      placing: the shardings of arguments and results, as keyword arguments of `jax.jit`; empty if none are given.
      compiling: the other compiler options: keyword arguments of `jax.jit`.
    """

    fn: Callable
    kind: str
    again: Callable[[Callable], Callable] = field(repr=False)
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    donates_rest: bool = False
    keeps_first: bool = False
    placing: Mapping[str, Any] = field(default_factory=dict)
    compiling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def placed(self) -> Callable | None:
        """The function under a jit with only the shardings of arguments and results; None if none are given."""
        return jax.jit(self.fn, **self.static, **self.placing) if self.placing else None

    @property
    def static(self) -> dict[str, Any]:
        """As keyword arguments of `jax.jit`."""
        return {"static_argnums": self.static_argnums, "static_argnames": self.static_argnames}

    def behind(self, fn: Callable, given: int) -> Jit:
        """This jit around `fn`, which takes the arguments after the first `given` ones."""
        nums = {
            name: tuple(n - given if n >= given else n for n in getattr(self, name) if n < 0 or n >= given)
            for name in ("static_argnums", "donate_argnums")
        }
        return replace(self, fn=fn, **nums, keeps_first=self.keeps_first and not given)

    def donated(self, total: int) -> tuple[int, ...]:
        """The donated ones among so many positional arguments."""
        nums = range(total) if self.donates_rest else self.donate_argnums
        return tuple(n for n in {n % total for n in nums if -total <= n < total} if n or not self.keeps_first)


def jit_of(fn: Any) -> Jit | None:
    """The jit around `fn`; None if there is none."""
    own = getattr(fn, "__fusionlab_jit__", None)
    if isinstance(own, Jit):  # a fused function
        return own
    options = jit_options(fn)
    if options is not None:
        return _of_jax(fn.__wrapped__, options)
    kind = type(fn)
    if kind.__module__.startswith("flax.nnx") and kind.__name__ in ("JitWrapped", "SimpleJitWrapped"):
        return _of_nnx(fn)
    if kind.__module__ == "equinox._jit" and hasattr(fn, "donate_rest"):
        return _of_equinox(fn)
    return None


def unwrapped(fn: Any) -> tuple[Callable, tuple, dict[str, Any]]:
    """A function and its bound arguments: of a bound method, a `functools.partial`, an `nnx.cached_partial` or a callable module, if that
    hides a jit or an object with state; otherwise `fn` itself, without arguments."""
    inside: Any = fn
    args: tuple = ()
    kwargs: dict[str, Any] = {}
    while True:
        if isinstance(inside, types.MethodType):
            inside, args = inside.__func__, (inside.__self__, *args)
        elif is_object(inside):
            inside, args = type(inside).__call__, (inside, *args)
        elif isinstance(inside, functools.partial) or _is_partial_of_equinox(inside):
            inside, args, kwargs = inside.func, (*inside.args, *args), {**inside.keywords, **kwargs}
        elif (cached := _cached_by_nnx(inside)) is not None:
            inside, args = cached["f"], (*cached["cached_args"], *args)
        else:
            break
    hides = inside is not fn and (
        jit_of(inside) is not None or any(map(is_object, jax.tree.leaves((args, kwargs), is_leaf=is_object)))
    )
    return (inside, args, kwargs) if hides else (fn, (), {})


def _is_partial_of_equinox(fn: Any) -> bool:
    return type(fn).__module__.startswith("equinox") and type(fn).__name__ == "Partial"


def _cached_by_nnx(fn: Any) -> dict[str, Any] | None:
    """What an `nnx.cached_partial` holds: the function `f` and its first arguments `cached_args`, which share the user's Variables."""
    code = getattr(fn, "__code__", None)
    if code is None or "cached_partial.<locals>" not in code.co_qualname or "flax" not in code.co_filename:
        return None
    held = dict(zip(code.co_freevars, (cell.cell_contents for cell in fn.__closure__), strict=True))
    return held if {"f", "cached_args"} <= held.keys() else None


def _of_jax(fn: Callable, options: Mapping[str, Any]) -> Jit:
    return Jit(
        fn,
        "jax.jit",
        functools.partial(jax.jit, **options),
        **_some(options, "static_argnums", "static_argnames", "donate_argnums", "donate_argnames"),
        placing=_some(options, "in_shardings", "out_shardings", "device", "backend"),
        compiling=_some(options, "compiler_options", "keep_unused"),
    )


def _some(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: options[name] for name in names if name in options}


def _of_nnx(fn: Any) -> Jit:
    nnx = sys.modules["flax.nnx"]
    options = jit_options(fn.jitted_fn) or {}
    given = "static_argnums", "static_argnames", "donate_argnums", "donate_argnames"
    settings = _some(options, *given, "keep_unused", "inline", "device", "backend")
    if fn.in_shardings is not None:
        settings["in_shardings"] = _without_static(fn.in_shardings, options["static_argnums"])
    if fn.out_shardings is not None:
        settings["out_shardings"] = fn.out_shardings
    again = functools.partial(nnx.jit, **settings)
    if type(fn).__name__ == "SimpleJitWrapped":
        again = functools.partial(again, graph=fn.graph, graph_updates=False)
    return Jit(fn.fun, "nnx.jit", again, **_some(options, *given), compiling=_some(options, "keep_unused"))


def _without_static(shardings: Any, static: Iterable[int]) -> Any:
    """flax keeps None in the place of each static argument, which its `jit` does not take."""
    if not isinstance(shardings, tuple | list):
        return shardings
    return type(shardings)(s for i, s in enumerate(shardings) if i not in set(static))


_DONATE = {(False, False): "none", (True, True): "all", (False, True): "all-except-first"}


def _of_equinox(fn: Any) -> Jit:
    equinox = sys.modules["equinox"]
    donate = _DONATE[fn.donate_first, fn.donate_rest]
    if donate != "none" and not fn.filter_warning:
        donate = donate.replace("all", "warn")
    options = jit_options(fn._cached) or {}
    settings = _some(options, "keep_unused", "inline", "device", "backend", "compiler_options")
    again = functools.partial(equinox.filter_jit, donate=donate, **settings)
    donates = {"donates_rest": fn.donate_rest, "keeps_first": fn.donate_rest and not fn.donate_first}
    compiling = _some(options, "compiler_options", "keep_unused")
    return Jit(fn.__wrapped__, "filter_jit", again, **donates, compiling=compiling)
