"""Values with one number are the same bits in the same trips: programs are run equation by equation, and every value is kept."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.graph.backward.numbering import Numbering
from fusionlab.graph.jax_compat import scan_counts
from fusionlab.graph.program.ir import Literal
from tests.fusers.lints.test_recomputed_products import PROGRAMS, arrays, step_of


class Run:
    """A run of a graph. `kept`: value id -> entries of the scans and trips of the while loops around it, outermost first -> array."""

    def __init__(self, graph, args):
        self.kept = {}
        self.block(graph.top, args, ())

    def block(self, block, given, trip):
        env = dict(zip((v.id for v in block.inputs), given, strict=True)) | {
            v.id: jnp.asarray(c) for v, c in block.consts
        }
        for node in block.nodes:
            results = self.node(node, [_read(env, a) for a in node.inputs], trip)
            env.update(zip((v.id for v in node.outputs), results, strict=True))
        for i, array in env.items():
            self.kept.setdefault(i, {})[trip] = array
        return [_read(env, a) for a in block.outputs]

    def node(self, node, given, trip):
        if node.primitive == "scan":
            return self.scan(node, given, trip)
        if node.primitive == "while":
            return self.loop(node, given, trip)
        if node.primitive == "cond":
            return self.block(node.blocks[int(given[0])], given[1:], trip)
        if len(node.blocks) == 1 and not node.primitive.startswith("scatter"):
            return self.block(node.blocks[0], given, trip)
        results = node.eqn.primitive.bind(*given, **node.params)
        return results if node.eqn.primitive.multiple_results else [results]

    def scan(self, node, given, trip):
        consts, carried = scan_counts(node.params)
        carry, length = given[consts : consts + carried], node.params["length"]
        outs = [None] * length
        for at in reversed(range(length)) if node.params["reverse"] else range(length):
            entries = [xs[at] for xs in given[consts + carried :]]
            results = self.block(node.blocks[0], [*given[:consts], *carry, *entries], (*trip, at))
            carry, outs[at] = results[:carried], results[carried:]
        return [*carry, *(jnp.stack(parts) for parts in zip(*outs, strict=True))]

    def loop(self, node, given, trip):
        cond, body = node.params["cond_nconsts"], node.params["body_nconsts"]
        carry, here = given[cond + body :], (*trip, (node.id, 0))
        while self.block(node.blocks[0], [*given[:cond], *carry], here)[0]:
            carry = self.block(node.blocks[1], [*given[cond : cond + body], *carry], here)
            here = (*trip, (node.id, here[-1][1] + 1))
        return carry


def _read(env, atom):
    return jnp.asarray(atom.val, atom.dtype) if isinstance(atom, Literal) else env[atom.id]


def bits(array):
    array = jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array
    return array.shape, str(array.dtype), np.asarray(array).tobytes()


def assert_sound(fn, *args):
    """How many pairs of values have one number, each pair equal in every trip that both have."""
    graph = fl.trace(fn, *args)
    kept, pairs = Run(graph, jax.tree.leaves(args)).kept, 0
    for values in Numbering(graph).holders.values():
        for a, b in itertools.pairwise(v for v in values if v.id in kept):
            for trip in kept[a.id].keys() & kept[b.id].keys():
                assert bits(kept[a.id][trip]) == bits(kept[b.id][trip]), (a, b, trip)
                pairs += 1
    return pairs


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "train_loop"])
def test_steps_with_checkpoints(name):
    assert assert_sound(step_of(PROGRAMS[name]), *arrays()) > 20


def turns(c, a, added):
    """Two while loops, one in the other, that begin with the same."""
    times = 1 + (a[0] > 0).astype(int)
    return jax.lax.fori_loop(
        0, times, lambda i, v: jax.lax.fori_loop(0, times, lambda j, u: u * 0.5 + added(i, j).astype(float), v), c
    )


def body_of(draw, inner):
    """A scan's body of a carry and an entry, of random operations."""
    steps = [draw.integers(0, 12) for _ in range(draw.integers(1, 5))]

    def one(kind, c, a):
        return [
            lambda: c + a,
            lambda: c * 2.0,
            lambda: jnp.sin(c),
            lambda: jnp.where(a > 0, c, a),
            lambda: inner(c, a) if inner else c - a,
            lambda: c[::-1],
            lambda: jax.lax.cond(a[0] > 0, jnp.cos, jnp.tanh, c),
            lambda: jax.lax.fori_loop(0, 2, lambda i, v: v * 0.5 + a, c),
            lambda: jax.checkpoint(jnp.cos)(c),
            lambda: a,
            lambda: turns(c, a, lambda i, j: i),
            lambda: turns(c, a, lambda i, j: j),
        ][kind]()

    def body(c, a):
        out = a
        for kind in steps:
            c, out = one(kind, c, a), c
        return c, out

    return body


@pytest.mark.dear
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_loops(first):
    assert sum(map(pairs_of_random_loops, range(first, first + 10))) > 200


def pairs_of_random_loops(seed):
    draw = np.random.default_rng(seed)
    inner = body_of(draw, None)
    choices = draw.integers(0, 2, (5, 4))

    def fn(x, y):
        def over_x(c, a):
            return jax.lax.scan(inner, c, x)[0]

        def over_two(c, a):
            return jax.lax.scan(inner, c, jnp.stack([a, c]))[0]

        bodies = [body_of(np.random.default_rng(seed + i), to) for i, to in enumerate((over_x, over_two))]
        found = [x, y]
        for which, start, over, back in choices:
            found.append(jax.lax.scan(bodies[which], (x, y)[start][0], found[-1 - over], reverse=bool(back))[1])
        return found

    x = jnp.asarray(draw.normal(size=(3, 3)), "float32")
    return assert_sound(fn, x, x + 1)
