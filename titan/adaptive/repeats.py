"""Steps that do as the one before them, without being decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Listener(Protocol):
    """A controller whose decisions may be repeated."""

    num_repeats: int  # next steps that may do as the last one, if they are of the same requests

    def repeat_rest(self, num_steps: int, seconds: float) -> None:
        """Hear of steps like the last rest, and how long they took in all."""


@dataclass(slots=True)
class Repeats:
    """Uses up the steps that a controller allows, and tells it of them before the next one is decided.

    What it allows is used up even if nothing is noted of a step, as of one that ran in parts.
    """

    controller: Listener
    is_repeat: bool = False  # whether the present step is one
    _num_rested: int = 0
    _rest_seconds: float = 0.0  # of these steps

    def begin(self, is_alike: bool) -> bool:
        """Return whether a step repeats the last decision, and need not be decided.

        Args:
            is_alike: whether it is of the same requests as the last step, with a token each.
        """
        self.is_repeat = is_alike and self.controller.num_repeats > 0
        if self.is_repeat:
            self.controller.num_repeats -= 1
        elif self._num_rested:
            self.controller.repeat_rest(self._num_rested, self._rest_seconds)
            self._num_rested, self._rest_seconds = 0, 0.0
        return self.is_repeat

    def note_rest(self, seconds: float) -> None:
        """Note a repeated step in which the controller rests."""
        self._num_rested += 1
        self._rest_seconds += seconds
