"""Which instruction of a compiled module computes what a buffer holds.

A buffer has the name of the instruction that defined it, which often only makes room: a fill with zeros that a loop then writes row by
row, a copy, an element of a loop's tuple. `Contents.written` follows the value to the instruction that computes it, through copies,
tuples, loops, calls, updates in place and the roots of fusions.
"""

from __future__ import annotations

from collections.abc import Callable

from .hlo_text import Instruction, Module

_SAME = frozenset({"bitcast", "copy", "copy-start", "copy-done", "opt-barrier", "optimization-barrier", "reshape"})
# These too, where they are none of the program's own operations but XLA's.
_SAME_IF_XLAS = frozenset({"convert", "transpose", "dynamic-slice", "slice"})
_CALLS = frozenset({"fusion", "call", "async-start"})
_FILLS = frozenset({"broadcast", "constant", "iota"})
_MOST_STEPS = 64  # a value goes through fewer loops, calls and copies than that


class Contents:
    """Where the values of a module come from; `is_programs`: whether an operation is the program's own, and not added by XLA."""

    def __init__(self, module: Module, is_programs: Callable[[Instruction], bool] = lambda i: bool(i.op_name)) -> None:
        self.module, self.is_programs = module, is_programs
        self.root, self.users, self.caller, self.body_of = {}, {}, {}, {}
        for name, body in module.computations.items():
            for root in [i for i in body if i.root] or body[-1:]:
                self.root[name] = root
            self.body_of |= {i.name: name for i in body}
            for instruction in body:
                for operand in instruction.operands:
                    self.users.setdefault(operand, []).append(instruction)
                for called in (c for names in instruction.called.values() for c in names):
                    self.caller[called] = instruction

    def written(self, name: str, index: tuple[int, ...] = ()) -> Instruction | None:
        """The instruction that computes a value, or an element of its tuple; None if there is no such instruction."""
        here = self.module.instructions.get(name)
        fill: Instruction | None = None
        seen: dict[tuple[str, tuple[int, ...]], Instruction] = {}
        while here is not None and len(seen) < _MOST_STEPS:
            if (here.name, index) in seen:  # a loop that hands it on unchanged
                return fill or here
            seen[here.name, index] = here
            step = self._step(here, index)
            if step is None and here.opcode in _FILLS:  # of the copies of a fill, each may be written by another loop
                fill = here
                step = next((filled for i in seen.values() if (filled := self._filled(i)) is not None), None)
            if step is None:
                break
            here, index = step
        return here

    def _step(self, here: Instruction, index: tuple[int, ...]) -> tuple[Instruction, tuple[int, ...]] | None:
        """The next instruction on the way to the one that computes the value; None at that one."""
        if here.opcode in _SAME or (here.opcode in _SAME_IF_XLAS and not self.is_programs(here)):
            return self._operand(here, 0, index)
        if here.opcode == "get-tuple-element":
            return self._operand(here, 0, (here.index, *index))
        if here.opcode == "tuple" and index:
            return self._operand(here, index[0], index[1:])
        if here.opcode == "dynamic-update-slice":
            return self._operand(here, 1, ())
        if here.opcode in _CALLS:
            return self._root(here, ("calls", "to_apply", "called_computations"), index)
        if here.opcode == "while":
            return self._root(here, ("body",), index)
        if here.opcode == "parameter":
            return self._argument(here, index)
        return None

    def _operand(
        self, here: Instruction, number: int, index: tuple[int, ...]
    ) -> tuple[Instruction, tuple[int, ...]] | None:
        known = self.module.instructions
        found = known.get(here.operands[number]) if number < len(here.operands) else None
        return None if found is None else (found, index)

    def _root(
        self, here: Instruction, attributes: tuple[str, ...], index: tuple[int, ...]
    ) -> tuple[Instruction, tuple[int, ...]] | None:
        called = [c for a in attributes for c in here.called.get(a, ()) if c in self.root]
        return (self.root[called[0]], index) if called else None

    def _argument(self, here: Instruction, index: tuple[int, ...]) -> tuple[Instruction, tuple[int, ...]] | None:
        """What a computation is called with: of a loop, what its last turn left, or its first value where no turn changes that."""
        caller = self.caller.get(self.body_of[here.name])
        if caller is None or not here.operands or not here.operands[0].isdigit():
            return None
        if caller.opcode in _CALLS:
            return self._operand(caller, int(here.operands[0]), index)
        if caller.opcode != "while" or not index:
            return None
        root = self._root(caller, ("body",), index)
        left = self._operand(root[0], index[0], index[1:]) if root is not None and root[0].opcode == "tuple" else None
        kept = left is None or (left[0].opcode == "get-tuple-element" and (left[0].index, *left[1]) == index)
        return self._operand(caller, 0, index) if kept else left

    def _filled(self, here: Instruction) -> tuple[Instruction, tuple[int, ...]] | None:
        """The loop that writes over a fill or a copy of one, which is an element of its tuple."""
        outermost = here
        while (caller := self.caller.get(self.body_of[outermost.name])) is not None and caller.opcode in _CALLS:
            outermost = caller  # a fill in a fusion of its own
        for user in self.users.get(outermost.name, ()):
            loops = [u for u in self.users.get(user.name, ()) if u.opcode == "while"] if user.opcode == "tuple" else []
            if loops:
                return loops[0], (user.operands.index(outermost.name),)
        return None
