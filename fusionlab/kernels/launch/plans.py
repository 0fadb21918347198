"""Launch plans: the launches of a custom call, as plain data whose text is its name.

A plan is a frozen record of everything that is launched except addresses. Its name is its own content, as canonical JSON, so two
equal plans have one name in every process, and a process that meets a name in an executable it did not compile itself (from JAX's
persistent compilation cache, or deserialised) rebuilds the plan from the name alone.

Costly parts (a loaded module, a library handle, an algorithm) are made once per plan and device by `Plan.prepare`, and
kept by a `PlanBook`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

from ...errors import BackendError
from .steps import Prepared

_KINDS: dict[str, Callable[[Mapping[str, Any]], LaunchPlan]] = {}


class LaunchPlan(Protocol):
    """The launches of a custom call. A frozen, hashable record.

    Attributes:
      kind: the name its class is registered under by `plan_kind`.
    """

    kind: ClassVar[str]

    def spec(self) -> dict[str, Any]:
        """Its content as JSON data, which the reader given to `plan_kind` reads back."""
        ...

    def prepare(self, device: int) -> Prepared:
        """Prepares the plan for launching on that device (its ordinal; it is current). Never called while a graph is captured."""
        ...


def plan_kind(name: str, read: Callable[[Mapping[str, Any]], LaunchPlan]) -> None:
    """Registers how plans of a kind are read back from their content, in which lists have become tuples.

    Called where the kind is defined, at import.

    Raises:
      ValueError: another reader has that name.
    """
    if _KINDS.setdefault(name, read) is not read:
        raise ValueError(f"plan kind {name!r} is registered already; choose another name")


def plan_name(plan: LaunchPlan) -> str:
    """The plan's content as canonical JSON."""
    return json.dumps({"kind": plan.kind, **plan.spec()}, sort_keys=True, separators=(",", ":"))


def launch_plan_of(name: str) -> LaunchPlan:
    """The plan of that name.

    Raises:
      BackendError: this process cannot read it; quotes the name.
    """
    try:
        content = _with_tuples(json.loads(name))
        read = _KINDS[content.pop("kind")]
        return read(content)
    except (ValueError, LookupError, TypeError, AttributeError) as e:
        known = ", ".join(sorted(_KINDS)) or "none"
        raise BackendError(
            f"unknown launch plan {name!r} ({type(e).__name__}: {e}); this process knows the kinds {known}: the executable was compiled "
            f"by another version of FusionLab, or with a module that is not imported here; compile it again"
        ) from e


def _with_tuples(content: Any) -> Any:
    """JSON data with tuples for lists, as a record that can be hashed has them."""
    if isinstance(content, list):
        return tuple(map(_with_tuples, content))
    return {key: _with_tuples(value) for key, value in content.items()} if isinstance(content, dict) else content


@dataclass
class PlanCounters:
    """How often a plan was found ready (`hits`), was prepared (`misses`), or could not be (`failures`)."""

    hits: int = 0
    misses: int = 0
    failures: int = 0


class PlanBook:
    """The plans prepared in this process, by name and device. Safe to use from several threads."""

    def __init__(self) -> None:
        self._prepared: dict[tuple[bytes, int], Prepared] = {}
        self._lock = threading.Lock()
        self._counters = PlanCounters()
        self._launches = 0

    def ready(self, name: bytes, device: int) -> Prepared | None:
        """The prepared plan on the device, or None if it has not been prepared. No lock: this is the hot path."""
        self._launches += 1
        return self._prepared.get((name, device))

    def prepare(self, name: bytes, device: int) -> Prepared:
        """The same, prepared now if it was not. The device must be current.

        Raises:
          BackendError: nobody knows that plan. Whatever `Plan.prepare` raises.
        """
        with self._lock:
            found = self._prepared.get((name, device))
            if found is not None:
                self._counters.hits += 1
                return found
            try:
                found = launch_plan_of(name.decode(errors="backslashreplace")).prepare(device)
            except BaseException:
                self._counters.failures += 1
                raise
            self._prepared[name, device] = found
            self._counters.misses += 1
            return found

    def counters(self) -> dict[str, int]:
        """Hits, misses and failures so far, how many plans are held, and how often one was launched from Python: about, if by several
        threads at once, and not counting what a captured graph replays."""
        with self._lock:
            return {**asdict(self._counters), "held": len(self._prepared), "launches": self._launches}
