"""A pass of one's own: a pattern by example, what runs in its place, and what is refused."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import fusionlab as fl
from fusionlab.errors import ArgumentError, BackendError, MissingDependencyError, UnknownNameError
from fusionlab.fusers.passes.custom import own_pass
from fusionlab.kernels.launch import compile as compiling
from fusionlab.kernels.launch.compile import CudaSource, compile_source
from fusionlab.kernels.launch.plans import launch_plan_of, plan_name
from fusionlab.kernels.op import own
from fusionlab.verbs.catalogue import Catalogue
from tests.kernels.emulated import kernels_on_the_cpu


def mish(x):
    return x * jnp.tanh(jax.nn.softplus(x))


def one_exp(x):
    """The same of one exponential; it would overflow above 44."""
    t = jnp.exp(jnp.minimum(x, 20))
    n = t * (t + 2)
    return x * n / (n + 2)


def overflows(x):
    t = jnp.exp(x)
    n = t * (t + 2)
    return x * n / (n + 2)


MISH = """
extern "C" __global__ void mish(const T* x, T* out, long long m) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i >= m) return;
  float v = (float)x[i], t = expf(fminf(v, 20.0f)), n = t * (t + 2.0f);
  out[i] = (T)(v * n / (n + 2.0f));
}
"""


def unit(x, epsilon):
    return x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + epsilon)


UNIT = """
extern "C" __global__ void unit(const T* x, T* out, long long m, long long n, float epsilon) {
  __shared__ float part[32];
  const T* row = x + blockIdx.x * n;
  float sum = 0;
  for (int j = threadIdx.x; j < n; j += 32) sum += row[j] * row[j];
  part[threadIdx.x] = sum;
  __syncthreads();
  sum = epsilon;
  for (int j = 0; j < 32; ++j) sum += part[j];
  for (int j = threadIdx.x; j < n; j += 32) out[blockIdx.x * n + j] = row[j] / sqrtf(sum);
}
"""


def softcap(x, cap):
    return cap * jnp.tanh(x / cap)


def mish_pass(**more):
    given = {"axes": {"x": "m"}, "implementations": {"xla": one_exp, "cuda": fl.CudaKernel(MISH)}}
    return fl.pattern_pass("mish", mish, **(given | {"formula": "x * tanh(softplus(x))"} | more))


def softcap_pass(**more):
    return fl.pattern_pass("softcap", softcap, axes={"x": "m"}, scalars=["cap"], **more)


def unit_pass(**more):
    return fl.pattern_pass("unit", unit, axes={"x": "mn"}, scalars=["epsilon"], **more)


@pytest.fixture
def registered():
    """`registered(pass)` registers it for this test."""
    names = []

    def register(pass_):
        fl.register(pass_)
        names.append(pass_.name)
        return pass_

    yield register
    for name in names:
        if name in fl.passes().names:
            fl.unregister(name)


def array(*shape, seed=0, scale=2.0):
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def close(a, b):
    np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=2e-5, atol=2e-6)


X = array(2, 4, 6)


# -- what is found ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (jax.nn.mish, (X,)),
        (lambda x: jax.nn.mish(3 * x), (X,)),
        (lambda x: 0.5 * jax.nn.mish(-x.T / 7).T, (X,)),
        # In the canonical view the product is one with the pattern's own.
        (lambda x, y: jax.nn.mish(x * y), (X, X + 1)),
        (lambda x, y: jax.nn.mish(x * y[:, None, None]) * x, (X, X[:, 0, 0])),
        (lambda x, w: (lambda h: jnp.tanh(jax.nn.softplus(h)) * h)(x @ w), (X, array(6, 6))),
        (lambda x: mish(x[0, 0, 0]), (X,)),
        (lambda x: mish(x.astype(jnp.bfloat16)), (X,)),
        (lambda x: mish(x.astype(jnp.bfloat16).astype(jnp.float32)).astype(jnp.bfloat16), (X,)),
    ],
)
def test_a_pattern_is_found_however_it_is_written(registered, fn, args):
    registered(mish_pass())
    found = fl.find(fn, *args, passes="mish")
    assert found.counts()["mish"] == 1, str(found)
    a, b = fl.fuse(fn, passes="mish")(*args), fn(*args)
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    tolerance = 0.02 if a.dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("cap", [30.0, 7.0, 0.1])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, c: c * jnp.tanh(x / c),
        lambda x, c: jnp.tanh(x * (1 / c)) * c,
        lambda x, c: jnp.tanh(3 * x / c) * c,
        lambda x, c: -(jnp.tanh(-x / c) * c),
        lambda x, c: c * jnp.tanh((x * jnp.sin(x)) / c),
    ],
)
def test_the_numbers_of_a_site_are_captured(registered, fn, cap):
    registered(softcap_pass())
    found = fl.find(lambda x: fn(x, cap), X, passes="softcap")
    (site,) = found.candidates
    assert abs(site.attrs["cap"]) == pytest.approx(cap, rel=1e-6)  # it is even in cap
    assert site.formula.endswith(f"cap = {site.attrs['cap']:.6g}")
    close(fl.fuse(lambda x: fn(x, cap), passes="softcap")(X), fn(X, cap))


def test_a_number_that_only_multiplies_the_result_is_captured(registered):
    registered(fl.pattern_pass("scaled_tanh", lambda x, s: s * jnp.tanh(x), axes={"x": "m"}, scalars=["s"]))
    (site,) = fl.find(lambda x: jnp.tanh(x) * 2.5, X, passes="scaled_tanh").candidates
    assert site.attrs["s"] == 2.5


def test_an_implementation_that_hangs_on_a_position_beyond_the_tried_sizes_is_told_at_the_site_s_own(registered):
    """It is right on the sizes it is registered with, and at those to which a site's are reduced."""

    def program(x, w):
        return jnp.tanh(x) * w

    def of_few_columns(x, w):
        return jnp.where(jax.lax.iota(jnp.int32, x.shape[1]) < 64, jnp.tanh(x) * w, 0.0)

    few = {"implementations": {"mine": of_few_columns}}
    registered(fl.pattern_pass("weighted_tanh", program, axes={"x": "mn", "w": "n"}, **few))
    (site,) = fl.find(program, array(256, 512), array(512), passes="weighted_tanh").rejections
    assert site.code == "value"
    assert fl.find(program, array(256, 64), array(64), passes="weighted_tanh").counts()["weighted_tanh"] == 1


def test_letters_stand_for_several_axes_and_reductions(registered):
    registered(unit_pass())

    def model(x):
        return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), (1, 3), keepdims=True) + 1e-6)

    x = array(2, 3, 4, 5)
    assert fl.find(model, x, passes="unit").counts()["unit"] == 1
    close(fl.fuse(model, passes="unit")(x), model(x))


def test_two_operands_with_axes_of_their_own(registered):
    registered(fl.pattern_pass("gate", lambda x, b: jnp.sin(x + b) * x, axes={"x": "mn", "b": "n"}))
    b = array(6)
    found = fl.find(lambda x, b: x * jnp.sin(b + x), X, b)
    assert found.counts()["gate"] == 1
    close(fl.fuse(lambda x, b: x * jnp.sin(b + x))(X, b), X * jnp.sin(b + X))
    near = fl.find(lambda x, b: x * jnp.sin(b[:, None] + x), X, array(4), passes="gate")
    assert near.counts()["gate"] == 1  # n is any axis that both have


def test_several_spellings_of_one_function(registered):
    naive = lambda x: x * jnp.tanh(jnp.log1p(jnp.exp(x)))  # noqa: E731
    registered(fl.pattern_pass("mish", [mish, naive], axes={"x": "m"}))
    assert fl.find(naive, X, passes="mish").counts()["mish"] == 1
    assert fl.find(mish, X, passes="mish").counts()["mish"] == 1
    with pytest.raises(ArgumentError, match="spelling 2 of the pattern does not compute the pattern's function"):
        fl.pattern_pass("other", [mish, jnp.tanh], axes={"x": "m"})


def test_inside_a_scan_and_not_under_a_rule_of_the_user_s(registered):
    registered(mish_pass())
    scanned = lambda x: jax.lax.scan(lambda c, _: (mish(c), None), x, length=3)[0]  # noqa: E731
    assert fl.find(scanned, X, passes="mish").counts()["mish"] == 1
    close(fl.fuse(scanned, passes="mish")(X), scanned(X))
    own_rule = jax.custom_jvp(mish)
    own_rule.defjvp(lambda p, t: (mish(*p), 2 * t[0]))
    found = fl.find(own_rule, X, passes="mish")
    assert [r.code for r in found.rejections] == ["custom_rule"]


# -- near misses --------------------------------------------------------------------------------------------------------


def declined(fn, *args, passes):
    found = fl.find(fn, *args, passes=passes)
    assert not found.candidates, str(found)
    (reason,) = found.rejections
    assert reason.edit or reason.code == "gradient", str(reason)
    return reason


@pytest.mark.parametrize(
    ("fn", "code", "said"),
    [
        (lambda x: x * jnp.tanh(2 * jax.nn.softplus(x)), "scalar", "times 2, where 1 is needed"),
        (lambda x: jnp.sin(x) * jnp.tanh(jax.nn.softplus(jnp.sin(x))), "structure", "are two different values"),
        (
            lambda x: (x + 1) * jnp.tanh(jax.nn.softplus(x)),
            "structure",
            "are two different values where the same value is needed twice",
        ),
        (lambda x: x * jnp.tanh(jax.lax.stop_gradient(jax.nn.softplus(x))), "stop_gradient", "stop_gradient"),
    ],
)
def test_a_near_miss_says_what_differs(registered, fn, code, said):
    registered(mish_pass())
    reason = declined(fn, X, passes="mish")
    assert reason.code == code
    assert said in reason.sentence
    assert reason.matched <= reason.total


def test_what_is_read_outside_stays(registered):
    registered(mish_pass())

    def model(x):
        h = jax.nn.softplus(x)
        return x * jnp.tanh(h), h

    reason = declined(model, X, passes="mish")
    assert reason.code == "escapes"
    assert "is also returned" in reason.sentence
    assert reason.edit == "compute the outside use from x again"
    edited = lambda x: (mish(x), jax.nn.softplus(x))  # noqa: E731
    assert fl.find(edited, X, passes="mish").counts()["mish"] == 1


def test_a_number_that_does_not_fit_the_other(registered):
    registered(softcap_pass())
    reason = declined(lambda x: 30 * jnp.tanh(x / 20), X, passes="softcap")
    assert reason.code == "scalar"
    assert "the result is multiplied by 30, where 20 is needed" in reason.sentence


def test_rounding_inside_and_mixed_dtypes_are_declined(registered):
    registered(softcap_pass())
    before = lambda x: 30 * jnp.tanh((x / 30).astype(jnp.bfloat16)).astype(jnp.float32)  # noqa: E731
    assert declined(before, X, passes="softcap").code == "scalar"  # what it reads is the rounded quotient
    registered(mish_pass())
    inside = lambda x: x * jnp.tanh(jax.nn.softplus(x).astype(jnp.bfloat16)).astype(jnp.float32)  # noqa: E731
    reason = declined(inside, X, passes="mish")
    assert reason.code == "dtype"
    assert "rounds to bfloat16; the op would not round there" in reason.sentence
    registered(fl.pattern_pass("tanh_product", lambda x, w: jnp.tanh(x @ w), axes={"x": "mk", "w": "kn"}))
    wide = lambda x, w: jnp.tanh(jnp.matmul(x, w, preferred_element_type=jnp.float32))  # noqa: E731
    reason = declined(wide, X.astype(jnp.bfloat16), array(6, 6).astype(jnp.bfloat16), passes="tanh_product")
    assert reason.code == "dtype"
    assert "mixes bfloat16, float32; the op computes in one dtype" in reason.sentence
    assert fl.find(wide, X, array(6, 6), passes="tanh_product").counts()["tanh_product"] == 1
    registered(fl.pattern_pass("gate", lambda x, b: jnp.sin(x + b) * x, axes={"x": "mn", "b": "n"}))
    mixed = lambda x, b: jnp.sin(x + b.astype(jnp.float32)) * x  # noqa: E731
    (site,) = fl.find(mixed, X, array(6).astype(jnp.bfloat16), passes="gate").candidates
    assert str(site.leaves["b"].dtype) == "float32"  # the cast stays where it is


def test_a_select_on_explicitly_sharded_values_is_found(registered):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,))
    registered(mish_pass())
    registered(fl.pattern_pass("mine", lambda x: jnp.sin(jnp.exp(x)) + 1, axes={"x": "m"}))
    with jax.set_mesh(mesh):
        x = jax.device_put(array(8), NamedSharding(mesh, PartitionSpec("d")))
        assert fl.find(mish, x, passes="mish").counts()["mish"] == 1
        got, want = fl.fuse(mish, passes="mish")(x), jax.jit(mish)(x)
        assert jax.typeof(got) == jax.typeof(want)
        np.testing.assert_allclose(got, want, rtol=1e-6)
        assert fl.find(lambda x: jnp.sin(jnp.exp(x)) + 1, x, passes="mine").counts()["mine"] == 1


def test_a_function_that_is_not_nearly_the_pattern_is_not_told(registered):
    registered(mish_pass())
    found = fl.find(lambda x, y: x * y + jnp.tanh(x), X, X, passes="mish")
    assert not found.candidates
    assert not found.rejections


# -- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda x: x * jnp.tanh(x), "value differs by"),
        (overflows, "its value is nan for inputs as large as 10000"),
        (lambda x: jnp.where(x > 20, x, overflows(x)), "its gradient of x is nan for inputs as large as 10000"),
        (lambda x: jnp.where(x > 20, 20.0, one_exp(x)), "for inputs as large as"),
        (lambda x: x * jax.lax.stop_gradient(jnp.tanh(jax.nn.softplus(x))), "gradient of x differs by"),
        (lambda x: one_exp(x)[None], "it returns float32[1, 5]; needed float32[5]"),
        (lambda x, y: x, "does not take the pattern's arguments"),
    ],
)
@pytest.mark.parametrize("key", ["xla", "other"])
def test_a_replacement_that_is_another_function_is_refused(fn, said, key):
    with pytest.raises(ArgumentError) as error:
        mish_pass(implementations={key: fn})
    assert f"pattern_pass mish: implementation '{key}'" in str(error.value)
    assert said in str(error.value)


def test_a_replacement_that_is_right_at_one_number_alone_is_refused():
    with pytest.raises(ArgumentError, match="cap = "):
        softcap_pass(implementations={"xla": lambda x, cap: 0.75 * jnp.tanh(x / cap)})


def test_a_replacement_that_is_wrong_at_a_site_alone_is_declined(registered):
    # Right at the sizes and numbers of the registration, not at this site's.
    def sly(x, cap):
        return jnp.tanh(x / cap) * (cap if cap < 20 else 1.0)

    registered(softcap_pass(implementations={"xla": sly}))
    assert fl.find(lambda x: softcap(x, 5.0), X, passes="softcap").counts()["softcap"] == 1
    (reason,) = fl.find(lambda x: softcap(x, 30.0), X, passes="softcap").rejections
    assert reason.code == "value"
    fl.unregister("softcap")
    registered(softcap_pass(implementations={"other": sly}))
    (reason,) = fl.find(lambda x: softcap(x, 30.0), X, passes="softcap").rejections
    assert reason.code == "value"


def clipped(at):
    def fn(x):
        t = jnp.exp(jnp.minimum(x, at))
        n = t * (t + 2)
        return x * n / (n + 2)

    return fn


@jax.custom_jvp
def once_right(x):
    return mish(x)


once_right.defjvp(lambda p, t: (mish(*p), t[0] * jax.lax.stop_gradient(jax.grad(lambda x: mish(x).sum())(*p))))


@jax.custom_vjp
def backward_alone(x):
    return mish(x)


backward_alone.defvjp(lambda x: (mish(x), x), lambda x, ct: jax.vjp(mish, x)[1](ct))


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (clipped(80), "in float32"),  # it holds in float64
        (lambda x: mish(x.astype(jnp.bfloat16)).astype(x.dtype), "computed in float32"),
        (lambda x: jnp.where((x > 4) & (x < 8), 0.0, mish(x)), "different for inputs as large as"),
        (lambda x: jnp.where(x == 0, 1.0, mish(x)), "its value is different for inputs of 0"),
        (lambda x: jnp.where(x == 1, 1.0, mish(x)), "its value is different for inputs of whole numbers"),
        (once_right, "its second derivatives are not the pattern's"),
        (backward_alone, "has no forward derivative"),
    ],
)
def test_a_replacement_that_is_wrong_on_few_numbers_or_in_few_derivatives_is_refused(fn, said):
    with pytest.raises(ArgumentError, match=said):
        mish_pass(implementations={"xla": fn})


def test_a_backward_whose_own_gradient_is_another_is_refused():
    backward = lambda ct, x: ct * jax.lax.stop_gradient(jax.vjp(mish, x)[1](jnp.ones_like(x))[0])  # noqa: E731
    with pytest.raises(ArgumentError, match="its second derivatives are not the pattern's"):
        mish_pass(backward=backward)


@pytest.mark.parametrize(
    ("pattern", "fn"),
    [
        (lambda x, y: jnp.maximum(x, y) * jnp.sin(x), lambda x, y: jnp.where(x >= y, x, y) * jnp.sin(x)),
        (lambda x, y: jnp.maximum(x, 0) * jnp.sin(y), lambda x, y: jax.nn.relu(x) * jnp.sin(y)),
    ],
)
def test_a_gradient_that_is_another_on_ties_is_refused(pattern, fn):
    with pytest.raises(ArgumentError, match="its gradient of x is different for inputs of"):
        fl.pattern_pass("mine", pattern, axes={"x": "m", "y": "m"}, implementations={"xla": fn})


def test_a_site_of_a_dtype_in_which_a_replacement_does_not_hold_is_declined(registered):
    registered(mish_pass(implementations={"xla": one_exp}))  # exp(20) is no float16
    (reason,) = fl.find(mish, X.astype(jnp.float16), passes="mish").rejections
    assert reason.code == "value"
    assert "in float16" in reason.sentence
    assert fl.find(mish, X, passes="mish").counts()["mish"] == 1


def test_a_site_that_computes_in_a_wider_dtype_is_not_narrowed(registered):
    registered(fl.pattern_pass("mine", lambda x: jnp.sin(jnp.exp(jnp.tanh(x)) - 1), axes={"x": "m"}))
    wide = lambda x: jnp.sin((jnp.exp(jnp.tanh(x).astype(jnp.float32)) - 1).astype(x.dtype))  # noqa: E731
    (reason,) = fl.find(wide, X.astype(jnp.bfloat16), passes="mine").rejections
    assert reason.code == "dtype"
    assert "the fused op computes in bfloat16" in reason.sentence


@pytest.mark.parametrize("length", [100, 40_000])
@pytest.mark.parametrize("key", ["xla", "other"])
def test_a_replacement_that_is_wrong_at_some_positions_is_declined(registered, key, length):
    at_first = lambda x: jnp.where(jnp.arange(x.shape[0]) < 20, mish(x), 0)  # noqa: E731
    registered(mish_pass(implementations={key: at_first}))
    assert fl.find(mish, array(20), passes="mish").counts()["mish"] == 1
    (reason,) = fl.find(mish, array(length), passes="mish").rejections
    assert reason.code == "value"


def test_a_replacement_that_does_not_take_every_length(registered):
    def tiled(x):
        assert x.shape[0] in (5, 40_000)
        return mish(x)

    registered(mish_pass(implementations={"other": tiled}))
    assert fl.find(mish, array(40_000), passes="mish").counts()["mish"] == 1


@pytest.mark.parametrize("implementation", ["xla", "other"])
def test_a_loop_in_a_replacement_is_traced_as_one(registered, implementation):
    turns = []

    def turned(x, _):
        turns.append(x)
        return x, None

    def looped(x):
        return mish(jax.lax.scan(turned, x, length=1000)[0])

    registered(mish_pass(implementations={implementation: looped}))
    assert fl.find(mish, X, passes="mish").counts()["mish"] == 1
    assert 0 < len(turns) < 1000


def float32_always(x):
    return mish(x) * np.float32(1)


def no_sevens(x):
    if x.shape[0] % 7 == 0:
        raise ValueError("no sevens")
    return mish(x)


@pytest.mark.parametrize(
    ("fn", "x", "said"),
    [
        (float32_always, array(6).astype(jnp.bfloat16), "needed bfloat16[6]"),
        (no_sevens, array(14), "it does not take these operands: ValueError no sevens"),
    ],
)
def test_a_function_that_does_not_take_a_site_s_operands(registered, fn, x, said):
    registered(mish_pass(implementations={"xla": fn}))
    reason = declined(mish, x, passes="mish")
    assert said in reason.sentence
    fl.unregister("mish")
    registered(mish_pass(implementations={"other": fn}))
    (site,) = fl.find(mish, x, passes="mish").candidates
    assert {b.name: b.verdict for b in site.backends} == {"xla": "same code", "other": "unavailable"}
    assert said in {b.name: b.reason for b in site.backends}["other"]
    assert fl.fuse(mish, passes="mish")(x).dtype == x.dtype


def test_a_backward_that_gives_something_else_is_refused():
    for backward in (lambda ct, x: None, lambda ct, x: (ct, ct), lambda ct, x: ct[None]):
        with pytest.raises(ArgumentError, match="backward gives arrays of shapes"):
            mish_pass(backward=backward)


def test_a_backward_in_float32_of_a_bfloat16_site(registered):
    wide = lambda ct, x: jax.vjp(mish, x.astype(jnp.float32))[1](ct.astype(jnp.float32))  # noqa: E731
    registered(mish_pass(backward=wide))
    x = X.astype(jnp.bfloat16)
    got = jax.grad(lambda x: fl.fuse(mish, passes="mish")(x).sum())(x)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(jax.grad(lambda x: mish(x).sum())(x), np.float32), atol=0.03
    )


def test_a_float64_site_is_not_computed_in_float32(registered):
    with jax.enable_x64(True):
        registered(mish_pass(implementations={"xla": lambda x: mish(x.astype(jnp.float32)).astype(x.dtype)}))
        (reason,) = fl.find(mish, jnp.asarray(X, jnp.float64), passes="mish").rejections
    assert "computed in float64" in reason.sentence


def test_a_negative_number_that_only_multiplies_the_result(registered):
    registered(fl.pattern_pass("scaled_tanh", lambda x, s: s * jnp.tanh(x), axes={"x": "m"}, scalars=["s"]))
    (site,) = fl.find(lambda x: jnp.tanh(x) * -2.5, X, passes="scaled_tanh").candidates
    assert site.attrs["s"] == -2.5
    fl.unregister("scaled_tanh")
    registered(fl.pattern_pass("scaled_tanh", lambda x, s: s * s * jnp.tanh(x), axes={"x": "m"}, scalars=["s"]))
    reason = declined(lambda x: jnp.tanh(x) * -2.5, X, passes="scaled_tanh")
    assert "multiplied by -2.5, where none of its scalars gives that factor" in reason.sentence


@pytest.mark.parametrize(
    ("pattern", "more", "said"),
    [
        (lambda x: x, {}, "computes nothing"),
        (lambda x, y: jnp.sin(x), {"axes": {"x": "m", "y": "m"}}, "does not read y"),
        (lambda x, s: jnp.sin(x), {"scalars": ["s"]}, "does not read s"),
        (lambda x: jnp.sin(x).sum(), {"axes": {"x": "mm"}}, "each at most once per operand"),
        (lambda x: (jnp.sin(x), x), {}, "needed one array|cannot be used"),
        (lambda x: x[:2] * 2, {}, "cannot be used as an example|needed a result"),
        (lambda x: jnp.sin(x), {"axes": {"present": "m"}}, "is used twice or reserved"),
        (lambda x: jnp.sin(x), {"implementations": {"xla": fl.CudaKernel(MISH)}}, "needed a plain JAX function"),
        (lambda x: jnp.sin(x), {"implementations": {"other": 3}}, "neither a function nor a CudaKernel"),
        (lambda x: jnp.sin(x) * 2, {"backward": lambda ct, x: ct * jnp.cos(x)}, "the op with its backward"),
        (3, {}, "needed a function"),
    ],
)
def test_what_does_not_fit_is_said_by_name(pattern, more, said):
    with pytest.raises(ArgumentError, match=said):
        fl.pattern_pass("mine", pattern, **({"axes": {"x": "m"}} | more))


@pytest.mark.parametrize(
    "name", ["tanh", "mul", "jit", "lerp", "dot_general", "scan", "my_grad", "two words", "reduce_sum", 3]
)
def test_a_name_that_means_something_else_is_refused(name):
    with pytest.raises(ArgumentError, match="choose another"):
        fl.pattern_pass(name, mish, axes={"x": "m"})


def test_two_passes_of_one_name_and_unregister(registered):
    first = registered(mish_pass())
    with pytest.raises(ArgumentError, match="'mish' exists already"):
        fl.register(mish_pass())
    fused = fl.fuse(mish)
    assert fused.findings(X).counts()["mish"] == 1
    fl.unregister(first)
    assert "mish" not in fl.passes().names
    close(fused(X), mish(X))  # made before, it stays as it is
    assert fused.findings(X).counts()["mish"] == 1
    assert "mish" not in fl.find(mish, X).counts()
    with pytest.raises(UnknownNameError, match="unknown pass 'mish'"):
        fl.unregister("mish")
    with pytest.raises(ArgumentError, match="built in"):
        fl.unregister("lerp")
    registered(fl.pattern_pass("mish", softcap, axes={"x": "m"}, scalars=["cap"]))  # another of the same name
    assert fl.find(mish, X, passes="mish").counts()["mish"] == 0


def test_a_registered_pass_is_one_as_the_others(registered):
    pass_ = registered(mish_pass())
    assert "x * tanh(softplus(x))" in str(fl.passes())
    assert pass_ in tuple(fl.passes())
    drawn = Catalogue((pass_,))._repr_html_()
    assert "<h3>mish</h3><p><code>x * tanh(softplus(x))</code>" in drawn
    assert drawn.count("<figure><svg") == 2
    assert fl.find(mish, X, passes=fl.Strategy(mish=True)).counts() == {"mish": 1, "mish_grad": "runs under jax.grad"}
    assert fl.fuse(mish, implementation="xla").findings(X).counts()["mish"] == 1
    with pytest.raises(UnknownNameError):
        fl.fuse(mish, implementation="another")
    registered(
        fl.pattern_pass("second", softcap, axes={"x": "m"}, scalars=["cap"], implementations={"another": softcap})
    )
    assert fl.fuse(mish, implementation="another", passes="mish").findings(X).counts()["mish"] == 0
    assert isinstance(pass_, own_pass.PatternPass)


@pytest.mark.parametrize("name", fl.passes().names)
def test_the_catalogue_shows_a_site_of_each_pass_before_and_after(name):
    (one,) = (p for p in fl.passes() if p.name == name)
    drawn = Catalogue((one,))._repr_html_()
    assert f"<h3>{name}</h3>" in drawn
    before, after = (part.partition("</svg>")[0] for part in drawn.split("<figure><svg")[1:])
    assert before != after


# -- what runs ----------------------------------------------------------------------------------------------------------


def test_on_a_cpu_the_kernel_says_why_not_and_xla_runs(registered):
    registered(mish_pass())
    (site,) = fl.find(mish, X, passes="mish", device="cpu").candidates
    verdicts = {b.name: (b.verdict, b.reason) for b in site.backends}
    assert verdicts["xla"][0] == "chosen"
    assert verdicts["cuda"] == ("unavailable", "it needs a CUDA device, this is a CPU (simulated)")
    with pytest.raises(BackendError, match="needs a CUDA device"):
        fl.fuse(mish, passes="mish", implementation="cuda")(X)


def test_on_a_gpu_the_kernel_is_chosen(registered):
    registered(mish_pass())
    (site,) = fl.find(mish, X, passes="mish", device="sm_90").candidates
    assert [b.name for b in site.backends if b.verdict == "chosen"] == ["cuda"]
    (site,) = fl.find(mish, X.astype(jnp.bfloat16), passes="mish", device="sm_90").candidates
    assert {b.name: b.reason for b in site.backends}[
        "cuda"
    ] == "the operands are bfloat16, the kernel is written for float32"


def test_without_a_replacement_nothing_is_claimed(registered):
    registered(softcap_pass())
    (site,) = fl.find(lambda x: softcap(x, 3.0), X, passes="softcap").candidates
    assert site.same_code


@pytest.mark.parametrize("backward", [None, lambda ct, x, cap: ct * (1 - jnp.tanh(x / cap) ** 2)])
def test_every_transformation_of_the_op(backward):
    op = softcap_pass(backward=backward)
    f, g = (lambda x: op(x, cap=3.0)), (lambda x: softcap(x, 3.0))
    x, v = X.ravel(), array(X.size, seed=1)
    close(jax.jit(f)(x), g(x))
    for of in (jax.grad(lambda x, h: jnp.sum(h(x) ** 2)), lambda x, h: jax.jvp(h, (x,), (v,))[1]):
        close(of(x, f), of(x, g))
        close(jax.jit(of, static_argnums=1)(x, f), of(x, g))
    rows = X.reshape(6, 8)
    for of in (
        jax.vmap,
        lambda h: jax.vmap(h, 1, 1),
        lambda h: jax.vmap(jax.grad(lambda x: h(x).sum())),
        jax.vmap(lambda h: h).__class__ and (lambda h: jax.vmap(jax.hessian(lambda x: h(x).sum()))),
    ):
        close(of(f)(rows), of(g)(rows))
    close(jax.lax.scan(lambda c, _: (f(c), c), x, length=2)[1], jax.lax.scan(lambda c, _: (g(c), c), x, length=2)[1])
    close(jax.grad(jax.checkpoint(lambda x: f(x).sum()))(x), jax.grad(lambda x: g(x).sum())(x))


def test_the_op_refuses_what_it_does_not_take():
    op = softcap_pass()
    with pytest.raises(ArgumentError, match=r"got x \[2, 3\]; needed x \[m\]"):
        op(jnp.zeros((2, 3)), cap=3.0)
    with pytest.raises(ArgumentError, match="cap=None, needed a number"):
        op(jnp.zeros(3))
    with pytest.raises(ArgumentError, match="x has dtype int32"):
        op(jnp.zeros(3, jnp.int32), cap=3.0)


@pytest.mark.parametrize("backward", [None, lambda ct, x: jax.vjp(mish, x)[1](ct)])
def test_a_train_step_that_is_differentiated_already(registered, backward):
    registered(mish_pass(backward=backward))
    step = jax.value_and_grad(lambda w, x: jnp.mean(jax.nn.mish(x @ w) ** 2))
    w = array(6, 6, scale=0.5)
    found = fl.find(step, w, X, passes="mish")
    assert found.counts()["mish"] == 1, str(found)
    for a, b in zip(fl.fuse(step, passes="mish")(w, X), step(w, X), strict=True):
        close(a, b)
    outside = jax.grad(lambda w: jnp.mean(fl.fuse(lambda w: jax.nn.mish(X @ w), passes="mish")(w) ** 2))
    close(outside(w), step(w, X)[1])


def test_compare_judges_it_against_float64(registered):
    registered(mish_pass())
    result = fl.compare(mish, fl.fuse(mish, passes="mish"), X, samples=10, budget_s=0.2)
    assert ", against float64" in str(result)
    assert "over tolerance 0 -> 0" in str(result)


# -- the kernel ---------------------------------------------------------------------------------------------------------


def launches(fn, *args):
    return jax.jit(fn).lower(*args).as_text().count("custom_call")


@pytest.mark.parametrize("transformed", ["alone", "gradient", "batch"])
def test_the_kernel_runs_where_a_site_was(registered, emulator, transformed):
    registered(mish_pass())
    registered(unit_pass(implementations={"cuda": fl.CudaKernel(UNIT, threads=32, blocks=lambda m, n: m)}))

    def model(x):
        return jax.nn.mish(x * jax.lax.rsqrt(jnp.sum(jnp.square(x), -1, keepdims=True) + 1e-6))

    with kernels_on_the_cpu(emulator, own):
        fused = fl.fuse(model, passes=["mish", "unit"])
        if transformed == "alone":
            found = fused.findings(X).candidates
            assert [b.name for c in found for b in c.backends if b.verdict == "chosen"] == ["cuda"] * 2
            assert launches(fused, X) == 2
            close(fused(X), model(X))
        elif transformed == "gradient":
            close(jax.grad(lambda x: fused(x).sum())(X), jax.grad(lambda x: model(x).sum())(X))
        else:
            close(jax.vmap(fused)(X), jax.vmap(model)(X))
            assert launches(fl.fuse(jax.vmap(model), passes=["mish", "unit"]), X) == 2


def test_a_kernel_that_does_not_fit_a_card_is_refused_there_with_what_it_takes_and_the_limit():
    op = mish_pass(implementations={"cuda": fl.CudaKernel(MISH, shared=120 << 10)}).fused_op
    assert op.choose(X.ravel(), device="a100", implementation="cuda") == "cuda"
    why = (
        r"cannot run this call on an NVIDIA RTX5090, sm_120 \(simulated\): "
        r"mish takes 122880 bytes of shared memory in a block, sm_120 has 101376"
    )
    with pytest.raises(BackendError, match=why):
        op.choose(X.ravel(), device="rtx5090", implementation="cuda")
    wide = mish_pass(implementations={"cuda": fl.CudaKernel(MISH, threads=2048)}).fused_op
    with pytest.raises(BackendError, match="mish has 2048 threads in a block, sm_90 takes 1024"):
        wide.choose(X.ravel(), device="h100", implementation="cuda")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_kernel_for_other_dtypes(emulator, dtype):
    op = mish_pass(implementations={"cuda": fl.CudaKernel(MISH, dtypes=("bfloat16", "float16"))})
    x = X.ravel().astype(dtype)
    with kernels_on_the_cpu(emulator, own):
        assert launches(op, x) == 1
        np.testing.assert_allclose(np.asarray(op(x), np.float32), np.asarray(mish(x), np.float32), atol=0.03, rtol=0.02)


def test_a_number_of_a_float64_kernel(emulator):
    source = UNIT.replace("float", "double").replace("sqrtf", "sqrt")
    kernel = fl.CudaKernel(source, threads=32, blocks=lambda m, n: m, dtypes=("float64",))
    with jax.enable_x64(True), kernels_on_the_cpu(emulator, own):
        op, x = unit_pass(implementations={"cuda": kernel}), jnp.asarray(np.random.default_rng(0).normal(size=(4, 40)))
        assert launches(lambda x: op(x, epsilon=0.3), x) == 1
        np.testing.assert_allclose(op(x, epsilon=0.3), unit(x, 0.3), rtol=1e-12)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("fminf(v, 20.0f)", "v"), "it gives nan of numbers as large as 30"),
        (("(T)(v *", "(T)(v == 0.0f ? 1.0f : v *"), "of numbers as large as 0"),
        (("out[i] =", "((T*)x)[i] = out[i] ="), "it writes to its operands"),
    ],
)
def test_a_kernel_that_is_wrong_on_large_numbers_or_zeros_or_writes_elsewhere_does_not_run(
    registered, emulator, wrong, said
):
    assert wrong[0] in MISH
    registered(mish_pass(implementations={"cuda": fl.CudaKernel(MISH.replace(*wrong))}))
    with kernels_on_the_cpu(emulator, own):
        fused = fl.fuse(mish, passes="mish")
        (site,) = fused.findings(X).candidates
        assert said in {b.name: b.reason for b in site.backends}["cuda"]
        assert launches(fused, X) == 0


@pytest.mark.parametrize("wrong", [("2.0f)", "2.1f)"), ("i >= m", "i >= m - 1")])
def test_a_kernel_that_is_wrong_does_not_run(registered, emulator, wrong):
    registered(mish_pass(implementations={"cuda": fl.CudaKernel(MISH.replace(*wrong))}))
    with kernels_on_the_cpu(emulator, own):
        fused = fl.fuse(mish, passes="mish")
        (site,) = fused.findings(X).candidates
        assert "its values differ from the op's meaning by" in {b.name: b.reason for b in site.backends}["cuda"]
        assert launches(fused, X) == 0
        close(fused(X), mish(X))
        with pytest.raises(BackendError, match="its values differ from the op's meaning"):
            fl.fuse(mish, passes="mish", implementation="cuda")(X)


def test_a_plan_of_a_text_is_read_back_from_its_name():
    plan = mish_pass().fused_op.implementations["cuda"].forward.__self__.plan({"x": (1000,)}, "float32", {})
    assert launch_plan_of(plan_name(plan)) == plan
    assert plan.launches[0].grid == (4, 1, 1)
    assert plan.launches[0].params == (("operand", 0), ("result", 0), ("i64", 1000))


def test_the_kernels_compile_for_a_gpu():
    try:
        compiling.nvrtc_version(), compiling.headers()
    except MissingDependencyError as e:
        pytest.skip(str(e))
    for pass_, shape, numbers in (
        (mish_pass(), (1000,), {}),
        (unit_pass(implementations={"cuda": fl.CudaKernel(UNIT)}), (8, 64), {"epsilon": 1e-6}),
    ):
        kernel = pass_.fused_op.implementations["cuda"].forward.__self__
        plan = kernel.plan({"x": shape}, "float32", numbers)
        source = CudaSource(plan.source, (plan.launches[0].entry,), text=plan.text)
        assert compile_source(source, plan.options, "sm_90").cubin.startswith(b"\x7fELF")


def test_a_compiler_is_here_where_it_has_to_be(require):
    require(shutil.which("g++"), "g++")
