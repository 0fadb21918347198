"""What the CUDA kernels need of a GPU, and what each architecture has: instructions, shared memory, warps. Plain data, no GPU.

A kernel is refused for an architecture by name, before it is compiled or launched.

Sources: NVIDIA's CUDA Programming Guide, "Compute Capabilities" (features, and limits of a multiprocessor) and "Binary Compatibility"; the
header `cuda/__device/arch_traits.h` of NVIDIA's libcu++ has the same limits. PTX ISA, "Target ISA Notes", for the instructions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...device import Device
from ...showing import Shown

THREADS = 1024  # of a block, at most
REGISTERS = 1 << 16  # of 32 bits, of a multiprocessor and of a block
RESERVED = 1 << 10  # bytes of shared memory that CUDA takes for each resident block, from sm_80 on


@dataclass(frozen=True, repr=False)
class Architecture(Shown):
    """The limits of a multiprocessor; its registers are `REGISTERS` on all of them.

    Attributes:
      name: "sm_90".
      shared: bytes of shared memory that one block may ask for.
      shared_of_all: bytes of shared memory of all blocks that are resident at once.
      warps: that are resident at once, 32 threads each.
      blocks: that are resident at once.
    """

    _says = "{0.name}: {0.shared} bytes of shared memory per block, {0.warps} warps and {0.blocks} blocks per multiprocessor"

    name: str
    shared: int
    shared_of_all: int
    warps: int
    blocks: int

    def refuses(self, kernel: str, threads: int, shared: int) -> str | None:
        """Why no block of a kernel can run, with what it needs and the limit, or None.

        Args:
          kernel: what to call it.
          threads: of a block.
          shared: bytes of shared memory of a block, static and dynamic.
        """
        if threads > THREADS:
            return f"{kernel} has {threads} threads in a block, {self.name} takes {THREADS}"
        if shared > self.shared:
            return f"{kernel} takes {shared} bytes of shared memory in a block, {self.name} has {self.shared}"
        return None

    def resident(self, threads: int, registers: int, shared: int) -> int:
        """How many blocks are resident on a multiprocessor at once; `registers` are those of a thread."""
        warps = -(-threads // 32)
        of_a_warp = -(-32 * registers // 256) * 256  # registers are given to warps by 256
        by_registers = REGISTERS // of_a_warp // warps if registers else self.blocks
        reserved = RESERVED if self.shared < self.shared_of_all else 0
        return min(self.blocks, self.warps // warps, by_registers, self.shared_of_all // max(shared + reserved, 1))


# Those that the kernels are compiled for: name -> limits, the oldest first.
ARCHITECTURES = {
    name: Architecture(name, shared << 10, of_all << 10, warps, blocks)
    for name, shared, of_all, warps, blocks in (
        ("sm_75", 64, 64, 32, 16),
        ("sm_80", 163, 164, 64, 32),
        ("sm_86", 99, 100, 48, 16),
        ("sm_89", 99, 100, 48, 24),
        ("sm_90", 227, 228, 64, 32),
        ("sm_100", 227, 228, 64, 32),
        ("sm_120", 99, 100, 48, 24),
    )
}
ARCHS = tuple(ARCHITECTURES)
# Jetson and Drive: code for another GPU of the same major version does not run there.
_TEGRA = ("sm_87", "sm_110")


@dataclass(frozen=True, repr=False)
class Instructions(Shown):
    """Instructions that not every GPU has.

    Attributes:
      name: what they do, in a few words.
      since: the oldest compute capability that has them, times ten.
      ptx: texts by which a source that uses them is known, one of which it contains.
      alone: whether no later compute capability has them.
    """

    _says = "{0.name}, since sm_{0.since}"

    name: str
    since: int
    ptx: tuple[str, ...]
    alone: bool = False


TENSOR_CORES = Instructions("tensor-core products of bfloat16 and TF32", 80, ("mma.sync.aligned",))
COPIES = Instructions("asynchronous copies (cp.async)", 80, ("cp.async.ca.", "cp.async.cg."))
CLUSTERS = Instructions("thread block clusters", 90, ("__cluster_dims__",))
BULK_COPIES = Instructions("the bulk copy engine (TMA)", 90, ("cp.async.bulk",))
WARPGROUPS = Instructions("warpgroup products (wgmma)", 90, ("wgmma",), alone=True)
INSTRUCTIONS = (TENSOR_CORES, COPIES, CLUSTERS, BULK_COPIES, WARPGROUPS)


def refuses_instructions(arch: str, needs: Sequence[Instructions], kernel: str) -> str | None:
    """Why a kernel that uses these instructions cannot run on an architecture, or None: the last that it would have to have."""
    capability = capability_of(arch)
    lacking = [one for one in needs if capability < one.since or (one.alone and capability != one.since)]
    if not lacking:
        return None
    since = max(one.since for one in lacking)
    names = " and ".join(one.name for one in lacking if one.since == since)
    if capability < since:
        return f"{arch} is older than sm_{since}, the oldest with {names}, which {kernel} uses"
    return f"{arch} is not sm_{since}, which alone has {names}, which {kernel} uses"


def capability_of(arch: str) -> int:
    """Compute capability times ten (90 for "sm_90")."""
    return int(arch.removeprefix("sm_"))


def target_of(arch: str) -> str | None:
    """The architecture out of `ARCHS` whose code runs on a GPU of `arch`: itself, or the newest older one of the same major version
    ("sm_100" for "sm_103"); None for a GPU that runs none of their code."""
    capability = capability_of(arch)
    fitting = [a for a in ARCHS if capability_of(a) // 10 == capability // 10 and capability_of(a) <= capability]
    return arch if arch in ARCHS else fitting[-1] if fitting and arch not in _TEGRA else None


def refuses_older(device: Device, least: int, which: str) -> str | None:
    """Why a device is not a CUDA GPU of this compute capability (80) or a later one, or None; `which` describes it: "the oldest ..."."""
    if device.platform != "cuda":
        return f"it needs a CUDA device, this is {device}"
    if device.arch and device.capability < least:
        return f"{device.arch} is older than sm_{least}, {which}"
    return None


def refuses_untargeted(device: Device) -> str | None:
    """Why code for none of `ARCHS` runs on a device, or None; a CUDA device whose architecture is not known takes any."""
    if reason := refuses_older(device, capability_of(ARCHS[0]), "the oldest that the CUDA compiler builds for"):
        return reason
    if device.arch and target_of(device.arch) is None:
        return f"{device.arch} runs code for none of {', '.join(ARCHS)}, which the kernels are compiled for"
    return None
