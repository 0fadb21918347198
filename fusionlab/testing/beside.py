"""One call under `fl.fuse` compared with `jax.jit`: differences beyond rounding, and errors raised only by the fused function.

Both run on copies, so that donated arguments and in-place changes are not used twice. A function under a jit of its own
(`jax.jit`, `nnx.jit`, `eqx.filter_jit`) has already run, and its result is the expected one; `fl.fuse` gets it unchanged. Any other
function is put under `jax.jit`, or `nnx.jit` if nnx objects are among its arguments, as a function of the call's arrays only: first
with Python numbers as arrays, as in `jax.jit`, and if that is refused, with numbers held fixed like static arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..errors import FusionLabError, RewriteError, SideEffectError
from ..evidence.check import check_same
from ..evidence.errors.arrays import compare_arrays
from ..evidence.errors.numerics import Numerics
from ..evidence.instruments.program import refuse_side_effects
from ..graph.calls.parts import is_array
from ..graph.calls.state import is_object
from ..graph.calls.wrappers import jit_of
from ..graph.program.trace import error_text
from ..graph.settings import is_jit_disabled
from ..verbs import comparison, lab


@dataclass(frozen=True)
class CallOutcome:
    """The outcome of a call.

    Attributes:
      sites, declined: of its program.
      skipped: why it was not compared; "" if it was.
      fault: the fault of the fused function; "" if there is none.
    """

    sites: int = 0
    declined: int = 0
    skipped: str = ""
    fault: str = ""


@dataclass(frozen=True, eq=False)
class CallArguments:
    """The arguments of a call as they were before it."""

    leaves: tuple[Any, ...]
    tree: Any

    @classmethod
    def of(cls, args: tuple, kwargs: dict, donated: bool = False) -> CallArguments:
        """A copy of everything that a call may change: nnx objects, numpy arrays, and with `donated` also JAX arrays."""
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_object)
        return cls(copied(leaves, donated), tree)

    def call(self, donated: bool = False) -> tuple[tuple, dict]:
        """Arguments for one more call."""
        return jax.tree.unflatten(self.tree, copied(self.leaves, donated))

    @property
    def types(self) -> str:
        """ "f32[8,4], Linear, 'mean'", as a message shows it."""
        shown = [_type_text(x) for x in self.leaves]
        return ", ".join(shown[:12]) + (f" and {len(shown) - 12} more" if len(shown) > 12 else "")


def copied(leaves: Sequence[Any], donated: bool = False) -> tuple[Any, ...]:
    """Copies of leaves that another call may change; Variables shared by objects are shared by the copies."""
    where = [i for i, x in enumerate(leaves) if is_object(x)]
    new = dict(zip(where, _cloned([leaves[i] for i in where]), strict=True))
    return tuple(new[i] if i in new else _copied(x, donated) for i, x in enumerate(leaves))


def _cloned(objects: list[Any]) -> list[Any]:
    if not objects:
        return []
    return list(sys.modules["flax.nnx"].clone(objects))


def _copied(x: Any, donated: bool) -> Any:
    if isinstance(x, np.ndarray) or (donated and isinstance(x, jax.Array)):
        return x.copy()
    return x


def _type_text(x: Any) -> str:
    if is_array(x, numbers=False):
        return f"{getattr(x, 'dtype', '')}{list(getattr(x, 'shape', ()))}".replace(" ", "")
    text = repr(x)
    return text if isinstance(x, int | float | complex | str) and len(text) < 20 else type(x).__name__


def _is_data(x: Any, numbers: bool) -> bool:
    """Whether a value is an array, and not a linen layer with options `shape` and `dtype`, which JAX would take for one."""
    return isinstance(x, jax.Array | np.ndarray | np.generic) or (numbers and isinstance(x, int | float | complex))


class Closed:
    """A function of a list, the arrays and objects of a call; the rest of its arguments is held fixed.

    Its result is the list of arrays and objects in the function's own result.
    """

    def __init__(self, fn: Callable, given: CallArguments, numbers: bool) -> None:
        self._fn, self._given = fn, given
        self._moves = [is_object(x) or _is_data(x, numbers) for x in given.leaves]
        self.holds_objects = any(map(is_object, given.leaves))

    def arrays(self) -> list[Any]:
        return [x for x, moves in zip(copied(self._given.leaves), self._moves, strict=True) if moves]

    @property
    def function(self) -> Callable:
        """The same as a plain function with the name of the user's."""

        def called(arrays: list[Any]) -> list[Any]:
            rest = iter(arrays)
            pairs = zip(self._given.leaves, self._moves, strict=True)
            leaves = [next(rest) if moves else x for x, moves in pairs]
            args, kwargs = jax.tree.unflatten(self._given.tree, leaves)
            return moving(self._fn(*args, **kwargs))

        called.__name__ = called.__qualname__ = getattr(self._fn, "__qualname__", type(self._fn).__name__)
        return called


def moving(tree: Any) -> list[Any]:
    """The arrays and objects in a result."""
    return [x for x in jax.tree.leaves(tree, is_leaf=is_object) if is_object(x) or is_array(x)]


def arrays_of(out: Any, args: Any) -> list[Any]:
    """The arrays in a result, and those in objects of it and of the arguments; random keys as their bits."""
    leaves: list[Any] = []
    for x in [*moving(out), *filter(is_object, jax.tree.leaves(args, is_leaf=is_object))]:
        leaves += jax.tree.leaves(sys.modules["flax.nnx"].state(x)) if is_object(x) else [x]
    return [jax.random.key_data(x) if _is_key(x) else x for x in leaves]


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)


def beside(fn: Callable, given: CallArguments, after: tuple[Any, Any], passes: Any = None) -> CallOutcome:
    """Runs `fl.fuse(fn)` on the arguments of a call and compares.

    Args:
      fn: the function that was called.
      given: its arguments.
      after: (the result, the arguments as the call left them); read only where `fn` is under a jit.
      passes: as for `fusionlab.fuse`.
    """
    if is_jit_disabled():
        return CallOutcome(skipped="jit is disabled")
    jit = jit_of(fn)
    if jit is not None:
        donates = bool(jit.donate_argnums or jit.donate_argnames or jit.donates_rest)
        return _compared(fn, lambda: given.call(donates), arrays_of(*after), passes)
    return _beside_a_jit_of_ours(fn, given, passes)


def _beside_a_jit_of_ours(fn: Callable, given: CallArguments, passes: Any) -> CallOutcome:
    refused: Exception | None = None
    for numbers in (True, False):
        closed = Closed(fn, given, numbers)
        under = sys.modules["flax.nnx"].jit if closed.holds_objects else jax.jit
        function, arrays = closed.function, closed.arrays()
        try:
            if _has_side_effects(function, arrays, closed.holds_objects):
                return CallOutcome(skipped="has side effects")
            want = arrays_of(under(function)(arrays), arrays)
        except Exception as error:  # whatever the user's function raises there is no fault of ours
            refused = error
            continue
        return _compared(closed.function, lambda c=closed: ((c.arrays(),), {}), want, passes)
    return CallOutcome(skipped=f"refused by jax.jit: {type(refused).__name__}")


def _has_side_effects(function: Callable, arrays: list[Any], holds_objects: bool) -> bool:
    """Whether a call has side effects, found before anything runs, because a callback would be called again; with objects by the search."""
    return not holds_objects and bool(jax.make_jaxpr(function)(arrays).effects)


def _compared(fn: Callable, call: Callable[[], tuple[tuple, dict]], want: list[Any], passes: Any) -> CallOutcome:
    """Compares the result of `fl.fuse(fn)` on `call()` with that of `jax.jit`."""
    args, kwargs = call()
    found: lab.Findings | None = None
    try:
        fused = lab.fuse(fn, passes=passes)
        found = seen = fused.findings(*args, **kwargs)
        refuse_side_effects("call", seen.graph.top.jaxpr)
        args, kwargs = call()
        out = fused(*args, **kwargs)
    except SideEffectError:
        return CallOutcome(skipped="has side effects")
    except Exception as error:  # every error is what is looked for here
        where = "fl.fuse" if found is not None else "fl.find"
        return CallOutcome(*_counts(found), fault=f"raises under {where}, not under jax.jit: {error_text(error)}")
    got = arrays_of(out, (args, kwargs))
    fault = _other_types(want, got) or _other_values(want, got, lambda: _numerics(fn, fused, call))
    return CallOutcome(*_counts(found), fault=fault)


def _counts(found: lab.Findings | None) -> tuple[int, int]:
    return (0, 0) if found is None else (len(found.select()), len(found.rejections))


def _other_types(want: list[Any], got: list[Any]) -> str:
    """How results differ from the expected ones in number or type; "" if they do not."""
    if len(want) != len(got):
        return f"returns {len(got)} arrays, under jax.jit {len(want)}"
    for i, (a, b) in enumerate(zip(want, got, strict=True)):
        if (old := _array_type(a)) != (new := _array_type(b)):
            return f"array {i} of the result and of the in-place changes is {new}, under jax.jit {old}"
    return ""


def _other_values(want: list[Any], got: list[Any], numerics: Callable[[], Numerics | None]) -> str:
    try:
        check_same(want, got, "call")
    except RewriteError as error:
        return "" if _is_rounding(want, got, numerics()) else str(error)
    return ""


def _is_rounding(want: list[Any], got: list[Any], numerics: Numerics | None) -> bool:
    """Whether the fused version is as close to float64 as the original, however far apart the two are.

    The programs compared with float64 are traced anew, without donation and outside the call, so this excuses no difference larger than
    the errors found.
    """
    if numerics is None or numerics.regressions:
        return False
    return all(_is_known(b, a, numerics) for b, a in zip(want, got, strict=True))


def _is_known(want: Any, got: Any, numerics: Numerics) -> bool:
    """Whether an array of a call differs by at most twice as much as two versions with these errors may, as they are compiled again."""
    want, got = np.asarray(want), np.asarray(got)
    found = compare_arrays(got, want, want.dtype)
    same = [leaf for leaf in numerics.leaves if (leaf.dtype, leaf.shape) == (str(want.dtype), want.shape)]
    far = 2 * max((leaf.before.max_abs + leaf.after.max_abs for leaf in same), default=0.0)
    return found.max_abs <= far and found.nonfinite_mismatch <= max(
        (x.between.nonfinite_mismatch for x in same), default=0
    )


def _array_type(x: Any) -> str:
    if not hasattr(x, "dtype"):
        return type(x).__name__
    weak = ", weakly typed" if getattr(x, "weak_type", False) else ""
    return f"{x.dtype}{list(x.shape)}{weak}"


def _numerics(fn: Callable, fused: lab.Fused, call: Callable[[], tuple[tuple, dict]]) -> Numerics | None:
    """The errors of both versions against float64; None if the program has no float64 form."""
    args, kwargs = call()
    try:
        return comparison.compare(fn, fused, *args, grad=False, timing=False, memory=False, **kwargs).numerics
    except FusionLabError:
        return None
