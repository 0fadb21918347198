"""The extra zoo is sound: what its programs are made of agrees with the truths about them, as for the zoo's."""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

import jax
import pytest
from zoo.catalogue import DTYPES, DtypeName, Model, Program
from zoo.kinds.flow import learned_products
from zoo.test_truths import PRIMITIVES, implied, imports, primitives
from zoo.truths import CONCEPTS, KINDS, truth

from .catalogue import EVERY, LEFT_OUT, MODELS, PINS, programs

HERE = Path(__file__).parent
IN_THE_ZOO = "transformers"  # its models come on top of those of other libraries


@pytest.mark.extra
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", EVERY, ids=lambda model: model.id)
def test_forward_program_agrees_with_its_truth(model: Model, dtype: DtypeName, require) -> None:
    require(model.id not in LEFT_OUT, LEFT_OUT.get(model.id))
    program = Program(model, dtype, "forward")
    function, args = program.make()
    jaxpr = alive(jax.make_jaxpr(function)(*args).jaxpr)
    found = Counter(PRIMITIVES[name] for name in primitives(jaxpr) if name in PRIMITIVES)
    expected = implied(program.truth)
    assert {name: found[name] for name in found | expected} == {name: expected[name] for name in found | expected}
    sites = program.truth.sites
    assert learned_products(jaxpr, len(jax.tree.leaves(args[0]))) == (sites["linear"], sites["linear_no_bias"])


def alive(jaxpr):
    """Without what no result needs, such as the weights of an attention that a library gives back as well."""
    return jax.interpreters.partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


@pytest.mark.parametrize("model", EVERY, ids=lambda model: model.id)
def test_truth_is_consistent(model: Model) -> None:
    told = truth(model.config)
    assert tuple(told.sites) == CONCEPTS
    assert told.sites["attention"] == sum(told.sites[kind] for kind in KINDS)
    assert set(told.structures) == {"glu_pair", "qkv_siblings", "row_parallel", "layer"}
    assert truth(model.config, "train").sites == told.sites


def test_the_list_has_what_it_was_made_for() -> None:
    others = [model for model in EVERY if model.library != IN_THE_ZOO]
    assert len(others) >= 14
    assert len({model.library for model in others}) >= 12
    assert {"transformers/opt", "transformers/gpt_neo", "transformers/gemma", "keras/bert"} <= {m.id for m in EVERY}
    assert {model.library for model in EVERY} == PINS.keys()
    assert len({model.id for model in EVERY}) == len(EVERY)
    assert all(Counter(p.model.id for p in programs())[model.id] == 4 for model in MODELS)


def test_the_extra_installs_the_pinned_releases() -> None:
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = dict(d.split("==") for d in project["optional-dependencies"]["zoo-extra"])
    assert pinned == PINS


MODULES = sorted(path for path in HERE.rglob("*.py") if path.name not in ("test_find.py", "test_spelled.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(HERE).as_posix())
def test_nothing_here_imports_fusionlab(path: Path) -> None:
    assert not {name for name in imports(path) if name.lstrip(".").split(".")[0] == "fusionlab"}
