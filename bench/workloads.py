"""Requests for the benches: how long, how many, and when, whatever the engine does (an open loop), reproducible from a seed."""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

from titan.core.terms import RequestTerms

NUM_WARM_UP_TOKENS = 16
"""Most tokens that a request of a warm-up generates."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens, uniform from ``low``, at least 1, to ``high``."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read "128", or "16-512" for a mix, as a type of `argparse`.

        Raises:
            argparse.ArgumentTypeError: it is neither.
        """
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
        lengths = match and cls(int(match[1]), int(match[2] or match[1]))
        if not lengths or not 1 <= lengths.low <= lengths.high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a length: allowed are 128, or 16-512 for a mix, of 1 or more tokens")
        return lengths

    @property
    def is_mixed(self) -> bool:
        return self.low < self.high

    def stream(self, seed: int | str) -> Iterator[int]:
        """Sample lengths without end; streams that must not go together need different seeds, such as "0/outputs"."""
        generator = random.Random(seed)
        while True:
            yield generator.randint(self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low}-{self.high}" if self.is_mixed else str(self.low)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests; the end of sequence is ignored, so request i generates ``output_lens[i]`` tokens.

    ``arrivals`` are seconds in ascending order; all arrive at 0 if there are none. ``terms`` are the usual ones if there are none.
    """

    prompts: list[list[int]]
    output_lens: list[int]
    arrivals: Sequence[float] = ()
    terms: Sequence[RequestTerms] = ()

    def __post_init__(self) -> None:
        if not self.arrivals:
            object.__setattr__(self, "arrivals", [0.0] * len(self.prompts))
        if not self.terms:
            object.__setattr__(self, "terms", [RequestTerms()] * len(self.prompts))

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def max_len(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(len(prompt) + output_len for prompt, output_len in zip(self.prompts, self.output_lens, strict=True))

    def warm_up(self, num_requests: int) -> Workload:
        """The first requests, together and with few tokens each: with these a turn begins, as memory may have been put aside."""
        output_lens = [min(NUM_WARM_UP_TOKENS, each) for each in self.output_lens[:num_requests]]
        return Workload(self.prompts[:num_requests], output_lens)


def take_workload(prompts: Iterator[list[int]], num_requests: int, output_lens: Iterator[int]) -> Workload:
    """Make a workload of the next prompts and lengths of two streams."""
    return Workload(list(islice(prompts, num_requests)), list(islice(output_lens, num_requests)))


def draw_arrivals(num_requests: int, seed: int) -> list[float]:
    """Seconds of a Poisson process, from 0 on, with a mean gap of 1 s; the same seed gives the same times."""
    generator = random.Random(seed)
    return list(accumulate((generator.expovariate(1.0) for _ in range(num_requests - 1)), initial=0.0))
