"""Steps that do as the one before them, without being decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Listener(Protocol):
    """A controller whose decisions may be repeated."""

    num_repeats: int  # next steps that may do as the last one, if they are of the same requests

    def end_rest(self, seconds: Sequence[float], target_seconds: Sequence[float]) -> None:
        """Hear of a rest and the steps that repeated it: how long each took, and its pass of the target."""


@dataclass(slots=True)
class Repeats:
    """Uses up the steps that a controller allows, and tells it of rests before the next step that is decided.

    What it allows is used up even if nothing is noted of a step, as of one that ran in parts.
    """

    controller: Listener
    is_repeat: bool = False  # whether the present step is one
    _rest_seconds: list[float] = field(default_factory=list)
    _rest_target_seconds: list[float] = field(default_factory=list)

    def begin(self, is_alike: bool) -> bool:
        """Return whether a step repeats the last decision, and need not be decided.

        Args:
            is_alike: whether it is of the same requests as the last step, with a token each.
        """
        self.is_repeat = is_alike and self.controller.num_repeats > 0
        if self.is_repeat:
            self.controller.num_repeats -= 1
        elif self._rest_seconds:
            self.controller.end_rest(self._rest_seconds, self._rest_target_seconds)
            self._rest_seconds, self._rest_target_seconds = [], []
        return self.is_repeat

    def note_rest(self, seconds: float, target_seconds: float) -> None:
        """Note a step in which the controller rests."""
        self._rest_seconds.append(seconds)
        self._rest_target_seconds.append(target_seconds)
