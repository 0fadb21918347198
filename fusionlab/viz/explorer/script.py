"""The Python program that reproduces the state of an explorer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from fusionlab.fusers import Strategy
from fusionlab.showing import counted

from ..model.setting import Setting

_WIDTH = 100


def script(
    fn: Callable[..., Any],
    setting: Setting,
    candidates: int,
    options: Mapping[str, Any],
    keywords: Collection[str] = (),
) -> str:
    """Python text that fuses `fn` as it is set, and compares.

    Args:
      fn: the function; imported where that can be done by its name, else it is expected under its name.
      setting: what is on.
      candidates: how many sites there are.
      options: further options of `fuse`, by name.
      keywords: names of the keyword arguments that the function is called with.
    """
    name = _name(fn)
    call = ", ".join([name, "*args", *(f"{k}={k}" for k in keywords)])
    lines = ["import fusionlab as fl", *_imports(fn, name), ""]
    given = [f"{k}={v!r}" for k, v in options.items()]
    strategy = [] if setting.strategy is None else ["passes=strategy"]
    if setting.strategy is not None:
        lines += [*_strategy(setting.strategy), ""]
    on = sorted(setting.enabled, key=_counted)
    lines += _listed("sites", on)
    arguments = ", ".join([name, *strategy, "only=sites", *given])
    lines += [
        f"fused = fl.fuse({arguments})  # {len(on)} of {counted(candidates, 'site')}; use it like jax.jit({name})",
        "",
        f"# args: the arguments {name} was explored with",
        f"print(fused.findings({', '.join(['*args', *(f'{k}={k}' for k in keywords)])}))",
        f"result = fl.compare({name}, fused, {call.removeprefix(name + ', ')})",
        "print(result)",
    ]
    return "\n".join(lines) + "\n"


def _counted(name: str) -> list[str | int]:
    """Orders "#2" before "#10"."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", name)]


def _name(fn: Callable[..., Any]) -> str:
    name = getattr(fn, "__name__", "")
    return name if name.isidentifier() else "fn"


def _imports(fn: Callable[..., Any], name: str) -> list[str]:
    module = getattr(fn, "__module__", "") or ""
    whole = getattr(fn, "__qualname__", "") == name
    if whole and module not in ("", "__main__", "builtins"):
        return [f"from {module} import {name}"]
    return [f"# {name}: the function that was explored"]


def _strategy(strategy: Strategy) -> list[str]:
    line = f"strategy = fl.{strategy!r}"
    if len(line) <= _WIDTH:
        return [line]
    return ["strategy = fl.Strategy(", *(f"    {k}={v!r}," for k, v in strategy.items()), ")"]


def _listed(name: str, texts: list[str]) -> list[str]:
    quoted = [json.dumps(t, ensure_ascii=False) for t in texts]
    line = f"{name} = [{', '.join(quoted)}]"
    return [line] if len(line) <= _WIDTH else [f"{name} = [", *(f"    {q}," for q in quoted), "]"]
