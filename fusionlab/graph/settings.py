"""JAX's settings while FusionLab traces, computes and lowers for itself: JAX's defaults, whatever the user has set.

Settings are meant for the user's own code: they may forbid rank promotion, dtype promotion or transfers, or raise for NaN.
When FusionLab traces a replacement, computes a mask or lowers an implementation, they would raise for code that the user never wrote, or
change its meaning. The user's function is traced outside of this, under the user's settings.

`jax_enable_x64` is different: it determines the available dtypes, which belong to the program. If the user's function enables 64-bit
types for a part of itself, FusionLab enables them for its work on that part (`wide_types`). The settings for random
bits (`jax_threefry_partitionable`, `jax_default_prng_impl`) belong to the program as well.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
from jax.extend import core as jex_core
from jax.sharding import get_abstract_mesh

from .jax_compat import enable_x64, types_in

Result = TypeVar("Result")

# Setting -> (its default, the context manager that sets it).
_SETTINGS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "jax_numpy_rank_promotion": ("allow", jax.numpy_rank_promotion),
    "jax_numpy_dtype_promotion": ("standard", jax.numpy_dtype_promotion),
    "jax_transfer_guard_host_to_device": ("allow", jax.transfer_guard_host_to_device),
    "jax_transfer_guard_device_to_device": ("allow", jax.transfer_guard_device_to_device),
    "jax_transfer_guard_device_to_host": ("allow", jax.transfer_guard_device_to_host),
    "jax_check_tracer_leaks": (False, jax.check_tracer_leaks),
    "jax_debug_nans": (False, jax.debug_nans),
    "jax_debug_infs": (False, jax.debug_infs),
    "jax_default_matmul_precision": (None, jax.default_matmul_precision),
    "jax_disable_jit": (False, jax.disable_jit),
    "jax_log_compiles": (False, jax.log_compiles),
    "jax_explain_cache_misses": (False, jax.explain_cache_misses),
    "jax_no_tracing": (False, jax.no_tracing),
    "jax_no_execution": (False, jax.no_execution),
}


# What may be evaluated here and now, one primitive after another, is run as the user's own code beside it is.
WHERE_IT_RUNS = frozenset({"jax_debug_nans", "jax_debug_infs", "jax_disable_jit"})


@contextlib.contextmanager
def jax_defaults(kept: Collection[str] = ()) -> Iterator[None]:
    """JAX's defaults, as a context or decorator for FusionLab's own tracing, computing and lowering, never for the user's function.

    Settings at their default are not touched: setting one again makes a new key of JAX's caches, even for an equal value. Settings in
    `kept` are left as the user has them.
    """
    with contextlib.ExitStack() as stack:
        for name, (default, make) in _SETTINGS.items():
            if name not in kept and not _is_default(getattr(jax.config, name), default):
                stack.enter_context(make(default))
        yield


def _is_default(value: Any, default: Any) -> bool:
    """Whether a setting is at its default; for a guard, None means that nothing was ever set, which is "allow"."""
    value = getattr(value, "value", value)
    return value == default or (value is None and default == "allow")


_WIDE = frozenset({"float64", "int64", "uint64", "complex128"})


def is_x64() -> bool:
    """Whether 64-bit types are enabled here."""
    return bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]


def wide_types(values: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """A context for tracing with 64-bit types enabled if one of some arrays or types has 64 bits; JAX would otherwise truncate it."""
    return enable_x64(True) if has_wide_types(values) else contextlib.nullcontext()


def has_wide_types(values: Iterable[Any]) -> bool:
    """Whether one of some arrays or types has 64 bits, and 64-bit types are not enabled."""
    return not is_x64() and any(map(_is_wide, values))


def types_of_operands(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: `wide_types` of the arguments of a function of arrays."""

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        with wide_types(jax.tree.leaves((args, kwargs))):
            return fn(*args, **kwargs)

    return run


def as_function(closed: Any) -> Callable[..., Any]:
    """A traced program as a function of arrays, computed with its own types."""

    def run(*args: Any) -> Any:
        with wide_types(types_in(closed)):
            return jex_core.jaxpr_as_fun(closed)(*args)

    return run


def _is_wide(value: Any) -> bool:
    # Of a symbolic zero its type alone tells.
    return _has_64_bits(getattr(getattr(value, "aval", value), "dtype", None))


@functools.cache  # NumPy makes the name anew each time, and every value of a program is asked for it
def _has_64_bits(dtype: Any) -> bool:
    return getattr(dtype, "name", None) in _WIDE


def unwrapped(ours: bool = True) -> contextlib.AbstractContextManager[Any]:
    """A context for tracing FusionLab's own `jax.numpy` code for analysis: without the jit around each function, which takes longer to
    trace than its contents. Not for a user's code (`ours` False), whose loops JAX would run in Python.
    """
    return jax.disable_jit() if ours else contextlib.nullcontext()


def on_one_device(run: Callable[[], Result]) -> Result:
    """What a function gives that JAX is to compute at once, also while a program is traced: on one device, whatever mesh is set.

    A mesh that `jax.set_mesh` has set may have devices that this process cannot run on: of other hosts, or of a machine that a program is
    only compiled for. JAX keeps a mesh for one thread and does not let it change while it traces: the function runs in a thread without.
    """
    if get_abstract_mesh().empty:
        with jax.ensure_compile_time_eval():
            return run()
    config: Any = jax.config
    wide, by_parts = is_x64(), bool(config.jax_threefry_partitionable)  # a context sets them for one thread, too

    def alone() -> Result:
        with jax_defaults(), enable_x64(wide), jax.threefry_partitionable(by_parts):
            return run()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(alone).result()


def is_jit_disabled() -> bool:
    """Whether the user has disabled jit, so that jitted code runs in Python, one primitive after another."""
    return bool(jax.config.jax_disable_jit)  # pyright: ignore[reportAttributeAccessIssue]


def matmul_precision() -> str | None:
    """The precision that the user has set for products without one."""
    return jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]


_YOUNG_ONLY = (50_000, 10, 1_000_000)  # thresholds of `gc`: the last is of full collections


@contextlib.contextmanager
def no_full_collections() -> Iterator[None]:
    """For work that keeps many small objects: each full collection would walk all of them, which is quadratic.

    Young objects are still collected: the derivatives that JAX traces are cycles, and as large as the data that the search keeps.
    """
    before = gc.get_threshold()
    if before == _YOUNG_ONLY:  # a search in another thread has set them, and sets them back
        yield
        return
    gc.set_threshold(*_YOUNG_ONLY)
    try:
        yield
    finally:
        gc.set_threshold(*before)
