"""The primitives of a fused op: the inputs of each, and its meaning, from its role and its parameters."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.sharding import get_abstract_mesh

from ...device import Device
from ...graph.canonical.fused_nodes import FusedForm
from ...graph.cost.cost import arithmetic_of
from ...graph.jax_compat import varies
from ...graph.program.explicit_axes import same_mesh, sharding_in_type
from ...graph.program.trace import block_of_jaxpr
from ...graph.settings import (
    WHERE_IT_RUNS,
    is_jit_disabled,
    is_x64,
    jax_defaults,
    types_of_operands,
    unwrapped,
    wide_types,
)

if TYPE_CHECKING:
    from .op import Op

_NO_ATTRIBUTES = frozenset({"residuals", "live", "given", "shape", "shardings", "partitioned"})
_MOST = 1024  # calls whose types, and whose meanings, are remembered

Array = Any
Meaning = Callable[..., list[Array]]


class Marker(tuple):
    """A parameter that shows JAX that a lowering rule needs the devices: it holds a `custom_partitioning` nobody runs.

    A tuple, for JAX to look into; printed in a word, and no region of the program (`is_annotation`). All are equal.
    """

    __slots__ = ()
    is_annotation = True

    def __new__(cls) -> Marker:
        nothing = custom_partitioning(lambda: ())
        nothing.def_partition(None)
        return super().__new__(cls, (jax.make_jaxpr(nothing)(),))

    def __repr__(self) -> str:
        return "by_label"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Marker)

    def __hash__(self) -> int:
        return hash(Marker)


class FusedPrimitive(Primitive):
    """A primitive that knows its op and its role there: "call", "tangent" or "cotangent".

    Parameters: the op's attributes; of a call also `residuals`; of the others also `live`, `shape` (of the first result) and
    `shardings` (of the operands and that result, each None but on explicit mesh axes), and, of an op that gives several results,
    `given`: which of them have a tangent or a cotangent. Of a cotangent it may be a number: of so many arrays that cotangent is the sum,
    which are given instead. All may have `partitioned`, JAX's cue that their lowering has to know the devices (see partition.py).
    """

    def __init__(self, name: str, op: Op, role: str):
        super().__init__(name)
        self.multiple_results = True
        self.op = op
        self.role = role
        # A search asks for the types of the same ones again and again, and a proof for what they mean.
        self._traced = functools.lru_cache(maxsize=_MOST)(self._trace)
        self._types: dict[Any, list[Any]] = {}

    def set_types(self, avals: Sequence[Any], params: Mapping[str, Any], types: Sequence[Any]) -> None:
        """Keeps of what types the results are, for operands of types `avals`, so that nothing is traced to learn it.

        On explicit mesh axes, and along those of a shard_map, they depend on more than these: there the meaning is traced. And inside a
        shard_map that checks no types they name its mesh, whatever those of the operands name.
        """
        if any(varies(a) or sharding_in_type(a) is not None for a in (*avals, *types)):
            return
        if len(self._types) >= _MOST:
            self._types.clear()
        self._types[_key(avals, params), get_abstract_mesh()] = list(types)

    def types(self, avals: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
        """The types of the results, for operands of types `avals`."""
        known = self._types.get((_key(avals, params), get_abstract_mesh()))
        if known is not None:
            return known
        found = [v.aval for v in self.traced(avals, params).jaxpr.outvars]
        if params.get("residuals"):
            self.set_types(
                avals, {**params, "residuals": False}, found[: len(self.op.results(**attributes_in(params)))]
            )
        return found

    def bind(self, *operands: Any, **params: Any) -> Any:
        # A new one for each equation: a jaxpr that two equations hold JAX prints, in full.
        return super().bind(*operands, **params | ({"partitioned": Marker()} if "partitioned" in params else {}))

    def stands_for(self, params: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The primitive and parameters this one takes the place of: what a remat policy is asked about instead."""
        numbers = self.op.anchor_dimensions(params) if self.role == "call" else None
        if numbers is None:
            return self, dict(params)
        asked = {"precision": params.get("precision"), "preferred_element_type": None, "out_sharding": None}
        return jax.lax.dot_general_p, {"dimension_numbers": numbers, **asked}

    def form(self, params: Mapping[str, Any], shapes: Sequence[tuple[int, ...]]) -> FusedForm | None:
        """The canonical view of a call: labels for the axes of its operands and its result."""
        if self.role != "call":
            return None
        return self.op.form(dict(zip(params["present"], shapes, strict=True)), **attributes_in(params))

    def arithmetic(self, params: Mapping[str, Any], avals: Sequence[Any]) -> tuple[int, int]:
        """Operations and transcendentals of a call with operands of these types: those of its meaning that the op has need of."""
        plain = dict(params)
        if "shardings" in plain:
            plain["shardings"] = (None,) * len(plain["shardings"])
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        counts = arithmetic_of(block_of_jaxpr(jax.make_jaxpr(self.function(plain, "xla"))(*shapes)))
        share = self.op.share(dict(zip(self.operand_names(params), shapes, strict=True)), **attributes_in(params))
        return round(counts[0] * share), round(counts[1] * share)

    def operand_names(self, params: Mapping[str, Any]) -> tuple[str, ...]:
        """Slots, results and residuals; tangents are named "d_<slot>", the cotangent "ct", of another result than "out" "ct_<result>"."""
        if self.role == "call":
            return params["present"]
        wanted = wanted_of(params)
        saved = self.op.saved_names(wanted, attributes_in(params))
        if self.role == "tangent":
            return (*saved, *(f"d_{slot}" for slot in wanted))
        given = zip(self.op.results(**attributes_in(params)), given_of(params), strict=True)
        return (*saved, *("ct" if result == "out" else f"ct_{result}" for result, n in given for _ in range(n)))

    def addends(self, params: Mapping[str, Any]) -> dict[int, int]:
        """Operand -> of how many arrays it may be the sum, that are given instead (`adding`)."""
        if self.role != "cotangent":
            return {}
        names = self.operand_names(params)
        alone = (
            n for n, given in zip(self.results_given(params), filter(None, given_of(params)), strict=True) if given == 1
        )
        first = len(names) - sum(given_of(params))
        most = {"ct" if n == "out" else f"ct_{n}": self.op.addends.get(n, 1) for n in alone}
        return {i: most[name] for i, name in enumerate(names) if i >= first and most.get(name, 1) > 1}

    def adding(self, params: Mapping[str, Any], operand: int, count: int) -> dict[str, Any]:
        """The parameters with which so many arrays stand in place of an operand that is their sum, added up one after another."""
        results = self.op.results(**attributes_in(params))
        name = self.operand_names(params)[operand]
        of = "out" if name == "ct" else name.removeprefix("ct_")
        given = zip(results, given_of(params), strict=True)
        return {**params, "given": tuple(count if result == of else n for result, n in given)}

    def again(self, params: Mapping[str, Any]) -> Callable[..., Array] | None:
        """The first result of a call as a function of its operands and its other results, entry by entry (graph/rewriting/stacked.py)."""
        function = self.op.again(params) if self.role == "call" and params["residuals"] else None
        if function is None:
            return None
        attrs = attributes_in(params)
        names = (*params["present"], *self.op.results(**attrs)[1:], *self.op.residual_names(**attrs))
        return lambda *kept: function(dict(zip(names, kept, strict=True)))

    def row_sum(self, params: Mapping[str, Any]) -> tuple[int, int, dict[str, Any]] | None:
        """(operand, result, parameters without that result) of a result that is a sum of an operand over its rows (graph/row_sums.py)."""
        slot = self.op.row_sum(params) if self.role == "cotangent" else None
        if slot is None or self.op.results(**attributes_in(params)) != ("out",) or given_of(params) != (1,):
            return None
        live = tuple(moves and s != slot for s, moves in zip(params["present"], params["live"], strict=True))
        return len(self.operand_names(params)) - 1, wanted_of(params).index(slot), {**params, "live": live}

    def summing(self, params: Mapping[str, Any], result: int, dtype: Any) -> tuple[dict[str, Any], int] | None:
        """(parameters, number of the further result) with which a sum over the rows of one of its results is given as well."""
        if self.role != "cotangent" or any(s is not None for s in params["shardings"]):
            return None
        found = self.op.summing(wanted_of(params)[result], params, np.dtype(dtype).name)
        if found is None:
            return None
        more, slot = found
        if self.operand_names(more) != self.operand_names(params):
            return None
        return more, wanted_of(more).index(slot)

    def results_given(self, params: Mapping[str, Any]) -> tuple[str, ...]:
        """The results whose tangents a tangent gives, or whose cotangents a cotangent takes."""
        results = self.op.results(**attributes_in(params))
        return tuple(result for result, given in zip(results, given_of(params), strict=True) if given)

    def function(self, params: Mapping[str, Any], implementation: str, device: Device | None = None) -> Meaning:
        """Its computation as a function of its operands, by one of the op's implementations.

        Args:
          params: the primitive's.
          implementation: its name; "xla" is the meaning.
          device: the target of lowering; None for code that must run anywhere.
        """
        return jax_defaults(WHERE_IT_RUNS)(types_of_operands(self._function(params, implementation, device)))

    def written_out(self, params: Mapping[str, Any]) -> Meaning:
        """Its meaning, where a transformation puts plain code in its place: it runs anywhere, and is made for a CPU where that is the
        device of this process."""
        here = Device.asked()
        return self.function(params, "xla", here if here.platform == "cpu" else None)

    def traced(self, avals: Sequence[Any], params: Mapping[str, Any]) -> Any:
        """Its meaning as a closed jaxpr, at operands of these types; traced once in a process."""
        with wide_types(avals):
            return self._traced(*_key(avals, params), get_abstract_mesh(), is_x64())

    def _trace(self, avals: tuple, params: tuple, mesh: Any, x64: bool) -> Any:
        # Traced rather than eval_shape'd: shardings and the varying axes of shard_map come out right as well.
        with same_mesh(), unwrapped(not self.op.is_users):
            return jax.make_jaxpr(self.function(dict(params), "xla"))(*avals)

    def _function(self, params: Mapping[str, Any], implementation: str, device: Device | None) -> Meaning:
        impl, attrs = self.op.implementations[implementation], attributes_in(params) | {"device": device}
        if self.role == "call":
            forward = functools.partial(impl.forward, residuals=params["residuals"], **attrs)
            return lambda *operands: forward(**dict(zip(params["present"], operands, strict=True)))
        wanted = wanted_of(params)
        saved = self.op.saved_names(wanted, attributes_in(params))
        names = (*params["present"], "out")
        shardings = {name: s for name, s in zip(names, params["shardings"], strict=True) if s is not None}
        several, results = len(self.op.results(**attributes_in(params))) > 1, self.results_given(params)
        counts = [n for n in given_of(params) if n]

        def tangent(*operands: Array) -> list[Array]:
            kept, moving = operands[: len(saved)], operands[len(saved) :]
            by_slot = dict(zip(wanted, moving, strict=True))
            known = dict(zip(saved, kept, strict=True))
            terms = impl.tangent(known, by_slot, params["shape"], shardings=shardings, **attrs)
            return [terms[result] for result in results] if several else [terms]

        def cotangent(*operands: Array) -> list[Array]:
            known, left = dict(zip(saved, operands, strict=False)), iter(operands[len(saved) :])
            groups = (tuple(itertools.islice(left, n)) for n in counts)
            cts = [g if len(g) > 1 and impl.adds else functools.reduce(jax.lax.add, g) for g in groups]
            ct = dict(zip(results, cts, strict=True)) if several else cts[0]
            return impl.cotangent(known, ct, wanted, shardings, **attrs)

        return tangent if self.role == "tangent" else cotangent


def give_types_and_eager_call(primitive: FusedPrimitive) -> None:
    """Registers what a primitive needs before lowering or transformation: the types of its results, and its eager call."""

    @jax_defaults()
    def abstract(*avals: Any, **params: Any) -> list[Any]:
        return primitive.types(avals, params)

    compiled = jax.jit(lambda *operands, params: primitive.bind(*operands, **dict(params)), static_argnames="params")

    def eager(*operands: Array, **params: Any) -> list[Array]:
        if is_jit_disabled():
            return primitive.function(params, "xla")(*operands)
        return compiled(*operands, params=tuple(sorted(params.items())))

    primitive.def_abstract_eval(abstract)
    primitive.def_impl(eager)


def _key(avals: Sequence[Any], params: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(avals), tuple(sorted(params.items()))


def attributes_in(params: Mapping[str, Any]) -> dict[str, Any]:
    """The op's attributes among a primitive's parameters."""
    return {k: v for k, v in params.items() if k not in _NO_ATTRIBUTES}


def wanted_of(params: Mapping[str, Any]) -> tuple[str, ...]:
    """The slots whose tangents are given, or whose gradients are asked for."""
    return tuple(slot for slot, live in zip(params["present"], params["live"], strict=True) if live)


def given_of(params: Mapping[str, Any]) -> tuple[int, ...]:
    """For each result of the op, whether its tangent or cotangent is there; of a cotangent, as how many arrays."""
    return params.get("given", (True,))
