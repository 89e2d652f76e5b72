"""Sampling options of several requests in one array, as back ends read them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from titan.core.arrays import Flags, Ints
from titan.core.sampling_params import SamplingParams

OPTIONS = np.dtype(
    [
        ("temperature", "f4"),  # 0 = greedy
        ("top_p", "f4"),
        ("min_p", "f4"),
        ("top_k", "i8"),  # <= 0: all
        ("seed", "u8"),
        ("position", "i8"),  # absolute position of the token to be sampled
    ],
    align=True,
)
"""Dtype of the options of one row."""


def options_of(params: SamplingParams, seed: int, position: int) -> tuple[float, float, float, int, int, int]:
    """Return a row of `OPTIONS`."""
    return params.temperature, params.top_p, params.min_p, params.top_k, seed, position


@dataclass(frozen=True, eq=False)
class SamplingRows:
    """Sampling options of n rows."""

    options: NDArray[Any]  # [n] of OPTIONS

    @classmethod
    def of(cls, rows: Iterable[tuple[SamplingParams, int, int]]) -> SamplingRows:
        """Build the rows from the parameters, seed and position of each; if all are greedy, nothing else is said of them."""
        rows = list(rows)
        if not any(params.temperature for params, _, _ in rows):
            return cls._greedy(len(rows))
        return cls(np.array([options_of(*each) for each in rows], OPTIONS))

    @classmethod
    @lru_cache(maxsize=1024)
    def _greedy(cls, num_rows: int) -> SamplingRows:
        return cls(np.zeros(num_rows, OPTIONS))

    def take(self, index: Ints) -> SamplingRows:
        return SamplingRows(self.options[index])

    def repeat(self, counts: Ints) -> SamplingRows:
        """Repeat each row as often as its count says."""
        return self.take(np.repeat(np.arange(len(counts)), counts))

    def shifted(self, offset: int) -> SamplingRows:
        """Return the rows with ``offset`` added to their positions."""
        options = self.options.copy()
        options["position"] += offset
        return SamplingRows(options)

    def is_cut(self, vocab_size: int) -> Flags:
        """Return which rows top-k, top-p or min-p may remove tokens from, [n]; greedy ones keep one in any case."""
        temperature, top_k, top_p, min_p = (self.options[name] for name in ("temperature", "top_k", "top_p", "min_p"))
        return (temperature > 0) & (((top_k > 0) & (top_k < vocab_size)) | (top_p < 1) | (min_p > 0))

    @property
    def is_greedy(self) -> bool:
        """Whether every row takes the most likely token."""
        return not self.options["temperature"].any()
