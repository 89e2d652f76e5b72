"""What repeated runs say: rounds in which the variants take turns, and medians with their spread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range over the rounds."""

    median: float
    minimum: float
    maximum: float
    num_rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Sum up the values of the rounds.

        Raises:
            ValueError: there are none.
        """
        if not values:
            raise ValueError("values=[] is empty: a spread needs at least one round")
        return cls(median(values), min(values), max(values), len(values))

    @property
    def half_range(self) -> float:
        """Half the range, relative to the median; 0 for a median of 0."""
        return (self.maximum - self.minimum) / 2 / abs(self.median) if self.median else 0.0

    def format(self, digits: int = 1) -> str:
        """Write median and half range, such as "81.3 ±4 %"; of a single round, which has no range, the median alone."""
        figure = f"{self.median:.{digits}f}"
        return figure if self.num_rounds == 1 else f"{figure} ±{self.half_range * 100:.0f} %"


def in_rounds(variants: Sequence[T], num_rounds: int) -> Iterator[tuple[int, T]]:
    """Yield (round, variant) so that the variants take turns: A B A B; what drifts hits them all alike."""
    for round_id in range(num_rounds):
        for variant in variants:
            yield round_id, variant


def ratio_spread(values: Mapping[int, float], baseline: Mapping[int, float]) -> Spread | None:
    """Sum up the ratios within the rounds.

    Args:
        values: a figure by round.
        baseline: that of the baseline by round, not 0.

    Returns:
        The spread of ``values[i] / baseline[i]`` over the rounds that both have; ``None`` if there are none.
    """
    ratios = [value / baseline[round_id] for round_id, value in values.items() if round_id in baseline]
    return Spread.of(ratios) if ratios else None
