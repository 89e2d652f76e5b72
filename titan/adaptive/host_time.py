"""The time of the rest of a step, beyond its passes, as it was seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

RATE = 1 / 8
"""Weight of a step's host time."""

FIRST_STEPS = 2
"""Steps of a kind that were no shorter than expected, after which the time that their host takes counts as known."""

COLD_STEPS = 4
"""First steps of a kind, which find cold caches: the shortest of them counts."""

FIRST_MORE = 1 / 2
"""How much more of the host drafting is taken to need until it was seen, as a share of what as many requests need without."""

MORE_MEMORY = 8191 / 8192
"""Share of the difference from that, once it was seen, that a step without drafts leaves: what it came from may be over."""


class HostTime:
    """Seconds of a step beyond its passes: by the number of requests, and more by how many of them draft."""

    def __init__(self) -> None:
        self._plain, self._more = SecondsByCount(), SecondsByCount()

    def note(self, num_requests: int, num_drafting: int, seconds: float, num_steps: int = 1) -> None:
        """Add steps of this mean time."""
        if num_drafting:
            usual = FIRST_MORE * self._plain.predict(num_drafting)
            self._more.note(num_drafting, max(seconds - self._plain.predict(num_requests), 0.0), usual, num_steps)
        else:
            self._plain.note(num_requests, seconds, num_steps=num_steps)

    def age(self, num_steps: int) -> None:
        """Let what drafting was seen to need be believed less, after steps without drafts."""
        self._more.pull(lambda count: FIRST_MORE * self._plain.predict(count), 1 - MORE_MEMORY**num_steps)

    @property
    def has_drafted(self) -> bool:
        """Whether a step with drafts was seen."""
        return self._more.has_seen

    def knows(self, num_requests: int, num_drafting: int = 0) -> bool:
        """Whether a few such steps were seen."""
        return self._more.knows(num_drafting) if num_drafting else self._plain.knows(num_requests)

    def predict(self, num_requests: int, num_drafting: int = 0) -> float:
        """Return the expected seconds."""
        plain = self._plain.predict(num_requests)
        if not num_drafting:
            return plain
        return plain + (self._more.predict(num_drafting) if self.has_drafted else FIRST_MORE * self._plain.predict(num_drafting))


class SecondsByCount:
    """Seconds by powers of two of a count. Of the first few steps, which may have been held up by anything, the shortest counts."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._num_seen, self._num_settled = Counter[int](), Counter[int]()

    def note(self, count: int, seconds: float, usual: float = 0.0, num_steps: int = 1) -> None:
        """Add mean seconds of a count; more than twice what they were, or what is usual, was something else that held them up."""
        octave = count.bit_length()
        before = self._seconds.get(octave, seconds)
        self._num_seen[octave] += num_steps
        self._num_settled[octave] += seconds >= before
        rate = 1 - (1 - RATE) ** num_steps
        if self._num_seen[octave] <= COLD_STEPS:
            rate = float(seconds < before)
        most = 2 * max(before, usual) or seconds
        self._seconds[octave] = before + rate * (min(seconds, most) - before)

    def pull(self, target: Callable[[int], float], share: float) -> None:
        """Move what was seen towards what a function says of a count, by this share of the difference."""
        for octave, seconds in self._seconds.items():
            self._seconds[octave] += share * (target(1 << octave - 1) - seconds)

    @property
    def has_seen(self) -> bool:
        """Whether anything was added."""
        return bool(self._seconds)

    def knows(self, count: int) -> bool:
        """Whether a few of about this count were added that were no shorter than expected."""
        return self._num_settled[count.bit_length()] >= FIRST_STEPS

    def predict(self, count: int) -> float:
        """Return what was seen of the nearest power of two; half of it more or less for each one in between."""
        octave = count.bit_length()
        if octave in self._seconds or not self._seconds:
            return self._seconds.get(octave, 0.0)
        nearest = min(self._seconds, key=lambda each: abs(each - octave))
        share = 1 + abs(octave - nearest) / 2
        return self._seconds[nearest] * (share if octave > nearest else 1 / share)
