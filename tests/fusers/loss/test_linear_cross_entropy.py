"""Pass linear_cross_entropy: which losses become the op, with which numbers, their gradients, and which are declined."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fusionlab as fl
from fusionlab.graph.interpret.evaluate import evaluate
from fusionlab.viz.html.inspector_sites import backward_html

from ..checks import jit, primitives
from .spellings import APART, LABELS, MASK, SPELLINGS, E, N, V, W, X, integer_labels, one_hot

NAME = "linear_cross_entropy"
ODD = np.asarray([0, V, -1, V - 1, -V - 1, V + 7, -100, -V, 3, -5, 2**31 - 1, -(2**31)], np.int32)
CHEAP = ("optax, labels", "MaxText, z-loss, weights")


def of(spelling):
    """(the loss, differentiated by x and w; the one argument more where the loss has a bias)."""
    wanted = (0, 1, 3) if spelling.attrs.get("softcap") else (0, 1)
    return jax.value_and_grad(spelling.fn, wanted, has_aux=spelling.aux)


def exact(fn, args):
    """The results of a program in float64, its casts left out."""
    closed = jax.make_jaxpr(fn)(*args)
    return evaluate(closed, [np.float64(a) if a.dtype.kind == "f" else a for a in args])


def errors(got, want):
    """The largest error of each result, of its largest entry."""
    pairs = zip(jax.tree.leaves(got), want, strict=True)
    return [float(np.max(np.abs(np.float64(g) - w)) / max(np.max(np.abs(w)), 1e-6)) for g, w in pairs]


def check_site(found, spelling, gradients):
    (site,) = found.candidates
    attrs = {"out_of_range": spelling.out_of_range, "logits_dtype": "float32"} | spelling.attrs
    assert {k: v for k, v in site.attrs.items() if v not in (None, False, 0.0, ())} == attrs
    assert ("masked" in site.attrs) is not spelling.rows
    assert site.concepts == (NAME,)
    if gradients:
        assert site.backward.is_fused, site.backward.text
        assert set(site.backward.gradients) >= {"x", "w"}


@pytest.mark.parametrize(
    "name", [*CHEAP, *(pytest.param(n, marks=pytest.mark.dear) for n in SPELLINGS if n not in CHEAP)]
)
def test_a_loss_and_its_gradients_are_fused_and_no_less_exact(name):
    spelling = SPELLINGS[name]
    args, step = spelling.args, of(spelling)
    check_site(fl.find(spelling.fn, *args, passes=NAME, device="cpu"), spelling, gradients=False)
    check_site(fl.find(step, *args, passes=NAME, device="cpu"), spelling, gradients=True)
    want = exact(step, args)
    plain = errors(jit(step)(*args), want)
    whole = jit(fl.fuse(step, passes=[NAME]))(*args)
    fused = of(spelling.__class__(**{**spelling.__dict__, "fn": fl.fuse(spelling.fn, passes=[NAME])}))
    for got in (whole, jit(fused)(*args)):
        for new, old in zip(errors(got, want), plain, strict=True):
            assert new <= 1.2 * old + 4e-7


def gradients_alone(spelling):
    """The gradients, without the value."""
    wanted = (0, 1, 3) if spelling.attrs.get("softcap") else (0, 1)
    return jax.grad(spelling.fn, wanted, has_aux=spelling.aux)


@pytest.mark.dear
@pytest.mark.parametrize("differentiated", [of, gradients_alone])
@pytest.mark.parametrize("name", [*APART, *SPELLINGS])
def test_the_gradients_are_fused_where_there_is_no_value(name, differentiated):
    spelling = APART.get(name) or SPELLINGS[name]
    if (differentiated is of and name in SPELLINGS) or name in ("weighted targets", "optax, where"):
        return  # above; with a weight and a factor for all, the gradients alone are declined
    step = differentiated(spelling)
    found = fl.find(step, *spelling.args, passes=NAME, device="cpu")
    assert found.candidates, found.rejections
    assert not any(r.pass_name == NAME for r in found.rejections)
    assert "reduce_max" not in primitives(found.apply())
    want = exact(step, spelling.args)
    plain = errors(jit(step)(*spelling.args), want)
    for new, old in zip(errors(jit(fl.fuse(step, passes=[NAME]))(*spelling.args), want), plain, strict=True):
        assert new <= 1.2 * old + 4e-7


@pytest.mark.dear
@pytest.mark.parametrize("name", APART)
@pytest.mark.parametrize("labels", ODD.tolist())
def test_labels_outside_of_the_vocabulary_where_gradients_are_a_site(name, labels):
    spelling = APART[name]
    given = np.where(np.arange(N) == 5, labels, LABELS).astype(np.int32)
    for step in (of(spelling), gradients_alone(spelling), spelling.fn):
        args = (X, W, given, *spelling.more)
        want, got = jit(step)(*args), jit(fl.fuse(step, passes=[NAME]))(*args)
        for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
            np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-6)


@pytest.mark.dear
@pytest.mark.parametrize(
    "name", ["optax, labels", "optax, label smoothing", "log_softmax, take_along_axis", "indexed in vmap"]
)
@pytest.mark.parametrize("labels", ODD.tolist())
def test_labels_outside_of_the_vocabulary_give_what_they_gave(name, labels):
    """Each alone, and beside others."""
    spelling = SPELLINGS[name]
    for given in (np.full(N, labels, np.int32), np.where(np.arange(N) == 5, labels, LABELS).astype(np.int32)):
        step = of(spelling)
        want, got = jit(step)(X, W, given), jit(fl.fuse(step, passes=[NAME]))(X, W, given)
        for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
            np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-6)


def test_a_row_that_is_masked_counts_nothing_whatever_its_loss_is():
    def masked(x, w, labels, mask):
        return jnp.where(mask, integer_labels(x @ w, labels), 0.0).sum()

    labels, mask = np.where(MASK == 0, V + 3, LABELS).astype(np.int32), MASK != 0
    fused = fl.fuse(masked, passes=[NAME])
    assert NAME in primitives(fl.find(masked, X, W, labels, mask, passes=NAME).apply())
    assert np.isclose(jit(fused)(X, W, labels, mask), jit(masked)(X, W, labels, mask), rtol=1e-5)
    # Multiplied by 0, NaN is NaN.
    times = lambda x, w, y, m: (integer_labels(x @ w, y) * m).sum()  # noqa: E731
    assert np.isnan(jit(fl.fuse(times, passes=[NAME]))(X, W, labels, mask.astype(np.float32)))


def test_a_constant_mask_that_is_multiplied_leaves_no_loss_out():
    """XLA makes numbers of a constant mask first; a mask that is given it turns into a choice."""
    x, constant = np.where(MASK[:, None] == 0, np.nan, X).astype(np.float32), MASK != 0

    def times(x, w, mask):
        return jnp.sum(integer_labels(x @ w, LABELS) * mask)

    programs = {"given": lambda x, w, m: times(x, w, m), "constant": lambda x, w, m: times(x, w, constant)}
    for name, program in programs.items():
        assert len(fl.find(program, x, W, constant, passes=NAME).candidates) == 1
        want, got = (jit(f)(x, W, constant) for f in (program, fl.fuse(program, passes=[NAME])))
        assert np.isnan(want) == (name == "constant")
        np.testing.assert_allclose(got, want, rtol=1e-5)


def without_rows(x, w, mask):
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, LABELS, where=mask[:, None]).mean()


def test_rows_that_are_left_out_of_a_softmax_give_no_gradient_and_the_site_says_so():
    x, mask = np.where(MASK[:, None] == 0, np.nan, X).astype(np.float32), MASK != 0
    (site,) = fl.find(without_rows, x, W, mask, passes=NAME).candidates
    assert ["left out" in note for note in site.notes] == [True]
    step = jax.value_and_grad(without_rows, 1)
    (want, lost), (got, gradient) = (
        jit(f)(x, W, mask) for f in (step, jax.value_and_grad(fl.fuse(without_rows, passes=[NAME]), 1))
    )
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert np.isnan(lost).any()
    assert np.isfinite(gradient).all()


@pytest.mark.dear
def test_a_train_step_that_tests_such_a_gradient_keeps_its_loss():
    def step(x, w, mask):
        loss, gradient = jax.value_and_grad(without_rows, 1)(x, w, mask)
        return loss, jnp.where(jnp.all(jnp.isfinite(gradient)), w - 0.1 * gradient, w)

    x, mask = np.where(MASK[:, None] == 0, np.nan, X).astype(np.float32), MASK != 0
    found = fl.find(step, x, W, mask, passes=NAME)
    assert not found.candidates
    assert "tests for that" in found.rejections[0].sentence
    assert np.array_equal(jit(fl.fuse(step, passes=[NAME]))(x, W, mask)[1], W)


def same(fn, args):
    """A loss and its gradients are what they were."""
    step = jax.value_and_grad(fn, (0, 1))
    for want, got in zip(jit(step)(*args)[1], jit(fl.fuse(step, passes=[NAME]))(*args)[1], strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
    for program in (fl.fuse(fn, passes=[NAME]), lambda *a: fl.fuse(step, passes=[NAME])(*a)[0]):
        np.testing.assert_allclose(jit(program)(*args), jit(fn)(*args), rtol=2e-5)


@pytest.mark.dear
@pytest.mark.parametrize("name", ["optax, where", "optax, one_hot, where"])
def test_rows_that_are_left_out_count_nothing(name):
    fn = SPELLINGS[name].fn
    for labels in (V + 3, -100):
        same(fn, (X, W, np.where(MASK == 0, labels, LABELS).astype(np.int32), MASK))
        same(fn, (X, W, np.where(np.arange(N) == 2, labels, LABELS).astype(np.int32), MASK))
    same(fn, (X, W, LABELS, 0 * MASK))
    large = np.where(MASK[:, None] == 0, np.float32(3e38), X)  # their logits overflow
    same(fn, (large, W, LABELS, MASK))


@pytest.mark.dear
@pytest.mark.parametrize(
    "mean",
    [
        lambda x, w, y: jnp.mean(integer_labels(x @ w, y), where=y >= 0),
        lambda x, w, y: (integer_labels(x @ w, jnp.where(y < 0, 0, y)) * (y >= 0)).sum() / (y >= 0).sum(),
    ],
)
def test_a_mean_of_no_row_stays_nan(mean):
    same(mean, (X, W, -1 - LABELS))
    assert np.isnan(jit(fl.fuse(mean, passes=[NAME]))(X, W, -1 - LABELS))


def by_length(x, w, y, lengths):
    return jnp.where(lengths > 0, integer_labels(x @ w, y) / lengths, 0.0).sum()


def by_text(x, w, y, mask):
    loss, mask = integer_labels(x @ w, y).reshape(3, 4) * mask.reshape(3, 4), mask.reshape(3, 4)
    return jnp.where(mask.any(1), loss.sum(1) / mask.sum(1), 0.0).mean()


@pytest.mark.dear
@pytest.mark.parametrize("fn", [by_length, by_text])
def test_a_factor_that_is_no_number_counts_nothing_where_its_row_is_left_out(fn):
    args = X, W, LABELS, np.where(np.arange(N) < 4, 0, MASK).astype(np.float32)
    assert NAME in primitives(fl.find(fn, *args, passes=NAME).apply())
    assert np.isfinite(jit(fn)(*args))
    np.testing.assert_allclose(jit(fl.fuse(fn, passes=[NAME]))(*args), jit(fn)(*args), rtol=1e-5)


@pytest.mark.dear
def test_a_product_with_a_mask_of_bools_is_the_choice_that_xla_makes_of_it():
    def kept(x, w, y):
        return (integer_labels(x @ w, y) * (y >= 0)).sum() / jnp.maximum((y >= 0).sum(), 1)

    labels = np.where(MASK == 0, -100, LABELS).astype(np.int32)
    assert np.isfinite(jit(kept)(X, W, labels))
    same(kept, (X, W, labels))


@pytest.mark.dear
def test_a_choice_of_targets_leaves_no_logits_out():
    def chosen(x, w, y, mask):
        return -jnp.sum(jnp.where(mask[:, None], one_hot(y), 0.0) * jax.nn.log_softmax(x @ w))

    args = np.where(MASK[:, None] == 0, np.nan, X), W, LABELS, MASK != 0
    assert NAME in primitives(fl.find(chosen, *args, passes=NAME).apply())
    want, got = (jit(jax.grad(f))(*args) for f in (chosen, fl.fuse(chosen, passes=[NAME])))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.dear
def test_the_logarithm_of_a_softmax_that_underflows_becomes_a_number_and_the_site_says_so():
    spelling = SPELLINGS["logarithm of a softmax"]
    (site,) = fl.find(spelling.fn, X, W, LABELS, passes=NAME, device="cpu").candidates
    assert ["underflows" in note for note in site.notes] == [True]
    assert not fl.find(SPELLINGS[CHEAP[0]].fn, X, W, LABELS, passes=NAME, device="cpu").candidates[0].notes
    assert np.isinf(jit(spelling.fn)(1000 * X, W, LABELS))
    got = jit(fl.fuse(spelling.fn, passes=[NAME]))(1000 * X, W, LABELS)
    np.testing.assert_allclose(got, jit(SPELLINGS[CHEAP[0]].fn)(1000 * X, W, LABELS), rtol=1e-5)


def logits_returned(x, w, y):
    z = x @ w
    return integer_labels(z, y).mean(), z


def two_losses(x, w, y):
    z = x @ w
    return integer_labels(z, y).mean() + jnp.mean(z**2)


def ranked(x, w, y):
    z = x @ w
    return integer_labels(z, y).mean(), jax.lax.top_k(z, 5)[1]


def other_axis(x, w, y):
    z = (x @ w).T
    return (jax.nn.logsumexp(z, 0) - z[y, jnp.arange(N)]).mean()


def stopped(x, w, y):
    z = x @ w
    return (jax.lax.stop_gradient(jax.nn.logsumexp(z, -1)) - jnp.take_along_axis(z, y[:, None], -1)[:, 0]).mean()


def shifted(x, w, y):
    z = x @ w
    z = z - z.max(-1, keepdims=True)
    return (jnp.log(jnp.exp(z).sum(-1)) - jnp.sum(one_hot(y) * z, -1)).mean()


def own_rule(x, w, y):
    @jax.custom_vjp
    def loss(z, t):
        return jax.nn.logsumexp(z, -1) - (z * t).sum(-1)

    loss.defvjp(lambda z, t: (loss(z, t), (z, t)), lambda s, g: ((jax.nn.softmax(s[0]) - s[1]) * g[:, None], None))
    return loss(x @ w, one_hot(y)).mean()


def clipped_rule(x, w, y):
    @jax.custom_vjp
    def loss(z, t):
        return jax.nn.logsumexp(z, -1) - (z * t).sum(-1)

    def backward(saved, g):
        z, t = saved
        return jnp.clip((jax.nn.softmax(z) - t) * g[:, None], -1e6, 1e6), None

    loss.defvjp(lambda z, t: (loss(z, t), (z, t)), backward)
    return loss(x @ w, one_hot(y)).mean()


def tempered(x, w, y):
    return integer_labels(x @ w / w[0, 0], y).mean()


def powered(x, w, y):
    z = x @ w
    return (jax.nn.logsumexp(z, -1) ** 3 - jnp.take_along_axis(z, y[:, None], -1)[:, 0]).mean()


def doubled(x, w, y):
    z = x @ w
    return (jax.nn.logsumexp(z, -1) - 2 * jnp.sum(one_hot(y) * z, -1)).mean()


def targets(x, w, y):
    return optax.softmax_cross_entropy(x @ w, jax.nn.softmax(w[:1] * y[:, None])).mean()


def number_asked_for(x, w, y):
    loss = -jnp.log(jax.nn.softmax(x @ w))[jnp.arange(N), y].mean()
    return jnp.where(jnp.isfinite(loss), loss, 0.0)


def infinity_asked_for(x, w, y):
    loss = -jnp.log(jax.nn.softmax(x @ w))[jnp.arange(N), y]
    return jnp.where(jnp.isinf(loss), 0.0, loss).mean()


def gradient_asked_for(x, w, y):
    loss, gradient = jax.value_and_grad(lambda w: -jnp.log(jax.nn.softmax(x @ w))[jnp.arange(N), y].mean())(w)
    return loss, jnp.where(jnp.isfinite(jnp.sum(gradient**2)), gradient, 0.0)


def several_heads(x, w, y):
    return integer_labels(
        jnp.einsum("bse,ehv->bshv", x.reshape(2, 6, E), w.reshape(E, 4, -1)), y.reshape(2, 6, 1)
    ).mean()


def several_heads_merged(x, w, y):
    return integer_labels((x @ w).reshape(N, 4, -1), y[:, None] + jnp.arange(4)).mean()


def several_axes(x, w, y):
    return integer_labels(jnp.einsum("nhd,hdv->nv", x.reshape(N, 2, -1), w.reshape(2, -1, V)), y).mean()


def gradient_by_example(x, w, y):
    return jax.vmap(jax.grad(lambda w, x, y: integer_labels(x @ w, y).mean()), (None, 0, 0))(
        w, x.reshape(2, 6, E), y.reshape(2, 6)
    )


def classes_over_devices(x, w, y):
    """As Megatron-LM splits the vocabulary: each device has the logits of some classes, and sums are taken over the devices."""

    def local(x, w, y):
        z = x @ w
        most = jax.lax.pmax(jax.lax.stop_gradient(z.max(-1)), "d")
        total = jax.lax.psum(jnp.exp(z - most[:, None]).sum(-1), "d")
        mine = y - jax.lax.axis_index("d") * w.shape[1]
        picked = jnp.take_along_axis(z, jnp.clip(mine, 0, w.shape[1] - 1)[:, None], 1)[:, 0]
        picked = jax.lax.psum(jnp.where((mine >= 0) & (mine < w.shape[1]), picked, 0.0), "d")
        return jnp.mean(jnp.log(total) + most - picked)

    return on_devices(local)(x, w, y)


def number_over_devices(x, w, y):
    """The sum over devices is of another number, not of the exponentials."""

    def local(x, w, y):
        picked = jnp.take_along_axis(jax.nn.softmax(x @ w), y[:, None], 1)[:, 0]
        return -jnp.mean(jnp.log(picked / jax.lax.psum(jnp.max(x), "d")))

    return on_devices(local)(x, w, y)


def on_devices(local):
    mesh, P = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,)), jax.sharding.PartitionSpec
    return jax.shard_map(local, mesh=mesh, in_specs=(P(), P(None, "d"), P()), out_specs=P(), check_vma=False)


DECLINED = {
    "logits are returned": (logits_returned, "escapes", "is also returned"),
    "another loss of the logits": (two_losses, "value", "another function of the logits"),
    "top_k of the logits": (ranked, "escapes", "top_k"),
    "another axis": (other_axis, "axes", "does not sum over the last axis"),
    "logsumexp stopped": (stopped, "stop_gradient", "another gradient"),
    "shifted logits, one_hot": (shifted, "value", "labels outside of the vocabulary"),
    "a rule of the user's own that clips": (clipped_rule, "custom_rule", "a derivative of the user's own"),
    "temperature": (tempered, "scalar", "changes the logits"),
    "part of the vocabulary": (lambda x, w, y: integer_labels((x @ w)[:, :30], y).mean(), "axes", "not the whole rows"),
    "masked classes": (
        lambda x, w, y: integer_labels(jnp.where(jnp.arange(V) % 2 == 0, x @ w, -1e9), y).mean(), "mask", "masks logits"),
    "targets that are no labels": (targets, "structure", "no value holds one label"),
    "a probability and an epsilon": (
        lambda x, w, y: -jnp.log(jax.nn.softmax(x @ w) + 1e-8)[jnp.arange(N), y].mean(), "value", "another function"),
    "whether the loss is a number": (number_asked_for, "value", "tests for that"),
    "whether the loss is infinite": (infinity_asked_for, "value", "tests for that"),
    "whether a gradient is a number": (gradient_asked_for, "value", "tests for that"),
    "classes over devices": (classes_over_devices, "axes", "of its own classes"),
    "a number over devices": (number_over_devices, "structure", "reads more than logits and labels"),
    "a gradient for each example": (gradient_by_example, "structure", "one for each example"),
    "no row": (lambda x, w, y: integer_labels(x[:0] @ w, y[:0]).sum(), "axes", "are empty"),
    "a mask that numpy made": (
        lambda x, w, y: integer_labels(jnp.where(np.arange(V) < 30, x @ w, -1e9), y).mean(),
        "mask", ":bool[32], an input or a captured array"),
    "classes that are added to": (
        lambda x, w, y: integer_labels((x @ w).at[:, 30:].add(-1e9), y).mean(), "mask", "masks logits"),
    "the first class overwritten": (
        lambda x, w, y: integer_labels((x @ w).at[:, 0].set(-1e9), y).mean(), "mask", "masks logits"),
    "several heads": (several_heads, "axes", "several matrices"),
    "several heads in one matrix": (several_heads_merged, "axes", "not the whole rows"),
    "several axes summed": (several_axes, "axes", "sums over 2 axes"),
    "another power": (powered, "value", "another function"),
    "twice the label's logit": (doubled, "scalar", "-2 logit of the label"),
    "two dtypes": (lambda x, w, y: integer_labels(jax.lax.dot(x, w.astype(jnp.bfloat16),
        preferred_element_type=jnp.float32), y).mean(), "dtype", "takes one of"),
}  # fmt: skip


@pytest.mark.parametrize("name", DECLINED)
def test_each_condition_is_declined_with_its_code(name):
    fn, code, says = DECLINED[name]
    found = fl.find(fn, X, W, LABELS, passes=NAME, device="cpu")
    assert not found.candidates
    (rejection,) = found.rejections
    assert (rejection.code, says in rejection.sentence) == (code, True), rejection


def transformer(vocabulary=64, features=16, layers=2):
    """A scanned language model with tied embeddings, and its AdamW step."""
    draw = np.random.default_rng(0).normal
    p = {
        "embedding": draw(size=(vocabulary, features)).astype(np.float32) * 0.1,
        "up": draw(size=(layers, features, 2 * features)).astype(np.float32) * 0.2,
        "down": draw(size=(layers, 2 * features, features)).astype(np.float32) * 0.2,
    }

    def loss(p, tokens):
        def layer(h, given):
            return h + jax.nn.silu(h @ given[0]) @ given[1], None

        h, _ = jax.lax.scan(layer, p["embedding"][tokens[:, :-1]], (p["up"], p["down"]))
        logits, labels = h @ p["embedding"].T, tokens[:, 1:]
        counts = (labels != 0).astype(jnp.float32)
        right = (jnp.argmax(logits, -1) == labels) * counts
        each = integer_labels(logits, labels)
        return jnp.sum(each * counts) / jnp.sum(counts), jnp.sum(right) / jnp.sum(counts)

    optimizer = optax.adamw(1e-2)

    def step(p, state, tokens):
        (value, accuracy), grads = jax.value_and_grad(loss, has_aux=True)(p, tokens)
        updates, state = optimizer.update(grads, state, p)
        return optax.apply_updates(p, updates), state, value, accuracy

    tokens = np.random.default_rng(1).integers(0, vocabulary, (2, 9)).astype(np.int32)
    return step, (p, optimizer.init(p), tokens)


@pytest.mark.dear
def test_a_train_step_of_a_scanned_model_with_tied_embeddings_and_an_accuracy():
    step, args = transformer()
    found = fl.find(step, *args, passes=NAME, device="cpu")
    (site,) = found.candidates
    assert site.backward.is_fused
    assert site.attrs["also"] == ("argmax",)
    assert site.attrs["transposed"]
    want, got = jit(step)(*args), jit(fl.fuse(step, passes=[NAME]))(*args)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-3, atol=2e-5)


def accumulated(x, w, labels, remat):
    """The loss of parts of a batch, one after the other."""
    part = lambda a, y: integer_labels(a @ w, y).sum()  # noqa: E731
    part = jax.checkpoint(part) if remat else part
    total, _ = jax.lax.scan(lambda c, g: (c + part(*g), None), 0.0, (x.reshape(3, 4, E), labels.reshape(3, 4)))
    return total / N


@pytest.mark.dear
@pytest.mark.parametrize("remat", [False, True])
def test_in_a_scan_and_in_a_checkpoint(remat):
    loss = lambda x, w, y: accumulated(x, w, y, remat)  # noqa: E731
    step = jax.value_and_grad(loss, (0, 1))
    want = jit(step)(X, W, LABELS)
    first, *others = fl.find(step, X, W, LABELS, passes=NAME, device="cpu").candidates
    assert len(others) == remat  # the gradients in a checkpoint are a site of their own
    assert remat or first.backward.is_fused
    fused = jax.value_and_grad(fl.fuse(loss, passes=[NAME]), (0, 1))
    for got in (jit(fl.fuse(step, passes=[NAME]))(X, W, LABELS), jit(fused)(X, W, LABELS)):
        for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)


@pytest.mark.dear
def test_the_explorer_shows_a_site_whose_cotangent_is_a_number():
    spelling = SPELLINGS[CHEAP[0]]
    found = fl.find(of(spelling), *spelling.args, passes=NAME, device="cpu")
    (site,) = found.candidates
    assert repr(site.backward.cotangent) in ("1", "1.0")
    assert "cotangent" in backward_html(site, found.graph)
