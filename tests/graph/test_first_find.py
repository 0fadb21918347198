"""What a search need not do: compile, trace what cannot fit, prove twice. Counted, not timed."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.fusers.passes.attention import forms as attention_forms
from fusionlab.fusers.passes.attention import sinks as attention_sinks
from fusionlab.fusers.passes.lerp import examples as blend_examples
from fusionlab.fusers.passes.linear import linear_parts
from fusionlab.fusers.passes.norm import examples as norm_examples
from fusionlab.graph.certify.certify import with_gradients, with_vjp
from fusionlab.graph.interpret.constants import computed
from fusionlab.graph.interpret.evaluate import evaluate
from fusionlab.graph.interpret.random_bits import bits_by_entry, threefry2x32
from fusionlab.graph.matching import pattern
from fusionlab.graph.program.in_shard_map import make_jaxpr

COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def compilations():
    """The names of what JAX compiled since."""
    jax.clear_caches()
    found: list[str] = []

    def heard(name: str, seconds: float, **_: object) -> None:
        if name == COMPILED:
            found.append(name)

    jax.monitoring.register_event_duration_secs_listener(heard)
    yield found
    jax.monitoring.unregister_event_duration_listener(heard)


def causal(q, k, v):
    rows, keys = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])
    scores = jnp.einsum("btd,bsd->bts", q, k) * 0.25 + jnp.where(rows >= keys, 0.0, -1e9)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), v)


def dropped(key, x):
    kept = jax.random.bernoulli(key, 0.9, (2, 9, 9))
    p = jax.nn.softmax(jnp.einsum("btd,bsd->bts", x, x) * 0.25)
    return jnp.einsum("bts,bsd->btd", jnp.where(kept, p / 0.9, 0.0), x)


X = jax.ShapeDtypeStruct((2, 9, 16), jnp.float32)
KEY = jax.eval_shape(lambda: jax.random.key(0))


@pytest.mark.parametrize(("fn", "args"), [(causal, (X, X, X)), (dropped, (KEY, X))], ids=["mask", "dropout"])
def test_a_search_compiles_nothing(fn, args, compilations):
    found = fl.find(fn, *args, passes=["dot_product_attention"])
    assert found.counts()["dot_product_attention"] == 1
    assert compilations == []


def of_masks(i, j):
    return jnp.where((i >= j) & (i - j < 3) & (i // 2 == j // 2), 0, jnp.finfo(jnp.float32).min)


def of_bfloat16_positions(i, j):
    """256 and 257 are one number there."""
    return (i + 250).astype(jnp.bfloat16) >= (j + 250).astype(jnp.bfloat16)


def of_what_numpy_leaves_to_jax(i, j):
    return jnp.exp(-(i - j).astype(jnp.float32) / 3) * jax.nn.relu((i - j).astype(jnp.float32))


def of_small_numbers(i, j):
    return (i - j).astype(jnp.float32) * jnp.float32(1e-39)


@pytest.mark.parametrize("fn", [of_masks, of_bfloat16_positions, of_what_numpy_leaves_to_jax, of_small_numbers])
def test_a_constant_has_the_bits_that_jax_gives_it(fn):
    i, j = np.arange(9)[:, None].astype(np.int32), np.arange(12).astype(np.int32)
    want = np.asarray(fn(jnp.asarray(i), jnp.asarray(j)))  # one equation after another
    got = computed(jax.make_jaxpr(fn)(i, j), [i, j])
    assert got.dtype == want.dtype
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("width", [8, 16, 32])
def test_bits_of_a_key_are_jaxs(width):
    key = jax.random.key(2**31 + 5)
    want = np.asarray(jax.random.bits(key, (3, 7), f"uint{width}"))
    assert np.array_equal(bits_by_entry(np.asarray(jax.random.key_data(key)), width, (3, 7)), want)


def test_two_words_of_a_key_are_those_of_the_paper():
    ones = np.uint32(0xFFFFFFFF)
    made = threefry2x32((ones, ones), np.array([ones]), np.array([ones]))
    assert [int(x[0]) for x in made] == [0x1CB996FC, 0xBB002BE7]


def test_a_norm_traces_the_examples_that_fit_alone(monkeypatch):
    traced: list[str] = []
    views_of = pattern.views_of
    pattern.pattern_of.cache_clear()
    monkeypatch.setattr(pattern, "views_of", lambda e: traced.append(e.name) or views_of(e))

    def rms(x):
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)

    assert fl.find(rms, X, passes=["layer_norm"]).counts()["layer_norm"] == 1
    assert len(set(traced)) < len(norm_examples.EXAMPLES) / 4


def test_what_examples_say_of_themselves_is_so():
    for example in (*norm_examples.EXAMPLES, *(e for near in norm_examples.NEAR for e in near.examples)):
        pattern.pattern_of(example)  # raises else
    wrong = pattern.Example("wrong", lambda x: jnp.sum(x), {"x": "m"}, root=("prod", 2))
    with pytest.raises(ValueError, match="its root is"):
        pattern.pattern_of(wrong)


def test_a_derivative_transposed_as_a_whole_is_jaxs():
    avals = [X, X, X]
    programs = with_vjp(causal, avals, X), with_gradients(causal, avals, X)
    args = [np.random.default_rng(i).normal(size=X.shape) for i in range(4)]
    for want, got in zip(*(evaluate(p, args) for p in programs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def once_and_twice() -> list[pattern.Example]:
    """Examples of every pass that are traced once."""
    norms = (*norm_examples.EXAMPLES, *(e for near in norm_examples.NEAR for e in near.examples))
    changes = [(), *((kind,) for kind in ("factors", "kept", "hidden")), ("kept", "factors")]
    softmaxes = attention_sinks.SOFTMAXES
    kinds = [attention_forms.Tail(s, c) for s in softmaxes for c in changes if not (s.after and c)]
    kinds.append(attention_forms.Tail(softmaxes[0], ("where",)))
    tails = [attention_forms.tail_example(t) for t in kinds]
    return [*norms, *tails, *(form.example for form in blend_examples.LERP), linear_parts.LINEAR]


def test_an_example_that_is_traced_once_depends_on_no_size():
    """Read with two sets of scalars at one set of sizes, it is what it is with its scalars as numbers at two."""
    for example in once_and_twice():
        assert not example.concrete
        one, two = (pattern.pattern_of(replace(example, concrete=c)) for c in (False, True))
        for part in ("nodes", "root", "leaf_of", "edges", "gauged", "letters", "parts", "may_lack", "factor", "size"):
            assert getattr(one, part) == getattr(two, part), (example.name, part)


def test_jax_traces_its_own_functions_once_for_a_derivative_and_its_transpose():
    """None and an empty mesh are two keys of JAX's caches."""
    traced = []

    def fn(x):
        traced.append(x)
        return jnp.sin(x)

    inner = jax.jit(fn)
    make_jaxpr(inner, [X])
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):  # as JAX transposes
        make_jaxpr(inner, [X])
    assert len(traced) == 1
