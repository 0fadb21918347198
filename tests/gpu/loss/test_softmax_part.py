"""The kernel for the softmax of `linear_cross_entropy` on a CUDA device, against rows.py in float64 and float32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.ops import linear_cross_entropy as benchmark
from fusionlab.device import Device
from fusionlab.kernels.ops.linear_cross_entropy.own.softmax_part import softmax_part, takes
from fusionlab.kernels.ops.linear_cross_entropy.settings import OUT_OF_RANGE
from tests.kernels.linear_cross_entropy.softmax_suite import EVERYTHING, Case, by_kernel, check, operands

ROWS = 700  # of which a block has several
ARGMAX = {"also": ("argmax",)}
CASES = {
    "32768": Case(ROWS, 32768, "float32", "float16"),
    "32768, bfloat16": Case(ROWS, 32768, "bfloat16", "bfloat16", EVERYTHING),
    "32000, float16": Case(ROWS, 32000, "float16", "float32"),
    "50257": Case(300, 50257, "float32", "bfloat16", EVERYTHING),
    "50257, bfloat16": Case(ROWS, 50257, "bfloat16", "bfloat16"),
    "128256": Case(300, 128256, "float32", "float32"),
    "128256, bfloat16": Case(300, 128256, "bfloat16", "float16", EVERYTHING),
    "151936": Case(300, 151936, "float32", "bfloat16"),
    "151936, bfloat16": Case(300, 151936, "bfloat16", "bfloat16"),
    "17": Case(20000, 17, "bfloat16", "bfloat16", EVERYTHING),
    "50257 of 50304, bfloat16": Case(ROWS, 50257, "bfloat16", "bfloat16", beyond=47),
    "50257 of 50304": Case(300, 50257, "float32", "float16", EVERYTHING, beyond=47),
    "classes": Case(300, 50304, "bfloat16", "bfloat16", {"classes": 50257, "fill": -1e9}),
    "classes of 50257 of 50304": Case(300, 50257, "float32", "float16", {"classes": 50000, **EVERYTHING}, beyond=47),
    "1": Case(3, 1),
    "one row": Case(1, 50257),
    "no cotangent": Case(ROWS, 50257, "bfloat16", None),
    "no cotangent, smoothing": Case(ROWS, 32768, "float32", None, EVERYTHING),
    "cap": Case(ROWS, 32768, "float32", "float16", {"softcap": 30.0}),
    "cap, bfloat16": Case(ROWS, 50257, "bfloat16", "bfloat16", {"softcap": 4.0, **EVERYTHING}),
    "cap, no cotangent": Case(300, 128256, "float32", None, {"softcap": 50.0}),
    "bias": Case(ROWS, 32768, "float32", "float16", bias="bfloat16"),
    "bias, 50257": Case(300, 50257, "float32", "float32", {"softcap": 30.0, **EVERYTHING}, bias="float32"),
    "argmax": Case(ROWS, 32768, "bfloat16", "bfloat16", ARGMAX),
    "argmax of 50257": Case(ROWS, 50257, "bfloat16", "bfloat16", {"label_smoothing": 0.1, **ARGMAX}),
    "argmax, 128256": Case(300, 128256, "float32", "float16", ARGMAX),
    "argmax, classes, no cotangent": Case(300, 50304, "bfloat16", None, {"classes": 50257, "fill": -1e9, **ARGMAX}),
}


@pytest.fixture(scope="module")
def device():
    found = Device.current()
    if not takes(Case(1, 1).form(found), "float32", 1, found):
        pytest.skip(f"the kernel does not run on {found}")
    return found


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_arithmetic_of_rows(name, device):
    check(CASES[name], operands(CASES[name]), device)


@pytest.mark.parametrize("out_of_range", OUT_OF_RANGE)
def test_labels_out_of_range(out_of_range, device):
    case = Case(7, 3001, "float32", "float32", {"out_of_range": out_of_range, **EVERYTHING})
    check(case, operands(case), device)


@pytest.mark.parametrize("size", [7, 1003, 32768, 128256])
def test_rows_of_nan_and_infinities(size, device):
    case = Case(8, size, options=ARGMAX)
    h, labels, of_loss = operands(case)
    h = h.at[0, 3].set(jnp.nan).at[1, size - 1].set(jnp.inf).at[2].set(-jnp.inf).at[3, 1].set(-jnp.inf)
    h = h.at[4, :].set(jnp.inf).at[5, 2:4].set(jnp.asarray([jnp.nan, jnp.inf])).at[6].set(-200.0).at[7].set(1e30)
    check(case, (h, labels, of_loss.at[3].set(1.0)), device)


@pytest.mark.parametrize("name", ["32768", "50257, bfloat16", "128256"])
def test_twice_is_the_same_to_the_bit(name, device):
    case = CASES[name]
    given, form = operands(case), case.form(device)
    first, second = (jax.tree.map(lambda a: np.asarray(a).tobytes(), by_kernel(case, given, form)) for _ in range(2))
    assert first == second


def test_in_place_in_a_scan(device):
    """Each step's logits become its cotangent, in a captured graph; the rows of a chunk start where their logits would apart, too."""
    case = Case(1024, 50264, "bfloat16", "bfloat16", EVERYTHING)
    form, given = case.form(device), operands(case)
    run = functools.partial(softmax_part, form=form, wanted="bfloat16")

    def chunked(h, labels, of_loss):
        chunks = tuple(a.reshape(4, -1, *a.shape[1:]) for a in (h, labels, of_loss))
        found = jax.lax.scan(lambda _, part: (None, run(part[0] * 1, *part[1:])), None, chunks)[1]
        return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), found)

    program = jax.jit(chunked)
    want = by_kernel(case, given, form)
    for _ in range(3):
        found = program(*given)
        for name, a in want.items():
            assert np.asarray(found[name]).tobytes() == np.asarray(a).tobytes(), name


@pytest.mark.parametrize("logits", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["bias", "softcap", "accuracy"])
def test_the_op_is_as_near_to_float64_as_the_original(form, logits, device):
    case = benchmark.Case(5000, 64, 10007, logits=logits, form=form)
    args, how = benchmark.arguments(case), {"logits": logits, "form": form}
    own = functools.partial(benchmark.fused, implementation="cuda", **how)
    true = benchmark.truth(case, args)
    mine, theirs = (
        benchmark.errors(case, jax.jit(benchmark.graded(loss, case))(*args), true)
        for loss in (own, functools.partial(benchmark.plain, **how))
    )
    assert all(a <= 1.1 * b + 1e-6 for a, b in zip(mine, theirs, strict=True)), (mine, theirs)
