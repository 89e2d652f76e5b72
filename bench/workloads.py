"""Requests for the benches: how long, how many, and taken from endless streams that a seed reproduces."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens, uniform from ``low`` to ``high``.

    Raises:
        ValueError: ``low`` is below 1 or above ``high``.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"lengths {self.low}-{self.high} are not allowed: from at least 1, up to no less than that")

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read "128", or "16-512" for a mix.

        Raises:
            ValueError: it is neither.
        """
        low, dash, high = text.partition("-")
        try:
            return cls(int(low), int(high if dash else low))
        except ValueError as error:
            raise ValueError(f"{text!r} is not a length: allowed are 128, or 16-512 for a mix, of 1 or more tokens") from error

    @property
    def is_mixed(self) -> bool:
        """Whether lengths differ."""
        return self.low < self.high

    def stream(self, seed: int | str) -> Iterator[int]:
        """Draw lengths without end; streams that must not go together need different seeds, such as "0/outputs"."""
        generator = random.Random(seed)
        while True:
            yield generator.randint(self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low}-{self.high}" if self.is_mixed else str(self.low)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that arrive together; the end of sequence is ignored, so request i generates ``output_lens[i]`` tokens."""

    prompts: list[list[int]]
    output_lens: list[int]

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def num_output_tokens(self) -> int:
        """Tokens that all requests generate together."""
        return sum(self.output_lens)


def take_workload(prompts: Iterator[list[int]], num_requests: int, output_lens: Iterator[int]) -> Workload:
    """Make a workload of the next prompts and lengths of two streams."""
    return Workload(list(islice(prompts, num_requests)), list(islice(output_lens, num_requests)))
