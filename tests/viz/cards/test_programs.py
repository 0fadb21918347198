"""The programs that the picture is judged on: they are what their names say, and building one computes nothing."""

from __future__ import annotations

import importlib.util

import jax
import pytest

from fusionlab.graph.program.trace import trace

from .programs import PROGRAMS

NAMES = [name for name, _ in PROGRAMS]


def built(name):
    if name == "BERT" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    return dict(PROGRAMS)[name]()


def test_there_are_ten_of_different_names():
    assert len(set(NAMES)) == len(PROGRAMS) == 10


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_shapes_alone(name):
    leaves = jax.tree.leaves(built(name)[1])
    # Only Equinox keeps functions among its leaves.
    assert [leaf for leaf in leaves if isinstance(leaf, jax.Array)] == []
    assert any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


@pytest.mark.parametrize(("name", "scopes"), [("transformer of 2 layers", True), ("MLP without scopes", False)])
def test_a_program_has_the_scopes_that_its_name_promises(name, scopes):
    function, args = built(name)
    nodes = list(trace(function, *args).nodes())
    assert any(node.scope for node in nodes) is scopes
