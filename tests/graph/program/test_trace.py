"""Function -> raw Graph: what is kept, what is flattened, what is dropped, and where every node says it comes from."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab.errors import ArgumentError, TraceError
from fusionlab.graph.program import scopes
from fusionlab.graph.program.ir import Value
from fusionlab.graph.program.scopes import Source, source_of, traceback_of
from fusionlab.graph.program.trace import trace

X = jnp.linspace(-1.0, 1.0, 15).reshape(3, 5)
W = jnp.linspace(-0.5, 0.7, 35).reshape(5, 7)


def primitives(graph):
    return [n.primitive for n in graph.nodes()]


def line_of(marker):
    """The 1-based line of this file that carries the comment `marker`."""
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, text in enumerate(lines, 1) if text.endswith(f"# {marker}"))


# -- flattening and regions -------------------------------------------------------------------------------------------


def test_jit_calls_are_flattened_at_every_depth():
    inner = jax.jit(lambda x: jnp.tanh(x) * 2.0)
    graph = trace(jax.jit(lambda x: inner(x) + inner(x + 1.0)), X)
    assert primitives(graph) == ["tanh", "mul", "add", "tanh", "mul", "add"]
    assert [b.path for b in graph.blocks()] == [""]


def test_a_shared_jaxpr_gets_its_own_values_at_every_call_site():
    inner = jax.jit(lambda x: jnp.sin(x) * x)
    graph = trace(lambda x, y: (inner(x), inner(y)), X, X)
    assert primitives(graph) == ["sin", "mul", "sin", "mul"]
    ids = [v.id for n in graph.nodes() for v in n.outputs]
    assert len(set(ids)) == 4
    sines = [n.inputs[0].id for n in graph.nodes() if n.primitive == "sin"]
    assert sines == [v.id for v in graph.top.inputs]
    assert [a.id for a in graph.top.outputs] == [ids[1], ids[3]]


def test_a_jit_that_carries_donation_stays_a_node():
    inner = jax.jit(lambda x: jnp.sin(x) + 1.0, donate_argnums=0)
    graph = trace(lambda x: inner(x) * 2.0, X)
    assert [n.primitive for n in graph.top.nodes] == ["jit", "mul"]
    assert [n.primitive for n in graph.top.nodes[0].blocks[0].nodes] == ["sin", "add"]


@jax.custom_jvp
def own_jvp(x):
    return jnp.sin(x)


own_jvp.defjvp(lambda primals, tangents: (own_jvp(*primals), tangents[0]))


@jax.custom_vjp
def own_vjp(x):
    return jnp.cos(x)


own_vjp.defvjp(lambda x: (own_vjp(x), None), lambda _, ct: (ct,))

REGIONS = {
    "scan": (lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)[0], "scan", ["jaxpr"]),
    "while": (
        lambda x: jax.lax.while_loop(lambda c: c.sum() < 3.0, jnp.exp, x),
        "while",
        ["cond_jaxpr", "body_jaxpr"],
    ),
    "cond": (
        lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
        "cond",
        ["branches[0]", "branches[1]"],
    ),
    "remat": (jax.checkpoint(lambda x: jnp.sin(jnp.cos(x))), None, ["jaxpr"]),
    "custom_jvp": (own_jvp, "custom_jvp_call", ["call_jaxpr"]),
    "custom_vjp": (own_vjp, "custom_vjp_call", ["call_jaxpr"]),
}


@pytest.mark.parametrize("name", REGIONS)
def test_a_region_stays_a_node_that_owns_its_body(name):
    fn, primitive, labels = REGIONS[name]
    graph = trace(fn, X)
    owner = next(n for n in graph.top.nodes if n.blocks)
    assert primitive is None or owner.primitive == primitive
    assert [b.label for b in owner.blocks] == labels
    assert [b.path for b in owner.blocks] == [f"n{owner.id}.{label}" for label in labels]
    assert all(b.nodes for b in owner.blocks)


def test_blocks_inside_blocks_say_where_they_are():
    def body(c, _):
        return jax.lax.cond(c.sum() > 0, jnp.sin, jnp.cos, c), None

    graph = trace(lambda x: jax.lax.scan(body, x, None, length=2)[0], X)
    scan = graph.top.nodes[0]
    cond = next(n for n in scan.blocks[0].nodes if n.primitive == "cond")
    assert [b.path for b in graph.blocks()][1:] == [
        f"n{scan.id}.jaxpr",
        f"n{scan.id}.jaxpr.n{cond.id}.branches[0]",
        f"n{scan.id}.jaxpr.n{cond.id}.branches[1]",
    ]
    assert graph.block_of[cond.id].path == f"n{scan.id}.jaxpr"


def test_ids_are_unique_and_nodes_are_numbered_in_program_order():
    graph = trace(lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c) + 1.0, c), x, None, length=2)[0] * 2.0, X)
    ids = [n.id for n in graph.nodes()]
    assert sorted(ids) == list(range(len(ids)))
    values = [v.id for b in graph.blocks() for v in (*b.inputs, *(o for n in b.nodes for o in n.outputs))]
    assert len(values) == len(set(values))


def test_equations_nobody_reads_are_dropped():
    def unused(x):
        jnp.exp(x) @ W
        return jnp.sin(x)

    assert primitives(trace(unused, X)) == ["sin"]


def test_an_unread_equation_with_an_effect_is_kept():
    def noisy(x):
        jax.debug.callback(lambda v: None, x)
        return jnp.sin(x)

    found = primitives(trace(noisy, X))
    assert found[-1] == "sin"
    assert len(found) == 2


def test_a_captured_array_is_one_constant_with_its_values():
    graph = trace(lambda x: (x @ W) + jnp.sum(x @ W), X)
    (value, array), *others = graph.top.consts
    assert not others
    assert value.shape == (5, 7)
    np.testing.assert_array_equal(array, W)


def test_the_names_of_inputs_are_their_paths_in_the_arguments():
    graph = trace(lambda params, x, *, scale: params["w"] * x + scale["s"], {"w": X}, X, scale={"s": X})
    assert graph.in_names == ("params['w']", "x", "scale['s']")


def test_shapes_alone_trace_to_the_same_program_as_arrays():
    def fn(x, w):
        return jax.nn.relu(x @ w)

    spec = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (X, W)]
    assert str(trace(fn, *spec)) == str(trace(fn, X, W))


# -- static arguments -------------------------------------------------------------------------------------------------


def power(x, n, *, kind="sum"):
    y = x**n
    return jnp.sum(y) if kind == "sum" else y


@pytest.mark.parametrize(
    ("args", "kwargs", "static"),
    [
        ((X, 3), {}, {"static_argnums": 1}),
        ((X, 3), {}, {"static_argnums": -1}),
        ((X, 3), {}, {"static_argnums": (1,)}),
        ((X, 3), {}, {"static_argnames": "n"}),
        ((X,), {"n": 3}, {"static_argnames": ["n"]}),
        ((X,), {"n": 3}, {"static_argnums": (), "static_argnames": "n"}),
    ],
)
def test_static_arguments_are_python_values_however_they_are_named(args, kwargs, static):
    graph = trace(power, *args, **kwargs, **static)
    assert [n.params.get("y") for n in graph.nodes() if n.primitive == "integer_pow"] == [3]
    assert len(graph.top.inputs) == 1


def test_a_static_keyword_picks_the_python_branch():
    assert "reduce_sum" not in primitives(trace(power, X, 2, kind="raw", static_argnames=("n", "kind")))
    assert "reduce_sum" in primitives(trace(power, X, 2, kind="sum", static_argnames=("n", "kind")))


def test_a_static_index_beyond_the_arguments_is_refused_by_name():
    with pytest.raises(ArgumentError, match=r"static_argnums: got 5, needed an index into the 2"):
        trace(power, X, 3, static_argnums=5)


# -- source lines and scopes ------------------------------------------------------------------------------------------


def test_a_node_names_the_users_line_function_and_file():
    def model(x):
        h = jnp.sin(x)
        return jnp.exp(h)  # the exponential

    (node,) = [n for n in trace(model, X).nodes() if n.primitive == "exp"]
    assert node.source is not None
    assert (node.source.file, node.source.line) == (__file__, line_of("the exponential"))
    assert node.source.function.endswith("model")
    assert node.source.text.startswith("return jnp.exp(h)")
    assert node.source.short == f"test_trace.py:{line_of('the exponential')}"


class Traceback:
    """What JAX keeps of the stack, cut by hand."""

    def __init__(self, frames):
        self.frames = frames


def test_library_code_inside_a_region_names_the_users_line_around_it(tmp_path, monkeypatch):
    """As where a library keeps the traced body of a loop: its frames then end in the library."""
    (tmp_path / "a_library.py").write_text(
        "import jax.numpy as jnp\n\n\ndef step(c, _):\n    return jnp.sin(c), None\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(scopes, "_LIB_DIRS", (f"{tmp_path}/",))
    a_library = importlib.import_module("a_library")
    (sine,) = [n for n in trace(lambda x: a_library.step(x, None)[0], X).nodes() if n.primitive == "sin"]
    (cosine,) = [n for n in trace(lambda x: jnp.cos(x), X).nodes() if n.primitive == "cos"]
    kept = Traceback([f for f in traceback_of(sine.eqn).frames if "a_library" in f.file_name])
    inner = SimpleNamespace(primitive=sine.eqn.primitive, source_info=SimpleNamespace(traceback=kept))
    assert source_of(inner).short == "a_library.py:5"
    assert source_of(inner, (cosine.eqn,)) == cosine.source


def test_a_cell_of_a_notebook_is_called_by_its_number(monkeypatch):
    kernel = "/tmp/ipykernel_71/784353775.py"
    assert Source(kernel, 2, "model").short == "<cell>:2"
    assert Source("<ipython-input-3-d0a9>", 2, "model").short == "In[3]:2"
    known = SimpleNamespace(format_code_name=lambda name: ("Cell", "In[7]") if name == kernel else None)
    shell = SimpleNamespace(get_ipython=lambda: SimpleNamespace(compile=known))
    monkeypatch.setitem(sys.modules, "IPython", shell)
    assert Source(kernel, 2, "model").short == "In[7]:2"
    assert Source("/tmp/ipykernel_71/9.py", 2, "model").short == "<cell>:2"
    assert Source("/home/me/model.py", 2, "model").short == "model.py:2"


def test_code_typed_at_a_prompt_is_the_users():
    code = "import jax.numpy as jnp\ndef model(x):\n    return jnp.sin(x)\n"
    for name, found in (("<ipython-input-3-d0a9>", "In[3]:3"), ("<stdin>", "<stdin>:3"), ("<string>", None)):
        names: dict = {}
        exec(compile(code, name, "exec"), names)
        (sine,) = [n for n in trace(names["model"], X).nodes() if n.primitive == "sin"]
        assert (sine.source.short if sine.source and sine.source.file.startswith("<") else None) == found


def test_a_function_jax_jits_itself_names_each_of_its_callers():
    """jnp.where and jnp.tril are traced once and shared: their own frames name only the first caller."""

    def model(x, y):
        a = jnp.where(x > 0, x, 0.0)  # first where
        b = jnp.where(y > 0, y, 0.0)  # second where
        c = jnp.tril(a)  # first tril
        return b + jnp.tril(c * 2.0)  # second tril

    square = jnp.ones((4, 4))
    nodes = list(trace(model, square, square).nodes())
    lines = [n.source.line for n in nodes if n.primitive == "select_n"]
    assert lines == [line_of(f"{k} {f}") for k, f in (("first", "where"), ("second", "where"))] + [
        line_of("first tril"),
        line_of("second tril"),
    ]


def test_a_users_own_jitted_helper_names_its_own_lines():
    @jax.jit
    def helper(x):
        return jnp.tanh(x)  # inside the helper

    (node,) = [n for n in trace(lambda x: helper(x), X).nodes() if n.primitive == "tanh"]
    assert node.source.line == line_of("inside the helper")


def test_the_scope_is_the_module_path_without_transformation_names():
    @jax.checkpoint
    def layer(x):
        with jax.named_scope("mlp"):
            return jnp.tanh(x)

    def model(x):
        with jax.named_scope("encoder"), jax.named_scope("layer_3"):
            return jax.vmap(layer)(x).sum()

    scopes = {n.scope for n in trace(jax.grad(model), X).nodes() if n.primitive == "tanh"}
    assert scopes == {"encoder/layer_3/mlp"}


def test_a_scope_around_a_jitted_function_or_a_scan_covers_what_is_inside():
    inner = jax.jit(lambda x: jnp.exp(x))

    def model(x):
        with jax.named_scope("outer"):
            x = inner(x)
            return jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=2)[0]

    scopes = {n.primitive: n.scope for n in trace(model, X).nodes()}
    assert scopes["exp"] == scopes["sin"] == "outer"


def test_without_a_scope_the_scope_is_empty():
    assert {n.scope for n in trace(lambda x: jnp.einsum("ij,jk->ik", x, W), X).nodes()} == {""}


# -- errors -----------------------------------------------------------------------------------------------------------


def test_a_function_that_does_not_trace_gives_one_error_with_the_cause():
    def bad(x):
        return x @ x

    with pytest.raises(TraceError, match=r"bad does not trace: TypeError.*jax\.jit\(bad\)") as caught:
        trace(bad, X)
    assert isinstance(caught.value.__cause__, TypeError)
    assert len(str(caught.value).splitlines()) == 1


def test_a_call_without_its_arguments_or_with_what_is_no_array_is_told_what_to_pass():
    def two(x, y):
        return x @ y

    class Tensor:
        """Of another library."""

        shape, dtype = W.shape, "other.float32"

    for args, needed in (((X,), "after two, the arguments of an ordinary call"), ((X, Tensor()), "jax.numpy.asarray")):
        with pytest.raises(TraceError, match=f"two does not trace: TypeError: .* Needed: .*{needed}"):
            trace(two, *args)


def test_a_python_branch_on_a_value_is_a_trace_error_with_jaxs_hint_and_the_users_line():
    def branch(x):
        return x if x.sum() > 0 else -x  # the branch

    with pytest.raises(TraceError, match="TracerBoolConversionError") as caught:
        trace(branch, X)
    text = str(caught.value)
    assert "because it depends on the value of the argument x." in text
    assert f"(raised from test_trace.py:{line_of('the branch')}: return x if x.sum() > 0" in text
    assert "static_argnums or static_argnames" in text
    assert "http" not in text
    assert str(Path(__file__).parent) not in text


def test_a_forgotten_static_argument_is_a_trace_error_that_says_how_to_name_it():
    with pytest.raises(TraceError, match=r"name Python-valued arguments in static_argnums or static_argnames") as e:
        trace(lambda x, times: x + sum(range(times)), X, 3)
    assert " at 0x" not in str(e.value)


def test_a_long_error_is_cut():
    def verbose(x):
        raise ValueError("word " * 1000)

    with pytest.raises(TraceError, match=r"ValueError: (word )+\.\.\. \(raised from test_trace.py:") as caught:
        trace(verbose, X)
    assert len(str(caught.value)) < 1000


def test_what_is_no_function_is_refused():
    with pytest.raises(ArgumentError, match="got int, needed a function"):
        trace(3, X)


def test_partial_and_callable_objects_trace():
    class Model:
        def __call__(self, x):
            return jnp.sin(x)

    assert primitives(trace(Model(), X)) == ["sin"]
    assert trace(Model(), X).name == "Model"
    assert primitives(trace(partial(jnp.multiply, 2.0), X)) == ["mul"]


def test_users_and_producers_point_at_each_other():
    block = trace(lambda x: jnp.sin(x) * jnp.sin(x) + x, X).top
    for node in block.nodes:
        for value in node.outputs:
            assert block.producer[value.id] is node
        for atom in node.inputs:
            if isinstance(atom, Value):
                assert node in block.users[atom.id]
    assert block.returned == {block.nodes[-1].outputs[0].id}
