"""Launch plans: their names, what is read back from a name, and the book of those prepared."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, fields, replace
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionlab.errors import BackendError
from fusionlab.kernels.launch import cublaslt, kernel_plan, plans
from fusionlab.kernels.launch.cublaslt import MatmulPlan, row_major
from fusionlab.kernels.launch.kernel_plan import KernelPlan, Launch
from fusionlab.kernels.launch.steps import KernelStep
from fusionlab.kernels.ops.clock import EventPlan

SOURCES = ("clock/spin.cu", "gemm_epilogue/epilogue.cu")
NAMES = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=8)
COUNTS = st.integers(1, 2**31 - 1)
PARAMS = st.one_of(
    st.tuples(st.sampled_from(("operand", "result")), st.integers(0, 9)),
    st.just(("null", 0)),
    st.tuples(st.sampled_from(("i64", "i32")), st.integers(-(2**31), 2**31 - 1)),
)
LAUNCHES = st.builds(
    Launch,
    NAMES,
    st.tuples(COUNTS, COUNTS, COUNTS),
    st.tuples(COUNTS, COUNTS, COUNTS),
    st.integers(0, 1 << 18),
    st.lists(PARAMS, max_size=4).map(tuple),
)
KERNEL_PLANS = st.builds(
    KernelPlan,
    st.sampled_from(SOURCES),
    st.lists(st.text(max_size=8), max_size=3).map(tuple),
    st.lists(LAUNCHES, max_size=3).map(tuple),
)
MATMUL_PLANS = st.builds(
    MatmulPlan,
    *[st.integers(1, 1 << 40)] * 3,
    st.tuples(st.booleans(), st.booleans()),
    st.sampled_from(("float32", "bfloat16", "float16", "float64")),
    st.sampled_from(("f32", "tf32", "f64")),
    st.sampled_from(("DEFAULT", "RELU_AUX_BIAS", "DGELU_BGRAD")),
    st.integers(0, 1 << 20),
    st.integers(0, 1 << 26),
    st.binary(max_size=64).map(bytes.hex),
    st.integers(0, 10**6),
    out=st.sampled_from(("", "float32")),
    alpha=st.sampled_from((1.0, 0.1, -3.5)),
    beta=st.sampled_from((0.0, 1.0, 1 / 3)),
    batch=st.integers(1, 9),
    leading=st.tuples(*[st.integers(0, 1 << 33)] * 2),
    strides=st.tuples(*[st.integers(0, 1 << 33)] * 2),
)
PLANS = st.one_of(KERNEL_PLANS, MATMUL_PLANS, st.builds(EventPlan, st.integers(0, 9)))


@given(PLANS)
@settings(max_examples=60, deadline=None)
def test_a_plan_is_read_back_from_its_name(plan):
    name = plans.plan_name(plan)
    again = plans.launch_plan_of(name)
    assert again == plan
    assert hash(again) == hash(plan)
    assert plans.plan_name(again) == name
    assert name.isascii()


@given(PLANS, PLANS)
@settings(max_examples=60, deadline=None)
def test_two_plans_have_one_name_exactly_where_they_are_equal(a, b):
    assert (plans.plan_name(a) == plans.plan_name(b)) == (a == b)


MATMUL = row_major(8, 4, 2, dtype="float32", compute="tf32", epilogue="RELU_AUX_BIAS", aux_pitch=128)
SPIN = KernelPlan(
    "clock/spin.cu", ("-DX=1",), (Launch("spin", (1, 2, 3), (4, 5, 6), 7, (("operand", 0), ("i64", -1))),)
)


@pytest.mark.parametrize("field", [f.name for f in fields(MatmulPlan)])
def test_every_field_of_a_product_is_in_its_name(field):
    value = getattr(MATMUL, field)
    if isinstance(value, tuple):
        other = (not value[0], value[1])
    else:
        other = value + ("x" if isinstance(value, str) else 1)
    assert plans.plan_name(replace(MATMUL, **{field: other})) != plans.plan_name(MATMUL)


@pytest.mark.parametrize("field", [f.name for f in fields(Launch)])
def test_every_field_of_a_launch_is_in_its_name(field):
    (one,) = SPIN.launches
    other = {"entry": "other", "shared": 8, "params": ()}.get(field, (9, 9, 9))
    assert plans.plan_name(replace(SPIN, launches=(replace(one, **{field: other}),))) != plans.plan_name(SPIN)
    assert plans.plan_name(replace(SPIN, options=())) != plans.plan_name(SPIN)


@dataclass(frozen=True)
class Kept:
    """A plan whose content is what it is given."""

    kind: ClassVar[str] = "test kept"
    content: tuple[tuple[str, Any], ...]

    def spec(self) -> dict[str, Any]:
        return dict(self.content)

    def prepare(self, device: int) -> plans.Prepared:
        return plans.Prepared(lambda stream, operands, results: None)


plans.plan_kind(Kept.kind, lambda content: Kept(tuple(content.items())))


def test_a_name_hangs_on_content_alone_not_on_order():
    pairs = [("b", 1), ("a", {"y": 2, "x": [3, None, True, 0.1]}), ("ü", "ß")]
    inner = ("a", {"x": [3, None, True, 0.1], "y": 2})
    forward, back = plans.plan_name(Kept(tuple(pairs))), plans.plan_name(Kept((pairs[2], inner, pairs[0])))
    assert forward == back
    assert forward == '{"a":{"x":[3,null,true,0.1],"y":2},"b":1,"kind":"test kept","\\u00fc":"\\u00df"}'


def test_a_name_is_the_same_in_another_process():
    code = (
        "from fusionlab.kernels.launch.cublaslt import MatmulPlan; from fusionlab.kernels.launch.kernel_plan import KernelPlan, Launch; "
        f"from fusionlab.kernels.launch.plans import plan_name; print(plan_name({MATMUL!r})); print(plan_name({SPIN!r}))"
    )
    env = os.environ | {"PYTHONHASHSEED": "4711", "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines() == [plans.plan_name(MATMUL), plans.plan_name(SPIN)]


# Sources that change.


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder of sources: one.cu includes shared.cuh."""
    monkeypatch.setattr(kernel_plan, "KERNELS", tmp_path)
    (tmp_path / "one.cu").write_text('#include "shared.cuh"\nextern "C" __global__ void one() {}\n')
    (tmp_path / "shared.cuh").write_text("// nothing yet\n")
    return tmp_path


@pytest.mark.parametrize("file", ["one.cu", "shared.cuh"])
def test_a_changed_source_gives_another_name_and_the_old_one_says_so(sources, file):
    plan = KernelPlan("one.cu", (), ())
    old = plans.plan_name(plan)
    assert plans.launch_plan_of(old) == plan
    (sources / file).write_text((sources / file).read_text() + "// changed\n")
    assert plans.plan_name(plan) != old
    with pytest.raises(BackendError, match=r"one\.cu has another version here.*compile it again") as caught:
        plans.launch_plan_of(old)
    assert old in str(caught.value)
    assert plans.launch_plan_of(plans.plan_name(plan)) == plan


def test_a_source_that_is_gone_is_named(sources):
    old = plans.plan_name(KernelPlan("one.cu", (), ()))
    (sources / "one.cu").unlink()
    with pytest.raises(BackendError, match=r"one\.cu is not a kernel source of this installation"):
        plans.launch_plan_of(old)


# Names that cannot be read.

WITHOUT_K = {name: value for name, value in MATMUL.spec().items() if name != "k"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "JSONDecodeError"),
        ("{", "JSONDecodeError"),
        ("null", "AttributeError"),
        ("[1]", "AttributeError"),
        ('"text"', "AttributeError"),
        ("{}", "KeyError: 'kind'"),
        ('{"kind":"absent"}', "KeyError: 'absent'"),
        ('{"kind":{}}', "TypeError"),
        ('{"kind":"kernels"}', "KeyError: 'source'"),
        (json.dumps({"kind": "kernels", **SPIN.spec(), "launches": [3]}), "TypeError"),
        (json.dumps({"kind": "kernels", **SPIN.spec(), "launches": None}), "TypeError"),
        (json.dumps({"kind": "cublaslt", **WITHOUT_K}), "missing 1 required positional argument: 'k'"),
        (json.dumps({"kind": "cublaslt", **MATMUL.spec(), "transposed": 1}), "TypeError"),
    ],
)
def test_a_name_that_cannot_be_read_is_quoted_with_the_reason(name, reason):
    with pytest.raises(BackendError, match="unknown launch plan") as caught:
        plans.launch_plan_of(name)
    message = str(caught.value)
    assert repr(name) in message
    assert reason in message
    known = re.search(r"this process knows the kinds ([^:]*):", message)[1].split(", ")
    assert {"cublaslt", "kernels"} <= set(known)
    assert "compile it again" in message


def test_a_kind_has_one_reader():
    with pytest.raises(ValueError, match="'cublaslt' is registered already"):
        plans.plan_kind("cublaslt", lambda content: MATMUL)
    assert plans.launch_plan_of(plans.plan_name(MATMUL)) == MATMUL


# The book.


@dataclass(frozen=True)
class Slow:
    """A plan that takes a while to prepare and counts."""

    kind: ClassVar[str] = "test slow"
    number: int

    made: ClassVar[list[tuple[int, int]]] = []
    fail: ClassVar[list[bool]] = []

    def spec(self) -> dict[str, Any]:
        return {"number": self.number}

    def prepare(self, device: int) -> plans.Prepared:
        self.made.append((self.number, device))
        time.sleep(0.02)
        if self.fail:
            raise OSError("not now")
        return plans.Prepared(lambda stream, operands, results: None)


plans.plan_kind(Slow.kind, lambda content: Slow(content["number"]))


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr(Slow, "made", [])
    monkeypatch.setattr(Slow, "fail", [])
    return [plans.plan_name(Slow(i)).encode() for i in range(3)]


def counted(book):
    return {name: n for name, n in book.counters().items() if name != "launches"}


def asked_by_threads(n, ask):
    barrier, found = threading.Barrier(n), []

    def run():
        barrier.wait()
        found.append(ask())

    threads = [threading.Thread(target=run) for _ in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return found


def test_eight_threads_prepare_a_plan_once(slow):
    book = plans.PlanBook()
    found = asked_by_threads(8, lambda: book.prepare(slow[0], 0))
    assert Slow.made == [(0, 0)]
    assert len(set(map(id, found))) == 1
    assert book.ready(slow[0], 0) is found[0]
    assert counted(book) == {"hits": 7, "misses": 1, "failures": 0, "held": 1}


def test_each_plan_is_prepared_on_each_device(slow):
    book = plans.PlanBook()
    for _ in range(2):
        for name in slow[:2]:
            for device in (0, 1):
                book.prepare(name, device)
    assert Slow.made == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert book.ready(slow[2], 0) is None
    assert book.ready(slow[0], 2) is None
    assert counted(book) == {"hits": 4, "misses": 4, "failures": 0, "held": 4}


def test_launches_are_counted_and_preparing_is_none(slow):
    book = plans.PlanBook()
    book.prepare(slow[0], 0)
    for _ in range(3):
        book.ready(slow[0], 0)
    assert book.counters()["launches"] == 3


def test_a_failure_is_counted_kept_by_nobody_and_tried_again(slow):
    book = plans.PlanBook()
    Slow.fail.append(True)
    for _ in range(2):
        with pytest.raises(OSError, match="not now"):
            book.prepare(slow[0], 0)
    with pytest.raises(BackendError, match="unknown launch plan"):
        book.prepare(b"\xff", 0)
    assert book.ready(slow[0], 0) is None
    assert counted(book) == {"hits": 0, "misses": 0, "failures": 3, "held": 0}
    Slow.fail.clear()
    book.prepare(slow[0], 0)
    assert counted(book) == {"hits": 0, "misses": 1, "failures": 3, "held": 1}


# How parameters reach a kernel.


def launched(params, operands, results):
    """What cuLaunchKernel is given: geometry, stream, and each parameter as a kernel reads it."""
    seen = []

    def launch_kernel(function, *given):
        *geometry, stream, addresses, extra = given
        pointers = (ctypes.c_void_p * len(params)).from_address(addresses)
        kinds = {"i32": ctypes.c_int32, "i64": ctypes.c_int64}
        values = [
            kinds.get(kind, ctypes.c_uint64).from_address(p).value
            for (kind, _), p in zip(params, pointers, strict=True)
        ]
        seen.append((function, geometry, stream, values, extra))

    start = kernel_plan._launcher(
        launch_kernel, KernelStep("entry", (1, 2, 3), (4, 5, 6), 7, params, function=99, image=b"")
    )
    for stream in (11, 12):
        start(stream, operands, results)
    return seen


def test_parameters_are_addresses_and_numbers_of_the_call_at_hand():
    params = (
        ("result", 1),
        ("i64", -(2**40)),
        ("null", 0),
        ("i32", -5),
        ("operand", 0),
        ("i64", 2**62),
        ("operand", 2),
    )
    operands, results = [2**63 + 1, 20, 30], [100, 2**47 + 8]
    values = [2**47 + 8, -(2**40), 0, -5, 2**63 + 1, 2**62, 30]
    geometry = [1, 2, 3, 4, 5, 6, 7]
    assert launched(params, operands, results) == [(99, geometry, 11, values, 0), (99, geometry, 12, values, 0)]


def test_a_kernel_without_parameters_is_launched():
    assert launched((), [], []) == [(99, [1, 2, 3, 4, 5, 6, 7], stream, [], 0) for stream in (11, 12)]


# How a plan of kernels is prepared, with CuPy's part played by notes.


@pytest.fixture
def notes(monkeypatch):
    """What a compute capability 9.0 device with number 3 would have been asked to do."""
    noted: list[tuple] = []

    class Module:
        def load(self, image: bytes) -> None:
            noted.append(("load", image))

        def get_function(self, entry: str) -> SimpleNamespace:
            return SimpleNamespace(ptr=f"pointer of {entry}")

    cuda = ModuleType("cupy.cuda")
    cuda.Device = lambda device: SimpleNamespace(compute_capability={3: "90", 4: "103", 5: "87", 6: "120"}[device])
    cuda.function = SimpleNamespace(Module=Module)
    cuda.driver = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8,
        funcSetAttribute=lambda *given: noted.append(("attribute", *given)),
        launchKernel=lambda function, *given: noted.append(("launch", function, given[:7], given[7])),
    )
    cupy = ModuleType("cupy")
    cupy.cuda = cuda
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)

    def cubin(source, options, arch):
        noted.append(("compile", source.path, source.entries, options, arch))
        return b"image"

    monkeypatch.setattr(kernel_plan, "cubin", cubin)
    return noted


def test_a_cooperative_kernel_is_launched_as_one(notes):
    driver = sys.modules["cupy.cuda"].driver
    driver.launchCooperativeKernel = lambda *given: notes.append(("together", *given[:9]))
    one = Launch("one", (132, 1, 1), (64, 1, 1), 7, (), cooperative=True)
    prepared = replace(SPIN, launches=(one,)).prepare(3)
    prepared(5, [], [])
    assert notes[-1] == ("together", "pointer of one", 132, 1, 1, 64, 1, 1, 7, 5)
    assert prepared.steps is not None
    assert [step.cooperative for step in prepared.steps if isinstance(step, KernelStep)] == [True]


def test_kernels_are_loaded_when_prepared_and_launched_in_order(notes):
    large = Launch("two", (2, 1, 1), (64, 1, 1), 100 << 10, (("result", 0),))
    plan = replace(SPIN, launches=(*SPIN.launches, large))
    run = plan.prepare(3)
    assert notes == [
        ("compile", "clock/spin.cu", ("spin", "two"), ("-DX=1",), "sm_90"),
        ("load", b"image"),
        ("attribute", "pointer of two", 8, 100 << 10),  # only above what a kernel has unasked
    ]
    notes.clear()
    run(5, [128], [256])
    assert notes == [
        ("launch", "pointer of spin", (1, 2, 3, 4, 5, 6, 7), 5),
        ("launch", "pointer of two", (2, 1, 1, 64, 1, 1, 100 << 10), 5),
    ]


def test_a_gpu_without_code_of_its_own_takes_that_of_its_family(notes):
    SPIN.prepare(4)
    assert notes[0][-1] == "sm_100"
    SPIN.prepare(5)
    assert notes[2][-1] == "sm_87"  # `cubin`, a note here, refuses it


def test_a_launch_that_does_not_fit_the_gpu_is_refused_before_it_is_compiled(notes):
    large = replace(SPIN, launches=(Launch("two", (2, 1, 1), (64, 1, 1), 100 << 10, ()),))
    message = r"clock/spin.cu: two takes 102400 bytes of shared memory in a block, sm_120 has 101376"
    with pytest.raises(BackendError, match=message):
        large.prepare(6)
    assert notes == []
    large.prepare(3)


def test_nothing_is_compiled_where_there_is_nothing_to_launch(notes):
    replace(SPIN, launches=()).prepare(3)(5, [], [])
    assert notes == []


def test_an_algorithm_of_another_length_is_refused_as_cublaslt_reads_all_64_bytes():
    assert cublaslt._algorithm("01" * 64).tobytes() == b"\1" * 64
    for size in (0, 8, 63, 72):
        with pytest.raises(BackendError, match=f"got {size} bytes, needed the 64"):
            cublaslt._algorithm("01" * size)
