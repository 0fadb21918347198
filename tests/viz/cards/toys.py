"""Overviews of programs that are not there: the numbers of a train step of 24 layers, a U-Net, and ever odder ones."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

from fusionlab.viz.cards.card import Amount, Card, Edge, Overview, Row, Site, Strip

k, M, G, T = 10**3, 10**6, 10**9, 10**12
F32 = "f32[8,1024,1024]"
NORM, GEMM, ATTENTION = "layer_norm", "gemm_epilogue", "dot_product_attention"


def amount(operations: float, moved: float) -> Amount:
    return Amount(int(operations), int(moved))


def site(
    name: str, pass_name: str, state: str, cost: Amount, where: str = "", backward: bool = False, id_: str = ""
) -> Card:
    made = Site(f"{pass_name}@{id_ or name}", pass_name, state, backward)
    return Card(id_ or name, name, kind="site", cost=cost, where=where, type=F32, site=made)


def nodes(name: str, cost: Amount, where: str = "", type_: str = F32, id_: str = "") -> Card:
    return Card(id_ or name, name, kind="nodes", cost=cost, where=where, type=type_)


def chain(cards: list[Card], *skips: tuple[int, int]) -> tuple[Edge, ...]:
    pairs = [*((i, i + 1) for i in range(len(cards) - 1)), *skips]
    return tuple(Edge(cards[i].id, cards[j].id, 34 * M, F32) for i, j in pairs)


def _layer(lane: str, dear: float) -> tuple[Card, ...]:
    """Attention and MLP of a layer."""
    back = lane == "backward"
    one = amount(dear * 10 * G, dear * 3 * G)
    attn = [
        site("layer_norm", NORM, "applied", amount(1 * G, dear * 13 * G), "model.py:22-24", back, f"{lane}-ln1"),
        nodes("x @ qkv", one, "model.py:34", "f32[8,1024,3072]", f"{lane}-qkv"),
        nodes("split_heads ×3", amount(0, dear * 9 * G), "model.py:29-34", "3 × f32[8,16,1024,64]", f"{lane}-split"),
        site(
            "softmax(q @ k.T) @ v",
            ATTENTION,
            "declined",
            amount(dear * 2 * T, dear * 222 * G),
            "model.py:37",
            back,
            f"{lane}-softmax",
        ),
        nodes("x @ out", one, "model.py:38", id_=f"{lane}-out"),
        nodes("x + attention(x)", amount(1 * G, dear * 3 * G), "model.py:48", id_=f"{lane}-add"),
    ]
    mlp = [
        site("layer_norm", NORM, "applied", amount(1 * G, dear * 13 * G), "model.py:22-24", back, f"{lane}-ln2"),
        site(
            "gelu_tanh(x @ w + b)",
            GEMM,
            "candidate",
            amount(dear * 1.6 * T, dear * 88 * G),
            "model.py:42",
            back,
            f"{lane}-up",
        ),
        site("x @ w + b", GEMM, "candidate", amount(dear * 1.6 * T, dear * 6 * G), "model.py:43", back, f"{lane}-down"),
        nodes("x + mlp(x)", amount(1 * G, dear * 3 * G), "model.py:49", id_=f"{lane}-add2"),
    ]
    return (
        Card(
            f"{lane}-attn",
            "attn",
            cost=amount(dear * 2.5 * T, dear * 250 * G),
            strips=(Strip(NORM, "applied", 24, back), Strip(ATTENTION, "declined", 24, back)),
            children=tuple(attn),
            edges=chain(attn, (0, 5)),
        ),
        Card(
            f"{lane}-mlp",
            "mlp",
            cost=amount(dear * 3.31 * T, dear * 110 * G),
            strips=(Strip(NORM, "applied", 24, back), Strip(GEMM, "candidate", 48, back)),
            children=tuple(mlp),
            edges=chain(mlp, (0, 3)),
        ),
    )


def train_step() -> Overview:
    """Embedding, 24 layers, head and loss; forward, backward, update."""
    forward = {
        "embed": Card("f-embed", "embed", cost=amount(24.6 * k, 67.4 * M), params=134 * M),
        "layers": Card(
            "f-layers",
            "layer_0 … 23",
            count=24,
            copy=17,
            cost=amount(5.81 * T, 360 * G),
            params=1210 * M,
            strips=(
                Strip(NORM, "applied", 48, cost=amount(0, 25.6 * G)),
                Strip(GEMM, "candidate", 48, cost=amount(0, 94 * G)),
                Strip(ATTENTION, "declined", 24, cost=amount(0, 222 * G)),
            ),
            children=_layer("forward", 1),
            edges=(Edge("forward-attn", "forward-mlp", 34 * M, F32),),
        ),
        "head": Card(
            "f-head", "head", cost=amount(550 * G, 1.78 * G), strips=(Strip(NORM, "applied", 1),), params=134 * M
        ),
        "cross_entropy": Card("f-loss", "cross_entropy", cost=amount(1.34 * G, 8.59 * G)),
    }
    backward = {
        "embed": Card("b-embed", "embed", "backward of", cost=amount(8.39 * M, 235 * M)),
        "layers": Card(
            "b-layers",
            "layer_23 … 0",
            "backward of",
            count=24,
            cost=amount(11.6 * T, 532 * G),
            strips=(
                Strip(NORM, "applied", 48, True, amount(0, 52.8 * G)),
                Strip(GEMM, "candidate", 48, True, amount(0, 120 * G)),
                Strip(ATTENTION, "declined", 24, True, amount(0, 333 * G)),
            ),
            children=tuple(reversed(_layer("backward", 1.5))),
            edges=(Edge("backward-mlp", "backward-attn", 34 * M, F32),),
        ),
        "head": Card(
            "b-head", "head", "backward of", cost=amount(1.1 * T, 3.76 * G), strips=(Strip(NORM, "applied", 1, True),)
        ),
        "cross_entropy": Card("b-loss", "cross_entropy", "backward of", cost=amount(1.07 * G, 11.8 * G)),
    }
    update = {
        "embed": Card("u-embed", "embed", "update of", cost=amount(67 * M, 400 * M)),
        "layers": Card("u-layers", "layer_0 … 23", "update of", count=24, cost=amount(600 * M, 6.5 * G)),
        "head": Card("u-head", "head", "update of", cost=amount(67 * M, 400 * M)),
    }
    lanes = {"forward": forward, "backward": backward, "update": update}
    rows = tuple(Row(name, {p: cards[name] for p, cards in lanes.items() if name in cards}) for name in forward)
    logits = "f32[8,1024,32768]"
    edges = (
        Edge("tokens", "f-embed", 33 * k, "i32[8,1025]"),
        Edge("tokens", "f-loss", 33 * k, "i32[8,1025]"),
        Edge("f-embed", "f-layers", int(33.6 * M), F32),
        Edge("f-layers", "f-head", int(33.6 * M), F32),
        Edge("f-head", "f-loss", int(1.07 * G), logits),
        Edge("f-loss", "loss", 4, "f32[]"),
        Edge("b-loss", "b-head", int(1.07 * G), logits),
        Edge("b-head", "b-layers", int(33.6 * M), F32),
        Edge("b-layers", "b-embed", int(33.6 * M), F32),
        Edge("f-embed", "b-embed", int(32.8 * k), kind="kept"),
        Edge("f-layers", "b-layers", int(54.8 * G), kind="kept", values=400),
        Edge("f-head", "b-head", 134 * M, kind="kept"),
        Edge("f-loss", "b-loss", int(1.07 * G), kind="kept"),
        Edge("b-embed", "u-embed", 134 * M, kind="gradients"),
        Edge("b-layers", "u-layers", int(1.21 * G), kind="gradients"),
        Edge("b-head", "u-head", 134 * M, kind="gradients"),
    )
    inputs, results = (
        (Card("tokens", "tokens", kind="input", type="i32[8,1025]"),),
        (Card("loss", "loss", kind="output", type="f32[]"),),
    )
    return _overview("train_step", rows, edges, inputs, results, int(56 * G), int(1.48 * G))


def _overview(title, rows, edges, inputs=(), results=(), kept=0, gradients=0) -> Overview:
    phases = tuple(p for p in ("forward", "backward", "update") if any(p in row.cards for row in rows))
    totals = {p: sum((row.cards[p].cost for row in rows if p in row.cards), Amount()) for p in phases}
    return Overview(title, phases, tuple(rows), tuple(inputs), tuple(results), tuple(edges), totals, kept, gradients)


def u_net() -> Overview:
    """Three levels with skips between them, forward and backward."""
    names = ["down_0", "down_1", "down_2", "mid", "up_2", "up_1", "up_0", "out", "mse"]
    moved = [1.94 * G, 982 * M, 494 * M, 186 * M, 488 * M, 966 * M, 2.37 * G, 76.5 * M, 25.2 * M]
    rows = []
    for name, m in zip(names, moved, strict=True):
        cards = {
            "forward": Card(f"f-{name}", name, cost=amount(m * 20, m), params=int(m / 100)),
            "backward": Card(f"b-{name}", name, "backward of", cost=amount(m * 40, m * 1.25)),
        }
        if name != "mse":
            cards["update"] = Card(f"u-{name}", name, "update of", cost=amount(m / 100, m / 50))
        rows.append(Row(name, cards))
    sizes = [16.8 * M, 8.39 * M, 4.19 * M, 4.19 * M, 8.39 * M, 16.8 * M, 67.1 * M, 3.15 * M]
    edges = [Edge("images", "f-down_0", 12 * M), Edge("noise", "f-down_0", 12 * M), Edge("f-mse", "loss", 4)]
    for (a, b), size in zip(itertools.pairwise(names), sizes, strict=True):
        edges += [Edge(f"f-{a}", f"f-{b}", int(size), "f32[16,64,64,64]"), Edge(f"b-{b}", f"b-{a}", int(size))]
    for a, b, size in (("down_0", "up_0", 67 * M), ("down_1", "up_1", 33 * M), ("down_2", "up_2", 16 * M)):
        edges += [Edge(f"f-{a}", f"f-{b}", size), Edge(f"b-{b}", f"b-{a}", size)]
    for name, m in zip(names, moved, strict=True):
        edges.append(Edge(f"f-{name}", f"b-{name}", int(m / 4), kind="kept"))
        edges += [Edge(f"b-{name}", f"u-{name}", int(m / 100), kind="gradients")] if name != "mse" else []
    inputs = [Card(n, n, kind="input", type="f32[16,64,64,3]") for n in ("images", "noise")]
    return _overview(
        "train_step",
        rows,
        edges,
        inputs,
        [Card("loss", "loss", kind="output", type="f32[]")],
        int(1.95 * G),
        int(21.8 * M),
    )


def inference() -> Overview:
    """The train step's forward lane alone."""
    whole = train_step()
    rows = [replace(row, cards={"forward": row.cards["forward"]}) for row in whole.rows]
    ids = {c.id for row in rows for c in row.cards.values()} | {"tokens", "loss"}
    edges = [e for e in whole.edges if {e.start, e.end} <= ids]
    return _overview("predict", rows, edges, whole.inputs, whole.results)


def clipped() -> Overview:
    """Gradients of several rows meet in one card of the update, the values of several rows in one of the backward pass."""
    whole = train_step()
    rows = [replace(row, cards={p: c for p, c in row.cards.items() if p != "update"}) for row in whole.rows]
    clip = Card("u-clip", "clip", cost=amount(1 * G, 3 * G), where="mlp.py:35-37")
    step = Card("u-step", "update", cost=amount(1 * G, 6 * G), where="mlp.py:41-42")
    rows[2] = replace(rows[2], cards={**rows[2].cards, "update": clip})
    rows.append(Row("update", {"update": step}))
    edges = [e for e in whole.edges if e.kind != "gradients"]
    edges += [Edge(f"b-{name}", "u-clip", 134 * M, kind="gradients") for name in ("embed", "layers", "head", "loss")]
    edges += [
        Edge("u-clip", "u-step", 1500 * M),
        Edge("u-step", "params", 1500 * M),
        Edge("f-embed", "b-loss", 2 * M, kind="kept"),
    ]
    results = [*whole.results, Card("params", "params", kind="output"), Card("velocity", "velocity", kind="output")]
    edges.append(Edge("u-step", "velocity", 1500 * M))
    return _overview("step", rows, edges, whole.inputs, results, whole.kept, whole.gradients)


def many_rows(count: int = 40) -> Overview:
    """A chain of so many modules with a few skips, forward and backward."""
    cards = [(f"block_{i}", amount((i % 7 + 1) * G, (i * i % 11 + 1) * G)) for i in range(count)]
    rows = [
        Row(n, {"forward": Card(f"f-{n}", n, cost=c), "backward": Card(f"b-{n}", n, "backward of", cost=c + c)})
        for n, c in cards
    ]
    edges = []
    for i in range(count - 1):
        edges += [
            Edge(f"f-block_{i}", f"f-block_{i + 1}", 10 * M, F32),
            Edge(f"b-block_{i + 1}", f"b-block_{i}", 10 * M, F32),
        ]
    edges += [Edge(f"f-block_{i}", f"f-block_{i + 9}", 5 * M) for i in range(0, count - 9, 8)]
    edges += [Edge(f"f-block_{i}", f"b-block_{i}", (i + 1) * 10 * M, kind="kept") for i in range(count)]
    return _overview("long", rows, edges, kept=9 * G)


def tangled(count: int = 30) -> Overview:
    """One card with many children and more skips than there are channels; a loop, a branch and long names among them."""
    chance = random.Random(5)
    inside: list[Card] = []
    for i in range(count):
        where = f"a_module_with_a_long_name.py:{i}"
        cost = amount(i * G, (i + 1) * G)
        if i % 10 == 4:
            body = [nodes(f"dot_general + {j}", cost, where, id_=f"t{i}-{j}") for j in range(3)]
            inside.append(
                Card(f"t{i}", "layer", kind="region", turns=32, cost=cost, children=tuple(body), edges=chain(body))
            )
        elif i % 3:
            inside.append(
                nodes(
                    f"operation_with_a_rather_long_name_that_never_ends_{i}",
                    cost,
                    where,
                    "(f32[8,1024,1024], i32[8])",
                    f"t{i}",
                )
            )
        else:
            inside.append(
                site(
                    f"relu(x @ w{i} + b)",
                    GEMM,
                    ("applied", "candidate", "declined")[i // 3 % 3],
                    cost,
                    where,
                    False,
                    f"t{i}",
                )
            )
    skips = {tuple(sorted(chance.sample(range(count), 2))) for _ in range(2 * count)}
    inner = chain(inside, *sorted((a, b) for a, b in skips if b > a + 1))
    cards = [
        Card("before", "before", cost=amount(G, G)),
        Card("knot", "knot", cost=sum((c.cost for c in inside), Amount()), children=tuple(inside), edges=inner),
        Card("after", "after", cost=amount(G, G)),
    ]
    return _overview("knot", [Row(c.name, {"forward": c}) for c in cards], chain(cards))


def random_overview(seed: int) -> Overview:
    """Anything: rows without a card in some lane, edges from any row to any other, deep insides, long names, many inputs."""
    chance = random.Random(seed)
    phases = chance.choice(
        [("forward",), ("forward", "backward"), ("forward", "backward", "update"), ("forward", "update")]
    )
    counter = iter(range(10**6))

    def card(depth: int, prefix: str = "") -> Card:
        name = "".join(chance.choice("abcil mW_[]<&0137é漢") for _ in range(chance.choice((1, 6, 12, 40))))
        name = f"c{next(counter)} {name}".strip()
        cost = amount(10 ** chance.uniform(0, 15), 10 ** chance.uniform(0, 14))
        strips = tuple(
            Strip(p, chance.choice(("applied", "candidate", "declined")), chance.choice((1, 24, 1234)), cost=cost)
            for p in chance.sample(
                (NORM, GEMM, ATTENTION, "a_pass_of_somebody", "swiglu", "rms_norm", "rope"),
                chance.choice((0, 0, 1, 2, 7)),
            )
        )
        where, type_ = chance.choice(("", "model.py:22-24")), chance.choice(("", F32))
        children = tuple(card(depth - 1, prefix) for _ in range(chance.choice((0, 1, 2, 5)))) if depth else ()
        inner = []
        for _ in range(len(children) * 2):
            a, b = chance.choice(children), chance.choice(children)
            inner += [Edge(a.id, b.id, int(10 ** chance.uniform(0, 12)), type_)] if a is not b else []
        kind = chance.choice(("part", "region")) if children else chance.choice(("site", "nodes"))
        own = (
            Site("s", chance.choice((NORM, GEMM)), chance.choice(("applied", "candidate", "declined")))
            if kind == "site"
            else None
        )
        count = chance.choice((1, 1, 24))
        turns = chance.choice((-1, 32)) if kind == "region" else 0
        return Card(name, name, prefix, kind, count, chance.randrange(count), turns, cost=cost, params=chance.choice((0, 10**9)),
                    where=where, type=type_, strips=strips, children=children, edges=tuple(inner), site=own)  # fmt: skip

    prefixes = {"forward": "", "backward": "backward of", "update": "update of"}
    rows = []
    deep = chance.random() < 0.5
    for i in range(chance.choice((1, 2, 4)) if deep else chance.choice((6, 12, 30))):
        cards = {p: card(1 + deep, prefixes[p]) for p in phases if chance.random() < 0.8}
        rows += [Row(f"row {i}", cards or {phases[0]: card(1)})]
    inputs = [Card(f"in{i}", f"input_{i}", kind="input", type=F32) for i in range(chance.choice((0, 1, 3, 20)))]
    results = [Card(f"out{i}", f"result_{i}", kind="output", type=F32) for i in range(chance.choice((0, 1, 3)))]
    kinds = {("forward", "backward"): "kept", ("forward", "update"): "kept", ("backward", "update"): "gradients"}
    lane = {c.id: p for row in rows for p, c in row.cards.items()}
    ids = list(lane)
    edges = []
    for _ in range(3 * len(ids)):
        a, b = chance.choice(ids), chance.choice(ids)
        edges += (
            [Edge(a, b, int(10 ** chance.uniform(0, 12)), kind=kinds.get((lane[a], lane[b]), "flow"))] if a != b else []
        )
    edges += [Edge(c.id, chance.choice(ids), 10**6) for c in inputs for _ in range(2)]
    edges += [Edge(chance.choice(ids), c.id, 10**6) for c in results]
    return _overview("random", rows, edges, inputs, results, 10**9, 10**8)
