"""One table of primitive families: no other place lists a family again."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import fusionlab
import fusionlab as fl
from fusionlab.graph.cost.rules import COST_RULES, EXPANDED, TRANSCENDENTAL
from fusionlab.graph.primitives import FAMILIES, families_of, having

PACKAGE = Path(fusionlab.__file__).parent
TABLE = PACKAGE / "graph" / "primitives.py"


def names_in(node: ast.AST) -> frozenset[str] | None:
    """The names that an expression lists: a set, a tuple, or a text that is split."""
    match node:
        case ast.Call(func=ast.Attribute(attr="split", value=ast.Constant(value=str(text))), args=[]):
            return frozenset(text.split())
        case ast.Set(elts=elts) | ast.Tuple(elts=elts) | ast.List(elts=elts):
            texts = [e.value for e in elts if isinstance(e, ast.Constant) and isinstance(e.value, str)]
            return frozenset(texts) if len(texts) == len(elts) else None
        case _:
            return None


def listed() -> Iterator[tuple[str, frozenset[str]]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if path == TABLE:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = names_in(node)
            if names:
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", names


def test_no_other_place_lists_a_whole_family():
    """Of three names or more: two that are looked for together need not be meant as one."""
    families = {names: family for family, names in FAMILIES.items() if len(names) > 2}
    again = [f"{where}: {families[names]}" for where, names in listed() if names in families]
    assert not again


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_members_and_each_names_it(family):
    assert FAMILIES[family]
    assert all(family in families_of(name) for name in FAMILIES[family])


def test_an_unknown_family_is_an_error():
    with pytest.raises(KeyError):
        having("no such family")


def test_what_is_counted_is_known():
    """Entry by entry, a function is counted once: as one that XLA has an instruction for, or as one that it writes out."""
    functions = having(
        "exponential", "logarithm", "trigonometric", "hyperbolic", "sigmoid", "inverse error", "cube root"
    )
    assert functions <= TRANSCENDENTAL | EXPANDED.keys()
    assert not TRANSCENDENTAL & EXPANDED.keys()
    for family in ("addition", "difference", "scaling", "extreme", "equality", "order", "reduction", "device sum"):
        assert FAMILIES[family] <= COST_RULES.keys()


def test_sums_over_devices_are_one_family_wherever_they_are_read():
    """What is found as one is searched, evaluated and counted as one."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")

    def program(x):
        return jax.shard_map(
            lambda x: jax.lax.psum(x, "d"), mesh=mesh, in_specs=spec, out_specs=jax.sharding.PartitionSpec()
        )(x)

    graph = fl.trace(program, jnp.ones((4, 4)))
    made = {n.primitive for n in graph.nodes() if "axes" in n.params and "psum" in n.primitive}
    assert made
    assert made <= FAMILIES["device sum"]
