"""The text form: written to be read, the same on every trace."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fusionlab.graph.program.text import graph_text, node_text
from fusionlab.graph.program.trace import trace


def model(params, x):
    with jax.named_scope("mlp"):
        h = jax.nn.relu(x @ params["w"] + params["b"])
    y, _ = jax.lax.scan(lambda c, _: (jnp.sin(c) * 0.5, None), h, None, length=3)
    return jnp.einsum("bth,bsh->bts", y, y).astype(jnp.bfloat16)


ARGS = (
    {"w": jax.ShapeDtypeStruct((5, 7), jnp.float32), "b": jax.ShapeDtypeStruct((7,), jnp.float32)},
    jax.ShapeDtypeStruct((2, 3, 5), jnp.float32),
)

GOLDEN = """\
graph model(%0:f32[7] params['b'], %1:f32[5,7] params['w'], %2:f32[2,3,5] x)
  %3:f32[2,3,7] = dot_general %2 %1 [contract 2x0]
  %4:f32[1,1,7] = broadcast_in_dim %0 [broadcast_dimensions=(2), shape=(1,1,7)]
  %5:f32[2,3,7] = add %3 %4
  %6:f32[2,3,7] = custom_jvp_call %5
    call_jaxpr(%10:f32[2,3,7])
      %11:f32[2,3,7] = max %10 0
      return %11
  %7:f32[2,3,7] = scan %6 [length=3, reverse=False, unroll=1]
    jaxpr(%12:f32[2,3,7])
      %13:f32[2,3,7] = sin %12
      %14:f32[2,3,7] = mul %13 0.5
      return %14
  %8:f32[2,3,3] = dot_general %7 %7 [contract 2x2, batch 0x0]
  %9:bf16[2,3,3] = convert_element_type %8 [new_dtype=bf16]
  return %9"""


def test_a_small_program_reads_as_written():
    assert graph_text(trace(model, *ARGS), sources=False) == GOLDEN


def test_str_of_a_graph_adds_source_lines_and_scopes():
    first = str(trace(model, *ARGS)).splitlines()[1]
    line = model.__code__.co_firstlineno + 2
    assert first == f"  %3:f32[2,3,7] = dot_general %2 %1 [contract 2x0]  # test_text.py:{line} mlp"


def test_the_same_program_gives_the_same_text_on_every_trace():
    texts = {str(trace(model, *ARGS)) for _ in range(3)}
    jax.clear_caches()
    texts.add(str(trace(model, *ARGS)))
    assert len(texts) == 1


def test_two_different_programs_have_different_texts():
    def half(x):
        return jnp.sin(x) * 0.5

    def third(x):
        return jnp.sin(x) * 0.3

    x = ARGS[1]
    assert graph_text(trace(half, x)).splitlines()[1:] != graph_text(trace(third, x)).splitlines()[1:]


def test_no_text_holds_an_address():
    def everything(x):
        x = jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)
        x = jax.checkpoint(jnp.tanh, policy=jax.checkpoint_policies.dots_saveable)(x)
        key = jax.random.key(0)
        return jnp.where(x > 0, jax.random.normal(key, x.shape), jnp.sort(x)[..., ::-1]).at[0].add(1.0)

    assert " at 0x" not in str(trace(jax.grad(lambda x: everything(x).sum()), ARGS[1]))


def test_a_constant_is_named_and_a_prng_key_has_its_type():
    table = jnp.arange(6.0)
    text = graph_text(trace(lambda k, x: jax.random.normal(k, (6,)) + table * x, jax.random.key(1), 2.0), sources=False)
    assert ":f32[6] = const" in text
    assert ":key<fry>[] k" in text


def test_one_node_prints_its_parameters_in_a_stable_order():
    graph = trace(lambda x: jax.lax.argmax(x, 1, jnp.int32), ARGS[1])
    (node,) = graph.nodes()
    assert node_text(node, sources=False) == "%1:i32[2,5] = argmax %0 [axes=(1), index_dtype=i32]"
