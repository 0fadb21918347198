"""`grouped_matmul` on a Hopper GPU by Mosaic kernels: each row is multiplied only by the matrix of its own group.

The product of rows is the kernel that JAX ships (`jax.experimental.pallas.ops.gpu.ragged_dot_mgpu`). It leaves rows of no group unwritten,
which `jax.lax.ragged_dot` defines as zeros: they are zeroed afterwards. The product that gives a group's matrix (the gradient of
weights) is written here after `transposed_ragged_dot_mgpu`, which multiplies rows of other groups by a mask: a NaN or an infinity
there would reach this group's matrix. Here such rows are selected out.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ....device import Device
from ....graph.jax_compat import enable_x64
from ...launch.architectures import WARPGROUPS, refuses_instructions
from ...op.arrays import names_algorithm, refuses_dtypes
from .reference import as_product

Array = Any

DTYPES = ("bfloat16", "float16")
MOST_GROUPS = 256  # the shipped kernel unrolls a loop over the groups
BLOCK = (
    64  # what every axis of the matrices is a multiple of: a tile that does not divide the columns gave wrong results
)
_ROWS = 8  # what the rows are a multiple of: they lie in shared memory so
_MULTIPROCESSORS = 132  # of an H100 or H200 SXM, as many programs as the shipped kernel starts; fewer share them
_SHIPPED = "jax.experimental.pallas.ops.gpu.ragged_dot_mgpu"


@dataclass(frozen=True)
class Tile:
    """The work of one step of a program: rows (or, of a group's matrix, its rows), columns, entries of a sum; how many steps are
    under way at once, and how many columns of tiles are gone through before the next row of them."""

    rows: int
    columns: int
    inner: int = BLOCK
    steps: int = 6
    snake: int = 8


def tile_of_rows(columns: int) -> Tile:
    """For a product of rows: each was compared with float64 (tests/gpu/test_grouped_matmul.py)."""
    return Tile(128, 128) if columns % 128 == 0 else Tile(128, 64)


def tile_of_weights(rows: int, columns: int) -> Tile:
    """For a group's matrix of that many rows and columns; as `tile_of_rows`."""
    return Tile(128 if rows % 128 == 0 else 64, 128 if columns % 128 == 0 else 64, steps=4, snake=1)


def refuses(
    shapes: Mapping[str, Any], device: Device, *, role: str, precision: Any, out: str | None, **attrs: Any
) -> str | None:
    """Why the kernels cannot run a call or its gradients, or None."""
    arrays = {slot: a for slot, a in shapes.items() if slot != "group_sizes"}
    if unable := refuses_dtypes(arrays, DTYPES):
        return unable
    dtypes = {np.dtype(a.dtype).name for a in arrays.values()}
    if len(dtypes) > 1 or out not in (None, *dtypes):
        return f"operands of {', '.join(sorted(dtypes))} and a result of {out}: the kernels have one dtype for all"
    if names_algorithm(precision):
        return f"precision {precision} names an algorithm"
    if rows_of(shapes) % _ROWS:
        return f"{rows_of(shapes)} rows, not a multiple of {_ROWS}"
    groups = shapes["group_sizes"].shape[0]
    if groups > MOST_GROUPS:
        return f"{groups} groups, more than {MOST_GROUPS}"
    for slot, a in arrays.items():
        if 0 in a.shape:
            return f"{slot} is empty: there is nothing to compute"
        if any(size % BLOCK for size in a.shape[1:]):
            return f"{slot} has axes of {a.shape[1:]}, not multiples of {BLOCK}"
    return None


def rows_of(shapes: Mapping[str, Any]) -> int:
    """The number of rows: the first axis of any operand that is not one matrix per group."""
    return next(a.shape[0] for a in shapes.values() if len(a.shape) == 2)


def refuses_device(device: Device) -> str | None:
    """Why the kernels cannot run on a device, or None."""
    if device.platform != "cuda":
        return f"needs a CUDA device, this is {device}"
    unknown = f"the architecture of {device} is not known"
    lacking = refuses_instructions(device.arch, (WARPGROUPS,), "the kernel") if device.arch else unknown
    return lacking or missing()


@functools.cache
def missing() -> str | None:
    """The missing requirement of the shipped kernel, or None; the kernel itself is not imported, since that takes long."""
    for module, advice in (
        (_SHIPPED, "install jax>=0.10"),
        ("absl", "the module of JAX's kernel imports it: pip install absl-py"),
    ):
        try:
            if importlib.util.find_spec(module) is None:
                return f"there is no {module} here: {advice}"
        except ModuleNotFoundError:  # a package around it is not there
            return f"there is no {module} here: {advice}"
    return None


def forward(
    x: Array, w: Array, group_sizes: Array, *, residuals: bool, kind: str, w_contract: int, **attrs: Any
) -> list[Array]:
    """[out]."""
    if kind == "weights":
        return [of_weights(x, w, group_sizes)]
    return [of_rows(x, w, group_sizes, w_contract)]


def cotangent(
    saved: Mapping[str, Array],
    ct: Array,
    wanted: Sequence[str],
    shardings: Any,
    *,
    kind: str,
    w_contract: int,
    **attrs: Any,
) -> list[Array]:
    """The wanted gradients of x and w, each by one of the two products again."""
    found = []
    for slot in wanted:
        kind_of_it, x, w, contract = as_product(slot, saved, ct, kind, w_contract)
        found += forward(x, w, saved["group_sizes"], residuals=False, kind=kind_of_it, w_contract=contract)
    return found


def _ends(group_sizes: Array, rows: int) -> Array:
    """Where each group ends, within the rows that there are."""
    return jnp.minimum(jnp.cumsum(group_sizes.astype(jnp.int32)), rows)


def of_rows(x: Array, w: Array, group_sizes: Array, w_contract: int) -> Array:
    """x (rows x inner) times the matrix of each row's group (inner x columns; columns x inner with `w_contract` 1); zeros for rows of
    none."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    rows, ends = x.shape[0], _ends(group_sizes, x.shape[0])
    tile = tile_of_rows(w.shape[2 - w_contract])
    out = ragged_dot(
        x,
        w,
        group_sizes=jnp.diff(ends, prepend=0),
        block_m=tile.rows,
        block_n=tile.columns,
        block_k=tile.inner,
        max_concurrent_steps=tile.steps,
        grid_block_n=tile.snake,
        transpose_rhs=bool(w_contract),
    )
    of_a_group = lax.broadcasted_iota(jnp.int32, (rows, 1), 0) < ends[-1]
    return jnp.where(of_a_group, out, jnp.zeros_like(out))


def of_weights(x: Array, y: Array, group_sizes: Array) -> Array:
    """For each group the product of its rows of x (rows x m), turned, and of y (rows x n): groups x m x n.

    A program goes through tiles of all groups' results. The rows of a group are read in blocks of `tile.inner` that begin at multiples of
    that; in the first and the last, rows of other groups are set to zero in shared memory.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    (rows, m), n, groups = x.shape, y.shape[1], group_sizes.shape[0]
    tile = tile_of_weights(m, n)
    ends = _ends(group_sizes, rows)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    first = starts // tile.inner * tile.inner
    count = jnp.where(ends > starts, (ends - first + tile.inner - 1) // tile.inner, 0)
    grid = m // tile.rows, n // tile.columns
    x_layout, y_layout = (_layout(plgpu, width) for width in (tile.rows, tile.columns))

    def keep(block: Any, width: int, low: Any, high: Any) -> None:
        """Sets the rows of a block outside of low ... high to zero."""
        row = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (tile.inner, width), 0), plgpu.Layout.WGMMA)
        values = block[...]
        block[...] = jnp.where((row >= low) & (row < high), values, jnp.zeros_like(values))

    def body(starts_ref: Any, ends_ref: Any, first_ref: Any, count_ref: Any, x_ref: Any, y_ref: Any, out: Any) -> None:
        @plgpu.nd_loop((groups, grid[0] * grid[1]), collective_axes="sm")
        def each(loop: Any) -> None:
            group = loop.index[0]
            at_m, at_n = plgpu.planar_snake(loop.index[1], grid, 1, tile.snake)
            begin = pl.multiple_of(first_ref[group], tile.inner)
            mine = pl.ds(begin, rows)

            def summed(acc: Any) -> Array:
                def step(index: Any, xs: Any, ys: Any) -> None:
                    block = index[0]

                    @pl.when((block == 0) | (block == count_ref[group] - 1))
                    def _() -> None:
                        here = begin + block * tile.inner
                        low, high = starts_ref[group] - here, ends_ref[group] - here
                        keep(xs, tile.rows, low, high)
                        keep(ys, tile.columns, low, high)
                        plgpu.commit_smem()

                    plgpu.wgmma(acc, xs.transpose((1, 0)), ys)

                @pl.when(count_ref[group] > 0)
                def _() -> None:
                    def spec(width: int, at: Any, layout: Any) -> Any:
                        size = (tile.inner, width)
                        return plgpu.BlockSpec(size, lambda block: (block, at), delay_release=1, transforms=layout)

                    plgpu.emit_pipeline(
                        step,
                        grid=(count_ref[group],),
                        in_specs=[spec(tile.rows, at_m, x_layout), spec(tile.columns, at_n, y_layout)],
                        max_concurrent_steps=tile.steps,
                    )(x_ref.at[mine, :], y_ref.at[mine, :])

                return acc[...]

            result = pl.run_scoped(summed, plgpu.ACC((tile.rows, tile.columns)))  # pyright: ignore[reportPrivateImportUsage]
            scratch = plgpu.SMEM((tile.rows, tile.columns), dtype=x.dtype, transforms=y_layout)

            @functools.partial(pl.run_scoped, scratch=scratch)
            def _(scratch: Any) -> None:
                scratch[...] = result.astype(scratch.dtype)
                plgpu.commit_smem()
                place = pl.ds(at_m * tile.rows, tile.rows), pl.ds(at_n * tile.columns, tile.columns)
                plgpu.copy_smem_to_gmem(scratch, out.at[(group, *place)])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((groups, m, n), x.dtype),
        grid=(_MULTIPROCESSORS,),
        grid_names=("sm",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    with enable_x64(False):  # JAX's pipeline counts its steps in the default whole numbers, and ours are int32
        return kernel(starts, ends, first, count, x, y)


def _layout(plgpu: Any, width: int) -> tuple[Any, ...]:
    """How rows of 16-bit entries of this width lie in shared memory, for wgmma to read."""
    swizzle = plgpu.find_swizzle(width * 16)
    return plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)
