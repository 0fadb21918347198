"""GPT-2 trained beside its fused version: which errors a loss curve shows, and which it does not.

    python -m benchmarks loss_curve [--json] [-o FILE] [--quick] [--only TEXT] [--steps N] [--runs N] [--batch N] [--length N] [--layers N]
        [--width N] [--plots FOLDER] [--gradients]

GPT-2's shapes (12 layers of width 768, vocabulary 50257) at 4 texts of 512 tokens unless said otherwise; parameters and optimisers in
float32, the model in bfloat16; AdamW with 20 steps of warm-up, 50 for a model of GPT-2's width, at a third of the rate, and gradients of a
global norm of at most 1. The texts are walks of a Markov chain of 512 tokens with four successors each, so that there is something to
learn. `fl.compare(step, fused, *state, data=texts, steps=200)` of

    fused                the fused program, AdamW
    one step late        AdamW gets the gradient of one layer's first MLP product one step late
    times 1.5, SGD       that gradient is multiplied by 1.5
    times 1.01           that gradient is multiplied by 1.01, AdamW, which divides the gradient by its own size

and with --gradients, for the last one, `fl.compare` of the loss with its gradients. Each program is compiled with JAX's persistent cache
in a new folder. A run with other cases adds to the record that `-o` names, if it is one of the same training,
machine and versions.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..measuring import chosen, continued, finish, new_record, parser_of, save
from .language_steps import GPT2, PLAIN

Step = Callable[..., Any]
STEPS, RUNS, CHAIN, SUCCESSORS = 200, 4, 512, 4
LAYER, WEIGHT = -2, "up"  # whose gradient is wrong
SGD_RATE = 3e-2
WIDE = 768
LARGEST = 1.0  # global norm of a gradient


@dataclass(frozen=True)
class Rate:
    """AdamW's.

    Attributes:
      full: the rate; warm_up: the steps in which it rises to that.
    """

    full: float
    warm_up: int

    @classmethod
    def of(cls, case: GPT2) -> Rate:
        """At 3e-4 the loss of GPT-2 jumps at single steps from the twentieth on, at other ones in each run, and nothing can be judged."""
        return cls(1e-4, 50) if case.width >= WIDE else cls(3e-4, 20)


CASES = {"fused": "adamw", "one step late": "adamw", "times 1.5, SGD": "sgd", "times 1.01": "adamw"}


def texts(case: GPT2, count: int) -> list[Any]:
    """Batches int32[batch, length + 1] of walks of one Markov chain."""
    import numpy as np

    draw = np.random.default_rng(0)
    states = min(CHAIN, case.vocabulary)
    follows = draw.integers(0, states, (states, SUCCESSORS))
    tokens = draw.integers(0, states, (count, case.batch, case.length + 1))
    choice = draw.integers(0, SUCCESSORS, tokens.shape)
    for t in range(case.length):
        tokens[..., t + 1] = follows[tokens[..., t], choice[..., t]]
    return [batch.astype(np.int32) for batch in tokens]


def loss_of(case: GPT2) -> Step:
    """loss(parameters in float32, tokens): the model in bfloat16."""
    import jax
    import jax.numpy as jnp

    plain = case.loss(PLAIN)

    def loss(parameters: Any, tokens: Any) -> Any:
        return plain(jax.tree.map(lambda x: x.astype(jnp.bfloat16), parameters), tokens)

    return loss


def with_wrong_gradient(loss: Step, factor: float) -> Step:
    """The loss, whose gradient of one weight is `factor` times what it should be."""
    import jax

    @jax.custom_vjp
    def scaled(x: Any) -> Any:
        return x

    scaled.defvjp(lambda x: (x, None), lambda _, g: (g * factor,))

    def wrong(parameters: Any, tokens: Any) -> Any:
        layers = list(parameters["layers"])
        layers[LAYER] = layers[LAYER] | {WEIGHT: scaled(layers[LAYER][WEIGHT])}
        return loss(parameters | {"layers": layers}, tokens)

    return wrong


def parameters_of(case: GPT2) -> Any:
    """GPT-2's, in float32; the biases are 0."""
    import jax
    import jax.numpy as jnp

    def wide(path: Any, x: Any) -> Any:
        return jnp.zeros(x.shape) if "bias" in str(path[-1]) else x.astype(jnp.float32)

    return jax.tree_util.tree_map_with_path(wide, case.parameters())


def adamw_step(loss: Step, rises: Rate, late: bool = False) -> Step:
    """(parameters, moments, the last gradient of one weight, tokens) -> (the three, loss); with `late` that gradient is the one used."""
    import jax
    import jax.numpy as jnp

    b1, b2, decay = 0.9, 0.95, 0.1

    def step(parameters: Any, moments: Any, last: Any, tokens: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(parameters, tokens)
        norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * jnp.minimum(1, LARGEST / norm), grads)
        now = grads["layers"][LAYER][WEIGHT]
        if late:
            grads["layers"][LAYER][WEIGHT] = last
        count = moments["count"] + 1
        first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, moments["first"], grads)
        second = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, moments["second"], grads)
        rate = rises.full * jnp.minimum(1, count.astype(jnp.float32) / rises.warm_up)
        c1, c2 = 1 - b1 ** count.astype(jnp.float32), 1 - b2 ** count.astype(jnp.float32)

        def update(p: Any, m: Any, v: Any) -> Any:
            return p - rate * (m / c1 / (jnp.sqrt(v / c2) + 1e-8) + decay * p)

        parameters = jax.tree.map(update, parameters, first, second)
        return parameters, {"count": count, "first": first, "second": second}, now, value

    return step


def sgd_step(loss: Step) -> Step:
    """(parameters, tokens) -> (parameters, loss)."""
    import jax

    def step(parameters: Any, tokens: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(parameters, tokens)
        return jax.tree.map(lambda p, g: p - SGD_RATE * g, parameters, grads), value

    return step


def steps_of(name: str, loss: Step, rate: Rate) -> tuple[Step, Step]:
    """The original and the version that is compared with it, without `fl.fuse`."""
    if CASES[name] == "sgd":
        return sgd_step(loss), sgd_step(with_wrong_gradient(loss, 1.5))
    if name == "times 1.01":
        return adamw_step(loss, rate), adamw_step(with_wrong_gradient(loss, 1.01), rate)
    return adamw_step(loss, rate), adamw_step(loss, rate, late=name == "one step late")


def state_of(name: str, case: GPT2) -> tuple[Any, ...]:
    import jax
    import jax.numpy as jnp

    parameters = parameters_of(case)
    if CASES[name] == "sgd":
        return (parameters,)
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    moments = {"count": jnp.zeros((), jnp.int32), "first": zeros, "second": jax.tree.map(jnp.zeros_like, parameters)}
    return parameters, moments, jnp.zeros_like(parameters["layers"][LAYER][WEIGHT])


def trained(name: str, case: GPT2, steps: int, runs: int) -> Any:
    """The loss curve of a case."""
    import fusionlab as fl

    step, other = steps_of(name, loss_of(case), Rate.of(case))
    return fl.compare(step, fl.fuse(other), *state_of(name, case), data=texts(case, steps), steps=steps, runs=runs)


def compared(case: GPT2) -> Any:
    """`fl.compare` of the loss and of the one whose gradient is 1.01 times what it should be."""
    import fusionlab as fl

    loss = loss_of(case)
    wrong = fl.fuse(with_wrong_gradient(loss, 1.01))
    return fl.compare(loss, wrong, parameters_of(case), texts(case, 1)[0], grad=True, timing=False, memory=False)


def summary(curve: Any) -> dict[str, Any]:
    """What is published of a curve: all of it but the arrays that are inside."""
    data = curve.to_dict()
    data.pop("environment")
    data["stretches"] = [s.to_dict() | {"share": s.share} for s in (*curve.worst[:12], *curve.outside[:12])]
    return data | {"arrays": len(curve.worst), "arrays_outside": sorted({s.of for s in curve.outside})}


def line(name: str, curve: Any, seconds: float) -> str:
    of_loss = next((s for s in curve.worst if s.of == "loss"), None)
    first = f", first {curve.outside[0]}" if curve.outside else f", farthest {curve.worst[0]}" if curve.worst else ""
    stages = ", ".join(f"{k} {v:.1f} s" for k, v in curve.seconds.items())
    loss = f"{curve.losses[0]:.4f} -> {curve.losses[-1]:.4f}, fused -> {curve.fused_losses[-1]:.4f}"
    outside = len({s.of for s in curve.outside})
    head = f"{name}: {curve.verdict}, {seconds:.1f} s ({stages})"
    return f"{head}\n  loss {loss}; {of_loss}\n  {outside} outside{first}"


def _parser() -> Any:
    parser = parser_of("loss_curve", __doc__)
    parser.add_argument("--only", default="", help='only the cases with this text, or one of "A|B"')
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--runs", type=int, default=RUNS, help="further runs of the original")
    for name in ("batch", "length", "layers", "width"):
        parser.add_argument(f"--{name}", type=int, default=None)
    parser.add_argument(
        "--gradients", action="store_true", help="also compare the gradients that are 1.01 times what they should be"
    )
    parser.add_argument("--plots", type=Path, help="a folder for the curves' plots and pages")
    return parser


def _case(options: Any, on_cuda: bool) -> GPT2:
    tiny = options.quick or not on_cuda
    case = GPT2(layers=2, width=32, heads=4, vocabulary=64, batch=4, length=32) if tiny else GPT2(batch=4, length=512)
    given = {k: v for k in ("batch", "length", "layers", "width") if (v := getattr(options, k)) is not None}
    return replace(case, **given)


def _trained_cases(case: GPT2, options: Any, record: dict[str, Any], on_cuda: bool) -> None:
    for name in chosen(CASES, options.only):
        start = time.perf_counter()
        curve = trained(name, case, record["steps"], options.runs)
        seconds = time.perf_counter() - start
        record["cases"][name] = summary(curve) | {"wall_s": seconds}
        if not options.json:
            print(line(name, curve, seconds), flush=True)
        for suffix in ("html", "png") if options.plots else ():
            curve.save(options.plots / f"{name.replace(' ', '_').replace(',', '')}.{suffix}")
        save(record, options, on_cuda)  # what is measured is not lost where the run is cut off


def _compared_gradients(case: GPT2, options: Any) -> dict[str, Any]:
    start = time.perf_counter()
    evidence = compared(case)
    bad = [str(leaf) for leaf in evidence.numerics.regressions] if evidence.numerics is not None else []
    if not options.json:
        print(f"times 1.01, gradients: {len(bad)} WORSE", *bad[:4], *evidence.notes, sep="\n  ", flush=True)
    return {"worse": bad, "notes": list(evidence.notes), "wall_s": time.perf_counter() - start}


@contextlib.contextmanager
def _new_cache() -> Iterator[None]:
    """JAX's persistent cache in a folder of its own, for the original that several cases have."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = [getattr(jax.config, name) for name in names]

    def use(values: list[Any]) -> None:
        compilation_cache.reset_cache()
        for name, value in zip(names, values, strict=True):
            jax.config.update(name, value)

    with tempfile.TemporaryDirectory(prefix="fusionlab-") as folder:
        use([folder, 0])
        try:
            yield
        finally:
            use(before)


def main(argv: list[str]) -> int:
    """Prints the verdict on each case and writes the record. Returns the exit status."""
    options = _parser().parse_args(argv)

    from fusionlab.device import Device

    on_cuda = Device.current().platform == "cuda"
    case = _case(options, on_cuda)
    asked = {
        "runs": options.runs,
        "steps": options.steps or (20 if options.quick else STEPS),
        "shape": {k: getattr(case, k) for k in ("layers", "width", "heads", "vocabulary", "batch", "length")},
    }
    fresh = new_record("loss_curve", options) | {"cases": {}} | asked
    record: dict[str, Any] = continued(fresh, options)
    if {k: record[k] for k in asked} != asked:  # of another training
        record = fresh
    with _new_cache():
        _trained_cases(case, options, record, on_cuda)
        if options.gradients:
            record["gradients"] = _compared_gradients(case, options)
    finish(record, options, on_cuda)
    return 0
