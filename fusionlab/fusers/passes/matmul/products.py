"""A matrix product and its surroundings, as the program writes them: casts of its operands, factors, a bias, an activation, a cast.

They are read off the raw graph rather than the canonical view, because roundings and the dtype of a product's sum matter here.
Each step is taken only if nothing else reads the value before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from ....graph.canonical.view import CanonicalView
from ....graph.certify.activations import between
from ....graph.declined import Declined
from ....graph.dtypes import is_float, narrows
from ....graph.matching.region import CASTS, SCALINGS, Region, dead_with, widens
from ....graph.matching.walks import maker_of, upstream
from ....graph.program.ir import Node, Value
from ....kernels.op.arrays import is_default, is_explicitly_sharded
from ....kernels.ops.matmul.axes import Dimensions, ProductAxes, canonical
from ...engine.passages import is_half
from ...engine.site import Site
from ..linear.epilogues import Epilogue


@dataclass(frozen=True)
class ProductCall:
    """A call of the op `matmul` as read off the program so far.

    Attributes:
      value: the result; `after`: the nodes after the product that compute it.
      a, b, bias: raw values at the cut, and `thin`, the shape in which the bias broadcasts to the result.
      product, out: dtypes; `alpha`, `beta`, `activation`: as of the op.
      widened: the program widens both operands first, which multiplying them directly avoids.
    """

    value: Value
    a: Value
    b: Value
    dimensions: Dimensions
    precision: Any
    widened: bool = False
    after: tuple[Node, ...] = ()
    bias: Value | None = None
    thin: tuple[int, ...] = ()
    alpha: float = 1.0
    beta: float = 1.0
    activation: str = "none"
    product: str = ""
    out: str = ""

    @property
    def attrs(self) -> dict[str, Any]:
        """The op's attributes."""
        names = ("dimensions", "precision", "product", "out", "alpha", "beta", "activation")
        return {name: getattr(self, name) for name in names}

    @property
    def sizes(self) -> ProductAxes:
        return ProductAxes.of(self.a.shape, self.b.shape, self.dimensions)

    @property
    def shapes(self) -> Mapping[str, Any]:
        """The operands as the op takes them: shapes with dtypes."""
        shapes = {name: v.shape for name, v in self.leaves.items()} | (
            {"bias": self.thin} if self.bias is not None else {}
        )
        return {name: jax.ShapeDtypeStruct(shapes[name], v.dtype) for name, v in self.leaves.items()}

    @property
    def leaves(self) -> dict[str, Value]:
        return {"a": self.a, "b": self.b} | ({"bias": self.bias} if self.bias is not None else {})


class ProductSite(Site):
    """A site whose anchor is a product: reads the call there, one step after another."""

    def bare(self) -> ProductCall | None:
        """The product alone; None if the op does not take it."""
        node = self.anchor
        result, operands = node.outputs[0], _operands(node)
        if operands is None:
            return None
        dtype = np.dtype(result.dtype).name
        dimensions, precision = canonical(node.params["dimension_numbers"]), node.params.get("precision")
        call = ProductCall(result, *operands, dimensions, precision, product=dtype, out=dtype)
        a, b = map(self.narrow, operands)
        # One that is asked for more than the default, or for an algorithm by name, is with the operands that it has.
        if a is None or b is None or a.dtype != b.dtype or dtype != "float32" or not is_default(precision):
            return call
        # In float32 products of numbers of 16 bits are exact, and summed in float32 they are what the product of both as they are is.
        return replace(call, a=a, b=b, widened=True)

    def narrow(self, operand: Value) -> Value | None:
        """The 16-bit value from which a float32 operand is widened, if any."""
        maker = maker_of(self.search.block, operand)
        if maker is None or not widens(maker) or np.dtype(operand.dtype).name != "float32":
            return None
        (source,) = maker.inputs
        return source if isinstance(source, Value) and is_half(source.dtype) else None

    def steps(self) -> list[ProductCall]:
        """The product alone, then with one more step at a time while nothing else reads the value before it; none if the op does not take
        the product."""
        call, found = self.bare(), []
        while call is not None:
            found.append(call)
            call = self.further(call)
        return found

    def further(self, call: ProductCall) -> ProductCall | None:
        """The call with the next step; None if it can take no further step."""
        user = self.reader_once(call.value)
        if call.out != call.product:  # a cast is the last
            return None
        if user is not None and user.primitive in CASTS:
            return self.cast(call, user)
        if call.activation != "none":
            return None
        found = None
        if user is not None and user.primitive in SCALINGS:
            found = self.scaled(call, user)
        elif user is not None and user.primitive in ("add", "sub"):
            found = self.biased(call, user)
        return found or self.activated(call)

    def reader_once(self, value: Value) -> Node | None:
        """The only reader of a value, if it has no body and reads the value once."""
        user = self.only_reader(value)
        once = user is not None and not user.blocks and sum(a is value for a in user.inputs) == 1
        return user if once else None

    def cast(self, call: ProductCall, user: Node) -> ProductCall | None:
        """The call with a cast to fewer bits; a cast that widens would leave a rounding of the program's before it."""
        result = user.outputs[0]
        if not is_float(result.dtype) or not narrows(result.dtype, call.value.dtype):
            return None
        return replace(call, value=result, after=(*call.after, user), out=np.dtype(result.dtype).name)

    def scaled(self, call: ProductCall, user: Node) -> ProductCall | None:
        factor = -1.0 if user.primitive == "neg" else self.factor(call.value, user)
        if factor is None:
            return None
        alpha, beta = call.alpha * factor, call.beta if call.bias is None else call.beta * factor
        if not all(_is_held(number, call.product) for number in (alpha, beta)):
            return None
        return replace(call, value=user.outputs[0], after=(*call.after, user), alpha=alpha, beta=beta)

    def factor(self, value: Value, user: Node) -> float | None:
        """The number by which a node multiplies a value, or by whose inverse it divides; None for any other node."""
        first, second = user.inputs
        other = second if first is value else first
        ref = self.view.read(other)
        if not self.view.is_literal(ref) or isinstance(ref.coef, complex) or user.outputs[0].shape != value.shape:
            return None
        if user.primitive == "mul":
            return float(ref.coef)
        return 1.0 / float(ref.coef) if second is other and ref.coef else None

    def biased(self, call: ProductCall, user: Node) -> ProductCall | None:
        first, second = user.inputs
        other = second if first is call.value else first
        result = user.outputs[0]
        if call.bias is not None or not isinstance(other, Value) or result.shape != call.value.shape:
            return None
        if is_explicitly_sharded(result.aval):
            return None
        found = self.bias(call, other)
        if found is None:
            return None
        bias, thin = found
        alpha, beta = (1, 1) if user.primitive == "add" else (1, -1) if first is call.value else (-1, 1)
        more = {"bias": bias, "thin": thin, "alpha": call.alpha * alpha, "beta": call.beta * beta}
        return replace(call, value=result, after=(*call.after, user), **more)

    def bias(self, call: ProductCall, value: Value) -> tuple[Value, tuple[int, ...]] | None:
        """An added value before it is broadcast and widened, with the shape in which it broadcasts; None if it is not a bias."""
        result = call.value.shape
        if self.view.is_literal(self.view.read(value)):
            return None
        value, thin = self.unbroadcast(self.widened(value))
        thin = thin or (1,) * len(result)
        if len(thin) != len(result) or any(n not in (1, m) for n, m in zip(thin, result, strict=True)):
            return None
        return (value, thin) if self.is_bias(call.sizes, thin) and is_float(value.dtype) else None

    def unbroadcast(self, value: Value) -> tuple[Value, tuple[int, ...]]:
        """The value before it is broadcast and widened, and the shape in which it broadcasts; itself if it is not broadcast."""
        maker = maker_of(self.search.block, value)
        # Further operands are sizes that are not known when the program is traced.
        if maker is not None and maker.primitive == "broadcast_in_dim" and len(maker.inputs) == 1:
            (source,) = maker.inputs
            if isinstance(source, Value):
                lengths = dict(zip(maker.params["broadcast_dimensions"], source.shape, strict=True))
                return self.widened(source), tuple(lengths.get(i, 1) for i in range(len(value.shape)))
        return value, tuple(value.shape)

    def widened(self, value: Value) -> Value:
        """The value before it is widened, if it is: the op widens an added term again, and XLA does not add a widened term in a product's
        own kernel (84 us against 55 on an H200: `python -m benchmarks matmul_schedule --only "to f32, bias"`)."""
        while (maker := maker_of(self.search.block, value)) is not None and widens(maker):
            (source,) = maker.inputs
            if not isinstance(source, Value):
                break
            value = source
        return value

    @staticmethod
    def is_bias(sizes: ProductAxes, thin: tuple[int, ...]) -> bool:
        """Whether it has fewer entries than the result along the rows or the columns of each product."""
        first, second = len(sizes.batch), len(sizes.batch) + len(sizes.rows)
        whole = sizes.result
        same = [math.prod(thin[i:j]) == math.prod(whole[i:j]) for i, j in ((first, second), (second, len(whole)))]
        few = [math.prod(whole[first:second]) > 1, math.prod(whole[second:]) > 1]
        return any(real and not alike for real, alike in zip(few, same, strict=True)) or not any(few)

    def activated(self, call: ProductCall) -> ProductCall | None:
        found, problem = Epilogue(self, call.value, call.bias is not None).activation()
        if found is None or problem is not None:
            return None
        end, name = found
        nodes = between(self.view, call.value, end)
        return replace(call, value=end, after=(*call.after, *nodes), activation=name)

    def region(self, call: ProductCall) -> Region:
        """The raw nodes between a call's operands and its result.

        Raises:
          Declined: a value read inside is not an operand.
        """
        block, leaves = self.search.block, call.leaves
        stop = {v.id for v in leaves.values()} | self.view.known_inputs.keys()
        inner = {n.id: n for n in (self.anchor, *call.after)}

        def above(node: Node) -> list[Value]:
            read = [a for a in node.values if a.id not in stop]
            for value in read:
                if value.id not in block.producer:
                    raise Declined(f"{value!r} is read inside the site but is not one of its operands")
            return read

        read = [a for n in inner.values() for a in above(n)]
        support = {n.id: n for _, n in upstream(block, read, above) if n.id not in inner}
        return region_with(self.view, call.value, leaves, inner, support)


def _operands(product: Node) -> tuple[Value, Value] | None:
    """The operands of a product that the op takes: floats of one dtype, on no explicit mesh axes; None for any other."""
    a, b = product.inputs
    if not (isinstance(a, Value) and isinstance(b, Value)) or not is_float(product.outputs[0].dtype):
        return None
    if np.dtype(a.dtype) != np.dtype(b.dtype) or product.params.get("out_sharding") is not None:
        return None
    return None if is_explicitly_sharded(a.aval) or is_explicitly_sharded(b.aval) else (a, b)


def _is_held(factor: float, dtype: str) -> bool:
    """Whether a factor is neither infinite nor 0 in the dtype in which it is applied, as a product of several factors may be."""
    with np.errstate(over="ignore", under="ignore"):
        held = float(np.asarray(factor).astype(dtype))
    return math.isfinite(held) and held != 0.0


def region_with(
    view: CanonicalView, root: Value, leaves: Mapping[str, Value], inner: dict[int, Node], support: dict[int, Node]
) -> Region:
    """The region of some nodes and of those nodes of their `support` that nothing else reads."""
    gone = {**inner, **dead_with(view.block, inner, support, leaves.values())}
    kept = tuple(support[i] for i in sorted(support) if i not in gone)
    nodes = tuple(gone[i] for i in sorted(gone))
    return Region(view.block, root, leaves, nodes, kept, view.known_inputs)
