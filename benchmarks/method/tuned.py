"""How much of the shipped table's gain `fl.tune` reaches without the table, within a budget.

    python -m benchmarks tuned [--json] [-o FILE] [--quick] [--only NAME] [--budgets 60,300]

For the train steps of a model of Llama's kind, of GPT-2 124M and of a ViT-B/16, and for a decoding step of eight layers: one process with
the tables hidden (`FUSIONLAB_TABLES=none`) tunes the step for the first budget, and goes on until the next. Then another process compiles
the step plainly, fused with the shipped table, fused with neither table nor plan, and fused with each plan alone; all take turns. A
plan's share is what it saves of jax.jit's time over what the table saves. Bars: 97 % with 300 s, 80 % with 60 s.

The record is written after each step. A run with the record's file adds the programs that it lacks: `--only` runs one at a time. Without
a CUDA device `--quick` runs tiny sizes by the host's clock, where nothing is tuned.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..measuring import (
    chosen,
    compiled_side_by_side,
    continued,
    finish,
    line,
    measured,
    new_record,
    normal,
    parser_of,
    save,
)
from ..programs import decoding, language_steps

BARS = {"300": 0.97, "60": 0.80}
SAMPLES = 20
RATE = 1e-4


@dataclass(frozen=True)
class ViT:
    """Patches, LayerNorm, GELU, biases, attention without a mask; unrolled."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    batch: int = 64
    tokens: int = 196
    patch: int = 768
    classes: int = 1000

    def parameters(self) -> dict[str, Any]:
        e = self.width
        shapes = {"qkv": (e, 3 * e), "out": (e, e), "up": (e, 4 * e), "down": (4 * e, e)}
        layers = []
        for i in range(self.layers):
            p: dict[str, Any] = {
                n: normal(10 * i + j, *shape, scale=0.02) for j, (n, shape) in enumerate(shapes.items())
            }
            p |= {f"{n}_bias": normal(0, shape[1], scale=0.02) for n, shape in shapes.items()}
            layers.append(p | {n: normal(1, e, scale=0.02) + 1 for n in ("scale_1", "scale_2", "bias_1", "bias_2")})
        ends = {"patches": (self.patch, e), "positions": (self.tokens, e), "head": (e, self.classes)}
        return {"layers": layers} | {n: normal(i, *shape, scale=0.02) for i, (n, shape) in enumerate(ends.items())}

    def loss(self, parameters: Any, given: Any) -> Any:
        import jax
        import jax.numpy as jnp

        def norm(x: Any, scale: Any, bias: Any) -> Any:
            wide = x.astype(jnp.float32)
            mean = jnp.mean(wide, -1, keepdims=True)
            variance = jnp.mean(jnp.square(wide - mean), -1, keepdims=True)
            return ((wide - mean) * jax.lax.rsqrt(variance + 1e-6)).astype(x.dtype) * scale + bias

        def layer(x: Any, p: Any) -> Any:
            y = norm(x, p["scale_1"], p["bias_1"]) @ p["qkv"] + p["qkv_bias"]
            q, k, v = (a.reshape(*x.shape[:2], self.heads, -1) for a in jnp.split(y, 3, axis=-1))
            scores = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) / q.shape[-1] ** 0.5
            mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores).astype(v.dtype), v)
            x = x + mixed.reshape(x.shape) @ p["out"] + p["out_bias"]
            y = norm(x, p["scale_2"], p["bias_2"])
            return x + jax.nn.gelu(y @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]

        x = given @ parameters["patches"] + parameters["positions"]
        for p in parameters["layers"]:
            x = layer(x, p)
        logits = (jnp.mean(x, 1) @ parameters["head"]).astype(jnp.float32)
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])


Program = tuple[Callable[..., Any], tuple[Any, ...]]  # a step and its arguments


def _trained(loss: Callable[..., Any], parameters: Any, data: Any) -> Program:
    import jax

    def step(parameters: Any, data: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(parameters, data)
        return value, jax.tree.map(lambda p, g: p - (RATE * g).astype(p.dtype), parameters, gradients)

    return step, (parameters, data)


def _language(case: Any) -> Program:
    return _trained(case.loss(language_steps.PLAIN), case.parameters(), language_steps.tokens_of(case))


def _vision(case: ViT) -> Program:
    return _trained(case.loss, case.parameters(), normal(3, case.batch, case.tokens, case.patch))


def _decoding(case: decoding.Case) -> Program:
    import jax.numpy as jnp

    args = decoding.layers_of(case), normal(1, case.batch, 1, case.embed), decoding.caches_of(case)

    def step(layers: Any, x: Any, caches: Any, at: Any) -> Any:
        return decoding.plain(layers, x, caches, at)

    return step, (*args, jnp.int32(case.cache - decoding.FREE))


def programs(quick: bool) -> dict[str, Callable[[], Program]]:
    """Name -> what makes the step and its arguments."""
    llama, gpt2 = (language_steps.TINY if quick else language_steps.CASES)[2:4]
    vit = ViT(2, 32, 4, 2, 16, 48, 10) if quick else ViT()
    decode = decoding.QUICK[0] if quick else decoding.CASES[2]
    return {
        "llama train": functools.partial(_language, llama),
        "gpt2 train": functools.partial(_language, gpt2),
        "vit train": functools.partial(_vision, vit),
        "decode step": functools.partial(_decoding, decode),
    }


@contextlib.contextmanager
def _choices(plan: Path, tables: bool) -> Iterator[None]:
    """Around what decides: this plan file, with the shipped tables or without them."""
    chosen = {"FUSIONLAB_PLAN_FILE": str(plan)} | ({} if tables else {"FUSIONLAB_TABLES": "none"})
    before = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)  # these alone: a library may set its own at its first import
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def tune(name: str, plans: dict[float, Path], quick: bool) -> dict[str, Any]:
    """Tunes a step, here, and keeps the plan at the end of each budget; what is told of it then."""
    import fusionlab as fl

    step, args = programs(quick)[name]()
    began, told, last = time.perf_counter(), {}, None
    for budget_s, plan in sorted(plans.items()):
        if last is not None and last.exists():
            shutil.copyfile(last, plan)
        with _choices(plan, tables=False):
            found = fl.tune(step, *args, budget_s=max(0.0, began + budget_s - time.perf_counter()))
        last, took = plan, time.perf_counter() - began
        left = sum(one.at_stake_s for one in found.left)
        cases = {text: choice.to_dict() for text, choice in found.measured.cases.items()}
        counts = {"calls": found.calls, "left": len(found.left), "left_s": found.left_s, "left_at_stake_s": left}
        told[f"{budget_s:g}"] = {"seconds": took, **counts, "cases": cases}
    return told


def measure(name: str, plans: dict[str, Path], nothing: Path, quick: bool) -> dict[str, Any]:
    """Times of the step in each way, and the share of the table's gain that each plan reaches."""
    import jax

    import fusionlab as fl

    began = time.perf_counter()
    step, args = programs(quick)[name]()
    ways = {"table": (nothing, True), "untuned": (nothing, False)} | {n: (plan, False) for n, plan in plans.items()}
    lowered = {"jax.jit": jax.jit(step).lower(*args)}
    fused: dict[str, Any] = {}
    for way, (plan, tables) in ways.items():
        with _choices(plan, tables):
            lowered[way] = jax.jit(fl.fuse(step)).lower(*args)
            found = fl.find(step, *args)
            fused[way] = {"lines": found.lines(), "waiting": str(found.waiting or "")}
    running = {n: functools.partial(program, *args) for n, program in compiled_side_by_side(lowered).items()}
    times = measured(running, "jax.jit", 4 if quick else SAMPLES, 4)
    gains = {way: times["jax.jit"]["median_s"] - times[way]["median_s"] for way in ways}
    shares = {way: gains[way] / gains["table"] if gains["table"] else float("nan") for way in ways}
    seconds = time.perf_counter() - began
    return {**times, "gain_s": gains, "share": shares, "found": fused, "measuring": {"seconds": seconds}}


def _elsewhere(fn: Callable[..., Any], *args: Any) -> Any:
    """What a function of this module returns in a process of its own, which gives the device's memory back."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(fn, *args).result()


def one(name: str, budgets: list[float], quick: bool, keep: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """A program tuned and measured; `keep` is called with what there is after each of both."""
    with tempfile.TemporaryDirectory() as folder:
        plans = {b: Path(folder) / f"{b:g}.json" for b in budgets}
        print(f"{name}: tuning for {max(budgets):g} s at most", flush=True)
        found: dict[str, Any] = {"tuning": _elsewhere(tune, name, plans, quick)}
        keep(found)
        ways = {f"tuned {b:g} s": plan for b, plan in plans.items()}
        found |= _elsewhere(measure, name, ways, Path(folder) / "none.json", quick)
        keep(found)
    return found


def _lines(name: str, found: dict[str, Any]) -> Iterator[str]:
    yield line(name, {n: one for n, one in found.items() if "median_s" in one})
    for budget, how in found["tuning"].items():
        rest = f"{how['left']} of {how['calls']} calls left"
        share = found["share"][f"tuned {budget} s"]
        yield f"  {share:.1%} of the table's gain, in {how['seconds']:.0f} of {budget} s, {rest}"


def _misses(found: dict[str, Any]) -> bool:
    """Whether a share is below its bar."""
    return any(not found["share"][f"tuned {b} s"] >= BARS.get(b, 0.0) for b in found["tuning"])


def main(argv: list[str]) -> int:
    """Tunes, measures and records. Returns the exit status: 1 where a bar is missed on a GPU."""
    parser = parser_of("tuned", __doc__)
    parser.add_argument("--only", default="", metavar="NAME", help="the programs whose name has this in it")
    parser.add_argument("--budgets", default="60,300", help="seconds, separated by commas")
    options = parser.parse_args(argv)
    budgets = [float(text) for text in options.budgets.split(",")]
    record = continued(_elsewhere(new_record, "tuned", options) | {"cases": {}}, options)
    on_cuda = record["environment"]["platform"] != "cpu"

    def keep(name: str, found: dict[str, Any]) -> None:
        record["cases"][name] = found
        save(record, options, on_cuda)

    for name in chosen(programs(options.quick), options.only):
        if "share" in record["cases"].get(name, {}):
            print(f"{name}: in the record already", flush=True)
            continue
        found = one(name, budgets, options.quick, functools.partial(keep, name))
        print(*_lines(name, found), sep="\n", flush=True)
    finish(record, options, on_cuda)
    return int(on_cuda and any(map(_misses, record["cases"].values())))
