"""How long what was found best stands: comparing takes time, too, and requests come and go all the while."""

from __future__ import annotations

from dataclasses import dataclass, field

from titan.adaptive.host_time import SecondsByCount
from titan.adaptive.load import Load

DWELL = 8
"""Most steps for which an optimum stands if there are as many requests and rows; more where comparing takes long, but no more than
there are drafts that it goes by, of which older ones count less: in the end, 14."""

OFF_DWELL = 32, 256
"""Least and most steps for which it stands that nothing is drafted."""

COMPARE_SHARE = 0.0025
"""Share of the time that looking at that again may take, in between."""

STEADY = 3 / 4
"""Share of the requests, and of the rows, of which it was found that nothing is drafted, that are enough for that to stand."""


@dataclass(slots=True)
class Standing:
    """How much has changed since settings were compared."""

    num_left: int = 0  # steps for which the outcome stands
    _drafts: bool = False  # what came out
    _size: tuple[int, int] = (0, 0)  # requests and rows of that load
    _num_new: int = 0  # requests since
    _may_new_draft: bool = True  # whether it may pay for new requests, although not for those
    _comparing: SecondsByCount = field(default_factory=SecondsByCount)  # by the number of requests

    def begin(self, num_requests: int, num_rows: int, num_new: int) -> bool:
        """Return whether the outcome stands for a step, too; see `Controller.rest`."""
        n, rows = self._size
        self._num_new += num_new
        if self._drafts:
            is_alike = num_requests == n and num_rows.bit_length() == rows.bit_length() and not self._num_new
        else:  # more requests and rows only make drafts dearer
            are_new_few = not self._may_new_draft or self._num_new <= (1 - STEADY) * n
            is_alike = num_new > 0 or (are_new_few and num_requests >= STEADY * n and num_rows >= STEADY * rows)
        return is_alike and self.num_left > 0

    def renew(self, load: Load, drafts: bool, may_new_draft: bool, num_drafts: float, plain_seconds: float) -> None:
        """Begin anew.

        Args:
            load: that settings were compared for.
            drafts: whether any of its requests drafts.
            may_new_draft: whether it may pay for a new one, although not for those.
            num_drafts: that the outcome goes by.
            plain_seconds: of a step without drafts.
        """
        self._drafts, self._size, self._num_new = drafts, (len(load.candidates), load.num_lasting), 0
        self._may_new_draft = may_new_draft
        worth_it = int(self._comparing.predict(len(load.candidates)) / (COMPARE_SHARE * plain_seconds))
        least, most = (DWELL, int(num_drafts)) if drafts else OFF_DWELL
        self.num_left = min(most, max(least, worth_it))

    def note_comparison(self, seconds: float) -> None:
        """Learn how long the last comparison took."""
        self._comparing.note(self._size[0], seconds)
