"""How the kernels of `group_norm.cu` are compiled and launched for a call: plain arithmetic, no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...launch.compile import CudaSource
from ...launch.kernel_plan import KernelPlan, Launch
from ..passes import CODES, SUM_HEIGHT, KernelPass, float_param, options, places, sum_of_parts, those
from . import tiling

SOURCE = CudaSource(
    "group_norm/group_norm.cu", ("gn_stats", "gn_apply", "gn_grad_sums", "gn_grad_x", "gn_grad_vectors")
)
_ACTIVATIONS = {"none": 0, "silu": 6}  # as activation.cuh numbers them
_GRADIENTS = ("x", "scale", "bias")  # in the order of the bits of FL_WANT
_BACKWARD_OPERANDS = ("ct", "x", "scale", "bias", "mean", "rstd")  # as the kernels take them


@dataclass(frozen=True)
class Images:
    """The parameters that all kernels of a call share.

    Attributes:
      batch, positions, channels, groups: of x.
      dtype: numpy's name, of x and out.
      activation: "none" or "silu".
      vectors: (slot, dtype) of those of scale and bias that there are.
    """

    batch: int
    positions: int
    channels: int
    groups: int
    dtype: str
    activation: str
    vectors: tuple[tuple[str, str], ...]

    @cached_property
    def tile(self) -> tiling.GroupTile:
        return tiling.tile_of(self.channels, self.groups, self.dtype)

    @cached_property
    def splits(self) -> int:
        return tiling.splits_of(self.batch, self.positions, self.channels, self.dtype, self.tile.blocks)

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """The shape of what chunks leave of groups."""
        return self.batch, self.splits, self.groups, 2

    def over_chunks(self, entry: str, params: tuple[tuple[str, int], ...]) -> Launch:
        block = (self.tile.lanes, self.tile.height, 1)
        return Launch(entry, (self.splits, self.batch, 1), block, 0, params, early=True)


def forward_pass(images: Images, epsilon: float, saves: bool) -> KernelPass:
    """Gives out, and mean and rstd where they are saved."""
    reads = ("x", *those(dict(images.vectors), "scale", "bias"))
    gives = ("out", "mean", "rstd") if saves else ("out",)
    results = (*gives, "parts")
    positions = ("i64", images.positions)
    stats = (*places("operand", ("x",), reads), *places("result", ("parts",), results), positions)
    apply = (
        *places("operand", ("x", "scale", "bias"), reads),
        *places("result", ("parts", "out", "mean", "rstd"), results),
        positions,
        float_param(epsilon),
    )
    launches = images.over_chunks("gn_stats", stats), images.over_chunks("gn_apply", apply)
    told = _options(0, images, reads, SAVES=int(saves))
    return KernelPass(KernelPlan(SOURCE.path, told, launches), reads, gives, (images.parts,))


def backward_pass(images: Images, wanted: tuple[str, ...]) -> KernelPass:
    """Gives the gradients of the slots in `wanted`, in the order x, scale, bias: not of bias alone where there is no activation."""
    grads = those(wanted, *_GRADIENTS)
    reads = _backward_reads(images, grads)
    sums = those(grads, "scale", "bias")
    of_channels = (images.batch * images.splits, images.channels)
    scratch: dict[str, tuple[int, ...]] = {"parts": images.parts} if "x" in grads else {}
    scratch |= {f"parts_{slot}": of_channels for slot in sums}
    results = (*grads, *scratch)
    operands = places("operand", _BACKWARD_OPERANDS, reads)
    positions = ("i64", images.positions)
    summed = (*operands, *places("result", ("parts", "parts_scale", "parts_bias"), results), positions)
    launches = [images.over_chunks("gn_grad_sums", summed)]
    if "x" in grads:
        of_x = (*operands, *places("result", ("parts", "x"), results), positions)
        launches.append(images.over_chunks("gn_grad_x", of_x))
    launches += sum_of_parts("gn_grad_vectors", images.channels, ("scale", "bias"), results, of_channels[0])
    wants = sum(1 << _GRADIENTS.index(slot) for slot in grads)
    told = _options(1, images, reads, WANT=wants, SUM_HEIGHT=SUM_HEIGHT)
    return KernelPass(KernelPlan(SOURCE.path, told, tuple(launches)), reads, grads, tuple(scratch.values()))


def _backward_reads(images: Images, grads: tuple[str, ...]) -> tuple[str, ...]:
    """With an activation all that its input is made of."""
    given, active = dict(images.vectors), images.activation != "none"
    there = {"ct", "x", "mean", "rstd"}
    there |= {"scale"} if "scale" in given and (active or "x" in grads) else set()
    there |= {"bias"} if "bias" in given and active else set()
    return those(there, *_BACKWARD_OPERANDS)


def _options(kind: int, images: Images, reads: tuple[str, ...], **more: int) -> tuple[str, ...]:
    given, tile = dict(images.vectors), images.tile
    return options(
        {
            "KIND": kind,
            "T": CODES[images.dtype],
            **{slot.upper(): CODES.get(given.get(slot, ""), -1) for slot in ("scale", "bias")},
            "READS_SCALE": int("scale" in reads),
            "READS_BIAS": int("bias" in reads),
            "ACT": _ACTIVATIONS[images.activation],
            "16BIT": int(images.dtype != "float32"),
            "C": images.channels,
            "G": images.groups,
            "VEC": tile.vec,
            "LANES": tile.lanes,
            "VECS": tile.vecs,
            "HEIGHT": tile.height,
            "TEAM": tile.team,
            "BLOCKS": tile.blocks,
            **more,
        }
    )
