"""Masks and biases of attention that is written with two axes of heads: each form that broadcasts to the scores has the meaning it has."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl

from ..checks import jit, normal

ATTENTION = "dot_product_attention"
# Batch, heads of keys, query heads that share one, queries, keys. Where sizes are equal, an axis may be taken for another.
SIZES = {"all different": (2, 3, 4, 5, 7), "all equal": (2, 2, 2, 2, 2), "heads equal": (1, 3, 3, 4, 4)}
USES = {
    "mask": lambda s, m: jnp.where(m, s, -1e9),
    "mask, -inf": lambda s, m: jnp.where(m, s, -jnp.inf),
    "bias": lambda s, m: s + m,
}
# Which axes a mask has; the others it lacks, or has with size 1.
FORMS = tuple(itertools.product((False, True), repeat=5))


def shape_of(form, full):
    """The shape of a mask with these axes; every second form is without the axes of size 1 that it starts with."""
    shape = tuple(n if there else 1 for there, n in zip(form, full, strict=True))
    lacking = form.index(True) if any(form) else len(form)
    return shape[lacking:] if sum(form) % 2 else shape


def mask_of(shape, use):
    (m,) = normal(shape, seed=3)
    m = np.asarray(m)
    if use == "bias":
        return m
    seen = m < 0.8
    seen[..., :1] = True  # of each row
    return seen


def grouped(order, use, flat=False):
    """Attention of *B T N H with N query heads as two axes, in the order of a reshape: "kg", heads of keys first, or "gk", as tiled."""

    def attend(q, k, v, m):
        b, t, n, h = q.shape
        shared = n // k.shape[2]
        two = (k.shape[2], shared) if order == "kg" else (shared, k.shape[2])
        if flat:  # a mask of all query heads
            m = m.reshape(m.shape[0], *(two if m.shape[1] > 1 else (1, 1)), *m.shape[2:])
        s = jnp.einsum(f"bt{order}h,bskh->b{order}ts", q.reshape(b, t, *two, h), k) * 0.5
        p = jax.nn.softmax(USES[use](s, m))
        return jnp.einsum(f"b{order}ts,bskh->bt{order}h", p, v).reshape(b, t, n, v.shape[-1])

    return attend


def check(fn, args, declines=False):
    """The numbers are the same, and the site is fused, or declined with a reason."""
    found = fl.find(fn, *args, passes=ATTENTION)
    assert len(found.candidates) + len(found.rejections) == 1
    assert bool(found.rejections) == declines, found.rejections
    assert all(r.code == "value" and r.sentence.endswith("NaN or infinity at other entries") for r in found.rejections)
    want, got = (jit(f)(*args) for f in (fn, fl.fuse(fn, passes=ATTENTION)))
    assert np.isfinite(want).all()
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


def operands(sizes, more):
    b, k, g, t, s = sizes
    return (*normal((b, t, k * g, 4), (b, s, k, 4), (b, s, k, 3)), more)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "".join("bkgts"[i] for i in range(5) if form[i]) or "one")
@pytest.mark.parametrize("order", ["kg", "gk"])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_mask_of_any_axes_has_the_numbers_of_the_program(sizes, order, form):
    use = [*USES][(FORMS.index(form) + [*SIZES].index(sizes)) % len(USES)]
    b, k, g, t, s = SIZES[sizes]
    shape = shape_of(form, (b, *((k, g) if order == "kg" else (g, k)), t, s))
    # A mask without an axis of keys hides all keys of a row or none: of a hidden one the program has NaN, and the op 0.
    declines = use == "mask, -inf" and (not shape or shape[-1] == 1) and max(shape, default=1) > 1
    check(grouped(order, use), operands(SIZES[sizes], mask_of(shape, use)), declines)


@pytest.mark.parametrize("of_batch", [False, True])
@pytest.mark.parametrize("of_heads", [False, True])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("order", ["kg", "gk"])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_mask_of_all_query_heads_is_split_as_they_are(sizes, order, use, of_heads, of_batch):
    b, k, g, t, s = SIZES[sizes]
    shape = (b if of_batch else 1, k * g if of_heads else 1, t, s)
    check(grouped(order, use, flat=True), operands(SIZES[sizes], mask_of(shape, use)))
