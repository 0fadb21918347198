"""Pass `lerp`: x + w * (y - x), w an array or a number, broadcast in any way -> one `lerp` op.

The spellings are mathematically equal but round differently. Those that round as the op does are fused; the others (x * (1 - w) + y * w
and similar) only with `lerp=dict(reassociate=True)`. A blend's spelling is read off the graph (`blends`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import jax.numpy as jnp

from ....graph.dtypes import is_float, narrows
from ....graph.matching.region import CASTS, VIEWS, Region, cut
from ....graph.program.ir import Node
from ....kernels import OPS
from ....kernels.op.arrays import FLOATS as DTYPES
from ...engine.base import Option, Pass, Search, Substitution
from ...engine.layout import arrange_thin, axes_of, input_positions, restore
from ...engine.other_numbers import edge_note
from ...engine.outcomes import Candidate, Rejection
from ...engine.proposing import propose
from ...engine.site import Site
from ...engine.wording import anchor_text
from .blends import Blend, blends
from .examples import AS_THE_OP_ROUNDS

_DIGITS = "the number w is read to 12 digits"


class LerpPass(Pass):
    """See the module docstring."""

    name = op = "lerp"
    formula = "x + w * (y - x), w an array or a number, broadcast in any way"
    needs = "x, y and w of one float dtype (f64/f32/bf16/f16), or widened to it; a number for w between 0 and 1"
    options: ClassVar = {
        "reassociate": Option(
            False,
            "also fuse x * (1 - w) + y * w and its variants: equal in exact arithmetic, rounded differently, infinite near the dtype's max",
        )
    }

    summary = "Replaces a linear interpolation, x + w * (y - x), by one op."
    spellings = (
        "x, y and w may broadcast in any way.",
        "Spellings that round as x + w * (y - x) does are taken. x * (1 - w) + y * w and its relatives round differently: they are "
        "declined unless fl.Strategy(lerp=dict(reassociate=True)) asks for them.",
    )
    default = (
        "On. On sm_90 values and gradients each take FusionLab's kernels where they were measured faster, which is mostly the gradient of "
        "a broadcast operand. Elsewhere XLA's code runs."
    )
    codes = ("rounding",)

    def sample(self) -> tuple[Any, tuple[Any, ...]]:
        return lambda x, y, w: x + w * (y - x), (jnp.zeros((8, 16)), jnp.zeros((8, 16)), jnp.zeros(16))

    def anchors(self, search: Search) -> Iterator[tuple[Node, Blend]]:
        asked = self.option(search, "reassociate")
        for blend in blends(search.view, weighted_sums=asked):
            # An optimizer blends two moments for every parameter, each by numbers that the program multiplies by: where those are not
            # asked for they are told as structures, and not declined one by one.
            if asked or "1 - w" not in blend.match.scalars:
                yield blend.nodes[-1], blend

    def examine(self, search: Search, anchor: Node, blend: Blend) -> list[Candidate | Rejection]:
        return _BlendSite(self, search, blend).examined()


class _BlendSite(Site):
    """One blend, from its last sum to candidate or rejection."""

    def __init__(self, pass_: Pass, search: Search, blend: Blend) -> None:
        super().__init__(pass_, search, blend.nodes[-1])
        self.blend, self.view, self.nodes = blend, blend.view, blend.nodes

    def examine(self) -> Candidate | Rejection:
        reassociated = self.blend.form.example.fn not in AS_THE_OP_ROUNDS
        if reassociated and not self.pass_.option(self.search, "reassociate"):
            sentence = (
                f"{anchor_text(self.anchor)} is {self.blend.form.text}, which rounds differently from x + w * (y - x)"
            )
            edit = "write x + w * (y - x), or allow it: passes=Strategy(lerp=dict(reassociate=True), ...)"
            self.decline("rounding", sentence, edit=edit, concepts=("lerp",))
        return self.candidate(reassociated)

    def candidate(self, reassociated: bool) -> Candidate | Rejection:
        found = self.blend.match
        # Where w is a number, so are the factors of x and y: the blend's own, since a leaf of its view carries none.
        scaled = frozenset("xy") if "w" in found.scalars else frozenset()
        region = cut(self.view, self.anchor.outputs[0], found.leaves, scaled, through_casts=frozenset(found.leaves))
        self.check_dtypes(region)
        notes = [_DIGITS] if "w" in found.scalars and str(region.root.dtype) == "float64" else []
        if reassociated:  # y - x is larger than x and y where they differ in sign
            notes.append(f"written as {self.blend.form.text}: the fused op rounds as x + w * (y - x) does")
            notes.append(edge_note(region.root.dtype))

        def proposed() -> Candidate | Rejection:
            plan = _plan(self.search, self.blend, region)
            return propose(self.search, self.pass_.name, region, plan, self.anchor, notes, ("lerp",))

        return self.unless_read(region, "compute the outside use from x and y again", proposed)

    def check_dtypes(self, region: Region) -> None:
        """Declines a dtype that the op does not take, and rounding inside, which includes an operand wider than the result."""
        result_dtype = region.root.dtype
        given = {str(v.dtype) for v in (*region.leaves.values(), region.root)}
        rounding, narrow = _rounding(region), _narrow(region)
        where, edit = anchor_text(self.anchor), "cast x, y and w to the dtype of the result first"
        if not given <= set(DTYPES):
            problem = f"blends {', '.join(sorted(given))} to {result_dtype}; the fused op takes {', '.join(DTYPES)}"
        elif rounding is not None:
            problem = f"reads {anchor_text(rounding)}, which rounds to {rounding.outputs[0].dtype}; the fused op would not round there"
        elif narrow is not None:
            problem = f"reads {anchor_text(narrow)}, which is computed in {narrow.outputs[0].dtype}; the fused op would not round there"
        elif any(narrows(result_dtype, v.dtype) for v in region.leaves.values()):
            problem = (
                f"computes {result_dtype} from {', '.join(sorted(given))}; the fused op would round its operands first"
            )
        else:
            return
        self.decline("dtype", f"{where} {problem}", edit=edit, site=region.nodes)


def _rounding(region: Region) -> Node | None:
    """The first cast inside a site from a float to one of fewer bits."""
    ends = ((n, n.inputs[0].dtype, n.outputs[0].dtype) for n in region.nodes if n.primitive in CASTS)
    return next((n for n, of, to in ends if is_float(of) and is_float(to) and narrows(to, of)), None)


def _narrow(region: Region) -> Node | None:
    """The first node inside a site that computes in a float of fewer bits than the result."""
    dtypes = ((n, n.outputs[0].dtype) for n in region.nodes if n.primitive not in CASTS | VIEWS)
    return next((n for n, dtype in dtypes if is_float(dtype) and narrows(dtype, region.root.dtype)), None)


def _plan(search: Search, blend: Blend, region: Region) -> Substitution:
    """Operands with the result's axes, of size 1 where they are broadcast, in its dtype; a number for w as a scalar."""
    found, view, sizes = blend.match, blend.view, blend.match.sizes
    root_axes = axes_of(found, view, found.pattern.root, region.root)
    groups = [[c] for c in root_axes if c is not None]
    axes = {n: axes_of(found, view, found.leaf_id(n), v, broadcast=True) for n, v in region.leaves.items()}
    where = input_positions(region)
    dtype, number = region.root.dtype, found.scalars.get("w")

    def operands(*inputs: Any) -> tuple[Any, ...]:
        def operand(name: str) -> Any:
            if name not in where:
                return jnp.asarray(number, dtype)
            return arrange_thin(inputs[where[name]], axes[name], groups, sizes).astype(dtype)

        return operand("x"), operand("y"), operand("w")

    def finish(out: Any) -> Any:
        whole = [sizes[c] for group in groups for c in group]
        return restore(jnp.broadcast_to(out, whole), groups, root_axes, region.root.shape, sizes)

    op = OPS["lerp"]
    formula = op.formula() if number is None else f"x + {number:.6g} * (y - x)"
    return Substitution(op, {"implementation": search.implementation}, operands, finish, formula)


PASSES = {40: LerpPass()}
