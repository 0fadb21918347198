"""The plan of a layer whose heads and inner features are sharded over devices: the op's two parts, and the sums over devices between.

The sums over devices, c_allreduce_sum in Paddle's fused_multi_transformer, remain the program's own collectives, after each part and before
the bias: no fusion crosses them. The entry to the block, Paddle's c_identity, is a pvary that JAX inserts if types record what varies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from ....kernels import OPS
from ....kernels.ops.multi_transformer.checks import OF_ATTENTION
from ...engine.base import Substitution
from .plan import Maker, Planned, plan_by

_ATTENTION_ONLY = frozenset(
    "cache cache_layout gives_keys rotary is_causal mask_value scale qkv heads kv_heads".split()
)


@dataclass(frozen=True, eq=False)
class SplitLayer(Substitution):
    """A plan whose `op`, `attrs` and `operands` are those of the attention's part.

    Attributes: `axes` (mesh axes that both parts are summed over), `sums` (the dtype that each is summed in), `makers` (slot -> the
    operand, of the region's inputs), `forward` (attributes of the feed-forward's part).
    """

    axes: tuple[str, ...] = ()
    sums: tuple[Any, ...] = ()
    makers: Mapping[str, Maker] = field(default_factory=dict)
    forward: Mapping[str, Any] = field(default_factory=dict)

    def call(self, *inputs: Any) -> Any:
        x = self.makers["x"](inputs)
        attended, *keys = self.op.call(*self.operands(*inputs), **self.attrs)
        a = self.added(x, attended, "out", 1, inputs)
        others = (self.makers[name](inputs) for name in self.forward["present"] if name != "x")
        (fed,) = self.op.call(a, *others, **self.forward)
        return self.finish((self.added(a, fed, "down", 2, inputs), *keys))

    def added(self, x: Any, part: Any, slot: str, number: int, inputs: Any) -> Any:
        """x plus the sum of the devices' parts, with its bias; normalised if the norm comes last."""
        total = jax.lax.psum(part.astype(self.sums[number - 1]), self.axes)
        wide = jnp.promote_types(x.dtype, jnp.float32)  # 16 bits are rounded to once, as by the op on one device
        bias = self.makers.get(f"{slot}_bias.0")
        if bias is not None:
            total = total.astype(wide) + jnp.reshape(bias(inputs), -1).astype(wide)
        total = (x.astype(wide) + total.astype(wide)).astype(x.dtype)
        epsilon = self.attrs["epsilons"][number - 1]
        if self.attrs["pre_norm"] or epsilon is None:
            return total
        makers = (self.makers.get(f"norm{number}_{part}.0") for part in ("scale", "bias"))
        scale, shift = (make and make(inputs) for make in makers)
        return OPS["layer_norm"].call(total, scale, shift, kind=self.attrs["norm"], epsilon=epsilon)


def plan_over_devices(planned: Planned, implementation: str | None) -> Substitution:
    """The plan of a layer that sums over the mesh axes `planned.site.layer.axes`."""
    attrs, makers, axes = planned.attrs, planned.makers, planned.site.layer.axes
    outside = {"out_bias", "down_bias"}
    if not attrs["pre_norm"]:
        outside |= {"norm1_scale", "norm1_bias", "norm2_scale", "norm2_bias"}

    def own(of_attention: bool) -> dict[str, Maker]:
        kept = {
            n for n in makers if (slot := n.partition(".")[0]) not in outside and (slot in OF_ATTENTION) == of_attention
        }
        return {n: make for n, make in makers.items() if n == "x" or n in kept}

    first = plan_by({**attrs, "part": "attention"}, own(True), planned.results, implementation)
    rest = {n: v for n, v in attrs.items() if n not in _ATTENTION_ONLY}
    forward = {**rest, "part": "feed_forward", "present": tuple(own(False)), "implementation": implementation}
    formula = f"{OPS['multi_transformer'].formula(**attrs)}, summed over {', '.join(axes)}"
    given = {"axes": axes, "sums": planned.site.sums, "makers": makers, "forward": forward}
    return SplitLayer(first.op, first.attrs, first.operands, first.finish, formula, **given)
