"""The suite that the implementations of layer_norm are held to on a GPU, held by XLA's and by the CUDA kernels emulated on a CPU; and how
those are tiled."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab.device import Device
from fusionlab.kernels.ops.layer_norm import LAYER_NORM, cuda, plan, tiling
from fusionlab.kernels.ops.layer_norm.plan import NormLaunch, backward_passes, forward_plan
from tests.kernels.emulated import kernels_on_the_cpu, poisoned
from tests.kernels.norm.norm_suite import CASES, Case, NormSuite, close, exact, operands, turns, wide
from tests.kernels.transformations import adding

VECTORS = (("bias", "bfloat16"), ("scale", "bfloat16"), ("shift", "bfloat16"))
# (case, dtype, the gradients wanted, or all): a cotangent that is a sum.
SUMS = [
    ("everything", "bfloat16", None),
    ("everything and the sum", "float16", None),
    ("everything", "float32", ("bias",)),
    ("float32 vectors", "bfloat16", None),
    ("many rows", "bfloat16", None),
    ("7", "float16", None),
    ("2056, several warps", "float32", None),
    ("9001, two passes", "bfloat16", None),
    ("40001, read again", "bfloat16", ("x",)),
]
WIDTHS = (1, 7, 8, 64, 768, 1000, 1023, 1024, 4096, 5120, 8192, 9001, 12288, 16384, 40001, 65535, 65536)


class TestXla(NormSuite):
    implementation = "xla"
    turns = turns(CASES)
    repeatable = False

    def test_the_gradient_of_a_large_mean_sums_to_nothing_along_its_row(self):
        """Where xhat's own mean is what the mean of x was rounded by."""
        case = Case((4, 200), ())
        given, _ = operands(case, "float32")
        given["x"] = given["x"] + 4096.0
        _, grads = self.step(case)(given, {"out": exact(case, given, {"out": given["x"]})["out"][0].astype(np.float32)})
        sums = np.abs(wide(grads["dx"]).sum(-1))
        print(f"sums of rows {sums.max():.2g}")
        assert sums.max() < 2e-4


class TestCudaEmulated(NormSuite):
    """layer_norm.cu itself, as C++, launched by XLA's CPU backend; what no kernel writes stays NaN."""

    implementation = "cuda"
    turns = turns(CASES, every=("everything and the sum", "7"))

    @pytest.fixture(autouse=True)
    def _on_the_cpu(self, emulator, monkeypatch):
        monkeypatch.setattr(cuda, "launch", poisoned(cuda.launch))
        with kernels_on_the_cpu(emulator, cuda):
            yield

    @pytest.mark.parametrize(("columns", "rows"), [(40, 700), (1000, 9), (513, 9)])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_block_of_several_rows_one_after_another(self, columns, rows, dtype, monkeypatch):
        monkeypatch.setattr(tiling, "MULTIPROCESSORS", 1)
        monkeypatch.setattr(tiling, "RESIDENT_THREADS", 128)
        case = Case((rows, columns), ("scale", "bias", "shift", "residual"), gives_sum=True)
        (one,) = backward_passes(NormLaunch("layer", rows, columns, dtype, VECTORS), ("x", "scale"), True, False)
        launch = one.plan.launches[0]
        assert launch.grid[0] * launch.block[1] < rows
        given, cts = operands(case, dtype)
        outs, grads = self.step(case)(given, cts)
        wants = exact(case, given, cts)
        for slot, got in {**outs, **grads}.items():
            close(slot, got, wants[slot])

    @pytest.mark.parametrize("count", [3, 2, 4])
    @pytest.mark.parametrize(("name", "dtype", "wanted"), SUMS, ids=lambda v: str(v).replace(" ", "_"))
    def test_a_cotangent_given_as_a_sum(self, name, dtype, wanted, count):
        """Added up by the kernel in the order given, each sum rounded; before it, where it has no room."""
        case = CASES[name]
        given, cts = operands(case, dtype)
        rng = np.random.default_rng(7)
        terms = [jnp.asarray(rng.normal(0.1, 1.0, case.shape), dtype) for _ in range(count)]

        def grads(given, cts, terms):
            moving = {slot: given[slot] for slot in wanted or given}
            pull = jax.vjp(lambda moved: self.op(case, **{**given, **moved}), moving)[1]
            return pull(cts | {"out": functools.reduce(jnp.add, terms)})[0]

        total = functools.reduce(jnp.add, terms)
        got = jax.jit(adding(grads))(given, cts, terms)
        wants = exact(case, given, cts | {"out": total})
        for slot, a in got.items():
            close("d" + slot, a, wants["d" + slot])
        if case.shape[-1] < 9000:  # as many threads of a row: the same order of its sums
            for slot in {"x", "residual"} & set(got):
                want = jax.jit(grads)(given, cts, [total])[slot]
                assert np.asarray(got[slot]).tobytes() == np.asarray(want).tobytes()

    def test_the_kernel_is_given_the_terms(self, monkeypatch):
        given = []
        real = cuda.launch
        monkeypatch.setattr(
            cuda, "launch", lambda plan, operands, *rest: given.append(operands) or real(plan, operands, *rest)
        )
        x, *terms = (jnp.full((4, 64), i, "float32") for i in range(4))
        f = lambda x, terms: jax.vjp(lambda x: self.op(Case((4, 64), ()), x=x)["out"], x)[1](sum(terms[1:], terms[0]))  # noqa: E731
        jax.jit(adding(f))(x, terms)
        assert len(given[-1]) == len(terms) + 3  # x, mean, rstd


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("columns", WIDTHS)
def test_every_column_has_a_thread_and_a_block_the_registers_it_needs(columns, dtype):
    tiles = [tiling.forward_tile(columns, dtype)]
    every = itertools.product(range(4), (False, True), range(1, 5))
    tiles += [tiling.backward_tile(columns, dtype, sums, ct, addends) for sums, ct, addends in every]
    for tile in filter(None, tiles):
        assert columns % tile.vec == 0
        assert tile.vec * tiling.ITEM_BYTES[dtype] <= 16
        assert tile.vec * tile.lanes * (tile.vecs - 1) < columns <= tile.vec * tile.lanes * tile.vecs
        assert tile.threads % tiling.WARP == 0
        assert tile.threads <= tiling.MAX_THREADS
        assert tile.groups == 1 or tile.lanes <= tiling.WARP
        assert tile.grid(5) <= 5
    assert tiling.backward_tile(columns, dtype, 0, True) is not None


def test_a_row_too_wide_for_registers_takes_two_passes_and_nothing_is_made_twice():
    for columns in WIDTHS:
        norm = NormLaunch("layer", 100, columns, "bfloat16", VECTORS)
        passes = backward_passes(norm, ("x", "scale", "bias", "shift"), False, False)
        assert [slot for one in passes for slot in one.gives] == ["x", "scale", "bias", "shift"]
        assert len(passes) == (1 if columns <= 8192 or columns == 12288 else 2)
        if len(passes) == 2:
            assert "dx" in passes[1].reads
    wide = NormLaunch("rms", 100, 65536, "bfloat16", (("scale", "bfloat16"),))
    assert [one.gives for one in backward_passes(wide, ("scale",), False, False)] == [("scale",)]
    assert [one.gives for one in backward_passes(wide, ("shift",), False, False)] == [("x",), ("shift",)]


@pytest.mark.parametrize(("rows", "parts"), [(10, 2), (1_000_000, 4)])
def test_sums_over_many_rows_are_cut_for_all_multiprocessors_and_over_few_by_eight_rows(rows, parts, monkeypatch):
    monkeypatch.setattr(tiling, "MULTIPROCESSORS", 132)
    wide = NormLaunch("rms", rows, 65536, "bfloat16", (("scale", "bfloat16"),))
    (launch, *_) = backward_passes(wide, ("scale",), False, False)[0].plan.launches
    across = 65536 // 8 // tiling.WARP
    assert launch.grid[:2] == (across, parts)
    assert parts == min(-(-rows // 8), -(-6 * 132 // across))


def test_what_is_absent_is_no_parameter():
    norm = NormLaunch("rms", 4, 64, "float32", ())
    (launch,) = forward_plan(norm, 1e-5, residual=False, gives_sum=False, saves=True).launches
    operands = [p for p in launch.params if p[0] == "operand"]
    assert operands == [("operand", 0)]
    assert [p for p in launch.params if p[0] == "result"] == [("result", 0), ("result", 1)]
    assert np.int32(launch.params[-1][1]).view(np.float32) == np.float32(1e-5)
    assert plan.SOURCE.path == "layer_norm/layer_norm.cu"


class TestRefusals:
    def reason(self, shape=(4, 8), dtype="float32", device="sm_90", **attrs):
        import jax

        x = jax.ShapeDtypeStruct(shape, dtype)
        return LAYER_NORM.implementations["cuda"].refuses(
            {"x": x}, Device.of(device), axis=attrs.get("axis", len(shape) - 1)
        )

    def test_what_it_takes(self):
        for device in ("sm_75", "sm_80", "sm_90", "sm_120"):
            assert self.reason(device=device) is None

    def test_what_it_does_not(self):
        assert "over axis 0 of rank 2, the kernels over the last" in self.reason(axis=0)
        assert "rows have 70000 entries, the kernels take 65536" in self.reason((2, 70000))
        assert "x is float64" in self.reason(dtype="float64")
        assert self.reason(device="cpu")
