"""Pass `gated_matmul`: the gated pair of a feed-forward, act(x @ w) * (x @ v) -> one `gated_matmul` op.

Its parts are read off the raw graph (`gates`), as products are. It is fused if an implementation is requested, or was measured faster
than XLA's code for the pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from ....graph.certify.activations import between
from ....graph.declined import Declined
from ....graph.matching.region import CASTS, Region
from ....graph.matching.walks import maker_of
from ....graph.program.ir import Atom, Node, Value
from ....kernels import OPS
from ....kernels.op.arrays import FLOATS as DTYPES
from ....kernels.op.arrays import is_explicitly_sharded
from ....kernels.op.implementation import ChoiceKind
from ....kernels.ops.gemm_epilogue.cublaslt import product_arithmetic
from ....kernels.ops.matmul.axes import canonical
from ...engine.base import AUTO_AXES, BY_DEFAULT, Option, Pass, Search, Substitution
from ...engine.outcomes import Candidate, Rejection
from ...engine.passages import is_half, passage, rounding
from ...engine.proposing import TUNE
from ...engine.site import Site
from ...engine.wording import anchor_text
from ..linear.epilogues import Epilogue, concepts_of
from .gates import BETWEEN, GateSide, sides_of
from .products import region_with

_PREFERRED = {None: None, "concatenated": "concatenated", "kernel": "cuda"}  # what the option names
OP = OPS["gated_matmul"]
_ALIKE = CASTS | {"pvary"}  # what each product may have of its own before the x they share
_BIAS = "adds a bias, and the fused op has none"
_ROUNDED_ONCE = "x @ w, its activation and x @ v stay in float32 and are rounded to {0} once, at the end"


class GatedMatmulPass(Pass):
    """See the module docstring."""

    name = op = "gated_matmul"
    formula = "act(x @ w) * (x @ v), by one product with concatenated weights or by one kernel"
    needs = (
        "two products of the same rows with matrices of equal size and layout, the gate's product read only by the activation; an "
        "implementation that was measured faster than XLA's two products, or that is requested"
    )
    options: ClassVar = {
        "prefer": Option(
            None,
            '"concatenated": one product with concatenated weights; "kernel": one kernel of our own; None: whichever was measured '
            "faster, if any",
            tuple(_PREFERRED),
        )
    }
    summary = "Replaces a gated pair of products, as in a SwiGLU feed-forward, by one product or one kernel."
    spellings = (
        "Both products read the same rows, and their matrices have one size. Neither product may have a bias.",
        "The kernel takes bfloat16 and float16.",
    )
    default = (
        "Off unless measured or asked for: on a GPU a pair is replaced where the table of the device has an implementation that was "
        "measured faster than XLA's two products, or where prefer names one. On a CPU nothing was measured, and prefer has to name one."
    )
    codes = ("activation", "axes", "bias", "structure")
    primitives = ("mul",)
    sample_for = "cpu", MappingProxyType({"prefer": "concatenated"})

    def sample(self) -> tuple[Any, tuple[Any, ...]]:
        def gated(x: Any, w: Any, v: Any) -> Any:
            return jax.nn.silu(x @ w) * (x @ v)

        return gated, (jnp.zeros((8, 4)), jnp.zeros((4, 16)), jnp.zeros((4, 16)))

    def preferred(self, search: Search) -> str | None:
        """The implementation requested by the option, or by name if the pass is named too; None to follow the measurements."""
        preferred = _PREFERRED[self.option(search, "prefer")]
        if preferred is None and not search.options.get(BY_DEFAULT) and search.implementation in _PREFERRED.values():
            return search.implementation
        return preferred

    def anchors(self, search: Search) -> Iterable[tuple[Node]]:
        """The anchors; none if a different implementation is requested, nor on a CPU, where nothing was measured."""
        named = self.preferred(search)
        if search.implementation not in (None, named) or (named is None and search.device.platform != "cuda"):
            return ()
        return super().anchors(search)

    def examine(self, search: Search, anchor: Node) -> list[Candidate | Rejection]:
        return GatedSite(self, search, anchor).examined()


class GatedSite(Site):
    """One multiplication, from its operands to a candidate or a rejection."""

    @property
    def named(self) -> str | None:
        """The requested implementation; None to follow the measurements."""
        assert isinstance(self.pass_, GatedMatmulPass)
        return self.pass_.preferred(self.search)

    def examine(self) -> Candidate | Rejection | None:
        sides = sides_of(self.view, self.anchor)
        found = None if sides is None else self.attempt(self.pair, sides.activated, sides.gate, sides.up)
        shown = isinstance(found, Candidate) or self.named is not None or (found is not None and found.waits)
        return found if shown else None

    def refuse(self, code: str, sentence: str, *guilty: Node, edit: str | None = None) -> NoReturn:
        """Declines two products that are not a gated pair, or not one that the op takes."""
        self.decline(code, sentence, guilty, (1, 2), edit)

    # -- from a pair to what becomes of it ---------------------------------------------------------------------------------

    def pair(self, activated: Value, gate: Node, up: GateSide) -> Candidate | Rejection:
        self.check_bare(up)
        self.check_alike(gate, up.product)
        found, problem = Epilogue(self, self.widened(gate.outputs[0]), False).last()
        if found is None:
            if problem is not None:
                return problem
            self.check_biased(gate)
            sentence = (
                f"{anchor_text(gate)} is multiplied by a product of the same value, but not through a known activation"
            )
            self.refuse("activation", sentence, gate)
        name, end = found[1], self.rounded(found[0], activated)
        if end is not activated:
            node = self.search.block.producer[activated.id]
            between = f"{name} of {anchor_text(gate)} and {anchor_text(self.anchor)}"
            code = BETWEEN.get(node.primitive, "structure")
            self.refuse(code, f"{anchor_text(node)} comes between {between}", node)
        return self.candidate(gate, up, end, name)

    def widened(self, product: Value) -> Value:
        """A 16-bit product, or the float32 value to which its only reader widens it: the fused op computes in float32, and rounds once."""
        way = passage(self, product)
        return product if way.views else way.end

    def rounded(self, end: Value, activated: Value) -> Value:
        """The activated gate as it is multiplied, if only a rounding back to its product's dtype comes in between."""
        last = None if end is activated or not is_half(activated.dtype) else rounding(self, end, activated.dtype)
        return end if last is None or last.views else last.end

    def check_bare(self, up: GateSide) -> None:
        """Declines a pair whose side without activation is not a bare product."""
        if up.between and self.widened(up.product.outputs[0]) is not up.between[0].outputs[0]:
            node = up.between[-1]
            problem = _BIAS if node.primitive == "add" else "comes in between"
            sentence = f"{anchor_text(node)} {problem}: {anchor_text(self.anchor)} does not multiply the product itself"
            self.refuse(BETWEEN[node.primitive], sentence, node)

    def check_biased(self, gate: Node) -> None:
        """Declines a pair with a bias before the activation."""
        node = next((n for n in self.users(gate.outputs[0]) if n.primitive == "add"), None)
        if node is not None and any(map(self.given, node.inputs)):
            self.refuse("bias", f"{anchor_text(node)} {_BIAS}", node)

    def check_alike(self, gate: Node, up: Node) -> None:
        """Declines two products of one value that are not act(x @ w) and x @ v."""
        both = f"{anchor_text(gate)} and {anchor_text(up)}"
        (_, w), (_, v) = gate.inputs, up.inputs
        if not all(isinstance(a, Value) for a in (*gate.inputs, *up.inputs)):
            self.decline("structure", f"{both} have a literal operand", [up])
        if not _are_of_rows(gate, up):
            sentence = f"{both}: expected two row-by-matrix products over the last axis with weights in the same layout"
            self.refuse("axes", sentence, gate, up)
        if self.view.read(w) == self.view.read(v) or w.shape != v.shape:
            self.decline("structure", f"{both} have the same weight, or weights of different sizes", [gate, up])
        if gate.params.get("precision") != up.params.get("precision"):
            self.decline("structure", f"{both} request different precisions", [gate, up])
        if _are_sharded(gate, up):
            self.decline("sharding", f"{both} are sharded over explicit mesh axes", [gate, up], edit=AUTO_AXES)
        self.check_dtypes(gate, up, both)

    def check_dtypes(self, gate: Node, up: Node, both: str) -> None:
        """Declines several dtypes, results that are neither in that dtype nor in float32 and then rounded to it, and sums that the program
        keeps in float32 for its gradient but the op would keep in float16, where they may become infinite or 0.
        """
        given, results = _dtypes((*gate.inputs, *up.inputs)), _dtypes((gate.outputs[0], up.outputs[0]))
        one = len(given) == 1 and given <= set(DTYPES) and given == _dtypes([self.root(gate)])
        if not one or not (results == given or results == {"float32"}):
            sentence = (
                f"{both} multiply {', '.join(sorted(given))} to {', '.join(sorted(results))}; "
                f"the fused op takes one dtype of {', '.join(DTYPES)} and returns the same"
            )
            self.refuse("dtype", sentence, gate, up, edit="use one dtype for both products and the result")
        if results != given == {"float16"} and self.search.gradient:
            kept = "are kept in float32 for the gradient; the fused op stores them in float16, whose range is smaller"
            edit = "give both products the dtype of their operands, or use bfloat16"
            self.refuse("dtype", f"{both} {kept}", gate, up, edit=edit)

    def root(self, gate: Node) -> Value:
        """The pair's result; for float32 products of 16-bit operands, its rounding to 16 bits if that is its only reader."""
        result = self.anchor.outputs[0]
        if not is_half(gate.inputs[0].dtype) or np.dtype(result.dtype) != np.float32:
            return result  # a cast behind it stays behind it
        user = self.only_reader(result)
        rounds = user is not None and user.primitive in CASTS and is_half(user.outputs[0].dtype)
        return user.outputs[0] if user is not None and rounds else result

    def common(self, gate: Node, up: Node) -> tuple[Value, list[Any], list[Node]]:
        """The x of both products, the dtypes to which both cast it, and the nodes that do.

        Inside a `shard_map`, x may also be marked as varying for each product; the op does so itself.

        Raises:
          Declined: there is none.
        """
        first, second = gate.inputs[0], up.inputs[0]
        dtypes: list[Any] = []
        passed: list[Node] = []
        while first is not second:
            makers = [m for a in (first, second) if (m := maker_of(self.search.block, a)) is not None]
            kinds = {m.primitive for m in makers}
            if len(makers) != 2 or len(kinds) > 1 or not kinds <= _ALIKE or first.dtype != second.dtype:
                raise Declined("its products do not read the same x: one of them casts it or changes its layout")
            dtypes.append(first.dtype)
            passed += makers
            first, second = (m.inputs[0] for m in makers)
        assert isinstance(first, Value)
        return first, dtypes[::-1], passed

    # -- the candidate -----------------------------------------------------------------------------------------------------

    def candidate(self, gate: Node, side: GateSide, end: Value, name: str) -> Candidate | Rejection:
        region, dtypes = self.region(gate, side, end)
        up = side.product
        inputs = {v.id: i for i, v in enumerate(region.inputs)}
        where = {role: inputs[v.id] for role, v in region.leaves.items()}
        ((_, (w_contract,)), _) = canonical(gate.params["dimension_numbers"])
        attrs: dict[str, Any] = {
            "activation": name,
            "w_contract": w_contract,
            "precision": gate.params.get("precision"),
            "prefer": self.named,
            "implementation": self.search.implementation,
        }

        def operands(*given: Any) -> tuple[Any, ...]:
            x = given[where["x"]]
            for dtype in dtypes:
                x = x.astype(dtype)
            return x, given[where["w"]], given[where["v"]]

        self.check_runs(gate, up, attrs, region)
        dtype = np.dtype(gate.inputs[0].dtype).name
        arithmetic = product_arithmetic(dtype, attrs["precision"], self.search.device)
        plan = Substitution(OP, attrs, operands, lambda out: out, OP.formula(**attrs), arithmetic)
        rounds = is_half(gate.outputs[0].dtype)
        notes = (_ROUNDED_ONCE.format(dtype),) if rounds else ()
        concepts = concepts_of(False, name)
        return self.offered(region, plan, "compute the outside use from x, w and v again", notes, concepts)

    def check_runs(self, gate: Node, up: Node, attrs: Mapping[str, Any], region: Region) -> None:
        """Declines if a requested implementation cannot run the call, or, without a request, none was measured faster than XLA's."""
        nodes = zip(("x", "w", "v"), (*gate.inputs, up.inputs[1]), strict=True)
        shapes = {slot: jax.ShapeDtypeStruct(a.shape, a.dtype) for slot, a in nodes}
        given, full = OP.prepare(shapes, attrs)
        if self.named is None:
            decision = OP.decide("call", given, self.search.device, **full)
            if decision.waits:
                sentence = f"{anchor_text(self.anchor)} could become {OP.formula(**attrs)}, but {decision.reason}"
                edit = f"{TUNE}to fuse it anyway, pass gated_matmul=dict(prefer='concatenated') or 'kernel' in a fl.Strategy"
                self.decline(ChoiceKind.UNMEASURED.value, sentence, edit=edit, site=region.nodes)
            if decision.implementation == "xla":
                self.decline(ChoiceKind.SLOWER.value, decision.reason)
        # One that is named for every op alike is `propose`'s to ask.
        elif self.named != self.search.implementation:
            why = OP.implementations[self.named].refuses(given, self.search.device, **full)
            if why is not None:
                sentence = f"{anchor_text(self.anchor)}: {OP.formula(**attrs)} cannot run as {self.named!r}: {why}"
                self.decline("implementation", sentence, site=[gate, up, self.anchor])

    def region(self, gate: Node, side: GateSide, end: Value) -> tuple[Region, list[Any]]:
        """The pair's nodes with x, w and v as leaves, and the dtypes that x is cast to."""
        block, view, root, up = self.search.block, self.view, self.root(gate), side.product
        x, dtypes, passed = self.common(gate, up)
        leaves = {"x": x, "w": gate.inputs[1], "v": up.inputs[1]}
        last = (block.producer[root.id],) if root is not self.anchor.outputs[0] else ()
        activation = between(view, gate.outputs[0], end)
        numbers = [n for n in activation if view.is_literal(view.ref[n.outputs[0].id])]  # others may read them too
        support = {n.id: n for n in (*passed, *numbers)}
        inner = {
            n.id: n
            for n in (gate, up, *side.between, *side.copies, self.anchor, *last, *activation)
            if n.id not in support
        }
        return region_with(view, root, leaves, inner, support), dtypes


def _are_of_rows(gate: Node, up: Node) -> bool:
    """Whether two products multiply rows, over the last axis, by matrices in the same layout."""
    x, w = gate.inputs
    gate_dims, up_dims = (canonical(n.params["dimension_numbers"]) for n in (gate, up))
    plain = (((len(x.shape) - 1,), (0,)), ((), ())), (((len(x.shape) - 1,), (1,)), ((), ()))
    return gate_dims == up_dims and gate_dims in plain and len(w.shape) == 2 and len(x.shape) >= 2


def _are_sharded(gate: Node, up: Node) -> bool:
    """Whether one of two products of one x, or one of their operands, is sharded over explicit mesh axes."""
    asked = any(n.params.get("out_sharding") is not None for n in (gate, up))
    return asked or any(is_explicitly_sharded(a.aval) for a in (*gate.values, *up.values[1:]))


def _dtypes(atoms: Iterable[Atom]) -> set[str]:
    return {np.dtype(a.dtype).name for a in atoms}


PASSES = {45: GatedMatmulPass()}
