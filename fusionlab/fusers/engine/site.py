"""One place in a block that a pass examines, from its anchor to a candidate or a rejection."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from ...graph.canonical.rules import passed_whole
from ...graph.canonical.view import CanonicalView
from ...graph.declined import Declined
from ...graph.matching.match import Match, Miss
from ...graph.matching.region import SCALINGS, VIEWS, Escape, Region, escapes
from ...graph.matching.walks import downstream, given
from ...graph.program.ir import Block, Node, Value
from ...graph.program.scopes import in_differentiated, is_backward
from .base import Pass, Search, Substitution
from .declining import FUSE_FIRST, attempted, listed, reason_to_tell, reject
from .nearly import sentence_of
from .outcomes import Candidate, Rejection
from .proposing import propose
from .wording import anchor_text, escape_text

T = TypeVar("T")

ARGUMENT = "{} is an argument of the program: close over it ({})"
CLOSE_OVER = "close over {} where the function is defined, or make it a static argument"
# Rejection codes of what stands where a pattern has something else, by canonical op.
CODES_OF_OPS = {
    "stop_gradient": "stop_gradient",
    "name": "named_residual",
    "custom_jvp_call": "custom_rule",
    "custom_vjp_call": "custom_rule",
}


def input_index(block: Block, value: Value) -> int | None:
    """The position of a value among a block's inputs; None if it is not an input."""
    return next((i for i, v in enumerate(block.inputs) if v.id == value.id), None)


class Site:
    """The tools that every pass needs at its anchor. A pass derives its own class, which decides what becomes a candidate.

    Attributes:
      words: the pass's names for the operations, operands and numbers of its examples, where they differ from the defaults.
      nodes: the nodes known from the start, if more than the anchor.
      progress: how much of the site is understood when it declines, unless given by the reason.
    """

    words: Mapping[str, str] = {}
    nodes: Sequence[Node] = ()
    progress: tuple[int, int] | None = None

    def __init__(self, pass_: Pass, search: Search, anchor: Node) -> None:
        self.pass_, self.search, self.anchor = pass_, search, anchor
        self.view: CanonicalView = search.view

    def examine(self, *given: Any) -> Any:
        """The outcome at the place: a candidate or a rejection, several of them, or None. May decline."""
        raise NotImplementedError

    def examined(self, *given: Any) -> list[Candidate | Rejection]:
        """The result of `examine`, or the rejection of the place if it declines."""
        return listed(self.attempt(lambda: listed(self.examine(*given))))

    def attempt(self, make: Callable[..., T], *given: Any) -> T | Rejection:
        """The result of `make`, or the rejection of the place if it declines."""
        return attempted(lambda: make(*given), self.declined)

    def declined(self, reason: Declined) -> Rejection:
        """The rejection for a reason at this place."""
        sentence, progress = f"{anchor_text(self.anchor)}: {reason.sentence}", reason.progress or self.progress
        return reason.rejection or self.rejection(reason.code, sentence, reason.nodes, progress, reason.edit)

    def decline(self, *sentence: Any, **more: Any) -> NoReturn:
        """Declines with a rejection made from the arguments of `rejection`."""
        rejection = self.rejection(*sentence, **more)
        raise Declined(rejection.sentence, rejection=rejection)

    def nid(self, value: Value) -> int:
        """The canonical node of a raw value."""
        return self.view.ref[value.id].nid

    def users(self, value: Value) -> Sequence[Node]:
        """The raw nodes of the block that read a value."""
        return self.search.block.users.get(value.id, ())

    def only_reader(self, value: Value) -> Node | None:
        """The only reader of a value that the block does not return; None if there is none."""
        users = self.users(value)
        return users[0] if len(users) == 1 and value.id not in self.search.block.returned else None

    def near_miss(self, miss: Miss) -> Rejection:
        """The rejection for the nearest miss."""
        node = self.view.maker(miss.target)
        site = [n for t in miss.bound.values() if (n := self.view.maker(t)) is not None]
        code = miss.kind if miss.kind in ("axes", "scalar") else "structure"
        target = self.view.nodes[miss.target]
        if code == "structure" and target.op == "select":
            code = "mask"
        if code == "structure":
            code = CODES_OF_OPS.get(target.op, code)
        if code in ("structure", "mask") and self.is_random(miss.target):
            code = "dropout"
        sentence = sentence_of(self.view, miss, self.anchor, self.words)
        return self.rejection(code, sentence, [node] if node else [], (miss.matched, miss.total), site=site)

    def computed_from(self, nid: int, target: int, depth: int) -> bool:
        """Whether a canonical node is computed from another, within `depth` steps."""
        level = {nid}
        for _ in range(depth):
            if target in level:
                return True
            level = {o.nid for n in level for o in self.view.nodes[n].operands}
        return target in level

    def is_random(self, nid: int) -> bool:
        """Whether a canonical node is computed from random bits within a few steps, as a dropout mask is."""
        level = {nid}
        for _ in range(12):
            if any(self.view.nodes[n].op.startswith(("random_", "threefry")) for n in level):
                return True
            level = {o.nid for n in level for o in self.view.nodes[n].operands if self.view.nodes[n].op != "dot"}
        return False

    def given(self, atom: Any) -> bool:
        """Whether an operand is, through views and casts, an input or captured array of the block, as a parameter such as a bias is."""
        return given(self.search.block, atom)

    def argument(self, nid: int) -> str | None:
        """The name of the scalar program argument that a canonical node is, even if it reaches the node through an enclosing loop."""
        view, value = self.search.view, next(iter(self.view.values_of.get(nid, ())), None)
        while isinstance(value, Value) and math.prod(value.shape) == 1:
            maker = view.block.producer.get(value.id)
            if maker is not None:
                value = maker.inputs[0] if maker.primitive in VIEWS | {"convert_element_type"} else None
                continue
            index = input_index(view.block, value)
            if index is None:
                return None
            if view.outer is None:
                return next(iter(self.search.graph.in_names[index:]), None)
            view, node = view.outer
            value = node.inputs[index] if index < passed_whole(node) else None
        return None

    def root_value(self, found: Match) -> Value:
        """The raw value of the match's root after the anchor; a cast of it is left outside."""
        nid = found.nodes[found.pattern.root]
        for value in self.view.values_of.get(nid, ()):
            maker = self.search.block.producer.get(value.id)
            if maker is not None and maker.id >= self.anchor.id:
                return self.after_views(value)
        raise Declined("its result is computed before the product")

    def after_views(self, value: Value) -> Value:
        """The value after the transposes and unit reshapes that are the only readers of `value`, so that they disappear with the site.

        Views that another site looks through itself are left alone, as the two sites would overlap.
        """
        end = self.behind_views(value)
        return value if self.looked_through(end) else end

    def behind_views(self, value: Value) -> Value:
        """The last in the chain of transposes and unit reshapes that are the only readers of a value."""
        while (user := self.only_reader(value)) is not None and user.primitive in VIEWS:
            ref = self.view.ref[user.outputs[0].id]
            if ref.nid != self.nid(value) or min(ref.dims, default=0) < 0:
                break
            value = user.outputs[0]
        return value

    def looked_through(self, value: Value) -> bool:
        """Whether a later site may bind a value of which `value` is only a view, a cast or a multiple."""
        copies = VIEWS | SCALINGS | {"convert_element_type"}
        readers = downstream(self.search.block, [value], lambda n: n.primitive in copies)
        return any(n.primitive in ("dot_general", "add", "add_any") for n in readers)

    def carried(self, region: Region, names: Iterable[str]) -> float:
        """The product of the scalar factors carried by the region's leaves of these names.

        Raises:
          Declined: one of them is 0.
        """
        product = 1.0
        for name in names:
            product *= float(self.view.ref[region.leaves[name].id].coef)
        if product == 0:
            raise Declined("an operand is multiplied by 0")
        return product

    def escaping(
        self,
        escape: Escape,
        edit: str,
        site: Sequence[Node],
        subject: str = "",
        concepts: Sequence[str] = (),
        region: Region | None = None,
    ) -> Rejection:
        """The rejection for an inner value that is read outside; `edit` where the reader is the user's own code.

        `region` is the whole site, where it could be cut out.
        """
        sentence = f"{subject} is not fused: {escape_text(escape)}" if subject else escape_text(escape)
        reader = escape.user
        # What the program itself returns is the user's wish; what a scan's body returns may be kept for the backward pass.
        kept = in_differentiated(escape.node) and (reader is not None or bool(self.search.block.path))
        if kept or (reader is not None and is_backward(reader.eqn)):
            sentence += ", as the backward pass of a program that is differentiated already does"
            edit = FUSE_FIRST
        problem = self.rejection("escapes", sentence, [escape.node], edit=edit, site=site, concepts=concepts)
        return replace(problem, region=region)

    def offered(
        self, region: Region, plan: Substitution, edit: str, notes: Sequence[str] = (), concepts: Sequence[str] = ()
    ) -> Candidate | Rejection:
        """The site as planned, if only the backward pass may read its inner values from outside; `edit` is for other readers."""

        def proposed() -> Candidate | Rejection:
            return propose(self.search, self.pass_.name, region, plan, self.anchor, notes, concepts)

        return self.unless_read(region, edit, proposed, concepts)

    def unless_read(
        self, region: Region, edit: str, propose: Callable[[], Candidate | Rejection], concepts: Sequence[str] = ()
    ) -> Candidate | Rejection:
        """The site from `propose` if nothing outside reads its inner values, or if only the backward pass may, to be fused with it. `edit`
        is for other readers.
        """
        leaks = escapes(region)
        if not leaks:
            return propose()
        problem = self.escaping(leaks[0], edit, region.nodes, concepts=concepts, region=region)
        outcome = propose() if self.search.differentiated else problem
        if isinstance(outcome, Candidate):
            return replace(outcome, alternatives=(problem,))
        return reason_to_tell(problem, outcome)

    def rejection(
        self,
        code: str,
        sentence: str,
        guilty: Sequence[Node] = (),
        progress: tuple[int, int] | None = None,
        edit: str | None = None,
        site: Sequence[Node] = (),
        concepts: Sequence[str] = (),
    ) -> Rejection:
        """A rejection here; the guilty nodes default to the anchor, the site to `nodes` or else to the anchor and the guilty nodes."""
        guilty = guilty or [self.anchor]
        where: Any = site or self.nodes or [self.anchor, *guilty]
        return reject(self.pass_.name, code, sentence, self.anchor, guilty, where, progress, edit, concepts)
