"""Requests for the benches: how long, how many, and when, whatever the engine does (an open loop), reproducible from a seed."""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import NamedTuple

from titan.core.terms import RequestTerms

BURSTY = re.compile(r"bursty(?::(\d*\.?\d+))?")
TRACE_LINE = re.compile(r"\s*(-?\d+\.?\d*)[\s,]+([1-9]\d*)[\s,]+([1-9]\d*)\s*")


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


def take_workload(prompts: Iterator[list[int]], num_requests: int, output_lens: Iterator[int]) -> Workload:
    """Make a workload of the next prompts and lengths of two streams."""
    return Workload(list(islice(prompts, num_requests)), list(islice(output_lens, num_requests)))


def read_text(path: Path, name: str) -> str:
    """Read a file that a user named.

    Raises:
        ValueError: it cannot be read; the message begins with ``name``.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} cannot be read as text in UTF-8: {error}") from error


class TraceEntry(NamedTuple):
    """One request of a trace."""

    time: float  # seconds after the first
    prompt_len: int  # tokens
    output_len: int  # tokens


def read_variation(text: str) -> float:
    """Read "poisson", which is 1, "bursty", which is 3, or "bursty:5": the coefficient of variation of the gaps.

    Raises:
        ValueError: it is none of them.
    """
    bursty = BURSTY.fullmatch(text)
    variation = 1.0 if text == "poisson" else float(bursty[1] or 3) if bursty else 0.0
    if not variation:
        allowed = "poisson, bursty, bursty:VARIATION with a number above 0, or a trace's file"
        raise ValueError(f"arrivals {text!r} are not allowed: they must be {allowed}")
    return variation


def draw_arrivals(variation: float, num_requests: int, seed: int) -> list[float]:
    """Seconds, from 0 on, with a mean gap of 1 s; gaps are independent and gamma distributed.

    Args:
        variation: coefficient of variation of the gaps: at 1 it is a Poisson process, above 1 requests come in bursts.
        num_requests: how many, at least 1.
        seed: the same gives the same times.
    """
    generator = random.Random(seed)
    shape = 1 / variation**2
    return list(accumulate((generator.gammavariate(shape, 1 / shape) for _ in range(num_requests - 1)), initial=0.0))


def read_trace(path: Path) -> list[TraceEntry]:
    """Read a trace: lines of time in seconds, prompt tokens and output tokens, apart by commas or blanks.

    Empty lines and those that begin with # are left out. Requests come in the order of their times, which count from the first.

    Raises:
        ValueError: the file is no text, a line is none of this, or there is no request.
    """
    name = f"trace {str(path)!r}"
    entries: list[TraceEntry] = []
    for number, line in enumerate(read_text(path, name).splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = TRACE_LINE.fullmatch(line)
        if match is None:
            allowed = "time in seconds, prompt tokens, output tokens, 1 or more of each"
            raise ValueError(f"{name}, line {number}: {line!r} is not allowed: it must be {allowed}")
        entries.append(TraceEntry(float(match[1]), int(match[2]), int(match[3])))
    if not entries:
        raise ValueError(f"{name} is empty: it must have a line per request")
    entries.sort(key=lambda entry: entry.time)
    return [entry._replace(time=entry.time - entries[0].time) for entry in entries]
