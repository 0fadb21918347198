"""Programs in `shard_map`, and what is to be found in them. Trials for test_shard_map.py, whose cases have their names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fusionlab as fl
from tests.asked import by_name

from .checks import agree, close, floats, forward_counts, jit, normal, primitives, weighed

Array = jax.Array
SUMS = frozenset({"psum", "psum_invariant", "reduce_scatter"})
GEMM, ATTENTION, NORM = "gemm_epilogue", "dot_product_attention", "layer_norm"


def alone(fn: Callable[..., Array]) -> Callable[..., Array]:
    return fn


@dataclass(frozen=True)
class Program:
    """One body for shard_map, its arguments, and the sites in it.

    Attributes:
      body: what one device does.
      shapes: of the arguments, whole.
      specs, out: how they and the result are split.
      sites: pass -> sites in it; others have none.
      axes: the mesh: axis name -> size.
      manual: the mesh axes the shard_map is over; None for all.
      around: what stands around the shard_map: function -> function.
      checked: the values of check_vma it is tried with.
      grad: whether JAX itself differentiates it.
      kind: of the mesh's axes.
      dtype, scale: of the arguments, which are normal numbers times the scale.
    """

    body: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    specs: tuple[P, ...]
    out: Any
    sites: Mapping[str, int]
    axes: Mapping[str, int] = field(default_factory=lambda: {"d": 4})
    manual: frozenset[str] | None = None
    around: Callable[[Any], Any] = alone
    checked: tuple[bool, ...] = (True,)
    grad: bool = True
    kind: AxisType = AxisType.Auto
    dtype: Any = jnp.float32
    scale: float = 1.0

    def mesh(self) -> Any:
        sizes = tuple(self.axes.values())
        devices = jax.devices()[: math.prod(sizes)]
        return jax.make_mesh(sizes, tuple(self.axes), axis_types=(self.kind,) * len(sizes), devices=devices)

    def function(self, check: bool) -> Callable[..., Any]:
        manual = {} if self.manual is None else {"axis_names": self.manual}
        return self.around(
            jax.shard_map(
                self.body, mesh=self.mesh(), in_specs=self.specs, out_specs=self.out, check_vma=check, **manual
            )
        )

    def arguments(self) -> tuple[Array, ...]:
        args = [self.scale * a for a in normal(*self.shapes, dtype=self.dtype)]
        if self.kind is AxisType.Explicit:
            mesh = self.mesh()
            args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, self.specs, strict=True)]
        return tuple(args)


LAYER = ((8, 6), (6, 12), (12,))
COLUMNS, ROWS = (P(), P(None, "d"), P("d")), (P("d"), P(), P())
HEADS = ((2, 5, 4, 3),) * 3
SPLIT_HEADS = (P(None, None, "d"),) * 3


def layer(act: Callable[[Array], Array], x: Array, w: Array, b: Array) -> Array:
    return act(x @ w + b)


def attend(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
    """`[batch, length, heads, size]`."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(jnp.asarray(q.shape[-1], q.dtype))
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def causal(q: Array, k: Array, v: Array) -> Array:
    return attend(q, k, v, jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool)))


def norm(x: Array, scale: Array, shift: Array) -> Array:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.mean((x - mean) ** 2, -1, keepdims=True) + 1e-5) * scale + shift


def mlp(x: Array, w: Array, b: Array, out: Array, c: Array) -> Array:
    """Megatron's: columns, then rows whose products are summed over the devices before the bias."""
    return lax.psum(jax.nn.gelu(x @ w + b) @ out, "d") + c


MLP = ((8, 6), (6, 12), (12,), (12, 6), (6,))
MLP_SPECS = (P(), P(None, "d"), P("d"), P("d"), P())


def scanned(x: Array, w: Array, b: Array, scale: Array) -> Array:
    """A scan over layers, each rematerialised, with a literal that comes from outside, and a jit that keeps its name."""
    half = jnp.float32(0.5)

    @jax.checkpoint
    def step(x: Array, wb: tuple[Array, Array]) -> Array:
        return jax.jit(lambda x: x + half * jax.nn.relu(x @ wb[0] + wb[1]))(x)

    return lax.scan(lambda x, wb: (step(x, wb), None), x * scale, (w, b))[0]


def branches(x: Array, w: Array, b: Array) -> Array:
    """A branch that depends on what only this device has, and a loop."""
    x = lax.cond(x.sum() > 0, lambda x: jax.nn.silu(x @ w + b), lambda x: jnp.tanh(x @ w + b) - 1, x)
    return lax.fori_loop(0, 2, lambda _, x: jax.nn.relu(x @ w + b), x)


def inner_grad(x: Array, w: Array, b: Array) -> Array:
    """A train step inside: the loss is summed over the devices, its gradient is taken there."""

    def loss(w: Array, b: Array) -> Array:
        return lax.psum(jnp.sum(jnp.sin(jnp.tanh(x @ w + b))), "d")

    dw, db = jax.grad(loss, (0, 1))(w, b)
    return w - 0.1 * dw + db


def nested(x: Array, w: Array, b: Array) -> Array:
    """A shard_map over the one axis in a shard_map over the other."""
    own = partial(layer, jax.nn.gelu)
    return jax.shard_map(own, in_specs=(P("e"), P(), P()), out_specs=P("e"), axis_names={"e"})(x, w, b)


def beside(fn: Callable[..., Array]) -> Callable[..., Array]:
    """A layer outside the shard_map too, and a scan around it."""

    def around(x: Array, w: Array, b: Array) -> Array:
        before = jax.nn.relu(x @ w + b) @ w.T
        return lax.scan(lambda x, _: (jnp.tanh(fn(x, w, b) @ w.T), None), before, length=2)[0]

    return around


def seen_twice(x: Array, w: Array, b: Array) -> Array:
    """Data differ by device and weights do not, or the other way round: one weight in both roles."""
    rows = jax.nn.gelu(x @ w + b)
    return lax.psum(jnp.tanh(lax.pmean(x, "d") @ w + b) + rows.mean(0), "d")


def crossed(x: Array, w: Array, b: Array) -> Array:
    """Sums over devices where a fused op would like to be whole: before the activation, and before the bias."""
    return jax.nn.relu(lax.psum(x @ w + b, "d")) + jax.nn.gelu(lax.psum(x @ w, "d") + b)


def around_devices(x: Array, w: Array, b: Array) -> Array:
    """Each device's rows go on to the next, between the product and the bias."""
    return jax.nn.relu(lax.ppermute(x @ w, "d", [(i, (i + 1) % 4) for i in range(4)]) + b)


def literal_that_varies(x: Array, w: Array, b: Array) -> Array:
    """A constant of the activation that is made to vary outside the remat it is used in."""

    def gelu(x: Array, c: Array) -> Array:
        h = x @ w + b
        return h * 0.5 * (1 + jnp.tanh(0.7978845834732056 * (h + c * h**3)))

    return jax.checkpoint(gelu)(x, lax.pcast(jnp.float32(0.044715), "d", to="varying"))


def of_index(x: Array, w: Array, b: Array) -> Array:
    """What a device does hangs on which it is."""
    return jax.nn.relu(x @ w + b) * (lax.axis_index("d") + 1)


def fused_inside(x: Array, w: Array, b: Array) -> Array:
    """`fuse` in the user's own shard_map: what it sees varies already."""
    inner = fl.fuse(partial(layer, jax.nn.gelu))
    assert inner.findings(x, w, b).counts()[GEMM] == 1
    return inner(x, w, b)


BOTH = (True, False)
SQUARE = ((8, 6), (3, 6, 6), (3, 6), (6,))
PROGRAMS: dict[str, Program] = {
    **{
        f"columns_{act.__name__}": Program(partial(layer, act), LAYER, COLUMNS, P(None, "d"), {GEMM: 1})
        for act in (jax.nn.gelu, jax.nn.relu, jax.nn.silu)
    },
    "rows": Program(partial(layer, jax.nn.gelu), LAYER, ROWS, P("d"), {GEMM: 1}, checked=BOTH),
    "bias_alone": Program(partial(layer, lambda h: h), LAYER, ROWS, P("d"), {GEMM: 1}),
    "everything_alike": Program(partial(layer, jax.nn.relu), LAYER, (P(), P(), P()), P(), {GEMM: 1}),
    "bias_differs": Program(
        lambda x, w, b: jax.nn.relu(x @ w + b[0]), ((8, 6), (6, 12), (4, 12)), (P(), P(), P("d")), P("d"), {GEMM: 1}
    ),
    "bfloat16": Program(mlp, MLP, MLP_SPECS, P(), {GEMM: 2}, dtype=jnp.bfloat16),
    # Outside of it stands the same product of the same shapes, whose proof holds for values that do not vary alone.
    "groups": Program(
        lambda x, w: lax.ragged_dot(x, w, jnp.asarray([2, 0, 3, 1])),
        ((24, 8), (4, 8, 6)),
        (P("d"), P()),
        P("d"),
        {"grouped_matmul": 2},
        around=lambda f: lambda x, w: f(x, w) + jnp.tile(lax.ragged_dot(x[:6], w, jnp.asarray([2, 0, 3, 1])), (4, 1)),
    ),
    "mlp": Program(mlp, MLP, MLP_SPECS, P(), {GEMM: 2}, checked=BOTH),
    "two_axes": Program(
        partial(layer, jax.nn.gelu), LAYER, (P("e"), P(None, "d"), P("d")), P("e", "d"), {GEMM: 1}, {"d": 2, "e": 2}
    ),
    "partly_manual": Program(
        partial(layer, jax.nn.gelu), LAYER, ROWS, P("d"), {GEMM: 1}, {"d": 2, "e": 2}, frozenset({"d"})
    ),
    "nested": Program(nested, LAYER, ROWS, P("d"), {GEMM: 1}, {"d": 2, "e": 2}, frozenset({"d"}), grad=False),
    "explicit": Program(partial(layer, jax.nn.gelu), LAYER, ROWS, P("d"), {GEMM: 1}, kind=AxisType.Explicit),
    "attention_heads": Program(causal, HEADS, SPLIT_HEADS, P(None, None, "d"), {ATTENTION: 1}, checked=BOTH),
    "attention_queries": Program(
        attend, ((2, 8, 4, 3), *HEADS[:2]), (P(None, "d"), P(), P()), P(None, "d"), {ATTENTION: 1}
    ),
    "attention_mask": Program(
        lambda q, k, v, m: attend(q, k, v, m > 0),
        (*HEADS, (5, 5)),
        (*SPLIT_HEADS, P()),
        P(None, None, "d"),
        {ATTENTION: 1},
    ),
    "attention_bias_differs": Program(
        lambda q, k, v, bias: jnp.einsum(
            "bhqk,bkhd->bqhd", jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.5 + bias), v
        ),
        ((2, 5, 1, 3), (2, 5, 1, 3), (2, 5, 1, 3), (4, 5, 5)),
        (P(), P(), P(), P("d")),
        P(None, None, "d"),
        {ATTENTION: 1},
    ),
    "attention_window": Program(
        lambda q, k, v: jax.checkpoint(attend)(q, k, v, jnp.tri(5, k=0, dtype=bool) & ~jnp.tri(5, k=-3, dtype=bool)),
        HEADS,
        SPLIT_HEADS,
        P(None, None, "d"),
        {ATTENTION: 1},
    ),
    "norm_rows": Program(norm, ((8, 6), (6,), (6,)), ROWS, P("d"), {NORM: 1}, checked=BOTH),
    "norm_of_alike": Program(
        lambda x, s, t, w: norm(x, s, t) @ w,
        ((8, 6), (6,), (6,), (6, 8)),
        (P(), P(), P(), P(None, "d")),
        P(None, "d"),
        {NORM: 1},
    ),
    "scan_remat_jit": Program(scanned, SQUARE, (P("d"), P(), P(), P()), P("d"), {GEMM: 1}, checked=BOTH),
    "scan_weights_differ": Program(
        lambda x, w, b, s: lax.psum(scanned(lax.pcast(x, "d", to="varying"), w, b, s), "d"),
        ((8, 6), (12, 6, 6), (12, 6), (6,)),
        (P(), P("d"), P("d"), P()),
        P(),
        {GEMM: 1},
    ),
    "branches": Program(branches, ((8, 6), (6, 6), (6,)), ROWS, P("d"), {GEMM: 3}),
    "inner_grad": Program(inner_grad, LAYER, ROWS, P(), {GEMM: 1}),
    "beside": Program(partial(layer, jax.nn.gelu), LAYER, ROWS, P("d"), {GEMM: 3}, around=beside, scale=0.3),
    "mapped": Program(
        partial(layer, jax.nn.gelu),
        ((2, *LAYER[0]), *LAYER[1:]),
        ROWS,
        P("d"),
        {GEMM: 1},
        around=lambda f: jax.vmap(f, (0, None, None)),
    ),
    "literal_that_varies": Program(literal_that_varies, LAYER, ROWS, P("d"), {GEMM: 1}),
    "seen_twice": Program(seen_twice, LAYER, ROWS, P(), {GEMM: 2}),
    "crossed": Program(crossed, ((4, 8), (8, 12), (12,)), (P(None, "d"), P("d"), P()), P(), {GEMM: 2}, checked=BOTH),
    "around_devices": Program(around_devices, LAYER, ROWS, P("d"), {GEMM: 0}),
    "of_index": Program(of_index, LAYER, ROWS, P("d"), {GEMM: 1}),
    "fused_inside": Program(fused_inside, LAYER, ROWS, P("d"), {GEMM: 0}),
}


def try_out(name: str, check: bool) -> None:
    """Asserts that the sites are found, that the fused program is right, and that it sums over devices as often."""
    program = PROGRAMS[name]
    fn, args = program.function(check), program.arguments()
    if program.grad:
        found = agree(fn, *args, passes=by_name())
    else:
        close(jit(fl.fuse(fn, passes=by_name()))(*args), jit(fn)(*args))
        found = fl.find(fn, *args, passes=by_name())
    wanted = {GEMM: 0, ATTENTION: 0, NORM: 0} | dict(program.sites)
    assert forward_counts(found) == wanted, (forward_counts(found), [r.sentence for r in found.rejections])
    before, after = primitives(found.graph), primitives(found.apply())
    sums = sum(p in SUMS for p in before), sum(p in SUMS for p in after)
    # With a backward pass dead code goes as well: a sum that nobody reads is one.
    assert sums[0] == sums[1] or (sums[0] > sums[1] and any(c.backward for c in found.candidates))
    assert sum(p in wanted for p in after) - sum(p in wanted for p in before) == sum(wanted.values())


def try_differentiated(name: str, check: bool) -> None:
    """Asserts that the program, differentiated before it is fused, has the values and gradients it had, whatever is paired."""
    program = PROGRAMS[name]
    fn, args = program.function(check), program.arguments()
    step = jax.value_and_grad(weighed(fn), floats(args))
    close(jit(fl.fuse(step, passes=by_name()))(*args), jit(step)(*args), 2.0)
    found = fl.find(step, *args, passes=by_name())
    assert any(c.backward is not None for c in found.candidates) or name not in PAIRED, found.report()
    for c in found.candidates:
        assert c.backward is None or c.backward.stays is None or name not in PAIRED, c.backward
    before, after = primitives(found.graph), primitives(found.apply())
    if name in PAIRED:
        assert sum(p.endswith("_cotangent") for p in after) == sum(c.backward is not None for c in found.candidates)
        assert sum(p in SUMS for p in after) <= sum(p in SUMS for p in before)


# Programs whose sites are all fused with their backward passes, where there are any.
PAIRED = frozenset("rows mlp bias_alone norm_rows attention_heads scan_remat_jit".split())


def try_zoo(name: str) -> None:
    """A parallel model of the zoo: every site its truth tells of, on as many devices as it is made for, and right."""
    from zoo.catalogue import programs  # imports every library of the zoo

    (program,) = (p for p in programs() if p.id == f"structured/{name}-f32-forward")
    found = agree(program.make()[0], *program.arrays())
    truth = program.truth.sites
    assert not found.rejections
    assert forward_counts(found) == {
        GEMM: truth["linear"] + truth["linear_no_bias"],
        ATTENTION: truth["attention"],
        NORM: truth["layer_norm"],
    }
    assert sum(c.attrs.get("activation") == "gelu_tanh" for c in found.candidates) == truth["gelu_tanh"]


def try_derivatives() -> None:
    """Forward mode, a hessian and a gradient of a gradient, where the operands vary along different axes."""
    program = PROGRAMS["columns_gelu"]
    args = program.arguments()
    fn, fused = weighed(program.function(True)), weighed(fl.fuse(program.function(True)))
    for derive in (
        lambda f: lambda x, w, b: jax.jvp(f, (x, w, b), (w[:, 0] + x, w, -b)),
        lambda f: lambda x, w, b: jax.jvp(lambda x: f(x, w, b), (x,), (x,))[1],
        lambda f: lambda x, w, b: jax.hessian(f, 2)(x, w, b),
        lambda f: jax.grad(lambda *a: jnp.sum(jax.grad(f, 0)(*a) ** 2), 1),
    ):
        close(jit(derive(fused))(*args), jit(derive(fn))(*args), 4)


def trials() -> Iterator[tuple[str, Callable[[], None]]]:
    """Every trial by name, without running it."""
    for name, program in PROGRAMS.items():
        for check in program.checked:
            yield f"{name}{'' if check else ' unchecked'}", partial(try_out, name, check)
            if program.grad:
                yield f"{name} differentiated{'' if check else ' unchecked'}", partial(try_differentiated, name, check)
    for name in ("parallel_mlp", "parallel_mlp_of_4", "parallel_layer", "parallel_mlp_unchecked"):
        yield f"zoo {name}", partial(try_zoo, name)
    yield "derivatives", try_derivatives


TRIALS: dict[str, Callable[[], None]] = dict(trials())
