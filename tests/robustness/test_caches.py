"""What FusionLab keeps on disk for itself: damage, other users, races, and disks that take nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from jax import numpy as jnp

import fusionlab as fl
from fusionlab import output
from fusionlab.errors import ArgumentError, CacheWarning, OutputError
from fusionlab.kernels.choose import choices
from fusionlab.kernels.choose.choices import Choice, Choices, Measured, case_text, read_plan_file, write
from fusionlab.kernels.launch import disk, native
from fusionlab.kernels.launch.compile import CompileCache

KEY = "0123abcd" * 8
CASE = case_text("gemm_epilogue", "call", rows=8, columns=16)
FAST = Choice("cublaslt", {"xla": 12.5, "cublaslt": 10.0})
GARBAGE = {
    "empty": b"",
    "cut": b'{"format": 1, "archs": {"sm_90": ',
    "binary": bytes(range(256)),
    "nested beyond any stack": b"[" * 200_000,
    "a number of many digits": b'{"format": ' + b"9" * 5000 + b"}",
    "of a later version": b'{"format": 999, "archs": {}}',
    "of another program": b'{"model": "mine", "weights": [1, 2]}',
}


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch):
    monkeypatch.setattr(disk, "_warned", set())


@pytest.fixture
def plans(tmp_path, monkeypatch):
    monkeypatch.setattr(choices, "TABLES", tmp_path / "tables")
    return tmp_path / "plans.json"


@contextlib.contextmanager
def recording():
    """Every warning, however often it was shown before."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def told(warned):
    return [str(w.message) for w in warned if issubclass(w.category, CacheWarning)]


def cached(folder):
    return CompileCache(folder).get(KEY, lambda: b"compiled here")


def disk_full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# Plan files: damage.


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_a_plan_file_that_is_none_is_passed_over_with_one_warning_that_names_it(plans, content):
    plans.write_bytes(content)
    with recording() as warned:
        for known in (Choices(plans), Choices(plans)):
            for _ in range(3):
                assert known.lookup("sm_90", CASE) is None
                assert known.algorithm("sm_90", "p") is None
    (said,) = told(warned)
    assert said.startswith(f"{plans} is ignored")
    assert plans.read_bytes() == content


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_tuning_builds_it_again_and_keeps_what_was_there_aside(plans, content):
    plans.write_bytes(content)
    with recording() as warned:
        write(plans, "sm_90", Measured({CASE: FAST}), rebuild=True)
    (said,) = told(warned)
    assert said.startswith(f"{plans} was not a plan file")
    assert read_plan_file(plans, "")["sm_90"].cases.keys() == {CASE}
    assert (plans.parent / "plans.json.damaged").read_bytes() == content
    assert sorted(p.name for p in plans.parent.iterdir()) == ["plans.json", "plans.json.damaged"]


def test_a_file_that_the_user_named_is_never_replaced_by_a_plan(plans):
    content = GARBAGE["of another program"]
    plans.write_bytes(content)
    with pytest.raises(ArgumentError, match=r"plans\.json is not a plan file"):
        write(plans, "sm_90", Measured({CASE: FAST}))
    assert plans.read_bytes() == content
    assert [p.name for p in plans.parent.iterdir()] == ["plans.json"]


def test_what_is_known_of_another_architecture_says_nothing_here_and_is_kept(plans):
    write(plans, "sm_80", Measured({CASE: FAST}))
    assert Choices(plans).lookup("sm_90", CASE) is None
    write(plans, "sm_90", Measured({CASE: FAST}))
    assert read_plan_file(plans, "").keys() == {"sm_80", "sm_90"}


# Plan files: races.

ADDING = """
import sys
from pathlib import Path
from fusionlab.kernels.choose.choices import Choice, Measured, case_text, write

path, name, count, start = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
print("ready", flush=True)
while not start.exists():
    pass
for i in range(count):
    write(path, "sm_90", Measured({case_text("op", "call", process=name, i=i): Choice("xla", {"xla": 1.0})}))
"""


@pytest.mark.dear
def test_processes_that_add_to_one_plan_file_at_once_lose_nothing(plans, tmp_path):
    names, count, start = ("a", "b", "c"), 30, tmp_path / "start"
    made = [
        subprocess.Popen(
            [sys.executable, "-c", ADDING, str(plans), name, str(count), str(start)], stdout=subprocess.PIPE, text=True
        )
        for name in names
    ]
    for one in made:
        assert one.stdout.readline() == "ready\n"
    start.touch()
    assert [one.wait(120) for one in made] == [0] * len(names)
    for one in made:
        one.stdout.close()
    expected = {case_text("op", "call", process=name, i=i) for name in names for i in range(count)}
    assert read_plan_file(plans, "")["sm_90"].cases.keys() == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plans.json", "start"]  # no lock is left


def test_threads_that_add_at_once_lose_nothing(plans):
    def add(i):
        write(plans, "sm_90", Measured({case_text("op", "call", i=i): FAST}))

    threads = [threading.Thread(target=add, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_plan_file(plans, "")["sm_90"].cases) == 16


def test_a_lock_that_another_holds_for_too_long_is_passed_over_with_a_warning(plans, monkeypatch):
    monkeypatch.setattr(disk, "LOCK_S", 0.2)
    with disk.locked(plans):
        with recording() as warned:
            start = time.monotonic()
            write(plans, "sm_90", Measured({CASE: FAST}))
            assert 0.2 <= time.monotonic() - start < 5
        assert (plans.parent / ".plans.json.lock").exists()  # still the other's
    (said,) = told(warned)
    assert said.startswith(f"{plans} is written without a lock (another process has held")
    assert read_plan_file(plans, "")["sm_90"].cases.keys() == {CASE}


@pytest.mark.parametrize("missing", ["module", "file system"])
def test_where_there_are_no_locks_it_is_written_with_a_warning(plans, monkeypatch, missing):
    if missing == "module":
        monkeypatch.setattr(disk, "fcntl", None)
    else:

        def flock(*_):
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(disk.fcntl, "flock", flock)
    with pytest.warns(CacheWarning, match="is written without a lock"):
        write(plans, "sm_90", Measured({CASE: FAST}))
    assert read_plan_file(plans, "")["sm_90"].cases.keys() == {CASE}


def test_a_process_that_died_with_the_lock_stops_nobody(plans):
    code = "import os\nfrom pathlib import Path\nfrom fusionlab.kernels.launch.disk import locked\n"
    code += f"with locked(Path({str(plans)!r})): os._exit(0)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (plans.parent / ".plans.json.lock").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write(plans, "sm_90", Measured({CASE: FAST}))
    assert [p.name for p in plans.parent.iterdir()] == ["plans.json"]


# Compiled kernels: damage, and who made them.


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_a_damaged_kernel_is_compiled_again_with_one_warning_that_names_it(tmp_path, content):
    file = tmp_path / f"{KEY}.cubin"
    with recording() as warned:
        for _ in range(3):
            file.write_bytes(content)
            assert cached(tmp_path) == b"compiled here"
    assert told(warned) == [f"{file} is damaged; the kernel is compiled again"]
    assert CompileCache(tmp_path).get(KEY, lambda: pytest.fail("it was not kept")) == b"compiled here"


def plant(folder):
    """A whole file of a cache, as another process wrote it."""
    CompileCache(folder).get(KEY, lambda: b"planted")
    return folder / f"{KEY}.cubin"


def test_kernels_of_the_users_own_are_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        file = plant(tmp_path / "new" / "cubin")
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o077 == 0
    assert file.parent.stat().st_mode & 0o077 == 0
    assert cached(file.parent) == b"planted"


@pytest.mark.parametrize("who", ["another's file", "another's folder", "a file for all", "a folder for all"])
def test_code_that_another_user_made_or_could_change_is_not_loaded(tmp_path, monkeypatch, who):
    file = plant(tmp_path / "cubin")
    path = file if "file" in who else file.parent
    if "for all" in who:
        path.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with recording() as warned:
        assert cached(file.parent) == b"compiled here"
    assert any(str(path) in said and ("another user" in said or "every user" in said) for said in told(warned))


def test_a_sticky_folder_is_trusted_as_far_as_its_files_are(tmp_path):
    file = plant(tmp_path / "cubin")
    file.parent.chmod(0o1777)
    assert cached(file.parent) == b"planted"


def test_the_launcher_is_not_built_into_a_folder_that_all_can_write_to(tmp_path, monkeypatch):
    built = []
    monkeypatch.setattr(native, "_compile", lambda command, include, scratch, stem: built.append((scratch, stem)))
    tmp_path.chmod(0o777)
    with pytest.warns(CacheWarning, match="keeps no compiled launcher .every user can write"):
        native.build(tmp_path)
    ((scratch, stem),) = built
    assert not scratch.is_relative_to(tmp_path)
    assert not stem.is_relative_to(tmp_path)
    assert stem.parent.stat().st_mode & 0o077 == 0


# Disks that take nothing.


@pytest.mark.parametrize("step", ["open", "replace", "folder"])
def test_a_full_disk_costs_a_compile_and_one_warning(tmp_path, monkeypatch, step):
    if step == "open":
        monkeypatch.setattr(output, "open", disk_full, raising=False)
    elif step == "replace":
        monkeypatch.setattr(os, "replace", disk_full)
    else:
        monkeypatch.setattr(Path, "mkdir", disk_full)
    folder = tmp_path / "cubin"
    with recording() as warned:
        for _ in range(3):
            assert cached(folder) == b"compiled here"
    (said,) = told(warned)
    assert said.startswith(f"{folder} keeps no compiled kernels (No space left on device")
    monkeypatch.undo()
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_a_read_only_file_system_costs_a_compile_and_one_warning():
    # /proc refuses new entries even to root, as a read-only folder does to others.
    with recording() as warned:
        for _ in range(2):
            assert cached(Path("/proc/fusionlab/cubin")) == b"compiled here"
    (said,) = told(warned)
    assert said.startswith("/proc/fusionlab/cubin keeps no compiled kernels")


@pytest.mark.parametrize("step", ["open", "replace"])
def test_a_file_that_the_user_asked_for_is_one_clear_error_on_a_full_disk(plans, monkeypatch, step):
    write(plans, "sm_90", Measured({CASE: FAST}))
    before = plans.read_bytes()
    if step == "open":
        monkeypatch.setattr(output, "open", disk_full, raising=False)
    else:
        monkeypatch.setattr(os, "replace", disk_full)
    with pytest.raises(OutputError, match=r"cannot write .*plans\.json.*No space left on device"):
        write(plans, "sm_90", Measured({"{}": FAST}), rebuild=True)
    monkeypatch.undo()
    assert plans.read_bytes() == before
    assert [p.name for p in plans.parent.iterdir()] == ["plans.json"]


def test_a_folder_that_the_user_asked_for_is_one_clear_error_on_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(output, "open", disk_full, raising=False)
    with pytest.raises(OutputError, match="No space left on device"):
        fl.find(lambda x: jnp.tanh(x @ x + x[0]), jnp.ones((4, 4)), passes="gemm_epilogue", dump=tmp_path / "dump")
    assert list(tmp_path.iterdir()) == []


def test_a_plan_file_is_json_alone(plans):
    write(plans, "sm_90", Measured({CASE: FAST}))
    assert json.loads(plans.read_text())["format"] == choices.FORMAT


def test_a_lock_that_its_holder_removed_just_before_it_was_taken_is_none(plans, monkeypatch):
    lock, real, taken = plans.with_name(".plans.json.lock"), disk.fcntl.flock, []

    def flock(file, how):
        real(file, how)
        if not taken:
            lock.unlink()
        taken.append(file)

    monkeypatch.setattr(disk.fcntl, "flock", flock)
    with disk.locked(plans):
        assert lock.exists()
    assert len(taken) == 2
