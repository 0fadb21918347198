"""The op matmul: values, gradients, transformations, refusals; cuBLASLt's calls run by numpy, the kernels as C++."""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionlab import ops
from fusionlab.device import Device
from fusionlab.errors import ROUTE_REASONS, ArgumentError, BackendError, UnknownNameError
from fusionlab.kernels.ops.matmul import routes, support
from fusionlab.kernels.ops.matmul.axes import ProductAxes, stored
from fusionlab.kernels.ops.matmul.op import MATMUL
from tests.kernels.emulated import kernels_on_the_cpu, run_here
from tests.kernels.emulated_blas import products_on_the_cpu
from tests.kernels.matmul.matmul_suite import BEHIND, PRODUCTS, MatmulSuite

MATRICES = (((1,), (0,)), ((), ()))
ARCHS = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "cpu")


def arrays(*shapes, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.uniform(-1, 1, s), dtype) for s in shapes]


class TestXla(MatmulSuite):
    implementation = "xla"
    least = 45
    every = dict.fromkeys(("bfloat16", "float32", "float16", "float64"), 4)
    slack = 3.0


class TestLibrary(MatmulSuite):
    """Each product by numpy from the buffers, leading dimensions, strides and epilogue that cuBLASLt would get."""

    implementation = "cublaslt"
    least = 30

    @pytest.fixture(autouse=True)
    def _by_numpy(self):
        with products_on_the_cpu(support) as plans:
            yield
        assert plans or not self.held

    def test_it_takes_what_it_is_there_for(self):
        takes = {name for name, case in (PRODUCTS | BEHIND).items() if self.takes(case, "bfloat16")}
        assert (PRODUCTS | BEHIND).keys() - takes == {"apart in b", "the batch last", "heads between"}


@pytest.mark.parametrize("name", BEHIND)
def test_a_product_with_all_that_stands_behind_it_is_one_call(name):
    suite = TestLibrary()
    with products_on_the_cpu(support) as plans:
        assert suite.check(BEHIND[name], "bfloat16", "relu") == 1
    assert len(plans) == 2  # one that keeps what a backward reads, one that does not


class TestKernel(MatmulSuite):
    implementation = "cuda"
    least = 4
    mixed = 1

    @pytest.fixture(autouse=True)
    def _as_cpp(self, emulator):
        with kernels_on_the_cpu(emulator) as book, pytest.MonkeyPatch.context() as patch:
            run_here(patch, [support])
            yield
            assert book.counters()["launches"] or not self.held


@pytest.mark.parametrize("implementation", ["xla", "cublaslt"])
@pytest.mark.parametrize("axes", [(0, None, None), (0, 0, None), (None, 0, None), (1, 1, 0), (0, None, 0)])
def test_a_batch_of_calls_and_its_gradients(axes, implementation):
    a, b, bias = arrays((5, 3), (3, 4), (5, 1))
    batched = [
        one if d is None else jnp.stack([one, one + 1, one * 2], d) for one, d in zip((a, b, bias), axes, strict=True)
    ]

    def fused(a, b, bias):
        return ops.matmul(a, b, bias, alpha=2.0, beta=0.5, activation="gelu_tanh", implementation=implementation)

    def plain(a, b, bias):
        return jax.nn.gelu(2.0 * (a @ b) + 0.5 * bias)

    with products_on_the_cpu(support):
        for of in (
            lambda f: jax.vmap(f, axes),
            lambda f: jax.vmap(jax.grad(lambda *x: (f(*x) ** 2).sum(), (0, 1, 2)), axes),
            lambda f: jax.vmap(jax.grad(lambda *x: (f(*x) ** 2).sum()), axes),
        ):
            alike(jax.jit(of(fused))(*batched), jax.jit(of(plain))(*batched))


def test_a_batch_of_both_operands_is_a_batch_of_products_and_one_of_rows_is_more_rows():
    a, b = arrays((5, 3), (3, 4))
    for axes, inner in (((0, 0), (5, 3, 4)), ((0, None), (5, 3, 4))):
        given = [jnp.stack([one] * 2) if d == 0 else one for one, d in zip((a, b), axes, strict=True)]
        (eqn,) = jax.make_jaxpr(jax.vmap(ops.matmul, axes))(*given).jaxpr.eqns
        assert eqn.primitive.name == "matmul"
        product = ProductAxes.of(*(v.aval.shape for v in eqn.invars), eqn.params["dimensions"])
        assert product.batch == ((2,) if axes[1] == 0 else ())
        assert product.inner == (inner[1],)


def test_second_derivatives_and_forward_mode():
    a, b, bias = arrays((5, 3), (3, 4), (4,))

    def fused(a):
        return ops.matmul(a, b, bias, alpha=0.5, activation="gelu_tanh").sum()

    def plain(a):
        return jax.nn.gelu(0.5 * (a @ b) + bias).sum()

    alike(*(jax.jit(jax.hessian(f))(a) for f in (fused, plain)))
    alike(jax.jvp(fused, (a,), (a + 1,)), jax.jit(lambda a: jax.jvp(plain, (a,), (a + 1,)))(a))


def test_inside_a_shard_map_an_operand_that_does_not_vary_gets_the_sum_of_its_gradients():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec
    a, b, bias = arrays((8, 4), (4, 6), (6,))

    def loss(a, b, bias):
        return (ops.matmul(a, b, bias, alpha=2.0, activation="relu") ** 2).sum()

    def inside(a, b, bias):
        return jax.grad(lambda *args: jax.lax.psum(loss(*args), "d"), (0, 1, 2))(a, b, bias)

    specs = (P("d"), P(), P())
    got = jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=specs, out_specs=specs))(a, b, bias)
    for g, want in zip(got, jax.grad(loss, (0, 1, 2))(a, b, bias), strict=True):
        np.testing.assert_allclose(g, want, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_a_product_summed_in_float32_has_the_operands_dtype():
    a, b = arrays((8, 16), (16, 4), dtype=jnp.bfloat16)

    def loss(f):
        return jax.grad(lambda a, b: (f(a, b) ** 2).sum(), (0, 1))(a, b)

    wide = loss(lambda a, b: a.astype(jnp.float32) @ b.astype(jnp.float32))
    mine = loss(lambda a, b: ops.matmul(a, b, product="float32"))
    assert [g.dtype for g in mine] == [jnp.bfloat16] * 2
    for got, want in zip(mine, wide, strict=True):
        assert (got == want).all()


def alike(got, want):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


REFUSED = {
    "a": (((3,), (3, 4)), {}, "a has shape"),
    "b": (((2, 3), (4, 3)), {}, "differ along their contracted axes"),
    "bias": (((2, 3), (3, 4), (3,)), {}, "bias has shape"),
    "rank": (((2, 3), (3, 4), (1, 2, 4)), {}, "bias has shape"),
    "alpha": (((2, 3), (3, 4)), {"alpha": math.nan}, "alpha is nan"),
    "beta": (((2, 3), (3, 4)), {"beta": True}, "beta is True"),
    "out": (((2, 3), (3, 4)), {"out": "int32"}, "out is int32"),
    "product": (((2, 3), (3, 4)), {"product": "no"}, "product is 'no'"),
    "dimensions": (((2, 3), (3, 4)), {"dimensions": 3}, "dimensions is 3"),
    "axis": (((2, 3), (3, 4)), {"dimensions": (((1,), (5,)), ((), ()))}, "contracted axes"),
    "library": (((2, 3), (3, 4)), {"library": "yes"}, "library is 'yes'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_refused_by_name(name):
    shapes, attrs, words = REFUSED[name]
    with pytest.raises(ArgumentError, match=words):
        ops.matmul(*arrays(*shapes), **attrs)


def test_other_refusals():
    a, b = arrays((2, 3), (3, 4))
    with pytest.raises(ArgumentError, match="b is missing"):
        MATMUL.call(a, None)
    with pytest.raises(ArgumentError, match="a has dtype float32 and b bfloat16"):
        ops.matmul(a, b.astype(jnp.bfloat16))
    with pytest.raises(ArgumentError, match="a has dtype int32, needed a float"):
        ops.matmul(a.astype(jnp.int32), b)
    with pytest.raises(UnknownNameError, match=r"activation 'rely'.*Did you mean 'relu'"):
        ops.matmul(a, b, activation="rely")
    with pytest.raises(BackendError, match=r"'cublaslt' cannot run this call on .*CPU.*: it needs a CUDA device"):
        ops.matmul(a, b, implementation="cublaslt")


# -- in memory ------------------------------------------------------------------------------------------------------------------


@given(
    st.permutations(range(4)), st.lists(st.integers(1, 3), min_size=4, max_size=4), st.integers(0, 3), st.integers(0, 3)
)
@settings(max_examples=150, deadline=None)
def test_a_strided_matrix_is_read_as_the_array_has_it(order, shape, first, second):
    """Whatever the axes: where it is said to be a batch of strided matrices, those strides read the right entries."""
    first, second = sorted((first, second))
    free, contracted, batch = order[:first], order[first:second], order[second:]
    free = sorted(free)
    found = stored(shape, free, contracted, batch)
    if found is None:
        return
    array = np.arange(math.prod(shape)).reshape(shape)
    want = array.transpose(*batch, *free, *contracted)
    sizes = [math.prod(shape[i] for i in axes) for axes in (batch, free, contracted)]
    steps = (found.stride, 1, found.leading) if found.transposed else (found.stride, found.leading, 1)
    flat = array.reshape(-1)
    for i in itertools.product(*map(range, sizes)):
        assert flat[sum(a * b for a, b in zip(i, steps, strict=True))] == want.reshape(sizes)[i]


def test_what_is_no_strided_matrix_is_told():
    assert stored((4, 3, 5), (0,), (1,), (2,)) is None  # the batch last
    assert stored((4, 3, 5), (0, 2), (1,), ()) is None  # free axes apart
    assert stored((3, 4, 5), (0,), (2, 1), ()) is None  # contracted in another order than they lie
    assert stored((4, 3, 5), (0,), (2,), (1,)) is not None  # a batch between


# -- routes ---------------------------------------------------------------------------------------------------------------------


def asked(device, library=None, shapes=((64, 32), (32, 16)), dtype="bfloat16", **attrs):
    operands = {n: jax.ShapeDtypeStruct(s, dtype) for n, s in zip(("a", "b", "bias"), shapes, strict=False)}
    given, full = MATMUL.prepare(operands, {**attrs, "library": library})
    return MATMUL.routes(given, Device.of(device), **full)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("library", [None, True, False])
def test_the_decision_is_right_on_every_device_and_asks_nobody_before_its_support_is_known(arch, library, monkeypatch):
    supported: list[str] = []

    def lookup(*_):
        assert supported == ["library"] or library is False, (
            "measurements asked for before the library said what it supports"
        )
        return

    def watched(route):
        def supports(*args, **attrs):
            found = route.supports(*args, **attrs)
            if found is None:
                supported.append(route.name)
            return found

        return dataclasses.replace(route, supports=supports)

    monkeypatch.setattr(type(MATMUL), "measured", lookup)
    monkeypatch.setattr(routes, "ROUTES", tuple(map(watched, routes.ROUTES)))
    told = asked(arch, library)
    able = arch not in ("sm_70", "cpu")
    assert told[-1].takes
    assert told[-1].route.tag == ("evaluate" if able and library else "xla")
    assert [a.takes for a in told[:-1]] == [False] * (len(told) - 1)
    assert all(a.code in ROUTE_REASONS and a.sentence for a in told[:-1])
    codes = [a.code for a in told[:-1]]
    if library is False:
        assert codes[0] == "switch"
    elif not able:
        assert codes == ["device", "device"]
    elif library is None:
        assert codes == ["unmeasured", "nothing"]


@pytest.mark.parametrize(
    ("code", "more"),
    [
        ("dtype", {"dtype": "float32", "out": "bfloat16"}),
        ("dtype", {"product": "float64"}),
        ("precision", {"precision": "high"}),
        ("precision", {"precision": "BF16_BF16_F32"}),
        ("scale", {"alpha": 0.0}),
        ("scale", {"alpha": 1e-60}),
        ("scale", {"shapes": ((64, 32), (32, 16), (16,)), "bias_dtype": "bfloat16", "beta": 0.0}),
        ("axes", {"shapes": ((0, 32), (32, 16))}),
        ("axes", {"shapes": ((8, 32, 3), (32, 16, 3)), "dimensions": (((1,), (0,)), ((2,), (2,)))}),
        ("activation", {"activation": "silu"}),
        ("activation", {"activation": "gelu_tanh", "product": "float32"}),
        ("bias", {"shapes": ((64, 32), (32, 16), (16,)), "bias_dtype": "float32"}),
    ],
)
def test_the_library_says_why_it_does_not_take_a_product(code, more):
    given = {
        n: jax.ShapeDtypeStruct(s, more.get("dtype", "bfloat16") if n != "bias" else more["bias_dtype"])
        for n, s in zip(("a", "b", "bias"), more.get("shapes", ((64, 32), (32, 16))), strict=False)
    }
    attrs = {k: v for k, v in more.items() if k not in ("dtype", "shapes", "bias_dtype")}
    shapes, full = MATMUL.prepare(given, {**attrs, "library": True})
    told = MATMUL.routes(shapes, Device.of("sm_90"), **full)
    assert told[0].code == code
    assert told[0].sentence in str(told[0])
    with pytest.raises(BackendError, match="cublaslt"):
        MATMUL.choose(*given.values(), device="sm_90", implementation="cublaslt", **attrs)


@pytest.mark.parametrize("missing", ["nvmath", "cupy"])
def test_what_is_not_installed_is_named(missing):
    device = dataclasses.replace(Device.of("sm_90"), missing=(missing,))
    given, full = MATMUL.prepare(
        {"a": jax.ShapeDtypeStruct((8, 8), "float32"), "b": jax.ShapeDtypeStruct((8, 8), "float32")}, {"library": True}
    )
    told = MATMUL.routes(given, device, **full)
    assert told[0].code == "device"
    assert "fusionlab[cuda" in told[0].sentence
    assert told[-1].route.name == "xla"


def test_what_was_measured_decides_where_the_switch_is_not_set(monkeypatch):
    from fusionlab.kernels.choose.choices import Choice

    known = Choice("cublaslt", {"xla": 12.5, "cublaslt": 10.0}, {}, "a test")
    monkeypatch.setattr(type(MATMUL), "measured", lambda *_: known)
    assert asked("sm_90")[-1].route.tag == "evaluate"
    assert "measured: cublaslt 10 µs, xla 12.5 µs" in asked("sm_90")[-1].sentence
    monkeypatch.setattr(type(MATMUL), "measured", lambda *_: dataclasses.replace(known, implementation="xla"))
    told = asked("sm_90")
    assert (told[0].code, told[-1].route.tag) == ("slower", "xla")
    assert asked("sm_90", True)[-1].route.tag == "evaluate"  # asked for all the same


def test_a_case_says_all_its_speed_hangs_on():
    base = {"dtype": "bfloat16", "shapes": ((64, 32), (32, 16))}
    changed = [
        {"dtype": "float32"},
        {"shapes": ((65, 32), (32, 16))},
        {"dimensions": (((1,), (1,)), ((), ())), "shapes": ((64, 32), (16, 32))},
        {"dimensions": (((0,), (0,)), ((), ())), "shapes": ((32, 64), (32, 16))},
        {"product": "float32"},
        {"product": "float32", "out": "bfloat16"},
        {"alpha": 2.0},
        {"activation": "relu"},
        {"shapes": ((64, 32), (32, 16), (16,))},
        {"shapes": ((64, 32), (32, 16), (64, 1))},
        {"shapes": ((64, 32), (32, 16), (64, 1)), "beta": 2.0},
        {"shapes": ((64, 32), (32, 16), (16,)), "product": "float32"},
        {"shapes": ((64, 32), (32, 16), (16,)), "product": "float32", "bias": "float32"},
    ]

    def text(dtype, shapes, bias=None, **attrs):
        dtypes = (dtype, dtype, bias or dtype)
        given = zip(("a", "b", "bias"), shapes, dtypes, strict=False)
        operands = {n: jax.ShapeDtypeStruct(s, d) for n, s, d in given}
        given, full = MATMUL.prepare(operands, attrs)
        return MATMUL.case("call", given, **full)

    texts = [text(**base), *(text(**{**base, **more}) for more in changed)]
    assert len(set(texts)) == len(texts)


def test_along_what_a_bias_runs_is_told_by_its_axes():
    square = ProductAxes.of((32, 8), (8, 32), MATRICES)
    assert [square.bias(s) for s in ((32, 1), (1, 32), (1, 1), (32, 32))] == ["rows", "columns", "nothing", "all"]
    batch = ProductAxes.of((4, 32, 8), (4, 8, 32), (((2,), (1,)), ((0,), (0,))))
    assert [batch.bias(s) for s in ((1, 32, 1), (4, 1, 32), (1, 1, 32))] == ["rows", "batch", "columns"]
    parts = ProductAxes.of((4, 8, 5), (5, 6), (((2,), (0,)), ((), ())))
    assert [parts.bias(s) for s in ((4, 8, 1), (1, 8, 1), (1, 1, 6))] == ["rows", "all", "columns"]


def test_the_formula_reads_as_it_computes():
    assert MATMUL.formula() == "a @ b"
    text = MATMUL.formula(alpha=2.0, beta=0.5, bias=True, activation="relu", product="float32", out="bfloat16")
    assert text == "bfloat16(relu(2 * (a @ b) + 0.5 * bias))"
