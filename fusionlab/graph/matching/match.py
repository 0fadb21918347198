"""Matching a pattern in a canonical view, with the nearest miss.

A match binds pattern nodes to target nodes, and axis letters to target axes. It says nothing about rounding or gradients:
a match is only a proposal until it is certified.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..canonical.axes import Axis, AxisPlace, axis_classes, axis_links, places, reshape_kind, reshape_parts
from ..canonical.fused_nodes import Labelled
from ..canonical.nodes import ONE, CNode, Coef, Operand
from ..canonical.view import CanonicalView, view_node_text
from .pattern import Example, Pattern

log = logging.getLogger("fusionlab.match")

_AC = frozenset("sum prod dot max min eq ne and or xor iadd imul".split())
_STEP_LIMIT = 6000  # backtracking steps per root; patterns have 5 to 20 nodes, so this is never met by a real one


@dataclass(frozen=True)
class Match:
    """The nodes and values bound by a successful match.

    Attributes:
      pattern: the pattern.
      nodes: pattern node id -> target node id.
      order: pattern node id -> for each pattern operand, the index of the target operand bound to it.
      scalars: scalar name -> value, still including the factors that leaves carry (`gauge`).
      letters: axis letter -> the target's axis classes, each with its size.
      axes: (pattern node id, target axis) -> class number.
    """

    pattern: Pattern = field(repr=False)
    nodes: Mapping[int, int]
    order: Mapping[int, tuple[int, ...]]
    scalars: Mapping[str, float]
    letters: Mapping[str, tuple[int, ...]]
    axes: Mapping[Axis, int]
    sizes: Mapping[int, int]

    @property
    def leaves(self) -> dict[str, int]:
        """Leaf name -> target node id."""
        return {name: self.nodes[nid] for nid, name in self.pattern.leaf_of.items() if nid in self.nodes}

    def leaf_id(self, name: str) -> int:
        """The pattern node id of a leaf."""
        return next(nid for nid, n in self.pattern.leaf_of.items() if n == name)


@dataclass(frozen=True)
class Miss:
    """The nearest miss: how far the match got and what stopped it.

    Attributes:
      pattern: the pattern.
      matched, total: the number of matched pattern nodes, of `total`.
      target: the canonical node that did not fit.
      reason: what stopped it, in the matcher's words: for the log.
      kind: "structure", "scalar" or "axes".
      bound: pattern node id -> target node id, of the nodes matched so far.
      wanted: the pattern node that `target` does not match; None if no single node is responsible.
      at: the edge of the pattern that led there, or whose factor differs: (pattern node, number of its operand).
      factor: for a factor that does not fit: the target's, its operand, and the pattern's.
      known: as `bound`, of the nodes matched with everything below them, including leaves.
      leaves: for the kind "axes", the leaves with the axis that does not fit, and its size.
    """

    pattern: Pattern = field(repr=False)
    matched: int
    total: int
    target: int
    reason: str
    kind: str
    bound: Mapping[int, int]
    wanted: int | None = None
    at: tuple[int, int] | None = None
    factor: tuple[Coef, int, str] | None = None
    leaves: tuple[tuple[str, ...], int] | None = None
    known: Mapping[int, int] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class _State:
    nodes: dict[int, int]
    order: dict[int, tuple[int, ...]]
    scalars: dict[str, float]
    entered: dict[int, int]  # nodes whose op fitted, before their operands were looked at: the measure of progress


class _Matcher:
    def __init__(self, pattern: Pattern, view: CanonicalView) -> None:
        self.pattern, self.view = pattern, view
        self.steps = 0
        self.best: Miss | None = None

    def miss(self, state: _State, target: int, reason: str, kind: str, **more: Any) -> None:
        matched = len(state.entered)
        if self.best is None or matched > self.best.matched:
            size, bound = self.pattern.size, dict(state.entered)
            self.best = Miss(self.pattern, matched, size, target, reason, kind, bound, known=state.nodes, **more)

    def node(self, pid: int, tid: int, state: _State, at: tuple[int, int] | None = None) -> Iterator[_State]:
        self.steps += 1
        if self.steps > _STEP_LIMIT:
            return
        bound = state.nodes.get(pid)
        if bound is not None:
            if bound == tid:
                yield state
            else:
                self.miss(state, tid, "two uses of one value read different values", "structure", wanted=pid, at=at)
            return
        if pid in self.pattern.leaf_of:
            if tid != ONE:
                yield _State({**state.nodes, pid: tid}, state.order, state.scalars, state.entered)
            return
        want, have = self.pattern.nodes[pid], self.view.nodes[tid]
        if want.op != have.op:
            self.miss(state, tid, f"{have.op} where the pattern has {want.op}", "structure", wanted=pid, at=at)
            return
        if pid == ONE:
            yield _State({**state.nodes, pid: tid}, state.order, state.scalars, state.entered)
            return
        if not _params_fit(want, have, self.pattern.example):
            self.miss(state, tid, f"{have.op} of {len(have.operands)} operands does not fit", "structure", wanted=pid)
            return
        state = _State(state.nodes, state.order, state.scalars, {**state.entered, pid: tid})
        orders = list(self._orders(want, have))
        if not orders:
            self.miss(state, tid, f"{have.op} of other powers than the pattern's", "structure", wanted=pid)
        for order in orders:
            yield from self.operands(pid, tid, order, 0, state)

    def _orders(self, want: CNode, have: CNode) -> Iterator[tuple[int, ...]]:
        n = len(want.operands)
        if isinstance(want.params, Labelled):
            yield tuple(have.params.slots.index(slot) for slot in want.params.slots)
            return
        if want.op not in _AC:
            yield tuple(range(n))
            return
        for order in itertools.permutations(range(n)):
            if want.op != "prod" or all(want.params[i] == have.params[j] for i, j in enumerate(order)):
                yield order

    def operands(self, pid: int, tid: int, order: tuple[int, ...], i: int, state: _State) -> Iterator[_State]:
        want, have = self.pattern.nodes[pid], self.view.nodes[tid]
        if i == len(order):
            yield _State({**state.nodes, pid: tid}, {**state.order, pid: order}, state.scalars, state.entered)
            return
        po, to = want.operands[i], have.operands[order[i]]
        for after in self.node(po.nid, to.nid, state, (pid, i)):
            scalars = self.coefficient(pid, i, to, tid, after)
            if scalars is not None:
                yield from self.operands(
                    pid, tid, order, i + 1, _State(after.nodes, after.order, scalars, after.entered)
                )

    def coefficient(self, pid: int, i: int, have: Operand, tid: int, state: _State) -> dict[str, float] | None:
        """The captured scalars with this edge's, or None when its coefficient does not fit."""
        coef = have.coef
        operand = self.pattern.nodes[pid].operands[i]
        edge = self.pattern.edges.get((pid, i))
        if edge is not None:
            try:
                value = float((coef / edge.const) ** (1 / edge.power))
            except (ZeroDivisionError, TypeError, OverflowError):
                return self._coef_miss(state, tid, (pid, i), have, edge.scalar)
            known = state.scalars.get(edge.scalar)
            if known is not None and not close(known, value):
                return self._coef_miss(state, tid, (pid, i), have, f"{edge.scalar} = {known:g}")
            return {**state.scalars, edge.scalar: value} if known is None else state.scalars
        if operand.nid in self.pattern.gauged or close(operand.coef, coef):
            return state.scalars
        return self._coef_miss(state, tid, (pid, i), have, f"{operand.coef:g}")

    def _coef_miss(self, state: _State, tid: int, at: tuple[int, int], have: Operand, wanted: str) -> None:
        reason = f"a factor {have.coef:g} where the pattern has {wanted}"
        self.miss(state, tid, reason, "scalar", at=at, factor=(have.coef, have.nid, wanted))

    def axes(self, state: _State) -> Match | Miss:
        """The axis check: every target axis must play a letter's part in every matched node."""
        classes = axis_classes(self._links(state))
        sizes = self._sizes(state, classes)
        if _meets_itself(classes):
            return self._other_axes(state, "two axes of one value are one axis in it")
        members = places(classes, {pid: self.view.nodes[state.nodes[pid]] for pid in state.order})
        letters: dict[str, list[int]] = {letter: [] for letter in self.pattern.letters}
        for c, pids in members.items():
            fits = self._letters_of(frozenset(pids))
            if len(fits) != 1:
                return self._no_part(state, pids, sizes[c])
            letters[fits[0]].append(c)
        fixed = {x: tuple(cs) for x, cs in letters.items()}
        if not self._parts_fit(state, classes, fixed):
            return self._other_axes(state, "axes are split or merged in another order than the pattern's")
        return Match(self.pattern, state.nodes, state.order, state.scalars, fixed, classes, sizes)

    def _links(self, state: _State) -> list[Any]:
        """The equal axes of matched nodes, named as in the pattern."""
        links = []
        for pid, order in state.order.items():
            have = self.view.nodes[state.nodes[pid]]
            keys: list[Any] = [None] * len(have.operands)
            for i, j in enumerate(order):
                keys[j] = self.pattern.nodes[pid].operands[i].nid
            links += axis_links(have, pid, keys)
        return links

    def _sizes(self, state: _State, classes: Mapping[Axis, int]) -> dict[int, int]:
        """Class of axes -> their size."""
        own = (((pid, axis), c) for (pid, axis), c in classes.items() if isinstance(axis, int))
        return {c: self.view.nodes[state.nodes[pid]].shape[axis] for (pid, axis), c in own}

    def _letters_of(self, pids: frozenset[AxisPlace]) -> list[str]:
        """The letters that best match axes in these places."""
        played = {x: len(full - pids) for x, full in self.pattern.letters.items() if self._plays(x, full, pids)}
        return [x for x, missing in played.items() if missing == min(played.values())]

    def _no_part(self, state: _State, pids: Iterable[AxisPlace], size: int) -> Miss:
        """The miss for an axis in these places that matches no letter, or several."""
        names = sorted(self.pattern.leaf_of[p] for p in pids if p in self.pattern.leaf_of)
        owner = " and ".join(names) or "no operand"
        reason = f"an axis of size {size} that {owner} has plays no part in the pattern"
        return self._other_axes(state, reason, (tuple(names), size))

    def _other_axes(self, state: _State, reason: str, leaves: tuple[tuple[str, ...], int] | None = None) -> Miss:
        """The miss for a match whose nodes all fit but whose axes do not."""
        root, size = state.nodes[self.pattern.root], self.pattern.size
        self.miss(state, root, reason, "axes", leaves=leaves)
        return Miss(self.pattern, size, size, root, reason, "axes", state.nodes, leaves=leaves, known=state.nodes)

    def _parts_fit(self, state: _State, classes: Mapping[Axis, int], letters: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether reshapes merge and split the axes in the pattern's order."""
        for pid in state.order:
            if self.pattern.nodes[pid].op == "reshape":
                source = self.pattern.nodes[pid].operands[0].nid
                for part, axis in reshape_parts(self.view.nodes[state.nodes[pid]], pid, source):
                    if part not in self.pattern.parts or classes[axis] not in letters[self.pattern.parts[part]]:
                        return False
        return True

    def _plays(self, letter: str, full: frozenset[AxisPlace], pids: frozenset[AxisPlace]) -> bool:
        may_lack = self.pattern.may_lack.get(letter, frozenset())
        return full - may_lack <= pids <= full


def match(pattern: Pattern, view: CanonicalView, root: int, given: Mapping[str, int] | None = None) -> Match | Miss:
    """Matches `pattern` with its root at canonical node `root`; `given` binds leaves (by name) to canonical nodes beforehand."""
    bound = {pid: given[name] for pid, name in pattern.leaf_of.items() if name in given} if given else {}
    matcher = _Matcher(pattern, view)
    axis_miss: Miss | None = None
    for state in matcher.node(pattern.root, root, _State(bound, {}, {}, {})):
        result = matcher.axes(state)
        if isinstance(result, Match):
            return result
        axis_miss = axis_miss or result
    miss = axis_miss or matcher.best
    if miss is None:
        miss = Miss(pattern, 0, pattern.size, root, "nothing fits", "structure", {})
    if log.isEnabledFor(logging.DEBUG):
        log.debug(
        "%s at %s: %d of %d, %s; bound %s",
        pattern.example.name, view_node_text(view, root), miss.matched, miss.total, miss.reason, sorted(miss.bound.values()),
    )  # fmt: skip
    return miss


def close(a: Coef, b: Coef, ulps: int = 2) -> bool:
    """Equal within `ulps` units of float32: literals reach us rounded to their dtype, and folded in different orders."""
    if a == b:
        return True
    if isinstance(a, bool) or isinstance(b, bool):
        return False
    return abs(a - b) <= ulps * 2**-23 * max(abs(a), abs(b))


def _meets_itself(classes: Mapping[Axis, int]) -> bool:
    """Whether two axes of one node are one: x + x.T."""
    seen: set[tuple[Any, int]] = set()
    for (key, axis), c in classes.items():
        if isinstance(axis, int):
            if (key, c) in seen:
                return True
            seen.add((key, c))
    return False


def _params_fit(want: CNode, have: CNode, example: Example) -> bool:
    """Whether two nodes of one op have compatible parameters. Axis names, labels and powers are compared elsewhere."""
    if isinstance(want.params, Labelled) and isinstance(have.params, Labelled):
        traits = dict(have.params.traits)
        same = all(traits.get(k) in example.any_of.get((k, v), (v,)) for k, v in want.params.traits)
        slots = set(want.params.slots), set(have.params.slots)
        return same and (slots[0] <= slots[1] if example.loose else slots[0] == slots[1])
    if len(want.operands) != len(have.operands):
        return False
    if want.op == "reshape":
        return reshape_kind(want) == reshape_kind(have)
    return want.op in ("dot", "prod") or want.params == have.params
