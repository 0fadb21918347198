"""Pass `gemm_epilogue`: act(x @ w + b) -> one `gemm_epilogue` op.

The anchor is a product. The linear part is matched by example (`linear_parts`); the activation is recognised by value, from the
linear result onwards (`epilogues`). Every product with a bias or an activation is a site; a bare product is not, since there is
nothing to fuse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from ....graph.certify.alike import most_sizes_first
from ....graph.declined import Declined
from ....graph.dtypes import is_float, narrows
from ....graph.matching.match import close
from ....graph.matching.region import CASTS, Region, cut
from ....graph.program.ir import Node, Value
from ....graph.program.scopes import is_backward
from ....kernels.op.arrays import FLOATS as DTYPES
from ....kernels.op.arrays import is_default
from ....kernels.ops.gemm_epilogue.activations import ACTIVATIONS
from ...engine.base import Option, Pass, Search
from ...engine.declining import attempted, reason_to_tell
from ...engine.outcomes import Candidate, Rejection, in_turn
from ...engine.passages import Passage, narrow, passage, rounding
from ...engine.wording import anchor_text
from .beyond import activations_beyond, is_pointwise_convolution
from .epilogues import Epilogue, concepts_of, summed_over_devices
from .linear_groups import GROUPINGS, grouped
from .linear_parts import Linear, LinearSite
from .plan import linear_plan

_KEPT = "the pre-activation is kept in {0} for the gradient, where the program may keep it in float32"
_BY_RULE = "its gradient at exactly 0 is relu's, 0, as in this program; differentiated again, the program's own maximum would give 1/2"
_TAKES = "{} computes in {}; the fused op takes " + ", ".join(DTYPES)
_FLOATS = "cast x, w and b to bfloat16 or float32"


class GemmEpiloguePass(Pass):
    """See the module docstring."""

    name = op = "gemm_epilogue"
    formula = "act(x @ w + b), act one of " + ", ".join(ACTIVATIONS)
    needs = (
        "w a matrix (unit axes aside), b along the output features, one dtype of f64/f32/bf16/f16, the pre-activation read only by "
        "the activation"
    )
    options: ClassVar = {
        "strict_rank": Option(False, "judge the weight's rank before any squeeze, as the original pass did"),
        "grouping": Option(
            "per_layer",
            "for backward passes in the program: act', dX, dW and dBias of a layer together, or \"chained\": act' with dX of the "
            "next layer, where that layer is the only reader of the result",
            GROUPINGS,
        ),
    }
    summary = "Replaces a matrix product, the bias added to it and the activation of the result by one op, forward and backward."
    spellings = (
        "x has rank 2 or more, and w is a matrix. The product may be any contraction that @, einsum or dot_general expresses, or a 1x1 "
        "convolution.",
        "The bias may stand on either side of the add. It may be absent if there is an activation.",
        "The bias and the activation may follow a reshape of the product, or be computed in float32 from a 16-bit product.",
        "The activation is recognised by its values and its gradient, in any spelling: none, relu, tanh-GELU, erf-GELU, quick GELU, silu, "
        "sigmoid or tanh. An erf-GELU is never taken for a tanh-GELU.",
    )
    default = (
        "On. On a GPU a site keeps XLA's code unless an implementation was measured faster at its shapes. On a CPU XLA's code runs too: "
        "it fuses bias and activation by itself, so nothing is gained there."
    )
    codes = ("activation", "axes", "bias", "rank", "scalar", "structure")

    def together(self, found: list[Candidate | Rejection], options: Mapping[str, Any]) -> list[Candidate | Rejection]:
        return grouped(found, options.get("grouping", GROUPINGS[0]))

    def sample(self) -> tuple[Any, tuple[Any, ...]]:
        def linear(x: Any, w: Any, b: Any) -> Any:
            return jax.nn.gelu(x @ w + b)

        return linear, (jnp.zeros((8, 4)), jnp.zeros((4, 16)), jnp.zeros(16))

    def is_anchor(self, node: Node) -> bool:
        return (node.primitive == "dot_general" or is_pointwise_convolution(node)) and not is_backward(node.eqn)

    def anchors(self, search: Search) -> Iterator[tuple[Node]]:
        return ((node,) for node in most_sizes_first(filter(self.is_anchor, search.block.nodes)))

    def examine(self, search: Search, anchor: Node) -> list[Candidate | Rejection]:
        return _ProductSite(self, search, anchor).examined()

    def search(self, search: Search) -> Iterator[Candidate | Rejection]:
        claimed: set[int] = set()
        for outcome in super().search(search):
            claimed |= outcome.node_ids if isinstance(outcome, Candidate) else outcome.site_ids
            yield outcome
        yield from activations_beyond(self, search, claimed)


@dataclass(frozen=True)
class Wide:
    """The part of a site with 16-bit operands that is computed in float32.

    Attributes: `dtype` of the operands, `start` where float32 begins (as the op's `wide`), `out` as the op's.
    """

    dtype: str = ""
    start: str | None = None
    out: str | None = None

    @property
    def attrs(self) -> dict[str, Any]:
        return {} if self.start is None else {"wide": self.start, "out": self.out}

    def notes(self, activation: str, bias: bool) -> tuple[str, ...]:
        keeps = ACTIVATIONS[activation].residual == "preactivation" and bias
        return (_KEPT.format(self.dtype),) if self.start == "epilogue" and keeps else ()


class _ProductSite(LinearSite):
    """One product, from anchor to candidate or rejection."""

    progress = 1, 2  # the product alone

    def examine(self) -> Iterator[Candidate | Rejection]:
        is_product = self.view.nodes[self.nid(self.product)].op == "dot"
        if is_pointwise_convolution(self.anchor) and not is_product:
            self.check_convolution()
        else:
            yield from self.wrong_dtype()
        linear = self.attempt(self.linear) if is_product else None
        if isinstance(linear, Rejection):
            yield linear
        elif linear is not None:
            yield from self.with_activation(linear)

    def check_convolution(self) -> None:
        """Declines a one-point convolution with a stride, padding or dilation that is followed by something to fuse."""
        added = self.addition()
        total = added[0].outputs[0] if added is not None else self.product
        nodes = [*(added[:1] if added is not None else ()), *Epilogue(self, total, added is not None).following(total)]
        if not nodes:
            return
        reason = (
            "is a convolution with a window of one point, but its stride, padding or dilation keeps it from being a plain matrix "
            "product, which the fused op needs"
        )
        edit = "select the positions first, x[:, ::2, ::2], and multiply them by the matrix, x @ w[0, 0]"
        self.decline("structure", f"{anchor_text(self.anchor)} {reason}", edit=edit, progress=(1, 2), site=nodes)

    def wrong_dtype(self) -> Iterator[Rejection]:
        """The rejection of an integer product that is followed by something to fuse."""
        users = self.users(self.product)
        if not is_float(self.product.dtype) and any(u.primitive in ("add", "max", "custom_jvp_call") for u in users):
            yield self.rejection("dtype", _TAKES.format(anchor_text(self.anchor), self.product.dtype), edit=_FLOATS)

    def with_activation(self, linear: Linear) -> Iterator[Candidate | Rejection]:
        way = passage(self, linear.value)
        found, problem = Epilogue(self, way.end, linear.bias).activation()
        if found is None and problem is None:  # nothing behind the views; and before them?
            way = Passage(linear.value)
            found, problem = Epilogue(self, linear.value, linear.bias).activation()
        if found is not None and problem is None:
            yield self.attempt(self.candidate, linear, *found, (), way.views)
            return
        if found is not None and self.search.differentiated:
            end, name = found
            outcome = self.attempt(self.candidate, linear, end, name, (), way.views)
            if isinstance(outcome, Candidate):
                others = in_turn(self.linear_part(linear, problem, found))
                # A maximum that the backward pass differentiates by JAX's rule for relu, to be fused with that or not at all.
                if name == "relu_tie":
                    by_rule = self.attempt(self.candidate, linear, end, "relu", (_BY_RULE,), way.views, True)
                    others = (by_rule, *others) if isinstance(by_rule, Candidate) else others
                yield replace(outcome, alternatives=others)
                return
            problem = reason_to_tell(problem, outcome)
        yield from self.linear_part(linear, problem, found)

    def linear_part(
        self, linear: Linear, problem: Rejection | None, leaking: tuple[Value, str] | None
    ) -> Iterator[Candidate | Rejection]:
        """The product with its bias, if the activation after it is not fused, and the reason for that."""
        if problem is not None:
            yield replace(problem, region=self.whole(linear, leaking))
        summed = None if linear.bias else summed_over_devices(self, self.product)
        notes = (f"linear part only: {problem.sentence}",) if problem else ()
        if summed is not None:
            notes = (*notes, f"the product alone: {anchor_text(summed)} sums it over devices before anything is added")
        if linear.bias or summed is not None:
            yield self.attempt(self.candidate, linear, linear.value, "none", notes)

    def whole(self, linear: Linear, leaking: tuple[Value, str] | None) -> Region | None:
        """The product with the declined activation, as a region; None if it cannot be cut out."""
        if leaking is None:
            return None
        read = frozenset({"x"})
        return attempted(lambda: cut(self.view, leaking[0], linear.leaves, as_read=read), lambda reason: None)

    def candidate(
        self,
        linear: Linear,
        end: Value,
        activation: str,
        notes: tuple[str, ...],
        views: tuple[Node, ...] = (),
        by_rule: bool = False,
    ) -> Candidate | Rejection:
        """The site that ends in `end`, or in its rounding.

        `views` come between the linear part and its activation; `by_rule`: the maximum there has the derivative of relu.
        """
        dtype = self.narrow(linear) if np.dtype(end.dtype) == np.float32 else None
        region, more = self.region(linear, end, dtype)
        if dtype is not None and linear.bias and region.leaves["b"].dtype != dtype:
            dtype = None  # a bias that is made in float32 of one of 16 bits: so is the whole
            region, more = self.region(linear, end, dtype)
        after = (*views, *more)
        if by_rule:
            region = replace(region, relus=_maximum(region))
        wide = Wide() if dtype is None else self.wide(region, dtype)
        if self.anchor not in region.nodes:
            raise Declined("the product is not part of the site")
        concepts = concepts_of(linear.bias, activation)
        self.check_dtypes(region, wide, concepts)
        self.check_operands(linear, region, concepts)
        attrs = activation, wide.attrs
        plan = linear_plan(self, linear, region, after, attrs, region.root.dtype if self.mixed(region) else None)
        notes = (*notes, *wide.notes(activation, linear.bias))
        return self.offered(region, plan, "compute the outside use from x, w and b again", notes, concepts)

    def region(self, linear: Linear, end: Value, dtype: Any) -> tuple[Region, tuple[Node, ...]]:
        """The site that ends in `end`, or in its rounding to `dtype`; and the views in between."""
        rounded = None if dtype is None else rounding(self, end, dtype)
        widened = frozenset[str]()  # the leaves that are read as they are before they are widened
        if dtype is not None:
            widened = frozenset("bxw" if any(a.dtype != dtype for a in self.anchor.inputs) else "b")
        root, views = (end, ()) if rounded is None else (rounded.end, rounded.views)
        return cut(self.view, root, linear.leaves, as_read=frozenset("x") - widened, through_casts=widened), views

    def narrow(self, linear: Linear) -> Any:
        """The 16-bit dtype that both operands of the product have, or from which they are widened; None if there is none."""
        first, second = (narrow(self, a) for a in self.anchor.inputs)
        if first is None or first != second:
            return None
        if np.dtype(self.anchor.inputs[0].dtype) != np.float32:
            return first
        # A product that is asked for more than the default is not the one of operands of 16 bits.
        narrow_bias = not linear.bias or any(v.dtype == first for v in self.view.values_of[linear.leaves["b"]])
        return first if narrow_bias and is_default(self.anchor.params.get("precision")) else None

    def wide(self, region: Region, dtype: Any) -> Wide:
        """The part of a site with 16-bit operands that is computed in float32."""
        last = self.search.block.producer[region.root.id]
        rounds = any(
            n.primitive in CASTS and n.outputs[0].dtype == dtype and n is not last and narrows(dtype, n.inputs[0].dtype)
            for n in region.nodes
        )
        kept = np.dtype(self.anchor.outputs[0].dtype) == np.float32 and not rounds
        out = None if region.root.dtype == dtype else "float32"
        return Wide(np.dtype(dtype).name, "product" if kept else "epilogue", out)

    def mixed(self, region: Region) -> bool:
        """Whether a product computes in the dtype of the result, which x or w has, of operands some of which have fewer bits: these are
        widened, and nothing is rounded.
        """
        dtype, leaves = region.root.dtype, {v.dtype for v in region.leaves.values()}
        wide = np.dtype(dtype).name in ("float32", "float64") and self.anchor.outputs[0].dtype == dtype
        joined = len(leaves) > 1 and any(a.dtype == dtype for a in self.anchor.inputs)
        return wide and joined and all(is_float(d) and not narrows(dtype, d) for d in leaves)

    def refuse(self, region: Region, code: str, sentence: str, edit: str, concepts: Sequence[str] = ()) -> NoReturn:
        """Declines operands that the fused op does not take."""
        self.decline(code, sentence, edit=edit, progress=(1, 1), site=region.nodes, concepts=concepts)

    def check_dtypes(self, region: Region, wide: Wide, concepts: Sequence[str]) -> None:
        """Declines several dtypes, a dtype that the op does not take, and float32 sums of float16."""
        values = (*region.leaves.values(), *(() if wide.start else (region.root,)))
        dtypes = {str(v.dtype) for v in values} if not self.mixed(region) else {str(region.root.dtype)}
        where = anchor_text(self.anchor)
        if len(dtypes) != 1:
            sentence = f"{where} mixes {', '.join(sorted(dtypes))}; the fused op computes in one dtype"
            self.refuse(region, "dtype", sentence, "cast x, w and b to one dtype before the product", concepts)
        if wide.start == "product" and wide.dtype == "float16":
            reason = "not every backend does that for float16, and a float16 gradient has a smaller range"
            sentence = f"{where} keeps its sum in float32; {reason}"
            self.refuse(region, "dtype", sentence, "use bfloat16, or give the product float16", concepts)
        if not dtypes <= set(DTYPES):
            self.refuse(region, "dtype", _TAKES.format(where, *dtypes), _FLOATS, concepts)

    def check_operands(self, linear: Linear, region: Region, concepts: Sequence[str]) -> None:
        """Declines a rank that the op, or the option `strict_rank`, does not take, a convolution, and a factor."""
        x, w, where = region.leaves["x"], region.leaves["w"], anchor_text(self.anchor)
        if len(x.shape) < 2:
            edit = "give x a leading axis, or map the layer with jax.vmap"
            self.refuse(region, "rank", f"{where} multiplies a vector {x!r}; the fused op needs rows", edit)
        if is_pointwise_convolution(self.anchor) and self.search.device.platform == "cuda" and self.search.by_default:
            reason = "is a convolution that multiplies every position by one matrix; a product in its place was not measured on a GPU"
            edit = "to fuse it anyway, name the pass: passes='gemm_epilogue'"
            self.decline("unmeasured", f"{where} {reason}", edit=edit, site=region.nodes, concepts=concepts)
        if self.pass_.option(self.search, "strict_rank") and len(w.shape) != 2:
            sentence = f"{where} multiplies by {w!r}, a weight of rank {len(w.shape)}"
            self.refuse(region, "rank", sentence, "reshape the weight to a matrix, or leave strict_rank off")
        scale = self.scale(linear, region)
        if not close(scale, 1.0):
            sentence = f"{where}: the product is multiplied by {scale:g} before the bias"
            self.refuse(region, "scalar", sentence, "fold the factor into x or w")

    def scale(self, linear: Linear, region: Region) -> float:
        """The factor on the product that its operands do not carry themselves."""
        m = linear.match
        carried = self.carried(region, ("x", "w"))
        if not linear.matched_bias:
            return float(self.view.ref[self.product.id].coef) / carried
        root = self.view.nodes[m.nodes[m.pattern.root]]
        product = self.nid(self.product)
        on_edge = next(float(o.coef) for o in root.operands if o.nid == product)
        return on_edge / carried


def _maximum(region: Region) -> frozenset[int]:
    """The one maximum of a site.

    Raises:
      Declined: there are several.
    """
    found = frozenset(n.id for n in region.nodes if n.primitive == "max")
    if len(found) != 1:
        raise Declined("it contains several maxima")
    return found


PASSES = {10: GemmEpiloguePass()}
