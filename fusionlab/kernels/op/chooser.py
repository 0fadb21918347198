"""The choice of the implementation of an op's call, with its reason: one order for all ops.

An implementation named by the caller comes first, then the measured one for the call (the plan file, then the table shipped for the
architecture), or for the nearest call of its kind; then the op's own rule. An op defines the text that identifies its calls in
tables (`case`), and the rule.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar

from ...device import Device
from ...errors import BackendError
from ..choose.choices import CHOICES, Choice, case_text
from .implementation import WHAT_XLA_RUNS, BackendVerdict, Call, ChoiceKind, Implementation, ImplementationChoice


class Chooser(abc.ABC):
    """How an op chooses among its implementations."""

    name: ClassVar[str]
    implementations: ClassVar[Mapping[str, Implementation]]
    sizes: ClassVar[tuple[str, ...]] = ()  # entries of a case in which the nearest measured call may differ
    least_gain: ClassVar[float] = 0.0  # of XLA's time: what saves less at other sizes says nothing of a call
    # What a site runs, role and attributes, by which it is left to XLA or not; none: it never is.
    at_site: ClassVar[tuple[tuple[str, Mapping[str, Any]], ...]] = ()
    # Whether the op's own form of XLA's code is slower than a site: one that is left to XLA is then a rejection, else a candidate.
    declines: ClassVar[bool] = False

    # What an op says of itself.

    @abc.abstractmethod
    def rule(self, call: Call, unable: str) -> ImplementationChoice:
        """The choice if no implementation that can run was measured; `unable`: why the measured best cannot run, or ""."""

    def case(self, role: str, shapes: Mapping[str, Any], **attrs: Any) -> str | None:
        """The text that a call is looked up by where implementations are chosen by measurement (choices.py); None where they are not."""
        return None

    def variants(self, role: str, **attrs: Any) -> tuple[dict[str, Any], ...]:
        """Settings among the attributes that are chosen together with an implementation: each a change of the attributes."""
        return ({},)

    def to_time(self, operands: dict[str, Any], **attrs: Any) -> dict[str, Any]:
        """Operands of random numbers, as a measurement of a call is to have them."""
        return operands

    def is_what_xla_runs(self, name: str, /, **attrs: Any) -> bool:
        """Whether an implementation compiles to the same code as the unfused program, so that there is nothing to time."""
        return name == "xla"

    def left(self, call: Call, decisions: Sequence[ImplementationChoice]) -> ImplementationChoice | None:
        """Why a site is left to XLA of which these are the decisions (`at_site`): the first that leaves it; None where
        none does. `call` is the site's, without its residuals."""
        return next((decision for decision in decisions if decision.kind.leaves_it_to_xla), None)

    @abc.abstractmethod
    def _prepared(
        self, operands: Sequence[Any], attrs: Mapping[str, Any], device: Device | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Operands by name and attributes, as the primitives take them."""

    # What follows.

    def measured(self, call: Call) -> Choice | None:
        """The measurement for a call on that device, or for one near it, if there is one."""
        if call.device.platform != "cuda" or not call.device.arch:
            return None
        text = self.case(call.role, call.shapes, **call.attrs)
        if text is None:
            return None
        return CHOICES.lookup(call.device, text) or CHOICES.nearest(call.device, text, self.sizes, gain=self.least_gain)

    def decide(self, role: str, shapes: Mapping[str, Any], device: Device, **attrs: Any) -> ImplementationChoice:
        """The implementation that runs in a role ("call", "tangent", "cotangent") when none is named.

        `shapes` are those of the primitive's operands, by name; `attrs` its parameters.
        """
        call, unable = Call(role, shapes, device, attrs), ""
        if _TO_MEASURE.get():
            return self._to_measure(call)
        found = self.measured(call)
        if found is not None:
            refusal = (
                self.refusal(found.implementation, call) if found.implementation in self.implementations else _UNKNOWN
            )
            if refusal is None:
                return self.by_measurement(found)
            unable = f"{found.implementation!r} was fastest but cannot run this call: {refusal}"
        return self.rule(call, unable)

    def _to_measure(self, call: Call) -> ImplementationChoice:
        """Another implementation than XLA's, if one can run the call and the rule leaves the call to XLA only by measurements or for want
        of them."""
        found = self.rule(call, "")
        if found.waits or found.kind is ChoiceKind.SLOWER:
            able = (n for n in self.implementations if n != "xla" and self.refusal(n, call) is None)
            found = next((ImplementationChoice(n, ChoiceKind.CHOSEN, "to be measured") for n in able), found)
        return found

    def by_measurement(self, found: Choice) -> ImplementationChoice:
        """The choice where the call was measured."""
        kind = ChoiceKind.SLOWER if found.implementation == "xla" else ChoiceKind.CHOSEN
        return ImplementationChoice(found.implementation, kind, found.reason)

    def waits(self, *operands: Any, device: Device | str | None = None, **attrs: Any) -> bool:
        """Whether a site is XLA's on a device because what else can run it was not measured there: `fusionlab.tune` measures it."""
        device = Device.of(device)
        if device.platform != "cuda":
            return False
        if self.at_site:
            left = self.left_to_xla(*operands, device=device, **attrs)
            return left is not None and left.waits
        shapes, full = self._prepared(operands, {**attrs, "implementation": None}, device)
        return self.decide("call", shapes, device, **full).waits

    def refusal(self, name: str, call: Call) -> str | None:
        """Why an implementation cannot run a call, or None."""
        return self.implementations[name].refuses(call.shapes, call.device, **{**call.attrs, "role": call.role})

    def chosen(self, role: str, shapes: Mapping[str, Any], device: Device, attrs: Mapping[str, Any]) -> str:
        """The implementation that runs for operands and attributes as the primitives have them; raises as `choose` does."""
        name = attrs["implementation"]
        if name is None:
            return self.decide(role, shapes, device, **attrs).implementation
        if refusal := self.implementations[name].refuses(shapes, device, role=role, **attrs):
            raise BackendError(f"{self.name}: implementation {name!r} cannot run this call on {device}: {refusal}")
        return name

    def choose(
        self, *operands: Any, device: Device | str | None = None, implementation: str | None = None, **attrs: Any
    ) -> str:
        """The implementation that runs for these operands.

        Raises:
          UnknownNameError: no implementation has that name.
          BackendError: the named one cannot run this call on this device.
        """
        device = Device.of(device)
        present, full = self._prepared(operands, {**attrs, "implementation": implementation}, device)
        return self.chosen("call", present, device, full)

    def backends(
        self, *operands: Any, device: Device | str | None = None, implementation: str | None = None, **attrs: Any
    ) -> tuple[BackendVerdict, ...]:
        """Every implementation with its verdict, the reference first; none is chosen if the named one cannot run."""
        device = Device.of(device)
        shapes, full = self._prepared(operands, {**attrs, "implementation": implementation}, device)
        decision = self.decide("call", shapes, device, **full)
        chosen, why = decision.implementation, decision.reason
        if implementation:
            chosen, why = implementation, "named by the caller"
        verdicts = []
        for impl in self.implementations.values():
            if refusal := impl.refuses(shapes, device, **full):
                verdicts.append(BackendVerdict(impl.name, "unavailable", refusal))
            elif impl.name != chosen:
                verdicts.append(BackendVerdict(impl.name, "possible", impl.summary))
            elif self.is_what_xla_runs(impl.name, **full):
                reason = ": ".join(filter(None, (WHAT_XLA_RUNS, "" if implementation else why)))
                verdicts.append(BackendVerdict(impl.name, ChoiceKind.SAME_CODE.value, reason))
            else:
                verdicts.append(BackendVerdict(impl.name, ChoiceKind.CHOSEN.value, why))
        return tuple(verdicts)

    def left_to_xla(
        self, *operands: Any, device: Device | str | None = None, **attrs: Any
    ) -> ImplementationChoice | None:
        """Why a site that could become this op is not fused by default on a device: no implementation gains there, or none can run
        it. None if it is fused."""
        if not self.at_site:
            return None
        device = Device.of(device)
        shapes, full = self._prepared(operands, {**attrs, "implementation": None}, device)
        decisions = [self.decide(role, shapes, device, **full, **more) for role, more in self.at_site]
        return self.left(Call("call", shapes, device, full), decisions)


_TO_MEASURE: ContextVar[bool] = ContextVar("fusionlab_to_measure", default=False)


@contextlib.contextmanager
def all_to_measure() -> Iterator[None]:
    """Context in which whatever can run is chosen, measured or not, so that a program has all the calls that may be measured."""
    token = _TO_MEASURE.set(True)
    try:
        yield
    finally:
        _TO_MEASURE.reset(token)


def is_to_measure() -> bool:
    """Whether `all_to_measure` is on."""
    return _TO_MEASURE.get()


def exact_case(
    op: Chooser, defaults: Collection[str], role: str, shapes: Mapping[str, Any], attrs: Mapping[str, Any]
) -> str:
    """A case of all operands and of the attributes named in `defaults`, for ops whose measurements say nothing of other sizes."""
    operands = {name: [str(a.dtype), *a.shape] for name, a in shapes.items()}
    settings = {name: attrs[name] for name in defaults if name in attrs}
    content = {"operands": operands, "settings": settings, "residuals": bool(attrs.get("residuals"))}
    if role == "cotangent":
        content["wanted"] = wanted_or_all(attrs)
    return case_text(op.name, role, **json.loads(json.dumps(content, default=str)))


def wanted_or_all(attrs: Mapping[str, Any]) -> tuple[str, ...]:
    """The slots whose gradients a backward call is asked for; of a site, whose backward call is not there yet, all."""
    present = attrs["present"]
    return tuple(itertools.compress(present, attrs.get("live", [True] * len(present))))


_UNKNOWN = "this version of FusionLab has no such implementation"
