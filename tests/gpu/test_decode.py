"""Layers that decode one token a text by our own kernels on a CUDA device: against float64, at the sizes of models, caches in place."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.measuring import normal
from benchmarks.programs.decoding import Case as Sizes
from benchmarks.programs.decoding import by_op, caches_of, layers_of, plain
from fusionlab.kernels.ops.multi_transformer.decode import backend as cuda
from fusionlab.kernels.ops.multi_transformer.decode.persistent import plan as persistent
from tests.kernels.transformer.decode_suite import CASES, check, operands_of, run

from .activity import activity

MODELS = {
    "E1024 of 1": Sizes("", 1024, 16, 512, 1),
    "E1024 of 16": Sizes("", 1024, 16, 512, 16),
    "E2048 of 5": Sizes("", 2048, 16, 700, 5),
    "E4096 of 2": Sizes("", 4096, 32, 300, 2),
    "E4096 of 1": Sizes("", 4096, 32, 700, 1),
    "E4096 of 16": Sizes("", 4096, 32, 300, 16),
}


@pytest.fixture(autouse=True)
def needs_a_device_that_runs_it():
    from fusionlab.device import Device

    if unable := cuda.refuses_device(Device.current()):
        pytest.skip(unable)


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name):
    check(CASES[name])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.pre_norm])
def test_one_kernel_of_all_layers_against_float64(name, monkeypatch):
    monkeypatch.setattr(cuda, "is_persistent", persistent.takes)
    jax.clear_caches()
    check(CASES[name])
    jax.clear_caches()


def test_twice_is_the_same_to_the_bit():
    case = CASES["eleven texts, two layers"]
    given = operands_of(case)
    once, again = (run(case, given, "cuda") for _ in range(2))
    assert all((a == b).all() for a, b in zip(once, again, strict=True))


def distance(exact, got):
    exact, got = (np.asarray(a, np.float32) for a in (exact, got))
    return np.linalg.norm(got - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("one_kernel", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_the_sizes_of_models(name, one_kernel, monkeypatch):
    """Eight layers, against the same in float32, and as near to it as the plain program is."""
    if not one_kernel:
        monkeypatch.setattr(cuda, "is_persistent", lambda row: False)
    jax.clear_caches()
    sizes = MODELS[name]
    args = layers_of(sizes), normal(1, sizes.batch, 1, sizes.embed), caches_of(sizes), jnp.int32(sizes.cache - 3)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, args)
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(plain)(*wide)
    got, old = jax.jit(functools.partial(by_op, implementation="cuda"))(*args), jax.jit(plain)(*args)
    for true, new, before in zip(jax.tree.leaves(exact), jax.tree.leaves(got), jax.tree.leaves(old), strict=True):
        assert distance(true, new) <= 1.5 * distance(true, before) + 1e-3
        assert distance(true, new) <= 2e-2


def test_a_call_is_one_custom_call_and_five_kernels_a_layer(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda, "is_persistent", lambda row: False)
    sizes = MODELS["E4096 of 2"]
    args = layers_of(sizes), normal(1, sizes.batch, 1, sizes.embed), caches_of(sizes), jnp.int32(9)
    program = jax.jit(functools.partial(by_op, implementation="cuda")).lower(*args).compile()
    assert len(re.findall(r'custom_call_target="fusionlab', program.as_text())) == 1
    found = activity(lambda: program(*args), tmp_path, 1)
    ours = {name: count for name, count in found.kernels.items() if name.startswith("decode_")}
    assert ours == dict.fromkeys((f"decode_{part}" for part in ("qkv", "attend", "out", "up", "down")), 8)


@pytest.mark.parametrize("name", ["E1024 of 1", "E1024 of 16", "E4096 of 1"])
def test_wide_layers_are_one_kernel(tmp_path, name):
    sizes = MODELS[name]
    args = layers_of(sizes), normal(1, sizes.batch, 1, sizes.embed), caches_of(sizes), jnp.int32(9)
    program = jax.jit(functools.partial(by_op, implementation="cuda")).lower(*args).compile()
    found = activity(lambda: program(*args), tmp_path, 1)
    ours = {name: count for name, count in found.kernels.items() if name.startswith("decode_")}
    assert ours == {"decode_begin": 1, "decode_layers": 1}


def test_caches_that_a_loop_carries_are_updated_where_they_are():
    sizes = MODELS["E1024 of 16"]
    layers, x, caches = layers_of(sizes), normal(1, sizes.batch, 1, sizes.embed), caches_of(sizes)

    def loop(layers, x, caches):
        def body(carry):
            step, x, caches = carry
            return step + 1, *by_op(layers, x, caches, step, "cuda")

        return jax.lax.while_loop(lambda c: c[0] < 20, body, (jnp.int32(10), x, caches))[1:]

    want = x, caches
    for step in range(10, 20):
        want = jax.jit(functools.partial(by_op, implementation="cuda"))(layers, *want, jnp.int32(step))
    compiled = jax.jit(loop, donate_argnums=2).lower(layers, x, caches).compile()
    size = sum(a.nbytes for a in jax.tree.leaves(caches))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 8
    got = compiled(layers, x, caches)
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
