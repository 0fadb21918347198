"""Evaluates a jaxpr with every float widened to float64: the engine of `promote`. Where `jax_enable_x64` is off it is float32.

Casts between floats vanish; literals keep the value they have in their own dtype. Random draws are
computed in the program's own dtype and widened afterwards, so masks and noise are the program's own. Custom
differentiation rules are kept: they are traced at the user's dtypes and then widened.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from fusionlab.errors import TraceError

from ..jax_compat import FLATTENED, child_jaxprs, enable_x64, scan_counts, split_closed
from ..primitives import having
from ..program.scopes import source_of

# What a value is. PLAIN values exist in float64 only. CONSTANT ones (made of literals alone) exist in both forms, for a
# draw may need them in its own dtype. RANDOM ones exist in their own dtype and are widened, exactly, when read.
PLAIN, CONSTANT, RANDOM = "plain", "constant", "random"

_RANDOM_NAMES = ("random_", "threefry", "philox", "rng_", "iota_2x32")
# What jax.random's distributions are made of between the bits and the draw. Contractions, sums and the like end it.
_DRAW_NAMES = """
abs add and argmax argmin bitcast_convert_type broadcast_in_dim clamp concatenate convert_element_type copy copy_p
cos div dynamic_slice eq erf erf_inv exp exp2 expand_dims floor gather ge gt integer_pow iota is_finite le lgamma
log log1p lt max min mul ne neg nextafter not or pow rem reshape rev rsqrt select_n shift_left
shift_right_arithmetic shift_right_logical sign sin slice split sqrt square squeeze sub tan transpose xor
"""
_DRAW = frozenset(_DRAW_NAMES.split())
_COMPARISONS = having("equality", "order")
# These hide what they compute: there is no float64 form of them.
_OPAQUE = frozenset(("pallas_call", "ffi_call", "pure_callback", "cuda_custom_call", "triton_kernel_call"))
# These read or write single bits of a float.
_OWN_DTYPE = _OPAQUE | {"bitcast_convert_type", "nextafter"}
_CONTRACTIONS = having("product", "ragged product")
# Owners of a small scalar jaxpr that has to be retyped along with the operands.
_WITH_COMPUTATION = ("scatter", "reduce", "reduce_window", "select_and_scatter", "select_and_gather")


@jax.tree_util.register_pytree_node_class
class Val:
    """A value in the interpreter; a pytree, so that scan, cond and remat carry it unchanged."""

    __slots__ = ("high", "kind", "low")

    def __init__(self, high: Any, low: Any, kind: str) -> None:
        self.high, self.low, self.kind = high, low, kind

    def tree_flatten(self) -> tuple[tuple, str]:
        return (self.high, self.low), self.kind

    @classmethod
    def tree_unflatten(cls, kind: str, children: tuple) -> Val:
        high, low = children
        return cls(high, low, kind)

    @property
    def wide(self) -> Any:
        return widen(self.low) if self.kind == RANDOM else self.high

    def own(self, dtype: Any) -> Any:
        """The value in the dtype the user's program has it in."""
        if self.low is not None:
            return self.low
        return self.high.astype(dtype) if is_inexact(dtype) else self.high


def plain(x: Any) -> Val:
    return Val(x, None, PLAIN)


@functools.cache  # asked for every value of a program
def is_inexact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, np.inexact)


def wide_dtype(dtype: Any) -> Any:
    """The widest dtype of its kind that JAX has at present."""
    if jnp.issubdtype(dtype, np.complexfloating):
        return jax.dtypes.canonicalize_dtype(np.complex128)
    return jax.dtypes.canonicalize_dtype(np.float64) if jnp.issubdtype(dtype, np.floating) else dtype


def widen(x: Any) -> Any:
    return x.astype(wide_dtype(x.dtype)) if is_inexact(x.dtype) else x


def _wide_param(value: Any) -> Any:
    is_dtype = isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic))
    return wide_dtype(value) if is_dtype else value


def _site(eqn: Any) -> str:
    source = source_of(eqn)
    return f"{eqn.primitive.name} ({source})" if source else eqn.primitive.name


class Interpreter:
    """Evaluates jaxprs with floats widened. `notes` lists the exceptions."""

    def __init__(self, inline: Callable[[Any], Callable | None] | None = None) -> None:
        self.inline = inline
        self.x64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64  # the user's setting, a context's included
        self.notes: dict[str, None] = {}

    def run(self, closed: Any, args: Iterable[Val], consts: Sequence[Any] | None = None) -> list[Val]:
        jaxpr, own_consts = split_closed(closed)
        env: dict[Any, Val] = dict(zip(jaxpr.invars, args, strict=True))
        for var, const in zip(jaxpr.constvars, own_consts if consts is None else consts, strict=True):
            env[var] = self.constant(const, var.aval)
        for eqn in jaxpr.eqns:
            vals = [self._read(env, a) for a in eqn.invars]
            with eqn.ctx.manager:
                outs = self.equation(eqn, vals)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [self._read(env, a) for a in jaxpr.outvars]

    def _read(self, env: dict, atom: Any) -> Val:
        return self.literal(np.asarray(atom.val, atom.aval.dtype)) if hasattr(atom, "val") else env[atom]

    def literal(self, value: np.ndarray) -> Val:
        low = jnp.asarray(value)
        return Val(widen(low), low, CONSTANT)

    def constant(self, const: Any, aval: Any) -> Val:
        # A closed-over weight is data like an argument; a closed-over scalar is like a literal.
        if aval.shape == () and not jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            low = jnp.asarray(const, aval.dtype)
            return Val(widen(low), low, CONSTANT)
        return plain(widen(jnp.asarray(const)))

    def equation(self, eqn: Any, vals: list[Val]) -> list[Val]:
        meaning = self.inline(eqn) if self.inline is not None else None
        if meaning is not None:
            return self.run(self._traced(meaning, [a.aval for a in eqn.invars], [v.wide for v in vals]), vals)
        rule = _REGIONS.get(eqn.primitive.name)
        if rule is None:
            return self._first_order(eqn, vals)
        if eqn.primitive.name in _LOOPS_AND_BRANCHES and self.is_draw(eqn, vals):
            return self._low(eqn, vals)
        return rule(self, eqn, vals)

    def bind(self, eqn: Any, args: Sequence[Any], params: dict[str, Any]) -> list[Any]:
        """What an equation's primitive makes of these operands, with these parameters."""
        return _bind(eqn, args, params)

    # One equation without a region of its own.

    def _first_order(self, eqn: Any, vals: list[Val]) -> list[Val]:
        name = eqn.primitive.name
        kinds = {v.kind for v in vals}
        floats = {v.kind for v, a in zip(vals, eqn.invars, strict=True) if is_inexact(a.aval.dtype)}
        # Bits of a generator are those of its own dtype.
        if name.startswith(_RANDOM_NAMES):
            return self._own(eqn, vals, PLAIN if PLAIN in floats else RANDOM)
        no_floats = not floats and not any(is_inexact(v.aval.dtype) for v in eqn.outvars)
        if no_floats or name in _OWN_DTYPE:
            if name in _OPAQUE:
                self.notes[f"{_site(eqn)} has no float64 form; it ran in its own dtype"] = None
            return self._own(eqn, vals, RANDOM if kinds == {RANDOM} else _weakest(kinds))
        if PLAIN in floats:
            if name in _COMPARISONS and RANDOM in floats:
                # A draw is compared in its own dtype, or a mask would differ where the threshold was rounded.
                return self._own(eqn, vals, RANDOM)
            return self._high(eqn, vals)
        # jax.random makes a draw of bits in the draw's own dtype: in float64 it would be another draw.
        if RANDOM in kinds:
            return self._low(eqn, vals) if name in _DRAW else self._high(eqn, vals)
        if PLAIN in kinds:
            return self._high(eqn, vals)
        pairs = zip(self._high(eqn, vals), self._low(eqn, vals), strict=True)
        return [Val(h.high, lo.low, CONSTANT) for h, lo in pairs]

    def _low(self, eqn: Any, vals: list[Val]) -> list[Val]:
        return self._own(eqn, vals, RANDOM)

    def _own(self, eqn: Any, vals: list[Val], kind: str) -> list[Val]:
        args = [v.own(a.aval.dtype) for v, a in zip(vals, eqn.invars, strict=True)]
        outs = self.bind(eqn, args, eqn.params)
        if kind == RANDOM:
            return [Val(None, o, RANDOM) for o in outs]
        return [Val(widen(o), o if kind == CONSTANT else None, kind) for o in outs]

    def _high(self, eqn: Any, vals: list[Val]) -> list[Val]:
        name, params = eqn.primitive.name, {k: _wide_param(v) for k, v in eqn.params.items()}
        args = [v.wide for v in vals]
        # It keeps the bits of a narrower dtype, and float64 is to keep all.
        if name == "reduce_precision":
            return [plain(args[0])]
        if name == "convert_element_type":
            old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
            # A cast from float to float, or from complex to complex: both are one dtype here.
            if is_inexact(old) and wide_dtype(old) == wide_dtype(new):
                return [plain(args[0])]
        # What the program asks for may be fewer bits than its dtype has, on devices that have such products.
        if name in _CONTRACTIONS:
            params["precision"] = lax.Precision.HIGHEST
        # JAX keeps the scalar computation of a reduce or a scatter as one jaxpr, typed for the operands' dtype.
        for key, index, child in child_jaxprs(eqn):
            if not name.startswith(_WITH_COMPUTATION) or index is not None:
                raise TraceError(
                    f"{_site(eqn)} contains a program that cannot be promoted to float64. Needed: primitives whose meaning "
                    "is known; supply it with promote(inline=...), or compare without a reference (numerics=False)."
                )
            params[key] = self._retyped(child)
        return [plain(o) for o in self.bind(eqn, args, params)]

    def _retyped(self, child: Any) -> Any:
        """The scalar computation of a reduce or a scatter, at float64."""
        jaxpr, consts = split_closed(child)
        avals = [jax.ShapeDtypeStruct(v.aval.shape, wide_dtype(v.aval.dtype)) for v in jaxpr.invars]
        body = child if consts or not jaxpr.constvars else jaxpr
        new = jax.make_jaxpr(lambda *xs: [o.wide for o in self.run(body, map(plain, xs))])(*avals)
        return new if hasattr(child, "consts") else split_closed(new)[0]

    # Regions.

    def _call(self, eqn: Any, vals: list[Val]) -> list[Val]:
        return self.run(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")), vals)

    def _remat(self, eqn: Any, vals: list[Val]) -> list[Val]:
        p = eqn.params
        body = jax.checkpoint(lambda *xs: self.run(p["jaxpr"], xs), prevent_cse=p["prevent_cse"], policy=p["policy"])
        return body(*vals)

    def _scan(self, eqn: Any, vals: list[Val]) -> list[Val]:
        p = eqn.params
        n_consts, n_carry = scan_counts(p)
        consts, init, xs = vals[:n_consts], vals[n_consts : n_consts + n_carry], vals[n_consts + n_carry :]

        def step(carry: list, x: list) -> tuple[list, list]:
            outs = self.run(p["jaxpr"], [*consts, *map(plain, carry), *x])
            return [o.wide for o in outs[:n_carry]], outs[n_carry:]

        carry, ys = lax.scan(
            step, [v.wide for v in init], xs, length=p["length"], reverse=p["reverse"], unroll=p["unroll"]
        )
        return [*map(plain, carry), *ys]

    def _while(self, eqn: Any, vals: list[Val]) -> list[Val]:
        p = eqn.params
        n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]

        def test(carry: list) -> Any:
            return self.run(p["cond_jaxpr"], [*vals[:n], *map(plain, carry)])[0].wide

        def body(carry: list) -> list:
            new = [o.wide for o in self.run(p["body_jaxpr"], [*vals[n:m], *map(plain, carry)])]
            if not batched:
                return new
            running = test(carry)
            # Under vmap each element stops by itself: one that is done keeps its carry.
            masks = [jnp.expand_dims(running, tuple(range(running.ndim, x.ndim))) for x in new]
            return [jnp.where(mask, x, old) for mask, x, old in zip(masks, new, carry, strict=True)]

        batched = split_closed(p["cond_jaxpr"])[0].outvars[0].aval.ndim > 0
        going = (lambda carry: jnp.any(test(carry))) if batched else test
        return [plain(o) for o in lax.while_loop(going, body, [v.wide for v in vals[m:]])]

    def _cond(self, eqn: Any, vals: list[Val]) -> list[Val]:
        def branch(closed: Any) -> Callable:
            return lambda *xs: [o.wide for o in self.run(closed, xs)]

        outs = lax.switch(vals[0].wide, [branch(b) for b in eqn.params["branches"]], *vals[1:])
        return [plain(o) for o in outs]

    def _shard_map(self, eqn: Any, vals: list[Val]) -> list[Val]:
        p = eqn.params
        body = jax.shard_map(
            lambda *xs: tuple(o.wide for o in self.run(p["jaxpr"], map(plain, xs))),
            mesh=p["mesh"],
            in_specs=tuple(p["in_specs"]),
            out_specs=tuple(p["out_specs"]),
            axis_names=frozenset(p["newly_manual_axes"] if "newly_manual_axes" in p else p["manual_axes"]),
            check_vma=p["check_vma"],
        )
        return [plain(o) for o in body(*(v.wide for v in vals))]

    def _linear_solve(self, eqn: Any, vals: list[Val]) -> list[Val]:
        jaxprs, lengths, rest = eqn.params["jaxprs"], eqn.params["const_lengths"], iter(vals)
        consts = {name: [next(rest) for _ in range(getattr(lengths, name))] for name in lengths._fields}

        def part(name: str) -> Callable:
            def run(b: list) -> list:
                return [o.wide for o in self.run(getattr(jaxprs, name), [*consts[name], *map(plain, b)])]

            return run

        solve, transposed = part("solve"), part("transpose_solve")
        outs = lax.custom_linear_solve(
            part("matvec"),
            [v.wide for v in rest],
            solve=lambda _, b: solve(b),
            transpose_solve=None if jaxprs.transpose_solve is None else lambda _, b: transposed(b),
        )
        return [plain(o) for o in outs]

    def _custom_jvp(self, eqn: Any, vals: list[Val]) -> list[Val]:
        primal, avals, diff, out_diff = _as_function(eqn)

        @jax.custom_jvp
        def call(*xs: Any) -> list:
            return [o.wide for o in self.run(eqn.params["call_jaxpr"], map(plain, xs))]

        @call.defjvp
        def _(xs: Sequence, ts: Sequence) -> tuple[list, list]:
            def user_rule(*flat: Any) -> tuple:
                outs, tangents = jax.jvp(primal, flat[: len(xs)], _with_float0(avals, diff, flat[len(xs) :]))
                return outs, [t for t, d in zip(tangents, out_diff, strict=True) if d]

            live = [(t, a) for t, a, d in zip(ts, avals, diff, strict=True) if d]
            closed = self._traced(user_rule, [*avals, *(a for _, a in live)], [*xs, *(t for t, _ in live)])
            outs = [o.wide for o in self.run(closed, map(plain, [*xs, *(t for t, _ in live)]))]
            n = len(out_diff)
            return outs[:n], list(_with_float0([v.aval for v in eqn.outvars], out_diff, outs[n:]))

        return [plain(o) for o in call(*(v.wide for v in vals))]

    def _custom_vjp(self, eqn: Any, vals: list[Val]) -> list[Val]:
        primal, avals, diff, out_diff = _as_function(eqn)
        out_avals = [v.aval for v in eqn.outvars]

        def pulled(xs: Sequence) -> tuple:
            def of_floats(*floats: Any) -> Any:
                rest = iter(floats)
                return primal(*(next(rest) if d else x for x, d in zip(xs, diff, strict=True)))

            return jax.vjp(of_floats, *(x for x, d in zip(xs, diff, strict=True) if d))

        def user_backward(*flat: Any) -> Any:
            return pulled(flat[: len(avals)])[1](list(_with_float0(out_avals, out_diff, flat[len(avals) :])))

        @jax.custom_vjp
        def call(*xs: Any) -> list:
            return [o.wide for o in self.run(eqn.params["call_jaxpr"], map(plain, xs))]

        def forward(*xs: Any) -> tuple[list, tuple]:
            closed = self._traced(lambda *a: pulled(a)[0], avals, xs)
            return [o.wide for o in self.run(closed, map(plain, xs))], xs

        def backward(xs: tuple, cts: list) -> tuple:
            live = [(c, a) for c, a, d in zip(cts, out_avals, out_diff, strict=True) if d]
            closed = self._traced(user_backward, [*avals, *(a for _, a in live)], [*xs, *(c for c, _ in live)])
            grads = iter(self.run(closed, map(plain, [*xs, *(c for c, _ in live)])))
            return tuple(next(grads).wide if d else None for d in diff)

        call.defvjp(forward, backward)
        return [plain(o) for o in call(*(v.wide for v in vals))]

    def _traced(self, fn: Callable, avals: Sequence, values: Sequence) -> Any:
        """A jaxpr of the user's code as the user would get it: own dtypes, own x64 setting.

        Traced at the values themselves, narrowed: inside shard_map a shape alone does not say along which axes it varies.
        """
        own = [x.astype(a.dtype) if is_inexact(a.dtype) else x for x, a in zip(values, avals, strict=True)]
        with enable_x64(self.x64):
            return jax.make_jaxpr(fn)(*own)

    # Loops that only draw random numbers (rejection sampling, Poisson).

    def is_draw(self, eqn: Any, vals: list[Val]) -> bool:
        floats = {v.kind for v, a in zip(vals, eqn.invars, strict=True) if is_inexact(a.aval.dtype)}
        if PLAIN in floats:
            return False
        random = [RANDOM] if any(v.kind == RANDOM for v in vals) else []
        return all(_only_draws(child, random) for _, _, child in child_jaxprs(eqn)) and bool(random)


def draws(eqn: Any) -> bool:
    """Whether an equation, or one that it holds, is an operation of a generator of random numbers."""
    inner = (draws(e) for _, _, child in child_jaxprs(eqn) for e in split_closed(child)[0].eqns)
    return eqn.primitive.name.startswith(_RANDOM_NAMES) or any(inner)


def only_draws(eqn: Any) -> bool:
    """Whether an equation's bodies draw random numbers and do nothing else."""
    random: list[str] = []
    return all(_only_draws(child, random) for _, _, child in child_jaxprs(eqn)) and bool(random)


def _only_draws(closed: Any, seen_random: list) -> bool:
    """True when every equation belongs to a draw; notes in `seen_random` that there is one."""
    for eqn in split_closed(closed)[0].eqns:
        children = [c for _, _, c in child_jaxprs(eqn)]
        if eqn.primitive.name.startswith(_RANDOM_NAMES):
            seen_random.append(RANDOM)
        elif children:
            if not all(_only_draws(c, seen_random) for c in children):
                return False
        elif any(is_inexact(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)) and eqn.primitive.name not in _DRAW:
            return False
    return True


def _weakest(kinds: set[str]) -> str:
    """The kind of the result of an operation without floats: a draw stays a draw, else constants stay constants."""
    if RANDOM in kinds:
        return RANDOM
    return PLAIN if PLAIN in kinds else CONSTANT


def _bind(eqn: Any, args: Sequence, params: dict) -> list:
    outs = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(params))
    return list(outs) if eqn.primitive.multiple_results else [outs]


def _as_function(eqn: Any) -> tuple[Callable, list, list[bool], list[bool]]:
    """A custom-rule call as a function; its input avals; which inputs and outputs are differentiable."""
    avals = [a.aval for a in eqn.invars]
    diff = [is_inexact(a.dtype) for a in avals]
    return lambda *xs: _bind(eqn, xs, eqn.params), avals, diff, [is_inexact(v.aval.dtype) for v in eqn.outvars]


def _with_float0(avals: Sequence, diff: Sequence[bool], live: Iterable) -> tuple:
    rest = iter(live)
    return tuple(next(rest) if d else np.zeros(a.shape, jax.dtypes.float0) for a, d in zip(avals, diff, strict=True))


_I = Interpreter
_LOOPS_AND_BRANCHES = having("loop", "branch")
_REGIONS: dict[str, Callable[[Interpreter, Any, list[Val]], list[Val]]] = {
    **dict.fromkeys(FLATTENED, _I._call),
    **dict.fromkeys(having("remat"), _I._remat),
    "custom_vjp_call": _I._custom_vjp,
    "custom_jvp_call": _I._custom_jvp,
    "custom_linear_solve": _I._linear_solve,
    "scan": _I._scan,
    "while": _I._while,
    "cond": _I._cond,
    "shard_map": _I._shard_map,
}
