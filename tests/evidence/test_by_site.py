"""Which sites are to blame: bisection over sites, and the errors of each."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random

import jax
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.errors import ArgumentError
from fusionlab.evidence.bisection import bisect_sites
from fusionlab.kernels import OPS
from fusionlab.progress import Stages
from fusionlab.verbs import lab

LAYERS = 24
WIDTHS = range(8, 9 + LAYERS)  # layer i multiplies WIDTHS[i] features
NAMES = [f"site {i}" for i in range(LAYERS)]


# The search alone.


def blamed(sites, bad, **options):
    return bisect_sites("f", "error", sites, lambda chosen: (bad(set(chosen)), "seen"), **options)


@pytest.mark.parametrize("count", [1, 2, 3, 24, 100])
def test_sites_that_are_bad_on_their_own_are_found_in_logarithmic_time(count):
    draw = random.Random(0)
    names = [f"s{i}" for i in range(count)]
    for _ in range(100):
        bad = set(draw.sample(names, draw.randint(0, min(2, count))))
        found = blamed(names, lambda chosen, bad=bad: bool(bad & chosen))
        assert [c.sites for c in found.causes] == [(s,) for s in sorted(bad, key=names.index)]
        assert len(found.trials) <= 1 + len(bad) * (math.ceil(math.log2(count)) + 2)


def test_sites_that_are_bad_only_together_are_one_cause():
    draw = random.Random(1)
    for _ in range(100):
        pair = set(draw.sample(NAMES, 2))
        found = blamed(NAMES, lambda chosen, pair=pair: pair <= chosen)
        assert [set(c.sites) for c in found.causes] == [pair]


def test_no_program_is_tried_twice():
    found = blamed(NAMES, lambda chosen: bool({"site 3", "site 17"} & chosen))
    assert len({t.sites for t in found.trials}) == len(found.trials)


def test_all_may_be_needed():
    (cause,) = blamed(NAMES, lambda chosen: len(chosen) == LAYERS).causes
    assert cause.sites == tuple(NAMES)


def test_it_ends_when_it_is_told_to():
    found = blamed(NAMES, lambda chosen: "site 5" in chosen, most=3)
    assert (found.stopped, len(found.trials), found.causes) == ("most trials", 3, ())
    asked = iter([False, False, True])
    found = blamed(NAMES, lambda chosen: "site 5" in chosen, stages=Stages(cancel=lambda: next(asked)))
    assert (found.stopped, len(found.trials)) == ("cancelled", 2)


def test_a_bisection_is_told_as_sentences_and_as_data():
    found = blamed(NAMES, lambda chosen: "site 5" in chosen)
    assert str(found).endswith("each of these alone makes it so\n  site 5: seen")
    data = json.loads(json.dumps(found.to_dict()))
    assert data["causes"] == [{"sites": ["site 5"], "told": "seen"}]
    assert len(data["trials"]) == len(found.trials)
    assert "it is not worse than before" in str(blamed(NAMES, lambda chosen: False))


# A model of 24 sites, of which some compute something else once they are certified.


def model(weights, x):
    for i, (w, b) in enumerate(weights):
        with jax.named_scope(f"layer_{i}"):
            x = jax.nn.gelu(x @ w + b)
    return x


@pytest.fixture(scope="module")
def arguments():
    draw = np.random.default_rng(0)  # jax.random would compile a program for each shape

    def normal(*shape):
        return draw.standard_normal(shape).astype(np.float32)

    weights = [(normal(a, b) * 1.5 / a**0.5, np.zeros(b, np.float32)) for a, b in itertools.pairwise(WIDTHS)]
    return weights, normal(16, WIDTHS[0])


@pytest.fixture
def planted(monkeypatch):
    """Layers -> their fused op is 2 % off; only once the search is over, whose certification would decline them."""

    def plant(*layers):
        widths, certified = {WIDTHS[i] for i in layers}, []
        implementations = OPS["gemm_epilogue"].implementations
        right, selected = implementations["xla"], lab.Fused.selected

        def forward(x, w, *args, **options):
            first, *rest = right.forward(x, w, *args, **options)
            return [first * 1.02 if certified and w.shape[0] in widths else first, *rest]

        def and_then(self, *args, **kwargs):
            found = selected(self, *args, **kwargs)
            certified.append(True)
            return found

        monkeypatch.setitem(implementations, "xla", dataclasses.replace(right, forward=forward))
        monkeypatch.setattr(lab.Fused, "selected", and_then)

    return plant


@pytest.mark.parametrize(
    ("layers", "bad", "most"), [(8, (1, 6), 11), (LAYERS, (4, 17), 20)], ids=["8 sites", "24 sites"]
)
def test_two_planted_sites_are_found_in_few_trials(arguments, planted, layers, bad, most):
    weights, x = arguments
    planted(*bad)
    found = fl.bisect(model, weights[:layers], x, grad=False)
    assert len(found.sites) == layers
    assert [c.sites for c in found.causes] == [(f"gemm_epilogue@layer_{i}#1",) for i in bad]
    assert len(found.trials) <= most
    assert "WORSE" in found.causes[0].observed


def test_nothing_is_blamed_where_nothing_is_wrong(arguments):
    weights, x = arguments
    found = fl.bisect(model, weights[:3], x)
    assert (found.causes, len(found.trials)) == ((), 1)


def test_each_site_s_own_errors(arguments, planted):
    planted(1)
    weights, x = arguments
    told = []
    found = fl.errors_by_site(model, weights[:3], x, progress=lambda *step: told.append(step))
    assert [one.site for one in found] == [f"gemm_epilogue@layer_{i}#1" for i in range(3)]
    assert [one.ok for one in found] == [True, False, True]
    assert {leaf.kind for leaf in found[1].leaves} == {"output", "gradient"}
    assert "WORSE" in str(found[1])
    assert [step[1:] for step in told if step[0] == "errors site by site"] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    parts = [task.removeprefix("site 2 of 3: ") for task, *_ in told if task.startswith("site 2 of 3: ")]
    assert parts[:5] == [
        *(f"{verb} after, {call}" for call in ("gradient of the call", "call") for verb in ("tracing", "compiling")),
        "errors of outputs and gradients",
    ]
    assert {part.rstrip("0123456789") for part in parts[5:]} == {"rounding errors of the original, run "}
    assert fl.errors_by_site(model, weights[:3], x, cancel=lambda: True) == ()


def test_the_errors_of_each_site_on_the_values_that_reach_it(arguments, planted):
    planted(1)
    weights, x = arguments
    found = fl.errors_by_site(model, weights[:3], x, local=True)
    assert [one.ok for one in found] == [True, False, True]
    assert [leaf.name for leaf in found[1].leaves] == ["out", "x", "w", "b"]
    assert not found[1].drawn
    # Its inputs are those of the program, so its output is the program's there.
    made = jax.nn.gelu(jax.nn.gelu(x @ weights[0][0] + weights[0][1]) @ weights[1][0] + weights[1][1])
    worst = found[1].leaves[0].before
    assert made[worst.worst_index] == pytest.approx(worst.worst_reference, rel=1e-2, abs=1e-6)


def test_a_site_in_a_loop_is_judged_on_values_drawn_at_random(arguments, planted):
    def looped(w, b, x):
        return jax.lax.scan(lambda c, _: (jax.nn.gelu(c @ w + b), None), x, None, length=3)[0]

    w, x = np.eye(12, dtype=np.float32), np.ones((4, 12), np.float32)
    (one,) = fl.errors_by_site(looped, w, np.zeros(12, np.float32), x, local=True)
    assert one.ok
    assert one.drawn
    assert str(one).endswith("(on values drawn at random)")
    planted(4)  # of 12 features
    (one,) = fl.errors_by_site(looped, w, np.zeros(12, np.float32), x, local=True, grad=False)
    assert not one.ok


def test_a_fused_function_says_itself_what_is_fused(arguments, planted):
    planted(0, 1)
    weights, x = arguments
    fused = fl.fuse(model, skip=["gemm_epilogue@layer_0#1"])
    found = fl.bisect(fused, weights[:3], x, grad=False)
    assert found.sites == ("gemm_epilogue@layer_1#1", "gemm_epilogue@layer_2#1")
    assert [c.sites for c in found.causes] == [("gemm_epilogue@layer_1#1",)]


def test_of_time(arguments, monkeypatch):
    """The clock is made up: what is slow is what the test says is slow."""
    from fusionlab.evidence import subsets as trials
    from fusionlab.evidence.instruments import timing

    def timed(what, before, after, **_):
        slow = {p.name: 1e-3 for p in (before, after)}
        slow["after"] *= 1.3 if "layer_2" in tried[-1] else 0.99
        runs = [timing.Runs(name, (s,) * 40, 1, 0.0, 0.0, 0.0) for name, s in slow.items()]
        return timing.timing_of(what, *runs)

    tried = []
    monkeypatch.setattr(trials, "time_programs", timed)
    version = trials.Trials._begun
    monkeypatch.setattr(trials.Trials, "_begun", lambda self, sites: tried.append(str(sites)) or version(self, sites))
    weights, x = arguments
    told = []
    found = fl.bisect(model, weights[:4], x, of="time", grad=False, progress=lambda *step: told.append(step[0]))
    assert [c.sites for c in found.causes] == [("gemm_epilogue@layer_2#1",)]
    assert "slower" in found.causes[0].observed
    assert [t for t in told if t.startswith("trial") and "of about" in t][:2] == [
        "trial 1 of about 5, 4 sites",
        "trial 2 of about 5, 2 sites",
    ]
    assert {"searching", "trial 1: compiling before, call", "trial 2: compiling after, call"} <= set(told)


def test_what_each_site_is_worth_in_time():
    def attend(q, k, v, scale):
        return jax.nn.dot_product_attention(q, k, v) * scale

    draw = np.random.default_rng(0)
    q, k, v = (draw.standard_normal((1, 1024, 2, 32)).astype(np.float32) for _ in range(3))
    found = fl.time_by_site(attend, q, k, v, scale=np.float32(2), samples=2)
    assert [s.site for s in found.sites] == ["dot_product_attention@#1"]
    (one,) = found.sites  # of one site the whole is its own
    assert found.saved_s == pytest.approx(found.unfused.median_s - found.fused.median_s)
    assert one.without.samples_s != found.unfused.samples_s
    assert "dot_product_attention@#1: " in str(found)
    with pytest.raises(ArgumentError, match="nothing"):
        fl.time_by_site(fl.fuse(attend, skip="dot_product_attention"), q, k, v, 1.0)


def test_what_is_asked_wrongly_is_refused(arguments):
    with pytest.raises(ArgumentError, match="of: got 'speed', needed one of 'error', 'time'"):
        fl.bisect(model, *arguments, of="speed")
    with pytest.raises(ArgumentError, match="samples: got 1"):
        fl.bisect(model, *arguments, samples=1)
