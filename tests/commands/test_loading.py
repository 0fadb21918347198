"""`module:function` and its example arguments: found where the help says, refused with one sentence."""

import sys

import jax.numpy as jnp
import pytest

from fusionlab.commands.loading import example_arguments, keyword_arguments, load_function
from fusionlab.errors import ArgumentError
from fusionlab.models import mlp


@pytest.fixture(autouse=True)
def clean_imports(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("user_"):
            del sys.modules[name]


def write(folder, name, text):
    (folder / f"{name}.py").write_text(text)
    return str(folder / f"{name}.py")


def test_a_function_is_found_by_module_and_by_file(tmp_path, monkeypatch):
    assert load_function("fusionlab.models.mlp:apply")[0] is mlp.apply
    file = write(tmp_path, "user_a", "import user_b\ndef f(x): return x + user_b.ONE\n")
    write(tmp_path, "user_b", "ONE = 1\n")
    assert load_function(f"{file}:f")[0](2) == 3
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "user_c", "class Net:\n    @staticmethod\n    def apply(x): return x * 2\n")
    assert load_function("user_c:Net.apply")[0](4) == 8


def test_a_file_may_define_dataclasses(tmp_path):
    text = "from __future__ import annotations\nimport dataclasses\n"
    text += "@dataclasses.dataclass\nclass C:\n    n: int = 2\ndef f(x): return x + C().n\n"
    assert load_function(f"{write(tmp_path, 'user_d', text)}:f")[0](1) == 3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fusionlab.models.mlp", "needed module:function"),
        (":f", "needed module:function"),
        ("no_such_module:f", "importing 'no_such_module' raised ModuleNotFoundError"),
        ("nowhere/model.py:f", "there is no file 'nowhere/model.py'"),
        ("fusionlab.models.mlp:aply", r"has no 'aply'; it has .*apply"),
        ("fusionlab.models.layers:ACTIVATIONS", "is a dict, not a function"),
    ],
)
def test_a_bad_module_spec_is_one_argument_error(spec, message):
    with pytest.raises(ArgumentError, match=message):
        load_function(spec)


def test_a_module_that_raises_is_named(tmp_path):
    file = write(tmp_path, "user_broken", "1 / 0\n")
    with pytest.raises(ArgumentError, match=r"user_broken\.py' raised ZeroDivisionError: division by zero"):
        load_function(f"{file}:f")
    assert "user_broken" not in sys.modules


def args_of(folder, text, expression=None):
    function, module = load_function(f"{write(folder, 'user_m', text)}:f")
    return example_arguments(function, module, expression)


def test_arguments_come_from_the_expression_then_the_function_then_the_module(tmp_path):
    text = "def f(x): return x\nN = 3\nf.example_args = (N,)\nexample_args = (4,)\n"
    assert args_of(tmp_path, text, "(N * 2, jnp.float32)") == (6, jnp.float32)
    assert args_of(tmp_path, text) == (3,)
    assert args_of(tmp_path, text.replace("f.example_args", "other")) == (4,)
    assert args_of(tmp_path, "def f(x): return x\nexample_args = {'f': lambda: (5, 6)}\n") == (5, 6)


def test_one_argument_needs_no_tuple(tmp_path):
    assert args_of(tmp_path, "def f(x): return x\n", "[1, 2]") == ([1, 2],)


def test_missing_or_failing_arguments_are_one_argument_error(tmp_path):
    with pytest.raises(ArgumentError, match="f needs example arguments: give --args"):
        args_of(tmp_path, "def f(x): return x\n")
    with pytest.raises(ArgumentError, match="f needs example arguments"):
        args_of(tmp_path, "def f(x): return x\nexample_args = {'g': (1,)}\n")
    with pytest.raises(ArgumentError, match="raised NameError: name 'nope' is not defined"):
        args_of(tmp_path, "def f(x): return x\n", "nope")


def test_keyword_arguments_come_from_an_expression_in_the_modules_names(tmp_path):
    _, module = load_function(f"{write(tmp_path, 'user_k', 'N = 3' + chr(10) + 'def f(x): return x' + chr(10))}:f")
    assert keyword_arguments(module, None) == {}
    assert keyword_arguments(module, "dict(n=N, x=jnp.float32)") == {"n": 3, "x": jnp.float32}
    for text in ("(1, 2)", "{1: 2}"):
        with pytest.raises(ArgumentError, match="needed a dict of names"):
            keyword_arguments(module, text)
    with pytest.raises(ArgumentError, match="evaluating --kwargs 'nope' raised NameError"):
        keyword_arguments(module, "nope")
