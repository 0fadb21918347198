"""Every exception that FusionLab raises on purpose, and every rejection code with the sentence that explains it.

An error message has three parts: the value found, the value needed, and how to fix it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence


class FusionLabError(Exception):
    """Base of all errors raised on purpose by FusionLab."""


class TraceError(FusionLabError):
    """The function could not be traced by JAX with the arguments given."""


class ArgumentError(FusionLabError, ValueError):
    """An argument has the wrong shape, dtype or value; the message names the argument."""


class UnknownNameError(FusionLabError, ValueError):
    """A pass, activation, implementation or option name is not one of the valid ones."""


class BackendError(FusionLabError, RuntimeError):
    """A requested implementation cannot run this call here; the message gives the reason."""


class MissingDependencyError(FusionLabError, ImportError):
    """An optional dependency is missing; the message names the extra that installs it."""


class OutputError(FusionLabError, OSError):
    """A file or folder could not be written; nothing was left half-written."""


class CompileError(FusionLabError, RuntimeError):
    """A CUDA source does not compile; the message holds the source's name, the options and the compiler's log."""


class OutOfMemoryError(FusionLabError, MemoryError):
    """A device had too little memory for a measurement; the message names the program and, if known, the size requested."""

    code = "out_of_memory"


class ProcessError(FusionLabError, RuntimeError):
    """One of the processes that run a program together (`jax.distributed`) has ended or is out of step with the others."""


class RewriteError(FusionLabError, RuntimeError):
    """The rewritten graph failed its own check (`fuse(check=True)`)."""


class SideEffectError(FusionLabError, ValueError):
    """The function has side effects (callbacks, prints) that repeated runs would repeat."""


class CacheWarning(UserWarning):
    """A file of FusionLab's own cache could not be read or written; FusionLab continues without it and names the file."""


class ExportWarning(UserWarning):
    """A program was lowered for a GPU on a machine without one, so its fused ops are written out as plain operations."""


_MOST_NAMES = 40  # that one message lists
_MOST_NEAR = 3  # that one message proposes


def unknown_name(kind: str, got: object, valid: Iterable[str]) -> UnknownNameError:
    """The error for a misspelt name: lists the valid names (only the closest if there are many) and suggests the nearest."""
    names = sorted(set(valid))
    shown = names
    if len(names) > _MOST_NAMES:
        alike = difflib.get_close_matches(str(got), names, n=10, cutoff=0)
        shown = [*alike, f"... and {len(names) - len(alike):,} more"]
    return UnknownNameError(f"unknown {kind} {got!r}; valid: {', '.join(shown)}.{did_you_mean(got, names)}")


def did_you_mean(got: object, names: Iterable[str], alike: float = 0.6) -> str:
    """The end of an error message: " Did you mean 'gemm_epilogue'?", or "" if no name is near (`alike`: the least similarity, up to 1)."""
    near = [repr(name) for name in _nearest(str(got).strip(), sorted(set(names)), alike)]
    return f" Did you mean {' or '.join(near)}?" if near else ""


_MOST_LOOKED_AT = 100  # of near names, in alphabetical order


def _nearest(got: str, names: Sequence[str], alike: float) -> list[str]:
    """The nearest names: those that start with or contain `got` before those spelt alike, ignoring case."""
    asked = got.casefold()
    tests: tuple[Callable[[str, str], bool], ...] = (str.__eq__, str.startswith, str.__contains__)
    for is_near in tests if len(asked) > 1 else ():
        found = [name for name in names if is_near(name.casefold(), asked)][:_MOST_LOOKED_AT]
        # "gemm_epilogue" speaks for "gemm_epilogue_grad", too.
        shortest = [name for name in found if not any(name != other and name.startswith(other) for other in found)]
        if found:
            return shortest[:_MOST_NEAR]
    spelt = {name.casefold(): name for name in names}
    return [spelt[name] for name in difflib.get_close_matches(asked, spelt, n=1, cutoff=alike)]


# Rejection codes, each with its general meaning; a Rejection adds the particulars of its site.
REJECTIONS: dict[str, str] = {
    "rank": "an operand has a rank the fused op does not take",
    "sharding": "the site fixes the layout of its values over explicit mesh axes, and the fused op cannot have that type",
    "escapes": "an inner value is also read outside the site, so it has to be computed anyway",
    "activation": "the function applied to the linear result is not a known activation",
    "bias": "the added term is not a bias along the output features",
    "scalar": "a captured constant is outside the range that the fused op accepts",
    "dtype": "the fused op does not take one of the dtypes",
    "mask": "scores are masked in a way that the fused op cannot express",
    "dropout": "the site drops weights at random, and the fused op does not",
    "structure": "the site has the pass's anchor but a later part differs from every example",
    "axes": "the axes are reduced, contracted or batched differently from every example",
    "rotary": "a rotary embedding rotates queries or keys differently from the fused op",
    "gradient": "the values agree with the fused op's, but the gradients differ",
    "rounding": "the site computes the same function but rounds differently, and a change of rounding was not allowed",
    "value": "the fused op does not reproduce the site's values",
    "symbolic": "a size is symbolic, and kernels need concrete sizes",
    "custom_rule": "the site contains a custom_jvp or custom_vjp of the user's own",
    "stop_gradient": "the site contains a stop_gradient, and removing it would change gradients",
    "named_residual": "the site contains a checkpoint_name, and a remat policy may ask for the value it names",
    "region": "the site crosses the boundary of a region (scan, remat, custom rule) and cannot be replaced as a whole",
    "overlap": "another, larger fusion claims the same nodes",
    "order": "the site has several results, and one of its operands depends on one of them",
    "uncertified": "the site contains a primitive that certification cannot evaluate, or FusionLab itself failed on it (see `origin`)",
    "device": "cannot run here: only XLA's own code can run it on this device; the sentence names what the others need",
    "unmeasured": "not measured here: no implementation was measured faster than XLA's code on this device, and some were not measured "
    "there; fusionlab.tune measures them",
    "slower": "slower here: every implementation that can run it was measured slower on this device than XLA's code for the site as "
    "written; name the pass or an implementation to have it anyway",
    "implementation": "the requested implementation cannot run it here",
}

# Code -> why a route does not take a matrix product.
ROUTE_REASONS: dict[str, str] = {
    "switch": "the route is switched off",
    "device": "the device cannot run it, or a library that it needs is not installed",
    "role": "it has no backward pass",
    "dtype": "it does not take the dtype of an operand or of the result",
    "precision": "it does not offer the requested precision",
    "axes": "it does not take operands in this memory layout",
    "activation": "it cannot apply this activation to a product, or not accurately enough",
    "scale": "it cannot apply these factors",
    "bias": "it cannot add this bias",
    "nothing": "there is nothing to fuse with the product",
    "unmeasured": "it was not measured here, and only a route that was measured faster is taken",
    "slower": "another route was measured faster",
}
