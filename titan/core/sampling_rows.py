"""The sampling options of several requests side by side, as back ends read them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.core.arrays import Ints
from titan.core.sampling_params import SamplingParams

_FIELDS = np.dtype([("temperature", "f4"), ("top_k", "i8"), ("top_p", "f4"), ("min_p", "f4"), ("seeds", "u8"), ("positions", "i8")])


@dataclass(frozen=True, eq=False)
class SamplingRows:
    """Options of n rows; arrays are [n]."""

    temperature: NDArray[np.float32]  # 0 = greedy
    top_k: Ints  # <= 0: all
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seeds: NDArray[np.uint64]
    positions: Ints  # absolute position of the token to be sampled

    @classmethod
    def of(cls, rows: Iterable[tuple[SamplingParams, int, int]]) -> SamplingRows:
        """From parameters, seed and position of each row."""
        options = np.array([(p.temperature, p.top_k, p.top_p, p.min_p, seed, position) for p, seed, position in rows], _FIELDS)
        columns: list[Any] = [np.ascontiguousarray(options[name]) for name in _FIELDS.names or ()]
        return cls(*columns)

    def take(self, index: Ints) -> SamplingRows:
        """The rows of that index."""
        options = self.temperature[index], self.top_k[index], self.top_p[index], self.min_p[index]
        return SamplingRows(*options, self.seeds[index], self.positions[index])

    def repeat(self, counts: Ints) -> SamplingRows:
        """Each row as often as its count says."""
        return self.take(np.repeat(np.arange(len(counts)), counts))

    @cached_property
    def has_cuts(self) -> bool:
        """Whether any row leaves tokens out by top-k, top-p or min-p."""
        return bool(((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)).any())

    @cached_property
    def is_greedy(self) -> bool:
        """Whether every row takes the most likely token."""
        return not self.temperature.any()
