"""The device's record, its peaks, and comparisons in device time, on a real GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.device import Device
from fusionlab.evidence import time_pair
from fusionlab.evidence.instruments import peaks


def product(x):
    return x @ x


def three_products(x):
    return x @ x @ x @ x


@pytest.fixture
def x():
    return jax.random.normal(jax.random.key(0), (2048, 2048), jnp.bfloat16) * 0.02


def test_the_record_is_that_of_the_gpu():
    here = Device.current()
    assert here.platform == "cuda"
    assert here.capability >= 75
    assert here.memory > 1 << 30
    assert here.runtime
    assert here.missing == ()
    assert not here.simulated


def test_peaks_are_of_a_gpu_s_order_and_the_record_stays_equal():
    found = peaks.measure_peaks()
    # Far below what it can: other tests may be using it.
    assert 1e10 < found.copy_bytes_per_s < 2e13
    assert 1e11 < found.gemm_flop_per_s < 1e16
    assert found == Device.current()


def test_three_products_take_three_times_as_long_in_device_time(x):
    timing = time_pair(product, three_products, x)
    assert timing.clock == "device time"
    assert timing.verdict == "slower"
    assert 0.2 < timing.ratio < 0.5


def test_donated_arguments_are_timed_on_copies(x):
    timing = time_pair(product, product, x, samples=4, donate_argnums=0)
    assert timing.clock == "device time"
    assert timing.before.repeats == 1
    assert float(jnp.abs(x).sum()) > 0


def test_a_comparison_says_that_it_is_device_time(x):
    found = fl.compare(product, three_products, x, samples=4, numerics=False)
    assert [t.clock for t in found.timings] == ["device time"] * 2
    assert "device time" in str(found)


def test_arrays_on_the_cpu_are_timed_by_wall_time():
    cpu = jax.devices("cpu")[0]
    x = jax.device_put(jnp.ones((64, 64)), cpu)
    assert time_pair(product, product, x, samples=2).clock == "wall time"
