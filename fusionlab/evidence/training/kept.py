"""Where a run was stopped: the states of its runs as plain arrays, to go on from, in memory or in an .npz file."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from fusionlab.errors import ArgumentError

from .lanes import Series


@dataclass(frozen=True, eq=False)
class Kept:
    """A training that was stopped.

    Attributes:
      at: the step that is next.
      runs: the runs of the group that was stopped, by name, the original first.
      states: of each, its arrays as NumPy has them.
      series: of these runs; done: of those of the groups before.
    """

    at: int
    runs: tuple[str, ...]
    states: tuple[tuple[Any, ...], ...]
    series: tuple[Series, ...]
    done: Mapping[str, Series]


def on_host(state: Sequence[Any]) -> tuple[Any, ...]:
    """A state's arrays as NumPy has them; keys stay JAX's."""
    return tuple(x if jnp.issubdtype(x.dtype, jax.dtypes.extended) else np.asarray(x) for x in state)


def packed(record: str, kept: Kept | None) -> bytes:
    """An .npz file: the record, a JSON text, and the arrays of each state."""
    arrays: dict[str, Any] = {"record": np.array(record)}
    if kept is not None:
        types: dict[str, str] = {}
        for r, state in enumerate(kept.states):
            for i, x in enumerate(state):
                types[f"{r}.{i}"], arrays[f"{r}.{i}"] = _plain(x)
        series = dict(zip(kept.runs, kept.series, strict=True))
        about = {"at": kept.at, "types": types, "runs": {k: _series_dict(s) for k, s in series.items()}}
        about["done"] = {k: _series_dict(s) for k, s in kept.done.items()}
        arrays["kept"] = np.array(json.dumps(about))
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def unpacked(path: Path) -> tuple[Any, Kept | None]:
    """Reads `packed` back: (the record's data, where it was stopped). Nothing in the file is run.

    Raises:
      ArgumentError: the file is not one of these.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            record = json.loads(str(file["record"]))
            return record, _kept(file) if "kept" in file else None
    except FileNotFoundError:
        raise ArgumentError(
            f"path: got {path}, needed a file that curve.save('x.npz') wrote; it does not exist"
        ) from None
    # A damaged file may raise anything in the readers of zip files, of arrays and of JSON.
    except Exception as error:
        raise ArgumentError(
            f"path: {path} is not a saved loss curve, or is damaged ({type(error).__name__}); needed one that curve.save('x.npz') wrote"
        ) from error


def _kept(file: Any) -> Kept:
    about = json.loads(str(file["kept"]))
    counts = [0] * len(about["runs"])
    for place in about["types"]:
        counts[int(place.partition(".")[0])] += 1
    states = tuple(
        tuple(_restored(file[f"{r}.{i}"], about["types"][f"{r}.{i}"]) for i in range(count))
        for r, count in enumerate(counts)
    )
    runs = tuple(about["runs"])
    series = tuple(_series(about["runs"][name]) for name in runs)
    return Kept(about["at"], runs, states, series, {k: _series(d) for k, d in about["done"].items()})


def _plain(x: Any) -> tuple[str, np.ndarray]:
    """An array as one of a dtype that NumPy itself has, and what it was."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return f"key {jax.random.key_impl(x)}", np.asarray(jax.random.key_data(x))
    if x.dtype.kind == "V":  # bfloat16 and its like, which are not NumPy's
        return str(x.dtype), x.view(f"u{x.dtype.itemsize}")
    return str(x.dtype), x


def _restored(x: np.ndarray, dtype: str) -> Any:
    if dtype.startswith("key "):
        return jax.random.wrap_key_data(jnp.asarray(x), impl=dtype.removeprefix("key "))
    return x if str(x.dtype) == dtype else x.view(jnp.dtype(dtype))


def _series_dict(series: Series) -> dict[str, Any]:
    return {
        "losses": [repr(x) for x in series.losses],
        "loss_differences": [repr(x) for x in series.loss_differences],
        "squares": [repr(x) for x in series.squares],
        "blocks": [[repr(float(x)) for x in block] for block in series.blocks],
    }


def _series(data: Mapping[str, Any]) -> Series:
    losses, differences, squares = ([float(x) for x in data[k]] for k in ("losses", "loss_differences", "squares"))
    return Series(losses, differences, squares, [np.array([float(x) for x in block]) for block in data["blocks"]])
