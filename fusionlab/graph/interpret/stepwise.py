"""Runs a program piece by piece in float64, and pulls cotangents back through it the same way.

Between pieces a value stays on the device where there is room for it, and else is moved to the host; it is freed after its last use.
Backwards, each piece is computed once more from what it read. Pieces that are the same program are compiled once: their lowered text
decides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from .pieces import Literal, Loop, Piece, Program
from .widen import PLAIN, Interpreter, Val, is_inexact, plain

Told = Callable[[], Any]  # called before each piece; what it raises ends the run
Room = Callable[[int], bool]  # whether so many bytes more may stay on the device between pieces


@dataclass(frozen=True, eq=False)
class Tape:
    """What the way back needs: by item what it read, and by index of a loop what each of its steps was handed on."""

    program: Program
    read: list[list[Val]]
    carried: dict[int, list[list[Val]]]


@dataclass(eq=False)
class Stepwise:
    """Runs programs in pieces.

    Attributes:
      interpreter: what an equation means in float64.
      told: is called before each piece.
      room: decides which values stay on the device between pieces; none do unless given.
      compiles: whether pieces are compiled; else the interpreter runs each equation by itself.
    """

    interpreter: Interpreter
    told: Told = lambda: None
    room: Room = lambda size: False
    compiles: bool = True
    _compiled: dict[Any, Any] = field(default_factory=dict, repr=False)
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)
    _pool: ThreadPoolExecutor | None = field(default=None, repr=False)

    def forward(
        self, program: Program, args: Sequence[Val], taped: bool = False, outputs: bool = True
    ) -> tuple[list[Val], Tape]:
        """The outputs of a program, and what `pull` needs.

        Args:
          taped: whether `pull` follows; else the tape is empty, and values are freed as they are done with.
          outputs: whether they are wanted; else pieces that only make outputs are not run, and none are returned.
        """
        values: dict[int, Val] = dict(zip(program.inputs, args, strict=True))
        for number, const, aval in program.constants:
            values[number] = self.interpreter.constant(const, aval)
        tape = Tape(program, [], {})
        for i, item in enumerate(program.items):
            read = [self._value(values, n) for n in item.reads]
            if taped:
                tape.read.append(read)
            if isinstance(item, Piece):
                if not outputs and not program.read_later(i):
                    continue
                outs = self._run(item, read)
            elif self.interpreter.is_draw(item.eqn, read):  # whole, in its own dtype: in steps it would be another draw
                outs = self._call((id(item),), lambda vals, eqn=item.eqn: self._equation(eqn, vals), read)
            else:
                outs, carried = self._loop(item, read)
                if taped:
                    tape.carried[i] = carried
            values.update(zip(item.gives, outs, strict=True))
            for n in program.done_with(i):
                del values[n]
        return [self._value(values, n) for n in program.outputs] if outputs else [], tape

    def compile_ahead(self, run: Callable[[Any], Any], threads: int, types: Any) -> None:
        """Compiles side by side what `run`, which calls `forward` and `pull`, will need for arrays of these types.

        Nothing is computed: the values that `run` sees have types alone.
        """
        try:
            with ThreadPoolExecutor(threads) as self._pool:
                jax.eval_shape(run, types)
        finally:
            self._pool = None

    def pull(self, tape: Tape, cotangents: Sequence[Any], active: Sequence[bool]) -> list[Any]:
        """The cotangents of the inputs that are `active`, None of the others and where nothing depends on one.

        Args:
          cotangents: of the outputs, float64; None for one that has none.
        """
        program = tape.program
        depends = _dependent(program, active)
        sums: dict[int, Any] = {}
        for n, ct in zip(program.outputs, cotangents, strict=True):
            _add(sums, n, ct, depends)
        for i in reversed(range(len(program.items))):
            item, read = program.items[i], tape.read[i]
            cts = [sums.pop(n, None) for n in item.gives]
            wanted = [
                n in depends and v.kind == PLAIN and is_inexact(v.high.dtype)
                for n, v in zip(item.reads, read, strict=True)
            ]
            if not any(wanted) or all(ct is None for ct in cts):
                continue
            if isinstance(item, Piece):
                back = self._pull_piece(item, read, cts, wanted)
            else:
                back = self._pull_loop(item, read, tape.carried[i], cts, wanted)
            for n, ct in zip(item.reads, back, strict=True):
                _add(sums, n, ct, depends)
        return [sums.get(n) if a else None for n, a in zip(program.inputs, active, strict=True)]

    def _value(self, values: dict[int, Val], n: int | Literal) -> Val:
        return self.interpreter.literal(n.value) if isinstance(n, Literal) else values[n]

    # Pieces.

    def _evaluated(self, piece: Piece, read: Sequence[Val]) -> list[Val]:
        values = dict(zip(piece.reads, read, strict=True))
        for step in piece.steps:
            outs = self._equation(step.eqn, [self._value(values, n) for n in step.reads])
            values.update(zip(step.gives, outs, strict=True))
        return [values[n] for n in piece.gives]

    def _equation(self, eqn: Any, vals: list[Val]) -> list[Val]:
        with eqn.ctx.manager:
            return self.interpreter.equation(eqn, vals)

    def _run(self, piece: Piece, read: list[Val]) -> list[Val]:
        return self._call((id(piece),), lambda vals: self._evaluated(piece, vals), read)

    def _pull_piece(self, piece: Piece, read: list[Val], cts: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
        live = [i for i, ct in enumerate(cts) if ct is not None]

        def back(vals: list[Val], cts: list[Any]) -> list[Any]:
            def forward(floats: list[Any]) -> list[Any]:
                rest = iter(floats)
                full = [plain(next(rest)) if w else v for v, w in zip(vals, wanted, strict=True)]
                outs = self._evaluated(piece, full)
                return [outs[i].wide for i in live]

            return jax.vjp(forward, [v.high for v, w in zip(vals, wanted, strict=True) if w])[1](cts)[0]

        of = (id(piece), tuple(live), tuple(wanted))
        grads = iter(self._call(of, back, read, [cts[i] for i in live]))
        return [next(grads) if w else None for w in wanted]

    def _call(self, of: tuple[Any, ...], fn: Callable[..., Any], *args: Any) -> Any:
        """What `fn` computes; `of` identifies it among all that this object runs."""
        if not self.compiles:
            self.told()
            return jax.tree.map(self._settled, fn(*args))
        program = self._program(of, fn, args)
        if self._pool is not None:
            return jax.tree.map(_unknown, program)
        self.told()
        return jax.tree.map(self._settled, program(*args))

    def _program(self, of: tuple[Any, ...], fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """`fn` compiled; while programs are compiled ahead, the types of its results."""
        leaves, tree = jax.tree.flatten(args)
        known = of, tree, tuple((np.shape(x), x.dtype) for x in leaves)
        if known not in self._known:
            lowered = jax.jit(fn).lower(*jax.tree.map(_type_of, args))
            key = lowered.as_text(), tree, jax.tree.structure(lowered.out_info)
            if key not in self._compiled:
                self._compiled[key] = _Later(lowered.compile, self._pool)
            self._known[known] = self._compiled[key], lowered.out_info
        program, outs = self._known[known]
        return outs if self._pool is not None else program.result()

    def _settled(self, x: Any) -> Any:
        return x if _is_key(x) or self.room(x.nbytes) else np.asarray(x)

    # Loops.

    def _loop(self, loop: Loop, read: list[Val]) -> tuple[list[Val], list[list[Val]]]:
        """The outputs, and what each step was handed on."""
        constants, carry, xs = _parts(loop, read)
        carry, carried, made = [plain(v.wide) for v in carry], [], {}
        for t in loop.times:
            carried.append(carry)
            outs, _ = self.forward(loop.body, [*constants, *carry, *(_at(x, t) for x in xs)])
            carry, made[t] = [plain(o.wide) for o in outs[: loop.carries]], outs[loop.carries :]
        stacked = [_stacked([made[t][i] for t in range(loop.length)]) for i in range(len(loop.gives) - loop.carries)]
        return [*carry, *stacked], carried

    def _pull_loop(
        self, loop: Loop, read: list[Val], carried: list[list[Val]], cts: Sequence[Any], wanted: Sequence[bool]
    ) -> list[Any]:
        n, m = loop.constants, loop.constants + loop.carries
        constants, _, xs = _parts(loop, read)
        floats = [v.kind == PLAIN and is_inexact(v.high.dtype) for v in carried[0]]
        active = [*wanted[:n], *floats, *wanted[m:]]
        of_carry, of_constants = list(cts[: loop.carries]), [None] * n
        of_xs: list[list[Any]] = [[None] * loop.length for _ in xs]
        for t, carry in reversed(list(zip(loop.times, carried, strict=True))):
            vals = [*constants, *carry, *(_at(x, t) for x in xs)]
            _, tape = self.forward(loop.body, vals, taped=True, outputs=False)
            of_outs = [*of_carry, *(None if ct is None else ct[t] for ct in cts[loop.carries :])]
            back = self.pull(tape, of_outs, active)
            of_constants = [_sum(a, b) for a, b in zip(of_constants, back[:n], strict=True)]
            of_carry = back[n:m]
            for x, ct in zip(of_xs, back[m:], strict=True):
                x[t] = ct
        stacked = [_cotangent(x, v) if w else None for x, v, w in zip(of_xs, xs, wanted[m:], strict=True)]
        return [*of_constants, *(ct if w else None for ct, w in zip(of_carry, wanted[n:m], strict=True)), *stacked]


class _Later:
    """What a function returns: of a thread of the pool, or without one when asked for."""

    def __init__(self, fn: Callable[[], Any], pool: ThreadPoolExecutor | None) -> None:
        self.result = functools.cache(fn) if pool is None else pool.submit(fn).result


def _type_of(x: Any) -> Any:
    return jax.ShapeDtypeStruct(np.shape(x), x.dtype)


def _unknown(x: Any) -> Any:
    """A value of this type, where only types count."""
    return jnp.zeros(x.shape, x.dtype)


def _parts(loop: Loop, read: Sequence[Val]) -> tuple[list[Val], list[Val], list[Val]]:
    n, m = loop.constants, loop.constants + loop.carries
    return list(read[:n]), list(read[n:m]), list(read[m:])


def _at(value: Val, t: int) -> Val:
    return jax.tree.map(lambda x: x[t], value)


def _stacked(values: Sequence[Any]) -> Any:
    """One value of those of all steps: on the host where all of them are."""

    def stack(*xs: Any) -> Any:
        return (jnp if any(isinstance(x, jax.Array) for x in xs) else np).stack(xs)

    return jax.tree.map(stack, *values)


def _cotangent(steps: Sequence[Any], value: Val) -> Any:
    """Of what a loop reads an entry of in each step; None where no entry has one."""
    if all(ct is None for ct in steps):
        return None
    zero = np.zeros(np.shape(value.high)[1:], value.high.dtype)
    return _stacked([zero if ct is None else ct for ct in steps])


def _dependent(program: Program, active: Sequence[bool]) -> set[int | Literal]:
    """The values that depend on an active input."""
    found: set[int | Literal] = {n for n, a in zip(program.inputs, active, strict=True) if a}
    for item in program.items:
        if isinstance(item, Loop):
            found |= set(item.gives) if found.intersection(n for n in item.reads if isinstance(n, int)) else set()
            continue
        for step in item.steps:
            if any(n in found for n in step.reads if isinstance(n, int)):
                found.update(step.gives)
    return found


def _add(sums: dict[int, Any], n: int | Literal, ct: Any, depends: set[int | Literal]) -> None:
    if ct is not None and isinstance(n, int) and n in depends:
        sums[n] = _sum(sums.get(n), ct)


def _sum(first: Any, second: Any) -> Any:
    """Of two cotangents, each of which may be None."""
    return second if first is None else first if second is None else first + second


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)
