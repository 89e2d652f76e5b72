"""The sampling options of several requests side by side, as back ends read them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from titan.core.arrays import Ints
from titan.core.sampling_params import SamplingParams


@dataclass(frozen=True, eq=False)
class SamplingRows:
    """Options of n rows; arrays are [n]."""

    temperature: NDArray[np.float32]  # 0 = greedy
    top_k: Ints  # <= 0: all
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seeds: NDArray[np.uint64]
    positions: Ints  # absolute position of the token to be sampled
    has_cuts: bool  # whether any row leaves tokens out by top-k, top-p or min-p, or one of those that these were taken from

    @classmethod
    def of(cls, rows: Iterable[tuple[SamplingParams, int, int]]) -> SamplingRows:
        """From parameters, seed and position of each row."""
        params, seeds, positions = zip(*rows, strict=True)
        return cls(
            np.array([each.temperature for each in params], np.float32),
            np.array([each.top_k for each in params], np.int64),
            np.array([each.top_p for each in params], np.float32),
            np.array([each.min_p for each in params], np.float32),
            np.array(seeds, np.uint64),
            np.array(positions, np.int64),
            any(each.has_cuts for each in params),
        )

    def take(self, index: Ints) -> SamplingRows:
        """The rows of that index."""
        options = self.temperature[index], self.top_k[index], self.top_p[index], self.min_p[index]
        return SamplingRows(*options, self.seeds[index], self.positions[index], self.has_cuts)

    def repeat(self, counts: Ints) -> SamplingRows:
        """Each row as often as its count says."""
        return self.take(np.repeat(np.arange(len(counts)), counts))

    @cached_property
    def is_greedy(self) -> bool:
        """Whether every row takes the most likely token."""
        return not self.temperature.any()
