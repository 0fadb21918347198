"""Every kernel compiles for every architecture without a GPU, within the registers on record; the cache; the launch geometry."""

import importlib
import json
import re
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ops.kernel_resources import LIMITS, measure
from fusionlab.errors import ArgumentError, CompileError, MissingDependencyError, UnknownNameError
from fusionlab.kernels.launch import compile as compiling
from fusionlab.kernels.launch.architectures import ARCHS
from fusionlab.kernels.launch.compile import (
    KERNELS,
    CompileCache,
    Counters,
    CudaSource,
    Resources,
    cubin,
    resources,
)
from fusionlab.kernels.op.arrays import FLOATS as DTYPES
from fusionlab.kernels.ops.gemm_epilogue.card import SAMPLE
from fusionlab.kernels.ops.gemm_epilogue.elementwise import (
    KERNEL_ACTIVATIONS,
    SOURCE,
    accumulator,
    backward_plan,
    forward_plan,
    saves_for_backward,
)
from fusionlab.kernels.ops.gemm_epilogue.reference import mask_pitch
from fusionlab.kernels.sources import variants

from .test_architectures import check_fits

KEY = "0" * 64
RELU = forward_plan(64, 256, "bfloat16", "relu", bias=True, saves="bits")


@pytest.fixture(scope="module")
def nvrtc():
    """Where CI is set, a test that needs it fails without it (conftest.py)."""
    try:
        compiling.nvrtc_version()
        compiling.headers()
    except MissingDependencyError as e:
        pytest.skip(str(e))


def is_part(arch, name, part):
    """Whether a kernel is in this part of an architecture's: so many parts that one takes about a second."""
    return zlib.crc32(name.encode()) % (64 if arch == "sm_90" else 32) == part


def parts():
    """(arch, part) of all kernels on record, those of sm_90 first."""
    record = json.loads(LIMITS.read_text(encoding="utf-8"))["registers"]
    archs = ["sm_90", *(a for a in ARCHS if a != "sm_90")]
    return [(a, part) for a in archs for part in range(64) if any(is_part(a, name, part) for name in record[a])]


@pytest.mark.dear  # test_architectures.py has one of each source by default
@pytest.mark.nvrtc
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(("arch", "part"), parts())
def test_every_kernel_compiles_within_the_registers_on_record_and_spills_nothing(arch, part):
    record = json.loads(LIMITS.read_text(encoding="utf-8"))
    same = record["nvrtc"] == ".".join(map(str, compiling.nvrtc_version()))
    # Another compiler may choose a little differently, but not lose its way.
    slack, spills = (0, 0) if same else (24, 16)
    plans = dict(variants(arch))
    assert list(plans) == list(record["registers"][arch])
    found = measure(arch, lambda name: is_part(arch, name, part))
    assert found
    for name, by_entry in found.items():
        assert by_entry.keys() == record["registers"][arch][name].keys()
        check_fits(arch, plans[name], by_entry)
        for entry, taken in by_entry.items():
            limit = record["registers"][arch][name][entry] + slack
            assert taken.registers <= limit, f"{name}: {entry}: {LIMITS.name} is written by {record['command']}"
            # Bytes: their tiles take all registers there are; what is spilled of decoding is beside its loops over weights and keys.
            several = name.endswith("by one kernel") and " of 1 " not in name  # texts
            few = 352 if several else 16 if name.startswith("attention") or name.endswith("by one kernel") else 0
            few = 64 if re.match(r"softmax .* of ", name) else few  # its checks are of the last vectors of a row
            # A bias, a cap and the argmax at once, in rows of which much is kept; measured, and without spills, on sm_90 alone.
            few = 96 if re.match(r"softmax \w+ [35]\d{4}.* everything", name) and arch != "sm_90" else few
            assert max(taken.spill_stores, taken.spill_loads) <= spills + few, f"{name}: {entry} spills"


def test_every_dtype_and_every_way_of_saving_is_among_the_sample():
    assert {dtype for dtype, _ in SAMPLE} == set(DTYPES)
    assert {saves_for_backward(a)[0] for _, a in SAMPLE} == {"bits", "bytes", "preactivation"}


def test_resources_are_read_from_the_log_of_ptxas():
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_90'
ptxas info    : Function properties for one
ptxas         .     0 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 72 registers, used 1 barriers, 8192 bytes smem, 360 bytes cmem[0]
ptxas info    : Compiling entry function 'two' for 'sm_90'
ptxas info    : Used 8 registers, used 0 barriers
"""
    assert resources(log) == {"one": Resources(72, 12, 16, 8192), "two": Resources(8, 0, 0, 0)}
    assert resources("") == {}


@pytest.mark.usefixtures("nvrtc")
def test_a_cubin_is_compiled_once_and_found_afterwards(tmp_path):
    cache = CompileCache(tmp_path / "deep" / "er")
    first = cubin(SOURCE, RELU.options, "sm_90", cache)
    assert cache.counters() == Counters(hits=0, misses=1)
    assert cubin(SOURCE, RELU.options, "sm_90", cache) == first
    assert cache.counters() == Counters(hits=1, misses=1)
    other = CompileCache(tmp_path / "deep" / "er")  # as another process would
    assert cubin(SOURCE, RELU.options, "sm_90", other) == first
    assert other.counters() == Counters(hits=1)
    cubin(SOURCE, RELU.options, "sm_80", cache)
    cubin(SOURCE, (*RELU.options, "-DOTHER"), "sm_90", cache)
    assert cache.counters() == Counters(hits=1, misses=3)


@pytest.mark.usefixtures("nvrtc")
def test_a_cubin_is_a_whole_elf_image(tmp_path):
    image = cubin(SOURCE, RELU.options, "sm_90", CompileCache(tmp_path))
    assert image[:4] == b"\x7fELF"
    # Where the tables of headers end (ELF-64: offsets at 0x20 and 0x28, sizes and counts at 0x36).
    segments, sections = np.frombuffer(image, "<u8", 2, 0x20)
    segment_size, segment_count, section_size, section_count = np.frombuffer(image, "<u2", 4, 0x36)
    ends = segments + segment_size * segment_count, sections + section_size * section_count
    assert max(map(int, ends)) <= len(image)


@pytest.mark.usefixtures("nvrtc")
def test_a_change_of_an_included_file_is_another_key(tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "KERNELS", tmp_path)
    (tmp_path / "k.cu").write_text('#include "inner.cuh"\nextern "C" __global__ void k(int* a) { *a = N; }')
    (tmp_path / "inner.cuh").write_text('#  include "most.cuh"')
    cache, source = CompileCache(tmp_path), CudaSource("k.cu", ("k",))
    images = []
    for n in (1, 2, 1):
        (tmp_path / "most.cuh").write_text(f"#define N {n}")
        images.append(cubin(source, (), "sm_90", cache))
    assert images[0] == images[2] != images[1]
    assert cache.counters() == Counters(hits=1, misses=2)


@pytest.mark.filterwarnings("ignore::fusionlab.errors.CacheWarning")  # tests/robustness has what is told
@pytest.mark.parametrize(
    "damage", [lambda d: d[:-1], lambda d: d[:20], lambda d: b"", lambda d: d[:-3] + b"x" + d[-2:]]
)
def test_a_damaged_file_is_seen_and_made_again(tmp_path, damage):
    cache, made = CompileCache(tmp_path), b"a cubin of some length"
    assert cache.get(KEY, lambda: made) == made
    file = tmp_path / f"{KEY}.cubin"
    file.write_bytes(damage(file.read_bytes()))
    assert cache.get(KEY, lambda: b"made again") == b"made again"
    assert cache.counters() == Counters(hits=0, misses=2, damaged=1)
    assert cache.get(KEY, lambda: pytest.fail("compiled although it is there")) == b"made again"
    assert [p.name for p in tmp_path.iterdir()] == [file.name]


@pytest.mark.filterwarnings("ignore::fusionlab.errors.CacheWarning")  # tests/robustness has what is told
def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    cache = CompileCache(tmp_path / "file" / "folder")
    for _ in range(2):
        assert cache.get(KEY, lambda: b"made") == b"made"
    assert cache.counters() == Counters(hits=0, misses=2, unwritten=2)


def test_threads_that_ask_for_the_same_cubin_compile_it_once(tmp_path):
    cache, calls, started = CompileCache(tmp_path), [], threading.Barrier(8)

    def make():
        calls.append(1)
        threading.Event().wait(0.05)
        return b"made"

    def ask():
        started.wait()
        assert cache.get(KEY, make) == b"made"

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert cache.counters() == Counters(hits=7, misses=1)


def test_a_failed_compile_is_not_kept(tmp_path):
    cache = CompileCache(tmp_path)
    with pytest.raises(CompileError):
        cache.get(KEY, lambda: (_ for _ in ()).throw(CompileError("no")))
    assert cache.get(KEY, lambda: b"made") == b"made"


def test_the_folder_is_the_users_unless_one_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("FUSIONLAB_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert CompileCache().folder == tmp_path / ".cache" / "fusionlab" / "cubin"
    monkeypatch.setenv("FUSIONLAB_CACHE_DIR", str(tmp_path / "named"))
    assert CompileCache().folder == tmp_path / "named"


@pytest.mark.usefixtures("nvrtc")
def test_a_source_that_does_not_compile_says_where_for_what_and_why(tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "KERNELS", tmp_path)
    (tmp_path / "bad.cu").write_text('extern "C" __global__ void k(float* a) { *a = undeclared; }')
    with pytest.raises(CompileError) as caught:
        cubin(CudaSource("bad.cu", ("k",)), ("-DX=1",), "sm_80", CompileCache(tmp_path))
    for part in ("bad.cu does not compile for sm_80", "-DX=1", '"undeclared" is undefined', "bad.cu(1)"):
        assert part in str(caught.value)
    assert "\0" not in str(caught.value)


def test_an_architecture_that_the_source_is_not_written_for_is_refused():
    with pytest.raises(ArgumentError, match=r"got 'sm_70' for gemm_epilogue/epilogue.cu, needed one of sm_75"):
        cubin(SOURCE, RELU.options, "sm_70")


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(("major", "wheel"), [(13, "nvidia-cuda-runtime==13"), (12, "nvidia-cuda-runtime-cu12==12")])
def test_without_headers_the_error_names_the_wheel(major, wheel, tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "_header_folders", lambda major: [tmp_path])
    monkeypatch.setattr(compiling, "nvrtc_version", lambda: (major, 0))
    with pytest.raises(MissingDependencyError, match=re.escape(f"pip install '{wheel}.*'")):
        compiling.headers()


@pytest.mark.parametrize("major", [12, 13])
def test_headers_are_looked_for_in_wheels_and_toolkits_and_must_be_of_nvrtcs_version(major, tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "nvrtc_version", lambda: (major, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(compiling, "_major_of", _major_under(tmp_path, compiling._major_of))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    for version in (12, 13):
        include = tmp_path / str(version) / "include"
        include.mkdir(parents=True)
        for name in ("cuda_fp16.h", "cuda_bf16.h"):
            (include / name).write_text("")
        (include / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}040\n")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "12"))
    nvcc = tmp_path / "13" / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", str(nvcc.parent))
    assert compiling.headers() == tmp_path / str(major) / "include"


def _major_under(root: Path, real):
    """Toolkits of this machine itself are not seen."""
    return lambda folder: real(folder) if folder.is_relative_to(root) else None


def test_without_cupy_the_error_names_the_extra(monkeypatch):
    def missing(name, *args):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(MissingDependencyError, match=re.escape('pip install "fusionlab[cuda13]"')):
        compiling.nvrtc_version()


# Geometry. A launch is a product of columns and rows, so each is checked by itself: what the kernels' own index arithmetic reaches.

SIZES = st.integers(0, 3000)


def columns_reached(launch, vec):
    """The columns of all threads along x, in the order of the threads."""
    return np.arange(launch.grid[0] * launch.block[0] * vec)


def vec_of(spec):
    return int(next(o for o in spec.options if o.startswith("-DFL_VEC=")).removeprefix("-DFL_VEC="))


def check_limits(spec):
    for launch in spec.launches:
        assert 1 <= launch.grid[0] < 2**31
        assert 1 <= launch.grid[1] <= 65535
        width, height, _ = launch.block
        assert width * height == (1024 if launch.entry == "epilogue_sum" else 256)
        assert width & (width - 1) == height & (height - 1) == 0


@given(SIZES, SIZES, st.sampled_from(DTYPES), st.sampled_from(KERNEL_ACTIVATIONS), st.data())
def test_forward_takes_every_element_once(rows, columns, dtype, activation, data):
    saves = data.draw(st.sampled_from(("none", *saves_for_backward(activation))))
    spec = forward_plan(rows, columns, dtype, activation, bias=False, saves=saves)
    assert bool(spec.launches) == bool(rows and columns)
    check_limits(spec)
    for launch in spec.launches:
        vec = vec_of(spec)
        assert columns % vec == 0
        reached = columns_reached(launch, vec)
        assert reached[:columns].size == columns
        if saves == "bits":
            assert reached.size >= 8 * mask_pitch(columns)
            assert vec == 8 or launch.block[0] % 32 == 0
        (_, by), height = launch.grid[:2], launch.block[1]
        # first, then kRows rows blockDim.y apart, then the next tile gridDim.y tiles on
        tiles = -(-rows // (4 * height * by))
        tile, block, i, thread = np.ix_(np.arange(tiles), np.arange(by), np.arange(4), np.arange(height))
        taken = ((tile * by + block) * 4 * height + i * height + thread).ravel()
        np.testing.assert_array_equal(np.bincount(taken[taken < rows], minlength=rows), np.ones(rows))


@given(SIZES, SIZES, st.sampled_from(DTYPES), st.sampled_from(KERNEL_ACTIVATIONS), st.booleans(), st.data())
def test_backward_takes_every_element_once_and_every_partial_sum_is_written(
    rows, columns, dtype, activation, dbias, data
):
    saves = data.draw(st.sampled_from(saves_for_backward(activation)))
    dbias = dbias or activation == "none"
    spec, scratch = backward_plan(rows, columns, dtype, activation, dbias=dbias, saves=saves)
    assert len(spec.launches) == (0 if not columns or not (rows or dbias) else 1 + dbias)
    check_limits(spec)
    assert (scratch is None) == (not dbias)
    for launch in spec.launches[:1]:
        per_block = launch.params[-1][1]
        height = launch.block[1]
        assert columns % vec_of(spec) == 0
        assert columns_reached(launch, vec_of(spec))[:columns].size == columns
        starts = per_block * np.arange(launch.grid[1])
        step, thread = np.ix_(np.arange(-(-per_block // height)), np.arange(height))
        inside = (step * height + thread).ravel()
        inside = inside[inside < per_block]
        taken = (starts[:, None] + inside).ravel()
        np.testing.assert_array_equal(np.bincount(taken[taken < rows], minlength=rows), np.ones(rows))
        assert not dbias or scratch == (launch.grid[1], columns)
    for launch in spec.launches[1:]:
        assert launch.params[2:] == (("i64", scratch[0]), ("i64", columns))
        assert launch.grid[0] * launch.block[0] >= columns


@pytest.mark.parametrize("saves", ["bits", "preactivation"])
@pytest.mark.parametrize(("rows", "columns"), [(8192, 16384), (32768, 4096), (131072, 512), (2**22, 16), (2**27, 8)])
def test_a_large_sum_leaves_few_partial_sums_and_enough_blocks(rows, columns, saves):
    spec, (parts, _) = backward_plan(rows, columns, "bfloat16", "relu", dbias=True, saves=saves)
    moved = rows * columns * (2 + 2 + {"bits": 0.125, "preactivation": 2}[saves])
    assert parts * columns * 4 * 2 < 0.01 * moved
    assert 132 * 5 <= np.prod(spec.launches[0].grid) < 132 * 64
    assert accumulator("bfloat16") == "float32"


def test_sizes_beyond_32_bits_stay_within_the_grid():
    check_limits(forward_plan(2**33, 3, "float32", "relu", bias=True, saves="bits"))
    spec, scratch = backward_plan(2**33, 3, "float32", "relu", dbias=True, saves="bits")
    check_limits(spec)
    assert scratch[0] * spec.launches[0].params[-1][1] >= 2**33


def test_what_does_not_exist_is_refused():
    with pytest.raises(ArgumentError, match="got 'bits' for activation 'silu', needed one of none, preactivation"):
        forward_plan(1, 1, "float32", "silu", bias=True, saves="bits")
    with pytest.raises(ArgumentError, match="got 'none' for activation 'relu', needed one of bits"):
        backward_plan(1, 1, "float32", "relu", dbias=True, saves="none")
    with pytest.raises(ArgumentError, match="dh is ct"):
        backward_plan(1, 1, "float32", "none", dbias=False, saves="none")
    with pytest.raises(ArgumentError, match="got -1 and 1"):
        forward_plan(-1, 1, "float32", "relu", bias=True, saves="none")
    with pytest.raises(UnknownNameError, match="unknown dtype 'int8'"):
        forward_plan(1, 1, "int8", "relu", bias=True, saves="none")
    with pytest.raises(UnknownNameError, match="unknown activation 'gelu'"):
        backward_plan(1, 1, "float32", "gelu", dbias=True, saves="bits")


# Kernels that may start before what comes before them has ended.


def early_kernels():
    plans = [plan for _, plan in variants("sm_90")]
    found = {(plan.source, one.entry) for plan in plans for one in plan.launches if one.early}
    # Those of decode.cu ask for weights and caches before they wait: test_decode_cuda.py.
    return sorted(one for one in found if one[0] != "multi_transformer/decode/phased/decode.cu")


@pytest.mark.parametrize(("source", "entry"), early_kernels())
def test_a_kernel_that_may_start_early_waits_before_anything_else(source, entry):
    text = (KERNELS / source).read_text(encoding="utf-8")
    (body,) = re.findall(rf"\b{entry}\s*\([^)]*\)\s*\{{\s*(.*?)\n", text)
    assert body == "fl_wait();"
    assert "__restrict__" not in re.sub(r"//[^\n]*", "", text)  # such memory may be read before the wait


def test_there_are_kernels_that_may_start_early():
    assert ("gemm_epilogue/epilogue.cu", "epilogue_forward") in early_kernels()
