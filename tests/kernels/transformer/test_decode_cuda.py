"""The kernels of decode.cu, run on the CPU by the emulator, against float64; caches in place; what is refused; the launch plan."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab.device import Device
from fusionlab.errors import BackendError
from fusionlab.kernels.launch.architectures import ARCHITECTURES
from fusionlab.kernels.launch.compile import KERNELS
from fusionlab.kernels.ops.multi_transformer.card import decode_rows
from fusionlab.kernels.ops.multi_transformer.decode import backend as cuda
from fusionlab.kernels.ops.multi_transformer.decode.persistent import plan as persistent
from fusionlab.kernels.ops.multi_transformer.decode.phased import plan as phased
from fusionlab.kernels.ops.multi_transformer.decode.phased.plan import (
    NOTHING,
    SOURCE,
    Places,
    ProductPhase,
    decode_plan,
    room_on,
)

from ..emulated import kernels_on_the_cpu
from .decode_suite import CASES, OP, Case, attributes_of, check, operands_of, run, shapes_of

FOLDER = KERNELS / "multi_transformer" / "decode" / "phased"
NOWHERE = Places({}, *[NOTHING] * 7)


@pytest.fixture
def on_the_cpu(emulator):
    with kernels_on_the_cpu(emulator, cuda):
        yield emulator


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name):
    check(CASES[name])


@pytest.mark.dear
@pytest.mark.usefixtures("on_the_cpu")
def test_a_ring_of_one_slice_where_there_is_no_room_for_more_against_float64(monkeypatch):
    monkeypatch.setattr(phased, "room_on", lambda arch: 1)
    assert ProductPhase(1, 264, (136,)).cut(1).depth == 1 < ProductPhase(1, 264, (136,)).cut(room_on("sm_120")).depth
    check(CASES["of 136 columns"])


@pytest.fixture
def as_one_kernel(on_the_cpu, monkeypatch):
    """The persistent kernel, of four blocks, wherever it takes the layers. Gives the numbers of layers it was asked for."""
    plans = []
    real = persistent.persistent_plan
    monkeypatch.setattr(persistent, "BLOCKS", 4)
    monkeypatch.setattr(cuda, "is_persistent", persistent.takes)
    monkeypatch.setattr(cuda, "persistent_plan", lambda *given: plans.append(len(given[1])) or real(*given))
    jax.clear_caches()
    yield plans
    jax.clear_caches()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.pre_norm])
def test_one_kernel_of_all_layers_against_float64(as_one_kernel, name):
    check(CASES[name])
    assert as_one_kernel


def test_more_layers_than_a_launch_holds(as_one_kernel, monkeypatch):
    monkeypatch.setattr(persistent, "MOST_LAYERS", 2)
    check(Case(layers=4, past=13, step=7))
    assert 4 in as_one_kernel


@pytest.mark.parametrize("last_thread_first", [False, True])
@pytest.mark.parametrize(("width", "hidden", "kept"), [(72, 1504, 11 << 10), (264, 3000, 22 << 10)])
def test_x_that_is_too_long_for_a_block_is_read_in_parts(
    on_the_cpu, as_one_kernel, monkeypatch, last_thread_first, width, hidden, kept
):
    monkeypatch.setattr(persistent, "_KEPT", kept)
    monkeypatch.setattr(on_the_cpu, "last_thread_first", last_thread_first)
    check(Case(rows=11, hidden=hidden, width=width, layers=2, past=13, step=7, epsilons=(1e-5, None)))
    assert as_one_kernel


def test_many_texts_are_normed_by_a_warp_each(as_one_kernel):
    # More words for a thread than it has registers for parameters.
    check(Case(rows=9, width=1096, heads=3, kv_heads=3, past=13, step=7))
    assert as_one_kernel


@pytest.mark.parametrize("name", ["gated and turned", "eleven texts, two layers"])
def test_one_kernel_does_not_hang_on_the_order_of_threads(on_the_cpu, as_one_kernel, monkeypatch, name):
    given = operands_of(CASES[name])
    want = run(CASES[name], given, "cuda")
    monkeypatch.setattr(on_the_cpu, "last_thread_first", True)
    got = run(CASES[name], given, "cuda")
    assert as_one_kernel
    assert all((a == b).all() for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("past", [12, 1100])  # 1100: in parts
@pytest.mark.parametrize("one_kernel", [False, True])
@pytest.mark.parametrize("value", [-1e30, -np.inf])
def test_a_text_that_sees_nothing(one_kernel, past, value, request):
    """With a finite mask value it gets the mean of the values, with -inf nothing: as the meaning has it."""
    request.getfixturevalue("as_one_kernel" if one_kernel else "on_the_cpu")
    case = Case(causal=False, mask="shared", mask_value=value, past=past, step=5, heads=1, kv_heads=1)
    given = operands_of(case)
    given["mask"] = jnp.zeros_like(given["mask"])
    got, want = (np.asarray(run(case, given, name)[0], np.float32) for name in ("cuda", "xla"))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-2 * np.abs(want).max())


@pytest.mark.usefixtures("on_the_cpu")
def test_differentiated_it_is_its_pieces():
    case = Case()
    given = operands_of(case)
    names = tuple(given)

    def loss(x, implementation):
        values = [x, *list(given.values())[1:]]
        return (
            OP.call(*values, present=names, implementation=implementation, **attributes_of(case))[0]
            .astype(jnp.float32)
            .sum()
        )

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    got, want = (gradient(given["x"], name).astype(jnp.float32) for name in ("cuda", "composed"))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["three texts", "eleven texts, two layers", "of 136 columns", "gated and turned", "norms behind"]
)
def test_it_does_not_hang_on_the_order_of_threads(on_the_cpu, monkeypatch, name):
    given = operands_of(CASES[name])
    want = run(CASES[name], given, "cuda")
    monkeypatch.setattr(on_the_cpu, "last_thread_first", True)
    got = run(CASES[name], given, "cuda")
    assert all((a == b).all() for a, b in zip(got, want, strict=True))


# Caches.


def copies_of(text, shape):
    """What makes a new array of a shape in a compiled program."""
    dims = ",".join(map(str, shape))
    made = [line for line in text.splitlines() if f"bf16[{dims}]" in line.split(" = ")[-1].split("(")[0]]
    return [
        line for line in made if any(f" {op}(" in line for op in ("copy", "concatenate", "pad", "dynamic-update-slice"))
    ]


def step_of(case, given):
    names = tuple(given)
    order = [f"cache_{slot}.{i}" for i in range(case.layers) for slot in "kv"]

    def step(x, caches, at):
        full = given | {"x": x, "step": at} | caches
        y, *made = OP.call(*[full[n] for n in names], present=names, implementation="cuda", **attributes_of(case))
        return y, dict(zip(order, made, strict=True))

    return step


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("loop", ["while", "scan"])
def test_caches_that_a_loop_carries_are_updated_where_they_are(loop):
    case = Case(layers=2, past=9, step=4)
    given = operands_of(case)
    caches = {n: a for n, a in given.items() if n.startswith("cache_")}
    step = step_of(case, given)

    def by_while(x, caches):
        def body(carry):
            at, x, caches = carry
            return at + 1, *step(x, caches, at)

        return jax.lax.while_loop(lambda c: c[0] < 7, body, (jnp.int32(4), x, caches))[1:]

    def by_scan(x, caches):
        return jax.lax.scan(lambda c, at: (step(*c, at), ()), (x, caches), jnp.arange(4, 7, dtype=jnp.int32))[0]

    run_loop = by_while if loop == "while" else by_scan
    want = given["x"], caches
    for at in range(4, 7):
        want = jax.jit(step)(*want, jnp.int32(at))
    compiled = jax.jit(run_loop, donate_argnums=1).lower(given["x"], caches).compile()
    assert not copies_of(compiled.as_text(), caches["cache_k.0"].shape)
    pointers = {a.unsafe_buffer_pointer() for a in caches.values()}
    y, made = compiled(given["x"], caches)
    assert {a.unsafe_buffer_pointer() for a in made.values()} == pointers
    assert (y == want[0]).all()
    assert all((made[n] == want[1][n]).all() for n in made)


# What is refused.

H200 = Device(platform="cuda", arch="sm_90", name="H200", simulated=True)


def refusal(case, change=None, device=H200, **attrs):
    given = shapes_of(case) | (change or {})
    given = {n: a for n, a in given.items() if a is not None}
    try:
        OP.choose(
            *given.values(),
            present=tuple(given),
            device=device,
            implementation="cuda",
            **{**attributes_of(case), **attrs},
        )
    except BackendError as error:
        return str(error)
    return None


def shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


@pytest.mark.parametrize(
    ("case", "change", "attrs", "why"),
    [
        (Case(), {"x": shape(1, 2, 48)}, {}, "one token per text"),
        (Case(), {"step": None}, {"cache": "prefill"}, "one token per text"),
        (Case(rows=17), {}, {}, "17 texts, it takes 1 to 16"),
        (Case(dtype="float32"), {}, {}, "tokens of float32"),
        (Case(), {"up.0": shape(48, 72, dtype=jnp.float32)}, {}, "up.0 is float32, tokens are bfloat16"),
        (Case(), {"cache_k.0": shape(1, 37, 2, 24, dtype=jnp.float16)}, {}, "cache_k.0 is float16"),
        (Case(size=20), {}, {}, "heads of 20 features, it takes multiples of 8"),
        (Case(size=264), {}, {}, "heads of 264 features, it takes up to 256"),
        (Case(hidden=76), {}, {}, "the feed-forward of 76 features"),
        (Case(width=44), {}, {}, "tokens of 44 features"),
        (Case(mask="shared"), {"mask": shape(1, 1, 1, 37, dtype=jnp.float32)}, {}, "a mask of float32"),
        (Case(mask="shared"), {"mask": shape(1, 2, 1, 37, dtype=jnp.bool_)}, {}, "a mask of bool"),
        (Case(mask="shared", causal=False, mask_value=-1e4), {}, {}, "a hidden key might have a weight"),
        (Case(gated=True, turned=("gate",)), {}, {}, "some of gate, up"),
        (Case(turned=("q", "k")), {}, {}, "some of q, k, v"),
        (Case(), {}, {"precision": "BF16_BF16_F32"}, "a precision names an algorithm"),
        (Case(layers=2), {"norm1_bias.1": None}, {}, "norm1_bias is given for some layers"),
    ],
)
def test_what_it_cannot_take_is_refused_with_the_reason(case, change, attrs, why):
    found = refusal(case, change, **attrs)
    assert found is not None
    assert why in found


def test_what_it_takes_is_not_refused():
    assert all(refusal(case) is None for case in CASES.values())
    assert "older than sm_75" in (refusal(Case(), device=replace(H200, arch="sm_70")) or "")
    assert "older than sm_90, the oldest with thread block clusters" in refusal(
        Case(), device=replace(H200, arch="sm_80")
    )
    assert refusal(Case(), device=Device.of("sm_120")) is None


def test_a_few_texts_of_a_measured_width_prefer_the_kernels(monkeypatch):
    def preferred(device=H200, **change):
        case = Case(**{"width": 1024, "heads": 16, "kv_heads": 16, "size": 64, "hidden": 64} | change)
        given = shapes_of(case)
        return OP.choose(*given.values(), present=tuple(given), device=device, **attributes_of(case))

    whole = replace(H200, units=132)
    assert preferred() == preferred(whole, rows=16) == preferred(whole, rows=16, width=4096) == "cuda"
    assert preferred(rows=2) == preferred(whole, rows=17) == preferred(whole, rows=16, pre_norm=False) == "composed"
    assert preferred(whole, rows=4, heads=32, kv_heads=32) == "composed"
    assert preferred(pre_norm=False) == "cuda"
    assert preferred(width=512) == preferred(Device.of("sm_100")) == "composed"
    assert preferred(dtype="float32") == "composed"  # refused
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert preferred(replace(H200, simulated=False)) == "composed"


def test_one_kernel_is_for_layers_of_many_bytes_on_a_device_that_holds_its_blocks():
    rows = decode_rows()
    device = replace(H200, units=132)
    taken = {name: persistent.takes(row) and persistent.pays(row, device) for name, row in rows.items()}
    names = [name.removeprefix("bfloat16 ") for name, is_taken in taken.items() if is_taken]
    assert names == ["E4096 of 1", "E4096 of 16", "E1024 of 1", "E4096 of 4"]
    wide = rows["bfloat16 E4096 of 1"]
    for other in (H200, replace(device, units=114), replace(device, arch="sm_100")):
        assert not persistent.pays(wide, other)
    plan = persistent.persistent_plan(wide, [NOWHERE] * 48, {})
    assert [(one.entry, one.cooperative) for one in plan.launches] == [
        ("decode_begin", False),
        ("decode_layers", True),
    ] * 2
    assert all(one.shared <= 227 << 10 and 8 * len(one.params) <= 4096 for one in plan.launches)


def test_one_kernel_has_no_blocks_that_shorten_no_phase(monkeypatch):
    wide = decode_rows()["bfloat16 E4096 of 16"]  # 64 tiles or a multiple, for pairs of blocks, and 512 attentions
    assert persistent.blocks_of(wide) == 128
    (launch,) = [one for one in persistent.persistent_plan(wide, [NOWHERE], {}).launches if one.cooperative]
    assert launch.grid == (128, 1, 1)
    odd = replace(wide, up=replace(wide.up, columns=(66 * 64,)))  # a tile for each of 66 pairs
    assert persistent.blocks_of(odd) == 132
    monkeypatch.setattr(persistent, "BLOCKS", 4)
    assert persistent.blocks_of(wide) == 4


# The launch plan.


def test_a_call_is_five_kernels_a_layer_and_the_first_starts_when_all_before_has_ended():
    row = decode_rows()["bfloat16 E4096 of 1"]
    plan = decode_plan(row, [NOWHERE] * 3, "sm_90")
    names = [one.entry.removeprefix("decode_") for one in plan.launches]
    assert names == ["qkv", "attend", "out", "up", "down"] * 3
    assert [one.early for one in plan.launches] == [False] + [True] * 14


def test_many_rows_are_normed_once_by_a_kernel():
    plan = decode_plan(decode_rows()["bfloat16 E4096 of 16"], [NOWHERE], "sm_90")
    names = [one.entry.removeprefix("decode_") for one in plan.launches]
    assert names == ["norm1", "qkv", "attend", "out", "norm2", "up", "down"]


def test_blocks_are_whole_clusters_and_fit_two_to_a_multiprocessor():
    for row in decode_rows().values():
        for product in (row.qkv, row.out, row.up, row.down):
            tile = product.cut(room_on("sm_90"))
            assert product.blocks(tile) % tile.split == 0
            assert product.shared(tile) <= (227 << 10) // 2 - 1024
            assert tile.split * product.own(tile) >= product.inner


def test_a_product_of_odd_sizes_is_cut():
    for product in (
        ProductPhase(1, 8, (8,)),
        ProductPhase(16, 8, (8, 8, 8)),
        ProductPhase(5, 56, (24,), turned=True, gated=True),
    ):
        for arch in (*SOURCE.archs, ""):
            assert product.shared(product.cut(room_on(arch))) <= min(
                ARCHITECTURES[arch].shared if arch else 99 << 10, 108 << 10
            )


def test_what_may_start_early_reads_nothing_of_the_kernels_before_it_waits():
    """Weights, biases, caches, masks and numbers are there since before the launch plan began; the rest is not."""
    sources = {name: (FOLDER / name).read_text(encoding="utf-8") for name in ("project.cuh", "attend.cuh", "decode.cu")}
    for text in sources.values():
        assert "__restrict__" not in re.sub(r"//[^\n]*", "", text)  # such memory may be read before the wait
    before = {
        "project.cuh": sources["project.cuh"].split("void project(")[1],
        "attend.cuh": sources["attend.cuh"].split("void attend(")[1].split("{", 1)[1],
    }
    for name, written in (
        ("project.cuh", ("given.x", "given.residual)", "given.out")),
        ("attend.cuh", ("qkv", "out[")),
    ):
        early, _, late = before[name].partition("fl_wait();")
        assert late
        assert not [w for w in written if w in early], name
