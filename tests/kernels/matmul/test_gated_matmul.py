"""The op gated_matmul: every implementation against float64, the kernel as C++ on a CPU; arguments; how many products are run."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab import ops
from fusionlab.device import Device
from fusionlab.errors import ArgumentError, BackendError, UnknownNameError
from fusionlab.kernels.launch.compile import compile_source, resources
from fusionlab.kernels.ops.gated_matmul import GATED_MATMUL, cuda
from fusionlab.kernels.ops.gated_matmul.plan import SOURCE, forward_plan
from fusionlab.kernels.ops.gemm_epilogue.elementwise import KERNEL_ACTIVATIONS
from tests.kernels.emulated import kernels_on_the_cpu, poisoned
from tests.kernels.matmul.gated_suite import SHAPES, GatedSuite, operands_of


class TestXla(GatedSuite):
    implementation = "xla"


class TestConcatenated(GatedSuite):
    implementation = "concatenated"


class TestCuda(GatedSuite):
    implementation = "cuda"
    dtypes = ("bfloat16", "float16")
    activations = KERNEL_ACTIVATIONS

    @pytest.fixture(autouse=True)
    def on_the_cpu(self, emulator, monkeypatch):
        with kernels_on_the_cpu(emulator, cuda) as book:
            monkeypatch.setattr(cuda, "launch", poisoned(cuda.launch))
            self.book = book
            yield

    def test_one_launch_and_no_product(self):
        text = lowered("cuda", jnp.bfloat16)
        assert (text.count("dot_general"), text.count("fusionlab_")) == (0, 1)


def lowered(implementation, dtype=jnp.float32):
    x, w, v = (jax.ShapeDtypeStruct(s, dtype) for s in ((16, 8), (8, 24), (8, 24)))
    return jax.jit(lambda *a: ops.gated_matmul(*a, implementation=implementation)).lower(x, w, v).as_text()


@pytest.mark.parametrize(("implementation", "products"), [(None, 2), ("xla", 2), ("concatenated", 1)])
def test_how_many_products_are_run(implementation, products):
    text = lowered(implementation)
    assert text.count("dot_general") == products
    assert "custom_call" not in text


def test_the_gradient_keeps_both_products_and_runs_four_more():
    x, w, v = operands_of("whole tiles", "float32")
    loss = jax.grad(lambda *a: ops.gated_matmul(*a).sum(), (0, 1, 2))
    assert str(jax.make_jaxpr(loss)(x, w, v)).count("gated_matmul_cotangent") == 1
    assert jax.jit(loss).lower(x, w, v).as_text().count("dot_general") == 6


def test_second_derivatives_are_those_of_the_plain_code():
    x, w, v = operands_of("odd sizes", "float32")

    def plain(x):
        return jnp.sin(jax.nn.silu(x @ w) * (x @ v)).sum()

    def fused(x):
        return jnp.sin(ops.gated_matmul(x, w, v)).sum()

    found, want = (jax.jit(jax.hessian(f))(x) for f in (fused, plain))
    np.testing.assert_allclose(found, want, rtol=0, atol=2e-5)


def test_a_batch_of_weights():
    x, w, v = operands_of("odd sizes", "float32")
    both, other = jnp.stack([w, 2 * w]), jnp.stack([v, -v])
    want = jnp.stack([ops.gated_matmul(x, w, v), ops.gated_matmul(x, 2 * w, -v)])
    np.testing.assert_allclose(jax.vmap(ops.gated_matmul, (None, 0, 0))(x, both, other), want, rtol=1e-5, atol=1e-6)


def refuse(**change):
    given = {"x": (4, 8), "w": (8, 6), "v": (8, 6), "dtype": jnp.bfloat16} | change
    dtype = given.pop("dtype")
    operands = [jax.ShapeDtypeStruct(given.pop(n), dtype) for n in "xwv"]
    backends = GATED_MATMUL.backends(*operands, device=given.pop("device", "sm_90"), **given)
    return {b.name: b for b in backends}["cuda"].reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": jnp.float32}, "operands of float32: .* implementation='concatenated' takes it"),
        ({"activation": "silu_exp"}, "no kernel for the activation silu_exp"),
        ({"precision": "BF16_BF16_F32"}, "names an algorithm"),
        ({"w": (8, 0), "v": (8, 0)}, "an operand is empty"),
        ({"device": "sm_75"}, "older than sm_80"),
        ({"device": "cpu"}, "it needs a CUDA device"),
        ({"w": (8, 1 << 23), "v": (8, 1 << 23)}, "more than 4194240 columns"),
    ],
)
def test_what_the_kernel_does_not_take(change, reason):
    assert re.search(reason, refuse(**change))


def test_the_kernel_takes_the_rest_and_is_no_choice_of_its_own():
    assert refuse() == GATED_MATMUL.implementations["cuda"].summary
    for device in ("cpu", "sm_90"):
        x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 4096), (4096, 11008)))
        assert GATED_MATMUL.choose(x, w, w, device=device) == "xla"
    with pytest.raises(BackendError, match="it needs a CUDA device"):
        ops.gated_matmul(*operands_of("odd sizes", "bfloat16"), implementation="cuda")


@pytest.mark.parametrize(
    ("shapes", "attrs", "error", "message"),
    [
        (((4,), (4, 6), (4, 6)), {}, ArgumentError, r"x has shape \(4,\), rank 1"),
        (((2, 4), (4, 6), (6, 4)), {}, ArgumentError, r"w has shape \(4, 6\) and v \(6, 4\)"),
        (((2, 4), (1, 4, 6), (1, 4, 6)), {}, ArgumentError, r"w has shape .* needed a matrix"),
        (((2, 4), (6, 4), (6, 4)), {}, ArgumentError, "set w_contract"),
        (((2, 4), (4, 6), (4, 6)), {"w_contract": 2}, ArgumentError, "w_contract is 2"),
        (((2, 4), (4, 6), (4, 6)), {"activation": "swish"}, UnknownNameError, "unknown activation 'swish'"),
        (((2, 4), (4, 6), (4, 6)), {"implementation": "cublaslt"}, UnknownNameError, "concatenated, cuda, xla"),
    ],
)
def test_wrong_arguments_are_told(shapes, attrs, error, message):
    with pytest.raises(error, match=message):
        ops.gated_matmul(*(jnp.zeros(s) for s in shapes), **attrs)


def test_dtypes_must_agree():
    with pytest.raises(ArgumentError, match="v has dtype bfloat16 but x has float32"):
        ops.gated_matmul(jnp.zeros((2, 4)), jnp.zeros((4, 6)), jnp.zeros((4, 6), jnp.bfloat16))


def test_measured_choices_decide(monkeypatch, tmp_path):
    from fusionlab.kernels.choose import choices

    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((4096, 4096), (4096, 11008)))
    given, full = GATED_MATMUL.prepare({"x": x, "w": w, "v": w}, {})
    text = GATED_MATMUL.case("call", given, **full)
    found = choices.Measured({text: choices.Choice("concatenated", {"xla": 3.0, "concatenated": 2.0})}, device="GPU")
    choices.write(tmp_path / "plans.json", "sm_90", found)
    monkeypatch.setenv("FUSIONLAB_PLAN_FILE", str(tmp_path / "plans.json"))
    device = Device.of("sm_90")
    assert GATED_MATMUL.decide("call", given, device, **full).implementation == "concatenated"
    near = given | {"x": jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)}
    found = GATED_MATMUL.decide("call", near, device, **full)
    assert found.implementation == "concatenated"
    assert "the nearest measured" in found.reason
    assert GATED_MATMUL.decide("call", given, Device.of("cpu"), **full).implementation == "xla"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("saves", [False, True])
def test_the_kernel_compiles_and_spills_little(arch, saves, nvrtc):
    for name in ("whole tiles", "transposed, odd"):
        x, columns, contract = SHAPES[name]
        plan = forward_plan(4096, columns, x[-1], "bfloat16", "silu", transposed=bool(contract), saves=saves)
        taken = resources(compile_source(SOURCE, plan.options, arch).log)["gated_forward"]
        assert taken.registers <= 128
        assert max(taken.spill_stores, taken.spill_loads) <= 32


@pytest.fixture
def nvrtc():
    from fusionlab.errors import MissingDependencyError
    from fusionlab.kernels.launch import compile as compiling

    try:
        compiling.headers()
    except MissingDependencyError as e:
        pytest.skip(str(e))
