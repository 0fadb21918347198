"""Small programs that between them use every primitive of JAX that `jax.lax` names, and the list of those, made from JAX itself.

Nothing here runs unless a test runs it: the programs are for tracing. Where `jax.lax` has a function for a primitive it is
called, and where it has none (a comparison inside a sort, say) the primitive is bound as JAX binds it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.lax import linalg
from jax.sharding import PartitionSpec

# Primitives that no program of this file can hold, with the reason.
EXCLUDED = {"stage": "lifting a value into a trace leaves no equation in it"}


def primitive_names() -> frozenset[str]:
    """The names of the primitives that `jax.lax` and `jax.lax.linalg` of the installed JAX have under `..._p`."""
    found = {getattr(module, name).name for module in (lax, linalg) for name in dir(module) if name.endswith("_p")}
    return frozenset(found - EXCLUDED.keys())


@dataclass(frozen=True)
class Program:
    """A function of arrays and arrays to trace it with.

    Attributes:
      name: unique among the programs.
      fn: takes `args`, returns arrays, tuples of arrays or tokens.
      args: numpy arrays (float32, int32, uint32, bool or complex64) and keys.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]

    @property
    def differentiable(self) -> bool:
        """Whether JAX differentiates it, in reverse, with respect to its float32 arguments, if it has any."""
        return self.name not in NOT_DIFFERENTIABLE and any(getattr(a, "dtype", None) == np.float32 for a in self.args)

    def __repr__(self) -> str:
        return self.name


def _floats(*shape: int) -> np.ndarray:
    """float32 between 0.2 and 0.8, where every function below is defined and smooth."""
    return np.linspace(0.2, 0.8, int(np.prod(shape)), dtype=np.float32).reshape(shape)


X, Y = _floats(4, 6), _floats(4, 6)[::-1].copy()
SQUARE = _floats(4, 4) + 3 * np.eye(4, dtype=np.float32)
IMAGE = _floats(1, 6, 6, 2)
ROW = _floats(6)
INTEGERS, THREES = np.arange(24, dtype=np.int32).reshape(4, 6), np.full((4, 6), 3, np.int32)
B = INTEGERS % 2 == 0
C = (X + 1j * Y).astype(np.complex64)
KEY = jax.random.key(0)
SHARDED = PartitionSpec("i")
MESH = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


# -- one primitive a program, by the name that lax has for it ----------------------------------------------------------

BY_NAME: tuple[tuple[str, tuple[Any, ...], str], ...] = (  # names in lax, arguments, what the programs' names end in
    (
        "abs acos asin asinh atan atanh bessel_i0e bessel_i1e cbrt cos cosh digamma erf erf_inv erfc exp exp2 expm1",
        (X,),
        "",
    ),
    ("lgamma log log1p logistic log2 neg rsqrt sin sinh sqrt square tan tanh", (X,), ""),
    ("ceil floor round sign is_finite stop_gradient stage dce_sink", (X,), ""),
    ("clz population_count bitwise_not neg sign", (INTEGERS,), "_integer"),
    ("real imag conj exp neg", (C,), "_complex"),
    ("add atan2 div max min mul nextafter pow rem sub complex", (X, Y), ""),
    ("igamma igammac igamma_grad_a random_gamma_grad", (X, Y), ""),
    ("eq ne ge gt le lt", (X, Y), ""),
    ("add div max mul rem mulhi shift_left shift_right_arithmetic shift_right_logical", (INTEGERS, THREES), "_integer"),
    ("bitwise_and bitwise_or bitwise_xor", (INTEGERS, THREES), "_integer"),
    ("bitwise_and bitwise_or bitwise_xor", (B, ~B), "_bool"),
    ("cumsum cumprod cummax cummin cumlogsumexp", (X,), ""),
)
BOUND = "eq_to le_to lt_to"  # the total order that a sort compares by: primitives without a function
REDUCTIONS = "reduce_sum reduce_max reduce_min reduce_prod"
BOOLEAN_REDUCTIONS = "reduce_and reduce_or reduce_xor"
SCATTERS = "scatter scatter_add scatter_sub scatter_mul scatter_min scatter_max"
# What JAX does not differentiate in reverse, by the names of the programs.
NOT_DIFFERENTIABLE = frozenset(
    """
    igamma_grad_a random_gamma_grad cholesky_update hessenberg householder_product ormqr schur symmetric_product tridiagonal
    reduce_window select_and_scatter while callbacks rng_uniform zeta betainc eig pmax pmin
    """.split()
) | ({"nextafter"} if jax.__version_info__ < (0, 12) else set())


def _by_name() -> Iterator[Program]:
    for names, args, suffix in BY_NAME:
        for name in names.split():
            fn = getattr(lax, name, None)
            if fn is not None:  # log2 is newer than JAX 0.10
                yield Program(name + suffix, fn, args)
    for name in BOUND.split():
        yield Program(name, getattr(lax, f"{name}_p").bind, (X, Y))
    for name in REDUCTIONS.split():
        yield Program(name, functools.partial(getattr(lax, name), axes=(1,)), (X,))
    for name in BOOLEAN_REDUCTIONS.split():
        yield Program(name, functools.partial(getattr(lax, name), axes=(0,)), (B,))
    yield from map(_scatter, SCATTERS.split())


# -- windows, slices, scatters ----------------------------------------------------------------------------------------


def _scatter(name: str) -> Program:
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    at = np.array([[1], [2]], np.int32)
    return Program(
        name,
        lambda x, u: getattr(lax, name)(x, at, u, numbers, unique_indices=True),
        (X, _floats(2, 6)),
    )


def _gather(x: Any) -> Any:
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    return lax.gather(x, np.array([[1], [3]], np.int32), numbers, slice_sizes=(1, 6))


def _window(init: float, computation: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda x: lax.reduce_window(x, np.float32(init), computation, (2, 2), (1, 2), "VALID")


def _select_and_scatter(x: Any, source: Any) -> Any:
    number = jax.ShapeDtypeStruct((), np.float32)
    select, scatter = (jax.make_jaxpr(f)(number, number) for f in (lax.ge, lax.add))
    jaxprs = {"select_jaxpr": select.jaxpr, "scatter_jaxpr": scatter.jaxpr, "select_consts": (), "scatter_consts": ()}
    where = {"window_dimensions": (2, 2), "window_strides": (2, 2), "padding": ((0, 0), (0, 0))}
    return lax.select_and_scatter_p.bind(x, source, np.float32(0), **jaxprs, **where)


def _convolution(x: Any, k: Any) -> Any:
    return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _draws(key: Any, x: Any) -> Any:
    noise = jax.random.normal(jax.random.fold_in(key, 3), (4, 6))
    return x + noise + jax.random.gamma(jax.random.split(key)[0], 2.0, (4, 6))


def _reduce_pairs(x: Any, y: Any) -> Any:
    """The largest of x and the y beside it: a reduction of two operands by a function of its own."""

    def larger(a: Any, b: Any) -> Any:
        keep = a[0] >= b[0]
        return jnp.where(keep, a[0], b[0]), jnp.where(keep, a[1], b[1])

    return lax.reduce((x, y), (np.float32(-np.inf), np.float32(0)), larger, (1,))


# -- control flow -----------------------------------------------------------------------------------------------------


def _scan(x: Any, w: Any) -> Any:
    return lax.scan(lambda c, row: (jnp.tanh(c * row + w), c.sum()), x[0], x)


def _while(x: Any) -> Any:
    return lax.while_loop(lambda c: c.sum() < 100.0, lambda c: c * 1.5, x)


def _fori(x: Any, w: Any) -> Any:
    return lax.fori_loop(0, 3, lambda i, c: jax.nn.relu(c @ w), x)


def _cond(x: Any) -> Any:
    return lax.cond(x.sum() > 1.0, lambda a: a * 2.0, lambda a: jnp.sin(a), x)


def _switch(x: Any) -> Any:
    return lax.switch(x.sum().astype(np.int32), [jnp.exp, jnp.tanh, lambda a: a], x)


def _linear_solve(a: Any, b: Any) -> Any:
    return lax.custom_linear_solve(
        lambda v: a @ v, b, lambda matvec, v: v / jnp.diag(a), lambda vecmat, v: v / jnp.diag(a)
    )


# -- several devices --------------------------------------------------------------------------------------------------


def _sharded(fn: Callable[..., Any], check_vma: bool = False, out: Any = SHARDED) -> Callable[..., Any]:
    """`fn` of the shards of one array on a mesh of one device, with the named axis "i"."""
    return jax.shard_map(fn, mesh=MESH, in_specs=SHARDED, out_specs=out, check_vma=check_vma)


def _ragged(x: Any) -> Any:
    one = np.array([4], np.int32)
    return lax.ragged_all_to_all(x, jnp.zeros_like(x), one * 0, one, one * 0, one, axis_name="i")


COLLECTIVES: dict[str, Callable[..., Any]] = {
    "psum": lambda x: lax.psum(x, "i"),
    "pmax": lambda x: lax.pmax(x, "i"),
    "pmin": lambda x: lax.pmin(x, "i"),
    "ppermute": lambda x: lax.ppermute(x, "i", [(0, 0)]),
    "all_gather": lambda x: lax.all_gather(x, "i", tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x, "i", 0, 1, tiled=True),
    "psum_scatter": lambda x: lax.psum_scatter(x, "i", tiled=True),
    "axis_index": lambda x: x + lax.axis_index("i").astype(np.float32),
    "ragged_all_to_all": _ragged,
}


def _collectives() -> Iterator[Program]:
    for name, fn in COLLECTIVES.items():
        yield Program(name, _sharded(fn), (X,))
    yield Program("psum_of_varying", _sharded(lambda x: lax.psum(x @ x.T, "i"), True, PartitionSpec()), (X,))


# -- effects, tokens, placement ---------------------------------------------------------------------------------------


def _constraint(x: Any) -> Any:
    return lax.with_sharding_constraint(x, jax.sharding.NamedSharding(MESH, SHARDED))


def _printing(x: Any) -> Any:
    jax.debug.print("{}", x.sum())
    return jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


# -- what lax does not name: the wrappers of every program --------------------------------------------------------------


@jax.custom_vjp
def _clipped_gradient(x: Any) -> Any:
    return x * 2.0


_clipped_gradient.defvjp(lambda x: (x * 2.0, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


@jax.custom_jvp
def _own_rule(x: Any) -> Any:
    return jnp.sin(x)


_own_rule.defjvp(lambda primals, tangents: (_own_rule(*primals), tangents[0] * 0.5))

LINALG = (
    Program("cholesky", linalg.cholesky, (SQUARE,)),
    Program("cholesky_update", linalg.cholesky_update, (SQUARE, _floats(4))),
    Program("eig", lambda a: linalg.eig(a, compute_left_eigenvectors=False)[0], (SQUARE,)),
    Program("eigh", linalg.eigh, (SQUARE,)),
    Program("hessenberg", linalg.hessenberg, (SQUARE,)),
    Program("householder_product", linalg.householder_product, (SQUARE, _floats(4))),
    Program("lu", linalg.lu, (SQUARE,)),
    Program("lu_pivots", lambda p: linalg.lu_pivots_to_permutation(p, 6), (np.array([2, 1, 3], np.int32),)),
    Program("ormqr", linalg.ormqr, (SQUARE, _floats(4), X)),
    Program("qr", lambda a: linalg.qr(a, full_matrices=False), (SQUARE,)),
    Program("schur", linalg.schur, (SQUARE,)),
    Program("svd", lambda a: linalg.svd(a, full_matrices=False), (SQUARE,)),
    Program("symmetric_product", lambda a, c: linalg.symmetric_product(a, c), (X, SQUARE)),
    Program("triangular_solve", lambda a, b: linalg.triangular_solve(a, b, left_side=True), (SQUARE, X)),
    Program("tridiagonal", linalg.tridiagonal, (SQUARE,)),
    Program("tridiagonal_solve", linalg.tridiagonal_solve, (_floats(4), _floats(4), _floats(4), X)),
)

OTHERS = (
    Program("acosh", lambda x: lax.acosh(x + 1.5), (X,)),
    Program("integer_pow", lambda x: lax.integer_pow(x, 3), (X,)),
    Program("reduce_precision", lambda x: lax.reduce_precision(x, 5, 10), (X,)),
    Program("convert_element_type", lambda x: lax.convert_element_type(x, np.int32), (X,)),
    Program("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, np.int32), (X,)),
    Program("one_minus_square", lambda x: jax.vjp(jnp.tanh, x)[1](x)[0], (X,)),
    Program("polynomial", lambda x: jax.vjp(lax.erf, x)[1](x)[0], (X,)),  # what JAX 0.12 makes it of
    Program("zeta", lambda x, y: lax.zeta(x + 1.5, y), (X, Y)),
    Program("polygamma", lambda x: lax.polygamma(np.float32(2), x), (X,)),
    Program("betainc", lax.betainc, (X, Y, X)),
    Program("clamp", lambda x, y: lax.clamp(np.float32(0.3), x, y), (X, Y)),
    Program("select_n", lax.select_n, (B, X, Y)),
    Program("select_many", lambda i, x, y: lax.select_n(i % 3, x, y, x * y), (INTEGERS, X, Y)),
    Program("dot_general", lambda x, y: lax.dot_general(x, y, (((1,), (1,)), ((), ()))), (X, Y)),
    Program("convolution", _convolution, (IMAGE, _floats(3, 3, 2, 4))),
    Program("fft", lambda x: lax.fft(x, lax.FftType.RFFT, (6,)), (X,)),
    Program("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (2, 4, 6), (1, 2)), (X,)),
    Program("reshape", lambda x: lax.reshape(x, (3, 8)), (X,)),
    Program("transpose", lambda x: lax.transpose(x, (1, 0)), (X,)),
    Program("squeeze", lambda x: lax.squeeze(x, (0,)), (X[None],)),
    Program("expand_dims", lambda x: lax.expand_dims(x, (0,)), (X,)),
    Program("concatenate", lambda x, y: lax.concatenate((x, y), 1), (X, Y)),
    Program("pad", lambda x: lax.pad(x, np.float32(0), ((1, 1, 0), (0, 2, 1))), (X,)),
    Program("rev", lambda x: lax.rev(x, (1,)), (X,)),
    Program("slice", lambda x: lax.slice(x, (1, 0), (3, 6), (1, 2)), (X,)),
    Program("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, 0), (2, 6)), (X, np.int32(1))),
    Program("dynamic_update_slice", lambda x, y, i: lax.dynamic_update_slice(x, y, (i, 0)), (X, Y[:2], np.int32(1))),
    Program("split", lambda x: lax.split(x, (2, 4), 1), (X,)),
    Program("stack", lambda x, y: lax.stack((x, y), 1), (X, Y)),
    Program("unstack", lambda x: lax.unstack(x, 1), (X,)),
    Program("tile", lambda x: lax.tile(x, (2, 1)), (X,)),
    Program("gather", _gather, (X,)),
    Program("sort", lambda x: lax.sort(x, dimension=1), (X,)),
    Program("sort_by_two", lambda x, y: lax.sort((x, y), num_keys=2), (X, Y)),
    Program("top_k", lambda x: lax.top_k(x, 2), (X,)),
    Program("approx_top_k", lambda x: lax.approx_max_k(x, 2), (X,)),
    Program("argmax", lambda x: lax.argmax(x, 1, np.int32), (X,)),
    Program("argmin", lambda x: lax.argmin(x, 1, np.int32), (X,)),
    Program("iota", lambda x: x + lax.broadcasted_iota(np.float32, (4, 6), 1), (X,)),
    Program("reduce", _reduce_pairs, (X, Y)),
    Program("reduce_window", _window(1.0, lambda a, b: a * b + b), (X,)),
    Program("reduce_window_sum", _window(0.0, lax.add), (X,)),
    Program("reduce_window_max", _window(-np.inf, lax.max), (X,)),
    Program("reduce_window_min", _window(np.inf, lax.min), (X,)),
    Program("select_and_gather_add", lambda x, y: jax.jvp(_window(-np.inf, lax.max), (x,), (y,))[1], (X, Y)),
    Program("select_and_scatter_add", lambda x: jax.grad(lambda v: _window(-np.inf, lax.max)(v).sum())(x), (X,)),
    Program("select_and_scatter", _select_and_scatter, (X, X[:2, :3].copy())),
    Program("scan", _scan, (X, ROW)),
    Program("while", _while, (X,)),
    Program("fori", _fori, (X, _floats(6, 6))),
    Program("cond", _cond, (X,)),
    Program("switch", _switch, (X,)),
    Program("linear_solve", _linear_solve, (SQUARE, _floats(4))),
    Program("optimization_barrier", lambda x, y: lax.optimization_barrier((x * y, y)), (X, Y)),
    Program("copy", lax.copy_p.bind, (X,)),
    Program("device_put", lambda x: jax.device_put(x, jax.devices()[0]), (X,)),
    Program("sharding_constraint", _constraint, (X,)),
    Program("token", lambda x: (x, lax.after_all(lax.create_token())), (X,)),
    Program("callbacks", _printing, (X,)),
    Program("rng_uniform", lambda x: lax.rng_uniform(np.float32(0), x.sum(), (3,)), (X,)),
    Program("rng_bit_generator", lambda x: x * lax.rng_bit_generator(np.arange(4, dtype=np.uint32), (4, 6))[1].astype(np.float32), (X,)),
    Program("draws", _draws, (KEY, X)),
    Program("remat", jax.checkpoint(lambda x, w: jax.nn.gelu(x @ w)), (X, _floats(6, 3))),
    Program("named", lambda x: checkpoint_name(jnp.sin(x), "sine"), (X,)),
    Program("custom_vjp", _clipped_gradient, (X,)),
    Program("custom_jvp", _own_rule, (X,)),
    Program("jit_kept", jax.jit(lambda x: x * 2.0, donate_argnums=0), (X,)),
    Program("empty", lambda x: jnp.tanh(x[:0]).sum(0), (X,)),
    Program("numbers", lambda x: (x[0, 0], 1.0, x.dtype.type(2)), (X,)),
)  # fmt: skip


def programs() -> Iterator[Program]:
    """All of them."""
    yield from _by_name()
    yield from OTHERS
    yield from LINALG
    yield from _collectives()
