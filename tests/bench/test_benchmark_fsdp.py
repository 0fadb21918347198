"""`python -m benchmarks fsdp`: what it adds to a record, and its lines; its programs run on two devices in tests/fusers/fsdp_steps.py."""

from __future__ import annotations

import jax
import pytest

from benchmarks.devices import fsdp
from benchmarks.programs.language_steps import PLAIN, TINY


def program(ratio, bytes_, peak=2**30):
    times = {"median_s": 1 / ratio, "ratio": ratio, "interval": [ratio, ratio]}
    return times | {"collectives": {"all-gather": {"count": 3, "bytes": bytes_}}, "peak_bytes": peak}


def test_a_gain_is_relative_to_one_cards_and_collectives_to_those_of_jit():
    alone = {"devices": 1, "failures": {}, "jax.jit": program(1, 0), "fused grad": program(2.0, 0)}
    two = {"devices": 2, "failures": {"by hand": "no"}, "jax.jit": program(1, 8), "fused grad": program(1.8, 4, 2**29)}
    cases = {"one card": alone, "explicit": two}
    fsdp.compare(cases)
    ours = two["fused grad"]
    assert ours["gain_over_one_card"] == pytest.approx(0.9)
    assert (ours["same_collectives"], ours["bytes_over_jit"], ours["peak_over_jit"]) == (False, 0.5, 0.5)
    text = "\n".join(fsdp.lines(cases))
    assert "gain 0.900 of one card's (below 0.95)" in text
    assert "3 all-gather 0.0 (0.50 of jax.jit's bytes)" in text
    assert text.endswith("  by hand: no")


def test_arrays_are_split_along_their_largest_axis_where_it_divides():
    layout = fsdp.Layout(jax.sharding.AbstractMesh((2,), (fsdp.AXIS,)))
    split = lambda *shape: layout.along_largest(jax.ShapeDtypeStruct(shape, "float32")).spec  # noqa: E731
    assert [*split(4, 64, 32)] == [None, fsdp.AXIS, None]
    assert [*split(3)] == [*split()] == []


@pytest.mark.dear
def test_one_step_moves_the_parameters_against_the_gradient():
    case = TINY[0]
    graded = jax.value_and_grad(case.loss(PLAIN))
    mesh = jax.make_mesh((1,), (fsdp.AXIS,), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    args = fsdp.arguments(case, fsdp.Layout(mesh))
    loss, new, (m, _) = jax.jit(fsdp.adamw(graded))(*args)
    gradients = graded(args[0], args[2])[1]
    for g, moment in zip(jax.tree.leaves(gradients), jax.tree.leaves(m), strict=True):
        assert abs(moment - 0.1 * g.astype("float32")).max() <= 1e-2 * abs(moment).max()
    assert graded(new, args[2])[0] <= loss
