"""The mutants that are drawn of the package, and how it is noted which tests come by their places."""

from __future__ import annotations

import functools
import sys
import types
from collections import Counter
from pathlib import Path

import pytest

from tests import mutation
from tests.mutation import KINDS, ROOMS, Mutant, Run, Source

pool = functools.cache(functools.partial(mutation.sites_of, mutation.ROOT))


@functools.cache
def thirty():
    return mutation.draw(pool=pool())


def sites(tmp_path, code):
    path = tmp_path / mutation.PACKAGE / "graph" / "module.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code, encoding="utf-8")
    return list(mutation._sites_in("graph", Source(tmp_path, path)))


# -- the draw of this package -----------------------------------------------------------------------------------------


def test_six_mutants_of_each_room_and_each_kind_of_them():
    mutants = thirty()
    assert [m.number for m in mutants] == list(range(1, 31))
    assert Counter(m.site.room for m in mutants) == dict.fromkeys(ROOMS, 6)
    assert {(m.site.room, m.site.kind) for m in mutants} == {(room, kind) for room in ROOMS for kind in KINDS}
    assert len({(m.site.source.path, m.site.edit) for m in mutants}) == 30


def test_a_seed_draws_the_same_again_and_another_seed_others():
    told = [m.to_dict() for m in thirty()]
    assert told == [m.to_dict() for m in mutation.draw(pool=pool())]
    assert told != [m.to_dict() for m in mutation.draw(seed=mutation.SEED + 1, pool=pool())]


def test_a_mutant_compiles_and_differs_from_its_file_in_one_place():
    for m in thirty():
        before, after = m.site.source.data, m.site.mutated()
        compile(after, m.site.source.path, "exec", dont_inherit=True)
        start, end, new = m.site.edit
        assert before[start:end] != new
        assert len(after) == len(before) + len(new) - (end - start)
        assert after.startswith(before[:start])
        assert after.endswith(before[end:])
        assert mutation.diff_text(m).count("\n@@") == 1


def test_files_with_probes_compile():
    probed = mutation.with_probes(thirty())
    wanted = {m.number for m in thirty() if mutation.probe_of(m) is not None}
    assert len(wanted) > 15
    for path, data in probed.items():
        compile(data, path, "exec", dont_inherit=True)
    assert {n for n in range(1, 31) if any(b"__probe__(%d)" % n in data for data in probed.values())} == wanted


# -- the five kinds ---------------------------------------------------------------------------------------------------

EXAMPLES = [
    ("x = 1", "coefficient", ["x = 2"]),
    ("x = 1e-5 * y", "coefficient", ["x = 0.001 * y"]),
    ("x = f(0.5, 1.0, 300)", "coefficient", ["x = f(0.25, 1.0, 300)", "x = f(0.5, 2.0, 300)", "x = f(0.5, 1.0, 150)"]),
    ("x: Literal[1] = True", "coefficient", []),
    ("x = text[:80] + y[1:]", "coefficient", ["x = text[:80] + y[2:]"]),
    ("@cache(maxsize=3)\ndef f(): return f'{1:5}'", "coefficient", []),
    ("class A:\n    def __repr__(self): return 1", "coefficient", []),
    ("x = (a) < (b) <= c", "comparison", ["x = (a) <= (b) <= c", "x = (a) < (b) < c"]),
    ("x = a is b", "comparison", ["x = a is not b"]),
    ("x = a  not  in b", "comparison", ["x = a  in b"]),
    ("x = (a + b) * c", "dropped operand", ["x = (a + b)", "x = (a) * c"]),
    ("x = a and (b) and c", "dropped operand", ["x = (b) and c", "x = a and c", "x = a and (b)"]),
    ("x = f((a, b), [c, d,])", "dropped operand", ["x = f((a,), [c, d,])", "x = f((a, b), [c,])"]),
    ("x = a | None", "dropped operand", []),
    ("if TYPE_CHECKING:\n    x = a + b", "dropped operand", []),
    ("x = f(a, axis=-1)", "swapped axis", ["x = f(a, axis=-2)"]),
    ("x = f(a, in_axes=(0, None))", "swapped axis", ["x = f(a, in_axes=(1, None))"]),
    ("x = a.shape[0] + b[0]", "swapped axis", ["x = a.shape[1] + b[0]"]),
    ("x = a.transpose(0, 2)", "swapped axis", ["x = a.transpose(1, 2)", "x = a.transpose(0, 1)"]),
    ("x = f((a), b=1, *c)\ny = f(a, g(b), c)", "swapped arguments", ["x = f((a), b=1, *c)\ny = f(g(b), a, c)"]),
    ("def f():\n    raise ValueError(\n        1\n    )", "unhandled message", ["def f():\n    pass"]),
    ("if a:\n    raise ValueError", "unhandled message", ["if a:\n    pass"]),
    ("if a == 'b':\n    f()\nelif c:\n    g()", "unhandled message", ["if False:\n    f()\nelif c:\n    g()"]),
    ("def f():\n    if a:\n        return 'no'", "unhandled message", ["def f():\n    if False:\n        return 'no'"]),
    ("match a:\n    case 'b':\n        f()", "unhandled message", ["match a:\n    case 'b' if False:\n        f()"]),
    ("X = {'a': f, 'b': g}", "unhandled message", ["X = {'b': g}", "X = {'a': f}"]),
]


@pytest.mark.whole
@pytest.mark.parametrize(("code", "kind", "mutants"), EXAMPLES, ids=[f"{i} {e[1]}" for i, e in enumerate(EXAMPLES)])
def test_each_kind_of_mutant(code, kind, mutants, tmp_path):
    found = [s for s in sites(tmp_path, f"é = 'ß'; {code}" if code.startswith("x =") else code) if s.kind == kind]
    assert [s.mutated().decode().removeprefix("é = 'ß'; ") for s in found] == mutants


def test_what_cannot_compile_is_not_drawn(tmp_path):
    (site,) = (s for s in sites(tmp_path, "x = (a  # why\n     + b)") if s.kind == "dropped operand")
    assert not site.compiles()
    assert mutation._drawn([site], "seed", 1) == []


def test_a_mutant_is_told_by_its_function_and_its_text(tmp_path):
    (site,) = sites(tmp_path, "class A:\n    def f(self):\n        def g():\n            return 7\n")
    told = Mutant(1, site).to_dict()
    assert (told["file"], told["function"], told["line"]) == ("fusionlab/graph/module.py", "A.f.g", 4)
    assert (told["before"], told["after"]) == ("return 7", "return 8")


# -- probes -----------------------------------------------------------------------------------------------------------

PROGRAM = '''"""A docstring."""

from __future__ import annotations

from functools import cache, partial

TOP = 100
late = lambda x: x * 101  # noqa: E731


@cache
def kept():
    return 102


def chosen(x):
    """Another."""
    if x == 103: return 1030
    elif x == 104 or x == 105:
        return [
            106
        ]
    while x > 107:
        x -= 108
    @partial
    def inner(y=109):
        return y + 110
    return inner
'''
NUMBERS = {100: None, 101: True, 102: None, 103: True, 1030: False, 104: True, 105: True}
NUMBERS |= {106: False, 107: True, 108: True, 109: True, 110: False}


def test_a_probe_notes_that_its_place_runs_and_changes_nothing(tmp_path, monkeypatch):
    found = [s for s in sites(tmp_path, PROGRAM) if s.kind == "coefficient" and s.edit]
    mutants = [Mutant(int(s.source.data[s.edit[0] : s.edit[1]]), s) for s in found]
    assert {m.number for m in mutants} == set(NUMBERS)
    assert {m.number for m in mutants if mutation.probe_of(m) is None} == {
        n for n, runs in NUMBERS.items() if runs is None
    }
    (data,) = mutation.with_probes(mutants).values()
    noted = set()
    probe = types.ModuleType("fusionlab._probe")
    probe.__probe__ = noted.add
    monkeypatch.setitem(sys.modules, probe.__name__, probe)
    names = {}
    exec(compile(data, "module.py", "exec", dont_inherit=True), names)
    assert not noted
    assert names["late"](2) == 202
    assert names["chosen"](110).args == ()
    assert noted == {n for n, runs in NUMBERS.items() if runs}
    assert names["chosen"](104) == [106]
    assert names["chosen"](103) == 1030
    assert names["chosen"](1)(2) == 112
    assert noted == {n for n, runs in NUMBERS.items() if runs is not None}


def test_a_written_probe_names_the_test_once_a_process(tmp_path, monkeypatch):
    names = {}
    exec(mutation._PROBE_MODULE.format(variable=mutation.PROBES, elsewhere=str(tmp_path / "elsewhere")), names)
    monkeypatch.setenv(mutation.PROBES, str(tmp_path))
    for test in ("tests/a.py::one (call)", "tests/a.py::two[x (y)] (setup)", "tests/a.py::one (call)"):
        monkeypatch.setenv("PYTEST_CURRENT_TEST", test)
        names["__probe__"](3)
    noted = list(mutation._read_probes(tmp_path))
    assert noted == [(3, "tests/a.py::one (call)"), (3, "tests/a.py::two[x (y)] (setup)")]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("current", "counts"),
    [
        ("tests/a/test_b.py::test_c (call)", "tests/a/test_b.py::test_c"),
        ("tests/a/test_b.py::test_c[d (call)] (teardown)", "tests/a/test_b.py::test_c[d (call)]"),
        ("tests/a/test_b.py::test_c (setup)", "tests/a/test_b.py"),  # a fixture's, which others read as well
        ("test_inner.py::test_c (call)", "tests/a/test_b.py"),  # pytest, run by a test
        ("", "tests/a/test_b.py"),  # an import
    ],
)
def test_a_hit_counts_for_a_test_or_for_its_file(current, counts):
    assert mutation.id_of(current, "tests/a/test_b.py") == counts


def test_a_test_on_several_devices_hits_what_any_other_of_them_does():
    mutants = [m for m in thirty() if mutation.probe_of(m) is not None][:2]
    hits = {m.number: set() for m in thirty()}
    first, second = (m.number for m in mutants)
    hits[first], hits[second] = {"tests/a.py::one"}, {"tests/a.py::three"}
    told = mutation._settled(mutation.SEED, thirty(), hits, {"tests/a.py::one", "tests/b.py::two"})["hits"]
    assert told[str(first)] == ["tests/a.py::one", "tests/b.py::two"]
    assert told[str(second)] == ["tests/a.py::three"]
    assert {told[str(m.number)] for m in thirty() if mutation.probe_of(m) is None} <= {"all"}


# -- runs -------------------------------------------------------------------------------------------------------------


def test_the_own_room_comes_first_and_every_test_file_once():
    steps = mutation.steps_of(mutation.ROOT, "graph")
    assert steps[0] == ("tests/graph", ["tests/graph"])
    paths = [path for _, paths in steps for path in paths]
    assert len(set(paths)) == len(paths)
    files = mutation._test_files(mutation.ROOT)
    assert all(sum(mutation._is_below(f, p) for p in paths) == 1 for f in files)


def test_hits_narrow_the_steps_to_files_or_to_tests(tmp_path):
    steps = [("own", ["tests/a"]), ("the rest", ["tests/b", "tests/test_c.py"])]
    hits = ["tests/a/test_x.py::one[tests/b]", "tests/a/test_y.py", "tests/test_c.py::two", "tests/ab/test_z.py"]
    by_file = [("own", ["tests/a/test_x.py", "tests/a/test_y.py"]), ("the rest", ["tests/test_c.py"])]
    assert mutation.narrowed(steps, hits, "file", tmp_path) == by_file
    named = [paths for _, paths in mutation.narrowed(steps, hits, "test", tmp_path)]
    assert named[0] == ["tests/a/test_y.py"]
    asked = [Path(paths[0].removeprefix("@")).read_text("utf-8") for paths in named[1:]]
    assert asked == ["tests/a/test_x.py::one[tests/b]\n", "tests/test_c.py::two\n"]


def report(**told):
    return {"id": "tests/a.py::one", "when": "call", "outcome": "passed", "why": "", "at": 1.0} | told


@pytest.mark.whole
@pytest.mark.parametrize(
    ("run", "status", "by"),
    [
        (Run(0, [report()], ""), "survived", None),
        (Run(5, [], ""), "survived", None),
        (Run(2, [report(), report(outcome="failed")], ""), "killed", "tests/a.py::one"),
        (
            Run(2, [report(id="tests/a.py", when="collect", outcome="failed")], ""),
            "killed",
            "collection error: tests/a.py",
        ),
        (
            Run(4, [], "ImportError while loading conftest\n fusionlab/graph/ir.py:3"),
            "killed",
            "collection error: pytest ended with 4",
        ),
        (Run(4, [], "file not found"), "error", None),
        (Run(3, [report()], "INTERNALERROR"), "error", None),
        (Run(None, [report()], ""), "timeout", None),
    ],
)
def test_how_a_run_ended(run, status, by):
    told = mutation.verdict(run)
    assert (told["status"], told.get("by")) == (status, by)


def test_the_table_adds_what_a_later_file_knows():
    about = {"room": "viz", "file": "f.py", "function": "g", "kind": "comparison", "before": "a | b", "after": "a"}
    first = {"tier": "default", "results": {"0": {}, "4": about | {"status": "survived", "seconds": 9.0, "cases": 1}}}
    killed = {"status": "killed", "by": "tests/viz/test_a.py::b", "seconds": 3.2, "cases": 12}
    text = mutation.table_text([first, {"tier": "full", "results": {"4": about | killed}}])
    assert (
        "| 4 | viz | f.py, g | comparison | `a \\| b` | `a` | default: survived (9 s, 1 case); full: killed by" in text
    )
    assert text.endswith("1 of 1 killed, 1 of them by the tests of their own room.")
