"""Watches calls while a test runs: functions under `jax.jit` and similar, and modules of flax and equinox.

JAX's functions are replaced by ones whose results report their calls; classes of modules get a `__call__` that does. The internal use of
them by JAX, flax and equinox is unchanged. Only outermost calls with concrete arguments, outside any trace, are reported: a call inside
one is part of its program.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.core import Tracer

from ..graph.calls.state import is_object
from ..graph.calls.wrappers import Jit, jit_of

# What is called in place of a call: (the function to fuse, what runs it, arguments by position, by name) -> the result.
OnCall = Callable[[Callable, Callable, tuple, dict], Any]
_TRANSFORMATIONS = ("jit", "grad", "value_and_grad", "vmap")
_MACHINERY = {"jax", "flax", "equinox", "fusionlab"}
_JITS_OF_NNX = ("JitWrapped", "SimpleJitWrapped")


class Jitted:
    """A function under `jax.jit` that reports its calls and is otherwise unchanged."""

    def __init__(self, jitted: Any, watch: Watch) -> None:
        functools.update_wrapper(self, jitted)
        self._jitted, self._watch = jitted, watch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._watch.call(self._jitted, self._jitted, args, kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)

    @property
    def __fusionlab_jit__(self) -> Jit | None:
        return jit_of(self._jitted)


class Watch:
    """Calls `on_call` for each call that a test makes, between `start` and `stop`, in the thread that started it."""

    def __init__(self, on_call: OnCall) -> None:
        self._on_call = on_call
        self._thread: int | None = None
        self._undo: list[tuple[Any, str, Any]] = []
        self._seen: set[type] = set()

    def install(self) -> None:
        """Watches JAX's functions, also in modules imported later."""
        for name in _TRANSFORMATIONS:
            self._replace(jax, name, self._of_jax(getattr(jax, name)))

    def uninstall(self) -> None:
        for owner, name, old in reversed(self._undo):
            setattr(owner, name, old)
        self._undo.clear()
        self._seen.clear()

    @contextmanager
    def on(self) -> Iterator[None]:
        """While a test runs."""
        self._add_libraries()
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None

    def call(self, fn: Callable, run: Callable, args: tuple, kwargs: dict) -> Any:
        """Runs a call, and reports it if it is an outermost one with arrays."""
        if self._thread != threading.get_ident() or _is_traced((args, kwargs)):
            return run(*args, **kwargs)
        self._thread, thread = None, self._thread
        try:
            return self._on_call(fn, run, args, kwargs)
        finally:
            self._thread = thread

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        self._undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    def _of_jax(self, real: Callable) -> Callable:
        """`jax.jit` or a similar function of JAX, with results that are watched if the user's code requests them."""

        @functools.wraps(real)
        def transformation(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
            return result if caller in _MACHINERY else self._of_result(result, bool(args) or "fun" in kwargs)

        return transformation

    def _of_result(self, result: Any, has_function: bool) -> Any:
        if not has_function:  # a decorator
            return lambda fn: self._of_result(result(fn), True)
        return Jitted(result, self) if jit_of(result) is not None else self._of_function(result)

    def _of_function(self, function: Any) -> Callable:
        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            return self.call(function, function, args, kwargs)

        return watched

    def _add_libraries(self) -> None:
        """Also watches the imported modules of flax and equinox."""
        if (nnx := sys.modules.get("flax.nnx")) is not None and nnx.Module not in self._seen:
            self._add_family(nnx.Module)
            compilation = sys.modules["flax.nnx.transforms.compilation"]
            for name in _JITS_OF_NNX:
                self._add_class(getattr(compilation, name, None), whole=True)
        if (linen := sys.modules.get("flax.linen")) is not None and linen.Module not in self._seen:
            self._seen.add(linen.Module)
            for name in ("apply", "init_with_output"):
                self._replace(linen.Module, name, self._method(getattr(linen.Module, name)))
        if (equinox := sys.modules.get("equinox")) is not None and equinox.Module not in self._seen:
            self._add_family(equinox.Module)

    def _add_family(self, base: type) -> None:
        """Watches all classes of modules, and those defined later as soon as they have an instance."""
        self._add_class(base)
        for cls in base.__subclasses__():
            self._add_tree(cls)
        meta = next(m for m in inspect.getmro(type(base)) if "__call__" in vars(m))
        if meta not in self._seen:
            self._seen.add(meta)
            make = meta.__call__

            @functools.wraps(make)
            def make_watched(cls: type, *args: Any, **kwargs: Any) -> Any:
                for c in type.mro(cls) if cls not in self._seen else ():
                    if issubclass(c, base):
                        self._add_class(c)
                return make(cls, *args, **kwargs)

            self._replace(meta, "__call__", make_watched)

    def _add_tree(self, cls: type) -> None:
        self._add_class(cls)
        for sub in type.__subclasses__(cls):
            self._add_tree(sub)

    def _add_class(self, cls: type | None, whole: bool = False) -> None:
        """Watches a class's own `__call__`; with `whole`, the object itself is fused."""
        if cls is None or cls in self._seen:
            return
        self._seen.add(cls)
        own = vars(cls).get("__call__")
        if isinstance(own, types.FunctionType) and not getattr(own, "__isabstractmethod__", False):
            self._replace(cls, "__call__", self._method(own, whole))

    def _method(self, own: Callable, whole: bool = False) -> Callable:
        @functools.wraps(own)
        def method(module: Any, *args: Any, **kwargs: Any) -> Any:
            if whole or jit_of(module) is not None:
                return self.call(module, functools.partial(own, module), args, kwargs)
            return self.call(own, own, (module, *args), kwargs)

        return method


def _is_traced(tree: Any) -> bool:
    """Whether a trace is under way, or the arguments contain a traced value."""
    if isinstance(jax.lax.iota("int32", 1), Tracer):
        return True
    leaves = jax.tree.leaves(tree, is_leaf=is_object)
    if any(map(is_object, leaves)):
        nnx = sys.modules["flax.nnx"]
        leaves = jax.tree.leaves([nnx.state(x) if is_object(x) else x for x in leaves])
    return any(isinstance(x, Tracer) for x in leaves)
