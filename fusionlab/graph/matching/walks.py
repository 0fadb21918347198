"""Ways through the raw nodes of a block: up from values to what makes them, and down to what reads them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from ..program.ir import Block, Node, Value
from .region import CASTS, VIEWS


def upstream(
    block: Block, atoms: Iterable[Any], above: Callable[[Node], Iterable[Any]]
) -> Iterator[tuple[Value, Node]]:
    """The values among some operands that the block makes, each once, with the nodes that make them; then those among what `above` gives of
    each such node, which is asked after the node was given. The nearest come first.
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
    """The nodes that read some values, each once, and those that read what they make as long as they are of those that it `passes`."""
    stack, seen = [*values], set[int]()
    while stack:
        for user in block.users.get(stack.pop().id, ()):
            if user.id not in seen:
                seen.add(user.id)
                yield user
                stack += user.outputs if passes(user) else ()


def maker_of(block: Block, atom: Any) -> Node | None:
    """The node of a block that makes an operand; None for a number and for what the block is given."""
    return block.producer.get(atom.id) if isinstance(atom, Value) else None


def source_of(block: Block, atom: Any, through: Collection[str]) -> Any:
    """What an operand is made of under the nodes of some primitives; itself where none of those makes it."""
    while (node := maker_of(block, atom)) is not None and node.primitive in through:
        atom = node.inputs[0]
    return atom


def given(block: Block, atom: Any) -> bool:
    """Whether an operand is an input or captured array of the block, through views and casts: a parameter, as a bias is."""
    source = source_of(block, atom, VIEWS | CASTS)
    return isinstance(source, Value) and source.id not in block.producer
