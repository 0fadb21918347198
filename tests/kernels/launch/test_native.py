"""The compiled launcher: how it is built and found, and what it asks of CUDA and XLA, both played by `fake_xla.c`."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from fusionlab.errors import ArgumentError, CompileError, MissingDependencyError
from fusionlab.kernels.launch import native
from fusionlab.kernels.launch.steps import KernelStep, MatmulStep, Prepared

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="needs a C compiler")

FAKE = Path(__file__).with_name("fake_xla.c")
PARAMS = (("result", 1), ("operand", 0))
RECORDS = "record" in (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text(encoding="utf-8")


def step(**changes):
    given = {
        "function": 0xF0,
        "entry": "one",
        "image": b"elf",
        "grid": (2, 3, 4),
        "block": (5, 6, 7),
        "shared": 8,
        "params": PARAMS,
    }
    return KernelStep(**{**given, **changes})


def prepared(*steps):
    return Prepared(lambda *given: None, steps)


# How it is built.


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return native.build(tmp_path_factory.mktemp("launcher"))


def test_it_is_compiled_once_and_found_afterwards(built, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("compiled again"))
    assert native.build(built.parent) == built
    assert [f.name for f in built.parent.iterdir()] == [built.name]  # nothing half-written is left


@pytest.mark.filterwarnings("ignore::fusionlab.errors.CacheWarning")  # tests/robustness has what is told
def test_a_damaged_file_is_made_again(built, tmp_path):
    (tmp_path / built.name).write_bytes(built.read_bytes()[:-1])
    assert native.build(tmp_path).read_bytes() == built.read_bytes()


@pytest.mark.filterwarnings("ignore::fusionlab.errors.CacheWarning")  # tests/robustness has what is told
def test_a_file_that_cannot_be_read_is_passed_over(built, tmp_path):
    (tmp_path / built.name.replace(built.stem[-16:], "0" * 16)).mkdir()
    assert native.build(tmp_path).read_bytes() == built.read_bytes()


@pytest.mark.filterwarnings("ignore::fusionlab.errors.CacheWarning")  # tests/robustness has what is told
def test_a_file_that_another_user_made_is_not_loaded(built, tmp_path, monkeypatch):
    planted = shutil.copy(built, tmp_path)
    if os.geteuid() == 0:
        os.chown(planted, 1, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 1)
    compiled = []
    monkeypatch.setattr(native, "_compile", lambda *given: compiled.append(given))
    native.build(tmp_path)
    assert compiled


def test_another_compiler_or_source_is_another_file(built, tmp_path, monkeypatch):
    source = tmp_path / "launcher.c"
    source.write_text(native.SOURCE.read_text() + "\n// changed\n")
    monkeypatch.setattr(native, "SOURCE", source)
    assert native.build(built.parent) != built


def test_what_the_compiler_says_is_in_the_error(tmp_path, monkeypatch):
    source = tmp_path / "launcher.c"
    source.write_text("int broken(void) { return undeclared_thing; }\n")
    monkeypatch.setattr(native, "SOURCE", source)
    with pytest.raises(CompileError, match="undeclared_thing"):
        native.build(tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("script", "said"),
    [("printf '\\351chec' >&2; exit 1", "chec"), ("exec sleep 60", "after 0.1 s")],
    ids=["Latin-1", "slow"],
)
def test_a_compiler_of_another_encoding_or_that_does_not_end_is_a_compile_error(tmp_path, monkeypatch, script, said):
    command = tmp_path / "cc"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("CC", str(command))
    monkeypatch.setattr(native, "COMPILE_S", 60 if said == "chec" else 0.1)
    with pytest.raises(CompileError, match=said):
        native.build(tmp_path)


def test_without_a_compiler_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(MissingDependencyError, match="apt-get install gcc"):
        native.build(tmp_path)


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "temporary").mkdir()
    program = """
import sys
from pathlib import Path
from fusionlab.kernels.launch import native
path = native.build(Path(sys.argv[1]))
native.Launcher(path)
print(path)
"""
    asked = [sys.executable, "-c", program, str(tmp_path / "file" / "folder")]
    environ = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    done = subprocess.run(asked, env=environ, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "temporary")
    assert not list((tmp_path / "temporary").iterdir())  # of that process alone


def test_python_launches_without_a_gpu_or_where_that_is_asked_for(monkeypatch):
    monkeypatch.delenv(native.VARIABLE, raising=False)
    monkeypatch.setattr(native, "why_not", lambda: "JAX has no CUDA plugin here")
    assert native.load() is None
    monkeypatch.setenv(native.VARIABLE, "python")
    monkeypatch.setattr(native, "why_not", lambda: None)
    assert native.load() is None
    monkeypatch.setenv(native.VARIABLE, "fast")
    with pytest.raises(ArgumentError, match="'native' or 'python'"):
        native.load()


def test_a_build_that_fails_is_an_error_only_where_it_was_asked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSIONLAB_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CC", sys.executable)
    monkeypatch.setattr(native, "why_not", lambda: None)
    monkeypatch.delenv(native.VARIABLE, raising=False)
    assert native.load() is None
    monkeypatch.setenv(native.VARIABLE, "native")
    with pytest.raises(CompileError):
        native.load()


# What it does.


@pytest.fixture(scope="module")
def fake_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("fake") / "fake.so"
    include = f"-I{jax.ffi.include_dir()}"
    command = [*native.compiler(), "-std=c11", "-O1", "-fPIC", "-shared", "-DFX_IS_PLUGIN", include, str(FAKE)]
    subprocess.run([*command, "-o", str(path)], check=True)
    return path


class Fake:
    """A launcher of its own with fake XLA and CUDA around it."""

    def __init__(self, built: Path, fake: Path, folder: Path, plugin: bool = True):
        copies = [Path(shutil.copy(f, folder / name)) for f, name in ((built, "launcher.so"), (fake, "fake.so"))]
        self.launcher = native.Launcher(copies[0])
        self.lib = lib = ctypes.CDLL(str(copies[1]))
        lib.fx_notes.restype = ctypes.c_char_p
        for name in ("fx_execute", "fx_record"):
            if hasattr(lib, name):
                getattr(lib, name).restype = ctypes.c_long
        lib.fx_instantiate.restype = ctypes.c_void_p
        lib.fx_execute.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
        lib.fx_ask.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self.python = native._address(lib.fx_python)
        self.launcher.fall_back_on(self.python, self.python)

    def use(self) -> None:
        at = {
            n: native._address(getattr(self.lib, f"fx_{n}"))
            for n in ("device", "launch", "text", "matmul", "set_attribute")
        }
        self.launcher.use_driver(at["device"], at["launch"], at["text"])
        self.launcher.use_cublaslt(at["matmul"], at["set_attribute"])

    def execute(self, name: bytes = b"plan", on_cuda: bool = True, own: bool = True) -> tuple[int, list[str]]:
        return self.lib.fx_execute(self.launcher.handler(on_cuda) if own else None, name, 4, 4), self.notes()

    def notes(self) -> list[str]:
        found = self.lib.fx_notes().decode().split(";")
        self.lib.fx_clear()
        return [one for one in found if one]


@pytest.fixture
def fake(built, fake_file, tmp_path):
    made = Fake(built, fake_file, tmp_path)
    made.use()
    return made


LAUNCHED = "launch 0xf0 grid 2 3 4 block 5 6 7 shared 8 stream 0x57"


def test_steps_are_launched_in_order_with_the_addresses_of_the_call(fake):
    two = step(function=0xF1, early=True, params=(("i64", -(2**40)), ("i32", 5)))
    assert fake.launcher.publish(b"plan", 0, prepared(step(), two))
    first = f"{LAUNCHED} params {0x20000} {0x1000}"
    second = f"{LAUNCHED.replace('f0', 'f1')} attribute 6=1 params {-(2**40)} 5"
    assert fake.execute() == (0, [first, second])
    assert fake.launcher.counters() == {"launched": 1, "recorded": 0, "handed_over": 0}


def test_a_cooperative_kernel_is_launched_as_one(fake):
    assert fake.launcher.publish(b"plan", 0, prepared(step(cooperative=True)))
    assert fake.execute() == (0, [f"{LAUNCHED} attribute 2=1 params {0x20000} {0x1000}"])


def test_a_null_parameter_is_no_address(fake):
    fake.launcher.publish(b"plan", 0, prepared(step(params=(("null", 0), ("result", 0)))))
    assert fake.execute()[1] == [f"{LAUNCHED} params 0 {0x10000}"]


def test_a_plan_without_steps_launches_nothing(fake):
    fake.launcher.publish(b"plan", 0, prepared())
    assert fake.execute() == (0, [])


def test_a_plan_is_known_by_its_whole_name_and_its_device(fake):
    fake.launcher.publish(b"plan", 0, prepared(step()))
    assert fake.execute(b"plan2")[1] == ["python"]
    fake.lib.fx_set(1, 0, 0)
    assert fake.execute()[1] == ["python"]
    fake.launcher.publish(b"plan", 1, prepared(step(function=0xF1)))
    assert "launch 0xf1" in fake.execute()[1][0]
    fake.lib.fx_set(0, 0, 0)
    assert "launch 0xf0" in fake.execute()[1][0]
    assert fake.launcher.counters() == {"launched": 2, "recorded": 0, "handed_over": 2}


def test_many_plans_are_told_apart(fake):
    for i in range(9000):  # more than there are buckets
        fake.launcher.publish(b"plan %d" % i, 0, prepared(step(function=0x1000 + i)))
    for i in range(0, 9000, 7):
        assert f"launch {0x1000 + i:#x} " in fake.execute(b"plan %d" % i)[1][0]


def test_before_anything_is_published_python_is_asked(built, fake_file, tmp_path):
    # No driver yet: an executable from a cache runs before any plan is prepared.
    bare = Fake(built, fake_file, tmp_path)
    assert bare.execute() == (0, ["python"])


def test_a_plan_published_for_another_device_is_an_error_and_no_endless_call(fake):
    fake.lib.fx_call_back.argtypes = [ctypes.c_void_p]
    fake.lib.fx_call_back(fake.launcher.handler(True))
    answer, (asked, message) = fake.execute()
    assert (answer, asked) == (0x99, "python")
    assert "another device than the current one" in message
    fake.lib.fx_call_back(None)
    assert fake.execute() == (0, ["python"])


def test_on_the_host_no_stream_and_no_device_are_asked_for(fake):
    fake.lib.fx_set(7, 0, 0)
    fake.launcher.publish(b"plan", 0, prepared(step()))
    assert fake.execute(on_cuda=False)[1] == [f"{LAUNCHED.replace('0x57', '(nil)')} params {0x20000} {0x1000}"]


def test_a_launch_that_fails_says_which_and_why(fake):
    fake.launcher.publish(b"plan", 0, prepared(step(), step()))
    fake.lib.fx_set(0, 700, 0)
    answer, (_, message) = fake.execute()
    assert answer == 0x99
    assert "the launch of one failed: an illegal memory access was encountered (CUDA error 700)" in message
    assert message.endswith("[launch plan plan]")


def test_a_long_name_is_cut_in_an_error_and_nowhere_else(fake):
    name = b"x" * 20_000
    fake.launcher.publish(name, 0, prepared(step()))
    fake.lib.fx_set(0, 1, 0)
    _, (_, message) = fake.execute(name)
    assert 3000 < message.count("x") < 5000
    assert fake.execute(name + b"x")[1] == ["python"]


def test_a_kernel_of_too_many_parameters_is_left_to_python(fake):
    assert not fake.launcher.publish(b"plan", 0, prepared(step(params=(("i64", 1),) * 513)))
    assert fake.execute()[1] == ["python"]


MATMUL = MatmulStep(
    tuple(range(0x11, 0x19)),
    workspace=99,
    places=(("operand", 0), ("operand", 1), ("operand", 2), ("result", 1), ("result", 0), ("result", 0), ("result", 2)),
    attributes=(30, 31),
    library=130100,
)


def test_a_product_of_a_library_that_is_not_the_loaded_one_is_left_to_python(built, fake_file, tmp_path, monkeypatch):
    bare = Fake(built, fake_file, tmp_path)
    bare.launcher.use_driver(*[native._address(getattr(bare.lib, f"fx_{n}")) for n in ("device", "launch", "text")])
    assert not bare.launcher.publish(b"plan", 0, prepared(MATMUL))  # none is loaded
    other = SimpleNamespace(cublasLtGetVersion=lambda: 130200)
    monkeypatch.setattr(native, "_loaded_cublaslt", lambda: other)
    assert not bare.launcher.publish(b"plan", 0, prepared(step(), MATMUL))
    assert bare.execute()[1] == ["python"]


def test_a_product_sets_its_addresses_and_runs(fake):
    fake.launcher.publish(b"plan", 0, prepared(MATMUL))
    called = "0x11 0x12 0x16 0x1000 0x13 0x2000 0x14 0x17 0x10000 0x15 0x10000 0x15 0x18 0x30000 99 0x57"
    assert fake.execute() == (0, ["set 0x12 30=0x3000 of 8", "set 0x12 31=0x20000 of 8", f"matmul {called}"])


def test_a_product_without_bias_and_auxiliary_matrix_sets_nothing(fake):
    none = ("null", 0)
    plain = (*MATMUL.places[:2], none, none, *MATMUL.places[4:])
    fake.launcher.publish(b"plan", 0, prepared(replace(MATMUL, places=plain)))
    assert [note.split()[0] for note in fake.execute()[1]] == ["matmul"]


def test_a_product_adds_the_matrix_it_is_given(fake):
    places = (*MATMUL.places[:4], ("operand", 2), *MATMUL.places[5:])
    fake.launcher.publish(b"plan", 0, prepared(replace(MATMUL, places=places)))
    called = "0x11 0x12 0x16 0x1000 0x13 0x2000 0x14 0x17 0x3000 0x15 0x10000 0x15 0x18 0x30000 99 0x57"
    assert fake.execute()[1][-1] == f"matmul {called}"


@pytest.mark.parametrize(
    "steps", [(step(), step(params=(("operand", 4), ("i64", 9)))), (MATMUL,)], ids=["kernel", "product"]
)
def test_a_call_with_too_few_operands_or_results_is_an_error_and_launches_nothing(fake, steps):
    fake.launcher.publish(b"plan", 0, prepared(*steps))
    needed = "5 and 2" if len(steps) == 2 else "3 and 3"
    for operands, results in ((1, 4), (5, 1)):
        answer = fake.lib.fx_execute(fake.launcher.handler(True), b"plan", operands, results)
        (message,) = fake.notes()
        assert answer == 0x99
        assert f"the call has {operands} operands and {results} results, needed {needed}" in message


def test_a_product_that_fails_is_an_error(fake):
    fake.launcher.publish(b"plan", 0, prepared(MATMUL))
    fake.lib.fx_set(0, 0, 13)
    answer, notes = fake.execute()
    assert answer == 0x99
    assert "cublasLtMatmul failed with cublasStatus_t 13" in notes[-1]


def test_what_programs_point_into_outlives_the_interpreter(built):
    """A thread of XLA's may launch while Python ends: a module unloaded by then would be used after it is freed."""
    program = """
import os, sys
from pathlib import Path
from fusionlab.kernels.launch.native import Launcher
from fusionlab.kernels.launch.steps import Prepared

class Module:
    def __del__(self, write=os.write):
        write(1, b"unloaded")

launcher = Launcher(Path(sys.argv[1]))
launcher.use_driver(0, 0, 0)
print(launcher.publish(b"plan", 0, Prepared(print, (), Module())), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program, str(built)], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_it_answers_what_it_is(fake):
    for on_cuda in (False, True):
        assert fake.lib.fx_ask(fake.launcher.handler(on_cuda), 0) == 1
        assert re.fullmatch(r"version 0\.\d", fake.notes()[-1])


# Recording, from jaxlib 0.11 on.


def recording(fake):
    fake.launcher.record_as("second")
    fake.lib.fx_ask(fake.launcher.handler(True), 0)
    fake.notes()


def test_an_older_jaxlib_records_nothing(fake):
    assert fake.launcher.can_record == RECORDS
    fake.launcher.record_as("second")
    fake.lib.fx_ask(fake.launcher.handler(True), 0)
    assert fake.launcher.records == RECORDS
    assert ("registered second on CUDA traits 1" in fake.notes()) == RECORDS


if RECORDS:

    def test_the_second_target_is_registered_once_with_the_plugin_alone(built, fake_file, tmp_path):
        fake = Fake(built, fake_file, tmp_path)
        fake.launcher.record_as("second")
        assert not fake.launcher.records
        for _ in range(2):
            assert fake.lib.fx_ask(fake.launcher.handler(True), 0) == 1
        assert [n for n in fake.notes() if "registered" in n] == ["registered second on CUDA traits 1"]
        assert fake.launcher.records
        assert fake.lib.fx_instantiate() == fake.python

    def test_a_library_that_is_not_the_plugin_is_passed_over(built, tmp_path):
        path = tmp_path / "other.so"
        include = f"-I{jax.ffi.include_dir()}"
        command = [*native.compiler(), "-std=c11", "-fPIC", "-shared", include, str(FAKE), "-o", str(path)]
        subprocess.run(command, check=True)
        fake = Fake(built, path, tmp_path)
        recording(fake)
        assert not fake.launcher.records

    def test_a_registration_that_is_refused_leaves_the_first_target(fake):
        fake.launcher.record_as("second")
        assert fake.lib.fx_ask(fake.launcher.handler(True), 1) == 1
        assert "destroyed 0x98" in fake.notes()
        assert not fake.launcher.records

    def test_kernels_become_nodes_one_after_another(fake):
        recording(fake)
        two = step(entry="two", early=True, params=(("i32", 7), ("operand", 1), ("null", 0)))
        fake.launcher.publish(b"plan", 0, prepared(step(), two))
        assert fake.lib.fx_record(b"plan", 0, 16, 0, 1, 4, 4) == 0
        geometry = "grid 2 3 4 block 5 6 7 cluster 0 shared 8"
        assert fake.notes() == [
            f"create one format 1 image elf {geometry} pdl 0 args 0x20000:0 0x1000:0 is 71",
            f"create two format 1 image elf {geometry} pdl 1 args value 7:4 0x2000:0 value 0:8 after 71 is 72",
            "count 2",
        ]
        assert fake.lib.fx_record(b"plan", 1, 16, 0, 1, 4, 4) == 0
        assert [n.split()[:2] for n in fake.notes()] == [["update", "71"], ["update", "72"], ["count", "2"]]
        assert fake.launcher.counters()["recorded"] == 2

    def test_a_newer_xla_takes_the_loaded_function(fake):
        recording(fake)
        fake.launcher.publish(b"plan", 0, prepared(step(shared=100 << 10)))
        fake.lib.fx_record(b"plan", 0, 16, 0, 2, 4, 4)
        assert fake.notes()[0].startswith("create one format 2 function 0xf0 ")

    @pytest.mark.parametrize(
        ("steps", "max_commands"),
        [
            ((MATMUL,), 16),
            ((step(), step()), 1),
            ((), 16),
            ((step(shared=49 << 10),), 16),
            ((step(cooperative=True),), 16),
            ((step(params=(("operand", 4),)),), 16),
            (None, 16),
        ],
        ids=[
            "product",
            "too many",
            "nothing",
            "much shared memory",
            "cooperative",
            "operand that is not there",
            "unknown plan",
        ],
    )
    def test_what_cannot_be_a_node_is_captured(fake, steps, max_commands):
        recording(fake)
        if steps is not None:
            fake.launcher.publish(b"plan", 0, prepared(*steps))
        assert fake.lib.fx_record(b"plan", 0, max_commands, 0, 1, 4, 4) == 0
        assert fake.notes() == ["capture", "count 0"]

    def test_what_was_captured_before_its_plan_was_published_is_captured_again(fake):
        recording(fake)
        fake.lib.fx_record(b"plan", 0, 16, 0, 1, 4, 4)
        fake.launcher.publish(b"plan", 0, prepared(step()))
        fake.notes()
        assert fake.lib.fx_record(b"plan", 1, 16, 0, 1, 4, 4) == 0
        assert fake.notes() == ["capture", "count 0"]

    def test_another_version_of_recording_is_an_error(fake):
        recording(fake)
        fake.launcher.publish(b"plan", 0, prepared(step()))
        assert fake.lib.fx_record(b"plan", 0, 16, 1, 0, 4, 4) == 0x99
        assert "was not built for" in fake.notes()[0]

    def test_the_second_target_executes_as_the_first(fake):
        recording(fake)
        fake.launcher.publish(b"plan", 0, prepared(step()))
        assert fake.execute(own=False) == fake.execute()
