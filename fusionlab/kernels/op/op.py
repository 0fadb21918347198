"""The op protocol: a fused op is three JAX primitives of our own, with a plain `jax.numpy` meaning each.

`call` carries the op's name (`gemm_epilogue`), so a traced fused function shows the op as one named node. When it is
differentiated, `call` is bound with `residuals=True` and its tangent is `<op>_tangent`, a linear primitive whose transpose
is `<op>_cotangent`, the fused backward. Both take only the operands and residuals that the wanted gradients read (`live`
says which are wanted), so nothing else is kept until the backward pass. A second derivative differentiates the meaning.

Why not `jax.custom_vjp`: it refuses forward mode, hessians and the gradient of a gradient.

Words: an op's *slots* name its operands in order, optional ones last; the attribute `present` names those a call has, any
of the optional ones may be absent. `live` holds one bool for each operand present; of an op that gives several results, `given` holds
one for each: whether it has a tangent, or a cotangent. A cotangent that is a sum may be given as what it is the sum of: `given` then says
of how many arrays.
"""

from __future__ import annotations

import abc
import functools
import itertools
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.interpreters import ad, batching, mlir

from ...device import Device
from ...errors import unknown_name
from ...graph.canonical.fused_nodes import FusedForm
from ...graph.jax_compat import varies
from ...graph.program.explicit_axes import mesh_of, sharding_in_type
from ...graph.program.in_shard_map import same_varying_axes
from ...graph.program.ir import dtype_text
from ...graph.settings import WHERE_IT_RUNS, jax_defaults, types_of_operands
from . import lowering as partition
from .arrays import as_arrays, batch_to_front, canonical_precision, explicit_sharding, zero_tangent
from .chooser import Chooser
from .implementation import Residual
from .labels import Axes, SummedCall, origin
from .primitive import FusedPrimitive, Meaning, attributes_in, give_types_and_eager_call, given_of, wanted_of

Array = Any


class Op(Chooser):
    """A fused op: its primitives, its meaning, its implementations.

    A subclass says what it computes; this class makes it work under every JAX transformation. Its attributes are those in
    `defaults`, `implementation`, and `gradient`: None for the op's own, "reference" for JAX's of the reference. The implementation
    named "xla" is the reference: plain `jax.numpy`, and the meaning of the op.
    """

    slots: ClassVar[tuple[str, ...]]
    defaults: ClassVar[Mapping[str, Any]]
    # Result -> of how many arrays its cotangent may be the sum, that an implementation adds up itself; one, where it is not named.
    addends: ClassVar[Mapping[str, int]] = {}
    is_users: ClassVar[bool] = False  # whether its meaning is a user's code
    # The attributes that make another function, and those that are numbers, by which the search tells calls apart; without traits it does
    # not see the op.
    traits: ClassVar[tuple[str, ...] | None] = None
    numbers: ClassVar[tuple[str, ...]] = ()
    whole: ClassVar[frozenset[str]] = (
        frozenset()
    )  # labels, without their numbers, of axes that no device may hold a part of
    # Of an op whose batch is more rows: what has entries of its own for each row, beside the result, and the attribute that numbers an axis
    # behind the rows, or counts them, if one does.
    rows: ClassVar[tuple[str, ...]] = ()
    behind_rows: ClassVar[str | None] = None

    def __init__(self) -> None:
        self._call = FusedPrimitive(self.name, self, "call")
        self._tangent = FusedPrimitive(f"{self.name}_tangent", self, "tangent")
        self._cotangent = FusedPrimitive(f"{self.name}_cotangent", self, "cotangent")
        for primitive in self.primitives.values():
            self._register(primitive)
        ad.primitive_jvps[self._call] = rule(self._jvp_of_call)
        ad.primitive_jvps[self._tangent] = rule(functools.partial(self._jvp_of_linear, self._tangent))
        ad.primitive_jvps[self._cotangent] = rule(functools.partial(self._jvp_of_linear, self._cotangent))
        ad.primitive_transposes[self._tangent] = rule(self._transpose_of_tangent)
        ad.primitive_transposes[self._cotangent] = rule(self._transpose_of_cotangent)

    # What an op says of itself.

    @abc.abstractmethod
    def prepare(self, given: Mapping[str, Any], attrs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Checks the operands given (slot -> anything with shape and dtype) and the attributes.

        Returns the operands as the primitives take them, and all attributes but `present` in canonical, hashable form.
        """

    def results(self, **attrs: Any) -> tuple[str, ...]:
        """The names of what a call gives; the cotangent of one that is not "out" is named "ct_<result>"."""
        return ("out",)

    def residual_names(self, **attrs: Any) -> tuple[str, ...]:
        """What the forward saves beside its operands and its results."""
        return ()

    def reads(self, wanted: tuple[str, ...], **attrs: Any) -> frozenset[str]:
        """The slots, residuals and results that the gradients of the slots in `wanted` read."""
        return frozenset(self.slots)

    def batch(
        self, role: str, names: tuple[str, ...], values: list[Array], dims: list[int | None], params: dict[str, Any]
    ) -> tuple[list[Array], dict[str, Any]] | None:
        """The same primitive over a batch: operands and parameters with the batch as axis 0 of every result.

        `names` are slots and residuals; tangents are named "d_<slot>", the cotangent "ct". None: it cannot take the batch. By default a
        batch of `rows` is more of them; one of anything else (weights, say), or of its gradients, is not the same op.
        """
        has_rows = [origin(name) in ("out", *self.rows) for name in names]
        if any(d is not None and not own for d, own in zip(dims, has_rows, strict=True)):
            return None
        # Other gradients are sums over rows: each of the batch has its own, more rows would have one together.
        if role == "cotangent" and not set(wanted_of(params)) <= set(self.rows):
            return None
        at = list(itertools.compress(range(len(names)), has_rows))
        moved = dict(zip(at, batch_to_front([values[i] for i in at], [dims[i] for i in at]), strict=True))
        axis = {} if self.behind_rows is None else {self.behind_rows: params[self.behind_rows] + 1}
        return [moved.get(i, v) for i, v in enumerate(values)], params | axis

    def for_device(self, shapes: Mapping[str, Any], attrs: dict[str, Any], device: Device) -> dict[str, Any]:
        """The attributes `prepare` gave, completed by those that hang on the device as well."""
        return attrs

    def operand_shapes(self, shapes: dict[str, Any], **attrs: Any) -> dict[str, Any]:
        """The operands of a call of these shapes once settings among the attributes have changed."""
        return shapes

    def plain(self, params: Mapping[str, Any], shapes: dict[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """A primitive's parameters and operands (by name) with residuals laid out as the reference has them."""
        return params, shapes

    def share(self, shapes: Mapping[str, Any], /, **attrs: Any) -> float:
        """The part of its meaning's arithmetic that the op has to do, for a meaning that computes what it then throws away."""
        return 1.0

    @abc.abstractmethod
    def formula(self, **attrs: Any) -> str:
        """What it computes, for a reader."""

    def labels(self, shapes: Mapping[str, tuple[int, ...]], /, **attrs: Any) -> Mapping[str, tuple[str, ...]]:
        """Slot, residual or "out" -> a label for each of its axes, as `Axes` has them; without any, each device computes everything.

        `shapes` has those of the slots of a call, in order, or of the slots, residuals and "out" that one primitive takes and gives: "out"
        always, others maybe.
        """
        return {}

    def form(self, shapes: Mapping[str, tuple[int, ...]], /, **attrs: Any) -> FusedForm | None:
        """A label for each axis of the operands (slot -> shape) and of the result; None for a call the search is not to see."""
        if self.traits is None:
            return None
        labels = self.labels(shapes, **attrs)
        traits, numbers = (tuple((name, attrs[name]) for name in names) for names in (self.traits, self.numbers))
        return FusedForm(tuple(shapes), tuple(labels[slot] for slot in shapes), labels["out"], traits, numbers)

    def axes(self, shapes: Mapping[str, tuple[int, ...]], /, **attrs: Any) -> Axes:
        """Labels for the axes of all it reads and gives: how opaque code is split among devices."""
        labels = self.labels(shapes, **attrs)
        return Axes(
            labels, frozenset(x for own in labels.values() for x in own if x.rstrip(string.digits) in self.whole)
        )

    def summed_call(self, params: Mapping[str, Any]) -> SummedCall | None:
        """How a call is computed whose contracted axes are split; None: every device needs them whole."""
        return None

    def anchor_dimensions(self, params: Mapping[str, Any]) -> Any:
        """`dimension_numbers` of the product at the op's heart, or None for an op without one."""
        return None

    def row_sum(self, params: Mapping[str, Any]) -> str | None:
        """The slot whose gradient is the sum of the cotangent over all axes but the last, if a cotangent with these parameters gives it."""
        return None

    def summing(self, slot: str, params: Mapping[str, Any], dtype: str) -> tuple[dict[str, Any], str] | None:
        """The parameters of a cotangent with which it also gives the sum of a slot's gradient over all axes but the last, in `dtype`, and
        the slot that this is the gradient of. It reads nothing more. None: it cannot."""
        return None

    def saved_names(self, wanted: tuple[str, ...], attrs: Mapping[str, Any]) -> tuple[str, ...]:
        """What the gradients of the slots in `wanted` read, in the order in which the primitives take it."""
        read = self.reads(wanted, **attrs)
        return tuple(n for n in (*self.slots, *self.results(**attrs), *self.residual_names(**attrs)) if n in read)

    # What users of an op call.

    @property
    def primitives(self) -> dict[str, FusedPrimitive]:
        """Primitive name -> primitive."""
        return {p.name: p for p in (self._call, self._tangent, self._cotangent)}

    def call(self, *operands: Any, **attrs: Any) -> Any:
        """Binds the op: one named node in a trace. `operands` in slot order; None for an absent optional one.

        Returns its result; a tuple of them, where it gives several.
        """
        return _single_or_tuple(self._bind_call(operands, attrs, residuals=False))

    def call_with_residuals(self, *operands: Any, **attrs: Any) -> tuple[Array, ...]:
        """`(*results, *residuals)`: what the differentiated forward returns."""
        return tuple(self._bind_call(operands, attrs, residuals=True))

    def reference(self, *operands: Any, **attrs: Any) -> Any:
        """The op's meaning in plain `jax.numpy`; differentiating it gives JAX's own gradients of that code."""
        present, full = self._prepared(as_arrays(self.slots, operands), attrs)
        with jax_defaults(WHERE_IT_RUNS):
            return _single_or_tuple(self.implementations["xla"].forward(**present, residuals=False, **full))

    def residuals(self, *operands: Any, **attrs: Any) -> tuple[Residual, ...]:
        """What the forward saves for backward when every operand's gradient is wanted."""
        present, full = self._prepared(operands, attrs)
        slots = [slot for slot, a in present.items() if jnp.issubdtype(a.dtype, jnp.floating)]
        types = [ShapedArray(a.shape, a.dtype) for a in present.values()]
        with jax_defaults():
            shapes = self._call.types(types, {"residuals": True, **full})
        found = zip((*self.results(**full), *self.residual_names(**full)), shapes, strict=True)
        records = []
        for name, s in found:
            readers = tuple("d" + slot for slot in slots if name in self.reads((slot,), **full))
            if readers:
                nbytes = int(np.prod(s.shape, dtype=np.int64)) * s.dtype.itemsize
                records.append(Residual(name, tuple(s.shape), dtype_text(s.dtype), nbytes, readers))
        return tuple(records)

    def meaning(self, primitive_name: str, params: Mapping[str, Any]) -> Meaning:
        """A plain-jnp function of the operands of one of this op's primitives, with these parameters: -> list."""
        return self.primitives[primitive_name].function(params, "xla")

    # Binding and running.

    def _prepared(
        self, operands: Sequence[Any], attrs: Mapping[str, Any], device: Device | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        given = {slot: a for slot, a in zip(self.slots, operands, strict=False) if a is not None}
        present, full = self.prepare(given, attrs)
        full["present"] = tuple(present)
        return present, self.for_device(present, full, device or Device.asked())

    def _bind_call(self, operands: Sequence[Any], attrs: Mapping[str, Any], residuals: bool) -> list[Array]:
        present, full = self._prepared(as_arrays(self.slots, operands), attrs)
        device = Device.asked()
        if full["implementation"] is not None:
            self.chosen("call", present, device, full)
        full |= partition.marks(self, present, device, full)
        return self._call.bind(*same_varying_axes(list(present.values())), residuals=residuals, **full)

    def with_defaults(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes given, and the defaults of the others.

        Raises:
          UnknownNameError: there is no such attribute, or no implementation of that name.
        """
        known = {**self.defaults, "implementation": None, "gradient": None}
        for name in attrs:
            if name not in known:
                raise unknown_name(f"{self.name} attribute", name, known)
        full = known | dict(attrs)
        name = full["implementation"]
        if name is not None and (not isinstance(name, str) or name not in self.implementations):
            raise unknown_name(f"{self.name} implementation", name, self.implementations)
        if full["gradient"] not in (None, "reference"):
            raise unknown_name(f"{self.name} gradient", full["gradient"], ("reference",))
        return full

    def _register(self, primitive: FusedPrimitive) -> None:
        give_types_and_eager_call(primitive)
        batching.primitive_batchers[primitive] = rule(functools.partial(self._batching_rule, primitive))
        for platform in ("cpu", "cuda", None):
            run = functools.partial(partition.run, primitive, platform or "other")
            mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True), platform=platform)

    # Transformations.

    def at_precision_set(self, params: dict[str, Any]) -> dict[str, Any]:
        """The parameters of a gradient, at the precision that the user has set where it is pulled back, if the call asked for none: JAX
        makes the products of a gradient as it transposes, and as is set there.
        """
        asks_for_none = params.get("precision", "") is None
        return params | {"precision": canonical_precision(None)} if asks_for_none else params

    def _jvp_of_call(
        self, primals: Sequence[Array], tangents: Sequence[Any], *, residuals: bool, **attrs: Any
    ) -> tuple[list[Array], list[Any]]:
        if attrs["gradient"] == "reference" and not residuals:
            return self._jvp_of_reference(primals, tangents, attrs)
        live = tuple(type(t) is not ad.Zero for t in tangents)
        slots = attrs["present"]
        wanted = tuple(itertools.compress(slots, live))
        saved = self.saved_names(wanted, attrs)
        results, names = self.results(**attrs), self.residual_names(**attrs)
        outs = self._call.bind(*primals, residuals=residuals or any(n in saved for n in names), **attrs)
        known = dict(zip(slots, primals, strict=True)) | dict(zip((*results, *names), outs, strict=False))
        moving = list(itertools.compress(tangents, live))
        linear = {"live": live, "shape": outs[0].shape, "shardings": tuple(map(explicit_sharding, (*primals, outs[0])))}
        if len(results) > 1:
            linear["given"] = (True,) * len(results)
        operands, linear = (*(known[n] for n in saved), *moving), linear | attrs
        self._tangent.set_types(list(map(jax.typeof, operands)), linear, [jax.typeof(x) for x in outs[: len(results)]])
        moved = self._tangent.bind(*operands, **linear)
        if not residuals:
            return outs[: len(results)], moved
        return outs, [*moved, *self._residual_tangents(primals, live, moving, outs[len(results) :], attrs)]

    def _jvp_of_reference(
        self, primals: Sequence[Array], tangents: Sequence[Any], attrs: dict[str, Any]
    ) -> tuple[list[Array], list[Any]]:
        """The op forward; its derivative is JAX's own of the reference."""
        moves = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
        meaning = self._call.function(attrs | {"residuals": False}, "xla")

        def of_moving(*moved: Array) -> list[Array]:
            full = list(primals)
            for i, value in zip(moves, moved, strict=True):
                full[i] = value
            return meaning(*full)

        _, moved = jax.jvp(of_moving, [primals[i] for i in moves], [tangents[i] for i in moves])
        return self._call.bind(*primals, residuals=False, **attrs), moved

    def _residual_tangents(
        self, primals: Sequence[Array], live: tuple[bool, ...], moving: list[Array], outs: list[Array], attrs: dict
    ) -> list[Any]:
        floating = [jnp.issubdtype(r.dtype, jnp.floating) for r in outs]
        if not any(floating):
            return [zero_tangent(r) for r in outs]

        def saved(*moved: Array) -> list[Array]:
            fresh = iter(moved)
            slots = zip(attrs["present"], primals, live, strict=True)
            full = {slot: next(fresh) if moves else p for slot, p, moves in slots}
            given = self.implementations["xla"].forward(**full, residuals=True, **attrs)
            all_saved = given[len(self.results(**attrs)) :]
            return [r for r, floats in zip(all_saved, floating, strict=True) if floats]

        start = [p for p, moves in zip(primals, live, strict=True) if moves]
        found = iter(jax.jvp(saved, start, moving)[1])
        return [next(found) if floats else zero_tangent(r) for r, floats in zip(outs, floating, strict=True)]

    def _jvp_of_linear(
        self, primitive: FusedPrimitive, primals: Sequence[Array], tangents: Sequence[Any], **params: Any
    ) -> tuple[list[Array], list[Any]]:
        """Tangent and cotangent are linear in their last operands: that part stays the op, the rest is its meaning's."""
        outs = primitive.bind(*primals, **params)
        split = len(primals) - _linear_count(primitive, params)
        parts = []
        if any(type(t) is not ad.Zero for t in tangents[split:]):
            parts.append(self._linear_part(primitive, primals[:split], tangents[split:], params))
        moves = [i for i, t in enumerate(tangents[:split]) if type(t) is not ad.Zero]
        if moves:
            meaning = primitive.function(params, "xla")

            def of_saved(*moved: Array) -> list[Array]:
                full = list(primals)
                for i, value in zip(moves, moved, strict=True):
                    full[i] = value
                return meaning(*full)

            parts.append(jax.jvp(of_saved, [primals[i] for i in moves], [tangents[i] for i in moves])[1])
        return outs, [functools.reduce(jnp.add, same) for same in zip(*parts, strict=True)]

    def _linear_part(
        self, primitive: FusedPrimitive, saved: Sequence[Array], moving: Sequence[Any], params: dict[str, Any]
    ) -> list[Array]:
        given = [t for t in moving if type(t) is not ad.Zero]
        if primitive.role == "cotangent":
            return primitive.bind(*saved, *given, **_of_results(params, moving))
        return self._bind_subset(self._tangent, saved, given, params, moving)

    def _bind_subset(
        self,
        primitive: FusedPrimitive,
        saved: Sequence[Array],
        linear: Sequence[Array],
        params: dict[str, Any],
        keep: Sequence[Any],
    ) -> list[Array]:
        """Binds tangent or cotangent for those of the wanted slots whose entry in `keep` is not a symbolic zero."""
        attrs, wanted = attributes_in(params), wanted_of(params)
        known = dict(zip(self.saved_names(wanted, attrs), saved, strict=True))
        kept = tuple(slot for slot, k in zip(wanted, keep, strict=True) if type(k) is not ad.Zero)
        live = tuple(slot in kept for slot in params["present"])
        return primitive.bind(*(known[n] for n in self.saved_names(kept, attrs)), *linear, **params | {"live": live})

    def _transpose_of_tangent(self, cts: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
        given = [ct for ct in cts if type(ct) is not ad.Zero]
        if not given:
            return [None] * len(operands)
        params = self.at_precision_set(params)
        split = len(operands) - sum(params["live"])
        asked, keep = _asked(operands[split:])
        grads = iter(self._bind_subset(self._cotangent, operands[:split], given, _of_results(params, cts), keep))
        return [None] * split + [next(grads) if a else None for a in asked]

    def _transpose_of_cotangent(self, cts: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
        given = [ct for ct in cts if type(ct) is not ad.Zero]
        if not given:
            return [None] * len(operands)
        params = self.at_precision_set(params)
        split = len(operands) - _linear_count(self._cotangent, params)
        asked, _ = _asked(operands[split:])
        # Where the linear operands lie among the results.
        places = [r for r, n in enumerate(given_of(params)) for _ in range(n)]
        wanted = set(itertools.compress(places, asked))
        if "given" in params:
            params = params | {"given": tuple(r in wanted for r in range(len(params["given"])))}
        moved = dict(
            zip(sorted(wanted), self._bind_subset(self._tangent, operands[:split], given, params, cts), strict=True)
        )
        return [None] * split + [moved[r] if a else None for r, a in zip(places, asked, strict=True)]

    def _batching_rule(
        self, primitive: FusedPrimitive, operands: Sequence[Array], dims: Sequence[Any], **params: Any
    ) -> tuple[list[Array], list[int]]:
        axes = [d if isinstance(d, int) else None for d in dims]
        names = primitive.operand_names(params)
        batched = None
        if not any(params.get("shardings", ())):
            batched = self.batch(primitive.role, names, list(operands), axes, dict(params))
        if batched is not None:
            values, params = batched
            if primitive.role != "call":
                size = next(a.shape[d] for a, d in zip(operands, axes, strict=True) if d is not None)
                params = params | {"shape": (size, *params["shape"])}
            outs = primitive.bind(*values, **params)
        else:
            meaning = primitive.function(params, "xla")
            outs = jax.vmap(meaning, in_axes=tuple(axes))(*operands)
        return outs, [0] * len(outs)


def rule(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A rule of FusionLab's own by which JAX transforms a primitive: its code runs at JAX's defaults, but for the precision of products."""
    return jax_defaults(WHERE_IT_RUNS | {"jax_default_matmul_precision"})(types_of_operands(rule))


def _single_or_tuple(results: Sequence[Array]) -> Any:
    return results[0] if len(results) == 1 else tuple(results)


def _linear_count(primitive: FusedPrimitive, params: Mapping[str, Any]) -> int:
    """Of how many of its operands, the last ones, a tangent or a cotangent is linear."""
    return sum(params["live"]) if primitive.role == "tangent" else sum(given_of(params))


def _of_results(params: dict[str, Any], keep: Sequence[Any]) -> dict[str, Any]:
    """The parameters for those of the results given whose entry in `keep` is not a symbolic zero."""
    if "given" not in params:
        return params
    kept = iter(keep)
    counts = (sum(type(next(kept)) is not ad.Zero for _ in range(n)) for n in params["given"])
    return params | {"given": tuple(n if n > 1 else bool(n) for n in counts)}


def _asked(operands: Sequence[Any]) -> tuple[list[bool], list[Any]]:
    """Of linear operands: whether each one's cotangent is asked for, and a symbolic zero for each of which it is not."""
    asked = [ad.is_undefined_primal(t) for t in operands]
    return asked, [None if a else zero_tangent(t) for a, t in zip(asked, operands, strict=True)]


def meaning_of(eqn: Any) -> Meaning | None:
    """For an equation of a fused op: a plain-jnp function of its operands, giving a list; None for any other equation."""
    primitive = eqn.primitive
    return primitive.op.meaning(primitive.name, eqn.params) if isinstance(primitive, FusedPrimitive) else None


def plain_meaning_of(eqn: Any) -> Any:
    """As `meaning_of`, for proofs at other sizes: what is saved is as the reference saves it, not as a backend lays it out."""
    primitive = eqn.primitive
    if not isinstance(primitive, FusedPrimitive):
        return None
    names = primitive.operand_names(eqn.params)
    given = {n: jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for n, v in zip(names, eqn.invars, strict=True)}
    params, shapes = primitive.op.plain(eqn.params, given)
    meaning, avals = primitive.op.meaning(primitive.name, params), [v.aval for v in eqn.invars]
    if params is not eqn.params or shapes != given:
        return jax.make_jaxpr(meaning)(*shapes.values())
    if any(varies(a) or sharding_in_type(a) is not None for a in avals):  # to be traced with such types
        return meaning
    with mesh_of(avals):
        return primitive.traced(avals, params)
