"""The tables of measurements on an H200: language models, their heads, and steps whose calls `fl.tune` measured."""

from __future__ import annotations

from dataclasses import replace

from .on_h200 import AFTER, BEFORE, FLOOR, RATIO
from .tables import Column, Measured, Row

_BY_EXPERT, _EDITED = "and policy, loss", "with the edits"

LANGUAGE_MODELS = Measured(
    "Loss and gradients of language models",
    "h200",
    "language_models",
    "In bfloat16; device time. A Llama-like model has 4 layers of width 2048, 16 heads of 128 features in 4 groups, a gated "
    "feed-forward of 5632 and a vocabulary of 32768, and reads 4 texts of 2048 tokens. `by hand` is "
    "the same program with cuDNN's attention through `jax.nn`; `and policy, loss` has a policy of `jax.checkpoint` that keeps products "
    "and a loss in chunks, too. With remat, each layer is in a `jax.checkpoint`. torch.compile is the same model with torch's attention. "
    "FusionLab is `fl.fuse(jax.value_and_grad(loss))`, then that with "
    '`edits=["recomputed_products", "stacked_scan"]`: the first keeps the products that a checkpoint computes again, the second writes '
    "the scan out. The floor is the time of the matrix products at the rate of one large product.",
    (
        BEFORE,
        Column("by hand", ("by hand",)),
        Column(_BY_EXPERT, ("expert, policy and chunked loss",)),
        Column("torch.compile", ("torch.compile",)),
        Column("FusionLab", ("fused grad",)),
        Column("ratio", ("fused grad",), before=("jax.jit",)),
        Column(_EDITED, ("fused grad, edits",)),
        FLOOR,
    ),
    [
        Row("Llama-like, in a scan", ("cases", "llama scan")),
        Row("the same with remat", ("cases", "llama checkpoint")),
    ],
    ("dot_product_attention", "gemm_epilogue", "layer_norm", "linear_cross_entropy"),
    "A scan copies what its backward pass reads: FusionLab takes as long as torch.compile once it is written out. With checkpoints "
    "it takes as long without an edit, and with the edits less than any other.",
    case="llama scan",
)

UNROLLED = replace(
    LANGUAGE_MODELS,
    title="Loss and gradients of the Llama-like model, unrolled",
    about="In bfloat16; device time; model and programs are as in the table above.",
    columns=tuple(c for c in LANGUAGE_MODELS.columns if c.head != _EDITED),
    rows=[Row("Llama-like, unrolled", ("cases", "llama unrolled"))],
    after="It takes as long as torch.compile.",
    case="llama unrolled",
)

LARGE_VOCABULARY = replace(
    LANGUAGE_MODELS,
    title="Loss and gradients with a vocabulary of 128256",
    about="In bfloat16; device time; the model of the table above with a larger head, and the same programs.",
    rows=[
        Row("Llama-like, in a scan", ("cases", "llama scan, V 128256")),
        Row("the same with remat", ("cases", "llama checkpoint, V 128256")),
        Row("the same, unrolled", ("cases", "llama unrolled, V 128256")),
    ],
    after="Unrolled layers have neither scan nor checkpoint to edit. FusionLab is the fastest of each row.",
    case="llama scan, V 128256",
)

GPT2 = replace(
    UNROLLED,
    title="Loss and gradients of GPT-2",
    about="In bfloat16; device time; the programs are as in the tables above, the options as in the table below. GPT-2 124M reads 8 texts "
    "of 1024 tokens.",
    columns=(
        *(c for c in UNROLLED.columns if c.head not in (FLOOR.head, _BY_EXPERT)),
        Column("by hand, options", ("by hand, options",)),
        Column("FusionLab, options", ("fused grad, options",)),
        FLOOR,
    ),
    rows=[Row("GPT-2 124M", ("cases", "gpt2"))],
    after="FusionLab and torch.compile pad the vocabulary of 50257, which makes the products of the head fast.",
    case="gpt2",
)

WITH_OPTIONS = replace(
    LANGUAGE_MODELS,
    title="Loss and gradients of the Llama-like model, with options of XLA",
    about="In bfloat16; device time; model and programs are as in the tables above. The options, both of which `fl.advise` tries, are "
    "`xla_gpu_enable_triton_gemm=False` and `xla_gpu_enable_dus_accumulator_zero_init_elimination=True`; the ratio is of the two columns "
    "with the options. A dash: there is no scan.",
    columns=(
        Column("by hand", ("by hand",)),
        Column("with the options", ("by hand, options",)),
        Column("torch.compile", ("torch.compile",)),
        Column("FusionLab", ("fused grad",)),
        Column("with the options", ("fused grad, options",)),
        Column("ratio to by hand", ("fused grad, options",), before=("by hand, options",)),
        Column("with the edits and the options", ("fused grad, edits, options",)),
    ),
    rows=[
        Row("Llama-like, in a scan", ("cases", "llama scan")),
        Row("the same with remat", ("cases", "llama checkpoint")),
        Row("the same, unrolled", ("cases", "llama unrolled")),
    ],
    after="Products in a scan without checkpoints are slower with them: XLA then lets each write into the stack, and measures no kernels "
    "for such a product.",
    case="llama scan",
)

CROSS_ENTROPY = Measured(
    "The head of a language model and its loss, forward and backward",
    "h200",
    "linear_cross_entropy",
    "8192 rows (or as named) of 2048 features in bfloat16; device time. `jax.jit` runs the plain product, `logsumexp` and "
    "`take_along_axis`, with logits of the dtype named; torch.compile rounds the logits to bfloat16 in every row.",
    (BEFORE, AFTER, RATIO, Column("torch.compile", ("torch.compile",))),
    [
        Row("vocabulary 32768, bfloat16 logits", ("cases", "N 8192, E 2048, V 32768, bfloat16, logits bfloat16")),
        Row("the same, float32 logits", ("cases", "N 8192, E 2048, V 32768, bfloat16, logits float32")),
        Row("1000 rows, float32 logits", ("cases", "N 1000, E 2048, V 32768, bfloat16, logits float32")),
        Row("4097 rows, float32 logits", ("cases", "N 4097, E 2048, V 32768, bfloat16, logits float32")),
    ],
    ("linear_cross_entropy",),
    "Of one row XLA's code is faster, and is kept.",
    case="N 4097, E 2048, V 32768, bfloat16, logits float32",
)

LARGER_VOCABULARIES = replace(
    CROSS_ENTROPY,
    title="The head and its loss: other vocabularies",
    about="8192 rows of 2048 features in bfloat16, float32 logits; device time; the programs are as in the table above.",
    rows=[
        Row(f"vocabulary {size}", ("cases", f"N 8192, E 2048, V {size}, bfloat16, logits float32"))
        for size in (50257, 151936)
    ],
    after="With 50257 entries, no multiple of 8, products are slow: FusionLab and torch.compile pad the vocabulary, `jax.jit` does not.",
    case="N 8192, E 2048, V 151936, bfloat16, logits float32",
)

LONG_AND_LARGE = replace(
    CROSS_ENTROPY,
    title="The head and its loss: 32768 rows, a vocabulary of 128256",
    about="32768 rows of 2560 features in bfloat16; device time; the programs are as in the tables above. Memory is that of temporaries.",
    columns=(
        *CROSS_ENTROPY.columns,
        Column("memory: jax.jit", ("jax.jit", "temporaries_bytes")),
        Column("FusionLab", ("fusionlab", "temporaries_bytes")),
    ),
    rows=[
        Row(f"{dtype} logits", ("cases", f"N 32768, E 2560, V 128256, bfloat16, logits {dtype}"))
        for dtype in ("bfloat16", "float32")
    ],
    after="FusionLab adds the gradient of the weights up over chunks of 2048 rows, which takes a few percent more time than torch.compile, "
    "and has a tenth of the temporaries of `jax.jit` or less.",
    case="N 32768, E 2560, V 128256, bfloat16, logits float32",
)

WITH_MORE = replace(
    CROSS_ENTROPY,
    title="The head and its loss: a bias, a soft cap, the accuracy beside it",
    about="8192 rows in bfloat16; device time; the programs are as in the tables above. The soft cap is 30; the accuracy is that of the "
    "argmax of the same logits, beside the loss and its gradients.",
    rows=[
        Row(name, ("cases", f"N 8192, E {features}, V {size}, bfloat16, logits {dtype}, {form}"))
        for name, features, size, dtype, form in (
            ("a bias, vocabulary 32768, bfloat16 logits", 2048, 32768, "bfloat16", "bias"),
            ("a bias, 768 features, 30522 (BERT)", 768, 30522, "bfloat16", "bias"),
            ("a bias, float32 logits", 2048, 32768, "float32", "bias"),
            ("a soft cap, vocabulary 32768, bfloat16 logits", 2048, 32768, "bfloat16", "softcap"),
            ("a soft cap, 2304 features, 256000, float32 logits (Gemma 2)", 2304, 256000, "float32", "softcap"),
            ("the accuracy, vocabulary 32768, bfloat16 logits", 2048, 32768, "bfloat16", "accuracy"),
            ("the accuracy, 768 features, 50257 (GPT-2)", 768, 50257, "bfloat16", "accuracy"),
        )
    ],
    after="torch.compile rounds the logits to bfloat16 in every row.",
    case="N 8192, E 768, V 50257, bfloat16, logits bfloat16, accuracy",
)

TWO_CARDS = Measured(
    "The Llama-like train step on two H200s",
    "h200",
    "fsdp",
    "Loss, gradients and AdamW, scanned, 4 texts on each device; parameters, optimizer and texts are sharded over one mesh axis (FSDP). "
    "Wall time; memory of one device.",
    (
        BEFORE,
        Column("FusionLab", ("grad of fused",)),
        Column("ratio", ("grad of fused",), before=("jax.jit",)),
        Column("the step fused", ("fused grad",)),
        Column("by hand", ("by hand",)),
        Column("memory: jax.jit", ("jax.jit", "peak_bytes")),
        Column("FusionLab", ("grad of fused", "peak_bytes")),
    ),
    [
        Row("one H200, 4 texts", ("cases", "one card")),
        Row("two, Explicit axes", ("cases", "explicit")),
        Row("two, Auto axes with constraints", ("cases", "auto, constrained")),
        Row("two, Auto axes", ("cases", "auto")),
    ],
    ("dot_product_attention", "gemm_epilogue", "layer_norm", "linear_cross_entropy"),
    "The collectives are those of `jax.jit`, in kind, number and bytes, but for the last row, where XLA chooses them. They take about as "
    "long in a step of half the time, and so the ratio is up to a tenth smaller than on one card.",
)

TUNED = Measured(
    "A GPU without a table",
    "h200",
    "tuned",
    "Train steps in bfloat16: the Llama-like model and GPT-2 of the tables above, and a ViT-B/16 of 64 images; and a decoding step of "
    "eight layers. With the shipped table; with neither table nor plan; and with the plan alone that `fl.tune` made in 60 s, and in 300 s.",
    (
        BEFORE,
        Column("with the table", ("table",)),
        Column("with nothing", ("untuned",)),
        Column("after 60 s", ("tuned 60 s",)),
        Column("after 300 s", ("tuned 300 s",)),
        Column("ratio", ("tuned 300 s",), before=("jax.jit",)),
    ),
    [
        Row("Llama-like train step, unrolled", ("cases", "llama train")),
        Row("GPT-2 124M train step", ("cases", "gpt2 train")),
        Row("ViT-B/16 train step", ("cases", "vit train")),
        Row("a decoding step of width 1024, 1 text", ("cases", "decode step")),
    ],
    ("dot_product_attention", "gemm_epilogue", "layer_norm", "linear_cross_entropy", "multi_transformer_decoder"),
    "Every call of the four was measured before the 300 s were over.",
)

TABLES = (
    LANGUAGE_MODELS,
    UNROLLED,
    LARGE_VOCABULARY,
    GPT2,
    WITH_OPTIONS,
    CROSS_ENTROPY,
    LARGER_VOCABULARIES,
    LONG_AND_LARGE,
    WITH_MORE,
    TWO_CARDS,
    TUNED,
)
