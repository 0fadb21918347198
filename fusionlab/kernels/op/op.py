"""The op protocol: a fused op is three custom JAX primitives, each with a meaning in plain `jax.numpy`.

`call` carries the op's name (`gemm_epilogue`), so a traced fused function shows the op as one named node. When it is
differentiated, `call` is bound with `residuals=True` and its tangent is `<op>_tangent`, a linear primitive whose transpose
is `<op>_cotangent`, the fused backward. Both take only the operands and residuals that the wanted gradients read (`live`
lists those wanted), so nothing else is kept until the backward pass. A second derivative differentiates the meaning.

Why not `jax.custom_vjp`: it refuses forward mode, hessians and the gradient of a gradient.

Words: an op's *slots* name its operands in order, optional ones last; the attribute `present` names those a call has, any
of the optional ones may be absent. `live` holds one bool for each operand present; of an op that gives several results, `given` holds
one for each: whether it has a tangent, or a cotangent. A cotangent that is a sum may be given as its addends: `given` then counts
the arrays.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.interpreters import ad, batching, mlir

from ...device import Device
from ...graph.jax_compat import varies
from ...graph.program.explicit_axes import mesh_of, sharding_in_type
from ...graph.program.in_shard_map import same_varying_axes
from ...graph.program.ir import dtype_text
from ...graph.settings import WHERE_IT_RUNS, jax_defaults, types_of_operands
from . import lowering as partition
from .arrays import as_arrays, check_name, explicit_sharding, zero_tangent
from .description import Description
from .implementation import Residual
from .primitive import FusedPrimitive, Meaning, attributes_in, give_types_and_eager_call, given_of, wanted_of

Array = Any


class Op(Description):
    """A fused op: its primitives, its meaning, its implementations.

    A subclass defines the computation; this class makes it work under every JAX transformation. Its attributes are those in
    `defaults`, `implementation`, and `gradient`: None for the op's own, "reference" for JAX's of the reference. The implementation
    named "xla" is the reference: plain `jax.numpy`, and the meaning of the op.
    """

    def __repr__(self) -> str:
        return f"<op {self.name}: {', '.join(self.implementations)}>"

    def __init__(self) -> None:
        self._call = FusedPrimitive(self.name, self, "call")
        self._tangent = FusedPrimitive(f"{self.name}_tangent", self, "tangent")
        self._cotangent = FusedPrimitive(f"{self.name}_cotangent", self, "cotangent")
        for primitive in self.primitives.values():
            self._register(primitive)
        ad.primitive_jvps[self._call] = rule(self._jvp_of_call)
        for linear in (self._tangent, self._cotangent):
            ad.primitive_jvps[linear] = rule(functools.partial(self._jvp_of_linear, linear))
            ad.primitive_transposes[linear] = rule(functools.partial(self._transpose, linear))

    # What users of an op call.

    @property
    def primitives(self) -> dict[str, FusedPrimitive]:
        """Primitive name -> primitive."""
        return {p.name: p for p in (self._call, self._tangent, self._cotangent)}

    def call(self, *operands: Any, **attrs: Any) -> Any:
        """Binds the op: one named node in a trace. `operands` in slot order; None for an absent optional one.

        Returns its result; a tuple of them, where it gives several.
        """
        return self._given(self._bind_call(operands, attrs, residuals=False))

    def call_by_name(self, **arguments: Any) -> Any:
        """`call` with the arguments of a public function: operands by their slots, the attributes among them."""
        operands = [arguments.pop(slot, None) for slot in self.slots]
        return self.call(*operands, **arguments)

    def call_with_residuals(self, *operands: Any, **attrs: Any) -> tuple[Array, ...]:
        """`(*results, *residuals)`: the results of the differentiated forward."""
        return tuple(self._bind_call(operands, attrs, residuals=True))

    def reference(self, *operands: Any, **attrs: Any) -> Any:
        """The op's meaning in plain `jax.numpy`; differentiating it gives JAX's own gradients of that code."""
        present, full = self._prepared(as_arrays(self._names(operands, attrs), operands), attrs)
        with jax_defaults(WHERE_IT_RUNS):
            return self._given(self.implementations["xla"].forward(**present, residuals=False, **full))

    def residuals(self, *operands: Any, **attrs: Any) -> tuple[Residual, ...]:
        """The residuals that the forward saves for backward when every operand's gradient is wanted."""
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

    def _names(self, operands: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of the operands of a call, in order."""
        return self.slots

    def _given(self, results: Sequence[Array]) -> Any:
        """What a call gives."""
        return results[0] if len(results) == 1 else tuple(results)

    def _marks(self, present: Mapping[str, Array], device: Device, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """JAX's cue that the lowering has to know the devices, as a parameter, where it may."""
        return partition.marks(self, present, device, attrs)

    def _bind_call(self, operands: Sequence[Any], attrs: Mapping[str, Any], residuals: bool) -> list[Array]:
        present, full = self._prepared(as_arrays(self._names(operands, attrs), operands), attrs)
        device = Device.asked()
        if full["implementation"] is not None:
            self.chosen("call", present, device, full)
        values = same_varying_axes(list(present.values()))
        full |= self._marks(dict(zip(present, values, strict=True)), device, full)
        return self._call.bind(*values, residuals=residuals, **full)

    def with_defaults(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes given, and the defaults of the others.

        Raises:
          UnknownNameError: there is no such attribute, or no implementation of that name.
        """
        known = {**self.defaults, "implementation": None, "gradient": None}
        for name in attrs:
            check_name(f"{self.name} attribute", name, known)
        full = known | dict(attrs)
        if full["implementation"] is not None:
            check_name(f"{self.name} implementation", full["implementation"], self.implementations)
        if full["gradient"] is not None:
            check_name(f"{self.name} gradient", full["gradient"], ("reference",))
        return full

    def _register(self, primitive: FusedPrimitive) -> None:
        give_types_and_eager_call(primitive)
        batching.primitive_batchers[primitive] = rule(functools.partial(self._batching_rule, primitive))
        for platform in ("cpu", "cuda", None):
            run = functools.partial(partition.run, primitive, platform or "other")
            mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True), platform=platform)

    # Transformations.

    def _jvp_of_call(
        self, primals: Sequence[Array], tangents: Sequence[Any], *, residuals: bool, **attrs: Any
    ) -> tuple[list[Array], list[Any]]:
        # The op forward; its derivative is JAX's own of the reference.
        if attrs["gradient"] == "reference" and not residuals:
            meaning = self._call.written_out(attrs | {"residuals": False})
            moved = jvp_of_moving(meaning, primals, tangents)[1]
            return self._call.bind(*primals, residuals=False, **attrs), moved
        live, slots = tuple(_moving(tangents)), attrs["present"]
        saved = self.saved_names(tuple(itertools.compress(slots, live)), attrs)
        results, names = self.results(**attrs), self.residual_names(**attrs)
        outs = self._call.bind(*primals, residuals=residuals or any(n in saved for n in names), **attrs)
        known = dict(zip(slots, primals, strict=True)) | dict(zip((*results, *names), outs, strict=False))
        linear = {"live": live, "shape": outs[0].shape, "shardings": tuple(map(explicit_sharding, (*primals, outs[0])))}
        floating = tuple(jnp.issubdtype(out.dtype, jnp.floating) for out in outs[: len(results)])
        if len(results) > 1:
            linear["given"] = floating
        operands, linear = (*(known[n] for n in saved), *itertools.compress(tangents, live)), linear | attrs
        types = [jax.typeof(x) for x in itertools.compress(outs, floating)]
        self._tangent.set_types(list(map(jax.typeof, operands)), linear, types)
        given = iter(self._tangent.bind(*operands, **linear))
        moved = [next(given) if floats else zero_tangent(out) for out, floats in zip(outs, floating, strict=False)]
        if not residuals:
            return outs[: len(results)], moved
        return outs, [*moved, *self._residual_tangents(primals, tangents, outs[len(results) :], attrs)]

    def _residual_tangents(
        self, primals: Sequence[Array], tangents: Sequence[Any], outs: list[Array], attrs: dict[str, Any]
    ) -> list[Any]:
        floating = [jnp.issubdtype(r.dtype, jnp.floating) for r in outs]
        if not any(floating):
            return [zero_tangent(r) for r in outs]

        def saved(*operands: Array) -> list[Array]:
            by_slot = dict(zip(attrs["present"], operands, strict=True))
            given = self.implementations["xla"].forward(**by_slot, residuals=True, **attrs)
            return list(itertools.compress(given[len(self.results(**attrs)) :], floating))

        found = iter(jvp_of_moving(saved, primals, tangents)[1])
        return [next(found) if floats else zero_tangent(r) for r, floats in zip(outs, floating, strict=True)]

    def _jvp_of_linear(
        self, primitive: FusedPrimitive, primals: Sequence[Array], tangents: Sequence[Any], **params: Any
    ) -> tuple[list[Array], list[Any]]:
        """Tangent and cotangent are linear in their last operands: that part stays the op, the rest is its meaning's."""
        outs = primitive.bind(*primals, **params)
        split = len(primals) - _linear_count(primitive, params)
        saved, moving, parts = primals[:split], _moving(tangents), []
        if any(moving[split:]):
            given, keep = list(itertools.compress(tangents[split:], moving[split:])), moving[split:]
            if primitive.role == "cotangent":
                parts.append(primitive.bind(*saved, *given, **_of_results(params, keep)))
            else:
                parts.append(self._bind_subset(primitive, saved, given, params, keep))
        if any(moving[:split]):
            rest = functools.partial(_with_last, primitive.written_out(params), primals[split:])
            parts.append(jvp_of_moving(rest, saved, tangents[:split])[1])
        return outs, [functools.reduce(jnp.add, same) for same in zip(*parts, strict=True)]

    def _bind_subset(
        self,
        primitive: FusedPrimitive,
        saved: Sequence[Array],
        linear: Sequence[Array],
        params: dict[str, Any],
        keep: Sequence[bool],
    ) -> list[Array]:
        """Binds tangent or cotangent for those of the wanted slots that `keep` selects."""
        attrs, wanted = attributes_in(params), wanted_of(params)
        known = dict(zip(self.saved_names(wanted, attrs), saved, strict=True))
        kept = tuple(itertools.compress(wanted, keep))
        live = tuple(slot in kept for slot in params["present"])
        return primitive.bind(*(known[n] for n in self.saved_names(kept, attrs)), *linear, **params | {"live": live})

    def _transpose(
        self, primitive: FusedPrimitive, cts: Sequence[Any], *operands: Any, **params: Any
    ) -> list[Array | None]:
        """Of the tangent by the cotangent, and the other way round."""
        moving = _moving(cts)
        if not any(moving):
            return [None] * len(operands)
        params = self.at_precision_set(params)
        split = len(operands) - _linear_count(primitive, params)
        asked = list(map(ad.is_undefined_primal, operands[split:]))
        if primitive.role == "tangent":
            other, keep, places = self._cotangent, asked, list(range(len(asked)))
            params = _of_results(params, moving)
        else:
            other, keep = self._tangent, moving
            # Where the linear operands lie among the results.
            places = [r for r, n in enumerate(given_of(params)) for _ in range(n)]
        wanted = sorted(set(itertools.compress(places, asked)))
        if primitive.role == "cotangent" and "given" in params:
            params = params | {"given": tuple(r in wanted for r in range(len(params["given"])))}
        given = list(itertools.compress(cts, moving))
        found = dict(zip(wanted, self._bind_subset(other, operands[:split], given, params, keep), strict=True))
        return [None] * split + [found[r] if a else None for r, a in zip(places, asked, strict=True)]

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
            meaning = primitive.written_out(params)
            outs = jax.vmap(meaning, in_axes=tuple(axes))(*operands)
        return outs, [0] * len(outs)


def rule(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A rule of FusionLab's own by which JAX transforms a primitive: its code runs at JAX's defaults, but for the precision of products."""
    return jax_defaults(WHERE_IT_RUNS | {"jax_default_matmul_precision"})(types_of_operands(rule))


def _linear_count(primitive: FusedPrimitive, params: Mapping[str, Any]) -> int:
    """Of how many of its operands, the last ones, a tangent or a cotangent is linear."""
    return sum(params["live"]) if primitive.role == "tangent" else sum(given_of(params))


def _of_results(params: dict[str, Any], keep: Sequence[bool]) -> dict[str, Any]:
    """The parameters for those of the results given that `keep` selects, one for each array."""
    if "given" not in params:
        return params
    kept = iter(keep)
    counts = (sum(next(kept) for _ in range(n)) for n in params["given"])
    return params | {"given": tuple(n if n > 1 else bool(n) for n in counts)}


def _moving(tangents: Sequence[Any]) -> list[bool]:
    """Whether each tangent or cotangent is more than a symbolic zero."""
    return [type(t) is not ad.Zero for t in tangents]


def _with_last(function: Callable[..., Any], last: Sequence[Array], *first: Array) -> Any:
    return function(*first, *last)


def jvp_of_moving(
    function: Callable[..., list[Array]], primals: Sequence[Array], tangents: Sequence[Any]
) -> tuple[list[Array], list[Array]]:
    """`jax.jvp` of a function of whose tangents some are symbolic zeros."""
    moves = _moving(tangents)

    def of_moving(*moved: Array) -> list[Array]:
        fresh = iter(moved)
        return function(*(next(fresh) if m else p for p, m in zip(primals, moves, strict=True)))

    return jax.jvp(of_moving, list(itertools.compress(primals, moves)), list(itertools.compress(tangents, moves)))


def meaning_of(eqn: Any) -> Meaning | None:
    """For an equation of a fused op: a plain-jnp function of its operands, giving a list; None for any other equation."""
    primitive = eqn.primitive
    return primitive.op.meaning(primitive.name, eqn.params) if isinstance(primitive, FusedPrimitive) else None


def plain_meaning_of(eqn: Any) -> Any:
    """As `meaning_of`, for proofs at other sizes: residuals are laid out as by the reference, not as by a backend."""
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
