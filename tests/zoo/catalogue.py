"""The list of the zoo's models, and of the programs that they make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from .kinds import attention, controls, handwritten, norms, parallel, structured
from .libraries import equinox_models, haiku_models, hf, jaxnn, linen, nnx
from .model import DTYPES, Built, Model, concrete
from .train import initial_state, train_step
from .truths import Truth, Variant, truth

__all__ = ["DTYPES", "LEFT_OUT", "MODELS", "VARIANTS", "Built", "Model", "Program", "programs"]

DtypeName = Literal["f32", "bf16"]
VARIANTS: tuple[Variant, ...] = ("forward", "train")
# Models that are not in the list because of what is missing here, by their ids, and what that is.
LEFT_OUT: dict[str, str] = {model.id: why for model in hf.MODELS if (why := hf.reason()) is not None}
MODELS: tuple[Model, ...] = (
    *(*handwritten.MODELS, *attention.MODELS, *norms.MODELS, *controls.MODELS, *jaxnn.MODELS),
    *(*linen.MODELS, *nnx.MODELS, *equinox_models.MODELS, *haiku_models.MODELS),
    *(*structured.MODELS, *parallel.MODELS),
    *(model for model in hf.MODELS if model.id not in LEFT_OUT),
)


@cache
def _built(model: Model, dtype: DtypeName) -> Built:
    return model.build(DTYPES[dtype])


@dataclass(frozen=True)
class Program:
    """One program: a model for one dtype, forward or as a train step. Nothing is built before `make`."""

    model: Model
    dtype: DtypeName
    variant: Variant

    @property
    def id(self) -> str:
        return f"{self.model.id}-{self.dtype}-{self.variant}"

    @property
    def truth(self) -> Truth:
        return truth(self.model.config, self.variant)

    @property
    def built(self) -> Built:
        return _built(self.model, self.dtype)

    def make(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function and its arguments, as shapes and dtypes; it takes arrays of these (`arrays`) as well."""
        return train_step(self.built) if self.variant == "train" else (self.built.forward, self.built.args)

    def arrays(self, seed: int = 0) -> tuple[Any, ...]:
        """Arrays to call the function with; the optimizer's state is that of the first step."""
        args = concrete(self.make()[1], seed)
        return (args[0], initial_state(self.built, args[0]), *args[2:]) if self.variant == "train" else args


def programs(models: Iterable[Model] = MODELS) -> Iterator[Program]:
    """Every model in each dtype, forward and as a train step."""
    for model in models:
        for dtype in DTYPES:
            for variant in VARIANTS:
                yield Program(model, dtype, variant)  # type: ignore[arg-type]
