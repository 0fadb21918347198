"""The CUDA kernels of lerp, compiled as C++ and run thread by thread, against float64; and how they are tiled."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fusionlab.device import Device
from fusionlab.errors import ArgumentError, UnknownNameError
from fusionlab.kernels.ops.geometry import accumulator
from fusionlab.kernels.ops.lerp import LERP, cuda, plan, tiling
from fusionlab.kernels.ops.lerp.axes import SLOTS, BroadcastAxes, collapse, result_shape
from fusionlab.kernels.ops.lerp.plan import backward_passes, forward_plan
from tests.kernels.emulated import kernels_on_the_cpu
from tests.kernels.lerp import lerp_suite

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float64": np.float64}
GUARD = 64  # bytes before and after each array
EVERY = ("x", "y", "w")


class Guarded:
    """Arrays between guards: of results, which nothing may write; of operands, NaN, which would be seen if read."""

    def __init__(self, poison=0xA5):
        self._all, self._poison = [], poison

    def _place(self, shape, dtype, guard):
        size = math.prod(shape) * np.dtype(dtype).itemsize
        whole = np.full(size + 2 * GUARD + 128, guard, np.uint8)
        start = GUARD + -(whole.ctypes.data + GUARD) % 128  # XLA's alignment
        return whole, start, size

    def operand(self, array):
        whole, start, size = self._place(array.shape, array.dtype, 0xFF)
        mine = whole[start : start + size].view(array.dtype).reshape(array.shape)
        mine[...] = array
        return mine

    def result(self, shape, dtype):
        whole, start, size = self._place(shape, dtype, self._poison)
        mine = whole[start : start + size].view(dtype).reshape(shape)
        mine[...] = np.nan
        self._all.append((whole, start, start + size))
        return mine

    def check(self):
        for whole, start, end in self._all:
            assert (whole[:start] == self._poison).all()
            assert (whole[end:] == self._poison).all()


def shapes_of(x, y, w):
    return {"x": x, "y": y, "w": w}


def ulp(value, dtype):
    """The distance of neighbours of `dtype` around |value|."""
    info = ml_dtypes.finfo(DTYPES[dtype])
    exponent = np.floor(np.log2(np.maximum(np.abs(value), float(info.smallest_normal))))
    return 2.0 ** (exponent - info.nmant)


def arrays(shapes, dtype, seed=0):
    rng = np.random.default_rng(seed)
    given = {slot: rng.standard_normal(shape).astype(DTYPES[dtype]) for slot, shape in shapes.items()}
    return given, rng.standard_normal(result_shape(shapes)).astype(DTYPES[dtype])


def check_forward(emulator, shapes, dtype):
    values, _ = arrays(shapes, dtype)
    guarded = Guarded()
    out = guarded.result(result_shape(shapes), DTYPES[dtype])
    emulator.run(forward_plan(shapes, dtype), [guarded.operand(values[s]) for s in SLOTS], [out])
    guarded.check()
    x, y, w = (values[s].astype(np.float64) for s in SLOTS)
    exact = x + w * (y - x)
    # Three roundings of the arithmetic, and one of the result.
    eps = np.finfo(accumulator(dtype)).eps
    error = np.abs(out.astype(np.float64) - exact)
    assert np.all(
        error
        <= 0.5 * ulp(exact, dtype) * (dtype in ("bfloat16", "float16"))
        + 2 * eps * (np.abs(x) + np.abs(w) * (np.abs(y) + np.abs(x)))
    )
    if dtype in ("bfloat16", "float16"):
        x, y, w = (values[s].astype(np.float32) for s in SLOTS)
        rounded = (x + w * (y - x)).astype(DTYPES[dtype]).astype(np.float64)
        assert np.all(np.abs(out.astype(np.float64) - rounded) <= ulp(rounded, dtype))


def run_pass(emulator, one, shapes, values, ct, dtype, poison=0xA5):
    """Gradients by slot."""
    guarded = Guarded(poison)
    results = [guarded.result(shapes[slot], DTYPES[dtype]) for slot in one.gives]
    results += [guarded.result(shape, np.dtype(accumulator(dtype))) for shape in one.scratch]
    emulator.run(one.plan, [guarded.operand(ct if s == "ct" else values[s]) for s in one.reads], results)
    guarded.check()
    for part in results[len(one.gives) :]:
        assert not np.isnan(part).any(), "a partial sum that no tile wrote"
    return dict(zip(one.gives, results, strict=False))


def check_gradients(made, shapes, values, ct, dtype):
    x, y, w, wide = (a.astype(np.float64) for a in (*(values[s] for s in SLOTS), ct))
    full = {"x": (1 - w) * wide, "y": w * wide, "w": wide * (y - x)}
    eps = np.finfo(accumulator(dtype)).eps
    # (1 - w) and (y - x) lose what is small beside their terms.
    sizes = {"x": (1 + np.abs(w)) * np.abs(wide), "y": full["y"], "w": np.abs(wide) * (np.abs(x) + np.abs(y))}
    for slot, grad in made.items():
        assert grad.shape == shapes[slot]
        over = tuple(i for i, n in enumerate(shapes[slot]) if n == 1)
        total, size = (
            np.broadcast_to(a, ct.shape).sum(axis=over, keepdims=True) for a in (full[slot], np.abs(sizes[slot]))
        )
        error = np.abs(grad.astype(np.float64) - total)
        rounding = 0.5 * ulp(total, dtype)
        # In a tree of short chains errors grow slowly: 32 roundings are more than those of any element of a thousand terms.
        assert np.all(error <= 1.01 * rounding + 32 * eps * size), slot


def check_backward(emulator, shapes, wanted, dtype):
    values, ct = arrays(shapes, dtype)
    made = {}
    for one in backward_passes(shapes, wanted, dtype):
        made |= run_pass(emulator, one, shapes, values, ct, dtype)
    assert set(made) == set(wanted)
    check_gradients(made, shapes, values, ct, dtype)


# Shapes of x, y and w.
CASES = {
    "one element": ((), (), ()),
    "alike": ((5, 24), (5, 24), (5, 24)),
    "alike, w one element": ((4, 130), (4, 130), (1, 1)),
    "w along the last axis": ((7, 6), (7, 6), (1, 6)),
    "w of 3 is not one element": ((3, 8), (3, 8), (3, 1)),
    "a long odd one": ((2579,), (2579,), (1,)),
    "x below y": ((1, 3, 4), (2, 3, 4), (1, 1, 1)),
    "w wider than both": ((1, 2, 5), (1, 2, 5), (3, 2, 5)),
    "w wider, x narrower": ((1, 1, 2, 5), (1, 2, 2, 5), (2, 2, 2, 5)),
    "sum over rows": ((1, 40), (77, 40), (77, 1)),
    "sum over columns": ((33, 1), (33, 300), (1, 300)),
    "sum over the middle": ((3, 1, 20), (3, 50, 20), (1, 50, 1)),
    "sum over both ends": ((1, 5, 1), (19, 5, 37), (1, 1, 1)),
    "sum of everything": ((1, 1), (31, 52), (31, 52)),
    "two sums": ((18, 1, 24), (1, 21, 24), (1, 1, 1)),
    "rows and columns": ((40, 1), (1, 36), (1, 1)),
    "three sums": ((4, 1, 1), (1, 6, 1), (1, 1, 10)),
    "three sums of one axis each": ((1, 5, 6, 8), (7, 1, 6, 8), (7, 5, 1, 8)),
    "channels": ((2, 1, 1, 1), (2, 3, 12, 20), (1, 3, 1, 20)),
    "rows of 3": ((150, 1), (150, 3), (1, 1)),
    "middle between short rows": ((60, 1, 4), (60, 9, 4), (1, 1, 1)),
    "eight axes in turns": ((2, 1, 3, 1, 2, 1, 3, 1), (1, 2, 1, 3, 1, 2, 1, 4), (2, 2, 1, 1, 2, 1, 3, 1)),
}
ALL_DTYPES = {"two sums", "sum over the middle"}
TURNS = [
    (case, dtype)
    for i, case in enumerate(CASES)
    for dtype in (DTYPES if case in ALL_DTYPES else (list(DTYPES)[i % 4],))
]


@pytest.mark.parametrize(("case", "dtype"), TURNS, ids=lambda v: v.replace(" ", "-"))
def test_every_kind_of_broadcast(emulator, case, dtype):
    shapes = shapes_of(*CASES[case])
    check_forward(emulator, shapes, dtype)
    check_backward(emulator, shapes, EVERY, dtype)


@pytest.mark.parametrize("wanted", [("x",), ("y",), ("w",), ("x", "y"), ("x", "w")], ids="".join)
@pytest.mark.parametrize("case", ["alike", "two sums", "sum over both ends"])
def test_only_what_is_wanted(emulator, case, wanted):
    shapes = shapes_of(*CASES[case])
    for one in backward_passes(shapes, wanted, "float32"):
        assert ("w" in one.reads) == bool({"x", "y"} & set(one.gives))
        assert ("x" in one.reads) == ("y" in one.reads) == ("w" in one.gives)
    check_backward(emulator, shapes, wanted, "float32")


@st.composite
def broadcasts(draw):
    """Shapes of x, y and w of one rank up to 8, of up to a few thousand elements."""
    rank = draw(st.integers(0, 8))
    most = max(2, int(3000 ** (1 / max(rank, 1))))
    along = []
    for _ in range(rank):
        size = draw(st.sampled_from((1, 2, 3, 4, 8, 16, 31, 64, 200)).filter(lambda n: n <= 3 * most))
        mask = draw(st.sampled_from([m for m in itertools.product((0, 1), repeat=3) if any(m)]))
        along.append([size if m else 1 for m in mask])
    shapes = [tuple(a[i] for a in along) for i in range(3)]
    if draw(st.booleans()):
        shapes[2] = (1,) * rank
    given = shapes_of(*shapes)
    while math.prod(result_shape(given)) > 6000:
        long = max(range(rank), key=lambda i: result_shape(given)[i])
        given = {s: tuple(min(n, 2) if i == long else n for i, n in enumerate(shape)) for s, shape in given.items()}
    return given


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(shapes=broadcasts(), wanted=st.sets(st.sampled_from(SLOTS), min_size=1))
def test_any_shapes(emulator, dtype, shapes, wanted):
    check_forward(emulator, shapes, dtype)
    check_backward(emulator, shapes, tuple(s for s in SLOTS if s in wanted), dtype)


def kind_of(one):
    """What of a tiling changes the code: which sums each gradient is, whether it is partial, and how rows are held."""
    sums = tuple((*one.sums_over[s], one.parts(s) > 1) for s in one.call.grads)
    return sums, one.splits_p, one.rows_p > 1, one.rows_q > 1, one.stage() > 1


@pytest.mark.parametrize("most", [4, 10])
@pytest.mark.parametrize(
    ("case", "grads", "dtype"),
    [
        ("two sums", ("x", "y"), "float32"),
        ("two sums", EVERY, "bfloat16"),
        ("rows and columns", ("x", "y"), "float32"),
        ("three sums of one axis each", EVERY, "float64"),
        ("channels", EVERY, "float16"),
    ],
)
@pytest.mark.parametrize("part", range(4))
def test_every_kind_of_tiling_is_right_and_not_only_the_one_chosen(emulator, case, grads, dtype, most, part):
    """Of arrays as small as these, the one chosen seldom leaves partial sums."""
    shapes = shapes_of(*CASES[case])
    values, ct = arrays(shapes, dtype)
    kinds = {}
    for t in plan.all_tilings(plan.call_of(shapes, grads, dtype)):
        kinds.setdefault(kind_of(t), t)
    # Spread over all kinds, in the order in which they came.
    taken = list(kinds.values())[:: max(1, len(kinds) // most)]
    assert any(t.parts(s) > 1 for t in taken for s in grads)
    assert taken[part::4]
    for t in taken[part::4]:
        one = plan.tiled_pass(t)
        assert len(one.plan.launches) == 1 + bool(one.scratch)
        check_gradients(run_pass(emulator, one, shapes, values, ct, dtype), shapes, values, ct, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("grads", [("x", "y"), EVERY])
def test_no_tiling_takes_more_shared_memory_than_a_kernel_may_declare(grads, dtype):
    """ptxas refuses it otherwise: sums over two axes of 8-byte numbers, in tiles of many rows, were."""
    padded = ([(1,) * (max(map(len, shapes)) - len(s)) + s for s in shapes] for shapes in lerp_suite.LARGE.values())
    found = [
        t.stage() * t.step_bytes
        for shapes in padded
        for t in plan.all_tilings(plan.call_of(shapes_of(*shapes), grads, dtype))
    ]
    assert tiling.STAGE_BYTES // 2 < max(found) <= 48 << 10


def test_the_same_bits_every_time(emulator, monkeypatch):
    monkeypatch.setattr(tiling, "TAIL_BLOCKS", 1 << 20)  # as many tiles as can be
    plan._passes.cache_clear()
    shapes = shapes_of((18, 1, 128), (1, 40, 128), (1, 1, 1))
    values, ct = arrays(shapes, "float32")
    (one,) = backward_passes(shapes, EVERY, "float32")
    plan._passes.cache_clear()
    assert len(one.scratch) == 3
    first, second = (run_pass(emulator, one, shapes, values, ct, "float32", poison) for poison in (0xA5, 0x5A))
    for slot in EVERY:
        np.testing.assert_array_equal(first[slot].view(np.uint32), second[slot].view(np.uint32))
    check_gradients(first, shapes, values, ct, "float32")


@pytest.mark.parametrize("shapes", [shapes_of((3, 1), (3, 5), (1, 1)), shapes_of((1, 6), (35, 6), (1, 6))], ids=str)
def test_an_infinite_w_makes_no_nan_of_threads_without_an_element(emulator, shapes):
    values = {s: np.ones(shape, np.float32) for s, shape in shapes.items()}
    values["w"][...] = np.inf
    ct = np.ones(result_shape(shapes), np.float32)
    (one,) = backward_passes(shapes, ("x", "y"), "float32")
    made = run_pass(emulator, one, shapes, values, ct, "float32")
    np.testing.assert_array_equal(made["x"], np.full(shapes["x"], -np.inf))
    np.testing.assert_array_equal(made["y"], np.full(shapes["y"], np.inf))


# Inside a jitted program.


def attributes(shapes, dtype):
    return {"broadcast": tuple((slot, shapes[slot], dtype) for slot in SLOTS)}


@pytest.mark.parametrize("case", ["channels", "two sums"])
def test_in_a_jitted_program(emulator, case):
    shapes = shapes_of(*CASES[case])
    values, ct = arrays(shapes, "float32")

    def reference(x, y, w):
        return x + w * (y - x)

    with kernels_on_the_cpu(emulator, cuda):
        (out,) = jax.jit(lambda *a: cuda.forward(*a, residuals=True))(*values.values())
        made = jax.jit(lambda s, c: cuda.cotangent(s, c, EVERY, {}, **attributes(shapes, "float32")))(values, ct)
    np.testing.assert_allclose(out, reference(*values.values()), rtol=1e-5, atol=1e-6)
    wanted = jax.vjp(reference, *values.values())[1](jnp.asarray(ct))
    for mine, theirs in zip(made, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=2e-5)


def test_nothing_is_launched_for_empty_arrays(emulator):
    shapes = shapes_of((1, 3), (0, 3), (1, 1))
    values, ct = arrays(shapes, "float32")
    with kernels_on_the_cpu(emulator, cuda):
        (out,) = jax.jit(lambda *a: cuda.forward(*a, residuals=False))(*values.values())
        dx, dw = jax.jit(lambda s, c: cuda.cotangent(s, c, ("x", "w"), {}, **attributes(shapes, "float32")))(values, ct)
    assert out.shape == (0, 3)
    np.testing.assert_array_equal(dx, np.zeros((1, 3)))
    np.testing.assert_array_equal(dw, np.zeros((1, 1)))
    assert forward_plan(shapes, "float32").launches == ()


def test_what_the_kernels_refuse():
    def of(*shapes, dtype="float32"):
        return {slot: jax.ShapeDtypeStruct(shape, dtype) for slot, shape in zip(SLOTS, shapes, strict=True)}

    h200 = Device("cuda", "sm_90")
    fits = of((2, 3), (2, 3), (1, 1))
    assert LERP.implementations["cuda"].refuses(fits, h200) is None
    assert "needs a CUDA device" in LERP.implementations["cuda"].refuses(fits, Device("cpu"))
    assert "sm_70 is older than sm_75" in LERP.implementations["cuda"].refuses(fits, Device("cuda", "sm_70"))
    assert "rank 9" in LERP.implementations["cuda"].refuses(of((1,) * 9, (1,) * 9, (1,) * 9), h200)
    assert "x is int32" in LERP.implementations["cuda"].refuses(of((2,), (2,), (1,), dtype="int32"), h200)
    mixed = {**fits, "w": jax.ShapeDtypeStruct((1, 1), "bfloat16")}
    assert "one dtype, not bfloat16 and float32" in LERP.implementations["cuda"].refuses(mixed, h200)


# Plans.


def option(one, name):
    (found,) = (o.split("=", 1)[1] for o in one.options if o.startswith(f"-DFL_{name}="))
    return found


@pytest.mark.parametrize(
    ("shapes", "axes"),
    [
        (shapes_of((), (), ()), [(1, "wxy")]),
        (shapes_of((1, 1), (1, 1), (1, 1)), [(1, "wxy")]),
        (shapes_of((4, 5, 6), (4, 5, 6), (1, 1, 1)), [(120, "xy")]),
        (shapes_of((4, 1, 6), (4, 1, 6), (4, 1, 6)), [(24, "wxy")]),
        (shapes_of((4, 5, 1, 1), (4, 5, 6, 7), (1, 1, 1, 1)), [(20, "xy"), (42, "y")]),
        (shapes_of((16, 1, 1, 1), (16, 3, 8, 9), (1, 3, 1, 9)), [(16, "xy"), (3, "wy"), (8, "y"), (9, "wy")]),
    ],
    ids=str,
)
def test_axes_that_look_alike_are_taken_together(shapes, axes):
    assert collapse(shapes, SLOTS) == tuple(BroadcastAxes(size, frozenset(slots)) for size, slots in axes)


def test_axes_are_told_apart_only_by_what_takes_part():
    shapes = shapes_of((4, 5), (1, 5), (4, 5))
    assert collapse(shapes, ("x", "w")) == (BroadcastAxes(20, frozenset("xw")),)
    assert len(collapse(shapes, SLOTS)) == 2


@pytest.mark.parametrize(
    ("columns", "dtype", "vector"),
    [
        (64, "float32", 4),
        (6, "float32", 2),
        (7, "float32", 1),
        (244, "bfloat16", 4),
        (16, "float16", 8),
        (9, "float64", 1),
    ],
)
def test_a_vector_begins_every_row_and_is_no_longer_than_16_bytes(columns, dtype, vector):
    shapes = shapes_of((3, columns), (3, columns), (3, 1))
    for one in (forward_plan(shapes, dtype), backward_passes(shapes, EVERY, dtype)[0].plan):
        assert option(one, "VEC") == str(vector)


def test_64_bits_number_elements_only_where_32_do_not():
    def wide(rows, columns):
        alike, column = (rows, columns), (1, columns)
        yield option(forward_plan(shapes_of(alike, alike, (1, 1)), "bfloat16"), "WIDE")
        for x in (alike, column):
            for one in backward_passes(shapes_of(x, alike, (1, 1)), ("x", "y"), "bfloat16"):
                yield option(one.plan, "WIDE")

    assert set(wide(2**16 - 1, 2**15)) == {"0"}
    assert set(wide(2**16, 2**15)) == {"1"}
    assert set(wide(2**20, 2**20)) == {"1"}


def test_64_bit_numbers_give_the_same_results(emulator, monkeypatch):
    monkeypatch.setattr(plan, "_NARROW", 0)
    plan._passes.cache_clear()
    shapes = shapes_of(*CASES["two sums"])
    assert option(forward_plan(shapes, "float32"), "WIDE") == "1"
    check_forward(emulator, shapes, "float32")
    check_backward(emulator, shapes, EVERY, "float32")
    plan._passes.cache_clear()


LARGE = {
    "middle": shapes_of((512, 1, 1024), (512, 1024, 1024), (1, 1024, 1)),
    "two sums": shapes_of((1024, 1, 1024), (1, 1024, 1024), (1, 1, 1)),
    "rows": shapes_of((65536, 1), (65536, 4096), (1, 1)),
    "columns": shapes_of((1, 4096), (65536, 4096), (1, 1)),
    "everything": shapes_of((1, 1), (65536, 4096), (1, 1)),
    "both ends": shapes_of((1, 512, 1), (512, 512, 512), (1, 1, 1)),
    "rows and columns": shapes_of((16384, 1), (1, 16384), (1, 1)),
    "rows of 3": shapes_of((2**24, 1), (2**24, 3), (1, 1)),
    "rows of 8 in the middle": shapes_of((65536, 1, 8), (65536, 64, 8), (1, 1, 1)),
    "images": shapes_of((16, 1, 1, 1), (16, 3, 244, 244), (1, 3, 1, 244)),
    "three sums": shapes_of((1, 512, 512, 16), (512, 1, 512, 16), (512, 512, 1, 16)),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", LARGE)
def test_ct_is_read_once_and_partial_sums_are_few(case, dtype):
    shapes = LARGE[case]
    (one,) = backward_passes(shapes, ("x", "y"), dtype)
    size = {"float32": 4, "bfloat16": 2}[dtype]
    moved = size * sum(math.prod(s) for s in (result_shape(shapes), *shapes.values()))
    few = {"two sums": 0.13, "three sums": 0.2}.get(case, 0.1)
    assert sum(2 * 4 * math.prod(s) for s in one.scratch) < few * moved
    assert len(one.plan.launches) == 1 + bool(one.scratch)
    first = one.plan.launches[0]
    assert 4 * 132 <= first.grid[0] * math.prod(first.block[:2]) / 256 <= 64 * 264


@pytest.mark.parametrize("case", LARGE)
def test_launches_are_within_the_limits_of_a_device(case):
    for wanted in (("x",), ("y",), ("x", "y"), EVERY):
        for one in backward_passes(LARGE[case], wanted, "float32"):
            for launch in one.plan.launches:
                assert 1 <= launch.grid[0] < 2**31
                assert launch.grid[1:] in ((1, 1), (2, 1), (3, 1))
                assert math.prod(launch.block) in (32, 64, 128, 256)
                assert launch.early


def test_without_sums_there_is_one_launch_of_one_kernel():
    alike = (64, 1024, 1024)
    for w in (alike, (1, 1, 1), (1, 1024, 1)):
        (one,) = backward_passes(shapes_of(alike, alike, w), ("x", "y"), "float32")
        assert [launch.entry for launch in one.plan.launches] == ["lerp_backward_flat"]
        assert not one.scratch


@pytest.mark.parametrize(
    ("dtype", "rows", "items"), [("float32", 16, "2"), ("float32", 17, "1"), ("float64", 8, "2"), ("float64", 9, "1")]
)
def test_threads_take_one_vector_each_where_no_cache_holds_the_arrays(dtype, rows, items):
    alike = (rows, 1024, 1024)  # 64 MiB in 16 rows of float32
    (one,) = backward_passes(shapes_of(alike, alike, (1, 1, 1)), ("x", "y"), dtype)
    assert option(one.plan, "ITEMS") == items


def test_one_element_of_w_is_told_by_count():
    for w, one in (((1, 1), "1"), ((3, 1), "0"), ((1, 4), "0")):
        assert option(forward_plan(shapes_of((3, 4), (3, 4), w), "float32"), "W_ONE") == one
        (made,) = backward_passes(shapes_of((3, 4), (3, 4), w), ("x", "y"), "float32")
        assert option(made.plan, "W_ONE") == one


def test_what_does_not_exist_is_refused():
    with pytest.raises(ArgumentError, match="do not broadcast"):
        forward_plan(shapes_of((2,), (3,), (1,)), "float32")
    with pytest.raises(ArgumentError, match="one rank of at most 8"):
        forward_plan(shapes_of((2,), (1, 2), (1,)), "float32")
    with pytest.raises(ArgumentError, match="empty result"):
        backward_passes(shapes_of((0,), (1,), (1,)), EVERY, "float32")
    with pytest.raises(UnknownNameError, match="unknown dtype 'int8'"):
        forward_plan(shapes_of((2,), (2,), (1,)), "int8")
