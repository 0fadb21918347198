"""`linear_cross_entropy`: the head of a language model and its loss as one op, whose logits never exist whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import jax

from ....device import Device
from ....graph.unit_cotangent import has_unit_cotangent
from ....tracebacks import own_lines_hidden
from ...choose.choices import Choice
from ...op.chooser import exact_case
from ...op.implementation import Call, ChoiceKind, Implementation, ImplementationChoice
from ...op.op import Op
from ...op.primitive import FusedPrimitive
from . import choosing, chunked, cuda, reference
from .checks import checked
from .settings import DEFAULTS, Settings

Array = Any

XLA = Implementation.of_reference(
    "the product, the softmax and the sum as jnp code: the logits of all rows exist", reference
)


class LinearCrossEntropy(Op):
    """Cross-entropy of softmax(x @ w + bias) against labels; see `linear_cross_entropy` below for shapes and attributes."""

    name = "linear_cross_entropy"
    slots = ("x", "w", "labels", "bias", "weights")
    rows = ("x", "labels", "top", "mass", "lse", "argmax", "loss")
    at_site = (("call", {"residuals": True}),)
    whole, across = frozenset("k"), frozenset("mv")
    defaults: ClassVar[Mapping[str, Any]] = DEFAULTS
    implementations: ClassVar[Mapping[str, Implementation]] = {
        "xla": XLA,
        "xla_chunked": replace(
            XLA,
            name="xla_chunked",
            summary="chunks of rows, one after the other, as jnp code: the logits of one chunk exist at a time",
            forward=chunked.forward,
            cotangent=chunked.cotangent,
            opaque=True,
        ),
        "cuda": XLA.by_kernels(
            "cuda",
            "the same chunks, with FusionLab's own kernel between the products: one read of the logits",
            cuda,
        ),
    }

    def prepare(self, given: Mapping[str, Any], attrs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        full = checked(given, self.with_defaults(attrs))
        return dict(given), full | ({"rounded": True} if _may_round(given, full) else {})

    def results(self, **attrs: Any) -> tuple[str, ...]:
        return Settings.of(attrs).results

    def residual_names(self, **attrs: Any) -> tuple[str, ...]:
        return Settings.of(attrs).residuals

    def reads(self, wanted: tuple[str, ...], **attrs: Any) -> frozenset[str]:
        form, moving = Settings.of(attrs), [slot for slot in wanted if slot != "weights"]
        names = {form.gradients[slot] for slot in moving} if form.is_scalar else set()
        names |= {"loss"} if "weights" in wanted else set()
        if moving and form.has_rows:
            names |= {"x", "w", "labels", "bias", "top", "mass"}
        return frozenset(names).intersection((*form.present, *form.results, *form.residuals))

    def batch(
        self, role: str, names: tuple[str, ...], values: list[Array], dims: list[int | None], params: dict[str, Any]
    ) -> tuple[list[Array], dict[str, Any]] | None:
        """A batch of rows is more rows; of a sum over rows there is one for each of the batch."""
        return None if "weights" in params["present"] else super().batch(role, names, values, dims, params)

    def _batching_rule(
        self, primitive: FusedPrimitive, operands: Sequence[Array], dims: Sequence[Any], **params: Any
    ) -> tuple[list[Array], list[int]]:
        """Of a sum over rows, which is not differentiated yet: the sums of a batch of rows."""
        if primitive.role != "call" or params["residuals"] or "weights" not in params["present"]:
            return super()._batching_rule(primitive, operands, dims, **params)
        form = Settings.of(params)
        *present, _ = params["present"]
        also = tuple(name for name in form.also if name != "loss")
        by_row = params | {"present": tuple(present), "dtypes": form.dtypes[:-1], "also": also, "rounded": False}

        def summed(*given: Array) -> list[Array]:
            loss, *rest = primitive.bind(*given[:-1], **by_row)
            found = {
                **dict(zip(also, rest, strict=True)),
                "loss": loss,
                "out": reference.weighted(given[-1], loss, form),
            }
            return [found[name] for name in form.results]

        outs = jax.vmap(summed, in_axes=tuple(d if isinstance(d, int) else None for d in dims))(*operands)
        return outs, [0] * len(outs)

    def case(self, role: str, shapes: Mapping[str, Any], **attrs: Any) -> str | None:
        """By everything but the numbers that no time depends on."""
        return None if role == "tangent" else exact_case(self, choosing.TIMED, role, shapes, attrs)

    def decide(self, role: str, shapes: Mapping[str, Any], device: Device, **attrs: Any) -> ImplementationChoice:
        """By measurement where the rule has none."""
        found = self.rule(Call(role, shapes, device, attrs), "")
        return super().decide(role, shapes, device, **attrs) if found.waits else found

    def by_measurement(self, found: Choice) -> ImplementationChoice:
        """Chunks in any case: who names the pass wants the memory that they save."""
        chosen = super().by_measurement(found)
        return replace(chosen, implementation="xla_chunked") if chosen.implementation == "xla" else chosen

    def rule(self, call: Call, unable: str) -> ImplementationChoice:
        return choosing.rule(call, self.refusal("cuda", call) is None)

    def left(self, call: Call, decisions: Sequence[ImplementationChoice]) -> ImplementationChoice | None:
        """Rows that make one chunk gain nothing either: they are left as they are written."""
        return next((d for d in decisions if d.kind is ChoiceKind.SAME_CODE), None) or super().left(call, decisions)

    def labels(self, shapes: Mapping[str, tuple[int, ...]], /, **attrs: Any) -> Mapping[str, tuple[str, ...]]:
        """Rows "m0", "m1", ..., contracted "k", vocabulary "v"."""
        form = Settings.of(attrs)
        ranks = [len(shapes[n]) - (n in ("x", "dx")) for n in (*self.rows, "dx", "weights") if n in shapes]
        rank = ranks[0] if ranks else len(shapes.get("out", ()))
        rows = tuple(f"m{i}" for i in range(rank))
        w = ("v", "k") if form.transposed else ("k", "v")
        by_row = dict.fromkeys((*self.rows, "weights"), rows)
        out = {"out": () if form.is_scalar else rows}
        return {
            **by_row,
            **dict.fromkeys(("x", "dx"), (*rows, "k")),
            **dict.fromkeys(("w", "dw"), w),
            **out,
        } | dict.fromkeys(("bias", "dbias"), ("v",))

    def formula(self, *, bias: bool = False, weights: bool = False, transposed: bool = False, **attrs: Any) -> str:
        """ "sum(weights * (logsumexp(x @ w + b) - (x @ w + b)[label]))"; `bias` and `weights` say which operands there are."""
        given = Settings.of(attrs)
        logits = f"x @ {'w.T' if transposed else 'w'}{' + b' if bias else ''}"
        logits = logits if given.scale == 1 else f"{given.scale:.6g} * ({logits})"
        logits = logits if given.softcap is None else f"softcap({logits}, {given.softcap:.6g})"
        more = f", label smoothing {given.label_smoothing:.6g}" if given.label_smoothing else ""
        more += f", z-loss {given.z_loss:.6g}" if given.z_loss else ""
        more += f", {given.classes} classes" if given.classes is not None else ""
        text = f"cross_entropy({logits}, labels{more})"
        return f"sum(weights * {text})" if weights else text


def _may_round(given: Mapping[str, Any], full: Mapping[str, Any]) -> bool:
    """Whether the gradients of a sum are bfloat16 once they are made: no other cotangent, of a row, adds to them."""
    alone = "weights" in given and not {"lse", "loss"} & set(full["also"])
    return alone and has_unit_cotangent() and given["x"].dtype == "bfloat16"


LINEAR_CROSS_ENTROPY = LinearCrossEntropy()


@own_lines_hidden
def linear_cross_entropy(
    x: Array,
    w: Array,
    labels: Array,
    bias: Array | None = None,
    weights: Array | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    classes: int | None = None,
    fill: float = -math.inf,
    logits_dtype: Any = None,
    transposed: bool = False,
    out_of_range: str = "nan",
    masked: bool = True,
    also: tuple[str, ...] = (),
    chunk: int | None = None,
    precision: Any = None,
    implementation: str | None = None,
) -> Any:
    """The cross-entropy of softmax(x @ w + bias) against labels, for each row or as a weighted sum, as one op.

        h = scale * (x @ w + bias), or softcap * tanh(scale * (x @ w + bias) / softcap)
        loss = logsumexp(h) - (1 - s) * h[label] - s / V * sum(h) + z * logsumexp(h)^2, with s = label_smoothing, z = z_loss

    Args:
      x: *R x E: rows of any number of axes, E features.
      w: E x V, or V x E with `transposed` (the embedding of a model that ties both).
      labels: *R, integers.
      bias: V, or None.
      weights: *R, or None: then the result is the sum of weights * loss. A mean over the rows that count has 1 / count in each of them.
      label_smoothing, z_loss: numbers.
      softcap: a number above 0, or None.
      scale: a number, as 1 / a temperature.
      classes: the first of the vocabulary that count, where w is padded; the logits of the others are `fill`, and pass no gradient on.
        None: all count.
      fill: a number, or -inf.
      logits_dtype: of the product's result; None: float32 (float64 for float64). Sums are float32 (float64), and so is all that follows.
      transposed: whether w is V x E.
      out_of_range: of a label outside of [0, V), negative ones included: "nan", the loss is NaN (`jnp.take_along_axis`, once it has
        counted negative labels from the end); "clip", the nearest label counts; "promise_in_bounds", as the gradient of `h[label]` in
        JAX has it, too: none for that logit; "zero", nothing is picked (`lse - sum(one_hot * h)`); "drop", nothing is picked and the loss
        has s * lse (`-sum(one_hot * log_softmax(h))`).
      masked: whether a row of weight 0 is left out of the sum whatever its loss is, NaN included.
      also: further results of the same logits: any of "lse" (*R, logsumexp(h)), "argmax" (*R, int32, as `jnp.argmax` has it) and, with
        weights, "loss" (*R).
      chunk: rows whose logits exist at a time; None: as many as a fixed amount of memory holds.
      precision: as for `jax.lax.dot_general`; None takes the default in force at the call.
      implementation: None lets the op choose; "xla" is the plain jnp code, with the logits of all rows, "xla_chunked" a
        loop over chunks of rows.

    Returns:
      float32 (float64 for float64 logits): the loss *R, or with weights the sum, a scalar; with `also` a tuple of it and those results.
      Of a sum the gradients of x, w and bias are made in the forward pass, if it is differentiated, and multiplied by the cotangent; those
      of a loss by row compute the logits again. The gradient of w is summed up in float32 and rounded once.

    Raises:
      ArgumentError: a wrong rank, size, dtype or number; names the argument.
      UnknownNameError: no implementation, result or treatment of labels has that name.
      BackendError: the named implementation cannot run this call here.

    >>> import jax.numpy as jnp
    >>> x, w = jnp.ones((2, 3)), jnp.zeros((3, 4))
    >>> linear_cross_entropy(x, w, jnp.asarray([0, 3]), weights=jnp.full(2, 0.5)).round(4).item()
    1.3863
    """
    return LINEAR_CROSS_ENTROPY.call_by_name(**locals())
