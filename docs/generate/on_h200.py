"""The tables of measurements on an H200: ops and layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .tables import Column, Measured, Row

BEFORE = Column("jax.jit", ("jax.jit",))
AFTER = Column("FusionLab", ("fusionlab",))
RATIO = Column("ratio", ("fusionlab",), before=("jax.jit",))
TORCH = (Column("torch eager", ("torch", "torch eager")), Column("torch.compile", ("torch", "torch.compile")))
FLOOR = Column("floor", ("floor_s",))
ALONE = "fusionlab, as it comes"


def _sized(record_name: str, label: str) -> Row:
    return Row(label, ("attention", record_name))


MLP = Measured(
    "A two-layer perceptron, forward and backward",
    "h200",
    "gemm_epilogue",
    "Rows x features x hidden features, in bfloat16; device time. The last column is the time of the six matrix products alone.",
    (BEFORE, AFTER, RATIO, *TORCH, Column("its products alone", ("bare products",))),
    [
        Row(f"{act} {size}", ("mlp", f"{act} {size}"))
        for size in ("8192x768x3072", "8192x4096x16384")
        for act in ("relu", "gelu_tanh", "gelu_erf")
    ],
    ("gemm_epilogue",),
)

ATTENTION = Measured(
    "Attention, forward and backward",
    "h200",
    "attention",
    "In bfloat16; device time. `jax.jit` runs plain code whose softmax is in float32, as in `jax.nn.dot_product_attention`.",
    (
        BEFORE,
        AFTER,
        RATIO,
        Column("cuDNN through jax.nn", ("jax.nn cudnn",)),
        Column("torch sdpa", ("torch", "torch sdpa")),
    ),
    [
        _sized("B32 H16 S1024 D64 bfloat16 BTNH mask no", "no mask, batch 32, 16 heads, 1024 x 1024, 64 features"),
        _sized("B32 H16 S1024 D64 bfloat16 BNTH mask no", "the same, heads before positions"),
        _sized("B4 H16 S4096 D128 bfloat16 BTNH mask causal", "causal, batch 4, 16 heads, 4096 x 4096, 128 features"),
        _sized("B8 H16 S1024 D64 bfloat16 BTNH mask lengths", "lengths, batch 8, 16 heads, 1024 x 1024, 64 features"),
        _sized("B8 H16 S1024 D64 bfloat16 BTNH mask random", "half of the scores masked at random, the same sizes"),
        _sized("B32 H12 S128 D64 bfloat16 BTNH mask no", "no mask, batch 32, 12 heads, 128 x 128, 64 features"),
        _sized(
            "B8 H16 S1024 D64 float32 BTNH mask no", "float32, no mask, batch 8, 16 heads, 1024 x 1024, 64 features"
        ),
        *(
            _sized(
                f"B8 H16 S1024 D{size} bfloat16 BTNH mask no", f"no mask, batch 8, the same lengths, {size} features"
            )
            for size in (80, 96, 160, 256)
        ),
    ],
    ("dot_product_attention",),
    "In float32 XLA's code was faster than the kernels there are, so the site keeps it. torch runs the same kernels of cuDNN in less time: "
    "XLA fills what such a call writes, its scratch memory too, with zeros first "
    "([openxla/xla#44867](https://github.com/openxla/xla/pull/44867)), which torch does not.",
)

ATTENTION_MEMORY = Measured(
    "Attention: memory",
    "h200",
    "attention",
    "Temporaries of the compiled program, as XLA counts them.",
    (BEFORE, AFTER, RATIO),
    [Row("causal, forward and backward, batch 1, 16 heads, 8192 x 8192, 64 features", ("memory",))],
    ("dot_product_attention",),
)

TRAIN_STEP = Measured(
    "A train step of two transformer layers",
    "h200",
    "attention",
    "Two post-norm layers with flax's attention: batch 32, 1,024 positions, hidden size 1,024, 16 heads, feed-forward 4,096. The model is "
    "not changed.",
    (
        BEFORE,
        Column("attention pass only", ("fusionlab",)),
        RATIO,
        Column("default passes", (ALONE,)),
        Column("ratio", (ALONE,), before=("jax.jit",)),
    ),
    [
        Row("softmax in bfloat16", ("encoder", "dropout 0.0")),
        Row("softmax in float32", ("encoder", "dropout 0.0, softmax in float32")),
        Row(
            "softmax in float32, parameters in bfloat16",
            ("encoder", "dropout 0.0, softmax in float32, parameters in bfloat16"),
        ),
        Row("dropout 0.1", ("encoder", "dropout 0.1")),
    ],
    ("dot_product_attention", "gemm_epilogue", "layer_norm"),
    "With dropout, attention keeps XLA's code: it was faster than the kernels there are.",
)

NORMS = Measured(
    "LayerNorm of a sum",
    "h200",
    "multi_transformer",
    "A bias and a residual are added, then the sum is normalised, in bfloat16. `jax.jit` computes the mean of the squared differences; the "
    "second column computes E[x^2] - E[x]^2, as flax does. FusionLab runs one kernel each way.",
    (BEFORE, Column("by E[x^2] - E[x]^2", ("fast variance",)), AFTER, RATIO),
    [
        Row(f"{label}, {work}", ("parts", f"norms layer {size} bfloat16, {key}"))
        for size, label in (("32768x1024", "32768 x 1024"), ("8192x4096", "8192 x 4096"))
        for key, work in (
            ("forward", "forward"),
            ("forward and sum", "the sum too"),
            ("forward and backward", "forward and backward"),
        )
    ],
    ("layer_norm",),
)


def _norm_rows(data: Mapping[str, Any]) -> Sequence[Row]:
    names = [name for name in data["cases"] if name.endswith("bfloat16") and not name.startswith("rms")]
    return [
        Row(name.removesuffix(" bfloat16").replace("layer ", "").replace("x", " x "), ("cases", name, "alone"))
        for name in names
    ]


NORMS_ALONE = Measured(
    "LayerNorm alone, forward",
    "h200",
    "norms",
    "Rows x features, in bfloat16, without a sum: the op by each of its implementations. A dash: `pallas` does not take the size.",
    (
        Column("XLA's code", ("xla",)),
        Column("cuda", ("cuda",)),
        Column("ratio", ("cuda",), before=("xla",)),
        Column("pallas", ("pallas",)),
        Column("ratio", ("pallas",), before=("xla",)),
    ),
    _norm_rows,
    ("layer_norm",),
)

ENCODER = Measured(
    "A train step of two layers, against torch",
    "h200",
    "multi_transformer",
    "The third of the train steps above: softmax in float32, parameters in bfloat16.",
    (
        BEFORE,
        Column("default passes", (ALONE,)),
        Column("ratio", (ALONE,), before=("jax.jit",)),
        Column("its three passes named", ("with layer_norm",)),
        Column("ratio", ("with layer_norm",), before=("jax.jit",)),
        Column("torch eager", ("torch", "torch")),
        Column("torch.compile", ("torch", "torch.compile")),
    ),
    [Row("the train step", ("parts", "encoder"))],
    ("dot_product_attention", "gemm_epilogue", "layer_norm"),
)

DECODING = Measured(
    "A decoding step",
    "h200",
    "multi_transformer",
    "Time of a layer, in a program of eight layers, in bfloat16, with caches updated in place. The floor is the time to read the weights "
    "and the caches once.",
    (
        BEFORE,
        Column("the op's pieces", ("composed",)),
        Column("its own kernels", ("cuda",)),
        Column("ratio", ("cuda",), before=("jax.jit",)),
        FLOOR,
    ),
    [
        Row("width 4096, 32 heads, 1024 positions, 1 text", ("parts", "decoding E4096 H32 cache 1024 batch 1")),
        Row("the same, 4 texts", ("parts", "decoding E4096 H32 cache 1024 batch 4")),
        Row("the same, 16 texts", ("parts", "decoding E4096 H32 cache 1024 batch 16")),
        Row("width 1024, 16 heads, 512 positions, 1 text", ("parts", "decoding E1024 H16 cache 512 batch 1")),
        Row("the same, 16 texts", ("parts", "decoding E1024 H16 cache 512 batch 16")),
    ],
    ("multi_transformer_decoder", "multi_transformer_decoder_fuse_qkv"),
)

GENERATE = Measured(
    "Generating text",
    "h200",
    "multi_transformer",
    "`fusionlab.models.gpt.generate`, with prompt and loop; every token is the same.",
    (BEFORE, AFTER, RATIO),
    [Row("256 tokens of one text, 24 layers of width 1024", ("parts", "generate"))],
    ("multi_transformer_decoder", "multi_transformer_decoder_fuse_qkv"),
)


def _routes(data: Mapping[str, Any]) -> str:
    """How many cases leave XLA, and how much longer the slowest took than `jax.jit`."""
    cases = list(data["cases"].values())
    elsewhere = sum(any(product[0] != "xla" for product in case["products"]["fusionlab"]) for case in cases)
    slowest = max(case["fusionlab"]["median_s"] / case["jax.jit"]["median_s"] for case in cases)
    return (
        f"The record has {len(cases)} cases: {elsewhere} take another route than XLA's, {len(cases) - elsewhere} stay with XLA. None took "
        f"more than {100 * (slowest - 1):.1f} % longer than `jax.jit`."
    )


PRODUCTS = Measured(
    "Matrix products",
    "h200",
    "matmul_schedule",
    "4096 x 1024 x 4096 in bfloat16 unless the row says otherwise, with the operations that a route absorbs.",
    (BEFORE, AFTER, RATIO),
    [
        Row("gelu(a @ b)", ("cases", "gelu bfloat16")),
        Row("a @ b summed in float32, + bias, rounded", ("cases", "summed in f32, bias, cast bfloat16")),
        Row("a @ b to float32, + bias", ("cases", "to f32, bias bfloat16")),
        Row("a and b widened to float32, multiplied, rounded", ("cases", "widened, cast")),
        Row("a row of 1024 @ 1024 x 1024", ("cases", "[1,k] @ [k,n]")),
        Row("gated feed-forward of Llama 7B, 4096 tokens", ("cases", "llama")),
    ],
    ("matmul_schedule",),
    _routes,
)

GATED = Measured(
    "A gated feed-forward",
    "h200",
    "matmul_schedule",
    "The feed-forward of Llama 7B with 4,096 tokens: by XLA's two products, and by each implementation of the gated pair.",
    (
        BEFORE,
        Column("concatenated", ("gated concatenated",)),
        Column("ratio", ("gated concatenated",), before=("jax.jit",)),
        Column("kernel", ("gated kernel",)),
        Column("ratio", ("gated kernel",), before=("jax.jit",)),
    ),
    [Row("gated feed-forward of Llama 7B, 4096 tokens", ("cases", "llama"))],
    ("gated_matmul",),
    "Both were slower than XLA's two products, so the pair stays as it is.",
)

GROUPED = Measured(
    "Products of groups of rows",
    "h200",
    "grouped_matmul",
    "`jax.lax.ragged_dot` in bfloat16; groups x features x hidden features.",
    (BEFORE, AFTER, RATIO),
    [
        Row(f"{case}, {work}", ("cases", case, work))
        for case in (
            "16384 rows, 64 x 2048 x 1408",
            "16384 rows, 8 x 4096 x 14336",
            "8192 rows, 8 x 512 x 512",
            "1024 rows, 8 x 512 x 512",
            "256 rows, 8 x 512 x 512",
        )
        for work in ("forward", "forward and backward")
    ],
    ("grouped_matmul",),
    "With fewer than 1,024 rows, or a single group, the product keeps XLA's code.",
)

LERP = Measured(
    "Gradients of a broadcast interpolation",
    "h200",
    "lerp",
    "In float32. The floor is the time to move the bytes at the rate of a copy. In the last row XLA's code is as fast, and is kept.",
    (
        Column("jax.jit", ("backward", "jax.jit")),
        Column("FusionLab", ("backward", "fusionlab")),
        Column("ratio", ("backward", "fusionlab"), before=("backward", "jax.jit")),
        Column("torch eager", ("backward", "torch", "torch eager")),
        Column("torch.compile", ("backward", "torch", "torch.compile")),
        FLOOR,
    ),
    [
        Row(name, ("cases", name))
        for name in (
            "x (512,1,1024) y (512,1024,1024) w (1024,1)",
            "x (1024,1,1024) y (1,1024,1024) w (1)",
            "x and y (64,1024,1024) w (1)",
        )
    ],
    ("lerp",),
)

TABLES = (
    MLP,
    ATTENTION,
    ATTENTION_MEMORY,
    TRAIN_STEP,
    ENCODER,
    NORMS,
    NORMS_ALONE,
    DECODING,
    GENERATE,
    PRODUCTS,
    GATED,
    GROUPED,
    LERP,
)
