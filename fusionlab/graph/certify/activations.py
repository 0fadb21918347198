"""Activations recognised by value: a raw elementwise cone evaluated, with its derivative, on points that distinguish functions.

Neither spelling nor names matter. The points are a dense signed grid over all magnitudes, both zeros,
infinities, NaN, and every place where a comparison in the cone switches, with its neighbours and the midpoints between them: relu6
does not pass for relu, nor maximum (half a gradient at 0) for relu. A cone that compares a nonlinear function of its input is
declined, because its switch points are not known.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from ..canonical.nodes import ONE
from ..canonical.rules import is_jax_rule
from ..canonical.view import CanonicalView
from ..interpret.evaluate import Inline
from ..interpret.limits import CannotEvaluate
from ..jax_compat import names_an_axis
from ..primitives import having
from ..program.boundary import guarded
from ..program.equations import slice_jaxpr
from ..program.explicit_axes import sharding_in_type
from ..program.ir import Literal, Node, Value, values_in
from ..program.signature import block_signature, node_signature
from ..program.trace import block_of_jaxpr
from ..settings import is_x64, unwrapped
from .certify import Certifier
from .profiles import Profile, distance, gap, on_points, points_of, profile
from .switch_points import breakpoints

_LINEAR = having("difference", "scaling", "cast") | {"add", "copy"}
# What an activation is made of; what is periodic, has poles or counts bits is part of none that is known.
ACTIVATION_PRIMITIVES = (
    _LINEAR
    | having(
        "extreme",
        "equality",
        "order",
        "choice",
        "magnitude",
        "power",
        "root",
        "cube root",
        "exponential",
        "logarithm",
        "sigmoid",
        "finite",
    )
    | frozenset("sin cos atan sinh cosh asinh not and or".split())
)
# Functions that make an elementwise cone an activation rather than a scaling.
NONLINEAR = ACTIVATION_PRIMITIVES - _LINEAR | {"custom_jvp_call"}
LOOKS = (-2.7, -0.5, 0.9, 2.7)  # where a first look is taken, which most functions of a program do not stand
_ALIKE = 0.01  # far beyond the rounding of any dtype, and of the three digits of `Known.looks`
_LARGEST = 40  # operations, literals that are broadcast among them; the longest spelling known has about a dozen
# The known functions are traced at the cone's own dtype, so their literals round as the cone's do; what is left is the
# rounding of a constant that was folded in another order: 2 units in the last place. tanh- and erf-GELU are 4.7e-4 apart: half of that is
# the most that can be allowed anywhere (a bfloat16 GELU with 0.8 for 0.7979 is 7e-4 away from the nearest).
ACTIVATION_TOLERANCE = {"float64": 1e-8, "float32": 2.5e-7, "float16": 1e-4, "bfloat16": 2e-4}


@dataclass(frozen=True)
class KnownActivation:
    """A known function: `fn` in jnp, and its values at `LOOKS` to three digits, as `looks`."""

    fn: Callable[..., Any]
    looks: tuple[float, ...]


@dataclass(frozen=True)
class Recognised:
    """The known function of a cone. `name` is None for an unknown function; then `why` is the reason, `nearest` the nearest function, and
    `origin` the place where FusionLab itself failed. These are computed on demand (`explained`), which is rare."""

    name: str | None
    why: str = ""
    code: str = "activation"
    nearest: str = ""
    origin: str = ""
    asked: Callable[[], Recognised] | None = None

    def explained(self) -> Recognised:
        """The same with `why` and `nearest`."""
        return self if self.asked is None else self.asked()


def cone(view: CanonicalView, start: Value) -> list[Node]:
    """Raw elementwise nodes of the block computable from `start` and literals alone, in program order."""
    block = view.block
    inside: set[int] = {start.id}
    taken: dict[int, Node] = {}
    queue = [n.id for n in block.users.get(start.id, ())]
    by_id = {n.id: n for n in block.users.get(start.id, ())}
    heapq.heapify(queue)
    while queue:
        nid = heapq.heappop(queue)
        node = by_id[nid]
        if nid in taken or not _joins(view, node, inside, start):
            continue
        taken[nid] = node
        for value in node.outputs:
            inside.add(value.id)
            for user in block.users.get(value.id, ()):
                if user.id not in by_id:
                    by_id[user.id] = user
                    heapq.heappush(queue, user.id)
    return [taken[i] for i in sorted(taken)]


def _joins(view: CanonicalView, node: Node, inside: set[int], start: Value) -> bool:
    if node.primitive not in ACTIVATION_PRIMITIVES and not is_jax_rule(node):
        return False
    dtype = node.outputs[0].dtype
    if node.primitive == "convert_element_type" and np.dtype(dtype).kind != "b" and dtype != start.dtype:
        return False  # rounding, and what overflows where, is part of what the program means
    return all(isinstance(a, Literal) or a.id in inside or _written(view, a) for a in node.inputs)


def _written(view: CanonicalView, value: Value) -> bool:
    """Whether a value is a literal and computed from literals: a value that is 0 for all inputs may still be computed from arrays."""
    stack = [value]
    while stack:
        v = stack.pop()
        maker = view.block.producer.get(v.id)
        if view.ref[v.id].nid != ONE or (maker is None and v.id not in view.known_inputs):
            return False
        stack += values_in(maker.inputs) if maker is not None else []
    return True


def between(view: CanonicalView, start: Value, end: Value) -> list[Node]:
    """The nodes from `start` (excluded) to `end`, with the literal broadcasts they read, in program order."""
    block, nodes, stack = view.block, {}, [end]
    while stack:
        value = stack.pop()
        if value.id == start.id or value.id in view.known_inputs:
            continue
        node = block.producer[value.id]
        if node.id not in nodes:
            nodes[node.id] = node
            stack += values_in(node.inputs)
    return [nodes[i] for i in sorted(nodes)]


def recognise(
    view: CanonicalView, start: Value, end: Value, known: Mapping[str, KnownActivation], certifier: Certifier
) -> Recognised:
    """Which known activation `end` is of `start`, in values and in derivative.

    Args:
      view: the block's canonical view.
      start, end: raw values, `end` an elementwise function of `start`.
      known: name -> function.
      certifier: remembers answers by the cone's signature.
    """
    nodes = between(view, start, end)
    if len(nodes) > _LARGEST:  # each would be evaluated with all before it: minutes behind a few hundred operations
        return Recognised(None, f"it takes {len(nodes)} operations, more than any known function")
    number: dict[int, Any] = {start.id: 0, **{i: ("known", c) for i, c in view.known_inputs.items()}}
    key = (
        "cone",
        start.shape,
        str(start.dtype),
        sharding_in_type(start.aval),
        tuple(node_signature(n, number) for n in nodes),
        number[end.id],
        tuple(known),
    )
    return certifier.once(
        key,
        lambda: guarded(
            lambda: _recognise(view, nodes, start, end, known, certifier),
            lambda fault: Recognised(None, str(fault), "uncertified", origin=fault.origin),
        ),
    )


def _recognise(
    view: CanonicalView,
    nodes: Sequence[Node],
    start: Value,
    end: Value,
    known: Mapping[str, KnownActivation],
    certifier: Certifier,
) -> Recognised:
    if end.dtype != start.dtype:
        return Recognised(None, f"its result is {end.dtype}, not {start.dtype}")
    if any(names_an_axis(n.eqn) for n in nodes):
        return Recognised(None, "it communicates with other devices", "region")
    switches = breakpoints(view, start, nodes)
    if switches is None:
        return Recognised(None, "it compares a nonlinear function of its input, so its switch points are not known")
    cut = _Cone(slice_jaxpr(view.block, nodes, (start,), end, view.known_inputs), start, switches, certifier.inline)
    try:
        looks = cut.at(np.array(LOOKS))
        alike = {name: k for name, k in known.items() if np.allclose(looks, k.looks, rtol=_ALIKE, atol=_ALIKE)}
        errors = cut.errors(alike, twice=any(n.blocks for n in nodes)) if alike else {}
    except CannotEvaluate as error:
        return Recognised(None, f"it holds {error}, which cannot be evaluated", "uncertified")
    # JAX raises it for a mesh axis that is not bound: by a user's rule that sums over one in the derivative alone.
    except NameError as error:
        return Recognised(None, f"its derivative cannot be traced here: {error}", "uncertified")
    return _verdict(errors, cut.tolerance) or Recognised(None, asked=functools.cache(lambda: cut.nearest(known)))


@dataclass(frozen=True, eq=False)
class _Cone:
    """A cone as a program of its own: `closed` computes its end of `start`, and switches at `switches`."""

    closed: Any
    start: Value
    switches: Sequence[float]
    inline: Inline

    @property
    def tolerance(self) -> float:
        return ACTIVATION_TOLERANCE.get(np.dtype(self.start.dtype).name, 1e-6)

    @functools.cached_property
    def points(self) -> np.ndarray:
        return points_of(self.switches)

    @functools.cached_property
    def values(self) -> np.ndarray:
        return self.at(self.points)

    def at(self, points: np.ndarray) -> np.ndarray:
        return on_points(self.closed, self.start.shape, points, self.inline)[0]

    def of_known(self) -> tuple[str, bytes, bool]:
        """The arguments for the values of a known function."""
        return str(self.start.dtype), self.points.tobytes(), is_x64()

    def errors(self, known: Mapping[str, KnownActivation], twice: bool) -> dict[str, tuple[float, float]]:
        """The distance to each known function in value and in derivative; `twice`: a custom rule may have any second derivative."""
        own, like = block_signature(block_of_jaxpr(self.closed)), (self.start.shape, str(self.start.dtype), is_x64())
        written = next((name for name, k in known.items() if _known_signature(k.fn, *like) == own), None)
        if written is not None:
            return {written: (0.0, 0.0)}  # it is that function, equation by equation
        # 1 + tanh(h) compares nothing: what is cut off in a tail is no noise.
        noisy = all(c == 0 for c in self.switches)
        theirs = {name: _known_values(k.fn, *self.of_known()) for name, k in known.items()}
        errors = {n: (distance(self.values, values, self.points, noisy), math.inf) for n, values in theirs.items()}
        alike = [name for name, (error, _) in errors.items() if error <= self.tolerance]
        if alike:  # of what has other values nobody asks the derivative, which takes most of the time
            fn = jex_core.jaxpr_as_fun(self.closed)
            mine = profile(lambda h: fn(h)[0], self.start, self.points, self.inline, twice)
            for name in alike:
                slope = _known_profile(known[name].fn, *self.of_known(), twice).slope
                errors[name] = errors[name][0], distance(mine.slope, slope, mine.slope_points, noisy)
                if errors[name] == (0, 0):
                    break  # none comes nearer
        return errors

    def nearest(self, known: Mapping[str, KnownActivation]) -> Recognised:
        """The result for an unknown function: the known function whose values come nearest."""
        try:
            gaps = {n: gap(self.values, _known_values(k.fn, *self.of_known()), self.points) for n, k in known.items()}
        except CannotEvaluate as error:  # on few points it could
            return Recognised(None, f"it holds {error}, which cannot be evaluated", "uncertified")
        name = min(gaps, key=lambda n: gaps[n].size)
        return Recognised(None, f"the nearest known function is {name}{gaps[name]}", nearest=name)


@functools.lru_cache(maxsize=1024)
def _known_values(reference: Callable[..., Any], dtype: str, points: bytes, x64: bool) -> np.ndarray:
    """The values of a known function at the points, cached for all searches of a process; x64 determines the types of its numbers."""
    with unwrapped():
        closed = jax.make_jaxpr(reference)(jax.ShapeDtypeStruct((2,), jnp.dtype(dtype)))
    return on_points(closed, (2,), np.frombuffer(points), lambda eqn: None)[0]


@functools.lru_cache(maxsize=1024)
def _known_signature(reference: Callable[..., Any], shape: tuple[int, ...], dtype: str, x64: bool) -> Any:
    """A known function's equations at a type."""
    with unwrapped():
        return block_signature(block_of_jaxpr(jax.make_jaxpr(reference)(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))))


@functools.lru_cache(maxsize=1024)
def _known_profile(reference: Callable[..., Any], dtype: str, points: bytes, x64: bool, twice: bool) -> Profile:
    """The profile of a known function, likewise."""
    like = Value(-1, jax.ShapeDtypeStruct((2,), jnp.dtype(dtype)))
    return profile(reference, like, np.frombuffer(points), lambda eqn: None, twice)


def value_name(node: Node, known: Mapping[str, KnownActivation], certifier: Certifier) -> str | None:
    """The known function computed by a node with a custom rule, regardless of the derivative in its rule."""
    body = node.blocks[0] if node.blocks else None
    if body is None or len(body.inputs) != 1 or len(body.outputs) != 1 or not isinstance(body.outputs[0], Value):
        return None
    start, end = body.inputs[0], body.outputs[0]
    if start.shape != end.shape or start.dtype != end.dtype:
        return None
    return recognise(CanonicalView(body), start, end, known, certifier).name


def _verdict(errors: Mapping[str, tuple[float, float]], tolerance: float) -> Recognised | None:
    """The recognised function; None if its values match no known function."""
    good = [n for n, (v, s) in errors.items() if v <= tolerance and s <= tolerance]
    if good:
        return Recognised(min(good, key=lambda n: errors[n]))
    by_value = [n for n, (v, _) in errors.items() if v <= tolerance]
    if by_value:
        return Recognised(None, f"its values are {by_value[0]}'s but its gradient is not", "gradient", by_value[0])
    return None
