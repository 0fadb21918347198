"""Attainable times, predicted gains, parts beside the whole, and the device's peak memory."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.device import Device
from fusionlab.errors import ArgumentError
from fusionlab.evidence.attribution import parts_of, sites_of, stretches
from fusionlab.evidence.comparison import Evidence
from fusionlab.evidence.instruments.memory import device_peak, memory_of
from fusionlab.evidence.instruments.program import compile_program
from fusionlab.evidence.instruments.record import environment
from fusionlab.evidence.reconcile import Reconciliation
from fusionlab.evidence.roofline import attainable, roofline
from fusionlab.graph.cost.cost import Cost, cost_of
from fusionlab.models import transformer
from tests.fusers.checks import normal

DEVICE = dataclasses.replace(Device.of("cpu"), copy_bytes_per_s=1e9, gemm_flop_per_s=1e10)
SHAPES = jax.eval_shape(lambda: transformer.init_block(jax.random.key(0), embed=64))
PARAMS = jax.tree.map(lambda a: np.asarray(normal(a.shape)[0]) / 16, SHAPES)
(X,) = normal((1, 512, 64))


def block(params, x):
    return transformer.block(params, x, causal=True)


@pytest.fixture(scope="module")
def found():
    return fl.find(block, PARAMS, X)


def test_the_slower_of_the_two_rates_says_what_is_attainable():
    assert attainable(Cost(10**10, 0, 10**8, 0), DEVICE) == (1.0, "compute")
    assert attainable(Cost(10**8, 0, 10**9, 10**9), DEVICE) == (2.0, "memory")
    assert attainable(Cost(), DEVICE) == (0.0, "nothing")
    with pytest.raises(ArgumentError, match="measure_peaks"):
        attainable(Cost(1), Device.of("cpu"))


def test_the_kernels_sum_to_the_program(found):
    roof = roofline(found, DEVICE)
    total = found.cost().total
    assert sum(p.operations for p in roof.points) == total.operations
    assert roof.whole.attainable_s == roof.attainable_s == pytest.approx(sum(p.attainable_s for p in roof.points))
    assert roof.attainable_s < roof.unfused_s
    assert roof.whole.attainable <= 1e10
    for p in roof.points:
        assert p.attainable <= min(1e10, p.intensity * 1e9) * (1 + 1e-9)


def test_a_candidate_saves_the_traffic_of_the_matrix_it_does_not_write(found):
    roof = roofline(found, DEVICE)
    by_site = {p.site: p for p in roof.predictions}
    assert set(by_site) == {c.id for c in found.candidates}
    (attention,) = (p for p in roof.predictions if p.pass_name == "dot_product_attention")
    scores = 4 * 4 * 512 * 512
    less = attention.before.bytes_moved - attention.after.bytes_moved
    # Written and read by the products, and read or written by the five kernels of mask and softmax.
    assert 6 * scores < less < 10 * scores
    assert attention.saved_s > 0
    assert attention.kernels[1] < attention.kernels[0]
    assert "less" in attention.why
    for c in found.candidates:
        if c.same_code:
            assert by_site[c.id].saved_s == 0
            assert "what XLA runs anyway" in by_site[c.id].why
    assert any(c.same_code for c in found.candidates)


def test_the_remainder_of_a_measured_whole_is_named(found):
    roof = roofline(found, DEVICE, measured=1.0)
    told = roof.reconcile()
    assert {name for name, _ in told.parts} == {"ln1", "attention", "ln2", "mlp"}
    assert told.sum_s == pytest.approx(roof.attainable_s)
    assert told.remainder_s == pytest.approx(1.0 - roof.attainable_s)
    assert "dispatch" in told.remainder
    assert "remainder" in str(roof)
    with pytest.raises(ArgumentError, match="measured"):
        roofline(found, DEVICE).reconcile()


def test_parts_and_whole_close_or_name_what_is_left():
    close = Reconciliation((("a", 0.5), ("b", 0.45)), 1.0, "dispatch", "twice")
    assert close.closes
    assert close.remainder == "remainder +5% of the whole: dispatch"
    over = Reconciliation((("a", 0.9), ("b", 0.4)), 1.0, "dispatch", "twice")
    assert not over.closes
    assert over.remainder == "remainder -30% of the whole: twice"


def test_a_loop_of_unknown_length_is_noted():
    graph = fl.trace(lambda x: jax.lax.while_loop(lambda c: c.sum() < 9.0, lambda c: c * 2.0, x), X)
    assert "trips" in "".join(roofline(graph, DEVICE).notes)


def test_a_program_is_cut_where_its_scope_changes(found):
    cut = stretches(found.graph.top)
    assert [name for name, _ in cut] == ["ln1", "attention", "ln2", "mlp"]
    assert [n.id for _, nodes in cut for n in nodes] == [n.id for n in found.graph.top.nodes]

    def again(x):
        for name in "aba":
            with jax.named_scope(name):
                x = x * 2.0
        return x

    assert [name for name, _ in stretches(fl.trace(again, X).top)] == ["a", "b", "a#2"]


def test_the_parts_of_a_block_are_run_alone_and_compared_with_the_whole(found):
    parts = parts_of(found.graph, PARAMS, X, samples=4)
    assert [p.name for p in parts.parts] == ["ln1", "attention", "ln2", "mlp"]
    assert sum(len(p.nodes) for p in parts.parts) == len(found.graph.top.nodes)
    total = cost_of(found.graph)
    assert sum(total.of(p.nodes).flops for p in parts.parts) == total.total.flops
    told = parts.reconciliation
    assert told.sum_s + told.remainder_s == pytest.approx(parts.whole.median_s)
    assert "remainder" in str(parts)
    with pytest.raises(ArgumentError, match="arrays"):
        parts_of(found.graph, X)


def test_a_part_computes_what_it_computes_in_the_whole(monkeypatch):
    """The last part, run on what the parts before it gave, returns the program's result."""
    made = []
    monkeypatch.setattr("fusionlab.evidence.attribution._program", _kept(made))
    parts_of(fl.trace(block, PARAMS, X), PARAMS, X, samples=2)
    last, whole = made[3], made[4]
    np.testing.assert_allclose(last.run()[0], whole.run()[0], rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(whole.run()[0], block(PARAMS, X), rtol=2e-4, atol=2e-5)


def _kept(made):
    from fusionlab.evidence import attribution

    real = attribution._program

    def program(*args):
        made.append(real(*args))
        return made[-1]

    return program


def test_each_site_is_worth_what_the_program_takes_longer_without_it(found):
    shares = sites_of(found, PARAMS, X, samples=2)
    assert [s.site for s in shares.sites] == [c.id for c in found.select() if not c.same_code]
    assert set(shares.same_code) == {c.id for c in found.select() if c.same_code}
    for s in shares.sites:
        assert s.saved_s == pytest.approx(s.without.median_s - shares.fused.median_s)
    assert shares.interaction_s == pytest.approx(shares.saved_s - sum(s.saved_s for s in shares.sites))
    assert "all together" in str(shares)
    roof = roofline(found, DEVICE).with_measured({s.site: s.saved_s for s in shares.sites})
    assert sum(p.measured_saved_s is not None for p in roof.predictions) == len(shares.sites)


def test_without_a_site_to_toggle_nothing_is_attributed():
    with pytest.raises(ArgumentError, match="nothing to attribute"):
        sites_of(fl.find(jnp.sin, X), X)


# -- peak memory of a device ------------------------------------------------------------------------------------------


class _Counting:
    """A device that counts: `peaks` are what a run of each program brings its peak to, beyond what is in use."""

    def __init__(self):
        self.in_use, self.peak = 1000, 1000

    def memory_stats(self):
        return {"bytes_in_use": self.in_use, "peak_bytes_in_use": self.peak}


def _program_on(device, needs):
    def run(*args, **kwargs):
        device.peak = max(device.peak, device.in_use + needs)
        return ()

    plan = types.SimpleNamespace(argument_size_in_bytes=0, output_size_in_bytes=0, temp_size_in_bytes=needs)
    about = {"name": "same name", "devices": frozenset({device}), "kwargs": {}, "assignment": None, "memory": plan}
    return types.SimpleNamespace(compiled=run, fresh_args=tuple, **about)


@pytest.mark.parametrize(("before", "after"), [(500, 200), (200, 500)])
def test_the_peak_of_each_version_is_seen_whichever_needs_more(before, after):
    device = _Counting()
    memory = memory_of(_program_on(device, before), _program_on(device, after))
    assert memory.device_peak == (before, after)
    assert "device peak" in str(memory)


def test_a_peak_below_an_earlier_one_is_not_told():
    device = _Counting()
    device.peak = 9999
    assert device_peak(_program_on(device, 500)) is None


def test_a_cpu_keeps_no_count_and_older_records_have_none():
    program = compile_program(lambda x: x @ x.T, (X[0],), {})
    assert device_peak(program) is None
    memory = memory_of(program, program)
    assert memory is not None
    assert memory.device_peak is None
    evidence = Evidence("f", environment(), memory=memory)
    data = evidence.to_dict()
    assert Evidence.from_dict(data).memory == memory
    del data["memory"]["device_peak"]
    assert Evidence.from_dict(data).memory == memory
    data["memory"]["device_peak"] = [5, 3]
    assert Evidence.from_dict(data).memory.device_peak == (5, 3)
