"""Train steps with the optimisers that people use, each compared with its fused version: what is said of their outputs, and the time.

    python -m benchmarks optimiser_steps [--layers 12] [--only NAME] [--json] [-o FILE]

Each step is one of AdamW, Adafactor, Muon and SGD of optax over a transformer of small layers (attention with biases on queries, keys and
values, layer norm, MLP), written twice: as a pure function `(params, state, batch) -> (params, state, loss)`, and with Flax NNX, where it
updates the model and an `nnx.Optimizer` in place. What is timed is `fl.compare(step, fl.fuse(step), ...)` without options, from the search
to the verdict, by stage.

Asked of each: no output is WORSE, nothing is differentiated once more, and it takes at most 20 s on two cores at 12 layers.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "cpu"
RATES = {"adamw": 1e-3, "adafactor": 1e-3, "muon": 1e-2, "sgd": 0.1}
STYLES = "pure", "nnx"
LAYERS, MOST_S = 12, 20.0
EMBED, HEADS, VOCAB, BATCH, LENGTH = 64, 4, 128, 2, 32


def optimiser(name: str) -> Any:
    """An optimiser of optax by its name."""
    import optax

    if name == "muon":
        return optax.contrib.muon(RATES[name])
    return getattr(optax, name)(RATES[name])


# The pure one.


def parameters(layers: int, embed: int = EMBED) -> dict[str, Any]:
    """Of the model: random, biases too, so that nothing is zero but what is in theory."""
    import jax

    keys = iter(jax.random.split(jax.random.key(0), 16 * layers + 4))

    def normal(*shape: int, scale: float = 0.02) -> Any:
        return scale * jax.random.normal(next(keys), shape)

    def linear(n: int, m: int) -> dict[str, Any]:
        return {"w": normal(n, m, scale=n**-0.5), "b": normal(m)}

    def norm() -> dict[str, Any]:
        return {"scale": 1 + normal(embed), "bias": normal(embed)}

    blocks = [
        {
            "ln1": norm(),
            **{name: linear(embed, embed) for name in "qkvo"},
            "ln2": norm(),
            "up": linear(embed, 4 * embed),
            "down": linear(4 * embed, embed),
        }
        for _ in range(layers)
    ]
    return {"embedding": normal(VOCAB, embed, scale=1.0), "blocks": blocks, "head": normal(embed, VOCAB)}


def loss_of(params: Any, tokens: Any) -> Any:
    """The mean cross entropy of the next token."""
    import jax
    import jax.numpy as jnp

    def norm(p: Any, x: Any) -> Any:
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * p["scale"] + p["bias"]

    def linear(p: Any, x: Any) -> Any:
        return x @ p["w"] + p["b"]

    x = params["embedding"][tokens[:, :-1]]
    b, s, e = x.shape
    for p in params["blocks"]:
        y = norm(p["ln1"], x)
        q, k, v = (linear(p[name], y).reshape(b, s, HEADS, e // HEADS) for name in "qkv")
        x = x + linear(p["o"], jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, s, e))
        x = x + linear(p["down"], jax.nn.gelu(linear(p["up"], norm(p["ln2"], x))))
    logits = jax.nn.log_softmax(x @ params["head"])
    return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], -1))


def batch_of(batch: int = BATCH, length: int = LENGTH) -> Any:
    import jax

    return jax.random.randint(jax.random.key(1), (batch, length + 1), 0, VOCAB)


def pure_step(name: str, layers: int = LAYERS, embed: int = EMBED) -> tuple[Callable, tuple[Any, ...]]:
    """The step and its arguments."""
    import jax
    import optax

    tx = optimiser(name)

    def step(params: Any, state: Any, tokens: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, tokens)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = parameters(layers, embed)
    return step, (params, tx.init(params), batch_of())


# That of Flax NNX.


def nnx_step(name: str, layers: int = LAYERS, embed: int = EMBED) -> tuple[Callable, tuple[Any, ...]]:
    """The step, under `nnx.jit`, and its arguments."""
    import jax
    import optax
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.ln1, self.ln2 = nnx.LayerNorm(embed, rngs=rngs), nnx.LayerNorm(embed, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(HEADS, embed, decode=False, rngs=rngs)
            self.up = nnx.Linear(embed, 4 * embed, rngs=rngs)
            self.down = nnx.Linear(4 * embed, embed, rngs=rngs)

        def __call__(self, x: Any, mask: Any) -> Any:
            x = x + self.attention(self.ln1(x), mask=mask)
            return x + self.down(nnx.gelu(self.up(self.ln2(x))))

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embedding = nnx.Embed(VOCAB, embed, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
            self.head = nnx.Linear(embed, VOCAB, rngs=rngs)

        def __call__(self, tokens: Any) -> Any:
            x, mask = self.embedding(tokens), nnx.make_causal_mask(tokens)
            for block in self.blocks:
                x = block(x, mask)
            return self.head(x)

    @nnx.jit
    def step(model: Any, optimizer: Any, tokens: Any) -> Any:
        def loss_of_model(m: Any) -> Any:
            logits = m(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, gradients = nnx.value_and_grad(loss_of_model)(model)
        optimizer.update(model, gradients)
        return loss

    model = Model(nnx.Rngs(0))
    noise = iter(jax.random.split(jax.random.key(2), 1000))
    state = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda p: p + 0.02 * jax.random.normal(next(noise), p.shape), state))
    return step, (model, nnx.Optimizer(model, optimiser(name), wrt=nnx.Param), batch_of())


STEPS: dict[str, Callable[..., tuple[Callable, tuple[Any, ...]]]] = {"pure": pure_step, "nnx": nnx_step}


# The comparison.


class Seconds:
    """What each stage of a comparison takes, by the clock and of processors: a progress function."""

    def __init__(self) -> None:
        self.stages: dict[str, tuple[float, float]] = {}
        self._task, self._since = "", (time.perf_counter(), time.process_time())

    def __call__(self, task: str, done: int, total: int) -> None:
        now = time.perf_counter(), time.process_time()
        if self._task:
            wall, processor = self.stages.get(self._task, (0.0, 0.0))
            self.stages[self._task] = wall + now[0] - self._since[0], processor + now[1] - self._since[1]
        self._task, self._since = task, now

    @property
    def processor_s(self) -> float:
        """Of all stages."""
        return sum(processor for _, processor in self.stages.values())


def compared(style: str, name: str, layers: int) -> dict[str, Any]:
    """A row: what `fl.compare` says of a step, and how long that takes."""
    import fusionlab as fl

    step, args = STEPS[style](name, layers)
    seconds, start = Seconds(), time.perf_counter()
    evidence = fl.compare(step, fl.fuse(step), *args, progress=seconds)
    taken = time.perf_counter() - start
    seconds("", 0, 0)
    numerics = evidence.numerics
    assert numerics is not None, evidence.notes
    return {
        "step": f"{name}, {style}",
        "seconds": taken,
        "processor seconds": seconds.processor_s,
        "stages": {stage: list(times) for stage, times in seconds.stages.items()},
        "verdict": evidence.headline,
        "results": len(numerics.leaves),
        "gradients": sum(leaf.kind == "gradient" for leaf in numerics.leaves),
        "zero in theory": sum(leaf.zero_in_theory for leaf in numerics.leaves),
        "WORSE": [str(leaf) for leaf in numerics.regressions],
        "differentiated once more": evidence.timing_grad is not None or evidence.memory_grad is not None,
        "notes": list(evidence.all_notes),
    }


def faults(row: dict[str, Any]) -> Iterator[str]:
    """What a row has that it must not have."""
    if row["WORSE"]:
        yield f"{len(row['WORSE'])} outputs WORSE"
    if row["gradients"] or row["differentiated once more"]:
        yield "differentiated once more"
    if row["seconds"] > MOST_S:
        yield f"took more than {MOST_S:.0f} s"


def main(argv: list[str]) -> int:
    """Prints a table and writes the record where asked; the exit status is 1 where a step falls short."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks optimiser_steps", description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the model (default %(default)s)")
    parser.add_argument("--only", default="", help="steps whose name holds this: adamw, nnx, 'sgd, pure'")
    parser.add_argument("-o", "--output", type=Path, help="the record's file; none is written unless given")
    options = parser.parse_args(argv)

    from fusionlab.evidence.instruments.record import environment, save_json

    rows = []
    for name in RATES:
        for style in STYLES:
            if options.only not in f"{name}, {style}":
                continue
            row = compared(style, name, options.layers)
            rows.append(row)
            longest = sorted(row["stages"].items(), key=lambda s: -s[1][0])[:8]
            print(
                f"{row['step']:16} {row['seconds']:5.1f} s ({row['processor seconds']:.1f} s of processors), "
                f"{row['results']} outputs, {row['zero in theory']} zero in theory, "
                f"{'; '.join(faults(row)) or 'ok'}; {row['verdict']}"
            )
            print("  " + ", ".join(f"{stage} {s:.1f} s ({p:.1f} s)" for stage, (s, p) in longest), flush=True)
            for line in row["WORSE"][:5]:
                print(f"    {line}", flush=True)
    if options.output:
        command = f"python -m benchmarks optimiser_steps --layers {options.layers}"
        record = {
            "benchmark": "optimiser_steps",
            "command": command,
            "environment": environment().to_dict(),
            "steps": rows,
        }
        print(f"written to {save_json(options.output, record)}", file=sys.stderr)
    return int(any(list(faults(row)) for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
