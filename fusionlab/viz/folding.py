"""Folding: from a program of thousands of nodes to a tree of groups of which a page is visible.

Module scopes, regions (scan, cond, ...) and sites become groups; runs of identical neighbours are shown once with their
count; what is still too long is cut into chunks. A scope that a program enters twice (forward, then backward) gives two
groups, because groups are runs in program order: so the folded graph stays as acyclic as the program.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from fusionlab.graph.ir import Block, Graph, Literal, Node, literal_text

from .sites import Site

# A picture beyond this many boxes is not readable; sites are opened up to here even above `max_nodes`.
SITES_LIMIT = 300
_FAN_OUT = 32
_WORTH = 4  # repeats of fewer nodes are quicker read than a frame with a count
BACKWARD = " (backward)"
# Nodes that move or convert data; they do not decide where a site stands.
LAYOUT_OPS = frozenset(
    {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "convert_element_type", "copy", "copy_p"}
    | {"iota", "slice", "rev", "stop_gradient", "name", "pvary", "reduce_precision"}
)


@dataclass(eq=False)
class Leaf:
    """One node, drawn as one box."""

    node: Node
    site: Site | None = None


@dataclass(eq=False)
class Group:
    """Things drawn as one box while closed, and as a frame around them while open.

    `kind`: "root", "scope", "function", "region", "branch", "site", "run" or "chunk". It stands for `count` copies;
    `hidden` holds the others, each a list of items of the same shape as `children`.
    """

    id: str
    kind: str
    label: str
    children: list[Item]
    node: Node | None = None
    site: Site | None = None
    count: int = 1
    hidden: list[list[Item]] = field(default_factory=list)
    open: bool = False


Item = Leaf | Group


def members(items: Iterable[Item]) -> Iterator[int]:
    """Node ids of everything in the items, hidden copies included, in a fixed order."""
    for item in items:
        if isinstance(item, Leaf):
            yield item.node.id
            continue
        if item.node is not None:
            yield item.node.id
        yield from members(item.children)
        for unit in item.hidden:
            yield from members(unit)


def leaves(items: Iterable[Item]) -> Iterator[Node]:
    """The nodes that are shown or folded away in the items, hidden copies left out."""
    for item in items:
        if isinstance(item, Leaf):
            yield item.node
        else:
            yield from leaves(item.children)


def is_backward(node: Node) -> bool:
    """True for what reverse-mode differentiation added: JAX wraps its scopes in `transpose(...)`."""
    return any("transpose(" in str(eqn.source_info.name_stack) for eqn in (*node.calls, node.eqn))


def fold(
    graph: Graph,
    sites: Collection[Site] = (),
    *,
    expanded: Collection[str] | str = (),
    collapsed: Collection[str] = (),
    reveal: Collection[int] = (),
    max_nodes: int = 60,
) -> Group:
    """The tree of a graph's groups with `open` decided: at most about `max_nodes` boxes, sites visible.

    Args:
      expanded: ids of groups to open whatever their size; "all" opens every one.
      collapsed: ids of groups to keep closed.
      reveal: ids of nodes whose groups are opened, even collapsed ones.
    """
    builder = _Builder(sites, max_nodes)
    root = Group("", "root", graph.name, builder.block(graph.top, ""), open=True)
    around = frozenset(_around(root, frozenset(reveal)))
    wanted = "all" if expanded == "all" else around.union(expanded)
    _open(root, wanted, frozenset(collapsed) - around, max_nodes)
    return root


class _Builder:
    """Builds the tree; holds what all levels share: sites by block, ids given out, structural signatures."""

    def __init__(self, sites: Collection[Site], max_nodes: int):
        self.max_nodes = max_nodes
        self.by_block: dict[str, list[Site]] = {}
        for site in sites:
            if site.drawn:
                self.by_block.setdefault(site.block, []).append(site)
        self.used: dict[str, int] = {}
        self.signatures: dict[object, int] = {}

    def fresh(self, wanted: str) -> str:
        """The wanted id, or wanted~2, wanted~3 ... when a scope is entered again."""
        n = self.used[wanted] = self.used.get(wanted, 0) + 1
        return wanted if n == 1 else f"{wanted}~{n}"

    def block(self, block: Block, outer_scope: str) -> list[Item]:
        entries = self.entries(block, outer_scope)
        # Without module scopes, the functions of the source tell the parts apart.
        if len(entries) > self.max_nodes and not any(path for path, _ in entries):
            entries = [((_function(item),), item) for _, item in entries]
            if len({path for path, _ in entries}) > 1:
                return self.nest(entries, 0, "", "function")
            entries = [((), item) for _, item in entries]
        return self.nest(entries, 0, outer_scope, "scope")

    def entries(self, block: Block, outer_scope: str) -> list[tuple[tuple[str, ...], Item]]:
        """The block's nodes in program order, each with its scope below the block's; a site stands where it ends."""
        sites = sorted(self.by_block.get(block.path, ()), key=lambda s: len(s.members))
        item_of: dict[int, tuple[tuple[str, ...], Item]] = {}
        order = {n.id: i for i, n in enumerate(block.nodes)}
        for node in block.nodes:
            item_of[node.id] = (_below(node.scope, outer_scope), self.item(node))
        for site in sites:  # small ones first: a larger one takes the finished group in
            last = max(site.members, key=order.__getitem__)
            inside = [nid for nid in sorted(site.members, key=order.__getitem__) if nid in item_of]
            if len(site.members) == 1 and isinstance(item_of[last][1], Leaf):
                item_of[last][1].site = site
                continue
            heavy = [n for n in inside if block.nodes[order[n]].primitive not in LAYOUT_OPS]
            path = _common([item_of[n][0] for n in heavy or inside])
            group = Group(self.fresh(site.id), "site", site.pass_name, [item_of.pop(n)[1] for n in inside], site=site)
            item_of[last] = (path, group)
        return [item_of[nid] for nid in sorted(item_of, key=order.__getitem__)]

    def item(self, node: Node) -> Item:
        if not node.blocks:
            return Leaf(node)
        gid = self.fresh(f"n{node.id}")
        children: list[Item]
        if len(node.blocks) == 1:
            children = self.block(node.blocks[0], node.scope)
        else:
            children = [
                Group(f"{gid}.{b.label}", "branch", b.label, self.block(b, node.scope), node=None)
                for b in node.blocks
                if b.nodes
            ]
        return Group(gid, "region", region_label(node), children, node=node)

    def nest(self, entries: list[tuple[tuple[str, ...], Item]], depth: int, prefix: str, kind: str) -> list[Item]:
        items: list[Item] = []
        i = 0
        while i < len(entries):
            path = entries[i][0]
            if len(path) <= depth:
                items.append(entries[i][1])
                i += 1
                continue
            j = i
            while j < len(entries) and entries[j][0][: depth + 1] == path[: depth + 1]:
                j += 1
            full = f"{prefix}/{path[depth]}" if prefix else path[depth]
            children = self.nest(entries[i:j], depth + 1, full, kind)
            items.append(self.scope_group(full, path[depth], children, kind, depth))
            i = j
        return self.chunk(self.repeats(items, prefix), prefix)

    def scope_group(self, full: str, label: str, children: list[Item], kind: str, depth: int) -> Item:
        only = children[0] if len(children) == 1 else None
        if isinstance(only, Leaf):  # a frame around one box says nothing
            return only
        if isinstance(only, Group) and only.kind in ("scope", "function") and only.count == 1:
            only.label = f"{label}/{only.label}"
            return only
        backward = depth == 0 and kind == "scope" and all(is_backward(n) for n in leaves(children))
        return Group(self.fresh(full), kind, label + BACKWARD if backward else label, children)

    # Repeats -------------------------------------------------------------------------------------------------------
    def signature(self, item: Item) -> int:
        if isinstance(item, Leaf):
            node = item.node
            ins = tuple((literal_text(a.val) if isinstance(a, Literal) else "", a.shape, a.dtype) for a in node.inputs)
            outs = tuple((v.shape, v.dtype) for v in node.outputs)
            key: object = (node.primitive, ins, outs, _state(item.site))
        else:
            region = item.node.primitive if item.node is not None else ""
            shown = item.label if item.kind in ("region", "branch") else ""
            inside = tuple(self.signature(c) for c in item.children)
            key = (item.kind, region, shown, item.count, _state(item.site), inside)
        return self.signatures.setdefault(key, len(self.signatures))

    def repeats(self, items: list[Item], prefix: str) -> list[Item]:
        """Identical neighbours (one item, or a sequence of items) once, with their count."""
        if len(items) < 2:
            return items
        sigs = [self.signature(i) for i in items]
        where: dict[int, list[int]] = {}
        for i, s in enumerate(sigs):
            where.setdefault(s, []).append(i)
        out: list[Item] = []
        i = 0
        while i < len(items):
            period, count = _best_repeat(sigs, i, where[sigs[i]], items)
            if count < 2:
                out.append(items[i])
                i += 1
                continue
            units = [items[i + k * period : i + (k + 1) * period] for k in range(count)]
            out.append(self.run(units, prefix))
            i += period * count
        return out

    def run(self, units: list[list[Item]], prefix: str) -> Group:
        first = units[0]
        if len(first) == 1 and isinstance(first[0], Group) and first[0].count == 1:
            group, last = first[0], units[-1][0]
            assert isinstance(last, Group)
            if last.label != group.label:
                group.label = f"{group.label.removesuffix(BACKWARD)} … {last.label}"
            # Copies hold what the group holds, so that members pair up: its own region node comes first.
            group.hidden = [[u] for u in (unit[0] for unit in units[1:])]
            group.count = len(units)
            return group
        gid = self.fresh(f"{prefix}/run" if prefix else "run")
        return Group(gid, "run", "block", list(first), count=len(units), hidden=units[1:])

    # Chunks --------------------------------------------------------------------------------------------------------
    def chunk(self, items: list[Item], prefix: str) -> list[Item]:
        """Cuts long stretches without sites into groups, so that a level never has more than a page of boxes."""
        if len(items) <= _FAN_OUT + 8:
            return items
        out: list[Item] = []
        stretch: list[Item] = []
        for item in [*items, None]:
            if item is not None and not has_site(item):
                stretch.append(item)
                continue
            out.extend(self.cut(stretch, prefix) if len(stretch) > 6 else stretch)
            stretch = []
            if item is not None:
                out.append(item)
        return out

    def cut(self, items: list[Item], prefix: str) -> list[Item]:
        levels = max(1, math.ceil(math.log(len(items)) / math.log(_FAN_OUT)))
        size = math.ceil(len(items) / math.ceil(len(items) ** (1 / levels))) if levels > 1 else len(items)
        pieces = [items[i : i + size] for i in range(0, len(items), size)]
        return [self.piece(p, prefix) for p in pieces]

    def piece(self, items: list[Item], prefix: str) -> Item:
        if len(items) == 1:
            return items[0]
        gid = self.fresh(f"{prefix}/part" if prefix else "part")
        label = f"{sum(1 for _ in members(items)):,} nodes"
        return Group(gid, "chunk", label, self.cut(items, gid) if len(items) > _FAN_OUT else items)


def region_label(node: Node) -> str:
    """A region by what it does: "scan, 12 steps", "cond", "relu (custom_jvp)"."""
    kind = {"custom_jvp_call": "custom_jvp", "custom_vjp_call": "custom_vjp", "checkpoint": "remat"}.get(
        node.primitive, node.primitive
    )
    if kind == "scan":
        return f"scan, {node.params.get('length')} steps"
    name = function_name(node.blocks[0]) if kind.startswith("custom_") else node.params.get("name")
    return f"{name} ({kind})" if isinstance(name, str) and name else kind


def function_name(block: Block) -> str:
    """The name of the function a block was traced from; "" when JAX kept none."""
    jaxpr = getattr(block.jaxpr, "jaxpr", block.jaxpr)
    info = str(getattr(getattr(jaxpr, "debug_info", None), "func_src_info", "") or "")
    return info.partition(" at ")[0].strip()


def has_site(item: Item) -> bool:
    """True around what has to stay visible: a candidate. What was declined shows while there is room."""
    if item.site is not None and item.site.state != "declined":
        return True
    return isinstance(item, Group) and any(has_site(c) for c in item.children)


def _state(site: Site | None) -> tuple[str, ...]:
    return () if site is None else (site.pass_name, site.state, getattr(site.record, "code", ""))


def _below(scope: str, outer: str) -> tuple[str, ...]:
    if outer and (scope == outer or scope.startswith(outer + "/")):
        scope = scope[len(outer) + 1 :]
    return tuple(scope.split("/")) if scope else ()


def _common(paths: list[tuple[str, ...]]) -> tuple[str, ...]:
    first = paths[0]
    for n in range(len(first), 0, -1):
        if all(p[:n] == first[:n] for p in paths):
            return first[:n]
    return ()


def _function(item: Item) -> str:
    while isinstance(item, Group):
        if item.node is not None:
            break
        item = item.children[-1]
    source = item.node.source if item.node is not None else None
    parts = [p for p in source.function.split(".") if not p.startswith("<")] if source else []
    return parts[-1] if parts else ""


def _best_repeat(sigs: list[int], start: int, positions: list[int], items: list[Item]) -> tuple[int, int]:
    """The (period, count) that covers most from `start`; (1, 1) when nothing worth folding repeats there."""
    best = (1, 1)
    n = len(sigs)
    tried = 0
    for p in positions:
        period = p - start
        if period <= 0:
            continue
        if 2 * period > n - start or tried >= 64:
            break
        tried += 1
        unit = sigs[start:p]
        count = 1
        while sigs[start + count * period : start + (count + 1) * period] == unit:
            count += 1
        size = sum(1 for _ in members(items[start:p]))
        worth = count > 1 and (size >= _WORTH or size * count >= 3 * _WORTH)
        if worth and period * count > best[0] * best[1]:
            best = (period, count)
    return best


# Opening ------------------------------------------------------------------------------------------------------------
def _open(root: Group, expanded: Collection[str] | str, collapsed: frozenset[str], max_nodes: int) -> None:
    everything = expanded == "all"
    forced = frozenset() if isinstance(expanded, str) else frozenset(expanded)
    visible = len(root.children)
    heap: list[tuple[tuple[int, int, int], Group]] = []
    order = 0

    def push(group: Group, depth: int) -> None:
        nonlocal order
        for child in group.children:
            if isinstance(child, Group) and child.id not in collapsed:
                order += 1
                wanted = everything or child.id in forced or _holds(child, forced)
                heapq.heappush(heap, ((0 if wanted else _rank(child), depth, order), child))

    push(root, 1)
    while heap:
        (rank, depth, _), group = heapq.heappop(heap)
        grown = visible + len(group.children) - 1
        limit = math.inf if rank == 0 else max(SITES_LIMIT, max_nodes) if rank == 1 else max_nodes
        if grown > limit or rank == _NEVER:
            continue
        group.open = True
        visible = grown
        push(group, depth + 1)


_NEVER = 5


def _rank(group: Group) -> int:
    """What is opened first: 0 asked for, 1 the way to a site, 2 regions and scopes, 3 sites, 4 chunks, 5 nothing more.

    A custom rule with a known name (relu, logsumexp) says more as one box than its inside does.
    """
    if group.kind == "site":
        return 3
    if has_site(group):
        return 1
    if group.node is not None and group.node.primitive.startswith("custom_"):
        return _NEVER if function_name(group.node.blocks[0]) else 4
    return 4 if group.kind == "chunk" else 2


def _around(group: Group, nodes: frozenset[int]) -> Iterator[str]:
    """Ids of the groups around the nodes, found through hidden copies too."""
    for child in group.children:
        if isinstance(child, Group) and not nodes.isdisjoint(members([child])):
            yield child.id
            shown = [child.node.id] if child.node and child.kind != "run" else []
            shown += members(child.children)
            twins = {n: t for unit in child.hidden for n, t in zip(members(unit), shown, strict=True)}
            yield from _around(child, nodes | {twins[n] for n in nodes if n in twins})


def _holds(group: Group, ids: frozenset[str]) -> bool:
    """A group asked for opens every group around it."""
    if not ids:
        return False
    return any(isinstance(c, Group) and (c.id in ids or _holds(c, ids)) for c in group.children)
