"""`Graph`: a whole traced program. Its parts are in `ir.py`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...showing import Shown, Table, table_of
from .ir import Block, Node
from .text import graph_text


@dataclass(frozen=True, eq=False)
class Graph(Shown):
    """A traced program.

    Attributes:
      name: the function's name.
      top: the outermost block; its inputs are the flattened arguments.
      in_tree, out_tree: pytree structure of `(args, kwargs)` without the static ones, and of the result.
      in_names: a readable name for each top input ("x", "params['w']").
      jax_version: the version of JAX that traced it.
      in_shardings: for each top input the sharding of the argument with which it was traced, None without a mesh; () if not
        given.
      numbered: the same program at concrete sizes if its own sizes are symbolic (a `symbolic.Numbered`); otherwise None.
    """

    name: str
    top: Block
    in_tree: Any
    out_tree: Any
    in_names: tuple[str, ...]
    jax_version: str
    in_shardings: tuple[Any, ...] = dataclasses.field(default=(), repr=False)
    numbered: Any = dataclasses.field(default=None, repr=False)

    def blocks(self) -> Iterator[Block]:
        """All blocks, outermost first, depth first in program order."""
        stack = [self.top]
        while stack:
            block = stack.pop()
            yield block
            stack.extend(b for n in reversed(block.nodes) for b in reversed(n.blocks))

    def nodes(self) -> Iterator[Node]:
        """All nodes of all blocks."""
        for block in self.blocks():
            yield from block.nodes

    @functools.cached_property
    def node_by_id(self) -> dict[int, Node]:
        """Node id -> node, of all blocks."""
        return {n.id: n for n in self.nodes()}

    @functools.cached_property
    def block_of(self) -> dict[int, Block]:
        """Node id -> the block that contains it."""
        return {n.id: b for b in self.blocks() for n in b.nodes}

    @functools.cached_property
    def node_count(self) -> int:
        """The number of nodes in all blocks; `len(graph)` too."""
        return sum(len(b.nodes) for b in self.blocks())

    def __len__(self) -> int:
        return self.node_count

    def __repr__(self) -> str:
        return f"Graph({self.name!r}, {self.node_count} nodes)"

    def __str__(self) -> str:
        return graph_text(self)

    def _table(self) -> Table:
        return table_of(self.nodes())
