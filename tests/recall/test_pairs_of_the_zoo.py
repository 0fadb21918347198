"""What `python -m benchmarks pairs` tells of the zoo's train steps, on some of them; the whole zoo stands in benchmarks/results."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import jax.numpy as jnp
import pytest
from zoo.catalogue import programs

import fusionlab as fl
from benchmarks.programs.pair_fates import sites_of
from benchmarks.programs.pairs import Outcome, arrays, equality, row
from benchmarks.search.cotangents import check_cotangents

PROGRAMS = {p.model.id: p for p in programs() if p.dtype == "f32" and p.variant == "train"}
# Models of which every site is paired.
WHOLE = (
    *(
        "handwritten/mlp_gelu_erf_erfc",
        "attention/rotary",
        "norms/rms_plus_one",
        "linen/encoder_pre",
        "nnx/encoder_rms",
    ),
    *("equinox/encoder", "haiku/encoder_rms", "structured/parallel_layer"),
)
# Models with sites that are not, or with products without a bias, which the truths do not count: fates, and how the reason begins of each
# that stays.
NAMED, NOT_FOUND, OTHER_COND = "[named_residual]", "its backward pass was not found", "it is in a different cond"
OTHERS = {
    "handwritten/swiglu": ({"paired": 2}, {}),
    "jaxnn/llama": ({"paired": 9}, {}),
    "attention/bare_rank3": ({"no gradient": 1}, {}),
    "structured/while_loop": ({"paired": 1, "no gradient": 1}, {}),
    "structured/encoder_scan": ({"paired": 9, "stays": 1}, {"gemm_epilogue@#6": NAMED}),
    # The last product of a checkpoint is not computed again: its forward stands outside, its backward pass inside.
    "structured/encoder_scan_remat": (
        {"paired": 8, "primal half": 9, "stays": 2},
        {"gemm_epilogue@#7": NOT_FOUND, "gemm_epilogue@#13": NAMED},
    ),
    "structured/branches": (
        {"stays": 6},
        {f"gemm_epilogue@#{i}": "[escapes]" if i in (2, 5) else OTHER_COND for i in range(1, 7)},
    ),
}


def search(name):
    function, args = PROGRAMS[name].make()
    return fl.find(function, *args)


@pytest.mark.parametrize("name", WHOLE)
def test_every_site_is_paired(name):
    there = PROGRAMS[name].truth.sites
    sites = sum(there[concept] for concept in ("linear", "attention", "layer_norm", "rms_norm"))
    assert Counter(s.fate for s in sites_of(PROGRAMS[name], search(name))) == {"paired": sites}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_paired_is_known_by_name(name):
    fates, reasons = OTHERS[name]
    sites = sites_of(PROGRAMS[name], search(name))
    assert Counter(s.fate for s in sites) == fates
    staying = {s.id: s.reason for s in sites if s.fate == "stays"}
    assert staying.keys() == reasons.keys()
    assert all(staying[i].startswith(reason) for i, reason in reasons.items()), staying


@pytest.mark.parametrize("name", ["linen/encoder_pre", "structured/encoder_scan"])
def test_a_site_with_parameters_whose_pair_is_missed_stays(name):
    """Neither "no gradient" nor "primal half" is what is said of a backward pass that the search does not find."""
    found = search(name)
    blind = replace(found, candidates=tuple(replace(c, backward=None) for c in found.candidates))
    sites = sites_of(PROGRAMS[name], blind)
    assert {s.fate for s in sites} == {"stays"}
    told = Outcome(name, "", "f32", sites)
    assert row("all", [told]).rate == 0


def test_rates_leave_out_what_has_no_gradient_and_primal_halves():
    names = ("attention/bare_rank3", "structured/encoder_scan_remat")
    told = [Outcome(n, "", "f32", sites_of(PROGRAMS[n], search(n))) for n in names]
    found = row("all", told)
    assert (found.sites, found.rate, found.rate_of_fusable) == (20, 8 / 10, 8 / 9)


@pytest.mark.parametrize("name", ["handwritten/swiglu", "attention/rotary", "norms/two_blocks"])
def test_cotangents_are_the_derivative_of_the_loss(name):
    step, shapes = PROGRAMS[name].make()
    args = arrays(shapes)
    found = fl.find(step, *args)
    checks = check_cotangents(found, args)
    assert checks
    assert all(c.error is not None and not c.wrong for c in checks)
    # The loss's derivative by a result is not the result itself.
    astray = [replace(c, backward=replace(c.backward, cotangent=c.root)) for c in found.candidates if c.backward]
    assert all(c.wrong for c in check_cotangents(replace(found, candidates=tuple(astray)), args))


def test_a_difference_from_the_original_is_seen():
    args = (jnp.linspace(1.0, 2.0, 8), jnp.arange(3))

    def step(x, n):
        return x, n

    told = equality(step, lambda x, n: (x.at[2].add(0.01), n), args)
    assert (told.error, told.leaf, told.leaves) == (pytest.approx(0.005, rel=1e-3), "[0]", 2)
    assert len(told.wrong) == 1
    assert equality(step, step, args).error == 0
    assert equality(step, lambda x, n: (x, n + 1), args).error == float("inf")
    assert equality(step, lambda x, n: (x, n + 1), args).wrong
    assert equality(step, lambda x, n: (x.at[2].set(jnp.nan), n), args).error == float("inf")


def test_a_leaf_that_is_nearer_to_float64_than_the_original_is_told_and_not_wrong():
    def step(x):
        return jnp.where(x > 0, x + 1e4, 0.0) - 1e4

    told = equality(step, lambda x: x, (jnp.linspace(0.1, 0.2, 8),))
    assert told.error > 1e-4
    assert (len(told.nearer), told.wrong) == (1, ())
    assert equality(lambda x: x, step, (jnp.linspace(0.1, 0.2, 8),)).wrong
