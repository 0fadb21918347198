"""JAX's own settings, each tried in a process in which nothing was fused before: what `jax.jit` does under it, the fused function does.

Run by test_settings.py, which asks for some settings by name; a line of JSON for each comes back: the name, and what is wrong or "".
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fusionlab as fl

SETTINGS: dict[str, Callable[[], Any]] = {
    "rank_promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype_promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
    "checking_leaks": jax.checking_leaks,
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "matmul_precision": lambda: jax.default_matmul_precision("highest"),
    "enable_x64": lambda: jax.enable_x64(True),
    "disable_jit": lambda: jax.disable_jit(True),
    "log_compiles": lambda: jax.log_compiles(True),
    "enable_checks": lambda: jax.enable_checks(True),
    "legacy_prng_key": lambda: jax.legacy_prng_key("error"),
}


@contextlib.contextmanager
def together() -> Iterator[None]:
    """The strictest: as the tests of many libraries run."""
    with (
        SETTINGS["rank_promotion"](),
        SETTINGS["dtype_promotion"](),
        SETTINGS["transfer_guard"](),
        jax.checking_leaks(),
    ):
        yield


SETTINGS["together"] = together
ROWS = 8


def layer(x, w, b):
    return jax.nn.gelu(x @ w + b[None])


def norm(x, scale, shift):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * scale[None] + shift[None]


def attend(q, k, v):
    scores = jnp.where(jnp.tril(jnp.ones((ROWS, ROWS), bool))[None], q @ k.swapaxes(-1, -2) * 0.25, -1e9)
    return jax.nn.softmax(scores, -1) @ v


def loss(fn: Callable) -> Callable:
    return lambda *args: (fn(*args) ** 2).sum()


def step(fn: Callable) -> Callable:
    return jax.value_and_grad(loss(fn), (0, 1))


def programs() -> Iterator[tuple[Callable, tuple, str]]:
    rng = np.random.default_rng(0)
    for fn, shapes, name in (
        (layer, ((4, 6), (6, 10), (10,)), "gemm_epilogue"),
        (norm, ((4, 32), (32,), (32,)), "layer_norm"),
        (attend, ((2, ROWS, 4),) * 3, "dot_product_attention"),
    ):
        yield fn, tuple(jax.device_put(rng.normal(size=s).astype("float32")) for s in shapes), name


def same(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jax.typeof(a) == jax.typeof(b), (jax.typeof(a), jax.typeof(b))
        np.testing.assert_allclose(jax.device_get(a), jax.device_get(b), rtol=1e-4, atol=1e-5)


def under(setting: str) -> None:
    """Found, right, and of the same types; forward, fused in a train step, and differentiated once it is fused."""
    given = list(programs())
    with SETTINGS[setting]():
        for fn, args, name in given:
            assert fl.find(fn, *args).counts()[name] == 1
            same(fl.fuse(fn)(*args), jax.jit(fn)(*args))
        fn, args, name = given[0]
        want = jax.jit(step(fn))(*args)
        assert fl.find(step(fn), *args).counts()[f"{name}_grad"] == 1
        same(fl.fuse(step(fn))(*args), want)
        same(jax.jit(step(fl.fuse(fn)))(*args), want)
    SPECIAL.get(setting, lambda: None)()


def nan_is_told() -> None:
    fn, (x, w, b), _ = next(programs())
    with jax.debug_nans(True):
        for run in (jax.jit(fn), fl.fuse(fn)):
            try:
                run(x * np.float32(np.nan), w, b)
            except FloatingPointError:
                continue
            raise AssertionError("a NaN went by")


def branches_on_values() -> None:
    """Python that asks for a value runs where nothing is traced."""
    fn, args, _ = next(programs())
    with jax.disable_jit():
        same(fl.fuse(lambda *args: fn(*args) if args[0].sum() > -1e9 else None)(*args), fn(*args))


def precision_is_the_programs() -> None:
    """As traced, under whatever it is lowered."""
    fn, args, _ = next(programs())

    def products(text: str) -> list[str]:
        return [line.rpartition("precision")[2][:22] for line in text.splitlines() if "dot_general" in line]

    plain = jax.jit(fn).trace(*args).lower().as_text()
    traced = fl.fuse(fn).trace(*args)
    with jax.default_matmul_precision("highest"):
        assert products(traced.lower().as_text()) == products(plain)
        high = jax.jit(fn).trace(*args).lower().as_text()
        assert products(fl.fuse(fn).trace(*args).lower().as_text()) == products(high) != products(plain)


def logs_its_own_compilation_alone() -> None:
    def told(fn: Callable, args: tuple) -> list[str]:
        lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("jax").addHandler(handler)
        with jax.log_compiles(True):
            fn(*args)
        logging.getLogger("jax").removeHandler(handler)
        return [line for line in lines if line.startswith("Compiling")]

    for number, (fn, args, _) in enumerate(programs()):
        other = functools.partial(fn)  # neither was compiled before
        assert len(told(fl.fuse(other), args)) == len(told(jax.jit(other), args)) == 1, number
        assert told(functools.partial(fl.find, other), args) == []


def lowered_under_another() -> None:
    """What is traced at JAX's defaults may be lowered under any setting."""
    traced = [fl.fuse(step(fn)).trace(*args) for fn, args, _ in programs()]
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"), jax.transfer_guard("disallow"):
        for one in traced:
            one.lower()


SPECIAL: dict[str, Callable[[], None]] = {
    "debug_nans": nan_is_told,
    "disable_jit": branches_on_values,
    "matmul_precision": precision_is_the_programs,
    "log_compiles": logs_its_own_compilation_alone,
    "rank_promotion": lowered_under_another,
}


def main(names: list[str]) -> None:
    """Each in a child of its own, forked before JAX starts any thread."""
    for name in names:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            told = ""
            with contextlib.redirect_stdout(sys.stderr):  # JAX prints where it looks for a NaN
                try:
                    under(name)
                except BaseException:
                    told = traceback.format_exc()
            os.write(write, told[-4000:].encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as answer:
            told = answer.read().decode()
        _, status = os.waitpid(child, 0)
        print(json.dumps([name, told or ("" if status == 0 else f"ended with {status}")]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
