"""The search is linear in the program: a train step, and one of several times as many layers.

What a step takes is counted in calls of functions, Python's and C's, as the profiler sees them: the same on any machine
and on a busy one. Each test has a small program first, then 24 and 96 layers. Some calls are made whatever the program's
size: a bar that these alone could exceed is asserted of 96 layers only.
"""

from __future__ import annotations

import collections
import cProfile
import dataclasses
import gc
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
from fusionlab.viz.cards.album import Album
from fusionlab.viz.explorer.widget import Explorer
from fusionlab.viz.html import tabs
from tests.asked import counts

LARGE = {3: 6, 24: 96}  # layers -> those of the program it is compared with
# Bars, in units of what tracing the train step takes.
WHOLE_MATCH_BAR = 2.0  # of canonicalising and matching the large one, first proofs included
MATCH_BAR = 1.7  # of canonicalising and matching a layer more
SEARCH_BAR = 3.5  # of the whole search, backward passes included
OPEN_BAR = 1.1  # of the large one's first picture, in units of its own tracing: every card says its share, so that costs are counted too
FOLD_BAR, TOGGLE_BAR = 0.6, 0.2  # of a card opened in it, of a site switched
SCAN_BAR = {False: 0.4, True: 1.2}  # of a scan over layers and of its gradient, in units of what tracing that takes


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


def counted(call: Callable[[], Any]) -> tuple[Any, int]:
    """(what `call` gives, how many functions it called, all levels and builtins included)."""
    profile = cProfile.Profile()
    profile.enable()
    try:
        result = call()
    finally:
        profile.disable()
    return result, calls_of(profile)


def calls_of(profile: cProfile.Profile) -> int:
    """Calls so far. A collection in the middle of `getstats` calls Python's finalizers, and entries are then counted twice."""
    gc.disable()
    try:
        return sum(entry.callcount for entry in profile.getstats())
    finally:
        gc.enable()


def search(graph):
    """(findings, calls of the whole search); the findings tell their phases, otherwise in seconds, in calls too."""
    profile = cProfile.Profile()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusionlab.fusers.find.time", SimpleNamespace(perf_counter=lambda: float(calls_of(profile))))
        profile.enable()
        try:
            found = fl.find(graph)
        finally:
            profile.disable()
    return found, calls_of(profile)


@pytest.fixture(scope="module", params=LARGE, ids=lambda layers: f"{layers} layers")
def layers(request):
    return request.param


@pytest.fixture(scope="module")
def unit(layers):
    """The calls of tracing the train step of so many layers."""
    train_step(layers)  # what JAX keeps for the next trace is not counted
    return counted(lambda: train_step(layers))[1]


@pytest.fixture(scope="module")
def measured(layers):
    """Of so many layers and of the large program: findings, calls of the search and of matching."""
    fl.find(train_step(1))  # what the first search of a process loads and compiles is not counted
    result = []
    for n in (layers, LARGE[layers]):
        found, calls = search(train_step(n))
        matching = sum(calls for phase, calls in found.seconds.items() if phase != "pairs")
        result.append((found, calls, matching))
        print(f"{n} layers: {found.graph.node_count} nodes, {calls:,} calls, {matching:,.0f} to match")
    return result


def test_a_train_step_has_some_570_equations_a_layer_and_every_forward_site_is_found(measured, layers):
    for n, (found, *_) in zip((layers, LARGE[layers]), measured, strict=True):
        assert 13_000 / 24 * n < found.graph.node_count < 15_500 / 24 * n
        # Differentiated already, the backward pass reads what gelu, softmax and the norms would keep inside: each is
        # fused with it.
        assert not found.rejections
        forward = counts(gemm_epilogue=n * 6, dot_product_attention=n, layer_norm=n * 2)
        grads = forward | {"layer_norm": 0}  # left as they are on a CPU
        assert found.counts() == forward | {f"{name}_grad": count for name, count in grads.items()}


def test_canonicalising_and_matching_stays_within_the_bar(measured, unit, layers):
    """Of each layer more: what is proved once for all layers, unless an earlier search of the process has, is not counted."""
    (*_, small), (*_, large) = measured
    assert large < WHOLE_MATCH_BAR * unit * LARGE[layers] / layers, (
        f"{large:,.0f} calls, {unit:,} to trace the small one"
    )
    calls, traced = (large - small) / (LARGE[layers] - layers), unit / layers
    assert calls < MATCH_BAR * traced, f"{calls:,.0f} calls a layer, {traced:,.0f} to trace it"


def test_the_whole_search_stays_within_the_bar(measured, unit):
    _, calls, _ = measured[0]
    assert calls < SEARCH_BAR * unit, f"{calls:,} calls, {unit:,} to trace"


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


def test_so_many_times_the_layers_take_hardly_more_than_so_many_times_the_calls(measured, layers):
    small, large = (calls for _, calls, _ in measured)
    most = 1.02 * LARGE[layers] / layers
    assert large < most * small, f"{large:,} calls for {LARGE[layers]} layers, {small:,} for {layers}"


def test_the_picture_of_many_layers_opens_and_unfolds_at_once(measured, layers, unit):
    small, found = (found for found, *_ in measured)
    Album(small.graph, small).svg(None)  # what the first drawing of a process loads is not counted
    pictures = Album(found.graph, found)
    _, first = counted(lambda: pictures.svg(None))
    assert len(pictures.items(None)) <= 60
    most = 0
    for _ in range(6):
        closed = [name for name, item in pictures.items(None).items() if item["closed"]]
        name = max(closed, key=lambda name: len(pictures.card(None, name).nodes), default=None)
        if name is None:
            break
        pictures.toggle(None, name)
        _, calls = counted(lambda: pictures.svg(None))
        most = max(most, calls)
        assert name in pictures.opened
    ids = [c.id for c in found.candidates]
    _, toggled = counted(lambda: pictures.svg(ids[1:]))
    print(
        f"calls: {first / unit:.3f} to open, {most / unit:.3f} at most to unfold, {toggled / unit:.3f} to switch a site"
    )
    assert first < OPEN_BAR * unit * LARGE[layers] / layers
    assert 0 < most < FOLD_BAR * unit
    assert toggled < TOGGLE_BAR * unit


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "gradient"])
def test_scanned_layers_cost_what_one_layer_costs(grad):
    scanned(24, grad)  # what JAX keeps for the next trace is not counted
    traced = {n: counted(lambda n=n: scanned(n, grad)) for n in (24, 96)}
    assert traced[24][0].node_count == traced[96][0].node_count
    fl.find(traced[24][0])
    calls = {}
    for n, (graph, _) in traced.items():
        found, calls[n] = search(graph)
        assert found.counts()["gemm_epilogue"] == 6
    _, unit = traced[96]
    print(*(f"scan over {n} layers: {c:,} calls, certified, {c / unit:.2f} of the trace" for n, c in calls.items()))
    assert calls[96] < 1.05 * calls[24]
    assert calls[96] < SCAN_BAR[grad] * unit


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
    runs = {}
    for n, graph in graphs.items():
        found = fl.find(graph)
        found.structures  # noqa: B018  what all later ones share is not counted
        runs[n] = counted(lambda found=found: dataclasses.replace(found).structures)
    for n, (structures, _) in runs.items():
        count = collections.Counter(s.kind for s in structures)
        assert count == {"transformer_layer": n, "repeated_layers": 1, "qkv_siblings": n, "residual_norm": 2 * n - 1}
    calls = {n: c for n, (_, c) in runs.items()}
    print(*(f"structures of {n} layers: {c:,} calls" for n, c in calls.items()), sep="\n")
    assert calls[4 * small] < 4.25 * calls[small]  # a stack has a residual less than it has halves of layers


def test_a_long_train_step_opens_in_the_explorer_within_the_bar(measured, layers, unit, monkeypatch):
    small, found = (dataclasses.replace(found) for found, *_ in measured)
    Explorer(small.graph, small)  # what the first one of a process loads is not counted
    long = min(tabs._COUNTED_AT_ONCE, found.graph.node_count - 1)  # so that the small program counts as a long one too
    monkeypatch.setattr(tabs, "_COUNTED_AT_ONCE", long)
    lab, calls = counted(
        lambda: Explorer(found.graph, found, after=lambda setting, f: f.apply(sorted(setting.enabled)))
    )
    print(f"opened in {calls / unit:.3f} of the trace's calls")
    assert calls < OPEN_BAR * unit * LARGE[layers] / layers
    assert len(lab.scene["items"]) <= 60
    group = next(card for card, item in lab.scene["items"].items() if item["closed"])
    _, calls = counted(lambda: (lab.session.fold(group), lab.refresh()))
    print(f"opened a group in {calls / unit:.3f}")
    assert calls < FOLD_BAR * unit
