"""Every CUDA source compiles for each GPU without one, or is refused there by name; launches fit the limits of each."""

import math
import os
from dataclasses import replace

import pytest

from fusionlab.device import GPUS, Device
from fusionlab.errors import CompileError, MissingDependencyError
from fusionlab.kernels import CARDS, OPS
from fusionlab.kernels.launch import compile as compiling
from fusionlab.kernels.launch.architectures import (
    ARCHITECTURES,
    ARCHS,
    INSTRUCTIONS,
    REGISTERS,
    refuses_instructions,
    target_of,
)
from fusionlab.kernels.launch.compile import KERNELS, compile_source, resources, source_texts
from fusionlab.kernels.sources import State, coverage, sources, variants
from tests import tiers

CLUSTERS_AND_TMA = "the oldest with thread block clusters and the bulk copy engine (TMA), which "


@pytest.fixture(scope="module")
def nvrtc():
    """Where CI is set, a test that needs it fails without it (conftest.py)."""
    try:
        version = compiling.nvrtc_version()
        compiling.headers()
    except MissingDependencyError as e:
        pytest.skip(str(e))
    if version < (12, 8):
        pytest.skip(
            f"needs NVRTC 12.8 or later, which compiles for sm_100 and sm_120: this is {version[0]}.{version[1]}"
        )


def check_fits(arch, plan, taken):
    """That a block of each kernel of a plan has room on a multiprocessor; `taken`: entry -> what it takes, as it is compiled."""
    limits = ARCHITECTURES[arch]
    for one in plan.launches:
        found, threads = taken[one.entry], math.prod(one.block)
        assert limits.refuses(one.entry, threads, found.shared + one.shared) is None
        assert limits.resident(threads, found.registers, found.shared + one.shared) >= 1
        assert found.registers * threads <= REGISTERS


def of_source(path, arch):
    """One variant of a source: the first that its card lists."""
    return next(plan for _, plan in variants(arch) if plan.source == path)


@pytest.mark.whole
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("path", sources())
def test_one_variant_of_each_source_compiles_for_sm_90_and_another_card_in_turns(path):
    others = [arch for arch in sources()[path].archs if arch != "sm_90"]
    turn = list(sources()).index(path) + int(os.environ.get(tiers.SLICE_VARIABLE, "0"), 16)
    for arch in ("sm_90", *(others[turn % len(others)] for _ in others[:1])):
        plan = of_source(path, arch)
        check_fits(arch, plan, resources(compile_source(sources()[path], plan.options, arch).log))


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("path", [path for path, source in sources().items() if source.needs])
def test_the_compiler_refuses_what_is_refused_for_want_of_instructions(path):
    source = sources()[path]
    older = [arch for arch in ARCHS if refuses_instructions(arch, source.needs, "it")]
    assert older
    with pytest.raises(CompileError):
        compile_source(replace(source, needs=(), shared=0, tried=()), of_source(path, "sm_90").options, older[-1])


def test_every_source_of_the_package_is_listed():
    assert {path.relative_to(KERNELS).as_posix() for path in KERNELS.rglob("*.cu")} == sources().keys()


@pytest.mark.parametrize("arch", sorted(ARCHS, key=lambda arch: ARCHITECTURES[arch].shared))
def test_each_source_has_variants_for_a_card_that_they_fit_or_is_refused_there_by_name(arch):
    """What test_compile.py compiles, all of it in the full tier."""
    unable = {path: source.refuses_arch(arch) for path, source in sources().items()}
    assert {plan.source for _, plan in variants(arch)} == {path for path, why in unable.items() if why is None}
    assert all(arch in why and path.rpartition("/")[2] in why for path, why in unable.items() if why)
    assert [name for name, plan in variants(arch) if plan.refuses(arch)] == []


@pytest.mark.parametrize("path", sources())
def test_a_source_names_the_instructions_that_its_text_has(path):
    text = "".join(source_texts(sources()[path].file).values())
    assert {one for one in INSTRUCTIONS if any(name in text for name in one.ptx)} == set(sources()[path].needs)


def test_what_needs_clusters_or_the_bulk_copy_engine_is_refused_before_sm_90():
    for path in ("multi_transformer/decode/phased/decode.cu", "multi_transformer/decode/persistent/persistent.cu"):
        name = path.rpartition("/")[2]
        for arch in ("sm_80", "sm_89"):
            why = f"{arch} is older than sm_90, {CLUSTERS_AND_TMA}{name} uses"
            assert sources()[path].refuses_arch(arch) == why
    assert sources()[path].refuses_arch("sm_100") == "sm_100 is not sm_90, where alone persistent.cu was tried"
    (wgmma,) = [one for one in INSTRUCTIONS if "wgmma" in one.name]
    why = "sm_100 is not sm_90, which alone has warpgroup products (wgmma), which it uses"
    assert refuses_instructions("sm_100", (wgmma,), "it") == why
    assert refuses_instructions("sm_90", (wgmma,), "it") is None


@pytest.mark.parametrize(
    ("arch", "target"),
    [
        ("sm_90", "sm_90"),
        ("sm_103", "sm_100"),
        ("sm_121", "sm_120"),
        *((a, None) for a in ("sm_87", "sm_110", "sm_70")),
    ],
)
def test_a_gpu_runs_code_of_its_major_version_that_is_no_newer(arch, target):
    assert target_of(arch) == target
    unable = OPS["lerp"].implementations["cuda"].unable_on(Device.of(arch))
    assert (unable is None) == (target is not None)
    assert unable is None or unable.startswith(f"{arch} ")


def test_how_many_blocks_are_resident():
    """Against NVIDIA's occupancy calculator: 1,024 threads of 32 registers, and what shared memory or registers leave room for."""
    h100, rtx4090 = ARCHITECTURES["sm_90"], ARCHITECTURES["sm_89"]
    assert (h100.resident(1024, 32, 0), rtx4090.resident(1024, 32, 0)) == (2, 1)
    assert (h100.resident(256, 128, 108 << 10), rtx4090.resident(256, 128, 48 << 10)) == (2, 2)
    assert h100.resident(256, 255, 0) == 1
    assert rtx4090.resident(256, 32, 100 << 10) == 0


# What each card has of each op.


def test_a_card_has_each_op_measured_compiled_or_refused_with_the_reason():
    found = {(name, card.op.name): coverage(card, Device.of(name)) for name in GPUS for card in CARDS}
    for (name, op), one in found.items():
        assert (one.state is State.REFUSED) == (bool(one.refused) and not one.runs), (name, op)
        assert (one.state is State.XLA) == (not one.refused and not one.runs)
        assert (one.state is State.MEASURED) == (GPUS[name] == "sm_90")
        assert all(GPUS[name] in why for why in one.refused.values())
    states = {op: [found[name, op].state.value for name in ("t4", "a100", "h100", "b200", "rtx5090")] for op in OPS}
    assert states["lerp"] == ["compiled", "compiled", "measured", "compiled", "compiled"]
    assert states["multi_transformer"] == ["refused", "refused", "measured", "compiled", "compiled"]
    assert states["grouped_matmul"] == ["refused", "refused", "measured", "refused", "refused"]
    assert states["linear_cross_entropy"] == ["refused", "compiled", "measured", "compiled", "compiled"]
    assert (
        found["a100", "multi_transformer"].refused["cuda"].startswith(f"sm_80 is older than sm_90, {CLUSTERS_AND_TMA}")
    )
