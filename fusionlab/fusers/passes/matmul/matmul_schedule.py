"""Pass `matmul_schedule`: every product that no larger fusion claims -> the route that takes it.

A route takes a product with all that it can absorb (factors, a bias, an activation, a cast), or gives a reason (`kernels.matmul.routes`).
A product left to XLA as written is neither a candidate nor a rejection: it has a route, listed by `Findings.routes()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import jax.numpy as jnp

from ....graph.certify.activations import ACTIVATION_PRIMITIVES
from ....graph.declined import Declined
from ....graph.matching.region import escapes
from ....graph.matching.walks import maker_of
from ....graph.program.ir import Node, dtype_text
from ....graph.program.scopes import is_backward
from ....graph.settings import jax_defaults
from ....kernels.op.implementation import ChoiceKind
from ....kernels.ops.gemm_epilogue.cublaslt import product_arithmetic
from ....kernels.ops.matmul.axes import ProductAxes, canonical
from ....kernels.ops.matmul.op import MATMUL
from ....kernels.ops.matmul.routes import Answer
from ...engine.base import Option, Pass, Search, Substitution
from ...engine.outcomes import Candidate, Rejection
from ...engine.proposing import propose
from .products import ProductCall, ProductSite
from .route_table import ProductRoute, Routes, tag_of

_WIDENED = "{0} operands are multiplied as they are, without widening to float32 first: the same products, still summed in float32"


class MatmulSchedulePass(Pass):
    """See the module docstring."""

    name = "matmul_schedule"
    op = "matmul"
    formula = "cast(act(alpha * (a @ b) + beta * bias)), by a library, by a kernel or by XLA"
    needs = "a product that no larger fusion claims; a route that was measured faster than XLA's, or that is requested"
    options: ClassVar = {
        "library": Option(
            None,
            "True: a library call wherever a library takes the product; False: never; None: where it was measured fastest",
            (None, True, False),
        ),
    }
    summary = "Chooses for each matrix product that no larger fusion claims whether a library, a kernel or XLA runs it."
    spellings = (
        "The product may contract any axes. A bias may run along the columns or along the rows.",
        "Operands that the program only widens to float32 are multiplied in their own dtype, and summed in float32.",
        "found.routes() lists every product with its route and the reason of each route that does not take it.",
    )
    default = (
        "On for GPUs: a product leaves XLA where another route was measured faster on the device. "
        "fl.Strategy(matmul_schedule=dict(library=True)) takes cuBLASLt wherever it can run, library=False nowhere. On a CPU all products "
        "stay with XLA."
    )
    primitives = ("dot_general",)
    sample_for = "sm_90", MappingProxyType({"library": True})

    def sample(self) -> tuple[Any, tuple[Any, ...]]:
        def product(a: Any, b: Any, bias: Any) -> Any:
            return 0.5 * (a @ b + bias[:, None])

        return product, (jnp.zeros((8, 4)), jnp.zeros((4, 16)), jnp.zeros(8))

    def examine(self, search: Search, anchor: Node) -> list[Candidate | Rejection]:
        return Routed(self, search, anchor).examined()

    def anchors(self, search: Search) -> Iterable[tuple[Node]]:
        return super().anchors(search) if search.device.platform == "cuda" else ()  # elsewhere all stay with XLA

    @jax_defaults()
    def routes(self, searched: Sequence[tuple[Search, Node | None]], findings: Any) -> Routes:
        """The route of every product.

        Args:
          searched: a search of the pass over each block, with the custom rule that it belongs to, if it does.
          findings: the findings, whose candidates claim products.
        """
        mine = [c for c in findings.candidates if c.pass_name == self.name]
        claims, own = _by_node(c for c in findings.candidates if c not in mine), _by_node(mine)
        rows = []
        for search, rule in searched:
            for node in search.block.nodes:
                if node.primitive == "dot_general":
                    rows.append(_row(Routed(self, search, node), claims.get(node.id), own.get(node.id), rule))
        return Routes(findings.device, tuple(sorted(rows, key=lambda row: row.node)))


class Routed(ProductSite):
    """One product, the nodes after it, and the answer of each route."""

    @property
    def library(self) -> bool | None:
        """The option `library`."""
        return self.pass_.option(self.search, "library")

    def decided(self) -> tuple[ProductCall, tuple[Answer, ...]] | None:
        """The call that a route takes, with the routes' answers; None if the op does not take the product.

        Either a route takes all of it, or all is left to XLA, which would fuse the rest with a product of its own. If the option is True,
        the library takes as much as it can.
        """
        steps = self.steps()
        if not steps:
            return None
        whole = steps[-1], self.answers(steps[-1])
        if whole[1][-1].route.name != "xla" or not self.library:
            return whole
        parts = ((call, self.answers(call)) for call in reversed(steps[:-1]))
        return next(((call, answers) for call, answers in parts if answers[-1].route.name != "xla"), whole)

    def left_behind(self, call: ProductCall) -> str:
        """The activations before and after the product in kernels of their own, in a few words; "" if there are none."""
        parts = []
        for operand in (call.a, call.b):
            maker = maker_of(self.search.block, operand)
            if maker is not None and maker.primitive in ACTIVATION_PRIMITIVES:
                parts.append(f"{operand.name} = {maker.primitive} before it")
        readers = self.users(call.value)
        if len(readers) == 1 and readers[0].primitive in ACTIVATION_PRIMITIVES:
            parts.append(f"{readers[0].outputs[0].name} = {readers[0].primitive} after it")
        return ", ".join(parts)

    def answers(self, call: ProductCall) -> tuple[Answer, ...]:
        settings = {"library": self.library, "implementation": self.search.implementation}
        given, full = MATMUL.prepare(call.shapes, call.attrs | settings)
        return MATMUL.routes(given, self.search.device, **full)

    def examine(self) -> Candidate | Rejection | None:
        found = self.decided()
        if found is None:
            return None
        call, answers = found
        named = self.search.implementation
        if named is not None and answers[-1].route.implementation != named:
            return None  # that one does not take it
        if answers[-1].route.name == "xla" and not call.widened:
            return None
        return self.candidate(call)

    def candidate(self, call: ProductCall) -> Candidate | Rejection:
        region = self.region(call)
        if escapes(region):
            raise Declined("an inner value is read outside it")
        plan, note = _plan(self, call, region.inputs), _WIDENED.format(call.a.dtype)
        notes = (note,) if call.widened else ()
        outcome = propose(self.search, self.pass_.name, region, plan, self.anchor, notes, ("matmul",))
        if not isinstance(outcome, Candidate):
            return outcome
        # What XLA makes of operands that are not widened is not what it makes of the program as it is written.
        backends = (
            replace(b, verdict=ChoiceKind.CHOSEN.value, reason=note)
            if call.widened and b.verdict == ChoiceKind.SAME_CODE
            else b
            for b in outcome.backends
        )
        return replace(outcome, takes_the_rest=True, backends=tuple(backends))


def _plan(site: Routed, call: ProductCall, inputs: tuple[Any, ...]) -> Substitution:
    position = {v.id: i for i, v in enumerate(inputs)}

    def operands(*given: Any) -> tuple[Any, ...]:
        own = {name: given[position[v.id]] for name, v in call.leaves.items()}
        return own["a"], own["b"], own["bias"].reshape(call.thin) if "bias" in own else None

    attrs = {**call.attrs, "library": site.library, "implementation": site.search.implementation}
    formula = MATMUL.formula(**call.attrs, bias=call.bias is not None)
    arithmetic = product_arithmetic(str(call.a.dtype), call.precision, site.search.device)
    return Substitution(MATMUL, attrs, operands, lambda out: out, formula, arithmetic)


def _by_node(candidates: Iterable[Candidate]) -> dict[int, Candidate]:
    """Node -> the candidate with which it is fused."""
    return {n: c for c in candidates for n in c.all_node_ids}


def _row(routed: Routed, claim: Candidate | None, own: Candidate | None, rule: Node | None) -> ProductRoute:
    node = routed.anchor
    first, second, *_ = node.inputs
    about: dict[str, Any] = {
        "node": node.id,
        "value": node.outputs[0].name,
        "scope": node.scope,
        "source": str(node.source) if node.source else "",
        "sizes": ProductAxes.of(first.shape, second.shape, canonical(node.params["dimension_numbers"])).sizes,
        "dtype": f"{dtype_text(first.dtype)} x {dtype_text(second.dtype)} -> {dtype_text(node.outputs[0].dtype)}",
    }
    bare, site = MATMUL.formula(), own.id if own else ""
    if claim is not None:
        return ProductRoute(**about, site=claim.id, formula=claim.formula, tag=tag_of(claim), reason=_claimed(claim))
    if rule is not None:
        return ProductRoute(
            **about, formula=bare, reason=f"inside a {rule.primitive}, whose derivative is the user's own"
        )
    if is_backward(node.eqn):
        fused = f"in the backward pass of {site}, whose products are left to XLA"
        reason = fused if own else "in a backward pass that no fusion claims"
        return ProductRoute(**about, formula=bare, reason=reason, site=site)
    found = routed.decided()
    if found is None:
        return ProductRoute(
            **about, formula=bare, reason="its operands or shardings are not supported by the op matmul"
        )
    call, answers = found
    formula = MATMUL.formula(**call.attrs, bias=call.bias is not None)
    tag, split = answers[-1].route.tag, routed.left_behind(call)
    return ProductRoute(**about, site=site, formula=formula, tag=tag, answers=answers, split=split)


def _claimed(claim: Candidate) -> str:
    """Why no route is sought for a product that a larger fusion claims."""
    backend = claim.backend
    return f"claimed by {claim.pass_name}" + (f", {backend.name}: {backend.reason}" if backend else "")


PASSES = {50: MatmulSchedulePass()}
