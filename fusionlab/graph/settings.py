"""JAX's settings around what FusionLab traces, computes and lowers for itself: JAX's defaults, whatever the user has set.

Settings are for the user's own code: that it broadcasts by rank or mixes dtypes nowhere, that no array moves unseen, that a NaN raises.
Where FusionLab traces a replacement, computes a mask or lowers an implementation they would raise for code that the user never wrote, or
change what it means with whatever is set at that moment. The function of the user's is traced outside of this, under their settings.

`jax_enable_x64` is no such setting: it says which dtypes there are, and the program has them. Where the user's function switches 64-bit
types on around a part of itself, they are switched on for what FusionLab does with them, too (`wide_types`). How the bits of a key are
drawn (`jax_threefry_partitionable`, `jax_default_prng_impl`) is the program's as well.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import jax
from jax.extend import core as jex_core

from .jax_compat import enable_x64, types_in

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
    """Around FusionLab's own tracing, computing and lowering, or as a decorator of it: JAX's defaults. Never around the user's function.

    What is at its default is left alone: a setting that is made anew is another key of JAX's caches, equal or not. Settings in `kept`
    are left as the user has them.
    """
    with contextlib.ExitStack() as stack:
        for name, (default, make) in _SETTINGS.items():
            if name not in kept and not _is_default(getattr(jax.config, name), default):
                stack.enter_context(make(default))
        yield


def _is_default(value: Any, default: Any) -> bool:
    """Of a guard None is what it is where nothing was ever set: as "allow"."""
    value = getattr(value, "value", value)
    return value == default or (value is None and default == "allow")


_WIDE = frozenset({"float64", "int64", "uint64", "complex128"})


def is_x64() -> bool:
    """Whether 64-bit types are on here."""
    return bool(jax.config.jax_enable_x64)  # pyright: ignore[reportAttributeAccessIssue]


def wide_types(values: Iterable[Any]) -> contextlib.AbstractContextManager[Any]:
    """Tracing with 64-bit types on, where one of some arrays or types has 64 bits: with them off JAX makes 32 bits of it."""
    return enable_x64(True) if not is_x64() and any(map(_is_wide, values)) else contextlib.nullcontext()


def types_of_operands(fn: Callable[..., Any]) -> Callable[..., Any]:
    """As a decorator: `wide_types` of what a function of arrays is given."""

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        with wide_types(jax.tree.leaves((args, kwargs))):
            return fn(*args, **kwargs)

    return run


def as_function(closed: Any) -> Callable[..., Any]:
    """A traced program as a function of arrays, computed with the types that it has."""

    def run(*args: Any) -> Any:
        with wide_types(types_in(closed)):
            return jex_core.jaxpr_as_fun(closed)(*args)

    return run


def _is_wide(value: Any) -> bool:
    dtype = getattr(getattr(value, "aval", value), "dtype", None)  # of a symbolic zero its type alone tells
    return getattr(dtype, "name", None) in _WIDE


def unwrapped(ours: bool = True) -> contextlib.AbstractContextManager[Any]:
    """Around the tracing of FusionLab's own code in `jax.numpy`, which is only looked at: without the jit that is around each function of
    it, and takes longer to trace than what is in it. Not around a user's code (`ours` False): JAX would run the loops in it in Python.
    """
    return jax.disable_jit() if ours else contextlib.nullcontext()


def is_jit_disabled() -> bool:
    """Whether the user has what is under a jit run as plain Python, one primitive after another."""
    return bool(jax.config.jax_disable_jit)  # pyright: ignore[reportAttributeAccessIssue]


def matmul_precision() -> str | None:
    """The precision that the user has set for products that ask for none."""
    return jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
