"""The one shape of what benches measure: samples of runs in rounds, and the rows that they sum up to.

Names of labels and figures are the headers of the tables, so a figure's name has its unit. What could not be measured is missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TypeVar

Label = str | int | float
NO_DRAFT = "no draft"
"""Name of the variant that the others are compared with where drafts are measured."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one variant."""

    labels: Mapping[str, Label]  # tell variants apart, such as "mode" and "at once"
    round_id: int  # variants are compared within a round
    figures: Mapping[str, float]
    details: Mapping[str, Sequence[float]] = field(default_factory=dict)  # by name, a number per request


SampleT = TypeVar("SampleT", bound=Sample)
VariantT = TypeVar("VariantT")


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range over rounds.

    A format spec is that of the median; "±" before it adds half the range in per cent, "[" adds the range, neither of a single
    round; "x" after it is printed.
    """

    median: float
    minimum: float
    maximum: float
    num_rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Sum up the values of the rounds, at least one."""
        return cls(median(values), min(values), max(values), len(values))

    def __format__(self, spec: str) -> str:
        is_single = self.num_rounds == 1 and self.minimum == self.maximum  # not an interval
        if spec.startswith("[") and not is_single:
            return "{0:{3}} [{1:{3}}, {2:{3}}]".format(self.median, self.minimum, self.maximum, spec[1:])
        text = format(self.median, spec.lstrip("±[").removesuffix("x")) + ("x" if spec.endswith("x") else "")
        if not spec.startswith("±") or is_single or not self.median:
            return text
        return f"{text} ±{50 * (self.maximum - self.minimum) / abs(self.median):.0f} %"


@dataclass(frozen=True, slots=True)
class Row:
    """All runs of one variant."""

    labels: Mapping[str, Label]
    figures: Mapping[str, Spread]

    def median(self, figure: str) -> float | None:
        """The median of a figure over the rounds that have it; ``None`` if there are none."""
        return self.figures[figure].median if figure in self.figures else None


def make_rows(samples: Iterable[Sample]) -> list[Row]:
    """Sum samples up: a row per variant, in the order in which they first came."""
    rows = []
    for group in group_samples(samples):
        figures = dict.fromkeys(name for sample in group for name in sample.figures)
        spreads = {name: Spread.of([each.figures[name] for each in group if name in each.figures]) for name in figures}
        rows.append(Row(group[0].labels, spreads))
    return rows


def group_samples(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Samples by variant, in the order in which variants first came."""
    groups: dict[frozenset[tuple[str, Label]], list[Sample]] = {}
    for sample in samples:
        groups.setdefault(frozenset(sample.labels.items()), []).append(sample)
    return list(groups.values())


def rotated(variants: Iterable[VariantT], round_id: int) -> list[VariantT]:
    """Variants in the order of their turns in a round, so that no one is always the first, nor always after the same one.

    Each round begins with the next; when all have begun, the order is turned round.
    """
    order = deque(variants)
    order.rotate(-round_id)
    return [*reversed(order)] if order and round_id // len(order) % 2 else [*order]


def with_ratio(samples: Sequence[SampleT], name: str, figure: str, **baseline: Label) -> list[SampleT]:
    """Add the ratio of a figure to that of another variant in the same round.

    Args:
        samples: of all variants.
        name: of the ratio.
        figure: that is divided.
        baseline: the labels by which the other variant differs; it has no ratio to itself.
    """

    def place(sample: Sample, **changes: Label) -> tuple[object, int]:
        return frozenset({**sample.labels, **changes}.items()), sample.round_id

    known = {place(each): each.figures[figure] for each in samples if figure in each.figures}
    found = []
    for each in samples:
        other = known.get(place(each, **baseline)) if place(each, **baseline) != place(each) else None
        ratios = {name: each.figures[figure] / other} if other and figure in each.figures else {}
        found.append(replace(each, figures={**each.figures, **ratios}))
    return found
