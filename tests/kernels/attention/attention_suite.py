"""One test base for every implementation of dot_product_attention: each is held to float64 numpy. Not a test module.

Inherit, and set `implementation`. A case it refuses is left out with its own reason; how many it holds is checked.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab.device import Device
from fusionlab.kernels.ops.dot_product_attention.op import DOT_PRODUCT_ATTENTION as OP
from fusionlab.ops import dot_product_attention

# Relative to the largest entry: a result is rounded once, the probabilities (their gradients) once before it.
TOLERANCE = {"float32": 4e-6, "float16": 2e-3, "bfloat16": 1.2e-2}
FIELDS = ("query", "key", "value", "bias", "mask", "factors", "dropout_key")


@dataclass(frozen=True)
class Case:
    """Sizes (k: heads of keys, where they are fewer), operands beside query, key and value by name (a key of `OPERANDS`), attributes."""

    batch: tuple[int, ...] = (2,)
    t: int = 70
    s: int = 90
    n: int = 2
    k: int | None = None
    d: int = 64
    dv: int | None = None
    given: tuple[str, ...] = ()
    attrs: dict[str, Any] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    spread: float = 1.0


def _lengths(rng, case):
    lengths = rng.integers(min(20, case.s), case.s + 1, size=(*case.batch, 1, 1, 1))
    return {"mask": np.arange(case.s) < lengths}


def _random(rng, case):
    mask = rng.random((*case.batch, 1, case.t, case.s)) < 0.5
    mask[..., np.arange(case.t), np.arange(case.t) % case.s] = True  # a key for each row
    return {"mask": mask}


def _hole(rng, case):
    mask = np.ones((*case.batch, 1, 1, case.s), bool)
    mask[..., case.s // 3 : case.s // 2] = False
    return {"mask": mask}


def _row_of_nothing(rng, case):
    mask = _random(rng, case)["mask"]
    mask[..., 3, :] = False
    return {"mask": mask}


def _window(rng, case):
    distance = np.arange(case.s) - np.arange(case.t)[:, None]
    return {"mask": (np.abs(distance) <= 9) | (np.arange(case.s) == 0)}


def _by_key(rng, case):
    return {"dropout_key": rng.integers(0, 2**32, 2, np.uint32)}


OPERANDS = {
    "dropout by key": _by_key,
    "lengths": _lengths,
    "random": _random,
    "hole": _hole,
    "a row of nothing": _row_of_nothing,
    "window": _window,
    "bias": lambda rng, c: {"bias": rng.standard_normal((1, c.n, c.t, c.s))},
    "bias of keys": lambda rng, c: {"bias": np.where(rng.random((*c.batch, 1, 1, c.s)) < 0.3, -1e9, 0.0)},
    "shared by some": lambda rng, c: {"mask": rng.random((c.batch[0], 1, 1, c.t, c.s)) < 0.7},
    "dropout": lambda rng, c: {"factors": rng.random((*c.batch, c.n, c.t, c.s)) < 0.9},
    "weights of heads": lambda rng, c: {"factors": rng.random((c.n, 1, 1))},
}
FINITE = {"mask_value": -1e9}
CASES = {
    "nothing": Case(),
    "causal": Case(attrs={"is_causal": True}),
    "causal, few keys": Case(t=90, s=33, attrs={"is_causal": True}),
    "lengths": Case(given=("lengths",)),
    "lengths, finite": Case(given=("lengths",), attrs=FINITE),
    "half at random": Case(given=("random",), attrs=FINITE),
    "a hole, causal": Case(given=("hole",), attrs={"is_causal": True}),
    "a row of nothing": Case(given=("a row of nothing",)),
    "a row of nothing, causal": Case(given=("a row of nothing",), attrs={"is_causal": True}),
    "a row of nothing, finite": Case(given=("a row of nothing",), attrs=FINITE),
    "lowest mask value": Case(given=("a row of nothing",), attrs={"mask_value": float(np.finfo(np.float32).min)}),
    "window": Case(given=("window",)),
    "bias": Case(given=("bias",), attrs={"is_causal": True}),
    "bias of keys": Case(given=("bias of keys",), dtypes=("bfloat16", "float32")),
    "bias and mask": Case(given=("bias", "lengths")),
    "dropout": Case(given=("dropout",), attrs={"factors_scale": 1 / 0.9}),
    "dropout and mask": Case(given=("dropout", "random"), attrs={"factors_scale": 1 / 0.9, "is_causal": True}),
    "dropout by key": Case(given=("dropout by key",), attrs={"keep": 0.8, "factors_scale": 1 / 0.8}),
    "dropout by key, causal": Case(n=3, given=("dropout by key",), attrs={"keep": 0.5, "is_causal": True}),
    "dropout by key, one for all": Case(
        n=3, given=("dropout by key",), attrs={"keep": 0.7, "factors_scale": 1 / 0.7, "dropout_shape": (1, 1, 70, 90)}
    ),
    "dropout by key, of a batch entry": Case(
        n=3, given=("dropout by key",), attrs={"keep": 0.7, "dropout_shape": (2, 1, 70, 90), "is_causal": True}
    ),
    "dropout by key, two batch axes": Case(
        batch=(2, 2), t=20, s=33, given=("dropout by key",), attrs={"keep": 0.7, "dropout_shape": (2, 20, 33)}
    ),
    "weights of heads": Case(given=("weights of heads",)),
    "softcap": Case(attrs={"softcap": 5.0, "is_causal": True}),
    "negative scale": Case(attrs={"scale": -0.2}),
    "scale 1": Case(attrs={"scale": 1.0}, spread=0.3),
    "two batch axes": Case(batch=(2, 2), t=20, s=33, given=("shared by some",), attrs=FINITE),
    "no batch": Case(batch=(), t=33, s=20, n=3),
    "8 features": Case(d=8),
    "80 features": Case(d=80, attrs={"is_causal": True}),
    "128 features": Case(d=128, attrs={"is_causal": True}),
    "128 features, mask": Case(d=128, given=("random",), attrs=FINITE),
    "other values": Case(d=64, dv=24),
    "key heads shared": Case(n=4, k=2, attrs={"is_causal": True}),
    "one key head, lengths": Case(n=3, k=1, d=24, given=("lengths",)),
    "key heads shared, bias, dropout": Case(n=6, k=2, t=33, s=40, given=("bias", "dropout")),
    "key heads shared, dropout by key": Case(
        batch=(2, 2), n=4, k=2, t=20, s=33, given=("dropout by key",), attrs={"keep": 0.7}
    ),
    "key heads shared, a row of nothing": Case(n=4, k=2, d=80, given=("a row of nothing",), attrs={"is_causal": True}),
    "local": Case(t=200, s=230, attrs={"window": (40, 20)}),
    # Of a size at which a tile of the kernels is seen as a whole but for its last row and its last key.
    "local, wide": Case(t=260, s=300, n=1, d=24, attrs={"window": (94, 94)}),
    "local, causal": Case(t=200, s=200, d=24, attrs={"window": 33, "is_causal": True}),
    "local, causal, few keys": Case(t=150, s=70, attrs={"window": (30, 0)}),  # the last rows see nothing
    "local, rows that see nothing": Case(t=290, s=40, d=24, attrs={"window": (20, 5)}),
    "local, key heads shared, bias, dropout": Case(
        n=4, k=2, t=130, s=130, d=24, given=("bias", "dropout"), attrs={"window": (25, 17)}
    ),
    "local, mask, finite": Case(t=100, s=130, d=24, given=("random",), attrs={"window": (40, 70), **FINITE}),
    "local, every other one": Case(t=33, s=20, d=24, given=("dropout by key",), attrs={"window": 0, "keep": 0.6}),
    "one row": Case(t=1, s=300),
    "one key": Case(t=130, s=1),
}


def arrays(case: Case, dtype: str, layout: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Operands by slot, and a cotangent ("ct")."""
    rng = np.random.default_rng(seed)
    dv = case.dv or case.d
    k = case.k or case.n
    shapes = {
        "query": (case.t, case.n, case.d),
        "key": (case.s, k, case.d),
        "value": (case.s, k, dv),
        "ct": (case.t, case.n, dv),
    }
    made = {}
    for slot, sizes in shapes.items():
        a = (rng.standard_normal((*case.batch, *sizes)) * case.spread).astype(jnp.dtype(dtype))
        made[slot] = np.swapaxes(a, -2, -3) if layout == "BNTH" else a
    for name in case.given:
        for slot, a in OPERANDS[name](rng, case).items():
            made[slot] = a.astype(jnp.dtype(dtype)) if a.dtype == np.float64 else a
    return made


def operands(case: Case, dtype: str, layout: str, seed: int = 0) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """Operands by slot, a cotangent, and the same numbers as float64 in BTNH."""
    made = arrays(case, dtype, layout, seed)
    plain = {slot: a.astype(np.float64) if a.dtype == jnp.dtype(dtype) else a for slot, a in made.items()}
    if layout == "BNTH":
        plain |= {slot: np.swapaxes(plain[slot], -2, -3) for slot in ("query", "key", "value", "ct")}
    if "dropout_key" in made:
        key = jax.random.wrap_key_data(made["dropout_key"])
        shape = case.attrs.get("dropout_shape", (*case.batch, case.n, case.t, case.s))
        plain["factors"] = np.asarray(jax.random.bernoulli(key, case.attrs["keep"], shape))
    made = {slot: jnp.asarray(a) for slot, a in made.items()}
    return made, made.pop("ct"), plain


def visible(t: int, s: int, attrs: dict[str, Any]) -> np.ndarray:
    """True where a row may see a key for its number."""
    distance = np.arange(s) - np.arange(t)[:, None]
    window = attrs.get("window", (t, s))
    left, right = window if isinstance(window, tuple) else (window, window)
    return (distance >= -left) & (distance <= (0 if attrs.get("is_causal") else right))


def exact(plain: dict[str, Any], attrs: dict[str, Any]) -> list[np.ndarray]:
    """[out, dquery, dkey, dvalue] in float64, BTNH."""
    q, k, v, ct = (plain[n] for n in ("query", "key", "value", "ct"))
    heads = k.shape[-2]
    k, v = (np.repeat(a, q.shape[-2] // heads, axis=-2) for a in (k, v))
    shared = lambda g: g.reshape(*g.shape[:-2], heads, -1, g.shape[-1]).sum(-2)  # noqa: E731
    scale = attrs.get("scale", 1 / math.sqrt(q.shape[-1]))
    s, slope, seen = np.einsum("...tnh,...snh->...nts", q, k) * scale, 1.0, True
    if "softcap" in attrs:
        tanh = np.tanh(s / attrs["softcap"])
        s, slope = attrs["softcap"] * tanh, 1 - tanh**2
    s = s + plain.get("bias", 0.0)
    if "mask" in plain:
        s, seen = np.where(plain["mask"], s, attrs.get("mask_value", -np.inf)), plain["mask"]
    near = visible(*s.shape[-2:], attrs)
    s, seen = np.where(near, s, -np.inf), seen & near
    top = s.max(-1, keepdims=True)
    p = np.exp(s - np.where(top == -np.inf, 0, top))
    p /= np.where(top == -np.inf, 1, p.sum(-1, keepdims=True))  # a row that sees no key weighs nothing
    f = plain.get("factors", 1.0) * attrs.get("factors_scale", 1.0)
    w, dw = p * f, np.einsum("...tnh,...snh->...nts", ct, v) * f
    ds = np.where(seen, p * (dw - (p * dw).sum(-1, keepdims=True)), 0) * slope * scale
    return [
        np.einsum("...nts,...snh->...tnh", w, v),
        np.einsum("...nts,...snh->...tnh", ds, k),
        shared(np.einsum("...nts,...tnh->...snh", ds, q)),
        shared(np.einsum("...nts,...tnh->...snh", w, ct)),
    ]


class AttentionSuite:
    """Forward and gradients of one implementation."""

    implementation: str
    least = 10  # cases that it takes in each dtype
    slack = 1.0
    skips: bool | None = False  # whether blocks of scores outside of a local window are left out; None: who knows
    precision: Any = "highest"
    dtypes: tuple[str, ...] = tuple(TOLERANCE)

    def cases(self, dtype):
        return tuple(CASES)

    def attrs(self, case, layout):
        return {**case.attrs, "layout": layout, "precision": self.precision, "implementation": self.implementation}

    def refusal(self, made, case, layout):
        given = [made.get(slot) for slot in FIELDS]
        present, full = OP._prepared(given, self.attrs(case, layout), Device.current())
        one = OP.implementations[self.implementation]
        return one.refuses(present, Device.current(), role="call", residuals=True, **full)

    def pytest_generate_tests(self, metafunc):
        if "case" in metafunc.fixturenames:
            turns = [(name, dtype) for name in CASES for dtype in self.dtypes if name in self.cases(dtype)]
            metafunc.parametrize(("case", "dtype"), turns)

    def test_values_and_gradients(self, case, dtype):
        self.check(CASES[case], dtype, case, self.layout(case), alone=False)

    def test_values_where_no_gradient_is_asked_for(self, case, dtype):
        """By kernels of their own, where those for gradients write more than the result."""
        layout = self.layout(case)
        if (given := self.given(CASES[case], dtype, layout)) is not None:
            made, _, plain = given
            f = jax.jit(functools.partial(dot_product_attention, **self.attrs(CASES[case], layout)))
            want = exact(plain, CASES[case].attrs)[0]
            self.close(f(**made), want, dtype, layout, TOLERANCE[dtype] * self.slack * np.abs(want).max(), case)

    @pytest.mark.parametrize("dtype", list(TOLERANCE))
    def test_it_takes_as_many_cases_as_it_should(self, dtype):
        """What it refuses is checked of no case."""
        taken = [name for name in self.cases(dtype) if self.takes(CASES[name], dtype, self.layout(name))]
        assert len(taken) >= self.least

    def takes(self, case, dtype, layout):
        if dtype not in case.dtypes:
            return False
        shapes = {slot: jax.ShapeDtypeStruct(a.shape, a.dtype) for slot, a in arrays(case, dtype, layout).items()}
        return not self.refusal(shapes, case, layout)

    def layout(self, name):
        return ("BTNH", "BNTH")[list(CASES).index(name) % 2]

    def given(self, case, dtype, layout):
        """What `operands` gives, or None where the implementation has no such case."""
        if dtype not in case.dtypes:
            return None
        given = operands(case, dtype, layout)
        return None if self.refusal(given[0], case, layout) else given

    def close(self, got, want, dtype, layout, most, what):
        assert got.dtype == dtype
        got = np.asarray(got, np.float64)
        error = np.abs((np.swapaxes(got, -2, -3) if layout == "BNTH" else got) - want).max()
        assert error <= most, (what, layout, dtype, error, most)

    def check(self, case, dtype, name, layout="BTNH", tolerance=None, alone=True):
        """1 where it holds, 0 where the implementation has no such case. `alone`: the values without gradients as well."""
        if (given := self.given(case, dtype, layout)) is None:
            return 0
        made, ct, plain = given
        rest = {slot: a for slot, a in made.items() if slot not in FIELDS[:3]}

        @jax.jit
        def run(q, k, v, ct, rest):
            f = functools.partial(dot_product_attention, **rest, **self.attrs(case, layout))
            out, pull = jax.vjp(f, q, k, v)
            return f(q, k, v) if alone else out, out, *pull(ct)

        by_itself, *found = run(*(made[n] for n in FIELDS[:3]), ct, rest)
        limit = (tolerance or TOLERANCE[dtype]) * self.slack
        np.testing.assert_allclose(np.asarray(by_itself, np.float64), np.asarray(found[0], np.float64), limit, limit)
        wants = exact(plain, case.attrs)
        least = 0.2 * max(np.abs(want).max() for want in wants[1:])  # one that cancels is as exact as the others
        for what, got, want in zip(("out", "dquery", "dkey", "dvalue"), found, wants, strict=True):
            most = limit * max(np.abs(want).max(), 0 if what == "out" else least)
            self.close(got, want, dtype, layout, most, (name, what))
        return 1

    def test_a_row_that_sees_nothing_is_zero_and_moves_nothing(self):
        case = Case(batch=(1,), n=1, given=("a row of nothing",))
        made, ct, _ = operands(case, "float32", "BTNH")
        if reason := self.refusal(made, case, "BTNH"):
            pytest.skip(reason)
        f = functools.partial(dot_product_attention, **self.attrs(case, "BTNH"), mask=made["mask"])
        out, pull = jax.vjp(f, *(made[n] for n in FIELDS[:3]))
        assert not np.asarray(out)[:, 3].any()
        alone = jnp.zeros_like(ct).at[:, 3].set(ct[:, 3])
        assert not any(np.asarray(g).any() for g in pull(alone))

    @pytest.mark.parametrize("window", [(10, 0), (3, 12)])
    def test_what_is_far_outside_of_a_local_window_is_not_even_read(self, window):
        """Unless it computes all scores: then a weight of 0 meets the NaN."""
        if self.skips is None:
            pytest.skip("what a library reads is its own affair")
        case = Case(batch=(1,), t=400, s=400, n=1, d=24, attrs={"window": window})
        made, ct, _ = operands(case, "bfloat16", "BTNH")
        early = slice(0, 8)
        ct, v = (a.at[:, early].set(jnp.nan) for a in (ct, made["value"]))
        f = functools.partial(dot_product_attention, **self.attrs(case, "BTNH"))
        out, pull = jax.vjp(f, made["query"], made["key"], v)
        late = [np.isfinite(np.asarray(a, np.float32)[:, 270:]).all() for a in (out, *pull(ct))]
        assert all(late) == self.skips, late
        assert np.isnan(np.asarray(out, np.float32)[:, early]).all()

    @pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
    def test_only_the_gradients_asked_for(self, wanted):
        case = Case(t=33, s=20, given=("random",), attrs={"is_causal": True}, dtypes=("bfloat16",))
        made, ct, plain = operands(case, "bfloat16", "BTNH")
        if reason := self.refusal(made, case, "BTNH"):
            pytest.skip(reason)
        mask = made["mask"]

        @jax.jit
        def run(q, k, v, ct):
            def f(*moved):
                full = [q, k, v]
                for i, a in zip(wanted, moved, strict=True):
                    full[i] = a
                return dot_product_attention(*full, mask=mask, **self.attrs(case, "BTNH"))

            return jax.vjp(f, *((q, k, v)[i] for i in wanted))[1](ct)

        want = exact(plain, case.attrs)[1:]
        for i, got in zip(wanted, run(*(made[n] for n in FIELDS[:3]), ct), strict=True):
            got = np.asarray(got, np.float64)
            assert np.abs(got - want[i]).max() <= TOLERANCE["bfloat16"] * self.slack * np.abs(want[i]).max()
