"""Which passes run, with which options: a value for `passes=` besides a list of names."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..errors import ArgumentError, unknown_name
from ..showing import Shown, Table
from ..tracebacks import errors_for_users
from .engine.base import BY_DEFAULT, GRADIENT, Pass

_DETERMINISTIC = "deterministic"  # what a Strategy says of all passes at once


@errors_for_users
class Strategy(Mapping[str, Any], Shown):
    """A frozen choice of passes: `Strategy(gemm_epilogue=True, dot_product_attention=False)`.

    A value is True, False, or a dict of the pass's options. Passes not named are off. Each pass includes its gradient, `<pass>_grad`:
    `Strategy(gemm_epilogue=True, gemm_epilogue_grad=False)` fuses only the forward pass and differentiates as JAX does; a `_grad` without
    its pass is refused. `Strategy(deterministic=True)` sets that option for every pass that has it: forward and backward passes
    give the same bits every time, and implementations that do not are not used; if no pass is named, it applies to the default passes.
    Gated pairs were once part of `matmul_schedule`: a Strategy that turns it on also turns on `gated_matmul`, unless that is named.
    Round-trips through JSON.
    """

    def __init__(self, **passes: bool | Mapping[str, Any]) -> None:
        for name, value in passes.items():
            if not isinstance(value, bool | Mapping):
                raise ArgumentError(f"Strategy: {name}={value!r}, needed True, False or a dict of options")
        frozen = {k: v if isinstance(v, bool) else dict(v) for k, v in _as_named_now(passes).items()}
        object.__setattr__(self, "_passes", frozen)

    _passes: dict[str, Any]

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Strategy is frozen; make a new one with {name} changed")

    def __getitem__(self, name: str) -> Any:
        return self._passes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._passes)

    def __len__(self) -> int:
        return len(self._passes)

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __repr__(self) -> str:
        return f"Strategy({', '.join(f'{k}={v!r}' for k, v in self._passes.items())})"

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def _table(self) -> Table:
        return Table(("pass", "asked"), tuple(self.items()))

    def to_dict(self) -> dict[str, Any]:
        """Plain data: the passes and their options."""
        return dict(self._passes)

    def to_json(self) -> str:
        """A JSON object: pass name -> True, False or its options; `from_json` reads it back."""
        return json.dumps(self._passes, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Strategy:
        """The Strategy stored by `to_json`. Raises ArgumentError if the text is not a JSON object of passes."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:  # also a number of too many digits, and what is nested too deep
            raise ArgumentError(f"Strategy.from_json: not JSON ({error}); needed the output of to_json") from error
        if not isinstance(data, dict):
            raise ArgumentError(f"Strategy.from_json: got {type(data).__name__}, needed an object of pass names")
        return cls(**data)


def _as_named_now(passes: Mapping[str, Any]) -> Mapping[str, Any]:
    """The passes, with the former option of `matmul_schedule` for gated pairs as a pass of its own."""
    rest = passes.get("matmul_schedule")
    if not isinstance(rest, Mapping) or "gated" not in rest:
        return passes
    now = {"gated_matmul": True, **passes}
    if now["gated_matmul"]:  # what is said by the name of today stands
        options = now["gated_matmul"] if isinstance(now["gated_matmul"], Mapping) else {}
        now["gated_matmul"] = {"prefer": rest["gated"], **options}
    now["matmul_schedule"] = {key: value for key, value in rest.items() if key != "gated"}
    if "matmul_schedule_grad" in passes:
        now.setdefault("gated_matmul_grad", passes["matmul_schedule_grad"])
    text = (
        "matmul_schedule=dict(gated=...): gated pairs are now a pass of their own; write gated_matmul=dict(prefer={!r})"
    )
    warnings.warn(text.format(rest["gated"]), FutureWarning, stacklevel=3)
    return now


def select(
    registry: Mapping[str, Pass], passes: Strategy | Iterable[str] | str | None
) -> list[tuple[Pass, dict[str, Any]]]:
    """The requested passes, in the registry's order, with their options.

    Raises:
      UnknownNameError: a name or option that does not exist; the message lists the valid ones.
      ArgumentError: a `_grad` without its pass, or with options.
    """
    if passes is None:
        return [(p, {BY_DEFAULT: True}) for p in registry.values() if not p.named_only]
    if isinstance(passes, str):
        passes = [passes]
    chosen: dict[str, Any] = {}
    chosen |= _as_named_now(passes) if isinstance(passes, Mapping) else dict.fromkeys(passes, True)
    deterministic = chosen.pop(_DETERMINISTIC, False)
    if not isinstance(deterministic, bool):
        raise ArgumentError(f"passes: {_DETERMINISTIC}={deterministic!r}, needed True or False")
    if deterministic and not chosen:
        chosen = {name: {BY_DEFAULT: True} for name, p in registry.items() if not p.named_only}
    # Gated pairs were part of it when they were no pass.
    if isinstance(passes, Mapping) and chosen.get("matmul_schedule", False) is not False:
        chosen.setdefault("gated_matmul", True)
        if "matmul_schedule_grad" in chosen and chosen["gated_matmul"]:
            chosen.setdefault("gated_matmul_grad", chosen["matmul_schedule_grad"])
    _check_names(registry, chosen)
    result = []
    for name, pass_ in registry.items():
        value = chosen.get(name, False)
        options = dict(value) if isinstance(value, Mapping) else {}
        pass_.check_names(options.keys() - {BY_DEFAULT})
        if deterministic and _DETERMINISTIC in pass_.options:
            options.setdefault(_DETERMINISTIC, True)
        if chosen.get(f"{name}_grad", True) is False:
            options[GRADIENT] = False
        if value is not False:
            result.append((pass_, options))
    return result


def _check_names(registry: Mapping[str, Pass], chosen: Mapping[str, Any]) -> None:
    """Raises UnknownNameError for a name of neither a pass nor its `_grad`, ArgumentError for an invalid `_grad`."""
    for name, value in chosen.items():
        if name in registry:
            continue
        forward = registry.get(name.removesuffix("_grad"))
        if forward is None or forward.forward_only:
            gradients = (f"{n}_grad" for n, p in registry.items() if not p.forward_only)
            raise unknown_name("pass", name, (*registry, *gradients))
        _check_gradient(name, value, chosen)


def _check_gradient(name: str, value: Any, chosen: Mapping[str, Any]) -> None:
    """Raises ArgumentError for an invalid `_grad`."""
    forward = name.removesuffix("_grad")
    if isinstance(value, Mapping):
        raise ArgumentError(f"{name}: got options, needed True or False; it follows the options of {forward}")
    if value is not False and chosen.get(forward, False) is False:
        raise ArgumentError(
            f"passes: got {name} without {forward}, needed both: a fused backward pass reads what the fused forward pass "
            f"keeps; add {forward}"
        )


_SITE_ID = re.compile(r"(\w+)@.*#\d+")


def is_site(name: str) -> bool:
    """Whether a name is the id of a site, and not that of a pass."""
    return _SITE_ID.fullmatch(name) is not None


def site_names(names: Iterable[str] | str, registry: Iterable[str], argument: str) -> tuple[str, ...]:
    """The argument of `skip=` or `only=` as a tuple: pass names and site ids ("gemm_epilogue@encoder/mlp#1"), or a single one.

    Raises:
      UnknownNameError: neither a pass nor a site id. ArgumentError: not a string.
    """
    names = (names,) if isinstance(names, str) else tuple(names)
    passes = tuple(registry)
    for name in names:
        if not isinstance(name, str):
            raise ArgumentError(f"{argument}: got {name!r:.80}, needed pass names and site ids, as text")
        site = _SITE_ID.fullmatch(name)
        if (site.group(1) if site else name) not in passes:
            raise unknown_name(f"pass or site in {argument}", name, (*passes, "<pass>@<scope>#<number>"))
    return names
