"""softmax_part.cu, emulated on a CPU, against rows.py in float64 and float32; what it refuses; how it is laid over rows."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab.device import Device
from fusionlab.kernels.launch.architectures import REGISTERS, RESERVED
from fusionlab.kernels.ops.linear_cross_entropy import cuda
from fusionlab.kernels.ops.linear_cross_entropy.own import part_plan, softmax_part
from fusionlab.kernels.ops.linear_cross_entropy.own.part_plan import PartTile, limits_of, part_tile
from fusionlab.kernels.ops.linear_cross_entropy.settings import OUT_OF_RANGE, Settings
from fusionlab.ops import linear_cross_entropy
from tests.kernels.emulated import kernels_on_the_cpu
from tests.kernels.transformations import assert_same

from .originals import operands as op_operands
from .originals import original
from .softmax_suite import EVERYTHING, Case, by_kernel, check, exact, operands

H200 = Device.of("h200")
# Vectors in registers, in shared memory, and read again in whole batches and beside them; rows of all offsets.
ALL_PLACES = PartTile(32, 1, 17, 2, 5)
TILED = {
    "float32, all places": Case(5, 32 * 4 * 16 + 77, tile=ALL_PLACES),
    "bfloat16, all places": Case(5, 32 * 8 * 16 + 201, "bfloat16", "bfloat16", EVERYTHING, ALL_PLACES),
    "float16, all places": Case(3, 32 * 8 * 16 + 8, "float16", "float16", tile=ALL_PLACES),
    "shared memory alone": Case(5, 2300, "float32", "bfloat16", EVERYTHING, PartTile(64, 2, 9, 0, 9)),
    "registers alone": Case(5, 1000, "bfloat16", "float32", tile=PartTile(64, 2, 2, 2, 0)),
    "nothing kept": Case(5, 2301, "bfloat16", "float16", EVERYTHING, PartTile(64, 2, 5, 0, 0)),
}
SIZES = {
    "1": Case(5, 1, options={"label_smoothing": 0.1}),
    "3": Case(5, 3, "bfloat16", "bfloat16"),
    "9": Case(6, 9, "float16", "float32"),
    "100": Case(4, 100, "float32", "float16"),
    "one row": Case(1, 1003, "bfloat16", "float32"),
    "5001": Case(3, 5001, "float32", "bfloat16"),
    "no cotangent": Case(4, 5001, "bfloat16", None),
    "no cotangent, smoothing": Case(4, 1001, "float32", None, EVERYTHING),
    "50257": Case(3, 50257, "bfloat16", "bfloat16"),
    "128256": Case(2, 128256, "float32", "bfloat16"),
}
CLASSES = {"classes": 270, "fill": float(np.finfo(np.float32).min)}
PADDED = {
    "entries beyond": Case(4, 301, "float32", "float32", beyond=19),
    "entries beyond, 16 bits": Case(4, 301, "bfloat16", "bfloat16", EVERYTHING, beyond=19),
    "entries beyond, no vector": Case(4, 301, "bfloat16", "float32", EVERYTHING, beyond=4),
    "classes": Case(4, 301, "float32", "float32", CLASSES),
    "classes, everything": Case(4, 304, "bfloat16", "float32", {**CLASSES, **EVERYTHING}),
    "classes, infinite": Case(4, 304, "bfloat16", "bfloat16", {**CLASSES, "fill": -np.inf}),
    "classes, of float64": Case(4, 304, "float32", "bfloat16", {**CLASSES, "fill": -1e300}),
    "classes, far smaller logits": Case(4, 304, "float32", "float32", {**CLASSES, "fill": 1.0, "scale": 0.1}),
    "both": Case(4, 301, "bfloat16", "bfloat16", {**CLASSES, **EVERYTHING}, beyond=19),
    "both, all places": Case(
        3, 4301, "bfloat16", "bfloat16", {**EVERYTHING, "classes": 4090, "fill": -9.0}, ALL_PLACES, 19
    ),
    "both, no cotangent": Case(4, 301, "bfloat16", None, {**CLASSES, **EVERYTHING}, beyond=19),
}
MORE = {
    "cap": Case(5, 1003, "bfloat16", "bfloat16", {"softcap": 3.0}),
    "cap, everything, padded": Case(
        4, 304, "float32", "float32", {**CLASSES, **EVERYTHING, "softcap": 2.0, "also": ("argmax",)}
    ),
    "cap, float32": Case(5, 1003, "float32", "float32", {"softcap": 30.0, "scale": 0.5}),
    "argmax, all places": Case(5, 32 * 4 * 16 + 77, options={"also": ("argmax",)}, tile=ALL_PLACES),
    "argmax, equal ones": Case(9, 1003, "bfloat16", "bfloat16", {"also": ("argmax", "lse"), "scale": -1.0}),
    "argmax, classes, no cotangent": Case(
        4, 301, "bfloat16", None, {"classes": 270, "fill": 40.0, "also": ("argmax",)}, beyond=19
    ),
    "bias": Case(5, 1004, "float32", "float16", bias="bfloat16"),
    "bias, everything, all places": Case(
        5,
        32 * 4 * 16 + 77,
        options={**EVERYTHING, "softcap": 4.0, "also": ("argmax",), "classes": 2000},
        tile=ALL_PLACES,
        beyond=3,
        bias="float32",
    ),
    "bias, 16 bits": Case(4, 303, "bfloat16", "bfloat16", bias="float16", beyond=1),
    "argmax, a few": Case(5, 3, "float32", "float32", {"also": ("argmax",)}),
}


@pytest.fixture(autouse=True)
def _on_the_cpu(request, monkeypatch):
    """One multiprocessor, so that a block has several rows, as on a card of many rows."""
    if "emulator" in request.fixturenames:
        emulator = request.getfixturevalue("emulator")
        monkeypatch.setattr(part_plan, "MULTIPROCESSORS", 1)
        monkeypatch.setattr(emulator, "card", "sm_90")
        with kernels_on_the_cpu(emulator, cuda):
            yield
    else:
        yield


@pytest.mark.dear
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("name", TILED)
def test_wherever_a_row_is_kept(name):
    check(TILED[name], operands(TILED[name]), H200)


@pytest.mark.usefixtures("emulator")
def test_a_row_in_all_places_with_everything():
    case = replace(TILED["bfloat16, all places"], count=3, size=32 * 8 * 16 + 201)
    check(case, operands(case), H200)


@pytest.mark.dear
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("name", SIZES)
def test_rows_of_every_size(name):
    check(SIZES[name], operands(SIZES[name]), H200)


@pytest.mark.dear
@pytest.mark.usefixtures("emulator")
def test_blocks_of_several_sizes_in_one_process():
    for threads, size in ((32, 301), (256, 2040)):
        units = -(-size // (4 * threads))
        case = Case(3, size, options={"label_smoothing": 0.1}, tile=PartTile(threads, 1, units, 0, units))
        check(case, operands(case), H200)


@pytest.mark.dear
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("name", PADDED)
def test_entries_that_are_no_logits(name):
    """Labels among the classes, behind them and out of range."""
    case = PADDED[name]
    h, labels, of_loss = operands(case)
    check(case, (h, labels.at[0].set(case.options.get("classes", 9)), of_loss), H200)


@pytest.mark.dear
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("name", MORE)
def test_a_cap_and_the_largest_entry(name):
    """Two rows have their largest entry several times."""
    h, labels, of_loss = operands(MORE[name])
    case, h = MORE[name], h.at[:2].set(jnp.round(h[:2]))
    check(case, (h, labels, of_loss), H200)


@pytest.mark.dear
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("out_of_range", OUT_OF_RANGE)
@pytest.mark.parametrize("more", [{}, EVERYTHING], ids=["plain", "everything"])
def test_labels_out_of_range(out_of_range, more):
    case = Case(7, 301, "float32", "float32", {"out_of_range": out_of_range, **more})
    found = check(case, operands(case), H200)
    assert np.isnan(found["loss"][1:3]).all() == (out_of_range == "nan")


@pytest.mark.dear
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("dtype", ["int64", "int8", "uint32", "uint64"])
def test_labels_of_other_dtypes(dtype):
    with jax.enable_x64(True):
        case = Case(4, 120, options={"out_of_range": "drop"})
        h, labels, of_loss = operands(case)
        far = jnp.asarray([-(2**33) + 5, 2**33 + 5, 7, 119], "int64")
        labels = far if dtype == "int64" else jnp.asarray([5, 119, 7, 200 if dtype[0] == "u" else -1]).astype(dtype)
        check(case, (h, labels, of_loss), H200)


@pytest.mark.dear
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(
    "more", [{"also": ("argmax",)}, {"label_smoothing": 0.1, "z_loss": 0.01}], ids=["plain", "everything"]
)
@pytest.mark.parametrize("size", [7, 1003])
def test_rows_of_nan_and_infinities(size, more):
    case = Case(9, size, "float32", "float32", more)
    h, labels, of_loss = operands(case)
    h = h.at[0, 3].set(jnp.nan).at[1, size - 1].set(jnp.inf).at[2].set(-jnp.inf).at[3, 1].set(-jnp.inf)
    h = h.at[4, :].set(jnp.inf).at[5, 2:4].set(jnp.asarray([jnp.nan, jnp.inf])).at[6].set(-200.0).at[7].set(1e30)
    h = h.at[8, labels[8]].set(-jnp.inf)
    check(case, (h, labels, of_loss.at[3].set(1.0)), H200)


@pytest.mark.dear
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("threads", [64, 1024])
def test_the_largest_of_a_row_of_minus_infinity_is_the_first_entry(threads):
    """In blocks of as many warps as a warp has lanes, too, and where the last entries of a row are in no vector."""
    units = -(-1003 // (4 * threads))
    case = Case(5, 1003, options={"also": ("argmax",)}, tile=PartTile(threads, 1, units, 0, units))
    h, labels, of_loss = operands(case)
    check(case, (h.at[:].set(-jnp.inf), labels, of_loss), H200)


@pytest.mark.dear
@pytest.mark.usefixtures("emulator")
def test_a_large_common_addend_costs_no_accuracy():
    case = Case(4, 2000, "float32", "float32", {"label_smoothing": 0.1})
    h, labels, of_loss = operands(case)
    found = check(case, (h + 4096.0, labels, of_loss), H200)
    want = exact(case, (h + 4096.0, labels, of_loss), case.form(H200))
    np.testing.assert_allclose(found["loss"], want["loss"], rtol=1e-6)


@pytest.mark.dear
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("name", ["float32, all places", "shared memory alone"])
def test_the_order_in_which_threads_take_turns_changes_nothing(name, emulator, monkeypatch):
    case = TILED[name]
    given = operands(case)
    found = [by_kernel(case, given, case.form(H200))]
    monkeypatch.setattr(emulator, "last_thread_first", True)
    found.append(by_kernel(case, given, case.form(H200)))
    first, second = (jax.tree.map(lambda a: np.asarray(a).tobytes(), one) for one in found)
    assert first == second


@pytest.mark.dear
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(("dtype", "out"), [("bfloat16", "float16"), ("float32", "float32")])
def test_the_cotangent_takes_the_place_of_logits_that_nobody_needs(dtype, out):
    case = Case(9, 301, dtype, out)
    form, given = case.form(H200), operands(case)

    def run(h, labels, of_loss):
        return softmax_part.softmax_part(h * 1, labels, of_loss, form, out)["dh"]

    compiled = jax.jit(run, donate_argnums=0).lower(*given).compile()
    (call,) = [line for line in compiled.as_text().splitlines() if "custom-call(" in line and "fusionlab" in line]
    assert "output_to_operand_aliasing={{0}: (0, {})}" in call
    want = check(case, given, H200)["dh"]
    assert np.asarray(compiled(given[0] + 0, *given[1:])).tobytes() == np.asarray(want).tobytes()
    assert (np.asarray(given[0]) == np.asarray(operands(case)[0])).all()  # what is still needed was copied first


@pytest.mark.dear
@pytest.mark.usefixtures("emulator")
def test_in_a_scan_over_chunks_of_rows_with_further_axes():
    case = Case(12, 208, "bfloat16", "bfloat16")
    form, (h, labels, of_loss) = case.form(H200), operands(case)
    chunk = lambda a: a.reshape(3, 2, 2, *a.shape[1:])  # noqa: E731

    def step(_, part):
        return None, softmax_part.softmax_part(*part, form, "bfloat16")

    found = jax.jit(lambda *given: jax.lax.scan(step, None, given)[1])(chunk(h), chunk(labels), chunk(of_loss))
    want = by_kernel(case, (h, labels, of_loss), form)
    for name, a in want.items():
        assert np.asarray(found[name]).reshape(a.shape).tobytes() == np.asarray(a).tobytes()


def test_without_rows_nothing_is_launched():
    form = Settings(device=H200)
    found = softmax_part.softmax_part(jnp.zeros((0, 7)), jnp.zeros(0, int), jnp.zeros(0), form, "bfloat16")
    assert {name: (a.shape, a.dtype.name) for name, a in found.items()} == {
        **dict.fromkeys(("top", "mass", "loss", "lse"), ((0,), "float32")),
        "dh": ((0, 7), "bfloat16"),
    }


@pytest.mark.parametrize(
    ("change", "dtype", "words"),
    [
        ({"present": ("x", "w", "bias"), "dtypes": ("bfloat16", "bfloat16", "float32")}, "bfloat16", "bias of another"),
        ({"across": (("v", ("data",)),)}, "float32", "devices share"),
        ({}, "float64", "float64"),
    ],
)
def test_what_is_left_to_xla_is_named(change, dtype, words):
    assert words in softmax_part.refuses(Settings(**change), dtype, 100)
    assert not softmax_part.takes(Settings(**change), dtype, 100, H200)


def test_where_it_runs():
    form = Settings(also=("lse",), across=(("m0", ("data",)),))
    cards = ("a100", "l4", "h100", "b200", "rtx5090", "t4", "cpu")
    named = [name for name in cards if softmax_part.takes(form, "float16", 9, Device.of(name))]
    assert named == ["a100", "l4", "h100", "b200", "rtx5090"]
    assert not softmax_part.takes(form, "float16", 9, None)
    assert "older than sm_80" in cuda.refuses_device(Device.of("t4"))


@pytest.mark.parametrize("arch", part_plan.SOURCE.archs)
def test_every_entry_has_a_thread_and_a_block_its_room(arch):
    limits = limits_of(arch)
    for size in (1, 3, 8, 100, 1000, 4096, 32000, 32768, 50257, 128256, 151936, 1 << 20):
        for dtype, vec in (("float32", 4), ("bfloat16", 8)):
            for twice in (True, False):
                tile = part_tile(size, dtype, twice, limits)
                assert tile.units * tile.threads * vec >= size - size % vec
                assert tile.held + tile.staged <= tile.units
                assert tile.threads * tile.resident <= REGISTERS // 64
                assert tile.threads * tile.resident <= 32 * limits.warps
                assert tile.resident <= limits.blocks
                assert tile.shared + part_plan.STATIC <= limits.shared
                assert tile.resident * (tile.shared + part_plan.STATIC + RESERVED) <= limits.shared_of_all
                assert twice or not tile.held + tile.staged  # nothing would fill it again


def test_what_is_kept_of_a_row_on_an_h200():
    """Figures: rows of up to 32,768 in float32 and 50,257 in bfloat16 whole, by two blocks; of wider ones what fits one block."""
    limits = limits_of("sm_90")
    assert part_tile(32768, "float32", True, limits) == PartTile(512, 2, 16, 2, 14)
    assert part_tile(32768, "bfloat16", True, limits) == PartTile(512, 2, 8, 0, 8)
    assert part_tile(50257, "bfloat16", True, limits) == PartTile(512, 2, 13, 0, 13)
    assert part_tile(50257, "float32", True, limits) == PartTile(1024, 1, 13, 0, 13)
    assert part_tile(128256, "float32", True, limits) == PartTile(1024, 1, 32, 2, 14)


OPTIONS = {
    "plain": {},
    "smoothing, z-loss, tied": {"label_smoothing": 0.1, "z_loss": 0.01, "transposed": True, "out_of_range": "drop"},
    "classes": {"classes": 31, "fill": -4.0},
    "scale, also": {"scale": 0.3, "out_of_range": "zero", "also": ("lse", "loss", "argmax")},
    "bias, cap": {"softcap": 2.0, "bias": True, "also": ("argmax",)},
}


@pytest.mark.dear
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("size", [37, 101], ids=["", "padded"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_op_by_the_kernel_is_the_original(name, weighted, size, at_once, monkeypatch):
    """Values and gradients, of a sum and by row, of chunks that multiply their own cotangents or leave them for one product; of a
    vocabulary that is padded for the products, too.
    """
    monkeypatch.setattr(Settings, "on_a_gpu", at_once)
    options = dict(OPTIONS[name])
    if not weighted and "also" in options:
        options["also"] = tuple(also for also in options["also"] if also != "loss")
    x, w, labels, bias, weights = op_operands((13,), 8, size)
    given = (x, w.T if options.get("transposed") else w, bias if options.pop("bias", False) else None)
    weights = weights if weighted else None

    def run(f, **more):
        def loss(x, w, bias):
            out = f(x, w, labels, bias, weights, **options, **more)
            out = out if isinstance(out, tuple) else (out,)
            return sum(jnp.sum(jnp.sin(jnp.where(jnp.isnan(a), 0, a))) for a in out if a.dtype == x.dtype), out

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)[: 2 + (given[2] is not None)], has_aux=True))(*given)

    assert_same(run(linear_cross_entropy, implementation="cuda", chunk=5), run(original), 3e-6)


@pytest.mark.dear
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("check_vma", [False, True])
def test_the_op_by_the_kernel_in_a_shard_map(check_vma, monkeypatch):
    monkeypatch.setattr(Settings, "on_a_gpu", True)
    x, w, labels, bias, weights = op_operands((13,), 8, 37)
    mesh, split = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,)), jax.P("d")

    def graded(f, x, w, bias, **more):
        def loss(x, labels, weights, w, bias):
            return jax.lax.psum(f(x, w, labels, bias, weights, softcap=2.0, **more), "d")

        specs = (split, split, split, jax.P(), jax.P())
        whole = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=jax.P(), check_vma=check_vma)
        return jax.jit(jax.value_and_grad(lambda x, w, bias: whole(x, labels, weights, w, bias), (0, 1, 2)))(x, w, bias)

    ours = graded(linear_cross_entropy, x, w, bias, implementation="cuda", chunk=5)
    assert_same(ours, graded(original, x, w, bias), 3e-6)


@pytest.mark.dear
@pytest.mark.usefixtures("emulator")
def test_the_op_by_the_kernel_in_16_bits_is_as_far_from_float64_as_the_original(monkeypatch):
    monkeypatch.setattr(Settings, "on_a_gpu", True)
    x, w, labels, _, _ = op_operands((96,), 32, 512, "bfloat16")
    labels, weights = labels % 512, jnp.full(96, 1 / 96)

    def graded(f, x, w, **more):
        def loss(x, w):
            return f(x, w, labels, None, weights, **more)

        return [np.asarray(a, np.float64) for a in jax.tree.leaves(jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w))]

    with jax.enable_x64(True):
        true = graded(original, x.astype("float64"), w.astype("float64"))
    ours = graded(linear_cross_entropy, x, w, logits_dtype="bfloat16", implementation="cuda")
    for a, b, t in zip(ours, graded(original, x, w, logits_dtype="bfloat16"), true, strict=True):
        # On a CPU XLA does not round the logits of the original, as it does where they are written to memory.
        assert np.linalg.norm(a - t) <= 1.25 * np.linalg.norm(b - t) + 2e-5 * np.linalg.norm(t)


@pytest.mark.dear
@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("weighted", [False, True])
def test_a_derivative_by_row_in_16_bits_is_of_the_logits_that_the_statistics_are_of(weighted):
    """With a bias that rounding the logits to 16 bits a second time would be seen beside."""
    x, w, labels, bias, weights = op_operands((13,), 16, 40, "bfloat16")
    labels, bias, weights = labels % 40, (8 * bias).astype("bfloat16"), weights if weighted else None

    def derivatives(f, *given, **more):
        def loss(x, w, bias):
            out, lse = f(x, w, labels, bias, weights, also=("lse",), **more)
            return jnp.sum(out) + jnp.sum(jnp.square(lse)) / 1000

        found = jax.jit(jax.grad(loss, (0, 1, 2)))(*given), jax.jit(lambda *a: jax.jvp(loss, a, a)[1])(*given)
        return [np.asarray(a, np.float64) for a in jax.tree.leaves(found)]

    with jax.enable_x64(True):
        true = derivatives(original, *(a.astype("float64") for a in (x, w, bias)))
    ours = derivatives(linear_cross_entropy, x, w, bias, logits_dtype="bfloat16", implementation="cuda")
    for a, t in zip(ours, true, strict=True):
        assert np.linalg.norm(a - t) <= 0.004 * np.linalg.norm(t)  # 0.023 and more of rounded logits, by row
