"""Opaque implementations on four devices. Trials for test_partition.py, whose cases have their names.

The opaque implementation computes its products in LAPACK (a triangular solve), a custom call XLA cannot split; it notes the local shapes.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fusionlab as fl
from fusionlab.errors import BackendError
from fusionlab.kernels.op.implementation import ChoiceKind, Implementation, ImplementationChoice
from fusionlab.kernels.op.labels import SummedCall
from fusionlab.kernels.op.op import Op
from fusionlab.kernels.ops.dot_product_attention.op import DOT_PRODUCT_ATTENTION
from fusionlab.kernels.ops.gated_matmul.op import GATED_MATMUL
from fusionlab.kernels.ops.gemm_epilogue import reference
from fusionlab.kernels.ops.gemm_epilogue.activations import ACTIVATIONS
from fusionlab.kernels.ops.gemm_epilogue.op import GEMM_EPILOGUE, GemmEpilogue
from fusionlab.kernels.ops.group_norm.op import GROUP_NORM
from fusionlab.kernels.ops.layer_norm.op import LAYER_NORM
from fusionlab.kernels.ops.lerp.op import LERP

from ..transformations import adding

Array = Any
SEEN: list[
    tuple[str, dict[str, tuple[int, ...]]]
] = []  # (role, local shapes), noted while the code of a device is traced
TRIALS: dict[str, Callable[[], None]] = {}
M, K, N = 16, 8, 32


def trial(fn: Callable[[], None]) -> Callable[[], None]:
    TRIALS[fn.__name__] = fn
    return fn


# A product XLA cannot look into: [[1, -a], [0, 1]]^-1 [[0], [b]] = [[a @ b], [b]].


def product(a: Array, b: Array) -> Array:
    (m, k), n = a.shape, b.shape[1]
    system = jnp.eye(m + k, dtype=a.dtype).at[:m, m:].set(-a)
    right = jnp.concatenate([jnp.zeros((m, n), a.dtype), b])
    return jax.lax.linalg.triangular_solve(system, right, left_side=True, unit_diagonal=True)[:m]


def note(role: str, **operands: Array) -> None:
    SEEN.append((role, {name: a.shape for name, a in operands.items() if a is not None}))


def rows_first(x: Array, contract: int) -> Array:
    return jnp.moveaxis(x, contract, -1).reshape(-1, x.shape[contract])


def forward(x, w, bias=None, x_saved=None, *, residuals, activation, x_contract, w_contract, packed, **_):
    note("call", x=x, w=w, bias=bias)
    rows = tuple(n for i, n in enumerate(x.shape) if i != x_contract)
    h = product(rows_first(x, x_contract), w.T if w_contract else w)
    return reference.epilogue(
        h.reshape(*rows, -1), bias, h.dtype, residuals=residuals, activation=activation, packed=packed
    )


def tangent(saved, tangents, shape, shardings, *, activation, x_contract, w_contract, **_):
    note("tangent", **saved, **{f"d_{n}": t for n, t in tangents.items()})
    turn = (lambda w: w.T) if w_contract else (lambda w: w)
    total = jnp.zeros(shape, next(iter(tangents.values())).dtype)
    if "x" in tangents:
        total += product(rows_first(tangents["x"], x_contract), turn(saved["w"])).reshape(shape)
    if "w" in tangents:
        total += product(rows_first(saved["x"], x_contract), turn(tangents["w"])).reshape(shape)
    act = ACTIVATIONS[activation]
    return act.scale(saved.get(act.residual), total + tangents.get("bias", jnp.zeros(shape[-1:], total.dtype)))


def cotangent(saved, ct, wanted, shardings, *, activation, x_contract, w_contract, **_):
    note("cotangent", ct=ct, **saved)
    act = ACTIVATIONS[activation]
    dh = act.scale(saved.get(act.residual), ct)
    flat, grads = dh.reshape(-1, dh.shape[-1]), {}
    if "x" in wanted:
        dx = product(flat, saved["w"] if w_contract else saved["w"].T)
        grads["x"] = jnp.moveaxis(dx.reshape(*dh.shape[:-1], -1), -1, x_contract)
    if "w" in wanted:
        dw = product(rows_first(saved["x"], x_contract).T, flat)
        grads["w"] = dw.T if w_contract else dw
    if "bias" in wanted:
        grads["bias"] = flat.sum(0)
    return [grads[slot] for slot in wanted]


OPAQUELY = ImplementationChoice("opaque", ChoiceKind.CHOSEN, "for this trial")
OPAQUE = Implementation("opaque", "products in LAPACK", forward, tangent, cotangent, opaque=True)


class Packed(GemmEpilogue):
    """relu whose mask has a bit for each entry."""

    name = "packed"

    def labels(self, shapes, /, **attrs):
        labels = super().labels(shapes, **attrs)
        return {**labels, "mask": (*labels["out"][:-1], "n/8")}

    def summed_call(self, params):
        found = super().summed_call(params)
        return SummedCall(found.params, lambda *a: packed(found.finish(*a)))


def packed(results: list[Array]) -> list[Array]:
    return [results[0], *(jnp.packbits(r, axis=-1) for r in results[1:])]


def packing(one: Implementation) -> Implementation:
    def bits(saved):
        return {n: jnp.unpackbits(a, axis=-1).astype(bool) if n == "mask" else a for n, a in saved.items()}

    return replace(
        one,
        forward=lambda *a, **k: packed(one.forward(*a, **k)),
        tangent=lambda saved, *a, **k: one.tangent(bits(saved), *a, **k),
        cotangent=lambda saved, *a, **k: one.cotangent(bits(saved), *a, **k),
    )


PACKED = Packed()


@contextlib.contextmanager
def registered() -> Iterator[pytest.MonkeyPatch]:
    """Ops have an opaque implementation, which notes what it sees."""
    unsplit = replace(OPAQUE, name="unsplit", opaque=False)
    with pytest.MonkeyPatch.context() as patch:

        def give(op: type[Op], *more: Implementation) -> None:
            patch.setattr(op, "implementations", {**op.implementations, **{one.name: one for one in more}})

        give(GemmEpilogue, OPAQUE, unsplit)
        patch.setattr(Packed, "implementations", {n: packing(one) for n, one in GemmEpilogue.implementations.items()})
        for op in (LAYER_NORM, GROUP_NORM, DOT_PRODUCT_ATTENTION, LERP, GATED_MATMUL):
            one = op.implementations["xla"]
            give(type(op), replace(one, name="opaque", forward=noting(one), opaque=True))
        yield patch


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """In all threads, as `jax.enable_x64` is not: XLA asks how an op is split from a thread of its own."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


@contextlib.contextmanager
def surroundings() -> Iterator[None]:
    with in_float64(), registered():
        yield


def noting(one: Implementation) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        note("call", **{slot: a for slot, a in kwargs.items() if isinstance(a, jax.Array)})
        return one.forward(*args, **kwargs)

    return forward


# The truth, in numpy's float64.


def arrays(*shapes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=s) / 2 for s in shapes)


ARGS = arrays((M, K), (K, N), (N,))


def truth(activation: str, x: np.ndarray, w: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, tuple, np.ndarray]:
    """out, the gradients of sum(sin(out)), and the tangent of out along (cos 3x, cos 3w, cos 3b)."""
    h = x @ w + b
    out, slope = {"tanh": (np.tanh(h), 1 / np.cosh(h) ** 2), "relu": (np.maximum(h, 0), (h > 0) * 1.0)}[activation]
    dh = np.cos(out) * slope
    moved = slope * (np.cos(3 * x) @ w + x @ np.cos(3 * w) + np.cos(3 * b))
    return out, (dh @ w.T, x.T @ dh, dh.sum(0)), moved


def gemm(activation: str = "tanh", implementation: str = "opaque", op: Any = GEMM_EPILOGUE) -> Callable[..., Array]:
    return lambda *a: op.call(*a, activation=activation, implementation=implementation)


def everything(f: Callable[..., Array]) -> Callable[..., Any]:
    """A function that gives what `truth` gives."""

    def run(*a: Array) -> Any:
        grads = jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), (0, 1, 2))(*a)
        return f(*a), grads, jax.jvp(f, a, tuple(jnp.cos(3 * v) for v in a))[1]

    return run


def gradients(f: Callable[..., Array]) -> Callable[..., Any]:
    return jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), (0, 1, 2))


def close(got: Any, want: Any, what: Any = "") -> None:
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want), what
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=1e-9, atol=1e-9, err_msg=str(what))


def mesh_of(axes: dict[str, int], kind: AxisType = AxisType.Auto) -> Any:
    sizes = tuple(axes.values())
    return jax.make_mesh(sizes, tuple(axes), axis_types=(kind,) * len(sizes), devices=jax.devices()[: math.prod(sizes)])


def placed(mesh: Any, *specs: P, args: tuple = ARGS) -> list[Array]:
    return [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs, strict=True)]


def compiled(f: Callable[..., Any], args: list[Array]) -> tuple[Any, str]:
    """The result and the optimised program; SEEN is what was traced for the devices."""
    SEEN.clear()
    built = jax.jit(f).lower(*args).compile()
    return built(*args), built.as_text()


def local(role: str) -> dict[str, tuple[int, ...]]:
    """The shapes a device sees: the last noted, since the whole is traced first."""
    return [shapes for r, shapes in SEEN if r == role][-1]


def count(text: str, what: str) -> int:
    return text.count(f" {what}(") + text.count(f" {what}-start(")


LINE, SQUARE = {"d": 4}, {"a": 2, "b": 2}
BATCH, COLUMNS, ROWS = (P("d"), P(), P()), (P(), P(None, "d"), P("d")), (P(None, "d"), P("d"), P())


def specs_of(choice: tuple[tuple[str, str], ...]) -> tuple[P, P, P]:
    """Specs of x, w, bias; `choice` has for each mesh axis the axis of x and the one of w it splits ("" for none)."""
    names = "ab" if len(choice) == 2 else "d"
    split = lambda side, label: tuple(n for n, c in zip(names, choice, strict=True) if c[side] == label) or None  # noqa: E731
    return P(split(0, "m"), split(0, "k")), P(split(1, "k"), split(1, "n")), P(split(1, "n"))


@trial
def every_sharding_over_one_mesh_axis() -> None:
    for choice in itertools.product(("", "m", "k"), ("", "k", "n")):
        specs = specs_of((choice,))
        for activation in ("tanh", "relu"):
            got, _ = compiled(everything(gemm(activation)), placed(mesh_of(LINE), *specs))
            close(got, truth(activation, *ARGS), specs)


def shardings_over_two_mesh_axes(step: int) -> None:
    one = tuple(itertools.product(("", "m", "k"), ("", "k", "n")))
    for choice in list(itertools.product(one, one))[::step]:
        specs = specs_of(choice)
        got, _ = compiled(everything(gemm()), placed(mesh_of(SQUARE), *specs))
        close(got, truth("tanh", *ARGS), specs)


@trial
def some_shardings_over_two_mesh_axes() -> None:
    shardings_over_two_mesh_axes(7)  # of 81; 7 divides none of the periods


@trial
def every_sharding_over_two_mesh_axes() -> None:
    shardings_over_two_mesh_axes(1)


@trial
def split_rows_move_no_data_but_the_sums_of_the_parameters_gradients() -> None:
    args = placed(mesh_of(LINE), *BATCH)
    _, text = compiled(gemm(), args)
    assert "lapack" in text
    assert not count(text, "all-gather")
    assert not count(text, "all-reduce")
    assert local("call") == {"x": (M // 4, K), "w": (K, N), "bias": (N,)}
    _, text = compiled(gradients(gemm()), args)
    assert not count(text, "all-gather")
    assert 1 <= count(text, "all-reduce") <= 2
    assert local("cotangent") == {"ct": (M // 4, N), "x": (M // 4, K), "w": (K, N), "preactivation": (M // 4, N)}


@trial
def the_same_code_without_a_rule_gathers_everything() -> None:
    _, text = compiled(gemm(implementation="unsplit"), placed(mesh_of(LINE), *BATCH))
    assert "lapack" in text
    assert local("call")["x"] == (M, K)
    assert count(text, "all-gather")


@trial
def split_columns_keep_the_weight_where_it_is() -> None:
    args = placed(mesh_of(LINE), *COLUMNS)
    _, text = compiled(gemm(), args)
    assert not count(text, "all-gather")
    assert local("call") == {"x": (M, K), "w": (K, N // 4), "bias": (N // 4,)}
    _, text = compiled(gradients(gemm()), args)
    assert not count(text, "all-gather")
    assert count(text, "all-reduce") == 1  # of dx
    assert local("cotangent")["w"] == (K, N // 4)


@trial
def split_products_are_summed_once_before_bias_and_activation() -> None:
    args = placed(mesh_of(LINE), *ROWS)
    _, text = compiled(gemm(), args)
    assert not count(text, "all-gather")
    assert count(text, "all-reduce") == 1
    assert local("call") == {"x": (M, K // 4), "w": (K // 4, N)}  # the bias is added after the sum
    _, text = compiled(gradients(gemm()), args)
    assert not count(text, "all-gather")
    assert count(text, "all-reduce") == 1
    assert local("cotangent") == {"ct": (M, N), "x": (M, K // 4), "w": (K // 4, N), "preactivation": (M, N)}


@trial
def rows_and_columns_over_two_mesh_axes_meet_without_a_gather() -> None:
    specs = P("a"), P(None, "b"), P("b")
    got, text = compiled(everything(gemm("relu")), placed(mesh_of(SQUARE), *specs))
    close(got, truth("relu", *ARGS))
    assert not count(text, "all-gather")
    assert local("cotangent")["mask"] == (M // 2, N // 2)


@trial
def one_mesh_axis_wanted_twice_splits_what_has_more_bytes() -> None:
    specs = P("d"), P("d"), P()  # data parallel, the weight stored in parts
    got, _ = compiled(everything(gemm()), placed(mesh_of(LINE), *specs))
    close(got, truth("tanh", *ARGS))
    assert local("call")["x"] == (M // 4, K)
    assert local("call")["w"] == (K, N)


@trial
def several_row_axes_a_turned_weight_and_no_bias() -> None:
    x, w = arrays((4, K, 8), (N, K))
    f = lambda x, w: GEMM_EPILOGUE.call(  # noqa: E731
        x, w, activation="tanh", x_contract=1, w_contract=1, implementation="opaque"
    )
    plain = lambda x, w: jnp.tanh(jnp.einsum("akb,nk->abn", x, w))  # noqa: E731
    loss = lambda f: jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(f(*a))), (0, 1))  # noqa: E731
    want = jax.jit(loss(plain))(x, w)
    for specs in ((P("a", None, "b"), P()), (P("a", "b"), P(None, "b")), (P(None, None, "b"), P("a"))):
        got, text = compiled(loss(f), placed(mesh_of(SQUARE), *specs, args=(x, w)))
        close(got, want, specs)
        assert not count(text, "all-gather")


@trial
def an_axis_that_does_not_divide_is_not_split() -> None:
    x, w, b = arrays((6, K), (K, N), (N,))
    mesh = mesh_of(LINE)

    def f(x: Array, w: Array, b: Array) -> Array:
        x = jax.lax.with_sharding_constraint(jnp.concatenate([x, x])[:6], NamedSharding(mesh, P("d")))
        return gemm()(x, w, b)

    got, _ = compiled(everything(f), placed(mesh, P(), P(), P(), args=(x, w, b)))
    close(got[1], truth("tanh", x, w, b)[1])
    close(got[0], truth("tanh", x, w, b)[0])


@trial
def a_packed_residual_is_split_by_the_byte() -> None:
    for specs in (BATCH, COLUMNS, ROWS):
        got, text = compiled(everything(gemm("relu", op=PACKED)), placed(mesh_of(LINE), *specs))
        close(got, truth("relu", *ARGS), specs)
        assert not count(text, "all-gather"), specs
    args = arrays((M, K), (K, 8), (8,))  # one byte: nothing to split
    got, _ = compiled(everything(gemm("relu", op=PACKED)), placed(mesh_of(LINE), *COLUMNS, args=args))
    close(got, truth("relu", *args))


@trial
def explicit_meshes() -> None:
    for axes, specs in ((LINE, BATCH), (LINE, COLUMNS), (SQUARE, (P("a"), P(None, "b"), P("b")))):
        mesh = mesh_of(axes, AxisType.Explicit)
        for inside in (True, False):
            args = placed(mesh, *specs)
            if inside:
                with jax.set_mesh(mesh):
                    got, text = compiled(everything(gemm("relu")), args)
            else:
                got, text = compiled(everything(gemm("relu")), args)
            close(got, truth("relu", *ARGS), specs)
            assert not count(text, "all-gather"), specs
            assert got[0].sharding.spec == P(
                specs[0][0] if specs[0] else None, *([specs[1][1]] if len(specs[1]) > 1 else [None])
            )


@trial
def a_mesh_that_only_the_context_knows() -> None:
    def f(x: Array, w: Array, b: Array) -> Array:
        return gemm()(jax.lax.with_sharding_constraint(x, spec), w, b)

    for axes, spec in ((LINE, P("d")), (LINE, P(None, "d")), (SQUARE, P("b", "a")), (SQUARE, P(("b", "a")))):
        with jax.set_mesh(mesh_of(axes)):
            got, _ = compiled(everything(f), [jnp.asarray(a) for a in ARGS])
            close(got, truth("tanh", *ARGS), spec)
            shards = [4 if axes is LINE or len(spec) == 1 else 2, 1]
            rows = M // shards[0] if spec[0] else M
            assert local("call")["x"][0] == rows, spec


@trial
def the_old_partitioner() -> None:
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        for axes, specs in ((LINE, BATCH), (LINE, COLUMNS), (LINE, ROWS), (SQUARE, (P("a", "b"), P("b"), P()))):
            got, text = compiled(everything(gemm()), placed(mesh_of(axes), *specs))
            close(got, truth("tanh", *ARGS), specs)
            if specs is BATCH:
                assert local("call")["x"] == (M // 4, K)
                assert not count(text, "all-gather")
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


@trial
def shard_map_needs_no_splitting() -> None:
    specs = P("a"), P(None, "b"), P("b")
    mesh = mesh_of(SQUARE)
    for check in (True, False):
        f = jax.shard_map(gemm(), mesh=mesh, in_specs=specs, out_specs=P("a", "b"), check_vma=check)
        got, _ = compiled(everything(f), placed(mesh, *specs))
        close(got, truth("tanh", *ARGS), check)
        lowered = jax.jit(gradients(f)).lower(*placed(mesh, *specs)).as_text()
        assert "CustomSPMDPartitioning" not in lowered


@trial
def shard_map_that_leaves_axes_to_xla_is_refused_by_name_and_runs_the_meaning_otherwise() -> None:
    mesh = mesh_of(SQUARE)
    args = placed(mesh, P("a", "b"), P("b"), P())
    over_a = partial(jax.shard_map, mesh=mesh, in_specs=(P("a"), P(), P()), out_specs=P("a"), axis_names={"a"})
    with pytest.raises(BackendError, match=r"leaves mesh axes \(b\) to XLA"):
        jax.jit(over_a(gemm())).lower(*args)
    rule, GemmEpilogue.decide = GemmEpilogue.decide, lambda *a, **k: OPAQUELY
    try:
        f = lambda *a: GEMM_EPILOGUE.call(*a, activation="tanh")  # noqa: E731
        got, text = compiled(everything(over_a(f)), args)
        close(got, truth("tanh", *ARGS))
        assert "lapack" not in text
        assert "lapack" in compiled(f, args)[1]
    finally:
        GemmEpilogue.decide = rule


@trial
def a_part_that_the_implementation_refuses_is_computed_by_another() -> None:
    few = replace(OPAQUE, unable=lambda shapes, device, **_: "few rows" if shapes["x"].shape[0] < M else None)

    def decide(self, role, shapes, device, **attrs):
        refused = "x" in shapes and few.refuses(shapes, device)
        return replace(OPAQUELY, implementation="xla") if refused else OPAQUELY

    rule, GemmEpilogue.decide = GemmEpilogue.decide, decide
    try:
        f = lambda *a: GEMM_EPILOGUE.call(*a, activation="tanh")  # noqa: E731
        got, text = compiled(f, placed(mesh_of(LINE), *BATCH))
        close(got, truth("tanh", *ARGS)[0])
        assert "lapack" not in text
        assert not count(text, "all-gather")
    finally:
        GemmEpilogue.decide = rule


def norm(implementation: str) -> Callable[..., Array]:
    return lambda *a: LAYER_NORM.call(*a, axis=-1, implementation=implementation)


@trial
def an_axis_that_statistics_run_over_is_gathered_and_rows_are_not() -> None:
    args = arrays((2, M, N), (N,), (N,))
    want = jax.jit(everything(norm("xla")))(*args)
    for specs, shape in (
        ((P("a", "b"), P(), P()), (1, M // 2, N)),
        ((P(None, ("a", "b")), P("a"), P()), (2, M // 4, N)),
        ((P("a", None, "b"), P("b"), P("b")), (1, M, N)),
    ):
        got, _ = compiled(everything(norm("opaque")), placed(mesh_of(SQUARE), *specs, args=args))
        close(got, want, specs)
        assert local("call")["x"] == shape, specs
    _, text = compiled(gradients(norm("opaque")), placed(mesh_of(SQUARE), P("a", "b"), P(), P(), args=args))
    assert not count(text, "all-gather")


def images_in_groups(implementation: str) -> Callable[..., Array]:
    return lambda *a: GROUP_NORM.call(*a, groups=2, activation="silu", implementation=implementation)


@trial
def images_of_a_group_norm_are_split_and_positions_and_channels_are_not() -> None:
    args = arrays((4, 4, 8), (8,), (8,))
    want = jax.jit(everything(images_in_groups("xla")))(*args)
    for specs, shape in (
        ((P("a"), P(), P()), (2, 4, 8)),
        ((P(("a", "b")), P(), P()), (1, 4, 8)),
        ((P("a", "b"), P("a"), P()), (2, 4, 8)),
        ((P(None, None, "b"), P("b"), P("b")), (4, 4, 8)),
    ):
        got, _ = compiled(everything(images_in_groups("opaque")), placed(mesh_of(SQUARE), *specs, args=args))
        close(got, want, specs)
        assert local("call")["x"] == shape, specs
    _, text = compiled(gradients(images_in_groups("opaque")), placed(mesh_of(SQUARE), P("a"), P(), P(), args=args))
    assert not count(text, "all-gather")


@trial
def two_results_are_split_alike_and_their_gradients_added_up() -> None:
    def norm_and_sum(implementation: str) -> Callable[..., Array]:
        def both(x: Array, scale: Array, bias: Array, shift: Array, residual: Array) -> Array:
            given = {"axis": -1, "gives_sum": True, "implementation": implementation}
            out, total = LAYER_NORM.call(x, scale, bias, shift, residual, **given)
            return jnp.stack([out, total])

        return both

    args = arrays((2, M, N), (N,), (N,), (N,), (2, M, N))
    want = jax.jit(everything(norm_and_sum("xla")))(*args)
    rows = P("a", "b")
    for specs in (
        (rows, P(), P(), P(), rows),
        (rows, P("a"), P(), P("b"), P()),
        (P(), P(), P(), P(), P(None, ("a", "b"))),
    ):
        got, _ = compiled(everything(norm_and_sum("opaque")), placed(mesh_of(SQUARE), *specs, args=args))
        close(got, want, specs)
    got, text = compiled(
        gradients(norm_and_sum("opaque")), placed(mesh_of(SQUARE), rows, P(), P(), P(), rows, args=args)
    )
    assert not count(text, "all-gather")
    assert local("call")["residual"] == (1, M // 2, N)


@trial
def a_cotangent_given_as_a_sum_is_split_as_one() -> None:
    def gradients(implementation: str) -> Callable[..., Any]:
        def of(x: Array, scale: Array, a: Array, b: Array, c: Array) -> Any:
            return jax.vjp(lambda x, scale: norm(implementation)(x, scale), x, scale)[1]((a + b) + c)

        return adding(of)

    args = arrays((2, M, N), (N,), *((2, M, N),) * 3)
    want = jax.jit(gradients("xla"))(*args)
    rows = P("a", "b")
    for specs in (
        (rows, P(), rows, rows, rows),
        (rows, P("a"), rows, P(), P(None, ("a", "b"))),
        (P(), P(), P(), rows, P()),
    ):
        got, _ = compiled(gradients("opaque"), placed(mesh_of(SQUARE), *specs, args=args))
        close(got, want, specs)
    _, text = compiled(gradients("opaque"), placed(mesh_of(SQUARE), rows, P(), rows, rows, rows, args=args))
    assert not count(text, "all-gather")


@trial
def arrays_whose_sum_is_a_cotangent_are_added_up_before_it_is_split() -> None:
    """XLA sums the sum of two products over the devices once, where it sees the sum."""

    def of(x: Array, scale: Array, a: Array, b: Array, w: Array) -> Any:
        return jax.vjp(lambda x, scale: norm("opaque")(x, scale), x, scale)[1](a @ w + b @ w)

    args = arrays((M, N), (N,), (M, 2 * N), (M, 2 * N), (2 * N, N))
    given = placed(mesh_of({"a": 2}), P(), P(), P(None, "a"), P(None, "a"), P("a"), args=args)
    close(compiled(adding(of), given)[0], jax.jit(of)(*args))
    lowered = jax.jit(adding(of)).lower(*given).as_text()
    (call,) = [
        line
        for line in lowered.splitlines()
        if "@CustomSPMDPartitioning" in line and f"-> (tensor<{M}x{N}xf64>, tensor<{N}xf64>)" in line
    ]
    assert call.partition(" -> ")[0].count(f"tensor<{M}x{N}xf64>") == 2  # x and one cotangent


@trial
def a_blend_is_split_along_every_axis_and_sums_of_its_parts_are_added_up() -> None:
    blend = lambda name: everything(blend_of(name))  # noqa: E731
    args = arrays((8, 1, 4), (8, 16, 4), (16, 1))
    want = jax.jit(blend("xla"))(*args)
    for specs, shapes in (
        ((P("a"), P("a", "b"), P("b")), {"x": (4, 1, 4), "y": (4, 8, 4), "w": (1, 8, 1)}),
        ((P(), P(None, ("a", "b")), P()), {"x": (8, 1, 4), "y": (8, 4, 4), "w": (1, 4, 1)}),
        ((P("b", None, "a"), P("b", None, "a"), P()), {"x": (4, 1, 2), "y": (4, 16, 2), "w": (1, 16, 1)}),
    ):
        got, text = compiled(blend("opaque"), placed(mesh_of(SQUARE), *specs, args=args))
        close(got, want, specs)
        assert local("call") == shapes, specs
        _, text = compiled(gradients(blend_of("opaque")), placed(mesh_of(SQUARE), *specs, args=args))
        assert not count(text, "all-gather"), specs


def pair(implementation: str) -> Callable[..., Any]:
    return partial(fl.ops.gated_matmul, implementation=implementation)


@trial
def a_gated_pair_is_split_along_rows_and_columns_and_contracts_whole() -> None:
    args = arrays((2, M, K), (K, N), (K, N))
    want = jax.jit(everything(pair("xla")))(*args)
    whole = {"x": (2, M, K), "w": (K, N), "v": (K, N)}
    columns = P(None, ("a", "b"))
    for specs, changed in (
        ((P("a", "b"), P(), P()), {"x": (1, M // 2, K)}),
        ((P(), columns, columns), {"w": (K, N // 4), "v": (K, N // 4)}),
        ((P("a"), P(None, "b"), P(None, "b")), {"x": (1, M, K), "w": (K, N // 2), "v": (K, N // 2)}),
        ((P(None, None, "a"), P("a"), P("a")), {}),
    ):
        for name in ("opaque", "concatenated"):
            got, _ = compiled(everything(pair(name)), placed(mesh_of(SQUARE), *specs, args=args))
            close(got, want, (specs, name))
            if name == "opaque":
                assert local("call") == whole | changed, specs
    for name in ("xla", "concatenated"):
        specs = P("a"), P(None, "b"), P(None, "b")
        got, _ = compiled(everything(pair(name)), placed(mesh_of(SQUARE, AxisType.Explicit), *specs, args=args))
        close(got, want, ("explicit", name))
    text = compiled(
        gradients(pair("opaque")), placed(mesh_of(LINE), P("d"), P(), P(), args=arrays((4, M, K), (K, N), (K, N)))
    )[1]
    assert not count(text, "all-gather")


def blend_of(implementation: str) -> Callable[..., Array]:
    return partial(fl.ops.lerp, implementation=implementation)


def sharing(layout: str, implementation: str) -> Callable[..., Any]:
    attend = fl.ops.dot_product_attention
    return everything(partial(attend, is_causal=True, layout=layout, implementation=implementation))


@trial
def query_heads_are_split_with_the_key_heads_that_they_share() -> None:
    for key_heads, kind, layout, there in (
        (4, AxisType.Auto, "BTNH", (2, 1)),
        (2, AxisType.Auto, "BNTH", (8, 2)),  # four devices have no part of two heads each
        (1, AxisType.Auto, "BTNH", (8, 1)),
        (4, AxisType.Explicit, "BTNH", (2, 1)),
        (4, AxisType.Explicit, "BNTH", (2, 1)),
        (1, AxisType.Explicit, "BNTH", (8, 1)),
    ):
        shapes = ((2, 5, 8, 4), (2, 6, key_heads, 4), (2, 6, key_heads, 4))
        heads = 2 if layout == "BTNH" else 1
        args = tuple(np.swapaxes(a, 1, 2) if heads == 1 else a for a in arrays(*shapes))
        want = jax.jit(sharing(layout, "xla"))(*args)
        split = P(*[None] * heads, "d")
        specs = split, *[split if key_heads % 4 == 0 else P()] * 2
        for name in ("xla", "opaque"):
            got, _ = compiled(sharing(layout, name), placed(mesh_of(LINE, kind), *specs, args=args))
            close(got, want, (key_heads, kind, layout, name))
        assert tuple(local("call")[slot][heads] for slot in ("query", "key")) == there, (key_heads, kind)


@trial
def an_op_that_names_no_axes_is_computed_whole() -> None:
    attention = type(DOT_PRODUCT_ATTENTION)
    named, attention.labels = attention.labels, Op.labels
    try:
        args = arrays(*[(4, 6, 2, 4)] * 3)
        attend = lambda name: everything(partial(fl.ops.dot_product_attention, implementation=name))  # noqa: E731
        want = jax.jit(attend("xla"))(*args)
        for spec in (P("d"), P(None, None, None, "d")):
            got, _ = compiled(attend("opaque"), placed(mesh_of(LINE), spec, spec, spec, args=args))
            close(got, want, spec)
            assert local("call") == dict.fromkeys(("query", "key", "value"), (4, 6, 2, 4))
    finally:
        attention.labels = named


def in_scan(f: Callable[..., Array]) -> Callable[..., Array]:
    def run(x: Array, w: Array, b: Array) -> Array:
        step = jax.checkpoint(lambda x, _: (f(x, w, b) @ w.T, None))
        return f(jax.lax.scan(step, x, None, length=2)[0], w, b)

    return run


@trial
def transformations_around_it() -> None:
    plain = lambda x, w, b: jnp.tanh(x @ w + b)  # noqa: E731
    square = lambda f: lambda *a: sum(jnp.sum(g**2) for g in gradients(f)(*a))  # noqa: E731
    programs = {
        "scan and remat": lambda f: gradients(in_scan(f)),
        "gradient of a gradient": lambda f: jax.grad(square(f), (0, 1, 2)),
        "vmap of the rows": lambda f: jax.vmap(gradients(f), (0, None, None)),
        "vmap of the weights": lambda f: (
            lambda x, w, b: jax.vmap(f, (None, 0, 0))(x[0], jnp.stack([w, -w]), jnp.stack([b, b]))
        ),
        "jit inside": lambda f: gradients(jax.jit(f)),
        "hessian": lambda f: jax.hessian(lambda b: jnp.sum(jnp.sin(f(*map(jnp.asarray, ARGS[:2]), b)))),
    }
    for name, make in programs.items():
        for specs in (BATCH, COLUMNS, ROWS):
            args = placed(mesh_of(LINE), *specs)
            if name.startswith("vmap"):
                args[0] = jnp.stack([args[0], -args[0]])
            if name == "hessian":
                args = args[2:]
            close(jax.jit(make(gemm()))(*args), jax.jit(make(plain))(*map(np.asarray, args)), (name, specs))


@trial
def eager_donated_ahead_of_time_and_with_shardings_asked_for() -> None:
    mesh, want = mesh_of(LINE), truth("tanh", *ARGS)
    for specs in (BATCH, COLUMNS, ROWS):
        close(everything(gemm())(*placed(mesh, *specs)), want, specs)
        close(jax.jit(gradients(gemm()), donate_argnums=(0, 1, 2))(*placed(mesh, *specs)), want[1], specs)
        shardings = tuple(NamedSharding(mesh, s) for s in specs)
        out = NamedSharding(mesh, P(None, "d"))
        asked = jax.jit(gemm(), in_shardings=shardings, out_shardings=out)
        got = asked.lower(*ARGS).compile()(*placed(mesh, *specs))
        assert got.sharding == out
        close(got, want[0], specs)


@trial
def on_one_device_nothing_is_split() -> None:
    lowered = jax.jit(everything(gemm())).lower(*map(jnp.asarray, ARGS)).as_text()
    assert "lapack" in lowered
    assert "CustomSPMDPartitioning" not in lowered
    whole = jax.jit(gemm()).lower(*placed(mesh_of(LINE), *BATCH)).as_text()
    assert "CustomSPMDPartitioning" in whole


@trial
def a_call_that_xla_runs_is_as_before() -> None:
    del GemmEpilogue.implementations["opaque"]
    try:
        text = str(jax.make_jaxpr(gemm(implementation="xla"))(*ARGS))
        assert "by_label" not in text
    finally:
        GemmEpilogue.implementations["opaque"] = OPAQUE
    lowered = jax.jit(gradients(gemm(implementation="xla"))).lower(*placed(mesh_of(LINE), *BATCH)).as_text()
    assert "CustomSPMDPartitioning" not in lowered


@trial
def a_trace_shows_one_node_and_no_region() -> None:
    text = str(jax.make_jaxpr(gradients(gemm()))(*ARGS))
    assert "partitioned=by_label" in text
    assert "custom_partitioning" not in text
    graph = fl.trace(gradients(gemm()), *ARGS)
    fused = [n for n in graph.top.nodes if n.primitive.startswith("gemm_epilogue")]
    assert [n.primitive for n in fused] == ["gemm_epilogue", "gemm_epilogue_cotangent"]
    assert not any(n.blocks for n in fused)
    assert "custom_partitioning" not in str(graph)
    site = lambda x, w, b: jnp.tanh(x @ w + b)  # noqa: E731
    fused = fl.fuse(lambda x, w, b: site(site(x, w, b) @ w.T, w, b), implementation="opaque")
    args = placed(mesh_of(LINE), *BATCH)
    got, text = compiled(fused, args)
    close(got, jax.jit(lambda x, w, b: site(site(x, w, b) @ w.T, w, b))(*ARGS))
    assert "lapack" in text
    assert not count(text, "all-gather")
