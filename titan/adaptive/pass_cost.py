"""The time of passes, as a function of their rows and context: measured once, then followed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, log, log2, sqrt

MAX_DEVIATIONS = 3.0
"""Observations further away than this many deviations count as if they were no further."""

DEVIATION, DEVIATION_RATE = 0.05, 1 / 16
"""Least deviation, as a share, that passes are expected to have from what is expected; and the weight of an observed one."""

NUM_OCTAVES = 24
"""Powers of two of rows whose times are followed; more rows are taken for as many."""

PACE_VARIANCE, PACE_DRIFT = 0.04, 5e-5
"""Variance of the logarithm of the machine's pace after a measurement, and what a pass adds to it."""

MOST_DRIFTING = 16
"""Most passes without drafts, of which one mean is known, that each add to what is uncertain: they are many, and much alike."""

TREND_RATE, TREND_DRIFT = 1 / 4, 1 / 8
"""Weight of a surprise in the trend of surprises, and the share of that trend's square that a pass adds to the pace's variance."""

SHAPE_VARIANCE, SHAPE_DRIFT = 0.02, 2e-6
"""The variance of a curve's error at one power of two of rows, and what a pass adds to it."""

WARM_VARIANCE = 0.04
"""Variance of the logarithm of what passes take where no step drafts, as a multiple of what they take between drafts."""

FOLLOWED = 0.8
"""How much of a change of one model's pace that of another is expected to share while it does not run."""

SHAPE_MEMORY = 1023 / 1024
"""Share of a curve's error that a pass leaves, of whatever kind: what held some passes up may be over, and not be seen to be."""


@dataclass(slots=True)
class Belief:
    """A logarithm of a factor, and its variance."""

    value: float
    variance: float

    def learn(self, surprise: float, total: float, drift: float) -> None:
        """Take its share of a surprise, whose variance is ``total``."""
        gain = self.variance / total
        self.value += gain * surprise
        self.variance = (1 - gain) * self.variance + drift


class PassCost:
    """Seconds of a model's passes.

    The curve over rows is linear between measured sizes, never falls, and goes on as between the last two, or as it rises on
    average, if that is more. What passes take compared with the curve is followed, as a sum of logarithms: a pace, and an error of
    the curve for each power of two of rows, which is interpolated between them, and, in steps without drafts, what warm caches
    spare. An observation moves these as far as they are uncertain (Kalman, "A new approach to linear filtering and prediction
    problems", 1960, without covariances), so that the machine's moods change all times alike. Context costs the same for each
    token whose KV is read.

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
        self._pace = Belief(0.0, PACE_VARIANCE)
        self._shapes = [Belief(0.0, SHAPE_VARIANCE) for _ in range(NUM_OCTAVES)]
        self._warmth = Belief(0.0, WARM_VARIANCE)
        self._deviation, self._trend = DEVIATION, 0.0

    def predict(self, num_rows: float, num_context_tokens: float, *, is_warm: bool = False) -> float:
        """Return the seconds of a pass.

        Args:
            num_rows: query tokens of all requests, at least 1.
            num_context_tokens: tokens before them, of all requests.
            is_warm: whether the steps before it had no drafts.
        """
        octave = min(log2(num_rows), NUM_OCTAVES - 1.5)
        low = int(octave)
        share = octave - low
        shape = (1 - share) * self._shapes[low].value + share * self._shapes[low + 1].value
        factor = exp(self._pace.value + shape + (self._warmth.value if is_warm else 0.0))
        return factor * (self._curve(num_rows) + self.seconds_per_context_token * num_context_tokens)

    @property
    def pace(self) -> float:
        """Logarithm of the time that passes take, as a multiple of what the curve says."""
        return self._pace.value

    def follow(self, change: float, pace: float, num_steps: int) -> None:
        """Go by another model's passes in steps without a pass of this one.

        Args:
            change: of the other model's pace, which mostly is the machine's.
            pace: of that model, which this one's is taken to be in the end.
            num_steps: without a pass.
        """
        self._pace.value += FOLLOWED * change
        self._pace.value += (1 - SHAPE_MEMORY**num_steps) * (pace - self._pace.value)
        self.age(num_steps)

    def age(self, num_steps: int) -> None:
        """Let errors of the curve be believed less, after steps without drafts of whose passes nothing is known."""
        self._age_shapes(num_steps)
        self._warmth.value *= SHAPE_MEMORY**num_steps

    def note(
        self, num_rows: float, num_context_tokens: float, seconds: float, num_steps: int = 1, *, is_warm: bool = False
    ) -> float:
        """Add the time of a pass.

        Args:
            num_rows: query tokens of all requests, at least 1.
            num_context_tokens: tokens before them, of all requests.
            seconds: that it took.
            num_steps: whose mean pass it is: what it says may have changed as much as in so many.
            is_warm: whether the steps before it had no drafts.

        Returns:
            By how much the logarithm of the pace has changed.
        """
        shape, warmth = self._shapes[round(min(log2(num_rows), NUM_OCTAVES - 1))], self._warmth
        expected = self._curve(num_rows) + self.seconds_per_context_token * num_context_tokens
        surprise = log(seconds / expected) - shape.value - self._pace.value
        total = shape.variance + self._pace.variance + self._deviation**2
        if is_warm:
            surprise, total = surprise - warmth.value, total + warmth.variance
        reach = MAX_DEVIATIONS * sqrt(total)
        surprise = min(max(surprise, -reach), reach)
        self._deviation = max(DEVIATION, self._deviation + DEVIATION_RATE * (abs(surprise) - self._deviation))
        self._trend += TREND_RATE * (surprise - self._trend)
        trend, num_drifting = TREND_DRIFT * self._trend**2, min(num_steps, MOST_DRIFTING) if is_warm else num_steps
        shape.learn(surprise, total, num_drifting * (SHAPE_DRIFT + trend / 4))
        self._age_shapes(num_steps)
        if is_warm:
            warmth.learn(surprise, total, num_drifting * PACE_DRIFT)
            warmth.value = min(SHAPE_MEMORY**num_steps * warmth.value, 0.0)
        before = self._pace.value
        self._pace.learn(surprise, total, num_drifting * (PACE_DRIFT + trend))
        return self._pace.value - before

    def _age_shapes(self, num_steps: int) -> None:
        memory = SHAPE_MEMORY**num_steps
        for each in self._shapes:
            each.value *= memory

    def _curve(self, num_rows: float) -> float:
        sizes, seconds = self.sizes, self.seconds
        if len(sizes) == 1:
            return seconds[0] * max(1.0, num_rows / sizes[0])
        last = bisect_left(sizes, num_rows)
        if self.is_padded and last < len(sizes):
            return seconds[last]
        if last == len(sizes):
            slope = max((seconds[-1] - seconds[i]) / (sizes[-1] - sizes[i]) for i in (0, -2))
            return seconds[-1] + slope * (num_rows - sizes[-1])
        last = max(last, 1)
        share = (num_rows - sizes[last - 1]) / (sizes[last] - sizes[last - 1])
        return seconds[last - 1] + max(share, 0.0) * (seconds[last] - seconds[last - 1])
