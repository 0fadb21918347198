"""The search is linear in the program: a train step, and one of several times as many layers.

Each test has a small program first, then 24 and 96 layers. Some time is spent whatever the program's size: a bar that
this alone could exceed is asserted of 96 layers only.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.models import transformer
from fusionlab.viz.draw.dot import dot_of_view
from fusionlab.viz.draw.render import to_svg
from fusionlab.viz.explorer.widget import Explorer
from fusionlab.viz.html import tabs
from fusionlab.viz.model import pictures as pictures_module
from fusionlab.viz.model.folding import fold
from fusionlab.viz.model.pictures import Pictures

LARGE = {6: 12, 24: 96}  # layers -> those of the program it is compared with
# Bars, in units of what tracing the train step takes on the same machine: how fast that is says nothing of the search.
MATCH_BAR = 3.0  # of canonicalising and matching
SEARCH_BAR = 4.5  # of the whole search, backward passes included
OPEN_BAR, FOLD_BAR, TOGGLE_BAR = 2.5, 0.4, 1.2  # of the large one's first picture, of the next fold, of a site switched
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
    gc.freeze()
    try:
        started = time.process_time()
        return call(), time.process_time() - started
    finally:
        gc.unfreeze()


def search(graph):
    """(findings, processor seconds of the whole search); the findings tell the phases in processor seconds too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusionlab.fusers.find.time", SimpleNamespace(perf_counter=time.process_time))
        return timed(lambda: fl.find(graph))


@pytest.fixture(scope="module", params=LARGE, ids=lambda layers: f"{layers} layers")
def layers(request):
    return request.param


@pytest.fixture(scope="module")
def unit(layers):
    """Least processor seconds of tracing the train step of so many layers."""
    return min(timed(lambda: train_step(layers))[1] for _ in range(3))


@pytest.fixture(scope="module")
def measured(layers):
    """Of so many layers and of the large program, taken in turns: findings, least seconds of search and of matching."""
    graphs = [train_step(n) for n in (layers, LARGE[layers])]
    runs = [[], []]
    for _ in range(2):
        for found, graph in zip(runs, graphs, strict=True):
            found.append(search(graph))
    result = []
    for n, found in zip((layers, LARGE[layers]), runs, strict=True):
        matching = min(sum(s for phase, s in f.seconds.items() if phase != "pairs") for f, _ in found)
        result.append((found[0][0], min(seconds for _, seconds in found), matching))
        nodes = found[0][0].graph.node_count
        print(f"{n} layers: {nodes} nodes, {result[-1][1]:.2f} s of processor time, {matching:.2f} s to match")
    return result


def test_a_train_step_has_some_570_equations_a_layer_and_every_forward_site_is_found(measured, layers):
    for n, (found, *_) in zip((layers, LARGE[layers]), measured, strict=True):
        assert 13_000 / 24 * n < found.graph.node_count < 15_500 / 24 * n
        # Differentiated already, the backward pass reads what gelu, softmax and the norms would keep inside: each is
        # fused with it.
        assert not found.rejections
        counts = {
            "gemm_epilogue": n * 6,
            "dot_product_attention": n,
            "layer_norm": n * 2,
            "lerp": 0,
            "matmul_schedule": 0,
        }
        grads = counts | {"layer_norm": 0}  # left as they are on a CPU
        assert found.counts() == counts | {f"{name}_grad": count for name, count in grads.items()}


@pytest.mark.clock
def test_canonicalising_and_matching_stays_within_the_bar(measured, unit):
    _, _, seconds = measured[0]
    assert seconds < MATCH_BAR * unit, f"{seconds:.2f} s, {unit:.2f} s to trace"


@pytest.mark.clock
def test_the_whole_search_stays_within_the_bar(measured, unit):
    seconds = measured[0][1]
    assert seconds < SEARCH_BAR * unit, f"{seconds:.2f} s, {unit:.2f} s to trace"


@pytest.mark.parametrize("layers", [4, 24], ids=lambda layers: f"{layers} layers")
def test_what_the_search_holds_is_less_than_twice_what_the_trace_holds(layers):
    """Peak of the memory that Python allocates: of the search beyond the trace, against that of the trace."""
    fl.find(train_step(1))  # what the first search of a process loads is not this one's
    tracemalloc.start()
    try:
        graph = train_step(layers)
        traced = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        held = tracemalloc.get_traced_memory()[0]
        found = fl.find(graph)
        searched = tracemalloc.get_traced_memory()[1] - held
    finally:
        tracemalloc.stop()
    print(f"{layers} layers: {traced / 1e6:.0f} MB to trace, {searched / 1e6:.0f} MB more to search")
    assert found.counts()["gemm_epilogue_grad"] == layers * 6
    assert searched < 2 * traced


@pytest.mark.clock
def test_so_many_times_the_layers_take_hardly_more_than_so_many_times_as_long(measured, layers):
    small, large = (seconds for _, seconds, _ in measured)
    most = 1.125 * LARGE[layers] / layers  # four and a half for four times as many
    assert large < most * small, f"{large:.2f} s for {LARGE[layers]} layers, {small:.2f} s for {layers}"


@pytest.mark.clock
def test_the_picture_of_many_layers_opens_and_unfolds_at_once(measured, unit):
    """Processor seconds of this process; the layout, which `dot` does in its own, is that of a page whatever the program's size."""
    found, *_ = measured[1]
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
    print(f"{first:.2f} s to open, {slowest:.2f} s at most to unfold, {toggled:.2f} s to switch a site")
    assert first < OPEN_BAR * unit
    assert slowest < FOLD_BAR * unit
    assert toggled < TOGGLE_BAR * unit


def drawn(pictures, expanded):
    view = pictures.view(enabled=None, expanded=expanded)
    return view, to_svg(dot_of_view(view))


@pytest.mark.clock
def test_unfolding_a_group_does_not_fold_the_program_again(measured, layers, monkeypatch):
    found, *_ = measured[1]
    folds = []
    monkeypatch.setattr(pictures_module, "fold", lambda *a, **k: folds.append(1) or fold(*a, **k))
    pictures = Pictures(found.graph, found)
    view, first = timed(lambda: pictures.view(enabled=None))
    wanted = next(b["id"] for b in view["boxes"] if b["closed"])
    again = min(timed(lambda: pictures.view(enabled=None, expanded=[wanted]))[1] for _ in range(5))
    print(f"{LARGE[layers]} layers: {first:.3f} s to open, {again:.3f} s to unfold")
    assert len(folds) == 1
    if LARGE[layers] == 96:  # a picture has as many boxes whatever the program's size
        assert again < 0.25 * first


@pytest.mark.clock
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


@pytest.mark.clock
@pytest.mark.parametrize("small", [4, 24], ids=lambda small: f"{small} layers")
def test_structures_are_linear_in_the_program_too(small):
    def stack(ps, x):
        for p in ps:
            x = transformer.block(p, x, heads=4)
        return x

    graphs = {}
    for n in (small, 4 * small):
        params, x = jax.eval_shape(
            lambda n=n: (
                transformer.init(jax.random.key(0), n, embed=32),
                transformer.inputs(jax.random.key(1), 2, 16, 32),
            )
        )
        graphs[n] = fl.trace(stack, params, x)
    searched = {n: fl.find(graph) for n, graph in graphs.items()}
    runs = {n: [] for n in graphs}
    for _ in range(10):  # in turns, so that a busy machine is busy for both
        for n, found in searched.items():
            fresh = dataclasses.replace(found)
            runs[n].append(timed(lambda fresh=fresh: fresh.structures))
    for n, found in runs.items():
        count = collections.Counter(s.kind for s in found[0][0])
        assert count == {"transformer_layer": n, "repeated_layers": 1, "qkv_siblings": n, "residual_norm": 2 * n - 1}
    seconds = {n: min(s for _, s in found) for n, found in runs.items()}
    print(*(f"structures of {n} layers: {s:.3f} s" for n, s in seconds.items()), sep="\n")
    assert seconds[4 * small] < 4.5 * seconds[small]


@pytest.mark.clock
def test_a_long_train_step_opens_in_the_explorer_within_the_bar_and_counts_no_costs_yet(measured, unit, monkeypatch):
    found = dataclasses.replace(measured[1][0])
    long = min(tabs._COUNTED_AT_ONCE, found.graph.node_count - 1)  # so that the small program counts as a long one too
    monkeypatch.setattr(tabs, "_COUNTED_AT_ONCE", long)
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
