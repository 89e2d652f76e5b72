"""How long what was found best stands: comparing takes time, too, and requests come and go all the while."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from titan.adaptive.host_time import SecondsByCount
from titan.adaptive.load import Load

DWELL = 8
"""Steps for which an optimum stands that drafts, if as many requests and rows stay; fewer where it goes by fewer drafts."""

LONGEST_DWELL = 128
"""Most steps where comparing takes long: each time that it comes out alike, twice as many are allowed as before."""

LONGER_DWELL = 16
"""The same where some requests do not draft: one of them may be worth a probe."""

ALIKE = 1 / 3
"""Share of the nodes by which outcomes that are alike may differ."""

LACK = 2.0
"""Steps' worth of what drafts used to bring, and tokens besides, that they may bring less than half of that before it stands no
longer: a cumulative sum, Page, "Continuous inspection schemes", 1954."""

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
    _num_nodes: int = 0  # that came out, of all requests
    _dwell: int = DWELL  # steps that it may stand for
    _usual: float = 0.0  # tokens that the drafts of a step brought when it stood before; 0: it did not
    _brought: float = 0  # by drafts in steps as planned since settings were compared
    _num_brought: int = 0  # such steps
    _lack: float = 0.0  # tokens that these brought less than half of what is usual, since they last brought more
    _size: tuple[int, int] = (0, 0)  # requests and rows of that load
    _num_new: int = 0  # requests since
    _comparing: SecondsByCount = field(default_factory=SecondsByCount)  # by the number of requests

    def begin(self, num_requests: int, num_rows: int, num_new: int) -> bool:
        """Return whether the outcome stands for a step, too; see `Controller.rest`."""
        n, rows = self._size
        self._num_new += num_new
        if self._num_nodes:
            is_alike = num_requests == n and num_rows.bit_length() == rows.bit_length() and not self._num_new
        else:  # more requests and rows only make drafts more expensive
            are_new_few = self._num_new <= (1 - STEADY) * n
            is_alike = num_new > 0 or (are_new_few and num_requests >= STEADY * n and num_rows >= STEADY * rows)
        return is_alike and self.num_left > 0

    def pass_steps(self, num_steps: int) -> None:
        """Count steps for which the outcome stood."""
        self.num_left -= num_steps

    def end(self) -> None:
        """Let the outcome stand no longer."""
        self.num_left = 0

    def note_drafts(self, num_accepted: float) -> bool:
        """Add what drafts brought in a step as planned. If it is much less than it was, the outcome stands no longer.

        Returns:
            Whether that is so.
        """
        self._brought += num_accepted
        self._num_brought += 1
        if self._usual:
            self._lack = max(0.0, self._lack + self._usual / 2 - num_accepted)
            if self._lack > LACK * (1 + self._usual):
                self.num_left, self._dwell = 0, DWELL // 2
                return True
        return False

    def renew(self, load: Load, planned: Sequence[int], num_drafts: float, plain_seconds: float) -> None:
        """Begin anew.

        Args:
            load: that settings were compared for.
            planned: nodes that each of its requests drafts.
            num_drafts: that the outcome goes by.
            plain_seconds: of a step without drafts.
        """
        num_nodes, size = sum(planned), (len(planned), load.num_lasting)
        is_alike = num_nodes > 0 and abs(num_nodes - self._num_nodes) <= ALIKE * num_nodes and size[0] == self._size[0]
        self._dwell = min(2 * self._dwell, LONGEST_DWELL if all(planned) else LONGER_DWELL) if is_alike else DWELL
        self._usual = self._brought / self._num_brought if is_alike and self._num_brought else 0.0
        self._brought, self._num_brought, self._lack = 0, 0, 0.0
        self._num_nodes, self._size, self._num_new = num_nodes, size, 0
        worth_it = int(self._comparing.predict(size[0]) / (COMPARE_SHARE * plain_seconds))
        least, most = (DWELL, self._dwell if num_drafts >= DWELL else int(num_drafts)) if num_nodes else OFF_DWELL
        self.num_left = min(most, max(least, worth_it))

    def note_comparison(self, seconds: float) -> None:
        """Learn how long the last comparison took."""
        self._comparing.note(self._size[0], seconds)
