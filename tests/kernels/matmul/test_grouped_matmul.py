"""`grouped_matmul` and its pass: the same bits as `jax.lax.ragged_dot` on a CPU, every product of a train step, what is declined and why,
and which implementation is chosen where."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab import ops
from fusionlab.errors import ArgumentError, UnknownNameError
from fusionlab.kernels.ops.grouped_matmul.op import GROUPED_MATMUL, LEAST_ROWS

ROWS, GROUPS, INNER, COLUMNS = 24, 4, 8, 6
# Sizes of the groups: all rows, some of them, more than there are, none.
SIZES = ([10, 0, 9, 5], [3, 0, 4, 2], [20, 10, 0, 7], [0, 0, 0, 0])


def drawn(dtype="float32", rows=ROWS, groups=GROUPS, inner=INNER, columns=COLUMNS):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=s), dtype) for s in ((rows, inner), (groups, inner, columns)))


def experts(x, w, sizes):
    return jax.lax.tanh(jax.lax.ragged_dot(x, w, sizes))


def loss(x, w, sizes):
    return (experts(x, w, sizes).astype(jnp.float32) ** 2).mean()


def by_general(x, w, sizes):
    """Of matrices that lie turned."""
    numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
    return jax.lax.ragged_dot_general(x, w.swapaxes(1, 2), sizes, numbers)


# Program -> how many products it has.
PROGRAMS = {
    "forward": (experts, 1),
    "turned": (by_general, 1),
    "a result in float32": (partial(jax.lax.ragged_dot, preferred_element_type=jnp.float32), 1),
    "a precision": (partial(jax.lax.ragged_dot, precision="highest"), 1),
    "differentiated": (jax.value_and_grad(loss, (0, 1)), 3),
    "differentiated, a result in float32": (
        jax.grad(
            lambda x, w, sizes: (jax.lax.ragged_dot(x, w, sizes, preferred_element_type="float32") ** 2).sum(), (0, 1)
        ),
        None,
    ),
    "twice by x": (jax.grad(lambda x, w, sizes: jax.grad(loss)(x, w, sizes).sum()), None),
    "rematerialised": (jax.grad(jax.checkpoint(loss), (0, 1)), None),
    "in a loop": (
        lambda x, w, sizes: jax.lax.scan(lambda c, _: (c + experts(x, w, sizes).sum(), None), 0.0, None, 3),
        1,
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_product_is_found_and_gives_the_same_bits(name, dtype):
    program, count = PROGRAMS[name]
    x, w = drawn(dtype)
    found = fl.find(program, x, w, jnp.asarray(SIZES[0]))
    sites = [c for c in found.candidates if c.op == "grouped_matmul"]
    assert sites
    assert count in (None, len(sites))
    assert all(c.backend.verdict == "same code" for c in sites)
    fused, plain = jax.jit(fl.fuse(program)), jax.jit(program)
    if count == 1 and name != "in a loop":  # a gradient of what was fused is the product's own
        fused, plain = (
            jax.jit(jax.value_and_grad(lambda *a, f=f: f(*a).astype(jnp.float32).sum(), (0, 1))) for f in (fused, plain)
        )
    for sizes in SIZES:
        for a, b in zip(*(jax.tree.leaves(f(x, w, jnp.asarray(sizes))) for f in (fused, plain)), strict=True):
            np.testing.assert_array_equal(a, b)


def along(f, x, w):
    return jax.jvp(f, (x, w), (w.sum() + x, x.sum() + w))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.grad(f, (0, 1)),
        lambda f: jax.grad(f, 1),
        lambda f: partial(along, f),
        lambda f: jax.grad(lambda x, w: jax.grad(f)(x, w).sum(), (0, 1)),
    ],
    ids=["gradients", "of w alone", "forward mode", "twice"],
)
def test_the_op_is_differentiated_as_the_product_is(transform):
    x, w = drawn()
    sizes = jnp.asarray(SIZES[1])
    got, want = (
        jax.tree.leaves(jax.jit(transform(lambda x, w, product=product: (product(x, w, sizes) ** 2).sum()))(x, w))
        for product in (ops.grouped_matmul, jax.lax.ragged_dot)
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


def test_a_batch_of_groups_is_declined_with_its_reason():
    x, w = drawn()
    sizes = jnp.asarray(SIZES[0])
    batch = (jnp.stack([a, a]) for a in (x, w, sizes))
    found = fl.find(jax.vmap(jax.lax.ragged_dot), *batch, passes="grouped_matmul")
    assert [(r.code, "its axes are not" in r.sentence) for r in found.rejections] == [("axes", True)]
    numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
    wide = fl.find(lambda x, w, sizes: jax.lax.ragged_dot_general(x, w[..., None], sizes, numbers), x, w, sizes)
    assert [(r.code, "it has more axes" in r.sentence) for r in wide.rejections] == [("axes", True)]
    whole = fl.find(jax.lax.ragged_dot, *(jnp.ones(a.shape, "int32") for a in (x, w)), sizes, passes="grouped_matmul")
    assert [r.code for r in whole.rejections] == ["dtype"]


@pytest.mark.parametrize(
    ("device", "dtype", "sizes", "chosen", "why"),
    [
        ("cpu", "bfloat16", {}, "xla", "CUDA device"),
        ("sm_80", "bfloat16", {}, "xla", "sm_80 is older than sm_90"),
        ("sm_100", "bfloat16", {}, "xla", "sm_100 is not sm_90"),
        ("sm_90", "bfloat16", {}, "mosaic", "measured faster"),
        ("sm_90", "float16", {}, "mosaic", "measured faster"),
        ("sm_90", "float32", {}, "xla", "x is float32"),
        ("sm_90", "bfloat16", {"columns": 100}, "xla", "not multiples of 64"),
        ("sm_90", "bfloat16", {"inner": 72}, "xla", "not multiples of 64"),
        ("sm_90", "bfloat16", {"rows": LEAST_ROWS + 4}, "xla", "not a multiple of 8"),
        ("sm_90", "bfloat16", {"rows": LEAST_ROWS - 8}, "xla", "measured slower"),
        ("sm_90", "bfloat16", {"groups": 1}, "xla", "measured slower"),
        ("sm_90", "bfloat16", {"groups": 300}, "xla", "300 groups"),
    ],
)
def test_where_the_kernels_are_taken(device, dtype, sizes, chosen, why):
    given = {"rows": LEAST_ROWS, "groups": 4, "inner": 128, "columns": 192} | sizes
    shape = {
        slot: [given[axis] for axis in axes]
        for slot, axes in {"x": ("rows", "inner"), "w": ("groups", "inner", "columns")}.items()
    }
    x, w = (jax.ShapeDtypeStruct(s, dtype) for s in shape.values())
    group_sizes = jax.ShapeDtypeStruct((given["groups"],), "int32")
    (site,) = fl.find(jax.lax.ragged_dot, x, w, group_sizes, device=device).candidates
    assert site.backend.name == chosen
    assert any(why in b.reason for b in site.backends), site.backends
    step = fl.find(jax.grad(loss, (0, 1)), x, w, group_sizes, device=device)
    assert {c.backend.name for c in step.candidates if c.op == "grouped_matmul"} == {chosen}


@pytest.mark.parametrize(
    ("change", "attrs", "words"),
    [
        ({"x": (24,)}, {}, "x has shape (24,), needed rank 2"),
        ({"w": (8, 6)}, {}, "w has shape (8, 6), needed rank 3"),
        ({"w": (3, 8, 6)}, {}, "do not fit"),
        ({"w": (4, 7, 6)}, {}, "do not fit"),
        ({"group_sizes": (4, 1)}, {}, "group_sizes has shape (4, 1), needed rank 1"),
        ({}, {"w_contract": 1}, "do not fit"),
        ({}, {"w_contract": 2}, "w_contract is 2, needed 0"),
        ({}, {"implementation": "cuda"}, "implementation"),
    ],
)
def test_a_wrong_argument_is_named(change, attrs, words):
    shapes = {"x": (24, 8), "w": (4, 8, 6), "group_sizes": (4,)} | change
    given = {slot: jnp.zeros(s, "int32" if slot == "group_sizes" else "float32") for slot, s in shapes.items()}
    with pytest.raises((ArgumentError, UnknownNameError), match=words.replace("(", r"\(").replace(")", r"\)")):
        ops.grouped_matmul(**given, **attrs)
    with pytest.raises(ArgumentError, match="whole numbers"):
        GROUPED_MATMUL.call(jnp.zeros((24, 8)), jnp.zeros((4, 8, 6)), jnp.zeros(4))
