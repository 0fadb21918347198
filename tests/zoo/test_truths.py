"""The zoo is sound: its programs trace, and what they are made of agrees with the truths about them.

Primitives are counted in the traced forward programs and compared with what the sites imply, and learned products are told
apart by following the parameters. That does not prove a truth (the kind of a mask is not seen), but a wrong number of
layers, products, biases, attentions, norms or activations shows.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from .catalogue import DTYPES, LEFT_OUT, MODELS, DtypeName, Model, Program, programs
from .config import GROUPED, Sizes
from .kinds.flow import learned_products
from .truths import CONCEPTS, KINDS, Truth, tally, truth

HERE = Path(__file__).parent
PRIMITIVES = {
    "dot_general": "dot",
    "exp": "exp",
    "tanh": "tanh",
    "logistic": "logistic",
    "erf": "erf",
    "erfc": "erf",
    "rsqrt": "root",
    "sqrt": "root",
}


def primitives(jaxpr: Any) -> Iterator[str]:
    """The names of a jaxpr's primitives, and of those in the jaxprs that its equations hold."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from primitives(inner)


def implied(answer: Truth) -> Counter[str]:
    """How many primitives of each kind the sites of a forward program imply, with what the truth says beyond them."""
    sites = answer.sites
    return Counter(
        {
            "dot": sites["linear"] + sites["linear_no_bias"] + 2 * sites["attention"],
            "exp": sites["attention"] + sites["softmax"],
            "tanh": sites["gelu_tanh"] + sites["tanh"],
            "logistic": sites["silu"] + sites["sigmoid"],
            "erf": sites["gelu_erf"],
            "root": sites["layer_norm"] + sites["rms_norm"],
        }
    ) + Counter(answer.evidence)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.id)
def test_forward_program_agrees_with_its_truth(model: Model, dtype: DtypeName) -> None:
    program = Program(model, dtype, "forward")
    function, args = program.make()
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    names = (PRIMITIVES.get(name) for name in primitives(jaxpr))
    found = Counter(name for name in names if name is not None)
    expected = implied(program.truth)
    assert {name: found[name] for name in found | expected} == {name: expected[name] for name in found | expected}
    leaves = len(jax.tree.leaves(args[0]))
    assert leaves == program.truth.leaves
    sites = program.truth.sites
    assert learned_products(jaxpr, leaves) == (sites["linear"], sites["linear_no_bias"])
    wide = [leaf.dtype for leaf in jax.tree.leaves(args[1:]) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert all(kind == DTYPES[dtype] for kind in wide)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.id)
def test_truth_is_consistent(model: Model) -> None:
    forward, train = truth(model.config), truth(model.config, "train")
    assert tuple(forward.sites) == CONCEPTS
    assert all(number >= 0 for number in train.sites.values())
    assert forward.sites["attention"] == sum(forward.sites[kind] for kind in KINDS)
    same = [concept for concept in CONCEPTS if not concept.startswith("lerp")]
    assert [forward.sites[concept] for concept in same] == [train.sites[concept] for concept in same]
    assert {name for name in tally(model.config) if not name.startswith("+")} <= {*CONCEPTS, "leaves"}


def test_every_model_has_a_name_of_its_own() -> None:
    names = Counter(program.id for program in programs())
    assert max(names.values()) == 1
    assert len(names) == 4 * len(MODELS)
    assert len(MODELS) >= 64
    assert {"linen/mlp_relu-f32-train", "handwritten/swiglu-bf16-forward"} <= names.keys()
    assert all(why for why in LEFT_OUT.values())
    assert not LEFT_OUT.keys() & {model.id for model in MODELS}


def test_every_concept_occurs() -> None:
    sites: Counter[str] = Counter()
    for program in programs():
        sites.update(program.truth.sites)
    assert all(sites[concept] > 0 for concept in CONCEPTS)


@pytest.mark.parametrize("sizes", [Sizes(), GROUPED], ids=["plain", "grouped"])
def test_axes_are_of_different_lengths(sizes: Sizes) -> None:
    lengths = [sizes.batch, sizes.length, sizes.keys, sizes.model, sizes.heads, sizes.head, sizes.hidden, sizes.out]
    lengths += [sizes.vocab, sizes.kv_heads]
    assert len(set(lengths)) == len(lengths)
    assert sizes.heads * sizes.head == sizes.model


def imports(path: Path) -> set[str]:
    """The names of the modules that a file imports; those of this package start with a dot."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {"." * node.level + (node.module or alias.name) for alias in node.names}
    return names


@pytest.mark.parametrize("path", sorted(HERE.glob("*.py")), ids=lambda path: path.name)
def test_nothing_here_imports_fusionlab(path: Path) -> None:
    assert not {name for name in imports(path) if name.lstrip(".").split(".")[0] == "fusionlab"}
    if path.name in ("truths.py", "config.py"):
        assert {name for name in imports(path) if name.startswith(".")} <= {".config"}
        assert not {name for name in imports(path) if name.split(".")[0] in ("jax", "flax", "numpy")}
