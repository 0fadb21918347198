"""Statistics on synthetic samples; the clock only where a tenfold difference hides its noise."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from fusionlab.errors import ArgumentError, SideEffectError, TraceError
from fusionlab.evidence.instruments import timing, turns
from fusionlab.evidence.instruments.contention import Contention
from fusionlab.evidence.instruments.record import to_json
from fusionlab.evidence.instruments.timing import Runs, Verdict, judge, ratio_interval, seconds, time_pair, timing_of
from fusionlab.evidence.instruments.verdicts import is_far
from fusionlab.evidence.reading import read_timing


def runs(name, samples):
    return Runs(name, tuple(samples), 1, 0.0, 0.0, 0.0)


def drawn(seed, scale, n=40):
    """Skewed like real run times: a floor, an exponential tail, a few large outliers."""
    rng = np.random.default_rng(seed)
    return scale * (1 + rng.exponential(0.05, n) + (rng.random(n) < 0.05) * rng.exponential(1.0, n))


def test_the_same_function_is_no_difference_in_nearly_every_comparison():
    verdicts = [
        timing_of("x", runs("before", drawn(i, 1)), runs("after", drawn(i + 500, 1))).verdict for i in range(200)
    ]
    assert verdicts.count(Verdict.NO_DIFFERENCE) >= 195


def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says():
    covered = 0
    for i in range(300):
        low, high = ratio_interval(drawn(2 * i, 1.3), drawn(2 * i + 1, 1.0))
        covered += low <= 1.3 <= high
    assert 0.90 <= covered / 300 <= 0.99


def test_a_shared_drift_does_not_hide_a_difference():
    drift = np.linspace(1, 3, 40)
    timing = timing_of("x", runs("before", 1.1 * drift), runs("after", drift))
    assert timing.verdict is Verdict.FASTER
    assert timing.ratio == pytest.approx(1.1)
    assert timing.interval == pytest.approx((1.1, 1.1))


def test_the_interval_is_the_same_for_the_same_samples():
    assert ratio_interval(drawn(0, 1), drawn(1, 1)) == ratio_interval(drawn(0, 1), drawn(1, 1))


@pytest.mark.parametrize(
    ("ratio", "interval", "samples", "verdict"),
    [
        (1.5, (1.4, 1.6), 40, Verdict.FASTER),
        (0.5, (0.4, 0.6), 40, Verdict.SLOWER),
        (1.5, (0.9, 2.0), 40, Verdict.UNDECIDED),
        (1.01, (0.92, 1.09), 40, Verdict.NO_DIFFERENCE),
        (1.01, (0.92, 1.11), 400, Verdict.UNDECIDED),
        (1.01, (0.90, 1.02), 400, Verdict.UNDECIDED),
        (1.02, (1.01, 1.03), 400, Verdict.NO_DIFFERENCE),
        (0.98, (0.97, 0.99), 400, Verdict.NO_DIFFERENCE),
        (9.0, (8.0, 10.0), 39, Verdict.INCONCLUSIVE),
    ],
)
def test_verdicts(ratio, interval, samples, verdict):
    assert judge(ratio, interval, samples) is verdict


BUSY, TOO_MUCH = Contention(1.0, 0.5, 2), Contention(1.8, 3.0, 2)


@pytest.mark.parametrize(
    ("ratio", "interval", "verdict"),
    [
        (1.0, (0.96, 1.04), Verdict.NO_DIFFERENCE),
        (1.0, (0.96, 1.07), Verdict.BUSY),
        (1.04, (1.02, 1.05), Verdict.BUSY),
        (0.91, (0.89, 0.93), Verdict.SLOWER),
        (1.3, (1.12, 1.4), Verdict.BUSY),
        (1.5, (1.3, 2.4), Verdict.FASTER),
    ],
)
def test_on_a_busy_machine_a_verdict_takes_more(ratio, interval, verdict):
    assert judge(ratio, interval, 40, contention=BUSY) is verdict
    assert judge(ratio, interval, 39, contention=BUSY) is Verdict.INCONCLUSIVE
    assert judge(ratio, interval, 40, contention=TOO_MUCH) is Verdict.BUSY
    all_agree = judge(ratio, interval, 40, agreeing=True, contention=TOO_MUCH)
    assert all_agree is (verdict if verdict is Verdict.FASTER else Verdict.BUSY)


def test_a_timing_on_a_busy_machine_says_so():
    def timing_with(contention):
        return timing_of("step", runs("before", drawn(0, 2)), runs("after", drawn(1, 1)), contention=contention)

    timing = timing_with(BUSY)
    assert timing.verdict is Verdict.FASTER
    assert timing.note.startswith(
        "the machine was busy while the step was timed: other processes had 1.0 of 2 cores; this one waited 0.50 s for a core"
    )
    quiet = timing_with(Contention(0.1, 0.5, 2))  # its own threads waited for each other
    assert quiet.note == timing_with(Contention(30.0, 0.0, 64)).note == timing_with(None).note == ""
    assert read_timing(json.loads(to_json(asdict(timing)))) == timing


def test_samples_that_come_in_bursts_widen_the_interval_of_a_busy_machine():
    slow = np.repeat([1.0, 1.5, 1.0, 1.4, 1.0, 1.5, 1.0, 1.0], 5)  # of one of the two alone, five in a row
    before, after = drawn(0, 1) * slow, drawn(1, 1)
    apart, in_blocks = ratio_interval(before, after), ratio_interval(before, after, busy=True)
    assert in_blocks[1] - in_blocks[0] > 1.2 * (apart[1] - apart[0])


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ([3.0, 3.1, 2.9, 3.0, 3.2, 3.0], 1.0, Verdict.FASTER),
        ([3.0, 3.1, 2.9, 3.0, 3.2, 3.0], 9.0, Verdict.SLOWER),
        ([3.0, 3.1, 2.9, 3.0, 3.2, 0.9], 1.0, Verdict.INCONCLUSIVE),  # one pair says the contrary
        ([3.0, 3.1, 2.9, 3.0, 3.2], 1.0, Verdict.INCONCLUSIVE),  # five pairs agree by chance once in sixteen
        ([1.05, 1.06, 1.05, 1.04, 1.05, 1.05], 1.0, Verdict.INCONCLUSIVE),  # not far
    ],
)
def test_few_samples_are_a_verdict_where_all_agree_on_a_large_effect(before, after, verdict):
    runs = [Runs(n, tuple(s), 1, 0, 0, 0) for n, s in (("before", before), ("after", [after] * len(before)))]
    timing = timing_of("call", *runs, stopped="time budget")
    assert timing.verdict is verdict
    assert f"(median of {len(before)} samples each, wall time, stopped: time budget)" in timing.text


def test_verdict_texts():
    assert [str(v) for v in Verdict] == [
        "faster",
        "slower",
        "no difference",
        "same code",
        "undecided: the times vary too much",
        "undecided: the machine is busy",
        "inconclusive: fewer than 40 samples",
        "not timed",
    ]


def test_median_and_quartiles_are_those_of_the_samples():
    r = runs("before", [4.0, 1.0, 3.0, 2.0, 5.0])
    assert (r.median_s, r.quartiles_s, r.min_s) == (3.0, (2.0, 4.0), 1.0)


def test_seconds_read_well():
    assert [seconds(x) for x in (2.5, 1.234e-3, 5e-6, 3e-9)] == ["2.5 s", "1.23 ms", "5 µs", "3 ns"]


def product(x):
    return x @ x


def ten_products(x):
    for _ in range(10):
        x = jnp.tanh(x @ x)
    return x


def test_ten_times_the_work_is_slower_and_a_tenth_faster(monkeypatch):
    monkeypatch.setattr(timing, "PATIENCE_S", 0.3)  # for more samples than are needed here
    x = jnp.full((192, 192), 1e-3)
    slow = time_pair(product, ten_products, x)
    assert slow.verdict is Verdict.SLOWER
    assert slow.ratio < 0.5
    assert slow.interval[0] <= slow.ratio <= slow.interval[1]
    assert 400 >= len(slow.before.samples_s) == len(slow.after.samples_s) >= 40
    assert slow.hardware
    assert str(slow) == f"{slow.text}, on {slow.hardware}"
    assert time_pair(ten_products, product, x).verdict is Verdict.FASTER


def test_short_functions_are_repeated_until_a_sample_lasts_a_millisecond_or_so():
    timing = time_pair(jnp.sin, jnp.cos, jnp.ones(8), samples=4)
    assert timing.before.repeats > 10
    assert timing.verdict is Verdict.INCONCLUSIVE


def test_compile_time_is_apart_and_real_even_for_one_function_twice():
    timing = time_pair(product, product, jnp.ones((8, 8)), samples=2)
    for r in (timing.before, timing.after):
        assert r.compile_s > 1e-3
        assert max(r.samples_s) < r.compile_s


def test_the_time_budget_ends_a_measurement_with_what_was_taken():
    timing = time_pair(product, product, jnp.ones((64, 64)), samples=10_000, budget_s=0.1)
    assert timing.stopped == "time budget"
    assert 2 <= len(timing.before.samples_s) < 10_000
    assert len(timing.before.samples_s) == len(timing.after.samples_s)


class Program:
    """What `runs_of` needs of a program; each call takes so many seconds of a clock of its own."""

    trace_s = lower_s = compile_s = 0.0
    args, kwargs, donated, devices = (), {}, (), frozenset(jax.devices()[:1])

    def __init__(self, name, seconds, clock):
        self.name, self.seconds, self.clock, self.calls = name, seconds, clock, 0

    def fresh_args(self):
        return ()

    def compiled(self):
        self.calls += 1
        self.clock.now += self.seconds

    run = compiled


@pytest.fixture
def clock(monkeypatch):
    """A clock in place of that of the timing, which only programs move."""
    fake = SimpleNamespace(now=0.0, perf_counter=lambda: fake.now)
    for module in (timing, turns):
        monkeypatch.setattr(module, "time", fake)
    return fake


@pytest.mark.parametrize("seconds", [0.03, 1.0, 4.0])
def test_the_budget_includes_the_runs_before_the_samples(clock, seconds):
    programs = [Program(name, seconds, clock) for name in ("before", "after")]
    (first, second), stopped = timing.runs_of(programs, 1000, budget_s=30.0)
    assert 30 - 4 * seconds < clock.now <= 30 + 2 * seconds
    assert stopped == "time budget"
    # A long program runs twice before its samples: to be warm, and for what a dispatch takes.
    assert [p.calls for p in programs] == [2 + len(first.samples_s), 2 + len(second.samples_s)]


@pytest.mark.parametrize(("seconds", "samples"), [(0.001, 400), (0.022, 200), (0.1, 40)])
def test_patience_ends_before_more_samples_than_fit_in_it(clock, monkeypatch, seconds, samples):
    # More samples do not make the interval narrower.
    monkeypatch.setattr(timing, "ratio_interval", lambda *_, **__: (0.5, 2.0))
    taken = timing.time_programs("call", *(Program(name, seconds, clock) for name in ("before", "after")))
    assert len(taken.before.samples_s) == samples
    assert clock.now <= timing.PATIENCE_S + 2 * seconds


@pytest.mark.parametrize(
    ("interval", "samples"), [((1.25, 2.0), 40), ((0.4, 0.8), 40), ((1.15, 1.9), 400), ((0.6, 0.9), 400)]
)
def test_no_more_samples_are_taken_where_the_wider_interval_of_a_busy_machine_is_far_from_1(
    clock, monkeypatch, interval, samples
):
    monkeypatch.setattr(timing, "ratio_interval", lambda *_, busy=False, **__: interval if busy else (1.21, 1.9))
    taken = timing.time_programs("call", *(Program(name, 0.001, clock) for name in ("before", "after")))
    assert len(taken.before.samples_s) == samples


def test_samples_of_one_function_are_never_far_from_each_other():
    intervals = (ratio_interval(drawn(i, 1), drawn(i + 500, 1), busy=True) for i in range(200))
    assert not any(map(is_far, intervals))


def test_a_measurement_can_be_cancelled_and_tells_its_progress():
    steps = []
    timing = time_pair(
        product,
        product,
        jnp.ones((8, 8)),
        progress=lambda *step: steps.append(step),
        cancel=lambda: steps[-1][1] == 6,
    )
    made = [(f"{verb} {which}", 0, 0) for which in ("before 1/2", "after 2/2") for verb in ("tracing", "compiling")]
    assert steps == [*made, *(("timing call", n, 40) for n in (0, 2, 4, 6))]
    assert timing.stopped == "cancelled"
    assert len(timing.before.samples_s) == 6
    assert timing.verdict is Verdict.INCONCLUSIVE


def test_donated_arguments_survive_whether_given_or_found():
    x, y = jnp.ones((32, 32)), jnp.ones((32, 32))

    def f(x, y):
        return x + y

    given = time_pair(f, f, x, y, samples=2, donate_argnums=0)
    found = time_pair(jax.jit(f, donate_argnums=(1,)), f, x, y, samples=2)
    assert len(given.before.samples_s) == len(found.after.samples_s) == 2
    assert float((x + y).sum()) == 2 * 32 * 32


def test_static_and_keyword_arguments_and_numpy_arrays_are_taken():
    def f(x, n, *, scale, flag):
        return x * n * scale if flag else x

    timing = time_pair(
        f,
        f,
        np.ones(4, np.float32),
        3,
        scale=jnp.float32(2),
        flag=True,
        static_argnums=1,
        static_argnames="flag",
        samples=2,
    )
    assert math.isfinite(timing.ratio)


def test_prints_and_callbacks_are_refused_by_name_and_line_before_anything_runs():
    ran = []

    def printing(x):
        jax.debug.print("x = {}", x[0])
        return x

    def calling(x):
        return jax.lax.scan(
            lambda c, _: (jax.experimental.io_callback(lambda v: (ran.append(1), v)[1], c, c), None), x, None, 2
        )[0]

    x = jnp.ones(3)
    for f in (printing, jax.jit(printing)):
        with pytest.raises(SideEffectError, match=r"debug_(print|callback) at test_timing\.py:\d+ \(jax\.debug\.print"):
            time_pair(product, f, x)
    with pytest.raises(SideEffectError, match=r"before.*io_callback at test_timing\.py"):
        time_pair(calling, calling, x)
    assert ran == []


@pytest.mark.parametrize("donate", [(), (0,)])
def test_pure_callbacks_are_allowed_and_every_call_is_waited_for(donate):
    def slow(x):
        time.sleep(0.02)
        return x

    def f(x):
        return jax.pure_callback(slow, x, x)

    timing = time_pair(f, f, jnp.ones(3), samples=2, donate_argnums=donate)
    assert min(*timing.before.samples_s, *timing.after.samples_s) >= 0.02


def test_the_host_s_dispatch_is_apart_and_no_longer_than_a_call():
    x = jnp.ones((256, 256))
    found = time_pair(lambda x: x @ x @ x @ x, lambda x: x @ x, x, samples=4)
    for run in (found.before, found.after):
        assert 0 < run.dispatch_s < 10 * run.median_s + 1e-3


def test_caches_are_flushed_before_each_call_where_that_is_asked_for(monkeypatch):
    flushes = []
    monkeypatch.setattr(timing, "_flushed", lambda: flushes.append(1) or np.zeros(8, np.uint8))
    x = jnp.ones((64, 64))
    found = time_pair(lambda x: x @ x, lambda x: x @ x, x, samples=3, cold=True)
    assert (found.before.cold, found.before.repeats) == (True, 1)
    assert len(flushes) == 2 * 2 * 3  # read and written, for each sample of both
    assert "wall time, cold caches" in str(found)
    assert not time_pair(lambda x: x @ x, lambda x: x @ x, x, samples=2).before.cold


def test_bad_arguments_are_named():
    x = jnp.ones(3)
    with pytest.raises(ArgumentError, match=r"float32\[3\].*arrays"):
        time_pair(jnp.sin, jnp.sin, jax.ShapeDtypeStruct((3,), jnp.float32))
    with pytest.raises(ArgumentError, match="samples: got 1"):
        time_pair(jnp.sin, jnp.sin, x, samples=1)
    with pytest.raises(ArgumentError, match="budget_s"):
        time_pair(jnp.sin, jnp.sin, x, budget_s=0)
    with pytest.raises(ArgumentError, match="donate_argnums: got 1"):
        time_pair(jnp.sin, jnp.sin, x, donate_argnums=1)
    with pytest.raises(TraceError, match=r"after does not run under jax\.jit"):
        time_pair(jnp.sin, lambda x: x.reshape(7), x)
    with pytest.raises(ArgumentError, match="fn: got int"):
        time_pair(3, jnp.sin, x)  # type: ignore[arg-type]
