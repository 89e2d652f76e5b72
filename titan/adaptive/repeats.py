"""Steps that do as the one before them, of which a controller hears together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from titan.adaptive.load import Outcome


class Listener(Protocol):
    """A controller whose decisions may be repeated."""

    num_repeats: int  # next steps that may do as the last one, if they are of the same requests

    def repeat_rest(self, num_steps: int) -> None:
        """Hear of steps like the last rest."""

    def observe_repeats(self, outcomes: Sequence[Outcome]) -> None:
        """Hear of steps that drafted as the last one that was decided."""


@dataclass(slots=True)
class Repeats:
    """Counts the steps that a controller allows, and tells it of them before the next one is decided.

    What it allows is used up even if nothing is noted of a step, as of one that ran in parts.
    """

    controller: Listener
    is_repeat: bool = False  # whether the present step is one
    _num_left: int = 0
    _num_rested: int = 0
    _outcomes: list[Outcome] = field(default_factory=list)

    def begin(self, is_alike: bool) -> bool:
        """Return whether a step repeats the last decision, and need not be decided.

        Args:
            is_alike: whether it is of the same requests as the last step, with a token each.
        """
        if not (is_alike and self._num_left):
            self._tell()
            self._num_left, self.controller.num_repeats = self.controller.num_repeats if is_alike else 0, 0
        self.is_repeat = self._num_left > 0
        self._num_left -= self.is_repeat
        return self.is_repeat

    def note_rest(self) -> None:
        """Note a repeated step in which the controller rests."""
        self._num_rested += 1

    def note(self, outcome: Outcome) -> None:
        """Note a repeated step that was to draft; if it did not, the next one is decided on again."""
        self._outcomes.append(outcome)
        if not outcome.num_nodes:
            self._num_left = 0

    def _tell(self) -> None:
        if self._num_rested:
            self.controller.repeat_rest(self._num_rested)
            self._num_rested = 0
        elif self._outcomes:
            self.controller.observe_repeats(self._outcomes)
            self._outcomes = []
