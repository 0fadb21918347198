"""`fl.fuse` is the function itself, fused: under every transformation, as a decorator, and with sites chosen by hand."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import fusionlab as fl
from fusionlab.errors import ArgumentError, RewriteError, UnknownNameError
from fusionlab.kernels import OPS
from tests.asked import by_name

from .checks import agree, close, forward_counts, jit, normal, primitives, same_bits, weighed

X, W1, B1, W2, B2 = normal((6, 4), (4, 8), (8,), (8, 4), (4,))
P = {"w1": W1 * 0.4, "b1": B1 * 0.3, "w2": W2 * 0.3, "b2": B2 * 0.3}
XS = jnp.stack([X, 2 * X, -X])


def mlp(p, x):
    return jax.nn.gelu(x @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]


def attention(p, x):
    q = jnp.einsum("...td,dhk->...thk", x, p["w1"].reshape(4, 2, 4))
    s = jnp.einsum("...thk,...shk->...hts", q, q) / 2
    s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)
    out = jnp.einsum("...hts,...shk->...thk", jax.nn.softmax(s), q)
    return out.reshape((*x.shape[:-1], 8)) @ p["w2"] + p["b2"]


def both(p, x):
    return jax.nn.relu(attention(p, x) + mlp(p, x))


def scan(p, x):
    return lax.scan(lambda c, s: (mlp(p, c) * s, attention(p, c)), x, jnp.arange(1.0, 4.0))


def cond(p, x):
    return lax.cond(x[0, 0] > 0, mlp, attention, p, x)


def remat(p, x):
    body = jax.checkpoint(attention, policy=jax.checkpoint_policies.dots_saveable)
    return body(p, x) + jax.checkpoint(mlp)(p, x)


def loop(p, x):
    return lax.fori_loop(0, 3, lambda _, x: mlp(p, x), x)


FUNCTIONS = {"mlp": mlp, "attention": attention, "both": both, "scan": scan, "cond": cond, "remat": remat}
SITES = {  # of the products, of attention, of norms
    "mlp": (2, 0, 0),
    "attention": (1, 1, 0),
    "both": (3, 1, 0),
    **dict.fromkeys(("scan", "cond", "remat"), (3, 1, 0)),
}


def counts(f, *args):
    return tuple(forward_counts(f.findings(*args)).values())


def compare(transform, f, factor=2.0):
    """transform(fused) against transform(original), jitted."""
    close(jit(transform(fl.fuse(f)))(P, X), jit(transform(f))(P, X), factor)


# -- transformations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_fused_function_is_called_jitted_and_differentiated_as_the_original(name):
    f = FUNCTIONS[name]
    assert counts(fl.fuse(f), P, X) == SITES[name]
    compare(lambda f: lambda p, x: (f(p, x), jax.grad(weighed(f), (0, 1))(p, x)), f, factor=4)
    close(fl.fuse(f)(P, X), f(P, X), 2.0)


TRANSFORMS = {
    "value_and_grad": lambda f: jax.value_and_grad(weighed(f), argnums=(0, 1)),
    "jvp": lambda f: lambda p, x: jax.jvp(f, (p, x), (p, 0.5 * x)),
    "linearize": lambda f: lambda p, x: jax.linearize(f, p, x)[1](p, x),
    "jacfwd": lambda f: lambda p, x: jax.jacfwd(f)(p, x)["b1"],
    "jacrev": lambda f: lambda p, x: jax.jacrev(f, 1)(p, x),
    "hessian": lambda f: lambda p, x: jax.hessian(lambda b: weighed(f)(p | {"b1": b}, x))(p["b1"]),
    "grad of grad": lambda f: lambda p, x: jax.grad(lambda x: jnp.sum(jax.grad(weighed(f), 1)(p, x) ** 2))(x),
    "vmap over rows of data": lambda f: lambda p, x: jax.vmap(f, (None, 0))(p, jnp.stack([x, 2 * x])),
    "vmap over parameters": lambda f: (
        lambda p, x: jax.vmap(f, (0, None))(jax.tree.map(lambda a: jnp.stack([a, -a]), p), x)
    ),
    "vmap of grad": lambda f: lambda p, x: jax.vmap(jax.grad(weighed(f)), (None, 0))(p, jnp.stack([x, 2 * x])),
    "grad of vmap": lambda f: lambda p, x: jax.grad(weighed(jax.vmap(f, (None, 0), 1)))(p, jnp.stack([x, 2 * x, -x])),
    "scan over it": lambda f: lambda p, x: lax.scan(lambda c, _: (f(p, c), c), x, None, length=3),
    "grad of scan over it": lambda f: jax.grad(
        weighed(lambda p, x: lax.scan(lambda c, _: (f(p, c), None), x, None, length=3)[0])
    ),
    "checkpoint": lambda f: jax.grad(weighed(jax.checkpoint(f))),
    "checkpoint with a policy": lambda f: jax.grad(
        weighed(jax.checkpoint(f, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable))
    ),
    "cond around it": lambda f: lambda p, x: lax.cond(x[0, 0] < 0, f, lambda p, x: -f(p, x), p, x),
    "jit inside": lambda f: lambda p, x: jax.jit(f)(p, x) + f(p, 2 * x),
}


@pytest.mark.parametrize("name", ["mlp", "attention"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_every_transformation_of_the_fused_function_agrees(transform, name):
    compare(TRANSFORMS[transform], FUNCTIONS[name], factor=10.0)


def test_transformations_of_the_original_can_themselves_be_fused():
    def graded(p, x):
        return jax.grad(weighed(mlp))(p, x)

    def mapped(p, xs):
        return jax.vmap(mlp, (None, 0))(p, xs)

    close(fl.fuse(graded)(P, X), graded(P, X), 4.0)
    found = fl.fuse(mapped).findings(P, XS)
    assert found.counts()["gemm_epilogue"] == 2
    close(fl.fuse(mapped)(P, XS), mapped(P, XS), 2.0)


def test_a_while_loop_is_fused_forward_and_in_forward_mode():
    fused = fl.fuse(loop)
    assert counts(fused, P, X) == (2, 0, 0)
    close(fused(P, X), loop(P, X), 2.0)
    close(jax.jvp(fused, (P, X), (P, X)), jax.jvp(loop, (P, X), (P, X)), 10.0)


def test_eval_shape_lower_and_trace_are_those_of_the_original():
    fused = fl.fuse(mlp)
    assert jax.eval_shape(fused, P, X) == jax.eval_shape(mlp, P, X)
    close(fused.lower(P, X).compile()(P, X), mlp(P, X))
    assert "gemm_epilogue" in str(fused.trace(P, X).jaxpr)


def test_under_jit_every_site_is_one_named_equation():
    text = str(jax.make_jaxpr(fl.fuse(both))(P, X))
    assert text.count("gemm_epilogue[") == 3
    assert text.count("dot_product_attention[") == 1
    assert not [name for name in ("= exp", "= tanh", "= reduce_sum") if name in text]


def test_a_gradient_runs_the_fused_backward():
    text = str(jax.make_jaxpr(jax.grad(weighed(fl.fuse(both))))(P, X))
    assert text.count("gemm_epilogue_cotangent[") == 3
    assert text.count("dot_product_attention_cotangent[") == 1


def test_under_a_saving_policy_a_fused_product_is_saved_as_the_product_it_stands_for():
    def forward_products(policy, name, fuse):
        def layer(w):
            return weighed(jax.checkpoint(lambda x: jnp.sin(x @ w + B1), policy=policy))(X)

        graph = fl.trace(jax.value_and_grad(fl.fuse(layer) if fuse else layer), W1)
        return primitives(graph).count(name)

    saved, recomputed = jax.checkpoint_policies.dots_saveable, jax.checkpoint_policies.nothing_saveable
    # the original counts one product more, that of the gradient
    assert [forward_products(p, "dot_general", False) for p in (saved, recomputed)] == [2, 3]
    assert [forward_products(p, "gemm_epilogue", True) for p in (saved, recomputed)] == [1, 2]


def test_effects_of_jit_options_stay_with_the_user():
    fused = jax.jit(fl.fuse(mlp), donate_argnums=1)
    x = jnp.array(X)
    close(fused(P, x), mlp(P, X), 2.0)
    assert x.is_deleted()


# -- the shape of a function ------------------------------------------------------------------------------------------


def test_as_a_decorator_with_and_without_options():
    @fl.fuse
    def plain(x):
        return jax.nn.relu(x @ W1 + B1)

    @fl.fuse(passes="gemm_epilogue")
    def configured(x):
        """Doc."""
        return jax.nn.relu(x @ W1 + B1)

    close(plain(X), jax.nn.relu(X @ W1 + B1))
    close(configured(X), plain(X))
    assert (plain.__name__, configured.__name__, configured.__doc__) == ("plain", "configured", "Doc.")
    assert repr(configured) == "<fused configured, passes: gemm_epilogue>"
    assert repr(plain) == f"<fused plain, passes: {', '.join(by_name())}>"


def test_a_method_is_fused_for_each_of_its_instances():
    class Layer:
        def __init__(self, w):
            self.w = w

        @functools.partial(fl.fuse, static_argnums=0)
        def __call__(self, x):
            return jax.nn.relu(x @ self.w + B1)

        @functools.partial(fl.fuse, static_argnums=0)
        def twice(self, x):
            return jax.nn.relu(x @ (2 * self.w) + B1)

    one, other = Layer(W1), Layer(-W1)
    close(one.twice(X), jax.nn.relu(X @ (2 * W1) + B1))
    close(other.twice(X), jax.nn.relu(X @ (-2 * W1) + B1))
    close(one(X), jax.nn.relu(X @ W1 + B1))


def test_static_arguments_by_number_and_by_name_choose_the_program():
    def f(x, act, *, times=1):
        for _ in range(times):
            x = (jax.nn.relu if act == "relu" else jnp.tanh)(x @ W1[:, :4] + B1[:4])
        return x

    fused = fl.fuse(f, static_argnums=1, static_argnames="times")
    for act in ("relu", "tanh"):
        close(fused(X, act, times=3), f(X, act, times=3), 2.0)
        found = fused.findings(X, act, times=3)
        assert [c.attrs["activation"] for c in found.candidates] == [act] * 3


def test_keyword_arguments_and_default_values_are_passed_on():
    def f(x, w=W1, *, b):
        return {"out": jax.nn.relu(x @ w + b), "again": (x,)}

    fused = fl.fuse(f)
    close(fused(X, b=B1), f(X, b=B1))
    close(fused(X, w=-W1, b=B1), f(X, w=-W1, b=B1))
    assert fused.findings(X, b=B1).counts()["gemm_epilogue"] == 1


def test_values_closed_over_from_an_outer_transformation_are_differentiated():
    def outer(f):
        def loss(w):
            return weighed((fl.fuse if f else lambda g: g)(lambda x: jax.nn.relu(x @ w + B1)))(X)

        return loss

    close(jax.grad(outer(True))(W1), jax.grad(outer(False))(W1))
    close(jax.vmap(jax.grad(outer(True)))(jnp.stack([W1, -W1])), jax.vmap(jax.grad(outer(False)))(jnp.stack([W1, -W1])))
    close(jax.jit(jax.grad(outer(True)))(W1), jax.jit(jax.grad(outer(False)))(W1))


def test_a_second_shape_is_found_anew():
    fused = fl.fuse(mlp)
    close(fused(P, X), mlp(P, X), 2.0)
    close(fused(P, X[:3]), mlp(P, X[:3]), 2.0)
    close(fused(jax.tree.map(lambda a: a.astype(jnp.bfloat16), P), X.astype(jnp.bfloat16)),
          mlp(jax.tree.map(lambda a: a.astype(jnp.bfloat16), P), X.astype(jnp.bfloat16)))  # fmt: skip


def test_a_repeated_call_does_not_search_again(monkeypatch):
    import fusionlab.verbs.fused as fused_module

    searches = []
    original = fused_module.find_in
    monkeypatch.setattr(fused_module, "find_in", lambda *a, **k: searches.append(1) or original(*a, **k))
    fused = fl.fuse(mlp)
    for _ in range(3):
        fused(P, X)
    assert len(searches) == 1


def test_the_functions_own_errors_come_through_unchanged():
    def bad(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fl.fuse(bad)(X)
    with pytest.raises(TypeError, match="dot_general"):
        fl.fuse(mlp)(P, X.T)


def test_what_is_no_function_is_refused():
    with pytest.raises(ArgumentError, match=r"got Array(Impl)?, needed a function"):
        fl.fuse(X)


# -- fusing twice, choosing sites -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
def test_fusing_twice_finds_nothing_new(name):
    fused = fl.fuse(FUNCTIONS[name])
    found = fl.fuse(fused).findings(P, X)
    assert not found.candidates
    assert not found.rejections
    text = [n.primitive for n in found.graph.nodes() if n.primitive in ("gemm_epilogue", "dot_product_attention")]
    assert len(text) == sum(SITES[name])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_with_nothing_fused_the_results_are_the_same_bits(name):
    f = FUNCTIONS[name]
    same_bits(fl.fuse(f, only=[])(P, X), jax.jit(f)(P, X))
    same_bits(fl.fuse(f, skip=["gemm_epilogue", "dot_product_attention"])(P, X), jax.jit(f)(P, X))


def test_with_nothing_fused_the_gradients_are_the_same_to_rounding():
    """Differentiation sees a program whose inner jits are flattened, so XLA may group its operations differently."""
    close(*(jax.jit(jax.grad(weighed(f)))(P, X) for f in (fl.fuse(both, only=[]), both)))


def fused_names(f):
    return sorted(n for n in primitives(fl.trace(f, P, X)) if n in ("gemm_epilogue", "dot_product_attention"))


def test_sites_are_skipped_and_chosen_by_id_and_by_pass():
    ids = [c.id for c in fl.fuse(both).findings(P, X).candidates]
    gemm, attend = "gemm_epilogue", "dot_product_attention"
    assert fused_names(fl.fuse(both)) == [attend, gemm, gemm, gemm]
    assert fused_names(fl.fuse(both, skip=[attend])) == [gemm] * 3
    assert fused_names(fl.fuse(both, skip=ids[:1])) == fused_names(fl.fuse(both, only=ids[1:]))
    assert fused_names(fl.fuse(both, only=[attend])) == [attend]
    assert fused_names(fl.fuse(both, passes=gemm)) == [gemm] * 3
    assert fused_names(fl.fuse(both, passes=fl.Strategy(dot_product_attention=True))) == [attend]
    for kwargs in ({"skip": ids[:1]}, {"only": ids[:1]}, {"only": ids[1:3], "skip": ids[1:2]}):
        close(fl.fuse(both, **kwargs)(P, X), both(P, X), 4.0)


def test_a_skipped_id_that_does_not_occur_here_is_ignored_but_a_wrong_chosen_one_is_an_error():
    close(fl.fuse(both, skip=["gemm_epilogue@elsewhere#7"])(P, X), both(P, X), 4.0)
    with pytest.raises(UnknownNameError, match="unknown site or pass 'gemm_epilogue@elsewhere#7'"):
        fl.fuse(both, only=["gemm_epilogue@elsewhere#7"])(P, X)


def test_one_name_may_stand_alone_in_skip_and_only():
    gemm, attend = "gemm_epilogue", "dot_product_attention"
    first = fl.fuse(both).findings(P, X).candidates[0].id
    assert fused_names(fl.fuse(both, skip=gemm)) == [attend]
    assert fused_names(fl.fuse(both, only=gemm)) == [gemm] * 3
    assert fused_names(fl.fuse(both, only=first)) == [first.partition("@")[0]]
    assert fused_names(fl.fuse(both, skip=first)) == fused_names(fl.fuse(both, skip=[first]))


@pytest.mark.parametrize("option", ["skip", "only"])
@pytest.mark.parametrize("name", ["gemm_epilog", "g", "gemm_epilogue@mlp", "gemm_epilog@mlp#1", ""])
def test_what_is_no_pass_and_no_site_is_refused_when_the_function_is_made(option, name):
    for given in (name, [name], ["gemm_epilogue", name]):
        with pytest.raises(UnknownNameError, match=f"unknown pass or site in {option} '{name}'; valid: ") as caught:
            fl.fuse(both, **{option: given})
        assert "gated_matmul, gemm_epilogue" in str(caught.value)
        assert "<pass>@<scope>#<number>" in str(caught.value)
    with pytest.raises(ArgumentError, match=f"{option}: got 3, needed pass names and site ids"):
        fl.fuse(both, **{option: [3]})


# -- implementations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["xla", "xla_blockwise"])
def test_a_named_implementation_is_the_one_that_is_bound(implementation):
    fused = fl.fuse(attention, implementation=implementation)
    found = fused.findings(P, X)
    node = next(n for n in found.apply().nodes() if n.primitive == "dot_product_attention")
    assert node.params["implementation"] == implementation
    agree(attention, P, X, implementation=implementation, factor=2)


def test_a_misspelt_implementation_lists_the_valid_ones():
    with pytest.raises(UnknownNameError) as caught:
        fl.fuse(attention, implementation="xla_blockwize")
    valid = ", ".join(sorted({name for op in OPS.values() for name in op.implementations}))
    assert str(caught.value) == f"unknown implementation 'xla_blockwize'; valid: {valid}. Did you mean 'xla_blockwise'?"


# -- check ------------------------------------------------------------------------------------------------------------


def test_check_passes_a_right_program_and_is_quiet_under_transformations():
    fused = fl.fuse(both, check=True)
    close(fused(P, X), both(P, X), 4.0)
    close(jax.grad(weighed(fused))(P, X), jax.grad(weighed(both))(P, X), 4.0)


def test_check_refuses_a_program_whose_results_differ(monkeypatch):
    """A broken kernel: the op's meaning, which certification sees, is right; what runs is not."""
    table = OPS["dot_product_attention"].implementations
    right = table["xla_blockwise"]

    def broken(*operands, **attrs):
        out, *residuals = right.forward(*operands, **attrs)
        return [out * 1.01, *residuals]

    monkeypatch.setitem(table, "xla_blockwise", replace(right, forward=broken))
    fused = fl.fuse(attention, implementation="xla_blockwise", check=True)
    assert counts(fused, P, X) == (0, 1, 0)
    with pytest.raises(RewriteError, match="attention"):
        fused(P, X)


# -- the rewritten program as data ------------------------------------------------------------------------------------


def test_findings_of_a_fused_function_rewrite_to_the_program_it_runs():
    fused = fl.fuse(both)
    closed = fused.findings(P, X).rewritten()
    (out,) = jaxpr_as_fun(closed)(*jax.tree.leaves((P, X)))
    close(out, both(P, X), 4.0)
    same_bits(jax.jit(jaxpr_as_fun(closed))(*jax.tree.leaves((P, X)))[0], fused(P, X))


def test_precision_asked_for_around_the_call_reaches_the_fused_product():
    with jax.default_matmul_precision("highest"):
        node = next(n for n in fl.trace(fl.fuse(mlp), P, X).nodes() if n.primitive == "gemm_epilogue")
    assert "HIGHEST" in str(node.params["precision"])
    node = next(n for n in fl.trace(fl.fuse(mlp), P, X).nodes() if n.primitive == "gemm_epilogue")
    assert node.params["precision"] is None


def test_an_input_that_is_returned_and_an_unused_one_come_through():
    def f(x, unused, n):
        return x, jax.nn.relu(x @ W1 + B1), n + 1, 3.5

    got, want = fl.fuse(f)(X, XS, 2), f(X, XS, 2)
    np.testing.assert_array_equal(got[0], want[0])
    close(got[1], want[1])
    assert (int(got[2]), float(got[3])) == (3, 3.5)


def test_a_checkpoint_that_holds_a_call_with_a_captured_array_is_fused_inside():
    """A checkpoint's jaxpr must have no constants; a call that is flattened into it brings its own."""
    inner = jax.jit(lambda x: jnp.sin(x) * W1[0, :4])
    layer = jax.checkpoint(lambda x, w, b: jax.nn.gelu(inner(x) @ w + b))
    found = agree(layer, X, W1, B1)
    assert [bool(c.block_path) for c in found.candidates] == [True]
