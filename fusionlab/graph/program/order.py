"""The order in which a rewritten block's nodes are written.

It is program order, except that operands must come first: those of a site of several results, if one of these is read early,
and those of a backward pass, before its first gradient. Nodes with effects keep their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Protocol

from ...errors import RewriteError
from .ir import Block, Node, Value, values_in


class Joint(Protocol):
    """A site: one call takes `leaves` and returns `roots`; the nodes `gone` are not written again."""

    @property
    def gone(self) -> Sequence[Node]: ...
    @property
    def leaves(self) -> Sequence[Value]: ...
    @property
    def roots(self) -> Sequence[Value]: ...


class BackwardReader(Protocol):
    """A backward pass: `read()` are the values that it reads when its first gradient is computed."""

    def read(self) -> Sequence[Value]: ...


# Node id -> the (numbered) backward passes that run before it.
Waiting = Mapping[int, Iterable[tuple[int, BackwardReader]]]


class PairsWaitError(RewriteError):
    """Pairs that each read values computed from the other's gradients. `number` is that of one of them."""

    def __init__(self, number: int) -> None:
        super().__init__("backward passes to be replaced depend on each other")
        self.number = number


class SitesWaitError(RewriteError):
    """Sites that each read values computed from the other's results. `numbers` are those of the sites with several results."""

    def __init__(self, numbers: Iterable[int]) -> None:
        super().__init__("sites to be replaced depend on each other's results")
        self.numbers = tuple(dict.fromkeys(numbers))


def last_of(block: Block, roots: Iterable[Value]) -> Node:
    """The node of the last of a site's results: all operands of the site come before it."""
    return max((block.producer[v.id] for v in roots), key=lambda n: block.position[n.id])


def in_order(block: Block, waiting: Waiting, sites: Sequence[Joint] = ()) -> list[Node]:
    """The block's nodes in an order in which every value is computed before it is read.

    Args:
      block: the block to rewrite.
      waiting: the operands of backward passes are computed before the nodes at which these wait.
      sites: each is called at its `last_of` node, after its operands. The positions of the nodes it replaces are meaningless.

    Raises:
      PairsWaitError: pairs depend on each other.
      SitesWaitError: a site of several results depends on one of them through other sites or pairs.
    """
    if not waiting and not any(map(_is_joint, sites)):
        return list(block.nodes)
    before = _Before(block, waiting, sites)
    done: set[int] = set()
    under_way: set[int] = set()
    order: list[Node] = []
    for last in block.nodes:
        stack = [last]
        while stack:
            node = stack[-1]
            if node.id in done:
                stack.pop()
                continue
            makers = [m for m in before(node) if m.id not in done]
            if not makers:
                done.add(stack.pop().id)
                order.append(node)
                continue
            if node.id in under_way:
                raise before.error(stack, under_way - done)
            under_way.add(node.id)
            stack += makers
    return order


def _is_joint(site: Joint) -> bool:
    """Whether a site has several results: only then may one of them be read before the site is called."""
    return len(site.roots) > 1


class _Before:
    """The nodes that must be written before a node."""

    def __init__(self, block: Block, waiting: Waiting, sites: Sequence[Joint]) -> None:
        self.block, self.waiting = block, waiting
        self.site_at = {last_of(block, s.roots).id: (i, s) for i, s in enumerate(sites)}
        joint = [s for s in sites if _is_joint(s)]
        self.maker = {v.id: last_of(block, s.roots) for s in joint for v in s.roots}
        self.gone = {n.id for s in joint for n in s.gone}

    def __call__(self, node: Node) -> list[Node]:
        read = [] if node.id in self.gone else values_in(node.inputs)
        if node.id in self.site_at:
            read += self.site_at[node.id][1].leaves
        read += [v for _, part in self.waiting.get(node.id, ()) for v in part.read()]
        makers = (self.maker.get(v.id) or self.block.producer.get(v.id) for v in read)
        effect = self.block.effect_before.get(node.id)
        return [m for m in (*makers, effect) if m is not None]

    def error(self, stack: Sequence[Node], under_way: Set[int]) -> RewriteError:
        """The error for the node on top of a stack, which depends on itself through nodes under way (ids)."""
        path = list(itertools.dropwhile(lambda n: n.id != stack[-1].id, (n for n in stack if n.id in under_way)))
        at = [self.site_at[n.id] for n in path if n.id in self.site_at]
        joint = [i for i, s in at if _is_joint(s)]
        pairs = (number for n in path for number, _ in self.waiting.get(n.id, ()))
        return SitesWaitError(joint) if joint else PairsWaitError(next(pairs))


def waits_for_itself(block: Block, leaves: Iterable[Value], roots: Sequence[Value]) -> str | None:
    """Why a single call cannot take `leaves` and return `roots`: a leaf is computed from a root, or after side effects that depend on one.
    None if it can.
    """
    makers = (block.producer[v.id].id for v in roots if v.id in block.producer)
    root_ids = {v.id for v in roots}
    first = min((block.position[i] for i in makers), default=len(block.nodes))
    for effects in (False, True):
        for leaf in leaves:
            value = _met(block, leaf, root_ids, first, effects)
            if value is not None:
                after = "computed after side effects that depend on it" if effects else "computed from it"
                return f"{value!r} is a result of the site, and {leaf!r}, which the site reads, is {after}"
    return None


def _met(block: Block, leaf: Value, targets: Set[int], first: int, effects: bool) -> Value | None:
    """The first value of `targets` (ids) on the way back from a leaf to its inputs, up to position `first`.
    With `effects`, the order of side effects is followed as well.
    """
    stack, seen, passed = [leaf], {leaf.id}, set[int]()
    while stack:
        value = stack.pop()
        maker = block.producer.get(value.id)
        if maker is None or block.position[maker.id] < first:
            continue
        if value.id in targets:
            return value
        read = values_in(maker.inputs)
        if effects:
            read += _read_by_effects(block, maker, first, passed)
        fresh = [v for v in read if v.id not in seen]
        seen.update(v.id for v in fresh)
        stack += fresh
    return None


def _read_by_effects(block: Block, node: Node, first: int, passed: set[int]) -> list[Value]:
    """The operands of the nodes after position `first` whose side effects precede a node's. Nodes in `passed` (ids) are skipped."""
    read: list[Value] = []
    last = block.effect_before.get(node.id)
    while last is not None and block.position[last.id] > first and last.id not in passed:
        passed.add(last.id)
        read += values_in(last.inputs)
        last = block.effect_before.get(last.id)
    return read
