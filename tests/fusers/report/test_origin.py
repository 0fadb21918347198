"""Each rejection says which line of FusionLab declined it, and `explain(id, origin=True)` shows that."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from soundness.near_misses import CORPUS

import fusionlab as fl
from fusionlab.fusers.engine.outcomes import Rejection

PACKAGE = Path(fl.__file__).parent
ORIGIN = re.compile(r"([\w/]+\.py):(\d+) in ([\w<>]+)")
X, W, B = jnp.ones((4, 8)), jnp.ones((8, 16)), jnp.ones(16)


def lines_of(file: str, function: str) -> list[range]:
    """Where the functions of a name stand in a file of the package; the whole file for a lambda or a comprehension."""
    tree = ast.parse((PACKAGE / file).read_text(encoding="utf-8"))
    if function.startswith("<"):
        return [range(1, 10_000)]
    found = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function)
    return [range(n.lineno, (n.end_lineno or 0) + 1) for n in found]


@pytest.mark.parametrize("entry", [e for e in CORPUS if e.code], ids=str)
def test_the_origin_is_a_line_of_the_function_that_it_names(entry):
    rejections = fl.find(entry.fn, *entry.args).rejections
    assert rejections
    for one in rejections:
        file, line, function = ORIGIN.fullmatch(one.origin).groups()
        assert file.startswith(("fusers/", "graph/"))
        assert file not in ("fusers/engine/outcomes.py", "fusers/engine/origin.py", "fusers/engine/declining.py")
        assert any(int(line) in lines for lines in lines_of(file, function)), one.origin


def declined():
    """A linear layer whose activation is none that is known."""
    found = fl.find(lambda x, w, b: jnp.sin(x @ w + b) ** 3, X, W, B)
    (one,) = [r for r in found.rejections if r.code == "activation"]
    return found, one


def test_explain_shows_it_where_it_is_asked_for():
    found, one = declined()
    assert f"\n  declined at {one.origin}" in found.explain(one.id, origin=True)
    assert "declined at" not in found.explain(one.id)
    node = found.graph.node_by_id[one.node_ids[0]]
    assert f"declined at {one.origin}" in found.explain(node, origin=True)
    assert one.to_dict()["origin"] == one.origin
    fused = fl.find(lambda x, w: jax.nn.relu(x @ w), X, W)
    assert "declined at" not in fused.explain(fused.candidates[0].id, origin=True)


def test_a_rejection_that_is_said_in_other_words_keeps_the_line_that_declined_it():
    _, one = declined()
    assert replace(one, sentence="others").origin == one.origin


def test_where_a_reason_was_raised_it_is_the_line_that_raised_it():
    class Reason(Exception):  # noqa: N818 - as those that answer a search
        pass

    def raises():
        raise Reason("for a reason")

    def made(sentence):
        return Rejection("p@#1", "p", "structure", sentence, (), frozenset(), 0, 1, None)

    try:
        raises()
    except Reason as reason:
        told, other = made(f"%1 = add: {reason}"), made("for another")
    line = raises.__code__.co_firstlineno + 1
    assert told.origin == f"test_origin.py:{line} in raises"
    assert other.origin == ""  # no function of FusionLab is on the stack
