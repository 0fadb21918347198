"""Launch plans in jitted programs, on the CPU: values, memory, errors, threads, devices, executables of other processes.

The plans compute with numpy on the addresses that XLA hands over; they are in launching.py, as are the programs of other processes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab.kernels.launch import plans
from fusionlab.kernels.launch.ffi_call import BOOK, TARGET, launch
from tests.simulated import environment

from .launching import LAUNCHED, MATMUL, PREPARED, NumpyPlan, doubled, numpy_call, plan_for
from .launching_devices import TRIALS

DTYPES = ("float16", "bfloat16", "float32", "float64", "uint8", "int8", "bool")
F32 = jnp.float32


def struct(shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def process(*arguments):
    """What a program of launching.py prints, in a process of its own."""
    command = [sys.executable, "-m", "kernels.launch.launching", *map(str, arguments)]
    env = {name: value for name, value in environment(1).items() if name != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def in_threads(n, work):
    """work(0) ... work(n - 1) at once; their results."""
    results, barrier = [None] * n, threading.Barrier(n)

    def run(i):
        barrier.wait()
        results[i] = work(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return results


# Values.


@pytest.mark.parametrize("rank", range(5))
def test_several_operands_and_results_of_every_rank(rank):
    shape = (2, 3, 1, 4)[:rank]
    a = (np.arange(np.prod(shape)) + 1.5).astype(np.float32).reshape(shape)
    b = (3 - np.arange(np.prod(shape))).astype(np.int8).reshape(shape)
    results = (struct(shape), struct((2,)), struct((a.nbytes,), jnp.uint8))
    total, sums, raw = jax.jit(lambda a, b: numpy_call("several", a, b, results=results))(a, b)
    np.testing.assert_array_equal(total, a + b)
    assert total.shape == shape
    np.testing.assert_array_equal(sums, [a.sum(), b.sum()])
    np.testing.assert_array_equal(raw, np.frombuffer(a.tobytes(), np.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_arrives_and_returns_bit_by_bit(dtype):
    with jax.enable_x64(True):
        bits = np.random.default_rng(0).integers(0, 256, 15 * np.dtype(getattr(jnp, dtype)).itemsize, np.uint8)
        x = (bits % 2 if dtype == "bool" else bits).view(getattr(jnp, dtype)).reshape(3, 5)
        (got,) = jax.jit(lambda x: numpy_call("reversed_flat", x))(x)
        assert got.dtype == x.dtype
        assert np.asarray(got).tobytes() == x.reshape(-1)[::-1].tobytes()


def test_memory_is_row_major_whatever_is_computed_before_and_after():
    x = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    got = jax.jit(lambda x: numpy_call("reversed_flat", x.T)[0].T)(x)
    np.testing.assert_array_equal(got, x.T.reshape(-1)[::-1].reshape(4, 3).T)


def test_empty_operands_and_results():
    x = np.empty((0, 3), np.float32)
    results = (struct((0,)), struct((2,)), struct((3, 0, 2)))
    empty, full, deep = jax.jit(lambda x: numpy_call("fill_with_seven", x, results=results))(x)
    assert (empty.shape, deep.shape) == ((0,), (3, 0, 2))
    np.testing.assert_array_equal(full, [7, 7])


def test_a_call_of_no_operands():
    (got,) = jax.jit(lambda: numpy_call("fill_with_seven", results=[struct((2, 2))]))()
    np.testing.assert_array_equal(got, np.full((2, 2), 7))


def test_scratch_is_one_more_result():
    def f(x):
        scratch = struct((x.size * x.dtype.itemsize,), jnp.uint8)
        return numpy_call("double_by_way_of_scratch", x, results=[x, scratch])[:-1]

    x = np.arange(5.0, dtype=np.float32)
    (got,) = jax.jit(f)(x)
    np.testing.assert_array_equal(got, 2 * x)
    (_, _, (out, scratch), _) = LAUNCHED[-1]
    assert scratch
    assert scratch != out


# Memory.


def in_place(x):
    return numpy_call("double", x, aliases={0: 0})[0]


def test_in_place_with_donation_takes_the_caller_s_memory():
    x = jnp.arange(1000.0)
    mine = x.unsafe_buffer_pointer()
    got = jax.jit(in_place, donate_argnums=0)(x)
    np.testing.assert_array_equal(got, 2 * np.arange(1000))
    (_, (operand,), (result,), _) = LAUNCHED[-1]
    assert operand == result == mine == got.unsafe_buffer_pointer()
    assert x.is_deleted()


def test_in_place_without_donation_leaves_the_caller_s_array_alone():
    x = jnp.arange(1000.0)
    got = jax.jit(in_place)(x)
    np.testing.assert_array_equal(x, np.arange(1000))
    np.testing.assert_array_equal(got, 2 * np.arange(1000))
    (_, (operand,), (result,), _) = LAUNCHED[-1]
    assert operand == result != x.unsafe_buffer_pointer()


def test_in_place_where_the_operand_is_still_needed():
    x = jnp.arange(10.0)
    got = jax.jit(lambda x: (in_place(x + 1), x, in_place(in_place(x + 1)) - x))(x)
    for g, want in zip(got, (2 * (x + 1), x, 4 * (x + 1) - x), strict=True):
        np.testing.assert_array_equal(g, want)


def test_without_aliases_results_have_memory_of_their_own():
    jax.jit(doubled, donate_argnums=0)(jnp.arange(1000.0)).block_until_ready()
    (_, (operand,), (result,), _) = LAUNCHED[-1]
    assert operand != result


def test_in_scan_and_in_cond():
    x = jnp.arange(4.0)
    got = jax.jit(lambda x: jax.lax.scan(lambda c, _: (in_place(c), doubled(c)), x, length=5))(x)
    np.testing.assert_array_equal(got[0], 32 * x)
    np.testing.assert_array_equal(got[1], x * 2 ** np.arange(1, 6)[:, None])
    branch = jax.jit(lambda n, x: jax.lax.cond(n > 0, doubled, lambda x: x, x))
    np.testing.assert_array_equal(branch(1, x), 2 * x)
    np.testing.assert_array_equal(branch(0, x), x)


# Errors.


class Unknown(NumpyPlan):
    kind = "test unknown kind"


def launching_of(plan):
    return lambda x: launch(plan, [x], [struct(x.shape, x.dtype)])[0]


@pytest.mark.parametrize(
    ("plan", "texts"),
    [
        (
            Unknown("double", (("float32", (8,)),), (("float32", (8,)),)),
            ["BackendError: unknown launch plan", "KeyError"],
        ),
        (plan_for("fails_to_prepare", [struct((8,))], struct((8,))), ["OSError: no such thing on this device"]),
        (plan_for("fails_to_run", [struct((8,))], struct((8,))), ["ZeroDivisionError: went wrong while it ran"]),
        (plan_for("absent", [struct((8,))], struct((8,))), ["KeyError: 'absent'"]),
        (plan_for("double", [struct((9,))] * 2, struct((8,))), ["ValueError: zip()"]),
    ],
    ids=["unknown kind", "prepare", "run", "content", "arguments"],
)
def test_an_exception_reaches_the_caller_with_its_text_and_the_plan_s_name(plan, texts):
    x = jnp.arange(8.0)
    for _ in range(2):  # an error is not kept: it comes again
        with pytest.raises(jax.errors.JaxRuntimeError) as caught:
            jax.block_until_ready(jax.jit(launching_of(plan))(x))
        message = str(caught.value)
        assert all(text in message for text in texts), message
        assert f"[launch plan {plans.plan_name(plan)}]" in message
    np.testing.assert_array_equal(jax.jit(doubled)(x), 2 * x)


def test_a_target_with_other_attributes_says_what_it_needs():
    for attributes in ({}, {"plan": np.int32(3)}, {"plan": MATMUL, "more": "text"}):
        call = jax.ffi.ffi_call(TARGET, struct((8,)))
        with pytest.raises(jax.errors.JaxRuntimeError, match="needed one, the name of a plan, as text"):
            jax.jit(lambda x, call=call, attributes=attributes: call(x, **attributes))(
                jnp.arange(8.0)
            ).block_until_ready()


def test_a_run_that_failed_can_be_repeated_once_the_cause_is_gone(monkeypatch):
    from . import launching

    f = jax.jit(launching_of(plan_for("fails_to_run", [struct((6,))], struct((6,)))))
    x = jnp.arange(6.0)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ZeroDivisionError"):
        f(x).block_until_ready()
    mended = plans.plan_name(plan_for("fails_to_run", [struct((6,))], struct((6,)))).encode()
    fills = plans.Prepared(lambda stream, i, o: launching.view(o[0], "float32", (6,)).fill(5))
    monkeypatch.setitem(BOOK._prepared, (mended, 0), fills)
    np.testing.assert_array_equal(f(x), np.full(6, 5))


# When a plan is prepared.


def test_prepared_once_when_the_executable_is_loaded_and_never_by_a_call():
    x = jnp.arange(17.0)
    before, prepared = BOOK.counters(), len(PREPARED)
    f = jax.jit(doubled)
    compiled = f.lower(x).compile()
    assert PREPARED[prepared:] == ["double"]
    launched = len(LAUNCHED)
    for _ in range(5):
        compiled(x).block_until_ready()
        f(x).block_until_ready()
    jax.jit(lambda x: doubled(x) + 1)(x)  # another executable, the same plan
    after = BOOK.counters()
    assert PREPARED[prepared:] == ["double"]
    assert after["misses"] - before["misses"] == 1
    assert after["failures"] == before["failures"]
    assert after["held"] - before["held"] == 1
    assert len(LAUNCHED) - launched == after["launches"] - before["launches"] == 11


# Threads.


def test_eight_threads_call_one_function():
    f = jax.jit(lambda x: doubled(doubled(x) + 1))
    xs = [jnp.arange(64.0) + 100 * i for i in range(8)]
    f(xs[0])
    for x, many in zip(xs, in_threads(8, lambda i: [f(xs[i]) for _ in range(20)]), strict=True):
        for got in many:
            np.testing.assert_array_equal(got, 4 * np.asarray(x) + 2)


def test_eight_threads_compile_different_functions():
    x = jnp.arange(21.0)
    before = BOOK.counters()["misses"]

    def work(i):
        return jax.jit(lambda x: numpy_call(f"double_{i}", x)[0] + i)(x)

    for i, got in enumerate(in_threads(8, work)):
        np.testing.assert_array_equal(got, 2 * np.asarray(x) + i)
    assert BOOK.counters()["misses"] - before == 8


# Several devices.


@pytest.mark.devices
@pytest.mark.parametrize("name", TRIALS)
def test_every_device_launches_its_own_shard(on_devices, name):
    """One of them by hand: `python -m pytest "tests/kernels/launch/test_launch.py::test_every_device_launches_its_own_shard[checked]"`."""
    on_devices("kernels.launch.launching_devices", name)


# Executables of other processes.


@pytest.mark.dear
def test_executables_of_another_process(tmp_path):
    """The persistent compilation cache holds programs with launches also on the CPU, and so does an executable serialised ahead of time."""
    wanted = (2 * np.arange(6.0) + 1).tolist()
    first = process("cached", tmp_path)
    assert (first["hits"], first["values"], first["prepared when compiled"], first["loaded"]) == (0, wanted, 1, None)
    assert first["files"]
    second = process("cached", tmp_path)
    assert second["hits"] == 1
    assert second["files"] == first["files"]
    assert second["values"] == wanted
    # Loaded before anything was traced: the plan was made from its name alone, and at load.
    assert second["loaded"]["values"] == wanted
    assert second["loaded"]["prepared"] == ["double"]
    assert second["loaded"]["counters"]["misses"] == 1
    third = process("unregistered", tmp_path)
    name = plans.plan_name(plan_for("double", [struct((6,))], struct((6,))))
    assert f"unknown launch plan '{name}'" in third["error"]
    assert "compile it again" in third["error"]
    assert third["after"] is True


# Lowered ahead of time.


def test_lowered_and_compiled_ahead_of_time():
    x = jnp.arange(5.0)
    compiled = jax.jit(in_place).lower(x).compile()
    np.testing.assert_array_equal(compiled(x), 2 * x)
    assert compiled.as_text().count(f'custom_call_target="{TARGET}"') == 1


def test_lowered_for_cuda_on_this_host():
    x = jnp.arange(5.0)
    text = jax.jit(lambda x: in_place(x + 1)).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = re.findall(r"stablehlo\.custom_call @(\w+)\(.*", text)
    assert call == TARGET
    (line,) = [line for line in text.splitlines() if "custom_call" in line]
    name = plans.plan_name(plan_for("double", [x], x))
    assert f'plan = "{name}"' in line.replace("\\22", '"')
    assert "output_operand_alias<output_tuple_indices = [], operand_index = 0," in line
    plain = jax.jit(doubled).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "operand_index" not in plain
