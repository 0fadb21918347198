"""Loading what FusionLab wrote, or what somebody says it wrote, runs nothing and fails as one clear error."""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fusionlab as fl
from fusionlab.cli import main
from fusionlab.errors import ArgumentError, FusionLabError
from fusionlab.evidence.comparison import Evidence
from fusionlab.evidence.instruments.record import load_json, newest_record
from fusionlab.kernels.choose import choices
from fusionlab.testing import snapshots

PACKAGE = Path(fl.__file__).parent
FILES = sorted([*PACKAGE.rglob("*.py"), PACKAGE.parent / "fusionlab_pytest.py"])
# Modules that make objects, and so run code, from bytes.
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "code", "codeop", "runpy"}
CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
# numpy's and JAX's own ways to run what a file says; `shell=True`, by which a text is a command.
ATTRIBUTES = {"load_module", "exec_module", "deserialize_and_load", "literal_eval_unsafe", "system", "popen"}
SWITCHES = {"allow_pickle", "shell"}
# Where the user's own code is run, because that is what was asked for: the function and the `--args` of the command line.
ALLOWED = {
    ("fusionlab/commands/loading.py", "eval"),
    ("fusionlab/commands/loading.py", "exec_module"),
    # The source that `minimise` has just written of a traced program, to see that it shows the fault as well.
    ("fusionlab/evidence/blame/repro.py", "compile"),
    ("fusionlab/evidence/blame/repro.py", "exec"),
}


def running(code: str) -> Iterator[tuple[str, int]]:
    """(what, line) for whatever in a source could run what was loaded."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = []
        yield from ((n, node.lineno) for n in names if n.partition(".")[0] in MODULES)
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in CALLS:
            yield node.func.id, node.lineno
        if isinstance(node.func, ast.Attribute) and node.func.attr in ATTRIBUTES:
            yield node.func.attr, node.lineno
        if isinstance(node.func, ast.Attribute) and node.func.attr == "import_module" and node.args:
            named = node.args[0]
            if isinstance(named, ast.Constant) and str(named.value).partition(".")[0] in MODULES:
                yield str(named.value), node.lineno
        for switch in node.keywords:
            off = isinstance(switch.value, ast.Constant) and switch.value.value is False
            if switch.arg in SWITCHES and not off:
                yield f"{switch.arg}=", node.lineno


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from marshal import loads",
        "import yaml.loader",
        "eval(text)",
        "exec(text)",
        "np.load(f, allow_pickle=True)",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
        "importlib.import_module('pickle')",
    ],
)
def test_what_runs_a_text_is_seen(code):
    assert list(running(code))


def test_what_runs_nothing_is_not_seen():
    assert not list(running("re.compile(text)\nlowered.compile()\nnp.load(f, allow_pickle=False)\njson.loads(text)"))


def test_nothing_in_the_package_runs_what_it_loads_but_the_command_line_the_users_own_function():
    found = {
        (str(path.relative_to(PACKAGE.parent)), what)
        for path in FILES
        for what, _ in running(path.read_text(encoding="utf-8"))
    }
    assert found == ALLOWED


# What is loaded, as an attacker would write it.

HOSTILE = {
    "pickle": b"cbuiltins\nexec\n(S'import builtins; builtins.ran = True'\ntR.",
    "yaml": b"!!python/object/apply:builtins.exec ['import builtins; builtins.ran = True']",
    "python": b"__import__('builtins').__dict__.update(ran=True)",
    "nested": b"[" * 200_000,
    "digits": b"9" * 5000,
    "empty": b"",
    "bytes": bytes(range(256)),
    "cut": b'{"name": "f", "timing": {"before": ',
    "another object": json.dumps({"__class__": "os.system", "py/object": "os.system", "__reduce__": ["id"]}).encode(),
    "values of another kind": json.dumps(
        dict.fromkeys(
            "name environment timing timing_grad numerics memory memory_grad same_code notes".split(),
            "__import__('os')",
        )
    ).encode(),
}


@pytest.fixture(params=HOSTILE.values(), ids=HOSTILE)
def file(request, tmp_path):
    path = tmp_path / "artefact.json"
    path.write_bytes(request.param)
    yield path
    ran = getattr(builtins, "ran", False)
    if ran:
        del builtins.ran
    assert not ran


_started: list[str] = []
_EVENTS = {"os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class"}
sys.addaudithook(lambda event, _: _started.append(event) if event in _EVENTS else None)


@pytest.fixture(autouse=True)
def watched():
    """No artefact starts a program or unpickles an object."""
    _started.clear()
    yield
    assert _started == []


def test_a_comparison(file):
    with pytest.raises(ArgumentError, match=r"artefact\.json"):
        Evidence.load(file)


def test_the_command_that_compares_two_records(file, capsys):
    assert main(["diff", str(file), str(file)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("fusionlab: error: ")
    assert len(said.splitlines()) == 1


def test_a_plan_file(file):
    with pytest.raises(ArgumentError, match=r"artefact\.json is not a plan file"):
        choices.read_plan_file(file, "")


def test_a_strategy(file):
    text = file.read_bytes().decode("latin-1")
    try:
        made = fl.Strategy.from_json(text)
    except ArgumentError:
        return
    with pytest.raises(FusionLabError):  # names of passes that do not exist
        fl.find(lambda x: x, 1.0, passes=made)


def test_a_snapshot(file):
    text = file.read_bytes()
    try:
        text.decode()
    except UnicodeDecodeError:
        expected = FusionLabError
    else:
        expected = snapshots.FusionAssertionError
    with pytest.raises(expected):
        snapshots.check_snapshot(file, "what is there today", update=False)
    assert file.read_bytes() == text


def test_a_record_of_a_benchmark(file):
    data = file.read_bytes()
    if data.startswith(b'{"') and data.endswith(b"}"):
        assert isinstance(load_json(file), dict)
        assert newest_record(file.parent, "gemm_epilogue") is None
        return
    with pytest.raises(ArgumentError, match=r"artefact\.json"):
        load_json(file)
    with pytest.raises(ArgumentError, match=r"artefact\.json"):
        newest_record(file.parent, "gemm_epilogue")


def test_the_state_of_an_explorer(file):
    with pytest.raises(ArgumentError, match=r"artefact\.json"):
        fl.load(file)


CODE = "__import__('builtins').__dict__.update(ran=True)"
STATE = Path(__file__).parents[1] / "recorded" / "explorer.json"


def with_code(data: object, key: str = "") -> object:
    """The same data with code for every text but its format."""
    if isinstance(data, dict):
        return {k: with_code(v, k) for k, v in data.items()}
    if isinstance(data, list):
        return [with_code(v, key) for v in data]
    return f"{CODE}  # {data}" if isinstance(data, str) and key != "format" else data


@pytest.mark.parametrize("part", ["function", "program", "device", "setting", "decisions", "measured"])
def test_the_state_of_an_explorer_whose_texts_are_code(part, tmp_path):
    state = json.loads(STATE.read_text(encoding="utf-8"))
    path = tmp_path / "lab.json"
    path.write_text(json.dumps(state | {part: with_code(state[part])}), encoding="utf-8")
    with contextlib.suppress(FusionLabError):  # a part that has to be one of few words
        saved = fl.load(path)
        assert repr(saved)
        assert saved.to_dict()[part] == with_code(state[part])
    assert not hasattr(builtins, "ran")
