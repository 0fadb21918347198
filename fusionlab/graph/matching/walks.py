"""Walks through the raw nodes of a block: up from values to their makers, and down to their readers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from ..canonical.view import CanonicalView
from ..program.ir import Block, Node, Value, values_in
from .region import CASTS, VIEWS


def upstream(
    block: Block, atoms: Iterable[Any], above: Callable[[Node], Iterable[Any]]
) -> Iterator[tuple[Value, Node]]:
    """The values among some operands that the block computes, each once, with their nodes; then those among the operands that `above`
    returns for each such node, called after the node was yielded. The nearest come first.
    """
    queue, seen = deque(atoms), set[int]()
    while queue:
        value = queue.popleft()
        node = maker_of(block, value)
        if node is not None and value.id not in seen:
            seen.add(value.id)
            yield value, node
            queue += above(node)


def downstream(block: Block, values: Iterable[Value], passes: Callable[[Node], bool]) -> Iterator[Node]:
    """The nodes that read some values, each once, and the readers of their results as long as the node is one that it `passes`."""
    stack, seen = [*values], set[int]()
    while stack:
        for user in block.users.get(stack.pop().id, ()):
            if user.id not in seen:
                seen.add(user.id)
                yield user
                stack += user.outputs if passes(user) else ()


def maker_of(block: Block, atom: Any) -> Node | None:
    """The node of a block that computes an operand; None for a number and for an input of the block."""
    return block.producer.get(atom.id) if isinstance(atom, Value) else None


def source_of(block: Block, atom: Any, through: Collection[str]) -> Any:
    """The value under the nodes of some primitives; the operand itself if none of those computes it."""
    while (node := maker_of(block, atom)) is not None and node.primitive in through:
        atom = node.inputs[0]
    return atom


def makers_of(view: CanonicalView, value: Value) -> list[Node]:
    """The nodes of the block that compute a number, or a constant array."""
    found, stack = dict[int, Node](), [value]
    while stack:
        maker = view.block.producer.get(stack.pop().id)
        if maker is not None and maker.id not in found:
            found[maker.id] = maker
            stack += values_in(maker.inputs)
    return list(found.values())


def given(block: Block, atom: Any) -> bool:
    """Whether an operand is, through views and casts, an input or captured array of the block, as a parameter such as a bias is."""
    source = source_of(block, atom, VIEWS | CASTS)
    return isinstance(source, Value) and source.id not in block.producer
