"""What README says is so: its commands, its snippet, its names, its links, its numbers."""

import contextlib
import io
import json
import re
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import fusionlab as fl
from fusionlab import cli
from fusionlab.commands.demo import mebibytes
from fusionlab.evidence.instruments.timing import seconds
from fusionlab.viz.export import CAPTION

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.M | re.S)


def blocks(language):
    return [body for lang, body in BLOCKS if lang == language]


def test_readme_has_exactly_the_two_set_up_commands():
    assert re.findall(r"^python3 -m venv .*$", README, re.M) == [
        "python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/fusionlab demo -o demo",
        "python3 -m venv .venv && .venv/bin/pip install -e '.[dev]' && .venv/bin/python -m pytest",
    ]
    assert [line for body in blocks("sh") for line in body.splitlines() if line.startswith("python3")] == re.findall(
        r"^python3 .*$", README, re.M
    )


@pytest.fixture(scope="module")
def snippet_output():
    """What the first Python block prints, run as it stands."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(blocks("python")[0], "model.py", "exec"), {})
    return out.getvalue()


def test_the_snippet_has_ten_lines_at_most():
    lines = [line for line in blocks("python")[0].splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) <= 10


def test_the_snippet_runs_and_prints_what_readme_shows(snippet_output):
    shown = blocks("text")[0].strip().splitlines()
    assert shown
    for line in shown:
        assert line in snippet_output.splitlines()


def test_the_train_loop_trains_and_donates():
    (loop,) = [text for text in blocks("python") if "train_step(model, optimizer" in text]
    names = {"fl": fl, "nnx": nnx, "jnp": jnp}
    exec(compile(loop, "loop.py", "exec"), names)
    model = nnx.Sequential(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(16, 8, rngs=nnx.Rngs(1)))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    x = jnp.ones((4, 8))
    assert names["train_step"].findings(model, optimizer, x, x).counts()["gemm_epilogue_grad"] == 2
    first = model.layers[0].kernel[...]
    losses = [float(names["train_step"](model, optimizer, x, x)) for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    assert first.is_deleted()


def test_every_pass_and_op_is_named_and_none_is_invented():
    names = {p.name for p in fl.passes()}
    table = re.findall(r"^\| `(\w+)` \|", README, re.M)
    assert names == set(table)
    ops = set(re.findall(r"`fl\.ops\.(\w+)`", README))
    assert ops == {n for n in fl.ops.__all__ if callable(getattr(fl.ops, n))}


def test_every_command_is_listed_and_none_is_invented():
    listed = re.findall(r"^fusionlab (\w+) ", README, re.M)
    actions = cli._parser()._subparsers._group_actions  # type: ignore[union-attr]
    assert sorted(set(listed)) == sorted(actions[0].choices)


def test_the_supported_versions_are_those_of_the_package():
    with open(ROOT / "pyproject.toml", "rb") as f:
        project = tomllib.load(f)["project"]
    assert project["requires-python"] == ">=3.11"
    assert "Python 3.11" in README
    assert "jax>=0.10" in project["dependencies"]
    assert "JAX 0.10" in README


def test_every_relative_link_and_picture_exists():
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert any(t.endswith(".svg") for t in targets)
    for target in targets:
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


def test_the_picture_was_drawn_by_the_project():
    picture = (ROOT / "docs" / "overview.svg").read_text(encoding="utf-8")
    assert CAPTION in picture
    assert "dot_product_attention" in picture


def numbers_in(record):
    """Every number of a JSON record, at any depth."""
    if isinstance(record, dict | list):
        for inner in record.values() if isinstance(record, dict) else record:
            yield from numbers_in(inner)
    elif isinstance(record, int | float):
        yield float(record)


def test_every_number_of_a_table_stands_in_its_record():
    rows = re.findall(r"^(\|.*)\[record\]\((benchmarks/[^)]+\.json)\) \|$", README, re.M)
    assert len(rows) == README.count("[record](")
    for row, record in rows:
        cells = re.findall(r"\| ([\d.]+ (?:s|ms|µs|us|ns|MiB)) (?=\|)", row.replace(" us ", " µs "))
        assert len(cells) >= 2, row
        numbers = list(numbers_in(json.loads((ROOT / record).read_text())))
        written = {form(n) for n in numbers for form in (seconds, mebibytes)}
        assert set(cells) <= written, record


def test_the_snippet_fuses_a_flax_model_and_prints_a_rejection_with_its_edit(snippet_output):
    assert "from flax import" in blocks("python")[0]
    assert "fl.fuse(" in blocks("python")[0]
    assert re.search(r"^gemm_epilogue: [1-9]\d* subgraphs can be fused", snippet_output, re.M)
    declined = snippet_output.partition("declined:\n")[2].splitlines()
    assert re.match(r"  \[\w+\] gemm_epilogue@#2 at model\.py:9: ", declined[0])
    assert declined[1].startswith("    edit: ")
    assert "compiled peak memory" in snippet_output


def test_the_pass_of_one_s_own_is_one():
    (body,) = [b for b in blocks("python") if "pattern_pass" in b]
    source = 'extern "C" __global__ void softcap(const T* x, T* out, long long m, float cap) {}'
    names = {"fl": fl, "jnp": jax.numpy, "SOURCE": source}
    exec(compile(body, "README.md", "exec"), names)
    try:
        found = fl.find(lambda x: 30 * jax.numpy.tanh(x / 30), jax.ShapeDtypeStruct((8, 8), "float32"))
        assert found.counts()["softcap"] == 1
    finally:
        fl.unregister("softcap")
