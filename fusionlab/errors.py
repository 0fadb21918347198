"""Every exception FusionLab raises on purpose, and every rejection code with the sentence that explains it.

An error message has three parts: what came, what was needed, what to do about it.
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
    """A named implementation cannot run this call here; the message says why."""


class MissingDependencyError(FusionLabError, ImportError):
    """An optional dependency is missing; the message names the extra that installs it."""


class OutputError(FusionLabError, OSError):
    """A file or folder could not be written; nothing was left half-written."""


class CompileError(FusionLabError, RuntimeError):
    """A CUDA source does not compile; the message holds the source's name, the options and the compiler's log."""


class OutOfMemoryError(FusionLabError, MemoryError):
    """A device had too little memory for a measurement; the message says what was run and, where known, what was asked for."""

    code = "out_of_memory"


class ProcessError(FusionLabError, RuntimeError):
    """One of several processes that run a program together (`jax.distributed`) has ended, or is not where the others are."""


class RewriteError(FusionLabError, RuntimeError):
    """The rewritten graph failed its own check (`fuse(check=True)`)."""


class SideEffectError(FusionLabError, ValueError):
    """The function has side effects (callbacks, prints) that repeated runs would repeat."""


class CacheWarning(UserWarning):
    """A file that FusionLab keeps for itself could not be used or written; it goes on without it, and the message names the file."""


class ExportWarning(UserWarning):
    """A program was lowered for a card from a machine without one: its fused ops are written out in plain operations."""


_MOST_NAMES = 40  # that one message lists
_MOST_NEAR = 3  # that one message proposes


def unknown_name(kind: str, got: object, valid: Iterable[str]) -> UnknownNameError:
    """The error for a misspelt name: lists the valid ones (of very many, those that are spelt most alike) and proposes the nearest."""
    names = sorted(set(valid))
    told = names
    if len(names) > _MOST_NAMES:
        alike = difflib.get_close_matches(str(got), names, n=10, cutoff=0)
        told = [*alike, f"... and {len(names) - len(alike):,} more"]
    return UnknownNameError(f"unknown {kind} {got!r}; valid: {', '.join(told)}.{did_you_mean(got, names)}")


def did_you_mean(got: object, names: Iterable[str], alike: float = 0.6) -> str:
    """The end of an error's message: " Did you mean 'gemm_epilogue'?", or "" where no name is near (`alike`: how near, up to 1)."""
    near = [repr(name) for name in _nearest(str(got).strip(), sorted(set(names)), alike)]
    return f" Did you mean {' or '.join(near)}?" if near else ""


_MOST_LOOKED_AT = 100  # of near names, in alphabetical order


def _nearest(got: str, names: Sequence[str], alike: float) -> list[str]:
    """A name that starts with what came, or has it inside, is nearer than one that is only spelt alike; capitals do not count."""
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


# Rejection codes. The sentence says what the code means in general; each Rejection adds the particulars of its site.
REJECTIONS: dict[str, str] = {
    "rank": "an operand has a rank the fused op does not take",
    "sharding": "on a mesh with explicit axes the site says where its values lie, and the fused op cannot have that type",
    "escapes": "an inner value is also read outside the site, so it has to exist anyway",
    "activation": "the function applied to the linear result is not a known activation",
    "bias": "the added term is not a bias along the output features",
    "scalar": "a captured constant is outside the range the fused op gives meaning to",
    "dtype": "a dtype the fused op does not take",
    "mask": "scores are masked in a way this op does not express",
    "dropout": "weights are dropped at random inside the site, which the fused op does not do",
    "structure": "the site has the pass's anchor but a later part differs from every example",
    "axes": "the axes are reduced, contracted or batched differently from every example",
    "rotary": "queries or keys are turned by a rotary embedding otherwise than the fused op turns them",
    "gradient": "values agree but gradients differ from the fused op's",
    "rounding": "the site is the same function written so that it rounds differently, and was not allowed to change that",
    "value": "the fused op does not reproduce the site's values",
    "symbolic": "a size is symbolic, and kernels are launched for numbers",
    "custom_rule": "a custom_jvp or custom_vjp of the user's own stands inside the site",
    "stop_gradient": "a stop_gradient stands inside the site, and removing it would change gradients",
    "named_residual": "a checkpoint_name stands inside the site, and a remat policy may ask for the value it names",
    "region": "the site crosses the boundary of a region (scan, remat, custom rule) and cannot be replaced as one",
    "overlap": "another, larger fusion claims the same nodes",
    "order": "the site gives several results, and something it reads has to wait for one of them",
    "uncertified": "the site holds a primitive that certification cannot evaluate, or FusionLab itself failed on it (`origin` says where)",
    "device": "nothing but XLA's own code can run it on this device",
    "unmeasured": "nothing was measured faster on this device than XLA's code of the site, and not all that can run it was measured there",
    "slower": "on this device all that can run it was measured slower than the code that XLA makes of the site as it is written",
    "implementation": "the implementation that was asked for cannot run it here",
}

# Code -> what it says: why a route does not take a matrix product.
ROUTE_REASONS: dict[str, str] = {
    "switch": "the route is switched off",
    "device": "the device cannot run it, or what it needs is not installed",
    "role": "it computes no backward",
    "dtype": "operands or result have a dtype it does not take",
    "precision": "the precision asked for is none of its own",
    "axes": "the operands do not lie in memory as it takes them",
    "activation": "it has no such activation behind a product, or one that is not exact enough",
    "scale": "it has no such factors",
    "bias": "it adds no such bias",
    "nothing": "there is nothing it would do beside the product",
    "unmeasured": "nothing was measured, and what was not measured faster stays as it is",
    "slower": "another route was measured faster",
}
