"""The time of passes, as a function of their rows and context: measured once, then followed; and that of the rest of a step."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import log2

SHORTER_RATE, LONGER_RATE = 1 / 4, 1 / 8
"""Weights of a new observation that is shorter or longer than expected: anything may hold up a pass, and nothing makes it shorter."""

MAX_DEVIATIONS = 3.0
"""Observations further away than this many mean deviations count as if they were no further."""

NUM_OCTAVES = 24
"""Powers of two of rows whose times are followed."""

MIN_DEVIATION = 0.05
"""Least deviation, as a share, that observations are expected to have."""

FIRST_STEPS = 2
"""Steps of a kind after which their host's time counts as known."""


@dataclass(slots=True)
class Residual:
    """What observations of passes of similar size say: the true time as a multiple of the measured curve."""

    factor: float = 1.0
    deviation: float = MIN_DEVIATION  # mean absolute deviation of the observations from the factor, as a share of it
    num_seen: int = 0

    def note(self, ratio: float) -> None:
        """Add an observation, as a multiple of the curve."""
        self.num_seen += 1
        surprise = ratio / self.factor - 1
        rate = max(SHORTER_RATE, 1 / (self.num_seen + 1)) if surprise < 0 else LONGER_RATE
        reach = MAX_DEVIATIONS * max(self.deviation, MIN_DEVIATION)
        self.deviation += rate * (min(abs(surprise), 2 * reach) - self.deviation)
        self.factor *= 1 + rate * min(max(surprise, -reach), reach)


class PassCost:
    """Seconds of a model's passes.

    The curve over rows is linear between measured sizes, goes on as between the last two, and never falls. What passes take
    compared with the curve is followed for each power of two of rows, and interpolated between them. Context costs the same for
    each token whose KV is read.

    Args:
        sizes: numbers of rows that were measured, ascending, at least one.
        seconds: of passes of these sizes without context.
        seconds_per_context_token: of one token of context of one request.
        is_padded: passes are padded to the next of these sizes, and take the time of that; beyond the last size they are not.
    """

    def __init__(
        self, sizes: Sequence[int], seconds: Sequence[float], seconds_per_context_token: float = 0.0, *, is_padded: bool = False
    ) -> None:
        self.sizes, self.seconds = list(sizes), list(accumulate(seconds, max))
        self.seconds_per_context_token = seconds_per_context_token
        self.is_padded = is_padded
        self.residuals = [Residual() for _ in range(NUM_OCTAVES)]

    def predict(self, num_rows: float, num_context_tokens: float) -> float:
        """Return the seconds of a pass.

        Args:
            num_rows: query tokens of all requests, at least 1.
            num_context_tokens: tokens before them, of all requests.
        """
        octave = log2(num_rows)
        low = int(octave)
        share = octave - low
        factor = (1 - share) * self.residuals[low].factor + share * self.residuals[low + 1].factor
        return factor * (self._curve(num_rows) + self.seconds_per_context_token * num_context_tokens)

    def note(self, num_rows: float, num_context_tokens: float, seconds: float) -> None:
        """Add the time of a pass."""
        observed = self.residuals[round(log2(num_rows))]
        before = observed.factor
        observed.note(seconds / (self._curve(num_rows) + self.seconds_per_context_token * num_context_tokens))
        for residual in self.residuals:
            if not residual.num_seen:  # until it is seen itself, it is like the others
                residual.factor *= observed.factor / before

    def _curve(self, num_rows: float) -> float:
        sizes, seconds = self.sizes, self.seconds
        if len(sizes) == 1:
            return seconds[0] * max(1.0, num_rows / sizes[0])
        last = bisect_left(sizes, num_rows)
        if self.is_padded and last < len(sizes):
            return seconds[last]
        last = min(max(last, 1), len(sizes) - 1)
        share = (num_rows - sizes[last - 1]) / (sizes[last] - sizes[last - 1])
        return seconds[last - 1] + max(share, 0.0) * (seconds[last] - seconds[last - 1])


@dataclass(slots=True)
class HostTime:
    """Seconds of a step beyond its passes, by requests' power of two, with and without drafts."""

    seconds: dict[tuple[bool, int], float] = field(default_factory=dict)
    counts: Counter[tuple[bool, int]] = field(default_factory=Counter)

    def note(self, is_drafting: bool, num_requests: int, seconds: float) -> None:
        """Add a step."""
        key = is_drafting, num_requests.bit_length()
        before = self.seconds.get(key, seconds)
        self.counts[key] += 1
        rate = SHORTER_RATE if seconds < before else LONGER_RATE
        self.seconds[key] = before + rate * (min(seconds, 2 * before) - before)

    def knows(self, is_drafting: bool, num_requests: int) -> bool:
        """Whether a few such steps were seen."""
        return self.counts[is_drafting, num_requests.bit_length()] >= FIRST_STEPS

    def predict(self, is_drafting: bool, num_requests: int) -> float:
        """Return the expected seconds; a step without drafts takes no more than one with them."""
        octave = num_requests.bit_length()
        off, on = self.seconds.get((False, octave)), self.seconds.get((True, octave))
        if off is None or on is None:
            return off or on or 0.0
        return on if is_drafting else min(on, off)
