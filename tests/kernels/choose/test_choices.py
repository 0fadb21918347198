"""Plan files and tables: written and read whole, looked up in order, refused by name where they are damaged."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fusionlab
from fusionlab import output
from fusionlab.errors import ArgumentError, CacheWarning, OutputError
from fusionlab.kernels.choose import choices
from fusionlab.kernels.choose.choices import Choice, Choices, Measured, case_text, plan_file, read_plan_file, write

CASE = case_text("gemm_epilogue", "call", rows=8, columns=16)
OTHER = case_text("gemm_epilogue", "call", rows=8, columns=24)
FAST = Choice("cublaslt", {"xla": 12.5, "cublaslt": 10.0}, {"packed": True})
SLOW = Choice("xla", {"xla": 10.0, "cublaslt": 12.5})
VERSIONS = {"jax": "0.10.2"}


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A plan file that is not there yet, with no tables beside it."""
    monkeypatch.setattr(choices, "TABLES", tmp_path / "tables")
    monkeypatch.setattr(choices.CHOICES, "_tables", {})  # a table read of that folder stays in none
    return tmp_path / "mine" / "plans.json"


def shipped(arch, measured):
    write(choices.TABLES / f"{arch}.json", arch, measured)


def same_content(a, b):
    return a.to_dict() == b.to_dict()


# The text of a case.


def test_a_case_is_canonical_text():
    assert CASE == '{"columns":16,"op":"gemm_epilogue","role":"call","rows":8}'
    assert case_text("gemm_epilogue", "call", columns=16, rows=8) == CASE
    assert case_text("gemm_epilogue", "cotangent", columns=16, rows=8) != CASE


CONTENT = st.dictionaries(
    st.text(max_size=5).filter(lambda k: k not in ("op", "role")),
    st.one_of(st.booleans(), st.integers(), st.text(max_size=5)),
)


@given(CONTENT, CONTENT)
def test_two_cases_have_one_text_exactly_where_they_are_equal(a, b):
    backwards = dict(reversed(a.items()))
    assert case_text("o", "call", **a) == case_text("o", "call", **backwards)
    equal = {k: (type(v), v) for k, v in a.items()} == {k: (type(v), v) for k, v in b.items()}
    assert (case_text("o", "call", **a) == case_text("o", "call", **b)) == equal


# Plan files.


def test_what_is_written_is_read(file):
    measured = Measured({CASE: FAST, OTHER: SLOW}, {"plan": ("00ff", 130100)}, "NVIDIA H200", VERSIONS)
    assert write(file, "sm_90", measured) == file
    found = read_plan_file(file, "somewhere")
    assert list(found) == ["sm_90"]
    assert same_content(found["sm_90"], measured)
    assert found["sm_90"].algorithms == {"plan": ("00ff", 130100)}
    assert (found["sm_90"].device, found["sm_90"].versions) == ("NVIDIA H200", VERSIONS)
    assert found["sm_90"].cases[CASE].source == "somewhere"
    assert [p.name for p in file.parent.iterdir()] == [file.name]


def test_more_is_added_and_what_is_new_wins(file):
    first = Measured({CASE: FAST, OTHER: FAST}, {"p": ("00", 1), "q": ("01", 1)}, "first", {"jax": "0.9"})
    write(file, "sm_90", first)
    write(file, "sm_80", Measured({CASE: SLOW}))
    write(file, "sm_90", Measured({CASE: SLOW}, {"p": ("02", 2)}, "first", {"jax": "0.9"}))
    found = read_plan_file(file, "")
    assert sorted(found) == ["sm_80", "sm_90"]
    assert found["sm_90"].cases[CASE].implementation == "xla"
    assert found["sm_90"].cases[OTHER].implementation == "cublaslt"
    assert found["sm_90"].algorithms == {"p": ("02", 2), "q": ("01", 1)}
    write(file, "sm_90", Measured({OTHER: SLOW}, {}, "first", {"jax": "0.10"}))
    write(file, "sm_90", Measured({OTHER: FAST}, {}, "first", {"jax": "0.9"}))
    assert [one.versions["jax"] for one in choices.read_sets(file, "")["sm_90"]] == ["0.9", "0.10"]
    assert read_plan_file(file, "")["sm_90"].cases[OTHER].implementation == "xla"  # the newest versions win


def test_plans_merge_in_any_order_the_shorter_time_of_each_counting(file, tmp_path):
    a = Measured({CASE: Choice("cuda", {"xla": 9.0, "cuda": 5.0})}, {"p": ("00", 1)}, "a card", {"jax": "0.9"})
    b = Measured(
        {CASE: Choice("xla", {"xla": 4.0, "cuda": 7.0}), OTHER: FAST}, {"p": ("01", 2)}, "a card", {"jax": "0.9"}
    )
    paths = [tmp_path / f"{i}.json" for i in range(3)]
    for path, one in zip(paths, (a, b, replace(b, device="another card")), strict=True):
        write(path, "sm_90", one)
    fusionlab.merge_plans(paths, into=file)
    merged = file.read_bytes()
    mine, other = sorted(choices.read_sets(file, "")["sm_90"], key=lambda one: one.device)
    assert mine.cases[CASE].times_us == {"xla": 4.0, "cuda": 5.0}
    assert mine.cases[CASE].implementation == "xla"
    assert (mine.cases.keys(), mine.algorithms) == ({CASE, OTHER}, {"p": ("01", 2)})
    assert (other.device, other.cases.keys()) == ("another card", {CASE, OTHER})
    fusionlab.merge_plans([*reversed(paths), file], into=file)
    assert file.read_bytes() == merged
    paths[0].write_text("{")
    for asked, told in (
        ([*paths], "is not a plan file"),
        ([tmp_path / "absent.json"], "does not exist"),
        ("x", "several"),
    ):
        with pytest.raises(ArgumentError, match=told):
            fusionlab.merge_plans(asked, into=file)
    assert file.read_bytes() == merged


def test_a_file_of_the_first_format_is_read_and_kept_when_it_is_added_to(file):
    file.parent.mkdir()
    file.write_text(json.dumps(WHOLE))
    write(file, "sm_90", Measured({OTHER: SLOW}, {}, "a card", {"jax": "0.9"}))
    assert json.loads(file.read_text())["format"] == choices.FORMAT == 2
    assert read_plan_file(file, "")["sm_90"].cases.keys() == {CASE, OTHER}


def test_the_same_content_gives_the_same_bytes(file):
    write(file, "sm_90", Measured({CASE: FAST, OTHER: SLOW}))
    first = file.read_bytes()
    file.unlink()
    write(file, "sm_90", Measured({OTHER: SLOW}))
    write(file, "sm_90", Measured({CASE: FAST}))
    assert file.read_bytes() == first


def test_a_reason_names_every_rival_the_quickest_first():
    found = Choice("cublaslt", {"xla": 12.5, "cuda": 11.25, "cublaslt": 10.0}, {}, "the table for sm_90")
    assert found.reason == "measured: cublaslt 10 µs, cuda 11.25 µs, xla 12.5 µs (the table for sm_90)"


def test_where_the_plan_file_is(monkeypatch, tmp_path):
    monkeypatch.setenv("FUSIONLAB_PLAN_FILE", str(tmp_path / "there.json"))
    assert plan_file() == tmp_path / "there.json"
    monkeypatch.delenv("FUSIONLAB_PLAN_FILE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert plan_file() == tmp_path / ".cache" / "fusionlab" / "plans.json"


# Look-ups.


def test_a_plan_file_wins_over_the_table_and_both_are_named(file):
    shipped("sm_90", Measured({CASE: FAST, OTHER: FAST}, {"p": ("00", 1), "q": ("00", 1)}))
    write(file, "sm_90", Measured({CASE: SLOW}, {"p": ("01", 2)}))
    known = Choices(file)
    mine, theirs = known.lookup("sm_90", CASE), known.lookup("sm_90", OTHER)
    assert (mine.implementation, mine.source) == ("xla", f"plan file {file}")
    assert (theirs.implementation, theirs.source) == ("cublaslt", "the table for sm_90")
    assert (known.algorithm("sm_90", "p"), known.algorithm("sm_90", "q")) == (("01", 2), ("00", 1))
    known.trial["q"] = ("ff", 3)
    assert known.algorithm("sm_90", "q") == ("ff", 3)
    assert known.algorithm("sm_90", "absent") is None


def test_nothing_is_known_of_another_architecture_or_of_none(file):
    write(file, "sm_90", Measured({CASE: FAST}, {"p": ("00", 1)}))
    known = Choices(file)
    assert known.lookup("sm_80", CASE) is None
    assert known.lookup("", CASE) is None
    assert known.algorithm("sm_80", "p") is None


def test_counters(file):
    write(file, "sm_90", Measured({CASE: FAST}))
    known = Choices(file)
    assert known.counters() == {"hits": 0, "misses": 0}
    for text in (CASE, OTHER, CASE):
        known.lookup("sm_90", text)
    assert known.counters() == {"hits": 2, "misses": 1}


def test_a_plan_file_is_read_again_when_it_changes_and_not_otherwise(file, monkeypatch):
    reads = []
    monkeypatch.setattr(
        choices, "read_sets", lambda path, source, real=choices.read_sets: reads.append(path) or real(path, source)
    )
    known = Choices(file)
    assert known.lookup("sm_90", CASE) is None
    write(file, "sm_90", Measured({CASE: FAST}))
    reads.clear()
    assert known.lookup("sm_90", CASE).implementation == "cublaslt"
    assert known.lookup("sm_90", OTHER) is None
    assert reads == [file]
    changed = file.read_text().replace('"implementation": "cublaslt"', '"implementation": "cuda"')
    file.write_text(changed)
    os.utime(file, ns=(0, 12345))
    assert known.lookup("sm_90", CASE).implementation == "cuda"
    file.unlink()
    assert known.lookup("sm_90", CASE) is None
    write(file, "sm_90", Measured({CASE: SLOW}))
    known.forget()
    assert known.lookup("sm_90", CASE).implementation == "xla"


def test_the_environment_is_asked_at_each_look_up(file, monkeypatch, tmp_path):
    write(file, "sm_90", Measured({CASE: FAST}))
    known = Choices()
    monkeypatch.setenv("FUSIONLAB_PLAN_FILE", str(file))
    assert known.lookup("sm_90", CASE).implementation == "cublaslt"
    monkeypatch.setenv("FUSIONLAB_PLAN_FILE", str(tmp_path / "absent.json"))
    assert known.lookup("sm_90", CASE) is None


SIZES = ("rows", "columns")


@pytest.mark.parametrize(
    ("rows", "columns", "nearest"),
    [
        (8, 16, "8 x 16"),
        (16, 16, "8 x 16"),
        (512, 1024, "256 x 1024"),
        (32, 64, "8 x 16"),  # four times each
        (40, 64, None),  # five times the rows
        (9, 16, None),  # no multiple of 8
        (0, 16, None),
    ],
)
def test_the_nearest_case_differs_in_sizes_alone(file, rows, columns, nearest):
    sizes = ((8, 16), (256, 1024))
    write(file, "sm_90", Measured({case_text("o", "call", dtype="float32", rows=r, columns=c): FAST for r, c in sizes}))
    known = Choices(file)
    found = known.nearest("sm_90", case_text("o", "call", dtype="float32", rows=rows, columns=columns), SIZES)
    assert (found and found.source) == (nearest and f"plan file {file}, at {nearest}, the nearest measured")
    for other in (
        case_text("o", "call", dtype="float16", rows=8, columns=16),
        case_text("o", "tangent", dtype="float32", rows=8, columns=16),
    ):
        assert known.nearest("sm_90", other, SIZES) is None


# Damage.

WHOLE = {"format": 1, "archs": {"sm_90": Measured({CASE: FAST}, {"p": ("00", 1)}).to_dict()}}


def changed(path, value):
    """WHOLE with one entry replaced, as text."""
    data = json.loads(json.dumps(WHOLE))
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(data)


ARCH = ("archs", "sm_90")
DAMAGED = {
    "empty": "",
    "cut": json.dumps(WHOLE)[:-9],
    "no object": "[]",
    "null": "null",
    "another format": changed(("format",), 3),
    "no architectures": '{"format":1}',
    "architectures of another kind": changed(("archs",), [1]),
    "cases of another kind": changed((*ARCH, "cases"), [CASE]),
    "a case that is no JSON": changed((*ARCH, "cases"), {"gemm": FAST.to_dict()}),
    "a case that is no object": changed((*ARCH, "cases"), {"[1]": FAST.to_dict()}),
    "a case of no op": changed((*ARCH, "cases"), {'{"role": "call"}': FAST.to_dict()}),
    "no implementation": changed((*ARCH, "cases", CASE), {"times_us": {}, "settings": {}}),
    "an implementation that is no name": changed((*ARCH, "cases", CASE, "implementation"), 3),
    "times of another kind": changed((*ARCH, "cases", CASE, "times_us"), [1.0]),
    "a time that is no number": changed((*ARCH, "cases", CASE, "times_us"), {"xla": "fast"}),
    "settings of another kind": changed((*ARCH, "cases", CASE, "settings"), 7),
    "an algorithm of another kind": changed((*ARCH, "algorithms"), {"p": 3}),
    "bytes that are no text": b"\xff\xfe\x00",
}


def test_what_is_damaged_below_was_whole(file):
    file.parent.mkdir()
    file.write_text(json.dumps(WHOLE))
    assert Choices(file).lookup("sm_90", CASE).implementation == "cublaslt"


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_plan_file_is_passed_over_and_added_to_by_nobody(file, content):
    file.parent.mkdir()
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    known = Choices(file)
    told = r"not a plan file that FusionLab can read.*tune again, or remove the file"
    with pytest.warns(CacheWarning, match=told) as warned:
        assert known.lookup("sm_90", CASE) is None
    assert str(warned[0].message).startswith(str(file))
    assert known.algorithm("sm_80", "p") is None  # and told once
    with pytest.raises(ArgumentError, match=told) as caught:
        write(file, "sm_90", Measured())
    assert str(caught.value).startswith(str(file))
    assert [p.name for p in file.parent.iterdir()] == [file.name]
    file.unlink()  # as the message advises
    assert known.lookup("sm_90", CASE) is None


def test_a_folder_in_the_place_of_a_plan_file_is_named(file):
    file.mkdir(parents=True)
    with pytest.warns(CacheWarning, match="IsADirectoryError"):
        assert Choices(file).lookup("sm_90", CASE) is None


def test_a_damaged_table_is_named(file):
    choices.TABLES.mkdir()
    (choices.TABLES / "sm_90.json").write_text("{")
    with pytest.raises(ArgumentError, match=r"sm_90\.json is not a plan file"):
        Choices(file).lookup("sm_90", CASE)


# Where nothing can be written.


def test_a_folder_that_cannot_be_made_is_an_output_error(file):
    file.parent.write_text("a file where the folder should be")
    with pytest.raises(OutputError, match="FUSIONLAB_PLAN_FILE") as caught:
        write(file, "sm_90", Measured({CASE: FAST}))
    assert str(file) in str(caught.value)
    assert [p.name for p in file.parent.parent.iterdir()] == [file.parent.name]
    assert Choices(file).lookup("sm_90", CASE) is None


@pytest.mark.parametrize("step", ["replace", "write"])
@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError(28, "No space left on device"), OutputError), (KeyboardInterrupt("of the user"), KeyboardInterrupt)],
)
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(file, monkeypatch, step, error, raised):
    write(file, "sm_90", Measured({CASE: FAST}))
    before = file.read_bytes()

    def fail(*args, **kwargs):
        raise error

    class Half(io.FileIO):
        def write(self, data):
            super().write(data[:20])
            fail()

    if step == "replace":
        monkeypatch.setattr(os, "replace", fail)
    else:
        monkeypatch.setattr(output, "open", Half, raising=False)
    with pytest.raises(raised, match=r"No space left on device|of the user"):
        write(file, "sm_90", Measured({CASE: SLOW}))
    assert file.read_bytes() == before
    assert [p.name for p in file.parent.iterdir()] == [file.name]


# Several processes.


@pytest.fixture
def as_process(monkeypatch):
    """Makes this process one of two; what process 0 sends is what `sent` holds."""
    from jax.experimental import multihost_utils

    def become(index, sent=None):
        waiting = list(sent or ())
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(jax, "process_index", lambda: index)
        monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda x: waiting.pop(0) if sent else x)

    return become


def test_with_several_processes_no_plan_file_decides_before_it_is_shared(file, as_process):
    shipped("sm_90", Measured({CASE: SLOW}))
    write(file, "sm_90", Measured({CASE: FAST}))
    known = Choices(file)
    assert known.unshared == ""
    as_process(0)
    assert known.lookup("sm_90", CASE).source == "the table for sm_90"
    assert "fusionlab.share_plan()" in known.unshared


def test_process_0_goes_by_its_own_plan_file_as_it_was_shared(file, as_process):
    write(file, "sm_90", Measured({CASE: FAST}))
    as_process(0)
    known = Choices(file)
    known.share()
    assert known.unshared == ""
    assert known.lookup("sm_90", CASE).source == "the plan file of process 0"
    file.unlink()
    assert known.lookup("sm_90", CASE).implementation == "cublaslt"


def test_other_processes_go_by_what_process_0_sends(file, as_process):
    import numpy as np

    write(file, "sm_90", Measured({CASE: FAST}))
    known = Choices(file)
    theirs = json.dumps({"format": 1, "archs": {"sm_90": Measured({CASE: SLOW}).to_dict()}}).encode()
    as_process(1, [np.int32(len(theirs)), np.frombuffer(theirs, np.uint8)])
    known.share()
    assert known.lookup("sm_90", CASE).implementation == "xla"
    as_process(1, [np.int32(0)])
    known.share()
    assert known.lookup("sm_90", CASE) is None
    as_process(1, [np.int32(2), np.array([255, 254], np.uint8)])
    with pytest.raises(ArgumentError, match="the plan file of process 0 cannot be read"):
        known.share()


def test_a_file_that_process_0_cannot_read_is_an_error_in_all_and_leaves_none_waiting(file, as_process, monkeypatch):
    write(file, "sm_90", Measured({CASE: FAST}))

    def denied(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(file), "read_bytes", denied)
    as_process(0)
    with pytest.raises(ArgumentError, match="the plan file of process 0 cannot be read"):
        Choices(file).share()


def test_one_process_has_nothing_to_share(file):
    known = Choices(file)
    known.share()
    write(file, "sm_90", Measured({CASE: FAST}))
    assert known.lookup("sm_90", CASE).implementation == "cublaslt"


PROCESS = """
import json, os, sys
import jax, jax.numpy as jnp
index, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
import fusionlab as fl

def layer(x, w):
    return jax.nn.relu(x @ w)

def found():
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((48, 40), (40, 24))]
    (site,) = fl.find(layer, *shapes, device="sm_80").candidates
    return {b.verdict: [b.name, b.reason] for b in site.backends}

told = [found() if index == 0 else None]  # alone: the other process is not asked
fl.share_plan()
told.append(found())
print("TOLD" + json.dumps([jax.process_count(), told]))
"""


def test_two_processes_share_the_plan_file_of_the_first_and_one_may_look_alone(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    case = {"activation": "relu", "bias": False, "columns": 24, "compute": "f32", "dtype": "bfloat16", "inner": 40}
    case |= {"packed": False, "residuals": False, "rows": 48, "w": "KN", "x": "MK"}
    for i, choice in enumerate((FAST, SLOW)):
        write(tmp_path / f"{i}.json", "sm_80", Measured({case_text("gemm_epilogue", "call", **case): choice}))
    env = os.environ | {"PYTHONPATH": str(Path(fusionlab.__file__).parents[1]), "XLA_FLAGS": ""}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(i), port],
            env=env | {"FUSIONLAB_PLAN_FILE": str(tmp_path / f"{i}.json")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        said = [p.communicate(timeout=120) for p in started]
    finally:
        for p in started:
            p.kill()
    assert all("TOLD" in out for out, _ in said), said
    (n, (alone, first)), (_, (_, second)) = (json.loads(out.partition("TOLD")[2].splitlines()[0]) for out, _ in said)
    assert n == 2
    assert alone["same code"][0] == "xla"
    assert "once all of them have called fusionlab.share_plan()" in alone["same code"][1]
    assert first["chosen"] == second["chosen"]
    assert first["chosen"][0] == "cublaslt"
    assert first["chosen"][1].endswith("(the plan file of process 0)")
