"""Layers of one token a text whose heads share keys by groups, without an axis of positions: declined with the edit, never raised."""

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl

LAYERS = [f"multi_transformer_{kind}{fused}" for kind in ("encoder", "decoder") for fused in ("", "_fuse_qkv")]
D, LENGTH = 16, 12


def normal(*shape, n=0):
    return jax.random.normal(jax.random.fold_in(jax.random.key(0), n), shape)


def rms(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale


def layer(
    texts=8, keys=2, group=2, unit=True, packed=False, heads_first=False, append=False, group_first=False, repeat=False
):
    """(function, arguments): a decode step of a layer with grouped heads, in one of the spellings that there are."""
    width = keys * group * D
    shapes = {"n1": (width,), "n2": (width,), "o": (width, width), "g": (width, 48), "u": (width, 48), "f": (48, width)}
    shapes["q"] = (width, width + 2 * keys * D)
    p = {k: normal(*s, n=i) * 0.2 for i, (k, s) in enumerate(shapes.items())}
    axis = 2 if heads_first else 1
    kv, own = "bksd" if heads_first else "bskd", "bgkd" if group_first else "bkgd"
    rows = (texts, 1, width) if unit else (texts, width)

    def projected(h, p):
        cut = [width, width + keys * D]
        if packed:
            return jnp.split(h @ p["q"], cut, axis=-1)
        return (h @ w for w in jnp.split(p["q"], cut, axis=-1))

    def attend(q, ck, cv, seen):
        if repeat:
            ck, cv = (jnp.repeat(c, group, 3 - axis) for c in (ck, cv))
            s = jnp.einsum(f"bkd,{kv}->bks", q.reshape(texts, keys * group, D), ck) * D**-0.5
            return jnp.einsum(f"bks,{kv}->bkd", jax.nn.softmax(jnp.where(seen, s, -1e30), -1), cv)
        split = (group, keys) if group_first else (keys, group)
        s = jnp.einsum(f"{own},{kv}->bkgs", q.reshape(texts, *split, D), ck) * D**-0.5
        return jnp.einsum(f"bkgs,{kv}->{own}", jax.nn.softmax(jnp.where(seen, s, -1e30), -1), cv)

    def step(x, p, ck, cv, at):
        h = rms(x, p["n1"])
        q, k, v = projected(h, p)
        k, v = (a.reshape(texts, 1, keys, D) for a in (k, v))
        k, v = (a.swapaxes(1, 2) for a in (k, v)) if heads_first else (k, v)
        if append:
            ck, cv = (jnp.concatenate([c, a], axis) for c, a in ((ck, k), (cv, v)))
        else:
            ck, cv = (jax.lax.dynamic_update_slice_in_dim(c, a, at, axis) for c, a in ((ck, k), (cv, v)))
        seen = jnp.arange(ck.shape[axis]) <= at
        y = x + attend(q, ck, cv, seen).reshape(rows) @ p["o"]
        h = rms(y, p["n2"])
        return y + (jax.nn.silu(h @ p["g"]) * (h @ p["u"])) @ p["f"], ck, cv

    cache = (texts, keys, LENGTH, D) if heads_first else (texts, LENGTH, keys, D)
    return step, (normal(*rows, n=20), p, normal(*cache, n=21), normal(*cache, n=22), jnp.int32(5))


SPELLINGS = {
    "as reported": {},
    "no axis of 1": {"unit": False},
    "one projection": {"packed": True},
    "heads before positions": {"heads_first": True},
    "appended": {"append": True},
    "appended, heads before positions, one projection": {"append": True, "heads_first": True, "packed": True},
    "groups before heads of keys": {"group_first": True},
    "one head of keys": {"keys": 1, "group": 4},
    "one text": {"texts": 1},
    "as many texts as heads": {"texts": 2},
    "three heads of two groups": {"texts": 3, "group": 3},
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_grouped_heads_without_an_axis_of_positions_are_declined_with_the_edit(name):
    fn, args = layer(**SPELLINGS[name])
    found = fl.find(fn, *args, passes=LAYERS)
    (told,) = found.rejections
    group = SPELLINGS[name].get("group", 2)
    assert told.code == "axes"
    assert (
        f"the queries of one position keep the {group} heads that share a head of keys on a separate axis"
        in told.sentence
    )
    assert told.pass_name.endswith("_fuse_qkv") == SPELLINGS[name].get("packed", False)
    assert f"jnp.repeat(k, {group}, axis=...)" in str(told.edit)


def test_the_edit_is_one_that_helps():
    fn, args = layer(repeat=True)
    found = fl.find(fn, *args, passes=LAYERS)
    assert [c.pass_name for c in found.candidates] == ["multi_transformer_decoder"]
    for mine, theirs in zip(fl.fuse(fn, passes=LAYERS)(*args), layer()[0](*args), strict=True):
        assert jnp.abs(mine - theirs).max() < 1e-5


def test_the_pieces_of_such_a_layer_are_fused_all_the_same():
    fn, args = layer()
    assert fl.find(fn, *args).counts()["dot_product_attention"] == 1
    for mine, theirs in zip(fl.fuse(fn)(*args), fn(*args), strict=True):
        assert jnp.abs(mine - theirs).max() < 1e-5
