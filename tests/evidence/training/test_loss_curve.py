"""`fl.compare(step, fused, state, data=batches)`: what is inside the band, what is not, and that a run that was stopped goes on."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fusionlab as fl
from fusionlab.errors import ArgumentError, FusionLabError, SideEffectError
from fusionlab.evidence.training import running
from fusionlab.evidence.training.blocks import block_of, blocks_of
from fusionlab.evidence.training.curve import Band
from fusionlab.evidence.training.judging import Measured, judged, limit
from fusionlab.evidence.training.lanes import Series, _distances, _fresh, _norms, _untuned
from fusionlab.evidence.training.result import Leaf

STEPS = 24


def start(seed=0):
    draw = np.random.default_rng(seed)
    shapes = {"first": (16, 32), "bias": (32,), "second": (32, 32), "last": (32, 4)}
    return {name: jnp.asarray(draw.normal(size=s) / np.sqrt(s[0]), jnp.float32) for name, s in shapes.items()}


@functools.cache
def batches(count=STEPS):
    draw = np.random.default_rng(1)
    return [tuple(draw.normal(size=(32, n)).astype(np.float32) for n in (16, 4)) for _ in range(count)]


def loss(p, x, y):
    h = jax.nn.gelu(x @ p["first"] + p["bias"])
    return jnp.mean((jax.nn.gelu(h @ p["second"]) @ p["last"] - y) ** 2)


def reordered(p, x, y):
    """The same, its sums in other orders."""
    h = jax.nn.gelu(x[:, ::-1] @ p["first"][::-1] + p["bias"])
    return jnp.sum((jax.nn.gelu(h @ p["second"]) @ p["last"] - y) ** 2) / y.size


def as_it_is(grads, last):
    return grads


def scaled(factor):
    return lambda grads, last: grads | {"second": grads["second"] * factor}


def late(grads, last):
    return grads | {"second": last}


def sgd(loss, change=as_it_is):
    def step(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, change(grads, None)), value

    return step


def adam(loss, change=as_it_is):
    def step(params, moments, last, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        now, grads = grads["second"], change(grads, last)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments["m"], grads)
        v = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, moments["v"], grads)
        params = jax.tree.map(lambda p, m, v: p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), params, m, v)
        return value, params, {"m": m, "v": v}, now

    return step


def adam_state():
    p = start()
    zeros = jax.tree.map(jnp.zeros_like, p)
    return p, {"m": zeros, "v": zeros}, zeros["second"]


def curve(step, other, *state, **options):
    return fl.compare(step, other, *(state or (start(),)), **{"data": batches(), "runs": 4} | options)


def outside(found):
    return {s.of for s in found.outside}


def test_blocks_double():
    assert blocks_of(0) == []
    assert blocks_of(10) == [(1, 1), (2, 3), (4, 7), (8, 10)]
    assert [block_of(t) for t in range(7)] == [0, 1, 1, 2, 2, 2, 2]


def test_limits_are_wider_for_one_number_and_for_more_comparisons():
    assert limit(1, 6, 10) > limit(1000, 6, 10) > 3
    assert limit(1000, 6, 10_000) > limit(1000, 6, 10)
    assert limit(1000, 6, 10_000) < 7


def series(losses, differences, squares):
    """Of one step each."""
    return Series([losses], [differences], [sum(squares)], [np.array(squares, float)])


def measured(entries):
    of_loss = Measured("loss", 1, 1e-7, lambda s: [s.loss_differences[0] ** 2], [1.0], relative=False)
    arrays = [Measured(f"a{i}", n, 1e-7, lambda s, i=i: [s.blocks[0][i]], [1.0]) for i, n in enumerate(entries)]
    return [of_loss, *arrays]


def test_differences_that_come_in_jumps_are_judged_by_those_of_arrays_of_the_same_size():
    """One entry of few jumps in a run of the original, another one in the fused version."""
    entries, quiet = (8, 8, 10_000), 1e-6
    runs = [series(2.0, 1e-4, [quiet] * 3) for _ in range(4)]
    fused = series(2.0, 1e-4, [quiet, 1e-2, quiet])
    found = judged(measured(entries), fused, runs).stretches
    assert [s.of for s in found if s.outside] == ["a1"]
    runs[2] = series(2.0, 1e-4, [1e-2, quiet, quiet])
    found = judged(measured(entries), fused, runs).stretches
    assert not any(s.outside for s in found)
    # Which does not excuse an array of another size.
    found = judged(measured(entries), series(2.0, 1e-4, [quiet, quiet, 1e-2]), runs).stretches
    assert [s.of for s in found if s.outside] == ["a2"]


def test_what_the_original_is_from_itself_in_float32_the_fused_version_may_be_twice():
    runs = [series(2.0, 1e-4, [1e-6]) for _ in range(4)]
    for far, inside in ((1.9e-2, True), (2.1e-2, False)):
        found = judged(measured([8]), series(2.0, 1e-4, [far**2]), runs, series(2.0, 1e-4, [1e-4])).stretches
        assert [s.outside for s in found] == [False, not inside]


def test_nothing_is_judged_where_the_runs_of_the_original_have_parted():
    runs = [series(2.0, d, [1e-6]) for d in (1e-4, 3.0, 1e-4, 1e-4)]
    found = judged(measured([8]), series(2.0, 5.0, [1e-6]), runs)
    assert (found.stretches, found.parted) == ((), 1)


def test_what_is_not_finite_in_the_original_is_not_judged_and_in_the_fused_version_alone_is_outside():
    nan, quiet = float("nan"), [series(2.0, 1e-4, [1e-6]) for _ in range(4)]
    of, fused = measured([8]), series(2.0, 1e-4, [1e-6])
    assert judged(of, series(nan, nan, [nan]), quiet).stretches[0].outside
    # A run of the original that is not finite has no limit to give.
    found = judged(of, series(2.0, 1e-4, [1.0]), [*quiet[:3], series(2.0, 1e-4, [nan])])
    assert (found.stretches, found.parted) == ((), 1)
    found = judged([dataclasses.replace(of[0], scale=[nan]), *of[1:]], series(nan, nan, [0.0]), quiet)
    assert (found.stretches, found.parted) == ((), 1)
    assert judged([*of, *measured([0])[1:]], fused, quiet).parted == 0


@pytest.mark.dear
def test_distances_of_small_numbers_narrow_dtypes_and_infinities():
    small, inf, nan = np.float32([3e-30, 4e-30]), np.float32([np.inf, 1.0]), np.float32([np.nan, 1.0])
    given = (small, inf, nan, small[:0], jnp.ones(2, jnp.float8_e4m3fn))
    other = (0 * small, inf, nan, small[:0], jnp.zeros(2, jnp.float8_e4m3fn))
    found = np.asarray(_distances(given, other))
    assert np.allclose(found / [5e-30, 1, 1, 1, 1], [1, 0, 0, 0, np.sqrt(2)])
    assert np.allclose(np.asarray(_norms(given)) / [5e-30, 1, 1, 1, 1], [1, 1, 1, 0, np.sqrt(2)])
    assert not np.isfinite(np.asarray(_distances((inf, nan), (nan, 0 * small)))).any()


def test_on_a_gpu_a_run_that_shows_rounding_is_not_tuned_unless_the_step_says_so(monkeypatch):
    assert _untuned({}) == {}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    options = _untuned({"compiler_options": {"xla_gpu_autotune_level": 4, "xla_embed_ir_in_executable": True}})
    assert options["compiler_options"] == {
        "xla_gpu_autotune_level": 4,
        "xla_gpu_enable_triton_gemm": False,
        "xla_embed_ir_in_executable": True,
    }


def test_an_array_that_was_put_nowhere_is_put_nowhere():
    leaf, device = Leaf(0, "n", (), jnp.dtype("int32")), jax.devices()[0]
    assert not _fresh(jnp.int32(1), np.int32(2), leaf).committed
    assert _fresh(jax.device_put(jnp.int32(1), device), np.int32(2), leaf).committed


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04" + b"x" * 40])
def test_a_damaged_file_is_one_clear_error(tmp_path, content):
    path = tmp_path / "curve.npz"
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match=r"is not a saved loss curve, or is damaged .*; needed one that"):
        fl.load(path)
    with pytest.raises(ArgumentError, match=r"needed a file that curve.save"):
        fl.load(tmp_path / "other.npz")


def in_bfloat16(p, x, y):
    return loss(jax.tree.map(lambda a: a.astype(jnp.bfloat16), p), x.astype(jnp.bfloat16), y).astype(jnp.float32)


def coarse(p, x, y):
    """With 2 bits of mantissa instead of 7."""
    return in_bfloat16(jax.tree.map(lambda a: lax.reduce_precision(a, 8, 2), p), x, y)


@pytest.mark.dear
def test_a_version_that_rounds_less_is_inside_and_one_that_rounds_more_is_not():
    less = curve(sgd(coarse), sgd(loss))
    assert less.verdict is Band.INSIDE
    # For other roundings of its sums alone these limits are narrower.
    assert any(s.limit == 2 * s.wide for s in less.stretches)
    assert np.allclose(less.wide_losses, less.fused_losses, rtol=1e-3)  # literals keep their values in bfloat16
    assert curve(sgd(in_bfloat16), sgd(coarse)).verdict is Band.OUTSIDE


@pytest.mark.dear
def test_steps_that_amplify_every_rounding_are_undecided_from_a_step_that_is_named():
    def logistic(p, x, y):
        p = p @ jnp.eye(8)
        return 3.99 * p * (1 - p), p[0, 0]

    found = curve(logistic, logistic, jax.random.uniform(jax.random.key(0), (8, 8)), data=batches() * 2)
    assert found.verdict is Band.UNDECIDED
    assert 4 <= found.parted <= 2 * STEPS
    assert f"from step {found.parted} on the original's own runs are apart" in str(found)


@pytest.mark.dear
def test_another_order_of_sums_is_inside_and_wrong_gradients_are_not():
    inside = curve(sgd(loss), sgd(reordered))
    assert inside.verdict is Band.INSIDE
    assert 0 < max(inside.distances) < 1e-6
    assert max(s.share for s in inside.worst) > 1e-3  # the two do differ
    wrong = curve(sgd(loss), sgd(reordered, scaled(1.5)))
    assert wrong.verdict is Band.OUTSIDE
    assert wrong.outside[0].of == "params['second']"
    assert wrong.outside[0].first == 1
    assert "loss" in outside(wrong)
    assert "OUTSIDE THE BAND over 24 steps" in str(wrong)


@pytest.mark.dear
def test_adam_hides_a_factor_but_not_a_gradient_that_is_one_step_late():
    state = adam_state()
    behind = curve(adam(loss), adam(reordered, late), *state)
    assert behind.verdict is Band.OUTSIDE
    assert {"params['second']", "moments['m']['second']"} <= outside(behind)
    factor = curve(adam(loss), adam(reordered, scaled(1.01)), *state)
    # Neither the loss nor a parameter shows it; the moments are off by what it is.
    moments = {"moments['m']['second']", "moments['v']['second']"}
    assert outside(factor) == {*moments, "all floats of the state"}
    assert {round(s.fused, 3) for s in factor.worst if s.of in moments} == {0.01, 0.02}
    # A comparison of the gradients themselves names it.
    both = [lambda p, x, y, c=c: c(jax.grad(reordered)(p, x, y), None) for c in (as_it_is, scaled(1.01))]
    bad = fl.compare(*both, start(), *batches()[0], timing=False, memory=False).numerics.regressions
    assert [leaf.name for leaf in bad] == ["out['second']"]


@pytest.mark.dear
def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path, monkeypatch):
    state, made = adam_state(), (adam(loss), adam(reordered))
    whole = curve(*made, *state)
    asked = itertools.count()
    half = curve(*made, *state, data=iter(batches()), steps=STEPS, cancel=lambda: next(asked) > 15)
    assert half.stopped == "cancelled"
    assert 0 < half.reached < STEPS
    assert half.losses == whole.losses[: half.reached]
    assert half.verdict is Band.INSIDE
    file = half.save(tmp_path / "half.npz")
    for earlier in (half, file):
        rest = curve(*made, *state, data=iter(batches()), steps=STEPS, resume=earlier)
        assert (rest.stopped, rest.kept) == ("", None)
        assert (rest.losses, rest.distances, rest.stretches) == (whole.losses, whole.distances, whole.stretches)
    assert fl.load(file) == half
    with pytest.raises(ArgumentError, match="resume: got a training of step over 24 steps"):
        curve(*made, *state, steps=STEPS + 1, resume=half)
    with pytest.raises(
        ArgumentError, match=r"resume: got a training with params\['bias'\]: float32\[32\], needed one of this state"
    ):
        curve(*made, *jax.tree.map(lambda x: x[:1] if x.shape == (32,) else x, state), resume=half)
    with pytest.raises(ArgumentError, match="has made all its steps"):
        curve(*made, *state, resume=whole)
    with pytest.raises(ArgumentError, match="saved without its states"):
        curve(*made, *state, resume=half.save(tmp_path / "half.json"))
    # Where there is room for one more state only, the original runs again beside each of the others.
    monkeypatch.setattr(running, "room_for", lambda state: 1)
    groups = curve(*made, *state, data=iter(batches()), steps=STEPS)
    assert groups.stretches == whole.stretches
    asked = itertools.count()
    stopped = curve(*made, *state, data=iter(batches()), steps=STEPS, cancel=lambda: next(asked) > 60)
    assert stopped.kept is not None
    assert "fused" in stopped.kept.done
    assert stopped.reached == STEPS
    rest = curve(*made, *state, data=iter(batches()), steps=STEPS, resume=stopped)
    assert rest.stretches == whole.stretches


@pytest.mark.dear
def test_a_curve_saves_and_draws_itself(tmp_path):
    found = curve(sgd(loss), sgd(reordered), steps=6, runs=2)
    for suffix in ("json", "npz"):
        assert fl.load(found.save(tmp_path / f"c.{suffix}")) == found
    rows = found.save(tmp_path / "c.csv").read_text().splitlines()
    assert len(rows) == 7
    assert rows[0].startswith("step,loss,fused loss,loss limit,distance,distance of run 1")
    assert found.save(tmp_path / "c.html").read_text().count("<svg") == 3
    assert found.save(tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert len(found.to_dataframe()) == 6
    ax = found.plot_distance(of="params['second']")
    assert ax.get_title(loc="left") == "step: params['second']"
    with pytest.raises(ArgumentError, match=r"needed the name of an array of the state: .*params"):
        found.plot_distance(of="w")
    with pytest.raises(ArgumentError, match=r"suffix '\.gif'"):
        found.save(tmp_path / "c.gif")
    short = json.loads((tmp_path / "c.json").read_text()) | {"losses": [1.0]}
    (tmp_path / "short.json").write_text(json.dumps(short))
    with pytest.raises(ArgumentError, match=r"not a saved loss curve .ValueError: 1 losses, 6 of the fused version"):
        fl.load(tmp_path / "short.json")
    (tmp_path / "other.npz").write_bytes(b"PK no zip")
    with pytest.raises(ArgumentError, match="is not a saved loss curve"):
        fl.load(tmp_path / "other.npz")


@pytest.mark.dear
def test_batches_end_or_come_again_and_time_runs_out():
    made = sgd(loss), sgd(reordered)
    ended = curve(*made, data=iter(batches(5)), steps=STEPS, runs=1)
    assert (ended.reached, ended.stopped) == (5, "no more batches")
    again = curve(*made, data=batches(3), steps=7, runs=1)
    assert "3 batches" in again.notes[0]
    numbered = curve(*made, data=lambda i: batches(3)[i % 3], steps=7, runs=1)
    assert numbered.losses == again.losses
    spent = curve(*made, steps=STEPS, runs=1, budget_s=1e-9)
    assert (spent.reached, spent.stopped) == (1, "budget")
    stages = []
    nothing = curve(*made, runs=1, steps=2, cancel=lambda: True, progress=lambda *step: stages.append(step[0]))
    assert (nothing.reached, nothing.verdict, nothing.stopped) == (0, Band.UNDECIDED, "cancelled")
    with pytest.raises(ArgumentError, match="no step of step was made"):
        nothing.plot()
    assert curve(*made, runs=1, steps=2, resume=nothing).reached == 2


def test_what_cannot_be_trained_is_one_clear_error():
    made = sgd(loss), sgd(reordered)
    for options, message in (
        ({"data": iter(batches())}, "steps: got None"),
        ({"data": []}, "data: got no batches"),
        ({"data": {"x": 1}}, "data: got dict"),
        ({"steps": 0}, "steps: got 0"),
        ({"runs": 0}, "runs: got 0"),
        ({"budget_s": 0}, "budget_s: got 0"),
        ({"budget_s": "1"}, "budget_s: got '1'"),
        ({"resume": 3}, "resume: got int"),
        ({"grad": True}, "grad: got True with data"),
        ({"data_argnum": 4}, "data_argnum: got 4"),
        ({"stpes": 3}, "stpes: neither an option of compare nor a parameter of step. Did you mean 'steps'"),
    ):
        with pytest.raises(FusionLabError, match=message):
            curve(*made, **options)
    # The second returns no count.
    counted = [lambda params, n, x, y, by=by: (*made[0](params, x, y), n + 1)[:by] for by in (3, 2)]
    with pytest.raises(ArgumentError, match=r"fused: got a step that replaces 4, needed the original's 5"):
        curve(*counted, start(), jnp.int32(0))

    def prints(params, x, y):
        jax.debug.print("{}", x[0, 0])
        return made[0](params, x, y)

    with pytest.raises(SideEffectError, match="debug"):
        curve(prints, made[1])
