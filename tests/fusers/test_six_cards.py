"""`find` for cards with and without a table: not measured here, cannot run here and slower here are three codes."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.errors import REJECTIONS
from fusionlab.fusers.engine.outcomes import LEFT_TO_XLA
from fusionlab.kernels.choose import choices
from fusionlab.kernels.choose.choices import Choice, Measured, write

S = jax.ShapeDtypeStruct
CARDS = ("t4", "a100", "l4", "h100", "b200", "rtx4090")
WIDE = 512


def _norm(x, w):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype) * w


def _attended(q, k, v, mask=None):
    scores = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) / 8.0
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores).astype(v.dtype), v)


def block(x, w, scale):
    """A layer as a language model has it, causal."""
    b, t, _ = x.shape
    q, k, v = jnp.split(_norm(x, scale) @ w["qkv"], 3, -1)
    q, k, v = (a.reshape(b, t, 8, 64) for a in (q, k, v))
    x = x + _attended(q, k, v, jnp.tril(jnp.ones((t, t), bool))).reshape(x.shape) @ w["out"]
    return x + jax.nn.gelu(_norm(x, scale) @ w["up"]) @ w["down"]


def wide_attention(q, k, v, mask):
    """In float32, with a mask of all scores: no library takes it."""
    return _attended(q, k, v, mask)


def mixed(x, y, w, m, b):
    """A blend, and a layer with a bias."""
    return jax.nn.relu((x + w * (y - x)) @ m + b)


def _models(dtype="bfloat16"):
    rows = S((4, 1024, WIDE), dtype)
    heads = S((4, 1024, 8, 64), "float32")
    sizes = {"qkv": (WIDE, 3 * WIDE), "out": (WIDE, WIDE), "up": (WIDE, 4 * WIDE), "down": (4 * WIDE, WIDE)}
    weights = {name: S(shape, dtype) for name, shape in sizes.items()}
    return {
        "block": (block, (rows, weights, S((WIDE,), dtype))),
        "wide attention": (wide_attention, (heads, heads, heads, S((4, 8, 1024, 1024), "bool"))),
        "mixed": (mixed, (rows, rows, S((4, 1, WIDE), dtype), S((WIDE, WIDE), dtype), S((WIDE,), dtype))),
    }


def left_in(found):
    """Code -> the sites that are XLA's code, declined or left as they are."""
    codes = {}
    for site in found.candidates:
        codes.setdefault(site.choice.value, []).append(site)
    for site in found.rejections:
        codes.setdefault(site.code, []).append(site)
    return codes


@pytest.fixture
def no_plan(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSIONLAB_PLAN_FILE", str(tmp_path / "plans.json"))
    return tmp_path / "plans.json"


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("model", _models())
def test_slower_is_said_only_where_a_record_of_that_card_exists(no_plan, model, card):
    fn, args = _models()[model]
    found = fl.find(fn, *args, device=card)
    codes = left_in(found)
    if card != "h100":
        assert "slower" not in codes
    sites = (*found.candidates, *found.rejections)
    waits = {site.id for site in sites if site.waits} | {row.value for row in found.routes() if row.waits}
    assert all(site.waits for site in codes.get("unmeasured", []))
    if not waits:
        assert found.waiting is None
        return
    waiting = found.waiting
    assert set(waiting.sites) == waits
    assert 0 <= waiting.saved_s <= waiting.whole_s
    sentence = f"{len(waits)} site{'s wait' if len(waits) > 1 else ' waits'} for fl.tune: "
    assert sentence in str(found)
    assert sentence in found.report()
    assert json.loads(found.to_json())["waiting"]["text"] == str(waiting)


def gated(x, w, v, down):
    return (jax.nn.silu(x @ w) * (x @ v)) @ down


def test_gated_pairs_and_plain_products_wait_and_no_node_counts_twice(no_plan):
    x, w, down = S((4096, WIDE), "bfloat16"), S((WIDE, 4 * WIDE), "bfloat16"), S((4 * WIDE, WIDE), "bfloat16")
    found = fl.find(gated, x, w, w, down, device="a100")
    *_, last = found.routes()
    waiting = found.waiting
    assert waiting.sites == ("gemm_epilogue@#1", "gated_matmul@#1", last.value)
    assert waiting.products == 1
    assert "3 sites wait for fl.tune: at most " in str(waiting)
    assert str(waiting).endswith("; 1 of them is a matrix product, which a library may run faster")
    # silu(x @ w) is a part of the pair: its own product is read by no other kernel, and is saved once.
    traffic = 3 * 2 * 4096 * 4 * WIDE  # bytes between the kernels: one product written and read, the other one read
    assert 0 < waiting.saved_s <= traffic / fl.Device.of("a100").at_most[0]
    (pair,) = found.rejections
    assert (pair.code, pair.waits, pair.pass_name) == ("unmeasured", True, "gated_matmul")
    assert "prefer='concatenated'" in pair.edit
    plain = fl.find(jnp.matmul, x, w, device="a100").waiting
    assert (plain.sites, plain.products, plain.saved_s) == (("%2",), 1, 0.0)
    assert str(plain).startswith("1 site waits for fl.tune: a matrix product, which a library may run faster; ")
    assert fl.find(jnp.matmul, x, w, device="cpu").waiting is None


def test_times_of_what_waits_have_units_that_suit(no_plan):
    from fusionlab.fusers.report.waiting import Waiting

    assert "at most 621 ns of 1.2 ms by the roofline" in str(Waiting(("a",), 6.21e-7, 1.2e-3))
    assert "at most 0.621 ns of 12 µs by the roofline" in str(Waiting(("a",), 6.21e-10, 1.2e-5))


def test_each_of_the_three_codes_has_what_to_do_and_they_differ():
    assert {"device", "unmeasured", "slower"} == LEFT_TO_XLA
    texts = [REJECTIONS[code] for code in ("unmeasured", "device", "slower")]
    assert [text.partition(":")[0] for text in texts] == ["not measured here", "cannot run here", "slower here"]
    assert all(";" in text for text in texts)  # behind it what to do


def test_a_card_without_a_table_has_all_three_where_they_hold(no_plan):
    models = _models()
    fn, args = models["wide attention"]
    (site,) = fl.find(fn, *args, device="a100").rejections
    assert (site.code, site.waits) == ("unmeasured", True)
    assert site.edit.startswith("fusionlab.tune measures it")
    (site,) = fl.find(fn, *args, device="h100").rejections
    assert (site.code, site.waits) == ("slower", False)
    absent = dataclasses.replace(fl.Device.of("a100"), missing=("cupy",))
    fn, args = models["mixed"]
    kinds = {c.pass_name: c.choice.value for c in fl.find(fn, *args, device=absent).candidates}
    assert kinds["lerp"] == "device"
    assert fl.find(fn, *args, device=absent).waiting is None  # nor can anything else run the layer


def test_measured_slower_on_one_card_it_stays_unmeasured_on_another(no_plan):
    fn, args = _models()["mixed"]
    (site,) = (c for c in fl.find(fn, *args, device="l4").candidates if c.pass_name == "lerp")
    assert (site.choice.value, site.waits) == ("unmeasured", True)
    from fusionlab.kernels.op.chooser import all_to_measure
    from fusionlab.verbs.tuning import _calls_of

    with all_to_measure():
        calls = _calls_of(fl.find(fn, *args, device="l4"), True)
    slow = {call.case(): Choice("xla", {"xla": 1.0, "cuda": 2.0}) for call in calls}
    write(no_plan, "sm_89", Measured(slow, {}, "NVIDIA L4", {"jax": "0"}))
    for card, code, waits in (("l4", "slower", False), ("rtx4090", "unmeasured", True), ("a100", "unmeasured", True)):
        (site,) = (c for c in fl.find(fn, *args, device=card).candidates if c.pass_name == "lerp")
        assert (site.choice.value, site.waits) == (code, waits), card


def test_hidden_tables_leave_a_card_as_one_without_a_table(no_plan, monkeypatch):
    fn, args = _models()["block"]
    shown = {c.id: c.choice.value for c in fl.find(fn, *args, device="h100").candidates}
    monkeypatch.setenv(choices.NO_TABLES, "none")
    hidden = fl.find(fn, *args, device="h100")
    assert "slower" not in left_in(hidden)
    assert "unmeasured" in left_in(hidden)
    assert {s for s in shown if "schedule" not in s} <= {c.id for c in hidden.candidates}
    assert len(hidden.waiting.sites) > 0
