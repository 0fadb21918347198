"""Products that a checkpoint computes again are a lint, whose edit keeps what JAX's policy for them keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.fusers.lints.lint import Program
from fusionlab.fusers.lints.recomputed_products import RecomputedProducts
from fusionlab.fusers.lints.rules import lints_of_fused
from fusionlab.graph.jax_compat import child_jaxprs, split_closed
from fusionlab.graph.settings import as_function

NAME = "recomputed_products"
POLICY = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
S = jax.ShapeDtypeStruct
LAYERS, ROWS, WIDTH, WIDE = 4, 32, 16, 48


def arrays():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (LAYERS, WIDTH, WIDE), (LAYERS, WIDTH, WIDE), (LAYERS, WIDE, WIDTH), (ROWS, WIDTH)
    *weights, x = (jax.random.normal(k, s) / 4 for k, s in zip(keys, shapes, strict=True))
    return dict(zip(("gate", "up", "down"), weights, strict=True)), x


def layer(x, w):
    h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def scanned(remade, w, x):
    return jnp.sum(jax.lax.scan(lambda x, w: (remade(layer)(x, w), None), x, w)[0] ** 2)


def unrolled(remade, w, x):
    for i in range(LAYERS):
        x = remade(layer)(x, jax.tree.map(lambda a: a[i], w))  # noqa: B023
    return jnp.sum(x**2)


def in_groups(remade, w, x):
    def group(x, ws):
        return jax.lax.scan(lambda x, w: (remade(layer)(x, w), None), x, ws)[0], None

    pairs = jax.tree.map(lambda a: a.reshape(2, LAYERS // 2, *a.shape[1:]), w)
    return jnp.sum(jax.lax.scan(group, x, pairs)[0] ** 2)


def with_dropout(remade, w, x):
    def body(x, given):
        key, w = given

        def dropped(x, w):
            return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), layer(x, w), 0.0)

        return remade(dropped)(x, w), None

    return jnp.sum(jax.lax.scan(body, x, (jax.random.split(jax.random.key(1), LAYERS), w))[0] ** 2)


def train_loop(remade, w, x):
    def step(_, w):
        return jax.tree.map(lambda a, g: a - 1e-3 * g, w, jax.grad(functools.partial(scanned, remade))(w, x))

    return jnp.sum(jax.lax.fori_loop(0, 3, step, w)["up"])


def by_microbatch(remade, w, x):
    def step(total, x):
        return jax.tree.map(jnp.add, total, jax.grad(functools.partial(scanned, remade))(w, x)), None

    parts = x.reshape(2, ROWS // 2, WIDTH)
    return jnp.sum(jax.lax.scan(step, jax.tree.map(jnp.zeros_like, w), parts)[0]["up"])


def around_a_scan(remade, w, x):
    return jnp.sum(remade(lambda w, x: jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0])(w, x) ** 2)


def in_groups_made_again(remade, w, x):
    def group(x, ws):
        return remade(lambda x, ws: jax.lax.scan(lambda x, w: (remade(layer)(x, w), None), x, ws)[0])(x, ws), None

    pairs = jax.tree.map(lambda a: a.reshape(2, LAYERS // 2, *a.shape[1:]), w)
    return jnp.sum(jax.lax.scan(group, x, pairs)[0] ** 2)


def after_a_loop(remade, w, x):
    def rows_first(x, w):
        def block(total, part):
            return total + jnp.sum(jnp.sin(part), (0, 1)), None

        h = x + jax.lax.scan(block, jnp.zeros(WIDTH), x.reshape(4, -1, 1, WIDTH))[0]
        h = jax.lax.cond(h[0, 0] > 0, jnp.sin, jnp.cos, h)
        return layer(h.at[0].add(h[1]), w)

    return jnp.sum(jax.lax.scan(lambda x, w: (remade(rows_first)(x, w), None), x, w)[0] ** 2)


def whole(program):
    return program if program in (train_loop, by_microbatch) else lambda *args: jax.value_and_grad(program, 1)(*args)


PROGRAMS = {
    f.__name__: f
    for f in (
        scanned,
        unrolled,
        in_groups,
        with_dropout,
        train_loop,
        by_microbatch,
        around_a_scan,
        in_groups_made_again,
        after_a_loop,
    )
}


def step_of(program, policy=None):
    return functools.partial(whole(program), functools.partial(jax.checkpoint, policy=policy))


def lints(step, *args, least=0.0, device="h100"):
    return list(RecomputedProducts().lints(Program(fl.trace(step, *args), fl.Device.of(device)), least))


def products(jaxpr):
    """How many products run."""
    count = 0
    for eqn in jaxpr.eqns:
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        count += eqn.primitive.name == "dot_general"
        count += sum(times * products(split_closed(child)[0]) for _, _, child in child_jaxprs(eqn))
    return count


def assert_same(fn, other, *args):
    for a, b in zip(*(jax.tree.leaves(f(*args)) for f in (fn, jax.jit(other))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=float(1e-6 * jnp.abs(b).max()))


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_edit_is_that_of_the_policy(name):
    args = arrays()
    step, by_policy = step_of(PROGRAMS[name]), step_of(PROGRAMS[name], POLICY)
    fused = fl.fuse(step, edits=NAME, passes=())
    counts = [products(jax.make_jaxpr(fn)(*args).jaxpr) for fn in (fused, by_policy, step)]
    assert counts[0] == counts[1] < counts[2]
    kept = sum(int(lint.sentence.split()[7]) for lint in lints(step, *args))
    assert kept <= counts[2] - counts[1]  # what only a product needs that is kept is not computed again either
    assert lints(by_policy, *args) == lints(fused, *args) == []
    assert_same(fused, step, *args)


@pytest.mark.parametrize("edits", [[NAME], [NAME, "stacked_scan"]])
def test_what_is_edited_is_fused(edits):
    step, args = step_of(scanned), arrays()
    fused = fl.fuse(step, edits=edits, check=True)
    assert fused.findings(*args).notes == ()
    assert fused.findings(*args).candidates
    assert_same(fused, step, *args)


def larger(times):
    """The arguments with so many times as many rows and features."""
    return jax.tree.map(lambda a: S((*a.shape[:-2], times * a.shape[-2], times * a.shape[-1]), "bfloat16"), arrays())


def test_what_the_lint_says():
    (lint,) = fl.find(step_of(scanned), *larger(256), passes=(), device="h100").lints
    assert lint.id == f"{NAME}@#1"
    kept = LAYERS * 2 * (256 * ROWS) * (256 * WIDE) * 2  # no gradient needs the result of the last product
    assert (
        f"compute {2 * LAYERS} products again; keeping their results takes {kept / 1e9:.3g} GB of memory"
        in lint.sentence
    )
    assert lint.edit.startswith("policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable in jax.checkpoint")
    assert 0.1 < lint.share < 2 / 11  # of the 11 products of a layer it saves 2, and copies their results
    assert lint.source.text.startswith("return jnp.sum(jax.lax.scan")


def test_what_saves_little_is_no_lint_and_is_edited_when_asked():
    step, args = step_of(scanned), arrays()
    assert fl.find(step, *args, passes=(), device="h100").lints == ()  # tiny products, which take no time
    assert not fl.fuse(step, edits=NAME, passes=()).findings(*args).notes


@pytest.mark.parametrize(
    "program",
    [
        lambda w, x: scanned(jax.checkpoint, w, x),  # not differentiated
        jax.grad(functools.partial(scanned, lambda layer: layer)),  # no checkpoint
        jax.grad(lambda w, x: jax.vmap(functools.partial(scanned, jax.checkpoint), (0, None))(_by_member(w), x).sum()),
    ],
    ids=["forward", "kept", "batched"],
)  # fmt: skip
def test_no_lint(program):
    assert lints(program, *arrays()) == []


def _by_member(w):
    return jax.tree.map(lambda a: jnp.stack([a, 2 * a]), w)


def test_what_a_layer_prints_is_printed_as_often(capfd):
    def noisy(x, w):
        jax.debug.print("{}", jnp.sum(x))
        return layer(x, w)

    step = jax.grad(lambda w, x: jnp.sum(jax.lax.scan(lambda x, w: (jax.checkpoint(noisy)(x, w), None), x, w)[0]))
    printed = []
    for fn in (jax.jit(step), fl.fuse(step, edits=NAME, passes=())):
        jax.block_until_ready(fn(*arrays()))
        jax.effects_barrier()
        printed.append(len(capfd.readouterr().out.split()))
    assert printed[0] == printed[1] >= LAYERS


def two_steps(w, x):
    """The second differentiates at the weights that the first has changed: no product of the first is one of the second."""
    grads = jax.grad(functools.partial(scanned, jax.checkpoint))
    return grads(jax.tree.map(lambda a, g: a - 0.1 * g, w, grads(w, x)), x)


def two_backward_passes(w, x):
    y, back = jax.vjp(functools.partial(scanned, jax.checkpoint), w, x)
    return back(y), back(2 * y + 1)


def apart_by_operand(w, x):
    return jax.value_and_grad(
        functools.partial(unrolled, functools.partial(jax.checkpoint, prevent_cse=(True, False)))
    )(w, x)


def after_a_branch(w, x):
    # The branch computes all of it first, but nothing can be passed out of it.
    good = jax.lax.cond(x[0, 0] > 0, lambda: scanned(lambda f: f, w, x), lambda: 0.0)
    return good, jax.grad(functools.partial(scanned, jax.checkpoint))(w, x)


def there_and_back(w, x):
    def loss(w, x):
        first = jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, w)[0]
        again = jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), first, w, reverse=True)[0]
        return jnp.sum(again**2)

    return jax.value_and_grad(loss)(w, x)


@pytest.mark.parametrize(
    ("step", "lines", "kept"),
    [
        (two_steps, 1, 4),
        (two_backward_passes, 1, 4),
        (apart_by_operand, 1, 2),
        (after_a_branch, 1, 2),
        (there_and_back, 2, 4),
    ],
)
def test_products_of_other_steps(step, lines, kept):
    found = lints(step, *arrays())
    assert len(found) == lines
    assert sum(int(lint.sentence.split()[7]) for lint in found) == kept * LAYERS
    assert_same(fl.fuse(step, edits=NAME, passes=()), step, *arrays())


def test_layers_of_convolutions_in_a_shard_map():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss(w, x):
        @jax.checkpoint
        def block(x, w):
            return jnp.sin(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME"))

        return jnp.sum(block(block(x, w), 2 * w))

    def step(w, x):
        return jax.lax.pmean(jax.grad(loss)(w, x), "data")

    P = jax.sharding.PartitionSpec
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    args = jnp.ones((4, 4, 3, 3)) / 9, jax.random.normal(jax.random.key(0), (2, 4, 8, 8))
    assert len(lints(mapped, *args)) >= 1
    assert_same(fl.fuse(mapped, edits=NAME, passes=()), mapped, *args)


@pytest.mark.dear
@pytest.mark.parametrize("fused", [False, True])
def test_advice_tries_it(fused):
    args = jax.tree.map(lambda a: jnp.full(a.shape, 0.01, "float32"), larger(16))
    step = step_of(unrolled)
    (tried,) = fl.advise(fl.fuse(step) if fused else step, *args, samples=3, budget_s=0.1).tried
    assert tried.lint.rule == NAME
    assert tried.differing == ()
    assert fl.advise(fl.fuse(step, edits=NAME), *args).tried == ()


def test_the_edit_of_a_fused_program_is_made_before_its_sites_are_fused():
    step, args = step_of(unrolled), larger(256)
    fused, edited = (fl.trace(fl.fuse(step, edits=edits), *args) for edits in ((), NAME))
    lint = next(x for x in lints_of_fused(fused, fl.trace(step, *args), fl.fuse(step).program_of, fl.Device.of("h100")))
    (plain,) = fl.find(step, *args, passes=(), device="h100").lints
    assert plain.share < lint.share < 0.25  # of less time
    (found,) = fl.find(step, *args, device="h100").lints  # of the time that the program takes once it is fused
    assert plain.share < found.share < 0.25
    assert "of the fused program's time" in found.sentence
    assert "of the program's time" in plain.sentence
    assert (
        fl.trace(as_function(lint.edited()), *jax.tree.leaves(args)).node_count == edited.node_count != fused.node_count
    )


@pytest.mark.dear
def test_layers_of_flax():
    nn = pytest.importorskip("flax.linen")

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(WIDE)(nn.LayerNorm()(x)))), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
            return layers(name="layers")(x, None)[0]

    model, x = Model(), arrays()[1]
    params = model.init(jax.random.key(0), x)
    step = jax.value_and_grad(lambda p, x: jnp.sum(model.apply(p, x) ** 2))
    (lint,) = lints(step, params, x)
    assert f"compute {LAYERS} products again" in lint.sentence
    assert_same(fl.fuse(step, edits=NAME), step, params, x)


@pytest.mark.dear
def test_a_language_model_as_users_write_it():
    from benchmarks.programs.language_steps import PLAIN, Llama

    case = Llama("checkpoint")
    args = jax.eval_shape(case.parameters), S((case.batch, case.length + 1), "int32")
    (lint,) = lints(jax.value_and_grad(case.loss(PLAIN)), *args)
    assert "compute 24 products again; keeping their results takes 1.07 GB of memory" in lint.sentence
