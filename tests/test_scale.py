"""The search is linear in the program: a 24-layer train step, and one four times as long."""

from __future__ import annotations

import collections
import dataclasses
import gc
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.models import transformer
from fusionlab.viz.dot import dot_of_view
from fusionlab.viz.pictures import Pictures
from fusionlab.viz.render import to_svg
from fusionlab.viz.widget import Explorer

# Bars, in units of what tracing the 24-layer train step takes on the same machine: how fast that is says nothing of the search.
MATCH_BAR = 3.0  # of canonicalising and matching 24 layers
SEARCH_BAR = 4.5  # of the whole search, backward passes included
OPEN_BAR, FOLD_BAR, TOGGLE_BAR = 2.5, 0.4, 1.2  # of 96 layers' first picture, of the next fold, of a site switched
SCAN_BAR = {False: 4.0, True: 6.0}  # of a scan over layers and of its gradient, in units of what tracing that takes


def train_step(layers):
    """The unrolled train step's Graph, traced from shapes."""
    params, x = jax.eval_shape(
        lambda: (
            transformer.init(jax.random.key(0), layers, embed=32),
            transformer.inputs(jax.random.key(1), 2, 16, 32),
        )
    )
    adam = jax.eval_shape(transformer.init_adam, params)
    return fl.trace(partial(transformer.train_step, heads=4), params, adam, x, x)


def scanned(layers, grad):
    """The Graph of a loss over scanned layers, or of its gradient."""
    params, x = jax.eval_shape(
        lambda: (
            jax.tree.map(lambda *a: jnp.stack(a), *transformer.init(jax.random.key(0), layers, embed=32)),
            transformer.inputs(jax.random.key(1), 2, 16, 32),
        )
    )

    def loss(params, x, y):
        out, _ = jax.lax.scan(lambda h, p: (transformer.block(p, h, heads=4), None), x, params)
        return jnp.mean((out - y) ** 2)

    return fl.trace(jax.grad(loss) if grad else loss, params, x, x)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """(what `call` gives, its processor seconds): unlike wall time, hardly moved by what else the machine runs.

    What earlier tests left behind is kept from the garbage collector, which would walk all of it on this one's account.
    """
    gc.collect()
    gc.freeze()
    try:
        started = time.process_time()
        return call(), time.process_time() - started
    finally:
        gc.unfreeze()


def search(graph):
    """(findings, processor seconds of the whole search)."""
    return timed(lambda: fl.find(graph))


@pytest.fixture(scope="module")
def unit():
    """Least processor seconds of tracing the 24-layer train step."""
    return min(timed(lambda: train_step(24))[1] for _ in range(3))


@pytest.fixture(scope="module")
def measured():
    """Layers -> (findings, least processor seconds, least wall seconds of canonicalising and matching), taken in turns."""
    graphs = {n: train_step(n) for n in (24, 96)}
    runs = {n: [] for n in graphs}
    for _ in range(2):
        for n, graph in graphs.items():
            runs[n].append(search(graph))
    result = {}
    for n, found in runs.items():
        wall = min(sum(s for phase, s in f.seconds.items() if phase != "pairs") for f, _ in found)
        result[n] = found[0][0], min(seconds for _, seconds in found), wall
        print(f"{n} layers: {graphs[n].node_count} nodes, {result[n][1]:.2f} s of processor time, {wall:.2f} s")
    return result


def test_the_24_layer_train_step_has_about_14000_equations_and_every_forward_site_is_found(measured):
    found, *_ = measured[24]
    assert 13_000 < found.graph.node_count < 15_500
    # Differentiated already, the backward pass reads what gelu, softmax and the norms would keep inside: each is fused with it.
    assert not found.rejections
    counts = {
        "gemm_epilogue": 24 * 6,
        "dot_product_attention": 24,
        "layer_norm": 24 * 2,
        "lerp": 0,
        "matmul_schedule": 0,
    }
    assert found.counts() == counts | {f"{name}_grad": n for name, n in counts.items()}


def test_canonicalising_and_matching_24_layers_stays_within_the_bar(measured, unit):
    _, _, seconds = measured[24]
    assert seconds < MATCH_BAR * unit, f"{seconds:.2f} s, {unit:.2f} s to trace"


def test_the_whole_search_of_24_layers_stays_within_the_bar(measured, unit):
    seconds = measured[24][1]
    assert seconds < SEARCH_BAR * unit, f"{seconds:.2f} s, {unit:.2f} s to trace"


def test_what_the_search_holds_is_less_than_twice_what_the_trace_holds():
    """Peak of the memory that Python allocates: of the search beyond the trace, against that of the trace."""
    tracemalloc.start()
    try:
        graph = train_step(24)
        traced = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        held = tracemalloc.get_traced_memory()[0]
        found = fl.find(graph)
        searched = tracemalloc.get_traced_memory()[1] - held
    finally:
        tracemalloc.stop()
    print(f"24 layers: {traced / 1e6:.0f} MB to trace, {searched / 1e6:.0f} MB more to search")
    assert found.counts()["gemm_epilogue_grad"] == 144
    assert searched < 2 * traced


def test_four_times_the_layers_take_less_than_four_and_a_half_times_as_long(measured):
    small, large = measured[24][1], measured[96][1]
    assert large < 4.5 * small, f"{large:.2f} s for 96 layers, {small:.2f} s for 24: {large / small:.1f} times"


def test_the_picture_of_96_layers_opens_and_unfolds_at_once(measured, unit):
    """Processor seconds of this process; the layout, which `dot` does in its own, is that of a page whatever the program's size."""
    found, *_ = measured[96]
    pictures = Pictures(found.graph, found)
    view, first = timed(lambda: pictures.view(enabled=None))
    assert len(view["boxes"]) <= 300
    asked: list[str] = []
    slowest = 0.0
    for _ in range(6):
        asked.append(max((b for b in view["boxes"] if b["closed"]), key=lambda b: b["nodes"])["id"])
        (view, svg), seconds = timed(lambda: drawn(pictures, asked))
        slowest = max(slowest, seconds)
        assert asked[-1] in {g["id"] for g in view["groups"]}
        assert len(view["boxes"]) <= 400
        assert svg.count("<g ") > len(view["boxes"])
    ids = [c.id for c in found.candidates]
    _, toggled = timed(lambda: pictures.view(enabled=ids[1:]))
    print(f"96 layers: {first:.2f} s to open, {slowest:.2f} s at most to unfold, {toggled:.2f} s to switch a site")
    assert first < OPEN_BAR * unit
    assert slowest < FOLD_BAR * unit
    assert toggled < TOGGLE_BAR * unit


def drawn(pictures, expanded):
    view = pictures.view(enabled=None, expanded=expanded)
    return view, to_svg(dot_of_view(view))


def test_unfolding_a_group_does_not_fold_the_program_again(measured):
    found, *_ = measured[96]
    pictures = Pictures(found.graph, found)
    view, first = timed(lambda: pictures.view(enabled=None))
    wanted = next(b["id"] for b in view["boxes"] if b["closed"])
    again = min(timed(lambda: pictures.view(enabled=None, expanded=[wanted]))[1] for _ in range(5))
    print(f"96 layers: {first:.3f} s to open, {again:.3f} s to unfold")
    assert again < 0.25 * first


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "gradient"])
def test_scanned_layers_cost_what_one_layer_costs(grad):
    traced = {n: [timed(lambda n=n: scanned(n, grad)) for _ in range(3)] for n in (24, 96)}
    graphs = {n: runs[0][0] for n, runs in traced.items()}
    unit = min(seconds for _, seconds in traced[96])
    assert graphs[24].node_count == graphs[96].node_count
    runs = {n: [] for n in graphs}
    for _ in range(3):
        for n, graph in graphs.items():
            found, seconds = search(graph)
            assert found.counts()["gemm_epilogue"] == 6
            runs[n].append(seconds)
    least = {n: min(seconds) for n, seconds in runs.items()}
    print(*(f"scan over {n} layers: {s:.3f} s of processor time, certified" for n, s in least.items()), sep="\n")
    assert least[96] < 1.5 * least[24]
    assert least[96] < SCAN_BAR[grad] * unit, f"{least[96]:.2f} s, {unit:.2f} s to trace"


def test_structures_are_linear_in_the_program_too():
    def stack(ps, x):
        for p in ps:
            x = transformer.block(p, x, heads=4)
        return x

    graphs = {}
    for n in (24, 96):
        params, x = jax.eval_shape(
            lambda n=n: (
                transformer.init(jax.random.key(0), n, embed=32),
                transformer.inputs(jax.random.key(1), 2, 16, 32),
            )
        )
        graphs[n] = fl.trace(stack, params, x)
    searched = {n: fl.find(graph) for n, graph in graphs.items()}
    runs = {n: [] for n in graphs}
    for _ in range(5):  # in turns, so that a busy machine is busy for both
        for n, found in searched.items():
            fresh = dataclasses.replace(found)
            runs[n].append(timed(lambda fresh=fresh: fresh.structures))
    for n, found in runs.items():
        count = collections.Counter(s.kind for s in found[0][0])
        assert count == {"transformer_layer": n, "repeated_layers": 1, "qkv_siblings": n, "residual_norm": 2 * n - 1}
    seconds = {n: min(s for _, s in found) for n, found in runs.items()}
    print(f"structures of 24 and 96 layers: {seconds[24]:.2f} s and {seconds[96]:.2f} s")
    assert seconds[96] < 4.5 * seconds[24]


def test_a_96_layer_train_step_opens_in_the_explorer_within_the_bar_and_counts_no_costs_yet(measured, unit):
    found = dataclasses.replace(measured[96][0])
    lab, seconds = timed(
        lambda: Explorer(found.graph, found, after=lambda setting, f: f.apply(sorted(setting.enabled)))
    )
    print(f"opened in {seconds:.2f} s of processor time")
    assert seconds < OPEN_BAR * unit
    assert "_costs" not in vars(found)
    assert len(lab.session.view()["boxes"]) < 300
    (group,) = [b["id"] for b in lab.session.view()["boxes"] if b["closed"]][:1]
    _, seconds = timed(lambda: (lab.session.fold(group), lab.refresh()))
    print(f"opened a group in {seconds:.2f} s")
    assert seconds < FOLD_BAR * unit
