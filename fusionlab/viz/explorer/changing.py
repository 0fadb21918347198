"""What is changed in an explorer by a line of Python: options of passes, and the way back and forth through the changes."""

from __future__ import annotations

from typing import Any

from .measuring import Measuring


class Changing(Measuring):
    """The part of an `Explorer` that changes what is on, beside its toggles."""

    def option(self, name: str, option: str, value: Any) -> None:
        """Sets an option of a pass, as `Strategy` takes it, and searches again.

        Raises:
          UnknownNameError: no such pass or option. ArgumentError: the value is none of its choices.
        """
        with self._aside("searching again"):
            self.session.option(name, option, value)

    def undo(self) -> bool:
        """Takes the last change of sites or options back; False where there is none."""
        return self.session.undo()

    def redo(self) -> bool:
        """Makes the change again that `undo` took back last; False where there is none, or another change was made since."""
        return self.session.redo()

    def reset(self) -> bool:
        """Goes back to what was on when it was opened."""
        return self.session.reset()
