"""The plugin that puts `fl.fuse` beside `jax.jit` in the tests of a library: what it sees, what it lets alone, what it fails."""

import textwrap

import equinox  # noqa: F401 - pytester forgets the modules that a run inside this process imports
import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

import fusionlab.testing.everywhere
from fusionlab.testing.closures import put_back
from fusionlab.testing.watching import Watch

HEAD = """
import jax, jax.numpy as jnp, numpy as np, pytest

X, W, B = jnp.ones((4, 8)), jnp.ones((8, 16)), jnp.ones(16)

def layer(x, w, b):
    return jax.nn.relu(x @ w + b)
"""


@pytest.fixture
def everywhere(pytester, monkeypatch):
    """Runs pytest with the plugin on a test file's text; what it says, and the counts of the summary."""
    monkeypatch.delenv("CI", raising=False)
    pytester.makeini("[pytest]\naddopts = -p no:cacheprovider")

    def run(text, *options):
        pytester.makepyfile(test_library=HEAD + textwrap.dedent(text))
        return pytester.runpytest_inprocess("-p", fusionlab.testing.everywhere.__name__, *options)

    before = jax.jit, jax.grad, nnx.Linear.__call__, linen.Module.apply
    yield run
    assert (jax.jit, jax.grad, nnx.Linear.__call__, linen.Module.apply) == before  # all is put back


def told(*lines):
    return ["*= fl.fuse compared with jax.jit =*", *lines]


def test_calls_programs_and_sites_are_counted_and_tests_are_left_as_they_are(everywhere):
    result = everywhere("""
        def test_traced_once():
            traced, names = 0, []

            @jax.jit
            def fn(x, w, b):
                nonlocal traced
                traced += 1
                names.append("fn")
                return layer(x, w, b)

            for _ in range(2):
                fn(X, W, B)
            assert (traced, names) == (1, ["fn"])

        def test_donated_and_printed(capsys):
            @jax.jit(donate_argnums=0)
            def fn(x, kind="a"):
                print("traced")
                return x + 1
            fn(jnp.ones(3))
            assert capsys.readouterr().out == "traced\\n"

        def test_transformations():
            jax.grad(lambda x: layer(x, W, B).sum())(X)
            jax.jit(lambda x: jax.vmap(layer, (0, None, None))(x, W, B))(X)  # what is inside is of its program
            jax.make_jaxpr(jax.vmap(lambda x: x + 1))(X)
    """)
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(told("3 tests, 5 calls, 4 programs: * sites fused, * declined, 0 faults", "*3 passed*"))


def test_modules_are_seen_where_they_are_called_and_keep_their_state(everywhere):
    result = everywhere("""
        import equinox as eqx
        from flax import linen, nnx

        def test_equinox():
            model = eqx.nn.Linear(8, 4, key=jax.random.key(0))
            eqx.filter_jit(model)(X[0])
            class Mine(eqx.Module):
                def __call__(self, x, name="mine"):
                    return layer(x, W, B) if name == "mine" else x
            Mine()(X)

        def test_linen():
            y, variables = linen.Dense(4).init_with_output(jax.random.key(0), X)
            linen.Dense(4).apply(variables, X)
            einsum = linen.Einsum((8, 4), "bi,ij->bj")  # has a shape and a dtype, and is no array; its init is a call
            einsum.apply(einsum.init(jax.random.key(0), X), X)

        def test_nnx():
            drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
            drop(X)
            nnx.jit(lambda m, x: m(x))(drop, X)
            assert drop.rngs.count[...] == 2
    """)
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(told("3 tests, 8 calls, 8 programs: * 0 faults", "*3 passed*"))


def test_what_jit_refuses_is_counted_and_what_has_effects_is_not_repeated(everywhere):
    result = everywhere("""
        import equinox as eqx

        class Branches(eqx.Module):
            def __call__(self, x):
                return x if x.sum() > 0 else -x

        def test_refused():
            Branches()(X)

        def test_effects():
            seen = []
            fn = jax.jit(lambda x: (jax.debug.callback(seen.append, x), x + 1)[1])
            fn(1.0)
            jax.effects_barrier()
            assert len(seen) == 1

        def test_raises():
            with pytest.raises(TypeError, match="mine"):
                jax.jit(lambda x: (_ for _ in ()).throw(TypeError("mine")))(1.0)

        def test_off():
            with jax.disable_jit():
                jax.jit(layer)(X, W, B)
    """)
    result.assert_outcomes(passed=4)
    lines = (
        "4 tests, 4 calls, 4 programs: 0 sites fused, 0 declined, 0 faults",
        "not compared: has side effects: 1",
        "not compared: jit is disabled: 1",
        "not compared: raises in the test itself: 1",
        "not compared: refused by jax.jit: TracerBoolConversionError: 1",
    )
    result.stdout.fnmatch_lines(told(*lines))


def test_a_wrong_rewrite_another_type_and_an_error_each_fail_their_test(everywhere, monkeypatch):
    real = fusionlab.Fused._rewritten
    wrong = {
        "wrong": lambda out: out * 1.01,
        "typed": lambda out: out.astype("bfloat16"),
        "raising": lambda out: out.no_such_attribute,
        "right": lambda out: out * (1 + 1e-7),
    }

    def rewritten(self, *args):
        return wrong[self.original.__name__](real(self, *args))

    monkeypatch.setattr(fusionlab.Fused, "_rewritten", rewritten)
    result = everywhere(
        """
        @pytest.mark.parametrize("name", ["wrong", "typed", "raising", "right"])
        def test_layer(name):
            def fn(x, w, b):
                return layer(x, w, b)
            fn.__name__ = fn.__qualname__ = name
            try:
                jax.jit(fn)(X, W, B)
            except Exception:
                pass  # hides nothing
        """,
        "--fusionlab-everywhere-passes",
        "gemm_epilogue",
    )
    result.assert_outcomes(passed=1, failed=3)
    result.stdout.fnmatch_lines(
        [
            "wrong(float32[[]4,8], float32[[]8,16], float32[[]16]): *differs from the original's in 64 of 64 entries*",
            "  at *test_library.py:*: jax.jit(fn)(X, W, B)",
            "typed(*): array 0 of the result * is bfloat16[[]4, 16], under jax.jit float32[[]4, 16]",
            "raising(*): raises under fl.fuse, not under jax.jit: AttributeError*",
            "4 tests, 4 calls, 4 programs: 4 sites fused, 0 declined, 3 faults",
        ]
    )


def test_a_wrong_result_of_the_call_alone_is_no_rounding(everywhere, monkeypatch):
    """What is compared with float64 is traced anew and is right: it excuses nothing that only the call gave."""
    real = fusionlab.Fused.__call__
    monkeypatch.setattr(fusionlab.Fused, "__call__", lambda self, *args: real(self, *args) * 1.01)
    result = everywhere("""
        from flax import nnx

        @pytest.mark.parametrize("under", [jax.jit, nnx.jit])
        def test_jitted(under):
            under(layer)(X, W, B)
    """)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*layer(*): *differs from the original's in 64 of 64 entries*", "*, 2 faults"])


def test_a_difference_no_larger_than_the_errors_of_both_is_rounding(everywhere, monkeypatch):
    real = fusionlab.Fused._rewritten
    monkeypatch.setattr(fusionlab.Fused, "_rewritten", lambda self, *args: real(self, *args) * 1.001)
    result = everywhere("""
        def test_cancels():
            jax.jit(lambda x, c: (x + c) - c)(X / 10, jnp.float32(1e4))  # float32 is right to 0.4%
    """)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(told("1 test, 1 call, 1 program: *, 0 faults"))


def test_a_test_gets_so_many_seconds(everywhere):
    result = everywhere(
        """
        def test_two():
            jax.jit(lambda x: x + 1)(X)
            jax.jit(lambda x: x + 2)(X)
        """,
        "--fusionlab-everywhere-seconds=0",
    )
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(told("1 test, 2 calls, 0 programs: *", "not compared: out of time: 2"))


def test_what_is_under_watch_is_used_as_before():
    watch = Watch(lambda fn, run, args, kwargs: run(*args, **kwargs))
    watch.install()
    try:
        fn = jax.jit(lambda x: x + 1)
        assert fn.lower(1.0).compile()(1.0) == fn(1.0) == 2
        assert fusionlab.fuse(fn)(jnp.ones(())) == 2
        with watch.on():
            assert jax.grad(fn)(1.0) == 1
    finally:
        watch.uninstall()


def test_what_a_function_closes_over_is_put_back():
    n, texts, rows = 1, ["a"], {"a": 1}

    def inner():
        nonlocal n
        n += 1
        texts.append("b")
        rows.clear()

    def outer():
        inner()

    with put_back(outer):
        outer()
        assert (n, texts, rows) == (2, ["a", "b"], {})
    assert (n, texts, rows) == (1, ["a"], {"a": 1})
