"""A scan over layers whose stacked residuals are copied is reported as a lint, and no other scan is."""

import functools

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.errors import ArgumentError, UnknownNameError
from fusionlab.graph.jax_compat import child_jaxprs, split_closed
from fusionlab.graph.settings import as_function
from fusionlab.showing import Records

S = jax.ShapeDtypeStruct
LAYERS, ROWS, WIDTH = 8, 2048, 64
W, X = S((LAYERS, WIDTH, WIDTH), "float32"), S((ROWS, WIDTH), "float32")


def layer(x, w):
    h = jnp.tanh(x @ w)
    return x + h * jnp.sin(h), None


def loss(w, x, body=layer, **options):
    return jnp.sum(jax.lax.scan(body, x, w, **options)[0] ** 2)


def lints(fn, *args, device="cpu"):
    return fl.find(fn, *args, passes=(), device=device).lints


def test_a_scan_that_stacks_what_its_backward_pass_reads_is_a_lint():
    found = fl.find(jax.value_and_grad(loss), W, X, passes=(), device="h100")
    (lint,) = found.lints
    assert (lint.id, lint.rule, lint.scope) == ("stacked_scan@#1", "stacked_scan", "")
    scans = [n for n in found.graph.nodes() if n.primitive == "scan"]
    assert lint.node_ids == {n.id for n in scans}
    assert len(scans) == 2
    # x, tanh, sin, cos and 1 - tanh**2 or the like: at least four arrays of each layer, and whole ones.
    stacked = [v for v in scans[0].outputs if v.shape == (LAYERS, ROWS, WIDTH)]
    assert len(stacked) >= 4
    assert f"stacks {sum(v.nbytes for v in stacked) / 1e6:.3g} MB" in lint.sentence
    assert lint.edit.startswith(f"unroll={LAYERS} ")
    assert 0.2 < lint.share < 0.7
    assert lint.source.text.startswith("return jnp.sum(jax.lax.scan")


def test_fuse_makes_the_edit_that_it_is_asked_for():
    keys = jax.random.split(jax.random.key(0))
    args = 0.1 * jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)), jax.random.normal(keys[1], (32, WIDTH))
    step = jax.value_and_grad(loss)
    edited, fused = fl.fuse(step, edits="stacked_scan"), fl.fuse(step, check=True)
    texts = [fn.lower(*args).as_text() for fn in (fused, edited)]
    assert ["while" in text for text in texts] == [True, False]
    assert edited.findings(*args).lints == ()
    assert [n.primitive for n in edited.findings(*args).graph.nodes()] == [
        n.primitive for n in fl.trace(step, *args).nodes()
    ]
    for a, b in zip(*(jax.tree.leaves(fn(*args)) for fn in (edited, step)), strict=True):
        assert jnp.abs(a - b).max() <= 1e-5 * jnp.abs(b).max()
    assert not edited.findings(*args).notes


def test_an_edit_in_the_operator_of_a_linear_solve():
    def solved(w, x):
        def product(v):
            return v + jax.vjp(lambda x: jax.lax.scan(layer, x, w)[0], x)[1](v)[0]

        return jax.lax.custom_linear_solve(product, x, solve=lambda of, b: 2 * b - of(b), symmetric=True)

    graph = fl.fuse(solved, edits="stacked_scan", passes=()).findings(W, X).graph
    unrolls = [n.params["unroll"] for block in graph.blocks() for n in block.nodes if n.primitive == "scan"]
    assert unrolls
    assert set(unrolls) == {LAYERS}


def test_an_edit_that_there_is_not_or_that_changes_nothing():
    with pytest.raises(UnknownNameError, match=r"unknown edit 'stacked'; valid: recomputed_products, stacked_scan"):
        fl.fuse(loss, edits=["stacked"])
    with pytest.raises(ArgumentError, match="edits: got True, needed the name of a rule"):
        fl.fuse(loss, edits=True)
    (note,) = fl.fuse(loss, edits="stacked_scan").findings(W, X).notes
    assert note.startswith("no edit was made")


@pytest.mark.parametrize(
    "fn",
    [
        loss,  # an inference scan
        jax.grad(functools.partial(loss, unroll=LAYERS)),  # written out already
        jax.jit(lambda w, x: jax.lax.fori_loop(0, LAYERS, lambda i, x: layer(x, w[i])[0], x)),
        lambda w, x: jax.lax.scan(lambda x, w: (layer(x, w)[0], x), x, w),  # its stack is what the program returns
        # A scan of many short steps would take minutes to compile written out.
        jax.grad(lambda w, x: loss(jnp.broadcast_to(w[:1], (500, WIDTH, WIDTH)), x)),
    ],
    ids=["forward", "unrolled", "fori", "returned", "steps"],
)  # fmt: skip
def test_no_lint(fn):
    assert lints(fn, W, X) == ()


def test_no_lint_where_the_products_take_the_time():
    # Of a layer with a wide product inside, little is stacked: two arrays of 64 against a product with 8192 columns.
    def body(x, ws):
        up, down = ws
        return x + (x @ up) @ down, None

    def step(up, down, x):
        return jnp.sum(jax.lax.scan(body, x, (up, down))[0])

    args = S((LAYERS, 512, 4096), "float32"), S((LAYERS, 4096, 512), "float32"), S((64, 512), "float32")
    assert lints(jax.grad(step, argnums=(0, 1)), *args) == ()


def test_decoding_is_no_lint():
    def decode(w, x):
        def token(state):
            i, x = state
            return i + 1, jax.lax.scan(layer, x, w)[0]

        return jax.lax.while_loop(lambda s: s[0] < 10, token, (0, x))

    assert lints(decode, W, X) == ()


def test_the_device_decides():
    wide = S((LAYERS, 512, 512), "float32"), S((512, 512), "float32")
    on_card, on_cpu = (lints(jax.grad(loss), *wide, device=d)[0].share for d in ("h100", "cpu"))
    assert on_card > on_cpu  # its products take less time for each byte that is moved


def test_the_edited_program_has_both_loops_written_out_and_all_others_as_they_are():
    @jax.jit
    def step(w, x):
        value, grads = jax.value_and_grad(loss)(w, x)
        return jax.lax.scan(lambda c, g: (c + jnp.sum(g), g * c), value, grads)

    found = fl.find(
        lambda flag, w, x: jax.lax.cond(flag, step, lambda w, x: (0.0, w), w, x), S((), bool), W, X, passes=()
    )
    (lint,) = found.lints
    unrolls = [e.params["unroll"] for e in _scans(lint.edited().jaxpr)]
    assert sorted(unrolls) == [1, LAYERS, LAYERS]
    assert len(found.graph) == fl.trace(as_function(lint.edited()), S((), bool), W, X).node_count


def _scans(jaxpr):
    for eqn in jaxpr.eqns:
        yield from (eqn for _ in range(eqn.primitive.name == "scan"))
        for _, _, child in child_jaxprs(eqn):
            yield from _scans(split_closed(child)[0])


def test_a_lint_is_shown_apart_from_sites():
    found = fl.find(jax.value_and_grad(loss), W, X, passes="lerp", device="cpu")
    (lint,) = found.lints
    plain = fl.find(jax.value_and_grad(functools.partial(loss, unroll=LAYERS)), W, X, passes="lerp", device="cpu")
    assert (len(found.candidates), len(found.rejections), found.counts()) == (
        len(plain.candidates),
        len(plain.rejections),
        plain.counts(),
    )
    assert repr(found) == repr(plain).replace(">", ", 1 lint>")
    for text in (str(found), found.report()):
        assert "lints (not measured; fusionlab.advise tries them):" in text
        assert f"    edit: {lint.edit}" in text
    assert found[lint.id] is lint
    assert lint.sentence in found.explain(lint.id)
    assert lint.sentence in found.explain(min(lint.node_ids))
    assert [row["id"] for row in found.to_dict()["lints"]] == [lint.id]
    assert isinstance(found.lints, Records)
    with pytest.raises(fl.errors.UnknownNameError):
        found.select(lint.id)  # nothing is fused for it


@pytest.mark.dear
@pytest.mark.parametrize(
    ("form", "rules"), [("scan", ["stacked_scan"]), ("checkpoint", ["recomputed_products"]), ("unrolled", [])]
)
def test_a_language_model_as_users_write_it(form, rules):
    from benchmarks.programs.language_steps import PLAIN, Llama

    case = Llama(form)
    args = jax.eval_shape(case.parameters), S((case.batch, case.length + 1), "int32")
    found = lints(jax.value_and_grad(case.loss(PLAIN)), *args, device="h100")
    assert [x.rule for x in found] == rules


@pytest.mark.dear
def test_layers_of_flax_in_a_scan():
    nn = pytest.importorskip("flax.linen")

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            h = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
            return x + nn.Dense(WIDTH)(h), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            scanned = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
            return scanned(name="layers")(x, None)[0]

    model = Model()
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    (lint,) = lints(jax.grad(lambda p, x: jnp.sum(model.apply(p, x) ** 2)), params, X)
    assert lint.edit.startswith(f"unroll={LAYERS} ")
    assert lint.scope == "Model"
    assert lints(model.apply, params, X) == ()


@pytest.mark.dear
def test_a_lint_is_a_row_of_the_frame():
    pytest.importorskip("pandas")
    frame = fl.find(jax.grad(loss), W, X).to_dataframe()
    (row,) = frame[frame.state == "lint"].to_dict("records")
    assert row["id"] == "stacked_scan@#1"
    assert row["edit"].startswith("unroll=")
    assert row["source"].startswith("test_stacked")
