"""The choice of a call's implementation: by measurements of this very call, or a rule.

`fuse` never measures. A call is looked up in the user's plan file (written by `fusionlab.tune`), then in the table shipped for the
architecture (`tables/sm_90.json`, a plan file to which `python -m benchmarks table` adds); then the nearest call of the same kind that was
measured decides, then the op's rule. Of a plan file only the sets of this very card are used: those of this process's driver and libraries
before others, which are stale. Of a table also those of other cards with the same chip.

Where several processes run one program they must compile the same code, so that plan files of their own cannot decide: until they all have
called `Choices.share`, which gives them process 0's, only the tables do. A look-up is never a collective: one process may look alone.
"""

from __future__ import annotations

import functools
import json
import math
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ...device import Device
from ...errors import ArgumentError
from ...processes import from_process_0
from ..launch.disk import warn_once
from .plan_files import FORMAT as FORMAT
from .plan_files import Choice as Choice
from .plan_files import Measured as Measured
from .plan_files import PlanFileError, Sets, has_its_chip, is_of, parse, read_sets, staleness, union
from .plan_files import case_text as case_text
from .plan_files import merge as merge
from .plan_files import plan_file as plan_file
from .plan_files import read_plan_file as read_plan_file
from .plan_files import write as write

NEAR_GAIN = (
    0.1  # of XLA's time, where XLA would run a product as well: a gain of less at other sizes says nothing of these
)
TABLES = Path(__file__).parent / "tables"
NO_TABLES = (
    "FUSIONLAB_TABLES"  # the variable that hides what is shipped, by the value "none": as on a card without a table
)


@dataclass
class Choices:
    """The plan file and the tables, read when first asked and again when the plan file changes.

    Attributes:
      path: the plan file; None takes `plan_file()`, asked each time.
      trial: algorithms that `tune` is just trying, before all others.
      hits, misses: how often a call was found, and was not.
    """

    path: Path | None = None
    trial: dict[str, tuple[str, int]] = field(default_factory=dict)
    hits: int = 0
    misses: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _read: tuple[Any, Sets] = field(default=(None, {}), repr=False)
    _tables: dict[tuple[str, str], Measured] = field(default_factory=dict, repr=False)
    _shared: Sets | None = field(default=None, repr=False)
    _applying: dict[Device, Measured] = field(default_factory=dict, repr=False)

    def share(self) -> None:
        """Makes all processes of one program use process 0's plan file, as it is now, from here on.

        It is a collective: every process must call it, at the same point among its other collectives and outside of `jax.jit`.
        With one process there is nothing to share.

        Raises:
          ArgumentError: process 0's file exists and is not a plan file; raised in all processes. ProcessError: another process has
            ended.
        """
        if jax.process_count() > 1:
            shared = _from_process_0(self.path or plan_file())
            with self._lock:
                self._shared = shared

    @property
    def unshared(self) -> str:
        """Advice for one of several processes that do not share a plan file yet, so that none decides; else ""."""
        if jax.process_count() == 1 or self._shared is not None:
            return ""
        return "with several processes a plan file decides once all of them have called fusionlab.share_plan()"

    def lookup(self, device: Device | str, text: str) -> Choice | None:
        """The measurement of a call on a device ("sm_90": any of that architecture)."""
        if not device:
            return None
        with self._lock:
            found = self._known(Device.of(device)).cases.get(text)
            self.hits, self.misses = self.hits + (found is not None), self.misses + (found is None)
        return self._noted(found)

    def nearest(
        self, device: Device | str, text: str, sizes: tuple[str, ...], within: float = 4.0, gain: float = 0.0
    ) -> Choice | None:
        """The measurement of the nearest call that differs only in `sizes`, each by at most the factor `within`; distance is the
        sum of the logarithms of the factors. Sizes that are a multiple of 8 and sizes that are not are never compared: kernels
        differ there. One that saves less than `gain` of XLA's time is not evidence for other sizes.
        """
        kind, asked = _parts(text, sizes)
        with self._lock:
            known = self._known(Device.of(device)).cases
        near: list[tuple[float, tuple[int, ...], Choice]] = []
        for other, choice in known.items():
            its_kind, content = _parts(other, sizes)
            if its_kind == kind:
                near.append((_distance(list(zip(asked, content, strict=True)), within), content, choice))
        if not near:
            return None
        distance, found, best = min(near, key=lambda one: one[0])
        if distance == math.inf or best.gain < gain:
            return None
        shape = " x ".join(map(str, found))
        return self._noted(replace(best, source=f"{best.source}, at {shape}, the nearest measured"))

    def algorithm(self, device: Device | str, plan: str) -> tuple[str, int] | None:
        """The algorithm found best for a cuBLASLt plan (by name), and the version of the library that named it."""
        with self._lock:
            return self.trial.get(plan) or self._known(Device.of(device)).algorithms.get(plan)

    def measured_on(self, device: Device | str, archs: Iterable[str]) -> bool:
        """Whether a rule made of measurements on these architectures holds on a device: not on another one, nor without tables."""
        return Device.of(device).arch in archs and not _hidden()

    def ops_measured(self, device: Device) -> frozenset[str]:
        """The ops of which a call was measured on a device: by the shipped table, and on this process's own by the plan file."""
        with self._lock:
            known = self._table(device) if device.simulated else self._known(device)
        return frozenset(json.loads(text)["op"] for text in known.cases)

    def counters(self) -> dict[str, int]:
        with self._lock:
            return {"hits": self.hits, "misses": self.misses}

    def forget(self) -> None:
        """Reads the plan file again when next asked."""
        with self._lock:
            self._read = (None, {})

    def _known(self, device: Device) -> Measured:
        """The plan file's content before the table's."""
        return self._table(device).with_more(self._mine(device))

    def _mine(self, device: Device) -> Measured:
        if jax.process_count() > 1:
            return union(_applying(self._shared or {}, device))
        path = self.path or plan_file()
        stamp = (path, _stamp(path))
        if self._read[0] != stamp:
            self._read, self._applying = (stamp, _read_or_warn(path)), {}
        if device not in self._applying:
            if self.path or "FUSIONLAB_PLAN_FILE" in os.environ:
                _warn_of_another_card(path, self._read[1], device)
            self._applying[device] = union(_applying(self._read[1], device))
        return self._applying[device]

    def _table(self, device: Device) -> Measured:
        """What is shipped for a device, measurements of its own card before those of another with its chip."""
        if _hidden():
            return Measured()
        arch, key = device.arch, (device.arch, device.name)
        if key not in self._tables:
            sets = read_sets(TABLES / f"{arch}.json", f"the table for {arch}").get(arch, ())
            fitting = [one for one in sets if is_of(one, device) or has_its_chip(one, device)]
            self._tables[key] = union(sorted(fitting, key=lambda one: is_of(one, device)))
        return self._tables[key]

    def _noted(self, found: Choice | None) -> Choice | None:
        """A choice as it is found, which is called stale once in a process where it is."""
        if found is not None and found.stale:
            why = f"has measurements made with other versions ({found.stale}): they are used, and fusionlab.tune measures the calls again"
            warn_once(self.path or plan_file(), why)
        return found


def _hidden() -> bool:
    return os.environ.get(NO_TABLES, "") == "none"


def _applying(sets: Sets, device: Device) -> list[Measured]:
    """The sets of a card, those of this process's versions last, so that they win; the choices of the others are marked as stale."""
    found = [(staleness(one, device), one) for one in sets.get(device.arch, ()) if is_of(one, device)]
    marked = ((why, replace(one, cases={t: replace(c, stale=why) for t, c in one.cases.items()})) for why, one in found)
    return [one for _, one in sorted(marked, key=lambda item: not item[0])]


def _warn_of_another_card(path: Path, sets: Sets, device: Device) -> None:
    """Where a file that the user named has nothing for the card of this process."""
    if device.simulated or not sets or _applying(sets, device):
        return
    cards = ", ".join(f"{one.device or 'an unnamed card'} ({arch})" for arch, ones in sets.items() for one in ones)
    why = f"has measurements of {cards} and none of this card, {device} ({device.arch}): none is used; "
    warn_once(path, why + "fusionlab.tune measures here and adds to the file")


def _read_or_warn(path: Path) -> Sets:
    """A plan file as a cache: one that cannot be read must not stop a program."""
    try:
        return read_sets(path, f"plan file {path}")
    except PlanFileError as error:
        warn_once(path, f"is ignored, and the shipped tables decide: it {error.why}")
        return {}


@functools.lru_cache(maxsize=4096)  # a table's cases are gone through at each look-up
def _parts(text: str, sizes: tuple[str, ...]) -> tuple[str, tuple[int, ...]]:
    """A call without its sizes, as text; and those."""
    content = json.loads(text)
    found = tuple(int(content.pop(name, 0)) for name in sizes)
    return json.dumps(content, sort_keys=True), found


def _distance(pairs: list[tuple[int, int]], within: float) -> float:
    total = 0.0
    for a, b in pairs:
        if a == b:
            continue
        if not (a and b) or (a % 8 == 0) != (b % 8 == 0) or max(a, b) > within * min(a, b):
            return math.inf
        total += abs(math.log(a / b))
    return total


def _stamp(path: Path) -> Any:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _from_process_0(path: Path) -> Sets:
    """The plan file that process 0 reads, in every process; a collective."""
    try:
        mine = path.read_bytes() if jax.process_index() == 0 and path.is_file() else b""
    except OSError as error:
        mine = f"unreadable: {error}".encode()  # no plan file to any process: all raise, none is left waiting
    size = int(from_process_0(np.int32(len(mine)), "share_plan"))
    if not size:
        return {}
    padded = np.zeros(size, np.uint8)
    padded[: len(mine)] = np.frombuffer(mine, np.uint8)
    content = bytes(from_process_0(padded, "share_plan"))
    try:
        return parse(content.decode(), "the plan file of process 0")  # its path means nothing in the others
    except (ValueError, LookupError, TypeError, AttributeError) as e:
        raise ArgumentError(f"the plan file of process 0 cannot be read ({e}); tune again, or remove the file") from e


CHOICES = Choices()
